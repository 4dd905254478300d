"""What an engine says of a request: all 18 fields, arrays without a copy, and what is malformed."""

from __future__ import annotations

import copy
import importlib.util
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_client import Completion, EngineOutput, FinishReason, ProtocolError
from engine_client.output import Logprobs, output_fault
from engine_client.tensors import Tensor
from engine_client.wire.codec import codec_named

INLINE = ["<i4", [1, 2], struct.pack("<2i", 5, 6)]
LOGPROBS = [
    INLINE,
    ["<f4", [1, 2], struct.pack("<2f", -0.5, -1.0)],
    ["<i8", [1], struct.pack("<q", 1)],
    None,
]
FULL: list[Any] = [
    "r-00000001",
    [42],
    LOGPROBS,
    [
        ["int32", [0, 2], b""],
        ["float32", [0, 2], b""],
        ["int32", [0], b""],
        None,
        None,
    ],
    ["float32", [2], struct.pack("<2f", 1.0, 2.0)],
    0,
    7,
    [{"type": 1, "timestamp": 1.5}],
    {"kv": 1},
    {"ec": 2},
    {"traceparent": "00"},
    {"num_prompt_tokens": 3},
    ["|u1", [2, 2], bytes([1, 2, 3, 4])],
    9,
    ["hash"],
    [1, 2, 3],
    {"accepted": 4},
    ["float32", [1], struct.pack("<f", 0.25)],
]
SHORT: list[Any] = ["r", [42], None, None, None, None]


def output(record: list[Any], *frames: bytes) -> EngineOutput:
    """Return the output that a record makes; frame 0 is the main one."""
    assert output_fault(record) is None
    return EngineOutput.from_plain(
        record,
        (b"main", *frames),
        request_id="r",
        engine=3,
        timestamp=1.5,
        weight_version="v1",
    )


# -- fields ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["cbor", "msgpack"])
def test_all_fields(codec: str) -> None:
    """Each of the 18 positions has its name; the message's own fields are there too."""
    decoded = codec_named(codec).decode(codec_named(codec).encode(FULL))
    one = output(decoded)
    assert (one.request_id, one.engine, one.timestamp, one.weight_version) == ("r", 3, 1.5, "v1")
    assert one.new_token_ids == [42]
    assert one.new_logprobs is not None
    assert one.new_logprobs.token_ids.tolist() == [[5, 6]]
    assert one.new_logprobs.logprobs.tolist() == [[-0.5, -1.0]]
    assert one.new_logprobs.ranks.tolist() == [1]
    assert one.new_logprobs.cumulative_counts is None
    assert one.new_prompt_logprobs_tensors is not None
    assert one.new_prompt_logprobs_tensors.token_ids.shape == (0, 2)
    assert one.pooling_output is not None
    assert one.pooling_output.tolist() == [1.0, 2.0]
    assert one.finish_reason is FinishReason.STOP
    assert one.stop_reason == 7
    assert one.events == [{"type": 1, "timestamp": 1.5}]
    assert one.kv_transfer_params == {"kv": 1}
    assert one.ec_transfer_params == {"ec": 2}
    assert one.trace_headers == {"traceparent": "00"}
    assert one.prefill_stats == {"num_prompt_tokens": 3}
    assert one.routed_experts is not None
    assert one.routed_experts.tolist() == [[1, 2], [3, 4]]
    assert one.num_nans_in_logits == 9
    assert one.mm_cache_miss_hashes == ["hash"]
    assert one.new_sampling_mask == [1, 2, 3]
    assert one.spec_decode_metrics == {"accepted": 4}
    assert one.prompt_token_id_logprobs is not None
    assert one.prompt_token_id_logprobs.tolist() == [0.25]


@pytest.mark.parametrize("length", range(2, 20))
def test_fewer_positions_mean_defaults_and_more_are_ignored(length: int) -> None:
    """Engines older and newer than this client are understood."""
    record = [*FULL, "unknown", {"new": True}][:length]
    one = output(record)
    assert one.new_token_ids == [42]
    assert (one.finish_reason is None) == (length < 6)
    assert (one.stop_reason is None) == (length < 7)
    assert one.num_nans_in_logits == (9 if length > 13 else 0)
    assert (one.prompt_token_id_logprobs is None) == (length < 18)


def test_nothing_is_none() -> None:
    """A step that only has a token says None of everything else, and 0 of the NaNs."""
    one = output([*SHORT, *[None] * 7, 0, None, None, None, None])
    names = [
        name for name in dir(EngineOutput) if isinstance(getattr(EngineOutput, name), property)
    ]
    assert len(names) == 17
    told = {name: getattr(one, name) for name in names}
    assert told.pop("new_token_ids") == [42]
    assert told.pop("num_nans_in_logits") == 0
    assert set(told.values()) == {None}


def test_an_unknown_finish_reason_is_its_number() -> None:
    """A newer engine's reason ends the stream, and is not mistaken for another."""
    reason = output(["r", [], None, None, None, 99]).finish_reason
    assert reason == 99
    assert not isinstance(reason, FinishReason)


def test_finish_reasons_print_their_names_and_are_integers() -> None:
    """What a user prints is a word; what the wire needs is a number."""
    assert [str(reason) for reason in FinishReason] == [
        "STOP",
        "LENGTH",
        "ABORT",
        "ERROR",
        "REPETITION",
    ]
    assert f"{FinishReason.LENGTH}" == "LENGTH"
    assert f"{FinishReason.LENGTH:>8}" == "  LENGTH"
    assert int(FinishReason.LENGTH) == 1
    assert {1: "l"}[FinishReason.LENGTH] == "l"
    assert f"{FinishReason.LENGTH:d}" == "1"
    assert "STOP" in repr(FinishReason.STOP)


def test_outputs_show_and_compare_what_matters() -> None:
    """Two outputs are equal when request, tokens and end are; the text shows these."""
    first = EngineOutput("r", [1, 2], FinishReason.STOP, stop_reason=7)
    assert first == EngineOutput("r", (1, 2), 0, stop_reason=7, engine=4)
    assert first != EngineOutput("r", [1, 2], FinishReason.STOP, stop_reason=8)
    assert first != EngineOutput("q", [1, 2], FinishReason.STOP, stop_reason=7)
    assert first != "r"
    assert repr(first) == "<EngineOutput 'r' [1, 2], STOP>"
    assert repr(EngineOutput("r", [1])) == "<EngineOutput 'r' [1]>"
    assert copy.copy(first) == first
    with pytest.raises(TypeError):
        hash(first)


def test_an_output_can_be_cut_at_a_stop_string() -> None:
    """Tokens behind the stop string go; reason and string take their places."""
    one = output(["r", [1, 2, 3]])
    one.end_at("\n", 2)
    assert one.new_token_ids == [1, 2]
    assert (one.finish_reason, one.stop_reason) == (FinishReason.STOP, "\n")
    full = output(list(FULL))
    full.end_at("x", 0)
    assert (full.new_token_ids, full.stop_reason) == ([], "x")
    assert full.new_logprobs is not None


def test_completion_is_a_value() -> None:
    """A result of a batch compares by its fields and has defaults for the rest."""
    assert Completion("r", [1], FinishReason.STOP) == Completion("r", [1], FinishReason.STOP)
    assert Completion("r", [1], None).samples == ()


# -- arrays ----------------------------------------------------------------------------------------


def test_arrays_in_frames_of_their_own_are_not_copied() -> None:
    """The view is on the memory of the frame that came."""
    frame = struct.pack("<64f", *range(64))
    record = [*SHORT]
    record[4] = ["float32", [8, 8], 1]
    pooled = output(record, frame).pooling_output
    assert pooled is not None
    assert pooled.data is frame
    assert pooled.view().obj is frame
    assert pooled.view()[7, 7] == 63
    assert pooled.view().shape == (8, 8)


def test_both_places_of_logprobs() -> None:
    """An engine puts small arrays inline and large ones in frames, each for itself."""
    record = [*SHORT]
    record[2] = [["<i4", [1, 2], 2], LOGPROBS[1], ["<i8", [1], 1], [0, 1]]
    found = output(record, struct.pack("<q", 3), struct.pack("<2i", 8, 9)).new_logprobs
    assert found is not None
    assert found.token_ids.tolist() == [[8, 9]]
    assert found.ranks.tolist() == [3]
    assert found.cumulative_counts == [0, 1]


@pytest.mark.parametrize(
    ("dtype", "shape", "data", "items"),
    [
        ("bool", [2], b"\0\1", [False, True]),
        ("|u1", [2], b"\1\2", [1, 2]),
        ("int16", [1], b"\xff\xff", [-1]),
        ("<u2", [1], b"\xff\xff", [65535]),
        ("<f2", [1], struct.pack("<e", 0.5), [0.5]),
        ("float16", [2, 1, 2], struct.pack("<4e", 1, 2, 3, 4), [[[1, 2]], [[3, 4]]]),
        ("float16", [], struct.pack("<e", 1), [1]),
        ("float64", [1, 1], struct.pack("<d", 0.5), [[0.5]]),
        ("<i8", [], struct.pack("<q", -4), [-4]),
        ("bfloat16", [2], b"\1\2\3\4", [1, 2, 3, 4]),
        ("complex128", [1], bytes(16), [0] * 16),
        ("int32", [0, 3], b"", []),
    ],
)
def test_dtypes_of_both_conventions(
    dtype: str, shape: list[int], data: bytes, items: list[Any]
) -> None:
    """Names of numpy and of torch; bytes where Python has no such number."""
    tensor = Tensor.from_plain([dtype, shape, data], ())
    assert tensor.tolist() == items
    assert tensor.shape == tuple(shape)
    assert repr(tensor) == f"<Tensor {dtype} {shape}>"


@pytest.mark.parametrize(
    "value",
    [
        None,
        {},
        ["float32", [1]],
        ["float32", [1], bytes(4), 1],
        [1, [1], bytes(4)],
        ["float32", 1, bytes(4)],
        ["float32", [-1], bytes(4)],
        ["float32", [True], bytes(4)],
        ["float32", [2], bytes(4)],
        ["bfloat16", [2], bytes(5)],
        ["float32", [1], 0],
        ["float32", [1], 2],
        ["float32", [1], -1],
        ["float32", [1], True],
        ["float32", [1], "abcd"],
        ["float32", [2**40, 2**40], b""],
    ],
    ids=repr,
)
def test_a_malformed_array_is_a_protocol_error(value: Any) -> None:
    """Nothing is read beyond the bytes, and nothing else is raised."""
    with pytest.raises(ProtocolError):
        Tensor.from_plain(value, (b"main", b"\0\0\0\0"))


@pytest.mark.skipif(importlib.util.find_spec("numpy") is None, reason="numpy is not installed")
def test_numpy_shares_the_memory() -> None:
    """An array is made of it without a copy, read-only as the frame is."""
    numpy = importlib.import_module("numpy")
    frame = struct.pack("<4f", 1, 2, 3, 4)
    tensor = Tensor.from_plain(["<f4", [2, 2], 1], (b"main", frame))
    made = numpy.asarray(tensor.view())
    assert made.dtype == numpy.float32
    assert made.tolist() == [[1, 2], [3, 4]]
    assert not made.flags.owndata
    assert made.ctypes.data == numpy.frombuffer(frame, "<f4").ctypes.data
    assert Tensor.of(made).shape == (2, 2)
    with pytest.raises(ValueError, match="read-only"):
        made[0, 0] = 5


# -- what is malformed -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "record",
    [
        None,
        {},
        [],
        ["r"],
        [1, []],
        ["r", None],
        ["r", {}],
        ["r", ["a"]],
        ["r", [True]],
        ["r", [1, None]],
        ["r", [1.0, 2.0]],
        ["r", [], None, None, None, "stop"],
        ["r", [], None, None, None, True],
        ["r", [], None, None, None, 1.0],
    ],
    ids=repr,
)
def test_a_malformed_record_has_a_reason(record: Any) -> None:
    """What would mislead the stream is found before it is delivered."""
    assert output_fault(record)


@pytest.mark.parametrize(
    ("position", "value"),
    [
        (2, 5),
        (2, [INLINE]),
        (2, {}),
        (3, [1, 2, 3]),
        (4, "tensor"),
        (4, False),
        (6, 1.5),
        (6, True),
        (6, []),
        (7, {}),
        (8, []),
        (9, "x"),
        (10, 0),
        (11, []),
        (12, {}),
        (13, "9"),
        (13, True),
        (14, {"a": 1}),
        (15, 1),
        (16, []),
        (16, 0),
        (17, [1]),
    ],
)
def test_a_position_that_holds_what_it_cannot(position: int, value: Any) -> None:
    """The request's stream ends with an error that names it; nothing is passed on unchecked."""
    record = [*SHORT, *[None] * 12]
    record[position] = value
    with pytest.raises(ProtocolError):
        output(record)


_plain: st.SearchStrategy[Any] = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(0, 300), st.floats(), st.text(max_size=2), st.binary()
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=2), inner, max_size=2)
    ),
    max_leaves=6,
)


@given(st.lists(_plain, max_size=19))
def test_any_record_is_an_output_or_an_error(record: list[Any]) -> None:
    """No exception but the protocol's, and every field of what passes can be read."""
    if output_fault(["r", [1], *record]) is not None:
        return
    try:
        one = output(["r", [1], *record])
    except ProtocolError:
        return
    repr(one)
    for name in dir(one):
        value = getattr(one, name)
        if isinstance(value, Tensor):
            value.tolist()
        if isinstance(value, Logprobs):
            value.token_ids.tolist()
