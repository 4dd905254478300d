"""Engines that die, are cut off, or fall silent while calls wait for them; and come back."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest

from engine_client import (
    CallTimeout,
    EngineClient,
    EngineDeadError,
    NotSentError,
    UtilityCallError,
    UtilityTimeoutError,
    connect,
    connect_bootstrapped,
    launch,
)
from engine_client.dispatch.sources import Sources
from engine_client.tools.mock_engine import MockEngine
from tests.helpers import BackgroundCall, EngineProcess, run_in_thread, scaled, wait_until
from tests.scenarios.raw import RawEngine, connecting, free_tcp, is_bound, states
from tests.scenarios.relay import Relay
from tests.scenarios.rig import address

PROMPTLY = 0.5
"""Seconds in which a death must reach whom it concerns (scaled)."""
CODECS = ("cbor", "msgpack", "cbor")
HOLD = {"method": "echo", "do": "hold"}
"""Every echo waits for mock_release; every engine of these tests starts with it."""
TRIGGER = "is_scheduler_paused"
"""The call at which a fault strikes."""
FAULTS: dict[str, dict[str, Any]] = {
    "exit": {"do": "exit", "code": 3},
    "sentinel": {"do": "sentinel", "seconds": 3.0},
    "deaf": {"do": "deaf"},
    "mute": {"do": "mute"},
}


@pytest.fixture
def where() -> Iterator[str]:
    with address() as one:
        yield one


@contextlib.contextmanager
def group(
    where: str, faults: Sequence[Any] = (), **settings: Any
) -> Iterator[tuple[EngineClient, list[EngineProcess]]]:
    """A client of three engine processes, which hold every echo."""
    with contextlib.ExitStack() as stack:
        starting = stack.enter_context(connecting(where, engine_count=3, **settings))
        engines = [
            stack.enter_context(EngineProcess(where, index, codec=codec, faults=[HOLD, *faults]))
            for index, codec in enumerate(CODECS)
        ]
        yield starting.result(), engines


def wait_held(client: EngineClient, calls: int) -> None:
    """Wait until so many waiters are registered."""
    wait_until(lambda: client.pending_utility_calls == calls, what=f"{calls} waiters")


def wait_received(engine: EngineProcess, calls: int) -> None:
    """Wait until an engine has so many echoes: what was not sent is failed otherwise."""
    wait_until(
        lambda: sum(entry["method"] == "echo" for entry in engine.log) == calls,
        what=f"engine {engine.index} to receive {calls} calls",
    )


def dead_after(client: EngineClient, engine: int) -> BackgroundCall[tuple[float, EngineDeadError]]:
    """Start a call without a time limit to one engine; its result is when and how that failed."""

    def wait() -> tuple[float, EngineDeadError]:
        with pytest.raises(UtilityCallError) as caught:
            client.call_utility("echo", "never", engines=[engine])
        moment = time.monotonic()
        error = caught.value.outcomes.failures[engine]
        assert isinstance(error, EngineDeadError)
        assert error.engine == engine
        return moment, error

    return run_in_thread(wait)


def check_refused(client: EngineClient, dead: int, others: Sequence[int]) -> None:
    """A call to a dead engine is refused as a whole, at once; the others can be called alone."""
    with pytest.raises(UtilityCallError) as caught:
        client.call_utility("whoami")
    failures = caught.value.outcomes.failures
    assert isinstance(failures[dead], EngineDeadError)
    assert not failures[dead].may_have_run
    for index in others:
        assert isinstance(failures[index], NotSentError)
    assert caught.value.outcomes.may_have_run == ()
    answers = client.call_utility("whoami", engines="alive", timeout=scaled(10))
    assert [answer["index"] for answer in answers] == list(others)


# -- one of three ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "transport", "spoken"),
    [
        *((kind, "ipc", False) for kind in ("SIGKILL", "exit", "sentinel", "mute")),
        *((kind, "tcp", True) for kind in ("SIGKILL", "SIGTERM", "sentinel", "deaf", "mute")),
    ],
)
def test_death_of_one_of_three(
    where: str, kind: str, transport: str, spoken: bool, record_property: Any
) -> None:
    """While calls wait without a limit, one of three engines dies: whoever waits for it is told
    within half a second, nobody else notices, and the same engine started again serves again.

    Engines that have not spoken have an output connection that nobody can tell from the others.
    """
    if transport == "tcp":
        (where,) = free_tcp()
    faults = [{"method": TRIGGER, **FAULTS[kind]}] if kind in FAULTS else []
    with group(where, faults) as (client, engines), contextlib.ExitStack() as stack:
        if spoken:
            client.call_utility("whoami", timeout=scaled(10))
        everybody = run_in_thread(client.settle_utility, "echo", "all")
        others = run_in_thread(client.call_utility, "echo", "others", engines=[0, 2])
        one = dead_after(client, 1)
        wait_held(client, 6)
        wait_received(engines[1], 2)
        began = time.monotonic()
        if kind in FAULTS:
            triggering = run_in_thread(client.settle_utility, TRIGGER, engines=[1])
            assert isinstance(triggering.result().failures[1], EngineDeadError)
        else:
            engines[1].signal(getattr(signal, kind))
        moment, error = one.result()
        milliseconds = (moment - began) * 1000
        record_property("death_to_error_ms", round(milliseconds, 2))
        print(f"\n{kind}, {transport}, {'spoken' if spoken else 'silent'}: {milliseconds:.1f} ms")
        assert moment - began < scaled(PROMPTLY)
        assert error.may_have_run
        assert ("ENGINE_CORE_DEAD" in str(error)) == (kind == "sentinel")
        wait_held(client, 4)
        assert not everybody.done
        assert not others.done
        assert states(client) == [True, False, True]
        assert client.engines[1].cause_of_death is not None
        check_refused(client, 1, (0, 2))

        client.call_utility("mock_release", engines="alive", timeout=scaled(10))
        assert others.result() == ["others", "others"]
        outcomes = everybody.result()
        assert isinstance(outcomes.failures[1], EngineDeadError)
        assert outcomes.succeeded == (0, 2)
        assert outcomes.may_have_run == (0, 1, 2)
        assert client.stats.deaths == 1

        engines[1].kill()
        again = stack.enter_context(EngineProcess(where, 1, codec="msgpack"))
        wait_until(lambda: states(client) == [True, True, True])
        answers = client.call_utility("whoami", timeout=scaled(10))
        assert [answer["pid"] for answer in answers] == [engines[0].pid, again.pid, engines[2].pid]
        assert (client.stats.deaths, client.stats.returns) == (1, 1)
        assert client.pending_utility_calls == 0


def test_death_without_a_call(where: str) -> None:
    """A death is noticed though nobody waits, and the next call is refused at once."""
    with group(where) as (client, engines):
        engines[2].kill()
        wait_until(lambda: states(client) == [True, True, False], timeout=PROMPTLY)
        check_refused(client, 2, (0, 1))


def test_all_die_one_after_the_other(where: str) -> None:
    """Each death fails its own waiters; with nobody left, each engine's death is the answer."""
    with group(where) as (client, engines):
        calls = [dead_after(client, index) for index in (0, 1, 2)]
        fan_out = run_in_thread(client.settle_utility, "echo", 1)
        wait_held(client, 6)
        for index in (1, 0, 2):
            engines[index].kill()
            calls[index].result()
        outcomes = fan_out.result()
        assert [type(error) for error in outcomes.failures.values()] == [EngineDeadError] * 3
        assert states(client) == [False, False, False]
        with pytest.raises(UtilityCallError) as caught:
            client.call_utility("echo", 2, engines="alive")
        assert set(caught.value.outcomes.failures) == {0, 1, 2}
        assert client.pending_utility_calls == 0


def test_many_waiters(where: str) -> None:
    """Every waiter gets an error of its own, whatever thread it waits in."""
    with group(where) as (client, engines):
        calls = [dead_after(client, 1) for _ in range(20)]
        wait_received(engines[1], 20)
        engines[1].kill()
        errors = [call.result()[1] for call in calls]
        assert len({id(error) for error in errors}) == 20
        assert len({str(error) for error in errors}) == 1


@pytest.mark.parametrize("how", ["exit", "die"])
def test_the_last_words_count(where: str, how: str) -> None:
    """The reply of an engine that ends right after it is not lost, however often."""
    faults = [{"method": "whoami", "do": how, "after_reply": True}]
    with connecting(where) as starting:
        for _ in range(5):
            with EngineProcess(where, faults=faults) as engine:
                client = starting.result()
                wait_until(partial(_is, client, True))
                assert client.call_utility("whoami") == [{"index": 0, "pid": engine.pid}]
                wait_until(partial(_is, client, False))


def _is(client: EngineClient, alive: bool) -> bool:
    return client.engines[0].alive is alive


def test_stopped_is_not_dead(where: str) -> None:
    """A stopped engine keeps its callers waiting up to their limit, and is not written off."""
    with group(where) as (client, engines):
        client.call_utility("whoami", timeout=scaled(10))
        engines[1].signal(signal.SIGSTOP)
        with pytest.raises(UtilityTimeoutError) as caught:
            client.call_utility("whoami", timeout=scaled(0.3))
        assert isinstance(caught.value.outcomes.failures[1], CallTimeout)
        assert caught.value.outcomes.succeeded == (0, 2)
        assert "engine 1" in str(caught.value)
        waiting = run_in_thread(client.call_utility, "whoami")
        wait_held(client, 1)
        assert states(client) == [True, True, True]
        assert client.stats.deaths == 0
        engines[1].signal(signal.SIGCONT)
        assert [answer["index"] for answer in waiting.result()] == [0, 1, 2]
        wait_until(lambda: client.stats.late_replies == 1)


def test_a_stopped_engine_is_killed(where: str) -> None:
    """A process that is stopped and then killed is dead like any other."""
    with group(where) as (client, engines):
        engines[0].signal(signal.SIGSTOP)
        one = dead_after(client, 0)
        wait_held(client, 1)
        began = time.monotonic()
        engines[0].signal(signal.SIGKILL)
        assert one.result()[0] - began < scaled(PROMPTLY)


def test_lockstep_group(where: str) -> None:
    """One death ends the lockstep group at once; an engine outside of it goes on."""
    ready = ["--ready", json.dumps({"data_parallel_size": 2})]
    with contextlib.ExitStack() as stack:
        starting = stack.enter_context(connecting(where, engine_count=3))
        engines = [
            stack.enter_context(
                EngineProcess(where, index, faults=[HOLD], arguments=ready if index < 2 else ())
            )
            for index in range(3)
        ]
        client = starting.result()
        fan_out = run_in_thread(client.settle_utility, "echo", 1)
        wait_held(client, 3)
        engines[0].kill()
        wait_until(lambda: states(client) == [False, False, True], timeout=PROMPTLY)
        wait_held(client, 1)
        client.call_utility("mock_release", engines=[2])
        failures = fan_out.result().failures
        assert set(failures) == {0, 1}
        assert "lockstep group" in str(failures[1])
        engines[1].kill()
        for index in (0, 1):
            stack.enter_context(EngineProcess(where, index, arguments=ready))
        wait_until(lambda: states(client) == [True, True, True])
        assert len(client.call_utility("whoami", timeout=scaled(10))) == 3


def test_launched_engine() -> None:
    """The death of a launched engine names how its process ended, as soon as that is known."""
    with launch(2, connect_timeout=scaled(30)) as client:
        pids = [answer["pid"] for answer in client.call_utility("whoami")]
        client.call_utility("mock_fault", HOLD)
        fan_out = run_in_thread(client.settle_utility, "echo", 1)
        wait_held(client, 2)
        began = time.monotonic()
        os.kill(pids[1], signal.SIGKILL)
        wait_held(client, 1)
        assert time.monotonic() - began < scaled(PROMPTLY)
        wait_until(lambda: "signal 9" in (client.engines[1].cause_of_death or ""))
        client.call_utility("mock_release", engines=[0])
        outcomes = fan_out.result()
        assert outcomes.succeeded == (0,)
        assert isinstance(outcomes.failures[1], EngineDeadError)
        with pytest.raises(UtilityCallError, match="signal 9"):
            client.call_utility("whoami")
        assert client.stats.deaths == 1


# -- two processes, one identity ------------------------------------------------------------------


def test_restart_while_a_call_waits(where: str) -> None:
    """A call does not outlive the process it was sent to, however quickly that is replaced."""
    with group(where) as (client, engines), contextlib.ExitStack() as stack:
        fan_out = run_in_thread(client.settle_utility, "echo", "old")
        wait_received(engines[1], 1)
        engines[1].kill()
        again = stack.enter_context(EngineProcess(where, 1))
        wait_until(lambda: states(client) == [True, True, True])
        wait_held(client, 2)
        assert client.call_utility("whoami", engines=[1]) == [{"index": 1, "pid": again.pid}]
        client.call_utility("mock_release", engines=[0, 2])
        outcomes = fan_out.result()
        assert outcomes.succeeded == (0, 2)
        assert outcomes.failures[1].may_have_run
        assert again.log == [entry for entry in again.log if entry["args"] != ["old"]]


def test_a_registration_of_which_a_send_took_the_news(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZeroMQ tells once that something came, and forgets it at a send: it is found soon after."""
    untold: set[int] = set()
    wait = Sources.wait

    def tell_not(sources: Sources, seconds: float | None) -> dict[int, int]:
        unread = dict(sources._unread)
        ready = wait(sources, seconds)
        return {fd: event for fd, event in ready.items() if fd not in untold or fd in unread}

    with group(where) as (client, engines), contextlib.ExitStack() as stack:
        engines[1].kill()
        wait_until(lambda: states(client) == [True, False, True])
        sources = client._dispatcher._sources
        untold.add(sources._descriptors[client._dispatcher._transport.sockets["input"]])
        monkeypatch.setattr(Sources, "wait", tell_not)
        stack.enter_context(EngineProcess(where, 1))
        wait_until(
            lambda: client.call_utility("is_sleeping", engines=[0]) and states(client)[1],
            what="the registration to be read",
        )


def test_a_second_process_waits_for_the_first_to_end(
    where: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A process that says HELLO under a living engine's index disturbs nobody, and takes its place
    when that one dies.
    """
    with group(where) as (client, engines):
        fan_out = run_in_thread(client.settle_utility, "echo", "old")
        wait_held(client, 3)
        with EngineProcess(where, 1) as second:
            wait_until(lambda: "another process says HELLO" in caplog.text)
            assert client.call_utility("whoami", engines=[1]) == [
                {"index": 1, "pid": engines[1].pid}
            ]
            assert client.pending_utility_calls == 3
            engines[1].kill()
            wait_held(client, 2)
            wait_until(lambda: states(client) == [True, True, True])
            assert client.call_utility("whoami", engines=[1]) == [{"index": 1, "pid": second.pid}]
            client.call_utility("mock_release", engines=[0, 2])
            assert fan_out.result().succeeded == (0, 2)
            assert (client.stats.deaths, client.stats.returns) == (1, 1)


def test_a_stolen_identity(where: str) -> None:
    """A stranger registers under a living engine's identity: whoever waits for that engine is told,
    the others are not disturbed.  ZeroMQ leaves the old one connected to nobody, so after the
    thief it takes a restart.
    """
    with (
        MockEngine(where, 0, faults=[HOLD]),
        MockEngine(where, 1, faults=[HOLD]) as old,
        connect(where, engine_count=2, connect_timeout=scaled(20)) as client,
    ):
        client.call_utility("whoami", timeout=scaled(10))
        other = run_in_thread(client.call_utility, "echo", "other", engines=[0])
        one = dead_after(client, 1)
        wait_until(lambda: len(old.log) == 2)
        with RawEngine(index=1, codec="msgpack") as thief:
            thief.connect(client.input_address, client.output_address)
            thief.register()
            _, error = one.result()
            assert error.may_have_run
            assert "replaced" in str(error)
            assert not other.done
            call = run_in_thread(client.call_utility, "echo", "mine", engines=[1])
            thief.answer("echo", "stolen")
            assert call.result() == ["stolen"]
            assert client.call_utility("mock_release", engines=[0]) == [1]
            assert other.result() == ["other"]
        wait_until(lambda: states(client) == [True, False])
        old.stop()
        assert old.join(scaled(10))
        with MockEngine(where, 1):
            wait_until(lambda: states(client) == [True, True])
            assert client.call_utility("echo", "again", engines=[1]) == ["again"]


def test_two_greeted_processes(where: str) -> None:
    """Of two processes that both have an INIT the one that connects last has the identity; the
    other one's registration goes nowhere, and its end disturbs nobody.
    """
    with connecting(where) as starting, RawEngine(where) as first:
        first.hello()
        first.init()
        first.leave_handshake()
        with EngineProcess(where) as twin:
            client = starting.result()
            first.register()
            for _ in range(2):
                assert client.call_utility("whoami") == [{"index": 0, "pid": twin.pid}]
                for one in (first.input, first.output):
                    one.close(linger=0)
            assert client.stats.deaths == 0
            twin.kill()
            wait_until(lambda: states(client) == [False])


# -- cut off, and back ----------------------------------------------------------------------------


class Relayed(NamedTuple):
    client: EngineClient
    engines: Sequence[MockEngine]
    to: Relay
    back: Relay

    def held_call(self) -> BackgroundCall[tuple[float, EngineDeadError]]:
        """Start a call to engine 1, which has it and does not answer."""
        received = len(self.engines[1].log)
        call = dead_after(self.client, 1)
        wait_until(lambda: len(self.engines[1].log) > received, what="the call to arrive")
        return call


@contextlib.contextmanager
def relayed(*, spoken: bool = True, **settings: Any) -> Iterator[Relayed]:
    """A client of two engines; the second one's input and output go through relays."""
    inputs, outputs = free_tcp(2)
    with contextlib.ExitStack() as stack:
        starting = run_in_thread(
            connect_bootstrapped,
            inputs,
            outputs,
            engine_count=2,
            connect_timeout=scaled(20),
            **settings,
        )
        wait_until(lambda: is_bound(outputs) or starting.done)
        ways = [stack.enter_context(Relay(target)) for target in (inputs, outputs)]
        engines = [
            MockEngine(index=index, input_address=to, output_address=back, faults=[HOLD])
            for index, (to, back) in enumerate(
                ((inputs, outputs), (ways[0].address, ways[1].address))
            )
        ]
        for engine in engines:
            stack.enter_context(engine)
        client = stack.enter_context(starting.result())
        wait_until(lambda: [way.links for way in ways] == [1, 1])
        if spoken:
            client.call_utility("whoami", timeout=scaled(10))
        yield Relayed(client, engines, ways[0], ways[1])


@pytest.mark.parametrize("spoken", [True, False], ids=["spoken", "silent"])
@pytest.mark.parametrize("which", ["both", "input", "output"])
def test_cut_and_return(which: str, spoken: bool) -> None:
    """A cut fails what was in flight on that engine; it is alive again once it has reconnected."""
    with relayed(spoken=spoken) as setup:
        client, _, to, back = setup
        other = run_in_thread(client.call_utility, "echo", "other", engines=[0])
        one = setup.held_call()
        wait_held(client, 2)
        began = time.monotonic()
        for way, name in ((to, "input"), (back, "output")):
            if which in ("both", name):
                way.cut(stay_closed=True)
        moment, error = one.result()
        assert moment - began < scaled(2 * PROMPTLY)  # 0.1 s when it must be asked whose it was
        assert error.may_have_run
        assert states(client) == [True, False]
        assert not other.done
        to.reopen()
        back.reopen()
        wait_until(lambda: states(client) == [True, True], what="the engine to return")
        assert [answer["index"] for answer in client.call_utility("whoami")] == [0, 1]
        assert (client.stats.deaths, client.stats.returns) == (1, 1)
        client.call_utility("mock_release", timeout=scaled(10))
        assert other.result() == ["other"]
        wait_until(lambda: client.stats.late_replies >= 1)
        assert client.pending_utility_calls == 0


def test_cut_again_and_again() -> None:
    """However often it is cut off, it returns, and no call is lost or stuck."""
    with relayed() as setup:
        client, _, to, back = setup
        for number in range(1, 9):
            one = setup.held_call()
            for way in ((to, back), (to,), (back,), (back, to))[number % 4]:
                way.cut()
            one.result()
            wait_until(lambda: states(client) == [True, True], what="the engine to return")
            assert client.call_utility("whoami", engines=[1], timeout=scaled(10))
        assert client.stats.returns >= 8
        assert client.call_utility("whoami", engines=[0], timeout=scaled(10))


def test_a_connection_that_fails_silently() -> None:
    """Heartbeats notice a network that swallows everything; the engine returns with the network."""
    with relayed(heartbeat_interval=scaled(0.1)) as setup:
        client, _, to, back = setup
        one = setup.held_call()
        began = time.monotonic()
        to.freeze()
        back.freeze()
        moment, _ = one.result()
        assert moment - began < scaled(2)
        assert states(client) == [True, False]
        to.freeze(False)
        back.freeze(False)
        wait_until(lambda: states(client) == [True, True], what="the engine to return")
        assert client.call_utility("whoami", timeout=scaled(10))


def test_a_greeted_engine_that_is_cut_off(where: str) -> None:
    """An engine that went through the handshake returns without a second one."""
    inputs, outputs = free_tcp(2)
    with (
        connecting(where, input_address=inputs, output_address=outputs) as starting,
        Relay(inputs) as to,
        Relay(outputs) as back,
        RawEngine(where) as engine,
    ):
        engine.hello()
        assert engine.has_init(10)
        engine.connect(to.address, back.address)
        engine.register()
        engine.ready()
        engine.leave_handshake()
        client = starting.result()
        one = dead_after(client, 0)
        engine.next_call()
        wait_until(lambda: back.links == 1)
        to.cut()
        back.cut()
        one.result()
        wait_until(lambda: states(client) == [True])
        call = run_in_thread(client.call_utility, "echo", 1)
        engine.answer("echo", "back")
        assert call.result() == ["back"]
        client.close()
