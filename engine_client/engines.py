"""What an engine is to a caller: its index, its id on the wire, its state, how to name several."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from engine_client import _render

__all__ = [
    "MAX_ENGINES",
    "EngineInfo",
    "EngineInfos",
    "Pending",
    "Targets",
    "engine_id",
    "engine_index",
    "engine_names",
    "engines_html",
    "resolve_targets",
]

MAX_ENGINES = 65_536
"""An engine id has two bytes."""

Targets = Sequence[int] | Literal["alive"] | None
"""Which engines a call goes to: None for all, ``"alive"``, or indices in the order of results."""


def engine_id(index: int) -> bytes:
    """The ZeroMQ identity of an engine: its index as two bytes, little-endian."""
    return index.to_bytes(2, "little")


def engine_index(identity: bytes) -> int | None:
    """The index that an identity stands for; None when it has not exactly two bytes."""
    return int.from_bytes(identity, "little") if len(identity) == 2 else None


def engine_names(indices: Iterable[int]) -> str:
    """``engine 3`` or ``engines 0, 1, 2``, shortened after a dozen."""
    shown = list(indices)
    text = ", ".join(map(str, shown[:12]))
    if len(shown) > 12:
        text += f", ... ({len(shown)} in all)"
    return f"engine{'' if len(shown) == 1 else 's'} {text}"


def resolve_targets(targets: object, known: Sequence[int]) -> tuple[int, ...] | None:
    """Turn the ``engines=`` argument into indices; None stands for ``"alive"``.

    Raises:
        TypeError: not None, ``"alive"`` or a sequence of integers.
        ValueError: empty, repeated or unknown indices.
    """
    if targets is None:
        return tuple(known)
    if targets == "alive" and isinstance(targets, str):
        return None
    if isinstance(targets, (str, bytes)) or not isinstance(targets, Iterable):
        value = _render.shown(targets)
        raise TypeError(
            f"engines must be None (all), 'alive' or a sequence of engine indices, not {value}"
            + (
                f"; did you mean engines=[{value}]?"
                if type(targets) is int and targets in known
                else ""
            )
        )
    indices = []
    for item in targets:
        try:
            index = operator.index(item)
        except TypeError:
            index = None
        if index is None or isinstance(item, bool):
            raise TypeError(
                f"engines must hold engine indices (integers), not {_render.shown(item)} "
                f"({type(item).__name__})"
            )
        if abs(index) >= 2**64:
            raise ValueError(f"engines must hold engine indices, not {_render.shown(index)}")
        indices.append(index)
    if not indices:
        raise ValueError("engines is empty: name at least one engine, or None for all")
    if len(set(indices)) != len(indices):
        repeated = sorted({i for i in indices if indices.count(i) > 1})
        raise ValueError(f"engines repeats {engine_names(repeated)}")
    unknown = sorted(set(indices).difference(known))
    if unknown:
        raise ValueError(
            f"engines names {engine_names(unknown)}, but this client has {engine_names(known)}"
        )
    return tuple(indices)


@dataclass(frozen=True, slots=True)
class Pending:
    """Something that an engine has not settled (a snapshot)."""

    kind: Literal["call", "request"]
    name: str
    """The utility method, or the request id."""
    engine: int
    age: float
    """Seconds since the caller began it."""


@dataclass(frozen=True, slots=True, repr=False)
class EngineInfo:
    """One engine as the client last knew it (a snapshot)."""

    index: int
    """The integer that every public name uses."""
    id: bytes
    """Its ZeroMQ identity: the index as two bytes, little-endian."""
    codec: str | None
    """``"cbor"`` or ``"msgpack"``; None before its first message."""
    alive: bool
    """Whether calls to it are accepted."""
    ready: Mapping[str, Any] = field(default_factory=dict)
    """What it said of itself when it registered (``max_model_len``, ``vllm_version`` ...)."""
    last_seen: float | None = None
    """Unix time in seconds of its last message; None before the first."""
    in_flight: int = 0
    """Utility calls and requests that it has not settled."""
    cause_of_death: str | None = None
    """Why it is not alive; None while it is, or before it first came."""
    unanswered: str | None = None
    """The oldest utility call that it has not answered, also when nobody waits for it any more."""
    unanswered_since: float | None = None
    """Unix time in seconds at which that call was made."""

    @property
    def _state(self) -> str:
        return "alive" if self.alive else f"dead: {self.cause_of_death or 'not yet registered'}"

    def __repr__(self) -> str:
        busy = f", {self.in_flight} in flight" if self.in_flight else ""
        return f"<EngineInfo {self.index}: {self._state}{busy}>"

    def _repr_html_(self) -> str:
        ready = _render.html_table(("key", "value"), self.ready.items())
        return (
            f"{engines_html([self])}<details><summary>what it said of itself when it registered"
            f"</summary>{ready}</details>"
        )


class EngineInfos(tuple[EngineInfo, ...]):
    """A tuple of engines that a notebook shows as a table."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return engines_html(self)


def engines_html(engines: Iterable[EngineInfo], caption: str = "") -> str:
    """Engines as an HTML table, a row for each."""
    shown = list(engines)
    return _render.html_table(
        ("engine", "state", "codec", "in flight"),
        [(info.index, info._state, info.codec or "-", info.in_flight) for info in shown],
        caption=caption,
        strong=[number for number, info in enumerate(shown) if not info.alive],
    )
