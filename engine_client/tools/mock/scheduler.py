"""How a reference engine runs its requests: in steps, all of them at once.

A step generates one token for each running request.  Requests wait while ``max_num_seqs`` run, and
while the scheduler is paused.  What a vLLM engine is not asked to check kills it here too: whatever
is raised by ``begin_step``, ``add`` or ``abort`` is the engine's death.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any

from engine_client.tools.mock.arrays import MessageArrays
from engine_client.tools.mock.lora import Adapter
from engine_client.tools.mock.options import EngineOptions
from engine_client.tools.mock.outputs import (
    ABORT,
    LENGTH,
    REPETITION,
    STOP,
    Batch,
    logprob_arrays,
    output_record,
    pooling_tensor,
    prompt_logprob_tensors,
    scheduler_stats,
)
from engine_client.tools.mock.prefix_cache import PrefixCache
from engine_client.tools.mock.request import LiveRequest

__all__ = ["Pause", "Scheduler"]

QUEUED, SCHEDULED, PREEMPTED = 1, 2, 3
"""What happened to it."""
POOLING_TASKS = frozenset(
    {"embed", "classify", "token_embed", "token_classify", "plugin", "embed&token_classify"}
)


class Pause(Enum):
    """Whether requests are scheduled."""

    NOT = "not paused"
    NEW = "running requests go on, others wait"
    ALL = "nothing is computed"


class Scheduler:
    """The requests of one engine.

    Args:
        ready: what the engine registers with.
        options: how it behaves.
        use_adapter: loads an adapter that a request names, unless it is there.
    """

    def __init__(
        self,
        ready: Mapping[str, Any],
        options: EngineOptions,
        use_adapter: Callable[[Adapter], object],
    ) -> None:
        self.live: dict[str, LiveRequest] = {}
        self.pause = Pause.NOT
        self.cache = PrefixCache()
        self._ready = ready
        self._options = options
        self._use_adapter = use_adapter
        self._waiting: deque[LiveRequest] = deque()
        self._running: list[LiveRequest] = []
        self.coordinated = options.coordinated
        """Whether it tells which requests ended."""
        self.unsettled = False
        """Whether requests ended since the last step: one more is made to clear up."""
        self._ended: dict[int, list[str]] = {}
        self._when_idle: list[Callable[[], None]] = []

    # -- what there is to do -----------------------------------------------------------------

    @property
    def computes(self) -> bool:
        """Whether a step would generate something."""
        if self.pause is Pause.ALL:
            return False
        return bool(self._running or (self._waiting and self.pause is Pause.NOT))

    @property
    def has_work(self) -> bool:
        """Whether a step is to be made."""
        return self.unsettled or self.computes

    @property
    def running(self) -> int:
        """How many requests hold blocks."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """How many requests are queued."""
        return len(self._waiting)

    def when_idle(self, callback: Callable[[], None]) -> None:
        """Have something done once there is no work left."""
        self._when_idle.append(callback)

    def settle_idle(self) -> None:
        """Do what waits for the end of the work; there must be none."""
        while self._when_idle:
            self._when_idle.pop()()

    # -- requests come and go ------------------------------------------------------------------

    def add(self, request: LiveRequest) -> None:
        """Queue a request.

        Raises:
            ValueError, AssertionError: what kills a real engine.
        """
        if request.pooling is not None:
            supported = [task for task in self._options.supported_tasks if task in POOLING_TASKS]
            if request.pooling.task not in supported:
                raise ValueError(
                    f"Unsupported task: {request.pooling.task!r} Supported tasks: {supported}"
                )
        if request.id in self.live:
            raise AssertionError("duplicate request id")
        self.live[request.id] = request
        self._waiting.append(request)
        self._note(request, QUEUED)
        if request.abort_immediately:
            self.abort([request.id])

    def abort(self, request_ids: Iterable[Any] | None) -> None:
        """End requests without a word; unknown ids are ignored, None means all.

        Raises:
            TypeError: what kills a real engine.
        """
        ids = list(self.live) if request_ids is None else request_ids
        for request_id in [ids] if isinstance(ids, str) else ids:
            request = self.live.get(request_id)
            if request is not None:
                self._end(request)
                if self.coordinated:
                    self._ended.setdefault(request.client, []).append(request.id)

    def end_all(self, arrays: Callable[[], MessageArrays]) -> dict[int, Batch]:
        """End every request; return what each client is told of it."""
        batches: dict[int, Batch] = {}
        for request in list(self.live.values()):
            self._end(request)
            batch = batches.setdefault(request.client, Batch(arrays(), finished=[]))
            batch.outputs.append(output_record(request.id, [], finish=ABORT))
            assert batch.finished is not None
            batch.finished.append(request.id)
        return batches

    def preempt(self) -> None:
        """Put the running requests back into the queue, in their order."""
        for request in reversed(self._running):
            self._waiting.appendleft(request)
            self._note(request, PREEMPTED)
        self._running.clear()

    def _end(self, request: LiveRequest) -> None:
        del self.live[request.id]
        if request in self._running:
            self._running.remove(request)
        else:
            self._waiting.remove(request)
        self.unsettled = True

    # -- a step -----------------------------------------------------------------------------------

    def begin_step(self) -> list[LiveRequest]:
        """Choose what runs; return it.

        Raises:
            Exception: what kills a real engine.
        """
        self.unsettled = False
        if self.pause is Pause.ALL:
            return []
        while (
            self._waiting
            and self.pause is Pause.NOT
            and len(self._running) < self._ready["max_num_seqs"]
        ):
            request = self._waiting.popleft()
            self._running.append(request)
            self._admit(request)
        if self._ready["supports_lora"]:
            for request in self._running:
                if request.adapter is not None:
                    self._use_adapter(request.adapter)
        return self._running.copy()

    def _admit(self, request: LiveRequest) -> None:
        prompt, limit = request.prompt, self._ready["max_model_len"]
        if not prompt:
            raise ValueError(
                "Stop argument for islice() must be None or an integer: 0 <= x <= sys.maxsize."
            )
        if len(prompt) > limit:
            raise ValueError(
                f"could not broadcast input array from shape ({len(prompt)},) into shape ({limit},)"
            )
        if len(prompt) == limit and request.pooling is None:
            raise AssertionError(
                "Sampled token IDs exceed the max model length. Total number of tokens: "
                f"{len(prompt) + 1} > max_model_len: {limit}"
            )
        if min(prompt) < 0 or max(prompt) >= self._options.vocab_size:
            raise IndexError("index out of range in self")
        request.prepare()
        self._note(request, SCHEDULED)
        if request.prefill is None:
            known = self.cache.admit(request, self._ready["block_size"])
            request.prefill = {
                "num_prompt_tokens": len(prompt),
                "num_computed_tokens": len(prompt) - known,
                "num_cached_tokens": known,
                "num_local_cached_tokens": known,
                "num_external_cached_tokens": 0,
                "num_cache_creation_tokens": 0,
            }

    def end_step(
        self, scheduled: Iterable[LiveRequest], arrays: Callable[[], MessageArrays]
    ) -> dict[int, Batch]:
        """Generate; return what each client is told.

        Requests that were aborted since the step began generate nothing.
        """
        batches: dict[int, Batch] = {}
        for request in scheduled:
            if self.live.get(request.id) is not request:
                continue
            batch = batches.get(request.client)
            if batch is None:
                batch = batches[request.client] = Batch(arrays())
            output, ended = self._generate(request, batch.arrays)
            batch.outputs.append(output)
            if ended:
                self._end(request)
                if self.coordinated:
                    self._ended.setdefault(request.client, []).append(request.id)
        for client, ids in self._ended.items():
            batches.setdefault(client, Batch(arrays())).finished = ids
        self._ended = {}
        if self._options.log_stats:
            first = next(iter(batches), 0)
            batch = batches.setdefault(first, Batch(arrays()))
            batch.stats = scheduler_stats(self._ready, self._running, self._waiting, self.cache)
        return batches

    def _generate(self, request: LiveRequest, arrays: MessageArrays) -> tuple[list[Any], bool]:
        first = not request.tokens
        if request.pooling is not None:
            output = output_record(request.id, [], finish=STOP)
            output[4] = pooling_tensor(request, arrays)
        else:
            vocab_size = self._options.vocab_size
            token = request.next_token(vocab_size)
            finish, reason = self._finish(request, token)
            output = output_record(request.id, [token], finish, reason)
            output[2] = logprob_arrays(request, token, vocab_size, arrays)
            if first:
                output[3] = prompt_logprob_tensors(request, vocab_size, arrays)
        if request.events:
            output[7], request.events = request.events, []
        output[10] = request.trace_headers
        if first:
            output[11] = request.prefill
        return output, output[5] is not None

    def _finish(self, request: LiveRequest, token: int) -> tuple[int | None, int | str | None]:
        sampling, count = request.sampling, len(request.tokens)
        assert sampling is not None
        assert sampling.max_tokens is not None
        if token == sampling.eos_token_id:
            return STOP, None
        if token in sampling.stop_token_ids:
            return STOP, token
        full = len(request.prompt) + count >= self._ready["max_model_len"]
        if full or count >= sampling.max_tokens:
            return LENGTH, None
        if count < sampling.min_tokens or sampling.repetition is None:
            return None, None
        if sampling.repetition.found_in(request.tokens):
            return REPETITION, "repetition_detected"
        return None, None

    def _note(self, request: LiveRequest, event: int) -> None:
        if self._options.log_stats:
            request.events.append({"type": event, "timestamp": time.monotonic()})
