"""``call_utility`` on 1 to 64 engines against the bare loop."""

from __future__ import annotations

from collections.abc import Iterator

from engine_client import connect_bootstrapped
from tests.benchmarks.bare import BareLoop
from tests.benchmarks.engines import Engines
from tests.benchmarks.report import Options, Result
from tests.benchmarks.turns import compare

BUDGETS = {1: 2.0, 4: 1.5, 16: 1.25, 64: 1.15}


def run(options: Options) -> Iterator[Result]:
    """One result for each number of engines."""
    for count, budget in BUDGETS.items():
        with (
            Engines(count) as ours,
            connect_bootstrapped(
                ours.input_address, ours.output_address, engine_count=count, timeout=60
            ) as client,
            Engines(count) as others,
            BareLoop(others) as bare,
        ):
            yield compare(
                f"fan-out to {count}",
                lambda client=client: client.call_utility("is_sleeping"),  # type: ignore[misc]
                lambda bare=bare: bare.call("is_sleeping"),  # type: ignore[misc]
                blocks=options.choose(20, 2),
                calls=options.choose(max(20, 400 // count), 5),
                budget=budget,
            )
