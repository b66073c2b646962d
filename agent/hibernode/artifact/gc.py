"""Retention: what may go, in which order, and why. Pure; the store does the removing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hibernode.artifact.layout import ArtifactInfo, ArtifactState
from hibernode.settings import GcSettings

WHOLE: Final = frozenset({ArtifactState.COMPLETE, ArtifactState.PREVIOUS})


@dataclass(frozen=True, slots=True)
class GcItem:
    """One thing that went, or would go. ``bytes``: what that frees."""

    id: str
    uuid: str
    path: Path
    bytes: int
    why: str


def collect(
    infos: Iterable[ArtifactInfo],
    policy: GcSettings,
    *,
    free_bytes: int,
    now: float,
    remove: Callable[[ArtifactInfo], bool],
) -> list[GcItem]:
    """Apply the rules in order: partial, too old, too many of an id, store too large, disk too full.

    ``remove`` is asked to remove one and says whether it did: one in use stays, and the next in line may
    have to go for it. What is pinned or under way is never asked for. ``now``: seconds since 1970.

    Where bytes must be freed, the superseded and the corrupt go before the artifact that a restore would
    take, and the oldest before the newest.
    """
    work = _Collection(list(infos), policy, free_bytes, now, remove)
    for rule in (work.partial, work.age, work.count, work.total, work.floor):
        rule()
    return work.gone


class _Collection:
    """One run of the rules; ``left`` is what still stands, the least worth first."""

    def __init__(
        self,
        infos: list[ArtifactInfo],
        policy: GcSettings,
        free: int,
        now: float,
        remove: Callable[[ArtifactInfo], bool],
    ) -> None:
        infos.sort(key=lambda info: (info.state is ArtifactState.COMPLETE, info.created_unix))
        self.left = {info.path: info for info in infos}
        self.gone: list[GcItem] = []
        self._policy = policy
        self._free = free
        self._now = now
        self._remove = remove

    def partial(self) -> None:
        for info in list(self.left.values()):
            if info.state is ArtifactState.PARTIAL:
                self._drop(info, f"partial: {info.problem}")

    def age(self) -> None:
        limit = self._policy.max_age_seconds
        for info in list(self.left.values()):
            if limit and self._now - info.created_unix > limit:
                self._drop(info, f"older than gc.max_age_seconds={limit:g}")

    def count(self) -> None:
        limit = self._policy.keep_per_id
        versions: dict[str, list[ArtifactInfo]] = defaultdict(list)
        for info in self.left.values():
            if info.state in WHOLE:
                versions[info.id].append(info)
        for of_one_id in versions.values():
            for info in of_one_id[:-limit] if limit else []:
                self._drop(info, f"more than gc.keep_per_id={limit} of its id")

    def total(self) -> None:
        limit = self._policy.max_total_bytes
        if limit:
            self._shrink(
                lambda: sum(info.bytes for info in self.left.values()) <= limit,
                f"the store is larger than gc.max_total_bytes={limit}",
            )

    def floor(self) -> None:
        limit = self._policy.min_free_bytes
        self._shrink(lambda: self._free >= limit, f"less is free than gc.min_free_bytes={limit}")

    def _shrink(self, enough: Callable[[], bool], why: str) -> None:
        for info in list(self.left.values()):
            if enough():
                return
            self._drop(info, why)

    def _drop(self, info: ArtifactInfo, why: str) -> None:
        if info.pinned or info.state is ArtifactState.IN_PROGRESS or not self._remove(info):
            return
        del self.left[info.path]
        self._free += info.bytes
        self.gone.append(GcItem(info.id, info.uuid, info.path, info.bytes, why))
