"""Streams of this client beside what vLLM's own `LLM` class gives for the same requests."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import engine_client
from engine_client import EngineClient, EngineOutput, EngineRequest, LoraRequest, SamplingParams
from tests.helpers import scaled
from tests.interop.engines import vllm_engines
from tests.interop.oracle_cases import ARGUMENTS, CASES, OracleCase

CLOSE = 1e-5
"""How far log probabilities may be apart."""
IDS = [case.parameter for case in CASES]
ADAPTERS = {"alpha": 1, "beta": 2}
Rows = list[dict[int, tuple[float, int | None]] | None]


@pytest.fixture(scope="module")
def model() -> Iterator[EngineClient]:
    """A client of one engine of the oracle's model, with its adapters."""
    with (
        tempfile.TemporaryDirectory(prefix="ec-oracle-", ignore_cleanup_errors=True) as name,
        vllm_engines(Path(name), 1, **ARGUMENTS) as group,
        engine_client.connect(
            group.address, connect_timeout=scaled(300), timeout=scaled(60)
        ) as client,
    ):
        for adapter, number in ADAPTERS.items():
            path = group.adapter(adapter, seed=number)
            client.add_lora(LoraRequest(adapter, number, str(group.folder / path)))
        yield client


@pytest.fixture(scope="module")
def table(report: list[str]) -> Iterator[dict[str, str]]:
    """A row for each parameter, printed at the end."""
    rows: dict[str, str] = {}
    yield rows
    report += ["", f"{'beside the LLM class':<42} result"]
    report += [f"{parameter:<42} {rows[parameter]}" for parameter in IDS if parameter in rows]


def request_of(case: OracleCase, answer: dict[str, Any], name: str = "oracle") -> EngineRequest:
    """The same request as this client's user writes it."""
    given = {key: value for key, value in (case.params | case.client).items() if value is not None}
    if given.get("bad_words_token_ids"):
        given["bad_words_token_ids"] = answer["bad_words_token_ids"]
    lora = None if case.lora is None else LoraRequest(*case.lora, lora_path="known already")
    return EngineRequest(name, case.prompt, SamplingParams(**given), lora_request=lora)


def _rows(outputs: list[EngineOutput], field: str, columns: int | None) -> Rows:
    """For each position, token to (logprob, rank); in a batch, an engine sends more columns."""
    rows: Rows = []
    for output in outputs:
        found = getattr(output, field)
        if found is None:
            continue
        tokens, values = found.token_ids.tolist(), found.logprobs.tolist()
        for row, logprobs, rank in zip(tokens, values, found.ranks.tolist(), strict=True):
            ranks = [rank, *range(1, len(row))]
            both = zip(row, zip(logprobs, ranks, strict=True), strict=True)
            rows.append(dict(list(both)[:columns]))
    return rows


def _apart(ours: Rows, theirs: list[Any]) -> float:
    """The largest distance of two log probabilities; all else must be equal."""
    assert len(ours) == len(theirs)
    most = 0.0
    for mine, found in zip(ours, theirs, strict=True):
        if mine is None or found is None:
            assert mine is found
            continue
        known = {int(token): value for token, value in found.items()}
        # Two candidates of the same probability may change places.
        assert len(mine) == len(known)
        for token, (logprob, rank) in mine.items():
            if token not in known:
                assert min(abs(logprob - other) for other, _ in known.values()) <= CLOSE
                continue
            expected, expected_rank = known[token]
            if not (math.isinf(logprob) and logprob == expected):
                most = max(most, abs(logprob - expected))
            assert rank == expected_rank or abs(logprob - expected) <= CLOSE
    return most


def compare(case: OracleCase, outputs: list[EngineOutput], answer: dict[str, Any]) -> str:
    """Assert that both are the same; return how."""
    assert "error" not in answer, answer
    (sample,) = answer["samples"]
    tokens = [token for output in outputs for token in output.new_token_ids]
    assert tokens == sample["token_ids"]
    assert str(outputs[-1].finish_reason).lower() == sample["finish_reason"]
    assert outputs[-1].stop_reason == sample["stop_reason"]
    how = f"same: {len(tokens)} tokens, {sample['finish_reason']}"
    if sample["stop_reason"] is not None:
        how += f" ({sample['stop_reason']})"
    named = case.params.get("logprob_token_ids")
    asked = case.params.get("logprobs") if named is None else len(named)
    for field, theirs, most in (
        ("new_logprobs", sample["logprobs"], asked),
        ("new_prompt_logprobs_tensors", answer["prompt_logprobs"], -1),
    ):
        ours = _rows(outputs, field, None if most in (None, -1) else most + 1)
        if theirs is None:
            assert not ours
            continue
        if field == "new_prompt_logprobs_tensors":
            ours = [None, *ours]  # the first token of a prompt follows nothing
        apart = _apart(ours, theirs)
        assert apart <= CLOSE
        count = sum(len(row or ()) for row in ours)
        how += f"; {count} {field.split('_')[1]} at most {apart:.1e} apart"
    return how


@pytest.mark.parametrize("number", range(len(CASES)), ids=IDS)
def test_same(
    number: int, model: EngineClient, oracle: dict[str, Any], table: dict[str, str]
) -> None:
    """A request alone on an engine gives what it gives alone in vLLM's own class."""
    case, answer = CASES[number], oracle["cases"][number]
    table[case.parameter] = "differs"
    outputs = list(model.call(request_of(case, answer)))
    how = compare(case, outputs, answer)
    table[case.parameter] = how + (f" (vLLM's frontend {case.frontend})" if case.frontend else "")


def test_same_together(model: EngineClient, oracle: dict[str, Any], report: list[str]) -> None:
    """All requests at once, in whatever batches, give what each gives alone."""
    together = [
        (case, answer)
        for case, answer in zip(CASES, oracle["cases"], strict=True)
        # vLLM's CPU build for LoRA dies of these in a batch with others (its punica_cpu.py adds
        # as many rows as the batch has to the logits of the prompt's tokens).
        if "prompt_logprobs" not in case.params
        # Of all requests in its batch, only the tokens that this one names have log probabilities.
        and "logprob_token_ids" not in case.params
    ]
    # Nor does that build tell requests with and without an adapter apart in one batch: those
    # without get the adapter of the last slot (their index, -1, is taken as Python does).
    for adapted in (False, True):
        group = [(case, answer) for case, answer in together if (case.lora is not None) == adapted]
        streams = [
            model.call(request_of(case, answer, f"together-{adapted}-{number}"))
            for number, (case, answer) in enumerate(group)
        ]
        for (case, answer), stream in zip(group, streams, strict=True):
            assert compare(case, list(stream), answer)
        what = "with" if adapted else "without"
        report.append(f"{len(group)} requests {what} an adapter at once: each the same as alone")
