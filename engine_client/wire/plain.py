"""Plain values: all that is ever sent, and all that decoding ever gives.

A plain value is None, a bool, an int of at most 64 bits, a float, a str, a bytes object, a list or
a dict with str and int keys.  :func:`plain` makes one of a caller's argument and says exactly what
cannot be sent; :func:`verify_plain` refuses what a decoder of greater ambition let through.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Final, NoReturn

from engine_client.errors import EncodeError, ProtocolError

__all__ = ["LEAVES", "MAX_DEPTH", "MAX_MESSAGE_DEPTH", "Plain", "plain", "verify_plain"]

Plain = Any
"""A plain value: the recursive type that it stands for cannot be checked usefully."""

MAX_DEPTH: Final = 100
"""How deep an argument may nest.  Far below what crashes an encoder or is refused by a decoder."""

MAX_MESSAGE_DEPTH: Final = MAX_DEPTH + 8
"""How deep a received message may nest: an argument, come back inside a reply's own arrays."""

LEAVES: Final = frozenset({type(None), bool, int, float, str, bytes})
"""The types of plain values that hold no others."""
_KEYS: Final = frozenset({str, int})


def verify_plain(value: Plain, dialect: str) -> None:
    """Refuse what a decoder let through although it is no plain value, or nests too deep.

    Level by level, without recursion.  Long arrays of leaves, such as token ids, cost one C call.
    """
    leaves = LEAVES
    if type(value) in leaves:
        return
    containers: list[Plain] = [value]
    add = containers.append
    level, level_end = 1, 0
    for index, item in enumerate(containers):  # grows as it is walked
        if index > level_end:
            level, level_end = level + 1, len(containers) - 1
            if level > MAX_MESSAGE_DEPTH:
                raise ProtocolError(f"{dialect}: nested deeper than {MAX_MESSAGE_DEPTH} levels")
        if type(item) is list:
            children: Collection[Plain] = item
        elif type(item) is dict:
            if not _KEYS.issuperset(map(type, item)):
                raise ProtocolError(f"{dialect}: a map key is neither a string nor an integer")
            children = item.values()
        else:
            raise ProtocolError(f"{dialect}: a {type(item).__name__}, not used by the protocol")
        if len(children) > 32 and leaves.issuperset(map(type, children)):
            continue
        for child in children:
            if type(child) not in leaves:
                add(child)


MAX_ITEMS: Final = 2**26
"""How many items an argument may hold in all.  A list counts each time that it is met: with one in
which every list holds the next one twice, 50 levels would take years, and more memory than there
is."""
_COSTS: Final = tuple(min(2 ** (level + 1), 256) for level in range(MAX_DEPTH))
"""What a container counts for, in items, by its level: deep down there are few, unless shared."""

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
    return _plain(value, (path,), 0, [MAX_ITEMS])


def _plain(value: object, path: _Path, depth: int, left: list[int]) -> Plain:
    kind = type(value)
    if kind in _SAFE:
        return value
    convert = _CONVERT.get(kind)
    if convert is None:
        convert = next((_CONVERT[base] for base in kind.__mro__ if base in _CONVERT), _unknown)
    return convert(value, path, depth, left)


def _fail(path: _Path, reason: str) -> NoReturn:
    parts: list[str] = []
    while len(path) == 2:
        path, key = path
        parts.append("{an item}" if key is _IN_SET else f"[{_key_text(key)}]")
    if len(parts) > 12:
        parts[6:-6] = [f"...{len(parts) - 12} levels..."]
    raise EncodeError(f"{path[0]}{''.join(reversed(parts))} {reason}")


def _key_text(key: object) -> str:
    if isinstance(key, int):
        return f"{key}" if _LOWEST <= key <= _HIGHEST else "a huge integer"
    return f"{key!r}" if isinstance(key, str) and len(key) <= 40 else f"{str(key)[:37]!r}..."


_IN_SET: Final = object()


def _integer(value: int, path: _Path, depth: int, left: list[int]) -> int:
    if not _LOWEST <= value <= _HIGHEST:
        _fail(path, "is an integer beyond 64 bits; send it as a string")
    return int.__int__(value)


def _string(value: str, path: _Path, depth: int, left: list[int]) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        _fail(
            path,
            "is a string with a lone surrogate, which UTF-8 cannot express; "
            "send bytes, or decode it with errors='replace'",
        )
    return str.__str__(value)


def _view(value: Plain, path: _Path, depth: int, left: list[int]) -> bytes:
    try:
        return bytes(memoryview(value))
    except ValueError as error:
        _fail(path, f"is a {type(value).__name__} that cannot be read: {error}")


def _deeper(size: int, path: _Path, depth: int, left: list[int]) -> int:
    """Enter a container of so many items."""
    if depth >= MAX_DEPTH:
        _fail(path, f"nests deeper than {MAX_DEPTH} levels, or holds itself")
    left[0] -= size + _COSTS[depth]
    if left[0] < 0:
        _fail(path, "is one item too many: the argument holds too much, or one list many times")
    return depth + 1


def _list(value: Plain, path: _Path, depth: int, left: list[int]) -> list[Any]:
    depth = _deeper(len(value), path, depth, left)
    items = list(value)
    kinds = set(map(type, items))
    if kinds <= _SAFE:
        return items
    if kinds == {int} and min(items) >= _LOWEST and max(items) <= _HIGHEST:
        return items
    return [_plain(item, (path, index), depth, left) for index, item in enumerate(items)]


def _set(value: Plain, path: _Path, depth: int, left: list[int]) -> list[Any]:
    depth = _deeper(len(value), path, depth, left)
    return [_plain(item, (path, _IN_SET), depth, left) for item in list(value)]


def _dict(value: dict[Any, Any], path: _Path, depth: int, left: list[int]) -> dict[Any, Any]:
    depth = _deeper(len(value), path, depth, left)
    result = {}
    for key, item in list(value.items()):
        if isinstance(key, bool) or not isinstance(key, (str, int)):
            _fail(
                path,
                f"is a dict with a key of type {type(key).__name__}; "
                f"keys must be strings or integers",
            )
        result[_plain(key, (path, key), depth, left)] = _plain(item, (path, key), depth, left)
    return result


def _unknown(value: object, path: _Path, depth: int, left: list[int]) -> NoReturn:
    kind = type(value)
    advice = "send None, bool, int, float, str, bytes, list or dict"
    if kind.__module__.partition(".")[0] in ("numpy", "torch", "jax", "jaxlib"):
        advice = "convert it with .tolist(), or a scalar with .item()"
    elif hasattr(kind, "__dataclass_fields__"):
        advice = "convert it with dataclasses.asdict(), or to the list of its fields"
    name = kind.__qualname__
    if kind.__module__ != "builtins":
        name = f"{kind.__module__}.{name}"
    article = "an" if name[0] in "aeiouAEIOU" else "a"
    _fail(path, f"is {article} {name}, which cannot be sent; {advice}")


_SAFE: Final = frozenset({type(None), bool, float, bytes})
_CONVERT: Final[dict[type, Callable[[Any, _Path, int, list[int]], Any]]] = {
    int: _integer,
    str: _string,
    list: _list,
    tuple: _list,
    dict: _dict,
    set: _set,
    frozenset: _set,
    bytearray: _view,
    memoryview: _view,
    bytes: _view,
    float: lambda value, path, depth, left: float.__float__(value),
}
