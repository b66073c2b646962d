"""What a CRIU or a shim that was killed leaves among a container's files, besides the diffs."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Final

from hibernode.errors import HibernodeError
from hibernode.host import inroot
from hibernode.host.procfs import CLOCK_SLACK_SECONDS
from hibernode.host.safefs import Dir

log = logging.getLogger("hibernode.container")

PUT_ROOT: Final = re.compile(r"crtools-put-root\.[A-Za-z0-9]{6}", re.ASCII)
"""criu/mount.c, cr_pivot_root: where the old root goes for an instant; made by mkdtemp(3) in the new one."""

PUT_ROOT_MODE: Final = stat.S_IFDIR | 0o700
MARKER: Final = b"restored\n"
"""What the shim writes into a restore marker."""

DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY


def remove_put_roots(pid: int) -> None:
    """Remove the empty directories that a CRIU which was killed has left in the root of ``pid``."""
    with contextlib.suppress(OSError), inroot.opened(pid, "/", DIRECTORY) as root:
        for name in os.listdir(root):  # noqa: PTH208 - a descriptor
            if PUT_ROOT.fullmatch(name) is None:
                continue
            with contextlib.suppress(OSError):
                if os.stat(name, dir_fd=root, follow_symlinks=False).st_mode == PUT_ROOT_MODE:
                    os.rmdir(name, dir_fd=root)


@contextlib.contextmanager
def files_of(pid: int) -> Iterator[int]:
    """Hold the root directory of ``pid`` with all that is mounted there, though the process may end.

    With its last process a mount namespace goes, and with it the way to a volume.

    :raises OSError: it is gone.
    """
    namespace = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    try:
        root = inroot.open_root(pid)
        try:
            yield root
        finally:
            os.close(root)
    finally:
        os.close(namespace)


def remove_marker(root: int, marker: Any, began: float) -> None:
    """Remove the restore marker that a shim which was killed has left below the directory ``root``.

    ``marker`` is that of the shim's ``spec.json``. What was there before ``began``, in seconds since 1970, or
    is not as the shim writes it, is not ours; a shim that is killed may have written a part.
    """
    if not isinstance(marker, dict):
        return
    path = PurePosixPath(str(marker.get("path", "")))
    with contextlib.suppress(OSError, ValueError, HibernodeError), contextlib.ExitStack() as held:
        fd = inroot.open_below(root, str(path.parent), DIRECTORY)
        held.callback(os.close, fd)
        directory = Dir(fd, Path(path.parent))
        found = directory.read(path.name, len(MARKER))
        ours = MARKER.startswith(found.data) and found.stat.st_uid == marker.get("uid")
        if ours and found.stat.st_ctime >= began - CLOCK_SLACK_SECONDS:
            directory.unlink(path.name)
            log.debug("the restore marker %s is removed", path)
