"""From a container's id, name or pod to the one container that is meant, or to a clear refusal."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

from hibernode.discovery.container_look import Container, Look, look, pid_namespace, pids, ref_of
from hibernode.discovery.container_ref import ContainerRef
from hibernode.errors import NotFoundError, RefusedError, UsageError
from hibernode.host import procfs
from hibernode.host.mounts import mounts
from hibernode.host.procfs import Process
from hibernode.text import printable
from hibernode.workload import ERA_A1, Era

__all__ = (
    "Container",
    "ContainerRef",
    "Found",
    "container_of",
    "containers",
    "find",
    "hold",
    "mounted_name",
    "name_in_pod",
)

MAX_QUERY: Final = 253
SHOWN: Final = 12

SCHEMES: Final = {
    "containerd": "containerd",
    "cri-o": "cri-o",
    "crio": "cri-o",
    "docker": "docker",
    "podman": "podman",
}
"""What stands before ``://`` in the container ids of the Kubernetes API, by runtime."""

_QUERY: Final = re.compile(r"[!-.0-~]+")
"""Printable ASCII without the blank and the slash."""

_PREFIX: Final = re.compile(r"[0-9a-f]{8,63}")
_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
"""A container's name in a pod is a DNS label."""

_TERMINATION_LOG: Final = re.compile(r"(?:/.*)?/pods/(?P<uid>[^/]+)/containers/(?P<name>[^/]+)/[0-9a-f]{8}")
"""The kubelet binds this file of its own into each container, as /dev/termination-log by default."""


@dataclass(frozen=True, slots=True)
class Found:
    """The container that was meant, and the other ones of its pod, sandbox left out, that were ignored."""

    container: Container
    sidecars: tuple[Container, ...] = ()


@dataclass(frozen=True, slots=True)
class _Query:
    text: str
    runtime: str = ""

    def matches(self, refs: Iterable[ContainerRef]) -> set[ContainerRef]:
        """Choose by id or name, else by pod, else by prefix; the ones with the least around them.

        A container's process can make a cgroup inside its own whose name says that it is another one.
        """
        known = [ref for ref in refs if not (self.runtime and ref.runtime and ref.runtime != self.runtime)]
        chosen = (
            [ref for ref in known if ref.id == self.text]
            or [ref for ref in known if ref.pod_uid == self.text]
            or [ref for ref in known if self._is_prefix(ref)]
        )
        least = min((len(ref.within) for ref in chosen), default=0)
        return {ref for ref in chosen if len(ref.within) == least}

    def _is_prefix(self, ref: ContainerRef) -> bool:
        return ref.known and _PREFIX.fullmatch(self.text) is not None and ref.id.startswith(self.text)


def containers() -> list[Container]:
    """List the containers of the node by the pid of their init, sandboxes of pods included."""
    return list(look().containers)


def find(query: str, *, name: str = "", nested: bool = False, era: Era = ERA_A1) -> Found:
    """Find one container of this node.

    ``query`` is a container's full id, at least 8 hexadecimal digits that begin just one, the name that runc,
    crun or ctr was given, or a pod's uid; ``containerd://`` and the like may stand before it. Among several
    containers of a pod ``name`` chooses, by the file that the kubelet binds into each; without it the one
    whose processes name ``era.env_hash`` in their environment. A container inside another one than the
    agent's own is refused without ``nested``: its id may be made up by a process of the outer one.

    :raises UsageError: the query or the name cannot be any of these.
    :raises NotFoundError: reason ``ContainerNotFound``; what is there is named.
    :raises RefusedError: reason ``AmbiguousContainer``; ``SharedPidNamespace``, without an init of its own a
        container cannot be dumped; ``SandboxContainer``, it only holds a pod's namespaces;
        ``NestedContainer``, as said above.
    """
    asked = _gate(query, name)
    seen = look()
    wanted = asked.matches(container.ref for container in seen.containers)
    matching = [container for container in seen.containers if container.ref in wanted]
    candidates = [container for container in matching if not container.is_sandbox]
    if not candidates:
        _refuse_shared(asked, wanted)
        if matching and asked.text != matching[0].ref.pod_uid:
            raise RefusedError(
                f"{_shown(matching[0])} is the sandbox of pod {matching[0].ref.pod_uid or '?'}",
                remedy="name the worker's container, or the pod's uid",
                reason="SandboxContainer",
                pid=matching[0].pid,
            )
        raise _not_found(f"no container on this node is {asked.text!r}", seen.containers)
    chosen = _choose(candidates, asked, name, seen, era)
    if not nested:
        _refuse_nested(chosen)
    return Found(chosen, _sidecars(chosen, seen.containers))


def hold(container: Container) -> Process:
    """Hold the init of a container by its pidfd.

    :raises NotFoundError: reason ``ContainerNotFound``: it has ended since it was found.
    """
    with contextlib.suppress(ProcessLookupError):
        process = Process.open(container.pid)
        if process.key == container.init:
            return process
        process.close()
    raise NotFoundError(
        f"{_shown(container)} has ended",
        remedy="ask again; it may have restarted",
        reason="ContainerNotFound",
    )


def container_of(pid: int) -> Container | None:
    """Find the container that a process lives in: the one whose init is 1 in the same pid namespace.

    For a worker that was restored this is the nested one. None for a process of the node itself, or of the
    agent's own container.

    :raises ProcessLookupError: the process, or the init above it, is gone or ending.
    :raises RefusedError: reason ``SharedPidNamespace``: its cgroup is a container's that has no init.
    """
    with Process.open(pid) as process:
        inode, ref = pid_namespace(pid), ref_of(pid)
        if inode == pid_namespace():
            found, around = None, ref_of(os.getpid())
        else:
            every = (each for outer in look().containers for each in (outer, *outer.nested))
            found = next((each for each in every if each.pid_ns == inode), None)
            if found is None:
                raise ProcessLookupError(errno.ESRCH, f"the init above process {pid} is ending")
            around = found.ref
        if not process.alive():
            raise ProcessLookupError(errno.ESRCH, f"process {pid} is ending")
        if ref.known and ref.id != around.id:
            raise _shared(ref.id, [pid])
        return found


def name_in_pod(container: Container) -> str:
    """Return a container's name in its pod; empty when no mount of the kubelet's tells it."""
    return mounted_name(container.pid, container.ref.pod_uid)


def mounted_name(pid: int, pod_uid: str) -> str:
    """Return the name of a process's container in the pod that it is in, as :func:`name_in_pod` does."""
    with contextlib.suppress(OSError, ValueError):
        for mount in mounts(pid):
            match = _TERMINATION_LOG.fullmatch(mount.root)
            if match is not None and match["uid"] == pod_uid:
                return match["name"]
    return ""


# choosing -----------------------------------------------------------------------------------------------


def _gate(query: str, name: str) -> _Query:
    """Let a query through: nothing that is no name may reach a message, a comparison or a path."""
    scheme, separator, rest = query.partition("://")
    runtime, text = (SCHEMES.get(scheme, ""), rest) if separator else ("", query)
    if separator and not runtime:
        raise _usage(query, f"a scheme is one of {', '.join(SCHEMES)}")
    if len(query) > MAX_QUERY or _QUERY.fullmatch(text) is None or text.strip(".") == "" or ".." in text:
        raise _usage(query, f"at most {MAX_QUERY} printable ASCII characters, without blanks, / and ..")
    if name and _NAME.fullmatch(name) is None:
        raise _usage(name, "a container's name in a pod is lower-case letters, digits and dashes, at most 63")
    return _Query(text, runtime)


def _usage(text: str, rule: str) -> UsageError:
    shown = ascii(text if len(text) <= 80 else text[:80] + "...")  # noqa: PLR2004 - a line's worth
    return UsageError(f"{shown} names no container", remedy=rule, reason="InvalidContainer")


def _choose(candidates: list[Container], asked: _Query, name: str, seen: Look, era: Era) -> Container:
    names = {each.pid: name_in_pod(each) for each in candidates} if name else {}
    if any(names.values()):
        fitting = [each for each in candidates if names[each.pid] == name]
        if not fitting:
            raise _not_found(f"no container of {asked.text!r} is called {name!r}", candidates)
        candidates = fitting
    if len(candidates) > 1 and asked.text == candidates[0].ref.pod_uid:
        claiming = [each for each in candidates if _names(era.env_hash, seen.members_of(each))]
        candidates = claiming or candidates
    if len(candidates) > 1:
        raise RefusedError(
            f"{asked.text!r} means {len(candidates)} containers: {_listed(candidates)}",
            remedy=f"give the full id or the name in the pod, or set {era.env_hash} for the worker alone",
            reason="AmbiguousContainer",
            containers=", ".join(each.ref.id for each in candidates),
            pids=", ".join(str(each.pid) for each in candidates),
        )
    return candidates[0]


def _names(variable: str, members: Iterable[int]) -> bool:
    """Whether one of these processes was started with ``variable``."""
    for pid in members:
        with contextlib.suppress(OSError, ValueError):
            if procfs.environ(pid).get(variable):
                return True
    return False


def _sidecars(chosen: Container, every: Iterable[Container]) -> tuple[Container, ...]:
    if not chosen.ref.pod_uid:
        return ()
    return tuple(
        each
        for each in every
        if each.ref.pod_uid == chosen.ref.pod_uid and each.init != chosen.init and not each.is_sandbox
    )


# refusing -----------------------------------------------------------------------------------------------


def _refuse_nested(container: Container) -> None:
    ours = ref_of(os.getpid())
    around = (*ours.within, ours.id) if ours.known else ours.within
    within = container.ref.within
    if within != around[: len(within)]:
        raise RefusedError(
            f"{_shown(container)} lies inside container {within[-1]}, whose processes may have made this up",
            remedy=f"ask for {within[0]}, or let an agent inside it look after what is in there",
            reason="NestedContainer",
            pid=container.pid,
            within=", ".join(within),
        )


def _refuse_shared(asked: _Query, sandboxes: Collection[ContainerRef]) -> None:
    """Refuse if processes of what was asked for live in a pid namespace that is not their container's."""
    refs: dict[int, ContainerRef] = {}
    for pid in pids():
        with contextlib.suppress(OSError, ValueError):
            refs[pid] = ref_of(pid)
    wanted = asked.matches(refs.values()) - set(sandboxes)
    sharing = [pid for pid, ref in refs.items() if ref in wanted]
    if sharing:
        raise _shared(asked.text, sharing)


def _shared(text: str, sharing: list[int]) -> RefusedError:
    shown = ", ".join(map(str, sharing[:SHOWN])) + (" and more" if len(sharing) > SHOWN else "")
    return RefusedError(
        f"container {printable(text)} has no pid namespace of its own but shares the node's or its pod's: "
        f"pids {shown}",
        remedy="start the pod with shareProcessNamespace: false and hostPID: false",
        reason="SharedPidNamespace",
        pids=", ".join(map(str, sharing)),
    )


def _not_found(sentence: str, there: Iterable[Container]) -> NotFoundError:
    worth = [each for each in there if not each.is_sandbox]
    return NotFoundError(
        sentence,
        remedy=f"there is {_listed(worth)}"
        if worth
        else "no container runs here; has the agent hostPID: true?",
        reason="ContainerNotFound",
    )


def _listed(listed: list[Container]) -> str:
    more = f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else ""
    return ", ".join(map(_shown, listed[:SHOWN])) + more


def _shown(container: Container) -> str:
    id_ = container.ref.id if container.ref.known else container.ref.id[:MAX_QUERY]
    name = name_in_pod(container) if container.ref.pod_uid else ""
    return printable(f"{id_ or '?'} ({name + ', ' if name else ''}pid {container.pid}, {container.comm})")
