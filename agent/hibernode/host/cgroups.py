"""The cgroups of a process: where they lie here, how a child joins them, and their limits.

Every version and mixture of cgroups is read alike: /proc/PID/cgroup names a path in each hierarchy, and our
own mountinfo says where a hierarchy can be reached, by its type and its options, never by a customary path.

A path in /proc/PID/cgroup is relative to the *reader's* cgroup namespace, and so is the root of a mount in
its mountinfo. From a namespace below the root both may begin with ``/..``, and what is above us has no names:
see :func:`enter_namespace`.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hibernode.errors import RefusedError
from hibernode.host import linux, procfs
from hibernode.host.mounts import Mount, mounts

UNIFIED: Final = ""
"""The name of the v2 hierarchy, as the middle field of /proc/PID/cgroup has it."""

MAX_CGROUP_BYTES: Final = 1 << 20
"""Some twenty lines; a path has at most 4,096 bytes before the kernel cuts it."""

MAX_VALUE_BYTES: Final = 16 << 10
SHOWN: Final = 8

PF_EXITING: Final = 0x00000004
"""linux/sched.h: the bit of ``Stat.flags`` of a process that is ending; v1 says ``/`` for its cgroups."""

NO_MEMORY_LIMIT: Final = ((1 << 63) - 1) // procfs.PAGE_SIZE * procfs.PAGE_SIZE
"""linux/page_counter.h: what memory.limit_in_bytes says when there is no limit."""

_DELETED: Final = " (deleted)"


@dataclass(frozen=True, slots=True)
class Membership:
    """One line of /proc/PID/cgroup.

    ``controllers`` are such as ``cpu`` and ``cpuacct``, or ``name=systemd``; none for the v2 hierarchy.
    ``deleted``: the cgroup has been removed. Only v2 says so, and a cgroup whose own name ends in the mark
    looks the same.
    """

    controllers: tuple[str, ...]
    path: str
    deleted: bool = False

    @property
    def hierarchy(self) -> str:
        """The controllers with commas between them; ``UNIFIED`` for v2."""
        return ",".join(self.controllers)


@dataclass(frozen=True, slots=True)
class Place:
    """A cgroup as it can be reached here: ``directory``, at or below ``top``, where its mount begins."""

    directory: Path
    top: Path

    def upwards(self) -> list[Path]:
        """List the directory and its parents up to ``top``."""
        depth = len(self.directory.parts) - len(self.top.parts)
        return [self.directory, *list(self.directory.parents)[:depth]]


@dataclass(frozen=True, slots=True)
class Memory:
    """What a cgroup may have in bytes, and what of that is free; None: no limit, or no such controller.

    Each is the least of its own and of those parents that can be seen. The cache of files counts as free: the
    kernel drops it for whoever needs memory, and a worker that has read its weights has filled its limit.
    """

    limit: int | None
    free: int | None


# who is where -------------------------------------------------------------------------------------------


def parse_cgroup(data: bytes) -> tuple[Membership, ...]:
    """Parse a whole /proc/PID/cgroup, in its order. A path may hold colons, but no line end.

    :raises ValueError: a line is none of that file's; it is shown.
    """
    return tuple(map(_parse_line, data.removesuffix(b"\n").split(b"\n"))) if data else ()


def _parse_line(line: bytes) -> Membership:
    number, _, rest = line.partition(b":")
    names, separator, raw = rest.partition(b":")
    if not (number.isdigit() and separator and raw.startswith(b"/")):
        raise ValueError(f"not a line of /proc/PID/cgroup: {os.fsdecode(line[:200])!r}")
    path, controllers = os.fsdecode(raw), os.fsdecode(names)
    deleted = not controllers and path.endswith(_DELETED)
    return Membership(
        controllers=tuple(controllers.split(",")) if controllers else (),
        path=path.removesuffix(_DELETED) if deleted else path,
        deleted=deleted,
    )


def memberships(pid: int) -> tuple[Membership, ...]:
    """List the cgroups of a process, one for each hierarchy.

    :raises ProcessLookupError: there is no such process, or it is ending: v1 then says ``/`` for all.
    """
    try:
        data = procfs.read_bounded(f"/proc/{pid}/cgroup", MAX_CGROUP_BYTES)
    except (FileNotFoundError, ProcessLookupError):
        raise ProcessLookupError(errno.ESRCH, f"no process has pid {pid}") from None
    if procfs.read_stat(pid).flags & PF_EXITING:
        raise ProcessLookupError(errno.ESRCH, f"process {pid} is ending")
    return parse_cgroup(data)


def enter_namespace(pid: int = 1) -> bool:
    """Move this thread, and what it starts from now on, into the cgroup namespace of a process.

    An agent in a container of its own sees paths of its host's mounts without the names above itself; from
    that of the host's pid 1 every path is whole. Call it at the start, before there are other threads.
    Returns whether anything changed.

    :raises OSError: there is no such process, or a capability (CAP_SYS_ADMIN, CAP_SYS_PTRACE) is missing.
    """
    fd = os.open(f"/proc/{pid}/ns/cgroup", os.O_RDONLY | os.O_CLOEXEC)
    try:
        theirs, ours = os.fstat(fd), Path("/proc/thread-self/ns/cgroup").stat()
        if os.path.samestat(theirs, ours):
            return False
        linux.setns(fd, linux.CLONE_NEWCGROUP)
    finally:
        os.close(fd)
    return True


def see_whole() -> None:
    """Move into the cgroup namespace of pid 1 if that can be had; else paths stay as they are seen.

    Without hostPID, pid 1 is of our own container and nothing changes.
    """
    with contextlib.suppress(OSError):
        enter_namespace()


# where that is ------------------------------------------------------------------------------------------


def cgroup_mounts() -> list[Mount]:
    """List our own mounts of cgroup file systems that nothing covers."""
    last = {mount.mount_point: mount for mount in mounts()}
    return [mount for mount in last.values() if mount.fs_type in ("cgroup", "cgroup2") and _on_top(mount)]


def _on_top(mount: Mount) -> bool:
    """Whether its mount point leads to it: a mount further up may hide it."""
    try:
        return linux.stat_cached(mount.mount_point).dev == os.makedev(*mount.dev)
    except OSError:
        return False


def _is_of(mount: Mount, membership: Membership) -> bool:
    if not membership.controllers:
        return mount.fs_type == "cgroup2"
    return mount.fs_type == "cgroup" and set(membership.controllers) <= set(mount.super_options.split(","))


def _split(path: str) -> tuple[int, list[str]]:
    """Split a path into the number of its leading ``..`` and the names behind them."""
    parts = [part for part in path.split("/") if part]
    ups = next((index for index, part in enumerate(parts) if part != ".."), len(parts))
    return ups, parts[ups:]


def _below(path: str, root: str) -> list[str] | None:
    """Return the names that lead from ``root`` to ``path``; None when they are not below it or unknown."""
    (ups, names), (root_ups, root_names) = _split(path), _split(root)
    if ups != root_ups or names[: len(root_names)] != root_names:
        return None
    return names[len(root_names) :]


def place_of(membership: Membership, cgroup_mounts: Iterable[Mount]) -> Place | None:
    """Find a cgroup below the mounts of its hierarchy; None when that is mounted nowhere here.

    Of several mounts the one that shows the most parents is taken.

    :raises RefusedError: it is mounted, but this cgroup lies outside of what can be seen of it.
    """
    candidates = [mount for mount in cgroup_mounts if _is_of(mount, membership)]
    if not candidates:
        return None
    found: list[tuple[int, Place]] = []
    for mount in candidates:
        names = _below(membership.path, mount.root)
        if names is not None:
            top = Path(mount.mount_point)
            found.append((len(names), Place(top.joinpath(*names), top)))
    if found:
        return max(found, key=lambda pair: pair[0])[1]
    shown = ", ".join(f"{mount.mount_point} shows {mount.root}" for mount in candidates[:SHOWN])
    raise RefusedError(
        f"cgroup {membership.path} of hierarchy {membership.hierarchy or 'v2'} cannot be reached: {shown}",
        remedy="mount the host's whole /sys/fs/cgroup into the agent, and let the agent run with hostPID",
        reason="CgroupNotReachable",
        path=membership.path,
        hierarchy=membership.hierarchy,
    )


def directories(pid: int) -> dict[str, Path]:
    """Map each hierarchy, by its name, to the directory of the process's cgroup.

    Hierarchies that are mounted nowhere here are left out.

    :raises ProcessLookupError: the process is gone or ending.
    :raises RefusedError: reason ``CgroupNotReachable``, see :func:`place_of`.
    """
    seen = cgroup_mounts()
    found: dict[str, Path] = {}
    for membership in memberships(pid):
        place = place_of(membership, seen)
        if place is not None:
            found[membership.hierarchy] = place.directory
    return found


def _place(pid: int, controller: str) -> tuple[int, Place] | None:
    """Find the cgroup that has ``controller`` for a process, and the version of its hierarchy."""
    listed = memberships(pid)
    by_v1 = [each for each in listed if controller in each.controllers]
    for membership in by_v1 or [each for each in listed if not each.controllers]:
        place = place_of(membership, cgroup_mounts())
        if place is not None:
            return (1 if by_v1 else 2), place
    return None


def join_paths(pid: int) -> list[str]:
    """List the files to write ``0`` to, in order, for a child that shall live where process ``pid`` does.

    A process that joins a frozen cgroup stops there. Where a hierarchy is mounted nowhere here but the
    process is in our own cgroup, there is nothing to write.

    :raises ProcessLookupError: the process is gone or ending.
    :raises RefusedError: reason ``CgroupNotReachable``, or ``CgroupThreaded``: a v2 cgroup for threads. The
        kernel lets no process into one that is ``domain invalid``, and a ``threaded`` one divides a process.
    """
    seen, ours = cgroup_mounts(), memberships(os.getpid())
    found: list[str] = []
    for membership in memberships(pid):
        place = place_of(membership, seen)
        if place is not None:
            if not membership.controllers:
                _check_domain(place.directory)
            found.append(str(place.directory / "cgroup.procs"))
        elif membership not in ours:
            raise RefusedError(
                f"hierarchy {membership.hierarchy or 'v2'} of cgroups is not mounted here, and process {pid} "
                f"is in its {membership.path}",
                remedy="mount the host's whole /sys/fs/cgroup into the agent",
                reason="CgroupNotReachable",
                pid=pid,
                path=membership.path,
            )
    return found


def _check_domain(directory: Path) -> None:
    kind = _read(directory / "cgroup.type")  # the root has none
    if kind in ("threaded", "domain invalid"):
        raise RefusedError(
            f"{str(directory)!r} is a cgroup of type {kind!r}: for threads, not for whole processes",
            remedy="let the process live in a cgroup of type 'domain'",
            reason="CgroupThreaded",
            path=str(directory),
        )


# limits -------------------------------------------------------------------------------------------------


def memory(pid: int) -> Memory:
    """Read how much memory the cgroup of a process may have, and how much it may still take.

    :raises ProcessLookupError: the process is gone or ending.
    :raises RefusedError: reason ``CgroupNotReachable``.
    """
    where = _place(pid, "memory")
    if where is None:
        return Memory(None, None)
    version, place = where
    prefix = "total_" if version == 1 else ""
    limit_name, used_name = (
        ("memory.limit_in_bytes", "memory.usage_in_bytes")
        if version == 1
        else ("memory.max", "memory.current")
    )
    limits, free = [], []
    for directory in place.upwards():
        limit = _number(_read(directory / limit_name))
        if limit is not None and limit < NO_MEMORY_LIMIT:
            stat = dict(line.split(" ", 1) for line in _read(directory / "memory.stat").splitlines())
            cache = sum(_number(stat.get(f"{prefix}{kind}_file", "")) or 0 for kind in ("active", "inactive"))
            limits.append(limit)
            free.append(max(0, limit - (_number(_read(directory / used_name)) or 0) + cache))
    return Memory(min(limits, default=None), min(free, default=None))


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None  # "max", or no such file


def read_value(path: Path) -> str:
    """Read a short file of a cgroup, without its line end.

    :raises OSError: this cgroup has none of that name (ENOENT), or is gone (ENODEV).
    """
    return os.fsdecode(procfs.read_bounded(str(path), MAX_VALUE_BYTES)).strip()


def _read(path: Path) -> str:
    """Read a file of a cgroup; empty when this cgroup has none of that name, or is gone (ENODEV)."""
    try:
        return read_value(path)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENODEV):
            raise
        return ""
