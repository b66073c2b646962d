"""Health and numbers of what the pipelines stand on: the signal directory, the store, CRIU."""

from __future__ import annotations

import tempfile
from typing import Any, Final

from hibernode.artifact.layout import STAGING
from hibernode.artifact.store import Store
from hibernode.criu.runner import find_criu
from hibernode.discovery.watch import DirectoryWatcher, Mode
from hibernode.errors import HibernodeError
from hibernode.health import Check, DegradedError, Health, in_thread
from hibernode.metrics import Metrics, Reading
from hibernode.settings import Settings

STORE_READING_SECONDS: Final = 15.0
"""How long a reading of the store's sizes is used for scrapes and ``status``."""


class Vitals:
    """Tells how they are. With ``checkpoint.enabled`` false the store is not looked at."""

    def __init__(self, settings: Settings, store: Store, watcher: DirectoryWatcher) -> None:
        self._settings, self._store, self._watcher = settings, store, watcher

    def register(self, health: Health, metrics: Metrics) -> None:
        """Add the checks and the readings."""
        health.add(Check("signals", self.signals))
        health.add(Check("store", in_thread(self.store)))
        health.add(Check("criu", in_thread(self.criu)))
        metrics.add_collector("watch", self.read_watch)
        metrics.add_collector("store", self.read_store, blocking=True, keep_seconds=STORE_READING_SECONDS)

    async def signals(self) -> str:
        """Check that the signal directory is watched.

        :raises HibernodeError: it is not there; DegradedError: it is polled, though nobody asked for that.
        """
        watcher = self._watcher
        if watcher.mode is Mode.ABSENT:
            raise HibernodeError(f"{self._settings.signals.path}: {watcher.mode_reason}")
        if watcher.mode is Mode.POLL and self._settings.signals.watch == "auto":
            raise DegradedError(f"polled: {watcher.mode_reason}")
        return watcher.mode.value

    def store(self) -> str:
        """Check that the store can be written to and has room.

        :raises OSError: it cannot; DegradedError: dumps are refused for want of room.
        """
        with tempfile.TemporaryFile(dir=self._store.path / STAGING):
            pass
        free = self._store.free_bytes()
        if free < self._settings.store.min_free_bytes:
            raise DegradedError(f"{free} bytes free, dumps are refused")
        return f"{free} bytes free"

    def criu(self) -> str:
        """Check that there is a CRIU.

        :raises HibernodeError: there is none.
        """
        return find_criu(self._settings.criu.binary).version

    def read_watch(self) -> Reading:
        """Read the watcher's numbers."""
        return {
            "hibernode_watch_overflows_total": self._watcher.overflows,
            "hibernode_watch_rescans_total": self._watcher.rescans,
            "hibernode_watch_mode_info": {self._watcher.mode.value: 1.0},
        }

    def read_store(self) -> Reading:
        """Read the store's sizes; blocks for as long as its disk."""
        sizes: dict[str, float] = {}
        counts: dict[str, float] = {}
        free = 0
        if self._settings.checkpoint.enabled:
            free = self._store.free_bytes()
            for info in self._store.artifacts():
                state = str(info.state)
                sizes[state] = sizes.get(state, 0.0) + info.bytes
                counts[state] = counts.get(state, 0.0) + 1
        return {
            "hibernode_store_bytes": sizes,
            "hibernode_store_artifacts": counts,
            "hibernode_store_free_bytes": free,
        }

    def describe(self) -> dict[str, Any]:
        """Describe them for ``hibernode status``; blocks as :meth:`read_store`."""
        reading, watcher = self.read_store(), self._watcher
        sizes, counts = reading["hibernode_store_bytes"], reading["hibernode_store_artifacts"]
        assert isinstance(sizes, dict)
        assert isinstance(counts, dict)
        try:
            criu = find_criu(self._settings.criu.binary)
            criu_text = f"{criu.version}, {criu.path}"
        except HibernodeError as error:
            criu_text = error.message
        if not self._settings.checkpoint.enabled:
            criu_text = "not used: checkpoint.enabled is false"
        return {
            "signals": {
                "path": str(self._settings.signals.path),
                "mode": watcher.mode.value,
                "reason": watcher.mode_reason,
                "rescans": watcher.rescans,
                "overflows": watcher.overflows,
            },
            "store": {
                "path": str(self._store.path),
                "artifacts": int(sum(counts.values())),
                "bytes": int(sum(sizes.values())),
                "freeBytes": reading["hibernode_store_free_bytes"],
            },
            "criu": criu_text,
        }
