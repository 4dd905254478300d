"""How engines start, and how starts fail, over real sockets."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine_client import (
    EngineClient,
    HandshakeError,
    HandshakeTimeout,
    UtilityCallError,
    connect,
    launch,
)
from engine_client.dispatch import bootstrap
from engine_client.tools.mock.methods import default_ready
from engine_client.tools.mock_engine import MockEngine
from engine_client.wire.codec import codec_named
from tests.helpers import (
    EngineProcess,
    interrupt_storm,
    run_in_thread,
    scaled,
    storm_test,
    wait_until,
)
from tests.helpers.leaks import Snapshot
from tests.scenarios.raw import Peers, RawEngine, connecting, free_tcp, is_bound, states
from tests.scenarios.rig import address

CODECS = ["cbor", "msgpack"]


@pytest.fixture
def where() -> Iterator[str]:
    with address() as one:
        yield one


def failure(where: str, timeout: float = 0.3, **settings: Any) -> HandshakeTimeout:
    """Return the error of a start that cannot succeed; it must come in time."""
    began = time.monotonic()
    with pytest.raises(HandshakeTimeout) as caught:
        connect(where, connect_timeout=scaled(timeout), **settings)
    assert scaled(timeout) <= time.monotonic() - began < scaled(timeout) + scaled(2)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, TimeoutError)
    return caught.value


# -- the order of things --------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("transport", ["ipc", "tcp"])
@pytest.mark.parametrize("order", ["registration, READY", "READY, registration"])
def test_start(where: str, codec: str, transport: str, order: str) -> None:
    """READY and registration in either order, in both dialects, over ipc and tcp."""
    if transport == "tcp":
        (where,) = free_tcp()
    with connecting(where) as starting, RawEngine(where, codec=codec) as engine:
        engine.hello()
        init = engine.init()
        assert all(a.startswith(f"{transport}://") for a in (*init.inputs, *init.outputs))
        assert (init.coordinator_input, init.coordinator_output) == (None, None)
        assert init.parallel_config == {}
        for step in order.split(", "):
            assert not starting.done
            if step == "READY":
                engine.ready()
            else:
                engine.register({"vllm_version": "0.32.0", "max_model_len": 77})
        client = starting.result()
        (info,) = client.engines
        assert info.codec == codec
        assert info.alive
        assert info.ready["max_model_len"] == 77
        assert client.handshake_address == where
        assert (client.input_address, client.output_address) == (init.inputs[0], init.outputs[0])
        call = run_in_thread(client.call_utility, "echo", [1, b"x"])
        client_index, call_id, method, args = engine.next_call()
        assert (client_index, method, args) == (0, "echo", [[1, b"x"]])
        assert 0 < call_id < 2**53
        engine.reply(call_id, "yes")
        assert call.result() == ["yes"]


def test_engines_of_both_dialects_interleave(where: str) -> None:
    """Several engines' messages come in any mixture; each is spoken to in its own dialect."""
    with contextlib.ExitStack() as stack:
        starting = stack.enter_context(connecting(where, engine_count=3, engine_start_index=257))
        first, second, third = engines = [
            stack.enter_context(RawEngine(where, 257 + n, codec=codec))
            for n, codec in enumerate(["cbor", "msgpack", "cbor"])
        ]
        third.hello()
        third.init()
        third.ready()
        first.hello()
        first.init()
        third.register()
        second.hello()
        first.register()
        second.init()
        second.ready()
        first.ready()
        assert not starting.done
        second.register()
        client = starting.result()
        assert [(info.index, info.id, info.codec) for info in client.engines] == [
            (257, b"\x01\x01", "cbor"),
            (258, b"\x02\x01", "msgpack"),
            (259, b"\x03\x01", "cbor"),
        ]
        call = run_in_thread(client.call_utility, "echo", "all")
        for engine in engines:
            engine.answer("echo", engine.index)
        assert call.result() == [257, 258, 259]


def test_engines_that_were_there_first(where: str) -> None:
    """Engines may say HELLO before there is a client; it lies in their queue until then."""
    with EngineProcess(where, 0) as engine, MockEngine(where, 1, codec="msgpack"):
        with connect(where, engine_count=2, connect_timeout=scaled(20)) as client:
            assert client.call_utility("echo", 1) == [1, 1]
            assert dict(client.engines[0].ready) == default_ready(0)
        assert engine.running


def test_what_init_carries(where: str) -> None:
    """INIT carries the addresses under the advertised host, and what engines shall configure."""
    (tcp,) = free_tcp()
    config = {"data_parallel_master_ip": "10.0.0.1", "_data_parallel_master_port_list": [1, 2]}
    with (
        connecting(tcp, advertised_host="localhost", parallel_config=config) as starting,
        RawEngine(tcp) as engine,
    ):
        engine.hello()
        init = engine.init()
        assert init.inputs[0].startswith("tcp://localhost:")
        assert init.outputs[0].startswith("tcp://localhost:")
        assert init.parallel_config == config
        engine.register()
        engine.ready()
        starting.result()


@pytest.mark.parametrize("message", ["HELLO", "REGISTRATION", "READY"])
def test_messages_that_come_twice(where: str, message: str) -> None:
    """An engine that repeats itself starts as any other."""
    faults = [{"method": message, "do": "duplicate"}]
    if message == "HELLO":  # a second INIT is more than the reference engine takes
        with connecting(where) as starting, RawEngine(where) as engine:
            engine.hello()
            engine.start()
            assert engine.has_init(5)
            assert states(starting.result()) == [True]
        return
    with MockEngine(where, faults=faults), connect(where, connect_timeout=scaled(20)) as client:
        assert client.call_utility("echo", 1) == [1]
        assert client.stats.deaths == 0


# -- time-outs ------------------------------------------------------------------------------------


def test_timeout_names_what_is_missing_from_whom(where: str) -> None:
    """Each engine that is not ready is named with the step that it has not made."""
    with contextlib.ExitStack() as stack:
        starting = stack.enter_context(connecting(where, engine_count=5, connect_timeout=scaled(1)))
        engines = [stack.enter_context(RawEngine(where, index)) for index in range(4)]
        for engine in engines:
            engine.hello()
            engine.init()
        engines[0].register()
        engines[0].ready()
        engines[1].register()
        engines[2].ready()
        error = starting.error()
    assert isinstance(error, HandshakeTimeout)
    assert error.missing == (1, 2, 3, 4)
    text = str(error)
    assert "1 of 5 engines ready" in text
    assert "no READY from engine 1:" in text
    assert "no registration from engine 2:" in text
    assert "no READY and registration from engine 3:" in text
    assert "no HELLO from engine 4:" in text
    assert where in text
    assert "connect_timeout" in text


def test_one_deadline_for_the_whole_start(where: str) -> None:
    """Engines that get ready one after another do not extend the time limit."""
    stop = threading.Event()

    def trickle() -> None:
        with contextlib.ExitStack() as stack:
            for index in range(50):
                stack.enter_context(RawEngine(where, index)).start()
                if stop.wait(scaled(0.1)):
                    return

    with connecting(where, engine_count=50, connect_timeout=scaled(0.6)) as starting:
        began = time.monotonic()
        trickling = run_in_thread(trickle)
        error = starting.error()
        assert time.monotonic() - began < scaled(0.6) + scaled(1)
        stop.set()
        trickling.join()
    assert isinstance(error, HandshakeTimeout)
    assert 0 not in error.missing
    assert 49 in error.missing


def test_no_time_at_all(where: str) -> None:
    """A limit of 0 is one look, and an error that tells who is missing."""
    assert failure(where, 0, engine_count=2).missing == (0, 1)


@pytest.mark.parametrize("what", ["READY", "registration"])
def test_an_earlier_clients_engine(where: str, what: str) -> None:
    """READY or a registration without HELLO: the engine got its INIT from an earlier client."""
    inputs, outputs = f"{where}i", f"{where}o"
    settings: Any = {"input_address": inputs, "output_address": outputs}
    with (
        connecting(where, connect_timeout=scaled(0.5), **settings) as starting,
        RawEngine(where) as engine,
    ):
        if what == "READY":
            engine.ready()
        else:
            wait_until(lambda: is_bound(outputs))
            engine.connect(inputs, outputs)
            engine.register()
        error = starting.error()
    assert isinstance(error, HandshakeTimeout)
    assert error.missing == (0,)
    assert error.stage == "HELLO"
    assert "earlier client" in str(error)
    assert "restart" in str(error)


def test_two_processes_with_one_index(where: str) -> None:
    """The index that is there twice is named beside the one that is missing."""
    with contextlib.ExitStack() as stack:
        starting = stack.enter_context(connecting(where, engine_count=2, connect_timeout=scaled(1)))
        for _ in range(2):
            engine = stack.enter_context(RawEngine(where, 0))
            engine.hello()
            engine.init()
        error = starting.error()
    assert isinstance(error, HandshakeTimeout)
    assert error.missing == (0, 1)
    assert "two processes have its index" in str(error)
    assert "no HELLO from engine 1" in str(error)


def test_a_second_process_with_the_index_of_a_ready_one(
    where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While engine 1 is awaited a second engine 0 comes: it waits, and the time-out tells."""
    monkeypatch.setattr(bootstrap, "PROGRESS_INTERVAL", 0.01)
    with (
        connecting(where, engine_count=2, connect_timeout=scaled(1)) as starting,
        RawEngine(where, 0) as first,
    ):
        first.start().leave_handshake()
        wait_until(lambda: "1 of 2 engines ready" in caplog.text)
        with RawEngine(where, 0) as second:
            second.hello()
            wait_until(lambda: first.input.poll(0), what="the probe of the first")
            error = starting.error()
            assert not second.has_init()
    assert isinstance(error, HandshakeTimeout)
    assert error.missing == (1,)
    assert "another process says HELLO under its index" in str(error)


# -- strangers and garbage ------------------------------------------------------------------------

IDENTITIES = [b"\x07\x00", b"\x00", b"\x00\x00\x00", b"x" * 255, None]
GARBAGE = [
    [b""],
    [b"\xff" * 40],
    [b"GET / HTTP/1.1"],
    [b"\x80"],
    [b"\xa0"],
    [b"\xa1\x66status\x65HELLO", b"and more"],
    [b"\xa1\x66status\x67GOODBYE"],
    [b"\xa1\x66status\xf6"],
    [b"\xbf" * 1000],
    [b"\xa1\x66status\x65HELLO" + b"\x00" * 1_000_000],
    [b"\x81\xa6status\xa7GOODBYE"],
    [b"\xde\x00\x01\xa6status\xc0"],
    [b"x"] * 9,
]


@pytest.mark.parametrize("identity", IDENTITIES, ids=lambda i: "none" if i is None else i.hex()[:8])
def test_strangers_do_not_disturb_a_start(where: str, identity: bytes | None) -> None:
    """Unknown and impossible identities are ignored and counted; the engines start."""
    hello = codec_named("cbor").encode({"status": "HELLO"})
    with connecting(where, engine_count=2) as starting, Peers() as strangers:
        stranger = strangers.dealer(where, identity)
        stranger.send(hello)
        stranger.send(b"\xff")
        with MockEngine(where, 0), MockEngine(where, 1):
            client = starting.result()
            assert client.call_utility("echo", 1) == [1, 1]
            wait_until(lambda: client.stats.stray_messages == 2)
            assert not stranger.poll(0)


def test_strangers_are_named_in_a_timeout(where: str) -> None:
    """Who came instead of whom was awaited is what a user needs to know."""
    with (
        connecting(where, engine_count=2, connect_timeout=scaled(0.5)) as starting,
        RawEngine(where, 7) as seventh,
        Peers() as strangers,
    ):
        seventh.hello()
        strangers.dealer(where, b"scanner").send(b"?")
        error = starting.error()
    assert isinstance(error, HandshakeTimeout)
    assert "engine 7" in str(error)
    assert b"scanner".hex(" ") in str(error)
    assert "ignored meanwhile" in str(error)


def test_garbage_does_not_disturb_a_start(where: str) -> None:
    """Whatever comes under an engine's own identity, a proper start afterwards succeeds."""
    with connecting(where) as starting, RawEngine(where) as engine:
        for frames in GARBAGE:
            engine.shake(*frames)
        engine.start()
        client = starting.result()
        assert client.stats.stray_messages == len(GARBAGE)


def test_garbage_as_registration(where: str) -> None:
    """A registration that cannot be read does not count; the next one does."""
    with connecting(where) as starting, RawEngine(where) as engine:
        engine.hello()
        engine.init()
        engine.ready()
        junk: list[list[bytes]] = [
            [b"\xff"],
            [b"\x80\x80"],
            [b"\xa1\x01\x02"],
            [b"[]"],
            [b"\xa1\x72data_parallel_size\x20"],
            [b"\xa0", b"\xa0"],
            [b"\xa0" + b"\x00" * 100_000],
        ]
        for frames in junk:
            engine.input.send_multipart(frames)
        assert not starting.done
        engine.register()
        client = starting.result()
        assert client.stats.stray_messages == len(junk)
        assert states(client) == [True]


def test_garbage_is_told_in_a_timeout(where: str) -> None:
    """An engine whose registration cannot be read is told apart from one that sent none."""
    with connecting(where, connect_timeout=scaled(0.5)) as starting, RawEngine(where) as engine:
        engine.hello()
        engine.init()
        engine.ready()
        engine.register(b"\xff\x00")
        error = starting.error()
    assert isinstance(error, HandshakeTimeout)
    assert "no registration from engine 0" in str(error)
    assert "its registration is no map: ff 00" in str(error)


# -- engines that are lost during the start -------------------------------------------------------


def test_an_engine_killed_during_the_start_can_be_started_again(
    where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Killed after it was ready, while another is awaited: its successor completes the start."""
    monkeypatch.setattr(bootstrap, "PROGRESS_INTERVAL", 0.01)
    with (
        connecting(where, engine_count=2) as starting,
        EngineProcess(where, 0) as first,
        RawEngine(where, 1) as other,
    ):
        wait_until(lambda: "1 of 2 engines ready" in caplog.text)
        first.kill()
        wait_until(lambda: "engine 0 was lost during the start" in caplog.text)
        with EngineProcess(where, 0) as second:
            other.start()
            client = starting.result()
            assert states(client) == [True, True]
            assert client.call_utility("whoami", engines=[0]) == [{"index": 0, "pid": second.pid}]


def test_an_engine_that_dies_before_its_registration(where: str) -> None:
    """An engine that took its INIT and died is awaited again, from HELLO on."""
    with connecting(where) as starting:
        with RawEngine(where) as first:
            first.hello()
            first.init()
        with RawEngine(where) as second:
            second.start()
            assert states(starting.result()) == [True]


# -- launched engines -----------------------------------------------------------------------------

LATE_EXIT = """
import sys
print("loading", file=sys.stderr)
print("no memory left on device", file=sys.stderr)
sys.exit(3)
"""


def test_a_launched_engine_that_ends_is_an_error_at_once() -> None:
    """One of three engines exits before its HELLO: index, code and last words, without delay."""
    before = Snapshot()
    engine = [sys.executable, "-m", "engine_client.tools.mock_engine"]

    def command(address: str, index: int) -> list[str]:
        if index == 1:
            return [sys.executable, "-c", LATE_EXIT]
        return [*engine, "--connect", address, "--index", str(index)]

    began = time.monotonic()
    with pytest.raises(HandshakeError) as caught:
        launch(3, command=command, connect_timeout=60)
    assert time.monotonic() - began < scaled(10)
    text = str(caught.value)
    assert not isinstance(caught.value, TimeoutError)
    assert "engine 1 did not start" in text
    assert "exited with code 3" in text
    assert "no memory left on device" in text
    assert "\n" not in text
    assert 1 in caught.value.missing
    before.check()


def test_a_launched_engine_that_is_killed_is_an_error_at_once() -> None:
    """An engine that dies by a signal between INIT and registration."""
    faults = '[{"method": "REGISTRATION", "do": "die", "engine": 1}]'
    engine = [sys.executable, "-m", "engine_client.tools.mock_engine", "--faults", faults]
    command = [*engine, "--connect", "{address}", "--index", "{index}"]
    before = Snapshot()
    with pytest.raises(HandshakeError, match=r"engine 1 did not start.*signal 9") as caught:
        launch(2, command=command, connect_timeout=60)
    assert 1 in caught.value.missing
    before.check()


# -- failed starts leave nothing behind -----------------------------------------------------------


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_twenty_failed_starts_then_a_good_one(where: str, transport: str) -> None:
    """On the same three addresses, with an engine that never gets ready: nothing accumulates."""
    if transport == "tcp":
        where, inputs, outputs = free_tcp(3)
    else:
        inputs, outputs = f"{where}i", f"{where}o"
    settings: Any = {"engine_count": 2, "input_address": inputs, "output_address": outputs}
    before = Snapshot()
    for _ in range(20):
        with (
            connecting(where, connect_timeout=scaled(0.1), **settings) as starting,
            RawEngine(where, 0) as ready,
            RawEngine(where, 1) as never,
        ):
            for engine in (ready, never):
                engine.hello()
                if engine.has_init(0.05):  # else the machine is slow, and it is over by now
                    engine.init()
                    engine.register()
            ready.ready()
            error = starting.error()
            assert isinstance(error, HandshakeTimeout)
            assert 1 in error.missing
    before.check()
    with connecting(where, **settings) as starting, MockEngine(where, 0), MockEngine(where, 1):
        client = starting.result()
        assert client.call_utility("echo", "at last") == ["at last"] * 2
        client.close()
    assert not is_bound(where)
    before.check()


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_ctrl_c_while_connecting(where: str, transport: str) -> None:
    """Ctrl-C goes through at once, unchanged, and the addresses are free for the next try."""
    if transport == "tcp":
        (where,) = free_tcp()
    before = Snapshot()

    def interrupt() -> float:
        wait_until(lambda: is_bound(where))
        os.kill(os.getpid(), signal.SIGINT)
        return time.monotonic()

    interrupting = run_in_thread(interrupt)
    with pytest.raises(KeyboardInterrupt):
        connect(where, engine_count=2, connect_timeout=60)
    assert time.monotonic() - interrupting.result() < scaled(0.5)
    before.check()
    with connecting(where) as starting, MockEngine(where):
        assert starting.result().call_utility("echo", 1) == [1]


@storm_test()
@pytest.mark.parametrize("kind", ["connect", "launch"])
def test_storm_over_starts(
    where: str, kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Interrupts at random instants of a start leave no thread, descriptor, process or file."""
    folder = tmp_path / "private"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    before = Snapshot()
    actions: dict[str, Callable[[], EngineClient]] = {
        "connect": lambda: connect(where, connect_timeout=60),
        "launch": lambda: launch(1, connect_timeout=60),
    }
    rounds, longest = (150, 0.004) if kind == "connect" else (12, 0.06)
    with pytest.MonkeyPatch.context() as patch:
        # An interrupt may come when the client is made and nobody has it yet.
        patch.setattr("engine_client.client.warnings.warn", lambda *_, **__: None)
        report = interrupt_storm(actions[kind], rounds=rounds, longest=longest)
    assert report.interrupted == rounds
    before.check()
    wait_until(lambda: not is_bound(where))
    wait_until(lambda: os.listdir(folder) == [])
    with connecting(where) as starting, MockEngine(where):
        assert starting.result().call_utility("echo", 1) == [1]


# -- engines that restart later -------------------------------------------------------------------


def test_the_handshake_stays_open(where: str) -> None:
    """Long after the start strangers and restarted engines are still served."""
    with connecting(where) as starting, Peers() as strangers:
        with EngineProcess(where, 0):
            client = starting.result()
            assert client.call_utility("echo", 1) == [1]
        wait_until(lambda: states(client) == [False])
        strangers.dealer(where, b"\x05\x00").send(b"\xa1\x66status\x65HELLO")
        with pytest.raises(UtilityCallError, match="dead"):
            client.call_utility("echo", 2)
        with EngineProcess(where, 0, codec="msgpack"):
            wait_until(lambda: states(client) == [True])
            assert client.call_utility("echo", 3) == [3]
            assert client.engines[0].codec == "msgpack"
            assert client.stats.returns == 1
            assert client.stats.stray_messages == 1
