"""What a reference engine knows and can do: the utility methods that it answers.

An engine looks a method up by its name on an ``EngineModel``.  Derive from it, or pass plain
functions to ``MockEngine(methods=...)``, to give an engine of your tests more methods.

The methods do what those of a vLLM 0.32 engine do to its state, and fail with its texts.  What a
caller has to know of them:

* ``pause_scheduler`` and ``sleep`` take effect at once and answer when the engine is idle; other
  replies overtake theirs.  They fail after they took effect.
* ``add_lora`` of an id that is known loads nothing, whatever the path, unless ``load_inplace`` is
  set; beyond ``max_cpu_loras`` it silently evicts the adapter that was used longest ago.
* ``remove_lora`` of an unknown id answers False.
* ``wake_up`` of a part of the memory answers False and leaves the scheduler paused.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, Protocol, final

from engine_client.tools.mock.lora import read_adapter
from engine_client.tools.mock.options import EngineOptions, default_ready
from engine_client.tools.mock.scheduler import Pause, Scheduler
from engine_client.tools.mock.workers import WorkerModel, call_workers

__all__ = ["Deferred", "EngineModel", "WorkerModel", "default_ready", "failure_detail"]

Method = Callable[..., Any]

_LOCKSTEP_ONLY = frozenset({"barrier", "reinitialize_distributed", "commit_prepared_elastic_ep"})


@final
class Deferred:
    """A result that comes later: the call is answered when it does, and others before."""

    def __init__(self) -> None:
        self._result: Callable[[], Any] | None = None
        self._taker: Callable[[Callable[[], Any]], None] | None = None

    def settle(self, result: Callable[[], Any]) -> None:
        """Let the call be answered with what ``result()`` returns or raises."""
        self._result = result
        if self._taker is not None:
            self._taker(result)

    def then(self, taker: Callable[[Callable[[], Any]], None]) -> None:
        """Hand the result to ``taker``, now or once it is there."""
        self._taker = taker
        if self._result is not None:
            taker(self._result)


class Member(Protocol):
    """What a rank of a lockstep group does in calls."""

    def pause(self) -> None:
        """Step until all have been told to pause."""

    def may_resume(self) -> bool:
        """Whether there is anything to resume."""

    def resume(self) -> None:
        """Meet the others, and go on."""

    def meet(self, purpose: Literal["batch", "barrier"]) -> None:
        """Wait for the others."""


class EngineModel:
    """The state of one simulated engine; its public methods are its utility methods.

    Args:
        index: the engine's index.
        options: how it behaves.
    """

    def __init__(
        self, index: int, options: EngineOptions | Mapping[str, Any] | None = None
    ) -> None:
        self.index = index
        self.options = EngineOptions.from_plain(options)
        self.ready = default_ready(index)
        """What it registers with; changes change what it can do."""
        self.weight_version = "default"
        self.scheduler = Scheduler(
            self.ready, self.options, lambda adapter: self._on_workers("add_lora", adapter)
        )
        self.failing_worker: tuple[int, str] | None = None
        """A worker that fails with a text at the next thing that the workers do."""
        self.end_requests: Callable[[], None] = lambda: None
        """Ends every request and tells the clients; set by the engine."""
        self.member: Member | None = None
        """Its part in a lockstep group whose ranks meet."""
        self._reconfiguring = False

    @cached_property
    def workers(self) -> tuple[WorkerModel, ...]:
        """As many as it registers with, at the first use."""
        return tuple(
            WorkerModel(index, self.ready, self.options)
            for index in range(self.ready["world_size"])
        )

    @property
    def methods(self) -> dict[str, Method]:
        """The utility methods by name."""
        names = {name for name in dir(type(self)) if not name.startswith("_")}
        names -= {"methods", "workers", "lockstep", "member"}
        if not self.lockstep:
            names -= _LOCKSTEP_ONLY
        found = ((name, getattr(self, name)) for name in names)
        return {name: method for name, method in found if callable(method)}

    @property
    def lockstep(self) -> bool:
        """Whether it is a member of a lockstep group."""
        return bool(self.ready["data_parallel_size"] > 1)

    # -- tests and questions -------------------------------------------------------------------

    def echo(self, value: Any) -> Any:
        """Answer the argument."""
        return value

    def whoami(self) -> dict[str, int]:
        """Answer which engine this is, and in which process."""
        return {"index": self.index, "pid": os.getpid()}

    def get_supported_tasks(self) -> list[str]:
        """Answer what its model can do."""
        return list(self.options.supported_tasks)

    def get_weight_version(self) -> str:
        """Answer the name of its weights."""
        return self.weight_version

    def set_weight_version(self, weight_version: str) -> None:
        """Name its weights; the outputs of every step carry the name."""
        self.weight_version = weight_version

    def get_kv_cache_group_metadata(self) -> list[dict[str, Any]]:
        """Answer how its key-value cache is made up."""
        return [
            {
                "group_idx": 0,
                "kind": "full_attention",
                "block_size": self.ready["block_size"],
                "sliding_window": None,
            }
        ]

    # -- pause and sleep -------------------------------------------------------------------------

    def is_sleeping(self) -> bool:
        """Answer whether it is paused, or some of its memory is gone."""
        # Benchmarks ask this; the shorter the engine's part of a call, the more they tell.
        return self.scheduler.pause is not Pause.NOT or bool(self.workers[0].asleep)

    def is_scheduler_paused(self) -> bool:
        """Answer whether the scheduler is paused, in whatever way."""
        return self.scheduler.pause is not Pause.NOT

    def pause_scheduler(self, mode: str = "abort", clear_cache: bool = True) -> Deferred | None:
        """Pause; answer once nothing runs any more."""
        return self._pause(mode, lambda: self._finish_pause(clear_cache))

    def resume_scheduler(self) -> None:
        """Go on."""
        if self.member is not None:
            if self.member.may_resume():
                self.scheduler.pause = Pause.NOT
                self.member.resume()
            return
        if self.lockstep and self.is_scheduler_paused() and self.scheduler.has_work:
            raise RuntimeError(
                "resume_scheduler called while pause is still in flight. Wait for the pause future "
                "to resolve before resuming."
            )
        self.scheduler.pause = Pause.NOT

    def sleep(self, level: int = 1, mode: str = "abort") -> Deferred | None:
        """Pause, and beyond level 0 give up memory."""
        deep = level >= 1

        def fall_asleep() -> None:
            self._finish_pause(clear_cache=deep)
            if deep and "weights" not in self._asleep:
                self._on_workers("sleep", level)

        return self._pause(mode, fall_asleep)

    def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """Get memory back; answer whether all of it is there, and the scheduler goes on."""
        if tags is not None and "scheduling" in tags:
            tags = [tag for tag in tags if tag != "scheduling"]
            wakes = bool(tags)
        else:
            wakes = True
        # vLLM only logs a warning about a tag that is not asleep, and wakes nothing.
        if wakes and self._asleep and (not tags or self._asleep.issuperset(tags)):
            self._on_workers("wake_up", tags or None)
        awake = not self._asleep
        if awake:
            self.resume_scheduler()
        return awake

    def release_kv_cache_memory(self) -> None:
        """Give up the key-value cache's memory; needs a pause that is complete."""
        if not self.is_scheduler_paused() or self.scheduler.has_work:
            raise RuntimeError("release_kv_cache_memory() requires a completed pause first")
        if self._asleep:
            raise RuntimeError(
                "release_kv_cache_memory() requires all executor memory to be resident"
            )
        self._reset_caches()
        self._on_workers("discard", ["kv_cache"])

    @property
    def _asleep(self) -> set[str]:
        return self.workers[0].asleep

    def _pause(self, mode: str, finish: Callable[[], None]) -> Deferred | None:
        if mode not in ("abort", "wait", "keep"):
            raise ValueError(f"Invalid pause mode: {mode}")
        if mode == "abort":
            self.end_requests()
        self.scheduler.pause = Pause.ALL if mode == "keep" else Pause.NEW
        if self.member is not None:
            self.member.pause()
        elif not self.scheduler.has_work:
            finish()
            return None
        deferred = Deferred()
        self.scheduler.when_idle(lambda: deferred.settle(finish))
        return deferred

    def _finish_pause(self, clear_cache: bool) -> None:
        self._on_workers("synchronize_device")
        if clear_cache:
            self._reset_caches()

    def _reset_caches(self) -> None:
        if not self.reset_prefix_cache(True, True):
            raise RuntimeError("Failed to reset the KV connector cache.")
        self.reset_mm_cache()
        self.reset_encoder_cache()

    # -- caches ----------------------------------------------------------------------------------

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget prompts; answer False while running requests hold blocks."""
        if reset_running_requests:
            self.scheduler.preempt()
        if self.scheduler.running:
            return False
        self.scheduler.cache.clear()
        return not (reset_connector and self.options.connector_fails)

    def reset_mm_cache(self) -> None:
        """Forget multimodal inputs."""
        self._on_workers("reset_mm_cache")

    def reset_encoder_cache(self) -> None:
        """Forget encoder outputs."""
        self._on_workers("reset_encoder_cache")

    # -- LoRA --------------------------------------------------------------------------------------

    def add_lora(self, lora_request: Sequence[Any]) -> bool:
        """Load an adapter."""
        return all(self._on_workers("add_lora", read_adapter(lora_request)))

    def remove_lora(self, lora_id: int) -> bool:
        """Unload an adapter; answer whether it was there."""
        return all(self._on_workers("remove_lora", _checked_id(lora_id)))

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter from being evicted."""
        return all(self._on_workers("pin_lora", _checked_id(lora_id)))

    def list_loras(self) -> set[int]:
        """Answer the ids of the adapters that all workers hold."""
        held: list[set[int]] = self._on_workers("list_loras")
        if any(ids != held[0] for ids in held):
            raise AssertionError("All workers should have the same LORAs.")
        return held[0]

    # -- workers ---------------------------------------------------------------------------------

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a worker's method on every worker; answer their results."""
        failing, self.failing_worker = self.failing_worker, None
        return call_workers(self.workers, method, args, kwargs, failing=failing)

    def compute_weight_checksums(self) -> list[dict[str, str]]:
        """Answer each worker's checksums."""
        return self._on_workers("compute_weight_checksums")

    def profile(
        self,
        is_start: bool = True,
        profile_prefix: str | None = None,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> None:
        """Start or stop the profiler."""
        self._on_workers("profile", is_start, profile_prefix, delay_iterations, max_iterations)

    def save_sharded_state(
        self, path: str, pattern: str | None = None, max_size: int | None = None
    ) -> None:
        """Have the workers write their weights; nothing is written."""
        self._on_workers("save_sharded_state", path, pattern, max_size)

    def execute_dummy_batch(self) -> None:
        """Make a step without requests."""
        if self.member is not None:
            self.member.meet("batch")
        self._on_workers("execute_dummy_batch")

    def _on_workers(self, method: str, *args: Any) -> list[Any]:
        return self.collective_rpc(method, None, args)

    # -- members of a lockstep group only ------------------------------------------------------

    def barrier(self) -> None:
        """Wait for the other members."""
        if self.member is not None:
            self.member.meet("barrier")

    def reinitialize_distributed(self, reconfig_request: Any) -> str:
        """Begin a change of the group's size."""
        if self._reconfiguring:
            raise RuntimeError("Elastic EP reconfiguration is already active")
        self._reconfiguring = True
        return "prepared"

    def commit_prepared_elastic_ep(self) -> None:
        """Finish a change of the group's size."""
        if not self._reconfiguring:
            raise RuntimeError("No prepared Elastic EP reconfiguration is ready")
        self._reconfiguring = False


def _checked_id(lora_id: int) -> int:
    if not lora_id > 0:
        raise AssertionError("lora_id must be greater than 0.")
    return lora_id


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
