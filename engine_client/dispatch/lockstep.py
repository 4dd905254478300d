"""The lockstep group of one client: who keeps its wave, and whom to wake.

Engines whose registration says ``data_parallel_size`` above 1 step together (``wire/waves.py`` has
the theory).  One of three keeps the wave:

* **in process** (``coordinator=True``): this client is the coordinator.  Its addresses are in
  INIT; engines subscribe, wait for READY before they say that they are ready, and tell it when they
  begin to run and when a wave is complete.
* **external**: a coordinator process, told by ``coordinator_address`` or by the engines'
  registrations.  The client follows what it publishes, and tells it of a request that finds the
  group asleep.
* **none**: the client wakes the other ranks itself over the input socket; every rank reports the
  end of a wave on the output socket.

No sockets, threads or clock here; the dispatcher's core calls in, messages go out by ``emit``.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

from engine_client.dispatch.registry import Registry
from engine_client.dispatch.requests import PendingRequest
from engine_client.dispatch.waiting import PendingCall
from engine_client.errors import ProtocolError
from engine_client.stats import ClientStats
from engine_client.wire.codec import Codec, codec_named
from engine_client.wire.messages import Outputs, RequestType, StartWave
from engine_client.wire.waves import Wake, WavePhase, WaveState

__all__ = ["COORDINATOR_READY", "PAUSES", "RESUMES", "LockstepGroup", "Outgoing"]

logger = logging.getLogger("engine_client")

COORDINATOR_READY = b"READY"
"""What a coordinator publishes once every engine has subscribed."""
SUBSCRIBE = b"\x01"
PAUSES = frozenset({"pause_scheduler", "sleep"})
"""A rank that is told to pause steps on until all have been told; then it answers."""
RESUMES = frozenset({"resume_scheduler", "wake_up"})
"""A rank that is told to resume waits for the others; one whose pause is not complete refuses, and
then the others wait for ever."""


class Outgoing(NamedTuple):
    """A message, ready to be sent."""

    channel: Literal["handshake", "input", "coordinator_input", "coordinator"]
    engine: int
    """Its index; -1 on a channel that has no single receiver."""
    frames: tuple[bytes, ...]
    """On a ROUTER, identity first."""
    work: PendingCall | PendingRequest | None = None
    """The call or request that fails when the engine cannot be reached."""


class LockstepGroup:
    """The wave of the engines in lockstep, if there are any.

    Args:
        registry: knows the engines.
        stats: counters.
        emit: takes a message to be sent.
        keeper: who keeps the wave.
        engine_count: how many subscriptions open the gate of an in-process coordinator.
    """

    def __init__(
        self,
        registry: Registry,
        stats: ClientStats,
        emit: Callable[[Outgoing], None],
        *,
        keeper: Literal["in process", "external", "none"],
        engine_count: int,
    ) -> None:
        self._registry = registry
        self._stats = stats
        self._emit = emit
        self.keeper = keeper
        self.state = WaveState()
        self._engine_count = engine_count
        self._subscriptions = 0
        self.held: deque[PendingCall] = deque()
        """Calls that are sent once the group's pause is complete; in order."""
        self._pauses: set[int] = set()
        """Call ids of pauses that were sent."""
        self._reminded = False
        """Whether the last wake-up was repeated."""

    def members(self) -> list[int]:
        """The living engines in lockstep."""
        return [
            index
            for index, engine in self._registry.engines.items()
            if engine.alive and engine.in_lockstep
        ]

    def reset(self) -> list[PendingCall]:
        """The group died; a new one begins at wave 0.  Return the calls that were held."""
        self.state = WaveState()
        self._stats.wave = 0
        self._pauses.clear()
        held = list(self.held)
        self.held.clear()
        return held

    # -- pauses -----------------------------------------------------------------------------------

    def holds(self, call: PendingCall) -> bool:
        """Whether a call must wait for the group's pause to be complete; then it is kept here.

        Ranks end a pause in one step, but read their messages apart: a resume that comes before the
        answers is refused by one rank, and leaves another waiting for it; of a second pause one
        rank knows when the first ends, and another steps alone for it later.
        """
        engines = self._registry.engines
        if not any(engines[index].in_lockstep for index in call.targets):
            return False
        if not self.held and self._may_go(call):
            return False
        self.held.append(call)
        return True

    def released(self) -> Iterator[PendingCall]:
        """Take the calls that may be sent now; each must be sent before the next is asked for."""
        while self.held and self._may_go(self.held[0]):
            yield self.held.popleft()

    def _may_go(self, call: PendingCall) -> bool:
        self._pauses = self._registry.unanswered(self._pauses)
        if self._pauses:
            return False
        if call.method in PAUSES:
            self._pauses.add(call.call_id)
        return True

    # -- what happens -----------------------------------------------------------------------------

    def request(self, rank: int) -> None:
        """A request goes to a rank: wake the others unless the group is known to run."""
        if self.keeper == "external":
            # One notice while it sleeps, unless the coordinator has been long about it.
            phase = self.state.phase
            if phase is WavePhase.PAUSED or (phase is WavePhase.WOKEN and self._reminded):
                self._reminded = False
                self.state.request(rank)
                self._notify(rank, self.state.wave)
            return
        self._wake(self.state.request(rank))

    def remind(self) -> bool:
        """Wake the group again if nobody has confirmed that it runs; whether that was so."""
        wake = self.state.remind()
        members = self.members()
        if wake is None or not members:
            return False
        if self.keeper == "external":
            self._reminded = True
            # The coordinator leaves out the rank that a notice names, unless its wave is old.
            self._notify(members[0], self.state.wave - 1)
        else:
            self._wake(wake)
        return True

    def output(self, message: Outputs, *, live: bool) -> None:
        """A message came on the output socket.

        Args:
            message: from a rank, or from an engine that is in no group.
            live: whether a request of the group is still live.
        """
        if message.wave_complete is not None:
            live = live and self.keeper == "none"
            self._complete(message.engine_index, message.wave_complete, live=live)
        if message.start_wave is not None:
            self._wake(self.state.started(message.engine_index, message.start_wave))
        elif (
            self.keeper == "none"
            and self.state.phase is WavePhase.WOKEN
            and any(map(_has_tokens, message.outputs))
        ):
            self.state.stepped(message.engine_index)

    def coordinate(self, message: Outputs) -> None:
        """A message came to the in-process coordinator."""
        if message.wave_complete is not None:
            self._complete(message.engine_index, message.wave_complete, live=False)
        if message.start_wave is not None:
            self._wake(self.state.started(message.engine_index, message.start_wave))

    def subscribed(self, frame: bytes) -> None:
        """A message came from an engine's subscription to the in-process coordinator."""
        if frame != SUBSCRIBE:
            return
        self._subscriptions += 1
        # A late one (a restarted engine) opens the gate again; the others ignore it.
        if self._subscriptions >= self._engine_count:
            self._emit(Outgoing("coordinator_input", -1, (COORDINATOR_READY,)))

    def published(self, plain: object, *, live: bool) -> None:
        """An external coordinator published ``[counts, wave, running]``.

        Args:
            plain: what it published.
            live: whether a request of the group is still live.

        Raises:
            ProtocolError: it is no such record.
        """
        if type(plain) is not list or len(plain) < 3:
            raise ProtocolError("a coordinator's message must be [counts, wave, running]")
        counts, wave, running = plain[:3]
        if type(wave) is not int or type(running) is not bool:
            raise ProtocolError("a coordinator's wave must be an integer, and running a boolean")
        self.state.published(wave, running, live=live)
        if wave > self._stats.wave:
            self._stats.waves += wave - self._stats.wave
        self._stats.wave = wave
        if type(counts) is list:
            self._registry.take_loads(counts)

    # -- inside -----------------------------------------------------------------------------------

    def _complete(self, rank: int, wave: int, *, live: bool) -> None:
        before = self.state.wave
        wake = self.state.completed(rank, wave, live=live)
        if self.state.wave != before:
            self._stats.waves += 1
            self._stats.wave = self.state.wave
        self._wake(wake)

    def _wake(self, wake: Wake | None) -> None:
        if wake is None:
            return
        members = self.members()
        if not members:
            return
        self._stats.wakes += 1
        plain = StartWave(wake.wave, wake.exclude).to_plain()
        if self.keeper == "in process":
            # One payload for all: a group with a coordinator has one dialect.
            payload = self._codec(members[0]).encode(plain)
            self._emit(Outgoing("coordinator_input", -1, (RequestType.START_DP_WAVE, payload)))
            return
        for index in members:
            if index != wake.exclude:
                engine = self._registry.engines[index]
                frames = (engine.id, RequestType.START_DP_WAVE, self._codec(index).encode(plain))
                self._emit(Outgoing("input", index, frames))

    def _codec(self, index: int) -> Codec:
        return codec_named(self._registry.engines[index].codec or "cbor")

    def _notify(self, rank: int, wave: int) -> None:
        """Tell the external coordinator that a request found the group asleep."""
        self._stats.wakes += 1
        payload = self._codec(rank).encode([rank, wave])
        self._emit(Outgoing("coordinator", -1, (payload,)))


def _has_tokens(record: object) -> bool:
    """Whether an output is of a step: what ends a request at once, or in a pause, has none."""
    return type(record) is list and len(record) > 1 and bool(record[1])
