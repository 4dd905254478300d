"""A frontend that is three sockets (five with a coordinator's), and keeps what crosses them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import zmq

from engine_client.engines import engine_id, engine_index
from engine_client.request import EngineRequest
from engine_client.wire.codec import codec_named
from engine_client.wire.messages import Init, RequestType, StartWave, UtilityReply, UtilityRequest
from tests.golden.requests import wire_id
from tests.golden.vectors import DEAD_SENTINEL, FOLDER, Vector
from tests.interop.environment import DISTRIBUTION, VERSION

CODEC = codec_named("msgpack")
PATIENCE = 300.0
HOW = {
    "engine": "sent by an engine",
    "client": "written by this project's wire layer, and taken by an engine",
    "coordinator": "sent by vLLM's coordinator process",
}
SUBSCRIBE = b"\x01"
GATE = b"READY"
Fits = Callable[[Any], bool]


class Vectors:
    """What is kept, by family."""

    def __init__(self) -> None:
        self.kept: dict[str, list[Vector]] = {}

    def note(
        self,
        family: str,
        name: str,
        sender: str,
        engine: int,
        channel: str,
        frames: Sequence[bytes],
        how: str = "",
    ) -> Any:
        """Keep a message; return its payload, decoded."""
        bare = Vector(name, sender, engine, channel, tuple(frames), None)
        value = CODEC.decode(bare.payload) if bare.encoded else None
        kept = Vector(
            name, sender, engine, channel, tuple(frames), value, VERSION, how or HOW[sender]
        )
        self.kept.setdefault(family, []).append(kept)
        return value

    def save(self) -> None:
        """Write a file for each family."""
        for family, vectors in self.kept.items():
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


class Recorder:
    """The sockets, as their frontend and, if it is told to be one, coordinator.

    Args:
        address: where engines say HELLO.
        vectors: takes what is kept.
        family: where all of it goes; left out: as the messages are.
        coordinator: whether to be the engines' coordinator too.
    """

    def __init__(
        self, address: str, vectors: Vectors, family: str = "", *, coordinator: bool = False
    ) -> None:
        self.vectors = vectors
        self.family = family
        self.coordinator = coordinator
        self.context = zmq.Context()
        self.handshake = self.bind(zmq.ROUTER, address)
        self.input = self.bind(zmq.ROUTER)
        self.output = self.bind(zmq.PULL)
        self.publisher = self.bind(zmq.XPUB)
        self.listener = self.bind(zmq.PULL)

    def bind(self, kind: int, address: str = "tcp://127.0.0.1:*") -> zmq.Socket[bytes]:
        """Make a socket and bind it."""
        sock = self.context.socket(kind)
        sock.linger = 0
        if kind == zmq.XPUB:
            sock.xpub_verbose = 1  # each engine's subscription
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
        return self.vectors.note(self.family or family, name, sender, engine, channel, frames)

    def greet(self, count: int, parallel_config: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Do the handshake with all engines."""
        addresses = [
            sock.get_string(zmq.LAST_ENDPOINT)
            for sock in (self.input, self.output, self.publisher, self.listener)
        ]
        init = Init(
            (addresses[0],),
            (addresses[1],),
            addresses[2] if self.coordinator else None,
            addresses[3] if self.coordinator else None,
            parallel_config=parallel_config,
        )
        ready: set[int] = set()
        registered: set[int] = set()
        subscribed = 0
        poller = zmq.Poller()
        for sock in (self.handshake, self.input, self.publisher):
            poller.register(sock, zmq.POLLIN)
        end = time.monotonic() + PATIENCE
        while len(ready & registered) < count:
            if time.monotonic() > end:
                raise TimeoutError("the engines did not start")
            for sock, _ in poller.poll(1000):
                if sock is self.publisher:
                    subscribed += 1
                    self._subscribed(sock.recv(), subscribed, count)
                    continue
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

    def _subscribed(self, frame: bytes, number: int, count: int) -> None:
        self.note("", f"subscription {number}", "engine", -1, "coordinator_input", [frame])
        if number == count:
            self.note("", "gate", "client", -1, "coordinator_input", [GATE])
            self.publisher.send(GATE)

    def send(self, engine: int, frames: Sequence[bytes]) -> None:
        """Send a request of any type to an engine."""
        self.input.send_multipart([engine_id(engine), *frames])

    def wake(self, name: str, wave: int, exclude: int | None, count: int = 2) -> None:
        """Wake a lockstep group, as its coordinator or one by one."""
        plain = StartWave(wave, exclude).to_plain()
        frames = [RequestType.START_DP_WAVE, CODEC.encode(plain)]
        if self.coordinator:
            self.note("", name, "client", -1, "coordinator_input", frames)
            self.publisher.send_multipart(frames)
            return
        for engine in range(count):
            if engine != exclude:
                self.note("", f"{name}, {engine}", "client", engine, "input", frames)
                self.send(engine, frames)

    def receive(self, fits: Fits) -> tuple[list[Any], list[bytes]]:
        """Return the next output message that fits; others are dropped."""
        return self._receive(self.output, fits)

    def told(self, name: str, fits: Fits) -> list[Any]:
        """Keep the next message to the coordinator that fits; others are dropped."""
        message, frames = self._receive(self.listener, fits)
        self.note("", name, "engine", message[0], "coordinator_output", frames)
        return message

    @staticmethod
    def _receive(sock: zmq.Socket[bytes], fits: Fits) -> tuple[list[Any], list[bytes]]:
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            if sock.poll(1000):
                frames = sock.recv_multipart()
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

    def add(self, engine: int, request: EngineRequest, *, wave: int = 0) -> str:
        """Send a request and keep it; return the id on the wire."""
        name = wire_id(request.request_id)
        extra: list[bytes] = []
        payload = CODEC.encode(request.to_plain(name, 0, extra, wave=wave))
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
