"""The parts of ``python -m tests.stress``: short ones always, full size with ``--long``."""

from __future__ import annotations

import random

import pytest

from tests.helpers import scaled, storm_test
from tests.stress import load
from tests.stress.__main__ import parts
from tests.stress.soak import soak

FULL = parts(240.0)


@pytest.fixture
def seed() -> int:
    """A number that decides what is done; printed, so that a failing test shows it."""
    number = random.getrandbits(32)
    print(f"seed {number}")
    return number


def test_threads(seed: int) -> None:
    """200 threads at once, each with its own answers, and no reply too many."""
    load.threads(seed, count=200, calls=4_000)


def test_abandoned_calls(seed: int) -> None:
    """Every reply that nobody waits for any more is counted, and taken for nobody else's."""
    load.abandoned(seed, calls=500)


def test_a_stopped_engine(seed: int) -> None:
    """What is accepted for it arrives in order, the rest is refused, and the other goes on."""
    load.stopped(seed, calls=400)


def test_large_values(seed: int) -> None:
    """A large argument and a large result do not stop small calls."""
    load.large(seed, megabytes=30)


def test_short_lives(seed: int) -> None:
    """Clients that come and go leave nothing."""
    load.rounds(seed, count=15)


@storm_test()
def test_interrupts_beside_other_callers(seed: int) -> None:
    """Whoever is interrupted disturbs nobody, and leaves nothing registered."""
    load.storm(seed, seconds=2.0)


@pytest.mark.timeout(120)
def test_soak(seed: int) -> None:
    """Engines are killed, stopped and restarted; every account is exact afterwards."""
    soak(seed, seconds=scaled(6.0))


@pytest.mark.long
@storm_test(900.0)
@pytest.mark.parametrize("name", FULL)
def test_full_size(name: str, seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    """The same at the size that ``python -m tests.stress`` has."""
    figures = FULL[name](seed)
    with capsys.disabled():
        print(f"\n{name}, seed {seed}: {figures}")
