"""Metrics in Prometheus' form: one prefix, base units, no label that a pod can choose.

Two kinds: what is counted as it happens (outcomes of jobs, refused requests), and what is read when a
scrape comes (queue, store, watcher). Each reader of the second kind is a collector with a deadline; it
tells its own duration and success, and while it fails its families are left out rather than stale.
"""

from __future__ import annotations

import asyncio
import logging
import platform
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from hibernode import __version__
from hibernode.errors import RefusedError
from hibernode.health import Probe, in_thread

log = logging.getLogger("hibernode.metrics")

CONTENT_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4
"""The one form that every scraper reads; what a request's Accept header says is not looked at."""

COLLECT_SECONDS: Final = 0.8
"""Deadline of each collector; all run at once, and a scrape must take less than a second."""

OTHER: Final = "Other"
MAX_WORDS: Final = 128
"""Distinct values of one label; the words come from our own code, this is the net below it."""

_WORD: Final = re.compile(r"[A-Za-z][A-Za-z0-9-]{0,63}", re.ASCII)

PHASE_BUCKETS: Final = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
"""Seconds: our own work takes tens of milliseconds, a dump of a large worker minutes."""

SIZE_BUCKETS: Final = tuple(1 << power for power in range(24, 42, 2))
"""Bytes: 16 MiB to 1 TiB."""


@dataclass(frozen=True, slots=True)
class Family:
    """A metric that is read at scrape time. ``label`` is the only one it has, or empty."""

    help: str
    label: str = ""


FAMILIES: Final[Mapping[str, Family]] = {
    "hibernode_jobs_in_progress": Family("Jobs that hold a slot."),
    "hibernode_queue_depth": Family("Jobs that wait for a slot."),
    "hibernode_watch_overflows_total": Family(
        "Times that the kernel dropped events of the signal directory."
    ),
    "hibernode_watch_rescans_total": Family("Full looks at the signal directory."),
    "hibernode_watch_mode_info": Family("How the signal directory is watched; the value is 1.", "mode"),
    "hibernode_store_bytes": Family("Bytes of artifacts in the store.", "state"),
    "hibernode_store_artifacts": Family("Artifacts in the store.", "state"),
    "hibernode_store_free_bytes": Family("Bytes free on the file system of the store."),
    "hibernode_restored_workers": Family("Restored workers that run."),
    "hibernode_metadata_records": Family("Records of the metadata service.", "status"),
    "hibernode_metadata_unreadable_records": Family("Objects that no record can be made of."),
    "hibernode_metadata_list_age_seconds": Family(
        "Since the list of records was last known to be the truth."
    ),
    "hibernode_metadata_cache_bytes": Family("Bytes of records and answers kept in memory.", "cache"),
    "hibernode_metadata_list_reads_total": Family("Times that the whole list was read again."),
    "hibernode_metadata_working": Family("Requests in work."),
    "hibernode_metadata_watching": Family("Open watches."),
    "hibernode_metadata_connections": Family("Open connections of workers."),
    "hibernode_metadata_refused_connections_total": Family("Connections closed at the door.", "reason"),
    "hibernode_metadata_blobs_total": Family("Blobs of local workers, by how they were come by.", "result"),
    "hibernode_metadata_watched_records": Family("Records whose process on this node is watched."),
    "hibernode_metadata_reaped_records_total": Family(
        "What became of records that nobody keeps up.", "result"
    ),
    "hibernode_metadata_nixl_ports": Family("Ports at which NIXL agents fetch blobs of local workers."),
    "hibernode_metadata_backend_retries_total": Family("Calls of the backend that were made again."),
    "hibernode_kube_pods": Family("Pods of this node."),
    "hibernode_kube_asking_pods": Family("Pods that ask for a checkpoint or a restore.", "state"),
    "hibernode_kube_untold": Family("Messages that wait for the API server."),
    "hibernode_kube_lost_total": Family("Messages that the API server refused, or that were too many."),
    "hibernode_kube_relists_total": Family("Whole lists of pods that were read."),
    "hibernode_kube_age_seconds": Family("Since the API server was last heard of the pods."),
    "hibernode_controller_leads": Family("Whether this controller is the one that works (1) or waits (0)."),
    "hibernode_controller_objects": Family("DynamoCheckpoints.", "phase"),
    "hibernode_controller_queue_depth": Family("DynamoCheckpoints that wait to be looked at."),
    "hibernode_controller_looks_total": Family("Looks at DynamoCheckpoints.", "result"),
    "hibernode_controller_list_age_seconds": Family("Since the API server was last heard."),
    "hibernode_controller_api_retries_total": Family("Calls of the API server that were made again."),
    "hibernode_controller_dropped_events_total": Family("Events not written, as their object has many."),
}

Reading = Mapping[str, float | Mapping[str, float]]
"""Names of :data:`FAMILIES` to values; a family with a label has a mapping of label values to values."""

Readings = Reading | list[Metric]
"""What a collector gives; families with several labels come whole."""


class Ended(Protocol):
    """What the outcomes of checkpoints and restores have in common; ``phases`` are seconds by name."""

    @property
    def success(self) -> bool: ...  # noqa: D102 - the protocol's attributes are the outcomes'
    @property
    def reason(self) -> str: ...  # noqa: D102
    @property
    def exit_code(self) -> int: ...  # noqa: D102
    @property
    def phases(self) -> dict[str, float]: ...  # noqa: D102


class Sized(Ended, Protocol):
    """The outcome of a checkpoint; ``bytes`` is the size of the artifact."""

    @property
    def bytes(self) -> int: ...  # noqa: D102
    @property
    def reused(self) -> bool: ...  # noqa: D102


class Words:
    """The values that one label may take: words, and a bounded number of them."""

    def __init__(self, limit: int = MAX_WORDS) -> None:
        self._limit = limit
        self._seen: set[str] = set()

    def fit(self, word: str) -> str:
        """Return ``word``, or ``Other`` if it is no word or one too many."""
        if word not in self._seen:
            if _WORD.fullmatch(word) is None or len(self._seen) >= self._limit:
                return OTHER
            self._seen.add(word)
        return word


class Metrics:
    """The agent's metrics, in a registry of their own. Counting is safe from any thread."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._reasons, self._phases = Words(), Words()
        self._scraped = _Scraped()
        self.registry.register(self._scraped)
        # The names process_* are the ones that every Prometheus client exports.
        ProcessCollector(registry=self.registry)

        info = self._gauge(
            "hibernode_build_info", "Version of the agent; the value is 1.", ["version", "python"]
        )
        info.labels(__version__, platform.python_version()).set(1)
        self._checkpoints = self._counter(
            "hibernode_checkpoints_total", "Checkpoints ended.", ["result", "reason"]
        )
        self._restores = self._counter("hibernode_restores_total", "Restores ended.", ["result", "reason"])
        self._gc = self._counter("hibernode_gc_removed_total", "Artifacts removed by retention.", ["reason"])
        self._rejected = self._counter(
            "hibernode_signal_rejected_total", "Requests refused unread.", ["reason"]
        )
        self._checkpoint_phases = Histogram(
            "hibernode_checkpoint_phase_seconds",
            "Seconds that a phase of a checkpoint took.",
            ["phase"],
            buckets=PHASE_BUCKETS,
            registry=self.registry,
        )
        self._restore_phases = Histogram(
            "hibernode_restore_phase_seconds",
            "Seconds that a phase of a restore took.",
            ["phase"],
            buckets=PHASE_BUCKETS,
            registry=self.registry,
        )
        self._bytes = Histogram(
            "hibernode_checkpoint_bytes",
            "Bytes of a new artifact.",
            buckets=SIZE_BUCKETS,
            registry=self.registry,
        )
        # So that a rate is there before the first one.
        self._checkpoints.labels("success", self._reasons.fit("Captured"))
        self._restores.labels("success", self._reasons.fit("Restored"))

    def _gauge(self, name: str, text: str, labels: list[str]) -> Gauge:
        return Gauge(name, text, labels, registry=self.registry)

    def _counter(self, name: str, text: str, labels: list[str]) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    # counted as it happens ----------------------------------------------------------------------------

    def checkpoint(self, outcome: Sized) -> None:
        """Count a checkpoint that has ended."""
        self._ended(outcome, self._checkpoints, self._checkpoint_phases)
        if outcome.success and not outcome.reused:
            self._bytes.observe(outcome.bytes)

    def restore(self, outcome: Ended) -> None:
        """Count a restore that has ended."""
        self._ended(outcome, self._restores, self._restore_phases)

    def _ended(self, outcome: Ended, counter: Counter, histogram: Histogram) -> None:
        refused = outcome.exit_code == RefusedError.exit_code
        result = "success" if outcome.success else "refused" if refused else "failure"
        counter.labels(result, self._reasons.fit(outcome.reason)).inc()
        for phase, seconds in outcome.phases.items():
            histogram.labels(self._phases.fit(phase)).observe(seconds)

    def rejected(self, reason: str) -> None:
        """Count a request that led to no job."""
        self._rejected.labels(self._reasons.fit(reason)).inc()

    def gc_removed(self, reason: str) -> None:
        """Count an artifact that gc has removed."""
        self._gc.labels(self._reasons.fit(reason)).inc()

    # read when a scrape comes -------------------------------------------------------------------------

    def add_collector(
        self, name: str, read: Callable[[], Readings], *, blocking: bool = False, keep_seconds: float = 0.0
    ) -> None:
        """Register a reader of state.

        ``blocking``: it touches a disk or a driver, so it runs in a thread of its own and may hang;
        else it runs on the loop and must be quick. A reading is used again for ``keep_seconds``.
        """

        async def run() -> Readings:
            return read()

        self._scraped.add(name, in_thread(read) if blocking else run, keep_seconds)

    async def render(self) -> bytes:
        """Read every collector and write all metrics down, see :data:`CONTENT_TYPE`."""
        await self._scraped.read()
        return generate_latest(self.registry)

    def close(self) -> None:
        """Give up on collectors that hang."""
        self._scraped.close()


class _Scraped(Collector):
    """The families that were read for this scrape."""

    def __init__(self) -> None:
        self._probes: dict[str, Probe[list[Metric]]] = {}
        self._metrics: list[Metric] = []

    def add(self, name: str, run: Callable[[], Awaitable[Readings]], keep: float) -> None:
        async def read() -> list[Metric]:
            found = await run()
            return found if isinstance(found, list) else list(_families(found))

        if name in self._probes:
            raise ValueError(f"there is a collector {name} already")
        self._probes[name] = Probe(read, deadline=COLLECT_SECONDS, keep=keep)

    async def read(self) -> None:
        duration = GaugeMetricFamily(
            "hibernode_collector_duration_seconds", "Seconds that a collector took.", labels=["collector"]
        )
        success = GaugeMetricFamily(
            "hibernode_collector_success",
            "Whether a collector could read (1) or not (0).",
            labels=["collector"],
        )
        metrics: list[Metric] = [duration, success]
        answers = await asyncio.gather(*(probe.ask() for probe in self._probes.values()))
        for name, answer in zip(self._probes, answers, strict=True):
            duration.add_metric([name], answer.seconds)
            success.add_metric([name], float(answer.error is None))
            if answer.error is not None:
                log.debug("collector %s: %s", name, answer.error)
            metrics += answer.value or []
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics

    def describe(self) -> Iterable[Metric]:
        return []

    def close(self) -> None:
        for probe in self._probes.values():
            probe.close()


def _families(reading: Reading) -> Iterator[Metric]:
    for name, value in reading.items():
        family = FAMILIES[name]
        labels = [family.label] if family.label else []
        kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        metric = kind(name, family.help, labels=labels)
        values = value if isinstance(value, Mapping) else {"": value}
        for label, number in values.items():
            metric.add_metric([label] if labels else [], number)
        yield metric
