"""What the dispatcher decides, driven event by event: no sockets, no threads, no clock."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import pytest

from engine_client.deadline import Deadline
from engine_client.dispatch.core import Core
from engine_client.dispatch.members import FENCE_DELAY, LAST_WORDS, PROBE_DELAYS, UNHEARD
from engine_client.dispatch.peers import Side
from engine_client.dispatch.registry import Registry
from engine_client.dispatch.requests import RequestTable
from engine_client.dispatch.waiting import PendingCall, Startup
from engine_client.engines import engine_id
from engine_client.errors import (
    EngineDeadError,
    EngineError,
    HandshakeError,
    NotSentError,
    RemoteError,
    ReplyError,
)
from engine_client.outcome import Failed, Ok
from engine_client.stats import ClientStats
from engine_client.wire.codec import codec_named
from engine_client.wire.messages import DEAD_SENTINEL, Hello, Init, Outputs, Ready, UtilityReply

FIRST_QUESTION = 10**9
"""Ids of the core's own calls begin here."""
INIT = Init(("ipc://in",), ("ipc://out",))
CBOR = codec_named("cbor")


class Rig:
    """A core, and a world that reports to it what its sockets would.

    Descriptors: engine K's input connection is ``10 + K`` and its output connection ``20 + K``,
    unless a test says otherwise.  Messages that the core wants to send go to ``sent``; an engine in
    ``unreachable`` cannot be reached.
    """

    def __init__(
        self,
        *indices: int,
        codec: Literal["auto", "cbor", "msgpack"] = "auto",
        init: Init | None = INIT,
        max_message_size: int = 2**20,
        client_index: int = 0,
    ) -> None:
        self.indices = indices or (0,)
        self.registry = Registry(self.indices, 2**20)
        self.stats = ClientStats()
        self.startup = Startup()
        self.core = Core(
            self.indices,
            self.registry,
            RequestTable(self.registry, 100),
            self.startup,
            self.stats,
            codec=codec,
            client_index=client_index,
            init=init,
            call_ids=itertools.count(FIRST_QUESTION),
            max_message_size=max_message_size,
        )
        self.now = 100.0
        self.sent: list[tuple[str, int, list[Any]]] = []
        """Channel, engine, and the decoded message: ``[type, payload]`` or ``[INIT]``."""
        self.unreachable: set[int] = set()
        self._ids = itertools.count(1)

    # -- what happens -----------------------------------------------------------------------------

    def flush(self) -> None:
        """Do what the loop does with the messages that the core left."""
        while self.core.outgoing:
            item = self.core.outgoing.popleft()
            if item.engine in self.unreachable:
                self.core.unreachable(item, self.now)
                continue
            _, *frames = item.frames
            content: list[Any] = [*frames[:-1]]
            # A call of the tests carries no payload that anybody reads.
            plain = item.work is None and not frames[-1].startswith(b"\x82\xa9addresses")
            content.append(CBOR.decode(frames[-1]) if plain else frames[-1])
            self.sent.append((item.channel, item.engine, content))
            if item.work is None:
                self.core.reached(item, self.now)

    def advance(self, seconds: float) -> None:
        """Let time pass, timer by timer."""
        end = self.now + seconds
        while True:
            timer = self.core.next_timer()
            if timer is None or timer > end:
                break
            self.now = max(self.now, timer)
            self.core.tick(self.now)
            self.flush()
        self.now = end

    def handshake(self, index: int, message: Hello | Ready, codec: str = "cbor") -> None:
        payload = codec_named(codec).encode(message.to_plain())
        self.core.handshake_frames([engine_id(index), payload], self.now)
        self.flush()

    def connect(self, side: Side, fd: int) -> None:
        self.core.connected(side, fd, self.now)
        self.flush()

    def lose(self, side: Side, fd: int) -> None:
        self.core.closing(side, fd)
        self.core.disconnected(side, fd, self.now)
        self.flush()

    def register(
        self, index: int, fd: int | None = None, ready: Mapping[str, Any] | None = None
    ) -> None:
        """An engine's input connection comes, and its registration on it."""
        descriptor = 10 + index if fd is None else fd
        if descriptor not in self.core.known("input"):
            self.connect("input", descriptor)
        payload = CBOR.encode(dict(ready or {"data_parallel_size": 1}))
        self.core.registration(engine_id(index), [payload], descriptor, self.now)
        self.flush()

    def start(self, index: int, ready: Mapping[str, Any] | None = None) -> None:
        """An engine starts completely; its output connection has no name yet."""
        self.handshake(index, Hello())
        self.register(index, ready=ready)
        self.connect("output", 20 + index)
        self.handshake(index, Ready())

    def output(self, fd: int, message: Outputs | bytes) -> None:
        frame = message if isinstance(message, bytes) else CBOR.encode(message.to_plain())
        self.core.output([frame], fd, self.now)
        self.flush()

    def reply(
        self, index: int, call: PendingCall | int, fd: int | None = None, value: Any = "done"
    ) -> None:
        call_id = call if isinstance(call, int) else call.call_id
        message = Outputs(index, utility=UtilityReply(call_id, None, value))
        self.output(20 + index if fd is None else fd, message)

    def say(self, index: int, fd: int | None = None) -> None:
        """An engine says something that answers nothing."""
        self.output(20 + index if fd is None else fd, Outputs(index))

    def call(self, *targets: int, method: str = "sleep") -> PendingCall:
        """A caller makes a call; its messages are sent."""
        call = PendingCall(
            next(self._ids),
            method,
            targets or self.indices,
            {"cbor": b"call", "msgpack": b"call"},
            Deadline(None),
            self.now,
        )
        assert self.registry.add(call, each=False)
        self.core.submit(call, self.now)
        self.flush()
        return call

    # -- what came of it --------------------------------------------------------------------------

    def alive(self) -> list[int]:
        return list(self.registry.alive())

    def questions(self) -> dict[int, int]:
        """The engines that were asked whether they are there, and the id of the last call."""
        return {
            engine: content[1][1]
            for channel, engine, content in self.sent
            if channel == "input" and content[0] == b"\x03" and content[1] != b"call"
        }

    def probes(self) -> list[int]:
        return [engine for _, engine, content in self.sent if content == [b"\x01", []]]

    def inits(self) -> list[int]:
        return [engine for channel, engine, _ in self.sent if channel == "handshake"]


def started(*indices: int, named: Iterable[int] | None = None, **options: Any) -> Rig:
    """Return a rig whose engines started side by side; those in ``named`` have spoken already."""
    rig = Rig(*indices, **options)
    for index in rig.indices:
        rig.handshake(index, Hello())
    for index in rig.indices:
        rig.register(index)
        rig.connect("output", 20 + index)
        rig.handshake(index, Ready())
    assert rig.startup.finished
    assert rig.startup.error is None
    for index in rig.indices if named is None else named:
        rig.say(index)
    assert rig.alive() == list(rig.indices)
    assert rig.stats.deaths == 0
    return rig


def error_of(call: PendingCall, index: int) -> EngineError:
    """Return the error with which one engine's part settled; it must have."""
    outcome = call.futures[index].result(0)
    assert isinstance(outcome, Failed), outcome
    return outcome.error


def value_of(call: PendingCall, index: int) -> Any:
    outcome = call.futures[index].result(0)
    assert isinstance(outcome, Ok), outcome
    return outcome.value


def waiting(call: PendingCall) -> list[int]:
    return sorted(call.waiting)


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="engine_client")


# -- the start ------------------------------------------------------------------------------------


@pytest.mark.parametrize("ready_first", [False, True])
def test_start_in_either_order(ready_first: bool) -> None:
    """READY and the registration come on two connections, in any order; both are awaited."""
    rig = Rig(0)
    assert rig.core.missing() == {0: "HELLO"}
    rig.handshake(0, Hello())
    assert rig.inits() == [0]
    assert rig.core.missing() == {0: "READY and registration"}
    for step in ("ready", "register") if ready_first else ("register", "ready"):
        assert not rig.startup.finished
        if step == "ready":
            rig.handshake(0, Ready())
        else:
            rig.register(0)
    assert rig.startup.finished
    assert rig.startup.error is None
    assert rig.alive() == [0]


def test_init_holds_the_addresses() -> None:
    """Every HELLO of an engine that is not alive gets an INIT, in its dialect."""
    rig = Rig(0)
    rig.handshake(0, Hello())
    rig.handshake(0, Hello())
    assert rig.sent == [("handshake", 0, [INIT.to_plain()])] * 2
    assert any("engine 0 said HELLO again" in note for note in rig.core.notes)
    rig.core.handshake_frames(
        [engine_id(0), codec_named("msgpack").encode(Hello().to_plain())], rig.now
    )
    frames = rig.core.outgoing.popleft().frames
    assert codec_named("msgpack").decode(frames[1]) == INIT.to_plain()


@pytest.mark.parametrize("what", ["ready", "registration"])
def test_without_hello(what: str) -> None:
    """READY or a registration without HELLO is an earlier client's engine; the note says so."""
    rig = Rig(0)
    if what == "ready":
        rig.handshake(0, Ready())
    else:
        rig.register(0)
    assert rig.alive() == []
    assert rig.core.missing() == {0: "HELLO"}
    (note,) = rig.core.notes
    assert "engine 0" in note
    assert "earlier client" in note
    assert rig.stats.stray_messages == 1


@pytest.mark.parametrize("identity", [b"", b"\x07", b"\x07\x00", b"\x00\x00\x00", b"x" * 255])
def test_strange_identities(identity: bytes) -> None:
    """A peer that is none of the engines is counted and noted, on both sockets; nobody answers."""
    rig = Rig(0, 1)
    hello = CBOR.encode(Hello().to_plain())
    rig.core.handshake_frames([identity, hello], rig.now)
    rig.connect("input", 30)
    rig.core.registration(identity, [CBOR.encode({})], 30, rig.now)
    assert rig.stats.stray_messages == 2
    assert len(rig.core.notes) == 2
    assert not rig.core.outgoing
    for index in (0, 1):
        rig.start(index)
    assert rig.startup.finished


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"\xff"],
        [b"GET / HTTP/1.1"],
        [b"\xa0"],
        [b"\xa1\x66status\x63BYE"],
        [b"\xa1\x66status\x01"],
        [CBOR.encode(Hello().to_plain()), b"more"],
        [b"\xa0" * 70_000],
    ],
)
def test_garbage_in_the_handshake(frames: list[bytes]) -> None:
    """Garbage of a known identity is counted and noted, and the engine can still start."""
    rig = Rig(0)
    rig.core.handshake_frames([engine_id(0), *frames], rig.now)
    assert rig.stats.stray_messages == 1
    assert "engine 0" in rig.core.notes[0]
    rig.start(0)
    assert rig.startup.finished
    assert rig.startup.error is None


@pytest.mark.parametrize(
    "frames", [[], [b"\x80\x80"], [b"\xff"], [b"\xa0", b"\xa0"], [b"\xa1\x01\x02"], [b"[]"]]
)
def test_garbage_as_registration(frames: list[bytes]) -> None:
    """A registration that cannot be read is noted; a good one on the same connection counts."""
    rig = Rig(0)
    rig.handshake(0, Hello())
    rig.connect("input", 10)
    rig.core.registration(engine_id(0), frames, 10, rig.now)
    assert rig.alive() == []
    assert rig.stats.stray_messages == 1
    rig.register(0)
    assert rig.alive() == [0]


def test_forced_dialect() -> None:
    """An engine that speaks another dialect than the forced one ends the start, with the reason."""
    rig = Rig(0, 1, codec="msgpack")
    rig.handshake(1, Hello(), codec="cbor")
    assert rig.startup.finished
    error = rig.startup.error
    assert isinstance(error, HandshakeError)
    assert "engine 1 speaks cbor" in str(error)
    assert "codec='msgpack'" in str(error)
    assert error.missing == (0, 1)
    assert rig.inits() == []


def test_empty_registration() -> None:
    """An empty registration needs a dialect from the HELLO, or a forced one."""
    greeted = Rig(0)
    greeted.handshake(0, Hello())
    greeted.connect("input", 10)
    greeted.core.registration(engine_id(0), [b""], 10, greeted.now)
    assert greeted.alive() == [0]
    assert greeted.registry.engines[0].codec == "cbor"
    unknown = Rig(0, init=None)
    unknown.connect("input", 10)
    unknown.core.registration(engine_id(0), [b""], 10, unknown.now)
    assert isinstance(unknown.startup.error, HandshakeError)
    assert "codec='cbor'" in str(unknown.startup.error)
    forced = Rig(0, init=None, codec="msgpack")
    forced.connect("input", 10)
    forced.core.registration(engine_id(0), [b""], 10, forced.now)
    assert forced.startup.finished
    assert forced.startup.error is None
    assert forced.registry.engines[0].codec == "msgpack"


def test_lost_during_the_start() -> None:
    """An engine that is lost before the others are ready is awaited anew, and may return."""
    rig = Rig(0, 1)
    rig.start(0)
    rig.lose("output", 20)
    rig.lose("input", 10)
    rig.advance(LAST_WORDS)
    assert rig.alive() == []
    rig.start(1)
    assert rig.core.missing() == {0: "HELLO"}
    rig.start(0)
    assert rig.startup.finished
    assert rig.startup.error is None
    assert rig.alive() == [0, 1]


def test_cut_off_during_the_start() -> None:
    """An engine whose connections break during the start and come back needs no second HELLO."""
    rig = Rig(0, 1)
    rig.start(0)
    rig.unreachable.add(0)
    rig.lose("input", 10)
    rig.lose("output", 20)
    rig.start(1)
    rig.connect("input", 30)
    rig.connect("output", 31)
    rig.unreachable.clear()
    rig.advance(PROBE_DELAYS[0])
    assert rig.startup.finished
    assert rig.startup.error is None
    assert rig.alive() == [0, 1]


def test_bootstrapped_start() -> None:
    """Where another process greets the engines, a registration is all that is awaited."""
    rig = Rig(3, 4, init=None)
    assert rig.core.missing() == {3: "registration", 4: "registration"}
    rig.register(3)
    rig.register(4)
    assert rig.startup.finished
    rig.lose("input", 13)
    rig.advance(LAST_WORDS)
    assert rig.alive() == [4]
    rig.register(3, fd=33)
    assert rig.alive() == [3, 4]
    assert rig.stats.returns == 1


# -- deaths that have a name ----------------------------------------------------------------------


@pytest.mark.parametrize("named", [[], [0, 1, 2]])
@pytest.mark.parametrize("order", [["input", "output"], ["output", "input"]])
def test_death_of_one(named: list[int], order: list[Side]) -> None:
    """A killed engine loses both connections: it is dead, and nobody else is even asked."""
    rig = started(0, 1, 2, named=named)
    call = rig.call()
    fds = {"input": 11, "output": 21}
    rig.unreachable.add(1)
    for side in order:
        rig.lose(side, fds[side])
    assert waiting(call) == [0, 2]
    error = error_of(call, 1)
    assert isinstance(error, EngineDeadError)
    assert error.engine == 1
    assert error.may_have_run
    assert "engine 1 died before it replied to sleep" in str(error)
    rig.advance(60)
    assert rig.alive() == [0, 2]
    assert rig.questions() == {}
    assert rig.stats.deaths == 1
    rig.reply(0, call)
    rig.reply(2, call)
    assert value_of(call, 0) == value_of(call, 2) == "done"
    assert rig.registry.pending() == 0


def test_deaf() -> None:
    """An engine whose input connection is lost is dead, though it can still talk; in a moment."""
    rig = started(0, 1)
    call = rig.call()
    rig.unreachable.add(1)
    rig.lose("input", 11)
    rig.advance(LAST_WORDS)
    assert waiting(call) == [0]
    assert isinstance(error_of(call, 1), EngineDeadError)
    rig.advance(60)
    assert rig.alive() == [0]


def test_last_words() -> None:
    """A reply that is read shortly after the loss of the input connection still counts."""
    rig = started(0, 1)
    call = rig.call()
    rig.lose("input", 11)
    rig.advance(LAST_WORDS / 2)
    rig.reply(1, call)
    rig.lose("output", 21)
    assert value_of(call, 1) == "done"
    assert rig.alive() == [0]


def test_mute() -> None:
    """An engine whose named output connection is lost is dead at once, though it can still hear."""
    rig = started(0, 1)
    call = rig.call()
    rig.lose("output", 21)
    assert waiting(call) == [0]
    assert rig.alive() == [0]
    rig.advance(60)
    assert rig.alive() == [0]


def test_unreachable() -> None:
    """What cannot be delivered never ran, what was delivered before may have; it is dead."""
    rig = started(0, 1)
    before = rig.call()
    rig.unreachable.add(1)
    call = rig.call()
    assert waiting(call) == waiting(before) == [0]
    assert not error_of(call, 1).may_have_run
    assert error_of(before, 1).may_have_run
    assert "no connection" in str(error_of(call, 1))
    assert rig.alive() == [0]


def test_calls_behind_a_death() -> None:
    """A call in the outbox when its engine dies is not sent to it, and says so."""
    rig = started(0, 1)
    call = PendingCall(99, "sleep", (0, 1), {"cbor": b"call"}, Deadline(None), rig.now)
    assert rig.registry.add(call, each=False)
    rig.lose("output", 21)
    rig.core.submit(call, rig.now)
    rig.flush()
    assert not error_of(call, 1).may_have_run
    assert waiting(call) == [0]
    assert [engine for _, engine, content in rig.sent if content[-1] == b"call"] == [0]


def test_a_death_before_the_send() -> None:
    """What still waits to be sent when its engine dies never is, and says that it has not run."""
    rig = started(0, 1)
    call = PendingCall(99, "sleep", (0, 1), {"cbor": b"call"}, Deadline(None), rig.now)
    assert rig.registry.add(call, each=False)
    rig.core.submit(call, rig.now)  # and no flush: the loss is read in the same turn
    rig.lose("output", 21)
    assert not error_of(call, 1).may_have_run
    assert waiting(call) == [0]
    assert [engine for _, engine, content in rig.sent if content[-1] == b"call"] == [0]


def test_replaced_by_another_dialect() -> None:
    """A call encoded for the old dialect is not sent to a restarted engine that speaks another."""
    rig = started(0)
    call = PendingCall(99, "sleep", (0,), {"msgpack": b"call"}, Deadline(None), rig.now)
    assert rig.registry.add(call, each=False)
    rig.core.submit(call, rig.now)
    error = error_of(call, 0)
    assert isinstance(error, NotSentError)
    assert not error.may_have_run


def test_process_exit_during_the_start() -> None:
    """A launched engine that exits before it is ready ends the start with its last words."""
    rig = Rig(0, 1)
    rig.start(0)
    rig.core.process_exited(1, "exited with code 3; its last words: no memory", rig.now)
    error = rig.startup.error
    assert isinstance(error, HandshakeError)
    assert "engine 1" in str(error)
    assert "exited with code 3" in str(error)
    assert "no memory" in str(error)
    assert error.missing == (1,)
    rig.core.process_exited(7, "exited with code 0", rig.now)  # not one of ours


def test_process_exit() -> None:
    """A process's exit is a death; known already by its connections, it tells the cause."""
    rig = started(0, 1)
    call = rig.call()
    rig.core.process_exited(0, "was ended by signal 9", rig.now)
    assert "its process was ended by signal 9" in str(error_of(call, 0))
    rig.lose("output", 21)
    assert rig.registry.engines[1].death != "its process exited with code 1"
    rig.core.process_exited(1, "exited with code 1", rig.now)
    assert rig.registry.engines[1].death == "its process exited with code 1"
    assert rig.stats.deaths == 2
    rig.connect("output", 41)
    rig.connect("input", 42)
    rig.advance(60)
    assert rig.alive() == []  # nobody was asked back


# -- output connections without a name ------------------------------------------------------------


def test_mute_engine_among_silent_ones() -> None:
    """Of engines that never spoke one turns mute: a question to each finds out which."""
    rig = started(0, 1, 2, named=[])
    call = rig.call()
    rig.lose("output", 21)
    assert waiting(call) == [0, 1, 2]
    rig.advance(FENCE_DELAY)
    questions = rig.questions()
    assert set(questions) == {0, 1, 2}
    assert rig.alive() == [0, 1, 2]
    rig.reply(2, questions[2])
    assert rig.alive() == [0, 1, 2]
    rig.reply(0, questions[0])
    assert rig.alive() == [0, 2]
    assert waiting(call) == [0, 2]
    assert isinstance(error_of(call, 1), EngineDeadError)
    assert rig.stats.late_replies == 0
    assert rig.stats.malformed_messages == 0


def test_mute_engine_named_by_the_others() -> None:
    """When all others have spoken, a nameless connection's loss needs no question."""
    rig = started(0, 1, 2, named=[0, 2])
    call = rig.call()
    rig.lose("output", 21)
    assert waiting(call) == [0, 2]
    rig.advance(60)
    assert 0 not in rig.questions()
    assert 2 not in rig.questions()


def test_only_engine_turns_mute() -> None:
    """A client's only engine loses its only output connection: dead at once."""
    rig = started(0, named=[])
    call = rig.call()
    rig.lose("output", 20)
    assert isinstance(error_of(call, 0), EngineDeadError)


def test_a_busy_engine_is_not_taken_for_the_mute_one() -> None:
    """While two engines may be the mute one, neither dies, however long both stay silent."""
    rig = started(0, 1, 2, named=[])
    call = rig.call()
    rig.lose("output", 21)
    rig.advance(FENCE_DELAY)
    rig.reply(2, rig.questions()[2])
    rig.advance(3600)
    assert rig.alive() == [0, 1, 2]
    rig.reply(0, call)  # at last; the question lies behind it
    assert rig.alive() == [0, 2]
    assert value_of(call, 0) == "done"


def test_output_connection_on_its_way() -> None:
    """An engine that has registered is not dead because its output connection takes its time."""
    rig = Rig(0, 1)
    for index in (0, 1):
        rig.handshake(index, Hello())
        rig.register(index)
        rig.handshake(index, Ready())
    assert rig.startup.finished
    rig.connect("output", 21)  # whose, nobody knows
    call = rig.call()
    rig.reply(1, call)
    assert rig.alive() == [0, 1]
    assert rig.stats.deaths == 0
    rig.connect("output", 20)
    rig.reply(0, call)
    assert value_of(call, 0) == value_of(call, 1) == "done"


def test_output_connection_before_the_registration() -> None:
    """The output connection of an engine whose registration is still unread is not another's."""
    rig = Rig(0, 1)
    rig.handshake(0, Hello())
    rig.handshake(1, Hello())
    rig.register(0)
    rig.connect("output", 21)  # engine 1's; engine 0 seems to have one now
    rig.register(1)
    rig.say(1, fd=21)
    assert rig.alive() == [0, 1]
    rig.connect("output", 20)
    rig.lose("output", 20)
    assert rig.alive() == [1]


@pytest.mark.parametrize("registered", [True, False])
def test_loss_while_an_output_connection_is_on_its_way(registered: bool) -> None:
    """Another engine's output connection, which came and went, is not the one still awaited."""
    rig = Rig(0, 1)
    rig.handshake(0, Hello())
    rig.handshake(1, Hello())
    rig.register(0)
    if registered:
        rig.register(1)
    rig.connect("output", 21)
    rig.lose("output", 21)
    rig.advance(60)
    assert 0 in rig.alive()
    assert rig.stats.deaths == 0
    rig.connect("output", 20)
    call = rig.call(0)
    rig.reply(0, call)
    assert value_of(call, 0) == "done"


def test_loss_of_a_returning_engine_while_another_restarts() -> None:
    """A cut-off engine's output connection does not count for one whose own is on its way."""
    rig = started(0, 1)
    rig.unreachable |= {0, 1}
    for fd in (0, 1):
        rig.lose("input", 10 + fd)
        rig.lose("output", 20 + fd)
    rig.unreachable.discard(0)
    rig.handshake(0, Hello())
    rig.register(0)
    rig.connect("output", 41)  # engine 1's, which cannot be reached yet
    rig.lose("output", 41)
    rig.advance(60)
    assert rig.alive() == [0]


def test_engines_that_started_one_after_the_other() -> None:
    """Which connections are too old to be an engine's own narrows the choice, never wrongly."""
    rig = Rig(0, 1, 2)
    for index in (0, 1, 2):
        rig.start(index)
    call = rig.call()
    rig.lose("output", 21)
    rig.advance(FENCE_DELAY)
    questions = rig.questions()
    rig.reply(2, questions[2])
    rig.reply(0, questions[0])
    assert rig.alive() == [0, 2]
    assert waiting(call) == [0, 2]


def test_restarted_engine_among_silent_ones() -> None:
    """A restarted engine, too, gets time for its output connection; and is missed afterwards."""
    rig = started(0, 1, named=[])
    rig.unreachable.add(1)
    rig.lose("input", 11)
    rig.lose("output", 21)
    rig.unreachable.clear()
    rig.handshake(1, Hello())
    rig.register(1)
    assert rig.alive() == [0, 1]
    rig.say(0)
    assert rig.alive() == [0, 1]
    rig.connect("output", 31)
    rig.lose("output", 31)
    assert rig.alive() == [0]


def test_strangers_connection() -> None:
    """A stranger's connection that comes and goes is nobody's death, at whatever time."""
    rig = Rig(0, 1)
    rig.connect("output", 90)
    rig.start(0)
    rig.connect("output", 91)
    rig.start(1)
    rig.lose("output", 90)
    call = rig.call()
    rig.lose("output", 91)
    rig.advance(60)
    assert rig.alive() == [0, 1]
    assert rig.stats.deaths == 0
    assert waiting(call) == [0, 1]
    assert rig.questions() == {}


@pytest.mark.parametrize("delay", [UNHEARD, 4, 30])
def test_an_output_connection_is_lost_while_another_engine_starts(delay: float) -> None:
    """It could have been of either.  Whenever the other answers, it names its own, and this one
    cannot be heard; it is asked twice only.
    """
    rig = Rig(0, 1)
    rig.handshake(0, Hello())
    rig.handshake(1, Hello())
    rig.register(1)
    rig.connect("output", 21)
    rig.connect("output", 20)
    rig.lose("output", 21)
    rig.register(0)
    rig.handshake(0, Ready())
    rig.handshake(1, Ready())
    call = rig.call(1)
    rig.advance(delay)
    asked = [engine for _, engine, content in rig.sent if content[0] == b"\x03"]
    assert asked.count(0) == min(2, delay // UNHEARD)
    assert waiting(call) == [1]
    rig.reply(0, rig.questions()[0])
    rig.advance(UNHEARD)
    assert isinstance(error_of(call, 1), EngineDeadError)
    assert rig.alive() == [0]


@pytest.mark.parametrize("how", ["lost", "sentinel"])
def test_a_connection_from_before_an_engine_was_invited_is_not_its_own(how: str) -> None:
    """A stranger's, say: that it is lost says nothing about the engine."""
    rig = Rig(0, 1)
    rig.start(0)
    rig.say(0)
    rig.connect("output", 90)
    rig.handshake(1, Hello())
    rig.register(1)
    rig.handshake(1, Ready())
    call = rig.call(1)
    if how == "sentinel":
        rig.output(90, DEAD_SENTINEL)
    rig.lose("output", 90)
    rig.advance(1.5)
    rig.connect("output", 21)
    rig.advance(30)
    assert rig.alive() == [0, 1]
    rig.reply(1, call)
    assert value_of(call, 1) == "done"


@pytest.mark.parametrize("odd", [[], {}, [[1]], None, 7, True])
def test_an_odd_request_id_on_a_connection_of_the_past(odd: Any) -> None:
    """It is looked up among the live ones, which not every value can be."""
    rig = started(0)
    rig.register(0, fd=30)
    rig.output(20, CBOR.encode([0, [[odd, [1]]]]))
    rig.output(20, CBOR.encode([0, [odd]]))
    assert not rig.registry.ended


def test_many_faults_in_a_message_are_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    """Each is counted; three are told."""
    rig = started(0)
    caplog.clear()
    rig.output(20, CBOR.encode([0, [[]] * 1000]))
    assert rig.stats.malformed_messages == 1000
    assert len(caplog.records) == 4
    assert "997 more" in caplog.text


def test_garbage_where_two_share_a_connection_fails_both() -> None:
    """Even if one of them has spoken on it, before it was registered."""
    rig = Rig(0, 1)
    rig.handshake(0, Hello())
    rig.handshake(1, Hello())
    rig.connect("output", 20)
    rig.say(0, 20)
    for index in (0, 1):
        rig.register(index)
        rig.handshake(index, Ready())
    call = rig.call()
    rig.output(20, b"\xff")
    assert waiting(call) == []


def test_reconnected_while_nobody_knew_it() -> None:
    """A nameless output connection is lost and comes back before anybody is asked: what the engine
    said in between may be lost, so what was in flight there fails; nothing else does.
    """
    rig = started(0, 1, 2, named=[])
    call = rig.call()
    other = rig.call(1)
    rig.lose("output", 21)
    rig.connect("output", 41)
    rig.advance(FENCE_DELAY)
    questions = rig.questions()
    assert set(questions) == {0, 1, 2}
    rig.reply(0, questions[0])
    rig.reply(1, other, fd=41)
    assert value_of(other, 1) == "done"
    assert isinstance(error_of(call, 1), EngineDeadError)
    rig.reply(2, questions[2])
    assert waiting(call) == [0, 2]
    assert rig.alive() == [0, 1, 2]


def test_reconnected_and_found_out_by_the_others() -> None:
    """When all others have spoken on older connections, it need not speak to be the one that lost
    its own; and it is alive again at once.
    """
    rig = started(0, 1, named=[])
    call = rig.call()
    rig.lose("output", 21)
    rig.connect("output", 41)
    rig.advance(FENCE_DELAY)
    rig.reply(0, rig.questions()[0])
    assert isinstance(error_of(call, 1), EngineDeadError)
    assert waiting(call) == [0]
    rig.advance(PROBE_DELAYS[1])
    assert rig.alive() == [0, 1]
    again = rig.call(1)
    rig.reply(1, again, fd=41)
    assert value_of(again, 1) == "done"


def test_two_engines_turn_mute() -> None:
    """Two of three engines that never spoke lose their output connections, one after the other."""
    rig = started(0, 1, 2, named=[])
    call = rig.call()
    rig.lose("output", 21)
    rig.lose("output", 22)
    rig.advance(FENCE_DELAY)
    rig.reply(0, rig.questions()[0])
    assert rig.alive() == [0]
    assert waiting(call) == [0]


def test_killed_and_mute_together() -> None:
    """One engine is killed and another turns mute in the same moment, both nameless."""
    rig = started(0, 1, 2, named=[])
    call = rig.call()
    rig.unreachable.add(1)
    rig.lose("output", 22)
    rig.lose("output", 21)
    rig.lose("input", 11)
    rig.advance(LAST_WORDS)
    assert rig.alive() == [0, 2]
    rig.advance(FENCE_DELAY)
    rig.reply(0, rig.questions()[0])
    assert rig.alive() == [0]
    assert waiting(call) == [0]


def test_question_names_the_client() -> None:
    """The question asks for its reply on this client's own output address."""
    rig = started(0, 1, named=[], client_index=2)
    rig.lose("output", 20)
    rig.advance(FENCE_DELAY)
    asked = [content for _, _, content in rig.sent if content[0] == b"\x03"]
    assert asked == [[b"\x03", [2, FIRST_QUESTION + n, "is_sleeping", []]] for n in (0, 1)]


# -- the dead sentinel ----------------------------------------------------------------------------


def test_sentinel_on_a_named_connection() -> None:
    """The sentinel names no engine: it is that of the connection, refused at once and for good."""
    rig = started(0, 1)
    call = rig.call()
    rig.output(21, DEAD_SENTINEL)
    assert waiting(call) == [0]
    assert "ENGINE_CORE_DEAD" in str(error_of(call, 1))
    rig.reply(1, call)
    assert rig.stats.late_replies == 1
    rig.lose("output", 21)
    rig.connect("output", 41)
    rig.advance(60)  # its input connection is still there
    assert rig.alive() == [0]
    rig.lose("input", 11)
    rig.start(1)
    assert rig.alive() == [0, 1]


def test_sentinel_of_the_only_engine() -> None:
    """A client's only engine needs no name to be the one that reports its death."""
    rig = started(0, named=[])
    call = rig.call()
    rig.output(20, DEAD_SENTINEL)
    assert "ENGINE_CORE_DEAD" in str(error_of(call, 0))


def test_sentinel_on_a_nameless_connection() -> None:
    """Which engine died is asked at once, and the one that does not answer is dead for good."""
    rig = started(0, 1, 2, named=[])
    call = rig.call()
    rig.output(21, DEAD_SENTINEL)
    rig.advance(0)
    questions = rig.questions()
    assert set(questions) == {0, 1, 2}
    rig.reply(0, questions[0])
    rig.reply(2, questions[2])
    assert rig.alive() == [0, 2]
    assert waiting(call) == [0, 2]
    assert "ENGINE_CORE_DEAD" in str(error_of(call, 1))
    rig.lose("output", 21)
    rig.connect("output", 41)
    rig.advance(60)
    assert rig.alive() == [0, 2]


def test_sentinel_of_a_stranger() -> None:
    """A stranger's sentinel kills nobody: every engine's own connection is accounted for."""
    rig = started(0, 1, named=[])
    rig.connect("output", 90)
    rig.output(90, DEAD_SENTINEL)
    rig.output(-1, DEAD_SENTINEL)
    rig.advance(60)
    assert rig.alive() == [0, 1]
    assert rig.questions() == {}


# -- another process in its place -----------------------------------------------------------------


def test_hello_from_a_living_index() -> None:
    """A second process waits: the first is probed, and INIT is sent when that one is gone."""
    rig = started(0, 1)
    inits = len(rig.inits())
    call = rig.call()
    rig.handshake(1, Hello())
    assert rig.probes() == [1]
    assert len(rig.inits()) == inits
    assert any("engine 1 is alive, but another process" in note for note in rig.core.notes)
    assert waiting(call) == [0, 1]
    rig.lose("output", 21)
    assert rig.inits()[inits:] == [1]
    assert waiting(call) == [0]
    rig.register(1, fd=31)
    rig.connect("output", 41)
    assert rig.alive() == [0, 1]
    again = rig.call()
    rig.reply(1, again, fd=41)
    assert value_of(again, 1) == "done"


def test_hello_when_the_first_is_gone_unnoticed() -> None:
    """The probe that HELLO causes finds out that the first process is gone."""
    rig = started(0)
    call = rig.call()
    rig.unreachable.add(0)
    inits = len(rig.inits())
    rig.core.handshake_frames([engine_id(0), CBOR.encode(Hello().to_plain())], rig.now)
    item = rig.core.outgoing.popleft()
    rig.core.unreachable(item, rig.now)
    rig.unreachable.clear()
    rig.flush()
    assert len(rig.inits()) == inits + 1
    assert isinstance(error_of(call, 0), EngineDeadError)


def test_hello_just_after_the_loss() -> None:
    """A HELLO while the last words of the dead process are awaited is answered at once."""
    rig = started(0)
    inits = len(rig.inits())
    rig.lose("input", 10)
    assert rig.alive() == [0]
    rig.handshake(0, Hello())
    assert rig.alive() == []
    assert len(rig.inits()) == inits + 1


def test_the_first_returns_while_the_second_loads() -> None:
    """Once a second process has its INIT, the first one's return does not count any more."""
    rig = started(0)
    rig.handshake(0, Hello())
    rig.lose("output", 20)
    rig.connect("output", 30)
    rig.advance(60)
    assert rig.alive() == []
    rig.say(0, fd=30)
    assert rig.alive() == []
    rig.register(0, fd=31)
    rig.connect("output", 32)
    assert rig.alive() == [0]
    call = rig.call()
    rig.reply(0, call, fd=32)
    assert value_of(call, 0) == "done"
    assert rig.alive() == [0]


def test_init_for_a_process_that_left() -> None:
    """The second process gave up before its INIT: a third one's HELLO is answered."""
    rig = started(0)
    rig.handshake(0, Hello())
    inits = len(rig.inits())
    rig.unreachable.add(0)
    rig.lose("output", 20)
    rig.flush()
    rig.unreachable.clear()
    assert len(rig.inits()) == inits
    assert rig.core.missing() == {0: "HELLO"}
    rig.handshake(0, Hello())
    assert len(rig.inits()) == inits + 1


def test_registration_from_another_connection() -> None:
    """It replaces the old incarnation: that one's waiters fail, and what it still says is late."""
    rig = started(0, 1)
    call = rig.call()
    rig.register(1, fd=31)
    error = error_of(call, 1)
    assert isinstance(error, EngineDeadError)
    assert error.may_have_run
    assert "replaced" in str(error)
    assert waiting(call) == [0]
    assert rig.alive() == [0, 1]
    assert (rig.stats.deaths, rig.stats.returns) == (1, 1)
    rig.reply(1, call)
    rig.say(1)
    assert rig.stats.late_replies == 2
    after = rig.call(1)
    rig.lose("output", 21)
    rig.lose("input", 11)
    rig.advance(60)
    assert waiting(after) == [1]
    rig.connect("output", 41)
    rig.reply(1, after, fd=41)
    assert value_of(after, 1) == "done"
    rig.register(1, fd=31)  # once more, as some engines do
    assert rig.stats.deaths == 1
    rig.lose("input", 31)
    rig.advance(LAST_WORDS)
    assert rig.alive() == [0]


def test_old_nameless_connection_of_a_restarted_engine() -> None:
    """What the old process still says on a connection from before its successor's INIT is late."""
    rig = started(0, named=[])
    rig.unreachable.add(0)
    rig.lose("input", 10)
    rig.advance(LAST_WORDS)
    rig.unreachable.clear()
    rig.handshake(0, Hello())
    rig.register(0, fd=30)
    rig.connect("output", 40)
    call = rig.call()
    rig.say(0, fd=20)
    assert rig.stats.late_replies == 1
    rig.reply(0, call, fd=40)
    assert value_of(call, 0) == "done"
    assert rig.stats.deaths == 1


def test_repeated_registration() -> None:
    """A registration that comes twice on one connection changes nothing."""
    rig = started(0)
    call = rig.call()
    rig.register(0)
    assert waiting(call) == [0]
    assert rig.stats.deaths == 0


def test_garbage_from_another_connection_under_a_living_identity() -> None:
    """ZeroMQ has handed the identity over: the engine cannot be reached, and that is told."""
    rig = started(0, 1)
    call = rig.call()
    rig.connect("input", 31)
    rig.core.registration(engine_id(1), [b"\xff"], 31, rig.now)
    rig.flush()
    assert waiting(call) == [0]
    assert "under its identity" in str(error_of(call, 1))
    rig.advance(60)
    assert rig.alive() == [0]
    rig.lose("input", 31)
    rig.lose("input", 11)
    rig.lose("output", 21)
    rig.start(1)
    assert rig.alive() == [0, 1]


def test_garbage_from_a_reconnected_engine() -> None:
    """What an engine sends on its new input connection gives that a name, and does no harm."""
    rig = started(0)
    rig.unreachable.add(0)
    rig.lose("input", 10)
    rig.advance(LAST_WORDS)
    rig.connect("input", 30)
    rig.unreachable.clear()
    rig.advance(PROBE_DELAYS[0])
    call = rig.call()
    rig.core.registration(engine_id(0), [b"\xff"], 30, rig.now)
    assert waiting(call) == [0]
    assert rig.alive() == [0]
    rig.lose("input", 30)
    rig.advance(LAST_WORDS)
    assert rig.alive() == []


def test_output_on_another_connection() -> None:
    """An engine speaks on a new connection: what was in flight fails, but not what it answers."""
    rig = started(0, 1)
    lost = rig.call()
    answered = rig.call()
    rig.connect("output", 41)
    rig.reply(1, answered, fd=41)
    assert value_of(answered, 1) == "done"
    assert "replaced" in str(error_of(lost, 1))
    assert waiting(lost) == [0]
    assert rig.alive() == [0, 1]
    rig.lose("output", 21)
    assert rig.alive() == [0, 1]
    rig.lose("output", 41)
    assert rig.alive() == [0]


def test_loss_after_an_output_on_another_connection() -> None:
    """An engine whose connections were forgotten is still missed when its input goes."""
    rig = started(0, 1)
    rig.connect("output", 41)
    rig.say(1, fd=41)
    call = rig.call()
    rig.unreachable.add(1)
    rig.lose("input", 11)
    rig.advance(PROBE_DELAYS[0])
    assert rig.alive() == [0]
    assert waiting(call) == [0]


def test_the_old_process_wins_after_all() -> None:
    """Of two processes with one identity the one that answers counts, also on old connections."""
    rig = started(0)
    rig.register(0, fd=30)  # a second process takes the identity over
    rig.connect("output", 40)
    rig.lose("input", 10)
    rig.lose("output", 40)  # and is gone again
    rig.lose("input", 30)
    rig.advance(LAST_WORDS)
    assert rig.alive() == []
    rig.connect("input", 50)  # the first one reconnects; its output was never cut
    rig.advance(PROBE_DELAYS[0])
    rig.reply(0, rig.questions()[0])
    assert rig.alive() == [0]
    call = rig.call()
    rig.reply(0, call)
    assert value_of(call, 0) == "done"


# -- return after a cut ---------------------------------------------------------------------------


def test_return_after_a_cut() -> None:
    """An engine that was only cut off is alive once it is reached; what was in flight failed."""
    rig = started(0, 1)
    call = rig.call()
    rig.unreachable.add(1)
    rig.lose("input", 11)
    rig.lose("output", 21)
    assert isinstance(error_of(call, 1), EngineDeadError)
    rig.advance(5)
    rig.connect("input", 31)
    rig.connect("output", 41)
    assert rig.alive() == [0]
    rig.unreachable.clear()
    rig.advance(PROBE_DELAYS[0])
    assert rig.alive() == [0, 1]
    assert (rig.stats.deaths, rig.stats.returns) == (1, 1)
    assert waiting(call) == [0]
    again = rig.call()
    rig.reply(1, again, fd=41)
    assert value_of(again, 1) == "done"
    rig.reply(1, call, fd=41)
    assert rig.stats.late_replies == 1


def test_return_waits_for_the_output_connection() -> None:
    """Other engines' nameless connections do not stand for the one that is still missing."""
    rig = started(0, 1, 2, named=[])
    rig.unreachable.add(1)
    rig.lose("input", 11)
    rig.lose("output", 21)
    rig.unreachable.clear()
    rig.connect("input", 31)
    rig.advance(1)
    assert rig.alive() == [0, 2]
    rig.connect("output", 41)
    rig.advance(PROBE_DELAYS[0])
    assert rig.alive() == [0, 1, 2]
    rig.say(0)
    rig.say(2)
    assert rig.alive() == [0, 1, 2]
    rig.lose("output", 41)
    assert rig.alive() == [0, 2]


def test_return_of_one_proves_the_other_mute() -> None:
    """A cut-off engine returns while a nameless one is in doubt: the answer tells them apart."""
    rig = started(0, 1, named=[])
    rig.unreachable.add(1)
    rig.lose("input", 11)
    rig.lose("output", 21)
    rig.lose("output", 20)
    assert rig.alive() == []
    rig.connect("input", 31)
    rig.connect("output", 41)
    rig.unreachable.clear()
    rig.advance(PROBE_DELAYS[0])
    asked = rig.questions()
    rig.reply(1, asked[1] if 1 in asked else rig.call(1), fd=41)
    assert 1 in rig.alive()


def test_return_of_the_input_only() -> None:
    """A deaf engine's input connection comes back: it serves again, its old output included."""
    rig = started(0)
    rig.unreachable.add(0)
    rig.lose("input", 10)
    rig.advance(LAST_WORDS)
    assert rig.alive() == []
    rig.connect("input", 30)
    rig.unreachable.clear()
    rig.advance(PROBE_DELAYS[0])
    assert rig.alive() == [0]
    call = rig.call()
    rig.reply(0, call)
    assert value_of(call, 0) == "done"


def test_return_of_the_output_only() -> None:
    """A mute engine's output connection comes back: its first word makes it alive again."""
    rig = started(0, 1)
    rig.lose("output", 21)
    assert rig.alive() == [0]
    rig.connect("output", 41)
    rig.say(1, fd=41)
    assert rig.alive() == [0, 1]
    rig.lose("input", 11)
    rig.advance(LAST_WORDS)
    assert rig.alive() == [0]


def test_loss_of_a_reconnected_input() -> None:
    """A reconnected input connection has no name: probes find out whose loss it is."""
    rig = started(0, 1)
    rig.unreachable.add(1)
    rig.lose("input", 11)
    rig.lose("output", 21)
    rig.connect("input", 31)
    rig.connect("output", 41)
    rig.unreachable.clear()
    rig.advance(PROBE_DELAYS[0])
    call = rig.call()
    rig.unreachable.add(1)
    rig.lose("input", 31)
    rig.advance(PROBE_DELAYS[0])
    assert rig.alive() == [0]
    assert waiting(call) == [0]


def test_cut_noticed_by_a_failed_send() -> None:
    """The way back was open before the death was noticed: the engine is found all the same."""
    rig = started(0)
    rig.connect("input", 30)
    rig.unreachable.add(0)
    call = rig.call()
    assert not error_of(call, 0).may_have_run
    rig.unreachable.clear()
    rig.advance(PROBE_DELAYS[1])
    assert rig.alive() == [0]


def test_descriptor_reused_by_another_engine() -> None:
    """A lost connection's number, taken by another engine's connection, is that engine's."""
    rig = started(0, 1)
    rig.unreachable.add(0)
    rig.lose("input", 10)
    rig.lose("output", 20)
    assert rig.alive() == [1]
    rig.unreachable.clear()
    rig.lose("output", 21)
    rig.connect("output", 20)  # engine 1 reconnects, on engine 0's old number
    rig.say(1, fd=20)
    assert rig.alive() == [1]
    rig.lose("output", 20)
    assert rig.alive() == []


def test_frame_on_a_number_that_changes_hands() -> None:
    """Between the news of a loss and its effect a number names nobody: frames are taken, but
    nothing is learned from them.
    """
    rig = started(0, 1, named=[0])
    call = rig.call()
    rig.core.closing("output", 20)
    rig.reply(1, call, fd=20)  # engine 1's new connection has engine 0's number
    assert value_of(call, 1) == "done"
    rig.core.disconnected("output", 20, rig.now)
    assert rig.alive() == [1]
    rig.connect("output", 20)
    rig.say(1, fd=20)
    assert rig.alive() == [1]


# -- lockstep groups ------------------------------------------------------------------------------


def lockstep(*others: int) -> Rig:
    rig = Rig(0, 1, *others)
    for index in (0, 1):
        rig.start(index, ready={"data_parallel_size": 2})
    for index in others:
        rig.start(index)
    return rig


def test_lockstep_group_dies_together() -> None:
    """One death ends the group, by what each registration said; others are not touched."""
    rig = lockstep(2)
    call = rig.call()
    rig.unreachable.add(0)
    rig.lose("input", 10)
    rig.lose("output", 20)
    assert rig.alive() == [2]
    assert waiting(call) == [2]
    assert "engine 0 of its lockstep group died" in str(error_of(call, 1))
    assert rig.stats.deaths == 2
    rig.connect("input", 90)
    rig.connect("output", 91)
    rig.advance(60)
    assert rig.alive() == [2]  # a group does not come back by itself


def test_lockstep_group_restarts() -> None:
    """Each member serves again once it is started again."""
    rig = lockstep()
    rig.lose("input", 10)
    rig.lose("output", 20)
    rig.lose("input", 11)
    rig.lose("output", 21)
    assert rig.alive() == []
    for index in (0, 1):
        rig.start(index, ready={"data_parallel_size": 2})
    assert rig.alive() == [0, 1]
    assert rig.stats.returns == 2


def test_one_that_starts_while_its_former_output_is_not_missed_yet() -> None:
    """Its new connection is not taken for that of another engine which is starting, too."""
    rig = started(0, 1)
    for index in (0, 1):
        rig.lose("input", 10 + index)
    rig.advance(LAST_WORDS)
    assert rig.alive() == []
    for index in (0, 1):
        rig.handshake(index, Hello())
    rig.connect("output", 40)
    rig.register(1, fd=31)
    rig.lose("output", 40)
    assert rig.alive() == [1]
    rig.connect("output", 41)
    rig.say(1, fd=41)
    assert rig.alive() == [1]


# -- bad bytes ------------------------------------------------------------------------------------


def broken_reply(index: int, call: PendingCall, codec: str = "cbor") -> bytes:
    """A reply whose value is cut off; engine index and call id can be read."""
    whole = codec_named(codec).encode(
        Outputs(index, utility=UtilityReply(call.call_id, None, "x" * 40)).to_plain()
    )
    return whole[:-30]


def test_broken_reply() -> None:
    """A reply with a readable call id fails that waiter, and nothing else."""
    rig = started(0, 1)
    other = rig.call()
    call = rig.call()
    rig.output(21, broken_reply(1, call))
    error = error_of(call, 1)
    assert isinstance(error, ReplyError)
    assert error.engine == 1
    assert error.may_have_run
    assert waiting(call) == [0]
    assert waiting(other) == [0, 1]
    assert rig.stats.malformed_messages == 1
    assert rig.alive() == [0, 1]


def test_broken_reply_on_a_nameless_connection() -> None:
    """A readable index and call id need no connection's name."""
    rig = started(0, 1, named=[])
    other = rig.call()
    call = rig.call()
    rig.output(21, broken_reply(1, call))
    assert isinstance(error_of(call, 1), ReplyError)
    assert waiting(call) == [0]
    assert waiting(other) == [0, 1]


def test_garbage_of_a_named_connection() -> None:
    """What cannot be read at all may have been any reply of that engine, of no other."""
    rig = started(0, 1)
    first = rig.call()
    second = rig.call()
    rig.output(21, b"\xff\xfe")
    for call in (first, second):
        assert isinstance(error_of(call, 1), ReplyError)
        assert waiting(call) == [0]
    assert rig.stats.malformed_messages == 1
    assert rig.alive() == [0, 1]


def test_garbage_of_a_nameless_connection() -> None:
    """It may have been a reply of each engine whose connection has no name yet."""
    rig = started(0, 1, 2, named=[2])
    call = rig.call()
    rig.output(21, b"")
    assert waiting(call) == [2]
    assert isinstance(error_of(call, 0), ReplyError)
    assert isinstance(error_of(call, 1), ReplyError)


def test_garbage_of_one_that_spoke_before_it_was_registered() -> None:
    """Its connection may be a former process's; but it is that of no engine of another index."""
    rig = Rig(0, 1)
    rig.start(1)
    rig.handshake(0, Hello())
    rig.connect("output", 20)
    rig.say(0)
    rig.register(0)
    rig.handshake(0, Ready())
    call = rig.call()
    rig.output(20, b"\xff")
    assert isinstance(error_of(call, 0), ReplyError)
    assert waiting(call) == [1]
    rig.output(21, b"\xff")
    assert isinstance(error_of(call, 1), ReplyError)
    assert rig.alive() == [0, 1]


def test_garbage_of_strangers() -> None:
    """Garbage that no engine can have sent fails nobody: from an old incarnation, from a
    connection without a descriptor (no engine speaks so old a protocol), from one too many.
    """
    rig = started(0, 1, named=[0])
    call = rig.call()
    rig.output(-1, b"GET / HTTP/1.1")
    assert waiting(call) == [0, 1]
    rig.say(1)
    rig.connect("output", 90)
    rig.output(90, b"\xff")
    assert waiting(call) == [0, 1]
    rig.register(0, fd=30)
    after = rig.call()
    rig.output(20, b"\xff")
    assert waiting(after) == [0, 1]
    assert rig.stats.malformed_messages == 3


@pytest.mark.parametrize("wrong", [0, 2, 9, 65_535])
def test_reply_under_a_wrong_index(wrong: int) -> None:
    """An index that the connection belies: the waiter of the engine that sent it fails."""
    rig = started(0, 1)
    other = rig.call()
    call = rig.call()
    rig.reply(wrong, call, fd=21)
    error = error_of(call, 1)
    assert isinstance(error, ReplyError)
    assert f"engine {wrong}" in str(error)
    assert waiting(call) == [0]
    assert waiting(other) == [0, 1]
    assert rig.alive() == [0, 1]
    rig.reply(0, call)
    assert value_of(call, 0) == "done"


def test_oversized_message() -> None:
    """A message over the limit is not decoded; its call fails, since the id can be read."""
    rig = started(0, 1, max_message_size=1000)
    call = rig.call()
    other = rig.call()
    rig.reply(1, call, value="x" * 2000)
    error = error_of(call, 1)
    assert isinstance(error, ReplyError)
    assert "max_message_size" in str(error)
    assert waiting(other) == [0, 1]
    rig.reply(0, call, value="x" * 900)
    assert value_of(call, 0) == "x" * 900
    message = CBOR.encode(Outputs(0, utility=UtilityReply(other.call_id, None, 1)).to_plain())
    rig.core.output([message, b"x" * 2000], 20, rig.now)
    assert isinstance(error_of(other, 0), ReplyError)


def test_unknown_duplicate_and_late_replies() -> None:
    """Each is counted and dropped; the right answers are not disturbed."""
    rig = started(0, 1)
    call = rig.call()
    rig.reply(0, 12_345)
    rig.reply(0, call, value="first")
    rig.reply(0, call, value="second")
    assert rig.stats.late_replies == 2
    rig.registry.abandoned.append(call)
    rig.registry.drain()
    rig.reply(1, call)
    assert rig.stats.late_replies == 3
    assert rig.stats.malformed_messages == 0


@pytest.mark.parametrize("value", [None, True, False, "long"])
def test_a_short_reply_counts_as_a_long_one(value: Any) -> None:
    """What is read by its shape alone is judged like everything else, wherever it comes."""
    rig = started(0, 1, named=[0], max_message_size=100)
    reply = CBOR.encode(Outputs(0, utility=UtilityReply(77, None, value), timestamp=1.5).to_plain())
    assert (CBOR.short_reply(reply) is None) == (value == "long")
    call, other = rig.call(), rig.call()
    rig.reply(0, call, value=value)
    assert value_of(call, 0) == value
    assert waiting(call) == [1]
    rig.reply(0, call, value=value)
    assert rig.stats.late_replies == 1
    # The first on a connection names it.
    rig.reply(1, call, value=value)
    assert value_of(call, 1) == value
    # A message of several frames, over the limit.
    message = Outputs(0, utility=UtilityReply(other.call_id, None, value)).to_plain()
    rig.core.output([CBOR.encode(message), b"x" * 100], 20, rig.now)
    assert isinstance(error_of(other, 0), ReplyError)
    # On the connection of another engine.
    rig.reply(1, other, fd=20, value=value)
    assert waiting(other) == [1]
    assert rig.stats.malformed_messages == 2
    rig.reply(1, other, value=value)
    assert value_of(other, 1) == value
    assert rig.stats.received == 7
    rig.core._max_message_size = 20
    last = rig.call()
    rig.reply(0, last, value=value)
    assert isinstance(error_of(last, 0), ReplyError)


@pytest.mark.parametrize("value", [None, "long"])
def test_a_held_call_goes_out_once_the_pause_is_answered(value: Any) -> None:
    """However short the last answer to the pause is."""
    rig = Rig(0, 1)
    for index in rig.indices:
        rig.start(index, {"data_parallel_size": 2})
        rig.say(index)
    pause, resume = rig.call(method="pause_scheduler"), rig.call(method="resume_scheduler")
    assert pause.sent == {0, 1}
    rig.reply(0, pause, value=value)
    assert not resume.sent
    rig.reply(1, pause, value=value)
    assert resume.sent == {0, 1}


def test_negative_call_ids() -> None:
    """An engine's own announcements carry negative ids: neither late nor an error."""
    rig = started(0)
    call = rig.call()
    for call_id in (-1, -2, -(2**63)):
        rig.reply(0, call_id, value=["SHUTDOWN_COMPLETE", 0])
    assert waiting(call) == [0]
    assert rig.stats.late_replies == 0
    assert rig.stats.malformed_messages == 0


def test_failure_reply() -> None:
    """A reported failure settles the waiter with the engine's own text."""
    rig = started(0)
    call = rig.call()
    reply = UtilityReply(call.call_id, "Call to sleep method failed: boom")
    rig.output(20, Outputs(0, utility=reply))
    error = error_of(call, 0)
    assert isinstance(error, RemoteError)
    assert error.message == "Call to sleep method failed: boom"


def test_both_dialects_on_nameless_connections() -> None:
    """Until a connection has a name, a message is read in the dialect in which it makes sense."""
    rig = Rig(0, 1)
    for index, codec in ((0, "cbor"), (1, "msgpack")):
        rig.handshake(index, Hello(), codec=codec)
        rig.connect("input", 10 + index)
        payload = codec_named(codec).encode({"data_parallel_size": 1})
        rig.core.registration(engine_id(index), [payload], 10 + index, rig.now)
        rig.connect("output", 20 + index)
        rig.handshake(index, Ready(), codec=codec)
    assert rig.startup.finished
    call = rig.call()
    other = rig.call()
    rig.output(21, broken_reply(1, other, "msgpack"))
    assert isinstance(error_of(other, 1), ReplyError)
    whole = Outputs(1, utility=UtilityReply(call.call_id, None, "ext")).to_plain()
    rig.output(21, codec_named("msgpack").encode(whole))
    rig.reply(0, call)
    assert value_of(call, 0) == "done"
    assert value_of(call, 1) == "ext"
    assert waiting(other) == [0]


# -- engines that share one output connection ------------------------------------------------------


def sharing_one_output() -> Rig:
    """Return a rig with two engines behind one output connection, as a proxy would have them."""
    rig = Rig(0, 1)
    for index in rig.indices:
        rig.handshake(index, Hello())
        rig.register(index)
        if index == 0:
            rig.connect("output", 20)
        rig.handshake(index, Ready())
    assert rig.alive() == [0, 1]
    return rig


@pytest.mark.parametrize("how", ["lost", "sentinel"])
def test_the_last_output_connection_is_everybodys(how: str) -> None:
    """With none left, no engine can be heard, and whoever waits for one is told."""
    rig = sharing_one_output()
    call = rig.call()
    if how == "lost":
        rig.lose("output", 20)
    else:
        rig.output(20, DEAD_SENTINEL)
    rig.advance(UNHEARD)
    assert rig.alive() == []
    assert {type(error_of(call, index)) for index in (0, 1)} == {EngineDeadError}


def test_garbage_on_a_shared_output_connection_fails_all_who_may_have_sent_it() -> None:
    """An engine without a connection of its own may speak on one that has another's name."""
    rig = sharing_one_output()
    rig.say(0, 20)
    call = rig.call()
    rig.output(20, b"\xff\xffgarbage")
    assert {type(error_of(call, index)) for index in (0, 1)} == {ReplyError}
    assert rig.alive() == [0, 1]
