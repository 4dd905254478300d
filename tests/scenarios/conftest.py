"""Engines that the tests of a module share; a module with other needs has its own ``shared``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.scenarios.rig import Rig, rig


@pytest.fixture(scope="module")
def shared() -> Iterator[Rig]:
    """One engine of each dialect, shared by all tests of a module."""
    with rig(("cbor", "msgpack")) as made:
        yield made
        made.check_messages()


@pytest.fixture
def two(shared: Rig) -> Iterator[Rig]:
    """The shared engines, without faults before and after."""
    yield shared
    shared.settle_down()
    shared.check()
