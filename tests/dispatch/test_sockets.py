"""Opening a client's sockets: which addresses are taken, which are refused, what is left behind."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from engine_client.dispatch.sockets import PRIVATE, Transport, plan_transport
from engine_client.errors import HandshakeError
from tests.helpers import run_in_thread, scaled, wait_until


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder whose path leaves room for a socket's name."""
    with tempfile.TemporaryDirectory(prefix="ec-") as name:
        yield Path(name)


@contextmanager
def opened(handshake: str | None, **options: Any) -> Iterator[Transport]:
    """Open a client's sockets, and close them."""
    given: dict[str, Any] = {
        "input_address": None,
        "output_address": None,
        "advertised_host": None,
        "heartbeat_interval": "auto",
        "context": None,
    }
    transport = plan_transport(handshake=handshake, **{**given, **options})()
    try:
        yield transport
    finally:
        transport.close(0)


def refused(handshake: str | None, kind: type[Exception], **options: Any) -> str:
    """Return why a client's sockets cannot be opened."""
    with pytest.raises(kind) as caught, opened(handshake, **options):
        pass
    return str(caught.value)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


# -- where the data sockets go --------------------------------------------------------------------


def test_tcp_handshake_gives_tcp_data_addresses() -> None:
    """The data sockets take the handshake's transport and host, and ports of their own."""
    with opened("tcp://127.0.0.1:*") as transport:
        assert set(transport.addresses) == {"handshake", "input", "output"}
        ports = set()
        for address in transport.addresses.values():
            host, _, port = address.removeprefix("tcp://").rpartition(":")
            assert host == "127.0.0.1"
            assert 0 < int(port) < 65_536
            ports.add(port)
        assert len(ports) == 3
        assert transport.directory is None


def test_ipc_handshake_gives_a_private_directory(folder: Path) -> None:
    """The data sockets' files lie where only this user can go, and go away with the client."""
    with opened(f"ipc://{folder}/h") as transport:
        directory = transport.directory
        assert directory is not None
        status = os.stat(directory)
        assert stat.S_IMODE(status.st_mode) == 0o700
        assert status.st_uid == os.getuid()
        for name in ("input", "output"):
            path = transport.addresses[name].removeprefix("ipc://")
            assert os.path.dirname(path) == directory
            assert stat.S_ISSOCK(os.stat(path).st_mode)
    assert not os.path.exists(directory)
    assert os.listdir(folder) == []


def test_private_handshake() -> None:
    """The handshake can lie in the private directory, too."""
    with opened(PRIVATE) as transport:
        directory = transport.directory
        assert directory is not None
        assert all(a.startswith(f"ipc://{directory}/") for a in transport.addresses.values())
    assert not os.path.exists(directory)


def test_ipv6() -> None:
    """An IPv6 host is bound, and advertised in brackets."""
    if not socket.has_ipv6 or not os.path.exists("/proc/net/if_inet6"):
        pytest.skip("no IPv6 here")
    with opened("tcp://[::1]:*") as transport:
        assert all(a.startswith("tcp://[::1]:") for a in transport.addresses.values())


@pytest.mark.parametrize(
    ("host", "shown"), [("engines.example", "engines.example"), ("fd00::7", "[fd00::7]")]
)
def test_advertised_host(host: str, shown: str) -> None:
    """Engines are told the advertised host with the ports that were bound."""
    with opened("tcp://127.0.0.1:*", advertised_host=host) as transport:
        for name, address in transport.addresses.items():
            assert address.startswith(f"tcp://{shown}:")
            assert address.rpartition(":")[2] == transport.endpoints[name].rpartition(":")[2]


def test_nothing_from_outside_is_dropped_or_named_twice() -> None:
    """Queues are unlimited, an unreachable engine is told, a new connection takes an identity."""
    with opened("tcp://127.0.0.1:*") as transport:
        for sock in transport.sockets.values():
            assert sock.sndhwm == sock.rcvhwm == 0
        with pytest.raises(zmq.ZMQError) as caught:
            transport.sockets["input"].send_multipart([b"\0\0", b"x"])
        assert caught.value.errno == zmq.EHOSTUNREACH


@pytest.mark.parametrize(
    ("handshake", "interval", "expected"),
    [
        ("tcp://127.0.0.1:*", "auto", 0),
        (PRIVATE, "auto", 0),
        ("tcp://127.0.0.1:*", 0.25, 250),
        ("tcp://127.0.0.1:*", None, 0),
    ],
)
def test_heartbeats(handshake: str, interval: Any, expected: int) -> None:
    """Heartbeats are off on this machine unless asked for."""
    with opened(handshake, heartbeat_interval=interval) as transport:
        for sock in transport.sockets.values():
            assert sock.getsockopt(zmq.HEARTBEAT_IVL) == expected


# -- every interface ------------------------------------------------------------------------------

WILDCARDS = ["*", "0.0.0.0", "[::]", "0", "0.0", "[::0]", "[0:0:0:0:0:0:0:0]", "[::ffff:0.0.0.0]"]


@pytest.mark.parametrize("host", WILDCARDS)
def test_wildcard_is_refused(host: str) -> None:
    """Without an advertised host every interface is refused, however it is spelled."""
    try:
        text = refused(f"tcp://{host}:*", ValueError)
    except HandshakeError:
        pytest.skip("this system does not know the spelling")
    assert "advertised_host" in text
    assert f"tcp://{host}:*" in text


def test_wildcard_of_a_data_address() -> None:
    """The same holds for an address that is given for one data socket."""
    assert "input address" in refused(
        "tcp://127.0.0.1:*", ValueError, input_address="tcp://0.0.0.0:*"
    )


@pytest.mark.parametrize("host", ["*", "0.0.0.0"])
def test_wildcard_warns(host: str) -> None:
    """With an advertised host every interface is bound, with a warning that says what it means."""
    with contextlib.ExitStack() as stack:
        with pytest.warns(UserWarning, match="no authentication"):
            transport = stack.enter_context(opened(f"tcp://{host}:*", advertised_host="127.0.0.1"))
        assert transport.addresses["input"].startswith("tcp://127.0.0.1:")
        assert transport.endpoints["input"].startswith("tcp://0.0.0.0:")


def test_one_host_does_not_warn() -> None:
    """An address of one host is no reason for a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with opened("tcp://127.0.0.1:*", advertised_host="engines.example"):
            pass


# -- what cannot be bound -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "address",
    ["", "tcp://", "ipc://", "inproc://x", "127.0.0.1:5570", "tcp://127.0.0.1", "tcp://:5570"]
    + [f"tcp://127.0.0.1:{port}" for port in ("", "x", "-1", "65536", "5570x", "²", "٣")],
)
def test_addresses_that_cannot_be_meant(address: str) -> None:
    """They are refused before anything is opened, and shown."""
    assert repr(address) in refused(address, ValueError)


@pytest.mark.parametrize("which", ["handshake", "input", "output"])
def test_tcp_address_in_use(which: str) -> None:
    """A port that another program has is an error at once; nothing stays open."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        if which == "handshake":
            text = refused(taken, HandshakeError)
        else:
            text = refused("tcp://127.0.0.1:*", HandshakeError, **{f"{which}_address": taken})
    assert f"cannot bind the {which} address {taken}" in text
    assert "another client or program listens there" in text


def test_ipc_address_in_use(folder: Path) -> None:
    """A path on which somebody listens is not taken away from them."""
    address = f"ipc://{folder}/h"
    with opened(address) as first:
        assert "another client or program listens there" in refused(address, HandshakeError)
        dealer = first.context.socket(zmq.DEALER)
        with closing(dealer):
            dealer.linger = 0
            dealer.connect(address)
            dealer.send(b"still there?")
            assert first.sockets["handshake"].poll(5000)
    with opened(address):  # once it is closed, the path is free
        pass


def test_ipc_file_left_behind(folder: Path) -> None:
    """The socket file of a program that was killed is taken over."""
    path = folder / "h"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert path.is_socket()
    with opened(f"ipc://{path}"):
        pass
    assert not path.exists()


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_ipc_path_of_something_else(folder: Path, kind: str) -> None:
    """What has the path and is no socket is neither used nor deleted."""
    path = folder / "precious"
    if kind == "file":
        path.write_text("content")
    elif kind == "folder":
        path.mkdir()
    else:
        (folder / "target").write_text("content")
        path.symlink_to(folder / "target")
    text = refused(f"ipc://{path}", HandshakeError)
    assert "no socket" in text
    assert path.exists()
    assert kind == "folder" or path.read_text() == "content"


def test_ipc_path_too_long(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's limit is told, and nothing is left behind."""
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    path = folder / ("x" * 120)
    text = refused(f"ipc://{path}", HandshakeError)
    assert "about 100 characters" in text
    assert os.listdir(folder) == []
    text = refused(f"ipc://{folder}/h", HandshakeError, output_address=f"ipc://{path}")
    assert "cannot bind the output address" in text
    assert os.listdir(folder) == []


def test_ipc_directory_missing(folder: Path) -> None:
    """A directory that does not exist is said to be missing."""
    assert "make the directory first" in refused(f"ipc://{folder}/none/h", HandshakeError)


# -- closing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True], ids=["own context", "shared context"])
@pytest.mark.parametrize("scheme", ["tcp", "ipc"])
def test_addresses_are_free_after_close(folder: Path, scheme: str, shared: bool) -> None:
    """Whoever opens the same addresses next finds them free, at once, every time."""
    context: zmq.Context[zmq.Socket[bytes]] | None = zmq.Context() if shared else None
    try:
        for _ in range(20):
            if scheme == "tcp":
                addresses = [f"tcp://127.0.0.1:{free_port()}" for _ in range(3)]
            else:
                addresses = [f"ipc://{folder}/{name}" for name in "hio"]
            data = dict(zip(("input_address", "output_address"), addresses[1:], strict=True))
            for _ in range(2):
                with opened(addresses[0], context=context, **data):
                    pass
        assert os.listdir(folder) == []
        if context is not None:
            assert not context.closed
    finally:
        if context is not None:
            # Returns only when no socket is left in it.
            run_in_thread(context.term).result(10)


def test_close_with_connected_peers(folder: Path) -> None:
    """Peers that stay connected do not keep the sockets from closing."""
    peers: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    connected = []
    try:
        with opened(f"ipc://{folder}/h") as transport:
            for name in ("handshake", "input", "output"):
                peer = peers.socket(zmq.PUSH if name == "output" else zmq.DEALER)
                connected.append(peer)
                peer.linger = 0
                peer.connect(transport.addresses[name])
                peer.send(b"hello")
                assert transport.sockets[name].poll(5000)
        assert os.listdir(folder) == []
    finally:
        peers.destroy(linger=0)


def test_close_lingers_for_the_engines(folder: Path) -> None:
    """What was sent just before closing arrives."""
    peers: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        engine = peers.socket(zmq.DEALER)
        engine.linger = engine.rcvhwm = 0
        engine.identity = b"\0\0"
        with opened(f"ipc://{folder}/h") as transport:
            engine.connect(transport.addresses["input"])
            engine.send(b"registration")
            inputs = transport.sockets["input"]
            assert inputs.poll(5000)
            for number in range(2000):
                inputs.send_multipart([b"\0\0", b"%d" % number, b"x" * 10_000])
            transport.close(scaled(30))
        for number in range(2000):
            assert engine.poll(5000)
            assert engine.recv_multipart()[0] == b"%d" % number
    finally:
        peers.destroy(linger=0)


def test_a_path_taken_over_stays(folder: Path) -> None:
    """Closing removes this client's own ipc file only, not one that has its path by now."""
    with opened(f"ipc://{folder}/h"):
        os.unlink(folder / "h")
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(str(folder / "h"))
    assert (folder / "h").is_socket()


def test_close_after_the_context_was_terminated() -> None:
    """A user who ends the context under a client gets no error from closing it."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with opened("tcp://127.0.0.1:*", context=context) as transport:
        ending = run_in_thread(context.term)
        wait_until(lambda: context.closed or _terminated(transport))
    ending.result(10)


def _terminated(transport: Transport) -> bool:
    try:
        transport.sockets["input"].poll(0)
        transport.sockets["input"].recv(zmq.NOBLOCK)
    except zmq.Again:
        return False
    except zmq.ZMQError:
        return True
    return False
