"""The rows of ``hibernode doctor`` on the container runtime: does it agree with /proc on the containers.

Hibernode finds containers in /proc alone. Where the runtime's CRI socket is there, each running container
that it lists must be one that /proc shows, with the same init; else a dump would take another process.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from hibernode.discovery.container_look import pid_namespace, ref_of
from hibernode.discovery.containers import Container, containers
from hibernode.host import procfs
from hibernode.host.cri import NOT_SPOKEN, RUNNING, Cri, CriCallError, CriContainer, CriNode
from hibernode.preflight.rows import listed
from hibernode.workload import Finding, Verdict

SOCKETS: Final = (
    Path("/run/containerd/containerd.sock"),
    Path("/run/crio/crio.sock"),
    Path("/run/k3s/containerd/containerd.sock"),
    Path("/var/run/cri-dockerd.sock"),
)
"""Where runtimes listen unless they are told otherwise; the first that speaks CRI v1 is asked."""

SHOWN_ID: Final = 12
"""Digits of an id in a row, as many as the runtimes' own tools show."""

_RUNTIME: Final = "a container runtime that speaks CRI v1"
_SAME: Final = "what the runtime runs is in /proc with the same init, and nothing else is in pods"


@dataclass(slots=True)
class Compared:
    """What a comparison found, in words; ``count`` containers run.

    ``wrong``: /proc says otherwise. ``unknown``: only /proc has it. ``sharing``: has no pid namespace of its
    own but the pod's, ``on_node``: but the node's. ``untold``: the runtime did not tell the pid.
    """

    count: int = 0
    untold: int = 0
    wrong: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    sharing: list[str] = field(default_factory=list)
    on_node: list[str] = field(default_factory=list)


def cri_findings(socket: str, *, sockets: Iterable[Path] = SOCKETS) -> list[Finding]:
    """Ask the runtime at ``socket``, else at the first of ``sockets`` that answers, and compare.

    No runtime is needed: none is a skip, one that is there and does not answer a warning. Blocks for some
    seconds at most.
    """
    there = [Path(socket)] if socket else [path for path in sockets if os.path.lexists(path)]
    errors: list[CriCallError] = []
    for path in there:
        with Cri(path) as cri:
            try:
                name, version = cri.version()
            except CriCallError as error:
                errors.append(error)
                continue
            return [Finding("node.cri", Verdict.OK, _RUNTIME, f"{name} {version}, {path}"), _check(cri)]
    return [
        _unanswered(errors, asked=bool(socket)),
        Finding("node.containers", Verdict.SKIP, _SAME, "no CRI"),
    ]


def _unanswered(errors: list[CriCallError], *, asked: bool) -> Finding:
    """Say why there is nobody to compare with; Docker's containerd alone, without the CRI, is no fault."""
    worth = errors if asked else [error for error in errors if error.reason != NOT_SPOKEN]
    if not worth:
        found = listed(error.message for error in errors) or "no CRI socket: containers are found without"
        return Finding("node.cri", Verdict.SKIP, _RUNTIME, found)
    return Finding(
        "node.cri",
        Verdict.WARN,
        _RUNTIME,
        listed(error.message for error in worth),
        "; ".join(dict.fromkeys(error.remedy for error in worth)),
        worth[0].reason,
    )


def _check(cri: Cri) -> Finding:
    try:
        return check_containers(cri)
    except CriCallError as error:
        return Finding("node.containers", Verdict.WARN, _SAME, error.message, error.remedy, error.reason)


def check_containers(cri: Cri, look: Callable[[], list[Container]] = containers) -> Finding:
    """Compare the runtime's containers with those of /proc, as ``look`` lists them.

    Some come or go between the two looks, so what disagrees must do so twice.

    :raises CriCallError: the runtime does not answer, or not as the CRI has it.
    """
    found = compare(cri.node(), look())
    if found.wrong or found.unknown:
        first, found = found, compare(cri.node(), look())
        found.wrong = [each for each in found.wrong if each in first.wrong]
        found.unknown = [each for each in found.unknown if each in first.unknown]
    return judge(found)


def compare(node: CriNode, seen: Iterable[Container]) -> Compared:
    """Compare once. A container inside another one is the other's business, and its id may be made up."""
    ours = ref_of(os.getpid())
    around = (*ours.within, ours.id)
    outer = [each for each in seen if each.ref.within == around[: len(each.ref.within)]]
    found = Compared()
    for told in node.containers:
        if told.state == RUNNING:
            found.count += 1
            found.untold += not told.pid
            _compare_one(told, [each for each in outer if each.ref.id == told.id], found)
    known = node.sandboxes | {each.id for each in node.containers}
    for each in outer:
        if each.ref.known and each.ref.pod_uid and not each.is_sandbox and each.ref.id not in known:
            found.unknown.append(f"{each.ref.id[:SHOWN_ID]} (pod {each.ref.pod_uid}, pid {each.pid})")
    return found


def _compare_one(told: CriContainer, same: list[Container], found: Compared) -> None:
    """Compare a running container with those of its id in /proc: one, unless its processes made more."""
    shown = f"{told.id[:SHOWN_ID]} ({told.name or '?'})"
    if depth := _sharing(told, same):
        (found.on_node if depth == 1 else found.sharing).append(shown)
    elif not same:
        found.wrong.append(f"{shown}: pid {told.pid or '?'} by CRI, not in /proc")
    elif told.pid and told.pid not in [each.pid for each in same]:
        pids = ", ".join(str(each.pid) for each in same)
        found.wrong.append(f"{shown}: pid {told.pid} by CRI, {pids} in /proc")
    elif told.pod_uid and same[0].ref.pod_uid not in ("", told.pod_uid):
        found.wrong.append(f"{shown}: pod {told.pod_uid} by CRI, {same[0].ref.pod_uid} in /proc")


def _sharing(told: CriContainer, same: list[Container]) -> int:
    """Tell how many namespaces deep its process is if it lives in a pid namespace of another's; else 0."""
    with contextlib.suppress(OSError):  # no process has the pid
        if told.pid and ref_of(told.pid).id == told.id:
            ns_pids, inode = procfs.read_status(told.pid).ns_pids, pid_namespace(told.pid)
            own = ns_pids[-1] == 1 or any(inode in each.namespaces() for each in same)
            return 0 if own else len(ns_pids)
    return 0


def judge(found: Compared) -> Finding:
    """Make the row. A container in the node's pid namespace is one of the node's own tools, and no fault."""
    problems = [
        (Verdict.FAIL, "CriMismatch", "", found.wrong, "run with hostPID: true; check runtime.socket"),
        (
            Verdict.WARN,
            "CriUnknownContainer",
            "in pods by /proc, unknown to CRI: ",
            found.unknown,
            "set runtime.socket if another runtime has the pods, else end what an old one left",
        ),
        (
            Verdict.WARN,
            "SharedPidNamespace",
            "cannot be dumped, share a pid namespace: ",
            found.sharing,
            "shareProcessNamespace: false in the pods of workers",
        ),
    ]
    there = [problem for problem in problems if problem[3]]
    if there:
        verdict, reason = there[0][:2]
        text = "; ".join(words + listed(items) for _, _, words, items, _ in there)
        return Finding("node.containers", verdict, _SAME, text, "; ".join(each[4] for each in there), reason)
    fine = f"{found.count} running" + (f", {found.untold} by id alone" if found.untold else "")
    if found.on_node:
        fine += f"; cannot be dumped, in the node's pid namespace: {listed(found.on_node)}"
    return Finding("node.containers", Verdict.OK, _SAME, fine)
