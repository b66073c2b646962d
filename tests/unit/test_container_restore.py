"""What a restore does to the container that takes the worker, and how it is undone: a box and its files."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hibernode.artifact import rootfs
from hibernode.artifact.layout import Artifact
from hibernode.container import restore as filling
from hibernode.container import target as targets
from hibernode.container.restore import Applied
from hibernode.container.target import Target
from hibernode.discovery.containers import Container, ContainerRef
from hibernode.errors import IntegrityError, RefusedError
from hibernode.host import procfs
from hibernode.host.procfs import Process
from hibernode.host.safefs import Dir
from tests.unit import rootfs_kit as kit
from tests.unit.artifact_kit import FILES, manifest
from tests.unit.box_kit import SLEEPS, box

NOBODY_PID = 1 << 22

# what CRIU gets ---------------------------------------------------------------------------------------


def pipe(fd: int, number: int, access: str = "write", kind: str = "pipe") -> dict[str, Any]:
    target = f"pipe:[{number}]" if kind == "pipe" else f"socket:[{number}]"
    return {"pid": 1, "fd": fd, "target": target, "kind": kind, "access": access}


def end(number: int, mode: str) -> dict[str, str]:
    return {"key": f"pipe:[{number}]", "mode": mode}


NET = {"key": "extNetNs", "mode": "net"}


@pytest.mark.parametrize(
    ("net", "fds", "ends"),
    [
        pytest.param(0, [], [], id="nothing"),
        pytest.param(7, [], [NET], id="the network alone"),
        pytest.param(
            7,
            [pipe(0, 70, "read"), pipe(1, 71), pipe(2, 72)],
            [NET, end(70, "read"), end(71, "stdout"), end(72, "stderr")],
            id="standard input, output and error",
        ),
        pytest.param(0, [pipe(1, 71), pipe(2, 71)], [end(71, "stdout")], id="output and error in one"),
        pytest.param(0, [pipe(2, 71), pipe(1, 71)], [end(71, "stderr")], id="the other way round"),
        pytest.param(0, [pipe(9, 75)], [end(75, "null")], id="a pipe to somebody who is gone"),
        pytest.param(0, [pipe(9, 75, "read")], [end(75, "read")], id="a pipe from somebody who is gone"),
        pytest.param(0, [pipe(1, 75, kind="socket")], [], id="what is no pipe"),
    ],
)
def test_criu_gets_the_containers_own(
    net: int, fds: list[dict[str, Any]], ends: list[dict[str, str]]
) -> None:
    """The network, and for the worker's pipes the output of the container's init, each once."""
    image = manifest(fds=fds, container={"id": "x", "net": net})
    assert filling.inherit(image) == ends


def test_what_will_be_applied_is_known_before(tmp_path: Path) -> None:
    """The journal names each diff, its undo and its mount; of a process there are none."""
    image = manifest(
        {**FILES, "rootfs.tar": b"", "shm.tar": b""},
        container={
            "id": "x",
            "mounts": [{"key": "m0", "mount_point": "/dev/shm", "fs_type": "tmpfs", "directory": True}],
            "diffs": [
                {"file": "rootfs.tar", "mount_point": "/", "entries": 1, "bytes": 0},
                {"file": "shm.tar", "mount_point": "/dev/shm", "entries": 1, "bytes": 0},
            ],
        },
    )
    with box(tmp_path, IMAGE) as pid, Process.open(pid) as process:
        target = targets.look(Container(ContainerRef("x"), process.key, "box", 1, 2), process)
        ids = target.mounts.root.id, *(place.id for place in target.mounts.external)
        assert filling.planned(image, target) == [
            Applied("rootfs.tar.undo", "/", ids[0]),
            Applied("shm.tar.undo", "/dev/shm", ids[1]),
        ]
        assert filling.planned(manifest(), target) == []


# files ------------------------------------------------------------------------------------------------

IMAGE = """
mkdir etc; echo image >etc/kept; echo image >etc/changed; echo image >etc/deleted
mkdir dev/shm; mount -t tmpfs shm dev/shm; echo other >dev/shm/other
"""


class Place:
    """A box, a directory for the restore, and an artifact with files that a like box has left."""

    def __init__(self, tmp_path: Path, pid: int, process: Process) -> None:
        self.pid, self.process = pid, process
        self.root = Path(f"/proc/{pid}/root")
        self.path = tmp_path / "restore"
        self.directory = Dir.open(self.path, create=True, mode=0o700)
        contents = {**FILES, "rootfs.tar": self._diff(tmp_path), "shm.tar": self._shm(tmp_path)}
        where = tmp_path / "artifact"
        where.mkdir()
        for name in ("rootfs.tar", "shm.tar"):
            (where / name).write_bytes(contents[name])
        mounts = [{"key": "m0", "mount_point": "/dev/shm", "fs_type": "tmpfs", "directory": True}]
        diffs = [
            {"file": "rootfs.tar", "mount_point": "/", "entries": 1, "bytes": 0},
            {"file": "shm.tar", "mount_point": "/dev/shm", "entries": 1, "bytes": 0},
        ]
        image = manifest(contents, container={"id": "x", "mounts": mounts, "diffs": diffs})
        self.artifact = Artifact(where, image, pinned=False)
        self.applied = filling.planned(image, self.target())

    @staticmethod
    def _diff(tmp_path: Path) -> bytes:
        base = tmp_path / "source"
        base.mkdir()
        with kit.overlays(base) as maker:
            (maker.lower / "etc").mkdir()
            for name in ("kept", "changed", "deleted"):
                (maker.lower / "etc" / name).write_text("image\n")
            overlay = maker.make()
            (overlay.merged / "etc/changed").write_text("worker\n")
            (overlay.merged / "etc/deleted").unlink()
            (overlay.merged / "etc/new").write_text("worker\n")
            overlay.save(tmp_path / "rootfs.tar")
        return (tmp_path / "rootfs.tar").read_bytes()

    @staticmethod
    def _shm(tmp_path: Path) -> bytes:
        top = tmp_path / "shm"
        top.mkdir()
        (top / "segment").write_text("worker\n")
        with kit.descriptor(top) as fd, (tmp_path / "shm.tar").open("wb") as out:
            rootfs.save_tree(fd, out)
        return (tmp_path / "shm.tar").read_bytes()

    def target(self) -> Target:
        container = Container(ContainerRef("x"), self.process.key, "box", 1, 2)
        return targets.look(container, self.process)

    def apply(self) -> None:
        filling.apply_files(self.artifact, self.target(), self.directory)

    def undo(self) -> list[str]:
        return filling.undo_files(self.process, self.directory, self.applied)

    def files(self) -> dict[str, str]:
        return {
            str(path.relative_to(self.root)): path.read_text()
            for top in ("etc", "dev/shm")
            for path in sorted((self.root / top).iterdir())
        }


BEFORE = {
    "etc/changed": "image\n",
    "etc/deleted": "image\n",
    "etc/kept": "image\n",
    "dev/shm/other": "other\n",
}
AFTER = {
    "etc/changed": "worker\n",
    "etc/kept": "image\n",
    "etc/new": "worker\n",
    "dev/shm/other": "other\n",
    "dev/shm/segment": "worker\n",
}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """Give a box that can be filled."""
    (tmp_path / "root").mkdir()
    with box(tmp_path / "root", IMAGE) as pid, Process.open(pid) as process:
        place = Place(tmp_path, pid, process)
        with place.directory:
            yield place


def test_the_workers_files_come_in_and_go_out_again(place: Place) -> None:
    """Changed, new and deleted files and shared memory; undone, also twice, none is left."""
    assert place.files() == BEFORE
    place.apply()
    assert place.files() == AFTER
    assert place.undo() == []
    assert place.files() == BEFORE
    assert place.undo() == []
    assert place.files() == BEFORE


def test_a_restore_that_has_succeeded_forgets_its_undo(place: Place) -> None:
    """What would undo it may be as large as what was applied; forgotten twice is no error."""
    place.apply()
    assert sorted(path.name for path in place.path.iterdir()) == ["rootfs.tar.undo", "shm.tar.undo"]
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in place.path.iterdir())
    filling.forget_undo(place.directory, place.applied)
    filling.forget_undo(place.directory, place.applied)
    assert list(place.path.iterdir()) == []
    assert place.files() == AFTER


def test_what_was_not_begun_is_not_undone(place: Place) -> None:
    """Without an undo nothing of it was changed."""
    assert place.undo() == []
    place.apply()
    (place.path / "rootfs.tar.undo").unlink()
    assert place.undo() == []
    assert place.files() == {path: text for path, text in AFTER.items() if path != "dev/shm/segment"}


@pytest.mark.parametrize("length", [0, 1, 511, 512, 1000], ids=lambda length: f"{length} bytes")
def test_a_cut_undo_means_that_nothing_was_changed(place: Place, length: int) -> None:
    """It is whole on disk before the first change, so that what is cut belongs to an untouched container."""
    (place.path / "rootfs.tar.undo").write_bytes((place.artifact.path / "rootfs.tar").read_bytes()[:length])
    assert place.undo() == []
    assert place.files() == BEFORE


@pytest.mark.parametrize(
    ("make", "words"),
    [
        pytest.param(lambda path: path.symlink_to("/etc/passwd"), "symbolic link", id="a link"),
        pytest.param(lambda path: path.mkdir(), "", id="a directory"),
        pytest.param(lambda path: path.write_bytes(b"\xff" * 4096), "", id="no tar"),
    ],
)
def test_an_undo_that_is_something_else_changes_nothing(place: Place, make: Any, words: str) -> None:
    """It is not followed; what stands there is said or is no undo, and the others are undone."""
    place.apply()
    (place.path / "rootfs.tar.undo").unlink()
    make(place.path / "rootfs.tar.undo")
    problems = place.undo()
    assert all(words in problem and problem.startswith("/: ") for problem in problems)
    assert bool(words) <= bool(problems)
    assert "dev/shm/segment" not in place.files()
    assert place.files()["etc/changed"] == "worker\n"


OVER = """
import ctypes
libc = ctypes.CDLL(None)
assert libc.setns({}, 0) == 0
assert libc.mount(b"over", b"{}", b"tmpfs", 0, None) == 0
"""


@pytest.mark.parametrize("where", ["/dev/shm", "/dev"])
def test_a_mount_that_was_changed_after_the_gate_gets_no_files(place: Place, where: str) -> None:
    """Neither the worker's, nor what would undo them; the sentence names the place."""
    target = place.target()
    place.apply()
    applied = place.files()
    with kit.descriptor(f"/proc/{place.pid}/ns/mnt") as namespace:
        subprocess.run(
            [sys.executable, "-c", OVER.format(namespace, where)], check=True, pass_fds=[namespace]
        )
    if where == "/dev":
        (place.root / "dev/shm").mkdir()
    before = list((place.root / "dev/shm").iterdir())
    (problem,) = place.undo()
    assert problem.startswith("/dev/shm: ")
    assert "covered by another one" in problem
    (place.path / "rootfs.tar.undo").unlink(missing_ok=True)
    (place.path / "shm.tar.undo").unlink()
    with pytest.raises(RefusedError, match="the mount at /dev/shm is covered by another one"):
        filling.apply_files(place.artifact, target, place.directory)
    assert list((place.root / "dev/shm").iterdir()) == before == []
    assert "etc/new" in applied


def test_a_place_that_is_gone_is_said(place: Place) -> None:
    """One sentence for each that cannot be undone; the rest is undone."""
    place.apply()
    with kit.descriptor(f"/proc/{place.pid}/ns/mnt") as namespace:
        code = (
            "import ctypes, os; libc = ctypes.CDLL(None);"
            f"assert libc.setns({namespace}, 0) == 0;"
            "assert libc.umount2(b'/dev/shm', 2) == 0; os.rmdir('/dev/shm')"
        )
        subprocess.run([sys.executable, "-c", code], check=True, pass_fds=[namespace])
    (problem,) = place.undo()
    assert problem.startswith("/dev/shm: ")
    assert (place.root / "etc/changed").read_text() == "image\n"


def test_a_place_that_is_a_link_is_not_filled(place: Place) -> None:
    """The container's own processes cannot point the agent elsewhere; what had been done is undone."""
    held = place.target()  # a look would refuse it afterwards: this is a race
    (place.root / "dev").rename(place.root / "old")
    (place.root / "dev").symlink_to("old")
    with pytest.raises(OSError, match="symbolic link"):
        filling.apply_files(place.artifact, held, place.directory)
    assert (place.root / "etc/changed").read_text() == "worker\n"
    assert place.undo() == []
    assert (place.root / "etc/changed").read_text() == "image\n"
    assert [path.name for path in (place.root / "old/shm").iterdir()] == ["other"]


def test_a_cut_diff_changes_nothing(place: Place) -> None:
    """It is read to its end before the first change."""
    tar = place.artifact.path / "rootfs.tar"
    tar.write_bytes(tar.read_bytes()[:-700])
    with pytest.raises(IntegrityError):
        place.apply()
    assert place.files() == BEFORE
    assert place.undo() == []
    assert place.files() == BEFORE


def test_a_container_that_has_ended_cannot_be_undone_and_is_said(place: Place) -> None:
    """Its files went with it."""
    place.apply()
    os.kill(place.pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        while place.process.alive():
            time.sleep(0.001)
    assert all(problem.startswith("/") for problem in place.undo())


# what a dead agent left -------------------------------------------------------------------------------


def noted(place: Place, **changes: Any) -> dict[str, Any]:
    """Write what the journal of a restore says."""
    return {
        "target": {"pid": place.pid, "start_ticks": place.process.key.start_ticks},
        "started_at": time.time(),
        "applied": [dataclasses.asdict(entry) for entry in place.applied],
        **changes,
    }


def test_a_dead_agents_restore_is_undone_from_its_journal(place: Place) -> None:
    """The container is as it was, and that is said."""
    place.apply()
    assert filling.undo_noted(noted(place), place.directory) == ("its container is as it was", [])
    assert place.files() == BEFORE


@pytest.mark.parametrize(
    ("journal", "said"),
    [
        pytest.param({}, "", id="no container"),
        pytest.param({"target": None}, "", id="null"),
        pytest.param({"target": "4242"}, "", id="a text"),
        pytest.param({"target": [1, 2]}, "", id="a list"),
        pytest.param({"target": {}}, "its container is gone", id="no pid"),
        pytest.param({"target": {"pid": None}}, "its container is gone", id="a pid that is null"),
        pytest.param({"target": {"pid": "x"}}, "its container is gone", id="a pid that is no number"),
        pytest.param({"target": {"pid": [1]}}, "its container is gone", id="a pid that is a list"),
        pytest.param({"target": {"pid": -1}}, "its container is gone", id="a negative pid"),
        pytest.param({"target": {"pid": 0}}, "its container is gone", id="pid 0"),
        pytest.param({"target": {"pid": 1 << 80}}, "its container is gone", id="a huge pid"),
        pytest.param({"target": {"pid": math.inf}}, "its container is gone", id="an endless pid"),
        pytest.param({"target": {"pid": NOBODY_PID, "start_ticks": 1}}, "its container is gone", id="nobody"),
        pytest.param(
            {"target": {"pid": 1, "start_ticks": -1}}, "its container is gone", id="another process"
        ),
        pytest.param({"target": {"pid": 1}}, "its container is gone", id="a pid alone"),
    ],
)
def test_a_journal_that_names_no_container_changes_nothing(
    tmp_path: Path, journal: dict[str, Any], said: str
) -> None:
    """A note that was damaged, or whose container is another process by now."""
    with Dir.open(tmp_path / "restore", create=True, mode=0o700) as directory:
        assert filling.undo_noted(journal, directory) == (said, [])


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"applied": None}, id="null"),
        pytest.param({"applied": 7}, id="a number"),
        pytest.param({"applied": "rootfs.tar"}, id="a text"),
        pytest.param({"applied": [None, 7, "x", [], {}]}, id="entries of other kinds"),
        pytest.param({"applied": [{"undo": "x"}]}, id="half an entry"),
        pytest.param({"applied": [{"undo": "\0", "mount_point": "/"}]}, id="a NUL in a name"),
        pytest.param({"applied": [{"undo": "none", "mount_point": "\0"}]}, id="a NUL in a place"),
        pytest.param({"applied": [{"undo": "../restore", "mount_point": "/"}]}, id="a way out"),
        pytest.param({"started_at": "yesterday"}, id="a time that is a text"),
        pytest.param({"started_at": [1]}, id="a time that is a list"),
        pytest.param({"started_at": None}, id="no time"),
        pytest.param({"started_at": math.nan}, id="a time that is none"),
    ],
)
def test_a_damaged_note_does_not_stop_a_new_agent(place: Place, changes: dict[str, Any]) -> None:
    """It says something, raises nothing, and what it cannot read it does not do."""
    before = place.files()
    assert filling.undo_noted(noted(place, **changes), place.directory)[0]
    assert place.files() == before
    assert place.process.alive()


def test_only_what_came_with_the_restore_is_ended(tmp_path: Path) -> None:
    """The container's init stays, and so does what is older than the restore."""
    (tmp_path / "root").mkdir()
    with (
        box(tmp_path / "root", SLEEPS.format(1000)) as pid,
        Process.open(pid) as process,
        Dir.open(tmp_path / "restore", create=True, mode=0o700) as directory,
    ):
        (other,) = [stat for stat in procfs.tree(pid) if stat.pid != pid]
        began = procfs.start_time(other.start_ticks)
        journal = {"target": {"pid": pid, "start_ticks": process.key.start_ticks}, "applied": []}
        assert filling.undo_noted({**journal, "started_at": began + 1}, directory)[1] == []
        assert procfs.read_stat(other.pid).state not in "ZX"
        assert filling.undo_noted({**journal, "started_at": began}, directory)[1] == []
        while procfs.read_stat(other.pid).state != "Z":
            time.sleep(0.001)
        assert process.alive()


def test_a_container_that_no_gate_has_seen_is_left_alone(tmp_path: Path) -> None:
    """The agent died before it knew that the container only waits: what runs there is none of ours."""
    (tmp_path / "root").mkdir()
    setup = SLEEPS.format(1000)
    with (
        box(tmp_path / "root", setup) as pid,
        Process.open(pid) as process,
        Dir.open(tmp_path / "restore", create=True, mode=0o700) as directory,
    ):
        journal = {"target": {"pid": pid, "start_ticks": process.key.start_ticks}, "started_at": 0.0}
        assert filling.undo_noted(journal, directory) == ("its container was not touched", [])
        (other,) = [stat for stat in procfs.tree(pid) if stat.pid != pid]
        assert other.state not in "ZX"
