"""Faults by script: what a reference engine does wrong, at which message, and how often.

A rule names a message and an action::

    FaultRule("sleep", "drop")                          # every reply to sleep() is lost
    FaultRule("add_lora", "fail", message="no memory")  # it reports a failure
    FaultRule("add_lora", "fail", worker=1)             # one of its workers does
    FaultRule("echo", "die", occurrence=3, engine=1)    # SIGKILL of engine 1 at its third echo()
    FaultRule("OUTPUTS", "garbage", data="ff")          # in place of what requests are told
    FaultRule("READY", "drop")                          # it never reports that it is ready

``method`` is a utility method, ``"*"`` (every utility call), a message type (``"ADD"``,
``"ABORT"``), ``"OUTPUTS"`` (each message about requests that the engine sends) or a message of the
startup (``"HELLO"``, ``"REGISTRATION"``, ``"READY"``).  Each rule counts the messages that match
it, in each engine for itself, from the moment it was added; the first rule whose turn it is acts.
The remote control of an engine (``mock_...``) is never subject to a fault.

One :class:`FaultPlan` serves a whole group.  Engines in threads are given the plan itself, and
rules may be added while they run; engines in processes get it on their command line::

    plan = FaultPlan([FaultRule("add_lora", "fail", engine=1)])
    MockEngine(address, 1, faults=plan)
    [sys.executable, "-m", "engine_client.tools.mock_engine", ..., *plan.arguments()]

or, over the wire, while they run: ``client.call_utility("mock_fault", rule.to_plain())``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

__all__ = ["FaultPlan", "FaultRule"]

STARTUP_MESSAGES = frozenset({"HELLO", "REGISTRATION", "READY"})
REQUEST_MESSAGES = frozenset({"ADD", "ABORT", "START_DP_WAVE"})
OUTPUTS = "OUTPUTS"

ENDINGS = frozenset({"die", "exit", "sentinel", "stop", "stop_answering", "deaf", "mute"})
"""Actions that end or silence the engine: at the message, or with ``after_reply`` behind it."""

REPLIES = frozenset(
    {
        "answer",
        "busy",
        "corrupt",
        "delay",
        "drop",
        "duplicate",
        "fail",
        "fail_after",
        "garbage",
        "hold",
        "unknown_id",
    }
)
"""Actions on one reply; the engine goes on."""

_POSSIBLE_AT_STARTUP = ENDINGS | {"drop", "busy", "delay", "duplicate", "garbage"}
_POSSIBLE_AT_REQUESTS = ENDINGS | {"drop", "busy", "garbage"}
_POSSIBLE_AT_OUTPUTS = ENDINGS | {"drop", "busy", "delay", "duplicate", "garbage", "hold"}


@dataclass(frozen=True, slots=True)
class FaultRule:
    """One fault.

    What ``do`` can be:

    ==================  =========================================================================
    ``drop``            the call is executed, its reply is lost; a request is not run
    ``delay``           the reply leaves ``seconds`` later; the engine goes on meanwhile
    ``busy``            the engine handles nothing at all for ``seconds``, then answers
    ``hold``            the reply waits for the remote call ``mock_release``
    ``duplicate``       the reply is sent twice
    ``unknown_id``      the reply carries a call id that nobody waits for
    ``garbage``         the frames ``data`` instead of the reply
    ``corrupt``         the reply with the bytes ``data`` in place of its value; without ``data``
                        it ends there.  Engine index and call id stay readable
    ``fail``            the call is not executed; a failure with ``message`` is reported.  With
                        ``worker``, that worker of the engine fails and the others execute it
    ``fail_after``      the call is executed, and a failure with ``message`` reported all the same
    ``answer``          the call is not executed; it is answered with ``value``
    ``die``             SIGKILL to itself (an engine in a thread drops its sockets)
    ``exit``            ends with ``code``, after writing ``message`` to stderr
    ``sentinel``        announces its death, closes the output, ends ``seconds`` later with ``code``
    ``stop``            SIGSTOP to itself (an engine in a thread: ``stop_answering``)
    ``stop_answering``  stays connected, receives, never sends anything again
    ``deaf``            closes its input
    ``mute``            closes its output
    ==================  =========================================================================
    """

    method: str
    """The message it acts on; see the module's text."""
    do: str
    occurrence: int | None = None
    """Act only on this match, counted from 1; None: on every one."""
    seconds: float = 0.0
    data: str | tuple[str, ...] = ()
    """Bytes in hexadecimal: one string is one frame."""
    message: str = ""
    code: int = 1
    after_reply: bool = False
    """Ending actions only: execute and answer first, with the reply flushed."""
    engine: int | None = None
    """Act only in the engine with this index, so that one plan serves a group."""
    value: Any = None
    """What ``answer`` answers."""
    worker: int | None = None
    """The worker that ``fail`` fails in; None: the engine itself."""

    def __post_init__(self) -> None:
        if not self.method:
            raise ValueError("a fault needs the method it acts on")
        if self.method in STARTUP_MESSAGES:
            possible = _POSSIBLE_AT_STARTUP
        elif self.method in REQUEST_MESSAGES:
            possible = _POSSIBLE_AT_REQUESTS
        elif self.method == OUTPUTS:
            possible = _POSSIBLE_AT_OUTPUTS
        else:
            possible = ENDINGS | REPLIES
        if self.do not in possible:
            known = ", ".join(sorted(possible))
            raise ValueError(f"no fault {self.do!r} at {self.method}; there are: {known}")
        if self.after_reply and (self.do not in ENDINGS or self.do == "stop"):
            # A stopped process has no thread left that could flush the reply.
            raise ValueError(f"after_reply has no meaning for {self.do!r}")
        if self.worker is not None and self.do != "fail":
            raise ValueError(f"worker has no meaning for {self.do!r}")
        if self.occurrence is not None and self.occurrence < 1:
            raise ValueError(f"occurrence counts from 1, not {self.occurrence}")
        if not self.seconds >= 0:
            raise ValueError(f"seconds must not be negative, not {self.seconds}")
        data = (self.data,) if isinstance(self.data, str) else tuple(self.data)
        object.__setattr__(self, "data", data)
        _ = self.frames  # refuse bad hexadecimal here, not in the middle of a test

    @property
    def frames(self) -> list[bytes]:
        """``data`` as bytes."""
        return [bytes.fromhex(frame) for frame in self.data]

    def to_plain(self) -> dict[str, Any]:
        """Return the rule as a map for JSON or for the remote call ``mock_fault``."""
        return {**asdict(self), "data": list(self.data)}

    @classmethod
    def from_plain(cls, value: FaultRule | Mapping[str, Any]) -> FaultRule:
        """Read a rule from a map; unknown keys are refused."""
        if isinstance(value, FaultRule):
            return value
        if not isinstance(value, Mapping):
            raise ValueError(f"a fault is a map, not {type(value).__name__}")
        unknown = set(value) - {field.name for field in fields(cls)}
        if unknown:
            raise ValueError(f"a fault has no field {', '.join(sorted(map(str, unknown)))}")
        if not {"method", "do"} <= set(value):
            raise ValueError("a fault needs 'method' and 'do'")
        return cls(**value)


class _Counted:
    __slots__ = ("matches", "rule")

    def __init__(self, rule: FaultRule) -> None:
        self.rule = rule
        self.matches: dict[int, int] = {}  # for each engine, which alone changes its entry


class FaultPlan:
    """The rules of one or many engines, and how often each rule has matched in each of them.

    Rules may be added from any thread while the engines run.
    """

    def __init__(self, rules: Iterable[FaultRule | Mapping[str, Any]] = ()) -> None:
        self._counted: tuple[_Counted, ...] = tuple(
            _Counted(FaultRule.from_plain(rule)) for rule in rules
        )

    def add(self, rule: FaultRule | Mapping[str, Any]) -> None:
        """Add a rule behind those that are there."""
        # Replaced, not changed: the engine may be reading it in another thread.
        self._counted = (*self._counted, _Counted(FaultRule.from_plain(rule)))

    def clear(self) -> None:
        """Remove every rule."""
        self._counted = ()

    def take(self, message: str, engine: int) -> FaultRule | None:
        """Count ``message`` and return the rule that acts on it, if one does."""
        acting = None
        utility = not (
            message in STARTUP_MESSAGES or message in REQUEST_MESSAGES or message == OUTPUTS
        )
        for counted in self._counted:
            rule = counted.rule
            if rule.engine is not None and rule.engine != engine:
                continue
            if rule.method == message or (rule.method == "*" and utility):
                matches = counted.matches[engine] = counted.matches.get(engine, 0) + 1
                due = rule.occurrence is None or rule.occurrence == matches
                if due and acting is None:
                    acting = rule
        return acting

    def acts_on(self, message: str) -> bool:
        """Return whether there is a rule for a message, whether or not its turn has come."""
        return any(counted.rule.method == message for counted in self._counted)

    def arguments(self) -> list[str]:
        """Return the plan as arguments for the command line of an engine's process."""
        return ["--faults", json.dumps([rule.to_plain() for rule in self])]

    def __bool__(self) -> bool:
        return bool(self._counted)

    def __iter__(self) -> Iterator[FaultRule]:
        return (counted.rule for counted in self._counted)

    def __repr__(self) -> str:
        rules = ", ".join(f"{rule.method}: {rule.do}" for rule in self)
        return f"<FaultPlan {rules or 'without faults'}>"
