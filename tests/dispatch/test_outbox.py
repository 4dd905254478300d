"""The way from callers to the dispatcher: nothing is lost, reordered or left asleep."""

from __future__ import annotations

import os
import select
import sys
import threading
from collections.abc import Iterator

import pytest

from engine_client.dispatch.outbox import Outbox, Wakeup
from tests.helpers import run_in_thread, scaled


def is_awake(fd: int) -> bool:
    """Return whether a poller would wake."""
    return bool(select.select([fd], [], [], 0)[0])


@pytest.fixture(params=["native", "socket pair"])
def wakeup(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Wakeup]:
    """A wake-up, of each of the two kinds."""
    if request.param == "socket pair":
        monkeypatch.setattr(sys, "platform", "darwin")
    made = Wakeup()
    monkeypatch.undo()
    assert (made._pair is None) == (request.param == "native" and sys.platform == "linux")
    yield made
    made.close()


@pytest.fixture
def outbox() -> Iterator[Outbox[object]]:
    """An open outbox."""
    made: Outbox[object] = Outbox()
    yield made
    made.close()
    made.wakeup.close()


def test_a_poke_wakes_and_a_drain_forgets(wakeup: Wakeup) -> None:
    """However often it was poked, one drain puts it to sleep, and the next poke wakes it again."""
    assert not is_awake(wakeup.fd)
    for _ in range(2):
        for _ in range(10):
            wakeup.poke()
        assert is_awake(wakeup.fd)
        wakeup.drain()
        assert not is_awake(wakeup.fd)
    wakeup.drain()  # nothing to drain is no error


def test_a_full_wakeup_does_not_block(wakeup: Wakeup) -> None:
    """Pokes that nobody reads cost nothing and fail nothing."""
    if wakeup._pair is None:
        os.eventfd_write(wakeup.fd, 2**64 - 2)  # one more does not fit
    for _ in range(20_000):
        wakeup.poke()
    assert is_awake(wakeup.fd)
    wakeup.drain()
    assert not is_awake(wakeup.fd)


def test_a_late_poke_does_not_touch_the_next_owner_of_the_descriptor(wakeup: Wakeup) -> None:
    """After close a poke does nothing, although the descriptor's number is in use again."""
    number = wakeup.fd
    read, write = os.pipe()
    wakeup.close()
    os.dup2(write, number)
    try:
        wakeup.poke()
        wakeup.drain()
        assert not is_awake(read)
        wakeup.close()  # a second time, which must not free the other's descriptor
        os.fstat(number)
    finally:
        for fd in (number, read, write):
            os.close(fd)


def test_items_come_out_in_order_and_wake_once(
    outbox: Outbox[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One wake-up serves all that is enqueued until the dispatcher looks."""
    pokes = []
    monkeypatch.setattr(Wakeup, "poke", lambda self: pokes.append(self))
    for item in "abc":
        assert outbox.append(item)
    assert len(pokes) == 1
    assert list(outbox.take()) == ["a", "b", "c"]
    assert list(outbox.take()) == []
    assert outbox.append("d")
    assert len(pokes) == 2
    assert list(outbox.take()) == ["d"]


def test_an_interrupt_before_the_wake_up_leaves_the_item_to_be_found(
    outbox: Outbox[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dispatcher looks unasked from time to time, and finds it in its place."""

    def interrupted(wakeup: Wakeup) -> None:
        raise KeyboardInterrupt

    states = [outbox.pending]
    with monkeypatch.context() as patch:
        patch.setattr(Wakeup, "poke", interrupted)
        with pytest.raises(KeyboardInterrupt):
            outbox.append("first")
    states.append(outbox.pending)
    assert outbox.append("second")
    assert list(outbox.take()) == ["first", "second"]
    states.append(outbox.pending)
    assert states == [False, True, False]
    assert outbox.append("third")
    assert is_awake(outbox.wakeup.fd)


def test_a_closed_outbox_takes_nothing_and_hands_over_the_rest(outbox: Outbox[object]) -> None:
    """Closing returns what was accepted; whatever comes later is refused."""
    assert outbox.append("accepted")
    assert list(outbox.close()) == ["accepted"]
    assert not outbox.append("late")
    assert list(outbox.close()) == []


def test_nothing_accepted_is_lost_among_threads(outbox: Outbox[object]) -> None:
    """Of many threads' items each accepted one comes out once, in its thread's order."""
    start = threading.Barrier(5)

    def fill(name: int) -> int:
        start.wait(scaled(10))
        count = 0
        while outbox.append((name, count)):
            count += 1
        return count

    writers = [run_in_thread(fill, name) for name in range(4)]
    taken: list[object] = []
    start.wait(scaled(10))
    while len(taken) < 20_000:
        if select.select([outbox.wakeup.fd], [], [], scaled(10))[0]:
            outbox.wakeup.drain()
            taken += outbox.take()
        else:
            pytest.fail("items lie in the outbox, and nobody woke the dispatcher")
    taken += outbox.close()
    for name, writer in enumerate(writers):
        accepted = writer.result()
        assert [item for item in taken if isinstance(item, tuple) and item[0] == name] == [
            (name, number) for number in range(accepted)
        ]
