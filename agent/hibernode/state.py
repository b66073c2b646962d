"""What outlives the agent on this node, beside the store: attempts, logs of failed dumps, restores.

``<state_dir>`` (0700, root) holds ``attempts/<id>.json``, ``logs/<id>.dump.log`` and
``restores/<id>.<uuid>/``. Everything in it is written by the agent alone; what cannot be parsed is
treated as absent and said in the log, for a damaged note must not stop the work.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from hibernode.errors import BusyError, RefusedError
from hibernode.host.safefs import Dir
from hibernode.workload import CheckpointId

log = logging.getLogger("hibernode.state")

MAX_NOTE_BYTES: Final = 1 << 20
MAX_LOG_BYTES: Final = 4 << 20
"""A CRIU log at level 4 grows with the tree; the causes are at its end and its start is kept by CRIU."""


@dataclass(frozen=True, slots=True)
class Attempts:
    """Failed starts of one id inside the window."""

    count: int
    last_reason: str
    last_time: float


def read_json(directory: Dir, name: str) -> dict[str, Any] | None:
    """Read one of our own notes; None when it is absent or damaged."""
    try:
        data = json.loads(directory.read(name, MAX_NOTE_BYTES).data)
        if not isinstance(data, dict):
            raise ValueError("not an object")  # noqa: TRY004, TRY301 - said like any other damage
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError, RefusedError) as error:
        log.warning("%s/%s is damaged and is ignored: %s", directory.path, name, error)
        return None
    return data


def write_json(directory: Dir, name: str, data: dict[str, Any], *, sync: bool = True) -> None:
    """Write one of our own notes, whole at every instant."""
    text = json.dumps(data, indent=2, sort_keys=True) + "\n"
    directory.write_atomic(name, text.encode(), 0o600, sync=sync)


CLAIMS: Final = "claims.lock"
TRIES: Final = "tries.json"
MAX_TRIES: Final = 1000
"""Containers and pods that a restore was tried into, or that were answered; a node runs some hundred pods."""


class StateDir:
    """The agent's own directory on this node."""

    def __init__(self, root: Dir) -> None:
        self.root = root
        self.attempts_dir = root.subdir("attempts", create=True)
        self.logs_dir = root.subdir("logs", create=True)
        self.restores_dir = root.subdir("restores", create=True)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open the directory, making it if it is absent."""
        return cls(Dir.open(path, create=True, mode=0o700))

    def close(self) -> None:
        """Close the directory descriptors."""
        for directory in (self.attempts_dir, self.logs_dir, self.restores_dir, self.root):
            directory.close()

    # attempts -----------------------------------------------------------------------------------------

    def _entries(self, name: str) -> list[dict[str, Any]]:
        """Read the attempts on ``name``, leaving out what is not of our shape."""
        entries = (read_json(self.attempts_dir, f"{name}.json") or {}).get("attempts")
        return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []

    def attempts(self, name: str, window: float) -> Attempts:
        """Count the attempts on ``name`` (an id or ``<id>.restore``) that failed in the last ``window`` s."""
        horizon = time.time() - window
        kept = [
            entry
            for entry in self._entries(name)
            if isinstance(entry.get("time"), (int, float)) and entry["time"] >= horizon
        ]
        if not kept:
            return Attempts(0, "", 0.0)
        return Attempts(len(kept), str(kept[-1].get("reason", "")), float(kept[-1]["time"]))

    def check_attempts(self, id_: CheckpointId, limit: int, window: float) -> None:
        """See that fewer than ``limit`` attempts on an id have failed within ``window`` seconds.

        :raises RefusedError: reason ``AttemptsExhausted``.
        """
        before = self.attempts(id_, window)
        if before.count >= limit:
            raise RefusedError(
                f"{before.count} attempts on {id_} failed (limit {limit}); the last: {before.last_reason}",
                remedy=f"mend the cause ('hibernode logs {id_}'), then 'hibernode retry {id_}'",
                reason="AttemptsExhausted",
            )

    def attempt_begins(self, name: str) -> None:
        """Count an attempt before it starts, so that one which kills the agent is counted too."""
        entries = self._entries(name)[-100:]
        entries.append({"time": time.time(), "reason": "the agent ended in the middle of it"})
        write_json(self.attempts_dir, f"{name}.json", {"attempts": entries})

    def attempt_failed(self, name: str, reason: str) -> None:
        """Give the attempt that has begun its reason."""
        entries = self._entries(name)
        if entries:
            entries[-1]["reason"] = reason
            write_json(self.attempts_dir, f"{name}.json", {"attempts": entries})

    def attempt_withdrawn(self, name: str) -> None:
        """Forget the attempt that has begun: it was refused or cut short before it could do harm."""
        entries = self._entries(name)[:-1]
        if entries:
            write_json(self.attempts_dir, f"{name}.json", {"attempts": entries})
        else:
            self.attempts_clear(name)

    def attempts_clear(self, name: str) -> bool:
        """Forget all attempts on ``name``; whether there were any."""
        had = read_json(self.attempts_dir, f"{name}.json") is not None
        self.attempts_dir.unlink(f"{name}.json", missing_ok=True)
        return had

    @contextmanager
    def claim(self, pid: int) -> Iterator[None]:
        """Have a container, by its init's pid, or a worker, by its root's, for one piece of work alone.

        That is a dump, a restore, or the settling of what a dead one has left; also of several ids. One file
        with a byte a pid: a lock on it belongs to the open file and ends with it.

        :raises BusyError: another has it.
        """
        fd = os.open(
            CLAIMS, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self.root.fd
        )
        try:
            # struct flock of asm-generic/fcntl.h for 64 bit.
            lock = struct.pack("hh4xqqi4x", fcntl.F_WRLCK, os.SEEK_SET, pid, 1, 0)
            try:
                fcntl.fcntl(fd, fcntl.F_OFD_SETLK, lock)
            except BlockingIOError:
                raise BusyError(
                    f"another dump or restore is at work on pid {pid}",
                    remedy="wait for it, or name another container",
                ) from None
            yield
        finally:
            os.close(fd)

    def first_try(self, *names: str) -> bool:
        """Note a try under all of ``names``; False if there was one under any of them before."""
        known = read_json(self.root, TRIES) or {}
        first = not any(name in known for name in names)
        kept = sorted(known.items(), key=lambda item: str(item[1]))[-MAX_TRIES:]
        write_json(self.root, TRIES, {**dict(kept), **dict.fromkeys(names, time.time())})
        return first

    def tried(self, name: str) -> bool:
        """Whether a try under this name was noted."""
        return name in (read_json(self.root, TRIES) or {})

    # logs of failed dumps -----------------------------------------------------------------------------

    def keep_log(self, id_: CheckpointId, operation: str, text: bytes) -> Path:
        """Keep the log of a failed dump or restore for ``hibernode logs``; returns its path."""
        name = f"{id_}.{operation}.log"
        self.logs_dir.write_atomic(name, text[-MAX_LOG_BYTES:], 0o600, sync=False)
        return self.logs_dir.path / name

    def log_path(self, id_: CheckpointId, operation: str) -> Path | None:
        """Find the kept log, if there is one."""
        path = self.logs_dir.path / f"{id_}.{operation}.log"
        return path if path.is_file() else None
