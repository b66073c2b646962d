"""The bodies that the Kubernetes backend sends, and what it reads in those that it gets: pure functions."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Any, Final

from hibernode.errors import IntegrityError, TooLargeError
from hibernode.kube.objects import metadata_of
from hibernode.metadata.identity import identity_text
from hibernode.metadata.mapping import (
    ANNOTATION_IDENTITY,
    ANNOTATION_OWNER,
    GROUP,
    KIND,
    LABEL_RANK,
    LABEL_SOURCE,
    LABEL_WORKER,
    VERSION,
    ids_of_name,
    instance_of,
    owner_reference,
    source_type_name,
    worker_json,
)
from hibernode.metadata.records import PodRef, SourceIdentity, SourceInstance, Version, WorkerRecord
from hibernode.metadata.tensors import PACKED_KEY, PLAIN_KEY, PLAIN_MAX, StoredTensors

MAX_STATUS_BYTES: Final = 1_400_000
"""Of an object's status as JSON: etcd takes requests of 1.5 MiB (its default), metadata included."""


def object_body(name: str, namespace: str, identity: SourceIdentity, owner: PodRef | None) -> dict[str, Any]:
    """Write a record's object but for its status."""
    source_id, worker_id = ids_of_name(name) or ("", "")
    annotations = {ANNOTATION_IDENTITY: identity_text(identity)}
    if owner is not None:
        annotations[ANNOTATION_OWNER] = owner.uid
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": KIND,
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": {LABEL_SOURCE: source_id, LABEL_WORKER: worker_id},
            "annotations": annotations,
            "ownerReferences": owner_reference(owner, namespace),
        },
        "spec": {
            "modelName": identity.model_name,
            "sourceType": source_type_name(identity.mx_source_type),
        },
    }


def configmap_body(raw: Mapping[str, Any], name: str, rank: int, tensors: StoredTensors) -> dict[str, Any]:
    """Write the ConfigMap of the tensors of the object ``raw``, which owns it.

    It does not block its owner's deletion: on some clusters that would need one more right.
    """
    owner = metadata_of(raw)
    source_id, _ = ids_of_name(str(owner.get("name"))) or ("", "")
    reference = {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": KIND,
        "name": owner.get("name"),
        "uid": owner.get("uid"),
        "controller": True,
        "blockOwnerDeletion": False,
    }
    body: dict[str, Any] = {
        "metadata": {
            "name": name,
            "namespace": owner.get("namespace"),
            "labels": {LABEL_SOURCE: source_id, LABEL_RANK: str(rank)},
            "ownerReferences": [reference],
        },
    }
    if tensors.key == PLAIN_KEY:
        body["data"] = {tensors.key: tensors.data.decode()}
    else:
        body["binaryData"] = {tensors.key: base64.b64encode(tensors.data).decode()}
    return body


def owned_by(configmap: Mapping[str, Any], uid: Any) -> bool:
    """Tell whether an object is among the owners of a ConfigMap."""
    owners = metadata_of(configmap).get("ownerReferences")
    return any(isinstance(one, dict) and one.get("uid") == uid for one in owners or [])


def instance_or_none(raw: dict[str, Any]) -> SourceInstance | None:
    """Read what stands, if a record can be made of it; a publication replaces it anyway."""
    try:
        return instance_of(raw)
    except IntegrityError:
        return None


def of_another(configmap: Mapping[str, Any], uid: Any) -> bool:
    """Tell whether a ConfigMap has owners, but not this one; older writers left some without any."""
    return bool(metadata_of(configmap).get("ownerReferences")) and not owned_by(configmap, uid)


def check_size(worker: WorkerRecord, tensors: StoredTensors, configmap: str) -> None:
    """Refuse what the API server would refuse half-way.

    :raises TooLargeError: the tensors or the payload do not fit into one object.
    """
    remedy = "register memory in fewer, larger parts (MX_POOL_REG=1), or let peers ask the worker itself"
    if len(tensors.data) > PLAIN_MAX:
        raise TooLargeError(
            f"{len(worker.tensors)} tensors need {len(tensors.data)} bytes even packed, and {PLAIN_MAX} fit",
            remedy=remedy,
        )
    size = len(json.dumps(worker_json(worker, configmap, 0)))
    if size > MAX_STATUS_BYTES:
        raise TooLargeError(
            f"the worker's payload of {len(worker.payload.nixl)} bytes makes an object of {size} bytes, and "
            f"{MAX_STATUS_BYTES} fit",
            remedy=remedy,
        )


def mend(raw: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    """Write the patch that turns an object into the one that is wanted; empty if nothing is to do.

    Labels, annotations and owners of others stay; only a pod that owned it gives way to the new one.
    """
    have, want = metadata_of(raw), wanted["metadata"]
    patch: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    for key in ("labels", "annotations"):
        present = have.get(key) or {}
        different = {name: value for name, value in want[key].items() if present.get(name) != value}
        if different:
            metadata[key] = different
    owners = have.get("ownerReferences") or []
    mine = want["ownerReferences"]
    if mine and not any(one.get("uid") == mine[0]["uid"] for one in owners):
        metadata["ownerReferences"] = [one for one in owners if one.get("kind") != "Pod"] + mine
    spec = raw.get("spec") or {}
    different = {name: value for name, value in wanted["spec"].items() if spec.get(name) != value}
    if metadata:
        patch["metadata"] = metadata
    if different:
        patch["spec"] = different
    return patch


def stored_tensors(configmap: dict[str, Any]) -> tuple[str, bytes] | None:
    """Take the tensors out of a ConfigMap, as (key, bytes)."""
    plain, packed = (configmap.get("data") or {}), (configmap.get("binaryData") or {})
    if isinstance(plain.get(PLAIN_KEY), str):
        return PLAIN_KEY, plain[PLAIN_KEY].encode(errors="surrogatepass")
    try:
        return PACKED_KEY, base64.b64decode(packed[PACKED_KEY], validate=True)
    except (KeyError, TypeError, binascii.Error):
        return None


def version_of(raw: dict[str, Any]) -> Version:
    """Read which object this is, and which state of it."""
    metadata = metadata_of(raw)
    return Version(str(metadata.get("uid", "")), str(metadata.get("resourceVersion", "")))
