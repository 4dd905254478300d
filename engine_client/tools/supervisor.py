"""A small process between an owner and the engines that it started.

The engines are this process's children, so that they end when their owner does, in whatever way:
it closed them, it crashed, it was killed.  Three things tell: the owner's end of a socket pair
closes; the owner's process is gone although a forked child of it still holds that end; or a
request to stop.  Then every engine gets SIGTERM, and after a grace SIGKILL, with all that it
started.  Should this process itself be killed, Linux kills the engines.

The owner starts it with two arguments, the number of the inherited socket and its own process id,
and in a session of its own, so that a Ctrl-C in the owner's terminal reaches neither it nor the
engines.  Both sides write one JSON map per line::

    owner:       {"op": "start", "engines": [{"index": 0, "argv": [...], "env": null}], "grace": 3}
                 {"op": "stop", "grace": 3}
    supervisor:  {"event": "started", "index": 0, "pid": 4711}
                 {"event": "exit", "index": 0, "code": -9, "stderr": ["its", "last", "lines"]}
                 {"event": "stopped"}

``code`` is negative for a signal, and 127 for a command that could not be started.  An engine's
standard output goes where its standard error goes, since vLLM logs to both.  The file uses the
standard library only and is run by its path, so that it starts without importing the package.
"""

from __future__ import annotations

import ctypes
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["main"]

GRACE = 3.0
"""Seconds between SIGTERM and SIGKILL: an owner that dies leaves no engine after five seconds,
with some left for a busy machine."""
TAIL_LINES = 20
TAIL_LINE_LENGTH = 1000
PIPE_READS = 64
"""Reads of 64 KiB that empty the pipe of an engine that has ended."""
OWNER_POLL = 0.5
"""Seconds between looks at the parent's process id, where Linux's pidfd is missing."""
FAREWELL = 1.0
"""Seconds to deliver the last reports to an owner that does not read."""

STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGHUP})

_PR_SET_PDEATHSIG = 1


class Tail:
    """The last lines of what an engine printed."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=TAIL_LINES)
        self._rest = b""

    def feed(self, data: bytes) -> None:
        """Take some output."""
        *lines, rest = (self._rest + data).split(b"\n")
        self._lines.extend(map(self._text, lines[-TAIL_LINES:]))
        self._rest = rest[:TAIL_LINE_LENGTH]

    def lines(self) -> list[str]:
        """Return the last lines, the unfinished one too."""
        rest = [self._text(self._rest)] if self._rest else []
        return [*self._lines, *rest][-TAIL_LINES:]

    @staticmethod
    def _text(line: bytes) -> str:
        return line[:TAIL_LINE_LENGTH].decode("utf-8", "replace").rstrip("\r")


class Child:
    """One engine."""

    def __init__(self, index: int, argv: Sequence[str], env: Mapping[str, str] | None) -> None:
        if not argv:
            raise ValueError("an empty command")
        self.index = index
        self.tail = Tail()
        # A session of its own: all that the engine starts can be killed as one group.
        self.process = subprocess.Popen(
            list(argv),
            env=None if env is None else dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        assert self.process.stdout is not None
        self.pipe = self.process.stdout.fileno()
        os.set_blocking(self.pipe, False)
        self.at_end = False
        """Whether its output has ended."""

    def read(self) -> bool:
        """Read some of what it printed; return whether there may be more."""
        try:
            data = os.read(self.pipe, 65536)
        except BlockingIOError:
            return False
        self.tail.feed(data)
        self.at_end = not data
        return bool(data)

    def has_ended(self) -> bool:
        """Return whether it has ended; it is not reaped, its process id stays its own."""
        if not hasattr(os, "waitid"):  # macOS before Python 3.13
            return self.process.poll() is not None
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.process.pid, flags) is not None

    def signal_group(self, number: int) -> None:
        """Send a signal to it and all that it started and that stayed in its session."""
        try:
            os.killpg(self.process.pid, number)
        except (ProcessLookupError, PermissionError):
            pass  # all gone; macOS says so with EPERM when only zombies are left

    def reap(self) -> int:
        """Kill what it left behind, collect its last words, return its exit code."""
        self.signal_group(signal.SIGKILL)
        code = self.process.wait()
        for _ in range(PIPE_READS):  # limited: a process that left the session may go on printing
            if not self.read():
                break
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


class Supervisor:
    """The loop: the owner's socket, the engines' output, signals and the owner's process."""

    def __init__(self, channel: socket.socket, owner: int) -> None:
        self._channel = channel
        self._owner = owner
        self._children: list[Child] = []
        self._grace = GRACE
        self._deadline: float | None = None
        self._incoming = b""
        self._outgoing = b""
        self._owner_listens = True
        self._selector = selectors.DefaultSelector()
        self._wakeup, wakeup_end = socket.socketpair()
        self._wakeup_end = wakeup_end

    def run(self) -> None:
        """Start engines as told, watch them, and return when all have ended."""
        self._watch_signals()
        self._watch_owner()
        self._channel.setblocking(False)
        self._selector.register(self._channel, selectors.EVENT_READ, self._on_channel)
        while self._deadline is None or self._children:
            if os.getppid() != self._owner:
                self._stop()
            for key, _ in self._selector.select(self._next_look()):
                key.data()
            if self._deadline is not None and time.monotonic() >= self._deadline:
                for child in self._children:
                    child.signal_group(signal.SIGKILL)
                self._deadline = time.monotonic() + GRACE  # for what the kernel cannot kill yet
            self._reap_ended()
        self._report({"event": "stopped"})
        self._say_farewell()

    def _next_look(self) -> float | None:
        if self._deadline is not None:
            return max(0.0, self._deadline - time.monotonic())
        return None if hasattr(os, "pidfd_open") else OWNER_POLL

    def _watch_signals(self) -> None:
        self._wakeup.setblocking(False)
        self._wakeup_end.setblocking(False)
        signal.set_wakeup_fd(self._wakeup_end.fileno(), warn_on_full_buffer=False)
        # The wake-up descriptor tells which signal came; a handler would act in the middle of
        # something.  There must be one, and not SIG_IGN, which the engines would inherit.
        for number in (signal.SIGCHLD, signal.SIGINT, *STOP_SIGNALS):
            signal.signal(number, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())  # whatever the owner's thread had blocked
        self._selector.register(self._wakeup, selectors.EVENT_READ, self._on_signal)

    def _watch_owner(self) -> None:
        if hasattr(os, "pidfd_open"):
            try:
                pidfd = os.pidfd_open(self._owner)
            except OSError:
                return  # gone already: the loop sees that it has another parent

            def on_end() -> None:
                self._selector.unregister(pidfd)
                self._stop()

            self._selector.register(pidfd, selectors.EVENT_READ, on_end)

    def _on_signal(self) -> None:
        try:
            numbers = self._wakeup.recv(4096)
        except BlockingIOError:
            return
        if STOP_SIGNALS.intersection(numbers):
            self._stop()

    def _on_channel(self) -> None:
        self._flush()
        try:
            data = self._channel.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._owner_left()
            return
        *lines, self._incoming = (self._incoming + data).split(b"\n")
        for line in lines:
            order = json.loads(line)
            self._grace = float(order.get("grace", self._grace))
            if order["op"] == "stop":
                self._stop()
            elif self._deadline is None:
                for engine in order["engines"]:
                    self._start(engine["index"], engine["argv"], engine.get("env"))

    def _owner_left(self) -> None:
        if self._owner_listens:
            self._owner_listens = False
            self._selector.unregister(self._channel)
        self._stop()

    def _start(self, index: int, argv: Sequence[str], env: Mapping[str, str] | None) -> None:
        try:
            child = Child(index, argv, env)
        except (OSError, TypeError, ValueError, subprocess.SubprocessError) as exc:
            self._report({"event": "exit", "index": index, "code": 127, "stderr": [str(exc)]})
            return
        self._children.append(child)

        def on_output() -> None:
            child.read()
            if child.at_end:
                self._selector.unregister(child.pipe)

        self._selector.register(child.pipe, selectors.EVENT_READ, on_output)
        self._report({"event": "started", "index": index, "pid": child.process.pid})

    def _stop(self) -> None:
        if self._deadline is None:
            self._deadline = time.monotonic() + self._grace
            for child in self._children:
                # Only to the engine: it ends its own workers in order.  A stopped process has to
                # go on to see the signal.
                os.kill(child.process.pid, signal.SIGTERM)
                child.signal_group(signal.SIGCONT)

    def _reap_ended(self) -> None:
        for child in [child for child in self._children if child.has_ended()]:
            self._children.remove(child)
            if child.pipe in self._selector.get_map():
                self._selector.unregister(child.pipe)
            code = child.reap()
            stderr = child.tail.lines()
            self._report({"event": "exit", "index": child.index, "code": code, "stderr": stderr})

    def _report(self, report: Mapping[str, Any]) -> None:
        self._outgoing += json.dumps(report).encode() + b"\n"
        self._flush()

    def _flush(self) -> None:
        """Write as much as fits: an owner that does not read must not hold up anything here."""
        while self._outgoing and self._owner_listens:
            try:
                sent = self._channel.send(self._outgoing)
            except BlockingIOError:
                break
            except OSError:
                self._owner_left()
                return
            self._outgoing = self._outgoing[sent:]
        if self._owner_listens:
            events = selectors.EVENT_READ
            if self._outgoing:
                events |= selectors.EVENT_WRITE
            self._selector.modify(self._channel, events, self._on_channel)

    def _say_farewell(self) -> None:
        self._channel.setblocking(True)
        self._channel.settimeout(FAREWELL)
        if self._owner_listens and self._outgoing:
            try:
                self._channel.sendall(self._outgoing)
            except OSError:
                pass


def _make_die_with_parent() -> Callable[[], None]:
    """Return what a child calls so that Linux kills it when this process dies."""
    if sys.platform != "linux":
        return lambda: None
    # Loaded here: the child of a fork should do as little as it can.
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    me = os.getpid()

    def die_with_parent() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != me:  # it died before the call
            os.kill(os.getpid(), signal.SIGKILL)

    return die_with_parent


_die_with_parent = _make_die_with_parent()


def main(arguments: Sequence[str]) -> int:
    """Supervise until all engines have ended."""
    descriptor, owner = map(int, arguments)
    with socket.socket(fileno=descriptor) as channel:
        Supervisor(channel, owner).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
