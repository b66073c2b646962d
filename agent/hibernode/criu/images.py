"""The few facts that are read from CRIU's images: the tree's ids, and which file CRIU will read when.

An image is two magic numbers of 4 bytes and then records, each a length of 4 bytes (all little-endian)
and that many bytes of protobuf. The reader below takes nothing on trust: an artifact may be hostile, and
every odd byte is an IntegrityError that names the file.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hibernode.errors import IntegrityError, RefusedError
from hibernode.host.safefs import Dir

COMMON_MAGIC: Final = 0x54564319
PSTREE_MAGIC: Final = 0x50273030
PAGEMAP_MAGIC: Final = 0x56084025
"""criu/include/magic.h."""

PID_MAX_LIMIT: Final = 4 << 20
"""linux/threads.h: pids are below this on 64-bit kernels."""

UINT32_MAX: Final = (1 << 32) - 1
UINT64_MAX: Final = (1 << 64) - 1
MAX_PSTREE_BYTES: Final = 16 << 20
"""A thread takes 4 bytes and a task 20, so this is far more than a machine runs."""

_PSTREE: Final = "pstree.img"
_SHMEM: Final = re.compile(r"pagemap-shmem-(\d{1,20})\.img", re.ASCII)
_GHOST: Final = re.compile(r"ghost-file-([0-9a-f]{1,8})\.img", re.ASCII)
_HEAD_BYTES: Final = 64
"""Enough for two magic numbers and the first record of a page map, which holds one number."""

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


@dataclass(frozen=True, slots=True)
class ImageTask:
    """One task of the tree, with the ids it will have again.

    ``ppid`` is 0 for the root. ``pgid`` and ``sid`` are 0 when they lie outside the tree's pid namespace.
    ``threads`` holds the thread ids, the leader's (``pid``) first.
    """

    pid: int
    ppid: int
    pgid: int
    sid: int
    threads: tuple[int, ...]


def read_pstree(images_dir: Dir | Path) -> tuple[ImageTask, ...]:
    """Read the process tree, root first, parents before their children.

    :raises IntegrityError: ``pstree.img`` is absent, no regular file, damaged, or tells of no tree.
    """
    with opened(images_dir) as directory, as_integrity(directory, _PSTREE):
        data = directory.read(_PSTREE, MAX_PSTREE_BYTES).data
        tasks = tuple(_task(record) for record in records(data, PSTREE_MAGIC))
        _check_tree(tasks)
        return tasks


def page_files(images_dir: Dir | Path) -> list[str]:
    """Name the files that hold memory and deleted files, in the order in which a restore reads them.

    Deleted files come first, then each task's pages when it is made, parents before children, and shared
    memory last, when all tasks are there.

    :raises IntegrityError: as :func:`read_pstree`, or a page map is damaged or names a file that is absent.
    """
    with opened(images_dir) as directory:
        names = set(directory.names())
        maps = [f"pagemap-{task.pid}.img" for task in read_pstree(directory)]
        maps += _numbered(names, _SHMEM, 10)
        files = _numbered(names, _GHOST, 16)
        for name in maps:
            if name in names:  # a zombie has no memory
                pages = f"pages-{_pages_id(directory, name)}.img"
                if pages not in names:
                    raise _corrupt(directory, name, f"names {pages}, which is absent")
                files.append(pages)
        return list(dict.fromkeys(files))


def _numbered(names: set[str], pattern: re.Pattern[str], base: int) -> list[str]:
    found = [(int(match[1], base), name) for name in names if (match := pattern.fullmatch(name))]
    return [name for _, name in sorted(found)]


# files ------------------------------------------------------------------------------------------------


class OddError(Exception):
    """What is odd about the bytes; turned into an IntegrityError where the file's name is known."""


@contextmanager
def opened(images_dir: Dir | Path) -> Iterator[Dir]:
    """Open the directory of images, if it is not open already."""
    if isinstance(images_dir, Dir):
        yield images_dir
        return
    try:
        directory = Dir.open(images_dir)
    except (FileNotFoundError, RefusedError):
        raise IntegrityError(f"{images_dir}: no directory of images", file=str(images_dir)) from None
    with directory:
        yield directory


@contextmanager
def as_integrity(directory: Dir, name: str) -> Iterator[None]:
    """Name the file in whatever goes wrong with it."""
    try:
        yield
    except FileNotFoundError:
        raise _corrupt(directory, name, "is absent") from None
    except RefusedError as error:
        raise IntegrityError(error.message, file=name) from None
    except OddError as error:
        raise _corrupt(directory, name, str(error)) from None


def _corrupt(directory: Dir, name: str, why: str) -> IntegrityError:
    return IntegrityError(
        f"{directory.path / name} {why}", remedy="the dump is damaged; take the checkpoint again", file=name
    )


def _pages_id(directory: Dir, name: str) -> int:
    """Read the number of the pages file from a page map's first record."""
    with as_integrity(directory, name):
        fd = directory.open_file(name)
        try:
            head = os.read(fd, _HEAD_BYTES)
        finally:
            os.close(fd)
        for record in records(head, PAGEMAP_MAGIC):
            for number, value in fields(record):
                if number == 1 and isinstance(value, int) and value <= UINT32_MAX:
                    return value
            break
        raise OddError("does not name its pages")


# bytes ------------------------------------------------------------------------------------------------


def records(data: bytes, magic: int) -> Iterator[memoryview]:
    """Yield the records of an image whose second magic number is ``magic``."""
    if len(data) < 8 or struct.unpack_from("<II", data) != (COMMON_MAGIC, magic):  # noqa: PLR2004
        raise OddError("does not begin with its magic numbers")
    view, at = memoryview(data), 8
    while at < len(view):
        if len(view) - at < 4:  # noqa: PLR2004
            raise OddError(f"ends in the middle of a length, at byte {at}")
        (size,) = struct.unpack_from("<I", view, at)
        at += 4
        if size > len(view) - at:
            raise OddError(f"ends in the middle of a record, at byte {at}")
        yield view[at : at + size]
        at += size


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """Decode the number at ``at``, of at most 64 bits; returns it and where it ends."""
    value = 0
    for shift, byte in zip(range(0, 70, 7), data[at : at + 10], strict=False):
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80 and value <= UINT64_MAX:  # noqa: PLR2004
            return value, at
    raise OddError("holds a number that does not end or does not fit 64 bits")


def fields(record: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yield the fields of a record: their numbers and values."""
    at = 0
    while at < len(record):
        key, at = _varint(record, at)
        number, kind = key >> 3, key & 7
        if number == 0:
            raise OddError("holds a field without a number")
        if kind == _VARINT:
            value, at = _varint(record, at)
            yield number, value
            continue
        if kind == _BYTES:
            size, at = _varint(record, at)
        elif kind in (_FIXED32, _FIXED64):
            size = 4 if kind == _FIXED32 else 8
        else:
            raise OddError(f"holds a field of unknown kind {kind}")
        if size > len(record) - at:
            raise OddError("holds a field that is longer than its record")
        yield number, record[at : at + size]
        at += size


def _task(record: memoryview) -> ImageTask:
    """Read one pstree entry (images/pstree.proto). Fields of a newer CRIU, above 5, are passed over."""
    single: dict[int, int] = {}
    threads: list[int] = []
    for number, value in fields(record):
        if number > 5:  # noqa: PLR2004
            continue
        # The first thread is the leader. CRIU 4.2 leaves its id uninitialised for a zombie and reads it for
        # nobody, so it is not looked at here either.
        leader = number == 5 and not threads  # noqa: PLR2004
        if not isinstance(value, int) or value > (UINT32_MAX if leader else PID_MAX_LIMIT - 1):
            raise OddError(f"holds a task whose field {number} is no pid")
        if number == 5:  # noqa: PLR2004
            threads.append(value)
        elif number in single:
            raise OddError(f"holds a task with field {number} twice")
        else:
            single[number] = value
    if len(single) != 4:  # noqa: PLR2004
        raise OddError("holds a task without all of pid, ppid, pgid and sid")
    pid = single[1]
    return ImageTask(pid, single[2], single[3], single[4], (pid, *threads[1:]))


def _check_tree(tasks: tuple[ImageTask, ...]) -> None:
    if not tasks:
        raise OddError("holds no task")
    parents: set[int] = {0}
    ids: set[int] = {0}
    for task in tasks:
        if task.ppid not in parents:
            raise OddError(f"holds task {task.pid} without its parent {task.ppid}")
        for thread in task.threads:
            if thread in ids:
                raise OddError(f"holds the id {thread} twice, or as zero")
            ids.add(thread)
        parents.add(task.pid)
        parents.discard(0)  # one root only
