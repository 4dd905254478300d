"""The table of requests alone: routing, delivery, and every way in which a request leaves it."""

from __future__ import annotations

import itertools
import sys
import time
from collections import deque
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine_client.deadline import Deadline
from engine_client.dispatch.registry import EngineRecord, Registry
from engine_client.dispatch.requests import Delivery, PendingRequest, RequestTable
from engine_client.dispatch.waiting import Latch, Mailbox
from engine_client.errors import (
    ClientClosedError,
    DuplicateRequestError,
    EngineDeadError,
    NotSentError,
    ReplyError,
    RequestRefusedError,
    StreamError,
    StreamOverflow,
)
from engine_client.output import FinishReason
from engine_client.wire.messages import Outputs
from tests.helpers import run_in_thread

NOW = 10.0
LIMIT = 4
_numbers = itertools.count(1)


def fit(engine: EngineRecord) -> str | None:
    """Every engine can take every request."""
    return None


def table(*indices: int, limit: int = 1000) -> RequestTable:
    """Return the table of a client of living engines."""
    registry = Registry(indices or (0,), limit)
    for index in indices or (0,):
        registry.register_engine(index, "cbor", {}, NOW)
    return RequestTable(registry, LIMIT)


def pending(request_id: str = "r", size: int = 1) -> PendingRequest:
    """Return a request that is not registered yet."""
    wire_id = f"{request_id}-{next(_numbers):08x}"
    return PendingRequest(request_id, wire_id, {"cbor": [b"x" * size]}, NOW)


def added(requests: RequestTable, request_id: str = "r", rank: int | None = None) -> PendingRequest:
    """Return a request that is registered, and was sent."""
    request = pending(request_id)
    assert requests.add(request, rank, fit)
    request.sent = True
    return request


def record(request: PendingRequest, *tokens: int, finish: int | None = None) -> list[Any]:
    """Return one output."""
    return [request.wire_id, list(tokens), None, None, None, finish]


def message(*records: Any, engine: int = 0, **fields: Any) -> Outputs:
    return Outputs(engine_index=engine, outputs=records, **fields)


def tokens(request: PendingRequest) -> list[int]:
    """Take everything out of the mailbox that is no error."""
    found = []
    while request.mailbox.items and request.mailbox.items[0].error is None:
        found += request.mailbox.items.popleft().record[1]
        request.taken += 1
    return found


def error(request: PendingRequest) -> BaseException:
    """Return the error in which the request ended, and check that nothing follows it."""
    (last,) = request.mailbox.items
    assert last.error is not None
    return last.error


# -- routing ---------------------------------------------------------------------------------------


def test_the_least_loaded_engine_is_chosen_and_the_lowest_of_equals() -> None:
    """Requests in flight count until the engines report their queues."""
    requests = table(0, 1, 2)
    assert [added(requests, f"r{n}").engine for n in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_reports_of_the_engines_count() -> None:
    """The larger of what is in flight and what is reported, and three for each that waits."""
    requests = table(0, 1)
    requests.deliver(message(scheduler_stats={"num_running_reqs": 3, "num_waiting_reqs": 0}), (), 1)
    assert [added(requests, f"a{n}").engine for n in range(4)] == [1, 1, 1, 0]
    stats = {"num_running_reqs": 1, "num_waiting_reqs": 2}
    requests.deliver(message(engine=1, scheduler_stats=stats), (), 1)
    assert [added(requests, f"b{n}").engine for n in range(3)] == [0, 0, 0]
    # Engine 1 counts for 9: 3 reported, 2 of them waiting.
    assert [added(requests, f"c{n}").engine for n in range(7)] == [0, 0, 0, 0, 0, 0, 1]


@pytest.mark.parametrize(
    "stats", [{}, {"num_running_reqs": "3", "num_waiting_reqs": 1}, {"num_running_reqs": 3}]
)
def test_statistics_of_another_form_are_ignored(stats: dict[str, Any]) -> None:
    """An engine may report what it likes."""
    requests = table(0, 1)
    requests.deliver(message(scheduler_stats=stats), (), 1)
    assert added(requests).engine == 0


def test_a_rank_wins() -> None:
    """However busy the engine is."""
    requests = table(0, 1)
    assert {added(requests, f"r{n}", rank=1).engine for n in range(5)} == {1}


def test_an_unknown_rank_is_refused() -> None:
    """The text names the engines that there are."""
    with pytest.raises(RequestRefusedError, match=r"data_parallel_rank 7 .*\(0, 1\)"):
        table(0, 1).add(pending(), 7, fit)


def test_dead_engines_get_nothing() -> None:
    """A dead rank is refused with the cause of its death, and so is a request to no engine."""
    requests = table(0, 1)
    requests._registry.bury_engine(0, "it was killed")
    assert [added(requests, f"r{n}").engine for n in range(3)] == [1, 1, 1]
    with pytest.raises(EngineDeadError, match="engine 0 is dead: it was killed") as caught:
        requests.add(pending("rank"), 0, fit)
    assert not caught.value.may_have_run
    requests._registry.bury_engine(1, "so was it")
    with pytest.raises(EngineDeadError, match="no engine is alive"):
        requests.add(pending("any"), None, fit)
    assert len(requests.live()) == 3


def test_only_fit_engines_are_chosen() -> None:
    """When none is, the first one's reason is given and nothing is registered."""
    requests = table(0, 1)
    assert requests.add(first := pending("a"), None, lambda e: None if e.index else "not 0")
    assert first.engine == 1
    with pytest.raises(RequestRefusedError, match="not engine 0"):
        requests.add(pending("b"), None, lambda e: f"not engine {e.index}")
    assert requests.live() == [first]


def test_an_engine_that_is_not_heard_gets_no_more() -> None:
    """Another one takes the request; without one it is refused."""
    requests = table(0, 1, limit=100)
    assert requests.add(pending("a", 150), 0, fit)
    assert [added(requests, f"b{n}").engine for n in range(3)] == [1, 1, 1]
    assert requests.add(pending("c", 150), 1, fit)
    with pytest.raises(NotSentError):
        requests.add(pending("d"), None, fit)
    requests.deliver(message(), (), NOW)
    assert added(requests, "e").engine == 0


# -- ids -------------------------------------------------------------------------------------------


def test_a_live_id_is_refused_and_free_again_afterwards() -> None:
    """The first request is not disturbed."""
    requests = table(0, 1)
    first = added(requests)
    with pytest.raises(DuplicateRequestError, match="'r' is in use"):
        requests.add(pending(), 1, fit)
    requests.deliver(message(record(first, 1, finish=1)), (), NOW)
    second = added(requests)
    assert requests.find(["r", "r", "unknown"]) == [second]


def test_a_left_request_frees_its_id_at_once() -> None:
    """Whoever registers drains first, without waiting for the dispatcher."""
    requests = table()
    first = added(requests)
    requests.abandoned.append((first, False))
    second = added(requests)
    assert requests.live() == [second]
    assert requests.take_aborts() == [first]


# -- delivery --------------------------------------------------------------------------------------


def test_outputs_go_to_their_requests_in_order() -> None:
    """Also several of one request in one message."""
    requests = table()
    a, b = added(requests, "a"), added(requests, "b")
    late, faults = requests.deliver(message(record(a, 1), record(b, 2), record(a, 3)), (), NOW)
    assert (late, faults) == (0, [])
    assert (tokens(a), tokens(b)) == ([1, 3], [2])


def test_frames_go_along_only_where_there_are_any() -> None:
    """Arrays are read by the consumer; what has none keeps nothing alive."""
    requests = table()
    one = added(requests)
    requests.deliver(message(record(one, 1)), [b"main"], NOW)
    requests.deliver(message(record(one, 1)), [b"main", b"aux"], NOW)
    assert [item.frames for item in one.mailbox.items] == [(), [b"main", b"aux"]]


def test_what_is_for_nobody_is_counted() -> None:
    """Unknown ids, ended requests, and another engine's output under a live id."""
    requests = table(0, 1)
    one = added(requests, rank=0)
    strange = record(one, 9)
    assert requests.deliver(message(strange, engine=1), (), NOW) == (1, [])
    assert requests.deliver(message(record(one, 1, finish=0)), (), NOW) == (0, [])
    assert requests.deliver(message(record(one, 2), ["x", [1]]), (), NOW) == (2, [])
    assert tokens(one) == [1]


@pytest.mark.parametrize("finish", [0, 1, 2, 3, 4, 99])
def test_any_finish_reason_ends_a_request(finish: int) -> None:
    """Also one that is newer than this client; the engine is told nothing."""
    requests = table()
    one = added(requests)
    requests.deliver(message(record(one, finish=finish), finished_requests=(one.wire_id,)), (), NOW)
    assert one.finished
    assert requests.live() == []
    assert requests.take_aborts() == []
    assert len(one.mailbox.items) == 1


def test_finished_without_a_last_output() -> None:
    """The stream ends with an error behind what it holds, and the engine is not told."""
    requests = table()
    one = added(requests)
    requests.deliver(message(record(one, 1)), (), NOW)
    requests.deliver(message(finished_requests=("unknown", one.wire_id)), (), NOW)
    assert tokens(one) == [1]
    assert isinstance(error(one), StreamError)
    assert "finished request 'r' without a last output" in str(error(one))
    assert requests.take_aborts() == []


def test_overflow_ends_one_request() -> None:
    """It keeps what it holds, then says so; its engine is told; the others go on."""
    requests = table()
    slow, fast = added(requests, "slow"), added(requests, "fast")
    for number in range(LIMIT + 2):
        requests.deliver(message(record(slow, number), record(fast, number)), (), NOW)
        assert tokens(fast) == [number]
    assert requests.live() == [fast]
    assert requests.take_aborts() == [slow]
    assert tokens(slow) == list(range(LIMIT))
    assert isinstance(error(slow), StreamOverflow)


def test_a_last_output_never_overflows() -> None:
    """It is the end in any case."""
    requests = table()
    one = added(requests)
    for number in range(LIMIT):
        requests.deliver(message(record(one, number)), (), NOW)
    requests.deliver(message(record(one, LIMIT, finish=1)), (), NOW)
    assert tokens(one) == list(range(LIMIT + 1))


@pytest.mark.parametrize("rest", [[None], [["a"]], [[1], None, None, None, "x"], []])
def test_a_malformed_output_ends_its_request_only(rest: list[Any]) -> None:
    """With what was wrong; the engine is told, since it goes on."""
    requests = table()
    bad, good = added(requests, "bad"), added(requests, "good")
    late, faults = requests.deliver(
        message(record(good, 1), [bad.wire_id, *rest], record(good, 2)), (), NOW
    )
    assert (late, len(faults)) == (0, 1)
    assert isinstance(error(bad), ReplyError)
    assert tokens(good) == [1, 2]
    assert requests.take_aborts() == [bad]


@pytest.mark.parametrize("junk", [None, 5, [], [None, [1]], {"a": 1}, "r", [["r"], [1]]])
def test_a_malformed_output_without_an_id_ends_nothing(junk: Any) -> None:
    """It is reported, and the rest of the message counts."""
    requests = table()
    one = added(requests)
    late, faults = requests.deliver(message(junk, record(one, 1)), (), NOW)
    assert (late, len(faults)) == (0, 1)
    assert tokens(one) == [1]


def test_the_id_of_anothers_request_in_a_malformed_output_ends_nothing() -> None:
    """Engine 1 cannot end what runs on engine 0."""
    requests = table(0, 1)
    one = added(requests, rank=0)
    requests.deliver(message([one.wire_id, None], engine=1), (), NOW)
    assert requests.live() == [one]


# -- leaving ---------------------------------------------------------------------------------------


def test_a_request_that_was_left_is_aborted_once() -> None:
    """However often and in whatever way it is left."""
    requests = table()
    one = added(requests)
    requests.abandoned.extend([(one, False), (one, True), (one, False)])
    requests.drain()
    assert requests.take_aborts() == [one]
    requests.abandoned.append((one, True))
    requests.drain()
    assert requests.take_aborts() == []
    assert not one.mailbox.items


def test_an_abort_ends_a_stream_that_is_read() -> None:
    """Behind what it holds comes a last output, without tokens, made here."""
    requests = table(0, 1)
    one = added(requests, rank=1)
    requests.deliver(message(record(one, 5), engine=1), (), NOW)
    requests.abandoned.append((one, True))
    requests.drain()
    assert requests.deliver(message(record(one, 6), engine=1), (), NOW) == (1, [])
    items: deque[Delivery] = one.mailbox.items
    assert [item.record[1] for item in items] == [[5], []]
    assert items[-1].record[5] == FinishReason.ABORT
    assert items[-1].message is not None
    assert items[-1].message.engine_index == 1


def test_what_was_not_sent_is_cancelled_instead_of_aborted() -> None:
    """An ABORT cannot overtake its ADD, because there is none."""
    requests = table()
    one = pending()
    requests.add(one, None, fit)
    requests.abandoned.append((one, False))
    requests.drain()
    assert requests.take_aborts() == []
    assert one.cancelled


def test_a_finished_request_that_is_left_is_forgotten() -> None:
    """Nothing is sent for it."""
    requests = table()
    one = added(requests)
    requests.deliver(message(record(one, 1, finish=1)), (), NOW)
    requests.abandoned.append((one, False))
    requests.drain()
    assert requests.take_aborts() == []


def test_what_never_was_registered_can_be_left() -> None:
    """An interrupt may come before."""
    requests = table()
    requests.abandoned.append((pending(), True))
    requests.drain()
    assert requests.take_aborts() == []
    assert not requests.abandoned


# -- death, and the end ----------------------------------------------------------------------------


def test_the_death_of_an_engine_ends_its_requests() -> None:
    """Each says whether it may have run; those of others go on; nobody is told."""
    requests = table(0, 1)
    sent, other = added(requests, "sent", 0), added(requests, "other", 1)
    unsent = pending("unsent")
    requests.add(unsent, 0, fit)
    assert requests.fail_engine(0, EngineDeadError, "engine 0 died before {method} ended") == 2
    assert requests.live() == [other]
    died = error(sent)
    assert isinstance(died, EngineDeadError)
    assert died.may_have_run
    assert str(died) == "engine 0 died before request 'sent' ended"
    assert unsent.cancelled
    assert not error(unsent).may_have_run  # type: ignore[attr-defined]
    assert requests.take_aborts() == []


def test_undecodable_bytes_end_the_requests_of_their_engine() -> None:
    """It still lives, so it is told."""
    requests = table(0, 1)
    one, other = added(requests, "one", 0), added(requests, "other", 1)
    assert requests.fail_engine(0, ReplyError, "garbage for {method}") == 1
    assert requests.take_aborts() == [one]
    assert requests.live() == [other]


def test_one_request_can_fail() -> None:
    """Once."""
    requests = table()
    one = added(requests)
    for _ in range(2):
        requests.fail(one, NotSentError("no"))
    assert isinstance(error(one), NotSentError)


def test_the_end_of_the_client_ends_every_request() -> None:
    """Each says which one it was; engines are told; no more are taken."""
    requests = table(0, 1)
    live = [added(requests, f"r{n}") for n in range(3)]
    requests._registry.end(None, NOW)
    requests.end(lambda what: ClientClosedError(f"closed before {what}"))
    assert requests.take_aborts() == live
    assert [str(error(one)) for one in live] == [
        f"closed before request 'r{n}' was finished" for n in range(3)
    ]
    assert requests.live() == []
    assert not requests.add(pending("late"), None, fit)


def test_a_reader_is_woken() -> None:
    """By an output, and by an end."""
    requests = table()
    one = added(requests)
    assert not one.mailbox.wait(Deadline(0))
    requests.deliver(message(record(one, 1)), (), NOW)
    assert one.mailbox.wait(Deadline(0))


def test_a_writer_that_was_held_up_takes_no_later_wait_away() -> None:
    """It opens an old latch; the one that the reader has waited on since stays announced."""
    mailbox: Mailbox[int] = Mailbox()

    class Old(Latch):
        def open_once(self) -> None:
            # The reader found the item, used it and waits again, before the writer goes on.
            mailbox.items.popleft()
            mailbox.waiter = later

    later = Latch()
    mailbox.waiter = Old()
    mailbox.put(1)
    mailbox.put(2)
    assert later.wait(0)


def test_many_handovers_lose_no_wake_up() -> None:
    """A reader that is as fast as its writer waits again and again, and never in vain."""
    mailbox: Mailbox[int] = Mailbox()
    count = 20_000

    def read() -> None:
        for _ in range(count):
            while not mailbox.items:
                began = time.monotonic()
                assert mailbox.wait(Deadline(20))
                assert time.monotonic() - began < 20
            mailbox.items.popleft()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        reading = run_in_thread(read)
        for number in range(count):
            mailbox.put(number)
        reading.result(30)
    finally:
        sys.setswitchinterval(interval)


# -- anything at all -------------------------------------------------------------------------------


class Accounts(RuleBasedStateMachine):
    """Whatever comes in whatever order, each request ends once, and is told of at most once."""

    def __init__(self) -> None:
        super().__init__()
        self.requests = table(0, 1)
        self.all: list[PendingRequest] = []
        self.told: list[PendingRequest] = []

    def pick(self, number: int) -> PendingRequest | None:
        return self.all[number % len(self.all)] if self.all else None

    @rule(name=st.sampled_from("abcdef"), rank=st.sampled_from([None, 0, 1]), sent=st.booleans())
    def add(self, name: str, rank: int | None, sent: bool) -> None:
        request = pending(name)
        try:
            assert self.requests.add(request, rank, fit)
        except DuplicateRequestError:
            assert self.requests.find([name])
        else:
            request.sent = sent
            self.all.append(request)

    @rule(
        number=st.integers(0, 9), engine=st.sampled_from([0, 1]), finish=st.sampled_from([None, 1])
    )
    def output(self, number: int, engine: int, finish: int | None) -> None:
        if request := self.pick(number):
            request.sent = True
            self.requests.deliver(
                message(record(request, number, finish=finish), engine=engine), (), NOW
            )

    @rule(number=st.integers(0, 9), read_on=st.booleans())
    def leave(self, number: int, read_on: bool) -> None:
        if request := self.pick(number):
            self.requests.abandoned.append((request, read_on))

    @rule(number=st.integers(0, 9))
    def finished(self, number: int) -> None:
        if request := self.pick(number):
            self.requests.deliver(
                message(engine=request.engine, finished_requests=(request.wire_id,)), (), NOW
            )

    @rule(number=st.integers(0, 9))
    def malformed(self, number: int) -> None:
        if request := self.pick(number):
            self.requests.deliver(message([request.wire_id, 7], engine=request.engine), (), NOW)

    @rule(engine=st.sampled_from([0, 1]), kind=st.sampled_from([EngineDeadError, ReplyError]))
    def fail(self, engine: int, kind: type[EngineDeadError] | type[ReplyError]) -> None:
        self.requests.fail_engine(engine, kind, "{method}")

    @rule()
    def abort(self) -> None:
        self.requests.drain()
        self.told += self.requests.take_aborts()

    @invariant()
    def accounts(self) -> None:
        live = set(map(id, self.requests.live()))
        in_flight = {
            wire_id
            for engine in self.requests._registry.engines.values()
            for wire_id in engine.requests
        }
        assert in_flight == {one.wire_id for one in self.requests.live()}
        assert len(set(map(id, self.told))) == len(self.told)
        for request in self.all:
            assert request.finished != (id(request) in live)
            ends = [
                item
                for item in request.mailbox.items
                if item.error is not None or item.record[5] is not None
            ]
            assert ends == [] or ends == [request.mailbox.items[-1]]
            if not request.finished:
                assert not ends
                assert request not in self.told


TestAccounts = Accounts.TestCase
