"""The container that a worker is restored into: what it is like now, and how the shim gets into it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, Final

from hibernode.artifact.manifest import Manifest
from hibernode.compat import FileFacts, HostFacts
from hibernode.container import mountplan
from hibernode.container.mountplan import MountPlan
from hibernode.discovery.container_look import Container, pid_namespace, pids
from hibernode.discovery.locate import stat_in_root
from hibernode.host import cgroups, mounts, procfs
from hibernode.host.addresses import addresses
from hibernode.host.inroot import open_root
from hibernode.host.procfs import Process
from hibernode.shim_placeholder import recognise

NET: Final = "extNetNs"
"""The key under which the image refers to the container's network namespace; Dynamo's agent uses it too."""

MAX_DEVICES: Final = 1000
MAX_ENTRIES: Final = 10_000
"""Of all that is looked at below /dev; the directories are the container's, and hostile."""

DEVICE_DEPTH: Final = 2


@dataclass(frozen=True, slots=True)
class Target:
    """A container as it was looked at. ``memory_limit`` and ``memory_free``: bytes, None without a limit.

    ``ours``: its init is ``hibernode placeholder``. ``others``: pids of other processes in it.
    ``devices``: paths of device nodes below /dev. ``addresses``: what sockets in it can be bound to.
    ``uids`` and ``gids``: those of its init, groups among them. ``cap_prm`` and ``cap_bnd``: its init's
    capabilities, masks; ``capabilities``: all that any task in it has or can get.
    """

    container: Container
    process: Process
    mounts: MountPlan
    depth: int
    comm: str
    ours: bool
    others: tuple[int, ...]
    memory_limit: int | None
    memory_free: int | None
    uid_map: str
    gid_map: str
    devices: frozenset[str]
    own_net: bool
    addresses: frozenset[str]
    uids: frozenset[int]
    gids: frozenset[int]
    cap_prm: int
    cap_bnd: int
    capabilities: int
    no_new_privs: bool
    seccomp_mode: int


def look(container: Container, process: Process) -> Target:
    """Look at a container whose init is held as ``process``.

    :raises RefusedError: a mount of it cannot be named to CRIU.
    :raises ProcessLookupError: it has ended.
    """
    pid = process.pid
    status, memory = procfs.read_status(pid), cgroups.memory(pid)
    own_net = procfs.namespaces(pid).get("net") != procfs.namespaces(os.getpid()).get("net")
    return Target(
        container=container,
        process=process,
        mounts=mountplan.look(pid),
        depth=len(status.ns_pids) - 1,
        comm=procfs.read_stat(pid).comm,
        ours=recognise(pid),
        others=tuple(entry.pid for entry in procfs.tree(pid) if entry.pid != pid and entry.state not in "ZX"),
        memory_limit=memory.limit,
        memory_free=memory.free,
        uid_map=id_map(pid, "uid"),
        gid_map=id_map(pid, "gid"),
        devices=frozenset(devices(pid)),
        own_net=own_net,
        addresses=addresses(pid),
        uids=frozenset(status.uids),
        gids=frozenset((*status.gids, *status.groups)),
        cap_prm=status.cap_prm,
        cap_bnd=status.cap_bnd,
        capabilities=capabilities(container, pid),
        no_new_privs=status.no_new_privs,
        seccomp_mode=status.seccomp_mode,
    )


def capabilities(container: Container, pid: int) -> int:
    """Unite what the tasks that see a container's pids have or can get.

    Its init is one of them, but so is what was started in it from outside: ``kubectl exec``, a probe.
    """
    inside = {pid_namespace(pid), *(nested.pid_ns for nested in container.nested)}
    found = 0
    for each in pids():
        with contextlib.suppress(OSError):  # it has ended
            if pid_namespace(each) in inside:
                for tid in procfs.threads(each):
                    if procfs.read_stat(each, tid).state not in "ZX":
                        found |= procfs.read_status(each, tid).capabilities
    return found


def id_map(pid: int, kind: str) -> str:
    """Read a user namespace's map of ids, blanks made even."""
    text = procfs.read_bounded(f"/proc/{pid}/{kind}_map", 1 << 16).decode("ascii")
    return "; ".join(" ".join(line.split()) for line in text.splitlines())


def devices(pid: int) -> Iterator[str]:
    """List the device nodes below a container's /dev, two levels deep, links not followed."""
    root = open_root(pid)
    try:
        yield from list(islice(_devices(root, "dev", DEVICE_DEPTH, iter(range(MAX_ENTRIES))), MAX_DEVICES))
    finally:
        os.close(root)


def _devices(root: int, path: str, depth: int, budget: Iterator[int]) -> Iterator[str]:
    """Look at the entries of a directory and those below, one for each item of ``budget``."""
    try:
        fd = mountplan.open_directory(root, path)
    except OSError:
        return
    try:
        with os.scandir(fd) as entries:
            names = [entry.name for _, entry in zip(budget, entries, strict=False)]
        for name in sorted(names):
            try:
                mode = os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode
            except OSError:
                continue
            if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
                yield f"/{path}/{name}"
            elif stat.S_ISDIR(mode) and depth > 1 and name not in ("pts", "shm", "mqueue"):
                yield from _devices(root, f"{path}/{name}", depth - 1, budget)
    finally:
        os.close(fd)


def seen_from(manifest: Manifest, target: Target, facts: HostFacts) -> HostFacts:
    """Turn what the gate knows of the machine into what holds inside the container.

    The tree gets a pid namespace of its own there, so no pid of it can be taken.
    """
    files = {entry.path: stat_in(target.process.pid, entry.path) for entry in manifest.mapped_files}
    free = facts.mem_available_bytes
    return dataclasses.replace(
        facts,
        tasks={},
        files={
            path: None if seen is None else FileFacts(seen.st_size, seen.st_mtime_ns)
            for path, seen in files.items()
        },
        mem_available_bytes=free if target.memory_free is None else min(free, target.memory_free),
    )


def stat_in(pid: int, path: str) -> os.stat_result | None:
    """Stat a path as a process sees it; None where there is nothing, or nothing that may be looked at."""
    try:
        return stat_in_root(pid, PurePosixPath(path))
    except (OSError, ValueError):
        return None


def spec(manifest: Manifest, target: Target) -> dict[str, Any]:
    """Say in the shim's terms which container it is; the mounts in the order of the manifest's."""
    assert manifest.container is not None
    places = {place.mount_point: place for place in target.mounts.external}
    return {
        "pid": target.process.pid,
        "start_ticks": target.process.key.start_ticks,
        "depth": target.depth,
        "join": cgroups.join_paths(target.process.pid),
        "root_id": target.mounts.root.id,
        "mounts": [
            {
                "mount_point": entry.mount_point,
                "id": places[entry.mount_point].id,
                "directory": entry.directory,
            }
            for entry in manifest.container.mounts
        ],
    }


def external(manifest: Manifest, directory: Path) -> tuple[str, ...]:
    """Say to CRIU where the shim has put the mounts: values of ``--external``."""
    assert manifest.container is not None
    mounts_dir = directory / "mounts"
    return tuple(
        f"mnt[{entry.key}]:{mounts_dir / str(number)}"
        for number, entry in enumerate(manifest.container.mounts)
    )


def lower_layers(root: mounts.Mount) -> tuple[str, ...]:
    """List an overlay's lower layers as it was mounted; none where mountinfo does not say."""
    if root.fs_type != "overlay":
        return ()
    # The newer way to mount gives each layer an option of its own.
    words = (option.partition("=") for option in root.super_options.split(","))
    one_by_one = tuple(value for name, _, value in words if name in ("lowerdir+", "datadir+"))
    lower = root.super_option("lowerdir")
    return one_by_one or (tuple(lower.split(":")) if lower else ())
