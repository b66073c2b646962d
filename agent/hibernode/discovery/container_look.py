"""One look at all processes: which containers there are, from /proc alone. No runtime is asked.

A container that can be frozen has a pid namespace of its own, so its init is the process whose pid in the
innermost namespace is 1; the cgroup that the runtime put it in names it.

Trusted: pid namespaces and pids, which the kernel gives; the container's part of the cgroup path, which the
runtime sets (see :mod:`hibernode.discovery.container_ref` for what a process can add to it); bind mounts of
the kubelet's. Not trusted: the name of a process (comm) and its environment, which it can change at will. The
first can only hide a container from a search for its pod, the second only choose among the containers of
one pod. A container may make pid namespaces inside its own: these are listed as nested in it, and never
instead of it.

An agent sees those containers whose processes its own /proc shows: on a node it runs with hostPID.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from hibernode.discovery.container_ref import ContainerRef, container_ref
from hibernode.host import cgroups, linux, procfs
from hibernode.host.procfs import Process
from hibernode.text import printable
from hibernode.workload import ProcessKey

SANDBOX_COMM: Final = "pause"
"""What the process is called that holds a pod's namespaces, with every runtime of Kubernetes."""

_PID_NS: Final = re.compile(r"pid:\[(\d+)\]")


@dataclass(frozen=True, slots=True)
class Container:
    """A pid namespace with its init, and the container it belongs to.

    ``init`` is the process as the agent sees it; ``comm`` is its name, which it may choose. ``pid_ns`` is
    the inode of the pid namespace and ``depth`` counts the namespaces the init has a pid in, as NSpid does:
    2 is right below the agent's. ``nested`` lists pid namespaces inside it that belong to the same
    container, the outer ones first: a worker that was restored into a placeholder lives in one.
    """

    ref: ContainerRef
    init: ProcessKey
    comm: str
    pid_ns: int
    depth: int
    nested: tuple[Container, ...] = ()

    @property
    def pid(self) -> int:
        """The init's pid."""
        return self.init.pid

    @property
    def is_sandbox(self) -> bool:
        """Whether it only holds a pod's namespaces."""
        return self.ref.known and self.comm == SANDBOX_COMM

    def namespaces(self) -> tuple[int, ...]:
        """List the pid namespaces that belong to it, its own first."""
        return (self.pid_ns, *(each.pid_ns for each in self.nested))


@dataclass(frozen=True, slots=True)
class Look:
    """What one look found: the outer containers by pid, and who is in which pid namespace."""

    containers: tuple[Container, ...]
    members: dict[int, list[int]]
    """Pids by the inode of their pid namespace; those in the agent's own are not among them."""

    def members_of(self, container: Container) -> list[int]:
        """List the pids in a container's namespaces."""
        return [pid for inode in container.namespaces() for pid in self.members.get(inode, ())]


def pid_namespace(pid: int | str = "self") -> int:
    """Return the inode of a process's pid namespace.

    :raises ProcessLookupError: the process is gone.
    :raises PermissionError: it has more capabilities than we.
    """
    try:
        text = os.readlink(f"/proc/{pid}/ns/pid")  # noqa: PTH115 - a text, no path
    except FileNotFoundError:
        raise ProcessLookupError(errno.ESRCH, f"no process has pid {pid}") from None
    match = _PID_NS.fullmatch(text)
    assert match is not None, text
    return int(match.group(1))


def pids() -> Iterator[int]:
    """Yield the pids that /proc shows, in its order."""
    return (int(name) for name in os.listdir("/proc") if name.isdigit())  # noqa: PTH208 - names, not paths


def ref_of(pid: int) -> ContainerRef:
    """Tell the container of a process from its cgroups.

    :raises ProcessLookupError: the process is gone or ending.
    """
    return container_ref(membership.path for membership in cgroups.memberships(pid))


def owner_of(pid: int) -> str:
    """Name the container of a process, the outermost one, or the process itself; never fails.

    A process in a container can make others and namespaces at will, but is in that one container.
    """
    with contextlib.suppress(OSError, ValueError):
        if pid_namespace(pid) != pid_namespace():
            ref = ref_of(pid)
            name = (*ref.within, ref.id)[0]
            if name:
                return printable(f"container {name}")
    return f"pid {pid}"


def look() -> Look:
    """Look at all processes once. One that comes or goes meanwhile may be missing, and is never mixed up."""
    ours = pid_namespace()
    members: dict[int, list[int]] = {}
    for pid in pids():
        with contextlib.suppress(OSError):  # it is gone, or is none of ours to look into
            inode = pid_namespace(pid)
            if inode != ours:
                members.setdefault(inode, []).append(pid)
    inits = (_init(inode, sorted(inside)) for inode, inside in members.items())
    outer = _nest([init for init in inits if init is not None])
    return Look(tuple(sorted(outer, key=lambda container: container.pid)), members)


def _init(inode: int, inside: Iterable[int]) -> Container | None:
    """Find the init of a pid namespace, mostly the lowest of its pids; None when it has ended."""
    for pid in inside:
        with contextlib.suppress(OSError):
            if procfs.read_status(pid).ns_pids[-1:] == (1,):
                return _described(pid, inode)
    return None


def _described(pid: int, inode: int) -> Container | None:
    """Read all of an init while its pidfd is held; None when the pid is another process's by now."""
    with Process.open(pid) as process:
        stat, ns_pids = procfs.read_stat(pid), procfs.read_status(pid).ns_pids
        ref = ref_of(pid)
        if pid_namespace(pid) != inode or ns_pids[-1] != 1 or not process.alive():
            return None
        return Container(ref, process.key, stat.comm, inode, len(ns_pids))


def _nest(found: list[Container]) -> list[Container]:
    """Put each container that lies in a namespace of the same container's into that one's ``nested``."""
    by_namespace = {container.pid_ns: container for container in found}
    inner: dict[int, list[Container]] = {}
    for container in found:
        outer = container
        while (above := _above(outer, by_namespace)) is not None:
            outer = above
        if outer is not container:
            inner.setdefault(outer.pid_ns, []).append(container)
    nested = {each.pid_ns for group in inner.values() for each in group}
    return [
        replace(each, nested=tuple(sorted(inner.get(each.pid_ns, ()), key=lambda one: (one.depth, one.pid))))
        for each in found
        if each.pid_ns not in nested
    ]


def _above(container: Container, by_namespace: dict[int, Container]) -> Container | None:
    """Find what holds the parent of its pid namespace, if that is the same container."""
    if container.depth <= 2:  # noqa: PLR2004 - right below ours
        return None
    try:
        parent = by_namespace.get(_parent_namespace(container.pid))
    except OSError:
        return None
    return parent if parent is not None and parent.ref == container.ref else None


def _parent_namespace(pid: int) -> int:
    fd = os.open(f"/proc/{pid}/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    try:
        parent = linux.namespace_parent(fd)
        try:
            return os.fstat(parent).st_ino
        finally:
            os.close(parent)
    finally:
        os.close(fd)
