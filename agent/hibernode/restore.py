"""The restore pipeline: request → verify → compatibility → prepare → CRIU restore → announce.

A restore that cannot succeed is refused before anything is touched. CRIU is started by the shim
(:mod:`hibernode.shim`), which stays the worker's parent, so a restored worker outlives the agent and its
exit code is known.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from hibernode import links, recover, restored
from hibernode.answers import RestoreOutcome, RestoreRequest, answer, restore_failed, sentence
from hibernode.apart import FILES_SECONDS, apart, uncut
from hibernode.artifact.layout import Artifact
from hibernode.artifact.manifest import Manifest
from hibernode.artifact.store import Store
from hibernode.container import restore as filling
from hibernode.container import target as targets
from hibernode.container.restore import Applied
from hibernode.container.target import Target
from hibernode.criu import options
from hibernode.criu.images import page_files
from hibernode.criu.runner import JOB_ENV, Criu, clean_env, find_criu
from hibernode.discovery.container_look import owner_of
from hibernode.discovery.containers import Container, find, hold
from hibernode.discovery.signals import SignalDir
from hibernode.errors import (
    BusyError,
    CriuError,
    DeadlineError,
    HibernodeError,
    IntegrityError,
    RefusedError,
    StorageError,
    StuckError,
)
from hibernode.gpu.thaw import Thaw, awaken
from hibernode.host.procfs import Process
from hibernode.host.safefs import Dir
from hibernode.journal import Journal, Step
from hibernode.outcome import as_ours
from hibernode.preflight import refuse
from hibernode.recover import Held
from hibernode.restore_checks import asked, findings, judged, look, may_ask, settled_findings, thawing
from hibernode.restore_options import connections, inherit, restore_options
from hibernode.restore_shim import run_shim, shim_failed
from hibernode.settings import Settings
from hibernode.state import StateDir, read_json, write_json
from hibernode.workload import ERA_A1, CheckpointId, Finding

log = logging.getLogger("hibernode.restore")

FILES: Final = "the change of its files"
"""What can hang, and is then named so."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a restore would do: every check, and the exact command."""

    artifact: Artifact
    findings: list[Finding]
    argv: list[str]


Notify = Callable[[CheckpointId, Step], None]


class Restorer:
    """Makes restores for the agent and for the command line alike."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        state: StateDir,
        signals: SignalDir | None,
        notify: Notify | None = None,
    ) -> None:
        self.settings = settings
        self.store = store
        self.state = state
        self.signals = signals
        self._notify = notify or (lambda _id, _step: None)

    async def run(self, request: RestoreRequest) -> RestoreOutcome:
        """Make one restore and answer for it. Raises nothing but cancellation, which undoes it."""
        started = time.perf_counter()
        # Until it is answered nobody else may take it for a dead one's.
        with contextlib.ExitStack() as held:
            work, outcome = await self._try(request, held)
            if work is not None and not outcome.success:
                outcome = await self._undo(work, outcome)
            phases = dict(work.journal.phases) if work is not None else {}
            outcome = dataclasses.replace(outcome, seconds=time.perf_counter() - started, phases=phases)
            if not outcome.answered:  # somebody else is at it: it is asked again
                if work is not None:
                    await self._enter(work, Step.DONE)
                return outcome
            if work is None:
                return self.announce(request, outcome)
            work.journal.note(error="" if outcome.success else sentence(outcome))
            await self._enter(work, Step.ANNOUNCE)
            outcome = self.announce(request, outcome)
            if outcome.answered:
                await self._enter(work, Step.DONE)
            return outcome

    @staticmethod
    async def _enter(work: _Work, step: Step) -> None:
        """Write a last step down; a disk that breaks does not change what has happened."""
        with contextlib.suppress(OSError, StorageError):
            await work.journal.begin(step)

    async def _try(
        self, request: RestoreRequest, held: contextlib.ExitStack
    ) -> tuple[_Work | None, RestoreOutcome]:
        """Run the steps; whatever ends them becomes an outcome, but for a cancellation.

        What must be kept to the end, the locks among it, goes into ``held``.
        """
        work: _Work | None = None
        try:
            held.enter_context(self.store.lock(request.id))
            work = self._begin(request, held)
            return work, await self._steps(work)
        except BusyError as error:
            return work, restore_failed(request, error, answered=False)
        except asyncio.CancelledError:
            if work is not None:
                await uncut(asyncio.to_thread(self._settle, work))
            raise
        except Exception as error:
            if not isinstance(error, (HibernodeError, OSError)):
                log.exception("%s: unexpected failure", request.id)
            directory = str(work.directory.path) if work else ""
            step = str(work.journal.step or "") if work else ""
            return work, restore_failed(request, as_ours(error), directory=directory, step=step)

    def _settle(self, work: _Work) -> None:
        """Leave nothing of a restore that was cut off, as if somebody else had found it."""
        try:
            recover.settle(self.state, self.signals, work.directory.path.name)
        except (OSError, HibernodeError) as error:
            log.error("%s: what was begun cannot be undone now: %s", work.request.id, error)  # noqa: TRY400

    def _begin(self, request: RestoreRequest, held: contextlib.ExitStack) -> _Work:
        restored.forget_old(self.state)
        job = uuid.uuid4().hex
        directory = self.state.restores_dir.subdir(f"{request.id}.{job}", create=True)
        held.enter_context(directory)
        facts = {"id": str(request.id), "uuid": job, "announce": request.announce}
        return _Work(request, job, directory, Journal(directory, "restore", facts), held)

    async def _steps(self, work: _Work) -> RestoreOutcome:
        request, journal = work.request, work.journal
        self._check_attempts(request)
        deadline = self.settings.restore.deadline_seconds
        try:
            async with asyncio.timeout(deadline) as limit:
                artifact, criu, target, thaw = await self._checked(work)
        except TimeoutError:
            if not limit.expired():
                raise  # a store that is on a network has timed out
            raise DeadlineError(
                f"the checks before the restore did not end within {deadline:g} s; it was in the step "
                f"{journal.step}",
                remedy="raise restore.deadline_seconds: digests take as long as the files are read",
                step=str(journal.step),
            ) from None
        await self._step(work, Step.PREPARE)
        with journal.timed("prepare"):
            self._clear_signals(request.id)
            spec = {**self._spec(work, artifact, criu, target), "wake": thaw.tool is not None}
            if target is not None:
                await self._fill(work, artifact, target)
            tree = artifact.manifest.tree
            journal.note(links=[link.model_dump() for link in artifact.manifest.links])
            # Of a container they are pids of its own namespace, which mean others here.
            pids = {tid for task in tree for tid in (task.pid, *task.threads)} if target is None else ()
            journal.note(pids=sorted(pids))
            write_json(work.directory, "spec.json", spec, sync=False)
        await self._step(work, Step.RESTORE)
        attempt = f"{request.id}.restore"
        self.state.attempt_begins(attempt)
        try:
            awake, end_left = partial(self._awaken, work, artifact.manifest, thaw), partial(self._end, work)
            with links.laid(artifact.manifest.links), journal.timed("criu"):
                state = await run_shim(work.directory, deadline, awake, end_left)
        finally:
            # Counted is what ends the agent itself; a failure that we live to tell is answered, not retried.
            self.state.attempts_clear(attempt)
        if state.get("not_held_back"):
            log.warning("%s: connections were not held back: %s", request.id, state["not_held_back"])
        if state.get("phase") == "exited" and state.get("exit_code") != 0:
            ends = {"exit_code": "exit code", "exit_signal": "signal"}
            how = "".join(f"{word} {state[key]}" for key, word in ends.items() if key in state)
            raise CriuError(
                f"{request.id} was restored and ended at once, {how or 'nobody knows how'}",
                remedy="the worker itself ended: look at its output and at what it needs from outside",
                reason="WorkerEndedAtOnce",
            )
        if state.get("phase") not in ("running", "exited"):
            raise shim_failed(request.id, state, work.directory, keep=self.state, deadline=deadline)
        filling.forget_undo(work.directory, work.applied)
        return RestoreOutcome(
            request.id,
            success=True,
            pid=int(state["pid"]),
            start_ticks=int(state["start_ticks"]),
            reason="Restored",
            message=f"{request.id} restored as pid {state['pid']}{thaw.moved()}",
            directory=str(work.directory.path),
        )

    async def _awaken(self, work: _Work, manifest: Manifest, thaw: Thaw, root: int) -> None:
        """Bring the GPU state back, when CRIU has made the tree and before it learns that it was restored."""
        assert manifest.cuda is not None
        await self._step(work, Step.WAKE_GPU)
        journal = work.journal
        with journal.timed("wake-gpu"):
            journal.note(gpu_map=thaw.device_map)
            journal.note(woken=await awaken(thaw, manifest.cuda, root, self.settings.gpu))
        journal.phases["criu"] = -journal.phases["wake-gpu"]  # it is within CRIU's time, which is added then

    async def _end(self, work: _Work) -> None:
        """End what a shim that cannot do so itself has made; the container's files may hang meanwhile."""
        end = partial(recover.end_left, self.state, work.directory.path.name)
        try:
            await apart(end, asked(work.request), "the end of a restore", seconds=FILES_SECONDS)
        except (OSError, HibernodeError) as error:
            log.error("%s: what was begun cannot be ended now: %s", work.request.id, error)  # noqa: TRY400

    async def _checked(self, work: _Work) -> tuple[Artifact, Criu, Target | None, Thaw]:
        """Verify the artifact and compare it with what shall take it; nothing is touched."""
        request, target = work.request, None
        await self._step(work, Step.VERIFY)
        with work.journal.timed("verify"):
            artifact = self.store.get(request.id, request.version or None)
            container = await self._found(request)
            await uncut(asyncio.to_thread(self._hold, work, container))
            await self._verify(artifact, digests=request.digests or self.settings.restore.verify == "digests")
            may_ask(request, artifact.manifest)
        await self._step(work, Step.COMPATIBILITY)
        with work.journal.timed("compatibility"):
            criu = await asyncio.to_thread(find_criu, self.settings.criu.binary)
            if container is not None and work.process is not None:
                target = await look(
                    partial(targets.look, container, work.process), owner_of(work.process.pid)
                )
            strict = request.strict or self.settings.restore.strict
            thaw = await thawing(artifact.manifest, self.settings, target)
            rows = await settled_findings(artifact.manifest, criu, request, target, strict=strict)
            refuse([*rows, *judged(thaw, strict=strict)])
        return artifact, criu, target, thaw

    @staticmethod
    async def _found(request: RestoreRequest) -> Container | None:
        if not request.into:
            return None
        return (await look(partial(find, request.into), asked(request))).container

    def _hold(self, work: _Work, container: Container | None) -> None:
        """Hold the container that is asked for; from here on it is told of a refusal.

        What a dead one has left in it, or of this id, is settled first: later it would be taken for ours.
        """
        held = Held(work.request.id, None, work.directory.path.name)
        if container is None:
            recover.make_way(self.store, self.state, self.signals, held, gpu=self.settings.gpu)
            return
        process = work.held.enter_context(hold(container))
        work.held.enter_context(self.state.claim(process.pid))
        held = dataclasses.replace(held, root=process.key)
        # On disk before: who settles sees that somebody is waiting for the container.
        work.journal.note(target={"pid": process.pid, "start_ticks": process.key.start_ticks})
        work.journal.write()
        recover.make_way(self.store, self.state, self.signals, held, gpu=self.settings.gpu)
        try:
            recover.see_clean(self.state, held)
        except RefusedError:
            filling.say_failed(process)
            raise
        work.process = process

    async def _fill(self, work: _Work, artifact: Artifact, target: Target) -> None:
        """Bring the worker's files into the container; from here on there is something to undo."""
        work.applied = filling.planned(artifact.manifest, target)
        key = target.process.key
        work.journal.note(target={"pid": key.pid, "start_ticks": key.start_ticks, "comm": target.comm})
        work.journal.note(applied=[dataclasses.asdict(entry) for entry in work.applied])
        await work.journal.begin(Step.ROOTFS)
        with work.journal.timed("rootfs"):
            fill = partial(filling.apply_files, artifact, target, work.directory)
            await uncut(apart(fill, owner_of(target.process.pid), FILES, seconds=FILES_SECONDS))

    async def _undo(self, work: _Work, outcome: RestoreOutcome) -> RestoreOutcome:
        """Leave the container as it was, and tell its placeholder that it may start cold."""
        if work.process is None:
            return outcome
        state = await uncut(self._give_back(work, work.process))
        return dataclasses.replace(outcome, message=f"{outcome.message}; {state}")

    async def _give_back(self, work: _Work, process: Process) -> str:
        """Bring the container's files back, unless the worker runs in it; says how it is now."""
        phase = (read_json(work.directory, "state.json") or {}).get("phase")
        if phase == restored.Phase.RUNNING:
            return "the worker runs"  # it was too late to take it back
        if phase == restored.Phase.EXITED:
            filling.forget_undo(work.directory, work.applied)
            return "the container ends with it"
        undo = partial(filling.undo_files, process, work.directory, work.applied)
        try:
            # Not while the files are still being put there: then it is refused.
            problems = await apart(undo, owner_of(process.pid), FILES, seconds=FILES_SECONDS)
        except StuckError as error:
            problems = [error.message]
        if not process.alive():
            return "the container has ended"
        work.journal.note(dirty="; ".join(problems))
        filling.say_failed(process)
        return f"not undone: {'; '.join(problems)}" if problems else "the container is as it was"

    async def _step(self, work: _Work, step: Step) -> None:
        self._notify(work.request.id, step)
        await work.journal.begin(step)

    async def plan(self, request: RestoreRequest) -> Plan:
        """Say what :meth:`run` would do, without doing it."""
        artifact = self.store.get(request.id, request.version or None)
        await self._verify(artifact, digests=request.digests)
        criu = await asyncio.to_thread(find_criu, self.settings.criu.binary)
        with contextlib.ExitStack() as held:
            target: Target | None = None
            container = await self._found(request)
            if container is not None:
                process = held.enter_context(hold(container))
                target = await look(partial(targets.look, container, process), owner_of(process.pid))
            strict = request.strict or self.settings.restore.strict
            rows = await findings(artifact.manifest, criu, request, target, strict=strict)
            rows += judged(await thawing(artifact.manifest, self.settings, target), strict=strict)
            chosen = restore_options(artifact.manifest, self.settings, Path(), target)
        pidfile = Path("restored.pid")
        args = options.restore_args(artifact.path / "images", pidfile, chosen, work_dir=Path())
        return Plan(artifact, rows, [*criu.argv, *args])

    # the steps ----------------------------------------------------------------------------------------

    async def _verify(self, artifact: Artifact, *, digests: bool) -> None:
        verify = partial(self.store.verify, artifact, digests=digests)
        verdicts = await apart(verify, str(artifact.path), "the verification of its files", seconds=math.inf)
        bad = [verdict for verdict in verdicts if not verdict.ok]
        if bad:
            named = "; ".join(f"{verdict.path}: {verdict.problem}" for verdict in bad[:5])
            raise IntegrityError(
                f"{artifact.manifest.id}: the artifact is not whole: {named}",
                remedy=f"take it again; 'hibernode verify {artifact.manifest.id}' lists the files",
            )

    def _check_attempts(self, request: RestoreRequest) -> None:
        """Stop asking again when restores of this id keep ending the agent itself."""
        if request.requester_uid is None:
            return
        limit = self.settings.checkpoint.attempts
        before = self.state.attempts(
            f"{request.id}.restore", self.settings.checkpoint.attempts_window_seconds
        )
        if before.count >= limit:
            raise RefusedError(
                f"{before.count} restores of {request.id} were cut off (limit {limit})",
                remedy=f"see 'hibernode logs --restore {request.id}', then 'hibernode retry {request.id}'",
                reason="AttemptsExhausted",
            )

    def _clear_signals(self, id_: CheckpointId) -> None:
        """Remove the answered request and its answer.

        The restored worker goes on in the loop that waits for the answer, so an old one must not be
        there. The ready file goes first: without its answer it would ask for a new dump.
        """
        if self.signals is not None:
            self.signals.clear(id_, ERA_A1.ready_suffix)
            self.signals.clear(id_, ERA_A1.done_suffix)

    def _spec(self, work: _Work, artifact: Artifact, criu: Criu, target: Target | None) -> dict[str, Any]:
        manifest = artifact.manifest
        images = artifact.path / "images"
        directory = work.directory.path
        pidfile = directory / "restored.pid"
        chosen = restore_options(manifest, self.settings, directory, target)
        args = options.restore_args(images, pidfile, chosen, work_dir=directory)
        marker = manifest.contract.restore_marker
        return {
            "criu": [*criu.argv, *args],
            "env": {**clean_env(), JOB_ENV: work.uuid},
            "pidfile": str(pidfile),
            "deadline_seconds": self.settings.restore.deadline_seconds,
            "inherit": inherit(manifest) if target is None else filling.inherit(manifest),
            "connections": connections(images) if chosen.tcp == "established" else [],
            "container": None if target is None else targets.spec(manifest, target),
            "marker": {
                "path": marker,
                "uid": manifest.process.uids[1],
                "gid": manifest.process.gids[1],
                "groups": manifest.process.groups,
                "capabilities": manifest.process.cap_eff & (-1 if target is None else target.cap_bnd),
            }
            if marker.startswith("/")
            else None,
            "read_ahead": [str(images / name) for name in page_files(images)]
            if self.settings.restore.read_ahead
            else [],
        }

    # the answer ---------------------------------------------------------------------------------------

    def announce(self, request: RestoreRequest, outcome: RestoreOutcome) -> RestoreOutcome:
        """Answer through ``<id>.restored``, where there is a signal directory."""
        if self.signals is None or not request.announce:
            return outcome
        try:
            # The request goes first: once the answer is there, a new request may come under its name.
            self.signals.clear(request.id, ERA_A1.restore_suffix, request.identity)
            self.signals.answer_restored(request.id, answer(outcome))
        except (OSError, HibernodeError) as error:
            log.error("%s: cannot answer the restore request: %s", request.id, error)  # noqa: TRY400
            return dataclasses.replace(outcome, answered=False)
        return outcome


@dataclass(slots=True)
class _Work:
    request: RestoreRequest
    uuid: str
    directory: Dir
    journal: Journal
    held: contextlib.ExitStack
    process: Process | None = None
    applied: list[Applied] = field(default_factory=list)
