"""The reference engine answers what a real vLLM engine was asked as that one did."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.golden.vectors import Vector, jsonable, load
from tests.tools.peer import Peer, thread_engine

pytest.importorskip("msgspec")

READY = {"world_size": 1, "block_size": 128}
"""Of the engines that were recorded."""


@pytest.fixture
def peer() -> Iterator[Peer]:
    with (
        Peer("msgpack") as peer,
        thread_engine(peer.address, codec="msgpack", ready=READY),
    ):
        peer.complete()
        yield peer


def of_engine_0(family: str, sender: str) -> list[Vector]:
    return [one for one in load(family) if one.engine == 0 and one.sender == sender]


def send(peer: Peer, vector: Vector) -> None:
    peer.input.send_multipart([b"\0\0", *vector.frames])


def test_utility_replies(peer: Peer) -> None:
    """Every call has the same answer, or the same text of failure, as from a real engine."""
    replies = {tuple(one.value[4][:1]): one.value for one in of_engine_0("utility", "engine")}
    calls = of_engine_0("utility", "client")
    assert len(calls) > 20
    for call in calls:
        send(peer, call)
        reply = peer.codec.decode(peer.output.recv())
        expected = replies[(call.value[1],)]
        assert reply[4] == expected[4], call.name
        assert reply[:3] + reply[5:] == expected[:3] + expected[5:]


def masked(output: Any) -> Any:
    """What of an output does not depend on the model."""
    output = jsonable(output)
    output[1] = len(output[1])
    for position in (2, 3):
        if output[position] is not None:
            output[position] = [
                array and [*array[:2], array[2] if isinstance(array[2], int) else "inline"]
                for array in output[position]
            ]
    return output


@pytest.mark.parametrize(
    "name", ["defaults", "sampling", "stopped", "logprobs", "adapter", "failed"]
)
def test_outputs(peer: Peer, name: str) -> None:
    """Outputs have the same parts in the same places as a real engine's."""
    (request,) = [one for one in of_engine_0("requests", "client") if one.name == name]
    prefix = f"{name}: output "
    expected = {
        int(one.name.removeprefix(prefix)): one
        for one in of_engine_0("requests", "engine")
        if one.name.startswith(prefix)
    }
    assert expected
    send(peer, request)
    for number in range(1, max(expected) + 1):
        frames = peer.output.recv_multipart()
        message = peer.codec.decode(frames[0])
        if number in expected:
            real = expected[number]
            assert list(map(len, frames[1:])) == list(map(len, real.frames[1:]))
            assert masked(message[1][0]) == masked(json.loads(json.dumps(real.value[1][0])))
            assert message[2] == real.value[2]
            assert message[4:] == real.value[4:]
    assert not peer.output.poll(0)


def test_abort_by_a_pause(peer: Peer) -> None:
    """A pause ends a request with the same message; an abort by the client with none."""
    requests = {one.name: one for one in of_engine_0("requests", "client")}
    (expected,) = [
        one for one in of_engine_0("requests", "engine") if one.name == "aborted by a pause: output"
    ]
    assert peer.call("pause_scheduler", "keep") is None
    send(peer, requests["aborted by the client"])
    send(peer, requests["aborted by the client: ABORT"])
    assert peer.call("resume_scheduler") is None
    assert peer.call("pause_scheduler", "keep") is None
    send(peer, requests["aborted by a pause"])
    pause = peer.ask("pause_scheduler")
    message = peer.codec.decode(peer.output.recv())
    assert message[:3] + message[4:] == expected.value[:3] + expected.value[4:]
    assert peer.reply() == (pause, None, None)
