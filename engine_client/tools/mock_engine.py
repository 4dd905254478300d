"""A reference engine: it speaks the engine side of the protocol on real sockets.

In a thread of your process::

    with MockEngine("ipc:///run/engines/handshake", index=0) as engine:
        ...                                     # connect(...) in the meantime
    engine.log                                  # what it received, with times

or as a process::

    python -m engine_client.tools.mock_engine --connect ADDRESS --index 0

It behaves as a vLLM 0.32 engine: the order of its startup, its socket options, the texts of its
failures.  Like that engine it trusts its client: a message that it cannot decode leaves it deaf,
a reply that it cannot send leaves it mute.  What it does wrong on purpose is told by the rules in
``faults.py``, from the start or, over the wire, while it runs:

==============================  =================================================================
``mock_fault(rule)``            add a fault; ``rule`` is a map with the fields of ``FaultRule``
``mock_clear()``                remove all faults
``mock_release(method=None)``   send the replies that ``hold`` kept; answers how many
``mock_log()``                  what the engine received so far, oldest first, as maps
``mock_step(count=1)``          make steps, also where there are none by themselves; answers how
                                many had something to do
==============================  =================================================================

With a registration that says ``data_parallel_size`` above 1, and a place to meet, it steps in
lockstep with the others of its group: see ``mock/lockstep.py``.

Generation requests are run as ``mock/scheduler.py`` describes, and generate what
``mock.tokens.generate_tokens`` says; :class:`EngineOptions` has how long a step takes, whether
statistics are sent, and more.  What a vLLM engine dies of kills this one: a request whose id is
still live, an empty prompt, one of ``max_model_len`` tokens or more, a token id beyond the
vocabulary, an adapter that cannot be loaded, a pooling task that it does not support.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import IO, Any

from engine_client.engines import engine_id
from engine_client.errors import ProtocolError
from engine_client.tools.faults import FaultPlan, FaultRule
from engine_client.tools.mock.calls import Calls
from engine_client.tools.mock.endings import Endings, complain
from engine_client.tools.mock.lockstep import LockstepRank, Meeting
from engine_client.tools.mock.log import MessageLog, Received
from engine_client.tools.mock.methods import Deferred, EngineModel
from engine_client.tools.mock.options import EngineOptions
from engine_client.tools.mock.requests import Died, Requests
from engine_client.tools.mock.sockets import (
    COORDINATOR_READY,
    STOP_LINGER_MS,
    Ended,
    EngineSockets,
    Socket,
)
from engine_client.wire.codec import codec_named
from engine_client.wire.handshake import EngineHandshake
from engine_client.wire.messages import Init, RequestType

__all__ = ["EngineOptions", "MockEngine", "Received", "main"]

INIT_TIMEOUT = 300.0
"""Seconds that an engine waits for its INIT, as vLLM does."""
STOP_LIMIT = 1.5
"""Seconds after a signal at which a process that has not ended by itself is ended."""


class MockEngine:
    """One reference engine: ``run()`` is its life, ``start()`` gives it a thread.

    Args:
        address: The handshake address to connect to.  None in the bootstrapped mode, in which
            the data addresses are given and the engine only registers.
        index: The engine's index; its ZeroMQ identity follows from it.
        codec: ``"cbor"`` or ``"msgpack"``.
        faults: Rules, or a ``FaultPlan``, which several engines may share.
        input_address: Bootstrapped mode: one address, or one for each client.
        output_address: Likewise, in the same order.
        ready: Keys of the registration to replace or add.
        options: How it behaves: ``EngineOptions``, or a map of them.
        model: What the engine knows and can do, made with options of its own.
        methods: More utility methods, by name.
        local: Whether it says in its HELLO that the client launched it.
        identity: Another ZeroMQ identity than the index, to play a stray peer.
        keep_log: Whether to keep what it receives in ``log``.
        log_file: Write each received message there at once, as a line of JSON.
        owns_process: Whether faults may kill and stop the process.  Without, they drop the
            sockets and fall silent.
        init_timeout: Seconds to wait for the INIT.
    """

    def __init__(
        self,
        address: str | None = None,
        index: int = 0,
        *,
        codec: str = "cbor",
        faults: FaultPlan | Iterable[FaultRule | Mapping[str, Any]] | None = None,
        input_address: str | Sequence[str] | None = None,
        output_address: str | Sequence[str] | None = None,
        ready: Mapping[str, Any] | None = None,
        options: EngineOptions | Mapping[str, Any] | None = None,
        model: EngineModel | None = None,
        methods: Mapping[str, Callable[..., Any]] | None = None,
        local: bool = False,
        identity: bytes | None = None,
        keep_log: bool = True,
        log_file: IO[str] | None = None,
        owns_process: bool = False,
        init_timeout: float = INIT_TIMEOUT,
    ) -> None:
        self._bootstrap = _addresses(input_address), _addresses(output_address)
        given = bool(address), *map(bool, self._bootstrap)
        if given not in ((True, False, False), (False, True, True)):
            raise ValueError("give a handshake address, or an input and an output address")
        if model is not None and options is not None:
            raise ValueError("give the options to the model")
        self.index = index
        self.faults = faults if isinstance(faults, FaultPlan) else FaultPlan(faults or ())
        self.model = model if model is not None else EngineModel(index, options)
        self.ready = self.model.ready
        self.ready.update(ready or {})
        self.exit_code: int | None = None
        """How it ended: 0 after ``stop()``, else what its process's exit code would be."""
        self._address = address
        self._codec = codec_named(codec)
        self._local = local
        self._log = MessageLog(self._codec, log_file) if keep_log or log_file else None
        self._init_timeout = init_timeout
        self._sockets = EngineSockets(engine_id(index) if identity is None else identity)
        self._endings = Endings(self._sockets, owns_process)
        all_methods: dict[str, Callable[..., Any]] = {}
        parts = self._codec, self._sockets, self.faults, self._endings
        self._calls = Calls(self.model, all_methods, *parts)
        self._requests = Requests(self.model, *parts, self._calls)
        all_methods |= {
            # Without fault tolerance, which is not simulated, a vLLM engine stops receiving.
            "handle_fault_tolerance": self._deafen,
            **self.model.methods,
            **(methods or {}),
            "mock_fault": self.faults.add,
            "mock_clear": self.faults.clear,
            "mock_release": self._calls.release,
            "mock_log": lambda: [entry.to_plain() for entry in self.log],
            "mock_step": self._requests.step_now,
        }
        self._thread: threading.Thread | None = None
        self._meeting: Meeting | None = None
        self._rank: LockstepRank | None = None

    # -- life ------------------------------------------------------------------------------------

    def start(self) -> MockEngine:
        """Run the engine in a thread of its own; return it."""
        self._thread = threading.Thread(
            target=self.run, name=f"mock-engine-{self.index}", daemon=True
        )
        self._thread.start()
        return self

    def stop(self) -> None:
        """Make the engine end; from any thread, before, while or after it runs."""
        self._sockets.stop()

    def join(self, timeout: float | None = 10.0) -> bool:
        """Wait for the end of the engine's thread; return whether it has come."""
        if self._thread is None:
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def __enter__(self) -> MockEngine:
        return self if self._thread is not None else self.start()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()
        self.join()

    def __repr__(self) -> str:
        state = "not started" if self._thread is None else "running"
        if self.exit_code is not None:
            state = f"ended with {self.exit_code}"
        return f"<MockEngine {self.index}: {state}>"

    @property
    def log(self) -> list[Received]:
        """What it received, oldest first, without its remote control; the last 10,000."""
        return self._log.entries() if self._log is not None else []

    def run(self) -> int:
        """Be an engine until ``stop()`` or a fault ends it; return the exit code."""
        linger_ms, code = 0, 1
        try:
            self._sockets.open()
            self._start_up()
            try:
                if self._rank is None:
                    self._serve()
                else:
                    self._rank.serve(self._take)
            except Ended:
                if self._sockets.stopping:
                    self._requests.end_all()  # as a vLLM engine does at SIGTERM
                raise
            except (Exception, Died) as exc:
                cause = exc.__cause__ if isinstance(exc, Died) else exc
                complain(f"EngineCore encountered a fatal error. {type(cause).__name__}: {cause}")
                self._endings.announce_death(self.model.options.farewell_seconds, 1)
        except Ended as ended:
            linger_ms, code = ended.linger_ms, ended.code
        finally:
            if self._meeting is not None:
                self._meeting.close()
            self._sockets.close(linger_ms)
            self.exit_code = code
        return code

    # -- startup ---------------------------------------------------------------------------------

    def _start_up(self) -> None:
        """HELLO, INIT, registration, READY: in vLLM's order."""
        sockets, encode = self._sockets, self._codec.encode
        handshake = EngineHandshake(local=self._local, headless=not self._local)
        channel: Socket | None = None
        inputs, outputs = self._bootstrap
        options = self.model.options
        coordinator = options.coordinator_input, options.coordinator_output
        meeting = options.meeting
        if self._address is not None:
            channel = sockets.connect_handshake(self._address)
            self._announce("HELLO", channel, encode(handshake.hello().to_plain()))
            init = self._await_init(channel)
            handshake.receive(init)
            inputs, outputs = init.inputs, init.outputs
            self.ready["dp_stats_address"] = init.frontend_stats_publish_address
            coordinator = (
                init.coordinator_input or coordinator[0],
                init.coordinator_output or coordinator[1],
            )
            meeting = _meeting_of(init) or meeting
        if coordinator[1] is not None:
            sockets.connect_reports(coordinator[1])
            self.model.scheduler.coordinated = True
        if self.model.lockstep and meeting is not None:
            self._join(meeting, coordinated=coordinator[1] is not None)
        sockets.connect_inputs(inputs)
        if coordinator[0] is not None:
            sockets.subscribe(coordinator[0])
        registration = encode(self.ready)
        for socket in sockets.inputs.copy():
            self._announce("REGISTRATION", socket, registration)
        sockets.await_coordinator()
        sockets.connect_outputs(outputs)
        if channel is not None:
            handshake.registration(self.ready)
            self._announce("READY", channel, encode(handshake.ready().to_plain()))
            channel.close()

    def _join(self, address: str, *, coordinated: bool) -> None:
        """Become a rank of a lockstep group."""
        size = self.ready["data_parallel_size"]
        self._meeting = Meeting(address, self.index, size, self._sockets)
        self._meeting.open()
        self._rank = LockstepRank(
            self.model,
            self._codec,
            self._sockets,
            self._requests,
            self._meeting,
            coordinated=coordinated,
        )

    def _await_init(self, channel: Socket) -> Init:
        if not self._sockets.pause(self._init_timeout, until=channel):
            complain(f"engine {self.index}: no INIT within {self._init_timeout:g} s")
            raise Ended(1)
        frames = channel.recv_multipart()
        try:
            if len(frames) != 1:
                raise ProtocolError(f"an INIT has one frame, not {len(frames)}")
            return Init.from_plain(self._codec.decode(frames[0]))
        except ProtocolError as exc:
            complain(f"engine {self.index}: bad INIT: {exc}")
            raise Ended(1) from None

    def _announce(self, message: str, socket: Socket, payload: bytes) -> None:
        """Send a message of the startup, or do what the faults say."""
        rule = self.faults.take(message, self.index)
        if rule is None:
            socket.send(payload)
        elif rule.do == "garbage":
            socket.send_multipart(rule.frames)
        elif rule.do == "duplicate":
            socket.send(payload)
            socket.send(payload)
        elif rule.do in ("busy", "delay"):
            self._sockets.pause(rule.seconds)
            socket.send(payload)
        elif rule.do != "drop":
            if rule.after_reply:
                socket.send(payload)
            self._endings.end_as(rule)
            continued = rule.do == "stop" and not self._endings.silent
            if not continued and (self._endings.silent or not rule.after_reply):
                self._sockets.pause(None)  # nothing comes of this startup any more
            if continued:
                socket.send(payload)

    # -- the loop --------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Receive and answer; between the messages, run the requests that there are."""
        sockets, faults, utility = self._sockets, self.faults, RequestType.UTILITY
        endings, scheduler = self._endings, self.model.scheduler
        calls, decode, execute = self._calls, self._calls.decode, self._calls.execute
        record = self._log.record if self._log is not None else None
        while True:
            frames = sockets.receive()
            if sockets.stopping:
                raise Ended(0, STOP_LINGER_MS)
            if record is not None:
                record(frames)
            if frames[0] == utility and not faults and not endings.silent:
                request = decode(frames)
                if request is not None:
                    client, call_id, method, args = request
                    reply = execute(call_id, method, args)
                    if type(reply) is Deferred:
                        calls.answer_later(reply, client, call_id, method)
                    else:
                        sockets.send(client, [reply])
            else:
                self._handle(frames)
            if scheduler.live or scheduler.unsettled:
                self._work()

    def _work(self) -> None:
        """Alternate between messages and steps until there is nothing to compute."""
        scheduler, manual = self.model.scheduler, self.model.options.manual_steps
        while scheduler.has_work:
            frames = self._sockets.take()
            if frames is not None:
                if self._log is not None:
                    self._log.record(frames)
                self._handle(frames)
            elif manual and scheduler.computes:
                return  # until a message tells to
            else:
                self._requests.step()
        scheduler.settle_idle()

    def _take(self, frames: list[bytes]) -> None:
        """Keep and handle one message, of a client or of the coordinator."""
        if self._sockets.stopping:
            raise Ended(0, STOP_LINGER_MS)
        if frames == [COORDINATOR_READY]:
            return
        if self._log is not None:
            self._log.record(frames)
        self._handle(frames)

    def _handle(self, frames: list[bytes]) -> None:
        """Handle one message of whatever kind."""
        if self._endings.silent:
            return
        if frames[0] == RequestType.UTILITY:
            request = self._calls.decode(frames)
            if request is not None:
                self._calls.answer(*request)
        else:
            self._requests.receive(frames)

    def _deafen(self, *_: Any) -> Deferred:
        """Never receive anything any more, and never answer."""
        self._sockets.deafen()
        return Deferred()


def _meeting_of(init: Init) -> str | None:
    config = init.parallel_config
    host, port = config.get("data_parallel_master_ip"), config.get("data_parallel_master_port")
    return f"{host}:{port}" if host and port else None


def _addresses(value: str | Sequence[str] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(value)


# -- as a process --------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m engine_client.tools.mock_engine",
        description="A reference engine in a process of its own.",
    )
    add = parser.add_argument
    add("--connect", metavar="ADDRESS", help="handshake address of the client")
    add("--index", type=int, default=0, help="index of the engine (default 0)")
    add("--codec", choices=("cbor", "msgpack"), default="cbor")
    add("--input", action="append", metavar="ADDRESS", help="bootstrapped: one for each client")
    add("--output", action="append", metavar="ADDRESS", help="bootstrapped: one for each client")
    add("--faults", type=json.loads, default=(), metavar="JSON", help="a list of fault rules")
    add("--options", type=json.loads, metavar="JSON", help="how it behaves: a map of EngineOptions")
    add("--ready", type=json.loads, metavar="JSON", help="keys of the registration to replace")
    add("--local", action="store_true", help="say that the client launched this engine")
    add("--identity", type=bytes.fromhex, metavar="HEX", help="play a peer of this identity")
    add("--log", metavar="FILE", help="append each received message as a line of JSON")
    add("--no-log", action="store_true", help="keep no log (mock_log answers an empty list)")
    add("--init-timeout", type=float, default=INIT_TIMEOUT, metavar="SECONDS")
    add("--stderr-line", action="append", default=[], metavar="TEXT", help="write it at start")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one engine until SIGTERM or SIGINT, or until its faults end it; return the exit code."""
    # The signals are taken by a thread that waits for nothing else: no handler runs in the
    # middle of the loop, no traceback is printed, and none arrives just before a blocking call.
    stop_signals = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    parser = _parser()
    options = parser.parse_args(arguments)
    log = open(options.log, "a", encoding="utf-8") if options.log else None  # noqa: SIM115
    try:
        engine = MockEngine(
            options.connect,
            options.index,
            codec=options.codec,
            faults=options.faults,
            options=options.options,
            input_address=options.input,
            output_address=options.output,
            ready=options.ready,
            local=options.local,
            identity=options.identity,
            keep_log=not options.no_log,
            log_file=log,
            owns_process=True,
            init_timeout=options.init_timeout,
        )
    except (ValueError, ModuleNotFoundError) as exc:
        parser.error(str(exc))
    for line in options.stderr_line:
        complain(line)
    stopped_by: list[int] = []

    def watch() -> None:
        interrupted = signal.sigwait(stop_signals) == signal.SIGINT
        stopped_by.append(128 + signal.SIGINT if interrupted else 0)
        engine.stop()
        time.sleep(STOP_LIMIT)
        os._exit(stopped_by[0])  # a method that never returns, a peer that takes nothing

    threading.Thread(target=watch, name="signals", daemon=True).start()
    code = engine.run()
    if log is not None:
        log.close()
    if code < 0:
        os.kill(os.getpid(), -code)
    return stopped_by[0] if stopped_by else code


if __name__ == "__main__":
    sys.exit(main())
