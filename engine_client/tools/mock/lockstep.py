"""A reference engine as one rank of a lockstep group, as a rank of vLLM 0.32 behaves.

Every step is a collective: a rank that steps hears nothing until all do, in whatever process they
are.  So do ``resume_scheduler``, ``execute_dummy_batch`` and ``barrier`` meet the other ranks, and
``pause_scheduler`` makes a rank step until all have been told to pause; one of these that reaches a
rank alone leaves it waiting in the collective, and it answers nothing any more.  Ranks that meet
for different things wait for ever, too.

The ranks need a place to meet, ``host:port`` or the path of a socket file: the option ``meeting``,
or ``data_parallel_master_ip`` and ``data_parallel_master_port`` in INIT.  Rank 0 listens there.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal

from engine_client.errors import ProtocolError
from engine_client.tools.mock.methods import EngineModel
from engine_client.tools.mock.requests import Requests
from engine_client.tools.mock.scheduler import Pause
from engine_client.tools.mock.sockets import EngineSockets
from engine_client.wire.codec import Codec
from engine_client.wire.messages import Outputs, StartWave

__all__ = ["LockstepRank", "Meeting"]

Purpose = Literal["step", "resume", "batch", "barrier"]
SYNC_INTERVAL: Final = 16
"""Steps between looks at whether the group has work left; the first step of a wave counts too."""
_RETRY = 0.01
_CONTRIBUTION = struct.Struct("<8s2q")


class Meeting:
    """A collective among the ranks of a group: everybody brings two numbers, and gets the sums.

    Args:
        address: where rank 0 listens.
        rank: this one.
        size: how many there are.
        sockets: to wait with, so that a rank can be stopped while it waits.
    """

    def __init__(self, address: str, rank: int, size: int, sockets: EngineSockets) -> None:
        self._address = address
        self._rank = rank
        self._size = size
        self._sockets = sockets
        self._listener: socket.socket | None = None
        self._links: list[socket.socket] = []

    def open(self) -> None:
        """Find the others.

        Raises:
            Ended: the engine was told to stop.
        """
        if self._rank:
            self._links.append(self._connect())
            return
        self._listener = self._listen()
        while len(self._links) < self._size - 1:
            self._sockets.pause(None, until=self._listener.fileno())
            self._links.append(self._prepared(self._listener.accept()[0]))

    def close(self) -> None:
        """Leave; those who wait for this rank learn of it, and die."""
        for link in (*self._links, *([self._listener] if self._listener is not None else ())):
            link.close()

    def meet(self, purpose: Purpose, *numbers: int) -> tuple[int, int]:
        """Wait for the others; return the sums of what all brought.

        Raises:
            ConnectionError: one of them is gone.
            Ended: the engine was told to stop.
        """
        first, second = (*numbers, 0, 0)[:2]
        mine = _CONTRIBUTION.pack(purpose.encode(), first, second)
        if self._rank:
            (link,) = self._links
            link.sendall(mine)
            return self._receive(link)[1:]
        brought = [_CONTRIBUTION.unpack(mine), *map(self._receive, self._links)]
        if len({name for name, *_ in brought}) > 1:
            self._sockets.pause(None)  # they wait for each other, for different things
        sums = sum(b[1] for b in brought), sum(b[2] for b in brought)
        for link in self._links:
            link.sendall(_CONTRIBUTION.pack(purpose.encode(), *sums))
        return sums

    def _receive(self, link: socket.socket) -> tuple[bytes, int, int]:
        data = b""
        while len(data) < _CONTRIBUTION.size:
            self._sockets.pause(None, until=link.fileno())
            more = link.recv(_CONTRIBUTION.size - len(data))
            if not more:
                raise ConnectionResetError("Connection closed by peer")
            data += more
        name, first, second = _CONTRIBUTION.unpack(data)
        return name, first, second

    def _listen(self) -> socket.socket:
        host, colon, port = self._address.rpartition(":")
        if colon:
            return socket.create_server((host, int(port)), backlog=self._size)
        Path(self._address).unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self._address)
        listener.listen(self._size)
        return listener

    def _connect(self) -> socket.socket:
        host, colon, port = self._address.rpartition(":")
        while True:
            link = socket.socket() if colon else socket.socket(socket.AF_UNIX)
            try:
                link.connect((host, int(port)) if colon else self._address)
            except OSError:
                link.close()
                self._sockets.pause(_RETRY)  # rank 0 has not come yet
            else:
                return self._prepared(link)

    @staticmethod
    def _prepared(link: socket.socket) -> socket.socket:
        if link.family != socket.AF_UNIX:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return link


class LockstepRank:
    """One rank: its wave, and its loop.

    Args:
        model: what the engine knows and can do.
        codec: its dialect.
        sockets: to receive and send with.
        requests: its requests.
        meeting: of the group.
        coordinated: whether a coordinator keeps the group's wave.
    """

    def __init__(
        self,
        model: EngineModel,
        codec: Codec,
        sockets: EngineSockets,
        requests: Requests,
        meeting: Meeting,
        *,
        coordinated: bool,
    ) -> None:
        self.wave = 0
        self.running = False
        self._model = model
        self._scheduler = model.scheduler
        self._codec = codec
        self._sockets = sockets
        self._requests = requests
        self._meeting = meeting
        self._coordinated = coordinated
        self._steps = 0
        """In this wave; the same on all ranks."""
        self._pausing = False
        """It was told to pause, and not all have been."""
        self._paused = False
        """All were told to pause: what wakes a group is ignored."""
        self._reported = 0, 0
        """The last load that the coordinator was told."""
        model.member = self
        requests.member = self

    # -- what it is told -----------------------------------------------------------------------

    def added(self, wave: int) -> None:
        """A request came that was stamped with a wave."""
        if not self._coordinated or wave == self.wave:
            return  # it steps, and waits there until the others are woken
        if wave > self.wave:
            self.wave = wave
        elif not self.running and self._scheduler.pause is Pause.NOT:
            self.running = True
            self._report(start_wave=self.wave)

    def woken(self, payload: Any) -> None:
        """START_DP_WAVE came."""
        try:
            start = StartWave.from_plain(payload)
        except ProtocolError:
            self._sockets.deafen()
            return
        if self._paused or start.exclude_engine == self._model.index or start.wave < self.wave:
            return
        self.wave = start.wave
        self.running = True

    def pause(self) -> None:
        """``pause_scheduler`` came: step until all have been told."""
        self._pausing = True
        self.running = True

    def may_resume(self) -> bool:
        """Whether ``resume_scheduler`` has anything to do.

        Raises:
            RuntimeError: the pause is not complete.
        """
        if self._pausing or (self.running and self._paused):
            raise RuntimeError(
                "resume_scheduler called while pause is still in flight. Wait for the pause future "
                "to resolve before resuming."
            )
        return not self.running

    def resume(self) -> None:
        """Meet the others, and run if anybody has work."""
        self._paused = False
        unfinished, _ = self._meeting.meet("resume", self._scheduler.computes)
        if unfinished:
            self.running = True

    def meet(self, purpose: Purpose) -> None:
        """Wait for the others."""
        self._meeting.meet(purpose)

    # -- its loop ------------------------------------------------------------------------------

    def serve(self, handle: Callable[[list[bytes]], None]) -> None:
        """Be a rank, until the engine ends.

        Args:
            handle: takes each message that was received.

        Raises:
            Exception: what kills a real engine.
            Ended: the engine ends.
        """
        while True:
            was_running = self.running
            self._receive(handle)
            self._report_load()
            executed = self._requests.step()
            self._report_load()
            unfinished = self._scheduler.computes
            if not executed and not unfinished and not self.running:
                continue
            self.running = self._go_on(unfinished)
            if not self.running:
                self._complete()
            elif self._model.index == 0 and not was_running and not self._pausing:
                self._report(start_wave=self.wave)

    def _receive(self, handle: Callable[[list[bytes]], None]) -> None:
        """Handle messages until there is something to do, and then those that are there."""
        while not self.running and not self._scheduler.has_work:
            self._scheduler.settle_idle()
            handle(self._sockets.receive())
        while (frames := self._sockets.take()) is not None:
            handle(frames)

    def _go_on(self, unfinished: bool) -> bool:
        """Make the step of all; return whether the group goes on."""
        self._steps += 1
        left, pausing = self._meeting.meet("step", unfinished, self._pausing)
        if self._steps != 1 and self._steps % SYNC_INTERVAL:
            return True
        size: int = self._model.ready["data_parallel_size"]
        if pausing == size:
            self._paused = True
            self._pausing = False
        return left > 0 or 0 < pausing < size

    def _complete(self) -> None:
        if not self._coordinated:
            self._sockets.send(0, [self._encode(Outputs(wave_complete=self.wave))])
        elif self._model.index == 0:
            self._report(wave_complete=self.wave)
        self.wave += 1
        self._steps = 0

    # -- the coordinator -----------------------------------------------------------------------

    def _report(self, **fields: Any) -> None:
        if self._coordinated:
            self._sockets.report([self._encode(Outputs(**fields))])

    def _report_load(self) -> None:
        load = self._scheduler.running, self._scheduler.waiting
        if self._coordinated and load != self._reported:
            self._reported = load
            stats = {
                "num_running_reqs": load[0],
                "num_waiting_reqs": load[1],
                "kv_cache_usage": 0.0,
                "step_counter": self._steps,
                "current_wave": self.wave,
            }
            self._report(scheduler_stats=stats)

    def _encode(self, outputs: Outputs) -> bytes:
        outputs = outputs._replace(engine_index=self._model.index, timestamp=time.monotonic())
        return self._codec.encode(outputs.to_plain())
