"""Finding and taking away what test containers leave behind, by the token that all of it bears."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import struct
import subprocess
from pathlib import Path

from tests.real.node import until

CGROUPS = Path("/sys/fs/cgroup")
PREFIX = "hibernode-boxes-"
BASES = Path("/var/tmp")
"""A real disk: an overlay's upper layer needs one."""
CNI_RESULTS = Path("/var/lib/cni/results")
SIOCSIFFLAGS, SIOCBRDELBR = 0x8914, 0x89A1
"""<linux/sockios.h>"""


def cgroups_of(token: str) -> list[Path]:
    """List the cgroup directories whose names have the token, the deepest first."""
    found = (Path(top) for top, _, _ in os.walk(CGROUPS) if token in top)
    return sorted(found, key=lambda path: len(path.parts), reverse=True)


def processes_of(token: str) -> list[int]:
    """List the processes that bear the token in their command line or in their cgroup's name."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                text = (entry / "cmdline").read_bytes() + (entry / "cgroup").read_bytes()
                if token.encode() in text:
                    found.append(int(entry.name))
    return found


def mounts_of(token: str) -> list[str]:
    """List this namespace's mount points that have the token, the last mounted first."""
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return [point for point in reversed(points) if token in point]


def links_of(token: str) -> list[str]:
    """List the network interfaces of this machine that have the token."""
    return [name for name in os.listdir("/sys/class/net") if token in name]


def leftovers(token: str) -> list[str]:
    """List all there is with a token: processes, mounts, cgroups, interfaces."""
    return [
        *(f"process {pid}" for pid in processes_of(token)),
        *(f"mount {point}" for point in mounts_of(token)),
        *(f"cgroup {path}" for path in cgroups_of(token)),
        *(f"interface {name}" for name in links_of(token)),
    ]


def remove_cgroups(token: str) -> None:
    """Remove the cgroups of the token; they may still be busy for a moment after the last process's end."""

    def gone() -> bool:
        for path in cgroups_of(token):
            with contextlib.suppress(OSError):
                path.rmdir()
        return not cgroups_of(token)

    until(f"end of the cgroups of {token}", gone)


def thaw(token: str) -> None:
    """Let the processes in the cgroups of the token run: frozen in a dump they take no signal."""
    for path in cgroups_of(token):
        for name, value in (("freezer.state", "THAWED"), ("cgroup.freeze", "0")):
            with contextlib.suppress(OSError):
                if (path / name).exists():
                    (path / name).write_text(value)


def clear(base: Path) -> None:
    """Take away all that bears the token of ``base``, and it."""
    token = base.name.removeprefix(PREFIX)

    def ended() -> bool:
        thaw(token)
        for pid in processes_of(token):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not processes_of(token)

    until(f"end of the processes of {token}", ended)
    for point in mounts_of(token):
        subprocess.run(["umount", "--lazy", point], check=False, capture_output=True, timeout=60)
    remove_cgroups(token)
    for name in links_of(token):
        _delete_bridge(name)
    # Sockets of shims and results of the network plugins are at fixed places; an orderly end removes them.
    for address in base.glob("state/io.containerd.runtime.v2.task/*/*/address"):
        Path(address.read_text().removeprefix("unix://")).unlink(missing_ok=True)
        for result in CNI_RESULTS.glob(f"*-{address.parent.name}-*"):
            result.unlink()
    shutil.rmtree(base)


def _delete_bridge(name: str) -> None:
    """Take a bridge down and away; a machine need not have the ``ip`` program."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sH14x", name.encode(), 0))
        fcntl.ioctl(control, SIOCBRDELBR, struct.pack("16s", name.encode()))


def sweep() -> None:
    """Clear what test runs that were killed have left behind."""
    for base in BASES.glob(f"{PREFIX}*"):
        with contextlib.suppress(FileNotFoundError, BlockingIOError):
            owner = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
                clear(base)
            finally:
                os.close(owner)
