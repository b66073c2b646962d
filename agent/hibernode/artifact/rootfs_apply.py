"""A rootfs diff brought into another container's root, and out again.

Two phases. The first reads the whole tar and changes nothing: it writes the inverse diff, the full present
content of all that will go and a whiteout for all that will come. The second changes the tree. Whatever
ends it, applying the inverse brings the tree back, for that does not ask what state a path is in.

The tree is hostile, its processes may even run: each parent is resolved anew by openat2(2) without links
and mounts, and what stands under a name is removed and made anew, never written through.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from typing import BinaryIO, Final

from hibernode.apart import go_on
from hibernode.artifact import rootfs_tree as tree
from hibernode.artifact.rootfs import Hook, Saver, no_hook
from hibernode.artifact.rootfs_read import Summary, check, entry_at, read, segments
from hibernode.artifact.rootfs_tar import Entry, Kind, Writer, shown
from hibernode.errors import IntegrityError, RefusedError
from hibernode.host import linux
from hibernode.host.safefs import RESOLVE

NO_LIMIT: Final = 1 << 62
COPY_BYTES: Final = 64 << 20
"""Copied at once: a slow disk takes a second for it."""


def apply(root: int, tar: int, undo_to: BinaryIO, *, max_bytes: int, hook: Hook = no_hook) -> Summary:
    """Make the tree below ``root`` what ``tar`` says; first write to ``undo_to`` what brings it back.

    ``root``: a descriptor of the directory (``/proc/PID/root``; O_PATH is enough). ``tar``: one of a
    regular file. ``undo_to``: a new file, which is synced before anything changes. Call :func:`undo` after
    any error but those of :func:`prepare`, after which nothing has changed.

    :raises OSError: making something failed, in the middle.
    """
    summary = prepare(root, tar, undo_to, max_bytes=max_bytes, hook=hook)
    perform(root, tar, max_bytes=max_bytes, hook=hook)
    return summary


def undo(root: int, undo_tar: int, *, hook: Hook = no_hook) -> Summary:
    """Bring the tree back from any state that :func:`perform` can leave; may be repeated at will.

    Content, owners, modes, times, attributes and the hard links among what was touched come back. A name
    that was linked to one that was not touched becomes a file of its own.

    :raises IntegrityError: the inverse is not whole: it was never finished, so nothing was changed.
    """
    summary = check(undo_tar, max_bytes=NO_LIMIT)
    perform(root, undo_tar, max_bytes=NO_LIMIT, hook=hook)
    return summary


def prepare(root: int, tar: int, undo_to: BinaryIO, *, max_bytes: int, hook: Hook = no_hook) -> Summary:
    """Do phase one: check all of ``tar`` against the tree and write its inverse; nothing is changed.

    :raises IntegrityError: ``tar`` is not whole, or the tree changes.
    :raises RefusedError: it is too large, leads onto a mount, something that would go cannot be brought
        back, there is not the space, or the target is read-only.
    :raises OSError: the tree cannot be read or the inverse not be written.
    """
    summary = check(tar, max_bytes=max_bytes)
    if os.fstatvfs(root).f_flag & os.ST_RDONLY:
        raise RefusedError(
            "the root file system of the target is read-only",
            remedy="set readOnlyRootFilesystem for both containers or for none; nothing was changed",
            reason="ReadOnlyTarget",
        )
    writer = Writer(undo_to)
    saver = Saver(writer, root, strict=True, hook=hook)
    done: bytes | None = None  # all below it is covered: it is absent, or was saved in full
    on_the_way: set[bytes] = set()  # directories that lead to a mount of the target
    for entry in read(tar, max_bytes=max_bytes):
        if done is not None and (not done or entry.path.startswith(done + b"/")):
            is_directory = entry.kind is Kind.DIRECTORY
            if entry.path in on_the_way and (not is_directory or entry.path in saver.mounts):
                raise _on_mount(entry.path)
            continue
        done = None
        present = _stat(root, entry.path)
        stays = present is not None and stat.S_ISDIR(present.st_mode) and entry.kind is Kind.DIRECTORY
        if present is None:
            if entry.kind is not Kind.WHITEOUT:
                writer.whiteout(entry.path)
        elif stays and not entry.opaque:
            _save_metadata(root, entry.path, writer)
            continue
        else:
            saver.mounts.clear()
            saver.save(entry.path, full=True)
            if saver.mounts and not stays:
                raise _on_mount(entry.path)
            on_the_way = {way for mount in saver.mounts for way in _ways(mount)}
        done = entry.path
    saver.finish()
    undo_to.flush()
    os.fsync(undo_to.fileno())
    _check_space(root, summary.bytes, writer.bytes)
    return summary


def perform(root: int, tar: int, *, max_bytes: int, hook: Hook = no_hook) -> None:
    """Do phase two: change the tree. Directories get their metadata last, when nothing is made in them."""
    target = _Target(root, tar, hook)
    directories: list[int] = []
    for entry in read(tar, max_bytes=max_bytes):
        target.put(entry)
        if entry.kind is Kind.DIRECTORY:
            directories.append(entry.at)
    for at in reversed(directories):
        found = entry_at(tar, at)
        if found is None:
            raise IntegrityError("the rootfs tar changed while it was applied", reason="RootfsTarDamaged")
        target.set_metadata(found)


class _Target:
    """The tree that is changed."""

    def __init__(self, root: int, tar: int, hook: Hook) -> None:
        self._root = root
        self._tar = tar
        self._hook = hook

    def put(self, entry: Entry) -> None:
        """Make what an entry says, in place of whatever is there."""
        path = entry.path
        if entry.kind is Kind.DIRECTORY:
            self._put_directory(path, opaque=entry.opaque)
            return
        self._remove(path)
        if entry.kind is Kind.WHITEOUT:
            return
        directory, _, name = path.rpartition(b"/")
        self._hook(path)
        with tree.opened(self._root, directory, os.O_PATH | os.O_DIRECTORY) as parent:
            _MAKE[entry.kind](self, entry, parent, name)
        if entry.kind not in (Kind.FILE, Kind.HARD_LINK):
            self.set_metadata(entry)

    def set_metadata(self, entry: Entry) -> None:
        """Set the metadata of what stands where an entry was made; of a directory, when all in it is made."""
        self._hook(entry.path)
        with tree.opened(self._root, entry.path) as fd:
            if stat.S_IFMT(os.fstat(fd).st_mode) != _TYPES[entry.kind]:
                raise _meddled(entry.path)
            tree.set_metadata(fd, entry.metadata)

    def file(self, entry: Entry, parent: int, name: bytes) -> None:
        """Make a regular file, with its content and metadata."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        fd = linux.openat2(parent, name, flags, mode=0o600, resolve=RESOLVE)
        try:
            os.ftruncate(fd, entry.size)
            for place, offset, length in segments(self._tar, entry):
                self._hook(entry.path)
                _copy(self._tar, place, fd, offset, length)
            self._hook(entry.path)
            tree.set_metadata(fd, entry.metadata)
        finally:
            os.close(fd)

    def hard_link(self, entry: Entry, parent: int, name: bytes) -> None:
        """Give a file that was made before a further name."""
        with tree.opened(self._root, entry.target) as fd:
            # The descriptor is no link, and linkat follows the magic one in /proc to its inode.
            os.link(tree.magic(fd), name, dst_dir_fd=parent, follow_symlinks=True)

    def symlink(self, entry: Entry, parent: int, name: bytes) -> None:
        """Make a symbolic link."""
        os.symlink(entry.target, name, dir_fd=parent)

    def fifo(self, _: Entry, parent: int, name: bytes) -> None:
        """Make a FIFO."""
        os.mkfifo(name, 0o600, dir_fd=parent)

    def _put_directory(self, path: bytes, *, opaque: bool) -> None:
        present = _stat(self._root, path)
        if present is not None and stat.S_ISDIR(present.st_mode):
            if opaque:
                self._clear(path)
            return
        self._remove(path)
        directory, _, name = path.rpartition(b"/")
        self._hook(path)
        with tree.opened(self._root, directory, os.O_PATH | os.O_DIRECTORY) as parent:
            os.mkdir(name, 0o700, dir_fd=parent)

    def _remove(self, path: bytes) -> None:
        """Remove whatever is there, if anything is."""
        present = _stat(self._root, path)
        if present is None:
            return
        is_directory = stat.S_ISDIR(present.st_mode)
        if is_directory and self._clear(path):
            raise _on_mount(path)
        self._unlink(path, is_directory=is_directory)

    def _clear(self, path: bytes) -> bool:
        """Empty a directory but for mount points and the way to them; returns whether there are any."""
        mounts = False
        pending, emptied = [path], []
        while pending:
            directory = pending.pop()
            for name in tree.names(self._root, directory):
                inner = tree.join(directory, name)
                # To unlink a mount point of another mount namespace works, and unmounts it there.
                if tree.is_mount(self._root, inner):
                    mounts = True
                    continue
                present = _stat(self._root, inner)
                if present is not None and stat.S_ISDIR(present.st_mode):
                    pending.append(inner)
                    emptied.append(inner)
                elif present is not None:
                    self._unlink(inner, is_directory=False)
        for directory in reversed(emptied):
            try:
                self._unlink(directory, is_directory=True)
            except OSError as error:
                if error.errno != errno.ENOTEMPTY or not mounts:
                    raise
        return mounts

    def _unlink(self, path: bytes, *, is_directory: bool) -> None:
        directory, _, name = path.rpartition(b"/")
        self._hook(path)
        with tree.opened(self._root, directory, os.O_PATH | os.O_DIRECTORY) as parent:
            if is_directory:
                os.rmdir(name, dir_fd=parent)
            else:
                os.unlink(name, dir_fd=parent)


_MAKE: Final[dict[Kind, Callable[[_Target, Entry, int, bytes], None]]] = {
    Kind.FILE: _Target.file,
    Kind.HARD_LINK: _Target.hard_link,
    Kind.SYMLINK: _Target.symlink,
    Kind.FIFO: _Target.fifo,
}
_TYPES: Final = {Kind.DIRECTORY: stat.S_IFDIR, Kind.SYMLINK: stat.S_IFLNK, Kind.FIFO: stat.S_IFIFO}


def _stat(root: int, path: bytes) -> os.stat_result | None:
    """Look at ``path`` without following it; None: it is absent.

    :raises RefusedError: it is or lies on a mount, or its parents are not directories.
    """
    try:
        with tree.opened(root, path) as fd:
            return os.fstat(fd)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.EXDEV:
            raise _on_mount(path) from None
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise _meddled(path) from None
        raise


def _ways(path: bytes) -> Iterator[bytes]:
    """Yield a path and its parents, without the root."""
    while path:
        yield path
        path = path.rpartition(b"/")[0]


def _save_metadata(root: int, path: bytes, writer: Writer) -> None:
    with tree.opened(root, path) as fd:
        writer.add(Entry(path, Kind.DIRECTORY, tree.metadata(fd, os.fstat(fd))))


def _copy(tar: int, place: int, fd: int, offset: int, length: int) -> None:
    os.lseek(fd, offset, os.SEEK_SET)
    while length:
        go_on()
        count = os.sendfile(fd, tar, place, min(length, COPY_BYTES))
        if not count:
            raise IntegrityError("the rootfs tar became shorter", reason="RootfsTarDamaged")
        place += count
        length -= count


def _check_space(root: int, needed: int, freed: int) -> None:
    """Refuse what surely does not fit. ``freed`` bytes go before; those of a lower layer free nothing."""
    status = os.fstatvfs(root)
    free = status.f_bfree * status.f_frsize
    if status.f_blocks and needed > free + freed:
        raise RefusedError(
            f"the rootfs diff needs {needed} bytes, and the target has {free} free",
            remedy="give the target's file system more space; nothing was changed",
            reason="NoSpace",
            needed=needed,
            free=free,
        )


def _on_mount(path: bytes) -> RefusedError:
    return RefusedError(
        f"{shown(path)} of the target is a mount point, lies on a mount or has one in it",
        remedy="give the target the same mounts as the container that was saved",
        reason="OtherMount",
        path=os.fsdecode(path),
    )


def _meddled(path: bytes) -> RefusedError:
    return RefusedError(
        f"{shown(path)} of the target became something else meanwhile",
        remedy="find out what runs in the target; a placeholder changes no files",
        reason="TargetChanged",
        path=os.fsdecode(path),
    )
