"""The way from callers to the dispatcher: a queue, an open flag and a wake-up under one lock."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections import deque
from typing import Generic, TypeVar

__all__ = ["LOOK_INTERVAL", "Outbox", "Wakeup"]

T = TypeVar("T")

LOOK_INTERVAL = 1.0
"""Seconds after which the dispatcher looks into the outbox unasked."""


class Wakeup:
    """Makes a file descriptor readable, from any thread, a finalizer or a signal handler.

    An ``eventfd`` on Linux, a socket pair elsewhere.  ``poke`` takes no lock and never blocks.
    """

    __slots__ = ("_pair", "fd")

    def __init__(self) -> None:
        self._pair: tuple[socket.socket, socket.socket] | None = None
        if sys.platform == "linux":
            self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        else:
            reader, writer = self._pair = socket.socketpair()
            reader.setblocking(False)
            writer.setblocking(False)
            self.fd = reader.fileno()

    def poke(self) -> None:
        """Wake the reader; when its pipe is full or closed it is awake or gone already."""
        try:
            if self._pair is None:
                os.eventfd_write(self.fd, 1)
            else:
                self._pair[1].send(b"\0")
        except (OSError, ValueError):  # a descriptor of -1 is a ValueError
            pass

    def drain(self) -> None:
        """Forget all pokes so far."""
        try:
            if self._pair is None:
                os.eventfd_read(self.fd)
            else:
                while self._pair[0].recv(4096):
                    pass
        except (OSError, ValueError):
            pass

    def close(self) -> None:
        """Free the descriptor; later pokes do nothing."""
        # The number is forgotten before it is freed, so that a late poke cannot write to whatever
        # gets the number next.
        fd, self.fd = self.fd, -1
        if self._pair is not None:
            for end in self._pair:
                end.close()
        elif fd >= 0:
            os.close(fd)


class Outbox(Generic[T]):
    """What callers hand to the dispatcher, in one order for all engines.

    ``put`` checks that the outbox is open and enqueues under one hold of the lock: nothing is
    accepted that a closing dispatcher would not see.  The dispatcher is woken last, when nothing is
    held that it would have to wait for.
    """

    __slots__ = ("_awake", "_lock", "_open", "_queue", "wakeup")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = True
        self._awake = False
        self._queue: deque[T] = deque()
        self.wakeup = Wakeup()

    def append(self, item: T) -> bool:
        """Enqueue as one unit and wake the dispatcher; False when it takes nothing any more."""
        asleep = self.put(item)
        if asleep:
            self.wakeup.poke()
        return asleep is not None

    def put(self, item: T) -> bool | None:
        """Enqueue as one unit; tell whether the dispatcher sleeps, and a poke must follow.

        Not under the lock, for which the dispatcher would wait and wake once more.  Whoever is
        interrupted before his poke must poke, and if he is interrupted in that too, the dispatcher
        looks by itself (see LOOK_INTERVAL).

        Returns:
            None: the outbox is closed and takes nothing any more.
        """
        with self._lock:
            if not self._open:
                return None
            self._queue.append(item)
            asleep, self._awake = not self._awake, True
            return asleep

    @property
    def pending(self) -> bool:
        """Whether something lies here; needs no lock (dispatcher only)."""
        return bool(self._queue)

    def take(self) -> deque[T]:
        """Everything enqueued since the last time (dispatcher only)."""
        with self._lock:
            self._awake = False
            queue, self._queue = self._queue, deque()
            return queue

    def close(self) -> deque[T]:
        """Refuse further items, free the wake-up, return what is left (dispatcher only)."""
        with self._lock:
            self._open = False
            queue, self._queue = self._queue, deque()
            return queue
