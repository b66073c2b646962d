"""What is compared before a restore, and who may ask for one."""

from __future__ import annotations

import asyncio
from typing import Final

from hibernode.answers import RestoreRequest
from hibernode.artifact.manifest import Manifest
from hibernode.compat import PIDS_CHECK, compatibility, host_facts, strictly
from hibernode.container import target as targets
from hibernode.container.gate import container_findings
from hibernode.container.target import Target
from hibernode.criu.runner import Criu
from hibernode.discovery.locate import others_with_marker
from hibernode.errors import RefusedError
from hibernode.workload import ERA_A1, CheckpointId, Finding, Verdict

PID_TRIES: Final = 40
PID_SECONDS: Final = 0.05
"""Two seconds in all for the pids to become free: a worker that was told to end needs that long at most."""


def findings(
    manifest: Manifest, criu: Criu, id_: CheckpointId, target: Target | None, *, strict: bool
) -> list[Finding]:
    """Compare what was dumped with this machine, or with the container ``target``."""
    facts = host_facts(manifest, criu.version)
    rows = container_findings(manifest, target)
    if target is None:
        rows += _marker_row(manifest, id_)
    else:
        facts = targets.seen_from(manifest, target, facts)
    rows = [*compatibility(manifest, facts), *rows]
    return strictly(rows) if strict else rows


async def settled_findings(
    manifest: Manifest, criu: Criu, id_: CheckpointId, target: Target | None, *, strict: bool
) -> list[Finding]:
    """Compare, and give the dumped worker a moment to be gone: who asks at once finds it ending."""
    for _ in range(PID_TRIES):
        rows = await asyncio.to_thread(findings, manifest, criu, id_, target, strict=strict)
        if [row.check for row in rows if row.verdict is Verdict.FAIL] != [PIDS_CHECK]:
            break
        await asyncio.sleep(PID_SECONDS)
    return rows


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
