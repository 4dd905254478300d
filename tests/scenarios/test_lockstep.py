"""Lockstep groups: waves, who keeps them, what would wedge a group, and its death and return."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import pytest
import zmq

from engine_client import (
    EngineClient,
    EngineDeadError,
    FinishReason,
    HandshakeError,
    RequestRefusedError,
    UtilityCall,
    UtilityCallError,
    UtilityTimeoutError,
    connect,
    connect_bootstrapped,
    fanout,
)
from engine_client.dispatch import core
from engine_client.wire.codec import codec_named
from engine_client.wire.messages import Hello, Init, Outputs
from engine_client.wire.waves import WavePhase
from tests.helpers import run_in_thread, scaled, wait_until
from tests.scenarios.lockstep_rig import (
    Coordinator,
    Kind,
    Lockstep,
    Rank,
    entered,
    folder,
    lockstep,
    rank,
    stop_together,
)

BOTH = pytest.mark.parametrize("coordinator", [False, True], ids=["none", "in process"])


# -- waves -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["threads", "processes"])
@BOTH
def test_requests_to_either_rank(coordinator: bool, kind: Kind) -> None:
    """A request is served whether the group sleeps or runs, on either rank."""
    with lockstep(coordinator, kind=kind) as group:
        for number in range(6):
            before = group.client.stats.wave
            group.run(f"asleep-{number}", number % 2, count=1 + number)
            group.wait_wave(before + 1)
        with group.call("long", 1) as long:
            long.recv()
            for number in range(4):
                group.run(f"running-{number}", number % 2)
            assert group.client.stats.wave == 6
        group.wait_wave(7)


def test_two_waves_with_a_coordinator() -> None:
    """The first request of a wave wakes all ranks, later ones nobody; each is stamped with it."""
    with lockstep(True) as group:
        with group.call("first", 0) as first:
            first.recv()
            group.wait_running()
            # Broadcasts come on a connection of their own, a moment later than others' messages.
            wait_until(
                lambda: len(group.starts(0)) == len(group.starts(1)) == group.client.stats.wakes,
                what="every wake-up to come",
            )
            counts = [len(group.starts(index)) for index in (0, 1)]
            assert group.starts(0) == group.starts(1) == [[0, 0]] * counts[0]
            group.run("second", 1)
            assert [len(group.starts(index)) for index in (0, 1)] == counts
        group.wait_wave(1)
        with group.call("third", 0) as third:
            third.recv()
            group.wait_running()
        group.wait_wave(2)
        for index in (0, 1):
            assert [1, 0] in group.starts(index)
        assert group.stamps(0) == [0, 1]
        assert group.stamps(1) == [0]
        assert group.client.stats.waves == 2


def test_two_waves_without_a_coordinator() -> None:
    """Only the others are woken, over their input; an end that all ranks report counts once."""
    with lockstep(False, codecs=("cbor", "msgpack", "cbor")) as group:
        with group.call("first", 1) as first:
            first.recv()
            # A rank steps before its log is written.
            wait_until(
                lambda: [len(group.starts(index)) for index in (0, 1, 2)] == [1, 0, 1],
                what="the wake-ups of the others",
            )
            group.run("second", 0)
            assert [len(group.starts(index)) for index in (0, 1, 2)] == [1, 0, 1]
        group.wait_wave(1)
        group.client.call_utility("echo", None)
        assert group.client.stats.waves == 1
        group.run("third", 0)
        group.wait_wave(2)
        assert group.starts(1) == [[1, 0]]


@BOTH
def test_two_hundred_waves(coordinator: bool) -> None:
    """Wave after wave on alternating ranks, with pauses between and streams that outlive them."""
    with lockstep(coordinator) as group:
        client = group.client
        for number in range(200):
            before = client.stats.wave
            group.run(f"wave-{number}", number % 2, count=1 + number % 3)
            group.wait_beyond(before)
            if number % 20 == 0:
                with group.call("kept", 1 - number // 20 % 2, count=40) as stream:
                    stream.recv()
                    client.pause_scheduler("keep")
                    assert client.is_scheduler_paused()
                    queued = group.call("queued", 0, count=3)
                    client.resume_scheduler()
                    assert sum(len(output.new_token_ids) for output in stream) == 39
                    assert sum(len(output.new_token_ids) for output in queued) == 3
        assert client.stats.waves >= 200
        assert client.stats.wakes >= 200
        assert client.stats.malformed_messages == client.stats.late_replies == 0


@BOTH
def test_a_wave_for_many_requests(coordinator: bool) -> None:
    """Requests from several threads, at any moment of a wave, are all served."""
    with lockstep(coordinator) as group:

        def serve(thread: int) -> None:
            for number in range(30):
                group.run(f"{thread}-{number}", (thread + number) % 2, count=1 + number % 4)

        for call in [run_in_thread(serve, thread) for thread in range(4)]:
            call.result(60)
        assert group.client.active_requests == 0


@BOTH
def test_what_came_in_a_pause_runs_after_it(coordinator: bool) -> None:
    """A paused group discards the wake-up and keeps the request: resumed, it runs it."""
    with lockstep(coordinator) as group:
        group.client.pause_scheduler()
        stream = group.call("early", 1, count=3)
        group.client.call_utility("echo", None)
        assert group.state.phase is not WavePhase.RUNNING
        group.client.resume_scheduler()
        assert sum(len(output.new_token_ids) for output in stream) == 3
        group.run("late", 0)


@BOTH
def test_a_request_that_was_given_up_in_a_pause(coordinator: bool) -> None:
    """A wake-up that was discarded does not make a group count as running."""
    with lockstep(coordinator) as group:
        group.client.pause_scheduler()
        with group.call("given up", 1):
            pass
        group.client.call_utility("echo", None)
        group.client.resume_scheduler()
        group.run("next", 0)


@BOTH
def test_a_request_that_is_left_at_once(coordinator: bool) -> None:
    """Its rank may have nothing to step for; the others, which were woken, do not wait for it."""
    with lockstep(coordinator) as group:
        for number in range(20):
            group.call(f"left-{number}", number % 2).close()
            assert group.client.call_utility("echo", number) == [number, number]
        group.run("after", 1)


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
@BOTH
def test_pauses(coordinator: bool, mode: Any) -> None:
    """Every mode of a pause does in a running group what it does elsewhere."""
    with lockstep(coordinator) as group, group.call("one", 0, count=200) as one:
        with group.call("two", 1, count=200) as two:
            one.recv()
            two.recv()
            group.client.pause_scheduler(mode)
            if mode == "keep":
                group.client.resume_scheduler()
            for stream in (one, two):
                assert (sum(len(o.new_token_ids) for o in stream) == 199) == (mode != "abort")
            reason = FinishReason.ABORT if mode == "abort" else FinishReason.LENGTH
            assert one.finish_reason == two.finish_reason == reason
        if mode != "keep":
            group.client.resume_scheduler()
        group.run("after", 1)


@BOTH
def test_sleep_and_wake_up(coordinator: bool) -> None:
    """A group sleeps and wakes up together."""
    with lockstep(coordinator) as group:
        group.client.sleep(1)
        assert group.client.is_sleeping()
        assert group.client.wake_up() is True
        group.run("awake", 1)


def test_the_end_of_aborted_requests_is_told() -> None:
    """With a coordinator engines name what ended; a stream that ended already is not disturbed."""
    with lockstep(True) as group:
        with group.call("left", 1) as stream:
            stream.recv()
        group.wait_wave(1)
        group.run("next", 1)
        assert group.client.stats.malformed_messages == 0


# -- what would wedge a group ----------------------------------------------------------------------


@pytest.mark.parametrize("method", sorted(fanout.LOCKSTEP_ONLY_TOGETHER))
def test_a_part_of_a_group_is_refused(method: str) -> None:
    """A method that meets the other ranks is not sent to one of them alone."""
    with lockstep(False) as group:
        with pytest.raises(RequestRefusedError, match="whole lockstep group"):
            group.client.call_utility(method, engines=[1])
        group.client.call_utility("echo", "all is well")
        assert group.methods(1) == ["echo"]


@pytest.mark.parametrize("method", ["pause_scheduler", "resume_scheduler", "execute_dummy_batch"])
def test_what_is_refused_would_wedge(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sent to one rank it is not answered, nor is any later call, until the other has it too."""
    monkeypatch.setattr(fanout, "LOCKSTEP_ONLY_TOGETHER", frozenset())
    monkeypatch.setattr(core, "PAUSE_OR_RESUME", frozenset())
    with lockstep(False) as group:
        client = group.client
        with pytest.raises(UtilityTimeoutError):
            client.call_utility(method, engines=[0], timeout=0.1)
        with pytest.raises(UtilityTimeoutError):
            client.call_utility("echo", "anybody?", engines=[0], timeout=0.1)
        assert client.call_utility("echo", "yes", engines=[1]) == ["yes"]
        client.call_utility(method, engines=[1])
        assert client.call_utility("echo", "both") == ["both", "both"]
        client.resume_scheduler()
        group.run("after", 0)


@BOTH
def test_a_fan_out_that_timed_out_was_sent_to_all(coordinator: bool) -> None:
    """Its caller leaves, the group does not wait for anybody."""
    with lockstep(coordinator) as group:
        rule = {"method": "pause_scheduler", "do": "busy", "seconds": 0.3, "occurrence": 1}
        group.client.call_utility("mock_fault", rule, engines=[1])
        with pytest.raises(UtilityTimeoutError) as caught:
            group.client.pause_scheduler(timeout=0)
        assert caught.value.outcomes.may_have_run == (0, 1)
        group.client.resume_scheduler()
        assert not group.client.is_scheduler_paused()
        group.run("after", 0)


@BOTH
def test_a_fan_out_that_was_interrupted_was_sent_to_all(coordinator: bool) -> None:
    """After a Ctrl-C the group goes on."""
    with lockstep(coordinator) as group:
        rule = {"method": "pause_scheduler", "do": "busy", "seconds": 0.5, "occurrence": 1}
        group.client.call_utility("mock_fault", rule, engines=[1])
        main = threading.main_thread().ident
        assert main is not None
        with contextlib.closing(Alarm(main)) as alarm:
            alarm.when(
                lambda: any(e.method == "pause_scheduler" for e in group.logged(1, "UTILITY"))
            )
            with pytest.raises(KeyboardInterrupt) as caught:
                group.client.pause_scheduler()
        assert caught.value.outcomes.may_have_run == (0, 1)  # type: ignore[attr-defined]
        group.client.resume_scheduler()
        group.run("after", 1)


class Alarm:
    """Interrupts a thread when something has happened."""

    def __init__(self, thread: int) -> None:
        self._target = thread
        self._thread: threading.Thread | None = None

    def when(self, condition: Any) -> None:
        def watch() -> None:
            wait_until(condition, what="the moment of the interrupt")
            signal.pthread_kill(self._target, signal.SIGINT)

        self._thread = threading.Thread(target=watch, name="test-alarm", daemon=True)
        self._thread.start()

    def close(self) -> None:
        if self._thread is not None:
            self._thread.join()


@BOTH
def test_a_resume_waits_for_the_end_of_the_pause(coordinator: bool) -> None:
    """Sent earlier it would wedge the group: it follows the last answer, also of a call left."""
    with lockstep(coordinator) as group:
        client = group.client
        hold = {"method": "pause_scheduler", "do": "hold", "occurrence": 1}
        client.call_utility("mock_fault", hold, engines=[1])
        undo = UtilityCall("resume_scheduler")
        with pytest.raises(UtilityTimeoutError) as caught:
            client.call_utility("pause_scheduler", timeout=0.1, compensate=undo)
        assert caught.value.compensation is not None
        assert caught.value.compensation.may_have_run == (0, 1)
        held = client._dispatcher.core.group.held
        again = run_in_thread(client.pause_scheduler)
        wait_until(lambda: len(held) == 2, what="the second pause")
        last = run_in_thread(client.resume_scheduler)
        wait_until(lambda: len(held) == 3, what="the last resume")
        assert client.call_utility("echo", "not held") == ["not held"] * 2
        assert group.methods(0)[-2:] == ["pause_scheduler", "echo"]
        client.call_utility("mock_release", engines=[1])
        again.result()
        last.result()
        order = ["pause_scheduler", "resume_scheduler"] * 2
        for index in (0, 1):
            assert [name for name in group.methods(index) if "scheduler" in name] == order
        group.run("after", 0)


@BOTH
def test_what_is_held_ends_with_the_group(coordinator: bool) -> None:
    """A resume that waits for the end of a pause fails when a rank dies; nothing stays behind."""
    with lockstep(coordinator, kind="processes") as group:
        drop = {"method": "pause_scheduler", "do": "drop"}
        group.client.call_utility("mock_fault", drop, engines=[1])
        with pytest.raises(UtilityTimeoutError):
            group.client.pause_scheduler(timeout=0.1)
        resume = run_in_thread(group.client.settle_utility, "resume_scheduler")
        held = group.client._dispatcher.core.group.held
        wait_until(lambda: len(held) == 1, what="the resume")
        group.engines[1].signal(signal.SIGKILL)  # type: ignore[union-attr]
        outcomes = resume.result()
        assert outcomes.may_have_run == ()
        assert all(isinstance(e, EngineDeadError) for e in outcomes.failures.values())
        assert not held
        assert group.client.pending_utility_calls == 0


@BOTH
def test_concurrent_pauses(coordinator: bool) -> None:
    """Several callers pause at once: each pause is a step of its own, for all ranks."""
    with lockstep(coordinator) as group:
        for number in range(10):
            for call in [run_in_thread(group.client.pause_scheduler) for _ in range(4)]:
                call.result()
            group.client.resume_scheduler()
            group.run(f"after-{number}", number % 2)


@BOTH
def test_pauses_and_resumes_of_impatient_callers(coordinator: bool) -> None:
    """However short the time limits, the group never wedges."""
    with lockstep(coordinator) as group:
        for number in range(40):
            for call in (group.client.pause_scheduler, group.client.resume_scheduler):
                with contextlib.suppress(UtilityTimeoutError):
                    call(timeout=0.0002 * (number % 5))
        group.client.resume_scheduler()
        group.run("after", 1)


# -- death and return ------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", [0, 1])
@BOTH
def test_a_death_ends_the_group_and_it_returns(coordinator: bool, victim: int) -> None:
    """One death fails what waits for any rank, with one cause; started again, the group serves."""
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(folder())
        where = f"ipc://{place}/h"

        def start() -> list[Any]:
            return [entered(stack, rank(where, index, place, kind="processes")) for index in (0, 1)]

        engines = start()
        client = stack.enter_context(
            connect(
                where,
                engine_count=2,
                coordinator=coordinator,
                connect_timeout=scaled(30),
                timeout=scaled(20),
            )
        )
        group = Lockstep(client, engines)
        group.run("well", 0)
        group.wait_wave(1)
        streams = [stack.enter_context(group.call(f"s{index}", index)) for index in (0, 1)]
        for stream in streams:
            stream.recv()
        client.call_utility("mock_fault", {"method": "echo", "do": "drop"})
        call = run_in_thread(client.settle_utility, "echo", "waiting")
        wait_until(lambda: client.pending_utility_calls == 2, what="the call")
        engines[victim].signal(signal.SIGKILL)
        failures = call.result().failures
        # The other dies of it: its last word may be read before the loss of the first.
        (cause,) = (i for i in (0, 1) if "of its lockstep group" not in str(failures[i]))
        for index, stream in enumerate(streams):
            with pytest.raises(EngineDeadError) as caught:
                list(stream)
            for error in (caught.value, failures[index]):
                assert isinstance(error, EngineDeadError)
                assert error.engine == index
                named = f"engine {cause} of its lockstep group died" in str(error)
                assert named == (index != cause)
        assert client.pending_utility_calls == client.active_requests == 0
        assert not any(info.alive for info in client.engines)
        with pytest.raises(UtilityCallError, match="lockstep group died"):
            client.call_utility("echo", "anybody?")
        for engine in engines:
            engine.wait()
        engines = start()
        stack.callback(stop_together, engines)
        group = Lockstep(client, engines)
        wait_until(lambda: all(i.alive for i in client.engines), timeout=30, what="the return")
        assert client.stats.wave == 0
        for number in range(4):
            group.run(f"again-{number}", number % 2)
            group.wait_wave(number + 1)
        assert group.stamps(0)[0] == 0
        assert client.stats.returns == 2


# -- the in-process coordinator --------------------------------------------------------------------


def test_init_tells_the_coordinators_addresses_and_the_configuration() -> None:
    """INIT has both addresses of the coordinator and the parallel configuration."""
    config = {"data_parallel_master_ip": "127.0.0.1", "data_parallel_master_port": 1234}
    for coordinator in (False, True):
        with folder() as place, zmq.Context() as context:
            with context.socket(zmq.DEALER) as engine:
                engine.identity = b"\x00\x00"
                engine.linger = 0
                where = f"ipc://{place}/h"
                starting = run_in_thread(
                    connect,
                    where,
                    coordinator=coordinator,
                    parallel_config=config,
                    connect_timeout=0.5,
                )
                engine.connect(where)
                codec = codec_named("cbor")
                engine.send(codec.encode(Hello().to_plain()))
                init = Init.from_plain(codec.decode(engine.recv()))
                assert isinstance(starting.error(), HandshakeError)
            assert (init.coordinator_input is not None) is coordinator
            assert (init.coordinator_output is not None) is coordinator
            assert init.frontend_stats_publish_address is None
            assert init.parallel_config == config


@contextlib.contextmanager
def reporting(client: EngineClient) -> Iterator[Any]:
    """Say things to the in-process coordinator, as engines do."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.linger = 1000
        socket.connect(client._dispatcher.addresses["coordinator_output"])
        codec = codec_named("cbor")
        yield lambda **fields: socket.send(codec.encode(Outputs(**fields).to_plain()))


def test_an_engine_may_start_a_wave() -> None:
    """A rank that starts by itself says so, and all ranks are told."""
    with lockstep(True, meets=False) as group, reporting(group.client) as say:
        say(engine_index=1, start_wave=4)
        for index in (0, 1):
            wait_until(partial(group.has_starts, index, [[4, 1]]), what="the wake-up")
        assert group.state.running
        say(engine_index=0, wave_complete=4)
        group.wait_wave(5)


def test_a_load_report_is_no_more_than_that() -> None:
    """Statistics on the coordinator's path move no wave, and choose the engine."""
    with lockstep(True, meets=False) as group, reporting(group.client) as say:
        say(engine_index=0, scheduler_stats={"num_running_reqs": 3, "num_waiting_reqs": 0})
        records = group.client._dispatcher.registry.engines
        wait_until(lambda: records[0].running == 3, what="the report")
        streams = [group.call(f"r{number}") for number in range(3)]
        assert [stream.engine for stream in streams] == [1, 1, 1]
        assert group.state.wave == 0
        for stream in streams:
            stream.close()


def test_a_wake_up_is_repeated_until_it_is_confirmed() -> None:
    """A wake-up that nobody confirms is sent again and again, to all; then no more."""
    manual = {"manual_steps": True}
    with (
        lockstep(True, meets=False, options=manual) as group,
        reporting(group.client) as say,
    ):
        stream = group.call("waits", 1)
        wait_until(lambda: group.starts(0).count([0, None]) >= 2, what="reminders")
        assert group.starts(0)[0] == [0, 1]
        say(engine_index=0, start_wave=0)
        wait_until(lambda: [0, 0] in group.starts(1), what="the confirmation")
        inner = group.client._dispatcher.core
        wait_until(lambda: inner._reminder is None, timeout=20, what="the last reminder")
        stream.close()


def test_rubbish_for_the_coordinator() -> None:
    """What the coordinator cannot read is counted, and harms nobody."""
    with lockstep(True) as group:
        with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
            socket.linger = 1000
            socket.connect(group.client._dispatcher.addresses["coordinator_output"])
            socket.send(b"\xff\xff")
            wait_until(lambda: group.client.stats.malformed_messages == 1, what="the rubbish")
        group.run("after", 0)


def test_a_coordinator_needs_one_dialect() -> None:
    """It sends all ranks the same, so a group of two dialects is refused."""
    with (
        pytest.raises(HandshakeError, match="one dialect"),
        lockstep(True, codecs=("cbor", "msgpack"), meets=False),
    ):
        pass


def test_requests_are_spread_over_the_group() -> None:
    """Without a rank a request goes to the least loaded."""
    with lockstep(False) as group, contextlib.ExitStack() as stack:
        streams = [stack.enter_context(group.call(f"r{number}")) for number in range(4)]
        assert sorted(stream.engine for stream in streams) == [0, 0, 1, 1]
        for stream in streams:
            stream.recv()


def test_ranks_meet_where_init_says() -> None:
    """The parallel configuration tells ranks of several launch commands where they meet."""
    with zmq.Context() as context, context.socket(zmq.REP) as probe:
        port = probe.bind_to_random_port("tcp://127.0.0.1")
    config = {"data_parallel_master_ip": "127.0.0.1", "data_parallel_master_port": port}
    with folder() as place, contextlib.ExitStack() as stack:
        where = f"ipc://{place}/h"
        engines: list[Rank] = [
            entered(stack, rank(where, index, place, meets=False)) for index in (0, 1)
        ]
        stack.callback(stop_together, engines)
        client = stack.enter_context(
            connect(where, engine_count=2, parallel_config=config, connect_timeout=scaled(30))
        )
        group = Lockstep(client, engines)
        group.run("served", 1)
        group.wait_wave(1)


# -- an external coordinator -----------------------------------------------------------------------


@contextlib.contextmanager
def followed(
    *, told: bool = True, coupled: bool = False, options: Mapping[str, Any] | None = None
) -> Iterator[tuple[Lockstep, Coordinator]]:
    """A client of two ranks that another process greeted, and their coordinator."""
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(folder())
        coordinator = stack.enter_context(Coordinator(place))
        addresses = f"ipc://{place}/in", f"ipc://{place}/out"
        more: dict[str, Any] = {"input_address": addresses[0], "output_address": addresses[1]}
        if not told:
            more["ready"] = {"dp_stats_address": coordinator.address}
        options = dict(options or {})
        if coupled:
            options["coordinator_input"] = coordinator.input
            options["coordinator_output"] = coordinator.output
            coordinator.run()
        engines: list[Rank] = [
            entered(stack, rank(None, index, place, meets=coupled, options=options, **more))
            for index in (0, 1)
        ]
        stack.callback(stop_together, engines)
        client = stack.enter_context(
            connect_bootstrapped(
                *addresses,
                engine_count=2,
                coordinator_address=coordinator.address if told else None,
                connect_timeout=scaled(30),
                timeout=scaled(20),
            )
        )
        client.call_utility("mock_log")
        yield Lockstep(client, engines), coordinator


@pytest.mark.parametrize("told", [True, False])
def test_a_client_follows_an_external_coordinator(told: bool) -> None:
    """It subscribes once, stamps the published wave, and says once that the group must wake."""
    with followed(told=told) as (group, coordinator):
        assert coordinator.front.recv() == b"\x01"
        coordinator.publish([[0, 0, 0.0], [0, 0, 0.0]], 7, False)
        group.wait_wave(7)
        with group.call("first", 0), group.call("second", 1):
            assert coordinator.notice() == [0, 7]
            coordinator.publish(None, 7, True)
            group.wait_running()
            group.run("third", 1)
            assert group.stamps(0) == [7]
            assert group.stamps(1) == [7, 7]
            assert group.starts(0) == group.starts(1) == []


def test_a_running_group_needs_no_notice() -> None:
    """While the group is published as running, requests are only stamped."""
    with followed() as (group, coordinator):
        assert coordinator.front.recv() == b"\x01"
        coordinator.publish(None, 5, True)
        group.wait_wave(5)
        group.run("one", 0)
        assert coordinator.hears_nothing()
        assert group.stamps(0) == [5]
        assert group.client.stats.wakes == 0


def test_a_notice_is_repeated_until_the_group_runs() -> None:
    """A publish of a group that still sleeps does not end the reminders."""
    with followed(options={"manual_steps": True}) as (group, coordinator):
        assert coordinator.front.recv() == b"\x01"
        with group.call("waits", 1):
            assert coordinator.notice() == [1, 0]
            coordinator.publish([[1, 0, 0.0], [0, 0, 0.0]], 0, False)
            assert coordinator.notice() == [0, -1]  # of an old wave: for all ranks
            coordinator.publish(None, 0, True)
            group.wait_running()


def test_published_loads_choose_the_engine() -> None:
    """The counts of a coordinator say who is busy with the requests of others."""
    with followed() as (group, coordinator):
        assert coordinator.front.recv() == b"\x01"
        coordinator.publish([[4, 3, 0.1], [0, 2, 0.5]], 3, True)
        group.wait_wave(3)
        with contextlib.ExitStack() as stack:
            streams = [stack.enter_context(group.call(f"r{number}")) for number in range(3)]
            assert [stream.engine for stream in streams] == [1, 1, 1]


@pytest.mark.parametrize("rubbish", [[1, 2], [None, "7", False], [None, 7, 1], 5])
def test_a_strange_publish(rubbish: Any) -> None:
    """What is no publish is counted and changes nothing."""
    with followed() as (group, coordinator):
        assert coordinator.front.recv() == b"\x01"
        coordinator.front.send(codec_named("cbor").encode(rubbish))
        wait_until(lambda: group.client.stats.malformed_messages == 1, what="the rubbish")
        assert (group.state.wave, group.state.running) == (0, False)
        group.run("after", 0)


def test_the_loss_of_a_coordinator_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """A coordinator that goes is named in a warning; calls go on."""
    with followed() as (group, coordinator):
        assert coordinator.front.recv() == b"\x01"
        with caplog.at_level(logging.WARNING, "engine_client"):
            coordinator.close()
            wait_until(lambda: "coordinator at" in caplog.text, what="the warning")
        assert coordinator.address in caplog.text
        assert group.client.call_utility("echo", 1) == [1, 1]


def test_ranks_with_an_external_coordinator() -> None:
    """A group whose wave another process keeps is served, wave after wave, with pauses."""
    with followed(coupled=True) as (group, _):
        for number in range(20):
            group.run(f"r{number}", number % 2, count=1 + number % 3)
            if number % 3 == 0:
                wait_until(lambda: group.state.phase is WavePhase.PAUSED, what="sleep")
            if number % 5 == 0:
                group.client.pause_scheduler("keep")
                early = group.call("early", 1, count=2)
                group.client.resume_scheduler()
                assert len(list(early)) == 2
        wait_until(lambda: group.client.stats.wave >= 7, what="waves")
