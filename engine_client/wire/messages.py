"""The messages of the engine-core protocol as values, independent of how their bytes are written.

Each message is a frozen dataclass, or a named tuple where many are made, with two directions:
``to_plain()`` lays it out as arrays, maps and scalars, and ``from_plain()`` reads such a layout, as
a codec returned it, and raises :class:`~engine_client.errors.ProtocolError` for anything that is
not valid.  Positional records may be shorter than known (missing fields take their defaults) or
longer (what is more is ignored), and unknown map keys are ignored: the protocol grows with nearly
every release of the engines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from engine_client.engines import MAX_ENGINES
from engine_client.errors import ProtocolError
from engine_client.wire.codec import Codec
from engine_client.wire.fields import (
    flag,
    integer,
    mapping,
    optional_text,
    record,
    refuse,
    text,
    texts,
)
from engine_client.wire.plain import LEAVES

__all__ = [
    "DEAD_SENTINEL",
    "Abort",
    "Hello",
    "Init",
    "Outputs",
    "Ready",
    "Registration",
    "RequestType",
    "StartWave",
    "UtilityReply",
    "UtilityRequest",
    "handshake_message",
]

DEAD_SENTINEL: Final = b"ENGINE_CORE_DEAD"
"""The whole single frame that an engine sends when it dies with notice; it is no payload."""


class RequestType:
    """The one-byte frame that says what the next frame of a request is."""

    ADD: Final = b"\x00"
    ABORT: Final = b"\x01"
    START_DP_WAVE: Final = b"\x02"
    UTILITY: Final = b"\x03"


@dataclass(frozen=True, slots=True)
class Hello:
    """An engine's first message on the handshake socket: it waits for its :class:`Init`."""

    local: bool = False
    """Whether the frontend itself launched the engine, on its own host."""
    headless: bool = True
    """Whether the engine was started without a frontend."""

    def to_plain(self) -> dict[str, Any]:
        return {"status": "HELLO", "local": self.local, "headless": self.headless}

    @classmethod
    def from_plain(cls, value: object) -> Hello:
        message = handshake_message(value)
        if not isinstance(message, Hello):
            raise ProtocolError("HELLO: the status is READY")
        return message


@dataclass(frozen=True, slots=True)
class Ready:
    """An engine's last message on the handshake socket: its model is loaded."""

    local: bool = False
    headless: bool = True
    parallel_config_hash: str | None = None
    """Sent by the members of a lockstep group, which must all agree on it."""

    def to_plain(self) -> dict[str, Any]:
        plain = {"status": "READY", "local": self.local, "headless": self.headless}
        if self.parallel_config_hash is not None:
            plain["parallel_config_hash"] = self.parallel_config_hash
        return plain

    @classmethod
    def from_plain(cls, value: object) -> Ready:
        message = handshake_message(value)
        if not isinstance(message, Ready):
            raise ProtocolError("READY: the status is HELLO")
        return message


def handshake_message(plain: object) -> Hello | Ready:
    """Read what an engine sent on the handshake socket, by its status."""
    fields = mapping(plain, "handshake")
    status = fields.get("status")
    if status != "HELLO" and status != "READY":
        kind = "an unknown text" if type(status) is str else type(status).__name__
        raise ProtocolError(f"handshake: the status must be 'HELLO' or 'READY', not {kind}")
    local = flag(fields.get("local", False), status, "'local'")
    headless = flag(fields.get("headless", True), status, "'headless'")
    if status == "HELLO":
        return Hello(local, headless)
    return Ready(local, headless, optional_text(fields, "parallel_config_hash", status))


@dataclass(frozen=True, slots=True)
class Init:
    """The frontend's answer to a HELLO: where the engine connects, one address per frontend."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    coordinator_input: str | None = None
    coordinator_output: str | None = None
    """With an address here the engine behaves as one that has a coordinator."""
    frontend_stats_publish_address: str | None = None
    parallel_config: Mapping[str, Any] = field(default_factory=dict)
    """What the engine sets on its own configuration: integers, strings, arrays."""

    def to_plain(self) -> dict[str, Any]:
        return {
            "addresses": {
                "inputs": list(self.inputs),
                "outputs": list(self.outputs),
                "coordinator_input": self.coordinator_input,
                "coordinator_output": self.coordinator_output,
                "frontend_stats_publish_address": self.frontend_stats_publish_address,
            },
            "parallel_config": dict(self.parallel_config),
        }

    @classmethod
    def from_plain(cls, value: object) -> Init:
        fields = mapping(value, "INIT")
        addresses = mapping(fields.get("addresses"), "INIT", "'addresses'")
        inputs = texts(addresses.get("inputs"), "INIT", "'inputs'")
        outputs = texts(addresses.get("outputs"), "INIT", "'outputs'")
        if not inputs or len(inputs) != len(outputs):
            raise ProtocolError(
                f"INIT: {len(inputs)} input and {len(outputs)} output addresses; "
                f"each frontend has one of both"
            )
        config = mapping(fields.get("parallel_config"), "INIT", "'parallel_config'")
        for key, item in config.items():
            text(key, "INIT", "a key of 'parallel_config'")
            if type(item) not in (int, str, list):
                refuse("INIT", "a value of 'parallel_config'", "integer, string or array", item)
        return cls(
            inputs,
            outputs,
            optional_text(addresses, "coordinator_input", "INIT"),
            optional_text(addresses, "coordinator_output", "INIT"),
            optional_text(addresses, "frontend_stats_publish_address", "INIT"),
            config,
        )


@dataclass(frozen=True, slots=True)
class Registration:
    """What an engine says of itself when it connects its input socket.

    The frame on the wire may also be empty, which says nothing: ``Registration({})``, made by
    whoever received it, since an empty frame is no payload in either dialect.
    """

    ready: Mapping[str, Any] = field(default_factory=dict)

    @property
    def data_parallel_size(self) -> int:
        """More than 1 for a member of a lockstep group."""
        return int(self.ready.get("data_parallel_size", 1))

    @property
    def vllm_version(self) -> str:
        """Empty when the engine did not say."""
        return str(self.ready.get("vllm_version", ""))

    def to_plain(self) -> dict[str, Any]:
        return dict(self.ready)

    @classmethod
    def from_plain(cls, value: object) -> Registration:
        ready = mapping(value, "registration")
        for key in ready:
            text(key, "registration", "a key")
        text(ready.get("vllm_version", ""), "registration", "'vllm_version'")
        size = ready.get("data_parallel_size", 1)
        if integer(size, "registration", "'data_parallel_size'") < 1:
            raise ProtocolError("registration: 'data_parallel_size' must be at least 1")
        return cls(ready)


class UtilityRequest(NamedTuple):
    """A named control operation with positional arguments, for one engine."""

    client_index: int
    """Which of the engine's output connections takes the reply."""
    call_id: int
    method: str
    args: Sequence[Any] = ()

    def to_plain(self) -> list[Any]:
        return [self.client_index, self.call_id, self.method, list(self.args)]

    @classmethod
    def from_plain(cls, value: object) -> UtilityRequest:
        client_index, call_id, method, args = record(value, "UTILITY", 4)[:4]
        if integer(client_index, "UTILITY", "the client index") < 0:
            raise ProtocolError("UTILITY: the client index is negative")
        integer(call_id, "UTILITY", "the call id")
        text(method, "UTILITY", "the method")
        if type(args) is not list:
            refuse("UTILITY", "the arguments", "an array", args)
        return cls(client_index, call_id, method, args)


@dataclass(frozen=True, slots=True)
class StartWave:
    """The ranks of a lockstep group shall run (see ``wire/waves.py``)."""

    wave: int
    exclude_engine: int | None = None
    """A rank that runs already."""

    def to_plain(self) -> list[int | None]:
        return [self.wave, self.exclude_engine]

    @classmethod
    def from_plain(cls, value: object) -> StartWave:
        """Read the wave and the rank; frontends of vLLM name a rank by its bytes, which excludes
        nobody.
        """
        fields = record(value, "START_DP_WAVE", 2)
        wave = integer(fields[0], "START_DP_WAVE", "the wave")
        exclude = fields[1]
        if exclude is not None and type(exclude) is not int and type(exclude) is not bytes:
            refuse("START_DP_WAVE", "the rank", "an integer, bytes or nil", exclude)
        return cls(wave, exclude if type(exclude) is int else None)


@dataclass(frozen=True, slots=True)
class Abort:
    """The engine shall stop these requests; ids that it does not know are ignored."""

    request_ids: tuple[str, ...]

    def to_plain(self) -> list[str]:
        return list(self.request_ids)

    @classmethod
    def from_plain(cls, value: object) -> Abort:
        """Read an array of ids, or a bare id, which the engines take too."""
        if type(value) is str:
            return cls((value,))
        return cls(texts(value, "ABORT", "the payload"))


_new: Final = tuple.__new__
"""Makes a named tuple in half the time of its own ``__new__``, which is written in Python."""


class UtilityReply(NamedTuple):
    """An engine's answer to one :class:`UtilityRequest`."""

    call_id: int
    """Echoed from the request; negative ids are messages of the engine's own making."""
    failure: str | None = None
    """None for success; the text may be empty."""
    value: Any = None

    def to_plain(self) -> list[Any]:
        # The item before the value describes its Python type between engines and frontends that
        # trust each other with pickles: never sent, and ignored when it comes.
        result = [None, self.value] if self.failure is None else None
        return [self.call_id, self.failure, result]

    @classmethod
    def from_plain(cls, value: object) -> UtilityReply:
        if type(value) is not list or len(value) != 3:
            value = [*record(value, "utility reply", 1), None, None][:3]
        call_id, failure, result = value
        if type(call_id) is not int:
            refuse("utility reply", "the call id", "an integer", call_id)
        if failure is not None and type(failure) is not str:
            refuse("utility reply", "the failure", "a string or nil", failure)
        if result is None or failure is not None:
            return _new(cls, (call_id, failure, None))
        if type(result) is not list or len(result) < 2:
            refuse("utility reply", "the result", "an array of two or nil", result)
        return _new(cls, (call_id, None, result[1]))


class Outputs(NamedTuple):
    """One message of an engine on its output socket: any of its parts may be present.

    A tuple, as :class:`UtilityReply` is: every message makes both, and a frozen dataclass takes
    four times as long to make.
    """

    engine_index: int = 0
    outputs: Sequence[Any] = ()
    """Records of requests, not looked into here."""
    scheduler_stats: Mapping[Any, Any] | None = None
    timestamp: float = 0.0
    """The engine's monotonic clock, not comparable with any other."""
    utility: UtilityReply | None = None
    finished_requests: tuple[str, ...] | None = None
    wave_complete: int | None = None
    start_wave: int | None = None
    weight_version: str | None = None
    others: Set[int] | None = None
    """Which of the records are more than a request id, tokens and how it ended; None when nobody
    has looked.  The rest need no further check."""

    def to_plain(self) -> list[Any]:
        return [
            self.engine_index,
            list(self.outputs),
            None if self.scheduler_stats is None else dict(self.scheduler_stats),
            self.timestamp,
            None if self.utility is None else self.utility.to_plain(),
            None if self.finished_requests is None else list(self.finished_requests),
            self.wave_complete,
            self.start_wave,
            self.weight_version,
        ]

    @classmethod
    def decode(cls, codec: Codec, frame: bytes) -> Outputs:
        """Read an engine's message, as ``from_plain(codec.decode(frame))`` does, in half the time.

        Only what :meth:`from_plain` does not look into is verified to be plain, at the depth where
        it lies.  And nearly all of what a busy engine sends are records of a token and nothing
        else: of these one look tells both that they are plain and that they are good outputs.

        Raises:
            ProtocolError: as :meth:`from_plain`.
        """
        return cls.from_plain(codec.read(frame), unverified=codec)

    @classmethod
    def from_plain(cls, value: object, unverified: Codec | None = None) -> Outputs:
        """Read an engine's message.

        Args:
            value: what the message consists of.
            unverified: verifies what is not looked into here; None where that was done.

        Raises:
            ProtocolError: not valid; its ``engine_index`` and ``call_id`` are those of the message
                where that much could be read, so that only whom it was for need fail.
        """
        # One function, though a long one: each engine's every message comes through here.
        fields = value
        try:
            if type(fields) is not list or len(fields) != 9:
                fields = [*record(value, "outputs", 0)]
                fields = (fields + _ABSENT[len(fields) :])[:9]
            index, outputs, stats, timestamp, reply, finished, complete, start, version = fields
            if type(index) is not int or not 0 <= index < MAX_ENGINES:
                refuse("outputs", "the engine index", f"an integer below {MAX_ENGINES}", index)
            if type(outputs) is not list:
                refuse("outputs", "the outputs", "an array", outputs)
            if stats is not None and type(stats) is not dict:
                refuse("outputs", "the scheduler statistics", "a map or nil", stats)
            if type(timestamp) is not float and type(timestamp) is not int:
                refuse("outputs", "the timestamp", "a number", timestamp)
            if finished is not None:
                finished = texts(finished, "outputs", "the finished requests")
            if complete is not None and type(complete) is not int:
                refuse("outputs", "a wave", "an integer or nil", complete)
            if start is not None and type(start) is not int:
                refuse("outputs", "a wave", "an integer or nil", start)
            if version is not None and type(version) is not str:
                refuse("outputs", "the weight version", "a string or nil", version)
            if reply is not None:
                reply = UtilityReply.from_plain(reply)
        except ProtocolError as error:
            if type(value) is list:
                error.engine_index = _readable_index(value)
                error.call_id = _readable_call(value)
            raise
        others = None
        if unverified is not None:
            if outputs:
                others = _more_than_tokens(outputs)
            if others or stats is not None:
                unverified.verify([[outputs[number] for number in others or ()], stats])
            if reply is not None and type(reply.value) not in LEAVES:
                unverified.verify([[[reply.value]]])
        outputs = outputs or ()
        return _new(
            cls,
            (index, outputs, stats, timestamp, reply, finished, complete, start, version, others),
        )


_ABSENT: Final = [0, [], None, 0.0, None, None, None, None, None]
"""What the fields of an engine's message are when it ends before them."""
_FIELDS: Final = 18
"""Of a record of a request."""
_TOKENS_ONLY: Final = [*[None] * 11, 0, *[None] * 4]
"""What follows the request id and the tokens in a record that has nothing else."""
_ENDING: Final = slice(5, 7)
"""The finish reason and the stop reason."""


def _more_than_tokens(records: Sequence[Any]) -> set[int]:
    """The positions of those records that are not a request id, its tokens and how it ended.

    What equals None is None; but 0 equals False, too.
    """
    others: set[int] = set()
    usual = _TOKENS_ONLY
    for number, item in enumerate(records):
        if (
            type(item) is list
            and (item[2:] == usual or _ends_like(item))
            and type(item[13]) is int
            and type(item[0]) is str
            and type(tokens := item[1]) is list
            and (
                (len(tokens) == 1 and type(tokens[0]) is int) or {int}.issuperset(map(type, tokens))
            )
        ):
            continue
        others.add(number)
    return others


def _ends_like(record: list[Any]) -> bool:
    """Whether a record would have tokens only, if its request had not ended with it."""
    if len(record) != _FIELDS:
        return False
    reason, stop = record[_ENDING]
    return (
        type(reason) is int
        and (stop is None or type(stop) in (int, str))
        and record[2:5] + record[7:] == _TOKENS_ONLY[2:]
    )


def _readable_index(fields: list[Any]) -> int | None:
    index = fields[0] if fields else 0
    return index if type(index) is int and 0 <= index < MAX_ENGINES else None


def _readable_call(fields: list[Any]) -> int | None:
    reply = fields[4] if len(fields) > 4 else None
    return reply[0] if type(reply) is list and reply and type(reply[0]) is int else None
