"""Random schedules: made from a seed, played, and shrunk when they fail.

Run as ``python -m tests.simulation.schedules SEED COUNT SECONDS``, it plays as many as time allows.
"""

from __future__ import annotations

import logging
import random
import sys
import time
from collections.abc import Sequence

from tests.simulation.world import STEPS, Options, World

__all__ = ["Step", "failure", "play", "play_many", "schedule", "shrink"]

Step = tuple[str, int, int]
_LENGTHS = (20, 60, 120)
_TRIES = ((0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (2, 0))


def schedule(seed: int) -> tuple[int, list[Step]]:
    """The number of a world's options, and what happens in it."""
    chance = random.Random(seed)
    options = chance.randrange(256)
    weights = [weight for _, weight in STEPS.values()]
    names = chance.choices(list(STEPS), weights, k=chance.choice(_LENGTHS))
    return options, [(name, chance.randrange(16), chance.randrange(16)) for name in names]


def play(options: int, steps: Sequence[Step]) -> World:
    """Play a schedule to its end; raises AssertionError where an account does not hold."""
    world = World(Options.picked(options))
    for step in steps:
        world.run(*step)
    world.finish_all()
    return world


def failure(options: int, steps: Sequence[Step]) -> Exception | None:
    """What a schedule raises."""
    try:
        play(options, steps)
    except Exception as exc:
        return exc
    return None


def shrink(options: int, steps: Sequence[Step], error: Exception) -> tuple[int, list[Step]]:
    """A shorter schedule that fails in the same way."""

    def fails(number: int, shorter: list[Step]) -> bool:
        found = failure(number, shorter)
        return type(found) is type(error) and str(found)[:20] == str(error)[:20]

    left = list(steps)
    options = next((number for number in range(options) if fails(number, left)), options)
    size = max(1, len(left) // 2)
    while size:
        at = 0
        while at < len(left):
            shorter = left[:at] + left[at + size :]
            if fails(options, shorter):
                left = shorter
            else:
                at += size
        size //= 2
    for at, (name, _, _) in enumerate(left):
        for a, b in _TRIES:
            simpler = [*left[:at], (name, a, b), *left[at + 1 :]]
            if fails(options, simpler):
                left = simpler
                break
    return options, left


def play_many(seed: int, count: int, seconds: float = float("inf")) -> tuple[int, int]:
    """Play random schedules; fail with the first bad one, shrunk.

    Returns:
        How many were played, and how many steps they had.
    """
    end = time.monotonic() + seconds
    played = steps = 0
    while played < count and time.monotonic() < end:
        options, chosen = schedule(seed + played)
        error = failure(options, chosen)
        if error is not None:
            options, chosen = shrink(options, chosen, error)
            listing = "\n".join(f"    {step}" for step in chosen)
            raise AssertionError(
                f"seed {seed + played}, {Options.picked(options)}, shrunk to {len(chosen)} steps:\n"
                f"{listing}"
            ) from failure(options, chosen)
        played += 1
        steps += len(chosen)
    return played, steps


if __name__ == "__main__":
    # Deaths by the thousand are logged by the thousand otherwise.
    logging.getLogger("engine_client").setLevel(logging.CRITICAL + 1)
    print(*play_many(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
