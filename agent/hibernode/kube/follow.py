"""A list of Kubernetes objects, kept up to date by a watch: list, follow, list again after 410, for ever."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final, Protocol

from hibernode.errors import UnavailableError
from hibernode.kube.api import FIRST_PAUSE, GONE, LONGEST_PAUSE, Budget, KubeApi, KubeStatusError
from hibernode.kube.objects import metadata_of

MAX_AGE: Final = 90.0
"""Seconds for which a list stands without word from the API server: three watches."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Listing:
    """What is followed: the ``path`` of the collection, its selectors, and its name for people."""

    path: str
    what: str
    labels: str = ""
    fields: str = ""
    missing: str = "is the object's kind installed?"
    """What to do if the API server does not know such objects."""


class Sink(Protocol):
    """Who keeps the objects. What it is given may be anything that JSON can be below ``metadata``."""

    def apply(self, raw: dict[str, Any]) -> None:
        """Take the state of an object, which may be older than what is known of it."""

    def gone(self, raw: dict[str, Any]) -> None:
        """Take it that an object was deleted, or is no longer selected; ``raw`` is its last state."""

    def listed(self, seen: Mapping[str, str], version: str) -> None:
        """Take it that at ``version`` there were these objects, uid to name, and no others."""


class Follower:
    """Feeds a :class:`Sink`. In an outage the sink keeps what it had, and ``age`` grows."""

    def __init__(self, api: KubeApi, listing: Listing, sink: Sink, *, max_age: float = MAX_AGE) -> None:
        self.relists = 0
        self.trouble = ""
        """Why the API server is not heard now."""
        self._api, self._listing, self._sink, self._max_age = api, listing, sink, max_age
        self._heard = 0.0
        self._version = ""
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """List, and begin to follow.

        :raises UnavailableError: the API server does not answer, or does not know the objects.
        """
        await self._relist()
        self._task = asyncio.create_task(self._follow(), name=f"watch of {self._listing.what}")

    async def stop(self) -> None:
        """End."""
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
        """Refuse to answer from a list that is too old, or that never was.

        :raises UnavailableError: the API server has been silent for too long.
        """
        if not self.synced:
            raise UnavailableError(
                f"the list of {self._listing.what} is not known"
                if self._task is None
                else f"the Kubernetes API has not been heard for {self.age():.0f} s: {self.trouble}",
                remedy="is the API server up, and can this node reach it?",
            )

    async def _relist(self) -> None:
        """Read all pages; again from the start if the list grew too old between two of them."""
        budget, what = self._api.budget(), self._listing.what
        while True:
            try:
                await self._read_pages(budget)
            except UnavailableError as error:
                if error.reason != "NoCrd":
                    raise
                raise UnavailableError(
                    f"the API server does not know {what}", remedy=self._listing.missing, reason="NoCrd"
                ) from error
            except KubeStatusError as error:
                if error.code != GONE:
                    raise UnavailableError(f"the list of {what} failed: {error}") from error
                await budget.again(error)
            else:
                return

    async def _read_pages(self, budget: Budget) -> None:
        seen: dict[str, str] = {}
        version, asked = "", self._listing
        pages = self._api.pages(asked.path, budget, labels=asked.labels, fields=asked.fields)
        async for page in pages:
            version = version or str(metadata_of(page).get("resourceVersion", ""))
            for raw in page["items"] or []:
                if not isinstance(raw, dict):
                    continue
                metadata = metadata_of(raw)
                seen[str(metadata.get("uid", ""))] = str(metadata.get("name", ""))
                self._sink.apply(raw)
        self._sink.listed(seen, version)
        self._version = version
        self._hear()
        self.relists += 1

    async def _follow(self) -> None:
        """Follow for ever; no failure ends it, and none makes it spin."""
        failures, asked = 0, self._listing
        while True:
            began = time.monotonic()
            try:
                if not self._version:
                    await self._relist()
                changes = self._api.events(
                    asked.path, self._version, labels=asked.labels, fields=asked.fields
                )
                async with aclosing(changes) as events:
                    async for event in events:
                        self._take(event)
            except KubeStatusError as error:
                log.info("the watch of %s begins anew: %s", asked.what, error)
                self._version = ""
            except UnavailableError as error:
                if error.message != self.trouble:
                    log.warning("%s: %s", asked.what, error.message)
                self.trouble = error.message
            except Exception:
                log.exception("the watch of %s failed", asked.what)
                self._version = ""
            failures = failures + 1 if time.monotonic() - began < LONGEST_PAUSE else 0
            ceiling = min(FIRST_PAUSE * 2 ** min(failures, 10), LONGEST_PAUSE) if failures else 0.0
            await asyncio.sleep(random.uniform(0, ceiling))  # noqa: S311 - spreads callers, no secret

    def _hear(self) -> None:
        """Take it that the API server has answered."""
        if self.trouble:
            log.info("%s: the API server is heard again", self._listing.what)
        self._heard, self.trouble = time.monotonic(), ""

    def _take(self, event: dict[str, Any]) -> None:
        self._hear()
        raw = event["object"]
        kind, metadata = event.get("type"), metadata_of(raw)
        if kind == "DELETED":
            self._sink.gone(raw)
        elif kind in {"ADDED", "MODIFIED"}:
            self._sink.apply(raw)
        if kind != "OPEN" and metadata.get("resourceVersion"):
            self._version = str(metadata["resourceVersion"])


def newer(one: str, other: str) -> bool:
    """Compare resource versions: numbers on every API server; what is not is taken for newer if different."""
    if one.isdecimal() and other.isdecimal():
        return int(one) > int(other)
    return one != other
