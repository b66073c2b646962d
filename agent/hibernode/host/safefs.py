"""Files below a directory that somebody hostile may write to, and publishing that is whole at every instant.

A :class:`Dir` is an open directory. Names below it are resolved by openat2(2) so that no symbolic link,
no ``..`` and no mount can lead out of it, whatever is swapped while we look. Nothing but a regular file
is ever opened: opening a FIFO can wake or block, and opening a device can do anything.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from hibernode.errors import RefusedError, StorageError
from hibernode.host import linux

RESOLVE: Final = (
    linux.RESOLVE_BENEATH | linux.RESOLVE_NO_SYMLINKS | linux.RESOLVE_NO_MAGICLINKS | linux.RESOLVE_NO_XDEV
)

NAME_MAX: Final = 255
"""linux/limits.h: bytes in a name."""

MAX_DEPTH: Final = 64
"""How deep a walk goes; each level holds a descriptor."""

READ_CHUNK: Final = 1 << 20
SWAP_ATTEMPTS: Final = 100
"""How often a file that is replaced while it is opened is looked for again."""

REMOVE_PASSES: Final = 100_000
"""One pass removes one level; a directory that takes more is being filled by somebody else."""

_KINDS: Final = {
    stat.S_IFDIR: "a directory",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}


@dataclass(frozen=True, slots=True)
class FileContent:
    """A file's bytes, and its stat from before they were read."""

    data: bytes
    stat: os.stat_result


class Dir:
    """An open directory; ``path`` is for messages and for outside programs only.

    Where a method takes a *name* it is one component; where it takes a *path* it may have several, all
    below this directory. One that is empty, absolute, too long, or holds ``.``, ``..`` or a NUL is a
    RefusedError with reason ``BadName``. FileNotFoundError and the like pass through as they are.
    """

    __slots__ = ("_fd", "path")

    def __init__(self, fd: int, path: Path) -> None:
        self._fd = fd
        self.path = path

    @classmethod
    def open(cls, path: Path, *, create: bool = False, mode: int = 0o700) -> Self:
        """Open a directory of our own. Links on the way are followed, for the way is the operator's.

        ``create`` makes it, with ``mode``, and its parents where they are absent.

        :raises RefusedError: ``path`` itself is a link or no directory.
        """
        made = False
        if create:
            path.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                path.mkdir(mode=mode)
                made = True
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
            raise _not_a_directory(str(path)) from None
        if made:
            os.fchmod(fd, mode)  # mkdir's is cut by the umask
        return cls(fd, path)

    @property
    def fd(self) -> int:
        """The descriptor, valid until :meth:`close`.

        :raises ValueError: it is closed.
        """
        if self._fd < 0:
            raise ValueError(f"directory {self.path} is closed")
        return self._fd

    def close(self) -> None:
        """Close the descriptor; a second call does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Dir({str(self.path)!r})"

    # looking --------------------------------------------------------------------------------------------

    def subdir(self, path: str, *, create: bool = False, mode: int = 0o700) -> Dir:
        """Open the directory ``path``; ``create`` makes it with ``mode`` if it is absent (one name then).

        :raises RefusedError: it is no directory, or a link stands in the way.
        """
        made = False
        if create:
            _check_name(self.path, path)
            with suppress(FileExistsError):
                os.mkdir(path, mode, dir_fd=self.fd)
                made = True
        fd = self._open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        if made:
            os.fchmod(fd, mode)
        return Dir(fd, self.path / path)

    def stat(self, path: str) -> os.stat_result:
        """Stat ``path`` itself, not what it links to."""
        fd = self._open(path, os.O_PATH | os.O_NOFOLLOW)
        try:
            return os.fstat(fd)
        finally:
            os.close(fd)

    def names(self, limit: int | None = None) -> list[str]:
        """List the names in it, in no order, at most ``limit`` of them."""
        found: list[str] = []
        for entry in self.scan():
            if limit is not None and len(found) >= limit:
                break
            found.append(entry.name)
        return found

    def scan(self) -> Iterator[os.DirEntry[str]]:
        """Yield its entries. They are valid only while this iterator is: they hold its descriptor."""
        # A descriptor of its own: with a shared one two scans would share their place in the list.
        fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.fd)
        try:
            with os.scandir(fd) as entries:
                yield from entries
        finally:
            os.close(fd)

    # reading --------------------------------------------------------------------------------------------

    def open_file(self, path: str, *, require_single_link: bool = True) -> int:
        """Open a regular file for reading; returns a descriptor that never blocks.

        With ``require_single_link`` the file has no other name: a hard link may be somebody else's secret.

        :raises RefusedError: it is something else, reason ``NotRegularFile``, ``HardLinked`` or, for a
            file that is replaced again and again or is under another process's lease, ``FileBusy``.
        """
        for _ in range(SWAP_ATTEMPTS):
            handle = self._open(path, os.O_PATH | os.O_NOFOLLOW)
            try:
                if self._may_open(path, handle, require_single_link=require_single_link):
                    # The handle names the inode that was looked at: what stands under the name by now
                    # does not matter.
                    return os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            except BlockingIOError:
                raise self._refused(path, "is under another process's lease", "FileBusy") from None
            finally:
                os.close(handle)
        raise self._refused(path, "is replaced all the time", "FileBusy")

    def _may_open(self, path: str, handle: int, *, require_single_link: bool) -> bool:
        """Whether the file behind ``handle`` may be opened; False: look again, it was replaced."""
        kind = stat.S_IFMT(os.fstat(handle).st_mode)
        if kind != stat.S_IFREG:
            raise self._refused(path, f"is {_KINDS.get(kind, 'no regular file')}", "NotRegularFile")
        if not require_single_link:
            return True
        # A count of one says nothing if the name that led here is gone: the one link may be elsewhere.
        # So the name must still lead here, and the count is taken on both sides of that look.
        here, there = self.stat(path), os.fstat(handle)
        if (here.st_dev, here.st_ino) != (there.st_dev, there.st_ino):
            return False
        links = max(here.st_nlink, there.st_nlink)
        if links > 1:
            raise self._refused(path, f"has {links} names (hard links)", "HardLinked")
        return here.st_nlink == there.st_nlink == 1

    def read(self, path: str, limit: int, *, require_single_link: bool = True) -> FileContent:
        """Read a regular file of at most ``limit`` bytes.

        :raises RefusedError: as :meth:`open_file`, or reason ``TooLarge``.
        """
        fd = self.open_file(path, require_single_link=require_single_link)
        try:
            status = os.fstat(fd)
            size = status.st_size
            data = bytearray()
            # One byte more than the limit is asked for: a file can grow after its stat.
            while size <= limit and (chunk := os.read(fd, min(READ_CHUNK, limit + 1 - len(data)))):
                data += chunk
                size = max(size, len(data))
        finally:
            os.close(fd)
        if size > limit:
            raise self._refused(path, f"is larger than {limit} bytes", "TooLarge", size=size, limit=limit)
        return FileContent(bytes(data), status)

    # changing -------------------------------------------------------------------------------------------

    def write_atomic(self, name: str, data: bytes, mode: int = 0o644, *, sync: bool = True) -> None:
        """Put ``data`` under ``name``: a reader finds the old file or the new one, never a part.

        A link or another odd thing under ``name`` is replaced, not followed. With ``sync`` it survives a
        power loss. A kill in the middle can leave ``.{name}.{random}.tmp``, see :func:`is_temporary`.

        :raises RefusedError: a directory stands there, reason ``NotRegularFile``.
        """
        _check_name(self.path, name)
        head = os.fsdecode(os.fsencode(name)[:200])  # the whole must stay below NAME_MAX
        temporary = f".{head}.{secrets.token_hex(8)}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(temporary, flags, 0o600, dir_fd=self.fd)
        try:
            try:
                view = memoryview(data)
                while view:
                    view = view[os.write(fd, view) :]
                os.fchmod(fd, mode)
                if sync:
                    os.fsync(fd)
            finally:
                os.close(fd)
            os.rename(temporary, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        except BaseException as error:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=self.fd)
            if isinstance(error, IsADirectoryError):
                raise self._refused(name, "is a directory", "NotRegularFile") from None
            raise
        if sync:
            self.fsync()

    def unlink(self, name: str, *, missing_ok: bool = True) -> None:
        """Remove a name that is no directory; a link goes, what it leads to stays.

        :raises RefusedError: it is a directory.
        """
        _check_name(self.path, name)
        try:
            os.unlink(name, dir_fd=self.fd)
        except FileNotFoundError:
            if not missing_ok:
                raise
        except IsADirectoryError:
            raise self._refused(name, "is a directory", "NotRegularFile") from None

    def rename(
        self, old: str, new: str, *, exchange: bool = False, replace: bool = False, to: Dir | None = None
    ) -> None:
        """Rename ``old`` to ``new`` in this directory or in ``to``; neither is followed.

        ``exchange`` swaps the two; ``replace`` lets ``new`` exist; else an existing ``new`` is a
        FileExistsError. Nothing is synced: call :meth:`fsync` on both directories.

        :raises StorageError: the file system cannot exchange or cannot refuse to replace.
        """
        target = to or self
        _check_name(self.path, old)
        _check_name(target.path, new)
        flags = linux.RENAME_EXCHANGE if exchange else 0 if replace else linux.RENAME_NOREPLACE
        try:
            linux.renameat2(self.fd, old, target.fd, new, flags)
        except OSError as error:
            if error.errno != errno.EINVAL or not flags:
                raise
            raise StorageError(
                f"{str(self.path / old)!r} cannot be renamed to {str(target.path / new)!r} in one step",
                remedy="keep the directory on a local file system such as ext4, xfs, btrfs or tmpfs",
                reason="RenameUnsupported",
                path=str(self.path / old),
            ) from error

    def fsync(self) -> None:
        """Make the names in it survive a power loss."""
        os.fsync(self.fd)

    def remove_tree(self, name: str) -> None:
        """Remove ``name`` and all below it; nothing happens if it is absent.

        No link is followed and no mount is entered. Depth does not matter: the inner directories are
        moved up to the top one by one, so no more than two are ever open.

        :raises StorageError: somebody keeps filling it.
        """
        _check_name(self.path, name)
        try:
            is_directory = stat.S_ISDIR(self.stat(name).st_mode)
        except FileNotFoundError:
            return
        if not is_directory:
            self.unlink(name)
            return
        with self.subdir(name) as top:
            for _ in range(REMOVE_PASSES):
                inner = _unlink_all(top)
                if not inner:
                    break
                for directory in inner:
                    _empty_into(top, directory)
            else:
                raise StorageError(
                    f"{str(self.path / name)!r} is being filled while it is removed",
                    remedy="stop whatever writes to it",
                    reason="DirectoryBusy",
                    path=str(self.path / name),
                )
        os.rmdir(name, dir_fd=self.fd)

    # inside ---------------------------------------------------------------------------------------------

    def _refused(self, path: str, why: str, reason: str, **fields: object) -> RefusedError:
        return _refused(self.path, path, why, reason, **fields)

    def _open(self, path: str, flags: int) -> int:
        for part in path.split("/"):
            _check_name(self.path, part)
        try:
            return linux.openat2(self.fd, path, flags, resolve=RESOLVE)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise self._refused(path, "is or goes through a symbolic link", "NotRegularFile") from None
            if error.errno == errno.EXDEV:
                raise self._refused(path, "lies on another mount", "OtherMount") from None
            if error.errno == errno.ENOTDIR:
                raise _not_a_directory(f"{self.path}/{path}") from None
            raise


def is_temporary(name: str) -> bool:
    """Whether ``name`` is one that :meth:`Dir.write_atomic` makes, left over if nobody is writing."""
    return name.startswith(".") and name.endswith(".tmp")


def _refused(directory: Path, name: str, why: str, reason: str, **fields: object) -> RefusedError:
    shown = f"{directory}/{name[: NAME_MAX + 1]}"
    return RefusedError(
        f"{shown!r} {why}",
        remedy="remove it; only regular files with plain names belong there",
        reason=reason,
        path=shown,
        **fields,
    )


def _check_name(directory: Path, name: str) -> None:
    try:
        size = len(os.fsencode(name))
    except UnicodeEncodeError:  # a lone surrogate, which JSON can carry
        size = 0
    if not 0 < size <= NAME_MAX or name in {".", ".."} or "/" in name or "\0" in name:
        raise _refused(directory, name, "is no name for a file", "BadName")


def _not_a_directory(path: str) -> RefusedError:
    return RefusedError(
        f"{path!r} is not a directory, or not reached through directories only",
        remedy="put a directory there, not a file or a link",
        reason="NotADirectory",
        path=path,
    )


def _unlink_all(directory: Dir) -> list[str]:
    """Remove all that is no directory; returns the names of the directories that are left."""
    inner: list[str] = []
    for name in directory.names():
        try:
            os.unlink(name, dir_fd=directory.fd)
        except FileNotFoundError:
            continue
        except IsADirectoryError:
            inner.append(name)
    return inner


def _empty_into(top: Dir, name: str) -> None:
    """Remove the directory ``name`` of ``top``, moving the directories in it up to ``top``."""
    with top.subdir(name) as directory:
        for inner in _unlink_all(directory):
            try:
                os.rmdir(inner, dir_fd=directory.fd)
            except OSError as error:
                if error.errno != errno.ENOTEMPTY:
                    raise
                directory.rename(inner, secrets.token_hex(16), to=top)
    os.rmdir(name, dir_fd=top.fd)


@contextmanager
def _opened(directory: Dir, name: str, *, require_single_link: bool) -> Iterator[int]:
    fd = directory.open_file(name, require_single_link=require_single_link)
    try:
        yield fd
    finally:
        os.close(fd)


def _walk(top: Dir, depth: int = MAX_DEPTH) -> Iterator[tuple[Dir, list[str]]]:
    """Yield each directory from the innermost to ``top`` itself, with the regular files in it.

    :raises RefusedError: it is deeper than MAX_DEPTH.
    """
    if depth == 0:
        raise RefusedError(
            f"{str(top.path)!r} is nested too deeply",
            remedy="an artifact has two levels; remove what does not belong there",
            reason="TooDeep",
            path=str(top.path),
        )
    files: list[str] = []
    inner: list[str] = []
    for entry in top.scan():
        if entry.is_dir(follow_symlinks=False):
            inner.append(entry.name)
        elif entry.is_file(follow_symlinks=False):
            files.append(entry.name)
    for name in inner:
        with top.subdir(name) as directory:
            yield from _walk(directory, depth - 1)
    yield top, files


def sync_tree(top: Dir) -> None:
    """Make every regular file and directory of a tree survive a power loss, from the inside out."""
    for directory, files in _walk(top):
        for name in files:
            with _opened(directory, name, require_single_link=False) as fd:
                os.fsync(fd)
        directory.fsync()


def chmod_tree(top: Dir) -> None:
    """Close a tree to everybody else: directories 0700, regular files 0600; other things are left.

    :raises RefusedError: a file has another name elsewhere, whose mode would change too.
    """
    for directory, files in _walk(top):
        for name in files:
            with _opened(directory, name, require_single_link=True) as fd:
                os.fchmod(fd, 0o600)
        os.fchmod(directory.fd, 0o700)


def free_bytes(path_or_fd: Path | str | int) -> int:
    """Return the space, in bytes, that a file system has left for users other than root."""
    status = os.statvfs(path_or_fd)
    return status.f_bavail * status.f_frsize
