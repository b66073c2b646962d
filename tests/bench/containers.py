"""A worker in a container: the freeze from outside, and our own work before CRIU runs in the placeholder."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path

from hibernode.answers import Outcome, Request, RestoreRequest, Trigger
from hibernode.artifact.store import Store
from hibernode.checkpoint import Checkpointer
from hibernode.discovery.containers import find, hold
from hibernode.discovery.locate import Contract
from hibernode.placeholder import find_placeholder
from hibernode.restore import Restorer
from hibernode.settings import Settings
from hibernode.state import StateDir
from hibernode.workload import CheckpointId
from tests.bench.measure import Report, settle
from tests.bench.stamp import StampedCriu
from tests.real import images
from tests.real.boxes import Box, Kit
from tests.real.node import until

OWN_WORK_SECONDS = 0.1
ID = CheckpointId("be9cbe9cbe9c")


def measure(report: Report, base: Path, criu: StampedCriu, rounds: int) -> None:
    """Dump one Python worker of some 10 MiB again and again, and restore it into a fresh placeholder each."""
    settings = Settings.model_validate(
        {
            "store": {"path": base / "store", "min_free_bytes": 0},
            "state_dir": base / "state",
            "criu": {"binary": str(criu.path)},
        }
    )
    kit = Kit()
    with (
        contextlib.closing(kit),
        Store(settings.store.path).open() as store,
        contextlib.closing(StateDir.open(settings.state_dir)) as state,
        kit.runtime("runc") as runtime,
    ):
        binds = [(find_placeholder(), "/placeholder", "ro")]
        worker = runtime.run(
            [images.PYTHON_WORKER, "--no-ready"],
            image=images.debian(),
            env={"DYN_CHECKPOINT_HASH": ID, "DYN_RESTORE_MARKER_FILE": "/srv/restored"},
            binds=binds,
        )
        worker.counts_on()
        dumps = [_dump(Checkpointer(settings, store, state, None), worker) for _ in range(rounds)]
        restorer = Restorer(settings, store, state, None)
        restores = []
        for _ in range(rounds):
            box = runtime.run(["/placeholder"], image=images.debian(), binds=binds)
            until("listening placeholder", lambda box=box: _listens(box))  # type: ignore[misc]
            restores.append(_restore(restorer, criu, box))
            box.remove()
    report.section("container, 10 MiB of Python in Debian, runc")
    report.add("container: dump, whole", "s", [outcome.seconds for outcome, _ in dumps])
    report.add(
        "container:   of it rootfs and /dev/shm", "s", [outcome.phases["rootfs"] for outcome, _ in dumps]
    )
    report.add("container: restore, whole", "s", [whole for whole, _, _ in restores])
    own = [own for _, own, _ in restores]
    report.add("container: own work until criu starts", "s", own, "< 0.1", OWN_WORK_SECONDS)
    for phase in ("verify", "compatibility", "prepare"):
        report.add(f"container:   of it {phase}", "s", [phases[phase] for _, _, phases in restores])


def _listens(box: Box) -> bool:
    return "hibernode-ph" in Path(f"/proc/{box.pid}/comm").read_text()


def _dump(checkpointer: Checkpointer, box: Box) -> tuple[Outcome, float]:
    settle()
    with hold(find(box.id).container) as process:
        request = Request(ID, process, Contract(), Trigger.COMMAND, replace=True, announce=False)
        started = time.monotonic()
        outcome = asyncio.run(checkpointer.run(request))
    if not outcome.success:
        raise SystemExit(f"the dump failed: {outcome.message}")
    return outcome, time.monotonic() - started


def _restore(restorer: Restorer, criu: StampedCriu, box: Box) -> tuple[float, float, dict[str, float]]:
    settle()
    started = time.monotonic()
    outcome = asyncio.run(restorer.run(RestoreRequest(ID, into=box.id, announce=False)))
    whole = time.monotonic() - started
    if not outcome.success:
        raise SystemExit(f"the restore failed: {outcome.message}")
    return whole, criu.last("restore") - started, outcome.phases
