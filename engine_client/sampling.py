"""How a request is sampled or pooled: every parameter of a vLLM 0.32 engine, checked here.

An engine checks its parameters while it decodes them, and an error there ends its input thread: it
stays alive and hears nothing any more.  So every range is checked before anything is sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeGuard

from engine_client._render import shown
from engine_client.errors import RequestRefusedError
from engine_client.tensors import Tensor

__all__ = ["PoolingParams", "SamplingParams"]

_MAX_INT = 2**63 - 1
_STRUCTURED = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
POOLING_TASKS = (
    "embed",
    "classify",
    "token_embed",
    "token_classify",
    "plugin",
    "embed&token_classify",
)


def _refuse(name: str, wanted: str, value: object) -> None:
    raise RequestRefusedError(f"{name} must be {wanted}, not {shown(value)}")


def check_int(name: str, value: Any, least: int | None = None, *, optional: bool = False) -> None:
    """Refuse what is not an integer of at most 64 bits, or is below ``least``."""
    if value is None and optional:
        return
    wanted = "an integer" if least is None else f"an integer of {least} or more"
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or abs(value) > _MAX_INT
        or (least is not None and value < least)
    ):
        _refuse(name, wanted, value)


def check_float(
    name: str,
    value: Any,
    good: Callable[[float], bool],
    wanted: str,
) -> None:
    """Refuse what is not a finite number within its range."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    try:
        if number and math.isfinite(value) and good(value):
            return
    except OverflowError:  # an integer beyond the floats
        pass
    _refuse(name, wanted, value)


def is_list(value: object) -> TypeGuard[Sequence[Any]]:
    """Whether a value goes out as an array: text and bytes are sequences too, and do not.

    An engine ends its receiving over bytes where it takes an array.
    """
    no_list = (str, bytes, bytearray, memoryview)
    return isinstance(value, Sequence) and not isinstance(value, no_list)


def check_token_ids(name: str, value: object, *, optional: bool = True) -> None:
    """Refuse what is not a sequence of token ids (integers from 0)."""
    if value is None and optional:
        return
    if not is_list(value):
        _refuse(name, "a sequence of token ids", value)
        return
    if len(value) == 0:
        return
    kinds = set(map(type, value))
    if kinds != {int}:
        wrong = next(item for item in value if type(item) is not int)
        raise RequestRefusedError(
            f"{name} must hold token ids (integers), not {shown(wrong)} ({type(wrong).__name__})"
        )
    if min(value) < 0 or max(value) > _MAX_INT:
        _refuse(name, "token ids from 0", min(value) if min(value) < 0 else max(value))


def check_map(name: str, value: object) -> None:
    """Refuse what is neither None nor a mapping whose keys are strings."""
    if value is None:
        return
    if not isinstance(value, Mapping):
        _refuse(name, "a mapping", value)
        return
    for key in value:
        if not isinstance(key, str):
            _refuse(name, "a mapping with strings as keys", value)


def _check_bool(name: str, value: object, *, optional: bool = False) -> None:
    if not (isinstance(value, bool) or (optional and value is None)):
        _refuse(name, "True or False", value)


def _check_texts(name: str, value: object) -> None:
    if value is None:
        return
    items: Any = [value] if isinstance(value, str) else value
    if not is_list(items) or not all(isinstance(item, str) for item in items):
        _refuse(name, "a string or a sequence of strings", value)
    elif not all(items):
        raise RequestRefusedError(f"{name} holds an empty string, which an engine refuses")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are sampled.

    Names and defaults are vLLM's.  Two fields are this client's: ``eos_token_id`` makes the end of
    sequence stop a request (an engine knows no tokenizer), and together with ``stop_token_ids`` it
    tells what ``min_tokens`` holds back.

    Raises:
        RequestRefusedError: a value that an engine would not survive, or cannot mean.
    """

    n: int = 1
    presence_penalty: float = 0.0
    """-2 to 2."""
    frequency_penalty: float = 0.0
    """-2 to 2."""
    repetition_penalty: float = 1.0
    """More than 0."""
    temperature: float = 1.0
    """0 to 2; below 1e-5 is greedy."""
    watermarking: bool | None = None
    top_p: float = 1.0
    """More than 0, at most 1."""
    top_k: int = 0
    """-1 and 0: off."""
    min_p: float = 0.0
    """0 to 1."""
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    """Stop strings; matched by the client, which needs a tokenizer for it."""
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int = 16
    min_tokens: int = 0
    logprobs: int | None = None
    """How many alternatives per token; -1: the whole vocabulary."""
    prompt_logprobs: int | None = None
    prompt_logprob_token_ids: Tensor | None = None
    prompt_logprob_start: int | None = None
    logprob_token_ids: Sequence[int] | None = None
    flat_logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: int = 0
    stream_interval: int | None = None
    skip_clone: bool = False
    output_text_buffer_length: int = 0
    eos_token_id: int | None = None
    """The tokenizer's end-of-sequence token; without it, nothing ends a request early."""
    structured_outputs: Mapping[str, Any] | None = None
    """One constraint (``json``, ``regex``, ``choice``, ``grammar``, ``json_object`` or
    ``structural_tag``), and ``_backend`` as the engines were started with."""
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    extra_args: Mapping[str, Any] | None = None
    bad_words: str | Sequence[str] | None = None
    bad_words_token_ids: Sequence[Sequence[int]] | None = None
    """Token sequences that must not come; what ``bad_words`` is turned into by a tokenizer."""
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: int | None = None
    repetition_detection: Mapping[str, int] | None = None
    """``max_pattern_size``, ``min_pattern_size`` and ``min_count``."""
    routed_experts_prompt_start: int = 0
    trace_decode_token_ids: Sequence[int] | None = None

    def __post_init__(self) -> None:
        check_int("n", self.n, 1)
        for name in ("presence_penalty", "frequency_penalty"):
            check_float(name, getattr(self, name), lambda v: -2 <= v <= 2, "a number from -2 to 2")
        check_float("repetition_penalty", self.repetition_penalty, lambda v: v > 0, "more than 0")
        check_float("temperature", self.temperature, lambda v: 0 <= v <= 2, "a number from 0 to 2")
        check_float("top_p", self.top_p, lambda v: 0 < v <= 1, "more than 0 and at most 1")
        check_float("min_p", self.min_p, lambda v: 0 <= v <= 1, "a number from 0 to 1")
        check_int("top_k", self.top_k, -1)
        check_int("seed", self.seed, -(2**63 - 1), optional=True)
        check_int("max_tokens", self.max_tokens, 1)
        check_int("min_tokens", self.min_tokens, 0)
        if self.min_tokens > self.max_tokens:
            raise RequestRefusedError(
                f"min_tokens ({self.min_tokens}) is more than max_tokens ({self.max_tokens})"
            )
        for name in ("logprobs", "prompt_logprobs", "thinking_token_budget"):
            check_int(name, getattr(self, name), -1, optional=True)
        for name in ("prompt_logprob_start", "eos_token_id"):
            check_int(name, getattr(self, name), 0, optional=True)
        check_int("stream_interval", self.stream_interval, 1, optional=True)
        for name in ("output_text_buffer_length", "routed_experts_prompt_start"):
            check_int(name, getattr(self, name), 0)
        check_int("output_kind", self.output_kind)  # 1.0 is in (0, 1, 2) too
        if self.output_kind not in (0, 1, 2):
            _refuse("output_kind", "0, 1 or 2", self.output_kind)
        for name in (
            "stop_token_ids",
            "logprob_token_ids",
            "allowed_token_ids",
            "trace_decode_token_ids",
        ):
            check_token_ids(name, getattr(self, name))
        if self.allowed_token_ids is not None and len(self.allowed_token_ids) == 0:
            raise RequestRefusedError("allowed_token_ids is empty: no token could be sampled")
        for name in ("stop", "bad_words"):
            _check_texts(name, getattr(self, name))
        for name in (
            "ignore_eos",
            "flat_logprobs",
            "detokenize",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "include_stop_str_in_output",
            "skip_clone",
        ):
            _check_bool(name, getattr(self, name))
        for name in ("watermarking", "skip_reading_prefix_cache"):
            _check_bool(name, getattr(self, name), optional=True)
        if self.n > 1 and self.temperature < 1e-5:
            raise RequestRefusedError("n must be 1 with temperature 0: all would be the same")
        if self.stop and not self.detokenize:
            raise RequestRefusedError("stop needs detokenize=True")
        self._check_maps()

    def _check_maps(self) -> None:
        words: Any = self.bad_words_token_ids
        if words is not None and not is_list(words):
            _refuse("bad_words_token_ids", "a sequence of sequences of token ids", words)
        for index, word in enumerate(words or ()):
            check_token_ids(f"bad_words_token_ids[{index}]", word, optional=False)
            if len(word) == 0:
                raise RequestRefusedError(f"bad_words_token_ids[{index}] is empty")
        tokens: Any = self.prompt_logprob_token_ids
        if not isinstance(tokens, (Tensor, type(None))):
            _refuse("prompt_logprob_token_ids", "a Tensor", tokens)
        for name in ("structured_outputs", "extra_args", "repetition_detection"):
            check_map(name, getattr(self, name))
        bias: Any = self.logit_bias
        if not isinstance(bias, (Mapping, type(None))):
            _refuse("logit_bias", "a mapping", bias)
        for token, weight in (self.logit_bias or {}).items():
            check_int("a token of logit_bias", token, 0)
            check_float("a bias of logit_bias", weight, lambda v: True, "a finite number")
        if self.structured_outputs is not None:
            given = [key for key in _STRUCTURED if self.structured_outputs.get(key) is not None]
            if len(given) != 1:
                raise RequestRefusedError(
                    f"structured_outputs must have one of {', '.join(_STRUCTURED)}, not "
                    f"{len(given)}"
                )
            if not self.structured_outputs.get("_backend"):
                raise RequestRefusedError(
                    "structured_outputs must name the engines' backend in '_backend' "
                    "('xgrammar', 'guidance', ...): an engine does not choose one itself"
                )
            self._check_constraint(self.structured_outputs)
        if self.repetition_detection is not None:
            self._check_repetition(self.repetition_detection)

    @staticmethod
    def _check_constraint(constraint: Mapping[str, Any]) -> None:
        for key, kind, wanted in (
            ("json", (str, Mapping), "a string or a mapping"),
            ("regex", str, "a string"),
            ("grammar", str, "a string"),
            ("structural_tag", str, "a string"),
            ("json_object", bool, "True or False"),
            ("_backend", str, "a string"),
            ("whitespace_pattern", str, "a string"),
            ("disable_any_whitespace", bool, "True or False"),
            ("disable_additional_properties", bool, "True or False"),
            ("_backend_was_auto", bool, "True or False"),
        ):
            value = constraint.get(key)
            if value is not None and not isinstance(value, kind):
                _refuse(f"structured_outputs[{key!r}]", wanted, value)
        choice = constraint.get("choice")
        if choice is not None and not (
            is_list(choice) and all(isinstance(item, str) for item in choice)
        ):
            _refuse("structured_outputs['choice']", "a sequence of strings", choice)
        for key in ("json", "regex", "choice", "grammar", "structural_tag"):
            value = constraint.get(key)
            # An empty mapping is a schema: that of any JSON.
            if value is not None and not isinstance(value, Mapping) and len(value) == 0:
                raise RequestRefusedError(
                    f"structured_outputs[{key!r}] is empty: nothing could be generated"
                )
        if constraint.get("json_object") is False:
            raise RequestRefusedError(
                "structured_outputs['json_object'] is False, which an engine takes for no "
                "constraint at all, and fails: leave structured_outputs out"
            )

    @staticmethod
    def _check_repetition(detection: Mapping[str, int]) -> None:
        for key, size in detection.items():
            check_int(f"repetition_detection[{key!r}]", size, 0)
        longest, shortest = (detection.get(f"{m}_pattern_size", 0) for m in ("max", "min"))
        if shortest > longest:
            raise RequestRefusedError(
                f"repetition_detection: min_pattern_size ({shortest}) is more than "
                f"max_pattern_size ({longest})"
            )
        if longest > 0 and detection.get("min_count", 0) < 2:
            raise RequestRefusedError(
                "repetition_detection: min_count must be 2 or more: once is no repetition"
            )

    def to_plain(self) -> dict[str, Any]:
        """The wire's map: what differs from the defaults, and the two keys for stopping.

        A :class:`Tensor` stands for itself in it.
        """
        plain: dict[str, Any] = {}
        for name, default in _DEFAULTS.items():
            value = getattr(self, name)
            if value is not default and value != default:
                plain[_WIRE_NAMES.get(name, name)] = value
        for name in ("stop", "bad_words"):
            if isinstance(plain.get(name), str):  # an engine's receiving would end with it
                plain[name] = [plain[name]]
        stops = set(self.stop_token_ids or ())
        if self.eos_token_id is not None:
            stops.add(self.eos_token_id)
            if not self.ignore_eos:
                plain["_eos_token_id"] = self.eos_token_id
        plain.pop("eos_token_id", None)
        if stops:
            plain["_all_stop_token_ids"] = sorted(stops)
        return plain


_DEFAULTS = {field.name: field.default for field in fields(SamplingParams)}
_WIRE_NAMES = {"bad_words_token_ids": "_bad_words_token_ids"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """How a prompt is pooled into a vector or a score, instead of continued.

    Raises:
        RequestRefusedError: an unknown task (an engine dies of it), or a value of a wrong type.
    """

    task: str | None = None
    """``"embed"``, ``"classify"``, ``"token_embed"``, ``"token_classify"``, ``"plugin"`` or
    ``"embed&token_classify"``; the engine must list it among its supported tasks."""
    use_activation: bool | None = None
    dimensions: int | None = None
    step_tag_id: int | None = None
    returned_token_ids: Sequence[int] | None = None
    requires_token_ids: bool = False
    skip_reading_prefix_cache: bool | None = None
    late_interaction_params: Sequence[Any] | None = None
    extra_kwargs: Mapping[str, Any] | None = None
    output_kind: int = 2
    """The final output only: an engine refuses others, and hears nothing any more."""

    def __post_init__(self) -> None:
        if self.task is not None and self.task not in POOLING_TASKS:
            _refuse("task", f"one of {', '.join(POOLING_TASKS)}", self.task)
        check_int("dimensions", self.dimensions, 1, optional=True)
        check_int("step_tag_id", self.step_tag_id, 0, optional=True)
        check_token_ids("returned_token_ids", self.returned_token_ids)
        for name in ("use_activation", "skip_reading_prefix_cache"):
            _check_bool(name, getattr(self, name), optional=True)
        _check_bool("requires_token_ids", self.requires_token_ids)
        check_map("extra_kwargs", self.extra_kwargs)
        late: Any = self.late_interaction_params
        if late is not None:
            wanted = "mode and query key (strings), and how often it is used (an integer or None)"
            if (
                not is_list(late)
                or len(late) not in (2, 3)
                or not all(isinstance(item, str) for item in late[:2])
            ):
                _refuse("late_interaction_params", wanted, late)
            check_int("late_interaction_params[2]", (*late, None)[2], optional=True)
        check_int("output_kind", self.output_kind)
        if self.output_kind != 2:
            _refuse("output_kind", "2 (the final output only) to pool", self.output_kind)

    def to_plain(self) -> list[Any]:
        """The wire's ten positions."""
        return [
            self.use_activation,
            self.dimensions,
            self.step_tag_id,
            self.returned_token_ids,
            self.task,
            self.requires_token_ids,
            self.skip_reading_prefix_cache,
            self.late_interaction_params,
            self.extra_kwargs,
            self.output_kind,
        ]
