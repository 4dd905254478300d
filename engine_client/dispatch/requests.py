"""Who reads what: the live requests of one client and the mailboxes of their outputs.

The table shares the registry's lock, and the rule that goes with it: no I/O, no logging and no
user code under it.  A message's outputs are delivered under one hold of it, not one hold each.

A request leaves the table in one of these ways, and only then may its id be used again: its last
output came; its engine died; it was aborted or abandoned; its consumer fell too far behind; the
client ended.  If its engine may still work on it, it also goes to ``to_abort``.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from engine_client.dispatch.registry import EngineRecord, Registry
from engine_client.dispatch.waiting import Mailbox
from engine_client.errors import (
    DuplicateRequestError,
    EngineDeadError,
    EngineError,
    ReplyError,
    RequestRefusedError,
    StreamError,
    StreamOverflow,
)
from engine_client.output import FinishReason, output_fault
from engine_client.wire.messages import Outputs

__all__ = ["Delivery", "PendingRequest", "RequestTable", "StreamRef"]


class Delivery(NamedTuple):
    """What a mailbox holds: an output as it came, or how the stream ends instead."""

    request: PendingRequest
    record: Any
    """The output's positions; None with an error."""
    message: Outputs | None
    frames: Sequence[bytes] | None
    """What the record's arrays refer to; None where it holds tokens only, and needs no check."""
    error: BaseException | None = None


class PendingRequest:
    """One live request: its ids, its engine, its mailbox.

    ``engine``, ``finished`` and ``delivered`` are written under the registry lock only.
    """

    __slots__ = (
        "aborted",
        "cancelled",
        "delivered",
        "engine",
        "finished",
        "mailbox",
        "payloads",
        "request_id",
        "sent",
        "started",
        "stream",
        "taken",
        "wire_id",
    )

    def __init__(
        self,
        request_id: str,
        wire_id: str,
        payloads: dict[str, list[bytes]],
        started: float,
        mailbox: Mailbox[Delivery] | None = None,
    ) -> None:
        self.request_id = request_id
        self.wire_id = wire_id
        self.payloads = payloads
        """The encoded frames per dialect."""
        self.started = started
        self.engine = -1
        """The engine that it was routed to."""
        self.mailbox: Mailbox[Delivery] = Mailbox() if mailbox is None else mailbox
        self.stream: StreamRef | None = None
        """What tells that its stream is gone; kept here, since it must outlive the stream."""
        self.delivered = 0
        """Outputs put into the mailbox."""
        self.taken = 0
        """Outputs taken out (consumer only)."""
        self.finished = False
        """Whether it has left the table."""
        self.sent = False
        """Whether its engine may have it (dispatcher only)."""
        self.cancelled = False
        """Whether it was aborted before it was sent; then it never is (dispatcher only)."""
        self.aborted = False
        """Whether the engine was told (dispatcher only)."""

    def end(self, error: BaseException) -> None:
        """Put how it ends behind what it has received."""
        self.mailbox.put(Delivery(self, None, None, (), error))


class StreamRef(weakref.ref[Any]):
    """Says that a stream is gone: its callback appends it to the abandoned requests.

    That is one C call.  In a finalizer written in Python a Ctrl-C can land before its first line,
    and then nobody would ever learn of it.
    """

    __slots__ = ("request",)

    request: PendingRequest


class RequestTable:
    """The live requests of one client.  Every public method takes the registry's lock itself."""

    def __init__(self, registry: Registry, max_pending_outputs: int) -> None:
        self._registry = registry
        self._lock = registry.lock
        self._max_pending = max_pending_outputs
        self._requests: dict[str, PendingRequest] = {}
        """By wire id."""
        self._by_id: dict[str, PendingRequest] = {}
        self.abandoned: deque[tuple[PendingRequest, bool] | StreamRef] = deque()
        """Requests whose streams were left, and whether somebody still reads: then the stream ends
        with ``FinishReason.ABORT``, made here since an engine sends nothing for a client's abort.
        Or what is left of a stream that was dropped.  Finalizers append, which takes no lock."""
        self.to_abort: deque[PendingRequest] = deque()
        """Requests that their engines must be told to stop."""
        self.orphans: dict[int, list[str]] = {}
        """Per engine the wire ids of what was failed because of its death; one that was only cut
        off goes on with them, and must be told when it is back (dispatcher only)."""

    # -- callers ----------------------------------------------------------------------------------

    @property
    def empty(self) -> bool:
        """Whether no request is live; needs no lock."""
        return not self._requests

    def add(
        self,
        request: PendingRequest,
        rank: int | None,
        unfit: Callable[[EngineRecord], str | None],
    ) -> bool:
        """Route a request to an engine and register it.

        A rank wins.  Otherwise the least loaded living engine that is fit for it, by vLLM's Rust
        rule: the requests in flight from here until the engine reports its queue, then the larger
        of these and what it reports, with three added for each that waits; ties go to the lowest
        index.  (Of the two published rules this one needs no coordinator: an engine's own reports
        come with its outputs.)

        Args:
            request: made, not yet registered.
            rank: the engine that must serve it, or None.
            unfit: why an engine cannot take it, or None where it can.

        Returns:
            False when the client has ended.

        Raises:
            DuplicateRequestError: its id is in use.
            ValueError: the rank is none of this client's engines.
            RequestRefusedError: no engine is fit for it.
            EngineDeadError: the engine, or every engine, is dead.
            NotSentError: the engine has been sent too much since it was last heard.
        """
        with self._lock:
            self._drain()
            if self._registry.ended:
                return False
            if request.request_id in self._by_id:
                raise DuplicateRequestError(
                    f"request id {request.request_id!r} is in use by a live request of this client"
                )
            engine = self._route(rank, unfit)
            request.engine = engine.index
            engine.unanswered += sum(map(len, request.payloads.get(engine.form, ())))
            # First where a drain finds it, should an interrupt come in between.
            self._requests[request.wire_id] = request
            self._by_id[request.request_id] = request
            engine.requests.add(request.wire_id)
            return True

    def _route(self, rank: int | None, unfit: Callable[[EngineRecord], str | None]) -> EngineRecord:
        engines = self._registry.engines
        if rank is not None:
            engine = engines.get(rank)
            if engine is None:
                raise RequestRefusedError(
                    f"data_parallel_rank {rank} is none of this client's engines "
                    f"({', '.join(map(str, engines))})"
                )
            candidates = [engine]
        else:
            candidates = list(engines.values())
        alive = [engine for engine in candidates if engine.alive]
        if not alive:
            raise EngineDeadError(
                f"engine {candidates[0].index} is dead: {candidates[0].death}"
                if len(candidates) == 1
                else "no engine is alive",
                engine=candidates[0].index,
                may_have_run=False,
            )
        reasons = [unfit(engine) for engine in alive]
        fit = [engine for engine, reason in zip(alive, reasons, strict=True) if reason is None]
        if not fit:
            raise RequestRefusedError(next(reason for reason in reasons if reason is not None))
        floods = [self._registry.flooded(engine) for engine in fit]
        ready = [engine for engine, flood in zip(fit, floods, strict=True) if flood is None]
        if not ready:
            raise next(flood for flood in floods if flood is not None)
        return min(ready, key=EngineRecord.load)

    def find(self, request_ids: Iterable[str]) -> list[PendingRequest]:
        """The live requests of these ids; unknown ids are left out."""
        with self._lock:
            self._drain()
            found = list(map(self._by_id.get, dict.fromkeys(request_ids)))
        return [request for request in found if request is not None]

    def live(self) -> list[PendingRequest]:
        """All live requests, oldest first."""
        with self._lock:
            self._drain()
            return list(self._requests.values())

    def drain(self) -> None:
        """Forget the requests that were abandoned; the dispatcher then tells their engines."""
        if self.abandoned:
            with self._lock:
                self._drain()

    # -- inside, all requiring the lock -----------------------------------------------------------

    def _drain(self) -> None:
        assert self._lock.locked()
        # As in the registry: read the head, deal with it, then pop it.  Whatever an interrupt
        # leaves half done is done again, and each step may be.
        while self.abandoned:
            left = self.abandoned[0]
            request, read_on = (left.request, False) if isinstance(left, StreamRef) else left
            if request.wire_id in self._requests:
                self.to_abort.append(request)
                if read_on:
                    record: list[Any] = [request.wire_id, [], None, None, None]
                    record.append(int(FinishReason.ABORT))
                    message = Outputs(engine_index=request.engine)
                    request.mailbox.put(Delivery(request, record, message, ()))
                self._remove(request)
            self.abandoned.popleft()

    def _remove(self, request: PendingRequest) -> None:
        request.finished = True
        self._registry.engines[request.engine].requests.discard(request.wire_id)
        if self._by_id.get(request.request_id) is request:
            del self._by_id[request.request_id]
        self._requests.pop(request.wire_id, None)

    # -- the dispatcher ---------------------------------------------------------------------------

    def deliver(
        self, message: Outputs, frames: Sequence[bytes], now: float
    ) -> tuple[int, list[str]]:
        """Put a message's outputs into their mailboxes.

        Returns:
            How many outputs were for nobody, and what was wrong with malformed ones.
        """
        index = message.engine_index
        extra = frames if len(frames) > 1 else ()
        late = 0
        faults: list[str] = []
        limit = self._max_pending
        make = tuple.__new__
        with self._lock:
            engine = self._registry.engines[index]
            engine.unanswered = 0
            engine.last_seen = now
            stats = message.scheduler_stats
            if stats is not None:
                engine.report(stats)
            requests = self._requests
            records, others = message.outputs, message.others
            if engine.layout.outputs is not None:
                records, others = [engine.layout.output(record) for record in records], None
            for number, record in enumerate(records):
                if others is None or number in others:
                    fault = output_fault(record)
                    if fault is not None:
                        faults.append(fault)
                        self._fail_malformed(record, index, fault)
                        continue
                    parts, ended = extra, len(record) > 5 and record[5] is not None
                else:
                    parts, ended = None, record[5] is not None
                request = requests.get(record[0])
                if request is None or request.engine != index:
                    late += 1
                    continue
                if ended:
                    self._remove(request)
                elif request.delivered - request.taken >= limit:
                    self.to_abort.append(request)
                    self._remove(request)
                    request.end(
                        StreamOverflow(
                            f"request {request.request_id!r} was aborted: {limit} outputs lay "
                            f"unread (max_pending_outputs)",
                            request_id=request.request_id,
                            engine=index,
                        )
                    )
                    continue
                request.delivered += 1
                # As Mailbox.put() does, and Delivery(): without the calls.
                mailbox = request.mailbox
                mailbox.items.append(make(Delivery, (request, record, message, parts, None)))
                waiter = mailbox.waiter
                if waiter is not None:
                    waiter.open_once()
            for wire_id in message.finished_requests or ():
                request = requests.get(wire_id)
                if request is not None and request.engine == index:
                    self._remove(request)
                    request.end(
                        StreamError(
                            f"engine {index} finished request {request.request_id!r} without a "
                            f"last output",
                            request_id=request.request_id,
                            engine=index,
                        )
                    )
        return late, faults

    def _fail_malformed(self, record: Any, index: int, fault: str) -> None:
        wire_id = record[0] if type(record) is list and record else None
        request = self._requests.get(wire_id) if type(wire_id) is str else None
        if request is not None and request.engine == index:
            self.to_abort.append(request)
            self._remove(request)
            request.end(
                ReplyError(
                    f"an output of engine {index} for request {request.request_id!r} is "
                    f"malformed: {fault}",
                    engine=index,
                )
            )

    def fail_engine(self, index: int, kind: type[EngineError], text: str) -> int:
        """End all requests of an engine with an error; return how many.

        Args:
            index: the engine.
            kind: the class of the error.
            text: what happened; "{method}" in it is replaced.
        """
        failed = 0
        with self._lock:
            self._drain()
            for request in [r for r in self._requests.values() if r.engine == index]:
                self._remove(request)
                if kind is ReplyError:
                    self.to_abort.append(request)
                elif request.sent:
                    self.orphans.setdefault(index, []).append(request.wire_id)
                else:
                    request.cancelled = True
                request.end(
                    kind(
                        text.replace("{method}", f"request {request.request_id!r}"),
                        engine=index,
                        may_have_run=request.sent,
                    )
                )
                failed += 1
        return failed

    def fail(self, request: PendingRequest, error: BaseException) -> None:
        """End one request with an error."""
        with self._lock:
            if not request.finished:
                self._remove(request)
                request.end(error)

    def end(self, make_error: Callable[[str], BaseException]) -> None:
        """End all requests: the client ends, and engines must not work for nobody.

        Args:
            make_error: given what was under way, as words that follow "before ".
        """
        with self._lock:
            self._drain()
            for request in list(self._requests.values()):
                self.to_abort.append(request)
                self._remove(request)
                request.end(make_error(f"request {request.request_id!r} was finished"))

    def take_aborts(self) -> list[PendingRequest]:
        """The requests whose engines must be told now, each once (dispatcher only).

        A request that was not sent yet is cancelled instead.
        """
        told = []
        # Under the lock, so that what somebody abandons together is told together.
        with self._lock:
            while self.to_abort:
                request = self.to_abort.popleft()
                if not request.sent:
                    request.cancelled = True
                elif not request.aborted:
                    request.aborted = True
                    told.append(request)
        return told
