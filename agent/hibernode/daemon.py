"""``hibernode run``: builds the parts, runs them in one task group, stops cleanly.

The parts are the signal directory's watcher, the queue of jobs, the watch over restored workers, recovery
and gc on timers, and the server. Each background task is guarded: what fails in it is logged and does not
stop the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from hibernode import __version__, recover, restored
from hibernode.apart import apart, stuck, uncut
from hibernode.artifact.store import Store
from hibernode.checkpoint import Checkpointer
from hibernode.cluster.part import KubePart, wanted
from hibernode.discovery.locate import own_ready_files
from hibernode.discovery.ready import ReadyWatch
from hibernode.discovery.signals import SignalDir
from hibernode.discovery.watch import DirectoryWatcher
from hibernode.errors import HibernodeError, RefusedError, StuckError
from hibernode.events import EventLog
from hibernode.gpu.checks import health_checks, summary
from hibernode.gpu.metrics import metrics as gpu_metrics
from hibernode.gpu.service import GpuService
from hibernode.gpu.state import as_json
from hibernode.health import Check, DegradedError, Health
from hibernode.jobs import Jobs
from hibernode.metrics import Metrics, Reading
from hibernode.requests import Parts, Requests
from hibernode.restore import Restorer
from hibernode.restored import Phase, Restored
from hibernode.server import Server
from hibernode.settings import Settings
from hibernode.state import StateDir
from hibernode.vitals import Vitals
from hibernode.workload import CheckpointId

if TYPE_CHECKING:
    from hibernode.metadata.part import MetadataPart

log = logging.getLogger("hibernode.daemon")

WATCH_RESTORED_SECONDS: Final = 0.5
"""An exit of a restored worker is reported within this time."""

WATCH_STUCK_SECONDS: Final = 1.0
"""What hangs is told of within this time."""

SETTLE_SECONDS: Final = 0.25
"""A file that may still be written to is looked at again after this time."""

MANY_NAMES: Final = 4096
"""With more names than this waiting, one look at everything is cheaper, and memory stays bounded."""

DISCOVER_SECONDS: Final = 5.0
"""Period of the look at /proc for workers whose own ready file is to be watched."""

FILL_SECONDS: Final = 1.0
"""The same where placeholders are looked for too: they wait for us, and the look costs some 20 ms."""

GC_REASONS: Final = {
    "partial": "Partial",
    "older than gc.max_age_seconds": "MaxAge",
    "more than gc.keep_per_id": "KeepPerId",
    "the store is larger than gc.max_total_bytes": "MaxTotalBytes",
    "less free than gc.min_free_bytes": "MinFreeBytes",
}
"""What gc says of a removal, as a label value."""

RECOVER_SECONDS: Final = 15.0
"""Period of the look for what commands that were killed have left."""


class Agent:
    """The node agent."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.started_at = time.time()
        self.state = StateDir.open(settings.state_dir)
        self.store = Store(settings.store.path)
        if settings.checkpoint.enabled:
            self.store.open()
        self.signals = SignalDir(settings.signals)
        self.event_log = EventLog(settings.state_dir)
        self.metrics = Metrics()
        self.health = Health()
        self.metadata: MetadataPart | None = None
        if settings.metadata.enabled:
            from hibernode.metadata.part import MetadataPart  # noqa: PLC0415 - protobuf and gRPC come with it

            self.metadata = MetadataPart(settings, self.metrics.registry)
            self.health.add(Check("metadata", self.metadata.check, required=False))
            self.metrics.add_collector("metadata", self.metadata.reading)
        self.queue = Jobs(settings.checkpoint.concurrency, settings.checkpoint.queue_limit)
        self.watcher = DirectoryWatcher(settings.signals.path, settings.signals, self._changed)
        self.vitals = Vitals(settings, self.store, self.watcher)
        enter = self.queue.enter
        common = (settings, self.store, self.state, self.signals)
        self.requests = Requests(
            Parts(
                settings=settings,
                signals=self.signals,
                checkpointer=Checkpointer(
                    *common,
                    lambda id_, step: enter("checkpoint", id_, step),
                    absent=self.metadata.freezing if self.metadata is not None else None,
                ),
                restorer=Restorer(*common, lambda id_, step: enter("restore", id_, step)),
                jobs=self.queue,
                events=self.event_log,
                metrics=self.metrics,
                look_again=self._changed,
            )
        )
        self.gpus = GpuService(settings.gpu, self._tell_gpu)
        self.kube: KubePart | None = None
        if wanted(settings):
            self.kube = KubePart(settings, self.requests, lambda: self.gpus.snapshot)
            self.health.add(Check("kubernetes", self.kube.check, required=False))
            self.metrics.add_collector("kubernetes", self.kube.reading)
        self._pending: set[str] | None = set()
        self._wake = asyncio.Event()
        self._stop = asyncio.Event()
        self._restored: dict[str, Restored] = {}

    @classmethod
    async def main(cls, settings: Settings) -> None:
        """Run an agent until it is told to stop."""
        await cls(settings).run()

    # life ---------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Work until SIGTERM or SIGINT; a dump in flight is undone and taken up by the next agent."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        self._register()
        server = Server(self.settings, self, self.metrics, self.health)
        await server.start()
        tasks: list[asyncio.Task[None]] = []
        try:
            parts = [("what hangs", self._watch_stuck), ("GPUs", self.gpus.run)]
            if self.settings.checkpoint.enabled:
                await asyncio.to_thread(self._prepare)
                await self.watcher.start()
                parts += [
                    ("requests", self._pump),
                    ("own ready files", self._own_ready_files),
                    ("restored workers", self._watch_restored),
                    ("gc", self._gc_by_time),
                    ("recovery", self._recover_by_time),
                ]
            if self.metadata is not None:
                await self.metadata.start()
                parts.append(("metadata", self.metadata.run))
            if self.kube is not None:
                parts.append(("kubernetes", self.kube.run))
            for name, work in parts:
                tasks.append(asyncio.create_task(self._guarded(name, work), name=name))
            settings = self.settings
            log.info("hibernode %s on node %s", __version__, settings.node)
            log.info(
                "signals %s (%s), store %s", settings.signals.path, self.watcher.mode, settings.store.path
            )
            await self._stop.wait()
            log.info("stopping: %d jobs running, %d waiting", self.queue.running, self.queue.waiting)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.gpus.close()
            if self.metadata is not None:
                await self.metadata.stop()
            await self.watcher.stop()
            await self.queue.close()
            if self.kube is not None:
                await self.kube.stop()
            await server.stop()
            self.event_log.close()
            self.state.close()

    def _prepare(self) -> None:
        """Make the signal directory if it can be made, and end what a dead agent was in the middle of."""
        try:
            self.signals.create()
        except (OSError, HibernodeError) as error:
            log.warning("%s: cannot be made yet: %s", self.signals.path, error)
        self._recover()

    def _recover(self, *, this_boot: bool = False) -> None:
        """Settle what dead agents and commands were in the middle of, and say so."""
        for item in recover.recover(
            self.store, self.state, self.signals, this_boot=this_boot, gpu=self.settings.gpu
        ):
            text = f"{item.kind} found at step {item.step or 'none'}, {item.ending}: {item.message}"
            log.warning("%s: %s", item.id, text)
            self.event_log.add("Warning", "Recovered", item.id, text)

    async def _guarded(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        """Run ``work`` for as long as the agent runs; its failures are logged, and slow it down."""
        while True:
            try:
                await work()
            except Exception:
                log.exception("%s: failed, going on", name)
            await asyncio.sleep(1.0)

    def _tell_gpu(self, kind: str, reason: str, text: str) -> None:
        """Note an event of the GPUs, here and on the node."""
        self.event_log.add(kind, reason, "", text)
        if self.kube is not None:
            self.kube.gpu_event(kind, reason, text)

    # background ---------------------------------------------------------------------------------------

    def _changed(self, names: set[str] | None) -> None:
        """Take in what the watcher saw; None means that everything must be looked at."""
        if names is None or self._pending is None or len(self._pending) > MANY_NAMES:
            self._pending = None
        else:
            self._pending |= names
        self._wake.set()

    async def _pump(self) -> None:
        loop = asyncio.get_running_loop()
        if self.kube is not None:
            await self.kube.known()
        while True:
            await self._wake.wait()
            self._wake.clear()
            names, self._pending = self._pending, set()
            scan = await asyncio.to_thread(self.signals.scan, names)
            if scan.unsettled:
                loop.call_later(SETTLE_SECONDS, self._changed, None)
            await self.requests.take(scan)

    async def _own_ready_files(self) -> None:
        """Look for workers whose own ready file is there though nothing in the signal directory says so.

        Processes become known by a look at /proc; the files of those known are looked at in short turns.
        """
        index, known_at, changed = self.requests.index, 0.0, asyncio.Event()
        if self.kube is not None:
            await self.kube.known()
        discover = FILL_SECONDS if self.settings.restore.placeholders else DISCOVER_SECONDS
        with contextlib.closing(ReadyWatch(changed.set)) as watch:
            while True:
                changed.clear()
                if time.monotonic() - known_at > discover:
                    await asyncio.to_thread(index.refresh)
                    known_at = time.monotonic()
                restored_keys, label_of = self.requests.restored_keys, self.requests.pods.label_of
                claims = [
                    claim
                    for claim in index.claims()
                    if claim.key not in restored_keys and label_of(claim.key.pid) is None
                ]
                await watch.follow(claims)
                if self.settings.restore.placeholders:
                    await self.requests.fill(index.placeholders())
                ready = await asyncio.to_thread(own_ready_files, claims)
                taken = await asyncio.to_thread(restored.targets, self.state) if ready else set()
                keys = {claim.key.pid: claim.key for claim in claims}
                for request in ready:
                    if request.pid is not None and keys[request.pid] in taken:
                        continue  # a ready file came there with the worker's other files
                    if self.queue.has("checkpoint", request.id):
                        continue
                    if not await asyncio.to_thread(self.signals.answered, request):
                        await self.requests.take_own(request)
                period = self.settings.signals.poll_seconds if claims else discover
                # Not wait_for: before Python 3.12 it swallows a cancellation that comes with the event.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(period):
                        await changed.wait()

    async def _watch_restored(self) -> None:
        while True:
            for entry in await asyncio.to_thread(restored.restores, self.state):
                before = self._restored.get(entry.name)
                self._restored[entry.name] = entry
                if entry.key is not None and entry.phase is Phase.RUNNING:
                    self.requests.restored_keys.add(entry.key)
                ended = entry.phase in (Phase.EXITED, Phase.LOST) and entry.key is not None
                # One that has not begun yet is LOST too, and has no worker.
                new = before is None or (before.phase, before.key) != (entry.phase, entry.key)
                if ended and new and not entry.reported:
                    await asyncio.to_thread(self.requests.say_ended, entry)
                    await self._forget_marker(entry)
                    await asyncio.to_thread(restored.mark_reported, self.state, entry)
            await asyncio.sleep(WATCH_RESTORED_SECONDS)

    async def _forget_marker(self, entry: Restored) -> None:
        forget = partial(recover.forget_marker, self.state, entry)
        try:
            await apart(forget, f"the worker of {entry.id}", "the removal of its restore marker")
        except (OSError, HibernodeError) as error:
            log.warning("%s: its restore marker cannot be looked for: %s", entry.id, error)

    async def _recover_by_time(self) -> None:
        await asyncio.sleep(RECOVER_SECONDS)
        # To its end: the directories that it works on are closed when we stop.
        await uncut(asyncio.to_thread(self._recover, this_boot=True))

    async def _watch_stuck(self) -> None:
        """Say once what hangs, and once that it has come back."""
        said: set[tuple[str, str]] = set()
        while True:
            now = {(entry.owner, entry.what): entry.seconds for entry in stuck()}
            for owner, what in sorted(said ^ now.keys()):
                text = f"{owner}: {what}"
                if (owner, what) in now:
                    log.warning(
                        "%s hangs for %.0f s; it is left alone until it comes back", text, now[owner, what]
                    )
                    self.event_log.add("Warning", StuckError.default_reason, "", f"{text} hangs")
                else:
                    log.info("%s has come back", text)
                    self.event_log.add("Normal", "ContainerBack", "", f"{text} has come back")
            said = set(now)
            await asyncio.sleep(WATCH_STUCK_SECONDS)

    async def _gc_by_time(self) -> None:
        interval = self.settings.gc.interval_seconds
        if not interval:
            await asyncio.Event().wait()
        await asyncio.sleep(interval)
        await asyncio.to_thread(self.gc, dry_run=False)

    # what the server asks -----------------------------------------------------------------------------

    async def status(self) -> dict[str, Any]:
        """Describe the agent for ``hibernode status``."""
        vitals = await asyncio.to_thread(self.vitals.describe)
        return {
            "version": __version__,
            "node": self.settings.node,
            "pid": os.getpid(),
            "uptimeSeconds": time.time() - self.started_at,
            **vitals,
            "queue": {"running": self.queue.running, "waiting": self.queue.waiting},
            "jobs": self.queue.describe(),
            "restored": [
                {"id": entry.id, "pid": entry.key.pid, "startedAt": entry.started_at}
                for entry in self._restored.values()
                if entry.phase is Phase.RUNNING and entry.key is not None
            ],
            "stuck": [dataclasses.asdict(entry) for entry in stuck()],
            "gpu": summary(self.gpus.snapshot),
            "metadata": None if self.metadata is None else self.metadata.status(),
            "kubernetes": None if self.kube is None else self.kube.status(),
            "lastFailure": self.requests.last_failure,
        }

    async def records(self, verb: str, query: Mapping[str, str]) -> dict[str, Any]:
        """Answer ``hibernode metadata``."""
        if self.metadata is None:
            raise RefusedError(
                "the agent serves no metadata",
                remedy="set metadata.enabled=true for the agent and start it again",
                reason="MetadataOff",
            )
        return await self.metadata.view(verb, query)

    def gpu(self) -> dict[str, Any]:
        """Describe the GPUs, from memory."""
        found: dict[str, Any] = as_json(self.gpus.snapshot)
        return found

    def events(self, limit: int) -> list[dict[str, Any]]:
        """List the newest events."""
        return self.event_log.recent(limit)

    def jobs(self) -> list[dict[str, Any]]:
        """List what runs and what waits."""
        return self.queue.describe()

    def gc(self, dry_run: bool) -> list[dict[str, Any]]:
        """Apply the retention rules."""
        if not self.settings.checkpoint.enabled:
            return []
        items = self.store.gc(self.settings.gc, dry_run=dry_run, now=time.time())
        for item in items:
            if not dry_run:
                self.metrics.gc_removed(GC_REASONS.get(item.why.partition("=")[0].partition(":")[0], "Other"))
                self.event_log.add("Normal", "Removed", item.id, f"{item.path}: {item.why}")
        return [
            {"id": item.id, "uuid": item.uuid, "path": str(item.path), "bytes": item.bytes, "why": item.why}
            for item in items
        ]

    def retry(self, id_: CheckpointId) -> dict[str, Any]:
        """Forget the failed attempts on an id and look at its request again."""
        return {"id": id_, "forgotten": self.state.attempts_clear(id_)}

    async def absent(self, pid: int, asker: int) -> dict[str, Any]:
        """Have a worker's metadata records Stale while the process ``asker`` freezes it."""
        found = 0 if self.metadata is None else await self.metadata.freezing_by(asker, pid)
        return {"pid": pid, "records": found}

    # health and metrics -------------------------------------------------------------------------------

    def _register(self) -> None:
        async def containers() -> str:
            if hang := stuck():
                raise DegradedError(
                    "; ".join(f"{e.owner}: {e.what} hangs for {e.seconds:.0f} s" for e in hang)
                )
            return ""

        if self.settings.checkpoint.enabled:
            self.vitals.register(self.health, self.metrics)
            self.metrics.add_collector("jobs", self._read_jobs)
        self.health.add(Check("containers", containers, required=False))
        for check in health_checks(lambda: self.gpus.snapshot):
            self.health.add(check)
        self.metrics.add_collector("gpu", lambda: gpu_metrics(self.gpus.snapshot))

    def _read_jobs(self) -> Reading:
        running = sum(entry.phase is Phase.RUNNING for entry in self._restored.values())
        return {
            "hibernode_jobs_in_progress": self.queue.running,
            "hibernode_queue_depth": self.queue.waiting,
            "hibernode_restored_workers": running,
        }
