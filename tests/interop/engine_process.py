"""One vLLM engine core, in this process. Runs under the interpreter that has vLLM.

    python engine_process.py JSON

The JSON gives `address` (of the handshake), `index`, `arguments` (of vLLM's AsyncEngineArgs) and
`lifeline`, an inherited socket: at its end-of-file this process kills itself, so that it never
outlives its owner. The owner, at the other end, learns by it when the kernel closes what this
process had open.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
from importlib import import_module
from typing import Any


def end_with_owner(descriptor: int) -> None:
    """Watch the lifeline from a thread."""
    os.set_inheritable(descriptor, False)  # a helper that held it would keep it open
    lifeline = socket.socket(fileno=descriptor)

    def watch() -> None:
        with contextlib.suppress(OSError):
            lifeline.recv(1)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def main(job: dict[str, Any]) -> None:
    """Become the engine; returns when it is told to stop by a signal."""
    end_with_owner(job["lifeline"])
    # By name: the checks of this project run where there is no vLLM.
    arguments = import_module("vllm.engine.arg_utils").AsyncEngineArgs(**job["arguments"])
    config = arguments.create_engine_config(headless=True)
    import_module("vllm.v1.engine.core").EngineCoreProc.run_engine_core(
        vllm_config=config,
        local_client=True,
        handshake_address=job["address"],
        executor_class=import_module("vllm.v1.executor").Executor.get_class(config),
        log_stats=not arguments.disable_log_stats,
        dp_rank=job["index"],
        local_dp_rank=job["index"],
    )


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
