"""Does the owner of a record live? Whoever cannot be asked about is taken for living."""

from __future__ import annotations

import logging
import re
import time
from collections import OrderedDict
from typing import Any, Final

from hibernode.errors import UnavailableError
from hibernode.kube.api import NOT_FOUND, KubeApi, KubeStatusError
from hibernode.kube.objects import metadata_of
from hibernode.metadata.locality import Places
from hibernode.metadata.owners import OwnerWatch
from hibernode.metadata.records import NOBODY, PodRef, SourceInstance

ANSWER_SECONDS: Final = 60.0
"""How long an answer of the API server holds: two scans of the reaper."""

MAX_ANSWERS: Final = 4096
ENDED: Final = frozenset({"Succeeded", "Failed"})
"""Phases of a pod that runs no more and never will."""

_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
"""A DNS subdomain, as a pod's name is; what a record tells gets into a URL."""

log = logging.getLogger(__name__)


class Living:
    """Tells of a record whether its owner lives.

    First by the process that published it, then by its container or pod on this node, then by the pod in the
    cluster, through ``api``; None: there is no cluster.
    """

    def __init__(self, owners: OwnerWatch, places: Places, api: KubeApi | None = None) -> None:
        self._owners, self._places, self._api = owners, places, api
        self._answers: OrderedDict[str, tuple[float, bool]] = OrderedDict()

    async def __call__(self, one: SourceInstance) -> bool:
        """Tell; raises nothing."""
        if self._owners.lives((one.source_id, one.worker_id)):
            return True
        if one.owner is None:
            return False
        node = await self._places.node()
        if one.owner.uid in node.pods:
            return True
        if self._api is None or NOBODY in (one.owner.name, one.owner.namespace):
            return False
        return await self._in_cluster(self._api, one.owner)

    async def _in_cluster(self, api: KubeApi, owner: PodRef) -> bool:
        known = self._answers.get(owner.uid)
        if known is not None and time.monotonic() < known[0]:
            return known[1]
        lives = await _ask(api, owner)
        self._answers[owner.uid] = (time.monotonic() + ANSWER_SECONDS, lives)
        self._answers.move_to_end(owner.uid)
        while len(self._answers) > MAX_ANSWERS:
            self._answers.popitem(last=False)
        return lives


async def _ask(api: KubeApi, owner: PodRef) -> bool:
    """Ask for the pod of this name, and compare its uid."""
    if not (_NAME.fullmatch(owner.name) and _NAME.fullmatch(owner.namespace)):
        return False  # no pod has such a name
    try:
        path = f"/api/v1/namespaces/{owner.namespace}/pods/{owner.name}"
        pod = await api.call("GET", path, api.budget())
    except KubeStatusError as error:
        return error.code != NOT_FOUND
    except UnavailableError as error:
        log.warning("pod %s is taken for living: %s", owner.name, error.message)
        return True
    status: Any = pod.get("status")
    phase = status.get("phase") if isinstance(status, dict) else None
    return metadata_of(pod).get("uid") == owner.uid and phase not in ENDED
