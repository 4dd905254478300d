"""Execute a notebook in a kernel of its own, as Jupyter does.

``python -m tests.helpers.notebook IN OUT`` writes the executed notebook; with one path it stores
the outputs in the notebook itself.  The kernel libraries leave sockets and threads behind and warn
of it; in a process of their own they disturb no test.

A cell with the tag ``interrupt`` gets a kernel interrupt once a call of its waits for one engine
only (the remote control of the reference engines apart).
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.helpers.limits import scaled
from tests.helpers.scripts import ROOT

LIMIT = 40.0
"""Seconds for each cell, scaled."""

# Warnings of this package are errors in the kernel too; those of its libraries are not ours.
PREPARE = """
import warnings
warnings.filterwarnings("error", module=r"engine_client(\\.|$)")
"""

TELL_WHEN_IT_WAITS = """
def _tell(path):
    import time
    end = time.monotonic() + {limit}
    while time.monotonic() < end:
        waiting = [one.name for one in client.pending()]
        if len(waiting) == 1 and not waiting[0].startswith("mock_"):
            open(path, "w").close()
            return
        time.sleep(0.002)

__import__("threading").Thread(target=_tell, args=[{path!r}], daemon=True).start()
"""


def run_notebook(notebook: Path, executed: Path) -> dict[str, Any]:
    """Execute a notebook from its folder, in a process of its own; return it with its outputs.

    Raises:
        AssertionError: it could not be executed, or a cell failed that is not meant to.
    """
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.notebook", str(notebook), str(executed)],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=scaled(2 * LIMIT),
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    found: dict[str, Any] = json.loads(executed.read_text(encoding="utf-8"))
    return found


def code_cell(source: str, *tags: str) -> dict[str, Any]:
    """A cell of code; with the tag ``raises-exception`` the notebook goes on when it fails."""
    return {
        "cell_type": "code",
        "execution_count": None,
        "metadata": {"tags": list(tags)},
        "outputs": [],
        "source": source,
    }


def notebook_of(*cells: Mapping[str, Any]) -> dict[str, Any]:
    """A notebook with these cells."""
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {
        "cells": [{**cell, "id": f"cell-{number}"} for number, cell in enumerate(cells)],
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def store(notebook: dict[str, Any], path: Path) -> None:
    """Write a notebook the way Jupyter does, without what differs between machines."""
    for cell in notebook["cells"]:
        cell["metadata"].pop("execution", None)
    notebook["metadata"]["language_info"] = {"name": "python"}
    text = json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True)
    path.write_text(text + "\n", encoding="utf-8")


async def _execute(path: Path, folder: Path) -> dict[str, Any]:
    # Here, so that the tests need not import them.
    import nbformat
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    # No folder of installed kernels: the one of this interpreter, whatever this machine has.
    kernels = KernelSpecManager()
    kernels.kernel_dirs = []
    kernel = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=kernels)
    client = NotebookClient(
        notebook,
        km=kernel,
        timeout=scaled(LIMIT),
        resources={"metadata": {"path": str(path.parent)}},
    )
    # What is executed besides the notebook's own cells has a place of its own, at the end.
    beside = len(notebook.cells)
    notebook.cells.append(nbformat.v4.new_code_cell())

    async def execute_beside(source: str) -> None:
        cell = nbformat.v4.new_code_cell(source)
        await client.async_execute_cell(cell, beside, store_history=False)

    async with client.async_setup_kernel():
        await execute_beside(PREPARE)
        for index, cell in enumerate(notebook.cells[:beside]):
            interrupt = None
            if "interrupt" in cell.metadata.get("tags", ()):
                flag = folder / f"waits-{index}"
                await execute_beside(TELL_WHEN_IT_WAITS.format(path=str(flag), limit=scaled(LIMIT)))
                interrupt = asyncio.create_task(_interrupt(kernel, flag))
            await client.async_execute_cell(cell, index)
            if interrupt is not None:
                await interrupt
    del notebook.cells[beside:]
    plain: dict[str, Any] = json.loads(nbformat.writes(notebook))
    return plain


async def _interrupt(kernel: Any, flag: Path) -> None:
    """Interrupt the kernel as the stop button does, once the file is there."""
    end = time.monotonic() + scaled(LIMIT)
    while not flag.exists():
        assert time.monotonic() < end, "no call ever waited for one engine only"
        await asyncio.sleep(0.002)
    await kernel.interrupt_kernel()


def main() -> None:
    source = Path(sys.argv[1])
    target = Path(sys.argv[2]) if len(sys.argv) > 2 else source
    with tempfile.TemporaryDirectory(prefix="engine-client-notebook-") as folder:
        # Nothing of the user's configuration, and nothing into the user's folders.
        for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
            os.environ[name] = folder
        os.environ["JUPYTER_PLATFORM_DIRS"] = "1"
        os.environ["PYTHONPATH"] = str(ROOT)
        store(asyncio.run(_execute(source, Path(folder))), target)


if __name__ == "__main__":
    main()
