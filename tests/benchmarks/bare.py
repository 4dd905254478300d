"""What the client is measured against: the same exchange in one thread, with no safety at all."""

from __future__ import annotations

import itertools
from types import TracebackType
from typing import Any, Self

import cbor2
import zmq

from engine_client.engines import engine_id
from engine_client.wire.messages import RequestType
from tests.benchmarks.engines import Engines
from tests.benchmarks.peers import Peers


class BareSockets:
    """The sockets of a loop, bound where engines connect; a context manager."""

    def __init__(self, peers: Peers) -> None:
        self._context = zmq.Context()
        self.router = self._context.socket(zmq.ROUTER)
        self.pull = self._context.socket(zmq.PULL)
        for sock, address in (
            (self.router, peers.input_address),
            (self.pull, peers.output_address),
        ):
            sock.set_hwm(0)
            sock.setsockopt(zmq.BACKLOG, 1024)
            sock.bind(address)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._context.destroy(linger=0)


class BareLoop(BareSockets):
    """Encode, send to each engine, receive and decode as many replies."""

    def __init__(self, engines: Engines) -> None:
        super().__init__(engines)
        self._ids = [engine_id(index) for index in range(engines.count)]
        self._call_ids = itertools.count(2**52)  # as many bytes as the client's
        for _ in self._ids:
            self.router.recv_multipart()  # the registrations

    def encode(self, method: str, *args: Any) -> bytes:
        """The payload of one call."""
        return cbor2.dumps([0, next(self._call_ids), method, list(args)])

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method on every engine and return the results by engine index."""
        payload = self.encode(method, *args)
        send = self.router.send_multipart
        for identity in self._ids:
            send((identity, RequestType.UTILITY, payload))
        return self._replies()

    def send_encoded(self, payload: zmq.Frame) -> list[Any]:
        """The same for a large payload that is encoded already; the engines share its memory."""
        send = self.router.send
        for identity in self._ids:
            send(identity, zmq.SNDMORE)
            send(RequestType.UTILITY, zmq.SNDMORE)
            send(payload, copy=False)
        return self._replies()

    def _replies(self) -> list[Any]:
        receive, loads = self.pull.recv, cbor2.loads
        results: list[Any] = [None] * len(self._ids)
        for _ in results:
            message = loads(receive())
            results[message[0]] = message[4][2][1]
        return results
