"""Parameters of sampling and pooling: what is refused, and what goes on the wire."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Mapping
from dataclasses import fields
from enum import IntEnum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_client import LoraRequest, PoolingParams, RequestRefusedError, SamplingParams
from engine_client.sampling import POOLING_TASKS
from engine_client.tensors import Tensor
from engine_client.tools.mock.sampling import read_pooling, read_sampling
from engine_client.wire.codec import codec_named
from engine_client.wire.plain import plain

HUGE = 2**63


# -- ranges ----------------------------------------------------------------------------------------

GOOD: list[dict[str, Any]] = [
    {"presence_penalty": -2, "frequency_penalty": 2.0},
    {"repetition_penalty": 0.1},
    {"temperature": 0},
    {"temperature": 2.0},
    {"top_p": 1},
    {"top_p": 1e-9},
    {"top_k": -1},
    {"min_p": 0.0},
    {"min_p": 1},
    {"seed": -1},
    {"seed": HUGE - 1},
    {"max_tokens": 1, "min_tokens": 1},
    {"logprobs": -1, "prompt_logprobs": 0},
    {"n": 2},
    {"stop": "x"},
    {"stop": ["x", "y"]},
    {"bad_words": ["x"]},
    {"stop_token_ids": ()},
    {"stop_token_ids": (0, 7)},
    {"logit_bias": {7: -100}},
    {"thinking_token_budget": -1},
    {"extra_args": {"a": {"b": [1, None]}}},
    {"structured_outputs": {"regex": "a+", "_backend": "xgrammar"}},
    {"structured_outputs": {"choice": ["a", "b"], "_backend": "guidance"}},
    {"structured_outputs": {"json": {"type": "object"}, "_backend": "xgrammar"}},
    {"repetition_detection": {"max_pattern_size": 2, "min_pattern_size": 1, "min_count": 2}},
    {"repetition_detection": {}},
    {"stream_interval": 1},
    {"watermarking": False},
]

BAD: list[dict[str, Any]] = [
    {"presence_penalty": 2.1},
    {"frequency_penalty": -2.1},
    {"repetition_penalty": 0},
    {"repetition_penalty": math.inf},
    {"temperature": -0.1},
    {"temperature": 2.1},
    {"temperature": math.nan},
    {"temperature": "1"},
    {"temperature": True},
    {"temperature": None},
    {"top_p": 0},
    {"top_p": 1.1},
    {"top_k": -2},
    {"top_k": 5.0},
    {"min_p": -0.1},
    {"min_p": 1.1},
    {"seed": HUGE},
    {"seed": 1.5},
    {"max_tokens": 0},
    {"max_tokens": None},
    {"max_tokens": True},
    {"min_tokens": -1},
    {"min_tokens": 17},
    {"logprobs": -2},
    {"prompt_logprobs": 1.0},
    {"n": 0},
    {"n": 2, "temperature": 0},
    {"stop": ""},
    {"stop": ["x", ""]},
    {"stop": [1]},
    {"stop": "x", "detokenize": False},
    {"bad_words": [""]},
    {"bad_words_token_ids": [[]]},
    {"bad_words_token_ids": [[-1]]},
    {"stop_token_ids": [-1]},
    {"stop_token_ids": [True]},
    {"stop_token_ids": "12"},
    {"stop_token_ids": {1}},
    {"stop_token_ids": [HUGE]},
    {"allowed_token_ids": []},
    {"logit_bias": {-1: 1.0}},
    {"logit_bias": {"7": 1.0}},
    {"logit_bias": {7: math.nan}},
    {"logit_bias": [7]},
    {"thinking_token_budget": -2},
    {"output_kind": 3},
    {"output_kind": 1.0},
    {"output_kind": True},
    {"ignore_eos": 1},
    {"watermarking": 0},
    {"eos_token_id": -1},
    {"extra_args": []},
    {"structured_outputs": {"regex": "a", "json": "{}", "_backend": "xgrammar"}},
    {"structured_outputs": {"regex": "a"}},
    {"structured_outputs": {"regex": 1, "_backend": "xgrammar"}},
    {"structured_outputs": {"choice": "ab", "_backend": "xgrammar"}},
    {"structured_outputs": {"choice": ["a", 1], "_backend": "xgrammar"}},
    {"structured_outputs": {"regex": "a", "_backend": 1}},
    {"structured_outputs": {"_backend": "xgrammar"}},
    {"repetition_detection": {"min_count": -1}},
    {"repetition_detection": {"max_pattern_size": 2, "min_count": 1}},
    {"repetition_detection": {"max_pattern_size": 1, "min_pattern_size": 2, "min_count": 2}},
    {"stream_interval": 0},
    {"prompt_logprob_token_ids": [1]},
    {"output_text_buffer_length": -1},
]


@pytest.mark.parametrize("values", GOOD, ids=str)
def test_good_values_are_taken_and_an_engine_reads_them(values: dict[str, Any]) -> None:
    """What is within its range is sent, and the reference engine, as strict as vLLM, reads it."""
    read_sampling(wire(SamplingParams(**values)))


@pytest.mark.parametrize("values", BAD, ids=str)
def test_bad_values_are_refused_by_name(values: dict[str, Any]) -> None:
    """What would end an engine's receiving is refused, and the text names the field."""
    with pytest.raises(RequestRefusedError) as caught:
        SamplingParams(**values)
    assert any(name in str(caught.value) for name in values)


def test_refusal_is_also_a_value_error() -> None:
    """Code that knows nothing of this package catches it too."""
    with pytest.raises(ValueError, match="temperature must be a number from 0 to 2, not 3"):
        SamplingParams(temperature=3)


def wire(params: SamplingParams) -> Any:
    """Return what an engine gets: through the check of what can be sent, and both codecs."""
    checked = plain(params.to_plain())
    decoded = [
        codec_named(name).decode(codec_named(name).encode(checked)) for name in ("cbor", "msgpack")
    ]
    assert decoded[0] == decoded[1]
    return decoded[0]


_tokens = st.lists(st.integers(0, 600), max_size=3)
_numbers = st.one_of(st.floats(), st.integers(-3, 3), st.sampled_from([None, True, "1", HUGE]))
_whole = st.one_of(st.integers(-3, 20), st.sampled_from([None, True, 1.0, HUGE, -HUGE]))
_VALUES: Mapping[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(
        (
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
            "temperature",
            "top_p",
            "min_p",
        ),
        _numbers,
    ),
    **dict.fromkeys(
        (
            "n",
            "top_k",
            "seed",
            "max_tokens",
            "min_tokens",
            "logprobs",
            "prompt_logprobs",
            "prompt_logprob_start",
            "output_kind",
            "stream_interval",
            "output_text_buffer_length",
            "eos_token_id",
            "thinking_token_budget",
            "routed_experts_prompt_start",
        ),
        _whole,
    ),
    **dict.fromkeys(
        ("stop_token_ids", "logprob_token_ids", "allowed_token_ids", "trace_decode_token_ids"),
        st.one_of(st.none(), _tokens, _tokens.map(tuple), st.just([-1]), st.just(["a"])),
    ),
    **dict.fromkeys(
        (
            "watermarking",
            "ignore_eos",
            "flat_logprobs",
            "detokenize",
            "skip_special_tokens",
            "skip_clone",
            "skip_reading_prefix_cache",
        ),
        st.sampled_from([True, False, None, 1]),
    ),
    **dict.fromkeys(
        ("stop", "bad_words"),
        st.one_of(st.none(), st.text(max_size=2), st.lists(st.text(max_size=2), max_size=2)),
    ),
    "logit_bias": st.one_of(
        st.none(), st.dictionaries(st.integers(-1, 600), st.floats(-100, 100), max_size=2)
    ),
    "bad_words_token_ids": st.one_of(st.none(), st.lists(_tokens, max_size=2)),
    "repetition_detection": st.one_of(
        st.none(),
        st.dictionaries(
            st.sampled_from(["max_pattern_size", "min_pattern_size", "min_count", "unknown"]),
            st.integers(-1, 3),
        ),
    ),
}


@given(st.fixed_dictionaries({}, optional=dict(_VALUES)))
def test_whatever_is_taken_is_read_by_an_engine(values: dict[str, Any]) -> None:
    """Nothing that passes here ends the receiving of an engine that checks as vLLM does."""
    try:
        params = SamplingParams(**values)
    except RequestRefusedError:
        return
    read_sampling(wire(params))


# -- the wire --------------------------------------------------------------------------------------


def test_defaults_are_left_out() -> None:
    """Only what differs from the defaults is sent."""
    assert SamplingParams().to_plain() == {}
    assert SamplingParams(temperature=1.0, max_tokens=16, stop=None).to_plain() == {}
    assert SamplingParams(temperature=0.0, max_tokens=4).to_plain() == {
        "temperature": 0.0,
        "max_tokens": 4,
    }


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_one_string_goes_out_as_a_list(name: str) -> None:
    """A string where it takes a list would end a real engine's receiving."""
    params: Any = SamplingParams
    assert params(**{name: "word"}).to_plain() == {name: ["word"]}


def test_eos_and_stop_tokens_fill_the_private_keys() -> None:
    """EOS stops by one key; both are held back before min_tokens by another."""
    params = SamplingParams(eos_token_id=2, stop_token_ids=[9, 7], min_tokens=3)
    assert params.to_plain() == {
        "stop_token_ids": [9, 7],
        "min_tokens": 3,
        "_eos_token_id": 2,
        "_all_stop_token_ids": [2, 7, 9],
    }


def test_ignored_eos_stops_nothing() -> None:
    """With ignore_eos an engine is not told what ends a request, only what to hold back."""
    sent = SamplingParams(eos_token_id=2, ignore_eos=True).to_plain()
    assert sent == {"ignore_eos": True, "_all_stop_token_ids": [2]}


def test_bad_words_have_their_wire_name_and_one_stop_string_is_a_list() -> None:
    """The names and forms are those that an engine reads."""
    sent = SamplingParams(bad_words_token_ids=[[1, 2]], stop="x").to_plain()
    assert sent == {"_bad_words_token_ids": [[1, 2]], "stop": ["x"]}


def test_every_other_name_is_the_wires() -> None:
    """Set to something else than its default, each field appears under its own name."""
    changed: dict[str, Any] = {
        "n": 2,
        "output_kind": 1,
        "logit_bias": {1: 2.0},
        "extra_args": {"a": 1},
        "structured_outputs": {"json": "{}", "_backend": "guidance"},
        "repetition_detection": {"min_count": 2},
        "prompt_logprob_token_ids": Tensor("<i4", (1,), bytes(4)),
        "detokenize": True,
        "min_tokens": 1,
    }
    for field in fields(SamplingParams):
        name = field.name
        if name in ("eos_token_id", "bad_words", "bad_words_token_ids", "detokenize", "stop"):
            continue
        value = changed.get(name)
        if value is None:
            if isinstance(field.default, bool) or field.type == "bool | None":
                value = not field.default
            elif str(field.type).startswith("Sequence[int]"):
                value = [3]
            elif str(field.type).startswith("Sequence[str]"):
                value = ["w"]
            elif field.type == "float":
                value = 0.5
            else:
                value = 3
        one: dict[str, Any] = {name: value}
        assert SamplingParams(**one).to_plain()[name] == value


def test_parameters_copy_pickle_and_compare() -> None:
    """They are values."""
    params = SamplingParams(temperature=0.5, stop_token_ids=[1])
    assert pickle.loads(pickle.dumps(params)) == params == copy.copy(params)
    with pytest.raises(AttributeError):
        params.n = 2  # type: ignore[misc]


def test_positional_parameters_are_refused() -> None:
    """Forty names in a row are nobody's to count."""
    with pytest.raises(TypeError):
        SamplingParams(1)  # type: ignore[call-arg]


def test_an_enumeration_is_sent_as_its_number() -> None:
    """Whoever has an enumeration of token ids or kinds may use it where a single one is meant."""

    class Kind(IntEnum):
        DELTA = 1

    assert wire(SamplingParams(output_kind=Kind.DELTA)) == {"output_kind": 1}


# -- pooling ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", POOLING_TASKS)
def test_pooling_is_an_array_of_ten(task: str) -> None:
    """In the protocol's order, and read by an engine."""
    params = PoolingParams(task=task, dimensions=3, use_activation=True, returned_token_ids=(1,))
    checked = plain(params.to_plain())
    assert checked == [True, 3, None, [1], task, False, None, None, None, 2]
    assert read_pooling(checked).task == task


@pytest.mark.parametrize(
    "values",
    [
        {"task": "embedding"},
        {"task": 1},
        {"dimensions": 0},
        {"dimensions": 1.0},
        {"step_tag_id": -1},
        {"returned_token_ids": [-1]},
        {"use_activation": 1},
        {"requires_token_ids": None},
        {"output_kind": 0},
        {"output_kind": 1},
        {"output_kind": 2.0},
        {"output_kind": 5},
        {"extra_kwargs": [1]},
        {"late_interaction_params": "abc"},
        {"late_interaction_params": {"mode": 1}},
        {"late_interaction_params": ["mode", "key", "often"]},
        {"late_interaction_params": ["mode"]},
    ],
    ids=str,
)
def test_bad_pooling_is_refused_by_name(values: dict[str, Any]) -> None:
    """A wrong task kills an engine, a wrong type deafens it."""
    with pytest.raises(RequestRefusedError, match=next(iter(values))):
        PoolingParams(**values)


# -- adapters --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: LoraRequest("a", 0, "/p"), RequestRefusedError),
        (lambda: LoraRequest("a", HUGE, "/p"), RequestRefusedError),
        (lambda: LoraRequest("a", 1, ""), RequestRefusedError),
        (lambda: LoraRequest("", 1, "/p"), RequestRefusedError),
        (lambda: LoraRequest("a", True, "/p"), TypeError),
        (lambda: LoraRequest("a", 1, None), TypeError),  # type: ignore[arg-type]
        (lambda: LoraRequest("a", 1, "/p", 5), TypeError),  # type: ignore[arg-type]
        (lambda: LoraRequest("a", 1, "/p", None, None), TypeError),  # type: ignore[arg-type]
    ],
)
def test_bad_adapter_is_refused(make: Callable[[], object], kind: type[Exception]) -> None:
    """An engine that is given one in a request dies of it, or hears nothing any more."""
    with pytest.raises(kind):
        make()


def test_adapter_is_an_array_of_six() -> None:
    """The layout of vLLM 0.32."""
    assert LoraRequest("ad", 1, "/p/ad").to_plain() == ["ad", 1, "/p/ad", None, False, False]
