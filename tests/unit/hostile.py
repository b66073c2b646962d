"""A directory that somebody hostile writes to: odd things to put there, and programs that swap them."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hibernode.host.safefs import Dir

SECRET = b"the secret"
PUBLIC = b"public"


TEMPORARY = Path(tempfile.gettempdir())


def open_descriptors(below: Path = TEMPORARY) -> int:
    """Count this process's open descriptors of files below a directory; its other threads have others."""
    links = []
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(fd))
    return sum(link.startswith(str(below)) for link in links)


@contextlib.contextmanager
def directory_beside_a_secret(path: Path) -> Iterator[Dir]:
    """Open ``path``/top beside ``path``/outside/secret; no descriptor may be left over afterwards."""
    (path / "outside").mkdir()
    (path / "outside" / "secret").write_bytes(SECRET)
    (path / "outside" / "secret").chmod(0o640)
    before = open_descriptors(path)
    with Dir.open(path / "top", create=True) as directory:
        yield directory
    assert open_descriptors(path) == before


@contextlib.contextmanager
def secret_is_kept(top: Dir) -> Iterator[Path]:
    """Name the secret beside ``top``; it must be as it was afterwards, and alone."""
    path = top.path.parent / "outside" / "secret"
    yield path
    assert path.read_bytes() == SECRET
    assert path.stat().st_mode & 0o777 == 0o640
    assert list(path.parent.iterdir()) == [path]


def plain(path: Path) -> None:
    path.write_bytes(PUBLIC)


def make_device(path: Path) -> None:
    os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))  # /dev/zero, which never ends


def make_block_device(path: Path) -> None:
    os.mknod(path, stat.S_IFBLK | 0o666, os.makedev(259, 1048575))


def make_socket(path: Path) -> None:
    parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            # A socket's path holds 107 bytes; through the descriptor any directory is near.
            sock.bind(f"/proc/self/fd/{parent}/{path.name}")
    finally:
        os.close(parent)


def make_sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def relative_link(path: Path) -> None:
    path.symlink_to("../outside/secret")


def absolute_link(path: Path) -> None:
    path.symlink_to(path.parent.parent / "outside" / "secret")


def link_inside(path: Path) -> None:
    (path.parent / "target").write_bytes(PUBLIC)
    path.symlink_to("target")


def dangling_link(path: Path) -> None:
    path.symlink_to("../outside/new")


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def hard_link(path: Path) -> None:
    os.link(path.parent.parent / "outside" / "secret", path)


@contextlib.contextmanager
def attacker(code: str, *args: object):
    """Run ``code`` in a process of its own, on another core, from its ``ready`` until the block ends."""
    with subprocess.Popen(
        [sys.executable, "-c", code, *map(str, args)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"ready\n"
            yield process
            assert process.poll() is None, "the attacker has died, so nothing was shown"
        finally:
            process.kill()
