"""A LoRA adapter, as a caller names it to the engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine_client._render import shown
from engine_client.config import check_count
from engine_client.errors import RequestRefusedError

__all__ = ["LoraRequest", "check_lora_id"]


def check_lora_id(value: object, name: str = "lora_int_id") -> int:
    """The id of an adapter, 1 or more.

    Raises:
        TypeError: not an integer.
        RequestRefusedError: below 1; an engine takes 0 for "no adapter".
    """
    try:
        return check_count(name, value, least=1, most=2**63 - 1)
    except ValueError as exc:
        raise RequestRefusedError(str(exc)) from None


@dataclass(frozen=True, slots=True)
class LoraRequest:
    """A LoRA adapter: its name, its id, and where the engines find it.

    Raises:
        RequestRefusedError: an id below 1, or an empty name or path (an engine that is given one
            in a request dies of it).
    """

    lora_name: str
    lora_int_id: int
    """1 or more; the same id is the same adapter on every engine."""
    lora_path: str
    """A path that every engine can read."""
    base_model_name: str | None = None
    load_inplace: bool = False
    """Load it again although its id is known, replacing its weights."""
    is_3d_lora_weight: bool = False

    def __post_init__(self) -> None:
        check_lora_id(self.lora_int_id)
        for name in ("lora_name", "lora_path"):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise TypeError(f"{name} must be a string, not {shown(value)}")
            if not value:
                raise RequestRefusedError(f"{name} is empty")
        if not isinstance(self.base_model_name, (str, type(None))):
            raise TypeError(
                f"base_model_name must be a string or None, not {shown(self.base_model_name)}"
            )
        for name in ("load_inplace", "is_3d_lora_weight"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, not {shown(getattr(self, name))}")

    def to_plain(self) -> list[Any]:
        """The six positions of a vLLM 0.32 LoRA record."""
        return [
            self.lora_name,
            self.lora_int_id,
            self.lora_path,
            self.base_model_name,
            self.load_inplace,
            self.is_3d_lora_weight,
        ]
