"""The requests whose bytes and outputs were recorded."""

from __future__ import annotations

import struct
from typing import Any

from engine_client import EngineRequest, LoraRequest, PoolingParams, SamplingParams
from engine_client.tensors import Tensor

ADAPTER = LoraRequest("alpha", 1, "adapters/alpha")
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


def numbers(dtype: str, *shape: int) -> Tensor:
    """Numbers that count up from 0 in small steps."""
    size = 1
    for length in shape:
        size *= length
    if dtype == "float32":
        data = struct.pack(f"<{size}f", *(number / 1024 for number in range(size)))
    elif dtype == "<i4":
        data = struct.pack(f"<{size}i", *range(size))
    else:
        data = bytes(number % 2 for number in range(size))
    return Tensor(dtype, shape, data)


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
"""Of engine 0, which is as small as can be."""
FEATURES = [
    EngineRequest(
        "end of sequence",
        [1, 2],
        SamplingParams(temperature=0.0, logit_bias={2: 100.0}, eos_token_id=2),
        arrival_time=1.5,
    ),
    EngineRequest(
        "repeated",
        [1, 2],
        SamplingParams(
            **GREEDY,
            logit_bias={42: 100.0},
            repetition_detection={"max_pattern_size": 1, "min_pattern_size": 1, "min_count": 3},
        ),
        arrival_time=1.5,
    ),
    EngineRequest(
        "structured",
        [1, 2],
        SamplingParams(
            temperature=0.0,
            eos_token_id=2,
            structured_outputs={"regex": "[ab]{3}", "_backend": "xgrammar"},
        ),
        arrival_time=1.5,
    ),
    EngineRequest(
        "grammar that is none",
        [1, 2],
        SamplingParams(structured_outputs={"grammar": "root ::= (", "_backend": "xgrammar"}),
        arrival_time=1.5,
    ),
    EngineRequest(
        "embeddings",
        None,
        SamplingParams(**GREEDY, max_tokens=2),
        arrival_time=1.5,
        prompt_embeds=numbers("float32", 3, 64),
    ),
    EngineRequest(
        "many logprobs",
        [1, 2, 3],
        SamplingParams(**GREEDY, max_tokens=2, logprobs=70, prompt_logprobs=0),
        arrival_time=1.5,
    ),
    EngineRequest(
        "session",
        [1, 2],
        SamplingParams(**GREEDY, max_tokens=1),
        arrival_time=1.5,
        session_id="session",
        data_parallel_rank=2,
        reasoning_ended=True,
        reasoning_parser_kwargs={"key": 1},
        kv_hints={"protocol_version": "1", "message_id": "m", "actions": []},
    ),
]
"""Of engine 2, which has a tokenizer, takes embeddings, gives any number of log probabilities."""
POOLED = [
    EngineRequest(
        "embed",
        [1, 2, 3],
        pooling_params=PoolingParams(task="embed"),
        arrival_time=1.5,
    ),
    EngineRequest(
        "token_embed",
        [1, 2, 3],
        pooling_params=PoolingParams(task="token_embed", use_activation=False),
        arrival_time=1.5,
    ),
]
"""Of engine 3, which pools."""
RUN = {0: REQUESTS, 2: FEATURES, 3: POOLED}
"""Which engine ran what."""
READ = [
    EngineRequest(
        "every parameter",
        [1, 2, 3],
        SamplingParams(
            n=2,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            repetition_penalty=1.1,
            temperature=0.5,
            watermarking=False,
            top_p=0.9,
            top_k=20,
            min_p=0.05,
            seed=7,
            stop=["end"],
            stop_token_ids=[7],
            max_tokens=30,
            min_tokens=2,
            logprobs=3,
            prompt_logprobs=2,
            prompt_logprob_start=1,
            logprob_token_ids=[5, 6],
            flat_logprobs=True,
            skip_special_tokens=False,
            spaces_between_special_tokens=False,
            include_stop_str_in_output=True,
            output_kind=2,
            stream_interval=4,
            skip_clone=True,
            output_text_buffer_length=3,
            eos_token_id=2,
            structured_outputs={
                "json": {"type": "object"},
                "disable_any_whitespace": True,
                "_backend": "xgrammar",
            },
            logit_bias={5: 1.5},
            allowed_token_ids=[5, 6, 7],
            extra_args={"kv_transfer_params": {"do_remote_prefill": True}},
            bad_words=["bad"],
            bad_words_token_ids=[[9, 10]],
            skip_reading_prefix_cache=True,
            thinking_token_budget=5,
            repetition_detection={"max_pattern_size": 3, "min_pattern_size": 1, "min_count": 2},
            routed_experts_prompt_start=1,
            trace_decode_token_ids=[8],
        ),
        arrival_time=1.5,
        lora_request=LoraRequest("a", 3, "/p", "base", load_inplace=True, is_3d_lora_weight=True),
        abort_immediately=True,
        kv_hints={
            "protocol_version": "1",
            "message_id": "m",
            "actions": [
                {
                    "action_id": "a",
                    "action_type": "pin",
                    "action_version": "1",
                    "payload": {"seconds": 3},
                }
            ],
        },
    ),
    EngineRequest(
        "chosen tokens",
        [1, 2, 3],
        SamplingParams(
            detokenize=False,
            ignore_eos=True,
            prompt_logprob_token_ids=numbers("<i4", 2, 3),
        ),
        arrival_time=1.5,
    ),
    EngineRequest(
        "mixed prompt",
        [1, 0, 3],
        SamplingParams(),
        arrival_time=1.5,
        prompt_embeds=numbers("float32", 3, 2),
        prompt_is_token_ids=[True, False, True],
    ),
    EngineRequest(
        "images",
        [1, 9, 9, 9, 9, 2],
        SamplingParams(),
        arrival_time=1.5,
        mm_features=[
            {
                "data": {
                    "pixels": {
                        "data": numbers("float32", 3, 64),
                        "field": ["batched", {"keep_on_cpu": False}],
                    },
                    "patches": {
                        "data": numbers("float32", 4, 2),
                        "field": [
                            "flat",
                            {"keep_on_cpu": True, "slices": [[0, 4, None]], "dim": 0},
                        ],
                    },
                    "scale": {
                        "data": 0.5,
                        "field": ["shared", {"keep_on_cpu": False, "batch_size": 1}],
                    },
                },
                "modality": "image",
                "identifier": "aa",
                "mm_position": {"offset": 1, "length": 4, "is_embed": numbers("bool", 4)},
                "mm_hash": "bb",
            },
            {
                "data": None,
                "modality": "image",
                "identifier": "cached",
                "mm_position": {"offset": 1, "length": 1, "is_embed": None},
                "mm_hash": None,
            },
        ],
    ),
    EngineRequest(
        "every pooling parameter",
        [1, 2, 3],
        pooling_params=PoolingParams(
            task="classify",
            use_activation=True,
            dimensions=32,
            step_tag_id=7,
            returned_token_ids=[5, 6],
            requires_token_ids=True,
            skip_reading_prefix_cache=True,
            late_interaction_params=["score_doc", "key", 2],
            extra_kwargs={"key": 1},
        ),
        arrival_time=1.5,
    ),
]
"""Which no engine here can run; vLLM's decoder read them."""
READ_AS = (1, 2)
"""The client and the wave that they name."""


def wire_id(name: str) -> str:
    """Return the id that the engine knows a request by."""
    return f"{name}-0000000a"
