"""Sampling and pooling parameters as a reference engine reads them: strictly.

A vLLM engine checks types and ranges while it decodes; what is wrong ends its receiving.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

from engine_client.errors import ProtocolError

__all__ = ["Pooling", "Repetition", "Sampling", "read_pooling", "read_sampling"]

GREEDY_BELOW = 1e-5
CERTAIN_FROM = 100.0
"""The greatest bias of a token: only this token is generated."""
_CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_BACKENDS = ("xgrammar", "guidance", "outlines", "lm-format-enforcer")

Check = Callable[[Any], bool]


def is_int(value: Any) -> bool:
    """Whether it is an integer; a bool is none."""
    return type(value) is int


def is_number(value: Any) -> bool:
    """Whether it is an integer or a float."""
    return type(value) in (int, float)


def is_text(value: Any) -> bool:
    """Whether it is a string."""
    return type(value) is str


def is_flag(value: Any) -> bool:
    """Whether it is a boolean."""
    return type(value) is bool


def is_map(value: Any) -> bool:
    """Whether it is a map."""
    return type(value) is dict


def array_of(check: Check) -> Check:
    """A check for an array whose items all pass a check."""
    return lambda value: type(value) is list and all(map(check, value))


def or_nil(check: Check) -> Check:
    """A check that nil passes too."""
    return lambda value: value is None or check(value)


def between(low: float, high: float) -> Check:
    """A check for a number in a closed range; NaN is in none."""
    return lambda value: is_number(value) and low <= value <= high


def at_least(low: int) -> Check:
    """A check for an integer."""
    return lambda value: is_int(value) and value >= low


_texts = array_of(lambda value: is_text(value) and value != "")

_SAMPLING: Mapping[str, Check] = {
    "n": at_least(1),
    "presence_penalty": between(-2, 2),
    "frequency_penalty": between(-2, 2),
    "repetition_penalty": lambda value: is_number(value) and isfinite(value) and value > 0,
    "temperature": between(0, 2),
    "watermarking": or_nil(is_flag),
    "top_p": lambda value: is_number(value) and 0 < value <= 1,
    "top_k": at_least(-1),
    "min_p": between(0, 1),
    "seed": or_nil(is_int),
    "stop": or_nil(lambda value: (is_text(value) and value != "") or _texts(value)),
    "stop_token_ids": or_nil(array_of(is_int)),
    "ignore_eos": is_flag,
    "max_tokens": or_nil(at_least(1)),
    "min_tokens": at_least(0),
    "logprobs": or_nil(at_least(-1)),
    "prompt_logprobs": or_nil(at_least(-1)),
    "prompt_logprob_start": or_nil(is_int),
    "logprob_token_ids": or_nil(array_of(is_int)),
    "flat_logprobs": is_flag,
    "detokenize": is_flag,
    "skip_special_tokens": is_flag,
    "spaces_between_special_tokens": is_flag,
    "include_stop_str_in_output": is_flag,
    "output_kind": lambda value: is_int(value) and 0 <= value <= 2,
    "stream_interval": or_nil(at_least(1)),
    "skip_clone": is_flag,
    "output_text_buffer_length": is_int,
    "_eos_token_id": or_nil(is_int),
    "_all_stop_token_ids": array_of(is_int),
    "_watermarking_skipped": is_flag,
    "structured_outputs": or_nil(
        lambda value: (
            is_map(value) and sum(value.get(name) is not None for name in _CONSTRAINTS) == 1
        )
    ),
    "logit_bias": or_nil(
        lambda value: (
            is_map(value) and all(map(is_int, value)) and all(map(is_number, value.values()))
        )
    ),
    "allowed_token_ids": or_nil(array_of(is_int)),
    "extra_args": or_nil(is_map),
    "bad_words": or_nil(_texts),
    "_bad_words_token_ids": or_nil(array_of(array_of(is_int))),
    "skip_reading_prefix_cache": or_nil(is_flag),
    "thinking_token_budget": or_nil(at_least(-1)),
    "repetition_detection": or_nil(is_map),
    "routed_experts_prompt_start": is_int,
    "trace_decode_token_ids": or_nil(array_of(is_int)),
}


@dataclass(frozen=True, slots=True)
class Repetition:
    """When a request ends because it repeats itself."""

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def found_in(self, tokens: list[int]) -> bool:
        """Whether the last tokens are one pattern, again and again."""
        for size in range(max(1, self.min_pattern_size), self.max_pattern_size + 1):
            length = size * self.min_count
            if length > len(tokens):
                return False
            if tokens[-length:] == tokens[-size:] * self.min_count:
                return True
        return False


@dataclass(frozen=True, slots=True)
class Sampling:
    """What a reference engine makes use of."""

    max_tokens: int | None = 16
    min_tokens: int = 0
    seed: int | None = None
    eos_token_id: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    masked_token_ids: frozenset[int] = frozenset()
    """Not generated before ``min_tokens``."""
    logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] | None = None
    prompt_logprobs: int | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    certain_token_id: int | None = None
    """A token with a bias that leaves no other a chance."""
    trace: tuple[int, ...] = ()
    """Tokens to generate instead of its own."""
    repetition: Repetition | None = None
    skip_prefix_cache: bool = False
    grammar_backend: str | None = ""
    """Empty: no structured output is wanted."""

    @property
    def grammar_known(self) -> bool:
        """Whether the structured output, if any, can be prepared."""
        return self.grammar_backend == "" or self.grammar_backend in _BACKENDS


def read_sampling(fields: Mapping[Any, Any]) -> Sampling:
    """Read sampling parameters; unknown keys are ignored.

    Raises:
        ProtocolError: a value of the wrong type or out of its range.
    """
    for name, check in _SAMPLING.items():
        if name in fields and not check(fields[name]):
            raise ProtocolError(f"sampling parameters: {name} is wrong")
    get = fields.get
    max_tokens, min_tokens = get("max_tokens", 16), get("min_tokens", 0)
    if max_tokens is not None and min_tokens > max_tokens:
        raise ProtocolError("sampling parameters: min_tokens is greater than max_tokens")
    if get("temperature", 1.0) < GREEDY_BELOW and get("n", 1) > 1:
        raise ProtocolError("sampling parameters: n must be 1 without a temperature")
    if get("stop") and not get("detokenize", True):
        raise ProtocolError("sampling parameters: stop strings need detokenize")
    stop = frozenset(get("stop_token_ids") or ())
    seed, grammar = get("seed"), get("structured_outputs")
    wanted = get("logprob_token_ids")
    skip = get("skip_reading_prefix_cache")
    return Sampling(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        seed=None if seed == -1 else seed,
        eos_token_id=get("_eos_token_id"),
        stop_token_ids=stop,
        masked_token_ids=stop.union(get("_all_stop_token_ids", ())),
        logprobs=get("logprobs"),
        logprob_token_ids=None if wanted is None else tuple(wanted),
        prompt_logprobs=get("prompt_logprobs"),
        allowed_token_ids=tuple(get("allowed_token_ids") or ()) or None,
        certain_token_id=_certain(get("logit_bias") or {}),
        trace=tuple(get("trace_decode_token_ids") or ()),
        repetition=_read_repetition(get("repetition_detection")),
        skip_prefix_cache=get("prompt_logprobs") is not None if skip is None else skip,
        grammar_backend="" if grammar is None else grammar.get("_backend"),
    )


def _certain(bias: Mapping[int, float]) -> int | None:
    token = max(bias, key=bias.__getitem__, default=None)
    return token if token is not None and bias[token] >= CERTAIN_FROM else None


def _read_repetition(fields: Mapping[Any, Any] | None) -> Repetition | None:
    if fields is None:
        return None
    names = ("max_pattern_size", "min_pattern_size", "min_count")
    values = [fields.get(name, 0) for name in names]
    if not all(map(at_least(0), values)):
        raise ProtocolError("sampling parameters: repetition_detection is wrong")
    found = Repetition(*values)
    too_few = found.max_pattern_size > 0 and found.min_count < 2
    if found.min_pattern_size > found.max_pattern_size or too_few:
        raise ProtocolError("sampling parameters: repetition_detection is wrong")
    return found if found.max_pattern_size else None


@dataclass(frozen=True, slots=True)
class Pooling:
    """What a reference engine makes use of."""

    task: str | None = None
    dimensions: int | None = None


_POOLING: tuple[Check, ...] = (
    or_nil(is_flag),
    or_nil(is_int),
    or_nil(is_int),
    or_nil(array_of(is_int)),
    or_nil(is_text),
    is_flag,
    or_nil(is_flag),
    or_nil(lambda value: type(value) is list),
    or_nil(is_map),
    lambda value: is_int(value) and value == 2,
)


def read_pooling(fields: list[Any]) -> Pooling:
    """Read pooling parameters, an array of up to ten.

    Raises:
        ProtocolError: a value of the wrong type.
    """
    for position, (value, check) in enumerate(zip(fields, _POOLING, strict=False)):
        if not check(value):
            raise ProtocolError(f"pooling parameters: position {position} is wrong")
    dimensions, task = (*fields, *[None] * 5)[1:5:3]
    return Pooling(task, dimensions)
