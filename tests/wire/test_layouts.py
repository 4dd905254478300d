"""Records of older releases of vLLM, laid out and read."""

from __future__ import annotations

import pytest

from engine_client import EngineRequest, LoraRequest
from engine_client.wire.layouts import LATEST, layout_of

LORA = ["name", 7, "/path", "base", True, False]
OUTPUT = ["id", [5], "lp", "plp", "pool", 0, 9, ["events"], {"kv": 1}]
REQUEST = EngineRequest(
    "r", [1, 2], lora_request=LoraRequest("name", 7, "/path"), prompt_is_token_ids=[True, False]
)


@pytest.mark.parametrize(
    ("version", "since", "known"),
    [
        ("0.32.0", "0.32", True),
        ("0.32.1+cpu", "0.32", True),
        ("0.32.0rc1.dev3+gabc", "0.32", True),
        ("v0.31.0", "0.26", True),
        ("0.30.0", "0.26", True),
        ("0.25.1", "0.21", True),
        ("0.20.2", "0.20", True),
        ("0.18.0", "0.18", True),
        ("", "0.32", True),
        ("0.33.0", "0.32", False),
        ("1.0", "0.32", False),
        ("0.9.2", "0.18", False),
        ("dev", "0.32", False),
        ("0.320.0", "0.32", False),
    ],
)
def test_version(version: str, since: str, known: bool) -> None:
    """A version has the layout of the last release that moved something, or the nearest."""
    layout, found = layout_of(version)
    assert (layout.name, found) == (since, known)


@pytest.mark.parametrize("version", ["0.31.0", "0.18.0"])
def test_lora(version: str) -> None:
    """Before 0.32 an adapter has one more position in its middle."""
    layout, _ = layout_of(version)
    assert layout.lora(LORA) == ["name", 7, "/path", "base", None, True, False]
    assert layout.arguments("add_lora", [LORA]) == [layout.lora(LORA)]
    # Whoever writes the old layout himself is taken by his word.
    assert layout.arguments("add_lora", [layout.lora(LORA)]) == [layout.lora(LORA)]
    assert layout.arguments("echo", [LORA]) == [LORA]
    assert layout.arguments("add_lora", []) == []
    assert LATEST.lora(LORA) == LORA
    arguments = [LORA]
    assert LATEST.arguments("add_lora", arguments) is arguments


@pytest.mark.parametrize(
    ("version", "client_index"), [("0.32.0", 11), ("0.31.0", 11), ("0.21.0", 11), ("0.20.2", 10)]
)
def test_request(version: str, client_index: int) -> None:
    """Before 0.21 a request has one position less, and all behind it move up."""
    record = REQUEST.to_plain("r-1", 3, [], wave=4)
    laid = layout_of(version)[0].request(record)
    assert laid[client_index : client_index + 2] == [3, 4]
    assert laid[:6] == record[:6]
    assert laid[client_index + 5] == "r"
    assert len(laid[6]) == (6 if version == "0.32.0" else 7)
    assert len(record[6]) == 6
    assert ([True, False] in laid) == (client_index == 11)


@pytest.mark.parametrize(
    ("version", "rest", "read"),
    [
        ("0.31.0", [{"ec": 1}, {"t": "h"}, {"p": 1}], [{"ec": 1}, {"t": "h"}, {"p": 1}]),
        ("0.25.0", [{"t": "h"}, {"p": 1}, "x", 2], [None, {"t": "h"}, {"p": 1}, "x", 2]),
        ("0.20.0", [{"t": "h"}, {"p": 1}], [None, {"t": "h"}, {"p": 1}]),
        ("0.19.1", [{"t": "h"}, 3, 4, "x", 2], [None, {"t": "h"}, None, "x", 2]),
        ("0.19.1", [], []),
    ],
)
def test_output(version: str, rest: list[object], read: list[object]) -> None:
    """What an output of an older release holds is read from where that release has it."""
    layout, _ = layout_of(version)
    laid = layout.output([*OUTPUT, *rest])
    assert laid[: 9 + len(read)] == [*OUTPUT, *read]
    assert {None}.issuperset(laid[9 + len(read) :])


@pytest.mark.parametrize("record", [None, 5, "text", {}, [], ["id"], ["id", [1], None]])
def test_malformed_output(record: object) -> None:
    """What is no output, or a short one, stays as it is."""
    assert layout_of("0.20.0")[0].output(record) == record
