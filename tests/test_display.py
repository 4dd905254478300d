"""What a person sees at a prompt and in a notebook: reprs of one line, escaped tables."""

from __future__ import annotations

import html.parser
import os
import pickle
import time
from typing import Any

import pytest

from engine_client import (
    ClientClosedError,
    ConsensusError,
    EngineClientError,
    EngineInfo,
    HandshakeTimeout,
    RemoteError,
    StreamAborted,
    UtilityCallError,
    launch,
)
from engine_client import errors as errors_module
from engine_client.engines import EngineInfos
from engine_client.errors import CallTimeout, EngineDeadError
from engine_client.outcome import Failed, Ok, Outcomes

EVIL = "</td></table><script>alert(1)</script><img src=x onerror=alert(2)>&amp;\"'"
EVERY = [getattr(errors_module, name) for name in errors_module.__all__]

OUTCOMES = Outcomes(
    "add_lora",
    {0: Ok(True, 0.012), 1: Failed(RemoteError("LoRA rank 64", engine=1), 0.02)},
)
UNDONE = Outcomes("remove_lora", {0: Ok(True, 0.001), 1: Ok(False, 0.002)})


class Page(html.parser.HTMLParser):
    """What is in a piece of HTML: its text by cells, and its elements, which must be balanced."""

    VOID = frozenset({"img", "br"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.cells: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        assert {name for name, _ in attrs} <= {"style"}
        if tag not in self.VOID:
            self._open.append(tag)
        if tag in ("td", "th", "caption", "summary"):
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.cells[-1] += data


TABLE = {"table", "caption", "thead", "tbody", "tr", "th", "td", "details", "summary"}


def page(thing: Any) -> Page:
    """Return what a notebook shows of a thing; nothing in it but tables."""
    found = Page(thing._repr_html_())
    assert "table" in found.tags
    assert found.tags <= TABLE
    return found


def test_outcomes_in_a_notebook() -> None:
    """A table with a row per engine, and the counts above it; failures stand out."""
    shown = page(OUTCOMES)
    assert shown.cells == [
        "add_lora: 1 ok, 1 failed",
        *("engine", "outcome", "ran", "value or error", "after"),
        *("0", "ok", "yes", "True", "12.0 ms"),
        *("1", "RemoteError", "maybe", "LoRA rank 64", "20.0 ms"),
    ]
    assert OUTCOMES._repr_html_().count("font-weight:bold") == 2


def test_texts_are_long_enough_to_understand_and_wrap() -> None:
    """A cell holds a usual error text whole, and of more the beginning."""
    text = "word " * 50
    assert text.strip() in page(Outcomes("m", {0: Failed(CallTimeout(text), 1.0)})).cells
    long = page(Outcomes("m", {0: Ok("x" * 1000, 1.0)})).cells[-2]
    assert 200 < len(long) <= 300
    assert long.startswith("xxx")


def test_a_failed_call_at_a_prompt_and_in_a_notebook() -> None:
    """The repr is one line with the counts; a notebook shows all outcomes, and the undo's."""
    error = OUTCOMES.error()
    assert repr(error) == "<UtilityCallError add_lora: 1 ok, 1 failed>"
    assert page(error).cells == page(OUTCOMES).cells
    error.compensation = UNDONE
    assert str(error).split("\n") == [
        "add_lora failed on 1 of 2 engines",
        "  engine 1: RemoteError: LoRA rank 64 [may have run]",
        "  succeeded on engine 0",
        "undo remove_lora succeeded on engines 0, 1",
    ]
    assert repr(error) == (
        "<UtilityCallError add_lora: 1 ok, 1 failed; undo remove_lora: 2 ok, 0 failed>"
    )
    assert page(error).cells[len(page(OUTCOMES).cells)] == "undo remove_lora: 2 ok, 0 failed"


def test_engines_that_disagree_are_shown_with_their_answers() -> None:
    """The text and every engine's answer."""
    with pytest.raises(ConsensusError) as info:
        Outcomes("is_sleeping", {0: Ok(True, 0.1), 1: Ok(False, 0.1)}).agreed()
    cells = page(info.value).cells
    assert "is_sleeping: the engines disagree: engine 0: True; engine 1: False" in cells
    assert "is_sleeping: 2 ok, 0 failed" in cells


@pytest.mark.parametrize(
    ("error", "shown", "cells"),
    [
        (
            EngineDeadError("it died", engine=3),
            "EngineDeadError('it died', engine=3, may_have_run=True)",
            ["error", "engine", "may have run", "text", "EngineDeadError", "3", "True", "it died"],
        ),
        (
            HandshakeTimeout("engine 1 is missing", missing=[1], stage="HELLO"),
            "HandshakeTimeout('engine 1 is missing', missing=(1,), stage='HELLO')",
            [
                *("error", "missing", "stage", "text"),
                *("HandshakeTimeout", "(1,)", "HELLO", "engine 1 is missing"),
            ],
        ),
        (
            StreamAborted("stopped", request_id="a", engine=0),
            "StreamAborted('stopped', request_id='a', engine=0)",
            ["error", "request id", "engine", "text", "StreamAborted", "a", "0", "stopped"],
        ),
        (
            ClientClosedError("closed"),
            "ClientClosedError('closed')",
            ["error", "text", "ClientClosedError", "closed"],
        ),
    ],
)
def test_an_error_as_a_value(error: EngineClientError, shown: str, cells: list[str]) -> None:
    """Its class, its text and what a caller decides by, in one line and as a table."""
    assert repr(error) == shown
    assert page(error).cells == cells


@pytest.mark.parametrize("kind", EVERY)
def test_every_error_can_be_shown(kind: type[EngineClientError]) -> None:
    """Made with its text alone, or with nothing, an error has a repr of one line and a table."""
    for error in (kind("two\nlines"), kind()):
        assert repr(error).startswith(f"{kind.__name__}(")
        assert "\n" not in repr(error)
        page(error)


def test_a_long_failure_has_a_short_repr() -> None:
    """An engine's megabytes do not fill a screen."""
    error = RemoteError("x" * 5_000_000, engine=1)
    assert len(repr(error)) < 600
    assert len(error._repr_html_()) < 1500


@pytest.mark.parametrize("kind", EVERY)
def test_what_an_engine_sends_never_becomes_markup(kind: type[EngineClientError]) -> None:
    """Method names, values, texts and keys are escaped wherever they are shown."""
    evil = Outcomes(EVIL, {0: Ok({EVIL: [EVIL]}, 0.1), 1: Failed(RemoteError(EVIL), 0.1)})
    things: list[Any] = [evil, kind(EVIL)]
    for name, value in (("outcomes", evil), ("compensation", evil), ("request_id", EVIL)):
        if hasattr(things[1], name):
            setattr(things[1], name, value)
    info = EngineInfo(0, b"", "cbor", False, {EVIL: EVIL}, cause_of_death=EVIL)
    for thing in (*things, info, EngineInfos([info])):
        assert any("<script>alert(1)" in cell for cell in page(thing).cells)
        assert "alert(2)>&amp;" not in thing._repr_html_()


def test_an_engine_at_a_prompt_and_in_a_notebook() -> None:
    """Its index and state, what it works on, and in a notebook what it registered with."""
    info = EngineInfo(3, b"\x03\x00", "cbor", True, {"max_model_len": 2048}, in_flight=2)
    assert repr(info) == "<EngineInfo 3: alive, 2 in flight>"
    assert page(info).cells == [
        *("engine", "state", "codec", "in flight", "3", "alive", "cbor", "2"),
        "what it said of itself when it registered",
        *("key", "value", "max_model_len", "2048"),
    ]
    dead = EngineInfo(0, b"\x00\x00", None, False, cause_of_death="its process exited with code 1")
    assert repr(dead) == "<EngineInfo 0: dead: its process exited with code 1>"
    assert repr(EngineInfo(0, b"", None, False)) == "<EngineInfo 0: dead: not yet registered>"


def test_a_tuple_of_engines_is_a_tuple_and_a_table() -> None:
    """It compares, pickles and unpacks as a tuple does."""
    one, two = (EngineInfo(index, b"", "cbor", True) for index in range(2))
    both = EngineInfos([one, two])
    assert both == (one, two)
    assert repr(both) == "(<EngineInfo 0: alive>, <EngineInfo 1: alive>)"
    assert pickle.loads(pickle.dumps(both)) == both
    assert page(both).cells[4:] == ["0", "alive", "cbor", "0", "1", "alive", "cbor", "0"]


def test_a_client_in_a_notebook() -> None:
    """A table of its engines with their states; after the end it says so."""
    with launch(2, timeout=30) as client:
        shown = page(client)
        assert shown.cells[0] == "EngineClient open: 2 of 2 engines alive"
        assert shown.cells[5:9] == ["0", "alive", "cbor", "0"]
        assert page(client.engines).cells == shown.cells[1:]
        client.call_utility("mock_fault", {"method": "echo", "do": "die"}, engines=[1])
        with pytest.raises(UtilityCallError):
            client.call_utility("echo", 1)
        assert page(client).cells[0] == "EngineClient open: 1 of 2 engines alive"
        assert page(client).cells[-3].startswith("dead: ")
        child = os.fork()
        if child == 0:
            # A notebook shows a client in a fork's child too, where its locks must not be taken.
            os._exit(0 if "EngineClient" in client._repr_html_() else 1)
        assert os.waitpid(child, 0)[1] == 0
    assert page(client).cells == ["client", "EngineClient closed"]


def test_a_large_group_is_shown_at_once() -> None:
    """A table of a thousand engines takes less than a second."""
    many = Outcomes("echo", {k: Ok(list(range(90)), 0.1) for k in range(1000)})
    began = time.process_time()
    many._repr_html_()
    assert time.process_time() - began < 1.0
