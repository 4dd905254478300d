"""The import contracts of setup.cfg hold, and a rule about locks."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_imports_go_downwards_only() -> None:
    """Every import-linter contract of setup.cfg is kept."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from importlinter.cli import lint_imports_command as run; run()",
            "--no-cache",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 broken" in done.stdout


OF_THE_DISPATCHER = {
    "registry": {"unanswered", "take_loads", "note_sent", "fail_engine", "end"},
    "requests": {"deliver", "fail_engine", "end", "take_aborts"},
}
"""Methods that its thread alone calls, where no signal interrupts."""


def test_no_loop_stands_under_a_lock_that_a_caller_takes() -> None:
    """CPython 3.12 and 3.13 can be interrupted there without the lock being released."""
    loops = (ast.For, ast.While, ast.ListComp, ast.SetComp, ast.DictComp)
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "engine_client" / "dispatch").glob("*.py")):
        tree = ast.parse(path.read_text())
        for function in [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]:
            for part in ast.walk(function):
                if (
                    isinstance(part, ast.With)
                    and any("lock" in ast.unparse(item.context_expr) for item in part.items)
                    and any(isinstance(inner, loops) for inner in ast.walk(part))
                ):
                    found.setdefault(path.stem, set()).add(function.name)
    assert found == OF_THE_DISPATCHER
