"""Takes away records that nobody keeps up: marked STALE first, removed later, one reaper in a cluster.

Times in records are other machines' clocks. They count for what was there before the first scan; from then
on a time is bounded by the two scans between which it appeared, so no wrong clock keeps or kills a record for
long.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Final

from hibernode.errors import ConflictError, HibernodeError, NotFoundError
from hibernode.kube.lease import Lease
from hibernode.metadata.backend import MetadataBackend
from hibernode.metadata.publish import acceptable
from hibernode.metadata.records import SourceInstance, SourceStatus
from hibernode.metadata.times import MS

LEASE: Final = "hibernode-metadata-reaper"
"""The Lease of the cluster's one reaper; it stands for three scans."""

SCAN_SECONDS: Final = 30.0
"""Upstream's MX_REAPER_SCAN_INTERVAL_SECS."""

RELEASE_SECONDS: Final = 2.0
"""What an agent that stops waits for the API server to take the lease back; it runs out anyway."""

LIVING: Final = frozenset({SourceStatus.READY, SourceStatus.INITIALIZING})

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds without a heartbeat until a record is STALE, and seconds more until it is removed.

    The defaults are upstream's MX_HEARTBEAT_TIMEOUT_SECS and MX_GC_TIMEOUT_SECS.
    """

    stale_seconds: float = 90.0
    remove_seconds: float = 3600.0


class Verdict(StrEnum):
    """What is to be done with a record."""

    KEEP = "keep"
    MARK = "mark"
    REMOVE = "remove"


@dataclass(frozen=True, slots=True)
class Reaped:
    """What one scan did; ``kept`` changed in between, ``failed`` could not be changed and is tried again."""

    marked: int = 0
    removed: int = 0
    kept: int = 0
    failed: int = 0


def told_at(one: SourceInstance) -> int:
    """Give the time in ms that a record itself says it is from; an object without a worker has its making."""
    return one.updated_at if one.whole and one.updated_at else one.created_at


def decide(one: SourceInstance, age_ms: int, limits: Limits, *, owned: bool) -> Verdict:
    """Judge a record by its age; exactly the limit is not yet over it.

    ``owned``: its owner lives. That only saves what is UNKNOWN or not whole: a worker that has a status
    has heartbeats.
    """
    if one.whole and one.status in LIVING:
        return Verdict.MARK if age_ms > limits.stale_seconds * 1000 else Verdict.KEEP
    saved = owned and not (one.whole and one.status is SourceStatus.STALE)
    return Verdict.REMOVE if age_ms > limits.remove_seconds * 1000 and not saved else Verdict.KEEP


@dataclass(frozen=True, slots=True)
class _Sight:
    """One state of a record, and the time in ms from which its age counts."""

    state: tuple[str, int, SourceStatus]
    since: int


class Reaper:
    """Scans the records of ``backend``; with a ``lease``, only while it is held.

    ``owner_lives`` is asked about records that would be removed though they were never marked: UNKNOWN, or
    not whole. ``clock`` gives nanoseconds since 1970. ``totals`` adds up what the scans did.
    """

    def __init__(
        self,
        backend: MetadataBackend,
        *,
        owner_lives: Callable[[SourceInstance], Awaitable[bool]],
        lease: Lease | None = None,
        limits: Limits = Limits(),
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self._backend, self._owner_lives, self._lease = backend, owner_lives, lease
        self._limits, self._clock = limits, clock
        self._sights: dict[tuple[str, str], _Sight] = {}
        self._last = 0
        self.totals = Counter(asdict(Reaped()))

    async def run(self, interval: float = SCAN_SECONDS) -> None:
        """Scan for ever; no failure ends it. The lease is given back at the end."""
        try:
            while True:
                try:
                    await self.turn()
                except HibernodeError as error:
                    log.warning("records were not scanned: %s", error.message)
                except Exception:
                    log.exception("the scan of metadata records failed")
                await asyncio.sleep(interval)
        finally:
            if self._lease is not None:
                with suppress(TimeoutError):
                    async with asyncio.timeout(RELEASE_SECONDS):
                        await self._lease.release()

    async def turn(self) -> Reaped | None:
        """Scan if it is this agent's turn; None if another one does.

        :raises UnavailableError: the records or the lease cannot be asked for.
        """
        if self._lease is not None and not await self._lease.ask():
            # What comes between now and a later turn would be unbounded times again.
            self._sights, self._last = {}, 0
            return None
        return await self.scan()

    async def scan(self) -> Reaped:
        """Mark and remove what is due, each only in the state in which the list showed it.

        :raises UnavailableError: there is no list.
        """
        found = await self._backend.list_workers()
        now = self._clock() // MS
        self._look(found, now)
        done = Counter[str]()
        for one in found:
            age = now - self._sights[one.source_id, one.worker_id].since
            verdict = decide(one, age, self._limits, owned=False)
            if verdict is Verdict.REMOVE and not (one.whole and one.status is SourceStatus.STALE):
                verdict = decide(one, age, self._limits, owned=await self._owner_lives(one))
            if verdict is Verdict.KEEP:
                continue
            if self._lease is not None and not self._lease.left():
                break
            done[await self._carry_out(one, verdict)] += 1
        self.totals.update(done)
        return Reaped(**done)

    def _look(self, found: list[SourceInstance], now: int) -> None:
        """Note since when each record is as it is."""
        sights = {}
        for one in found:
            key, state = (one.source_id, one.worker_id), (one.version.uid, told_at(one), one.status)
            sight = self._sights.get(key)
            if sight is None or sight.state != state:
                sight = _Sight(state, min(max(told_at(one), self._last), now))
            elif sight.since > now:  # this machine's own clock went back
                sight = _Sight(state, now)
            sights[key] = sight
        self._sights, self._last = sights, now

    async def _carry_out(self, one: SourceInstance, verdict: Verdict) -> str:
        """Change one record while the lease lasts; one that fails keeps no other."""
        seconds = self._lease.left() if self._lease is not None else None
        try:
            async with asyncio.timeout(seconds):
                if verdict is Verdict.REMOVE:
                    await self._backend.remove_worker(one.source_id, one.worker_id, expect=one.version)
                    return "removed"
                at = acceptable(one.updated_at, self._clock())
                marked = await self._backend.update_status(
                    one.source_id, one.worker_id, one.rank, SourceStatus.STALE, at, expect=one.version
                )
                return "marked" if marked else "kept"
        except (ConflictError, NotFoundError):
            return "kept"
        except (HibernodeError, TimeoutError) as error:
            log.warning("worker %s of source %s stays as it is: %s", one.worker_id, one.source_id, error)
            return "failed"
