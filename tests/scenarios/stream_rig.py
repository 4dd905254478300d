"""Engines in threads of the test's own process, whose requests and logs a test can look into."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine_client import EngineClient, EngineRequest, RequestStream, SamplingParams, connect
from engine_client.tools.mock.tokens import generate_tokens
from engine_client.tools.mock_engine import MockEngine
from tests.helpers import scaled, wait_until
from tests.scenarios.rig import address

ENDLESS = 2000
"""``max_tokens`` of a request that runs until it is aborted."""


@dataclass(frozen=True, slots=True)
class Served:
    """A client and its engines."""

    client: EngineClient
    engines: Sequence[MockEngine]

    def call(
        self, name: str, prompt: Sequence[int] = (1, 2, 3), count: int = ENDLESS, **fields: Any
    ) -> RequestStream:
        """Send a request for so many tokens."""
        return self.client.call(
            EngineRequest(name, prompt, SamplingParams(max_tokens=count), **fields)
        )

    def step(self, count: int = 1, engines: Sequence[int] | None = None) -> None:
        """Have engines with manual steps make some; what they tell has arrived then."""
        self.client.call_utility("mock_step", count, engines=engines, timeout=scaled(20))

    def sync(self) -> None:
        """Return when the engines have handled all that was sent, and all they told is here."""
        self.client.call_utility("echo", None, engines="alive", timeout=scaled(20))

    def aborts(self, engine: int) -> list[tuple[float, list[str]]]:
        """Time and user ids of each ABORT that an engine received."""
        return [
            (entry.time, [wire_id.rpartition("-")[0] for wire_id in entry.args])
            for entry in self.engines[engine].log
            if entry.type == "ABORT"
        ]

    def aborted(self) -> list[str]:
        """All ids that engines were told to abort, each as often as they were."""
        found = [ids for index in range(len(self.engines)) for _, ids in self.aborts(index)]
        return sorted(one for ids in found for one in ids)

    def live(self) -> int:
        """How many requests the engines have, by their own count."""
        return sum(len(engine.model.scheduler.live) for engine in self.engines)

    def check(self) -> None:
        """Check that nothing runs and the next request on each engine is right."""
        wait_until(lambda: self.client.active_requests == 0, what="no active request")
        self.sync()
        assert self.live() == 0
        for info in self.client.engines:
            if info.alive:
                stream = self.call(f"check-{info.index}", [9], 3, data_parallel_rank=info.index)
                if self.engines[info.index].model.options.manual_steps:
                    self.step(3, engines=[info.index])
                assert [t for o in stream for t in o.new_token_ids] == generate_tokens([9], 3)
        assert self.client.active_requests == 0
        assert self.client.pending_utility_calls == 0


@contextlib.contextmanager
def served(
    codecs: Sequence[str] = ("cbor", "msgpack"),
    *,
    options: Mapping[str, Any] | None = None,
    ready: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Iterator[Served]:
    """Start engines, one per codec, and a client of them."""
    with contextlib.ExitStack() as stack:
        where = stack.enter_context(address())
        engines = [
            stack.enter_context(MockEngine(where, index, codec=codec, options=options, ready=ready))
            for index, codec in enumerate(codecs)
        ]
        settings.setdefault("connect_timeout", scaled(30))
        settings.setdefault("timeout", scaled(30))
        client = stack.enter_context(connect(where, engine_count=len(codecs), **settings))
        yield Served(client, engines)


def tokens_of(stream: RequestStream) -> list[int]:
    """Read a stream to its end."""
    return [token for output in stream for token in output.new_token_ids]
