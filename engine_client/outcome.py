"""Settled results as values: what each engine did in one fan-out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

from engine_client import _render
from engine_client.engines import engine_names
from engine_client.errors import (
    AbandonedError,
    CallTimeout,
    ConsensusError,
    EngineError,
    UtilityCallError,
    UtilityTimeoutError,
)

__all__ = ["Failed", "Ok", "Outcome", "Outcomes", "UtilityCall"]

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class UtilityCall:
    """A utility call as a value: what ``compensate=`` takes.

    Example:
        ``client.add_lora(lora, compensate=UtilityCall("remove_lora", (7,)))``
    """

    method: str
    args: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        given: object = self.args
        if isinstance(given, (str, bytes, Mapping, Set)) or not isinstance(given, Iterable):
            value = _render.shown(given)
            raise TypeError(
                f"args must be a tuple of arguments, not {value}; did you mean ({value},)?"
            )
        object.__setattr__(self, "args", tuple(given))


@dataclass(frozen=True, slots=True, init=False)
class Ok(Generic[T_co]):
    """An engine that succeeded."""

    value: T_co
    elapsed: float
    """Seconds from the start of the call until this engine settled."""

    def __init__(self, value: T_co, elapsed: float) -> None:
        # Each reply makes one; what a frozen dataclass writes for itself takes half as long again.
        _set_value(self, value)
        _set_elapsed(self, elapsed)


_set_value: Callable[[Ok[Any], Any], None] = Ok.__dict__["value"].__set__
_set_elapsed: Callable[[Ok[Any], float], None] = Ok.__dict__["elapsed"].__set__


@dataclass(frozen=True, slots=True)
class Failed:
    """An engine that failed; ``error`` says how and whether the call may have run."""

    error: EngineError
    elapsed: float
    """Seconds from the start of the call until this engine settled."""


Outcome: TypeAlias = Ok[Any] | Failed


class Outcomes(Mapping[int, Outcome]):
    """Every engine's outcome in one fan-out, keyed by engine index, in target order.

    Immutable, so it may be shared between threads; it pickles.
    """

    __slots__ = ("_method", "_outcomes")

    def __init__(self, method: str, outcomes: Mapping[int, Outcome]) -> None:
        self._method = method
        self._outcomes = dict(outcomes)

    @property
    def method(self) -> str:
        """The utility method that was called."""
        return self._method

    def __getitem__(self, engine: int) -> Outcome:
        return self._outcomes[engine]

    def __iter__(self) -> Iterator[int]:
        return iter(self._outcomes)

    def __len__(self) -> int:
        return len(self._outcomes)

    @property
    def all_ok(self) -> bool:
        """Whether every engine succeeded."""
        return all(isinstance(outcome, Ok) for outcome in self._outcomes.values())

    @property
    def succeeded(self) -> tuple[int, ...]:
        """The engines that succeeded."""
        return tuple(i for i, outcome in self._outcomes.items() if isinstance(outcome, Ok))

    @property
    def failures(self) -> dict[int, EngineError]:
        """The error of each engine that failed."""
        return {i: o.error for i, o in self._outcomes.items() if isinstance(o, Failed)}

    @property
    def may_have_run(self) -> tuple[int, ...]:
        """The engines that succeeded, or failed in a way that cannot exclude that they ran."""
        return tuple(
            i
            for i, outcome in self._outcomes.items()
            if isinstance(outcome, Ok) or outcome.error.may_have_run
        )

    @property
    def unsettled(self) -> tuple[int, ...]:
        """The engines that may still be running the call: no reply by the deadline or the end."""
        return tuple(
            i for i, e in self.failures.items() if isinstance(e, (CallTimeout, AbandonedError))
        )

    def values_in_order(self) -> list[Any]:
        """The results of those that succeeded, in target order."""
        return [o.value for o in self._outcomes.values() if isinstance(o, Ok)]

    def unwrap(self) -> list[Any]:
        """The results in target order.

        Raises:
            UtilityTimeoutError: an engine had not settled by the deadline.
            UtilityCallError: an engine failed.
        """
        values = self.values_in_order()
        if len(values) < len(self._outcomes):
            raise self.error()
        return values

    def error(self) -> UtilityCallError:
        """The error that :meth:`unwrap` raises; there must be a failure."""
        timed_out = any(isinstance(e, CallTimeout) for e in self.failures.values())
        kind = UtilityTimeoutError if timed_out else UtilityCallError
        return kind(self.summary(), method=self.method, outcomes=self)

    def agreed(self) -> Any:
        """The one value that all engines gave.

        Raises:
            UtilityCallError: an engine failed.
            ConsensusError: the values differ.
        """
        values = self.unwrap()
        if all(_same(values[0], value) for value in values[1:]):
            return values[0]
        shown = "; ".join(
            f"engine {i}: {_render.one_line(value)}"
            for i, value in zip(self._outcomes, values, strict=True)
        )
        raise ConsensusError(
            f"{self.method}: the engines disagree: {shown}", method=self.method, outcomes=self
        )

    def summary(self) -> str:
        """What failed, one line per engine that failed, and which engines may have run it."""
        failures = self.failures
        total = len(self._outcomes)
        if not failures:
            return f"{self.method} succeeded on {engine_names(self)}"
        lines = [f"{self.method} failed on {len(failures)} of {total} engines"]
        for i, error in list(failures.items())[:16]:
            ran = "may have run" if error.may_have_run else "did not run"
            lines.append(f"  engine {i}: {type(error).__name__}: {error} [{ran}]")
        if len(failures) > 16:
            lines.append(f"  ... and {len(failures) - 16} more in .outcomes")
        if self.succeeded:
            lines.append(f"  succeeded on {engine_names(self.succeeded)}")
        return "\n".join(lines)

    def _rows(self) -> list[tuple[object, ...]]:
        rows: list[tuple[object, ...]] = []
        for i, outcome in self._outcomes.items():
            if isinstance(outcome, Ok):
                rows.append((i, "ok", "yes", outcome.value, f"{outcome.elapsed * 1e3:.1f} ms"))
            else:
                error = outcome.error
                rows.append(
                    (
                        i,
                        type(error).__name__,
                        "maybe" if error.may_have_run else "no",
                        str(error),
                        f"{outcome.elapsed * 1e3:.1f} ms",
                    )
                )
        return rows

    def __str__(self) -> str:
        return f"{self.method}\n{_render.text_table(_HEADER, self._rows())}"

    def __repr__(self) -> str:
        return f"<Outcomes {self._counts()}>"

    def _counts(self) -> str:
        failed = len(self.failures)
        return f"{self.method}: {len(self) - failed} ok, {failed} failed"

    def _repr_html_(self, title: str = "") -> str:
        failed = [n for n, one in enumerate(self._outcomes.values()) if isinstance(one, Failed)]
        return _render.html_table(
            _HEADER, self._rows(), caption=title + self._counts(), strong=failed
        )

    def __getstate__(self) -> tuple[str, dict[int, Outcome]]:
        return self._method, self._outcomes

    def __setstate__(self, state: tuple[str, dict[int, Outcome]]) -> None:
        self._method, self._outcomes = state


_HEADER = ("engine", "outcome", "ran", "value or error", "after")


def _same(left: Any, right: Any) -> bool:
    """Equality for a consensus: True and 1 differ, and two NaN do not."""
    if isinstance(left, bool) != isinstance(right, bool):
        return False
    return bool(left == right) or (left != left and right != right)
