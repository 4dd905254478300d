"""A request: what is refused, and the 22 positions that an engine reads."""

from __future__ import annotations

import array
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_client import (
    EncodeError,
    EngineRequest,
    LoraRequest,
    PoolingParams,
    RequestRefusedError,
    SamplingParams,
)
from engine_client.tensors import Tensor, lift_tensors
from engine_client.tools.mock.request import UnusableRequest, read_request
from engine_client.wire.codec import codec_named
from engine_client.wire.plain import plain

WIRE_ID = "r-00000001"


def sent(request: EngineRequest, codec: str = "cbor") -> tuple[list[Any], list[bytes]]:
    """Return the decoded record, and the frames behind the main one."""
    frames: list[bytes] = []
    checked = plain(request.to_plain(WIRE_ID, 0, frames), "request")
    return codec_named(codec).decode(codec_named(codec).encode(checked)), frames


# -- what is refused -------------------------------------------------------------------------------

FULL: dict[str, Any] = {
    "mm_features": [
        {
            "data": None,
            "modality": "image",
            "identifier": "i",
            "mm_position": {"offset": 0, "length": 1, "is_embed": None},
        }
    ],
    "arrival_time": 12.5,
    "cache_salt": "salt",
    "data_parallel_rank": 3,
    "prompt_is_token_ids": [True, False],
    "priority": -4,
    "trace_headers": {"traceparent": "00"},
    "reasoning_ended": False,
    "reasoning_parser_kwargs": {"a": 1},
    "abort_immediately": True,
    "session_id": "s",
    "kv_hints": {"protocol_version": 1, "message_id": "m", "actions": []},
}
ORDER = {
    "mm_features": 2,
    "arrival_time": 5,
    "cache_salt": 7,
    "data_parallel_rank": 8,
    "prompt_is_token_ids": 10,
    "priority": 13,
    "trace_headers": 14,
    "reasoning_ended": 17,
    "reasoning_parser_kwargs": 18,
    "abort_immediately": 19,
    "session_id": 20,
    "kv_hints": 21,
}


@pytest.mark.parametrize(
    "values",
    [
        {"request_id": ""},
        {"prompt_token_ids": []},
        {"prompt_token_ids": None},
        {"prompt_token_ids": [-1]},
        {"prompt_token_ids": [2**63]},
        {"prompt_token_ids": [True]},
        {"prompt_token_ids": [1.0]},
        {"prompt_token_ids": "123"},
        {"prompt_token_ids": {1}},
        {"prompt": "text"},
        {"sampling_params": SamplingParams(), "pooling_params": PoolingParams()},
        {"resumable": True},
        {"data_parallel_rank": -1},
        {"priority": 2**63},
        {"priority": 1.0},
    ],
    ids=str,
)
def test_bad_values_are_refused_by_name(values: dict[str, Any]) -> None:
    """What an engine would not survive is refused, and the text names the field."""
    with pytest.raises(RequestRefusedError) as caught:
        EngineRequest(**{"request_id": "r", "prompt_token_ids": [1], **values})
    assert any(name in str(caught.value) for name in values)


@pytest.mark.parametrize(
    "values",
    [
        {"request_id": 7},
        {"sampling_params": {"max_tokens": 1}},
        {"pooling_params": SamplingParams()},
        {"lora_request": ["a", 1, "/p"]},
        {"prompt_embeds": [1.0]},
        {"cache_salt": 1},
        {"session_id": 1},
        {"reasoning_ended": 1},
        {"abort_immediately": 1},
        {"allow_unloaded_lora": None},
        {"arrival_time": "now"},
        {"arrival_time": True},
        {"arrival_time": math.nan},
        {"trace_headers": {"a": 1}},
        {"trace_headers": {1: "a"}},
        {"trace_headers": [("a", "b")]},
        {"prompt_is_token_ids": [1]},
        {"prompt_is_token_ids": True},
        {"mm_features": {"a": 1}},
        {"mm_features": [1]},
        {"mm_features": [{}]},
        {"mm_features": [{**FULL["mm_features"][0], "mm_position": {"offset": -1, "length": 1}}]},
        {"reasoning_parser_kwargs": []},
        {"kv_hints": "x"},
    ],
    ids=str,
)
def test_a_wrong_type_is_refused_by_name(values: dict[str, Any]) -> None:
    """An engine that reads a wrong type hears nothing any more."""
    with pytest.raises((TypeError, RequestRefusedError)) as caught:
        EngineRequest(**{"request_id": "r", "prompt_token_ids": [1], **values})
    assert next(iter(values)) in str(caught.value)


_odd: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2), st.dictionaries(st.text(max_size=2), inner, max_size=2)
    ),
    max_leaves=3,
)


@given(
    st.fixed_dictionaries(
        {}, optional=dict.fromkeys((*FULL, "prompt_token_ids", "request_id"), _odd)
    )
)
def test_whatever_is_taken_is_read_by_an_engine(values: dict[str, Any]) -> None:
    """Nothing that passes here ends the receiving of an engine that reads as vLLM does."""
    try:
        request = EngineRequest(**{"request_id": "r", "prompt_token_ids": [1], **values})
        record, frames = sent(request)
    except (RequestRefusedError, EncodeError, TypeError):
        return
    read_request(record, frames)


@pytest.mark.parametrize(
    "params", [SamplingParams(stop="x"), SamplingParams(bad_words=["x"]), SamplingParams(n=2)]
)
def test_what_needs_a_tokenizer_or_many_requests_is_refused_when_sent(
    params: SamplingParams,
) -> None:
    """An engine knows tokens only, and returns one sequence for a request."""
    with pytest.raises(RequestRefusedError, match=r"sampling_params\."):
        EngineRequest("r", [1], params).check_tokens_only()


# -- the wire --------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["cbor", "msgpack"])
def test_a_small_request_has_22_positions_and_default_parameters(codec: str) -> None:
    """Both parameter records left out mean the defaults; the user's id is in position 16."""
    record, frames = sent(EngineRequest("r", (1, 2)), codec)
    assert isinstance(record[5], float)
    record[5] = None
    expected: list[Any] = [WIRE_ID, [1, 2], None, {}, None, None, None, None, None, None, None]
    expected += [0, 0, 0, None, False, "r", None, None, False, None, None]
    assert record == expected
    assert frames == []
    assert len(record) == 22
    record[5] = 1.0
    assert read_request(record).prompt == [1, 2]


@pytest.mark.parametrize("codec", ["cbor", "msgpack"])
def test_every_field_has_its_position(codec: str) -> None:
    """All keyword arguments arrive where an engine looks for them."""
    request = EngineRequest(
        "r",
        [1],
        SamplingParams(max_tokens=3),
        lora_request=LoraRequest("ad", 1, "/p"),
        **FULL,
    )
    frames: list[bytes] = []
    plain_record = plain(request.to_plain(WIRE_ID, 2, frames, wave=5))
    record = codec_named(codec).decode(codec_named(codec).encode(plain_record))
    assert {name: record[place] for name, place in ORDER.items()} == FULL
    assert record[3] == {"max_tokens": 3}
    assert record[6] == ["ad", 1, "/p", None, False, False]
    assert record[11:13] == [2, 5]
    read_request(record)


def test_pooling_takes_the_place_of_sampling() -> None:
    """Exactly one of the two is there."""
    record, _ = sent(EngineRequest("r", [1], pooling_params=PoolingParams(task="embed")))
    assert record[3] is None
    assert record[4][4] == "embed"


def test_an_engine_answers_what_cannot_run() -> None:
    """The reference engine tells apart what deafens it and what it refuses with an error."""
    record, _ = sent(EngineRequest("r", [1]))
    record[3] = {"max_tokens": None}
    with pytest.raises(UnusableRequest):
        read_request(record)


# -- arrays ----------------------------------------------------------------------------------------


def test_arrays_of_a_request_go_in_frames_of_their_own() -> None:
    """They are numbered from 1 in the order in which they are met."""
    embeds = Tensor.of(array.array("f", [1.0, 2.0, 3.0, 4.0]))
    image = Tensor.of(memoryview(bytes(range(6))).cast("B", (2, 3)))
    features = [
        {
            "data": {"pixels": {"data": image, "field": ["batched", {"keep_on_cpu": False}]}},
            "modality": "image",
            "identifier": "i",
            "mm_position": {"offset": 0, "length": 2, "is_embed": None},
        }
    ]
    wanted = SamplingParams(prompt_logprob_token_ids=Tensor("<i4", (2,), bytes(8)))
    request = EngineRequest("r", None, wanted, prompt_embeds=embeds, mm_features=features)
    assert request.length == 4
    record, frames = sent(request)
    places = {
        record[2][0]["data"]["pixels"]["data"][2]: bytes(range(6)),
        record[3]["prompt_logprob_token_ids"][2]: bytes(8),
        record[9][2]: embeds.data,
    }
    assert {place: frames[place - 1] for place in sorted(places)} == places
    assert sorted(places) == [1, 2, 3]
    assert record[9] == ["float32", [4], record[9][2]]
    assert record[2][0]["data"]["pixels"]["data"][:2] == ["uint8", [2, 3]]
    read_request(record, frames)


def test_a_tensor_knows_its_dtype_or_is_told() -> None:
    """The buffer says it, or the caller does; what has no name or no order is refused."""
    assert Tensor.of(array.array("q", [1])).dtype == "int64"
    assert Tensor.of(bytes(4), "bfloat16").dtype == "bfloat16"
    assert Tensor.of(b"").data == b""
    with pytest.raises(EncodeError, match="no name"):
        Tensor.of(array.array("H", [1]))
    with pytest.raises(EncodeError, match="not contiguous"):
        Tensor.of(memoryview(bytes(8))[::2])
    with pytest.raises(TypeError):
        Tensor.of([1, 2])


def test_nothing_else_is_changed_by_lifting() -> None:
    """Values without arrays come out equal, and no frame is added."""
    frames: list[bytes] = []
    value = {"a": [1, (2, None)], "b": "text", "c": b"bytes"}
    assert lift_tensors(value, frames) == {"a": [1, [2, None]], "b": "text", "c": b"bytes"}
    assert frames == []
