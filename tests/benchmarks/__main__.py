"""``python -m tests.benchmarks [--quick] [--json] [NAME ...]``; timings never make it fail."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence

from tests.benchmarks import death, fanout, idle, imports, large, stream
from tests.benchmarks.report import Options, Result, table

BENCHES: dict[str, Callable[[Options], Iterator[Result]]] = {
    "fanout": fanout.run,
    "stream": stream.run,
    "large": large.run,
    "death": death.run,
    "import": imports.run,
    "idle": idle.run,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the named benchmarks, or all, and print one table."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(BENCHES))
    parser.add_argument("--quick", action="store_true", help="only show that everything runs")
    parser.add_argument("--json", action="store_true", help="print a list of results")
    given = parser.parse_args(arguments)
    unknown = sorted(set(given.names).difference(BENCHES))
    if unknown:
        parser.error(f"no benchmark named {', '.join(unknown)}; there are {', '.join(BENCHES)}")
    results: list[Result] = []
    for name in given.names or BENCHES:
        for result in BENCHES[name](Options(quick=given.quick)):
            results.append(result)
            print(f"{result.name}: {result.row()[1]}", file=sys.stderr, flush=True)
    if given.json:
        print(json.dumps([result.to_dict() for result in results], indent=2))
    else:
        print(
            f"Python {platform.python_version()}, {platform.system()} {platform.machine()}, "
            f"{os.cpu_count()} processors"
        )
        print(table(results))


if __name__ == "__main__":
    main()
