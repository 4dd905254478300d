"""Every error that the client raises.

::

    EngineClientError
    ├── HandshakeError              an engine did not start as it must
    │   └── HandshakeTimeout        (also TimeoutError)
    ├── ClientClosedError           you closed the client
    ├── ClientBrokenError           the world broke it; ``__cause__`` says what
    ├── ProtocolError               a peer sent something invalid
    ├── EncodeError                 an argument cannot be sent      (also TypeError)
    ├── RequestRefusedError         a guard rail                    (also ValueError)
    ├── EngineError                 one engine, one call
    │   ├── RemoteError             it replied with a failure
    │   ├── RefusedError            it replied False
    │   ├── EngineDeadError         it died, disconnected or was replaced
    │   ├── CallTimeout             no reply by the deadline        (also TimeoutError)
    │   ├── ReplyError              its reply could not be decoded
    │   ├── AbandonedError          the client or the caller left before the reply
    │   └── NotSentError            it was never sent
    ├── UtilityCallError            a fan-out in which an engine failed
    │   └── UtilityTimeoutError     (also TimeoutError)
    ├── ConsensusError              all engines answered, unequally
    ├── DuplicateRequestError       this request id is in use
    └── StreamError                 a request's stream ended early
        ├── StreamAborted
        ├── StreamOverflow
        └── StreamTimeout           (also TimeoutError)

Each has one positional argument, its text; all else are keyword arguments with defaults, kept as
attributes.  So each survives ``pickle`` and ``copy``, which call the class with ``args`` and then
restore the attributes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from engine_client import _render

if TYPE_CHECKING:
    from engine_client.outcome import Outcomes

__all__ = [
    "AbandonedError",
    "CallTimeout",
    "ClientBrokenError",
    "ClientClosedError",
    "ConsensusError",
    "DuplicateRequestError",
    "EncodeError",
    "EngineClientError",
    "EngineDeadError",
    "EngineError",
    "HandshakeError",
    "HandshakeTimeout",
    "NotSentError",
    "ProtocolError",
    "RefusedError",
    "RemoteError",
    "ReplyError",
    "RequestRefusedError",
    "StreamAborted",
    "StreamError",
    "StreamOverflow",
    "StreamTimeout",
    "UtilityCallError",
    "UtilityTimeoutError",
]

MESSAGE_LIMIT = 500
"""Characters of a remote message that ``str()`` shows; ``RemoteError.message`` holds all of it."""


class EngineClientError(Exception):
    """The base of every error of this package."""

    _facts: ClassVar[tuple[str, ...]] = ()
    """Names of the attributes that are shown beside its text."""

    def __init__(self, message: str = "") -> None:
        super().__init__(message)

    def __repr__(self) -> str:
        facts = "".join(f", {name}={getattr(self, name, None)!r}" for name in self._facts)
        return f"{type(self).__name__}({_render.one_line(str(self), MESSAGE_LIMIT)!r}{facts})"

    def _repr_html_(self) -> str:
        header = ("error", *(name.replace("_", " ") for name in self._facts), "text")
        facts = (getattr(self, name, None) for name in self._facts)
        return _render.html_table(header, [(type(self).__name__, *facts, str(self))])


class HandshakeError(EngineClientError):
    """The engines did not all start as they must."""

    _facts = ("missing", "stage")

    missing: tuple[int, ...]
    """Indices of the engines that are not ready."""
    stage: str
    """What was awaited: ``"bind"``, ``"HELLO"``, ``"READY"``, ``"registration"`` ..."""

    def __init__(self, message: str = "", *, missing: Sequence[int] = (), stage: str = "") -> None:
        super().__init__(message)
        self.missing = tuple(missing)
        self.stage = stage


class HandshakeTimeout(HandshakeError, TimeoutError):
    """Not all engines were ready by the deadline."""


class _EndedError(EngineClientError):
    outcomes: Outcomes | None
    """What each engine did in the call that was under way; None where there was no call."""

    def __init__(self, message: str = "", *, outcomes: Outcomes | None = None) -> None:
        super().__init__(message)
        self.outcomes = outcomes

    def _repr_html_(self) -> str:
        return super()._repr_html_() + _tables(self.outcomes)


class ClientClosedError(_EndedError):
    """The client was closed by its owner."""


class ClientBrokenError(_EndedError):
    """The client ended by itself; ``__cause__`` is the closing cause."""


class ProtocolError(EngineClientError):
    """A peer sent something that the protocol does not allow."""

    engine_index: int | None
    """The engine that the message names, when that much could be read."""
    call_id: int | None
    """The call that the message answers, when that much could be read."""

    def __init__(
        self, message: str = "", *, engine_index: int | None = None, call_id: int | None = None
    ) -> None:
        super().__init__(message)
        self.engine_index = engine_index
        self.call_id = call_id


class EncodeError(EngineClientError, TypeError):
    """An argument cannot be sent; the text names its path.  Nothing was sent."""


class RequestRefusedError(EngineClientError, ValueError):
    """A call or request that would harm an engine; the text names the field.  Nothing was sent."""


class EngineError(EngineClientError):
    """One engine's failure in one call."""

    _facts = ("engine", "may_have_run")

    engine: int | None
    """Index of the engine."""
    may_have_run: bool
    """Whether the engine may have executed the call."""

    def __init__(
        self, message: str = "", *, engine: int | None = None, may_have_run: bool = True
    ) -> None:
        super().__init__(message)
        self.engine = engine
        self.may_have_run = may_have_run


class RemoteError(EngineError):
    """The engine replied with a failure.

    ``may_have_run`` is True: an engine reports a failure after it began, and some methods change
    the engine before they fail (``pause_scheduler`` stays paused when its cache clearing fails).
    """

    message: str
    """The engine's whole text; ``str()`` shortens it."""
    method: str

    def __init__(
        self,
        message: str = "",
        *,
        engine: int | None = None,
        may_have_run: bool = True,
        method: str = "",
    ) -> None:
        super().__init__(message, engine=engine, may_have_run=may_have_run)
        self.message = message
        self.method = method

    def __str__(self) -> str:
        text = " ".join(self.message.split())
        if len(text) > MESSAGE_LIMIT:
            text = f"{text[:MESSAGE_LIMIT]}... ({len(self.message)} characters in .message)"
        if text.endswith("method failed:"):
            text += " no reason given (vLLM gives none for a call with too many arguments)"
        return text or "the engine reported a failure without a text"


class RefusedError(EngineError):
    """The engine answered False where only True means success (``add_lora``, ``pin_lora``)."""


class EngineDeadError(EngineError):
    """The engine died, lost its connection or was replaced by another process."""


class CallTimeout(EngineError, TimeoutError):
    """The engine had not replied by the deadline.  It may still run the call."""


class ReplyError(EngineError):
    """The engine's reply could not be decoded; the call has run or failed there."""


class AbandonedError(EngineError):
    """The client ended, or the caller was interrupted, before the engine replied."""


class NotSentError(EngineError):
    """The call was not sent to this engine."""

    def __init__(
        self, message: str = "", *, engine: int | None = None, may_have_run: bool = False
    ) -> None:
        super().__init__(message, engine=engine, may_have_run=may_have_run)


class UtilityCallError(EngineClientError):
    """A fan-out in which at least one engine failed; raised after every engine has settled."""

    method: str
    outcomes: Outcomes
    """Every engine's outcome."""
    compensation: Outcomes | None
    """Every outcome of the undo call, when one was asked for and sent."""

    def __init__(
        self,
        message: str = "",
        *,
        method: str = "",
        outcomes: Outcomes | None = None,
        compensation: Outcomes | None = None,
    ) -> None:
        super().__init__(message)
        self.method = method
        # Whoever raises it gives them; the default is for pickle, which restores them afterwards.
        self.outcomes = outcomes  # type: ignore[assignment]
        self.compensation = compensation

    def __str__(self) -> str:
        text = super().__str__()
        if self.compensation is not None:
            text += f"\nundo {self.compensation.summary()}"
        return text

    def __repr__(self) -> str:
        # Not its text, which has several lines.
        if not self.outcomes:
            return super().__repr__()
        undo = f"; undo {self.compensation._counts()}" if self.compensation is not None else ""
        return f"<{type(self).__name__} {self.outcomes._counts()}{undo}>"

    def _repr_html_(self) -> str:
        return _tables(self.outcomes, self.compensation) or super()._repr_html_()


class UtilityTimeoutError(UtilityCallError, TimeoutError):
    """A fan-out in which at least one engine had not replied by the deadline."""


class ConsensusError(EngineClientError):
    """All engines succeeded, but their results differ where they must agree."""

    method: str
    outcomes: Outcomes
    """Every engine's answer."""

    def __init__(
        self, message: str = "", *, method: str = "", outcomes: Outcomes | None = None
    ) -> None:
        super().__init__(message)
        self.method = method
        self.outcomes = outcomes  # type: ignore[assignment]  # as above

    def _repr_html_(self) -> str:
        return super()._repr_html_() + _tables(self.outcomes)


class DuplicateRequestError(EngineClientError):
    """A request with this id is still live in this client."""


class StreamError(EngineClientError):
    """A request's stream ended before its last output."""

    _facts = ("request_id", "engine")

    request_id: str
    engine: int | None

    def __init__(
        self, message: str = "", *, request_id: str = "", engine: int | None = None
    ) -> None:
        super().__init__(message)
        self.request_id = request_id
        self.engine = engine


class StreamAborted(StreamError):
    """The request was aborted."""


class StreamOverflow(StreamError):
    """The consumer fell too far behind; the request was aborted."""


class StreamTimeout(StreamError, TimeoutError):
    """No output came by the deadline; the stream goes on."""


def _tables(outcomes: Outcomes | None, undone: Outcomes | None = None) -> str:
    """The outcomes that an error carries, as HTML."""
    shown = "" if outcomes is None else outcomes._repr_html_()
    return shown if undone is None else shown + undone._repr_html_("undo ")
