"""The placeholder: the static program that a restore pod runs until a worker is restored into it.

Its source, ``data/placeholder.c``, tells what it does and how it is built. How it is talked to stands in
:mod:`hibernode.shim_placeholder`, for the shim does that too.
"""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from typing import Final

from hibernode.errors import NotFoundError, RefusedError
from hibernode.host.safefs import Dir
from hibernode.shim_placeholder import ADOPT_SIGNAL, FAILED, end_with, exit_status, recognise, tell

__all__ = [
    "ADOPT_SIGNAL",
    "FAILED",
    "INSTALLED_NAME",
    "end_with",
    "exit_status",
    "find_placeholder",
    "install_placeholder",
    "recognise",
    "tell",
]

SYSTEM: Final = Path("/opt/hibernode/placeholder")
"""Where the container image has it."""

INSTALLED_NAME: Final = "hibernode-placeholder"
MODE: Final = 0o755
MAX_BYTES: Final = 16 << 20
"""Ours has less than 1 MiB."""


def find_placeholder(*, prefix: Path = Path(sys.prefix), system: Path = SYSTEM) -> Path:
    """Find the program: in ``prefix``/libexec/hibernode, where ``make setup`` builds it, or as ``system``.

    :raises NotFoundError: it is at neither place.
    :raises RefusedError: others than root and ourselves could have changed it.
    """
    for path, top in ((prefix / "libexec/hibernode/placeholder", prefix), (system, Path("/"))):
        if path.exists():
            _check_trusted(path.resolve(), top.resolve())
            return path
    raise NotFoundError(
        "the placeholder program is not on this machine", remedy="make setup", reason="PlaceholderMissing"
    )


def _check_trusted(path: Path, top: Path) -> None:
    """Check the file and each directory above it, up to ``top``: above that whoever writes owns us anyway."""
    if not path.is_file():
        raise _refused(path, "is no program")
    for part in (path, *path.parents):
        status = part.stat()
        if status.st_uid not in (0, os.geteuid()):
            raise _refused(part, f"belongs to uid {status.st_uid}, not to root")
        if status.st_mode & stat.S_IWOTH or (status.st_mode & stat.S_IWGRP and status.st_gid != 0):
            raise _refused(part, "can be written by others than root")
        if part == top:
            return


def install_placeholder(directory: Path) -> tuple[Path, str]:
    """Copy the program to ``directory``/hibernode-placeholder, for pods to mount.

    As a whole or not at all; returns the path and what was done: installed, updated or unchanged.

    :raises NotFoundError: see :func:`find_placeholder`.
    :raises RefusedError: ``directory``, or what stands under the name, is something odd.
    """
    source = find_placeholder().resolve()
    with Dir.open(source.parent) as place:
        wanted = place.read(source.name, MAX_BYTES).data
    with Dir.open(directory, create=True, mode=0o755) as into:
        try:
            present = into.read(INSTALLED_NAME, MAX_BYTES)
        except FileNotFoundError:
            state = "installed"
        else:
            same = present.data == wanted and stat.S_IMODE(present.stat.st_mode) == MODE
            state = "unchanged" if same else "updated"
        if state != "unchanged":
            # A pod that runs the old one keeps it: the new one is another file.
            into.write_atomic(INSTALLED_NAME, wanted, mode=MODE)
    return directory / INSTALLED_NAME, state


def _refused(path: Path, why: str) -> RefusedError:
    return RefusedError(
        f"placeholder: {path} {why}", remedy="make setup", reason="PlaceholderUntrusted", path=str(path)
    )
