"""Many callers, many calls, calls that nobody waits for, large values, short lives."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable

from engine_client import CallTimeout, EngineClient, NotSentError, Ok, connect
from engine_client.tools.mock_engine import MockEngine
from tests.helpers import interrupt_storm, run_in_thread, scaled, wait_until
from tests.helpers.leaks import open_descriptors
from tests.scenarios.rig import address, rig
from tests.stress.memory import resident

__all__ = ["Figures", "abandoned", "large", "rounds", "stopped", "storm", "threads"]

Figures = dict[str, float]


def settled(client: EngineClient) -> bool:
    """Whether nothing is registered and nothing under way."""
    return client.pending_utility_calls == 0 and client.active_requests == 0


def in_threads(count: int, work: Callable[[int], object]) -> None:
    """Run something in many threads that start together; raise what the first one raised."""
    gate = threading.Barrier(count)

    def run(number: int) -> None:
        gate.wait()
        work(number)

    running = [run_in_thread(run, number) for number in range(count)]
    for one in running:
        one.result(600)


def threads(seed: int, *, count: int, calls: int) -> Figures:
    """Threads make calls of random sizes to one or both engines; each gets its own value back."""
    with rig(("cbor", "msgpack"), log=False) as two:
        client = two.client
        before = client.stats
        each = calls // count
        began = time.monotonic()

        def work(number: int) -> None:
            chance = random.Random(seed + number)
            for turn in range(each):
                value = [number, turn, "x" * chance.choice((0, 10, 1000, 20_000))]
                engines = chance.choice((None, None, [0], [1]))
                answers = client.call_utility("echo", value, engines=engines, timeout=scaled(300))
                assert answers == [value] * (2 if engines is None else 1)

        in_threads(count, work)
        seconds = time.monotonic() - began
        after = client.stats
        assert after.calls - before.calls == each * count
        assert after.late_replies == after.malformed_messages == 0
        assert settled(client)
        two.check()
    return {"calls": each * count, "threads": count, "per second": each * count / seconds}


def abandoned(seed: int, *, calls: int) -> Figures:
    """Calls that nobody waits for: every reply is counted as late, and is nobody else's."""
    chance = random.Random(seed)
    with rig(("cbor", "msgpack"), log=False) as two:
        client = two.client
        before = client.stats
        early = late = 0
        for number in range(calls):
            outcomes = client.settle_utility("echo", number, timeout=0)
            assert outcomes.may_have_run == (0, 1)
            assert all(outcomes[i] == Ok(number, outcomes[i].elapsed) for i in outcomes.succeeded)
            early += len(outcomes.succeeded)
            late += len(outcomes.failures)
            if chance.random() < 0.01:
                assert client.call_utility("echo", "mine", timeout=scaled(60)) == ["mine", "mine"]
        wait_until(lambda: client.stats.late_replies - before.late_replies == late, timeout=60)
        assert early + late == 2 * calls
        assert settled(client)
        two.check()
    return {"calls": calls, "late replies": late}


def stopped(seed: int, *, calls: int, size: int = 10_000) -> Figures:
    """Calls at a stopped engine arrive all, or are refused; the other engine is not slowed."""
    del seed  # nothing here is left to chance
    limit = calls * size // 2
    with rig(("cbor", "cbor"), max_unanswered_bytes=limit) as two:
        client = two.client
        memory = resident()
        two.engines[1].signal(signal.SIGSTOP)
        accepted = refused = 0
        slowest = 0.0
        data = b"x" * size
        for number in range(calls):
            outcomes = client.settle_utility("echo", [number, data], engines=[1], timeout=0)
            error = outcomes.failures[1]
            if isinstance(error, NotSentError):
                assert not outcomes.may_have_run
                refused += 1
            else:
                assert isinstance(error, CallTimeout)
                accepted += 1
            if number % 100 == 0:
                began = time.monotonic()
                client.call_utility("echo", number, engines=[0], timeout=scaled(10))
                slowest = max(slowest, time.monotonic() - began)
        grown = resident() - memory
        two.engines[1].signal(signal.SIGCONT)
        late = client.stats.late_replies
        wait_until(lambda: client.stats.late_replies == late + accepted, timeout=120)
        assert accepted + refused == calls
        assert refused
        arrived = [args[0][0] for args in two.received(1, "echo")]
        assert arrived == list(range(accepted)), "accepted is not what arrived, in order"
        assert grown < 3 * limit + 50_000_000
        assert slowest < scaled(1)
        assert settled(client)
        two.check()
    return {"calls": calls, "accepted": accepted, "refused": refused, "MB grown": grown / 1e6}


def large(seed: int, *, megabytes: int) -> Figures:
    """An argument and a result of many megabytes, beside small calls that go on."""
    value = random.Random(seed).randbytes(1_000_000) * megabytes
    with rig(("cbor", "cbor"), log=False) as two:
        client = two.client
        done = threading.Event()
        waits: list[float] = []

        def small() -> None:
            while not done.is_set():
                began = time.monotonic()
                client.call_utility("echo", 1, engines=[1], timeout=scaled(60))
                waits.append(time.monotonic() - began)

        beside = run_in_thread(small)
        began = time.monotonic()
        try:
            answer = client.call_utility("echo", value, engines=[0], timeout=scaled(300))
        finally:
            done.set()
        seconds = time.monotonic() - began
        beside.result(60)
        assert answer == [value]
        assert settled(client)
        two.check()
    assert waits
    return {"MB": megabytes, "seconds": seconds, "small calls": len(waits), "slowest": max(waits)}


def rounds(seed: int, *, count: int) -> Figures:
    """Clients that come and go leave threads and descriptors as they were."""
    chance = random.Random(seed)
    threads_before, descriptors = threading.active_count(), 0
    memory = 0
    for number in range(count):
        with address() as where:
            connecting = run_in_thread(connect, where, connect_timeout=scaled(30))
            with MockEngine(where, codec=chance.choice(("cbor", "msgpack"))):
                client = connecting.result(30)
                for _ in range(chance.randrange(3)):
                    assert client.call_utility("echo", number, timeout=scaled(30)) == [number]
                client.close()
        if number == min(20, count // 3):
            memory = resident()
            descriptors = len(open_descriptors())
    wait_until(lambda: threading.active_count() <= threads_before, what="threads to end")
    assert len(open_descriptors()) <= descriptors
    grown = resident() - memory
    assert grown < 20_000_000
    return {"rounds": count, "MB grown": grown / 1e6}


def storm(seed: int, *, seconds: float) -> Figures:
    """Ctrl-C at random instants in calls, while other threads go on undisturbed."""
    with rig(("cbor", "msgpack"), log=False) as two:
        client = two.client
        done = threading.Event()

        def others() -> int:
            count = 0
            while not done.is_set():
                assert client.call_utility("echo", count, timeout=scaled(60)) == [count, count]
                count += 1
            return count

        beside = run_in_thread(others)

        def check() -> None:
            assert client.pending_utility_calls <= 2

        try:
            report = interrupt_storm(
                lambda: client.call_utility("echo", 7), seconds=seconds, seed=seed, between=check
            )
        finally:
            done.set()
        count = beside.result(60)
        assert settled(client)
        two.check()
        assert all(engine.running for engine in two.engines)
    return {
        "rounds": report.rounds,
        "interrupted": report.interrupted,
        "calls beside": count,
    }
