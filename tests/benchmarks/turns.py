"""Two ways of doing the same, measured in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from tests.benchmarks.report import Result, Spread


def times(work: Callable[[], object], calls: int) -> list[float]:
    """Seconds of each of several calls in a row."""
    clock = time.perf_counter
    found = []
    for _ in range(calls):
        start = clock()
        work()
        found.append(clock() - start)
    return found


def compare(
    name: str,
    ours: Callable[[], object],
    bare: Callable[[], object],
    *,
    blocks: int,
    calls: int,
    budget: float,
) -> Result:
    """The ratio of the medians over all calls; the spread is that of the pairs of blocks."""
    times(ours, calls)
    times(bare, calls)
    all_ours: list[float] = []
    all_bare: list[float] = []
    ratios = []
    for number in range(blocks):
        # Who goes first alternates too.
        for work, found in ((ours, all_ours), (bare, all_bare))[:: 1 if number % 2 else -1]:
            found += times(work, calls)
        block = slice(-calls, None)
        ratios.append(statistics.median(all_ours[block]) / statistics.median(all_bare[block]))
    mine, theirs = statistics.median(all_ours), statistics.median(all_bare)
    return Result(
        name,
        Spread(min(ratios), mine / theirs, max(ratios)),
        "x bare",
        budget,
        f"{_milliseconds(mine)} against {_milliseconds(theirs)}",
    )


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
