"""The processes behind the records of this node: whose process ends or is frozen is no source any more."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Final

from hibernode.errors import ConflictError, HibernodeError, NotFoundError, RefusedError, UnavailableError
from hibernode.host.procfs import Process
from hibernode.metadata.access import Caller
from hibernode.metadata.backend import MetadataBackend, WorkerQuery
from hibernode.metadata.publish import acceptable
from hibernode.metadata.records import SourceInstance, SourceStatus
from hibernode.metadata.roster import Entry
from hibernode.workload import ProcessKey

TRIES: Final = 20
"""A dead worker's last heartbeat may still be under way; then it is marked in its newer state."""

PAUSE: Final = 0.05
DEAD_SECONDS: Final = 90.0
"""For so long after its last heartbeat a record is listed as READY (metadata.heartbeat_seconds)."""

DEAD_PAUSE: Final = 1.0
FREEZE_SECONDS: Final = 5.0
"""What a checkpoint waits for its records: peers find out by themselves, only later."""

MAX_PROCESSES: Final = 1024
"""Each costs a descriptor; one caller may have an eighth. Who is beyond that is left to the reaper."""

log = logging.getLogger(__name__)

Key = tuple[str, str]
"""The id of a source, and that of a worker."""


@dataclass(frozen=True, slots=True)
class _Watched:
    """A process that has published, by a pidfd of ours; ``records`` have their ranks."""

    pidfd: int
    caller: str
    records: dict[Key, int] = field(default_factory=dict)


class OwnerWatch:
    """Marks records STALE when their process ends, or is about to be frozen. Used on the event loop only."""

    def __init__(self, backend: MetadataBackend, *, clock: Callable[[], int] = time.time_ns) -> None:
        self._backend, self._clock = backend, clock
        self._processes: dict[ProcessKey, _Watched] = {}
        self._owners: dict[Key, ProcessKey] = {}
        self._callers = Counter[str]()
        self._publishing = Counter[Key]()
        self._missed: dict[Key, int] = {}
        """Of a process that ended while its record was being published anew; with their ranks."""
        self.changes = 0
        """Grows with every change of what :meth:`entries` gives."""
        self._frozen = Counter[ProcessKey]()
        self._held = Counter[Key]()
        self._tasks: set[asyncio.Task[bool]] = set()

    def __len__(self) -> int:
        """Count the records whose process is watched."""
        return len(self._owners)

    def lives(self, key: Key) -> bool:
        """Tell whether the process that published a record is known, and lives."""
        return key in self._owners

    # changes of records -------------------------------------------------------------------------------

    @asynccontextmanager
    async def publishing(self, caller: Caller, key: Key, rank: int) -> AsyncIterator[None]:
        """Have a record published in the ``async with`` block, and watch the process that did.

        While it is written no older process's end can hit the new record, and the end of the new one is
        noticed however soon it comes.

        :raises RefusedError: ``PeerGone``: the caller's process has ended.
        :raises UnavailableError: ``WorkerFrozen``: it is being checkpointed.
        """
        self._check_free(caller, key)
        with ExitStack() as held:
            process = held.enter_context(_hold(caller.process)) if caller.process is not None else None
            self._publishing[key] += 1
            try:
                yield
                self._missed.pop(key, None)
                self.forget(key)
                if process is not None:
                    self._register(key, rank, process, caller.key)
            finally:
                self._publishing -= Counter([key])
                if key not in self._publishing and key in self._missed:
                    self._mark_soon(key, self._missed.pop(key))
        await self._mark_if_held(caller, key, rank)

    @asynccontextmanager
    async def beating(self, caller: Caller, key: Key, rank: int) -> AsyncIterator[None]:
        """Have a record's worker said to live in the ``async with`` block.

        A process is watched from then on if none is known: the agent was started after the publication.

        :raises RefusedError: ``PeerGone``: the caller's process has ended, and another uses its connection.
        :raises UnavailableError: ``WorkerFrozen``: it is being checkpointed.
        """
        self._check_free(caller, key)
        with ExitStack() as held:
            process = None
            if caller.process is not None and key not in self._owners:
                process = held.enter_context(_hold(caller.process))
            yield
            if process is not None and key not in self._owners and key not in self._publishing:
                self._register(key, rank, process, caller.key)
        await self._mark_if_held(caller, key, rank)

    def forget(self, key: Key) -> None:
        """Watch it no longer: its record was removed, or another process has it now."""
        owner = self._owners.pop(key, None)
        if owner is not None:
            self.changes += 1
            del self._processes[owner].records[key]
            if not self._processes[owner].records:
                self._release(owner)

    # another agent ------------------------------------------------------------------------------------

    async def entries(self) -> list[Entry]:
        """List what is watched, for the next agent.

        :raises UnavailableError: the records are not known now.
        """
        found = []
        for key, owner in list(self._owners.items()):
            one, watched = await self._find(key), self._processes.get(owner)
            if one is not None and watched is not None:
                place = (*key, watched.records.get(key, one.rank), one.generation)
                found.append(Entry(owner.pid, owner.start_ticks, watched.caller, *place))
        return found

    async def resume(self, entries: Iterable[Entry]) -> None:
        """Watch what the agent before did; who has ended meanwhile is noticed now.

        A record that was published anew since is another's: it may be of another node by now.

        :raises UnavailableError: the records are not known now.
        """
        for entry in entries:
            key = (entry.source_id, entry.worker_id)
            one = await self._find(key)
            if one is None or one.generation != entry.generation or key in self._owners:
                continue
            try:
                with _hold(entry.process) as process:
                    self._register(key, entry.rank, process, entry.caller)
            except RefusedError:
                self._mark_soon(key, entry.rank)

    # checkpoints --------------------------------------------------------------------------------------

    @asynccontextmanager
    async def freezing(
        self, processes: Collection[ProcessKey], *, seconds: float = FREEZE_SECONDS
    ) -> AsyncIterator[int]:
        """Mark the records of processes that are about to be checkpointed; gives how many are STALE now.

        Until the end of the ``async with`` block nobody can say that these workers live. To enter takes no
        longer than ``seconds`` and never fails: a record that cannot be marked now is the reaper's. The
        processes are watched on, as a checkpoint may leave them running.
        """
        frozen = set(processes)
        known = frozen & self._processes.keys()
        due = {key: rank for one in known for key, rank in self._processes[one].records.items()}
        self._frozen.update(frozen)
        self._held.update(due.keys())
        try:
            yield await self._mark_all(due, seconds)
        finally:
            self._frozen -= Counter(frozen)
            self._held -= Counter(due.keys())

    async def _mark_all(self, due: Mapping[Key, int], seconds: float) -> int:
        marks = [asyncio.create_task(self._mark(key, rank)) for key, rank in due.items()]
        if not marks:
            return 0
        done, late = await asyncio.wait(marks, timeout=seconds)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        if late:
            log.warning("%d records of workers to be frozen could not be marked in time", len(late))
        return sum(task.result() for task in done)

    def is_frozen(self, caller: Caller) -> bool:
        """Tell whether the caller's process is being checkpointed."""
        return caller.process in self._frozen

    def _is_held(self, caller: Caller, key: Key) -> bool:
        return key in self._held or self.is_frozen(caller)

    def _check_free(self, caller: Caller, key: Key) -> None:
        if self._is_held(caller, key):
            raise UnavailableError(
                f"worker {key[1]} is being checkpointed",
                remedy="its next heartbeat after the checkpoint counts again",
                reason="WorkerFrozen",
            )

    async def _mark_if_held(self, caller: Caller, key: Key, rank: int) -> None:
        """Mark a record again that was written while a checkpoint began."""
        if self._is_held(caller, key):
            await self._mark(key, rank)

    # processes ----------------------------------------------------------------------------------------

    def _register(self, key: Key, rank: int, process: Process, caller: str) -> None:
        """Watch a process for a record of which none is known; one that has ended is noticed at once."""
        watched = self._processes.get(process.key)
        if watched is None:
            if len(self._processes) >= MAX_PROCESSES or self._callers[caller] >= MAX_PROCESSES // 8:
                log.debug("pid %d is one too many: its end is not watched", process.pid)
                return
            watched = _Watched(os.dup(process.fileno()), caller)
            self._processes[process.key] = watched
            self._callers[caller] += 1
            asyncio.get_running_loop().add_reader(watched.pidfd, self._ended, process.key)
        watched.records[key] = rank
        self._owners[key] = process.key
        self.changes += 1

    def _release(self, owner: ProcessKey) -> _Watched:
        """Watch a process no longer."""
        watched = self._processes.pop(owner)
        asyncio.get_running_loop().remove_reader(watched.pidfd)
        os.close(watched.pidfd)
        self._callers -= Counter([watched.caller])
        return watched

    def _ended(self, owner: ProcessKey) -> None:
        """Take it that a process has ended."""
        self.changes += 1
        for key, rank in self._release(owner).records.items():
            del self._owners[key]
            self._mark_soon(key, rank)

    async def close(self) -> None:
        """Watch nothing any more; records stay as they are."""
        for owner in list(self._processes):
            self._release(owner)
        self._owners.clear()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # marks --------------------------------------------------------------------------------------------

    def _mark_soon(self, key: Key, rank: int) -> None:
        """Mark the record of a process that has ended."""
        task = asyncio.create_task(self._mark_dead(key, rank), name="metadata owner ended")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _mark_dead(self, key: Key, rank: int) -> bool:
        """Try again while nothing can be written, for as long as it would be listed as READY."""
        end = time.monotonic() + DEAD_SECONDS
        while True:
            try:
                return await self._mark(key, rank, dead=True)
            except UnavailableError as error:
                if time.monotonic() > end:
                    return _left(key, error)
            await asyncio.sleep(DEAD_PAUSE)

    async def _mark(self, key: Key, rank: int, *, dead: bool = False) -> bool:
        """Mark a record STALE, unless another process has published it by now; True if it is STALE.

        :raises UnavailableError: of one who is dead: it cannot be written now.
        """
        try:
            for _ in range(TRIES):
                if dead and key in self._publishing:
                    self._missed[key] = rank
                    return False
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
            if dead and isinstance(error, UnavailableError):
                raise
            return _left(key, error)
        return _left(key, "it does not stand still")

    async def _find(self, key: Key) -> SourceInstance | None:
        found = await self._backend.list_workers(WorkerQuery(source_ids=[key[0]]))
        return next((one for one in found if one.worker_id == key[1]), None)


def _left(key: Key, why: object) -> bool:
    log.warning("worker %s of source %s is left to the reaper: %s", key[1], key[0], why)
    return False


def _hold(owner: ProcessKey) -> Process:
    """Hold a caller's process.

    :raises RefusedError: it has ended.
    """
    with suppress(OSError):
        process = Process.open(owner.pid)
        if process.key == owner:
            return process
        process.close()
    raise RefusedError(f"process {owner.pid}, which called, has ended", reason="PeerGone")
