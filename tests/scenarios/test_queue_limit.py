"""An engine that reads nothing: what is accepted arrives, what is too much is refused."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from engine_client import CallTimeout, NotSentError, Ok, Outcomes, UtilityCall, UtilityCallError
from tests.helpers import scaled, wait_until
from tests.scenarios.rig import Rig, rig

LIMIT = 500_000
SIZE = 10_000


@pytest.fixture(scope="module")
def shared() -> Iterator[Rig]:
    """Two engines, and a client that sends half a megabyte to one that is not heard."""
    with rig(("cbor", "msgpack"), max_unanswered_bytes=LIMIT) as made:
        yield made
        made.check_messages()


@pytest.fixture
def two(shared: Rig) -> Iterator[Rig]:
    """The shared engines, which answer again after each test."""
    yield shared
    shared.check()


@contextmanager
def stopped(made: Rig, engine: int) -> Iterator[None]:
    """An engine's process does nothing at all; afterwards it answers what it was sent."""
    made.engines[engine].signal(signal.SIGSTOP)
    try:
        yield
    finally:
        made.engines[engine].signal(signal.SIGCONT)
    wait_answered(made, engine)


def wait_answered(made: Rig, engine: int) -> None:
    """Wait until an engine was heard after all that it was sent."""
    record = made.client._dispatcher.registry.engines[engine]
    wait_until(lambda: record.unanswered == 0, what=f"an answer of engine {engine}")


def fill(made: Rig, value: object) -> Outcomes:
    """Send a call that engine 1 does not answer; return its outcomes once engine 0 has."""
    outcomes = made.client.settle_utility("echo", value, timeout=0)
    wait_answered(made, 0)
    return outcomes


def test_what_is_accepted_arrives_and_the_rest_is_refused(two: Rig) -> None:
    """Calls at a stopped engine: up to the limit they are sent, then they are refused for all."""
    client = two.client
    accepted = refused = 0
    with stopped(two, 1):
        for number in range(500):
            outcomes = fill(two, [number, b"x" * SIZE])
            if isinstance(outcomes.failures[1], CallTimeout):
                accepted += 1
                assert not refused, "accepted after a refusal, without a sign of life"
                continue
            refused += 1
            for engine in (0, 1):
                assert type(outcomes.failures[engine]) is NotSentError
            assert outcomes.may_have_run == ()
            assert "engine 1 has not been heard since" in str(outcomes.failures[1])
            assert "max_unanswered_bytes" in str(outcomes.failures[1])
            assert "because of engine 1" in str(outcomes.failures[0])
        assert client.pending_utility_calls == 0
        assert LIMIT / SIZE - 2 <= accepted <= LIMIT / SIZE + 2
        # The others are not slowed: engine 0 answers, and is told only what was accepted.
        began = time.monotonic()
        assert client.call_utility("echo", "alone", engines=[0]) == ["alone"]
        assert time.monotonic() - began < scaled(2)
        assert client.engines[1].alive
    answers = client.call_utility("echo", "after", timeout=scaled(10))
    assert answers == ["after", "after"]
    for engine in (0, 1):
        lists = [args[0] for args in two.received(engine, "echo") if isinstance(args[0], list)]
        assert [number for number, _ in lists] == list(range(accepted))


def test_a_refused_call_raises_at_once(two: Rig) -> None:
    """The refusal needs no time limit: a call without one does not wait for the stopped engine."""
    with stopped(two, 1):
        for _ in range(2):
            fill(two, b"x" * LIMIT)
        with pytest.raises(UtilityCallError, match="max_unanswered_bytes") as info:
            two.client.call_utility("echo", "small")
        assert info.value.outcomes.may_have_run == ()
        assert two.client.call_utility("echo", "alive", engines=[0]) == ["alive"]


def test_a_refused_call_is_not_undone(two: Rig) -> None:
    """Where nothing was sent, there is nothing to undo."""
    before = two.received(0, "whoami")
    with stopped(two, 1):
        for _ in range(2):
            fill(two, b"x" * LIMIT)
        with pytest.raises(UtilityCallError) as info:
            two.client.call_utility("echo", "small", compensate=UtilityCall("whoami"))
        assert info.value.compensation is None
    two.control("mock_log", engines=[0])
    assert two.received(0, "whoami") == before


def test_an_undo_is_refused_for_each_engine_alone(two: Rig) -> None:
    """The engine that takes no more is told by its outcome; the others get the undo."""
    client, before = two.client, two.received(1, "whoami")
    with stopped(two, 1):
        outcomes = fill(two, b"x" * (LIMIT + 1))
        undone = client.compensate(outcomes, UtilityCall("whoami"), timeout=scaled(5))
        assert outcomes.may_have_run == (0, 1)
        assert isinstance(undone[0], Ok)
        assert type(undone.failures[1]) is NotSentError
        assert undone.may_have_run == (0,)
    two.control("mock_log")
    assert two.received(1, "whoami") == before
