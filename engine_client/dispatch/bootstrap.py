"""Starting a client: its sockets, its dispatcher, and the wait until every engine is ready.

The dispatcher itself greets the engines, at the start and whenever one restarts; here is only the
caller's side, under one deadline.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from engine_client._render import shown
from engine_client.config import ClientConfig
from engine_client.deadline import Deadline
from engine_client.dispatch.dispatcher import Dispatcher, ProcessOwner
from engine_client.dispatch.sockets import Transport
from engine_client.dispatch.waiting import uninterrupted
from engine_client.engines import engine_names
from engine_client.errors import HandshakeTimeout
from engine_client.wire.messages import Init
from engine_client.wire.plain import plain

__all__ = ["Opened", "check_parallel_config", "init_for", "start"]

logger = logging.getLogger("engine_client")

PROGRESS_INTERVAL = 30.0
"""Seconds between log lines that say for whom the start waits."""
_CLEANUP = 5.0

C = TypeVar("C")


@dataclass(frozen=True, slots=True)
class Opened:
    """What a client needs to start; closed and stopped here when the start fails."""

    transport: Transport
    init: Init | None
    """What a HELLO is answered with; None when another process greets the engines."""
    processes: ProcessOwner | None = None
    """Who started the engines; None when somebody else did."""
    coordinator_address: str | None = None
    """Of an external coordinator, where it is known beforehand."""


def check_parallel_config(config: object) -> None:
    """Refuse what would end an engine as it starts, before any engine hears of it.

    Raises:
        TypeError: not a mapping from strings to what an engine accepts.
        EncodeError: a value that cannot be sent.
    """
    if config is None:
        return
    if not isinstance(config, Mapping):
        raise TypeError(f"parallel_config must be a mapping or None, not {type(config).__name__}")
    for key, value in config.items():
        if not isinstance(key, str):
            raise TypeError(f"parallel_config must have strings as keys, not {shown(key)}")
        name = f"parallel_config[{shown(key)}]"
        if isinstance(value, bool) or not isinstance(value, (int, str, list, tuple)):
            raise TypeError(
                f"{name} must be an integer, a string or a list, not a {type(value).__name__}: an "
                f"engine does not start with it"
            )
        plain(value, name)


def init_for(transport: Transport, parallel_config: Mapping[str, Any] | None) -> Init:
    """What tells engines where to connect."""
    addresses = transport.addresses
    return Init(
        inputs=(addresses["input"],),
        outputs=(addresses["output"],),
        coordinator_input=addresses.get("coordinator_input"),
        coordinator_output=addresses.get("coordinator_output"),
        parallel_config=dict(parallel_config or {}),
    )


def start(
    config: ClientConfig, opener: Callable[[], Opened], client: Callable[[Dispatcher], C]
) -> C:
    """Open a client's sockets and run the handshake with all engines.

    Args:
        config: the client's settings.
        opener: opens the sockets, and starts the engines if that is the client's task.
        client: makes what owns the dispatcher, and ends it when it is dropped.

    Raises:
        HandshakeTimeout: not all engines were ready by the deadline.
        HandshakeError: an engine cannot become ready.
    """
    deadline = Deadline(config.connect_timeout)
    made, dispatcher = uninterrupted(
        lambda: _begin(config, opener(), client),
        lambda begun: begun[1].abandon(Deadline(0), join=False),
    )
    try:
        _wait(dispatcher, deadline)
    except BaseException:
        dispatcher.abandon(Deadline(_CLEANUP if dispatcher.owns_processes else 0))
        raise
    return made


def _begin(
    config: ClientConfig, opened: Opened, client: Callable[[Dispatcher], C]
) -> tuple[C, Dispatcher]:
    dispatcher: Dispatcher | None = None
    try:
        dispatcher = Dispatcher(
            config,
            opened.transport,
            init=opened.init,
            processes=opened.processes,
            coordinator_address=opened.coordinator_address,
        )
        made = client(dispatcher)
        dispatcher.start()
    except BaseException:  # no descriptor or thread is left to be had
        if dispatcher is not None:
            dispatcher.abandon(Deadline(_CLEANUP))
        else:
            if opened.processes is not None:
                opened.processes.stop(_CLEANUP)
            opened.transport.close(0)
        raise
    return made, dispatcher


def _wait(dispatcher: Dispatcher, deadline: Deadline) -> None:
    startup = dispatcher.startup
    began = time.monotonic()
    while not startup.latch.wait(deadline.lock_timeout(at_most=PROGRESS_INTERVAL)):
        missing = dispatcher.core.missing()
        if deadline.expired and missing:
            raise _timeout_error(dispatcher, missing)
        logger.warning(
            "%s after %.0f s; still waiting for %s",
            _progress(dispatcher, missing),
            time.monotonic() - began,
            _awaited(missing),
        )
    if startup.error is not None:
        raise startup.error


def _progress(dispatcher: Dispatcher, missing: dict[int, str]) -> str:
    addresses = dispatcher.addresses
    where = addresses.get("handshake") or addresses["input"]
    total = dispatcher.config.engine_count
    return f"{total - len(missing)} of {total} engines ready on {where}"


def _by_stage(missing: dict[int, str]) -> dict[str, list[int]]:
    stages: dict[str, list[int]] = {}
    for index, stage in missing.items():
        stages.setdefault(stage, []).append(index)
    return stages


_GUESS = {
    "HELLO": "not started, or told another address?",
    "READY and registration": "loading the model?",
    "registration": "loading the model, or not started?",
    "READY": "see the engine's log",
}


def _awaited(missing: dict[int, str]) -> str:
    return "; ".join(
        f"{stage} from {engine_names(who)} ({_GUESS[stage]})"
        for stage, who in _by_stage(missing).items()
    )


_ADVICE = {
    "HELLO": "start what is not started, with this address; restart what runs, since an engine "
    "says HELLO only once and an earlier client or try may have answered it",
    "READY and registration": "it got its INIT, and is still loading its model or has failed (see "
    "its log); restart it before the next try",
    "registration": "start it with these addresses; one that runs and does not register belonged "
    "to an earlier client",
    "READY": "it registered but never said that it is ready; see its log",
}


def _timeout_error(dispatcher: Dispatcher, missing: dict[int, str]) -> HandshakeTimeout:
    config = dispatcher.config
    stages = _by_stage(missing)
    problems = [
        f"no {stage} from {engine_names(who)}: {_ADVICE[stage]}" for stage, who in stages.items()
    ]
    ready = config.engine_count - len(missing)
    if ready and list(stages) in (["HELLO"], ["registration"]):
        problems.append(f"or there are fewer than engine_count={config.engine_count}")
    notes = list(dict.fromkeys(dispatcher.core.notes))
    if notes:
        problems.append(f"ignored meanwhile: {'; '.join(notes)}")
    return HandshakeTimeout(
        f"{_progress(dispatcher, missing)} after {config.connect_timeout:g} s (connect_timeout); "
        + "; ".join(problems),
        missing=tuple(missing),
        stage=next(iter(stages), ""),
    )
