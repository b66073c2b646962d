"""What the commands see of the records, over the agent's own socket: JSON, for root alone."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any, Final

from hibernode.errors import NotFoundError, UsageError
from hibernode.metadata.backend import MetadataBackend, WorkerQuery
from hibernode.metadata.ids import SourceId, WorkerId
from hibernode.metadata.records import SourceInstance, SourceRecord
from hibernode.metadata.times import MS, write_time

Near = Callable[[SourceInstance], bool]
"""Whether a record is of this node."""

Confirmed = Callable[[SourceRecord], Awaitable[bytes]]
"""The NIXL blob that a local worker itself gave, or empty."""

SHOWN: Final = 80
"""Characters of a caller's word that an error repeats."""


class View:
    """Answers questions, and removes.

    Words name a record by its whole id or by the beginning of it, if nothing else begins so. ``node`` is this
    node's name; it is shown for local records.
    """

    def __init__(self, backend: MetadataBackend, near: Near, confirmed: Confirmed, node: str) -> None:
        self._backend, self._near, self._confirmed, self._node = backend, near, confirmed, node

    async def ask(self, verb: str, query: Mapping[str, str]) -> dict[str, Any]:
        """Answer ``sources``, ``workers``, ``worker`` or ``remove``.

        :raises NotFoundError: a word names nothing.
        :raises UsageError: a word names more than one.
        :raises HibernodeError: the backend's own.
        """
        source, worker = query.get("source", ""), query.get("worker", "")
        if verb == "sources":
            return {"items": await self._sources()}
        if verb == "workers":
            found = await self._all() if not source else await self._of(source)
            return {"items": [self._worker(one) for one in found]}
        if verb == "worker":
            return await self._whole(await self._one(source, worker), query.get("with", ""))
        return await self._remove(source, worker)

    async def _all(self) -> list[SourceInstance]:
        return await self._backend.list_workers(WorkerQuery())

    async def _of(self, source: str) -> list[SourceInstance]:
        """List the records of one source."""
        every = await self._all()
        ids = {text for one in every for text in (one.source_id, one.alias) if text}
        id_ = _choose("source", source, ids, "hibernode metadata sources")
        return [one for one in every if id_ in (one.source_id, one.alias)]

    async def _one(self, source: str, worker: str) -> SourceInstance:
        found = await self._of(source) if source else await self._all()
        listing = "hibernode metadata workers"
        id_ = _choose("worker", worker, {one.worker_id for one in found}, listing)
        same = [one for one in found if one.worker_id == id_]
        if len(same) > 1:
            raise UsageError(
                f"the worker {id_} is in {len(same)} sources: {', '.join(one.source_id for one in same[:5])}",
                remedy="say which one with --source",
                reason="AmbiguousName",
            )
        return same[0]

    async def _sources(self) -> list[dict[str, Any]]:
        sources: dict[str, list[SourceInstance]] = {}
        for one in await self._all():
            sources.setdefault(one.source_id, []).append(one)
        return [
            {
                "sourceId": id_,
                "alias": sources[id_][0].alias,
                "model": sources[id_][0].model_name,
                "type": sources[id_][0].source_type,
                "workers": len(sources[id_]),
                "local": sum(self._near(one) for one in sources[id_]),
                "status": _counts(sources[id_]),
                "updatedAt": write_time(MS * max(one.updated_at or one.created_at for one in sources[id_])),
            }
            for id_ in sorted(sources)
        ]

    def _worker(self, one: SourceInstance) -> dict[str, Any]:
        local = self._near(one)
        return {
            "sourceId": one.source_id,
            "workerId": one.worker_id,
            "model": one.model_name,
            "rank": one.rank,
            "status": one.status.name.lower() if one.whole else "incomplete",
            "local": local,
            "node": self._node if local else one.topology.get("host", ""),
            "agentName": one.agent_name,
            "metadataEndpoint": one.metadata_endpoint,
            "workerEndpoint": one.worker_grpc_endpoint,
            "backend": one.backend_type.value,
            "generation": one.generation,
            "digest": one.digest,
            "updatedAt": write_time(one.updated_at * MS) if one.updated_at else "",
            "publishedAt": write_time(one.published_at * MS) if one.published_at else "",
            "createdAt": write_time(one.created_at * MS) if one.created_at else "",
        }

    async def _whole(self, one: SourceInstance, more: str) -> dict[str, Any]:
        record = await self._backend.get_metadata(one.source_id, one.worker_id)
        if record is None:
            raise NotFoundError(f"the record of worker {one.worker_id} has just gone")
        one, worker = record.instance, record.worker
        data = self._worker(one) | {
            "alias": one.alias,
            "type": one.source_type,
            "accelerator": one.accelerator,
            "topology": dict(one.topology),
            "load": one.source_load,
            "owner": asdict(one.owner) if one.owner else None,
            "artifact": asdict(one.artifact) if one.artifact else None,
            "identity": _plain(asdict(record.identity)) if record.identity else None,
            "sessionId": worker.payload.session_id if worker else "",
            "blobBytes": len(worker.payload.nixl) if worker else 0,
            "tensors": _summed(record),
        }
        if more == "tensors":
            data["tensorList"] = [asdict(tensor) for tensor in (worker.tensors if worker else ())]
        if more == "blob" and worker is not None:
            blob, origin = worker.payload.nixl, "record"
            if not blob:
                blob, origin = await self._confirmed(record), "worker"
            data |= {"blob": base64.b64encode(blob).decode(), "blobFrom": origin if blob else ""}
        return data

    async def _remove(self, source: str, worker: str) -> dict[str, Any]:
        """Remove by whole ids only: what a prefix names may have changed since its caller looked."""
        source = SourceId(source)
        if worker:
            count = int(await self._backend.remove_worker(source, WorkerId(worker)))
        else:
            count = await self._backend.remove_metadata(source)
        if not count:
            raise NotFoundError(
                f"there is no record of {f'worker {worker} of ' if worker else ''}source {source}",
                remedy="hibernode metadata workers lists what there is",
            )
        return {"sourceId": source, "workerId": worker, "removed": count}


def _choose(kind: str, word: str, ids: set[str], listing: str) -> str:
    """Find the one id that is ``word`` or begins with it."""
    found = [word] if word in ids else sorted(id_ for id_ in ids if word and id_.startswith(word))
    shown = repr(word[:SHOWN])
    if not found:
        raise NotFoundError(f"no {kind} is or begins with {shown}", remedy=f"{listing} lists what there is")
    if len(found) > 1:
        raise UsageError(
            f"{len(found)} {kind}s begin with {shown}: {', '.join(found[:5])}",
            remedy="write more of the id",
            reason="AmbiguousName",
        )
    return found[0]


def _counts(found: Iterable[SourceInstance]) -> dict[str, int]:
    return dict(
        sorted(Counter(one.status.name.lower() if one.whole else "incomplete" for one in found).items())
    )


def _summed(record: SourceRecord) -> dict[str, Any]:
    tensors = record.worker.tensors if record.worker else ()
    return {
        "count": len(tensors),
        "bytes": sum(tensor.size for tensor in tensors),
        "devices": sorted({tensor.device_id for tensor in tensors}),
        "dtypes": dict(Counter(tensor.dtype for tensor in tensors).most_common()),
    }


def _plain(identity: dict[str, Any]) -> dict[str, Any]:
    """Leave out what was not told."""
    return {key: value for key, value in identity.items() if value not in ("", 0, {})}
