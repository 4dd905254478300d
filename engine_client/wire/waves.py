"""Waves: how a lockstep group is woken and falls asleep again.

The ranks of a lockstep group step together, each step being a collective.  A rank without requests
steps along with empty batches, so somebody has to wake the idle ranks when one gets a request, and
all stop together when none has any left.  The time between is a *wave*; waves are counted from 0,
and all ranks and clients agree on the number of the current one::

                        request                      start_wave (rank 0, or a rank with a
    PAUSED (wave w) ----------------> WOKEN (w) ------ stale request) -----> RUNNING (w)
         ^           wake all         |  ^  request: wake again                  |
         |                            +--+                                       |
         +------------------ wave_complete w: wave w + 1 ------------------------+

A wake-up (START_DP_WAVE) may be lost on purpose: a group that was paused by ``pause_scheduler``
discards it and keeps the request, and runs it once it is resumed.  So a group counts as running
only when an engine has said so; until then every further request wakes it again, and so does the
passing of time, which does no harm.  With a coordinator, rank 0 says ``start_wave`` when it begins
to run, and so does a rank that got a request stamped with an old wave.

Without a coordinator nobody says so.  Then tokens show that the group runs, if the rank that they
come from has itself reported the end of the wave before: connections keep no order among them.  And
a request that is still live when a wave completes came too late for it, and needs another wake-up.

The rank that gets the request is left out of the wake-up, since it runs by itself; but it does not
if the request is refused or aborted at once, and then the others wait for it.  So the repeated
wake-up is for all ranks, and comes whether or not a request is still live.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

__all__ = ["TRANSITIONS", "Wake", "WaveEvent", "WavePhase", "WaveState"]


class WavePhase(Enum):
    """What is known of a group."""

    PAUSED = "paused"
    """No rank steps, as far as we know."""
    WOKEN = "woken"
    """It was told to run and has not confirmed it."""
    RUNNING = "running"
    """An engine confirmed that it runs."""


class WaveEvent(Enum):
    """What moves a group."""

    REQUEST = "request"
    CONFIRMED = "confirmed"
    """``start_wave`` of the current wave or a newer one; or, without a coordinator, tokens."""
    COMPLETE = "wave complete"


TRANSITIONS: Final[dict[tuple[WavePhase, WaveEvent], tuple[WavePhase, bool]]] = {
    # phase, event: next phase, whether to wake the group
    (WavePhase.PAUSED, WaveEvent.REQUEST): (WavePhase.WOKEN, True),
    (WavePhase.WOKEN, WaveEvent.REQUEST): (WavePhase.WOKEN, True),
    (WavePhase.RUNNING, WaveEvent.REQUEST): (WavePhase.RUNNING, False),
    (WavePhase.PAUSED, WaveEvent.CONFIRMED): (WavePhase.RUNNING, True),
    (WavePhase.WOKEN, WaveEvent.CONFIRMED): (WavePhase.RUNNING, True),
    (WavePhase.RUNNING, WaveEvent.CONFIRMED): (WavePhase.RUNNING, False),
    (WavePhase.PAUSED, WaveEvent.COMPLETE): (WavePhase.PAUSED, False),
    (WavePhase.WOKEN, WaveEvent.COMPLETE): (WavePhase.PAUSED, False),
    (WavePhase.RUNNING, WaveEvent.COMPLETE): (WavePhase.PAUSED, False),
}


@dataclass(frozen=True, slots=True)
class Wake:
    """A wake-up to be sent to the ranks."""

    wave: int
    exclude: int | None
    """The rank that runs already, or None for nobody."""


class WaveState:
    """One group's wave, as its coordinator or its only client keeps it."""

    __slots__ = ("ends", "phase", "wave")

    def __init__(self) -> None:
        self.wave = 0
        self.phase = WavePhase.PAUSED
        self.ends: dict[int, int] = {}
        """Per rank, how many waves it has reported the end of."""

    def __repr__(self) -> str:
        return f"<WaveState wave {self.wave}, {self.phase.value}>"

    @property
    def running(self) -> bool:
        """Whether an engine has confirmed that the group runs."""
        return self.phase is WavePhase.RUNNING

    def request(self, rank: int, wave: int | None = None) -> Wake | None:
        """A request goes to a rank.  You must send the wake-up, if there is one, to the others.

        Args:
            rank: the engine that gets it.
            wave: what the request was stamped with; left out: the current one.
        """
        stale = wave is not None and wave < self.wave
        # A rank that has a request of an old wave must be told the current one too.
        return self._move(WaveEvent.REQUEST, None if stale else rank)

    def started(self, rank: int, wave: int) -> Wake | None:
        """A rank says ``start_wave``.  You must send the wake-up, if any, to the others."""
        if wave < self.wave or (wave == self.wave and self.running):
            return None
        if wave > self.wave:
            self.wave = wave
            self.phase = WavePhase.WOKEN
        return self._move(WaveEvent.CONFIRMED, rank)

    def remind(self) -> Wake | None:
        """Nobody has confirmed the last wake-up for a while: you must send it again, to all.

        It may have reached a rank just before a resume did, which came on another connection.
        """
        return Wake(self.wave, None) if self.phase is WavePhase.WOKEN else None

    def stepped(self, rank: int) -> None:
        """Tokens of a rank came: the group runs (used where no rank says ``start_wave``)."""
        if self.phase is WavePhase.WOKEN and self.ends.get(rank, 0) >= self.wave:
            self._move(WaveEvent.CONFIRMED, None)

    def completed(self, rank: int, wave: int, *, live: bool = False) -> Wake | None:
        """A rank says ``wave_complete``; each wave counts once, however many ranks say it.

        Args:
            rank: which one.
            wave: the one that is complete.
            live: whether a request is still live, and nobody else would wake the group for it.
                You must then send the wake-up to all ranks.
        """
        self.ends[rank] = wave + 1
        if wave < self.wave:
            return None
        self.wave = wave + 1
        self._move(WaveEvent.COMPLETE, None)
        return self._move(WaveEvent.REQUEST, None) if live else None

    def published(self, wave: int, running: bool, *, live: bool = False) -> None:
        """An external coordinator publishes the state; it knows better.

        Args:
            wave: the current one.
            running: whether an engine has confirmed that the group runs.
            live: whether a request is still live: then a group that does not run was woken, or
                nobody would remind it.
        """
        woken = live or (self.phase is WavePhase.WOKEN and wave == self.wave)
        self.wave = wave
        if running:
            self.phase = WavePhase.RUNNING
        else:
            self.phase = WavePhase.WOKEN if woken else WavePhase.PAUSED

    def _move(self, event: WaveEvent, exclude: int | None) -> Wake | None:
        self.phase, wake = TRANSITIONS[self.phase, event]
        return Wake(self.wave, exclude) if wake else None
