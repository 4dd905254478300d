"""Run a blocking call beside the test and look at how it ends."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

from tests.helpers.limits import scaled

P = ParamSpec("P")
T = TypeVar("T")


def stack_of(thread: threading.Thread) -> str:
    """Return where a thread is right now, as text."""
    frame = sys._current_frames().get(thread.ident or 0)
    return "".join(traceback.format_stack(frame)) if frame else "(no Python frame)\n"


class BackgroundCall(Generic[T]):
    """A call that runs in a thread of its own."""

    def __init__(self, function: Callable[[], T], name: str) -> None:
        self._function = function
        self._value: list[T] = []
        self._error: BaseException | None = None
        # A daemon, so that a call that hangs fails its test and does not hold the interpreter.
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self._value.append(self._function())
        except BaseException as error:
            self._error = error
        finally:
            del self._function  # it may hold a client whose end the test wants to see

    @property
    def done(self) -> bool:
        """Whether the call has returned or raised."""
        return not self.thread.is_alive()

    def join(self, timeout: float = 10.0) -> None:
        """Wait for the end of the call, however it ends.

        Raises:
            AssertionError: It still runs after the (scaled) limit; the text shows where.
        """
        self.thread.join(scaled(timeout))
        if self.thread.is_alive():
            raise AssertionError(
                f"{self.thread.name} still runs after {scaled(timeout):g} s:\n"
                + stack_of(self.thread)
            )

    def result(self, timeout: float = 10.0) -> T:
        """Wait, then return what the call returned or raise what it raised."""
        self.join(timeout)
        if self._error is not None:
            raise self._error
        return self._value[0]

    def error(self, timeout: float = 10.0) -> BaseException | None:
        """Wait, then return what the call raised, or `None`."""
        self.join(timeout)
        return self._error


def run_in_thread(
    function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
) -> BackgroundCall[T]:
    """Start a call in a thread and return at once."""
    name = f"test-{getattr(function, '__name__', 'call')}"
    return BackgroundCall(lambda: function(*args, **kwargs), name)
