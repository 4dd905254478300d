"""The msgpack dialect of vLLM engines, by msgspec.

Of the extension types only the raw view (3) is read, as bytes.  Types 1 and 2 are pickles: they are
refused like every other, whatever the engine is configured to send.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from engine_client.errors import ProtocolError
from engine_client.wire.codec import Codec, Dialect
from engine_client.wire.keys import scalar_keys_msgpack
from engine_client.wire.plain import Plain

__all__ = ["MsgpackCodec"]

_RAW_VIEW = 3

# msgspec has no option that restricts keys.  Below this size colliding keys cost milliseconds, and
# hardly any message is larger; and only maps of 16 entries or more matter, with one of two headers.
_KEYS_MATTER = 32_768


def _extension(code: int, data: memoryview) -> bytes:
    if code != _RAW_VIEW:
        raise ProtocolError(f"msgpack: extension type {code}, which this client never decodes")
    return bytes(data)


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ext_hook=_extension).decode


class MsgpackCodec(Codec):
    """msgpack as msgspec writes it: shortest integers, floats always 64 bits wide."""

    name: ClassVar[Dialect] = "msgpack"

    def encode(self, value: Plain) -> bytes:
        return _encode(value)

    def read(self, frame: bytes | memoryview) -> Plain:
        if len(frame) > _KEYS_MATTER:
            _verify_keys(bytes(frame))
        try:
            return _decode(frame)
        except (ValueError, RecursionError, MemoryError, OverflowError, TypeError) as error:
            raise ProtocolError(f"msgpack: not valid: {str(error)[:200]}") from error


def _verify_keys(data: bytes) -> None:
    if (b"\xde" in data or b"\xdf" in data) and not scalar_keys_msgpack(data):
        raise ProtocolError("msgpack: a map key is an array or a map, or bytes are missing")
