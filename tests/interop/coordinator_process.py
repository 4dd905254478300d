"""vLLM's own coordinator of a lockstep group. Runs under the interpreter that has vLLM.

    python coordinator_process.py SIZE

Prints its three addresses as a line of JSON (where clients subscribe, where engines do, where it
hears engines), and ends with its standard input.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module


def main(size: int) -> None:
    """Run the coordinator, a process of its own, until standard input ends."""
    # By name: the checks of this project run where there is no vLLM.
    config = import_module("vllm.config").ParallelConfig(
        data_parallel_size=size, data_parallel_size_local=size
    )
    coordinator = import_module("vllm.v1.engine.coordinator").DPCoordinator(config)
    try:
        engines = coordinator.get_engine_socket_addresses()
        print(json.dumps([coordinator.get_stats_publish_address(), *engines]), flush=True)
        sys.stdin.read()
    finally:
        coordinator.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]))
