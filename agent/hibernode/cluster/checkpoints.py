"""Checkpoint sources: from a pod that may be frozen now to a worker and a Job that know how it went."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
import uuid
from functools import partial
from pathlib import PurePosixPath
from typing import Final

from hibernode.answers import Outcome, Request, Trigger, failed, sentence
from hibernode.apart import apart
from hibernode.cluster import inside
from hibernode.cluster.pods import Ask, Problem
from hibernode.cluster.roster import Entry
from hibernode.cluster.shared import Shared, locate
from hibernode.discovery.container_look import owner_of
from hibernode.discovery.containers import hold
from hibernode.discovery.signals import done_payload
from hibernode.errors import ConflictError, HibernodeError, NotFoundError, UnavailableError, UsageError
from hibernode.host.procfs import Process
from hibernode.kube.lease import Lease
from hibernode.kube.names import (
    COMPLETED,
    FAILED,
    IN_PROGRESS,
    LEASE_HOLDER,
    LEASE_RENEW_SECONDS,
    LEASE_SECONDS,
    Word,
)
from hibernode.workload import ERA_A1, CheckpointId

log = logging.getLogger("hibernode.cluster")

RETRY_SECONDS: Final = 1.0
UNTOLD: Final = f"; it has no {ERA_A1.env_signal_file}, so its worker cannot be told"

UNTOLD_SECONDS: Final = 60.0
"""So long the worker of a Job is told in vain; then it is ended. A disk may be full, a volume come late."""

STATUS_SECONDS: Final = 5.0
"""A Job's annotation is told before the worker, which then ends: whoever sees the Job end finds it. While the
API server is away the worker does not wait for longer than this."""


class Checkpoints:
    """Freezes the workers of pods; each run of a container is answered once."""

    def __init__(self, shared: Shared, *, renew_seconds: float = LEASE_RENEW_SECONDS) -> None:
        self._shared, self._renew_seconds = shared, renew_seconds
        self._holder = LEASE_HOLDER + str(uuid.uuid4())
        self._leases: dict[str, Lease] = {}

    async def advance(self, entry: Entry) -> None:
        """Do what can be done for a pod now."""
        now = time.monotonic()
        if entry.busy or entry.settled:
            return
        if entry.unsaid is not None:
            if now >= entry.not_before:
                await self._conclude(entry, entry.unsaid)
        elif entry.ask.over:
            entry.settled = True
            await self._early(entry)
        elif await self._is_fit(entry) and now >= entry.not_before:
            state = self._shared.requests.parts.restorer.state
            if not entry.again and await asyncio.to_thread(state.tried, _note(entry)):
                entry.settled = True  # it was answered by the agent before this one
                return
            if entry.trigger is None and entry.ask.ready:
                entry.trigger = Trigger.POD_READY
            if entry.trigger is not None:
                await self._submit(entry, entry.trigger)

    async def _is_fit(self, entry: Entry) -> bool:
        """Whether a pod's container is known and may be frozen; one that can never be is refused."""
        ask = entry.ask
        if entry.refusal is not None:
            if entry.trigger is not None or ask.ready:
                await self._refuse(entry, entry.refusal)
            return False
        if ask.problem is not None and ask.container and not ask.container_id:
            self._refused(entry, ask.problem)  # its worker is told when it runs
            return False
        missing = await locate(entry, self._shared.heard())
        problem = ask.problem or missing or self._wrong_path(entry)
        if problem is not None:
            await self._refuse(entry, problem)
            return False
        return entry.container is not None

    async def _early(self, entry: Entry) -> None:
        """Tell the Job of a worker that found its checkpoint there and ended, or was frozen before our time.

        Without the annotation its controller would take the end of the Job for a failure.
        """
        ask = entry.ask
        if not (ask.succeeded and ask.id and ask.era.status_on_job):
            return
        with contextlib.suppress(HibernodeError, OSError):
            store = self._shared.requests.parts.checkpointer.store
            await asyncio.to_thread(store.get, CheckpointId(ask.id))
            await self._tell_status(ask, success=True)

    async def close(self) -> None:
        """Give back what Leases there are, so that the next agent need not wait for them to run out."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RETRY_SECONDS):
                await asyncio.gather(*(lease.release() for lease in self._leases.values()))

    def _wrong_path(self, entry: Entry) -> Problem | None:
        path = entry.contract.signal_file if entry.contract else ""
        if not path or inside.names_its_own(path, entry.ask.id):
            return None
        return Problem(
            reason="WrongSignalFile",
            message=f"its label names {entry.ask.id} and its {ERA_A1.env_signal_file} another one, "
            f"{PurePosixPath(path).name!a}",
            remedy="the label counts: set both to the same id",
        )

    # the job ------------------------------------------------------------------------------------------

    async def _submit(self, entry: Entry, trigger: Trigger) -> None:
        assert entry.container is not None
        assert entry.contract is not None
        requests, id_ = self._shared.requests, CheckpointId(entry.ask.id)
        if requests.parts.jobs.has("checkpoint", id_):
            return
        if not await self._may_begin(entry):
            entry.not_before = time.monotonic() + LEASE_RENEW_SECONDS
            return
        try:
            process = await asyncio.to_thread(hold, entry.container)
        except NotFoundError:
            entry.container = None
            entry.not_before = time.monotonic() + RETRY_SECONDS
            return

        def ended(outcome: Outcome | None) -> None:
            entry.busy = False
            if outcome is None or not outcome.answered:
                entry.not_before = time.monotonic() + RETRY_SECONDS
            self._shared.wake()

        request = Request(id_, process, entry.contract, trigger, announce=False)
        entry.busy = True
        if not requests.checkpoint(request, partial(self._run, entry, entry.ask), ended):
            entry.busy = False
            entry.not_before = time.monotonic() + RETRY_SECONDS

    async def _run(self, entry: Entry, ask: Ask, request: Request) -> Outcome:
        teller, era = self._shared.teller, ask.era
        teller.both(ask, "Normal", "CheckpointStarted", f"{request.id}, triggered by {request.trigger}")
        if era.status and not era.status_on_job:
            teller.annotate(ask.pod, {era.status: IN_PROGRESS})
        outcome = await self._leased(ask, request)
        if outcome.answered:
            outcome = await self._conclude(entry, outcome)
        return outcome

    async def _may_begin(self, entry: Entry) -> bool:
        """Take the Lease of the Job, where the era has one; an API server that is away stops nobody."""
        ask, api = entry.ask, self._shared.teller.api
        if not ask.era.lease or ask.job is None or api is None:
            return True
        job = ask.job
        lease = self._leases.setdefault(
            job.uid, Lease(api, job.namespace, job.name, self._holder, seconds=LEASE_SECONDS)
        )
        try:
            if await lease.ask():
                return True
        except UnavailableError as error:
            log.warning("the Lease %s cannot be asked for: %s", job.name, error.message)
            return True
        if entry.first("LeaseHeld"):
            text = f"{ask.id}: another agent holds the Lease {job.name}; it is asked for again"
            self._shared.teller.both(ask, "Warning", "LeaseHeld", text)
        return False

    async def _leased(self, ask: Ask, request: Request) -> Outcome:
        """Make the checkpoint; it is undone when another agent has taken the Lease meanwhile."""
        work = asyncio.ensure_future(self._shared.requests.parts.checkpointer.run(request))
        lease = self._leases.get(ask.job.uid) if ask.job is not None else None
        lost = False
        try:
            while lease is not None and not lost:
                done, _ = await asyncio.wait({work}, timeout=self._renew_seconds)
                if done:
                    break
                with contextlib.suppress(UnavailableError):
                    lost = not await lease.ask()
            if lost:
                work.cancel()
                await asyncio.wait({work})
            if lost and work.cancelled():
                error = ConflictError(
                    f"another agent has taken the Lease {ask.job.name if ask.job else ''}", reason="LeaseLost"
                )
                return failed(request, error, answered=False)
            return await work
        finally:
            if not work.done():  # we are told to stop: it undoes itself first
                work.cancel()
                await asyncio.wait({work})

    # answers ------------------------------------------------------------------------------------------

    async def _conclude(self, entry: Entry, outcome: Outcome) -> Outcome:
        """Tell everybody; the worker again later, if it cannot be told now."""
        ask, teller = entry.ask, self._shared.teller
        if entry.first("outcome"):
            await self._tell_status(ask, success=outcome.success)
        try:
            told = await self._answer(entry, outcome)
        except (OSError, HibernodeError) as error:
            now = time.monotonic()
            entry.unsaid, entry.not_before = outcome, now + RETRY_SECONDS
            entry.untold_since = entry.untold_since or now
            if now - entry.untold_since > UNTOLD_SECONDS:
                await self._end(entry)
            if entry.first("AnswerFailed"):
                text = f"{outcome.id}: the worker cannot be told how it went: {error}"
                log.error("%s", text)  # noqa: TRY400 - the sentence says it
                teller.both(ask, "Warning", "AnswerFailed", text)
            return outcome
        entry.unsaid, entry.settled = None, True
        with contextlib.suppress(OSError, HibernodeError):
            await asyncio.to_thread(self._shared.requests.parts.restorer.state.first_try, _note(entry))
        if outcome.success:
            text = (
                f"{outcome.message}, {outcome.bytes} bytes in {outcome.seconds:.2f} s, {outcome.path}{told}"
            )
            teller.both(ask, outcome.event_type, "CheckpointSucceeded", text)
        else:
            teller.both(ask, "Warning", "CheckpointFailed", sentence(outcome) + told)
        await self._give_back(ask)
        return outcome

    async def _tell_status(self, ask: Ask, *, success: bool) -> None:
        """Set the annotation of the eras that have one; in era C before the worker ends.

        Era A1's worker does not wait for the API server: whoever reads its Job gives the word some time.
        """
        target = ask.job if ask.era.status_on_job else ask.pod
        if not ask.era.status or target is None:
            return
        annotations = {ask.era.status: COMPLETED if success else FAILED}
        teller = self._shared.teller
        if ask.era.lease:
            send = partial(teller.send_annotations, target, annotations)
            await teller.outbox.now(send, f"{target.kind} {target.uid} annotations", STATUS_SECONDS)
        else:
            teller.annotate(target, annotations)

    async def _answer(self, entry: Entry, outcome: Outcome) -> str:
        """Tell the worker, in its era's way; returns what is to be said of it.

        :raises OSError: it cannot be told now. :raises HibernodeError: likewise.
        """
        if entry.container is None:
            return self._answer_here(entry, outcome)
        try:
            with await asyncio.to_thread(hold, entry.container) as process:
                owner = owner_of(process.pid)
                return await apart(partial(self._answer_in, entry, outcome, process), owner, inside.WHAT)
        except (NotFoundError, ProcessLookupError):
            return self._answer_here(entry, outcome) + "; its container has ended"

    def _answer_in(self, entry: Entry, outcome: Outcome, process: Process) -> str:
        word, path = entry.ask.era.word, entry.contract.signal_file if entry.contract else ""
        if path and inside.names_its_own(path, outcome.id):
            if inside.same_directory(process.pid, path, self._shared.requests.parts.signals.path):
                self._write_here(outcome)
            else:
                inside.write_signal(process, path, outcome.id, _payload(outcome))
            if word is not Word.SENTINEL or not entry.control_dir:
                return ""
        if word is Word.FILE:
            return UNTOLD
        if not outcome.success:
            process.send_signal(signal.SIGKILL)  # these eras have no other word for it
            return "; its container was killed, as its era has it"
        if word is Word.SENTINEL and entry.control_dir:
            inside.write_sentinel(process, entry.control_dir, restored=False)
        else:
            inside.tell(process, signal.SIGUSR1)
        return ""

    def _answer_here(self, entry: Entry, outcome: Outcome) -> str:
        """Write the signal file for a worker that cannot be looked into, whose directory this need not be."""
        if entry.ask.era.word is Word.FILE:
            self._write_here(outcome)
        return ""

    def _write_here(self, outcome: Outcome) -> None:
        self._shared.requests.parts.signals.answer_done(
            outcome.id,
            checkpoint_path=outcome.path if outcome.success else "",
            success=outcome.success,
            error="" if outcome.success else sentence(outcome),
        )

    async def _give_back(self, ask: Ask) -> None:
        lease = self._leases.pop(ask.job.uid, None) if ask.job is not None else None
        if lease is not None:
            self._shared.teller.outbox.put(lease.release)

    # refusals -----------------------------------------------------------------------------------------

    def _refused(self, entry: Entry, problem: Problem) -> None:
        """Say once that nothing can be done for a pod."""
        if not entry.first(problem.reason):
            return
        parts, ask = self._shared.requests.parts, entry.ask
        log.error("pod %s/%s: %s", ask.pod.namespace, ask.pod.name, problem)
        parts.metrics.rejected(problem.reason)
        parts.events.add(
            "Warning", "CheckpointFailed", ask.id, f"pod {ask.pod.namespace}/{ask.pod.name}: {problem}"
        )
        if entry.first("outcome"):
            self._shared.teller.both(ask, "Warning", "CheckpointFailed", str(problem))

    async def _refuse(self, entry: Entry, problem: Problem) -> None:
        """Let a worker fail at once for whom nothing can be done, rather than wait for its deadline.

        It is told again when it is ready: a worker that starts removes the answer that it finds.
        """
        self._refused(entry, problem)
        if entry.refusal is None:
            await self._tell_status(entry.ask, success=False)
        ready = entry.trigger is not None or entry.ask.ready
        entry.refusal = problem
        told = await self._tell_refusal(entry, problem)
        if not told:
            await self._end(entry)
        entry.settled = ready or not told or entry.container is None

    async def _tell_refusal(self, entry: Entry, problem: Problem) -> bool:
        """Tell a worker in its era's way; whether it could be told."""
        id_, container, label = self._id_to_answer(entry), entry.container, entry.ask.label
        try:
            if id_ is not None:
                outcome = Outcome(id_, False, problem.reason, problem.message, problem.remedy)
                return await self._answer(entry, outcome) != UNTOLD
            path = entry.contract.signal_file if entry.contract else ""
            if container is not None and label and inside.names_its_own(path, label):
                data = done_payload(label, checkpoint_path="", success=False, error=str(problem))
                with await asyncio.to_thread(hold, container) as process:
                    write = partial(inside.write_signal, process, path, label, data)
                    await apart(write, owner_of(process.pid), inside.WHAT)
                return True
        except (OSError, HibernodeError) as error:
            pod = entry.ask.pod
            log.error("pod %s/%s: cannot be told of the refusal: %s", pod.namespace, pod.name, error)  # noqa: TRY400
        return False

    async def _end(self, entry: Entry) -> None:
        """Kill the container of a Job whose worker cannot be told otherwise; a Job has nothing else to do."""
        if entry.ask.job is None or entry.container is None:
            return
        with contextlib.suppress(NotFoundError, ProcessLookupError), hold(entry.container) as process:
            process.send_signal(signal.SIGKILL)
            if entry.first("WorkerKilled"):
                text = f"container {entry.ask.container} was killed: its worker cannot be told how it went"
                self._shared.teller.both(entry.ask, "Warning", "WorkerKilled", text)

    def _id_to_answer(self, entry: Entry) -> CheckpointId | None:
        """Give the id that a refused worker waits for an answer on; None where that could be another's.

        Without a good label the worker's own variable says it; then nobody else on this node may have it.
        """
        ask, path = entry.ask, entry.contract.signal_file if entry.contract else ""
        try:
            waits = CheckpointId(PurePosixPath(path).name.removesuffix(ERA_A1.done_suffix)) if path else None
        except UsageError:
            waits = None
        if ask.id and (waits is None or waits == ask.id):
            return CheckpointId(ask.id)
        shared = self._shared
        others = {other.ask.id for other in shared.roster.entries.values() if other is not entry}
        others |= {claim.hash for claim in shared.requests.index.claims()}
        return waits if waits is not None and waits not in others else None


def _payload(outcome: Outcome) -> bytes:
    return done_payload(
        outcome.id,
        checkpoint_path=outcome.path if outcome.success else "",
        success=outcome.success,
        error="" if outcome.success else sentence(outcome),
    )


def _note(entry: Entry) -> str:
    """Name a run of a pod's container in the notes of what was answered."""
    return f"answered {entry.ask.pod.uid} {entry.run[:12]}"
