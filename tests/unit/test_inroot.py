"""Paths as a process sees them, tried on a process whose root is elsewhere."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hibernode.host import inroot
from tests.unit.box_kit import box


def test_an_absolute_link_leads_below_the_process_s_own_root(tmp_path: Path) -> None:
    """It does not lead to the file of that name here; descriptors are closed on exec and afterwards."""
    (tmp_path / "root").mkdir()
    with box(tmp_path / "root", "echo theirs >data/file; ln -s /data/file data/link") as pid:
        with inroot.opened(pid, "/data/link", os.O_RDONLY) as fd:
            assert os.read(fd, 64) == b"theirs\n"
            assert not os.get_inheritable(fd)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
        with inroot.opened(pid, "../../data", os.O_PATH | os.O_DIRECTORY) as fd:
            assert os.listdir(f"/proc/self/fd/{fd}") != []


def test_links_of_proc_and_what_is_not_there_are_refused(tmp_path: Path) -> None:
    """A link of /proc leads out of any root; a process that is gone has none."""
    (tmp_path / "root").mkdir()
    with (
        box(tmp_path / "root") as pid,
        pytest.raises(OSError, match="symbolic links"),
        inroot.opened(pid, "/proc/1/root/data", os.O_PATH),
    ):
        pass
    with pytest.raises(FileNotFoundError), inroot.opened(1 << 22, "/", os.O_PATH):
        pass
