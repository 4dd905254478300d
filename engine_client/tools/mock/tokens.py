"""What a reference engine generates: pure functions, so that a test can say what must come.

The token at a position depends on the prompt, the seed, the adapter and the position alone::

    engine.call(EngineRequest("r", [1, 2, 3], SamplingParams(max_tokens=4)))    # gives
    generate_tokens([1, 2, 3], 4)

Temperature and other ways to shape a distribution change nothing.  A test forces tokens by a
``logit_bias`` of 100 or more, by ``allowed_token_ids`` or by ``trace_decode_token_ids``.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from zlib import crc32

__all__ = [
    "VOCAB_SIZE",
    "embed",
    "generate_tokens",
    "prompt_logprobs",
    "token_at",
    "token_state",
    "top_logprobs",
]

VOCAB_SIZE = 512


def generate_tokens(
    prompt_token_ids: Sequence[int],
    count: int,
    *,
    seed: int | None = None,
    lora_int_id: int = 0,
    vocab_size: int = VOCAB_SIZE,
) -> list[int]:
    """Return the first tokens that a reference engine generates for a prompt.

    Args:
        prompt_token_ids: the prompt.
        count: how many tokens.
        seed: of the sampling parameters.
        lora_int_id: of the request's adapter; 0 for none.
        vocab_size: of the engine.
    """
    state = token_state(prompt_token_ids, seed, lora_int_id)
    return [token_at(state, position) % vocab_size for position in range(count)]


def token_state(
    prompt_token_ids: Sequence[int], seed: int | None = None, lora_int_id: int = 0
) -> int:
    """What of a request its tokens depend on, as one number: a CRC-32 of 64-bit integers."""
    numbers = (*prompt_token_ids, -1 if seed is None else seed % 2**63, lora_int_id)
    return crc32(struct.pack(f"<{len(numbers)}q", *numbers))


def token_at(state: int, position: int) -> int:
    """The token at a position, before the remainder by the vocabulary's size is taken."""
    return crc32(position.to_bytes(4, "little"), state)


def top_logprobs(
    token: int, count: int, vocab_size: int = VOCAB_SIZE
) -> tuple[list[int], list[float], int]:
    """Return the ids, log probabilities and rank that go with one token.

    Args:
        token: the token.
        count: how many others; -1 for as many as the vocabulary has.
        vocab_size: of the engine.

    Returns:
        The token and those that follow it in the vocabulary, with -0.5, -1.0, -1.5 and so on;
        and the token's rank, always 1.
    """
    columns = 1 + (vocab_size if count == -1 else count)
    ids = [(token + step) % vocab_size for step in range(columns)]
    return ids, [-0.5 * (step + 1) for step in range(columns)], 1


def prompt_logprobs(
    prompt_token_ids: Sequence[int], count: int, vocab_size: int = VOCAB_SIZE
) -> tuple[list[int], list[float], list[int]]:
    """Return ids, log probabilities and ranks for the tokens of a prompt, without its first.

    The rows of :func:`top_logprobs`, one after another.
    """
    rows = [top_logprobs(token, count, vocab_size) for token in prompt_token_ids[1:]]
    return (
        [one for ids, _, _ in rows for one in ids],
        [one for _, values, _ in rows for one in values],
        [rank for _, _, rank in rows],
    )


def embed(prompt_token_ids: Sequence[int], dimensions: int) -> list[float]:
    """Return the vector that pooling gives for a prompt: halves between 0 and 127.5."""
    state = token_state(prompt_token_ids)
    return [token_at(state, position) % 256 / 2 for position in range(dimensions)]
