"""A real engine is killed under a waiting call, and one in its place serves again."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

import engine_client
from engine_client import EngineDeadError, LoraRequest, Ok, UtilityCallError
from tests.helpers import run_in_thread, scaled, wait_until
from tests.interop.engines import vllm_engines


@pytest.mark.parametrize("transport", ["tcp", "ipc"])
def test_killed_under_a_waiting_call(folder: Path, transport: str, report: list[str]) -> None:
    """The waiting call ends with the dead engine's error; the engine's successor serves again."""
    start = time.monotonic()
    with (
        vllm_engines(folder, transport=transport) as group,
        engine_client.connect(group.address, engine_count=2, connect_timeout=scaled(150)) as client,
    ):
        ready = time.monotonic()
        victim = group.engines[1]
        # Stopped, it cannot answer: the call waits for it, without a time limit.
        victim.signal(signal.SIGSTOP)
        call = run_in_thread(client.call_utility, "is_sleeping", timeout=None)
        wait_until(lambda: client.pending_utility_calls == 1, what="engine 0's reply")
        assert not call.done
        closed = run_in_thread(victim.closed_at)

        killed = victim.signal(signal.SIGKILL)
        error = call.error()
        raised = time.monotonic()

        assert isinstance(error, UtilityCallError)
        assert error.outcomes is not None
        assert isinstance(error.outcomes[0], Ok)
        assert error.outcomes[0].value is False
        failure = error.outcomes.failures[1]
        assert isinstance(failure, EngineDeadError)
        assert failure.may_have_run
        assert [info.alive for info in client.engines] == [True, False]
        assert client.pending_utility_calls == 0
        assert not client.closed
        lost = closed.result()
        report += [
            f"{transport}: two engines ready in {ready - start:.1f} s",
            f"{transport}: SIGKILL to the caller's error {(raised - killed) * 1e3:.1f} ms; to the "
            f"kernel's closing of its descriptors {(lost - killed) * 1e3:.1f} ms; from there to "
            f"the error {(raised - lost) * 1e3:+.1f} ms",
            f"{transport}: {failure}",
        ]
        assert raised - lost < scaled(1.0)

        # Known dead: refused at once, and the other engine is not told.
        with pytest.raises(UtilityCallError) as caught:
            client.call_utility("is_sleeping")
        assert caught.value.outcomes is not None
        assert caught.value.outcomes.may_have_run == ()
        assert client.call_utility("is_sleeping", engines="alive") == [False]

        again = time.monotonic()
        group.start(1)
        wait_until(lambda: client.engines[1].alive, timeout=300, what="the engine's return")
        report.append(
            f"{transport}: started again, it serves after {time.monotonic() - again:.1f} s"
        )
        assert client.call_utility("is_sleeping") == [False, False]
        assert client.collective_rpc("check_health") == [None, None]

        # Once more, under a change: it is undone where it can be.
        victim = group.engines[1]
        victim.signal(signal.SIGSTOP)
        change = run_in_thread(
            client.add_lora,
            LoraRequest("alpha", 1, group.adapter("alpha")),
            timeout=None,
            compensate=True,
        )
        wait_until(lambda: client.pending_utility_calls == 1, what="engine 0's reply")
        victim.signal(signal.SIGKILL)
        error = change.error()
        assert isinstance(error, UtilityCallError)
        assert error.outcomes is not None
        assert error.outcomes.succeeded == (0,)
        assert isinstance(error.outcomes.failures[1], EngineDeadError)
        assert error.compensation is not None
        assert isinstance(error.compensation[0], Ok)
        assert error.compensation[0].value is True
        assert isinstance(error.compensation.failures[1], EngineDeadError)
        assert client.list_loras(engines="alive") == frozenset()
        assert (client.stats.deaths, client.stats.returns) == (2, 1)
        assert client.stats.malformed_messages == 0
