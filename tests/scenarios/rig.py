"""A client with reference engines in other processes, which a test tells what to do wrong."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from engine_client import EngineClient, connect
from tests.helpers import EngineProcess, scaled, wait_until


@dataclass(frozen=True, slots=True)
class Rig:
    """A client and its engines; engine k is ``engines[k]``."""

    client: EngineClient
    engines: Sequence[EngineProcess]

    def control(self, method: str, *args: Any, engines: Sequence[int] | None = None) -> list[Any]:
        """Call the remote control of some engines, which no fault disturbs."""
        return self.client.call_utility(method, *args, engines=engines, timeout=scaled(20))

    def fault(
        self, method: str, do: str, *, engines: Sequence[int] | None = None, **how: Any
    ) -> None:
        """Make engines do something wrong from their next such call on."""
        self.control("mock_fault", {"method": method, "do": do, **how}, engines=engines)

    def release(self, *engines: int) -> None:
        """Let engines send the replies that they hold."""
        self.control("mock_release", engines=engines or None)

    def settle_down(self) -> None:
        """Take all faults away and let all replies out."""
        self.control("mock_clear")
        self.release()

    def received(self, engine: int, method: str | None = None) -> list[Any]:
        """Return the arguments of each utility call that an engine received so far."""
        return [
            entry["args"]
            for entry in self.engines[engine].log
            if entry["type"] == "UTILITY" and method in (None, entry["method"])
        ]

    def wait_received(self, engine: int, args: list[Any], method: str = "echo") -> None:
        """Wait until an engine has received a call with these arguments."""
        wait_until(
            lambda: args in self.received(engine, method),
            what=f"engine {engine} to receive {method}{args}",
        )

    def check(self) -> None:
        """Check that nothing waits and that every engine answers the next call right."""
        assert self.client.pending_utility_calls == 0
        for _ in range(2):
            nonce = time.monotonic_ns()
            answers = self.client.call_utility("echo", nonce, timeout=scaled(10))
            assert answers == [nonce] * len(self.engines)
        assert self.client.pending_utility_calls == 0
        assert all(info.alive for info in self.client.engines)
        assert [info.in_flight for info in self.client.engines] == [0] * len(self.engines)

    def check_messages(self) -> None:
        """Check that no engine ever received a message that it could not read."""
        for engine in self.engines:
            for entry in engine.log:
                assert entry["type"] in ("UTILITY", "ABORT"), entry
                assert entry["type"] == "ABORT" or isinstance(entry["call_id"], int), entry


@contextlib.contextmanager
def address() -> Iterator[str]:
    """An address for a handshake, short enough for a socket file on every system."""
    folder = tempfile.mkdtemp(prefix="ec-")
    try:
        yield f"ipc://{folder}/h"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def rig(
    codecs: Sequence[str] = ("cbor", "cbor"),
    *,
    faults: Sequence[Any] = (),
    log: bool = True,
    **settings: Any,
) -> Iterator[Rig]:
    """Start engines, one per codec, and a client that has connected to them.

    Args:
        codecs: Each engine's.
        faults: Rules for every engine, from the start.
        log: Whether engines keep what they receive.
        **settings: For ``connect()``.
    """
    with contextlib.ExitStack() as stack:
        where = stack.enter_context(address())
        engines = [
            stack.enter_context(EngineProcess(where, index, codec=codec, faults=faults, log=log))
            for index, codec in enumerate(codecs)
        ]
        settings.setdefault("connect_timeout", scaled(30))
        client = stack.enter_context(connect(where, engine_count=len(codecs), **settings))
        made = Rig(client, engines)
        # An answer of each: only then is its last connection surely there, and no later test sees
        # a descriptor appear.
        made.control("mock_log")
        yield made
