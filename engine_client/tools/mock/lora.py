"""LoRA adapters in a reference engine: how a record is read, what loads, what is evicted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Adapter", "AdapterCache", "read_adapter"]

MAX_RANK = 16


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter, as a caller names it."""

    name: str
    id: int
    path: str = ""
    base_model_name: str | None = None
    load_inplace: bool = False
    is_3d_weight: bool = False

    def load(self) -> None:
        """Pretend to read it.

        No file is looked at: a path with "missing" or "nonexistent" in it does not exist, one with
        "bad_rank" has a rank that the engine was not made for.
        """
        if "missing" in self.path or "nonexistent" in self.path:
            raise RuntimeError(f"Loading lora {self.name} failed: No adapter found for {self.path}")
        if "bad_rank" in self.path:
            raise ValueError(f"LoRA rank 64 is greater than max_lora_rank {MAX_RANK}.")


_TYPE_NAMES = {
    type(None): "null",
    bool: "bool",
    int: "int",
    float: "float",
    str: "str",
    bytes: "bytes",
    list: "array",
    dict: "object",
}
_TYPES: tuple[tuple[str, tuple[type, ...]], ...] = (
    ("str", (str,)),
    ("int", (int,)),
    ("str", (str,)),
    ("str | null", (str, type(None))),
    ("bool", (bool,)),
    ("bool", (bool,)),
)


def read_adapter(record: Any) -> Adapter:
    """Read a LoRA record of two to six positions; more are ignored.

    Raises:
        ValueError, AssertionError: it is none; the text is vLLM's.
    """
    if type(record) is not list:
        raise ValueError(f"Expected `array`, got `{_type_name(record)}`")
    if len(record) < 2:
        raise ValueError(f"Expected `array` of at least length 2, got {len(record)}")
    for position, (value, (expected, types)) in enumerate(zip(record, _TYPES, strict=False)):
        if type(value) not in types:
            raise ValueError(
                f"Expected `{expected}`, got `{_type_name(value)}` - at `$[{position}]`"
            )
    adapter = Adapter(*record[: len(_TYPES)])
    if adapter.id < 1:
        raise ValueError(f"id must be > 0, got {adapter.id}")
    if not adapter.path:
        raise AssertionError("lora_path cannot be empty")
    return adapter


def _type_name(value: Any) -> str:
    return _TYPE_NAMES.get(type(value), type(value).__name__)


class AdapterCache:
    """The adapters that one worker holds, the one used longest ago first."""

    def __init__(self, capacity: Callable[[], int]) -> None:
        self._capacity = capacity
        self._held: dict[int, Adapter] = {}
        self._pinned: set[int] = set()

    def add(self, adapter: Adapter) -> bool:
        """Hold an adapter; one whose id is known is only touched, unless told otherwise.

        Beyond the capacity, the one used longest ago goes silently.  It is loaded before that, so
        that a failure leaves the others untouched.
        """
        if adapter.id in self._held and not adapter.load_inplace:
            self._held[adapter.id] = self._held.pop(adapter.id)
            return True
        adapter.load()
        self.remove(adapter.id)
        if len(self._held) >= self._capacity():
            oldest = next((held for held in self._held if held not in self._pinned), None)
            if oldest is None:
                raise RuntimeError("All items are pinned, cannot remove oldest from the cache.")
            self.remove(oldest)
        self._held[adapter.id] = adapter
        return True

    def remove(self, adapter_id: int) -> bool:
        """Let go of an adapter; return whether it was held."""
        self._pinned.discard(adapter_id)
        return self._held.pop(adapter_id, None) is not None

    def pin(self, adapter_id: int) -> bool:
        """Never evict this one."""
        if adapter_id not in self._held:
            raise ValueError(f"Pinning failed. LoRA {adapter_id} is not registered.")
        self._pinned.add(adapter_id)
        return True

    def ids(self) -> set[int]:
        """The ids of what is held."""
        return set(self._held)
