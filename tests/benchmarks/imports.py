"""``import engine_client`` in a fresh interpreter against its two dependencies alone."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator

from tests.benchmarks.peers import ROOT
from tests.benchmarks.report import Options, Result, Spread

_CODE = """
import time
start = time.process_time()
import {}
print((time.process_time() - start) * 1e3)
"""


def run(options: Options) -> Iterator[Result]:
    """One result: processor time, which a busy machine disturbs less, after Python's start."""
    ours, theirs = [], []
    with tempfile.TemporaryDirectory(prefix="engine-client-bench-") as folder:
        _measure("engine_client", folder)  # writes the bytecode, as an installation does
        for _ in range(options.choose(15, 1)):
            theirs.append(_measure("zmq, cbor2", folder))
            ours.append(_measure("engine_client", folder))
    alone = statistics.median(theirs)
    yield Result("import", Spread.of(ours), "ms", 100, f"pyzmq and cbor2 alone: {alone:.0f} ms")


def _measure(modules: str, bytecode: str) -> float:
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": bytecode}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(
        [sys.executable, "-c", _CODE.format(modules)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return float(done.stdout)
