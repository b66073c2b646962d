"""Sockets as the kernel's sock_diag tells of them, in a process's own network namespace.

Spoken through pyroute2. Its package pulls in some 160 modules (10 MiB, 70 to 90 ms) of which sock_diag needs
sixteen (1.6 MiB, 25 ms), so only those are imported, and only when a question is asked.
"""

from __future__ import annotations

import errno
import importlib
import importlib.util
import os
import struct
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from hibernode.host import linux

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

STATES: Final = (
    "UNKNOWN",
    "ESTABLISHED",
    "SYN_SENT",
    "SYN_RECV",
    "FIN_WAIT1",
    "FIN_WAIT2",
    "TIME_WAIT",
    "CLOSE",
    "CLOSE_WAIT",
    "LAST_ACK",
    "LISTEN",
    "CLOSING",
)
"""net/tcp_states.h, by number; Unix sockets use ESTABLISHED, CLOSE and LISTEN of them."""

AF_UNIX: Final = 1
AF_INET: Final = 2
AF_INET6: Final = 10
UNIX_TYPES: Final = {1: "stream", 2: "dgram", 5: "seqpacket"}

NLMSG_ALIGNTO: Final = 4
NLMSG_ERROR: Final = 2
NLM_F_MULTI: Final = 2
SOCK_DIAG_BY_FAMILY: Final = 20
"""linux/netlink.h and linux/sock_diag.h."""

UDIAG_SHOW: Final = 0x01 | 0x02 | 0x04 | 0x08
"""linux/unix_diag.h: the name, the file that a name belongs to, the peer, who waits to be accepted."""

SHUTDOWN_MASK: Final = 3

_HEADER: Final = struct.Struct("=IHHII")
_INODE: Final = struct.Struct("=I")
_INODE_OFFSET: Final = {AF_UNIX: _HEADER.size + 4, AF_INET: _HEADER.size + 68, AF_INET6: _HEADER.size + 68}
"""Where udiag_ino and idiag_inode (32 bits) stand in a message of a family."""

_PASSED_OVER: Final[Any] = {"header": {"type": SOCK_DIAG_BY_FAMILY, "flags": NLM_F_MULTI, "error": None}}
"""Stands for a socket nobody asked about: pyroute2 takes a datagram without any message for the end."""

_import_lock: Final = threading.Lock()
_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class TcpSocket:
    """One TCP socket; addresses are (text, port). ``inode`` is 0 when no process holds it any more."""

    family: str
    state: str
    local: tuple[str, int]
    remote: tuple[str, int]
    inode: int


@dataclass(frozen=True, slots=True)
class UnixSocket:
    """One Unix socket. ``peer_inode`` is 0 without a peer; ``path`` starts with ``@`` when it is abstract.

    ``shut_down``: neither end will send any more, as when the peer was closed. ``waiting``: the inodes of
    those whose connection a listener has not accepted yet; they have no peer until then.
    """

    inode: int
    peer_inode: int
    state: str
    type: str
    path: str
    shut_down: bool = False
    waiting: tuple[int, ...] = ()


def tcp_sockets(pid: int, inodes: Collection[int] | None = None) -> list[TcpSocket]:
    """List the TCP sockets, IPv4 and IPv6, of the network namespace that ``pid`` is in.

    ``inodes``: only these; a message costs 2 µs to pass over and some 60 µs to decode.

    :raises ProcessLookupError: there is no such process.
    :raises OSError: the kernel does not answer (no permission, no sock_diag).
    """
    return _ask(pid, lambda diag: [_tcp(message) for message in _answers(diag, (AF_INET, AF_INET6), inodes)])


def unix_sockets(pid: int, inodes: Collection[int] | None = None) -> list[UnixSocket]:
    """List the Unix sockets of the network namespace that ``pid`` is in; the rest as :func:`tcp_sockets`."""
    return _ask(pid, lambda diag: [_unix(message) for message in _answers(diag, (AF_UNIX,), inodes)])


def _ask(pid: int, question: Callable[[Any], list[_Answer]]) -> list[_Answer]:
    """Put the question in a thread of its own.

    The thread may enter another network namespace, which ends with it; and pyroute2 runs an event loop of
    its own, which cannot be done in a thread that runs one.
    """
    answer: list[_Answer] = []
    failure: list[BaseException] = []

    def work() -> None:
        try:
            _enter(pid)
            answer.extend(question(_diag()))
        except BaseException as error:  # noqa: BLE001 - raised again by the caller
            failure.append(error)

    thread = threading.Thread(target=work, name=f"sock_diag {pid}", daemon=True)
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return answer


def _enter(pid: int) -> None:
    """Move this thread into the network namespace of ``pid``, if it is another one."""
    try:
        fd = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise ProcessLookupError(errno.ESRCH, f"no process has pid {pid}") from None
    try:
        if not os.path.samestat(os.fstat(fd), Path("/proc/thread-self/ns/net").stat()):
            linux.setns(fd, linux.CLONE_NEWNET)
    finally:
        os.close(fd)


def _diag() -> Any:
    """Import pyroute2's sock_diag module without running the package's own ``__init__``.

    The bare package is taken away again, so that who imports pyroute2 later gets it whole.
    """
    name = "pyroute2.netlink.diag"
    with _import_lock:
        if name in sys.modules or "pyroute2" in sys.modules:
            return importlib.import_module(name)
        spec = importlib.util.find_spec("pyroute2")
        if spec is None:
            raise ModuleNotFoundError("pyroute2 is not installed", name="pyroute2")
        sys.modules["pyroute2"] = importlib.util.module_from_spec(spec)
        try:
            return importlib.import_module(name)
        finally:
            del sys.modules["pyroute2"]


def _marshal(diag: Any, inodes: Collection[int] | None) -> Any:
    """Make a decoder of messages about sockets, only about ``inodes`` if given."""

    class Marshal(diag.MarshalDiag):  # type: ignore[misc]  # imported late: mypy sees Any
        """Passes over unwanted sockets undecoded, and knows an error when it sees one.

        The base decodes errors as if they were sockets, and then waits for an end that never comes.
        """

        def parse(self, data: bytes, *_: Any) -> Iterator[Any]:
            offset = 0
            silent = True
            while offset + _HEADER.size <= len(data):
                length, kind, flags, sequence_number, _port = _HEADER.unpack_from(data, offset)
                if length < _HEADER.size:
                    break
                family = data[offset + _HEADER.size] if length > _HEADER.size else 0
                if kind != SOCK_DIAG_BY_FAMILY or inodes is None or _inode(data, offset, family) in inodes:
                    key = self.error_type if kind == NLMSG_ERROR else family
                    yield self.parse_one_message(key, flags, sequence_number, data, offset, length)
                    silent = False
                offset += length + -length % NLMSG_ALIGNTO
            if silent:
                yield _PASSED_OVER

    return Marshal()


def _answers(diag: Any, families: tuple[int, ...], inodes: Collection[int] | None) -> Iterator[Any]:
    """Yield the decoded messages about the sockets of some families."""
    exceptions = importlib.import_module("pyroute2.netlink.exceptions")
    with diag.DiagSocket() as socket:
        socket.set_marshal(_marshal(diag, inodes))
        socket.bind()
        for family in families:
            try:
                messages = socket.get_sock_stats(family=family, show=UDIAG_SHOW)
            except exceptions.NetlinkError as error:
                raise OSError(error.code, f"sock_diag: {os.strerror(error.code)}") from error
            yield from (message for message in messages if message is not _PASSED_OVER)


def _inode(data: bytes, offset: int, family: int) -> int:
    (inode,) = _INODE.unpack_from(data, offset + _INODE_OFFSET[family])
    return int(inode)


def _state(number: int) -> str:
    return STATES[number] if number < len(STATES) else str(number)


def _tcp(message: Any) -> TcpSocket:
    return TcpSocket(
        family="inet" if message["idiag_family"] == AF_INET else "inet6",
        state=_state(message["idiag_state"]),
        local=(message["idiag_src"], message["idiag_sport"]),
        remote=(message["idiag_dst"], message["idiag_dport"]),
        inode=message["idiag_inode"],
    )


def _unix(message: Any) -> UnixSocket:
    name = message.get_attr("UNIX_DIAG_NAME") or ""
    path = os.fsdecode(name)
    if path and message.get_attr("UNIX_DIAG_VFS") is None:
        path = "@" + path.replace("\0", "@")  # an abstract name: no file, and NUL may stand in it
    icons = bytes.fromhex((message.get_attr("UNIX_DIAG_ICONS") or "").replace(":", ""))
    return UnixSocket(
        inode=message["udiag_ino"],
        peer_inode=message.get_attr("UNIX_DIAG_PEER") or 0,
        state=_state(message["udiag_state"]),
        type=UNIX_TYPES.get(message["udiag_type"], str(message["udiag_type"])),
        path=path,
        shut_down=message.get_attr("UNIX_DIAG_SHUTDOWN") == SHUTDOWN_MASK,
        waiting=tuple(_INODE.unpack(icons[at : at + 4])[0] for at in range(0, len(icons), 4)),
    )
