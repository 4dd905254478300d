"""First contact with real vLLM: two engines, one client, one death. Prints what it sees.

tests/interop/run first-contact
"""

from __future__ import annotations

import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import NoReturn

import engine_client
from engine_client import UtilityCallError
from tests.helpers import scaled
from tests.interop.engines import vllm_engines
from tests.interop.environment import environment

START = time.monotonic()


def say(text: object) -> None:
    """Print with the time since the start."""
    head, *rest = str(text).splitlines()
    print(f"[{time.monotonic() - START:6.2f} s] {head}", *rest, sep="\n           ", flush=True)


def expect_failure(client: engine_client.EngineClient, method: str) -> UtilityCallError:
    """Call a method that cannot succeed; return the error."""
    try:
        unexpected(client.call_utility(method, timeout=None))
    except UtilityCallError as error:
        return error


def unexpected(value: object) -> NoReturn:
    """Complain about a result where only an error makes sense."""
    raise AssertionError(f"no error but {value}")


def main(folder: Path) -> None:
    """Do it all; the engines' files go into the folder."""
    say(f"starting two engines of vLLM in {environment().folder}")
    with vllm_engines(folder) as group:
        with engine_client.connect(
            group.address, engine_count=2, connect_timeout=scaled(150)
        ) as client:
            say(client)
            for info in client.engines:
                shown = {key: info.ready[key] for key in ("vllm_version", "data_parallel_size")}
                say(f"engine {info.index}: {info.codec}, {len(info.ready)} fields, {shown}")

            say(client.settle_utility("is_sleeping"))
            say(client.settle_utility("is_scheduler_paused"))
            say(f"collective_rpc('check_health') -> {client.collective_rpc('check_health')}")
            say(expect_failure(client, "no_such_method"))

            victim = group.engines[1]
            victim.signal(signal.SIGSTOP)
            say("engine 1 is stopped; calling is_sleeping on both, without a time limit")

            def kill() -> None:
                while client.pending_utility_calls != 1:
                    time.sleep(0.01)
                moments["killed"] = victim.signal(signal.SIGKILL)
                moments["lost"] = victim.closed_at()

            moments: dict[str, float] = {}
            killer = threading.Thread(target=kill)
            killer.start()
            error = expect_failure(client, "is_sleeping")
            raised = time.monotonic()
            killer.join()
            say(error)
            say(
                f"SIGKILL to error {(raised - moments['killed']) * 1e3:.1f} ms; the kernel closed "
                f"its descriptors {(moments['lost'] - moments['killed']) * 1e3:.1f} ms after the "
                f"SIGKILL, the error came {(raised - moments['lost']) * 1e3:+.1f} ms from there"
            )
            say(client)

            say("starting engine 1 again")
            group.start(1)
            while not client.engines[1].alive:
                time.sleep(0.05)
            say(client.settle_utility("is_sleeping"))
            say(client.stats)
        say(client)
    say("done")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="ec-interop-", ignore_cleanup_errors=True) as name:
        main(Path(name))
