"""Engine ids, engine names in texts, and which engines a call goes to."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_client.engines import (
    MAX_ENGINES,
    EngineInfo,
    engine_id,
    engine_index,
    engine_names,
    resolve_targets,
)


@pytest.mark.parametrize(
    ("index", "identity"),
    [(0, b"\x00\x00"), (1, b"\x01\x00"), (256, b"\x00\x01"), (65_535, b"\xff\xff")],
)
def test_an_id_is_the_index_in_two_bytes_low_byte_first(index: int, identity: bytes) -> None:
    """Index and id stand for each other."""
    assert engine_id(index) == identity
    assert engine_index(identity) == index


def test_every_index_has_an_id_of_its_own() -> None:
    """No two of all possible engines share an id."""
    assert len({engine_id(index) for index in range(MAX_ENGINES)}) == MAX_ENGINES


@given(st.binary(max_size=300))
def test_only_two_bytes_are_an_engine(identity: bytes) -> None:
    """An identity of any other length stands for no engine."""
    index = engine_index(identity)
    assert (index is None) == (len(identity) != 2)
    assert index is None or engine_id(index) == identity


@pytest.mark.parametrize(
    ("indices", "text"),
    [
        ([3], "engine 3"),
        ([0, 2], "engines 0, 2"),
        (range(12), "engines 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11"),
        (range(64), "engines 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, ... (64 in all)"),
        (iter([5, 6]), "engines 5, 6"),
    ],
)
def test_engines_are_named_in_few_words(indices: Any, text: str) -> None:
    """A text names up to a dozen engines, and of more how many there are."""
    assert engine_names(indices) == text


class IndexLike:
    """An integer that is no int, as an array library's are."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


@pytest.mark.parametrize(
    ("targets", "resolved"),
    [
        (None, (4, 5, 6)),
        ([5], (5,)),
        ((6, 4), (6, 4)),
        (range(4, 7), (4, 5, 6)),
        ([IndexLike(5)], (5,)),
        ({6: "one"}, (6,)),
        ("alive", None),
    ],
)
def test_targets_keep_their_order(targets: Any, resolved: tuple[int, ...] | None) -> None:
    """The indices come back as they were given, and None stands for "alive"."""
    assert resolve_targets(targets, (4, 5, 6)) == resolved


@pytest.mark.parametrize(
    ("targets", "error", "text"),
    [
        ([], ValueError, "engines is empty"),
        ((), ValueError, "engines is empty"),
        ([4, 5, 4], ValueError, "engines repeats engine 4"),
        ([IndexLike(4), 4], ValueError, "engines repeats engine 4"),
        ([7], ValueError, "names engine 7, but this client has engines 4, 5, 6"),
        ([-1], ValueError, "names engine -1, but"),
        ([4, 7, 9], ValueError, "names engines 7, 9, but"),
        (4, TypeError, r"not 4; did you mean engines=\[4\]\?"),
        ("4", TypeError, "'alive' or a sequence of engine indices, not '4'"),
        ("all", TypeError, "not 'all'"),
        (b"\x04", TypeError, "a sequence of engine indices"),
        (["4"], TypeError, r"integers\), not '4' \(str\)"),
        ([True], TypeError, r"integers\), not True \(bool\)"),
        ([4.0], TypeError, r"integers\), not 4.0 \(float\)"),
        ([None], TypeError, r"integers\), not None"),
        (4.5, TypeError, "a sequence of engine indices, not 4.5"),
    ],
)
def test_refused_targets(targets: Any, error: type[Exception], text: str) -> None:
    """Targets that are empty, repeated, unknown or no indices are refused with what to do."""
    with pytest.raises(error, match=text):
        resolve_targets(targets, (4, 5, 6))


def test_a_snapshot_of_an_engine_shows_its_state_and_no_secrets() -> None:
    """An engine's information is fixed, and its table row is escaped and says why it is dead."""
    info = EngineInfo(3, b"\x03\x00", "cbor", False, {"big": 1}, cause_of_death="<lost> it")
    assert "big" not in repr(info)
    html = info._repr_html_()
    assert "dead: &lt;lost&gt; it" in html
    assert "<lost>" not in html
    assert "dead: not yet registered" in EngineInfo(0, b"", None, False)._repr_html_()
    assert "alive" in EngineInfo(0, b"", "cbor", True)._repr_html_()
    with pytest.raises(dataclasses.FrozenInstanceError):
        info.alive = True  # type: ignore[misc]
