"""The workers' own ready files, inside their containers, seen as they are made.

A worker's ready file has a path inside its root. The directory that it will be in is opened through
/proc/PID/root and watched by inotify; what an event means is decided by the look that follows it. Where there
can be no watch (too many workers, no inotify instance left, the directory is not there yet) the poll of the
agent finds the file. A directory may be on a file system that hangs, so it is opened by a thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final

from hibernode.apart import each
from hibernode.discovery.container_look import owner_of
from hibernode.discovery.locate import READY, Claim
from hibernode.discovery.watch import Events, Inotify
from hibernode.host import inroot
from hibernode.workload import ProcessKey

log = logging.getLogger("hibernode.ready")

MAX_WATCHES: Final = 64
"""Each takes a thread and one of the 128 inotify instances that a user has by default. A node runs as many
workers as it has GPUs."""


_Place = tuple[ProcessKey, str]
"""A worker and the path of its ready file."""


@dataclass(frozen=True, slots=True)
class _Watched:
    path: str
    events: Events
    inotify: Inotify

    def end(self) -> None:
        self.events.mute()
        self.inotify.stop()


class ReadyWatch:
    """Calls ``on_change()`` in the loop when something happened where a ready file is awaited."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._watched: dict[ProcessKey, _Watched] = {}

    def __len__(self) -> int:
        """Count the directories that are watched."""
        return len(self._watched)

    async def follow(self, claims: Iterable[Claim]) -> None:
        """Watch for these workers and no others; for one whose directory hangs when that has come back.

        :raises StuckError: as :func:`hibernode.apart.each`.
        """
        wanted = {claim.key: claim.contract.ready_file for claim in claims if claim.contract.ready_file}
        for key in [key for key, watched in self._watched.items() if wanted.get(key) != watched.path]:
            self._watched.pop(key).end()
        new = [item for item in wanted.items() if item[0] not in self._watched]
        for (key, _), watched in (await self._watch_all(new)).items():
            if watched is not None:
                self._watched[key] = watched

    async def _watch_all(self, new: list[_Place]) -> dict[_Place, _Watched | None]:
        loop, room = asyncio.get_running_loop(), MAX_WATCHES - len(self._watched)

        def watch(place: _Place) -> _Watched | None:
            nonlocal room
            with contextlib.suppress(OSError, RuntimeError, ValueError):
                if room > 0:
                    watched = self._watch(loop, place[0].pid, place[1])
                    room -= 1
                    return watched
            return None

        def drop(late: _Watched | None) -> None:
            if late is not None:
                late.end()

        return await asyncio.to_thread(
            each, new, watch, lambda place: owner_of(place[0].pid), READY, drop=drop
        )

    def _watch(self, loop: asyncio.AbstractEventLoop, pid: int, path: str) -> _Watched:
        events = Events(loop, self._take)
        with inroot.opened(pid, str(PurePosixPath(path).parent), os.O_PATH | os.O_DIRECTORY) as fd:
            inotify = Inotify()
            # With a dot at the end: the watch does not follow the last link of a path, and this is one.
            inotify.begin(f"/proc/self/fd/{fd}/.", events)
        return _Watched(path, events, inotify)

    def _take(self, names: set[str], overflows: int, stale: bool) -> None:
        del names, overflows, stale
        self._on_change()

    def close(self) -> None:
        """Watch nothing any more."""
        while self._watched:
            self._watched.popitem()[1].end()
