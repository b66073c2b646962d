"""The seal step: from a directory of CRIU images to an artifact with a manifest."""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat as st
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from hibernode.artifact import digest
from hibernode.artifact import manifest as m
from hibernode.artifact.layout import entries
from hibernode.artifact.staging import Staging
from hibernode.compat import cpu_features
from hibernode.container.dump import ContainerDump, in_diff
from hibernode.container.target import stat_in
from hibernode.criu.image_rights import read_rights
from hibernode.criu.image_sockets import bound_addresses
from hibernode.criu.images import ImageTask, read_pstree
from hibernode.criu.runner import Criu
from hibernode.criu.stdio import append_stdio, unchecked_paths
from hibernode.discovery.locate import Contract
from hibernode.host import mounts, procfs, safefs
from hibernode.host.procfs import Process
from hibernode.journal import Journal
from hibernode.preflight import Preflight
from hibernode.settings import Settings
from hibernode.workload import CheckpointId

STDIO: Final = 3
"""Descriptors below this are standard input, output and error."""

MAX_MAPPED_FILES: Final = 20_000
"""More files than this are not listed: the manifest is bounded, and CRIU checks sizes itself."""

KERNEL_FILES: Final = ("/proc/", "/sys/", "/dev/", "/memfd:", "/SYSV", "[")
SHARED_MEMORY: Final = "/dev/shm/"  # noqa: S108 - recognised, not used


@dataclass(frozen=True, slots=True)
class Description:
    """What the manifest says of the worker, taken while it lived."""

    process: m.ProcessFacts
    comms: Mapping[int, str]
    mounts: tuple[m.MountFacts, ...]
    namespaces: Mapping[str, int]
    mapped_files: tuple[m.MappedFile, ...]
    pipes: tuple[m.FdFacts, ...]


def describe(process: Process, checked: Preflight, dump: ContainerDump | None = None) -> Description:
    """Look at the worker once more before it is dumped, for what the images do not say or say too late."""
    pid = process.pid
    status = procfs.read_status(pid)
    return Description(
        process=m.ProcessFacts(
            pid=pid,
            start_ticks=process.key.start_ticks,
            comm=procfs.read_stat(pid).comm,
            cmdline=tuple(procfs.cmdline(pid)),
            exe=procfs.exe(pid) or "",
            cwd=procfs.cwd(pid) or "",
            uids=status.uids,
            gids=status.gids,
            groups=status.groups,
            cap_eff=status.cap_eff,
            no_new_privs=status.no_new_privs,
            seccomp_mode=status.seccomp_mode,
        ),
        # The images name tasks by their pids in the tree's own pid namespace, the innermost one.
        comms={task.status.ns_pids[-1]: task.stat.comm for task in checked.facts.tasks},
        mounts=tuple(
            m.MountFacts(
                mount_point=mount.mount_point,
                fs_type=mount.fs_type,
                source=mount.source,
                root=mount.root,
                options=mount.options,
            )
            for mount in mounts.mounts(pid)
        ),
        namespaces=procfs.namespaces(pid),
        mapped_files=tuple(_mapped_files(process, checked, dump)),
        pipes=tuple(
            m.FdFacts(
                pid=owner, fd=fd, target=target, kind="pipe", access="read" if access == "r" else "write"
            )
            for owner, fd, target, access in checked.facts.outside_pipes
        ),
    )


def _mapped_files(process: Process, checked: Preflight, dump: ContainerDump | None) -> Iterable[m.MappedFile]:
    """List the files that the image will refer to by path, and whether CRIU will insist on their size.

    Of a container only those that a restore must find: not those that go along with it.
    """
    checked_sizes: dict[str, bool] = {}
    for task in checked.facts.tasks:
        with contextlib.suppress(ProcessLookupError):
            for mapping in procfs.maps(task.pid):
                if mapping.inode and not mapping.deleted:
                    checked_sizes[mapping.path] = True
    for _, fd in checked.facts.descriptors():
        if st.S_ISREG(fd.mode) and fd.nlink:
            written = fd.flags & os.O_ACCMODE != os.O_RDONLY
            loose = written and (fd.fd < STDIO or bool(fd.flags & os.O_APPEND and not fd.flags & os.O_RDWR))
            checked_sizes.setdefault(fd.target, not loose)
    with contextlib.nullcontext(_never) if dump is None else in_diff(dump) as comes:
        found = 0
        for path, size_checked in sorted(checked_sizes.items()):
            if path.startswith(KERNEL_FILES) and not path.startswith(SHARED_MEMORY):
                continue
            if comes(path):
                continue
            stat = _stat(path) if dump is None else stat_in(process.pid, path)
            if stat is not None and found < MAX_MAPPED_FILES:
                found += 1
                yield m.MappedFile(
                    path=path,
                    size=stat.st_size,
                    mtime_ns=stat.st_mtime_ns,
                    dev=stat.st_dev,
                    ino=stat.st_ino,
                    size_checked=size_checked,
                )


def _never(_path: str) -> bool:
    return False


def _stat(path: str) -> os.stat_result | None:
    with contextlib.suppress(OSError, ValueError):
        return os.stat(path)  # noqa: PTH116 - one call a file, there may be thousands
    return None


async def finish_images(staging: Staging, settings: Settings, journal: Journal) -> list[m.FileEntry]:
    """Make the images ours: private modes, stdio that appends, digests, all of it durable.

    Digests read what is still in the page cache while the disk takes in the same bytes, so the two run
    side by side; their times overlap.
    """
    await asyncio.to_thread(_prepare, staging)
    with staging.artifact() as artifact:
        names = await asyncio.to_thread(lambda: [path for path, _, _ in entries(artifact)])

        async def hash_all() -> dict[str, tuple[int, str]]:
            with journal.timed("digest"):
                return await digest.digest_files(artifact, names, settings.store.workers)

        async def sync_all() -> None:
            with journal.timed("fsync"):
                await asyncio.to_thread(safefs.sync_tree, artifact)

        digests, _ = await asyncio.gather(hash_all(), sync_all())
    return [
        m.FileEntry(path=path, size=size, digest=value) for path, (size, value) in sorted(digests.items())
    ]


def _prepare(staging: Staging) -> None:
    with staging.artifact() as artifact:
        with artifact.subdir("images") as images:
            append_stdio(images)
        safefs.chmod_tree(artifact)


def build_manifest(
    staging: Staging,
    settings: Settings,
    *,
    id_: CheckpointId,
    contract: Contract,
    checked: Preflight,
    seen: Description,
    criu: Criu,
    argv: Iterable[str],
    files: list[m.FileEntry],
    phases: Mapping[str, float],
    links: tuple[m.LinkFacts, ...] = (),
    container: m.ContainerFacts | None = None,
    cuda: m.CudaFacts | None = None,
) -> m.Manifest:
    """Put the manifest together. The tree and its rights are read from the images: as it was frozen."""
    uname = os.uname()
    with staging.artifact() as artifact, artifact.subdir("images") as images:
        unchecked = unchecked_paths(images)
        rights = m.RightsFacts(**asdict(read_rights(images)))
        if container is not None:
            container = container.model_copy(update={"listening": bound_addresses(images)})
    mapped_files = tuple(
        entry.model_copy(update={"size_checked": False}) if entry.path in unchecked else entry
        for entry in seen.mapped_files
    )
    return m.Manifest(
        id=id_,
        uuid=staging.uuid,
        created_at=datetime.fromtimestamp(time.time(), UTC)
        .isoformat(timespec="milliseconds")
        .replace("+00:00", "Z"),
        node=settings.node,
        kernel=uname.release,
        boot_id=procfs.boot_id(),
        machine=uname.machine,
        cpu_features=tuple(cpu_features()),
        criu=m.CriuFacts(version=criu.version, options=_options(argv, criu, staging.path)),
        process=seen.process,
        rights=rights,
        tree=tuple(_task(task, seen.comms) for task in read_pstree(staging.images)),
        shell_job=checked.shell_job,
        tcp=checked.tcp,
        leave=settings.checkpoint.leave,
        contract=m.ContractFacts(
            era=contract.era,
            signal_file=contract.signal_file,
            ready_file=contract.ready_file,
            restore_marker=contract.restore_marker,
        ),
        mounts=seen.mounts,
        namespaces=dict(seen.namespaces),
        fds=seen.pipes,
        mapped_files=mapped_files,
        links=links,
        files=tuple(files),
        total_bytes=sum(entry.size for entry in files),
        phases=dict(phases),
        container=container,
        cuda=cuda,
    )


def _task(task: ImageTask, comms: Mapping[int, str]) -> m.TaskFacts:
    return m.TaskFacts(
        pid=task.pid,
        ppid=task.ppid,
        pgid=task.pgid,
        sid=task.sid,
        threads=task.threads,
        comm=comms.get(task.pid, ""),
    )


def _options(argv: Iterable[str], criu: Criu, staging: Path) -> tuple[str, ...]:
    """Keep the options, not where they pointed: paths are this node's own."""
    words = list(argv)[len(criu.argv) :]
    return tuple(word for word in words if not word.startswith(str(staging)))
