"""A world without sockets, threads or clock: engines, connections and callers around a core.

:class:`World` holds a :class:`Core` with its registry and request table, and everything outside of
them: processes with an index, the connections that they make, what is under way in both
directions, callers with their calls, readers with their streams, and a clock that only steps move.
A *step* is a method marked with :func:`step`; it takes two small numbers with which it picks what
it acts on, so that every sequence of steps is a schedule, and a part of one is a schedule too.

What connections do is modelled on ZeroMQ: frames of one connection keep their order; a connection's
arrival is announced before its first frame can be read, and its loss after its last one was
delivered; a descriptor is free for the next connection from its loss on; a message to a peer that
is gone is accepted until the loss is noticed, and refused from then on.

After each step, :meth:`World.check` compares what the core believes with what is true.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from engine_client.deadline import Deadline
from engine_client.dispatch.core import Core
from engine_client.dispatch.lockstep import Outgoing
from engine_client.dispatch.members import UNHEARD
from engine_client.dispatch.peers import Side
from engine_client.dispatch.registry import EngineRecord, Registry
from engine_client.dispatch.requests import Delivery, PendingRequest, RequestTable
from engine_client.dispatch.waiting import PendingCall, Startup
from engine_client.engines import engine_id
from engine_client.errors import (
    AbandonedError,
    CallTimeout,
    ClientClosedError,
    EngineDeadError,
    EngineError,
    NotSentError,
    RemoteError,
    ReplyError,
    StreamError,
    StreamOverflow,
)
from engine_client.outcome import Failed, Ok
from engine_client.output import FinishReason
from engine_client.stats import ClientStats
from engine_client.wire.codec import Dialect, codec_named
from engine_client.wire.messages import (
    DEAD_SENTINEL,
    Hello,
    Init,
    Outputs,
    Ready,
    RequestType,
    UtilityReply,
)

__all__ = ["STEPS", "Options", "World"]

FIRST_QUESTION = 10**9
"""Ids of the core's own calls begin here."""
MAX_PENDING = 3
"""Outputs that a reader may leave unread."""
LAST = int(FinishReason.LENGTH)
SIDES: tuple[Side, ...] = ("input", "output")
INIT = Init(("ipc://in",), ("ipc://out",))
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Options:
    """What kind of world it is."""

    engines: int = 2
    lockstep: bool = False
    """All engines form a lockstep group."""
    mixed: bool = False
    """Engines of odd index speak msgpack."""
    launched: bool = False
    """The end of the first process of each index is reported."""
    small_queue: bool = False
    """An engine that is not heard gets few bytes only."""
    begin: Literal["silent", "named", "nothing"] = "silent"
    """How far the engines are at the beginning."""

    @classmethod
    def picked(cls, number: int) -> Options:
        """The options that a number stands for."""
        number, engines = divmod(number, 4)
        number, begin = divmod(number, 4)
        return cls(
            engines=engines + 1,
            lockstep=number % 8 == 1,
            mixed=number % 4 >= 2,
            launched=number // 4 % 2 == 1,
            small_queue=number // 8 % 2 == 1,
            begin=("silent", "named", "named", "nothing")[begin],
        )


class Link:
    """One connection of a process, or of a stranger, to the input or the output socket."""

    def __init__(self, side: Side, fd: int, process: Process | None) -> None:
        self.side: Side = side
        self.fd = fd
        self.process = process
        self.pipe: deque[Frame] = deque()
        """What the client has not read."""
        self.inbox: deque[Outgoing] = deque()
        """What the process has not read."""
        self.open = True
        """Whether its other end is there."""
        self.noticed = False
        """Whether its loss was noticed on this side; then its descriptor is free."""
        self.made_again = False
        """Whether its process, which is known, made it without registering."""
        self.renamed = False
        """Whether another connection took its identity over."""
        self.named: set[int] = set()
        """The engines that good messages read from it have named."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A message on its way to the client, and what is known to be in it."""

    data: bytes
    index: int = -1
    """The engine that it is of and names; -1: it cannot be read."""
    call_id: int | None = None
    """The call that it answers, also when the answer cannot be read."""
    wire_ids: tuple[str, ...] = ()
    """The request of each output in it."""
    faults: int = 0
    """How many of its outputs are malformed."""
    lie: bool = False
    """It names another engine than the one that says it, which shows on an open connection."""


class Process:
    """One engine process: an incarnation of its index."""

    def __init__(self, index: int, number: int, dialect: Dialect) -> None:
        self.index = index
        self.number = number
        self.codec = codec_named(dialect)
        self.running = True
        self.unbroken = True
        """Nothing that could end it, or cut it off, has happened yet."""
        self.excused = False
        """Its lockstep group may have died, or its end was reported."""
        self.to_do: list[str] = []
        """What it still does once it was told where to connect."""
        self.invited = 0
        """How many connections there had been when it was told."""
        self.registered = False
        """Whether the client has read its registration."""
        self.registered_at = 0.0
        """When it did."""
        self.input: Link | None = None
        self.output: Link | None = None
        self.left: set[Side] = set()
        """Connections that it lost and will make again."""
        self.reported = False
        self.ending = False
        """It will end by itself: it reported its death, or it can do nothing any more."""
        self.rivalled = False
        """Another process was told to be the same engine while it was there."""
        self.superseded = False
        """Another process took its index over."""
        self.calls: list[int] = []
        """Calls that it is busy with."""
        self.requests: dict[str, int] = {}
        """Its requests, and how many tokens each has."""
        self.unsent: deque[Frame] = deque()
        """What it could not say yet, for want of a connection."""

    @property
    def serving(self) -> bool:
        """Whether it can be told something and answer."""
        return self.running and all(
            link is not None and link.open for link in (self.input, self.output)
        )

    @property
    def healthy(self) -> bool:
        """Whether it serves and always has; then it must not be taken for dead."""
        return self.unbroken and self.serving and self.registered and not self.excused

    def say(self, frame: Frame) -> None:
        if self.output is not None and self.output.open:
            self.output.pipe.append(frame)
        else:
            self.unsent.append(frame)

    def message(self, index: int | None = None, *, faults: int = 0, **fields: Any) -> Frame:
        message = Outputs(self.index if index is None else index, **fields)
        reply = message.utility
        return Frame(
            self.codec.encode(message.to_plain()),
            message.engine_index,
            None if reply is None else reply.call_id,
            tuple(record[0] for record in message.outputs),
            faults,
        )


class Caller:
    """A thread in a call: what ``settle()`` does, one act at a time."""

    def __init__(self, call: PendingCall, fit: dict[int, Process]) -> None:
        self.call = call
        self.fit = fit
        """The processes that were healthy when it was made."""
        self.registered = False
        self.left = False
        self.drained = False
        self.unseen = set(call.targets)
        """Targets whose outcome has not been looked at."""


class Reader:
    """A thread that reads a stream."""

    def __init__(self, request: PendingRequest, fit: Process | None) -> None:
        self.request = request
        self.fit = fit
        self.tokens = 0
        self.aborted = False
        self.dropped = False
        """Nobody reads it any more."""
        self.over = False


STEPS: dict[str, tuple[Callable[[World, int, int], None], int]] = {}
"""By name: what it does, and how often it comes."""


def step(weight: int = 2) -> Callable[[T], T]:
    """Mark a method of :class:`World` as a step."""

    def mark(method: T) -> T:
        STEPS[method.__name__] = (method, weight)  # type: ignore[attr-defined, assignment]
        return method

    return mark


def pick(things: Sequence[T], number: int) -> T | None:
    """One of the things, if there is any."""
    return things[number % len(things)] if things else None


class WatchedRegistry(Registry):
    """A registry that tells which engines came back."""

    def __init__(self, indices: Sequence[int], max_unanswered_bytes: int) -> None:
        super().__init__(indices, max_unanswered_bytes)
        self.came_back: set[int] = set()

    def revive_engine(self, index: int) -> None:
        self.came_back.add(index)
        super().revive_engine(index)


class World:
    """See the module's text."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.indices = tuple(range(options.engines))
        self.registry = WatchedRegistry(self.indices, 20 if options.small_queue else 2**20)
        self.requests = RequestTable(self.registry, MAX_PENDING)
        self.stats = ClientStats()
        self.startup = Startup()
        self.core = Core(
            self.indices,
            self.registry,
            self.requests,
            self.startup,
            self.stats,
            codec="auto",
            client_index=0,
            init=INIT,
            call_ids=itertools.count(FIRST_QUESTION),
            max_message_size=2**20,
        )
        self.now = 100.0
        self.ended = False
        self._numbers = itertools.count(1)
        # Outside of the client.
        self.processes: list[Process] = []
        self.links: list[Link] = []
        self.strangers: list[Link] = []
        # What the client's sockets hold.
        self.monitors: dict[Side, deque[tuple[bool, int]]] = {"input": deque(), "output": deque()}
        self.greetings: deque[tuple[Process, bytes]] = deque()
        self.routes: dict[int, Link] = {}
        self.greeters: dict[int, Process] = {}
        self.reports: deque[Process] = deque()
        self.events: list[tuple[Side, bool, int]] = []
        # Callers and readers.
        self.outbox: deque[PendingCall | PendingRequest] = deque()
        self.callers: list[Caller] = []
        self.readers: list[Reader] = []
        self._calls: dict[int, Caller] = {}
        self._readers: dict[str, Reader] = {}
        # Accounts.
        self.handed_over: dict[int | str, int] = {}
        self.sent: dict[int, list[int | str]] = {index: [] for index in self.indices}
        self.told: set[str] = set()
        self.answers: dict[tuple[int, int], set[str | bool]] = {}
        self.failures: set[tuple[int, int]] = set()
        self.bad: list[tuple[Link, Frame]] = []
        self.unanswered = dict.fromkeys(self.indices, 0)
        self.seen: dict[int, float | None] = dict.fromkeys(self.indices)
        self.lost_unseen: set[int] = set()
        self.visited = False
        """Whether a stranger ever came."""
        self.read = self.overflows = self.steps = 0
        self._begin()

    def _begin(self) -> None:
        if self.options.begin == "nothing":
            return
        for index in self.indices:
            self.spawn(index, 0)
        self.turn(0, 0)
        for process in self.processes:
            while process.to_do:
                self._proceed(process, 0)
        self.turn(0, 0)
        if self.options.begin == "named":
            for process in self.processes:
                process.say(process.message())
            self.turn(0, 0)
        assert all(self.registry.engines[index].alive for index in self.indices)
        assert self.startup.error is None
        self.check()

    def run(self, name: str, a: int, b: int) -> None:
        """Do one step and check the accounts."""
        self.steps += 1
        self.now += 0.0001
        STEPS[name][0](self, a, b)
        self.check()

    # -- the loop, as the dispatcher's ------------------------------------------------------------

    @step(30)
    def turn(self, a: int, b: int) -> None:
        """The dispatcher looks at everything once."""
        if self.ended:
            return
        self._read_outputs()
        work, self.outbox = self.outbox, deque()
        self._abort_left()
        for item in work:
            if isinstance(item, PendingCall):
                self.core.submit(item, self.now)
            else:
                self.core.submit_request(item, self.now)
        self.registry.drain()
        self._follow_connections()
        self._read_registrations()
        while self.greetings:
            process, payload = self.greetings.popleft()
            self.core.handshake_frames([engine_id(process.index), payload], self.now)
        self._read_exits()
        self.core.tick(self.now)
        self._abort_left()
        self._flush()
        if self.startup.error is not None and not self.ended:
            self.close(0, 0)

    def _abort_left(self) -> None:
        self.requests.drain()
        self.core.abort()

    def _readable(self, side: Side) -> Link | None:
        found = [link for link in self.links if link.side == side and link.pipe]
        link = pick(found, self.read)
        if link is not None and link.process is not None:
            # What a process said before it connected again is read first.
            link = next(other for other in found if other.process is link.process)
        return link

    def _read_outputs(self) -> None:
        while (link := self._readable("output")) is not None:
            frame = link.pipe.popleft()
            if link.fd not in self.core.known("output"):
                self._read_monitors()
            self._receive(link, frame)

    def _read_monitors(self) -> None:
        for side in SIDES:
            events = self.monitors[side]
            while events:
                accepted, fd = events.popleft()
                if accepted and fd not in self.core.known(side):
                    self.core.connected(side, fd, self.now)
                else:
                    self.core.closing(side, fd)
                    self.events.append((side, accepted, fd))

    def _follow_connections(self) -> None:
        self._read_monitors()
        while self.events:
            events, self.events = self.events, []
            self._read_outputs()
            for side, accepted, fd in events:
                if accepted:
                    self.core.connected(side, fd, self.now)
                else:
                    self.core.disconnected(side, fd, self.now)

    def _read_registrations(self) -> None:
        while (link := self._readable("input")) is not None:
            frame = link.pipe.popleft()
            self._follow_connections()
            process = link.process
            if process is None or link.renamed:
                self.core.registration(b"stranger", [frame.data], link.fd, self.now)
                continue
            for other in self.processes:
                if other.index == process.index and other is not process:
                    other.registered = False
                    other.superseded = True
            process.registered = True
            process.registered_at = self.now
            if process.output is not None:
                process.output.named.clear()  # what it said before does not count
            self.core.registration(engine_id(process.index), [frame.data], link.fd, self.now)
        self.core.inputs_read()

    def _read_exits(self) -> None:
        if self.reports:
            self._follow_connections()
            self._read_outputs()
        while self.reports:
            process = self.reports.popleft()
            self.core.process_exited(process.index, "was killed", self.now)

    def _flush(self) -> None:
        outgoing = self.core.outgoing
        while outgoing:
            item = outgoing.popleft()
            if item.channel == "handshake":
                greeter = self.greeters.get(item.engine)
                if greeter is None or not greeter.running:
                    self.core.unreachable(item, self.now)
                    continue
                if not greeter.to_do and greeter.input is None:
                    greeter.to_do = ["input", "output", "register", "ready"]
                    greeter.invited = len(self.links)
                    self._excuse_rivals(greeter)
            else:
                link = self.routes.get(item.engine)
                if link is None:
                    self.core.unreachable(item, self.now)
                    continue
                self._note_sent(item)
                if link.open:
                    link.inbox.append(item)
                elif self._is_nameless(link):
                    self.lost_unseen.add(id(item.work))
            self.stats.sent += 1
            if item.work is None:
                self.core.reached(item, self.now)

    def _excuse_rivals(self, invited: Process) -> None:
        """Two processes were told to be the same engine: either may be taken for the other."""
        rivals = [
            p
            for p in self.processes
            if p.index == invited.index and p.running and (p.to_do or p.input is not None)
        ]
        if len(rivals) > 1:
            for rival in rivals:
                rival.excused = rival.rivalled = True

    # -- what processes do ------------------------------------------------------------------------

    def _live(self) -> list[Process]:
        return [process for process in self.processes if process.running]

    def _connect(self, side: Side, process: Process | None) -> Link:
        used = {link.fd for link in self.links if not link.noticed}
        # The system gives the lowest number that is free.
        link = Link(side, next(fd for fd in itertools.count(10) if fd not in used), process)
        self.links.append(link)
        self.monitors[side].append((True, link.fd))
        if process is not None and side == "input":
            process.input = link
            old = self.routes.get(process.index)
            self.routes[process.index] = link
            if old is not None and not old.noticed:
                # The newer one takes the identity over; the older one is cut off.
                if old.process is not None and old.open and old.process is not process:
                    self._hurt(old.process)
                    old.process.superseded = True
                # What it said and was not read yet comes under a name that ZeroMQ makes up.
                old.open, old.renamed = False, True
        elif process is not None:
            process.output = link
            if any(
                other.process is None and other.side == "output"
                for other in self.links[process.invited :]
            ):
                # A stranger's connection may be taken for this one, and its loss for this one's
                # until it is probed.
                process.unbroken = False
            if (
                process.registered
                and self.now > process.registered_at + UNHEARD
                and not self.registry.engines[process.index].alive
            ):
                # Nobody waits for it that long, once a connection is lost that may have been this
                # one; that it is here after all is only known when it is noticed.
                process.unbroken = False
            while process.unsent:
                link.pipe.append(process.unsent.popleft())
        return link

    def _hurt(self, process: Process) -> None:
        """Something happens to a process that may end it, and its lockstep group with it."""
        process.unbroken = False
        if self.options.lockstep:
            for other in self.processes:
                other.excused = True

    def _lose(self, link: Link | None) -> None:
        """The other end of a connection is closed; this side has not noticed."""
        if link is not None:
            link.open = False
            if self._is_nameless(link):
                # Nothing names an input connection that was made again: when it breaks and is
                # made once more before anybody could ask, what was under way is lost unseen.
                self.lost_unseen.update(id(item.work) for item in link.inbox)
            link.inbox.clear()

    def _is_nameless(self, link: Link) -> bool:
        process = link.process
        known = None if process is None else self.core._peers[process.index].input
        return link.side == "input" and (link.made_again or known is None)

    def _notice(self, link: Link) -> None:
        """This side notices that a connection is lost."""
        if link.open or link.noticed:
            return
        link.noticed = True
        self.monitors[link.side].append((False, link.fd))
        process = link.process
        if process is not None and self.routes.get(process.index) is link:
            del self.routes[process.index]

    @step(1)
    def spawn(self, a: int, b: int) -> None:
        """A process starts under some index and says HELLO, whether or not there is one already."""
        index = a % len(self.indices)
        dialect: Dialect = "msgpack" if self.options.mixed and index % 2 else "cbor"
        for link in self.links:
            # A loss is noticed sooner than the next process is there.  Of one that had registered
            # more is known, so there it may come in any order.
            if link.process is not None and not link.process.registered:
                self._notice(link)
        process = Process(index, next(self._numbers), dialect)
        if self.options.lockstep and any(not p.unbroken for p in self.processes):
            process.excused = True
        self.processes.append(process)
        self.greeters[index] = process
        self.greetings.append((process, process.codec.encode(Hello().to_plain())))

    @step(1)
    def restart(self, a: int, b: int) -> None:
        """A process ends and the next one of its index starts."""
        process = pick(self._live(), a)
        if process is not None:
            self.kill(a, b)
            self.spawn(process.index, b)

    @step(8)
    def proceed(self, a: int, b: int) -> None:
        """A process that was told where to connect goes on with its start."""
        process = pick([p for p in self._live() if p.to_do], a)
        if process is not None:
            self._proceed(process, b)

    def _proceed(self, process: Process, number: int) -> None:
        possible = [s for s in process.to_do if s != "register" or "input" not in process.to_do]
        name = possible[number % len(possible)]
        process.to_do.remove(name)
        if name == "ready":
            self.greetings.append((process, process.codec.encode(Ready().to_plain())))
        elif name == "register":
            size = len(self.indices) if self.options.lockstep and len(self.indices) > 1 else 1
            payload = process.codec.encode({"data_parallel_size": size})
            if process.input is not None and process.input.open:
                process.input.pipe.append(Frame(payload))
        else:
            side: Side = "input" if name == "input" else "output"
            self._connect(side, process)

    @step(10)
    def handle(self, a: int, b: int) -> None:
        """A process takes messages from its input; even numbers: and answers them all."""
        process = pick([p for p in self._live() if p.input and p.input.inbox], a)
        if process is not None:
            self._handle(process, 1 + b // 2)
            if b % 2 == 0:
                while process.calls:
                    self._answer(process, process.calls[0])

    def _handle(self, process: Process, count: int) -> None:
        inbox = process.input.inbox if process.input is not None else deque[Outgoing]()
        while inbox and count:
            count -= 1
            item = inbox.popleft()
            kind = item.frames[1]
            if isinstance(item.work, PendingCall):
                process.calls.append(item.work.call_id)
            elif isinstance(item.work, PendingRequest):
                process.requests[item.work.wire_id] = 0
            elif kind == RequestType.UTILITY:
                process.calls.append(process.codec.decode(item.frames[-1])[1])
            elif kind == RequestType.ABORT:
                for wire_id in process.codec.decode(item.frames[-1]):
                    process.requests.pop(wire_id, None)

    def _answer(self, process: Process, call_id: int) -> None:
        process.calls.remove(call_id)
        # Every other one is as short as most are, which the core reads in a way of its own.
        value = f"{process.number}:{call_id}" if call_id % 2 else bool(process.number % 2)
        self.answers.setdefault((process.index, call_id), set()).add(value)
        process.say(process.message(utility=UtilityReply(call_id, None, value)))

    @step(8)
    def reply(self, a: int, b: int) -> None:
        """A process answers one of its calls, in any order."""
        process = pick([p for p in self._live() if p.calls], a)
        if process is not None:
            self._answer(process, process.calls[b % len(process.calls)])

    @step(3)
    def fail(self, a: int, b: int) -> None:
        """A process answers one of its calls with a failure."""
        process = pick([p for p in self._live() if p.calls], a)
        if process is not None:
            call_id = process.calls.pop(b % len(process.calls))
            self.failures.add((process.index, call_id))
            process.say(process.message(utility=UtilityReply(call_id, "boom", None)))

    @step(3)
    def answer_strangely(self, a: int, b: int) -> None:
        """A process says what nobody waits for: a reply again, or to a call that never was."""
        process = pick([p for p in self._live() if p.output], a)
        if process is None:
            return
        call_id = (-1, 7 * 10**8, FIRST_QUESTION)[b % 3]
        value: str | bool = "nothing"
        known = [key for key in self.answers if key[0] == process.index]
        if known and b % 4:
            call_id = known[-1 - b % len(known)][1]
            value = min(self.answers[process.index, call_id], key=repr)
        process.say(process.message(utility=UtilityReply(call_id, None, value)))

    @step(3)
    def corrupt(self, a: int, b: int) -> None:
        """A process says what cannot be read, or what it must not say."""
        process = pick([p for p in self._live() if p.output], a)
        if process is None:
            return
        link = process.output
        call_id = process.calls[0] if process.calls else 7 * 10**8
        good = process.message(utility=UtilityReply(call_id, None, "x"))
        if b % 5 == 0:
            process.say(Frame(b"\xff\xff"))
        elif b % 5 == 1:
            process.say(Frame(good.data[:-1], call_id=call_id))
            process.calls = process.calls[1:]
        elif b % 5 == 2:
            process.say(Frame(process.codec.encode([process.index, [], None, "late"])))
        elif b % 5 == 3:
            process.say(
                Frame(process.message(99, utility=UtilityReply(call_id)).data, call_id=call_id)
            )
            process.calls = process.calls[1:]
        elif link is not None and link.named and process.healthy and len(self.indices) > 1:
            other = (process.index + 1) % len(self.indices)
            process.say(Frame(process.message(other).data, lie=True))

    @step(1)
    def kill(self, a: int, b: int) -> None:
        """A process ends; what it said last may be lost."""
        process = pick(self._live(), a)
        if process is None:
            return
        self._end_process(process)
        if process.output is not None:
            for _ in range(min(b % 3, len(process.output.pipe))):
                process.output.pipe.pop()
        if b % 2:
            self.notice(0, 0)
            self.notice(0, 0)

    def _end_process(self, process: Process) -> None:
        self._hurt(process)
        process.running = False
        process.left.clear()
        for link in (process.input, process.output):
            self._lose(link)

    @step(1)
    def cut(self, a: int, b: int) -> None:
        """A process loses one of its connections; it may make it again."""
        process = pick([p for p in self._live() if p.serving and not p.superseded], a)
        if process is not None:
            side = SIDES[b % 2]
            self._hurt(process)
            process.left.add(side)
            # Lost before anybody knew the process, an output connection is missed by nobody.
            process.ending = process.ending or (side == "output" and not process.registered)
            self._lose(process.input if side == "input" else process.output)

    @step(4)
    def reconnect(self, a: int, b: int) -> None:
        """A process makes a connection again that it lost."""
        process = pick([p for p in self._live() if p.left and not p.superseded], a)
        if process is not None:
            side = sorted(process.left)[b % len(process.left)]
            self._reconnect(process, side)

    def _reconnect(self, process: Process, side: Side) -> None:
        process.left.discard(side)
        self._connect(side, process).made_again = side == "input"

    @step(8)
    def notice(self, a: int, b: int) -> None:
        """The loss of a connection is noticed on this side."""
        link = pick([link for link in self.links if not link.open and not link.noticed], a)
        if link is not None:
            self._notice(link)

    @step(1)
    def sentinel(self, a: int, b: int) -> None:
        """A process reports its own death, and closes its output; its input stays for a while."""
        process = pick([p for p in self._live() if p.serving and p.unbroken], a)
        if process is not None:
            self._hurt(process)
            process.excused = process.ending = True
            process.say(Frame(DEAD_SENTINEL))
            self._lose(process.output)

    @step(1)
    def report(self, a: int, b: int) -> None:
        """The end of a launched process is reported."""
        ended = [
            p
            for p in self.processes
            if not p.running and not p.reported and p.number <= len(self.indices)
        ]
        process = pick(ended, a)
        if process is not None and self.options.launched and self.options.begin != "nothing":
            process.reported = True
            self.reports.append(process)

    @step(1)
    def stranger(self, a: int, b: int) -> None:
        """Somebody connects who is none of the engines, says something, or leaves."""
        if not self.strangers or b % 3 == 0:
            self.visited = True
            self.strangers.append(self._connect(SIDES[a % 2], None))
            return
        link = self.strangers[a % len(self.strangers)]
        if b % 3 == 1:
            self._lose(link)
            self.strangers.remove(link)
        else:
            link.pipe.append(Frame((b"GET / HTTP/1.1", DEAD_SENTINEL)[a % 2]))

    # -- time -------------------------------------------------------------------------------------

    @step(6)
    def advance(self, a: int, b: int) -> None:
        """Time passes, timer by timer."""
        self._advance((0.001, 0.03, 0.15, 1.0, 15.0)[a % 5])

    def _advance(self, seconds: float) -> None:
        end = self.now + seconds
        while not self.ended:
            timer = self.core.next_timer()
            if timer is None or timer > end:
                break
            self.now = max(self.now, timer) + 0.0001
            self.turn(0, 0)
        self.now = max(self.now, end)

    # -- callers ----------------------------------------------------------------------------------

    @step(10)
    def call(self, a: int, b: int) -> None:
        """A caller makes a call to some engines and hands it over."""
        self.prepare_call(a, b)
        self.hand_over(len(self.callers) - 1, 0)

    @step(2)
    def prepare_call(self, a: int, b: int) -> None:
        """A caller registers a call, and does not come to hand it over yet."""
        count = len(self.indices)
        targets = [i for i in self.indices if a % 3 == 0 or (a + b) >> i & 1] or [b % count]
        payloads = {"cbor": b"call", "msgpack": b"call"}
        call_id = next(self._numbers)
        call = PendingCall(call_id, "echo", targets, payloads, Deadline(None), self.now)
        fit = {p.index: p for p in self.processes if p.healthy}
        caller = Caller(call, fit)
        self.callers.append(caller)
        self._calls[call_id] = caller
        caller.registered = self.registry.add(call, each=b % 4 == 3)
        if caller.registered:
            for index in call.targets:
                if index not in call.refused:
                    self.unanswered[index] += 4
        elif not self.ended:
            assert not call.waiting
            self._finish(caller)

    def _open(self) -> list[Caller]:
        return [caller for caller in self.callers if not caller.left]

    @step(3)
    def hand_over(self, a: int, b: int) -> None:
        """A caller hands its call over."""
        waiting = [c for c in self._open() if c.registered and not c.call.handed_over]
        caller = pick(waiting, a)
        if caller is not None:
            caller.call.handed_over = True
            if not self.ended:
                self._hand_over(caller.call.call_id, caller.call)

    def _hand_over(self, key: int | str, item: PendingCall | PendingRequest) -> None:
        self.handed_over[key] = len(self.handed_over)
        self.outbox.append(item)

    @step(4)
    def leave(self, a: int, b: int) -> None:
        """A caller is interrupted, or its time is over, wherever it is; it may come no further."""
        caller = pick(self._open(), a)
        if caller is not None:
            caller.left = True
            self.registry.abandoned.append(caller.call)
            if b % 2:
                self._finish(caller)

    @step(3)
    def finish(self, a: int, b: int) -> None:
        """A caller that left, or was let go, takes its outcomes."""
        done = [c for c in self.callers if not c.drained and (c.left or not c.call.waiting)]
        caller = pick(done, a)
        if caller is not None:
            self._finish(caller)

    def _finish(self, caller: Caller) -> None:
        if not caller.left:
            caller.left = True
            self.registry.abandoned.append(caller.call)
        self.registry.drain()
        caller.drained = True
        call = caller.call
        for index in tuple(call.waiting):
            call.fail(index, CallTimeout(engine=index), self.now)
        outcomes = call.outcomes()
        assert tuple(outcomes) == tuple(call.targets)

    # -- readers ----------------------------------------------------------------------------------

    @step(8)
    def request(self, a: int, b: int) -> None:
        """Somebody sends a request, to the engine of a rank or to any."""
        wire_id = f"r{a % 4}-{next(self._numbers):08x}"
        request = PendingRequest(
            f"r{a % 4}", wire_id, {"cbor": [b"add"], "msgpack": [b"add"]}, self.now
        )
        rank = None if b % 2 else a % len(self.indices)

        def fit(engine: EngineRecord) -> str | None:
            return None

        try:
            added = self.requests.add(request, rank, fit)
        except Exception:
            assert request.engine == -1
            assert wire_id not in {r.wire_id for r in self.requests.live()}
            return
        if not added:
            assert self.ended
            return
        self.unanswered[request.engine] += 3
        healthy = [p for p in self.processes if p.index == request.engine and p.healthy]
        reader = Reader(request, pick(healthy, 0))
        self.readers.append(reader)
        self._readers[wire_id] = reader
        if b % 8 != 7:
            self._hand_over(wire_id, request)
        else:
            # Interrupted before it was handed over: then it is left.
            self._drop(reader)

    def _drop(self, reader: Reader) -> None:
        reader.dropped = True
        self.requests.abandoned.append((reader.request, False))

    @step(10)
    def produce(self, a: int, b: int) -> None:
        """A process tells tokens of its requests; it may end them."""
        process = pick([p for p in self._live() if p.requests], a)
        if process is None:
            return
        records: list[list[Any]] = []
        finished: list[str] = []
        faults = 0
        for number, wire_id in enumerate(list(process.requests)):
            token = process.requests[wire_id]
            process.requests[wire_id] += 1
            what = (a + b + number) % 8
            if what == 7:
                finished.append(wire_id)
                del process.requests[wire_id]
            elif what == 6:
                records.append([wire_id, [token], None, None, None, LAST])
                del process.requests[wire_id]
            elif what == 5 and b % 2:
                records.append([wire_id, "token"])
                faults += 1
            else:
                records.append([wire_id, [token]])
        process.say(
            process.message(outputs=records, finished_requests=finished or None, faults=faults)
        )

    @step(6)
    def take(self, a: int, b: int) -> None:
        """Somebody reads an output."""
        reader = pick([r for r in self.readers if r.request.mailbox.items and not r.dropped], a)
        if reader is not None:
            self._take(reader)

    def _take(self, reader: Reader) -> None:
        request = reader.request
        delivery: Delivery = request.mailbox.items[0]
        assert not reader.over, "something lies behind the end of a stream"
        if delivery.error is not None:
            reader.over = True
            self._check_stream_error(reader, delivery.error)
        else:
            record = delivery.record
            assert record[0] == request.wire_id
            if len(record) > 5 and record[5] == int(FinishReason.ABORT):
                assert reader.aborted, "a stream ends with ABORT that nobody aborted"
                reader.over = True
            else:
                assert record[1] == [reader.tokens], "an output was lost, doubled or moved"
                reader.tokens += 1
                reader.over = len(record) > 5
            request.taken += 1
        request.mailbox.items.popleft()

    @step(3)
    def abort(self, a: int, b: int) -> None:
        """Somebody aborts a stream, or leaves it; finalizers do not even look at the lock."""
        reader = pick([r for r in self.readers if not r.over and not r.dropped], a)
        if reader is None:
            return
        reader.aborted = True
        if b % 3 == 0:
            self._drop(reader)
        else:
            self.requests.abandoned.append((reader.request, True))
            if b % 3 == 1:
                self.requests.drain()

    # -- the end ----------------------------------------------------------------------------------

    @step(0)
    def close(self, a: int, b: int) -> None:
        """The client ends, as the dispatcher does it."""
        if self.ended:
            return
        self.ended = True
        self.outbox.clear()
        self.registry.end(None, self.now)
        self.requests.end(lambda doing: ClientClosedError(doing))
        self.startup.finish()
        self.core.abort()
        self._flush()
        assert self.registry.pending() == 0
        assert not self.requests.live()
        self.check()

    @step(1)
    def settle_down(self, a: int, b: int) -> None:
        """Everything that can happen by itself happens; then the truth must be known."""
        if self.ended:
            return
        for link in self.strangers:
            self._lose(link)
        self.strangers.clear()
        for process in self._live():
            if process.ending:
                self._end_process(process)
        for process in self._live():
            for side in sorted(process.left) if a % 2 and not process.superseded else ():
                self._reconnect(process, side)
        for _ in range(30):
            for link in self.links:
                self._notice(link)
            for process in self._live():
                while process.to_do:
                    self._proceed(process, b)
                self._handle(process, -1)
                while process.calls:
                    self._answer(process, process.calls[0])
            self.turn(0, 0)
            timer = self.core.next_timer()
            if self._quiet():
                if timer is None:
                    break
                self._advance(max(0.0, timer - self.now))
        if not self.ended:
            self._check_truth()

    def _quiet(self) -> bool:
        return not (
            self.outbox
            or self.greetings
            or any(link.pipe or link.inbox for link in self.links)
            or any(self.monitors.values())
        )

    def finish_all(self) -> None:
        """The end of a schedule: settle down, close, and look at every account once more."""
        self.settle_down(1, 0)
        self.check()
        self.close(0, 0)
        for caller in self.callers:
            if not caller.drained:
                self._finish(caller)
        for reader in self.readers:
            while reader.request.mailbox.items and not reader.dropped:
                self._take(reader)
            assert reader.over or reader.dropped, f"{reader.request.wire_id} never ended"
        self.check()
        assert not self.registry._calls
        assert sum(len(c.call.targets) for c in self.callers) == sum(
            len(c.call.outcomes()) for c in self.callers
        )

    # -- accounts ---------------------------------------------------------------------------------

    def _receive(self, link: Link, frame: Frame) -> None:
        """Give a message to the core, and check what it counts and settles."""
        stats = self.stats
        before = stats.snapshot()
        self.read += 1
        known = self.core.known("output").get(link.fd)
        retired = known is not None and known.retired
        if link.process is not None and link.process.superseded and not retired:
            # Two processes of one index, and nothing tells whose connection this is.
            for process in self.processes:
                if process.index == link.process.index:
                    self._hurt(process)
        caller = self._calls.get(-1 if frame.call_id is None else frame.call_id)
        waited = caller is not None and frame.index in caller.call.waiting and not caller.drained
        readers = {w: self._readers[w] for w in frame.wire_ids}
        delivered = sum(r.request.delivered for r in readers.values())
        overflows = self._overflows(readers)
        if frame.index < 0 and frame.data != DEAD_SENTINEL:
            self.bad.append((link, frame))
        if not self.core.output([frame.data], link.fd, self.now, followed=False):
            self._read_monitors()
            assert self.core.output([frame.data], link.fd, self.now)
        self._check_settled()
        self.bad.clear()
        late = stats.late_replies - before.late_replies
        malformed = stats.malformed_messages - before.malformed_messages
        assert stats.received - before.received == 1
        if frame.index < 0:
            assert malformed <= 1
            undecided = frame.data == DEAD_SENTINEL or (frame.lie and not link.open)
            assert malformed == 1 or undecided, "a bad message was not counted"
            assert (late, stats.outputs) == (0, before.outputs)
            dying = link.process
            if frame.data == DEAD_SENTINEL and dying is not None and dying.registered:
                known = self.core.known("output").get(link.fd)
                if link.named and not retired and known is not None and not known.closing:
                    assert not self.registry.engines[dying.index].alive, (
                        "an engine that reported its death is taken for alive"
                    )
            return
        known = self.core.known("output").get(link.fd)
        unread = any(fd == link.fd for _, fd in self.monitors["output"])
        if known is not None and not known.closing and not unread:
            link.named.add(frame.index)
        # Of what is late, on a connection that is no engine's any more, nobody looks at the parts.
        dropped = stats.late_outputs - before.late_outputs == len(frame.wire_ids)
        assert malformed == (0 if dropped else frame.faults), "a good message counts as malformed"
        if frame.call_id is not None and frame.call_id >= FIRST_QUESTION:
            assert late in (0, 1)
        elif frame.call_id is not None and frame.call_id > 0:
            assert caller is not None or late == 1
            settled = waited and caller is not None and frame.index not in caller.call.waiting
            assert settled + late == 1, "a reply was neither delivered nor counted"
        assert stats.outputs - before.outputs == len(frame.wire_ids), "outputs were not counted"
        late = stats.late_outputs - before.late_outputs
        delivered = sum(r.request.delivered for r in readers.values()) - delivered
        overflows = self._overflows(readers) - overflows
        assert delivered + late + overflows + malformed == len(frame.wire_ids), (
            "an output was neither delivered nor counted"
        )

    @staticmethod
    def _overflows(readers: dict[str, Reader]) -> int:
        ends = [r.request.mailbox.items[-1] for r in readers.values() if r.request.mailbox.items]
        return sum(isinstance(end.error, StreamOverflow) for end in ends)

    def _note_sent(self, item: Outgoing) -> None:
        sent = self.sent[item.engine]
        if isinstance(item.work, PendingCall):
            call = item.work
            self._check_not_refused(call, item.engine)
            self._check_order(sent, call.call_id)
        elif isinstance(item.work, PendingRequest):
            request = item.work
            assert request.wire_id not in self.told, "an ADD came behind its ABORT"
            assert item.engine == request.engine
            self._check_order(sent, request.wire_id)
        elif item.frames[1] == RequestType.ABORT:
            for wire_id in codec_named(self._dialect(item.engine)).decode(item.frames[-1]):
                assert wire_id in sent, "an ABORT of what was never sent"
                assert wire_id not in self.told, "a request was aborted twice"
                self.told.add(wire_id)

    def _dialect(self, index: int) -> Dialect:
        return "msgpack" if self.options.mixed and index % 2 else "cbor"

    def _check_order(self, sent: list[int | str], key: int | str) -> None:
        assert key in self.handed_over, "something was sent that nobody handed over"
        assert not sent or self.handed_over[sent[-1]] < self.handed_over[key], (
            "an engine was sent things in another order than they were handed over"
        )
        sent.append(key)

    def _check_not_refused(self, call: PendingCall, index: int) -> None:
        future = call.futures[index]
        if future.done():
            outcome = future.result(0)
            assert not isinstance(outcome, Failed) or outcome.error.may_have_run, (
                "a call was sent that had been reported as not sent"
            )

    def _check_settled(self) -> None:
        """Check the cause of each outcome that has not been looked at."""
        for caller in self.callers:
            if not caller.unseen:
                continue
            for index in [i for i in caller.unseen if caller.call.futures[i].done()]:
                caller.unseen.discard(index)
                outcome = caller.call.futures[index].result(0)
                if isinstance(outcome, Ok):
                    key = (index, caller.call.call_id)
                    assert outcome.value in self.answers.get(key, ()), "a wrong answer"
                else:
                    self._check_error(caller, index, outcome.error)

    def _check_error(self, caller: Caller, index: int, error: EngineError) -> None:
        call_id = caller.call.call_id
        assert error.engine == index
        if isinstance(error, RemoteError):
            assert (index, call_id) in self.failures
        elif isinstance(error, ReplyError):
            assert any(self._may_be_of(link, frame, index, call_id) for link, frame in self.bad), (
                "a bad message failed what it could not have been for"
            )
        elif isinstance(error, EngineDeadError):
            process = caller.fit.get(index)
            assert process is None or not process.healthy or not process.registered, (
                f"engine {index} is well, and a call failed because of its death"
            )
        elif isinstance(error, AbandonedError):
            assert self.ended
        elif isinstance(error, CallTimeout):
            assert caller.drained
        else:
            assert isinstance(error, NotSentError)
            assert not error.may_have_run
        if call_id in self.sent[index]:
            assert error.may_have_run, "a call was sent, and is said not to have run"
        if call_id not in self.handed_over and not isinstance(error, CallTimeout):
            assert not error.may_have_run, "a call was not sent, and is said to have run"

    def _may_be_of(self, link: Link, frame: Frame, index: int, call_id: int) -> bool:
        if frame.call_id is not None and frame.call_id != call_id:
            return False
        known = self.core.known("output").get(link.fd)
        # The number of a lost connection may be any engine's by now.
        if not link.named or index in link.named or known is None or known.closing:
            return True
        # An engine that no connection can be the own one of may share another's.
        peer = self.core._peers[index]
        unnamed = self.core._unnamed_outputs()
        return peer.output is None and not any(c.born > peer.since for c in unnamed)

    def _check_stream_error(self, reader: Reader, error: BaseException) -> None:
        request = reader.request
        sent = request.wire_id in self.sent[request.engine]
        if isinstance(error, EngineDeadError):
            assert reader.fit is None or not reader.fit.healthy
            assert error.may_have_run or not sent
        elif isinstance(error, StreamOverflow):
            assert request.delivered >= MAX_PENDING
        elif isinstance(error, ClientClosedError):
            assert self.ended
        else:
            assert isinstance(error, ReplyError | StreamError | NotSentError)

    def check(self) -> None:
        """Check every account; called after each step."""
        self._check_settled()
        self._check_registered()
        self._check_requests()
        self._check_queues()
        for process in self.processes:
            if process.healthy and not self.ended and not process.superseded:
                assert self.registry.engines[process.index].alive, (
                    f"engine {process.index} is well and taken for dead: "
                    f"{self.registry.engines[process.index].death}"
                )

    def _check_registered(self) -> None:
        pending = 0
        calls = self.registry._calls
        gone = {id(call) for call in self.registry.abandoned}
        for caller in self.callers:
            call = caller.call
            done = {i for i, future in call.futures.items() if future.done()}
            assert set(call.waiting) == set(call.targets) - done, "settled, yet waited for"
            known = calls.get(call.call_id) is call
            if caller.drained or not caller.registered:
                assert not known, "a call stays registered that its caller has left"
            elif call.waiting and not (caller.left and id(call) not in gone):
                assert known, "a call that waits is not registered"
            if known:
                # A call that was refused for every target never waits; its caller goes on at once.
                assert call.waiting or call.refused == set(call.targets), (
                    "a call stays registered that has settled"
                )
                assert call.latch._lock.locked()
                if id(call) not in gone:
                    pending += len(call.waiting)
                    for index in call.waiting:
                        assert self.registry.engines[index].alive, (
                            f"a call waits for engine {index}, which is dead"
                        )
        assert pending == self.registry.pending()

    def _check_requests(self) -> None:
        live = {r.wire_id: r for r in self.requests.live()}
        assert set(live) == {r.request.wire_id for r in self.readers if not r.request.finished}
        assert len({r.request_id for r in live.values()}) == len(live)
        by_engine: dict[int, set[str]] = {index: set() for index in self.indices}
        for request in live.values():
            by_engine[request.engine].add(request.wire_id)
            assert self.registry.engines[request.engine].alive
        for index, record in self.registry.engines.items():
            assert record.requests == by_engine[index]
            assert record.alive or not record.sent
        for reader in self.readers:
            waiting = reader.request.delivered - reader.request.taken
            assert waiting <= MAX_PENDING + 1

    def _check_queues(self) -> None:
        for index, record in self.registry.engines.items():
            if record.last_seen != self.seen[index] or index in self.registry.came_back:
                self.unanswered[index] = 0
            self.seen[index] = record.last_seen
            assert record.unanswered == self.unanswered[index], "bytes were counted wrong"
        self.registry.came_back.clear()

    def _check_truth(self) -> None:
        """Check that all is known when nothing is under way any more."""
        undecided: set[int] = set()
        for index in self.indices:
            registered = [p for p in self.processes if p.index == index and p.registered]
            process = pick(registered, 0)
            alive = self.registry.engines[index].alive
            if process is None:
                assert not alive, f"engine {index} never registered and is taken for alive"
                continue
            if process.rivalled or (not process.serving and self._undecided(process)):
                undecided.add(index)
                continue
            if not process.serving:
                assert not alive, f"engine {index} is gone and is taken for alive"
            elif not (
                process.excused
                or process.superseded
                or self._successor(process)
                # It and one that reported its death (a stranger may, too) lost connections without
                # a name: either may be the one that is dead for good.
                or (
                    not process.unbroken and (self.visited or any(p.ending for p in self.processes))
                )
            ):
                assert alive, (
                    f"engine {index} is back and is taken for dead: "
                    f"{self.registry.engines[index].death}"
                )
            if alive:
                requests = [r for r in self.requests.live() if r.engine == index]
                for request in requests:
                    assert (
                        request.wire_id in process.requests
                        or request.wire_id not in self.handed_over
                        or id(request) in self.lost_unseen
                        or process.superseded
                    ), f"{request.wire_id} waits for ever for engine {index}"
                live = {r.wire_id for r in requests}
                # What it was told to stop while its connection broke is told once only.
                assert process.excused or set(process.requests) <= live | self.told, (
                    f"engine {index} works for nobody"
                )
        for caller in self.callers:
            call = caller.call
            if (
                caller.registered
                and call.handed_over
                and not (caller.left or id(call) in self.lost_unseen)
            ):
                assert undecided.issuperset(call.waiting), "a call waits for ever"

    def _undecided(self, process: Process) -> bool:
        """Whether only its output is lost, and too much else happened to tell that it is.

        An output connection has no name before something has come on it, and stands for that of
        any engine.  One engine that turns mute is found; not always when connections of others come
        and go meanwhile.
        """
        others = [p for p in self.processes if p is not process]
        return (
            process.running
            and process.input is not None
            and process.input.open
            and (self.visited or any(not p.unbroken or p.superseded for p in others))
        )

    def _successor(self, process: Process) -> bool:
        return any(p.index == process.index and p.number > process.number for p in self.processes)
