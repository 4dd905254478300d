"""Many threads on one client: every answer reaches its caller, and all engines see one order."""

from __future__ import annotations

import random
import threading

import pytest

from engine_client import Ok, UtilityCallError
from tests.helpers import run_in_thread, scaled, wait_until
from tests.scenarios.rig import Rig


def test_sixteen_threads_get_their_own_answers(two: Rig) -> None:
    """16 threads make 500 calls each, of random sizes: each gets its own value back, always."""
    client = two.client
    start = threading.Barrier(16)
    calls, late = client.stats.calls, client.stats.late_replies

    def work(name: int) -> int:
        chance = random.Random(name)
        start.wait(scaled(10))
        for number in range(500):
            size = chance.choice([0, 10, 100, 1_000, 20_000 if number % 50 == 0 else 5])
            value = [name, number, chance.randbytes(size)]
            assert client.call_utility("echo", value) == [value, value]
        return 500

    workers = [run_in_thread(work, name) for name in range(16)]
    assert sum(worker.result(50) for worker in workers) == 8_000
    assert client.stats.calls - calls == 8_000
    assert client.stats.late_replies == late
    assert client.pending_utility_calls == 0


def test_all_engines_see_fan_outs_in_one_order(two: Rig) -> None:
    """Concurrent fan-outs, also to some engines only, arrive everywhere in the same order."""
    start = threading.Barrier(8)
    before = [len(engine.log) for engine in two.engines]

    def work(name: int) -> None:
        chance = random.Random(name)
        start.wait(scaled(10))
        for number in range(60):
            engines = chance.choice([None, None, [1, 0], [0], [1]])
            two.client.call_utility("echo", [name, number], engines=engines)

    for worker in [run_in_thread(work, name) for name in range(8)]:
        worker.result(50)
    orders = [
        [entry["call_id"] for entry in engine.log[since:]]
        for engine, since in zip(two.engines, before, strict=True)
    ]
    common = set(orders[0]) & set(orders[1])
    assert len(common) > 200
    assert [i for i in orders[0] if i in common] == [i for i in orders[1] if i in common]
    assert len(set(orders[0])) == len(orders[0])


def test_a_long_call_does_not_lose_its_answer_to_others(two: Rig) -> None:
    """While one thread waits, another makes many calls; each gets what is its own."""
    two.fault("echo", "hold", engines=[0], occurrence=1)
    slow = run_in_thread(two.client.call_utility, "echo", "slow")
    two.wait_received(0, ["slow"])
    for nonce in range(300):
        assert two.client.call_utility("echo", nonce, timeout=scaled(10)) == [nonce, nonce]
    assert not slow.done
    two.release(0)
    assert slow.result() == ["slow", "slow"]


def test_one_callers_failure_is_nobody_elses(two: Rig) -> None:
    """Threads whose calls fail, time out or succeed do not disturb each other."""
    two.fault("is_sleeping", "fail", engines=[1], message="boom")
    two.fault("is_scheduler_paused", "drop", engines=[0])
    client = two.client

    def failing() -> int:
        failed = 0
        for _ in range(100):
            with pytest.raises(UtilityCallError, match="boom"):
                client.call_utility("is_sleeping")
            failed += 1
        return failed

    def timing_out() -> int:
        for number in range(100):
            outcomes = client.settle_utility("is_scheduler_paused", timeout=0.001 * (number % 5))
            assert outcomes.unsettled[:1] == (0,)
        return 100

    def succeeding(name: int) -> int:
        for number in range(100):
            outcomes = client.settle_utility("echo", [name, number])
            for outcome in outcomes.values():
                assert isinstance(outcome, Ok)
                assert outcome.value == [name, number]
        return 100

    threads = [
        run_in_thread(failing),
        run_in_thread(timing_out),
        *(run_in_thread(succeeding, name) for name in range(4)),
    ]
    assert [thread.result(50) for thread in threads] == [100] * 6


def test_a_call_wakes_a_dispatcher_that_sleeps_and_one_that_is_busy(two: Rig) -> None:
    """Two threads in step: no call ever waits for another one to be noticed."""
    turn = threading.Barrier(2)

    def work(name: int) -> int:
        for number in range(300):
            if number % 3 == 0:
                turn.wait(scaled(10))  # both at once, then one behind the other
            answers = two.client.call_utility("echo", [name, number], timeout=scaled(10))
            assert answers == [[name, number]] * 2
        return 300

    pair = [run_in_thread(work, name) for name in (0, 1)]
    assert [one.result(50) for one in pair] == [300, 300]


def test_counts_add_up_while_threads_work(two: Rig) -> None:
    """Looking at the client from other threads at any time disturbs nothing."""
    stop = threading.Event()

    def look() -> int:
        looks = 0
        while not stop.is_set():
            assert 0 <= two.client.pending_utility_calls <= 8
            assert [info.index for info in two.client.engines] == [0, 1]
            assert all(0 <= info.in_flight <= 4 for info in two.client.engines)
            assert "2 of 2 engines alive" in repr(two.client)
            looks += 1
        return looks

    def work() -> None:
        for number in range(50):
            two.client.call_utility("echo", number, timeout=scaled(20))

    looking = [run_in_thread(look) for _ in range(2)]
    working = [run_in_thread(work) for _ in range(4)]
    for worker in working:
        worker.result(50)
    stop.set()
    assert all(one.result() > 0 for one in looking)
    wait_until(lambda: two.client.pending_utility_calls == 0)
