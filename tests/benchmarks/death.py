"""From the SIGKILL of an engine to the error in the caller that waits for it."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator

from engine_client import EngineClient, UtilityCallError, connect_bootstrapped
from tests.benchmarks.engines import Engines
from tests.benchmarks.report import Options, Result, Spread


def run(options: Options) -> Iterator[Result]:
    """One result over as many deaths as engines."""
    count = options.choose(20, 2)
    with (
        Engines(count) as engines,
        connect_bootstrapped(
            engines.input_address, engines.output_address, engine_count=count, timeout=60
        ) as client,
    ):
        client.call_utility("is_sleeping")
        logger = logging.getLogger("engine_client")
        level = logger.level
        logger.setLevel(logging.ERROR)  # one warning for each death
        try:
            samples = [_kill(client, index, engines.pids[index]) for index in range(count)]
        finally:
            logger.setLevel(level)
    yield Result("SIGKILL to error", Spread.of(samples), "ms", 20, f"{count} engines, one by one")


def _kill(client: EngineClient, index: int, pid: int) -> float:
    """Milliseconds until a call that waits for the engine has failed."""
    ended: list[float] = []

    def wait() -> None:
        try:
            client.call_utility("hang", engines=[index])
        except UtilityCallError:
            ended.append(time.perf_counter())

    waiting = threading.Thread(target=wait)
    sent = client.stats.sent
    waiting.start()
    while client.stats.sent == sent:
        time.sleep(0.001)
    start = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    waiting.join()
    return (ended[0] - start) * 1e3
