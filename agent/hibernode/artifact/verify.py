"""Is an artifact what its manifest says? Nothing in it is followed, and nothing but its files is opened."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final

from hibernode.artifact.digest import digest_all
from hibernode.artifact.layout import load_manifest
from hibernode.artifact.manifest import MANIFEST_NAME, FileEntry, Manifest
from hibernode.errors import HibernodeError, IntegrityError, RefusedError
from hibernode.host.safefs import Dir
from hibernode.workload import CheckpointId

MAX_EXTRAS: Final = 1000
"""How many things that do not belong there are named; somebody may have put millions."""

_KINDS: Final = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFDIR: "a directory",
    stat.S_IFREG: "a file",
}


@dataclass(frozen=True, slots=True)
class FileVerdict:
    """What was found of one file; ``path`` is relative to the artifact and fit to print."""

    path: str
    ok: bool
    problem: str = ""


def check_tree(top: Dir, manifest: Manifest, *, digests: bool, workers: int = 0) -> list[FileVerdict]:
    """Compare the artifact in ``top`` with ``manifest``: the manifest, its files, then all that is extra.

    Names, kinds, modes and sizes always; contents with ``digests``, in about ``workers`` threads.
    """
    wanted = {entry.path: entry for entry in manifest.files}
    found: dict[str, str] = {}
    extras: list[FileVerdict] = []
    for path, problem in _look(top, "", wanted, _directories(wanted)):
        if path in wanted:
            found[path] = problem
        elif len(extras) < MAX_EXTRAS:
            extras.append(FileVerdict(_printable(path), ok=False, problem=problem))
    problems = {path: found.get(path, "is missing") for path in wanted}
    if digests:
        good = [path for path, problem in problems.items() if not problem]
        _check_digests(top, good, wanted, problems, workers)
    listed = [FileVerdict(path, not problem, problem) for path, problem in problems.items()]
    return [_manifest(top, manifest), *listed, *sorted(extras, key=lambda verdict: verdict.path)]


def first_problem(verdicts: list[FileVerdict]) -> str:
    """Say in one line what is wrong; empty when nothing is."""
    bad = [verdict for verdict in verdicts if not verdict.ok]
    if not bad:
        return ""
    more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
    return f"{bad[0].path} {bad[0].problem}{more}"


def _directories(paths: dict[str, FileEntry]) -> set[str]:
    return {str(parent) for path in paths for parent in PurePosixPath(path).parents} - {"."}


def _look(top: Dir, prefix: str, wanted: dict[str, FileEntry], inner: set[str]) -> Iterator[tuple[str, str]]:
    """Yield (path, problem) for all that is there; only directories that hold wanted files are entered."""
    owner = os.fstat(top.fd).st_uid
    below: list[str] = []
    for entry in top.scan():
        path = prefix + entry.name
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue
        if path in inner and stat.S_ISDIR(status.st_mode):
            below.append(entry.name)
            problem = _private(status, owner)
            if problem:
                yield path, problem
        elif path in wanted:
            yield path, _wrong(wanted[path], status) or _private(status, owner)
        elif path != MANIFEST_NAME:
            kind = _KINDS.get(stat.S_IFMT(status.st_mode), "an odd thing")
            yield path, f"is {kind} that does not belong there"
    for name in below:
        try:
            with top.subdir(name) as directory:
                yield from _look(directory, f"{prefix}{name}/", wanted, inner)
        except (OSError, RefusedError) as error:
            yield f"{prefix}{name}", f"cannot be entered: {_why(error)}"


def _wrong(entry: FileEntry, status: os.stat_result) -> str:
    if not stat.S_ISREG(status.st_mode):
        return f"is {_KINDS.get(stat.S_IFMT(status.st_mode), 'an odd thing')}, not a file"
    if status.st_nlink != 1:
        return f"has {status.st_nlink} names (hard links)"
    if status.st_size != entry.size:
        return f"has {status.st_size} bytes, not {entry.size}"
    return ""


def _private(status: os.stat_result, owner: int) -> str:
    if status.st_uid != owner:
        return f"belongs to uid {status.st_uid}, not {owner}"
    mode = stat.S_IMODE(status.st_mode)
    return f"has mode {mode:04o}, which lets others in" if mode & 0o077 else ""


def _check_digests(
    top: Dir, names: list[str], wanted: dict[str, FileEntry], problems: dict[str, str], workers: int
) -> None:
    try:
        digests = digest_all(top, names, workers)
    except (OSError, HibernodeError) as error:
        if len(names) == 1:
            problems[names[0]] = f"cannot be read: {_why(error)}"
            return
        for name in names:  # one of them, and it must be named
            _check_digests(top, [name], wanted, problems, workers)
        return
    for name, (_, digest) in digests.items():
        if digest != wanted[name].digest:
            problems[name] = "has another digest: its content changed"


def _manifest(top: Dir, manifest: Manifest) -> FileVerdict:
    try:
        now = load_manifest(top, CheckpointId(manifest.id))
    except (OSError, IntegrityError) as error:
        return FileVerdict(MANIFEST_NAME, ok=False, problem=_why(error))
    same = now == manifest
    return FileVerdict(MANIFEST_NAME, same, "" if same else "was replaced meanwhile")


def _why(error: OSError | HibernodeError) -> str:
    return error.message if isinstance(error, HibernodeError) else error.strerror or str(error)


def _printable(path: str) -> str:
    text = os.fsencode(path).decode("utf-8", "backslashreplace")[:4096]
    return text if text.isprintable() else ascii(text)
