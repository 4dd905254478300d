"""A fan-out waits for every engine, tells what each one did, and is refused as a whole or sent."""

from __future__ import annotations

import contextlib
import gc
import signal
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from engine_client import (
    AbandonedError,
    ClientBrokenError,
    ConsensusError,
    EngineDeadError,
    Failed,
    NotSentError,
    Ok,
    Outcomes,
    RemoteError,
    UtilityCall,
    UtilityCallError,
    UtilityTimeoutError,
    connect,
)
from engine_client.dispatch.core import Core
from engine_client.dispatch.outbox import Wakeup
from tests.helpers import engine_processes, run_in_thread, scaled, wait_until
from tests.scenarios.rig import Rig, address, rig


@pytest.fixture(scope="module", params=["cbor", "msgpack"])
def shared(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """Two engines of one dialect, shared by the tests that leave them alive."""
    with rig((request.param, request.param)) as made:
        yield made
        made.check_messages()


# -- the three mistakes that started this library -----------------------------------------------


def test_a_failure_does_not_end_the_wait_for_the_others(two: Rig) -> None:
    """One engine fails at once; the error comes when the other has answered, with both outcomes."""
    two.fault("echo", "fail", engines=[0], message="boom")
    two.fault("echo", "hold", engines=[1])
    call = run_in_thread(two.client.call_utility, "echo", "a")
    wait_until(lambda: two.client.pending_utility_calls == 1, what="the failure of engine 0")
    assert [info.in_flight for info in two.client.engines] == [0, 1]
    # Whatever comes later goes through the same dispatcher, behind that failure.
    for _ in range(20):
        two.client.call_utility("whoami", timeout=scaled(10))
    assert two.client.pending_utility_calls == 1
    assert not call.done
    two.release(1)
    error = call.error()
    assert type(error) is UtilityCallError
    assert list(error.outcomes) == [0, 1]
    failure = error.outcomes.failures[0]
    assert isinstance(failure, RemoteError)
    assert failure.message == "Call to echo method failed: boom"
    assert isinstance(error.outcomes[1], Ok)
    assert error.outcomes[1].value == "a"
    assert error.outcomes[1].elapsed > error.outcomes[0].elapsed
    assert two.client.pending_utility_calls == 0


@pytest.mark.parametrize("codec", ["cbor", "msgpack"])
def test_an_interrupted_call_leaves_nothing_behind(codec: str) -> None:
    """After Ctrl-C in a wait nothing is registered, and nothing holds the client."""
    hold = [{"method": "echo", "do": "hold"}]
    with (
        address() as where,
        engine_processes(where, 2, codec=codec, faults=hold) as engines,
    ):
        client = connect(where, engine_count=2, connect_timeout=scaled(30))
        main = threading.get_ident()

        def interrupt() -> None:
            wait_until(lambda: all(engine.log for engine in engines), what="the call")
            signal.pthread_kill(main, signal.SIGINT)

        helper = run_in_thread(interrupt)
        try:
            client.call_utility("echo", "a")
        except KeyboardInterrupt:
            pass
        else:
            pytest.fail("the call was not interrupted")
        helper.result()
        assert client.pending_utility_calls == 0
        reference = weakref.ref(client)
        gc.disable()
        try:
            with pytest.warns(ResourceWarning, match="unclosed <EngineClient open"):
                del client
            assert reference() is None
        finally:
            gc.enable()


@pytest.mark.parametrize("codec", ["cbor", "msgpack"])
@pytest.mark.parametrize("how", ["bug", "context"])
def test_a_failure_of_the_dispatcher_reaches_every_waiting_call(
    codec: str, how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All callers get what each engine did, and the one cause; later calls get it too."""
    hold = [{"method": "echo", "do": "hold", "engine": 1}]
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with contextlib.ExitStack() as stack:
        stack.callback(context.term)
        where = stack.enter_context(address())
        stack.enter_context(engine_processes(where, 2, codec=codec, faults=hold))
        client = stack.enter_context(
            connect(where, engine_count=2, connect_timeout=scaled(30), context=context)
        )
        calls = [run_in_thread(client.call_utility, "echo", number) for number in range(3)]
        wait_until(lambda: client.pending_utility_calls == 3, what="the replies of engine 0")
        if how == "bug":
            bug = RuntimeError("a bug in the dispatcher")

            def fail(*args: object, **options: object) -> None:
                raise bug

            monkeypatch.setattr(Core, "output", fail)
            with pytest.raises(ClientBrokenError):
                client.call_utility("whoami", timeout=scaled(10))
        else:
            run_in_thread(context.term).result()  # returns when all its sockets are closed
        errors = [call.error() for call in calls]
        cause = client.closing_cause
        assert cause is bug if how == "bug" else isinstance(cause, zmq.ContextTerminated)
        for number, error in enumerate(errors):
            assert isinstance(error, ClientBrokenError)
            assert error.__cause__ is cause
            assert str(cause) in str(error)
            assert "\n" not in str(error)
            assert error.outcomes is not None
            assert list(error.outcomes) == [0, 1]
            assert isinstance(error.outcomes[0], Ok)
            assert error.outcomes[0].value == number
            assert isinstance(error.outcomes.failures[1], AbandonedError)
            assert error.outcomes.may_have_run == (0, 1)
        assert len({id(error) for error in errors}) == 3
        assert client.closed
        assert client.pending_utility_calls == 0
        with pytest.raises(ClientBrokenError) as later:
            client.call_utility("echo", "later")
        assert later.value.__cause__ is cause
        assert later.value.outcomes is None
        assert "broken" in repr(client)
        assert caplog.text.count("the dispatcher failed") == 1
    caplog.clear()


# -- results ----------------------------------------------------------------------------------


def test_every_round_gets_its_own_answers(two: Rig) -> None:
    """Each call gets one result per engine, its own, also when engines answer twice."""
    late = two.client.stats.late_replies
    two.fault("echo", "duplicate", engines=[1])
    for nonce in range(100):
        assert two.client.call_utility("echo", nonce, timeout=scaled(10)) == [nonce, nonce]
    two.client.call_utility("whoami", engines=[1], timeout=scaled(10))
    assert two.client.stats.late_replies - late == 100


def test_replies_in_any_order_come_in_target_order(two: Rig) -> None:
    """Results are ordered by target, whoever answers first."""
    pids = [engine.pid for engine in two.engines]
    assert [one["pid"] for one in two.client.call_utility("whoami")] == pids
    turned = two.client.call_utility("whoami", engines=[1, 0])
    assert [one["pid"] for one in turned] == pids[::-1]
    two.fault("whoami", "hold", engines=[0])
    call = run_in_thread(two.client.settle_utility, "whoami")
    wait_until(lambda: two.client.pending_utility_calls == 1)
    two.release(0)
    assert [one["pid"] for one in call.result().unwrap()] == pids
    alone = two.client.settle_utility("whoami", engines=(1,))
    assert list(alone) == [1]
    assert alone.unwrap()[0]["index"] == 1


def test_a_failure_keeps_the_results_of_the_others(two: Rig) -> None:
    """A failure and a time-out have the same shape: who failed, how, and who succeeded."""
    two.fault("echo", "fail", engines=[1], message="bad")
    with pytest.raises(UtilityCallError, match=r"engine 1: RemoteError: .*bad") as info:
        two.client.call_utility("echo", 7)
    assert info.value.outcomes.succeeded == (0,)
    assert info.value.outcomes[0].value == 7  # type: ignore[union-attr]
    outcomes = two.client.settle_utility("echo", 7)
    assert outcomes.succeeded == (0,)
    assert tuple(outcomes.failures) == (1,)
    two.control("mock_clear")
    two.fault("echo", "drop", engines=[1])
    with pytest.raises(
        UtilityTimeoutError, match="engine 1: CallTimeout: engine 1 did not"
    ) as late:
        two.client.call_utility("echo", 7, timeout=0.1)
    assert late.value.outcomes.succeeded == (0,)


def test_a_failure_known_at_once_is_told_with_the_time_out(two: Rig) -> None:
    """At the deadline the error tells of both: who failed before, and who has not answered."""
    two.fault("echo", "fail", engines=[0], message="boom")
    two.fault("echo", "drop", engines=[1])
    with pytest.raises(TimeoutError, match=r"boom(.|\n)*engine 1 did not reply to echo") as info:
        two.client.call_utility("echo", timeout=0.1)
    assert type(info.value) is UtilityTimeoutError
    assert set(info.value.outcomes.failures) == {0, 1}
    assert info.value.outcomes.may_have_run == (0, 1)


def test_an_unknown_method_fails_on_every_engine(two: Rig) -> None:
    """The failure's text is the engine's own."""
    with pytest.raises(UtilityCallError) as info:
        two.client.call_utility("no_such_method")
    for failure in info.value.outcomes.failures.values():
        assert isinstance(failure, RemoteError)
        assert failure.message == (
            "Call to no_such_method method failed: "
            "'EngineCoreProc' object has no attribute 'no_such_method'"
        )


def test_consensus_and_collective_calls(two: Rig) -> None:
    """One value where all agree, an error where not, and the workers' results one after another."""
    assert two.client.call_utility_consensus("echo", [1, "a"]) == [1, "a"]
    assert two.client.is_sleeping() is False
    with pytest.raises(ConsensusError, match=r"engine 0: .*; engine 1: "):
        two.client.call_utility_consensus("whoami")
    assert two.client.collective_rpc("worker_index") == [0, 1, 0, 1]
    assert two.client.collective_rpc("echo", ["x"], engines=[1]) == ["x", "x"]
    assert two.client.collective_rpc("echo", (), {"value": 3}) == [3] * 4
    assert two.client.collective_rpc("check_health", worker_timeout=5) == [None] * 4
    with pytest.raises(UtilityCallError, match="Worker failed with error"):
        two.client.collective_rpc("no_such_method")


def test_engines_of_both_dialects_in_one_call() -> None:
    """One fan-out serves engines of different dialects, each in its own."""
    with rig(("cbor", "msgpack", "cbor")) as three:
        assert [info.codec for info in three.client.engines] == ["cbor", "msgpack", "cbor"]
        value = [None, True, -1, 2**63, 1.5, "ä", b"\x00\xff", {"k": [1], 7: {}}]
        assert three.client.call_utility("echo", value) == [value] * 3
        three.check()
        three.check_messages()


# -- what is refused before anything is sent -----------------------------------------------------


@pytest.mark.parametrize(
    ("targets", "error"),
    [([], ValueError), ([0, 0], ValueError), ([2], ValueError), (1, TypeError), ("0", TypeError)],
)
def test_refused_targets_reach_nobody(two: Rig, targets: Any, error: type[Exception]) -> None:
    """Targets that cannot be meant are refused, and no engine hears of the call."""
    before = [two.received(k) for k in (0, 1)]
    for call in (two.client.call_utility, two.client.settle_utility):
        with pytest.raises(error, match="engine"):
            call("echo", 1, engines=targets)
    two.control("mock_log")  # a fence: what was sent before has arrived
    assert [two.received(k) for k in (0, 1)] == before


@pytest.mark.parametrize("method", ["", None, 7, b"echo"])
def test_refused_methods_reach_nobody(two: Rig, method: Any) -> None:
    """A method that is no name is refused, and no engine hears of the call."""
    before = [two.received(k) for k in (0, 1)]
    with pytest.raises((TypeError, ValueError)):
        two.client.call_utility(method)
    two.control("mock_log")
    assert [two.received(k) for k in (0, 1)] == before


def test_a_known_dead_target_refuses_the_call_for_all() -> None:
    """One dead engine: nothing is sent, each outcome says why; the living can be asked alone."""
    with rig(("cbor", "msgpack", "cbor")) as three:
        client = three.client
        three.engines[1].kill()
        wait_until(lambda: not client.engines[1].alive, what="the death of engine 1")
        with pytest.raises(UtilityCallError) as info:
            client.call_utility("echo", "all")
        failures = info.value.outcomes.failures
        assert [type(failures[k]) for k in range(3)] == [
            NotSentError,
            EngineDeadError,
            NotSentError,
        ]
        assert info.value.outcomes.may_have_run == ()
        assert client.pending_utility_calls == 0
        assert client.call_utility("echo", "alive", engines="alive") == ["alive"] * 2
        assert client.call_utility("echo", "named", engines=[2, 0]) == ["named"] * 2
        # Everything that was sent has arrived: the calls after it were answered.
        assert three.received(0) == three.received(2) == [["alive"], ["named"]]


# -- undo -------------------------------------------------------------------------------------


def test_a_partial_failure_is_undone_where_it_may_have_run(two: Rig) -> None:
    """The undo follows the call on the engines that may have run it; the first error is raised."""
    two.fault("echo", "fail", engines=[1], message="no memory")
    undo = UtilityCall("whoami")
    before = len(two.received(0)), len(two.received(1))
    with pytest.raises(UtilityCallError, match="no memory") as info:
        two.client.call_utility("echo", "x", compensate=undo)
    compensation = info.value.compensation
    assert isinstance(compensation, Outcomes)
    assert compensation.method == "whoami"
    assert compensation.succeeded == (0, 1)
    assert "undo whoami succeeded on engines 0, 1" in str(info.value)
    for engine in (0, 1):
        assert two.received(engine)[before[engine] :] == [["x"], []]
    two.control("mock_clear")
    assert two.client.call_utility("echo", "x", compensate=undo) == ["x", "x"]
    assert two.received(0)[before[0] + 2 :] == [["x"]]


def test_an_undo_after_a_time_out_is_sent_and_not_waited_for(two: Rig) -> None:
    """Without a limit an engine that has not answered gets the undo, and nobody waits for it."""
    two.fault("echo", "hold", engines=[1])
    outcomes = two.client.settle_utility("echo", "x", timeout=0.1)
    assert outcomes.unsettled == (1,)
    two.fault("whoami", "hold", engines=[1])
    before = len(two.received(1))
    undone = two.client.compensate(outcomes, UtilityCall("whoami"))
    assert isinstance(undone[0], Ok)
    assert isinstance(undone[1], Failed)
    assert isinstance(undone.failures[1], AbandonedError)
    wait_until(lambda: two.received(1)[before:] == [[]], what="the undo at engine 1")


def test_a_wake_up_that_was_lost_is_made_up_for(two: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller interrupted between handing over and waking leaves its call to be found."""
    monkeypatch.setattr(Wakeup, "poke", lambda wakeup: None)
    assert two.client.call_utility("echo", "unasked", timeout=scaled(10)) == ["unasked"] * 2
