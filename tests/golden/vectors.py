"""How recorded messages are kept: frames as hex, and the value of the first as JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
FAMILIES = (
    "handshake",
    "utility",
    "requests",
    "death",
    "lockstep",
    "alone",
    "coordinator",
    "encoded",
)
DEAD_SENTINEL = b"ENGINE_CORE_DEAD"
UNENCODED = (DEAD_SENTINEL, b"READY", b"\x00", b"\x01")
"""Single frames that hold no payload: a death, a coordinator's gate, (un)subscriptions."""


@dataclass(frozen=True, slots=True)
class Vector:
    """One message."""

    name: str
    """Unique in its family; a reply or output begins with the name of what it answers."""
    sender: str
    """`engine`, `client`, or `coordinator` (vLLM's own process)."""
    engine: int
    """The engine that sent or received it; -1 for all or none."""
    channel: str
    """`handshake`, `input`, `output`; to and from a coordinator: `coordinator_input` (which engines
    subscribe to), `coordinator_output` (what they tell it), `stats` (its clients')."""
    frames: tuple[bytes, ...]
    """Without the identity; of what a client sends on the input socket, the type byte is first."""
    value: Any
    """The payload frame, decoded; None where it is no payload."""
    vllm: str = ""
    """The release of vLLM that sent, took or wrote it."""
    how: str = ""
    """How it was made."""

    @property
    def encoded(self) -> bool:
        """Whether there is a payload."""
        return self.frames[0] not in UNENCODED or len(self.frames) > 1

    @property
    def requested(self) -> bool:
        """Whether the first frame says what the second is."""
        return len(self.frames) > 1 and len(self.frames[0]) == 1

    @property
    def payload(self) -> bytes:
        """The frame that `value` is decoded from."""
        return self.frames[1 if self.requested else 0]

    @property
    def bodies(self) -> tuple[bytes, ...]:
        """The payload and the frames behind it, by the numbers that arrays name."""
        return self.frames[1:] if self.requested else self.frames

    def to_json(self) -> dict[str, Any]:
        """As it is kept."""
        return {
            "name": self.name,
            "sender": self.sender,
            "engine": self.engine,
            "channel": self.channel,
            "vllm": self.vllm,
            "how": self.how,
            "frames": [frame.hex() for frame in self.frames],
            "value": jsonable(self.value),
        }


def load(family: str) -> list[Vector]:
    """Return the messages of a family, in the order in which they crossed."""
    kept = json.loads((FOLDER / f"{family}.json").read_text())
    return [
        Vector(
            one["name"],
            one["sender"],
            one["engine"],
            one["channel"],
            tuple(bytes.fromhex(frame) for frame in one["frames"]),
            one["value"],
            one["vllm"],
            one["how"],
        )
        for one in kept["messages"]
    ]


def jsonable(value: Any) -> Any:
    """Return a plain value as JSON has it: bytes as {"hex"}, maps with integer keys as {"map"}."""
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    if isinstance(value, list):
        return [jsonable(item) for item in value]
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: jsonable(item) for key, item in value.items()}
        return {"map": [[key, jsonable(item)] for key, item in value.items()]}
    return value
