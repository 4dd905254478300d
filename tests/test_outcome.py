"""Outcomes as values: what each engine did, and how a caller reads it."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import time
from collections.abc import Mapping
from typing import Any

import pytest

from engine_client.errors import (
    AbandonedError,
    CallTimeout,
    ConsensusError,
    EngineDeadError,
    EngineError,
    NotSentError,
    RemoteError,
    ReplyError,
    UtilityCallError,
    UtilityTimeoutError,
)
from engine_client.outcome import Failed, Ok, Outcome, Outcomes, UtilityCall


def outcomes(method: str = "sleep", /, **by_engine: Any) -> Outcomes:
    """Return outcomes of engines e0, e1 ...: an error is a failure, all else a result."""
    found: dict[int, Outcome] = {}
    for name, value in by_engine.items():
        index = int(name[1:])
        found[index] = Failed(value, 0.5) if isinstance(value, EngineError) else Ok(value, 0.25)
    return Outcomes(method, found)


def test_outcomes_are_a_mapping_in_target_order() -> None:
    """Engine index to outcome, in the order of the targets, with the results likewise."""
    got = outcomes(e2="b", e0="a", e1="c")
    assert isinstance(got, Mapping)
    assert list(got) == [2, 0, 1]
    assert got[0] == Ok("a", 0.25)
    assert len(got) == 3
    assert 3 not in got
    with pytest.raises(KeyError):
        got[3]
    assert got.all_ok
    assert got.unwrap() == got.values_in_order() == ["b", "a", "c"]
    assert got.succeeded == got.may_have_run == (2, 0, 1)
    assert got.failures == {}
    assert got == outcomes(e2="b", e0="a", e1="c")


def test_who_may_have_run_it() -> None:
    """An engine may have run a call unless its failure excludes that; unsettled ones may still."""
    got = outcomes(
        e0=None,
        e1=RemoteError("boom", engine=1),
        e2=CallTimeout("late", engine=2),
        e3=EngineDeadError("gone", engine=3),
        e4=EngineDeadError("known dead", engine=4, may_have_run=False),
        e5=NotSentError("not sent", engine=5),
        e6=AbandonedError("left", engine=6),
        e7=ReplyError("garbage", engine=7),
    )
    assert not got.all_ok
    assert got.succeeded == (0,)
    assert tuple(got.failures) == (1, 2, 3, 4, 5, 6, 7)
    assert got.may_have_run == (0, 1, 2, 3, 6, 7)
    assert got.unsettled == (2, 6)
    assert got.values_in_order() == [None]


def test_unwrap_raises_one_error_with_every_outcome() -> None:
    """A failure raises, with all outcomes; a time-out among them makes it a time-out."""
    got = outcomes(e0=7, e1=RemoteError("boom", engine=1))
    with pytest.raises(UtilityCallError, match="sleep failed on 1 of 2 engines") as info:
        got.unwrap()
    assert type(info.value) is UtilityCallError
    assert info.value.outcomes is got
    assert info.value.method == "sleep"
    assert info.value.compensation is None
    late = outcomes(e0=RemoteError("boom"), e1=CallTimeout("late"))
    with pytest.raises(UtilityTimeoutError, match=r"boom(.|\n)*late"):
        late.unwrap()


def test_the_summary_of_many_failures_is_short() -> None:
    """A text names the first failures and counts the others."""
    got = outcomes(**{f"e{k}": NotSentError("x") for k in range(100)})
    lines = got.summary().split("\n")
    assert lines[0] == "sleep failed on 100 of 100 engines"
    assert lines[1] == "  engine 0: NotSentError: x [did not run]"
    assert lines[-1] == "  ... and 84 more in .outcomes"
    assert len(lines) == 18
    assert outcomes(e0=1, e3=1).summary() == "sleep succeeded on engines 0, 3"


@pytest.mark.parametrize(
    "values",
    [
        (True, True),
        (None, None),
        ([1, {"a": b"x"}], [1, {"a": b"x"}]),
        (float("nan"), float("nan")),
        ("only one",),
    ],
)
def test_engines_that_agree_give_one_value(values: tuple[Any, ...]) -> None:
    """Equal values are one value; so are two NaN."""
    got = outcomes(**{f"e{k}": value for k, value in enumerate(values)}).agreed()
    assert got is values[0]


@pytest.mark.parametrize(
    "values",
    [(True, False), (True, 1), (0, False), (None, False), ([1], [2]), (1, "1"), (1, 1, 2)],
)
def test_engines_that_disagree_are_listed(values: tuple[Any, ...]) -> None:
    """Unequal values raise, with each engine's; True is not 1."""
    got = outcomes(**{f"e{k}": value for k, value in enumerate(values)})
    with pytest.raises(ConsensusError) as info:
        got.agreed()
    assert info.value.outcomes is got
    assert info.value.method == "sleep"
    for index, value in enumerate(values):
        assert f"engine {index}: {value!s}" in str(info.value)


def test_a_failure_is_no_disagreement() -> None:
    """Where an engine failed, the failure is raised."""
    with pytest.raises(UtilityCallError, match="boom"):
        outcomes(e0=True, e1=RemoteError("boom")).agreed()


def test_outcomes_print_as_a_table() -> None:
    """A row per engine: what came of it, whether it ran, the value or the error, and when."""
    got = outcomes(e0=["a"], e1=RemoteError("boom\nand more"), e2=NotSentError("no"))
    assert str(got).split("\n") == [
        "sleep",
        "engine  outcome       ran    value or error  after",
        "0       ok            yes    ['a']           250.0 ms",
        "1       RemoteError   maybe  boom and more   500.0 ms",
        "2       NotSentError  no     no              500.0 ms",
    ]
    assert repr(got) == "<Outcomes sleep: 1 ok, 2 failed>"


def test_the_html_table_is_escaped() -> None:
    """Nothing that an engine sends can become markup in a notebook."""
    evil = "<script>alert(1)</script>"
    got = Outcomes(evil, {0: Ok([evil], 0.1), 1: Failed(RemoteError(evil), 0.1)})
    html = got._repr_html_()
    assert "<script" not in html
    assert html.count("&lt;script&gt;") == 3


@pytest.mark.parametrize(
    "value",
    [
        "x" * 50_000_000,
        b"x" * 50_000_000,
        [b"x" * 50_000_000],
        {"weights": [[b"x" * 50_000_000]]},
        list(range(1_000_000)),
        [list(range(1_000_000))],
        {"a": {str(k): k for k in range(200_000)}},
    ],
    ids=["text", "bytes", "nested bytes", "deep bytes", "list", "nested list", "nested map"],
)
def test_a_huge_value_prints_short_and_fast(value: Any) -> None:
    """A reply of megabytes is not rendered whole to show its beginning."""
    got = outcomes(e0=value, e1=RemoteError("boom"))
    began = time.process_time()
    for text in (str(got), got._repr_html_()):
        assert len(text) < 1500
    assert time.process_time() - began < 0.05


def test_outcomes_pickle_and_copy() -> None:
    """Outcomes survive a process boundary, in order and with their errors."""
    got = outcomes(e1=RemoteError("boom", engine=1), e0=[1, 2])
    for twin in (
        pickle.loads(pickle.dumps(got)),
        copy.copy(got),
        copy.deepcopy(got),
    ):
        assert type(twin) is Outcomes
        assert list(twin) == [1, 0]
        assert twin.method == "sleep"
        assert twin[0] == got[0]
        assert str(twin) == str(got)
        assert twin.failures[1].engine == 1


def test_outcomes_keep_what_they_were_made_of() -> None:
    """Changing the mapping that they were made of, or one that they gave out, changes nothing."""
    made_of: dict[int, Outcome] = {0: Ok(1, 0.0), 1: Failed(RemoteError("x"), 0.0)}
    got = Outcomes("m", made_of)
    made_of.clear()
    got.failures.clear()
    assert len(got) == 2
    assert len(got.failures) == 1
    with pytest.raises(TypeError):
        got[0] = Ok(2, 0.0)  # type: ignore[index]


def test_values_are_frozen() -> None:
    """A settled result cannot be changed."""
    for value in (Ok(1, 0.1), Failed(RemoteError("x"), 0.1), UtilityCall("m")):
        name = dataclasses.fields(value)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, name, None)


def test_a_utility_call_takes_its_arguments_as_one_sequence() -> None:
    """Any iterable becomes the tuple of arguments; what is none gets a hint."""
    assert UtilityCall("m").args == ()
    assert UtilityCall("m", [1, "a"]).args == (1, "a")  # type: ignore[arg-type]
    wrong: Any
    for wrong in (7, "text", b"bytes", None):
        with pytest.raises(TypeError, match=r"must be a tuple of arguments, .*did you mean \("):
            UtilityCall("remove_lora", wrong)


def test_outcomes_are_immutable() -> None:
    """What every thread may hold nobody changes, not even its name or by what it was made of."""
    made = {0: Ok(1, 0.1)}
    outcomes: Any = Outcomes("echo", made)
    made.clear()
    with pytest.raises(AttributeError):
        outcomes.method = "other"
    with pytest.raises(TypeError):
        outcomes[0] = Ok(2, 0.2)
    with pytest.raises(TypeError):
        del outcomes[0]
    with pytest.raises(AttributeError):
        outcomes.other = 1
    outcomes.failures.clear()
    assert (outcomes.method, dict(outcomes)) == ("echo", {0: Ok(1, 0.1)})
    assert pickle.loads(pickle.dumps(outcomes)).method == "echo"
