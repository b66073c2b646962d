"""The little of nftables that is needed here, by netlink and without a library.

The libraries for it cost the agent 20 MB of memory for good, and the shim can have none. Standard library
only; the numbers are from linux/netlink.h, linux/netfilter.h, linux/netfilter/nfnetlink.h and nf_tables.h.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterable
from typing import Final

NETLINK_NETFILTER: Final = 12
NFNL_SUBSYS_NFTABLES: Final = 10
NFNL_MSG_BATCH_BEGIN: Final = 16
NFNL_MSG_BATCH_END: Final = 17
NFT_MSG_NEWTABLE: Final = 0
NFT_MSG_DELTABLE: Final = 2
NFT_MSG_NEWCHAIN: Final = 3
NFT_MSG_NEWRULE: Final = 6
NFPROTO_INET: Final = 1
NFPROTO_IPV4: Final = 2
NFPROTO_IPV6: Final = 10
NLMSG_ERROR: Final = 2
NLM_F_REQUEST: Final = 1
NLM_F_ACK: Final = 4
NLM_F_EXCL: Final = 0x200
NLM_F_CREATE: Final = 0x400
NLM_F_APPEND: Final = 0x800
NLA_F_NESTED: Final = 0x8000
NFT_TABLE_F_OWNER: Final = 2
"""The kernel removes the table when the socket that made it is closed; since Linux 5.12."""

NF_INET_LOCAL_IN: Final = 1
NFT_REG_VERDICT, NFT_REG_1 = 0, 1
NFT_META_MARK, NFT_META_NFPROTO, NFT_META_L4PROTO = 3, 15, 16
NFT_CMP_EQ, NFT_CMP_NEQ = 0, 1
NFT_PAYLOAD_NETWORK_HEADER, NFT_PAYLOAD_TRANSPORT_HEADER = 1, 2
SOURCE_OFFSET: Final = {4: 12, 6: 8}
"""Where the source address stands in the header of an IP version; the destination follows it."""

SO_SNDBUFFORCE: Final = 32
"""asm-generic/socket.h"""

SOCCR_MARK: Final = 0xC114
"""soccr/soccr.h of CRIU: marks the packets by which it restores the end of a connection's stream."""

ANSWER_SECONDS: Final = 5.0
_CHAIN: Final = b"input"

Connection = tuple[int, bytes, int, bytes, int]
"""One end of a TCP connection: IP version, local address and port, remote address and port."""


def delete_table(name: str) -> None:
    """Remove the nftables table ``inet NAME`` and all that is in it.

    :raises FileNotFoundError: there is none.
    :raises OSError: the kernel refused.
    """
    with _socket() as sock:
        _send(sock, [_message(NFT_MSG_DELTABLE, 0, _text(1, name.encode()))], name)


def hold_back(name: str, connections: Iterable[Connection]) -> socket.socket:
    """Drop what comes in for these ends of connections, in our network namespace, until the socket closes.

    What CRIU itself sends is let through. The table ``inet NAME`` ends with the socket, however we end.

    :raises OSError: the kernel refused, or is older than Linux 5.12.
    """
    table = name.encode()
    hook = _nested(4, _number(1, NF_INET_LOCAL_IN) + _number(2, 0))
    messages = [
        _message(
            NFT_MSG_NEWTABLE, NLM_F_CREATE | NLM_F_EXCL, _text(1, table) + _number(2, NFT_TABLE_F_OWNER)
        ),
        _message(
            NFT_MSG_NEWCHAIN, NLM_F_CREATE, _text(1, table) + _text(3, _CHAIN) + hook + _text(7, b"filter")
        ),
    ]
    messages += [
        _message(
            NFT_MSG_NEWRULE,
            NLM_F_CREATE | NLM_F_APPEND,
            _text(1, table) + _text(2, _CHAIN) + _nested(4, b"".join(_dropping(connection))),
        )
        for connection in connections
    ]
    sock = _socket()
    try:
        _send(sock, messages, name)
    except BaseException:
        sock.close()
        raise
    return sock


def _dropping(connection: Connection) -> Iterable[bytes]:
    """Build the expressions of one rule: what goes from the remote end to the local one is dropped."""
    version, local, local_port, remote, remote_port = connection
    family = NFPROTO_IPV4 if version == 4 else NFPROTO_IPV6  # noqa: PLR2004
    at, size = SOURCE_OFFSET[version], len(remote)
    yield from _compared(_meta(NFT_META_NFPROTO), bytes([family]))
    yield from _compared(_meta(NFT_META_L4PROTO), bytes([socket.IPPROTO_TCP]))
    yield from _compared(_payload(NFT_PAYLOAD_NETWORK_HEADER, at, size), remote)
    yield from _compared(_payload(NFT_PAYLOAD_NETWORK_HEADER, at + size, size), local)
    ports = struct.pack(">HH", remote_port, local_port)
    yield from _compared(_payload(NFT_PAYLOAD_TRANSPORT_HEADER, 0, len(ports)), ports)
    yield from _compared(_meta(NFT_META_MARK), struct.pack("=I", SOCCR_MARK), NFT_CMP_NEQ)
    verdict = _nested(2, _nested(2, _number(1, 0)))  # NF_DROP
    yield _expression(b"immediate", _number(1, NFT_REG_VERDICT) + verdict)


def _compared(load: bytes, value: bytes, operation: int = NFT_CMP_EQ) -> tuple[bytes, bytes]:
    data = _number(1, NFT_REG_1) + _number(2, operation) + _nested(3, _attribute(1, value))
    return load, _expression(b"cmp", data)


def _meta(key: int) -> bytes:
    return _expression(b"meta", _number(1, NFT_REG_1) + _number(2, key))


def _payload(base: int, offset: int, size: int) -> bytes:
    return _expression(
        b"payload", _number(1, NFT_REG_1) + _number(2, base) + _number(3, offset) + _number(4, size)
    )


def _expression(name: bytes, data: bytes) -> bytes:
    return _nested(1, _text(1, name) + _nested(2, data))


def _number(kind: int, value: int) -> bytes:
    return _attribute(kind, struct.pack(">I", value))


def _text(kind: int, value: bytes) -> bytes:
    return _attribute(kind, value + b"\0")


def _nested(kind: int, value: bytes) -> bytes:
    return _attribute(kind | NLA_F_NESTED, value)


def _attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


def _message(kind: int, flags: int, attributes: bytes) -> bytes:
    """Build a message of nftables; numbers for sending are put in where the batch is made."""
    return _framed(NFNL_SUBSYS_NFTABLES << 8 | kind, flags, NFPROTO_INET, 0, attributes)


def _framed(kind: int, flags: int, family: int, resource: int, attributes: bytes = b"") -> bytes:
    """Build a netlink message with nftables' header (struct nfgenmsg: family, version, resource)."""
    body = struct.pack("=BB", family, 0) + struct.pack(">H", resource) + attributes
    return struct.pack("=IHHII", 16 + len(body), kind, NLM_F_REQUEST | flags, 1, 0) + body


def _socket() -> socket.socket:
    sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_NETFILTER)
    sock.settimeout(ANSWER_SECONDS)
    return sock


def _send(sock: socket.socket, messages: list[bytes], name: str) -> None:
    """Send a batch, which counts whole or not at all; its last message asks for an answer.

    The kernel answers in the order of the messages, and answers one that is wrong unasked, so that the first
    answer tells.
    """
    last = bytearray(messages[-1])
    struct.pack_into("=H", last, 6, struct.unpack_from("=H", last, 6)[0] | NLM_F_ACK)
    begin, end = (
        _framed(kind, 0, 0, NFNL_SUBSYS_NFTABLES) for kind in (NFNL_MSG_BATCH_BEGIN, NFNL_MSG_BATCH_END)
    )
    batch = b"".join([begin, *messages[:-1], last, end])
    sock.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, 2 * len(batch))
    sock.sendto(batch, (0, 0))
    answer = sock.recv(8192)
    (kind,) = struct.unpack_from("=H", answer, 4)
    (code,) = struct.unpack_from("=i", answer, 16)
    if kind != NLMSG_ERROR or code:
        raise OSError(-code, os.strerror(-code), name)
