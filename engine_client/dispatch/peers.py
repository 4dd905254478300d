"""One engine as the dispatcher knows it: its connections, and what is concluded of them."""

from __future__ import annotations

from typing import Literal, NamedTuple

from engine_client.engines import engine_id
from engine_client.wire.codec import Codec, Dialect
from engine_client.wire.handshake import ClientHandshake

__all__ = ["Connection", "Doubt", "Peer", "Side"]

Side = Literal["input", "output"]
"""Which of an engine's two connections; both are bound on this side."""


class Connection:
    """One connection of a peer to the input or the output socket."""

    __slots__ = ("born", "closing", "codec", "index", "retired")

    def __init__(self, born: int) -> None:
        self.born = born
        """Its place in the order in which connections arrived."""
        self.codec: Codec | None = None
        """What its messages are decoded with, once it is named for an engine."""
        self.index: int | None = None
        """The engine that an output on it named; no other's, unless engines share connections."""
        self.retired = False
        """Its engine was replaced or reported its death: what still comes is late."""
        self.closing = False
        """Its loss has been read but not yet acted upon: the descriptor may be another's."""


class Doubt(NamedTuple):
    """A connection was lost that may have been an engine's output connection."""

    arrivals: int
    """How many connections had arrived by then: what arrived later does not clear the doubt."""
    why: str
    """Words that follow "engine 3 is dead: "."""


class Peer:
    """One engine as the dispatcher knows it."""

    __slots__ = (
        "codec",
        "covered",
        "doubt",
        "greeting",
        "handshake",
        "id",
        "index",
        "input",
        "invited",
        "leaving",
        "lost",
        "output",
        "questions",
        "registered",
        "since",
        "succeeded",
    )

    def __init__(self, index: int, *, bootstrapped: bool) -> None:
        self.index = index
        self.id = engine_id(index)
        self.handshake = ClientHandshake(bootstrapped=bootstrapped)
        self.codec: Dialect | None = None
        self.input: Connection | None = None
        """The input connection, once known."""
        self.output: Connection | None = None
        """The output connection, once known."""
        self.covered: int | None = None
        """How many connections had arrived when surely one of them was its output connection."""
        self.doubt: Doubt | None = None
        """Whether its unnamed output connection may be lost."""
        self.since = 0
        """How many connections had arrived when it was told where to connect: they are others'."""
        self.leaving: Connection | None = None
        """Its input connection, lost a moment ago: its last output may be on its way."""
        self.lost: set[Side] = set()
        """Connections whose loss killed it; with both back it is alive again.  Empty when only a
        registration can bring it back."""
        self.greeting: Dialect | None = None
        """Dialect of a HELLO that came while the index was still alive."""
        self.questions: set[int] = set()
        """Call ids of the questions whether it is there."""
        self.invited = False
        """Whether an INIT reached a process that said HELLO since the last one started."""
        self.registered = False
        """Whether it ever registered."""
        self.succeeded = False
        """Whether another process has registered since."""

    def forget(self) -> None:
        """Forget what was concluded of an incarnation that is gone."""
        self.covered = self.doubt = self.leaving = None
        self.questions.clear()
