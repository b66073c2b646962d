"""The signal directory's contract: requests read from it, answers written to it.

Any worker can write to the directory. Names pass the gate of :class:`CheckpointId`; what is not a plain
file of one name and a bounded size is never opened, followed or waited for. A file here is a hint: who may
ask for what is decided in :mod:`hibernode.discovery.locate`.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat as st
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from hibernode.config import SignalSettings
from hibernode.errors import RefusedError, UsageError
from hibernode.host.safefs import Dir
from hibernode.workload import ERA_A1, CheckpointId, Era, Finding, Verdict

MAX_ERROR_CHARS: Final = 1024
TRUNCATED: Final = " [truncated]"
DIRECTORY_MODE: Final = 0o1777
PID_LIMIT: Final = 1 << 22
"""The kernel's largest pid_max."""

SETTLE_SECONDS: Final = 0.2
"""A file this young, found by a look and not by the event of its closing, may still be written to."""

REMEMBERED: Final = 4096
"""Rejections that are not said again; beyond these the oldest are forgotten."""

Identity = tuple[int, int, int]
"""Device, inode, ctime in nanoseconds: changes whenever the file is written or replaced."""


@dataclass(frozen=True, slots=True)
class ReadyRequest:
    """A ready file. ``pid`` is what it names, None for an empty one; ``ctime`` is Unix seconds."""

    id: CheckpointId
    pid: int | None
    uid: int
    gid: int
    ctime: float
    identity: Identity


@dataclass(frozen=True, slots=True)
class RestoreRequest:
    """A restore file: who asked, and when."""

    id: CheckpointId
    uid: int
    gid: int
    ctime: float
    identity: Identity


@dataclass(frozen=True, slots=True)
class Rejected:
    """A file that has a request's name and is not one."""

    name: str
    reason: str
    message: str


@dataclass(slots=True)
class Scan:
    """What one look has found. ``unsettled``: a file may still be written to, look again soon."""

    ready: list[ReadyRequest] = field(default_factory=list)
    restore: list[RestoreRequest] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    ignored: int = 0
    unsettled: bool = False


class SignalDir:
    """The signal directory. It is opened anew for each look and each answer, since it may be replaced."""

    def __init__(self, settings: SignalSettings, era: Era = ERA_A1) -> None:
        self.settings = settings
        self.path = settings.path
        self.era = era
        self._said: OrderedDict[tuple[str, Identity], None] = OrderedDict()

    def create(self) -> None:
        """Make the directory if it is absent, 1777: each worker its own files, nobody another's.

        One that exists keeps its mode; see :meth:`check_directory`.
        """
        Dir.open(self.path, create=True, mode=DIRECTORY_MODE).close()

    def check_directory(self) -> list[Finding]:
        """Check that workers cannot remove each other's requests."""
        try:
            mode = self.path.stat().st_mode
        except OSError as error:
            return [
                Finding(
                    "signals.directory",
                    Verdict.WARN,
                    "a directory",
                    str(error.strerror),
                    f"mkdir -m 1777 {self.path}",
                )
            ]
        open_to_all = mode & 0o022 and not mode & st.S_ISVTX
        return [
            Finding(
                "signals.directory",
                Verdict.WARN if open_to_all else Verdict.OK,
                "not writable by others, or sticky",
                f"mode {st.S_IMODE(mode):04o}",
                f"chmod +t {self.path}: any worker can remove another's request" if open_to_all else "",
            )
        ]

    # requests -----------------------------------------------------------------------------------------

    def scan(self, names: Iterable[str] | None = None) -> Scan:
        """Look at ``names``, or at all; blocking, so not for the event loop.

        Requests that are answered already are left out. A rejection is said once for each state of a file.
        """
        found = Scan()
        try:
            directory = Dir.open(self.path)
        except OSError:
            return found
        with directory:
            closed = names is not None
            present = {entry.name for entry in directory.scan()} if names is None else None
            for name in sorted(present) if present is not None else (names or ()):
                self._look(directory, name, found, present, closed=closed)
        return found

    def _look(
        self, directory: Dir, name: str, found: Scan, present: set[str] | None, *, closed: bool
    ) -> None:
        stem, dot, suffix = name.partition(".")
        answer = {
            self.era.ready_suffix: self.era.done_suffix,
            self.era.restore_suffix: self.era.restored_suffix,
        }.get(dot + suffix)
        if answer is None:
            found.ignored += 1
            return
        try:
            id_ = CheckpointId(stem)
        except UsageError:
            found.ignored += 1
            return
        try:
            stat = directory.stat(name)
        except OSError:
            return
        identity = (stat.st_dev, stat.st_ino, stat.st_ctime_ns)
        if (present is None or id_ + answer in present) and _answered(directory, id_ + answer, stat):
            return
        if not closed and st.S_ISREG(stat.st_mode) and 0 <= time.time() - stat.st_ctime < SETTLE_SECONDS:
            found.unsettled = True
            return
        try:
            self._take(directory, name, id_, found)
        except FileNotFoundError:
            return
        except RefusedError as error:
            if self._first_time(name, identity):
                found.rejected.append(Rejected(name, error.reason, error.message))

    def _take(self, directory: Dir, name: str, id_: CheckpointId, found: Scan) -> None:
        content = directory.read(name, self.settings.max_file_bytes)
        stat = content.stat
        identity = (stat.st_dev, stat.st_ino, stat.st_ctime_ns)
        fields = _fields(name, content.data)
        who = (stat.st_uid, stat.st_gid, stat.st_ctime, identity)
        if name.endswith(self.era.ready_suffix):
            found.ready.append(ReadyRequest(id_, _pid(name, fields), *who))
        else:
            if fields:
                raise RefusedError(f"{name}: unknown key {next(iter(fields))[:40]!r}", reason="BadRequest")
            found.restore.append(RestoreRequest(id_, *who))

    def _first_time(self, name: str, identity: Identity) -> bool:
        key = (name, identity)
        if key in self._said:
            self._said.move_to_end(key)
            return False
        self._said[key] = None
        if len(self._said) > REMEMBERED:
            self._said.popitem(last=False)
        return True

    def answered(self, request: ReadyRequest) -> bool:
        """Whether the signal file is there and younger than the request."""
        try:
            with Dir.open(self.path) as directory:
                done = directory.stat(request.id + self.era.done_suffix)
        except OSError:
            return False
        return st.S_ISREG(done.st_mode) and done.st_ctime_ns >= request.identity[2]

    # answers ------------------------------------------------------------------------------------------

    def answer_done(self, id_: CheckpointId, *, checkpoint_path: str, success: bool, error: str = "") -> None:
        """Write ``<id>.done``, whole at every instant.

        :raises OSError: the directory is gone or full. :raises RefusedError: a directory has the name.
        """
        data = done_payload(id_, checkpoint_path=checkpoint_path, success=success, error=error)
        with Dir.open(self.path) as directory:
            directory.write_atomic(id_ + self.era.done_suffix, data, 0o644)

    def answer_restored(self, id_: CheckpointId, body: Mapping[str, Any]) -> None:
        """Write ``<id>.restored``, whole at every instant."""
        answer = {"checkpoint_id": str(id_), "timestamp": _now(), **body}
        if "error" in answer:
            answer["error"] = bounded(str(answer["error"]))
        data = (json.dumps(answer, indent=2) + "\n").encode()
        with Dir.open(self.path) as directory:
            directory.write_atomic(id_ + self.era.restored_suffix, data, 0o644)

    def clear(self, id_: CheckpointId, suffix: str, identity: Identity | None = None) -> None:
        """Remove a request or an answer; a directory in its place is left alone.

        With ``identity`` only that very file: whoever asked may have asked again meanwhile.
        """
        with contextlib.suppress(FileNotFoundError, RefusedError), Dir.open(self.path) as directory:
            if identity is not None:
                stat = directory.stat(id_ + suffix)
                if (stat.st_dev, stat.st_ino, stat.st_ctime_ns) != identity:
                    return
            directory.unlink(id_ + suffix, missing_ok=True)


def _answered(directory: Dir, answer: str, request: os.stat_result) -> bool:
    try:
        stat = directory.stat(answer)
    except OSError:
        return False
    return st.S_ISREG(stat.st_mode) and stat.st_ctime_ns >= request.st_ctime_ns


def _fields(name: str, data: bytes) -> dict[str, Any]:
    if not data.strip():
        return {}
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError):
        raise RefusedError(f"{name}: neither empty nor JSON", reason="BadRequest") from None
    if not isinstance(fields, dict):
        raise RefusedError(f"{name}: JSON, but not an object", reason="BadRequest")
    return fields


def _pid(name: str, fields: dict[str, Any]) -> int | None:
    unknown = sorted(set(fields) - {"pid"})
    if unknown:
        raise RefusedError(f"{name}: unknown key {unknown[0][:40]!r}", reason="BadRequest")
    if "pid" not in fields:
        return None
    pid = fields["pid"]
    if isinstance(pid, bool) or not isinstance(pid, int) or not 1 < pid < PID_LIMIT:
        raise RefusedError(f"{name}: pid {str(pid)[:40]!r} is not a pid", reason="BadRequest")
    return pid


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def bounded(text: str) -> str:
    """Cut a text for people to a bounded length and replace its control characters."""
    clean = "".join(char if char.isprintable() else " " for char in text)
    if len(clean) <= MAX_ERROR_CHARS:
        return clean
    return clean[: MAX_ERROR_CHARS - len(TRUNCATED)] + TRUNCATED


def done_payload(id_: CheckpointId, *, checkpoint_path: str, success: bool, error: str = "") -> bytes:
    """Build era A1's answer, for the signal file and for ``checkpoint.done`` in the artifact alike."""
    answer: dict[str, Any] = {
        "checkpoint_id": str(id_),
        "checkpoint_path": checkpoint_path,
        "timestamp": _now(),
        "success": success,
    }
    if not success:
        answer["error"] = bounded(error or "the checkpoint failed")
    return (json.dumps(answer, indent=2) + "\n").encode()
