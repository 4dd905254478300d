"""Requests of a reference engine: received, run step by step, and told about."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Protocol

from engine_client.errors import ProtocolError
from engine_client.tools.faults import OUTPUTS, FaultPlan
from engine_client.tools.mock.arrays import MessageArrays
from engine_client.tools.mock.calls import Calls
from engine_client.tools.mock.endings import Endings, complain
from engine_client.tools.mock.log import REQUEST_NAMES
from engine_client.tools.mock.methods import EngineModel
from engine_client.tools.mock.outputs import ERROR, Batch, output_record
from engine_client.tools.mock.request import UnusableRequest, read_request
from engine_client.tools.mock.sockets import EngineSockets
from engine_client.wire.codec import Codec
from engine_client.wire.messages import RequestType

__all__ = ["Died", "Requests"]

EXECUTOR_FAILED = b"\x04"
"""Internal to vLLM; from a client it kills the engine."""
WAKEUP = b"\x05"
"""Internal to vLLM; from a client it does nothing."""


_WAVE = 12
"""Where a request is stamped with a wave."""


class Member(Protocol):
    """What a rank of a lockstep group is told of its messages."""

    def added(self, wave: int) -> None:
        """A request came that was stamped with a wave."""

    def woken(self, payload: Any) -> None:
        """START_DP_WAVE came."""


class Died(BaseException):
    """A step that was made in a call killed the engine; its cause says how.

    No plain exception: those of calls are only reported.
    """


class Requests:
    """The requests of one engine.

    Args:
        model: what the engine knows and can do.
        codec: its dialect.
        sockets: to send with.
        faults: what it does wrong.
        endings: how it ends.
        calls: to hold messages with.
    """

    def __init__(
        self,
        model: EngineModel,
        codec: Codec,
        sockets: EngineSockets,
        faults: FaultPlan,
        endings: Endings,
        calls: Calls,
    ) -> None:
        self._model = model
        self._scheduler = model.scheduler
        self._codec = codec
        self._sockets = sockets
        self._faults = faults
        self._endings = endings
        self._calls = calls
        self.member: Member | None = None
        """The engine's part in a lockstep group, if it is in one."""
        model.end_requests = self.end_all

    # -- messages --------------------------------------------------------------------------------

    def receive(self, frames: list[bytes]) -> None:
        """Handle a message that is no utility call; one that cannot be read ends all receiving.

        Raises:
            Exception: what kills a real engine.
        """
        message = REQUEST_NAMES.get(frames[0])
        try:
            if message is None and frames[0] not in (EXECUTOR_FAILED, WAKEUP):
                raise ProtocolError("unknown type of request")
            payload = self._codec.decode(frames[1])
            request = read_request(payload, frames[2:]) if message == "ADD" else None
        except (ProtocolError, IndexError):
            self._sockets.deafen()
            return
        except UnusableRequest as exc:
            self._refuse(exc)
            return
        rule = self._faults.take(message, self._model.index) if message is not None else None
        if rule is not None:
            if rule.do == "drop":
                return
            if rule.do == "garbage":
                self._sockets.send(0, rule.frames)
                return
            if rule.do == "busy":
                self._sockets.pause(rule.seconds)
            elif not rule.after_reply:
                self._endings.end_as(rule)
                if self._endings.silent or rule.do == "deaf":
                    return
        if frames[0] == EXECUTOR_FAILED:
            raise RuntimeError("Executor failed.")
        if request is not None:
            self._scheduler.add(request)
            if self.member is not None:
                self.member.added(payload[_WAVE] if len(payload) > _WAVE else 0)
        elif message == "ABORT":
            self._scheduler.abort(payload)
        elif message == "START_DP_WAVE" and self.member is not None:
            self.member.woken(payload)
        if rule is not None and rule.after_reply:
            self._endings.end_as(rule)

    def _refuse(self, reason: UnusableRequest) -> None:
        complain(f"engine {self._model.index}: cannot run request {reason.request_id}: {reason}")
        batch = Batch(self._arrays(), finished=[reason.request_id])
        batch.outputs.append(output_record(reason.request_id, [], finish=ERROR))
        self._send({reason.client: batch}, weight_version=None)

    # -- steps -----------------------------------------------------------------------------------

    def step(self) -> bool:
        """Make one step; return whether there was something to compute.

        Raises:
            Exception: what kills a real engine.
            Ended: the engine was told to stop meanwhile.
        """
        scheduled = self._scheduler.begin_step()
        if scheduled and self._model.options.step_seconds:
            self._sockets.pause(self._model.options.step_seconds)
            if not self._faults.acts_on("ABORT"):
                self._take_aborts()
        batches = self._scheduler.end_step(scheduled, self._arrays)
        self._send(batches, weight_version=self._model.weight_version)
        return bool(scheduled)

    def step_now(self, count: int = 1) -> int:
        """Make steps while there is work; return how many were made.

        Raises:
            Died: of one of them.
        """
        for made in range(count):
            if not self._scheduler.has_work:
                return made
            try:
                self.step()
            except Exception as exc:
                raise Died from exc
        return count

    def end_all(self) -> None:
        """End every request and tell the clients."""
        self._send(self._scheduler.end_all(self._arrays), weight_version=None)

    def _take_aborts(self) -> None:
        """Handle the aborts that came during a step, before it tells anything.

        They are handled again in their turn, where they end what was added before them.
        """
        for frames in self._sockets.arrived():
            if frames[0] == RequestType.ABORT and len(frames) > 1:
                try:
                    payload = self._codec.decode(frames[1])
                except ProtocolError:
                    continue  # its turn will come
                self._scheduler.abort(payload)

    # -- outputs ---------------------------------------------------------------------------------

    def _arrays(self) -> MessageArrays:
        return MessageArrays(self._codec.name)

    def _send(self, batches: Mapping[int, Batch], weight_version: str | None) -> None:
        for client, batch in batches.items():
            message: list[Any] = [
                self._model.index,
                batch.outputs,
                batch.stats,
                time.monotonic(),
                None,
                batch.finished,
                None,
                None,
                weight_version,
            ]
            frames = [self._codec.encode(message), *batch.arrays.frames]
            if self._faults:
                self._send_under_faults(client, frames)
            elif not self._endings.silent:
                self._sockets.send(client, frames)

    def _send_under_faults(self, client: int, frames: list[bytes]) -> None:
        if self._endings.silent:
            return
        send = self._sockets.send
        rule = self._faults.take(OUTPUTS, self._model.index)
        if rule is None:
            send(client, frames)
        elif rule.do == "delay":
            self._sockets.send_later(rule.seconds, client, frames)
        elif rule.do == "hold":
            self._calls.hold(OUTPUTS, lambda: send(client, frames))
        elif rule.do == "garbage":
            send(client, rule.frames)
        elif rule.do in ("duplicate", "busy"):
            if rule.do == "busy":
                self._sockets.pause(rule.seconds)
            else:
                send(client, frames)
            send(client, frames)
        elif rule.do != "drop":
            if rule.after_reply:
                send(client, frames)
            self._endings.end_as(rule)
            if not (rule.after_reply or self._endings.silent):
                send(client, frames)  # it is only deaf, or was stopped and goes on
