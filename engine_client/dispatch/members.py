"""Which engines are there: how they start, die and return, and which connection is whose.

How a death is told apart from a life
-------------------------------------
ZeroMQ names the connection of each frame (``SRCFD``), and its socket monitor names the connection
that was lost, by the same descriptor.  A registration names an engine's input connection; an
output's engine index names its output connection.  An output connection that has not carried
anything yet has no name, and what is known of it follows by elimination.  A healthy engine must
never be taken for a dead one, so each step is taken only when no other reading is left:

* An engine is *covered* from the moment at which there were as many unnamed connections as engines
  that may own them: those without a named one, started or just starting.  Before, its own may
  still be on its way.
* An unnamed connection is lost.  Enough of the older ones for the covered engines are left: it was
  somebody else's, such as that of an engine whose input connection went too.  Otherwise every
  covered engine is in *doubt*.  One for which no older connection is left has lost its own.  When
  several are possible, a harmless call asks each: whoever answers on an older connection is well,
  and whoever answers on a later one has lost the older and what it said there.
* Nobody was covered then.  Those without a named one are *watched*: while there are fewer unnamed
  connections than such engines, somebody lacks his.  Two questions name the others', however late
  they are answered; when none without a name is left, the watched cannot be heard.

Descriptors are reused at once, so a lost connection is forgotten at once, and a registration is
trusted only after the monitor has been read empty.  What an engine said last counts: one whose
input connection was lost is dead when its output connection is lost too, or shortly after.

A dead engine is alive again when it registers; one that was only cut off, when a message reaches it
and there is an output connection for it, or it answers a question.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from engine_client.dispatch.lockstep import LockstepGroup, Outgoing
from engine_client.dispatch.peers import Connection, Doubt, Peer, Side
from engine_client.dispatch.registry import Registry
from engine_client.dispatch.requests import RequestTable
from engine_client.dispatch.waiting import PendingCall, Startup
from engine_client.engines import engine_index, engine_names
from engine_client.errors import (
    EngineDeadError,
    HandshakeError,
    ProtocolError,
)
from engine_client.stats import ClientStats
from engine_client.wire.codec import Codec, Dialect, codec_named, dialect_of_map
from engine_client.wire.handshake import ClientHandshake, Event, Phase
from engine_client.wire.messages import (
    Abort,
    Hello,
    Init,
    Outputs,
    Registration,
    RequestType,
    UtilityRequest,
    handshake_message,
)

__all__ = ["FENCE_DELAY", "LAST_WORDS", "LOST", "PROBE_DELAYS", "SENTINEL", "UNHEARD", "Members"]

logger = logging.getLogger("engine_client")

LOST = "its connection was lost (the process ended or was cut off)"
TAKEN_OVER = "a stranger connected under its identity, and it cannot be reached any more"
SENTINEL = "it reported a fatal error (ENGINE_CORE_DEAD); its log says which"
FENCE_DELAY = 0.1
"""Seconds that a known connection's loss gets to explain an unnamed one's, before engines are
asked."""
UNHEARD = 1.0
"""Seconds after which an output connection is not on its way any more; between two looks for an
engine that lacks its own."""
ASKS = 2
"""How often engines are asked who lacks its output connection; a busy one answers later."""
LAST_WORDS = 0.01
"""Seconds that the last output of an engine gets to arrive after its input connection was lost."""
PROBE_DELAYS = (0.02, 0.1, 0.5, 2.0, 10.0)
"""Seconds after a connection came or went until ZeroMQ surely knows who can be reached."""


class Members(ABC):
    """The engines of one client and their connections; used by the dispatcher only.

    Args:
        indices: the engines.
        registry: where waiters are settled.
        requests: where outputs are delivered.
        startup: told when all engines are ready, or that they cannot become so.
        stats: counters.
        codec: ``"auto"``, or the dialect that every engine must speak.
        client_index: this client's place among the addresses of INIT.
        init: what a HELLO is answered with; None when another process greets the engines.
        call_ids: ids for calls of the core's own.
        max_message_size: bytes; what is larger is not decoded.
        keeper: who keeps the wave of a lockstep group.
    """

    def __init__(
        self,
        indices: Sequence[int],
        registry: Registry,
        requests: RequestTable,
        startup: Startup,
        stats: ClientStats,
        *,
        codec: Literal["auto", "cbor", "msgpack"],
        client_index: int,
        init: Init | None,
        call_ids: Iterable[int],
        max_message_size: int,
        keeper: Literal["in process", "external", "none"] = "none",
    ) -> None:
        self.registry = registry
        self.requests = requests
        self.startup = startup
        self.stats = stats
        self.outgoing: deque[Outgoing] = deque()
        self.group = LockstepGroup(
            registry, stats, self.outgoing.append, keeper=keeper, engine_count=len(indices)
        )
        self.notes: deque[str] = deque(maxlen=20)
        """What stray peers did, for the text of a handshake error."""
        self._forced_codec: Dialect | None = None if codec == "auto" else codec
        self._client_index = client_index
        self._init = init
        self.coordinator_address: str | None = None
        """Where an external coordinator publishes, once known."""
        self._call_ids = iter(call_ids)
        self._max_message_size = max_message_size
        self._peers = {index: Peer(index, bootstrapped=init is None) for index in indices}
        self._connections: dict[Side, dict[int, Connection]] = {"input": {}, "output": {}}
        self._left_early: set[int] = set()
        """Descriptors of input connections that were lost before a registration of theirs was
        read; one that comes with such a number may be theirs or their successor's."""
        self._arrivals = 0
        self._timers: list[tuple[float, int, Callable[[float], None]]] = []
        self._timer_ids = itertools.count()
        self._watched: list[tuple[Peer, Connection | None]] = []
        """Engines that may have lost their output connections, with their input connections."""
        self._reminder: float | None = None
        """Seconds of the delay after which the lockstep group is woken again, while that runs."""

    # -- what the core does about it --------------------------------------------------------------

    @abstractmethod
    def _send_call(self, call: PendingCall, now: float) -> None:
        """Send a call that was held back."""

    @abstractmethod
    def _abort_orphans(self, peer: Peer) -> None:
        """Stop what an engine goes on with though nobody waits for it."""

    # -- time ---------------------------------------------------------------------------------

    def _later(self, when: float, action: Callable[[float], None]) -> None:
        heapq.heappush(self._timers, (when, next(self._timer_ids), action))

    def next_timer(self) -> float | None:
        """When :meth:`tick` must be called next; None when nothing is planned."""
        return self._timers[0][0] if self._timers else None

    def tick(self, now: float) -> None:
        """Do what is due."""
        while self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2](now)

    # -- start and return of engines ------------------------------------------------------------

    def missing(self) -> dict[int, str]:
        """What is awaited from each engine that has not started; any thread may ask."""
        return {
            index: awaited
            for index, peer in self._peers.items()
            if (awaited := self._awaited(peer)) is not None
        }

    def _awaited(self, peer: Peer) -> str | None:
        if peer.handshake.phase is not Phase.COMPLETE:
            return peer.handshake.waiting_for
        if self.registry.engines[peer.index].alive:
            return None
        return ClientHandshake(bootstrapped=self._init is None).waiting_for

    def _stray(self, note: str) -> None:
        self.stats.stray_messages += 1
        self.notes.append(note)
        logger.warning("ignored: %s", note)

    def _stranger(self, identity: bytes) -> str:
        index = engine_index(identity)
        who = f"a peer of identity {_shown(identity)}" if index is None else f"engine {index}"
        return f"{who}, but this client has {engine_names(self._peers)} (see engine_count)"

    def handshake_frames(self, frames: Sequence[bytes], now: float) -> None:
        """A message came on the handshake socket: ``[identity, HELLO or READY]``."""
        index = engine_index(frames[0])
        peer = None if index is None else self._peers.get(index)
        if index is None or peer is None:
            self._stray(f"a handshake message from {self._stranger(frames[0])}")
            return
        if len(frames) != 2 or len(frames[1]) > 65_536:
            self._stray(f"a handshake message of {len(frames)} frames from engine {index}")
            return
        dialect = dialect_of_map(frames[1])
        try:
            if dialect is None:
                raise ProtocolError(f"neither a CBOR nor a msgpack map: {_shown(frames[1])}")
            message = handshake_message(self._codec_for(index, dialect).decode(frames[1]))
            if isinstance(message, Hello):
                self._hello(peer, dialect, now)
            else:
                peer.handshake.receive(Event.READY)
                self._progress()
        except ProtocolError as exc:
            self._stray(f"engine {index}: {exc}")
        except HandshakeError as exc:
            self.startup.finish(exc)
            self._stray(str(exc))

    def _codec_for(self, index: int, dialect: Dialect) -> Codec:
        """The codec of an engine's first message.

        Raises:
            HandshakeError: this client does not speak its dialect.
        """
        if self._forced_codec not in (None, dialect):
            raise HandshakeError(
                f"engine {index} speaks {dialect}, but the client was made with "
                f"codec={self._forced_codec!r}; leave codec out to take each engine's own",
                missing=tuple(self.missing()),
                stage="HELLO",
            )
        try:
            return codec_named(dialect)
        except ModuleNotFoundError as exc:
            raise HandshakeError(
                f"engine {index} speaks {dialect}, as vLLM does: {exc}",
                missing=tuple(self.missing()),
                stage="HELLO",
            ) from exc

    def _hello(self, peer: Peer, dialect: Dialect, now: float) -> None:
        self._left(peer, peer.leaving, now)
        if self.registry.engines[peer.index].alive:
            note = f"engine {peer.index} is alive, but another process says HELLO under its index"
            self.notes.append(note)
            logger.warning("%s; it gets its INIT when the first one is gone", note)
            peer.greeting = dialect
            self._probe(peer)
            return
        if peer.handshake.phase is Phase.GREETED:
            self.notes.append(
                f"engine {peer.index} said HELLO again: it was restarted, or two processes have "
                f"its index"
            )
        self._greet(peer, dialect)

    def _greet(self, peer: Peer, dialect: Dialect) -> None:
        if self._init is None:
            self._stray(f"engine {peer.index} sent HELLO, but another process greets the engines")
            return
        peer.greeting = None
        peer.lost = set()
        peer.codec = dialect
        if peer.handshake.phase not in (Phase.GREETED, Phase.READY):
            # Of two that were greeted, either may come: then the earlier moment counts.
            peer.since = self._arrivals
            peer.invited = False
        peer.handshake.receive(Event.HELLO)
        payload = codec_named(dialect).encode(self._init.to_plain())
        self.outgoing.append(Outgoing("handshake", peer.index, (peer.id, payload)))

    def registration(self, identity: bytes, payloads: Sequence[bytes], fd: int, now: float) -> None:
        """A message came on the input socket: ``[identity, registration]``.

        The input monitor must have been read empty since it was received.
        """
        index = engine_index(identity)
        peer = None if index is None else self._peers.get(index)
        if index is None or peer is None:
            self._stray(f"a registration from {self._stranger(identity)}")
            return
        connection = self._connections["input"].get(fd)
        if connection is not None and (connection is peer.input or connection.retired):
            logger.debug("engine %d repeated its registration", index)
            return
        if len(payloads) != 1 or len(payloads[0]) > self._max_message_size:
            self._stray(f"a registration of {len(payloads)} frames from engine {index}")
            self._not_registered(peer, connection, now)
            return
        try:
            dialect, ready = self._read_registration(peer, payloads[0])
            peer.handshake.receive(Event.REGISTRATION)
        except ProtocolError as exc:
            self._stray(f"engine {index}: {exc}")
            self._not_registered(peer, connection, now)
            return
        except HandshakeError as exc:
            self.startup.finish(exc)
            self._stray(str(exc))
            self._not_registered(peer, connection, now)
            return
        replaced = self.registry.engines[index].alive
        if replaced:
            self._replaced(peer, "another process registered under its index", now)
        if peer.output is not None:
            # One that came after the INIT may be its own: it spoke before it was registered.
            peer.output.retired = self._init is None or peer.output.born <= peer.since
            peer.output = None
        peer.codec = dialect
        peer.input = connection
        peer.forget()
        peer.lost = set()
        self.registry.register_engine(index, dialect, ready, now)
        if replaced:
            # It may have got what was sent since its connection came.
            self._abort_orphans(peer)
        self.requests.orphans.pop(index, None)
        self._check_dialects(peer)
        self._learn_coordinator(ready)
        if peer.registered:
            self._returned(peer, "registered again")
            peer.succeeded = True
        peer.registered = True
        if fd in self._left_early:
            peer.input = None
            self._repeat(self._probe_unnamed, now, PROBE_DELAYS)
        elif connection is None:
            # The connection was gone before its registration could be read.
            self._die(peer, LOST, now, lost="input")
            return
        self._review_outputs(now)
        self._progress()

    def inputs_read(self) -> None:
        """The input socket has been read empty: whatever lost connections said is known."""
        self._left_early.clear()

    def _check_dialects(self, peer: Peer) -> None:
        others = {p.codec for p in self._peers.values() if p.registered} - {peer.codec}
        if self.group.keeper != "none" and others:
            text = (
                f"engine {peer.index} speaks {peer.codec} and others {', '.join(map(str, others))}:"
                f" a group with a coordinator needs one dialect, since that sends all the same"
            )
            self.startup.finish(HandshakeError(text, missing=tuple(self.missing())))
            logger.error("%s", text)

    def _learn_coordinator(self, ready: Mapping[str, Any]) -> None:
        """Engines that another process greeted say where their coordinator publishes."""
        address = ready.get("dp_stats_address")
        if self._init is None and isinstance(address, str):
            self.coordinator_address = address
            self.group.keeper = "external"

    def _not_registered(self, peer: Peer, connection: Connection | None, now: float) -> None:
        """What came under an engine's identity, on a connection not known as its own, is no
        registration.
        """
        if connection is None or not self.registry.engines[peer.index].alive:
            return
        if peer.input is None:
            # Of an engine that reconnected: now its connection has a name again.
            peer.input = connection
        else:
            # ZeroMQ has handed the identity over, and the engine does not hear us any more.
            self._die(peer, TAKEN_OVER, now)

    def _read_registration(self, peer: Peer, payload: bytes) -> tuple[Dialect, Mapping[str, Any]]:
        if not payload:
            dialect = peer.codec or self._forced_codec
            if dialect is None:
                raise HandshakeError(
                    f"engine {peer.index} registered with an empty payload, which does not tell "
                    f"its dialect; say codec='cbor' or codec='msgpack'",
                    missing=tuple(self.missing()),
                    stage="registration",
                )
            return dialect, {}
        known = dialect_of_map(payload)
        if known is None:
            raise ProtocolError(f"its registration is no map: {_shown(payload)}")
        codec = self._codec_for(peer.index, known)
        return known, Registration.from_plain(codec.decode(payload)).ready

    def _returned(self, peer: Peer, how: str) -> None:
        self.stats.returns += 1
        logger.info("engine %d serves again: it %s", peer.index, how)

    def _progress(self) -> None:
        if not self.startup.finished and not self.missing():
            self.startup.finish()

    # -- connections ----------------------------------------------------------------------------

    def known(self, side: Side) -> Mapping[int, Connection]:
        """The connections that the monitor has reported and not their loss; always current."""
        return self._connections[side]

    def connected(self, side: Side, fd: int, now: float) -> None:
        """The socket monitor reports a new connection."""
        self._arrivals += 1
        self._connections[side][fd] = Connection(self._arrivals)
        if side == "output":
            self._review_outputs(now)
        if any(peer.lost for peer in self._peers.values()):
            self._repeat(self._try_revive, now, PROBE_DELAYS)

    def closing(self, side: Side, fd: int) -> None:
        """A loss was read; what the output socket still holds comes before it is acted upon."""
        connection = self._connections[side].get(fd)
        if connection is not None:
            connection.closing = True

    def disconnected(self, side: Side, fd: int, now: float) -> None:
        """The socket monitor reports a lost connection.

        The output socket must have been read empty since: a last reply counts.
        """
        connection = self._connections[side].pop(fd, None)
        if connection is None:
            return
        owners = [p for p in self._peers.values() if getattr(p, side) is connection]
        for peer in owners:
            setattr(peer, side, None)
            if not self.registry.engines[peer.index].alive:
                if peer.lost:
                    peer.lost.add(side)
            elif (
                side == "input"
                and peer.doubt is None
                and (peer.output is not None or self._unnamed_outputs())
            ):
                peer.leaving = connection
                self._later(now + LAST_WORDS, partial(self._left, peer, connection))
            else:
                self._die(peer, LOST, now, lost=side)
        if side == "output" and not owners and not connection.retired:
            leaving = [p for p in self._peers.values() if p.leaving is not None]
            for peer in leaving:
                self._left(peer, peer.leaving, now)
            self._lose_unnamed(connection, LOST, now, FENCE_DELAY)
        elif side == "input" and not owners:
            self._left_early.add(fd)
            # Perhaps that of an engine which reconnected: those have no name.
            self._repeat(self._probe_unnamed, now, PROBE_DELAYS)

    def _left(self, peer: Peer, connection: Connection | None, now: float) -> None:
        """The time for last words is over."""
        if connection is not None and connection is peer.leaving:
            self._die(peer, LOST, now, lost="input")

    def _repeat(self, action: Callable[[float], None], now: float, delays: Sequence[float]) -> None:
        for delay in delays:
            self._later(now + delay, action)

    def _probe_unnamed(self, now: float) -> None:
        for peer in self._peers.values():
            if peer.input is None and self.registry.engines[peer.index].alive:
                self._probe(peer)

    def _probe(self, peer: Peer) -> None:
        """Send what does nothing; an engine that is gone cannot be reached."""
        if peer.codec is None:
            return
        payload = codec_named(peer.codec).encode(Abort(()).to_plain())
        self.outgoing.append(Outgoing("input", peer.index, (peer.id, RequestType.ABORT, payload)))

    def _try_revive(self, now: float) -> None:
        for peer in self._peers.values():
            if self._may_return(peer):
                self._probe(peer)

    def _may_return(self, peer: Peer) -> bool:
        """Whether the engine is only cut off, and no other process was invited in its place."""
        return bool(peer.lost) and peer.handshake.phase is not Phase.GREETED

    def reached(self, item: Outgoing, now: float) -> None:
        """A message that no call waits for went out: the engine has an input connection."""
        if item.engine < 0:
            return  # to or as a coordinator
        peer = self._peers[item.engine]
        if item.channel == "handshake":
            peer.invited = True
        if item.channel != "input" or not self._may_return(peer):
            return
        if peer.output is not None or len(self._unnamed_outputs()) > len(self._nameless()):
            self._revive(peer, now)
        elif item.frames[1] == RequestType.ABORT:
            # Its output connection may be missing, or be taken for one of the past.
            self._ask(peer)

    def _revive(self, peer: Peer, now: float) -> None:
        peer.lost = set()
        self.registry.revive_engine(peer.index)
        self._abort_orphans(peer)
        self._returned(peer, "reconnected")
        if peer.input is None:
            self._repeat(self._probe_unnamed, now, PROBE_DELAYS)
        if peer.output is None:
            # Its reply names it; until then it would stand for that of any other engine.
            self._ask(peer)
        self._review_outputs(now)
        self._progress()

    def unreachable(self, item: Outgoing, now: float) -> None:
        """ZeroMQ has no connection to the engine (EHOSTUNREACH): the message was not sent."""
        peer = self._peers[item.engine]
        if item.channel == "handshake":
            # Of two processes that said HELLO, the other may have got its INIT.
            if not peer.invited:
                peer.handshake = ClientHandshake()
            return
        why = "it cannot be reached (no connection)"
        if item.work is not None:
            self._unsend(item)
        elif item.frames[1] == RequestType.ABORT and peer.codec is not None:
            wire_ids = codec_named(peer.codec).decode(item.frames[-1])
            self.requests.orphans.setdefault(item.engine, []).extend(wire_ids)
        if self.registry.engines[item.engine].alive:
            self._die(peer, why, now, lost="input")

    @staticmethod
    def _unsend(item: Outgoing) -> None:
        if isinstance(item.work, PendingCall):
            item.work.sent.discard(item.engine)
        elif item.work is not None:
            item.work.sent = False

    # -- deaths -----------------------------------------------------------------------------------

    def _withdraw(self, index: int) -> None:
        """Do not send what an engine's calls and requests still wait to be sent: it has not run."""
        outgoing = tuple(self.outgoing)
        self.outgoing.clear()
        for item in outgoing:
            if item.engine == index and item.work is not None:
                self._unsend(item)
            else:
                self.outgoing.append(item)

    def _die(self, peer: Peer, why: str, now: float, *, lost: Side | None = None) -> None:
        """An engine is dead: everything that waits for it fails, and so does its lockstep group.

        Args:
            peer: the engine.
            why: words that follow "engine 3 is dead: ".
            now: monotonic time.
            lost: the connection whose return would bring it back.
        """
        record = self.registry.engines[peer.index]
        group = [peer]
        if record.in_lockstep:
            group += [
                p
                for i, p in self._peers.items()
                if p is not peer
                and self.registry.engines[i].alive
                and self.registry.engines[i].in_lockstep
            ]
        held = self.group.reset() if record.in_lockstep else []
        sides: set[Side] = set()
        if lost is not None and len(group) == 1:
            sides = {lost} if peer.leaving is None else {lost, "input"}
        for member in group:
            reason = why
            if member is not peer:
                reason = f"engine {peer.index} of its lockstep group died: {why}"
            self._bury(member, reason, now)
            member.lost = sides
            if sides:
                # The way back may have been opened before this was known.
                self._repeat(self._try_revive, now, PROBE_DELAYS[1:])
            else:
                member.handshake = ClientHandshake(bootstrapped=self._init is None)
        for call in held:
            self._send_call(call, now)
        if not self.startup.finished:
            logger.warning("engine %d was lost during the start; waiting for it", peer.index)
        for member in group:
            if member.greeting is not None:
                self._greet(member, member.greeting)
        self._review_outputs(now)

    def _bury(self, peer: Peer, why: str, now: float) -> None:
        self.stats.deaths += 1
        peer.forget()
        self._withdraw(peer.index)
        self.registry.bury_engine(peer.index, why)
        failed = self.registry.fail_engine(
            peer.index,
            EngineDeadError,
            f"engine {peer.index} died before it replied to {{method}}: {why}",
            now,
        )
        failed += self.requests.fail_engine(
            peer.index,
            EngineDeadError,
            f"engine {peer.index} died before it finished {{method}}: {why}",
        )
        logger.warning(
            "engine %d is dead: %s (calls and requests failed: %d)", peer.index, why, failed
        )

    def _replaced(self, peer: Peer, how: str, now: float, spare: int | None = None) -> None:
        """The old incarnation of an engine is gone; the new one is there already.

        Args:
            peer: the engine.
            how: words that follow "engine 3 was replaced: ".
            now: monotonic time.
            spare: id of a call that the new one is just answering.
        """
        self.stats.deaths += 1
        self._withdraw(peer.index)
        failed = self.registry.fail_engine(
            peer.index,
            EngineDeadError,
            f"engine {peer.index} was replaced before it replied to {{method}}: {how}",
            now,
            spare=spare,
        )
        failed += self.requests.fail_engine(
            peer.index,
            EngineDeadError,
            f"engine {peer.index} was replaced before it finished {{method}}: {how}",
        )
        logger.warning(
            "engine %d was replaced: %s (calls and requests failed: %d)", peer.index, how, failed
        )
        for connection in (peer.input, peer.output):
            if connection is not None:
                connection.retired = True
        peer.input = peer.output = None
        peer.forget()

    def process_exited(self, index: int, how: str, now: float) -> None:
        """The supervisor reports that a launched engine's process ended.

        The output socket must have been read empty since.

        Args:
            index: the engine.
            how: words that follow "its process ".
            now: monotonic time.
        """
        peer = self._peers.get(index)
        if peer is None:
            return
        why = f"its process {how}"
        if peer.succeeded:
            logger.info(
                "engine %d has another process already; of the launched one: %s", index, why
            )
            return
        if not self.startup.finished:
            self.startup.finish(
                HandshakeError(
                    f"engine {index} did not start: {why}",
                    missing=tuple(self.missing()),
                    stage=peer.handshake.waiting_for or "start",
                )
            )
        if self.registry.engines[index].alive:
            self._die(peer, why, now)
        else:
            self.registry.bury_engine(index, why)
            if peer.lost:
                peer.lost = set()
                peer.handshake = ClientHandshake(bootstrapped=self._init is None)

    # -- output connections without a name ----------------------------------------------------

    def _unnamed_outputs(self) -> list[Connection]:
        named = {id(p.output) for p in self._peers.values() if p.output is not None}
        return [
            c for c in self._connections["output"].values() if not c.retired and id(c) not in named
        ]

    def _nameless(self) -> list[Peer]:
        """Living engines whose output connection is not known."""
        return [
            p for i, p in self._peers.items() if p.output is None and self.registry.engines[i].alive
        ]

    def _cover(self, unnamed: Sequence[Connection], nameless: Sequence[Peer]) -> None:
        """Find the engines of which one of the unnamed connections must be."""
        uncovered = [peer for peer in nameless if peer.covered is None]
        if not uncovered:
            return
        arrivals = sorted(c.born for c in unnamed)
        # By when each engine that may own one of these had its own.
        claims = sorted(
            math.inf if p.covered is None else p.covered
            for i, p in self._peers.items()
            if (
                p.output is None
                and (self.registry.engines[i].alive or p.lost or p.handshake.phase is not Phase.NEW)
            )
            # One that is starting, while its former process's connection is not missed yet.
            or (
                p.output is not None
                and p.handshake.phase in (Phase.GREETED, Phase.READY)
                and p.output.born <= p.since
            )
        )
        for peer in uncovered:
            # Both counted from the moment at which this engine was told where to connect.
            possible = len(arrivals) - bisect_right(arrivals, peer.since)
            if possible >= len(claims) - bisect_right(claims, peer.since):
                peer.covered = self._arrivals

    def _review_outputs(self, now: float) -> None:
        """Conclude what the unnamed output connections allow to conclude."""
        nameless = self._nameless()
        if not nameless:
            return
        unnamed = self._unnamed_outputs()
        self._cover(unnamed, nameless)
        doubtful = [(peer, peer.doubt) for peer in nameless if peer.doubt is not None]
        if not doubtful:
            return
        oldest = min(doubt.arrivals for _, doubt in doubtful)
        owners = sum(1 for p in nameless if p.covered is not None and p.covered <= oldest)
        if sum(1 for c in unnamed if c.born <= oldest) >= owners:
            for peer, _ in doubtful:
                peer.doubt = None
            return
        for peer, doubt in doubtful:
            # One death may have settled the doubts about the others.
            if peer.doubt is doubt and not any(
                peer.since < c.born <= doubt.arrivals for c in unnamed
            ):
                final = doubt.why is SENTINEL
                self._die(peer, doubt.why, now, lost=None if final else "output")

    def _lose_unnamed(self, connection: Connection, why: str, now: float, ask_after: float) -> None:
        """An output connection without a name is lost."""
        doubt = Doubt(self._arrivals, why)
        for peer in self._nameless():
            if peer.covered is not None and peer.doubt is None and connection.born > peer.since:
                peer.doubt = doubt
        self._review_outputs(now)
        self._later(now + ask_after, self._ask_doubtful)
        unheard = [
            (peer, peer.input)
            for peer in self._nameless()
            if (peer, peer.input) not in self._watched
        ]
        if unheard:
            self._watched += unheard
            bury = partial(self._bury_unheard, unheard, connection.born, why, ASKS)
            self._later(now + UNHEARD, bury)

    def _bury_unheard(
        self,
        unheard: Sequence[tuple[Peer, Connection | None]],
        born: int,
        why: str,
        asks: int,
        now: float,
    ) -> None:
        """An engine cannot be heard if there is no output connection that could be its own.

        Unless it has registered since, and its connection may be on its way.
        """
        for one in unheard:
            self._watched.remove(one)
        unheard = [
            (peer, connection)
            for peer, connection in unheard
            if peer.output is None
            and peer.input is connection
            and self.registry.engines[peer.index].alive
            and self._awaited(peer) is None
        ]
        unnamed, nameless = self._unnamed_outputs(), self._nameless()
        if not unnamed:
            # With none left at all, nobody's can be on its way.  Otherwise what came before an
            # engine was told where to connect was not its own.
            none = all(c.retired for c in self._connections["output"].values())
            for peer in [p for p, _ in unheard if none or born > p.since]:
                self._die(peer, why, now, lost=None if why is SENTINEL else "output")
        elif unheard and len(unnamed) < len(nameless):
            # One lacks its own.  Whoever answers names his, until none is left; a busy one is
            # waited for, and not asked again.
            if asks:
                for peer in nameless:
                    self._ask(peer)
            self._watched += unheard
            bury = partial(self._bury_unheard, unheard, born, why, max(0, asks - 1))
            self._later(now + UNHEARD, bury)

    def _ask_doubtful(self, now: float) -> None:
        """Ask engines whose output connection has no name: a reply names it."""
        nameless = self._nameless()
        if any(peer.doubt is not None for peer in nameless):
            for peer in nameless:
                self._ask(peer)

    def _ask(self, peer: Peer) -> None:
        if peer.codec is None:
            return
        call_id = next(self._call_ids)
        peer.questions.add(call_id)
        question = UtilityRequest(self._client_index, call_id, "is_sleeping", [])
        payload = codec_named(peer.codec).encode(question.to_plain())
        self.outgoing.append(Outgoing("input", peer.index, (peer.id, RequestType.UTILITY, payload)))

    def _learn_output(
        self, connection: Connection | None, peer: Peer, message: Outputs, now: float
    ) -> bool:
        """An output names an engine on a connection not known as its own.

        Returns:
            False: what it carries is late.

        Raises:
            ProtocolError: the connection is another engine's.
        """
        if connection is None or connection.closing:
            # Gone already, or its number may be another connection's: nothing to learn.
            return True
        call_id = None if message.utility is None else message.utility.call_id
        owners = [p.index for p in self._peers.values() if p.output is connection]
        if owners:
            raise ProtocolError(
                f"it names engine {peer.index}, but came from {engine_names(owners)}",
                call_id=call_id,
            )
        if connection.retired or connection.born <= peer.since:
            # Of an incarnation that is gone; unless it answers what only the present one was asked.
            if not self._was_asked(peer, message):
                connection.retired = not owners
                return False
            connection.retired = False
        if self.registry.engines[peer.index].alive and (
            peer.output is not None
            or (peer.doubt is not None and connection.born > peer.doubt.arrivals)
        ):
            self._replaced(peer, "its output came on another connection", now, spare=call_id)
            self._abort_orphans(peer)
        elif peer.output is not None:
            peer.output.retired = True
        if peer.covered is not None and connection.born > peer.covered:
            # It has connected again, and so covers nobody who seemed to be covered by it.
            for other in self._peers.values():
                if other.covered is not None and other.covered >= connection.born:
                    other.covered = other.doubt = None
        peer.output = connection
        connection.index = peer.index
        peer.doubt = None
        if peer.codec is not None:
            connection.codec = codec_named(peer.codec)
        if peer.lost == {"output"} and peer.input is not None and self._may_return(peer):
            self._revive(peer, now)
        return True

    def _was_asked(self, peer: Peer, message: Outputs) -> bool:
        """Whether a message answers what is still open; the ids of all that are unique."""
        reply = message.utility
        if reply is not None and (
            reply.call_id in peer.questions or self.registry.awaits(peer.index, reply.call_id)
        ):
            return True
        live = self.registry.engines[peer.index].requests
        return any(
            type(r) is list and r and type(r[0]) is str and r[0] in live for r in message.outputs
        )


def _shown(data: bytes, limit: int = 16) -> str:
    return (
        data[:limit].hex(" ") + (f" ... ({len(data):,} bytes)" if len(data) > limit else "")
        or "(empty)"
    )
