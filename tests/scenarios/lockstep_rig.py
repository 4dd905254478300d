"""Groups of reference engines in lockstep, and an external coordinator made of bare sockets."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

import zmq

from engine_client import EngineClient, EngineRequest, RequestStream, SamplingParams, connect
from engine_client.tools.mock.log import Received
from engine_client.tools.mock.tokens import generate_tokens
from engine_client.tools.mock_engine import MockEngine
from engine_client.wire.codec import codec_named
from engine_client.wire.messages import Outputs, StartWave
from engine_client.wire.waves import Wake, WavePhase, WaveState
from tests.helpers import EngineProcess, scaled, wait_until

ENDLESS = 2000
"""``max_tokens`` of a request that runs until it is aborted."""
Kind = Literal["threads", "processes"]
Rank = MockEngine | EngineProcess


@dataclass(frozen=True, slots=True)
class Lockstep:
    """A client and the ranks of its group."""

    client: EngineClient
    engines: Sequence[Rank]

    def call(
        self, name: str, rank: int | None = None, count: int = ENDLESS, prompt: Sequence[int] = (7,)
    ) -> RequestStream:
        """Send a request for so many tokens."""
        params = SamplingParams(max_tokens=count)
        return self.client.call(EngineRequest(name, prompt, params, data_parallel_rank=rank))

    def run(self, name: str, rank: int | None = None, count: int = 2) -> None:
        """Have a request served, and served right."""
        with self.call(name, rank, count) as stream:
            tokens = [token for output in stream for token in output.new_token_ids]
        assert tokens == generate_tokens([7], count)

    def logged(self, engine: int, kind: str) -> list[Received]:
        """The messages of a kind that a rank received."""
        log = self.engines[engine].log
        entries = [entry if isinstance(entry, Received) else Received(**entry) for entry in log]
        return [entry for entry in entries if entry.type == kind]

    def methods(self, engine: int) -> list[Any]:
        """The utility methods that a rank was asked for."""
        return [entry.method for entry in self.logged(engine, "UTILITY")]

    def starts(self, engine: int) -> list[Any]:
        """The wake-ups that a rank received, ``[wave, excluded rank]``."""
        return [entry.args for entry in self.logged(engine, "START_DP_WAVE")]

    def has_starts(self, engine: int, starts: list[Any]) -> bool:
        """Whether a rank received just these."""
        return self.starts(engine) == starts

    def stamps(self, engine: int) -> list[int]:
        """The waves that the requests of a rank were stamped with."""
        return [entry.args[12] for entry in self.logged(engine, "ADD")]

    @property
    def state(self) -> WaveState:
        """What the client knows of the group."""
        return self.client._dispatcher.core.group.state

    def wait_wave(self, wave: int) -> None:
        """Wait until the group sleeps before a wave."""
        wait_until(lambda: self.client.stats.wave >= wave, what=f"wave {wave}")
        assert self.client.stats.wave == wave

    def wait_beyond(self, wave: int) -> None:
        """Wait until a wave is over."""
        wait_until(lambda: self.client.stats.wave > wave, what=f"the end of wave {wave}")

    def wait_running(self) -> None:
        """Wait until an engine has confirmed that the group runs."""
        wait_until(lambda: self.state.phase is WavePhase.RUNNING, what="a group that runs")


@contextlib.contextmanager
def folder() -> Iterator[str]:
    """A folder with a name short enough for socket files on every system."""
    name = tempfile.mkdtemp(prefix="ec-")
    try:
        yield name
    finally:
        shutil.rmtree(name, ignore_errors=True)


def rank(
    where: str | None,
    index: int,
    place: str,
    *,
    size: int = 2,
    kind: Kind = "threads",
    codec: str = "cbor",
    meets: bool = True,
    options: Mapping[str, Any] | None = None,
    ready: Mapping[str, Any] | None = None,
    **more: Any,
) -> Rank:
    """One rank, not started if it is a thread; with ``meets`` it steps with the others."""
    options = {"farewell_seconds": 0.1, **(options or {})}
    if meets:
        options["meeting"] = f"{place}/meeting"
    ready = {"data_parallel_size": size, **(ready or {})}
    if kind == "threads":
        return MockEngine(where, index, codec=codec, options=options, ready=ready, **more)
    arguments = ["--options", json.dumps(options), "--ready", json.dumps(ready)]
    return EngineProcess(where, index, codec=codec, arguments=arguments, **more)


def entered(stack: contextlib.ExitStack, made: Rank) -> Rank:
    """Run a rank until the stack is left."""
    stack.push(made)
    made.__enter__()
    return made


@contextlib.contextmanager
def lockstep(
    coordinator: bool,
    *,
    kind: Kind = "threads",
    codecs: Sequence[str] = ("cbor", "cbor"),
    meets: bool = True,
    options: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Iterator[Lockstep]:
    """A group, one rank for each codec, whose wave the client keeps with or without sockets."""
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(folder())
        where = f"ipc://{place}/h"
        engines: list[Rank] = [
            entered(
                stack,
                rank(
                    where,
                    index,
                    place,
                    size=len(codecs),
                    kind=kind,
                    codec=codec,
                    meets=meets,
                    options=options,
                ),
            )
            for index, codec in enumerate(codecs)
        ]
        stack.callback(stop_together, engines)
        settings = {"connect_timeout": scaled(30), "timeout": scaled(20), **settings}
        client = stack.enter_context(
            connect(where, engine_count=len(codecs), coordinator=coordinator, **settings)
        )
        made = Lockstep(client, engines)
        # Only then is every connection there, and no later test sees a descriptor appear.
        client.call_utility("mock_log")
        yield made


def stop_together(engines: Sequence[Rank]) -> None:
    """Tell all ranks to end: one that sees another go while it steps dies of that, and lingers."""
    for engine in engines:
        if isinstance(engine, MockEngine):
            engine.stop()
        elif engine.running:
            engine.signal(signal.SIGTERM)


class Coordinator:
    """An external coordinator, as vLLM's process is one; nothing is answered before ``run()``.

    Args:
        place: a folder for its sockets.
        engines: how many it waits for.
        codec: the dialect of the group.
    """

    def __init__(self, place: str, engines: int = 2, codec: str = "cbor") -> None:
        self.address = f"ipc://{place}/publish"
        self.input = f"ipc://{place}/engines-in"
        self.output = f"ipc://{place}/engines-out"
        self._codec = codec_named(codec)
        self._engines = engines
        self._context = zmq.Context()
        self.front = self._bind(zmq.XPUB, self.address)
        self.back = self._bind(zmq.XPUB, self.input)
        self.reports = self._bind(zmq.PULL, self.output)
        self._state = WaveState()
        self._stopping = False
        self._thread: threading.Thread | None = None

    def _bind(self, kind: int, address: str) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        made.linger = 0
        made.rcvtimeo = int(scaled(10) * 1000)
        if kind == zmq.XPUB:
            made.setsockopt(zmq.XPUB_VERBOSE, 1)
        made.bind(address)
        return made

    def publish(self, counts: list[list[float]] | None, wave: int, running: bool) -> None:
        """Tell the clients."""
        self.front.send(self._codec.encode([counts, wave, running]))

    def notice(self) -> Any:
        """Receive what a client says of a request that found the group asleep."""
        return self._codec.decode(self.front.recv())

    def hears_nothing(self) -> bool:
        """Whether no client has said anything."""
        return not self.front.poll(0)

    def run(self) -> None:
        """Coordinate from now on, in a thread."""
        self._thread = threading.Thread(target=self._run, name="test-coordinator", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        poller = zmq.Poller()
        for socket in (self.front, self.back, self.reports):
            poller.register(socket, zmq.POLLIN)
        subscribed = 0
        while not self._stopping:
            ready = dict(poller.poll(20))
            if self.back in ready and self.back.recv() == b"\x01":
                subscribed += 1
                if subscribed >= self._engines:
                    self.back.send(b"READY")
            if self.front in ready:
                frame = self.front.recv()
                if frame not in (b"\x00", b"\x01"):
                    target, wave = self._codec.decode(frame)
                    self._wake(self._state.request(target, wave))
            if self.reports in ready:
                self._take(Outputs.from_plain(self._codec.decode(self.reports.recv())))

    def _take(self, message: Outputs) -> None:
        before = self._state.wave, self._state.running
        if message.wave_complete is not None:
            self._state.completed(message.engine_index, message.wave_complete)
        elif message.start_wave is not None:
            self._wake(self._state.started(message.engine_index, message.start_wave))
        if (self._state.wave, self._state.running) != before:
            self.publish(None, self._state.wave, self._state.running)

    def _wake(self, wake: Wake | None) -> None:
        if wake is not None:
            payload = self._codec.encode(StartWave(wake.wave, wake.exclude).to_plain())
            self.back.send_multipart([b"\x02", payload])

    def close(self) -> None:
        """End it."""
        self._stopping = True
        if self._thread is not None:
            self._thread.join()
        self._context.destroy(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
