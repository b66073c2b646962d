"""What containers share by System V: carried with its namespace, or the new container's is joined."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.real.boxes import Kit
from tests.real.fakes import FakeCriu
from tests.real.node import Node, until
from tests.real.places import Place, placed, refused

pytestmark = [pytest.mark.containers, pytest.mark.criu]

SILENT = {
    "DYN_CHECKPOINT_SIGNAL_FILE": "",
    "DYN_CHECKPOINT_READY_FILE": "",
    "DYN_RESTORE_MARKER_FILE": "/signals/restored",
}
COUNTS = """
import ctypes, pathlib, time
libc = ctypes.CDLL(None)
libc.shmat.restype = ctypes.c_void_p
shared = libc.shmget(0, 4096, 0o1600)
memory = ctypes.c_long.from_address(libc.shmat(shared, None, 0))
semaphore = libc.semget(0, 1, 0o1600)
while True:
    memory.value += 1
    assert libc.semctl(semaphore, 0, 16, memory.value) == 0
    assert libc.semctl(semaphore, 0, 12) == memory.value
    pathlib.Path("/srv/new").write_text(str(memory.value))
    pathlib.Path("/srv/new").rename("/srv/count")
    time.sleep(0.02)
"""
"""Counts in shared memory and in a semaphore; 16 and 12 are SETVAL and GETVAL of linux/sem.h."""


@pytest.fixture
def place(node: Node, kit: Kit) -> Iterator[Place]:
    """Give a place for Debian boxes with runc."""
    with placed(node, kit, "runc") as here:
        yield here


def ipc(pid: int | str) -> str:
    """Name an IPC namespace."""
    return os.readlink(f"/proc/{pid}/ns/ipc")


def count(path: Path) -> int:
    """Read how far a worker has come; 0 before it has begun."""
    return int(path.read_text()) if path.exists() else 0


def test_sysv_objects_go_along_in_a_namespace_of_their_own(place: Place) -> None:
    """Shared memory and semaphores have what they had; the warning says what that costs."""
    id_ = place.node.new_id()
    box = place.start(id_, argv=("/usr/bin/python3", "-c", COUNTS), env=SILENT)
    until("count", lambda: count(box.root / "srv/count") > 2)
    said = place.node.run("checkpoint", "--container", box.id, "--dry-run")
    assert "tree.sysv_objects" in said.stdout
    assert "1 shared memory segment, 1 semaphore set" in said.stdout
    place.node.run("checkpoint", "--container", box.id)
    box.remove()
    waiting = place.placeholder(id_, env=SILENT)
    root = place.thaw(id_, waiting)
    before = count(waiting.root / "srv/count")
    assert before > 2
    until("count", lambda: count(waiting.root / "srv/count") > before)
    assert ipc(root) not in (ipc(waiting.pid), ipc("self"))


def test_sysv_objects_that_are_made_in_the_dump_are_not_lost(place: Place) -> None:
    """The dump fails while the worker is frozen, and it goes on; the next one takes them along."""
    id_ = place.node.new_id()
    box = place.start(id_, env=SILENT)
    box.counts_on()
    fake = FakeCriu(place.node, 'ipcmk -Q >/dev/null; real "$@"')  # it is in the container's namespace
    result = place.node.run("checkpoint", "--container", box.id, check=4)
    refused(result, "1 message queue now", "take the checkpoint again")
    box.counts_on()
    fake.be_real()
    place.node.run("checkpoint", "--container", box.id)
    box.remove()
    waiting = place.placeholder(id_, env=SILENT)
    root = place.thaw(id_, waiting)
    waiting.counts_on()
    assert ipc(root) not in (ipc(waiting.pid), ipc("self"))
