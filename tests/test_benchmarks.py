"""The benchmarks run; what they measure on the machine of the tests says nothing."""

from __future__ import annotations

import json

import pytest

from tests.benchmarks.__main__ import BENCHES, main

LINES = {"fanout": 4, "stream": 5}


@pytest.mark.parametrize("name", BENCHES)
def test_benchmark_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A short run gives its results as JSON, each with a budget and a verdict."""
    main(["--quick", "--json", name])
    results = json.loads(capsys.readouterr().out)
    assert len(results) == LINES.get(name, 1)
    for result in results:
        spread = result["spread"]
        assert 0 <= spread["least"] <= spread["most"]
        assert result["budget"] > 0
        assert result["kept"] == (spread["median"] <= result["budget"])


def test_table_has_verdicts(capsys: pytest.CaptureFixture[str]) -> None:
    """Without ``--json``, one line for each result follows the names of the columns."""
    main(["--quick", "import"])
    _, header, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == ["work", "median", "min", "to", "max", "budget", "verdict"]
    assert any(line.startswith("import ") and "ms" in line for line in lines)


def test_unknown_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A name that is no benchmark ends the program with the names there are."""
    with pytest.raises(SystemExit):
        main(["fan"])
    assert "there are fanout, stream, large, death" in capsys.readouterr().err
