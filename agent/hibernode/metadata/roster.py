"""Which processes are behind the records, kept for the next agent: some may end while none runs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Final

from hibernode.host.procfs import boot_id
from hibernode.host.safefs import Dir
from hibernode.workload import ProcessKey


@dataclass(frozen=True, slots=True)
class Entry:
    """A record of a process: whose it is, and what it was when it was noted."""

    pid: int
    start_ticks: int
    caller: str
    source_id: str
    worker_id: str
    rank: int
    generation: int

    @property
    def process(self) -> ProcessKey:
        """The process."""
        return ProcessKey(self.pid, self.start_ticks)


_TYPES: Final = [int, int, str, str, str, int, int]
"""Of an entry's fields."""


def save(path: Path, entries: Iterable[Entry]) -> None:
    """Write the file whole or not at all, for root alone. Raises OSError."""
    data = json.dumps({"boot": boot_id(), "entries": [astuple(one) for one in entries]})
    with Dir.open(path.parent) as folder:
        folder.write_atomic(path.name, data.encode(), 0o600, sync=False)


def load(path: Path) -> list[Entry]:
    """Read it; nothing where none is there, where it is broken, or from before the machine's start."""
    try:
        found = json.loads(path.read_bytes())
        entries = [Entry(*one) for one in found["entries"]]
        right = all([type(value) for value in astuple(one)] == _TYPES for one in entries)
        return entries if right and found["boot"] == boot_id() else []
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return []
