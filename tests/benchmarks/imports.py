"""``import engine_client`` in a fresh interpreter against its two dependencies alone."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Iterator

from tests.benchmarks.engines import ROOT
from tests.benchmarks.report import Options, Result, Spread

_CODE = """
import time
start = time.perf_counter()
import {}
print((time.perf_counter() - start) * 1e3)
"""


def run(options: Options) -> Iterator[Result]:
    """One result, in milliseconds; the interpreter's own start is not counted."""
    ours, theirs = [], []
    _measure("engine_client")  # writes the bytecode
    for _ in range(options.choose(15, 1)):
        theirs.append(_measure("zmq, cbor2"))
        ours.append(_measure("engine_client"))
    alone = statistics.median(theirs)
    yield Result("import", Spread.of(ours), "ms", 100, f"pyzmq and cbor2 alone: {alone:.0f} ms")


def _measure(modules: str) -> float:
    done = subprocess.run(
        [sys.executable, "-c", _CODE.format(modules)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return float(done.stdout)
