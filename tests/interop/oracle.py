"""vLLM's own `LLM` class answers what it is asked. Runs under the interpreter that has vLLM.

    python oracle.py JOB ANSWERS

JOB is a file of JSON: `arguments` (of `LLM`), `cases` and `texts`. ANSWERS is written: an answer
for each, or the error.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any


def rows(found: Any) -> Any:
    """Log probabilities as JSON: for each position, token to (logprob, rank)."""
    if found is None:
        return None
    return [
        None if row is None else {str(token): [one.logprob, one.rank] for token, one in row.items()}
        for row in found
    ]


class Oracle:
    """The model, and how to ask it."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        # By name: the checks of this project run where there is no vLLM.
        self.vllm = import_module("vllm")
        self.sampling = import_module("vllm.sampling_params")
        self.lora = import_module("vllm.lora.request").LoRARequest
        self.llm = self.vllm.LLM(**arguments)

    def params(self, given: dict[str, Any]) -> Any:
        """vLLM's parameters."""
        given = dict(given)
        if "structured_outputs" in given:
            given["structured_outputs"] = self.sampling.StructuredOutputsParams(
                **given["structured_outputs"]
            )
        if "repetition_detection" in given:
            given["repetition_detection"] = self.sampling.RepetitionDetectionParams(
                **given["repetition_detection"]
            )
        if "logit_bias" in given:
            given["logit_bias"] = {int(token): bias for token, bias in given["logit_bias"].items()}
        return self.vllm.SamplingParams(**given)

    def answer(self, case: dict[str, Any]) -> dict[str, Any]:
        """Ask one case."""
        lora = None if case.get("lora") is None else self.lora(*case["lora"])
        prompt = case["prompt"]
        if isinstance(prompt, list):
            prompt = {"prompt_token_ids": prompt}
        params = self.params(case["params"])
        result = self.llm.generate([prompt], params, lora_request=lora, use_tqdm=False)[0]
        params.update_from_tokenizer(self.llm.get_tokenizer())  # of which generate() made a copy
        return {
            "prompt_token_ids": result.prompt_token_ids,
            "prompt_logprobs": rows(result.prompt_logprobs),
            "samples": [
                {
                    "token_ids": list(sample.token_ids),
                    "text": sample.text,
                    "logprobs": rows(sample.logprobs),
                    "finish_reason": sample.finish_reason,
                    "stop_reason": sample.stop_reason,
                }
                for sample in result.outputs
            ],
            "bad_words_token_ids": params.bad_words_token_ids,
        }


def main(job: dict[str, Any]) -> dict[str, Any]:
    """Answer everything."""
    oracle = Oracle(job["arguments"])
    answers = {}
    for kind in ("cases", "texts"):
        answers[kind] = [_answer(oracle, case) for case in job[kind]]
    return answers


def _answer(oracle: Oracle, case: dict[str, Any]) -> dict[str, Any]:
    try:
        return oracle.answer(case)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    asked, answered = map(Path, sys.argv[1:])
    answered.write_text(json.dumps(main(json.loads(asked.read_text()))))
