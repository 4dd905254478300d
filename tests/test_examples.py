"""Each example runs alone, ends well and shows what it promises."""

from __future__ import annotations

import re
import time

from tests.helpers.limits import scaled
from tests.helpers.scripts import ROOT, run_script

EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("[0-9]*"))


def test_quickstart() -> None:
    """Four processes answer, one fails, and the outcomes of all four are in a table."""
    printed = run_script("examples/01_quickstart.py")
    assert len(set(re.findall(r"process (\d+)", printed))) == 4
    assert "['hello', 'hello', 'hello', 'hello']" in printed
    assert "UtilityCallError: echo failed on 1 of 4 engines" in printed
    table = re.search(r"^engine +outcome +ran .*\n((?:\d .*\n)+)", printed, flags=re.MULTILINE)
    assert table is not None
    rows = [re.split(r"  +", row)[:3] for row in table[1].splitlines()]
    assert rows == [
        ["0", "ok", "yes"],
        ["1", "ok", "yes"],
        ["2", "RemoteError", "maybe"],
        ["3", "ok", "yes"],
    ]
    assert "['still here', 'still here']" in printed
    assert printed.endswith("Closed, and the four processes are gone.\n")


def test_quickstart_is_quick_and_short() -> None:
    """It fits on a screen, and runs in a few seconds."""
    lines = (ROOT / "examples" / "01_quickstart.py").read_text().splitlines()
    assert len(lines) <= 60
    began = time.monotonic()
    run_script("examples/01_quickstart.py")
    assert time.monotonic() - began < scaled(20)


def test_service_threads() -> None:
    """Every job ends, the slow engine costs two of them an answer, and no waiter is left."""
    printed = run_script("examples/02_service_threads.py")
    assert len(re.findall(r"^job +\d+: [23] of 3 answers", printed, flags=re.MULTILINE)) == 20
    assert printed.count("engine 1 was late") >= 2
    assert "ClientClosedError: the client was closed before engine 1 replied to echo" in printed
    assert printed.endswith("Waiters left behind: 0\n")


def test_lora_rollout() -> None:
    """One engine refuses, the others are undone; then the rollout is tried again and succeeds."""
    printed = run_script("examples/04_lora_rollout.py")
    assert "polite is on all engines" in printed
    assert "brief was not rolled out:\n\nadd_lora failed on 1 of 4 engines\n  engine 2: " in printed
    assert "  succeeded on engines 0, 1, 3\nundo remove_lora succeeded on engines 0, " in printed
    assert "the rollback is not complete" not in printed
    assert re.findall(r"engine \d holds (.*)", printed) == ["[1]"] * 8 + ["[1, 2]"] * 4
    assert printed.endswith("All engines agree: [1, 2]\n")


def test_asyncio() -> None:
    """The loop goes on, a time limit gives the outcomes, a cancelled task leaves its call."""
    printed = run_script("examples/05_asyncio.py")
    assert "20 calls at once, 60 answers" in printed
    assert len(re.findall(r"^\.+$", printed, flags=re.MULTILINE)) == 2
    assert "engine 1: CallTimeout: engine 1 did not reply to echo within 0.5 s" in printed
    assert re.search(r"not waiting any more; [123] engine", printed)
    assert "and so it ended: ['late', 'late', 'late']" in printed
    assert printed.endswith("closed; waiters in the client: 0\n")


def test_streaming() -> None:
    """Tokens come, leaving early frees the engine, aborts end streams, a time limit does not."""
    printed = run_script("examples/06_streaming.py")
    assert re.search(r"^(  \d+){8}   <- engine \d, LENGTH$", printed, re.MULTILINE)
    assert re.search(r"^(  \d+){3}\n  live requests: 0$", printed, re.MULTILINE)
    assert len(re.findall(r"^  r\d on engine \d: ABORT", printed, re.MULTILINE)) == 4
    assert "StreamTimeout: no output of request 'last' from engine" in printed
    assert re.search(r"resumed: \[\d+, \d+, \d+, \d+\]\n$", printed)


def test_batch_generate() -> None:
    """Completions in order, one refused, those of a dead engine failed and done again."""
    printed = run_script("examples/07_batch_generate.py")
    assert "200 prompts, 6400 tokens in " in printed
    assert "served by engines 0, 1, 2" in printed
    assert "prompt_token_ids has 5,000 tokens, and engine" in printed
    assert "failed with EngineDeadError, on engine 1 only" in printed
    assert printed.endswith("tried again on the others: all finished: True\n")


def test_vllm_says_what_it_needs() -> None:
    """The one that needs vLLM tells so; the tests with real engines run it."""
    printed = run_script("examples/08_vllm.py", "--help")
    assert "Run it where vLLM is installed" in printed
    assert "python examples/08_vllm.py MODEL" in printed


def test_every_example_is_listed_in_order_and_tested_here() -> None:
    """The list of the examples has each one, in the order of their numbers."""
    text = (ROOT / "examples/README.md").read_text()
    assert re.findall(r"^\| \[([\w.]+)\]\(\1\)", text, re.MULTILINE) == EXAMPLES
    tested = (ROOT / "tests/test_examples.py").read_text()
    programs = [name for name in EXAMPLES if name.endswith(".py")]
    assert [name for name in programs if f'run_script("examples/{name}"' not in tested] == []
    # The notebook is executed by test_notebook.py.
    assert set(EXAMPLES) - set(programs) == {"03_notebook.ipynb"}
