"""What the dispatcher waits for."""

from __future__ import annotations

import time

from engine_client.dispatch.sources import Sources


def test_a_wait_of_less_than_a_millisecond_does_not_end_too_early() -> None:
    """A poll takes whole milliseconds; rounded down, a loop on a timer would spin."""
    sources = Sources()
    for seconds in (1e-6, 0.0004, 0.0015):
        began = time.monotonic()
        assert sources.wait(seconds) == {}
        assert time.monotonic() - began >= seconds


def test_no_time_is_no_wait() -> None:
    """A timer that is overdue is a look, not an endless wait."""
    assert Sources().wait(-1.0) == {}
    assert Sources().wait(0.0) == {}
