"""What callers block on, and what they hold of a call."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, InvalidStateError, wait
from typing import Any

import pytest

from engine_client.deadline import Deadline
from engine_client.dispatch.waiting import Latch, PendingCall, Startup
from engine_client.errors import HandshakeError, RemoteError
from engine_client.outcome import Failed, Ok
from tests.helpers import run_in_thread, scaled


def pending(*targets: int, **payloads: bytes) -> PendingCall:
    """Return a call to these engines, started at time 100."""
    return PendingCall(7, "sleep", targets, payloads, Deadline(None), 100.0)


def test_a_latch_lets_its_waiter_go_once_open() -> None:
    """Waiting ends when somebody opens the latch, from any thread."""
    latch = Latch()
    waiting = run_in_thread(latch.wait)
    latch.open()
    assert waiting.result() is True


def test_a_latch_that_is_open_is_passed_at_once() -> None:
    """Opening before the wait is as good as after."""
    latch = Latch()
    latch.open()
    assert latch.wait(0) is True


@pytest.mark.parametrize("timeout", [0, 0.0, 1e-9, 0.01])
def test_a_latch_that_stays_shut_times_out(timeout: float) -> None:
    """The wait ends without success when its time is over."""
    assert Latch().wait(timeout) is False


@pytest.mark.parametrize("timeout", [-1, 5.0])
def test_a_long_wait_is_made_of_short_ones(timeout: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between them CPython looks for a signal that came just before one blocked."""
    monkeypatch.setattr("engine_client.dispatch.waiting.SLICE", 0.001)
    latch = Latch()
    waiting = run_in_thread(latch.wait, timeout)
    assert Latch().wait(0.01) is False
    assert not waiting.done
    latch.open()
    assert waiting.result() is True


def test_a_long_wait_ends_at_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many short ones it is made of."""
    monkeypatch.setattr("engine_client.dispatch.waiting.SLICE", 0.01)
    began = time.monotonic()
    assert Latch().wait(0.055) is False
    assert 0.055 <= time.monotonic() - began < 0.055 + scaled(0.5)


def test_opening_a_latch_twice_is_a_fault() -> None:
    """A second opening is refused: it would mean that a call was settled twice."""
    latch = Latch()
    latch.open()
    with pytest.raises(RuntimeError):
        latch.open()


def test_opening_a_latch_is_one_call_into_c() -> None:
    """An interrupt cannot land inside of it: there is no Python code in it."""
    assert type(Latch().open) is type(threading.Lock().release)


def test_a_call_collects_an_outcome_per_engine_in_target_order() -> None:
    """Outcomes come in target order whatever the order in which they settled."""
    call = pending(2, 0, 1)
    error = RemoteError("boom", engine=0)
    call.succeed(1, "b", 100.125)
    call.fail(0, error, 100.5)
    assert list(call.waiting) == [2]
    call.succeed(2, "a", 100.25)
    outcomes = call.outcomes()
    assert outcomes.method == "sleep"
    assert list(outcomes.items()) == [
        (2, Ok("a", 0.25)),
        (0, Failed(error, 0.5)),
        (1, Ok("b", 0.125)),
    ]


def test_outcomes_of_an_unfinished_call_do_not_block() -> None:
    """Asking too early is a fault that shows at once, not a wait."""
    with pytest.raises(KeyError):
        pending(0).outcomes()


def test_a_waiter_is_a_future_that_shares_its_condition() -> None:
    """It has all that this Python's own futures have; only the condition is its whole call's."""
    first, second = pending(0, 1).futures.values()
    plain: Future[Any] = Future()
    assert {name: type(value) for name, value in vars(first).items()} == {
        name: type(value) for name, value in vars(plain).items()
    }
    shared = [name for name, value in vars(first).items() if value and value is vars(second)[name]]
    assert shared == ["_condition", "_state"]
    assert vars(first)["_state"] == vars(plain)["_state"]
    assert wait([first, second], timeout=0).not_done == {first, second}
    first.set_result(Ok("a", 0.1))
    plain.set_result(Ok("a", 0.1))
    assert vars(first)["_state"] == vars(plain)["_state"]
    assert first.result(0) == Ok("a", 0.1)
    assert wait([first, second], timeout=0) == ({first}, {second})
    with pytest.raises(TimeoutError):
        second.result(0)
    with pytest.raises(InvalidStateError):
        first.set_result(Ok("b", 0.2))


def test_no_lock_that_a_caller_left_held_stops_the_dispatcher() -> None:
    """An interrupt inside of ``wait`` leaves the lock of a future held."""
    call = pending(0, 1)
    error = RemoteError("boom", engine=1)
    vars(call.futures[0])["_condition"].acquire()
    run_in_thread(call.succeed, 0, "a", 100.5).result()
    run_in_thread(call.fail, 1, error, 100.5).result()
    assert call.outcomes() == {0: Ok("a", 0.5), 1: Failed(error, 0.5)}


def test_an_engine_cannot_settle_twice() -> None:
    """A future that was settled is out of reach."""
    call = pending(0, 1)
    call.fail(0, RemoteError("first"), 100.0)
    with pytest.raises(KeyError):
        call.fail(0, RemoteError("second"), 100.0)


@pytest.mark.parametrize("first", [None, HandshakeError("no HELLO")])
def test_a_startup_ends_once(first: Any) -> None:
    """The first end counts, and lets the one who waits go."""
    startup = Startup()
    before = startup.finished
    startup.finish(first)
    startup.finish(HandshakeError("later"))
    startup.finish()
    assert (before, startup.finished) == (False, True)
    assert startup.error is first
    assert startup.latch.wait(0)
