"""Which messages must be kept: every kind of both ways, every reason, every field, every failure.

What can be listed by the code itself is: a new request type, finish reason, field or utility method
is missing here until a message with it was recorded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from engine_client import FinishReason, SamplingParams
from engine_client.wire.messages import Outputs, RequestType
from tests.golden.vectors import DEAD_SENTINEL, Vector
from tests.test_utilities import CASES, CLOSER_LOOK, LOCKSTEP_CASES

Fits = Callable[[Vector], bool]
Test = Callable[[Any], bool]

TYPES = {name: code for name, code in vars(RequestType).items() if isinstance(code, bytes)}
FIELDS = 22, 18, 10
"""Of a request, of an output, of what a request is pooled by."""
NEVER_SENT = {15}
"""Positions of a request that this client leaves alone: `resumable`."""
ONE_VALUE = {9}
"""Positions of pooling parameters that have one value only: the kind of output."""


# -- what a message is -----------------------------------------------------------------------------


def _typed(sender: str, status: str) -> Fits:
    return lambda v: (v.sender, v.channel) == (sender, "handshake") and v.value["status"] == status


def _init(test: Test) -> Fits:
    return lambda v: (v.sender, v.channel) == ("client", "handshake") and test(v.value["addresses"])


def _request(name: str, test: Test = lambda plain: True) -> Fits:
    return lambda v: (
        v.sender == "client"
        and v.channel == "input"
        and v.frames[0] == TYPES[name]
        and test(v.value)
    )


def _sent(test: Test) -> Fits:
    """A call with such arguments."""
    return _request("UTILITY", lambda plain: test(plain[3]))


def _message(test: Test, channel: str = "output") -> Fits:
    return lambda v: (
        v.sender == "engine"
        and v.channel == channel
        and v.frames[0] != DEAD_SENTINEL
        and test(v.value)
    )


def _reply(test: Test) -> Fits:
    return _message(lambda plain: plain[4] is not None and test(plain[4]))


def _failure(text: str) -> Fits:
    return _reply(lambda reply: reply[1] is not None and text in reply[1])


def _output(test: Test) -> Fits:
    return _message(lambda plain: any(map(test, plain[1])))


def _raw(sender: str, channel: str, frame: bytes) -> Fits:
    return lambda v: (v.sender, v.channel, v.frames) == (sender, channel, (frame,))


def _published(test: Test) -> Fits:
    return lambda v: (v.sender, v.channel) == ("coordinator", "stats") and test(v.value)


def _notice(v: Vector) -> bool:
    return (v.sender, v.channel) == ("client", "stats") and v.encoded


def _wakes(sender: str, channel: str, test: Test) -> Fits:
    return lambda v: (
        (v.sender, v.channel) == (sender, channel)
        and v.frames[0] == RequestType.START_DP_WAVE
        and test(v.value)
    )


def _array(value: Any, kind: type) -> bool:
    """Whether a kept value is an array whose bytes are in it (dict) or in a frame (int)."""
    return isinstance(value, list) and len(value) == 3 and type(value[2]) is kind


def _arrays(value: Any, kind: type) -> bool:
    """Whether there is such an array in a value."""
    if _array(value, kind) and type(value[0]) is str and type(value[1]) is list:
        return True
    parts = value if isinstance(value, list) else value.values() if isinstance(value, dict) else ()
    return any(_arrays(part, kind) for part in parts)


# -- the list --------------------------------------------------------------------------------------

INLINE, FRAME = dict, int
KINDS: dict[str, Fits] = {
    "HELLO": _typed("engine", "HELLO"),
    "READY": _typed("engine", "READY"),
    "READY of a lockstep group": lambda v: (
        _typed("engine", "READY")(v) and "parallel_config_hash" in v.value
    ),
    "INIT": _init(lambda addresses: addresses["coordinator_input"] is None),
    "INIT with a coordinator": _init(lambda addresses: addresses["coordinator_input"] is not None),
    "INIT for several frontends": _init(lambda addresses: len(addresses["inputs"]) > 1),
    "registration": lambda v: (v.sender, v.channel) == ("engine", "input"),
    "ADD to generate": _request("ADD", lambda plain: plain[3] is not None),
    "ADD to pool": _request("ADD", lambda plain: plain[4] is not None),
    "ADD with a frame": lambda v: _request("ADD")(v) and len(v.frames) == 3,
    "ADD with several frames": lambda v: _request("ADD")(v) and len(v.frames) > 3,
    "ADD with an array inline": _request("ADD", lambda plain: _arrays(plain, INLINE)),
    "ADD without parameters": _request("ADD", lambda plain: plain[3:5] == [None, None]),
    "call without arguments": _sent(lambda args: not args),
    "call with a boolean": _sent(lambda args: any(type(one) is bool for one in args)),
    "call with an integer": _sent(lambda args: any(type(one) is int for one in args)),
    "call with a float": _sent(lambda args: any(type(one) is float for one in args)),
    "call with a string": _sent(lambda args: any(type(one) is str for one in args)),
    "call with nothing": _sent(lambda args: None in args),
    "call with an array": _sent(lambda args: any(type(one) is list for one in args)),
    "call with a map": _sent(lambda args: any(type(one) is dict for one in args)),
    "call of another frontend": _request("UTILITY", lambda plain: plain[0] > 0),
    "call with the largest id": _request("UTILITY", lambda plain: plain[1] == 2**64 - 1),
    "wake-up of a rank, but for one": _wakes("client", "input", lambda p: p[1] is not None),
    "wake-up of a rank": _wakes("client", "input", lambda plain: plain[1] is None),
    "wake-up by this client as coordinator": _wakes("client", "coordinator_input", lambda p: True),
    "wake-up by vLLM's coordinator, but for one": _wakes(
        "coordinator", "coordinator_input", lambda plain: plain[1] is not None
    ),
    "wake-up by vLLM's coordinator": _wakes(
        "coordinator", "coordinator_input", lambda plain: plain[1] is None
    ),
    "tokens": _output(lambda one: bool(one[1])),
    "several tokens at once": _output(lambda one: len(one[1]) > 1),
    "logprobs inline": _output(lambda one: _arrays(one[2], INLINE)),
    "logprobs in frames": _output(lambda one: _arrays(one[2], FRAME)),
    "prompt logprobs inline": _output(lambda one: _arrays(one[3], INLINE)),
    "prompt logprobs in frames": _output(lambda one: _arrays(one[3], FRAME)),
    "pooled inline": _output(lambda one: _array(one[4], INLINE)),
    "pooled in a frame": _output(lambda one: _array(one[4], FRAME)),
    "experts inline": _output(lambda one: _array(one[12], INLINE)),
    "experts in a frame": _output(lambda one: _array(one[12], FRAME)),
    "stopped by a token": _output(lambda one: one[5] == 0 and type(one[6]) is int),
    "stopped by a text": _output(lambda one: type(one[6]) is str),
    "finished without an output": _message(lambda plain: plain[5] is not None and not plain[1]),
    "statistics with outputs": _message(lambda plain: plain[2] is not None and bool(plain[1])),
    "statistics alone": _message(lambda plain: plain[2] is not None and not plain[1]),
    "reply with a value": _reply(lambda reply: reply[2] is not None and reply[2][1] is not None),
    "reply with nothing": _reply(lambda reply: reply[2] is not None and reply[2][1] is None),
    "reply with types": _reply(lambda reply: reply[2] is not None and reply[2][0] is not None),
    "reply with an array inline": _reply(lambda reply: _arrays(reply[2], INLINE)),
    "reply with an array in a frame": _reply(lambda reply: _arrays(reply[2], FRAME)),
    "message of a reconfiguration": _reply(lambda reply: reply[0] == -1),
    "message of an engine's health": _reply(lambda reply: reply[0] == -2),
    "failure: unknown method": _failure("has no attribute 'no_such_method'"),
    "failure: too many arguments": lambda v: _reply(
        lambda reply: (reply[1] or "").endswith("failed: ")
    )(v),
    "failure: wrong kind of argument": _failure("Invalid pause mode"),
    "failure: of the model's process": _failure("Worker failed with error"),
    "failure: of the engine's state": _failure("requires a completed pause"),
    "failure: shutting down": _failure("Server shutting down"),
    "wave complete, to the coordinator": _message(lambda p: p[6] is not None, "coordinator_output"),
    "wave complete, to the client": _message(lambda plain: plain[6] is not None),
    "start of a wave": _message(lambda plain: plain[7] is not None, "coordinator_output"),
    "load": _message(lambda plain: plain[2] is not None, "coordinator_output"),
    "subscription of an engine": _raw("engine", "coordinator_input", b"\x01"),
    "gate of this client as coordinator": _raw("client", "coordinator_input", b"READY"),
    "gate of vLLM's coordinator": _raw("coordinator", "coordinator_input", b"READY"),
    "subscription of a client": _raw("client", "stats", b"\x01"),
    "published loads": _published(lambda plain: plain[0] is not None),
    "published: running": _published(lambda plain: plain[0] is None and plain[2]),
    "published: asleep": _published(lambda plain: plain[0] is None and not plain[2]),
    "notice of a request": _notice,
    "death": _raw("engine", "output", DEAD_SENTINEL),
}


def called(method: str, args: list[Any]) -> str:
    """What a call is for: of calls to the workers, their method."""
    return f"{method} {args[0]}" if method == "collective_rpc" else method


def _ends(reason: FinishReason) -> Fits:
    return _output(lambda one: one[5] == reason)


def _fills_request(at: int) -> Fits:
    return _request("ADD", lambda plain: bool(plain[at]))


def _fills_output(at: int) -> Fits:
    # The reason of an end may be 0, and has kinds of its own.
    return _output(lambda one: bool(one[at]) or at == 5)


def _fills_pooling(at: int) -> Fits:
    return _request("ADD", lambda plain: plain[4] is not None and bool(plain[4][at]))


def _fills_message(at: int) -> Fits:
    return _message(lambda plain: bool(plain[at]))


def _names_parameter(name: str) -> Fits:
    return _request("ADD", lambda plain: name in (plain[3] or ()))


def _calls(name: str) -> Fits:
    return _request("UTILITY", lambda plain: called(*plain[2:4]) == name)


def _parameters() -> Iterator[str]:
    """Names on the wire."""
    renamed = {name: f"_{name}" for name in ("eos_token_id", "bad_words_token_ids")}
    for field in dataclasses.fields(SamplingParams):
        yield renamed.get(field.name, field.name)
    yield "_all_stop_token_ids"


def _derived() -> Iterator[tuple[str, Fits]]:
    for name in TYPES:
        yield f"request type {name}", _request(name)
    for reason in FinishReason:
        yield f"finish reason {reason}", _ends(reason)
    request, output, pooling = FIELDS
    for at in set(range(request)) - NEVER_SENT:
        yield f"field {at:2} of a request", _fills_request(at)
    for at in range(output):
        yield f"field {at:2} of an output", _fills_output(at)
    for at in set(range(pooling)) - ONE_VALUE:
        yield f"field {at:2} of pooling", _fills_pooling(at)
    for at, name in enumerate(Outputs._fields[:-1]):  # the last is what our reader has seen
        if name not in ("wave_complete", "start_wave"):  # 0 is a wave; they are listed above
            yield f"{name} of a message", _fills_message(at)
    for name in _parameters():
        yield f"parameter {name}", _names_parameter(name)
    cases = (*CASES, *LOCKSTEP_CASES, *CLOSER_LOOK)
    for name in {called(case.method, case.sent) for case in cases} - {"collective_rpc echo"}:
        yield f"call of {name}", _calls(name)


def kinds() -> dict[str, Fits]:
    """All, by name."""
    return KINDS | dict(sorted(_derived()))


def missing(vectors: Iterable[Vector], among: Mapping[str, Fits] | None = None) -> list[str]:
    """Which kinds (left out: of all) none of these messages is of."""
    kept = list(vectors)
    wanted = kinds() if among is None else among
    return [name for name, fits in wanted.items() if not any(map(fits, kept))]
