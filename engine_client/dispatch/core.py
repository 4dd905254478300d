"""What the dispatcher decides, apart from what it does.

No sockets, threads or clock: the loop feeds it frames with the descriptor of the connection they
came on, connections that came and went, calls from the outbox, process exits and the time; it
settles waiters in the registry and leaves messages in ``outgoing``.  So a simulation can drive
every decision.

Which engines are there at all is the business of :mod:`~engine_client.dispatch.members`; here is
what they are sent and what becomes of what they say.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from engine_client.dispatch.lockstep import PAUSES, RESUMES, Outgoing
from engine_client.dispatch.members import SENTINEL, Members
from engine_client.dispatch.peers import Connection, Peer
from engine_client.dispatch.requests import PendingRequest
from engine_client.dispatch.waiting import PendingCall
from engine_client.engines import engine_names
from engine_client.errors import (
    EngineDeadError,
    EngineError,
    NotSentError,
    ProtocolError,
    RemoteError,
    ReplyError,
)
from engine_client.wire.codec import Dialect, codec_named, peek_reply
from engine_client.wire.messages import (
    DEAD_SENTINEL,
    Abort,
    Outputs,
    RequestType,
)
from engine_client.wire.waves import WavePhase

__all__ = ["Core"]

logger = logging.getLogger("engine_client")

_new: Final = tuple.__new__  # a named tuple's own is written in Python
PAUSE_OR_RESUME = PAUSES | RESUMES
REMIND_DELAYS = (0.2, 5.0)
"""Seconds until a lockstep group that was woken and has not confirmed it is woken again: at first,
and, doubled each time, at most."""


class Core(Members):
    """Calls, requests and outputs of one client; used by the dispatcher only."""

    # -- outputs ----------------------------------------------------------------------------------

    def output(self, frames: Sequence[bytes], fd: int, now: float, followed: bool = True) -> bool:
        """A message came on the output socket.

        Args:
            frames: of the message.
            fd: descriptor of its connection.
            now: monotonic time.
            followed: whether the monitors have been read since it was received; descriptors are
                reused at once.

        Returns:
            False: nothing was done, read the monitors and come again.
        """
        connection = self._connections["output"].get(fd)
        if connection is not None and self._settle_short(connection, frames, now):
            return True
        main = frames[0]
        if main == DEAD_SENTINEL:
            if followed:
                self.stats.received += 1
                self._sentinel(connection, now)
            return followed
        try:
            size = len(main) if len(frames) == 1 else sum(map(len, frames))
            codec = None if connection is None or connection.closing else connection.codec
            if codec is not None and size <= self._max_message_size:
                message = Outputs.decode(codec, main)
            else:
                message = self._decode(main, size, connection)
            index = message.engine_index
            peer = self._peers.get(index)
            if peer is None:
                raise ProtocolError(
                    f"it names engine {index}, which is none of this client's",
                    call_id=None if message.utility is None else message.utility.call_id,
                )
            learned = peer.output is not connection or connection is None
            if learned:
                if not followed:
                    return False
                if not self._learn_output(connection, peer, message, now):
                    self.stats.received += 1
                    self.stats.outputs += len(message.outputs)
                    self.stats.late_outputs += len(message.outputs)
                    if message.utility is not None or not message.outputs:
                        self.stats.late_replies += 1
                    return True
        except ProtocolError as exc:
            if followed:
                self.stats.received += 1
                self._bad_output(connection, fd, main, exc, now)
                self._send_released(now)
            return followed
        self.stats.received += 1
        self._accept(message, frames, peer, now)
        if learned:
            # Only now: what it said counts, whatever follows from its connection's name.
            self._review_outputs(now)
        return True

    def _settle_short(self, connection: Connection, frames: Sequence[bytes], now: float) -> bool:
        """Settle a call by a message that is nothing else; what a fan-out brings by the dozen.

        Returns:
            False: there is something unusual about it, and it must be read as any other is.
        """
        main = frames[0]
        if connection.codec is None or (short := connection.codec.short_reply(main)) is None:
            return False
        index, call_id, value = short
        peer = self._peers.get(index)
        if (
            peer is None
            or peer.output is not connection
            or len(frames) > 1
            or len(main) > self._max_message_size
        ):
            return False
        self.stats.received += 1  # before a caller is let go who may look at it
        if not self.registry.settle(index, call_id, None, value, now):
            self.stats.received -= 1
            return False
        if self.group.held:
            self._send_released(now)
        return True

    def _accept(self, message: Outputs, frames: Sequence[bytes], peer: Peer, now: float) -> None:
        """Deliver what an engine said."""
        index, outputs, _, _, reply, finished, complete, start, _, _ = message
        if (
            complete is not None
            or start is not None
            or (outputs and self.registry.engines[index].in_lockstep)
        ):
            self.group.output(message, live=self._group_is_live())
        if reply is None or outputs or finished:
            self._deliver(message, frames, now)
            if reply is None:
                return
        call_id, failure, value = reply
        error = None if failure is None else RemoteError(failure, engine=index)
        if not self.registry.settle(index, call_id, error, value, now):
            if call_id in peer.questions:
                peer.questions.discard(call_id)
                if self._may_return(peer):
                    self._revive(peer, now)
            elif call_id < 0:
                logger.debug("engine %d announced %r", index, value)
            else:
                self.stats.late_replies += 1
                logger.debug("late reply of engine %d to call %d dropped", index, call_id)
        if self.group.held:
            self._send_released(now)

    def _send_released(self, now: float) -> None:
        for call in self.group.released():
            self._send_call(call, now)

    def _group_is_live(self) -> bool:
        engines = self.registry.engines
        return any(engines[index].requests for index in self.group.members())

    def coordinator_output(self, frames: Sequence[bytes]) -> None:
        """A message came to the in-process coordinator from an engine."""
        codec = codec_named(self._group_dialect())
        try:
            if sum(map(len, frames)) > self._max_message_size:
                raise ProtocolError("it is over the limit (max_message_size)")
            message = Outputs.decode(codec, frames[0])
        except ProtocolError as exc:
            self.stats.malformed_messages += 1
            logger.warning("a message to the coordinator could not be decoded: %s", exc)
            return
        engine = self.registry.engines.get(message.engine_index)
        if engine is not None and message.scheduler_stats is not None:
            self.registry.take_stats(message.engine_index, message.scheduler_stats)
        self.group.coordinate(message)

    def coordinator_published(self, frames: Sequence[bytes], now: float) -> None:
        """An external coordinator published the group's state."""
        live = self._group_is_live()
        try:
            self.group.published(codec_named(self._group_dialect()).decode(frames[-1]), live=live)
        except ProtocolError as exc:
            self.stats.malformed_messages += 1
            logger.warning("a coordinator's message could not be decoded: %s", exc)

        if self._reminder is None and self.group.state.phase is WavePhase.WOKEN:
            self._remind_in(REMIND_DELAYS[0], now)

    def _group_dialect(self) -> Dialect:
        found = [peer.codec for peer in self._peers.values() if peer.codec]
        return found[0] if found else self._forced_codec or "cbor"

    def _deliver(self, message: Outputs, frames: Sequence[bytes], now: float) -> None:
        late, faults = self.requests.deliver(message, frames, now)
        self.stats.outputs += len(message.outputs)
        self.stats.late_outputs += late
        self.stats.malformed_messages += len(faults)
        for fault in faults[:3]:
            logger.warning("in a message of engine %d: %s", message.engine_index, fault)
        if len(faults) > 3:
            logger.warning(
                "in a message of engine %d: %d more like these",
                message.engine_index,
                len(faults) - 3,
            )

    def _decode(self, main: bytes, size: int, connection: Connection | None) -> Outputs:
        if size > self._max_message_size:
            raise ProtocolError(
                f"a message of {size:,} bytes is over the limit (max_message_size="
                f"{self._max_message_size:,})"
            )
        dialects = self._dialects(connection)
        for dialect in dialects[:-1]:
            try:
                return Outputs.decode(codec_named(dialect), main)
            except ProtocolError:
                continue
        return Outputs.decode(codec_named(dialects[-1]), main)

    def _owners(self, connection: Connection | None) -> list[Peer]:
        """The engines that a connection can be of: the one it is named for, else any unnamed."""
        if connection is not None:
            named = [p for p in self._peers.values() if p.output is connection]
            if connection.retired:
                return named
            # One that has no connection of its own may share another's.
            unnamed = self._unnamed_outputs()
            sharing = [p for p in self._nameless() if not any(c.born > p.since for c in unnamed)]
            if named and not connection.closing:
                return [*named, *sharing]
            # Without a name, or with a number that may be another's by now.
            possible = [p for p in self._nameless() if connection.born > p.since or p in sharing]
            shared = len(unnamed) < len(self._nameless())
            if connection.index is not None and not (connection.closing or shared):
                # Its engine has registered since, and it may be a former process's: no other's.
                possible = [p for p in possible if p.index == connection.index or p in sharing]
            if connection.closing:
                possible += [
                    p for p in self._peers.values() if p.output is not None and p.output.closing
                ]
            return [*named, *(p for p in possible if p not in named)]
        return self._nameless()

    def _dialects(self, connection: Connection | None) -> list[Dialect]:
        owners = self._owners(connection)
        found = dict.fromkeys(p.codec for p in owners if p.codec)
        if (
            connection is None
            or connection.closing
            or all(p.output is not connection for p in owners)
        ):
            # Perhaps of one that has not registered yet.
            found |= dict.fromkeys(p.codec for p in self._peers.values() if p.codec)
        return list(found) or [self._forced_codec or "cbor"]

    def _bad_output(
        self,
        connection: Connection | None,
        fd: int,
        main: bytes,
        exc: ProtocolError,
        now: float,
    ) -> None:
        """A message that cannot be decoded fails what it could have been for, nothing else."""
        self.stats.malformed_messages += 1
        # A connection without a descriptor is none of ZeroMQ's present protocol: no engine's.
        owners = self._owners(connection) if fd >= 0 else []
        index, call_id = exc.engine_index, exc.call_id
        if call_id is None:
            for dialect in self._dialects(connection):
                found = peek_reply(main, dialect)
                if found is not None:
                    index, call_id = found
                    break
        logger.warning(
            "a message from %s could not be decoded: %s",
            engine_names(p.index for p in owners) if owners else "a stray peer",
            exc,
        )
        if call_id is not None:
            # A connection tells more than an index that fits none of its owners.
            for peer in [p for p in owners if p.index == index] or owners:
                error = ReplyError(
                    f"engine {peer.index}'s reply could not be decoded: {exc}", engine=peer.index
                )
                self.registry.fail(peer.index, call_id, error, now)
            return
        for peer in owners:
            self.registry.fail_engine(
                peer.index,
                ReplyError,
                f"a message of engine {peer.index}, which may have been its reply to {{method}}, "
                f"could not be decoded: {exc}",
                now,
            )
            self.requests.fail_engine(
                peer.index,
                ReplyError,
                f"a message of engine {peer.index}, which may have been an output of {{method}}, "
                f"could not be decoded: {exc}",
            )

    def _sentinel(self, connection: Connection | None, now: float) -> None:
        if connection is None:
            self.stats.malformed_messages += 1
            return
        if connection.retired:
            return
        owners = [p for p in self._peers.values() if p.output is connection]
        connection.retired = True
        for peer in owners:
            peer.output = None
            if self.registry.engines[peer.index].alive:
                self._die(peer, SENTINEL, now)
        if not owners:
            self._lose_unnamed(connection, SENTINEL, now, ask_after=0.0)

    # -- calls ------------------------------------------------------------------------------------

    def _remind_in(self, delay: float, now: float) -> None:
        self._reminder = delay
        self._later(now + delay, self._remind_group)

    def _remind_group(self, now: float) -> None:
        delay, self._reminder = self._reminder or 0.0, None
        if self.group.remind():
            self._remind_in(min(2 * delay, REMIND_DELAYS[1]), now)

    def submit_request(self, request: PendingRequest, now: float) -> None:
        """A request came out of the outbox; one that was left meanwhile is never sent."""
        if request.cancelled or request.finished:
            return
        engine = self.registry.engines[request.engine]
        frames = request.payloads.get(engine.form)
        if frames is None:
            self.requests.fail(
                request,
                NotSentError(
                    f"engine {engine.index} was replaced by one that speaks {engine.codec}",
                    engine=engine.index,
                ),
            )
            return
        self.stats.requests += 1
        request.sent = True
        if engine.in_lockstep:
            self.group.request(engine.index)
            if self._reminder is None:
                self._remind_in(REMIND_DELAYS[0], now)
        self.outgoing.append(
            Outgoing("input", engine.index, (engine.id, RequestType.ADD, *frames), request)
        )

    def abort(self) -> None:
        """Tell engines to stop what was left here: one message for each."""
        by_engine: dict[int, list[str]] = {}
        for request in self.requests.take_aborts():
            by_engine.setdefault(request.engine, []).append(request.wire_id)
        for index, wire_ids in by_engine.items():
            if self.registry.engines[index].alive:
                self._send_abort(index, wire_ids)
            else:
                self.requests.orphans.setdefault(index, []).extend(wire_ids)

    def _send_abort(self, index: int, wire_ids: Sequence[str]) -> None:
        engine = self.registry.engines[index]
        if engine.codec is not None:
            self.stats.aborts += len(wire_ids)
            payload = codec_named(engine.codec).encode(Abort(tuple(wire_ids)).to_plain())
            self.outgoing.append(Outgoing("input", index, (engine.id, RequestType.ABORT, payload)))

    def _abort_orphans(self, peer: Peer) -> None:
        """An engine is back that was only cut off: it must not go on for nobody."""
        wire_ids = self.requests.orphans.pop(peer.index, None)
        if wire_ids:
            self._send_abort(peer.index, wire_ids)

    def submit(self, call: PendingCall, now: float) -> None:
        """A call came out of the outbox: its messages, for all engines before any is waited for.

        It is sent even if its caller has left: engines in lockstep wedge when some get it only.
        """
        if call.method in PAUSE_OR_RESUME and self.group.holds(call):
            return
        self._send_call(call, now)

    def _send_call(self, call: PendingCall, now: float) -> None:
        self.stats.calls += 1
        engines, payloads = self.registry.engines, call.payloads
        utility: bytes = RequestType.UTILITY
        reached: list[int] = []
        for index in call.targets:
            if index in call.refused:
                continue
            engine = engines[index]
            payload = payloads.get(engine.form)
            if not engine.alive or payload is None:
                self._refuse(call, index, now)
                continue
            reached.append(index)
            self.outgoing.append(
                _new(Outgoing, ("input", index, (engine.id, utility, payload), call))
            )
        call.sent.update(reached)
        self.registry.note_sent(call)

    def _refuse(self, call: PendingCall, index: int, now: float) -> None:
        engine = self.registry.engines[index]
        error: EngineError
        if engine.alive:
            error = NotSentError(
                f"engine {index} was replaced by one that speaks {engine.codec}", engine=index
            )
        else:
            error = EngineDeadError(
                f"engine {index} died before {call.method} was sent to it: {engine.death}",
                engine=index,
                may_have_run=False,
            )
        self.registry.fail(index, call.call_id, error, now)
