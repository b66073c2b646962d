"""What sock_diag says of real sockets, here and in another network namespace."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from hibernode.host import sockets
from hibernode.host.sockets import TcpSocket, UnixSocket, tcp_sockets, unix_sockets

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ME = os.getpid()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Close what a test opened."""
    with ExitStack() as exit_stack:
        yield exit_stack


def inode(sock: socket.socket) -> int:
    return os.fstat(sock.fileno()).st_ino


def tcp(sock: socket.socket) -> TcpSocket:
    (found,) = tcp_sockets(ME, {inode(sock)})
    return found


def unix(sock: socket.socket) -> UnixSocket:
    (found,) = unix_sockets(ME, {inode(sock)})
    return found


def test_tcp_over_ipv4(stack: ExitStack) -> None:
    """A listener and both ends of a connection come with their states and mirrored addresses."""
    server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    client = stack.enter_context(socket.create_connection(server.getsockname()))
    accepted = stack.enter_context(server.accept()[0])
    assert tcp(server) == TcpSocket("inet", "LISTEN", server.getsockname(), ("0.0.0.0", 0), inode(server))
    assert tcp(client) == TcpSocket(
        "inet", "ESTABLISHED", client.getsockname(), server.getsockname(), inode(client)
    )
    assert (tcp(accepted).local, tcp(accepted).remote) == (tcp(client).remote, tcp(client).local)


def test_tcp_over_ipv6(stack: ExitStack) -> None:
    """An IPv6 listener is listed, and an IPv4 peer shows as a mapped address."""
    server = stack.enter_context(socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True))
    client = stack.enter_context(socket.create_connection(("127.0.0.1", server.getsockname()[1])))
    accepted = stack.enter_context(server.accept()[0])
    assert (tcp(server).family, tcp(server).local[0]) == ("inet6", "::")
    assert tcp(accepted).remote == ("::ffff:127.0.0.1", client.getsockname()[1])


def test_a_half_closed_connection_has_its_state(stack: ExitStack) -> None:
    """When the peer has closed, the state is CLOSE_WAIT."""
    server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    client = stack.enter_context(socket.create_connection(server.getsockname()))
    server.accept()[0].close()
    client.recv(1)
    assert tcp(client).state == "CLOSE_WAIT"


@pytest.mark.parametrize(
    ("kind", "name"),
    [(socket.SOCK_STREAM, "stream"), (socket.SOCK_DGRAM, "dgram"), (socket.SOCK_SEQPACKET, "seqpacket")],
    ids=["stream", "dgram", "seqpacket"],
)
def test_unix_pairs_name_each_other(stack: ExitStack, kind: int, name: str) -> None:
    """The two ends of a pair of any type have each other's inode as peer."""
    first, second = (stack.enter_context(end) for end in socket.socketpair(socket.AF_UNIX, kind))
    assert (unix(first).peer_inode, unix(second).peer_inode) == (inode(second), inode(first))
    assert unix(first).type == name
    assert not unix(first).shut_down


def test_a_unix_socket_whose_peer_was_closed(stack: ExitStack) -> None:
    """It has no peer any more and is shut down."""
    first, second = (stack.enter_context(end) for end in socket.socketpair())
    second.close()
    assert (unix(first).peer_inode, unix(first).shut_down) == (0, True)


def test_a_unix_connection_that_is_not_accepted_waits_at_its_listener(
    stack: ExitStack, tmp_path: Path
) -> None:
    """It has no peer, is not shut down, and its inode is among those that wait."""
    listener, *clients = (stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(3))
    listener.bind(str(tmp_path / "s"))
    listener.listen()
    for client in clients:
        client.connect(str(tmp_path / "s"))
    assert (unix(clients[0]).peer_inode, unix(clients[0]).shut_down) == (0, False)
    assert set(unix(listener).waiting) == {inode(client) for client in clients}


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        pytest.param(b"{dir}/plain", "{dir}/plain", id="a path"),
        pytest.param(b"{dir}/\xff", "{dir}/\udcff", id="a path that is no UTF-8"),
        pytest.param(b"\0abstract\0name", "@abstract@name", id="an abstract name with a NUL in it"),
    ],
)
def test_unix_names(stack: ExitStack, tmp_path: Path, address: bytes, shown: str) -> None:
    """A path stays as it is, an abstract name starts with an at sign."""
    sock = stack.enter_context(socket.socket(socket.AF_UNIX))
    sock.bind(address.replace(b"{dir}", os.fsencode(tmp_path)))
    assert unix(sock).path == shown.replace("{dir}", str(tmp_path))


def test_all_sockets_and_chosen_ones_agree(stack: ExitStack) -> None:
    """Among hundreds of sockets, more than one datagram of the kernel holds, those asked for are found."""
    ends = [stack.enter_context(end) for _ in range(300) for end in socket.socketpair()]
    everything = {found.inode: found for found in unix_sockets(ME)}
    assert {inode(end) for end in ends} <= everything.keys()
    for end in (ends[0], ends[150], ends[-1]):
        assert unix(end) == everything[inode(end)]


def test_nothing_matches() -> None:
    """Inodes that no socket has give an empty list, not an endless wait."""
    assert tcp_sockets(ME, {1}) == []
    assert unix_sockets(ME, {1}) == []


def test_another_network_namespace() -> None:
    """Sockets are looked up in the network namespace of the process, and ours is not left."""
    code = (
        "import os, socket, sys\n"
        "s = socket.create_server(('127.0.0.1', 0)); u, v = socket.socketpair()\n"
        "print(os.fstat(s.fileno()).st_ino, os.fstat(u.fileno()).st_ino, flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = ["unshare", "-n", sys.executable, "-S", "-c", code]
    ours = os.readlink("/proc/self/ns/net")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as popen:
        assert popen.stdout is not None
        listener, end = map(int, popen.stdout.readline().split())
        assert [found.state for found in tcp_sockets(popen.pid)] == ["LISTEN"]
        assert [found.inode for found in tcp_sockets(popen.pid, {listener})] == [listener]
        assert end in {found.inode for found in unix_sockets(popen.pid)}
        assert end not in {found.inode for found in unix_sockets(ME)}
        popen.communicate()
    assert os.readlink("/proc/self/ns/net") == ours


def test_a_process_that_has_ended() -> None:
    """A pid that nobody has is a ProcessLookupError."""
    popen = subprocess.Popen([sys.executable, "-S", "-c", ""])
    popen.wait()
    with pytest.raises(ProcessLookupError):
        tcp_sockets(popen.pid)


async def test_it_can_be_asked_where_an_event_loop_runs() -> None:
    """pyroute2's own event loop does not meet the caller's."""
    assert isinstance(unix_sockets(ME), list)
    assert isinstance(await asyncio.to_thread(tcp_sockets, ME), list)


def test_only_a_part_of_pyroute2_is_loaded_and_the_rest_still_can_be() -> None:
    """A question loads sock_diag alone; a later import of pyroute2 gives the whole package."""
    code = (
        "import os, sys\n"
        "from hibernode.host.sockets import unix_sockets\n"
        "assert not any(name.startswith('pyroute2') for name in sys.modules)\n"
        "unix_sockets(os.getpid())\n"
        "assert 'pyroute2.ndb' not in sys.modules\n"
        "import pyroute2\n"
        "assert pyroute2.IPRoute and pyroute2.DiagSocket\n"
        "unix_sockets(os.getpid())\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_descriptors_and_threads_do_not_grow() -> None:
    """A hundred questions leave neither a descriptor nor a thread behind."""
    unix_sockets(ME)
    before = (len(os.listdir("/proc/self/fd")), threading.active_count())
    for _ in range(100):
        unix_sockets(ME)
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before


def test_an_answer_that_is_an_error_ends_the_wait() -> None:
    """The kernel's error to a question it does not know is raised; the base class would wait for ever."""
    diag = sockets._diag()
    with diag.DiagSocket() as sock:
        sock.set_marshal(sockets._marshal(diag, None))
        sock.bind()
        request = diag.inet_diag_req()
        request["sdiag_family"] = 250
        with pytest.raises(Exception, match="Invalid argument"):
            list(sock.nlm_request(request, sockets.SOCK_DIAG_BY_FAMILY, diag.NLM_F_REQUEST | diag.NLM_F_ROOT))
