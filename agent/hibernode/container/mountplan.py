"""Which mounts of a container CRIU is told of, and how. Pure but for :func:`look`.

Of a container's mounts only its root and its own /proc are CRIU's to make again. All others were made by the
runtime, from this node's directories: they are *external*, the image refers to them by a key, and the
container that takes the worker brings its own. Mounts of a GPU driver's directories are left out altogether,
since the next node may have another driver.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from hibernode.errors import RefusedError
from hibernode.host import linux, mounts
from hibernode.host.inroot import open_root
from hibernode.host.mounts import Mount
from hibernode.text import printable

SKIPPED: Final = ("/run/nvidia/driver", "/proc/driver/nvidia")
"""Mounted by NVIDIA's container toolkit; Dynamo's agent skips the same."""

RESOLVE: Final = linux.RESOLVE_IN_ROOT | linux.RESOLVE_NO_SYMLINKS | linux.RESOLVE_NO_MAGICLINKS


@dataclass(frozen=True, slots=True)
class Place:
    """A mount that the image refers to. ``id`` is the kernel's number of it as long as it is mounted."""

    key: str
    id: int
    mount_point: str
    fs_type: str
    directory: bool


@dataclass(frozen=True, slots=True)
class MountPlan:
    """``root`` is the mount at /; ``external`` in the order of mountinfo, parents before what is on them."""

    root: Mount
    external: tuple[Place, ...]
    skipped: tuple[str, ...]


def look(pid: int) -> MountPlan:
    """Look at the mounts of a container's init.

    :raises RefusedError: reason ``MountUnusable``, one of them cannot be named to CRIU.
    :raises ProcessLookupError: the process has ended.
    """
    root = open_root(pid)
    try:
        seen = mounts.mounts(pid)
        return plan(seen, {mount.id: _is_directory(root, mount) for mount in external(seen)})
    finally:
        os.close(root)


def _is_directory(root: int, mount: Mount) -> bool:
    try:
        fd = linux.openat2(root, mount.mount_point, os.O_PATH | os.O_CLOEXEC, resolve=RESOLVE)
    except OSError as error:
        raise _unusable(mount.mount_point, f"cannot be looked at: {error.strerror}") from None
    try:
        if linux.mount_id(fd) != mount.id:
            raise _unusable(mount.mount_point, "is covered by another one, or was just changed")
        return stat.S_ISDIR(os.fstat(fd).st_mode)
    finally:
        os.close(fd)


def open_directory(root: int, path: str) -> int:
    """Open a directory below a container's root, links not followed."""
    return linux.openat2(root, path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, resolve=RESOLVE)


def open_mount(root: int, path: str, number: int | None) -> int:
    """Open the directory at which a mount was seen, if it is that mount still.

    ``number``: its id; None when that is not known, and any will do.

    :raises RefusedError: reason ``MountUnusable``, another one is there now.
    :raises OSError: nothing that could be opened is there.
    """
    fd = os.dup(root) if path == "/" else open_directory(root, path)
    if number is None or linux.mount_id(fd) == number:
        return fd
    os.close(fd)
    raise _unusable(path, "is covered by another one, or was just changed")


def root_of(seen: Iterable[Mount]) -> Mount:
    """Find the mount at /: the last one, which covers those before.

    :raises RefusedError: there is none.
    """
    found = [mount for mount in seen if mount.mount_point == "/"]
    if not found:
        raise _unusable("/", "is not there")
    return found[-1]


def external(seen: Sequence[Mount]) -> list[Mount]:
    """List the mounts that are neither the root, nor of the container's own /proc, nor skipped."""
    root = root_of(seen)
    procs = {mount.dev for mount in seen if mount.mount_point == "/proc" and mount.fs_type == "proc"}
    return [
        mount
        for mount in seen
        if mount.id != root.id
        and mount.mount_point != "/"
        and not (mount.fs_type == "proc" and mount.dev in procs)
        and not is_skipped(mount.mount_point)
    ]


def is_skipped(mount_point: str) -> bool:
    """Whether a mount belongs to a GPU driver."""
    return any(mount_point == prefix or mount_point.startswith(f"{prefix}/") for prefix in SKIPPED)


def plan(seen: Sequence[Mount], directories: Mapping[int, bool]) -> MountPlan:
    """Decide on each mount; ``directories`` says, by mount id, which external ones are directories.

    :raises RefusedError: reason ``MountUnusable``.
    """
    places: list[Place] = []
    taken: set[str] = set()
    for number, mount in enumerate(external(seen)):
        if "]" in mount.mount_point:
            raise _unusable(mount.mount_point, "has a ']' in its name, where CRIU's syntax ends")
        if mount.mount_point in taken:
            raise _unusable(mount.mount_point, "is there twice, one over the other")
        if not mount.mount_point.isprintable():
            raise _unusable(mount.mount_point, "has a name that no manifest can hold")
        taken.add(mount.mount_point)
        places.append(Place(f"m{number}", mount.id, mount.mount_point, mount.fs_type, directories[mount.id]))
    skipped = [mount.mount_point for mount in seen if is_skipped(mount.mount_point)]
    return MountPlan(root_of(seen), tuple(places), tuple(dict.fromkeys(skipped)))


def _unusable(mount_point: str, why: str) -> RefusedError:
    return RefusedError(
        f"the mount at {printable(mount_point, keep='')} {why}",
        remedy="mount it elsewhere in the container, or not at all",
        reason="MountUnusable",
    )
