"""Which CRIU is run: found, trusted, new enough.

CRIU runs as root on other people's processes, so a program that somebody else could change is not run,
nor one whose loader, libraries or directories they could change.
"""

from __future__ import annotations

import fcntl
import functools
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from hibernode.errors import HibernodeError, NotFoundError, RefusedError

MIN_VERSION: Final = (4, 2)
"""4.1.1 fails on every TCP and UDP socket on kernel 6.18: it asks for SO_PASSCRED, now refused on them."""

SYSTEM_PREFIX: Final = Path("/opt/hibernode/criu")
"""Where the container image and scripts/install-criu.sh put a private tree."""

REMEDY: Final = "make setup"
VERSION_SECONDS: Final = 10.0
KILL_SECONDS: Final = 5.0
"""A program that was killed and is not gone by then waits in a driver; it is left behind."""

MAX_VERSION_BYTES: Final = 4096
MAX_WRAPPER_BYTES: Final = 4096
MAX_LIBRARIES: Final = 10_000
MAX_OUTPUT_BYTES: Final = 64 << 10
"""Of what a program prints that we ask; it is held in memory."""

_WORD: Final = r"([A-Za-z0-9_./:+-]+|'(?:[^'\n]|'\\'')*')"
_WRAPPER: Final = re.compile(rf'#!/bin/sh\nexec {_WORD} --library-path {_WORD} {_WORD} "\$@"\n')
"""What scripts/install-criu.sh writes: one loader, its libraries, one program."""

_VERSION: Final = re.compile(r"^Version: (\d+(?:\.\d+)*)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Criu:
    """A CRIU that may be run.

    ``argv`` is how it is started: of a private tree the loader itself, so that no shell stands between.
    ``path`` is where it was found.
    """

    argv: tuple[str, ...]
    version: str
    path: str


def clean_env() -> dict[str, str]:
    """Build the whole environment of a CRIU; nothing of ours (LD_PRELOAD, CRIU_*, HOME) is passed on."""
    return {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}


def find_criu(
    setting: str = "",
    *,
    prefix: Path = Path(sys.prefix),
    search: str | None = None,
    system: Path = SYSTEM_PREFIX,
) -> Criu:
    """Find the CRIU to run.

    That is ``setting`` and nothing else if it is given, else the first usable one of
    ``prefix``/libexec/criu, ``search`` (PATH when None) and ``system``. ``criu --version`` runs once for
    each program, until it changes.

    :raises NotFoundError: there is none.
    :raises RefusedError: it is too old, does not run, or others than root could change it.
    """
    if setting:
        if not setting.startswith("/"):
            raise _refused(setting, "is not an absolute path", "RelativePath")
        return _usable(Path(setting), Path("/"))
    problem: HibernodeError = NotFoundError(
        "no criu on this machine", remedy=f"{REMEDY}, or set criu.binary", reason="CriuMissing"
    )
    for path, top in _candidates(prefix, search, system):
        try:
            return _usable(path, top)
        except NotFoundError:
            continue
        except RefusedError as error:
            if isinstance(problem, NotFoundError):
                problem = error
    raise problem


def _candidates(prefix: Path, search: str | None, system: Path) -> Iterator[tuple[Path, Path]]:
    """Yield each place and the directory above which nothing is checked.

    Above our own prefix nothing is: whoever could change that could change the Python that runs here.
    """
    yield prefix / "libexec/criu/bin/criu", prefix.resolve()
    on_path = shutil.which("criu", path=search)
    if on_path is not None and on_path.startswith("/"):
        yield Path(on_path), Path("/")
    yield system / "bin/criu", Path("/")


def _usable(path: Path, top: Path) -> Criu:
    try:
        real = path.resolve(strict=True)
        status = real.stat()
    except (OSError, RuntimeError):  # a loop of links is a RuntimeError before Python 3.13
        raise NotFoundError(
            f"{path}: no such program", remedy=f"{REMEDY}, or set criu.binary", reason="CriuMissing"
        ) from None
    if not stat.S_ISREG(status.st_mode) or not status.st_mode & 0o111:
        raise _refused(path, "is no program", "NotExecutable")
    _check_trusted(real, top)
    argv = _unwrap(real, top)
    files = tuple((file, signature(file)) for file in argv if file.startswith("/") and ":" not in file)
    version = _version(argv, ((str(real), signature(real)), *files))
    if tuple(map(int, version.split("."))) < MIN_VERSION:
        least = ".".join(map(str, MIN_VERSION))
        raise _refused(path, f"is CRIU {version}; at least {least} is needed", "CriuTooOld", version=version)
    return Criu(argv, version, str(path))


def _unwrap(path: Path, top: Path) -> tuple[str, ...]:
    """Turn the private tree's wrapper into the command line that it stands for; else the program itself."""
    with path.open("rb") as file:
        text = file.read(MAX_WRAPPER_BYTES + 1)
    match = _WRAPPER.fullmatch(text.decode("utf-8", "surrogateescape"))
    if match is None:
        return (str(path),)
    loader, libraries, program = (shlex.split(word)[0] for word in match.groups())
    if not all(part.startswith("/") for part in (loader, program, *libraries.split(":"))):
        raise _refused(path, "starts its loader with a relative path", "RelativePath")
    for part in (loader, program):
        try:
            real = Path(part).resolve(strict=True)
        except (OSError, RuntimeError):
            raise _refused(path, f"starts {part}, which is absent", "CriuBroken") from None
        _check_trusted(real, top)
    for directory in libraries.split(":"):
        _check_libraries(Path(directory), top)
    return (loader, "--library-path", libraries, program)


def _check_libraries(directory: Path, top: Path) -> None:
    real = directory.resolve()
    if not real.exists():  # nobody else may make it later either
        _check_trusted(next(parent for parent in real.parents if parent.exists()), top)
        return
    _check_trusted(real, top)
    with os.scandir(real) as entries:
        for count, entry in enumerate(entries):
            if count >= MAX_LIBRARIES:
                raise _refused(real, "holds too many files for a directory of libraries", "CriuUntrusted")
            target = Path(entry.path).resolve()
            # A link may lead anywhere; what it leads to is checked with all that is above it.
            if target.exists():
                _check_one(target) if target.parent == real else _check_trusted(target, top)


def untrusted(path: Path, top: Path = Path("/")) -> tuple[Path, str] | None:
    """Say who else than root could change a resolved path, or a directory above it up to ``top``.

    Gives the place and a sentence's end; None: nobody.
    """
    for part in (path, *path.parents):
        if why := _changeable(part):
            return part, why
        if part == top:
            break
    return None


def _check_trusted(path: Path, top: Path) -> None:
    """Check a resolved path and each directory above it, up to ``top``."""
    if found := untrusted(path, top):
        raise _refused(*found, "CriuUntrusted")


def _check_one(path: Path) -> None:
    if why := _changeable(path):
        raise _refused(path, why, "CriuUntrusted")


def _changeable(path: Path) -> str:
    """Say why others than root can change a file or directory; empty if they cannot."""
    status = path.stat()
    others = bool(status.st_mode & stat.S_IWOTH)
    group = bool(status.st_mode & stat.S_IWGRP) and status.st_gid != 0
    # In a directory with the sticky bit (/tmp) nobody can replace what belongs to root.
    sticky = stat.S_ISDIR(status.st_mode) and bool(status.st_mode & stat.S_ISVTX)
    if status.st_uid != 0:
        return f"belongs to uid {status.st_uid}, not to root"
    return "can be written by others than root" if (others or group) and not sticky else ""


def signature(path: Path | str) -> tuple[int, ...]:
    """Tell two states of a file apart."""
    status = os.stat(path)  # noqa: PTH116 - it takes both
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


@contextmanager
def kept_output() -> Iterator[BinaryIO]:
    """Open what takes a program's output, of which there may be no end: beyond its size each write fails.

    It is no pipe: that could be kept open by a child of the program, and waiting for its end take for ever.
    """
    fd = os.memfd_create("output", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(fd, "w+b") as output:  # noqa: PTH123
        os.truncate(fd, MAX_OUTPUT_BYTES)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        yield output


def printed(output: BinaryIO, most: int) -> str:
    """Read the first ``most`` bytes of what was printed; the program has left its end where it stands."""
    written = os.lseek(output.fileno(), 0, os.SEEK_CUR)
    return os.pread(output.fileno(), min(written, most), 0).decode(errors="replace")


def alone(output: BinaryIO) -> dict[str, Any]:
    """Give the arguments by which a program is started that we ask: nothing of ours but ``output`` is its."""
    return {
        "stdin": subprocess.DEVNULL,
        "stdout": output,
        "stderr": subprocess.STDOUT,
        "cwd": "/",
        "env": clean_env(),
        "start_new_session": True,
    }


def ask(argv: Sequence[str], seconds: float, most: int) -> tuple[int, str]:
    """Run a program that only says something; its exit code and the first ``most`` bytes of what it printed.

    :raises OSError: it cannot be started. :raises subprocess.TimeoutExpired: it took longer, and was killed.
    """
    with kept_output() as output:
        process = subprocess.Popen(argv, **alone(output))
        try:
            return process.wait(seconds), printed(output, most)
        except BaseException:
            end_group(process.pid)
            with suppress(subprocess.TimeoutExpired):  # who waits in a driver is left behind
                process.wait(KILL_SECONDS)
            raise


def end_group(pid: int) -> None:
    """Kill a program that is not reaped yet, with all that it has started in its session's first group."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


@functools.lru_cache(maxsize=16)
def _version(argv: tuple[str, ...], _files: tuple[object, ...]) -> str:
    """Ask a CRIU for its version; ``_files`` makes the answer hold only until a file of it changes."""
    try:
        code, text = ask([*argv, "--version"], VERSION_SECONDS, MAX_VERSION_BYTES)
    except subprocess.TimeoutExpired:
        raise _refused(argv[-1], f"did not tell its version in {VERSION_SECONDS:g} s", "CriuBroken") from None
    except OSError as error:
        raise _refused(argv[-1], f"cannot be started: {error.strerror}", "CriuBroken") from None
    match = _VERSION.search(text)
    if code != 0 or match is None:
        shown = " ".join(text.split())[:200] or "nothing"
        raise _refused(
            argv[-1], f"does not tell its version (exit code {code}, it printed {shown})", "CriuBroken"
        )
    return match[1]


def _refused(path: Path | str, why: str, reason: str, **fields: object) -> RefusedError:
    return RefusedError(
        f"criu: {path} {why}", remedy=f"{REMEDY}, or set criu.binary", reason=reason, path=str(path), **fields
    )
