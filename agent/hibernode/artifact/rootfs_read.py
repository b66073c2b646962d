"""Reading the tar of a rootfs diff. It is hostile until every entry has passed here.

The reader takes nothing but what :class:`hibernode.artifact.rootfs_tar.Writer` writes; see there for the
format. It keeps one header in memory, and the paths of the files that have several names.
"""

from __future__ import annotations

import os
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from hibernode.apart import go_on
from hibernode.artifact.rootfs_tar import (
    BLOCK,
    END,
    LINKS,
    MAX_HEADER_BYTES,
    MAX_PATH_BYTES,
    MAX_SEGMENTS,
    OPAQUE,
    OVERLAY_XATTRS,
    SPARSE_NAME,
    SPARSE_SIZE,
    SPARSE_VERSION,
    XATTR,
    Entry,
    Kind,
    Metadata,
    shown,
)
from hibernode.errors import IntegrityError, RefusedError

MAX_NAME_BYTES: Final = 255
"""linux/limits.h: NAME_MAX."""

MAX_XATTR_BYTES: Final = 65536
"""linux/limits.h: XATTR_SIZE_MAX."""

MAX_ID: Final = (1 << 32) - 2
"""The largest user or group id; one more means "no change" to chown(2)."""

MAX_OFFSET: Final = (1 << 63) - 1
MAX_SECONDS: Final = 1 << 40
"""Times as far as ext4, xfs and btrfs can hold them fit; what a file system cannot hold it clamps."""

NUMBER_BYTES: Final = 20
"""A number of a sparse map and its line end: 2^63 has 19 digits."""

_PLAIN_RECORDS: Final = frozenset({"path", "linkpath", "size", "uid", "gid", "mtime", "hdrcharset"})
_OUR_RECORDS: Final = frozenset({OPAQUE, LINKS, SPARSE_NAME, SPARSE_SIZE, *SPARSE_VERSION})
_RECORD: Final = re.compile(rb"(\d{1,8}) ([^=\n]{1,1000})=")
_NUMBER: Final = re.compile(rb"\d{1,19}")
_MTIME: Final = re.compile(rb"(-?)(\d{1,13})\.(\d{9})")
_XATTR: Final = re.compile(
    r"(?:user|trusted|security)\.[^\0]+|system\.posix_acl_(?:access|default)", re.DOTALL
)
_ESCAPE: Final = re.compile(rb"%([0-9A-F]{2})")


@dataclass(frozen=True, slots=True)
class Summary:
    """What a tar holds. ``bytes``: the content of its files, without holes; ``logical_bytes``: with them."""

    entries: int = 0
    bytes: int = 0
    logical_bytes: int = 0
    whiteouts: int = 0


def check(tar: int, *, max_bytes: int) -> Summary:
    """Read every header of a tar and touch nothing; see :func:`read` for the errors."""
    entries = content = logical = whiteouts = 0
    for entry in read(tar, max_bytes=max_bytes):
        entries += 1
        content += entry.stored
        logical += entry.size
        whiteouts += entry.kind is Kind.WHITEOUT
    return Summary(entries, content, logical, whiteouts)


def read(tar: int, *, max_bytes: int) -> Iterator[Entry]:
    """Yield the entries of a whole tar, each one checked; ``tar`` is a descriptor of a regular file.

    ``max_bytes`` bounds the content of all files together, holes not counted.

    :raises IntegrityError: the tar is cut or damaged, or holds what no writer of ours wrote (reason
        ``RootfsTarDamaged``). Entries before that place have been yielded: :func:`check` first.
    :raises RefusedError: it holds more than ``max_bytes`` (reason ``RootfsTarTooLarge``).
    """
    offset = total = 0
    parents: list[tuple[bytes, ...]] = []
    previous: tuple[bytes, ...] | None = None
    linked: set[bytes] = set()
    while (entry := entry_at(tar, offset)) is not None:
        parts = tuple(entry.path.split(b"/")) if entry.path else ()
        while parents and parts[: len(parents[-1])] != parents[-1]:
            parents.pop()
        if previous is None:
            _require(not parts and entry.kind is Kind.DIRECTORY, "it does not start with the root directory")
        else:
            in_place = parts > previous and bool(parents) and parents[-1] == parts[:-1]
            _require(in_place, f"{shown(entry.path)} stands in the wrong place")
        if entry.kind is Kind.DIRECTORY:
            parents.append(parts)
        elif entry.kind is Kind.HARD_LINK:
            _require(entry.target in linked, f"{shown(entry.path)} is a hard link to no earlier file")
        if entry.linked:
            linked.add(entry.path)
        total += entry.stored
        if total > max_bytes:
            raise RefusedError(
                f"the rootfs tar holds more than {max_bytes} bytes of content",
                remedy="raise the limit, or exclude what the worker writes there",
                reason="RootfsTarTooLarge",
                limit=max_bytes,
            )
        segments(tar, entry)
        previous = parts
        offset = entry.start + _padded(entry.stored)
        yield entry
    _require(previous is not None, "it is empty")
    size = os.fstat(tar).st_size
    _require(size == offset + len(END), f"it has {size} bytes, not {offset + len(END)}")


def entry_at(tar: int, offset: int) -> Entry | None:
    """Parse and check the one entry whose header starts at ``offset``; None: the end stands there."""
    go_on()
    block = _exactly(tar, BLOCK, offset)
    if not any(block):
        _require(not any(_exactly(tar, BLOCK, offset + BLOCK)), "it goes on behind its end")
        return None
    try:
        info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        if info.type != tarfile.XHDTYPE or not 0 < info.size <= MAX_HEADER_BYTES:
            info.type = b"?"
        _require(info.type == tarfile.XHDTYPE, f"at byte {offset} stands no pax header of ours")
        records = _records(_exactly(tar, info.size, offset + BLOCK))
        start = offset + BLOCK + _padded(info.size)
        info = tarfile.TarInfo.frombuf(_exactly(tar, BLOCK, start), "utf-8", "surrogateescape")
        return _entry(info, records, offset, start + BLOCK)
    except (tarfile.HeaderError, ValueError) as error:
        raise _damaged(f"at byte {offset}: {error}") from None


def segments(tar: int, entry: Entry) -> list[tuple[int, int, int]]:
    """List where a file's content goes: (place in the tar, offset in the file, length), ascending.

    :raises IntegrityError: the map of a sparse file is out of order, overlaps or does not fit the sizes.
    """
    if not entry.sparse:
        return [(entry.start, 0, entry.size)] if entry.size else []
    bad = f"{shown(entry.path)} has a bad map of its holes"
    first = os.pread(tar, min(entry.stored, NUMBER_BYTES), entry.start).partition(b"\n")[0]
    _require(_NUMBER.fullmatch(first) is not None and int(first) <= MAX_SEGMENTS, bad)
    count = 1 + 2 * int(first)
    text = os.pread(tar, min(entry.stored, count * NUMBER_BYTES), entry.start)
    fields = text.split(b"\n", count)
    _require(len(fields) == count + 1 and all(map(_NUMBER.fullmatch, fields[:count])), bad)
    numbers = [int(number) for number in fields[1:count]]
    place = entry.start + _padded(len(text) - len(fields[count]))
    end = 0
    found: list[tuple[int, int, int]] = []
    for start, length in zip(numbers[::2], numbers[1::2], strict=True):
        _require(end <= start <= start + length <= entry.size, bad)
        end = start + length
        _require(length % BLOCK == 0 or end == entry.size, bad)
        if length:
            found.append((place, start, length))
        place += length
    _require(place == entry.start + entry.stored, bad)
    return found


# one entry ----------------------------------------------------------------------------------------------


def _damaged(what: str) -> IntegrityError:
    return IntegrityError(
        f"the rootfs tar is not whole: {what}",
        remedy="remove the checkpoint and take it again",
        reason="RootfsTarDamaged",
    )


def _require(fulfilled: bool, what: str) -> None:
    if not fulfilled:
        raise _damaged(what)


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _exactly(tar: int, size: int, offset: int) -> bytes:
    data = os.pread(tar, size, offset)
    _require(len(data) == size, f"it ends at byte {offset + len(data)}")
    return data


def _records(body: bytes) -> dict[str, bytes]:
    """Parse pax records: ``LENGTH KEYWORD=VALUE`` and a line end, the length that of the whole record."""
    found: dict[str, bytes] = {}
    position = 0
    while position < len(body):
        match = _RECORD.match(body, position)
        _require(match is not None, "a pax record is malformed")
        assert match is not None
        end = position + int(match[1])
        _require(match.end() < end <= len(body) and body[end - 1] == ord("\n"), "a pax record is malformed")
        keyword = match[2].decode("ascii", "replace")
        ours = keyword in _PLAIN_RECORDS or keyword in _OUR_RECORDS or keyword.startswith(XATTR)
        _require(ours and keyword not in found, f"a pax record is {keyword[:100]!r}")
        found[keyword] = body[match.end() : end - 1]
        position = end
    return found


def _entry(info: tarfile.TarInfo, records: dict[str, bytes], at: int, start: int) -> Entry:
    kind = Kind(info.type)
    raw = info.name.encode("utf-8", "surrogateescape")
    path = _path(records.get(SPARSE_NAME, records.get("path", raw)), kind)
    link = records.get("linkpath", info.linkname.encode("utf-8", "surrogateescape"))
    stored = _number(records, "size", info.size)
    sparse = SPARSE_SIZE in records
    is_file = kind is Kind.FILE
    _require(is_file or stored == 0, f"{shown(path)} is no file and has content")
    _require(
        is_file or not (records.keys() & {LINKS, SPARSE_NAME, SPARSE_SIZE, *SPARSE_VERSION}), shown(path)
    )
    _require(kind is Kind.DIRECTORY or OPAQUE not in records, f"{shown(path)} is opaque and no directory")
    _require(records.get(OPAQUE, b"1") == records.get(LINKS, b"1") == b"1", f"a flag of {shown(path)} is odd")
    if kind is Kind.WHITEOUT:
        device = (info.devmajor, info.devminor)
        _require(device == (0, 0), f"{shown(path)} is a device {device[0]}/{device[1]}")
    if kind is Kind.SYMLINK:
        _require(0 < len(link) <= MAX_PATH_BYTES and b"\0" not in link, f"{shown(path)} leads nowhere")
    elif kind is Kind.HARD_LINK:
        link = _path(link, kind)
    else:
        _require(not link, f"{shown(path)} is no link and has a target")
    metadata = Metadata(
        mode=info.mode,
        uid=_number(records, "uid", info.uid, MAX_ID),
        gid=_number(records, "gid", info.gid, MAX_ID),
        mtime_ns=_mtime(records),
        xattrs=_xattrs(records),
    )
    _require(0 <= info.mode <= 0o7777, f"{shown(path)} has mode {info.mode:o}")  # noqa: PLR2004 - all bits
    return Entry(
        path=path,
        kind=kind,
        metadata=metadata,
        size=_number(records, SPARSE_SIZE, stored) if is_file else 0,
        target=link,
        opaque=OPAQUE in records,
        linked=LINKS in records,
        sparse=sparse,
        stored=stored,
        start=start,
        at=at,
    )


def _path(raw: bytes, kind: Kind) -> bytes:
    if kind is Kind.DIRECTORY:
        if raw.rstrip(b"/") == b".":
            return b""
        raw = raw.removesuffix(b"/")
    path = raw.removeprefix(b"./")
    sound = raw.startswith(b"./") and len(path) <= MAX_PATH_BYTES and b"\0" not in path
    names = all(0 < len(name) <= MAX_NAME_BYTES and name not in {b".", b".."} for name in path.split(b"/"))
    _require(sound and names, f"{os.fsdecode(raw[:200])!r} is no name below the root")
    return path


def _number(records: dict[str, bytes], keyword: str, plain: int, maximum: int = MAX_OFFSET) -> int:
    text = records.get(keyword)
    if text is not None:
        _require(_NUMBER.fullmatch(text) is not None, f"{keyword} is no number")
        plain = int(text)
    _require(0 <= plain <= maximum, f"{keyword} is {plain}")
    return plain


def _mtime(records: dict[str, bytes]) -> int:
    match = _MTIME.fullmatch(records.get("mtime", b""))
    _require(match is not None and int(match[2]) <= MAX_SECONDS, "there is no sound mtime")
    assert match is not None
    value = int(match[2]) * 10**9 + int(match[3])
    return -value if match[1] else value


def _xattrs(records: dict[str, bytes]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for keyword, value in records.items():
        if keyword.startswith(XATTR):
            escaped = keyword.removeprefix(XATTR).encode()
            raw = _ESCAPE.sub(lambda match: bytes([int(match[1], 16)]), escaped)
            name = os.fsdecode(raw)
            sound = _XATTR.fullmatch(name) is not None and len(raw) <= MAX_NAME_BYTES
            allowed = sound and not name.startswith(OVERLAY_XATTRS) and len(value) <= MAX_XATTR_BYTES
            _require(allowed, f"an extended attribute is {name[:100]!r}")
            found[name] = value
    return found
