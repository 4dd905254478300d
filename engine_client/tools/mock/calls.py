"""Utility calls of a reference engine: decoded, executed, answered, or whatever the faults say."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from engine_client.errors import EncodeError, ProtocolError
from engine_client.tools.faults import ENDINGS, FaultPlan, FaultRule
from engine_client.tools.mock.endings import Endings, complain
from engine_client.tools.mock.methods import Deferred, EngineModel, failure_detail
from engine_client.tools.mock.sockets import EngineSockets
from engine_client.wire.codec import Codec, plain

__all__ = ["Calls"]

UNKNOWN_ID = 2**52
"""The bit that turns a call id into one that nobody waits for."""

Request = tuple[int, Any, Any, Any]
"""Client index, call id, method, arguments."""
Deliver = Callable[[bytes], None]


class Calls:
    """The utility calls of one engine.

    Args:
        model: what the engine knows and can do.
        methods: its methods by name.
        codec: its dialect.
        sockets: to send with.
        faults: what it does wrong.
        endings: how it ends.
    """

    def __init__(
        self,
        model: EngineModel,
        methods: Mapping[str, Callable[..., Any]],
        codec: Codec,
        sockets: EngineSockets,
        faults: FaultPlan,
        endings: Endings,
    ) -> None:
        self._model = model
        self._methods = methods
        self._codec = codec
        self._sockets = sockets
        self._faults = faults
        self._endings = endings
        self._held: list[tuple[str, Callable[[], None]]] = []

    # -- without faults --------------------------------------------------------------------------

    def decode(self, frames: list[bytes]) -> Request | None:
        """Read a utility call; one that cannot be read ends all receiving, as in vLLM."""
        try:
            client, call_id, method, args = self._codec.decode(frames[1])
        except (ProtocolError, TypeError, ValueError, IndexError):
            self._sockets.deafen()
            return None
        return client, call_id, method, args

    def execute(self, call_id: Any, method: Any, args: Any) -> bytes | Deferred:
        """Execute a utility call; return its encoded reply, or what it waits for."""
        function = self._methods.get(method) if isinstance(method, str) else None
        if function is None:
            kind = "DPEngineCoreProc" if self._model.lockstep else "EngineCoreProc"
            return self._failure(call_id, method, f"'{kind}' object has no attribute '{method}'")
        try:
            value = function(*args)
        except Exception as exc:
            return self._failure(call_id, method, failure_detail(function, args, exc))
        if type(value) is Deferred:
            return value
        return self._encode(call_id, None, value)

    def answer_later(
        self,
        result: Deferred,
        client: int,
        call_id: Any,
        method: Any,
        deliver: Deliver | None = None,
        failing: tuple[int, str] | None = None,
    ) -> None:
        """Answer a call when its result is there."""

        def settle(get_result: Callable[[], Any]) -> None:
            self._model.failing_worker = failing
            try:
                reply = self._encode(call_id, None, get_result())
            except Exception as exc:
                reply = self._failure(call_id, method, str(exc))
            self._model.failing_worker = None
            if deliver is None:
                self._sockets.send(client, [reply])
            else:
                deliver(reply)

        result.then(settle)

    def _failure(self, call_id: Any, method: Any, detail: str) -> bytes:
        return self._encode(call_id, f"Call to {method} method failed: {detail}")

    def _encode(self, call_id: Any, failure: str | None, value: Any = None) -> bytes:
        """Encode a reply; one that cannot be encoded ends all sending, as in vLLM."""
        try:
            result = None if failure is not None else [None, plain(value, "result")]
            return self._codec.encode(
                [
                    self._model.index,
                    [],
                    None,
                    time.monotonic(),
                    [call_id, failure, result],
                    None,
                    None,
                    None,
                    None,
                ]
            )
        except EncodeError as exc:
            complain(f"engine {self._model.index}: cannot send what the method returned: {exc}")
            self._sockets.mute()
            return b""

    # -- with faults -----------------------------------------------------------------------------

    def answer(self, client: int, call_id: Any, method: Any, args: Any) -> None:
        """Answer a call under the faults."""
        controls = isinstance(method, str) and method.startswith("mock_")
        rule = None if controls else self._faults.take(method, self._model.index)
        deliver: Deliver | None = None
        failing = None
        if rule is not None:
            if rule.do in ENDINGS and not rule.after_reply:
                self._endings.end_as(rule)
                if self._endings.silent or rule.do == "deaf":
                    return
            if rule.do == "unknown_id":
                call_id = call_id ^ UNKNOWN_ID if isinstance(call_id, int) else UNKNOWN_ID
            if rule.do in ("fail", "answer") and rule.worker is None:
                self._sockets.send(client, [self._instead(rule, call_id, method)])
                return
            if rule.do == "busy":
                self._sockets.pause(rule.seconds)
            if rule.worker is not None:
                failing = self._model.failing_worker = rule.worker, rule.message
            deliver = self._deliver_as(rule, client, call_id, method)
        reply = self.execute(call_id, method, args)
        self._model.failing_worker = None
        if type(reply) is Deferred:
            self.answer_later(reply, client, call_id, method, deliver, failing)
        elif deliver is None:
            self._sockets.send(client, [reply])
        else:
            deliver(reply)

    def _instead(self, rule: FaultRule, call_id: Any, method: Any) -> bytes:
        if rule.do == "answer":
            return self._encode(call_id, None, rule.value)
        return self._failure(call_id, method, rule.message)

    def _deliver_as(self, rule: FaultRule, client: int, call_id: Any, method: Any) -> Deliver:
        """Return what a rule makes of the reply to a call that was executed."""
        send = self._sockets.send

        def deliver(reply: bytes) -> None:
            if rule.do == "delay":
                self._sockets.send_later(rule.seconds, client, [reply])
            elif rule.do == "hold":
                self.hold(method, lambda: send(client, [reply]))
            elif rule.do == "garbage":
                send(client, rule.frames)
            elif rule.do == "corrupt":
                send(client, [self._corrupted(call_id, b"".join(rule.frames))])
            elif rule.do == "fail_after":
                send(client, [self._failure(call_id, method, rule.message)])
            elif rule.do != "drop":
                send(client, [reply])
                if rule.do == "duplicate":
                    send(client, [reply])
                if rule.after_reply:
                    self._endings.end_as(rule)

        return deliver

    def _corrupted(self, call_id: Any, data: bytes) -> bytes:
        """Encode a reply with ``data`` in place of the value, or cut off where that begins."""
        marker = os.urandom(16)
        reply = self._encode(call_id, None, marker)
        before, _, after = reply.partition(self._codec.encode(marker))
        return before + data + after if data else before

    def hold(self, method: str, send: Callable[[], None]) -> None:
        """Keep something until it is released."""
        self._held.append((method, send))

    def release(self, method: str | None = None) -> int:
        """Send what is held, or that of one method, in the order in which it was held."""
        held, self._held = self._held, []
        for entry in held:
            if method in (None, entry[0]):
                entry[1]()
            else:
                self._held.append(entry)
        return len(held) - len(self._held)
