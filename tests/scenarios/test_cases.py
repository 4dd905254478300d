"""Faults reported from the field for clients of this kind that no other file here covers."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from engine_client import (
    CallTimeout,
    ClientBrokenError,
    ConsensusError,
    EngineClient,
    EngineDeadError,
    EngineRequest,
    HandshakeTimeout,
    Ok,
    SamplingParams,
    UtilityCallError,
    connect,
    launch,
)
from engine_client.tools.mock_engine import MockEngine
from tests.helpers import run_in_thread, scaled, wait_until
from tests.helpers.scripts import run_script
from tests.scenarios.rig import address, rig

ROOT = Path(__file__).resolve().parents[2]


# -- the state is asked for, never predicted ------------------------------------------------------


def test_what_an_engine_changes_by_itself_is_seen() -> None:
    """Nothing that the client told an engine is taken for what it is: it is asked, each time."""
    with rig(("cbor", "msgpack")) as two:
        client = two.client
        two.fault("sleep", "fail", engines=[1], message="no")
        with pytest.raises(UtilityCallError):
            client.sleep(level=1)
        # One sleeps and one does not: no single answer is made up.
        with pytest.raises(ConsensusError) as info:
            client.is_sleeping()
        assert [info.value.outcomes[i] for i in (0, 1)] == [
            Ok(True, info.value.outcomes[0].elapsed),
            Ok(False, info.value.outcomes[1].elapsed),
        ]
        two.fault("is_sleeping", "answer", engines=[0], value=False)  # it woke by itself
        assert client.is_sleeping() is False
        two.control("mock_clear")
        with pytest.raises(ConsensusError):
            client.is_sleeping()


def test_busy_is_told_from_dead() -> None:
    """An engine that is busy with a long call is alive; the time-out says with what, since when."""
    with rig(("cbor",)) as one:
        client = one.client
        one.fault("reset_mm_cache", "busy", seconds=1.5)
        update = run_in_thread(client.reset_mm_cache)
        wait_until(lambda: one.received(0, "reset_mm_cache"), what="the long call to begin")
        with pytest.raises(UtilityCallError) as info:
            client.call_utility("echo", 1, timeout=0.2)
        failure = info.value.outcomes.failures[0]
        assert isinstance(failure, CallTimeout)
        assert "it has not answered reset_mm_cache either, sent " in str(failure)
        engine = client.engines[0]
        assert engine.alive
        assert engine.unanswered == "reset_mm_cache"
        assert engine.unanswered_since is not None
        assert abs(time.time() - engine.unanswered_since) < scaled(10)
        assert update.result() is None
        one.check()
        assert client.engines[0].unanswered is None


# -- limits can be found --------------------------------------------------------------------------


def test_an_error_names_the_limit_that_was_too_short() -> None:
    """Both time-outs say which option sets them."""
    with address() as where, pytest.raises(HandshakeTimeout, match="connect_timeout"):
        connect(where, connect_timeout=0.05)
    with rig(("cbor",)) as one:
        one.fault("echo", "hold")
        with pytest.raises(UtilityCallError) as info:
            one.client.call_utility("echo", 1, timeout=0.05)
        assert "timeout=" in str(info.value.outcomes.failures[0])
        one.settle_down()


# -- a death reaches everybody who waits ----------------------------------------------------------


def test_a_dying_engine_tells_callers_readers_and_the_next_one() -> None:
    """Whoever waits for it in a call, reads a stream of it, or asks next gets the same cause."""
    with (
        address() as where,
        MockEngine(where, options={"manual_steps": True}) as engine,
        connect(where, connect_timeout=scaled(30)) as client,
    ):
        client.call_utility("mock_fault", {"method": "echo", "do": "hold"})
        client.call_utility(
            "mock_fault", {"method": "reset_mm_cache", "do": "sentinel", "seconds": 0.5}
        )
        stream = client.call(EngineRequest("r", [1], SamplingParams(max_tokens=9)))
        reading = run_in_thread(stream.recv)
        calling = run_in_thread(client.call_utility, "echo", 1)
        wait_until(
            lambda: any(entry.type == "UTILITY" and entry.method == "echo" for entry in engine.log)
        )
        with pytest.raises(UtilityCallError, match="ENGINE_CORE_DEAD"):
            client.reset_mm_cache()
        read, called = reading.error(), calling.error()
        assert isinstance(read, EngineDeadError)
        assert isinstance(called, UtilityCallError)
        assert "ENGINE_CORE_DEAD" in str(read)
        assert "ENGINE_CORE_DEAD" in str(called)
        with pytest.raises(UtilityCallError, match="ENGINE_CORE_DEAD") as info:
            client.call_utility("echo", 2)
        assert not info.value.outcomes.may_have_run
        assert client.active_requests == client.pending_utility_calls == 0
        assert not client.closed


# -- processes ------------------------------------------------------------------------------------

OWNER = """
import threading, time
from engine_client import launch
with launch(2, connect_timeout={limit}) as client:
    before = client.call_utility("whoami")
    client.call_utility("mock_fault", {{"method": "echo", "do": "hold"}})
    def tell():
        while client.pending_utility_calls < 2:
            time.sleep(0.002)
        print("waits", flush=True)
    teller = threading.Thread(target=tell)
    teller.start()
    try:
        client.call_utility("echo", 1)
    except KeyboardInterrupt as exc:
        print("interrupted", list(exc.outcomes), flush=True)
    teller.join()
    client.call_utility("mock_clear")
    client.call_utility("mock_release")
    assert client.call_utility("whoami", timeout={limit}) == before
    assert client.call_utility("echo", 2, timeout={limit}) == [2, 2]
    assert client.pending_utility_calls == 0
print("done", flush=True)
"""


def test_ctrl_c_to_the_whole_group_leaves_launched_engines_alone() -> None:
    """In a terminal all processes get a Ctrl-C: the call ends, its engines serve the next one."""
    owner = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", OWNER.format(limit=scaled(30))],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with owner:
        assert owner.stdout is not None
        try:
            assert owner.stdout.readline() == "waits\n"
            os.killpg(owner.pid, signal.SIGINT)
            assert owner.stdout.readline() == "interrupted [0, 1]\n"
            assert owner.stdout.readline() == "done\n"
            assert owner.wait(scaled(20)) == 0
        finally:
            owner.kill()


def _use(client: EngineClient, report: Connection) -> None:
    try:
        client.call_utility("echo", 1)
    except ClientBrokenError as exc:
        report.send(str(exc))
    client.close()
    report.close()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_multiprocessing_fork() -> None:
    """A worker that was forked is told whose the client is; its end does not harm the owner."""
    with rig(("cbor",)) as one:
        ours, theirs = multiprocessing.Pipe()
        with ours:
            worker = multiprocessing.get_context("fork").Process(
                target=_use, args=(one.client, theirs)
            )
            worker.start()
            theirs.close()
            assert f"belongs to process {os.getpid()}" in ours.recv()
            worker.join(scaled(20))
            assert worker.exitcode == 0
            worker.close()
        one.check()


def test_a_client_is_not_sent_to_another_process() -> None:
    """multiprocessing's spawn pickles what it hands over; a client says what to do instead."""
    with rig(("cbor",)) as one:
        with pytest.raises(TypeError, match="pickle"):
            multiprocessing.get_context("spawn").Pipe()[0].send(one.client)
        one.check()


SPAWN = """
import multiprocessing, warnings
from engine_client import connect
from engine_client.tools.mock_engine import MockEngine
from tests.scenarios.rig import address

def work(report):
    with address() as where, MockEngine(where), connect(where, connect_timeout=60) as client:
        report.send(client.call_utility("echo", 5))

if __name__ == "__main__":
    ours, theirs = multiprocessing.Pipe()
    worker = multiprocessing.get_context("spawn").Process(target=work, args=(theirs,))
    worker.start()
    theirs.close()
    print(ours.recv(), flush=True)
    worker.join()
    print("ended with", worker.exitcode)
"""


def test_multiprocessing_spawn(tmp_path: Path) -> None:
    """A spawned worker makes a client of its own; it ends as if there had never been one."""
    script = tmp_path / "spawns.py"
    script.write_text(SPAWN)
    assert run_script(str(script)) == "[5]\nended with 0\n"


@pytest.mark.parametrize("place", [None, "tcp://127.0.0.1:*"])
def test_many_clients_started_together_get_engines_of_their_own(place: str | None) -> None:
    """Addresses are bound before they are told: no two clients ever share one."""
    starting = [
        run_in_thread(launch, 1, address=place, connect_timeout=scaled(50)) for _ in range(6)
    ]
    clients = [one.result(60) for one in starting]
    try:
        pids = [client.call_utility("whoami", timeout=scaled(20))[0]["pid"] for client in clients]
        assert len(set(pids)) == len(pids)
        assert len({client.input_address for client in clients}) == len(clients)
    finally:
        for client in clients:
            client.close()


# -- a reply that cannot be made ------------------------------------------------------------------


def test_a_lost_reply_is_bounded_by_the_deadline_and_costs_only_its_engine() -> None:
    """An engine that cannot make its reply is named at the deadline; the other's counts."""
    with rig(("cbor", "msgpack")) as two:
        two.fault("echo", "drop", engines=[1])
        began = time.monotonic()
        with pytest.raises(UtilityCallError) as info:
            two.client.call_utility("echo", 1, timeout=0.3)
        assert 0.3 <= time.monotonic() - began < scaled(3)
        assert info.value.outcomes.succeeded == (0,)
        assert isinstance(info.value.outcomes.failures[1], CallTimeout)
        two.settle_down()
        two.check()
