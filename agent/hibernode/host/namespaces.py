"""Namespaces of a process: to enter them, and what an IPC namespace holds."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from hibernode.host import linux
from hibernode.host.procfs import read_bounded

T = TypeVar("T")

SYSV: Final = {"shm": "shared memory segment", "sem": "semaphore set", "msg": "message queue"}
"""Kinds of SysV objects: files of /proc/sysvipc, a line for each object below a heading."""

MAX_BYTES: Final = 16 << 20
"""A namespace may hold 32,768 of a kind, each a line of some hundred bytes."""


def open_namespace(pid: int, kind: str) -> int:
    """Open a process's namespace of a kind, such as ``ipc``.

    :raises ProcessLookupError: it has ended.
    """
    try:
        return os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise ProcessLookupError(errno.ESRCH, f"process {pid} is gone") from None


def inside(namespaces: Sequence[int], work: Callable[[], T]) -> T:
    """Do ``work`` in namespaces that are open, with none of our own threads in them afterwards.

    What it forks begins there. Not for mount and user namespaces, which no single thread can enter.
    """

    def enter() -> T:
        for fd in namespaces:
            linux.setns(fd)
        return work()

    with ThreadPoolExecutor(1) as pool:  # its only thread goes there, and ends
        return pool.submit(enter).result()


def sysv_objects(pid: int) -> tuple[str, ...]:
    """Count the SysV objects of a process's IPC namespace: ``2 semaphore sets`` and the like; () without any.

    :raises ProcessLookupError: it has ended.
    """
    namespace = open_namespace(pid, "ipc")
    try:
        counts = inside([namespace], lambda: {kind: _count(f"/proc/sysvipc/{kind}") for kind in SYSV})
    finally:
        os.close(namespace)
    return tuple(f"{count} {SYSV[kind]}{'s' * (count > 1)}" for kind, count in counts.items() if count)


def _count(path: str) -> int:
    try:
        return max(0, len(read_bounded(path, MAX_BYTES).splitlines()) - 1)
    except FileNotFoundError:  # a kernel without them
        return 0
