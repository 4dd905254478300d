"""The settings of one client, checked before anything is opened."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from engine_client._render import shown
from engine_client.deadline import parse_timeout
from engine_client.engines import MAX_ENGINES

__all__ = ["ClientConfig", "CodecName", "Settings", "check_count"]

CodecName = Literal["auto", "cbor", "msgpack"]


def check_count(name: str, value: object, *, least: int, most: int | None = None) -> int:
    """An integer within bounds.

    Raises:
        TypeError: not an integer.
        ValueError: out of bounds.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(
            f"{name} must be an integer, not {shown(value)} ({type(value).__name__})"
        ) from None
    if number < least or (most is not None and number > most):
        bounds = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name} must be {bounds}, not {shown(number)}")
    return number


class Settings(TypedDict, total=False):
    """The settings that every way of making a client takes by keyword; see ``connect()``."""

    timeout: float | None
    connect_timeout: float | None
    close_timeout: float | None
    max_message_size: int
    max_pending_outputs: int
    max_unanswered_bytes: int
    heartbeat_interval: float | Literal["auto"] | None
    slow_call_warning: float | None


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """What ``connect()`` and its kin were told; see there for the meaning of each."""

    engine_count: int = 1
    engine_start_index: int = 0
    codec: CodecName = "auto"
    client_index: int = 0
    timeout: float | None = None
    connect_timeout: float | None = 600.0
    close_timeout: float | None = 5.0
    max_message_size: int = 2**30
    max_pending_outputs: int = 16_384
    max_unanswered_bytes: int = 2**30
    heartbeat_interval: float | Literal["auto"] | None = "auto"
    slow_call_warning: float | None = 30.0

    def __post_init__(self) -> None:
        def fix(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        fix(
            "engine_count",
            check_count("engine_count", self.engine_count, least=1, most=MAX_ENGINES),
        )
        fix(
            "engine_start_index",
            check_count(
                "engine_start_index",
                self.engine_start_index,
                least=0,
                most=MAX_ENGINES - self.engine_count,
            ),
        )
        fix("client_index", check_count("client_index", self.client_index, least=0, most=2**31 - 1))
        if self.codec not in ("auto", "cbor", "msgpack"):
            raise ValueError(f"codec must be 'auto', 'cbor' or 'msgpack', not {shown(self.codec)}")
        for name in ("timeout", "connect_timeout", "close_timeout", "slow_call_warning"):
            fix(name, parse_timeout(getattr(self, name), name=name))
        if self.slow_call_warning == 0:
            raise ValueError("slow_call_warning must be more than 0 seconds, or None for none")
        for name in ("max_message_size", "max_pending_outputs", "max_unanswered_bytes"):
            fix(name, check_count(name, getattr(self, name), least=1))
        if self.heartbeat_interval != "auto":
            seconds = parse_timeout(self.heartbeat_interval, name="heartbeat_interval")
            if seconds is not None and not 0.001 <= seconds <= 86_400:
                raise ValueError(
                    f"heartbeat_interval must be 'auto', None (off) or 0.001 to 86400 seconds, "
                    f"not {shown(self.heartbeat_interval)}"
                )
            fix("heartbeat_interval", seconds)

    @property
    def engines(self) -> tuple[int, ...]:
        """The indices of the engines, in order."""
        return tuple(range(self.engine_start_index, self.engine_start_index + self.engine_count))
