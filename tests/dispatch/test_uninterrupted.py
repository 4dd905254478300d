"""What is made where no signal reaches: the caller gets all of it, or it is taken back."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from engine_client.dispatch import waiting
from engine_client.dispatch.waiting import uninterrupted
from tests.helpers import wait_until


def never(made: object) -> None:
    raise AssertionError(f"{made} was taken back")


def test_what_was_made_is_returned() -> None:
    """It was made in another thread, and nothing is taken back."""
    caller = threading.get_ident()
    assert uninterrupted(threading.get_ident, never) != caller


def test_an_error_goes_through() -> None:
    """The very error is raised, and no reference to it is kept."""
    mine = ValueError("mine")

    def fail() -> None:
        raise mine

    with pytest.raises(ValueError, match="mine") as caught:
        uninterrupted(fail, never)
    assert caught.value is mine


def test_an_interrupt_while_it_is_made() -> None:
    """The caller leaves when it is made, and it is taken back by then."""
    begun, go_on = threading.Event(), threading.Event()
    taken_back: list[str] = []

    def make() -> str:
        begun.set()
        go_on.wait(10)
        return "made"

    def interrupt() -> None:
        begun.wait(10)
        os.kill(os.getpid(), signal.SIGINT)
        go_on.set()

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        uninterrupted(make, taken_back.append)
    assert taken_back == ["made"]
    thread.join(10)


def test_an_interrupt_when_it_was_just_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait is over, but the caller has nothing yet: it is taken back."""
    taken_back: list[str] = []
    waits = waiting.Latch.wait

    def interrupted(latch: waiting.Latch, timeout: float = -1) -> bool:
        monkeypatch.setattr(waiting.Latch, "wait", waits)
        assert waits(latch, timeout)
        raise KeyboardInterrupt

    monkeypatch.setattr(waiting.Latch, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        uninterrupted(lambda: "made", taken_back.append)
    assert taken_back == ["made"]


def test_what_takes_too_long_is_taken_back_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupted caller does not wait for ever for what it no longer wants."""
    monkeypatch.setattr(waiting, "UNDO_LIMIT", 0.01)
    go_on = threading.Event()
    taken_back: list[str] = []
    waits = waiting.Latch.wait

    def interrupted(latch: waiting.Latch, timeout: float = -1) -> bool:
        monkeypatch.setattr(waiting.Latch, "wait", waits)
        raise KeyboardInterrupt

    def make() -> str:
        go_on.wait(10)
        return "made"

    monkeypatch.setattr(waiting.Latch, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        uninterrupted(make, taken_back.append)
    assert taken_back == []
    go_on.set()
    wait_until(lambda: taken_back == ["made"])
