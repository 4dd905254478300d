"""Time limits of calls: odd values, one deadline for all engines, signals that do not move it."""

from __future__ import annotations

import contextlib
import math
import signal
import time
from fractions import Fraction
from typing import Any

import pytest

from engine_client import CallTimeout, Ok, UtilityCallError, UtilityTimeoutError, connect
from engine_client.tools.mock_engine import MockEngine
from tests.helpers import run_in_thread, scaled, storm_test, wait_until
from tests.scenarios.rig import Rig, address, rig


@pytest.mark.parametrize("timeout", [0, 0.0, 1e-9, 1e-6])
def test_almost_no_time_sends_and_takes_what_is_there(two: Rig, timeout: float) -> None:
    """A call with a limit of 0 is sent; its reply comes too late and goes to nobody."""
    two.fault("echo", "hold")
    late = two.client.stats.late_replies
    with pytest.raises(UtilityTimeoutError) as info:
        two.client.call_utility("echo", timeout, timeout=timeout)
    assert two.client.pending_utility_calls == 0
    for index, error in info.value.outcomes.failures.items():
        assert isinstance(error, CallTimeout)
        assert error.engine == index
        assert error.may_have_run
    assert info.value.outcomes.may_have_run == (0, 1)
    for engine in (0, 1):
        two.wait_received(engine, [timeout])
    two.release()
    wait_until(lambda: two.client.stats.late_replies == late + 2, what="the late replies")


@pytest.mark.parametrize("timeout", [None, math.inf, 1e10, 1e300, 10**30, 60, Fraction(120, 2)])
def test_long_limits_wait(two: Rig, timeout: Any) -> None:
    """No limit, an infinite one and one beyond what the system can count wait for the reply."""
    two.fault("echo", "hold", engines=[1])
    call = run_in_thread(two.client.call_utility, "echo", "x", timeout=timeout)
    wait_until(lambda: two.client.pending_utility_calls == 1, what="the reply of engine 0")
    assert not call.done
    two.release(1)
    assert call.result() == ["x", "x"]


@pytest.mark.parametrize(
    ("timeout", "error"),
    [
        (-1, ValueError),
        (-1e-9, ValueError),
        (math.nan, ValueError),
        (-math.inf, ValueError),
        (True, TypeError),
        (False, TypeError),
        ("5", TypeError),
        ([5], TypeError),
        (5j, TypeError),
    ],
)
def test_limits_that_cannot_be_meant_reach_nobody(
    two: Rig, timeout: Any, error: type[Exception]
) -> None:
    """A refused limit names itself; nothing is sent and nothing waits."""
    client = two.client
    before = [two.received(k) for k in (0, 1)]
    calls = client.stats.calls
    for call in (client.call_utility, client.settle_utility, client.call_utility_consensus):
        with pytest.raises(error, match="timeout must be"):
            call("echo", 1, timeout=timeout)
    with pytest.raises(error, match="timeout must be"):
        client.is_sleeping(timeout=timeout)
    with pytest.raises(error, match="timeout must be"):
        client.collective_rpc("check_health", timeout=timeout)
    with pytest.raises(error, match="worker_timeout must be"):
        client.collective_rpc("check_health", worker_timeout=timeout)
    with pytest.raises(error, match="timeout must be"):
        client.close(timeout=timeout)
    assert not client.closed
    assert client.pending_utility_calls == 0
    two.control("mock_log")  # a fence: what was sent before has arrived
    assert client.stats.calls == calls + 1
    assert [two.received(k) for k in (0, 1)] == before


@pytest.mark.parametrize(
    "name", ["timeout", "connect_timeout", "close_timeout", "slow_call_warning"]
)
def test_settings_that_cannot_be_meant_are_refused(name: str) -> None:
    """A client is not even begun with such a limit."""
    refused: Any
    for refused, error in ((-1, ValueError), (math.nan, ValueError), ("5", TypeError)):
        with address() as where, pytest.raises(error, match=f"^{name} must be"):
            connect(where, **{name: refused})


def test_a_limit_names_the_engine_the_method_and_the_time(two: Rig) -> None:
    """The error keeps the answers that came, and says who is missing and for how long."""
    two.fault("echo", "drop", engines=[1])
    began = time.monotonic()
    with pytest.raises(UtilityTimeoutError) as info:
        two.client.call_utility("echo", 7, timeout=0.3)
    passed = time.monotonic() - began
    assert 0.3 <= passed < 0.3 + scaled(0.5)
    assert "engine 1 did not reply to echo within 0.3 s (timeout=)" in str(info.value)
    assert isinstance(info.value.outcomes[0], Ok)
    assert info.value.outcomes[0].elapsed <= info.value.outcomes[1].elapsed
    assert 0.3 <= info.value.outcomes[1].elapsed <= passed


def test_the_clients_own_limit_is_the_default() -> None:
    """A call without a limit takes the client's; None switches it off."""
    with rig(("cbor",), timeout=0.05) as one:
        one.fault("echo", "hold")
        with pytest.raises(UtilityTimeoutError, match=r"within 0\.05 s"):
            one.client.call_utility("echo", 1)
        with pytest.raises(UtilityTimeoutError, match=r"within 0\.01 s"):
            one.client.call_utility("echo", 1, timeout=0.01)
        call = run_in_thread(one.client.call_utility, "echo", 2, timeout=None)
        one.wait_received(0, [2])
        with pytest.raises(UtilityTimeoutError):  # so the default has passed since
            one.client.call_utility("echo", 3)
        assert not call.done
        one.release()
        assert call.result() == [2]
        one.settle_down()
        one.check()


def test_one_deadline_for_all_engines() -> None:
    """Engines that answer one after another share one budget; none of them gets a fresh one."""
    step, limit = 0.15, 0.4
    with contextlib.ExitStack() as stack:
        where = stack.enter_context(address())
        for index in range(8):
            late = [{"method": "echo", "do": "delay", "seconds": step * index}]
            stack.enter_context(MockEngine(where, index, faults=late))
        client = stack.enter_context(
            connect(where, engine_count=8, connect_timeout=scaled(30), close_timeout=0)
        )
        client.call_utility("whoami", timeout=scaled(10))
        began = time.monotonic()
        with pytest.raises(UtilityTimeoutError) as info:
            client.call_utility("echo", "x", timeout=limit)
        passed = time.monotonic() - began
        assert limit <= passed < limit + scaled(0.35)
        outcomes = info.value.outcomes
        assert outcomes[0] == Ok("x", outcomes[0].elapsed)
        for index in range(4, 8):
            assert isinstance(outcomes.failures[index], CallTimeout)
        assert client.pending_utility_calls == 0


@storm_test()
@pytest.mark.parametrize("limit", [0.3, 0.7, None])
def test_harmless_signals_every_20_ms(two: Rig, limit: float | None) -> None:
    """A handler that runs again and again neither lengthens a wait nor ends it."""
    rang: list[float] = []
    two.fault("echo", "hold", engines=[1])
    previous = signal.signal(signal.SIGALRM, lambda *_: rang.append(time.monotonic()))
    signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
    try:
        began = time.monotonic()
        if limit is None:

            def release_later() -> None:
                wait_until(lambda: len(rang) > 10, what="signals")
                two.release(1)

            helper = run_in_thread(release_later)
            assert two.client.call_utility("echo", "x", timeout=limit) == ["x", "x"]
            helper.result()
        else:
            with pytest.raises(UtilityTimeoutError):
                two.client.call_utility("echo", "x", timeout=limit)
            assert limit <= time.monotonic() - began < limit + scaled(0.5)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert len(rang) > 5


@storm_test()
def test_a_handler_that_takes_long_makes_no_limit_longer(two: Rig) -> None:
    """Whatever the caller's thread does while it waits counts as waiting."""
    two.fault("echo", "hold", engines=[1])
    previous = signal.signal(signal.SIGALRM, lambda *_: time.sleep(0.9))
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        began = time.monotonic()
        with pytest.raises(UtilityTimeoutError):
            two.client.call_utility("echo", "x", timeout=1.0)
        assert 1.0 <= time.monotonic() - began < 1.0 + scaled(0.4)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def test_waiting_costs_no_processor_time(two: Rig) -> None:
    """A call that waits uses next to none of the processor, whatever its limit."""
    two.fault("echo", "drop")
    before = time.process_time()
    with pytest.raises(UtilityCallError):
        two.client.call_utility("echo", timeout=0.7)
    assert time.process_time() - before < 0.1


def test_a_retried_call_is_not_repeated_by_the_client(two: Rig) -> None:
    """After a time-out an engine has got the call once: nothing is retried."""
    two.fault("echo", "drop")
    before = len(two.received(0))
    with pytest.raises(UtilityTimeoutError, match="may have run"):
        two.client.call_utility("echo", "once", timeout=0.1)
    two.control("mock_log")
    assert two.received(0)[before:] == [["once"]]


def test_replies_that_are_late_never_answer_another_call(two: Rig) -> None:
    """Every call gets its own answer while those of calls before it come in late."""
    for nonce in range(20):
        two.control("mock_clear")
        two.fault("echo", "hold", engines=[1], occurrence=1)
        with pytest.raises(UtilityTimeoutError):
            two.client.call_utility("echo", f"late {nonce}", timeout=0)
        two.release(1)
        assert two.client.call_utility("echo", nonce, timeout=scaled(10)) == [nonce] * 2


def test_call_ids_of_one_client_after_another_differ() -> None:
    """A late answer to a previous client's call never matches a call of the next one."""
    ids = []
    for _ in range(2):
        with rig(("cbor",)) as one:
            one.client.call_utility("echo", 1)
            ids.append({entry["call_id"] for entry in one.engines[0].log})
    assert ids[0].isdisjoint(ids[1])
    assert all(0 < call_id < 2**53 for call_id in ids[0] | ids[1])
