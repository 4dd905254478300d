"""Ctrl-C at random instants.

A timer (`setitimer`) delivers SIGALRM to the main thread after a random, very short time, and the
handler raises `KeyboardInterrupt` wherever that thread happens to be, as SIGINT's handler does.
"""

from __future__ import annotations

import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import pytest


def storm_test(timeout: float = 120.0) -> pytest.MarkDecorator:
    """Mark a test that uses `interrupt_storm`.

    The usual time limit of a test is itself a SIGALRM; this one is watched from a thread.
    """
    return pytest.mark.timeout(timeout, method="thread")


@dataclass(frozen=True, slots=True)
class StormReport:
    """What a storm did."""

    seed: int
    rounds: int
    completed: int
    """Rounds whose action returned."""
    interrupted: int
    """Rounds that ended with KeyboardInterrupt."""
    delivered: int
    """Interrupts raised by the handler."""
    lost: int
    """Interrupts that landed where Python can only report them (a callback from C, a finalizer)."""


class _Alarm:
    """The handler: raises once per round, and never outside of one."""

    def __init__(self) -> None:
        self.armed = False
        self.delivered = 0

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if self.armed:
            self.armed = False
            self.delivered += 1
            raise KeyboardInterrupt


def interrupt_storm(
    action: Callable[[], object],
    *,
    seconds: float | None = None,
    rounds: int | None = None,
    shortest: float = 1e-6,
    longest: float = 800e-6,
    seed: int | None = None,
    between: Callable[[], object] | None = None,
) -> StormReport:
    """Run an action again and again and interrupt each run at a random instant.

    Must be called in the main thread, by a test marked with `storm_test`. Errors of the action
    other than KeyboardInterrupt end the storm.

    Args:
        action: What is interrupted. A run that is faster than its alarm is not interrupted.
        seconds: End after this time.
        rounds: End after this many runs. At least one of the two is needed.
        shortest: Least time from the start of a run to its interrupt, in seconds.
        longest: Greatest such time.
        seed: For the random instants; printed, so that a failing test shows it.
        between: Called after each run, free of interrupts.

    Returns:
        The numbers of the storm.
    """
    if seconds is None and rounds is None:
        raise ValueError("say how long the storm lasts: seconds= or rounds=")
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("signals reach the main thread only")
    if signal.getitimer(signal.ITIMER_REAL)[0]:
        raise RuntimeError("SIGALRM is in use, probably for the test's time limit: @storm_test()")
    if seed is None:
        seed = random.getrandbits(32)
    print(f"interrupt storm, seed {seed}")
    chance = random.Random(seed)
    alarm = _Alarm()
    done = completed = interrupted = lost = 0

    def one_round(delay: float) -> None:
        nonlocal completed, interrupted
        try:
            alarm.armed = True
            signal.setitimer(signal.ITIMER_REAL, delay)
            action()
            completed += 1
        except KeyboardInterrupt:
            interrupted += 1
        finally:
            alarm.armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)

    previous_hook = sys.unraisablehook

    def unraisable(report: Any) -> None:
        nonlocal lost
        if isinstance(report.exc_value, KeyboardInterrupt):
            lost += 1
        else:
            previous_hook(report)

    previous = signal.signal(signal.SIGALRM, alarm)
    sys.unraisablehook = unraisable
    end = None if seconds is None else time.monotonic() + seconds
    try:
        while (rounds is None or done < rounds) and (end is None or time.monotonic() < end):
            try:
                one_round(chance.uniform(shortest, longest))
            except KeyboardInterrupt:
                # It landed in the round's own last lines; no second one can come.
                signal.setitimer(signal.ITIMER_REAL, 0)
                interrupted += 1
            done += 1
            if between is not None:
                between()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        sys.unraisablehook = previous_hook
    return StormReport(seed, done, completed, interrupted, alarm.delivered, lost)
