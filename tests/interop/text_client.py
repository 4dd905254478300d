"""This client with the real tokenizers. Runs under the interpreter that has vLLM, which has both.

    python text_client.py ADDRESS MODEL ANSWERS

Waits for one engine at ADDRESS, asks it every case of text_cases.py with the tokenizer of
`transformers` and with that of `tokenizers`, in one piece and as a stream, and writes what came.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import engine_client
from engine_client import EngineClient, EngineRequest, SamplingParams
from tests.interop.text_cases import CASES, TextCase


def params_of(case: TextCase) -> dict[str, Any]:
    """This client's parameters."""
    params = dict(case.params)
    if case.backend:
        params["structured_outputs"] = params["structured_outputs"] | {"_backend": case.backend}
    return params


def ask(client: EngineClient, case: TextCase, tokenizer: Any, eos: int | None) -> dict[str, Any]:
    """Generate, and, for a single sample, read the same as a stream."""
    params = SamplingParams(**params_of(case), eos_token_id=eos)
    completion = client.generate([case.prompt], params, tokenizer=tokenizer)[0]
    assert completion.error is None, completion.error
    samples = [
        {
            "token_ids": sample.token_ids,
            "text": sample.text,
            "finish_reason": str(sample.finish_reason).lower(),
            "stop_reason": sample.stop_reason,
        }
        for sample in completion.samples or [completion]
    ]
    pieces = None
    if params.n == 1:
        request = EngineRequest("stream", prompt=case.prompt, sampling_params=params)
        with client.call(request, tokenizer=tokenizer) as stream:
            pieces = [output.text for output in stream]
    return {"samples": samples, "pieces": pieces}


def main(address: str, model: str) -> dict[str, Any]:
    """Ask everything."""
    tokenizers = {
        "transformers": import_module("transformers").AutoTokenizer.from_pretrained(model),
        "tokenizers": import_module("tokenizers").Tokenizer.from_file(f"{model}/tokenizer.json"),
    }
    with engine_client.connect(address, connect_timeout=300, timeout=60) as client:
        return {
            # The one of tokenizers does not know which token ends a sequence.
            name: [
                ask(client, case, tokenizer, None if name == "transformers" else 2)
                for case in CASES
            ]
            for name, tokenizer in tokenizers.items()
        }


if __name__ == "__main__":
    where, folder, answered = sys.argv[1:]
    Path(answered).write_text(json.dumps(main(where, folder)))
