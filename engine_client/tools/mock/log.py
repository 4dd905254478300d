"""What a reference engine received: kept as raw frames, decoded only when somebody looks."""

from __future__ import annotations

import json
import time
from collections import deque
from dataclasses import dataclass
from typing import IO, Any

from engine_client.errors import ProtocolError
from engine_client.wire.codec import Codec
from engine_client.wire.messages import RequestType

__all__ = ["REQUEST_NAMES", "MessageLog", "Received"]

LENGTH = 10_000
"""How many messages are kept; the oldest go first."""
KEPT_SIZE = 16_384
"""Larger messages are kept without their content, so that the log stays small."""

REQUEST_NAMES = {
    RequestType.ADD: "ADD",
    RequestType.ABORT: "ABORT",
    RequestType.START_DP_WAVE: "START_DP_WAVE",
    RequestType.UTILITY: "UTILITY",
}


@dataclass(frozen=True, slots=True)
class Received:
    """One message that an engine received."""

    time: float
    """``time.monotonic()`` in the engine's process."""
    type: str
    """``"UTILITY"``, ``"ADD"``, ``"ABORT"``, ``"START_DP_WAVE"`` or ``"UNKNOWN"``."""
    call_id: Any = None
    method: Any = None
    args: Any = None
    """Arguments of a utility call, else the payload; None when undecodable or too large."""

    def to_plain(self) -> dict[str, Any]:
        """Return it as a map."""
        return {name: getattr(self, name) for name in self.__slots__}


class MessageLog:
    """The last messages that one engine received, without its remote control.

    With a file, each message is also written there at once, as a line of JSON.
    """

    def __init__(self, codec: Codec, file: IO[str] | None = None) -> None:
        self._codec = codec
        self._file = file
        self._kept: deque[tuple[float, list[bytes]]] = deque(maxlen=LENGTH)

    def record(self, frames: list[bytes]) -> None:
        """Keep one message."""
        now = time.monotonic()
        self._kept.append((now, frames if len(frames[-1]) <= KEPT_SIZE else frames[:1]))
        if self._file is not None:
            entry = self._entry(now, frames)
            if entry is not None:
                self._file.write(json.dumps(entry.to_plain(), default=repr) + "\n")
                self._file.flush()

    def entries(self) -> list[Received]:
        """Return what was received, oldest first; from any thread."""
        entries = [self._entry(*kept) for kept in self._kept.copy()]
        return [entry for entry in entries if entry is not None]

    def _entry(self, moment: float, frames: list[bytes]) -> Received | None:
        kind = REQUEST_NAMES.get(frames[0], "UNKNOWN")
        try:
            content = self._codec.decode(frames[1])
            if kind != "UTILITY":
                return Received(moment, kind, args=content)
            _, call_id, method, args = content
        except (ProtocolError, TypeError, ValueError, IndexError):
            return Received(moment, kind)
        if isinstance(method, str) and method.startswith("mock_"):
            return None
        return Received(moment, kind, call_id, method, args)
