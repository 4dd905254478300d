"""Clients of engines that another process has greeted: only the registration is awaited."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from engine_client import (
    EngineClient,
    EngineDeadError,
    HandshakeError,
    HandshakeTimeout,
    connect_bootstrapped,
)
from engine_client.tools.mock.methods import default_ready
from engine_client.tools.mock_engine import MockEngine
from tests.helpers import BackgroundCall, EngineProcess, run_in_thread, scaled, wait_until
from tests.helpers.leaks import Snapshot
from tests.scenarios.raw import Peers, RawEngine, free_tcp, is_bound, states
from tests.scenarios.rig import address

CODECS = ["cbor", "msgpack"]


class Addresses(NamedTuple):
    input: str
    output: str

    @property
    def options(self) -> dict[str, Any]:
        """What an engine is told."""
        return {"input_address": self.input, "output_address": self.output}


@pytest.fixture(params=["ipc", "tcp"])
def data(request: pytest.FixtureRequest) -> Iterator[Addresses]:
    """Two addresses at which nobody listens."""
    if request.param == "tcp":
        yield Addresses(*free_tcp(2))
    else:
        with address() as one:
            yield Addresses(f"{one}i", f"{one}o")


@contextlib.contextmanager
def starting(data: Addresses, **settings: Any) -> Iterator[BackgroundCall[EngineClient]]:
    """A start in another thread, from the moment at which its addresses are bound."""
    settings = {"connect_timeout": scaled(20), **settings}
    call = run_in_thread(connect_bootstrapped, data.input, data.output, **settings)
    try:
        wait_until(lambda: is_bound(data.output) or call.done)
        yield call
    finally:
        call.join(60)
        with contextlib.suppress(Exception):
            call.result().close()


@pytest.mark.parametrize("codec", CODECS)
def test_engine_processes(data: Addresses, codec: str) -> None:
    """Engines in processes register and serve, in the dialect of their registration."""
    with starting(data, engine_count=2, engine_start_index=3) as begun, contextlib.ExitStack() as s:
        engines = [
            s.enter_context(EngineProcess(index=index, codec=codec, **data.options))
            for index in (3, 4)
        ]
        client = begun.result()
        assert client.call_utility("whoami") == [
            {"index": engine.index, "pid": engine.pid} for engine in engines
        ]
        assert (client.input_address, client.output_address) == data
        assert client.handshake_address is None
        for info in client.engines:
            assert info.codec == codec
            assert info.ready == default_ready(info.index)


def test_engines_of_both_dialects(data: Addresses) -> None:
    """Each engine's dialect is read off its own registration."""
    with (
        starting(data, engine_count=2) as begun,
        MockEngine(index=0, codec="cbor", **data.options),
        MockEngine(index=1, codec="msgpack", **data.options),
    ):
        client = begun.result()
        assert client.call_utility("echo", {"a": b"b"}) == [{"a": b"b"}] * 2
        assert [info.codec for info in client.engines] == CODECS


@pytest.mark.parametrize("codec", CODECS)
def test_an_empty_registration(data: Addresses, codec: Any) -> None:
    """It says nothing, not even its dialect, which must be said then."""
    with starting(data, codec=codec) as begun, RawEngine(codec=codec) as engine:
        engine.connect(*data)
        engine.register(b"")
        client = begun.result()
        assert client.engines[0].codec == codec
        assert client.engines[0].ready == {}
        call = run_in_thread(client.call_utility, "echo", 1)
        engine.answer("echo", "yes")
        assert call.result() == ["yes"]


def test_an_empty_registration_without_a_dialect(data: Addresses) -> None:
    """The start fails at once and says what to say."""
    with starting(data) as begun, RawEngine() as engine:
        engine.connect(*data)
        engine.register(b"")
        error = begun.error(5)
    assert type(error) is HandshakeError
    assert "engine 0" in str(error)
    assert "codec='cbor' or codec='msgpack'" in str(error)
    assert error.missing == (0,)


def test_the_wrong_forced_dialect(data: Addresses) -> None:
    """The start fails at once when an engine speaks another dialect than the forced one."""
    with starting(data, codec="cbor") as begun, RawEngine(codec="msgpack") as engine:
        engine.connect(*data)
        engine.register()
        error = begun.error(5)
    assert type(error) is HandshakeError
    assert "engine 0 speaks msgpack" in str(error)


def test_the_place_among_several_clients(data: Addresses) -> None:
    """Calls carry the client's index, so that replies come to its own output address."""
    with starting(data, client_index=5) as begun, RawEngine() as engine:
        engine.connect(*data)
        engine.register()
        call = run_in_thread(begun.result().call_utility, "echo", 1)
        client_index, call_id, _, _ = engine.next_call()
        assert client_index == 5
        engine.reply(call_id, 1)
        assert call.result() == [1]


def test_two_clients_of_the_same_engines() -> None:
    """Two clients share two engines: each gets its own answers, and each learns of a death."""
    first, second = (Addresses(*free_tcp(2)) for _ in range(2))
    both: dict[str, Any] = {
        "input_address": [first.input, second.input],
        "output_address": [first.output, second.output],
    }
    with (
        starting(first, engine_count=2, client_index=0) as one,
        starting(second, engine_count=2, client_index=1) as other,
        MockEngine(index=0, **both),
        MockEngine(index=1, **both) as mortal,
    ):
        clients = [one.result(), other.result()]
        calls = [
            run_in_thread(client.call_utility, "echo", [number, name])
            for name, client in enumerate(clients)
            for number in range(20)
        ]
        assert [call.result() for call in calls] == [
            [[number, name]] * 2 for name in (0, 1) for number in range(20)
        ]
        assert all(client.stats.late_replies == 0 for client in clients)
        clients[0].call_utility("mock_fault", {"method": "echo", "do": "hold"}, engines=[1])
        waiting = [run_in_thread(client.settle_utility, "echo", "last") for client in clients]
        wait_until(lambda: sum(e.method == "echo" for e in mortal.log) == 42)
        clients[0].call_utility("mock_fault", {"method": "whoami", "do": "die"}, engines=[1])
        clients[1].settle_utility("whoami", engines=[1])
        for call in waiting:
            outcomes = call.result()
            assert outcomes.succeeded == (0,)
            assert isinstance(outcomes.failures[1], EngineDeadError)
        assert [states(client) for client in clients] == [[True, False]] * 2


def test_an_engine_that_restarts(data: Addresses) -> None:
    """A new process registers on the same addresses and serves in the place of the dead one."""
    with starting(data, engine_count=2) as begun, MockEngine(index=0, **data.options):
        with EngineProcess(index=1, **data.options) as first:
            client = begun.result()
            assert client.call_utility("whoami", engines=[1]) == [{"index": 1, "pid": first.pid}]
            first.kill()
            wait_until(lambda: states(client) == [True, False])
        with EngineProcess(index=1, codec="msgpack", **data.options) as second:
            wait_until(lambda: states(client) == [True, True])
            assert client.call_utility("whoami", engines=[1]) == [{"index": 1, "pid": second.pid}]
            assert client.engines[1].codec == "msgpack"
            assert (client.stats.deaths, client.stats.returns) == (1, 1)
            assert client.call_utility("echo", "all") == ["all", "all"]


def test_a_second_process_replaces_the_first(data: Addresses) -> None:
    """Nobody greets here, so a second registration replaces a living engine: who waits is told."""
    with starting(data) as begun, MockEngine(**data.options) as first:
        client = begun.result()
        client.call_utility("mock_fault", {"method": "echo", "do": "hold"})
        call = run_in_thread(client.settle_utility, "echo", 1)
        wait_until(lambda: any(entry.method == "echo" for entry in first.log))
        with MockEngine(codec="msgpack", **data.options):
            assert "replaced" in str(call.result().failures[0])
            wait_until(lambda: client.engines[0].codec == "msgpack")
            assert client.call_utility("echo", 2) == [2]
            assert states(client) == [True]
            first.stop()
            assert first.join(scaled(10))
            assert client.call_utility("echo", 3) == [3]
            assert client.stats.deaths == 1


@pytest.mark.parametrize("coordinator", ["nowhere", "", "tcp://127.0.0.1", "tcp://127.0.0.1:x"])
def test_an_engine_that_names_an_impossible_coordinator_ends_no_client(
    data: Addresses, coordinator: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is told in the log, and the client goes on without one."""
    ready = {"dp_stats_address": coordinator}
    with (
        starting(data, engine_count=2) as begun,
        MockEngine(index=0, **data.options),
        MockEngine(index=1, ready=ready, **data.options),
    ):
        client = begun.result()
        wait_until(lambda: f"coordinator at {coordinator!r}: " in caplog.text)
        assert client.call_utility("echo", 1, timeout=scaled(10)) == [1, 1]
        assert states(client) == [True, True]
        assert not client.closed


# -- starts that fail -----------------------------------------------------------------------------


def test_timeout(data: Addresses) -> None:
    """The error names the engines that have not registered, the address and the limit."""
    with (
        starting(data, engine_count=3, connect_timeout=scaled(0.5)) as begun,
        MockEngine(index=1, **data.options),
    ):
        error = begun.error()
    assert isinstance(error, HandshakeTimeout)
    assert error.missing == (0, 2)
    assert error.stage == "registration"
    text = str(error)
    assert "1 of 3 engines ready" in text
    assert data.input in text
    assert "no registration from engines 0, 2" in text
    assert "earlier client" in text
    assert "connect_timeout" in text


def test_an_engine_of_an_earlier_client(data: Addresses) -> None:
    """An engine registers once in its life: the next client on its addresses is told so."""
    with MockEngine(**data.options):
        with starting(data) as begun:
            assert begun.result().call_utility("echo", 1) == [1]
        began = time.monotonic()
        with pytest.raises(HandshakeTimeout, match="belonged to an earlier client"):
            connect_bootstrapped(*data, connect_timeout=scaled(0.5))
        assert time.monotonic() - began < scaled(2.5)


def test_strangers(data: Addresses) -> None:
    """Unknown identities and garbage are ignored, counted, and named in a time-out."""
    with starting(data, engine_count=2) as begun, Peers() as strangers:
        unknown = strangers.dealer(data.input, b"\x07\x00")
        for frames in ([b"\xa0"], [b""], [b"\xff"], [b"a", b"b"]):
            unknown.send_multipart(frames)
        strangers.dealer(data.input).send(b"GET / HTTP/1.1")
        strangers.push(data.output).send(b"\xff")
        with MockEngine(index=0, **data.options), MockEngine(index=1, **data.options):
            client = begun.result()
            assert client.call_utility("echo", 1) == [1, 1]
            wait_until(lambda: client.stats.stray_messages == 5)
            assert client.stats.malformed_messages == 1
            assert client.stats.deaths == 0
    with starting(data, connect_timeout=scaled(0.3)) as begun, Peers() as strangers:
        strangers.dealer(data.input, b"\x07\x00").send(b"\xa0")
        error = begun.error()
    assert "engine 7" in str(error)


def test_failed_starts_leave_nothing(data: Addresses) -> None:
    """Twenty starts that fail, then a good one on the same addresses."""
    before = Snapshot()
    for _ in range(20):
        with pytest.raises(HandshakeTimeout):
            connect_bootstrapped(*data, connect_timeout=0.01)
    before.check()
    with starting(data) as begun, MockEngine(**data.options):
        assert begun.result().call_utility("echo", 1) == [1]


@pytest.mark.parametrize("wrong", [-1, True, 1.5, "0"])
def test_impossible_client_indices(data: Addresses, wrong: Any) -> None:
    """A client index that cannot be meant is refused before anything is bound."""
    with pytest.raises((TypeError, ValueError), match="client_index"):
        connect_bootstrapped(*data, client_index=wrong)
    assert not is_bound(data.input)
