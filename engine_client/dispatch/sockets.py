"""Opening and closing the ZeroMQ sockets of one client, and what their addresses mean.

Bound by the client: a handshake ROUTER, an input ROUTER, an output PULL (engines connect to them).
Sizes of queues are unlimited, so nothing is dropped; a ROUTER says when a peer cannot be reached
(``ROUTER_MANDATORY``) and lets a new connection take over an identity (``ROUTER_HANDOVER``).
"""

from __future__ import annotations

import errno
import ipaddress
import itertools
import os
import socket
import stat
import struct
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import zmq

from engine_client._render import shown
from engine_client.errors import HandshakeError

__all__ = ["PRIVATE", "Transport", "plan_transport", "read_monitor", "subscribe"]

PRIVATE = "ipc://*"
"""Stands for an ipc file in a directory that only this user can enter."""
MONITORED = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
AUTO_HEARTBEAT = 10.0
"""Seconds between heartbeats to other machines; loopback and ipc connections need none, because the
kernel reports a dead peer."""
_BACKLOG = 1024
_UNBIND_LIMIT = 1000
"""Milliseconds that the I/O thread may take to stop listening."""
_KINDS = {
    "handshake": zmq.ROUTER,
    "input": zmq.ROUTER,
    "output": zmq.PULL,
    "coordinator_input": zmq.XPUB,
    "coordinator_output": zmq.PULL,
}


@dataclass(slots=True)
class Transport:
    """The open sockets of one client, and where they can be reached."""

    context: zmq.Context[zmq.Socket[bytes]]
    owns_context: bool
    sockets: dict[str, zmq.Socket[bytes]] = field(default_factory=dict)
    """``"handshake"`` (unless another process greets the engines), ``"input"``, ``"output"``;
    ``"coordinator_input"`` and ``"coordinator_output"`` of an in-process coordinator, or
    ``"coordinator"``, the subscription to an external one."""
    monitors: dict[str, zmq.Socket[bytes]] = field(default_factory=dict)
    addresses: dict[str, str] = field(default_factory=dict)
    """Per socket, what engines connect to."""
    endpoints: dict[str, str] = field(default_factory=dict)
    """Per socket, what is bound."""
    directory: str | None = None
    """A private directory for ipc files."""
    files: dict[str, os.stat_result] = field(default_factory=dict)
    """The ipc files elsewhere, as they were when they were bound."""

    def close(self, linger: float) -> None:
        """Close everything; waits at most ``linger`` seconds for what is still to be sent."""
        milliseconds = min(int(linger * 1e3), 2**31 - 1)
        # Before nobody listens there any more: then no other program can have taken a path over.
        for path, bound in self.files.items():
            with suppress(OSError):
                if os.path.samestat(os.lstat(path), bound):
                    os.unlink(path)
        for name, sock in self.sockets.items():
            if name in self.monitors:
                with suppress(zmq.ZMQError):  # refused once the context was terminated
                    sock.disable_monitor()
            if name in self.endpoints and not self.owns_context:
                with suppress(zmq.ZMQError):
                    _stop_listening(sock, self.endpoints[name])
            with suppress(zmq.ZMQError):
                sock.close(linger=milliseconds if name == "input" else 0)
        for monitor in self.monitors.values():
            with suppress(zmq.ZMQError):
                monitor.close(linger=0)
        if self.owns_context:
            # Returns when the sockets above have sent what they had, or their linger is over.
            with suppress(zmq.ZMQError):
                self.context.term()
        if self.directory is not None:
            import shutil

            shutil.rmtree(self.directory, ignore_errors=True)


def plan_transport(
    *,
    handshake: str | None,
    input_address: str | None,
    output_address: str | None,
    advertised_host: str | None,
    heartbeat_interval: float | Literal["auto"] | None,
    context: zmq.Context[zmq.Socket[bytes]] | None,
    coordinator: bool = False,
    coordinator_address: str | None = None,
) -> Callable[[], Transport]:
    """Check the addresses of a client, before anything is opened.

    Args:
        handshake: where engines say HELLO; None when another process greets them.
        input_address: None for one like the handshake's.
        output_address: None for one like the handshake's.
        advertised_host: what engines connect to instead of the host that is bound.
        heartbeat_interval: seconds, ``"auto"``, or None for no heartbeats.
        context: None for one of its own.
        coordinator: also bind the two sockets of an in-process coordinator.
        coordinator_address: of an external one, to connect to later.

    Returns:
        What binds the sockets; it raises a HandshakeError when an address cannot be bound, or a
        ValueError for a wildcard that only the system understood, and then leaves nothing open.

    Raises:
        ValueError: an address that cannot be meant.
    """
    if not isinstance(coordinator, bool):
        raise TypeError(f"coordinator must be True or False, not {shown(coordinator)}")
    _check_kind("context", context, zmq.Context, "a zmq.Context or None")
    _check_kind("advertised_host", advertised_host, str, "a host name or None")
    if advertised_host == "":
        raise ValueError("advertised_host is empty; leave it out to tell engines the bound host")
    given = {"handshake": handshake, "input": input_address, "output": output_address}
    if coordinator:
        given |= {"coordinator_input": None, "coordinator_output": None}
    for name, address in given.items():
        # A data address may be left out where there is a handshake to tell it.
        if address is not None or (handshake is None and name in ("input", "output")):
            _check_address(name, address, advertised_host)
    if coordinator_address is not None:
        _check_address("coordinator", coordinator_address, None)
    return lambda: _open(given, advertised_host, heartbeat_interval, context)


def _check_kind(name: str, value: object, kind: type, wanted: str) -> None:
    if value is not None and not isinstance(value, kind):
        raise TypeError(f"{name} must be {wanted}, not {shown(value)}")


def _open(
    given: Mapping[str, str | None],
    advertised_host: str | None,
    heartbeat_interval: float | Literal["auto"] | None,
    context: zmq.Context[zmq.Socket[bytes]] | None,
) -> Transport:
    transport = Transport(zmq.Context() if context is None else context, context is None)
    try:
        for name, address in given.items():
            if address is None and name == "handshake":
                continue
            if address == PRIVATE:
                address = _private_address(name, transport)
            elif address is None:
                address = _address_like(given["handshake"] or "", name, transport)
            sock = transport.context.socket(_KINDS[name])
            transport.sockets[name] = sock
            _configure(sock, address, heartbeat_interval)
            if name in ("input", "output"):
                # Before the bind, so that no connection is missed.
                transport.monitors[name] = _monitor(sock, MONITORED)
            _bind(sock, name, address)
            endpoint = _endpoint(sock)
            transport.endpoints[name] = endpoint
            if endpoint.startswith("ipc://"):
                path = endpoint.removeprefix("ipc://")
                with suppress(OSError):  # an abstract address has no file
                    transport.files[path] = os.lstat(path)
            if advertised_host is None and endpoint.startswith("tcp://"):
                # Spelled in some way that only the system understood.
                _refuse_wildcard(name, address, endpoint)
            transport.addresses[name] = _advertised(endpoint, advertised_host)
    except BaseException:
        transport.close(0)
        raise
    return transport


_monitor_numbers = itertools.count()


def _monitor(sock: zmq.Socket[bytes], events: int) -> zmq.Socket[bytes]:
    # A number of its own: a name, unlike a socket, is free only some time after it was closed.
    return sock.get_monitor_socket(events, f"inproc://engine-client-{next(_monitor_numbers)}")


def _stop_listening(sock: zmq.Socket[bytes], endpoint: str) -> None:
    """Unbind, and return when the address is free.

    Ending a context waits for that; in a context that lives on, the next client would find its
    address in use.
    """
    sock.disable_monitor()
    monitor = _monitor(sock, zmq.EVENT_CLOSED)
    try:
        sock.unbind(endpoint)
        monitor.poll(_UNBIND_LIMIT)
    finally:
        sock.disable_monitor()
        monitor.close(linger=0)


def subscribe(transport: Transport, address: str) -> zmq.Socket[bytes]:
    """Connect to an external coordinator (dispatcher only).

    Raises:
        HandshakeError: the address cannot be one.
    """
    sock = transport.context.socket(zmq.XSUB)
    try:
        sock.linger = 0
        sock.set_hwm(0)
        if "://[" in address:
            sock.setsockopt(zmq.IPV6, 1)
        sock.connect(address)
        sock.send(b"\x01")
    except zmq.ZMQError as exc:
        sock.close(linger=0)
        raise HandshakeError(
            f"cannot connect to the coordinator at {shown(address, 200)}: "
            f"{zmq.strerror(exc.errno or 0)}",
            stage="coordinator",
        ) from exc
    transport.sockets["coordinator"] = sock
    transport.monitors["coordinator"] = _monitor(sock, zmq.EVENT_DISCONNECTED)
    return sock


def _check_address(name: str, address: object, advertised_host: str | None) -> None:
    if not isinstance(address, str):
        raise TypeError(
            f"the {name} address must be a string like 'tcp://127.0.0.1:5570' or 'ipc:///path', "
            f"not {shown(address, 200)}"
        )
    scheme, separator, rest = address.partition("://")
    if not separator or scheme not in ("tcp", "ipc") or not rest:
        hint = ""
        if not separator and address.rpartition(":")[0] and address.rpartition(":")[2].isdigit():
            hint = f"; did you mean 'tcp://{address}'?"
        raise ValueError(
            f"the {name} address must look like 'tcp://127.0.0.1:5570' or 'ipc:///path', "
            f"not {shown(address, 200)}{hint}"
        )
    if scheme == "ipc":
        return
    host, colon, port = rest.rpartition(":")
    if (
        not colon
        or not host
        or not (port == "*" or (port.isascii() and port.isdigit() and int(port) < 65_536))
    ):
        raise ValueError(
            f"the {name} address must have a host and a port, like 'tcp://127.0.0.1:5570', "
            f"not {shown(address, 200)}"
        )
    if _is_wildcard(host):
        if advertised_host is None:
            _refuse_wildcard(name, address, address)
        warnings.warn(
            f"{address} listens on every network interface; whoever reaches it controls the "
            f"engines, since the protocol has no authentication",
            stacklevel=4,
        )


def _is_wildcard(host: str) -> bool:
    if host == "*":
        return True
    try:
        ip = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return ip.is_unspecified or (mapped is not None and mapped.is_unspecified)


def _refuse_wildcard(name: str, address: str, endpoint: str) -> None:
    """Refuse what is bound where it is every interface.

    Raises:
        ValueError: it is.
    """
    if _is_wildcard(endpoint.removeprefix("tcp://").rpartition(":")[0]):
        raise ValueError(
            f"the {name} address {shown(address, 200)} listens on every network interface, and "
            f"engines cannot connect to a wildcard: give advertised_host, or better, bind one host"
        )


def _is_local(address: str) -> bool:
    host = address.partition("://")[2].rpartition(":")[0]
    return (
        address.startswith(("ipc:", "inproc:"))
        or host in ("localhost", "[::1]")
        or host.startswith("127.")
    )


def _address_like(handshake: str, name: str, transport: Transport) -> str:
    if handshake.startswith("tcp://"):
        host = handshake.removeprefix("tcp://").rpartition(":")[0]
        return f"tcp://{host}:*"
    return _private_address(name, transport)


def _private_address(name: str, transport: Transport) -> str:
    if transport.directory is None:
        import tempfile  # with what it needs for archives: more than every other client imports

        # mkdtemp makes it with mode 0700: only this user can reach the engines.
        transport.directory = tempfile.mkdtemp(prefix="engine-client-")
    return f"ipc://{transport.directory}/{name}"


def _configure(
    sock: zmq.Socket[bytes], address: str, heartbeat_interval: float | Literal["auto"] | None
) -> None:
    sock.linger = 0
    sock.set_hwm(0)
    sock.setsockopt(zmq.BACKLOG, _BACKLOG)
    if "://[" in address:
        sock.setsockopt(zmq.IPV6, 1)
    if sock.type == zmq.ROUTER:
        sock.setsockopt(zmq.ROUTER_MANDATORY, 1)
        sock.setsockopt(zmq.ROUTER_HANDOVER, 1)
    if sock.type == zmq.XPUB:
        # Every engine's subscription is seen, not only the first.
        sock.setsockopt(zmq.XPUB_VERBOSE, 1)
    seconds = heartbeat_interval
    if seconds == "auto":
        seconds = None if _is_local(address) else AUTO_HEARTBEAT
    if seconds is not None:
        milliseconds = max(1, round(seconds * 1e3))
        sock.setsockopt(zmq.HEARTBEAT_IVL, milliseconds)
        sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, 2 * milliseconds)


def _bind(sock: zmq.Socket[bytes], name: str, address: str) -> None:
    path = address.removeprefix("ipc://") if address.startswith("ipc://") else None
    if path is not None:
        # libzmq would take the path over: another program would go deaf without a word, and a
        # file that is no socket would be deleted.
        if _is_served(path):
            raise _bind_error(name, address, errno.EADDRINUSE)
        if _is_other_file(path):
            raise _bind_error(name, address, errno.EEXIST)
    try:
        sock.bind(address)
    except zmq.ZMQError as exc:
        raise _bind_error(name, address, exc.errno or 0) from exc


_NOT_OURS = (
    "the client listens and the engines connect to it, so the address must be one of this "
    "machine's own (127.0.0.1 when all engines are here)"
)
_BIND_ADVICE = {
    errno.EADDRINUSE: "another client or program listens there: close it, or choose another "
    "address (was this client started twice?)",
    errno.EADDRNOTAVAIL: _NOT_OURS,
    errno.ENODEV: _NOT_OURS,
    errno.ENOENT: "make the directory first",
    errno.EEXIST: "a file that is no socket has that path, and would be deleted",
    errno.EACCES: "choose a place where you may listen (a port from 1024 up, a directory of yours)",
    errno.ENAMETOOLONG: "the path of an ipc address can have about 100 characters",
}


def _bind_error(name: str, address: str, number: int) -> HandshakeError:
    # pyzmq's own text repeats the address.
    why = zmq.strerror(number)
    advice = _BIND_ADVICE.get(number)
    return HandshakeError(
        f"cannot bind the {name} address {address}: {why}" + (f"; {advice}" if advice else ""),
        stage="bind",
    )


def _is_served(path: str) -> bool:
    """Whether somebody accepts connections on an ipc path; a file left behind accepts none."""
    where = "\0" + path[1:] if path.startswith("@") else path
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(where)
        except BlockingIOError:
            return True  # its backlog is full: it is served, if slowly
        except OSError:
            return False
        return True


def _is_other_file(path: str) -> bool:
    """Whether a path is there and is no socket."""
    try:
        mode = Path(path).lstat().st_mode
    except OSError:
        return False
    return not stat.S_ISSOCK(mode)


def _endpoint(sock: zmq.Socket[bytes]) -> str:
    endpoint = sock.getsockopt(zmq.LAST_ENDPOINT)
    return endpoint.rstrip(b"\0").decode() if isinstance(endpoint, bytes) else str(endpoint)


def _advertised(endpoint: str, advertised_host: str | None) -> str:
    if advertised_host is not None and endpoint.startswith("tcp://"):
        host = advertised_host
        if ":" in host and not host.startswith("["):
            host = f"[{host}]"
        endpoint = f"tcp://{host}:{endpoint.rpartition(':')[2]}"
    return endpoint


def plain_send(sock: zmq.Socket[bytes]) -> Callable[..., object]:
    """A socket's ``send(frame, flags, copy)`` as pyzmq's base class has it.

    That of its own class, or of a user's, looks for options first, which none of the sockets here
    has, and takes twice the time.
    """
    send: Callable[..., object] = super(zmq.Socket, sock).send
    return send


def read_monitor(monitor: zmq.Socket[bytes]) -> Iterator[tuple[int, int]]:
    """All monitor events that are there: event number and descriptor."""
    receive = monitor.recv_multipart
    while True:
        try:
            event = receive(zmq.NOBLOCK)
        except zmq.Again:
            return
        yield struct.unpack("=HI", event[0])
