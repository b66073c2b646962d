"""The TCP connections in CRIU's images: whose packets are held back until both ends are there again."""

from __future__ import annotations

import ipaddress
import struct
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
_WORDS: Final = {2: 1, 10: 4}
"""How many numbers of 32 bits an address has, by family: AF_INET, AF_INET6."""

MAX_PORT: Final = 65535


def tcp_connections(images_dir: Dir | Path) -> list[Connection]:
    """List the ends of TCP connections that the images hold, IPv4 addresses in their own form.

    :raises IntegrityError: ``files.img`` is absent, no regular file, or damaged.
    """
    with opened(images_dir) as directory, as_integrity(directory, _FILES):
        data = directory.read(_FILES, MAX_FILES_BYTES).data
        entries = (entry for record in records(data, FILES_MAGIC) for entry in fields(record))
        sockets = (value for number, value in entries if number == _INET_SOCKET)
        return [found for value in sockets if (found := _connection(value)) is not None]


def _connection(entry: int | memoryview) -> Connection | None:
    """Read one inet_sk_entry; None if it is no connection of TCP."""
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
    if single.get(_PROTOCOL) != _TCP or not single.get(_REMOTE_PORT):
        return None
    local_port, remote_port = single.get(_LOCAL_PORT, 0), single[_REMOTE_PORT]
    if max(local_port, remote_port) > MAX_PORT:
        raise OddError(f"holds a socket with the ports {local_port} and {remote_port}")
    local, remote = (_address(single.get(_FAMILY, 0), addresses[key]) for key in (_LOCAL, _REMOTE))
    if len(local) != len(remote):
        raise OddError("holds a socket with addresses of two kinds")
    return 4 if len(local) == 4 else 6, local, local_port, remote, remote_port  # noqa: PLR2004


def _address(family: int, words: list[int]) -> bytes:
    """Put an address together from CRIU's numbers, which are its bytes as the machine reads them."""
    if len(words) < _WORDS.get(family, len(words) + 1):
        raise OddError(f"holds a socket of family {family} with an address of {len(words)} numbers")
    raw = struct.pack(f"={_WORDS[family]}I", *words[: _WORDS[family]])
    mapped = ipaddress.IPv6Address(raw).ipv4_mapped if len(raw) == 16 else None  # noqa: PLR2004
    return mapped.packed if mapped else raw
