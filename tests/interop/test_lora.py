"""Adapters on two real engines: on both, on one only, and taken back from the other."""

from __future__ import annotations

import signal

import pytest

from engine_client import (
    CallTimeout,
    ConsensusError,
    EngineClient,
    EngineRequest,
    Failed,
    LoraRequest,
    Ok,
    RemoteError,
    RequestRefusedError,
    SamplingParams,
    UtilityCall,
    UtilityCallError,
    UtilityTimeoutError,
)
from tests.helpers import scaled, wait_until
from tests.interop.engines import EngineGroup


def _held(client: EngineClient) -> list[list[int]]:
    """What each engine says it holds."""
    return [sorted(ids) for ids in client.settle_utility("list_loras").unwrap()]


def _tokens(client: EngineClient, engine: int, lora: LoraRequest | None) -> list[int]:
    request = EngineRequest(
        "compare",
        [3, 4, 5],
        SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True),
        lora_request=lora,
        data_parallel_rank=engine,
    )
    return [token for output in client.call(request) for token in output.new_token_ids]


def test_on_both(client: EngineClient, group: EngineGroup) -> None:
    """Adapters are loaded, listed, used, pinned and removed on both engines."""
    alpha = LoraRequest("alpha", 1, group.adapter("alpha", seed=1))
    beta = LoraRequest("beta", 2, group.adapter("beta", seed=2))
    plain = [_tokens(client, engine, None) for engine in range(2)]
    client.add_lora(alpha, compensate=True)
    client.add_lora(beta, compensate=True)
    assert client.list_loras() == frozenset({1, 2})
    assert _held(client) == [[1, 2], [1, 2]]
    for engine in range(2):
        said = [_tokens(client, engine, lora) for lora in (None, alpha, beta)]
        assert said[0] == plain[engine]
        assert said[0] != said[1] != said[2] != said[0]
    client.pin_lora(1)
    assert client.remove_lora(1) is True
    assert client.remove_lora(1) is False
    assert client.list_loras() == frozenset({2})


def test_eviction(client: EngineClient, group: EngineGroup) -> None:
    """Beyond max_cpu_loras an engine silently evicts the oldest adapter, but no pinned one."""
    for number in range(1, 5):
        client.add_lora(LoraRequest(f"a{number}", number, group.adapter(f"a{number}")))
    client.pin_lora(1)
    for number in (5, 6):
        client.add_lora(LoraRequest(f"a{number}", number, group.adapter(f"a{number}")))
    assert _held(client) == [[1, 4, 5, 6], [1, 4, 5, 6]]


def test_one_engine_cannot_load_it(
    client: EngineClient, group: EngineGroup, report: list[str]
) -> None:
    """An adapter that one engine refuses is taken back from the other, if that is asked for."""
    client.add_lora(LoraRequest("alpha", 1, group.adapter("alpha")))
    wide = LoraRequest("wide", 7, group.adapter("wide", rank=64))

    with pytest.raises(UtilityCallError) as caught:
        client.add_lora(wide)
    error = caught.value
    assert error.compensation is None
    assert _held(client) == [[1, 7], [1]]
    with pytest.raises(ConsensusError, match="disagree"):
        client.list_loras()
    assert error.outcomes is not None
    assert isinstance(error.outcomes[0], Ok)
    failure = error.outcomes.failures[1]
    assert isinstance(failure, RemoteError)
    assert failure.message == (
        "Call to add_lora method failed: LoRA rank 64 is greater than max_lora_rank 16."
    )
    # By hand: engine 1 may have run it, is told too, and had nothing to remove.
    undone = client.compensate(error.outcomes, UtilityCall("remove_lora", (7,)))
    assert undone.unwrap() == [True, False]
    assert _held(client) == [[1], [1]]

    with pytest.raises(UtilityCallError) as caught:
        client.add_lora(wide, compensate=True)
    assert caught.value.compensation is not None
    assert caught.value.compensation.unwrap() == [True, False]
    assert _held(client) == [[1], [1]]
    assert client.list_loras() == frozenset({1})
    report += ["", "an adapter that engine 1 cannot load:"]
    report += str(caught.value).splitlines()
    report += str(caught.value.compensation).splitlines()
    report.append(f"held afterwards: {_held(client)}")


def test_one_engine_does_not_answer(client: EngineClient, group: EngineGroup) -> None:
    """The undo of a call that timed out reaches a slow engine after the call."""
    lora = LoraRequest("alpha", 1, group.adapter("alpha"))
    late = client.stats.late_replies
    group.engines[1].signal(signal.SIGSTOP)
    try:
        with pytest.raises(UtilityTimeoutError) as caught:
            client.add_lora(lora, timeout=scaled(0.5), compensate=True)
    finally:
        group.engines[1].signal(signal.SIGCONT)
    error = caught.value
    assert error.outcomes is not None
    assert error.outcomes.succeeded == (0,)
    assert isinstance(error.outcomes.failures[1], CallTimeout)
    assert error.compensation is not None
    assert isinstance(error.compensation[0], Ok)
    assert error.compensation[0].value is True
    assert isinstance(error.compensation[1], Failed)
    assert isinstance(error.compensation[1].error, CallTimeout)
    # Engine 1 loaded it late, and then removed it.
    assert _held(client) == [[], []]
    wait_until(lambda: client.stats.late_replies == late + 2, what="the two late replies")


def test_guard(client: EngineClient, group: EngineGroup) -> None:
    """What would kill an engine is refused before anything is sent."""
    alpha = LoraRequest("alpha", 1, group.adapter("alpha"))
    sent = client.stats.sent
    for name, number, path in (("a", 0, "p"), ("a", -1, "p"), ("a", 1, ""), ("", 1, "p")):
        with pytest.raises(RequestRefusedError):
            LoraRequest(name, number, path)
    with pytest.raises(RequestRefusedError):
        client.remove_lora(0)
    with pytest.raises(RequestRefusedError, match="not loaded"):
        client.call(EngineRequest("r", [1], lora_request=alpha))
    with pytest.raises(RequestRefusedError):
        client.call(EngineRequest("r", [1] * 2048))
    with pytest.raises(ValueError, match="mode"):
        client.pause_scheduler("bogus")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="level"):
        client.sleep(3)
    assert client.stats.sent == sent
