"""A 10 MB argument to 16 engines against sending bytes that are encoded already."""

from __future__ import annotations

import random
from collections.abc import Iterator

import zmq

from engine_client import connect_bootstrapped
from tests.benchmarks.bare import BareLoop
from tests.benchmarks.engines import Engines
from tests.benchmarks.report import Options, Result
from tests.benchmarks.turns import compare


def run(options: Options) -> Iterator[Result]:
    """One result; its spread is that of single calls."""
    count = options.choose(16, 2)
    data = random.Random(1).randbytes(options.choose(10_000_000, 1_000_000))
    with (
        Engines(count) as ours,
        connect_bootstrapped(
            ours.input_address, ours.output_address, engine_count=count, timeout=60
        ) as client,
        Engines(count) as others,
        BareLoop(others) as bare,
    ):
        frame = zmq.Frame(bare.encode("size", data), copy=True)
        yield compare(
            f"{len(data) / 1e6:g} MB argument to {count}",
            lambda: client.call_utility("size", data),
            lambda: bare.send_encoded(frame),
            blocks=options.choose(10, 2),
            calls=options.choose(3, 1),
            budget=1.1,
        )
