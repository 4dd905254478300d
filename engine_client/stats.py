"""Counters of one client."""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["ClientStats"]


@dataclass(slots=True)
class ClientStats:
    """What a client has seen since it was made.  ``client.stats`` returns a snapshot.

    The dispatcher is the only writer, so counting needs no lock.
    """

    sent: int = 0
    """Messages handed to ZeroMQ."""
    received: int = 0
    """Messages read from the output socket."""
    calls: int = 0
    """Utility calls sent (a fan-out counts once)."""
    requests: int = 0
    """Generation and pooling requests sent."""
    aborts: int = 0
    """Requests that engines were told to stop."""
    outputs: int = 0
    """Outputs of requests received."""
    late_outputs: int = 0
    """Outputs whose request had ended here; dropped."""
    late_replies: int = 0
    """Replies whose waiter was gone, unknown, or answered already; dropped."""
    malformed_messages: int = 0
    """Messages that could not be decoded."""
    stray_messages: int = 0
    """Messages from peers that are none of this client's engines; ignored."""
    wakes: int = 0
    """Times that a lockstep group was woken."""
    waves: int = 0
    """Waves of a lockstep group that were completed."""
    wave: int = 0
    """The number of the current wave."""
    deaths: int = 0
    """Engines found dead, disconnected or replaced."""
    returns: int = 0
    """Engines that served again after that."""

    def snapshot(self) -> ClientStats:
        """A copy that does not change any more."""
        return replace(self)
