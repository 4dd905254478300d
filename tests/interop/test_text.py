"""Text of this client beside that of vLLM's `LLM` class, with the same real tokenizer."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import scaled
from tests.interop.engines import HERE, engine_environment, vllm_engines
from tests.interop.environment import environment
from tests.interop.oracle_cases import ARGUMENTS
from tests.interop.text_cases import CASES

IDS = [case.name for case in CASES]


@pytest.fixture(scope="module")
def answers(report: list[str]) -> Iterator[dict[str, Any]]:
    """What this client gave, run where the tokenizers are."""
    vllm = environment()
    start = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="ec-text-", ignore_cleanup_errors=True) as name,
        vllm_engines(Path(name), 1, transport="ipc", **ARGUMENTS) as group,
    ):
        answered = group.folder / "answers.json"
        settings = engine_environment(vllm, group.folder)
        settings["PYTHONPATH"] += os.pathsep + str(HERE.parents[1])
        done = subprocess.run(
            [
                vllm.python,
                HERE / "text_client.py",
                group.address,
                group.folder / "model",
                answered,
            ],
            env=os.environ | settings,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=scaled(350),
            check=False,
        )
        assert done.returncode == 0, done.stdout[-4000:]
        report.append(f"{2 * len(CASES)} texts asked in {time.monotonic() - start:.1f} s, over ipc")
        yield json.loads(answered.read_text())


@pytest.mark.parametrize("number", range(len(CASES)), ids=IDS)
@pytest.mark.parametrize("tokenizer", ["transformers", "tokenizers"])
def test_same_text(
    tokenizer: str, number: int, answers: dict[str, Any], oracle: dict[str, Any]
) -> None:
    """A completion has the tokens, the text and the end that vLLM's own class gives it."""
    case, expected, found = CASES[number], oracle["texts"][number], answers[tokenizer][number]
    assert "error" not in expected, expected
    for ours, theirs in zip(found["samples"], expected["samples"], strict=True):
        assert ours["token_ids"] == theirs["token_ids"]
        assert ours["finish_reason"] == theirs["finish_reason"]
        assert ours["stop_reason"] == theirs["stop_reason"]
        text = ours["text"]
        # The beginning of a character at the very end: vLLM never gives it out.
        assert (text.rstrip("\ufffd") if case.partial else text) == (
            theirs["text"].rstrip("\ufffd") if case.partial else theirs["text"]
        )


@pytest.mark.parametrize("number", range(len(CASES)), ids=IDS)
@pytest.mark.parametrize("tokenizer", ["transformers", "tokenizers"])
def test_stream_is_the_same(tokenizer: str, number: int, answers: dict[str, Any]) -> None:
    """The pieces of a stream are the text of the completion."""
    found = answers[tokenizer][number]
    if found["pieces"] is not None:
        assert "".join(found["pieces"]) == found["samples"][0]["text"]
