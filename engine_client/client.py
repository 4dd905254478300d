"""The client: :func:`connect` and its kin make one, its methods block."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Unpack

import zmq

from engine_client import _render
from engine_client._render import shown
from engine_client.compensation import check_undo, raise_undone, undo
from engine_client.config import ClientConfig, CodecName, Settings
from engine_client.deadline import USE_DEFAULT, Deadline, Timeout, parse_timeout
from engine_client.dispatch.bootstrap import Opened, check_parallel_config, init_for, start
from engine_client.dispatch.dispatcher import Dispatcher
from engine_client.dispatch.sockets import plan_transport
from engine_client.engines import EngineInfo, EngineInfos, Pending, Targets, engines_html
from engine_client.errors import UtilityCallError
from engine_client.fanout import note_one_list, settle
from engine_client.generation import generate
from engine_client.lora import LoraRequest
from engine_client.outcome import Outcomes, UtilityCall
from engine_client.output import Completion
from engine_client.request import EngineRequest
from engine_client.sampling import SamplingParams
from engine_client.stats import ClientStats
from engine_client.stream import RequestStream, abort, open_stream
from engine_client.text import Tokenizer
from engine_client.utilities import UtilityMethods
from engine_client.wire.codec import codec_named

__all__ = ["EngineClient", "connect", "connect_bootstrapped"]


class EngineClient(UtilityMethods):
    """A client of one or many engine-core processes; made by :func:`connect` and its kin.

    Every method may be called from any thread, and blocks that thread only.  Use it as a context
    manager, or call :meth:`close`.  The attributes are read-only.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        if not isinstance(dispatcher, Dispatcher):
            raise TypeError(
                "a client is made by connect(), connect_bootstrapped() or launch(), "
                "not by EngineClient()"
            )
        self._dispatcher = dispatcher

    # -- state ----------------------------------------------------------------------------------

    @property
    def engines(self) -> tuple[EngineInfo, ...]:
        """A snapshot of every engine, in index order."""
        self._check_process()
        registry = self._dispatcher.registry
        in_flight = registry.in_flight()
        offset = time.time() - time.monotonic()
        return EngineInfos(
            EngineInfo(
                index=record.index,
                id=record.id,
                codec=record.codec,
                alive=record.alive,
                ready=dict(record.ready),
                last_seen=None if record.last_seen is None else record.last_seen + offset,
                in_flight=in_flight[record.index] + len(record.requests),
                cause_of_death=record.death,
                unanswered=None if call is None else call.method,
                unanswered_since=None if call is None else call.started + offset,
            )
            for record in registry.engines.values()
            for call in (registry.oldest_unanswered(record.index),)
        )

    @property
    def closed(self) -> bool:
        """Whether the client takes no calls any more, closed or broken."""
        return self._dispatcher.registry.ended

    @property
    def closing_cause(self) -> BaseException | None:
        """The first error that ended the client; None while it works or when it was closed."""
        return self._dispatcher.registry.closing_cause

    @property
    def pending_utility_calls(self) -> int:
        """Waiters that are registered, one per engine and call."""
        self._check_process()
        return self._dispatcher.registry.pending()

    @property
    def stats(self) -> ClientStats:
        """A snapshot of the counters."""
        return self._dispatcher.stats.snapshot()

    @property
    def input_address(self) -> str:
        """Where engines connect to receive."""
        return self._dispatcher.addresses["input"]

    @property
    def output_address(self) -> str:
        """Where engines connect to send."""
        return self._dispatcher.addresses["output"]

    @property
    def handshake_address(self) -> str | None:
        """Where engines say HELLO, also when they restart; None if another process greets them."""
        return self._dispatcher.addresses.get("handshake")

    # -- utility calls --------------------------------------------------------------------------

    def call_utility(
        self,
        method: str,
        *args: Any,
        timeout: Timeout = USE_DEFAULT,
        engines: Targets = None,
        compensate: UtilityCall | None = None,
    ) -> list[Any]:
        """Call a utility method on every target engine and wait for every outcome.

        Nothing is raised before every engine has settled (or the deadline has passed), so that a
        change that only some engines applied can be undone safely.  Nothing is retried.

        Args:
            method: its name, for example ``"reset_prefix_cache"``.
            *args: positional arguments: None, bool, int (64 bits), float, str, bytes, lists, dicts
                with str or int keys; tuples and sets travel as lists.
            timeout: seconds for the whole call, all engines together; None for no limit; 0 sends
                and takes only what is already there.  Left out: the client's default.
            engines: None for all, ``"alive"``, or a sequence of engine indices.
            compensate: sent on failure to the living engines that may have run the call, with the
                same time limit anew; its outcomes are in ``error.compensation``.

        Returns:
            The results, in target order.

        Raises:
            UtilityCallError: an engine failed; ``outcomes`` has every engine's.
            UtilityTimeoutError: an engine had not replied by the deadline.
            TypeError, ValueError: an argument that cannot be meant; nothing was sent.
            EncodeError: an argument that cannot be sent; nothing was sent.
            RequestRefusedError: the call would wedge a lockstep group; nothing was sent.
            ClientClosedError, ClientBrokenError: the client ended.
        """
        undo_call = check_undo(compensate)
        outcomes = settle(
            self._dispatcher, method, args, engines=engines, timeout=self._seconds(timeout)
        )
        try:
            return self._unwrap(outcomes, undo_call, timeout)
        except UtilityCallError as error:
            note_one_list(error, method, args)
            raise

    def settle_utility(
        self,
        method: str,
        *args: Any,
        timeout: Timeout = USE_DEFAULT,
        engines: Targets = None,
    ) -> Outcomes:
        """Like :meth:`call_utility`, but return every engine's outcome instead of raising.

        What is refused before anything is sent raises here too, and so does the client's end.

        Returns:
            The outcomes, keyed by engine index, in target order.
        """
        __tracebackhide__ = True
        return settle(
            self._dispatcher, method, args, engines=engines, timeout=self._seconds(timeout)
        )

    def call_utility_consensus(
        self,
        method: str,
        *args: Any,
        timeout: Timeout = USE_DEFAULT,
        engines: Targets = None,
    ) -> Any:
        """Like :meth:`call_utility`, for a question on which all engines must agree.

        Returns:
            The one value that every engine gave.

        Raises:
            ConsensusError: all answered, but differently; ``outcomes`` has each answer.
        """
        return self.settle_utility(method, *args, timeout=timeout, engines=engines).agreed()

    def compensate(
        self, outcomes: Outcomes, call: UtilityCall, *, timeout: Timeout = USE_DEFAULT
    ) -> Outcomes:
        """Undo a call on the living engines that may have run it.

        An undo is never refused as a whole: each engine for itself.  Without a time limit, engines
        that have not answered the call (``CallTimeout``, ``AbandonedError``) are sent the undo and
        not waited for; engines handle messages in order, so it arrives after the call.

        Args:
            outcomes: of the call, from an error, an interrupt or :meth:`settle_utility`.
            call: what undoes it.
            timeout: as for :meth:`call_utility`.

        Returns:
            The undo's outcome for each engine in ``outcomes.may_have_run``.
        """
        if not isinstance(outcomes, Outcomes):
            raise TypeError(
                f"outcomes must be an Outcomes (error.outcomes), not {type(outcomes).__name__}"
            )
        undo_call = check_undo(call, "call")
        if undo_call is None:
            raise TypeError("call must be a UtilityCall, not None")
        return undo(self._dispatcher, outcomes, undo_call, self._seconds(timeout))

    # -- requests -------------------------------------------------------------------------------

    def call(self, request: EngineRequest, *, tokenizer: Tokenizer | None = None) -> RequestStream:
        """Send a request to one engine and stream its outputs.

        The engine is ``request.data_parallel_rank``, or the least loaded living one that is fit
        for it.  The stream exists before the request is sent: an interrupt at any point aborts it.

        What would kill or deafen an engine is refused here.  What the client cannot know is yours
        to check: a token id beyond the vocabulary ends the engine.

        Args:
            request: what to send.
            tokenizer: of the engines' model, any object with ``encode`` and ``decode``.  With it
                the prompt may be a string, ``stop`` and ``bad_words`` work, outputs have ``text``,
                and its ``eos_token_id`` ends the request unless the parameters have one.

        Returns:
            The stream; iterate over it, leave it early at any time.

        Raises:
            DuplicateRequestError: the request id is in use.
            RequestRefusedError: no living engine can take it, or it needs a tokenizer; nothing was
                sent.
            EngineDeadError: its engine, or every engine, is dead; nothing was sent.
            NotSentError: its engine was sent too much since it was last heard.
            EncodeError: a part of it cannot be sent.
            ClientClosedError, ClientBrokenError: the client ended.
        """
        return open_stream(self._dispatcher, request, tokenizer)

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        lora_request: LoraRequest | None = None,
        progress: bool = False,
        max_in_flight: int = 256,
        timeout: Timeout = USE_DEFAULT,
    ) -> list[Completion]:
        """Complete a batch of prompts on all living engines.

        A prompt that fails does not stop the others: its completion has the error, and the tokens
        that came before.  An interrupt aborts what runs.

        Args:
            prompts: for each a list of token ids, or a string.
            sampling_params: for all, or one for each; left out: ``SamplingParams()``.  With ``n``
                above 1, each prompt is sent n times (with the seed, seed + 1, ...), and its
                completion has n ``samples``.
            tokenizer: as for :meth:`call`; needed for strings.
            lora_request: an adapter for all, loaded before by :meth:`add_lora`.
            progress: show a bar (with the package tqdm), or a log line every few seconds.
            max_in_flight: how many requests are live at once.
            timeout: seconds for the whole batch; what is not finished then has a
                ``StreamTimeout``.  Left out: the client's default.

        Returns:
            The completions, in the order of the prompts.
        """
        return generate(
            self._dispatcher,
            prompts,
            sampling_params,
            tokenizer=tokenizer,
            lora_request=lora_request,
            progress=progress,
            max_in_flight=max_in_flight,
            timeout=self._seconds(timeout),
        )

    def abort(
        self, *request_ids: str, confirm: bool = False, timeout: Timeout = USE_DEFAULT
    ) -> None:
        """Stop requests; their streams end with ``FinishReason.ABORT`` behind what they hold.

        Ids that are not live are ignored.  Engines are told once each.

        Args:
            *request_ids: the ids that the requests were made with.
            confirm: return only when each engine has handled it (a harmless call behind the abort
                is answered).
            timeout: seconds to wait for that.

        Raises:
            UtilityCallError: with ``confirm``, an engine did not answer; ``outcomes`` says which.
        """
        for request_id in request_ids:
            if not isinstance(request_id, str):
                raise TypeError(
                    f"request ids are strings, not {shown(request_id)}; pass several one by one"
                )
        seconds = self._seconds(timeout)
        self._dispatcher.check_usable()
        requests = self._dispatcher.requests.find(request_ids)
        abort(self._dispatcher, requests)
        engines = sorted({request.engine for request in requests})
        if confirm and engines:
            alive = set(self._dispatcher.registry.alive())
            still = [index for index in engines if index in alive]
            if still:
                settle(self._dispatcher, "is_sleeping", (), engines=still, timeout=seconds).unwrap()

    def abort_all(self) -> None:
        """Stop every live request of this client."""
        self._dispatcher.check_usable()
        abort(self._dispatcher, self._dispatcher.requests.live())

    @property
    def active_requests(self) -> int:
        """Requests whose streams have not ended."""
        self._check_process()
        return len(self._dispatcher.requests.live())

    def pending(self) -> list[Pending]:
        """What engines have not settled: utility calls and requests, oldest first."""
        self._check_process()
        now = time.monotonic()
        found = [
            Pending("call", call.method, index, now - call.started)
            for call in self._dispatcher.registry.calls()
            for index in list(call.waiting)
        ]
        found += [
            Pending("request", request.request_id, request.engine, now - request.started)
            for request in self._dispatcher.requests.live()
        ]
        return sorted(found, key=lambda pending: -pending.age)

    # -- life cycle -----------------------------------------------------------------------------

    def close(self, timeout: Timeout = USE_DEFAULT) -> None:
        """End the client; idempotent, from any thread.

        New work is refused, every waiting call gets a ``ClientClosedError`` with its outcomes,
        what is still to be sent gets the rest of the time, engines that the client launched end.

        ``close(timeout=0)`` only asks for all that and does not wait: it takes no lock, and is the
        one method that a signal handler may call.

        Args:
            timeout: seconds; left out: ``close_timeout`` of the client.
        """
        dispatcher = self._dispatcher
        if dispatcher.is_foreign():
            return
        seconds = (
            dispatcher.config.close_timeout if timeout is USE_DEFAULT else parse_timeout(timeout)
        )
        deadline = Deadline(seconds)
        latch = dispatcher.ask_close(deadline)
        if seconds == 0 or dispatcher.is_current_thread():
            return
        # The dispatcher keeps to the deadline itself; the extra is for its last steps.
        grace = Deadline(None if seconds is None else seconds + _CLOSE_GRACE)
        if latch.wait(grace.lock_timeout()):
            dispatcher.join(grace.remaining())

    def __enter__(self) -> EngineClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        dispatcher = getattr(self, "_dispatcher", None)
        if dispatcher is None or dispatcher.registry.ended or dispatcher.is_foreign():
            return
        state = repr(self)  # before it changes
        # No lock and no wait: a finalizer runs anywhere, even in the dispatcher.
        dispatcher.ask_close(Deadline(dispatcher.config.close_timeout))
        warnings.warn(f"unclosed {state}", ResourceWarning, stacklevel=2, source=self)

    def __repr__(self) -> str:
        dispatcher = self._dispatcher
        if dispatcher.registry.ended:
            broken = dispatcher.registry.closing_cause
            return f"<EngineClient {'closed' if broken is None else f'broken: {broken!r}'}>"
        records = dispatcher.registry.engines.values()
        alive = sum(record.alive for record in records)
        requests = sum(len(record.requests) for record in records)
        live = f", {requests} requests" if requests else ""
        return f"<EngineClient open: {alive} of {len(records)} engines alive{live}>"

    def _repr_html_(self) -> str:
        text = repr(self)[1:-1]
        # What is known of the engines is history after the end, and is read under a lock, which a
        # fork's child must not take.
        if self._dispatcher.registry.ended or self._dispatcher.is_foreign():
            return _render.html_table(("client",), [(text,)])
        return engines_html(self.engines, caption=text)

    # -- inside ---------------------------------------------------------------------------------

    def _check_process(self) -> None:
        """Refuse before any lock when this process is a fork of the owner."""
        if self._dispatcher.is_foreign():
            self._dispatcher.check_usable()

    def _seconds(self, timeout: Timeout) -> float | None:
        if timeout is USE_DEFAULT:
            return self._dispatcher.config.timeout
        return parse_timeout(timeout)

    def _unwrap(
        self, outcomes: Outcomes, undo_call: UtilityCall | None, timeout: Timeout
    ) -> list[Any]:
        __tracebackhide__ = True
        values = outcomes.values_in_order()
        if len(values) == len(outcomes):
            return values
        error = outcomes.error()
        try:
            if undo_call is not None and outcomes.may_have_run:
                raise_undone(self._dispatcher, error, undo_call, self._seconds(timeout))
            raise error
        finally:
            del error  # a frame that holds an exception that holds the frame delays its collection


_CLOSE_GRACE = 1.0


def connect(
    address: str,
    *,
    engine_count: int = 1,
    engine_start_index: int = 0,
    advertised_host: str | None = None,
    input_address: str | None = None,
    output_address: str | None = None,
    codec: CodecName = "auto",
    coordinator: bool = False,
    parallel_config: Mapping[str, Any] | None = None,
    timeout: float | None = None,
    connect_timeout: float | None = 600.0,
    close_timeout: float | None = 5.0,
    max_message_size: int = 2**30,
    max_pending_outputs: int = 16_384,
    max_unanswered_bytes: int = 2**30,
    heartbeat_interval: float | Literal["auto"] | None = "auto",
    slow_call_warning: float | None = 30.0,
    context: zmq.Context[zmq.Socket[bytes]] | None = None,
) -> EngineClient:
    """Bind the addresses, greet the engines and wait until every one is ready.

    Engines may be started before or after; each connects to ``address``, is told where the data
    sockets are, and registers.  The address stays open, so that engines may restart later.

    Args:
        address: the handshake address to bind, ``tcp://host:port`` or ``ipc:///path``.  Whoever
            reaches it controls the engines: stay on loopback or ipc unless you must.
        engine_count: how many engines to wait for.
        engine_start_index: the index of the first.
        advertised_host: the host that engines connect to, where it differs from the one bound.
        input_address: where to bind the input socket; left out: the same host, a free port, or
            an ipc file in a private directory.
        output_address: likewise for the output socket.
        codec: ``"auto"`` takes each engine's own dialect; or force ``"cbor"`` or ``"msgpack"``.
        coordinator: run the coordinator of a lockstep group in this client.  Without, the client
            wakes the group over the engines' own connections, which needs no more sockets; with
            one, engines report their load and the end of aborted requests.
        parallel_config: what every engine sets on its own configuration; needed when the engines
            of a lockstep group come from several launch commands.
        timeout: default time limit of calls, in seconds; None for none, since loading weights
            takes minutes.
        connect_timeout: seconds for the whole start, all engines together; None for no limit.
        close_timeout: default time limit of :meth:`EngineClient.close`.
        max_message_size: bytes; a larger message counts as malformed.
        max_pending_outputs: outputs of one request that may lie unread; at more it is aborted and
            its stream ends with ``StreamOverflow``.
        max_unanswered_bytes: an engine that was sent more than this since it was last heard is
            sent no more calls until it is heard again.
        heartbeat_interval: seconds between ZeroMQ heartbeats; ``"auto"``: none on ipc and
            loopback, 10 s elsewhere; None: none.
        slow_call_warning: seconds after which a call without a time limit logs a warning that
            names the engines outstanding, then again at doubled intervals; None: never.
        context: a ZeroMQ context to use; left out: one of its own.

    Returns:
        The client; close it, or use it as a context manager.

    Raises:
        HandshakeTimeout: not all engines were ready in time; ``missing`` names them.
        HandshakeError: an address cannot be bound, or an engine speaks a dialect that is not
            installed or not the one forced.
        ValueError, TypeError: a setting that cannot be meant.
    """
    config = ClientConfig(
        engine_count=engine_count,
        engine_start_index=engine_start_index,
        codec=codec,
        timeout=timeout,
        connect_timeout=connect_timeout,
        close_timeout=close_timeout,
        max_message_size=max_message_size,
        max_pending_outputs=max_pending_outputs,
        max_unanswered_bytes=max_unanswered_bytes,
        heartbeat_interval=heartbeat_interval,
        slow_call_warning=slow_call_warning,
    )
    if codec != "auto":
        codec_named(codec)  # tells at once when its package is missing
    check_parallel_config(parallel_config)
    if address is None:  # an environment variable that is not set, say
        raise TypeError("address must be a string like 'tcp://127.0.0.1:5570', not None")
    bind = plan_transport(
        handshake=address,
        input_address=input_address,
        output_address=output_address,
        advertised_host=advertised_host,
        heartbeat_interval=config.heartbeat_interval,
        context=context,
        coordinator=coordinator,
    )

    def opener() -> Opened:
        transport = bind()
        return Opened(transport, init_for(transport, parallel_config))

    return start(config, opener, EngineClient)


def connect_bootstrapped(
    input_address: str,
    output_address: str,
    *,
    engine_count: int = 1,
    engine_start_index: int = 0,
    client_index: int = 0,
    coordinator_address: str | None = None,
    codec: CodecName = "auto",
    context: zmq.Context[zmq.Socket[bytes]] | None = None,
    **settings: Unpack[Settings],
) -> EngineClient:
    """Bind ready-made data addresses and wait for the engines' registrations.

    For engines that another process greets (a launcher with several frontends): it told them
    these addresses, as those of the frontend ``client_index``.

    Args:
        input_address: where to bind the input socket.
        output_address: where to bind the output socket.
        engine_count: how many engines to wait for.
        engine_start_index: the index of the first.
        client_index: this client's place among the frontends; replies come to its output address.
        coordinator_address: where the coordinator of a lockstep group publishes; left out: where
            the engines' registrations say, if they do.
        codec: ``"auto"`` reads each engine's dialect off its registration; an engine that
            registers with an empty payload needs it said.
        context: as for :func:`connect`.
        **settings: ``timeout``, ``connect_timeout``, ``close_timeout``, ``max_message_size``,
            ``max_pending_outputs``, ``max_unanswered_bytes``, ``heartbeat_interval`` and
            ``slow_call_warning``, as for :func:`connect`.

    Raises:
        HandshakeTimeout: not all engines had registered in time.
        HandshakeError: as for :func:`connect`.
    """
    config = ClientConfig(
        engine_count=engine_count,
        engine_start_index=engine_start_index,
        codec=codec,
        client_index=client_index,
        **settings,
    )
    if codec != "auto":
        codec_named(codec)
    bind = plan_transport(
        handshake=None,
        input_address=input_address,
        output_address=output_address,
        advertised_host=None,
        heartbeat_interval=config.heartbeat_interval,
        context=context,
        coordinator_address=coordinator_address,
    )
    return start(
        config,
        lambda: Opened(bind(), init=None, coordinator_address=coordinator_address),
        EngineClient,
    )
