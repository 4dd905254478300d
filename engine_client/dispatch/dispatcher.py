"""The dispatcher: the one thread of a client that owns the poller and every socket.

The loop moves bytes and events between the sockets, the outbox and the :class:`Core`; what they
mean is decided there.  Only this thread sends: a ``send_multipart`` in a main thread is torn in two
by Ctrl-C.  Only this thread ends a client: ``close()``, a finalizer and a signal handler ask by
appending to a deque and poking the wake-up, which needs no lock.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from math import inf
from typing import Protocol

import zmq

from engine_client.config import ClientConfig
from engine_client.deadline import Deadline
from engine_client.dispatch.core import Core
from engine_client.dispatch.outbox import LOOK_INTERVAL, Outbox
from engine_client.dispatch.peers import Side
from engine_client.dispatch.registry import Registry
from engine_client.dispatch.requests import PendingRequest, RequestTable
from engine_client.dispatch.sockets import Transport, plain_send, read_monitor, subscribe
from engine_client.dispatch.sources import Sources, has_input
from engine_client.dispatch.waiting import Latch, PendingCall, Startup
from engine_client.errors import ClientBrokenError, ClientClosedError, HandshakeError
from engine_client.stats import ClientStats
from engine_client.wire.messages import Init

__all__ = ["Dispatcher", "ProcessOwner"]

logger = logging.getLogger("engine_client")

_numbers = itertools.count(1)
_LARGE = 65_536
"""Bytes from which a frame is sent without a copy; below, a copy is cheaper."""
_NOBLOCK, _MORE, _SRCFD = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE), int(zmq.SRCFD)
"""As plain integers: operations on pyzmq's enumerations cost as much as sending a frame."""
_BATCH = 1000
"""Messages read from one socket before the others get their turn."""
_LOOK_DELAY = 0.02
"""Seconds that a registration waits at most when a send has taken the news of it away.  A look
after each send is a good part of what a call costs."""
_AT_ONCE = 64
"""Messages of engines that are taken before the first is delivered, when that may wake several."""


class ProcessOwner(Protocol):
    """Who started the engines' processes and hears how they end (a supervisor)."""

    def fileno(self) -> int:
        """A descriptor that is readable when there are reports."""

    def read_exits(self) -> list[tuple[int, str]] | None:
        """Index and manner of the end ("exited with code 3; ...") of each engine that ended.

        None when there will be no more reports.
        """

    def stop(self, timeout: float | None) -> None:
        """End all processes."""


class Dispatcher:
    """One client's thread, and what callers share with it.

    It holds no reference to the client, so that a client dropped without ``close()`` is collected,
    and asks for its end.

    Args:
        config: the client's settings.
        transport: open sockets; owned by the dispatcher from here on.
        init: what a HELLO is answered with; None when another process greets the engines.
        processes: who started the engines; None when somebody else did.
        coordinator_address: of an external coordinator, where it is known beforehand.
    """

    def __init__(
        self,
        config: ClientConfig,
        transport: Transport,
        *,
        init: Init | None,
        processes: ProcessOwner | None = None,
        coordinator_address: str | None = None,
    ) -> None:
        self.config = config
        self.addresses = dict(transport.addresses)
        self.owner_pid = os.getpid()
        self.registry = Registry(config.engines, config.max_unanswered_bytes)
        self.outbox: Outbox[PendingCall | PendingRequest] = Outbox()
        self.requests = RequestTable(self.registry, config.max_pending_outputs)
        self.stats = ClientStats()
        self.startup = Startup()
        # Unique across restarts of the client too: a late answer to a previous one's call never
        # matches.  Below 2**53, which every language's numbers hold.
        self.call_ids: Iterator[int] = itertools.count(_random_bits(52) + 1)
        self.request_numbers: Iterator[int] = itertools.count(_random_bits(32))
        self.core = Core(
            config.engines,
            self.registry,
            self.requests,
            self.startup,
            self.stats,
            codec=config.codec,
            client_index=config.client_index,
            init=init,
            call_ids=self.call_ids,
            max_message_size=config.max_message_size,
            keeper=(
                "in process"
                if "coordinator_input" in transport.sockets
                else "external"
                if coordinator_address
                else "none"
            ),
        )
        self.core.coordinator_address = self._given_coordinator = coordinator_address
        self._transport = transport
        self._processes = processes
        self._sources = Sources()
        self._reports = -1
        """The descriptor of ``processes``."""
        self._connection_events: list[tuple[Side, int, int]] = []
        """Losses, and arrivals on a descriptor that was lost, not yet acted upon."""
        self._closers: deque[tuple[Deadline, Latch]] = deque()
        self._finished = False
        self._begun = threading.Lock()
        """Taken for good by whoever ends the client: the thread, or who finds that it never ran."""
        self._thread = threading.Thread(
            target=self._run, name=f"engine-client-dispatcher-{next(_numbers)}", daemon=True
        )

    def start(self) -> None:
        """Start the thread."""
        _live.add(self)
        self._thread.start()

    @property
    def owns_processes(self) -> bool:
        """Whether the end of the client ends engines."""
        return self._processes is not None

    def abandon(self, deadline: Deadline, *, join: bool = True) -> None:
        """End a client whose start failed or was interrupted, at whatever point.

        Args:
            deadline: for the sockets and processes to end.
            join: also see the thread gone.  Not from a bare thread, which would get a name in
                ``threading`` for good.
        """
        if self._begun.acquire(blocking=False):
            # The thread has not begun, and finds that it need not.
            self._closers.append((deadline, Latch()))
            self._end(None)
            return
        grace = Deadline(_ABANDON_LIMIT)
        if self.ask_close(deadline).wait(grace.lock_timeout()) and join:
            self.join(grace.remaining())

    # -- callers ------------------------------------------------------------------------------

    def is_foreign(self) -> bool:
        """Whether this is a forked child of the process that made the client."""
        return os.getpid() != self.owner_pid

    def is_current_thread(self) -> bool:
        """Whether this is the dispatcher's own thread (a finalizer of a user may run there)."""
        return threading.get_ident() == self._thread.ident

    def check_usable(self) -> None:
        """Refuse use after a fork, from the dispatcher itself, and after the end.

        Raises:
            ClientBrokenError: this process is a fork of the owner, or the client broke.
            ClientClosedError: the client was closed.
        """
        if self.is_foreign():
            # Before any lock: another thread of the owner may have held it when it forked.
            raise ClientBrokenError(
                f"this client belongs to process {self.owner_pid}, and this process "
                f"({os.getpid()}) is a fork of it: make a client of its own here"
            )
        if self.is_current_thread():
            raise RuntimeError(
                "a client cannot be used from its own dispatcher thread "
                "(a finalizer or log handler of yours runs there)"
            )
        if self.registry.ended:
            raise self.ended_error()

    def ended_error(self, under_way: str = "") -> ClientClosedError | ClientBrokenError:
        """A fresh error that says why the client takes no calls; its cause is attached.

        Args:
            under_way: what was under way when it ended, as words that follow "before ".
        """
        before = f" before {under_way}" if under_way else ""
        cause = self.registry.closing_cause
        if cause is None:
            return ClientClosedError(
                f"the client was closed{before}"
                if under_way
                else "the client is closed and takes no more calls; make a new one"
            )
        error = ClientBrokenError(f"the client broke{before}: {type(cause).__name__}: {cause}")
        error.__cause__ = cause
        return error

    def ask_close(self, deadline: Deadline) -> Latch:
        """Ask for the end.  Takes no lock: finalizers and signal handlers may call it.

        Returns:
            A latch that opens when the client has ended.
        """
        latch = Latch()
        self._closers.append((deadline, latch))
        self.outbox.wakeup.poke()
        if self._finished:
            # The dispatcher may have looked for the last time before the append.
            self._release()
        return latch

    def join(self, timeout: float | None) -> None:
        """Wait until the thread is gone, unless this is the thread or it never started."""
        if not self.is_current_thread() and self._thread.ident is not None:
            self._thread.join(timeout)

    def _release(self) -> None:
        with suppress(IndexError):
            while True:
                self._closers.popleft()[1].open()

    # -- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        if not self._begun.acquire(blocking=False):
            return
        cause: BaseException | None = None
        try:
            self._loop()
        except BaseException as exc:  # nobody above could learn of it
            cause = exc
            logger.exception("the dispatcher failed; every waiting call fails with this cause")
        finally:
            self._end(cause)

    def _loop(self) -> None:
        core, outbox, registry, requests = self.core, self.outbox, self.registry, self.requests
        sockets = self._transport.sockets
        wakeup, outputs, sources = outbox.wakeup, sockets["output"], self._sources
        wakeup_fd, outputs_fd = sources.add(wakeup.fd), sources.add(outputs)
        for side in _SIDES:
            sources.add(self._transport.monitors[side])  # followed before anything else is read
        for name, read in (
            ("input", self._read_registrations),
            ("handshake", self._read_handshake),
            ("coordinator_input", self._read_subscriptions),
            ("coordinator_output", self._read_coordinator_outputs),
        ):
            if name in sockets:
                sources.add(sockets[name], read)
        if self._processes is not None:
            self._reports = sources.add(self._processes.fileno(), self._read_exits)
        clock = time.monotonic
        look_at = inf  # when to look at the input socket, since something was sent through it
        while not self._closers:
            timer = core.next_timer()
            wait = LOOK_INTERVAL if look_at == inf else look_at - clock()
            if timer is not None:
                wait = min(wait, timer - clock())
            ready = sources.wait(wait)
            now = clock()
            if now >= look_at:
                look_at = inf
                sources.look(sockets["input"])
            if outputs_fd in ready:
                del ready[outputs_fd]
                if not self._read_outputs(now, _BATCH):
                    sources.look(outputs)
            if wakeup_fd in ready:
                del ready[wakeup_fd]
                wakeup.drain()
            if outbox.pending:
                self._take_work(now)
            if registry.abandoned:
                registry.drain()
            if ready or self._connection_events:
                self._follow_connections(now)
                sources.read(ready, now)
            if core.coordinator_address is not None and "coordinator" not in sockets:
                self._follow_coordinator(core.coordinator_address)
            if timer is not None:
                core.tick(now)
            if requests.to_abort or requests.abandoned:
                self._abort_left()
            if core.outgoing:
                for name in self._flush(now):
                    if name == "input":
                        look_at = min(look_at, now + _LOOK_DELAY)
                    else:
                        sources.look(sockets[name])

    def _take_work(self, now: float) -> None:
        """Take what callers handed over, and what they left."""
        core = self.core
        # In this order.  A request's abort comes after its ADD, or the ADD is never sent; and what
        # a caller handed over after an abort is sent after it.
        work = self.outbox.take()
        if self.requests.to_abort or self.requests.abandoned:
            self._abort_left()
        for item in work:
            if isinstance(item, PendingCall):
                core.submit(item, now)
            else:
                core.submit_request(item, now)

    def _abort_left(self) -> None:
        requests = self.requests
        requests.drain()
        if requests.to_abort:
            self.core.abort()

    def _flush(self, now: float) -> set[str]:
        """Send what the core left, in order; return the names of the sockets that were used."""
        core = self.core
        outgoing = core.outgoing
        large: bytes | None = None
        shared: zmq.Frame | None = None
        used: set[str] = set()
        sent, previous = 0, ""
        while outgoing:
            item = outgoing.popleft()
            channel, _, frames, work = item
            if channel != previous:
                previous = channel
                used.add(channel)
                send = plain_send(self._transport.sockets[channel])
            last = frames[-1]
            try:
                for frame in frames[:-1]:
                    send(frame, _MORE, True)
                if len(last) < _LARGE:
                    send(last, _NOBLOCK, True)
                else:
                    # One copy into a ZeroMQ message that all engines share.  (pyzmq's own way
                    # without a copy starts a thread that never ends.)
                    if last is not large:
                        large, shared = last, zmq.Frame(last, copy=True)
                    assert shared is not None
                    send(shared, _NOBLOCK, False)
            except zmq.ZMQError as exc:
                if exc.errno != zmq.EHOSTUNREACH:
                    raise
                core.unreachable(item, now)
                continue
            sent += 1
            if work is None:
                core.reached(item, now)
        self.stats.sent += sent
        return used

    def _read_outputs(self, now: float, limit: int | None = None) -> bool:
        """Read the output socket, at most ``limit`` messages; return whether it is empty."""
        outputs, registry = self._transport.sockets["output"], self.registry
        receive, completed = outputs.recv, registry.completed
        deliver, known = self.core.output, self.core.known("output")
        # While nobody can be woken but the caller of one call, by its last reply, nothing is gained
        # by looking first whether there is more.
        at_once = 1 if registry.under_way <= 1 and self.requests.empty else _AT_ONCE
        read = 0
        more = True
        while more and (limit is None or read < limit):
            # Several are taken before the first is delivered: each receive lets go of the GIL, and
            # a consumer that one output has woken would take it every time.
            taken: list[tuple[list[bytes], int]] = []
            while len(taken) < at_once:
                try:
                    frame = receive(_NOBLOCK, False)
                except zmq.Again:
                    more = False
                    break
                fd = _descriptor(frame)
                frames = [frame.bytes]
                while frame.more:
                    frame = receive(_NOBLOCK, False)
                    frames.append(frame.bytes)
                taken.append((frames, fd))
            read += len(taken)
            for frames, fd in taken:
                if fd not in known:
                    self._read_monitors(now)
                if not deliver(frames, fd, now, False):
                    # Its connection surprises: the number may be another's by now.
                    self._read_monitors(now)
                    deliver(frames, fd, now, True)
            if more and registry.completed != completed:
                completed = registry.completed
                # A caller was let go.  Another receive would give it the GIL in the middle of this
                # thread's work, and each would wait for the other; a look gives nothing away.
                if not has_input(outputs):
                    return True
        return not more

    def _read_monitors(self, now: float) -> None:
        """Learn of new connections; keep losses until the output socket has been read empty."""
        core = self.core
        events = self._connection_events
        for side in _SIDES:
            for event, fd in read_monitor(self._transport.monitors[side]):
                if event == zmq.EVENT_ACCEPTED and fd not in core.known(side):
                    core.connected(side, fd, now)
                else:
                    core.closing(side, fd)
                    events.append((side, event, fd))

    def _follow_connections(self, now: float) -> None:
        """Act upon connections that came and went."""
        self._read_monitors(now)
        while self._connection_events:
            events, self._connection_events = self._connection_events, []
            # A last reply counts: whatever a lost connection still delivered comes first.
            self._read_outputs(now)
            for side, event, fd in events:
                if event == zmq.EVENT_ACCEPTED:
                    self.core.connected(side, fd, now)
                else:
                    self.core.disconnected(side, fd, now)

    def _read_registrations(self, now: float) -> None:
        receive = self._transport.sockets["input"].recv_multipart
        for _ in range(_BATCH):
            try:
                identity, *frames = receive(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                self.core.inputs_read()
                return
            # A descriptor is trusted only once all that happened before is known.
            self._follow_connections(now)
            fd = _descriptor(frames[-1]) if frames else -1
            self.core.registration(identity.bytes, [f.bytes for f in frames], fd, now)

    def _read_handshake(self, now: float) -> None:
        for frames in _messages(self._transport.sockets["handshake"]):
            self.core.handshake_frames(frames, now)

    def _read_subscriptions(self, now: float) -> None:
        for (frame,) in _messages(self._transport.sockets["coordinator_input"], frames=1):
            self.core.group.subscribed(frame)

    def _read_coordinator_outputs(self, now: float) -> None:
        for frames in _messages(self._transport.sockets["coordinator_output"]):
            self.core.coordinator_output(frames)

    def _follow_coordinator(self, address: str) -> None:
        try:
            self._sources.add(subscribe(self._transport, address), self._read_coordinator)
        except HandshakeError as exc:
            if self._given_coordinator is not None:
                raise
            # An engine said so, and what it says ends no client.
            logger.error("%s; going on without it", exc)
            self.core.coordinator_address = None
            self.core.group.keeper = "none"
            return
        self._sources.add(self._transport.monitors["coordinator"], self._read_coordinator)

    def _read_coordinator(self, now: float) -> None:
        """Follow an external coordinator."""
        for _ in read_monitor(self._transport.monitors["coordinator"]):
            logger.warning(
                "the connection to the coordinator at %s was lost; a request to a group that "
                "sleeps waits until it is back",
                self.core.coordinator_address,
            )
        for frames in _messages(self._transport.sockets["coordinator"]):
            self.core.coordinator_published(frames, now)

    def _read_exits(self, now: float) -> None:
        """Hear which processes ended."""
        assert self._processes is not None
        exits = self._processes.read_exits()
        if exits is None:
            self._sources.remove(self._reports)
            return
        if exits:
            self._follow_connections(now)
            self._read_outputs(now)
        for index, how in exits:
            self.core.process_exited(index, how, now)

    def _end(self, cause: BaseException | None) -> None:
        """Refuse new work, settle every waiter, close everything, let the closers go."""
        deadline = self._closers[0][0] if self._closers else Deadline(self.config.close_timeout)
        try:
            self.outbox.close()
            now = time.monotonic()
            self.registry.end(cause, now)
            self.requests.end(self.ended_error)
            self.startup.finish(self.ended_error())
            # Engines must not go on working for nobody.
            self.core.abort()
            with suppress(zmq.ZMQError):
                self._flush(now)
        finally:
            try:
                if self._processes is not None:
                    self._processes.stop(deadline.remaining())
                left = deadline.remaining()
                self._transport.close(_FOREVER if left is None else left)
            except Exception:
                logger.exception("closing the client's sockets or processes failed")
            finally:
                self.outbox.wakeup.close()
                self._finished = True
                self._release()
                _live.discard(self)


_FOREVER = 86_400.0
_ABANDON_LIMIT = 5.0
"""Seconds that the caller of a failed start waits for the thread to end."""
_SIDES: tuple[Side, ...] = ("input", "output")


def _messages(sock: zmq.Socket[bytes], *, frames: int | None = None) -> Iterator[list[bytes]]:
    """What a socket holds, at most a batch; messages of another number of frames are skipped."""
    for _ in range(_BATCH):
        try:
            message = sock.recv_multipart(_NOBLOCK)
        except zmq.Again:
            return
        if frames is None or len(message) == frames:
            yield message


def _random_bits(count: int) -> int:
    """A random number of so many bits; the module secrets takes 5 ms to import."""
    return int.from_bytes(os.urandom(8), "little") >> (64 - count)


def _descriptor(frame: zmq.Frame) -> int:
    """The descriptor of the connection that a received frame came on; -1 where there is none."""
    try:
        descriptor: int = frame.get(_SRCFD)
    except zmq.ZMQError:  # inproc
        return -1
    return descriptor


_live: set[Dispatcher] = set()
"""Those whose end has not come: their threads hold them as long."""
EXIT_TIMEOUT = 5.0
"""Seconds that the end of the program gives a client whose ``close_timeout`` has no limit."""
_EXIT_GRACE = 1.0


@atexit.register
def _close_all() -> None:
    """End clients that their owner did not close, so that engines and ipc files go too."""
    asked = []
    for dispatcher in list(_live):
        if not dispatcher.is_foreign():
            seconds = dispatcher.config.close_timeout
            seconds = EXIT_TIMEOUT if seconds is None else seconds
            latch = dispatcher.ask_close(Deadline(seconds))
            asked.append((dispatcher, latch, Deadline(seconds + _EXIT_GRACE)))
    for dispatcher, latch, deadline in asked:
        if latch.wait(deadline.lock_timeout()):
            dispatcher.join(deadline.remaining())
