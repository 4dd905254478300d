"""The error tree: its shape, what each error carries, and that all of it survives a pickle."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
import traceback
from typing import Any

import pytest

from engine_client import errors
from engine_client.errors import (
    MESSAGE_LIMIT,
    CallTimeout,
    EngineClientError,
    EngineDeadError,
    EngineError,
    NotSentError,
    RemoteError,
    UtilityCallError,
    UtilityTimeoutError,
)
from engine_client.outcome import Failed, Ok, Outcomes

EVERY = [getattr(errors, name) for name in errors.__all__]

TREE = """
EngineClientError Exception
HandshakeError EngineClientError
HandshakeTimeout HandshakeError TimeoutError
ClientClosedError EngineClientError
ClientBrokenError EngineClientError
ProtocolError EngineClientError
EncodeError EngineClientError TypeError
RequestRefusedError EngineClientError ValueError
EngineError EngineClientError
RemoteError EngineError
RefusedError EngineError
EngineDeadError EngineError
CallTimeout EngineError TimeoutError
ReplyError EngineError
AbandonedError EngineError
NotSentError EngineError
UtilityCallError EngineClientError
UtilityTimeoutError UtilityCallError TimeoutError
ConsensusError EngineClientError
DuplicateRequestError EngineClientError
StreamError EngineClientError
StreamAborted StreamError
StreamOverflow StreamError
StreamTimeout StreamError TimeoutError
"""

OUTCOMES = Outcomes(
    "sleep",
    {
        0: Ok(None, 0.25),
        1: Failed(CallTimeout("engine 1 did not reply", engine=1), 1.0),
        2: Failed(RemoteError("boom", engine=2, method="sleep"), 0.5),
    },
)

VALUES: dict[str, Any] = {
    "missing": (1, 2),
    "stage": "HELLO",
    "outcomes": OUTCOMES,
    "compensation": Outcomes("wake_up", {0: Ok(True, 0.1)}),
    "engine_index": 3,
    "call_id": 12,
    "engine": 7,
    "method": "sleep",
    "request_id": "r-1",
}
"""A value for every attribute that an error can have; none is a default."""


def filled(kind: type[EngineClientError]) -> tuple[EngineClientError, dict[str, Any]]:
    """Return an error with every attribute set to something that is not its default."""
    parameters = inspect.signature(kind).parameters.values()
    keywords = {}
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY:
            default = parameter.default
            keywords[parameter.name] = (
                not default if isinstance(default, bool) else VALUES[parameter.name]
            )
    return kind("what happened", **keywords), keywords


def public_bases(kind: type) -> list[str]:
    """Return the names of the nearest bases that are public."""
    names = []
    for base in kind.__bases__:
        names += public_bases(base) if base.__name__.startswith("_") else [base.__name__]
    return names


def test_the_tree_has_the_documented_shape() -> None:
    """Every error has the bases that callers catch it by."""
    lines = [line.split() for line in TREE.split("\n") if line]
    assert {name: bases for name, *bases in lines} == {
        kind.__name__: public_bases(kind) for kind in EVERY
    }


def test_the_docstring_draws_every_error() -> None:
    """The tree at the top of the module names each class, under the class that it derives from."""
    drawn = re.findall(r"^([│ ]*)(?:[├└]── )?(\w+)", errors.__doc__ or "", re.MULTILINE)
    parents: dict[int, str] = {}
    found = {}
    for indent, name in drawn:
        if name not in errors.__all__:
            continue
        depth = 0 if name == "EngineClientError" else len(indent) // 4 + 1
        parents[depth] = name
        found[name] = parents.get(depth - 1)
    assert set(found) == set(errors.__all__)
    for name, parent in found.items():
        if parent is not None:
            assert issubclass(getattr(errors, name), getattr(errors, parent))


PICKLES = [
    lambda error, protocol=protocol: pickle.loads(pickle.dumps(error, protocol))
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1)
]


@pytest.mark.parametrize("kind", EVERY)
def test_every_error_pickles_and_copies_with_all_that_it_carries(
    kind: type[EngineClientError],
) -> None:
    """A copy, or what crosses a process boundary, keeps its class, text, attributes and notes."""
    error, keywords = filled(kind)
    error.add_note("a note")
    for duplicate in (copy.copy, copy.deepcopy, *PICKLES):
        got = duplicate(error)
        assert got is not error
        assert type(got) is kind
        assert str(got) == str(error)
        assert got.args == error.args
        assert got.__notes__ == ["a note"]
        for name, value in keywords.items():
            assert repr(getattr(got, name)) == repr(value), name


@pytest.mark.parametrize("kind", EVERY)
def test_every_error_can_be_made_of_its_text_and_prints_it(kind: type[EngineClientError]) -> None:
    """An error prints as its class and text, in one line, also where it is an OSError."""
    error = kind("what happened")
    assert str(error) == "what happened"
    assert traceback.format_exception_only(error) == [
        f"engine_client.errors.{kind.__name__}: what happened\n"
    ]
    for name, parameter in inspect.signature(kind).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            assert getattr(error, name) == parameter.default
    kind()


@pytest.mark.parametrize("kind", [k for k in EVERY if issubclass(k, EngineError)])
def test_whether_it_may_have_run(kind: type[EngineError]) -> None:
    """Of all failures only what was never sent excludes by itself that the engine ran the call."""
    assert kind("x").may_have_run == (kind is not NotSentError)
    assert not EngineDeadError("x", may_have_run=False).may_have_run


def test_a_long_remote_text_is_kept_whole_and_shown_short() -> None:
    """A failure of megabytes prints as one short line; the whole text is an attribute."""
    text = "Traceback:\n" + "  line\n" * 700_000
    error = RemoteError(text, engine=1, method="sleep")
    assert error.message == text
    shown = str(error)
    assert "\n" not in shown
    assert len(shown) < MESSAGE_LIMIT + 100
    assert "4900011 characters in .message" in shown


def test_a_remote_failure_without_a_text_says_so() -> None:
    """An engine that gives no reason leaves no empty error."""
    for text in ("", "  \n "):
        assert str(RemoteError(text)) == "the engine reported a failure without a text"


def test_a_failed_call_prints_one_line_per_engine_and_its_undo() -> None:
    """The text names each engine that failed and, when there was an undo, how that went."""
    error = OUTCOMES.error()
    assert type(error) is UtilityTimeoutError
    assert str(error).split("\n") == [
        "sleep failed on 2 of 3 engines",
        "  engine 1: CallTimeout: engine 1 did not reply [may have run]",
        "  engine 2: RemoteError: boom [may have run]",
        "  succeeded on engine 0",
    ]
    assert error._repr_html_().count("<table>") == 1
    error.compensation = Outcomes("wake_up", {0: Ok(True, 0.1), 1: Ok(True, 0.1)})
    assert str(error).split("\n")[-1] == "undo wake_up succeeded on engines 0, 1"
    assert error._repr_html_().count("<table>") == 2


def test_timeouts_are_caught_as_the_builtin_too() -> None:
    """`except TimeoutError` catches the time-out of a call and of each engine."""
    for kind in (UtilityTimeoutError, CallTimeout):
        with pytest.raises(TimeoutError):
            raise kind("late")
    assert not issubclass(UtilityCallError, TimeoutError)
