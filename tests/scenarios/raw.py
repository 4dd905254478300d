"""Engines and strangers made of bare sockets, which do any single step right or wrong."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import zmq

from engine_client import EngineClient, connect
from engine_client.engines import engine_id
from engine_client.wire.codec import codec_named
from engine_client.wire.messages import Hello, Init, Outputs, Ready, RequestType, UtilityReply
from tests.helpers import BackgroundCall, run_in_thread, scaled, wait_until


class Peers:
    """Sockets of others in a context of their own; a context manager."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []

    def _socket(self, kind: int, address: str, identity: bytes | None) -> zmq.Socket[bytes]:
        one = self._context.socket(kind)
        self._sockets.append(one)
        one.linger = 0
        one.sndhwm = one.rcvhwm = 0
        one.sndtimeo = one.rcvtimeo = int(scaled(10) * 1000)
        if identity is not None:
            one.identity = identity
        one.connect(address)
        return one

    def dealer(self, address: str, identity: bytes | None = None) -> zmq.Socket[bytes]:
        """A socket that talks to a ROUTER."""
        return self._socket(zmq.DEALER, address, identity)

    def push(self, address: str) -> zmq.Socket[bytes]:
        """A socket that talks to a PULL."""
        return self._socket(zmq.PUSH, address, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._sockets:
            one.close(linger=0)
        self._context.term()


class RawEngine(Peers):
    """An engine, step by step."""

    def __init__(self, address: str | None = None, index: int = 0, *, codec: str = "cbor") -> None:
        super().__init__()
        self.index = index
        self.codec = codec_named(codec)
        self.id = engine_id(index)
        self.handshake = None if address is None else self.dealer(address, self.id)

    def hello(self) -> None:
        self.shake(self.codec.encode(Hello().to_plain()))

    def ready(self) -> None:
        self.shake(self.codec.encode(Ready().to_plain()))

    def shake(self, *frames: bytes) -> None:
        """Send anything on the handshake socket."""
        assert self.handshake is not None
        self.handshake.send_multipart(frames)

    def leave_handshake(self) -> None:
        """Close the handshake socket, as engines do once they are ready."""
        assert self.handshake is not None
        self.handshake.close(linger=int(scaled(5) * 1000))

    def init(self) -> Init:
        """Receive the INIT and connect to where it says."""
        assert self.handshake is not None
        (frame,) = self.handshake.recv_multipart()
        init = Init.from_plain(self.codec.decode(frame))
        self.connect(init.inputs[0], init.outputs[0])
        return init

    def has_init(self, seconds: float = 0.0) -> bool:
        assert self.handshake is not None
        return bool(self.handshake.poll(int(scaled(seconds) * 1000)))

    def connect(self, input_address: str, output_address: str) -> None:
        self.input = self.dealer(input_address, self.id)
        self.output = self.push(output_address)

    def register(self, ready: Mapping[str, Any] | bytes | None = None) -> None:
        if not isinstance(ready, bytes):
            ready = self.codec.encode({"data_parallel_size": 1, **(ready or {})})
        self.input.send(ready)

    def start(self) -> Self:
        """Go through the whole start."""
        self.hello()
        self.init()
        self.register()
        self.ready()
        return self

    def next_call(self) -> Any:
        """Receive until a utility call comes: ``[client, call id, method, args]``."""
        while True:
            kind, payload = self.input.recv_multipart()
            if kind == RequestType.UTILITY:
                return self.codec.decode(payload)

    def answer(self, method: str, value: Any = None) -> None:
        """Receive calls until this one comes, and answer it; questions of the client, too."""
        while True:
            _, call_id, called, _ = self.next_call()
            self.reply(call_id, value if called == method else False)
            if called == method:
                return

    def reply(self, call_id: int, value: Any = None, *, index: int | None = None) -> None:
        message = Outputs(
            self.index if index is None else index, utility=UtilityReply(call_id, None, value)
        )
        self.say(self.codec.encode(message.to_plain()))

    def say(self, *frames: bytes) -> None:
        """Send anything on the output socket."""
        self.output.send_multipart(frames)


@contextlib.contextmanager
def connecting(address: str, **settings: Any) -> Iterator[BackgroundCall[EngineClient]]:
    """A ``connect()`` in another thread, from the moment at which its addresses are bound."""
    call = run_in_thread(connect, address, **{"connect_timeout": scaled(20), **settings})
    try:
        wait_until(lambda: is_bound(address) or call.done, what="the bind")
        yield call
    finally:
        call.join(60)
        with contextlib.suppress(Exception):
            call.result().close()


def is_bound(address: str) -> bool:
    """Whether somebody listens, as far as this can be told without a connection."""
    if address.startswith("ipc://"):
        return Path(address.removeprefix("ipc://")).exists()
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
        except OSError:
            return True
        return False


def free_tcp(count: int = 1) -> list[str]:
    """Addresses on this machine at which nobody listens."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [f"tcp://127.0.0.1:{probe.getsockname()[1]}" for probe in probes]


def states(client: EngineClient) -> Sequence[bool]:
    """Which engines are alive, in index order."""
    return [info.alive for info in client.engines]
