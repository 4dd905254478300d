"""Outputs delivered to consumers, against a loop that receives, decodes and routes them.

Both read the same messages, encoded beforehand and sent by another process as fast as it can.

Run as ``python -m tests.benchmarks.stream INPUT OUTPUT``, it is that process: an engine that
registers, takes requests and sends one batch after another when told to.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import cbor2
import zmq

from engine_client import EngineClient, EngineRequest, RequestStream, connect_bootstrapped
from engine_client.engines import engine_id
from tests.benchmarks.bare import BareSockets
from tests.benchmarks.peers import Peers
from tests.benchmarks.report import Options, Result, Spread

BUDGET = 1 / 0.6
"""The bare loop may be as many times faster."""
CASES = ((1, 1), (8, 1), (64, 1), (8, 8), (64, 8))
"""Requests at once, which are as many outputs in each message, and consumer threads."""


class Sender(Peers):
    """The process that sends; a context manager."""

    def __init__(self) -> None:
        super().__init__("tests.benchmarks.stream")

    def tell(self, line: str) -> None:
        """Give an order."""
        self.orders.write(f"{line}\n")
        self.orders.flush()

    def prepare(self, steps: int, wire_ids: list[str]) -> None:
        """Have all messages encoded and wait until they are."""
        self.tell(f"{steps} {' '.join(wire_ids)}")
        assert self.answers.readline() == "ready\n"


def run(options: Options) -> Iterator[Result]:
    """One result for each number of requests and consumers."""
    for count, consumers in CASES:
        total = options.choose(48_000 if count > 1 else 8_000, 640)
        yield _case(count, consumers, total, turns=options.choose(9, 2))


def _case(count: int, consumers: int, total: int, *, turns: int) -> Result:
    ours: list[float] = []
    bare: list[float] = []
    with (
        Sender() as theirs,
        BareSockets(theirs) as bare_sockets,
        Sender() as mine,
        connect_bootstrapped(
            mine.input_address, mine.output_address, timeout=60, max_pending_outputs=10**6
        ) as client,
    ):
        for turn in range(turns):
            works: tuple[Callable[[], None], ...] = (
                lambda: ours.append(client_run(client, mine, count, consumers, total)),
                lambda: bare.append(bare_run(bare_sockets.pull, theirs, count, total)),
            )
            for work in works[:: 1 if turn % 2 else -1]:
                work()
    spread = Spread.of([a / b for a, b in zip(ours[1:], bare[1:], strict=True)])
    rate = total / statistics.median(bare[1:])
    return Result(
        f"stream {count} to {consumers}",
        spread,
        "x bare",
        round(BUDGET, 2),
        f"{1 / spread.median:.2f} of {rate:,.0f} outputs/s",
    )


def client_run(
    client: EngineClient, sender: Sender, count: int, consumers: int, total: int
) -> float:
    """Seconds for the client's consumers to get all outputs."""
    streams = [client.call(EngineRequest(f"r{number}", [1])) for number in range(count)]
    steps = total // count
    sender.prepare(steps, [stream._request.wire_id for stream in streams])
    shares = [streams[number::consumers] for number in range(min(consumers, count))]
    ends: list[float] = []

    def consume(share: list[RequestStream]) -> None:
        got = 0
        if len(share) == 1:
            for output in share[0]:
                got += len(output.new_token_ids)
        else:
            # In turns, as a server does that forwards what comes.
            for _ in range(steps):
                for stream in share:
                    got += len(next(stream).new_token_ids)
        ends.append(time.perf_counter())
        assert got == steps * len(share)

    threads = [threading.Thread(target=consume, args=(share,)) for share in shares]
    for thread in threads:
        thread.start()
    began = time.perf_counter()
    sender.tell("go")
    for thread in threads:
        thread.join()
    for stream in streams:
        stream.close()
    return max(ends) - began


def bare_run(pull: zmq.Socket[bytes], sender: Sender, count: int, total: int) -> float:
    """Seconds for the loop to receive, decode and route all outputs."""
    wire_ids = [f"r{number}-{number:08x}" for number in range(count)]
    steps = total // count
    sender.prepare(steps, wire_ids)
    queues: dict[str, deque[Any]] = {wire_id: deque() for wire_id in wire_ids}
    receive, loads = pull.recv, cbor2.loads
    began = time.perf_counter()
    sender.tell("go")
    for _ in range(steps):
        for record in loads(receive())[1]:
            queues[record[0]].append(record)
    took = time.perf_counter() - began
    assert {len(queue) for queue in queues.values()} == {steps}
    return took


def main(input_address: str, output_address: str) -> None:
    """Send what the standard input orders, until it ends."""
    context = zmq.Context()
    dealer, push = context.socket(zmq.DEALER), context.socket(zmq.PUSH)
    dealer.setsockopt(zmq.IDENTITY, engine_id(0))
    for sock, address in ((dealer, input_address), (push, output_address)):
        sock.set_hwm(0)
        sock.connect(address)
    dealer.send(cbor2.dumps({"max_model_len": 2048}))
    messages: list[bytes] = []
    for line in sys.stdin:
        if line != "go\n":
            steps, *wire_ids = line.split()
            messages = [
                message(wire_ids, step, last=step == int(steps) - 1) for step in range(int(steps))
            ]
            print("ready", flush=True)
            continue
        for payload in messages:
            push.send(payload)
    context.destroy(linger=0)


def message(wire_ids: list[str], step: int, *, last: bool) -> bytes:
    """One step of all requests, as a vLLM engine without statistics tells it."""
    nothing = [None] * 7
    records = [
        [wire_id, [step % 500], None, None, None, 1 if last else None, *nothing, 0, *nothing[:4]]
        for wire_id in wire_ids
    ]
    return cbor2.dumps([0, records, None, 1.5, None, None, None, None, "default"])


if __name__ == "__main__":
    main(*sys.argv[1:])
