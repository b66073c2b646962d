"""The mounts of a restored worker are those of the container that it is in now, whatever it had before."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.real.boxes import Box, Kit
from tests.real.node import Node, until
from tests.real.places import Place, differences, mounts_of, placed, refused, snapshot

pytestmark = [pytest.mark.containers, pytest.mark.criu]

SILENT = {
    "DYN_CHECKPOINT_SIGNAL_FILE": "",
    "DYN_CHECKPOINT_READY_FILE": "",
    "DYN_RESTORE_MARKER_FILE": "/signals/restored",
}
BARE: dict[str, Any] = {"maskedPaths": [], "readonlyPaths": []}
MASKED: dict[str, Any] = {"maskedPaths": ["/proc/kcore", "/proc/keys", "/sys/firmware"], "readonlyPaths": []}
READ_ONLY = {"readonlyPaths": ["/proc/sys", "/proc/irq", "/proc/bus", "/proc/sysrq-trigger"]}
CHANGES = {
    "masked and read-only now": (BARE, MASKED | READ_ONLY),
    "read-only now": (MASKED, MASKED | READ_ONLY),
    "read-only no more": (MASKED | READ_ONLY, MASKED),
    "other parts are read-only": (BARE | {"readonlyPaths": ["/proc/irq"]}, BARE | READ_ONLY),
    "masked now, and read-only before": (BARE | {"readonlyPaths": ["/proc/keys"]}, MASKED),
}
"""``linux`` of the worker's container and of the one that takes it."""


@pytest.fixture(params=["runc", "crun"])
def place(node: Node, kit: Kit, request: pytest.FixtureRequest) -> Iterator[Place]:
    """Give a place for busybox boxes."""
    with placed(node, kit, request.param, "busybox") as here:
        yield here


def restored(place: Place, was: dict[str, Any], now: dict[str, Any]) -> tuple[Box, int]:
    """Dump a worker and restore it into a container with other mounts; that, and the worker's pid."""
    id_ = place.node.new_id()
    box = place.start(id_, **was)
    box.counts_on()
    place.freeze(box)
    waiting = place.placeholder(id_, **now)
    root = place.thaw(id_, waiting)
    waiting.counts_on()
    return waiting, root


def test_the_flags_are_those_of_the_new_container(place: Place, tmp_path: Path) -> None:
    """A volume that is stricter now is so for the worker too, and one that is laxer is not kept strict."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    was = [(tmp_path / "a", "/a", "rw"), (tmp_path / "b", "/b", "ro,nosuid,nodev,noexec,noatime")]
    now = [(tmp_path / "a", "/a", "ro,nosuid,nodev,noexec,noatime"), (tmp_path / "b", "/b", "rw")]
    waiting, root = restored(place, {"more_binds": was}, {"more_binds": now})
    assert mounts_of(root) == mounts_of(waiting.pid)


@pytest.mark.parametrize("change", CHANGES)
def test_the_masked_paths_are_those_of_the_new_container(place: Place, change: str) -> None:
    """What of /proc and /sys is hidden or read-only there is so for the worker, and nothing else is."""
    was, now = CHANGES[change]
    waiting, root = restored(place, {"linux": was}, {"linux": now})
    assert mounts_of(root) == mounts_of(waiting.pid)


def test_a_mount_more_is_there_for_the_worker(place: Place, tmp_path: Path) -> None:
    """It is named by the gate, and stays what it is in the container: one that it has read-only too."""
    (tmp_path / "more").mkdir()
    (tmp_path / "more/below").mkdir()
    (tmp_path / "more/name").write_text("more")
    more = [(tmp_path / "more", "/srv/more", "ro"), (tmp_path, "/srv/more/below", "rw")]
    waiting, root = restored(place, {}, {"more_binds": more})
    assert mounts_of(root) == mounts_of(waiting.pid)
    assert Path(f"/proc/{root}/root/srv/more/name").read_text() == "more"
    assert Path(f"/proc/{root}/root/srv/more/below/more/name").read_text() == "more"


def test_a_file_that_is_written_where_the_container_may_not_write(place: Place, tmp_path: Path) -> None:
    """The worker would go on writing; the restore fails, and the container is as it was."""
    (tmp_path / "name").touch()
    id_ = place.node.new_id()
    argv = ("/bin/sh", "-c", "exec 7>>/data/name; while sleep 0.1; do echo line >&7; done")
    box = place.start(id_, argv=argv, env=SILENT, more_binds=[(tmp_path, "/data", "rw")])
    until("open file", (tmp_path / "name").read_text)
    place.node.run("checkpoint", "--container", box.id)
    box.remove()
    waiting = place.placeholder(id_, more_binds=[(tmp_path, "/data", "ro")])
    before = snapshot(waiting)
    size = (tmp_path / "name").stat().st_size
    result = place.node.run("restore", id_, "--into", waiting.id, check=1)
    refused(result, "/data is read-only in the container", "open there for writing", "as it was")
    until("container as it was", lambda: differences(before, snapshot(waiting)) == {})
    assert (tmp_path / "name").stat().st_size == size


def test_a_mount_that_would_hide_one_of_the_workers_is_refused(place: Place, tmp_path: Path) -> None:
    """Before anything is touched."""
    for name in ("above", "above/below"):
        (tmp_path / name).mkdir()
    id_ = place.node.new_id()
    box = place.start(id_, more_binds=[(tmp_path, "/data/below", "rw")])
    box.counts_on()
    place.freeze(box)
    now = [(tmp_path / "above", "/data", "rw"), (tmp_path, "/data/below", "rw")]
    waiting = place.placeholder(id_, more_binds=now)
    result = place.node.run("restore", id_, "--into", waiting.id, check=4)
    refused(result, "restore.more_mounts", "/data", "/data/below")
