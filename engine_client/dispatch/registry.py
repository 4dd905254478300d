"""Who waits for what: call id to pending call, and what callers see of each engine.

One lock, a leaf: no I/O, no logging, no user code under it.  A reply is popped and its future
settled under one hold, so no two parties ever touch one future.

Where a caller takes the lock, the ``with`` holds calls and no loop: CPython 3.12 and 3.13 look for
signals in the jump back to a loop's begin, and where an ``if`` ends the body, that jump is outside
of what the ``with`` guards.  A Ctrl-C there leaves the lock held for ever.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from engine_client.dispatch.waiting import PendingCall
from engine_client.engines import engine_id
from engine_client.errors import (
    AbandonedError,
    EngineDeadError,
    EngineError,
    NotSentError,
    RemoteError,
)
from engine_client.outcome import Failed
from engine_client.wire.layouts import LATEST, Layout, layout_of

__all__ = ["EngineRecord", "Registry"]

logger = logging.getLogger("engine_client")


class SentCall(NamedTuple):
    """A call that an engine may be busy with."""

    call_id: int
    method: str
    started: float


class EngineRecord:
    """What callers see of one engine.  The dispatcher writes it, under the registry lock."""

    __slots__ = (
        "alive",
        "codec",
        "death",
        "form",
        "id",
        "index",
        "last_seen",
        "layout",
        "loras",
        "ready",
        "requests",
        "running",
        "sent",
        "tasks",
        "unanswered",
        "waiting",
    )

    def __init__(self, index: int) -> None:
        self.index = index
        self.id = engine_id(index)
        self.codec: str | None = None
        self.alive = False
        self.death: str | None = None
        """Why it is not alive, as words that follow "engine 3 is dead: "."""
        self.ready: Mapping[str, Any] = {}
        self.layout = LATEST
        """Where its version has the fields of records."""
        self.form = ""
        """Names how messages to it are encoded: in which dialect and layout."""
        self.last_seen: float | None = None
        """Monotonic time of its last message."""
        self.unanswered = 0
        """Bytes handed to it since it was last heard."""
        self.sent: dict[int, SentCall] = {}
        """Calls that it has not answered, oldest first, also those that nobody waits for now."""
        self.requests: set[str] = set()
        """Wire ids of its live requests."""
        self.loras: set[int] = set()
        """Ids of the adapters that this client loaded on it and did not remove."""
        self.tasks: tuple[str, ...] | None = None
        """What its model can do; None until somebody needed to know."""
        self.running: int | None = None
        """Requests that run on it by its own last report; None before one."""
        self.waiting = 0
        """Requests that wait on it by its own last report."""

    def reset(self) -> None:
        """Forget what a process knew that is gone."""
        self.unanswered = 0
        self.sent = {}
        self.loras = set()
        self.tasks = None
        self.running = None
        self.waiting = 0

    def note_lora(self, method: str, lora: int, value: Any) -> None:
        """Take note of an adapter that this client loaded or removed."""
        if method == "remove_lora":
            self.loras.discard(lora)
        elif value is not False:
            self.loras.add(lora)

    def report(self, stats: Mapping[Any, Any]) -> None:
        """Take the engine's own count of its requests, from its scheduler statistics."""
        running, waiting = stats.get("num_running_reqs"), stats.get("num_waiting_reqs")
        if isinstance(running, int) and isinstance(waiting, int):
            self.running, self.waiting = running, waiting

    def load(self) -> tuple[int, int]:
        """How busy it is, then its index: the order in which engines are chosen."""
        load = len(self.requests)
        if self.running is not None:
            load = max(load, self.running + self.waiting) + 3 * self.waiting
        return load, self.index

    @property
    def in_lockstep(self) -> bool:
        """Whether it steps together with others (a mixture-of-experts data-parallel rank)."""
        size = self.ready.get("data_parallel_size")
        return isinstance(size, int) and size > 1


class Registry:
    """The waiters of one client.  Every public method takes the lock itself."""

    def __init__(self, indices: Sequence[int], max_unanswered_bytes: int) -> None:
        self.lock = threading.Lock()
        self._calls: dict[int, PendingCall] = {}
        self._max_unanswered = max_unanswered_bytes
        self.engines = {index: EngineRecord(index) for index in indices}
        self.abandoned: deque[PendingCall] = deque()
        """Calls whose callers left.  Appending is the one act of a caller's ``finally``, a single
        C call: taking the lock there lost waiters under interrupts."""
        self._unknown_versions: set[str] = set()
        """Those that were warned about."""
        self.completed = 0
        """Calls of which the last engine has settled."""
        self.ended = False
        """Whether the client ended; no call is registered from then on."""
        self.closing_cause: BaseException | None = None
        """What ended it; None when its owner closed it."""

    def _drain(self) -> None:
        """Unregister what was abandoned.  Requires the lock."""
        assert self.lock.locked()
        # Read the head, unregister it, then pop it: an interrupt in between leaves it to the
        # next drain.  Popping first loses it.
        while self.abandoned:
            self._calls.pop(self.abandoned[0].call_id, None)
            self.abandoned.popleft()

    def drain(self) -> None:
        """Unregister the calls that were abandoned."""
        if self.abandoned:
            with self.lock:
                self._drain()

    # -- callers ------------------------------------------------------------------------------

    def add(self, call: PendingCall, *, each: bool) -> bool:
        """Register a call, or refuse it because of the state of its targets.

        Args:
            call: made, not yet registered.
            each: settle refused targets one by one and register the rest; otherwise one refused
                target refuses the whole call, whose futures are then all settled.

        Returns:
            Whether it was registered.  False also when the client has ended.
        """
        with self.lock:
            return self._add(call, each)

    def _add(self, call: PendingCall, each: bool) -> bool:
        assert self.lock.locked()
        self._drain()
        if self.ended:
            return False
        refused: dict[int, EngineError] = {}
        engines, limit = self.engines, self._max_unanswered
        for index in call.waiting:
            engine = engines[index]
            if not engine.alive:
                refused[index] = _dead(engine)
            elif engine.unanswered > limit and (flooded := self.flooded(engine)) is not None:
                refused[index] = flooded
        if refused and not each:
            names = ", ".join(map(str, refused))
            for index in call.targets:
                if index not in refused and index in call.waiting:
                    refused[index] = NotSentError(
                        f"nothing was sent, because of engine {names}", engine=index
                    )
        for index, error in refused.items():
            call.refused.add(index)
            call.fail(index, error, call.started)
        if refused and not each:
            return False
        self._calls[call.call_id] = call
        sizes = {form: len(payload) for form, payload in call.payloads.items()}
        for index in call.waiting:
            engine = engines[index]
            engine.unanswered += sizes.get(engine.form, 0)
        return True

    def oldest_unanswered(self, index: int) -> SentCall | None:
        """The first call that an engine has not answered, whether or not somebody waits for it."""
        with self.lock:
            return next(iter(self.engines[index].sent.values()), None)

    def unanswered(self, call_ids: Collection[int]) -> set[int]:
        """Those calls that a living engine has not answered, whether or not somebody waits."""
        with self.lock:
            return {
                call_id
                for call_id in call_ids
                if any(call_id in engine.sent for engine in self.engines.values())
            }

    def flooded(self, engine: EngineRecord) -> NotSentError | None:
        """Why an engine is sent no more; None where it is.  Requires the lock."""
        assert self.lock.locked()
        if engine.unanswered <= self._max_unanswered:
            return None
        return NotSentError(
            f"engine {engine.index} has not been heard since {engine.unanswered:,} bytes were sent "
            f"to it (max_unanswered_bytes); it is stopped or very busy",
            engine=engine.index,
        )

    def alive(self) -> tuple[int, ...]:
        """The engines that accept calls."""
        with self.lock:
            return tuple(index for index, engine in self.engines.items() if engine.alive)

    def take_loads(self, counts: Sequence[Any]) -> None:
        """Take a coordinator's counts ``[waiting, running, ...]``, one for each engine in order."""
        with self.lock:
            for engine, count in zip(self.engines.values(), counts, strict=False):
                if type(count) is list and len(count) >= 2:
                    engine.report({"num_waiting_reqs": count[0], "num_running_reqs": count[1]})

    def take_stats(self, index: int, stats: Mapping[Any, Any]) -> None:
        """Take an engine's scheduler statistics."""
        with self.lock:
            self.engines[index].report(stats)

    def learn_tasks(self, index: int, tasks: tuple[str, ...]) -> None:
        """Remember what an engine's model can do, for the life of its process."""
        with self.lock:
            self.engines[index].tasks = tasks

    def pending(self) -> int:
        """Waiters that are registered, one per engine and call."""
        with self.lock:
            self._drain()
            return sum(len(call.waiting) for call in self._calls.values())

    @property
    def under_way(self) -> int:
        """How many calls are registered; needs no lock."""
        return len(self._calls)

    def calls(self) -> list[PendingCall]:
        """The registered calls, oldest first."""
        with self.lock:
            self._drain()
            return list(self._calls.values())

    def progress(self, call: PendingCall) -> tuple[tuple[int, ...], dict[int, EngineError]]:
        """The engines still outstanding in a registered call, and the failures already known."""
        with self.lock:
            waiting, settled = tuple(call.waiting), dict(call.settled)
        return waiting, {
            index: outcome.error
            for index in call.targets
            if isinstance(outcome := settled.get(index), Failed)
        }

    def in_flight(self) -> dict[int, int]:
        """The number of calls that each engine has not settled."""
        counts = dict.fromkeys(self.engines, 0)
        for call in self.calls():
            for index in list(call.waiting):
                counts[index] += 1
        return counts

    # -- the dispatcher -----------------------------------------------------------------------

    def note_sent(self, call: PendingCall) -> None:
        """A call is on its way to engines; each may be busy with it from now on."""
        sent = SentCall(call.call_id, call.method, call.started)
        with self.lock:
            for index in call.sent:
                self.engines[index].sent[call.call_id] = sent

    def _settled(self, call: PendingCall) -> None:
        """Unregister a call that nobody is outstanding in, and let its caller go."""
        assert self.lock.locked()
        assert not call.waiting
        del self._calls[call.call_id]
        self.completed += 1
        call.latch.open()

    def settle(
        self, index: int, call_id: int, error: EngineError | None, value: Any, now: float
    ) -> bool:
        """Settle one engine's part of a call; False when nobody waits for it."""
        with self.lock:
            engine = self.engines[index]
            engine.unanswered = 0
            engine.last_seen = now
            engine.sent.pop(call_id, None)
            call = self._calls.get(call_id)
            if call is None or index not in call.waiting:
                return False
            if error is None:
                call.succeed(index, value, now)
                if call.lora is not None:
                    engine.note_lora(call.method, call.lora, value)
            else:
                if isinstance(error, RemoteError):
                    error.method = call.method  # a reply names its call by id only
                call.fail(index, error, now)
            if not call.waiting:
                self._settled(call)
            return True

    def fail(self, index: int, call_id: int, error: EngineError, now: float) -> None:
        """Settle one engine's part of a call, if it still waits, without the engine's doing."""
        with self.lock:
            self.engines[index].sent.pop(call_id, None)
            call = self._calls.get(call_id)
            if call is not None and index in call.waiting:
                call.fail(index, error, now)
                if not call.waiting:
                    self._settled(call)

    def heard(self, index: int, now: float) -> None:
        """An engine said something that settles nothing."""
        with self.lock:
            engine = self.engines[index]
            engine.unanswered = 0
            engine.last_seen = now

    def _waiting_on(self, index: int) -> Iterator[PendingCall]:
        assert self.lock.locked()
        return (call for call in list(self._calls.values()) if index in call.waiting)

    def awaits(self, index: int, call_id: int) -> bool:
        """Whether a call waits for this engine's reply."""
        with self.lock:
            call = self._calls.get(call_id)
            return call is not None and index in call.waiting

    def fail_engine(
        self,
        index: int,
        kind: type[EngineError],
        text: str,
        now: float,
        *,
        spare: int | None = None,
    ) -> int:
        """Settle everything that waits for an engine with an error; return how many.

        Args:
            index: the engine.
            kind: the class of the error.
            text: what happened; "{method}" in it is replaced.
            now: monotonic time.
            spare: id of a call that goes on waiting.
        """
        failed = 0
        with self.lock:
            self._drain()
            for call in self._waiting_on(index):
                if call.call_id == spare:
                    continue
                sent = index in call.sent
                if not sent:
                    call.refused.add(index)
                error = kind(
                    text.replace("{method}", call.method)
                    + ("" if sent else "; the call had not been sent to it"),
                    engine=index,
                    may_have_run=sent,
                )
                call.fail(index, error, now)
                if not call.waiting:
                    self._settled(call)
                failed += 1
        return failed

    def register_engine(self, index: int, codec: str, ready: Mapping[str, Any], now: float) -> None:
        """An engine registered and accepts calls."""
        layout = self._layout(index, str(ready.get("vllm_version", "")))
        with self.lock:
            engine = self.engines[index]
            engine.codec = codec
            engine.layout = layout
            engine.form = codec if layout is LATEST else f"{codec} {layout.name}"
            engine.ready = ready
            engine.alive = True
            engine.death = None
            engine.last_seen = now
            engine.reset()

    def _layout(self, index: int, version: str) -> Layout:
        layout, known = layout_of(version)
        if not known and version not in self._unknown_versions:
            self._unknown_versions.add(version)
            logger.warning(
                "engine %d is vLLM %r, whose messages this client does not know; it takes them to "
                "be as those of vLLM %s",
                index,
                version,
                layout.name,
            )
        return layout

    def revive_engine(self, index: int) -> None:
        """An engine that was only disconnected is back."""
        with self.lock:
            self.engines[index].alive = True
            self.engines[index].death = None
            self.engines[index].unanswered = 0

    def bury_engine(self, index: int, why: str) -> None:
        """An engine died: refuse calls to it from now on."""
        with self.lock:
            self.engines[index].alive = False
            self.engines[index].death = why
            self.engines[index].sent = {}

    def end(self, cause: BaseException | None, now: float) -> None:
        """Refuse new calls and settle all waiters: the client ends."""
        with self.lock:
            self._drain()
            self.ended = True
            self.closing_cause = cause
            why = "the client was closed" if cause is None else f"the client broke: {cause}"
            for call in list(self._calls.values()):
                call.ended = True
                for index in list(call.waiting):
                    sent = index in call.sent
                    error = AbandonedError(
                        f"{why} before engine {index} replied to {call.method}"
                        + ("" if sent else "; it had not been sent"),
                        engine=index,
                        may_have_run=sent,
                    )
                    call.fail(index, error, now)
                if not call.waiting:
                    self._settled(call)


def _dead(engine: EngineRecord) -> EngineDeadError:
    return EngineDeadError(
        f"engine {engine.index} is dead: {engine.death or 'it never registered'}; start it again, "
        f"or leave it out with engines='alive'",
        engine=engine.index,
        may_have_run=False,
    )
