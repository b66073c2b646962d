"""Records in the cluster, as ModelMetadata objects and ConfigMaps that the Rust server reads and writes too.

A publication has one moment: the patch of the status. Before it there is an object without a worker and a
ConfigMap that nothing points to; after it a whole record. What fails before it is undone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from hibernode.errors import ConflictError, NotFoundError, UnavailableError
from hibernode.kube.api import CONFLICT, MERGE, NAMES_ONLY, NOT_FOUND, Budget, KubeApi, KubeStatusError
from hibernode.kube.follow import MAX_AGE
from hibernode.kube.objects import conditions_of, is_short_name, metadata_of
from hibernode.metadata.backend import BackendStats, Change, WorkerQuery
from hibernode.metadata.backends.kube_objects import (
    check_size,
    configmap_body,
    instance_or_none,
    mend,
    object_body,
    of_another,
    owned_by,
    stored_tensors,
    version_of,
)
from hibernode.metadata.backends.kube_watch import Mirror
from hibernode.metadata.gate import check_identity, check_load, check_worker, complete_owner
from hibernode.metadata.identity import mx_source_id
from hibernode.metadata.ids import SourceId, WorkerId
from hibernode.metadata.mapping import (
    GROUP,
    LABEL_SOURCE,
    PLURAL,
    VERSION,
    configmap_digest,
    configmap_name,
    content_digest,
    identity_of,
    instance_of,
    object_name,
    ready_condition,
    stale_keys,
    status_name,
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
from hibernode.metadata.tensors import PLAIN_KEY, StoredTensors, corrupt, load, store
from hibernode.metadata.times import MS, write_time

UNDO_SECONDS: Final = 3.0
READERS: Final = 8
"""Reads that go through to the API server at the same time."""

log = logging.getLogger(__name__)


class KubernetesBackend:
    """Keeps records in ``namespace``; ``clock`` gives nanoseconds since 1970."""

    name = "kubernetes"

    def __init__(
        self,
        api: KubeApi,
        namespace: str,
        *,
        clock: Callable[[], int] = time.time_ns,
        max_age: float = MAX_AGE,
    ) -> None:
        if not is_short_name(namespace):
            raise UnavailableError(f"{namespace[:80]!r} is not a namespace", reason="NoCluster")
        self._api, self._namespace, self._clock = api, namespace, clock
        self._objects = f"/apis/{GROUP}/{VERSION}/namespaces/{namespace}/{PLURAL}"
        self._configmaps = f"/api/v1/namespaces/{namespace}/configmaps"
        self._mirror, self._shelf = Mirror(api, self._objects, max_age=max_age), Shelf()
        self._readers = asyncio.Semaphore(READERS)

    async def connect(self) -> None:
        """List the records and begin to watch them.

        :raises UnavailableError: no API server, no leave, or no such objects there.
        """
        await self._mirror.start()

    async def close(self) -> None:
        """Stop watching and close the connections."""
        await self._mirror.stop()
        await self._api.close()

    # publish ------------------------------------------------------------------------------------------

    async def publish_metadata(
        self, identity: SourceIdentity, worker_id: str, worker: WorkerRecord, *, owner: PodRef | None = None
    ) -> SourceInstance:
        """Write a record: object, ConfigMap, then the status that makes it a record."""
        check_identity(identity)
        await for_tensors(worker, lambda: check_worker(worker))
        worker_id, owner = WorkerId(worker_id), complete_owner(owner)
        name = object_name(mx_source_id(identity), worker_id)
        tensors = await for_tensors(worker, lambda: store(worker.tensors))
        configmap = configmap_name(name, worker.rank, tensors.digest)
        check_size(worker, tensors, configmap)
        wanted = object_body(name, self._namespace, identity, owner)
        budget, made = self._api.budget(), _Made()
        try:
            while True:
                try:
                    raw = await self._ensure_object(name, wanted, budget, made)
                    parts = (raw, configmap, worker.rank, tensors, budget)
                    created = await self._ensure_configmap(*parts)
                    old = instance_or_none(raw)
                    new = await self._write_status(raw, old, worker, configmap, budget)
                    if not created:
                        # Another publication may have swept it while nothing pointed to it.
                        await self._ensure_configmap(*parts)
                except KubeStatusError as error:
                    # Somebody else wrote or removed it between two calls: look again.
                    if error.code not in {NOT_FOUND, CONFLICT}:
                        raise _refused(error, name) from error
                    await budget.again(error)
                else:
                    break
        except BaseException:
            await self._undo(name, made)
            raise
        self._shelf.put(new, replace(worker, updated_at=new.updated_at), identity)
        await self._retire(raw, name, configmap)
        return new

    async def _ensure_object(
        self, name: str, wanted: dict[str, Any], budget: Budget, made: _Made
    ) -> dict[str, Any]:
        """Create the object, or mend one that is there: labels, identity, owner, spec."""
        raw = await self._get(f"{self._objects}/{name}", budget)
        if raw is None:
            raw = await self._api.call("POST", self._objects, budget, body=wanted)
            made.version = version_of(raw)
            return raw
        have = metadata_of(raw)
        if have.get("deletionTimestamp"):
            raise KubeStatusError(CONFLICT, "Conflict", f"{name} is being deleted")
        patch = mend(raw, wanted)
        if patch:
            patch.setdefault("metadata", {})["resourceVersion"] = have.get("resourceVersion")
            raw = await self._api.call("PATCH", f"{self._objects}/{name}", budget, body=patch, content=MERGE)
            if made.version is not None:
                made.version = version_of(raw)
        return raw

    async def _ensure_configmap(
        self, raw: dict[str, Any], name: str, rank: int, tensors: StoredTensors, budget: Budget
    ) -> bool:
        """Write the tensors under a name that holds their digest; False if they were there."""
        body = configmap_body(raw, name, rank, tensors)
        path, uid = f"{self._configmaps}/{name}", metadata_of(raw).get("uid")
        found = await self._get(path, budget)
        if found is not None:
            if stored_tensors(found) == (tensors.key, tensors.data) and owned_by(found, uid):
                return False
            # Of an object that is gone (the collector will take it), or not what its name says.
            await self._delete(path, budget, version_of(found))
        await self._api.call("POST", self._configmaps, budget, body=body)
        return True

    async def _write_status(
        self,
        raw: dict[str, Any],
        old: SourceInstance | None,
        worker: WorkerRecord,
        configmap: str,
        budget: Budget,
    ) -> SourceInstance:
        now, metadata = self._clock(), metadata_of(raw)
        settled, generation = settle(worker, old, content_digest(worker, configmap), now)
        written = worker_json(settled, configmap, now)
        if settled.topology and old is not None:
            written["topology"] = stale_keys(old.topology, settled.topology)
        status = {
            "worker": written,
            "publishedAt": write_time(generation),
            "conditions": ready_condition(conditions_of(raw), settled.status, now),
            "observedGeneration": metadata.get("generation", 0),
        }
        return await self._patch_status(metadata, status, budget)

    async def _retire(self, raw: dict[str, Any], name: str, keep: str) -> None:
        """Delete the ConfigMap that the record pointed to before; what stays goes with the object."""
        status = raw.get("status")
        worker = status.get("worker") if isinstance(status, dict) else None
        old = str(worker.get("tensorConfigMap") or "") if isinstance(worker, dict) else ""
        if old == keep or configmap_digest(name, old) is None:
            return
        budget = self._api.budget()
        with suppress(UnavailableError, KubeStatusError):
            found = await self._get(f"{self._configmaps}/{old}", budget)
            if found is not None and not of_another(found, metadata_of(raw).get("uid")):
                await self._delete(f"{self._configmaps}/{old}", budget, version_of(found))

    async def _undo(self, name: str, made: _Made) -> None:
        """Remove an object that this publication made and left without a worker, as far as that is possible.

        What stays (the API server is gone) lists as not whole, and is collected later.
        """
        if made.version is None:
            return
        path, version = f"{self._objects}/{name}", made.version
        with suppress(UnavailableError, KubeStatusError, TimeoutError):
            async with asyncio.timeout(UNDO_SECONDS):
                await self._delete(path, Budget(UNDO_SECONDS, self._api.counters), version)

    # read ---------------------------------------------------------------------------------------------

    async def get_metadata(self, source_id: str, worker_id: str) -> SourceRecord | None:
        """Read a record: what was read before with the status that stands now, else from the API server."""
        source_id, worker_id = SourceId(source_id), WorkerId(worker_id)
        self._mirror.follower.check()
        known = self._mirror.catalogue.find(source_id, worker_id)
        if known is not None:
            kept = self._shelf.get(known)
            if kept is not None:
                return shelved(known, *kept)
            source_id = SourceId(known.source_id)
        budget = self._api.budget()
        async with self._readers:
            return await self._read(object_name(source_id, worker_id), budget)

    async def _read(self, name: str, budget: Budget) -> SourceRecord | None:
        """Read object and tensors; twice if the tensors went in between, as they do at a publication."""
        before = ""
        while True:
            raw = await self._get(f"{self._objects}/{name}", budget)
            if raw is None:
                return None
            instance, identity = instance_of(raw), identity_of(metadata_of(raw), name[10:26])
            self._mirror.apply(raw)
            if not instance.whole:
                return SourceRecord(instance, None, identity)
            worker_raw = raw["status"]["worker"]
            worker, configmap = worker_of(worker_raw, name), worker_raw.get("tensorConfigMap") or ""
            if not configmap:
                if instance.tensor_count:
                    raise corrupt(name, f"it has {instance.tensor_count} tensors, and no place for them")
                return SourceRecord(instance, worker, identity)
            digest = configmap_digest(name, configmap)
            if digest is None:
                raise corrupt(name, f"its tensors are to be in {configmap[:300]!r}, which is not its own")
            found = await self._get(f"{self._configmaps}/{configmap}", budget)
            if found is None:
                if before == instance.version.revision:
                    raise corrupt(name, f"its ConfigMap {configmap} is gone")
                before = instance.version.revision
                continue
            stored = stored_tensors(found)
            if stored is None:
                raise corrupt(name, f"its ConfigMap {configmap} has no {PLAIN_KEY}")
            where = f"ConfigMap {configmap}"
            tensors = await asyncio.to_thread(
                load, StoredTensors(*stored, digest), count=instance.tensor_count, where=where
            )
            worker = replace(worker, tensors=tensors)
            self._shelf.put(instance, worker, identity)
            return SourceRecord(instance, worker, identity)

    async def list_workers(self, query: WorkerQuery = WorkerQuery()) -> list[SourceInstance]:  # noqa: B008
        """List the records that match, from the watched list."""
        self._mirror.follower.check()
        return self._mirror.catalogue.select(query)

    async def list_sources(self) -> list[tuple[str, str]]:
        """List the sources, from the watched list."""
        self._mirror.follower.check()
        return self._mirror.catalogue.sources()

    def watch(self, source_id: str | None = None) -> AsyncIterator[Change]:
        """Follow the records."""
        return self._mirror.catalogue.watch(None if source_id is None else SourceId(source_id))

    def stats(self) -> BackendStats:
        """Say how it is."""
        mirror = self._mirror
        return BackendStats(
            synced=mirror.follower.synced,
            by_status=mirror.catalogue.by_status(),
            unreadable=len(mirror.unreadable),
            age_seconds=mirror.follower.age(),
            cached_bytes=self._shelf.bytes,
            relists=mirror.follower.relists,
            retries=self._api.counters.retries,
            trouble=mirror.follower.trouble,
        )

    # change -------------------------------------------------------------------------------------------

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
        """Patch status, time, load and condition; the rest of the record is not sent."""
        name = self._name(SourceId(source_id), WorkerId(worker_id))
        check_load(source_load)
        budget = self._api.budget()
        while True:
            raw = await self._get(f"{self._objects}/{name}", budget)
            found = None if raw is None else instance_of(raw)
            if raw is None or found is None or not found.whole:
                raise NotFoundError(f"there is no record of worker {worker_id} of source {source_id}")
            check_rank(found, rank)
            check_expected(found, expect)
            if superseded(found.updated_at, updated_at, self._clock()):
                return False
            worker: dict[str, Any] = {"status": status_name(status), "updatedAt": write_time(updated_at * MS)}
            if source_load is not None:
                worker["sourceLoad"] = source_load
            patch = {
                "worker": worker,
                "conditions": ready_condition(conditions_of(raw), status, self._clock()),
                "observedGeneration": metadata_of(raw).get("generation", 0),
            }
            try:
                await self._patch_status(metadata_of(raw), patch, budget)
            except KubeStatusError as error:
                if error.code not in {NOT_FOUND, CONFLICT}:
                    raise _refused(error, name) from error
                await budget.again(error)
            else:
                return True

    async def remove_worker(self, source_id: str, worker_id: str, *, expect: Version | None = None) -> bool:
        """Delete a record's object, and its ConfigMaps, which the collector may not know to be its own."""
        name = self._name(SourceId(source_id), WorkerId(worker_id))
        path, budget = f"{self._objects}/{name}", self._api.budget()
        raw = await self._get(path, budget)
        if raw is None:
            return False
        version = version_of(raw)
        if expect is not None and version != expect:
            raise ConflictError(
                f"{name} is at {version.revision}, not {expect.revision}", remedy="look again"
            )
        try:
            await self._delete(path, budget, expect or Version(version.uid, ""))
        except KubeStatusError as error:
            if error.code != CONFLICT:
                raise _refused(error, name) from error
            raise ConflictError(f"{name} changed while it was removed", remedy="look again") from error
        self._mirror.forget(name, version.uid, removed_here=True)
        await self._sweep(name, version.uid)
        return True

    async def remove_metadata(self, source_id: str) -> int:
        """Delete all records of a source, labelled or not; the first error comes after the last try."""
        source_id, budget = SourceId(source_id), self._api.budget()
        query = WorkerQuery(source_ids=[source_id])
        workers = {(one.source_id, one.worker_id) for one in self._mirror.catalogue.select(query)}
        try:
            async for page in self._api.pages(
                self._objects, budget, labels=f"{LABEL_SOURCE}={source_id}", accept=NAMES_ONLY
            ):
                names = (str(metadata_of(raw).get("name")) for raw in page["items"] or [])
                prefix = object_name(source_id, "")
                workers |= {(source_id, name[len(prefix) :]) for name in names if name.startswith(prefix)}
        except KubeStatusError as error:
            raise _refused(error, f"the list of source {source_id}") from error
        removed, failed = 0, []
        for one in sorted(workers):
            try:
                removed += await self.remove_worker(*one)
            except (UnavailableError, ConflictError) as error:
                failed.append(error)
        if failed:
            raise failed[0]
        return removed

    # calls --------------------------------------------------------------------------------------------

    def _name(self, source_id: str, worker_id: str) -> str:
        """Name the object of a record that may be asked for by its alias."""
        known = self._mirror.catalogue.find(source_id, worker_id)
        return object_name(known.source_id if known else source_id, worker_id)

    async def _get(self, path: str, budget: Budget) -> dict[str, Any] | None:
        try:
            return await self._api.call("GET", path, budget)
        except KubeStatusError as error:
            if error.code != NOT_FOUND:
                raise _refused(error, path) from error
            return None

    async def _delete(self, path: str, budget: Budget, version: Version) -> None:
        """Delete exactly this object, or this state of it where ``version`` has a revision; 404 is fine."""
        conditions = {"uid": version.uid} | (
            {"resourceVersion": version.revision} if version.revision else {}
        )
        body = {"preconditions": conditions, "propagationPolicy": "Background"}
        try:
            await self._api.call("DELETE", path, budget, body=body)
        except KubeStatusError as error:
            if error.code != NOT_FOUND:
                raise

    async def _patch_status(self, metadata: Any, status: dict[str, Any], budget: Budget) -> SourceInstance:
        """Patch the status of exactly the state that was read; the list knows of it at once."""
        body = {"metadata": {"resourceVersion": metadata["resourceVersion"]}, "status": status}
        path = f"{self._objects}/{metadata['name']}/status"
        raw = await self._api.call("PATCH", path, budget, body=body, content=MERGE)
        self._mirror.apply(raw)
        return instance_of(raw)

    async def _sweep(self, name: str, uid: str) -> None:
        """Delete the ConfigMaps of a removed record; one that cannot be deleted now is the collector's."""
        budget, selector = self._api.budget(), f"{LABEL_SOURCE}={name[10:26]}"
        try:
            async for page in self._api.pages(self._configmaps, budget, labels=selector, accept=NAMES_ONLY):
                for raw in page["items"] or []:
                    found = str(metadata_of(raw).get("name"))
                    if configmap_digest(name, found) is not None and not of_another(raw, uid):
                        await self._delete(f"{self._configmaps}/{found}", budget, version_of(raw))
        except (UnavailableError, KubeStatusError) as error:
            log.warning("ConfigMaps of %s may be left: %s", name, error)


class _Made:
    """The object that a publication created, once it has."""

    version: Version | None = None


def _refused(error: KubeStatusError, what: str) -> UnavailableError:
    """Say for people what the API server answered."""
    return UnavailableError(
        f"the Kubernetes API refused {what}: {error}"[:600],
        remedy="the API server's words say why; is the CRD the one of this release?",
        reason="ApiRefused",
    )
