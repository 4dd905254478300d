"""A request as a reference engine reads it, and as it lives there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine_client.errors import ProtocolError
from engine_client.tools.mock.lora import Adapter, read_adapter
from engine_client.tools.mock.sampling import (
    Pooling,
    Sampling,
    array_of,
    is_flag,
    is_int,
    is_map,
    is_number,
    is_text,
    or_nil,
    read_pooling,
    read_sampling,
)
from engine_client.tools.mock.tokens import token_at, token_state

__all__ = ["LiveRequest", "UnusableRequest", "read_request"]

REQUIRED = 9
"""How many positions must be there; 22 are known, what is more is ignored."""


def _is_tensor(value: Any) -> bool:
    return (
        type(value) is list
        and len(value) == 3
        and is_text(value[0])
        and array_of(is_int)(value[1])
        and type(value[2]) in (bytes, int, dict)
    )


def _is_headers(value: Any) -> bool:
    return is_map(value) and all(map(is_text, (*value, *value.values())))


def _is_array(value: Any) -> bool:
    return type(value) is list


_FIELDS: tuple[tuple[str, Callable[[Any], bool], Any], ...] = (
    ("request_id", is_text, None),
    ("prompt_token_ids", or_nil(array_of(is_int)), None),
    ("mm_features", or_nil(array_of(is_map)), None),
    ("sampling_params", or_nil(is_map), None),
    ("pooling_params", or_nil(_is_array), None),
    ("arrival_time", is_number, None),
    ("lora_request", or_nil(_is_array), None),
    ("cache_salt", or_nil(is_text), None),
    ("data_parallel_rank", or_nil(is_int), None),
    ("prompt_embeds", or_nil(_is_tensor), None),
    ("prompt_is_token_ids", or_nil(array_of(is_flag)), None),
    ("client_index", is_int, 0),
    ("current_wave", is_int, 0),
    ("priority", is_int, 0),
    ("trace_headers", or_nil(_is_headers), None),
    ("resumable", is_flag, False),
    ("external_req_id", or_nil(is_text), None),
    ("reasoning_ended", or_nil(is_flag), None),
    ("reasoning_parser_kwargs", or_nil(is_map), None),
    ("abort_immediately", is_flag, False),
    ("session_id", or_nil(is_text), None),
    ("kv_hints", or_nil(is_map), None),
)


class UnusableRequest(Exception):
    """It can be read but not be run: the engine answers it with an error and goes on."""

    def __init__(self, request_id: str, client: int, reason: str) -> None:
        super().__init__(reason)
        self.request_id = request_id
        self.client = client


@dataclass(slots=True, eq=False)
class LiveRequest:
    """One request, from its arrival to its last token."""

    id: str
    client: int
    prompt: list[int]
    sampling: Sampling | None
    pooling: Pooling | None
    adapter: Adapter | None = None
    cache_salt: str | None = None
    abort_immediately: bool = False
    trace_headers: dict[str, str] | None = None
    """Come back with every output."""
    tokens: list[int] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    prefill: dict[str, int] | None = None
    """What the first output says of the prompt."""
    state: int = 0
    """What its tokens depend on, once the prompt has been checked."""

    def prepare(self) -> None:
        """Be ready to generate tokens."""
        seed = self.sampling.seed if self.sampling is not None else None
        self.state = token_state(self.prompt, seed, self.adapter.id if self.adapter else 0)

    def next_token(self, vocab_size: int) -> int:
        """Generate one token."""
        sampling, position = self.sampling, len(self.tokens)
        assert sampling is not None
        number = token_at(self.state, position)
        if position < len(sampling.trace):
            token = sampling.trace[position]
        elif sampling.certain_token_id is not None:
            token = sampling.certain_token_id
        elif sampling.allowed_token_ids is not None:
            token = sampling.allowed_token_ids[number % len(sampling.allowed_token_ids)]
        else:
            token = number % vocab_size
            masked = sampling.masked_token_ids
            if position < sampling.min_tokens and len(masked) < vocab_size:
                while token in masked:
                    token = (token + 1) % vocab_size
        self.tokens.append(token)
        return token


def read_request(value: Any, frames: Sequence[bytes] = ()) -> LiveRequest:
    """Read a request; ``frames`` are those behind it, which its tensors refer to.

    Raises:
        ProtocolError: its fields cannot be read, or a sampling parameter is out of range.
        UnusableRequest: there is nothing to run.
    """
    if type(value) is not list or len(value) < REQUIRED:
        raise ProtocolError("a request is an array of nine or more")
    fields: dict[str, Any] = {}
    for position, (name, check, default) in enumerate(_FIELDS):
        fields[name] = value[position] if position < len(value) else default
        if not check(fields[name]):
            raise ProtocolError(f"a request's {name} is wrong")
    sampling, pooling, lora, embeds = (
        fields[name]
        for name in ("sampling_params", "pooling_params", "lora_request", "prompt_embeds")
    )
    if embeds is not None and is_int(embeds[2]) and not 1 <= embeds[2] <= len(frames):
        raise ProtocolError("a request's prompt_embeds are in a frame that is not there")
    request = LiveRequest(
        fields["request_id"],
        fields["client_index"],
        _prompt(fields["prompt_token_ids"], embeds),
        None if sampling is None else read_sampling(sampling),
        None if pooling is None else read_pooling(pooling),
        _adapter(lora),
        fields["cache_salt"],
        fields["abort_immediately"],
        fields["trace_headers"],
    )
    reason = _unusable(request, fields["prompt_token_ids"] is None and embeds is None)
    if reason:
        raise UnusableRequest(request.id, request.client, reason)
    return request


def _prompt(token_ids: list[int] | None, embeds: list[Any] | None) -> list[int]:
    if token_ids is not None:
        return token_ids
    return [0] * (embeds[1][0] if embeds is not None and embeds[1] else 0)


def _adapter(record: list[Any] | None) -> Adapter | None:
    try:
        return None if record is None else read_adapter(record)
    except (ValueError, AssertionError) as exc:
        raise ProtocolError(f"a request's lora_request is wrong: {exc}") from exc


def _unusable(request: LiveRequest, without_prompt: bool) -> str | None:
    if request.pooling is None:
        if request.sampling is None:
            return "sampling_params and pooling_params can't both be unset"
        if request.sampling.max_tokens is None:
            return "max_tokens is not set"
        if not request.sampling.grammar_known:
            return f"Unsupported structured output backend: {request.sampling.grammar_backend}"
    if without_prompt:
        return "Neither prompt_token_ids nor prompt_embeds were defined."
    return None
