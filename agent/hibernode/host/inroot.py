"""Paths as a process sees them: its links are followed, but never out of its root."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from hibernode.host import linux


def open_root(pid: int) -> int:
    """Open the root directory of a process, as a place to resolve from (O_PATH).

    :raises OSError: it is gone, or may not be looked into.
    """
    return os.open(f"/proc/{pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)


def open_below(root: int, path: str, flags: int) -> int:
    """Open ``path`` as a process with this root directory would, through no link of /proc.

    :raises OSError: as open(2). :raises ValueError: ``path`` holds a NUL.
    """
    resolve = linux.RESOLVE_IN_ROOT | linux.RESOLVE_NO_MAGICLINKS
    return linux.openat2(root, path, flags | os.O_CLOEXEC, resolve=resolve)


@contextmanager
def opened(pid: int, path: str, flags: int) -> Iterator[int]:
    """Have ``path`` open while the block runs, as process ``pid`` sees it; errors as :func:`open_below`."""
    root = open_root(pid)
    try:
        fd = open_below(root, path, flags)
    finally:
        os.close(root)
    try:
        yield fd
    finally:
        os.close(fd)
