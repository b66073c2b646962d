"""Overlays that are really mounted, trees that are compared to the last attribute, and small shorthands."""

from __future__ import annotations

import ctypes
import hashlib
import os
import stat
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from hibernode.artifact import rootfs, rootfs_apply

LIMIT = 1 << 30
MTIME = 1_600_000_000_123_456_789
ACL = bytes.fromhex(
    "0200000001000600ffffffff02000700e803000004000400ffffffff10000700ffffffff20000000ffffffff"
)
"""A posix_acl_access: owner rw, user 1000 rwx, group r, mask rwx, others nothing."""

CAPABILITY = bytes.fromhex("0100000200040000000000000000000000000000")
"""security.capability, revision 2: cap_net_bind_service, effective and permitted."""


def mount(*arguments: str) -> None:
    """Mount something."""
    subprocess.run(["mount", *arguments], check=True, capture_output=True)


def unmount(path: Path) -> None:
    """Detach a mount."""
    subprocess.run(["umount", "-l", str(path)], check=True, capture_output=True)


@contextmanager
def tmpfs(path: Path, size: str = "64m") -> Iterator[Path]:
    """Mount a tmpfs on ``path`` for a while."""
    path.mkdir(exist_ok=True)
    mount("-t", "tmpfs", "-o", f"size={size},mode=755", "tmpfs", str(path))
    try:
        yield path
    finally:
        unmount(path)


@dataclass(frozen=True)
class Overlay:
    """An overlay on a lower directory that it may share with another."""

    lower: Path
    upper: Path
    merged: Path

    def save(self, tar: Path, **options: object) -> rootfs.Saved:
        """Save its diff into a new file."""
        with descriptor(self.upper) as upper, descriptor(self.merged) as merged, tar.open("wb") as out:
            return rootfs.save(upper, merged, out, **options)  # type: ignore[arg-type]


@contextmanager
def descriptor(path: Path | str, flags: int = os.O_RDONLY) -> Iterator[int]:
    """Open for a while."""
    fd = os.open(path, flags | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


class Overlays:
    """Makes overlays in a directory, and unmounts them."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.lower = base / "lower"
        self.lower.mkdir(exist_ok=True)
        self.count = 0
        self.cleanup = ExitStack()

    def make(self, options: str = "index=off") -> Overlay:
        """Mount one more on the same lower directory."""
        self.count += 1
        top = self.base / f"o{self.count}"
        upper, work, merged = (top / name for name in ("upper", "work", "merged"))
        for path in (upper, work, merged):
            path.mkdir(parents=True)
        made = f"lowerdir={self.lower},upperdir={upper},workdir={work},{options}"
        mount("-t", "overlay", "overlay", "-o", made, str(merged))
        self.cleanup.callback(unmount, merged)
        return Overlay(self.lower, upper, merged)


@contextmanager
def overlays(base: Path) -> Iterator[Overlays]:
    """Give a maker of overlays that cleans up."""
    maker = Overlays(base)
    with maker.cleanup:
        yield maker


def apply(target: Path, tar: Path, undo: Path, **options: object) -> object:
    """Apply a tar from a file to a directory."""
    options.setdefault("max_bytes", LIMIT)
    with descriptor(target) as root, descriptor(tar) as source, undo.open("wb") as out:
        return rootfs_apply.apply(root, source, out, **options)  # type: ignore[arg-type]


def take_back(target: Path, undo: Path, **options: object) -> object:
    """Undo from a file."""
    with descriptor(target) as root, descriptor(undo) as source:
        return rootfs_apply.undo(root, source, **options)  # type: ignore[arg-type]


def snapshot(top: Path) -> dict[bytes, tuple[object, ...]]:
    """Describe a tree by all that must be equal; a file's other names stand as the first of them."""
    found: dict[bytes, tuple[object, ...]] = {}
    first: dict[tuple[int, int], bytes] = {}
    base = os.fsencode(top)
    pending = [base]
    while pending:
        path = pending.pop()
        status = os.lstat(path)
        kind = stat.S_IFMT(status.st_mode)
        content: object = None
        blocks = 0
        group = b""
        if kind == stat.S_IFDIR:
            pending += sorted((os.path.join(path, name) for name in os.listdir(path)), reverse=True)
        elif kind == stat.S_IFLNK:
            content = os.readlink(path)
        elif kind == stat.S_IFREG:
            with open(path, "rb") as file:
                content = (status.st_size, hashlib.file_digest(file, "sha1").hexdigest())
            blocks = status.st_blocks // 128  # in 64 KiB: a few blocks more or less do not count
            if status.st_nlink > 1:
                group = first.setdefault((status.st_dev, status.st_ino), path.removeprefix(base))
        else:
            content = status.st_rdev
        xattrs = {
            name: os.getxattr(path, name, follow_symlinks=False)
            for name in os.listxattr(path, follow_symlinks=False)
        }
        found[path.removeprefix(base)] = (
            oct(status.st_mode),
            status.st_uid,
            status.st_gid,
            status.st_mtime_ns,
            content,
            tuple(sorted(xattrs.items())),
            group,
            blocks,
        )
    return found


def differences(
    a: dict[bytes, tuple[object, ...]], b: dict[bytes, tuple[object, ...]]
) -> dict[bytes, object]:
    """Name what differs between two snapshots."""
    return {
        path: (a.get(path), b.get(path)) for path in sorted(a.keys() | b.keys()) if a.get(path) != b.get(path)
    }


def fill(lower: Path) -> None:
    """Make an image: directories, files, links, attributes."""
    for name in (
        "etc",
        "usr/lib/deep/er",
        "var/cache",
        "opt/old",
        "opt/opaque/in",
        "mnt",
        "run",
        "tmp",
        "opt/renamed/sub",
    ):
        (lower / name).mkdir(parents=True, exist_ok=True)
    for name in (
        "etc/kept",
        "etc/modified",
        "etc/deleted",
        "usr/lib/a",
        "usr/lib/c",
        "usr/lib/deep/er/x",
        "opt/old/1",
        "opt/old/2",
    ):
        (lower / name).write_text(f"image {name}\n")
    for name in (
        "opt/opaque/gone",
        "opt/opaque/in/gone",
        "opt/opaque/again",
        "opt/renamed/big",
        "opt/renamed/sub/s",
    ):
        (lower / name).write_text(f"image {name}\n" * 1000)
    for name in ("to-dir", "to-link", "to-fifo", "chmod", "chown", "capability"):
        (lower / "etc" / name).write_text(name)
    (lower / "etc/dir-to-file/inner").mkdir(parents=True)
    (lower / "etc/dir-to-file/inner/f").write_text("f")
    (lower / "etc/dir-to-link").mkdir()
    (lower / "etc/link").symlink_to("kept")
    os.link(lower / "etc/kept", lower / "etc/kept-too")
    os.link(lower / "usr/lib/a", lower / "usr/lib/b")
    os.mkfifo(lower / "etc/fifo")
    os.setxattr(lower / "etc/capability", "security.capability", CAPABILITY)
    os.setxattr(lower / "opt/renamed/big", "user.note", b"image")
    os.utime(lower / "etc/kept", ns=(MTIME, MTIME))


def change(root: Path) -> None:
    """Change an image in every way, by the calls that a worker makes."""
    (root / "etc/modified").write_text("worker's\n")
    (root / "etc/deleted").unlink()
    (root / "etc/new").write_bytes(b"new" * 50_000)
    os.utime(root / "etc/new", ns=(-5_000_000_001, -5_000_000_001))
    subprocess.run(["rm", "-r", str(root / "usr/lib/deep"), str(root / "opt/opaque")], check=True)
    (root / "opt/opaque").mkdir(mode=0o711)
    (root / "opt/opaque/again").write_text("again")
    (root / "opt/opaque/sub").mkdir()
    (root / "opt/opaque/sub/file").write_text("file")
    (root / "etc/to-dir").unlink()
    (root / "etc/to-dir").mkdir()
    (root / "etc/to-dir/inner").write_text("inner")
    (root / "etc/to-link").unlink()
    (root / "etc/to-link").symlink_to("/outside/the/tree")
    (root / "etc/to-fifo").unlink()
    os.mkfifo(root / "etc/to-fifo", 0o640)
    subprocess.run(["rm", "-r", str(root / "etc/dir-to-file"), str(root / "etc/dir-to-link")], check=True)
    (root / "etc/dir-to-file").write_text("a file now")
    (root / "etc/dir-to-link").symlink_to("../opt")
    os.chmod(root / "etc/chmod", 0o4755)
    os.chown(root / "etc/chown", 1234, 4_000_000_000)
    os.lchown(root / "etc/to-link", 7, 8)
    os.setxattr(root / "etc/to-link", "trusted.of-a-link", b"1", follow_symlinks=False)
    os.setxattr(root / "usr/lib/c", "user.binary=100%\n", bytes(range(256)))
    os.setxattr(root / "usr", "trusted.dir", b"")
    os.setxattr(root / "etc/new", "system.posix_acl_access", ACL)
    os.setxattr(root / "etc/new", "security.capability", CAPABILITY)
    os.removexattr(root / "etc/capability", "security.capability")
    (root / "links").mkdir()
    (root / "links/1").write_text("linked")
    os.link(root / "links/1", root / "links/2")
    os.link(root / "links/1", root / "etc/3")
    sparse(root / "var/holes", 50 << 20, {0: b"a" * 5000, 10 << 20: b"b" * 300_000, (50 << 20) - 3: b"end"})
    sparse(root / "var/hole-at-end", 30 << 20, {4096: b"x" * 4096})
    sparse(root / "var/all-hole", 10 << 20, {})
    odd = os.fsencode(root) + b"/opt/\xff\xfe \n\xc3\xa4=%'\"\\*"
    os.mkdir(odd)
    with open(odd + b"/" + b"n" * 255, "wb") as file:
        file.write(b"odd")
    os.symlink(b"\xff" * 300, odd + b"/l")
    deep = root / "opt" / "/".join(["d" * 60] * 10)
    deep.mkdir(parents=True)
    (deep / "bottom").write_text("")
    subprocess.run(["mv", str(root / "opt/renamed"), str(root / "opt/other")], check=True)
    os.chmod(root / "opt/other/big", 0o600)
    (root / "opt/other/sub/t").write_text("t")
    os.chmod(root, 0o1755)
    os.setxattr(root, "user.root", b"root")
    for path in ("opt/opaque/sub", "opt", "etc", ""):
        os.utime(root / path, ns=(MTIME, MTIME))


def sparse(path: Path, size: int, parts: dict[int, bytes]) -> None:
    """Make a file with holes."""
    with path.open("wb") as file:
        for offset, data in parts.items():
            file.seek(offset)
            file.write(data)
        file.truncate(size)


def remove(path: Path) -> None:
    """Remove whatever is there."""
    subprocess.run(["rm", "-rf", str(path)], check=True)


def own_mounts() -> None:
    """Give this process, a child of a test, mounts of its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(0x20000) == 0  # CLONE_NEWNS
    mount("--make-rprivate", "/")
