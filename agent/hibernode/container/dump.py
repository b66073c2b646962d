"""What a dump needs to know of the container that it dumps, and the files of it that go along."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import BinaryIO, Final

from hibernode.artifact import rootfs
from hibernode.artifact.manifest import ContainerFacts, DiffFacts, ExternalMount
from hibernode.artifact.rootfs_find import Root, open_upper, root_of
from hibernode.artifact.staging import Staging
from hibernode.container import mountplan, target
from hibernode.container.mountplan import MountPlan
from hibernode.criu.options import DumpOptions
from hibernode.discovery.containers import Container, name_in_pod
from hibernode.errors import RefusedError
from hibernode.host import cgroups, linux
from hibernode.host.freezer import Freezer, usable_freezer
from hibernode.host.inroot import open_root
from hibernode.host.namespaces import open_namespace, sysv_objects
from hibernode.host.procfs import Process
from hibernode.preflight import Preflight
from hibernode.preflight.rows import listed
from hibernode.settings import Settings

log = logging.getLogger("hibernode.container")

ROOTFS: Final = "rootfs.tar"
SHM: Final = "shm.tar"
"""Names in the artifact."""

SHM_MOUNT: Final = "/dev/shm"  # noqa: S108 - where every container has its own
MAPPED: Final = "::ffff:"
"""How an IPv6 socket shows an IPv4 address."""

LOOPBACK: Final = "127."
EVERYWHERE: Final = frozenset({"0.0.0.0", "::", "::1", ""})  # noqa: S104 - recognised, not bound
"""Addresses that every network namespace has; of IPv4's loopback all with this prefix."""


@dataclass(frozen=True, slots=True)
class ContainerDump:
    """A container before it is dumped. ``freezer``: None if CRIU cannot use one.

    ``root``: what is known of its root; ``excluded``: what of it is not saved. ``joined``: the kinds of
    namespaces that CRIU enters. Those that it is in itself it does not save, and the restored tree will be in
    those of the CRIU that restores it: the new container's.
    """

    container: Container
    plan: MountPlan
    facts: ContainerFacts
    root: Root
    excluded: tuple[str, ...]
    freezer: Freezer | None
    joined: tuple[str, ...] = ("uts", "ipc")

    @property
    def upper(self) -> str | None:
        """The directory of what was changed in the rootfs; None where that is not known or cannot be."""
        return None if self.root.read_only else self.root.upper


def look(container: Container, process: Process, checked: Preflight, settings: Settings) -> ContainerDump:
    """Look at a container whose init is held as ``process``.

    :raises RefusedError: a mount of it cannot be named to CRIU.
    :raises ProcessLookupError: it has ended.
    """
    pid = process.pid
    plan = mountplan.look(pid)
    namespaces = checked.facts.root.namespaces
    own_net = namespaces["net"] != checked.facts.agent_namespaces["net"]
    facts = ContainerFacts(
        id=container.ref.id,
        name=name_in_pod(container),
        runtime=container.ref.runtime,
        pod_uid=container.ref.pod_uid,
        net=namespaces["net"] if own_net else 0,
        uid_map=target.id_map(pid, "uid"),
        gid_map=target.id_map(pid, "gid"),
        memory_limit=cgroups.memory(pid).limit or 0,
        mounts=tuple(
            ExternalMount(
                key=place.key,
                mount_point=place.mount_point,
                fs_type=place.fs_type,
                directory=place.directory,
            )
            for place in plan.external
        ),
        skipped_mounts=plan.skipped,
        lower=target.lower_layers(plan.root),
        connected=tuple(sorted(_connected(checked))),
        devices=tuple(sorted(target.devices(pid))),
    )
    freezer: Freezer | None = None
    if settings.criu.freeze_cgroup:
        freezer, finding = usable_freezer(pid, checked.facts.pids)
        log.debug("%s: %s", finding.check, finding.found)
    excluded = (*rootfs.DEFAULT_EXCLUDED, *settings.checkpoint.rootfs_exclude)
    rootfs.compile_patterns(excluded)  # before anything is done: a bad one is the operator's mistake
    # SysV objects are saved and restored only with an IPC namespace of their own.
    own_ipc = namespaces.get("ipc") != checked.facts.agent_namespaces.get("ipc")
    joined = ("uts", "ipc") if own_ipc and not checked.facts.sysv else ("uts",)
    return ContainerDump(container, plan, facts, root_of(pid), excluded, freezer, joined)


def _connected(checked: Preflight) -> set[str]:
    """Name the addresses of connections, if these are kept."""
    if checked.tcp != "established":
        return set()
    ours = checked.facts.socket_inodes
    bound = {
        socket.local[0].removeprefix(MAPPED)
        for socket in checked.facts.tcp
        if socket.inode in ours and socket.state != "LISTEN"
    }
    return {address for address in bound - EVERYWHERE if not address.startswith(LOOPBACK)}


def options(base: DumpOptions, dump: ContainerDump) -> DumpOptions:
    """Add to CRIU's options what a container needs."""
    external = [f"mnt[{place.mount_point}]:{place.key}" for place in dump.plan.external]
    if dump.facts.net:
        external.append(f"net[{dump.facts.net}]:{target.NET}")
    return dataclasses.replace(
        base,
        external=tuple(external),
        skip_mounts=dump.plan.skipped,
        freeze_cgroup=None if dump.freezer is None else str(dump.freezer.directory),
    )


@contextmanager
def namespaces(dump: ContainerDump | None, process: Process) -> Iterator[tuple[int, ...]]:
    """Give the namespaces that CRIU enters before it dumps, as open descriptors; of a process there are none.

    :raises ProcessLookupError: it has ended.
    """
    with ExitStack() as held:
        fds: list[int] = []
        for kind in () if dump is None else dump.joined:
            fds.append(open_namespace(process.pid, kind))
            held.callback(os.close, fds[-1])
        yield tuple(fds)


def facts(dump: ContainerDump | None, diffs: tuple[DiffFacts, ...]) -> ContainerFacts | None:
    """Put together what the manifest says of the container."""
    return None if dump is None else dump.facts.model_copy(update={"diffs": diffs})


def save_files(dump: ContainerDump, process: Process, staging: Staging) -> tuple[DiffFacts, ...]:
    """Save what the container has changed in its rootfs, and its shared memory; the tree is frozen.

    A root that is no overlay is left out, for nothing tells what was changed in it; and one that is
    read-only, for nothing was.

    :raises OSError, HibernodeError: as :func:`hibernode.artifact.rootfs.save`.
    :raises RefusedError: it has made SysV objects after preflight, which CRIU does not save then.
    """
    if "ipc" in dump.joined and (made := sysv_objects(process.pid)):
        raise RefusedError(
            f"pid {process.pid} has {listed(made)} now, and had no SysV object before the dump began",
            remedy="take the checkpoint again: what is there before goes along",
            reason="SysVObjects",
        )
    root = open_root(process.pid)
    try:
        diffs: list[DiffFacts] = []
        if dump.upper is not None:
            upper = open_upper(dump.upper)
            try:
                with _new(staging, ROOTFS) as out:
                    saved = rootfs.save(upper, root, out, index=dump.root.index, excluded=dump.excluded)
            finally:
                os.close(upper)
            diffs.append(_facts(ROOTFS, "/", saved))
        for place in dump.plan.external:
            if place.mount_point != SHM_MOUNT:
                continue
            shm = mountplan.open_mount(root, SHM_MOUNT, place.id)
            try:
                with _new(staging, SHM) as out:
                    saved = rootfs.save_tree(shm, out)
            finally:
                os.close(shm)
            diffs.append(_facts(SHM, SHM_MOUNT, saved))
        return tuple(diffs)
    finally:
        os.close(root)


def _new(staging: Staging, name: str) -> BinaryIO:
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
    return os.fdopen(os.open(staging.artifact_path / name, flags, 0o600), "wb")


def _facts(file: str, mount_point: str, saved: rootfs.Saved) -> DiffFacts:
    return DiffFacts(
        file=file,
        mount_point=mount_point,
        entries=saved.entries,
        bytes=saved.bytes,
        skipped=saved.sockets + saved.devices,
    )


def not_carried(dump: ContainerDump) -> str:
    """Say why the changed files of the rootfs do not go along, if they do not."""
    if dump.root.upper is None:
        return f"; its root is no overlay but {dump.root.fs_type}, so that changes of its files are not saved"
    return ""


def carried(dump: ContainerDump, path: str) -> bool:
    """Whether a file made at ``path`` while the container was frozen goes along with its other files.

    So do the links that CRIU makes for files that have lost their names, before it removes them again.
    """
    path = f"/{path.lstrip('/')}"
    above = [place.mount_point for place in dump.plan.external if path.startswith(f"{place.mount_point}/")]
    nearest = max(above, key=len, default="/")
    return nearest == SHM_MOUNT or (nearest == "/" and dump.upper is not None)


@contextmanager
def in_diff(dump: ContainerDump) -> Iterator[Callable[[str], bool]]:
    """Give the question whether a file comes with the diffs, so that the next container need not have it.

    There may be thousands of files: patterns and upper directory are prepared once.
    """
    excluded = rootfs.compile_patterns(dump.excluded)
    with ExitStack() as held:
        upper: int | None = None
        if dump.upper is not None:
            with suppress(OSError):
                upper = open_upper(dump.upper)
                held.callback(os.close, upper)

        def comes(path: str) -> bool:
            if path.startswith(f"{SHM_MOUNT}/"):
                return True
            above = [path[:end] for end in range(2, len(path) + 1) if end == len(path) or path[end] == "/"]
            if upper is None or any(excluded and excluded.fullmatch(os.fsencode(name)) for name in above):
                return False
            try:
                fd = linux.openat2(
                    upper, path.lstrip("/"), os.O_PATH | os.O_CLOEXEC, resolve=mountplan.RESOLVE
                )
            except (OSError, ValueError):
                return False
            os.close(fd)
            return True

        yield comes
