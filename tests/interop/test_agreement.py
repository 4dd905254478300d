"""Questions on which real engines must agree, and do not; calls under Ctrl-C."""

from __future__ import annotations

import pytest

from engine_client import ConsensusError, EngineClient
from tests.helpers import interrupt_storm, storm_test


def test_weight_version(client: EngineClient) -> None:
    """Engines with different weight versions are told apart, each named with its own."""
    client.set_weight_version("v2", engines=[1])
    with pytest.raises(ConsensusError) as caught:
        client.get_weight_version()
    assert caught.value.outcomes is not None
    assert caught.value.outcomes.unwrap() == ["default", "v2"]
    assert client.get_weight_version(engines=[1]) == "v2"
    client.set_weight_version("v2", engines=[0])
    assert client.get_weight_version() == "v2"


@pytest.mark.parametrize("method", ["is_sleeping", "is_scheduler_paused"])
def test_one_paused(client: EngineClient, method: str) -> None:
    """A group of which one engine is paused is neither paused nor not."""
    client.pause_scheduler("keep", engines=[0])
    with pytest.raises(ConsensusError, match=f"{method}: the engines disagree"):
        getattr(client, method)()
    with pytest.raises(ConsensusError):
        client.call_utility_consensus(method)
    client.resume_scheduler(engines=[0])
    assert client.call_utility_consensus(method) is False


@storm_test(200)
def test_interrupts(client: EngineClient, report: list[str]) -> None:
    """Ctrl-C at random instants leaves no waiter and no engine that saw half a message."""
    storm = interrupt_storm(lambda: client.settle_utility("is_sleeping"), seconds=3)
    assert client.is_sleeping() is False
    assert client.pending_utility_calls == 0
    report.append(f"Ctrl-C on two real engines: {storm}")
