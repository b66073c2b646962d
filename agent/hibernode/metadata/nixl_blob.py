"""The metadata blob of a NIXL agent: whose it is, and which backends can reach it.

A blob names its agent, holds what each backend needs to connect to it, and the memory that it has
registered. It carries no version, no checksum and no signature, and its layout belongs to NIXL. So only
the header is read here, strictly; the rest stays opaque, and only the size and the digest stand for it.
:mod:`hibernode.metadata.nixl_check` asks NIXL itself.
"""

from __future__ import annotations

import hashlib
import re
import struct
from dataclasses import dataclass
from typing import Final

from hibernode.errors import HibernodeError, RefusedError

MAX_BLOB_BYTES: Final = 16 << 20
"""UCX over TCP takes 44 bytes a memory region, EFA 242: enough for 69,000 regions of the larger kind."""

MAX_BACKENDS: Final = 32
"""NIXL 1.5 comes with a dozen."""

MAX_NAME: Final = 128
LISTENER_MARK: Final = b"NIXLCOMM:"
"""NIXL's listener splits what it receives at this text: a blob that holds it cannot pass through one."""

_NAME: Final = re.compile(rb"[A-Za-z0-9._-]{1,%d}" % MAX_NAME)
_MAGIC: Final = b"nixlSerDes|"
_LENGTH: Final = struct.Struct("<Q")
"""size_t as it lies in memory; every machine that NIXL is built for is little-endian with 64 bits."""


@dataclass(frozen=True, slots=True)
class Connection:
    """How one backend reaches the agent; ``size`` is that of its opaque connection info, in bytes."""

    backend: str
    size: int


@dataclass(frozen=True, slots=True)
class BlobHeader:
    """What stands in front of a blob, and what stands for all of it.

    ``memory_size``: the opaque section of registered memory; ``size``: the whole blob; both in bytes.
    ``digest``: SHA-256 of the whole blob, in hexadecimal digits.
    """

    agent: str
    connections: tuple[Connection, ...]
    memory_size: int
    size: int
    digest: str


class _Fields:
    """The fields of a blob, one after the other: tag, length of eight bytes, value, ``|``."""

    def __init__(self, blob: bytes) -> None:
        self._blob = blob
        self.at = 0

    def literal(self, text: bytes, what: str) -> None:
        if not self._blob.startswith(text, self.at):
            raise _malformed(f"at byte {self.at} {what} is missing")
        self.at += len(text)

    def length(self, tag: bytes) -> int:
        """Read a field's tag and length; the value, whole, lies at ``at`` then."""
        self.literal(tag, f"the tag {tag.decode()!r}")
        if len(self._blob) - self.at < _LENGTH.size:
            raise _malformed(f"it ends in the length of {tag.decode()!r}")
        (length,) = _LENGTH.unpack_from(self._blob, self.at)
        self.at += _LENGTH.size
        if length >= len(self._blob) - self.at:
            raise _malformed(f"{tag.decode()!r} claims {length} bytes, {len(self._blob) - self.at} are left")
        return int(length)

    def skip(self, length: int) -> None:
        self.at += length
        self.literal(b"|", "the end of a field")

    def value(self, tag: bytes, most: int) -> bytes:
        length = self.length(tag)
        if length > most:
            raise _malformed(f"{tag.decode()!r} has {length} bytes, more than {most}")
        start = self.at
        self.skip(length)
        return self._blob[start : start + length]

    def name(self, tag: bytes) -> str:
        raw = self.value(tag, MAX_NAME)
        if not _NAME.fullmatch(raw):
            raise _malformed(f"{tag.decode()!r} is {raw!r}, not a name of letters, digits, '.', '_' and '-'")
        return raw.decode("ascii")


def read_header(blob: bytes, *, max_bytes: int = MAX_BLOB_BYTES) -> BlobHeader:
    """Read the header of an untrusted blob. Work and memory do not depend on what it claims.

    :raises RefusedError: ``BlobTooLarge`` or ``BlobMalformed``; the latter may also be a blob of another
        version of NIXL.
    """
    if len(blob) > max_bytes:
        raise too_large(len(blob), max_bytes)
    fields = _Fields(blob)
    fields.literal(_MAGIC, "the mark of a NIXL blob")
    agent = fields.name(b"Agent")
    raw = fields.value(b"Conns", _LENGTH.size)
    count = _LENGTH.unpack(raw)[0] if len(raw) == _LENGTH.size else 0
    if not 1 <= count <= MAX_BACKENDS:
        raise _malformed(f"it counts {count} connections, not 1 to {MAX_BACKENDS}")
    connections = []
    for _ in range(count):
        backend = fields.name(b"t")
        length = fields.length(b"c")
        fields.skip(length)
        connections.append(Connection(backend, length))
    if len({connection.backend for connection in connections}) < count:
        raise _malformed("it names a backend twice")
    if fields.value(b"", MAX_NAME) != b"MemSection":
        raise _malformed("the memory section is missing")
    if fields.at == len(blob) or not blob.endswith(b"|"):
        raise _malformed("its memory section is cut off")
    if LISTENER_MARK in blob:
        raise _malformed(f"it holds the text {LISTENER_MARK.decode()}, which NIXL's listener would split")
    return BlobHeader(
        agent=agent,
        connections=tuple(connections),
        memory_size=len(blob) - fields.at,
        size=len(blob),
        digest=blob_digest(blob),
    )


def blob_digest(blob: bytes) -> str:
    """Return the SHA-256 of a blob in hexadecimal digits: it changes with every generation of the agent."""
    return hashlib.sha256(blob).hexdigest()


def refuse_foreign(blob: bytes, agent: str, error: type[HibernodeError]) -> None:
    """Refuse a published blob that is plainly another agent's.

    A layout that is not known here may be another NIXL's, and a record need not name its agent: both pass.

    :raises HibernodeError: ``BlobAgentMismatch``, as an ``error``.
    """
    try:
        header = read_header(blob) if agent else None
    except RefusedError:
        return
    if header is not None and header.agent != agent:
        raise _mismatch(error, header, agent)


def require_agent(header: BlobHeader, agent: str) -> None:
    """Insist that a blob is of the agent that its record names.

    :raises RefusedError: ``BlobAgentMismatch``; who loads it would reach another agent, or none.
    """
    if header.agent != agent:
        raise _mismatch(RefusedError, header, agent)


def _mismatch(error: type[HibernodeError], header: BlobHeader, agent: str) -> HibernodeError:
    return error(
        f"the NIXL blob is of agent {header.agent!r}, its record names {agent!r:.200}",
        remedy="the worker publishes its record and its blob again, together",
        reason="BlobAgentMismatch",
        agent=header.agent,
    )


def too_large(size: int, most: int) -> RefusedError:
    """Say that a blob has more bytes than are taken."""
    return RefusedError(
        f"the NIXL blob has {size} bytes, more than {most}",
        remedy="register few large regions instead of one a tensor (ModelExpress: MX_POOL_REG=1)",
        reason="BlobTooLarge",
        size=size,
    )


def _malformed(what: str) -> RefusedError:
    return RefusedError(
        f"the NIXL blob cannot be read: {what}",
        remedy="the worker sends what get_agent_metadata() returned; docs/nixl.md names the versions",
        reason="BlobMalformed",
    )
