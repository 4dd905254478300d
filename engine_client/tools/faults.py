"""Faults by script: what a reference engine does wrong, at which message, and how often.

A rule names a message and an action::

    FaultRule("sleep", "drop")                          # every reply to sleep() is lost
    FaultRule("add_lora", "fail", message="no memory")  # it reports a failure
    FaultRule("echo", "die", occurrence=3)              # SIGKILL at the third echo()
    FaultRule("READY", "drop")                          # it never reports that it is ready

``method`` is a utility method, ``"*"`` (every utility call), a message type (``"ADD"``,
``"ABORT"``) or a message of the startup (``"HELLO"``, ``"REGISTRATION"``, ``"READY"``).  Each rule
counts the messages that match it, from the moment it was added; the first rule whose turn it is
acts.  The remote control of an engine (``mock_...``) is never subject to a fault.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

__all__ = ["FaultPlan", "FaultRule"]

STARTUP_MESSAGES = frozenset({"HELLO", "REGISTRATION", "READY"})
REQUEST_MESSAGES = frozenset({"ADD", "ABORT", "START_DP_WAVE"})

ENDINGS = frozenset({"die", "exit", "sentinel", "stop", "stop_answering", "deaf", "mute"})
"""Actions that end or silence the engine: at the message, or with ``after_reply`` behind it."""

REPLIES = frozenset(
    {"drop", "delay", "duplicate", "garbage", "corrupt", "unknown_id", "fail", "hold", "busy"}
)
"""Actions on one reply; the engine goes on."""

_POSSIBLE_AT_STARTUP = ENDINGS | {"drop", "busy", "delay", "duplicate", "garbage"}
_POSSIBLE_AT_REQUESTS = ENDINGS | {"drop", "busy", "garbage"}


@dataclass(frozen=True, slots=True)
class FaultRule:
    """One fault.

    What ``do`` can be:

    ==================  =========================================================================
    ``drop``            the call is executed, its reply is lost
    ``delay``           the reply leaves ``seconds`` later; the engine goes on meanwhile
    ``busy``            the engine handles nothing at all for ``seconds``, then answers
    ``hold``            the reply waits for the remote call ``mock_release``
    ``duplicate``       the reply is sent twice
    ``unknown_id``      the reply carries a call id that nobody waits for
    ``garbage``         the frames ``data`` instead of the reply
    ``corrupt``         the reply with the bytes ``data`` in place of its value; without ``data``
                        it ends there.  Engine index and call id stay readable
    ``fail``            the call is not executed; a failure with ``message`` is reported
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

    def __post_init__(self) -> None:
        if not self.method:
            raise ValueError("a fault needs the method it acts on")
        if self.method in STARTUP_MESSAGES:
            possible = _POSSIBLE_AT_STARTUP
        elif self.method in REQUEST_MESSAGES:
            possible = _POSSIBLE_AT_REQUESTS
        else:
            possible = ENDINGS | REPLIES
        if self.do not in possible:
            known = ", ".join(sorted(possible))
            raise ValueError(f"no fault {self.do!r} at {self.method}; there are: {known}")
        if self.after_reply and (self.do not in ENDINGS or self.do == "stop"):
            # A stopped process has no thread left that could flush the reply.
            raise ValueError(f"after_reply has no meaning for {self.do!r}")
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
        self.matches = 0


class FaultPlan:
    """The rules of one engine and how often each has matched.

    Rules may be added from any thread while the engine runs.  An engine counts for itself: give
    each its own plan (``MockEngine`` makes one from a list of rules).
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
        utility = message not in STARTUP_MESSAGES and message not in REQUEST_MESSAGES
        for counted in self._counted:
            rule = counted.rule
            if rule.engine is not None and rule.engine != engine:
                continue
            if rule.method == message or (rule.method == "*" and utility):
                counted.matches += 1
                due = rule.occurrence is None or rule.occurrence == counted.matches
                if due and acting is None:
                    acting = rule
        return acting

    def __bool__(self) -> bool:
        return bool(self._counted)

    def __iter__(self) -> Iterator[FaultRule]:
        return (counted.rule for counted in self._counted)

    def __repr__(self) -> str:
        rules = ", ".join(f"{rule.method}: {rule.do}" for rule in self)
        return f"<FaultPlan {rules or 'without faults'}>"
