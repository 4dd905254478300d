"""Run a script as a user does, in a process of its own, and look at what it printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.helpers.limits import scaled

ROOT = Path(__file__).resolve().parents[2]


def run_script(*arguments: str, timeout: float = 50.0) -> str:
    """Run ``python ARGUMENTS`` and return what it printed.

    Warnings are errors; what goes to stderr (the log's warnings) is shown when it fails.

    Args:
        *arguments: what follows "python".
        timeout: seconds (scaled here).

    Raises:
        AssertionError: it did not exit with 0, or an exception was ignored on the way.
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=scaled(timeout),
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr, done.stderr
    assert "Exception ignored" not in done.stderr, done.stderr
    return done.stdout


def without_what_varies(text: str) -> str:
    """Replace what differs from run to run: process ids, times, who was first to report a death."""
    text = re.sub(r"process \d+", "process N", text)
    text = text.replace(
        "its process was ended by signal 9",
        "its connection was lost (the process ended or was cut off)",
    )
    return re.sub(r"\d+\.\d ms", "N ms", text)
