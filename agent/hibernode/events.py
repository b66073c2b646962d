"""What the agent did, one event a transition: the newest in memory, and on disk for after a restart.

``<state_dir>/events.jsonl`` holds one JSON object a line; when it is full it becomes
``events.jsonl.1`` and a new one begins. Messages quote names that pods choose, so an event's texts are
cut and cleaned before they are kept anywhere.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import stat
import threading
from collections import deque
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Literal

from hibernode.errors import RefusedError
from hibernode.host.safefs import Dir
from hibernode.workload import ID_PATTERN

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

log = logging.getLogger("hibernode.events")

FILE: Final = "events.jsonl"
OLD_FILE: Final = "events.jsonl.1"
KEPT: Final = 1000
"""Events in memory."""

MAX_FILE_BYTES: Final = 2 << 20
"""An event is about 250 bytes, so each of the two files holds some thousands."""

MAX_MESSAGE: Final = 1024
"""Characters; what Kubernetes allows an Event's message."""

CUT_MARK: Final = " [truncated]"
REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
_REASON: Final = re.compile(r"[A-Z][A-Za-z0-9]{0,63}", re.ASCII)
_TIME: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,9})?(Z|[+-]\d\d:\d\d)", re.ASCII)

EventType = Literal["Normal", "Warning"]


@dataclass(frozen=True, slots=True)
class Event:
    """One event. ``time`` is RFC 3339 in UTC, ``object`` a checkpoint id or empty."""

    time: str
    type: EventType
    reason: str
    object: str
    message: str


def clean(text: str, limit: int = MAX_MESSAGE) -> str:
    """Make one line of at most ``limit`` characters; what cannot be printed is replaced."""
    if len(text) > limit:
        text = text[: limit - len(CUT_MARK)] + CUT_MARK
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else " " if char in "\n\t" else REPLACEMENT for char in text)


def now() -> str:
    """Tell the time as RFC 3339 in UTC, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _event(time: str, kind: str, reason: str, object_: str, message: str) -> Event:
    return Event(
        time,
        "Normal" if kind == "Normal" else "Warning",
        reason if _REASON.fullmatch(reason) else "Other",
        object_ if ID_PATTERN.fullmatch(object_) else "",
        clean(message),
    )


def _parse(line: bytes) -> Event | None:
    """Read one line of the file back; None for one that was cut short or is not ours."""
    try:
        data = json.loads(line)
        texts = [data[name] for name in ("time", "type", "reason", "object", "message")]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    if not all(isinstance(text, str) for text in texts) or not _TIME.fullmatch(texts[0]):
        return None
    return _event(*texts)


class EventLog:
    """The ring of events. Every method may be called from any thread."""

    def __init__(self, state_dir: Path, *, kept: int = KEPT, max_bytes: int = MAX_FILE_BYTES) -> None:
        self._lock = threading.Lock()
        self._file = _File(state_dir, max_bytes)
        self._failing = False
        try:
            before = _read(state_dir, kept)
        except (OSError, RefusedError) as error:
            log.warning("earlier events cannot be read: %s", error)
            before = []
        self._ring = deque(before, maxlen=kept)

    def add(self, kind: str, reason: str, object_: str, message: str) -> None:
        """Note an event.

        Never raises: the work goes on when it cannot be written down. ``reason`` is a CamelCase word
        (anything else becomes ``Other``), ``object_`` a checkpoint id or empty.
        """
        event = _event(now(), kind, str(reason), str(object_), str(message))
        # Surrogates cannot occur: what is not printable has been replaced.
        line = json.dumps(asdict(event), ensure_ascii=False).encode() + b"\n"
        with self._lock:
            self._ring.append(event)
            try:
                self._file.append(line)
            except (OSError, RefusedError, ValueError) as error:
                if not self._failing:
                    log.warning("events are kept in memory only: %s", error)
                self._failing = True
            else:
                self._failing = False

    def recent(self, limit: int = KEPT) -> list[dict[str, Any]]:
        """List the newest ``limit`` events as JSON objects, the newest last."""
        with self._lock:
            events = list(self._ring)
        return _objects(events, limit)

    def close(self) -> None:
        """Close the file; a later event opens it again."""
        with self._lock:
            self._file.close()


def read_events(state_dir: Path, limit: int = KEPT) -> list[dict[str, Any]]:
    """List the newest ``limit`` events on disk as JSON objects, the newest last; no agent is needed.

    :raises RefusedError: the files are not regular files of a plausible size.
    """
    return _objects(_read(state_dir, limit), limit)


def _objects(events: Iterable[Event], limit: int) -> list[dict[str, Any]]:
    kept = deque(events, maxlen=max(limit, 0))
    return [asdict(event) for event in kept]


def _read(state_dir: Path, limit: int) -> list[Event]:
    lines: list[bytes] = []
    with suppress(FileNotFoundError), Dir.open(state_dir) as directory:
        for name in (OLD_FILE, FILE):
            with suppress(FileNotFoundError):
                # A full file is over the bound by less than one line.
                lines += directory.read(name, 2 * MAX_FILE_BYTES).data.splitlines()
    parsed = (event for line in reversed(lines) if (event := _parse(line)) is not None)
    return list(itertools.islice(parsed, max(limit, 0)))[::-1]


class _File:
    """The file that is appended to, its size bounded by one rotation."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._fd = -1
        self._whole = True

    def append(self, line: bytes) -> None:
        status = os.fstat(self._fd) if self._fd >= 0 else None
        if status is None or status.st_nlink == 0:
            self.close()
            status = self._open()
        if status.st_size >= self._max_bytes:
            self.close()
            with Dir.open(self._directory) as directory:
                directory.rename(FILE, OLD_FILE, replace=True)
            self._open()
        # A line that was cut short (disk full, kill) must not take the next one with it.
        data = line if self._whole else b"\n" + line
        self._whole = False
        self._whole = os.write(self._fd, data) == len(data)

    def _open(self) -> os.stat_result:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with Dir.open(self._directory, create=True) as directory:
            fd = os.open(FILE, flags, 0o600, dir_fd=directory.fd)
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(fd)
            raise RefusedError(f"{self._directory / FILE} is not a regular file", remedy="remove it")
        self._fd = fd
        self._whole = status.st_size == 0 or os.pread(fd, 1, status.st_size - 1) == b"\n"
        return status

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
