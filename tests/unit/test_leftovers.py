"""What killed helpers leave among a container's files: found by shape and time, nothing else is removed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from hibernode.container.leftovers import MARKER, files_of, remove_marker
from hibernode.host import procfs
from tests.unit.box_kit import box

LATER = 3600.0


def marker(path: Path | str) -> dict[str, object]:
    """Write a marker as the shim's ``spec.json`` has it."""
    return {"path": str(path), "uid": 0, "gid": 0, "groups": []}


def test_the_marker_of_a_killed_shim_is_removed(tmp_path: Path) -> None:
    """It is as the shim writes it and was made since the restore began; a link may lead to it."""
    (tmp_path / "run").mkdir()
    (tmp_path / "var").symlink_to("run")
    began = time.time()
    for name in ("run", "var"):
        (tmp_path / name / "restored").write_bytes(MARKER)
        remove(marker(tmp_path / name / "restored"), began)
        assert list((tmp_path / "run").iterdir()) == []


def remove(noted: object, began: float) -> None:
    """Remove it as we see files ourselves."""
    with files_of(os.getpid()) as root:
        remove_marker(root, noted, began)


@pytest.mark.parametrize("size", [0, 4])
def test_a_marker_of_which_only_a_part_was_written_is_removed(tmp_path: Path, size: int) -> None:
    """A worker that starts cold looks only whether there is one."""
    (tmp_path / "restored").write_bytes(MARKER[:size])
    remove(marker(tmp_path / "restored"), time.time())
    assert list(tmp_path.iterdir()) == []


def older(path: Path) -> None:
    """Make a marker that was there before: the caller's restore begins an hour from now."""
    path.write_bytes(MARKER)


def other_text(path: Path) -> None:
    """Make a file that somebody else wrote."""
    path.write_bytes(b"mine\n")


def longer(path: Path) -> None:
    """Make a file that only begins like a marker."""
    path.write_bytes(MARKER + b"more\n")


def link(path: Path) -> None:
    """Make a link to a marker."""
    path.with_name("elsewhere").write_bytes(MARKER)
    path.symlink_to("elsewhere")


def pipe(path: Path) -> None:
    """Make a pipe that nobody writes to."""
    os.mkfifo(path)


def directory(path: Path) -> None:
    """Make a directory."""
    path.mkdir()


@pytest.mark.parametrize("make", [older, other_text, longer, link, pipe, directory])
def test_what_is_no_marker_of_this_restore_stays(tmp_path: Path, make: object) -> None:
    """Whatever else stands under the name is the container's own."""
    assert callable(make)
    make(tmp_path / "restored")
    before = sorted(path.name for path in tmp_path.iterdir())
    remove(marker(tmp_path / "restored"), time.time() + LATER * (make is older))
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    "noted",
    [
        None,
        "restored",
        {},
        {"path": 7},
        {"path": ""},
        {"path": "/"},
        {"path": "/a\0b"},
        {"path": "/no/such/file"},
    ],
    ids=repr,
)
def test_a_damaged_note_removes_nothing(noted: object) -> None:
    """The note is read from disk, and may say anything."""
    remove(noted, 0.0)


def test_a_marker_on_a_volume_is_reached_when_the_container_has_ended(tmp_path: Path) -> None:
    """A placeholder ends as soon as its worker is ended; the volume is the next container's too."""
    script = f"mount -t tmpfs volume data; printf '{MARKER.decode().strip()}\\n' >data/restored"
    with box(tmp_path, script) as pid, files_of(pid) as root:
        os.kill(pid, signal.SIGKILL)
        while procfs.read_stat(pid).state not in "ZX":
            time.sleep(0.001)
        assert os.stat("data/restored", dir_fd=root).st_size == len(MARKER)
        remove_marker(root, marker("/data/restored"), 0.0)
        assert os.listdir(os.open("data", os.O_RDONLY, dir_fd=root)) == []
