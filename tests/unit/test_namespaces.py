"""Namespaces of other processes: entered by a thread that ends, and what an IPC namespace holds."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from hibernode.host import linux
from hibernode.host.namespaces import inside, open_namespace, sysv_objects
from tests.unit.box_kit import KINDS, box


@pytest.mark.parametrize(
    ("setup", "objects"),
    [
        pytest.param("", (), id="nothing"),
        pytest.param("ipcmk -S 1", ("1 semaphore set",), id="one"),
        pytest.param(
            "ipcmk -M 10; ipcmk -S 1; ipcmk -S 2; ipcmk -Q; ipcmk -M 1; ipcmk -M 1",
            ("3 shared memory segments", "2 semaphore sets", "1 message queue"),
            id="some of each kind",
        ),
    ],
)
def test_sysv_objects_are_counted(tmp_path: Path, setup: str, objects: tuple[str, ...]) -> None:
    """Those of the process's own namespace, and of each kind; our threads stay where they are."""
    before = os.readlink("/proc/self/ns/ipc")
    with box(tmp_path, setup, kinds=KINDS | linux.CLONE_NEWIPC) as pid:
        assert sysv_objects(pid) == objects
    assert os.readlink("/proc/thread-self/ns/ipc") == before


def test_a_process_that_is_gone_is_said() -> None:
    """Not as a missing file."""
    with pytest.raises(ProcessLookupError, match="4194304 is gone"):
        sysv_objects(1 << 22)


def test_no_thread_of_ours_stays_inside(tmp_path: Path) -> None:
    """The work is done there, its result or error comes back, and the thread ends."""
    threads = threading.active_count()
    with box(tmp_path, kinds=KINDS | linux.CLONE_NEWUTS) as pid:
        namespace = open_namespace(pid, "uts")
        theirs = os.readlink(f"/proc/{pid}/ns/uts")
        assert inside([namespace], lambda: os.readlink("/proc/thread-self/ns/uts")) == theirs
        with pytest.raises(ZeroDivisionError):
            inside([namespace], lambda: 1 // 0)
        os.close(namespace)
    assert os.readlink("/proc/thread-self/ns/uts") != theirs
    assert threading.active_count() == threads
