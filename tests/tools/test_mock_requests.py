"""Requests on the reference engine: tokens, steps, endings, arrays, statistics."""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from engine_client.tools.faults import FaultRule
from engine_client.tools.mock.tokens import (
    embed,
    generate_tokens,
    prompt_logprobs,
    top_logprobs,
)
from tests.helpers import EngineProcess, scaled, wait_until
from tests.tools.peer import Peer, StartEngine, endpoint, thread_engine

MANUAL = {"manual_steps": True}
STOP, LENGTH, ABORT, ERROR, REPETITION = range(5)


@pytest.fixture
def peer(any_peer: Peer) -> Peer:
    return any_peer


@dataclass
class Told:
    """What was told about one request."""

    tokens: list[int] = field(default_factory=list)
    finish: int | None = None
    reason: Any = None
    outputs: list[list[Any]] = field(default_factory=list)


def run(peer: Peer, *request_ids: str) -> dict[str, Told]:
    """Receive until these requests have ended."""
    told = {request_id: Told() for request_id in request_ids}
    while any(one.finish is None for one in told.values()):
        message, _ = peer.message()
        for output in message.outputs:
            one = told[output[0]]
            assert one.finish is None
            one.tokens += output[1]
            one.finish, one.reason = output[5], output[6]
            one.outputs.append(output)
    return told


def run_one(peer: Peer, prompt: list[int], **options: Any) -> Told:
    peer.add("r", prompt, options=options)
    return run(peer, "r")["r"]


def step(peer: Peer, count: int = 1) -> list[list[Any]]:
    """Have steps made; return the outputs of all, in order."""
    call_id = peer.ask("mock_step", count)
    outputs: list[list[Any]] = []
    while True:
        message, _ = peer.message()
        if message.utility is not None:
            assert message.utility.call_id == call_id
            return outputs
        outputs += message.outputs


def in_order(outputs: Sequence[list[Any]]) -> list[tuple[str, int]]:
    return [(output[0], len(output[1])) for output in outputs]


# -- tokens ----------------------------------------------------------------------------------------


def test_tokens_are_what_the_function_says(peer: Peer, start: StartEngine) -> None:
    """One token in each message, as promised, and the last one names its end."""
    start()
    told = run_one(peer, [1, 2, 3], max_tokens=20)
    assert told.tokens == generate_tokens([1, 2, 3], 20)
    assert [len(output[1]) for output in told.outputs] == [1] * 20
    assert [output[5] for output in told.outputs] == [None] * 19 + [LENGTH]
    assert len(told.outputs[0]) == 18


@pytest.mark.parametrize(
    "change",
    [{"prompt": [1, 2, 4]}, {"seed": 7}, {"seed": 2**64 - 1}, {"lora_int_id": 3}],
    ids=str,
)
def test_tokens_depend_on(peer: Peer, start: StartEngine, change: dict[str, Any]) -> None:
    """Prompt, seed and adapter change the tokens; temperature and the rest do not."""
    start()
    prompt = change.get("prompt", [1, 2, 3])
    options = {"max_tokens": 8, "temperature": 0.0, "top_p": 0.5, "top_k": 3}
    fields: dict[str, Any] = {}
    if "seed" in change:
        options["seed"] = change["seed"]
    if "lora_int_id" in change:
        fields["lora_request"] = ["a", 3, "/p"]
    peer.add("r", prompt, options=options, **fields)
    told = run(peer, "r")["r"]
    keywords = {key: value for key, value in change.items() if key != "prompt"}
    assert told.tokens == generate_tokens(prompt, 8, **keywords)
    assert told.tokens != generate_tokens([1, 2, 3], 8)


def test_seed_minus_one_is_none(peer: Peer, start: StartEngine) -> None:
    """As in vLLM."""
    start()
    assert run_one(peer, [1], seed=-1, max_tokens=3).tokens == generate_tokens([1], 3)


def test_vocabulary(peer: Peer, start: StartEngine) -> None:
    """Tokens are within the vocabulary."""
    start(options={"vocab_size": 10})
    told = run_one(peer, [1], max_tokens=50)
    assert told.tokens == generate_tokens([1], 50, vocab_size=10)
    assert set(told.tokens) == set(range(10))


def test_default_parameters(peer: Peer, start: StartEngine) -> None:
    """An empty map of parameters means vLLM's defaults: 16 tokens."""
    start()
    assert run_one(peer, [5]).tokens == generate_tokens([5], 16)


def test_minimal_request(peer: Peer, start: StartEngine) -> None:
    """Nine positions are enough; a 23rd is ignored."""
    start()
    short = ["short", [1], None, {"max_tokens": 1}, None, 1, None, None, None]
    peer.send(b"\x00", peer.codec.encode(short))
    assert run(peer, "short")["short"].tokens == generate_tokens([1], 1)
    record = peer.add("full", [1])
    run(peer, "full")
    peer.send(b"\x00", peer.codec.encode(["long", *record[1:], "unknown"]))
    assert run(peer, "long")["long"].finish == LENGTH


# -- how a request ends ----------------------------------------------------------------------------


def test_stop_token(peer: Peer, start: StartEngine) -> None:
    """A stop token ends the request and is named as the reason."""
    start()
    tokens = generate_tokens([1], 6)
    told = run_one(peer, [1], stop_token_ids=[tokens[3]])
    assert (told.tokens, told.finish, told.reason) == (tokens[:4], STOP, tokens[3])


def test_end_of_sequence(peer: Peer, start: StartEngine) -> None:
    """The end-of-sequence token ends it without a reason; without the private key it never does."""
    start()
    tokens = generate_tokens([1], 16)
    told = run_one(peer, [1], _eos_token_id=tokens[2])
    assert (told.tokens, told.finish, told.reason) == (tokens[:3], STOP, None)
    assert run_one(peer, [1], _all_stop_token_ids=[tokens[2]]).tokens == tokens


def test_min_tokens(peer: Peer, start: StartEngine) -> None:
    """Before min_tokens, stop tokens are not generated; others take their place."""
    start()
    tokens = generate_tokens([1], 16)
    stop, eos = tokens[1], tokens[3]
    told = run_one(
        peer,
        [1],
        min_tokens=3,
        stop_token_ids=[stop, stop + 1],
        _eos_token_id=eos,
        _all_stop_token_ids=[stop, eos],
    )
    assert told.tokens == [tokens[0], stop + 2, tokens[2], eos]
    assert told.finish == STOP


def test_min_tokens_without_the_private_key(peer: Peer, start: StartEngine) -> None:
    """An end-of-sequence token that is not masked ends the request before min_tokens."""
    start()
    tokens = generate_tokens([1], 16)
    told = run_one(peer, [1], min_tokens=10, _eos_token_id=tokens[3])
    assert told.tokens == tokens[:4]


def test_everything_masked(peer: Peer, start: StartEngine) -> None:
    """Where every token is masked, masking does nothing."""
    start(options={"vocab_size": 3})
    told = run_one(peer, [1], min_tokens=2, max_tokens=2, _all_stop_token_ids=[0, 1, 2])
    assert told.tokens == generate_tokens([1], 2, vocab_size=3)


def test_full_context(peer: Peer, start: StartEngine) -> None:
    """At max_model_len the request ends, however many tokens it may have."""
    start(ready={"max_model_len": 8})
    told = run_one(peer, [1, 2, 3], max_tokens=100)
    assert (len(told.tokens), told.finish) == (5, LENGTH)


def test_forced_tokens_and_repetition(peer: Peer, start: StartEngine) -> None:
    """Tokens can be forced, and a request that repeats itself ends."""
    start()
    detection = {"max_pattern_size": 2, "min_pattern_size": 1, "min_count": 3}
    told = run_one(
        peer,
        [1],
        trace_decode_token_ids=[9, 4, 5, 4, 5, 4, 5, 6],
        repetition_detection=detection,
    )
    assert told.tokens == [9, 4, 5, 4, 5, 4, 5]
    assert (told.finish, told.reason) == (REPETITION, "repetition_detected")
    told = run_one(
        peer,
        [1],
        trace_decode_token_ids=[4, 5, 4, 5, 4, 5],
        min_tokens=8,
        max_tokens=8,
        repetition_detection=detection,
    )
    assert told.finish == LENGTH


def test_certain_token(peer: Peer, start: StartEngine) -> None:
    """A token with a bias of 100 is the only one; with less it is one of many."""
    start()
    assert run_one(peer, [1], max_tokens=3, logit_bias={7: 100.0, 8: 2.0}).tokens == [7] * 3
    assert run_one(peer, [1], logit_bias={7: 99}).tokens == generate_tokens([1], 16)


def test_trace_headers(peer: Peer, start: StartEngine) -> None:
    """They come back with every output."""
    start()
    peer.add("r", [1], options={"max_tokens": 2}, trace_headers={"traceparent": "00-1"})
    outputs = run(peer, "r")["r"].outputs
    assert [output[10] for output in outputs] == [{"traceparent": "00-1"}] * 2


def test_allowed_tokens(peer: Peer, start: StartEngine) -> None:
    """Only allowed tokens are generated."""
    start()
    assert set(run_one(peer, [1], max_tokens=30, allowed_token_ids=[3, 5]).tokens) == {3, 5}


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_token_ids": None},
        {"sampling_params": None},
        {"sampling_params": {"max_tokens": None}},
        {"sampling_params": {"structured_outputs": {"regex": "a+"}}},
        {"sampling_params": {"structured_outputs": {"json": "{}", "_backend": "unheard of"}}},
    ],
    ids=str,
)
def test_what_cannot_be_prepared_ends_with_an_error(
    peer: Peer, start: StartEngine, fields: dict[str, Any]
) -> None:
    """The request ends at once with an error, and the engine goes on."""
    start()
    peer.add("bad", [1], **fields)
    message = peer.outputs()
    ((request_id, tokens, *_),) = message.outputs
    assert (request_id, tokens, message.outputs[0][5]) == ("bad", [], ERROR)
    assert message.finished_requests == ("bad",)
    assert message.weight_version is None
    assert run_one(peer, [1]).finish == LENGTH


def test_structured_output_is_accepted(peer: Peer, start: StartEngine) -> None:
    """With a backend that exists it runs; what is generated does not follow it."""
    start()
    grammar = {"regex": "a+", "_backend": "xgrammar"}
    assert run_one(peer, [1], structured_outputs=grammar, max_tokens=2).finish == LENGTH


def test_prompt_embeds(peer: Peer, start: StartEngine) -> None:
    """A tensor can stand for the prompt, inside the message or in a frame of its own."""
    start()
    inline = ["float32", [2, 3], b"\0" * 24]
    peer.add("inline", None, prompt_embeds=inline, options={"max_tokens": 1})
    told = run(peer, "inline")["inline"]
    assert told.tokens == generate_tokens([0, 0], 1)
    assert told.outputs[0][11]["num_prompt_tokens"] == 2
    record = peer.add("r", [1], options={"max_tokens": 1})
    run(peer, "r")
    record[0], record[1], record[9] = "outside", None, ["float32", [2, 64], 1]
    frames = [b"\0\0", b"\0", peer.codec.encode(record), b"\0" * 512]
    peer.input.send_multipart(frames)
    assert run(peer, "outside")["outside"].tokens == generate_tokens([0, 0], 1)


# -- steps -----------------------------------------------------------------------------------------


def test_continuous_batching(peer: Peer, start: StartEngine) -> None:
    """All running requests advance in each step; others wait for a place."""
    start(options=MANUAL, ready={"max_num_seqs": 2})
    for name, count in (("a", 2), ("b", 3), ("c", 1)):
        peer.add(name, [1], options={"max_tokens": count})
    assert in_order(step(peer)) == [("a", 1), ("b", 1)]
    assert in_order(step(peer)) == [("a", 1), ("b", 1)]
    assert in_order(step(peer)) == [("b", 1), ("c", 1)]
    assert step(peer) == []


def test_one_message_for_a_step(peer: Peer, start: StartEngine) -> None:
    """One message holds all outputs of a step for one client, with the step's time."""
    start(options=MANUAL)
    for name in ("a", "b"):
        peer.add(name, [1])
    peer.ask("mock_step", 2)
    first, second = peer.outputs(), peer.outputs()
    assert [len(first.outputs), len(second.outputs)] == [2, 2]
    assert 0 < first.timestamp <= second.timestamp
    assert first.scheduler_stats is None
    assert first.finished_requests is None
    assert peer.reply()[2] == 2


def test_requests_join_and_leave(peer: Peer, start: StartEngine) -> None:
    """A new request is in the next step; an aborted one in none, and nothing is said of it."""
    start(options=MANUAL)
    peer.add("a", [1])
    assert in_order(step(peer)) == [("a", 1)]
    peer.add("b", [1])
    assert in_order(step(peer)) == [("a", 1), ("b", 1)]
    peer.abort("a", "unknown")
    assert in_order(step(peer)) == [("b", 1)]
    peer.abort("b")
    peer.abort("b")
    assert step(peer, 3) == []


def test_steps_take_their_time(peer: Peer, start: StartEngine) -> None:
    """A step takes as long as it is told to; calls are answered between two of them."""
    start(options={"step_seconds": 0.05})
    peer.add("r", [1], options={"max_tokens": 1000})
    first, second = peer.outputs(), peer.outputs()
    assert second.timestamp - first.timestamp >= 0.05
    call_id = peer.ask("is_sleeping")
    while (utility := peer.outputs().utility) is None:
        pass
    assert (utility.call_id, utility.value) == (call_id, False)


def test_abort_in_the_middle_of_a_step(peer: Peer, start: StartEngine) -> None:
    """The step that was under way when the abort came tells nothing of the request."""
    step_seconds = 0.1
    start(options={"step_seconds": step_seconds})
    in_time = False
    while not in_time:  # this thread may have been held up
        peer.add("r", [1], options={"max_tokens": 1000})
        outputs = peer.outputs()
        peer.abort("r")
        call_id = peer.ask("echo", 1)
        in_time = time.monotonic() - outputs.timestamp < step_seconds / 2
        messages = [peer.outputs()]
        while messages[-1].utility is None:
            messages.append(peer.outputs())
        assert messages[-1].utility.call_id == call_id
        assert len(messages) == 1 or not in_time


def test_abort_immediately(peer: Peer, start: StartEngine) -> None:
    """A request can come with its own abort."""
    start()
    peer.add("r", [1], abort_immediately=True)
    assert peer.call("echo", 1) == 1
    assert run_one(peer, [1]).finish == LENGTH  # its id is free


def test_id_is_free_after_the_end(peer: Peer, start: StartEngine) -> None:
    """An id may be used again once its request has ended or was aborted."""
    start(options=MANUAL)
    for _ in range(3):
        peer.add("r", [1], options={"max_tokens": 1})
        assert in_order(step(peer)) == [("r", 1)]
    peer.add("r", [1])
    peer.abort("r")
    peer.add("r", [2])
    assert step(peer)[0][1] == generate_tokens([2], 1)


@pytest.mark.parametrize("payload", ["r", None, ["r"], {"r": 1}], ids=str)
def test_abort_payloads(peer: Peer, start: StartEngine, payload: Any) -> None:
    """A bare id is taken too, and nil means all."""
    start(options=MANUAL)
    peer.add("r", [1])
    peer.send(b"\x01", peer.codec.encode(payload))
    assert step(peer) == []


def test_harmless_messages(peer: Peer, start: StartEngine) -> None:
    """A wave and a wake-up mean nothing to an engine that is in no lockstep group."""
    start()
    peer.send(b"\x02", peer.codec.encode([3, None]))
    peer.send(b"\x05", peer.codec.encode([]))
    peer.abort()
    assert peer.call("echo", 1) == 1


def test_clients_are_told_apart(peer: Peer) -> None:
    """Each client is told of its own requests; a pause by one ends those of all."""
    with Peer(peer.codec.name) as other:
        inputs = [endpoint(peer.input), endpoint(other.input)]
        outputs = [endpoint(peer.output), endpoint(other.output)]
        with thread_engine(
            input_address=inputs,
            output_address=outputs,
            codec=peer.codec.name,
            options=MANUAL,
        ):
            peer.input.recv_multipart()
            other.input.recv_multipart()
            peer.add("mine", [1])
            peer.add("theirs", [1], client_index=1)
            assert in_order(step(peer)) == [("mine", 1)]
            assert in_order(other.outputs().outputs) == [("theirs", 1)]
            pause = peer.ask("pause_scheduler")
            assert peer.outputs().finished_requests == ("mine",)
            assert other.outputs().finished_requests == ("theirs",)
            assert peer.reply() == (pause, None, None)


def test_coordinated_engine_names_what_ended(peer: Peer, start: StartEngine) -> None:
    """With a coordinator the ids of ended requests are told, also of aborted ones."""
    start(options={**MANUAL, "coordinated": True})
    peer.add("a", [1], options={"max_tokens": 1})
    peer.add("b", [1])
    peer.ask("mock_step")
    message = peer.outputs()
    assert message.finished_requests == ("a",)
    assert [output[5] for output in message.outputs] == [LENGTH, None]
    peer.reply()
    peer.abort("b")
    message = peer.outputs()
    assert (message.outputs, message.finished_requests) == ((), ("b",))


def test_stop_ends_requests(peer: Peer) -> None:
    """An engine that is told to stop ends its requests with an abort, and says no more."""
    with EngineProcess(
        peer.address, codec=peer.codec.name, arguments=["--options", '{"manual_steps": true}']
    ) as engine:
        peer.complete()
        peer.add("r", [1], options={"max_tokens": 2})
        step(peer)
        peer.ask("pause_scheduler", "wait")
        assert peer.call("is_sleeping") is True
        engine.close()
        message = peer.outputs()
        assert (message.outputs[0][0], message.outputs[0][5]) == ("r", ABORT)
        assert message.finished_requests == ("r",)
        assert engine.wait() == 0
        assert peer.hears_nothing()


# -- what comes with the tokens --------------------------------------------------------------------


def test_prefill_stats(peer: Peer, start: StartEngine) -> None:
    """Only the first output has them."""
    start()
    told = run_one(peer, [1, 2, 3, 4], max_tokens=3)
    assert [output[11] for output in told.outputs] == [
        {
            "num_prompt_tokens": 4,
            "num_computed_tokens": 4,
            "num_cached_tokens": 0,
            "num_local_cached_tokens": 0,
            "num_external_cached_tokens": 0,
            "num_cache_creation_tokens": 0,
        },
        None,
        None,
    ]


def test_scheduler_stats(peer: Peer, start: StartEngine) -> None:
    """With statistics every step has them, one more follows the last, and events are told."""
    start(options={**MANUAL, "log_stats": True}, ready={"max_num_seqs": 1})
    peer.add("a", [1] * 20, options={"max_tokens": 2}, lora_request=["tuned", 1, "/p"])
    peer.add("b", [1], options={"max_tokens": 1})
    peer.ask("mock_step", 3)
    messages = [peer.outputs() for _ in range(3)]
    assert peer.reply()[2] == 3
    messages.append(peer.outputs())
    stats = [dict(message.scheduler_stats or {}) for message in messages]
    assert [len(one) for one in stats] == [18] * 4
    counts = [(one["num_running_reqs"], one["num_waiting_reqs"]) for one in stats]
    assert counts == [(1, 1), (0, 1), (0, 0), (0, 0)]
    assert [one["kv_cache_usage"] for one in stats] == [2 / 1000, 0, 0, 0]
    assert [one["prefix_cache_stats"]["queries"] for one in stats] == [20, 0, 1, 0]
    assert stats[0]["running_lora_adapters"] == {"tuned": 1}
    assert [len(message.outputs) for message in messages] == [1, 1, 1, 0]
    first, second = messages[0].outputs[0], messages[1].outputs[0]
    assert [event["type"] for event in first[7]] == [1, 2]
    assert second[7] is None
    assert peer.call("echo", 1) == 1
    assert peer.hears_nothing()


def test_preemption_is_an_event(peer: Peer, start: StartEngine) -> None:
    """A request that lost its blocks says so."""
    start(options={**MANUAL, "log_stats": True})
    peer.add("a", [1], options={"max_tokens": 2})
    step(peer)
    assert peer.call("reset_prefix_cache", True) is True
    (output,) = step(peer)
    assert [event["type"] for event in output[7]] == [3, 2]


def array(peer: Peer, value: list[Any], extra: list[bytes]) -> tuple[str, list[int], list[Any]]:
    """Read an array of a message."""
    dtype, shape, data = value
    if type(data) is int:
        assert len(extra[data - 1]) >= 256
        data = extra[data - 1]
    else:
        assert len(data) < 256
    kind = {"<i4": "i", "<f4": "f", "<i8": "q", "int32": "i", "float32": "f"}[dtype]
    return dtype, shape, list(struct.unpack(f"<{len(data) // struct.calcsize(kind)}{kind}", data))


@pytest.mark.parametrize(("count", "frames"), [(0, 0), (3, 0), (63, 2), (-1, 2)])
def test_logprobs(peer: Peer, start: StartEngine, count: int, frames: int) -> None:
    """Three arrays, in the message below 256 bytes and behind it from there on."""
    start()
    peer.add("r", [1], options={"max_tokens": 1, "logprobs": count})
    message, extra = peer.message()
    assert len(extra) == frames
    (output,) = message.outputs
    ids, values, ranks, cumulative = output[2]
    expected_ids, expected_values, rank = top_logprobs(output[1][0], count)
    columns = 1 + (512 if count == -1 else count)
    assert len(expected_ids) == columns
    assert array(peer, ids, extra) == ("<i4", [1, columns], expected_ids)
    assert array(peer, values, extra) == ("<f4", [1, columns], expected_values)
    assert array(peer, ranks, extra) == ("<i8", [1], [rank])
    assert cumulative is None


def test_logprobs_of_given_tokens(peer: Peer, start: StartEngine) -> None:
    """The sampled token comes first, then those that were asked for."""
    start()
    peer.add("r", [1], options={"max_tokens": 1, "logprob_token_ids": [8, 9]})
    (output,) = peer.outputs().outputs
    ids, values, *_ = output[2]
    assert array(peer, ids, []) == ("<i4", [1, 3], [output[1][0], 8, 9])
    assert array(peer, values, [])[2] == [-0.5, -1.0, -1.5]


def test_arrays_of_several_requests(peer: Peer, start: StartEngine) -> None:
    """The frames of one message are numbered through."""
    start(options=MANUAL)
    for name in ("a", "b"):
        peer.add(name, [1], options={"logprobs": 100, "seed": ord(name)})
    peer.ask("mock_step")
    message, extra = peer.message()
    assert len(extra) == 4
    for output in message.outputs:
        ids = array(peer, output[2][0], extra)[2]
        assert ids == top_logprobs(output[1][0], 100)[0]
    peer.reply()


def test_prompt_logprobs(peer: Peer, start: StartEngine) -> None:
    """The first output has those of the prompt, without its first token."""
    start()
    prompt = list(range(100, 140))
    peer.add("r", prompt, options={"max_tokens": 2, "prompt_logprobs": 20})
    message, extra = peer.message()
    assert [len(frame) for frame in extra] == [3276, 3276]
    tensors = message.outputs[0][3]
    ids, values, ranks = prompt_logprobs(prompt, 20)
    assert array(peer, tensors[0], extra) == ("int32", [39, 21], ids)
    assert array(peer, tensors[1], extra) == ("float32", [39, 21], values)
    assert array(peer, tensors[2], extra) == ("int32", [39], ranks)
    assert tensors[3:] == [None, None]
    assert peer.outputs().outputs[0][3] is None


def test_prompt_logprobs_of_one_token(peer: Peer, start: StartEngine) -> None:
    """A prompt of one token has none."""
    start()
    peer.add("r", [1], options={"max_tokens": 1, "prompt_logprobs": 2})
    assert array(peer, peer.outputs().outputs[0][3][0], []) == ("int32", [0, 0], [])


# -- pooling ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "dimensions", "shape"),
    [
        ("embed", None, [8]),
        ("embed", 64, [64]),
        ("classify", None, [2]),
        ("token_embed", 4, [3, 4]),
        ("token_classify", None, [3, 2]),
    ],
)
def test_pooling(
    peer: Peer, start: StartEngine, task: str, dimensions: int | None, shape: list[int]
) -> None:
    """A pooling request is answered once, with a tensor and no tokens."""
    start(options={"supported_tasks": [task]})
    pooling = [None, dimensions, None, None, task, False, None, None, None, 2]
    peer.add("r", [4, 5, 6], sampling_params=None, pooling_params=pooling)
    message, extra = peer.message()
    (output,) = message.outputs
    assert output[1] == []
    assert output[5] == STOP
    assert len(extra) == (shape == [64])
    dtype, got_shape, values = array(peer, output[4], extra)
    assert (dtype, got_shape) == ("float32", shape)
    if len(shape) == 1:
        assert values == embed([4, 5, 6], shape[0])
    else:
        assert values == [one for token in (4, 5, 6) for one in embed([token], shape[1])]
    assert peer.call("echo", 1) == 1


# -- LoRA ------------------------------------------------------------------------------------------


def test_request_brings_its_adapter(peer: Peer, start: StartEngine) -> None:
    """An adapter that is not loaded is loaded on the way."""
    start()
    peer.add("r", [1], lora_request=["a", 7, "/p", None, False, False])
    assert run(peer, "r")["r"].tokens == generate_tokens([1], 16, lora_int_id=7)
    assert peer.call("list_loras") == [7]


def test_adapter_on_an_engine_without_lora(peer: Peer, start: StartEngine) -> None:
    """It is ignored without an error."""
    start(ready={"supports_lora": False})
    peer.add("r", [1], lora_request=["a", 7, "/missing"])
    assert run(peer, "r")["r"].finish == LENGTH


def test_removed_adapter_is_loaded_again(peer: Peer, start: StartEngine) -> None:
    """A running request gets its adapter back at its next step."""
    start(options=MANUAL)
    peer.add("r", [1], lora_request=["a", 7, "/p"])
    step(peer)
    assert peer.call("remove_lora", 7) is True
    assert peer.call("list_loras") == []
    step(peer)
    assert peer.call("list_loras") == [7]


# -- faults ----------------------------------------------------------------------------------------


def test_faults_on_outputs(peer: Peer, start: StartEngine) -> None:
    """What requests are told can be lost, doubled, spoilt, held and late."""
    faults = [
        FaultRule("OUTPUTS", "drop", occurrence=1),
        FaultRule("OUTPUTS", "duplicate", occurrence=2),
        FaultRule("OUTPUTS", "garbage", occurrence=3, data="ff"),
        FaultRule("OUTPUTS", "hold", occurrence=4),
        FaultRule("OUTPUTS", "busy", occurrence=5, seconds=0.01),
        FaultRule("OUTPUTS", "delay", occurrence=6, seconds=0.05),
    ]
    start(faults=faults, options=MANUAL)
    tokens = [[token] for token in generate_tokens([1], 6)]
    peer.add("r", [1], options={"max_tokens": 6})
    assert step(peer) == []
    assert [output[1] for output in step(peer)] == [tokens[1]] * 2
    peer.ask("mock_step")
    assert peer.output.recv() == b"\xff"
    peer.reply()
    assert step(peer) == []
    assert [output[1] for output in step(peer)] == [tokens[4]]
    assert step(peer) == []
    assert peer.outputs().outputs[0][1] == tokens[5]
    peer.ask("mock_release", "OUTPUTS")
    assert peer.outputs().outputs[0][1] == tokens[3]
    assert peer.reply()[2] == 1


@pytest.mark.parametrize("after_reply", [False, True])
def test_engine_ends_between_outputs(peer: Peer, start: StartEngine, after_reply: bool) -> None:
    """It can end just before or just after it has told something."""
    rule = FaultRule("OUTPUTS", "exit", occurrence=3, code=5, after_reply=after_reply)
    engine = start(faults=[rule])
    peer.add("r", [1])
    for _ in range(2 + after_reply):
        peer.outputs()
    assert engine.join(scaled(10))
    assert engine.exit_code == 5
    assert peer.hears_nothing()


def test_engine_falls_silent_between_outputs(peer: Peer, start: StartEngine) -> None:
    """Silent is silent."""
    engine = start(faults=[FaultRule("OUTPUTS", "stop_answering", occurrence=2)])
    peer.add("r", [1], options={"max_tokens": 4})
    peer.outputs()
    wait_until(lambda: not engine.model.scheduler.live)
    peer.ask("echo", 1)
    assert not peer.output.poll(20)


def test_deaf_engine_goes_on(peer: Peer, start: StartEngine) -> None:
    """What runs in an engine that has become deaf is still told."""
    start(faults=[FaultRule("OUTPUTS", "deaf", occurrence=1)])
    told = run_one(peer, [1], max_tokens=5)
    assert told.tokens == generate_tokens([1], 5)
    wait_until(lambda: not peer.reaches())


def test_faults_before_and_after_an_add(peer: Peer, start: StartEngine) -> None:
    """A rule can make the engine deaf before it runs the request, or behind it."""
    start(faults=[FaultRule("ADD", "deaf", after_reply=True)])
    assert run_one(peer, [1], max_tokens=2).finish == LENGTH
    wait_until(lambda: not peer.reaches())


def test_mute_engine_still_runs_requests(peer: Peer, start: StartEngine) -> None:
    """It takes them and tells nothing of them."""
    engine = start(faults=[FaultRule("ADD", "mute")], keep_log=False)
    peer.add("r", [1])
    peer.add("s", [1], options={"max_tokens": 3})
    wait_until(lambda: engine.model.scheduler.cache.requests == 2)
    wait_until(lambda: not engine.model.scheduler.live)
    assert peer.hears_nothing()


def test_dropped_abort(peer: Peer, start: StartEngine) -> None:
    """A lost abort leaves the request running."""
    start(faults=[FaultRule("ABORT", "drop")], options={"step_seconds": 0.001})
    peer.add("r", [1], options={"max_tokens": 5})
    peer.outputs()
    peer.abort("r")
    assert [peer.outputs().outputs[0][5] for _ in range(4)] == [None] * 3 + [LENGTH]
