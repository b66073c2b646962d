"""The rights in CRIU's images: what the threads of the tree may do when they are restored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Final

from hibernode.criu.images import (
    UINT32_MAX,
    ImageTask,
    OddError,
    as_integrity,
    fields,
    opened,
    read_pstree,
    records,
)
from hibernode.host.safefs import Dir

CORE_MAGIC: Final = 0x55053847
SECCOMP_MAGIC: Final = 0x64413049
"""criu/include/magic.h."""

MAX_IMAGE_BYTES: Final = 64 << 20
"""A thread takes some KiB, a queued signal 128 bytes, a filter 32 KiB at most."""

SECCOMP_FILTER_FLAG_TSYNC: Final = 1
"""linux/seccomp.h."""

_SECCOMP: Final = "seccomp.img"
_FILTER: Final = 1
_FILTER_FLAGS: Final = 3
"""images/seccomp.proto: the field of a seccomp_entry that holds a seccomp_filter, and one of that."""

_MODE_FILTER: Final = 2

_THREAD: Final = 5
"""images/core.proto: the field of a core_entry that holds a thread_core_entry."""

_CREDS, _SECCOMP_MODE, _SECCOMP_FILTER = 10, 11, 12
"""Fields of that one."""

_UID: Final = 1
_UIDS: Final = (_UID, 3, 5, 7)
_GIDS: Final = (2, 4, 6, 8, 14)
_SETS: Final = (9, 10, 11, 12, 19)
_NO_NEW_PRIVS: Final = 18
"""Fields of a creds_entry, images/creds.proto: real, effective, saved and file system ids, and groups; the
inheritable, permitted, effective, bounding and ambient capabilities, each of two numbers, the lower half
first."""


@dataclass(frozen=True, slots=True)
class Rights:
    """What a thread has, or all threads between them.

    ``uids`` and ``gids``: every kind of id, groups among them, in order. ``capabilities``: a mask, the union
    of all sets. ``no_new_privs`` and ``seccomp``: every thread has it set, has a filter.
    """

    uids: tuple[int, ...]
    gids: tuple[int, ...]
    capabilities: int
    no_new_privs: bool
    seccomp: bool


def read_rights(images_dir: Dir | Path) -> Rights:
    """Unite the rights of all threads; a zombie has none.

    :raises IntegrityError: an image of a task is absent, no regular file, or damaged.
    """
    with opened(images_dir) as directory:
        tasks = read_pstree(directory)
        synced = _synced_filters(directory)
        found = [rights for task in tasks for rights in _task(directory, task, synced)]
    capabilities = 0
    for rights in found:
        capabilities |= rights.capabilities
    return Rights(
        uids=_united(rights.uids for rights in found),
        gids=_united(rights.gids for rights in found),
        capabilities=capabilities,
        no_new_privs=all(rights.no_new_privs for rights in found),
        seccomp=all(rights.seccomp for rights in found),
    )


def _united(several: Iterable[Iterable[int]]) -> tuple[int, ...]:
    return tuple(sorted(set(chain.from_iterable(several))))


def _task(directory: Dir, task: ImageTask, synced: frozenset[int]) -> list[Rights]:
    """Read the rights of a task's threads, the leader's first; of a zombie none.

    Where all threads have the same filters only the leader's are in the images, and it will give them to all.
    """
    found: list[tuple[Rights, int]] = []
    for name in (f"core-{tid}.img" for tid in task.threads):
        with as_integrity(directory, name):
            for record in records(directory.read(name, MAX_IMAGE_BYTES).data, CORE_MAGIC):
                found += [_thread(core) for core in _messages(record, _THREAD)]
    if found and found[0][1] in synced:
        return [replace(rights, seccomp=True) for rights, _ in found]
    return [rights for rights, _ in found]


def _synced_filters(directory: Dir) -> frozenset[int]:
    """List the filters that a leader gives to all its threads, by their places in the image."""
    if _SECCOMP not in directory.names():
        return frozenset()
    with as_integrity(directory, _SECCOMP):
        filters = [
            message
            for record in records(directory.read(_SECCOMP, MAX_IMAGE_BYTES).data, SECCOMP_MAGIC)
            for message in _messages(record, _FILTER)
        ]
        return frozenset(
            index
            for index, message in enumerate(filters)
            for number, value in fields(message)
            if number == _FILTER_FLAGS and isinstance(value, int) and value & SECCOMP_FILTER_FLAG_TSYNC
        )


def _messages(record: memoryview, wanted: int) -> Iterator[memoryview]:
    """Yield the messages in one field of a record."""
    for number, value in fields(record):
        if number == wanted:
            if isinstance(value, int):
                raise OddError(f"holds a number in field {number}, where a message belongs")
            yield value


def _thread(core: memoryview) -> tuple[Rights, int]:
    """Read a thread_core_entry: its rights, and the place of its last filter, -1 without one."""
    single = {number: value for number, value in fields(core) if isinstance(value, int)}
    mode = single.get(_SECCOMP_MODE, 0)
    creds = _creds(core)
    capabilities = 0
    for kind in _SETS:
        for index, word in enumerate(creds[kind][:2]):
            capabilities |= word << 32 * index
    rights = Rights(
        uids=_united(creds[number] for number in _UIDS),
        gids=_united(creds[number] for number in _GIDS),
        capabilities=capabilities,
        no_new_privs=any(creds[_NO_NEW_PRIVS]),
        seccomp=bool(mode),
    )
    return rights, single.get(_SECCOMP_FILTER, 0) if mode == _MODE_FILTER else -1


def _creds(core: memoryview) -> dict[int, list[int]]:
    """Read the numbers of a thread's credentials, by field."""
    found: dict[int, list[int]] = {number: [] for number in (*_UIDS, *_GIDS, *_SETS, _NO_NEW_PRIVS)}
    for creds in _messages(core, _CREDS):
        for number, value in fields(creds):
            if number in found:
                if not isinstance(value, int) or value > UINT32_MAX:
                    raise OddError(f"holds credentials whose field {number} is no number of 32 bits")
                found[number].append(value)
    if not found[_UID]:  # CRIU would look for them in a file of older releases
        raise OddError("holds a thread without credentials")
    return found
