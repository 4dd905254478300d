"""Arrays and tensors of one message: small ones inside it, others in frames of their own."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

__all__ = ["INLINE_BELOW", "MessageArrays"]

INLINE_BELOW = 256
"""Bytes from which an array gets a frame of its own."""
RAW_VIEW = 3
"""msgpack's extension type for the bytes of an array; CBOR writes them as they are."""

_FORMATS = {"<i4": "i", "<f4": "f", "<i8": "q", "int32": "i", "float32": "f", "int64": "q"}


class MessageArrays:
    """Writes the arrays of one message and collects the frames that follow it."""

    def __init__(self, codec: str) -> None:
        self.frames: list[bytes] = []
        self._inline: Callable[[bytes], Any] = bytes
        if codec == "msgpack":
            extension = import_module("msgspec").msgpack.Ext
            self._inline = lambda data: extension(RAW_VIEW, data)

    def write(
        self, dtype: str, shape: Sequence[int], values: Sequence[int] | Sequence[float]
    ) -> list[Any]:
        """Return what stands for an array in the message.

        Args:
            dtype: numpy's name (``"<i4"``) for an array, torch's (``"int32"``) for a tensor.
            shape: the lengths of its axes.
            values: the items, the last axis fastest.
        """
        data = struct.pack(f"<{len(values)}{_FORMATS[dtype]}", *values)
        if len(data) < INLINE_BELOW:
            return [dtype, list(shape), self._inline(data)]
        self.frames.append(data)
        return [dtype, list(shape), len(self.frames)]  # the message itself is frame 0
