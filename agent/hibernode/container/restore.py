"""What a restore does to the container that takes the worker, and how it is undone."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from hibernode.artifact import rootfs_apply
from hibernode.artifact.layout import Artifact
from hibernode.artifact.manifest import DiffFacts, Manifest
from hibernode.container import leftovers, mountplan
from hibernode.container.target import NET, Target
from hibernode.errors import HibernodeError, IntegrityError
from hibernode.host import procfs
from hibernode.host.inroot import open_root
from hibernode.host.procfs import Process
from hibernode.host.safefs import Dir
from hibernode.shim_placeholder import FAILED, recognise, tell
from hibernode.state import read_json
from hibernode.worker import end_since, noted_key, noted_time

log = logging.getLogger("hibernode.container")

UNDO_SUFFIX: Final = ".undo"
STDIO: Final = {1: "stdout", 2: "stderr"}


@dataclass(frozen=True, slots=True)
class Applied:
    """A diff that is applied, or about to be; the tar ``undo`` of the restore's directory undoes it.

    ``mount``: the id of the mount that it goes to, as the gate has seen it; None in notes of older agents.
    """

    undo: str
    mount_point: str
    mount: int | None = None


def inherit(manifest: Manifest) -> list[dict[str, str]]:
    """List what CRIU gets from the container: its network, and the init's output for the worker's pipes.

    A pipe that was not standard output or error has nobody at its other end any more: /dev/null.
    """
    ends: dict[str, dict[str, str]] = {}
    if manifest.container is not None and manifest.container.net:
        ends[NET] = {"key": NET, "mode": "net"}
    for entry in manifest.fds:
        if entry.kind == "pipe" and entry.target not in ends:
            mode = "read" if entry.access == "read" else STDIO.get(entry.fd, "null")
            ends[entry.target] = {"key": entry.target, "mode": mode}
    return list(ends.values())


def planned(manifest: Manifest, target: Target) -> list[Applied]:
    """Say which diffs will be applied, for the journal. The gate has seen that their mounts are there."""
    ids = {"/": target.mounts.root.id, **{place.mount_point: place.id for place in target.mounts.external}}
    diffs = manifest.container.diffs if manifest.container is not None else ()
    return [Applied(diff.file + UNDO_SUFFIX, diff.mount_point, ids[diff.mount_point]) for diff in diffs]


def apply_files(artifact: Artifact, target: Target, directory: Dir) -> None:
    """Bring the worker's files into the container; what undoes it is on disk first.

    :raises HibernodeError, OSError: the container has been changed in part, and is to be undone.
    """
    assert artifact.manifest.container is not None
    entries = planned(artifact.manifest, target)
    for diff, entry in zip(artifact.manifest.container.diffs, entries, strict=True):
        _apply(artifact, diff, entry, target, directory)


def _apply(artifact: Artifact, diff: DiffFacts, entry: Applied, target: Target, directory: Dir) -> None:
    with contextlib.ExitStack() as held:
        top = held.enter_context(_opened(target.process.pid, entry))
        tar = os.open(artifact.path / diff.file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        held.callback(os.close, tar)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        undo = os.open(entry.undo, flags, 0o600, dir_fd=directory.fd)
        undo_to = held.enter_context(os.fdopen(undo, "wb"))
        rootfs_apply.apply(top, tar, undo_to, max_bytes=os.fstat(tar).st_size)


@contextlib.contextmanager
def _opened(pid: int, entry: Applied) -> Iterator[int]:
    root = open_root(pid)
    try:
        fd = mountplan.open_mount(root, entry.mount_point, entry.mount)
        try:
            yield fd
        finally:
            os.close(fd)
    finally:
        os.close(root)


def undo_files(process: Process, directory: Dir, applied: Iterable[Applied]) -> list[str]:
    """Bring the container's files back to what they were; says what could not be, in sentences.

    What has undone something is removed, so that nothing is undone twice.
    """
    problems: list[str] = []
    entries = list(applied)
    if entries:
        leftovers.remove_put_roots(process.pid)
    for entry in reversed(entries):
        try:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            undo = os.open(entry.undo, flags, dir_fd=directory.fd)
        except FileNotFoundError:
            continue  # it was not begun
        except (OSError, ValueError) as error:  # ValueError: a NUL in a damaged note
            problems.append(f"{entry.mount_point}: {error}")
            continue
        try:
            with _opened(process.pid, entry) as top:
                rootfs_apply.undo(top, undo)
        except IntegrityError:
            pass  # it was not finished, and before that nothing was changed
        except (OSError, ValueError, HibernodeError) as error:
            problems.append(f"{entry.mount_point}: {error}")
            continue
        finally:
            os.close(undo)
        with contextlib.suppress(OSError):
            directory.unlink(entry.undo)
    return problems


def forget_undo(directory: Dir, applied: Iterable[Applied]) -> None:
    """Remove what would undo a restore that has succeeded."""
    for entry in applied:
        directory.unlink(entry.undo, missing_ok=True)


def say_failed(process: Process) -> None:
    """Tell a placeholder of ours that nobody comes, so that it can start cold."""
    with contextlib.suppress(OSError):
        if recognise(process.pid):
            tell(process.fileno(), FAILED)


def noted(journal: dict[str, Any]) -> list[Applied]:
    """Read from a journal which diffs a restore has applied, or was about to; what is damaged is left out."""
    entries = journal.get("applied")
    return [
        Applied(str(entry["undo"]), str(entry["mount_point"]), entry.get("mount"))
        for entry in (entries if isinstance(entries, list) else ())
        if isinstance(entry, dict) and {"undo", "mount_point"} <= entry.keys()
    ]


def undo_noted(journal: dict[str, Any], directory: Dir, *, tell: bool = True) -> tuple[str, list[str]]:
    """Undo a dead agent's restore into a container from its journal.

    Returns what became of the container, in a sentence, and what of its files could not be brought back.
    ``tell``: its placeholder may start cold then. Called by whoever has the claim on the container, and only
    when nobody has restored into it since: what is younger than the restore is taken for its half tree.
    """
    note = journal.get("target")
    if not isinstance(note, dict):
        return "", []
    key = noted_key(note)
    try:
        process = Process.open(key.pid if key is not None else 0)
    except ProcessLookupError:
        return "its container is gone", []
    with process:
        if process.key != key:
            return "its container is gone", []
        if not isinstance(journal.get("applied"), list):
            # No gate had let it pass: what runs there may be none of ours.
            said, problems = "its container was not touched", []
        elif not waits(process, note):
            said = "its container did not wait and runs something else, with the worker's files"
            return said, [said]
        else:
            end_left(process, journal, directory)
            problems = undo_files(process, directory, noted(journal))
            said = "; ".join(problems) or "its container is as it was"
        if tell:
            say_failed(process)
    return said, problems


def waits(process: Process, note: dict[str, Any]) -> bool:
    """Whether a container's init is still the program that it was: of another one nothing is ours."""
    return note.get("comm") in (None, procfs.read_stat(process.pid).comm)


def end_left(process: Process, journal: dict[str, Any], directory: Dir) -> None:
    """End the tree that a shim which was killed has left in a container, and take its marker away.

    ``process`` is the container's init, which may end with the tree. Only where nobody has restored since.
    """
    began = noted_time(journal.get("started_at"))
    marker = (read_json(directory, "spec.json") or {}).get("marker")
    with contextlib.suppress(OSError), leftovers.files_of(process.pid) as root:
        # Only a container without other processes is restored into: what is younger is of the restore.
        below = [stat.pid for stat in procfs.tree(process.pid) if stat.pid != process.pid]
        end_since(below, began)
        leftovers.remove_marker(root, marker, began)
