"""The owner's side of the supervisor process: start engines, hear how they end, end them."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["EngineExited", "EngineJob", "EngineStarted", "Supervisor"]

KILL_MARGIN = 0.5
"""Seconds of a stop's time limit that are kept for killing what did not end by itself."""


@dataclass(frozen=True, slots=True)
class EngineJob:
    """One engine to start."""

    index: int
    argv: Sequence[str]
    env: Mapping[str, str] | None = None
    """Its whole environment; None: that of the owner."""


@dataclass(frozen=True, slots=True)
class EngineStarted:
    """An engine's process runs."""

    index: int
    pid: int


@dataclass(frozen=True, slots=True)
class EngineExited:
    """An engine's process has ended."""

    index: int
    code: int | None
    """Its exit code, negative for a signal, 127 when the command could not be started; None when
    the supervisor ended without telling."""
    stderr: tuple[str, ...] = ()
    """The last lines that it printed."""

    def __str__(self) -> str:
        if self.code is None:
            how = "ended together with its supervisor process"
        elif self.code < 0:
            how = f"was ended by signal {-self.code}"
        else:
            how = f"exited with code {self.code}"
        last = f"; last line: {self.stderr[-1]}" if self.stderr else ""
        return f"the process of engine {self.index} {how}{last}"


Report = EngineStarted | EngineExited


class Supervisor:
    """A supervisor process and the engines under it.

    It has no thread: poll ``fileno()`` and call ``read_reports()`` when it is readable, until
    ``closed``.  One thread at a time may use it.  In a forked child every method does nothing.
    Dropping it without ``stop()`` ends the engines too.
    """

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._buffer = b""
        self._running: set[int] = set()
        self._ended = False

    @property
    def pid(self) -> int | None:
        """The supervisor's process id; None before ``start()``."""
        return self._process.pid if self._process is not None else None

    @property
    def closed(self) -> bool:
        """Whether no more reports can come: the supervisor has ended."""
        return self._ended

    @property
    def running(self) -> tuple[int, ...]:
        """Indices of the engines that were started and whose end was not reported yet."""
        return tuple(sorted(self._running))

    def __repr__(self) -> str:
        state = "ended" if self._ended else f"{len(self._running)} engines"
        return f"<Supervisor {'not started' if self._process is None else state}>"

    def start(self, jobs: Iterable[EngineJob], *, grace: float = 4.0) -> None:
        """Start engines; may be called again to start more.

        Args:
            jobs: The engines.
            grace: Seconds that they get between SIGTERM and SIGKILL when the owner goes.
        """
        engines = [
            {
                "index": job.index,
                "argv": list(job.argv),
                "env": None if job.env is None else dict(job.env),
            }
            for job in jobs
        ]
        if self._ended or os.getpid() != self._owner:
            raise RuntimeError("the supervisor has ended")
        if self._channel is None:
            self._launch()
        self._running.update(job["index"] for job in engines if isinstance(job["index"], int))
        self._send({"op": "start", "engines": engines, "grace": grace})

    def fileno(self) -> int:
        """The descriptor that becomes readable when there are reports; -1 when there is none."""
        return self._channel.fileno() if self._channel is not None else -1

    def read_reports(self) -> list[Report]:
        """Return the reports that have come, without waiting.

        When the supervisor has ended without telling, every engine that still ran is reported as
        ended, with an unknown code.
        """
        if self._channel is None or self._ended or os.getpid() != self._owner:
            return []
        while True:
            try:
                data = self._channel.recv(65536, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except ConnectionError:
                data = b""
            if not data:
                self._ended = True
                break
            self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        reports = [report for line in lines if (report := self._report(json.loads(line)))]
        if self._ended:
            reports += [EngineExited(index, None) for index in sorted(self._running)]
            self._running.clear()
        return reports

    def stop(self, timeout: float = 5.0) -> list[Report]:
        """End every engine and the supervisor; return what was reported meanwhile.

        The engines get SIGTERM, and shortly before the time limit SIGKILL.
        """
        process, channel = self._process, self._channel
        if process is None or channel is None or os.getpid() != self._owner:
            return []
        deadline = time.monotonic() + timeout
        reports: list[Report] = []
        try:
            self._send({"op": "stop", "grace": max(0.0, timeout - KILL_MARGIN)})
        except OSError:
            pass  # it has ended already
        while not self._ended:
            remaining = deadline - time.monotonic()
            if remaining <= 0 or not _readable(channel, remaining):
                process.kill()  # on Linux, the engines go with it
                break
            reports += self.read_reports()
        try:
            process.wait(max(KILL_MARGIN, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reports += self.read_reports()
        self._channel = None
        channel.close()
        self._ended = True
        return reports

    def _launch(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                # By its path and isolated: it starts with the standard library alone.
                self._process = subprocess.Popen(
                    [
                        sys.executable,
                        "-I",
                        str(Path(__file__).with_name("supervisor.py")),
                        str(theirs.fileno()),
                        str(self._owner),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            except BaseException:
                ours.close()
                raise
        self._channel = ours

    def _send(self, order: Mapping[str, Any]) -> None:
        assert self._channel is not None
        self._channel.sendall(json.dumps(order).encode() + b"\n")

    def _report(self, report: Mapping[str, Any]) -> Report | None:
        event = report["event"]
        if event == "started":
            return EngineStarted(report["index"], report["pid"])
        if event == "exit":
            self._running.discard(report["index"])
            return EngineExited(report["index"], report["code"], tuple(report["stderr"]))
        return None


def _readable(channel: socket.socket, timeout: float) -> bool:
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    return bool(poll.poll(timeout * 1000))
