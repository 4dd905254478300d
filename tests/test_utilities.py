"""The typed wrappers: what each sends, how it combines what comes back, what it refuses."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from engine_client import (
    ConsensusError,
    EncodeError,
    EngineClient,
    LoraRequest,
    Ok,
    Outcomes,
    RefusedError,
    RemoteError,
    RequestRefusedError,
    UtilityCall,
    UtilityCallError,
    UtilityTimeoutError,
)
from engine_client.tools.faults import FaultRule
from engine_client.utilities import UtilityMethods
from tests.helpers import wait_until
from tests.helpers.group import Group, engine_group

LORA = LoraRequest("tuned", 7, "/adapters/tuned")
RECORD = ["tuned", 7, "/adapters/tuned", None, False, False]
RESUME = UtilityCall("resume_scheduler")

Wrapped = Callable[..., Any]


def rpc(method: str, args: list[Any], kwargs: dict[str, Any] | None) -> list[Any]:
    """What a worker call sends."""
    return [method, None, args, kwargs]


@dataclass(frozen=True)
class Case:
    """One call of a wrapper on engines that are willing to do everything."""

    wrapper: str
    args: tuple[Any, ...]
    method: str
    sent: list[Any]
    gives: Any = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    before: Callable[[EngineClient], object] = lambda client: None

    def __str__(self) -> str:
        shown = [*map(repr, self.args), *(f"{k}={v!r}" for k, v in self.kwargs.items())]
        return f"{self.wrapper}({', '.join(shown)})"

    def call(self, client: EngineClient, **how: Any) -> Any:
        return getattr(client, self.wrapper)(*self.args, **self.kwargs, **how)


METADATA = [{"group_idx": 0, "kind": "full_attention", "block_size": 16, "sliding_window": None}]
NOTHING = [None] * 4
"""What a worker call gives: two workers in each of two engines."""


def updating(client: EngineClient) -> None:
    client.init_weight_transfer_engine({})
    client.start_weight_update()


CASES = [
    Case("is_sleeping", (), "is_sleeping", [], gives=False),
    Case("is_scheduler_paused", (), "is_scheduler_paused", [], gives=False),
    Case("get_supported_tasks", (), "get_supported_tasks", [], gives=["generate"]),
    Case("get_weight_version", (), "get_weight_version", [], gives="default"),
    Case("list_loras", (), "list_loras", [], gives=frozenset()),
    Case("pause_scheduler", (), "pause_scheduler", ["abort", True]),
    Case("pause_scheduler", ("keep", False), "pause_scheduler", ["keep", False]),
    Case("pause_scheduler", ("wait", 0), "pause_scheduler", ["wait", False]),
    Case("resume_scheduler", (), "resume_scheduler", []),
    Case("sleep", (), "sleep", [1, "abort"]),
    Case("sleep", (0, "keep"), "sleep", [0, "keep"]),
    Case("sleep", (2,), "sleep", [2, "wait"], kwargs={"mode": "wait"}),
    Case("wake_up", (), "wake_up", [None], gives=True),
    Case(
        "wake_up",
        (("weights",),),
        "wake_up",
        [["weights"]],
        gives=False,
        before=lambda client: client.sleep(),
    ),
    Case(
        "release_kv_cache_memory",
        (),
        "release_kv_cache_memory",
        [],
        before=lambda client: client.pause_scheduler(),
    ),
    Case("reset_prefix_cache", (), "reset_prefix_cache", [False, False], gives=True),
    Case("reset_prefix_cache", (True, 1), "reset_prefix_cache", [True, True], gives=True),
    Case("reset_mm_cache", (), "reset_mm_cache", []),
    Case("reset_encoder_cache", (), "reset_encoder_cache", []),
    Case("add_lora", (LORA,), "add_lora", [RECORD]),
    Case(
        "add_lora",
        (LoraRequest("a", 1, "/p", "base", load_inplace=True, is_3d_lora_weight=True),),
        "add_lora",
        [["a", 1, "/p", "base", True, True]],
    ),
    Case("remove_lora", (7,), "remove_lora", [7], gives=False),
    Case(
        "remove_lora",
        (7,),
        "remove_lora",
        [7],
        gives=True,
        before=lambda client: client.add_lora(LORA),
    ),
    Case("pin_lora", (7,), "pin_lora", [7], before=lambda client: client.add_lora(LORA)),
    Case("start_profile", (), "profile", [True, None, None, None]),
    Case("start_profile", ("name", 1, 2), "profile", [True, "name", 1, 2]),
    Case("stop_profile", (), "profile", [False]),
    Case("set_weight_version", ("w2",), "set_weight_version", ["w2"]),
    Case("save_sharded_state", ("/",), "save_sharded_state", ["/", None, None]),
    Case(
        "save_sharded_state",
        ("/", "p"),
        "save_sharded_state",
        ["/", "p", 9],
        kwargs={"max_size": 9},
    ),
    Case("execute_dummy_batch", (), "execute_dummy_batch", []),
    Case(
        "collective_rpc",
        ("check_health",),
        "collective_rpc",
        rpc("check_health", [], None),
        NOTHING,
    ),
    Case(
        "collective_rpc",
        ("echo", ("x",), {}),
        "collective_rpc",
        ["echo", 2.5, ["x"], {}],
        ["x"] * 4,
        kwargs={"worker_timeout": 2.5},
    ),
    Case(
        "init_weight_transfer_engine",
        ({"port": 1},),
        "collective_rpc",
        rpc("init_weight_transfer_engine", [], {"init_info": {"port": 1}}),
        NOTHING,
    ),
    Case(
        "start_weight_update",
        (),
        "collective_rpc",
        rpc("start_weight_update", [], None),
        NOTHING,
        before=lambda client: client.init_weight_transfer_engine({}),
    ),
    Case(
        "start_draft_weight_update",
        (),
        "collective_rpc",
        rpc("start_draft_weight_update", [], None),
        NOTHING,
        before=lambda client: client.init_weight_transfer_engine({}),
    ),
    Case(
        "update_weights",
        ({"names": ["w"]},),
        "collective_rpc",
        rpc("update_weights", [], {"update_info": {"names": ["w"]}}),
        NOTHING,
        before=updating,
    ),
    Case(
        "finish_weight_update",
        (),
        "collective_rpc",
        rpc("finish_weight_update", [], None),
        NOTHING,
        before=updating,
    ),
    Case(
        "shutdown_weight_transfer_engine",
        (),
        "collective_rpc",
        rpc("shutdown_weight_transfer_engine", [], None),
        NOTHING,
    ),
    Case("checkpoint_prepare", (), "collective_rpc", rpc("checkpoint_prepare", [], None), NOTHING),
    Case("checkpoint_restore", (), "collective_rpc", rpc("checkpoint_restore", [], None), NOTHING),
]
LOCKSTEP_CASES = [
    Case("barrier", (), "barrier", []),
    Case("reinitialize_distributed", ([2],), "reinitialize_distributed", [[2]]),
    Case(
        "commit_prepared_elastic_ep",
        (),
        "commit_prepared_elastic_ep",
        [],
        before=lambda client: client.reinitialize_distributed([2]),
    ),
]
WITHOUT_CASE = {"compute_weight_checksums", "get_kv_cache_group_metadata"}
"""Whose results need a closer look."""
WRAPPERS = {
    name: wrapper
    for name, wrapper in vars(UtilityMethods).items()
    if callable(wrapper) and not name.startswith("_")
}


def willing(**options: Any) -> Any:
    """Two engines, one of each dialect, that are able to do everything."""
    return engine_group(
        options={"profiler": True},
        ready={
            "weight_transfer_backend": "nccl",
            "supports_draft_weight_updates": True,
            **options,
        },
    )


@pytest.fixture
def group() -> Iterator[Group]:
    with willing() as made:
        yield made


def test_every_wrapper_is_tested_here() -> None:
    """A new wrapper needs a case."""
    tested = {case.wrapper for case in (*CASES, *LOCKSTEP_CASES)} | WITHOUT_CASE
    assert tested == set(WRAPPERS)


@pytest.mark.parametrize("name", WRAPPERS)
def test_signatures(name: str) -> None:
    """All take engines and timeout, those that change something compensate; all explain it."""
    parameters = inspect.signature(WRAPPERS[name]).parameters
    keywords = {n for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
    asks = name.startswith(("is_", "get_", "list_", "compute_"))
    passes = name in ("execute_dummy_batch", "barrier", "collective_rpc")
    assert {"engines", "timeout"} <= keywords
    assert ("compensate" in keywords) == (not asks and not passes)
    assert not any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    assert WRAPPERS[name].__doc__


# -- what is sent and what is given ----------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
def test_calls(group: Group, case: Case) -> None:
    """Both engines get the same method with positional arguments; the results are combined."""
    case.before(group.client)
    assert_sent(group, case)


@pytest.mark.parametrize("case", LOCKSTEP_CASES, ids=str)
def test_calls_of_lockstep_groups(case: Case) -> None:
    """What only a lockstep group has works there, and fails with the engine's text elsewhere."""
    with willing(data_parallel_size=2) as group:
        case.before(group.client)
        assert_sent(group, case)
    with willing() as group, pytest.raises(UtilityCallError, match="has no attribute"):
        case.call(group.client)


def assert_sent(group: Group, case: Case) -> None:
    before = [len(group.calls(index)) for index in (0, 1)]
    result = case.call(group.client)
    assert result == case.gives
    assert type(result) is type(case.gives)
    for index in (0, 1):
        # By their text: False is equal to 0, and an engine is particular about it.
        assert repr(group.calls(index)[before[index] :]) == repr([(case.method, case.sent)])


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.before.__name__ == "<lambda>"], ids=str
)
def test_targets(group: Group, case: Case) -> None:
    """A call for one engine reaches that one only."""
    case.before(group.client)
    before = [len(group.calls(index)) for index in (0, 1)]
    case.call(group.client, engines=[1])
    assert len(group.calls(0)) == before[0]
    assert group.calls(1)[before[1] :] == [(case.method, case.sent)]


@pytest.mark.parametrize("name", WRAPPERS)
def test_limits(group: Group, name: str) -> None:
    """A call whose replies are held ends at its limit; no limit can be negative."""
    (case, *_) = [case for case in (*CASES, *LOCKSTEP_CASES, *CLOSER_LOOK) if case.wrapper == name]
    group.plan.add(FaultRule("*", "drop"))
    with pytest.raises(UtilityTimeoutError) as info:
        case.call(group.client, timeout=0.01)
    assert info.value.outcomes is not None
    assert info.value.outcomes.method == case.method
    sent = [1, 1]
    wait_until(lambda: [len(group.calls(index)) for index in (0, 1)] == sent)
    with pytest.raises(ValueError, match="timeout"):
        case.call(group.client, timeout=-1)
    with pytest.raises(ValueError, match="engine"):
        case.call(group.client, engines=[5])
    assert [len(group.calls(index)) for index in (0, 1)] == sent


CLOSER_LOOK = [
    Case("compute_weight_checksums", (), "compute_weight_checksums", []),
    Case("get_kv_cache_group_metadata", (), "get_kv_cache_group_metadata", []),
]


# -- how results are combined ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrapper", "other"),
    [
        ("is_sleeping", True),
        ("is_scheduler_paused", True),
        ("get_supported_tasks", ["embed"]),
        ("get_weight_version", "w2"),
        ("get_weight_version", None),
        ("list_loras", [1]),
    ],
)
def test_consensus(group: Group, wrapper: str, other: Any) -> None:
    """Engines that answer differently are told apart, each with its answer."""
    group.plan.add(FaultRule(wrapper, "answer", value=other, engine=1))
    with pytest.raises(ConsensusError, match=f"{wrapper}: the engines disagree: engine 0:") as info:
        getattr(group.client, wrapper)()
    assert info.value.outcomes is not None
    assert info.value.outcomes.succeeded == (0, 1)
    expected = frozenset(other) if wrapper == "list_loras" else other
    outcome = info.value.outcomes[1]
    assert isinstance(outcome, Ok)
    assert outcome.value == expected


def test_failure_is_no_disagreement(group: Group) -> None:
    """When an engine fails there is nothing to agree on."""
    group.plan.add(FaultRule("is_sleeping", "fail", message="boom", engine=0))
    with pytest.raises(UtilityCallError, match="boom") as info:
        group.client.is_sleeping()
    assert isinstance(info.value.outcomes.failures[0], RemoteError)


def test_adapters_in_any_order(group: Group) -> None:
    """The same adapters are a consensus, in whatever order an engine lists them."""
    group.plan.add(FaultRule("list_loras", "answer", value=[2, 1], engine=0))
    group.plan.add(FaultRule("list_loras", "answer", value=[1, 2], engine=1))
    assert group.client.list_loras() == frozenset({1, 2})


def test_tasks_in_any_order(group: Group) -> None:
    """The same tasks are a consensus too: an engine lists a set, whose order is its own."""
    group.plan.add(
        FaultRule("get_supported_tasks", "answer", value=["token_embed", "embed"], engine=0)
    )
    group.plan.add(
        FaultRule("get_supported_tasks", "answer", value=["embed", "token_embed"], engine=1)
    )
    assert group.client.get_supported_tasks() == ["embed", "token_embed"]


@pytest.mark.parametrize(("wrapper", "argument"), [("add_lora", LORA), ("pin_lora", 7)])
def test_false_is_a_failure(group: Group, wrapper: str, argument: Any) -> None:
    """Where only True means success, a False is that engine's failure."""
    group.plan.add(FaultRule(wrapper, "answer", value=True, engine=0))
    group.plan.add(FaultRule(wrapper, "answer", value=False, engine=1))
    with pytest.raises(UtilityCallError, match="engine 1 answered False") as info:
        getattr(group.client, wrapper)(argument)
    outcomes = info.value.outcomes
    assert outcomes.succeeded == (0,)
    assert isinstance(outcomes.failures[1], RefusedError)
    assert outcomes.failures[1].engine == 1
    assert outcomes.may_have_run == (0, 1)


@pytest.mark.parametrize(
    ("wrapper", "argument"), [("remove_lora", [7]), ("wake_up", []), ("reset_prefix_cache", [])]
)
@pytest.mark.parametrize(
    ("values", "combined"),
    [
        ([True, True], True),
        ([True, False], False),
        ([False, True], False),
        ([False, False], False),
        ([None, True], True),
        ([None, None], True),
    ],
)
def test_and(
    group: Group, wrapper: str, argument: list[Any], values: list[Any], combined: bool
) -> None:
    """True when no engine answered False; older engines answered nothing where newer ones do."""
    for index, value in enumerate(values):
        group.plan.add(FaultRule(wrapper, "answer", value=value, engine=index))
    assert getattr(group.client, wrapper)(*argument) is combined


def test_concatenation(group: Group) -> None:
    """The workers of all engines follow one another, in target order."""
    assert group.client.collective_rpc("worker_index") == [0, 1, 0, 1]
    group.plan.add(FaultRule("collective_rpc", "answer", value=["a"], engine=0))
    group.plan.add(FaultRule("collective_rpc", "answer", value=[], engine=1))
    assert group.client.collective_rpc("worker_index") == ["a"]
    checksums = group.client.compute_weight_checksums()
    first, second = checksums[:2]
    assert checksums == [first, second, first, second]
    assert first != second
    group.plan.add(FaultRule("compute_weight_checksums", "answer", value=[{"w": "1"}], engine=1))
    assert group.client.compute_weight_checksums(engines=[1, 0]) == [{"w": "1"}, first, second]


def test_per_engine(group: Group) -> None:
    """Metadata of the key-value cache comes engine by engine; a failure is raised all the same."""
    outcomes = group.client.get_kv_cache_group_metadata(engines=[1, 0])
    assert isinstance(outcomes, Outcomes)
    assert list(outcomes) == [1, 0]
    assert outcomes.values_in_order() == [METADATA, METADATA]
    group.plan.add(FaultRule("get_kv_cache_group_metadata", "fail", engine=1))
    with pytest.raises(UtilityCallError):
        group.client.get_kv_cache_group_metadata()


def test_a_result_that_means_nothing(group: Group) -> None:
    """Where nothing is promised, what an engine answers is not passed on."""
    group.plan.add(FaultRule("sleep", "answer", value="whatever"))
    assert group.client.sleep() is None  # type: ignore[func-returns-value]


def test_a_load_that_one_engine_fails(group: Group) -> None:
    """The engine's own words reach the caller, and what the others did."""
    group.plan.add(FaultRule("add_lora", "fail", worker=1, message="out of memory", engine=1))
    with pytest.raises(UtilityCallError) as info:
        group.client.add_lora(LORA)
    failure = info.value.outcomes.failures[1]
    assert isinstance(failure, RemoteError)
    assert failure.message == (
        "Call to add_lora method failed: Worker failed with error 'out of memory', please check "
        "the stack trace above for the root cause"
    )
    assert info.value.outcomes.succeeded == (0,)


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda c: c.pause_scheduler("later"), ValueError, "mode must be 'abort', 'wait' or"),
        (lambda c: c.pause_scheduler(None), ValueError, "mode must be"),
        (lambda c: c.sleep(1, "later"), ValueError, "mode must be"),
        (lambda c: c.sleep(3), ValueError, "level"),
        (lambda c: c.sleep(-1), ValueError, "level"),
        (lambda c: c.sleep(True), TypeError, "level"),
        (lambda c: c.sleep("abort"), TypeError, "level"),
        (lambda c: c.wake_up("weights"), TypeError, r"did you mean \['weights'\]"),
        (lambda c: c.add_lora(RECORD), TypeError, "must be a LoraRequest"),
        (lambda c: c.add_lora(7), TypeError, "must be a LoraRequest"),
        (lambda c: c.remove_lora(0), RequestRefusedError, "lora_int_id"),
        (lambda c: c.remove_lora(LORA), TypeError, "lora_int_id"),
        (lambda c: c.remove_lora(True), TypeError, "lora_int_id"),
        (lambda c: c.pin_lora(-1), RequestRefusedError, "lora_int_id"),
        (lambda c: c.pin_lora("7"), TypeError, "lora_int_id"),
        (lambda c: c.set_weight_version(2), TypeError, "version must be a string"),
        (lambda c: c.collective_rpc(print), TypeError, "method must be the name"),
        (lambda c: c.collective_rpc("echo", "x"), TypeError, r"did you mean args=\('x',\)"),
        (lambda c: c.collective_rpc("echo", 5), TypeError, "args must be a sequence"),
        (lambda c: c.collective_rpc("echo", kwargs=[1]), TypeError, "kwargs must be a mapping"),
        (lambda c: c.collective_rpc("echo", worker_timeout=-1), ValueError, "worker_timeout"),
        (lambda c: c.collective_rpc("echo", worker_timeout="1"), TypeError, "worker_timeout"),
        (lambda c: c.collective_rpc("echo", [object()]), EncodeError, "object"),
        (lambda c: c.update_weights({"names": {1j}}), EncodeError, "complex"),
        (lambda c: c.save_sharded_state(b"x"), TypeError, "path must be a string"),
        (lambda c: c.save_sharded_state("/x", object()), TypeError, "pattern must be"),
        (lambda c: c.save_sharded_state("/x", None, 2.0), TypeError, "max_size must be"),
        (lambda c: c.reinitialize_distributed([object()]), EncodeError, "object"),
        (lambda c: c.pause_scheduler("keep", "no"), TypeError, "clear_cache must be"),
        (lambda c: c.reset_prefix_cache(2), TypeError, "reset_running_requests must be"),
        (lambda c: c.reset_prefix_cache(False, "x"), TypeError, "reset_connector must be"),
        (lambda c: c.start_profile(5), TypeError, "prefix must be"),
        (lambda c: c.start_profile("x", 1.5), TypeError, "delay_iterations must be"),
        (lambda c: c.start_profile("x", 1, -1), ValueError, "max_iterations must be"),
        (lambda c: c.init_weight_transfer_engine([1]), TypeError, "init_info must be"),
        (lambda c: c.update_weights(None), TypeError, "update_info must be"),
        (lambda c: c.wake_up([1]), TypeError, "tags must be"),
        (lambda c: c.wake_up(b"weights"), TypeError, "tags must be"),
        (lambda c: c.collective_rpc("m", (), {1: 2}), TypeError, "kwargs must have strings"),
        (lambda c: c.call_utility("m", engines=10**5000), TypeError, "engines must be .* 64 bits"),
        (lambda c: c.call_utility("m", engines=[10**5000]), ValueError, "engines must hold"),
        (lambda c: c.call_utility("m", engines=[-1]), ValueError, "engines names engine -1"),
    ],
)
def test_refused_before_anything_is_sent(
    group: Group, call: Callable[[Any], Any], error: type[Exception], text: str
) -> None:
    """What cannot be meant is an error at once; no engine hears of it."""
    with pytest.raises(error, match=text):
        call(group.client)
    assert group.calls(0) == group.calls(1) == []


@pytest.mark.parametrize(
    ("fields", "error", "text"),
    [
        (("a", 0, "/p"), RequestRefusedError, "lora_int_id"),
        (("a", 2**63, "/p"), RequestRefusedError, "lora_int_id"),
        (("a", "1", "/p"), TypeError, "lora_int_id"),
        (("a", True, "/p"), TypeError, "lora_int_id"),
        (("", 1, "/p"), RequestRefusedError, "lora_name is empty"),
        (("a", 1, ""), RequestRefusedError, "lora_path is empty"),
        (("a", 1, b"/p"), TypeError, "lora_path must be a string"),
    ],
)
def test_adapters_are_checked(fields: Any, error: type[Exception], text: str) -> None:
    """An adapter that an engine would fail on, or die of, cannot be made."""
    with pytest.raises(error, match=text):
        LoraRequest(*fields)


# -- undo ------------------------------------------------------------------------------------------


INVERSES: list[tuple[Case, UtilityCall]] = [
    (Case("pause_scheduler", ("wait",), "pause_scheduler", []), RESUME),
    (
        Case("resume_scheduler", (), "resume_scheduler", []),
        UtilityCall("pause_scheduler", ("keep", False)),
    ),
    (Case("sleep", (), "sleep", []), UtilityCall("wake_up")),
    (Case("add_lora", (LORA,), "add_lora", []), UtilityCall("remove_lora", (7,))),
    (Case("start_profile", ("p",), "profile", []), UtilityCall("profile", (False,))),
    (
        Case("init_weight_transfer_engine", ({},), "collective_rpc", []),
        UtilityCall("collective_rpc", ("shutdown_weight_transfer_engine", None, [], None)),
    ),
    (
        Case("checkpoint_prepare", (), "collective_rpc", []),
        UtilityCall("collective_rpc", ("checkpoint_restore", None, [], None)),
    ),
]


@pytest.mark.parametrize(("case", "inverse"), INVERSES, ids=lambda value: str(value))
def test_natural_inverses(group: Group, case: Case, inverse: UtilityCall) -> None:
    """compensate=True sends the natural inverse to the engines that may have run the call."""
    rule = FaultRule(case.method, "fail_after", message="boom", engine=1, occurrence=1)
    group.plan.add(rule)
    with pytest.raises(UtilityCallError, match="boom") as info:
        case.call(group.client, compensate=True)
    assert info.value.compensation is not None
    assert info.value.compensation.method == inverse.method
    assert info.value.compensation.succeeded == (0, 1)
    for index in (0, 1):
        assert group.calls(index)[1:] == [(inverse.method, list(inverse.args))]


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, wrapper in WRAPPERS.items()
        if "compensate" in inspect.signature(wrapper).parameters
        and name not in {case.wrapper for case, _ in INVERSES}
    ],
)
def test_wrappers_without_inverse(group: Group, name: str) -> None:
    """Where there is no natural inverse compensate=True is refused, and nothing is sent."""
    (case, *_) = [case for case in (*CASES, *LOCKSTEP_CASES) if case.wrapper == name]
    with pytest.raises(ValueError, match="has no natural inverse: give compensate=UtilityCall"):
        case.call(group.client, compensate=True)
    assert group.calls(0) == group.calls(1) == []
    group.plan.add(FaultRule(case.method, "fail", message="boom"))
    with pytest.raises(UtilityCallError, match="boom") as info:
        case.call(group.client, compensate=UtilityCall("echo", ("undo",)))
    assert info.value.compensation is not None
    assert info.value.compensation.values_in_order() == ["undo", "undo"]


def test_in_place_load_has_no_inverse(group: Group) -> None:
    """Weights that were replaced cannot be brought back."""
    with pytest.raises(ValueError, match="has no natural inverse"):
        group.client.add_lora(LoraRequest("a", 1, "/p", load_inplace=True), compensate=True)
    assert group.calls(0) == []


@pytest.mark.parametrize("compensate", [None, False])
def test_without_undo(group: Group, compensate: Any) -> None:
    """Nothing is undone unless it is asked for."""
    group.plan.add(FaultRule("sleep", "fail", message="boom", engine=1))
    with pytest.raises(UtilityCallError) as info:
        group.client.sleep(compensate=compensate)
    assert info.value.compensation is None
    assert [method for method, _ in group.calls(0)] == ["sleep"]


@pytest.mark.parametrize("compensate", ["wake_up", ("wake_up",), 1, lambda: None])
def test_wrong_undo(group: Group, compensate: Any) -> None:
    """An undo that is no call is an error at once."""
    with pytest.raises(TypeError, match="compensate must be a UtilityCall"):
        group.client.sleep(compensate=compensate)
    with pytest.raises(EncodeError, match=r"compensate\.args"):
        group.client.sleep(compensate=UtilityCall("wake_up", (object(),)))
    assert group.calls(0) == []


def test_refused_load_is_undone(group: Group) -> None:
    """A False is undone like any other failure, on the engine that gave it too."""
    group.plan.add(FaultRule("add_lora", "answer", value=False, engine=1))
    with pytest.raises(UtilityCallError, match="answered False") as info:
        group.client.add_lora(LORA, compensate=True)
    assert info.value.compensation is not None
    assert info.value.compensation.values_in_order() == [True, False]
    assert group.client.list_loras() == frozenset()


def test_success_is_not_undone(group: Group) -> None:
    """When all succeed the undo is not sent."""
    group.client.add_lora(LORA, compensate=True)
    assert group.client.list_loras() == frozenset({7})
    assert [method for method, _ in group.calls(0)] == ["add_lora", "list_loras"]
