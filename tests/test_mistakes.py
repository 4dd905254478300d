"""Ten likely mistakes of a beginner, and what the client says to each.

What is asserted are the words that help: what is wrong, where, and what to do instead.
"""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

import engine_client
from engine_client import (
    ClientClosedError,
    EncodeError,
    EngineClient,
    EngineDeadError,
    HandshakeError,
    HandshakeTimeout,
    UtilityCall,
    UtilityCallError,
    connect,
    connect_bootstrapped,
    launch,
)
from engine_client.dispatch import bootstrap
from engine_client.tools.mock_engine import MockEngine
from tests.helpers import EngineProcess, engine_processes, run_in_thread, scaled, wait_until
from tests.helpers.scripts import run_script

E = TypeVar("E", bound=BaseException)


def complaint(kind: type[E], action: Callable[[], object], *words: str) -> E:
    """Return the error of exactly this class that ``action`` raises, after reading its text.

    It must be one readable line that has all these words.
    """
    with pytest.raises(kind) as caught:
        action()
    assert type(caught.value) is kind
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 500
    assert " at 0x" not in text
    for word in words:
        assert word in text, text
    return caught.value


@pytest.fixture
def address(tmp_path: Path) -> str:
    """An address at which nobody is."""
    return f"ipc://{tmp_path}/h"


@pytest.fixture
def tcp_address() -> str:
    """A TCP address at which nobody is."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture
def client(address: str) -> Iterator[EngineClient]:
    """A client of two engines."""
    with (
        MockEngine(address, 0),
        MockEngine(address, 1),
        connect(address, engine_count=2, connect_timeout=scaled(20)) as made,
    ):
        yield made


def quickly(address: str, **settings: Any) -> Callable[[], EngineClient]:
    """A connect() that soon gives up, as a beginner's that waits in vain does late."""
    return lambda: connect(address, connect_timeout=0.2, **settings)


# -- 1. A wrong address --------------------------------------------------------------------------


def test_address_without_scheme_is_told_the_one_that_was_meant() -> None:
    """A host and a port alone are answered with the address that they should have been."""
    complaint(ValueError, quickly("localhost:5570"), "did you mean 'tcp://localhost:5570'?")


@pytest.mark.parametrize("wrong", ["http://localhost:5570", "5570", "", "inproc://x", "ipc://"])
def test_address_of_another_kind(wrong: str) -> None:
    """What is no tcp or ipc address is answered with one of each."""
    complaint(ValueError, quickly(wrong), "tcp://127.0.0.1:5570", "ipc:///path", repr(wrong))


@pytest.mark.parametrize("wrong", ["tcp://localhost", "tcp://:5570", "tcp://127.0.0.1:99999"])
def test_tcp_address_without_a_usable_host_and_port(wrong: str) -> None:
    """A TCP address has a host and a port, and the error shows how they look."""
    complaint(ValueError, quickly(wrong), "host and a port", "tcp://127.0.0.1:5570", repr(wrong))


@pytest.mark.parametrize("wrong", [None, 5570, b"tcp://127.0.0.1:5570"])
def test_address_that_is_no_string(wrong: Any) -> None:
    """A port number, bytes or an unset variable are answered with what an address looks like."""
    complaint(TypeError, quickly(wrong), "string like 'tcp://127.0.0.1:5570'", repr(wrong))


def test_address_of_another_machine() -> None:
    """The client listens: an address that is not this machine's is told so."""
    error = complaint(
        HandshakeError,
        quickly("tcp://192.0.2.1:5570"),
        "tcp://192.0.2.1:5570",
        "the engines connect to it",
        "this machine's own",
    )
    assert error.stage == "bind"


def test_address_in_a_directory_that_does_not_exist(tmp_path: Path) -> None:
    """An ipc file needs its directory."""
    complaint(HandshakeError, quickly(f"ipc://{tmp_path}/no/h"), "make the directory first")


def test_ipc_path_that_is_too_long() -> None:
    """The system's limit for the path of an ipc file is named."""
    complaint(HandshakeError, quickly(f"ipc:///{'x' * 120}"), "about 100 characters")


def test_address_on_every_interface() -> None:
    """A wildcard needs the host that engines connect to, and is warned of."""
    complaint(ValueError, quickly("tcp://*:5570"), "every network interface", "advertised_host")


def test_bootstrapped_client_needs_both_addresses() -> None:
    """Addresses that somebody else told the engines cannot be left out."""
    missing: Any = None
    complaint(
        TypeError,
        lambda: connect_bootstrapped("ipc:///nowhere/x", missing, connect_timeout=0.2),
        "the output address must be a string",
    )


# -- 2. Engines that were not started --------------------------------------------------------------


def test_engines_not_started(address: str) -> None:
    """The time-out says who is missing, where they should have come to, and what to do."""
    error = complaint(
        HandshakeTimeout,
        quickly(address, engine_count=2),
        "0 of 2 engines ready",
        address,
        "no HELLO from engines 0, 1",
        "start",
        "restart",
        "connect_timeout",
    )
    assert error.missing == (0, 1)
    assert error.stage == "HELLO"


def test_log_says_for_whom_the_start_waits(
    address: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At each interval (30 s) of the start, one line names the engines that are missing."""
    assert bootstrap.PROGRESS_INTERVAL == 30.0
    monkeypatch.setattr(bootstrap, "PROGRESS_INTERVAL", 0.01)
    starting = run_in_thread(connect, address, engine_count=2, connect_timeout=scaled(20))
    wait_until(lambda: len(caplog.messages) >= 2, what="two lines in the log")
    nobody = caplog.messages[0]
    assert "0 of 2 engines ready" in nobody
    assert f"on {address}" in nobody
    assert "waiting for HELLO from engines 0, 1 (not started, or told another address?)" in nobody
    with MockEngine(address, 0):
        wait_until(lambda: "1 of 2 engines ready" in caplog.messages[-1])
        assert "waiting for HELLO from engine 1" in caplog.messages[-1]
        with MockEngine(address, 1):
            starting.result().close()
    assert all(record.levelno == logging.WARNING for record in caplog.records)


def test_engine_that_has_not_loaded_its_model_yet(address: str) -> None:
    """An engine that was greeted and says nothing more is told apart from one that never came."""
    with MockEngine(address, 0, faults=[{"method": "REGISTRATION", "do": "stop_answering"}]):
        error = complaint(
            HandshakeTimeout,
            lambda: connect(address, connect_timeout=scaled(1)),
            "no READY and registration from engine 0",
            "loading its model",
            "log",
            "restart",
        )
    assert error.missing == (0,)


def test_engine_that_served_an_earlier_client(tcp_address: str) -> None:
    """An engine says HELLO once in its life; a second client is told to restart it."""
    with EngineProcess(tcp_address, 0):
        connect(tcp_address, connect_timeout=scaled(20)).close()
        complaint(HandshakeTimeout, quickly(tcp_address), "HELLO only once", "restart")


def test_launched_command_that_does_not_exist() -> None:
    """A command that cannot be started is an error at once, and the system's reason is in it."""
    complaint(
        HandshakeError,
        lambda: launch(1, command=["no-such-engine", "{address}"]),
        "engine 0 did not start",
        "no-such-engine",
    )


def test_launched_engine_that_ends_at_once() -> None:
    """A launched engine that ends is an error at once, with its exit code and last words."""
    code = "import sys; sys.exit('no GPU found')"
    complaint(
        HandshakeError,
        lambda: launch(1, command=[sys.executable, "-c", code]),
        "engine 0 did not start",
        "exited with code 1",
        "no GPU found",
    )


def test_launch_command_as_one_string() -> None:
    """A command line is a list of words."""
    command: Any = "vllm serve"
    complaint(TypeError, lambda: launch(1, command=command), "list of words", "shlex.split()")


# -- 3. A wrong count ------------------------------------------------------------------------------


def test_more_engines_expected_than_there_are(address: str) -> None:
    """With some engines ready and none other coming, the error doubts the count as well."""
    with MockEngine(address, 0), MockEngine(address, 1):
        error = complaint(
            HandshakeTimeout,
            lambda: connect(address, engine_count=3, connect_timeout=scaled(1)),
            "2 of 3 engines ready",
            "no HELLO from engine 2",
            "fewer than engine_count=3",
        )
    assert error.missing == (2,)


def test_fewer_engines_expected_than_there_are(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine beyond the count is ignored, and the log names it and the setting."""
    with (
        MockEngine(address, 0),
        MockEngine(address, 1),
        connect(address, engine_count=1, connect_timeout=scaled(20)) as client,
    ):
        wait_until(lambda: client.stats.stray_messages)
        wait_until(lambda: caplog.messages)
        assert client.call_utility("echo", 1) == [1]
    assert "engine 1, but this client has engine 0 (see engine_count)" in caplog.text


def test_engine_outside_the_range_is_named_in_the_timeout(address: str) -> None:
    """Indices that begin elsewhere show up in the error as who came instead."""
    with MockEngine(address, 0):
        complaint(
            HandshakeTimeout,
            lambda: connect(address, engine_start_index=1, connect_timeout=scaled(1)),
            "no HELLO from engine 1",
            "ignored meanwhile",
            "from engine 0",
        )


@pytest.mark.parametrize("wrong", [0, -1])
def test_count_below_one(address: str, wrong: int) -> None:
    """There is at least one engine."""
    complaint(ValueError, quickly(address, engine_count=wrong), "engine_count", "1", str(wrong))


@pytest.mark.parametrize("wrong", ["4", 2.0, True])
def test_count_that_is_no_integer(address: str, wrong: object) -> None:
    """A count is an integer."""
    complaint(TypeError, quickly(address, engine_count=wrong), "integer", repr(wrong))


# -- 4. msgspec is missing ---------------------------------------------------------------------


WITHOUT_MSGSPEC = """
import sys
sys.modules["msgspec"] = None  # importing it fails, as where only what is required is installed
from engine_client import connect, launch
try:
    {action}
except Exception as error:
    print(type(error).__name__, error, sep=": ", end="")
"""


def test_msgpack_asked_for_without_its_package(address: str) -> None:
    """Asking for msgpack fails at once, with the command that installs what it needs."""
    action = f"connect({address!r}, codec='msgpack', connect_timeout={scaled(20)})"
    assert run_script("-c", WITHOUT_MSGSPEC.format(action=action)) == (
        "ModuleNotFoundError: the msgpack dialect (vLLM engines) needs the package msgspec: "
        "pip install 'engine-client[vllm]'"
    )


def test_vllm_engine_without_the_package() -> None:
    """An engine that says HELLO in msgpack fails the start at once, with that command."""
    words = [sys.executable, "-m", "engine_client.tools.mock_engine", "--codec", "msgpack"]
    command = [*words, "--connect", "{address}", "--index", "{index}"]
    action = f"launch(1, command={command!r}, connect_timeout={scaled(20)})"
    printed = run_script("-c", WITHOUT_MSGSPEC.format(action=action))
    assert printed.startswith("HandshakeError: engine 0 speaks msgpack, as vLLM does: ")
    assert printed.endswith("pip install 'engine-client[vllm]'")


# -- 5. A wrong forced codec -----------------------------------------------------------------------


@pytest.mark.parametrize(("forced", "spoken"), [("cbor", "msgpack"), ("msgpack", "cbor")])
def test_forced_codec_that_the_engine_does_not_speak(
    address: str, forced: Any, spoken: str
) -> None:
    """The start fails at once, names both dialects and the setting to leave out."""
    with MockEngine(address, 0, codec=spoken):
        complaint(
            HandshakeError,
            lambda: connect(address, codec=forced, connect_timeout=scaled(20)),
            f"engine 0 speaks {spoken}",
            f"codec={forced!r}",
            "leave codec out",
        )


def test_codec_that_does_not_exist(address: str) -> None:
    """The codecs that exist are listed."""
    complaint(ValueError, quickly(address, codec="json"), "'auto'", "'cbor'", "'msgpack'", "json")


# -- 6. An address in use --------------------------------------------------------------------------


def test_tcp_address_in_use(tcp_address: str) -> None:
    """A second client on a TCP address is told that somebody listens there."""
    with MockEngine(tcp_address, 0), connect(tcp_address, connect_timeout=scaled(20)):
        error = complaint(
            HandshakeError,
            quickly(tcp_address),
            tcp_address,
            "Address already in use",
            "started twice?",
        )
    assert error.stage == "bind"


def test_ipc_address_in_use_is_not_taken_over(address: str) -> None:
    """A second client on an ipc path is refused, and the first keeps working."""
    with MockEngine(address, 0), connect(address, connect_timeout=scaled(20)) as first:
        complaint(HandshakeError, quickly(address), address, "already in use", "started twice?")
        assert first.call_utility("echo", "undisturbed") == ["undisturbed"]


# -- 7. Started twice ----------------------------------------------------------------------------


def test_engine_started_twice(address: str, caplog: pytest.LogCaptureFixture) -> None:
    """A second engine of the same index waits; the log says so, and the first keeps working."""
    with MockEngine(address, 0), connect(address, connect_timeout=scaled(20)) as client:
        (before,) = client.call_utility("whoami")
        with engine_processes(address, 1):
            wait_until(lambda: caplog.messages, what="the warning")
            assert client.call_utility("whoami") == [before]
    assert "engine 0 is alive, but another process says HELLO under its index" in caplog.text


def test_client_made_by_its_class() -> None:
    """The class is not how a client is made; the functions that make one are named."""
    where: Any = "tcp://127.0.0.1:5570"
    complaint(TypeError, lambda: EngineClient(where), "connect()", "launch()")


# -- 8. A timeout that is negative or a string -----------------------------------------------------


@pytest.mark.parametrize("wrong", [-1, -0.001, float("-inf"), float("nan")])
def test_timeout_that_is_negative_or_no_number(client: EngineClient, wrong: float) -> None:
    """The error says what a timeout may be; nothing is sent."""
    sent = client.stats.sent
    for method in (client.call_utility, client.settle_utility, client.call_utility_consensus):
        complaint(
            ValueError,
            lambda method=method: method("echo", 1, timeout=wrong),  # type: ignore[misc]
            "timeout must be 0 or more seconds, or None for no limit",
        )
    assert client.stats.sent == sent


@pytest.mark.parametrize("wrong", ["5", True, [5], b"1"])
def test_timeout_that_is_no_number(client: EngineClient, wrong: Any) -> None:
    """The error names the value and its type; nothing is sent."""
    sent = client.stats.sent
    complaint(
        TypeError,
        lambda: client.call_utility("echo", 1, timeout=wrong),
        "timeout must be a number of seconds or None for no limit",
        f"{wrong!r} ({type(wrong).__name__})",
    )
    assert client.stats.sent == sent


@pytest.mark.parametrize("name", ["timeout", "close_timeout", "slow_call_warning"])
def test_settings_that_are_timeouts_are_named(address: str, name: str) -> None:
    """The setting that is wrong is the one that the error names."""
    complaint(ValueError, quickly(address, **{name: -1}), f"{name} must be")
    complaint(TypeError, quickly(address, **{name: "5"}), f"{name} must be", "'5' (str)")


def test_close_with_a_wrong_timeout_closes_nothing(client: EngineClient) -> None:
    """A wrong argument is refused before anything happens."""
    complaint(ValueError, lambda: client.close(timeout=-1), "timeout must be 0 or more")
    assert not client.closed


# -- 9. Arguments passed as one list -------------------------------------------------------------


def test_name_and_arguments_as_one_list(client: EngineClient) -> None:
    """The error shows the call as it should be written."""
    wrong: Any = ["echo", "hello"]
    complaint(
        TypeError, lambda: client.call_utility(wrong), "one by one", "call_utility('echo', 'hello')"
    )


def test_arguments_as_one_list_where_the_engine_refuses_their_number(client: EngineClient) -> None:
    """A failure for a wrong number of arguments gets a note that shows them passed one by one."""
    with pytest.raises(UtilityCallError) as caught:
        client.call_utility("whoami", ["a", 7])
    assert "too many arguments" in str(caught.value)
    (note,) = caught.value.__notes__
    assert "call_utility('whoami', 'a', 7)" in note


def test_one_list_that_fails_for_another_reason_gets_no_note(client: EngineClient) -> None:
    """The note is not added to a failure that has nothing to do with it."""
    fault = {"method": "echo", "do": "fail", "message": "out of memory"}
    client.call_utility("mock_fault", fault)
    with pytest.raises(UtilityCallError) as caught:
        client.call_utility("echo", ["a", 7])
    assert not hasattr(caught.value, "__notes__")


def test_worker_arguments_as_a_string(client: EngineClient) -> None:
    """A string is not a sequence of arguments, and is answered with one that holds it."""
    complaint(
        TypeError, lambda: client.collective_rpc("echo", "hello"), "did you mean args=('hello',)?"
    )


def test_undo_with_a_bare_argument() -> None:
    """The arguments of an undo are a tuple."""
    bare: Any = 7
    complaint(TypeError, lambda: UtilityCall("remove_lora", bare), "did you mean (7,)?")


def test_undo_that_is_no_call(client: EngineClient) -> None:
    """The error shows how an undo is written."""
    wrong: Any = ("remove_lora", 7)
    complaint(
        TypeError,
        lambda: client.call_utility("echo", 1, compensate=wrong),
        "UtilityCall('remove_lora', (7,))",
    )


def test_one_engine_as_a_bare_index(client: EngineClient) -> None:
    """Targets are a sequence; a bare index is answered with the list that holds it."""
    wrong: Any = 1
    complaint(
        TypeError,
        lambda: client.call_utility("echo", 1, engines=wrong),
        "did you mean engines=[1]?",
    )


def test_unknown_engine(client: EngineClient) -> None:
    """A target that does not exist is answered with those that do."""
    complaint(
        ValueError,
        lambda: client.call_utility("echo", 1, engines=[2]),
        "engine 2",
        "this client has engines 0, 1",
    )


def test_argument_that_cannot_be_sent(client: EngineClient) -> None:
    """The error names the path to it and what can be sent instead."""
    complaint(
        EncodeError,
        lambda: client.call_utility("echo", {"a": [1, object()]}),
        "args[0]['a'][1]",
        "object",
        "send None, bool, int",
    )


# -- 10. Use after close ---------------------------------------------------------------------------


def test_use_after_close(client: EngineClient) -> None:
    """Every call says that the client is closed; what it saw can still be read."""
    client.close()
    for use in (
        lambda: client.call_utility("echo", 1),
        lambda: client.settle_utility("echo", 1),
        lambda: client.collective_rpc("echo", [1]),
        client.is_sleeping,
    ):
        error = complaint(ClientClosedError, use, "the client is closed", "make a new one")
        assert error.outcomes is None
    assert client.closed
    assert client.closing_cause is None
    assert client.pending_utility_calls == 0
    assert [engine.index for engine in client.engines] == [0, 1]
    assert repr(client) == "<EngineClient closed>"


def test_close_twice(client: EngineClient) -> None:
    """Closing again does nothing, in every way that there is."""
    with client:
        client.close()
        client.close()
        client.close(timeout=0)
    assert client.closed


def test_closed_under_a_waiting_call(client: EngineClient) -> None:
    """A call that waits when the client is closed says for whom it was still waiting."""
    client.call_utility("mock_fault", {"method": "echo", "do": "hold"}, engines=[1])
    waiting = run_in_thread(client.call_utility, "echo", 1)
    wait_until(lambda: client.engines[1].in_flight and not client.engines[0].in_flight)
    client.close()
    error = waiting.error()
    assert isinstance(error, ClientClosedError)
    assert str(error) == "the client was closed before engine 1 replied to echo (see .outcomes)"
    assert error.outcomes is not None
    assert error.outcomes.succeeded == (0,)


def test_living_engines_when_none_lives(client: EngineClient) -> None:
    """A call to the living engines when all are dead fails with the death of each."""
    for index in (0, 1):
        client.call_utility("mock_fault", {"method": "echo", "do": "die"}, engines=[index])
    assert not client.settle_utility("echo", 1).succeeded
    with pytest.raises(UtilityCallError) as caught:
        client.call_utility("echo", 2, engines="alive")
    failures = caught.value.outcomes.failures
    assert [type(error) for error in failures.values()] == [EngineDeadError] * 2
    assert caught.value.outcomes.may_have_run == ()
    with pytest.raises(UtilityCallError):
        client.is_sleeping(engines="alive")


def test_every_error_of_the_tree_is_public() -> None:
    """What a beginner sees in a traceback can be imported from the package."""
    for name in ("HandshakeTimeout", "ClientClosedError", "EngineDeadError", "EncodeError"):
        assert name in engine_client.__all__
