"""The helpers themselves: a leak check that finds nothing would make every other test worthless."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from tests.helpers import interrupt_storm, leaks, run_in_thread, storm_test, wait_until
from tests.helpers.leaks import Snapshot


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait long for what is left on purpose."""
    monkeypatch.setattr(leaks, "GRACE", 0.05)


@pytest.mark.usefixtures("short_grace")
def test_left_thread_is_reported_with_its_stack() -> None:
    """A thread that still runs is named, with the function in which it is."""
    before = Snapshot()
    latch = threading.Lock()
    latch.acquire()
    waiting = run_in_thread(latch.acquire)
    with pytest.raises(AssertionError, match=r"thread test-acquire(.|\n)*in _run"):
        before.check()
    latch.release()
    assert waiting.result()
    before.check()


@pytest.mark.usefixtures("short_grace")
def test_left_descriptor_is_reported_with_its_kind() -> None:
    """A descriptor that is still open is reported, with what it is."""
    before = Snapshot()
    read, write = os.pipe()
    with pytest.raises(AssertionError, match=f"descriptor {read}: .*\ndescriptor {write}: "):
        before.check()
    os.close(read)
    os.close(write)
    before.check()


@pytest.mark.usefixtures("short_grace")
def test_left_process_is_reported_and_killed() -> None:
    """A child process that still runs fails the test and is gone afterwards."""
    before = Snapshot()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        with pytest.raises(AssertionError, match=f"process {child.pid}, .*input"):
            before.check()
        child.wait(10)
    before.check()


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.usefixtures("short_grace")
def test_orphan_of_a_child_is_reported_and_killed() -> None:
    """A process whose parent has gone is still found."""
    before = Snapshot()
    orphan = "[sys.executable, '-c', 'import time; time.sleep(60)']"
    code = (
        f"import subprocess, sys; print(subprocess.Popen({orphan}, stdout=subprocess.DEVNULL).pid)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], stdout=subprocess.PIPE, text=True, check=True
    )
    pid = int(done.stdout)
    with pytest.raises(AssertionError, match=f"process {pid}, "):
        before.check()
    wait_until(lambda: pid not in before.new_processes(), what="the end of the orphan")


def test_background_call_returns_and_raises_as_the_call_did() -> None:
    """The result or the error of a call in a thread reaches the test."""
    assert run_in_thread(int, "12").result() == 12
    with pytest.raises(ValueError, match="invalid literal"):
        run_in_thread(int, "x").result()
    assert isinstance(run_in_thread(int, "x").error(), ValueError)


@storm_test()
def test_storm_interrupts_at_random_and_counts() -> None:
    """Every round ends by itself or interrupted, and afterwards no alarm is left."""
    between: list[int] = []
    report = interrupt_storm(
        lambda: sum(range(20_000)), rounds=2_000, seed=1, between=lambda: between.append(1)
    )
    assert report.rounds == len(between) == 2_000
    assert report.completed > 0
    assert report.interrupted > 0
    # A round can complete and still be interrupted in the storm's own last lines.
    assert report.rounds <= report.completed + report.interrupted
    assert report.interrupted <= report.delivered
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_storm_refuses_the_timer_of_the_time_limit() -> None:
    """Without its mark, a storm says what to do and does not switch the time limit off."""
    with pytest.raises(RuntimeError, match="@storm_test"):
        interrupt_storm(lambda: None, rounds=1)
