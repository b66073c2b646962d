"""What is done inside a worker's container: its files and its processes, found through ``/proc/PID/root``.

Paths come from pods and are hostile. They are opened as the container sees them, through no link of /proc,
and only files of fixed names and content are written, so that a path which leads onto a directory of the node
(a hostPath) can put nothing else there. All of it may hang; the callers run it by :mod:`hibernode.apart`.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path, PurePosixPath
from typing import Final

from hibernode.discovery.locate import stat_in_root
from hibernode.errors import RefusedError
from hibernode.host import inroot, procfs
from hibernode.host.procfs import Process
from hibernode.host.safefs import Dir
from hibernode.kube.names import RESTORE_COMPLETE, SENTINEL, SNAPSHOT_COMPLETE
from hibernode.workload import ERA_A1

WHAT: Final = "a look at its signal file"
"""What can hang, and is then named so."""

MAX_STATUS_BYTES: Final = 16384


def same_directory(pid: int, path: str, ours: Path) -> bool:
    """Whether ``path`` lies, as process ``pid`` sees it, in the directory ``ours`` of the node."""
    try:
        theirs, here = stat_in_root(pid, PurePosixPath(path).parent), ours.stat()
    except (OSError, ValueError):
        return False
    return (theirs.st_dev, theirs.st_ino) == (here.st_dev, here.st_ino)


def names_its_own(path: str, id_: str) -> bool:
    """Whether a signal file is the one of ``id_``: another name would be another pod's answer."""
    return PurePosixPath(path).name == f"{id_}{ERA_A1.done_suffix}"


def write_signal(process: Process, path: str, id_: str, data: bytes) -> None:
    """Write a worker's signal file, whole at every instant, as the container sees its path.

    ``id_`` is a checkpoint's, or what stands in its place in a label; no separator is in it.

    :raises RefusedError: the path is another id's. :raises OSError: it cannot be written.
    """
    if not names_its_own(path, id_):
        raise RefusedError(
            f"{path} is not the signal file of {id_}",
            remedy=f"set {ERA_A1.env_signal_file} to a path that ends with {id_}{ERA_A1.done_suffix}",
            reason="WrongSignalFile",
        )
    _write(process, str(PurePosixPath(path).parent), f"{id_}{ERA_A1.done_suffix}", data)


def write_sentinel(process: Process, control_dir: str, *, restored: bool) -> None:
    """Leave era C's word in a worker's control volume. :raises OSError: it cannot be written."""
    _write(process, control_dir, RESTORE_COMPLETE if restored else SNAPSHOT_COMPLETE, SENTINEL)


def _write(process: Process, directory: str, name: str, data: bytes) -> None:
    with inroot.opened(process.pid, directory, os.O_RDONLY | os.O_DIRECTORY) as fd:
        if not process.alive():
            raise ProcessLookupError(f"process {process.pid} has ended")
        with Dir(os.dup(fd), Path(directory)) as place:
            place.write_atomic(name, data, 0o644)


def tell(root: Process, number: int) -> int:
    """Send a Unix signal to the topmost process at or below ``root`` that handles it; give its pid.

    The first process of a pid namespace gets no signal that it does not catch, and a shell around a worker
    catches none.

    :raises RefusedError: none has one. :raises ProcessLookupError: it has ended.
    """
    for stat in procfs.tree(root.pid):
        with contextlib.suppress(ProcessLookupError), Process.open(stat.pid) as process:
            if process.key == stat.key and _catches(stat.pid, number) and root.alive():
                process.send_signal(number)
                return stat.pid
    if not root.alive():
        raise ProcessLookupError(f"process {root.pid} has ended")
    raise RefusedError(
        f"no process below pid {root.pid} has a handler for signal {number}",
        remedy="the worker installs its handlers before it says that it is ready",
        reason="SignalNotCaught",
    )


def _catches(pid: int, number: int) -> bool:
    text = procfs.read_bounded(f"/proc/{pid}/status", MAX_STATUS_BYTES)
    line = next((line for line in text.splitlines() if line.startswith(b"SigCgt:")), b"SigCgt: 0")
    return bool(int(line.split()[1], 16) >> (number - 1) & 1)
