"""Time limits of tests, all scaled by one environment variable for slow machines."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

TIMEOUT_FACTOR = float(os.environ.get("ENGINE_CLIENT_TEST_TIMEOUT_FACTOR", "1"))
"""Multiplies every limit: 3 on a slow or busy machine."""


def scaled(seconds: float) -> float:
    """Return a limit in seconds, adapted to the machine."""
    return seconds * TIMEOUT_FACTOR


def wait_until(
    condition: Callable[[], object], *, timeout: float = 10.0, what: str = "the condition"
) -> None:
    """Poll until the condition holds; for what nobody announces, such as a count or a file.

    Args:
        condition: Called again and again; any true value ends the wait.
        timeout: Limit in seconds, scaled here.
        what: What is awaited, for the error.

    Raises:
        AssertionError: The condition did not come to hold within the limit.
    """
    limit = scaled(timeout)
    end = time.monotonic() + limit
    while not condition():
        if time.monotonic() >= end:
            raise AssertionError(f"waited {limit:g} s for {what}")
        time.sleep(0.002)
