"""The list of ModelMetadata objects, kept up to date by a watch; lists are served from it."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from contextlib import aclosing
from typing import Any, Final

from hibernode.errors import IntegrityError, UnavailableError
from hibernode.metadata.backends.kube_api import FIRST_PAUSE, LONGEST_PAUSE, Budget, KubeApi, KubeStatusError
from hibernode.metadata.catalogue import Catalogue
from hibernode.metadata.mapping import ids_of_name, instance_of, metadata_of
from hibernode.metadata.records import SourceInstance

MAX_AGE: Final = 90.0
"""Seconds for which the list stands without word from the API server: the heartbeats' own time limit."""

GONE: Final = 410
NOT_FOUND: Final = 404

log = logging.getLogger(__name__)


class Mirror:
    """Lists once, then follows; after 410 it lists again. One bad object hides no other."""

    def __init__(self, api: KubeApi, path: str, *, max_age: float = MAX_AGE) -> None:
        self.catalogue = Catalogue()
        self.unreadable: dict[str, str] = {}
        self.relists = 0
        self._api, self._path, self._max_age = api, path, max_age
        self._removed: set[str] = set()
        self._heard = 0.0
        self._version = ""
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """List, and begin to follow.

        :raises UnavailableError: the API server does not answer, or does not know the objects.
        """
        await self._relist()
        self._task = asyncio.create_task(self._follow(), name="metadata watch")

    async def stop(self) -> None:
        """End."""
        self.catalogue.close()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    @property
    def synced(self) -> bool:
        """Whether the list is the truth, or was a moment ago."""
        return self._task is not None and self.age() <= self._max_age

    def age(self) -> float:
        """Seconds since the API server was last heard."""
        return time.monotonic() - self._heard if self._heard else 0.0

    def check(self) -> None:
        """Refuse to serve a list that is too old, or that never was.

        :raises UnavailableError: the API server has been silent for too long.
        """
        if not self.synced:
            raise UnavailableError(
                "the list of metadata records is not known"
                if self._task is None
                else f"the Kubernetes API has not been heard for {self.age():.0f} s",
                remedy="is the API server up, and can this node reach it?",
            )

    def apply(self, raw: dict[str, Any]) -> SourceInstance | None:
        """Take the state of an object that the API gave; None if no record can be made of it."""
        metadata = metadata_of(raw)
        name, uid = str(metadata.get("name", "")), str(metadata.get("uid", ""))
        if metadata.get("deletionTimestamp") or uid in self._removed:
            self.forget(name, uid)
            return None
        try:
            instance = instance_of(raw)
        except IntegrityError as error:
            if self.unreadable.get(name) != error.message:
                log.warning("%s", error.message)
            self.unreadable[name] = error.message
            if ids := ids_of_name(name):
                self.catalogue.drop(*ids)
            return None
        self.unreadable.pop(name, None)
        known = self.catalogue.find(instance.source_id, instance.worker_id)
        if known is None or newer(instance.version.revision, known.version.revision):
            self.catalogue.put(instance)
        return instance

    def forget(self, name: str, uid: str, *, removed_here: bool = False) -> None:
        """Take it that an object is gone; ``removed_here``: events about it from before may still come."""
        self.unreadable.pop(name, None)
        ids = ids_of_name(name)
        known = self.catalogue.find(*ids) if ids else None
        if known is not None and known.version.uid == uid:
            self.catalogue.drop(known.source_id, known.worker_id)
            if removed_here:
                self._removed.add(uid)

    async def _relist(self) -> None:
        """Read all pages; again from the start if the list grew too old between two of them."""
        budget = self._api.budget()
        while True:
            try:
                await self._read_pages(budget)
            except KubeStatusError as error:
                if error.code == NOT_FOUND:
                    raise UnavailableError(
                        "the API server does not know ModelMetadata objects",
                        remedy="apply daemonset/crds/modelmetadata.yaml",
                        reason="NoCrd",
                    ) from error
                if error.code != GONE:
                    raise UnavailableError(f"the list of metadata records failed: {error}") from error
                await budget.again(error)
            else:
                return

    async def _read_pages(self, budget: Budget) -> None:
        found: set[tuple[str, str]] = set()
        names: set[str] = set()
        version = ""
        async for page in self._api.pages(self._path, budget):
            version = version or str(metadata_of(page).get("resourceVersion", ""))
            for raw in page["items"] or []:
                if not isinstance(raw, dict):
                    continue
                instance = self.apply(raw)
                names.add(str(metadata_of(raw).get("name", "")))
                if instance is not None:
                    found.add((instance.source_id, instance.worker_id))
        for one in self.catalogue:
            # One that was published while the pages were read is newer than the list, and stays.
            if (one.source_id, one.worker_id) not in found and not newer(one.version.revision, version):
                self.catalogue.drop(one.source_id, one.worker_id)
        self.unreadable = {name: why for name, why in self.unreadable.items() if name in names}
        self._removed.clear()
        self._version, self._heard = version, time.monotonic()
        self.relists += 1

    async def _follow(self) -> None:
        """Follow for ever; no failure ends it, and none makes it spin."""
        failures = 0
        while True:
            began = time.monotonic()
            try:
                if not self._version:
                    await self._relist()
                async with aclosing(self._api.events(self._path, self._version)) as events:
                    async for event in events:
                        self._take(event)
            except KubeStatusError as error:
                log.info("the watch of metadata records begins anew: %s", error)
                self._version = ""
            except UnavailableError as error:
                log.warning("%s", error.message)
            except Exception:
                log.exception("the watch of metadata records failed")
                self._version = ""
            failures = failures + 1 if time.monotonic() - began < LONGEST_PAUSE else 0
            ceiling = min(FIRST_PAUSE * 2 ** min(failures, 10), LONGEST_PAUSE) if failures else 0.0
            await asyncio.sleep(random.uniform(0, ceiling))  # noqa: S311 - spreads callers, no secret

    def _take(self, event: dict[str, Any]) -> None:
        self._heard = time.monotonic()
        raw = event["object"]
        kind, metadata = event.get("type"), metadata_of(raw)
        if kind == "DELETED":
            uid = str(metadata.get("uid", ""))
            self.forget(str(metadata.get("name", "")), uid)
            self._removed.discard(uid)
        elif kind in {"ADDED", "MODIFIED"}:
            self.apply(raw)
        if kind != "OPEN" and metadata.get("resourceVersion"):
            self._version = str(metadata["resourceVersion"])


def newer(one: str, other: str) -> bool:
    """Compare resource versions: numbers on every API server; what is not is taken for newer if different."""
    if one.isdecimal() and other.isdecimal():
        return int(one) > int(other)
    return one != other
