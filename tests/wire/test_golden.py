"""What real vLLM engines sent and accepted is read, and written again, to the byte."""

from __future__ import annotations

from typing import Any

import pytest

from engine_client import EngineOutput, EngineRequest, FinishReason
from engine_client.output import output_fault
from engine_client.tensors import Tensor
from engine_client.wire.codec import codec_named, dialect_of_map, peek_reply
from engine_client.wire.messages import (
    DEAD_SENTINEL,
    Abort,
    Init,
    Outputs,
    Registration,
    RequestType,
    StartWave,
    UtilityRequest,
    handshake_message,
)
from tests.golden.kinds import kinds, missing
from tests.golden.requests import READ, READ_AS, RUN, wire_id
from tests.golden.vectors import FAMILIES, Vector, jsonable, load

msgspec = pytest.importorskip("msgspec")

MSGPACK = codec_named("msgpack")
CBOR = codec_named("cbor")
KEPT = {family: load(family) for family in FAMILIES}
KINDS = kinds()
ALL = [vector for vectors in KEPT.values() for vector in vectors]
PAYLOADS = [vector for vector in ALL if vector.encoded]
REPLIES = [vector for vector in KEPT["utility"] if vector.sender == "engine"]
STEPS = [vector for vector in PAYLOADS if vector.channel == "output"]
OUTPUTS = [vector for vector in KEPT["requests"] if vector.sender == "engine"]
REQUESTS = [request for requests in RUN.values() for request in requests]


def _by_name(family: str, name: str) -> Vector:
    (found,) = [vector for vector in KEPT[family] if vector.name == name]
    return found


def _message(vector: Vector) -> Any:
    """The typed message, read from the frame."""
    plain = MSGPACK.decode(vector.payload)
    if vector.channel == "handshake":
        return Init.from_plain(plain) if vector.sender == "client" else handshake_message(plain)
    if vector.channel in ("output", "coordinator_output"):
        return Outputs.from_plain(plain)
    if vector.sender == "engine":
        return Registration.from_plain(plain)
    kinds: dict[bytes, Any] = {
        RequestType.ABORT: Abort,
        RequestType.UTILITY: UtilityRequest,
        RequestType.START_DP_WAVE: StartWave,
    }
    return kinds[vector.frames[0]].from_plain(plain)


def _output(record: list[Any], vector: Vector) -> EngineOutput:
    return EngineOutput.from_plain(
        record,
        vector.frames,
        request_id="mine",
        engine=vector.engine,
        timestamp=0.0,
        weight_version=None,
    )


def _rows(tensor: Tensor) -> Any:
    return tensor.view().tolist()


TYPED = [
    vector
    for vector in PAYLOADS
    if vector.frames[0] != RequestType.ADD and vector.channel != "stats"
]


def _has_extension(value: Any) -> bool:
    """Whether an array's bytes are in it, which engines write as an extension type."""
    if isinstance(value, (list, dict)):
        return any(map(_has_extension, value.values() if isinstance(value, dict) else value))
    return isinstance(value, msgspec.msgpack.Ext)


def _says_types(vector: Vector) -> bool:
    """Whether it is a reply that says the types of its values."""
    reply = vector.value[4] if vector.channel == "output" else None
    return reply is not None and reply[2] is not None and reply[2][0] is not None


# -- what is kept ----------------------------------------------------------------------------------


def test_enough_is_kept() -> None:
    """There is a message of every kind."""
    assert missing(ALL) == []


def test_a_kind_would_be_missed() -> None:
    """Without the messages of a kind, that kind is named as missing."""
    for kind, fits in KINDS.items():
        left = [vector for vector in ALL if not fits(vector)]
        assert len(left) < len(ALL), kind
        assert missing(left, {kind: fits}) == [kind]


def test_what_a_family_is_for_would_be_missed() -> None:
    """Without a file, what only it has is named."""
    left = [vector for family in FAMILIES if family != "death" for vector in KEPT[family]]
    assert missing(left) == ["death"]
    left = [vector for family in FAMILIES if family != "coordinator" for vector in KEPT[family]]
    assert {"gate of vLLM's coordinator", "published loads"} <= set(missing(left))


def test_kept_with_how_it_was_made() -> None:
    """Each message has a name of its own, the release of vLLM and how it was made."""
    names = [(family, vector.name) for family in FAMILIES for vector in KEPT[family]]
    assert len(set(names)) == len(names)
    assert {vector.vllm for vector in ALL} == {"0.32.0"}
    for vector in ALL:
        # Only what no engine was there for is not from an engine, or for one.
        written = "vLLM's encoder" in vector.how or "vLLM's decoder" in vector.how
        assert written == (vector in KEPT["encoded"]), vector.name
        assert written or vector.how.startswith(("sent by", "written by this project's"))


# -- read and written ------------------------------------------------------------------------------


def test_decoded() -> None:
    """A payload is the value that was kept beside it."""
    for vector in PAYLOADS:
        assert jsonable(MSGPACK.decode(vector.payload)) == vector.value, vector.name


def test_written_again() -> None:
    """A typed message, written again, gives the bytes that crossed, in both directions.

    Two things that engines write are read, and never written: small arrays as an extension type,
    and the types of a reply's values.
    """
    differ = []
    for vector in TYPED:
        again = MSGPACK.encode(_message(vector).to_plain())
        if again == vector.payload:
            continue
        differ.append(vector)
        assert vector.sender == "engine", vector.name
        if not _says_types(vector):
            assert MSGPACK.decode(again) == MSGPACK.decode(vector.payload), vector.name
    assert differ == [
        vector
        for vector in TYPED
        if _has_extension(msgspec.msgpack.decode(vector.payload)) or _says_types(vector)
    ]
    assert 5 < len(differ) < 30


def test_published_again() -> None:
    """What a coordinator publishes and what it is told have no type: the codec does it."""
    stats = [vector for vector in PAYLOADS if vector.channel == "stats"]
    assert len(stats) >= 6
    for vector in stats:
        assert MSGPACK.encode(MSGPACK.decode(vector.payload)) == vector.payload, vector.name


def test_the_same_through_cbor() -> None:
    """The other dialect carries every payload: the same plain value, the same typed message."""
    for vector in PAYLOADS:
        plain = MSGPACK.decode(vector.payload)
        assert repr(CBOR.decode(CBOR.encode(plain))) == repr(plain), vector.name
    for vector in TYPED:
        message = _message(vector)
        plain = CBOR.decode(CBOR.encode(message.to_plain()))
        assert type(message).from_plain(plain) == message, vector.name


def test_outputs_through_cbor() -> None:
    """A step's outputs have the same parts in both dialects, arrays in the same frames."""
    for vector in STEPS:
        twin = CBOR.decode(CBOR.encode(MSGPACK.decode(vector.payload)))
        for one, other in zip(
            _message(vector).outputs, Outputs.from_plain(twin).outputs, strict=True
        ):
            assert _shown(_output(one, vector)) == _shown(_output(other, vector)), vector.name


def _shown(output: EngineOutput) -> dict[str, str]:
    """All parts of an output, as text."""
    names = [name for name in dir(output) if not name.startswith("_")]
    parts = {name: getattr(output, name) for name in names}
    return {name: repr(part) for name, part in parts.items() if not callable(part)}


def test_replies_are_recognised_by_their_beginning() -> None:
    """Engine and call are read from the first bytes of a reply that was cut off."""
    for vector in REPLIES:
        expected = vector.engine, vector.value[4][0]
        timestamp = vector.payload.index(b"\xc0\xcb") + 2
        for frame in (vector.payload, vector.payload[: timestamp + 8 + 10]):
            assert peek_reply(frame, "msgpack") == expected, vector.name


def test_dialect() -> None:
    """HELLO and registration tell their dialect by the first byte."""
    for vector in KEPT["handshake"]:
        assert dialect_of_map(vector.payload) == "msgpack"


def test_replies_answer_their_calls() -> None:
    """Each call was answered once, under its id, by the engine that got it; one was overtaken."""
    asked = [(v.engine, v.value[1]) for v in KEPT["utility"] if v.sender == "client"]
    answered = [(v.engine, v.value[4][0]) for v in REPLIES]
    assert sorted(asked) == sorted(answered)
    order = [call_id for _, call_id in answered]
    assert order.index(9002) < order.index(9001)  # a pause waits, later calls do not


# -- requests --------------------------------------------------------------------------------------


def _frames(sent: EngineRequest) -> tuple[bytes, ...]:
    extra: list[bytes] = []
    client, wave = READ_AS if sent in READ else (0, 0)
    plain = sent.to_plain(wire_id(sent.request_id), client, extra, wave=wave)
    return RequestType.ADD, MSGPACK.encode(plain), *extra


def _named(requests: list[EngineRequest]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("sent", requests, ids=[one.request_id for one in requests])


@_named(REQUESTS)
def test_request(sent: EngineRequest) -> None:
    """A request is written as it was when real engines took it and answered as asked."""
    assert _frames(sent) == _by_name("requests", sent.request_id).frames


@_named(READ)
def test_request_that_vllm_read(sent: EngineRequest) -> None:
    """A request is written as it was when vLLM's decoder read it."""
    assert _frames(sent) == _by_name("encoded", sent.request_id).frames


@_named([*REQUESTS, *READ])
def test_request_as_vllm_writes_it(sent: EngineRequest) -> None:
    """vLLM means the same: what it read from ours says, in its own words, what ours said.

    It writes small arrays inline, and parameters that its own constructor fills in.
    """
    ours = _with_arrays(MSGPACK.decode(_frames(sent)[1]), _frames(sent)[1:])
    by_vllm = _by_name("encoded", f"{sent.request_id}, by vLLM")
    theirs = _with_arrays(MSGPACK.decode(by_vllm.payload), by_vllm.bodies)
    if ours[3] is not None:
        filled: dict[str, Any] = {"stop": [], "stop_token_ids": [], "bad_words": []}
        filled["skip_reading_prefix_cache"] = theirs[3]["skip_reading_prefix_cache"]
        theirs[3] = {
            name: value
            for name, value in theirs[3].items()
            if name in ours[3] or value != filled.get(name)
        }
    assert theirs == ours


def _with_arrays(value: Any, frames: tuple[bytes, ...]) -> Any:
    """A value whose arrays hold their bytes, wherever those came."""
    if isinstance(value, dict):
        return {key: _with_arrays(item, frames) for key, item in value.items()}
    if not isinstance(value, list):
        return value
    if len(value) == 3 and type(value[0]) is str and type(value[1]) is list:
        tensor = Tensor.from_plain(value, frames)
        return [tensor.dtype, list(tensor.shape), bytes(tensor.data)]
    return [_with_arrays(item, frames) for item in value]


@_named([*REQUESTS, *READ])
def test_request_through_cbor(sent: EngineRequest) -> None:
    """The other dialect carries the same request."""
    plain = sent.to_plain(wire_id(sent.request_id), 0, [])
    assert CBOR.decode(CBOR.encode(plain)) == MSGPACK.decode(MSGPACK.encode(plain))


# -- outputs ---------------------------------------------------------------------------------------


def test_outputs() -> None:
    """Outputs are read, arrays and extra frames too."""
    read = 0
    for vector in STEPS:
        message = Outputs.from_plain(MSGPACK.decode(vector.payload))
        assert message.engine_index == vector.engine, vector.name
        for record in message.outputs:
            assert output_fault(record) is None, vector.name
            output = _output(record, vector)
            assert output.new_token_ids == record[1], vector.name
            assert _shown(output), vector.name
            read += 1
    assert read > 50


def test_how_requests_ended() -> None:
    """Each reason for an end is there, as an engine says it."""
    ends = {
        vector.name.split(":")[0]: [FinishReason(record[5]) for record in vector.value[1]]
        for vector in OUTPUTS
        if vector.value[1] and vector.value[1][-1][5] is not None
    }
    assert ends == {
        "defaults": [FinishReason.LENGTH],
        "sampling": [FinishReason.LENGTH],
        "stopped": [FinishReason.STOP],
        "logprobs": [FinishReason.LENGTH],
        "adapter": [FinishReason.LENGTH],
        "end of sequence": [FinishReason.STOP],
        "repeated": [FinishReason.REPETITION],
        "structured": [FinishReason.STOP],
        "grammar that is none": [FinishReason.ERROR],
        "embeddings": [FinishReason.LENGTH],
        "many logprobs": [FinishReason.LENGTH],
        "session": [FinishReason.LENGTH],
        "embed": [FinishReason.STOP],
        "token_embed": [FinishReason.STOP],
        "statistics": [FinishReason.LENGTH],
        "aborted by a pause": [FinishReason.ABORT],
        "failed": [FinishReason.ERROR],
        "too late": [FinishReason.ABORT],
        "aborted by SIGTERM": [FinishReason.ABORT],
    }


def test_logprobs() -> None:
    """Small arrays lie inside of the message, large ones in frames behind it."""
    vector = _by_name("requests", "logprobs: output 1")
    (record,) = MSGPACK.decode(vector.payload)[1]
    assert len(vector.frames) == 3
    output = _output(record, vector)
    assert output.new_logprobs is not None
    assert output.new_logprobs.token_ids.shape == (1, 3)
    assert _rows(output.new_logprobs.token_ids)[0][0] == output.new_token_ids[0]
    prompt = output.new_prompt_logprobs_tensors
    assert prompt is not None
    assert prompt.token_ids.shape == prompt.logprobs.shape == (11, 6)
    assert [row[0] for row in _rows(prompt.token_ids)] == list(range(11, 22))
    assert all(value < 0 for row in _rows(prompt.logprobs) for value in row)


def test_death() -> None:
    """A dying engine's last message is one frame, which is no payload."""
    assert [vector.frames for vector in KEPT["death"]] == [(DEAD_SENTINEL,)]
