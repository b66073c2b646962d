"""The checkpoint pipeline: one function a step, a journal between them.

trigger → locate → preflight → quiesce GPU → dump → rootfs diff → seal → publish → announce

Whatever happens after the trigger ends in *announce* too, with ``success: false`` and the reason, and
with the worker as it was before.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import logging
import os
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from hibernode import links, recover, seal
from hibernode.answers import Outcome, Request, Trigger, already_there, failed, sentence
from hibernode.apart import apart, uncut
from hibernode.artifact.layout import ARTIFACT, OWED, Artifact, exists
from hibernode.artifact.staging import Staging
from hibernode.artifact.store import Store
from hibernode.container import dump as containers
from hibernode.container.dump import ContainerDump
from hibernode.criu import diagnose, moment, options
from hibernode.criu.hook import FrozenHook
from hibernode.criu.runner import CriuResult, find_criu, run_criu
from hibernode.discovery.container_look import owner_of
from hibernode.discovery.containers import Container, container_of, hold
from hibernode.discovery.signals import SignalDir, done_payload
from hibernode.dump_work import Work, captured, dump_options, journal_facts, look, put_back
from hibernode.errors import (
    BusyError,
    CriuError,
    DeadlineError,
    HibernodeError,
    IntegrityError,
    NotFoundError,
    RefusedError,
    StorageError,
)
from hibernode.gpu.preflight import look_at
from hibernode.gpu.quiesce import quiesce
from hibernode.host import netlock
from hibernode.journal import JOURNAL, Journal, Step, read_journal
from hibernode.outcome import as_ours, criu_failed, worker_gone
from hibernode.preflight import check_cut, preflight, refuse
from hibernode.recover import Held
from hibernode.settings import Settings
from hibernode.state import StateDir, write_json
from hibernode.worker import note_states, worker_state
from hibernode.workload import ERA_A1, CheckpointId

log = logging.getLogger("hibernode.checkpoint")

TERM_SECONDS: Final = 1.0
"""A CRIU that dumps has no handler for SIGTERM: one that lives on after it will not end by itself."""

FULL_BYTES: Final = 1 << 20
"""A disk with less than this left is full: CRIU writes its images in pieces that are larger."""


Notify = Callable[[CheckpointId, Step], None]
Absent = Callable[[int], contextlib.AbstractAsyncContextManager[object]]
"""Entered with the pid of the tree's root before it is frozen, left when the checkpoint is over."""


class Checkpointer:
    """Makes checkpoints for the agent and for the command line alike."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        state: StateDir,
        signals: SignalDir | None,
        notify: Notify | None = None,
        *,
        absent: Absent | None = None,
    ) -> None:
        self.settings = settings
        self.store = store
        self.state = state
        self.signals = signals
        self._notify = notify or (lambda _id, _step: None)
        self._absent = absent or (lambda _pid: contextlib.nullcontext())
        self._steps: dict[Step, Callable[[Work], Awaitable[None]]] = {
            Step.LOCATE: self._locate,
            Step.PREFLIGHT: self._preflight,
            Step.QUIESCE_GPU: self._quiesce_gpu,
            Step.DUMP: self._dump,
            Step.ROOTFS: self._rootfs,
            Step.SEAL: self._seal,
            Step.PUBLISH: self._publish,
        }

    async def run(self, request: Request) -> Outcome:
        """Make one checkpoint and answer for it. Raises nothing but cancellation.

        A cancelled run undoes itself and answers nothing: the request is still on disk, and the next
        agent takes it up.
        """
        started = time.perf_counter()
        try:
            with self.store.lock(request.id):
                present = self._whole(request.id)
                if present is None or request.replace:
                    return await self._make(request, started)
                outcome = already_there(request, present)
        except BusyError as error:
            return failed(request, error, seconds=time.perf_counter() - started, answered=False)
        except Exception as error:
            if not isinstance(error, (HibernodeError, OSError)):
                log.exception("%s: unexpected failure", request.id)
            outcome = failed(request, as_ours(error), seconds=time.perf_counter() - started)
        return self.announce(request, outcome)

    async def _make(self, request: Request, started: float) -> Outcome:
        if request.trigger is not Trigger.COMMAND:
            limits = self.settings.checkpoint
            self.state.check_attempts(request.id, limits.attempts, limits.attempts_window_seconds)
        container = await asyncio.to_thread(container_of, request.process.pid)
        with contextlib.ExitStack() as held:
            if container is not None and container.init != request.process.key:
                # Of a container all is dumped, whichever of its processes asked.
                request = dataclasses.replace(request, process=held.enter_context(hold(container)))
            held.enter_context(self.state.claim(request.process.pid))
            ours = Held(request.id, request.process.key)
            found = await uncut(
                asyncio.to_thread(
                    recover.make_way, self.store, self.state, self.signals, ours, gpu=self.settings.gpu
                )
            )
            if found and not request.replace and (present := self._whole(request.id)) is not None:
                return self.announce(request, already_there(request, present))
            staging = held.enter_context(
                self.store.stage(request.id, min_free_bytes=self.settings.store.min_free_bytes)
            )
            try:
                return await self._make_in(staging, request, container, started)
            finally:
                with contextlib.suppress(OSError, HibernodeError):
                    self._discard(staging)

    def _discard(self, staging: Staging) -> None:
        """Forget what was staged, but not the journal of a worker that is still off its GPU."""
        if exists(staging.dir, OWED):
            write_json(staging.dir, JOURNAL, {**(read_journal(staging.dir) or {}), "announce": False})
        else:
            self.store.discard(staging)

    async def _make_in(
        self, staging: Staging, request: Request, container: Container | None, started: float
    ) -> Outcome:
        before = worker_state(request.process.pid)
        facts = {**journal_facts(request, staging), **note_states(before)}
        work = Work(request, staging, Journal(staging.dir, "checkpoint", facts), before, container)
        self.state.attempt_begins(request.id)
        try:
            await self._run_steps(work)
        except BaseException as error:
            outcome = await self._undo(work, error)
            if outcome is None:
                raise
        else:
            outcome = captured(work)
        outcome = dataclasses.replace(
            outcome, seconds=time.perf_counter() - started, phases=dict(work.journal.phases)
        )
        # A full or vanished disk must not keep the answer from the worker.
        with contextlib.suppress(OSError, StorageError):
            if outcome.success:
                self.state.attempts_clear(request.id)
            error_text = "" if outcome.success else sentence(outcome)
            work.journal.note(success=outcome.success, error=error_text)
            await work.journal.begin(Step.ANNOUNCE)
        return self.announce(request, outcome)

    async def _run_steps(self, work: Work) -> None:
        deadline = self.settings.checkpoint.deadline_seconds
        try:
            async with asyncio.timeout(deadline) as limit, work.absent:
                for step in self._steps:
                    if step is Step.ROOTFS and work.dump is not None:
                        continue  # it was a part of the dump
                    self._notify(work.request.id, step)
                    await work.journal.begin(step)
                    with work.journal.timed(step.value):
                        await self._steps[step](work)
        except TimeoutError:
            if not limit.expired():
                raise  # a store that is on a network has timed out
            raise DeadlineError(
                f"the checkpoint did not end within {deadline:g} s; it was in the step {work.journal.step}",
                remedy="raise checkpoint.deadline_seconds, or look at the log for what it waited for",
                step=str(work.journal.step),
            ) from None

    # the steps ----------------------------------------------------------------------------------------

    async def _locate(self, work: Work) -> None:
        """See that the process, which is held by its pidfd, is still there."""
        if not work.request.process.alive():
            raise worker_gone(f"pid {work.request.process.pid} ended before it could be dumped")

    async def _preflight(self, work: Work) -> None:
        work.criu = await asyncio.to_thread(find_criu, self.settings.criu.binary)
        work.preflight = await look(
            work, partial(preflight, work.request.process, self.settings, work.criu, self.store.path)
        )
        on_gpu = await look_at(work.preflight.facts, self.settings)
        refuse([*work.preflight.findings, *on_gpu.findings])
        work.on_gpu = on_gpu.seen
        work.journal.note(tcp=work.preflight.tcp)
        if work.container is not None:
            work.dump = await look(
                work,
                partial(containers.look, work.container, work.request.process, work.preflight, self.settings),
            )
            if work.dump.freezer is not None:
                work.journal.note(freezer=[str(work.dump.freezer.directory), work.dump.freezer.version])
        work.seen = await look(work, partial(seal.describe, work.request.process, work.preflight, work.dump))

    async def _quiesce_gpu(self, work: Work) -> None:
        """Take the tree's CUDA processes off the GPU, after the last look at it."""
        assert work.preflight is not None
        await work.absent.enter_async_context(self._absent(work.request.process.pid))
        pid = work.request.process.pid
        await look(work, partial(check_cut, pid, work.preflight.door))
        work.gpu = await quiesce(pid, self.settings.gpu, partial(look, work), work.journal, work.on_gpu)

    async def _dump(self, work: Work) -> None:
        assert work.criu is not None
        assert work.preflight is not None
        chosen = dump_options(self.settings, work.preflight)
        if work.gpu is not None:
            chosen = dataclasses.replace(chosen, libdir=work.gpu.libdir)
        if work.dump is None:
            await self._run_criu(work, chosen)
        else:
            await self._run_criu_on_container(work, work.dump, chosen)
        if work.gpu is not None and chosen.leave == "running":
            with work.journal.timed("wake"):
                work.note = await uncut(work.gpu.wake_or_say(work.journal))
            work.asleep = bool(work.note)
        elif work.gpu is not None and chosen.leave == "stopped":
            work.note = work.gpu.how_to_wake()

    async def _run_criu_on_container(
        self, work: Work, dump: ContainerDump, chosen: options.DumpOptions
    ) -> None:
        async with FrozenHook(partial(self._rootfs, work)) as hook:
            chosen = containers.options(chosen, dump)
            try:
                await self._run_criu(work, dataclasses.replace(chosen, action_script=hook.argument))
            except CriuError:
                if hook.error is not None:
                    raise hook.error from None
                raise

    async def _run_criu(self, work: Work, chosen: options.DumpOptions) -> None:
        assert work.criu is not None
        assert work.preflight is not None
        args = options.dump_args(
            work.request.process.pid, work.staging.images, chosen, work_dir=work.staging.artifact_path
        )
        kept = await uncut(look(work, partial(links.keep, work.staging, work.preflight)))
        established = work.preflight.tcp == "established"
        inside = containers.namespaces(work.dump, work.request.process)
        with work.journal.timed("criu"), inside as namespaces:
            try:
                result = await run_criu(
                    work.criu,
                    args,
                    work_dir=work.staging.path,
                    deadline=self.settings.checkpoint.deadline_seconds,
                    marker=work.staging.uuid,
                    on_start=netlock.spare,
                    before_kill=partial(netlock.hold, work.request.process.pid) if established else None,
                    safe=partial(moment.is_safe, work.request.process.pid),
                    grace=TERM_SECONDS,
                    tree=work.request.process,
                    namespaces=namespaces,
                )
            except asyncio.CancelledError:
                self._keep_log(work, self._dump_log(work))
                raise
        work.argv = result.argv
        if result.returncode != 0 or result.timed_out:
            raise self._dump_failed(work, result)
        dump = work.dump
        carried = (lambda _path: False) if dump is None else partial(containers.carried, dump)
        work.links = await asyncio.to_thread(
            links.match, work.staging, kept, leave=self.settings.checkpoint.leave, carried=carried
        )

    def _dump_failed(self, work: Work, result: CriuResult) -> HibernodeError:
        text = self._dump_log(work) or result.output
        kept = self._keep_log(work, text)
        if not work.request.process.alive():
            return worker_gone(f"pid {work.request.process.pid} ended while it was dumped (log: {kept})")
        error = criu_failed(
            text,
            operation="dump",
            returncode=result.returncode,
            timed_out=result.timed_out,
            deadline=self.settings.checkpoint.deadline_seconds,
            log=kept,
        )
        # CRIU cannot write to its log either then, so that nothing may stand there.
        if error.reason == CriuError.default_reason and self.store.free_bytes() < FULL_BYTES:
            return as_ours(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.store.path)))
        return error

    def _dump_log(self, work: Work) -> str:
        path = work.staging.artifact_path / options.DUMP_LOG
        return diagnose.read_log(path) if path.exists() else ""

    def _keep_log(self, work: Work, text: str) -> str:
        """Keep CRIU's log for ``hibernode logs``; says where, or that there is no room for it."""
        try:
            return str(self.state.keep_log(work.request.id, "dump", text.encode(errors="replace")))
        except (OSError, HibernodeError) as error:
            log.warning("%s: the log of the dump cannot be kept: %s", work.request.id, error)
            return "not kept"

    async def _rootfs(self, work: Work) -> None:
        """Save the files that go along with a container, while CRIU holds it; of a process there are none."""
        if work.dump is None:
            return
        self._notify(work.request.id, Step.ROOTFS)
        await work.journal.begin(Step.ROOTFS)
        with work.journal.timed(Step.ROOTFS.value):
            save = partial(containers.save_files, work.dump, work.request.process, work.staging)
            pid = work.request.process.pid
            work.diffs = await uncut(apart(save, owner_of(pid), "the saving of its files"))

    async def _seal(self, work: Work) -> None:
        assert work.criu is not None
        assert work.preflight is not None
        assert work.seen is not None
        done = done_payload(
            work.request.id, checkpoint_path=str(self.store.path / work.request.id), success=True
        )
        with work.staging.artifact() as artifact:
            artifact.write_atomic(ERA_A1.done_in_artifact, done, 0o600, sync=False)
        files = await seal.finish_images(work.staging, self.settings, work.journal)
        # The seal is not over when the manifest is written: its time there is what it has taken so far.
        phases = {"seal": work.journal.running(Step.SEAL), **work.journal.phases}
        work.manifest = await asyncio.to_thread(
            seal.build_manifest,
            work.staging,
            self.settings,
            id_=work.request.id,
            contract=work.request.contract,
            checked=work.preflight,
            seen=work.seen,
            criu=work.criu,
            argv=work.argv,
            files=files,
            phases=phases,
            links=work.links,
            container=containers.facts(work.dump, work.diffs),
            cuda=work.gpu.facts if work.gpu is not None else None,
        )
        await uncut(asyncio.to_thread(self.store.seal, work.staging, work.manifest))

    async def _publish(self, work: Work) -> None:
        try:
            await uncut(asyncio.to_thread(self.store.publish, work.staging, work.request.id))
        except asyncio.CancelledError:
            if not work.staging.published():
                raise  # else it came too late: what is published is a success

    # endings ------------------------------------------------------------------------------------------

    async def _undo(self, work: Work, error: BaseException) -> Outcome | None:
        """Put the worker back as it was and forget the images; None when the run was cancelled."""
        await uncut(asyncio.to_thread(put_back, work))
        left = await uncut(work.gpu.wake_or_say(work.journal)) if work.gpu is not None else ""
        with contextlib.suppress(OSError):
            work.staging.dir.remove_tree(ARTIFACT)
        ours = as_ours(error)
        ours.message += left
        with contextlib.suppress(OSError):
            if isinstance(ours, RefusedError) or not isinstance(error, Exception):
                self.state.attempt_withdrawn(work.request.id)
            else:
                self.state.attempt_failed(work.request.id, ours.reason)
        if not isinstance(error, Exception):
            return None
        if not isinstance(error, (HibernodeError, OSError)):
            log.error("%s: unexpected failure in %s", work.request.id, work.journal.step, exc_info=error)
        return failed(work.request, ours, step=str(work.journal.step or ""))

    def announce(self, request: Request, outcome: Outcome) -> Outcome:
        """Answer through the signal file, if the worker has one here."""
        if self.signals is None or not request.announce:
            return outcome
        try:
            self.signals.answer_done(
                request.id,
                checkpoint_path=outcome.path if outcome.success else "",
                success=outcome.success,
                error="" if outcome.success else sentence(outcome),
            )
        except (OSError, HibernodeError) as error:
            log.error("%s: cannot write the signal file: %s", request.id, error)  # noqa: TRY400
            return dataclasses.replace(outcome, answered=False)
        return outcome

    # helpers ------------------------------------------------------------------------------------------

    def _whole(self, id_: CheckpointId) -> Artifact | None:
        """Find the published artifact; one that is damaged is as good as none and gets replaced."""
        try:
            artifact = self.store.get(id_)
            bad = [verdict for verdict in self.store.verify(artifact, digests=False) if not verdict.ok]
        except NotFoundError:
            return None
        except IntegrityError as error:
            log.warning("%s: the artifact in the store is damaged and will be replaced: %s", id_, error)
            return None
        if bad:
            log.warning("%s: %s: %s; it will be replaced", id_, bad[0].path, bad[0].problem)
            return None
        return artifact
