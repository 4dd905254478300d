"""Ctrl-C in requests: while one is made, while one is read, while a batch runs."""

from __future__ import annotations

import gc
import itertools
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from engine_client import EngineRequest, FinishReason, SamplingParams
from engine_client.tools.mock.tokens import generate_tokens
from tests.helpers import interrupt_storm, scaled, storm_test, wait_until
from tests.scenarios.stream_rig import ENDLESS, Served, served, tokens_of
from tests.scenarios.test_interrupts import interrupt_when

pytestmark = storm_test(300)


@pytest.fixture(scope="module")
def shared() -> Iterator[Served]:
    """An engine of each dialect whose steps take a millisecond."""
    with served(options={"step_seconds": 0.001}) as made:
        yield made


@pytest.fixture
def two(shared: Served) -> Iterator[Served]:
    """The shared engines; afterwards nothing is registered, nothing runs, nothing was lost."""
    yield shared
    gc.collect()
    shared.client.call_utility("mock_clear")
    shared.check()
    for engine in shared.engines:
        told: dict[str, list[str]] = {"ADD": [], "ABORT": []}
        for entry in engine.log:
            if entry.type == "ADD":
                told["ADD"].append(entry.args[0])
            elif entry.type == "ABORT":
                told["ABORT"] += entry.args
        assert len(set(told["ADD"])) == len(told["ADD"])
        assert len(set(told["ABORT"])) == len(told["ABORT"])
        assert set(told["ABORT"]) <= set(told["ADD"])


@pytest.fixture
def rounds(request: pytest.FixtureRequest) -> int:
    """How many interrupts a storm has."""
    return 2000 if request.config.getoption("--long") else 250


def nothing_left(made: Served) -> None:
    """Wait until the client has no request, and the engines none by their own count."""
    wait_until(lambda: made.client.active_requests == 0, what="no request in the client")
    made.sync()
    assert made.live() == 0


# -- one interrupt ---------------------------------------------------------------------------------


def test_a_waiting_reader_is_interrupted_and_goes_on(two: Served) -> None:
    """Nothing is lost: the next read gives the next token."""
    two.client.call_utility("mock_fault", {"method": "OUTPUTS", "do": "hold"})
    # One output: the engine would send a later one before those that it held.
    stream = two.call("r", count=1)
    join = interrupt_when(lambda: stream._mailbox.waiter is not None)
    with pytest.raises(KeyboardInterrupt):
        stream.recv()
    join()
    two.client.call_utility("mock_clear")
    two.client.call_utility("mock_release")
    assert tokens_of(stream) == generate_tokens([1, 2, 3], 1)


def test_an_interrupt_in_a_with_block_aborts(two: Served) -> None:
    """The engine works for nobody then."""
    stream = two.call("left by an interrupt")
    join = interrupt_when(lambda: stream._request.taken > 3)
    with pytest.raises(KeyboardInterrupt), stream:
        list(stream)
    join()
    nothing_left(two)
    assert two.aborted().count("left by an interrupt") == 1


def test_a_kept_traceback_keeps_no_request(two: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook keeps the last traceback, and with it the frames of the call."""
    from engine_client import stream as module

    real = module.register

    def interrupted(*args: Any, **keywords: Any) -> Any:
        real(*args, **keywords)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "register", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        two.call("kept")
    nothing_left(two)
    assert caught.value.__traceback__ is not None


def test_an_interrupted_batch_aborts_what_runs(two: Served) -> None:
    """At once, and the rest is never sent."""
    before = two.client.stats.requests
    join = interrupt_when(lambda: two.client.active_requests == 4)
    with pytest.raises(KeyboardInterrupt):
        two.client.generate(
            [[n] for n in range(50)], SamplingParams(max_tokens=ENDLESS), max_in_flight=4
        )
    join()
    nothing_left(two)
    assert two.client.stats.requests <= before + 4


# -- storms ----------------------------------------------------------------------------------------


def test_storm_over_whole_requests(two: Served, rounds: int) -> None:
    """Interrupted anywhere in call() and in the reading: no orphan, no wrong token."""
    numbers = itertools.count()

    def action() -> None:
        number = next(numbers) % 500
        with two.call("same", [number], 3) as stream:
            assert tokens_of(stream) == generate_tokens([number], 3)

    def between() -> None:
        if next(numbers) % 25 == 0:
            nothing_left(two)

    report = interrupt_storm(action, rounds=rounds, longest=8e-3, between=between)
    assert report.interrupted > rounds // 4
    nothing_left(two)


def test_storm_over_calls_that_nobody_reads(two: Served, rounds: int) -> None:
    """Interrupted while it is made, registered or sent: dropped, hence aborted."""

    def action() -> None:
        two.call("same")

    report = interrupt_storm(action, rounds=rounds, longest=600e-6)
    assert report.interrupted > 10
    sys.exc_info()
    nothing_left(two)


def test_storm_over_the_iteration(two: Served, rounds: int) -> None:
    """Whoever goes on after each interrupt reads every token once, in order."""
    streams = itertools.count()
    got: list[int] = []
    current: list[Any] = []

    def action() -> None:
        if not current:
            number = next(streams) % 500
            got.clear()
            request = EngineRequest(f"s{number}", [number], SamplingParams(max_tokens=200))
            current.append(two.client.call(request))
        for output in current[0]:
            got.extend(output.new_token_ids)

    def between() -> None:
        if not current:
            return
        stream = current[0]
        prompt = [int(stream.request_id[1:])]
        # An interrupt between the pop and the caller's use loses that output, as it does in any
        # iterator; the order holds, and no token comes twice.
        expected = iter(generate_tokens(prompt, 200))
        assert all(token in expected for token in got)
        if stream._ended:
            assert len(got) > 150
            current.clear()

    report = interrupt_storm(action, rounds=rounds, longest=10e-3, between=between)
    assert report.interrupted > rounds // 4
    if current:
        current.pop().close()
    nothing_left(two)


def test_storm_over_aborts(two: Served, rounds: int) -> None:
    """Interrupted while it is aborted, by id or with all, and confirmed."""

    def action() -> None:
        stream = two.call("same")
        stream.recv()
        two.client.abort("same", confirm=True)
        assert list(stream)[-1].finish_reason is FinishReason.ABORT

    report = interrupt_storm(action, rounds=rounds, longest=6e-3)
    assert report.interrupted > 10
    nothing_left(two)


def test_storm_over_batches(two: Served, rounds: int) -> None:
    """Interrupted anywhere in generate(): what ran is aborted, what comes next is right."""
    prompts = [[n] for n in range(6)]

    def action() -> None:
        done = two.client.generate(prompts, SamplingParams(max_tokens=3), max_in_flight=3)
        assert [one.token_ids for one in done] == [generate_tokens(p, 3) for p in prompts]

    report = interrupt_storm(action, rounds=rounds // 2, longest=12e-3)
    assert report.interrupted > rounds // 8
    nothing_left(two)


def test_an_interrupt_is_not_slow(two: Served) -> None:
    """The reader is let go within moments, whatever the engine does."""
    two.client.call_utility("mock_fault", {"method": "OUTPUTS", "do": "hold"})
    with two.call("r") as stream:
        sent: list[float] = []

        def ready() -> bool:
            sent.append(time.monotonic())
            return stream._mailbox.waiter is not None

        join = interrupt_when(ready, signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            stream.recv()
        assert time.monotonic() - sent[-1] < scaled(1)
        join()
    two.client.call_utility("mock_clear")
    two.client.call_utility("mock_release")
