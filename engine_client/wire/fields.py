"""Checked reading of one field of a received message.

Each function returns the value, now of a known type, or raises
:class:`~engine_client.errors.ProtocolError` naming the message, the field and the type that came
instead; never the value itself, which may be huge, or not printable.  A bool is no integer.
"""

from __future__ import annotations

from typing import Any, NoReturn

from engine_client.errors import ProtocolError

__all__ = ["flag", "integer", "mapping", "optional_text", "record", "refuse", "text", "texts"]


def refuse(message: str, what: str, expected: str, value: object) -> NoReturn:
    raise ProtocolError(f"{message}: {what} must be {expected}, not {type(value).__name__}")


def mapping(value: object, message: str, what: str = "the payload") -> dict[Any, Any]:
    if type(value) is not dict:
        refuse(message, what, "a map", value)
    return value


def record(value: object, message: str, required: int) -> list[Any]:
    if type(value) is not list:
        refuse(message, "the payload", "an array", value)
    if len(value) < required:
        raise ProtocolError(f"{message}: {len(value)} fields, at least {required} are required")
    return value


def integer(value: object, message: str, what: str) -> int:
    if type(value) is not int:
        refuse(message, what, "an integer", value)
    return value


def text(value: object, message: str, what: str) -> str:
    if type(value) is not str:
        refuse(message, what, "a string", value)
    return value


def optional_text(fields: dict[Any, Any], key: str, message: str) -> str | None:
    value = fields.get(key)
    return None if value is None else text(value, message, f"'{key}'")


def flag(value: object, message: str, what: str) -> bool:
    if type(value) is not bool:
        refuse(message, what, "a boolean", value)
    return value


def texts(value: object, message: str, what: str) -> tuple[str, ...]:
    if type(value) is not list or not {str}.issuperset(map(type, value)):
        refuse(message, what, "an array of strings", value)
    return tuple(value)
