"""How fast this client is beside vLLM's own, in turns on engines of the same configuration."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import engine_client
from engine_client import EngineClient, SamplingParams
from tests.helpers import scaled
from tests.interop.engines import ARGUMENTS, HERE, LORA, engine_environment, vllm_engines
from tests.interop.environment import environment

CALLS = 500
TOKENS = 200
AT_ONCE = (1, 8, 32)
ROUNDS = 3
SLOWEST = 3.0
"""How many times as long as vLLM's own it may take: a busy machine makes two."""
Measure = Callable[[], dict[str, Any]]


def ours(client: EngineClient) -> dict[str, Any]:
    """Measure this client once."""
    elapsed = []
    for _ in range(CALLS):
        start = time.perf_counter()
        client.call_utility("is_sleeping")
        elapsed.append(time.perf_counter() - start)
    rates = {}
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    for count in AT_ONCE:
        prompts = [[1, 3 + number, 7, 8] for number in range(count)]
        start = time.perf_counter()
        tokens = sum(len(completion.token_ids) for completion in client.generate(prompts, params))
        assert tokens == count * TOKENS
        rates[str(count)] = tokens / (time.perf_counter() - start)
    return {"latency": statistics.median(elapsed), "rates": rates}


@contextmanager
def theirs(kind: str, folder: Path) -> Iterator[Measure]:
    """Run one of vLLM's clients in a process; yield what measures it once."""
    vllm = environment()
    arguments = {name: value for name, value in ARGUMENTS.items() if name not in LORA}
    job = {
        "arguments": arguments | {"model": str(folder / "model")},
        "calls": CALLS,
        "tokens": TOKENS,
        "at_once": AT_ONCE,
    }
    rpc = folder / "rpc"
    rpc.mkdir(exist_ok=True)
    with (
        (folder / f"{kind}.log").open("w") as log,
        subprocess.Popen(
            [vllm.python, HERE / "vllm_clients.py", kind, json.dumps(job)],
            env=os.environ
            | engine_environment(vllm, folder)
            | {"VLLM_RPC_BASE_PATH": str(rpc), "VLLM_WORKER_MULTIPROC_METHOD": "spawn"},
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def answer() -> Any:
            for line in stdout:
                if line.startswith(">>> "):
                    return json.loads(line.removeprefix(">>> "))
            raise AssertionError((folder / f"{kind}.log").read_text()[-3000:])

        waiting = ["ready"]

        def measure() -> dict[str, Any]:
            while waiting:  # for its engine, which starts while others do
                assert answer() == waiting.pop()
            stdin.write("\n")
            stdin.flush()
            found: dict[str, Any] = answer()
            return found

        try:
            yield measure
        finally:
            stdin.close()
            try:
                process.wait(scaled(30))
            finally:
                process.kill()


def test_beside_vllm(report: list[str]) -> None:
    """Calls and requests take no longer than with vLLM's own clients, give or take."""
    with (
        tempfile.TemporaryDirectory(prefix="ec-speed-", ignore_cleanup_errors=True) as name,
        ExitStack() as stack,
    ):
        folder = Path(name)
        # As theirs: the defaults of vLLM.
        without_lora: dict[str, Any] = {"max_loras": 1, "max_cpu_loras": None}
        without_lora |= {"enable_lora": False}
        group = stack.enter_context(vllm_engines(folder, 1, transport="ipc", **without_lora))
        both = [stack.enter_context(theirs(kind, folder)) for kind in ("sync", "async")]
        client = stack.enter_context(
            engine_client.connect(group.address, connect_timeout=scaled(150), timeout=scaled(60))
        )
        measures: dict[str, Measure] = {
            "engine_client": lambda: ours(client),
            "SyncMPClient": both[0],
            "AsyncMPClient": both[1],
        }
        rounds: dict[str, list[dict[str, Any]]] = {who: [] for who in measures}
        for turn in range(ROUNDS + 1):
            for who, measure in measures.items():
                found = measure()
                if turn > 0:  # the first warms up
                    rounds[who].append(found)
    best = {
        who: (
            min(found["latency"] for found in all_found),
            {str(n): max(found["rates"][str(n)] for found in all_found) for n in AT_ONCE},
        )
        for who, all_found in rounds.items()
    }
    head = "".join(f"{f'{n} at once':>12}" for n in AT_ONCE)
    report += [
        "",
        f"best of {ROUNDS} rounds in turns  is_sleeping (median) {head}  tokens per second",
    ]
    for who, (latency, rates) in best.items():
        shown = "".join(f"{rates[str(n)]:>12,.0f}" for n in AT_ONCE)
        report.append(f"{who:<25}  {latency * 1e6:>17.0f} us {shown}")
    latency, rates = best["engine_client"]
    fastest = min(best["SyncMPClient"][0], best["AsyncMPClient"][0])
    assert latency <= SLOWEST * fastest
    for count in map(str, AT_ONCE):
        most = max(best["SyncMPClient"][1][count], best["AsyncMPClient"][1][count])
        assert rates[count] >= most / SLOWEST
