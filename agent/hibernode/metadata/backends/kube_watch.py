"""The catalogue of ModelMetadata objects that a watch keeps up to date; lists are served from it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from hibernode.errors import IntegrityError
from hibernode.kube.api import KubeApi
from hibernode.kube.follow import MAX_AGE, Follower, Listing, newer
from hibernode.kube.objects import metadata_of
from hibernode.metadata.catalogue import Catalogue
from hibernode.metadata.mapping import ids_of_name, instance_of

log = logging.getLogger(__name__)


class Mirror:
    """Keeps what :attr:`follower` finds; one bad object hides no other."""

    def __init__(self, api: KubeApi, path: str, *, max_age: float = MAX_AGE) -> None:
        self.catalogue = Catalogue()
        self.unreadable: dict[str, str] = {}
        listing = Listing(path, "ModelMetadata objects", missing="apply daemonset/crds/modelmetadata.yaml")
        self.follower = Follower(api, listing, self, max_age=max_age)
        self._removed: set[str] = set()

    async def start(self) -> None:
        """List, and begin to follow.

        :raises UnavailableError: the API server does not answer, or does not know the objects.
        """
        await self.follower.start()

    async def stop(self) -> None:
        """End."""
        self.catalogue.close()
        await self.follower.stop()

    def apply(self, raw: dict[str, Any]) -> None:
        """Take the state of an object that the API gave; one of which no record can be made is noted."""
        metadata = metadata_of(raw)
        name, uid = str(metadata.get("name", "")), str(metadata.get("uid", ""))
        if metadata.get("deletionTimestamp") or uid in self._removed:
            self.forget(name, uid)
            return
        try:
            instance = instance_of(raw)
        except IntegrityError as error:
            if self.unreadable.get(name) != error.message:
                log.warning("%s", error.message)
            self.unreadable[name] = error.message
            if ids := ids_of_name(name):
                self.catalogue.drop(*ids)
            return
        self.unreadable.pop(name, None)
        known = self.catalogue.find(instance.source_id, instance.worker_id)
        if known is None or newer(instance.version.revision, known.version.revision):
            self.catalogue.put(instance)

    def gone(self, raw: dict[str, Any]) -> None:
        """Take it that an object was deleted."""
        metadata = metadata_of(raw)
        uid = str(metadata.get("uid", ""))
        self.forget(str(metadata.get("name", "")), uid)
        self._removed.discard(uid)

    def listed(self, seen: Mapping[str, str], version: str) -> None:
        """Drop what a whole list no longer has."""
        for one in self.catalogue:
            # One that was published while the pages were read is newer than the list, and stays.
            if one.version.uid not in seen and not newer(one.version.revision, version):
                self.catalogue.drop(one.source_id, one.worker_id)
        names = set(seen.values())
        self.unreadable = {name: why for name, why in self.unreadable.items() if name in names}
        self._removed.clear()

    def forget(self, name: str, uid: str, *, removed_here: bool = False) -> None:
        """Take it that an object is gone; ``removed_here``: events about it from before may still come."""
        self.unreadable.pop(name, None)
        ids = ids_of_name(name)
        known = self.catalogue.find(*ids) if ids else None
        if known is not None and known.version.uid == uid:
            self.catalogue.drop(known.source_id, known.worker_id)
            if removed_here:
                self._removed.add(uid)
