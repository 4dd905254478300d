"""What a reference engine knows and can do: the utility methods that it answers.

An engine looks a method up by its name on an ``EngineModel``.  Derive from it, or pass plain
functions to ``MockEngine(methods=...)``, to give an engine of your tests more methods.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["EngineModel", "WorkerModel", "default_ready", "failure_detail"]

Method = Callable[..., Any]


def default_ready(index: int) -> dict[str, Any]:
    """Return the 25 keys that a vLLM 0.32 engine registers with, in its order."""
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


class WorkerModel:
    """One simulated worker of an engine, the target of ``collective_rpc``."""

    def __init__(self, index: int) -> None:
        self.index = index

    def check_health(self) -> None:
        """Answer None: the worker is well."""

    def echo(self, value: Any) -> Any:
        """Answer the argument."""
        return value

    def worker_index(self) -> int:
        """Answer the worker's position in its engine."""
        return self.index


class EngineModel:
    """The state of one simulated engine; its public methods are its utility methods."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.workers = (WorkerModel(0), WorkerModel(1))

    @property
    def methods(self) -> dict[str, Method]:
        """The utility methods by name."""
        names = (name for name in dir(type(self)) if not name.startswith("_"))
        found = ((name, getattr(self, name)) for name in names if name != "methods")
        return {name: method for name, method in found if callable(method)}

    def is_sleeping(self) -> bool:
        """Answer whether the engine sleeps."""
        return False

    def is_scheduler_paused(self) -> bool:
        """Answer whether the scheduler is paused."""
        return False

    def echo(self, value: Any) -> Any:
        """Answer the argument."""
        return value

    def whoami(self) -> dict[str, int]:
        """Answer which engine this is, and in which process."""
        return {"index": self.index, "pid": os.getpid()}

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a worker's method on every worker; answer their results."""
        try:
            calls = [_worker_method(worker, method) for worker in self.workers]
            return [call(*args, **(kwargs or {})) for call in calls]
        except Exception as exc:
            raise RuntimeError(
                f"Worker failed with error '{exc}', please check the stack trace above for the "
                "root cause"
            ) from exc


def _worker_method(worker: WorkerModel, name: str) -> Method:
    found = None if name.startswith("_") else getattr(worker, name, None)
    if not callable(found):
        raise AttributeError(f"'Worker' object has no attribute '{name}'")
    method: Method = found
    return method


def failure_detail(method: Method, args: Sequence[Any], exc: Exception) -> str:
    """Return what a vLLM engine reports of ``exc``: nothing at all for too many arguments.

    It asserts that no more arguments came than the method has parameters, without a text.
    """
    if isinstance(exc, TypeError) and isinstance(args, list):
        try:
            kinds = [parameter.kind for parameter in inspect.signature(method).parameters.values()]
        except ValueError:
            return str(exc)
        positional = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
        takes_all = inspect.Parameter.VAR_POSITIONAL in kinds
        if not takes_all and len(args) > sum(kind in positional for kind in kinds):
            return ""
    return str(exc)
