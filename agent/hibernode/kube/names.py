"""What the eras of the contract call things in Kubernetes: one table, one place for each constant.

Facts of ai-dynamo/dynamo's operator and node agents; the era of a name is the time in which they used it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

PREFIX: Final = "nvidia.com/"
NAME_LABEL: Final = f"{PREFIX}checkpoint-name"
"""The DynamoCheckpoint that a Job and its pods are for; the same in all eras."""

GROUP: Final = "nvidia.com"
VERSION: Final = "v1alpha1"
PLURAL: Final = "dynamocheckpoints"
KIND: Final = "DynamoCheckpoint"


TRUE: Final = "true"
"""What a label of an era says where it says yes."""

JOB_STATUS: Final = f"{PREFIX}snapshot-checkpoint-status"
"""The Job's annotation that tells how its checkpoint went: era C's, which the agent writes in era A1 too."""

IN_PROGRESS: Final = "in_progress"
COMPLETED: Final = "completed"
FAILED: Final = "failed"
"""Values of the annotations that tell a status; the first of era B only."""

INCOMPATIBLE_CONDITION: Final = "SnapshotRestoreCompatible"
"""The pod's condition that is False where a restore was refused before anything was touched."""

CONTROL_DIR: Final = "/snapshot-control"
SNAPSHOT_COMPLETE: Final = "snapshot-complete"
RESTORE_COMPLETE: Final = "restore-complete"
SENTINEL: Final = b"done\n"
"""Era C's control volume in the worker, the files that the agent leaves there, and what they say."""

LEASE_SECONDS: Final = 30
LEASE_RENEW_SECONDS: Final = 10.0
LEASE_HOLDER: Final = "snapshot-agent/"
"""Era C's Lease, which has the Job's name: the controller waits while it stands. A uuid ends the holder."""


class Word(StrEnum):
    """How an era's agent tells the worker how it went."""

    FILE = "signal file"
    UNIX = "Unix signals"
    SENTINEL = "sentinel files"


@dataclass(frozen=True, slots=True)
class KubeEra:
    """The labels and annotations of one era.

    ``ids``: labels that carry the checkpoint id, the one written now first. ``restore``: the label of a
    restore target; empty where none marks it. With ``restore_by_id`` a pod with the first of ``ids`` that is
    no source is one too. ``status``: the annotation that a checkpoint's status is told by, on the pod or,
    with ``status_on_job``, on its Job. ``lease``: a Lease with the Job's name is held meanwhile, and the
    worker is told after the Job. ``restore_status``: the pod's annotation. ``ready_file``: the worker's own
    ready file where its environment names none; with ``Word.SENTINEL`` a name in the control volume.
    """

    name: str
    source: str
    ids: tuple[str, ...]
    restore: str = ""
    status: str = ""
    status_on_job: bool = False
    lease: bool = False
    restore_status: str = ""
    restore_container_id: str = ""
    target_containers: str = ""
    restore_by_id: bool = False
    word: Word = Word.FILE
    ready_file: str = "/tmp/checkpoint-ready"  # noqa: S108 - the contract's path inside the worker's root


ERAS: Final = (
    KubeEra(
        name="A1",  # A0 has the same labels
        source=f"{PREFIX}checkpoint-source",
        ids=(f"{PREFIX}checkpoint-hash",),
        restore=f"{PREFIX}checkpoint-restore",  # of a later A1 variant
        status=JOB_STATUS,  # ours: Dynamo's agent of this era told the Job nothing
        status_on_job=True,
    ),
    KubeEra(
        name="B",
        source=f"{PREFIX}chrek-is-checkpoint-source",
        ids=(f"{PREFIX}chrek-checkpoint-hash",),
        restore=f"{PREFIX}chrek-is-restore-target",
        status=f"{PREFIX}chrek-checkpoint-status",
        restore_status=f"{PREFIX}chrek-restore-status",
        word=Word.UNIX,
        ready_file="/tmp/ready-for-checkpoint",  # noqa: S108 - likewise
    ),
    KubeEra(
        name="C",
        source=f"{PREFIX}snapshot-is-checkpoint-source",
        ids=(f"{PREFIX}snapshot-checkpoint-id", f"{PREFIX}snapshot-checkpoint-hash"),
        restore=f"{PREFIX}snapshot-is-restore-target",
        status=JOB_STATUS,
        status_on_job=True,
        lease=True,
        restore_status=f"{PREFIX}snapshot-restore-status",
        restore_container_id=f"{PREFIX}snapshot-restore-container-id",
        target_containers=f"{PREFIX}snapshot-target-containers",
        restore_by_id=True,
        word=Word.SENTINEL,
        ready_file="ready-for-checkpoint",
    ),
)
"""The eras that the agent knows in a cluster; A1 is the default."""

# What a checkpoint Job's pod is given, in era A1: volumes, mounts, environment.

SIGNAL_VOLUME: Final = "checkpoint-signal"
STORAGE_VOLUME: Final = "checkpoint-storage"
PODINFO_VOLUME: Final = "podinfo"
SIGNAL_MOUNT: Final = "/checkpoint-signal"
PODINFO_MOUNT: Final = "/etc/podinfo"
CLEANUP_CONTAINER: Final = "cleanup-signal-file"
MAIN_CONTAINER: Final = "main"
"""The container that the operator calls the worker's."""

ENV_LOCATION: Final = "DYN_CHECKPOINT_LOCATION"
ENV_STORAGE_TYPE: Final = "DYN_CHECKPOINT_STORAGE_TYPE"
STORAGE_TYPE: Final = "pvc"

PODINFO: Final = (
    ("pod_name", "metadata.name"),
    ("pod_uid", "metadata.uid"),
    ("pod_namespace", "metadata.namespace"),
    ("dyn_namespace", f"metadata.annotations['{PREFIX}dyn-namespace']"),
    ("dyn_component", f"metadata.annotations['{PREFIX}dyn-component']"),
    ("dyn_parent_dgd_name", f"metadata.annotations['{PREFIX}dyn-parent-dgd-name']"),
    ("dyn_parent_dgd_namespace", f"metadata.annotations['{PREFIX}dyn-parent-dgd-namespace']"),
    ("dyn_discovery_backend", f"metadata.annotations['{PREFIX}dyn-discovery-backend']"),
)
"""Files of the podinfo volume, and the field that each one shows."""
