"""Streams of requests: order, leaving early, isolation, routing, guard rails, batches."""

from __future__ import annotations

import gc
import logging
import pickle
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from engine_client import (
    ClientClosedError,
    DuplicateRequestError,
    EngineDeadError,
    EngineRequest,
    FinishReason,
    LoraRequest,
    PoolingParams,
    ReplyError,
    RequestRefusedError,
    RequestStream,
    SamplingParams,
    StreamAborted,
    StreamError,
    StreamOverflow,
    StreamTimeout,
    UtilityTimeoutError,
    generation,
)
from engine_client.tools.mock.tokens import embed, generate_tokens, top_logprobs
from tests.helpers import run_in_thread, scaled, wait_until
from tests.scenarios.stream_rig import ENDLESS, Served, served, tokens_of

SLOW = {"step_seconds": 0.002}
MANUAL = {"manual_steps": True}


@pytest.fixture(scope="module")
def shared_slow() -> Iterator[Served]:
    """An engine of each dialect whose steps take two milliseconds."""
    with served(options=SLOW) as made:
        yield made


@pytest.fixture
def slow(shared_slow: Served) -> Iterator[Served]:
    """The shared engines, with nothing running before and after."""
    yield shared_slow
    shared_slow.check()


@pytest.fixture(scope="module")
def shared_manual() -> Iterator[Served]:
    """An engine of each dialect that steps when told to."""
    with served(options=MANUAL) as made:
        yield made


@pytest.fixture
def manual(shared_manual: Served) -> Iterator[Served]:
    """The shared engines, with nothing running before and after."""
    yield shared_manual
    shared_manual.client.call_utility("mock_clear")
    shared_manual.check()


# -- outputs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
def test_tokens_in_order(slow: Served, rank: int) -> None:
    """In both dialects, one by one, with all that the first and the last output say."""
    stream = slow.call("r", [1, 2, 3], 50, data_parallel_rank=rank)
    outputs = list(stream)
    assert [t for o in outputs for t in o.new_token_ids] == generate_tokens([1, 2, 3], 50)
    assert [o.finish_reason for o in outputs] == [None] * 49 + [FinishReason.LENGTH]
    assert {o.request_id for o in outputs} == {stream.request_id} == {"r"}
    assert {o.engine for o in outputs} == {stream.engine} == {rank}
    assert {o.weight_version for o in outputs} == {"default"}
    assert outputs[0].prefill_stats is not None
    assert outputs[0].prefill_stats["num_prompt_tokens"] == 3
    assert [o.timestamp for o in outputs] == sorted(o.timestamp for o in outputs)
    assert stream.finish_reason is FinishReason.LENGTH
    with pytest.raises(StopIteration):
        next(stream)
    with pytest.raises(StreamError, match="has ended"):
        stream.recv()


@pytest.mark.parametrize("rank", [0, 1])
def test_sampling_parameters_arrive(slow: Served, rank: int) -> None:
    """Seed, stop token, EOS and logprobs do on the engine what they say."""
    client = slow.client
    expected = generate_tokens([5], 40, seed=4)

    def run(**options: Any) -> RequestStream:
        return client.call(
            EngineRequest("r", [5], SamplingParams(seed=4, **options), data_parallel_rank=rank)
        )

    with run(max_tokens=40, stop_token_ids=[expected[6]]) as stream:
        assert tokens_of(stream) == expected[: expected.index(expected[6]) + 1]
        assert stream.finish_reason is FinishReason.STOP
    with run(max_tokens=40, eos_token_id=expected[3]) as stream:
        outputs = list(stream)
        assert len(outputs) == expected.index(expected[3]) + 1
        assert outputs[-1].stop_reason is None
    with run(max_tokens=2, logprobs=100) as stream:
        for token, output in zip(expected, stream, strict=False):
            found = output.new_logprobs
            assert found is not None
            ids, values, taken = top_logprobs(token, 100)
            assert found.token_ids.tolist() == [ids]
            assert found.logprobs.tolist() == [values]
            assert found.ranks.tolist() == [taken]


def test_twelve_threads_of_streams_while_utility_calls_run(slow: Served) -> None:
    """Every stream has its own tokens, every call its own answer."""
    done = threading.Event()

    def read(number: int) -> None:
        for turn in range(4):
            prompt = [number, turn]
            stream = slow.call(f"r-{number}", prompt, 12)
            assert tokens_of(stream) == generate_tokens(prompt, 12)

    def ask() -> int:
        asked = 0
        while not done.is_set():
            assert slow.client.call_utility("echo", asked) == [asked, asked]
            asked += 1
        return asked

    asking = [run_in_thread(ask) for _ in range(2)]
    for reading in [run_in_thread(read, number) for number in range(12)]:
        reading.result(30)
    done.set()
    assert all(call.result() > 0 for call in asking)


def test_a_stream_may_be_handed_from_thread_to_thread(manual: Served) -> None:
    """But two threads cannot read it at once; the second is told so and the first goes on."""
    stream = manual.call("r", count=3)
    first = run_in_thread(stream.recv)
    wait_until(lambda: stream._consumer is not None, what="the first reader")
    with pytest.raises(RuntimeError, match="one consumer at a time"):
        next(stream)
    manual.step(2)
    expected = generate_tokens([1, 2, 3], 3)
    assert first.result().new_token_ids == expected[:1]
    assert stream.recv().new_token_ids == expected[1:2]
    manual.step()
    assert run_in_thread(next, stream).result().new_token_ids == expected[2:]


def test_a_timeout_leaves_the_stream_going(manual: Served) -> None:
    """Nothing is lost; 0 takes what is there."""
    stream = manual.call("r", count=2)
    for seconds in (0, 0.01):
        with pytest.raises(StreamTimeout, match="the stream goes on") as caught:
            stream.recv(timeout=seconds)
        assert isinstance(caught.value, TimeoutError)
        assert (caught.value.request_id, caught.value.engine) == ("r", stream.engine)
    manual.step(2)
    assert stream.recv(timeout=0).new_token_ids == generate_tokens([1, 2, 3], 1)
    assert stream.recv(timeout=None).finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("bad", [-1, float("nan"), True, "1"])
def test_a_bad_timeout_is_refused(manual: Served, bad: Any) -> None:
    """And nothing is taken out of the stream."""
    with manual.call("r") as stream:
        manual.step()
        with pytest.raises((TypeError, ValueError)):
            stream.recv(timeout=bad)
        assert stream.recv(timeout=0).new_token_ids


def test_pooling(slow: Served) -> None:
    """A pooled prompt is one output with a vector; what an engine cannot do is refused."""
    with served(("cbor",), options={"supported_tasks": ["generate", "embed"]}) as made:
        request = EngineRequest(
            "p", [1, 2], pooling_params=PoolingParams(task="embed", dimensions=70)
        )
        (output,) = made.client.call(request)
        assert output.pooling_output is not None
        assert output.pooling_output.tolist() == embed([1, 2], 70)
        with pytest.raises(RequestRefusedError, match="does not do 'classify'"):
            made.client.call(EngineRequest("q", [1], pooling_params=PoolingParams(task="classify")))
        made.check()
    with pytest.raises(RequestRefusedError, match="does not do 'embed'"):
        slow.client.call(request)


# -- leaving early ---------------------------------------------------------------------------------


def by_close(made: Served, name: str) -> object:
    stream = made.call(name)
    next(stream)
    stream.close()
    stream.close()
    with pytest.raises(StreamAborted):
        stream.recv()
    return stream


def by_with(made: Served, name: str) -> object:
    with made.call(name) as stream:
        next(stream)
    return stream


def by_break(made: Served, name: str) -> None:
    for output in made.call(name):
        assert output.new_token_ids
        break


def by_del(made: Served, name: str) -> None:
    stream = made.call(name)
    next(stream)
    del stream


def by_abort(made: Served, name: str) -> object:
    stream = made.call(name)
    next(stream)
    stream.abort()
    stream.abort()
    ends = [output.finish_reason for output in stream]
    assert ends[-1] is stream.finish_reason is FinishReason.ABORT
    return stream


def by_client_abort(made: Served, name: str) -> None:
    stream = made.call(name)
    next(stream)
    made.client.abort(name, "unknown", name, confirm=True)
    assert made.live() == 0
    list(stream)
    assert stream.finish_reason is FinishReason.ABORT


def by_abort_all(made: Served, name: str) -> None:
    stream = made.call(name)
    next(stream)
    made.client.abort_all()
    made.client.abort(name)
    list(stream)
    assert stream.finish_reason is FinishReason.ABORT


def by_exception(made: Served, name: str) -> object:
    with pytest.raises(ZeroDivisionError), made.call(name) as stream:  # noqa: PT012
        for _ in stream:
            raise ZeroDivisionError
    return stream


def by_cycle(made: Served, name: str) -> None:
    holder: list[Any] = [made.call(name)]
    next(holder[0])
    holder.append(holder)
    del holder
    gc.collect()


WAYS = [
    by_close,
    by_with,
    by_break,
    by_del,
    by_abort,
    by_client_abort,
    by_abort_all,
    by_exception,
    by_cycle,
]


@pytest.mark.parametrize("way", WAYS)
def test_each_way_of_leaving_sends_one_abort_at_once(
    slow: Served, way: Callable[[Served, str], object]
) -> None:
    """Exactly one, within 0.2 s, to the engine that has the request; it works no more on it.

    Where it is left by more than being dropped, the stream is still held meanwhile.
    """
    delays = []
    for number in range(5):
        name = f"{way.__name__}-{number}-{time.monotonic_ns()}"
        held = way(slow, name)
        left = time.monotonic()
        wait_until(lambda name=name: name in slow.aborted(), what="the abort")  # type: ignore[misc]
        slow.sync()
        assert slow.live() == 0
        told = [at for index in (0, 1) for at, ids in slow.aborts(index) for i in ids if i == name]
        assert len(told) == 1
        delays.append(told[0] - left)
        del held
    assert statistics.median(delays) < scaled(0.2)


def test_a_finished_stream_sends_nothing(slow: Served) -> None:
    """Read to its end or not, closed or not, aborted by id or not."""
    before = slow.aborted()
    read = slow.call("read", count=2)
    list(read)
    read.close()
    with slow.call("in-with", count=2) as stream:
        list(stream)
    unread = slow.call("unread", count=2)
    wait_until(lambda: slow.client.active_requests == 0, what="the last output")
    unread.close()
    with pytest.raises(StreamAborted):
        unread.recv()
    dropped = slow.call("dropped", count=2)
    wait_until(lambda: slow.client.active_requests == 0, what="the last output")
    dropped.abort()
    del dropped
    slow.client.abort("read", "unread", confirm=True)
    slow.client.abort()
    slow.sync()
    assert slow.aborted() == before


def test_an_abort_that_nobody_confirms_is_an_error(slow: Served) -> None:
    """It says which engine did not answer; the stream has ended all the same."""
    stream = slow.call("unconfirmed")
    next(stream)
    slow.client.call_utility("mock_fault", {"method": "is_sleeping", "do": "drop"})
    try:
        with pytest.raises(UtilityTimeoutError) as info:
            slow.client.abort("unconfirmed", confirm=True, timeout=0.05)
    finally:
        slow.client.call_utility("mock_clear")
    assert info.value.outcomes.unsettled == (stream.engine,)
    assert list(stream)[-1].finish_reason is FinishReason.ABORT


def test_what_was_received_before_an_abort_can_be_read(manual: Served) -> None:
    """The ABORT is the last output, behind the tokens; a late output is counted and dropped."""
    late = manual.client.stats.late_outputs
    stream = manual.call("r")
    manual.step(2)
    manual.client.call_utility("mock_fault", {"method": "ABORT", "do": "drop"})
    manual.client.abort("r")
    manual.step(2)
    outputs = list(stream)
    assert [t for o in outputs for t in o.new_token_ids] == generate_tokens([1, 2, 3], 2)
    assert outputs[-1].finish_reason is FinishReason.ABORT
    assert manual.client.stats.late_outputs == late + 2
    manual.client.call_utility("pause_scheduler", "abort")
    manual.client.call_utility("resume_scheduler")


def test_aborts_are_coalesced(manual: Served) -> None:
    """One message for each engine, however many requests of it are aborted together."""
    streams = [manual.call(f"r{n}") for n in range(20)]
    manual.sync()  # what has not been sent is never sent, instead of being aborted
    before = [len(manual.aborts(index)) for index in (0, 1)]
    manual.client.abort(*(stream.request_id for stream in streams), confirm=True)
    for index in (0, 1):
        (told,) = manual.aborts(index)[before[index] :]
        assert len(told[1]) == 10
    assert [list(s)[-1].finish_reason for s in streams] == [FinishReason.ABORT] * 20


def test_an_abort_never_overtakes_its_add(slow: Served) -> None:
    """Left at once, from many threads: the engine sees both in order, or neither."""

    def leave(number: int) -> None:
        for turn in range(40):
            slow.call(f"o-{number}-{turn}").close()

    for leaving in [run_in_thread(leave, number) for number in range(4)]:
        leaving.result(30)
    slow.sync()
    for engine in slow.engines:
        seen: set[str] = set()
        for entry in engine.log:
            if entry.type == "ADD":
                seen.add(entry.args[0])
            elif entry.type == "ABORT":
                assert set(entry.args) <= seen
    assert slow.live() == 0


def test_rounds_of_abort_and_reuse_of_one_id(slow: Served, request: pytest.FixtureRequest) -> None:
    """With engines in the middle of a step, no output of an old round reaches a new one."""
    for number in range(1000 if request.config.getoption("--long") else 100):
        prompt = [number % 500, number // 500]
        stream = slow.call("same", prompt)
        output = stream.recv()
        assert output.new_token_ids == generate_tokens(prompt, 1)
        if number % 2:
            stream.close()
        else:
            slow.client.abort("same")


def test_closing_from_another_thread_wakes_the_reader(manual: Served) -> None:
    """It gets a last output; nobody waits for what will not come."""
    stream = manual.call("r")
    reading = run_in_thread(lambda: list(stream))
    wait_until(lambda: stream._consumer is not None, what="the reader")
    stream.close()
    (output,) = reading.result()
    assert output.finish_reason is FinishReason.ABORT


def test_streams_in_cycles_are_collected(slow: Served) -> None:
    """In threads that allocate all the time, finalizers run under any lock and none blocks."""

    def churn(number: int) -> None:
        for turn in range(15):
            holder: dict[str, Any] = {"stream": slow.call(f"c-{number}-{turn}")}
            holder["self"] = holder
            next(holder["stream"])
            del holder
            slow.client.call_utility("echo", [[turn] for _ in range(200)])

    threshold = gc.get_threshold()
    gc.set_threshold(50, 2, 2)
    try:
        for churning in [run_in_thread(churn, number) for number in range(4)]:
            churning.result(30)
    finally:
        gc.set_threshold(*threshold)
    gc.collect()


# -- ids -------------------------------------------------------------------------------------------


def test_a_live_id_is_refused_and_the_first_is_not_disturbed(manual: Served) -> None:
    """Also when it would go to another engine; afterwards it is free."""
    first = manual.call("same", count=2, data_parallel_rank=0)
    for rank in (0, 1):
        with pytest.raises(DuplicateRequestError, match="'same' is in use"):
            manual.call("same", data_parallel_rank=rank)
    manual.step(2)
    assert tokens_of(first) == generate_tokens([1, 2, 3], 2)
    third = manual.call("same", [4], 1)
    manual.step()
    assert tokens_of(third) == generate_tokens([4], 1)


def test_pending_shows_requests_and_calls(manual: Served) -> None:
    """What is outstanding, oldest first, with the engine."""
    manual.client.call_utility("mock_fault", {"method": "echo", "do": "hold"}, engines=[1])
    stream = manual.call("r", data_parallel_rank=0)
    call = run_in_thread(manual.client.call_utility, "echo", 1, engines=[1])
    wait_until(lambda: len(manual.client.pending()) == 2, what="both")
    found = [(one.kind, one.name, one.engine) for one in manual.client.pending()]
    assert found == [("request", "r", 0), ("call", "echo", 1)]
    manual.client.call_utility("mock_release", engines=[1])
    assert call.result() == [1]
    stream.close()
    assert manual.client.pending() == []


# -- isolation -------------------------------------------------------------------------------------


def test_a_slow_consumer_loses_its_stream_and_no_other() -> None:
    """It reads what it has, then says how many lay unread; its request is aborted."""
    with served(("cbor",), options=MANUAL, max_pending_outputs=10) as made:
        lazy, eager = made.call("lazy"), made.call("eager")
        expected = generate_tokens([1, 2, 3], 15)
        for number in range(15):
            made.step()
            assert eager.recv(timeout=scaled(10)).new_token_ids == expected[number : number + 1]
        wait_until(lambda: made.aborted() == ["lazy"], what="the abort")
        got: list[int] = []
        for _ in range(10):
            got += next(lazy).new_token_ids
        with pytest.raises(StreamOverflow, match=r"10 outputs lay unread \(max_pending_outputs\)"):
            next(lazy)
        assert got == expected[:10]
        assert lazy.finish_reason is None
        with pytest.raises(StopIteration):
            next(lazy)
        eager.close()
        made.check()


def test_the_death_of_one_engine_ends_its_streams_only() -> None:
    """They keep what came before; the others do not notice."""
    with served(options=SLOW) as made:
        doomed = [made.call(f"d{n}", data_parallel_rank=1) for n in range(6)]
        others = [made.call(f"o{n}", count=100, data_parallel_rank=0) for n in range(6)]
        for stream in doomed:
            stream.recv()
        made.client.call_utility("mock_fault", {"method": "OUTPUTS", "do": "die"}, engines=[1])
        for stream in doomed:
            got: list[int] = []
            died = f"engine 1 died before it finished request {stream.request_id!r}"
            with pytest.raises(EngineDeadError, match=died) as caught:
                got.extend(token for output in stream for token in output.new_token_ids)
            assert caught.value.may_have_run
            assert got == generate_tokens([1, 2, 3], 1 + len(got))[1:]
        for stream in others:
            assert tokens_of(stream) == generate_tokens([1, 2, 3], 100)
        assert [made.call(f"n{n}", count=1).engine for n in range(3)] == [0, 0, 0]
        with pytest.raises(EngineDeadError, match="engine 1 is dead"):
            made.call("dead", data_parallel_rank=1)
        wait_until(lambda: made.client.active_requests == 0, what="the end of all")


@pytest.mark.parametrize("data", ["ff", "", "8301", "990190"])
def test_garbage_ends_what_it_may_have_been_for(manual: Served, data: str) -> None:
    """The engine's own streams; they keep what came before, and are aborted; others go on."""
    mine, other = manual.call("mine", data_parallel_rank=1), manual.call("o", data_parallel_rank=0)
    manual.step()
    rule = {"method": "OUTPUTS", "do": "garbage", "data": data, "occurrence": 1}
    manual.client.call_utility("mock_fault", rule, engines=[1])
    manual.client.settle_utility("mock_step", 1, engines=[1])
    assert mine.recv().new_token_ids == generate_tokens([1, 2, 3], 1)
    with pytest.raises(ReplyError, match="may have been an output of request 'mine'"):
        mine.recv()
    wait_until(lambda: "mine" in manual.aborted(), what="the abort")
    manual.step(engines=[0])
    other.recv()
    assert other.recv(timeout=scaled(10)).new_token_ids
    other.close()


def test_a_request_that_the_engine_cannot_run_ends_with_an_error_reason(manual: Served) -> None:
    """Others and the engine go on."""
    grammar = {"regex": "a+", "_backend": "unheard of"}
    bad = SamplingParams(structured_outputs=grammar)
    (output,) = manual.client.call(EngineRequest("bad", [1], bad))
    assert output.finish_reason is FinishReason.ERROR


def test_an_engine_that_names_a_request_finished_without_a_last_output() -> None:
    """As engines with a coordinator do after an abort by another: the stream ends with an error."""
    with served(("cbor",), options={**MANUAL, "coordinated": True}) as made:
        stream = made.call("r")
        made.step()
        (wire_id,) = made.engines[0].model.scheduler.live
        made.engines[0].model.scheduler.abort([wire_id])
        made.step()
        assert stream.recv().new_token_ids == generate_tokens([1, 2, 3], 1)
        with pytest.raises(StreamError, match="finished request 'r' without a last output"):
            stream.recv()
        made.check()


@pytest.mark.parametrize("method", ["pause_scheduler", "sleep"])
def test_a_pause_ends_streams_with_abort(manual: Served, method: str) -> None:
    """The engine says so itself; nothing is sent back."""
    before = manual.aborted()
    streams = [manual.call(f"r{n}") for n in range(2)]
    manual.step()
    getattr(manual.client, method)()
    for stream in streams:
        assert [o.finish_reason for o in stream] == [None, FinishReason.ABORT]
    manual.client.wake_up()
    manual.client.resume_scheduler()
    assert manual.aborted() == before


def test_closing_the_client_ends_streams_and_says_which() -> None:
    """What came before can be read; engines are told, once each."""
    with served(options=MANUAL) as made:
        streams = [made.call(f"r{n}") for n in range(4)]
        made.step()
        waiting = run_in_thread(lambda: [list(streams[0])])
        wait_until(lambda: not streams[0]._items, what="the reader")
        made.client.close()
        error = waiting.error()
        assert isinstance(error, ClientClosedError)
        assert str(error) == "the client was closed before request 'r0' was finished"
        for number, stream in enumerate(streams[1:], 1):
            assert next(stream).new_token_ids == generate_tokens([1, 2, 3], 1)
            with pytest.raises(ClientClosedError, match=f"before request 'r{number}' was finished"):
                next(stream)
            stream.close()
        assert made.aborted() == [f"r{n}" for n in range(4)]
        with pytest.raises(ClientClosedError):
            made.call("late")
        with pytest.raises(ClientClosedError):
            made.client.generate([[1]])


# -- routing ---------------------------------------------------------------------------------------


def test_requests_go_to_the_least_loaded_engine(manual: Served) -> None:
    """By what is in flight; a rank wins; what does not exist is refused."""
    streams = [manual.call(f"r{n}", data_parallel_rank=0) for n in range(3)]
    streams += [manual.call(f"s{n}") for n in range(4)]
    assert [stream.engine for stream in streams] == [0, 0, 0, 1, 1, 1, 0]
    with pytest.raises(RequestRefusedError, match="data_parallel_rank 2"):
        manual.call("unknown", data_parallel_rank=2)
    manual.client.abort_all()


def test_what_engines_report_counts() -> None:
    """An engine on which others' requests wait gets fewer of ours."""
    options = {**MANUAL, "log_stats": True}
    with served(options=options, ready={"max_num_seqs": 1}) as made:
        streams = [made.call(f"r{n}", data_parallel_rank=0) for n in range(2)]
        made.step()
        # Engine 0 reports one that runs and one that waits: 2 + 3 * 1.
        streams += [made.call(f"s{n}") for n in range(6)]
        assert [stream.engine for stream in streams[2:]] == [1, 1, 1, 1, 1, 0]
        made.client.abort_all()
        made.check()


# -- guard rails -----------------------------------------------------------------------------------

RAILS: dict[str, Callable[[Served], object]] = {
    "empty prompt": lambda made: made.call("r", []),
    "long prompt": lambda made: made.call("r", [1] * 2048),
    "negative token": lambda made: made.call("r", [-1]),
    "token beyond 64 bits": lambda made: made.call("r", [2**64]),
    "bad sampling value": lambda made: SamplingParams(top_p=0),
    "no max_tokens": lambda made: SamplingParams(max_tokens=None),  # type: ignore[arg-type]
    "both parameters": lambda made: made.call("r", pooling_params=PoolingParams(task="embed")),
    "adapter id 0": lambda made: LoraRequest("a", 0, "/p"),
    "adapter without path": lambda made: LoraRequest("a", 1, ""),
    "adapter not loaded": lambda made: made.call("r", lora_request=LoraRequest("a", 1, "/p")),
    "unknown pooling task": lambda made: PoolingParams(task="dance"),
    "resumable": lambda made: made.call("r", resumable=True),
    "unsupported task": lambda made: made.client.call(
        EngineRequest("r", [1], pooling_params=PoolingParams(task="embed"))
    ),
    "wrong type": lambda made: made.call("r", trace_headers={"a": 1}),
}


@pytest.mark.parametrize("rail", RAILS)
def test_guard_rail(slow: Served, rail: str) -> None:
    """It is refused here, nothing is sent, and both engines live."""
    sent = slow.client.stats.requests
    with pytest.raises((RequestRefusedError, TypeError)):
        RAILS[rail](slow)
    assert slow.client.stats.requests == sent
    slow.sync()
    assert [info.alive for info in slow.client.engines] == [True, True]


def test_integers_beyond_64_bits_in_extra_args_are_refused(slow: Served) -> None:
    """The text names where it is; nothing is sent."""
    params = SamplingParams(extra_args={"kv": [2**65]})
    with pytest.raises(TypeError, match=r"\['extra_args'\]\['kv'\]\[0\]"):
        slow.client.call(EngineRequest("r", [1], params))


def test_a_lora_request_where_there_is_no_support() -> None:
    """An engine that was started without it is not asked."""
    with served(("cbor",), ready={"supports_lora": False}) as made:
        with pytest.raises(RequestRefusedError, match="without LoRA support"):
            made.call("r", lora_request=LoraRequest("a", 1, "/p"), allow_unloaded_lora=True)
        made.check()


def test_a_loaded_adapter_may_be_used(slow: Served) -> None:
    """After add_lora(), and no more after remove_lora()."""
    adapter = LoraRequest("a", 5, "/p")
    slow.client.add_lora(adapter)
    stream = slow.call("r", [1], 3, lora_request=adapter)
    assert tokens_of(stream) == generate_tokens([1], 3, lora_int_id=5)
    slow.client.remove_lora(5)
    with pytest.raises(RequestRefusedError, match="has not loaded adapter 5"):
        slow.call("r", lora_request=adapter)


KILLERS: dict[str, dict[str, Any]] = {
    "empty prompt": {"prompt": []},
    "long prompt": {"prompt": [1] * 2048},
    "token beyond the vocabulary": {"prompt": [512]},
    "bad sampling value": {"params": {"top_p": 0}},
    "unsupported task": {"pooling": [None] * 4 + ["embed", False, None, None, None, 2]},
    "wrong type": {"headers": {"a": 1}},
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("killer", KILLERS)
def test_without_the_guard_the_engine_is_lost(killer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused above ends or deafens the reference engine, as it does a real one."""
    what = KILLERS[killer]
    real = EngineRequest.to_plain

    def unguarded(self: EngineRequest, *args: Any, **keywords: Any) -> list[Any]:
        record = real(self, *args, **keywords)
        record[1] = what.get("prompt", record[1])
        record[3] = None if "pooling" in what else what.get("params", record[3])
        record[4] = what.get("pooling")
        record[14] = what.get("headers")
        return record

    with served(("cbor",)) as made:
        monkeypatch.setattr(EngineRequest, "to_plain", unguarded)
        stream = made.call("r")
        with pytest.raises(EngineDeadError):
            list(stream)
        assert [info.alive for info in made.client.engines] == [False]


# -- batches ---------------------------------------------------------------------------------------


def test_a_batch_is_in_the_order_of_its_prompts(slow: Served) -> None:
    """Over both engines, with parameters for each, whatever ends first."""
    prompts = [[number, 7] for number in range(40)]
    params = [SamplingParams(max_tokens=1 + number * 7 % 20) for number in range(40)]
    done = slow.client.generate(prompts, params)
    for prompt, param, completion in zip(prompts, params, done, strict=True):
        assert completion.token_ids == generate_tokens(prompt, param.max_tokens)
        assert completion.finish_reason is FinishReason.LENGTH
        assert completion.error is None
    assert {completion.engine for completion in done} == {0, 1}
    assert slow.client.generate([]) == []


def test_one_refused_prompt_does_not_stop_the_others(slow: Served) -> None:
    """Its completion has the error, and an error of the engine is a finish reason."""
    prompts = [[1], [1] * 3000, [2]]
    bad = SamplingParams(structured_outputs={"regex": "a", "_backend": "unheard of"})
    done = slow.client.generate([*prompts, [3]], [SamplingParams()] * 3 + [bad])
    assert [type(one.error) for one in done] == [type(None), RequestRefusedError, *[type(None)] * 2]
    assert [len(one.token_ids) for one in done] == [16, 0, 16, 0]
    assert done[3].finish_reason is FinishReason.ERROR


def test_an_engine_that_dies_in_a_batch(caplog: pytest.LogCaptureFixture) -> None:
    """Its items have the error and the tokens that came before; the rest is done by the other."""
    with served(options=SLOW) as made:
        rule = {"method": "OUTPUTS", "do": "die", "occurrence": 5}
        made.client.call_utility("mock_fault", rule, engines=[1])
        prompts = [[number] for number in range(30)]
        done = made.client.generate(prompts, SamplingParams(max_tokens=20), max_in_flight=8)
        failed = [one for one in done if one.error is not None]
        assert 1 <= len(failed) <= 8
        for prompt, one in zip(prompts, done, strict=True):
            if one.error is None:
                assert one.token_ids == generate_tokens(prompt, 20)
            else:
                assert isinstance(one.error, EngineDeadError)
                assert one.engine == 1
                assert one.token_ids == generate_tokens(prompt, 20)[: len(one.token_ids)]
        assert any(one.token_ids for one in failed)
        assert made.client.active_requests == 0


def test_max_in_flight_is_kept(slow: Served) -> None:
    """No more requests than that are live at once."""
    most = 0
    done = threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.is_set():
            most = max(most, slow.client.active_requests)

    watching = run_in_thread(watch)
    slow.client.generate([[n] for n in range(20)], SamplingParams(max_tokens=5), max_in_flight=3)
    done.set()
    watching.result()
    assert 1 <= most <= 3
    with pytest.raises(ValueError, match="max_in_flight"):
        slow.client.generate([[1]], max_in_flight=0)


def test_a_batch_has_one_time_limit(manual: Served) -> None:
    """What is not finished then is aborted and has a StreamTimeout, with its tokens."""
    began = time.monotonic()
    done = manual.client.generate([[1], [2], [3]], timeout=0.1, max_in_flight=2)
    assert time.monotonic() - began < scaled(5)
    assert [type(one.error) for one in done] == [StreamTimeout] * 3
    assert [one.engine for one in done] == [0, 1, None]
    manual.sync()
    assert manual.live() == 0
    assert all("within 0.1 s" in str(one.error) for one in done)


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ((["text"],), RequestRefusedError),
        (("text",), TypeError),
        (([1, 2],), TypeError),
        (([[1]], [SamplingParams()] * 2), ValueError),
        (([[]],), RequestRefusedError),
        (([["a"]],), RequestRefusedError),
    ],
)
def test_a_batch_that_cannot_be_meant_is_refused(
    slow: Served, arguments: Any, kind: type[Exception]
) -> None:
    """Before anything is sent."""
    with pytest.raises(kind):
        slow.client.generate(*arguments)
    assert slow.client.active_requests == 0


def test_closing_during_a_batch_ends_it() -> None:
    """Every item has what came, and why no more."""
    with served(options=MANUAL) as made:
        batch = run_in_thread(made.client.generate, [[n] for n in range(6)], max_in_flight=4)
        wait_until(lambda: made.client.active_requests == 4, what="the batch")
        made.step()
        made.client.close()
        done = batch.result()
        assert [type(one.error) for one in done] == [ClientClosedError] * 6
        assert "before request 'generate-" in str(done[0].error)
        pickle.loads(pickle.dumps(done))


def test_progress_without_tqdm_is_a_log_line(
    slow: Served, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one says that all is done."""
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    monkeypatch.setattr(generation, "PROGRESS_INTERVAL", 0.005)
    with caplog.at_level(logging.INFO, "engine_client"):
        slow.client.generate([[1], [2], [3]], progress=True)
    lines = [record.getMessage() for record in caplog.records if "prompts" in record.getMessage()]
    assert len(lines) > 1
    assert lines[-1] == "generate: 3 of 3 prompts finished"


def test_progress_with_tqdm_is_a_bar(slow: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts to its end and is closed."""
    events: list[Any] = []

    class Bar:
        def __init__(self, *, total: int, unit: str) -> None:
            events.append(total)

        def update(self, done: int) -> None:
            events.append(done)

        def close(self) -> None:
            events.append("closed")

    class Module:
        tqdm = Bar

    monkeypatch.setitem(sys.modules, "tqdm.auto", Module)
    slow.client.generate([[1], [2]], progress=True)
    assert (events[0], sum(events[1:-1]), events[-1]) == (2, 2, "closed")


def test_endless_is_endless() -> None:
    """The tests above rely on requests that do not end by themselves before they are aborted."""
    assert ENDLESS < 2048
