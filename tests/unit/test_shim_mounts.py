"""A worker's mounts are made those of its container: two real mount namespaces on the same file systems."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from hibernode import shim_mounts
from hibernode.shim_mounts import MountsDifferError, fit, parsed
from tests.unit import mountinfo_samples as samples
from tests.unit.box_kit import box

WORKER = """
import os, sys
from hibernode.host import linux
from hibernode.host.linux import detach, mount
BIND, REMOUNT, PRIVATE, SHARED, RELATIME = 4096, 32, 1 << 18, 1 << 20, 1 << 21
def bind(path, flags=None):
    if flags is None: mount(path, path, "none", BIND)
    else: mount("none", path, "none", BIND | REMOUNT | flags)
fd = os.open(f"/proc/{sys.argv[1]}/ns/mnt", os.O_RDONLY)
linux.setns(fd, linux.CLONE_NEWNS)
linux.unshare(linux.CLONE_NEWNS)
exec(sys.argv[2])
print("ready", flush=True)
sys.stdin.read()
"""
"""Begins with the container's mounts, and changes them as it is told."""

FLAGS = """
mount -t tmpfs -o size=1m data data; mkdir data/dir; touch data/file
mount --bind data/dir data/dir; mount -o remount,bind,{flags} data/dir
"""
PARTS = """
for part in sys irq; do mount --bind proc/$part proc/$part; mount -o remount,bind,ro,nosuid proc/$part; done
touch data/null; mount --bind data/null proc/version
mount -t tmpfs -o ro,size=4k mask proc/fs
"""
NO_PARTS = """
for line in open("/proc/1/mountinfo").read().splitlines():
    if line.split()[4].startswith("/proc/"): detach(line.split()[4])
"""

SAME: dict[str, tuple[str, str]] = {
    "the same already": (PARTS, ""),
    "stricter flags": (
        FLAGS.format(flags="ro,nosuid,nodev,noexec,noatime,nodiratime"),
        'bind("/data/dir", RELATIME)',
    ),
    "laxer flags": (FLAGS.format(flags="rw"), 'bind("/data/dir", 1 | 2 | 4 | 8 | 1024)'),
    "links that are not followed": (FLAGS.format(flags="nosymfollow"), 'bind("/data/dir", RELATIME)'),
    "strict access times": (FLAGS.format(flags="strictatime"), 'bind("/data/dir", RELATIME)'),
    "a root that can be written": ("", 'bind("/", 1)'),
    "/proc itself": ("mount -o remount,bind,nosuid,noexec proc", 'bind("/proc", 0)'),
    "parts of /proc and masks": (PARTS, NO_PARTS),
    "parts of /proc that are none": ("", 'bind("/proc/sys"); bind("/proc/sys", 1); bind("/proc/irq")'),
    "a part where a mask is": ("touch f; mount --bind f proc/version", f'{NO_PARTS}\nbind("/proc/version")'),
    "another /proc elsewhere": ("", 'mount("/proc", "/data", "none", BIND)'),
    "names with odd letters": (
        r"""for n in 'a b' $'c\td' $'e\nf' 'g\h' 'é'; do mkdir "$n"; mount -t tmpfs none "$n"; done""",
        "for n in ('a b', 'c\\td', 'e\\nf', 'g\\\\h', 'é'): detach('/' + n)",
    ),
    "mounts on mounts": (
        "for d in data data/b data/b/c; do mkdir -p $d; mount -t tmpfs none $d; done",
        'detach("/data")',
    ),
}


@contextmanager
def both(base: Path, container: str, worker: str) -> Iterator[tuple[int, int]]:
    """Start a container whose root a bash script has filled, and a worker that begins with its mounts."""
    (base / "root").mkdir()
    with box(base / "root", container) as pid:
        command = [sys.executable, "-c", WORKER, str(pid), worker]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            try:
                assert process.stdout.readline() == b"ready\n"
                yield pid, process.pid
            finally:
                process.communicate()


def fitted(container: int, worker: int) -> None:
    """Do it in a thread that ends."""
    with (
        open(f"/proc/{container}/ns/mnt", "rb") as one,
        open(f"/proc/{worker}/ns/mnt", "rb") as other,
        ThreadPoolExecutor(1) as pool,
    ):
        pool.submit(fit, one.fileno(), other.fileno()).result()


def mounted(pid: int) -> list[tuple[str, ...]]:
    """List what is mounted where, and how."""
    lines = [line.split() for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines()]
    return sorted((fields[4], fields[2], fields[3], fields[5]) for fields in lines)


def mounted_here(path: Path) -> list[str]:
    """List the mounts of the test's own namespace: below ``path``, and where no other test mounts."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    others = ("/tmp/", "/var/tmp/")
    return [line for line in lines if str(path) in line or not line.split()[4].startswith(others)]


@pytest.mark.parametrize("case", SAME)
def test_the_mounts_are_the_same_afterwards(tmp_path: Path, case: str) -> None:
    """Whatever was more, less or other; those of the container and the node are as before."""
    with both(tmp_path, *SAME[case]) as (container, worker):
        before, node = mounted(container), mounted_here(tmp_path)
        assert (mounted(worker) == before) == (case == "the same already")
        fitted(container, worker)
        assert mounted(worker) == mounted(container) == before
        assert mounted_here(tmp_path) == node


def test_nothing_that_is_added_is_seen_elsewhere(tmp_path: Path) -> None:
    """A mount that shares with others what is mounted on it does so no more."""
    container = (
        "mount -t tmpfs none data; mkdir data/dir; mount --make-shared data; mount -t tmpfs none data/dir"
    )
    worker = (
        'mount("none", "/data", "none", PRIVATE); detach("/data/dir"); mount("none", "/data", "none", SHARED)'
    )
    with both(tmp_path, container, worker) as (one, other):
        assert "shared:" in Path(f"/proc/{other}/mountinfo").read_text()
        fitted(one, other)
        assert "shared:" not in Path(f"/proc/{other}/mountinfo").read_text()
        assert mounted(one) == mounted(other)


REFUSED: dict[str, tuple[str, str, str]] = {
    "a mount that is the worker's alone": ("", 'mount("none", "/data", "tmpfs")', "another mount at /data"),
    "another mount in its place": (
        "mount -t tmpfs none data",
        'detach("/data"); mount("none", "/data", "tmpfs")',
        "another mount at /data",
    ),
    "a file that is written": (
        "mount -t tmpfs none data; mount -o remount,bind,ro data",
        'bind("/data", 0); held = open("/data/file", "w")',
        "/data is read-only in the container",
    ),
    "a covered mount": (
        "mkdir data/dir; mount -t tmpfs none data/dir; mount -t tmpfs none data",
        'detach("/data"); detach("/data/dir")',
        "/data/dir",
    ),
    "no /proc": ("mount --bind proc/sys proc/sys", NO_PARTS + '\ndetach("/proc")', "has no /proc"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_an_error(tmp_path: Path, case: str) -> None:
    """The mount is named; the container's are as before."""
    container, worker, words = REFUSED[case]
    with both(tmp_path, container, worker) as (one, other):
        before = mounted(one)
        with pytest.raises(MountsDifferError, match=words):
            fitted(one, other)
        assert mounted(one) == before


def test_a_proc_with_other_options_is_named(tmp_path: Path) -> None:
    """What /proc hides is an option of the file system, which no flag of the mount can make up for."""
    worker = 'detach("/proc"); mount("proc", "/proc", "proc", 0)'
    container = "umount proc; mount -t proc -o hidepid=2 proc proc"
    refused = pytest.raises(MountsDifferError, match=r"the worker has .* at /proc, .*hidepid")
    with both(tmp_path, container, worker) as (one, other), refused:
        fitted(one, other)


@pytest.mark.parametrize(
    "text", [samples.RUNC_V1, samples.CTR, samples.POD_V2, samples.NVIDIA, samples.OLD_ROOTS]
)
def test_every_mountinfo_is_read(text: str) -> None:
    """One root, above is before below, and a /proc is the container's own only if it is mounted at /proc."""
    mounts = list(parsed(text.encode()).values())
    places = [mount.place for mount in mounts]
    assert places.count("/") == 1
    assert all("/".join(place.split("/")[:-1]) not in places[n:] for n, place in enumerate(places))
    own = {mount.place for mount in mounts if mount.own_proc}
    assert "/proc" in own
    assert own.isdisjoint({"/host/proc", "/proc/driver/nvidia/gpus/0000:3b:00.0", "/sys"})


def test_too_many_mounts_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is cut off is not taken for the whole."""
    monkeypatch.setattr(shim_mounts, "MAX_BYTES", 10)
    with both(tmp_path, "", "") as (one, other), pytest.raises(MountsDifferError, match="more mounts"):
        fitted(one, other)
