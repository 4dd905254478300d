"""A soak: callers and readers at work while engines are killed, stopped, cut short and restarted.

At the end every account is exact: each call made has one outcome per engine, each answer is its
own, each output that came is in a stream or counted as late, and nothing is registered.
"""

from __future__ import annotations

import contextlib
import random
import signal
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

from engine_client import (
    CallTimeout,
    DuplicateRequestError,
    EngineClient,
    EngineDeadError,
    EngineRequest,
    FinishReason,
    NotSentError,
    Ok,
    SamplingParams,
    StreamError,
    connect,
)
from engine_client.engines import Targets
from engine_client.stream import RequestStream
from engine_client.tools.mock.tokens import generate_tokens
from tests.helpers import EngineProcess, run_in_thread, scaled, wait_until
from tests.scenarios.rig import address
from tests.stress.memory import resident

__all__ = ["soak"]

ENGINES = 3
CALLERS = 4
READERS = 3


@dataclass(slots=True)
class Accounts:
    """What the threads of a soak did."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, counts: Counter[str]) -> None:
        with self.lock:
            self.counts += counts


def caller(client: EngineClient, seed: int, done: threading.Event) -> Counter[str]:
    """Make calls, some with almost no time; count each engine's outcome."""
    chance = random.Random(seed)
    counts: Counter[str] = Counter()
    number = seed << 32
    while not done.is_set():
        number += 1
        engines: Targets = chance.choice((None, "alive", [chance.randrange(ENGINES)]))
        timeout = chance.choice((0.0, 0.01, 0.3, 0.3))
        outcomes = client.settle_utility("echo", number, engines=engines, timeout=timeout)
        counts["calls"] += 1
        if engines is None:
            assert tuple(outcomes) == tuple(range(ENGINES))
        for index, outcome in outcomes.items():
            counts["outcomes"] += 1
            if isinstance(outcome, Ok):
                assert outcome.value == number, "somebody else's answer"
                counts["answers"] += 1
                continue
            error = outcome.error
            assert error.engine == index
            assert isinstance(error, CallTimeout | EngineDeadError | NotSentError), error
            counts[type(error).__name__] += 1
    return counts


def reader(
    client: EngineClient, seed: int, done: threading.Event, streams: list[RequestStream]
) -> Counter[str]:
    """Send requests and read them, some not to their end; every token must be right."""
    chance = random.Random(seed)
    counts: Counter[str] = Counter()
    number = 0
    mine: list[RequestStream] = []
    while not done.is_set():
        number += 1
        count_delivered(mine, counts)
        prompt = [chance.randrange(500) for _ in range(3)]
        length = chance.randrange(1, 30)
        leave_after = chance.choice((None, None, 0, 3))
        request = EngineRequest(f"r{seed}-{number}", prompt, SamplingParams(max_tokens=length))
        try:
            stream = client.call(request)
        except (EngineDeadError, NotSentError):
            counts["refused"] += 1
            time.sleep(0.01)  # all engines are dead; others restart them
            continue
        except DuplicateRequestError:
            raise AssertionError("an id that is new is in use") from None
        counts["requests"] += 1
        mine.append(stream)
        tokens: list[int] = []
        try:
            with stream:
                while leave_after is None or len(tokens) < leave_after:
                    output = stream.recv(timeout=2.0)
                    tokens += output.new_token_ids
                    if output.finish_reason is not None:
                        # An engine that is told to end ends its requests first.
                        counts[f"streams ended by {output.finish_reason!s}"] += 1
                        ended = output.finish_reason == FinishReason.ABORT
                        assert ended or len(tokens) == length
                        break
                else:
                    counts["left"] += 1
        except (EngineDeadError, StreamError) as error:
            counts[f"streams ended by {type(error).__name__}"] += 1
        assert tokens == generate_tokens(prompt, length)[: len(tokens)], "a wrong token"
    streams += mine
    return counts


def count_delivered(streams: list[RequestStream], counts: Counter[str]) -> None:
    """Count the outputs of the streams that have ended, and forget these."""
    ended = [stream for stream in streams if stream._request.finished]
    counts["delivered"] += sum(stream._request.delivered for stream in ended)
    streams[:] = [stream for stream in streams if stream not in ended]


def soak(seed: int, *, seconds: float) -> dict[str, float]:
    """Run it; see the module's text."""
    chance = random.Random(seed)
    accounts: Counter[str] = Counter()
    streams: list[RequestStream] = []
    done = threading.Event()
    with contextlib.ExitStack() as stack:
        where = stack.enter_context(address())
        engines = [
            stack.enter_context(EngineProcess(where, index, log=False)) for index in range(ENGINES)
        ]
        client = stack.enter_context(
            connect(where, engine_count=ENGINES, connect_timeout=scaled(60))
        )
        running = [run_in_thread(caller, client, seed + n, done) for n in range(CALLERS)]
        running += [
            run_in_thread(reader, client, seed + 100 + n, done, streams) for n in range(READERS)
        ]
        memory = 0
        end = time.monotonic() + seconds
        try:
            while time.monotonic() < end and not any(one.done for one in running):
                index = chance.randrange(ENGINES)
                what = chance.choice(("kill", "stop", "end", "nothing"))
                if what in ("kill", "end"):
                    accounts["restarts"] += 1
                    returns = client.stats.returns
                    if what == "kill":
                        engines[index].kill()
                    else:
                        engines[index].signal(signal.SIGTERM)
                        engines[index].wait()
                    engines[index].close()
                    engines[index] = stack.enter_context(EngineProcess(where, index, log=False))
                    wait_until(lambda r=returns: client.stats.returns > r, timeout=60)  # type: ignore[misc]
                elif what == "stop":
                    accounts["stops"] += 1
                    engines[index].signal(signal.SIGSTOP)
                    done.wait(chance.uniform(0.05, 0.5))
                    engines[index].signal(signal.SIGCONT)
                else:
                    done.wait(chance.uniform(0.05, 0.5))
                if not memory and time.monotonic() > end - seconds / 2:
                    memory = resident()
        finally:
            done.set()
            for one in running:
                one.join(60)
        for one in running:
            accounts += one.result(60)
        # Everybody answers what is still under way.
        client.call_utility("echo", 0, timeout=scaled(60))
        wait_until(lambda: client.active_requests == 0, what="the last request to end")
        client.call_utility("echo", 0, timeout=scaled(60))
        stats = client.stats
        assert client.pending_utility_calls == 0
        assert [info.in_flight for info in client.engines] == [0] * ENGINES
        assert all(info.alive for info in client.engines)
        assert stats.malformed_messages == stats.stray_messages == 0
        kinds = ("answers", "CallTimeout", "EngineDeadError", "NotSentError")
        assert accounts["outcomes"] == sum(accounts[kind] for kind in kinds)
        count_delivered(streams, accounts)
        assert not streams
        assert stats.outputs == accounts["delivered"] + stats.late_outputs, (
            "an output is unaccounted for"
        )
        assert stats.late_replies <= accounts["CallTimeout"] + accounts["EngineDeadError"]
        assert stats.returns == accounts["restarts"]
        assert stats.deaths == accounts["restarts"], "a living engine was taken for dead"
        grown = resident() - memory if memory else 0
        assert grown < 20_000_000, f"{grown:,} bytes more"
    return dict(sorted(accounts.items())) | {
        "outputs": stats.outputs,
        "late outputs": stats.late_outputs,
        "late replies": stats.late_replies,
        "deaths": stats.deaths,
        "MB grown": round(grown / 1e6, 1),
    }
