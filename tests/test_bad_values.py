"""Values that nobody should pass: each is refused with the error of its kind, soon."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from engine_client import (
    EncodeError,
    EngineClientError,
    EngineRequest,
    LoraRequest,
    PoolingParams,
    RequestRefusedError,
    SamplingParams,
    UtilityCall,
    connect,
    connect_bootstrapped,
    launch,
)
from engine_client.deadline import parse_timeout
from engine_client.engines import resolve_targets
from engine_client.request import EngineRequest as Request
from engine_client.wire.plain import plain

HUGE = 10**5000
"""Too long for Python to print."""


class Unprintable:
    """A value whose repr fails."""

    def __repr__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize("make", [lambda x: [x, x], lambda x: {"a": x, "b": x}, lambda x: (x, x)])
def test_a_list_that_is_held_many_times_is_refused_instead_of_walked_for_years(make: Any) -> None:
    value: Any = []
    for _ in range(50):
        value = make(value)
    with pytest.raises(EncodeError, match="too much"):
        plain(value)


def test_many_small_lists_are_sent() -> None:
    assert len(plain([[[number]] for number in range(100_000)])) == 100_000


@pytest.mark.parametrize("name", ["max_tokens", "seed", "temperature", "logprobs", "output_kind"])
@pytest.mark.parametrize("value", [HUGE, -HUGE], ids=["huge", "low"])
def test_an_integer_too_long_to_print_is_refused_like_any_other(name: str, value: int) -> None:
    make: Any = SamplingParams
    with pytest.raises(RequestRefusedError, match=name):
        make(**{name: value})


def test_other_integers_too_long_to_print() -> None:
    with pytest.raises(RequestRefusedError, match="prompt_token_ids"):
        EngineRequest("a", [HUGE])
    with pytest.raises(RequestRefusedError, match="arrival_time"):
        EngineRequest("a", [1], arrival_time=HUGE)
    with pytest.raises(RequestRefusedError, match="dimensions"):
        PoolingParams(dimensions=HUGE)
    with pytest.raises(RequestRefusedError, match="lora_int_id"):
        LoraRequest("a", HUGE, "/a")
    with pytest.raises(ValueError, match="engine_count"):
        connect("ipc:///nowhere/at-all", engine_count=HUGE)


def test_none_for_both_parameter_records_is_refused_and_leaving_both_out_is_not() -> None:
    with pytest.raises(RequestRefusedError, match="both None"):
        Request("a", [1], None, None)
    assert Request("a", [1]).sampling_params == SamplingParams()
    assert Request("a", [1], None).sampling_params == SamplingParams()
    assert Request("a", [1]).pooling_params is None
    pooled = Request("a", [1], pooling_params=PoolingParams())
    assert pooled.sampling_params is None


def test_a_multimodal_input_that_holds_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    place = {"offset": 0, "length": 1}
    feature = {"modality": "image", "identifier": "x", "mm_position": place, "data": loop}
    with pytest.raises(EncodeError, match="holds itself"):
        Request("a", [1], mm_features=[feature]).to_plain("a-0", 0, [])


@pytest.mark.parametrize(
    "config",
    [{"a": True}, {"a": None}, {"a": 1.5}, {"a": object()}, {1: 1}, [1], {"a": [object()]}],
)
def test_a_parallel_config_that_an_engine_dies_of_is_refused_before_any_starts(config: Any) -> None:
    with pytest.raises(TypeError, match="parallel_config"):
        connect("ipc:///nowhere/at-all", parallel_config=config)
    with pytest.raises(TypeError, match="parallel_config"):
        launch(1, parallel_config=config)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("coordinator", "yes", TypeError),
        ("coordinator", None, TypeError),
        ("coordinator", 1, TypeError),
        ("context", 5, TypeError),
        ("advertised_host", 5, TypeError),
        ("advertised_host", "", ValueError),
    ],
)
def test_an_odd_setting_is_refused_before_anything_is_opened(
    name: str, value: Any, error: type[Exception]
) -> None:
    make: Any = connect
    with pytest.raises(error, match=name):
        make("tcp://127.0.0.1:*", connect_timeout=0, **{name: value})


@pytest.mark.parametrize(
    "command",
    [5, b"engine", [], [b"engine"], [None], lambda address, index: 5, lambda *_: "engine"],
)
def test_an_odd_command_is_refused(command: Any) -> None:
    make: Any = launch
    with pytest.raises(TypeError, match="command must be"):
        make(command=command)


@pytest.mark.parametrize("env", [5, "A=1", ["A=1"], {"A": 1}, {1: "A"}, {"A": None}])
def test_an_odd_environment_is_refused(env: Any) -> None:
    make: Any = launch
    with pytest.raises(TypeError, match="env must"):
        make(env=env)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:*", "tcp://a b:1", "ipc://" + "x" * 200])
def test_a_coordinator_address_that_cannot_be_one_is_told_at_once(
    address: str, tmp_path: Path
) -> None:
    """Its giver learns of it; what an engine says of a coordinator is only logged."""
    with pytest.raises(EngineClientError, match="cannot connect to the coordinator at"):
        connect_bootstrapped(
            f"ipc://{tmp_path}/i", f"ipc://{tmp_path}/o", coordinator_address=address, timeout=60
        )


@pytest.mark.parametrize("value", ["cbor ", " cbor", "CBOR"])
def test_a_refused_text_is_shown_with_its_blanks(value: str) -> None:
    make: Any = connect
    with pytest.raises(ValueError, match=f"not {value!r}"):
        make("tcp://127.0.0.1:*", codec=value)


BYTES = (b"", bytearray(b"ab"), memoryview(b"ab"))


@pytest.mark.parametrize("value", BYTES, ids=repr)
@pytest.mark.parametrize(
    "name",
    [
        *("stop", "bad_words", "stop_token_ids", "allowed_token_ids"),
        *("logprob_token_ids", "bad_words_token_ids"),
    ],
)
def test_bytes_are_no_array_of_a_parameter(name: str, value: Any) -> None:
    """An engine's receiving ends with them where it takes an array."""
    make: Any = SamplingParams
    with pytest.raises(RequestRefusedError, match=name):
        make(**{name: value})


@pytest.mark.parametrize("value", BYTES, ids=repr)
@pytest.mark.parametrize("name", ["prompt_token_ids", "mm_features", "prompt_is_token_ids"])
def test_bytes_are_no_array_of_a_request(name: str, value: Any) -> None:
    make: Any = EngineRequest
    with pytest.raises((TypeError, RequestRefusedError), match=name):
        make(**{"request_id": "r", "prompt_token_ids": [1], name: value})


@pytest.mark.parametrize("value", BYTES, ids=repr)
def test_bytes_are_no_array_to_pool(value: Any) -> None:
    make: Any = PoolingParams
    with pytest.raises(RequestRefusedError, match="returned_token_ids"):
        make(returned_token_ids=value)


@pytest.mark.parametrize(
    ("address", "error"),
    [(5, TypeError), (b"tcp://127.0.0.1:1", TypeError), ("nowhere", ValueError), ("", ValueError)],
)
def test_an_odd_coordinator_address_is_refused(address: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="the coordinator address must"):
        connect_bootstrapped("ipc:///nowhere/a", "ipc:///nowhere/b", coordinator_address=address)


def test_a_client_index_that_no_message_can_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="client_index must be"):
        connect_bootstrapped("ipc:///nowhere/a", "ipc:///nowhere/b", client_index=2**70)


# -- sampling, pooling, requests ---------------------------------------------------------------


@pytest.mark.parametrize("kind", [SamplingParams, PoolingParams])
@pytest.mark.parametrize("value", [1.0, True, "1", None, 3, -1])
def test_only_an_integer_is_an_output_kind(kind: Any, value: object) -> None:
    """A float that is equal to one would end a real engine's input thread."""
    with pytest.raises(RequestRefusedError, match=r"output_kind must be (an integer|0, 1 or 2|2 )"):
        kind(output_kind=value)


@pytest.mark.parametrize("name", ["n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs"])
@pytest.mark.parametrize("value", [1.0, True, "1", math.nan])
def test_only_an_integer_is_an_integer(name: str, value: object) -> None:
    make: Any = SamplingParams
    with pytest.raises(RequestRefusedError, match=f"{name} must be an integer"):
        make(**{name: value})


@pytest.mark.parametrize("name", ["ignore_eos", "flat_logprobs", "detokenize", "skip_clone"])
@pytest.mark.parametrize("value", [1, 0, 1.0, "yes", None])
def test_only_true_and_false_are_truths(name: str, value: object) -> None:
    make: Any = SamplingParams
    with pytest.raises(RequestRefusedError, match=f"{name} must be True or False"):
        make(**{name: value})


@pytest.mark.parametrize("value", [None, 0, 1, "", [], "yes"])
def test_resumable_is_false(value: Any) -> None:
    with pytest.raises(TypeError, match="resumable must be False"):
        EngineRequest("a", [1], resumable=value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("choice", []),
        ("choice", ()),
        ("regex", ""),
        ("grammar", ""),
        ("json", ""),
        ("structural_tag", ""),
        ("json_object", False),
    ],
)
def test_a_constraint_that_constrains_nothing_is_refused(key: str, value: object) -> None:
    with pytest.raises(RequestRefusedError, match=rf"structured_outputs\['{key}'\] is"):
        SamplingParams(structured_outputs={key: value, "_backend": "xgrammar"})


def test_an_empty_schema_is_that_of_any_json() -> None:
    assert SamplingParams(structured_outputs={"json": {}, "_backend": "xgrammar"}) is not None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("disable_any_whitespace", 1),
        ("disable_additional_properties", "yes"),
        ("_backend_was_auto", []),
        ("whitespace_pattern", b" "),
    ],
)
def test_the_options_of_a_constraint_are_checked(key: str, value: object) -> None:
    with pytest.raises(RequestRefusedError, match=rf"structured_outputs\['{key}'\] must be"):
        SamplingParams(structured_outputs={"regex": "a", "_backend": "xgrammar", key: value})


@pytest.mark.parametrize("name", ["extra_args", "structured_outputs", "repetition_detection"])
def test_keys_of_parameters_are_strings(name: str) -> None:
    make: Any = SamplingParams
    with pytest.raises(RequestRefusedError, match=f"{name} must be a mapping with strings"):
        make(**{name: {1: 2}})


@pytest.mark.parametrize("value", [5, "abc", b"abc", {1: 2}])
def test_words_that_are_no_sequence_are_refused(value: Any) -> None:
    with pytest.raises(RequestRefusedError, match="bad_words_token_ids must be a sequence"):
        SamplingParams(bad_words_token_ids=value)


# -- how it is said ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        HUGE,
        -HUGE,
        "x" * 100_000,
        b"x" * 100_000,
        [HUGE],
        list(range(100_000)),
        "a\nb",
        Unprintable(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_refused_is_shown_on_one_short_line(value: Any) -> None:
    """Whatever somebody passes, the error names the argument and does not drown it."""
    makes: list[tuple[str, Any]] = [
        ("request_id", lambda: EngineRequest([value], [1])),  # type: ignore[arg-type]
        ("prompt_token_ids", lambda: EngineRequest("a", [value])),
        ("cache_salt", lambda: EngineRequest("a", [1], cache_salt=[value])),  # type: ignore[arg-type]
        ("temperature", lambda: SamplingParams(temperature=[value])),  # type: ignore[arg-type]
        ("task", lambda: PoolingParams(task=value)),
        ("lora_path", lambda: LoraRequest("a", 1, [value])),  # type: ignore[arg-type]
        ("args", lambda: UtilityCall("a", {"x": value})),  # type: ignore[arg-type]
        ("engines", lambda: resolve_targets([value], (0, 1))),
        ("timeout", lambda: parse_timeout([value])),
        ("engine_count", lambda: connect("ipc:///nowhere/a", engine_count=[value])),  # type: ignore[arg-type]
        ("codec", lambda: connect("ipc:///nowhere/a", codec=value)),
        ("coordinator", lambda: connect("ipc:///nowhere/a", coordinator=value)),
        ("input address", lambda: connect("ipc:///nowhere/a", input_address=[value])),  # type: ignore[arg-type]
    ]
    for name, make in makes:
        with pytest.raises((TypeError, ValueError), match=name) as info:
            make()
        assert len(str(info.value)) < 300
        assert "\n" not in str(info.value)
        assert "digits" not in str(info.value)
