"""Bytes to plain values and back, in two dialects.

:func:`plain` makes a plain value of what a caller wants to send, once, whatever the number of
engines and dialects; a codec turns it into bytes; decoding gives plain values only, or raises
:class:`~engine_client.errors.ProtocolError`.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from functools import cache
from importlib import import_module
from typing import ClassVar, Final, Literal

from engine_client.wire.plain import MAX_DEPTH, Plain, plain, verify_plain

__all__ = [
    "MAX_DEPTH",
    "Codec",
    "Dialect",
    "Plain",
    "codec_named",
    "dialect_of_map",
    "peek_reply",
    "plain",
]

Dialect = Literal["cbor", "msgpack"]


class Codec(ABC):
    """One dialect of the protocol.  Stateless, for any thread."""

    name: ClassVar[Dialect]

    @abstractmethod
    def encode(self, value: Plain) -> bytes:
        """Write a plain value; what is not plain must have passed :func:`plain` before."""

    @abstractmethod
    def read(self, frame: bytes | memoryview) -> Plain:
        """Read the one value that the frame consists of; :meth:`verify` tells whether it is plain.

        The caller limits the frame's size first.

        Raises:
            ProtocolError: there is none, whatever the bytes are.
        """

    def short_reply(self, frame: bytes) -> tuple[int, int, bool | None] | None:
        """Read a message that is the reply to a control call, and says no more than most do.

        Returns:
            The engine index, the call id, and None, True or False; None when the frame is not of
            that very form, and must be decoded.
        """
        return None

    def verify(self, value: Plain) -> None:
        """Refuse what :meth:`read` let through although it is no plain value.

        Raises:
            ProtocolError: it is none.
        """
        verify_plain(value, self.name)

    def decode(self, frame: bytes | memoryview) -> Plain:
        """Read the one plain value that the frame consists of.

        The caller limits the frame's size first.

        Raises:
            ProtocolError: anything else, whatever the bytes are.
        """
        value = self.read(frame)
        self.verify(value)
        return value


@cache
def codec_named(name: str) -> Codec:
    """The codec of a dialect, always the same one.

    Raises:
        ValueError: no such dialect.
        ModuleNotFoundError: msgpack without the optional package that it needs.
    """
    if name == "cbor":
        codec: Codec = import_module("engine_client.wire.cbor").CborCodec()
    elif name == "msgpack":
        try:
            codec = import_module("engine_client.wire.msgpack").MsgpackCodec()
        except ModuleNotFoundError as error:
            if error.name != "msgspec":
                raise
            raise ModuleNotFoundError(
                "the msgpack dialect (vLLM engines) needs the package msgspec: "
                "pip install 'engine-client[vllm]'",
                name="msgspec",
            ) from error
    else:
        raise ValueError(f"codec must be 'cbor' or 'msgpack', not {name!r}")
    return codec


def dialect_of_map(frame: bytes | memoryview) -> Dialect | None:
    """Tell the dialect of a map by its first byte; None when it begins no map in either."""
    first = frame[0] if len(frame) else 0
    if 0x80 <= first <= 0x8F or first in (0xDE, 0xDF):
        return "msgpack"
    if 0xA0 <= first <= 0xB9:
        return "cbor"
    return None


def _widths(first: int, count: int) -> bytes:
    """A pattern for the integers of 1, 2, 4 and 8 bytes whose headers begin at ``first``."""
    return b"|".join(
        b"\\x%02x[\\x00-\\xff]{%d}" % (first + step, 1 << step) for step in range(count)
    )


_PREFIXES: Final = {  # compiled when first needed, which is rare: that takes as long as an import
    "msgpack": (
        rb"(?:[\x95-\x9f]|\xdc[\x00-\xff]{2}|\xdd[\x00-\xff]{4})"
        rb"(\xc0|[\x00-\x7f]|" + _widths(0xCC, 4) + rb")"
        rb"\x90\xc0(?:\xca[\x00-\xff]{4}|\xcb[\x00-\xff]{8}|[\x00-\x7f]|" + _widths(0xCC, 4) + rb")"
        rb"(?:[\x91-\x9f]|\xdc[\x00-\xff]{2}|\xdd[\x00-\xff]{4})"
        rb"([\x00-\x7f\xe0-\xff]|" + _widths(0xCC, 4) + rb"|" + _widths(0xD0, 4) + rb")"
    ),
    "cbor": (
        rb"(?:[\x85-\x97\x9f]|" + _widths(0x98, 4) + rb")"
        rb"(\xf6|[\x00-\x17]|" + _widths(0x18, 4) + rb")"
        rb"(?:\x80|\x9f\xff)\xf6(?:[\x00-\x17]|\xf9[\x00-\xff]{2}|\xfa[\x00-\xff]{4}"
        rb"|\xfb[\x00-\xff]{8}|" + _widths(0x18, 4) + rb")"
        rb"(?:[\x81-\x97\x9f]|" + _widths(0x98, 4) + rb")"
        rb"([\x00-\x17\x20-\x37]|" + _widths(0x18, 4) + rb"|" + _widths(0x38, 4) + rb")"
    ),
}


def peek_reply(frame: bytes | memoryview, dialect: Dialect) -> tuple[int | None, int] | None:
    """Read engine index and call id of a utility reply whose rest cannot be decoded.

    So a reply that is cut off, or holds something forbidden, fails the one call that it answers.

    Returns:
        The engine index (None where the message holds nil) and the call id; None when the frame
        does not begin like an engine's utility reply.
    """
    match = re.match(_PREFIXES[dialect], frame)
    if match is None:
        return None
    codec = codec_named(dialect)
    engine, call_id = (codec.decode(part) for part in match.groups())
    return engine, call_id
