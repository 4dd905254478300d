"""Whether all map keys in a frame are harmless, seen before a dict is built from them.

Both decoders build dicts with arrays as keys.  The hash of a tuple of integers is not randomised,
so a peer can choose tens of thousands that collide: a frame of one megabyte then holds the GIL, and
with it every thread, for minutes.  A walk over the decoded values comes too late.  (Strings and
byte strings hash with a secret; of 64-bit integers and floats only a few can collide.)

The walk here is linear, builds nothing, and takes scalars in blocks, one C call each.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

__all__ = ["scalar_keys_cbor", "scalar_keys_msgpack"]

_MAX_OPEN = 200
_INDEFINITE: Final = 1 << 70
_SCALAR, _ARRAY, _MAP, _BREAK = range(4)

_Blocks = tuple[tuple[int, re.Pattern[bytes]], ...]
_Head = Callable[[bytes, int], tuple[int, int, int]]


def scalar_keys_cbor(data: bytes) -> bool:
    """False when a key of the CBOR item is an array, a map or tagged, or the item is cut off."""
    return _scalar_keys(data, _CBOR_BLOCKS, _cbor_head)


def scalar_keys_msgpack(data: bytes) -> bool:
    """False when a key of the msgpack item is an array or a map, or the item is cut off."""
    return _scalar_keys(data, _MSGPACK_BLOCKS, _msgpack_head)


def _scalar_keys(data: bytes, blocks: _Blocks, head: _Head) -> bool:
    position, remaining, in_map = 0, 1, False
    opened: list[tuple[int, bool]] = []
    try:
        while True:
            while not remaining:
                if not opened:
                    return True
                remaining, in_map = opened.pop()
            for size, block in blocks:
                if remaining >= size and (match := block.match(data, position)) is not None:
                    position = match.end()
                    remaining -= size
                    break
            else:
                match = None
            if match is not None:
                continue
            kind, count, position = head(data, position)
            if kind == _BREAK:
                remaining = 0
                continue
            if kind != _SCALAR and in_map and remaining % 2 == 0:
                return False
            remaining -= 1
            if kind != _SCALAR:
                opened.append((remaining, in_map))
                if len(opened) > _MAX_OPEN:
                    return False
                remaining, in_map = count, kind == _MAP
    except (IndexError, OverflowError):  # the end, or a length that no frame has
        return False


def _scalar_blocks(single: bytes, *longer: bytes, text: int, texts: int) -> _Blocks:
    """Patterns for so many scalars in a row: of 1, 2, 3, 5, 9 bytes, and short texts."""
    kinds = [b"[" + single + b"]"]
    for heads, width in zip(longer, (1, 2, 4, 8), strict=True):
        kinds.append(b"[" + heads + rb"][\x00-\xff]{%d}" % width)
    kinds += [b"\\x%02x[\\x00-\\xff]{%d}" % (text + size, size) for size in range(1, texts)]
    any_kind = b"(?:" + b"|".join(kinds) + b")"
    return tuple((size, re.compile(any_kind + b"{%d}+" % size)) for size in (1024, 64, 8))


_CBOR_BLOCKS = _scalar_blocks(
    rb"\x00-\x17\x20-\x37\x60\xe0-\xf7",
    rb"\x18\x38\xf8",
    rb"\x19\x39\xf9",
    rb"\x1a\x3a\xfa",
    rb"\x1b\x3b\xfb",
    text=0x60,
    texts=24,
)


def _cbor_head(data: bytes, position: int) -> tuple[int, int, int]:
    first = data[position]
    position += 1
    major, argument = first >> 5, first & 31
    if first == 0xFF:
        return _BREAK, 0, position
    if major in (2, 3, 4, 5) and argument == 31:
        return (_MAP if major == 5 else _ARRAY), _INDEFINITE, position
    if 24 <= argument <= 27:
        width = 1 << (argument - 24)
        argument = int.from_bytes(data[position : position + width], "big")
        position += width
    if major in (2, 3):
        return _SCALAR, 0, position + argument
    if major == 4:
        return _ARRAY, argument, position
    if major == 5:
        return _MAP, 2 * argument, position
    return (_ARRAY if major == 6 else _SCALAR), 1, position


_MSGPACK_BLOCKS = _scalar_blocks(
    rb"\x00-\x7f\xa0\xc0\xc2\xc3\xe0-\xff",
    rb"\xcc\xd0",
    rb"\xcd\xd1",
    rb"\xca\xce\xd2",
    rb"\xcb\xcf\xd3",
    text=0xA0,
    texts=32,
)
# The first byte of what is longer than a number: the width of its length, what the length counts.
_MSGPACK_LENGTHS: Final = {
    **{first: (1 << step, 0) for step, first in enumerate((0xC4, 0xC5, 0xC6))},
    **{first: (1 << step, 0) for step, first in enumerate((0xD9, 0xDA, 0xDB))},
    **{first: (1 << step, 1) for step, first in enumerate((0xC7, 0xC8, 0xC9))},
}
_MSGPACK_NUMBERS: Final = {
    **{first: width for width, heads in ((2, (0xCC, 0xD0)), (3, (0xCD, 0xD1))) for first in heads},
    **dict.fromkeys((0xCA, 0xCE, 0xD2), 5),
    **dict.fromkeys((0xCB, 0xCF, 0xD3), 9),
    **{0xD4 + step: 2 + (1 << step) for step in range(5)},
}


def _msgpack_head(data: bytes, position: int) -> tuple[int, int, int]:
    first = data[position]
    if 0xA0 <= first <= 0xBF:
        return _SCALAR, 0, position + 1 + (first & 31)
    if 0x90 <= first <= 0x9F:
        return _ARRAY, first & 15, position + 1
    if 0x80 <= first <= 0x8F:
        return _MAP, 2 * (first & 15), position + 1
    if 0xDC <= first <= 0xDF:
        width = 2 if first in (0xDC, 0xDE) else 4
        count = int.from_bytes(data[position + 1 : position + 1 + width], "big")
        kind = _ARRAY if first < 0xDE else _MAP
        return kind, count * (2 if kind == _MAP else 1), position + 1 + width
    if first in _MSGPACK_LENGTHS:
        width, extra = _MSGPACK_LENGTHS[first]
        length = int.from_bytes(data[position + 1 : position + 1 + width], "big")
        return _SCALAR, 0, position + 1 + width + extra + length
    return _SCALAR, 0, position + _MSGPACK_NUMBERS.get(first, 1)
