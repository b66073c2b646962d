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
from typing import Any, Final, NamedTuple

from hibernode.errors import RefusedError
from hibernode.host.safefs import Dir
from hibernode.settings import SignalSettings
from hibernode.workload import ERA_A1, ID_PATTERN, CheckpointId, Era, Finding, Verdict

MAX_ERROR_CHARS: Final = 1024
TRUNCATED: Final = " [truncated]"
DIRECTORY_MODE: Final = 0o1777
PID_LIMIT: Final = 1 << 22
"""The kernel's largest pid_max."""

SETTLE_SECONDS: Final = 0.2
"""A file this young, found by a look and not by the event of its closing, may still be written to."""

REMEMBERED: Final = 4096
"""Rejections that are told and then remembered, so as to be told once; beyond these they are only counted.
Also how many answered requests are remembered."""

PASSING: Final = frozenset({"FileBusy", "Unreadable"})
"""Reasons that can go away while the file stays as it is; for all others it isn't even read again."""

SQUASHED_UID: Final = 65534
"""Who root's files belong to on an NFS export that trusts no root."""

Identity = tuple[int, int, int]
"""Device, inode, ctime in nanoseconds: changes whenever the file is written or replaced."""

_Key = tuple[str, Identity]
"""One state of one file. Those that were rejected are kept, with whether that is final for the state."""


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
    """What one look has found, requests in the order of their age.

    ``ignored`` counts names that are no request's, ``unsaid`` rejections too many to be told.
    ``unsettled``: a file may still be written to, look again soon.
    """

    ready: list[ReadyRequest] = field(default_factory=list)
    restore: list[RestoreRequest] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    ignored: int = 0
    unsaid: int = 0
    unsettled: bool = False


class _Named(NamedTuple):
    """A name that is a request's. ``answer`` is its answer's name, empty where a listing lacks that."""

    name: str
    id: CheckpointId
    answer: str


class SignalDir:
    """The signal directory. It is opened anew for each look and each answer, since it may be replaced."""

    def __init__(self, settings: SignalSettings, era: Era = ERA_A1) -> None:
        self.settings = settings
        self.path = settings.path
        self.era = era
        self._answers = {era.ready_suffix: era.done_suffix, era.restore_suffix: era.restored_suffix}
        self._suffixes = (*self._answers, *self._answers.values())
        self._said: dict[_Key, bool] = {}
        self._answered: OrderedDict[str, Identity] = OrderedDict()

    def create(self) -> None:
        """Make the directory if it is absent, 1777: each worker its own files, nobody another's.

        One that exists keeps its mode; see :meth:`check_directory`.
        """
        Dir.open(self.path, create=True, mode=DIRECTORY_MODE).close()

    def check_directory(self) -> list[Finding]:
        """Check that it is a directory in which workers cannot remove each other's requests."""

        def finding(verdict: Verdict, found: str, remedy: str = "", reason: str = "") -> list[Finding]:
            expected = "a directory that others cannot write to, or a sticky one"
            return [Finding("signals.directory", verdict, expected, found, remedy, reason)]

        try:
            mode = self.path.lstat().st_mode
        except OSError as error:
            remedy = f"mkdir -m 1777 {self.path}"
            return finding(Verdict.WARN, str(error.strerror), remedy, "NoSignalDirectory")
        if not st.S_ISDIR(mode):
            remedy = f"put a directory at {self.path}, not a link and not a file"
            return finding(Verdict.WARN, "no directory", remedy, "NotADirectory")
        found = f"mode {st.S_IMODE(mode):04o}"
        if mode & 0o022 and not mode & st.S_ISVTX:
            remedy = f"chmod +t {self.path}: any worker can remove another's request"
            return finding(Verdict.WARN, found, remedy, "NotSticky")
        return finding(Verdict.OK, found)

    # requests -----------------------------------------------------------------------------------------

    def scan(self, names: Iterable[str] | None = None) -> Scan:
        """Look at ``names``, or at all; blocking, so not for the event loop, and one look at a time.

        ``names`` are files known to be closed; in a look at all, those that are very young are left for
        later. Requests that are answered already are left out. A rejection is told once for each state of
        a file. In a directory that is absent nothing is found.

        :raises OSError: the directory itself cannot be read.
        """
        found = Scan()
        refused: dict[_Key, RefusedError | None] = {}
        try:
            with Dir.open(self.path) as directory:
                for named in self._named(directory, names, found):
                    self._look(directory, named, found, refused, closed=names is not None)
        except FileNotFoundError:
            pass
        except RefusedError as error:  # the path leads to no directory
            refused[str(self.path), (0, 0, 0)] = error
        self._tell(refused, found, everything=names is None)
        found.ready.sort(key=lambda request: request.identity[2])
        found.restore.sort(key=lambda request: request.identity[2])
        return found

    def _named(self, directory: Dir, names: Iterable[str] | None, found: Scan) -> list[_Named]:
        """Sort the names of requests from the rest."""
        seen = 0
        present: set[str] = set()
        for name in (entry.name for entry in directory.scan()) if names is None else names:
            seen += 1
            if name.endswith(self._suffixes):  # junk is dropped here, so that it costs no memory
                present.add(name)
        requests: list[_Named] = []
        for name in present:
            stem, dot, suffix = name.partition(".")
            if dot + suffix in self._answers and ID_PATTERN.fullmatch(stem):
                answer = stem + self._answers[dot + suffix]
                there = names is not None or answer in present
                requests.append(_Named(name, CheckpointId(stem), answer if there else ""))
        found.ignored = seen - len(requests)
        return requests

    def _look(
        self,
        directory: Dir,
        named: _Named,
        found: Scan,
        refused: dict[_Key, RefusedError | None],
        *,
        closed: bool,
    ) -> None:
        try:
            stat = os.stat(named.name, dir_fd=directory.fd, follow_symlinks=False)
        except OSError:
            return
        if named.answer and self._is_answered(directory, named.name, _identity(stat), named.answer):
            return
        if not closed and st.S_ISREG(stat.st_mode) and 0 <= time.time() - stat.st_ctime < SETTLE_SECONDS:
            found.unsettled = True
            return
        key = named.name, _identity(stat)
        if self._said.get(key):
            refused[key] = None
            return
        try:
            self._take(directory, named, found)
        except FileNotFoundError:
            pass
        except RefusedError as error:
            refused[key] = error
        except OSError as error:
            refused[key] = RefusedError(
                f"{named.name}: cannot be read: {error.strerror}", reason="Unreadable"
            )

    def _take(self, directory: Dir, named: _Named, found: Scan) -> None:
        name = named.name
        content = directory.read(name, self.settings.max_file_bytes)
        stat = content.stat
        fields = _fields(name, content.data)
        who = (stat.st_uid, stat.st_gid, stat.st_ctime, _identity(stat))
        if name.endswith(self.era.ready_suffix):
            _only(name, fields, "pid")
            found.ready.append(ReadyRequest(named.id, _pid(name, fields), *who))
        else:
            _only(name, fields)
            found.restore.append(RestoreRequest(named.id, *who))

    def _tell(self, refused: Mapping[_Key, RefusedError | None], found: Scan, *, everything: bool) -> None:
        """Report what has not been reported; what a look at everything did not meet again is forgotten."""
        if everything:
            self._said = {key: lasting for key, lasting in self._said.items() if key in refused}
        # Two writes within one tick of the clock leave the same ctime, so a young state isn't final yet.
        final_before = time.time_ns() - int(SETTLE_SECONDS * 1e9)
        for key, error in refused.items():
            if error is None:
                continue
            if key not in self._said:
                if len(self._said) >= REMEMBERED:
                    found.unsaid += 1
                    continue
                found.rejected.append(Rejected(key[0], error.reason, error.message))
            self._said[key] = error.reason not in PASSING and key[1][2] < final_before

    def answered(self, request: ReadyRequest) -> bool:
        """Whether the signal file is there and younger than the request."""
        name, answer = request.id + self.era.ready_suffix, request.id + self.era.done_suffix
        try:
            with Dir.open(self.path) as directory:
                return self._is_answered(directory, name, request.identity, answer)
        except (OSError, RefusedError):
            return False

    def _is_answered(self, directory: Dir, name: str, identity: Identity, answer: str) -> bool:
        """Whether ``answer`` is ours and meant for this state of the request.

        Not anybody's: a worker could have another one's request passed over by a file of its own. And not
        one that is as old as the request, unless we know better: whoever waits for an answer can write
        the next request within the same tick of the clock.
        """
        try:
            stat = os.stat(answer, dir_fd=directory.fd, follow_symlinks=False)
        except OSError:
            return False
        if not st.S_ISREG(stat.st_mode) or stat.st_nlink != 1:
            return False
        if stat.st_uid not in (os.geteuid(), SQUASHED_UID):
            return False
        return stat.st_ctime_ns > identity[2] or self._answered.get(name) == identity

    # answers ------------------------------------------------------------------------------------------

    def answer_done(self, id_: CheckpointId, *, checkpoint_path: str, success: bool, error: str = "") -> None:
        """Write ``<id>.done``, whole at every instant.

        :raises OSError: the directory is gone or full. :raises RefusedError: a directory has the name.
        """
        data = done_payload(id_, checkpoint_path=checkpoint_path, success=success, error=error)
        self._answer(id_, self.era.ready_suffix, data)

    def answer_restored(self, id_: CheckpointId, body: Mapping[str, Any]) -> None:
        """Write ``<id>.restored``, whole at every instant; errors as :meth:`answer_done`.

        ``body`` holds ``success``, then ``pid`` or ``error`` and ``reason``, and how the worker has ended.
        """
        answer = {"checkpoint_id": str(id_), "timestamp": _now(), **body}
        if "error" in answer:
            answer["error"] = bounded(str(answer["error"]))
        self._answer(id_, self.era.restore_suffix, _encode(answer))

    def _answer(self, id_: CheckpointId, asked: str, data: bytes) -> None:
        with Dir.open(self.path) as directory:
            with contextlib.suppress(FileNotFoundError):
                stat = os.stat(id_ + asked, dir_fd=directory.fd, follow_symlinks=False)
                self._answered[id_ + asked] = _identity(stat)
                if len(self._answered) > REMEMBERED:
                    self._answered.popitem(last=False)
            directory.write_atomic(id_ + self._answers[asked], data, 0o644)

    def clear(self, id_: CheckpointId, suffix: str, identity: Identity | None = None) -> None:
        """Remove a request or an answer; a directory in its place is left alone.

        With ``identity`` only that very file: whoever asked may have asked again meanwhile.
        """
        with contextlib.suppress(FileNotFoundError, RefusedError), Dir.open(self.path) as directory:
            if identity is not None and _identity(directory.stat(id_ + suffix)) != identity:
                return
            directory.unlink(id_ + suffix, missing_ok=True)


def _identity(stat: os.stat_result) -> Identity:
    return stat.st_dev, stat.st_ino, stat.st_ctime_ns


def _bad(name: str, why: str) -> RefusedError:
    return RefusedError(
        f"{name}: {why}", remedy='leave it empty, or write {"pid": 1234}', reason="BadRequest"
    )


def _fields(name: str, data: bytes) -> dict[str, Any]:
    if not data.strip():
        return {}
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError):
        raise _bad(name, "neither empty nor JSON") from None
    if not isinstance(fields, dict):
        raise _bad(name, "JSON, but not an object")
    return fields


def _only(name: str, fields: Mapping[str, Any], *known: str) -> None:
    for key in sorted(fields.keys() - set(known)):
        raise _bad(name, f"unknown key {key[:40]!r}")


def _pid(name: str, fields: Mapping[str, Any]) -> int | None:
    if "pid" not in fields:
        return None
    pid = fields["pid"]
    # What it is instead is not shown: it may be nested so deeply that even that fails.
    if type(pid) is not int or not 1 < pid < PID_LIMIT:
        raise _bad(name, f"pid must be a whole number from 2 to {PID_LIMIT - 1}")
    return pid


def _encode(answer: Mapping[str, Any]) -> bytes:
    return (json.dumps(answer, indent=2) + "\n").encode()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def bounded(text: str) -> str:
    """Cut a text for people to a bounded length and replace its control characters."""
    clean = "".join(char if char.isprintable() else " " for char in text[:MAX_ERROR_CHARS])
    return clean if len(text) <= MAX_ERROR_CHARS else clean[: -len(TRUNCATED)] + TRUNCATED


def done_payload(id_: str, *, checkpoint_path: str, success: bool, error: str = "") -> bytes:
    """Build era A1's answer, for the signal file and for ``checkpoint.done`` in the artifact alike."""
    answer: dict[str, Any] = {
        "checkpoint_id": str(id_),
        "checkpoint_path": checkpoint_path,
        "timestamp": _now(),
        "success": success,
    }
    if not success:
        answer["error"] = bounded(error or "the checkpoint failed")
    return _encode(answer)
