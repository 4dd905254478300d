"""A client and reference engines in threads of the same process: quick, and open to look into."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_client import EngineClient, connect
from engine_client.tools.faults import FaultPlan, FaultRule
from engine_client.tools.mock_engine import MockEngine
from tests.helpers.limits import scaled, wait_until
from tests.helpers.threads import run_in_thread


@dataclass(frozen=True, slots=True)
class Group:
    """A client and its engines; engine k is ``engines[k]``."""

    client: EngineClient
    engines: Sequence[MockEngine]
    plan: FaultPlan
    """What all engines do wrong."""

    def calls(self, engine: int) -> list[tuple[str, list[Any]]]:
        """Return the utility calls that an engine received so far."""
        log = self.engines[engine].log
        return [(entry.method, entry.args) for entry in log if entry.type == "UTILITY"]


@contextlib.contextmanager
def engine_group(
    codecs: Sequence[str] = ("cbor", "msgpack"),
    *,
    faults: Iterable[FaultRule | Mapping[str, Any]] = (),
    options: Mapping[str, Any] | None = None,
    ready: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Iterator[Group]:
    """Start engines, one per codec, and a client that has connected to them.

    Args:
        codecs: Each engine's.
        faults: Rules for all engines.
        options: Of all engines.
        ready: Keys of their registrations to replace.
        **settings: For ``connect()``.
    """
    folder = Path(tempfile.mkdtemp(prefix="ec-"))
    address = f"ipc://{folder}/h"
    plan = FaultPlan(faults)
    engines = [
        MockEngine(address, index, codec=codec, faults=plan, options=options, ready=ready)
        for index, codec in enumerate(codecs)
    ]
    settings = {"connect_timeout": scaled(30), "timeout": scaled(20), **settings}
    try:
        connecting = run_in_thread(connect, address, engine_count=len(codecs), **settings)
        # An engine that finds nothing bound tries again only 100 ms later.
        wait_until(lambda: (folder / "h").exists() or connecting.done)
        for engine in engines:
            engine.start()
        with connecting.result(40) as client:
            yield Group(client, engines, plan)
    finally:
        for engine in engines:
            engine.stop()
        for engine in engines:
            assert engine.join(scaled(10))
        shutil.rmtree(folder, ignore_errors=True)
