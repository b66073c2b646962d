"""After a restore: which restored workers live, how they ended, and what a dead agent left behind."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from hibernode.criu.runner import kill_leftovers
from hibernode.errors import HibernodeError, RefusedError
from hibernode.host import procfs
from hibernode.host.safefs import Dir
from hibernode.journal import JOURNAL, Step, read_journal
from hibernode.state import StateDir, read_json, write_json
from hibernode.worker import end_tree, noted_key
from hibernode.workload import CheckpointId, ProcessKey

log = logging.getLogger("hibernode.restored")

KEEP_RESTORES: Final = 20
"""Ended restores kept on disk for ``hibernode logs``, over all ids."""

END_SECONDS: Final = 10.0
"""How long a shim that was told to end may take before it is killed."""


WAIT_SECONDS: Final = 0.05

UNDONE: Final = "undone"
"""A file in a restore's directory: a shim that finds it when it begins, ends."""


class Phase(StrEnum):
    """Where a restore stands: the shim's own phases, and what its absence means."""

    STARTING = "starting"
    CRIU = "criu"
    WAKING = "waking"
    RUNNING = "running"
    FAILED = "failed"
    EXITED = "exited"
    LOST = "lost"


UNFINISHED: Final = (Phase.STARTING, Phase.CRIU, Phase.WAKING)
"""What a shim that lives works at, and what a dead one has not finished."""


@dataclass(frozen=True, slots=True)
class Restored:
    """One restore on disk. ``key`` is the worker's root once there is one; ``target`` the container's init.

    ``exit_code`` and ``exit_signal`` are both None while it runs and also when nobody knows (LOST).
    ``dirty`` says what of the container could not be brought back when the restore was undone.
    """

    id: CheckpointId
    name: str
    phase: Phase
    step: str
    announce: bool
    started_at: float
    shim_alive: bool
    shim_pid: int = 0
    key: ProcessKey | None = None
    exit_code: int | None = None
    exit_signal: int | None = None
    reported: bool = False
    target: ProcessKey | None = None
    dirty: str = ""


def restores(state: StateDir) -> list[Restored]:
    """List the restores on disk, oldest first."""
    found: list[Restored] = []
    for name in state.restores_dir.names():
        with (
            contextlib.suppress(OSError, ValueError, TypeError, HibernodeError),
            state.restores_dir.subdir(name) as directory,
        ):
            found.append(_read(name, directory))
    return sorted(found, key=lambda entry: entry.started_at)


def read(state: StateDir, name: str) -> Restored:
    """Read one restore afresh."""
    with state.restores_dir.subdir(name) as directory:
        return _read(name, directory)


def _read(name: str, directory: Dir) -> Restored:
    journal = read_journal(directory) or {}
    shim_alive = locked(directory)
    note = read_json(directory, "state.json") or {}
    phase = Phase(note.get("phase", Phase.STARTING))
    pid, ticks = int(note.get("pid") or 0), int(note.get("start_ticks") or 0)
    key = ProcessKey(pid, ticks) if pid and ticks else None
    if not shim_alive and phase in UNFINISHED:
        phase = Phase.LOST
    if not shim_alive and phase is Phase.RUNNING and not (key and alive(key)):
        phase = Phase.LOST
    return Restored(
        id=CheckpointId(name.partition(".")[0]),
        name=name,
        phase=phase,
        step=str(journal.get("step", "")),
        announce=bool(journal.get("announce", True)),
        started_at=float(journal.get("started_at", 0.0)),
        shim_alive=shim_alive,
        shim_pid=int(note.get("shim_pid") or 0),
        key=key,
        exit_code=note.get("exit_code"),
        exit_signal=note.get("exit_signal"),
        reported=bool(journal.get("end_reported")),
        target=noted_key(journal.get("target")),
        dirty=str(journal.get("dirty", "")),
    )


def targets(state: StateDir) -> set[ProcessKey]:
    """Name the inits of the containers that something was restored into, or is about to be."""
    return {entry.target for entry in restores(state) if entry.target is not None}


def alive(key: ProcessKey) -> bool:
    """Whether this very process still lives (a zombie does not)."""
    try:
        stat = procfs.read_stat(key.pid)
    except (ProcessLookupError, OSError):
        return False
    return stat.key == key and stat.state not in "ZX"


def locked(directory: Dir) -> bool:
    """Whether the shim of this restore lives: it holds the lock as long as it does."""
    try:
        fd = os.open("lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=directory.fd)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # two that only look do not take each other for it
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def undo(directory: Dir) -> None:
    """End a restore that has not finished: the shim, CRIU and whatever half a tree there is.

    A shim that has not begun will not. One that has a worker by now is left alone: it came too late for that.
    The shim ends what CRIU leaves. One that does not end in time is killed, and CRIU with it, since it
    is to die with its parent; tasks that CRIU had forked by then still carry the job's mark. A whole tree
    that waits for its GPU state does not: the shim has noted its root.
    """
    name = directory.path.name
    with contextlib.suppress(OSError):  # on a full disk we can only hope that the shim has begun
        directory.write_atomic(UNDONE, b"", 0o600, sync=False)
    deadline = time.monotonic() + END_SECONDS
    kill_leftovers(name.partition(".")[2])
    while locked(directory) and not has_worker(directory) and time.monotonic() < deadline:
        time.sleep(0.02)
        kill_leftovers(name.partition(".")[2])  # the shim may have been just about to start it
    shim_pid = int((read_json(directory, "state.json") or {}).get("shim_pid") or 0)
    with contextlib.suppress(ProcessLookupError), procfs.Process.open(shim_pid) as shim:
        if locked(directory) and not has_worker(directory):  # looked at while the shim is held by its pidfd
            log.warning("%s: the shim, pid %d, does not end and is killed", name, shim_pid)
            shim.send_signal(signal.SIGKILL)
            kill_leftovers(name.partition(".")[2])
    note = read_json(directory, "state.json") or {}
    asleep = noted_key(note.get("asleep"))
    same_boot = (read_journal(directory) or {}).get("boot_id") == procfs.boot_id()
    if asleep is not None and note.get("phase") == Phase.WAKING and same_boot:
        end_tree(asleep)


def has_worker(directory: Dir) -> bool:
    """Whether the restore has brought a worker back, so that it is too late to undo it."""
    phase = (read_json(directory, "state.json") or {}).get("phase")
    return phase in (Phase.RUNNING, Phase.EXITED)


def forget_old(state: StateDir) -> None:
    """Remove the oldest ended restores beyond :data:`KEEP_RESTORES`, but none that is still to be undone."""
    ended = [
        entry
        for entry in restores(state)
        if not entry.shim_alive and entry.phase is not Phase.RUNNING and entry.step == Step.DONE
    ]
    for entry in ended[: max(0, len(ended) - KEEP_RESTORES)]:
        state.restores_dir.remove_tree(entry.name)


def unfinished(state: StateDir) -> Iterator[Restored]:
    """Yield the restores that a dead agent was in the middle of: begun, and not announced."""
    for entry in restores(state):
        if entry.step != Step.DONE:
            yield entry


def end_of(entry: Restored) -> dict[str, int]:
    """Say how the worker ended, for ``<id>.restored``; empty while it runs or when nobody knows."""
    if entry.exit_code is not None:
        return {"exit_code": entry.exit_code}
    if entry.exit_signal is not None:
        return {"exit_signal": entry.exit_signal}
    return {}


def finish(directory: Dir, journal: dict[str, Any]) -> None:
    """Write that there is nothing left to do for this restore."""
    write_json(directory, JOURNAL, {**journal, "step": Step.DONE.value})


def shell_code(state: StateDir, directory: str) -> int | None:
    """Give the worker's exit code as a shell would; None where there is no worker or its end is not known."""
    return _shell_code(read(state, directory.rpartition("/")[2])) if directory else None


def _shell_code(entry: Restored) -> int | None:
    return entry.exit_code if entry.exit_signal is None else 128 + entry.exit_signal


def wait_for_end(state: StateDir, directory: str) -> int:
    """Wait until the restored worker ends; its exit code as a shell would give it.

    :raises HibernodeError: nobody knows how it ended.
    """
    name = directory.rpartition("/")[2]
    while True:
        entry = read(state, name)
        code = _shell_code(entry)
        if code is not None:
            return code
        if entry.phase is not Phase.RUNNING:
            raise HibernodeError(
                f"{entry.id}: the worker has ended and nobody knows how: its shim was killed",
                reason="WorkerLost",
            )
        time.sleep(WAIT_SECONDS)


def mark_reported(state: StateDir, entry: Restored) -> None:
    """Note that the worker's end has been reported, so that the next agent does not do so again."""
    with contextlib.suppress(OSError, RefusedError), state.restores_dir.subdir(entry.name) as directory:
        write_json(directory, JOURNAL, {**(read_journal(directory) or {}), "end_reported": True}, sync=False)
