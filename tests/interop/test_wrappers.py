"""Every typed wrapper, called on two real engines: its result, or the engines' failure text."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from engine_client import EngineClient, LoraRequest, Outcomes, RemoteError, UtilityCallError
from engine_client.utilities import UtilityMethods
from tests.interop.engines import EngineGroup

Call = Callable[[EngineClient, EngineGroup], object]


@dataclass(frozen=True, slots=True)
class Case:
    """A call of a wrapper and what comes of it on both engines."""

    wrapper: str
    shown: str
    """The arguments, for the table."""
    call: Call
    gives: Callable[[Any], bool] | None = None
    """Whether the result is right; None where both engines fail."""
    fails: str = ""
    """A pattern of the whole text with which both engines fail."""
    before: Call | None = None

    @property
    def name(self) -> str:
        """For the test's id."""
        return f"{self.wrapper}({self.shown})"


def _is(expected: object) -> Callable[[Any], bool]:
    return lambda value: value == expected and type(value) is type(expected)


def _loaded(client: EngineClient, group: EngineGroup) -> LoraRequest:
    lora = LoraRequest("alpha", 1, group.adapter("alpha"))
    client.add_lora(lora)
    return lora


def _saved(client: EngineClient, group: EngineGroup) -> list[str]:
    folder = group.folder / "sharded"
    folder.mkdir()
    client.save_sharded_state(folder.name)
    return [path.name for path in folder.iterdir()]


def _named_group(value: Outcomes) -> bool:
    return value.unwrap() == [
        [{"group_idx": 0, "kind": "full_attention", "block_size": 128, "sliding_window": None}]
    ] * len(value)


def _checksums(value: list[dict[str, str]]) -> bool:
    names = [{name.split(":", 1)[1] for name in checksums} for checksums in value]
    return len(value) == 2 and names[0] == names[1] and all(value)


def _no_attribute(method: str) -> str:
    return re.escape(
        f"Call to {method} method failed: 'EngineCoreProc' object has no attribute '{method}'"
    )


NO_TRANSFER = re.escape(
    "Call to collective_rpc method failed: Weight transfer not configured. "
    "Please set weight_transfer_config to enable weight transfer."
)
NO_PROFILER = (
    r"Call to profile method failed: Profiling is not enabled\. Please set --profiler-config .*"
)
ASLEEP: Call = lambda client, _: client.sleep(1)  # noqa: E731
PAUSED: Call = lambda client, _: client.pause_scheduler("keep")  # noqa: E731

CASES = [
    # Questions
    Case("is_sleeping", "", lambda c, _: c.is_sleeping(), _is(False)),
    Case("is_sleeping", "paused", lambda c, _: c.is_sleeping(), _is(True), before=PAUSED),
    Case("is_scheduler_paused", "", lambda c, _: c.is_scheduler_paused(), _is(False)),
    Case(
        "is_scheduler_paused",
        "asleep",
        lambda c, _: c.is_scheduler_paused(),
        _is(True),
        before=ASLEEP,
    ),
    Case("get_supported_tasks", "", lambda c, _: c.get_supported_tasks(), _is(["generate"])),
    Case("get_weight_version", "", lambda c, _: c.get_weight_version(), _is("default")),
    Case("compute_weight_checksums", "", lambda c, _: c.compute_weight_checksums(), _checksums),
    Case(
        "get_kv_cache_group_metadata",
        "",
        lambda c, _: c.get_kv_cache_group_metadata(),
        _named_group,
    ),
    # Pause and sleep (the CPU keeps its memory at every level, and says so in the log only)
    Case("pause_scheduler", "", lambda c, _: c.pause_scheduler(), _is(None)),
    Case("pause_scheduler", "wait", lambda c, _: c.pause_scheduler("wait", False), _is(None)),
    Case("pause_scheduler", "keep", lambda c, _: c.pause_scheduler("keep"), _is(None)),
    Case(
        "pause_scheduler",
        "again",
        lambda c, _: c.pause_scheduler("wait"),
        _is(None),
        before=PAUSED,
    ),
    Case("resume_scheduler", "", lambda c, _: c.resume_scheduler(), _is(None), before=PAUSED),
    Case("resume_scheduler", "not paused", lambda c, _: c.resume_scheduler(), _is(None)),
    Case("sleep", "0", lambda c, _: c.sleep(0), _is(None)),
    Case("sleep", "1", lambda c, _: c.sleep(), _is(None)),
    Case("sleep", "2, keep", lambda c, _: c.sleep(2, "keep"), _is(None)),
    Case("wake_up", "not asleep", lambda c, _: c.wake_up(), _is(True)),
    Case("wake_up", "", lambda c, _: c.wake_up(), _is(True), before=ASLEEP),
    Case("wake_up", "weights", lambda c, _: c.wake_up(["weights"]), _is(False), before=ASLEEP),
    Case(
        "wake_up",
        "weights, then kv_cache",
        lambda c, _: c.wake_up(["weights"]) or c.wake_up(["kv_cache"]),
        _is(True),
        before=ASLEEP,
    ),
    Case("wake_up", "unknown tag", lambda c, _: c.wake_up(["bogus"]), _is(True)),
    Case(
        "release_kv_cache_memory",
        "",
        lambda c, _: c.release_kv_cache_memory(),
        fails=re.escape(
            "Call to release_kv_cache_memory method failed: "
            "release_kv_cache_memory() requires a completed pause first"
        ),
    ),
    Case(
        "release_kv_cache_memory",
        "paused",
        lambda c, _: c.release_kv_cache_memory(),
        fails=re.escape(
            "Call to release_kv_cache_memory method failed: "
            "Selective discard is not supported on CPU."
        ),
        before=PAUSED,
    ),
    # Caches
    Case("reset_prefix_cache", "", lambda c, _: c.reset_prefix_cache(), _is(True)),
    Case("reset_prefix_cache", "both", lambda c, _: c.reset_prefix_cache(True, True), _is(True)),
    Case("reset_mm_cache", "", lambda c, _: c.reset_mm_cache(), _is(None)),
    Case("reset_encoder_cache", "", lambda c, _: c.reset_encoder_cache(), _is(None)),
    # Adapters
    Case("list_loras", "", lambda c, _: c.list_loras(), _is(frozenset())),
    Case("list_loras", "one", lambda c, _: c.list_loras(), _is(frozenset({1})), before=_loaded),
    Case("add_lora", "", _loaded, lambda lora: isinstance(lora, LoraRequest)),
    Case(
        "add_lora",
        "again",
        lambda c, g: c.add_lora(LoraRequest("other", 1, "/nonexistent")),
        _is(None),
        before=_loaded,
    ),
    Case(
        "add_lora",
        "in place",
        lambda c, g: c.add_lora(LoraRequest("alpha", 1, g.adapter("beta"), load_inplace=True)),
        _is(None),
        before=_loaded,
    ),
    Case(
        "add_lora",
        "no such path",
        lambda c, _: c.add_lora(LoraRequest("none", 4, "/nonexistent")),
        fails=re.escape(
            "Call to add_lora method failed: "
            "Loading lora none failed: No adapter found for /nonexistent"
        ),
    ),
    Case(
        "add_lora",
        "rank too large",
        lambda c, g: c.add_lora(LoraRequest("wide", 5, g.adapter("wide", rank=128))),
        fails=r"Call to add_lora method failed: "
        r"LoRA rank 128 is greater than max_lora_rank (64|16)\.",
    ),
    Case("pin_lora", "", lambda c, _: c.pin_lora(1), _is(None), before=_loaded),
    Case(
        "pin_lora",
        "unknown",
        lambda c, _: c.pin_lora(9),
        fails=re.escape(
            "Call to pin_lora method failed: Pinning failed. LoRA 9 is not registered."
        ),
    ),
    Case("remove_lora", "", lambda c, _: c.remove_lora(1), _is(True), before=_loaded),
    Case("remove_lora", "unknown", lambda c, _: c.remove_lora(9), _is(False)),
    # Profiling and weights
    Case("start_profile", "", lambda c, _: c.start_profile(), fails=NO_PROFILER),
    Case("stop_profile", "", lambda c, _: c.stop_profile(), fails=NO_PROFILER),
    Case("set_weight_version", "", lambda c, _: c.set_weight_version("v2"), _is(None)),
    Case(
        "get_weight_version",
        "set before",
        lambda c, _: c.get_weight_version(),
        _is("v2"),
        before=lambda c, _: c.set_weight_version("v2"),
    ),
    Case(
        "save_sharded_state",
        "",
        _saved,
        _is(["model-rank-0-part-0.safetensors"]),
    ),
    Case(
        "save_sharded_state",
        "no such folder",
        lambda c, _: c.save_sharded_state("/nonexistent"),
        fails=r"Call to save_sharded_state method failed: Error while serializing: I/O error: "
        r"No such file or directory \(os error 2\) at path .*",
    ),
    Case("execute_dummy_batch", "", lambda c, _: c.execute_dummy_batch(), _is(None)),
    # Only a lockstep group has these
    Case("barrier", "", lambda c, _: c.barrier(), fails=_no_attribute("barrier")),
    Case(
        "reinitialize_distributed",
        "",
        lambda c, _: c.reinitialize_distributed({}),
        fails=_no_attribute("reinitialize_distributed"),
    ),
    Case(
        "commit_prepared_elastic_ep",
        "",
        lambda c, _: c.commit_prepared_elastic_ep(),
        fails=_no_attribute("commit_prepared_elastic_ep"),
    ),
    # Worker methods
    Case(
        "collective_rpc",
        "check_health",
        lambda c, _: c.collective_rpc("check_health"),
        _is([None] * 2),
    ),
    Case(
        "collective_rpc",
        "with arguments and limit",
        lambda c, _: c.collective_rpc("check_health", [], {}, worker_timeout=5),
        _is([None] * 2),
    ),
    Case(
        "collective_rpc",
        "unknown",
        lambda c, _: c.collective_rpc("no_such_method"),
        fails=re.escape(
            "Call to collective_rpc method failed: Method 'no_such_method' is not implemented."
        ),
    ),
    Case(
        "init_weight_transfer_engine",
        "",
        lambda c, _: c.init_weight_transfer_engine({"master_port": 1}),
        fails=NO_TRANSFER,
    ),
    Case("start_weight_update", "", lambda c, _: c.start_weight_update(), fails=NO_TRANSFER),
    Case(
        "start_draft_weight_update",
        "",
        lambda c, _: c.start_draft_weight_update(),
        fails=NO_TRANSFER,
    ),
    Case("update_weights", "", lambda c, _: c.update_weights({"names": []}), fails=NO_TRANSFER),
    Case("finish_weight_update", "", lambda c, _: c.finish_weight_update(), fails=NO_TRANSFER),
    Case(
        "shutdown_weight_transfer_engine",
        "",
        lambda c, _: c.shutdown_weight_transfer_engine(),
        _is([None] * 2),
    ),
    Case("checkpoint_prepare", "", lambda c, _: c.checkpoint_prepare(), _is([None] * 2)),
    Case("checkpoint_restore", "", lambda c, _: c.checkpoint_restore(), _is([None] * 2)),
]


def test_every_wrapper_is_called_here() -> None:
    """A wrapper that is added without a case is noticed."""
    wrappers = {name for name in vars(UtilityMethods) if not name.startswith("_")}
    assert {case.wrapper for case in CASES} == wrappers


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_wrapper(
    client: EngineClient, group: EngineGroup, wrapper_table: dict[int, tuple[str, ...]], case: Case
) -> None:
    """The wrapper gives what its documentation says, or both engines' failure."""
    if case.before is not None:
        case.before(client, group)
    value: object = None
    error: UtilityCallError | None = None
    start = time.monotonic()
    try:
        value = case.call(client, group)
    except UtilityCallError as raised:
        error = raised
    elapsed = time.monotonic() - start
    if error is None:
        assert case.gives is not None, f"no failure but {value!r}"
        assert case.gives(value), value
        shown = str(value) if isinstance(value, Outcomes) else repr(value)
    else:
        assert case.gives is None, error
        assert error.outcomes is not None
        failures = error.outcomes.failures
        assert list(failures) == [0, 1]
        for failure in failures.values():
            assert isinstance(failure, RemoteError)
            assert re.fullmatch(case.fails, failure.message, re.DOTALL), failure.message
        shown = f"both fail: {failures[0]}"
    wrapper_table[CASES.index(case)] = case.wrapper, case.shown, shown, f"{elapsed * 1e3:.1f} ms"
