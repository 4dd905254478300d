"""The reference engine speaks the protocol, and does wrong what it is told to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from engine_client.engines import engine_id
from engine_client.errors import ProtocolError
from engine_client.tools.faults import FaultPlan, FaultRule
from engine_client.tools.mock.methods import EngineModel, default_ready
from engine_client.tools.mock_engine import MockEngine
from engine_client.wire.codec import codec_named, dialect_of_map, peek_reply
from engine_client.wire.messages import (
    DEAD_SENTINEL,
    Init,
    Outputs,
    RequestType,
    UtilityReply,
    handshake_message,
)
from tests.helpers import EngineProcess, scaled, wait_until
from tests.helpers.processes import ROOT
from tests.tools.peer import KINDS, EngineKind, Peer, endpoint, thread_engine

CODECS = ["cbor", "msgpack"]
AFTER_STOP = 2.5
"""Seconds that a process may need to end after a signal (scaled)."""

kinds = pytest.mark.parametrize("kind", KINDS, ids=["thread", "process"])
codecs = pytest.mark.parametrize("codec", CODECS)


@pytest.fixture
def peer() -> Iterator[Peer]:
    with Peer() as one:
        yield one


def field(entry: Any, name: str) -> Any:
    """Read a log entry of a thread (``Received``) or of a process (a map)."""
    return entry[name] if isinstance(entry, dict) else getattr(entry, name)


def methods_of(log: Any) -> list[Any]:
    return [field(entry, "method") for entry in log]


# -- startup ---------------------------------------------------------------------------------------


@kinds
@codecs
@pytest.mark.parametrize("tcp", [False, True], ids=["ipc", "tcp"])
def test_handshake_and_call(kind: EngineKind, codec: str, tcp: bool) -> None:
    """An engine in a thread or a process starts and answers, in both dialects, on ipc and tcp."""
    with Peer(codec, tcp=tcp) as peer, kind(peer.address, 0, codec=codec):
        registration = peer.complete(0)[0]
        assert dict(registration.ready) == default_ready(0)
        assert peer.call("echo", {"a": [1, b"x", None, 1.5]}) == {"a": [1, b"x", None, 1.5]}


@codecs
def test_startup_order(codec: str) -> None:
    """HELLO, INIT, registration, READY, in this engine's dialect, 25 keys in vLLM's order."""
    with Peer(codec) as peer, thread_engine(peer.address, 258, codec=codec):
        identity, hello = peer.handshake.recv_multipart()
        assert identity == b"\x02\x01"
        assert dialect_of_map(hello) == codec
        assert peer.codec.decode(hello) == {"status": "HELLO", "local": False, "headless": True}
        assert not peer.input.poll(0)
        init = Init(peer.init.inputs, peer.init.outputs, frontend_stats_publish_address="ipc://s")
        peer.handshake.send_multipart([identity, peer.codec.encode(init.to_plain())])
        identity, registration = peer.input.recv_multipart()
        assert identity == b"\x02\x01"
        assert dialect_of_map(registration) == codec
        ready = peer.codec.decode(registration)
        assert list(ready) == list(default_ready(258))
        assert len(ready) == 25
        assert ready["dp_stats_address"] == "ipc://s"
        assert ready["data_parallel_rank"] == 258
        _, frame = peer.handshake.recv_multipart()
        assert type(handshake_message(peer.codec.decode(frame))).__name__ == "Ready"


def test_local_engine_says_so(peer: Peer) -> None:
    """An engine that the client launched says so in its HELLO."""
    with thread_engine(peer.address, local=True):
        assert peer.greet() == {"status": "HELLO", "local": True, "headless": False}


@kinds
def test_bootstrapped(kind: EngineKind, peer: Peer) -> None:
    """With ready-made data addresses it only registers."""
    with kind(index=3, input_address=endpoint(peer.input), output_address=endpoint(peer.output)):
        identity, _ = peer.input.recv_multipart()
        assert identity == engine_id(3)
        assert peer.call("whoami", index=3)["index"] == 3
        assert not peer.handshake.poll(0)


def test_two_clients(peer: Peer) -> None:
    """It registers with every client and answers on the output of the one that asked."""
    with Peer() as other:
        inputs = [endpoint(peer.input), endpoint(other.input)]
        outputs = [endpoint(peer.output), endpoint(other.output)]
        with thread_engine(input_address=inputs, output_address=outputs):
            peer.input.recv_multipart()
            other.input.recv_multipart()
            for client, one in enumerate((peer, other)):
                call = [client, 5, "echo", [client]]
                one.send(RequestType.UTILITY, one.codec.encode(call))
                assert one.reply() == (5, None, client)


def test_several_engines(peer: Peer) -> None:
    """Each engine answers for itself."""
    with thread_engine(peer.address, 0), thread_engine(peer.address, 1):
        peer.complete(0, 1)
        for index in (1, 0, 1):
            assert peer.call("whoami", index=index) == {"index": index, "pid": os.getpid()}


@kinds
def test_no_init(kind: EngineKind, peer: Peer) -> None:
    """Without an INIT it gives up after its limit, with exit code 1."""
    if kind is thread_engine:
        with thread_engine(peer.address, init_timeout=0.05) as engine:
            assert engine.join(scaled(10))
            assert engine.exit_code == 1
    else:
        with EngineProcess(peer.address, arguments=["--init-timeout", "0.05"]) as process:
            assert process.wait() == 1
            assert process.stderr == "engine 0: no INIT within 0.05 s\n"


@pytest.mark.parametrize("frames", [[b"\xff"], [b"\xa0"], [b"\xa0", b""]])
def test_bad_init(peer: Peer, frames: list[bytes], capfd: pytest.CaptureFixture[str]) -> None:
    """An INIT that it cannot read ends it with exit code 1 and a reason."""
    with thread_engine(peer.address) as engine:
        identity, _ = peer.handshake.recv_multipart()
        peer.handshake.send_multipart([identity, *frames])
        assert engine.join(scaled(10))
        assert engine.exit_code == 1
    assert capfd.readouterr().err.startswith("engine 0: bad INIT: ")


def test_hello_waits_for_the_client(tmp_path: Path) -> None:
    """An engine that is there first says HELLO as soon as the client binds."""
    with Peer() as peer:
        address = peer.ipc("later")
        with thread_engine(address):
            late = peer.context.socket(zmq.ROUTER)
            late.rcvtimeo = peer.limit_ms
            late.bind(address)
            assert late.recv_multipart()[0] == engine_id(0)


def test_another_identity(peer: Peer) -> None:
    """It can play a stray peer."""
    with thread_engine(peer.address, identity=b"stray"):
        assert peer.handshake.recv_multipart()[0] == b"stray"


def test_addresses_are_checked() -> None:
    """Handshake and data addresses exclude each other, and the data addresses come together."""
    wrong_ones: list[dict[str, Any]] = [
        {},
        {"address": "ipc://h", "input_address": "ipc://i", "output_address": "ipc://o"},
        {"address": "ipc://h", "output_address": "ipc://o"},
        {"input_address": "ipc://i"},
    ]
    for wrong in wrong_ones:
        with pytest.raises(ValueError, match="give a handshake address, or"):
            MockEngine(**wrong)


# -- utility calls ---------------------------------------------------------------------------------


@codecs
def test_replies_are_laid_out_as_the_protocol_says(codec: str) -> None:
    """The hand-made layout of a reply is that of the wire layer."""
    with Peer(codec) as peer, thread_engine(peer.address, 0, codec=codec):
        peer.complete()
        call_id = peer.ask("is_sleeping")
        frame = peer.codec.decode(peer.output.recv())
        expected = Outputs(timestamp=frame[3], utility=UtilityReply(call_id, None, False))
        assert frame == expected.to_plain()
        assert abs(frame[3] - time.monotonic()) < scaled(10)


def test_methods(peer: Peer) -> None:
    """The methods of a fresh engine answer what an idle one does."""
    with thread_engine(peer.address):
        peer.complete()
        assert peer.call("is_sleeping") is False
        assert peer.call("is_scheduler_paused") is False
        assert peer.call("collective_rpc", "check_health", None, [], None) == [None, None]
        assert peer.call("collective_rpc", "worker_index", 1.5, [], {}) == [0, 1]
        assert peer.call("collective_rpc", "echo", None, [[7]], None) == [[7], [7]]
        assert peer.call("collective_rpc", "echo", None, [], {"value": 7}) == [7, 7]


@pytest.mark.parametrize(
    ("call", "detail"),
    [
        (("nope",), "'EngineCoreProc' object has no attribute 'nope'"),
        (("methods",), "'EngineCoreProc' object has no attribute 'methods'"),
        (("__init__", 3), "'EngineCoreProc' object has no attribute '__init__'"),
        (("is_sleeping", 1), ""),
        (("echo", 1, 2), ""),
        (("echo",), "EngineModel.echo() missing 1 required positional argument: 'value'"),
        (
            ("collective_rpc", "nope", None, [], None),
            "Worker failed with error ''Worker' object has no attribute 'nope'', please check the "
            "stack trace above for the root cause",
        ),
    ],
)
def test_failure_texts(peer: Peer, call: tuple[Any, ...], detail: str) -> None:
    """Failures have vLLM's texts; too many arguments have none after the colon."""
    with thread_engine(peer.address):
        peer.complete()
        assert peer.failure(*call) == f"Call to {call[0]} method failed: {detail}"
        assert peer.call("echo", 1) == 1


def test_odd_calls_do_not_end_it(peer: Peer) -> None:
    """Arguments that are no array, and a method that is no string, are failures."""
    with thread_engine(peer.address):
        peer.complete()
        calls: list[list[Any]] = [[0, 1, "echo", None], [0, 2, 7, []], [0, 3, None, []]]
        for call in calls:
            peer.send(RequestType.UTILITY, peer.codec.encode(call))
            got, failure, _ = peer.reply()
            assert got == call[1]
            assert failure is not None


def test_own_methods_and_model(peer: Peer) -> None:
    """A test gives an engine more methods, by a function or by a model; sets come as arrays."""

    class Model(EngineModel):
        def compile(self, seconds: float) -> str:
            return f"engine {self.index} compiled for {seconds:g} s"

    with thread_engine(
        peer.address, 2, model=Model(2), methods={"loras": lambda: {5}}, ready={"max_loras": 9}
    ):
        ready = peer.complete(2)[2].ready
        assert ready["max_loras"] == 9
        assert peer.call("compile", 65.0, index=2) == "engine 2 compiled for 65 s"
        assert peer.call("loras", index=2) == [5]


def test_deep_arguments_come_back(peer: Peer) -> None:
    """What may be sent as an argument can also be echoed."""
    value: Any = 1
    for _ in range(99):
        value = [value]
    with thread_engine(peer.address):
        peer.complete()
        assert peer.call("echo", value) == value


# -- what a real engine does with nonsense ---------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        (RequestType.UTILITY, b"\xff"),
        (RequestType.UTILITY, b"\x83\x00\x01\x02"),
        (RequestType.UTILITY, b"\x01"),
        (RequestType.ADD, b"\xff"),
        (b"\x09", b"\x80"),
        (b"", b"\x80"),
    ],
)
@pytest.mark.parametrize("faults", [(), [FaultRule("never", "drop")]], ids=["plain", "faults"])
def test_malformed_message_leaves_it_deaf(
    peer: Peer, kind: bytes, payload: bytes, faults: Any
) -> None:
    """A message that it cannot read closes its input; the process lives on."""
    with thread_engine(peer.address, faults=faults) as engine:
        peer.complete()
        monitor = peer.disconnections(peer.input)
        peer.send(kind, payload)
        monitor.recv_multipart()
        wait_until(lambda: not peer.reaches())
        assert not engine.join(0)


def test_request_without_payload_leaves_it_deaf(peer: Peer) -> None:
    """So does a message of one frame."""
    with thread_engine(peer.address):
        peer.complete()
        monitor = peer.disconnections(peer.input)
        peer.input.send_multipart([engine_id(0), RequestType.UTILITY])
        monitor.recv_multipart()


@pytest.mark.parametrize("client", [1, "x"])
def test_unknown_client_index_leaves_it_mute(peer: Peer, client: Any) -> None:
    """A client index beyond its outputs closes its output; it goes on receiving."""
    with thread_engine(peer.address) as engine:
        peer.complete()
        monitor = peer.disconnections(peer.output)
        peer.send(RequestType.UTILITY, peer.codec.encode([client, 1, "echo", [1]]))
        monitor.recv_multipart()
        peer.ask("echo", 2)
        wait_until(lambda: len(engine.log) == 2)


def test_unencodable_result_leaves_it_mute(peer: Peer, capfd: pytest.CaptureFixture[str]) -> None:
    """So does a result that cannot be encoded."""
    with thread_engine(peer.address, methods={"spec": object}):
        peer.complete()
        monitor = peer.disconnections(peer.output)
        peer.ask("spec")
        monitor.recv_multipart()
    assert "cannot send what the method returned" in capfd.readouterr().err


def test_survives_a_client_restart(peer: Peer) -> None:
    """It reconnects to a new client on the same addresses, which gets what nobody heard."""
    with thread_engine(peer.address, faults=[FaultRule("echo", "hold", occurrence=1)]):
        init = peer.init
        peer.complete()
        held = peer.ask("echo", "held")
        peer.call("is_sleeping")
        peer.close_data()
        peer.bind_input(init.inputs[0])
        wait_until(peer.reaches)
        peer.ask("mock_release")
        peer.bind_output(init.outputs[0])
        assert peer.reply()[2] == "reached"
        assert peer.reply() == (held, None, "held")
        assert not peer.input.poll(0), "it registers only once"


# -- log and remote control ------------------------------------------------------------------------


@kinds
@codecs
def test_log(kind: EngineKind, codec: str) -> None:
    """It logs every message that it received with its time, its remote control excepted."""
    faults = [FaultRule("OUTPUTS", "drop").to_plain()]
    with Peer(codec) as peer, kind(peer.address, codec=codec, faults=faults) as engine:
        peer.complete()
        first = peer.ask("echo", 1)
        peer.reply()
        request = peer.add("r1", [1, 2], options={"min_tokens": 1})
        peer.send(RequestType.ABORT, peer.codec.encode(["r1"]))
        peer.send(RequestType.START_DP_WAVE, peer.codec.encode([0, 1]))
        peer.call("echo", b"x" * 20_000)
        log = peer.call("mock_log")
        parts = [(entry["type"], entry["method"], entry["args"]) for entry in log]
        assert parts == [
            ("UTILITY", "echo", [1]),
            ("ADD", None, request),
            ("ABORT", None, ["r1"]),
            ("START_DP_WAVE", None, [0, 1]),
            ("UTILITY", None, None),  # too large to keep
        ]
        assert log[0]["call_id"] == first
        times = [entry["time"] for entry in log]
        assert times == sorted(times)
        assert [field(entry, "type") for entry in engine.log] == [part[0] for part in parts]


def test_log_shows_what_could_not_be_read(peer: Peer) -> None:
    """An undecodable message is in the log too."""
    with thread_engine(peer.address) as engine:
        peer.complete()
        peer.send(b"\x09", b"\xff")
        wait_until(lambda: [entry.type for entry in engine.log] == ["UNKNOWN"])


def test_log_can_be_off(peer: Peer) -> None:
    """Without a log nothing is kept."""
    with thread_engine(peer.address, keep_log=False) as engine:
        peer.complete()
        assert peer.call("echo", 1) == 1
        assert peer.call("mock_log") == []
        assert engine.log == []


def test_remote_control(peer: Peer) -> None:
    """Faults come and go over the wire; the remote control itself is exempt from them."""
    with thread_engine(peer.address) as engine:
        peer.complete()
        rule = FaultRule("*", "fail", message="told to", occurrence=2)
        assert peer.call("mock_fault", rule.to_plain()) is None
        assert peer.call("mock_log") == []
        assert peer.call("echo", 1) == 1
        assert peer.failure("echo", 2) == "Call to echo method failed: told to"
        assert peer.call("echo", 3) == 3
        assert list(engine.faults) == [rule]
        assert peer.call("mock_clear") is None
        assert peer.call("echo", 4) == 4
        assert "no fault 'explode' at echo" in peer.failure(
            "mock_fault", {"method": "echo", "do": "explode"}
        )


# -- faults ----------------------------------------------------------------------------------------


@kinds
@codecs
def test_faults_on_replies(kind: EngineKind, codec: str) -> None:
    """Each fault on a reply does what it says, to the one call that it names."""
    faults = [
        {"method": "echo", "do": "drop", "occurrence": 1},
        {"method": "echo", "do": "duplicate", "occurrence": 2},
        {"method": "echo", "do": "unknown_id", "occurrence": 3},
        {"method": "echo", "do": "garbage", "occurrence": 4, "data": ["ff00", "", "01"]},
        {"method": "echo", "do": "corrupt", "occurrence": 5},
        {"method": "echo", "do": "corrupt", "occurrence": 6, "data": "c1"},
        {"method": "echo", "do": "fail", "occurrence": 7, "message": "no memory"},
        {"method": "echo", "do": "delay", "occurrence": 8, "seconds": 0.05},
        {"method": "echo", "do": "busy", "occurrence": 9, "seconds": 0.05},
        {"method": "echo", "do": "hold", "occurrence": 10},
        {"method": "echo", "do": "drop", "occurrence": 1, "engine": 1},
    ]
    with Peer(codec) as peer, kind(peer.address, codec=codec, faults=faults) as engine:
        peer.complete()
        peer.ask("echo", 1)
        assert peer.call("is_sleeping") is False  # the next message: nothing came of the first
        call_id = peer.ask("echo", 2)
        assert peer.reply() == peer.reply() == (call_id, None, 2)
        call_id = peer.ask("echo", 3)
        assert peer.reply() == (call_id ^ 2**52, None, 3)
        peer.ask("echo", 4)
        assert peer.output.recv_multipart() == [b"\xff\x00", b"", b"\x01"]
        for value in (5, 6):
            call_id = peer.ask("echo", value)
            frame = peer.output.recv()
            assert peek_reply(frame, peer.codec.name) == (0, call_id)
            with pytest.raises(ProtocolError):
                peer.codec.decode(frame)
        assert peer.failure("echo", 7) == "Call to echo method failed: no memory"
        start = time.monotonic()
        late = peer.ask("echo", 8)
        assert peer.call("is_sleeping") is False  # meanwhile it answers
        assert peer.reply() == (late, None, 8)
        assert time.monotonic() - start >= 0.05
        start = time.monotonic()
        busy = peer.ask("echo", 9)
        behind = peer.ask("is_sleeping")
        assert [peer.reply()[0], peer.reply()[0]] == [busy, behind]
        assert time.monotonic() - start >= 0.05
        held = peer.ask("echo", 10)
        assert peer.call("echo", 11) == 11
        release = peer.ask("mock_release")
        assert peer.reply() == (held, None, 10)
        assert peer.reply() == (release, None, 1)
        assert methods_of(engine.log).count("echo") == 11


def test_release_by_method(peer: Peer) -> None:
    """Held replies are released for one method or for all, in the order of their calls."""
    with thread_engine(peer.address, faults=[FaultRule("*", "hold")]):
        peer.complete()
        first, second, third = peer.ask("echo", 1), peer.ask("whoami"), peer.ask("echo", 2)
        peer.ask("mock_release", "echo")
        assert [peer.reply()[0], peer.reply()[0]] == [first, third]
        assert peer.reply()[2] == 2
        peer.ask("mock_release")
        assert peer.reply()[0] == second
        assert peer.reply()[2] == 1
        assert peer.call("mock_release") == 0


def test_delayed_replies_leave_in_order_of_time(peer: Peer) -> None:
    """A short delay overtakes a long one."""
    faults = [
        FaultRule("echo", "delay", occurrence=1, seconds=0.08),
        FaultRule("echo", "delay", occurrence=2, seconds=0.02),
    ]
    with thread_engine(peer.address, faults=faults):
        peer.complete()
        first, second = peer.ask("echo", 1), peer.ask("echo", 2)
        assert [peer.reply()[0], peer.reply()[0]] == [second, first]
        assert peer.call("echo", 3) == 3


@kinds
@pytest.mark.parametrize("after_reply", [False, True])
def test_die(kind: EngineKind, peer: Peer, after_reply: bool) -> None:
    """It is gone at once, before the reply or just after it, as by SIGKILL."""
    rule = FaultRule("echo", "die", after_reply=after_reply).to_plain()
    with kind(peer.address, faults=[rule]) as engine:
        peer.complete()
        monitor = peer.disconnections(peer.input)
        call_id = peer.ask("echo", 1)
        monitor.recv_multipart()
        if kind is thread_engine:
            assert engine.join(scaled(10))
            assert engine.exit_code == -signal.SIGKILL
        else:
            assert engine.wait() == -signal.SIGKILL
            assert engine.stderr == ""
        if after_reply:
            assert peer.reply() == (call_id, None, 1)
        assert peer.hears_nothing()


@kinds
@pytest.mark.parametrize("after_reply", [False, True])
def test_exit(
    kind: EngineKind, peer: Peer, after_reply: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """It ends with the exit code and the last words that it was given."""
    rule = FaultRule("echo", "exit", code=7, message="out of memory", after_reply=after_reply)
    with kind(peer.address, faults=[rule.to_plain()]) as engine:
        peer.complete()
        call_id = peer.ask("echo", 1)
        if after_reply:
            assert peer.reply() == (call_id, None, 1)
        if kind is thread_engine:
            assert engine.join(scaled(10))
            assert engine.exit_code == 7
            assert capfd.readouterr().err == "out of memory\n"
        else:
            assert engine.wait() == 7
            assert engine.stderr == "out of memory\n"
        assert peer.hears_nothing()


@kinds
def test_sentinel(kind: EngineKind, peer: Peer) -> None:
    """It announces its death, closes its output first and its input a while later."""
    rule = FaultRule("echo", "sentinel", seconds=0.2, code=3).to_plain()
    with kind(peer.address, faults=[rule]) as engine:
        peer.complete()
        ends = peer.disconnections(peer.output), peer.disconnections(peer.input)
        peer.ask("echo", 1)
        assert peer.output.recv_multipart() == [DEAD_SENTINEL]
        ends[0].recv_multipart()
        peer.ask("echo", 2)  # still routable
        ends[1].recv_multipart()
        if kind is thread_engine:
            assert engine.join(scaled(10))
            assert engine.exit_code == 3
        else:
            assert engine.wait() == 3


@kinds
def test_stop_answering(kind: EngineKind, peer: Peer) -> None:
    """It stays connected and receives, but is never heard again, and can still be stopped."""
    rule = FaultRule("echo", "stop_answering", after_reply=True).to_plain()
    with kind(peer.address, faults=[rule]) as engine:
        peer.complete()
        assert peer.call("echo", 1) == 1
        peer.ask("echo", 2)
        peer.ask("mock_log")
        peer.ask("is_sleeping")
        wait_until(lambda: methods_of(engine.log) == ["echo", "echo", "is_sleeping"])
        assert peer.hears_nothing()


@kinds
def test_deaf(kind: EngineKind, peer: Peer) -> None:
    """It closes its input; a reply that it still owes is heard."""
    faults = [
        FaultRule("whoami", "delay", seconds=0.1).to_plain(),
        FaultRule("echo", "deaf").to_plain(),
    ]
    with kind(peer.address, faults=faults):
        peer.complete()
        monitor = peer.disconnections(peer.input)
        owed = peer.ask("whoami")
        peer.ask("echo", 1)
        monitor.recv_multipart()
        wait_until(lambda: not peer.reaches())
        assert peer.reply()[0] == owed


@kinds
def test_mute(kind: EngineKind, peer: Peer) -> None:
    """It closes its output, and goes on receiving and executing."""
    with kind(peer.address, faults=[FaultRule("echo", "mute", occurrence=2).to_plain()]) as engine:
        peer.complete()
        monitor = peer.disconnections(peer.output)
        assert peer.call("echo", 1) == 1
        peer.ask("echo", 2)
        monitor.recv_multipart()
        peer.ask("whoami")
        wait_until(lambda: methods_of(engine.log) == ["echo", "echo", "whoami"])
        assert peer.hears_nothing()


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_stopped_process(peer: Peer) -> None:
    """It stops itself as SIGSTOP does, and answers once it is continued."""
    with EngineProcess(peer.address, faults=[FaultRule("echo", "stop").to_plain()]) as engine:
        peer.complete()
        call_id = peer.ask("echo", 1)
        stat = Path(f"/proc/{engine.pid}/stat")
        wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")
        assert peer.hears_nothing()
        engine.signal(signal.SIGCONT)
        assert peer.reply() == (call_id, None, 1)


def test_stop_in_a_thread(peer: Peer) -> None:
    """An engine in a thread cannot stop the process: it falls silent."""
    with thread_engine(peer.address, faults=[FaultRule("echo", "stop")]) as engine:
        peer.complete()
        peer.ask("echo", 1)
        peer.ask("whoami")
        wait_until(lambda: len(engine.log) == 2)
        assert peer.hears_nothing()


def test_faults_on_requests(peer: Peer) -> None:
    """Requests can trigger faults too."""
    faults = [
        FaultRule("ADD", "garbage", occurrence=1, data="c0ffee"),
        FaultRule("ADD", "busy", occurrence=2, seconds=0.05),
        FaultRule("ADD", "exit", occurrence=3, code=4),
        FaultRule("ABORT", "drop"),
        FaultRule("*", "drop", occurrence=2),
    ]
    manual = {"manual_steps": True}
    with thread_engine(peer.address, faults=faults, options=manual) as engine:
        peer.complete()
        peer.add("r1", [1])
        assert peer.output.recv() == b"\xc0\xff\xee"
        peer.abort("r1")
        start = time.monotonic()
        peer.add("r2", [1])
        assert peer.call("echo", 1) == 1  # the star means utility calls: this is the first
        assert time.monotonic() - start >= 0.05
        peer.add("r3", [1])
        assert engine.join(scaled(10))
        assert engine.exit_code == 4


def test_faults_at_startup(peer: Peer) -> None:
    """Each message of the startup can be lost, doubled, late or spoilt."""
    faults = [
        FaultRule("HELLO", "duplicate"),
        FaultRule("REGISTRATION", "garbage", data=""),
        FaultRule("READY", "delay", seconds=0.02),
    ]
    with thread_engine(peer.address, faults=faults):
        first = peer.handshake.recv_multipart()
        assert peer.handshake.recv_multipart() == first
        init = peer.codec.encode(peer.init.to_plain())
        peer.handshake.send_multipart([engine_id(0), init])
        assert peer.input.recv_multipart() == [engine_id(0), b""]
        handshake_message(peer.codec.decode(peer.handshake.recv_multipart()[1]))
        assert peer.call("echo", 1) == 1


@pytest.mark.parametrize("message", ["HELLO", "REGISTRATION", "READY"])
@pytest.mark.parametrize("do", ["stop_answering", "mute", "deaf", "drop"])
def test_startup_that_stops_can_be_ended(peer: Peer, message: str, do: str) -> None:
    """An engine that falls silent while it starts is still there, and stops when told to."""
    with thread_engine(peer.address, faults=[FaultRule(message, do)]) as engine:
        if message != "HELLO":
            peer.greet()
        if message == "READY":
            peer.input.recv_multipart()
        assert not engine.join(0)


@pytest.mark.parametrize("message", ["HELLO", "REGISTRATION", "READY"])
def test_death_at_startup(peer: Peer, message: str) -> None:
    """An engine can end at each message of the startup, as one that cannot load its model does."""
    with thread_engine(
        peer.address, faults=[FaultRule(message, "exit", code=5, after_reply=True)]
    ) as engine:
        if message != "HELLO":
            peer.greet()
        assert engine.join(scaled(10))
        assert engine.exit_code == 5


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_stopped_at_startup(peer: Peer) -> None:
    """A process that is stopped before it registers goes on when it is continued."""
    rule = FaultRule("REGISTRATION", "stop").to_plain()
    with EngineProcess(peer.address, faults=[rule]) as engine:
        peer.greet()
        stat = Path(f"/proc/{engine.pid}/stat")
        wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")
        assert not peer.input.poll(0)
        engine.signal(signal.SIGCONT)
        assert peer.input.recv_multipart()[0] == engine_id(0)


# -- rules -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ({"method": "", "do": "drop"}, "needs the method"),
        ({"method": "echo", "do": "explode"}, "no fault 'explode' at echo; there are: answer,"),
        ({"method": "HELLO", "do": "fail"}, "no fault 'fail' at HELLO"),
        ({"method": "ADD", "do": "hold"}, "no fault 'hold' at ADD"),
        ({"method": "echo", "do": "drop", "after_reply": True}, "after_reply has no meaning"),
        ({"method": "echo", "do": "stop", "after_reply": True}, "after_reply has no meaning"),
        ({"method": "echo", "do": "drop", "occurrence": 0}, "counts from 1"),
        ({"method": "echo", "do": "delay", "seconds": -1}, "negative"),
        ({"method": "echo", "do": "delay", "seconds": float("nan")}, "negative"),
        ({"method": "echo", "do": "garbage", "data": "xyz"}, "hexadecimal"),
        ({"method": "echo", "do": "drop", "when": 3, "why": 1}, "no field when, why"),
        ({"method": "echo"}, "needs 'method' and 'do'"),
        ("echo", "a fault is a map, not str"),
    ],
)
def test_wrong_rules_are_refused(rule: Any, text: str) -> None:
    """A rule that cannot work is refused where it is written."""
    with pytest.raises(ValueError, match=text):
        FaultPlan([rule])


def test_rules_round_trip() -> None:
    """A rule survives its trip as JSON."""
    rule = FaultRule("echo", "garbage", 3, data=("00ff", ""), engine=2)
    assert FaultRule.from_plain(json.loads(json.dumps(rule.to_plain()))) == rule
    assert rule.frames == [b"\x00\xff", b""]


def test_rules_count_for_themselves() -> None:
    """Each rule counts what matches it; the first whose turn it is acts."""
    plan = FaultPlan([FaultRule("a", "drop", 2), FaultRule("*", "hold", 2)])
    assert [getattr(plan.take(name, 0), "do", None) for name in "abaa"] == [
        None,
        "hold",
        "drop",
        None,
    ]
    assert plan.take("ADD", 0) is None
    assert repr(plan) == "<FaultPlan a: drop, *: hold>"
    plan.clear()
    assert not plan
    assert repr(plan) == "<FaultPlan without faults>"


# -- ending ----------------------------------------------------------------------------------------


def test_stop_at_any_time(peer: Peer) -> None:
    """stop() works before, during and after the life of an engine, repeatedly, from any thread."""
    engine = MockEngine(peer.address)
    assert repr(engine) == "<MockEngine 0: not started>"
    assert engine.join()
    engine.stop()
    assert engine.run() == 0
    engine.stop()
    with MockEngine(peer.address) as waiting:  # for its INIT
        assert repr(waiting) == "<MockEngine 0: running>"
    assert waiting.exit_code == 0
    assert repr(waiting) == "<MockEngine 0: ended with 0>"
    with Peer() as other, MockEngine(other.address).start() as serving:
        other.complete()
        assert other.call("echo", 1) == 1
        threads = [threading.Thread(target=serving.stop) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(scaled(10))
        assert serving.join(scaled(10))
    assert serving.exit_code == 0


def test_stop_while_busy_or_with_many_clients(peer: Peer) -> None:
    """stop() interrupts a pause, and a poll of several inputs."""
    with thread_engine(peer.address, faults=[FaultRule("echo", "busy", seconds=1000)]):
        peer.complete()
        peer.ask("echo", 1)
    with Peer() as one, Peer() as other:
        inputs = [endpoint(one.input), endpoint(other.input)]
        outputs = [endpoint(one.output), endpoint(other.output)]
        with thread_engine(input_address=inputs, output_address=outputs):
            one.input.recv_multipart()
            other.input.recv_multipart()


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)], ids=["SIGTERM", "SIGINT"]
)
@pytest.mark.parametrize("stage", ["waiting", "serving", "busy", "deaf"])
def test_signals_end_a_process_quietly(
    peer: Peer, number: signal.Signals, code: int, stage: str
) -> None:
    """SIGTERM and SIGINT end a process at once, whatever it does, without a word."""
    faults = [FaultRule("echo", "busy", seconds=1000), FaultRule("whoami", "deaf")]
    plain = [rule.to_plain() for rule in faults]
    with EngineProcess(peer.address, faults=plain if stage != "serving" else ()) as engine:
        if stage == "waiting":
            peer.handshake.recv_multipart()
        else:
            peer.complete()
            monitor = peer.disconnections(peer.input)
            if stage == "busy":
                peer.ask("echo", 1)
                wait_until(lambda: engine.log)
            elif stage == "deaf":
                peer.ask("whoami")
                monitor.recv_multipart()
        start = time.monotonic()
        engine.signal(number)
        engine.signal(number)
        assert engine.wait() == code
        assert time.monotonic() - start < scaled(AFTER_STOP)
        assert engine.stderr == ""


def test_signal_with_undelivered_output(peer: Peer) -> None:
    """A process that nobody listens to any more ends as quickly."""
    with EngineProcess(peer.address) as engine:
        peer.complete()
        peer.output.close()
        peer.ask("echo", b"x" * 10_000_000)
        wait_until(lambda: engine.log)
        start = time.monotonic()
        engine.signal(signal.SIGTERM)
        assert engine.wait() == 0
        assert time.monotonic() - start < scaled(AFTER_STOP)


def test_stray_sigpipe(peer: Peer) -> None:
    """SIGPIPE does not end a process."""
    with EngineProcess(peer.address) as engine:
        peer.complete()
        engine.signal(signal.SIGPIPE)
        assert peer.call("whoami")["pid"] == engine.pid


def test_process_survives_a_closed_stderr(peer: Peer) -> None:
    """A process whose stderr nobody reads any more goes on."""
    read_end, write_end = os.pipe()
    command = [sys.executable, "-m", "engine_client.tools.mock_engine", "--connect", peer.address]
    os.close(read_end)
    with subprocess.Popen(
        [*command, "--stderr-line", "hello", "--stderr-line", "there"],
        stderr=write_end,
        cwd=ROOT,
    ) as process:
        os.close(write_end)
        try:
            peer.complete()
            assert peer.call("whoami")["pid"] == process.pid
            process.terminate()
            assert process.wait(scaled(10)) == 0
        finally:
            process.kill()


def test_command_line(peer: Peer) -> None:
    """The process takes the registration, the identity and lines for stderr from its options."""
    arguments = [
        "--ready",
        '{"max_loras": 0, "supports_lora": false}',
        "--local",
        "--no-log",
        "--stderr-line",
        "first",
        "--stderr-line",
        "second",
    ]
    with EngineProcess(peer.address, arguments=arguments) as engine:
        assert peer.greet()["local"] is True
        _, registration = peer.input.recv_multipart()
        assert peer.codec.decode(registration)["max_loras"] == 0
        assert engine.stderr == "first\nsecond\n"
    with EngineProcess(peer.address, arguments=["--identity", "aabbcc"]):
        while peer.handshake.recv_multipart()[0] != b"\xaa\xbb\xcc":
            pass


def test_command_line_errors() -> None:
    """Wrong options end with exit code 2 and say what is wrong."""
    with EngineProcess() as engine:
        assert engine.wait() == 2
        assert "give a handshake address" in engine.stderr
    with EngineProcess("ipc://x", faults=[{"method": "echo", "do": "explode"}]) as engine:
        assert engine.wait() == 2
        assert "no fault 'explode'" in engine.stderr


def test_missing_msgpack_is_explained() -> None:
    """The codecs are those of the library."""
    assert {codec_named(name).name for name in CODECS} == set(CODECS)
    with pytest.raises(ValueError, match="codec"):
        MockEngine("ipc://x", codec="json")
