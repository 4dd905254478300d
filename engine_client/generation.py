"""A batch of prompts, completed on all living engines.

One mailbox takes the outputs of all its requests, so one thread reads them in the order in which
they come, whatever engine they come from.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any, Protocol

from engine_client._render import shown
from engine_client.config import check_count
from engine_client.deadline import Deadline
from engine_client.dispatch.dispatcher import Dispatcher
from engine_client.dispatch.requests import Delivery, PendingRequest
from engine_client.dispatch.waiting import Mailbox
from engine_client.errors import EngineClientError, ReplyError, StreamError, StreamTimeout
from engine_client.lora import LoraRequest
from engine_client.output import Completion, EngineOutput
from engine_client.request import EngineRequest
from engine_client.sampling import SamplingParams, is_list
from engine_client.stream import leave, read, register
from engine_client.text import PlainTokenizer, Tokenizer, Transcript, prepare

__all__ = ["generate"]

logger = logging.getLogger("engine_client")

PROGRESS_INTERVAL = 5.0
"""Seconds between the log lines of ``progress=True``."""

_batches = itertools.count(1)


class _Progress(Protocol):
    def update(self, done: int) -> Any: ...

    def close(self) -> Any: ...


class _Item:
    """One request on its way."""

    __slots__ = ("error", "last", "pending", "request", "text", "tokens", "transcript")

    def __init__(self, request: EngineRequest, transcript: Transcript | None) -> None:
        self.request = request
        self.transcript = transcript
        self.text: list[str] = []
        self.pending: PendingRequest | None = None
        self.tokens: list[int] = []
        self.last: EngineOutput | None = None
        self.error: Exception | None = None

    def completion(self) -> Completion:
        text = None
        if self.transcript is not None:
            text = "".join(self.text)
            if self.last is None or self.last.finish_reason is None:
                text += self.transcript.flush()  # held back, and then came an error
        return Completion(
            request_id=self.request.request_id,
            token_ids=self.tokens,
            finish_reason=None if self.last is None else self.last.finish_reason,
            stop_reason=None if self.last is None else self.last.stop_reason,
            error=self.error,
            engine=None if self.pending is None else self.pending.engine,
            text=text,
        )


def _grouped(items: list[_Item]) -> Completion:
    """One prompt's completion, of all its samples."""
    samples = tuple(item.completion() for item in items)
    if len(samples) == 1:
        return samples[0]
    error = next((sample.error for sample in samples if sample.error is not None), None)
    return replace(samples[0], error=error, samples=samples)


def generate(
    dispatcher: Dispatcher,
    prompts: Sequence[str | Sequence[int]],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    *,
    tokenizer: Tokenizer | None,
    lora_request: LoraRequest | None,
    progress: bool,
    max_in_flight: int,
    timeout: float | None,
) -> list[Completion]:
    """See :meth:`EngineClient.generate`."""
    deadline = Deadline(timeout)
    check_count("max_in_flight", max_in_flight, least=1)
    if not isinstance(progress, bool):
        raise TypeError(f"progress must be True or False, not {shown(progress)}")
    dispatcher.check_usable()
    plain = None if tokenizer is None else PlainTokenizer(tokenizer)
    groups = [
        _samples(request, plain) for request in _requests(prompts, sampling_params, lora_request)
    ]
    items = [item for group in groups for item in group]
    mailbox: Mailbox[Delivery] = Mailbox()
    bar = _make_progress(len(items)) if progress else None
    started: list[tuple[PendingRequest, bool]] = []
    try:
        _run(dispatcher, items, mailbox, started, max_in_flight, deadline, bar)
    finally:
        # One C call, which an interrupt cannot split: what is not finished is aborted.
        dispatcher.requests.abandoned.extend(started)
        dispatcher.outbox.wakeup.poke()
        if bar is not None:
            bar.close()
    return [_grouped(group) for group in groups]


def _requests(
    prompts: Sequence[str | Sequence[int]],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    lora_request: LoraRequest | None,
) -> list[EngineRequest]:
    _check_sequence(
        "prompts must be a sequence of strings and token id lists (a single one goes in a list)",
        prompts,
    )
    for prompt in prompts:
        if not isinstance(prompt, str):
            _check_sequence(
                "each prompt must be a string or a list of token ids (a single one goes in a "
                "list: [[1, 2, 3]])",
                prompt,
            )
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        params: list[SamplingParams | None] = [sampling_params] * len(prompts)
    else:
        _check_sequence(
            "sampling_params must be a SamplingParams, or one for each prompt", sampling_params
        )
        params = list(sampling_params)
        if len(params) != len(prompts):
            raise ValueError(
                f"{len(params)} sampling_params for {len(prompts)} prompts: give one, or one each"
            )
    batch = next(_batches)
    return [
        EngineRequest(
            f"generate-{batch}-{index}",
            None if isinstance(prompt, str) else prompt,
            one,
            lora_request=lora_request,
            prompt=prompt if isinstance(prompt, str) else None,
        )
        for index, (prompt, one) in enumerate(zip(prompts, params, strict=True))
    ]


def _samples(request: EngineRequest, tokenizer: PlainTokenizer | None) -> list[_Item]:
    """The requests of one prompt: as many as it has samples, each with a seed of its own."""
    request, make_transcript = prepare(request, tokenizer)
    params = request.sampling_params
    if params is None or params.n == 1:
        requests = [request]
    else:
        requests = []
        for number in range(params.n):
            # An engine takes -1 for no seed.
            seed = params.seed if params.seed in (None, -1) else params.seed + number
            requests.append(
                replace(
                    request,
                    request_id=f"{request.request_id}-{number}",
                    sampling_params=replace(params, n=1, seed=seed),
                )
            )
    for one in requests:
        one.check_tokens_only()
    return [_Item(one, None if make_transcript is None else make_transcript()) for one in requests]


def _check_sequence(wanted: str, value: object) -> None:
    if not is_list(value):
        raise TypeError(f"{wanted}, not {shown(value)}")


def _run(
    dispatcher: Dispatcher,
    items: list[_Item],
    mailbox: Mailbox[Delivery],
    started: list[tuple[PendingRequest, bool]],
    max_in_flight: int,
    deadline: Deadline,
    bar: _Progress | None,
) -> None:
    waiting = iter(items)
    live: dict[str, _Item] = {}
    done = 0

    def finish(item: _Item, error: Exception | None = None) -> None:
        nonlocal done
        item.error = error
        done += 1
        if bar is not None:
            bar.update(1)

    while done < len(items):
        while len(live) < max_in_flight and not deadline.expired:
            item = next(waiting, None)
            if item is None:
                break
            try:
                item.pending = register(
                    dispatcher, item.request, mailbox, lambda made: started.append((made, False))
                )
            except EngineClientError as exc:
                finish(item, exc)
            else:
                live[item.pending.wire_id] = item
        if not live:
            if deadline.expired:
                break
            continue
        if not mailbox.items and not mailbox.wait(deadline, PROGRESS_INTERVAL):
            if deadline.expired:
                break
            if bar is not None:
                bar.update(0)
            continue
        _take(mailbox, live, finish, dispatcher)
    for item in items:
        if item.error is None and (item.last is None or item.last.finish_reason is None):
            item.error = StreamTimeout(
                f"{item.request.request_id} was not finished within {deadline.timeout:g} s",
                request_id=item.request.request_id,
                engine=None if item.pending is None else item.pending.engine,
            )


def _take(
    mailbox: Mailbox[Delivery],
    live: dict[str, _Item],
    finish: Callable[[_Item, Exception | None], None],
    dispatcher: Dispatcher,
) -> None:
    """Use one delivery."""
    delivery = mailbox.items.popleft()
    request = delivery.request
    request.taken += 1
    item = live.get(request.wire_id)
    if item is None:
        return
    if delivery.frames is None and item.transcript is None and delivery.record[5] is None:
        # The usual output: tokens, no end, nothing to check.
        item.tokens += delivery.record[1]
        return
    if delivery.error is not None:
        del live[request.wire_id]
        if not isinstance(delivery.error, Exception):
            raise delivery.error
        finish(item, delivery.error)
        return
    try:
        output = read(delivery, item.transcript)
    except (ReplyError, StreamError) as exc:
        leave(dispatcher, request)
        del live[request.wire_id]
        finish(item, exc)
        return
    item.tokens += output.new_token_ids
    item.last = output
    if output.text is not None:
        item.text.append(output.text)
    if output.finish_reason is not None:
        if not request.finished:
            # A stop string ended it, of which the engine does not know.
            leave(dispatcher, request)
        del live[request.wire_id]
        finish(item, None)


def _make_progress(total: int) -> _Progress:
    try:
        tqdm = import_module("tqdm.auto").tqdm
    except ModuleNotFoundError:
        return _LogProgress(total)
    bar: _Progress = tqdm(total=total, unit="prompt")
    return bar


class _LogProgress:
    """Progress as log lines."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._next = time.monotonic() + PROGRESS_INTERVAL

    def update(self, done: int) -> None:
        self._done += done
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + PROGRESS_INTERVAL
            self._say()

    def _say(self) -> None:
        logger.info("generate: %d of %d prompts finished", self._done, self._total)

    def close(self) -> None:
        self._say()
