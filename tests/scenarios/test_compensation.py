"""A change that only some engines made is undone, and what is told of the undo is complete."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from engine_client import (
    AbandonedError,
    CallTimeout,
    ClientClosedError,
    EngineDeadError,
    Failed,
    LoraRequest,
    NotSentError,
    Ok,
    Outcomes,
    RemoteError,
    RequestRefusedError,
    UtilityCall,
    UtilityCallError,
    UtilityTimeoutError,
)
from tests.helpers import run_in_thread, scaled, wait_until
from tests.helpers.group import engine_group
from tests.scenarios.rig import Rig, rig

LORA = LoraRequest("tuned", 7, "/adapters/tuned")
RECORD = LORA.to_plain()
UNDO = UtilityCall("remove_lora", (7,))


@pytest.fixture(scope="module")
def shared() -> Iterator[Rig]:
    """Three engines, shared by the tests that leave them alive."""
    with rig(("cbor", "msgpack", "cbor")) as made:
        yield made
        made.check_messages()


@pytest.fixture
def three(shared: Rig) -> Iterator[Rig]:
    """The shared engines, without faults and adapters before and after."""
    yield shared
    shared.settle_down()
    shared.client.remove_lora(7, timeout=scaled(10))
    shared.check()


def since(rig_: Rig) -> Callable[[], list[list[Any]]]:
    """Return what engines receive from now on, engine by engine, without the remote control."""
    before = [len(rig_.engines[k].log) for k in range(len(rig_.engines))]

    def received() -> list[list[Any]]:
        return [
            [(entry["method"], entry["args"]) for entry in engine.log[start:]]
            for engine, start in zip(rig_.engines, before, strict=True)
        ]

    return received


def error_of(call: Callable[[], object]) -> UtilityCallError:
    with pytest.raises(UtilityCallError) as info:
        call()
    return info.value


def compensation_of(error: UtilityCallError) -> Outcomes:
    assert error.compensation is not None
    assert error.compensation.method == "remove_lora"
    assert list(error.compensation) == list(error.outcomes.may_have_run)
    return error.compensation


ADD = ("add_lora", [RECORD])
REMOVE = ("remove_lora", [7])


# -- which engines are undone, and in what order ---------------------------------------------------


def test_load_that_one_engine_refuses(three: Rig) -> None:
    """Every engine that may hold the adapter lets go of it, each after its own call."""
    three.fault("add_lora", "fail", engines=[1], worker=1, message="out of memory")
    received = since(three)
    error = error_of(lambda: three.client.add_lora(LORA, compensate=True))
    assert "out of memory" in str(error)
    assert error.outcomes.succeeded == (0, 2)
    assert isinstance(error.outcomes.failures[1], RemoteError)
    assert compensation_of(error).values_in_order() == [True, False, True]
    assert received() == [[ADD, REMOVE]] * 3
    assert three.client.list_loras() == frozenset()


def test_undo_in_target_order(three: Rig) -> None:
    """The undo keeps to the targets of the call, in their order."""
    three.fault("add_lora", "fail", engines=[2], message="boom")
    received = since(three)
    error = error_of(lambda: three.client.add_lora(LORA, engines=[2, 0], compensate=True))
    assert list(compensation_of(error)) == [2, 0]
    assert received() == [[ADD, REMOVE], [], [ADD, REMOVE]]


def test_nothing_to_undo(three: Rig) -> None:
    """A call that was refused before it was sent is not undone."""
    received = since(three)
    with pytest.raises(ValueError, match="engine"):
        three.client.add_lora(LORA, engines=[0, 9], compensate=True)
    assert received() == [[], [], []]


def test_an_explicit_undo(three: Rig) -> None:
    """Any call can be the undo, with other arguments and to other effect."""
    three.fault("set_weight_version", "fail_after", engines=[0], message="boom")
    back = UtilityCall("set_weight_version", ("default",))
    error = error_of(lambda: three.client.set_weight_version("w2", compensate=back))
    assert error.compensation is not None
    assert error.compensation.succeeded == (1, 2)  # the fault hits the undo of engine 0 too
    assert isinstance(error.compensation.failures[0], RemoteError)
    assert three.client.get_weight_version() == "default"


def test_in_lockstep_a_part_is_refused() -> None:
    """What would wedge a lockstep group is not sent to a part of it, as a call or as an undo."""
    with engine_group(("cbor", "msgpack", "cbor"), ready={"data_parallel_size": 3}) as group:
        client = group.client
        calls: list[Callable[[], object]] = [
            lambda: client.pause_scheduler(engines=[0, 2], compensate=True),
            lambda: client.resume_scheduler(engines=[1], compensate=True),
            lambda: client.sleep(engines=[1, 2]),
        ]
        for call in calls:
            with pytest.raises(RequestRefusedError, match="whole lockstep group"):
                call()
        outcomes = client.settle_utility("echo", 1, engines=[0, 2])
        undone = client.compensate(outcomes, UtilityCall("resume_scheduler"))
        assert list(undone) == [0, 2]
        for failure in undone.failures.values():
            assert isinstance(failure, NotSentError)
            assert "whole lockstep group" in str(failure)
        assert [len(group.calls(index)) for index in range(3)] == [1, 0, 1]
        whole = client.settle_utility("echo", 1)
        assert client.compensate(whole, UtilityCall("resume_scheduler")).all_ok


# -- undos that do not go well ---------------------------------------------------------------------


def test_undo_that_fails_in_part(three: Rig) -> None:
    """The original error is raised, and tells which engines are undone and which are not."""
    three.fault("add_lora", "fail_after", engines=[0], message="told to")
    three.fault("remove_lora", "fail", engines=[2], message="will not")
    error = error_of(lambda: three.client.add_lora(LORA, compensate=True))
    assert str(error).startswith("add_lora failed on 1 of 3 engines")
    compensation = compensation_of(error)
    assert compensation.succeeded == (0, 1)
    assert str(compensation.failures[2]) == "Call to remove_lora method failed: will not"
    assert "undo remove_lora failed on 1 of 3 engines" in str(error)
    assert "will not" in str(error)
    three.settle_down()
    assert three.client.settle_utility("list_loras").values_in_order() == [[], [], [7]]


def test_undo_that_times_out(three: Rig) -> None:
    """The undo has the call's limit anew; an engine that does not answer in it has timed out."""
    three.fault("add_lora", "fail", engines=[0], message="boom")
    three.fault("remove_lora", "hold", engines=[1])
    error = error_of(lambda: three.client.add_lora(LORA, timeout=0.3, compensate=True))
    assert not isinstance(error, UtilityTimeoutError)  # the call itself did not time out
    compensation = compensation_of(error)
    assert compensation.succeeded == (0, 2)
    assert isinstance(compensation.failures[1], CallTimeout)
    assert three.client.pending_utility_calls == 0


def test_call_that_times_out_is_undone_everywhere(three: Rig) -> None:
    """An engine that has not answered may have run the call: it is sent the undo, and awaited."""
    three.fault("add_lora", "hold", engines=[1])
    received = since(three)
    with pytest.raises(UtilityTimeoutError) as info:
        three.client.add_lora(LORA, timeout=0.3, compensate=True)
    assert info.value.outcomes.unsettled == (1,)
    assert compensation_of(info.value).values_in_order() == [True, True, True]
    assert received() == [[ADD, REMOVE]] * 3


def test_undo_of_an_engine_that_has_stopped(three: Rig) -> None:
    """An engine that answers neither call nor undo holds neither up beyond their limits."""
    three.fault("add_lora", "drop", engines=[1])
    three.fault("remove_lora", "drop", engines=[1])
    with pytest.raises(UtilityTimeoutError) as info:
        three.client.add_lora(LORA, timeout=0.2, compensate=True)
    compensation = compensation_of(info.value)
    assert compensation.succeeded == (0, 2)
    assert isinstance(compensation.failures[1], CallTimeout)


@pytest.mark.parametrize("moment", ["in the call", "in the undo"])
def test_engine_that_dies(moment: str) -> None:
    """The living ones are undone; the dead one is reported, not as a refusal of the whole."""
    with rig(("cbor", "msgpack", "cbor")) as three:
        received = since(three)
        if moment == "in the call":
            three.fault("add_lora", "die", engines=[1])
        else:
            three.fault("add_lora", "fail", engines=[0], message="boom")
            three.fault("remove_lora", "die", engines=[1])
        error = error_of(lambda: three.client.add_lora(LORA, timeout=scaled(20), compensate=True))
        if moment == "in the call":
            assert isinstance(error.outcomes.failures[1], EngineDeadError)
            assert received()[1] == [ADD]
        else:
            assert "boom" in str(error)
            assert error.outcomes.succeeded == (1, 2)
        compensation = compensation_of(error)
        assert compensation.succeeded == (0, 2)
        assert isinstance(compensation.failures[1], EngineDeadError)
        assert three.client.list_loras(engines="alive") == frozenset()
        assert three.client.pending_utility_calls == 0


def test_client_that_is_closed_during_the_undo() -> None:
    """The original error is raised with an account of every engine; its cause is the closing."""
    with rig(("cbor", "msgpack")) as two:
        two.fault("add_lora", "fail", engines=[0], message="boom")
        two.fault("remove_lora", "hold", engines=[1])
        call = run_in_thread(two.client.add_lora, LORA, compensate=True)
        wait_until(lambda: two.received(1, "remove_lora") == [[7]], what="the undo")
        wait_until(lambda: two.client.pending_utility_calls == 1, what="the undo of engine 0")
        two.client.close()
        error = call.error()
        assert isinstance(error, UtilityCallError)
        assert "boom" in str(error)
        compensation = compensation_of(error)
        assert compensation.succeeded == (0,)
        assert isinstance(compensation.failures[1], AbandonedError)
        assert isinstance(error.__cause__, ClientClosedError)


def test_client_that_is_closed_before_the_undo() -> None:
    """A closed client undoes nothing any more, and says so."""
    with rig(("cbor", "msgpack")) as two:
        client = two.client
        outcomes = client.settle_utility("add_lora", RECORD)
        client.close()
        with pytest.raises(ClientClosedError):
            client.compensate(outcomes, UNDO)


def interrupt_when(condition: Callable[[], object]) -> Callable[[], None]:
    """Press Ctrl-C for this thread once a condition holds; returns how to join the presser."""
    thread = threading.get_ident()

    def press() -> None:
        wait_until(condition, what="the moment to interrupt")
        signal.pthread_kill(thread, signal.SIGINT)

    return run_in_thread(press).result


def test_interrupt_of_the_undo(three: Rig) -> None:
    """Ctrl-C goes through; the failure is its context and tells how far the undo had come."""
    three.fault("add_lora", "fail", engines=[0], message="boom")
    three.fault("remove_lora", "hold", engines=[1])
    client, received = three.client, since(three)
    join = interrupt_when(
        lambda: client.pending_utility_calls == 1 and received()[1] == [ADD, REMOVE]
    )
    with pytest.raises(KeyboardInterrupt) as info:
        client.add_lora(LORA, timeout=scaled(20), compensate=True)
    join()
    error = info.value.__context__
    assert isinstance(error, UtilityCallError)
    assert "boom" in str(error)
    compensation = compensation_of(error)
    assert compensation.succeeded == (0, 2)
    assert isinstance(compensation.failures[1], AbandonedError)
    assert info.value.outcomes == compensation  # type: ignore[attr-defined]
    assert client.pending_utility_calls == 0
    # What is left can be undone later, by what the interrupt says.
    three.settle_down()
    again = client.compensate(error.outcomes, UNDO, timeout=scaled(10))
    assert list(again) == [0, 1, 2]
    assert again.all_ok


# -- undone later, by hand -------------------------------------------------------------------------


def test_undo_after_a_time_out_does_not_wait(three: Rig) -> None:
    """Without a limit, engines that have not answered are sent the undo and not waited for."""
    three.fault("add_lora", "hold", engines=[1])
    outcomes = three.client.settle_utility("add_lora", RECORD, timeout=0.3)
    assert isinstance(outcomes.failures[1], CallTimeout)
    three.fault("remove_lora", "drop", engines=[1])
    received = since(three)
    undone = three.client.compensate(outcomes, UNDO)
    assert undone.succeeded == (0, 2)
    left = undone.failures[1]
    assert isinstance(left, AbandonedError)
    assert left.may_have_run
    assert "not waited for" in str(left)
    wait_until(lambda: received() == [[REMOVE]] * 3, what="the undo at every engine")
    assert three.client.pending_utility_calls == 0


def test_undo_after_a_time_out_with_a_limit_waits(three: Rig) -> None:
    """With a limit every engine is waited for."""
    three.fault("add_lora", "hold", engines=[1])
    outcomes = three.client.settle_utility("add_lora", RECORD, timeout=0.3)
    undone = three.client.compensate(outcomes, UNDO, timeout=scaled(10))
    assert undone.values_in_order() == [True, True, True]


def test_undo_after_an_interrupt_does_not_wait(three: Rig) -> None:
    """The interrupt's outcomes are as good as an error's."""
    three.fault("add_lora", "hold", engines=[2])
    client, received = three.client, since(three)
    join = interrupt_when(lambda: client.pending_utility_calls == 1 and received()[2] == [ADD])
    with pytest.raises(KeyboardInterrupt) as info:
        client.add_lora(LORA, compensate=True)
    join()
    outcomes = info.value.outcomes  # type: ignore[attr-defined]
    assert isinstance(outcomes[0], Ok)
    assert outcomes.unsettled == (2,)
    assert outcomes.may_have_run == (0, 1, 2)
    three.fault("remove_lora", "drop", engines=[2])
    undone = client.compensate(outcomes, UNDO)
    assert undone.succeeded == (0, 1)
    assert isinstance(undone.failures[2], AbandonedError)
    wait_until(
        lambda: three.client.settle_utility("list_loras").values_in_order() == [[], [], []],
        what="the undo at engine 2",
    )


def test_undo_after_a_death() -> None:
    """A dead engine is no reason to keep the others from being undone."""
    with rig(("cbor", "msgpack")) as two:
        outcomes = two.client.settle_utility("add_lora", RECORD, timeout=scaled(10))
        two.engines[0].kill()
        undone = two.client.compensate(outcomes, UNDO, timeout=scaled(10))
        assert isinstance(undone.failures[0], EngineDeadError)
        assert undone.succeeded == (1,)
        wait_until(lambda: not two.client.engines[0].alive, what="the death")
        again = two.client.compensate(outcomes, UNDO)
        assert isinstance(again.failures[0], EngineDeadError)
        assert not again.failures[0].may_have_run
        assert again[1] == Ok(False, again[1].elapsed)


def test_what_did_not_run_is_not_undone(three: Rig) -> None:
    """Only engines that may have run the call hear of the undo."""
    outcomes = three.client.settle_utility("add_lora", RECORD, engines=[2])
    received = since(three)
    assert list(three.client.compensate(outcomes, UNDO)) == [2]
    none = Outcomes("add_lora", {})
    assert list(three.client.compensate(none, UNDO)) == []
    partly = Outcomes(
        "add_lora",
        {
            0: Ok(True, 0.0),
            1: Failed(NotSentError("full", engine=1), 0.0),
            2: Failed(RemoteError("boom", engine=2), 0.0),
        },
    )
    assert list(three.client.compensate(partly, UNDO)) == [0, 2]
    assert received() == [[REMOVE], [], [REMOVE, REMOVE]]


@pytest.mark.parametrize(
    ("outcomes", "call", "text"),
    [
        (None, UNDO, "must be an Outcomes"),
        ([], UNDO, "must be an Outcomes"),
        (Outcomes("m", {}), None, "must be a UtilityCall, not None"),
        (Outcomes("m", {}), "remove_lora", "must be a UtilityCall"),
    ],
)
def test_wrong_arguments(three: Rig, outcomes: Any, call: Any, text: str) -> None:
    """What cannot be undone is an error at once."""
    with pytest.raises(TypeError, match=text):
        three.client.compensate(outcomes, call)


# -- what real engines do that a caller has to know ------------------------------------------------


def test_pause_that_fails_has_paused_all_the_same() -> None:
    """The undo resumes the engine whose pause failed, too."""
    options = {"connector_fails": True}
    with engine_group(("cbor", "msgpack"), options=options) as group:
        client = group.client
        error = error_of(client.pause_scheduler)
        assert error.outcomes.may_have_run == (0, 1)
        assert client.is_scheduler_paused()
        client.resume_scheduler()
        error = error_of(lambda: client.pause_scheduler(compensate=True))
        assert error.compensation is not None
        assert error.compensation.succeeded == (0, 1)
        assert not client.is_scheduler_paused()


def test_sleep_that_fails_in_one_worker_is_woken() -> None:
    """A sleep that failed half-way leaves the engine paused; the undo wakes it."""
    with engine_group(("cbor", "msgpack")) as group:
        group.plan.add(
            {"method": "sleep", "do": "fail", "worker": 0, "message": "stuck", "engine": 1}
        )
        client = group.client
        error_of(client.sleep)
        assert client.is_sleeping()
        client.wake_up()
        error = error_of(lambda: client.sleep(compensate=True))
        assert "stuck" in str(error)
        assert not client.is_sleeping()
