"""How fast vLLM's own clients are. Runs under the interpreter that has vLLM.

    python vllm_clients.py sync|async JOB

JOB is JSON: `arguments` (of vLLM's AsyncEngineArgs), `calls`, `tokens`, `rounds`, `at_once`. Prints
`ready`; then, at each line that it reads, measures once and prints what came as JSON.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from typing import Any


class Measured:
    """One of vLLM's clients, which starts its engine itself, and what it is asked."""

    def __init__(self, kind: str, job: dict[str, Any]) -> None:
        self.job = job
        self.engine = import_module("vllm.v1.engine")
        self.sampling = import_module("vllm.sampling_params")
        config = import_module("vllm.engine.arg_utils").AsyncEngineArgs(**job["arguments"])
        made = config.create_engine_config()
        executor = import_module("vllm.v1.executor").Executor.get_class(made)
        client = import_module("vllm.v1.engine.core_client")
        make = client.SyncMPClient if kind == "sync" else client.AsyncMPClient
        self.client = make(made, executor, log_stats=False)
        self.round = 0

    def requests(self, count: int) -> Iterator[Any]:
        """The requests of one round."""
        self.round += 1
        for number in range(count):
            yield self.engine.EngineCoreRequest(
                request_id=f"{self.round}-{number}",
                prompt_token_ids=[1, 3 + number, 7, 8],
                mm_features=None,
                sampling_params=self.sampling.SamplingParams(
                    max_tokens=self.job["tokens"],
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

    def sync(self) -> dict[str, Any]:
        """Measure SyncMPClient."""
        elapsed = []
        for _ in range(self.job["calls"]):
            start = time.perf_counter()
            self.client.call_utility("is_sleeping")
            elapsed.append(time.perf_counter() - start)
        rates = {}
        for count in self.job["at_once"]:
            start, tokens, ended = time.perf_counter(), 0, 0
            for request in self.requests(count):
                self.client.add_request(request)
            while ended < count:
                for output in self.client.get_output().outputs:
                    tokens += len(output.new_token_ids)
                    ended += output.finished
            rates[count] = tokens / (time.perf_counter() - start)
        return {"latency": statistics.median(elapsed), "rates": rates}

    async def asynchronous(self) -> dict[str, Any]:
        """Measure AsyncMPClient."""
        elapsed = []
        for _ in range(self.job["calls"]):
            start = time.perf_counter()
            await self.client.call_utility_async("is_sleeping")
            elapsed.append(time.perf_counter() - start)
        rates = {}
        for count in self.job["at_once"]:
            start, tokens, ended = time.perf_counter(), 0, 0
            for request in self.requests(count):
                await self.client.add_request_async(request)
            while ended < count:
                for output in (await self.client.get_output_async()).outputs:
                    tokens += len(output.new_token_ids)
                    ended += output.finished
            rates[count] = tokens / (time.perf_counter() - start)
        return {"latency": statistics.median(elapsed), "rates": rates}


def say(value: object) -> None:
    """Tell who started this; vLLM's own prints do not begin like that."""
    print(f"\n>>> {json.dumps(value)}", flush=True)


async def main(kind: str, job: dict[str, Any]) -> None:
    """Measure whenever asked."""
    measured = Measured(kind, job)
    say("ready")
    for _ in sys.stdin:
        say(measured.sync() if kind == "sync" else await measured.asynchronous())
    measured.client.shutdown()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], json.loads(sys.argv[2])))
