"""What the path of a cgroup says about the container it belongs to. Pure.

Kubelets, runtimes and their cgroup drivers each have their own form; none is documented as an interface.
All give a container's cgroup its id of 64 hexadecimal digits, alone or in a scope such as
``cri-containerd-ID.scope``, and a pod's the pod's uid. Only runc, crun and ``ctr run`` take any name.

What is trusted: the runtime makes the cgroup and puts the process there. A process inside can at most make
cgroups of its own below, with any name, and move there. So the innermost id on a path may be a lie as soon
as another stands before it: ``within`` names those, and the outermost is always true. A bare name has no form
by which this could be told.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

_PODMAN_PODS: Final = "libpod_parent"

RUNTIMES: Final = {
    "cri-containerd": "containerd",
    "nerdctl": "containerd",
    "k8s.io": "containerd",
    "crio": "cri-o",
    "docker": "docker",
    "libpod": "podman",
    _PODMAN_PODS: "podman",
}
"""What the prefix of a scope, or the directory before a bare id, tells of the runtime."""

_UID: Final = r"[0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32}"
"""A pod's uid: a UUID, or for static pods the MD5 of their manifest. Slices have _ where - would nest."""

_POD: Final = re.compile(rf"pod(?P<uid>{_UID})")
_POD_SLICE: Final = re.compile(
    rf"(?:.*-)?kubepods(?:-(?P<qos>burstable|besteffort))?-pod(?P<uid>{_UID})\.slice"
)
_CONTAINER: Final = re.compile(r"(?:(?P<prefix>[a-z][a-z-]*)-)?(?P<id>[0-9a-f]{64})(?:\.scope)?")
_UNPARSED: Final = re.compile(r"(?P<slice>.+\.slice):(?P<prefix>[^:]*):(?P<id>[^:]+)")
"""A systemd driver's request that was given to a runtime with the cgroupfs driver: taken as one name."""

_BARE_SCOPE: Final = re.compile(r"(?:runc|crun)-(?P<name>.+)\.scope")


@dataclass(frozen=True, slots=True)
class ContainerRef:
    """A container as its cgroup names it.

    ``id`` is 64 hexadecimal digits when ``known``, else whatever name the cgroup has, or empty. ``runtime``
    is ``containerd``, ``cri-o``, ``docker``, ``podman``, or empty when the path does not tell. ``pod_uid``
    has dashes as the API has them, and is empty outside of pods; ``qos`` is ``guaranteed``, ``burstable``,
    ``besteffort`` or empty. ``cgroup`` is the path up to the container's own cgroup. ``within`` lists the
    ids of the containers around this one, the outermost first: Docker in Docker, kind, or a lie.
    """

    id: str
    runtime: str = ""
    pod_uid: str = ""
    qos: str = ""
    cgroup: str = "/"
    within: tuple[str, ...] = ()
    known: bool = False


def parse_path(path: str) -> ContainerRef:
    """Tell the container from the path of a cgroup, as /proc/PID/cgroup has it; never fails.

    Cgroups that were made inside a container belong to it. The innermost of several containers counts. A
    monitor of a runtime (conmon) has a cgroup of a container's form, but is none: its id is empty.
    """
    parts = [part for part in path.split("/") if part]
    pod_uid = qos = before = ""
    ids: list[str] = []
    found: ContainerRef | None = None
    for index, part in enumerate(parts, 1):
        name, prefix = part, ""
        if (unparsed := _UNPARSED.fullmatch(part)) is not None:
            name, prefix = unparsed["id"], unparsed["prefix"]
        if (pod := _pod(unparsed["slice"] if unparsed else part, before)) is not None:
            pod_uid, qos = pod
        if (match := _CONTAINER.fullmatch(name)) is not None:
            prefix = prefix or match["prefix"] or ""
            monitor = prefix.endswith("conmon")
            found = ContainerRef(
                id="" if monitor else match["id"],
                runtime=RUNTIMES.get(prefix or before, ""),
                pod_uid=pod_uid,
                qos=qos,
                cgroup="/" + "/".join(parts[:index]),
                within=tuple(ids),
                known=not monitor,
            )
            if found.id and before != _PODMAN_PODS:  # a pod of podman's has an id of the same form
                ids.append(found.id)
            pod_uid = qos = ""  # what comes below is another's pod
        before = part
    return found or ContainerRef(_bare_name(parts), "", pod_uid, qos, "/" + "/".join(parts))


def _pod(part: str, before: str) -> tuple[str, str] | None:
    """Return uid and class of the pod that a cgroup's name names."""
    if (match := _POD_SLICE.fullmatch(part)) is not None:
        return match["uid"].replace("_", "-"), match["qos"] or "guaranteed"
    if (match := _POD.fullmatch(part)) is not None:
        classes = {"kubepods": "guaranteed", "burstable": "burstable", "besteffort": "besteffort"}
        return match["uid"], classes.get(before, "")
    return None


def _bare_name(parts: list[str]) -> str:
    """Return the name that runc, crun or ctr was given: the last, but for what is known to be none."""
    for part in reversed(parts):
        if (match := _BARE_SCOPE.fullmatch(part)) is not None:
            return match["name"]
    last = parts[-1] if parts else ""
    if last == ".." or _POD.fullmatch(last) or _POD_SLICE.fullmatch(last):
        return ""
    return last.rpartition(":")[2].removesuffix(".scope")


def container_ref(paths: Iterable[str]) -> ContainerRef:
    """Tell the container from a process's paths in all hierarchies.

    A runtime uses the same in each. Where they disagree the one with the fewest containers around it is
    taken, for the rest may be the process's own making; without any id, the path that most hierarchies name.
    """
    counts = Counter(paths)
    refs = {path: parse_path(path) for path in counts}
    recognised = [ref for ref in refs.values() if ref.known]
    if recognised:
        return min(recognised, key=lambda ref: len(ref.within))
    named = [path for path, ref in refs.items() if ref.id or ref.pod_uid]
    return refs[max(named, key=lambda path: counts[path])] if named else ContainerRef("")
