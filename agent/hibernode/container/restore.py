"""What a restore does to the container that takes the worker, and how it is undone."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
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

log = logging.getLogger("hibernode.container")

UNDO_SUFFIX: Final = ".undo"
CLOCK_SLACK_SECONDS: Final = 0.05
"""Start times have a resolution of one clock tick, 10 ms."""

STDIO: Final = {1: "stdout", 2: "stderr"}


@dataclass(frozen=True, slots=True)
class Applied:
    """A diff that is applied, or about to be; the tar ``undo`` of the restore's directory undoes it."""

    undo: str
    mount_point: str


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


def planned(manifest: Manifest) -> list[Applied]:
    """Say which diffs will be applied, for the journal."""
    diffs = manifest.container.diffs if manifest.container is not None else ()
    return [Applied(diff.file + UNDO_SUFFIX, diff.mount_point) for diff in diffs]


def apply_files(artifact: Artifact, target: Target, directory: Dir) -> None:
    """Bring the worker's files into the container; what undoes it is on disk first.

    :raises HibernodeError, OSError: the container has been changed in part, and is to be undone.
    """
    assert artifact.manifest.container is not None
    for diff in artifact.manifest.container.diffs:
        _apply(artifact, diff, target, directory)


def _apply(artifact: Artifact, diff: DiffFacts, target: Target, directory: Dir) -> None:
    with contextlib.ExitStack() as held:
        top = held.enter_context(_opened(target.process.pid, diff.mount_point))
        tar = os.open(artifact.path / diff.file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        held.callback(os.close, tar)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        undo = os.open(diff.file + UNDO_SUFFIX, flags, 0o600, dir_fd=directory.fd)
        undo_to = held.enter_context(os.fdopen(undo, "wb"))
        rootfs_apply.apply(top, tar, undo_to, max_bytes=os.fstat(tar).st_size)


@contextlib.contextmanager
def _opened(pid: int, mount_point: str) -> Iterator[int]:
    root = open_root(pid)
    try:
        if mount_point == "/":
            yield root
            return
        fd = mountplan.open_directory(root, mount_point)
        try:
            yield fd
        finally:
            os.close(fd)
    finally:
        os.close(root)


def undo_files(process: Process, directory: Dir, applied: Iterable[Applied]) -> list[str]:
    """Bring the container's files back to what they were; says what could not be, in sentences."""
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
            with _opened(process.pid, entry.mount_point) as top:
                rootfs_apply.undo(top, undo)
        except IntegrityError:
            continue  # it was not finished, and before that nothing was changed
        except (OSError, ValueError, HibernodeError) as error:
            problems.append(f"{entry.mount_point}: {error}")
        finally:
            os.close(undo)
    return problems


def forget_undo(directory: Dir, applied: Iterable[Applied]) -> None:
    """Remove what would undo a restore that has succeeded."""
    for entry in applied:
        directory.unlink(entry.undo, missing_ok=True)


def end_half_tree(process: Process, began: float) -> list[int]:
    """End what a dead agent's CRIU has left below the container's init; returns the pids.

    Only a container without other processes is restored into, so that all which is younger than the restore
    is of it.
    """
    ended: list[int] = []
    for stat in procfs.tree(process.pid):
        if stat.pid != process.pid and procfs.start_time(stat.start_ticks) >= began - CLOCK_SLACK_SECONDS:
            with contextlib.suppress(ProcessLookupError):
                os.kill(stat.pid, signal.SIGKILL)
                ended.append(stat.pid)
    return ended


def say_failed(process: Process) -> None:
    """Tell a placeholder of ours that nobody comes, so that it can start cold."""
    with contextlib.suppress(OSError):
        if recognise(process.pid):
            tell(process.fileno(), FAILED)


def undo_noted(journal: dict[str, Any], directory: Dir) -> str:
    """Undo a dead agent's restore into a container from its journal; what became of it, in a sentence."""
    noted = journal.get("target")
    if not isinstance(noted, dict):
        return ""
    try:
        process = Process.open(int(noted["pid"]))
    except (KeyError, TypeError, ValueError, OverflowError, ProcessLookupError):
        return "its container is gone"
    with process:
        if process.key.start_ticks != noted.get("start_ticks"):
            return "its container is gone"
        entries = journal.get("applied")
        if not isinstance(entries, list):  # no gate had let it pass: what runs there may be none of ours
            say_failed(process)
            return "its container was not touched"
        began = _moment(journal.get("started_at"))
        with contextlib.suppress(ProcessLookupError):
            end_half_tree(process, began)
        leftovers.remove_marker(process.pid, (read_json(directory, "spec.json") or {}).get("marker"), began)
        applied = [
            Applied(str(entry["undo"]), str(entry["mount_point"]))
            for entry in entries
            if isinstance(entry, dict) and {"undo", "mount_point"} <= entry.keys()
        ]
        problems = undo_files(process, directory, applied)
        say_failed(process)
    return "; ".join(problems) or "its container is as it was"


def _moment(noted: Any) -> float:
    """Read a time of a note; now, if it is none."""
    try:
        return float(noted)
    except (TypeError, ValueError, OverflowError):
        return time.time()
