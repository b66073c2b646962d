"""Can this artifact run in that container? Pure; asked before anything in it is touched."""

from __future__ import annotations

from typing import Final

from hibernode.artifact.manifest import ContainerFacts, Manifest, ProcessFacts, RightsFacts
from hibernode.compat import row
from hibernode.container.target import Target, lower_layers
from hibernode.host import nvidia
from hibernode.preflight.rows import listed
from hibernode.workload import Finding, Verdict

WAITING: Final = frozenset({"sleep", "pause", "tail", "catatonit"})
"""Programs that do nothing for the container but wait: a worker may take its place beside them."""

CRIU_BYTES: Final = 4 << 20
TASK_BYTES: Final = 1 << 20
"""What a restore takes beyond the pages: with 2 MiB more a worker of 75 MiB was killed, with 4 it was not."""

CAP_SETGID: Final = 1 << 6
CAP_SETUID: Final = 1 << 7
CAP_SYS_PTRACE: Final = 1 << 19
"""linux/capability.h."""


def container_findings(manifest: Manifest, target: Target | None) -> list[Finding]:
    """Compare the container that the tree was with the one it shall be in; one row a check."""
    facts = manifest.container
    if facts is None or target is None:
        return [_kind(facts, target)] if facts is not None or target is not None else []
    return [
        _kind(facts, target),
        _init(target),
        _mounts(facts, target),
        _more_mounts(facts, target),
        _rootfs(facts, target),
        _memory(manifest, facts, target),
        _ids(facts, target),
        _privileges(manifest, target),
        _ptrace(target),
        _network(facts, target),
        _listening(facts, target),
        _connected(facts, target),
        _devices(facts, target),
    ]


def _kind(facts: ContainerFacts | None, target: Target | None) -> Finding:
    if target is None:
        return row(
            "restore.container",
            Verdict.FAIL,
            "a container: the worker was one",
            "the node itself",
            "name the container that shall take the worker: hibernode restore ID --into CONTAINER",
        )
    if facts is None:
        return row(
            "restore.container",
            Verdict.FAIL,
            "the node itself: the worker was no container",
            f"container {target.container.ref.id}",
            "restore it without --into",
        )
    found = f"container {target.container.ref.id}"
    return row("restore.container", Verdict.OK, f"container {facts.id}", found)


def _init(target: Target) -> Finding:
    """See that what runs there does nothing but wait, and that nobody was restored into it before."""
    pid = target.process.pid
    expected = "a container that only waits: 'hibernode placeholder' or sleep"
    if target.others:
        return row(
            "restore.placeholder",
            Verdict.FAIL,
            expected,
            f"pid {pid} ({target.comm}) with the processes {listed(map(str, target.others))}",
            "restore --into a fresh container, whose command is: hibernode-placeholder --wait 600 -- COMMAND",
        )
    waits = target.ours or target.comm in WAITING
    return row(
        "restore.placeholder",
        Verdict.OK if waits else Verdict.FAIL,
        expected,
        f"pid {pid} ({target.comm})",
        "its init would be ended together with the worker: give the container the command "
        "hibernode-placeholder --wait 600 -- COMMAND, or sleep infinity",
    )


def _mounts(facts: ContainerFacts, target: Target) -> Finding:
    there = {place.mount_point: place for place in target.mounts.external}
    wrong: list[str] = []
    for entry in facts.mounts:
        place = there.get(entry.mount_point)
        if place is None:
            wrong.append(f"no mount at {entry.mount_point}")
        elif place.directory != entry.directory:
            kinds = ("a file", "a directory")
            is_now, was = kinds[place.directory], kinds[entry.directory]
            wrong.append(f"{entry.mount_point} is {is_now} and was {was}")
    return row(
        "restore.mounts",
        Verdict.FAIL if wrong else Verdict.OK,
        f"{len(facts.mounts)} mounts: {listed(entry.mount_point for entry in facts.mounts)}",
        listed(wrong) if wrong else "all there",
        "give the container the volumeMounts of the worker (mounts in the config.json of runc)",
    )


def _more_mounts(facts: ContainerFacts, target: Target) -> Finding:
    known = {entry.mount_point for entry in facts.mounts}
    more = [place.mount_point for place in target.mounts.external if place.mount_point not in known]
    over = [
        f"{point} lies over {below}" for point in more for below in known if below.startswith(f"{point}/")
    ]
    return row(
        "restore.more_mounts",
        Verdict.FAIL if over else Verdict.WARN if more else Verdict.OK,
        "no mount that the worker did not have",
        listed(sorted(over) or more) or "none",
        "the worker will see them too, in the place of what it had there: leave out what it does not know",
    )


def _rootfs(facts: ContainerFacts, target: Target) -> Finding:
    here = lower_layers(target.mounts.root)
    if not facts.lower or not here:
        return row(
            "restore.rootfs",
            Verdict.SKIP,
            _layers(facts.lower),
            _layers(here),
            "see that image: is the same for both; the files that the worker maps are compared one by one",
        )
    if facts.lower == here:
        return row("restore.rootfs", Verdict.OK, _layers(facts.lower), "the same")
    return row(
        "restore.rootfs",
        Verdict.SKIP,
        _layers(facts.lower),
        _layers(here),
        "set image: as it was for the worker, unless the layers only lie elsewhere; its mapped files are "
        "compared one by one",
    )


def _layers(layers: tuple[str, ...]) -> str:
    return f"{len(layers)} layers, the topmost {layers[0]}" if layers else "no overlay"


def _memory(manifest: Manifest, facts: ContainerFacts, target: Target) -> Finding:
    pages = [entry.size for entry in manifest.files if entry.path.startswith("images/pages-")]
    beyond = CRIU_BYTES + (len(manifest.tree) - 1) * TASK_BYTES
    need = sum(pages) + beyond
    if target.memory_limit is None:
        return row("restore.memory_limit", Verdict.OK, f"{need} bytes", "no limit")
    found = f"a limit of {target.memory_limit} bytes, {target.memory_free} of them free"
    free = need if target.memory_free is None else target.memory_free
    less = not facts.memory_limit or target.memory_limit < facts.memory_limit
    # What processes share since a fork is in the image once for each of them. Nobody knows how much that is,
    # but under this limit it had room.
    least = need if less or len(manifest.tree) == 1 else max(pages, default=0) + beyond
    if free < least:
        shared = f", or {least} if its processes share nearly all" if least < need else ""
        return row(
            "restore.memory_limit",
            Verdict.FAIL,
            f"{need} bytes for the worker's memory{shared}",
            found,
            "raise resources.limits.memory of the container, at least to that of the source",
        )
    if free < need:
        return row(
            "restore.memory_limit",
            Verdict.WARN,
            f"{need} bytes, less what the worker's processes share",
            found,
            "raise resources.limits.memory of the container if the restore fails: it is that of the source",
        )
    return row(
        "restore.memory_limit",
        Verdict.WARN if less else Verdict.OK,
        f"a limit of {facts.memory_limit} bytes" if facts.memory_limit else "no limit",
        found,
        "raise resources.limits.memory of the container: the worker may reach for what it had",
    )


def _ids(facts: ContainerFacts, target: Target) -> Finding:
    expected = f"uids {facts.uid_map}; gids {facts.gid_map}"
    found = f"uids {target.uid_map}; gids {target.gid_map}"
    return row(
        "restore.ids",
        Verdict.OK if expected == found else Verdict.FAIL,
        expected,
        found,
        "set hostUsers of the pod as it was for the worker (userns of runc)",
    )


def _privileges(manifest: Manifest, target: Target) -> Finding:
    """See that no task of the tree brings a right along that its new container does not give."""
    rights = manifest.rights or _of_root(manifest.process)
    more: list[str] = []
    if extra := rights.capabilities & ~target.cap_bnd:
        more.append(f"capabilities {extra:#x}")
    if not target.cap_prm & CAP_SETUID:
        more += [f"user {uid}" for uid in rights.uids if uid not in target.uids]
    if not target.cap_prm & CAP_SETGID:
        more += [f"group {gid}" for gid in rights.gids if gid not in target.gids]
    if target.no_new_privs and not rights.no_new_privs:
        more.append("new privileges by exec")
    if target.seccomp_mode and not rights.seccomp:
        more.append("no seccomp filter")
    expected = (
        f"no more than the container: capabilities {target.cap_bnd:#x}, no_new_privs {target.no_new_privs}, "
        f"seccomp mode {target.seccomp_mode}"
    )
    if manifest.rights is None and not more:
        return row(
            "restore.privileges",
            Verdict.SKIP,
            expected,
            "no more of its root; those of its other tasks were not noted",
            "take the checkpoint anew: this one was made by an older release",
        )
    return row(
        "restore.privileges",
        Verdict.FAIL if more else Verdict.OK,
        expected,
        f"the worker has {listed(more)}" if more else "no more",
        "give the container the security context that the worker had, or take the checkpoint anew",
    )


def _of_root(process: ProcessFacts) -> RightsFacts:
    """Take what an older manifest has: the tree's root, and what it could do at that moment."""
    return RightsFacts(
        uids=process.uids,
        gids=(*process.gids, *process.groups),
        capabilities=process.cap_eff,
        no_new_privs=process.no_new_privs,
        seccomp=bool(process.seccomp_mode),
    )


def _ptrace(target: Target) -> Finding:
    """See that nobody in the container can look into CRIU, and through it at the node's files."""
    can = target.capabilities & CAP_SYS_PTRACE
    return row(
        "restore.ptrace",
        Verdict.FAIL if can else Verdict.OK,
        "no task with CAP_SYS_PTRACE: CRIU is seen in there while it works, and the node's files through it",
        "one has it, or can get it by exec" if can else "none",
        "take SYS_PTRACE out of the container's capabilities, and the worker's; privileged ones have it too",
    )


def _network(facts: ContainerFacts, target: Target) -> Finding:
    words = ("the node's network namespace", "a network namespace of its own")
    expected, found = words[bool(facts.net)], words[target.own_net]
    return row(
        "restore.network",
        Verdict.OK if expected == found else Verdict.FAIL,
        expected,
        found,
        "set hostNetwork of the pod as it was for the worker",
    )


def _listening(facts: ContainerFacts, target: Target) -> Finding:
    missing = [address for address in facts.listening if address not in target.addresses]
    return row(
        "restore.listening",
        Verdict.FAIL if missing else Verdict.OK,
        listed(facts.listening) or "no address of the container's own",
        f"missing: {listed(missing)}" if missing else "all there",
        "let the worker bind to 0.0.0.0 or [::], and close connected UDP sockets before it is ready: a pod "
        "gets another address each time",
    )


def keeps_connections(facts: ContainerFacts, target: Target) -> bool:
    """Whether the connections that were kept can be: their addresses are there."""
    return target.addresses.issuperset(facts.connected)


def _connected(facts: ContainerFacts, target: Target) -> Finding:
    kept = keeps_connections(facts, target)
    return row(
        "restore.connections",
        Verdict.OK if kept else Verdict.WARN,
        listed(facts.connected) or "no address of the container's own",
        "all there" if kept else f"addresses here: {listed(sorted(target.addresses))}",
        "let the worker connect again: with other addresses its TCP connections are closed (criu.tcp: close)",
    )


def _devices(facts: ContainerFacts, target: Target) -> Finding:
    missing = [path for path in facts.devices if path not in target.devices]
    # Which GPU is whose is decided by their UUIDs, not by the names of their devices.
    gpus = all(path.startswith(nvidia.DEVICES) for path in missing)
    return row(
        "restore.devices",
        Verdict.OK if not missing else Verdict.WARN if gpus else Verdict.FAIL,
        f"{len(facts.devices)} device nodes",
        f"missing: {listed(missing)}" if missing else "all there",
        "give the container the devices of the worker (resources.limits, or linux.devices in config.json)",
    )
