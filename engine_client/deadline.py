"""A deadline: one time limit for a whole operation, made once where a caller enters.

Everything below the public methods takes a :class:`Deadline`, never a number of seconds, so that
no step can start a budget of its own.
"""

from __future__ import annotations

import math
import numbers
import threading
import time
from collections.abc import Callable
from enum import Enum
from typing import Final, Literal

from engine_client._render import shown

__all__ = ["USE_DEFAULT", "Deadline", "Timeout", "UseDefault", "parse_timeout"]


class UseDefault(Enum):
    """The type of :data:`USE_DEFAULT`; an enum so that it types and prints well."""

    USE_DEFAULT = "USE_DEFAULT"

    def __repr__(self) -> str:
        return self.value


USE_DEFAULT: Final = UseDefault.USE_DEFAULT
"""A timeout that was not given; it differs from ``None``, which means no limit."""

Timeout = float | None | Literal[UseDefault.USE_DEFAULT]


def parse_timeout(value: object, *, name: str = "timeout") -> float | None:
    """Check a time limit and return it in seconds, or None for no limit.

    Raises:
        TypeError: it is not a number (a bool or a string, say).
        ValueError: it is negative or NaN.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(
            f"{name} must be a number of seconds or None for no limit, "
            f"not {shown(value)} ({type(value).__name__})"
        )
    try:
        seconds = float(value)
    except OverflowError:  # an integer beyond the floats
        seconds = math.inf if value == abs(value) else -math.inf
    if math.isnan(seconds) or seconds < 0:
        # Not the value itself: an integer can be too long to print.
        raise ValueError(f"{name} must be 0 or more seconds, or None for no limit, not {seconds:g}")
    return None if seconds == math.inf else seconds


class Deadline:
    """The moment at which an operation must end, on the monotonic clock.

    Args:
        timeout: seconds from now; None for no limit.
        clock: tests pass their own.
    """

    __slots__ = ("_clock", "_end", "timeout")

    def __init__(
        self, timeout: float | None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.timeout = timeout
        self._clock = clock
        self._end = None if timeout is None else clock() + timeout

    def remaining(self) -> float | None:
        """Seconds left, never negative; None without a limit."""
        if self._end is None:
            return None
        return max(0.0, self._end - self._clock())

    @property
    def expired(self) -> bool:
        """Whether the moment has passed."""
        return self._end is not None and self._clock() >= self._end

    def lock_timeout(self, at_most: float | None = None) -> float:
        """What ``Lock.acquire(timeout=...)`` takes: -1 without a limit, never too large for it."""
        left = self.remaining()
        if at_most is not None:
            left = at_most if left is None else min(left, at_most)
        return -1 if left is None else min(left, threading.TIMEOUT_MAX)
