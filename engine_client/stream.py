"""One request's outputs, as they come; leaving early frees the engine.

The order of a request, and why it is safe to interrupt anywhere: it is checked and encoded; its
stream is built; it is registered; only then is it handed to the dispatcher, which alone sends.
Whatever comes in between, the stream is dropped, and what is dropped is appended to the abandoned
requests: unregistered, and aborted on the engine if that may have it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from threading import get_ident
from types import TracebackType
from typing import Any

from engine_client.deadline import USE_DEFAULT, Deadline, Timeout, parse_timeout
from engine_client.dispatch.dispatcher import Dispatcher
from engine_client.dispatch.registry import EngineRecord
from engine_client.dispatch.requests import Delivery, PendingRequest, StreamRef
from engine_client.dispatch.waiting import Mailbox
from engine_client.errors import (
    ProtocolError,
    ReplyError,
    StreamAborted,
    StreamError,
    StreamTimeout,
)
from engine_client.fanout import settle
from engine_client.output import EngineOutput, FinishReason
from engine_client.request import EngineRequest
from engine_client.text import PlainTokenizer, Tokenizer, Transcript, prepare
from engine_client.wire.codec import codec_named
from engine_client.wire.plain import plain

__all__ = ["RequestStream", "abort", "leave", "open_stream", "read", "register"]


_from_plain = EngineOutput.from_plain


class RequestStream(Iterator[EngineOutput]):
    """The outputs of one request, in order, each as soon as the engine sends it.

    Iterate over it, or call :meth:`recv`; a ``with`` block, :meth:`close` or just dropping it
    aborts the request on its engine, once, unless it had ended.  One consumer at a time; it may be
    handed from thread to thread.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        request: PendingRequest,
        transcript: Transcript | None = None,
    ) -> None:
        self._dispatcher = dispatcher
        self._request = request
        request.stream = StreamRef(self, dispatcher.requests.abandoned.append)
        request.stream.request = request
        self._mailbox = request.mailbox
        self._items = request.mailbox.items
        self._ended = False
        self._left = False
        self._consumer: int | None = None
        self._finish_reason: FinishReason | int | None = None
        self._transcript = transcript
        self._last_read: tuple[Delivery, EngineOutput, Transcript] | None = None
        """What was read last, what came of it, and the text so far."""

    @property
    def request_id(self) -> str:
        """The caller's id of the request."""
        return self._request.request_id

    @property
    def engine(self) -> int:
        """The engine that serves it."""
        return self._request.engine

    @property
    def finish_reason(self) -> FinishReason | int | None:
        """Why it ended; None while outputs are still to be read, and after an error."""
        return self._finish_reason

    def recv(self, timeout: Timeout = USE_DEFAULT) -> EngineOutput:
        """Wait for the next output.

        Args:
            timeout: seconds; None for no limit; left out: the client's default.

        Raises:
            StreamTimeout: none came in time; the stream goes on.
            StreamError: it ended before (``StreamAborted`` if you left it), or the tokenizer
                failed on an output; then the request was aborted.
            StreamOverflow: the consumer fell too far behind; what came before can be read first.
            EngineDeadError: its engine died.
            ReplyError: an output could not be decoded; the request was aborted.
            ClientClosedError, ClientBrokenError: the client ended.
        """
        if timeout is not USE_DEFAULT:
            timeout = parse_timeout(timeout)
        try:
            return self.__next__(timeout)
        except StopIteration:
            raise self._ended_error() from None

    def __next__(self, timeout: Timeout = USE_DEFAULT) -> EngineOutput:
        # Set before and cleared after, by the one who reads: an interrupt in between leaves it to
        # this same thread, which may go on.
        me = get_ident()
        if self._consumer is not None and self._consumer != me:
            raise RuntimeError(
                f"request {self.request_id!r} is being read by another thread: a stream has one "
                f"consumer at a time"
            )
        self._consumer = me
        try:
            # Looked at only now: whoever closes it from now on sees a reader.
            if self._ended:
                raise StopIteration
            items = self._items
            if not items:
                self._wait(timeout)
            # Looked at, used, and only then popped: an interrupt loses nothing.
            delivery = items[0]
            request, record, message, frames, _ = delivery
            if frames is None and message is not None and self._transcript is None:
                # The usual output, of tokens only: nothing to check, nothing that could fail.
                output = _from_plain(
                    record,
                    None,
                    request.request_id,
                    request.engine,
                    message.timestamp,
                    message.weight_version,
                )
                ended = record[5] is not None
            else:
                output = self._read(delivery)
                ended = output.finish_reason is not None
            if ended:
                if not request.finished:
                    # A stop string ended it, of which the engine does not know.
                    leave(self._dispatcher, request)
                self._finish_reason = output.finish_reason
                self._ended = True
            request.taken += 1
            items.popleft()
            return output
        finally:
            self._consumer = None

    def _wait(self, timeout: Timeout) -> None:
        seconds = self._dispatcher.config.timeout if timeout is USE_DEFAULT else timeout
        if not self._mailbox.wait(Deadline(seconds)):
            raise StreamTimeout(
                f"no output of request {self.request_id!r} from engine {self.engine} within "
                f"{seconds:g} s; the stream goes on",
                request_id=self.request_id,
                engine=self.engine,
            )

    def _read(self, delivery: Delivery) -> EngineOutput:
        """Read what may fail, and then ends the stream."""
        transcript = self._transcript
        if delivery.error is not None:
            self._ended = True
            raise delivery.error
        try:
            if transcript is None:
                return read(delivery)
            if self._last_read is not None:
                known, output, transcript = self._last_read
                if known is delivery:
                    return output  # an interrupt came before it was popped
            # On a copy, which replaces the other with the output: an interrupt loses no text.
            transcript = transcript.copy()
            output = read(delivery, transcript)
            self._last_read = delivery, output, transcript
            return output
        except (ReplyError, StreamError):
            self._ended = True
            leave(self._dispatcher, self._request)
            raise

    def _ended_error(self) -> StreamError:
        kind, how = (StreamAborted, "was left early") if self._left else (StreamError, "has ended")
        return kind(
            f"the stream of request {self.request_id!r} {how}",
            request_id=self.request_id,
            engine=self.engine,
        )

    def abort(self) -> None:
        """Have the engine stop; the stream ends with ``FinishReason.ABORT`` behind what it holds.

        Nothing happens when it has ended.  Any thread may call it.
        """
        if not self._ended:
            abort(self._dispatcher, [self._request])

    def close(self) -> None:
        """Leave the stream: drop what is unread, abort the request unless it has ended.

        A thread that waits for its next output gets a last one, with ``FinishReason.ABORT``.
        """
        if not self._ended:
            self._left = True
            leave(self._dispatcher, self._request, read_on=True)
            self._ended = True
            if self._consumer in (None, get_ident()):
                self._items.clear()

    def __enter__(self) -> RequestStream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # Its StreamRef leaves the request in any case; this wakes the dispatcher too.
        # No lock here: a finalizer runs anywhere, even under the one that would be needed.
        request = getattr(self, "_request", None)
        if request is not None and not request.finished:
            leave(self._dispatcher, request)

    def __repr__(self) -> str:
        if not self._ended:
            state = f"{len(self._items)} outputs unread"
        else:
            state = f"ended: {getattr(self._finish_reason, 'name', self._finish_reason)}"
        return f"<RequestStream {self.request_id!r} on engine {self.engine}: {state}>"


def read(delivery: Delivery, transcript: Transcript | None = None) -> EngineOutput:
    """Make an output of what lay in a mailbox.

    Args:
        delivery: what lay there, no error.
        transcript: of the request, to go on with; with a stop string, the output is the last.

    Raises:
        ReplyError: a part of it holds what it cannot.
        StreamError: the tokenizer failed.
    """
    request, record, message, frames, _ = delivery
    assert message is not None
    try:
        output = _from_plain(
            record,
            frames,
            request.request_id,
            message.engine_index,
            message.timestamp,
            message.weight_version,
        )
    except ProtocolError as exc:
        raise ReplyError(
            f"an output of engine {message.engine_index} for request {request.request_id!r} is "
            f"malformed: {exc}",
            engine=message.engine_index,
        ) from exc
    if transcript is not None:
        _add_text(output, transcript)
    return output


def _add_text(output: EngineOutput, transcript: Transcript) -> None:
    reason = output.finish_reason
    try:
        step = transcript.read(
            output.new_token_ids, ended=reason is not None, stopped=reason == FinishReason.STOP
        )
    except Exception as exc:
        raise StreamError(
            f"the tokenizer failed on an output of request {output.request_id!r}: {exc!r}",
            request_id=output.request_id,
            engine=output.engine,
        ) from exc
    output.text = step.text
    if step.stop is not None:
        output.end_at(step.stop, step.kept)


def leave(dispatcher: Dispatcher, request: PendingRequest, *, read_on: bool = False) -> None:
    """Abandon a request.  Takes no lock: finalizers call it.

    Args:
        dispatcher: of the client.
        request: registered or not, or ended already.
        read_on: whether somebody may wait for its next output.
    """
    dispatcher.requests.abandoned.append((request, read_on))
    if not dispatcher.is_foreign():
        dispatcher.outbox.wakeup.poke()


def abort(dispatcher: Dispatcher, requests: list[PendingRequest]) -> None:
    """Abort requests whose streams are still read: each ends with ``FinishReason.ABORT``."""
    dispatcher.requests.abandoned.extend([(request, True) for request in requests])
    dispatcher.outbox.wakeup.poke()
    dispatcher.requests.drain()
    # Once more: an interrupt may have kept the first poke from following its append.
    dispatcher.outbox.wakeup.poke()


def register(
    dispatcher: Dispatcher,
    request: EngineRequest,
    mailbox: Mailbox[Delivery] | None = None,
    keep: Callable[[PendingRequest], Any] | None = None,
) -> PendingRequest:
    """Check, encode, register and hand over one request.

    Args:
        dispatcher: of the client.
        request: what to send.
        mailbox: where its outputs go; None for one of its own.
        keep: given the pending request before it is registered, so that whoever is interrupted
            later can leave it.
    """
    if not isinstance(request, EngineRequest):
        raise TypeError(f"request must be an EngineRequest, not {type(request).__name__}")
    dispatcher.check_usable()
    request.check_tokens_only()
    number = next(dispatcher.request_numbers) & 0xFFFFFFFF
    # Eight hex digits make the id unique on the wire: a duplicate live id kills an engine, and a
    # late output of an aborted request must not reach a new one of the same name.
    wire_id = f"{request.request_id}-{number:08x}"
    pending = PendingRequest(
        request.request_id,
        wire_id,
        _encode(dispatcher, request, wire_id),
        time.monotonic(),
        mailbox,
    )
    if keep is not None:
        keep(pending)
    task = None if request.pooling_params is None else request.pooling_params.task
    if task is not None:
        _learn_tasks(dispatcher)

    def unfit(engine: EngineRecord) -> str | None:
        return _unfit(request, task, engine)

    try:
        if not dispatcher.requests.add(pending, request.data_parallel_rank, unfit):
            raise dispatcher.ended_error()
        # When the outbox is closed already, the end of the client ends the request.
        dispatcher.outbox.append(pending)
    except BaseException:
        leave(dispatcher, pending)
        raise
    return pending


def open_stream(
    dispatcher: Dispatcher, request: EngineRequest, tokenizer: Tokenizer | None
) -> RequestStream:
    """Send a request and return its stream, which exists before anything is sent."""
    transcript = None
    if tokenizer is not None and isinstance(request, EngineRequest):
        dispatcher.check_usable()
        request, make_transcript = prepare(request, PlainTokenizer(tokenizer))
        transcript = None if make_transcript is None else make_transcript()
    streams: list[RequestStream] = []
    try:
        register(
            dispatcher,
            request,
            keep=lambda pending: streams.append(RequestStream(dispatcher, pending, transcript)),
        )
        return streams[0]
    except BaseException:
        # Not left to the garbage collector: the traceback of an interrupt, which a notebook keeps,
        # holds this frame.
        for stream in streams:
            stream.close()
        raise


def _encode(dispatcher: Dispatcher, request: EngineRequest, wire_id: str) -> dict[str, list[bytes]]:
    """The frames of a request, main one first, per dialect and layout of the engines."""
    frames: list[bytes] = []
    # A wave that ends meanwhile makes the stamp stale; the group is woken again then.
    wave = dispatcher.core.group.state.wave
    record = request.to_plain(wire_id, dispatcher.config.client_index, frames, wave=wave)
    checked = plain(record, "request")
    forms = {
        engine.form: (engine.codec, engine.layout)
        for engine in dispatcher.registry.engines.values()
        if engine.codec is not None
    }
    return {
        form: [codec_named(codec).encode(layout.request(checked)), *frames]
        for form, (codec, layout) in forms.items()
    }


def _learn_tasks(dispatcher: Dispatcher) -> None:
    """Ask engines what their models can do, once for each, because a request needs it."""
    unknown = [
        index
        for index in dispatcher.registry.alive()
        if dispatcher.registry.engines[index].tasks is None
    ]
    if not unknown:
        return
    outcomes = settle(
        dispatcher, "get_supported_tasks", (), engines=unknown, timeout=dispatcher.config.timeout
    )
    for index in outcomes.succeeded:
        with suppress(TypeError):
            dispatcher.registry.learn_tasks(index, tuple(outcomes[index].value))  # type: ignore[union-attr]
    outcomes.unwrap()


def _unfit(request: EngineRequest, task: str | None, engine: EngineRecord) -> str | None:
    """Why an engine cannot take a request; it would die of it, or answer nothing useful."""
    longest = engine.ready.get("max_model_len")
    if isinstance(longest, int) and request.length >= longest:
        return (
            f"prompt_token_ids has {request.length:,} tokens, and engine {engine.index} takes "
            f"prompts of less than {longest:,} (max_model_len)"
        )
    lora = request.lora_request
    if lora is not None:
        if engine.ready.get("supports_lora") is False:
            return f"lora_request: engine {engine.index} was started without LoRA support"
        if lora.lora_int_id not in engine.loras and not request.allow_unloaded_lora:
            return (
                f"lora_request: this client has not loaded adapter {lora.lora_int_id} on engine "
                f"{engine.index}, which dies if it cannot load it itself: call add_lora() first, "
                f"or set allow_unloaded_lora=True"
            )
    if task is not None and task not in (engine.tasks or ()):
        return (
            f"pooling_params.task: engine {engine.index} does not do {task!r}, only "
            f"{', '.join(engine.tasks or ()) or 'nothing that it lists'}"
        )
    return None
