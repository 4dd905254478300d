"""Two real engines in lockstep: a dense model whose configuration claims experts, on the CPU.

Each is a launch of its own, so INIT tells them where they meet.  Who keeps the wave: the client
over the engines' own connections, the client as a coordinator, or vLLM's coordinator process.
``ENGINE_CLIENT_INTEROP_WAVES`` says how many waves are run (20).
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import zmq

import engine_client
from engine_client import EngineClient, EngineRequest, RequestStream, SamplingParams
from engine_client.wire.codec import codec_named
from engine_client.wire.messages import Hello, Init, handshake_message
from tests.helpers import run_in_thread, scaled, wait_until
from tests.interop.engines import HERE, EngineGroup, engine_environment, vllm_engines
from tests.interop.environment import environment
from tests.interop.tiny_model import make_model

WAVES = int(os.environ.get("ENGINE_CLIENT_INTEROP_WAVES", "20"))
Keeper = Literal["none", "in process", "vLLM's"]
CONNECT_TIMEOUT, TIMEOUT = scaled(200), scaled(60)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [probe.getsockname()[1] for probe in probes]


def _meeting() -> dict[str, Any]:
    first, *others = _free_ports(6)
    return {
        "data_parallel_master_ip": "127.0.0.1",
        "data_parallel_master_port": first,
        "_data_parallel_master_port_list": others,
        "_coord_store_port": 0,
        "data_parallel_size": 2,
    }


@contextlib.contextmanager
def _coordinator(folder: Path) -> Iterator[list[str]]:
    """vLLM's coordinator process; yields its addresses."""
    vllm = environment()
    with (
        (folder / "coordinator.log").open("wb") as log,
        subprocess.Popen(
            [vllm.python, HERE / "coordinator_process.py", "2"],
            env=os.environ | engine_environment(vllm, folder),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        ) as process,
    ):
        assert process.stdout is not None
        assert process.stdin is not None
        lines = iter(process.stdout.readline, b"")
        yield next(json.loads(line) for line in lines if line.startswith(b"["))
        process.stdin.close()
        process.wait(scaled(20))


def _greet(address: str, init: Init) -> None:
    """Answer the HELLO of both engines and wait until both are ready."""
    codec = codec_named("msgpack")
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 1000
        router.rcvtimeo = int(scaled(200) * 1000)
        router.bind(address)
        ready = 0
        while ready < 2:
            identity, frame = router.recv_multipart()
            if isinstance(handshake_message(codec.decode(frame)), Hello):
                router.send_multipart([identity, codec.encode(init.to_plain())])
            else:
                ready += 1


@contextlib.contextmanager
def _connected(keeper: Keeper, engines: EngineGroup) -> Iterator[EngineClient]:
    if keeper != "vLLM's":
        with engine_client.connect(
            engines.address,
            engine_count=2,
            coordinator=keeper == "in process",
            parallel_config=_meeting(),
            connect_timeout=CONNECT_TIMEOUT,
            timeout=TIMEOUT,
        ) as client:
            yield client
        return
    with _coordinator(engines.folder) as (publishes, sends, hears):
        data = f"ipc://{engines.folder}/in", f"ipc://{engines.folder}/out"
        init = Init((data[0],), (data[1],), sends, hears, publishes, _meeting())
        greeting = run_in_thread(_greet, engines.address, init)
        # The address of the coordinator comes with the registrations.
        with engine_client.connect_bootstrapped(
            *data, engine_count=2, connect_timeout=CONNECT_TIMEOUT, timeout=TIMEOUT
        ) as client:
            greeting.result(200)
            yield client


@pytest.fixture(params=["none", "in process", "vLLM's"])
def lockstep(request: pytest.FixtureRequest, folder: Path) -> Iterator[tuple[str, EngineClient]]:
    """Who keeps the wave, and a client of a fresh group."""
    model = make_model(folder / "experts", num_local_experts=4)
    with (
        vllm_engines(
            folder,
            only={1: {"data_parallel_start_rank": 1}},
            model=str(model),
            enable_lora=False,
            data_parallel_size=2,
            data_parallel_size_local=1,
            data_parallel_address="127.0.0.1",
            data_parallel_rpc_port=_free_ports(1)[0],
        ) as engines,
        _connected(request.param, engines) as client,
    ):
        yield request.param, client


def _call(client: EngineClient, name: str, rank: int, tokens: int) -> RequestStream:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return client.call(EngineRequest(name, [5, 6, 7], params, data_parallel_rank=rank))


def _run(client: EngineClient, name: str, rank: int, tokens: int = 2) -> None:
    with _call(client, name, rank, tokens) as stream:
        count = 0
        while stream.finish_reason is None:
            count += len(stream.recv(timeout=scaled(60)).new_token_ids)
    assert count == tokens


def _wait_beyond(client: EngineClient, waves: int) -> None:
    wait_until(lambda: client.stats.waves > waves, timeout=30, what="the end of a wave")


def test_lockstep_group(lockstep: tuple[str, EngineClient], report: list[str]) -> None:
    """Requests to either rank asleep and running, wave after wave, with pauses and streams."""
    keeper, client = lockstep
    assert all(info.ready["data_parallel_size"] == 2 for info in client.engines)
    began = time.monotonic()
    for number in range(WAVES):
        waves = client.stats.waves
        _run(client, f"asleep-{number}", number % 2, 1 + number % 3)
        _wait_beyond(client, waves)
    per_wave = (time.monotonic() - began) / WAVES
    with _call(client, "long", 1, 400) as long:
        long.recv()
        before = client.stats.wave
        for number in range(4):
            _run(client, f"running-{number}", number % 2)
        assert client.stats.wave == before
        assert sum(len(output.new_token_ids) for output in long) == 399
    for number in range(5):
        with _call(client, f"kept-{number}", number % 2, 60) as kept:
            kept.recv()
            client.pause_scheduler("keep", False)
            assert client.is_scheduler_paused() is True
            queued = _call(client, f"queued-{number}", 1 - number % 2, 3)
            client.resume_scheduler()
            assert sum(len(output.new_token_ids) for output in kept) == 59
            assert sum(len(output.new_token_ids) for output in queued) == 3
    client.pause_scheduler()
    client.resume_scheduler()
    for number in range(10):
        client.settle_utility("pause_scheduler", timeout=0.0005 * number)
        client.resume_scheduler()
        _run(client, f"after-{number}", number % 2)
    stats = client.stats
    assert (stats.malformed_messages, stats.stray_messages, stats.deaths) == (0, 0, 0)
    assert stats.waves >= WAVES
    report.append(
        f"lockstep, coordinator {keeper}: {WAVES} waves of a request, {per_wave * 1e3:.1f} ms "
        f"each; {stats.waves} waves and {stats.wakes} wake-ups in all"
    )
