"""Packets of chosen connections are held back, by the real kernel, and flow on when the table ends."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from hibernode.host import nftables
from hibernode.host.nftables import Connection

FAMILIES = [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")]


@contextlib.contextmanager
def connected(family: socket.AddressFamily, address: str) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Give the two ends of a connection on the loopback interface."""
    with (
        socket.create_server((address, 0), family=family) as listener,
        socket.create_connection(listener.getsockname()[:2]) as client,
    ):
        server, _ = listener.accept()
        with server:
            yield client, server


def end(sock: socket.socket) -> Connection:
    """Describe one end."""
    (local, local_port), (remote, remote_port) = sock.getsockname()[:2], sock.getpeername()[:2]
    version = 4 if sock.family == socket.AF_INET else 6
    packed = [socket.inet_pton(sock.family, address) for address in (local, remote)]
    return version, packed[0], local_port, packed[1], remote_port


@pytest.mark.parametrize(("family", "address"), FAMILIES)
def test_what_comes_in_is_dropped_until_the_socket_closes(family: socket.AddressFamily, address: str) -> None:
    """The kernel sends it again by itself; a connection beside it is not touched."""
    with connected(family, address) as (client, server), connected(family, address) as (other, its_end):
        with nftables.hold_back("hibernode-test-held", [end(client), end(server)]):
            client.sendall(b"held")
            other.sendall(b"free")
            assert its_end.recv(4) == b"free"
            server.settimeout(0.1)
            with pytest.raises(TimeoutError):
                server.recv(4)
        server.settimeout(60)
        assert server.recv(4) == b"held"
    with pytest.raises(FileNotFoundError):
        nftables.delete_table("hibernode-test-held")


def test_many_connections_are_one_batch() -> None:
    """A tree of many ranks has thousands; the kernel's usual room for a message is too small for them."""
    ends = [(4, b"\x7f\0\0\1", 1, b"\x7f\0\0\2", port) for port in range(1, 4000)]
    with nftables.hold_back("hibernode-test-many", ends):
        pass


def test_a_table_that_is_there_is_refused() -> None:
    """Somebody else's table is not added to, and stays."""
    with nftables.hold_back("hibernode-test-twice", []):
        with pytest.raises(PermissionError):  # it is its maker's alone
            nftables.hold_back("hibernode-test-twice", [])
        with pytest.raises(PermissionError):
            nftables.delete_table("hibernode-test-twice")


def test_a_rule_that_the_kernel_refuses_leaves_no_table() -> None:
    """A batch counts whole or not at all: the good rule before it is not there either."""
    good, broken = (4, b"\x7f\0\0\1", 1, b"\x7f\0\0\2", 2), (4, b"", 1, b"", 2)
    with pytest.raises(OSError, match="hibernode-test-broken"):
        nftables.hold_back("hibernode-test-broken", [good, broken])
    with pytest.raises(FileNotFoundError):
        nftables.delete_table("hibernode-test-broken")
