"""File locks (flock) that say who holds them. They end with their process, however it ends.

flock belongs to an open file, not to a process: a second open of the same file conflicts also within one
process. The descriptors are close-on-exec, so no program that we start keeps a lock alive. On NFSv4 flock
works across machines; an exclusive one needs a descriptor open for writing there.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hibernode.errors import BusyError
from hibernode.host.safefs import Dir

GRACE_SECONDS: Final = 0.05
"""A lock that is only looked at, or held for one rename, is free again within this time."""

_PAUSE_SECONDS: Final = 0.005
_HOLDER: Final = re.compile(r"(\d{1,10}) (\S{1,256})\n", re.ASCII)


@dataclass(slots=True)
class Lock:
    """A lock that is held until :meth:`close`."""

    fd: int

    def close(self) -> None:
        """Let go; a second call does nothing."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def take(directory: Dir, name: str, what: str, *, shared: bool = False, wait: bool = False) -> Lock:
    """Lock the file ``name``; ``what`` says in errors what it stands for.

    ``shared``: with others that share. ``wait``: as long as it takes.

    :raises BusyError: somebody else holds it; ``pid`` is in the fields if it is known.
    """
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_CREAT
    lock = Lock(os.open(name, flags, 0o600, dir_fd=directory.fd))
    try:
        os.fchmod(lock.fd, 0o600)  # open's mode is cut by the umask
        operation = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        if wait:
            fcntl.flock(lock.fd, operation)
        got = wait or _within_grace(lock.fd, operation | fcntl.LOCK_NB)
        holder = None if got else _holder(lock.fd)
        with suppress(OSError):  # a full disk must not keep gc from its locks
            if got:
                os.ftruncate(lock.fd, 0)
                os.pwrite(lock.fd, f"{os.getpid()} {os.uname().nodename}\n".encode(), 0)
    except BaseException:
        lock.close()
        raise
    if not got:
        lock.close()
        raise _busy(what, holder)
    return lock


def is_free(directory: Dir, name: str) -> bool:
    """Whether nobody holds ``name``, or no such file exists."""
    try:
        fd = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory.fd)
    except FileNotFoundError:
        return True
    try:
        # Shared: two that only look do not take each other for a holder.
        return _within_grace(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    finally:
        os.close(fd)


def _within_grace(fd: int, operation: int) -> bool:
    deadline = time.monotonic() + GRACE_SECONDS
    while True:
        try:
            fcntl.flock(fd, operation)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_PAUSE_SECONDS)
        else:
            return True


def _holder(fd: int) -> tuple[int, str] | None:
    """Read who holds it; None when that is not known, such as in the moment before it is written."""
    match = _HOLDER.fullmatch(os.pread(fd, 512, 0).decode("ascii", "replace"))
    if match is None:
        return None
    pid, node = int(match[1]), match[2]
    # Of several that share, only the last to come has left its pid, and it may be gone already.
    return None if node == os.uname().nodename and not Path(f"/proc/{pid}").exists() else (pid, node)


def _busy(what: str, holder: tuple[int, str] | None) -> BusyError:
    if holder is None:
        return BusyError(f"{what} is in use", remedy="try again when whoever uses it has ended")
    pid, node = holder
    who = "this process" if pid == os.getpid() else f"pid {pid}"
    where = "" if node == os.uname().nodename else f" on node {node}"
    return BusyError(
        f"{what} is in use by {who}{where}", remedy="try again when it has ended", pid=pid, node=node
    )
