"""The registry alone, without sockets and threads: every waiter is settled once or unregistered."""

from __future__ import annotations

import itertools
from collections import deque
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine_client.deadline import Deadline
from engine_client.dispatch.registry import Registry
from engine_client.dispatch.waiting import PendingCall
from engine_client.errors import (
    AbandonedError,
    EngineDeadError,
    EngineError,
    NotSentError,
    RemoteError,
    ReplyError,
)
from engine_client.outcome import Failed, Ok, Outcome

LIMIT = 100
NOW = 10.0
_ids = itertools.count(1)


def living(*indices: int, limit: int = LIMIT) -> Registry:
    """Return a registry of engines that are all alive and speak CBOR."""
    registry = Registry(indices, limit)
    for index in indices:
        registry.register_engine(index, "cbor", {}, NOW)
    return registry


def call_to(*targets: int, size: int = 0, method: str = "sleep") -> PendingCall:
    """Return a call that is not registered yet."""
    payloads = {"cbor": b"x" * size}
    return PendingCall(next(_ids), method, targets, payloads, Deadline(None), NOW)


def registered(registry: Registry, *targets: int, size: int = 0) -> PendingCall:
    """Return a call that is registered."""
    call = call_to(*targets, size=size)
    assert registry.add(call, each=False)
    return call


def outcome_of(call: PendingCall, index: int) -> Outcome:
    """Return how an engine settled; it must have."""
    return call.futures[index].result(0)


def error_of(call: PendingCall, index: int) -> EngineError:
    """Return the error with which an engine settled; it must have."""
    outcome = outcome_of(call, index)
    assert isinstance(outcome, Failed)
    return outcome.error


# -- replies --------------------------------------------------------------------------------------


def test_the_last_reply_lets_the_caller_go() -> None:
    """One waiter per engine; the latch opens with the last, and the call is gone then."""
    registry = living(0, 1, 2)
    call = registered(registry, 0, 1, 2)
    assert registry.pending() == 3
    assert registry.settle(1, call.call_id, None, "one", NOW + 1)
    error = RemoteError("boom")
    assert registry.settle(0, call.call_id, error, None, NOW + 2)
    assert registry.pending() == 1
    assert not call.latch.wait(0)
    assert registry.settle(2, call.call_id, None, "two", NOW + 3)
    assert call.latch.wait(0)
    assert registry.pending() == 0
    assert registry.calls() == []
    assert dict(call.outcomes()) == {0: Failed(error, 2.0), 1: Ok("one", 1.0), 2: Ok("two", 3.0)}


def test_a_failure_reply_names_its_method() -> None:
    """The reply itself names only a call id."""
    registry = living(0)
    call = registered(registry, 0)
    error = RemoteError("boom", engine=0)
    assert registry.settle(0, call.call_id, error, None, NOW)
    assert error.method == call.method


def test_a_reply_that_nobody_waits_for_settles_nothing() -> None:
    """Unknown ids, engines that were not asked, and second replies are told apart."""
    registry = living(0, 1)
    call = registered(registry, 0)
    assert not registry.settle(0, call.call_id + 10_000, None, "unknown", NOW)
    assert not registry.settle(1, call.call_id, None, "not asked", NOW)
    assert registry.settle(0, call.call_id, None, "first", NOW)
    assert not registry.settle(0, call.call_id, None, "second", NOW)
    assert outcome_of(call, 0) == Ok("first", 0.0)
    other = registered(registry, 0, 1)
    assert registry.settle(0, other.call_id, None, "first", NOW)
    assert not registry.settle(0, other.call_id, None, "second", NOW)
    assert registry.pending() == 1


def test_a_failure_from_outside_settles_only_who_still_waits() -> None:
    """An engine that has settled keeps its outcome."""
    registry = living(0, 1)
    call = registered(registry, 0, 1)
    registry.settle(0, call.call_id, None, "value", NOW)
    for index in (0, 1):
        registry.fail(index, call.call_id, ReplyError("garbage", engine=index), NOW)
        registry.fail(index, 123_456_789, ReplyError("garbage", engine=index), NOW)
    assert outcome_of(call, 0) == Ok("value", 0.0)
    assert isinstance(error_of(call, 1), ReplyError)
    assert call.latch.wait(0)


# -- refusals -------------------------------------------------------------------------------------


def test_one_dead_target_refuses_the_call_for_all() -> None:
    """Nothing is registered; the dead engine's outcome says why, and no engine may have run it."""
    registry = living(0, 1, 2)
    registry.bury_engine(1, "it was ended")
    call = call_to(0, 1, 2)
    assert not registry.add(call, each=False)
    assert registry.calls() == []
    assert not call.waiting
    assert call.refused == {0, 1, 2}
    outcomes = call.outcomes()
    assert outcomes.may_have_run == ()
    assert [type(error) for error in outcomes.failures.values()] == [
        NotSentError,
        EngineDeadError,
        NotSentError,
    ]
    assert "engine 1 is dead: it was ended; start it again" in str(error_of(call, 1))
    assert "nothing was sent, because of engine 1" in str(error_of(call, 0))


def test_an_engine_that_never_came_is_dead() -> None:
    """The text of a refusal says that the engine never registered."""
    registry = Registry([0], LIMIT)
    call = call_to(0)
    assert not registry.add(call, each=False)
    assert "it never registered" in str(error_of(call, 0))


def test_each_engine_can_be_refused_for_itself() -> None:
    """The living engines wait, the dead one has settled; nothing is refused as a whole."""
    registry = living(0, 1)
    registry.bury_engine(0, "gone")
    call = call_to(0, 1)
    assert registry.add(call, each=True)
    assert call.refused == {0}
    assert list(call.waiting) == [1]
    assert registry.pending() == 1
    registry.settle(1, call.call_id, None, None, NOW)
    assert call.outcomes().succeeded == (1,)


def test_an_engine_that_has_too_much_unanswered_is_refused() -> None:
    """The limit counts the bytes since the engine was last heard; a refusal names the setting."""
    registry = living(0, 1)
    registered(registry, 0, 1, size=LIMIT)
    registered(registry, 1, size=1)
    call = call_to(0, 1, size=1)
    assert not registry.add(call, each=False)
    assert isinstance(error_of(call, 1), NotSentError)
    assert "not been heard since 101 bytes" in str(error_of(call, 1))
    assert "max_unanswered_bytes" in str(error_of(call, 1))
    assert "because of engine 1" in str(error_of(call, 0))
    assert registry.engines[0].unanswered == LIMIT  # what was refused does not count


@pytest.mark.parametrize("how", ["reply", "late reply", "other", "registered", "revived"])
def test_an_engine_that_is_heard_is_sent_calls_again(how: str) -> None:
    """Any sign of life of that engine lifts its limit."""
    registry = living(0)
    call = registered(registry, 0, size=LIMIT + 1)
    assert not registry.add(call_to(0), each=False)
    if how == "reply":
        registry.settle(0, call.call_id, None, None, NOW + 5)
    elif how == "late reply":
        registry.settle(0, 999_999_999, None, None, NOW + 5)
    elif how == "other":
        registry.heard(0, NOW + 5)
    elif how == "registered":
        registry.register_engine(0, "cbor", {}, NOW + 5)
    else:
        registry.revive_engine(0)
    assert registry.add(call_to(0), each=False)
    assert registry.engines[0].last_seen == (NOW if how == "revived" else NOW + 5)


# -- abandoned calls ------------------------------------------------------------------------------


@pytest.mark.parametrize("who", ["drain", "pending", "calls", "add", "fail_engine", "in_flight"])
def test_whoever_looks_unregisters_what_was_abandoned(who: str) -> None:
    """A caller that left is forgotten by the next one that looks, and its replies are late then."""
    registry = living(0, 1)
    gone, kept = registered(registry, 0, 1), registered(registry, 0)
    registry.abandoned.append(gone)
    if who == "add":
        registered(registry, 1)
    elif who == "fail_engine":
        registry.fail_engine(1, EngineDeadError, "x", NOW)
    else:
        getattr(registry, who)()
    assert not registry.abandoned
    assert gone not in registry.calls()
    assert kept in registry.calls()
    assert not registry.settle(0, gone.call_id, None, None, NOW)
    assert list(gone.waiting) == [0, 1]
    assert not any(future.done() for future in gone.futures.values())


def test_a_settled_call_may_be_abandoned_too() -> None:
    """Every caller leaves in this way, also one whose call is complete."""
    registry = living(0)
    call = registered(registry, 0)
    registry.settle(0, call.call_id, None, None, NOW)
    registry.abandoned.append(call)
    registry.drain()
    assert not registry.abandoned
    assert registry.pending() == 0


def test_a_call_that_was_never_registered_may_be_abandoned_too() -> None:
    """An interrupt can fall before the registration."""
    registry = living(0)
    registry.abandoned.append(call_to(0))
    assert registry.pending() == 0
    assert not registry.abandoned


class InterruptedCalls(dict[int, PendingCall]):
    """Calls by id; removing one is interrupted, before or after it was done."""

    when = "never"

    def pop(self, *key: Any) -> Any:
        if self.when == "before":
            self.when = "never"
            raise KeyboardInterrupt
        got = super().pop(*key)
        if self.when == "after":
            self.when = "never"
            raise KeyboardInterrupt
        return got


class InterruptedDeque(deque[PendingCall]):
    """Abandoned calls; taking the first away is interrupted before it was done."""

    armed = False

    def popleft(self) -> PendingCall:
        if self.armed:
            self.armed = False
            raise KeyboardInterrupt
        return super().popleft()


@pytest.mark.parametrize("when", ["before", "after", "deque"])
def test_an_interrupted_drain_loses_no_waiter(when: str) -> None:
    """Wherever a drain is interrupted, the next one finishes it."""
    registry = living(0)
    registry._calls = calls = InterruptedCalls()
    registry.abandoned = abandoned = InterruptedDeque()
    gone = [registered(registry, 0), registered(registry, 0)]
    registry.abandoned.extend(gone)
    calls.when, abandoned.armed = when, when == "deque"
    with pytest.raises(KeyboardInterrupt):
        registry.drain()
    assert registry.pending() == 0
    assert not registry.abandoned
    assert not calls


# -- engines that die, the client's end ---------------------------------------------------------


def test_a_dead_engine_fails_its_own_waiters_only() -> None:
    """Each call that waits for it learns whether it had been sent; the other engines go on."""
    registry = living(0, 1)
    both, alone, other = (
        registered(registry, 0, 1),
        registered(registry, 0),
        registered(registry, 1),
    )
    both.sent.update((0, 1))
    assert registry.fail_engine(0, EngineDeadError, "died before {method}", NOW + 1) == 2
    assert error_of(both, 0).may_have_run
    assert str(error_of(both, 0)) == "died before sleep"
    assert not error_of(alone, 0).may_have_run
    assert str(error_of(alone, 0)) == "died before sleep; the call had not been sent to it"
    assert alone.refused == {0}
    assert both.refused == set()
    assert alone.latch.wait(0)
    assert not both.latch.wait(0)
    assert registry.in_flight() == {0: 0, 1: 2}
    assert list(other.waiting) == [1]
    assert registry.fail_engine(0, EngineDeadError, "again", NOW) == 0


def test_a_braced_method_name_breaks_no_text() -> None:
    """A method's name is put into the text as it is, whatever characters it has."""
    registry = living(0)
    call = call_to(0, method="{0!r} {method}")
    registry.add(call, each=False)
    registry.fail_engine(0, EngineDeadError, "died {method} {x}", NOW)
    assert str(error_of(call, 0)).startswith("died {0!r} {method} {x}")


@pytest.mark.parametrize("cause", [None, RuntimeError("a bug")])
def test_the_end_settles_every_waiter(cause: BaseException | None) -> None:
    """Whoever waits gets complete outcomes; nothing is registered afterwards."""
    registry = living(0, 1)
    call, unsent, gone = (
        registered(registry, 0, 1),
        registered(registry, 1),
        registered(registry, 0),
    )
    call.sent.update((0, 1))
    registry.settle(0, call.call_id, None, "done", NOW)
    registry.abandoned.append(gone)
    registry.end(cause, NOW + 1)
    assert registry.ended
    assert registry.closing_cause is cause
    assert call.ended
    assert unsent.ended
    assert not gone.ended
    assert outcome_of(call, 0) == Ok("done", 0.0)
    error = error_of(call, 1)
    assert isinstance(error, AbandonedError)
    assert error.may_have_run
    why = "the client was closed" if cause is None else "the client broke: a bug"
    assert str(error) == f"{why} before engine 1 replied to sleep"
    assert not error_of(unsent, 1).may_have_run
    assert str(error_of(unsent, 1)).endswith("; it had not been sent")
    assert call.latch.wait(0)
    assert unsent.latch.wait(0)
    assert not registry.add(call_to(0), each=False)
    assert not registry.add(call_to(0), each=True)
    assert registry.pending() == 0


def test_progress_names_who_is_outstanding_and_what_failed() -> None:
    """A long call can be described while it waits."""
    registry = living(0, 1, 2)
    call = registered(registry, 0, 1, 2)
    error = RemoteError("boom")
    registry.settle(0, call.call_id, error, None, NOW)
    registry.settle(1, call.call_id, None, "fine", NOW)
    assert registry.progress(call) == ((2,), {0: error})


def test_alive_engines_are_those_that_accept_calls() -> None:
    """Death and return show at once."""
    registry = Registry([3, 4], LIMIT)
    assert registry.alive() == ()
    registry.register_engine(4, "msgpack", {}, NOW)
    assert registry.alive() == (4,)
    registry.bury_engine(4, "gone")
    assert registry.alive() == ()
    assert registry.engines[4].death == "gone"
    registry.revive_engine(4)
    assert registry.alive() == (4,)
    assert registry.engines[4].death is None


@pytest.mark.parametrize(
    ("ready", "lockstep"),
    [
        ({}, False),
        ({"data_parallel_size": 1}, False),
        ({"data_parallel_size": 2}, True),
        ({"data_parallel_size": "2"}, False),
        ({"data_parallel_size": None}, False),
    ],
)
def test_lockstep_is_what_the_registration_says(ready: dict[str, Any], lockstep: bool) -> None:
    """An engine is coupled to others when its registration counts more than one rank."""
    registry = Registry([0], LIMIT)
    registry.register_engine(0, "cbor", ready, NOW)
    assert registry.engines[0].in_lockstep is lockstep


# -- any order of events --------------------------------------------------------------------------

ENGINES = (0, 1, 2)


class RegistryMachine(RuleBasedStateMachine):
    """Calls, replies, deaths, abandonments and the end in any order; the accounts must hold."""

    def __init__(self) -> None:
        super().__init__()
        self.registry = living(*ENGINES, limit=10**9)
        self.calls: list[PendingCall] = []
        self.expected: dict[tuple[int, int], object] = {}
        """What each waiter was settled with, by call id and engine."""
        self.left: set[int] = set()
        """Ids of the calls that were abandoned."""
        self.dead: set[int] = set()
        self.ended = False

    @initialize()
    def begin(self) -> None:
        """Start with one call to all engines."""
        self.add(frozenset(ENGINES), False)

    def _waits(self, call: PendingCall, index: int) -> bool:
        known = (call.call_id, index) in self.expected
        return index in call.targets and not known and call.call_id not in self.left

    @rule(to=st.frozensets(st.sampled_from(ENGINES), min_size=1), each=st.booleans())
    def add(self, to: frozenset[int], each: bool) -> None:
        """A call is made; dead targets refuse it as a whole or for themselves."""
        call = call_to(*to)
        got = self.registry.add(call, each=each)
        refused = to & self.dead
        if self.ended or (refused and not each):
            assert not got
            if not self.ended:
                assert not call.waiting
            return
        assert got
        self.calls.append(call)
        for index in refused:
            self.expected[call.call_id, index] = EngineDeadError
        if refused == to:  # its caller has nothing to wait for, and leaves
            assert not call.waiting
            self.left.add(call.call_id)
            self.registry.abandoned.append(call)

    def _pick(self, number: int) -> PendingCall:
        return self.calls[number % len(self.calls)]

    @rule(number=st.integers(0, 50), index=st.sampled_from(ENGINES), value=st.integers())
    def reply(self, number: int, index: int, value: int) -> None:
        """An engine replies to some call: in time, late, again, or to what it was not asked."""
        call = self._pick(number)
        waits = self._waits(call, index)
        if call.call_id in self.left and call in self.registry._calls.values():
            return  # not drained yet: it may be settled or not, and nobody looks
        assert self.registry.settle(index, call.call_id, None, value, NOW) == waits
        if waits:
            self.expected[call.call_id, index] = value

    @rule(number=st.integers(0, 50), index=st.sampled_from(ENGINES))
    def bad_reply(self, number: int, index: int) -> None:
        """A reply with a readable call id cannot be decoded."""
        call = self._pick(number)
        self.registry.drain()
        waits = self._waits(call, index)
        self.registry.fail(index, call.call_id, ReplyError("bad"), NOW)
        if waits:
            self.expected[call.call_id, index] = ReplyError

    @rule(number=st.integers(0, 50))
    def abandon(self, number: int) -> None:
        """A caller leaves."""
        call = self._pick(number)
        if call.call_id not in self.left:
            self.left.add(call.call_id)
            self.registry.abandoned.append(call)

    @rule(index=st.sampled_from(ENGINES))
    def die(self, index: int) -> None:
        """An engine dies: all that waits for it fails."""
        self.dead.add(index)
        self.registry.bury_engine(index, "gone")
        waiting = [call for call in self.calls if self._waits(call, index)]
        assert self.registry.fail_engine(index, EngineDeadError, "gone", NOW) == len(waiting)
        for call in waiting:
            self.expected[call.call_id, index] = EngineDeadError

    @rule(index=st.sampled_from(ENGINES))
    def come_back(self, index: int) -> None:
        """An engine registers again."""
        self.dead.discard(index)
        self.registry.register_engine(index, "cbor", {}, NOW)

    @rule(yes=st.integers(0, 9))
    def end(self, yes: int) -> None:
        """The client ends, seldom."""
        if yes or self.ended:
            return
        self.ended = True
        waiting = [(c, i) for c in self.calls for i in c.targets if self._waits(c, i)]
        self.registry.end(None, NOW)
        for call, index in waiting:
            self.expected[call.call_id, index] = AbandonedError

    @invariant()
    def every_waiter_has_its_own_end(self) -> None:
        """Each engine of each call is settled as recorded, or still waits; never both."""
        waiting = 0
        for call in self.calls:
            if call.call_id in self.left:
                continue
            for index in call.targets:
                key = call.call_id, index
                assert call.futures[index].done() == (key in self.expected)
                assert (index in call.waiting) == (key not in self.expected)
                if key not in self.expected:
                    waiting += 1
                    continue
                outcome, expected = outcome_of(call, index), self.expected[key]
                if isinstance(outcome, Ok):
                    assert outcome.value == expected
                else:
                    assert type(outcome.error) is expected
            assert call.latch._lock.locked() == bool(call.waiting)
        assert self.registry.pending() == waiting
        assert not self.registry.abandoned
        assert {c.call_id for c in self.registry.calls()} == {
            c.call_id for c in self.calls if c.waiting and c.call_id not in self.left
        }


TestRegistryMachine = RegistryMachine.TestCase
