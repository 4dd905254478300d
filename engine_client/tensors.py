"""Arrays on the wire: a dtype's name, a shape and the raw bytes, without an array library.

A record holds ``[dtype, shape, data]``.  ``data`` is the bytes themselves, or the number of the
frame that holds them, counted from 1 behind the main frame.  Engines write small arrays (below 256
bytes) inline and accept both; this client always sends a frame.  vLLM names dtypes as numpy does in
one place (``"<f4"``) and as torch does in another (``"float32"``).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine_client.errors import EncodeError, ProtocolError

__all__ = ["Tensor", "lift_tensors"]

_FORMATS: dict[str, Any] = {
    "bool": "?",
    "uint8": "B",
    "int8": "b",
    "int16": "h",
    "int32": "i",
    "int64": "q",
    "float32": "f",
    "float64": "d",
    "|b1": "?",
    "|u1": "B",
    "|i1": "b",
    "<i2": "h",
    "<i4": "i",
    "<i8": "q",
    "<u2": "H",
    "<u4": "I",
    "<u8": "Q",
    "<f4": "f",
    "<f8": "d",
}
MAX_LIFT_DEPTH = 100
"""How deep a structure with arrays in it may nest."""
_HALF = ("float16", "<f2")
"""No memory view can be cast to it."""
_SIZES = {"float16": 2, "<f2": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
_NAMES = {
    "l": "int64",
    "q": "int64",
    "i": "int32",
    "h": "int16",
    "b": "int8",
    "B": "uint8",
    "?": "bool",
    "e": "float16",
    "f": "float32",
    "d": "float64",
}


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """An array: ``numpy.asarray(tensor.view())`` shares its memory.

    Make one for a request with :meth:`of`, or say dtype and shape of raw little-endian bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    data: memoryview | bytes

    @classmethod
    def of(cls, array: Any, dtype: str | None = None) -> Tensor:
        """Wrap anything that offers the buffer protocol (numpy, ``array.array``), row by row.

        Args:
            array: contiguous; it must not change until the request was sent.
            dtype: torch's name for it, where the buffer does not say (``"bfloat16"``).
        """
        view = memoryview(array)
        if not view.c_contiguous:
            raise EncodeError("the array is not contiguous; make a contiguous copy of it")
        name = dtype or _NAMES.get(view.format.lstrip("<=@"))
        if name is None:
            raise EncodeError(f"an array of format {view.format!r} has no name; give dtype=")
        return cls(name, tuple(view.shape or ()), view.cast("B") if view.nbytes else b"")

    @classmethod
    def from_plain(cls, value: object, frames: Sequence[bytes]) -> Tensor:
        """Read ``[dtype, shape, data]``.

        Raises:
            ProtocolError: it is none, or its bytes do not fit its shape.
        """
        if type(value) is not list or len(value) != 3:
            raise ProtocolError("an array must be [dtype, shape, data]")
        dtype, shape, data = value
        if type(dtype) is not str or type(shape) is not list:
            raise ProtocolError("an array must be [dtype, shape, data]")
        if not all(type(n) is int and n >= 0 for n in shape):
            raise ProtocolError("an array's shape must hold integers from 0")
        if type(data) is int:
            if not 0 < data < len(frames):
                raise ProtocolError(f"an array names frame {data} of {len(frames)}")
            data = frames[data]
        if not isinstance(data, (bytes, memoryview)):
            raise ProtocolError(f"an array's data must be bytes, not {type(data).__name__}")
        size = _item_size(dtype)
        if size is not None and size * math.prod(shape) != len(data):
            raise ProtocolError(f"an array of shape {shape} and {dtype} has {len(data)} bytes")
        return cls(dtype, tuple(shape), data)

    def view(self) -> memoryview:
        """The elements, in shape, without a copy.

        Flat bytes where a memory view has no such dtype (float16, bfloat16, float8).
        """
        flat = memoryview(self.data).cast("B")
        code = _FORMATS.get(self.dtype)
        if code is None or flat.nbytes == 0:
            return flat
        view: memoryview = flat.cast(code, self.shape) if self.shape else flat.cast(code)
        return view

    def tolist(self) -> Any:
        """The elements as nested lists."""
        if self.dtype not in _HALF:
            return self.view().tolist()
        items: list[Any] = list(struct.unpack(f"<{len(self.data) // 2}e", self.data))
        for size in reversed(self.shape[1:]):
            items = [items[start : start + size] for start in range(0, len(items), size)]
        return items

    def __repr__(self) -> str:
        return f"<Tensor {self.dtype} {list(self.shape)}>"


def _item_size(dtype: str) -> int | None:
    code = _FORMATS.get(dtype)
    if code is not None:
        return int(memoryview(b"\0" * 8).cast(code).itemsize)
    return _SIZES.get(dtype)


def lift_tensors(value: Any, frames: list[bytes], *, depth: int = 0) -> Any:
    """Replace every :class:`Tensor` in a structure by its record, its bytes added to ``frames``.

    Args:
        value: lists, tuples and mappings are walked; all else is returned as it is.
        frames: the frames behind the main one, extended here.
        depth: how many containers it is in.

    Raises:
        EncodeError: it nests too deep.
    """
    if depth > MAX_LIFT_DEPTH:
        raise EncodeError(f"a structure nests deeper than {MAX_LIFT_DEPTH} levels, or holds itself")
    if isinstance(value, Tensor):
        frames.append(bytes(value.data))
        return [value.dtype, list(value.shape), len(frames)]
    if isinstance(value, Mapping):
        return {key: lift_tensors(item, frames, depth=depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [lift_tensors(item, frames, depth=depth + 1) for item in value]
    return value
