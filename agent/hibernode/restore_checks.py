"""What is compared before a restore, and who may ask for one."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar

from hibernode.answers import RestoreRequest
from hibernode.apart import apart
from hibernode.artifact.manifest import Manifest
from hibernode.compat import PIDS_CHECK, compatibility, host_facts, strictly
from hibernode.container import target as targets
from hibernode.container.gate import container_findings
from hibernode.container.target import Target
from hibernode.criu.runner import Criu
from hibernode.discovery.container_look import owner_of
from hibernode.discovery.locate import others_with_marker
from hibernode.errors import RefusedError
from hibernode.gpu.here import of_container, of_node
from hibernode.gpu.service import look_once
from hibernode.gpu.thaw import Thaw, plan
from hibernode.settings import Settings
from hibernode.text import printable
from hibernode.workload import ERA_A1, CheckpointId, Finding, Verdict

SETTLING: Final = frozenset((PIDS_CHECK, "restore.ptrace"))
"""What processes that are ending can be the only reason for."""

PID_TRIES: Final = 40
PID_SECONDS: Final = 0.05
"""Two seconds in all: a worker that was told to end needs that long at most."""


T = TypeVar("T")


async def look(work: Callable[[], T], owner: str) -> T:
    """Look at what a restore is about, whose files may hang."""
    return await apart(work, owner, "a look at it before a restore")


def asked(request: RestoreRequest) -> str:
    """Name what is asked for, as the one whose files may hang."""
    return printable(f"container {request.into}" if request.into else f"checkpoint {request.id}")


async def findings(
    manifest: Manifest, criu: Criu, request: RestoreRequest, target: Target | None, *, strict: bool
) -> list[Finding]:
    """Compare what was dumped with this machine, or with the container ``target``."""
    owner = asked(request) if target is None else owner_of(target.process.pid)
    return await look(partial(_compared, manifest, criu, request.id, target, strict=strict), owner)


def _compared(
    manifest: Manifest, criu: Criu, id_: CheckpointId, target: Target | None, *, strict: bool
) -> list[Finding]:
    facts = host_facts(manifest, criu.version)
    rows = container_findings(manifest, target)
    if [row.verdict for row in rows] == [Verdict.FAIL]:
        return rows  # a container for the node, or the other way round: nothing else means anything then
    if target is None:
        rows += _marker_row(manifest, id_)
    else:
        facts = targets.seen_from(manifest, target, facts)
    rows = [*compatibility(manifest, facts), *rows]
    return strictly(rows) if strict else rows


async def settled_findings(
    manifest: Manifest, criu: Criu, request: RestoreRequest, target: Target | None, *, strict: bool
) -> list[Finding]:
    """Compare, and give what is ending a moment to be gone.

    It is the dumped worker where one asks at once, and the CRIU of a restore that was killed.
    """
    for _ in range(PID_TRIES):
        rows = await findings(manifest, criu, request, target, strict=strict)
        failed = {row.check for row in rows if row.verdict is Verdict.FAIL}
        if not failed or not failed <= SETTLING:
            break
        await asyncio.sleep(PID_SECONDS)
        if target is not None:
            again = partial(targets.capabilities, target.container, target.process.pid)
            now = await look(again, owner_of(target.process.pid))
            target = dataclasses.replace(target, capabilities=now)
    return rows


async def thawing(manifest: Manifest, settings: Settings, target: Target | None) -> Thaw:
    """Find out what the GPUs need; nothing is asked where no process of the tree used CUDA."""
    if manifest.cuda is None:
        return Thaw()
    snapshot = await look_once(settings.gpu)
    if target is None:
        here = of_node(snapshot)
    else:
        pid = target.process.pid
        here = await look(partial(of_container, snapshot, pid, target.devices), owner_of(pid))
    return await asyncio.to_thread(plan, manifest, settings.gpu, here)


def judged(thaw: Thaw, *, strict: bool) -> list[Finding]:
    """Give the rows of the GPUs."""
    return strictly(thaw.findings) if strict else list(thaw.findings)


def _marker_row(manifest: Manifest, id_: CheckpointId) -> list[Finding]:
    """See that no other worker would take the marker for its own and believe that it was restored."""
    marker = manifest.contract.restore_marker
    if not marker:
        return []
    others = others_with_marker(marker, id_, ERA_A1)
    pids = ", ".join(str(pid) for pid in others[:8])
    return [
        Finding(
            "restore.marker",
            Verdict.FAIL if others else Verdict.OK,
            f"{marker} is this worker's alone",
            f"pids {pids} of other ids look at it too" if others else "it is",
            f"start each worker with a {ERA_A1.env_restore_marker} of its own" if others else "",
            "MarkerShared" if others else "",
        )
    ]


def may_ask(request: RestoreRequest, manifest: Manifest) -> None:
    """Let only root and the worker's own user ask for its restore through the signal directory.

    :raises RefusedError: the request's file belongs to somebody else.
    """
    uid = request.requester_uid
    if uid is not None and uid not in (0, manifest.process.uids[0]):
        raise RefusedError(
            f"{request.id}: uid {uid} asked for the restore of a worker of uid {manifest.process.uids[0]}",
            remedy="root or the worker's own user must write the restore file",
            reason="WrongOwner",
        )
