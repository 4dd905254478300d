"""The CBOR dialect, hardened.

The decoder of cbor2 does far more than the protocol needs, and some of it at the price of the whole
process: tags make it compile regular expressions, parse mail and compute powers of ten for seconds
with the GIL held, and shared references make a list hold itself.  So every tag is refused, and so
is every array or map used as a key.  What then still is no plain value is refused by a walk:
:meth:`Codec.verify`.
"""

from __future__ import annotations

import os
import re
import struct
from functools import lru_cache
from math import isfinite
from typing import ClassVar, NoReturn

from cbor2 import CBORDecodeError, CBOREncoder, dumps, loads

from engine_client.errors import ProtocolError
from engine_client.wire.codec import Codec, Dialect
from engine_client.wire.keys import scalar_keys_cbor
from engine_client.wire.plain import MAX_MESSAGE_DEPTH, Plain

__all__ = ["CborCodec"]

# cbor2 ignores bytes after the item.  A message is decoded as the first of two items in an array,
# the second a text that no peer knows: it comes back whole only if the message used all its bytes.
_TOKEN = os.urandom(8).hex()
_TAIL = b"\x70" + _TOKEN.encode()

_NON_FINITE = re.compile(rb"\xf9[\x7c\x7e\xfc]\x00")
_LARGE = 65_536
"""Bytes from which a byte string is written here."""
_DEPTH = 4
"""How deep they are looked for: a call, its arguments, one of these, what is in it."""
_SHORT = 64
"""Items up to which a list or map is looked through for large byte strings."""
_HOLDERS = frozenset({bytes, list, dict})
_WIDE_NEGATIVE = re.compile(rb"\x3b[\x80-\xff]")

_SHORT_REPLY = re.compile(
    rb"\x89([\x00-\x17]|\x18.|\x19..)"  # of nine fields: the engine index
    rb"\x80\xf6\xfb.{8}"  # no outputs, no statistics, a timestamp
    rb"\x83([\x00-\x17]|\x18.|\x19..|\x1a.{4}|\x1b.{8})"  # the reply: the call id
    rb"\xf6\x82\xf6([\xf4-\xf6])"  # no failure, a result
    rb"\xf6{4}",
    re.DOTALL,
).fullmatch
_RESULTS = {b"\xf4": False, b"\xf5": True, b"\xf6": None}


@lru_cache(4096)  # an engine has one index, and a fan-out has one call id
def _unsigned(item: bytes) -> int:
    return int.from_bytes(item[1:] or item, "big")


def _refuse_tag(*_: object) -> NoReturn:
    raise ProtocolError("a tag, which the protocol does not use")


# Those that cbor2 decodes itself must be overridden one by one; the hook sees only the others.
_TAGS = dict.fromkeys(
    (*range(6), 25, 28, 29, 30, 35, 36, 37, 52, 54, 100, 256, 258, 260, 261, 1004, 43000, 55799),
    _refuse_tag,
)


def _encode_double(encoder: CBOREncoder, value: float) -> None:
    encoder.write(b"\xfb" + struct.pack(">d", value))


class CborCodec(Codec):
    """CBOR by cbor2: shortest integers, floats always 64 bits wide, no tags."""

    name: ClassVar[Dialect] = "cbor"

    def encode(self, value: Plain) -> bytes:
        if not _holds_large(value):
            return _encode_whole(value)
        pieces: list[bytes] = []
        _write(value, pieces)
        return b"".join(pieces)

    def short_reply(self, frame: bytes) -> tuple[int, int, bool | None] | None:
        match = _SHORT_REPLY(frame)
        if match is None:
            return None
        index, call_id, result = match.groups()
        return _unsigned(index), _unsigned(call_id), _RESULTS[result]

    def read(self, frame: bytes | memoryview) -> Plain:
        data = b"".join((b"\x82", frame, _TAIL))
        try:
            value, token = _loads(data)
        except CBORDecodeError as error:
            cause = error.__cause__
            if cause is None or isinstance(cause, Exception):
                reason = str(cause if isinstance(cause, ProtocolError) else error)
                raise ProtocolError(f"cbor: not valid: {reason[:200]}") from error
            error.__cause__ = None
            raise cause from None  # cbor2 wraps even a Ctrl-C that lands in one of its callbacks
        except (RecursionError, ValueError, MemoryError, OverflowError, TypeError) as error:
            raise ProtocolError(f"cbor: not valid: {type(error).__name__}") from error
        if token != _TOKEN:
            raise ProtocolError("cbor: bytes after the end of the message")
        if _WIDE_NEGATIVE.search(data):
            _verify_integers(value)
        return value


def _encode_whole(value: Plain) -> bytes:
    frame = dumps(value)
    # cbor2 writes NaN and the infinities in 16 bits, all other floats in 64.
    if _NON_FINITE.search(frame) and _holds_non_finite(value):
        frame = dumps(value, encoders={float: _encode_double})
    return frame


# cbor2 copies a byte string of 300 MB several times over, and no other thread runs for most of a
# second.  Joining pieces makes one copy, and lets them run.


def _holds_large(value: Plain, depth: int = _DEPTH) -> bool:
    """Whether a large byte string lies in a value where arguments lie: neither deep, nor in a long
    list.  Anywhere else cbor2 writes it too.
    """
    kind = type(value)
    if kind is bytes:
        return len(value) >= _LARGE
    if not depth or kind not in _HOLDERS or len(value) > _SHORT:
        return False
    for item in value if kind is list else value.values():
        if type(item) in _HOLDERS and item and _holds_large(item, depth - 1):
            return True
    return False


def _write(value: Plain, pieces: list[bytes], depth: int = _DEPTH) -> None:
    """Write a value as cbor2 does, without a look into large byte strings."""
    kind = type(value)
    if not _holds_large(value, depth):
        pieces.append(_encode_whole(value))
    elif kind is bytes:
        pieces += _head(0x40, len(value)), value
    elif kind is list:
        pieces.append(_head(0x80, len(value)))
        for item in value:
            _write(item, pieces, depth - 1)
    else:
        pieces.append(_head(0xA0, len(value)))
        for key, item in value.items():
            pieces.append(_encode_whole(key))
            _write(item, pieces, depth - 1)


def _head(major: int, length: int) -> bytes:
    """What begins a byte string, an array or a map of a length, as short as it can be."""
    if length < 24:
        return bytes((major | length,))
    width = next(step for step in range(4) if length < 1 << (8 << step))
    return bytes((major | 24 + width,)) + length.to_bytes(1 << width, "big")


def _loads(data: bytes) -> Plain:
    try:
        return loads(
            data,
            semantic_decoders=_TAGS,
            tag_hook=_refuse_tag,
            max_depth=MAX_MESSAGE_DEPTH + 1,
            allow_duplicate_keys=False,
            strict_hashable_types=True,
        )
    except CBORDecodeError as error:
        # Strict keys are strings and byte strings.  Integers are good too, and rare: only for them
        # is it worth looking whether all keys are harmless.
        if "map key must be" not in str(error) or not scalar_keys_cbor(data):
            raise
    return loads(
        data,
        semantic_decoders=_TAGS,
        tag_hook=_refuse_tag,
        max_depth=MAX_MESSAGE_DEPTH + 1,
        allow_duplicate_keys=False,
    )


def _holds_non_finite(value: Plain) -> bool:
    pending: list[Plain] = [[value]]
    for item in pending:
        values = item if type(item) is list else item.values()
        kinds = set(map(type, values))
        if float in kinds and not all(isfinite(v) for v in values if type(v) is float):
            return True
        if list in kinds or dict in kinds:
            pending.extend(v for v in values if type(v) in (list, dict))
    return False


def _verify_integers(value: Plain) -> None:
    """Refuse integers below -2^63, which CBOR can express and nothing else here can."""
    pending: list[Plain] = [[value]]
    for item in pending:
        values = item if type(item) is list else [*item, *item.values()]
        if set(map(type, values)) == {int}:
            lowest = min(values)
        else:
            lowest = min((v for v in values if type(v) is int), default=0)
            pending.extend(v for v in values if type(v) in (list, dict))
        if lowest < -(2**63):
            raise ProtocolError("cbor: an integer beyond 64 bits")
