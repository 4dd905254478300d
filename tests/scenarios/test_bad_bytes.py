"""Hostile and broken messages on every listening socket: they fail what they could have been for,
and nothing else.
"""

from __future__ import annotations

import contextlib
import random
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest

from engine_client import (
    EngineClient,
    EngineDeadError,
    EngineError,
    RemoteError,
    ReplyError,
    UtilityCallError,
    connect,
)
from engine_client.tools.mock_engine import MockEngine
from engine_client.wire.codec import codec_named
from engine_client.wire.messages import DEAD_SENTINEL, Outputs, UtilityReply
from tests.helpers import BackgroundCall, run_in_thread, scaled, wait_until
from tests.scenarios.raw import Peers, RawEngine, connecting, free_tcp, states
from tests.scenarios.rig import address

PROMPTLY = 0.5
"""Seconds in which a broken reply must reach its caller (scaled)."""
CODECS = ("cbor", "msgpack")
LIMIT = 2 * 2**20
"""``max_message_size`` of the clients here."""
MARK = b"\x00the value\xff"


class Pair(NamedTuple):
    """A client of two engines that say what a test wants; engine 1 speaks msgpack."""

    client: EngineClient
    engines: Sequence[RawEngine]

    def call(self, *targets: int, method: str = "echo") -> tuple[BackgroundCall[Any], int]:
        """Start a call without a time limit; return it and its id when the engines have it."""
        call = run_in_thread(self.client.settle_utility, method, engines=targets or (0, 1))
        ids = {self.engines[index].next_call()[1] for index in targets or (0, 1)}
        (call_id,) = ids
        return call, call_id

    def check(self) -> None:
        """Check that the client and both engines work as if nothing had been."""
        assert not self.client.closed
        assert states(self.client) == [True, True]
        call, call_id = self.call()
        for engine in self.engines:
            engine.reply(call_id, engine.index)
        assert call.result().unwrap() == [0, 1]
        assert self.client.pending_utility_calls == 0

    @property
    def malformed(self) -> int:
        return self.client.stats.malformed_messages


@contextlib.contextmanager
def pair(*, spoken: bool = True, **settings: Any) -> Iterator[Pair]:
    with contextlib.ExitStack() as stack:
        where = stack.enter_context(address())
        starting = stack.enter_context(
            connecting(where, engine_count=2, **{"max_message_size": LIMIT, **settings})
        )
        engines = [
            stack.enter_context(RawEngine(where, index, codec=codec)).start()
            for index, codec in enumerate(CODECS)
        ]
        made = Pair(starting.result(), engines)
        if spoken:
            made.check()
        yield made


@pytest.fixture
def two() -> Iterator[Pair]:
    with pair() as made:
        yield made


@pytest.fixture
def silent() -> Iterator[Pair]:
    """A pair whose engines have not said anything since they started."""
    with pair(spoken=False) as made:
        yield made


def error_of(call: BackgroundCall[Any], engine: int, kind: type[EngineError]) -> EngineError:
    """Return how one engine's part of a call failed, which it must have in one readable line."""
    error: EngineError = call.result().failures[engine]
    assert type(error) is kind, error
    assert error.engine == engine
    assert "\n" not in str(error)
    assert len(str(error)) < 500
    return error


def reply_with(engine: RawEngine, call_id: int, value: bytes) -> bytes:
    """Return a reply whose value is replaced by other bytes."""
    message = Outputs(engine.index, utility=UtilityReply(call_id, None, MARK))
    before, mark, after = engine.codec.encode(message.to_plain()).partition(
        engine.codec.encode(MARK)
    )
    assert mark
    return before + value + after


# -- values that cannot be read -------------------------------------------------------------------


def text(content: bytes) -> bytes:
    """A CBOR text of any length."""
    return b"\x7a" + len(content).to_bytes(4, "big") + content


HOSTILE = {
    "cbor": {
        "nothing": b"",
        "deep": b"\x81" * 100_000 + b"\x00",
        "endless array": b"\x9b" + b"\xff" * 8,
        "endless map": b"\xbb" + b"\xff" * 8,
        "endless bytes": b"\x5b" + b"\xff" * 8,
        "colliding keys": b"\xb9\x9c\x40"
        + b"".join(
            b"\xc2\x4a" + (i * (2**61 - 1)).to_bytes(10, "big") + b"\0" for i in range(40_000)
        ),
        "contains itself": b"\xd8\x1c\x81\xd8\x1d\x00",
        "shared": b"\x82\xd8\x1c\x81\x01\xd8\x1d\x00",
        "huge decimal": b"\xc4\x82\x01\xc2\x5a\x00\x03\xd0\x90" + b"\x01" * 250_000,
        "regular expression": b"\xd8\x23\x61(",
        "slow regular expression": b"\xd8\x23" + text(b"|".join(b"a%d" % i for i in range(99_999))),
        "mail": b"\xd8\x24" + text(b"From: x\n" * 50_000),
        "no date": b"\xc1\xf9\x7e\x00",
        "far date": b"\xc1\xfb\x7e\x37\xe4\x3c\x88\x00\x75\x9c",
        "date without a zone": b"\xc0\x73" + b"2013-03-22T20:04:00",
        "no text": b"\x62\xc3(",
        "mixed chunks": b"\x7f\x41a\xff",
        "break": b"\xff",
        "odd map": b"\xbf\x61a\xff",
        "reserved": b"\x1c",
        "undefined": b"\xf7",
        "simple value": b"\xe0",
        "unknown tag": b"\xd9\xff\xff\x01",
        "big integer": b"\xc2\x49\x01" + b"\x00" * 8,
        "key twice": b"\xa2\x61a\x01\x61a\x02",
        "key of bytes": b"\xa1\x41a\x01",
        "key of an array": b"\xa1\x81\x01\x01",
        "many small arrays behind a bad one": b"\x9a\x00\x0f\x42\x40\xff" + b"\x80" * 1_000_000,
    },
    "msgpack": {
        "nothing": b"",
        "deep": b"\x91" * 100_000 + b"\x00",
        "endless array": b"\xdd" + b"\xff" * 4,
        "endless map": b"\xdf" + b"\xff" * 4,
        "endless bytes": b"\xc6" + b"\xff" * 4,
        "never used": b"\xc1",
        "pickle": b"\xc7\x04\x01\x80\x04N.",
        "array extension": b"\xc7\x02\x02ab",
        "time": b"\xd6\xff\x00\x00\x00\x00",
        "key of bytes": b"\x81\xc4\x01a\x01",
        "key of an array": b"\x81\x91\x01\x01",
        "no text": b"\xa2\xc3(",
    },
}


@pytest.mark.parametrize(
    ("engine", "name"),
    [(index, name) for index, codec in enumerate(CODECS) for name in HOSTILE[codec]],
)
def test_hostile_values(two: Pair, engine: int, name: str) -> None:
    """Bytes made to stall, crash or deceive a decoder fail the call that they answer, and only
    that; at once, and without holding up anybody else.
    """
    malformed = two.malformed
    waiting, waiting_id = two.call()
    call, call_id = two.call()
    began = time.monotonic()
    two.engines[engine].say(reply_with(two.engines[engine], call_id, HOSTILE[CODECS[engine]][name]))
    two.engines[1 - engine].reply(call_id, "fine")
    error = error_of(call, engine, ReplyError)
    assert time.monotonic() - began < scaled(PROMPTLY)
    assert error.may_have_run
    assert call.result().succeeded == (1 - engine,)
    assert two.malformed == malformed + 1
    assert two.client.pending_utility_calls == 2
    for one in two.engines:
        one.reply(waiting_id, name)
    assert waiting.result().unwrap() == [name, name]


@pytest.mark.parametrize("engine", [0, 1], ids=CODECS)
def test_a_reply_over_the_limit(two: Pair, engine: int) -> None:
    """A message that is larger than max_message_size fails its call; the connection stays."""
    call, call_id = two.call()
    two.engines[engine].reply(call_id, b"x" * LIMIT)
    two.engines[1 - engine].reply(call_id, b"x" * (LIMIT - 100))
    assert "max_message_size" in str(error_of(call, engine, ReplyError))
    assert call.result().succeeded == (1 - engine,)
    two.check()


@pytest.mark.parametrize("engine", [0, 1], ids=CODECS)
def test_a_cut_off_reply(two: Pair, engine: int) -> None:
    """Wherever a reply is cut off, its call fails; before its id, all that waits there."""
    codec = two.engines[engine].codec
    length = len(reply_with(two.engines[engine], 2**52, codec.encode(MARK)))
    for size in {0, 1, 2, 5, 12, 14, length // 2, length - 30, length - 9, length - 1}:
        call, call_id = two.call(engine)
        two.engines[engine].say(reply_with(two.engines[engine], call_id, codec.encode(MARK))[:size])
        error_of(call, engine, ReplyError)
    two.check()


# -- messages that cannot be read at all ----------------------------------------------------------

JUNK: dict[str, list[bytes]] = {
    "empty": [b""],
    "one byte": [b"\xff"],
    "a number": [b"\x00"],
    "nothing": [b"\xf6"],
    "a map": [b"\xa0"],
    "a text": [b"\x65hello"],
    "almost the sentinel": [DEAD_SENTINEL + b"\x00"],
    "HTTP": [b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"],
    "nine frames": [b"x"] * 9,
    "1 MB": [random.Random(7).randbytes(2**20)],
    "too large": [b"\x00" * (LIMIT + 1)],
    "an index beyond the engines": [b"\x81\x19\xff\xff"],
    "no index": [b"\x81\x61x"],
    "a negative index": [b"\x81\x20"],
    "a reply of another shape": [b"\x85\x00\x80\xf6\x00\x81\x61x"],
}


@pytest.mark.parametrize("engine", [0, 1], ids=CODECS)
@pytest.mark.parametrize("name", JUNK)
def test_junk_of_an_engine(two: Pair, engine: int, name: str) -> None:
    """It may have been any reply of the engine whose connection carried it, and of no other."""
    malformed = two.malformed
    both, both_id = two.call()
    other, other_id = two.call(1 - engine)
    lost = [two.call(engine)[0] for _ in range(3)]
    two.engines[engine].say(*JUNK[name])
    for call in lost:
        assert error_of(call, engine, ReplyError).may_have_run
    assert two.malformed == malformed + 1
    assert two.client.pending_utility_calls == 2
    two.engines[1 - engine].reply(both_id, "both")
    two.engines[1 - engine].reply(other_id, "other")
    error_of(both, engine, ReplyError)
    assert both.result().succeeded == (1 - engine,)
    assert other.result().unwrap() == ["other"]
    two.check()


def test_junk_on_a_connection_without_a_name(silent: Pair) -> None:
    """Before the engines have spoken, it may have been a reply of any of them."""
    call, _ = silent.call()
    silent.engines[1].say(b"\xff")
    for engine in (0, 1):
        error_of(call, engine, ReplyError)
    silent.check()
    call, call_id = silent.call()
    silent.engines[1].say(b"\xff")  # now it is known whose it is
    silent.engines[0].reply(call_id, 0)
    error_of(call, 1, ReplyError)
    assert call.result().succeeded == (0,)
    silent.check()


def test_a_broken_reply_on_a_connection_without_a_name(silent: Pair) -> None:
    """A readable index and call id tell whose it was, before any connection has a name."""
    other, other_id = silent.call()
    call, call_id = silent.call()
    silent.engines[1].say(reply_with(silent.engines[1], call_id, b"\xc1"))
    silent.engines[0].reply(call_id)
    error_of(call, 1, ReplyError)
    assert call.result().succeeded == (0,)
    for engine in silent.engines:
        engine.reply(other_id, "other")
    assert other.result().unwrap() == ["other", "other"]


# -- replies that answer nothing ------------------------------------------------------------------


def test_unknown_duplicate_and_late_replies(two: Pair) -> None:
    """Each is counted and dropped; whoever waits gets the right answer."""
    late = two.client.stats.late_replies
    first = two.engines[0]
    call, call_id = two.call(0)
    for unknown in (1, call_id + 1, call_id ^ 2**52, 2**64 - 1):
        first.reply(unknown, "unknown")
    first.reply(call_id, "first")
    first.reply(call_id, "second")
    assert call.result().unwrap() == ["first"]
    with pytest.raises(TimeoutError):
        two.client.call_utility("echo", engines=[0], timeout=0)
    _, timed_out, _, _ = first.next_call()
    first.reply(timed_out, "too late")
    wait_until(lambda: two.client.stats.late_replies == late + 6)
    two.check()


def test_an_engines_own_announcements(two: Pair) -> None:
    """Negative call ids come from the engine itself: they are no replies, late or otherwise."""
    stats = two.client.stats
    call, call_id = two.call(0)
    for own in (-1, -2, -(2**63)):
        two.engines[0].reply(own, ["SHUTDOWN_COMPLETE", 0])
    two.engines[0].say(two.engines[0].codec.encode(Outputs(0).to_plain()))
    two.engines[0].reply(call_id)
    call.join()
    assert two.client.stats.late_replies == stats.late_replies
    assert two.client.stats.malformed_messages == stats.malformed_messages


@pytest.mark.parametrize("wrong", [0, 2, 65_535])
def test_a_reply_under_a_wrong_index(two: Pair, wrong: int) -> None:
    """Its connection tells whose it was: that engine's waiter fails, the named engine is well."""
    other, other_id = two.call()
    call, call_id = two.call()
    two.engines[1].reply(call_id, "?", index=wrong)
    two.engines[0].reply(call_id, "fine")
    assert f"engine {wrong}" in str(error_of(call, 1, ReplyError))
    assert call.result().succeeded == (0,)
    for engine in two.engines:
        engine.reply(other_id, "other")
    assert other.result().unwrap() == ["other", "other"]
    two.check()


@pytest.mark.parametrize("failure", ["", "x" * 5_000_000, "a\nb\x00\u2028\U0001f600"])
def test_failures_of_any_length(failure: str) -> None:
    """An engine's failure text is kept whole and shown short, in one line."""
    with pair(max_message_size=2**24) if len(failure) > LIMIT else pair() as one:
        call, call_id = one.call(1)
        message = Outputs(1, utility=UtilityReply(call_id, failure))
        one.engines[1].say(one.engines[1].codec.encode(message.to_plain()))
        error = call.result().failures[1]
        assert isinstance(error, RemoteError)
        assert error.message == failure
        assert len(str(error)) < 1000
        assert "\n" not in str(error)


# -- strangers ------------------------------------------------------------------------------------


def http(address: str, length: int = 600) -> socket.socket:
    """A connection of a web client, which has sent its request."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    connection = socket.create_connection((host, int(port)))
    # libzmq takes it for a peer that speaks its first protocol: each x is the length and the flags
    # of a message.
    connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nX-Padding: " + b"x" * length + b"\r\n\r\n")
    return connection


def hostile_frames() -> list[list[bytes]]:
    chance = random.Random(11)
    frames = [*JUNK.values(), [DEAD_SENTINEL], [DEAD_SENTINEL, b"x"]]
    frames += [[chance.randbytes(chance.randrange(200))] for _ in range(50)]
    codec = codec_named("cbor")
    frames.append([codec.encode(Outputs(9).to_plain())])
    frames.append([codec.encode(Outputs(9, utility=UtilityReply(5, None, 1)).to_plain())])
    return frames


def test_strangers_on_every_socket() -> None:
    """Raw TCP and ZeroMQ strangers send whatever they like to all three sockets, while a call is
    made in a loop: no call fails, no engine is lost, all of it is counted.
    """
    (where,) = free_tcp()
    with (
        MockEngine(where, 0),
        MockEngine(where, 1, codec="msgpack"),
        connect(where, engine_count=2, connect_timeout=scaled(20)) as client,
        Peers() as strangers,
        contextlib.ExitStack() as stack,
    ):
        assert client.call_utility("echo", 0) == [0, 0]
        stop: list[bool] = []

        def work() -> int:
            rounds = 0
            while not stop:
                assert client.call_utility("echo", rounds, timeout=scaled(10)) == [rounds] * 2
                rounds += 1
            return rounds

        working = run_in_thread(work)
        sockets = [where, client.input_address, client.output_address]
        for one in sockets:
            for length in (0, 600, 100_000):
                stack.enter_context(contextlib.closing(http(one, length)))
        outputs = strangers.push(client.output_address)
        dealers = [
            strangers.dealer(one, identity)
            for one in sockets[:2]
            for identity in (None, b"\x07\x00", b"z" * 255)
        ]
        frames = hostile_frames()
        for message in frames:
            outputs.send_multipart(message)
            for dealer in dealers:
                dealer.send_multipart(message)
        wait_until(
            # The sentinels mean nothing from a stranger.
            lambda: (
                client.stats.malformed_messages >= len(frames) - 2
                and client.stats.stray_messages >= len(frames) * len(dealers)
            ),
            what="all of it to be read",
        )
        stop.append(True)
        assert working.result() > 0
        for dealer in dealers:
            assert not dealer.poll(0)
    assert client.stats.deaths == 0
    assert client.closing_cause is None


def test_web_clients_do_not_fail_the_calls_of_silent_engines() -> None:
    """Bytes of a connection that no engine can have are nobody's reply, whoever has spoken."""
    (where,) = free_tcp()
    with (
        connecting(where) as starting,
        RawEngine(where).start() as engine,
    ):
        client = starting.result()
        call = run_in_thread(client.call_utility, "echo", 1)
        _, call_id, _, _ = engine.next_call()
        with contextlib.closing(http(client.output_address)):
            wait_until(lambda: client.stats.malformed_messages > 0)
            assert not call.done
        engine.reply(call_id, "mine")
        assert call.result() == ["mine"]
        assert client.stats.deaths == 0
        client.close()


def test_strangers_during_the_start() -> None:
    """Connections that come and go while engines start are nobody's death."""
    (where,) = free_tcp()
    with (
        connecting(where, engine_count=2) as starting,
        RawEngine(where, 0) as first,
        RawEngine(where, 1) as second,
        Peers() as strangers,
    ):
        first.hello()
        init = first.init()
        for one in (where, init.inputs[0], init.outputs[0]):
            http(one).close()
        webs = [http(one) for one in (where, init.inputs[0], init.outputs[0])]
        push = strangers.push(init.outputs[0])
        push.send(b"\xff")
        first.register()
        first.ready()
        second.start()
        client = starting.result()
        for web in webs:
            web.close()
        push.close(linger=0)
        call = run_in_thread(client.call_utility, "echo")
        for engine in (first, second):
            engine.answer("echo", engine.index)
        assert call.result() == [0, 1]
        assert client.stats.deaths == 0
        client.close()


def test_a_strangers_sentinel(two: Pair) -> None:
    """The sentinel names no engine; from a stranger it kills none."""
    call, call_id = two.call()
    with Peers() as strangers:
        push = strangers.push(two.client.output_address)
        received = two.client.stats.received
        push.send(DEAD_SENTINEL)
        wait_until(lambda: two.client.stats.received > received)
        for engine in two.engines:
            engine.reply(call_id, "alive")
        assert call.result().unwrap() == ["alive", "alive"]
    two.check()


def test_a_stranger_who_speaks_for_an_engine() -> None:
    """An output that names a living engine on another connection means that it was replaced: its
    waiters fail, with a warning; it goes on serving, since its next reply names it again.
    """
    with pair() as two, Peers() as strangers:
        call, call_id = two.call()
        push = strangers.push(two.client.output_address)
        push.send(codec_named("cbor").encode(Outputs(0).to_plain()))
        wait_until(lambda: two.client.pending_utility_calls == 1)
        two.engines[1].reply(call_id, "undisturbed")
        assert "replaced" in str(error_of(call, 0, EngineDeadError))
        assert call.result().succeeded == (1,)
        assert states(two.client) == [True, True]
        for _ in range(3):
            two.check()


@pytest.mark.parametrize("frames", [[b"\xff"], [b"\xa0", b"\xa0"], [b"\x80\x80"]])
def test_a_stranger_who_takes_an_engines_identity(two: Pair, frames: list[bytes]) -> None:
    """A registration that cannot be read, under a living engine's identity: ZeroMQ has given the
    identity away, so that engine cannot be reached any more, and whoever waits is told.
    """
    with Peers() as strangers:
        call, call_id = two.call()
        strangers.dealer(two.client.input_address, b"\x01\x00").send_multipart(frames)
        wait_until(lambda: two.client.pending_utility_calls == 1)
        two.engines[0].reply(call_id, "undisturbed")
        assert "under its identity" in str(error_of(call, 1, EngineDeadError))
        assert call.result().succeeded == (0,)
        assert states(two.client) == [True, False]


def test_more_than_a_registration_on_the_input(two: Pair) -> None:
    """Whatever an engine sends on its input connection after its registration is ignored."""
    call, call_id = two.call()
    for engine in two.engines:
        for frames in JUNK.values():
            engine.input.send_multipart(frames)
        engine.register()
    for engine in two.engines:
        engine.reply(call_id, "fine")
    assert call.result().unwrap() == ["fine", "fine"]
    two.check()


def test_a_flood(two: Pair) -> None:
    """Thousands of bad messages hold up nobody for long, and the engine's next reply counts."""
    malformed = two.malformed
    for _ in range(3000):
        two.engines[0].say(b"\xff")
    began = time.monotonic()
    call, call_id = two.call(1)
    two.engines[1].reply(call_id, "in between")
    assert call.result().unwrap() == ["in between"]
    assert time.monotonic() - began < scaled(5)
    wait_until(lambda: two.malformed == malformed + 3000)
    two.check()


def test_the_callers_error_names_the_engine(two: Pair) -> None:
    """What a caller sees of a broken reply: which engine, and that the call may have run there."""
    call = run_in_thread(two.client.call_utility, "sleep", 1)
    for engine in two.engines:
        _, call_id, _, _ = engine.next_call()
    two.engines[0].reply(call_id)
    two.engines[1].say(reply_with(two.engines[1], call_id, b"\xc1"))
    error = call.error()
    assert isinstance(error, UtilityCallError)
    assert error.outcomes.may_have_run == (0, 1)
    assert "engine 1's reply could not be decoded" in str(error)
