"""A watcher over one directory: events are hints, the look behind them is the truth.

Watchdog's inotify thread gives the events; they cross into the event loop by ``call_soon_threadsafe``.
Watchdog's observers report each event through queues and a second thread, and hold back the removal half
of a rename for 0.5 s; this uses the layer below them, which hands over events and overflows as they come.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import os
import stat
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from watchdog.observers.inotify_c import (
    CallbackId,
    InotifyConstants,
    InotifyEvent,
    InotifyFD,
    Mask,
    WatchDescriptor,
)

from hibernode.host import linux
from hibernode.settings import SignalSettings

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

EVENTS: Final = Mask(
    # Not IN_CREATE: a file that is being written must not be read before it is closed. What comes
    # without a close (a hard link, a directory) is found by the next look.
    InotifyConstants.IN_MOVED_TO
    | InotifyConstants.IN_CLOSE_WRITE
    | InotifyConstants.IN_DELETE_SELF
    | InotifyConstants.IN_MOVE_SELF
    | InotifyConstants.IN_ONLYDIR
    | InotifyConstants.IN_DONT_FOLLOW
)

RETRY_SECONDS: Final = 30.0
"""After inotify could not be had it is asked for again: somebody else's instances may have gone."""

THROTTLE_SECONDS: Final = 0.05
"""Least time between two looks at everything that are not the timer's, whatever happens to the directory."""

MAX_NAMES: Final = 4096
"""Names kept for a loop that is busy; with more than these everything is looked at instead."""

OnChange = Callable[[set[str] | None], None]


class Mode(StrEnum):
    """How the directory is watched."""

    INOTIFY = "inotify"
    POLL = "poll"
    ABSENT = "absent"


@dataclass(frozen=True, slots=True)
class _Place:
    """What stands at the path. ``identity`` is device and inode, None where ``problem`` says why not."""

    identity: tuple[int, int] | None
    problem: str = ""
    remote: bool = False


def _look_at(path: Path) -> _Place:
    try:
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode):
            kind = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "no directory"
            return _Place(None, f"what stands there is {kind}")
        remote = linux.filesystem_type(path) in REMOTE
    except FileNotFoundError:
        return _Place(None, "the directory does not exist")
    except OSError as error:
        return _Place(None, f"the directory cannot be reached: {error.strerror}")
    return _Place((status.st_dev, status.st_ino), remote=remote)


class Events:
    """What watchdog's thread calls. Many events make one call into the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, take: Callable[[set[str], int, bool], None]) -> None:
        self._loop = loop
        self._take = take
        self._lock = threading.Lock()
        self._names: set[str] = set()
        self._overflows = 0
        self._stale = False
        self._called = False
        self._muted = False

    def mute(self) -> None:
        """Report no more: closing a watch says that it was deleted."""
        self._muted = True

    def on_event(self, event: InotifyEvent) -> None:
        """Note the name, or that the directory itself has changed."""
        self._note(os.fsdecode(event.name), stale=event.is_delete_self or event.is_move_self)

    def on_watch_deleted(self, wd: WatchDescriptor) -> None:
        """Note that the directory is gone or unmounted."""
        del wd
        self._note(stale=True)

    def on_queue_overflow(self) -> None:
        """Note that the kernel has dropped events (FC-24), perhaps the end of this watch among them."""
        self._note(stale=True, overflows=1)

    def _note(self, name: str = "", *, stale: bool, overflows: int = 0) -> None:
        with self._lock:
            if name:
                self._names.add(name)
            self._overflows += overflows
            self._stale |= stale or len(self._names) > MAX_NAMES
            if self._stale:
                self._names.clear()
            called, self._called = self._called, True
        if not called:
            with contextlib.suppress(RuntimeError):  # the loop has been closed
                self._loop.call_soon_threadsafe(self._hand_over)

    def _hand_over(self) -> None:
        with self._lock:
            names, self._names = self._names, set()
            overflows, self._overflows = self._overflows, 0
            stale, self._stale = self._stale, False
            self._called = False
        if not self._muted:
            self._take(names, overflows, stale)


class Inotify(InotifyFD):
    """Watchdog's thread around one inotify instance, without the leaks."""

    def __init__(self) -> None:
        self._inotify_fd = -1
        try:
            super().__init__()
        except OSError:
            if self._inotify_fd >= 0:  # it took the last descriptor, and none was left for its pipe
                os.close(self._inotify_fd)
            raise

    @classmethod
    def _create_inotify_fd(cls) -> int:
        fd = super()._create_inotify_fd()
        os.set_inheritable(fd, False)  # it comes without CLOEXEC
        return fd

    def begin(self, path: Path | str, events: Events) -> None:
        """Have ``events`` told what happens at ``path`` from now on.

        :raises OSError: no watch. :raises RuntimeError: no thread. Either way nothing of it remains.
        """
        try:
            self._add(path, events)
            self.start()
        except BaseException:
            self._close_resources()  # close() leaves that to the thread, and there is none
            raise

    def _add(self, path: Path | str, events: Events) -> None:
        if self.add_callback(os.fsencode(path), EVENTS, events, CallbackId(1)) < 0:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))  # watchdog does not raise it


class DirectoryWatcher:
    """Watches the directory at ``path`` and calls ``on_change(names)`` in the loop.

    ``names`` are files that were closed after writing or renamed to their name. None says that
    everything must be looked at: at the start, after each rescan period, after an overflow, when the
    directory appears or is replaced, and at each turn of the poll where inotify cannot work. The watch is
    always there before the look, so nothing falls between them. An exception in ``on_change`` is logged.

    ``mode`` and ``mode_reason`` say how it is watched and why not better; ``overflows`` and ``rescans``
    count queue overflows and looks at everything.
    """

    def __init__(
        self,
        path: Path,
        settings: SignalSettings,
        on_change: OnChange,
        *,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        self.path = path
        self.mode = Mode.ABSENT
        self.mode_reason = "not started"
        self.overflows = 0
        self.rescans = 0
        self._settings = settings
        self._on_change = on_change
        self._retry_seconds = retry_seconds
        self._retry_at = math.inf
        self._identity: tuple[int, int] | None = None
        self._inotify: InotifyFD | None = None
        self._events: Events | None = None
        self._stale = False
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to watch; the first look has been asked for when this returns."""
        await self._turn()
        self._task = asyncio.create_task(self._run(), name=f"watch {self.path}")

    async def stop(self) -> None:
        """Stop; no thread and no descriptor is left."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        self._disarm()
        self.mode, self.mode_reason = Mode.ABSENT, "stopped"

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            turned_at = loop.time()
            inotify = self.mode is Mode.INOTIFY
            period = self._settings.rescan_seconds if inotify else self._settings.poll_seconds
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(turned_at + period):
                    await self._wake.wait()
                    await asyncio.sleep(turned_at + THROTTLE_SECONDS - loop.time())
            await self._turn()

    async def _turn(self) -> None:
        """See that the right directory is watched, then look at everything in it."""
        self._wake.clear()
        try:
            await self._check()
        except Exception:
            log.exception("%s: the watch could not be checked", self.path)
        if self.mode is not Mode.ABSENT:
            self.rescans += 1
            self._call(None)

    def _take(self, names: set[str], overflows: int, stale: bool) -> None:
        """Take in what the thread has noted."""
        self.overflows += overflows
        if overflows:
            log.warning("%s: the inotify queue overflowed, looking at everything", self.path)
        if stale:
            self._stale = True
            self._wake.set()
        if names:
            self._call(names)

    def _call(self, names: set[str] | None) -> None:
        try:
            self._on_change(names)
        except Exception:
            log.exception("%s: a change could not be handled", self.path)

    async def _check(self) -> None:
        stale, self._stale = self._stale, False
        # In a thread: on a remote file system even this look can hang.
        place = await asyncio.to_thread(_look_at, self.path)
        if place.identity is not None and place.identity == self._identity and not stale and self._fit():
            return
        before = self.mode, self.mode_reason
        self._arm(place)
        if (self.mode, self.mode_reason) != before:
            wanted = self.mode is Mode.INOTIFY or (self.mode is Mode.POLL and self._settings.watch == "poll")
            level = logging.INFO if wanted else logging.WARNING
            log.log(level, "%s: %s", self.path, f"{self.mode} {self.mode_reason}".rstrip())
        # Replaced while it was armed: what is watched may be either of the two.
        if self._inotify and (await asyncio.to_thread(_look_at, self.path)).identity != self._identity:
            self._stale = True
            self._wake.set()

    def _fit(self) -> bool:
        """Whether there is no reason to arm anew."""
        if self._inotify is not None:
            return self._inotify.is_alive()
        return asyncio.get_running_loop().time() < self._retry_at

    def _arm(self, place: _Place) -> None:
        self._disarm()
        self._identity = place.identity
        self._retry_at = math.inf
        if place.identity is None:
            self.mode, self.mode_reason = Mode.ABSENT, place.problem
        elif self._settings.watch == "poll":
            self.mode, self.mode_reason = Mode.POLL, "as signals.watch asks"
        elif self._settings.watch == "auto" and place.remote:
            self.mode, self.mode_reason = Mode.POLL, "the file system changes without inotify knowing"
        else:
            self._arm_inotify()

    def _arm_inotify(self) -> None:
        loop = asyncio.get_running_loop()
        events = Events(loop, self._take)
        try:
            inotify = Inotify()
            inotify.begin(self.path, events)
        except (FileNotFoundError, NotADirectoryError):  # it has gone since the look at it
            self._identity = None
            self.mode, self.mode_reason = Mode.ABSENT, "the directory does not exist"
        except (OSError, RuntimeError) as error:
            self._retry_at = loop.time() + self._retry_seconds
            self.mode, self.mode_reason = Mode.POLL, _why(error)
        else:
            self._inotify, self._events = inotify, events
            self.mode, self.mode_reason = Mode.INOTIFY, ""

    def _disarm(self) -> None:
        if self._events is not None:
            self._events.mute()
            self._events = None
        if self._inotify is not None:
            self._inotify.stop()
            self._inotify.join()  # it closes its descriptors
            self._inotify = None


def _why(error: OSError | RuntimeError) -> str:
    if isinstance(error, RuntimeError):
        return f"inotify: {error}"
    named = {
        errno.EMFILE: "no inotify instances or descriptors are left (fs.inotify.max_user_instances)",
        errno.ENFILE: "no file descriptors are left on this machine",
        errno.ENOSPC: "no inotify watches are left (fs.inotify.max_user_watches)",
        errno.ENOSYS: "this kernel has no inotify",
    }
    return named.get(error.errno or 0, f"inotify: {error.strerror or error}")
