"""One file or directory below an open directory: reached without following a link, read and set whole.

Everything is done through a descriptor opened with O_PATH: that neither opens a device nor waits for a FIFO,
and ``/proc/self/fd/N`` then names this very inode, a symbolic link too, for the calls that want a path.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from hibernode.artifact.rootfs_tar import OVERLAY_XATTRS, Metadata, StaleTreeError
from hibernode.host import linux
from hibernode.host.safefs import RESOLVE

FOREIGN_XATTRS: Final = frozenset({"security.selinux", "security.evm"})
"""The label of the container a file is in, and a seal over its inode number: neither fits another file."""


def below(top: int, path: bytes, flags: int = os.O_PATH | os.O_NOFOLLOW) -> int:
    """Open ``path`` below the directory ``top``; empty: the directory itself.

    :raises OSError: ELOOP, ENOTDIR: a link or no directory on the way; EXDEV: it is or lies on a mount.
    """
    return linux.openat2(top, path or b".", flags, resolve=RESOLVE)


@contextmanager
def opened(top: int, path: bytes, flags: int = os.O_PATH | os.O_NOFOLLOW) -> Iterator[int]:
    """Open as :func:`below` and close at the end."""
    fd = below(top, path, flags)
    try:
        yield fd
    finally:
        os.close(fd)


def is_mount(top: int, path: bytes) -> bool:
    """Whether ``path``, which exists, is a mount point or lies on another mount than ``top``."""
    try:
        os.close(below(top, path))
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        return True
    return False


def names(top: int, path: bytes) -> list[bytes]:
    """List a directory, sorted by bytes."""
    with opened(top, path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW) as fd:
        return sorted(map(os.fsencode, os.listdir(fd)))  # noqa: PTH208 - a Path has no descriptor


def join(directory: bytes, name: bytes) -> bytes:
    """Put a name behind the path of a directory, which is empty for the root."""
    return directory + b"/" + name if directory else name


def magic(fd: int) -> str:
    """Name the inode behind a descriptor."""
    return f"/proc/self/fd/{fd}"


def metadata(fd: int, status: os.stat_result) -> Metadata:
    """Read what :func:`set_metadata` sets; ``status`` is the stat of ``fd``."""
    return Metadata(
        mode=stat.S_IMODE(status.st_mode),
        uid=status.st_uid,
        gid=status.st_gid,
        mtime_ns=status.st_mtime_ns,
        xattrs={name: os.getxattr(magic(fd), name) for name in _xattr_names(fd)},
    )


def set_metadata(fd: int, wanted: Metadata) -> None:
    """Give an inode exactly this owner, mode, time and these extended attributes.

    The order is the kernel's: chown clears set-user-ID and ``security.capability``; an ACL changes the
    group's mode bits; everything else changes the time of a directory.
    """
    path = magic(fd)
    os.chown(path, wanted.uid, wanted.gid)
    for name in _xattr_names(fd):
        if name not in wanted.xattrs:
            os.removexattr(path, name)
    for name, value in wanted.xattrs.items():
        if name not in FOREIGN_XATTRS:
            os.setxattr(path, name, value)
    status = os.fstat(fd)
    if not stat.S_ISLNK(status.st_mode):
        os.chmod(path, wanted.mode)  # noqa: PTH101 - there is no Path here
    os.utime(path, ns=(status.st_atime_ns, wanted.mtime_ns))


@contextmanager
def content(fd: int, path: bytes) -> Iterator[int]:
    """Open the regular file behind a descriptor of O_PATH for reading.

    O_NONBLOCK: the break of a lease that a frozen process holds is an error, not a wait.

    :raises StaleTreeError: its size or time is another at the end.
    """
    readable = os.open(magic(fd), os.O_RDONLY | os.O_NONBLOCK | os.O_NOATIME | os.O_CLOEXEC)
    try:
        before = os.fstat(readable)
        yield readable
        after = os.fstat(readable)
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise StaleTreeError(path, "changed")
    finally:
        os.close(readable)


def _xattr_names(fd: int) -> list[str]:
    listed = os.listxattr(magic(fd))
    return [name for name in listed if not name.startswith(OVERLAY_XATTRS) and name not in FOREIGN_XATTRS]
