"""What CRIU is asked. Pure: facts and settings in, a list of arguments out.

Every option here exists in CRIU 4.2.1. What must be the same at dump and at restore stands in
:func:`_common`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

Leave = Literal["running", "stopped", "killed"]
Tcp = Literal["established", "close"]
NetworkLock = Literal["nftables", "iptables", "skip"]

DUMP_LOG: Final = "dump.log"
RESTORE_LOG: Final = "restore.log"

NO_PLUGINS: Final = "/proc/self/task"
"""A directory that exists on every machine and in which nobody can make a file. CRIU loads each ``*.so``
in its ``--libdir`` as root, fails if the directory is missing, and without the option takes
/usr/lib/criu. A plugin recorded in an image is needed again at restore, so none is used that was not asked
for (``gpu.quiesce``)."""


@dataclass(frozen=True, slots=True)
class DumpOptions:
    """How a tree is dumped.

    ``external``: values of CRIU's ``--external``. ``skip_mounts``: mount points that the image leaves out.
    ``freeze_cgroup``: the directory of the tree's freezer, which stops all of it at once.
    ``freeze_timeout_seconds`` covers only the collecting of tasks, 0 turns it off. ``network_lock`` matters
    for ``tcp="established"`` only: CRIU's own default, iptables, needs that program; nftables is done by
    CRIU itself. A restore takes it from the image.
    """

    leave: Leave
    shell_job: bool
    tcp: Tcp
    file_locks: bool
    link_remap: bool
    ghost_limit_bytes: int
    freeze_timeout_seconds: float
    log_level: int
    external: tuple[str, ...] = ()
    skip_mounts: tuple[str, ...] = ()
    freeze_cgroup: str | None = None
    action_script: str | None = None
    network_lock: NetworkLock = "nftables"
    libdir: str = NO_PLUGINS


@dataclass(frozen=True, slots=True)
class RestoreOptions:
    """How a tree is restored; ``inherit_fds`` pairs a descriptor of CRIU with the resource it stands for.

    ``root``: the mount that becomes the tree's ``/``, for a tree with a mount namespace of its own.
    """

    shell_job: bool
    tcp: Tcp
    file_locks: bool
    link_remap: bool
    ghost_limit_bytes: int
    log_level: int
    inherit_fds: tuple[tuple[int, str], ...] = ()
    external: tuple[str, ...] = ()
    root: str | None = None
    action_script: str | None = None
    libdir: str = NO_PLUGINS


def dump_args(pid: int, images_dir: Path, opts: DumpOptions, *, work_dir: Path | None = None) -> list[str]:
    """Build the arguments of ``criu dump``.

    The log, ``dump.log``, goes to ``work_dir``; :func:`hibernode.criu.runner.run_criu` adds its own when
    none is given here.
    """
    args = ["dump", "--tree", str(pid), "--images-dir", str(images_dir), *_work_dir(work_dir)]
    args += ["--log-file", DUMP_LOG, *_common(opts)]
    if opts.leave != "killed":
        args.append(f"--leave-{opts.leave}")
    # Whole seconds are all that CRIU takes, and 0 would turn the timeout off.
    args += ["--timeout", str(math.ceil(opts.freeze_timeout_seconds))]
    if opts.tcp == "established":
        args += ["--network-lock", opts.network_lock]
    for path in opts.skip_mounts:
        args += ["--skip-mnt", path]
    if opts.freeze_cgroup is not None:
        args += ["--freeze-cgroup", opts.freeze_cgroup]
    return args


def restore_args(
    images_dir: Path,
    pidfile: Path,
    opts: RestoreOptions,
    *,
    detach: bool = True,
    work_dir: Path | None = None,
) -> list[str]:
    """Build the arguments of ``criu restore``.

    ``pidfile`` must not exist yet: CRIU makes it, and fails when it cannot. With ``detach`` CRIU ends when
    the tree runs; without, when the tree's root ends.
    """
    args = ["restore", "--images-dir", str(images_dir), *_work_dir(work_dir)]
    args += ["--log-file", RESTORE_LOG, "--pidfile", str(pidfile), *_common(opts)]
    if detach:
        args.append("--restore-detached")
    if opts.root is not None:
        # The older way of making mounts: the newer one cannot place bind mounts of NVIDIA's.
        args += ["--root", opts.root, "--mntns-compat-mode"]
    for number, resource in opts.inherit_fds:
        args += ["--inherit-fd", f"fd[{number}]:{resource}"]
    return args


def _work_dir(path: Path | None) -> list[str]:
    return [] if path is None else ["--work-dir", str(path)]


def _common(opts: DumpOptions | RestoreOptions) -> Iterator[str]:
    yield "--no-default-config"  # /etc/criu/default.conf is somebody else's idea of a dump
    # Errors are the diagnosis's input, and level 0 hides them.
    yield f"-v{max(1, opts.log_level)}"
    yield from ("--libdir", opts.libdir)
    yield "--manage-cgroups=ignore"
    yield "--ext-unix-sk"
    yield "--skip-in-flight"
    yield "--tcp-established" if opts.tcp == "established" else "--tcp-close"
    if opts.shell_job:
        yield "--shell-job"
    if opts.file_locks:
        yield "--file-locks"
    if opts.link_remap:
        yield "--link-remap"
    yield from ("--ghost-limit", str(opts.ghost_limit_bytes))
    for resource in opts.external:
        yield from ("--external", resource)
    if opts.action_script is not None:
        yield from ("--action-script", opts.action_script)
