"""Hard links in directories that a worker may write to.

A directory is opened without following a symbolic link, names are used below its descriptor only, nothing
is ever overwritten, and a name is removed only while it is the inode that it should be.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from hibernode.host import linux

Identity = tuple[int, int]
"""(st_dev, st_ino)."""

_RESOLVE: Final = linux.RESOLVE_BENEATH | linux.RESOLVE_NO_SYMLINKS | linux.RESOLVE_NO_MAGICLINKS


@contextmanager
def directory(path: str) -> Iterator[int]:
    """Open the directory at an absolute path.

    :raises OSError: it is absent, no directory, or a symbolic link is on the way (ELOOP).
    """
    root = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        below = path.strip("/") or "."
        fd = linux.openat2(root, below, os.O_RDONLY | os.O_DIRECTORY, resolve=_RESOLVE)
    finally:
        os.close(root)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def held(path: str, *, dir_fd: int | None = None) -> Iterator[int]:
    """Hold the file at ``path`` without opening it; with ``dir_fd`` a name, which may be no link."""
    nofollow = 0 if dir_fd is None else os.O_NOFOLLOW
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC | nofollow, dir_fd=dir_fd)
    try:
        yield fd
    finally:
        os.close(fd)


def identity(fd: int) -> Identity:
    """Tell which inode a descriptor is of."""
    stat = os.fstat(fd)
    return stat.st_dev, stat.st_ino


def is_at(dir_fd: int, name: str, inode: Identity) -> bool:
    """Whether ``name`` is that inode."""
    try:
        stat = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return (stat.st_dev, stat.st_ino) == inode


def link(fd: int, dir_fd: int, name: str) -> None:
    """Give the held file another name, and see that it lasts.

    :raises FileExistsError: the name is taken.
    :raises FileNotFoundError: the file has no name left.
    """
    os.link(f"/proc/self/fd/{fd}", name, dst_dir_fd=dir_fd, follow_symlinks=True)
    os.fsync(dir_fd)


def remove(path: str, inode: Identity) -> bool:
    """Remove the name at an absolute path if it is that inode; whether it was there."""
    parent, _, name = path.rpartition("/")
    with suppress(FileNotFoundError), directory(parent) as dir_fd:
        if is_at(dir_fd, name, inode):
            os.unlink(name, dir_fd=dir_fd)
            return True
    return False
