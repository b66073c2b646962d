"""What CRIU's log means: from its lines to a cause and a remedy.

Pure but for :func:`read_log`. A log is hostile: names that a worker chose stand in it.
"""

from __future__ import annotations

import os
import re
import signal
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hibernode.criu.causes import KNOWN
from hibernode.criu.known import Known, Operation
from hibernode.errors import RefusedError

HEAD_BYTES: Final = 64 << 10
TAIL_BYTES: Final = 2 << 20
"""An error ends the work, so it stands near the end; what follows it is the putting back."""

MAX_LINE: Final = 2000
"""Characters of a line that are looked at; CRIU's own buffer holds a few kilobytes."""

MAX_RAW: Final = 50
MAX_GROUP: Final = 300

_NOTEWORTHY: Final = re.compile(
    r"(?:Error|Warn) +\(|unrecognized option|invalid option|requires an argument|CRIU needs to have"
    r"|error while loading shared libraries"
)
"""All other lines tell what went well."""

_NOISE: Final = re.compile(
    r"rlimit: |RLIMIT_NOFILE|Unable to create tun|Unable to remove \S*/?cr-tmpfs|execvp\(\"?ip6?tables"
    r"|criu/util\.c:\d+\): exited, status="
)
"""Harmless: no more descriptors allowed, no /dev/net/tun, a busy mount point, no iptables in the image. A
helper's exit code (ip, iptables) is no cause by itself: where it matters the next line says what for."""

_SUCCESS: Final = re.compile(r"^\(\d+\.\d+\) (?:Restore|Dumping) finished successfully", re.MULTILINE)

_END: Final = re.compile(r"\): (?:Dumping|Pre-dumping|Restoring) FAILED\.")
_TIME: Final = re.compile(r"^\(\d+\.\d+\)? *")


@dataclass(frozen=True, slots=True)
class Cause:
    """One cause: a stable word, a sentence, what to do, and the line of the log that says so."""

    reason: str
    message: str
    remedy: str
    line: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The causes, the root cause first, and the log's error lines without the harmless ones.

    ``success``: CRIU has done its work, so that what went wrong is not in this log.
    """

    causes: tuple[Cause, ...]
    raw: tuple[str, ...]
    success: bool = False


def diagnose(log_text: str, returncode: int, operation: Operation) -> Diagnosis:
    """Find the causes in a log.

    The first line that says something comes first: what follows it follows from it. Weak causes are kept
    only where there is no other. ``returncode`` is CRIU's, negative for a signal.
    """
    strong: dict[str, Cause] = {}
    weak: dict[str, Cause] = {}
    raw: list[str] = []
    for line in map(_plain, filter(_NOTEWORTHY.search, log_text.split("\n"))):
        if _NOISE.search(line):
            continue
        if _END.search(line):
            break
        if "Warn" not in line and len(raw) < MAX_RAW:
            raw.append(line)
        found = find_known(line, operation)
        if found is not None:
            known, match = found
            (weak if known.weak else strong).setdefault(known.reason, _cause(known, match, line))
    if returncode < 0:
        killed = _killed(-returncode)
        strong.setdefault(killed.reason, killed)
    success = _SUCCESS.search(log_text) is not None
    return Diagnosis(tuple((strong or weak).values()), tuple(raw), success)


def find_known(line: str, operation: Operation) -> tuple[Known, re.Match[str]] | None:
    """Find the row of the table that fits a line."""
    for known in KNOWN[operation]:
        if (match := known.pattern.search(line)) is not None:
            return known, match
    return None


def read_log(path: Path) -> str:
    """Read a log, of a long one the beginning and the end; what is left out is said in a line between.

    :raises RefusedError: it is no regular file.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise RefusedError(f"{path} is no regular file, so it is no log", reason="NotRegularFile")
        left_out = status.st_size - HEAD_BYTES - TAIL_BYTES
        if left_out <= 0:
            return _read(fd, HEAD_BYTES + TAIL_BYTES).decode(errors="replace")
        head = _read(fd, HEAD_BYTES).decode(errors="replace")
        os.lseek(fd, HEAD_BYTES + left_out, os.SEEK_SET)
        tail = _read(fd, TAIL_BYTES).decode(errors="replace")
        return f"{head}\n[{left_out} bytes left out]\n{tail}"
    finally:
        os.close(fd)


def _read(fd: int, limit: int) -> bytes:
    data = bytearray()
    while len(data) < limit and (chunk := os.read(fd, limit - len(data))):
        data += chunk
    return bytes(data)


def _plain(line: str) -> str:
    """Drop the time stamp and whatever is no printable text, cut what is too long."""
    text = "".join(char if char.isprintable() else "?" for char in line[:MAX_LINE].strip())
    return _TIME.sub("", text) + ("[truncated]" if len(line) > MAX_LINE else "")


def _cause(known: Known, match: re.Match[str], line: str) -> Cause:
    groups = {name: (value or "")[:MAX_GROUP] for name, value in match.groupdict().items()}
    return Cause(known.reason, known.message.format(**groups), known.remedy.format(**groups), line)


def _killed(number: int) -> Cause:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = "unknown"
    return Cause(
        "CriuKilled",
        f"criu was killed by signal {number} ({name})",
        "SIGKILL is mostly the machine's or the container's memory limit (dmesg tells)",
        "",
    )
