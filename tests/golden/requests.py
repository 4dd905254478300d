"""The requests whose bytes and outputs were recorded."""

from __future__ import annotations

from engine_client import EngineRequest, LoraRequest, SamplingParams

ADAPTER = LoraRequest("alpha", 1, "adapters/alpha")
REQUESTS = [
    EngineRequest("defaults", [1, 2, 3], arrival_time=1.5),
    EngineRequest(
        "sampling",
        [5, 6, 300],
        SamplingParams(
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            repetition_penalty=1.1,
            temperature=0.5,
            top_p=0.9,
            top_k=20,
            min_p=0.05,
            seed=7,
            min_tokens=1,
            max_tokens=3,
            ignore_eos=True,
            stop_token_ids=[2],
            logit_bias={5: 1.5, 300: -1.5},
            bad_words_token_ids=[[9, 10]],
        ),
        arrival_time=1.5,
        priority=3,
        trace_headers={"traceparent": "00-0af7-b7ad-01"},
        cache_salt="salt",
    ),
    EngineRequest(
        "stopped",
        [1, 2],
        SamplingParams(temperature=0.0, logit_bias={42: 100.0}, stop_token_ids=[42]),
        arrival_time=1.5,
    ),
    EngineRequest(
        "logprobs",
        list(range(10, 22)),
        SamplingParams(temperature=0.0, max_tokens=2, logprobs=2, prompt_logprobs=5),
        arrival_time=1.5,
    ),
    EngineRequest(
        "adapter",
        [1, 2, 3],
        SamplingParams(max_tokens=2, temperature=0.0),
        arrival_time=1.5,
        lora_request=ADAPTER,
    ),
]


def wire_id(name: str) -> str:
    """Return the id that the engine knows a request by."""
    return f"{name}-0000000a"
