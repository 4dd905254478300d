"""How a reference engine ends, or falls silent."""

from __future__ import annotations

import os
import signal
import sys

from engine_client.tools.faults import FaultRule
from engine_client.tools.mock.sockets import OUTPUT_LINGER_MS, Ended, EngineSockets
from engine_client.wire.messages import DEAD_SENTINEL

__all__ = ["Endings", "complain"]


def complain(text: str) -> None:
    """Write a line to stderr, if somebody reads it."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        pass


class Endings:
    """The ways in which one engine ends.

    Args:
        sockets: those of the engine.
        owns_process: whether it may kill and stop the process.
    """

    def __init__(self, sockets: EngineSockets, owns_process: bool) -> None:
        self.silent = False
        """Whether it answers nothing any more, while it stays connected."""
        self._sockets = sockets
        self._owns_process = owns_process

    def end_as(self, rule: FaultRule) -> None:
        """End or silence the engine as a rule says.

        Raises:
            Ended: it ends now.
        """
        linger_ms = OUTPUT_LINGER_MS if rule.after_reply else 0
        if rule.do == "deaf":
            self._sockets.deafen()
        elif rule.do == "mute":
            self._sockets.mute()
        elif rule.do == "stop" and self._owns_process:
            os.kill(os.getpid(), signal.SIGSTOP)
        elif rule.do in ("stop", "stop_answering"):
            self.silent = True
        elif rule.do == "die":
            if self._owns_process and not rule.after_reply:
                os.kill(os.getpid(), signal.SIGKILL)
            raise Ended(-signal.SIGKILL, linger_ms)
        elif rule.do == "exit":
            if rule.message:
                complain(rule.message)
            raise Ended(rule.code, linger_ms)
        else:
            self.announce_death(rule.seconds, rule.code)

    def announce_death(self, seconds: float, code: int) -> None:
        """Send the sentinel to every client, close the outputs, and end a while later.

        Raises:
            Ended: always.
        """
        for client in range(len(self._sockets.outputs)):
            self._sockets.send(client, [DEAD_SENTINEL])
        self._sockets.mute()
        self._sockets.pause(seconds)
        raise Ended(code, OUTPUT_LINGER_MS)
