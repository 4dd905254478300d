"""What a browser makes of the tables: readable on light and dark pages, and never markup.

Needs nbconvert (the extra ``dev``) and Chromium, and takes long.  The pictures, for people to look
at, stay in pytest's temporary folder.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.limits import scaled
from tests.helpers.notebook import code_cell, notebook_of, run_notebook
from tests.helpers.scripts import ROOT

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next((found for name in BROWSERS if (found := shutil.which(name))), None)

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(180),
    pytest.mark.skipif(BROWSER is None, reason="needs Chromium"),
    pytest.mark.skipif(importlib.util.find_spec("nbconvert") is None, reason="needs nbconvert"),
]

EVIL = '</td><script>window.hacked = 1</script><img src="x" onerror="window.hacked = 2">&amp;'

PROBE = """
<script>
addEventListener("load", () => {
  const luminance = (color) => {
    const [r, g, b] = color.match(/[\\d.]+/g).slice(0, 3).map((value) => {
      const part = value / 255;
      return part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    for (let one = element; one; one = one.parentElement) {
      const color = getComputedStyle(one).backgroundColor;
      if (!/, 0\\)$/.test(color)) return color;
    }
    return "rgb(255, 255, 255)";
  };
  const contrast = (element) => {
    const pair = [getComputedStyle(element).color, behind(element)].map(luminance);
    return (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
  };
  const area = ".jp-OutputArea-output";
  const tables = [...document.querySelectorAll(area + " table")];
  const cells = [...document.querySelectorAll(area + " td, " + area + " th")];
  const oneLine = cells.filter((cell) => cell.innerText.length <= 30);
  const facts = {
    tables: tables.length,
    texts: cells.map((cell) => cell.innerText),
    hacked: window.hacked ?? null,
    strangers: document.querySelectorAll(area + " table :is(img, script)").length,
    alignments: [...new Set(cells.map((cell) => getComputedStyle(cell).textAlign))],
    contrast: Math.min(...cells.map(contrast)),
    background: luminance(behind(document.body)),
    overflowing: tables.filter((table) =>
      table.getBoundingClientRect().right > table.closest(area).getBoundingClientRect().right + 1
    ).length,
    highest: Math.max(...oneLine.map((cell) => {
      const range = document.createRange();
      range.selectNodeContents(cell);
      return new Set([...range.getClientRects()].map((box) => box.top)).size;
    })),
  };
  const told = document.createElement("script");
  told.type = "application/json";
  told.id = "facts";
  told.textContent = JSON.stringify(facts).replaceAll("<", "\\\\u003c");
  document.body.append(told);
});
</script>
"""


def chromium(folder: Path, *arguments: str) -> str:
    """Run the browser without a window, network or state of its own; return what it printed."""
    assert BROWSER is not None
    flags = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
        "--disable-background-networking --disable-component-update --disable-breakpad "
        "--hide-scrollbars"
    )
    profile = folder / "profile"
    done = subprocess.run(
        [BROWSER, *flags.split(), f"--user-data-dir={profile}", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=scaled(60),
        check=False,
    )
    shutil.rmtree(profile, ignore_errors=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def show(notebook: Path, folder: Path, theme: str, width: int) -> dict[str, Any]:
    """Render an executed notebook, take a picture of it and return what the browser measured."""
    command = [sys.executable, "-m", "nbconvert", "--to", "html", "--output-dir", str(folder)]
    command += ["--output", "page", f"--HTMLExporter.theme={theme}", str(notebook)]
    # Nothing is fetched from the network.
    command += [f"--HTMLExporter.{name}_url=" for name in ("require_js", "mathjax", "mermaid_js")]
    private = {"JUPYTER_CONFIG_DIR": str(folder), "JUPYTER_DATA_DIR": str(folder)}
    subprocess.run(
        command,
        env={**os.environ, "JUPYTER_PLATFORM_DIRS": "1", **private},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=scaled(60),
        check=True,
    )
    page = folder / "page.html"
    page.write_text(page.read_text(encoding="utf-8").replace("</body>", f"{PROBE}</body>"))
    size = f"--window-size={width},3000"
    picture = folder / f"{notebook.stem}-{theme}-{width}.png"
    chromium(folder, size, f"--screenshot={picture}", page.as_uri())
    assert picture.read_bytes().startswith(b"\x89PNG")
    document = chromium(folder, size, "--dump-dom", page.as_uri())
    told = re.search(r'<script type="application/json" id="facts">(.*?)</script>', document)
    assert told is not None
    facts: dict[str, Any] = json.loads(told[1])
    return facts


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1000, 640])
def test_the_example_on_a_page(tmp_path: Path, theme: str, width: int) -> None:
    """Its tables fit the page, are aligned to the left and stand out from the background."""
    facts = show(ROOT / "examples" / "03_notebook.ipynb", tmp_path, theme, width)
    assert facts["tables"] == 9
    assert facts["overflowing"] == 0
    assert facts["alignments"] == ["left"]
    assert facts["contrast"] > 7
    assert (facts["background"] > 0.9) == (theme == "light")
    assert (facts["background"] < 0.1) == (theme == "dark")
    assert facts["highest"] == 1


def test_what_an_engine_sends_is_text(tmp_path: Path) -> None:
    """Markup in values, failures and method names is shown and not executed; long words wrap."""
    source = tmp_path / "hostile.ipynb"
    cells = [
        "from engine_client import launch\nclient = launch(2)\nclient.engines[0]",
        f'client.settle_utility("echo", [{EVIL!r}])',
        f"client.settle_utility({EVIL!r})",
        f"client.settle_utility({EVIL!r}).failures[0]",
        f"client.settle_utility({EVIL!r}).error()",
        'client.settle_utility("echo", "w" * 5000)',
        "client.close()\nclient",
    ]
    source.write_text(json.dumps(notebook_of(*map(code_cell, cells))))
    run_notebook(source, tmp_path / "executed.ipynb")
    facts = show(tmp_path / "executed.ipynb", tmp_path, "light", 800)
    assert facts["tables"] == 8
    assert facts["hacked"] is None
    assert facts["strangers"] == 0
    assert facts["overflowing"] == 0
    assert sum(EVIL in text for text in facts["texts"]) == 2 + 2 + 1 + 2
