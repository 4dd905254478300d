"""How an engine and its client find each other, as two tables.

An engine that starts connects to the client's handshake socket and says HELLO; the client answers
with INIT, the addresses of its data sockets.  The engine loads its model, silently, for seconds or
minutes.  Then it registers on the client's input socket and says READY on the handshake socket.
These are two connections, so the client sees the two in either order::

            HELLO            READY           registration
    NEW ----------> GREETED ------> READY -----------------+
                    |  ^ HELLO                             v
                    |  (again)                         COMPLETE
                    |                                      ^
                    +---------------> REGISTERED ----------+
                      registration                 READY

A HELLO is answered with an INIT whenever it is accepted.  One that comes after more than a HELLO
is that of a new process: the engine restarted, and begins anew; whether it may, while the old one
still lives, is for the caller to decide before it feeds the event.  A repeated READY or
registration changes nothing.  Where a launcher did the first half (bootstrapped), only the
registration is awaited.

A READY or a registration without a HELLO is that of an engine which an earlier client greeted:
an engine says HELLO only once in its life.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, Final

from engine_client.errors import ProtocolError
from engine_client.wire.messages import Hello, Init, Ready, Registration

__all__ = [
    "ENGINE_TRANSITIONS",
    "TRANSITIONS",
    "ClientHandshake",
    "EngineEvent",
    "EngineHandshake",
    "EnginePhase",
    "Event",
    "Phase",
]


class Phase(Enum):
    """What a client has seen of one engine."""

    NEW = "new"
    GREETED = "greeted"
    READY = "ready"
    REGISTERED = "registered"
    COMPLETE = "complete"


class Event(Enum):
    """What an engine sends while it starts."""

    HELLO = "HELLO"
    READY = "READY"
    REGISTRATION = "registration"


TRANSITIONS: Final[dict[tuple[Phase, Event], Phase]] = {
    (Phase.NEW, Event.HELLO): Phase.GREETED,
    (Phase.GREETED, Event.HELLO): Phase.GREETED,
    (Phase.GREETED, Event.READY): Phase.READY,
    (Phase.GREETED, Event.REGISTRATION): Phase.REGISTERED,
    (Phase.READY, Event.REGISTRATION): Phase.COMPLETE,
    (Phase.REGISTERED, Event.READY): Phase.COMPLETE,
    # Repeats.
    (Phase.READY, Event.READY): Phase.READY,
    (Phase.REGISTERED, Event.REGISTRATION): Phase.REGISTERED,
    (Phase.COMPLETE, Event.READY): Phase.COMPLETE,
    (Phase.COMPLETE, Event.REGISTRATION): Phase.COMPLETE,
    # A new process.
    (Phase.READY, Event.HELLO): Phase.GREETED,
    (Phase.REGISTERED, Event.HELLO): Phase.GREETED,
    (Phase.COMPLETE, Event.HELLO): Phase.GREETED,
}

_WAITING_FOR: Final = {
    Phase.NEW: "HELLO",
    Phase.GREETED: "READY and registration",
    Phase.READY: "registration",
    Phase.REGISTERED: "READY",
    Phase.COMPLETE: "nothing",
}


class ClientHandshake:
    """The client's view of one engine's start."""

    def __init__(self, bootstrapped: bool = False) -> None:
        self.phase = Phase.READY if bootstrapped else Phase.NEW

    def __repr__(self) -> str:
        return f"<ClientHandshake {self.phase.value}: waiting for {self.waiting_for}>"

    @property
    def waiting_for(self) -> str:
        """What must come before the engine can serve, for the texts of errors."""
        return _WAITING_FOR[self.phase]

    def receive(self, event: Event) -> Phase:
        """Take what the engine sent.  After a HELLO you must send it an INIT.

        Raises:
            ProtocolError: the engine cannot send this now; the phase is unchanged.
        """
        phase = TRANSITIONS.get((self.phase, event))
        if phase is None:
            raise ProtocolError(
                f"{event.value} from an engine that has not said HELLO: it got its INIT from an "
                f"earlier client, and an engine asks for it only once; restart the engine"
            )
        self.phase = phase
        return phase


class EnginePhase(Enum):
    """How far an engine has come in its own start."""

    START = "start"
    HELLO_SENT = "HELLO sent"
    INIT_RECEIVED = "INIT received"
    REGISTERED = "registered"
    READY_SENT = "READY sent"


class EngineEvent(Enum):
    """What an engine does or receives while it starts."""

    SEND_HELLO = "send HELLO"
    RECEIVE_INIT = "receive INIT"
    SEND_REGISTRATION = "send the registration"
    SEND_READY = "send READY"


ENGINE_TRANSITIONS: Final[dict[tuple[EnginePhase, EngineEvent], EnginePhase]] = {
    (EnginePhase.START, EngineEvent.SEND_HELLO): EnginePhase.HELLO_SENT,
    (EnginePhase.HELLO_SENT, EngineEvent.RECEIVE_INIT): EnginePhase.INIT_RECEIVED,
    (EnginePhase.INIT_RECEIVED, EngineEvent.SEND_REGISTRATION): EnginePhase.REGISTERED,
    (EnginePhase.REGISTERED, EngineEvent.SEND_READY): EnginePhase.READY_SENT,
}


class EngineHandshake:
    """The engine's side: each method moves one step and returns what to send."""

    def __init__(self, *, local: bool = False, headless: bool = True) -> None:
        self.phase = EnginePhase.START
        self.init: Init | None = None
        """Where to connect, once INIT has come."""
        self._local = local
        self._headless = headless

    def __repr__(self) -> str:
        return f"<EngineHandshake {self.phase.value}>"

    def hello(self) -> Hello:
        """Begin.  Send this on the handshake socket and wait for an INIT there."""
        self._step(EngineEvent.SEND_HELLO)
        return Hello(self._local, self._headless)

    def receive(self, init: Init) -> None:
        """Take the INIT.  Then connect to its addresses and register on each input."""
        self._step(EngineEvent.RECEIVE_INIT)
        self.init = init

    def registration(self, ready: Mapping[str, Any]) -> Registration:
        """Register.  Send this on every input connection, as its first message."""
        self._step(EngineEvent.SEND_REGISTRATION)
        return Registration(ready)

    def ready(self, parallel_config_hash: str | None = None) -> Ready:
        """End.  Send this on the handshake socket, then close that."""
        self._step(EngineEvent.SEND_READY)
        return Ready(self._local, self._headless, parallel_config_hash)

    def _step(self, event: EngineEvent) -> None:
        phase = ENGINE_TRANSITIONS.get((self.phase, event))
        if phase is None:
            possible = [e.value for p, e in ENGINE_TRANSITIONS if p is self.phase]
            raise ProtocolError(
                f"an engine cannot {event.value} in phase {self.phase.value!r}; "
                f"next: {' or '.join(possible) or 'nothing'}"
            )
        self.phase = phase
