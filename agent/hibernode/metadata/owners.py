"""The processes behind the records of this node: whose process ends or is frozen is no source any more."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hibernode.errors import ConflictError, HibernodeError, NotFoundError
from hibernode.metadata.backend import MetadataBackend, WorkerQuery
from hibernode.metadata.publish import acceptable
from hibernode.metadata.records import SourceInstance, SourceStatus

TRIES: Final = 20
"""A dead worker's last heartbeat may still be under way; then it is marked in its newer state."""

PAUSE: Final = 0.05
FREEZE_SECONDS: Final = 5.0
"""What a checkpoint waits for its records: peers find out by themselves, only later."""

_PID: Final = re.compile(r"^Pid:\t(-?\d+)$", re.MULTILINE | re.ASCII)

log = logging.getLogger(__name__)

Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class _Owner:
    """The process that published a record, held by its pidfd, which is ours."""

    rank: int
    pidfd: int

    def pid(self) -> int:
        """Tell its pid in this process's pid namespace; -1 once it has been reaped."""
        found = _PID.search(Path(f"/proc/self/fdinfo/{self.pidfd}").read_text("ascii"))
        return int(found[1]) if found else -1


class OwnerWatch:
    """Marks records STALE when their process ends, or is about to be frozen. Used on the event loop only."""

    def __init__(self, backend: MetadataBackend, *, clock: Callable[[], int] = time.time_ns) -> None:
        self._backend, self._clock = backend, clock
        self._owners: dict[Key, _Owner] = {}
        self._tasks: set[asyncio.Task[bool]] = set()

    def __len__(self) -> int:
        return len(self._owners)

    def register(self, source_id: str, worker_id: str, rank: int, pidfd: int) -> None:
        """Watch the process that published a record; it takes the place of an older one of that record.

        Call it before a publication, so that no older process's end can hit the new record, and again after
        it, so that an end in between is noticed. ``pidfd`` is duplicated and stays the caller's. A process
        that has ended already is noticed at once.

        :raises OSError: EBADF, EMFILE; an older registration stands then.
        """
        key, owner = (source_id, worker_id), _Owner(rank, os.dup(pidfd))
        self.forget(source_id, worker_id)
        self._owners[key] = owner
        asyncio.get_running_loop().add_reader(owner.pidfd, self._ended, key)

    def forget(self, source_id: str, worker_id: str) -> None:
        """Watch it no longer: its record was removed, or another process has it now."""
        owner = self._owners.pop((source_id, worker_id), None)
        if owner is not None:
            asyncio.get_running_loop().remove_reader(owner.pidfd)
            os.close(owner.pidfd)

    async def before_freeze(self, pids: Collection[int], *, seconds: float = FREEZE_SECONDS) -> int:
        """Mark the records of processes that are about to be checkpointed; returns how many are STALE now.

        It takes no longer than ``seconds`` and never fails: a record that cannot be marked now is the
        reaper's. The processes are watched on, as a checkpoint may leave them running.
        """
        due = {key: owner for key, owner in self._owners.items() if owner.pid() in pids}
        marks = [asyncio.create_task(self._mark(key, owner.rank)) for key, owner in due.items()]
        if not marks:
            return 0
        done, late = await asyncio.wait(marks, timeout=seconds)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        if late:
            log.warning("%d records of workers to be frozen could not be marked in time", len(late))
        return sum(task.result() for task in done)

    async def close(self) -> None:
        """Watch nothing any more; records stay as they are."""
        for key in list(self._owners):
            self.forget(*key)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, key: Key) -> None:
        """Take it that a process has ended."""
        rank = self._owners[key].rank
        self.forget(*key)
        task = asyncio.create_task(self._mark(key, rank, dead=True), name="metadata owner ended")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _mark(self, key: Key, rank: int, *, dead: bool = False) -> bool:
        """Mark a record STALE, unless another process has published it by now; True if it is STALE."""
        try:
            for _ in range(TRIES):
                one = None if dead and key in self._owners else await self._find(key)
                if one is None or not one.whole or one.status is SourceStatus.STALE:
                    return one is not None and one.whole
                at = acceptable(one.updated_at, self._clock())
                with suppress(ConflictError):
                    return await self._backend.update_status(
                        *key, rank, SourceStatus.STALE, at, expect=one.version
                    )
                await asyncio.sleep(PAUSE)
        except NotFoundError:
            return False
        except HibernodeError as error:
            log.warning("worker %s of source %s is left to the reaper: %s", key[1], key[0], error)
            return False
        log.warning("worker %s of source %s does not stand still and is left to the reaper", key[1], key[0])
        return False

    async def _find(self, key: Key) -> SourceInstance | None:
        found = await self._backend.list_workers(WorkerQuery(source_ids=[key[0]]))
        return next((one for one in found if one.worker_id == key[1]), None)
