"""The dispatcher's decisions under schedules that nobody would write: every account holds, always.

The default run draws some hundred schedules by hypothesis and as many at random; ``--long`` plays
100,000.  A failing random schedule is printed with its seed, shrunk.
"""

from __future__ import annotations

import logging
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)

from engine_client.dispatch.core import Core
from engine_client.dispatch.peers import Connection, Peer
from engine_client.dispatch.registry import Registry
from tests.helpers.limits import TIMEOUT_FACTOR
from tests.simulation.schedules import failure, play_many, schedule, shrink
from tests.simulation.world import STEPS, Options, World

SMALL = st.integers(0, 15)
LONG = 100_000
"""Random schedules of ``--long``."""
PROCESSES = os.cpu_count() or 1
ROOT = Path(__file__).resolve().parents[2]
LONG_SECONDS = 1800.0
"""What they may take; a slow machine plays fewer, and says how many."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Deaths by the thousand are logged by the thousand otherwise."""
    logger = logging.getLogger("engine_client")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    yield
    logger.setLevel(level)


class Simulation(RuleBasedStateMachine):
    """One world; hypothesis chooses what happens in it."""

    world: World | None = None
    make_world: Callable[[Options], World] = World

    @initialize(options=st.integers(0, 255))
    def begin(self, options: int) -> None:
        self.world = self.make_world(Options.picked(options))

    def teardown(self) -> None:
        if self.world is not None:
            self.world.finish_all()


def _add_rules() -> None:
    def make(name: str) -> Callable[[Simulation, int, int], None]:
        def run(self: Simulation, a: int, b: int) -> None:
            if self.world is not None:
                self.world.run(name, a, b)

        run.__name__ = name
        return run

    for name, (_, weight) in STEPS.items():
        if weight:
            setattr(Simulation, name, rule(a=SMALL, b=SMALL)(make(name)))


_add_rules()


def run_simulation(examples: int, steps: int = 40) -> None:
    """Let hypothesis play schedules; it raises what the shortest failing one raises."""
    run_state_machine_as_test(
        Simulation,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            report_multiple_bugs=False,
            phases=[Phase.generate, Phase.shrink],  # explanations take longer than all the rest
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.timeout(600)
def test_schedules_of_hypothesis(request: pytest.FixtureRequest) -> None:
    """The accounts hold after every step of every schedule that hypothesis draws."""
    run_simulation(2_000 if request.config.getoption("--long") else 60)


def test_random_schedules() -> None:
    """The accounts hold after every step of some hundred long schedules."""
    seed = random.getrandbits(32)
    print(f"seed {seed}")
    assert play_many(seed, 300)[0] == 300


@pytest.mark.long
@pytest.mark.timeout(LONG_SECONDS + 300)
def test_very_many_random_schedules(capsys: pytest.CaptureFixture[str]) -> None:
    """The accounts hold after every step of 100,000 schedules, or of as many as time allows."""
    seed = random.getrandbits(32)
    share = LONG // PROCESSES
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.simulation.schedules"),
                *(str(seed + number * share), str(share), str(LONG_SECONDS * TIMEOUT_FACTOR)),
            ],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(PROCESSES)
    ]
    try:
        said = [process.communicate()[0] for process in processes]
    finally:
        for process in processes:
            with process:
                process.kill()
    assert all(process.returncode == 0 for process in processes), "\n".join(said)
    played, steps = (
        sum(counts) for counts in zip(*(map(int, s.split()) for s in said), strict=True)
    )
    with capsys.disabled():
        print(f"\nseed {seed}: {played:,} schedules of {steps:,} steps")
    assert played >= LONG // 10


# -- a broken rule is found -----------------------------------------------------------------------


def pop_first(self: Registry) -> None:
    """Forget what was abandoned before it is unregistered, as an interrupt in between would."""
    while self.abandoned:
        self.abandoned.popleft()


def bury_only(self: Core, peer: Peer, why: str, now: float) -> None:
    """Take an engine for dead and forget who waits for it."""
    peer.forget()
    self.registry.bury_engine(peer.index, why)


def sentinel_unseen(self: Core, connection: Connection | None, now: float) -> None:
    """An engine reports its death, and what waits for it goes on waiting."""
    if connection is not None:
        connection.retired = True


def never_told(self: Core) -> None:
    """Keep it from engines that a request was left."""
    self.requests.take_aborts()


def from_any_connection(
    self: Core, frames: Sequence[bytes], fd: int, now: float, *, followed: bool = True
) -> bool:
    """Trust the descriptor of a message without a look at the monitors."""
    return output(self, frames, fd, now, followed=True)


output = Core.output


BREAKS: list[tuple[type[Any], str, Callable[..., Any]]] = [
    (Registry, "_drain", pop_first),
    (Core, "_bury", bury_only),
    (Core, "_sentinel", sentinel_unseen),
    (Core, "abort", never_told),
    (Core, "output", from_any_connection),
]


@pytest.mark.parametrize(
    ("owner", "name", "broken"), BREAKS, ids=[broken.__name__ for _, _, broken in BREAKS]
)
def test_a_broken_rule_is_found_and_shrunk(
    owner: type[Any], name: str, broken: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a rule that it guards, the simulation fails, and says so in few steps."""
    monkeypatch.setattr(owner, name, broken)
    for seed in range(3_000):
        options, steps = schedule(seed)
        error = failure(options, steps)
        if error is not None:
            break
    assert isinstance(error, AssertionError)
    options, steps = shrink(options, steps, error)
    assert len(steps) <= 10, steps
    monkeypatch.undo()
    assert failure(options, steps) is None


def test_hypothesis_shrinks_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that fails nobody when an engine dies: a call, a death, and one look are enough."""
    monkeypatch.setattr(Core, "_bury", bury_only)
    worlds: list[World] = []

    def make(options: Options) -> World:
        worlds.append(World(options))
        return worlds[-1]

    monkeypatch.setattr(Simulation, "make_world", staticmethod(make))
    with pytest.raises(AssertionError, match="wait"):
        run_simulation(500, 8)
    # The shortest failing schedule is the last one that hypothesis plays.
    assert worlds[-1].steps <= 4
