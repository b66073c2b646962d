"""The Job that makes a checkpoint, built from the pod template of a DynamoCheckpoint. Pure: no calls.

The template is anything that its author could store; what cannot become a Job that works is refused with the
field and the remedy. docs/controller.md lists where this differs from Dynamo's own controller, and why.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from hibernode.controller.template import Template, refused
from hibernode.kube import names
from hibernode.kube.objects import metadata_of
from hibernode.settings import Settings
from hibernode.workload import ERA_A1, CheckpointId

MAX_LABEL: Final = 63
"""Characters of a label's value and, as the Job's pods carry its name as a label, of a Job's name."""

DEADLINE_SECONDS: Final = 3600
BACKOFF_LIMIT: Final = 3
TTL_SECONDS: Final = 300
"""Of a Job whose DynamoCheckpoint says nothing."""

READY_DELAY_SECONDS: Final = 15
READY_PERIOD_SECONDS: Final = 2
"""Of the readiness probe, which looks for the worker's ready file."""

_A1: Final = names.ERAS[0]
_TARGETS: Final = next(era.target_containers for era in names.ERAS if era.target_containers)


@dataclass(frozen=True, slots=True)
class JobOptions:
    """What the settings say of every Job. ``pvc``: the claim's name, empty for none; ``seccomp`` likewise."""

    base_path: str = ERA_A1.checkpoint_base
    pvc: str = ""
    signal_host_path: str = ERA_A1.signal_dir
    cleanup_image: str = "busybox:latest"
    seccomp: str = "profiles/block-iouring.json"

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """Take them out of the settings."""
        ours = settings.controller
        return cls(
            base_path=str(ours.base_path),
            pvc=ours.pvc,
            signal_host_path=str(settings.signals.path),
            cleanup_image=ours.cleanup_image,
            seccomp=ours.seccomp_profile,
        )

    def location(self, id_: CheckpointId) -> str:
        """Tell where the artifact of ``id_`` is, as a worker's pod sees it."""
        return f"{self.base_path}/{id_}"


def job_name(name: str) -> str:
    """Name the Job of the DynamoCheckpoint ``name``."""
    return shortened(f"checkpoint-{name}")


def shortened(name: str) -> str:
    """Fit a name into a label: one that is too long ends in ten digits of its SHA-256 instead."""
    if len(name) <= MAX_LABEL:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:10]
    return f"{name[: MAX_LABEL - 11].rstrip('-.')}-{digest}"


def build_job(checkpoint: Mapping[str, Any], id_: CheckpointId, options: JobOptions) -> dict[str, Any]:
    """Build the Job of a DynamoCheckpoint, whose name, namespace and uid are the API server's.

    :raises RefusedError: there can be no Job that works, reason ``InvalidPodTemplate``.
    """
    metadata, spec = metadata_of(checkpoint), checkpoint.get("spec")
    job = spec.get("job") if isinstance(spec, Mapping) else None
    if not isinstance(job, Mapping):
        raise refused("spec.job is missing", "give it a podTemplateSpec")
    name = str(metadata["name"])
    labels = {names.NAME_LABEL: shortened(name), _A1.ids[0]: str(id_)}
    template = Template(copy.deepcopy(job.get("podTemplateSpec")))
    template.label({**labels, _A1.source: "true"})
    if labels[names.NAME_LABEL] != name:
        template.annotate({names.NAME_LABEL: name})
    target = template.target(job.get("targetContainerName"), _TARGETS)
    _fill(template, target, id_, options)
    job_metadata: dict[str, Any] = {
        "name": job_name(name),
        "labels": labels,
        "ownerReferences": [owner_reference(checkpoint)],
    }
    if metadata.get("namespace"):
        job_metadata["namespace"] = metadata["namespace"]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": job_metadata,
        "spec": {
            "activeDeadlineSeconds": _number(job, "activeDeadlineSeconds", DEADLINE_SECONDS, 1),
            "backoffLimit": _number(job, "backoffLimit", BACKOFF_LIMIT, 0),
            "ttlSecondsAfterFinished": _number(job, "ttlSecondsAfterFinished", TTL_SECONDS, 0),
            "template": template.raw,
        },
    }


def owner_reference(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Say that the Job is the DynamoCheckpoint's, and goes with it."""
    metadata = metadata_of(checkpoint)
    return {
        "apiVersion": f"{names.GROUP}/{names.VERSION}",
        "kind": names.KIND,
        "name": metadata["name"],
        "uid": metadata.get("uid") or "",
        "controller": True,
        "blockOwnerDeletion": True,
    }


def _fill(template: Template, target: dict[str, Any], id_: CheckpointId, options: JobOptions) -> None:
    """Put in what makes a pod a checkpoint's source."""
    signal_file = f"{names.SIGNAL_MOUNT}/{id_}{ERA_A1.done_suffix}"
    signal_mount = {"name": names.SIGNAL_VOLUME, "mountPath": names.SIGNAL_MOUNT}
    host_path = {"path": options.signal_host_path, "type": "DirectoryOrCreate"}
    template.volume({"name": names.SIGNAL_VOLUME, "hostPath": host_path})
    template.init_container(_cleanup(signal_file, signal_mount, options, root=template.runs_as_user()))
    template.environment(
        target,
        {
            ERA_A1.env_signal_file: signal_file,
            ERA_A1.env_ready_file: ERA_A1.ready_file,
            ERA_A1.env_hash: str(id_),
            names.ENV_LOCATION: options.location(id_),
            names.ENV_STORAGE_TYPE: names.STORAGE_TYPE,
        },
    )
    template.mount(target, signal_mount)
    if options.pvc:
        claim = {"claimName": options.pvc}
        template.volume({"name": names.STORAGE_VOLUME, "persistentVolumeClaim": claim})
        template.mount(target, {"name": names.STORAGE_VOLUME, "mountPath": options.base_path})
    items = [{"path": path, "fieldRef": {"fieldPath": field}} for path, field in names.PODINFO]
    template.volume({"name": names.PODINFO_VOLUME, "downwardAPI": {"items": items}})
    podinfo = {"name": names.PODINFO_VOLUME, "mountPath": names.PODINFO_MOUNT, "readOnly": True}
    template.mount(target, podinfo)
    target["readinessProbe"] = {
        "exec": {"command": ["cat", ERA_A1.ready_file]},
        "initialDelaySeconds": READY_DELAY_SECONDS,
        "periodSeconds": READY_PERIOD_SECONDS,
    }
    # A slow load of the model is no reason to restart.
    target.pop("livenessProbe", None)
    target.pop("startupProbe", None)
    template.spec["restartPolicy"] = "Never"
    if options.seccomp:
        template.seccomp(target, {"type": "Localhost", "localhostProfile": options.seccomp})


def _cleanup(signal_file: str, mount: dict[str, Any], options: JobOptions, *, root: bool) -> dict[str, Any]:
    """Build the container that removes the answer of an earlier run: the worker would take it for its own."""
    container: dict[str, Any] = {
        "name": names.CLEANUP_CONTAINER,
        "image": options.cleanup_image,
        "command": ["sh", "-c", f"rm -f {signal_file} && echo 'Signal file cleanup complete'"],
        "volumeMounts": [mount],
    }
    if root:  # the directory is root's, whoever the worker is
        container["securityContext"] = {"runAsUser": 0, "runAsNonRoot": False}
    return container


def _number(job: Mapping[str, Any], name: str, default: int, least: int) -> int:
    found = job.get(name)
    if found is None:
        return default
    if isinstance(found, bool) or not isinstance(found, int) or found < least:
        raise refused(f"spec.job.{name} is {str(found)[:40]!r}", f"it must be a number from {least} on")
    return found
