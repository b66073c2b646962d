"""When a CRIU that dumps may be killed without harm to the worker.

CRIU makes each task run code that is not its own: first single system calls, written over the start of
the task's first executable mapping and ended by a trap, then a "parasite" in a mapping of its own. The
parasite puts the task back by itself when CRIU dies. A task that is let go anywhere else in that code runs
into the trap, and dies of SIGTRAP. So CRIU is stopped, its tasks are looked at, and it is continued for
an instant if one of them is at such a place.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final

from hibernode.host import procfs

CALL_BYTES: Final = 64
"""compel/arch/*/infect.c: a system call and its trap take 8 bytes; a few more do no harm."""

PARASITE: Final = "CRIUMFD"
"""compel/src/lib/infect.c: the name of the memfd that is the parasite's mapping."""

TRACED: Final = frozenset("tT")


def is_safe(root_pid: int) -> bool:
    """Whether no thread of the tree is where CRIU's death would kill it; CRIU must be stopped."""
    try:
        tree = procfs.tree(root_pid)
    except ProcessLookupError:
        return True
    for stat in tree:
        with contextlib.suppress(OSError):
            if procfs.read_status(stat.pid).tracer_pid and not _process_is_safe(stat.pid):
                return False
    return True


def _process_is_safe(pid: int) -> bool:
    areas = [area for area in procfs.maps(pid) if "x" in area.perms]
    for tid in procfs.threads(pid):
        words = Path(f"/proc/{pid}/task/{tid}/syscall").read_text().split()
        if words == ["running"]:
            return False  # for an instant: it comes to its trap, or to the parasite's wait
        at = int(words[-1], 16)
        if areas and areas[0].start <= at < areas[0].start + CALL_BYTES:
            return False
        parasite = any(PARASITE in area.path and area.start <= at < area.end for area in areas)
        if parasite and procfs.read_stat(tid).state in TRACED:
            return False
    return True
