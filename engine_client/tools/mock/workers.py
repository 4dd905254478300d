"""The simulated workers of a reference engine: the targets of ``collective_rpc``."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

from engine_client.tools.mock.lora import Adapter, AdapterCache
from engine_client.tools.mock.options import EngineOptions

__all__ = ["WorkerModel", "call_workers"]

NO_LORA = "LoRA is not enabled. Use --enable-lora to enable LoRA."
NO_PROFILER = (
    "Profiling is not enabled. Please set --profiler-config to enable profiling. Example: "
    "'--profiler-config.profiler=torch --profiler-config.torch_profiler_dir"
    "=YOUR_DIR_PATH_TO_DUMP_TRACE'"
)
NO_TRANSFER = (
    "Weight transfer not configured. Please set weight_transfer_config to enable weight transfer."
)
PARAMETERS = ("model.embed_tokens.weight", "model.norm.weight")
"""What its model consists of."""


class WorkerModel:
    """One worker.  Its public methods can be called by ``collective_rpc``."""

    def __init__(self, index: int, ready: Mapping[str, Any], options: EngineOptions) -> None:
        self.index = index
        self.asleep: set[str] = set()
        """What of its memory is not there: ``"weights"``, ``"kv_cache"``."""
        self.profiling = False
        self.weights = 0
        """How often the weights were replaced."""
        self.adapters = AdapterCache(
            lambda: int(options.max_cpu_loras or ready["max_loras"]),
        )
        self._ready = ready
        self._options = options
        self._transfer: Mapping[str, Any] | None = None
        self._updating: str | None = None
        self._received = 0

    # -- tests and questions -------------------------------------------------------------------

    def check_health(self) -> None:
        """Answer None: the worker is well."""

    def echo(self, value: Any) -> Any:
        """Answer the argument."""
        return value

    def worker_index(self) -> int:
        """Answer the worker's position in its engine."""
        return self.index

    def compute_weight_checksums(self) -> dict[str, str]:
        """Answer a checksum for each parameter; new weights have new ones."""
        return {
            name: hashlib.sha256(f"{name} {self.index} {self.weights}".encode()).hexdigest()
            for name in PARAMETERS
        }

    # -- what the engine asks of it --------------------------------------------------------------

    def synchronize_device(self) -> None:
        """Nothing is pending on the device that is not there."""

    def execute_dummy_batch(self) -> None:
        """Compute nothing."""

    def reset_mm_cache(self) -> None:
        """Forget multimodal inputs."""

    def reset_encoder_cache(self) -> None:
        """Forget encoder outputs."""

    def sleep(self, level: int = 1) -> None:
        """Give up memory."""
        self.asleep |= {"weights", "kv_cache"}

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Get memory back."""
        self.asleep -= set(self.asleep if tags is None else tags)

    def discard(self, tags: Sequence[str]) -> None:
        """Give up some memory without keeping what was in it."""
        self.asleep |= set(tags)

    def profile(
        self,
        is_start: bool = True,
        profile_prefix: str | None = None,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> None:
        """Start or stop the profiler."""
        if not self._options.profiler:
            raise RuntimeError(NO_PROFILER)
        self.profiling = is_start

    def save_sharded_state(
        self, path: str, pattern: str | None = None, max_size: int | None = None
    ) -> None:
        """Write nothing, into a directory that must exist."""
        if not os.path.isdir(path):
            raise RuntimeError(
                "Error while serializing: I/O error: No such file or directory (os error 2) at "
                f'path "{path}/.tmp"'
            )

    # -- LoRA ---------------------------------------------------------------------------------

    def add_lora(self, adapter: Adapter) -> bool:
        """Load an adapter."""
        self._check_lora()
        return self.adapters.add(adapter)

    def remove_lora(self, adapter_id: int) -> bool:
        """Unload an adapter; answer whether it was there."""
        self._check_lora()
        return self.adapters.remove(adapter_id)

    def pin_lora(self, adapter_id: int) -> bool:
        """Keep an adapter from being evicted."""
        self._check_lora()
        return self.adapters.pin(adapter_id)

    def list_loras(self) -> set[int]:
        """Answer the ids of the adapters that it holds."""
        self._check_lora()
        return self.adapters.ids()

    def _check_lora(self) -> None:
        if not self._ready["supports_lora"]:
            raise RuntimeError(NO_LORA)

    # -- weight transfer: init, then (start, update..., finish)..., then shutdown ----------------

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        """Connect to a trainer; needs ``weight_transfer_backend`` in the registration."""
        self._check_transfer()
        self._transfer = dict(init_info)

    def shutdown_weight_transfer_engine(self) -> None:
        """Let go of the trainer; not in the middle of an update."""
        if self._updating is not None:
            raise RuntimeError("Cannot release a trainer connection during a weight update")
        self._transfer = None

    def start_weight_update(self) -> None:
        """Begin to replace the weights."""
        self._start_update("model")

    def start_draft_weight_update(self) -> None:
        """Begin to replace the draft model's weights, where there is one."""
        self._check_transfer()
        if not self._ready["supports_draft_weight_updates"]:
            raise RuntimeError("WeightTransferEngine does not support draft model weight updates.")
        self._start_update("draft")

    def update_weights(self, update_info: Mapping[str, Any]) -> None:
        """Receive some weights; a failure ends the update."""
        self._check_transfer()
        if self._updating is None:
            raise RuntimeError("start_weight_update must be called before update_weights.")
        if self._transfer is None:
            self._updating = None
            raise RuntimeError("The weight transfer engine has no trainer: initialize it first.")
        self._received += 1

    def finish_weight_update(self) -> None:
        """Put the received weights to use."""
        self._check_transfer()
        if self._updating is None:
            raise RuntimeError(
                "finish_weight_update called without a matching start_weight_update."
            )
        if self._received and self._updating == "model":
            self.weights += 1
        self._updating = None

    def checkpoint_prepare(self) -> None:
        """Make ready to be checkpointed."""

    def checkpoint_restore(self) -> None:
        """Go on after a checkpoint."""

    def _check_transfer(self) -> None:
        if self._ready["weight_transfer_backend"] is None:
            raise RuntimeError(NO_TRANSFER)

    def _start_update(self, what: str) -> None:
        self._check_transfer()
        if self._updating is not None:
            raise RuntimeError(
                "start_weight_update called while a weight update is already active. Call "
                "finish_weight_update first."
            )
        self._updating, self._received = what, 0


def call_workers(
    workers: Sequence[WorkerModel],
    method: str,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    failing: tuple[int, str] | None = None,
) -> list[Any]:
    """Call a method on every worker.

    All of them execute it before the first failure is reported, as vLLM's worker processes do.  An
    engine with one worker runs it in its own process, and reports the failure as it is.

    Args:
        workers: the workers.
        method: a public method of theirs.
        args: its positional arguments.
        kwargs: its keyword arguments.
        failing: a worker that does not execute it but fails with a text.
    """
    results, failure = [], None
    for worker in workers:
        try:
            if failing is not None and failing[0] == worker.index:
                raise RuntimeError(failing[1])
            results.append(_method(worker, method, len(workers))(*args, **(kwargs or {})))
        except Exception as exc:
            failure = failure or exc
    if failure is not None and len(workers) == 1:
        raise failure
    if failure is not None:
        raise RuntimeError(
            f"Worker failed with error '{failure}', please check the stack trace above for the "
            "root cause"
        ) from failure
    return results


def _method(worker: WorkerModel, name: str, count: int) -> Any:
    found = None if name.startswith("_") else getattr(worker, name, None)
    if not callable(found):
        if count == 1:
            raise NotImplementedError(f"Method '{name}' is not implemented.")
        raise AttributeError(f"'Worker' object has no attribute '{name}'")
    return found
