"""Many reference engines, each in a process of its own: forked, so that 64 start in a second.

Run as ``python -m tests.benchmarks.engines INPUT OUTPUT COUNT``; it ends with its standard input.
"""

from __future__ import annotations

import os
import signal
import sys

from engine_client.tools.mock_engine import MockEngine
from tests.benchmarks.peers import Peers


class Engines(Peers):
    """Engines that connect to ready-made data addresses; a context manager."""

    def __init__(self, count: int) -> None:
        super().__init__("tests.benchmarks.engines", str(count))
        self.count = count
        self.pids = [int(pid) for pid in self.answers.readline().split()]


def _hang() -> None:
    while True:
        signal.pause()


def _engine(index: int, input_address: str, output_address: str) -> int:
    os.close(0)
    engine = MockEngine(
        index=index,
        input_address=input_address,
        output_address=output_address,
        methods={"size": len, "hang": _hang},
        keep_log=False,
        owns_process=True,
    )
    return engine.run()


def main(input_address: str, output_address: str, count: str) -> None:
    """Be the parent of all engines until the standard input ends."""
    pids: list[int] = []
    try:
        for index in range(int(count)):
            pid = os.fork()
            if pid == 0:
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the engines
                os._exit(_engine(index, input_address, output_address))
            pids.append(pid)
        print(*pids, flush=True)
        sys.stdin.read()
    except KeyboardInterrupt:
        pass
    finally:
        # Not reaped before, so no number can have become another process's.
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
