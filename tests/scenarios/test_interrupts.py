"""Ctrl-C in a waiting call: at one moment, twice in a row, and at random instants for seconds."""

from __future__ import annotations

import dis
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

import pytest

from engine_client import (
    AbandonedError,
    EngineClient,
    Failed,
    Ok,
    Outcomes,
    RemoteError,
    UtilityCall,
    UtilityCallError,
    UtilityTimeoutError,
    fanout,
)
from engine_client.dispatch.waiting import PendingCall
from tests.helpers import interrupt_storm, run_in_thread, scaled, storm_test, wait_until
from tests.scenarios.rig import Rig, rig


@pytest.fixture
def seconds(request: pytest.FixtureRequest) -> float:
    """How long a storm lasts."""
    return 20.0 if request.config.getoption("--long") else 2.0


def interrupt_when(
    condition: Callable[[], object], number: int = signal.SIGINT
) -> Callable[[], None]:
    """Send a signal to this thread once a condition holds; returns how to join the sender."""
    thread = threading.get_ident()

    def send() -> None:
        wait_until(condition, what="the moment to interrupt")
        signal.pthread_kill(thread, number)

    return run_in_thread(send).result


def outcomes_of(exc: BaseException) -> Outcomes:
    """Return what an interrupt tells of the call that it ended."""
    outcomes = exc.outcomes  # type: ignore[attr-defined]
    assert isinstance(outcomes, Outcomes)
    return outcomes


# -- one interrupt ----------------------------------------------------------------------------


def test_an_interrupt_tells_who_had_settled_and_who_may_still_run_it(two: Rig) -> None:
    """The exception is the caller's own, with a note and every engine's outcome on it."""
    two.fault("echo", "hold", engines=[1])
    client = two.client
    late = client.stats.late_replies
    join = interrupt_when(lambda: client.pending_utility_calls == 1)
    with pytest.raises(KeyboardInterrupt) as info:
        client.call_utility("echo", "x")
    join()
    assert client.pending_utility_calls == 0
    assert type(info.value) is KeyboardInterrupt
    assert info.value.__notes__ == [
        "echo: engine 0 had settled; engine 1: may still run it (see .outcomes)"
    ]
    outcomes = outcomes_of(info.value)
    assert outcomes.method == "echo"
    assert list(outcomes) == [0, 1]
    assert outcomes[0] == Ok("x", outcomes[0].elapsed)
    left = outcomes.failures[1]
    assert type(left) is AbandonedError
    assert left.engine == 1
    assert left.may_have_run
    assert "interrupted (KeyboardInterrupt) before engine 1 replied to echo" in str(left)
    assert outcomes.may_have_run == (0, 1)
    assert client.call_utility("echo", "next", engines=[0]) == ["next"]
    two.release(1)
    wait_until(lambda: client.stats.late_replies == late + 1, what="the late reply")


def test_a_failure_before_the_interrupt_is_told(two: Rig) -> None:
    """What was known when the interrupt came is in the outcomes."""
    two.fault("echo", "fail", engines=[0], message="boom")
    two.fault("echo", "hold", engines=[1])
    join = interrupt_when(lambda: two.client.pending_utility_calls == 1)
    with pytest.raises(KeyboardInterrupt) as info:
        two.client.call_utility("echo", "x", timeout=scaled(20))
    join()
    assert isinstance(outcomes_of(info.value).failures[0], RemoteError)
    assert outcomes_of(info.value).unsettled == (1,)


def test_an_interrupted_call_can_be_undone(two: Rig) -> None:
    """compensate() takes the interrupt's outcomes; whoever has not answered is not waited for."""
    two.fault("echo", "hold", engines=[1])
    client = two.client
    join = interrupt_when(lambda: client.pending_utility_calls == 1)
    with pytest.raises(KeyboardInterrupt) as info:
        client.call_utility("echo", "x", compensate=UtilityCall("whoami"))
    join()
    before = [len(two.received(k)) for k in (0, 1)]
    two.control("mock_log")
    assert [len(two.received(k)) for k in (0, 1)] == before, "undone without being asked to"
    two.fault("whoami", "hold", engines=[1])
    undone = client.compensate(outcomes_of(info.value), UtilityCall("whoami"))
    assert undone.method == "whoami"
    assert isinstance(undone[0], Ok)
    assert isinstance(undone.failures[1], AbandonedError)
    wait_until(lambda: two.received(1)[before[1] :] == [[]], what="the undo at engine 1")
    assert two.received(1)[-2:] == [["x"], []], "the undo must come after the call"
    two.settle_down()
    again = client.compensate(outcomes_of(info.value), UtilityCall("whoami"), timeout=scaled(10))
    assert again.succeeded == (0, 1)


def test_an_interrupt_before_anything_was_sent_says_so(
    two: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted before the outbox had the call, no engine can have run it."""

    def interrupted(*args: object, **kwargs: object) -> NoReturn:
        raise KeyboardInterrupt

    before = [two.received(k) for k in (0, 1)]
    with monkeypatch.context() as patch:
        patch.setattr(two.client._dispatcher.registry, "add", interrupted)
        with pytest.raises(KeyboardInterrupt) as info:
            two.client.call_utility("echo", "x")
    assert info.value.__notes__ == [
        "echo: no engine had settled; engines 0, 1: it was not sent (see .outcomes)"
    ]
    assert outcomes_of(info.value).may_have_run == ()
    two.control("mock_log")
    assert [two.received(k) for k in (0, 1)] == before


class Stubborn(Exception):
    """An exception of the user's that takes neither notes nor attributes."""

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(name)

    def add_note(self, note: str) -> NoReturn:
        raise TypeError("no notes")


@pytest.mark.parametrize("kind", [SystemExit, RuntimeError, Stubborn, UtilityCallError])
def test_whatever_a_handler_raises_goes_through_unchanged(
    two: Rig, kind: type[BaseException]
) -> None:
    """The very object that a signal handler raised reaches the caller, whatever it is."""
    two.fault("echo", "hold", engines=[1])
    raised = kind("from a handler")

    def handler(number: int, frame: FrameType | None) -> NoReturn:
        raise raised

    previous = signal.signal(signal.SIGUSR1, handler)
    try:
        join = interrupt_when(lambda: two.client.pending_utility_calls == 1, signal.SIGUSR1)
        with pytest.raises(kind) as info:
            two.client.call_utility("echo", "x")
        join()
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert info.value is raised
    assert two.client.pending_utility_calls == 0


@pytest.mark.parametrize("where", ["report", "drain", "outcomes", "settling"])
def test_a_second_interrupt_in_the_cleanup_leaves_nothing_either(
    two: Rig, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever step of the cleanup it hits, no waiter is left and the next call works."""
    client = two.client
    registry = client._dispatcher.registry
    two.fault("echo", "hold", engines=[1])
    hits: list[str] = []

    def interrupted(*args: object, **kwargs: object) -> NoReturn:
        hits.append(where)
        raise KeyboardInterrupt("second")

    drain = registry.drain

    def interrupted_drain() -> None:
        # The dispatcher drains too, and an interrupt comes to the main thread only.
        if threading.current_thread() is threading.main_thread():
            interrupted()
        drain()

    join = interrupt_when(lambda: client.pending_utility_calls == 1)
    with monkeypatch.context() as patch:
        if where == "report":
            patch.setattr(fanout, "_report_interrupt", interrupted)
        elif where == "drain":
            patch.setattr(registry, "drain", interrupted_drain)
        elif where == "outcomes":
            patch.setattr(PendingCall, "outcomes", interrupted)
        else:
            patch.setattr(fanout, "AbandonedError", interrupted)
        with pytest.raises(KeyboardInterrupt, match="second"):
            client.call_utility("echo", "x")
    join()
    assert hits
    assert client.pending_utility_calls == 0
    assert client.call_utility("echo", "next", engines=[0]) == ["next"]


def test_an_interrupt_of_the_undo_is_told_with_the_failure(two: Rig) -> None:
    """Interrupted in the automatic undo, the failure is its context and knows what was undone."""
    two.fault("echo", "fail", engines=[1], message="boom")
    two.fault("whoami", "hold", engines=[1])
    client = two.client
    join = interrupt_when(
        lambda: client.pending_utility_calls == 1 and two.received(1, "whoami")[-1:] == [[]]
    )
    with pytest.raises(KeyboardInterrupt) as info:
        client.call_utility("echo", "x", compensate=UtilityCall("whoami"))
    join()
    failure = info.value.__context__
    assert isinstance(failure, UtilityCallError)
    assert "boom" in str(failure)
    assert failure.compensation is not None
    assert failure.compensation.method == "whoami"
    assert isinstance(failure.compensation[0], Ok)
    assert isinstance(failure.compensation.failures[1], AbandonedError)
    assert outcomes_of(info.value) == failure.compensation
    assert any("interrupted while whoami undid echo" in note for note in info.value.__notes__)
    assert client.pending_utility_calls == 0


# -- every moment of one call --------------------------------------------------------------------


CHECKED_AFTER = frozenset({"CALL", "CALL_FUNCTION_EX", "CALL_KW", "RESUME", "JUMP_BACKWARD"})
"""Instructions after which CPython looks for signals."""
TRACED = ("fanout.py", "registry.py", "outbox.py", "waiting.py")


class InterruptAt:
    """Raises a KeyboardInterrupt at one moment of the client's own code, counted from 0.

    The moments are those at which CPython may do so: after a call and at the begin of a function,
    and instead of the acquisition of a lock, for which it may have to wait.  (It does so as part of
    the call; here it is the next instruction, which must be guarded by the same handler.)
    """

    def __init__(self, moment: int) -> None:
        self._left = moment
        self._last: dict[FrameType, int] = {}
        self._known: dict[Any, tuple[dict[int, str], list[Any]]] = {}
        self.begun = False
        """Whether the call has been registered or is about to be."""
        self.raised = False

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        code = frame.f_code
        if not code.co_filename.endswith(TRACED):
            return None
        self.begun = self.begun or code.co_qualname == "Registry.add"
        if event == "call":
            frame.f_trace_opcodes = True
        elif event == "opcode" and self.begun:
            if code not in self._known:
                names = {step.offset: step.opname for step in dis.get_instructions(code)}
                handlers = dis._parse_exception_table(code)  # type: ignore[attr-defined]
                self._known[code] = names, handlers
            names, handlers = self._known[code]
            now, last = frame.f_lasti, self._last.get(frame, -1)
            self._last[frame] = now
            alike = all((h.start <= now < h.end) == (h.start <= last < h.end) for h in handlers)
            if (names.get(last) in CHECKED_AFTER and alike) or names[now] == "BEFORE_WITH":
                if self._left == 0:
                    self.raised = True
                    raise KeyboardInterrupt
                self._left -= 1
        return self


@pytest.mark.skipif(
    sys.version_info >= (3, 12), reason="tells moments by Python 3.11's instructions"
)
@pytest.mark.parametrize("late", [False, True])
def test_an_interrupt_at_each_moment_of_a_call_leaves_nothing(two: Rig, late: bool) -> None:
    """From the registration to the return, whether the engines answer in time or not."""
    client = two.client
    registry = client._dispatcher.registry
    if late:
        two.fault("echo", "hold", engines=[1])
    previous = sys.gettrace()
    for moment in range(10_000):
        tracer = InterruptAt(moment)
        try:
            sys.settrace(tracer)
            client.settle_utility("echo", moment, timeout=0.002 if late else None)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(previous)
        free = registry.lock.acquire(timeout=scaled(5))
        registry.lock.release()
        assert free, moment
        assert client.pending_utility_calls == 0, moment
        assert not registry.abandoned
        assert not registry._calls
        if not tracer.raised:
            break
    assert 40 < moment < 10_000


# -- storms -----------------------------------------------------------------------------------


class Storm:
    """Engines under a storm, and what must be true of them afterwards."""

    def __init__(self, made: Rig) -> None:
        self.rig = made
        self.told = 0
        """Interrupts that carried outcomes."""

    def calling(self, call: Callable[[EngineClient], object]) -> None:
        """Make one call; look at the interrupt that ends it."""
        try:
            call(self.rig.client)
        except KeyboardInterrupt as exc:
            outcomes = getattr(exc, "outcomes", None)
            if outcomes is not None:
                self.told += 1
                assert list(outcomes) == [0, 1]
                for outcome in outcomes.values():
                    assert isinstance(outcome, (Ok, Failed))
            raise

    def check(self) -> None:
        """Check that nothing is left, that the engines saw whole messages only, and a next call."""
        client, registry = self.rig.client, self.rig.client._dispatcher.registry
        assert client.pending_utility_calls == 0
        assert not registry._calls
        assert not registry.abandoned
        self.rig.settle_down()
        self.rig.check()
        self.rig.check_messages()
        # No fan-out reached some engines only, or in another order.
        first, second = ([entry["call_id"] for entry in e.log] for e in self.rig.engines)
        assert first == second
        assert len(set(first)) == len(first)
        assert not client.closed
        assert client.stats.malformed_messages == 0


@pytest.fixture(scope="module")
def exposed() -> Iterator[Rig]:
    """Engines that live through all storms, one of each dialect."""
    with rig(("cbor", "msgpack")) as made:
        yield made


@pytest.fixture
def storm(exposed: Rig) -> Iterator[Storm]:
    """The engines of the storms, without faults before and after."""
    yield Storm(exposed)
    exposed.settle_down()


@storm_test()
def test_storm_over_calls_that_complete(storm: Storm, seconds: float) -> None:
    """Interrupts at 1 to 800 us: each call is right or interrupted, and nothing is left of it."""
    nonce = 0

    def call(client: EngineClient) -> None:
        nonlocal nonce
        nonce += 1
        value = nonce
        assert client.call_utility("echo", value) == [value, value]

    report = interrupt_storm(lambda: storm.calling(call), seconds=seconds)
    print(report, f"{storm.told} told")
    storm.check()
    assert report.interrupted > 20
    assert storm.told > 0


@storm_test()
def test_storm_over_calls_that_time_out(storm: Storm, seconds: float) -> None:
    """Interrupts while calls run into their limits: a time-out or the interrupt, nothing else."""
    storm.rig.fault("echo", "drop", engines=[1])
    chance = random.Random(seconds)
    timed_out = 0

    def call(client: EngineClient) -> None:
        nonlocal timed_out
        with pytest.raises(UtilityTimeoutError) as info:
            client.call_utility("echo", 1, timeout=chance.uniform(0, 500e-6))
        assert 1 in info.value.outcomes.unsettled
        timed_out += 1

    report = interrupt_storm(lambda: storm.calling(call), seconds=seconds)
    print(report, f"{storm.told} told, {timed_out} timed out")
    storm.check()
    assert report.interrupted > 20
    assert storm.told > 0
    assert timed_out > 20


@storm_test()
def test_storm_over_calls_that_are_undone(storm: Storm, seconds: float) -> None:
    """Interrupts of calls that fail and undo: the failure with its undo, or the interrupt."""
    storm.rig.fault("echo", "fail", engines=[1], message="boom")
    undo = UtilityCall("whoami")
    undone = 0

    def call(client: EngineClient) -> None:
        nonlocal undone
        with pytest.raises(UtilityCallError, match="boom") as info:
            client.call_utility("echo", 1, compensate=undo)
        assert info.value.compensation is not None
        assert info.value.compensation.succeeded == (0, 1)
        undone += 1

    report = interrupt_storm(lambda: storm.calling(call), seconds=seconds / 2, longest=1500e-6)
    print(report, f"{storm.told} told, {undone} undone")
    storm.check()
    assert report.interrupted > 20
    assert undone > 0


class Double:
    """A handler that raises, and arms itself once more for a moment later."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.left = 0
        self.delivered = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.left > 0:
            self.left -= 1
            self.delivered += 1
            if self.left:
                signal.setitimer(signal.ITIMER_REAL, self.chance.uniform(1e-6, 60e-6))
            raise KeyboardInterrupt

    def round(self, action: Callable[[], Any]) -> None:
        """Run an action that is interrupted up to twice."""
        try:
            try:
                self.left = 2
                signal.setitimer(signal.ITIMER_REAL, self.chance.uniform(1e-6, 800e-6))
                action()
            finally:
                self.left = 0
                signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            self.left = 0
            signal.setitimer(signal.ITIMER_REAL, 0)


@storm_test()
def test_storm_of_double_interrupts(
    storm: Storm, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second interrupt, microseconds after the first and so in the cleanup, leaves nothing."""
    seed = random.getrandbits(32)
    print(f"seed {seed}")
    double = Double(seed)
    client = storm.rig.client
    chance = random.Random(seed)

    def action() -> None:
        client.settle_utility("echo", 1, timeout=chance.choice([None, 200e-6]))

    lost: list[Any] = []
    previous = signal.signal(signal.SIGALRM, double)
    # Where Python can only report an interrupt, the second one must not hit the report.
    monkeypatch.setattr(sys, "unraisablehook", lost.append)
    rounds, end = 0, time.monotonic() + seconds / 2
    try:
        while time.monotonic() < end:
            rounds += 1
            try:
                double.round(action)
            except KeyboardInterrupt:  # the second one, in the round's own last lines
                double.left = 0
    finally:
        double.left = 0
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        monkeypatch.undo()
    print(f"{rounds} rounds, {double.delivered} interrupts, {len(lost)} lost")
    assert {type(one.exc_value) for one in lost} <= {KeyboardInterrupt}
    storm.check()
    assert double.delivered > rounds / 4
