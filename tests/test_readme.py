"""The README is true: its code runs and prints what it shows, its names and links exist."""

from __future__ import annotations

import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import engine_client
from tests.helpers.scripts import ROOT, run_script, without_what_varies

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS: list[tuple[str, str]] = re.findall(
    r"^```(\w*)[ \t]*\n(.*?)^```[ \t]*$", TEXT, flags=re.MULTILINE | re.DOTALL
)
COMMANDS = [code for language, code in BLOCKS if language == "sh"]
PROGRAMS = [
    pytest.param(code, BLOCKS[place + 1], id=f"block-{place}")
    for place, (language, code) in enumerate(BLOCKS)
    if language == "python"
]


def test_every_block_is_run_or_compared() -> None:
    """There are commands, programs, and what they print; nothing else that looks like code."""
    assert {language for language, _ in BLOCKS} == {"sh", "python", "text"}
    assert TEXT.count("```") == 2 * len(BLOCKS)
    for place, (language, _) in enumerate(BLOCKS):
        if language == "text":
            assert BLOCKS[place - 1][0] in ("sh", "python"), "whose output is this?"


@pytest.mark.parametrize(("code", "shown"), PROGRAMS)
def test_program_prints_what_is_shown(code: str, shown: tuple[str, str]) -> None:
    """Each program runs as it stands, in a process of its own, and prints what follows it."""
    assert shown[0] == "text"
    # Another program of this machine may have the port.
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    printed = run_script("-c", code.replace("127.0.0.1:5570", f"127.0.0.1:{port}"))
    assert without_what_varies(printed) == without_what_varies(shown[1])


def test_the_first_two_commands_are_what_the_checks_run() -> None:
    """The first two sh blocks are one command each: the quickstart and the tests."""
    for number, (end, code) in enumerate(
        [("examples/01_quickstart.py", COMMANDS[0]), ("-m pytest", COMMANDS[1])], start=1
    ):
        done = subprocess.run(
            [sys.executable, ".ci/readme-block", str(number)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout == code
        assert code.count("\n") == 1
        environment, install, run = code.strip().split(" && ")
        assert environment == "python3 -m venv .venv"
        assert install.startswith(".venv/bin/python -m pip install ")
        assert run == f".venv/bin/python {end}"


def test_the_quickstart_prints_what_is_shown() -> None:
    """The last part of the first command prints the text that follows it."""
    _, _, run = COMMANDS[0].strip().split(" && ")
    python, *arguments = shlex.split(run)
    assert python == ".venv/bin/python"
    language, shown = BLOCKS[BLOCKS.index(("sh", COMMANDS[0])) + 1]
    assert language == "text"
    assert without_what_varies(run_script(*arguments)) == without_what_varies(shown)


def test_the_tests_need_no_more_than_their_command_installs() -> None:
    """The second command installs the extra that the tests need."""
    assert "'.[test]'" in COMMANDS[1]


def test_links_lead_somewhere() -> None:
    """Every relative link is to a file that exists."""
    links = re.findall(r"\]\(([^)]+)\)", TEXT)
    assert links
    local = [link for link in links if "://" not in link]
    assert [link for link in local if not (ROOT / link).exists()] == []


def test_names_exist() -> None:
    """Every method, attribute and error that the README names exists."""
    attributes = set(re.findall(r"\bclient\.(\w+)", TEXT))
    attributes |= set(re.findall(r" · `\.(\w+)", TEXT))
    assert len(attributes) > 10
    assert [name for name in attributes if not hasattr(engine_client.EngineClient, name)] == []
    errors = set(re.findall(r"\b[A-Z]\w+(?:Error|Timeout)\b", TEXT))
    builtin = {"TypeError", "ValueError", "TimeoutError"}
    assert len(errors) > 10
    assert errors - builtin <= set(engine_client.__all__)


def test_tools_that_are_named_exist() -> None:
    """The checks and modules that maintainers are told to run are there."""
    for command in re.findall(r"\.ci/[\w-]+", TEXT):
        assert (ROOT / command).exists(), command
    for module in re.findall(r"python -m (tests\.\w+|engine_client\.[\w.]+)", TEXT):
        where = Path(ROOT, *module.split("."))
        assert where.with_suffix(".py").exists() or (where / "__main__.py").exists(), module
    for path in re.findall(r"-m pytest (tests/\S+\.py)", TEXT):
        assert (ROOT / path).exists(), path


def test_table_of_threads_and_locks_is_complete() -> None:
    """Whoever adds a thread or a lock below the tools comes here, and adds it to the table."""
    made = {
        f"{path.stem}: {kind}"
        for path in (ROOT / "engine_client").rglob("*.py")
        if "tools" not in path.parts
        for kind in re.findall(r"\b(?:threading|queue)\.[A-Z]\w+(?=\()", path.read_text())
    }
    assert made == {
        "dispatcher: threading.Lock",
        "dispatcher: threading.Thread",
        "outbox: threading.Lock",
        "registry: threading.Lock",
        "waiting: threading.Condition",
        "waiting: threading.Lock",
    }
    for row in ("dispatcher", "registry", "outbox", "latch", "futures", "mailbox"):
        assert re.search(rf"^\| {row}\b", TEXT, flags=re.MULTILINE), row
