"""Values that nobody should pass: each is refused with the error of its kind, soon."""

from __future__ import annotations

from typing import Any

import pytest

from engine_client import (
    EncodeError,
    EngineRequest,
    LoraRequest,
    PoolingParams,
    RequestRefusedError,
    SamplingParams,
    connect,
    launch,
)
from engine_client.request import EngineRequest as Request
from engine_client.wire.plain import plain

HUGE = 10**5000
"""Too long for Python to print."""


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


def test_an_odd_command_is_refused() -> None:
    make: Any = launch
    with pytest.raises(TypeError, match="command must be"):
        make(command=5)
