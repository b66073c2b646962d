"""Checks of sockets. What CRIU knows is from its sockets.c, sk-inet.c, sk-unix.c and sk-netlink.c."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

from hibernode.errors import RefusedError
from hibernode.host.sockets import unix_sockets
from hibernode.preflight.rows import row
from hibernode.workload import Finding, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from hibernode.host.sockets import TcpSocket, UnixSocket
    from hibernode.preflight.facts import Facts, Place
    from hibernode.settings import Settings

TcpMode = Literal["established", "close"]

KNOWN_PROTOCOLS: Final = ("TCP", "UDP", "RAW", "PING", "UNIX", "NETLINK", "PACKET")
"""Beginnings of the kernel's names for the protocols that CRIU dumps (UDP-Lite, TCPv6, UNIX-STREAM)."""

UNCONNECTED: Final = frozenset({"LISTEN", "CLOSE", "TIME_WAIT", "SYN_RECV"})
"""States in which there is no connection that a process could use."""

MAPPED_V4: Final = "::ffff:"


def findings(facts: Facts, settings: Settings) -> list[Finding]:
    """Judge the sockets, one row a check."""
    rows = [check_protocols(facts), check_netlink(facts)]
    if facts.sockets_error:
        found = f"the kernel does not list sockets: {facts.sockets_error}"
        return rows + [Finding(name, Verdict.SKIP, "", found) for name in ("tree.unix_peers", "tree.tcp")]
    _, tcp = decide_tcp(settings.criu.tcp, facts.tcp, facts.socket_inodes)
    return [*rows, check_unix_peers(facts, door_sockets(facts, settings)), tcp]


def door_sockets(facts: Facts, settings: Settings) -> frozenset[int]:
    """List the sockets that are connected to the agent's metadata socket: it closes them before a dump."""
    door = str(settings.metadata.socket)
    ours = {peer.inode for peer in facts.unix_peers.values() if peer.path == door}
    return frozenset(socket.inode for socket in facts.unix if socket.peer_inode in ours)


def check_cut(pid: int, inodes: frozenset[int]) -> None:
    """Check that the agent has closed those connections, by the network namespace of ``pid``.

    :raises RefusedError: ``UnixPeerOutside``.
    """
    if inodes and any(socket.peer_inode for socket in unix_sockets(pid, inodes)):
        raise RefusedError(
            f"the tree of pid {pid} is still connected to the agent's metadata socket",
            remedy="is an agent running that serves it? Else close the connection before the ready file",
            reason="UnixPeerOutside",
        )


def check_protocols(facts: Facts) -> Finding:
    """Check that there are only protocols that CRIU knows."""

    def offenders() -> Iterator[str]:
        for inode, kind in facts.socket_kinds.items():
            if kind and not kind.startswith(KNOWN_PROTOCOLS):
                yield f"{_place(facts, inode)} ({kind} socket)"

    return row(
        "tree.sockets",
        "TCP, UDP, raw, ping, Unix, netlink and packet sockets",
        offenders(),
        remedy="the program must close it first; for multipath TCP in Go set GODEBUG=multipathtcp=0",
        reason="UnsupportedSocket",
        fine=f"{len(facts.socket_kinds)} sockets, no others",
    )


def check_netlink(facts: Facts) -> Finding:
    """Check that nothing waits on a netlink socket: CRIU cannot carry it over, and fails."""
    return row(
        "tree.netlink",
        "netlink sockets with nothing unread",
        (
            f"{_place(facts, socket.inode)} (netlink, {socket.pending_bytes} bytes unread)"
            for socket in facts.netlink
            if socket.pending_bytes
        ),
        remedy="the program must read what waits on the socket, or close it, before it says that it is ready",
        reason="NetlinkUnread",
        fine=f"{len(facts.netlink)} bound sockets",
    )


def check_unix_peers(facts: Facts, door: frozenset[int] = frozenset()) -> Finding:
    """Check that both ends of a Unix connection are in the tree: else CRIU dumps it, and the restore dies.

    ``door``: inodes of sockets whose connection is closed before the dump. A datagram socket may send to an
    address outside: it is connected anew by name.
    """
    inside = facts.socket_inodes
    waiting_inside = {inode for socket in facts.unix for inode in socket.waiting}

    def offenders() -> Iterator[str]:
        for socket in facts.unix:
            peer = facts.unix_peers.get(socket.peer_inode)
            by_name = socket.type == "dgram" and peer and peer.path
            if socket.inode in door:
                continue
            if socket.peer_inode and socket.peer_inode not in inside and not by_name:
                path = socket.path or (peer.path if peer else "") or "a nameless peer"
                yield f"{_place(facts, socket.inode)} ({socket.type} to {path})"
            elif _in_flight(socket) and socket.inode not in waiting_inside:
                yield f"{_place(facts, socket.inode)} ({socket.type}, not accepted yet)"

    return row(
        "tree.unix_peers",
        "no Unix connection to a process outside the tree",
        offenders(),
        remedy="the worker must close the connection before it says that it is ready, or be dumped together "
        "with its peer",
        reason="UnixPeerOutside",
        fine=f"{len(facts.unix)} Unix sockets, no connection to outside"
        + (f" but {len(door)} to the agent, which it closes" if door else ""),
    )


def _in_flight(socket: UnixSocket) -> bool:
    """Whether it is connected and was not accepted: a closed peer would have shut it down."""
    return (
        socket.state == "ESTABLISHED"
        and socket.type != "dgram"
        and not socket.peer_inode
        and not socket.shut_down
    )


def decide_tcp(
    setting: Literal["auto", "established", "close"],
    sockets: Iterable[TcpSocket],
    inodes: Mapping[int, Place],
) -> tuple[TcpMode, Finding]:
    """Choose what becomes of TCP connections; CRIU knows one answer for all of them.

    ``inodes`` are the sockets of the tree, with where they are held. Connections whose both ends are in
    the tree can be kept; one to outside can not, for its peer goes on without us. Without any connection
    ``auto`` closes, so that one that comes up while the tree is being frozen does no harm.
    """
    ours = [socket for socket in sockets if socket.inode in inodes and socket.state not in UNCONNECTED]
    ends = {(_address(socket.local), _address(socket.remote)) for socket in ours}
    outside = [socket for socket in ours if (_address(socket.remote), _address(socket.local)) not in ends]
    chosen: TcpMode = "close"
    if setting != "auto":
        chosen = setting
    elif ours and not outside:
        chosen = "established"

    closed = ours if chosen == "close" else []
    kept = outside if chosen == "established" else []
    return chosen, row(
        "tree.tcp",
        "no TCP connection to outside the tree",
        (_connection(socket, inodes) for socket in closed or kept),
        remedy=f"they are closed in the restored worker (criu.tcp = {setting}); it must connect again"
        if closed
        else "criu.tcp = established: a restore fails unless address and peer are still there",
        reason="TcpConnected",
        verdict=Verdict.WARN,
        fine=f"{len(ours)} connections inside the tree, kept" if ours else "no connection",
    )


def _address(address: tuple[str, int]) -> tuple[str, int]:
    """Bring an IPv4 address to one form: seen from an IPv6 socket it is a mapped one."""
    return address[0].removeprefix(MAPPED_V4), address[1]


def _connection(socket: TcpSocket, inodes: Mapping[int, Place]) -> str:
    pid, fd = inodes[socket.inode]
    local, remote = (f"{host}:{port}" for host, port in (socket.local, socket.remote))
    return f"pid {pid} fd {fd} ({local} to {remote}, {socket.state})"


def _place(facts: Facts, inode: int) -> str:
    pid, fd = facts.socket_inodes.get(inode, (facts.root.pid, -1))
    return f"pid {pid} fd {fd}"
