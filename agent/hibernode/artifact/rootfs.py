"""What a container's processes changed in its root file system, saved as a tar.

The names come from the upper directory of the overlay, content and metadata from the merged view that the
processes have. So the kernel itself answers for what an upper directory alone does not hold: files of which
only the metadata were copied up (metacopy), directories that were renamed (redirect_dir). Such a directory,
and an opaque one, is saved with all that the merged view has in it.

What lies on a mount is no part of the root file system, and neither is a mount point.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from hibernode.artifact import rootfs_tree as tree
from hibernode.artifact.rootfs_tar import (
    MAX_PATH_BYTES,
    OVERLAY_XATTRS,
    Entry,
    Kind,
    Metadata,
    Sink,
    StaleTreeError,
    Writer,
    shown,
)
from hibernode.errors import RefusedError, UsageError

DEFAULT_EXCLUDED: Final = ("/proc/**", "/sys/**", "/dev/**")
"""What the kernel and the runtime fill anew in every container. All else that a worker wrote is kept,
caches too: a restored process may have open, or know the size of, any of it."""

Hook = Callable[[bytes], None]
"""Called with the path before each step; what it raises ends the work. For deadlines, and for tests."""


def no_hook(path: bytes, /) -> None:
    """Do nothing."""


@dataclass(frozen=True, slots=True)
class Saved:
    """What was saved, and what was not.

    ``bytes``: content, without holes. ``excluded``: names that a pattern matched (what is below one is not
    counted). ``sockets``: Unix sockets, which their owner binds anew. ``devices``: device nodes; a worker
    has no right to make one that works. ``mounts``: names that are mount points.
    """

    entries: int
    bytes: int
    whiteouts: int
    excluded: int = 0
    sockets: int = 0
    devices: int = 0
    mounts: int = 0


def save(
    upper: int,
    merged: int,
    out: Sink,
    *,
    index: bool = False,
    excluded: Iterable[str] = DEFAULT_EXCLUDED,
    hook: Hook = no_hook,
) -> Saved:
    """Write the diff of an overlay to ``out``; it is whole only when this returns.

    ``upper`` is a descriptor of the upper directory, ``merged`` one of the root that the processes see
    (``/proc/PID/root``, O_PATH is enough); the tree must be frozen. ``index``: as
    :class:`hibernode.artifact.rootfs_find.Root` has it.

    A pattern of ``excluded`` is matched against the path from the root, ``*`` and ``?`` within a name,
    ``**`` over any number of names. With a ``/`` in front it starts at the root, else anywhere:
    ``/var/cache/*``, ``/proc/**`` (all in it, not the directory itself), ``__pycache__``. What is below a
    directory that matches is not looked at.

    :raises IntegrityError: the two are not of one overlay, or the tree changes.
    :raises RefusedError: a path or the attributes of a file are too long, or with ``index`` a changed file
        has a further name in a lower layer, which changed with it (reason ``SharedHardLink``).
    :raises UsageError: a pattern makes no sense.
    :raises OSError: reading or writing failed.
    """
    ours, theirs = os.fstat(upper), os.fstat(merged)
    for field in ("st_mode", "st_uid", "st_gid", "st_mtime_ns"):
        if getattr(ours, field) != getattr(theirs, field):
            raise StaleTreeError(b"", "is not the root of this upper directory, or was changed")
    patterns = compile_patterns(excluded)
    saver = Saver(Writer(out), merged, upper=upper, index=index, excluded=patterns, hook=hook)
    saver.save(b"")
    return saver.finish()


def save_tree(top: int, out: Sink, *, excluded: Iterable[str] = (), hook: Hook = no_hook) -> Saved:
    """Write all that is below the directory ``top``, as of a tmpfs; the rest is as with :func:`save`.

    Where it is applied, whatever else is there stays: the containers of a pod share one /dev/shm.
    """
    saver = Saver(Writer(out), top, excluded=compile_patterns(excluded), hook=hook)
    saver.save(b"", full=True, alone=False)
    return saver.finish()


def compile_patterns(patterns: Iterable[str]) -> re.Pattern[bytes] | None:
    """Make one expression, to be matched against the whole path from the root; None: no pattern.

    :raises UsageError: a pattern is empty or has an empty name, ``.`` or ``..`` in it.
    """
    found = [_pattern(pattern) for pattern in patterns]
    return re.compile(b"|".join(found), re.DOTALL) if found else None


def _pattern(pattern: str) -> bytes:
    parts = os.fsencode(pattern.removeprefix("/")).split(b"/")
    if any(part in {b"", b".", b".."} for part in parts):
        raise UsageError(
            f"{pattern!r} is no pattern for paths",
            remedy="write it like /var/cache/** or __pycache__",
            reason="BadPattern",
        )
    expression = b"/" if pattern.startswith("/") else b"/(?:[^/]+/)*"
    for part in parts[:-1]:
        expression += b"(?:[^/]+/)*" if part == b"**" else _name(part) + b"/"
    return expression + (b".+" if parts[-1] == b"**" else _name(parts[-1]))


def _name(part: bytes) -> bytes:
    return re.escape(part).replace(rb"\*", b"[^/]*").replace(rb"\?", b"[^/]")


class Saver:
    """One walk over a tree. ``writer`` gets what :meth:`save` finds, in the order of the format.

    ``strict`` refuses what cannot be brought back (sockets and devices) instead of counting it.
    """

    def __init__(
        self,
        writer: Writer,
        merged: int,
        *,
        upper: int | None = None,
        index: bool = False,
        excluded: re.Pattern[bytes] | None = None,
        strict: bool = False,
        hook: Hook = no_hook,
    ) -> None:
        self.writer = writer
        self._merged = merged
        self._upper = upper
        self._index = index
        self._excluded = excluded
        self._strict = strict
        self._hook = hook
        self._linked: dict[tuple[int, int], bytes] = {}
        self._shared: dict[tuple[int, int], bytes] = {}
        self._names_left: dict[tuple[int, int], int] = {}
        self.mounts: list[bytes] = []
        self.excluded = self.sockets = self.devices = 0

    def save(self, path: bytes, *, full: bool = False, alone: bool = True) -> None:
        """Write ``path`` and what is below it: what the upper directory has, or with ``full`` everything.

        ``alone``: where that everything is applied, nothing else shall be there.
        """
        pending = [(path, full)]
        while pending:
            where, whole = pending.pop()
            self._hook(where)
            inner = self._visit(where, whole=whole, opaque=whole and alone and where == path)
            if inner is not None:
                source = self._merged if inner or self._upper is None else self._upper
                pending += [(tree.join(where, name), inner) for name in reversed(tree.names(source, where))]

    def finish(self) -> Saved:
        """Write the end, and count."""
        for key, path in self._shared.items():
            if left := self._names_left[key]:
                raise RefusedError(
                    f"{shown(path)} was changed and has {left} more names (hard links) that were not saved",
                    remedy="let the container runtime mount overlays with index=off",
                    reason="SharedHardLink",
                    path=os.fsdecode(path),
                )
        self.writer.finish()
        return Saved(
            entries=self.writer.entries,
            bytes=self.writer.bytes,
            whiteouts=self.writer.whiteouts,
            excluded=self.excluded,
            sockets=self.sockets,
            devices=self.devices,
            mounts=len(self.mounts),
        )

    def _visit(self, path: bytes, *, whole: bool, opaque: bool) -> bool | None:
        """Write one name; for a directory returns whether all in it is to be saved, else None."""
        if path and self._excluded is not None and self._excluded.fullmatch(b"/" + path):
            self.excluded += 1
            return None
        if len(path) > MAX_PATH_BYTES:
            raise _too_long(path)
        fd = self._open(path, whole=whole)
        if fd is None:
            return None
        try:
            if self._upper is not None and not whole:
                whole = opaque = self._look_above(self._upper, path, os.fstat(fd))
            return self._add(path, fd, whole=whole, opaque=opaque)
        finally:
            os.close(fd)

    def _open(self, path: bytes, *, whole: bool) -> int | None:
        """Open a name of the merged view; None: it was deleted, and that is written, or is a mount point."""
        try:
            return tree.below(self._merged, path)
        except FileNotFoundError:
            if self._upper is None or whole or not _is_whiteout(self._upper, path):
                raise StaleTreeError(path, "vanished") from None
            self.writer.whiteout(path)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            self.mounts.append(path)
        return None

    def _look_above(self, upper: int, path: bytes, seen: os.stat_result) -> bool:
        """Compare a name of the upper directory with the merged view; returns whether it stands alone."""
        with tree.opened(upper, path) as fd:
            status = os.fstat(fd)
            if stat.S_IFMT(status.st_mode) != stat.S_IFMT(seen.st_mode):
                raise StaleTreeError(path, "became something else")
            return stat.S_ISDIR(status.st_mode) and path != b"" and _stands_alone(fd)

    def _add(self, path: bytes, fd: int, *, whole: bool, opaque: bool) -> bool | None:
        status = os.fstat(fd)
        kind = stat.S_IFMT(status.st_mode)
        if kind == stat.S_IFDIR:
            self.writer.add(Entry(path, Kind.DIRECTORY, tree.metadata(fd, status), opaque=opaque))
            return whole
        if kind == stat.S_IFREG:
            self._add_file(path, fd, status)
        elif kind == stat.S_IFLNK:
            target = os.readlink(b"", dir_fd=fd)
            self.writer.add(Entry(path, Kind.SYMLINK, tree.metadata(fd, status), target=target))
        elif kind == stat.S_IFIFO:
            self.writer.add(Entry(path, Kind.FIFO, tree.metadata(fd, status)))
        else:
            self._skip(path, kind, whole=whole)
        return None

    def _add_file(self, path: bytes, fd: int, status: os.stat_result) -> None:
        key = (status.st_dev, status.st_ino)
        if self._index and self._upper is not None and status.st_nlink > 1:
            # The merged view counts the names that lower layers have for a changed file, too.
            self._names_left[key] = self._names_left.get(key, status.st_nlink) - 1
            if _exists(self._upper, path):
                self._shared.setdefault(key, path)
        first = self._linked.get(key) if status.st_nlink > 1 else None
        if first is not None:
            self.writer.add(Entry(path, Kind.HARD_LINK, Metadata(), target=first))
            return
        linked = status.st_nlink > 1
        if linked:
            self._linked[key] = path
        entry = Entry(path, Kind.FILE, tree.metadata(fd, status), size=status.st_size, linked=linked)
        with tree.content(fd, path) as readable:
            self.writer.file(entry, readable)

    def _skip(self, path: bytes, kind: int, *, whole: bool) -> None:
        what = "a Unix socket" if kind == stat.S_IFSOCK else "a device"
        if self._strict:
            raise RefusedError(
                f"{shown(path)} of the target is {what}: it would go, and could not be brought back",
                remedy="start the target without it; nothing was changed",
                reason="CannotUndo",
                path=os.fsdecode(path),
            )
        if kind == stat.S_IFSOCK:
            self.sockets += 1
        else:
            self.devices += 1
        if not whole:
            self.writer.whiteout(path)  # else what it hides in a lower layer would come back


def _stands_alone(upper_fd: int) -> bool:
    """Whether the merged view of this upper directory is not that of the lower ones of its name with it."""
    for name in os.listxattr(tree.magic(upper_fd)):
        if not name.startswith(OVERLAY_XATTRS):
            continue
        mark = name.rpartition(".")[2]
        if mark == "redirect" or (mark == "opaque" and os.getxattr(tree.magic(upper_fd), name) == b"y"):
            return True
    return False


def _is_whiteout(upper: int, path: bytes) -> bool:
    """Whether a name of the upper directory that the merged view does not have looks like a deletion.

    A character device 0/0, or an empty file (with an attribute, in directories marked for that).
    """
    with tree.opened(upper, path) as fd:
        status = os.fstat(fd)
    empty_file = stat.S_ISREG(status.st_mode) and status.st_size == 0
    return empty_file or (stat.S_ISCHR(status.st_mode) and status.st_rdev == 0)


def _exists(top: int, path: bytes) -> bool:
    try:
        os.close(tree.below(top, path))
    except FileNotFoundError:
        return False
    return True


def _too_long(path: bytes) -> RefusedError:
    return RefusedError(
        f"{shown(path[:200])}... is a path of {len(path)} bytes",
        remedy=f"the longest that can be saved has {MAX_PATH_BYTES}; let the worker remove it, or exclude it",
        reason="PathTooLong",
    )
