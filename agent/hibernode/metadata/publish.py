"""What every backend decides in the same way: a publication's status and generation, which news is old."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Final, TypeVar

from hibernode.errors import ConflictError, InvalidArgumentError
from hibernode.metadata.records import (
    SourceIdentity,
    SourceInstance,
    SourceRecord,
    SourceStatus,
    Version,
    WorkerRecord,
)
from hibernode.metadata.times import MS

MAX_SKEW_MS: Final = 60_000
"""A stored time further ahead of this machine's clock is a wrong clock's, not news."""

MANY: Final = 100
"""Tensors that are checked and written by a thread, rather than on the event loop."""

_T = TypeVar("_T")


def settle(
    worker: WorkerRecord, old: SourceInstance | None, digest: str, now: int
) -> tuple[WorkerRecord, int]:
    """Decide what is written for a publication at ``now`` (ns); returns it with its generation (ns).

    ``old`` is what stands, None for nothing. A publication's status of UNKNOWN says nothing: stock clients
    send it, and READY right after. Where the content is what stands and lives, status and generation stay.
    """
    alive = (SourceStatus.READY, SourceStatus.INITIALIZING)
    same = old is not None and old.whole and old.digest == digest
    if old is not None and same and old.status is not SourceStatus.STALE and old.generation:
        status = (
            old.status if worker.status is SourceStatus.UNKNOWN and old.status in alive else worker.status
        )
        return replace(worker, status=status, updated_at=now // MS), old.generation
    generation = max(now, old.generation + 1) if old else now
    return replace(worker, updated_at=now // MS), generation


def superseded(stored: int, updated_at: int, now: int) -> bool:
    """Tell whether a status of ``updated_at`` is older than the one ``stored`` (both ms, ``now`` in ns)."""
    return updated_at < stored <= now // MS + MAX_SKEW_MS


def acceptable(stored: int, now: int) -> int:
    """Give the time (ms) for a status of ``now`` (ns) that what is ``stored`` (ms) does not supersede."""
    return stored if superseded(stored, now // MS, now) else now // MS


def check_rank(found: SourceInstance, rank: int) -> None:
    """Refuse a status for another rank than the record's."""
    if found.rank != rank:
        raise InvalidArgumentError(f"worker {found.worker_id} has rank {found.rank}, not {rank}")


def check_expected(found: SourceInstance, expect: Version | None) -> None:
    """Refuse a change of what is no longer as the caller saw it."""
    if expect is not None and found.version != expect:
        raise ConflictError(
            f"the record of worker {found.worker_id} is at {found.version.revision}, not {expect.revision}",
            remedy="look again",
        )


def shelved(one: SourceInstance, worker: WorkerRecord, identity: SourceIdentity | None) -> SourceRecord:
    """Join what was read before with the status and the times that stand now."""
    fresh = replace(
        worker,
        status=one.status,
        updated_at=one.updated_at,
        source_load=one.source_load,
        topology=one.topology,
    )
    return SourceRecord(one, fresh, identity)


async def for_tensors(worker: WorkerRecord, work: Callable[[], _T]) -> _T:
    """Do something with each tensor of a worker; in a thread where there are many."""
    return await off_loop(len(worker.tensors) > MANY, work)


async def off_loop(large: bool, work: Callable[[], _T]) -> _T:
    """Do what takes long in a thread, and what does not at once."""
    return await asyncio.to_thread(work) if large else work()
