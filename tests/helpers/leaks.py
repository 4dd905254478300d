"""What a test may leave behind: nothing. No exemption list."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import uuid
from pathlib import Path

from tests.helpers.limits import wait_until
from tests.helpers.threads import stack_of

_MARK = "ENGINE_CLIENT_TEST_RUN"
_TOKEN = uuid.uuid4().hex
GRACE = 2.0
"""Seconds that threads, descriptors and processes have to go after a test (scaled)."""


def mark_descendants() -> None:
    """Make every process started from now on recognisable, also after its parent has gone."""
    os.environ[_MARK] = _TOKEN


def open_descriptors() -> dict[int, str]:
    """Return the open file descriptors and what each one is."""
    folder = Path("/proc/self/fd") if sys.platform == "linux" else Path("/dev/fd")
    found = {}
    for name in os.listdir(folder):
        # The listing's own descriptor is closed again by now.
        with contextlib.suppress(OSError):
            if sys.platform == "linux":
                what = os.readlink(folder / name)
            else:
                status = os.fstat(int(name))
                what = f"mode {status.st_mode:o}, device {status.st_dev}, inode {status.st_ino}"
            found[int(name)] = what
    return found


def live_descendants() -> dict[int, str]:
    """Return our child processes (zombies too) and all that they started, with their commands."""
    found = {}
    if sys.platform == "linux":
        me = os.getpid()
        token = f"{_MARK}={_TOKEN}".encode()
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == me:
                continue
            with contextlib.suppress(OSError):  # it ended meanwhile, or is another user's
                # After the name, which may hold anything: ") state parent ..."
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                mine = int(parent) == me
                if mine or token in (entry / "environ").read_bytes().split(b"\0"):
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    found[int(entry.name)] = f"state {state}: {command or '(zombie)'}"
    else:
        listing = subprocess.run(
            ["ps", "-A", "-o", "pid=,ppid=,command="], capture_output=True, text=True, check=True
        )
        for line in listing.stdout.splitlines():
            pid, parent, command = line.split(None, 2)
            if int(parent) == os.getpid() and not command.startswith("ps -A"):
                found[int(pid)] = command
    return found


def registered_waiters() -> dict[str, int]:
    """Return the clients that still have waiters, and how many."""
    module = sys.modules.get("engine_client.client")
    kind = getattr(module, "EngineClient", None)
    if kind is None:
        return {}
    # One whose constructor refused its arguments has nothing yet.
    clients = [
        thing for thing in gc.get_objects() if type(thing) is kind and hasattr(thing, "_dispatcher")
    ]
    return {repr(one): one.pending_utility_calls for one in clients if one.pending_utility_calls}


class Snapshot:
    """The threads, descriptors and processes that exist at one moment."""

    def __init__(self) -> None:
        self._threads = set(threading.enumerate())
        self._descriptors = set(open_descriptors().items())
        self._processes = set(live_descendants())

    def new_threads(self) -> list[threading.Thread]:
        """Return the threads started since, and still alive."""
        return [one for one in threading.enumerate() if one not in self._threads]

    def new_descriptors(self) -> dict[int, str]:
        """Return the descriptors opened since, and still open."""
        return dict(set(open_descriptors().items()) - self._descriptors)

    def new_processes(self) -> dict[int, str]:
        """Return the processes started since, and not yet ended and waited for."""
        return {pid: what for pid, what in live_descendants().items() if pid not in self._processes}

    def check(self) -> None:
        """Wait a bounded time until all is as it was.

        Raises:
            AssertionError: Something is left; the text says what. Left processes are killed, so
                that they do not disturb the tests that follow.
        """
        if self._clean():
            return
        gc.collect()
        try:
            wait_until(self._clean, timeout=GRACE)
        except AssertionError:
            report = self._report()
        else:
            return
        if report:
            raise AssertionError("the test left behind:\n" + report)

    def _clean(self) -> bool:
        return not (
            self.new_threads()
            or self.new_descriptors()
            or self.new_processes()
            or registered_waiters()
        )

    def _report(self) -> str:
        lines = [f"thread {one.name}, at\n{stack_of(one)}" for one in self.new_threads()]
        lines += [f"descriptor {fd}: {what}" for fd, what in sorted(self.new_descriptors().items())]
        lines += [f"{count} waiters in {one}" for one, count in registered_waiters().items()]
        for pid, what in sorted(self.new_processes().items()):
            lines.append(f"process {pid}, {what}")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        return "\n".join(lines)
