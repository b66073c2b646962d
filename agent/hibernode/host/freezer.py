"""Cgroups that can be frozen, v1 and v2, and whether one may be used for a tree of processes."""

from __future__ import annotations

import errno
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hibernode.errors import RefusedError, StorageError
from hibernode.host import procfs
from hibernode.host.cgroups import cgroup_mounts, memberships, place_of, read_value
from hibernode.workload import Finding, Verdict

MAX_PROCS_BYTES: Final = 16 << 20
MAX_BELOW: Final = 4096
"""How many cgroups below one are looked at: a container may be allowed to make its own."""

_PASSED_OVER: Final = (errno.ENOENT, errno.ENODEV, errno.EOPNOTSUPP)
"""Of a cgroup below: gone by now, or threaded, and then its processes are listed further up."""

SHOWN: Final = 8


@dataclass(frozen=True, slots=True)
class Freezer:
    """A cgroup that can be frozen; ``directory`` is what ``criu dump --freeze-cgroup`` takes.

    CRIU takes it for v1 if it holds ``freezer.state``, else for v2 if it holds ``cgroup.freeze``. It freezes
    the directory, stops all that is in it or below it by ptrace, and thaws it. One that was frozen before
    stays frozen until the end of the dump, and then is frozen again.
    """

    directory: Path
    version: int

    def is_frozen(self) -> bool:
        """Whether it is frozen, or about to be, by itself or by a parent.

        :raises FileNotFoundError: the cgroup is gone.
        """
        if self.version == 1:
            return read_value(self.directory / "freezer.state") != "THAWED"
        events = read_value(self.directory / "cgroup.events").splitlines()
        return "frozen 1" in events or read_value(self.directory / "cgroup.freeze") == "1"

    def thaw(self) -> None:
        """Thaw it. It stays frozen while a parent is; on v2 its processes go on a moment later.

        :raises StorageError: it cannot be written.
        """
        name, word = ("freezer.state", "THAWED") if self.version == 1 else ("cgroup.freeze", "0")
        path = self.directory / name
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.write(fd, word.encode())
            finally:
                os.close(fd)
        except OSError as error:
            raise StorageError(
                f"cannot thaw {str(self.directory)!r}: {error.strerror}",
                remedy=f"write {word} into {path} by hand, else its processes stay stopped",
                reason="CannotThaw",
                path=str(path),
            ) from error

    def pids(self) -> set[int]:
        """List the processes in it and below it; 0 stands for those that our pid namespace does not show.

        :raises OSError: EFBIG: too many to look at; EOPNOTSUPP: it is a threaded cgroup.
        """
        found: set[int] = set()
        queue = [self.directory]
        for count, directory in enumerate(queue):  # it grows while we look
            if count >= MAX_BELOW:
                raise OSError(errno.EFBIG, f"more than {MAX_BELOW} cgroups", str(self.directory))
            try:
                data = procfs.read_bounded(str(directory / "cgroup.procs"), MAX_PROCS_BYTES)
                with os.scandir(directory) as entries:
                    queue.extend(Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False))
            except OSError as error:
                if directory == self.directory or error.errno not in _PASSED_OVER:
                    raise
            else:
                found.update(map(int, data.split()))
        return found


def freezer(pid: int) -> Freezer | None:
    """Find the freezer of a process; None where there is none, as for the root of a hierarchy.

    :raises ProcessLookupError: the process is gone or ending.
    :raises RefusedError: reason ``CgroupNotReachable``.
    """
    listed, seen = memberships(pid), cgroup_mounts()
    for version, name in ((1, "freezer.state"), (2, "cgroup.freeze")):
        for membership in listed:
            if ("freezer" in membership.controllers) if version == 1 else not membership.controllers:
                place = place_of(membership, seen)
                if place is not None and (place.directory / name).exists():
                    return Freezer(place.directory, version)
    return None


def usable_freezer(pid: int, tree: Collection[int]) -> tuple[Freezer | None, Finding]:
    """Find the freezer of process ``pid`` if it freezes exactly the processes ``tree``; else say why not.

    A freezer that holds others would stop them too, and one that does not hold all makes CRIU wait for
    those that it does not stop. One that a signal has stopped does not answer CRIU while it is frozen too.
    Zombies in ``tree`` do not count. Without a freezer CRIU stops a tree by ptrace alone, so that nothing is
    lost: the verdict is then SKIP.

    :raises ProcessLookupError: the process is gone or ending.
    """
    try:
        found = freezer(pid)
        held = set() if found is None else found.pids()
    except RefusedError as error:
        return None, _no_freezer("a freezer that can be reached", error.message, error.reason)
    except OSError as error:
        if isinstance(error, ProcessLookupError):
            raise
        return None, _no_freezer("a freezer that can be read", str(error), "FreezerUnreadable")
    if found is None:
        return None, _no_freezer("a cgroup with a freezer", "none, or the root cgroup", "NoFreezer")
    unfit = _unfit(found, held, tree)
    if unfit is not None:
        return None, _no_freezer(*unfit)
    return found, Finding(
        "tree.freezer", Verdict.OK, "a freezer of this tree alone", f"{found.directory} (v{found.version})"
    )


def _unfit(found: Freezer, held: Collection[int], tree: Collection[int]) -> tuple[str, str, str] | None:
    """Say why a freezer does not fit: what was expected, what was found, and the reason; None if it does."""
    states = {pid: _state(pid) for pid in tree}
    others = set(held) - states.keys()
    if others:
        return (
            "a freezer of this tree alone",
            f"{found.directory} holds others too: {_named(others)}",
            "SharedFreezer",
        )
    outside = {pid for pid, state in states.items() if pid not in held and state not in "ZX"}
    if outside:
        return (
            "a freezer that holds the whole tree",
            f"{found.directory} does not hold {_named(outside)}",
            "PartialFreezer",
        )
    stopped = {pid for pid, state in states.items() if state == "T"}
    if stopped:
        return "a tree of which nothing is stopped", f"{_named(stopped)} stopped by a signal", "StoppedTask"
    return None


def _no_freezer(expected: str, found: str, reason: str) -> Finding:
    remedy = "none needed: CRIU stops the processes one by one"
    return Finding("tree.freezer", Verdict.SKIP, expected, found, remedy, reason)


def _state(pid: int) -> str:
    try:
        return procfs.read_stat(pid).state
    except ProcessLookupError:
        return "X"


def _named(pids: Collection[int]) -> str:
    listed = sorted(pids)
    more = f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else ""
    return "pids " + ", ".join("?" if pid == 0 else str(pid) for pid in listed[:SHOWN]) + more
