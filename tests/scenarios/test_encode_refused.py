"""Arguments: what arrives as what, and what is refused before any engine hears of the call."""

from __future__ import annotations

import array
import datetime
import decimal
import enum
import math
import pathlib
import signal
from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from engine_client import EncodeError, UtilityCall
from tests.helpers import run_in_thread, scaled, wait_until
from tests.scenarios.rig import Rig, rig


@pytest.fixture(scope="module")
def two() -> Iterator[Rig]:
    """One engine of each dialect; no test disturbs them."""
    with rig(("cbor", "msgpack")) as made:
        yield made
        made.check()
        made.check_messages()
        for engine in made.engines:
            assert not [entry for entry in engine.log if "refused" in str(entry)[:500]]


class Number(enum.IntEnum):
    """An enumeration of integers."""

    SEVEN = 7


class Color(enum.Enum):
    """An enumeration of something else."""

    RED = "red"


@dataclass
class Record:
    """A user's own class."""

    field: int = 1


class Awkward:
    """A user's own class that cannot even be printed."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


class Loud(str):
    """A text of a class of its own."""

    __slots__ = ()


Point = namedtuple("Point", "x y")


def nested(depth: int, kind: type = list) -> Any:
    """Return lists, or maps, of this depth."""
    value: Any = 1
    for _ in range(depth):
        value = [value] if kind is list else {"k": value}
    return value


def circle() -> list[Any]:
    """Return a list that contains itself."""
    value: list[Any] = []
    value.append(value)
    return value


REFUSED: dict[str, Any] = {
    "object": object(),
    "awkward object": Awkward(),
    "class": int,
    "function": len,
    "70-bit integer": 2**70,
    "2**64": 2**64,
    "-2**63 - 1": -(2**63) - 1,
    "list 20,000 deep": nested(20_000),
    "map 20,000 deep": nested(20_000, dict),
    "circle": circle(),
    "complex": 1j,
    "decimal": decimal.Decimal(1),
    "enumeration": Color.RED,
    "dataclass": Record(),
    "path": pathlib.Path("x"),
    "naive date": datetime.datetime(2020, 1, 1),
    "duration": datetime.timedelta(1),
    "generator": iter([1]),
    "lone surrogate": "\ud800",
    "surrogate in a key": {"\udfff": 1},
    "key of floats": {1.5: 1},
    "key of tuples": {(1, 2): 1},
    "key of None": {None: 1},
    "key of bool": {True: 1},
    "key beyond 64 bits": {2**70: 1},
    "exception": ValueError("x"),
    "ellipsis": ...,
}


@pytest.mark.parametrize("value", REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_sent_reaches_no_engine(two: Rig, value: Any) -> None:
    """The error names the path and is a TypeError; no engine hears of the call, nothing waits."""
    client = two.client
    sent = client.stats.sent
    inside = [0, {"k": value}]
    for argument, path in ((inside, r"args\[1\]\[1\]\['k'\]"), (value, r"args\[1\]")):
        with pytest.raises(EncodeError, match=path) as info:
            client.call_utility("refused", 1, argument)
        assert isinstance(info.value, TypeError)
        assert len(str(info.value)) < 1000
        assert "\n" not in str(info.value)
    for refusing in (
        lambda: client.settle_utility("refused", inside),
        lambda: client.call_utility_consensus("refused", inside),
        lambda: client.collective_rpc("refused", [inside]),
        lambda: client.collective_rpc("refused", kwargs={"value": inside}),
        lambda: client.call_utility("refused", compensate=UtilityCall("undo", (inside,))),
    ):
        with pytest.raises(EncodeError):
            refusing()
    assert client.pending_utility_calls == 0
    assert client.stats.sent == sent


@pytest.mark.parametrize(
    ("method", "error"),
    [("\ud800", EncodeError), ("", ValueError), (b"echo", TypeError), (None, TypeError)],
)
def test_a_method_that_is_no_name_reaches_no_engine(
    two: Rig, method: Any, error: type[Exception]
) -> None:
    """What cannot be a method's name is refused before anything is sent."""
    sent = two.client.stats.sent
    with pytest.raises(error, match="method"):
        two.client.call_utility(method)
    assert two.client.stats.sent == sent


ACCEPTED: dict[str, tuple[Any, Any]] = {
    "nothing": (None, None),
    "booleans": ([True, False], [True, False]),
    "integers": ([0, -1, 2**63 - 1, -(2**63), 2**64 - 1], [0, -1, 2**63 - 1, -(2**63), 2**64 - 1]),
    "floats": ([0.0, -1.5, 1e300, math.inf, -math.inf], [0.0, -1.5, 1e300, math.inf, -math.inf]),
    "text": ("ä\x00\U0001f600", "ä\x00\U0001f600"),
    "text of a class": (Loud("x"), "x"),
    "bytes": (b"\x00\xff", b"\x00\xff"),
    "bytearray": (bytearray(b"ab"), b"ab"),
    "memoryview": (memoryview(b"abcd")[::2], b"ac"),
    "array's memory": (memoryview(array.array("B", [1, 2])), b"\x01\x02"),
    "tuple": ((1, (2,)), [1, [2]]),
    "named tuple": (Point(1, 2), [1, 2]),
    "set": ({5}, [5]),
    "frozenset": (frozenset("a"), ["a"]),
    "range": ([*range(3)], [0, 1, 2]),
    "integer enumeration": ([Number.SEVEN, {Number.SEVEN: 1}], [7, {7: 1}]),
    "map": ({"a": 1, 2: "b", -3: None}, {"a": 1, 2: "b", -3: None}),
    "ordered map": (OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
    "depth": (nested(90), nested(90)),
    "empty": ([[], {}, "", b""], [[], {}, "", b""]),
}


@pytest.mark.parametrize(("sent", "arrives"), ACCEPTED.values(), ids=ACCEPTED.keys())
def test_what_is_sent_arrives_alike_in_both_dialects(two: Rig, sent: Any, arrives: Any) -> None:
    """Each value comes back as documented, of plain types, from an engine of either dialect."""
    for answer in two.client.call_utility("echo", sent, timeout=scaled(10)):
        assert answer == arrives
        assert repr(answer) == repr(arrives)  # True is not 1, bytes are not a bytearray


def test_not_a_number_arrives_as_such(two: Rig) -> None:
    """NaN survives both dialects."""
    assert all(math.isnan(x) for x in two.client.call_utility("echo", math.nan))


@pytest.mark.parametrize("size", [65_535, 65_536, 3_000_000])
def test_large_arguments_arrive_whole(two: Rig, size: int) -> None:
    """A large argument is sent without a copy per engine, and arrives as it was."""
    value = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    assert two.client.call_utility("echo", value, timeout=scaled(30)) == [value, value]


def test_an_argument_may_be_changed_once_the_call_is_made(two: Rig) -> None:
    """What was accepted is sent, whatever becomes of the caller's buffer afterwards."""
    original = bytes(range(256)) * 4_000
    buffer = bytearray(original)
    # At once: before the dispatcher can have looked at it.
    for number in range(20):
        words = [number, "original"]
        two.client.settle_utility("echo", words, timeout=0)
        words[1] = "changed"
    two.control("mock_log")
    for engine in (0, 1):
        assert two.received(engine, "echo")[-20:] == [[[n, "original"]] for n in range(20)]
    # Later: while it lies in a queue.
    stopped, calls = two.engines[1], two.client.stats.calls
    stopped.signal(signal.SIGSTOP)
    try:
        call = run_in_thread(two.client.call_utility, "echo", buffer)
        wait_until(lambda: two.client.stats.calls > calls, what="the call to be sent")
        buffer[:] = b"x" * len(buffer)
    finally:
        stopped.signal(signal.SIGCONT)
    assert call.result() == [original, original]
