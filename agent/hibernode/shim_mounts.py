"""Gives a restored worker the mounts that its container has, when CRIU has made them and it does not run yet.

CRIU makes mounts with the flags that they had where the worker was dumped, and those parts of /proc read-only
that were so there. What counts is the container that the worker is in now. So what the container has not is
taken away, what it has besides is added, each mount gets its flags; and then the two are compared.

Like the shim, standard library and :mod:`hibernode.host.linux` only.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from dataclasses import dataclass

from hibernode.host import linux

MAX_BYTES = 16 << 20
"""Of a mountinfo; a line of it has some hundred bytes."""

FLAGS = {
    "ro": linux.MOUNT_ATTR_RDONLY,
    "nosuid": linux.MOUNT_ATTR_NOSUID,
    "nodev": linux.MOUNT_ATTR_NODEV,
    "noexec": linux.MOUNT_ATTR_NOEXEC,
    "noatime": linux.MOUNT_ATTR_NOATIME,
    "nodiratime": linux.MOUNT_ATTR_NODIRATIME,
    "nosymfollow": linux.MOUNT_ATTR_NOSYMFOLLOW,
}
"""By their names in mountinfo, which does not show that access times are strict."""

RESOLVE = linux.RESOLVE_BENEATH | linux.RESOLVE_NO_SYMLINKS | linux.RESOLVE_NO_MAGICLINKS

OWN_PROC = "proc"
"""Instead of a device: the container's own /proc or a part of it, for the worker's is another one."""

Key = tuple[str, str, str]
"""What makes two mounts the same: the place, the device, the directory of it that is seen there."""


class MountsDifferError(Exception):
    """The worker cannot have the mounts of its container."""


@dataclass(frozen=True, slots=True)
class Mount:
    """One mount as mountinfo gives it. ``super_options`` are the file system's."""

    id: int
    key: Key
    options: str
    super_options: str

    @property
    def place(self) -> str:
        """The mount point."""
        return self.key[0]

    @property
    def own_proc(self) -> bool:
        """Whether it is of the container's own /proc."""
        return self.key[1] == OWN_PROC


Mounts = dict[Key, Mount]


def fit(container: int, worker: int) -> None:
    """Make the mounts of the worker's mount namespace those of the container's; both are descriptors.

    The thread is left in the worker's namespace, with root and working directory of its own: let it end.

    :raises OSError: the kernel does not let us.
    :raises MountsDifferError: the worker cannot have them, or has others in the end.
    """
    with contextlib.ExitStack() as held:
        proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        held.callback(os.close, proc)
        linux.unshare(linux.CLONE_FS)
        linux.setns(container, linux.CLONE_NEWNS)
        wanted = seen(proc)
        linux.setns(worker, linux.CLONE_NEWNS)
        found = seen(proc)
        missing = [mount for key, mount in wanted.items() if key not in found]
        surplus = [mount for key, mount in found.items() if key not in wanted]
        for mount in surplus:
            if not mount.own_proc:  # CRIU has those from the container
                raise MountsDifferError(f"the container has another mount at {mount.place} now, or none")
        linux.setns(container, linux.CLONE_NEWNS)
        trees = {mount.key: copied(mount, held) for mount in missing if not mount.own_proc}
        linux.setns(worker, linux.CLONE_NEWNS)
        if missing or surplus:
            keep_to_itself()
        for mount in reversed(surplus):
            take_away(mount, proc)
        for mount in missing:
            tree = part_of_proc(mount, found, held) if mount.own_proc else trees[mount.key]
            attach(tree, mount)
        found = seen(proc)
        for key, mount in wanted.items():
            if key in found and found[key].options != mount.options:
                set_flags(found[key], mount.options)
        compare(wanted, seen(proc))


# looking ------------------------------------------------------------------------------------------------


def seen(proc: int) -> Mounts:
    """List the mounts of the thread's namespace, a mount before those on it; ``proc`` is the node's /proc."""
    fd = os.open("thread-self/mountinfo", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
    with os.fdopen(fd, "rb") as file:
        text = file.read(MAX_BYTES + 1)
    if len(text) > MAX_BYTES:
        raise MountsDifferError("there are more mounts than can be read")
    return parsed(text)


def parsed(text: bytes) -> Mounts:
    """Read a mountinfo. Of several mounts at / the last one counts, which covers the others."""
    lines = [line.split(b" ") for line in text.split(b"\n") if line]
    rows = [(fields, fields[fields.index(b"-", 6) + 1 :]) for fields in lines]
    procs = {fields[2] for fields, (fs_type, *_) in rows if fields[4] == b"/proc" and fs_type == b"proc"}
    mounts: list[Mount] = []
    root: list[Mount] = []
    for fields, (fs_type, _source, super_options) in rows:
        device = OWN_PROC if fs_type == b"proc" and fields[2] in procs else fields[2].decode()
        key = (decoded(fields[4]), device, decoded(fields[3]))
        mount = Mount(int(fields[0]), key, os.fsdecode(fields[5]), os.fsdecode(super_options))
        (root if key[0] == "/" else mounts).append(mount)
    mounts.sort(key=lambda mount: mount.place.count("/"))  # stable: else in the order in which they were made
    return {mount.key: mount for mount in (*root[-1:], *mounts)}


def decoded(field: bytes) -> str:
    """Undo the octal escapes of blanks and the like."""
    return os.fsdecode(re.sub(rb"\\([0-3][0-7]{2})", lambda match: bytes([int(match[1], 8)]), field))


def opened(mount: Mount) -> int:
    """Open the root of a mount of the thread's namespace: not what a link leads to, nor what covers it."""
    root = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fd = linux.openat2(root, mount.place[1:] or ".", os.O_PATH | os.O_CLOEXEC, resolve=RESOLVE)
    except OSError as error:
        raise MountsDifferError(f"the mount at {mount.place} cannot be reached: {error.strerror}") from None
    finally:
        os.close(root)
    if linux.mount_id(fd) != mount.id:
        os.close(fd)
        raise MountsDifferError(f"the mount at {mount.place} is covered by another one, or was just changed")
    return fd


# changing -----------------------------------------------------------------------------------------------


def keep_to_itself() -> None:
    """See that nothing which is mounted for the worker is seen outside; what comes from there still comes."""
    root = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        linux.mount_setattr(root, propagation=linux.MS_SLAVE)
    finally:
        os.close(root)


def take_away(mount: Mount, proc: int) -> None:
    """Unmount a part of /proc that is no mount in the container."""
    fd = opened(mount)
    try:
        os.fchdir(proc)
        linux.detach(f"self/fd/{fd}")  # by the descriptor: a path may lead elsewhere by now
    finally:
        os.close(fd)


def copied(mount: Mount, held: contextlib.ExitStack) -> int:
    """Copy a mount of the thread's namespace, flags and all; what is mounted on the copy is on it alone."""
    fd = opened(mount)
    try:
        tree = linux.open_tree_clone(fd)
    finally:
        os.close(fd)
    held.callback(os.close, tree)
    linux.mount_setattr(tree, propagation=linux.MS_SLAVE)
    return tree


def part_of_proc(mount: Mount, found: Mounts, held: contextlib.ExitStack) -> int:
    """Copy that part of the worker's own /proc which the container has as a mount."""
    own = found.get(("/proc", OWN_PROC, "/"))
    if own is None:
        raise MountsDifferError(f"the worker has no /proc that {mount.place} could be a part of")
    top = opened(own)
    try:
        resolve = RESOLVE | linux.RESOLVE_NO_XDEV
        fd = linux.openat2(top, mount.key[2][1:] or ".", os.O_PATH | os.O_CLOEXEC, resolve=resolve)
    finally:
        os.close(top)
    try:
        tree = linux.open_tree_clone(fd)
    finally:
        os.close(fd)
    held.callback(os.close, tree)
    return tree


def attach(tree: int, mount: Mount) -> None:
    """Put a copy where the container has the mount."""
    root = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        place = linux.openat2(root, mount.place[1:], os.O_PATH | os.O_CLOEXEC, resolve=RESOLVE)
    except OSError as error:
        raise MountsDifferError(f"nothing can be mounted at {mount.place}: {error.strerror}") from None
    finally:
        os.close(root)
    try:
        linux.move_mount(tree, place)
    finally:
        os.close(place)


def set_flags(mount: Mount, options: str) -> None:
    """Give a mount the flags that another one has."""
    names = options.split(",")
    attributes = sum(FLAGS[name] for name in names if name in FLAGS)
    if not {"relatime", "noatime"}.intersection(names):
        attributes |= linux.MOUNT_ATTR_STRICTATIME
    fd = opened(mount)
    try:
        linux.mount_setattr(fd, attributes)
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        raise MountsDifferError(
            f"{mount.place} is read-only in the container, and the worker has a file open there for writing"
        ) from None
    finally:
        os.close(fd)


def compare(wanted: Mounts, found: Mounts) -> None:
    """See that the two are the same.

    :raises MountsDifferError: they are not; the first difference is named.
    """
    for key in {**wanted, **found}:
        here, there = (
            f"{side[key].options} {side[key].super_options if side[key].own_proc else ''}".rstrip()
            if key in side
            else "no mount"
            for side in (found, wanted)
        )
        if here != there:
            raise MountsDifferError(f"the worker has {here} at {key[0]}, and the container has {there}")
    for mount in found.values():
        os.close(opened(mount))
