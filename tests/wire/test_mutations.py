"""Every record with every position replaced by everything that does not belong there.

Nothing but ``ProtocolError`` comes out of what reads them, and the core of a client goes on.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from engine_client.dispatch.core import Core
from engine_client.dispatch.registry import Registry
from engine_client.dispatch.requests import PendingRequest, RequestTable
from engine_client.dispatch.waiting import Startup
from engine_client.engines import engine_id
from engine_client.errors import EngineClientError, ProtocolError
from engine_client.output import EngineOutput, output_fault
from engine_client.stats import ClientStats
from engine_client.wire.codec import codec_named
from engine_client.wire.messages import (
    Abort,
    Hello,
    Init,
    Outputs,
    Ready,
    Registration,
    StartWave,
    UtilityReply,
    UtilityRequest,
    handshake_message,
)

JUNK: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    2**63,
    2**64 - 1,
    -(2**63),
    1.5,
    float("nan"),
    "",
    "text",
    "é" * 300,
    b"",
    b"\xff\x00",
    [],
    [None],
    [[[]]],
    {},
    {"a": 1},
    {0: []},
)
INT64 = ["<i8", [1, 2], b"\x01" + b"\x00" * 7 + b"\x02" + b"\x00" * 7]
FLOAT32 = ["<f4", [1, 2], b"\x00" * 8]
RANKS = ["<i4", [1], b"\x01\x00\x00\x00"]
LOGPROBS = [INT64, FLOAT32, RANKS, None]
VECTOR = ["float32", [2], b"\x00" * 8]
OUTPUT = [
    *("r-00000001", [5], LOGPROBS, LOGPROBS, VECTOR, 1, "stop", [[0, 1.5]], {"p": 1}),
    *({"h": "v"}, {"s": 1}, {"k": 2}, INT64, 0, [[1]], [1], {"x": 1}, INT64),
]
STATS = {"num_running_reqs": 1, "num_waiting_reqs": 0}
OUTPUTS = [0, [OUTPUT], STATS, 1.5, [7, None, [None, 1]], ["r-00000001"], 1, 2, "v1"]


def read_output(plain: Any) -> object:
    """What a stream makes of a record that is no fault at first sight."""
    fault = output_fault(plain)
    if fault is not None:
        raise ProtocolError(fault)
    return EngineOutput.from_plain(
        plain, [], request_id="r", engine=0, timestamp=1.5, weight_version=None
    )


RECORDS: dict[str, tuple[Callable[[Any], object], Any]] = {
    "handshake": (handshake_message, Hello().to_plain()),
    "ready": (handshake_message, Ready(parallel_config_hash="h").to_plain()),
    "init": (
        Init.from_plain,
        Init(("i",), ("o",), "ci", "co", "st", {"data_parallel_size": 2}).to_plain(),
    ),
    "registration": (
        Registration.from_plain,
        {"data_parallel_size": 2, "max_model_len": 64, "vllm_version": "0.32.0", "more": [1]},
    ),
    "utility request": (UtilityRequest.from_plain, [0, 7, "echo", [1, {"a": [2]}]]),
    "utility reply": (UtilityReply.from_plain, [7, None, [["builtins", "int"], 1]]),
    "abort": (Abort.from_plain, ["r1", "r2"]),
    "start of a wave": (StartWave.from_plain, [3, 1]),
    "outputs": (Outputs.from_plain, OUTPUTS),
    "output": (read_output, OUTPUT),
}


def mutations(value: Any) -> Iterator[Any]:
    """The value with each position in it replaced, removed or doubled, one at a time."""
    yield from JUNK
    if isinstance(value, list):
        for at, item in enumerate(value):
            yield value[:at]
            yield [*value[:at], *value[at + 1 :]]
            yield [*value[: at + 1], *value[at:]]
            for other in mutations(item):
                yield [*value[:at], other, *value[at + 1 :]]
        yield [*value, "more"]
    elif isinstance(value, dict):
        for key, item in value.items():
            yield {k: v for k, v in value.items() if k != key}
            yield {**{k: v for k, v in value.items() if k != key}, 7: item}
            for other in mutations(item):
                yield {**value, key: other}


def look(output: EngineOutput) -> None:
    """Read everything that an output has to say; its parts are read when they are asked for."""
    for name in dir(output):
        if not name.startswith("__"):
            getattr(output, name)
    repr(output)


@pytest.mark.parametrize("name", RECORDS)
def test_only_protocol_errors_come_out(name: str) -> None:
    """Whatever is at whatever position, a record is read or refused."""
    read, plain = RECORDS[name]
    refused = 0
    for mutated in mutations(copy.deepcopy(plain)):
        try:
            made = read(mutated)
            if isinstance(made, EngineOutput):
                look(made)
        except ProtocolError:
            refused += 1
    assert refused


USUAL = ["r-00000001", [5], *[None] * 11, 0, *[None] * 4]
LAST = ["r-00000002", [5, 6], None, None, None, 1, 7, *[None] * 6, 0, *[None] * 4]


@pytest.mark.parametrize("dialect", ["cbor", "msgpack"])
def test_the_short_way_to_read_outputs_is_as_good_as_the_long_one(dialect: str) -> None:
    """Only what needs no further look is taken for tokens only, and all else is the same."""
    codec = codec_named(dialect)
    short = 0
    for mutated in mutations([0, [USUAL, LAST], STATS, 1.5, [7, None, [None, [1]]], None]):
        frame = codec.encode(mutated)
        try:
            plain = Outputs.from_plain(codec.decode(frame))
        except ProtocolError:
            with pytest.raises(ProtocolError):
                Outputs.decode(codec, frame)
            continue
        made = Outputs.decode(codec, frame)
        # By their looks: not a number is no other.
        assert repr(made._replace(others=None)) == repr(plain)
        for number, record in enumerate(made.outputs):
            if number not in (made.others or ()):
                output = read_output(record)
                assert isinstance(output, EngineOutput)
                assert not set(output._typed or ()) - {0, 1, 5, 6, 13}
                short += 1
    assert short > 100
    assert Outputs.decode(codec, codec.encode([0, [USUAL, LAST]])).others == set()


class Mutated:
    """A core with one living engine, one call and one request."""

    def __init__(self) -> None:
        self.registry = Registry((0, 1), 2**20)
        self.requests = RequestTable(self.registry, 1000)
        self.stats = ClientStats()
        self.core = Core(
            (0, 1), self.registry, self.requests, Startup(), self.stats, codec="auto",
            client_index=0, init=Init(("i",), ("o",)), call_ids=itertools.count(10**9),
            max_message_size=2**20,
        )  # fmt: skip
        self.codec = codec_named("cbor")
        for index in (0, 1):
            self.core.handshake_frames(
                [engine_id(index), self.codec.encode(Hello().to_plain())], 1.0
            )
            self.core.connected("input", 10 + index, 1.0)
            self.register(index, {"data_parallel_size": 1})
            self.core.connected("output", 20 + index, 1.0)
            self.say(index, [index])

    def register(self, index: int, plain: Any) -> None:
        self.core.registration(engine_id(index), [self.codec.encode(plain)], 10 + index, 1.0)

    def say(self, index: int, plain: Any) -> None:
        self.core.output([self.codec.encode(plain)], 20 + index, 2.0)

    def request(self) -> PendingRequest:
        made = PendingRequest("r", "r-00000001", {"cbor": [b""]}, 1.0)
        assert self.requests.add(made, 0, lambda engine: None)
        made.sent = True
        return made


def test_the_core_goes_on_whatever_an_engine_says() -> None:
    """It delivers, counts or fails each mutated message, and both engines serve the next one."""
    rig = Mutated()
    for number, mutated in enumerate(mutations(copy.deepcopy(OUTPUTS))):
        if not rig.requests.live():
            request = rig.request()
        rig.say(0, mutated)
        rig.core.abort()
        rig.core.outgoing.clear()
        if number % 50 == 0:
            assert rig.registry.alive() == (0, 1)
            while request.mailbox.items:
                delivery = request.mailbox.items.popleft()
                assert delivery.error is None or isinstance(delivery.error, EngineClientError)
    assert rig.registry.alive() == (0, 1)
    received = rig.stats.received
    rig.say(0, [0, [], None, 0.0])
    rig.say(1, [1, [], None, 0.0])
    assert rig.stats.received == received + 2


@pytest.mark.parametrize("name", ["handshake", "ready", "registration"])
def test_the_core_goes_on_whatever_comes_at_the_start(name: str) -> None:
    """Each is taken or noted, and the engine can still start."""
    _, plain = RECORDS[name]
    codec = codec_named("cbor")
    rig = Mutated()
    for mutated in mutations(copy.deepcopy(plain)):
        payload = codec.encode(mutated)
        if name == "registration":
            rig.core.registration(engine_id(1), [payload], 99, 3.0)
        else:
            rig.core.handshake_frames([engine_id(1), payload], 3.0)
        rig.core.outgoing.clear()
    assert 0 in rig.registry.alive()
