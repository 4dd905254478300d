"""A client on raw sockets, to look at the reference engine without the library's own client."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import zmq

from engine_client.engines import engine_id
from engine_client.tools.mock_engine import MockEngine
from engine_client.wire.codec import Codec, codec_named
from engine_client.wire.handshake import ClientHandshake, Event, Phase
from engine_client.wire.messages import (
    Init,
    Outputs,
    Registration,
    RequestType,
    UtilityRequest,
    handshake_message,
)
from tests.helpers.limits import scaled
from tests.helpers.processes import EngineProcess

TCP = "tcp://127.0.0.1:*"


class Peer:
    """Handshake ROUTER, input ROUTER and output PULL, bound; every wait has a limit."""

    def __init__(self, codec: str = "cbor", *, tcp: bool = False, limit: float = 10.0) -> None:
        self.codec: Codec = codec_named(codec)
        self.folder = Path(tempfile.mkdtemp(prefix="ec-"))
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.limit_ms = int(scaled(limit) * 1000)
        self._call_ids = iter(range(1000, 10**9))
        self.handshake = self._bound(zmq.ROUTER, TCP if tcp else self.ipc("h"))
        self.bind_input(TCP if tcp else self.ipc("i"))
        self.bind_output(TCP if tcp else self.ipc("o"))

    def ipc(self, name: str) -> str:
        return f"ipc://{self.folder}/{name}"

    def bind_input(self, address: str) -> None:
        self.input = self._bound(zmq.ROUTER, address)

    def bind_output(self, address: str) -> None:
        self.output = self._bound(zmq.PULL, address)

    def close_data(self) -> None:
        self.input.close()
        self.output.close()

    def _bound(self, kind: int, address: str) -> zmq.Socket[bytes]:
        socket = self.context.socket(kind)
        socket.linger = 0
        socket.sndhwm = socket.rcvhwm = 0
        if kind == zmq.ROUTER:
            socket.router_mandatory = True
        socket.rcvtimeo = self.limit_ms
        socket.bind(address)
        return socket

    @property
    def address(self) -> str:
        return endpoint(self.handshake)

    @property
    def init(self) -> Init:
        return Init((endpoint(self.input),), (endpoint(self.output),))

    def greet(self, index: int = 0, init: Init | None = None) -> Any:
        """Take the HELLO and answer it."""
        identity, frame = self.handshake.recv_multipart()
        assert identity == engine_id(index)
        hello = self.codec.decode(frame)
        self.handshake.send_multipart([identity, self.codec.encode((init or self.init).to_plain())])
        return hello

    def complete(self, *indices: int) -> dict[int, Registration]:
        """Do the whole handshake with some engines."""
        views = {engine_id(index): ClientHandshake() for index in indices or (0,)}
        registrations = {}
        poller = zmq.Poller()
        for socket in (self.handshake, self.input):
            poller.register(socket, zmq.POLLIN)
        while any(view.phase is not Phase.COMPLETE for view in views.values()):
            ready = dict(poller.poll(self.limit_ms))
            assert ready, f"the handshake stopped: {views}"
            if self.handshake in ready:
                identity, frame = self.handshake.recv_multipart()
                message = handshake_message(self.codec.decode(frame))
                event = Event[type(message).__name__.upper()]
                views[identity].receive(event)
                if event is Event.HELLO:
                    init = self.codec.encode(self.init.to_plain())
                    self.handshake.send_multipart([identity, init])
            if self.input in ready:
                identity, frame = self.input.recv_multipart()
                views[identity].receive(Event.REGISTRATION)
                registrations[int.from_bytes(identity, "little")] = Registration.from_plain(
                    self.codec.decode(frame)
                )
        return registrations

    def send(self, kind: bytes, payload: bytes, index: int = 0) -> None:
        self.input.send_multipart([engine_id(index), kind, payload])

    def ask(self, method: str, *args: Any, index: int = 0) -> int:
        """Send a utility call; return its id."""
        call_id = next(self._call_ids)
        request = UtilityRequest(0, call_id, method, args)
        self.send(RequestType.UTILITY, self.codec.encode(request.to_plain()), index)
        return call_id

    def add(
        self,
        name: str,
        prompt: list[int] | None,
        /,
        *,
        options: dict[str, Any] | None = None,
        index: int = 0,
        **fields: Any,
    ) -> list[Any]:
        """Send a request with sampling ``options``; ``fields`` replace others of its positions."""
        positions = {
            "request_id": name,
            "prompt_token_ids": prompt,
            "mm_features": None,
            "sampling_params": options or {},
            "pooling_params": None,
            "arrival_time": 1.0,
            "lora_request": None,
            "cache_salt": None,
            "data_parallel_rank": None,
            "prompt_embeds": None,
            "prompt_is_token_ids": None,
            "client_index": 0,
            "current_wave": 0,
            "priority": 0,
            "trace_headers": None,
            "resumable": False,
            "external_req_id": None,
            "reasoning_ended": None,
            "reasoning_parser_kwargs": None,
            "abort_immediately": False,
            "session_id": None,
            "kv_hints": None,
        }
        assert fields.keys() <= positions.keys(), fields
        record = list((positions | fields).values())
        self.send(RequestType.ADD, self.codec.encode(record), index)
        return record

    def abort(self, *request_ids: str, index: int = 0) -> None:
        """Send an ABORT."""
        self.send(RequestType.ABORT, self.codec.encode(list(request_ids)), index)

    def reaches(self, index: int = 0) -> bool:
        """Whether a call can be sent right now; it is sent."""
        try:
            self.ask("echo", "reached", index=index)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def outputs(self) -> Outputs:
        """Receive one message of an engine."""
        message, extra = self.message()
        assert not extra
        return message

    def message(self) -> tuple[Outputs, list[bytes]]:
        """Receive one message of an engine and the frames that follow it."""
        main, *extra = self.output.recv_multipart()
        return Outputs.from_plain(self.codec.decode(main)), extra

    def reply(self) -> tuple[int, str | None, Any]:
        """Receive one utility reply."""
        utility = self.outputs().utility
        assert utility is not None
        return utility.call_id, utility.failure, utility.value

    def call(self, method: str, *args: Any, index: int = 0) -> Any:
        """Ask, and return the value of the very next reply."""
        call_id = self.ask(method, *args, index=index)
        got, failure, value = self.reply()
        assert got == call_id
        assert failure is None, failure
        return value

    def failure(self, method: str, *args: Any) -> str:
        """Ask for what fails; return the engine's text."""
        call_id = self.ask(method, *args)
        got, failure, _ = self.reply()
        assert got == call_id
        assert failure is not None
        return failure

    def hears_nothing(self) -> bool:
        """Whether there is no message at all right now."""
        return not self.output.poll(0)

    def disconnections(self, socket: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
        """Return a socket that gets a message when a peer of ``socket`` goes."""
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        monitor.linger = 0
        monitor.rcvtimeo = self.limit_ms
        return monitor

    def close(self) -> None:
        self.context.destroy(linger=0)
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def endpoint(socket: zmq.Socket[bytes]) -> str:
    address = socket.last_endpoint
    assert isinstance(address, bytes)
    return address.decode().rstrip("\0")


@contextmanager
def thread_engine(address: str | None = None, index: int = 0, **options: Any) -> Iterator[Any]:
    """A reference engine in a thread that must have ended with the block."""
    engine = MockEngine(address, index, **options)
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()
        assert engine.join(scaled(10))


StartEngine = Callable[..., MockEngine]
"""Starts an engine and completes its handshake."""
EngineKind = Callable[..., AbstractContextManager[Any]]
KINDS: list[EngineKind] = [thread_engine, EngineProcess]
