"""Both dialects: what may be sent, exact bytes, hostile bytes, what can still be read."""

from __future__ import annotations

import decimal
import enum
import functools
import math
import random
import sys
import time
from array import array
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any
from unittest import mock

import cbor2
import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine_client.errors import EncodeError, ProtocolError
from engine_client.wire import cbor
from engine_client.wire.codec import (
    MAX_DEPTH,
    Dialect,
    codec_named,
    dialect_of_map,
    peek_reply,
    plain,
)
from engine_client.wire.keys import scalar_keys_cbor, scalar_keys_msgpack
from engine_client.wire.messages import Outputs, Registration, UtilityReply, UtilityRequest
from engine_client.wire.plain import MAX_MESSAGE_DEPTH
from tests.helpers import scaled
from tests.wire.strategies import DIALECTS, leaves, plain_values

CBOR = codec_named("cbor")
MSGPACK = codec_named("msgpack")
CODECS = pytest.mark.parametrize("dialect", DIALECTS)


def nested(depth: int, innermost: object = 0) -> Any:
    for _ in range(depth):
        innermost = [innermost]
    return innermost


class Color(enum.IntEnum):
    RED = 3


class Mode(enum.StrEnum):
    KEEP = "keep"


class OwnFloat(float):
    pass


class OwnBytes(bytes):
    pass


Point = namedtuple("Point", "x y")


@dataclass
class Record:
    a: int = 1


# What may be sent -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (True, True),
        (-(2**63), -(2**63)),
        (2**64 - 1, 2**64 - 1),
        (1.5, 1.5),
        ("ä", "ä"),
        (b"x", b"x"),
        (bytearray(b"x"), b"x"),
        (memoryview(b"abcd")[::2], b"ac"),
        ((1, (2, 3)), [1, [2, 3]]),
        ({7}, [7]),
        (frozenset({"a"}), ["a"]),
        ({"a": (1,), 2: None}, {"a": [1], 2: None}),
        (Color.RED, 3),
        (Mode.KEEP, "keep"),
        (OwnFloat(1.5), 1.5),
        (OwnBytes(b"x"), b"x"),
        (Point(1, 2), [1, 2]),
        (OrderedDict(a=1), {"a": 1}),
        ({Color.RED: Color.RED, Mode.KEEP: 1}, {3: 3, "keep": 1}),
        ([Color.RED] * 3, [3, 3, 3]),
        ([1, 2.5, None, "x", b"y", True], [1, 2.5, None, "x", b"y", True]),
        (range, EncodeError),
    ],
)
def test_plain(value: object, expected: object) -> None:
    """What can be sent becomes exactly a plain value; nothing keeps a subclass."""
    if expected is EncodeError:
        with pytest.raises(EncodeError):
            plain(value)
        return
    result = plain(value)
    assert result == expected
    assert repr(result) == repr(expected)
    assert type(result) is type(expected)
    for dialect in DIALECTS:
        codec = codec_named(dialect)
        assert codec.decode(codec.encode(result)) == expected


def test_plain_copies() -> None:
    """A later change of an argument does not reach what is sent."""
    inner = [1]
    view = bytearray(b"x")
    value = {"a": inner, "b": view}
    result = plain(value)
    inner.append(2)
    view[0] = 0
    assert result == {"a": [1], "b": b"x"}


ndarray = type("ndarray", (), {"__module__": "numpy"})
tensor = type("Tensor", (), {"__module__": "torch"})


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([2**64], "args[0] is an integer beyond 64 bits"),
        ([-(2**63) - 1], "args[0] is an integer beyond 64 bits"),
        ([1, 2, 10**30], "args[2] is an integer beyond 64 bits"),
        ([10**5000], "args[0] is an integer beyond 64 bits"),
        ([{10**5000: 1}], "args[0][a huge integer] is an integer beyond 64 bits"),
        ([{"a": [1, 2, 3, {4}, object()]}], "args[0]['a'][4] is an object, which cannot be sent"),
        ([{"a": {5: (1, {1, 1j})}}], "args[0]['a'][5][1]{an item} is a complex"),
        (["\ud800"], "args[0] is a string with a lone surrogate"),
        (["a"] * 50 + ["\ud83d", "\ude00"], "args[50] is a string with a lone surrogate"),
        ([{"\udfff": 1}], r"args[0]['\udfff'] is a string with a lone surrogate"),
        ([{None: 1}], "args[0] is a dict with a key of type NoneType; keys must be strings or"),
        ([{True: 1}], "args[0] is a dict with a key of type bool"),
        ([{1.5: 1}], "args[0] is a dict with a key of type float"),
        ([{b"a": 1}], "args[0] is a dict with a key of type bytes"),
        ([{(1,): 1}], "args[0] is a dict with a key of type tuple"),
        ([{"k" * 50: 1j}], f"args[0]['{'k' * 37}'...] is a complex"),
        ([ndarray()], "args[0] is a numpy.ndarray, which cannot be sent; convert it with"),
        ([tensor()], "args[0] is a torch.Tensor, which cannot be sent; convert it with .tol"),
        ([Record()], "args[0] is a tests.wire.test_codec.Record, which cannot be sent; convert it"),
        ([decimal.Decimal(1)], "args[0] is a decimal.Decimal, which cannot be sent; send None"),
        ([array("i", [1])], "args[0] is an array.array"),
        ([len], "args[0] is a builtin_function_or_method"),
        ([iter([])], "args[0] is a list_iterator"),
        ([range(3)], "args[0] is a range"),
    ],
)  # fmt: skip
def test_refused_to_send(value: object, text: str) -> None:
    """What cannot be sent is refused with its path, its type and what to do."""
    with pytest.raises(EncodeError) as caught:
        plain(value, "args")
    assert str(caught.value).startswith(text)
    assert len(str(caught.value)) < 250


def test_a_released_view_is_refused() -> None:
    """A view whose memory is gone cannot be sent."""
    view = memoryview(bytearray(b"x"))
    view.release()
    with pytest.raises(EncodeError, match=r"argument\[0\] is a memoryview that cannot be read"):
        plain([view])


@CODECS
def test_the_deepest_argument_comes_back(dialect: str) -> None:
    """An argument at the limit of depth is sent, understood and returned in a reply."""
    codec = codec_named(dialect)
    args = plain(nested(MAX_DEPTH), "args")
    request = codec.encode(UtilityRequest(0, 7, "echo", args).to_plain())
    echoed = UtilityRequest.from_plain(codec.decode(request)).args
    outputs = Outputs(utility=UtilityReply(7, None, {"again": echoed}))
    assert Outputs.from_plain(codec.decode(codec.encode(outputs.to_plain()))) == outputs


@pytest.mark.parametrize("kind", ["list", "empty", "dict", "set", "tuple"])
def test_one_level_too_deep_is_refused(kind: str) -> None:
    """One container more than the limit is refused, of whatever kind and content."""
    innermost: dict[str, object] = {
        "list": [1], "empty": [], "dict": {"a": 1}, "set": {1}, "tuple": (None,)
    }  # fmt: skip
    plain(nested(MAX_DEPTH - 1, innermost[kind]))
    with pytest.raises(EncodeError, match="nests deeper than 100 levels") as caught:
        plain(nested(MAX_DEPTH, innermost[kind]))
    assert "...88 levels..." in str(caught.value)


def test_endless_arguments_are_refused_at_once() -> None:
    """A list 20,000 deep, and containers that hold themselves, are refused quickly."""
    myself: list[Any] = [1]
    myself += [myself, myself]
    mapping: dict[str, Any] = {}
    mapping["a"] = [mapping]
    start = time.thread_time()
    for value in (nested(20_000), myself, mapping):
        with pytest.raises(EncodeError, match="nests deeper than 100 levels, or holds itself"):
            plain(value)
    assert time.thread_time() - start < scaled(1)  # without a limit: for ever


@given(plain_values)
def test_plain_values_stay(value: Any) -> None:
    """A plain value is what it becomes."""
    assert plain(value) == value


# Bytes ----------------------------------------------------------------------------------------


@CODECS
@given(value=plain_values)
@example(value=math.inf)
@example(value=[-math.inf, {"\xf9|": -0.0}])
@example(value=["\xf9~\x00", b"\xf9~\x00", 1.5])
def test_round_trip(dialect: str, value: Any) -> None:
    """Every plain value comes back equal, of the same types."""
    codec = codec_named(dialect)
    result = codec.decode(codec.encode(value))
    assert result == value
    assert repr(result) == repr(value)


@given(plain_values)
@example([0, 1, "load", [[b"weights", {"more": [b"weights", math.inf, -1]}], b""]])
def test_large_bytes_are_written_as_all_others(value: Any) -> None:
    """Here, not by cbor2, which would keep all other threads from running."""
    whole = CBOR.encode(value)
    with mock.patch.object(cbor, "_LARGE", 1):
        assert CBOR.encode(value) == whole


@pytest.mark.parametrize("size", [0, 23, 24, 255, 256, 65_535, 65_536])
def test_the_length_of_large_bytes(size: int) -> None:
    value = [bytes(size), [0] * min(size, 64), dict.fromkeys(range(min(size, 64)), 0)]
    with mock.patch.object(cbor, "_LARGE", 0):
        assert CBOR.encode(value) == cbor2.dumps(value)


@given(leaves)
def test_cbor_is_readable_by_anyone(value: Any) -> None:
    """What is written is standard CBOR."""
    result = cbor2.loads(CBOR.encode([value]))[0]
    assert result == value


@pytest.mark.parametrize(
    ("value", "cbor_hex", "msgpack_hex"),
    [
        (1.5, "fb3ff8000000000000", "cb3ff8000000000000"),
        (math.nan, "fb7ff8000000000000", "cb7ff8000000000000"),
        (math.inf, "fb7ff0000000000000", "cb7ff0000000000000"),
        (-math.inf, "fbfff0000000000000", "cbfff0000000000000"),
        ([b"\xf9\xfc\0", 1.5], "8243f9fc00fb3ff8000000000000", "92c403f9fc00cb3ff8000000000000"),
        (0, "00", "00"),
        (23, "17", "17"),
        (24, "1818", "18"),
        (255, "18ff", "ccff"),
        (65_536, "1a00010000", "ce00010000"),
        (2**64 - 1, "1bffffffffffffffff", "cfffffffffffffffff"),
        (-1, "20", "ff"),
        (-(2**63), "3b7fffffffffffffff", "d38000000000000000"),
        ({"a": 1, 2: b"x"}, "a261610102" + "4178", "82a1610102" + "c40178"),
        ("", "60", "a0"),
        (b"", "40", "c400"),
    ],
)  # fmt: skip
def test_exact_bytes(value: object, cbor_hex: str, msgpack_hex: str) -> None:
    """Integers are written in the shortest form, floats always in 64 bits."""
    assert CBOR.encode(value).hex() == cbor_hex
    assert MSGPACK.encode(value).hex() == msgpack_hex


@pytest.mark.parametrize(
    ("frame", "value"),
    [
        ("f93e00", 1.5),
        ("fa3fc00000", 1.5),
        ("1b0000000000000001", 1),
        ("9f0102ff", [1, 2]),
        ("bf616101ff", {"a": 1}),
        ("7f61616162ff", "ab"),
        ("5f41614162ff", b"ab"),
        ("a201022001", {1: 2, -1: 1}),
        ("bf0102616101ff", {1: 2, "a": 1}),
        ("a1018201820203", {1: [1, [2, 3]]}),
    ],
)
def test_cbor_of_other_encoders(frame: str, value: object) -> None:
    """Wider integers, narrower floats, indefinite lengths and integer keys are understood."""
    assert CBOR.decode(bytes.fromhex(frame)) == value


def test_msgpack_raw_views() -> None:
    """Extension type 3 is a byte string, of any header."""
    for header in ("c7 01 03", "c8 0001 03", "c9 00000001 03", "d4 03"):
        assert MSGPACK.decode(bytes.fromhex(f"91 {header} 61")) == [b"a"]


# Hostile bytes --------------------------------------------------------------------------------


def colliding_keys(count: int) -> list[tuple[int, int]]:
    """Pairs of integers whose tuples all have one hash."""
    mask, target = 2**64 - 1, 12345678901234567
    prime1, prime2, prime5 = 11400714785074694791, 14029467366897019727, 2870177450012600261
    inverse1, inverse2 = pow(prime1, -1, 2**64), pow(prime2, -1, 2**64)
    keys: list[tuple[int, int]] = []
    first = 0
    while len(keys) < count:
        first += 1
        lane = (prime5 + first * prime2) & mask
        lane = (((lane << 31) | (lane >> 33)) & mask) * prime1 & mask
        goal = target * inverse1 & mask
        goal = ((goal >> 31) | (goal << 33)) & mask
        second = (goal - lane) * inverse2 & mask
        if second < 2**61 - 1:
            keys.append((first, second))
    return keys


KEYS = colliding_keys(20_000)


def many_pairs(dialect: str, keys: list[Any]) -> bytes:
    codec = codec_named(dialect)
    pairs = b"".join(codec.encode(key) + b"\0" for key in keys)
    return (b"\xb9" if dialect == "cbor" else b"\xde") + len(keys).to_bytes(2, "big") + pairs


# The names are those under which these attacks are known here: H01 to H15.
HOSTILE: dict[str, tuple[str, bytes]] = {
    "H01 deep": ("cbor", b"\x81" * 100_000 + b"\0"),
    "H01 a level too deep": ("cbor", b"\x81" * (MAX_MESSAGE_DEPTH + 1) + b"\0"),
    "H01 deep maps": ("cbor", b"\xa1\0" * 100_000 + b"\0"),
    "H02 long array": ("cbor", bytes.fromhex("9bffffffffffffffff")),
    "H02 long map": ("cbor", bytes.fromhex("bbffffffffffffffff")),
    "H02 long bytes": ("cbor", bytes.fromhex("5bffffffffffffffff")),
    "H05 colliding integers": (
        "cbor",
        b"\xb99c\x40" + b"".join(cbor2.dumps(i * (2**61 - 1)) + b"\0" for i in range(40_000)),
    ),
    "H05 colliding arrays": ("cbor", many_pairs("cbor", [list(key) for key in KEYS])),
    "H05 colliding arrays behind an integer": (
        "cbor",
        many_pairs("cbor", [0, *(list(key) for key in KEYS)]),
    ),
    "H07 shared": ("cbor", bytes.fromhex("d81c81d81d00")),
    "H07 two shared": ("cbor", bytes.fromhex("82d81c81d81d00d81c81d81d01")),
    "H08 decimal": ("cbor", bytes.fromhex("c48201c25a0003d090") + b"\1" + bytes(250_000)),
    "H08 bigfloat": ("cbor", bytes.fromhex("c58201c25a0003d090") + b"\1" + bytes(250_000)),
    "H08 bignum": ("cbor", bytes.fromhex("c24101")),
    "H10 rational": ("cbor", bytes.fromhex("d81e820100")),
    "H11 broken regexp": ("cbor", bytes.fromhex("d8236128")),
    "H11 huge regexp": ("cbor", bytes.fromhex("d8237a00130e78") + b"a0|a1|b2" * 156_111),
    "H11 mail": ("cbor", bytes.fromhex("d82463613a20")),
    "H13 date of NaN": ("cbor", bytes.fromhex("c1f97e00")),
    "H13 far date": ("cbor", bytes.fromhex("c1fb7e37e43c8800759c")),
    "H13 date without a zone": (
        "cbor",
        bytes.fromhex("c073") + b"2013-03-21T20:04:00",
    ),
    "H14 not UTF-8": ("cbor", bytes.fromhex("62c328")),
    "H14 chunk of another type": ("cbor", bytes.fromhex("7f4161ff")),
    "H14 break": ("cbor", b"\xff"),
    "H14 key without a value": ("cbor", bytes.fromhex("bf6161ff")),
    "H14 reserved": ("cbor", b"\x1c"),
    "H14 empty": ("cbor", b""),
    "H15 undefined": ("cbor", b"\xf7"),
    "H15 undefined inside": ("cbor", bytes.fromhex("8181f7")),
    "H15 undefined in a map": ("cbor", bytes.fromhex("a16161f7")),
    "H15 simple value": ("cbor", b"\xe0"),
    "H15 simple value and tag": ("cbor", bytes.fromhex("82e0d9ffff01")),
    "H15 unknown tag": ("cbor", bytes.fromhex("d9ffff01")),
    "H15 largest tag": ("cbor", bytes.fromhex("dbffffffffffffffff00")),
    "H15 self-described": ("cbor", bytes.fromhex("d9d9f700")),
    "H15 set": ("cbor", bytes.fromhex("d90102810a")),
    "H15 many simple values": ("cbor", b"\x9a\x00\x01\x00\x00" + b"\xe0" * 65_536),
    "trailing byte": ("cbor", bytes.fromhex("820102") + b"\0"),
    "trailing message": ("cbor", bytes.fromhex("820102") * 2),
    "truncated": ("cbor", bytes.fromhex("8201")),
    "truncated text": ("cbor", bytes.fromhex("7810") + b"abc"),
    "duplicate key": ("cbor", bytes.fromhex("a2616101616102")),
    "duplicate integer key": ("cbor", bytes.fromhex("a201010102")),
    "boolean key": ("cbor", bytes.fromhex("a1f500")),
    "nil key": ("cbor", bytes.fromhex("a1f600")),
    "float key": ("cbor", bytes.fromhex("a1f93c0000")),
    "bytes key": ("cbor", bytes.fromhex("a1416100")),
    "array key": ("cbor", bytes.fromhex("a1810100")),
    "map key": ("cbor", bytes.fromhex("a1a000")),
    "array key behind an integer": ("cbor", bytes.fromhex("a20000810100")),
    "undefined with integer keys": ("cbor", bytes.fromhex("a100f7")),
    "bytes key with integer keys": ("cbor", bytes.fromhex("a20000416100")),
    "65-bit integer": ("cbor", bytes.fromhex("3b8000000000000000")),
    "65-bit integer inside": ("cbor", bytes.fromhex("a161618261613bffffffffffffffff")),
    "65-bit integer as a key": ("cbor", bytes.fromhex("a13bffffffffffffffff00")),
    "65-bit integer among integers": ("cbor", bytes.fromhex("82003bffffffffffffffff")),
    "msgpack deep": ("msgpack", b"\x91" * 100_000 + b"\0"),
    "msgpack a level too deep": ("msgpack", b"\x91" * (MAX_MESSAGE_DEPTH + 1) + b"\0"),
    "msgpack deep maps": ("msgpack", b"\x81\0" * 300 + b"\0"),
    "msgpack long array": ("msgpack", bytes.fromhex("ddffffffff")),
    "msgpack long map": ("msgpack", bytes.fromhex("dfffffffff")),
    "msgpack long bytes": ("msgpack", bytes.fromhex("c6ffffffff")),
    "msgpack colliding arrays": ("msgpack", many_pairs("msgpack", [list(key) for key in KEYS])),
    "msgpack colliding arrays, wrapped": (
        "msgpack",
        b"\x92\xc4\xff" + bytes(255) + many_pairs("msgpack", [0, *(list(key) for key in KEYS)]),
    ),
    "msgpack pickle": ("msgpack", bytes.fromhex("d40161")),
    "msgpack cloudpickle": ("msgpack", bytes.fromhex("91d40261")),
    "msgpack unknown extension": ("msgpack", bytes.fromhex("c7016361")),
    "msgpack date": ("msgpack", bytes.fromhex("91d6ff00000001")),
    "msgpack broken date": ("msgpack", bytes.fromhex("d4ff61")),
    "msgpack not UTF-8": ("msgpack", bytes.fromhex("a2c328")),
    "msgpack reserved": ("msgpack", b"\xc1"),
    "msgpack empty": ("msgpack", b""),
    "msgpack trailing byte": ("msgpack", bytes.fromhex("92010200")),
    "msgpack truncated": ("msgpack", bytes.fromhex("9201")),
    "msgpack boolean key": ("msgpack", bytes.fromhex("81c300")),
    "msgpack nil key": ("msgpack", bytes.fromhex("81c000")),
    "msgpack float key": ("msgpack", bytes.fromhex("81cb3ff000000000000000")),
    "msgpack bytes key": ("msgpack", bytes.fromhex("81c4016100")),
    "msgpack array key": ("msgpack", bytes.fromhex("819000")),
    "msgpack raw view as a key": ("msgpack", bytes.fromhex("81d4036100")),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bytes(name: str) -> None:
    """Hostile bytes are refused quickly, with a short text."""
    dialect, frame = HOSTILE[name]
    start = time.thread_time()
    with pytest.raises(ProtocolError) as caught:
        codec_named(dialect).decode(frame)
    assert time.thread_time() - start < scaled(0.5)
    assert str(caught.value).startswith(dialect)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize("content", [0, "", b"", [], [1, 1]], ids=repr)
def test_every_tag_is_refused(content: object) -> None:
    """No tag reaches its decoder, known to the library or not."""
    for tag in (*range(70_000), 2**32, 2**64 - 1):
        with pytest.raises(ProtocolError, match="a tag"):
            CBOR.decode(b"\xdb" + tag.to_bytes(8, "big") + cbor2.dumps(content))


@CODECS
def test_the_depth_limit_is_exact(dialect: str) -> None:
    """The deepest allowed message is decoded, one level more is not."""
    codec = codec_named(dialect)
    deepest = nested(MAX_MESSAGE_DEPTH)
    assert codec.decode(codec.encode(deepest)) == deepest
    broad = [nested(MAX_MESSAGE_DEPTH - 2, {"a": i}) for i in range(200)]
    assert codec.decode(codec.encode(broad)) == broad
    with pytest.raises(ProtocolError):
        codec.decode(codec.encode([[0], {"a": deepest}]))


@CODECS
def test_large_frames_with_good_keys(dialect: str) -> None:
    """Large maps with string and integer keys, and large arrays around them, are no attack."""
    chance = random.Random(1)
    value = [
        {i * 1_000_003: [i, {str(i): -i}, "t" * (i % 80), bytes(i % 300)] for i in range(3000)},
        {f"key {i}": None for i in range(70_000)},
        [chance.randrange(150_000) for _ in range(50_000)],
        [{1: True}, [[]], {}, None] * 1000,
        b"\xde" * 100_000,
    ]  # fmt: skip
    codec = codec_named(dialect)
    frame = codec.encode(value)
    assert (scalar_keys_cbor if dialect == "cbor" else scalar_keys_msgpack)(frame)
    assert codec.decode(frame) == value


@given(plain_values, st.data())
def test_keys_are_seen_right(value: Any, data: st.DataObject) -> None:
    """The look at the keys accepts every plain value and finds an array used as a key."""
    assert scalar_keys_cbor(CBOR.encode(value))
    assert scalar_keys_msgpack(MSGPACK.encode(value))
    bad = data.draw(st.sampled_from([(1, 2), ()]))
    count = data.draw(st.integers(0, 40))
    array_key = [value, *range(count), {1: value, bad: 0}]
    assert not scalar_keys_cbor(cbor2.dumps(array_key))
    assert not scalar_keys_msgpack(msgspec.msgpack.encode(array_key))


@given(st.binary(max_size=200))
@example(bytes.fromhex("a57b8000000000000000"))  # a text of 2^63 bytes
@example(bytes.fromhex("a57bffffffffffffffff"))
def test_the_look_at_keys_survives_anything(data: bytes) -> None:
    """The look at the keys ends with an answer, whatever the bytes are."""
    assert scalar_keys_cbor(data) in (True, False)
    assert scalar_keys_msgpack(data) in (True, False)


@pytest.mark.parametrize(
    "frame", ["bf0001", "9f", "bf00ff", "a1c00000", "5f4161", "9f00ff", "a17f6161ff00", "f8ff"]
)
def test_the_look_at_keys_knows_indefinite_lengths(frame: str) -> None:
    """Open ends, breaks, chunks and tags are followed; what is cut off has no good keys."""
    assert scalar_keys_cbor(bytes.fromhex(frame)) is (frame in ("9f00ff", "bf00ff", "f8ff"))


def test_the_look_at_keys_bounds_its_own_memory() -> None:
    """Very deep nesting is answered without following it."""
    assert not scalar_keys_cbor(b"\x81" * 10_000_000)
    assert not scalar_keys_msgpack(b"\x91" * 10_000_000)


@pytest.mark.parametrize("error", [RecursionError, ValueError, MemoryError, OverflowError])
def test_any_error_of_a_library_becomes_a_protocol_error(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The documented error of the library is not the only one that it raises."""

    def fail(*_: object, **__: object) -> None:
        raise error("boom")

    monkeypatch.setattr(cbor, "loads", fail)
    with pytest.raises(ProtocolError) as caught:
        CBOR.decode(b"\0")
    assert isinstance(caught.value.__cause__, error)


def test_an_interrupt_stays_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ctrl-C that the library wrapped in its own error comes out as itself."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cbor, "_TAGS", {1: interrupted})
    with pytest.raises(KeyboardInterrupt) as caught:
        CBOR.decode(b"\xc1\0")
    assert caught.value.__cause__ is None


# Mutated messages -----------------------------------------------------------------------------

FRAMES = {
    dialect: [
        codec_named(dialect).encode(message)
        for message in (
            Outputs(3, [], None, 1.5, UtilityReply(7, None, {"a": [1, b"x", None]})).to_plain(),
            Outputs(3, [["r1", [1, 2]]], {"n": 1.5}, 1.5, None, ("r1",), 1, 2, "v").to_plain(),
            Outputs(3, [], None, 1.5, UtilityReply(2**60, "failed")).to_plain(),
            [3, [], None, 1.5, [7, None, [None, {1: 2, -3: {"a": 1.5}}]]],
            UtilityRequest(0, 2**60, "add_lora", [["ad", 1, "/p", None, False]]).to_plain(),
            Registration({"max_model_len": 64, "data_parallel_size": 2}).to_plain(),
        )
    ]
    for dialect in DIALECTS
}  # fmt: skip


@CODECS
@given(data=st.data())
def test_mutated_frames(dialect: Dialect, data: st.DataObject) -> None:
    """Truncated, mutated and random frames are read or refused, with no other error."""
    frame = bytearray(data.draw(st.sampled_from(FRAMES[dialect]) | st.binary(max_size=64)))
    for _ in range(data.draw(st.integers(0, 4))):
        position = data.draw(st.integers(0, len(frame)))
        operation = data.draw(st.sampled_from(["cut", "set", "insert", "drop"]))
        if operation == "cut":
            del frame[position:]
        elif operation == "drop":
            del frame[position : position + 1]
        else:
            width = operation == "set"
            frame[position : position + width] = data.draw(st.binary(min_size=1, max_size=3))
    codec = codec_named(dialect)
    peek_reply(bytes(frame), dialect)
    dialect_of_map(bytes(frame))
    try:
        value = codec.decode(bytes(frame))
    except ProtocolError:
        return
    assert repr(plain(value)) == repr(value)
    for message in (Outputs, UtilityRequest, Registration):
        try:
            message.from_plain(value)
        except ProtocolError:
            pass


RESULTS = (None, True, False)


@given(
    index=st.integers(0, 65_535),
    call_id=st.integers(0, 2**64 - 1),
    timestamp=st.floats(),
    value=st.sampled_from(RESULTS),
    edits=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 255)), max_size=2),
)
def test_a_short_reply_is_what_the_whole_message_says(
    index: int, call_id: int, timestamp: float, value: Any, edits: list[tuple[int, int]]
) -> None:
    """Read by its shape or decoded: the same; and whatever has another shape is decoded."""
    whole = Outputs(index, utility=UtilityReply(call_id, None, value), timestamp=timestamp)
    frame = bytearray(CBOR.encode(whole.to_plain()))
    assert CBOR.short_reply(bytes(frame)) == (index, call_id, value)
    for position, byte in edits:
        frame[position % len(frame)] = byte
    short = CBOR.short_reply(bytes(frame))
    if short is not None:
        made = Outputs.decode(CBOR, bytes(frame))
        assert made.utility is not None
        assert short == (made.engine_index, made.utility.call_id, made.utility.value)
        assert made == Outputs(
            short[0], timestamp=made.timestamp, utility=UtilityReply(short[1], None, short[2])
        )
        for other in (frame[:-1], frame + b"\0", frame + b"\xf6"):
            assert CBOR.short_reply(bytes(other)) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"outputs": [["r", [1]]]},
        {"scheduler_stats": {}},
        {"finished_requests": ()},
        {"wave_complete": 0},
        {"start_wave": 0},
        {"weight_version": ""},
        {"utility": UtilityReply(7, "boom")},
        {"utility": UtilityReply(7, None, 0)},
        {"utility": UtilityReply(-7, None, True)},
        {"utility": None},
    ],
)
def test_what_says_more_is_no_short_reply(fields: dict[str, Any]) -> None:
    """Whatever else a message says must not be passed over."""
    message = Outputs(3, utility=UtilityReply(7, None, True), timestamp=1.5)
    assert CBOR.short_reply(CBOR.encode(message.to_plain())) is not None
    changed = message._replace(**fields)
    assert CBOR.short_reply(CBOR.encode(changed.to_plain())) is None


@CODECS
def test_every_truncation_is_refused(dialect: str) -> None:
    """No frame without its last bytes passes for a shorter message."""
    for frame in FRAMES[dialect]:
        for length in range(len(frame)):
            with pytest.raises(ProtocolError):
                codec_named(dialect).decode(frame[:length])


# Dialects -------------------------------------------------------------------------------------


def test_dialect_of_map() -> None:
    """The first byte of a map tells its dialect; no other byte does."""
    msgpack = {*range(0x80, 0x90), 0xDE, 0xDF}
    cbor = {*range(0xA0, 0xB8), 0xB8, 0xB9}
    for first in range(256):
        expected = "msgpack" if first in msgpack else "cbor" if first in cbor else None
        assert dialect_of_map(bytes([first, 1])) == expected
        assert dialect_of_map(memoryview(bytes([first]))) == expected


def test_dialect_of_nothing() -> None:
    """An empty frame has no dialect."""
    assert dialect_of_map(b"") is None


def test_codecs_by_name() -> None:
    """A dialect has one codec; another name is an error."""
    assert codec_named("cbor") is CBOR
    assert CBOR.name == "cbor"
    assert codec_named("msgpack") is MSGPACK
    assert MSGPACK.name == "msgpack"
    with pytest.raises(ValueError, match="codec must be 'cbor' or 'msgpack', not 'json'"):
        codec_named("json")


def test_without_msgspec(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the optional package the error says what to install, and is not remembered."""
    monkeypatch.setitem(sys.modules, "msgspec", None)
    monkeypatch.delitem(sys.modules, "engine_client.wire.msgpack")
    fresh = functools.cache(codec_named.__wrapped__)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'engine-client\[vllm\]'"):
        fresh("msgpack")
    assert fresh("cbor").decode(b"\0") == 0
    monkeypatch.undo()
    assert fresh("msgpack").decode(b"\0") == 0


def test_another_missing_module_is_not_blamed_on_msgspec(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the absence of msgspec itself is explained as such."""
    monkeypatch.setitem(sys.modules, "engine_client.wire.msgpack", None)
    with pytest.raises(ModuleNotFoundError, match=r"engine_client\.wire\.msgpack"):
        codec_named.__wrapped__("msgpack")


# What can still be read -----------------------------------------------------------------------


@CODECS
@pytest.mark.parametrize("engine", [0, 23, 24, 127, 128, 255, 256, 65_535])
def test_peek_at_replies(dialect: Dialect, engine: int) -> None:
    """Whom a reply is for can be read from its beginning, whatever follows."""
    codec = codec_named(dialect)
    for call_id in (0, 7, 24, 200, 2**16, 2**32, 2**53 - 1, 2**64 - 1, -1, -2, -99, -(2**40)):
        frame = codec.encode([engine, [], None, 1.5, [call_id, None, [None, "x" * 40]], None])
        rest = frame.index(b"xxx")
        for damaged in (
            frame,
            frame[:rest],
            frame[: rest - 3],
            frame[:rest] + b"\xff" * 40,
            frame + b"junk",
        ):
            assert peek_reply(damaged, dialect) == (engine, call_id)
            assert peek_reply(memoryview(damaged), dialect) == (engine, call_id)


def test_peek_at_other_shapes() -> None:
    """Other headers of the same message are understood, other messages are not."""
    assert peek_reply(bytes.fromhex("9f03 9fff f6 f93e00 9f07 f7"), "cbor") == (3, 7)
    assert peek_reply(bytes.fromhex("980903 80 f6 fa3fc00000 980307 c0"), "cbor") == (3, 7)
    assert peek_reply(bytes.fromhex("89f6 80 f6 01 8307 c0"), "cbor") == (None, 7)
    assert peek_reply(bytes.fromhex("dc000903 90c0 ca3fc00000 dc000307 d401"), "msgpack") == (3, 7)
    assert peek_reply(bytes.fromhex("dd0000000903 90c0 01 dd0000000307 d401"), "msgpack") == (3, 7)
    assert peek_reply(bytes.fromhex("99c0 90c0 01 9307 d401"), "msgpack") == (None, 7)
    for frame in (*FRAMES["cbor"][1::3], b"", b"\x89", b"ENGINE_CORE_DEAD"):
        assert peek_reply(frame, "cbor") is None
    for frame in (*FRAMES["msgpack"][1::3], b"", b"\x99", b"ENGINE_CORE_DEAD"):
        assert peek_reply(frame, "msgpack") is None
