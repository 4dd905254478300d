"""How fast this client is beside vLLM's own, all three at the same engine process.

The engine is told of three frontends (INIT names an input and an output address for each), and
answers whoever asked. They are asked in turns, in short blocks whose order rotates, so that what
else the machine does meets all of them; a ratio is that of two blocks of the same turn.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import zmq

import engine_client
from engine_client import EngineClient, SamplingParams
from engine_client.wire.codec import codec_named
from engine_client.wire.messages import Hello, Init, handshake_message
from tests.helpers import run_in_thread, scaled
from tests.interop.engines import ARGUMENTS, HERE, engine_environment, vllm_engines
from tests.interop.environment import environment

CALLS = 300
TOKENS = 200
AT_ONCE = (1, 8, 32)
TURNS = int(os.environ.get("ENGINE_CLIENT_INTEROP_TURNS", "5"))
SLOWEST = 3.0
"""How many times as long as vLLM's own it may take: a busy machine makes two."""
OURS = "engine_client"
FRONTENDS = ("SyncMPClient", "AsyncMPClient", OURS)
"""In the order of their addresses: SyncMPClient can be the first only."""
Task = tuple[Any, ...]
"""`latency` and how many calls, or `rate`, how many requests and tokens for each."""
Measured = tuple[float, float]
"""What was measured, and the seconds of processor time that the client's process took for a call or
a token: what it leaves to the engine on a machine with few cores, and less noisy."""
Measure = Callable[[Task], Measured]
TASKS: dict[str, Task] = {"is_sleeping": ("latency", CALLS)} | {
    f"{count} at once": ("rate", count, TOKENS) for count in AT_ONCE
}


def ours(client: EngineClient, task: Task) -> Measured:
    """Measure this client once."""
    start = time.process_time()
    value = _ours(client, task)
    return value, (time.process_time() - start) / math.prod(task[1:])


def _ours(client: EngineClient, task: Task) -> float:
    if task[0] == "latency":
        elapsed = []
        for _ in range(task[1]):
            start = time.perf_counter()
            client.call_utility("is_sleeping")
            elapsed.append(time.perf_counter() - start)
        return statistics.median(elapsed)
    _, count, length = task
    params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
    prompts = [[1, 3 + number, 7, 8] for number in range(count)]
    start = time.perf_counter()
    tokens = sum(len(completion.token_ids) for completion in client.generate(prompts, params))
    rate = tokens / (time.perf_counter() - start)
    assert tokens == count * length
    return rate


def addresses(folder: Path, frontend: int) -> tuple[str, str]:
    """Where a frontend binds its input and its output socket."""
    return f"ipc://{folder}/in{frontend}", f"ipc://{folder}/out{frontend}"


def greet(address: str, folder: Path) -> None:
    """Tell the engine about all frontends and wait until it is ready."""
    inputs, outputs = zip(*(addresses(folder, number) for number in range(3)), strict=True)
    codec = codec_named("msgpack")
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 1000
        router.rcvtimeo = int(scaled(200) * 1000)
        router.bind(address)
        while True:
            identity, frame = router.recv_multipart()
            if not isinstance(handshake_message(codec.decode(frame)), Hello):
                return
            router.send_multipart([identity, codec.encode(Init(inputs, outputs).to_plain())])


@contextmanager
def theirs(name: str, folder: Path, arguments: dict[str, Any]) -> Iterator[Measure]:
    """Run one of vLLM's clients in a process; yield what measures it once."""
    vllm = environment()
    frontend = FRONTENDS.index(name)
    input_address, output_address = addresses(folder, frontend)
    job = {
        "arguments": ARGUMENTS | arguments | {"model": str(folder / "model")},
        "input_address": input_address,
        "output_address": output_address,
        "client_index": frontend,
    }
    kind = "sync" if name == "SyncMPClient" else "async"
    with (
        (folder / f"{kind}.log").open("w") as log,
        subprocess.Popen(
            [vllm.python, HERE / "vllm_clients.py", kind, json.dumps(job)],
            env=os.environ | engine_environment(vllm, folder),
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

        def measure(task: Task) -> Measured:
            while waiting:  # for its engine, which starts while others do
                assert answer() == waiting.pop()
            stdin.write(json.dumps(task) + "\n")
            stdin.flush()
            value, processor = answer()
            return value, processor

        try:
            yield measure
        finally:
            stdin.close()
            try:
                process.wait(scaled(30))
            finally:
                process.kill()


@contextmanager
def frontends(folder: Path) -> Iterator[dict[str, Measure]]:
    """The three clients of one engine."""
    # The defaults of vLLM.
    arguments: dict[str, Any] = {"enable_lora": False, "max_loras": 1, "max_cpu_loras": None}
    with ExitStack() as stack:
        group = stack.enter_context(vllm_engines(folder, 1, transport="ipc", **arguments))
        greeting = run_in_thread(greet, group.address, folder)
        measures = {
            name: stack.enter_context(theirs(name, folder, arguments)) for name in FRONTENDS[:2]
        }
        client = stack.enter_context(
            engine_client.connect_bootstrapped(
                *addresses(folder, 2),
                client_index=2,
                connect_timeout=scaled(150),
                timeout=scaled(60),
            )
        )
        greeting.result(scaled(200))
        yield measures | {OURS: lambda task: ours(client, task)}


def measure_in_turns(measures: dict[str, Measure]) -> dict[str, dict[str, list[Measured]]]:
    """Measure each task with each client, turn by turn; the first turn warms up."""
    found: dict[str, dict[str, list[Measured]]] = {
        task: {name: [] for name in measures} for task in TASKS
    }
    names = list(measures)
    for turn in range(TURNS + 1):
        order = names[turn % 3 :] + names[: turn % 3]
        for label, task in TASKS.items():
            for name in order:
                value = measures[name](task)
                if turn > 0:
                    found[label][name].append(value)
    return found


def ratios(ours: list[float], theirs: list[float]) -> tuple[float, float, float]:
    """Median, least and most of ours by theirs, turn by turn."""
    each = [one / other for one, other in zip(ours, theirs, strict=True)]
    return statistics.median(each), min(each), max(each)


def table(values: dict[str, dict[str, list[float]]], units: dict[str, str]) -> list[str]:
    """A row for each client, a column for each task."""
    titles = [f"{label} ({units[label]})" for label in values]
    lines = [" " * 15 + "".join(f"{title:>31}" for title in titles)]
    for name in (OURS, *FRONTENDS[:2]):
        cells = []
        for by_client in values.values():
            shown = f"{statistics.median(by_client[name]):,.0f}"
            if name != OURS:
                median, least, most = ratios(by_client[OURS], by_client[name])
                shown += f" ({median:.2f}, {least:.2f} to {most:.2f})"
            cells.append(f"{shown:>31}")
        lines.append(f"{name:<15}{''.join(cells)}")
    return lines


def test_beside_vllm(report: list[str]) -> None:
    """Calls and requests take no longer than with vLLM's own clients, give or take."""
    with (
        tempfile.TemporaryDirectory(prefix="ec-speed-", ignore_cleanup_errors=True) as name,
        frontends(Path(name)) as measures,
    ):
        found = measure_in_turns(measures)
    units = {label: "us" if task[0] == "latency" else "tokens/s" for label, task in TASKS.items()}
    scale = {"us": 1e6, "tokens/s": 1.0}
    values, processor = (
        {
            label: {
                name: [one[part] * (1e6 if part else scale[units[label]]) for one in all_found]
                for name, all_found in by_client.items()
            }
            for label, by_client in found.items()
        }
        for part in (0, 1)
    )
    report += [
        "",
        f"three clients of one engine process, medians of {TURNS} turns; in brackets the ratio",
        "engine_client / that client, turn by turn: median, least to most",
        *table(values, units),
        "processor time of the client's process, for a call or a token",
        *table(processor, dict.fromkeys(units, "us")),
    ]
    for label, by_client in values.items():
        for name in FRONTENDS[:2]:
            median, _, _ = ratios(by_client[OURS], by_client[name])
            slower = median if units[label] == "us" else 1 / median
            assert slower <= SLOWEST, (label, name, median)
