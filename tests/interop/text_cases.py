"""Texts that are asked of vLLM's `LLM` class and of this client with the same tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SEEDED: dict[str, Any] = {"seed": 7, "max_tokens": 48}
LETTERS = [*range(68, 94), *range(259, 330)]
"""Tokens of one or two letters each."""


@dataclass(frozen=True, slots=True)
class TextCase:
    """One prompt; its parameters are the same for both."""

    name: str
    params: dict[str, Any]
    prompt: str = "hello there"
    partial: bool = False
    """Whether the tokens may end within a character, which vLLM leaves out of the text."""
    backend: str = ""
    """Of structured outputs, which vLLM's frontend chooses."""


def _case(name: str, backend: str = "", partial: bool = False, **params: Any) -> TextCase:
    prompt = params.pop("prompt", "hello there")
    return TextCase(name, SEEDED | params, prompt, partial=partial, backend=backend)


CASES = [
    _case("greedy", temperature=0.0, seed=None, allowed_token_ids=LETTERS),
    _case("prompt with characters of many bytes", prompt="zwölf Boxkämpfer 😀", max_tokens=8),
    _case("letters", allowed_token_ids=LETTERS),
    _case("any bytes", partial=True),
    _case("any bytes, special tokens shown", partial=True, skip_special_tokens=False),
    _case(
        "characters of two, three and four bytes",
        backend="xgrammar",
        structured_outputs={"regex": "[äöü€😀a-c]{12}"},
    ),
    _case(
        "cut by max_tokens within a character",
        partial=True,
        max_tokens=5,
        backend="xgrammar",
        structured_outputs={"regex": "[😀-😎]{12}"},
    ),
    _case("stop string", allowed_token_ids=LETTERS, stop=["e"]),
    _case(
        "stop string, kept", allowed_token_ids=LETTERS, stop=["e"], include_stop_str_in_output=True
    ),
    _case("stop string over several tokens", allowed_token_ids=[68, 69, 70], stop=["abca", "cc"]),
    _case("several stop strings", allowed_token_ids=LETTERS, stop=["xyz", "ta", "o", "to"]),
    _case("stop string that never comes", allowed_token_ids=[68, 69, 70], stop=["z"]),
    _case("stop string and min_tokens", allowed_token_ids=[68, 69, 70], stop=["a"], min_tokens=12),
    _case("end of sequence", allowed_token_ids=[2, 68, 69, 70]),
    _case("end of sequence, ignored", allowed_token_ids=[2, 68, 69, 70], ignore_eos=True),
    _case("end of sequence, shown", allowed_token_ids=[2, 68, 69], skip_special_tokens=False),
    _case("stop_token_ids", allowed_token_ids=[68, 69, 70], stop_token_ids=[70]),
    _case("bad words", allowed_token_ids=LETTERS, bad_words=["e", "ta", "ea"]),
    _case("n=3", allowed_token_ids=LETTERS, n=3),
    _case("n=3 with stop strings", allowed_token_ids=LETTERS, n=3, stop=["s", "h"]),
]
