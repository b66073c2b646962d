"""Root file systems for test containers, made once and kept below ``build/images``.

Their names have a digest of what they are made from. They are lower layers: nobody writes into them. Both the
Debian and the busybox image hold the same small tree for the workers to change.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import platform
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
CACHE = HERE.parents[1] / "build" / "images"
PYTHON_WORKER, STATIC_WORKER = "/usr/bin/box-worker", "/bin/static-worker"
"""Where the workers are in the Debian and in the busybox image."""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ROOTS = ("base-files", "coreutils", "dash", "libpython3-stdlib", "python3-minimal")
NOT_NEEDED = re.compile(
    r"perl|libperl|dpkg$|install-info|debianutils|.*awk|libmpfr|libsigsegv|mailcap|mime-support|media-types|"
    r"libtirpc|libnsl|libk5|libkrb5|libgssapi|libkeyutils|libcom-err|libdb|libgdbm|libsqlite|tar$|base-passwd"
)
"""What dependencies of packaging scripts bring in, and modules no worker imports: half of the size."""
UNMERGED = ("bin", "sbin", "lib", "lib64")


@contextmanager
def _locked() -> Iterator[None]:
    """Let one process of several build."""
    CACHE.mkdir(parents=True, exist_ok=True)
    fd = os.open(CACHE, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _digest(*parts: bytes) -> str:
    """Shorten what an image is made from to a name."""
    return hashlib.sha256(b"\0".join((Path(__file__).read_bytes(), *parts))).hexdigest()[:12]


def _made(kind: str, parts: tuple[bytes, ...], build: Callable[[Path], None]) -> Path:
    """Give the directory of this kind and digest; ``build`` fills it when it is not there yet."""
    final = CACHE / f"{kind}-{_digest(*parts)}"
    with _locked():
        if not final.exists():
            work = Path(tempfile.mkdtemp(prefix=f".{kind}-", dir=CACHE))
            try:
                work.chmod(0o755)
                build(work)
                work.rename(final)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    return final


def _run(*args: str | Path, cwd: Path | None = None) -> str:
    """Run a tool to its end; its output is in the error when it fails."""
    done = subprocess.run(args, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, (args, done.stdout[-2000:], done.stderr[-2000:])
    return done.stdout


def _worker_files(root: Path) -> None:
    """Lay down what the workers change."""
    for path, text in {
        "etc/box/changed": "as the image has it\n",
        "etc/box/doomed": "to be deleted\n",
        "etc/box/kept": "never touched\n",
        "opt/box/old": "in a directory to be made anew\n",
        "etc/passwd": "root:x:0:0:root:/:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n",
        "etc/group": "root:x:0:\nnogroup:x:65534:\n",
        "srv/.keep": "",
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)


def _packages() -> list[str]:
    """List the packages of the Debian image by the machine's own archive."""
    options = [
        f"--no-{kind}" for kind in ("recommends", "suggests", "conflicts", "breaks", "replaces", "enhances")
    ]
    listing = _run("apt-cache", "depends", "--recurse", *options, *ROOTS)
    names = {line for line in listing.splitlines() if re.match(r"\w", line)}
    return sorted(name for name in names if not NOT_NEEDED.match(name))


def _download(folder: Path) -> None:
    """Fetch the packages; a fresh machine has no list of them yet."""
    try:
        _run("apt-get", "-q", "download", *_packages(), cwd=folder)
    except AssertionError:
        _run("apt-get", "-q", "update")
        _run("apt-get", "-q", "download", *_packages(), cwd=folder)


def _build_debian(root: Path) -> None:
    """Unpack the packages and try the Python in it, which leaves its compiled modules there."""
    for name in UNMERGED:
        (root / "usr" / name).mkdir(parents=True)
        (root / name).symlink_to(f"usr/{name}")
    for name in ("proc", "sys", "dev", "run", "tmp"):
        (root / name).mkdir()
    with tempfile.TemporaryDirectory() as folder:
        _download(Path(folder))
        for package in sorted(Path(folder).glob("*.deb")):
            _unpack(package, root)
    for name in ("doc", "locale", "man", "info", "lintian", "bug"):
        shutil.rmtree(root / "usr/share" / name, ignore_errors=True)
    (root / "tmp").chmod(0o1777)
    (root / PYTHON_WORKER[1:]).write_bytes(b"#!/usr/bin/python3\n" + _python_worker())
    (root / PYTHON_WORKER[1:]).chmod(0o755)
    if not (root / "usr/bin/sh").exists():
        (root / "usr/bin/sh").symlink_to("dash")
    _worker_files(root)
    _run("chroot", root, "/usr/bin/python3", "-c", "import multiprocessing, subprocess, asyncio, signal")
    _run("chroot", root, PYTHON_WORKER, "--help")


def _unpack(package: Path, root: Path) -> None:
    """Unpack one package; links in the way of its directories stay, as /lib is one."""
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", package], stdout=subprocess.PIPE) as data:
        _run_tar(["-x", "--keep-directory-symlink", "-C", root], data)


def _run_tar(options: list[str | Path], data: subprocess.Popen[bytes]) -> None:
    """Feed ``data`` to GNU tar."""
    tar = subprocess.run(["tar", *options], stdin=data.stdout, capture_output=True, timeout=120, check=False)
    assert tar.returncode == 0, (options, tar.stderr)


def _python_worker() -> bytes:
    return (HERE / "box_worker.py").read_bytes()


@cache
def debian() -> Path:
    """Give a Debian with Python, and the Python worker at :data:`PYTHON_WORKER`."""
    system = Path("/etc/os-release").read_bytes() + platform.machine().encode()
    return _made("debian", (system, _python_worker()), _build_debian)


@cache
def busybox() -> Path:
    """Give an image of busybox and the static worker at :data:`STATIC_WORKER`: no /run, no /tmp, no tar."""
    source = shutil.which("busybox")
    assert source, "no busybox on this machine: apt-get install busybox-static"
    worker = static_worker()

    def build(root: Path) -> None:
        (root / "bin").mkdir()
        shutil.copy(source, root / "bin/busybox")
        for applet in _run(source, "--list").split():
            if applet not in {"busybox", "tar"}:
                (root / "bin" / applet).symlink_to("busybox")
        shutil.copy(worker, root / STATIC_WORKER[1:])
        _worker_files(root)

    return _made("busybox", (Path(source).read_bytes(), worker.read_bytes()), build)


@cache
def empty(binary: Path) -> Path:
    """Give an image with nothing but this static program, at ``/<its name>``."""
    return _made(
        "empty", (binary.name.encode(), binary.read_bytes()), lambda root: _copy(binary, root / binary.name)
    )


def _copy(source: Path, target: Path) -> None:
    """Copy a program with its mode."""
    shutil.copy(source, target)


@cache
def static_worker() -> Path:
    """Build ``static_worker.c``."""
    return compiled("static-worker", (HERE / "static_worker.c").read_text())


@cache
def pause() -> Path:
    """Build what holds a pod's namespaces: it reaps, and ends when it is told to."""
    return compiled(
        "pause",
        "#include <signal.h>\n#include <stdlib.h>\n#include <unistd.h>\n"
        "static void end(int number) { _exit(number == SIGTERM || number == SIGINT ? 0 : 1); }\n"
        "int main(void) {\n"
        "  signal(SIGTERM, end); signal(SIGINT, end); signal(SIGCHLD, SIG_IGN); for (;;) pause();\n}\n",
    )


def compiled(name: str, source: str) -> Path:
    """Compile a C program, static, to a file called ``name``."""

    def build(folder: Path) -> None:
        (folder / f"{name}.c").write_text(source)
        _run("gcc", "-O2", "-static", "-pthread", "-o", folder / name, folder / f"{name}.c")

    return _made(name, (source.encode(),), build) / name


def archive(image: Path) -> Path:
    """Give the image as an archive that ``ctr image import`` takes, under the name of :func:`reference`."""

    def build(folder: Path) -> None:
        _run(
            "tar",
            "--numeric-owner",
            "--sort=name",
            "--mtime=@0",
            "-cf",
            folder / "layer.tar",
            "-C",
            image,
            ".",
        )
        diff = _run("sha256sum", folder / "layer.tar").split()[0]
        config = {
            "architecture": {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()],
            "os": "linux",
            "config": {"Cmd": ["/pause"], "Env": [f"PATH={PATH}"], "WorkingDir": "/"},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{diff}"]},
        }
        manifest = [{"Config": "config.json", "RepoTags": [reference(image)], "Layers": ["layer.tar"]}]
        with tarfile.open(folder / "image.tar", "w") as tar:
            for name, content in (("config.json", config), ("manifest.json", manifest)):
                data = json.dumps(content).encode()
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
            tar.add(folder / "layer.tar", "layer.tar")
        (folder / "layer.tar").unlink()

    return _made("archive", (image.name.encode(),), build) / "image.tar"


def reference(image: Path) -> str:
    """Name the image as containerd does."""
    return f"box.local/{image.name}:1"
