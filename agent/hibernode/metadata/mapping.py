"""Records as ModelMetadata objects and back: what the Rust server writes and reads, key by key.

Pure functions on the JSON of the API. Reading takes nothing for granted: the API server checks the schema,
but whoever may write the object chose the values.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, Final

from hibernode.kube.objects import metadata_of
from hibernode.metadata.identity import alias_of, identity_from
from hibernode.metadata.records import (
    I64_MAX,
    NOBODY,
    U32_MAX,
    ArtifactSource,
    BackendPayload,
    BackendType,
    PodRef,
    SourceIdentity,
    SourceInstance,
    SourceStatus,
    SourceType,
    Version,
    WorkerRecord,
)
from hibernode.metadata.tensors import DIGEST, corrupt
from hibernode.metadata.times import MS, read_time, write_time

GROUP: Final = "modelexpress.nvidia.com"
VERSION: Final = "v1alpha1"
KIND: Final = "ModelMetadata"
PLURAL: Final = "modelmetadatas"
LABEL_SOURCE: Final = f"{GROUP}/mx-source-id"
LABEL_WORKER: Final = f"{GROUP}/mx-worker-id"
LABEL_RANK: Final = f"{GROUP}/worker"
ANNOTATION_IDENTITY: Final = "hibernode.io/source-identity"
"""The identity as JSON: the schema has no place for it, and the server forgets it."""

ANNOTATION_OWNER: Final = "hibernode.io/owner"
"""The uid of the pod that published: an owner reference needs its name, and leads to no other namespace."""

_NAME: Final = re.compile(r"mx-source-([0-9a-f]{16})-([a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?)", re.ASCII)
TENSOR_BYTES: Final = 150
"""Of a tensor as JSON, with a name as real ones have."""

_POD_UID: Final = re.compile(r"[0-9a-f][-0-9a-f]{0,63}", re.ASCII)
"""A UUID, or a static pod's digest; no other word is a pod, and least of all another kind of our owners."""

_ARTIFACT: Final = {
    "artifactId": "artifact_id",
    "totalSize": "total_size",
    "fileCount": "file_count",
    "chunkCount": "chunk_count",
    "nodeRank": "node_rank",
}
_READ: Final = frozenset(
    {
        *("workerRank", "backendType", "nixlMetadata", "transferEngineSessionId", "tensorCount"),
        *("tensorConfigMap", "metadataEndpoint", "agentName", "workerGrpcEndpoint", "accelerator"),
        *("artifactSource", "status", "updatedAt", "topology", "sourceLoad"),
    }
)
"""The keys of ``status.worker`` that this release reads; others are kept as they are."""


# names ------------------------------------------------------------------------------------------------


def object_name(source_id: str, worker_id: str) -> str:
    """Name the object of a record."""
    return f"mx-source-{source_id}-{worker_id}"


def ids_of_name(name: str) -> tuple[str, str] | None:
    """Read source id and worker id from an object's name; None for one that is not a record's."""
    match = _NAME.fullmatch(name)
    return (match.group(1), match.group(2)) if match else None


def configmap_name(name: str, rank: int, digest: str = "") -> str:
    """Name the ConfigMap of a record: with the digest of its content here, without one by the Rust server.

    A name with a digest belongs to one content for ever, so a record points to its own tensors or to none.
    """
    return f"{name}-tensors-worker-{rank}" + (f"-{digest}" if digest else "")


def configmap_digest(name: str, configmap: str) -> str | None:
    """Read the digest from the name of a ConfigMap; empty without one, None if it is not of this record."""
    match = re.fullmatch(rf"{re.escape(name)}-tensors-worker-\d+(?:-([0-9a-f]{{{DIGEST}}}))?", configmap)
    return (match.group(1) or "") if match else None


# words ------------------------------------------------------------------------------------------------


def status_name(status: int) -> str:
    """Name a status as the object has it; a number without a name is Unknown."""
    return SourceStatus(status).name.capitalize() if 0 <= status <= SourceStatus.STALE else "Unknown"


def status_of(name: Any) -> SourceStatus:
    """Read a status, case and all; any other text is UNKNOWN."""
    return next((each for each in SourceStatus if status_name(each) == name), SourceStatus.UNKNOWN)


def source_type_name(source_type: int) -> str:
    """Name a source type as the object has it."""
    return SourceType(source_type).name.lower() if 0 <= source_type <= max(SourceType) else "unknown"


def ready_condition(conditions: Any, status: int, now: int) -> list[dict[str, Any]]:
    """Write the Ready condition into a list of conditions; ``now`` in nanoseconds.

    Others stay, without keys that are null: within a list a merge patch deletes nothing, and the schema
    refuses null.
    """
    ready = status == SourceStatus.READY
    mine: dict[str, Any] = {
        "type": "Ready",
        "status": "True" if ready else "False",
        "reason": f"Worker{status_name(status)}",
        "message": "Worker is ready" if ready else "Worker is not ready",
        "lastTransitionTime": write_time(now),
    }
    kept = []
    for one in conditions if isinstance(conditions, list) else []:
        if not isinstance(one, dict) or "type" not in one or "status" not in one:
            continue
        if one["type"] != "Ready":
            kept.append({key: value for key, value in one.items() if value is not None})
        elif one["status"] == mine["status"] and read_time(one.get("lastTransitionTime")):
            mine["lastTransitionTime"] = one["lastTransitionTime"]
    return [*kept, mine]


def payload_of(nixl: bytes, session_id: str, backend_type: Any) -> BackendPayload:
    """Tell a payload by its type, and by what is filled where the type is absent or not known."""
    kinds = {str(each): each for each in BackendType}
    kind = kinds.get(backend_type) if isinstance(backend_type, str) else None
    if kind is None:
        kind = BackendType.TRANSFER_ENGINE if session_id else BackendType.NIXL if nixl else BackendType.NONE
    return BackendPayload(
        kind,
        nixl if kind is BackendType.NIXL else b"",
        session_id if kind is BackendType.TRANSFER_ENGINE else "",
    )


# the worker -------------------------------------------------------------------------------------------


def worker_json(worker: WorkerRecord, configmap: str, updated: int) -> dict[str, Any]:
    """Write ``status.worker`` as a merge patch; ``updated`` in nanoseconds.

    Keys that a worker did not tell of (topology, load) are left out, so that a patch leaves them alone. What
    is empty is null, which a patch deletes and every reader takes for empty: API servers of release 1.20 make
    null of an empty text in a patch themselves, and then refuse it.
    """
    payload, artifact = worker.payload, worker.artifact
    written: dict[str, Any] = {
        "workerRank": worker.rank,
        "backendType": str(payload.type),
        "nixlMetadata": base64.b64encode(payload.nixl).decode(),
        "transferEngineSessionId": payload.session_id or None,
        "tensorCount": len(worker.tensors),
        "tensorConfigMap": configmap,
        "metadataEndpoint": worker.metadata_endpoint,
        "agentName": worker.agent_name,
        "workerGrpcEndpoint": worker.worker_grpc_endpoint,
        "accelerator": worker.accelerator,
        "artifactSource": artifact and {key: getattr(artifact, name) for key, name in _ARTIFACT.items()},
        "status": status_name(worker.status),
        "updatedAt": write_time(updated),
    }
    if worker.topology:
        written["topology"] = dict(worker.topology)
    if worker.source_load is not None:
        written["sourceLoad"] = worker.source_load
    kept = {key: value for key, value in worker.unknown.items() if key not in _READ}
    return {**kept, **{key: None if value == "" else value for key, value in written.items()}}


def worker_of(raw: Mapping[str, Any], where: str) -> WorkerRecord:
    """Read ``status.worker``, but for its tensors.

    :raises IntegrityError: a field that cannot be what it says; ``where`` names the object.
    """
    text = _Reader(raw, where)
    rank = text.number("workerRank", -(1 << 31), U32_MAX)
    try:
        nixl = base64.b64decode(text.string("nixlMetadata"), validate=True)
    except (binascii.Error, ValueError) as error:
        raise corrupt(where, f"nixlMetadata is not base64: {error}") from None
    return WorkerRecord(
        rank=rank & U32_MAX,  # the Rust server writes a rank from 2^31 on as a negative i32
        payload=payload_of(nixl, text.string("transferEngineSessionId"), raw.get("backendType")),
        artifact=_artifact_of(raw.get("artifactSource"), where),
        status=status_of(raw.get("status")),
        updated_at=read_time(raw.get("updatedAt")) // MS,
        metadata_endpoint=text.string("metadataEndpoint"),
        agent_name=text.string("agentName"),
        worker_grpc_endpoint=text.string("workerGrpcEndpoint"),
        accelerator=text.string("accelerator"),
        topology=text.strings("topology"),
        source_load=_load_of(raw.get("sourceLoad")),
        unknown={key: value for key, value in raw.items() if key not in _READ},
    )


def _load_of(value: Any) -> float | None:
    """Read a load; None for what is no number, and for what is too large for one."""
    try:
        return float(value) if type(value) in (int, float) else None
    except OverflowError:
        return None


def _artifact_of(raw: Any, where: str) -> ArtifactSource | None:
    """Read an artifact; a count that is absent is 0, as the schema asks for none."""
    if raw is None:
        return None
    if not isinstance(raw, dict):
        raise corrupt(where, "artifactSource is no object")
    text = _Reader(raw, f"{where} artifactSource")
    return ArtifactSource(
        text.string("artifactId"),
        text.number("totalSize", 0, I64_MAX, 0),
        *(text.number(key, 0, U32_MAX, 0) for key in ("fileCount", "chunkCount", "nodeRank")),
    )


def content_digest(worker: WorkerRecord, configmap: str) -> str:
    """Compute the digest of what a peer connects with: another one means, fetch again."""
    payload, artifact = worker.payload, worker.artifact
    parts = (
        worker.rank,
        payload.type,
        hashlib.sha256(payload.nixl).hexdigest(),
        payload.session_id,
        worker.agent_name,
        worker.metadata_endpoint,
        worker.worker_grpc_endpoint,
        worker.accelerator,
        artifact and asdict(artifact),
        configmap,
    )
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


# the object -------------------------------------------------------------------------------------------


def instance_of(raw: Mapping[str, Any]) -> SourceInstance:
    """Read an object of the API into what lists show.

    The ids are those of its name: a label may be absent or wrong, the name is what a record is got by.

    :raises IntegrityError: no record can be made of it.
    """
    metadata = metadata_of(raw)
    name = metadata.get("name")
    ids = ids_of_name(name) if isinstance(name, str) else None
    where = f"ModelMetadata {str(name)[:200]}"
    if ids is None:
        raise corrupt(where, "its name is not mx-source-<16 hexadecimal digits>-<worker id>")
    spec = _Reader(raw.get("spec"), f"{where} spec")
    identity = identity_of(metadata, ids[0])
    instance = SourceInstance(
        source_id=ids[0],
        worker_id=ids[1],
        model_name=spec.string("modelName"),
        source_type=spec.string("sourceType") or "unknown",
        created_at=read_time(metadata.get("creationTimestamp")) // MS,
        owner=owner_of(metadata),
        version=Version(str(metadata.get("uid", "")), str(metadata.get("resourceVersion", ""))),
        alias=alias_of(identity),
        whole=False,
    )
    status = raw.get("status")
    worker_raw = status.get("worker") if isinstance(status, dict) else None
    if not isinstance(worker_raw, dict):
        return instance
    published = read_time(status.get("publishedAt")) if isinstance(status, dict) else 0
    worker = worker_of(worker_raw, where)
    text = _Reader(worker_raw, where)
    return describe(
        replace(instance, whole=True, generation=published, published_at=published // MS),
        worker,
        text.number("tensorCount", 0, U32_MAX, 0),
        text.string("tensorConfigMap"),
    )


def kept_bytes(worker: WorkerRecord, count: int) -> int:
    """Tell about how much is kept of a worker with this many tensors."""
    return 1024 + len(worker.payload.nixl) + TENSOR_BYTES * count


def describe(instance: SourceInstance, worker: WorkerRecord, count: int, place: str) -> SourceInstance:
    """Fill an instance with what a worker's record says; ``place`` tells its tensors from others."""
    return replace(
        instance,
        rank=worker.rank,
        status=worker.status,
        backend_type=worker.payload.type,
        accelerator=worker.accelerator,
        agent_name=worker.agent_name,
        metadata_endpoint=worker.metadata_endpoint,
        worker_grpc_endpoint=worker.worker_grpc_endpoint,
        topology=worker.topology,
        source_load=worker.source_load,
        artifact=worker.artifact,
        tensor_count=count,
        size=kept_bytes(worker, count),
        updated_at=worker.updated_at,
        digest=content_digest(worker, place),
    )


def owner_reference(owner: PodRef | None, namespace: str) -> list[dict[str, Any]]:
    """Write the reference to the pod that owns a record; none for a pod of another namespace."""
    if owner is None or not (owner.name and owner.uid) or owner.namespace != namespace:
        return []
    pod = {"apiVersion": "v1", "kind": "Pod", "name": owner.name, "uid": owner.uid}
    return [{**pod, "controller": False, "blockOwnerDeletion": False}]


def owner_of(metadata: Mapping[str, Any]) -> PodRef | None:
    """Find the pod that owns an object: by its reference, else by our annotation."""
    references, annotations = metadata.get("ownerReferences"), metadata.get("annotations")
    owner = PodRef(NOBODY, "", NOBODY)
    if isinstance(annotations, dict):
        owner = replace(owner, uid=str(annotations.get(ANNOTATION_OWNER, "")))
    for one in references if isinstance(references, list) else []:
        if isinstance(one, dict) and one.get("kind") == "Pod" and one.get("apiVersion") == "v1":
            space = str(metadata.get("namespace", ""))
            owner = PodRef(str(one.get("name", "")), str(one.get("uid", "")), space)
            break
    return owner if _POD_UID.fullmatch(owner.uid) else None


def identity_of(metadata: Mapping[str, Any], source_id: str) -> SourceIdentity | None:
    """Read the identity from an object's annotation; None if none is there that has this id."""
    annotations = metadata.get("annotations")
    text = annotations.get(ANNOTATION_IDENTITY) if isinstance(annotations, dict) else None
    return identity_from(text, source_id) if isinstance(text, str) else None


def stale_keys(old: Mapping[str, str], new: Mapping[str, str]) -> dict[str, str | None]:
    """Write a map so that a merge patch leaves nothing of the old one."""
    return {**dict.fromkeys(old), **new}


class _Reader:
    """Reads fields: one that is absent or null has its default, one of another type is an error."""

    def __init__(self, raw: Any, where: str) -> None:
        if not isinstance(raw, Mapping):
            raise corrupt(where, "it is no object")
        self._raw, self._where = raw, where

    def string(self, key: str) -> str:
        value = self._raw.get(key)
        if value is None:
            return ""
        if not isinstance(value, str) or not (value.isascii() or _carried(value)):
            raise corrupt(self._where, f"{key} is no text: {value!r:.100}")
        return value

    def number(self, key: str, least: int, most: int, default: int | None = None) -> int:
        value = self._raw.get(key)
        if value is None and default is not None:
            return default
        if type(value) is not int or not least <= value <= most:
            raise corrupt(self._where, f"{key} is {value!r:.100}, not a number from {least} to {most}")
        return value

    def strings(self, key: str) -> dict[str, str]:
        value = self._raw.get(key)
        if not isinstance(value, dict):
            return {}
        return {name: text for name, text in value.items() if isinstance(text, str) and _carried(name + text)}


def _carried(text: str) -> bool:
    """Tell whether UTF-8 can carry a text: JSON can also name half of a surrogate pair."""
    return not any("\ud800" <= char <= "\udfff" for char in text)
