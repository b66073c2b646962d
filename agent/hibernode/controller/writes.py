"""The controller's reads and writes of DynamoCheckpoints and Jobs; each write is over what was read."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from hibernode.controller.shelf import owner_of
from hibernode.controller.status import Condition, with_conditions
from hibernode.kube import names
from hibernode.kube.api import MERGE, NOT_FOUND, KubeApi, KubeStatusError
from hibernode.kube.names import ERAS
from hibernode.kube.objects import metadata_of, part_of, stamp

FINALIZER: Final = "hibernode.io/artifact"
"""Keeps a deleted object until its artifacts are removed."""

ATTEMPTS: Final = "hibernode.io/attempts"
"""How often the controller has tried anew. An annotation: another's definition might drop a field of ours."""

RETRIES: Final = "hibernode.io/retries"
"""How often it may; stronger than the setting."""


class Writes:
    """``wall`` gives seconds since 1970."""

    def __init__(self, api: KubeApi, wall: Callable[[], float] = time.time) -> None:
        self.api, self.wall = api, wall

    async def checkpoint(self, namespace: str, name: str) -> dict[str, Any] | None:
        """Read a DynamoCheckpoint; None if it is gone."""
        return await self._get(_checkpoint(namespace, name))

    async def job(self, namespace: str, name: str) -> dict[str, Any] | None:
        """Read a Job; None if it is gone."""
        return await self._get(f"{_jobs(namespace)}/{name}")

    async def create(self, namespace: str, job: Mapping[str, Any]) -> dict[str, Any]:
        """Make a Job.

        :raises KubeStatusError: 409, there is one of that name; 400 and 422, it is not acceptable.
        """
        return await self.api.call("POST", _jobs(namespace), self.api.budget(), body=job)

    async def delete(self, job: Mapping[str, Any], *, wait: bool = False) -> None:
        """Delete exactly this Job, pods and all; with ``wait`` it stands until its pods are gone."""
        metadata = metadata_of(job)
        body = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": "Foreground" if wait else "Background",
            "preconditions": {"uid": metadata["uid"]},
        }
        path = f"{_jobs(str(metadata['namespace']))}/{metadata['name']}"
        try:
            await self.api.call("DELETE", path, self.api.budget(), body=body)
        except KubeStatusError as error:
            if error.code != NOT_FOUND:
                raise

    async def status(
        self,
        raw: Mapping[str, Any],
        changes: Mapping[str, Any],
        conditions: Iterable[Condition] = (),
        *,
        without: str = "",
    ) -> dict[str, Any]:
        """Change the status of a DynamoCheckpoint that is still as ``raw`` is.

        :raises KubeStatusError: 409, it is not.
        """
        status = dict(changes)
        new = tuple(conditions)
        if new or without:
            status["conditions"] = with_conditions(raw, new, stamp(self.wall()), without=without)
        return await self._patch(raw, {"status": status}, "/status")

    async def annotate(self, raw: Mapping[str, Any], annotations: Mapping[str, str | None]) -> dict[str, Any]:
        """Set annotations of a DynamoCheckpoint that is still as ``raw`` is; None removes one."""
        return await self._patch(raw, {"metadata": {"annotations": annotations}})

    async def finalizers(self, raw: Mapping[str, Any], finalizers: list[str]) -> dict[str, Any]:
        """Set the finalizers of a DynamoCheckpoint that is still as ``raw`` is."""
        return await self._patch(raw, {"metadata": {"finalizers": finalizers}})

    async def _patch(self, raw: Mapping[str, Any], body: dict[str, Any], sub: str = "") -> dict[str, Any]:
        metadata = metadata_of(raw)
        version = {"resourceVersion": metadata["resourceVersion"], "uid": metadata["uid"]}
        whole = {**body, "metadata": {**body.get("metadata", {}), **version}}
        path = _checkpoint(str(metadata["namespace"]), str(metadata["name"])) + sub
        return await self.api.call("PATCH", path, self.api.budget(), body=whole, content=MERGE)

    async def _get(self, path: str) -> dict[str, Any] | None:
        try:
            return await self.api.call("GET", path, self.api.budget())
        except KubeStatusError as error:
            if error.code == NOT_FOUND:
                return None
            raise


def is_ours(job: Mapping[str, Any], checkpoint: Mapping[str, Any]) -> bool:
    """Tell whether a Job is that of this very DynamoCheckpoint, and not of one that had its name before."""
    owner = owner_of(job)
    return owner is not None and owner[1] == metadata_of(checkpoint).get("uid")


def makes(job: Mapping[str, Any], id_: str) -> bool:
    """Tell whether a Job's pods make this checkpoint; their labels stay, and the Job's own may change."""
    template = part_of(part_of(job, "spec"), "template")
    return part_of(metadata_of(template), "labels").get(ERAS[0].ids[0]) == id_


def _checkpoint(namespace: str, name: str) -> str:
    return f"/apis/{names.GROUP}/{names.VERSION}/namespaces/{namespace}/{names.PLURAL}/{name}"


def _jobs(namespace: str) -> str:
    return f"/apis/batch/v1/namespaces/{namespace}/jobs"
