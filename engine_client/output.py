"""What an engine says about a request: one output per step, and all of them together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from engine_client.errors import ProtocolError
from engine_client.tensors import Tensor

__all__ = ["Completion", "EngineOutput", "FinishReason", "Logprobs", "output_fault"]


class FinishReason(IntEnum):
    """Why a request ended."""

    STOP = 0
    """A stop token, a stop string, or the end of sequence."""
    LENGTH = 1
    """``max_tokens``, or the model's limit."""
    ABORT = 2
    """It was aborted, by its owner or by a pause."""
    ERROR = 3
    """The engine failed on this request; others go on."""
    REPETITION = 4
    """It repeated itself (``repetition_detection``)."""

    def __str__(self) -> str:
        return self.name

    def __format__(self, spec: str) -> str:
        if spec[-1:] in _NUMBER_FORMATS:
            return int.__format__(self, spec)
        return format(self.name, spec)


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log probabilities of n positions with k + 1 candidates each; column 0 is the token taken.

    An engine that runs this request together with one that asked for more may send more columns:
    the first k + 1 are this one's.
    """

    token_ids: Tensor
    """Shape (n, k + 1)."""
    logprobs: Tensor
    """Shape (n, k + 1)."""
    ranks: Tensor
    """Shape (n,): the rank of the token taken, from 1."""
    cumulative_counts: Any = None

    @classmethod
    def from_plain(cls, value: object, frames: Sequence[bytes]) -> Logprobs:
        """Read the protocol's 4 or 5 positions.

        Raises:
            ProtocolError: they are none.
        """
        if type(value) is not list or len(value) < 3:
            raise ProtocolError("logprobs must be an array of three tensors and more")
        tensors = [Tensor.from_plain(item, frames) for item in value[:3]]
        token_ids, logprobs, ranks = tensors
        return cls(token_ids, logprobs, ranks, value[3] if len(value) > 3 else None)


def _tensor(value: object, frames: Sequence[bytes]) -> Any:
    return Tensor.from_plain(value, frames)


_TYPED: dict[int, Callable[[object, Sequence[bytes]], Any]] = {
    2: Logprobs.from_plain,
    3: Logprobs.from_plain,
    4: _tensor,
    12: _tensor,
    17: _tensor,
}
"""Positions whose values are more than plain."""
_KINDS: dict[int, tuple[type, ...]] = {
    6: (int, str),
    7: (list,),
    8: (dict,),
    9: (dict,),
    10: (dict,),
    11: (dict,),
    13: (int,),
    14: (list,),
    15: (list,),
    16: (dict,),
}
_LENGTH = 18
_NUMBER_FORMATS = tuple("bcdoxXneEfFgG%")
"""What a format ends with that means a number."""


def output_fault(record: Any) -> str | None:
    """Why a record is no output; None when it is one.  Of tokens only, that is known."""
    if type(record) is not list or len(record) < 2 or type(record[0]) is not str:
        return "an output must be an array that begins with a request id"
    tokens = record[1]
    if type(tokens) is not list or not (
        (len(tokens) == 1 and type(tokens[0]) is int) or {int}.issuperset(map(type, tokens))
    ):
        return "an output's new_token_ids must be an array of integers"
    if len(record) > 5 and record[5] is not None and type(record[5]) is not int:
        return "an output's finish_reason must be an integer or nil"
    return None


class EngineOutput:
    """One step of one request.

    Attributes that an engine did not send are None (``num_nans_in_logits``: 0).
    """

    __slots__ = ("_record", "_typed", "engine", "request_id", "text", "timestamp", "weight_version")

    request_id: str
    """The caller's id of the request."""
    engine: int | None
    """The engine that serves it."""
    timestamp: float
    """The engine's monotonic clock, in seconds; compare it only with others of the same engine."""
    weight_version: str | None
    """Of the weights that made this step."""
    text: str | None
    """What is added to the text of the request; may be empty, and lag behind the tokens where they
    end within a character or could begin a stop string.  None without a tokenizer."""

    def __init__(
        self,
        request_id: str,
        new_token_ids: Sequence[int] = (),
        finish_reason: FinishReason | int | None = None,
        *,
        stop_reason: int | str | None = None,
        engine: int | None = None,
        timestamp: float = 0.0,
        weight_version: str | None = None,
        text: str | None = None,
    ) -> None:
        self.request_id = request_id
        self.engine = engine
        self.timestamp = timestamp
        self.weight_version = weight_version
        self.text = text
        self._typed: dict[int, Any] | None = None
        record: list[Any] = [request_id, list(new_token_ids), None, None, None, finish_reason]
        self._record = [*record, stop_reason]

    @classmethod
    def from_plain(
        cls,
        record: list[Any],
        frames: Sequence[bytes] | None,
        request_id: str,
        engine: int,
        timestamp: float,
        weight_version: str | None,
    ) -> EngineOutput:
        """Read the protocol's 18 positions; the first six were checked by :func:`output_fault`.

        ``frames`` is None for a record that has been seen to hold tokens only.

        Raises:
            ProtocolError: another position holds what it cannot.
        """
        self = _new(cls)
        self.request_id = request_id
        self.engine = engine
        self.timestamp = timestamp
        self.weight_version = weight_version
        self.text = None
        self._record = record
        self._typed = None if frames is None else self._read(frames)
        return self

    def _read(self, frames: Sequence[bytes]) -> dict[int, Any]:
        typed: dict[int, Any] = {}
        for position, value in enumerate(self._record[:_LENGTH]):
            if value is None:
                continue
            if position in _TYPED:
                typed[position] = _TYPED[position](value, frames)
            elif position in _KINDS and type(value) not in _KINDS[position]:
                raise ProtocolError(
                    f"position {position} of an output holds a {type(value).__name__}"
                )
        return typed

    def _at(self, position: int) -> Any:
        if self._typed is not None and position in self._typed:
            return self._typed[position]
        return self._record[position] if position < len(self._record) else None

    def end_at(self, stop: str, kept: int) -> None:
        """Make it the last output of its request: a stop string was found in the text.

        Args:
            stop: the string.
            kept: how many of the tokens belong to the request; arrays stay as they came.
        """
        record = [*self._record, *[None] * (7 - len(self._record))]
        record[1] = record[1][:kept]
        record[5], record[6] = int(FinishReason.STOP), stop
        self._record = record
        if self._typed is not None:
            self._typed[6] = stop

    @property
    def new_token_ids(self) -> list[int]:
        """The tokens of this step; may be empty."""
        tokens: list[int] = self._record[1]
        return tokens

    @property
    def finish_reason(self) -> FinishReason | int | None:
        """Set on the last output.  An integer where the engine is newer than this client."""
        reason: int | None = self._record[5] if len(self._record) > 5 else None
        return reason if reason is None else _REASONS.get(reason, reason)

    @property
    def new_logprobs(self) -> Logprobs | None:
        """Of the new tokens."""
        return self._at(2)  # type: ignore[no-any-return]

    @property
    def new_prompt_logprobs_tensors(self) -> Logprobs | None:
        """Of the prompt's tokens, on the first output."""
        return self._at(3)  # type: ignore[no-any-return]

    @property
    def pooling_output(self) -> Tensor | None:
        """The result of a pooling request."""
        return self._at(4)  # type: ignore[no-any-return]

    @property
    def stop_reason(self) -> int | str | None:
        """The stop token, the stop string, or ``"repetition_detected"``."""
        return self._at(6)  # type: ignore[no-any-return]

    @property
    def events(self) -> list[Any] | None:
        """Maps with ``type`` (1 queued, 2 scheduled, 3 preempted) and ``timestamp``."""
        return self._at(7)  # type: ignore[no-any-return]

    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None:
        """For a key-value cache connector."""
        return self._at(8)  # type: ignore[no-any-return]

    @property
    def ec_transfer_params(self) -> Mapping[str, Any] | None:
        """For an encoder cache connector."""
        return self._at(9)  # type: ignore[no-any-return]

    @property
    def trace_headers(self) -> Mapping[str, str] | None:
        """As the request gave them."""
        return self._at(10)  # type: ignore[no-any-return]

    @property
    def prefill_stats(self) -> Mapping[str, int] | None:
        """Counts of prompt tokens (computed, cached ...), on the first output."""
        return self._at(11)  # type: ignore[no-any-return]

    @property
    def routed_experts(self) -> Tensor | None:
        """Which experts served the tokens."""
        return self._at(12)  # type: ignore[no-any-return]

    @property
    def num_nans_in_logits(self) -> int:
        """How many logits were not a number."""
        return self._at(13) or 0

    @property
    def mm_cache_miss_hashes(self) -> list[str] | None:
        """Multimodal items that the engine no longer has; send the request again with data."""
        return self._at(14)  # type: ignore[no-any-return]

    @property
    def new_sampling_mask(self) -> list[Any] | None:
        """As the engine sent it."""
        return self._at(15)  # type: ignore[no-any-return]

    @property
    def spec_decode_metrics(self) -> Mapping[str, Any] | None:
        """Of speculative decoding."""
        return self._at(16)  # type: ignore[no-any-return]

    @property
    def prompt_token_id_logprobs(self) -> Tensor | None:
        """Of the tokens that ``prompt_logprob_token_ids`` asked for."""
        return self._at(17)  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        reason = self.finish_reason
        end = "" if reason is None else f", {getattr(reason, 'name', reason)}"
        text = "" if self.text is None else f", {self.text!r}"
        return f"<EngineOutput {self.request_id!r} {self.new_token_ids}{text}{end}>"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, EngineOutput):
            return NotImplemented
        return (
            self.request_id == other.request_id
            and self.new_token_ids == other.new_token_ids
            and self.finish_reason == other.finish_reason
            and self.stop_reason == other.stop_reason
            and self.text == other.text
        )

    __hash__ = None  # type: ignore[assignment]


_new = object.__new__
_REASONS: dict[int, FinishReason | int] = {int(reason): reason for reason in FinishReason}


@dataclass(frozen=True, slots=True)
class Completion:
    """One prompt's result in a batch; with ``n`` above 1, its first sample's."""

    request_id: str
    token_ids: list[int]
    """All tokens, in order; those that came before an error too."""
    finish_reason: FinishReason | int | None
    stop_reason: int | str | None = None
    error: Exception | None = None
    """Why it failed; None when it ended by itself.  With samples, the first error of any."""
    engine: int | None = None
    """The engine that served it."""
    text: str | None = None
    """All text, without the stop string; None without a tokenizer."""
    samples: tuple[Completion, ...] = ()
    """With ``n`` above 1, all n; otherwise empty."""
