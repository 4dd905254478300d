"""Commands of ``vllm serve``, and launches with a program that stands for it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from engine_client import HandshakeError, launch
from engine_client.tools.vllm import VllmHeadless
from tests.helpers import scaled, wait_until
from tests.helpers.processes import ROOT

ADDRESS = "tcp://127.0.0.1:5577"

STAND_IN = """
import argparse, json, os, subprocess, sys

parser = argparse.ArgumentParser()
parser.add_argument("command")
parser.add_argument("model")
parser.add_argument("--headless", action="store_true")
for name in ("address", "rpc-port", "size", "size-local", "start-rank"):
    parser.add_argument(f"--data-parallel-{name}")
parser.add_argument("--note")
given = parser.parse_args()
if given.model == "no/such/model":
    print("loading", given.model)
    print("OSError: no/such/model is not a folder", file=sys.stderr)
    sys.exit(3)
assert given.command == "serve" and given.headless
first, count = int(given.data_parallel_start_rank), int(given.data_parallel_size_local)
if given.note:
    with open(given.note, "a") as note:
        note.write(json.dumps([first, count, os.environ.get("DEVICE")]) + "\\n")
where = f"tcp://{given.data_parallel_address}:{given.data_parallel_rpc_port}"
engine = [sys.executable, "-m", "engine_client.tools.mock_engine", "--codec", "msgpack"]
engines = [
    subprocess.Popen([*engine, "--connect", where, "--index", str(first + k)]) for k in range(count)
]
# As vLLM does: when one ends, all end.
pid, _ = os.wait()
for one in engines:
    one.terminate()
sys.exit(1)
"""


@pytest.fixture
def program(tmp_path: Path) -> list[str]:
    """What is started in vLLM's place: it starts reference engines."""
    path = tmp_path / "vllm.py"
    path.write_text(STAND_IN)
    return [sys.executable, str(path)]


def options(argv: list[str]) -> dict[str, str]:
    """The data-parallel options of a command."""
    return {
        word.removeprefix("--data-parallel-"): argv[place + 1]
        for place, word in enumerate(argv)
        if word.startswith("--data-parallel-")
    }


def test_a_launcher_for_each() -> None:
    """Every engine has a command of its own, which tells its index and the address."""
    command = VllmHeadless("org/model", args=["--dtype", "float16"])
    jobs = command.jobs(ADDRESS, [2, 3])
    assert [(job.index, tuple(job.also)) for job in jobs] == [(2, ()), (3, ())]
    for job, index in zip(jobs, (2, 3), strict=True):
        argv = list(job.argv)
        assert argv[:4] == ["vllm", "serve", "org/model", "--headless"]
        assert argv[-2:] == ["--dtype", "float16"]
        assert options(argv) == {
            "address": "127.0.0.1",
            "rpc-port": "5577",
            "size": "4",
            "size-local": "1",
            "start-rank": str(index),
        }


def test_one_launcher() -> None:
    """One command starts all engines, where that is chosen."""
    (job,) = VllmHeadless("m", one_launcher=True).jobs(ADDRESS, [0, 1, 2])
    assert (job.index, tuple(job.also)) == (0, (1, 2))
    assert options(list(job.argv)) == {
        "address": "127.0.0.1",
        "rpc-port": "5577",
        "size": "3",
        "size-local": "3",
        "start-rank": "0",
    }


def test_address_of_version_6() -> None:
    """The brackets of an IPv6 address are not part of the host."""
    (job,) = VllmHeadless("m").jobs("tcp://[::1]:5577", [0])
    assert options(list(job.argv))["address"] == "::1"


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine's variables win over those of all, and these over this process's."""
    for name in ("A", "B", "C"):
        monkeypatch.setenv(name, "process")
    command = VllmHeadless("m", env={"B": "all", "C": "all"}, per_engine_env={1: {"C": "one"}})
    first, second = command.jobs(ADDRESS, [0, 1])
    assert first.env is not None
    assert second.env is not None
    assert [first.env[name] for name in "ABC"] == ["process", "all", "all"]
    assert [second.env[name] for name in "ABC"] == ["process", "all", "one"]
    assert "C" in os.environ


@pytest.mark.parametrize(
    ("error", "given"),
    [
        (TypeError, {"args": "--dtype half"}),
        (TypeError, {"executable": "vllm"}),
        (ValueError, {"one_launcher": True, "per_engine_env": {0: {"A": "b"}}}),
    ],
)
def test_mistakes(error: type[Exception], given: dict[str, Any]) -> None:
    """A command line in one string and a contradiction are refused."""
    with pytest.raises(error):
        VllmHeadless("m", **given)


@pytest.mark.parametrize("one_launcher", [False, True])
def test_launch(program: list[str], tmp_path: Path, one_launcher: bool) -> None:
    """Engines come to the port that was bound first, and end with the client."""
    note = tmp_path / "note"
    command = VllmHeadless(
        "model",
        args=["--note", str(note)],
        env={"PYTHONPATH": str(ROOT)},
        per_engine_env={} if one_launcher else {0: {"DEVICE": "zero"}, 1: {"DEVICE": "one"}},
        one_launcher=one_launcher,
        executable=program,
    )
    with launch(2, command=command, connect_timeout=scaled(30), timeout=scaled(10)) as client:
        address = client.handshake_address
        assert address is not None
        assert address.startswith("tcp://127.0.0.1:")
        assert [info.codec for info in client.engines] == ["msgpack", "msgpack"]
        assert client.call_utility("echo", "hello") == ["hello", "hello"]
    started = sorted(map(json.loads, note.read_text().splitlines()))
    assert started == [[0, 2, None]] if one_launcher else [[0, 1, "zero"], [1, 1, "one"]]


@pytest.mark.parametrize("one_launcher", [False, True])
def test_death(program: list[str], one_launcher: bool) -> None:
    """With a launcher each, one engine's death is its own; with one launcher it is everybody's."""
    command = VllmHeadless(
        "model", env={"PYTHONPATH": str(ROOT)}, one_launcher=one_launcher, executable=program
    )
    with launch(2, command=command, connect_timeout=scaled(30), timeout=scaled(10)) as client:
        outcomes = client.settle_utility("mock_fault", {"method": "echo", "do": "die"}, engines=[1])
        assert outcomes.all_ok
        failed = client.settle_utility("echo", 1)
        assert 1 in failed.failures
        if one_launcher:
            wait_until(lambda: not any(info.alive for info in client.engines), what="all to end")
        else:
            assert client.call_utility("echo", 2, engines="alive") == [2]


def test_bad_model(program: list[str]) -> None:
    """A launch that fails says so at once, with the exit code and the last words of the log."""
    command = VllmHeadless("no/such/model", executable=program)
    with pytest.raises(HandshakeError) as caught:
        launch(2, command=command, connect_timeout=scaled(30))
    for part in ("exited with code 3", "loading no/such/model", "OSError: no/such/model"):
        assert part in str(caught.value)


def test_missing_program() -> None:
    """A program that is not there is an error at once that names it."""
    command = VllmHeadless("m", executable=["no-such-vllm"])
    with pytest.raises(HandshakeError, match="no-such-vllm"):
        launch(1, command=command, connect_timeout=scaled(30))
