"""What tests share: limits, threads, interrupts, engine processes, leak checks."""

from __future__ import annotations

from tests.helpers.limits import scaled, wait_until
from tests.helpers.processes import EngineProcess, engine_processes
from tests.helpers.storm import StormReport, interrupt_storm, storm_test
from tests.helpers.threads import BackgroundCall, run_in_thread

__all__ = [
    "BackgroundCall",
    "EngineProcess",
    "StormReport",
    "engine_processes",
    "interrupt_storm",
    "run_in_thread",
    "scaled",
    "storm_test",
    "wait_until",
]
