"""Mounts as /proc/PID/mountinfo lists them."""

from __future__ import annotations

import errno
import os
import re
from dataclasses import dataclass
from typing import Final

from hibernode.host.procfs import read_bounded

MAX_MOUNTINFO_BYTES: Final = 64 << 20
"""A namespace may hold 100,000 mounts (fs.mount-max), each a line of some hundred bytes."""

_OCTAL: Final = re.compile(rb"\\([0-3][0-7]{2})")


@dataclass(frozen=True, slots=True)
class Mount:
    """One mount of a namespace.

    ``root`` is the directory of the file system that appears at ``mount_point``, for a bind mount often
    a file (``//deleted`` behind it when it is gone). ``dev`` is (major, minor). ``options`` are the
    mount's own, ``super_options`` the file system's: commas between them, and in ``super_options`` the
    kernel's octal escapes are kept, since a comma inside a value is told from a separator by them alone.
    ``propagation`` holds the optional fields such as ``shared:3`` and ``master:1``.
    """

    id: int
    parent_id: int
    dev: tuple[int, int]
    root: str
    mount_point: str
    options: str
    fs_type: str
    source: str
    super_options: str
    propagation: tuple[str, ...]

    def super_option(self, name: str) -> str | None:
        """Return the value of a file system's option, such as ``upperdir``; empty for one without a value."""
        for option in self.super_options.split(","):
            key, _, value = option.partition("=")
            if key == name:
                return _decode(os.fsencode(value))
        return None


def _decode(field: bytes) -> str:
    """Undo the octal escapes: blank, tab, line end and backslash always come as such."""
    return os.fsdecode(_OCTAL.sub(lambda match: bytes([int(match.group(1), 8)]), field))


def _parse_line(line: bytes) -> Mount:
    # Strictly single blanks: a source may be the empty string.
    fields = line.split(b" ")
    try:
        separator = fields.index(b"-", 6)
        major, _, minor = fields[2].partition(b":")
        return Mount(
            id=int(fields[0]),
            parent_id=int(fields[1]),
            dev=(int(major), int(minor)),
            root=_decode(fields[3]),
            mount_point=_decode(fields[4]),
            options=os.fsdecode(fields[5]),
            fs_type=_decode(fields[separator + 1]),
            source=_decode(fields[separator + 2]),
            super_options=os.fsdecode(b" ".join(fields[separator + 3 :])),
            propagation=tuple(os.fsdecode(field) for field in fields[6:separator]),
        )
    except (ValueError, IndexError):
        raise ValueError(f"not a line of mountinfo: {os.fsdecode(line[:200])!r}") from None


def parse_mountinfo(text: str | bytes) -> list[Mount]:
    """Parse a whole mountinfo file, in its order: a later mount may cover an earlier one.

    :raises ValueError: a line is none of mountinfo's; it is shown.
    """
    return [_parse_line(line) for line in os.fsencode(text).split(b"\n") if line]


def mounts(pid: int | str = "self") -> list[Mount]:
    """List the mounts that a process sees.

    :raises ProcessLookupError: there is no such process, or it has ended.
    """
    try:
        data = read_bounded(f"/proc/{pid}/mountinfo", MAX_MOUNTINFO_BYTES)
    except OSError as error:
        # A zombie has no mount namespace: EINVAL.
        if error.errno not in (errno.ENOENT, errno.ESRCH, errno.EINVAL):
            raise
        raise ProcessLookupError(errno.ESRCH, f"process {pid} is gone") from None
    if len(data) >= MAX_MOUNTINFO_BYTES:
        raise OSError(errno.EFBIG, f"process {pid} has more mounts than can be read")
    return parse_mountinfo(data)
