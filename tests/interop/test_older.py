"""An engine of an older release beside one of the latest, in one client.

Before 0.32 a LoRA adapter has another layout, and an engine that is given the wrong one fails.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import engine_client
from engine_client import EngineClient, EngineRequest, FinishReason, LoraRequest, SamplingParams
from tests.helpers import scaled
from tests.interop.engines import EngineGroup, vllm_engines
from tests.interop.environment import OLDER, VERSION, environment

pytestmark = pytest.mark.skipif(
    not environment(OLDER).exists, reason=f"no vLLM {OLDER}; tests/interop/run older installs it"
)
Engines = tuple[EngineGroup, EngineClient]
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    """Engine 0 is of the latest release, engine 1 of the older one."""
    with (
        tempfile.TemporaryDirectory(prefix="ec-older-", ignore_cleanup_errors=True) as name,
        vllm_engines(Path(name), only={1: {"vllm": environment(OLDER)}}) as group,
        engine_client.connect(
            group.address, engine_count=2, connect_timeout=scaled(150), timeout=scaled(60)
        ) as client,
    ):
        yield group, client


def _tokens(client: EngineClient, engine: int, lora: LoraRequest | None = None) -> list[int]:
    request = EngineRequest("r", [3, 4, 5], GREEDY, lora_request=lora, data_parallel_rank=engine)
    return [token for output in client.call(request) for token in output.new_token_ids]


def test_versions(engines: Engines, caplog: pytest.LogCaptureFixture, report: list[str]) -> None:
    """Both are known, and answer the same questions."""
    _, client = engines
    versions = [info.ready["vllm_version"] for info in client.engines]
    assert versions == [VERSION, OLDER]
    assert "does not know" not in caplog.text
    assert client.call_utility("is_sleeping") == [False, False]
    assert client.collective_rpc("check_health") == [None, None]
    client.pause_scheduler("keep")
    assert client.is_scheduler_paused() is True
    client.resume_scheduler()
    assert client.reset_prefix_cache()
    report.append(f"engines of vLLM {' and '.join(versions)} in one client: both served")


def test_requests(engines: Engines, report: list[str]) -> None:
    """Outputs of both are read: tokens, log probabilities, how they end."""
    _, client = engines
    said = [_tokens(client, engine) for engine in range(2)]
    assert [len(tokens) for tokens in said] == [16, 16]
    report.append(f"the same greedy tokens from both: {said[0] == said[1]}")
    for engine in range(2):
        params = SamplingParams(
            logprobs=2, prompt_logprobs=2, max_tokens=4, seed=1, stop_token_ids=[7]
        )
        request = EngineRequest("r", [3, 4, 5], params, data_parallel_rank=engine)
        outputs = list(client.call(request))
        prompt, first = outputs[0].new_prompt_logprobs_tensors, outputs[0].new_logprobs
        assert prompt is not None
        assert first is not None
        assert prompt.token_ids.shape == (2, 3)
        assert first.token_ids.shape == (1, 3)
        stats = outputs[0].prefill_stats
        assert stats is not None
        assert stats["num_prompt_tokens"] == 3
        assert outputs[-1].finish_reason in (FinishReason.LENGTH, FinishReason.STOP)


def test_adapters(engines: Engines) -> None:
    """An adapter is loaded on both, each told in its own layout, and changes what they say."""
    group, client = engines
    alpha = LoraRequest("alpha", 1, str(group.folder / group.adapter("alpha")))
    client.add_lora(alpha, compensate=True)
    assert client.list_loras() == frozenset({1})
    client.add_lora(LoraRequest("alpha", 1, alpha.lora_path, load_inplace=True))
    for engine in range(2):
        assert _tokens(client, engine, alpha) != _tokens(client, engine)
    assert client.remove_lora(1) is True
    assert client.list_loras() == frozenset()
    assert all(info.alive for info in client.engines)
    assert client.stats.malformed_messages == 0
