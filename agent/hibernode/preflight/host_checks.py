"""The checks of ``hibernode doctor``: this machine, without a worker. They ask, and repair nothing."""

from __future__ import annotations

import contextlib
import os
import shlex
import stat as st
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hibernode.criu.find import MAX_OUTPUT_BYTES, ask
from hibernode.host import linux, procfs
from hibernode.preflight import store_checks
from hibernode.preflight.facts import CAP_SYS_RESOURCE, StoreFacts, store_facts
from hibernode.preflight.rows import row, size
from hibernode.preflight.store_checks import FILE_SYSTEMS, REMOTE_FILE_SYSTEMS, SPARE_MEMORY_BYTES
from hibernode.workload import Finding, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hibernode.criu.find import Criu
    from hibernode.settings import Settings

MIN_KERNEL: Final = (5, 12)
"""The first with all that is used here: openat2 5.6, CAP_CHECKPOINT_RESTORE 5.9, mount_setattr 5.12."""

NEEDED_CAPABILITIES: Final = {
    "CAP_DAC_READ_SEARCH": 2,
    "CAP_KILL": 5,
    "CAP_NET_ADMIN": 12,
    "CAP_SYS_PTRACE": 19,
    "CAP_SYS_ADMIN": 21,
    "CAP_CHECKPOINT_RESTORE": 40,
}
CRIU_CHECK_SECONDS: Final = 60.0
KUBELET: Final = Path("/var/lib/kubelet")
PROFILE: Final = "seccomp/profiles/block-iouring.json"
PROFILE_LIMIT: Final = 1 << 20
GROUP_OR_OTHERS_WRITE: Final = 0o022
OTHERS_WRITE: Final = 0o002


def host_findings(
    settings: Settings,
    criu: Criu | None,
    *,
    shipped_profile: bytes | None = None,
    kubelet: Path = KUBELET,
) -> list[Finding]:
    """Judge this machine for ``hibernode doctor``. Reads and asks, repairs nothing.

    ``shipped_profile``: the bytes of block-iouring.json, to compare with the one that kubelet has.
    """
    store = store_facts(settings.store.path)
    version = None if criu is None else criu.version
    return [
        check_kernel(os.uname().release),
        check_syscalls(),
        check_io_uring_sysctl(),
        check_capabilities(procfs.read_status(os.getpid()).cap_eff),
        check_inotify_limits(),
        store_checks.check_criu_present(version),
        store_checks.check_criu_version(version),
        check_criu_self_test(criu),
        store_checks.check_store_private(store),
        store_checks.check_store_filesystem(store),
        check_disk(store, settings),
        check_ram(procfs.mem_available_bytes()),
        check_signals(settings.signals.path),
        check_own_paths(settings),
        check_profile(shipped_profile, kubelet),
    ]


def check_kernel(release: str) -> Finding:
    """Check that the kernel has what is used here."""
    return row(
        "host.kernel",
        f"Linux {'.'.join(map(str, MIN_KERNEL))} or later",
        [release] if store_checks.numbers(release) < MIN_KERNEL else [],
        remedy="a newer kernel",
        reason="KernelTooOld",
        fine=release,
    )


def check_syscalls() -> Finding:
    """Check that pidfd_open and openat2 answer: a filter around the agent may forbid what the kernel has."""

    def offenders() -> Iterator[str]:
        try:
            os.close(linux.pidfd_open(os.getpid()))
        except OSError as error:
            yield f"pidfd_open: {error.strerror}"
        try:
            flags = os.O_PATH | os.O_CLOEXEC
            os.close(linux.openat2(linux.AT_FDCWD, "/", flags, resolve=linux.RESOLVE_NO_SYMLINKS))
        except OSError as error:
            yield f"openat2: {error.strerror}"

    return row(
        "host.syscalls",
        "pidfd_open, openat2",
        offenders(),
        remedy="allow them in the seccomp profile that the agent itself runs under",
        reason="SyscallMissing",
        fine="both answer",
    )


def check_io_uring_sysctl() -> Finding:
    """Say whether workers can open rings at all (FC-01): CRIU's own check says nothing of it."""
    path = Path("/proc/sys/kernel/io_uring_disabled")
    expected = "io_uring forbidden, by kernel.io_uring_disabled or by the workers' seccomp profile"
    try:
        value = path.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return Finding(
            "host.io_uring", Verdict.OK, expected, "no such sysctl: only the profile can forbid it"
        )
    return row(
        "host.io_uring",
        expected,
        [f"kernel.io_uring_disabled = {value}"] if value == "0" else [],
        remedy="run workers under block-iouring.json ('hibernode seccomp install'), or sysctl "
        "kernel.io_uring_disabled=2",
        reason="IoUringAllowed",
        verdict=Verdict.WARN,
        fine=f"kernel.io_uring_disabled = {value}",
    )


def check_capabilities(effective: int) -> Finding:
    """Check that the agent has the capabilities that a dump and a restore take."""
    missing = [name for name, bit in NEEDED_CAPABILITIES.items() if not effective >> bit & 1]
    if missing:
        return row(
            "host.capabilities",
            ", ".join(NEEDED_CAPABILITIES),
            [f"without {name}" for name in missing],
            remedy="run as root, in a container with these capabilities added",
            reason="CapabilityMissing",
        )
    return row(
        "host.capabilities",
        "CAP_SYS_RESOURCE besides",
        [] if effective >> CAP_SYS_RESOURCE & 1 else ["without CAP_SYS_RESOURCE"],
        remedy="only root's workers can be dumped, and none whose limits are above the agent's own restored",
        reason="CapabilityMissing",
        verdict=Verdict.WARN,
        fine="all",
    )


def check_inotify_limits() -> Finding:
    """Check that an instance of inotify is left for the agent, of those that its user's processes share."""
    try:
        limit = int(Path("/proc/sys/fs/inotify/max_user_instances").read_text(encoding="ascii"))
    except OSError as error:
        return Finding("host.inotify", Verdict.SKIP, "", f"cannot be read: {error.strerror}")
    used = _inotify_instances(os.getuid())
    return row(
        "host.inotify",
        "an inotify instance to spare",
        [f"{used} of {limit} instances in use by uid {os.getuid()}"] if used >= limit else [],
        remedy="raise fs.inotify.max_user_instances; until then the agent polls",
        reason="InotifyExhausted",
        verdict=Verdict.WARN,
        fine=f"{used} of {limit} instances in use",
    )


def _inotify_instances(uid: int) -> int:
    seen = 0
    for pid in procfs.all_stats():
        with contextlib.suppress(OSError):  # it ended, or is not ours to look at
            if procfs.read_status(pid).uids[0] != uid:
                continue
            for name in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208 - names, not paths
                with contextlib.suppress(OSError):
                    seen += os.readlink(f"/proc/{pid}/fd/{name}") == "anon_inode:inotify"  # noqa: PTH115 - a text
    return seen


def check_criu_self_test(criu: Criu | None) -> Finding:
    """Let ``criu check`` say what the kernel lacks."""
    expected = "'criu check' succeeds"
    if criu is None:
        return Finding("criu.self_test", Verdict.SKIP, expected, "no criu")
    try:
        code, text = ask([*criu.argv, "check"], CRIU_CHECK_SECONDS, MAX_OUTPUT_BYTES)
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    else:
        problem = "" if code == 0 else " | ".join(text.strip().splitlines()[-3:]) or "it failed"
    return row(
        "criu.self_test",
        expected,
        [problem] if problem else [],
        remedy=f"see what it says: {shlex.join([*criu.argv, 'check'])}",
        reason="CriuSelfTestFailed",
        fine="it does",
    )


def check_disk(store: StoreFacts, settings: Settings) -> Finding:
    """Check that something is free above the floor."""
    floor = settings.store.min_free_bytes
    return row(
        "store.free",
        f"more than {size(floor)} free (store.min_free_bytes)",
        [f"{size(store.free_bytes)} free on {store.path}"] if store.free_bytes <= floor else [],
        remedy="free space ('hibernode gc'), or lower store.min_free_bytes",
        reason="NoSpace",
        fine=f"{size(store.free_bytes)} free",
    )


def check_ram(available: int) -> Finding:
    """Check that some memory is left."""
    return row(
        "memory.available",
        f"{size(SPARE_MEMORY_BYTES)} available",
        [f"{size(available)} available"] if available < SPARE_MEMORY_BYTES else [],
        remedy="a restore takes as much memory as the worker had",
        reason="InsufficientMemory",
        verdict=Verdict.WARN,
        fine=f"{size(available)} available",
    )


def check_signals(path: Path) -> Finding:
    """Check that the signal directory can be watched, and no worker can remove another's files."""
    expected = "a directory, sticky if everybody may write"
    try:
        stat = path.lstat()
    except OSError as error:
        return Finding(
            "signals.path",
            Verdict.WARN,
            expected,
            f"{path}: {error.strerror}",
            "the agent waits for it; DirectoryOrCreate or mkdir makes it",
            "NoSignalDirectory",
        )
    if not st.S_ISDIR(stat.st_mode):
        return row(
            "signals.path",
            expected,
            [f"{path} is a link or no directory"],
            remedy="set signals.path to the directory itself",
            reason="NoSignalDirectory",
        )
    name = FILE_SYSTEMS.get(linux.filesystem_type(str(path)), "")

    def offenders() -> Iterator[str]:
        if stat.st_mode & OTHERS_WRITE and not stat.st_mode & st.S_ISVTX:
            yield f"{path} has mode {st.S_IMODE(stat.st_mode):04o}"
        if name in REMOTE_FILE_SYSTEMS:
            yield f"{path} is on {name}, where inotify sees nothing: the agent polls"

    return row(
        "signals.path",
        expected,
        offenders(),
        remedy=f"chmod +t {path}; put it on a local file system",
        reason="SignalDirectory",
        verdict=Verdict.WARN,
        fine=f"{path}, mode {st.S_IMODE(stat.st_mode):04o}",
    )


def check_own_paths(settings: Settings) -> Finding:
    """Check that nobody but root can change what the agent keeps, or answer in its place."""

    def offenders() -> Iterator[str]:
        for path in (settings.state_dir, settings.server.socket.parent):
            try:
                stat = path.stat()
            except FileNotFoundError:
                continue
            if stat.st_uid != 0:
                yield f"{path} belongs to uid {stat.st_uid}"
            if stat.st_mode & GROUP_OR_OTHERS_WRITE:
                yield f"{path} has mode {st.S_IMODE(stat.st_mode):04o}"

    return row(
        "host.paths",
        "state_dir and the directory of server.socket belong to root, who alone writes there",
        offenders(),
        remedy="chown root and chmod go-w what is named",
        reason="PathNotPrivate",
        fine="they do",
    )


def check_profile(shipped: bytes | None, kubelet: Path) -> Finding:
    """Check that the seccomp profile that kubelet hands to workers is the one that is shipped."""
    expected = f"{PROFILE} below {kubelet}, as shipped"
    if not kubelet.is_dir():
        return Finding("seccomp.profile", Verdict.SKIP, expected, f"no {kubelet}: this is no Kubernetes node")
    if shipped is None:
        return Finding("seccomp.profile", Verdict.SKIP, expected, "no shipped profile to compare with")
    path = kubelet / PROFILE
    try:
        with path.open("rb") as file:
            same = file.read(PROFILE_LIMIT) == shipped
        problem = "" if same else f"{path} differs from the shipped one"
    except OSError as error:
        problem = f"{path}: {error.strerror}"
    return row(
        "seccomp.profile",
        expected,
        [problem] if problem else [],
        remedy=f"hibernode seccomp install {path.parent.parent}",
        reason="SeccompProfile",
        verdict=Verdict.WARN,
        fine="the same",
    )
