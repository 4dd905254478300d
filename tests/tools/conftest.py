"""Fixtures for tests of the reference engine: a raw peer in both dialects, and engines for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from engine_client.tools.mock_engine import MockEngine
from tests.tools.peer import Peer, StartEngine, thread_engine


@pytest.fixture(params=["cbor", "msgpack"])
def any_peer(request: pytest.FixtureRequest) -> Iterator[Peer]:
    """A client on raw sockets, in each dialect."""
    with Peer(request.param) as peer:
        yield peer


@pytest.fixture
def start(any_peer: Peer) -> Iterator[StartEngine]:
    """Start an engine in a thread and complete its handshake."""
    with ExitStack() as stack:

        def start_engine(index: int = 0, **options: Any) -> MockEngine:
            engine: MockEngine = stack.enter_context(
                thread_engine(any_peer.address, index, codec=any_peer.codec.name, **options)
            )
            any_peer.complete(index)
            return engine

        yield start_engine
