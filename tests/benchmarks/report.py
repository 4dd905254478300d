"""What a benchmark measured, and the table of it all."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from engine_client import _render


@dataclass(frozen=True, slots=True)
class Options:
    """How much to measure."""

    quick: bool = False
    """Only show that it runs: the figures mean nothing."""

    def choose(self, normal: int, quick: int) -> int:
        """A number of blocks, calls or samples."""
        return quick if self.quick else normal


@dataclass(frozen=True, slots=True)
class Spread:
    """Minimum, median and maximum of some samples."""

    least: float
    median: float
    most: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        """Summarise at least one sample."""
        return cls(min(samples), statistics.median(samples), max(samples))


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the table: lower is better."""

    name: str
    spread: Spread
    unit: str
    budget: float
    note: str = ""
    """Absolute figures behind a ratio, or what was compared."""

    @property
    def kept(self) -> bool:
        """Whether the median keeps to the budget."""
        return self.spread.median <= self.budget

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {**asdict(self), "kept": self.kept}

    def row(self) -> tuple[object, ...]:
        """For the table."""
        spread = self.spread
        return (
            self.name,
            f"{_number(spread.median)} {self.unit}",
            f"{_number(spread.least)} to {_number(spread.most)}",
            f"{self.budget:g} {self.unit}",
            "ok" if self.kept else "OVER",
            self.note,
        )


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def table(results: Sequence[Result]) -> str:
    """All results, one line each."""
    header = ("work", "median", "min to max", "budget", "verdict", "")
    return _render.text_table(header, [result.row() for result in results])
