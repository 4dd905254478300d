"""A TCP relay between an engine and its client, which can be cut and frozen."""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
from typing import Self


class Relay:
    """Forwards connections from a port of its own to a target; a context manager.

    All work is done by one thread, so a cut is complete when ``cut()`` returns.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.removeprefix("tcp://").rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._selector = selectors.DefaultSelector()
        self._links: dict[socket.socket, socket.socket] = {}
        self._wake, self._woken = socket.socketpair()
        self._lock = threading.Lock()
        self._closed = False
        self._frozen = False
        self._open = True
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)
        self._thread.start()

    @property
    def links(self) -> int:
        """How many connections go through it right now."""
        with self._lock:
            return len(self._links) // 2

    def cut(self, *, stay_closed: bool = False) -> None:
        """Reset every connection; optionally refuse new ones until ``reopen()``."""
        with self._lock:
            self._open = not stay_closed
            for end in list(self._links):
                self._drop(end, reset=True)

    def reopen(self) -> None:
        """Accept connections again."""
        with self._lock:
            self._open = True

    def freeze(self, frozen: bool = True) -> None:
        """Forward nothing, and tell nobody, as a network that fails silently."""
        with self._lock:
            self._frozen = frozen
        self._wake.send(b"\0")

    def _run(self) -> None:
        while not self._closed:
            for key, _ in self._selector.select():
                with self._lock:
                    end = key.fileobj
                    assert isinstance(end, socket.socket)
                    if end is self._woken:
                        self._woken.recv(4096)
                        self._listen_to_ends()
                    elif end is self._listener:
                        self._accept()
                    elif end in self._links:
                        self._forward(end)

    def _listen_to_ends(self) -> None:
        for end in self._links:
            watched = end in self._selector.get_map()
            if self._frozen and watched:
                self._selector.unregister(end)
            elif not self._frozen and not watched:
                self._selector.register(end, selectors.EVENT_READ)

    def _accept(self) -> None:
        end, _ = self._listener.accept()
        if not self._open or self._frozen:
            end.close()
            return
        try:
            other = socket.create_connection(self._target)
        except OSError:
            end.close()
            return
        self._links[end], self._links[other] = other, end
        for one in (end, other):
            self._selector.register(one, selectors.EVENT_READ)

    def _forward(self, end: socket.socket) -> None:
        try:
            data = end.recv(65_536)
            if data:
                self._links[end].sendall(data)
                return
        except OSError:
            pass
        self._drop(end)

    def _drop(self, end: socket.socket, *, reset: bool = False) -> None:
        other = self._links.pop(end, None)
        if other is None:
            return
        del self._links[other]
        for one in (end, other):
            with contextlib.suppress(KeyError):
                self._selector.unregister(one)
            if reset:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            one.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        self._wake.send(b"\0")
        self._thread.join()
        for end in (*self._links, self._listener, self._wake, self._woken):
            end.close()
        self._selector.close()
