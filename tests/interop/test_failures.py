"""How real engines fail, and what a client sees: each engine's end is its own, known at once.

Of two engines, number 1 fails in one way after the other, and a new process takes its place; number
0 serves on through all of it.
"""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import engine_client
from engine_client import (
    EngineClient,
    EngineDeadError,
    EngineOutput,
    EngineRequest,
    FinishReason,
    RequestStream,
    SamplingParams,
    UtilityCallError,
)
from engine_client.dispatch.lockstep import Outgoing
from engine_client.engines import engine_id
from engine_client.wire.codec import codec_named
from engine_client.wire.messages import RequestType
from tests.helpers import BackgroundCall, run_in_thread, scaled, wait_until
from tests.helpers.leaks import Snapshot
from tests.interop.engines import EngineGroup, vllm_engines

NOTICED = 0.02
"""Seconds from the loss of a connection to the error."""
Engines = tuple[EngineGroup, EngineClient]


@pytest.fixture(scope="module", params=["tcp", "ipc"])
def engines(request: pytest.FixtureRequest) -> Iterator[Engines]:
    """Two engines that these tests share, and their client."""
    before = Snapshot()
    with (
        tempfile.TemporaryDirectory(prefix="ec-fail-", ignore_cleanup_errors=True) as name,
        vllm_engines(Path(name), transport=request.param) as group,
        engine_client.connect(
            group.address, engine_count=2, connect_timeout=scaled(150), timeout=scaled(60)
        ) as client,
    ):
        yield group, client
    before.check()


@pytest.fixture(autouse=True)
def nothing_left_behind() -> None:
    """Look for what is left behind all tests only: an engine's successor outlives its test."""


@pytest.fixture
def how(engines: Engines, report: list[str]) -> Iterator[list[str]]:
    """What to say of a failure; afterwards the engine is replaced, and everything works."""
    group, client = engines
    if not client.engines[1].alive:  # an earlier test failed
        _replace(group, client)
    said = [group.address.partition(":")[0]]
    before = client.stats
    with _serving_on(client):
        yield said
        assert [info.alive for info in client.engines] == [True, False]
        assert client.stats.deaths == before.deaths + 1
        said.append(f"another process serves {_replace(group, client):.1f} s after its start")
    assert client.call_utility("is_sleeping") == [False, False]
    assert len(_tokens(_request(client, "again", 1, tokens=8))) == 8
    assert client.pending() == []
    assert client.stats.malformed_messages == before.malformed_messages
    report.append(": ".join([said[0], "; ".join(said[1:])]))


def _replace(group: EngineGroup, client: EngineClient) -> float:
    """Start another process in the place of engine 1; return how long that took."""
    start = time.monotonic()
    group.start(1)
    wait_until(lambda: client.engines[1].alive, timeout=150, what="the engine's return")
    return time.monotonic() - start


def _request(client: EngineClient, name: str, engine: int, tokens: int = 2000) -> RequestStream:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return client.call(EngineRequest(name, [5, 6, 7], params, data_parallel_rank=engine))


def _tokens(stream: RequestStream) -> list[int]:
    return [token for output in stream for token in output.new_token_ids]


@contextmanager
def _serving_on(client: EngineClient) -> Iterator[None]:
    """Engine 0 answers calls and finishes a request that was running before."""
    with _request(client, "bystander", 0, tokens=1500) as stream:
        first = stream.recv()
        yield
        assert len(first.new_token_ids) + len(_tokens(stream)) == 1500
        assert stream.finish_reason == FinishReason.LENGTH


def _last_error(stream: RequestStream) -> tuple[list[EngineOutput], EngineDeadError, float]:
    """Read to the error; return it and when it came."""
    outputs = []
    try:
        while True:
            outputs.append(stream.recv(timeout=scaled(60)))
    except EngineDeadError as error:
        return outputs, error, time.monotonic()


def _call(client: EngineClient, method: str, *args: object) -> tuple[EngineDeadError, float]:
    """Call engine 1 only, and return how it dies and when that was known."""
    with pytest.raises(UtilityCallError) as caught:
        client.call_utility(method, *args, engines=[1], timeout=None)
    ended = time.monotonic()
    assert caught.value.outcomes is not None
    failure = caught.value.outcomes.failures[1]
    assert isinstance(failure, EngineDeadError)
    return failure, ended


def _waiting_call(client: EngineClient) -> BackgroundCall[tuple[EngineDeadError, float]]:
    """Make engine 1 wait for its requests to end, and return when it does."""
    calling = run_in_thread(_call, client, "pause_scheduler", "wait", False)
    wait_until(lambda: client.pending_utility_calls == 1, what="the call's start")
    while client.call_utility("is_scheduler_paused", engines=[1]) != [True]:
        pass
    assert not calling.done
    return calling


def _raw(client: EngineClient, kind: bytes, payload: bytes) -> float:
    """Send engine 1 what the client itself never would."""
    dispatcher = client._dispatcher
    message = Outgoing("input", 1, (engine_id(1), kind, payload))
    dispatcher.core.outgoing.append(message)
    moment = time.monotonic()
    dispatcher.outbox.wakeup.poke()
    return moment


def _plain(value: object) -> bytes:
    return codec_named("msgpack").encode(value)


def test_killed(engines: Engines, how: list[str]) -> None:
    """SIGKILL ends a call and a stream of its engine within 20 ms of the lost connection."""
    group, client = engines
    victim = group.engines[1]
    stream = _request(client, "running", 1)
    stream.recv()
    reading = run_in_thread(_last_error, stream)
    calling = _waiting_call(client)
    closing = run_in_thread(victim.closed_at)
    killed = victim.signal(signal.SIGKILL)
    outputs, error, stream_ended = reading.result()
    failure, call_ended = calling.result()
    closed = closing.result()
    assert all(output.finish_reason is None for output in outputs)
    assert error.may_have_run
    assert failure.may_have_run
    assert "connection was lost" in str(failure)
    how += [
        f"SIGKILL: its descriptors were closed after {(closed - killed) * 1e3:.0f} ms",
        f"from there to the call's error {(call_ended - closed) * 1e3:+.1f} ms, to the stream's "
        f"{(stream_ended - closed) * 1e3:+.1f} ms",
    ]
    assert max(stream_ended, call_ended) - closed < scaled(NOTICED)


def test_fatal_error(engines: Engines, how: list[str]) -> None:
    """An engine that reports a fatal error is known by its connection, before its process ends."""
    group, client = engines
    victim = group.engines[1]
    stream = _request(client, "twin", 1)
    stream.recv()
    pending = stream._request
    calling = _waiting_call(client)
    # A second request of the same id: the client itself never makes one.
    sent = _raw(client, RequestType.ADD, pending.payloads["msgpack"][0])
    _, error, stream_ended = _last_error(stream)
    failure, call_ended = calling.result()
    for found in (error, failure):
        assert "ENGINE_CORE_DEAD" in str(found)
        assert found.may_have_run
    # The process is still there, and its input connection swallows what is sent.
    assert victim.running
    refused, _ = _call(client, "is_sleeping")
    assert not refused.may_have_run
    with pytest.raises(EngineDeadError):
        _request(client, "late", 1)
    assert victim.running
    gone = victim.closed_at()
    how += [
        f"a fatal error: known {(max(stream_ended, call_ended) - sent) * 1e3:.1f} ms after the "
        f"request that caused it, {gone - stream_ended:.1f} s before the process was gone"
    ]


def test_terminated(engines: Engines, how: list[str]) -> None:
    """SIGTERM aborts what runs; the call that waited for it gets no answer, and fails."""
    group, client = engines
    victim = group.engines[1]
    stream = _request(client, "running", 1)
    stream.recv()
    calling = _waiting_call(client)
    closing = run_in_thread(victim.closed_at)
    told = victim.signal(signal.SIGTERM)
    _tokens(stream)
    aborted = time.monotonic()
    assert stream.finish_reason == FinishReason.ABORT
    failure, call_ended = calling.result(30)
    assert failure.may_have_run
    assert "connection was lost" in str(failure)
    how += [
        f"SIGTERM: its request was aborted after {(aborted - told) * 1e3:.0f} ms",
        f"the waiting call failed after {call_ended - told:.1f} s, "
        f"{(call_ended - closing.result()) * 1e3:+.1f} ms from the closing of its descriptors",
    ]


def test_deaf(engines: Engines, how: list[str]) -> None:
    """An engine whose input thread dies lives on and hears nothing: it is treated as dead."""
    group, client = engines
    stream = _request(client, "running", 1)
    stream.recv()
    sent = _raw(client, RequestType.ADD, _plain([]))
    _, error, ended = _last_error(stream)
    assert "connection was lost" in str(error)
    assert group.engines[1].running
    refused, _ = _call(client, "is_sleeping")
    assert not refused.may_have_run
    how.append(
        f"a request of no fields deafens it: known after {(ended - sent) * 1e3:.1f} ms, while its "
        f"process lives"
    )


def test_mute(engines: Engines, how: list[str]) -> None:
    """An engine whose output thread dies lives on and says nothing: it is treated as dead."""
    group, client = engines
    stream = _request(client, "running", 1)
    stream.recv()
    calling = _waiting_call(client)
    # The answer to this must go to a client that does not exist.
    sent = _raw(client, RequestType.UTILITY, _plain([5, 1, "is_sleeping", []]))
    _, error, stream_ended = _last_error(stream)
    failure, call_ended = calling.result()
    assert error.may_have_run
    assert failure.may_have_run
    assert group.engines[1].running
    ended = max(stream_ended, call_ended)
    how.append(f"a reply to nobody mutes it: known after {(ended - sent) * 1e3:.1f} ms: {failure}")
