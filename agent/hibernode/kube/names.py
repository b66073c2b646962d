"""What the eras of the contract call things in Kubernetes: one table, one place for each constant.

Facts of ai-dynamo/dynamo's operator and node agents; the era of a name is the time in which they used it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

PREFIX: Final = "nvidia.com/"
NAME_LABEL: Final = f"{PREFIX}checkpoint-name"
"""The DynamoCheckpoint that a Job and its pods are for; the same in all eras."""

GROUP: Final = "nvidia.com"
VERSION: Final = "v1alpha1"
PLURAL: Final = "dynamocheckpoints"
KIND: Final = "DynamoCheckpoint"


@dataclass(frozen=True, slots=True)
class KubeEra:
    """The labels and annotations of one era.

    ``ids``: labels that carry the checkpoint id, the one written now first. ``restore``: the label of a
    restore target; empty where none marks it. ``status``: the annotation that a checkpoint's status is told
    by, on the pod or, with ``status_on_job``, on its Job. ``restore_status``: the pod's annotation.
    """

    name: str
    source: str
    ids: tuple[str, ...]
    restore: str = ""
    status: str = ""
    status_on_job: bool = False
    restore_status: str = ""
    restore_container_id: str = ""
    target_containers: str = ""


ERAS: Final = (
    KubeEra(
        name="A1",  # A0 has the same labels
        source=f"{PREFIX}checkpoint-source",
        ids=(f"{PREFIX}checkpoint-hash",),
        restore=f"{PREFIX}checkpoint-restore",  # of a later A1 variant
    ),
    KubeEra(
        name="B",
        source=f"{PREFIX}chrek-is-checkpoint-source",
        ids=(f"{PREFIX}chrek-checkpoint-hash",),
        restore=f"{PREFIX}chrek-is-restore-target",
        status=f"{PREFIX}chrek-checkpoint-status",
        restore_status=f"{PREFIX}chrek-restore-status",
    ),
    KubeEra(
        name="C",
        source=f"{PREFIX}snapshot-is-checkpoint-source",
        ids=(f"{PREFIX}snapshot-checkpoint-id", f"{PREFIX}snapshot-checkpoint-hash"),
        restore=f"{PREFIX}snapshot-is-restore-target",
        status=f"{PREFIX}snapshot-checkpoint-status",
        status_on_job=True,
        restore_status=f"{PREFIX}snapshot-restore-status",
        restore_container_id=f"{PREFIX}snapshot-restore-container-id",
        target_containers=f"{PREFIX}snapshot-target-containers",
    ),
)
"""The eras that the agent knows in a cluster; A1 is the default."""
