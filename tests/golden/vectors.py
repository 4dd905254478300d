"""How recorded messages are kept: frames as hex, and the value of the first as JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
FAMILIES = ("handshake", "utility", "requests", "death")


@dataclass(frozen=True, slots=True)
class Vector:
    """One message."""

    name: str
    """Unique in its family; a reply or output begins with the name of what it answers."""
    sender: str
    """`engine` or `client`."""
    engine: int
    """The engine that sent or received it."""
    channel: str
    """`handshake`, `input` or `output`."""
    frames: tuple[bytes, ...]
    """Without the identity; of what a client sends on the input socket, the type byte is first."""
    value: Any
    """The payload frame, decoded; None where it is no payload."""

    @property
    def payload(self) -> bytes:
        """The frame that `value` is decoded from."""
        requested = self.sender == "client" and self.channel == "input"
        return self.frames[1 if requested else 0]

    def to_json(self) -> dict[str, Any]:
        """As it is kept."""
        return {
            "name": self.name,
            "sender": self.sender,
            "engine": self.engine,
            "channel": self.channel,
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
