"""A call without a time limit says in the log for whom it waits."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Iterator

import pytest

from engine_client import UtilityTimeoutError
from tests.helpers import run_in_thread, scaled, wait_until
from tests.scenarios.rig import Rig, rig

FIRST = 0.05


@pytest.fixture(scope="module")
def shared() -> Iterator[Rig]:
    """Two engines and a client that soon finds a call slow."""
    with rig(("cbor", "msgpack"), slow_call_warning=FIRST) as made:
        yield made


def warnings(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Return the warnings of slow calls so far."""
    return [record for record in caplog.records if "has been waiting" in record.getMessage()]


def test_a_slow_call_names_who_is_outstanding_and_what_failed(
    two: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    """The warning comes again at doubled intervals, with the failures that are known already."""
    two.fault("echo", "fail", engines=[0], message="boom")
    two.fault("echo", "hold", engines=[1])
    call = run_in_thread(two.client.settle_utility, "echo", "x")
    wait_until(lambda: len(warnings(caplog)) >= 3, what="three warnings")
    assert not call.done
    two.release(1)
    outcomes = call.result()
    assert outcomes.succeeded == (1,)
    found = warnings(caplog)
    for record in found:
        assert record.name == "engine_client"
        assert record.levelno == logging.WARNING
        text = record.getMessage()
        assert re.fullmatch(
            r"echo has been waiting without a time limit for \d+ s for engine 1; "
            r"engine 0 has failed already: Call to echo method failed: boom",
            text,
        )
    # A wait can be longer than planned, and never shorter.
    times = [record.created for record in found]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    for number, gap in enumerate(gaps):
        assert gap > FIRST * 2 ** (number + 1) - 0.01
    assert outcomes[1].elapsed > FIRST * 7 - 0.01


def test_a_call_with_a_limit_does_not_warn(two: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever set a limit learns of slowness by the time-out."""
    two.fault("echo", "hold")
    with pytest.raises(UtilityTimeoutError):
        two.client.call_utility("echo", "x", timeout=FIRST * 4)
    assert warnings(caplog) == []


def test_a_quick_call_does_not_warn(two: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is said of calls that are answered in time."""
    for number in range(20):
        two.client.call_utility("echo", number, timeout=scaled(10))
    assert warnings(caplog) == []


def test_the_warning_can_be_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    """With None a call waits in silence."""
    with rig(("cbor",), slow_call_warning=None) as one:
        one.fault("echo", "hold", occurrence=1)
        call = run_in_thread(one.client.call_utility, "echo", "x")
        one.wait_received(0, ["x"])
        with pytest.raises(UtilityTimeoutError):
            one.client.call_utility("whoami", timeout=0)
        one.release(0)
        assert call.result() == ["x"]
        one.check()
    assert warnings(caplog) == []
