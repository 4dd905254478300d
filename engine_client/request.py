"""One generation or pooling request, as a caller describes it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine_client._render import shown
from engine_client.errors import RequestRefusedError
from engine_client.lora import LoraRequest
from engine_client.sampling import (
    PoolingParams,
    SamplingParams,
    check_float,
    check_int,
    check_map,
    check_token_ids,
    is_list,
)
from engine_client.tensors import Tensor, lift_tensors

__all__ = ["EngineRequest"]


_LEFT_OUT: Any = type("_LeftOut", (), {"__repr__": lambda _: "<left out>"})()
"""Parameters that were not given, unlike an explicit None; no request keeps it."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request for one engine: the 22 fields of a vLLM 0.32 request, most with defaults.

    Raises:
        RequestRefusedError: a value that an engine would not survive.
        TypeError: a value of a wrong type.
    """

    request_id: str
    """The caller's name for it; unique among this client's live requests."""
    prompt_token_ids: Sequence[int] | None = None
    sampling_params: SamplingParams | None = _LEFT_OUT
    """Left out together with ``pooling_params``: ``SamplingParams()``; both None is refused."""
    pooling_params: PoolingParams | None = _LEFT_OUT
    mm_features: Sequence[Mapping[str, Any]] | None = None
    """Multimodal inputs, in the protocol's maps; arrays in them are :class:`Tensor`."""
    arrival_time: float | None = None
    """Unix time in seconds; left out: now."""
    lora_request: LoraRequest | None = None
    cache_salt: str | None = None
    data_parallel_rank: int | None = None
    """The engine that must serve it; left out: the least loaded one."""
    prompt_embeds: Tensor | None = None
    prompt_is_token_ids: Sequence[bool] | None = None
    priority: int = 0
    trace_headers: Mapping[str, str] | None = None
    resumable: bool = False
    """Not supported: it needs one id on the wire twice."""
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: Mapping[str, Any] | None = None
    abort_immediately: bool = False
    session_id: str | None = None
    kv_hints: Mapping[str, Any] | None = None
    allow_unloaded_lora: bool = False
    """Let the engine load the adapter of ``lora_request`` itself.  If it cannot, it dies."""
    prompt: str | None = field(default=None, kw_only=True)
    """The prompt as text, instead of ``prompt_token_ids``; sending it needs a tokenizer."""

    def __post_init__(self) -> None:
        self._fill_parameters()
        if not isinstance(self.request_id, str):
            raise TypeError(f"request_id must be a string, not {shown(self.request_id)}")
        if not self.request_id:
            raise RequestRefusedError("request_id is empty")
        if self.prompt is not None:
            if not isinstance(self.prompt, str):
                raise TypeError(f"prompt must be a string or None, not {shown(self.prompt)}")
            if self.prompt_token_ids is not None:
                raise RequestRefusedError(
                    "prompt and prompt_token_ids are both given: a request has one of them"
                )
        elif self.prompt_token_ids is None and self.prompt_embeds is None:
            raise RequestRefusedError("prompt_token_ids is missing: a request needs a prompt")
        if self.prompt_token_ids is not None:
            check_token_ids("prompt_token_ids", self.prompt_token_ids, optional=False)
            if len(self.prompt_token_ids) == 0:
                raise RequestRefusedError("prompt_token_ids is empty: an engine dies of it")
        for name, kind in (
            ("sampling_params", SamplingParams),
            ("pooling_params", PoolingParams),
            ("lora_request", LoraRequest),
            ("prompt_embeds", Tensor),
            ("cache_salt", str),
            ("session_id", str),
            ("reasoning_ended", bool),
        ):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise TypeError(f"{name} must be a {kind.__name__} or None, not {shown(value)}")
        if self.sampling_params is not None and self.pooling_params is not None:
            raise RequestRefusedError(
                "sampling_params and pooling_params are both given: a request has one of them"
            )
        if self.resumable is not False:
            if self.resumable is not True:
                raise TypeError(f"resumable must be False, not {shown(self.resumable)}")
            raise RequestRefusedError(
                "resumable=True is not supported: it needs the same id on the wire twice"
            )
        check_int("data_parallel_rank", self.data_parallel_rank, 0, optional=True)
        check_int("priority", self.priority)
        for name in ("abort_immediately", "allow_unloaded_lora"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, not {shown(getattr(self, name))}")
        if self.arrival_time is not None:
            check_float("arrival_time", self.arrival_time, lambda v: True, "a finite number")
        for name in ("trace_headers", "reasoning_parser_kwargs", "kv_hints"):
            check_map(name, getattr(self, name))
        headers = self.trace_headers or {}
        if not all(isinstance(text, str) for text in (*headers, *headers.values())):
            raise TypeError(f"trace_headers must map strings to strings, not {shown(headers)}")
        kinds = self.prompt_is_token_ids
        if kinds is not None and not (
            is_list(kinds) and all(isinstance(one, bool) for one in kinds)
        ):
            raise TypeError(
                f"prompt_is_token_ids must be a sequence of True and False: {shown(kinds)}"
            )
        if self.mm_features is not None:
            self._check_features(self.mm_features)

    def _fill_parameters(self) -> None:
        given = (self.sampling_params, self.pooling_params)
        if given == (None, None):
            raise RequestRefusedError(
                "sampling_params and pooling_params are both None: give one, or leave both out"
            )
        if given[0] in (None, _LEFT_OUT) and given[1] in (None, _LEFT_OUT):
            object.__setattr__(self, "sampling_params", SamplingParams())
        elif given[0] is _LEFT_OUT:
            object.__setattr__(self, "sampling_params", None)
        if given[1] is _LEFT_OUT:
            object.__setattr__(self, "pooling_params", None)

    @staticmethod
    def _check_features(features: Any) -> None:
        if not is_list(features):
            raise TypeError(f"mm_features must be a sequence of mappings, not {shown(features)}")
        for number, feature in enumerate(features):
            name = f"mm_features[{number}]"
            if not isinstance(feature, Mapping):
                raise TypeError(f"{name} must be a mapping, not {shown(feature)}")
            for key in ("modality", "identifier"):
                if not isinstance(feature.get(key), str):
                    raise TypeError(f"{name}[{key!r}] must be a string: {shown(feature.get(key))}")
            place = feature.get("mm_position")
            if not isinstance(place, Mapping):
                raise TypeError(f"{name}['mm_position'] must be a mapping: {shown(place)}")
            for key in ("offset", "length"):
                check_int(f"{name}['mm_position'][{key!r}]", place.get(key), 0)

    def check_tokens_only(self) -> None:
        """Refuse what an engine cannot do for itself: it knows tokens, and one sequence each.

        Raises:
            RequestRefusedError: text is left in the request, or ``n`` is more than 1.
        """
        if self.prompt is not None:
            raise RequestRefusedError(
                "prompt is a string, and engines know tokens only: pass tokenizer=, or give "
                "prompt_token_ids"
            )
        params = self.sampling_params
        if params is None:
            return
        for name in ("stop", "bad_words"):
            if getattr(params, name):
                raise RequestRefusedError(
                    f"sampling_params.{name} is text, and engines know tokens only: pass "
                    f"tokenizer=, or use "
                    f"{'stop_token_ids' if name == 'stop' else 'bad_words_token_ids'}"
                )
        if params.n > 1:
            raise RequestRefusedError(
                f"sampling_params.n is {params.n}, but an engine returns one sequence for a "
                f"request: generate() expands it to {params.n} requests"
            )

    @property
    def length(self) -> int:
        """Tokens of the prompt."""
        if self.prompt_token_ids is not None:
            return len(self.prompt_token_ids)
        if self.prompt_embeds is None:
            return 0  # a prompt that is still text
        return self.prompt_embeds.shape[0] if self.prompt_embeds.shape else 0

    def to_plain(
        self, wire_id: str, client_index: int, frames: list[bytes], *, wave: int = 0
    ) -> list[Any]:
        """The 22 positions of the wire.

        Args:
            wire_id: the id that the engine knows it by.
            client_index: the frontend that gets the outputs.
            frames: takes the frames behind the main one.
            wave: of a lockstep group.
        """
        sampling, pooling = self.sampling_params, self.pooling_params
        params = None if sampling is None else sampling.to_plain()
        if params and "prompt_logprob_token_ids" in params:
            params = lift_tensors(params, frames)
        return [
            wire_id,
            self.prompt_token_ids,
            lift_tensors(self.mm_features, frames),
            params,
            None if pooling is None else pooling.to_plain(),
            time.time() if self.arrival_time is None else float(self.arrival_time),
            None if self.lora_request is None else self.lora_request.to_plain(),
            self.cache_salt,
            self.data_parallel_rank,
            lift_tensors(self.prompt_embeds, frames),
            None if self.prompt_is_token_ids is None else list(self.prompt_is_token_ids),
            client_index,
            wave,
            self.priority,
            None if self.trace_headers is None else dict(self.trace_headers),
            False,
            self.request_id,
            self.reasoning_ended,
            self.reasoning_parser_kwargs,
            self.abort_immediately,
            self.session_id,
            self.kv_hints,
        ]
