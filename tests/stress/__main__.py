"""Run all parts at full size, or those that are named; see ``python -m tests.stress --help``."""

from __future__ import annotations

import argparse
import logging
import random
import time
from collections.abc import Callable
from functools import partial

from tests.helpers.leaks import Snapshot, mark_descendants
from tests.stress import load
from tests.stress.soak import soak


def parts(seconds: float) -> dict[str, Callable[[int], dict[str, float]]]:
    """Every part at full size; ``seconds`` for those that last as long as they are told."""
    return {
        "storm": partial(load.storm, seconds=min(seconds, 60.0)),
        "threads": partial(load.threads, count=200, calls=100_000),
        "abandoned": partial(load.abandoned, calls=10_000),
        "stopped": partial(load.stopped, calls=5_000),
        "large": partial(load.large, megabytes=300),
        "rounds": partial(load.rounds, count=300),
        "soak": partial(soak, seconds=seconds),
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.stress", description=__doc__)
    known = tuple(parts(0))
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(known))
    parser.add_argument("--seconds", type=float, default=180.0, help="how long the soak lasts")
    parser.add_argument("--seed", type=int, help="of an earlier run, to repeat what it did")
    options = parser.parse_args()
    if unknown := set(options.names) - set(known):
        parser.error(f"there is no part {', '.join(sorted(unknown))}")
    seed = random.getrandbits(32) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    logging.getLogger("engine_client").setLevel(logging.ERROR)  # deaths are no news here
    mark_descendants()
    for name, part in parts(options.seconds).items():
        if options.names and name not in options.names:
            continue
        before = Snapshot()
        began = time.monotonic()
        figures = part(seed)
        before.check()
        shown = ", ".join(f"{key} {value:,.6g}" for key, value in figures.items())
        print(f"{name}: {shown} ({time.monotonic() - began:.1f} s)", flush=True)


if __name__ == "__main__":
    main()
