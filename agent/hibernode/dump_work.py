"""One dump: what CRIU is asked for, what its steps hand on to each other, and how the worker is put back."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hibernode import seal
from hibernode.answers import NOT_WOKEN, Outcome, Request
from hibernode.apart import apart
from hibernode.artifact.manifest import DiffFacts, LinkFacts, Manifest
from hibernode.artifact.staging import Staging
from hibernode.container import dump as containers
from hibernode.container.dump import ContainerDump
from hibernode.criu import options
from hibernode.criu.runner import Criu
from hibernode.discovery.container_look import owner_of
from hibernode.discovery.containers import Container
from hibernode.errors import HibernodeError
from hibernode.gpu.quiesce import NOTHING, Quiesced, Seen
from hibernode.host import netlock
from hibernode.journal import Journal, Step
from hibernode.preflight import Preflight
from hibernode.settings import Settings
from hibernode.worker import STOPPED, WorkerState, settle
from hibernode.workload import ProcessKey

log = logging.getLogger("hibernode.checkpoint")

T = TypeVar("T")


@dataclass(slots=True)
class Work:
    """What the steps hand on to each other."""

    request: Request
    staging: Staging
    journal: Journal
    before: dict[ProcessKey, WorkerState]
    container: Container | None = None
    preflight: Preflight | None = None
    dump: ContainerDump | None = None
    diffs: tuple[DiffFacts, ...] = ()
    criu: Criu | None = None
    argv: tuple[str, ...] = ()
    seen: seal.Description | None = None
    links: tuple[LinkFacts, ...] = ()
    on_gpu: Seen = NOTHING
    gpu: Quiesced | None = None
    note: str = ""
    asleep: bool = False
    manifest: Manifest | None = None
    absent: contextlib.AsyncExitStack = dataclasses.field(default_factory=contextlib.AsyncExitStack)

    @property
    def final_path(self) -> Path:
        """Where the artifact is once it is published: the staging lies two levels below the store."""
        return self.staging.path.parent.parent / self.request.id


async def look(work: Work, look: Callable[[], T]) -> T:
    """Look at the worker and its files, which may hang."""
    return await apart(look, owner_of(work.request.process.pid), "a look at it before a dump")


def dump_options(settings: Settings, checked: Preflight) -> options.DumpOptions:
    """Choose CRIU's options from the settings and what preflight has seen."""
    criu = settings.criu
    return options.DumpOptions(
        leave=settings.checkpoint.leave,
        shell_job=checked.shell_job,
        tcp=checked.tcp,
        file_locks=criu.file_locks,
        link_remap=criu.link_remap,
        ghost_limit_bytes=criu.ghost_limit_bytes,
        freeze_timeout_seconds=criu.freeze_timeout_seconds,
        log_level=criu.log_level,
    )


def put_back(work: Work) -> None:
    """Bring the worker back to the state it was in, and its connections too if CRIU could not."""
    kept_alive = work.preflight is not None and work.preflight.tcp == "established"
    in_dump = work.journal.step in (Step.DUMP, Step.ROOTFS)
    if work.dump is not None and work.dump.freezer is not None:
        try:
            work.dump.freezer.thaw()
        except HibernodeError as error:  # with the container its cgroup is gone too
            log.log(logging.ERROR if work.request.process.alive() else logging.DEBUG, "%s", error)
    if kept_alive and in_dump and work.request.process.alive():
        stopped = {key.pid for key, state in work.before.items() if state.state in STOPPED}
        log_path = work.staging.artifact_path / options.DUMP_LOG
        netlock.heal(work.request.process.pid, log_path, stopped=stopped)
    settle(work.request.process, work.before)


def journal_facts(request: Request, staging: Staging) -> dict[str, Any]:
    """Note which dump it is, for who finds it without its owner."""
    return {
        "id": str(request.id),
        "uuid": staging.uuid,
        "pid": request.process.pid,
        "start_ticks": request.process.key.start_ticks,
        "trigger": request.trigger.value,
        "announce": request.announce,
    }


def captured(work: Work) -> Outcome:
    """Say that it has worked, and what the caller should know all the same."""
    assert work.manifest is not None
    id_ = work.request.id
    return Outcome(
        id_,
        success=True,
        reason=NOT_WOKEN if work.asleep else "Captured",
        message=f"{id_} captured"
        + (containers.not_carried(work.dump) if work.dump is not None else "")
        + work.note,
        path=str(work.final_path),
        bytes=work.manifest.total_bytes,
    )
