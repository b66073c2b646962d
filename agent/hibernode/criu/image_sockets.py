"""The sockets in CRIU's images: connections, which are held back until both ends are there, and addresses."""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hibernode.criu.images import UINT32_MAX, OddError, as_integrity, fields, opened, records
from hibernode.host.nftables import Connection
from hibernode.host.safefs import Dir

FILES_MAGIC: Final = 0x56303138
"""criu/include/magic.h."""

MAX_FILES_BYTES: Final = 256 << 20
"""An open file takes some 100 bytes, so this is more than two million."""

_FILES: Final = "files.img"
_INET_SOCKET: Final = 4
"""images/fdinfo.proto: the field of a file_entry that holds an inet_sk_entry."""

_FAMILY, _PROTOCOL, _LOCAL_PORT, _REMOTE_PORT, _LOCAL, _REMOTE = 3, 5, 7, 8, 11, 12
"""images/sk-inet.proto."""

_TCP: Final = 6
_PING: Final = frozenset({1, 58})
"""IPPROTO_ICMP and IPPROTO_ICMPV6: sockets that CRIU does not bind."""

_BROADCAST: Final = ipaddress.IPv4Address("255.255.255.255")
_WORDS: Final = {2: 1, 10: 4}
"""How many numbers of 32 bits an address has, by family: AF_INET, AF_INET6."""

MAX_PORT: Final = 65535


@dataclass(frozen=True, slots=True)
class _Socket:
    """An inet_sk_entry. Addresses are bytes, mapped ones of IPv4 in their own form; ports 0 for none."""

    protocol: int
    local: bytes
    local_port: int
    remote: bytes
    remote_port: int

    @property
    def is_connection(self) -> bool:
        """Whether it is an end of a TCP connection, or was one."""
        return self.protocol == _TCP and bool(self.remote_port)


def tcp_connections(images_dir: Dir | Path) -> list[Connection]:
    """List the ends of TCP connections that the images hold, IPv4 addresses in their own form.

    :raises IntegrityError: ``files.img`` is absent, no regular file, or damaged.
    """
    found = _sockets(images_dir, lambda socket: socket.is_connection)
    return [
        (4 if len(end.local) == 4 else 6, end.local, end.local_port, end.remote, end.remote_port)  # noqa: PLR2004
        for end in found
    ]


def bound_addresses(images_dir: Dir | Path) -> tuple[str, ...]:
    """List the addresses that CRIU will bind sockets to and that not every network namespace has, in order.

    Those are sockets that listen, and all of UDP that have a port, for connect(2) gives them an address too.

    :raises IntegrityError: as :func:`tcp_connections`.
    """
    found = _sockets(images_dir, lambda socket: not socket.is_connection)
    bound = {
        ipaddress.ip_address(socket.local)
        for socket in found
        if socket.local_port and socket.protocol not in _PING
    }
    return tuple(
        sorted(
            str(address)
            for address in bound
            if not (address.is_unspecified or address.is_loopback or address.is_multicast)
            and address != _BROADCAST
        )
    )


def _sockets(images_dir: Dir | Path, wanted: Callable[[_Socket], bool]) -> list[_Socket]:
    with opened(images_dir) as directory, as_integrity(directory, _FILES):
        data = directory.read(_FILES, MAX_FILES_BYTES).data
        entries = (entry for record in records(data, FILES_MAGIC) for entry in fields(record))
        sockets = (_socket(value) for number, value in entries if number == _INET_SOCKET)
        return [socket for socket in sockets if wanted(socket)]


def _socket(entry: int | memoryview) -> _Socket:
    """Read one inet_sk_entry."""
    if isinstance(entry, int):
        raise OddError("holds a socket that is a number")
    single: dict[int, int] = {}
    addresses: dict[int, list[int]] = {_LOCAL: [], _REMOTE: []}
    for number, value in fields(entry):
        if number in (_FAMILY, _PROTOCOL, _LOCAL_PORT, _REMOTE_PORT, _LOCAL, _REMOTE):
            if not isinstance(value, int) or value > UINT32_MAX:
                raise OddError(f"holds a socket whose field {number} is no number of 32 bits")
            if number in addresses:
                addresses[number].append(value)
            else:
                single[number] = value
    local_port, remote_port = single.get(_LOCAL_PORT, 0), single.get(_REMOTE_PORT, 0)
    if max(local_port, remote_port) > MAX_PORT:
        raise OddError(f"holds a socket with the ports {local_port} and {remote_port}")
    local, remote = (_address(single.get(_FAMILY, 0), addresses[key]) for key in (_LOCAL, _REMOTE))
    found = _Socket(single.get(_PROTOCOL, 0), local, local_port, remote, remote_port)
    if found.is_connection and len(local) != len(remote):
        raise OddError("holds a socket with addresses of two kinds")
    return found


def _address(family: int, words: list[int]) -> bytes:
    """Put an address together from CRIU's numbers, which are its bytes as the machine reads them."""
    if len(words) < _WORDS.get(family, len(words) + 1):
        raise OddError(f"holds a socket of family {family} with an address of {len(words)} numbers")
    raw = struct.pack(f"={_WORDS[family]}I", *words[: _WORDS[family]])
    mapped = ipaddress.IPv6Address(raw).ipv4_mapped if len(raw) == 16 else None  # noqa: PLR2004
    return mapped.packed if mapped else raw
