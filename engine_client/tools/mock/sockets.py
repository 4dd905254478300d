"""The sockets of one reference engine: how they are made, waited on, silenced and closed.

While nothing special is going on, ``receive`` *is* the ``recv_multipart`` of the one input socket.
Only with several clients, a delayed reply or a closed input does it become a poll.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from math import ceil

import zmq

__all__ = ["Ended", "EngineSockets"]

HANDSHAKE_LINGER_MS = 5000
OUTPUT_LINGER_MS = 4000
STOP_LINGER_MS = 500
"""How long an engine that was told to stop tries to deliver what it has sent."""

SUBSCRIBE = b"\x01"
COORDINATOR_READY = b"READY"
"""What a coordinator publishes once every engine has subscribed; engines ignore later ones."""
STOP = b"stop"
"""Only wakes a receive: what counts is ``stopping``."""

Socket = zmq.Socket[bytes]


class Ended(BaseException):
    """The engine ends with ``code``, after ``linger_ms`` for what it has sent.

    No plain exception: it may come in the middle of a call, whose errors are only reported.
    """

    def __init__(self, code: int, linger_ms: int = 0) -> None:
        super().__init__(code)
        self.code = code
        self.linger_ms = linger_ms


class EngineSockets:
    """All sockets of one engine.  Only ``stop()`` may be called by other threads."""

    def __init__(self, identity: bytes) -> None:
        self.inputs: list[Socket] = []
        self.outputs: list[Socket] = []
        self._subscription: Socket | None = None
        self._reports: Socket | None = None
        self.stopping = False
        self.receive: Callable[[], list[bytes]] = self._receive_polling
        self._identity = identity
        self._context: zmq.Context[Socket] | None = None
        self._sockets: list[tuple[Socket, int]] = []
        self._wake: Socket | None = None
        self._arrived: deque[list[bytes]] = deque()
        self._later: list[tuple[float, int, int, list[bytes]]] = []
        self._sequence = itertools.count()
        self._muted = False
        self._wakers: tuple[Socket, Socket] | None = None
        self._wakers_lock = threading.Lock()

    def open(self) -> None:
        """Create the context.

        Raises:
            Ended: ``stop()`` came before.
        """
        self._context = zmq.Context()
        self._wake = self._socket(zmq.PAIR, 0)
        self._wake.bind("inproc://wake")
        with self._wakers_lock:
            self._wakers = self._socket(zmq.PAIR, 0), self._socket(zmq.DEALER, 0)
            self._wakers[0].connect("inproc://wake")
        if self.stopping:
            raise Ended(0)

    def stop(self) -> None:
        """Wake the engine wherever it waits, and make it end; from any thread, at any time."""
        self.stopping = True
        with self._wakers_lock:
            if self._wakers is None:  # not open yet, or closed
                return
            wake, in_band = self._wakers
            wake.send(STOP)
            # The input socket binds this name once it has registered.  A blocking receive needs
            # no poll then, and so costs what it costs in a bare loop.
            in_band.connect("inproc://input")
            try:
                in_band.send(STOP, zmq.NOBLOCK)
            except zmq.Again:
                pass  # no input any more: then it polls, and ``wake`` is enough

    def connect_handshake(self, address: str) -> Socket:
        """Return a connected handshake socket; the caller may close it, ``close()`` does."""
        return self._dealer(address, HANDSHAKE_LINGER_MS)

    def connect_inputs(self, addresses: Sequence[str]) -> None:
        """Connect one input socket for each client."""
        self.inputs += [self._dealer(address, OUTPUT_LINGER_MS) for address in addresses]

    def connect_outputs(self, addresses: Sequence[str]) -> None:
        """Connect one output socket for each client; registrations must have been sent."""
        if self.inputs:
            self.inputs[0].bind("inproc://input")
        for address in addresses:
            output = self._socket(zmq.PUSH, OUTPUT_LINGER_MS)
            output.ipv6 = "[" in address
            output.connect(address)
            self.outputs.append(output)
        self._choose_receive()

    def subscribe(self, address: str) -> None:
        """Connect to a coordinator and say so."""
        self._subscription = self._socket(zmq.XSUB, 0)
        self._subscription.ipv6 = "[" in address
        self._subscription.connect(address)
        self._subscription.send(SUBSCRIBE)

    def await_coordinator(self) -> None:
        """Wait until the coordinator says READY; what it says from then on is received.

        Raises:
            Ended: ``stop()`` was called.
        """
        subscription = self._subscription
        if subscription is None:
            return
        self.pause(None, until=subscription)
        if subscription.recv_multipart() != [COORDINATOR_READY]:
            raise Ended(1)
        self.inputs.append(subscription)

    def connect_reports(self, address: str) -> None:
        """Connect to where a coordinator hears of the group."""
        self._reports = self._socket(zmq.PUSH, OUTPUT_LINGER_MS)
        self._reports.ipv6 = "[" in address
        self._reports.connect(address)

    def report(self, frames: list[bytes]) -> None:
        """Send to the coordinator, if there is one."""
        if self._reports is not None and not self._muted:
            self._reports.send_multipart(frames)

    def send(self, client: int, frames: list[bytes]) -> None:
        """Send to one client.

        A client index beyond the outputs ends all sending, as it ends vLLM's output thread.
        """
        if self._muted:
            return
        try:
            output = self.outputs[client if client >= 0 else len(self.outputs)]
        except (IndexError, TypeError):
            self.mute()
        else:
            output.send_multipart(frames)

    def take(self) -> list[bytes] | None:
        """Return a message that has come, without waiting; None when there is none.

        Raises:
            Ended: ``stop()`` was called.
        """
        if not self.arrived():
            return None
        frames = self._arrived.popleft()
        self._choose_receive()
        return frames

    def arrived(self) -> Sequence[list[bytes]]:
        """Return all that has come and was not received yet, oldest first; it stays there.

        Raises:
            Ended: ``stop()`` was called.
        """
        for socket in self.inputs:
            try:
                while True:
                    self._arrived.append(socket.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                pass
        if self.stopping:
            raise Ended(0, STOP_LINGER_MS)
        self._send_due()
        self._choose_receive()
        return self._arrived

    def send_later(self, seconds: float, client: int, frames: list[bytes]) -> None:
        """Send in a while; the engine goes on receiving."""
        entry = (time.monotonic() + seconds, next(self._sequence), client, frames)
        heapq.heappush(self._later, entry)
        self._choose_receive()

    def pause(self, seconds: float | None, *, until: Socket | int | None = None) -> bool:
        """Wait; return whether ``until`` became readable.

        Raises:
            Ended: ``stop()`` was called.
        """
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        if until is not None:
            poller.register(until, zmq.POLLIN)
        ready = dict(poller.poll(None if seconds is None else ceil(seconds * 1000)))
        if self._wake in ready:
            raise Ended(0, STOP_LINGER_MS)
        return bool(ready)

    def deafen(self) -> None:
        """Close the inputs behind the registration: nothing is received any more."""
        for socket in self.inputs:
            socket.close()
        self.inputs.clear()
        self._choose_receive()

    def mute(self) -> None:
        """Close the outputs behind what was sent: nothing is sent any more."""
        self._muted = True
        for socket in self.outputs:
            socket.close()

    def close(self, linger_ms: int) -> None:
        """Close everything; return when what was sent is out, or after ``linger_ms``."""
        with self._wakers_lock:
            self._wakers = None
        for socket, own_linger_ms in self._sockets:
            if not socket.closed:
                socket.close(linger=min(linger_ms, own_linger_ms))
        if self._context is not None:
            self._context.term()

    def _socket(self, kind: int, linger_ms: int) -> Socket:
        assert self._context is not None
        socket = self._context.socket(kind)
        self._sockets.append((socket, linger_ms))
        socket.sndhwm = socket.rcvhwm = 0
        socket.linger = linger_ms
        return socket

    def _dealer(self, address: str, linger_ms: int) -> Socket:
        socket = self._socket(zmq.DEALER, linger_ms)
        socket.identity = self._identity
        socket.ipv6 = "[" in address
        socket.connect(address)
        return socket

    def _choose_receive(self) -> None:
        plain = len(self.inputs) == 1 and not self._later and not self._arrived
        self.receive = self.inputs[0].recv_multipart if plain else self._receive_polling

    def _receive_polling(self) -> list[bytes]:
        while not self._arrived:
            poller = zmq.Poller()
            for socket in (self._wake, *self.inputs):
                poller.register(socket, zmq.POLLIN)
            wait: int | None = None
            if self._later:
                wait = max(0, ceil((self._later[0][0] - time.monotonic()) * 1000))
            ready = dict(poller.poll(wait))
            if self._wake in ready:
                raise Ended(0, STOP_LINGER_MS)
            self._arrived.extend(socket.recv_multipart() for socket in ready)
            self._send_due()
        frames = self._arrived.popleft()
        self._choose_receive()
        return frames

    def _send_due(self) -> None:
        while self._later and self._later[0][0] <= time.monotonic():
            _, _, client, frames = heapq.heappop(self._later)
            self.send(client, frames)
