"""How a client ends: closed, dropped, forked, or left open when the interpreter exits."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from engine_client import (
    AbandonedError,
    ClientClosedError,
    EngineClient,
    Ok,
    UtilityCall,
    connect,
    connect_bootstrapped,
    launch,
)
from engine_client.dispatch.dispatcher import EXIT_TIMEOUT
from engine_client.tools.mock_engine import MockEngine
from tests.helpers import EngineProcess, run_in_thread, scaled, wait_until
from tests.helpers.leaks import Snapshot
from tests.scenarios.rig import address, rig

ROOT = Path(__file__).resolve().parents[2]


def quick_client(where: str, stack: ExitStack, **settings: Any) -> EngineClient:
    """Return a client with one engine, in a thread of this process, and start it after the bind."""
    path = Path(where.removeprefix("ipc://"))
    path.unlink(missing_ok=True)
    connecting = run_in_thread(connect, where, connect_timeout=scaled(20), **settings)
    wait_until(path.exists, what="the bind")
    stack.enter_context(MockEngine(where))
    return connecting.result()


# -- close ------------------------------------------------------------------------------------


def test_close_from_several_threads_while_others_wait() -> None:
    """Everybody who waits gets complete outcomes at once, and everybody who closes returns."""
    with rig(("cbor", "msgpack")) as two:
        client = two.client
        two.fault("echo", "hold", engines=[1])
        waiting = [run_in_thread(client.call_utility, "echo", number) for number in range(5)]
        wait_until(lambda: client.pending_utility_calls == 5, what="the replies of engine 0")
        began = time.monotonic()
        closing = [run_in_thread(client.close) for _ in range(4)]
        for closer in closing:
            closer.result()
        assert time.monotonic() - began < scaled(2)
        for number, call in enumerate(waiting):
            error = call.error()
            assert isinstance(error, ClientClosedError)
            assert "\n" not in str(error)
            assert error.outcomes is not None
            assert list(error.outcomes) == [0, 1]
            assert error.outcomes[0] == Ok(number, error.outcomes[0].elapsed)
            left = error.outcomes.failures[1]
            assert type(left) is AbandonedError
            assert left.may_have_run
            assert error.outcomes.may_have_run == (0, 1)
        assert client.closed
        assert client.closing_cause is None
        assert client.pending_utility_calls == 0
        for _ in range(3):
            client.close()
            client.close(timeout=0)
        assert repr(client) == "<EngineClient closed>"


def test_use_after_close_is_refused_with_one_clear_error() -> None:
    """Every call raises; what only looks still answers."""
    with ExitStack() as stack:
        where = stack.enter_context(address())
        client = quick_client(where, stack)
        outcomes = client.settle_utility("echo", 1)
        client.close()
        calls: list[Callable[[], object]] = [
            lambda: client.call_utility("echo", 1),
            lambda: client.settle_utility("echo", 1),
            lambda: client.call_utility_consensus("echo", 1),
            lambda: client.collective_rpc("check_health"),
            lambda: client.is_sleeping(timeout=0),
            lambda: client.compensate(outcomes, UtilityCall("echo", (1,))),
        ]
        for call in calls:
            with pytest.raises(ClientClosedError, match="the client is closed") as info:
                call()
            assert info.value.outcomes is None
        assert client.closed
        assert client.pending_utility_calls == 0
        assert [info.in_flight for info in client.engines] == [0]
        assert client.stats.calls == 1
        assert client.input_address.startswith("ipc://")
        assert "closed" in client._repr_html_()
        with pytest.raises(ClientClosedError), client:
            client.call_utility("echo", 1)


def test_leaving_the_block_by_an_exception_closes() -> None:
    """The exception goes through, and the client is closed."""
    with ExitStack() as stack:
        where = stack.enter_context(address())
        client = quick_client(where, stack)
        with pytest.raises(ZeroDivisionError), client:
            _ = 1 // 0
        assert client.closed


def test_close_in_a_signal_handler() -> None:
    """close(timeout=0) in a handler, in the middle of a wait of the same thread, ends that wait."""
    with rig(("cbor",)) as one:
        client = one.client
        one.fault("echo", "hold")
        thread = threading.get_ident()

        def handler(number: int, frame: FrameType | None) -> None:
            client.close(timeout=0)

        def send() -> None:
            one.wait_received(0, ["x"])
            signal.pthread_kill(thread, signal.SIGUSR1)

        previous = signal.signal(signal.SIGUSR1, handler)
        try:
            sending = run_in_thread(send)
            with pytest.raises(ClientClosedError) as info:
                client.call_utility("echo", "x")
            sending.result()
        finally:
            signal.signal(signal.SIGUSR1, previous)
        assert info.value.outcomes is not None
        assert info.value.outcomes.may_have_run == (0,)
        client.close()
        assert client.closed


def test_close_without_time_takes_no_lock_and_does_not_wait() -> None:
    """A handler may run in the middle of whatever holds a lock; then it must not want one."""
    with rig(("cbor",)) as one:
        dispatcher = one.client._dispatcher
        with dispatcher.registry.lock, dispatcher.outbox._lock:
            began = time.monotonic()
            run_in_thread(one.client.close, timeout=0).result(scaled(5))
            assert time.monotonic() - began < scaled(0.5)
        wait_until(lambda: one.client.closed, what="the end")


def test_close_in_a_handler_while_close_waits() -> None:
    """A handler that closes, in the middle of a close, disturbs nothing."""
    with rig(("cbor",)) as one:
        one.engines[0].signal(signal.SIGSTOP)
        client = one.client
        client.settle_utility("echo", b"x" * 10_000_000, timeout=0)  # it is not read: close lingers
        thread = threading.get_ident()
        previous = signal.signal(signal.SIGUSR1, lambda *_: client.close(timeout=0))
        try:

            def send() -> None:
                wait_until(lambda: client.closed, what="the close")
                signal.pthread_kill(thread, signal.SIGUSR1)

            sending = run_in_thread(send)
            began = time.monotonic()
            client.close(timeout=0.3)
            assert time.monotonic() - began < scaled(2)
            sending.result()
        finally:
            signal.signal(signal.SIGUSR1, previous)
            one.engines[0].signal(signal.SIGCONT)
        assert client.closed


def test_close_is_bounded_by_its_time_limit() -> None:
    """An engine that takes nothing any more does not hold a close for longer than it may take."""
    with rig(("cbor",), close_timeout=0.2) as one:
        one.engines[0].signal(signal.SIGSTOP)
        try:
            one.client.settle_utility("echo", b"x" * 30_000_000, timeout=0)
            began = time.monotonic()
            one.client.close()
            assert 0.1 < time.monotonic() - began < scaled(2)
            # It has ended, and not only been left alone.
            assert not one.client._dispatcher._thread.is_alive()
        finally:
            one.engines[0].signal(signal.SIGCONT)


def test_what_was_sent_before_close_arrives() -> None:
    """Closing right after a call that was not waited for still delivers it."""
    with rig(("cbor",)) as one:
        outcomes = one.client.settle_utility("echo", b"x" * 5_000_000, timeout=0)
        wait_until(lambda: one.client.stats.calls == 2)
        one.client.close()
        assert outcomes.unsettled == (0,)
        wait_until(lambda: len(one.engines[0].log) == 1, what="the call at the engine")


# -- dropped ----------------------------------------------------------------------------------


def test_a_dropped_client_warns_and_is_freed_at_once() -> None:
    """Without close, the last reference takes thread, sockets and files along, with a warning."""
    with ExitStack() as stack:
        where = stack.enter_context(address())
        before = Snapshot()
        client = quick_client(where, stack)
        reference = weakref.ref(client)
        folder = Path(client.input_address.removeprefix("ipc://")).parent
        assert folder.is_dir()
        gc.disable()
        try:
            with pytest.warns(ResourceWarning, match=r"unclosed <EngineClient open: 1 of 1"):
                del client
            assert reference() is None
        finally:
            gc.enable()
        wait_until(lambda: not folder.exists(), what="the end of the ipc files")
        stack.close()
        before.check()


def test_a_dropped_client_in_a_cycle_is_freed_by_the_collector() -> None:
    """A client that is part of a reference cycle goes with it, engines and all."""
    holder: dict[str, Any] = {"client": launch(1, connect_timeout=scaled(30))}
    holder["self"] = holder
    pid = holder["client"].call_utility("whoami")[0]["pid"]
    reference = weakref.ref(holder["client"])
    del holder
    with pytest.warns(ResourceWarning, match="unclosed"):
        gc.collect()
    assert reference() is None
    wait_until(lambda: not _lives(pid), what="the end of the launched engine")


def test_a_global_that_is_assigned_again_frees_the_first() -> None:
    """As in a notebook: the second client takes the first one's place, and its address too."""
    with ExitStack() as stack:
        where = stack.enter_context(address())
        client = quick_client(where, stack)
        with pytest.warns(ResourceWarning):
            client = None  # type: ignore[assignment]
        wait_until(lambda: not _dispatchers(), what="the end of the first client")
        client = quick_client(where, stack)
        assert client.call_utility("echo", 1) == [1]
        client.close()


def test_a_client_that_somebody_waits_on_is_not_collected() -> None:
    """A thread in a call keeps the client alive, and gets its answer."""
    with rig(("cbor",)) as one:
        one.fault("echo", "hold")
        holder = [one.client]
        call = run_in_thread(lambda: holder.pop().call_utility("echo", "x"))
        one.wait_received(0, ["x"])
        gc.collect()
        assert not holder
        assert not call.done
        one.release()
        assert call.result() == ["x"]


def test_many_rounds_leave_the_counts_flat() -> None:
    """100 clients made, used and closed one after another: no thread or descriptor is left."""
    with ExitStack() as stack:
        where = stack.enter_context(address())
        before = Snapshot()
        for number in range(100):
            with ExitStack() as one, quick_client(where, one) as client:
                assert client.call_utility("echo", number) == [number]
                client.close()
            assert not before.new_threads(), number
            assert not before.new_descriptors(), number


def test_a_start_without_a_thread_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system gives no more threads, the start fails with that, and frees all."""
    before = Snapshot()

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with address() as where, monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            connect(where)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            launch(1)
    before.check()


def test_failed_starts_leave_the_counts_flat() -> None:
    """20 starts without an engine, on one address: each fails in time and leaves nothing."""
    with ExitStack() as stack:
        where = stack.enter_context(address())
        before = Snapshot()
        for _ in range(20):
            with pytest.raises(TimeoutError, match="engine 0"):
                connect(where, connect_timeout=0.01)
            with pytest.raises(TimeoutError, match="engine 0"):
                connect_bootstrapped(f"{where}i", f"{where}o", connect_timeout=0.01)
            assert not before.new_threads()
            assert not before.new_descriptors()
        client = quick_client(where, stack)
        assert client.call_utility("echo", 1) == [1]
        client.close()


def _dispatchers() -> list[str]:
    names = (thread.name for thread in threading.enumerate())
    return [name for name in names if name.startswith("engine-client-dispatcher")]


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# -- inside an event loop -----------------------------------------------------------------------


def test_calls_inside_a_running_event_loop() -> None:
    """Calls work in a coroutine (they block its loop), in its threads, and after it."""
    with ExitStack() as stack:
        where = stack.enter_context(address())
        client = quick_client(where, stack)

        async def main() -> list[Any]:
            first = client.call_utility("echo", 1)
            second = client.call_utility("echo", 2)
            third = await asyncio.to_thread(client.call_utility, "echo", 3)
            return [*first, *second, *third]

        assert asyncio.run(main()) == [1, 2, 3]
        assert client.call_utility("echo", 4) == [4]
        client.close()


# -- fork ---------------------------------------------------------------------------------------


def run(script: str, *arguments: str, code: int | None = 0) -> subprocess.CompletedProcess[str]:
    """Run a program in an interpreter of its own; check its exit code."""
    done = subprocess.run(
        [sys.executable, "-W", "always::ResourceWarning", "-c", script, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=scaled(40),
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert code is None or done.returncode == code, done.stdout + done.stderr
    return done


FORK = """
import os, sys, threading, warnings
from engine_client import ClientBrokenError, UtilityCall, connect
warnings.simplefilter("ignore", DeprecationWarning)  # of fork() beside threads

with connect(sys.argv[1], connect_timeout=30) as client:
    outcomes = client.settle_utility("echo", 1)
    registry = client._dispatcher.registry
    busy = threading.Thread(target=lambda: [client.call_utility("echo", i) for i in range(300)])
    busy.start()
    for held in (False, True):  # as if another thread had a lock at the moment of the fork
        if held:
            busy.join()
            registry.lock.acquire()
        child = os.fork()
        if child:
            if held:
                registry.lock.release()
            status = os.waitpid(child, 0)[1]
            print("child", os.waitstatus_to_exitcode(status), flush=True)
            assert client.call_utility("echo", 2) == [2]
            continue
        owner = str(os.getppid())
        for use in (
            lambda: client.call_utility("echo", 1),
            lambda: client.settle_utility("echo", 1),
            lambda: client.compensate(outcomes, UtilityCall("echo", (1,))),
            lambda: client.engines,
            lambda: client.pending_utility_calls,
            lambda: client.is_sleeping(),
        ):
            try:
                use()
            except ClientBrokenError as error:
                assert f"belongs to process {owner}" in str(error), error
            else:
                raise AssertionError("used in a fork")
        for _ in range(2):
            client.close()
            client.close(timeout=0)
        with client:
            pass
        repr(client)
        if sys.argv[2] == "exit":
            sys.exit(7)  # through every finalizer and atexit function
        os._exit(7)
    assert client.call_utility("echo", 3) == [3]
    assert client.pending_utility_calls == 0
print("owner done")
"""


@pytest.mark.parametrize("how", ["exit", "_exit"])
def test_a_forked_child_cannot_use_the_client_nor_harm_it(how: str) -> None:
    """In the child every use names the owner's process; close and exit do nothing to the owner."""
    with address() as where, EngineProcess(where) as engine:
        done = run(FORK, where, how)
        assert done.stdout.split("\n") == ["child 7", "child 7", "owner done", ""]
        assert done.stderr == ""
        assert engine.running
        for entry in engine.log:
            assert entry["type"] == "UTILITY"


# -- the interpreter's exit -----------------------------------------------------------------------

LAUNCHED = """
import os, signal, sys, threading
from engine_client import launch

client = launch(1, connect_timeout=30)
print(*[one["pid"] for one in client.call_utility("whoami")], flush=True)
"""

ENDINGS = {
    "end": ("", 0),
    "sys.exit": ("sys.exit(3)", 3),
    "exception": ("raise RuntimeError('the end')", 1),
    "os._exit": ("os._exit(4)", 4),
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM); signal.pause()", -signal.SIGTERM),
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    "waiting daemon thread": (
        """
client.call_utility("mock_fault", {"method": "echo", "do": "hold"})
threading.excepthook = lambda error: print(error.exc_type.__name__, flush=True)
thread = threading.Thread(target=client.call_utility, args=("echo", 1), daemon=True)
thread.start()
while not client.pending_utility_calls:
    pass
""",
        0,
    ),
    "cycle at the end": ("client.me = client\nimport engine_client\nengine_client.me = client", 0),
}


@pytest.mark.parametrize(("ending", "code"), ENDINGS.values(), ids=ENDINGS.keys())
def test_exit_with_an_unclosed_client(ending: str, code: int) -> None:
    """However a program ends, it ends soon, quietly, and its launched engines with it."""
    began = time.monotonic()
    done = run(LAUNCHED + ending, code=code)
    assert time.monotonic() - began < scaled(15)
    pids, *rest = done.stdout.split("\n")
    wait_until(
        lambda: not any(_lives(int(pid)) for pid in pids.split()),
        what="the end of the launched engines",
    )
    if "RuntimeError" in ending:
        assert done.stderr.strip().endswith("RuntimeError: the end")
        assert done.stderr.count("Traceback") == 1
    else:
        assert done.stderr == ""
    assert rest == ["ClientClosedError", ""] if "excepthook" in ending else [""]


STOPPED = """
import os, signal, sys
from engine_client import connect
from engine_client.dispatch import dispatcher

dispatcher.EXIT_TIMEOUT = 0.5
client = connect(sys.argv[1], connect_timeout=30, close_timeout=None)
pid = client.call_utility("whoami")[0]["pid"]
os.kill(pid, signal.SIGSTOP)
client.settle_utility("echo", b"x" * 10_000_000, timeout=0)
print("the end", flush=True)
"""


def test_exit_does_not_wait_for_ever_for_a_stopped_engine() -> None:
    """Even with no limit on close, the end of the program is not held by what nobody reads."""
    assert 0 < EXIT_TIMEOUT <= 10
    with address() as where, EngineProcess(where) as engine:
        try:
            done = run(STOPPED, where)
        finally:
            engine.signal(signal.SIGCONT)
        assert done.stdout == "the end\n"
        assert done.stderr == ""
