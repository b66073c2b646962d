"""From what stands in the signal directory to jobs, and from outcomes to events, metrics and log lines."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from hibernode import restored
from hibernode.answers import Outcome, Request, RestoreOutcome, RestoreRequest, Trigger
from hibernode.checkpoint import Checkpointer
from hibernode.discovery.containers import container_of
from hibernode.discovery.locate import Claim, ClaimIndex, Located, locate
from hibernode.discovery.signals import ReadyRequest, Rejected, Scan, SignalDir
from hibernode.discovery.signals import RestoreRequest as RestoreFile
from hibernode.errors import HibernodeError, RefusedError, UsageError
from hibernode.events import EventLog
from hibernode.jobs import Jobs
from hibernode.metrics import Metrics
from hibernode.restore import Restorer
from hibernode.restored import Restored
from hibernode.settings import Settings
from hibernode.workload import ERA_A1, CheckpointId, ProcessKey

log = logging.getLogger("hibernode.requests")

RETRY_SECONDS: Final = 1.0
"""Another process holds the id, or the answer could not be written; either takes about this long to pass."""

BATCH: Final = 100
"""After this many requests the loop gets to answer probes and to run jobs."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What the handling of requests needs of the agent."""

    settings: Settings
    signals: SignalDir
    checkpointer: Checkpointer
    restorer: Restorer
    jobs: Jobs
    events: EventLog
    metrics: Metrics
    look_again: Callable[[set[str]], None]


class Pods(Protocol):
    """What a cluster says of the pods of this node; their labels win over what processes say."""

    def label_of(self, pid: int) -> str | None:
        """Give the checkpoint id of the pod that a process is in; None if it has no labels of ours."""

    def takes(self, pid: int, id_: CheckpointId) -> bool:
        """Take up a ready file ``<id>.ready`` that leads to a process; False if it is no pod's business.

        :raises RefusedError: the process and the id are not of the same pod.
        """


class NoPods:
    """A machine without a cluster."""

    def label_of(self, pid: int) -> str | None:
        """Know of no pod."""
        del pid
        return None

    def takes(self, pid: int, id_: CheckpointId) -> bool:
        """Leave everything."""
        del pid, id_
        return False


class Requests:
    """Takes requests up, each once. ``pods`` are set before anything is asked."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.pods: Pods = NoPods()
        self.index = ClaimIndex(ERA_A1, parts.settings.signals.path)
        self.index.label_of = lambda pid: self.pods.label_of(pid)  # noqa: PLW0108 - they come later
        self.restored_keys: set[ProcessKey] = set()
        self.filled: set[ProcessKey] = set()
        self.last_failure = ""

    async def take(self, scan: Scan) -> None:
        """Queue what a look at the signal directory has found; refuse at once what cannot be."""
        if scan.rejected:
            await asyncio.to_thread(self._say_rejected, scan.rejected)
        if scan.unsaid:
            log.warning("%d more files are no requests; only the first are named", scan.unsaid)
        ready = [request for request in scan.ready if not self.parts.jobs.has("checkpoint", request.id)]
        if ready:
            await asyncio.to_thread(self.index.refresh)
        for start in range(0, len(ready), BATCH):
            batch = ready[start : start + BATCH]
            for request, located in await asyncio.to_thread(self._locate_all, batch):
                self._queue(request.id, located, Trigger.SIGNAL)
        for asked in scan.restore:
            self._restore(asked)

    async def take_own(self, request: ReadyRequest) -> None:
        """Queue a worker whose own ready file is there."""
        for _, located in await asyncio.to_thread(self._locate_all, [request]):
            self._queue(request.id, located, Trigger.READY_FILE)

    def _locate_all(self, requests: list[ReadyRequest]) -> list[tuple[ReadyRequest, Located]]:
        """Find the workers of ready files; those without one are answered here."""
        found: list[tuple[ReadyRequest, Located]] = []
        for request in requests:
            try:
                located = locate(request, self.index, ERA_A1)
                with contextlib.ExitStack() as held:
                    held.callback(located.process.close)
                    if not self.pods.takes(located.process.pid, request.id):
                        held.pop_all()
                        found.append((request, located))
            except RefusedError as error:
                self._refuse(request, error)
            except Exception:
                # One request that cannot be looked at must not hold up the others.
                log.exception("%s: its worker cannot be looked for", request.id)
        return found

    def _queue(self, id_: CheckpointId, located: Located, trigger: Trigger) -> None:
        process = located.process
        if process.key in self.restored_keys or self.parts.jobs.has("checkpoint", id_):
            process.close()
            return

        def ended(outcome: Outcome | RestoreOutcome | None) -> None:
            self._look_again(f"{id_}{ERA_A1.ready_suffix}", outcome)

        self.checkpoint(Request(id_, process, located.contract, trigger), self.parts.checkpointer.run, ended)

    def checkpoint(
        self,
        request: Request,
        run: Callable[[Request], Awaitable[Outcome]],
        ended: Callable[[Outcome | None], None],
    ) -> bool:
        """Queue a checkpoint, whose process this closes; False, and closed, when there is no place for it."""
        process = request.process

        async def work(_job: object) -> Outcome:
            text = f"pid {process.pid}, triggered by {request.trigger}"
            self.parts.events.add("Normal", "CheckpointStarted", request.id, text)
            outcome = await run(request)
            self._say_checkpoint(outcome)
            return outcome

        def closed(outcome: Outcome | None) -> None:
            process.close()
            ended(outcome)

        queued = self.parts.jobs.submit("checkpoint", request.id, work, closed)
        if not queued:
            process.close()
        return queued

    def _restore(self, request: RestoreFile) -> None:
        def ended(outcome: Outcome | RestoreOutcome | None) -> None:
            self._look_again(f"{request.id}{ERA_A1.restore_suffix}", outcome)

        asked = RestoreRequest(request.id, requester_uid=request.uid, identity=request.identity)
        self.restore(asked, f"asked by uid {request.uid}", self.parts.restorer.run, ended)

    def restore(
        self,
        asked: RestoreRequest,
        why: str,
        run: Callable[[RestoreRequest], Awaitable[RestoreOutcome]],
        ended: Callable[[RestoreOutcome | None], None] = lambda _outcome: None,
    ) -> bool:
        """Queue a restore; False when there is no place for it."""

        async def work(_job: object) -> RestoreOutcome:
            self.parts.events.add("Normal", "RestoreStarted", asked.id, why)
            outcome = await run(asked)
            self._say_restore(outcome)
            return outcome

        return self.parts.jobs.submit("restore", asked.id, work, ended)

    async def fill(self, claims: Iterable[Claim]) -> None:
        """Restore into placeholders that name a checkpoint of the store: one try a container, and a pod."""
        for claim in claims:
            with contextlib.suppress(OSError, HibernodeError):
                id_ = CheckpointId(claim.hash)
                if self.pods.label_of(claim.key.pid) is not None:
                    continue  # they are filled as their labels say
                if claim.key in self.filled or self.parts.jobs.has("restore", id_):
                    continue
                await asyncio.to_thread(self.parts.restorer.store.get, id_)
                container = await asyncio.to_thread(container_of, claim.key.pid)
                if container is None or container.init != claim.key:
                    continue
                self.filled.add(claim.key)
                names = [f"container {container.ref.id} {claim.key.start_ticks}"]
                names += [f"pod {container.ref.pod_uid}"] if container.ref.pod_uid else []
                if not container.nested and self.parts.restorer.state.first_try(*names):
                    asked = RestoreRequest(id_, into=container.ref.id, announce=False)
                    self.restore(asked, f"into container {container.ref.id}", self.parts.restorer.run)

    def _look_again(self, name: str, outcome: Outcome | RestoreOutcome | None) -> None:
        """Look at the request once more: a new one may have come while the job was still in the queue.

        One that could not be answered (somebody else holds the id, the directory is full) would come
        back at once, so it has to wait.
        """
        delay = 0.0 if outcome is None or outcome.answered else RETRY_SECONDS
        asyncio.get_running_loop().call_later(delay, self.parts.look_again, {name})

    # what is said of it -------------------------------------------------------------------------------

    def _say_rejected(self, all_rejected: list[Rejected]) -> None:
        """Tell everybody, whoever waits for the answer too: a bad request must not make a worker wait."""
        for rejected in all_rejected:
            self._answer_rejected(rejected)

    def _answer_rejected(self, rejected: Rejected) -> None:
        self.parts.metrics.rejected(rejected.reason)
        stem, _, suffix = rejected.name.partition(".")
        try:
            id_ = CheckpointId(stem)
        except UsageError:  # the directory itself, not a file in it
            log.warning("%s: %s", rejected.name, rejected.message)
            self.parts.events.add("Warning", rejected.reason, "", f"{rejected.name}: {rejected.message}")
            return
        event = "CheckpointFailed" if f".{suffix}" == ERA_A1.ready_suffix else "RestoreFailed"
        self._fail(id_, event, rejected.reason, rejected.message)
        error = f"{rejected.reason}: {rejected.message}"
        with contextlib.suppress(OSError, HibernodeError):
            if event == "CheckpointFailed":
                self.parts.signals.answer_done(id_, checkpoint_path="", success=False, error=error)
            else:
                self.parts.signals.answer_restored(id_, {"success": False, "error": error})

    def _refuse(self, request: ReadyRequest, error: RefusedError) -> None:
        """Answer a request that leads to no worker, unless the answer would reach the wrong one."""
        self.parts.metrics.rejected(error.reason)
        self._fail(request.id, "CheckpointFailed", error.reason, error.message)
        if error.reason in ("StaleReadyFile", "WrongPod"):
            self.parts.signals.clear(request.id, ERA_A1.ready_suffix, request.identity)
            return
        text = error.message if not error.remedy else f"{error.message}; {error.remedy}"
        try:
            self.parts.signals.answer_done(
                request.id, checkpoint_path="", success=False, error=f"{error.reason}: {text}"
            )
        except (OSError, HibernodeError) as failure:
            log.error("%s: cannot write the signal file: %s", request.id, failure)  # noqa: TRY400

    def _fail(self, id_: CheckpointId, event: str, reason: str, message: str) -> None:
        log.error("%s: %s: %s", id_, reason, message)
        self.last_failure = f"{id_}: {reason}: {message}"
        self.parts.events.add("Warning", event, id_, f"{reason}: {message}")

    def _say_checkpoint(self, outcome: Outcome) -> None:
        self.parts.metrics.checkpoint(outcome)
        if not outcome.success:
            self._fail(outcome.id, "CheckpointFailed", outcome.reason, outcome.message)
            return
        text = f"{outcome.message}, {outcome.bytes} bytes in {outcome.seconds:.2f} s, {outcome.path}"
        log.info("%s", text)
        self.parts.events.add(outcome.event_type, "CheckpointSucceeded", outcome.id, text)

    def _say_restore(self, outcome: RestoreOutcome) -> None:
        self.parts.metrics.restore(outcome)
        if not outcome.success:
            refused = outcome.exit_code == RefusedError.exit_code
            event = "RestoreIncompatible" if refused else "RestoreFailed"
            self._fail(outcome.id, event, outcome.reason, outcome.message)
            return
        text = f"{outcome.message} in {outcome.seconds:.2f} s"
        log.info("%s", text)
        self.parts.events.add("Normal", "RestoreSucceeded", outcome.id, text)

    def say_ended(self, entry: Restored) -> None:
        """Report how a restored worker ended, with the exit code that its shim saw."""
        end: dict[str, Any] = restored.end_of(entry)
        known = ", ".join(f"{name} {value}" for name, value in end.items())
        pid = entry.key.pid if entry.key is not None else 0
        text = f"restored worker, pid {pid}, ended: {known or 'nobody knows how, its shim was killed'}"
        log.info("%s: %s", entry.id, text)
        kind = "Normal" if end.get("exit_code") == 0 else "Warning"
        self.parts.events.add(kind, "WorkerEnded", entry.id, text)
        if entry.announce:
            with contextlib.suppress(OSError, HibernodeError):
                self.parts.signals.answer_restored(
                    entry.id, {"success": True, "pid": pid, "ended": True, **end}
                )
