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
    UtilityRequest,
    handshake_message,
)
from tests.golden.requests import REQUESTS, wire_id
from tests.golden.vectors import FAMILIES, Vector, jsonable, load

pytest.importorskip("msgspec")

MSGPACK = codec_named("msgpack")
CBOR = codec_named("cbor")
KEPT = {family: load(family) for family in FAMILIES}
PAYLOADS = [
    vector for vectors in KEPT.values() for vector in vectors if vector.payload != DEAD_SENTINEL
]
REPLIES = [vector for vector in KEPT["utility"] if vector.sender == "engine"]
OUTPUTS = [vector for vector in KEPT["requests"] if vector.sender == "engine"]


def _by_name(family: str, name: str) -> Vector:
    (found,) = [vector for vector in KEPT[family] if vector.name == name]
    return found


def _message(vector: Vector) -> Any:
    """The typed message, read from the frame."""
    plain = MSGPACK.decode(vector.payload)
    if vector.channel == "handshake":
        return Init.from_plain(plain) if vector.sender == "client" else handshake_message(plain)
    if vector.channel == "output":
        return Outputs.from_plain(plain)
    if vector.sender == "engine":
        return Registration.from_plain(plain)
    kinds: dict[bytes, Any] = {RequestType.ABORT: Abort, RequestType.UTILITY: UtilityRequest}
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


TYPED = [vector for vector in PAYLOADS if vector.frames[0] != RequestType.ADD]


def test_enough_is_kept() -> None:
    """The files hold what they are there for."""
    assert {family: len(vectors) for family, vectors in KEPT.items()} == {
        "handshake": 8,
        "utility": 56,
        "requests": 25,
        "death": 1,
    }
    names = [(family, vector.name) for family in FAMILIES for vector in KEPT[family]]
    assert len(set(names)) == len(names)


def test_decoded() -> None:
    """A payload is the value that was kept beside it."""
    for vector in PAYLOADS:
        assert jsonable(MSGPACK.decode(vector.payload)) == vector.value, vector.name


def test_written_again() -> None:
    """A typed message, written again, gives the bytes that crossed, in both directions.

    Arrays inside of a message are the exception: engines write small ones as an extension type,
    which is read as bytes.
    """
    differ = []
    for vector in TYPED:
        again = MSGPACK.encode(_message(vector).to_plain())
        if again != vector.payload:
            differ.append(vector.name)
            assert MSGPACK.decode(again) == MSGPACK.decode(vector.payload), vector.name
    assert differ == ["logprobs: output 1", "logprobs: output 2"]


def test_the_same_through_cbor() -> None:
    """The other dialect carries the same message."""
    for vector in TYPED:
        message = _message(vector)
        plain = CBOR.decode(CBOR.encode(message.to_plain()))
        assert type(message).from_plain(plain) == message, vector.name


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


@pytest.mark.parametrize("sent", REQUESTS, ids=[request.request_id for request in REQUESTS])
def test_request(sent: EngineRequest) -> None:
    """A request is written as it was when real engines took it and answered as asked."""
    name = wire_id(sent.request_id)
    extra: list[bytes] = []
    frame = MSGPACK.encode(sent.to_plain(name, 0, extra))
    kept = _by_name("requests", sent.request_id)
    assert (RequestType.ADD, frame, *extra) == kept.frames


def test_outputs() -> None:
    """Outputs are read, arrays and extra frames too."""
    for vector in OUTPUTS:
        message = Outputs.from_plain(MSGPACK.decode(vector.payload))
        assert message.engine_index == vector.engine
        assert message.outputs, vector.name
        for record in message.outputs:
            assert output_fault(record) is None, vector.name
            assert _output(record, vector).new_token_ids == record[1], vector.name


def test_how_requests_ended() -> None:
    """Each reason for an end is there, as an engine says it."""
    ends = {
        vector.name.split(":")[0]: [FinishReason(record[5]) for record in vector.value[1]]
        for vector in OUTPUTS
        if vector.value[1][-1][5] is not None
    }
    assert ends == {
        "defaults": [FinishReason.LENGTH],
        "sampling": [FinishReason.LENGTH],
        "stopped": [FinishReason.STOP],
        "logprobs": [FinishReason.LENGTH],
        "adapter": [FinishReason.LENGTH],
        "statistics": [FinishReason.LENGTH],
        "aborted by a pause": [FinishReason.ABORT],
        "failed": [FinishReason.ERROR],
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
