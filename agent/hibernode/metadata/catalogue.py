"""The list of records in memory: what every list is answered from, and what watches follow."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Final

from hibernode.errors import UnavailableError
from hibernode.metadata.backend import Change, ChangeKind, WorkerQuery
from hibernode.metadata.records import SourceInstance, SourceStatus

MAX_PENDING: Final = 100_000
"""Records whose change one watcher has not read; from there on it is ended, and has to begin again."""

Key = tuple[str, str]


class Catalogue:
    """Instances by source and worker, without payloads and tensors. Used on the event loop only."""

    def __init__(self) -> None:
        self._records: dict[Key, SourceInstance] = {}
        self._sources: dict[str, dict[str, SourceInstance]] = {}
        self._aliases: dict[str, dict[str, SourceInstance]] = {}
        self._owned: dict[str, dict[str, SourceInstance]] = {}
        self._feeds: set[_Feed] = set()
        self._closed = False

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[SourceInstance]:
        return iter(list(self._records.values()))

    def put(self, instance: SourceInstance) -> None:
        """Add a record, or replace it by a newer state; watches hear of it if anything changed."""
        key = (instance.source_id, instance.worker_id)
        old = self._records.get(key)
        if old == instance:
            return
        if old is not None and old.alias != instance.alias:
            _take(self._aliases, old.alias, old.worker_id)
        if old is not None and old.owner is not None:
            _take(self._owned, old.owner.uid, old.source_id + old.worker_id)
        self._records[key] = instance
        self._sources.setdefault(instance.source_id, {})[instance.worker_id] = instance
        if instance.alias:
            self._aliases.setdefault(instance.alias, {})[instance.worker_id] = instance
        if instance.owner is not None:
            self._owned.setdefault(instance.owner.uid, {})[instance.source_id + instance.worker_id] = instance
        self._tell(Change(ChangeKind.PUT, instance))

    def drop(self, source_id: str, worker_id: str) -> None:
        """Remove a record, if it is there."""
        old = self._records.pop((source_id, worker_id), None)
        if old is not None:
            _take(self._sources, source_id, worker_id)
            _take(self._aliases, old.alias, worker_id)
            if old.owner is not None:
                _take(self._owned, old.owner.uid, source_id + worker_id)
            self._tell(Change(ChangeKind.GONE, old))

    def find(self, source_id: str, worker_id: str) -> SourceInstance | None:
        """Find a record by its id, or by the other id of its source."""
        found = self._records.get((source_id, worker_id))
        return found or self._aliases.get(source_id, {}).get(worker_id)

    def select(self, query: WorkerQuery) -> list[SourceInstance]:
        """List what matches, the newest ``updated_at`` first, then by ids."""
        if query.min_training_step is not None:
            return []
        candidates: Iterable[SourceInstance]
        if query.owner is not None:
            candidates = self._owned.get(query.owner, {}).values()
        elif query.source_ids is None:
            candidates = self._records.values()
        else:
            merged: dict[Key, SourceInstance] = {}
            for source_id in query.source_ids:
                for table in (self._sources, self._aliases):
                    for one in table.get(source_id, {}).values():
                        merged[one.source_id, one.worker_id] = one
            candidates = merged.values()
        found = sorted(
            (one for one in candidates if _matches(one, query)),
            key=lambda one: (-one.updated_at, one.source_id, one.worker_id),
        )
        return found[: query.limit] if query.limit > 0 else found

    def sources(self) -> list[tuple[str, str]]:
        """List the sources by id, each with the model name of its first worker."""
        return [
            (source_id, workers[min(workers)].model_name)
            for source_id, workers in sorted(self._sources.items())
        ]

    def by_status(self) -> dict[SourceStatus, int]:
        """Count the records."""
        counts = Counter(one.status for one in self._records.values())
        return {status: counts[status] for status in SourceStatus}

    async def watch(self, source_id: str | None) -> AsyncIterator[Change]:
        """Follow the records, see :class:`~hibernode.metadata.backend.Change`.

        :raises UnavailableError: the reader was so slow that too many changes would have to be kept.
        """
        feed = _Feed(source_id)
        for instance in list(self._records.values()):
            feed.add(Change(ChangeKind.PUT, instance))
        self._feeds.add(feed)
        synced = False
        try:
            while True:
                # Merged in place: what comes in while the reader is busy replaces what it has not read.
                while feed.pending:
                    yield feed.pending.pop(next(iter(feed.pending)))
                if not synced:
                    synced = True
                    yield Change(ChangeKind.SYNCED, None)
                    continue
                if self._closed:
                    return
                if feed.overrun:
                    raise UnavailableError("this watch was too slow", remedy="begin again with a new watch")
                feed.news.clear()
                await feed.news.wait()
        finally:
            self._feeds.discard(feed)

    def close(self) -> None:
        """End every watch."""
        self._closed = True
        for feed in self._feeds:
            feed.news.set()

    def _tell(self, change: Change) -> None:
        for feed in self._feeds:
            feed.add(change)


class _Feed:
    """What one watcher has not read yet: the newest change of each record."""

    def __init__(self, source_id: str | None) -> None:
        self.source_id = source_id
        self.pending: dict[Key, Change] = {}
        self.news = asyncio.Event()
        self.overrun = False

    def add(self, change: Change) -> None:
        one = change.instance
        if one is None or self.overrun or self.source_id not in (None, one.source_id, one.alias or None):
            return
        key = (one.source_id, one.worker_id)
        self.pending.pop(key, None)
        self.pending[key] = change
        if len(self.pending) > MAX_PENDING:
            self.overrun = True
            self.pending.clear()
        self.news.set()


def _take(table: dict[str, dict[str, SourceInstance]], first: str, second: str) -> None:
    """Remove an entry of two levels, and the first level with the last of it."""
    inner = table.get(first)
    if inner is not None:
        inner.pop(second, None)
        if not inner:
            del table[first]


def _matches(one: SourceInstance, query: WorkerQuery) -> bool:
    return (
        (query.status is None or (one.whole and one.status is query.status))
        and (query.model_name is None or one.model_name == query.model_name)
        and (query.rank is None or one.rank == query.rank)
        and (query.min_updated_at is None or one.updated_at >= query.min_updated_at)
    )
