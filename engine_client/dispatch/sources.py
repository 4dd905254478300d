"""What the dispatcher waits for: the descriptors of ZeroMQ's sockets, and plain ones.

``zmq_poll()`` asks every socket at every wake-up what it has, some twenty system calls for a
client's five.  Here only their descriptors are polled.  Such a descriptor does not tell that there
is a message but that something happened, and it tells it once: whatever is done with the socket
takes the news away.  So a socket is read empty whenever its descriptor is ready, and looked at
after everything else that was done with it: when it is added, and some time after a send.
"""

from __future__ import annotations

import select
from collections.abc import Callable, Collection
from math import ceil

import zmq

__all__ = ["Sources", "has_input"]

_POLLIN = int(zmq.POLLIN)  # an operation on the enumeration's member makes another member
Socket = zmq.Socket[bytes]
Reader = Callable[[float], None]


def has_input(sock: Socket) -> bool:
    """Whether a message is there; if not, the socket's descriptor will tell when one comes."""
    return bool(int(sock.getsockopt(zmq.EVENTS)) & _POLLIN)


class Sources:
    """Descriptors to poll, and who reads each (dispatcher only)."""

    def __init__(self) -> None:
        self._poller = select.poll()
        self._readers: dict[int, tuple[Reader | None, Socket | None]] = {}
        self._descriptors: dict[Socket, int] = {}
        self._unread: dict[int, int] = {}

    def add(self, source: Socket | int, read: Reader | None = None) -> int:
        """Poll a socket or a descriptor from now on; return its descriptor.

        Args:
            source: a socket counts as ready at first.
            read: called by :meth:`read`; None for one that is read in another way.
        """
        if isinstance(source, int):
            fd, sock = source, None
        else:
            fd, sock = int(source.getsockopt(zmq.FD)), source
            self._descriptors[sock] = fd
            self._unread[fd] = select.POLLIN
        self._readers[fd] = read, sock
        self._poller.register(fd, select.POLLIN)
        return fd

    def remove(self, fd: int) -> None:
        """Poll a plain descriptor no more."""
        self._poller.unregister(fd)
        del self._readers[fd]

    def wait(self, seconds: float | None) -> dict[int, int]:
        """Block until a descriptor is ready, or the time is over; return those that are (keys)."""
        if self._unread:
            unread, self._unread = self._unread, {}
            return unread | dict(self._poller.poll(0))
        # Rounded up: a poll that ends a fraction too early would spin.
        milliseconds = None if seconds is None else max(0, ceil(seconds * 1e3))
        return dict(self._poller.poll(milliseconds))

    def read(self, ready: Collection[int], now: float) -> None:
        """Let the sources that are ready be read, in the order in which they were added."""
        for fd, (read, sock) in tuple(self._readers.items()):
            if fd in ready and read is not None:
                read(now)
                if sock is not None:
                    self.look(sock)

    def look(self, sock: Socket) -> None:
        """After something was done with a socket: it is ready if it has input."""
        if has_input(sock):
            self._unread[self._descriptors[sock]] = select.POLLIN
