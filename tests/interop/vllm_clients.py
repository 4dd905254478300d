"""One of vLLM's own clients, on engines that others drive too. Runs under vLLM's interpreter.

    python vllm_clients.py sync|async JOB

JOB is JSON: `arguments` (of vLLM's AsyncEngineArgs, as the engines have them), `input_address` and
`output_address` (this client binds both; the engines were told them as those of one frontend of
several), and `client_index` (which one). Prints `ready`; then it reads lines of JSON and answers
each: `["latency", calls]` with the median seconds of so many utility calls, `["rate", count,
tokens]` with tokens per second of so many requests at once; and with the seconds of processor time
that this process took for a call or a token.
"""

from __future__ import annotations

import asyncio
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from typing import Any


def make_client(kind: str, job: dict[str, Any]) -> Any:
    """Make the client; returns when its engines have registered."""
    config = import_module("vllm.engine.arg_utils").AsyncEngineArgs(**job["arguments"])
    made = config.create_engine_config()
    executor = import_module("vllm.v1.executor").Executor.get_class(made)
    clients = import_module("vllm.v1.engine.core_client")
    addresses = {name: job[name] for name in ("input_address", "output_address")}
    if kind == "async":
        return clients.AsyncMPClient(
            made,
            executor,
            log_stats=False,
            client_addresses=addresses,
            client_count=3,
            client_index=job["client_index"],
        )
    # SyncMPClient takes no addresses and would start an engine; the class that it calls takes them.
    # Its calls name client 0, so that is what it must be.
    assert job["client_index"] == 0

    def attach(self: Any, **arguments: Any) -> None:
        clients.MPClient.__init__(self, client_addresses=addresses, **arguments)

    attached = type("Attached", (clients.MPClient,), {"__init__": attach})
    return type("Sync", (clients.SyncMPClient, attached), {})(made, executor, log_stats=False)


class Measured:
    """What a client is asked."""

    def __init__(self, kind: str, job: dict[str, Any]) -> None:
        self.engine = import_module("vllm.v1.engine")
        self.sampling = import_module("vllm.sampling_params")
        self.client = make_client(kind, job)
        self.kind = kind
        self.round = 0

    def requests(self, count: int, tokens: int) -> Iterator[Any]:
        """The requests of one round."""
        self.round += 1
        for number in range(count):
            yield self.engine.EngineCoreRequest(
                request_id=f"{self.kind}-{self.round}-{number}",
                prompt_token_ids=[1, 3 + number, 7, 8],
                mm_features=None,
                sampling_params=self.sampling.SamplingParams(
                    max_tokens=tokens,
                    temperature=0.0,
                    ignore_eos=True,
                    detokenize=False,
                    output_kind=self.sampling.RequestOutputKind.DELTA,
                ),
                pooling_params=None,
                arrival_time=time.time(),
                lora_request=None,
                cache_salt=None,
                data_parallel_rank=None,
            )

    async def latency(self, calls: int) -> float:
        """The median of so many calls, in seconds."""
        elapsed = []
        for _ in range(calls):
            start = time.perf_counter()
            if self.kind == "sync":
                self.client.call_utility("is_sleeping")
            else:
                await self.client.call_utility_async("is_sleeping")
            elapsed.append(time.perf_counter() - start)
        return statistics.median(elapsed)

    async def rate(self, count: int, tokens: int) -> float:
        """Tokens per second of so many requests at once."""
        start, received, ended = time.perf_counter(), 0, 0
        for request in self.requests(count, tokens):
            if self.kind == "sync":
                self.client.add_request(request)
            else:
                await self.client.add_request_async(request)
        while ended < count:
            if self.kind == "sync":
                message = self.client.get_output()
            else:
                message = await self.client.get_output_async()
            for output in message.outputs:
                received += len(output.new_token_ids)
                ended += output.finished
        elapsed = time.perf_counter() - start
        assert received == count * tokens
        return received / elapsed


def say(value: object) -> None:
    """Tell who started this; vLLM's own prints do not begin like that."""
    print(f"\n>>> {json.dumps(value)}", flush=True)


async def main(kind: str, job: dict[str, Any]) -> None:
    """Measure whenever asked."""
    measured = Measured(kind, job)
    say("ready")
    for line in sys.stdin:
        what, *counts = json.loads(line)
        start = time.process_time()
        value = await getattr(measured, what)(*counts)
        say([value, (time.process_time() - start) / math.prod(counts)])
    measured.client.shutdown()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], json.loads(sys.argv[2])))
