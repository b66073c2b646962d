"""Processes as /proc shows them.

Every read is bounded. A process that vanishes in the middle is a ProcessLookupError, whichever errno the
kernel chose; a descriptor or a thread that vanishes is left out. Texts that are not UTF-8 carry surrogates
(``surrogateescape``), as everywhere in :mod:`os`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
import time
from collections import abc, deque
from collections.abc import Iterator
from typing import Final, Self

from hibernode.host import linux
from hibernode.host.procparse import (
    PAGE_SIZE,
    Fd,
    Mapping,
    Stat,
    Status,
    parse_mapping,
    parse_stat,
    parse_status,
)
from hibernode.workload import ProcessKey

__all__ = (
    "CLOCK_SLACK_SECONDS",
    "CLOCK_TICKS",
    "PAGE_SIZE",
    "Fd",
    "Mapping",
    "Process",
    "Stat",
    "Status",
    "all_stats",
    "boot_id",
    "cmdline",
    "cwd",
    "environ",
    "exe",
    "fds",
    "maps",
    "mem_available_bytes",
    "namespaces",
    "parse_mapping",
    "parse_stat",
    "parse_status",
    "read_bounded",
    "read_stat",
    "read_status",
    "realtime_minus_boottime_ns",
    "start_time",
    "threads",
    "tree",
)

CLOCK_TICKS: Final = os.sysconf("SC_CLK_TCK")
"""Clock ticks per second: the unit of ``start_ticks``."""

CLOCK_SLACK_SECONDS: Final = 0.05
"""Start times, and the change times of files, have a resolution of one clock tick, 10 ms at most."""

MAX_STAT_BYTES: Final = 4096
MAX_STATUS_BYTES: Final = 1 << 20
"""The Groups line alone may name 65,536 groups of up to ten digits."""

MAX_TEXT_BYTES: Final = 1 << 20
MAX_FDINFO_BYTES: Final = 1024
"""pos, flags and mnt_id come first; an epoll or inotify descriptor adds a line for each thing it watches."""

_DEAD: Final = frozenset("ZX")
_NAMESPACE: Final = re.compile(r"\w+:\[(\d+)\]")


def _gone(pid: int) -> ProcessLookupError:
    return ProcessLookupError(errno.ESRCH, f"no process has pid {pid}")


@contextlib.contextmanager
def _vanishing(pid: int) -> Iterator[None]:
    """Say a vanished process in one way: open and readlink say ENOENT, read says ESRCH."""
    try:
        yield
    except (FileNotFoundError, ProcessLookupError):
        raise _gone(pid) from None


def read_bounded(path: str, limit: int) -> bytes:
    """Read a /proc file, at most ``limit`` bytes of it, which may end in the middle of a line."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        chunks: list[bytes] = []
        left = limit
        while left > 0 and (chunk := os.read(fd, min(left, 1 << 17))):
            chunks.append(chunk)
            left -= len(chunk)
        return b"".join(chunks)
    finally:
        os.close(fd)


def _list(pid: int, name: str) -> list[str]:
    with _vanishing(pid):
        return os.listdir(f"/proc/{pid}/{name}")  # noqa: PTH208 - names, not paths


def _read(pid: int, name: str, limit: int) -> bytes:
    with _vanishing(pid):
        return read_bounded(f"/proc/{pid}/{name}", limit)


def _exists(pid: int) -> bool:
    return os.path.lexists(f"/proc/{pid}")


def _read_memory(pid: int, name: str, limit: int) -> bytes:
    """Read what lies in the process's own memory; nothing for a zombie or a kernel thread.

    From some version of the kernel on, these answer ESRCH here although they are there.
    """
    try:
        return _read(pid, name, limit)
    except ProcessLookupError:
        if _exists(pid):
            return b""
        raise


# clocks and the machine ---------------------------------------------------------------------------------


def boot_id() -> str:
    """Return the random id of this boot of the kernel."""
    return read_bounded("/proc/sys/kernel/random/boot_id", 64).decode("ascii").strip()


def realtime_minus_boottime_ns() -> int:
    """Return what to add to the time since boot to get Unix time, in nanoseconds."""
    return time.clock_gettime_ns(time.CLOCK_REALTIME) - time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def start_time(start_ticks: int) -> float:
    """Turn ``start_ticks`` into Unix seconds, by the clocks as they stand now; resolution one tick."""
    return start_ticks / CLOCK_TICKS + realtime_minus_boottime_ns() / 1e9


def mem_available_bytes() -> int:
    """Return the memory that can be had without swapping: MemAvailable of /proc/meminfo."""
    for line in read_bounded("/proc/meminfo", 1 << 16).splitlines():
        if line.startswith(b"MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError(errno.ENODATA, "no MemAvailable in /proc/meminfo")


# stat and status ----------------------------------------------------------------------------------------


def read_stat(pid: int, tid: int | None = None) -> Stat:
    """Read the stat of a process, or of its thread ``tid``.

    :raises ProcessLookupError: there is none.
    """
    return parse_stat(_read(pid, "stat" if tid is None else f"task/{tid}/stat", MAX_STAT_BYTES))


def read_status(pid: int, tid: int | None = None) -> Status:
    """Read the status of a process, or of its thread ``tid``.

    :raises ProcessLookupError: there is none.
    """
    return parse_status(_read(pid, "status" if tid is None else f"task/{tid}/status", MAX_STATUS_BYTES))


# what it was started with -------------------------------------------------------------------------------


def environ(pid: int, limit: int = MAX_TEXT_BYTES) -> dict[str, str]:
    """Read the environment that a process was started with; what lies beyond ``limit`` bytes is dropped.

    Of a name that stands twice the first counts, as for getenv(3). Empty for kernel threads and zombies,
    and for an instant in the middle of an exec, which keeps pid and start time and changes all this.
    """
    data = _read_memory(pid, "environ", limit)
    entries = data.split(b"\0")
    if len(data) >= limit:
        entries.pop()  # cut in the middle
    found: dict[str, str] = {}
    for entry in entries:
        name, separator, value = entry.partition(b"=")
        if separator and name:
            found.setdefault(os.fsdecode(name), os.fsdecode(value))
    return found


def cmdline(pid: int) -> list[str]:
    """Read the arguments of a process; empty for kernel threads and zombies."""
    data = _read_memory(pid, "cmdline", MAX_TEXT_BYTES)
    return [os.fsdecode(word) for word in data.removesuffix(b"\0").split(b"\0")] if data else []


def _link(pid: int, name: str) -> str | None:
    """Read a link of /proc/PID; None when the process has none, as kernel threads and zombies do not."""
    try:
        return os.readlink(f"/proc/{pid}/{name}")  # noqa: PTH115 - a text, not always a path
    except (FileNotFoundError, ProcessLookupError):
        if _exists(pid):
            return None
        raise _gone(pid) from None


def exe(pid: int) -> str | None:
    """Return the path of the program in its own mount namespace, with " (deleted)" where it is gone."""
    return _link(pid, "exe")


def cwd(pid: int) -> str | None:
    """Return the working directory, as :func:`exe` does."""
    return _link(pid, "cwd")


def threads(pid: int) -> list[int]:
    """List the ids of its threads, in order."""
    return sorted(int(name) for name in _list(pid, "task"))


def namespaces(pid: int) -> dict[str, int]:
    """Map ``mnt``, ``net``, ``pid`` and the like to the inode of the namespace; empty for a zombie."""
    found: dict[str, int] = {}
    for name in _list(pid, "ns"):
        match = _NAMESPACE.fullmatch(_link(pid, f"ns/{name}") or "")
        if match is not None:
            found[name] = int(match.group(1))
    return found


# many processes -----------------------------------------------------------------------------------------


def all_stats() -> dict[int, Stat]:
    """Read the stat of every process, kernel threads included, in one pass of /proc."""
    found: dict[int, Stat] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - names, not paths
        if name.isdigit():
            with contextlib.suppress(ProcessLookupError):
                found[int(name)] = read_stat(int(name))
    return found


def tree(root_pid: int, stats: abc.Mapping[int, Stat] | None = None) -> list[Stat]:
    """List a process and all below it: the root first, parents before children, elder siblings first.

    :raises ProcessLookupError: the root is not there.
    """
    known = all_stats() if stats is None else stats
    if root_pid not in known:
        raise _gone(root_pid)
    children: dict[int, list[Stat]] = {}
    for stat in known.values():
        if stat.pid != root_pid:  # one pass is no snapshot: a reused pid could close a circle
            children.setdefault(stat.ppid, []).append(stat)
    found: list[Stat] = []
    queue = deque([known[root_pid]])
    while queue:
        stat = queue.popleft()
        found.append(stat)
        queue.extend(sorted(children.pop(stat.pid, ()), key=lambda child: (child.start_ticks, child.pid)))
    return found


def unburied(root_pid: int) -> set[ProcessKey]:
    """Find the dead of a tree that nobody can reap: a tracer has not waited for their threads.

    The kernel keeps the end of the first thread back until the others are gone, from their parent, from a
    pidfd, and from a tracer that waits for it.
    """
    with contextlib.suppress(ProcessLookupError):
        return {stat.key for stat in tree(root_pid) if stat.state in _DEAD and _threads_are_dead(stat.pid)}
    return set()


def _threads_are_dead(pid: int) -> bool:
    try:
        states = [read_stat(pid, tid).state for tid in threads(pid)]
    except ProcessLookupError:  # one was reaped just now
        return False
    return len(states) > 1 and all(state in _DEAD for state in states)


# descriptors and mappings -------------------------------------------------------------------------------


def fds(pid: int) -> list[Fd]:
    """List the descriptors of a process in order. None is opened, and no remote file system is asked."""
    numbers = sorted(int(name) for name in _list(pid, "fd"))
    found: list[Fd] = []
    for number in numbers:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found.append(_fd(pid, number))
    if not found and numbers and not _exists(pid):
        raise _gone(pid)
    return found


def _fd(pid: int, number: int) -> Fd:
    path = f"/proc/{pid}/fd/{number}"
    info = read_bounded(f"/proc/{pid}/fdinfo/{number}", MAX_FDINFO_BYTES)
    lines = dict(line.partition(b":\t")[::2] for line in info.split(b"\n"))
    stat = linux.stat_cached(path)
    return Fd(
        fd=number,
        target=os.readlink(path),  # noqa: PTH115 - a text, not always a path
        flags=int(lines.get(b"flags", b"0"), 8),
        mnt_id=int(lines.get(b"mnt_id", b"0")),
        mode=stat.mode,
        dev=stat.dev,
        ino=stat.ino,
        rdev=stat.rdev,
        nlink=stat.nlink,
        size=stat.size,
    )


def maps(pid: int) -> Iterator[Mapping]:
    """Yield the mappings of a process in order, as they are read; none for kernel threads and zombies."""
    try:
        with open(f"/proc/{pid}/maps", "rb") as lines:  # noqa: PTH123 - a /proc file
            for line in lines:
                yield parse_mapping(line.rstrip(b"\n"))
    except (FileNotFoundError, ProcessLookupError):
        if not _exists(pid):  # else it is a zombie or a kernel thread, see _read_memory
            raise _gone(pid) from None


# a process that is held ---------------------------------------------------------------------------------


class Process:
    """A process held by its pidfd: whatever becomes of the pid, this stays the same process."""

    __slots__ = ("_fd", "key")

    def __init__(self, key: ProcessKey, fd: int) -> None:
        self.key = key
        self._fd = fd

    @classmethod
    def open(cls, pid: int) -> Self:
        """Hold process ``pid``.

        :raises ProcessLookupError: there is none, it has ended, or ``pid`` is a thread that leads none.
        """
        try:
            fd = linux.pidfd_open(pid)
        except OSError as error:
            # A thread that leads no process: EINVAL up to Linux 6.8, ENOENT later.
            if error.errno in (errno.ESRCH, errno.EINVAL, errno.ENOENT):
                raise _gone(pid) from None
            raise
        try:
            process = cls(read_stat(pid).key, fd)
        except BaseException:
            os.close(fd)
            raise
        # If it lives now then it lived when its stat was read, so the pid was still its own.
        if not process.alive():
            process.close()
            raise _gone(pid)
        return process

    @property
    def pid(self) -> int:
        """The pid, valid as long as the process is not reaped."""
        return self.key.pid

    def alive(self) -> bool:
        """Whether it has not ended; a zombie has."""
        poll = select.poll()
        poll.register(self.fileno(), select.POLLIN)
        return not poll.poll(0)

    def send_signal(self, signal_number: int) -> None:
        """Send a signal.

        :raises ProcessLookupError: the process has been reaped.
        """
        linux.pidfd_send_signal(self.fileno(), signal_number)

    def fileno(self) -> int:
        """Return the pidfd: readable, for poll and asyncio, once the process has ended.

        :raises ValueError: it is closed.
        """
        if self._fd < 0:
            raise ValueError(f"the pidfd of process {self.pid} is closed")
        return self._fd

    def close(self) -> None:
        """Let the process go; a second call does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Process(pid={self.pid}, start_ticks={self.key.start_ticks})"
