"""Processor time of a client that nobody uses."""

from __future__ import annotations

import time
from collections.abc import Iterator

from engine_client import connect_bootstrapped
from tests.benchmarks.engines import Engines
from tests.benchmarks.report import Options, Result, Spread

SECONDS = 3.0


def run(options: Options) -> Iterator[Result]:
    """One result, scaled to a minute; all threads of the process count, also ZeroMQ's."""
    count = 4
    samples = []
    with (
        Engines(count) as engines,
        connect_bootstrapped(
            engines.input_address, engines.output_address, engine_count=count, timeout=60
        ) as client,
    ):
        client.call_utility("is_sleeping")
        seconds = 0.2 if options.quick else SECONDS
        for _ in range(options.choose(3, 1)):
            start = time.process_time()
            time.sleep(seconds)  # being idle is what is measured
            samples.append((time.process_time() - start) * 60 / seconds)
    yield Result("idle for a minute", Spread.of(samples), "s CPU", 0.2, f"{count} engines")
