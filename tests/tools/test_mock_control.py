"""The control plane of the reference engine: what a vLLM engine does at each utility call."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine_client.tools.faults import FaultPlan, FaultRule
from engine_client.tools.mock.methods import Deferred, EngineModel
from engine_client.tools.mock.options import EngineOptions
from engine_client.tools.mock_engine import MockEngine
from tests.helpers import EngineProcess, wait_until
from tests.tools.peer import Peer, StartEngine, thread_engine

MANUAL = {"manual_steps": True}


@pytest.fixture
def peer(any_peer: Peer) -> Peer:
    return any_peer


def lora(number: int, path: str = "", **changes: Any) -> list[Any]:
    fields = {
        "name": f"adapter {number}",
        "id": number,
        "path": path or f"/adapters/{number}",
        "base": None,
        "load_inplace": False,
        "is_3d": False,
    }
    return list((fields | changes).values())


def worker_failed(method: str, text: str) -> str:
    return (
        f"Call to {method} method failed: Worker failed with error '{text}', please check the "
        "stack trace above for the root cause"
    )


# -- LoRA ------------------------------------------------------------------------------------------


def test_lora_life(peer: Peer, start: StartEngine) -> None:
    """Adapters are loaded, listed and removed; removing an absent one answers False."""
    start()
    assert peer.call("list_loras") == []
    assert peer.call("add_lora", lora(2)) is True
    assert peer.call("add_lora", ["short", 5, "/p"]) is True
    assert sorted(peer.call("list_loras")) == [2, 5]
    assert peer.call("remove_lora", 2) is True
    assert peer.call("remove_lora", 2) is False
    assert peer.call("list_loras") == [5]
    assert peer.call("collective_rpc", "list_loras") == [[5], [5]]


def test_known_adapter_is_not_loaded_again(peer: Peer, start: StartEngine) -> None:
    """A known id answers True whatever the path, unless it is to be loaded in place."""
    start()
    assert peer.call("add_lora", lora(1)) is True
    assert peer.call("add_lora", lora(1, "/missing")) is True
    text = worker_failed("add_lora", "Loading lora adapter 1 failed: No adapter found for /missing")
    assert peer.failure("add_lora", lora(1, "/missing", load_inplace=True)) == text
    assert peer.call("list_loras") == [1]
    assert peer.call("add_lora", lora(1, "/other", load_inplace=True)) is True
    assert peer.call("list_loras") == [1]


@pytest.mark.parametrize("capacity", [None, 3])
def test_oldest_adapter_is_evicted(peer: Peer, start: StartEngine, capacity: int | None) -> None:
    """Beyond the capacity the adapter used longest ago goes without a word; a pinned one stays."""
    start(ready={"max_loras": 2}, options={"max_cpu_loras": capacity})
    size = capacity or 2
    for number in range(1, size + 1):
        peer.call("add_lora", lora(number))
    peer.call("add_lora", lora(1))  # used again: now 2 is the oldest
    peer.call("add_lora", lora(50))
    assert sorted(peer.call("list_loras")) == [1, *range(3, size + 1), 50]
    assert peer.call("pin_lora", 1) is True
    for number in range(60, 60 + size):
        peer.call("add_lora", lora(number))
    assert sorted(peer.call("list_loras")) == [1, *range(61, 60 + size)]


def test_all_pinned(peer: Peer, start: StartEngine) -> None:
    """When every adapter is pinned there is no room for another, until one is removed."""
    start(ready={"max_loras": 1})
    peer.call("add_lora", lora(1))
    peer.call("pin_lora", 1)
    text = "All items are pinned, cannot remove oldest from the cache."
    assert peer.failure("add_lora", lora(2)) == worker_failed("add_lora", text)
    assert peer.call("list_loras") == [1]
    peer.call("remove_lora", 1)
    assert peer.call("add_lora", lora(2)) is True


def test_removed_adapter_is_not_pinned_any_more(peer: Peer, start: StartEngine) -> None:
    """One that is loaded again can be evicted like any other."""
    start(ready={"max_loras": 1})
    peer.call("add_lora", lora(1))
    peer.call("pin_lora", 1)
    peer.call("remove_lora", 1)
    peer.call("add_lora", lora(1))
    assert peer.call("add_lora", lora(2)) is True
    assert peer.call("list_loras") == [2]


def test_failed_load_leaves_the_others(peer: Peer, start: StartEngine) -> None:
    """An adapter that cannot be loaded evicts nothing."""
    start(ready={"max_loras": 1})
    peer.call("add_lora", lora(1))
    text = "LoRA rank 64 is greater than max_lora_rank 16."
    assert peer.failure("add_lora", lora(2, "/bad_rank")) == worker_failed("add_lora", text)
    assert peer.call("list_loras") == [1]


@pytest.mark.parametrize(
    ("record", "text"),
    [
        (lora(0), "id must be > 0, got 0"),
        (lora(-4), "id must be > 0, got -4"),
        (lora(1, path="")[:2], "lora_path cannot be empty"),
        (["short"], "Expected `array` of at least length 2, got 1"),
        ({"lora_name": "m"}, "Expected `array`, got `object`"),
        (None, "Expected `array`, got `null`"),
        (["a", "1", "/p"], "Expected `int`, got `str` - at `$[1]`"),
        (["a", True, "/p"], "Expected `int`, got `bool` - at `$[1]`"),
        (["a", 1, "/p", 5], "Expected `str | null`, got `int` - at `$[3]`"),
        # The layout of older releases, which had one more position.
        (["a", 1, "/p", None, None, False, False], "Expected `bool`, got `null` - at `$[4]`"),
    ],
)
def test_lora_records(peer: Peer, start: StartEngine, record: Any, text: str) -> None:
    """A record that is none is refused with vLLM's text, and nothing is loaded."""
    start()
    assert peer.failure("add_lora", record) == f"Call to add_lora method failed: {text}"
    assert peer.call("list_loras") == []


def test_lora_ids(peer: Peer, start: StartEngine) -> None:
    """An id below 1 fails; so does pinning what is not there."""
    start()
    for method in ("remove_lora", "pin_lora"):
        text = f"Call to {method} method failed: lora_id must be greater than 0."
        assert peer.failure(method, 0) == text
    text = "Pinning failed. LoRA 77 is not registered."
    assert peer.failure("pin_lora", 77) == worker_failed("pin_lora", text)


def test_without_lora(peer: Peer, start: StartEngine) -> None:
    """An engine that registers without LoRA support has none."""
    start(ready={"supports_lora": False, "max_loras": 0})
    text = "LoRA is not enabled. Use --enable-lora to enable LoRA."
    for call in (("add_lora", lora(1)), ("remove_lora", 1), ("pin_lora", 1), ("list_loras",)):
        assert peer.failure(*call) == worker_failed(call[0], text)


# -- pause, sleep, memory --------------------------------------------------------------------------


def paused(peer: Peer) -> tuple[bool, bool]:
    return peer.call("is_scheduler_paused"), peer.call("is_sleeping")


def pause_with_one_step_left(peer: Peer) -> tuple[int, int]:
    """Ask for a pause that waits, then for the step that it waits for."""
    peer.add("r", [1], options={"max_tokens": 2})
    peer.ask("mock_step")
    peer.outputs()
    peer.reply()
    calls = peer.ask("pause_scheduler", "wait"), peer.ask("mock_step")
    peer.outputs()
    return calls


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_pause_of_an_idle_engine(peer: Peer, start: StartEngine, mode: str) -> None:
    """An idle engine answers at once; it is paused, and counts as sleeping, until it resumes."""
    start()
    assert paused(peer) == (False, False)
    assert peer.call("resume_scheduler") is None
    assert peer.call("pause_scheduler", mode) is None
    assert paused(peer) == (True, True)
    assert peer.call("pause_scheduler", mode, False) is None
    assert peer.call("resume_scheduler") is None
    assert paused(peer) == (False, False)


def test_pause_mode_is_checked(peer: Peer, start: StartEngine) -> None:
    """An unknown mode pauses nothing."""
    start()
    for call in (("pause_scheduler", "bogus"), ("sleep", 1, "bogus")):
        text = f"Call to {call[0]} method failed: Invalid pause mode: bogus"
        assert peer.failure(*call) == text
    assert paused(peer) == (False, False)


def test_pause_aborts(peer: Peer, start: StartEngine) -> None:
    """Mode abort ends all requests, with an output of no tokens each, before it answers."""
    start(options=MANUAL)
    peer.add("first", [1])
    peer.add("second", [2])
    call_id = peer.ask("pause_scheduler")
    message = peer.outputs()
    assert [(one[0], one[1], one[5]) for one in message.outputs] == [
        ("first", [], 2),
        ("second", [], 2),
    ]
    assert message.finished_requests == ("first", "second")
    assert message.weight_version is None
    assert peer.reply() == (call_id, None, None)
    assert paused(peer) == (True, True)


def test_pause_waits(peer: Peer, start: StartEngine) -> None:
    """Mode wait answers when the last running request has ended; other replies overtake it."""
    start(options=MANUAL)
    peer.add("running", [1], options={"max_tokens": 2})
    peer.ask("mock_step")
    assert peer.outputs().outputs[0][0] == "running"
    assert peer.reply()[2] == 1
    peer.add("queued", [1])
    pause = peer.ask("pause_scheduler", "wait")
    peer.add("late", [1])
    assert paused(peer) == (True, True)  # these replies have overtaken it
    step = peer.ask("mock_step")
    (last,) = peer.outputs().outputs
    assert (last[0], last[5]) == ("running", 1)
    assert {peer.reply(), peer.reply()} == {(step, None, 1), (pause, None, None)}
    assert peer.call("mock_step") == 0  # what was queued stays queued
    assert peer.call("resume_scheduler") is None
    peer.ask("mock_step")
    assert [one[0] for one in peer.outputs().outputs] == ["queued", "late"]


def test_pause_keeps(peer: Peer, start: StartEngine) -> None:
    """Mode keep freezes requests and answers at once; they go on where they were."""
    start(options=MANUAL)
    peer.add("frozen", [1], options={"max_tokens": 2})
    peer.ask("mock_step")
    first = peer.outputs().outputs[0][1]
    peer.reply()
    assert peer.call("pause_scheduler", "keep", False) is None
    peer.add("late", [1])
    assert peer.call("mock_step", 5) == 0
    assert peer.call("resume_scheduler") is None
    peer.ask("mock_step")
    outputs = {one[0]: one for one in peer.outputs().outputs}
    assert outputs["frozen"][5] == 1
    assert outputs["frozen"][1] != first
    assert outputs["late"][1] == first


def test_pause_fails_after_it_took_effect(peer: Peer, start: StartEngine) -> None:
    """When the caches cannot be cleared the call fails, and the engine is paused all the same."""
    start(options={"connector_fails": True})
    text = "Call to {} method failed: Failed to reset the KV connector cache."
    assert peer.failure("pause_scheduler") == text.format("pause_scheduler")
    assert paused(peer) == (True, True)
    assert peer.call("resume_scheduler") is None
    assert peer.failure("sleep") == text.format("sleep")
    assert paused(peer) == (True, True)
    assert peer.call("wake_up") is True  # its memory was all there
    assert peer.call("pause_scheduler", "abort", False) is None


def test_deferred_pause_that_fails(peer: Peer, start: StartEngine) -> None:
    """A pause that had to wait reports its failure in the same words."""
    start(options={**MANUAL, "connector_fails": True})
    pause, step = pause_with_one_step_left(peer)
    text = "Call to pause_scheduler method failed: Failed to reset the KV connector cache."
    assert [peer.reply(), peer.reply()] == [(step, None, 1), (pause, text, None)]
    assert paused(peer) == (True, True)


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_and_wake_up(peer: Peer, start: StartEngine, level: int) -> None:
    """Memory comes back by tags; only when all of it is there does the engine go on."""
    start()
    assert peer.call("sleep", level) is None
    assert paused(peer) == (True, True)
    assert peer.call("sleep", level) is None
    assert peer.call("wake_up", ["scheduling"]) is False
    assert peer.call("wake_up", ["weights"]) is False
    assert peer.call("wake_up", ["weights"]) is False  # it is awake already: nothing happens
    assert paused(peer) == (True, True)
    assert peer.call("resume_scheduler") is None
    assert paused(peer) == (False, True)  # the scheduler runs, but memory is missing
    assert peer.call("wake_up", ["kv_cache", "scheduling"]) is True
    assert paused(peer) == (False, False)
    peer.call("sleep", level)
    assert peer.call("wake_up") is True
    assert paused(peer) == (False, False)


def test_sleep_level_0(peer: Peer, start: StartEngine) -> None:
    """Level 0 only pauses."""
    start()
    assert peer.call("sleep", 0) is None
    assert paused(peer) == (True, True)
    assert peer.call("wake_up", ["scheduling"]) is True
    assert paused(peer) == (False, False)


def test_sleep_waits(peer: Peer, start: StartEngine) -> None:
    """Sleep gives up the memory only when the running requests have ended."""
    engine = start(options=MANUAL)
    peer.add("r", [1], options={"max_tokens": 2})
    peer.ask("mock_step")
    peer.outputs()
    peer.reply()
    sleep = peer.ask("sleep", 1, "wait")
    assert peer.call("is_sleeping") is True
    assert engine.model.workers[1].asleep == set()
    step = peer.ask("mock_step")
    peer.outputs()
    assert {peer.reply(), peer.reply()} == {(step, None, 1), (sleep, None, None)}
    assert engine.model.workers[1].asleep == {"weights", "kv_cache"}


def test_release_kv_cache_memory(peer: Peer, start: StartEngine) -> None:
    """It needs a pause that is complete, and memory that is there; wake_up brings it back."""
    start(options=MANUAL)
    method = "release_kv_cache_memory"
    incomplete = f"Call to {method} method failed: {method}() requires a completed pause first"
    assert peer.failure(method) == incomplete
    peer.add("r", [1], options={"max_tokens": 2})
    peer.ask("mock_step")
    peer.outputs()
    peer.reply()
    peer.ask("pause_scheduler", "wait")
    assert peer.failure(method) == incomplete
    peer.ask("mock_step")
    peer.outputs()
    peer.reply()
    peer.reply()
    assert peer.call(method) is None
    assert peer.failure(method) == (
        f"Call to {method} method failed: {method}() requires all executor memory to be resident"
    )
    assert peer.call("wake_up", ["kv_cache"]) is True


# -- caches, versions, the rest --------------------------------------------------------------------


def prefill(peer: Peer, request_id: str, **fields: Any) -> int:
    """Run a request, of 40 tokens; return how many of its tokens the engine knew."""
    prompt = fields.pop("prompt", list(range(40)))
    peer.add(request_id, prompt, options={"max_tokens": 1}, **fields)
    stats = peer.outputs().outputs[0][11]
    assert stats["num_computed_tokens"] + stats["num_cached_tokens"] == len(prompt)
    known: int = stats["num_cached_tokens"]
    return known


def test_prefix_cache(peer: Peer, start: StartEngine) -> None:
    """Whole blocks of a prompt are known the second time, until the cache is reset."""
    start()
    assert prefill(peer, "a") == 0
    assert prefill(peer, "b") == 32
    assert prefill(peer, "salted", cache_salt="salt") == 0
    assert prefill(peer, "exact", prompt=list(range(32))) == 16  # the last token is computed
    assert peer.call("reset_prefix_cache") is True
    assert prefill(peer, "c") == 0
    assert peer.call("pause_scheduler") is None  # clears it too
    assert peer.call("resume_scheduler") is None
    assert prefill(peer, "d") == 0
    assert peer.call("pause_scheduler", "abort", False) is None
    assert peer.call("resume_scheduler") is None
    assert prefill(peer, "e") == 32


def test_prefix_cache_in_use(peer: Peer, start: StartEngine) -> None:
    """While requests run the reset answers False, unless they may be preempted; they go on."""
    start(options=MANUAL)
    peer.add("r", [1], options={"max_tokens": 3})
    peer.ask("mock_step")
    tokens = [*peer.outputs().outputs[0][1]]
    peer.reply()
    assert peer.call("reset_prefix_cache") is False
    assert peer.call("reset_prefix_cache", True) is True
    for _ in range(2):
        peer.ask("mock_step")
        tokens += peer.outputs().outputs[0][1]
        peer.reply()
    peer.add("again", [1], options={"max_tokens": 3})
    again = []
    for _ in range(3):
        peer.ask("mock_step")
        again += peer.outputs().outputs[0][1]
        peer.reply()
    assert again == tokens


def test_preempted_requests_keep_their_places(peer: Peer, start: StartEngine) -> None:
    """They run again before what waited behind them, in their order."""
    start(options=MANUAL, ready={"max_num_seqs": 2})
    for name in ("a", "b", "c"):
        peer.add(name, [1])
    peer.ask("mock_step")
    peer.outputs()
    peer.reply()
    assert peer.call("reset_prefix_cache", True) is True
    peer.ask("mock_step")
    assert [output[0] for output in peer.outputs().outputs] == ["a", "b"]
    peer.reply()


def test_simple_methods(peer: Peer, start: StartEngine) -> None:
    """The rest of the control plane answers as a vLLM engine does."""
    start(options={"supported_tasks": ["generate", "embed"]}, ready={"block_size": 128})
    assert peer.call("get_supported_tasks") == ["generate", "embed"]
    assert peer.call("reset_mm_cache") is None
    assert peer.call("reset_encoder_cache") is None
    assert peer.call("execute_dummy_batch") is None
    assert peer.call("get_weight_version") == "default"
    assert peer.call("set_weight_version", "w2") is None
    assert peer.call("get_weight_version") == "w2"
    metadata = {"group_idx": 0, "kind": "full_attention", "block_size": 128, "sliding_window": None}
    assert peer.call("get_kv_cache_group_metadata") == [metadata]
    first, second = peer.call("compute_weight_checksums")
    assert first.keys() == second.keys()
    assert first != second
    assert peer.call("collective_rpc", "check_health", None, [], {}) == [None, None]


def test_weight_version_is_stamped_on_outputs(peer: Peer, start: StartEngine) -> None:
    """Every output of a step names the weights that it came from."""
    start()
    peer.add("a", [1], options={"max_tokens": 1})
    assert peer.outputs().weight_version == "default"
    peer.call("set_weight_version", "w2")
    peer.add("b", [1], options={"max_tokens": 1})
    assert peer.outputs().weight_version == "w2"


def test_profiler(peer: Peer, start: StartEngine) -> None:
    """Profiling fails on an engine that was started without a profiler."""
    start()
    assert peer.failure("profile", True).startswith(
        "Call to profile method failed: Worker failed with error 'Profiling is not enabled. Please "
        "set --profiler-config to enable profiling."
    )


def test_with_profiler(peer: Peer, start: StartEngine) -> None:
    """With one, it starts and stops."""
    engine = start(options={"profiler": True})
    assert peer.call("profile", True, "prefix", 1, 2) is None
    assert engine.model.workers[1].profiling
    assert peer.call("profile", False) is None
    assert not engine.model.workers[1].profiling


def test_save_sharded_state(peer: Peer, start: StartEngine, tmp_path: Path) -> None:
    """The directory must exist."""
    start()
    assert peer.call("save_sharded_state", str(tmp_path), None, None) is None
    failure = peer.failure("save_sharded_state", str(tmp_path / "none"))
    assert "I/O error: No such file or directory (os error 2)" in failure


# -- weight transfer -------------------------------------------------------------------------------


def rpc(peer: Peer, method: str, **kwargs: Any) -> Any:
    return peer.call("collective_rpc", method, None, [], kwargs)


def rpc_failure(peer: Peer, method: str, **kwargs: Any) -> str:
    return peer.failure("collective_rpc", method, None, [], kwargs)


def test_weight_transfer(peer: Peer, start: StartEngine) -> None:
    """Initialize, start, update, finish: then the weights are others."""
    start(ready={"weight_transfer_backend": "nccl"})
    before = peer.call("compute_weight_checksums")
    assert rpc(peer, "init_weight_transfer_engine", init_info={"port": 1}) == [None, None]
    assert rpc(peer, "start_weight_update") == [None, None]
    assert rpc(peer, "update_weights", update_info={"names": ["w"]}) == [None, None]
    assert peer.call("compute_weight_checksums") == before
    assert rpc(peer, "finish_weight_update") == [None, None]
    assert peer.call("compute_weight_checksums") != before
    assert rpc(peer, "shutdown_weight_transfer_engine") == [None, None]
    assert rpc(peer, "checkpoint_prepare") == [None, None]
    assert rpc(peer, "checkpoint_restore") == [None, None]


def test_weight_transfer_out_of_order(peer: Peer, start: StartEngine) -> None:
    """Each step refuses to come out of its turn."""
    start(ready={"weight_transfer_backend": "nccl"})
    rpc(peer, "init_weight_transfer_engine", init_info={})
    update: dict[str, Any] = {"update_info": {}}
    assert "start_weight_update must be called before update_weights." in rpc_failure(
        peer, "update_weights", **update
    )
    assert "finish_weight_update called without a matching start_weight_update." in rpc_failure(
        peer, "finish_weight_update"
    )
    assert "does not support draft model weight updates" in rpc_failure(
        peer, "start_draft_weight_update"
    )
    rpc(peer, "start_weight_update")
    assert "start_weight_update called while a weight update is already active" in rpc_failure(
        peer, "start_weight_update"
    )
    assert "Cannot release a trainer connection during a weight update" in rpc_failure(
        peer, "shutdown_weight_transfer_engine"
    )
    rpc(peer, "finish_weight_update")
    rpc(peer, "shutdown_weight_transfer_engine")
    rpc(peer, "start_weight_update")
    assert "initialize it first" in rpc_failure(peer, "update_weights", **update)


def test_weight_transfer_without_backend(peer: Peer, start: StartEngine) -> None:
    """An engine that registers without a backend has no weight transfer."""
    start()
    calls: dict[str, dict[str, Any]] = {
        "init_weight_transfer_engine": {"init_info": {}},
        "start_weight_update": {},
        "start_draft_weight_update": {},
        "update_weights": {"update_info": {}},
        "finish_weight_update": {},
    }
    for method, kwargs in calls.items():
        assert "Weight transfer not configured." in rpc_failure(peer, method, **kwargs)


def test_draft_update(peer: Peer, start: StartEngine) -> None:
    """The draft model's weights are not those that the checksums are of."""
    ready = {"weight_transfer_backend": "nccl", "supports_draft_weight_updates": True}
    start(ready=ready)
    before = peer.call("compute_weight_checksums")
    rpc(peer, "init_weight_transfer_engine", init_info={})
    rpc(peer, "start_draft_weight_update")
    rpc(peer, "update_weights", update_info={})
    rpc(peer, "finish_weight_update")
    assert peer.call("compute_weight_checksums") == before


# -- members of a lockstep group -------------------------------------------------------------------


def test_lockstep_methods(peer: Peer, start: StartEngine) -> None:
    """Some methods are there only in members of a lockstep group."""
    start(ready={"data_parallel_size": 2})
    assert peer.call("barrier") is None
    assert "No prepared Elastic EP reconfiguration is ready" in peer.failure(
        "commit_prepared_elastic_ep"
    )
    assert isinstance(peer.call("reinitialize_distributed", [3]), str)
    assert "already active" in peer.failure("reinitialize_distributed", [3])
    assert peer.call("commit_prepared_elastic_ep") is None
    text = "Call to nope method failed: 'DPEngineCoreProc' object has no attribute 'nope'"
    assert peer.failure("nope") == text


def test_resume_during_a_pause(peer: Peer, start: StartEngine) -> None:
    """A member of a lockstep group refuses to go on before it has come to rest."""
    start(options=MANUAL, ready={"data_parallel_size": 2})
    peer.add("r", [1], options={"max_tokens": 2})
    peer.ask("mock_step")
    peer.outputs()
    peer.reply()
    peer.ask("pause_scheduler", "wait")
    assert "resume_scheduler called while pause is still in flight" in peer.failure(
        "resume_scheduler"
    )


def test_methods_of_others(peer: Peer, start: StartEngine) -> None:
    """In others they are unknown, and fault tolerance leaves the engine deaf."""
    start()
    for method in ("barrier", "reinitialize_distributed", "commit_prepared_elastic_ep"):
        text = (
            f"Call to {method} method failed: 'EngineCoreProc' object has no attribute '{method}'"
        )
        assert peer.failure(method) == text
    monitor = peer.disconnections(peer.input)
    peer.ask("handle_fault_tolerance", {"instruction": "retry"})
    monitor.recv_multipart()
    assert peer.hears_nothing()


# -- faults ----------------------------------------------------------------------------------------


def test_one_worker_fails(peer: Peer, start: StartEngine) -> None:
    """The other worker has done it; the engine's own view is then one of disagreement."""
    rule = FaultRule("add_lora", "fail", worker=1, message="out of memory", occurrence=1)
    engine = start(faults=[rule])
    assert peer.failure("add_lora", lora(1)) == worker_failed("add_lora", "out of memory")
    assert [worker.list_loras() for worker in engine.model.workers] == [{1}, set()]
    text = "Call to list_loras method failed: All workers should have the same LORAs."
    assert peer.failure("list_loras") == text
    assert peer.call("add_lora", lora(1)) is True
    assert peer.call("list_loras") == [1]


def test_worker_failure_does_not_linger(peer: Peer, start: StartEngine) -> None:
    """A failing worker that nobody asked for anything fails nothing later."""
    start(faults=[FaultRule("is_sleeping", "fail", worker=0, message="never seen")])
    assert peer.call("is_sleeping") is False
    assert peer.call("list_loras") == []


def test_worker_fails_in_a_deferred_call(peer: Peer, start: StartEngine) -> None:
    """It fails when the pause is completed, not at what other calls ask of it before or after."""
    rule = FaultRule("pause_scheduler", "fail", worker=1, message="stuck", occurrence=1)
    start(options=MANUAL, faults=[rule])
    peer.add("r", [1], options={"max_tokens": 2})
    peer.ask("mock_step")
    peer.outputs()
    peer.reply()
    pause = peer.ask("pause_scheduler", "wait")
    assert peer.call("list_loras") == []
    step = peer.ask("mock_step")
    peer.outputs()
    text = worker_failed("pause_scheduler", "stuck")
    assert [peer.reply(), peer.reply()] == [(step, None, 1), (pause, text, None)]
    assert peer.call("list_loras") == []
    assert paused(peer) == (True, True)


def test_answers_by_script(peer: Peer, start: StartEngine) -> None:
    """An answer can be given without executing, and a failure after it."""
    start(
        faults=[
            FaultRule("add_lora", "answer", value=False),
            FaultRule("set_weight_version", "fail_after", message="told to"),
        ]
    )
    assert peer.call("add_lora", lora(1)) is False
    assert peer.call("list_loras") == []
    text = "Call to set_weight_version method failed: told to"
    assert peer.failure("set_weight_version", "w2") == text
    assert peer.call("get_weight_version") == "w2"


@pytest.mark.parametrize(("do", "times"), [("duplicate", 2), ("fail_after", 1), ("delay", 1)])
def test_faults_on_deferred_replies(peer: Peer, start: StartEngine, do: str, times: int) -> None:
    """Faults act on a deferred reply when it comes."""
    start(options=MANUAL, faults=[FaultRule("pause_scheduler", do, message="late")])
    pause, step = pause_with_one_step_left(peer)
    replies = [peer.reply() for _ in range(times + 1)]
    failure = "Call to pause_scheduler method failed: late" if do == "fail_after" else None
    assert replies == [(step, None, 1)] + [(pause, failure, None)] * times


def test_deferred_reply_can_be_held(peer: Peer, start: StartEngine) -> None:
    """A held one waits for its release, when it is there."""
    start(options=MANUAL, faults=[FaultRule("pause_scheduler", "hold")])
    pause, step = pause_with_one_step_left(peer)
    assert peer.reply() == (step, None, 1)
    replies: list[Any] = []

    def release() -> bool:
        peer.ask("mock_release")
        replies.append(peer.reply())
        return bool(replies[-1][0] == pause)

    wait_until(release)
    assert replies[-1] == (pause, None, None)
    assert peer.reply()[2] == 1


def test_one_plan_for_a_group(peer: Peer) -> None:
    """Engines in threads share a plan; each counts for itself, and rules name an engine."""
    plan = FaultPlan(
        [
            FaultRule("echo", "fail", occurrence=2, message="second"),
            FaultRule("whoami", "answer", value="engine 1", engine=1),
        ]
    )
    codec = peer.codec.name
    with (
        thread_engine(peer.address, 0, codec=codec, faults=plan),
        thread_engine(peer.address, 1, codec=codec, faults=plan),
    ):
        peer.complete(0, 1)
        for index in (0, 1):
            assert peer.call("echo", 1, index=index) == 1
        for index in (0, 1):
            call_id = peer.ask("echo", 1, index=index)
            assert peer.reply()[:2] == (call_id, "Call to echo method failed: second")
        assert peer.call("whoami", index=1) == "engine 1"
        assert peer.call("whoami", index=0)["index"] == 0
        plan.add(FaultRule("echo", "answer", value="new"))
        assert [peer.call("echo", 1, index=index) for index in (0, 1)] == ["new", "new"]


def test_plan_and_options_for_a_process(peer: Peer) -> None:
    """A process takes a plan and options on its command line."""
    plan = FaultPlan([FaultRule("echo", "answer", value=[1, "x"])])
    options = json.dumps({"supported_tasks": ["embed"]})
    with EngineProcess(
        peer.address,
        codec=peer.codec.name,
        arguments=[*plan.arguments(), "--options", options],
    ):
        peer.complete()
        assert peer.call("echo", 5) == [1, "x"]
        assert peer.call("get_supported_tasks") == ["embed"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"step": 1}, "no option step"),
        ([], "options are a map"),
        ({"step_seconds": -1}, "must not be negative"),
        ({"vocab_size": 0}, "vocab_size must be positive"),
    ],
)
def test_wrong_options_are_refused(options: Any, text: str) -> None:
    """An option that cannot be meant is an error at once."""
    with pytest.raises(ValueError, match=text):
        EngineOptions.from_plain(options)


def test_options_pass_through() -> None:
    """Options may come as they are, as a map, or not at all."""
    options = EngineOptions(log_stats=True)
    assert EngineOptions.from_plain(options) is options
    assert EngineOptions.from_plain({"log_stats": True}) == options
    assert EngineOptions.from_plain(None) == EngineOptions()


def test_options_belong_to_the_model() -> None:
    """A model that is given has options of its own."""
    with pytest.raises(ValueError, match="give the options to the model"):
        MockEngine("ipc://x", model=EngineModel(0), options={"log_stats": True})


@pytest.mark.parametrize("do", ["drop", "answer", "die"])
def test_only_a_failure_is_that_of_a_worker(do: str) -> None:
    """Other faults are those of the engine."""
    with pytest.raises(ValueError, match="worker has no meaning"):
        FaultRule("add_lora", do, worker=0)


def test_method_without_signature(peer: Peer, start: StartEngine) -> None:
    """Whatever is callable can be a method; its own words are the failure."""
    start(methods={"dict": dict})
    assert peer.call("dict", [["a", 1]]) == {"a": 1}
    assert "object is not iterable" in peer.failure("dict", 1)


def test_deferred_settles_in_either_order() -> None:
    """A result that is there before somebody waits for it is handed over all the same."""
    taken: list[Any] = []
    early, late = Deferred(), Deferred()
    early.settle(lambda: 1)
    early.then(lambda result: taken.append(result()))
    late.then(lambda result: taken.append(result()))
    assert taken == [1]
    late.settle(lambda: 2)
    assert taken == [1, 2]
