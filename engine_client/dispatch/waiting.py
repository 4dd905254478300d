"""Where a caller can block: on a latch, and nowhere else.

A latch is a bare ``threading.Lock`` used once.  ``Future.result()``, ``Event``, ``Condition`` and
``queue.Queue`` are not used to block on: their ``__enter__`` is Python code, and a Ctrl-C that
lands after it took its inner lock leaves that lock held for ever; the dispatcher then hangs in
``set_result()`` and every caller with it.
"""

from __future__ import annotations

import _thread
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ALL_COMPLETED, Future, InvalidStateError, wait
from typing import Any, Generic, TypeVar

from engine_client.deadline import Deadline
from engine_client.errors import EngineError
from engine_client.outcome import Failed, Ok, Outcome, Outcomes

__all__ = ["Latch", "Mailbox", "PendingCall", "Startup", "uninterrupted"]

UNDO_LIMIT = 5.0
"""Seconds that an interrupted caller waits until what it no longer wants is taken back."""


SLICE = 0.5
"""Seconds that a wait blocks at most before it looks for signals."""

T = TypeVar("T")


class Latch:
    """A gate that opens once.  One party waits; any may open it."""

    __slots__ = ("_lock", "block", "open")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        # Bound here: opening is then one C call, which an interrupt cannot split.
        self.open: Callable[[], None] = self._lock.release
        self.block: Callable[[bool, float], bool] = self._lock.acquire
        """The shortest way to wait, for ``(True, seconds)``: at most SLICE of them."""

    def open_once(self) -> None:
        """Open it unless it is open; callers must be serialised by a lock."""
        if self._lock.locked():
            self.open()

    def wait(self, timeout: float = -1) -> bool:
        """Block until open; False when ``timeout`` seconds passed first (-1: no limit)."""
        if 0 <= timeout <= SLICE:
            return self._lock.acquire(timeout=timeout)
        # CPython does not notice a signal that comes between its last look for one and the
        # blocking system call; so it gets to look again from time to time.
        started = time.monotonic()
        if self._lock.acquire(timeout=SLICE):
            return True
        end = math.inf if timeout < 0 else started + timeout
        while not self._lock.acquire(timeout=min(SLICE, max(0.0, end - time.monotonic()))):
            if time.monotonic() >= end:
                return False
        return True


class Mailbox(Generic[T]):
    """A queue with one reader, who may be interrupted anywhere and loses nothing.

    The reader looks at ``items[0]``, uses it, and pops it then; only when there is none it waits.
    Writers must be serialised by a lock.
    """

    __slots__ = ("items", "waiter")

    def __init__(self) -> None:
        self.items: deque[T] = deque()
        self.waiter: Latch | None = None
        """What the reader waits on (written by the reader only)."""

    def put(self, item: T) -> None:
        """Add an item and wake the reader."""
        self.items.append(item)
        waiter = self.waiter
        if waiter is not None:
            # Not cleared here: by now it may be that of the reader's next wait.
            waiter.open_once()

    def wait(self, deadline: Deadline, at_most: float | None = None) -> bool:
        """Block until there is an item (reader only); False when the time ran out first."""
        latch = Latch()
        # Announced before the look: a writer who comes between the two opens it.
        self.waiter = latch
        items = self.items
        found = bool(items) or latch.wait(deadline.lock_timeout(at_most)) or bool(items)
        self.waiter = None
        return found


class _Waiter(Future[Outcome]):
    """One engine's part of a call: a future that shares its condition with those of the others.

    A condition of its own is ten objects, and a third of what a caller does for each engine.
    Settling takes no lock and wakes nobody: nobody blocks on a waiter, but on the latch of its
    call, and the dispatcher must not wait for a lock that an interrupted caller has left held.
    """

    def __init__(self, condition: threading.Condition) -> None:
        # What Future.__init__ sets, the same since Python 3.2; a test compares them.
        self._condition = condition
        self._state = "PENDING"
        self._result = self._exception = None
        self._waiters: list[Any] = []
        self._done_callbacks: list[Any] = []

    def set_result(self, result: Outcome) -> None:
        """Settle it; requires the registry lock, or sole ownership."""
        if self._state != "PENDING":
            raise InvalidStateError(f"{self._state}: {self!r}")
        self._result = result
        self._state = "FINISHED"

    def done(self) -> bool:
        """Whether it has settled; requires what :meth:`set_result` does."""
        return self._state == "FINISHED"


class PendingCall:
    """One utility call on its way to one or many engines: its futures, its latch, its frames.

    Until it is unregistered, ``waiting``, ``settled`` and ``ended`` are written under the registry
    lock only, and no caller touches a future.  Afterwards they belong to the caller alone.
    """

    __slots__ = (
        "call_id",
        "deadline",
        "ended",
        "futures",
        "handed_over",
        "latch",
        "lora",
        "method",
        "payloads",
        "refused",
        "sent",
        "settled",
        "started",
        "targets",
        "waiting",
    )

    def __init__(
        self,
        call_id: int,
        method: str,
        targets: Sequence[int],
        payloads: dict[str, bytes],
        deadline: Deadline,
        started: float,
    ) -> None:
        self.call_id = call_id
        self.method = method
        self.targets = targets
        self.payloads = payloads
        """The encoded message per form; one serves all engines that take it."""
        self.deadline = deadline
        self.started = started
        condition = threading.Condition()
        self.futures: dict[int, Future[Outcome]] = {i: _Waiter(condition) for i in targets}
        self.waiting = dict(self.futures)
        """The futures that have not settled."""
        self.settled: dict[int, Outcome] = {}
        """What the other futures hold: to ask one takes as long as to settle it."""
        self.ended = False
        """Whether the client ended before this call did."""
        self.handed_over = False
        """Whether the outbox may have it: then engines may run it, whatever happens here."""
        self.sent: set[int] = set()
        """Engines to which it was sent (dispatcher only)."""
        self.refused: set[int] = set()
        """Engines for which it failed before it was sent (dispatcher only); never sent to them."""
        self.latch = Latch()
        self.lora: int | None = None
        """The adapter that it loads or removes."""

    def succeed(self, index: int, value: Any, now: float) -> None:
        """Settle one engine's future with its result.  Requires the registry lock."""
        outcome = self.settled[index] = Ok(value, now - self.started)
        self.waiting.pop(index).set_result(outcome)

    def fail(self, index: int, error: EngineError, now: float) -> None:
        """Settle one engine's future.  Requires the registry lock, or sole ownership."""
        # In this order: a caller that is interrupted in between does it again, and no future is
        # left that is neither waited for nor done.
        future = self.waiting[index]
        outcome = self.settled.setdefault(index, Failed(error, now - self.started))
        if not future.done():
            future.set_result(outcome)
        self.waiting.pop(index, None)

    def outcomes(self) -> Outcomes:
        """Every engine's outcome.  Requires sole ownership, and every future done.

        Every future is done, so nothing blocks here, and an interrupt inside ``wait`` can leave
        no lock held that anybody else needs.
        """
        wait(self.futures.values(), timeout=0, return_when=ALL_COMPLETED)
        return Outcomes(self.method, {index: self.settled[index] for index in self.targets})


def uninterrupted(make: Callable[[], T], undo: Callable[[T], None]) -> T:
    """Make something in a thread that no signal reaches: all of it, or nothing.

    A Ctrl-C while a socket or a thread is made would leave one that nobody knows.

    Args:
        make: what is run in the thread.
        undo: takes back what was made, in a thread too, when the caller has been interrupted.

    Returns:
        What was made.
    """
    made: list[T] = []
    failed: list[BaseException] = []
    claim = threading.Lock()
    """Taken for good by who is first: the thread that is done, or the caller who leaves."""
    done, undone = Latch(), Latch()

    def work() -> None:
        try:
            made.append(make())
        except BaseException as exc:
            failed.append(exc)
        if not claim.acquire(blocking=False):
            take_back()
        done.open()

    def take_back() -> None:
        try:
            for thing in made:
                undo(thing)
        finally:
            undone.open()

    try:
        # A bare thread: starting it is one C call, which an interrupt cannot split.
        _thread.start_new_thread(work, ())
        done.wait()
        if failed:
            raise failed[0]
        return made[0]
    except BaseException as exc:
        if any(exc is error for error in failed):
            raise
        if not claim.acquire(blocking=False):
            # It was done already; the interrupt came behind the wait.
            _thread.start_new_thread(take_back, ())
        undone.wait(UNDO_LIMIT)
        raise
    finally:
        failed.clear()  # a frame that holds an exception that holds the frame


class Startup:
    """How the start of the engines ends; one caller waits for it."""

    __slots__ = ("error", "finished", "latch")

    def __init__(self) -> None:
        self.latch = Latch()
        self.finished = False
        self.error: BaseException | None = None

    def finish(self, error: BaseException | None = None) -> None:
        """Let the caller go; the first one counts (dispatcher only)."""
        if not self.finished:
            self.finished = True
            self.error = error
            self.latch.open()
