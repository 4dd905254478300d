"""Real engines for the tests of this folder, which are collected on demand only.

They run with ENGINE_CLIENT_INTEROP=1 or `-m interop`; `tests/interop/run` makes what they need
first.  What they measure is printed at the end.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import engine_client
from engine_client import EngineClient
from tests.helpers import scaled
from tests.interop import oracle_cases, text_cases
from tests.interop.engines import (
    ARGUMENTS,
    HERE,
    EngineGroup,
    engine_environment,
    vllm_engines,
)
from tests.interop.environment import environment
from tests.interop.tiny_model import make_adapter, make_model

_REPORT = pytest.StashKey[list[str]]()


def _wanted(config: pytest.Config) -> bool:
    words = config.getoption("markexpr", "").replace("(", " ").replace(")", " ").split()
    asked = "interop" in words and "not" not in words
    return asked or os.environ.get("ENGINE_CLIENT_INTEROP") == "1"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "interop: needs real vLLM engines (tests/interop/run)")
    config.stash[_REPORT] = []
    if _wanted(config) and not environment().exists:
        raise pytest.UsageError(
            f"no vLLM in {environment().folder}; tests/interop/run installs it and runs these tests"
        )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return None if _wanted(config) else True


def pytest_report_header(config: pytest.Config) -> str:
    if _wanted(config):
        return f"real vLLM: {environment().folder}"
    return "real vLLM: not asked for; tests/interop/run does"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.interop)
            # A start with cold caches on a busy machine takes a while.
            item.add_marker(pytest.mark.timeout(400))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if config.stash[_REPORT]:
        terminalreporter.section("what real vLLM engines did")
        for line in config.stash[_REPORT]:
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def report(pytestconfig: pytest.Config) -> list[str]:
    """Lines that are printed at the end of the run."""
    return pytestconfig.stash[_REPORT]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short name: an ipc path has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="ec-interop-", ignore_cleanup_errors=True) as name:
        yield Path(name)


@pytest.fixture(scope="session")
def group() -> Iterator[EngineGroup]:
    """Two engines that all tests share; engine 0 takes larger adapters than engine 1."""
    with (
        tempfile.TemporaryDirectory(prefix="ec-interop-", ignore_cleanup_errors=True) as name,
        vllm_engines(Path(name), only={0: {"max_lora_rank": 64}}) as engines,
    ):
        yield engines


@pytest.fixture(scope="session")
def shared_client(group: EngineGroup) -> Iterator[EngineClient]:
    """The one client of the shared engines."""
    with engine_client.connect(
        group.address, engine_count=2, connect_timeout=scaled(150), timeout=scaled(60)
    ) as client:
        # An engine's output connection may be accepted after its READY: it would look like a
        # descriptor that the first test leaves.
        client.is_sleeping()
        yield client


@pytest.fixture
def client(shared_client: EngineClient) -> Iterator[EngineClient]:
    """The same client; what a test changes on the engines is set back after it."""
    yield shared_client
    shared_client.abort_all()
    shared_client.wake_up()
    shared_client.resume_scheduler()
    shared_client.set_weight_version("default")
    held = shared_client.settle_utility("list_loras").unwrap()
    for adapter in set().union(*held):
        shared_client.remove_lora(adapter)
    assert shared_client.reset_prefix_cache(reset_running_requests=True)
    assert shared_client.pending() == []
    assert all(info.alive for info in shared_client.engines)
    stats = shared_client.stats
    assert (stats.malformed_messages, stats.stray_messages, stats.deaths) == (0, 0, 0)


@pytest.fixture(scope="session")
def oracle(report: list[str]) -> Iterator[dict[str, Any]]:
    """What vLLM's own class answers, all cases of a run asked at once in one process."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ec-oracle-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        model = make_model(folder / "model")
        adapters = {
            adapter: str(make_adapter(folder / adapter, seed=number))
            for adapter, number in (("alpha", 1), ("beta", 2))
        }
        cases = [
            dataclasses.asdict(case)
            | {"lora": None if case.lora is None else [*case.lora, adapters[case.lora[0]]]}
            for case in oracle_cases.CASES
        ]
        job = {
            "arguments": ARGUMENTS | oracle_cases.ARGUMENTS | {"model": str(model)},
            "cases": cases,
            "texts": [dataclasses.asdict(case) for case in text_cases.CASES],
        }
        asked, answered = folder / "job.json", folder / "answers.json"
        asked.write_text(json.dumps(job))
        vllm = environment()
        done = subprocess.run(
            [vllm.python, HERE / "oracle.py", asked, answered],
            env=os.environ | engine_environment(vllm, folder),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=scaled(350),
            check=False,
        )
        assert done.returncode == 0, done.stdout[-4000:]
        report.append(f"vLLM's LLM class answered everything in {time.monotonic() - start:.1f} s")
        yield json.loads(answered.read_text())


@pytest.fixture(scope="session")
def wrapper_table(report: list[str]) -> Iterator[dict[int, tuple[str, ...]]]:
    """A row for each call of a wrapper, printed at the end in the order of the cases."""
    rows: dict[int, tuple[str, ...]] = {}
    yield rows
    report.append("")
    report.append(f"{'wrapper':<32} {'case':<25} {'after':>9}  result on both engines")
    for _, (wrapper, case, shown, elapsed) in sorted(rows.items()):
        line = " ".join(shown.split())
        line = line if len(line) <= 110 else f"{line[:107]}..."
        report.append(f"{wrapper:<32} {case:<25} {elapsed:>9}  {line}")
