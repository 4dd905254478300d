"""Record messages from two real vLLM engines into this folder.

    tests/interop/run record

It drives the engines with the wire layer and three sockets, not with the client, so that every
frame is seen. Engine 1 reports scheduler statistics, engine 0 does not.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import zmq

from engine_client.engines import engine_id, engine_index
from engine_client.request import EngineRequest
from engine_client.sampling import SamplingParams
from engine_client.wire.codec import codec_named
from engine_client.wire.messages import (
    DEAD_SENTINEL,
    Abort,
    Init,
    RequestType,
    UtilityReply,
    UtilityRequest,
)
from tests.golden.requests import ADAPTER, REQUESTS, wire_id
from tests.golden.vectors import FOLDER, Vector
from tests.interop.engines import EngineGroup, vllm_engines
from tests.interop.environment import DISTRIBUTION, VERSION

CODEC = codec_named("msgpack")
PATIENCE = 300.0
CALLS: list[tuple[int, int, str, list[Any]]] = [
    (0, 0, "is_sleeping", []),
    (1, 2**53 - 1, "is_scheduler_paused", []),
    (0, 2**64 - 1, "get_weight_version", []),
    (1, 300, "set_weight_version", ["v2"]),
    (0, 301, "get_supported_tasks", []),
    (0, 302, "get_kv_cache_group_metadata", []),
    (0, 303, "collective_rpc", ["check_health", None, [], None]),
    (0, 304, "collective_rpc", ["no_such_method", 1.5, [], {}]),
    (0, 305, "add_lora", [ADAPTER.to_plain()]),
    (0, 306, "add_lora", [["none", 4, "/nonexistent", None, False, False]]),
    (0, 307, "add_lora", [["short", 4, "/nonexistent"]]),
    (0, 308, "list_loras", []),
    (0, 309, "pin_lora", [1]),
    (0, 310, "remove_lora", [9]),
    (0, 311, "reset_prefix_cache", [False, False]),
    (0, 312, "sleep", [1, "abort"]),
    (0, 313, "wake_up", [["weights"]]),
    (0, 314, "wake_up", [None]),
    (0, 315, "sleep", [0, "bogus"]),
    (0, 316, "no_such_method", []),
    (0, 317, "is_sleeping", [1, 2]),
    (0, 318, "profile", [True, "prefix", None, None]),
]


class Recorder:
    """The frontend's three sockets, and what crossed them."""

    def __init__(self, address: str) -> None:
        self.context = zmq.Context()
        self.handshake = self._bind(zmq.ROUTER, address)
        self.input = self._bind(zmq.ROUTER, "tcp://127.0.0.1:*")
        self.output = self._bind(zmq.PULL, "tcp://127.0.0.1:*")
        self.vectors: dict[str, list[Vector]] = {}

    def _bind(self, kind: int, address: str) -> zmq.Socket[bytes]:
        sock = self.context.socket(kind)
        sock.linger = 0
        sock.bind(address)
        return sock

    def close(self) -> None:
        """Close sockets and context."""
        self.context.destroy(linger=0)

    def note(
        self,
        family: str,
        name: str,
        sender: str,
        engine: int,
        channel: str,
        frames: Sequence[bytes],
    ) -> Any:
        """Keep a message; return its payload, decoded."""
        vector = Vector(name, sender, engine, channel, tuple(frames), None)
        payload = vector.payload
        value = None if payload == DEAD_SENTINEL else CODEC.decode(payload)
        kept = Vector(name, sender, engine, channel, tuple(frames), value)
        self.vectors.setdefault(family, []).append(kept)
        return value

    def greet(self, count: int) -> None:
        """Do the handshake with all engines."""
        init = Init((self._endpoint(self.input),), (self._endpoint(self.output),))
        ready: set[int] = set()
        registered: set[int] = set()
        poller = zmq.Poller()
        poller.register(self.handshake, zmq.POLLIN)
        poller.register(self.input, zmq.POLLIN)
        end = time.monotonic() + PATIENCE
        while len(ready & registered) < count:
            if time.monotonic() > end:
                raise TimeoutError("the engines did not start")
            for sock, _ in poller.poll(1000):
                identity, frame = sock.recv_multipart()
                engine = engine_index(identity)
                assert engine is not None
                if sock is self.input:
                    self.note(
                        "handshake", f"registration {engine}", "engine", engine, "input", [frame]
                    )
                    registered.add(engine)
                    continue
                status = CODEC.decode(frame)["status"]
                self.note("handshake", f"{status} {engine}", "engine", engine, "handshake", [frame])
                if status == "HELLO":
                    answer = CODEC.encode(init.to_plain())
                    self.note(
                        "handshake", f"INIT {engine}", "client", engine, "handshake", [answer]
                    )
                    self.handshake.send_multipart([identity, answer])
                else:
                    ready.add(engine)

    def _endpoint(self, sock: zmq.Socket[bytes]) -> str:
        return sock.get_string(zmq.LAST_ENDPOINT)

    def send(self, engine: int, frames: Sequence[bytes]) -> None:
        """Send a request of any type to an engine."""
        self.input.send_multipart([engine_id(engine), *frames])

    def receive(self, fits: Callable[[list[Any]], bool]) -> tuple[list[Any], list[bytes]]:
        """Return the next output message that fits; others are dropped."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            if self.output.poll(1000):
                frames = self.output.recv_multipart()
                if frames == [DEAD_SENTINEL]:
                    return [], frames
                message = CODEC.decode(frames[0])
                if fits(message):
                    return message, frames
        raise TimeoutError("the engine did not answer")

    def ask(self, engine: int, call_id: int, method: str, args: list[Any], name: str) -> None:
        """Send a utility call and keep it."""
        payload = CODEC.encode(UtilityRequest(0, call_id, method, args).to_plain())
        frames = [RequestType.UTILITY, payload]
        self.note("utility", name, "client", engine, "input", frames)
        self.send(engine, frames)

    def reply(self, call_ids: Sequence[int]) -> tuple[int, list[bytes]]:
        """Return the next reply to one of these calls."""
        message, frames = self.receive(lambda m: m[4] is not None and m[4][0] in call_ids)
        return UtilityReply.from_plain(message[4]).call_id, frames

    def call(self, engine: int, call_id: int, method: str, args: list[Any]) -> None:
        """Keep a utility call and its reply."""
        name = f"{method}, call {call_id}"
        self.ask(engine, call_id, method, args, name)
        self.note("utility", f"{name}: reply", "engine", engine, "output", self.reply([call_id])[1])

    def add(self, engine: int, request: EngineRequest) -> str:
        """Send a request and keep it; return the id on the wire."""
        name = wire_id(request.request_id)
        extra: list[bytes] = []
        payload = CODEC.encode(request.to_plain(name, 0, extra))
        frames = [RequestType.ADD, payload, *extra]
        self.note("requests", request.request_id, "client", engine, "input", frames)
        self.send(engine, frames)
        return name

    def outputs(self, engine: int, name: str, label: str) -> None:
        """Keep the first two outputs of a request and its last."""
        for number in range(1, 1000):
            message, frames = self.receive(lambda m: any(o[0] == name for o in m[1]))
            last = any(output[0] == name and output[5] is not None for output in message[1])
            if number <= 2 or last:
                where = f"{label}: output {number}"
                self.note("requests", where, "engine", engine, "output", frames)
            if last:
                return

    def save(self) -> None:
        """Write a file for each family."""
        for family, vectors in self.vectors.items():
            content = {
                "made_by": "tests/golden/record.py",
                "engines": f"vLLM {VERSION} (the distribution {DISTRIBUTION} on Linux), run by "
                f"tests/interop/engines.py: a Llama of two layers with random weights",
                "dialect": "msgpack",
                "messages": [vector.to_json() for vector in vectors],
            }
            path = FOLDER / f"{family}.json"
            path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
            print(f"{path.name}: {len(vectors)} messages, {path.stat().st_size} bytes")


def record(recorder: Recorder, group: EngineGroup) -> None:
    """Have all of it said."""
    group.adapter("alpha")
    recorder.greet(2)
    for engine, call_id, method, args in CALLS:
        recorder.call(engine, call_id, method, args)
    for request in REQUESTS:
        recorder.outputs(0, recorder.add(0, request), request.request_id)
    _with_statistics(recorder)
    _overtaken(recorder)
    _aborted(recorder)
    _refused_by_the_engine(recorder)
    recorder.send(1, [b"\x04", CODEC.encode([])])
    _, frames = recorder.receive(lambda message: False)
    recorder.note("death", "after a type byte that does not exist", "engine", 1, "output", frames)


def _long(name: str) -> EngineRequest:
    params = SamplingParams(max_tokens=300, ignore_eos=True)
    return EngineRequest(name, [7, 8], params, arrival_time=1.5)


def _with_statistics(recorder: Recorder) -> None:
    params = SamplingParams(max_tokens=1)
    request = EngineRequest("statistics", [1, 2, 3], params, arrival_time=1.5)
    recorder.outputs(1, recorder.add(1, request), request.request_id)


def _overtaken(recorder: Recorder) -> None:
    """A pause that waits for a running request is answered after the question behind it."""
    name = recorder.add(0, _long("running"))
    # A request that no step has seen yet would not be waited for.
    recorder.receive(lambda message: any(output[0] == name for output in message[1]))
    recorder.ask(0, 9001, "pause_scheduler", ["wait", True], "pause_scheduler, call 9001")
    recorder.ask(0, 9002, "is_scheduler_paused", [], "is_scheduler_paused, call 9002")
    names = {9001: "pause_scheduler, call 9001", 9002: "is_scheduler_paused, call 9002"}
    for _ in range(2):
        call_id, frames = recorder.reply(list(names))
        name = f"{names[call_id]}: reply"
        recorder.note("utility", name, "engine", 0, "output", frames)
    recorder.call(0, 9003, "resume_scheduler", [])


def _aborted(recorder: Recorder) -> None:
    """By the client, without an answer; then by a pause, with one."""
    name = recorder.add(0, _long("aborted by the client"))
    frames = [RequestType.ABORT, CODEC.encode(Abort((name,)).to_plain())]
    recorder.note("requests", "aborted by the client: ABORT", "client", 0, "input", frames)
    recorder.send(0, frames)
    recorder.call(0, 9004, "is_sleeping", [])
    name = recorder.add(0, _long("aborted by a pause"))
    recorder.receive(lambda message: any(output[0] == name for output in message[1]))
    recorder.ask(0, 9005, "pause_scheduler", ["abort", True], "pause_scheduler, call 9005")
    _, frames = recorder.receive(lambda message: any(o[5] is not None for o in message[1]))
    recorder.note("requests", "aborted by a pause: output", "engine", 0, "output", frames)
    _, frames = recorder.reply([9005])
    recorder.note("utility", "pause_scheduler, call 9005: reply", "engine", 0, "output", frames)
    recorder.call(0, 9006, "resume_scheduler", [])


def _refused_by_the_engine(recorder: Recorder) -> None:
    """Without parameters, which the client never sends: the engine ends it with an error."""
    name = wire_id("failed")
    plain = EngineRequest("failed", [1, 2, 3], arrival_time=1.5).to_plain(name, 0, [])
    frames = [RequestType.ADD, CODEC.encode([*plain[:3], None, *plain[4:]])]
    recorder.note("requests", "failed", "client", 0, "input", frames)
    recorder.send(0, frames)
    recorder.outputs(0, name, "failed")


def main() -> None:
    """Start engines, record, write the files."""
    with (
        tempfile.TemporaryDirectory(prefix="ec-interop-", ignore_cleanup_errors=True) as name,
        vllm_engines(Path(name), only={1: {"disable_log_stats": False}}) as group,
    ):
        recorder = Recorder(group.address)
        try:
            record(recorder, group)
            recorder.save()
        finally:
            recorder.close()


if __name__ == "__main__":
    main()
