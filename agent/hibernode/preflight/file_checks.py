"""Checks of what the tree has open and mapped. What CRIU knows: its files.c, tty.c and proc_parse.c."""

from __future__ import annotations

import os
import stat as st
from typing import TYPE_CHECKING, Final

from hibernode.host import nvidia
from hibernode.preflight.rows import row, size
from hibernode.workload import Finding, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hibernode.host.procfs import Fd
    from hibernode.preflight.facts import Facts
    from hibernode.settings import Settings

IO_URING: Final = "anon_inode:[io_uring]"

KNOWN_ANON_INODES: Final = frozenset(
    f"anon_inode:{name}"
    for name in ("[eventfd]", "[eventpoll]", "[timerfd]", "[signalfd]", "inotify", "[fanotify]", "[pidfd]")
)

MEM_MAJOR: Final = 1
TTY_MAJOR: Final = 4
TTYAUX_MAJOR: Final = 5
MISC_MAJOR: Final = 10
PTS_MAJOR: Final = 136
AUTOFS_MINOR: Final = 235
CONSOLES: Final = range(64)
"""linux/major.h and linux/miscdevice.h. null, zero, full, random, urandom and kmsg are memory devices."""

DUMPABLE_MAJORS: Final = frozenset({MEM_MAJOR, *range(128, 137), 188, 204})
"""Memory devices, pseudo terminals (masters, the first slave major), USB and low-density serial lines."""

DEVICE_ZERO: Final = os.makedev(1, 5)
CONTROLLING_TTY: Final = os.makedev(TTYAUX_MAJOR, 0)
STDIO: Final = range(3)
PIDFD_THREAD: Final = os.O_EXCL
"""linux/pidfd.h: the flag of a pidfd that names a thread."""

MEMORY_TYPES: Final = frozenset({"tmpfs", "devtmpfs", "ramfs"})


def findings(facts: Facts, settings: Settings) -> list[Finding]:
    """Judge descriptors and mappings, one row a check."""
    return [
        check_io_uring(facts),
        check_anon_inodes(facts),
        check_devices(facts, settings),
        check_pidfds(facts),
        check_paths(facts),
        check_pipes(facts),
        check_tty(facts),
        check_deleted_files(facts, settings),
        check_link_remap(facts, settings),
        check_file_locks(facts, settings),
        check_inotify(facts),
        check_sysv(facts),
        check_sysv_objects(facts),
    ]


def check_io_uring(facts: Facts) -> Finding:
    """Check that no task holds or maps an io_uring ring; CRIU fails on either and never says why (FC-01)."""

    def offenders() -> Iterator[str]:
        for task, fd in facts.descriptors():
            if fd.target == IO_URING:
                yield f"pid {task.pid} fd {fd.fd} ({task.stat.comm})"
        for mapping in facts.mapped:
            if mapping.path == IO_URING:
                yield f"pid {mapping.pid} mapping {mapping.start:x}"

    return row(
        "tree.io_uring",
        "no io_uring ring",
        offenders(),
        remedy="run the worker under the seccomp profile block-iouring.json, or with "
        "'hibernode seccomp exec -- CMD': most programs then fall back to epoll",
        reason="IoUringInUse",
    )


def check_anon_inodes(facts: Facts) -> Finding:
    """Check that there are only kinds of anonymous descriptors that CRIU knows."""

    def offenders() -> Iterator[str]:
        for task, fd in facts.descriptors():
            target = fd.target
            if target.startswith("anon_inode:") and target not in KNOWN_ANON_INODES and target != IO_URING:
                yield f"pid {task.pid} fd {fd.fd} ({target})"
        for mapping in facts.mapped:
            path = mapping.path
            if path == "/secretmem" or (path.startswith("anon_inode:") and path != IO_URING):
                yield f"pid {mapping.pid} mapping {mapping.start:x} ({path})"

    return row(
        "tree.anon_inodes",
        "eventfd, epoll, timerfd, signalfd, inotify, fanotify, pidfd",
        offenders(),
        remedy="the program must close it first; perf events, userfaultfd, KVM, BPF, seccomp listeners and "
        "secret memory cannot be dumped",
        reason="UnsupportedDescriptor",
        fine="no others",
    )


def check_devices(facts: Facts, settings: Settings) -> Finding:
    """Check that there are only devices that CRIU can open anew.

    Those of NVIDIA's are the quiesce step's concern: it takes the processes off the GPU, then looks again.
    """
    quiesced = settings.gpu.quiesce != "none"

    def offenders() -> Iterator[str]:
        for task, fd in facts.descriptors():
            if quiesced and fd.target.startswith(nvidia.DEVICES):
                continue
            if _is_device(fd.mode) and not _dumpable(fd.mode, fd.rdev):
                yield f"pid {task.pid} fd {fd.fd} ({_device(fd.target, fd.rdev)})"
        for mapping in facts.mapped:
            if quiesced and mapping.path.startswith(nvidia.DEVICES):
                continue
            if _is_device(mapping.mode) and mapping.rdev != DEVICE_ZERO:
                yield f"pid {mapping.pid} mapping {mapping.start:x} ({_device(mapping.path, mapping.rdev)})"

    return row(
        "tree.devices",
        "null, zero, full, random, urandom, kmsg, terminals",
        offenders(),
        remedy="the worker must close the device before it says that it is ready; what a driver holds for it "
        "cannot be dumped",
        reason="DeviceInUse",
        fine="no others",
    )


def _is_device(mode: int) -> bool:
    return st.S_ISCHR(mode) or st.S_ISBLK(mode)


def _device(path: str, rdev: int) -> str:
    return f"{path}, device {os.major(rdev)}:{os.minor(rdev)}"


def _dumpable(mode: int, rdev: int) -> bool:
    major, minor = os.major(rdev), os.minor(rdev)
    if not st.S_ISCHR(mode):
        return False
    return (
        major in DUMPABLE_MAJORS
        or (major == TTY_MAJOR and minor in CONSOLES)
        or (major == TTYAUX_MAJOR and minor in (0, 1, 2))
        or (major == MISC_MAJOR and minor == AUTOFS_MINOR)
    )


def check_pidfds(facts: Facts) -> Finding:
    """Check that every pidfd names a process of the tree, or one that has ended."""
    flags = {(task.pid, fd.fd): fd.flags for task, fd in facts.descriptors()}

    def offenders() -> Iterator[str]:
        for (pid, fd), target in sorted(facts.pidfds.items()):
            if target not in facts.pids and target != -1:
                yield f"pid {pid} fd {fd} (pidfd of pid {target}, outside the tree)"
            elif flags.get((pid, fd), 0) & PIDFD_THREAD:
                yield f"pid {pid} fd {fd} (pidfd of a thread)"

    return row(
        "tree.pidfds",
        "pidfds of processes in the tree",
        offenders(),
        remedy="the program must close it first, or dump the tree from the process that it names",
        reason="PidfdOutside",
    )


def check_paths(facts: Facts) -> Finding:
    """Check that every open file lies on a mount that CRIU can see, and that no other mount covers."""
    known = {mount.id: mount for mount in facts.mounts}
    covered = {
        mount.parent_id
        for mount in facts.mounts
        if mount.parent_id in known and known[mount.parent_id].mount_point == mount.mount_point
    }

    def offenders() -> Iterator[str]:
        for task, fd in facts.descriptors():
            if not fd.target.startswith("/") or fd.target.startswith("/memfd:"):
                continue
            if fd.mnt_id not in known:
                yield f"pid {task.pid} fd {fd.fd} ({fd.target}, on a mount that is not in its mountinfo)"
            elif fd.mnt_id in covered:
                yield f"pid {task.pid} fd {fd.fd} ({fd.target}, on a mount that another one covers)"

    return row(
        "tree.paths",
        "open files on mounts that the root of the tree sees",
        offenders(),
        remedy="the file was opened in another mount namespace, or its file system was unmounted or covered; "
        "connect it to a pipe or to /dev/null instead, standard output of a container too",
        reason="MountNotVisible",
        fine="all",
    )


def check_pipes(facts: Facts) -> Finding:
    """Check that a pipe's other end is in the tree, or the pipe is stdin, stdout or stderr."""
    packets = [
        f"pid {task.pid} fd {fd.fd} ({fd.target})"
        for task, fd in facts.descriptors()
        if fd.target.startswith("pipe:[") and fd.flags & os.O_DIRECT
    ]
    if packets:
        return row(
            "tree.pipes",
            "pipes of bytes",
            packets,
            remedy="the program makes pipes with O_DIRECT (packet mode), which cannot be dumped",
            reason="PacketPipe",
        )
    stdio = {target for _, fd, target, _ in facts.outside_pipes if fd in STDIO}
    return row(
        "tree.pipes",
        "pipes with both ends in the tree, or as stdin, stdout and stderr",
        (
            f"pid {pid} fd {fd} ({target})"
            for pid, fd, target, _ in facts.outside_pipes
            if target not in stdio
        ),
        remedy="the other end is outside the tree or closed: after a restore it is closed",
        reason="PipeOutside",
        verdict=Verdict.WARN,
        fine=f"{len(stdio)} to reconnect" if stdio else "all inside",
    )


def check_tty(facts: Facts) -> Finding:
    """Look for terminals from outside: CRIU dumps one (``--shell-job``), and a restore without it dies."""
    controlling = {task.pid: os.minor(task.stat.tty_nr) for task in facts.tasks if task.stat.tty_nr}

    def outside(pid: int, fd: Fd) -> bool:
        if not st.S_ISCHR(fd.mode):
            return False
        if fd.rdev == CONTROLLING_TTY:
            return controlling.get(pid) not in facts.terminals
        return os.major(fd.rdev) == PTS_MAJOR and os.minor(fd.rdev) not in facts.terminals

    return row(
        "tree.tty",
        "no terminal whose master is outside the tree",
        (
            f"pid {task.pid} fd {fd.fd} ({fd.target})"
            for task, fd in facts.descriptors()
            if outside(task.pid, fd)
        ),
        remedy="start the worker without a terminal: setsid CMD </dev/null >worker.log 2>&1; a container "
        "with tty: false (runc: terminal: false) and its output in a pipe",
        reason="TerminalAttached",
    )


def check_deleted_files(facts: Facts, settings: Settings) -> Finding:
    """Check that files without a name are small enough to be copied into the image."""
    limit = settings.criu.ghost_limit_bytes
    return row(
        "tree.deleted_files",
        f"deleted files of at most {size(limit)} each",
        (
            f"pid {ghost.pid} {ghost.where} ({ghost.path}, {size(ghost.bytes)}, limit {size(limit)})"
            for ghost in facts.ghosts
            if ghost.bytes > limit
        ),
        remedy="raise criu.ghost_limit_bytes above it, or close the file",
        reason="GhostFileTooLarge",
        fine=f"{len(facts.ghosts)}, {size(sum(ghost.bytes for ghost in facts.ghosts))}",
    )


def check_link_remap(facts: Facts, settings: Settings) -> Finding:
    """Check that files that lost a name can be linked anew, and nothing stands in the way (FC-45)."""
    if facts.renamed and not settings.criu.link_remap:
        return row(
            "tree.link_remap",
            "no open file that lost its name and has another, for criu.link_remap is off",
            (f"pid {file.pid} fd {file.fd} ({file.path})" for file in facts.renamed),
            remedy="set criu.link_remap to true",
            reason="LinkRemapNeeded",
        )
    return row(
        "tree.link_remap",
        "no link_remap.* beside the open files that need such a link",
        facts.leftovers,
        remedy="left by another dump; if nobody needs them remove them, or CRIU may fail with 'File exists'",
        reason="LinkRemapLeftover",
        verdict=Verdict.WARN,
        fine=f"{len(facts.renamed)} files need a link" if facts.renamed else "none",
    )


def check_file_locks(facts: Facts, settings: Settings) -> Finding:
    """Check that no lock is held where locks are not dumped."""
    if settings.criu.file_locks:
        return Finding("tree.file_locks", Verdict.OK, "any", "dumped (criu.file_locks)")
    return row(
        "tree.file_locks",
        "no file lock, for criu.file_locks is off",
        (f"pid {pid} holds a lock" for pid in sorted(facts.locked_pids & facts.pids)),
        remedy="set criu.file_locks to true",
        reason="FileLockHeld",
    )


def check_inotify(facts: Facts) -> Finding:
    """Check that every watched file can be found again."""
    types = {os.makedev(*mount.dev): mount.fs_type for mount in facts.mounts}
    nameless = {
        (fd.dev, fd.ino) for _, fd in facts.descriptors() if fd.nlink == 0 and fd.target.startswith("/")
    }

    def offenders() -> Iterator[str]:
        for watch in facts.watches:
            where = f"pid {watch.pid} fd {watch.fd}"
            if not watch.by_handle:
                yield f"{where} (inode {watch.ino}, whose file system gives no handles)"
            elif watch.dev not in types:
                yield f"{where} (inode {watch.ino}, on a mount that is not in the mountinfo)"
            elif types[watch.dev] in MEMORY_TYPES and (watch.dev, watch.ino) in nameless:
                yield f"{where} (inode {watch.ino} on {types[watch.dev]}, which was deleted)"

    return row(
        "tree.inotify",
        "watches on files that have a name",
        offenders(),
        remedy="the program must remove the watch first",
        reason="InotifyWatchLost",
        fine=f"{len(facts.watches)} watches",
    )


def check_sysv(facts: Facts) -> Finding:
    """Look for SysV shared memory, which needs an IPC namespace of the tree's own."""
    shared = facts.root.namespaces.get("ipc") == facts.agent_namespaces.get("ipc")
    return row(
        "tree.sysv_shm",
        "no SysV shared memory in the machine's IPC namespace",
        (
            f"pid {mapping.pid} mapping {mapping.start:x} ({mapping.path})"
            for mapping in facts.mapped
            if shared and mapping.path.startswith("/SYSV")
        ),
        remedy="start the worker with 'unshare --ipc', or use POSIX shared memory",
        reason="SysVSharedMemory",
    )


def check_sysv_objects(facts: Facts) -> Finding:
    """Look for SysV objects beside a container: they go along, but then nothing is shared with others."""
    return row(
        "tree.sysv_objects",
        "no SysV object in the container's IPC namespace",
        facts.sysv if facts.in_container else (),
        remedy="they go along, in an IPC namespace that the restored worker shares with no other container",
        reason="SysVObjects",
        verdict=Verdict.WARN,
    )
