"""The checks of a dump: the processes of the tree here, descriptors, sockets and the machine beside it.

What CRIU 4.2.1 does in each case was tried with real processes, see tests/real/test_preflight.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from hibernode.preflight import file_checks, socket_checks, store_checks
from hibernode.preflight.rows import row
from hibernode.workload import Finding, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hibernode.preflight.facts import Facts
    from hibernode.settings import Settings

INIT: Final = 1
SECCOMP_MODES: Final = ("off", "strict", "filter")

CONTAINER_NAMESPACES: Final = ("mnt", "pid", "net", "user")
"""A root whose namespaces of these kinds are not the agent's lives in a container."""

INHERITED_NAMESPACES: Final = {
    "mnt": "mnt",
    "pid": "pid",
    "pid_for_children": "pid",
    "net": "net",
    "user": "user",
    "ipc": "ipc",
    "uts": "uts",
    "time": "time",
    "time_for_children": "time",
}
"""CRIU cannot dump a namespace that begins inside the tree, cgroup namespaces apart: each name of
/proc/PID/ns with the root's namespace that it must be."""


def dump_findings(facts: Facts, settings: Settings) -> list[Finding]:
    """Judge everything; one row a check, in a fixed order."""
    rows = [check(facts) for check in TREE_CHECKS]
    rows += file_checks.findings(facts, settings)
    rows += socket_checks.findings(facts, settings)
    rows += store_checks.findings(facts, settings)
    return rows


def check_identity(facts: Facts) -> Finding:
    """Check that the tree is somebody's work: not init's, not the kernel's, not the agent's own."""
    root = facts.root.stat

    def offenders() -> Iterator[str]:
        if root.pid == INIT:
            yield "pid 1 is the init of the machine"
        if root.is_kernel_thread:
            yield f"pid {root.pid} ({root.comm}) is a thread of the kernel"
        if facts.agent_pid in facts.pids:
            yield f"the agent itself (pid {facts.agent_pid}) is in the tree of pid {root.pid}"

    return row(
        "tree.identity",
        "a process of the user, with the agent outside its tree",
        offenders(),
        remedy="name the worker's own topmost process",
        reason="NotAWorker",
        fine=f"pid {root.pid} ({root.comm}), {len(facts.tasks)} processes",
    )


def check_readable(facts: Facts) -> Finding:
    """Check that the agent may look at every process."""
    return row(
        "tree.readable",
        "every process of the tree may be looked at",
        facts.denied,
        remedy="run as root, with CAP_SYS_PTRACE and CAP_CHECKPOINT_RESTORE",
        reason="NotPermitted",
        fine="all",
    )


def check_size(facts: Facts) -> Finding:
    """Check that nothing was left out for being too much."""
    return row(
        "tree.size",
        "a tree that can be looked at whole",
        facts.unseen,
        remedy="CRIU may still fail on what was not looked at",
        reason="NotLookedAt",
        verdict=Verdict.WARN,
        fine=f"{len(facts.tasks)} processes, {sum(1 + len(task.threads) for task in facts.tasks)} threads",
    )


def check_state(facts: Facts) -> Finding:
    """Check that no task is traced; one that is stopped or in the D state is worth a word (FC-43)."""
    traced = [f"pid {pid} is traced by {tracer}" for pid, tracer in sorted(facts.tracers.items())]
    if traced:
        return row(
            "tree.state",
            "no task is traced",
            traced,
            remedy="end the debugger or tracer: CRIU must trace the process itself",
            reason="TaskTraced",
        )
    states = [
        (task.pid, tid, state)
        for task in facts.tasks
        for tid, state in (
            (task.pid, task.stat.state),
            *((thread.tid, thread.state) for thread in task.threads),
        )
    ]
    waiting = [f"task {tid} of pid {pid} in D state" for pid, tid, state in states if state == "D"]
    stopped = [f"task {tid} of pid {pid} is stopped" for pid, tid, state in states if state == "T"]
    if waiting:
        return row(
            "tree.state",
            "tasks that can be frozen at once",
            waiting + stopped,
            remedy="it waits for a disk or a server; CRIU gives up after criu.freeze_timeout_seconds",
            reason="TaskInDState",
            verdict=Verdict.WARN,
        )
    return row(
        "tree.state",
        "running tasks",
        stopped,
        remedy="it stays stopped after the dump and after a restore; kill -CONT to go on",
        reason="TaskStopped",
        verdict=Verdict.WARN,
        fine=f"{len(states)} tasks, none traced, stopped or in D state",
    )


def check_zombies(facts: Facts) -> Finding:
    """Look for zombies: they keep their pid, which a restore needs."""
    return row(
        "tree.zombies",
        "no process that has ended and was not waited for",
        (f"pid {task.pid} ({task.stat.comm}) is a zombie" for task in facts.tasks if task.stat.state in "ZX"),
        remedy="its parent should wait for it; a restore fails while the pid is still taken",
        reason="Zombie",
        verdict=Verdict.WARN,
    )


def check_namespaces(facts: Facts) -> Finding:
    """Check that the tree is one of the node's own, or a whole container; and no namespace begins inside."""
    root = facts.root.namespaces
    foreign = [name for name in CONTAINER_NAMESPACES if root and root[name] != facts.agent_namespaces[name]]
    if "user" in foreign:
        return row(
            "tree.namespaces",
            "the agent's own user namespace",
            [f"pid {facts.root.pid} has its own user namespace"],
            remedy="start it without a user namespace (hostUsers: true): its ids cannot be carried over",
            reason="UserNamespace",
        )
    if foreign and not facts.in_container:
        inner = facts.root.status.ns_pids
        shown = ", ".join(foreign)
        return row(
            "tree.namespaces",
            "a process of the node, or pid 1 of a container with its own pid and mount namespaces",
            [f"pid {facts.root.pid} has its own {shown} namespace and is pid {inner[-1]} in its pid one"],
            remedy="give the container a pid namespace of its own (hostPID: false, shareProcessNamespace: "
            "false), and dump all of it",
            reason="ContainerNotSupported",
        )
    return row(
        "tree.namespaces",
        "no namespace that begins inside the tree",
        (
            f"pid {task.pid} has its own {name} namespace"
            for task in facts.tasks
            for name, inode in task.namespaces.items()
            if name in INHERITED_NAMESPACES and inode != root.get(INHERITED_NAMESPACES[name])
        ),
        remedy="CRIU dumps a container whole, but none that begins inside it: the worker must not make one",
        reason="NestedNamespace",
        fine="those of one container" if facts.in_container else "those of the agent",
    )


def check_session(facts: Facts) -> Finding:
    """Check that sessions and groups can be made anew: their leaders are in the tree, or gone (FC-08)."""
    root = facts.root.stat
    inherited = set() if root.session == root.pid else {root.session, root.pgrp}
    wanted = {
        (task.pid, kind, number)
        for task in facts.tasks
        for kind, number in (("session", task.stat.session), ("process group", task.stat.pgrp))
        if number not in inherited
    }
    foreign = [
        f"pid {pid} is in {kind} {number}, whose leader is outside the tree"
        for pid, kind, number in sorted(wanted)
        if number in facts.outside_pids
    ]
    if foreign:
        return row(
            "tree.session",
            "leaders of sessions and process groups inside the tree",
            foreign,
            remedy="start the worker with setsid, and dump the topmost process of its session",
            reason="ForeignSession",
        )
    return row(
        "tree.session",
        "sessions and process groups of the tree alone",
        (
            f"pid {facts.held_ids[number]} outside the tree is in {kind} {number} of it"
            for _, kind, number in sorted(wanted)
            if number in facts.held_ids
        ),
        remedy="a restore on this machine fails with 'File exists' until that process has ended",
        reason="SessionShared",
        verdict=Verdict.WARN,
        fine="the root leads its session" if not inherited else f"the root is in session {root.session}",
    )


def check_fd_tables(facts: Facts) -> Finding:
    """Check that no thread has descriptors of its own: CRIU dumps without a word and loses them."""
    return row(
        "tree.fd_tables",
        "threads that share the descriptors of their process",
        (
            f"thread {thread.tid} of pid {task.pid} has its own descriptors"
            for task in facts.tasks
            for thread in task.threads
            if thread.fds is not None
        ),
        remedy="the program calls unshare(CLONE_FILES); CRIU would lose what that thread has open",
        reason="UnsharedDescriptors",
        fine="all do",
    )


def check_seccomp(facts: Facts) -> Finding:
    """Say what is on: CRIU carries strict mode and filters over."""
    modes = {task.status.seccomp_mode for task in facts.tasks}
    names = (SECCOMP_MODES[mode] if mode < len(SECCOMP_MODES) else f"mode {mode}" for mode in sorted(modes))
    return Finding("tree.seccomp", Verdict.OK, "off, strict or filter", ", ".join(names))


def check_uprobes(facts: Facts) -> Finding:
    """Check that no probe was set on a running program."""
    return row(
        "tree.uprobes",
        "no [uprobes] mapping",
        (f"pid {task.pid} ({task.stat.comm})" for task in facts.tasks if task.uprobes),
        remedy="a tracer (perf, bpftrace, a profiler) has set probes; stop it and start the worker again",
        reason="UprobesActive",
    )


def check_limits(facts: Facts) -> Finding:
    """Check that CRIU may read the limits of other users' processes: prlimit wants CAP_SYS_RESOURCE."""

    def offenders() -> Iterator[str]:
        for task in facts.tasks:
            if not facts.may_read_limits and {*task.status.uids[:3], *task.status.gids[:3]} != {0}:
                yield f"pid {task.pid} ({task.stat.comm}) is of uid {task.status.uids[0]}"

    return row(
        "tree.limits",
        "root's processes, or an agent with CAP_SYS_RESOURCE",
        offenders(),
        remedy="give the agent CAP_SYS_RESOURCE, or run the worker as root",
        reason="CapabilityMissing",
    )


def check_ld_preload(facts: Facts) -> Finding:
    """Look for preloaded libraries: a restore needs the same ones (FC-09)."""

    def offenders() -> Iterator[str]:
        if facts.preload_file:
            yield "/etc/ld.so.preload is not empty"
        for task in facts.tasks:
            if task.preload:
                yield f"pid {task.pid} has LD_PRELOAD={task.preload[:200]}"

    return row(
        "tree.ld_preload",
        "no preloaded libraries",
        offenders(),
        remedy="the library is part of the image: it must be the same file wherever the worker is restored",
        reason="LdPreload",
        verdict=Verdict.WARN,
    )


TREE_CHECKS: Final[tuple[Callable[[Facts], Finding], ...]] = (
    check_identity,
    check_readable,
    check_size,
    check_namespaces,
    check_state,
    check_zombies,
    check_session,
    check_fd_tables,
    check_seccomp,
    check_uprobes,
    check_limits,
    check_ld_preload,
)
