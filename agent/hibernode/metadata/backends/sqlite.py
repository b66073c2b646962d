"""Records on the node itself, in one SQLite file: for a machine without a cluster.

The file belongs to one agent at a time. Its connection lives in one thread; lists are answered from memory.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sqlite3
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar

from hibernode.errors import (
    IntegrityError,
    NotFoundError,
    TooLargeError,
    UnavailableError,
)
from hibernode.metadata.backend import BackendStats, Change, WorkerQuery
from hibernode.metadata.catalogue import Catalogue
from hibernode.metadata.gate import check_identity, check_load, check_worker, complete_owner
from hibernode.metadata.identity import alias_of, identity_from, identity_text, mx_source_id
from hibernode.metadata.ids import SourceId, WorkerId
from hibernode.metadata.mapping import (
    content_digest,
    describe,
    source_type_name,
    status_name,
    status_of,
    worker_json,
    worker_of,
)
from hibernode.metadata.publish import check_expected, check_rank, for_tensors, settle, shelved, superseded
from hibernode.metadata.records import (
    PodRef,
    SourceIdentity,
    SourceInstance,
    SourceRecord,
    SourceStatus,
    Version,
    WorkerRecord,
)
from hibernode.metadata.shelf import Shelf
from hibernode.metadata.tensors import StoredTensors, corrupt, load, store
from hibernode.metadata.times import MS

SCHEMA_VERSION: Final = 1
MAX_RECORD_BYTES: Final = 64 << 20
"""Of payload and tensors of one worker; real ones have about half a MiB."""

SPARE_BYTES: Final = 8 << 20
"""What a publication leaves of the disk: without space nobody could send a heartbeat or remove a record."""

WAL_BYTES: Final = 16 << 20
"""To which the journal is cut back once a large record is through it."""

_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS records (
    source_id TEXT NOT NULL, worker_id TEXT NOT NULL, uid TEXT NOT NULL, revision INTEGER NOT NULL,
    model_name TEXT NOT NULL, source_type TEXT NOT NULL, identity TEXT NOT NULL, owner TEXT NOT NULL,
    created_at INTEGER NOT NULL, generation INTEGER NOT NULL, status INTEGER NOT NULL,
    updated_at INTEGER NOT NULL, source_load REAL, tensor_count INTEGER NOT NULL,
    worker TEXT NOT NULL, nixl BLOB NOT NULL, tensors_key TEXT NOT NULL, tensors_digest TEXT NOT NULL,
    tensors BLOB NOT NULL,
    PRIMARY KEY (source_id, worker_id)
) STRICT
"""
_T = TypeVar("_T")

log = logging.getLogger(__name__)


class SqliteBackend:
    """Keeps records in the file ``path``; ``clock`` gives nanoseconds since 1970."""

    name = "sqlite"

    def __init__(self, path: Path, *, clock: Callable[[], int] = time.time_ns) -> None:
        self._path, self._clock = path, clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="metadata")
        self._db: sqlite3.Connection | None = None
        self._catalogue, self._shelf = Catalogue(), Shelf()
        self._revision, self._unreadable = 0, 0
        self._trouble, self._inode = "", 0
        self._writing = asyncio.Lock()
        self._changes: set[asyncio.Task[Any]] = set()

    async def connect(self) -> None:
        """Open the file and read the list of records.

        :raises UnavailableError: another agent has the file, or it cannot be opened.
        """
        for found in await self._run(self._open):
            if found is None:
                self._unreadable += 1
            else:
                self._catalogue.put(found)

    async def close(self) -> None:
        """Close the file; watches end."""
        self._catalogue.close()
        await asyncio.gather(*self._changes, return_exceptions=True)
        if self._db is not None:
            await self._run(self._db.close)
            self._db = None
        self._thread.shutdown()

    async def publish_metadata(
        self, identity: SourceIdentity, worker_id: str, worker: WorkerRecord, *, owner: PodRef | None = None
    ) -> SourceInstance:
        """Write a record in one transaction."""
        check_identity(identity)
        await for_tensors(worker, lambda: check_worker(worker))
        worker_id, owner = WorkerId(worker_id), complete_owner(owner)
        source_id = mx_source_id(identity)
        tensors = await for_tensors(worker, lambda: store(worker.tensors))
        size = len(tensors.data) + len(worker.payload.nixl)
        if size > MAX_RECORD_BYTES:
            raise TooLargeError(
                f"the record of {worker_id} has {size} bytes, more than {MAX_RECORD_BYTES}",
                remedy="register memory in fewer, larger parts (MX_POOL_REG=1)",
            )

        async def write() -> SourceInstance:
            old, now = self._catalogue.find(source_id, worker_id), self._clock()
            if old is not None and old.source_id != source_id:
                old = None
            digest = content_digest(worker, tensors.digest)
            settled, generation = settle(worker, old, digest, now)
            instance = SourceInstance(
                source_id=source_id,
                worker_id=worker_id,
                model_name=identity.model_name,
                source_type=source_type_name(identity.mx_source_type),
                created_at=old.created_at if old else now // MS,
                generation=generation,
                published_at=generation // MS,
                owner=owner or (old.owner if old else None),
                version=self._next(old.version.uid if old else uuid.uuid4().hex),
                alias=alias_of(identity),
            )
            if old is not None:
                # As a merge patch leaves alone what a worker does not tell of.
                load_told = settled.source_load is not None
                settled = replace(
                    settled,
                    topology=settled.topology or old.topology,
                    source_load=settled.source_load if load_told else old.source_load,
                )
            instance = describe(instance, settled, len(worker.tensors), tensors.digest)
            await self._save(lambda: self._write(instance, settled, identity, tensors))
            self._catalogue.put(instance)
            return instance

        return await self._finish(write)

    async def get_metadata(self, source_id: str, worker_id: str) -> SourceRecord | None:
        """Read a record, from memory if it was read before."""
        found = self._catalogue.find(SourceId(source_id), WorkerId(worker_id))
        if found is None:
            return None
        kept = self._shelf.get(found)
        if kept is None:
            ids = (found.source_id, found.worker_id)
            row = await self._run(lambda: self._row(*ids))
            if row is None:
                return None
            found = _instance(row)
            where = f"the record of {found.worker_id}"
            stored = StoredTensors(row["tensors_key"], row["tensors"], row["tensors_digest"])
            tensors = await asyncio.to_thread(load, stored, count=found.tensor_count, where=where)
            kept = (replace(_worker(row), tensors=tensors), identity_from(row["identity"], found.source_id))
            self._shelf.put(found, *kept)
        return shelved(found, kept[0], kept[1])

    async def list_workers(self, query: WorkerQuery = WorkerQuery()) -> list[SourceInstance]:  # noqa: B008
        """List the records that match."""
        return self._catalogue.select(query)

    async def list_sources(self) -> list[tuple[str, str]]:
        """List the sources."""
        return self._catalogue.sources()

    async def remove_metadata(self, source_id: str) -> int:
        """Remove every record of a source."""
        found = self._catalogue.select(WorkerQuery(source_ids=[SourceId(source_id)]))
        return sum([await self.remove_worker(one.source_id, one.worker_id) for one in found])

    async def remove_worker(self, source_id: str, worker_id: str, *, expect: Version | None = None) -> bool:
        """Remove a record."""
        source_id, worker_id = SourceId(source_id), WorkerId(worker_id)

        async def remove() -> bool:
            found = self._catalogue.find(source_id, worker_id)
            if found is None:
                return False
            check_expected(found, expect)
            await self._save(
                lambda: self._execute(
                    "DELETE FROM records WHERE source_id = ? AND worker_id = ?",
                    (found.source_id, found.worker_id),
                )
            )
            self._catalogue.drop(found.source_id, found.worker_id)
            return True

        return await self._finish(remove)

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
        """Write status, time and load."""
        source_id, worker_id = SourceId(source_id), WorkerId(worker_id)
        check_load(source_load)

        async def update() -> bool:
            found = self._catalogue.find(source_id, worker_id)
            if found is None or not found.whole:
                raise NotFoundError(f"there is no record of worker {worker_id} of source {source_id}")
            check_rank(found, rank)
            check_expected(found, expect)
            if superseded(found.updated_at, updated_at, self._clock()):
                return False
            new = replace(
                found,
                status=status,
                updated_at=updated_at,
                source_load=found.source_load if source_load is None else source_load,
                version=self._next(found.version.uid),
            )
            await self._save(
                lambda: self._execute(
                    "UPDATE records SET status = ?, updated_at = ?, source_load = ?, revision = ?"
                    " WHERE source_id = ? AND worker_id = ?",
                    (
                        *(int(status), updated_at, new.source_load, int(new.version.revision)),
                        *(found.source_id, found.worker_id),
                    ),
                )
            )
            self._catalogue.put(new)
            return True

        return await self._finish(update)

    def watch(self, source_id: str | None = None) -> AsyncIterator[Change]:
        """Follow the records."""
        return self._catalogue.watch(None if source_id is None else SourceId(source_id))

    def stats(self) -> BackendStats:
        """Say how it is."""
        return BackendStats(
            synced=self._db is not None,
            by_status=self._catalogue.by_status(),
            unreadable=self._unreadable,
            cached_bytes=self._shelf.bytes,
            trouble=self._trouble or self._outlook(),
        )

    def _outlook(self) -> str:
        """Say what is going to fail; empty: nothing is known to."""
        try:
            mine, free = self._db is None or self._path.stat().st_ino == self._inode, self._free()
        except OSError:
            mine, free = self._db is None, SPARE_BYTES
        if not mine:
            return f"{self._path} was removed or replaced: start the agent again"
        return "" if free >= SPARE_BYTES else f"{self._path.parent} has only {free} bytes free"

    def _free(self) -> int:
        space = os.statvfs(self._path.parent)
        return space.f_bavail * space.f_frsize

    # in the thread ------------------------------------------------------------------------------------

    def _open(self) -> list[SourceInstance | None]:
        """Open the file and list what is in it; None for each that cannot be read."""
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Made here with its mode: SQLite would ask the umask. A link in its place is not followed.
        os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        db = sqlite3.connect(self._path, timeout=1.0, isolation_level=None, check_same_thread=False)
        try:
            db.row_factory = sqlite3.Row
            db.execute("PRAGMA locking_mode = EXCLUSIVE")
            db.execute("PRAGMA journal_mode = WAL")
            # Power lost is workers lost: what the last seconds said of them is worth no fsync each.
            db.execute("PRAGMA synchronous = NORMAL")
            db.execute(f"PRAGMA journal_size_limit = {WAL_BYTES}")
            (version,) = db.execute("PRAGMA user_version").fetchone()
            if version not in (0, SCHEMA_VERSION):
                raise UnavailableError(  # noqa: TRY301 - what closes the file is below
                    f"{self._path} has schema {version}, and this release writes {SCHEMA_VERSION}",
                    remedy="start the release that wrote it, or remove the file: workers publish again",
                )
            db.execute(_SCHEMA)
            db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            (self._revision,) = db.execute("SELECT coalesce(max(revision), 0) FROM records").fetchone()
            # Row by row and without tensors: they may be gigabytes.
            columns = [row["name"] for row in db.execute("PRAGMA table_info(records)")]
            listed = ", ".join(column for column in columns if column != "tensors")
            found = [_listed(row) for row in db.execute(f"SELECT {listed} FROM records")]  # noqa: S608
        except BaseException:
            db.close()
            raise
        self._db, self._inode = db, self._path.stat().st_ino
        return found

    def _write(
        self, one: SourceInstance, worker: WorkerRecord, identity: SourceIdentity, tensors: StoredTensors
    ) -> None:
        size = len(tensors.data) + len(worker.payload.nixl)
        if (free := self._free()) < 2 * size + SPARE_BYTES:  # it goes through the journal into the file
            raise UnavailableError(
                f"a record of {size} bytes is too much for {self._path.parent}, which has {free} free",
                remedy="free some below state_dir",
                reason="NoSpace",
            )
        written = {**worker_json(worker, tensors.digest, worker.updated_at * MS), "nixlMetadata": ""}
        owner = [one.owner.name, one.owner.uid, one.owner.namespace] if one.owner else []
        values = {
            "source_id": one.source_id,
            "worker_id": one.worker_id,
            "uid": one.version.uid,
            "revision": int(one.version.revision),
            "model_name": one.model_name,
            "source_type": one.source_type,
            "identity": identity_text(identity),
            "owner": json.dumps(owner),
            "created_at": one.created_at,
            "generation": one.generation,
            "status": int(one.status),
            "updated_at": one.updated_at,
            "source_load": one.source_load,
            "tensor_count": one.tensor_count,
            "worker": json.dumps(written),
            "nixl": worker.payload.nixl,
            "tensors_key": tensors.key,
            "tensors_digest": tensors.digest,
            "tensors": tensors.data,
        }
        marks = ", ".join(f":{key}" for key in values)
        self._execute(f"INSERT OR REPLACE INTO records ({', '.join(values)}) VALUES ({marks})", values)  # noqa: S608

    def _row(self, source_id: str, worker_id: str) -> sqlite3.Row | None:
        found: sqlite3.Row | None = self._execute(
            "SELECT * FROM records WHERE source_id = ? AND worker_id = ?", (source_id, worker_id)
        ).fetchone()
        return found

    def _execute(self, statement: str, values: Any) -> sqlite3.Cursor:
        if self._db is None:
            raise UnavailableError("the metadata store is closed")
        return self._db.execute(statement, values)

    # on the loop --------------------------------------------------------------------------------------

    def _next(self, uid: str) -> Version:
        self._revision += 1
        return Version(uid, str(self._revision))

    async def _finish(self, work: Callable[[], Awaitable[_T]]) -> _T:
        """Do one change after the other, each to its end even if the caller goes: the list is the file's."""

        async def alone() -> _T:
            async with self._writing:
                return await work()

        task = asyncio.create_task(alone())
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        return await asyncio.shield(task)

    async def _save(self, work: Callable[[], object]) -> None:
        """Change the file; what fails is said once, until a change succeeds."""
        try:
            await self._run(work)
        except UnavailableError as error:
            if not self._trouble:
                log.warning("metadata: %s", error.message)
            self._trouble = error.message
            raise
        self._trouble = ""

    async def _run(self, work: Callable[[], _T]) -> _T:
        """Run in the file's thread, with the faults of SQLite said for people."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except sqlite3.Error as error:
            raise UnavailableError(
                f"the metadata store {self._path} failed: {error}",
                remedy="is another agent running, is the disk full? A broken file may be removed",
            ) from error
        except (OSError, RuntimeError) as error:
            raise UnavailableError(f"the metadata store {self._path} cannot be used: {error}") from error


def _worker(row: sqlite3.Row) -> WorkerRecord:
    """Read the worker of a row, but for its tensors."""
    where = f"the record of worker {row['worker_id']}"
    try:
        raw = json.loads(row["worker"])
    except ValueError as error:
        raise corrupt(where, "it is not JSON") from error
    worker = worker_of(raw, where)
    return replace(
        worker,
        payload=replace(worker.payload, nixl=row["nixl"]),
        status=status_of(status_name(row["status"])),
        updated_at=row["updated_at"],
        source_load=row["source_load"],
    )


def _listed(row: sqlite3.Row) -> SourceInstance | None:
    try:
        return _instance(row)
    except IntegrityError:
        return None


def _instance(row: sqlite3.Row) -> SourceInstance:
    identity = identity_from(row["identity"], row["source_id"])
    try:
        owner = PodRef(*owner) if (owner := json.loads(row["owner"])) else None
    except (ValueError, TypeError) as error:
        raise corrupt(f"the record of worker {row['worker_id']}", "it has no such owner") from error
    instance = SourceInstance(
        source_id=row["source_id"],
        worker_id=row["worker_id"],
        model_name=row["model_name"],
        source_type=row["source_type"],
        created_at=row["created_at"],
        generation=row["generation"],
        published_at=row["generation"] // MS,
        owner=owner,
        version=Version(row["uid"], str(row["revision"])),
        alias=alias_of(identity),
    )
    return describe(instance, _worker(row), row["tensor_count"], row["tensors_digest"])
