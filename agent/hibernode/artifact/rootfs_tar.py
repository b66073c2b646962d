"""The tar of a rootfs diff: a pax archive that GNU tar lists and extracts. Here: its nouns and the writer.

One entry is a pax header (``x``) and a ustar header. Names start with ``./``. Beyond POSIX:

- a whiteout ("this name is gone") is a character device 0/0, as in the upper directory of an overlay;
- ``HIBERNODE.opaque=1`` on a directory: whatever else the target has in it goes;
- ``HIBERNODE.links=1`` on a file: later entries are further names (hard links) of it;
- ``SCHILY.xattr.NAME`` holds an extended attribute, as GNU tar, star and bsdtar write it;
- a file with holes is GNU sparse format 1.0; ``mtime`` has nanoseconds.

GNU tar warns of the records of ours (``--warning=no-unknown-keyword``) and needs ``--xattrs-include=*``.

Entries come in one order only: a directory before what is in it, names of one directory by their bytes.
So a name cannot come twice, and its parent is always a directory of the tar itself: no link, be it the
tar's own, can stand in the way. The reader (:mod:`hibernode.artifact.rootfs_read`) takes nothing but what
the writer writes.
"""

from __future__ import annotations

import errno
import os
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Protocol

from hibernode.apart import go_on
from hibernode.errors import IntegrityError, RefusedError

BLOCK: Final = 512
END: Final = bytes(2 * BLOCK)

MAX_PATH_BYTES: Final = 4095
"""linux/limits.h: PATH_MAX without the NUL; one openat2(2) must reach every name."""

MAX_NAME_BYTES: Final = 255
MAX_HEADER_BYTES: Final = 8 << 20
"""Of one entry's pax records: the extended attributes (each up to 64 KiB) are in them."""

MAX_XATTR_BYTES: Final = 65536
"""linux/limits.h: XATTR_SIZE_MAX."""

MAX_SEGMENTS: Final = 1 << 17
"""Pieces of data in one sparse file; the holes after the last one are stored as zeros."""

MAX_ID: Final = (1 << 32) - 2
"""The largest user or group id; one more is "no change" to chown(2)."""

MAX_OFFSET: Final = (1 << 63) - 1
CHUNK: Final = 1 << 20

OPAQUE: Final = "HIBERNODE.opaque"
LINKS: Final = "HIBERNODE.links"
XATTR: Final = "SCHILY.xattr."
SPARSE_NAME: Final = "GNU.sparse.name"
SPARSE_SIZE: Final = "GNU.sparse.realsize"
SPARSE_VERSION: Final = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}

OVERLAY_XATTRS: Final = ("trusted.overlay.", "user.overlay.")
"""What overlayfs notes in its upper layer for itself: never saved, never set."""


class Sink(Protocol):
    """Where a tar goes: an open binary file."""

    def write(self, data: bytes, /) -> object:
        """Take all of ``data``."""


class Kind(Enum):
    """What an entry makes; the value is its type flag in the header."""

    FILE = tarfile.REGTYPE
    HARD_LINK = tarfile.LNKTYPE
    SYMLINK = tarfile.SYMTYPE
    WHITEOUT = tarfile.CHRTYPE
    DIRECTORY = tarfile.DIRTYPE
    FIFO = tarfile.FIFOTYPE


@dataclass(frozen=True, slots=True)
class Metadata:
    """What chmod, chown, utimensat and setxattr set; ``mode`` without the type."""

    mode: int = 0
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0
    xattrs: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Entry:
    """One name of the diff.

    ``path``: below the root, without a slash in front; the root itself is empty. ``target``: of a symbolic
    link as it is, of a hard link the path of the file. ``size``: of a file, holes included. ``start`` and
    ``at`` are the places in a tar that was read of the stored bytes and of the header; ``stored`` counts
    the former, the map of a sparse file included.
    """

    path: bytes
    kind: Kind
    metadata: Metadata = Metadata()
    size: int = 0
    target: bytes = b""
    opaque: bool = False
    linked: bool = False
    sparse: bool = False
    stored: int = 0
    start: int = 0
    at: int = 0


def shown(path: bytes) -> str:
    """Write a path below the root for people."""
    return repr("/" + os.fsdecode(path))


class Writer:
    """Writes entries, which come in the one order; the tar is whole when :meth:`finish` has returned."""

    def __init__(self, out: Sink) -> None:
        self._out = out
        self.entries = 0
        self.bytes = 0
        self.whiteouts = 0

    def add(self, entry: Entry) -> None:
        """Write an entry that has no content."""
        self._header(entry, 0)

    def whiteout(self, path: bytes) -> None:
        """Write that ``path`` is gone."""
        self.whiteouts += 1
        self._header(Entry(path, Kind.WHITEOUT), 0)

    def file(self, entry: Entry, fd: int) -> None:
        """Write a regular file with the content of ``fd``, ``entry.size`` bytes.

        :raises IntegrityError: it is shorter than that.
        """
        parts = segments(fd, entry.size)
        data = sum(length for _, length in parts)
        if data == entry.size:
            self._header(entry, data)
        else:
            if not parts or sum(parts[-1]) < entry.size:
                parts.append((entry.size, 0))  # as GNU tar marks a hole at the end
            lines = [len(parts), *(number for part in parts for number in part)]
            text = b"".join(b"%d\n" % number for number in lines)
            table = text + bytes(-len(text) % BLOCK)
            self._header(entry, len(table) + data, sparse=True)
            self._out.write(table)
        for start, length in parts:
            self._copy(fd, start, length, entry.path)
        self._out.write(bytes(-data % BLOCK))
        self.bytes += data

    def finish(self) -> None:
        """Write the end."""
        self._out.write(END)

    def _copy(self, fd: int, start: int, length: int, path: bytes) -> None:
        while length:
            piece = os.pread(fd, min(length, CHUNK), start)
            if not piece:
                raise StaleTreeError(path, "became shorter")
            self._out.write(piece)
            go_on()
            start += len(piece)
            length -= len(piece)

    def _header(self, entry: Entry, stored: int, *, sparse: bool = False) -> None:
        header = _encode(entry, stored, sparse=sparse)
        if len(header) > MAX_HEADER_BYTES:
            raise RefusedError(
                f"{shown(entry.path)} has {len(header)} bytes of extended attributes",
                remedy="let the worker remove the attributes, or exclude the file",
                reason="TooManyXattrs",
            )
        self.entries += 1
        self._out.write(header)
        go_on()


class StaleTreeError(IntegrityError):
    """A tree changed while it was read, though it should be frozen."""

    def __init__(self, path: bytes, what: str) -> None:
        super().__init__(
            f"{shown(path)} {what} while it was read",
            remedy="find out which process outside of the frozen tree writes to the container's files",
            reason="RootfsChanged",
            path=os.fsdecode(path),
        )


def segments(fd: int, size: int) -> list[tuple[int, int]]:
    """List where a file has data: (offset, length), ascending, lengths in whole blocks but for the end.

    GNU tar starts every segment at a block of the archive, hence the whole blocks.
    """
    found: list[tuple[int, int]] = []
    position = 0
    while position < size:
        try:
            start = os.lseek(fd, position, os.SEEK_DATA) // BLOCK * BLOCK
        except OSError as error:
            if error.errno != errno.ENXIO:  # that one: a hole up to the end
                raise
            break
        if start >= size:
            break
        end = size if len(found) == MAX_SEGMENTS - 2 else os.lseek(fd, max(start, position), os.SEEK_HOLE)
        position = min(-(-end // BLOCK) * BLOCK, size)
        if found and sum(found[-1]) >= start:
            start = found.pop()[0]
        found.append((start, position - start))
    return found


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def _encode(entry: Entry, stored: int, *, sparse: bool) -> bytes:
    name = _text(b"./" + entry.path if entry.path else b".")
    seconds, nanoseconds = divmod(abs(entry.metadata.mtime_ns), 10**9)
    sign = "-" if entry.metadata.mtime_ns < 0 else ""
    records = {"mtime": f"{sign}{seconds}.{nanoseconds:09}"}
    if entry.opaque:
        records[OPAQUE] = "1"
    if entry.linked:
        records[LINKS] = "1"
    if sparse:
        records |= SPARSE_VERSION | {SPARSE_NAME: name, SPARSE_SIZE: str(entry.size)}
        name = "./GNUSparseFile.0/" + name.rpartition("/")[2]
    for key, value in sorted(entry.metadata.xattrs.items()):
        records[XATTR + _escape(os.fsencode(key))] = _text(value)
    info = tarfile.TarInfo(name)
    info.type = entry.kind.value
    info.mode, info.uid, info.gid = entry.metadata.mode, entry.metadata.uid, entry.metadata.gid
    info.size = stored
    info.linkname = _text(b"./" + entry.target if entry.kind is Kind.HARD_LINK else entry.target)
    info.pax_headers = records
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def _escape(name: bytes) -> str:
    """Write an attribute's name into a keyword: ``=`` ends one, and tarfile takes text only."""
    plain = set(range(0x20, 0x7F)) - set(b"%=")
    return "".join(chr(byte) if byte in plain else f"%{byte:02X}" for byte in name)
