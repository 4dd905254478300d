"""Bytes to plain values and back, in two dialects, and the check of what may be sent.

A plain value is None, a bool, an int of at most 64 bits, a float, a str, a bytes object, a list or
a dict with str and int keys.  :func:`plain` makes one of a caller's argument, once, whatever the
number of engines and dialects; a codec turns it into bytes; decoding gives plain values only, or
raises :class:`~engine_client.errors.ProtocolError`.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from functools import cache
from importlib import import_module
from itertools import chain
from typing import Any, ClassVar, Final, Literal, NoReturn

from engine_client.errors import EncodeError, ProtocolError

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

Plain = Any
"""A plain value: the recursive type that it stands for cannot be checked usefully."""

MAX_DEPTH: Final = 100
"""How deep an argument may nest.  Far below what crashes an encoder or is refused by a decoder."""

MAX_MESSAGE_DEPTH: Final = MAX_DEPTH + 8
"""How deep a received message may nest: an argument, come back inside a reply's own arrays."""

LEAVES: Final = frozenset({type(None), bool, int, float, str, bytes})
_KEYS: Final = frozenset({str, int})


class Codec(ABC):
    """One dialect of the protocol.  Stateless, for any thread."""

    name: ClassVar[Dialect]

    @abstractmethod
    def encode(self, value: Plain) -> bytes:
        """Write a plain value; what is not plain must have passed :func:`plain` before."""

    @abstractmethod
    def decode(self, frame: bytes | memoryview) -> Plain:
        """Read the one plain value that the frame consists of.

        The caller limits the frame's size first.

        Raises:
            ProtocolError: anything else, whatever the bytes are.
        """


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


def verify_plain(value: Plain, dialect: str) -> None:
    """Refuse what a decoder let through although it is no plain value, or nests too deep.

    Without recursion, and with one C call for each container that holds leaves only.
    """
    if type(value) in LEAVES:
        return
    containers: list[Plain] = [value]
    for item in containers:  # grows as it is walked
        if type(item) is list:
            children: Collection[Plain] = item
        elif type(item) is dict:
            if not _KEYS.issuperset(map(type, item)):
                raise ProtocolError(f"{dialect}: a map key is neither a string nor an integer")
            children = item.values()
        else:
            raise ProtocolError(f"{dialect}: a {type(item).__name__}, not used by the protocol")
        if not LEAVES.issuperset(map(type, children)):
            containers += [child for child in children if type(child) not in LEAVES]
    if len(containers) > MAX_MESSAGE_DEPTH:  # fewer cannot nest too deep
        _verify_depth(value, dialect)


def _verify_depth(value: Plain, dialect: str) -> None:
    level: list[Plain] = [value]
    for _ in range(MAX_MESSAGE_DEPTH):
        values = chain.from_iterable(v.values() if type(v) is dict else v for v in level)
        level = [child for child in values if type(child) not in LEAVES]
        if not level:
            return
    raise ProtocolError(f"{dialect}: nested deeper than {MAX_MESSAGE_DEPTH} levels")


# What is to be sent ---------------------------------------------------------------------------

_LOWEST, _HIGHEST = -(2**63), 2**64 - 1
_Path = tuple[Any, ...]  # (parent path, suffix), or (name,) at the root: built without formatting


def plain(value: object, path: str = "argument") -> Plain:
    """Check a value that is to be sent, and make a plain value of it.

    Tuples and sets become lists, ``bytearray`` and ``memoryview`` become bytes, subclasses such as
    enumerations become their base type.  Containers are copied: later changes by the caller do not
    reach what is sent.

    Raises:
        EncodeError: it holds something that cannot be sent; the text names the path to it.
    """
    return _plain(value, (path,), 0)


def _plain(value: object, path: _Path, depth: int) -> Plain:
    kind = type(value)
    if kind in _SAFE:
        return value
    convert = _CONVERT.get(kind)
    if convert is None:
        convert = next((_CONVERT[base] for base in kind.__mro__ if base in _CONVERT), _unknown)
    if depth > MAX_DEPTH:
        _fail(path, f"nests deeper than {MAX_DEPTH} levels (or holds itself)")
    return convert(value, path, depth)


def _fail(path: _Path, reason: str) -> NoReturn:
    parts: list[str] = []
    while len(path) == 2:
        path, key = path
        text = repr(key) if type(key) is not str or len(key) <= 40 else f"{key[:37]!r}..."
        parts.append("{an item}" if key is _IN_SET else f"[{text}]")
    if len(parts) > 12:
        parts[6:-6] = [f"...{len(parts) - 12} levels..."]
    raise EncodeError(f"{path[0]}{''.join(reversed(parts))} {reason}")


_IN_SET: Final = object()


def _integer(value: int, path: _Path, depth: int) -> int:
    if not _LOWEST <= value <= _HIGHEST:
        _fail(path, "is an integer beyond 64 bits; send it as a string")
    return int.__int__(value)


def _string(value: str, path: _Path, depth: int) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        _fail(path, "is a string with a lone surrogate, which UTF-8 cannot express; "
                    "send bytes, or decode it with errors='replace'")
    return str.__str__(value)


def _view(value: Plain, path: _Path, depth: int) -> bytes:
    try:
        return bytes(value)
    except ValueError as error:
        _fail(path, f"is a {type(value).__name__} that cannot be read: {error}")


def _list(value: Plain, path: _Path, depth: int) -> list[Any]:
    items = list(value)
    kinds = set(map(type, items))
    if kinds <= _SAFE:
        return items
    if kinds == {int} and min(items) >= _LOWEST and max(items) <= _HIGHEST:
        return items
    depth += 1
    return [_plain(item, (path, index), depth) for index, item in enumerate(items)]


def _set(value: Plain, path: _Path, depth: int) -> list[Any]:
    return [_plain(item, (path, _IN_SET), depth + 1) for item in list(value)]


def _dict(value: dict[Any, Any], path: _Path, depth: int) -> dict[Any, Any]:
    result = {}
    for key, item in list(value.items()):
        if isinstance(key, bool) or not isinstance(key, (str, int)):
            _fail(path, f"is a dict with a key of type {type(key).__name__}; "
                        f"keys must be strings or integers")
        result[_plain(key, (path, key), depth)] = _plain(item, (path, key), depth + 1)
    return result


def _unknown(value: object, path: _Path, depth: int) -> NoReturn:
    kind = type(value)
    advice = "send None, bool, int, float, str, bytes, list or dict"
    if kind.__module__.partition(".")[0] in ("numpy", "torch", "jax", "jaxlib"):
        advice = "convert it with .tolist(), or a scalar with .item()"
    elif hasattr(kind, "__dataclass_fields__"):
        advice = "convert it with dataclasses.asdict(), or to the list of its fields"
    name = kind.__qualname__ if kind.__module__ == "builtins" else (
        f"{kind.__module__}.{kind.__qualname__}")
    _fail(path, f"is a {name}, which cannot be sent; {advice}")


_SAFE: Final = frozenset({type(None), bool, float, bytes})
_CONVERT: Final[dict[type, Callable[[Any, _Path, int], Any]]] = {
    int: _integer,
    str: _string,
    list: _list,
    tuple: _list,
    dict: _dict,
    set: _set,
    frozenset: _set,
    bytearray: _view,
    memoryview: _view,
    bytes: lambda value, path, depth: bytes.join(b"", (value,)),
    float: lambda value, path, depth: float.__float__(value),
}


# What can still be read -----------------------------------------------------------------------

def _widths(first: int, count: int) -> bytes:
    """A pattern for the integers of 1, 2, 4 and 8 bytes whose headers begin at ``first``."""
    return b"|".join(
        b"\\x%02x[\\x00-\\xff]{%d}" % (first + step, 1 << step) for step in range(count)
    )


_PREFIXES: Final[dict[str, re.Pattern[bytes]]] = {
    "msgpack": re.compile(
        rb"(?:[\x95-\x9f]|\xdc[\x00-\xff]{2}|\xdd[\x00-\xff]{4})"
        rb"(\xc0|[\x00-\x7f]|" + _widths(0xCC, 4) + rb")"
        rb"\x90\xc0(?:\xca[\x00-\xff]{4}|\xcb[\x00-\xff]{8}|[\x00-\x7f]|" + _widths(0xCC, 4) + rb")"
        rb"(?:[\x91-\x9f]|\xdc[\x00-\xff]{2}|\xdd[\x00-\xff]{4})"
        rb"([\x00-\x7f\xe0-\xff]|" + _widths(0xCC, 4) + rb"|" + _widths(0xD0, 4) + rb")"
    ),
    "cbor": re.compile(
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
    match = _PREFIXES[dialect].match(frame)
    if match is None:
        return None
    codec = codec_named(dialect)
    engine, call_id = (codec.decode(part) for part in match.groups())
    return engine, call_id
