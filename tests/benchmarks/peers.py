"""The process on the other side of what is measured: it connects to a pair of data addresses."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import IO, Self

__all__ = ["ROOT", "Peers"]

ROOT = Path(__file__).resolve().parents[2]


class Peers:
    """Runs a module as a process that ends with its standard input; a context manager.

    Args:
        module: run with the input address, the output address and the rest.
        more: further arguments.
    """

    def __init__(self, module: str, *more: str) -> None:
        self._folder = tempfile.mkdtemp(prefix="engine-client-bench-")
        self.input_address = f"ipc://{self._folder}/input"
        self.output_address = f"ipc://{self._folder}/output"
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, self.input_address, self.output_address, *more],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.orders: IO[str] = self._process.stdin
        self.answers: IO[str] = self._process.stdout

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._process:  # closes its standard input and waits
            pass
        shutil.rmtree(self._folder, ignore_errors=True)
