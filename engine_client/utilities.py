"""Typed wrappers: one method for each utility method of a vLLM 0.32 engine.

Each fans out as :meth:`EngineClient.call_utility` does and combines the engines' results by the
rule that its docstring names:

* consensus: all engines must give the same answer, else ``ConsensusError``;
* all must succeed: a False is that engine's failure (``RefusedError``);
* and: True when every engine answered True;
* concatenation: the lists of the engines, one after another, in target order;
* nothing: None.

All take ``timeout=`` and ``engines=`` as :meth:`EngineClient.call_utility` does.  Those that change
something take ``compensate=``: a ``UtilityCall`` that undoes the change where it may have been made
when an engine fails, or True for the natural inverse where there is one.  What is said about real
engines was observed with vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

from engine_client import _render
from engine_client.compensation import check_undo
from engine_client.config import check_count
from engine_client.deadline import USE_DEFAULT, Timeout, parse_timeout
from engine_client.engines import Targets
from engine_client.errors import RefusedError
from engine_client.fanout import check_method
from engine_client.lora import LoraRequest, check_lora_id
from engine_client.outcome import Failed, Ok, Outcomes, UtilityCall
from engine_client.sampling import is_list

__all__ = ["Compensate", "PauseMode", "UtilityMethods"]

PauseMode = Literal["abort", "wait", "keep"]
Compensate = UtilityCall | bool | None
"""What undoes a change: a call, True for the natural inverse, None or False for nothing."""


class _Caller(Protocol):
    def settle_utility(
        self, method: str, *args: Any, timeout: Timeout = ..., engines: Targets = ...
    ) -> Outcomes: ...

    def _unwrap(
        self, outcomes: Outcomes, undo_call: UtilityCall | None, timeout: Timeout
    ) -> list[Any]: ...


def _change(
    client: _Caller,
    method: str,
    args: Sequence[Any],
    timeout: Timeout,
    engines: Targets,
    compensate: Compensate,
    *,
    inverse: UtilityCall | None = None,
    refusable: bool = False,
) -> list[Any]:
    """Call a method that changes something; the results in target order."""
    __tracebackhide__ = True
    undo_call = _resolve_undo(method, compensate, inverse)
    outcomes = client.settle_utility(method, *args, timeout=timeout, engines=engines)
    if refusable:
        outcomes = _refuse_false(outcomes)
    return client._unwrap(outcomes, undo_call, timeout)


def _resolve_undo(
    method: str, compensate: object, inverse: UtilityCall | None
) -> UtilityCall | None:
    if compensate is None or compensate is False:
        return None
    if compensate is True:
        if inverse is None:
            raise ValueError(
                f"{method} has no natural inverse: give compensate=UtilityCall(...) with the call "
                f"that undoes it"
            )
        return inverse
    return check_undo(compensate)


def _refuse_false(outcomes: Outcomes) -> Outcomes:
    """Make a failure of every answer but True."""
    return Outcomes(
        outcomes.method,
        {
            index: Failed(
                RefusedError(
                    f"engine {index} answered {_render.one_line(outcome.value, 40)}: not done",
                    engine=index,
                ),
                outcome.elapsed,
            )
            if isinstance(outcome, Ok) and outcome.value is not True
            else outcome
            for index, outcome in outcomes.items()
        },
    )


def _each(outcomes: Outcomes, change: Callable[[Any], Any]) -> Outcomes:
    """The same outcomes, with the values changed."""
    return Outcomes(
        outcomes.method,
        {
            index: Ok(change(outcome.value), outcome.elapsed)
            if isinstance(outcome, Ok)
            else outcome
            for index, outcome in outcomes.items()
        },
    )


def _all_true(values: Sequence[Any]) -> bool:
    # None: engines before 0.32 answered nothing where newer ones answer True.
    return all(value is None or bool(value) for value in values)


def _concatenate(values: Sequence[Any]) -> list[Any]:
    results: list[Any] = []
    for value in values:
        results += value if isinstance(value, list) else [value]
    return results


def _check_kind(
    name: str, value: object, kind: type, wanted: str, *, optional: bool = False
) -> None:
    """Refuse what a method of an engine does not take; it may fail when half of it is done."""
    if not (isinstance(value, kind) or (optional and value is None)):
        or_none = " or None" if optional else ""
        raise TypeError(f"{name} must be {wanted}{or_none}, not {_render.shown(value)}")


def _flag(name: str, value: object) -> bool:
    """True or False, or 1 or 0; a word is none: "no" would be true."""
    if not isinstance(value, int) or value not in (0, 1):
        raise TypeError(f"{name} must be True or False, not {_render.shown(value)}")
    return bool(value)


def _sorted_tasks(tasks: object) -> list[Any]:
    return sorted(tasks, key=str) if isinstance(tasks, list) else []


def _size(name: str, value: object) -> int | None:
    return None if value is None else check_count(name, value, least=0, most=2**63 - 1)


def _check_mode(mode: object) -> None:
    if mode not in ("abort", "wait", "keep"):
        raise ValueError(f"mode must be 'abort', 'wait' or 'keep', not {_render.shown(mode)}")


class UtilityMethods:
    """The typed wrappers, for :class:`EngineClient` to inherit."""

    # -- questions --------------------------------------------------------------------------------

    def is_sleeping(
        self: _Caller, *, timeout: Timeout = USE_DEFAULT, engines: Targets = None
    ) -> bool:
        """Whether the engines sleep, or their schedulers are paused in any mode (consensus).

        Raises:
            ConsensusError: some do and some do not.
        """
        outcomes = self.settle_utility("is_sleeping", timeout=timeout, engines=engines)
        return bool(outcomes.agreed())

    def is_scheduler_paused(
        self: _Caller, *, timeout: Timeout = USE_DEFAULT, engines: Targets = None
    ) -> bool:
        """Whether the schedulers are paused (consensus).

        Raises:
            ConsensusError: some are and some are not.
        """
        outcomes = self.settle_utility("is_scheduler_paused", timeout=timeout, engines=engines)
        return bool(outcomes.agreed())

    def get_supported_tasks(
        self: _Caller, *, timeout: Timeout = USE_DEFAULT, engines: Targets = None
    ) -> list[str]:
        """What the model can do, for example ``["generate"]``, sorted (consensus)."""
        outcomes = self.settle_utility("get_supported_tasks", timeout=timeout, engines=engines)
        # An engine lists a set of strings, whose order is another in each process.
        return list(_each(outcomes, _sorted_tasks).agreed())

    def get_weight_version(
        self: _Caller, *, timeout: Timeout = USE_DEFAULT, engines: Targets = None
    ) -> str | None:
        """The version that :meth:`set_weight_version` set, ``"default"`` before (consensus)."""
        outcomes = self.settle_utility("get_weight_version", timeout=timeout, engines=engines)
        version: str | None = outcomes.agreed()
        return version

    def list_loras(
        self: _Caller, *, timeout: Timeout = USE_DEFAULT, engines: Targets = None
    ) -> frozenset[int]:
        """The ids of the adapters that every engine holds (consensus).

        Raises:
            ConsensusError: the engines hold different ones; ``outcomes`` has each engine's.
        """
        outcomes = self.settle_utility("list_loras", timeout=timeout, engines=engines)
        loras: frozenset[int] = _each(outcomes, lambda held: frozenset(held or ())).agreed()
        return loras

    def compute_weight_checksums(
        self: _Caller, *, timeout: Timeout = USE_DEFAULT, engines: Targets = None
    ) -> list[Any]:
        """A map from parameter name to checksum for each worker (concatenation)."""
        outcomes = self.settle_utility("compute_weight_checksums", timeout=timeout, engines=engines)
        return _concatenate(outcomes.unwrap())

    def get_kv_cache_group_metadata(
        self: _Caller, *, timeout: Timeout = USE_DEFAULT, engines: Targets = None
    ) -> Outcomes:
        """Each engine's key-value cache groups: maps with ``group_idx``, ``kind``,
        ``block_size`` and ``sliding_window``.

        Returns:
            Every engine's outcome; all succeeded.
        """
        outcomes = self.settle_utility(
            "get_kv_cache_group_metadata", timeout=timeout, engines=engines
        )
        outcomes.unwrap()
        return outcomes

    # -- pause and sleep ----------------------------------------------------------------------

    def pause_scheduler(
        self: _Caller,
        mode: PauseMode = "abort",
        clear_cache: bool = True,
        *,
        timeout: Timeout = USE_DEFAULT,
        engines: Targets = None,
        compensate: Compensate = None,
    ) -> None:
        """Stop scheduling; requests that come meanwhile are queued, not refused.

        An engine answers when it is idle, so other replies overtake this one's.  Its caches are
        cleared after it has paused: if that fails the call fails, and the engine stays paused all
        the same.

        Args:
            mode: ``"abort"`` ends running requests, ``"wait"`` lets them end, ``"keep"`` freezes
                them until :meth:`resume_scheduler`.
            clear_cache: clear the prefix, multimodal and encoder caches.
            timeout: as for :meth:`EngineClient.call_utility`.
            engines: likewise.  A lockstep group must be paused as a whole.
            compensate: True: ``resume_scheduler``.
        """
        _check_mode(mode)
        _change(
            self,
            "pause_scheduler",
            (mode, _flag("clear_cache", clear_cache)),
            timeout,
            engines,
            compensate,
            inverse=UtilityCall("resume_scheduler"),
        )

    def resume_scheduler(
        self: _Caller,
        *,
        timeout: Timeout = USE_DEFAULT,
        engines: Targets = None,
        compensate: Compensate = None,
    ) -> None:
        """Schedule again; nothing happens on an engine that is not paused.

        Args:
            timeout: as for :meth:`EngineClient.call_utility`.
            engines: likewise.  A lockstep group must be resumed as a whole.
            compensate: True: ``pause_scheduler("keep", False)``, which freezes what runs.
        """
        _change(
            self,
            "resume_scheduler",
            (),
            timeout,
            engines,
            compensate,
            inverse=UtilityCall("pause_scheduler", ("keep", False)),
        )

    def sleep(
        self: _Caller,
        level: int = 1,
        mode: PauseMode = "abort",
        *,
        timeout: Timeout = USE_DEFAULT,
        engines: Targets = None,
        compensate: Compensate = None,
    ) -> None:
        """Pause, and free memory.

        A failure may come after the pause took effect; the engine then stays paused.

        Args:
            level: 0 pauses only, 1 moves the weights to the host's memory, 2 discards them.
            mode: as for :meth:`pause_scheduler`.
            timeout: as for :meth:`EngineClient.call_utility`.
            engines: likewise.  A lockstep group must be put to sleep as a whole.
            compensate: True: ``wake_up``.
        """
        check_count("level", level, least=0, most=2)
        _check_mode(mode)
        _change(
            self,
            "sleep",
            (level, mode),
            timeout,
            engines,
            compensate,
            inverse=UtilityCall("wake_up"),
        )

    def wake_up(
        self: _Caller,
        tags: Sequence[str] | None = None,
        *,
        timeout: Timeout = USE_DEFAULT,
        engines: Targets = None,
        compensate: Compensate = None,
    ) -> bool:
        """Bring memory back, and schedule again once all of it is there (and).

        Args:
            tags: what to wake: ``"weights"``, ``"kv_cache"``, ``"scheduling"``; None for all.
            timeout: as for :meth:`EngineClient.call_utility`.
            engines: likewise.
            compensate: a call; there is no natural inverse.

        Returns:
            Whether every engine is fully awake.  Engines before 0.32 do not tell and count as
            awake.
        """
        given: Any = tags
        if given is not None and (
            not is_list(given) or not all(isinstance(tag, str) for tag in given)
        ):
            value = _render.shown(tags)
            hint = f"; did you mean [{value}]?" if isinstance(tags, str) else ""
            raise TypeError(f"tags must be a sequence of strings or None, not {value}{hint}")
        arguments = (None if tags is None else list(tags),)
        return _all_true(_change(self, "wake_up", arguments, timeout, engines, compensate))

    def release_kv_cache_memory(
        self: _Caller,
        *,
        timeout: Timeout = USE_DEFAULT,
        engines: Targets = None,
        compensate: Compensate = None,
    ) -> None:
        """Free the key-value cache's memory of engines that are paused; ``wake_up`` brings it back.

        Fails on an engine whose pause is not complete.
        """
        _change(self, "release_kv_cache_memory", (), timeout, engines, compensate)

    # -- caches ---------------------------------------------------------------------------------

    def reset_prefix_cache(
        self: _Caller,
        reset_running_requests: bool = False,
        reset_connector: bool = False,
        *,
        timeout: Timeout = USE_DEFAULT,
        engines: Targets = None,
        compensate: Compensate = None,
    ) -> bool:
        """Forget cached prefixes (and).

        Args:
            reset_running_requests: preempt running requests, which hold blocks otherwise.
            reset_connector: also reset an external cache.
            timeout: as for :meth:`EngineClient.call_utility`.
            engines: likewise.
            compensate: a call; there is no natural inverse.

        Returns:
            True when every engine did; False where blocks are in use.
        """
        arguments = (
            _flag("reset_running_requests", reset_running_requests),
            _flag("reset_connector", reset_connector),
        )
        return _all_true(
            _change(self, "reset_prefix_cache", arguments, timeout, engines, compensate)
        )

    def reset_mm_cache(
        self: _Caller,
        *,
        timeout: Timeout = USE_DEFAULT,
        engines: Targets = None,
        compensate: Compensate = None,
    ) -> None:
        """Forget cached multimodal inputs."""
        _change(self, "reset_mm_cache", (), timeout, engines, compensate)

    def reset_encoder_cache(
        self: _Caller,
        *,
        timeout: Timeout = USE_DEFAULT,
        engines: Targets = None,
        compensate: Compensate = None,
    ) -> None:
        """Forget cached encoder outputs."""
        _change(self, "reset_encoder_cache", (), timeout, engines, compensate)

    # -- LoRA adapters ----------------------------------------------------------------------------

    def add_lora(
        self: _Caller,
        lora: LoraRequest,
        *,
        timeout: Timeout = USE_DEFAULT,
        engines: Targets = None,
        compensate: Compensate = None,
    ) -> None:
        """Load an adapter (all must succeed).

        An engine that knows the id answers True and loads nothing, whatever the path, unless
        ``load_inplace`` is set.  Beyond its ``max_cpu_loras`` an engine silently evicts the adapter
        that was used longest ago.  A load that fails leaves the engine's other adapters untouched.

        Args:
            lora: the adapter.
            timeout: as for :meth:`EngineClient.call_utility`.
            engines: likewise.
            compensate: True: ``remove_lora`` of its id, so that after a failure no engine holds it.
                Not with ``load_inplace``: weights that were replaced cannot be brought back.
        """
        _check_kind("lora", lora, LoraRequest, "a LoraRequest")
        inverse = None if lora.load_inplace else UtilityCall("remove_lora", (lora.lora_int_id,))
        _change(
            self,
            "add_lora",
            (lora.to_plain(),),
            timeout,
            engines,
            compensate,
            inverse=inverse,
            refusable=True,
        )

    def remove_lora(
        self: _Caller,
        lora_int_id: int,
        *,
        timeout: Timeout = USE_DEFAULT,
        engines: Targets = None,
        compensate: Compensate = None,
    ) -> bool:
        """Unload an adapter (and).

        Returns:
            True when every engine held it.  False is no failure: an engine did not have it, so it
            is gone everywhere either way.
        """
        arguments = (check_lora_id(lora_int_id),)
        return _all_true(_change(self, "remove_lora", arguments, timeout, engines, compensate))

    def pin_lora(
        self: _Caller,
        lora_int_id: int,
        *,
        timeout: Timeout = USE_DEFAULT,
        engines: Targets = None,
        compensate: Compensate = None,
    ) -> None:
        """Keep a loaded adapter from being evicted (all must succeed).

        An engine that does not hold it reports a failure.
        """
        arguments = (check_lora_id(lora_int_id),)
        _change(self, "pin_lora", arguments, timeout, engines, compensate, refusable=True)

    # -- profiling, weights, the rest -------------------------------------------------------------

    def start_profile(
        self: _Caller,
        prefix: str | None = None,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
        *,
        timeout: Timeout = USE_DEFAULT,
        engines: Targets = None,
        compensate: Compensate = None,
    ) -> None:
        """Start the profiler; fails on an engine that was started without one.

        Args:
            prefix: of the trace files' names.
            delay_iterations: steps to skip first.
            max_iterations: steps after which it stops by itself.
            timeout: as for :meth:`EngineClient.call_utility`.
            engines: likewise.
            compensate: True: stop it.
        """
        _check_kind("prefix", prefix, str, "a string", optional=True)
        delay_iterations = _size("delay_iterations", delay_iterations)
        max_iterations = _size("max_iterations", max_iterations)
        arguments = (True, prefix, delay_iterations, max_iterations)
        _change(
            self,
            "profile",
            arguments,
            timeout,
            engines,
            compensate,
            inverse=UtilityCall("profile", (False,)),
        )

    def stop_profile(
        self: _Caller,
        *,
        timeout: Timeout = USE_DEFAULT,
        engines: Targets = None,
        compensate: Compensate = None,
    ) -> None:
        """Stop the profiler and write its traces."""
        _change(self, "profile", (False,), timeout, engines, compensate)

    def set_weight_version(
        self: _Caller,
        version: str,
        *,
        timeout: Timeout = USE_DEFAULT,
        engines: Targets = None,
        compensate: Compensate = None,
    ) -> None:
        """Name the weights; every output of a step carries the name from then on."""
        _check_kind("version", version, str, "a string")
        _change(self, "set_weight_version", (version,), timeout, engines, compensate)

    def save_sharded_state(
        self: _Caller,
        path: str,
        pattern: str | None = None,
        max_size: int | None = None,
        *,
        timeout: Timeout = USE_DEFAULT,
        engines: Targets = None,
        compensate: Compensate = None,
    ) -> None:
        """Have the workers write their weights into a directory that they can reach.

        Args:
            path: the directory.
            pattern: of the files' names.
            max_size: bytes of one file.
            timeout: as for :meth:`EngineClient.call_utility`.
            engines: likewise.
            compensate: a call; there is no natural inverse.
        """
        _check_kind("path", path, str, "a string")
        _check_kind("pattern", pattern, str, "a string", optional=True)
        max_size = _size("max_size", max_size)
        arguments = (path, pattern, max_size)
        _change(self, "save_sharded_state", arguments, timeout, engines, compensate)

    def execute_dummy_batch(
        self: _Caller, *, timeout: Timeout = USE_DEFAULT, engines: Targets = None
    ) -> None:
        """Run one step without requests.

        A member of a lockstep group answers when all members do it, so it must go to all.
        """
        self.settle_utility("execute_dummy_batch", timeout=timeout, engines=engines).unwrap()

    def barrier(self: _Caller, *, timeout: Timeout = USE_DEFAULT, engines: Targets = None) -> None:
        """Wait until every member of a lockstep group has come here (lockstep groups only)."""
        self.settle_utility("barrier", timeout=timeout, engines=engines).unwrap()

    def reinitialize_distributed(
        self: _Caller,
        request: Any,
        *,
        timeout: Timeout = USE_DEFAULT,
        engines: Targets = None,
        compensate: Compensate = None,
    ) -> None:
        """Begin an elastic change of a lockstep group's size.

        Args:
            request: the fields of vLLM's ReconfigureDistributedRequest, in its order or by name.
            timeout: as for :meth:`EngineClient.call_utility`.
            engines: likewise.
            compensate: a call; there is no natural inverse.
        """
        _change(self, "reinitialize_distributed", (request,), timeout, engines, compensate)

    def commit_prepared_elastic_ep(
        self: _Caller,
        *,
        timeout: Timeout = USE_DEFAULT,
        engines: Targets = None,
        compensate: Compensate = None,
    ) -> None:
        """Finish an elastic change of a lockstep group's size."""
        _change(self, "commit_prepared_elastic_ep", (), timeout, engines, compensate)

    # -- worker methods ---------------------------------------------------------------------------

    def collective_rpc(
        self: _Caller,
        method: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout: Timeout = USE_DEFAULT,
        worker_timeout: float | None = None,
        engines: Targets = None,
    ) -> list[Any]:
        """Run a worker method on every worker of every target engine (concatenation).

        Call only methods with plain results: a vLLM engine that cannot encode a result falls mute.

        Args:
            method: the worker method's name.
            args: its positional arguments.
            kwargs: its keyword arguments.
            timeout: as for :meth:`EngineClient.call_utility`.
            worker_timeout: seconds that each engine gives its workers; None for no limit.
            engines: as for :meth:`EngineClient.call_utility`.

        Returns:
            The workers' results: all of the first engine, then all of the next.
            ``settle_utility("collective_rpc", ...)`` has them per engine.
        """
        return _worker_call(self, method, args, kwargs, timeout, engines, None, worker_timeout)

    def init_weight_transfer_engine(
        self: _Caller,
        init_info: Mapping[str, Any],
        *,
        timeout: Timeout = USE_DEFAULT,
        engines: Targets = None,
        compensate: Compensate = None,
    ) -> list[Any]:
        """Prepare the workers for new weights from a trainer (concatenation).

        Args:
            init_info: what the engines' weight transfer backend needs to connect.
            timeout: as for :meth:`EngineClient.call_utility`.
            engines: likewise.
            compensate: True: ``shutdown_weight_transfer_engine``.
        """
        _check_kind("init_info", init_info, Mapping, "a mapping")
        return _worker_call(
            self,
            "init_weight_transfer_engine",
            (),
            {"init_info": init_info},
            timeout,
            engines,
            compensate,
            inverse=_worker_undo("shutdown_weight_transfer_engine"),
        )

    def start_weight_update(
        self: _Caller,
        *,
        timeout: Timeout = USE_DEFAULT,
        engines: Targets = None,
        compensate: Compensate = None,
    ) -> list[Any]:
        """Begin to replace the weights (concatenation); then update, then finish."""
        return _worker_call(self, "start_weight_update", (), None, timeout, engines, compensate)

    def start_draft_weight_update(
        self: _Caller,
        *,
        timeout: Timeout = USE_DEFAULT,
        engines: Targets = None,
        compensate: Compensate = None,
    ) -> list[Any]:
        """Begin to replace the weights of the draft model (concatenation).

        Only where the registration says ``supports_draft_weight_updates``.
        """
        return _worker_call(
            self, "start_draft_weight_update", (), None, timeout, engines, compensate
        )

    def update_weights(
        self: _Caller,
        update_info: Mapping[str, Any],
        *,
        timeout: Timeout = USE_DEFAULT,
        engines: Targets = None,
        compensate: Compensate = None,
    ) -> list[Any]:
        """Receive weights from the trainer (concatenation).

        Args:
            update_info: what the engines' weight transfer backend needs for this batch.
            timeout: as for :meth:`EngineClient.call_utility`.
            engines: likewise.
            compensate: a call; there is no natural inverse.
        """
        _check_kind("update_info", update_info, Mapping, "a mapping")
        return _worker_call(
            self, "update_weights", (), {"update_info": update_info}, timeout, engines, compensate
        )

    def finish_weight_update(
        self: _Caller,
        *,
        timeout: Timeout = USE_DEFAULT,
        engines: Targets = None,
        compensate: Compensate = None,
    ) -> list[Any]:
        """Put the received weights to use (concatenation)."""
        return _worker_call(self, "finish_weight_update", (), None, timeout, engines, compensate)

    def shutdown_weight_transfer_engine(
        self: _Caller,
        *,
        timeout: Timeout = USE_DEFAULT,
        engines: Targets = None,
        compensate: Compensate = None,
    ) -> list[Any]:
        """End what :meth:`init_weight_transfer_engine` began (concatenation)."""
        return _worker_call(
            self, "shutdown_weight_transfer_engine", (), None, timeout, engines, compensate
        )

    def checkpoint_prepare(
        self: _Caller,
        *,
        timeout: Timeout = USE_DEFAULT,
        engines: Targets = None,
        compensate: Compensate = None,
    ) -> list[Any]:
        """Make the workers ready to be checkpointed (concatenation).

        Args:
            timeout: as for :meth:`EngineClient.call_utility`.
            engines: likewise.
            compensate: True: ``checkpoint_restore``.
        """
        return _worker_call(
            self,
            "checkpoint_prepare",
            (),
            None,
            timeout,
            engines,
            compensate,
            inverse=_worker_undo("checkpoint_restore"),
        )

    def checkpoint_restore(
        self: _Caller,
        *,
        timeout: Timeout = USE_DEFAULT,
        engines: Targets = None,
        compensate: Compensate = None,
    ) -> list[Any]:
        """Let the workers go on after a checkpoint (concatenation)."""
        return _worker_call(self, "checkpoint_restore", (), None, timeout, engines, compensate)


def _worker_call(
    client: _Caller,
    method: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    timeout: Timeout,
    engines: Targets,
    compensate: Compensate,
    worker_timeout: float | None = None,
    *,
    inverse: UtilityCall | None = None,
) -> list[Any]:
    check_method(method)
    if not is_list(args):
        value = _render.shown(args)
        raise TypeError(
            f"args must be a sequence of arguments, not {value}; did you mean args=({value},)?"
        )
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(f"kwargs must be a mapping or None, not {_render.shown(kwargs)}")
    for key in kwargs or ():
        if not isinstance(key, str):
            raise TypeError(f"kwargs must have strings as keys, not {_render.shown(key)}")
    limit = parse_timeout(worker_timeout, name="worker_timeout")
    arguments = (method, limit, list(args), None if kwargs is None else dict(kwargs))
    return _concatenate(
        _change(client, "collective_rpc", arguments, timeout, engines, compensate, inverse=inverse)
    )


def _worker_undo(method: str) -> UtilityCall:
    return UtilityCall("collective_rpc", (method, None, [], None))
