"""Starting engines and owning them: :func:`launch`, and the owner's side of the supervisor."""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Unpack

from engine_client._render import shown
from engine_client.client import EngineClient
from engine_client.config import ClientConfig, CodecName, Settings
from engine_client.dispatch.bootstrap import Opened, check_parallel_config, init_for, start
from engine_client.dispatch.sockets import PRIVATE, plan_transport
from engine_client.sampling import is_list
from engine_client.wire.codec import codec_named

if TYPE_CHECKING:
    import subprocess

__all__ = ["EngineExited", "EngineJob", "EngineStarted", "Supervisor", "launch"]

SHOWN_LINES = 5
"""Lines of an engine's last output that errors show."""
KILL_MARGIN = 0.5
"""Seconds of a stop's time limit that are kept for killing what did not end by itself."""


@dataclass(frozen=True, slots=True)
class EngineJob:
    """One engine to start."""

    index: int
    argv: Sequence[str]
    env: Mapping[str, str] | None = None
    """Its whole environment; None: that of the owner."""
    also: tuple[int, ...] = ()
    """More engines of the same process, which end with it."""


class EngineCommand(Protocol):
    """How engines are started, where a list of words does not do (``VllmHeadless``)."""

    @property
    def address(self) -> str:
        """The handshake address to bind, when the caller names none; a port may be ``*``."""

    def jobs(self, address: str, indices: Sequence[int]) -> Sequence[EngineJob]:
        """The processes to start, told the address as it was bound."""


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

    @property
    def manner(self) -> str:
        """How it ended, as words that follow "its process "."""
        if self.code is None:
            how = "ended together with its supervisor process"
        elif self.code < 0:
            how = f"was ended by signal {-self.code}"
        else:
            how = f"exited with code {self.code}"
        last = [line for line in self.stderr if line.strip()][-SHOWN_LINES:]
        return f"{how}; its last words: {' | '.join(last)}" if last else how


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

    def start(self, jobs: Iterable[EngineJob], *, grace: float = 3.0) -> None:
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
        import subprocess

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
        import subprocess  # here, because most programs import this module and launch nothing

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


class _Processes:
    """What a dispatcher asks of a supervisor."""

    def __init__(self, supervisor: Supervisor, jobs: Iterable[EngineJob]) -> None:
        self._supervisor = supervisor
        self._engines = {job.index: (job.index, *job.also) for job in jobs}

    def fileno(self) -> int:
        return self._supervisor.fileno()

    def read_exits(self) -> list[tuple[int, str]] | None:
        if self._supervisor.closed:
            return None
        reports = self._supervisor.read_reports()
        return [
            (index, report.manner)
            for report in reports
            if isinstance(report, EngineExited)
            for index in self._engines[report.index]
        ]

    def stop(self, timeout: float | None) -> None:
        self._supervisor.stop(STOP_TIMEOUT if timeout is None else timeout)


STOP_TIMEOUT = 5.0


Command = Sequence[str] | Callable[[str, int], Sequence[str]] | EngineCommand | None


def launch(
    engine_count: int = 1,
    *,
    command: Command = None,
    env: Mapping[str, str] | None = None,
    address: str | None = None,
    engine_start_index: int = 0,
    codec: CodecName = "auto",
    coordinator: bool = False,
    parallel_config: Mapping[str, Any] | None = None,
    **settings: Unpack[Settings],
) -> EngineClient:
    """Start local engines and own them: closing the client ends them.

    A small supervisor process stands between, whose children the engines are.  It ends them when
    this process goes, in whatever way, keeps Ctrl-C in the terminal away from them, and reports
    how they end: a call that waits for an engine that exits fails at once.

    Args:
        engine_count: how many.
        command: one engine's command, in which ``{address}`` and ``{index}`` are replaced; or a
            function of address and index that returns it; or an object such as ``VllmHeadless``.
            Left out: the reference engine, which simulates a model.
        env: variables to add to this process's environment.
        address: the handshake address; left out: an ipc file in a private directory, or what the
            command needs.
        engine_start_index: the index of the first.
        codec: as for ``connect()``.
        coordinator: as for ``connect()``.
        parallel_config: as for ``connect()``.
        **settings: ``timeout``, ``connect_timeout``, ``close_timeout``, ``max_message_size``,
            ``max_pending_outputs``, ``max_unanswered_bytes``, ``heartbeat_interval`` and
            ``slow_call_warning``, as for ``connect()``.

    Raises:
        HandshakeError: an engine exited before it was ready; the text has its exit code and last
            lines of output.  Nothing is left running.
        HandshakeTimeout: not all engines were ready in time.
    """
    config = ClientConfig(
        engine_count=engine_count, engine_start_index=engine_start_index, codec=codec, **settings
    )
    if codec != "auto":
        codec_named(codec)
    check_parallel_config(parallel_config)
    if isinstance(command, str):
        raise TypeError(f"command must be a list of words, not {shown(command)}; see shlex.split()")
    if isinstance(command, Sequence):
        _check_words(command)
    elif not (command is None or callable(command) or hasattr(command, "jobs")):
        raise TypeError(f"command must be a list of words or a function, not {shown(command)}")
    if env is not None and not isinstance(env, Mapping):
        raise TypeError(f"env must be a mapping or None, not {shown(env)}")
    for item in (env or {}).items():
        if not all(isinstance(text, str) for text in item):
            raise TypeError(f"env must map strings to strings, not {shown(item)}")
    if address is None:
        address = getattr(command, "address", PRIVATE)
    bind = plan_transport(
        handshake=address,
        input_address=None,
        output_address=None,
        advertised_host=None,
        heartbeat_interval=config.heartbeat_interval,
        context=None,
        coordinator=coordinator,
    )

    def opener() -> Opened:
        transport = bind()
        supervisor = Supervisor()
        try:
            where = transport.addresses["handshake"]
            jobs = _jobs(command, where, config.engines, env or {})
            supervisor.start(jobs)
            init = init_for(transport, parallel_config)
            return Opened(transport, init, _Processes(supervisor, jobs))
        except BaseException:
            supervisor.stop()
            transport.close(0)
            raise

    return start(config, opener, EngineClient)


def _jobs(
    command: Command, address: str, indices: Sequence[int], env: Mapping[str, str]
) -> list[EngineJob]:
    if command is not None and not callable(command) and not isinstance(command, Sequence):
        jobs = command.jobs(address, indices)
        return [replace(job, env={**(job.env or os.environ), **env}) for job in jobs]
    return [
        EngineJob(index, _argv(command, address, index), {**os.environ, **env}) for index in indices
    ]


def _check_words(command: object) -> list[str]:
    words: Any = command
    if not is_list(words) or not words or not all(isinstance(word, str) for word in words):
        raise TypeError(f"command must be a list of words (strings), not {shown(command)}")
    return list(words)


def _argv(
    command: Sequence[str] | Callable[[str, int], Sequence[str]] | None, address: str, index: int
) -> list[str]:
    if command is None:
        command = [
            sys.executable,
            "-m",
            "engine_client.tools.mock_engine",
            "--connect",
            "{address}",
            "--index",
            "{index}",
        ]
    if callable(command):
        return _check_words(command(address, index))
    return [word.replace("{address}", address).replace("{index}", str(index)) for word in command]
