"""Starting a client: its sockets, its dispatcher, and the wait until every engine is ready.

The dispatcher itself greets the engines, at the start and whenever one restarts; here is only the
caller's side, under one deadline.
"""

from __future__ import annotations

import logging
import time

from engine_client.config import ClientConfig
from engine_client.deadline import Deadline
from engine_client.dispatch.dispatcher import Dispatcher, ProcessOwner
from engine_client.dispatch.sockets import Transport
from engine_client.engines import engine_names
from engine_client.errors import HandshakeTimeout
from engine_client.wire.messages import Init

__all__ = ["start"]

logger = logging.getLogger("engine_client")

PROGRESS_INTERVAL = 30.0
"""Seconds between log lines that say for whom the start waits."""
_CLEANUP = 5.0


def start(
    config: ClientConfig,
    transport: Transport,
    *,
    init: Init | None,
    processes: ProcessOwner | None = None,
) -> Dispatcher:
    """Run the handshake with all engines.

    Args:
        config: the client's settings.
        transport: its open sockets; closed here when the start fails.
        init: what a HELLO is answered with; None when another process greets the engines.
        processes: who started the engines; stopped here when the start fails.

    Raises:
        HandshakeTimeout: not all engines were ready by the deadline.
        HandshakeError: an engine cannot become ready.
    """
    deadline = Deadline(config.connect_timeout)
    dispatcher = Dispatcher(config, transport, init=init, processes=processes)
    try:
        dispatcher.start()
        _wait(dispatcher, deadline)
    except BaseException:
        cleanup = Deadline(_CLEANUP)
        dispatcher.ask_close(Deadline(0 if processes is None else _CLEANUP)).wait(
            cleanup.lock_timeout()
        )
        dispatcher.join(cleanup.remaining())
        raise
    return dispatcher


def _wait(dispatcher: Dispatcher, deadline: Deadline) -> None:
    startup = dispatcher.startup
    began = time.monotonic()
    while not startup.latch.wait(deadline.lock_timeout(at_most=PROGRESS_INTERVAL)):
        missing = dispatcher.core.missing()
        if deadline.expired:
            raise _timeout_error(dispatcher, missing)
        logger.warning(
            "after %.0f s still waiting for %s on %s",
            time.monotonic() - began,
            _awaited(missing),
            _where(dispatcher),
        )
    if startup.error is not None:
        raise startup.error


def _awaited(missing: dict[int, str]) -> str:
    by_stage: dict[str, list[int]] = {}
    for index, stage in missing.items():
        by_stage.setdefault(stage, []).append(index)
    return "; ".join(f"{stage} of {engine_names(who)}" for stage, who in by_stage.items())


def _where(dispatcher: Dispatcher) -> str:
    addresses = dispatcher.addresses
    return addresses.get("handshake") or addresses["input"]


_ADVICE = {
    "HELLO": "are they started, and told this address?  An engine says HELLO only once: one that "
    "got its INIT from an earlier client or try must be restarted, and one that already served an "
    "earlier client belongs to that one's session",
    "READY and registration": "they got their INIT: they are still loading their model, or failed "
    "(see their logs); restart them before the next try",
    "registration": "they are started but have not registered on the input address; an engine that "
    "is connected and does not register belonged to an earlier client",
    "READY": "they registered but did not say READY; see their logs",
}


def _timeout_error(dispatcher: Dispatcher, missing: dict[int, str]) -> HandshakeTimeout:
    text = (
        f"{engine_names(missing)} not ready after {dispatcher.config.connect_timeout:g} s "
        f"(connect_timeout) on {_where(dispatcher)}"
    )
    stages = list(dict.fromkeys(missing.values()))
    for stage in stages:
        who = [index for index, awaited in missing.items() if awaited == stage]
        text += f"; no {stage} from {engine_names(who)}: {_ADVICE.get(stage, '')}"
    notes = list(dispatcher.core.notes)
    if notes:
        text += f"; ignored meanwhile: {'; '.join(dict.fromkeys(notes))}"
    return HandshakeTimeout(text, missing=tuple(missing), stage=stages[0] if stages else "")
