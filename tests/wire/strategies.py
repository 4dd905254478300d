"""Plain values and hostile bytes, for the tests of both dialects."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

integers = st.integers(-(2**63), 2**64 - 1)
leaves = (
    st.none()
    | st.booleans()
    | integers
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
    | st.binary(max_size=40)
)
keys = st.text(st.characters(exclude_categories=["Cs"]), max_size=10) | integers
plain_values: st.SearchStrategy[Any] = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(keys, inner, max_size=6),
    max_leaves=30,
)
DIALECTS = ("cbor", "msgpack")
