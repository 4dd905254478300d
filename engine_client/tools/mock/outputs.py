"""What a reference engine says of its requests: records, arrays and statistics."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine_client.tools.mock.arrays import MessageArrays
from engine_client.tools.mock.prefix_cache import PrefixCache
from engine_client.tools.mock.request import LiveRequest
from engine_client.tools.mock.tokens import embed, prompt_logprobs, top_logprobs

__all__ = [
    "ABORT",
    "ERROR",
    "LENGTH",
    "REPETITION",
    "STOP",
    "Batch",
    "logprob_arrays",
    "output_record",
    "pooling_tensor",
    "prompt_logprob_tensors",
    "scheduler_stats",
]

STOP, LENGTH, ABORT, ERROR, REPETITION = range(5)
"""Why a request ended."""
EMBEDDING_SIZE = 8
CLASSES = 2


@dataclass(slots=True)
class Batch:
    """What one step, or one pause, has to say to one client."""

    arrays: MessageArrays
    outputs: list[list[Any]] = field(default_factory=list)
    finished: list[str] | None = None
    stats: dict[str, Any] | None = None


def output_record(
    request_id: str,
    tokens: list[int],
    finish: int | None = None,
    reason: int | str | None = None,
) -> list[Any]:
    """Lay out one request's output: 18 positions."""
    before = [request_id, tokens, None, None, None, finish, reason, None, None]
    return [*before, None, None, None, None, 0, None, None, None, None]


def logprob_arrays(
    request: LiveRequest, token: int, vocab_size: int, arrays: MessageArrays
) -> list[Any] | None:
    """Return the log probabilities that go with a token, if any are wanted."""
    sampling = request.sampling
    assert sampling is not None
    wanted = sampling.logprob_token_ids
    if wanted is not None:
        ids, values, rank = top_logprobs(token, len(wanted), vocab_size)
        ids = [token, *wanted]
        values = values[: len(ids)]
    elif sampling.logprobs is not None:
        ids, values, rank = top_logprobs(token, sampling.logprobs, vocab_size)
    else:
        return None
    shape = [1, len(ids)]
    return [
        arrays.write("<i4", shape, ids),
        arrays.write("<f4", shape, values),
        arrays.write("<i8", [1], [rank]),
        None,
    ]


def prompt_logprob_tensors(
    request: LiveRequest, vocab_size: int, arrays: MessageArrays
) -> list[Any] | None:
    """Return the log probabilities of the prompt, if they are wanted."""
    assert request.sampling is not None
    count = request.sampling.prompt_logprobs
    if count is None:
        return None
    ids, values, ranks = prompt_logprobs(request.prompt, count, vocab_size)
    shape = [len(ranks), len(ids) // len(ranks) if ranks else 0]
    return [
        arrays.write("int32", shape, ids),
        arrays.write("float32", shape, values),
        arrays.write("int32", [len(ranks)], ranks),
        None,
        None,
    ]


def pooling_tensor(request: LiveRequest, arrays: MessageArrays) -> list[Any]:
    """Return what a pooling request asked for."""
    assert request.pooling is not None
    task = request.pooling.task or ""
    size = request.pooling.dimensions or (CLASSES if "classify" in task else EMBEDDING_SIZE)
    if task.startswith("token_"):
        values = [one for token in request.prompt for one in embed([token], size)]
        return arrays.write("float32", [len(request.prompt), size], values)
    return arrays.write("float32", [size], embed(request.prompt, size))


def scheduler_stats(
    ready: Mapping[str, Any],
    running: Collection[LiveRequest],
    waiting: Collection[LiveRequest],
    cache: PrefixCache,
) -> dict[str, Any]:
    """Return vLLM's 18 scheduler statistics."""
    block_size = ready["block_size"]
    blocks = sum(
        -(-(len(request.prompt) + len(request.tokens)) // block_size) for request in running
    )
    return {
        "num_running_reqs": len(running),
        "num_waiting_reqs": len(waiting),
        "num_skipped_waiting_reqs": 0,
        "num_kv_fetch_reqs_by_stage": {
            "waiting_to_start": 0,
            "in_progress": 0,
            "completed_waiting": 0,
        },
        "step_counter": 0,
        "current_wave": 0,
        "kv_cache_usage": min(1.0, blocks / ready["num_gpu_blocks"]),
        "iteration_details": None,
        "prefix_cache_stats": cache.take_stats(),
        "connector_prefix_cache_stats": None,
        "kv_cache_eviction_events": [],
        "spec_decoding_stats": None,
        "kv_connector_stats": None,
        "ec_connector_stats": None,
        "waiting_lora_adapters": _adapters(waiting),
        "running_lora_adapters": _adapters(running),
        "cudagraph_stats": None,
        "perf_stats": None,
    }


def _adapters(requests: Iterable[LiveRequest]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for request in requests:
        if request.adapter is not None:
            counts[request.adapter.name] = counts.get(request.adapter.name, 0) + 1
    return counts
