"""Restore targets: pods whose container waits for a worker, filled when its checkpoint is in the store."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from functools import partial
from typing import Final

from hibernode.answers import RestoreOutcome, RestoreRequest, sentence
from hibernode.apart import apart
from hibernode.cluster import inside
from hibernode.cluster.pods import Ask, Problem
from hibernode.cluster.roster import Entry
from hibernode.cluster.shared import Shared, locate
from hibernode.discovery.container_look import owner_of
from hibernode.discovery.containers import Container, find, hold
from hibernode.errors import HibernodeError, NotFoundError, RefusedError
from hibernode.host.procfs import Process
from hibernode.journal import Step
from hibernode.kube.names import COMPLETED, FAILED, Word
from hibernode.placeholder import recognise
from hibernode.workload import CheckpointId

log = logging.getLogger("hibernode.cluster")

WAIT_SECONDS: Final = 1.0
"""Between two looks for a checkpoint that is not in the store, or a placeholder that does not wait yet."""

QUIET_SECONDS: Final = 30.0
"""A container that is no placeholder for this long is told of."""


class Restores:
    """Fills the placeholders of pods: one try a container, and a pod where it starts cold by itself."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared

    async def advance(self, entry: Entry) -> None:
        """Do what can be done for a pod now."""
        ask = entry.ask
        if entry.busy or entry.settled or time.monotonic() < entry.not_before:
            return
        if ask.over:
            entry.settled = True
            return
        problem = ask.problem or await locate(entry, self._shared.heard())
        if problem is not None:
            self._refuse(entry, problem)
            return
        if entry.container is None:
            return
        entry.not_before = time.monotonic() + WAIT_SECONDS
        id_ = CheckpointId(ask.id)
        if entry.container.nested or not await self._is_there(entry, id_):
            return
        container = await self._waits(entry, entry.container)
        if container is not None:
            await self._submit(entry, id_, container)

    async def _is_there(self, entry: Entry, id_: CheckpointId) -> bool:
        """Whether the checkpoint is in the store; says once that it is waited for."""
        try:
            await asyncio.to_thread(self._shared.requests.parts.restorer.store.get, id_)
        except NotFoundError:
            if entry.first("RestoreWaiting"):
                text = f"checkpoint {id_} is not in the store of this node yet; it is waited for"
                self._shared.teller.event(entry.ask.pod, "Normal", "RestoreWaiting", text)
            return False
        except (HibernodeError, OSError):
            return True  # the restore says what is wrong with it
        return True

    async def _waits(self, entry: Entry, container: Container) -> Container | None:
        """Give the container as it is now if it waits for a worker; settles one that has a worker."""
        ask = entry.ask
        try:
            now = await apart(
                partial(find, container.ref.id), f"container {container.ref.id}", "a look for it"
            )
        except HibernodeError:
            entry.container = None
            return None
        if now.container.init != container.init:
            entry.container = None
            return None
        if now.container.nested:
            entry.settled = True  # an agent before this one has restored it, or a command
            return None
        ours = recognise(container.pid)
        if not ours and (ask.placeholder or ask.era.word is Word.FILE):
            entry.missing_since = entry.missing_since or time.monotonic()
            if time.monotonic() - entry.missing_since > QUIET_SECONDS and entry.first("NoPlaceholder"):
                text = f"container {ask.container} does not run hibernode-placeholder, so nothing is restored"
                self._shared.teller.event(ask.pod, "Warning", "NoPlaceholder", text)
            return None
        return now.container

    async def _submit(self, entry: Entry, id_: CheckpointId, container: Container) -> None:
        requests, ask, state = self._shared.requests, entry.ask, self._shared.requests.parts.restorer.state
        if requests.parts.jobs.has("restore", id_):
            return
        names = [f"container {container.ref.id} {container.init.start_ticks}"]
        if recognise(container.pid):  # it starts cold by itself; a foreign one is ended and begins anew
            names.append(f"pod {ask.pod.uid}")
        if not entry.tried:
            entry.tried = True
            if not await asyncio.to_thread(state.first_try, *names):
                entry.settled = True
                return

        def ended(outcome: RestoreOutcome | None) -> None:
            entry.busy = False
            entry.settled = outcome is not None and outcome.answered
            self._shared.wake()

        asked = RestoreRequest(id_, into=container.ref.id, announce=False)
        entry.busy = True
        text = f"into container {container.ref.id} of pod {ask.pod.namespace}/{ask.pod.name}"
        if not requests.restore(asked, text, partial(self._run, entry, ask, container), ended):
            entry.busy = False

    async def _run(
        self, entry: Entry, ask: Ask, container: Container, asked: RestoreRequest
    ) -> RestoreOutcome:
        teller = self._shared.teller
        teller.event(ask.pod, "Normal", "RestoreStarted", f"{asked.id} into container {ask.container}")
        with await asyncio.to_thread(hold, container) as process:
            outcome = await self._shared.requests.parts.restorer.run(asked)
            if outcome.answered:
                await self._conclude(entry, ask, process, outcome)
        return outcome

    async def _conclude(self, entry: Entry, ask: Ask, process: Process, outcome: RestoreOutcome) -> None:
        teller, era = self._shared.teller, ask.era
        if era.restore_status:
            status = {era.restore_status: COMPLETED if outcome.success else FAILED}
            if era.restore_container_id:
                status[era.restore_container_id] = ask.container_id
            teller.annotate(ask.pod, status)
        if outcome.success:
            said = await self._wake(entry, process, outcome)
            text = f"{outcome.message} in {outcome.seconds:.2f} s{said}"
            teller.event(ask.pod, "Normal", "RestoreSucceeded", text)
            return
        refused = outcome.exit_code == RefusedError.exit_code
        text = sentence(outcome)
        teller.event(ask.pod, "Warning", "RestoreIncompatible" if refused else "RestoreFailed", text)
        if outcome.step == Step.COMPATIBILITY.value:
            teller.incompatible(ask.pod, outcome.reason, text)
        if not refused and era.word is not Word.FILE and not recognise(process.pid):
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(
                    signal.SIGKILL
                )  # the kubelet starts it anew: another try, or another node

    async def _wake(self, entry: Entry, process: Process, outcome: RestoreOutcome) -> str:
        """Tell a worker of a later era that it was restored; era A1's has its marker."""
        if entry.ask.era.word is Word.FILE:
            return ""
        work = partial(_wake, process, outcome.pid, entry.control_dir)
        try:
            await apart(work, owner_of(process.pid), inside.WHAT)
        except (OSError, HibernodeError) as error:
            log.error("%s: the restored worker cannot be told: %s", outcome.id, error)  # noqa: TRY400
            return f"; it cannot be told that it was: {error}"
        return ""

    def _refuse(self, entry: Entry, problem: Problem) -> None:
        """Say that nothing can be restored; a placeholder of ours starts cold after its own wait."""
        entry.settled = True
        parts, ask = self._shared.requests.parts, entry.ask
        where = f"pod {ask.pod.namespace}/{ask.pod.name}"
        log.error("%s: %s", where, problem)
        parts.metrics.rejected(problem.reason)
        parts.events.add("Warning", "RestoreFailed", ask.id, f"{where}: {problem}")
        self._shared.teller.event(ask.pod, "Warning", "RestoreFailed", str(problem))
        if ask.era.restore_status:
            self._shared.teller.annotate(ask.pod, {ask.era.restore_status: FAILED})


def _wake(process: Process, pid: int, control_dir: str) -> None:
    if control_dir:
        inside.write_sentinel(process, control_dir, restored=True)
        return
    with Process.open(pid) as root:
        inside.tell(root, signal.SIGCONT)
