"""Engines that this client starts itself, with the real command line of vLLM."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_client import (
    EngineClient,
    EngineDeadError,
    HandshakeError,
    SamplingParams,
    launch,
)
from engine_client.tools.vllm import VllmHeadless
from tests.helpers import scaled, wait_until
from tests.interop.engines import ARGUMENTS, engine_environment
from tests.interop.environment import environment
from tests.interop.tiny_model import make_model

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = ("enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras", "disable_log_stats")


def arguments() -> list[str]:
    """Of ``vllm serve``, as the other tests give them to its engines."""
    words = []
    for name, value in ARGUMENTS.items():
        if name not in LEFT_OUT:
            words.append(f"--{name.replace('_', '-')}")
            if value is not True:
                words.append(str(value))
    return words


@pytest.fixture
def model(folder: Path) -> Path:
    """The folder of a model."""
    return make_model(folder / "model")


def command(model: Path, *, one_launcher: bool = False) -> VllmHeadless:
    """What starts engines of a model."""
    vllm = environment()
    return VllmHeadless(
        str(model),
        args=arguments(),
        env=engine_environment(vllm, model.parent),
        one_launcher=one_launcher,
        executable=[str(vllm.venv / "bin" / "vllm")],
    )


def processes(needle: str) -> list[int]:
    """Those with a text among their arguments or variables."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                seen = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            except OSError:
                continue
            if needle.encode() in seen:
                found.append(int(entry.name))
    return found


def engine_processes(folder: Path) -> Iterator[tuple[int, int]]:
    """The engines of a folder: index and process id."""
    for pid in processes(str(folder)):
        title = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].strip()
        if title.startswith(b"VLLM::EngineCore"):
            _, _, rank = title.partition(b"_DP")
            yield int(rank or 0), pid


def check_work(client: EngineClient, count: int) -> None:
    """Both engines answer calls and generate."""
    assert [info.ready["vllm_version"] for info in client.engines] == ["0.32.0"] * count
    assert client.call_utility("is_sleeping") == [False] * count
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    completions = client.generate([[1, 2, 3 + i] for i in range(8)], params)
    assert [len(completion.token_ids) for completion in completions] == [8] * 8
    assert {completion.engine for completion in completions} == set(range(count))


@pytest.mark.parametrize("one_launcher", [False, True], ids=["two launchers", "one launcher"])
def test_launch(model: Path, report: list[str], one_launcher: bool) -> None:
    """Two engines start, work, lose one of them, and leave nothing behind when they are closed."""
    what = "one launcher" if one_launcher else "two launchers"
    start = time.monotonic()
    with launch(
        2,
        command=command(model, one_launcher=one_launcher),
        connect_timeout=scaled(150),
        timeout=scaled(60),
        close_timeout=scaled(15),
    ) as client:
        ready = time.monotonic()
        check_work(client, 2)
        victim = dict(engine_processes(model.parent))[1]
        os.kill(victim, 9)
        failure = client.settle_utility("pause_scheduler", "keep", False).failures[1]
        assert isinstance(failure, EngineDeadError)
        if one_launcher:
            # vLLM's launcher ends all its engines when one of them dies.
            wait_until(
                lambda: not any(info.alive for info in client.engines),
                timeout=60,
                what="the launcher to end its other engine",
            )
        else:
            client.resume_scheduler(engines=[0])
            params = SamplingParams(max_tokens=8, ignore_eos=True)
            (completion,) = client.generate([[5, 6]], params)
            assert completion.error is None
            assert completion.engine == 0
        closing = time.monotonic()
    closed = time.monotonic()
    assert processes(str(model.parent)) == []
    others = "the other ended with it" if one_launcher else "the other served on"
    report.append(
        f"vllm serve, {what}: ready in {ready - start:.1f} s; engine 1 was killed, {others}; "
        f"closed in {closed - closing:.1f} s, no process left"
    )


def test_bad_model(model: Path, report: list[str]) -> None:
    """A model that is not there ends the launch, with the log's last lines and the exit code."""
    wrong = model.with_name("missing")
    start = time.monotonic()
    with pytest.raises(HandshakeError) as caught:
        launch(1, command=command(wrong), connect_timeout=scaled(150))
    text = str(caught.value)
    assert "exited with code 1" in text
    assert "missing" in text
    assert processes(str(model.parent)) == []
    report.append(f"a bad model path, after {time.monotonic() - start:.1f} s: {text[:600]}")


def test_example(model: Path, report: list[str]) -> None:
    """The example starts an engine, asks it, generates, and ends well."""
    vllm = environment()
    start = time.monotonic()
    done = subprocess.run(
        [
            sys.executable,
            ROOT / "examples" / "08_vllm.py",
            model,
            "--engines",
            "1",
            "--vllm",
            vllm.venv / "bin" / "vllm",
            "--",
            *arguments(),
        ],
        env=os.environ | engine_environment(vllm, model.parent) | {"EXAMPLE": str(model.parent)},
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=scaled(150),
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "engine 0: vLLM 0.32.0, msgpack" in done.stdout
    assert done.stdout.count("(LENGTH)") == 8
    report.append(f"examples/08_vllm.py ran in {time.monotonic() - start:.1f} s")
