"""Time limits: what is accepted, and one moment that never moves."""

from __future__ import annotations

import copy
import math
import pickle
import threading
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_client.deadline import USE_DEFAULT, Deadline, parse_timeout


class FakeClock:
    """A clock that moves when told."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (None, None),
        (math.inf, None),
        (0, 0.0),
        (0.0, 0.0),
        (-0.0, 0.0),
        (1e-9, 1e-9),
        (5, 5.0),
        (1e10, 1e10),
        (1e300, 1e300),
        (Fraction(1, 4), 0.25),
        pytest.param(10**400, None, id="beyond the floats"),
        pytest.param(10**5000, None, id="too long to print"),
    ],
)
def test_accepted_time_limits(given: Any, seconds: float | None) -> None:
    """Any number of seconds from 0 on is a limit; None and infinity are none."""
    assert parse_timeout(given) == seconds


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (-1, ValueError),
        (-1e-9, ValueError),
        (-math.inf, ValueError),
        (math.nan, ValueError),
        pytest.param(-(10**400), ValueError, id="below the floats"),
        pytest.param(-(10**5000), ValueError, id="too long to print"),
        (True, TypeError),
        (False, TypeError),
        ("5", TypeError),
        ("", TypeError),
        (b"5", TypeError),
        ([5], TypeError),
        (5j, TypeError),
        (Decimal(5), TypeError),
        (USE_DEFAULT, TypeError),
    ],
)
def test_refused_time_limits(given: Any, error: type[Exception]) -> None:
    """What is negative, NaN or no number is refused under the name of the argument."""
    with pytest.raises(error, match=r"worker_timeout must be .*seconds.*None for no limit") as info:
        parse_timeout(given, name="worker_timeout")
    assert type(info.value) is error
    assert len(str(info.value)) < 500


def test_a_deadline_counts_down_and_stops_at_zero() -> None:
    """What remains shrinks with the clock and is never negative."""
    clock = FakeClock()
    deadline = Deadline(2.0, clock=clock)
    assert (deadline.remaining(), deadline.expired) == (2.0, False)
    clock.now += 1.5
    assert (deadline.remaining(), deadline.expired) == (0.5, False)
    clock.now += 0.5
    assert (deadline.remaining(), deadline.expired) == (0.0, True)
    clock.now += 100
    assert (deadline.remaining(), deadline.expired) == (0.0, True)


def test_no_limit_never_ends() -> None:
    """Without a limit nothing remains to be counted, and a lock is waited for without limit."""
    clock = FakeClock()
    deadline = Deadline(None, clock=clock)
    clock.now = 1e18
    assert deadline.remaining() is None
    assert not deadline.expired
    assert deadline.lock_timeout() == -1
    assert deadline.lock_timeout(at_most=30) == 30


def test_a_limit_of_zero_is_over_at_once() -> None:
    """A limit of 0 has expired when it is made, on a clock that stands still."""
    deadline = Deadline(0.0, clock=FakeClock())
    assert deadline.expired
    assert deadline.lock_timeout() == 0


def test_a_step_within_a_deadline_ends_with_it() -> None:
    """A shorter step is kept to, a longer one is cut off at the deadline."""
    clock = FakeClock()
    deadline = Deadline(10.0, clock=clock)
    assert deadline.lock_timeout(at_most=3) == 3
    clock.now += 8
    assert deadline.lock_timeout(at_most=3) == 2


@given(st.floats(min_value=0, allow_nan=False), st.floats(min_value=0, max_value=1e12))
def test_every_remainder_is_one_that_a_lock_accepts(timeout: float, passed: float) -> None:
    """Whatever the limit and the time, a lock can be waited for with what remains."""
    clock = FakeClock(0.0)
    deadline = Deadline(parse_timeout(timeout), clock=clock)
    clock.now = passed
    latch = threading.Lock()
    assert latch.acquire(timeout=deadline.lock_timeout())
    left = deadline.remaining()
    assert left is None or 0 <= left <= timeout


def test_the_default_marker_is_one_object_that_prints_its_name() -> None:
    """The marker survives copies and pickles as itself, and reads as its name in a signature."""
    assert copy.deepcopy(USE_DEFAULT) is USE_DEFAULT
    assert pickle.loads(pickle.dumps(USE_DEFAULT)) is USE_DEFAULT
    assert repr(USE_DEFAULT) == "USE_DEFAULT"
