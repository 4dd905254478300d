"""The package in a real Jupyter kernel, and the example notebook with the outputs stored in it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.notebook import code_cell, notebook_of, run_notebook
from tests.helpers.scripts import ROOT

# A kernel takes seconds to start, on a busy machine many.
pytestmark = pytest.mark.timeout(120)

EXAMPLE = ROOT / "examples" / "03_notebook.ipynb"
ANSI = re.compile(r"\x1b\[[0-9;]*m")


def execute(folder: Path, *cells: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Execute cells in a new kernel and return the outputs of each."""
    path = folder / "cells.ipynb"
    path.write_text(json.dumps(notebook_of(*cells)), encoding="utf-8")
    executed = run_notebook(path, folder / "executed.ipynb")
    return [cell["outputs"] for cell in executed["cells"]]


def without_times(thing: Any) -> Any:
    """Return the notebook, or a part of it, with the times in its outputs replaced."""
    return json.loads(re.sub(r"\d+\.\d ms", "N ms", json.dumps(thing)))


def texts(outputs: list[dict[str, Any]]) -> str:
    """Return what is shown as plain text."""
    shown = ""
    for output in outputs:
        if output["output_type"] == "stream":
            shown += "".join(output["text"])
        elif output["output_type"] == "error":
            shown += ANSI.sub("", "\n".join(output["traceback"]))
        else:
            shown += "".join(output["data"]["text/plain"])
    return shown


def test_the_example_gives_the_outputs_that_are_stored_in_it(tmp_path: Path) -> None:
    """Every cell runs, the waiting one is interrupted, and each shows what a reader sees.

    After a change of the outputs: ``python -m tests.helpers.notebook examples/03_notebook.ipynb``.
    """
    stored = json.loads(EXAMPLE.read_text(encoding="utf-8"))
    executed = run_notebook(EXAMPLE, tmp_path / "executed.ipynb")
    for now, before in zip(executed["cells"], stored["cells"], strict=True):
        assert without_times(now) == without_times(before)
    assert executed["metadata"] == stored["metadata"]
    waiting = [cell for cell in executed["cells"] if "tags" in cell["metadata"]]
    assert len(waiting) == 1
    assert "KeyboardInterrupt" in json.dumps(waiting[0]["outputs"])


def test_the_example_is_fit_for_a_reader() -> None:
    """Its cells are numbered from 1, with outputs, no errors, and no paths of a machine."""
    stored = json.loads(EXAMPLE.read_text(encoding="utf-8"))
    code = [cell for cell in stored["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    for cell in code:
        assert [output["output_type"] for output in cell["outputs"]] == ["execute_result"]
    assert not re.search(r"/(home|root|usr|tmp|work|Users)/", EXAMPLE.read_text(encoding="utf-8"))


def test_an_uncaught_interrupt_leaves_a_client_that_works(tmp_path: Path) -> None:
    """A kernel interrupt ends a call without a time limit; the next cell's call works."""
    launched, waited, after = execute(
        tmp_path,
        code_cell("from engine_client import launch\nclient = launch(2)\nclient"),
        code_cell(
            'client.call_utility("mock_fault", {"method": "echo", "do": "hold"}, engines=[1])\n'
            'client.call_utility("echo", "anybody?")',
            "interrupt",
            "raises-exception",
        ),
        code_cell(
            'client.call_utility("mock_clear")\n'
            'print(client.call_utility("echo", "on we go"), client.pending_utility_calls)\n'
            "client.close()"
        ),
    )
    assert texts(launched) == "<EngineClient open: 2 of 2 engines alive>"
    shown = texts(waited)
    assert waited[-1]["ename"] == "KeyboardInterrupt"
    assert '2 client.call_utility("echo", "anybody?")' in shown
    assert "echo: engine 0 had settled; engine 1: may still run it (see .outcomes)" in shown
    assert texts(after) == "['on we go', 'on we go'] 0\n"


def test_an_uncaught_failure_is_readable(tmp_path: Path) -> None:
    """The traceback is short, and ends with what each engine did, in lines of its own."""
    text = "LoRA rank 64 is greater than max_lora_rank 16."
    _, failed, _ = execute(
        tmp_path,
        code_cell(
            "from engine_client import LoraRequest, launch\nclient = launch(3)\n"
            f'refuse = {{"method": "add_lora", "do": "fail", "message": "{text}"}}\n'
            'client.call_utility("mock_fault", refuse, engines=[1])'
        ),
        code_cell(
            'client.add_lora(LoraRequest("brief", 7, "/adapters/brief"), compensate=True)',
            "raises-exception",
        ),
        code_cell("client.close()"),
    )
    lines = texts(failed).rstrip().split("\n")
    assert lines[-4:] == [
        "UtilityCallError: add_lora failed on 1 of 3 engines",
        f"  engine 1: RemoteError: Call to add_lora method failed: {text} [may have run]",
        "  succeeded on engines 0, 2",
        "undo remove_lora succeeded on engines 0, 1, 2",
    ]
    assert len(lines) < 40
    # The caller's line, the method that was called, and where the error was raised.
    assert len([line for line in lines if line.startswith(("Cell ", "File "))]) == 3


def test_a_kernel_that_ends_takes_its_engines_with_it(tmp_path: Path) -> None:
    """A client that is not closed keeps no kernel from ending, and no engine lives on."""
    cell = code_cell("from engine_client import launch\nclient = launch(2)\nclient")
    assert texts(*execute(tmp_path, cell)) == "<EngineClient open: 2 of 2 engines alive>"
