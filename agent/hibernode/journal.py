"""The journal: what a pipeline is up to, on disk before each step begins.

A new agent reads it and finishes, undoes or fails the work. It is one small JSON file that is replaced
whole; for a checkpoint it lies in the staging directory, for a restore in the restore's own directory.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any, Final

from hibernode import faults
from hibernode.host.procfs import boot_id
from hibernode.host.safefs import Dir
from hibernode.state import read_json, write_json

JOURNAL: Final = "journal.json"


class Step(StrEnum):
    """The steps of a checkpoint and of a restore, in order."""

    LOCATE = "locate"
    PREFLIGHT = "preflight"
    QUIESCE_GPU = "quiesce-gpu"
    DUMP = "dump"
    ROOTFS = "rootfs"
    SEAL = "seal"
    PUBLISH = "publish"
    ANNOUNCE = "announce"

    VERIFY = "verify"
    COMPATIBILITY = "compatibility"
    PREPARE = "prepare"
    RESTORE = "restore"
    WAKE_GPU = "wake-gpu"

    DONE = "done"


class Journal:
    """One piece of work's journal; ``kind`` is ``checkpoint`` or ``restore``."""

    def __init__(self, directory: Dir, kind: str, facts: dict[str, Any]) -> None:
        self.dir = directory
        self.kind = kind
        self.step: Step | None = None
        self.phases: dict[str, float] = {}
        self._began = time.perf_counter()
        self._note: dict[str, Any] = {
            "kind": kind,
            "agent_pid": os.getpid(),
            "boot_id": boot_id(),
            "started_at": time.time(),
            "steps": {},
            **facts,
        }

    def note(self, **facts: Any) -> None:
        """Add facts that a new agent would need; they are on disk with the next step, or :meth:`write`."""
        self._note.update(facts)

    def write(self) -> None:
        """Bring to disk what has been noted since the step began."""
        write_json(self.dir, JOURNAL, self._note)

    async def begin(self, step: Step) -> None:
        """Write that ``step`` begins, then pass its fault point."""
        self.step = step
        self._began = time.perf_counter()
        self._note["step"] = step.value
        self._note["steps"][step.value] = time.time()
        self.write()
        await faults.point(f"{self.kind}.{step.value}")

    def running(self, step: Step) -> float:
        """Tell how long the step that runs has taken so far, in seconds."""
        assert self.step is step
        return time.perf_counter() - self._began

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the time that the block takes to ``phases[phase]``, in seconds."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.phases[phase] = self.phases.get(phase, 0.0) + time.perf_counter() - start


def read_journal(directory: Dir) -> dict[str, Any] | None:
    """Read the journal of dead work; None when it is absent or damaged."""
    return read_json(directory, JOURNAL)
