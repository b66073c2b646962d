"""The worker's tree around a dump: as it was before, so after; and half a tree after a restore: ended.

CRIU stops every task by ptrace and puts it back itself, also when it fails. What is here is for the CRIU
that could not: killed, hung, out of memory.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Final

from hibernode.host import procfs
from hibernode.host.procfs import Process
from hibernode.workload import ProcessKey

log = logging.getLogger("hibernode.worker")

SETTLE_SECONDS: Final = 5.0
"""A task that CRIU had stopped runs again within milliseconds of CRIU's end; a busy node takes longer."""

GONE_SECONDS: Final = 5.0
"""What was killed is gone within milliseconds; who waits for a disk that hangs is not waited for."""

MAX_PIDS: Final = 1 << 22
"""PID_MAX_LIMIT of linux/threads.h: no pid is as large."""

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


def noted_key(note: Any) -> ProcessKey | None:
    """Read which process a note of ours names; None when it names none, or is damaged."""
    try:
        pid, ticks = int(note["pid"]), int(note["start_ticks"])
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    return ProcessKey(pid, ticks) if 0 < pid < MAX_PIDS else None


def noted_time(note: Any) -> float:
    """Read a time of a note, in seconds since 1970; now, if it is none."""
    try:
        return float(note)
    except (TypeError, ValueError, OverflowError):
        return time.time()


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


def end_since(pids: Iterable[int], began: float, spared: Callable[[], Collection[int]] = tuple) -> list[int]:
    """End those of the processes ``pids`` that started after ``began``, in seconds since 1970; returns them.

    What they have started since goes with them. Each is held by its pidfd before its start is looked at, so
    that no later process with its number is meant. ``spared`` is asked for pids to leave alone when all of
    them are held.
    """
    with contextlib.ExitStack() as held:
        young: list[Process] = []
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                process = held.enter_context(Process.open(pid))
                if procfs.start_time(process.key.start_ticks) >= began - procfs.CLOCK_SLACK_SECONDS:
                    young.append(process)
        others = spared() if young else ()
        deadline = time.monotonic() + GONE_SECONDS
        ended = [process.key for process in young if process.pid not in others]
        for key in ended:
            end_tree(key, deadline)
    return [key.pid for key in ended]


def end_tree(root: ProcessKey, deadline: float | None = None) -> None:
    """Kill a process and all below it, the root last: without it nobody knows who was below.

    ``deadline``: in monotonic seconds; what is left by then is killed all the same, and not waited for.
    """
    deadline = time.monotonic() + GONE_SECONDS if deadline is None else deadline
    while True:
        late = time.monotonic() > deadline
        try:
            tree = procfs.tree(root.pid)
        except ProcessLookupError:
            return
        living = [stat for stat in tree if stat.state not in "ZX"]
        if tree[0].key != root or not living:
            return
        for stat in living if late else living[1:] or living:
            with contextlib.suppress(ProcessLookupError), Process.open(stat.pid) as process:
                if process.key == stat.key:
                    process.send_signal(signal.SIGKILL)
        if late:
            log.error("killed and not gone within %g s: the tree of pid %d", GONE_SECONDS, root.pid)
            return
        time.sleep(0.005)
