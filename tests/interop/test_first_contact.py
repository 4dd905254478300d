"""What a client sees of two real engines at once, without anything of vLLM installed."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from engine_client import EngineClient, RemoteError, UtilityCallError
from tests.interop.environment import VERSION

REGISTRATION = [
    "max_model_len",
    "num_gpu_blocks",
    "block_size",
    "dp_stats_address",
    "dtype",
    "vllm_version",
    "world_size",
    "data_parallel_size",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "decode_context_parallel_size",
    "data_parallel_rank",
    "max_num_seqs",
    "max_num_batched_tokens",
    "instance_id",
    "supports_lora",
    "max_loras",
    "mamba_block_size",
    "kv_cache_size_tokens",
    "kv_cache_max_concurrency",
    "kv_events_config",
    "weight_transfer_backend",
    "enable_sleep_mode",
    "supports_draft_weight_updates",
    "effective_attention_block_size",
]


def test_no_framework_is_installed_here() -> None:
    """The process that drives the engines has neither vLLM nor torch."""
    assert [name for name in ("vllm", "torch", "numpy") if find_spec(name)] == []


def test_dialect_recognised(client: EngineClient) -> None:
    """Msgpack is recognised by itself, per engine."""
    assert [info.codec for info in client.engines] == ["msgpack", "msgpack"]
    assert all(info.alive and info.in_flight == 0 for info in client.engines)


def test_registration(client: EngineClient, report: list[str]) -> None:
    """What each engine says of itself is there, in the order in which it says it."""
    for info in client.engines:
        assert list(info.ready) == REGISTRATION
        assert info.ready["vllm_version"] == VERSION
        assert info.ready["data_parallel_rank"] == info.index
        assert info.ready["data_parallel_size"] == 1
        assert info.ready["max_model_len"] == 2048
        assert info.ready["dtype"] == "float32"
        assert (info.ready["supports_lora"], info.ready["max_loras"]) == (True, 2)
    report.append(f"engine 0 registered: {client.engines[0].ready}")


def test_dense_engines_are_no_lockstep_group(client: EngineClient) -> None:
    """Pausing one engine alone is allowed: dense engines do not wait for each other."""
    assert client.call_utility("pause_scheduler", "abort", True, engines=[1]) == [None]
    try:
        assert client.call_utility("is_scheduler_paused") == [False, True]
    finally:
        client.call_utility("resume_scheduler", engines=[1])
    assert client.call_utility("is_scheduler_paused") == [False, False]


@pytest.mark.parametrize("method", ["is_sleeping", "is_scheduler_paused"])
def test_question_fanned_out(client: EngineClient, method: str) -> None:
    """A question reaches both engines, which agree."""
    outcomes = client.settle_utility(method)
    assert outcomes.all_ok
    assert outcomes.unwrap() == [False, False]
    assert outcomes.agreed() is False


def test_collective_rpc(client: EngineClient) -> None:
    """A collective RPC reaches the worker of each engine."""
    assert client.collective_rpc("check_health") == [None, None]
    assert client.call_utility("collective_rpc", "check_health", None, [], None) == [[None]] * 2


def test_unknown_method_fails_on_both(client: EngineClient) -> None:
    """An unknown method is each engine's own failure, with its own text; both stay usable."""
    with pytest.raises(UtilityCallError) as caught:
        client.call_utility("no_such_method")
    assert caught.value.outcomes is not None
    failures = caught.value.outcomes.failures
    assert list(failures) == [0, 1]
    for index, error in failures.items():
        assert isinstance(error, RemoteError)
        assert (error.engine, error.may_have_run, error.method) == (index, True, "no_such_method")
        assert error.message == (
            "Call to no_such_method method failed: "
            "'EngineCoreProc' object has no attribute 'no_such_method'"
        )
    assert client.is_sleeping() is False


def test_too_many_arguments(client: EngineClient) -> None:
    """An engine says nothing more than that the call failed when it gets too many arguments."""
    outcomes = client.settle_utility("is_sleeping", 1, 2)
    for error in outcomes.failures.values():
        assert isinstance(error, RemoteError)
        assert error.message == "Call to is_sleeping method failed: "
    assert list(outcomes.failures) == [0, 1]


def test_many_calls(client: EngineClient, report: list[str]) -> None:
    """A thousand fan-outs are answered, none late, none malformed."""
    before = client.stats
    elapsed = []
    for _ in range(1000):
        outcomes = client.settle_utility("is_sleeping")
        assert outcomes.all_ok
        elapsed.append(max(outcome.elapsed for outcome in outcomes.values()))
    after = client.stats
    assert (after.late_replies, after.malformed_messages, after.stray_messages, after.deaths) == (
        before.late_replies,
        before.malformed_messages,
        before.stray_messages,
        before.deaths,
    )
    assert client.pending_utility_calls == 0
    elapsed.sort()
    report.append(
        f"is_sleeping on both, 1000 times: median {elapsed[500] * 1e6:.0f} us, "
        f"99th percentile {elapsed[990] * 1e6:.0f} us"
    )
