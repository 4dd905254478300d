"""Reference engines in processes of their own, ended whatever happens to the test."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.helpers.limits import scaled

ROOT = Path(__file__).resolve().parents[2]


class EngineProcess:
    """One `python -m engine_client.tools.mock_engine`; a context manager.

    It runs from the constructor on. Leaving the block ends it: politely first, then by force. What
    it logged and printed stays readable.
    """

    def __init__(
        self,
        address: str | None = None,
        index: int = 0,
        *,
        codec: str = "cbor",
        input_address: str | None = None,
        output_address: str | None = None,
        faults: Sequence[Mapping[str, Any]] = (),
        arguments: Sequence[str] = (),
        log: bool = True,
    ) -> None:
        self.index = index
        self._folder = Path(tempfile.mkdtemp(prefix="engine-client-test-"))
        self._log: list[dict[str, Any]] | None = None
        self._stderr: str | None = None
        command = [sys.executable, "-m", "engine_client.tools.mock_engine"]
        if address is not None:
            command += ["--connect", address]
        if input_address is not None and output_address is not None:
            command += ["--input", input_address, "--output", output_address]
        command += ["--index", str(index), "--codec", codec]
        command += ["--log", str(self._folder / "log.jsonl")] if log else ["--no-log"]
        if faults:
            command += ["--faults", json.dumps(list(faults))]
        try:
            with (self._folder / "stderr").open("wb") as stderr:
                self.process = subprocess.Popen(
                    [*command, *arguments],
                    cwd=ROOT,
                    stdin=subprocess.DEVNULL,
                    stdout=stderr,
                    stderr=stderr,
                )
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    @property
    def pid(self) -> int:
        """The process id."""
        return self.process.pid

    @property
    def running(self) -> bool:
        """Whether the process still lives."""
        return self.process.poll() is None

    @property
    def log(self) -> list[dict[str, Any]]:
        """The messages that the engine received so far."""
        return self._log if self._log is not None else self._read_log()

    @property
    def stderr(self) -> str:
        """What it printed so far, to both streams."""
        return self._stderr if self._stderr is not None else self._read_stderr()

    def signal(self, number: int) -> None:
        """Send a signal to this process."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """End it at once, as a crash does, and wait until it is gone."""
        self.process.kill()
        self.wait()

    def wait(self, timeout: float = 10.0) -> int:
        """Wait until it ends by itself (limit scaled) and return its exit code."""
        return self.process.wait(scaled(timeout))

    def close(self) -> None:
        """End it if it still runs. Safe to call twice."""
        if self._log is not None:
            return
        try:
            if self.running:
                self.signal(signal.SIGTERM)
                self.signal(signal.SIGCONT)  # a stopped process sees no SIGTERM
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.wait(5)
        finally:
            self.process.kill()
            self.process.wait()
            self._log, self._stderr = self._read_log(), self._read_stderr()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _read_log(self) -> list[dict[str, Any]]:
        try:
            text = (self._folder / "log.jsonl").read_text()
        except FileNotFoundError:
            return []
        # The last line may be half-written, or torn by a kill.
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def _read_stderr(self) -> str:
        return (self._folder / "stderr").read_text(errors="replace")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
        if error is not None and self._stderr:
            print(f"engine {self.index} (pid {self.pid}) printed:\n{self._stderr}")


@contextlib.contextmanager
def engine_processes(
    address: str, count: int, *, start_index: int = 0, **options: Any
) -> Iterator[list[EngineProcess]]:
    """Run several engines that connect to one address, and end them all."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(EngineProcess(address, index, **options))
            for index in range(start_index, start_index + count)
        ]
