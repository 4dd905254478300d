"""What is asked of vLLM's own `LLM` class and of this client, word for word.

Parameters have vLLM's names. Where an engine gets something that vLLM's frontend makes of them, the
client's own words are in `client`, and `frontend` says what it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

ARGUMENTS: dict[str, Any] = {"skip_tokenizer_init": False, "max_logprobs": -1}
"""Of both, over those of all engines of this suite: structured outputs need a tokenizer."""
EOS = 2
PROMPT = [5, 6, 7, 300, 301]
LONG_PROMPT = [3 + (7 * i) % 500 for i in range(40)]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True}
SEEDED: dict[str, Any] = {"seed": 42, "max_tokens": 24, "ignore_eos": True}
SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer", "minimum": 1, "maximum": 9}}, '
SCHEMA += '"required": ["a"], "additionalProperties": false}'


@dataclass(frozen=True, slots=True)
class OracleCase:
    """One request."""

    parameter: str
    """What is tried: the row in the table."""
    params: dict[str, Any]
    """For vLLM's SamplingParams, and, but for `client`, for this client's."""
    prompt: list[int] = field(default_factory=lambda: list(PROMPT))
    client: dict[str, Any] = field(default_factory=dict)
    """What this client is given besides; a value of None leaves a parameter out."""
    lora: tuple[str, int] | None = None
    """Name and id of an adapter."""
    frontend: str = ""
    """What vLLM's frontend does for this, and a user of this client does himself."""


def _structured(key: str, value: Any, backend: str, **wire: Any) -> dict[str, Any]:
    return {"structured_outputs": (wire or {key: value}) | {"_backend": backend}}


def _case(parameter: str, base: dict[str, Any], **more: Any) -> OracleCase:
    fields = {
        name: more.pop(name) for name in ("prompt", "client", "lora", "frontend") & more.keys()
    }
    return OracleCase(parameter, base | more, **fields)


_NAMES_EOS = "reads eos_token_id from the model's folder"
_NAMES_BACKEND = "chooses the backend"
TINY_CHOICE = ["yes", "no"]

CASES = [
    _case("temperature=0", GREEDY),
    _case("temperature=0, long prompt", GREEDY, prompt=LONG_PROMPT, max_tokens=40),
    _case("logprobs=5", GREEDY, logprobs=5),
    _case("logprobs=0", GREEDY, logprobs=0),
    _case("logprobs=-1", GREEDY, logprobs=-1, max_tokens=2),
    _case("logprobs of sampled tokens", SEEDED, logprobs=3),
    _case("logprob_token_ids", GREEDY, logprob_token_ids=[5, 17, 400], logprobs=3),
    _case("prompt_logprobs=3", GREEDY, prompt_logprobs=3),
    _case("prompt_logprobs=20, long prompt", GREEDY, prompt_logprobs=20, prompt=LONG_PROMPT),
    _case("seed", SEEDED),
    _case("seed, negative", SEEDED, seed=-7),
    _case("temperature=1.7", SEEDED, temperature=1.7),
    _case("temperature=0.2", SEEDED, temperature=0.2),
    _case("top_p", SEEDED, top_p=0.3),
    _case("top_k", SEEDED, top_k=5),
    _case("min_p", SEEDED, min_p=0.6),
    _case("top_k, top_p and min_p", SEEDED, top_k=50, top_p=0.8, min_p=0.1),
    _case("stop_token_ids", SEEDED, allowed_token_ids=[*range(10, 20)], stop_token_ids=[15, 17]),
    _case(
        "eos_token_id",
        SEEDED,
        allowed_token_ids=[EOS, 40, 41, 42],
        ignore_eos=False,
        client={"eos_token_id": EOS},
        frontend=_NAMES_EOS,
    ),
    _case(
        "ignore_eos",
        SEEDED,
        allowed_token_ids=[EOS, 40, 41, 42],
        client={"eos_token_id": EOS},
        frontend=_NAMES_EOS,
    ),
    _case(
        "min_tokens with eos_token_id",
        SEEDED,
        logit_bias={EOS: 50.0},
        min_tokens=6,
        ignore_eos=False,
        client={"eos_token_id": EOS},
        frontend=_NAMES_EOS,
    ),
    _case(
        "min_tokens with stop_token_ids",
        SEEDED,
        logit_bias={77: 50.0},
        stop_token_ids=[77],
        min_tokens=6,
        client={"eos_token_id": EOS},
        frontend=_NAMES_EOS,
    ),
    _case("presence_penalty", GREEDY, presence_penalty=1.5, max_tokens=40),
    _case("presence_penalty, negative", SEEDED, presence_penalty=-2.0, max_tokens=40),
    _case("frequency_penalty", GREEDY, frequency_penalty=1.2, max_tokens=40),
    _case("repetition_penalty", GREEDY, repetition_penalty=1.8, max_tokens=40),
    _case(
        "all three penalties",
        SEEDED,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        repetition_penalty=1.2,
        max_tokens=40,
    ),
    _case("logit_bias", SEEDED, logit_bias={9: 6.0, 400: 5.0}),
    _case("allowed_token_ids", GREEDY, allowed_token_ids=[11, 12, 13, 14]),
    _case(
        "bad_words",
        GREEDY,
        bad_words=["q", "et", "z"],
        allowed_token_ids=[*range(70, 92), 259, 260],
        client={"bad_words": None, "bad_words_token_ids": "from words"},
        frontend="turns words into tokens; so does this client with tokenizer=",
    ),
    _case(
        "repetition_detection",
        GREEDY,
        allowed_token_ids=[30],
        max_tokens=40,
        repetition_detection={"max_pattern_size": 3, "min_pattern_size": 1, "min_count": 4},
    ),
    _case("skip_reading_prefix_cache", GREEDY, skip_reading_prefix_cache=True, prompt=LONG_PROMPT),
    _case(
        "structured_outputs: regex, xgrammar",
        SEEDED,
        structured_outputs={"regex": "[a-f]{4}x[0-9]{3}"},
        client=_structured("regex", "[a-f]{4}x[0-9]{3}", "xgrammar") | {"eos_token_id": EOS},
        ignore_eos=False,
        frontend=_NAMES_BACKEND,
    ),
    _case(
        "structured_outputs: json, xgrammar",
        SEEDED,
        structured_outputs={"json": SCHEMA, "disable_any_whitespace": True},
        client={
            "structured_outputs": {
                "json": SCHEMA,
                "disable_any_whitespace": True,
                "_backend": "xgrammar",
            },
            "eos_token_id": EOS,
        },
        ignore_eos=False,
        frontend=_NAMES_BACKEND,
    ),
    _case(
        "structured_outputs: json_object, xgrammar",
        SEEDED,
        structured_outputs={"json_object": True},
        client=_structured("json_object", True, "xgrammar") | {"eos_token_id": EOS},
        ignore_eos=False,
        frontend=_NAMES_BACKEND,
    ),
    _case(
        "structured_outputs: grammar, xgrammar",
        SEEDED,
        structured_outputs={"grammar": 'root ::= "ab" | "cd" root'},
        client=_structured("grammar", 'root ::= "ab" | "cd" root', "xgrammar")
        | {"eos_token_id": EOS},
        ignore_eos=False,
        frontend=_NAMES_BACKEND,
    ),
    _case(
        "structured_outputs: choice, xgrammar",
        SEEDED,
        structured_outputs={"choice": TINY_CHOICE},
        client=_structured("grammar", 'root ::= "yes" | "no"', "xgrammar") | {"eos_token_id": EOS},
        ignore_eos=False,
        frontend="turns a choice into a grammar: xgrammar in an engine has no choice",
    ),
    _case("lora_request", GREEDY, lora=("alpha", 1)),
    _case("lora_request, another", GREEDY, lora=("beta", 2)),
    _case("lora_request, sampled, with logprobs", SEEDED, lora=("alpha", 1), logprobs=3),
]
"""Asked one after the other, each alone."""
