"""Pausing real engines while requests run, in the three modes; and the prefix cache."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from engine_client import (
    EngineClient,
    EngineRequest,
    FinishReason,
    RequestStream,
    SamplingParams,
    StreamTimeout,
)
from engine_client.utilities import PauseMode
from tests.helpers import run_in_thread

TOKENS = 400
"""Long enough to be running still when the pause comes."""


def _start(client: EngineClient, name: str, engine: int, tokens: int = TOKENS) -> RequestStream:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return client.call(EngineRequest(name, [5, 6, 7 + engine], params, data_parallel_rank=engine))


def _drain(stream: RequestStream) -> int:
    return sum(len(output.new_token_ids) for output in stream)


def _read_on(stream: RequestStream, timeout: float) -> None:
    while True:
        stream.recv(timeout=timeout)


@pytest.fixture
def running(client: EngineClient) -> Iterator[list[RequestStream]]:
    """One running request on each engine, of which one output has been read."""
    with ExitStack() as stack:
        streams = [stack.enter_context(_start(client, f"r{i}", i)) for i in range(2)]
        for stream in streams:
            assert len(stream.recv().new_token_ids) == 1
        yield streams


def test_abort(client: EngineClient, running: list[RequestStream]) -> None:
    """Mode abort ends the running requests, and has done so when it returns."""
    client.pause_scheduler("abort")
    assert client.is_scheduler_paused() is True
    for stream in running:
        assert _drain(stream) < TOKENS - 1
        assert stream.finish_reason == FinishReason.ABORT
    assert client.active_requests == 0


def test_wait(client: EngineClient, running: list[RequestStream], report: list[str]) -> None:
    """Mode wait lets the running requests end; replies to later calls overtake its own."""
    start = time.monotonic()
    pause = run_in_thread(client.settle_utility, "pause_scheduler", "wait", True)
    paused = client.settle_utility("is_scheduler_paused")
    asked = time.monotonic() - start
    overtaken = not pause.done
    outcomes = pause.result(60)
    assert outcomes.all_ok
    assert paused.unwrap() == [True, True]
    slowest = max(outcome.elapsed for outcome in outcomes.values())
    report.append(
        f"pause_scheduler('wait') took {slowest * 1e3:.0f} ms, and was overtaken by a question "
        f"asked after it, answered after {asked * 1e3:.1f} ms"
    )
    assert overtaken
    for stream in running:
        assert _drain(stream) == TOKENS - 1
        assert stream.finish_reason == FinishReason.LENGTH


def test_keep(client: EngineClient, running: list[RequestStream]) -> None:
    """Mode keep freezes the running requests until the engines are resumed."""
    client.pause_scheduler("keep", clear_cache=False)
    assert client.is_sleeping() is True
    for stream in running:
        with pytest.raises(StreamTimeout):
            _read_on(stream, timeout=0.3)  # what came before the pause, and then nothing
        assert stream.finish_reason is None
    client.resume_scheduler()
    for stream in running:
        assert _drain(stream) > 0
        assert stream.finish_reason == FinishReason.LENGTH


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_request_to_a_paused_engine(client: EngineClient, mode: PauseMode) -> None:
    """A request that comes during a pause is kept, and served when the engine is resumed."""
    client.pause_scheduler(mode)
    with _start(client, "late", 1, tokens=3) as stream:
        with pytest.raises(StreamTimeout):
            stream.recv(timeout=0.2)
        client.resume_scheduler()
        assert _drain(stream) == 3
        assert stream.finish_reason == FinishReason.LENGTH


def test_prefix_cache(client: EngineClient, report: list[str]) -> None:
    """A prompt that was seen before is taken from the cache, until the cache is reset."""
    prompt = [9 + i % 300 for i in range(300)]

    def cached(name: str, engine: int) -> int:
        params = SamplingParams(max_tokens=1)
        request = EngineRequest(name, prompt, params, data_parallel_rank=engine)
        (output,) = client.call(request)
        assert output.prefill_stats is not None
        return output.prefill_stats["num_cached_tokens"]

    for engine in range(2):
        assert [cached("first", engine), cached("second", engine)] == [0, 256]
    assert client.reset_prefix_cache() is True
    for engine in range(2):
        assert cached("third", engine) == 0
    assert client.reset_prefix_cache(engines=[0]) is True
    assert [cached("fourth", 0), cached("fourth", 1)] == [0, 256]
    report.append("prefix cache: 256 of 300 tokens cached, none after reset_prefix_cache")


def test_prefix_cache_in_use(client: EngineClient, running: list[RequestStream]) -> None:
    """The cache cannot be reset under a running request, unless that is preempted for it."""
    client.pause_scheduler("keep", clear_cache=False)
    assert client.settle_utility("reset_prefix_cache", engines=[0]).unwrap() == [False]
    running[1].close()
    assert client.settle_utility("reset_prefix_cache").unwrap() == [False, True]
    assert client.reset_prefix_cache() is False
    assert client.reset_prefix_cache(reset_running_requests=True) is True
    client.resume_scheduler()
    assert _drain(running[0]) > 0
    assert running[0].finish_reason == FinishReason.LENGTH
