"""What one reference engine is: what it registers with, and how it behaves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

__all__ = ["EngineOptions", "default_ready"]


def default_ready(index: int) -> dict[str, Any]:
    """Return the 25 keys that a vLLM 0.32 engine registers with, in its order.

    The engine is what it registers as: what it can do follows from ``supports_lora``,
    ``max_loras``, ``max_model_len``, ``max_num_seqs``, ``num_gpu_blocks``, ``block_size``,
    ``world_size`` (how many workers), ``data_parallel_size``, ``weight_transfer_backend`` and
    ``supports_draft_weight_updates``.
    """
    return {
        "max_model_len": 2048,
        "num_gpu_blocks": 1000,
        "block_size": 16,
        "dp_stats_address": None,
        "dtype": "float32",
        "vllm_version": "0.32.0",
        "world_size": 2,
        "data_parallel_size": 1,
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "data_parallel_rank": index,
        "max_num_seqs": 128,
        "max_num_batched_tokens": 2048,
        "instance_id": "mock",
        "supports_lora": True,
        "max_loras": 4,
        "mamba_block_size": None,
        "kv_cache_size_tokens": 16_000,
        "kv_cache_max_concurrency": 7.8125,
        "kv_events_config": None,
        "weight_transfer_backend": None,
        "enable_sleep_mode": True,
        "supports_draft_weight_updates": False,
        "effective_attention_block_size": 16,
    }


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What a reference engine does that its registration does not tell."""

    step_seconds: float = 0.0
    """How long one step of the running requests takes."""
    manual_steps: bool = False
    """Compute only when told to, by the remote call ``mock_step``: nothing depends on time."""
    log_stats: bool = False
    """Send scheduler statistics with every step, and the events of requests."""
    coordinated: bool = False
    """Behave as an engine with a coordinator: name the requests that ended."""
    coordinator_input: str | None = None
    """Where a coordinator publishes to engines, if INIT does not say so."""
    coordinator_output: str | None = None
    """Where a coordinator hears engines, likewise."""
    meeting: str | None = None
    """Where the ranks of a lockstep group meet (``mock/lockstep.py``), likewise."""
    vocab_size: int = 512
    supported_tasks: tuple[str, ...] = ("generate",)
    max_cpu_loras: int | None = None
    """Adapters beyond which the one used longest ago is evicted; None: ``max_loras``."""
    profiler: bool = False
    """Whether it was started with a profiler."""
    connector_fails: bool = False
    """Whether its external cache cannot be cleared: pausing fails after it took effect."""
    farewell_seconds: float = 2.5
    """How long the input stays open after the engine has announced its death."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "supported_tasks", tuple(self.supported_tasks))
        if self.step_seconds < 0 or self.farewell_seconds < 0:
            raise ValueError("seconds must not be negative")
        if self.vocab_size < 1:
            raise ValueError(f"vocab_size must be positive, not {self.vocab_size}")

    @classmethod
    def from_plain(cls, value: EngineOptions | Mapping[str, Any] | None) -> EngineOptions:
        """Read options from a map; unknown keys are refused."""
        if isinstance(value, EngineOptions):
            return value
        if value is not None and not isinstance(value, Mapping):
            raise ValueError(f"options are a map, not {type(value).__name__}")
        unknown = set(value or ()) - {field.name for field in fields(cls)}
        if unknown:
            raise ValueError(f"there is no option {', '.join(sorted(map(str, unknown)))}")
        return cls(**(value or {}))
