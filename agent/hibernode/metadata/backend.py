"""What the service asks of a backend. One test suite holds every backend to it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from hibernode.metadata.records import (
    PodRef,
    SourceIdentity,
    SourceInstance,
    SourceRecord,
    SourceStatus,
    Version,
    WorkerRecord,
)


@dataclass(frozen=True, slots=True)
class WorkerQuery:
    """Which records a list has. None lets all pass; ``limit`` 0 is no limit.

    ``source_ids`` matches a record's id or its alias: pass :func:`hibernode.metadata.identity.ids_of`.
    ``status`` UNKNOWN does not match an object without a worker. ``min_training_step`` matches nothing
    where a backend does not know the step, as upstream's Kubernetes backend. ``owner`` is a uid,
    and is not asked for together with ``source_ids``.
    """

    source_ids: Sequence[str] | None = None
    status: SourceStatus | None = None
    model_name: str | None = None
    rank: int | None = None
    min_training_step: int | None = None
    min_updated_at: int | None = None
    owner: str | None = None
    limit: int = 0


class ChangeKind(StrEnum):
    """What happened to a record."""

    PUT = "put"
    GONE = "gone"
    SYNCED = "synced"


@dataclass(frozen=True, slots=True)
class Change:
    """One change of a record; ``instance`` is its newest state, or the last one before it went.

    A watch begins with a PUT for each record that is there and one SYNCED (``instance`` None), and goes on
    with what happens. Changes of one record that a slow reader has not seen yet are merged into the newest
    one. A peer compares ``instance.generation``: another one than it holds means remove, then add.
    """

    kind: ChangeKind
    instance: SourceInstance | None


@dataclass(frozen=True, slots=True)
class BackendStats:
    """Numbers for metrics and ``status``.

    ``by_status`` counts the records; ``unreadable`` objects that are there but no record can be made of;
    ``age_seconds`` since the list was last known to be the truth (0 for a backend on this machine);
    ``cached_bytes`` is what the cache of whole records holds; ``relists`` and ``retries`` count from the
    start. ``trouble`` says what is wrong now, though records may be served; empty: nothing.
    """

    synced: bool
    by_status: dict[SourceStatus, int]
    unreadable: int = 0
    age_seconds: float = 0.0
    cached_bytes: int = 0
    relists: int = 0
    retries: int = 0
    trouble: str = ""


class MetadataBackend(Protocol):
    """Keeps records of workers.

    Every method may raise :class:`~hibernode.errors.UnavailableError` (an outage, never an empty answer) and
    :class:`~hibernode.errors.InvalidArgumentError` (an id or a field; nothing was written).
    """

    @property
    def name(self) -> str:
        """``sqlite`` or ``kubernetes``."""

    async def connect(self) -> None:
        """Begin; when it returns, lists are whole."""

    async def close(self) -> None:
        """Stop; watches end."""

    async def publish_metadata(
        self, identity: SourceIdentity, worker_id: str, worker: WorkerRecord, *, owner: PodRef | None = None
    ) -> SourceInstance:
        """Write a worker's record under the server's id of ``identity``; whole, or not at all.

        ``worker.updated_at`` is not used: the backend's clock is. A status of UNKNOWN leaves the status of a
        record alone that says the same and is READY or INITIALIZING. The same content again keeps its
        generation, unless the record was STALE. ``owner`` counts when all its parts are filled.

        :raises TooLargeError: the backend cannot hold it; nothing was written.
        """

    async def get_metadata(self, source_id: str, worker_id: str) -> SourceRecord | None:
        """Read one record, by its id or its alias; None if there is none.

        :raises IntegrityError: it is there and not whole (tensors lost, cut, of another count or digest).
        """

    async def list_workers(self, query: WorkerQuery = ...) -> list[SourceInstance]:
        """List the records that match, the newest ``updated_at`` first."""

    async def list_sources(self) -> list[tuple[str, str]]:
        """List the sources as (id, a model name), by id."""

    async def remove_metadata(self, source_id: str) -> int:
        """Remove every record of a source; returns how many there were.

        One that cannot be removed does not keep the others; the error comes at the end.
        """

    async def remove_worker(self, source_id: str, worker_id: str, *, expect: Version | None = None) -> bool:
        """Remove a record; False if there was none.

        :raises ConflictError: it is no longer at ``expect``.
        """

    async def update_status(
        self,
        source_id: str,
        worker_id: str,
        rank: int,
        status: SourceStatus,
        updated_at: int,
        *,
        source_load: float | None = None,
        expect: Version | None = None,
    ) -> bool:
        """Write status and time, and nothing else; False if a newer status stands.

        A stored time that is more than a minute ahead of this machine's clock does not count as newer.

        :raises NotFoundError: there is no such record, or no worker in it.
        :raises InvalidArgumentError: the record is of another rank.
        :raises ConflictError: it is no longer at ``expect``.
        """

    def watch(self, source_id: str | None = None) -> AsyncIterator[Change]:
        """Follow the records, or those of one source; see :class:`Change`. Ends with :meth:`close`."""

    def stats(self) -> BackendStats:
        """Say how it is, at once."""
