"""A watcher over one directory: events are hints, the rescan behind them is the truth.

Watchdog's inotify thread gives the events; they cross into the event loop by ``call_soon_threadsafe``.
Watchdog's ready-made observers hold each event back for half a second to pair renames, so this uses the
layer below them, which reports each event, and queue overflows, as they come.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hibernode.config import SignalSettings
from hibernode.host import linux

if TYPE_CHECKING:
    from watchdog.observers.inotify_c import InotifyEvent, InotifyFD, WatchDescriptor

log = logging.getLogger("hibernode.watch")

REMOTE: Final = frozenset(
    {
        linux.NFS_SUPER_MAGIC,
        linux.FUSE_SUPER_MAGIC,
        linux.CIFS_SUPER_MAGIC,
        linux.SMB2_SUPER_MAGIC,
        linux.CEPH_SUPER_MAGIC,
        linux.LUSTRE_SUPER_MAGIC,
    }
)
"""File systems that change without this kernel being told."""

RETRY_SECONDS: Final = 30.0
"""After inotify could not be had it is asked for again: somebody else's instances may have gone."""

THROTTLE_SECONDS: Final = 1.0

OnChange = Callable[[set[str] | None], None]


class Mode(StrEnum):
    """How the directory is watched."""

    INOTIFY = "inotify"
    POLL = "poll"
    ABSENT = "absent"


class _Events:
    """What watchdog calls from its thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, watcher: DirectoryWatcher) -> None:
        self._loop = loop
        self._watcher = watcher

    def _call(self, function: Callable[..., None], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            self._loop.call_soon_threadsafe(function, *args)

    def on_event(self, event: InotifyEvent) -> None:
        """Hand over the name, or say that the directory itself has changed."""
        if event.is_delete_self or event.is_move_self:
            self._call(self._watcher.moved)
        elif event.name:
            self._call(self._watcher.named, os.fsdecode(event.name))

    def on_watch_deleted(self, wd: WatchDescriptor) -> None:
        """Take in that the directory is gone."""
        del wd
        self._call(self._watcher.moved)

    def on_queue_overflow(self) -> None:
        """Events were lost."""
        self._call(self._watcher.overflowed)


class DirectoryWatcher:
    """Watches the directory at ``path`` and calls ``on_change(names)`` in the loop.

    ``names`` is None when everything must be looked at: at the start, after each rescan period, after an
    overflow, and when the directory appears or is replaced. An exception in ``on_change`` is logged.
    """

    def __init__(self, path: Path, settings: SignalSettings, on_change: OnChange) -> None:
        self.path = path
        self.mode = Mode.ABSENT
        self.mode_reason = "not started"
        self.overflows = 0
        self.rescans = 0
        self._settings = settings
        self._on_change = on_change
        self._inotify: InotifyFD | None = None
        self._identity: tuple[int, int] | None = None
        self._names: set[str] = set()
        self._wake = asyncio.Event()
        self._moved = False
        self._all = False
        self._task: asyncio.Task[None] | None = None
        self._retry_at = 0.0

    async def start(self) -> None:
        """Begin to watch; the first look comes at once."""
        self._arm()
        self._task = asyncio.create_task(self._run(), name=f"watch {self.path}")

    async def stop(self) -> None:
        """Stop; no thread and no descriptor is left."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        await asyncio.to_thread(self._disarm)
        self.mode, self.mode_reason = Mode.ABSENT, "stopped"

    # called in the loop, on behalf of watchdog's thread

    def named(self, name: str) -> None:
        """Take in the name of a file that has appeared or was written."""
        self._names.add(name)
        self._wake.set()

    def moved(self) -> None:
        """Take in that the directory was removed or moved away."""
        self._moved = True
        self._wake.set()

    def overflowed(self) -> None:
        """Take in that the kernel has dropped events (FC-24)."""
        self.overflows += 1
        log.warning("%s: the inotify queue overflowed, looking at everything", self.path)
        self._all = True
        self._wake.set()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        self._call(None)
        last = loop.time()
        while True:
            period = (
                self._settings.rescan_seconds if self.mode is Mode.INOTIFY else self._settings.poll_seconds
            )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(last + period):
                    await self._wake.wait()
            self._wake.clear()
            names, self._names = self._names, set()
            due = loop.time() >= last + period
            if self._moved or due:
                self._all |= self._check()
                self._moved = False
            if due:
                last = loop.time()
                self._all |= self.mode is not Mode.ABSENT
            everything, self._all = self._all, False
            if everything:
                self.rescans += 1
                self._call(None)
            elif names:
                self._call(names)

    def _call(self, names: set[str] | None) -> None:
        try:
            self._on_change(names)
        except Exception:
            log.exception("%s: a change could not be handled", self.path)

    def _check(self) -> bool:
        """See whether the path still leads to the directory that is watched; re-arm. True: look again."""
        identity = _identity(self.path)
        retry = self.mode is Mode.POLL and asyncio.get_running_loop().time() >= self._retry_at
        if identity == self._identity and identity is not None and not retry and not self._moved:
            return False
        if identity is None and self._identity is None:
            return False
        before, mode = self._identity, self.mode
        self._disarm()
        self._arm()
        if self._identity != before or self.mode is not mode:
            log.info(
                "%s: now %s%s", self.path, self.mode, f" ({self.mode_reason})" if self.mode_reason else ""
            )
        return self._identity is not None

    def _arm(self) -> None:
        """Watch what is at the path now; the look that follows the watch misses nothing."""
        self._identity = _identity(self.path)
        if self._identity is None:
            self.mode, self.mode_reason = Mode.ABSENT, "the directory does not exist"
            return
        reason = "asked for by signals.watch" if self._settings.watch == "poll" else ""
        if not reason and self._settings.watch == "auto":
            with contextlib.suppress(OSError):
                if linux.filesystem_type(self.path) in REMOTE:
                    reason = "the file system changes without inotify knowing"
        if not reason:
            reason = self._try_inotify()
        if _identity(self.path) != self._identity:
            self.moved()  # replaced while we armed: what is watched may be either of the two
        self.mode = Mode.POLL if reason else Mode.INOTIFY
        self.mode_reason = reason
        if reason:
            self._retry_at = asyncio.get_running_loop().time() + RETRY_SECONDS

    def _try_inotify(self) -> str:
        from watchdog.observers.inotify_c import CallbackId, InotifyConstants, InotifyFD, Mask  # noqa: PLC0415

        # Not IN_CREATE: a file that is being written must not be read before it is closed.
        mask = Mask(
            InotifyConstants.IN_MOVED_TO
            | InotifyConstants.IN_CLOSE_WRITE
            | InotifyConstants.IN_DELETE_SELF
            | InotifyConstants.IN_MOVE_SELF
            | InotifyConstants.IN_ONLYDIR
        )
        try:
            inotify = InotifyFD()
        except OSError as error:
            return _why(error)
        inotify.daemon = True
        inotify.start()
        try:
            events = _Events(asyncio.get_running_loop(), self)
            inotify.add_callback(os.fsencode(self.path), mask, events, CallbackId(1))
        except OSError as error:
            inotify.stop()
            inotify.join()
            return _why(error)
        self._inotify = inotify
        return ""

    def _disarm(self) -> None:
        if self._inotify is not None:
            self._inotify.stop()
            self._inotify.join()
            self._inotify = None


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return (stat.st_dev, stat.st_ino) if path.is_dir() else None


def _why(error: OSError) -> str:
    named = {
        errno.EMFILE: "no inotify instances or descriptors are left (fs.inotify.max_user_instances)",
        errno.ENFILE: "no file descriptors are left on this machine",
        errno.ENOSPC: "no inotify watches are left (fs.inotify.max_user_watches)",
        errno.ENOSYS: "this kernel has no inotify",
    }
    return named.get(error.errno or 0, f"inotify: {error.strerror or error}")
