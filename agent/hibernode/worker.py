"""The worker's tree around a dump: as it was before, so after.

CRIU stops every task by ptrace and puts it back itself, also when it fails. What is here is for the CRIU
that could not: killed, hung, out of memory.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from dataclasses import dataclass
from typing import Any, Final

from hibernode.host import procfs
from hibernode.host.procfs import Process
from hibernode.workload import ProcessKey

log = logging.getLogger("hibernode.worker")

SETTLE_SECONDS: Final = 5.0
"""A task that CRIU had stopped runs again within milliseconds of CRIU's end; a busy node takes longer."""

STOPPED: Final = frozenset("Tt")


@dataclass(frozen=True, slots=True)
class WorkerState:
    """One process of the tree: its state's letter and who traced it (0: nobody)."""

    state: str
    tracer_pid: int


def worker_state(root_pid: int) -> dict[ProcessKey, WorkerState]:
    """Look at every process of the tree."""
    seen: dict[ProcessKey, WorkerState] = {}
    for stat in procfs.tree(root_pid):
        with contextlib.suppress(ProcessLookupError):
            seen[stat.key] = WorkerState(stat.state, procfs.read_status(stat.pid).tracer_pid)
    return seen


def settle(process: Process, before: dict[ProcessKey, WorkerState]) -> list[int]:
    """Bring the tree back to the state ``before``; returns the pids that would not come back.

    The processes that were stopped before stay stopped; all others must be running and not traced by a
    process that did not trace them before. Called after CRIU has ended.
    """
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        wrong = _wrong(process, before)
        if not wrong:
            return []
        for pid in wrong:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        if time.monotonic() > deadline:
            log.error("still stopped after the dump has ended: pids %s", wrong)
            return wrong
        time.sleep(0.02)


def _wrong(process: Process, before: dict[ProcessKey, WorkerState]) -> list[int]:
    if not process.alive():
        return []
    wrong: list[int] = []
    for key, state in worker_state(process.pid).items():
        was = before.get(key)
        stopped_before = was is not None and was.state in STOPPED
        traced_before = was.tracer_pid if was is not None else 0
        if (state.state in STOPPED and not stopped_before) or state.tracer_pid not in (0, traced_before):
            wrong.append(key.pid)
    return wrong


def note_states(states: dict[ProcessKey, WorkerState]) -> dict[str, object]:
    """Say in a journal what :func:`settle_from_note` needs: who was stopped before the dump."""
    return {"stopped_before": [key.pid for key, state in states.items() if state.state in STOPPED]}


def noted_worker(journal: dict[str, Any]) -> int | None:
    """Return the pid of the worker that a dead agent was dumping, if that very process still lives."""
    try:
        with Process.open(int(journal["pid"])) as process:
            return process.pid if process.key.start_ticks == journal.get("start_ticks") else None
    except (KeyError, TypeError, ValueError, ProcessLookupError):
        return None


def settle_from_note(journal: dict[str, Any]) -> bool:
    """Put the worker of a dead agent's dump back as it was; whether it still lives."""
    try:
        process = Process.open(int(journal["pid"]))
    except (KeyError, TypeError, ValueError, ProcessLookupError):
        return False
    with process:
        if process.key.start_ticks != journal.get("start_ticks"):
            return False
        stopped = set(journal.get("stopped_before") or ())
        before = {
            key: state if key.pid in stopped else WorkerState("S", 0)
            for key, state in worker_state(process.pid).items()
        }
        settle(process, before)
        return process.alive()
