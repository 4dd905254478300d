"""What a vLLM engine trusts its client with kills the reference engine too, in the same way."""

from __future__ import annotations

from typing import Any

import pytest
import zmq

from engine_client.errors import ProtocolError
from engine_client.tools.mock.request import UnusableRequest, read_request
from engine_client.tools.mock.sampling import Pooling, read_pooling, read_sampling
from engine_client.tools.mock_engine import MockEngine
from engine_client.wire.messages import DEAD_SENTINEL, RequestType
from tests.helpers import EngineProcess, scaled, wait_until
from tests.tools.peer import Peer, StartEngine

QUICK = {"manual_steps": True, "farewell_seconds": 0}


@pytest.fixture
def peer(any_peer: Peer) -> Peer:
    return any_peer


def assert_dies(peer: Peer, engine: MockEngine) -> None:
    """The sentinel is the last that it says."""
    frames: list[bytes] = []
    while frames != [DEAD_SENTINEL]:
        frames = peer.output.recv_multipart()
    assert engine.join(scaled(10))
    assert engine.exit_code == 1
    assert peer.hears_nothing()


# -- dead ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "fields", "text"),
    [
        ([], {}, "ValueError: Stop argument for islice()"),
        ([1] * 8, {}, "AssertionError: Sampled token IDs exceed the max model length."),
        ([1] * 9, {}, "ValueError: could not broadcast input array"),
        ([1, 512], {}, "IndexError: index out of range in self"),
        ([1, -3], {}, "IndexError: index out of range in self"),
        ([1], {"lora_request": ["none", 1, "/missing"]}, "No adapter found for /missing"),
        ([1], {"lora_request": ["none", 1, "/bad_rank"]}, "LoRA rank 64 is greater"),
    ],
    ids=str,
)
def test_death_at_the_first_step(
    peer: Peer,
    start: StartEngine,
    capfd: pytest.CaptureFixture[str],
    prompt: list[int],
    fields: dict[str, Any],
    text: str,
) -> None:
    """The engine takes such a request, and dies of its first step."""
    engine = start(options=QUICK, ready={"max_model_len": 8})
    peer.add("bad", prompt, **fields)
    assert peer.call("is_sleeping") is False
    peer.ask("mock_step")
    assert_dies(peer, engine)
    assert text in capfd.readouterr().err


def test_longest_prompt_is_served(peer: Peer, start: StartEngine) -> None:
    """One token less, and it lives; so does a pooling request of the full length."""
    start(ready={"max_model_len": 8}, options={"supported_tasks": ["generate", "embed"]})
    peer.add("r", [1] * 7)
    assert peer.outputs().outputs[0][5] == 1
    pooling = [None, None, None, None, "embed"]
    peer.add("p", [1] * 8, sampling_params=None, pooling_params=pooling)
    assert peer.outputs().outputs[0][5] == 0


def test_duplicate_id(peer: Peer, start: StartEngine) -> None:
    """An id that is still live, also one of another client, kills at once."""
    engine = start(options=QUICK)
    peer.add("r", [1])
    peer.add("r", [2], client_index=1)
    assert_dies(peer, engine)


@pytest.mark.parametrize("task", [None, "generate", "classify"])
def test_unsupported_task(peer: Peer, start: StartEngine, task: str | None) -> None:
    """A pooling task that the model does not support kills at once."""
    engine = start(options={**QUICK, "supported_tasks": ["generate", "embed"]})
    pooling = [None, None, None, None, task, False, None, None, None, 2]
    peer.add("r", [1], sampling_params=None, pooling_params=pooling)
    assert_dies(peer, engine)


@pytest.mark.parametrize(
    ("kind", "payload"), [(RequestType.ABORT, 5), (RequestType.ABORT, [[1]]), (b"\x04", [])]
)
def test_other_deaths(peer: Peer, start: StartEngine, kind: bytes, payload: Any) -> None:
    """An ABORT of what is no array of ids, and a type that is internal, kill too."""
    engine = start(options=QUICK)
    peer.send(kind, peer.codec.encode(payload))
    assert_dies(peer, engine)


def test_input_stays_open_after_death(peer: Peer, start: StartEngine) -> None:
    """The dead engine still takes messages for a while, and the running requests are lost."""
    engine = start(options={**QUICK, "farewell_seconds": 60})
    peer.add("running", [1])
    peer.ask("mock_step")
    peer.outputs()
    peer.reply()
    monitor = peer.disconnections(peer.output)
    peer.send(b"\x04", peer.codec.encode([]))
    assert peer.output.recv_multipart() == [DEAD_SENTINEL]
    monitor.recv_multipart()
    assert peer.reaches()
    assert not engine.join(0)


def test_death_of_a_process(peer: Peer) -> None:
    """A process ends with code 1 and says why."""
    with EngineProcess(
        peer.address,
        codec=peer.codec.name,
        arguments=["--options", '{"farewell_seconds": 0}'],
    ) as engine:
        peer.complete()
        peer.add("r", [])
        assert peer.output.recv_multipart() == [DEAD_SENTINEL]
        assert engine.wait() == 1
        assert "EngineCore encountered a fatal error. ValueError" in engine.stderr


# -- deaf ------------------------------------------------------------------------------------------


UNREADABLE: list[dict[str, Any]] = [
    {"request_id": 5},
    {"prompt_token_ids": ["1"]},
    {"prompt_token_ids": [True]},
    {"mm_features": [1]},
    {"sampling_params": []},
    {"pooling_params": {}},
    {"arrival_time": None},
    {"lora_request": ["zero", 0, "/p"]},
    {"lora_request": ["a", 1, "/p", None, None, False, False]},
    {"lora_request": ["a", 1, ""]},
    {"cache_salt": 1},
    {"data_parallel_rank": 1.0},
    {"prompt_embeds": ["float32", [1]]},
    {"prompt_embeds": ["float32", [1], 1]},
    {"prompt_is_token_ids": [1]},
    {"client_index": None},
    {"current_wave": "0"},
    {"priority": None},
    {"trace_headers": {"a": 1}},
    {"resumable": None},
    {"external_req_id": 1},
    {"reasoning_ended": 1},
    {"reasoning_parser_kwargs": []},
    {"abort_immediately": 0},
    {"session_id": 1},
    {"kv_hints": []},
    {"pooling_params": [0]},
]
OUT_OF_RANGE: list[dict[str, Any]] = [
    {"n": 0},
    {"n": 2, "temperature": 0.0},
    {"presence_penalty": 2.1},
    {"frequency_penalty": -2.1},
    {"repetition_penalty": 0.0},
    {"repetition_penalty": float("inf")},
    {"temperature": -1.0},
    {"temperature": 2.5},
    {"temperature": float("nan")},
    {"temperature": True},
    {"top_p": 0.0},
    {"top_p": 1.1},
    {"top_k": -2},
    {"top_k": 1.5},
    {"min_p": -0.1},
    {"min_p": 1.1},
    {"seed": "1"},
    {"stop": ""},
    {"stop": ["a", ""]},
    {"stop": ["a"], "detokenize": False},
    {"stop_token_ids": ["1"]},
    {"max_tokens": 0},
    {"max_tokens": 1.0},
    {"min_tokens": -1},
    {"min_tokens": 17},
    {"logprobs": -2},
    {"prompt_logprobs": -2},
    {"bad_words": [""]},
    {"_all_stop_token_ids": None},
    {"structured_outputs": {}},
    {"structured_outputs": {"regex": "a", "json": "{}"}},
    {"logit_bias": {"a": 1.0}},
    {"logit_bias": {1: "a"}},
    {"repetition_detection": []},
    {"repetition_detection": {"max_pattern_size": -1}},
    {"repetition_detection": {"max_pattern_size": 1, "min_count": 1}},
    {"repetition_detection": {"max_pattern_size": 1, "min_pattern_size": 2, "min_count": 2}},
]


@pytest.mark.parametrize(
    "fields",
    [UNREADABLE[0], {"sampling_params": {"temperature": -1.0}}, {"sampling_params": {"n": 0}}],
    ids=str,
)
def test_unreadable_request(peer: Peer, start: StartEngine, fields: dict[str, Any]) -> None:
    """It leaves the engine deaf; what ran before goes on and is told."""
    start(options={"step_seconds": 0.02})
    peer.add("running", [1], options={"max_tokens": 10})
    monitor = peer.disconnections(peer.input)
    peer.add("bad", [1], **fields)
    monitor.recv_multipart()
    wait_until(lambda: not peer.reaches())
    while peer.outputs().outputs[0][5] is None:
        pass
    assert peer.hears_nothing()


def test_unreadable_abort_in_the_middle_of_a_step(peer: Peer, start: StartEngine) -> None:
    """It leaves the engine deaf in its turn; the step is told."""
    start(options={"step_seconds": 0.05})
    peer.add("r", [1], options={"max_tokens": 3})
    monitor = peer.disconnections(peer.input)
    peer.send(RequestType.ABORT, b"\xc1")
    monitor.recv_multipart()
    while peer.outputs().outputs[0][5] is None:
        pass


def request(**fields: Any) -> list[Any]:
    """A good request with some fields replaced."""

    class Silent(Peer):
        def send(self, kind: bytes, payload: bytes, index: int = 0) -> None:
            """Only the record is wanted."""

    with Silent() as peer:
        return peer.add("r", [1], **fields)


@pytest.mark.parametrize("fields", UNREADABLE, ids=str)
def test_unreadable_fields(fields: dict[str, Any]) -> None:
    """Every position has a type."""
    with pytest.raises(ProtocolError, match=r"wrong|frame that is not there"):
        read_request(request(**fields))


@pytest.mark.parametrize("value", [None, {}, "r", [], request()[:8]], ids=repr)
def test_no_request_at_all(value: Any) -> None:
    """It is an array of at least nine."""
    with pytest.raises(ProtocolError, match="nine or more"):
        read_request(value)


@pytest.mark.parametrize("options", OUT_OF_RANGE, ids=str)
def test_sampling_values_out_of_range(options: dict[str, Any]) -> None:
    """Every sampling value has a type and a range."""
    with pytest.raises(ProtocolError, match="sampling parameters"):
        read_sampling(options)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 2, "top_p": 1, "min_p": 1, "top_k": -1, "presence_penalty": -2},
        {"n": 5, "stop": "x", "max_tokens": None, "logprobs": -1, "prompt_logprobs": 0},
        {"max_tokens": 1, "min_tokens": 1, "seed": 2**64 - 1, "extra_args": {"a": [1]}},
        {"logit_bias": {1: 2}, "bad_words": ["a"], "unknown": object()},
        {"stop": ["a"], "structured_outputs": {"regex": "a"}, "repetition_detection": {}},
    ],
    ids=str,
)
def test_sampling_values_in_range(options: dict[str, Any]) -> None:
    """The ends of the ranges are in them, and unknown keys are ignored."""
    read_sampling(options)


def test_request_that_can_be_read() -> None:
    """A good one is read, whether or not it can be run."""
    live = read_request(request(cache_salt="s", client_index=3, kv_hints={}))
    assert (live.id, live.prompt, live.client, live.cache_salt) == ("r", [1], 3, "s")
    with pytest.raises(UnusableRequest, match="can't both be unset"):
        read_request(request(sampling_params=None))


def test_pooling_parameters() -> None:
    """They may be cut off anywhere."""
    assert read_pooling([]) == Pooling()
    assert read_pooling([True, 16]) == Pooling(dimensions=16)
    assert read_pooling([None, None, None, None, "embed"]) == Pooling("embed")
    with pytest.raises(ProtocolError, match="position 9"):
        read_pooling([None, None, None, None, "embed", False, None, None, None, 1])


# -- mute ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("client", [1, -1])
def test_unknown_client(peer: Peer, start: StartEngine, client: int) -> None:
    """The first output for a client that is not there silences the engine, which computes on."""
    engine = start()
    monitor = peer.disconnections(peer.output)
    peer.add("bad", [1], client_index=client)
    monitor.recv_multipart()
    peer.ask("echo", 1)
    wait_until(lambda: [entry.method for entry in engine.log] == [None, "echo"])
    wait_until(lambda: not engine.model.scheduler.live)
    with pytest.raises(zmq.Again):
        peer.output.recv(zmq.NOBLOCK)
