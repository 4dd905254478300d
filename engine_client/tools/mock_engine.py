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
==============================  =================================================================
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
from engine_client.errors import EncodeError, ProtocolError
from engine_client.tools.faults import ENDINGS, FaultPlan, FaultRule
from engine_client.tools.mock_log import REQUEST_NAMES, MessageLog, Received
from engine_client.tools.mock_methods import EngineModel, default_ready, failure_detail
from engine_client.tools.mock_sockets import (
    OUTPUT_LINGER_MS,
    STOP_LINGER_MS,
    Ended,
    EngineSockets,
    Socket,
)
from engine_client.wire.codec import codec_named, plain
from engine_client.wire.handshake import EngineHandshake
from engine_client.wire.messages import DEAD_SENTINEL, Init, RequestType

__all__ = ["MockEngine", "Received", "main"]

INIT_TIMEOUT = 300.0
"""Seconds that an engine waits for its INIT, as vLLM does."""
UNKNOWN_ID = 2**52
"""The bit that turns a call id into one that nobody waits for."""
STOP_LIMIT = 1.5
"""Seconds after a signal at which a process that has not ended by itself is ended."""


class MockEngine:
    """One reference engine: ``run()`` is its life, ``start()`` gives it a thread.

    Args:
        address: The handshake address to connect to.  None in the bootstrapped mode, in which
            the data addresses are given and the engine only registers.
        index: The engine's index; its ZeroMQ identity follows from it.
        codec: ``"cbor"`` or ``"msgpack"``.
        faults: Rules, or a ``FaultPlan`` of its own.
        input_address: Bootstrapped mode: one address, or one for each client.
        output_address: Likewise, in the same order.
        ready: Keys of the registration to replace or add.
        model: What the engine knows and can do.
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
        self.index = index
        self.faults = faults if isinstance(faults, FaultPlan) else FaultPlan(faults or ())
        self.model = model if model is not None else EngineModel(index)
        self.ready = {**default_ready(index), **(ready or {})}
        self.exit_code: int | None = None
        """How it ended: 0 after ``stop()``, else what its process's exit code would be."""
        self._address = address
        self._codec = codec_named(codec)
        self._methods: dict[str, Callable[..., Any]] = {
            **self.model.methods,
            **(methods or {}),
            "mock_fault": self.faults.add,
            "mock_clear": self.faults.clear,
            "mock_release": self._release,
            "mock_log": lambda: [entry.to_plain() for entry in self.log],
        }
        self._local = local
        self._log = MessageLog(self._codec, log_file) if keep_log or log_file else None
        self._owns_process = owns_process
        self._init_timeout = init_timeout
        self._held: list[tuple[str, int, list[bytes]]] = []
        self._silent = False
        self._sockets = EngineSockets(engine_id(index) if identity is None else identity)
        self._thread: threading.Thread | None = None

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
            self._serve()
        except Ended as ended:
            linger_ms, code = ended.linger_ms, ended.code
        finally:
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
        if self._address is not None:
            channel = sockets.connect_handshake(self._address)
            self._announce("HELLO", channel, encode(handshake.hello().to_plain()))
            init = self._await_init(channel)
            handshake.receive(init)
            inputs, outputs = init.inputs, init.outputs
            self.ready["dp_stats_address"] = init.frontend_stats_publish_address
        sockets.connect_inputs(inputs)
        registration = encode(self.ready)
        for socket in sockets.inputs.copy():
            self._announce("REGISTRATION", socket, registration)
        sockets.connect_outputs(outputs)
        if channel is not None:
            handshake.registration(self.ready)
            self._announce("READY", channel, encode(handshake.ready().to_plain()))
            channel.close()

    def _await_init(self, channel: Socket) -> Init:
        if not self._sockets.pause(self._init_timeout, until=channel):
            _complain(f"engine {self.index}: no INIT within {self._init_timeout:g} s")
            raise Ended(1)
        frames = channel.recv_multipart()
        try:
            if len(frames) != 1:
                raise ProtocolError(f"an INIT has one frame, not {len(frames)}")
            return Init.from_plain(self._codec.decode(frames[0]))
        except ProtocolError as exc:
            _complain(f"engine {self.index}: bad INIT: {exc}")
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
            self._end_as(rule)
            continued = rule.do == "stop" and not self._silent
            if not continued and (self._silent or not rule.after_reply):
                self._sockets.pause(None)  # nothing comes of this startup any more
            if continued:
                socket.send(payload)

    # -- the loop --------------------------------------------------------------------------------

    def _serve(self) -> None:
        sockets, faults, utility = self._sockets, self.faults, RequestType.UTILITY
        record = self._log.record if self._log is not None else None
        while True:
            frames = sockets.receive()
            if sockets.stopping:
                raise Ended(0, STOP_LINGER_MS)
            if record is not None:
                record(frames)
            if frames[0] == utility and not faults and not self._silent:
                request = self._decode_call(frames)
                if request is not None:
                    client, call_id, method, args = request
                    reply = self._execute(call_id, method, args)
                    sockets.send(client, [reply])
            else:
                self._handle(frames)

    def _decode_call(self, frames: list[bytes]) -> tuple[int, Any, Any, Any] | None:
        """Read a utility call; one that cannot be read ends all receiving, as in vLLM."""
        try:
            client, call_id, method, args = self._codec.decode(frames[1])
        except (ProtocolError, TypeError, ValueError, IndexError):
            self._sockets.deafen()
            return None
        return client, call_id, method, args

    def _execute(self, call_id: Any, method: Any, args: Any) -> bytes:
        """Execute a utility call; return its encoded reply."""
        function = self._methods.get(method) if isinstance(method, str) else None
        if function is None:
            detail = f"'EngineCoreProc' object has no attribute '{method}'"
            return self._encode(call_id, f"Call to {method} method failed: {detail}")
        try:
            value = function(*args)
        except Exception as exc:
            detail = failure_detail(function, args, exc)
            return self._encode(call_id, f"Call to {method} method failed: {detail}")
        return self._encode(call_id, None, value)

    def _encode(self, call_id: Any, failure: str | None, value: Any = None) -> bytes:
        """Encode a reply; one that cannot be encoded ends all sending, as in vLLM."""
        try:
            result = None if failure is not None else [None, plain(value, "result")]
            return self._codec.encode(
                [
                    self.index,
                    [],
                    None,
                    time.monotonic(),
                    [call_id, failure, result],
                    None,
                    None,
                    None,
                    None,
                ]
            )
        except EncodeError as exc:
            _complain(f"engine {self.index}: cannot send what the method returned: {exc}")
            self._sockets.mute()
            return b""

    def _handle(self, frames: list[bytes]) -> None:
        """Handle what the plain path leaves out: faults, requests and nonsense."""
        if self._silent:
            return
        message = REQUEST_NAMES.get(frames[0])
        if message == "UTILITY":
            request = self._decode_call(frames)
            if request is not None:
                self._answer(*request)
            return
        try:
            if message is None:
                raise ProtocolError("unknown type of request")
            self._codec.decode(frames[1])
        except (ProtocolError, IndexError):
            self._sockets.deafen()
            return
        rule = self.faults.take(message, self.index)
        if rule is None or rule.do == "drop":
            return
        if rule.do == "busy":
            self._sockets.pause(rule.seconds)
        elif rule.do == "garbage":
            self._sockets.send(0, rule.frames)
        else:
            self._end_as(rule)

    # -- faults ----------------------------------------------------------------------------------

    def _answer(self, client: int, call_id: Any, method: Any, args: Any) -> None:
        """Answer a utility call under the faults."""
        send = self._sockets.send
        controls = isinstance(method, str) and method.startswith("mock_")
        rule = None if controls else self.faults.take(method, self.index)
        if rule is None:
            send(client, [self._execute(call_id, method, args)])
            return
        if rule.do == "fail":
            text = f"Call to {method} method failed: {rule.message}"
            send(client, [self._encode(call_id, text)])
            return
        if rule.do == "busy":
            self._sockets.pause(rule.seconds)
        elif rule.do in ENDINGS and not rule.after_reply:
            self._end_as(rule)
            if self._silent or rule.do == "deaf":
                return
        if rule.do == "unknown_id":
            call_id = call_id ^ UNKNOWN_ID if isinstance(call_id, int) else UNKNOWN_ID
        reply = [self._execute(call_id, method, args)]
        if rule.do == "delay":
            self._sockets.send_later(rule.seconds, client, reply)
        elif rule.do == "hold":
            self._held.append((method, client, reply))
        elif rule.do == "garbage":
            send(client, rule.frames)
        elif rule.do == "corrupt":
            send(client, [self._corrupted(call_id, b"".join(rule.frames))])
        elif rule.do != "drop":
            send(client, reply)
            if rule.do == "duplicate":
                send(client, reply)
            if rule.after_reply:
                self._end_as(rule)

    def _corrupted(self, call_id: Any, data: bytes) -> bytes:
        """Encode a reply with ``data`` in place of the value, or cut off where that begins."""
        marker = os.urandom(16)
        reply = self._encode(call_id, None, marker)
        before, _, after = reply.partition(self._codec.encode(marker))
        return before + data + after if data else before

    def _release(self, method: str | None = None) -> int:
        """Send the held replies, or those to one method, in the order of their calls."""
        held, self._held = self._held, []
        for entry in held:
            if method in (None, entry[0]):
                self._sockets.send(entry[1], entry[2])
            else:
                self._held.append(entry)
        return len(held) - len(self._held)

    def _end_as(self, rule: FaultRule) -> None:
        """End or silence the engine as the rule says."""
        linger_ms = OUTPUT_LINGER_MS if rule.after_reply else 0
        if rule.do == "deaf":
            self._sockets.deafen()
        elif rule.do == "mute":
            self._sockets.mute()
        elif rule.do == "stop" and self._owns_process:
            os.kill(os.getpid(), signal.SIGSTOP)
        elif rule.do in ("stop", "stop_answering"):
            self._silent = True
        elif rule.do == "die":
            if self._owns_process and not rule.after_reply:
                os.kill(os.getpid(), signal.SIGKILL)
            raise Ended(-signal.SIGKILL, linger_ms)
        elif rule.do == "exit":
            if rule.message:
                _complain(rule.message)
            raise Ended(rule.code, linger_ms)
        else:
            for client in range(len(self._sockets.outputs)):
                self._sockets.send(client, [DEAD_SENTINEL])
            self._sockets.mute()
            self._sockets.pause(rule.seconds)
            raise Ended(rule.code, OUTPUT_LINGER_MS)


def _addresses(value: str | Sequence[str] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(value)


def _complain(text: str) -> None:
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        pass  # whoever read stderr is gone


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
        _complain(line)
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
