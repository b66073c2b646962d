"""How CRIU gets into a container: a child of the shim, on its way to exec.

CRIU runs in the container's cgroups and pid, network, IPC and UTS namespaces, but in a mount namespace of
its own: a private copy of the node's, so that it has its libraries, the images and a /proc, whatever the
container's image holds. The container's root and each of its mounts are copied into it, one by one, under
names of ours. The container's own mount namespace is only looked at; what was made here ends with CRIU.

Like the shim, standard library and :mod:`hibernode.host.linux` only.
"""

from __future__ import annotations

import fcntl
import os
import stat
from typing import Any

from hibernode.host import linux

NAMESPACES = ("cgroup", "uts", "ipc", "net")
"""Entered last, in this order; the pid namespace is the shim's to choose, for it counts for children only."""

ROOT = "root"
MOUNTS = "mounts"
"""Names below the restore's directory, where the root and the other mounts are attached."""

SCRIPT = """#!/bin/sh
[ "$CRTOOLS_SCRIPT_ACTION" = post-restore ] || exit 0
echo "$CRTOOLS_INIT_PID" >/proc/{pid}/fd/{say} && read -r code </proc/{pid}/fd/{wait} && exit "$code"
exit 1
"""
"""CRIU runs it at several moments. At ``post-restore`` all is made and no task runs; if it fails they end."""

RESOLVE = linux.RESOLVE_BENEATH | linux.RESOLVE_NO_SYMLINKS | linux.RESOLVE_NO_MAGICLINKS


class EnterError(Exception):
    """The container is not as it was when it was looked at."""


def enter(target: dict[str, Any], directory: str) -> None:
    """Become a process of the container, as far as CRIU needs it. The caller is a child that will exec.

    ``target``: ``namespaces`` maps kinds to open descriptors of the container's namespaces, ``mnt`` among
    them; ``join`` lists the files ``cgroup.procs`` of its cgroups; ``root_id`` and ``mounts`` say what its
    mountinfo said: of each mount ``mount_point`` and ``id``.

    :raises OSError: the kernel does not let us.
    :raises EnterError: a mount is another one now.
    """
    for path in target["join"]:
        with open(path, "wb", buffering=0) as file:  # noqa: PTH123 - pathlib costs start-up time
            file.write(b"0")  # the writer itself
    namespaces = target["namespaces"]
    linux.unshare(linux.CLONE_NEWNS)
    linux.mount("none", "/", "none", linux.MS_REC | linux.MS_PRIVATE)
    own = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    linux.setns(namespaces["mnt"], linux.CLONE_NEWNS)
    trees = copied(target)
    linux.setns(own, linux.CLONE_NEWNS)
    os.chdir(directory)
    for name, tree in trees:
        linux.move_mount(tree, f"{directory}/{name}")
    for kind in NAMESPACES:
        if kind in namespaces:
            linux.setns(namespaces[kind])
    linux.mount("proc", "/proc", "proc")  # that of the pid namespace


def script(say: int, wait: int, least: int) -> str:
    """Make the script that CRIU runs, which says what it has made and waits for an answer; its path.

    CRIU closes all descriptors for it. So it is reached, and reaches the pipes, as descriptors of CRIU,
    which this process becomes; they are numbered from ``least`` on.
    """
    number = os.getpid()
    fds = [fcntl.fcntl(fd, fcntl.F_DUPFD, least) for fd in (say, wait)]
    writable = os.memfd_create("post-restore", os.MFD_CLOEXEC)
    os.write(writable, SCRIPT.format(pid=number, say=fds[0], wait=fds[1]).encode())
    os.fchmod(writable, 0o500)
    readable = os.open(f"/proc/self/fd/{writable}", os.O_RDONLY | os.O_CLOEXEC)
    return f"/proc/{number}/fd/{fcntl.fcntl(readable, fcntl.F_DUPFD, least)}"


def copied(target: dict[str, Any]) -> list[tuple[str, int]]:
    """Copy the root and the mounts; (name of ours, descriptor). The thread is in the container's namespace.

    The paths are the container's, and hostile: one that leads through a link, or to another mount than was
    seen, is refused.
    """
    root = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    check(root, target["root_id"], "/")
    trees = [(ROOT, linux.open_tree_clone(root))]
    for number, mount in enumerate(target["mounts"]):
        path = mount["mount_point"]
        fd = linux.openat2(root, path.lstrip("/"), os.O_PATH | os.O_CLOEXEC, resolve=RESOLVE)
        check(fd, mount["id"], path)
        if stat.S_ISDIR(os.fstat(fd).st_mode) != mount["directory"]:
            raise EnterError(f"the mount at {path} was a {'directory' if mount['directory'] else 'file'}")
        trees.append((f"{MOUNTS}/{number}", linux.open_tree_clone(fd)))
        os.close(fd)
    os.close(root)
    return trees


def check(fd: int, expected: int, path: str) -> None:
    """Refuse a mount that is not the one that was seen."""
    found = linux.mount_id(fd)
    if found != expected:
        raise EnterError(f"the mount at {path} has the id {found} now and had {expected}")
