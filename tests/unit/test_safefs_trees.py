"""Whole trees below a directory: removed, synced, closed to others, whatever lies in them."""

from __future__ import annotations

import os
import stat
import subprocess
import sys

import pytest

from hibernode.errors import RefusedError
from hibernode.host import safefs
from hibernode.host.safefs import Dir
from tests.unit import hostile


@pytest.fixture
def top(tmp_path):
    """Open a directory beside a secret."""
    with hostile.directory_beside_a_secret(tmp_path) as directory:
        yield directory


@pytest.fixture
def secret(top):
    """Name the secret, which no test may change."""
    with hostile.secret_is_kept(top) as path:
        yield path


def odd_tree(top: Dir) -> None:
    """Make ``tree`` with everything that can lie in one; its links lead to the secret."""
    tree = top.path / "tree"
    tree.mkdir()
    (tree / "relative").symlink_to("../../outside/secret")
    (tree / "to a directory").symlink_to("../../outside")
    (tree / "dangling").symlink_to("../../outside/new")
    (tree / "loop").symlink_to("loop")
    os.mkfifo(tree / "fifo")
    hostile.make_device(tree / "device")
    hostile.make_socket(tree / "socket")
    hostile.plain(tree / "file")
    (tree / os.fsdecode(b"\xff\n")).mkdir()
    (tree / ("x" * 255)).mkdir()
    for number in range(300):
        (tree / "wide" / str(number) / "deep").mkdir(parents=True)
        hostile.plain(tree / "wide" / str(number) / "x")
    (tree / "wide").chmod(0o000)


def test_a_tree_is_removed_whatever_is_in_it(top, secret):
    """Links are removed and not followed; the other name of a hard link stays."""
    odd_tree(top)
    os.link(secret, top.path / "tree" / "hard")
    hostile.plain(top.path / "kept")
    top.remove_tree("tree")
    assert top.names() == ["kept"]


@pytest.mark.parametrize(
    "make",
    [
        hostile.relative_link,
        hostile.dangling_link,
        hostile.hard_link,
        os.mkfifo,
        hostile.make_device,
        hostile.plain,
    ],
)
def test_removal_of_a_tree_that_is_none_removes_the_name(top, secret, make):
    """A link in place of the tree goes; an absent one is gone already."""
    make(top.path / "x")
    top.remove_tree("x")
    top.remove_tree("x")
    assert top.names() == []


def test_a_tree_of_three_thousand_levels_is_removed(top):
    """Neither the stack nor the descriptors nor PATH_MAX bound the depth."""
    fd = os.dup(top.fd)
    for _ in range(3000):
        os.mkdir("d", dir_fd=fd)
        inner = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = inner
    os.close(fd)
    top.remove_tree("d")
    assert top.names() == []


MOUNTED = """
import sys
from pathlib import Path
from hibernode.errors import RefusedError
from hibernode.host.safefs import Dir
with Dir.open(Path(sys.argv[1])) as top:
    looks = {"tree": top.remove_tree, "tree/mounted": top.subdir, "tree/mounted/x": top.open_file}
    for path, look in looks.items():
        try:
            look(path)
        except RefusedError as error:
            print(error.reason)
"""


def test_a_mount_below_is_not_entered(top):
    """What another file system holds there is neither read nor removed."""
    (top.path / "tree" / "mounted").mkdir(parents=True)
    script = (
        'cd "$1/tree/mounted" && mount -t tmpfs x . && cd . && echo kept >x && "$2" -c "$3" "$1" && cat x'
    )
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, "sh", top.path, sys.executable, MOUNTED],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == ["OtherMount"] * 3 + ["kept"]


def test_a_tree_is_synced_and_closed_to_others(top, secret):
    """Directories become 0700 and files 0600; links and odd things are neither followed nor opened."""
    odd_tree(top)
    with top.subdir("tree") as tree:
        safefs.sync_tree(tree)
        safefs.chmod_tree(tree)
    modes = {
        stat.S_IMODE(path.lstat().st_mode)
        for path in (top.path / "tree").rglob("*")
        if path.is_dir() and not path.is_symlink()
    }
    assert modes == {0o700}
    assert stat.S_IMODE((top.path / "tree").stat().st_mode) == 0o700
    assert stat.S_IMODE((top.path / "tree" / "wide" / "7" / "x").stat().st_mode) == 0o600


def test_the_mode_of_a_file_with_another_name_is_not_changed(top, secret):
    """The other name may be anybody's; syncing it harms nobody."""
    hostile.hard_link(top.path / "x")
    safefs.sync_tree(top)
    with pytest.raises(RefusedError, match="hard links"):
        safefs.chmod_tree(top)


def test_a_walk_that_goes_too_deep_is_refused(top):
    """Each level holds a descriptor, so there is a limit."""
    (top.path / "/".join("d" * safefs.MAX_DEPTH)).mkdir(parents=True)
    with pytest.raises(RefusedError) as caught:
        safefs.sync_tree(top)
    assert caught.value.reason == "TooDeep"


def test_free_space_is_what_statvfs_says(top):
    """By path and by descriptor, without root's reserve; the device is busy, so to a few megabytes."""
    status = os.statvfs(top.path)
    for asked in (top.path, str(top.path), top.fd):
        assert 0 <= safefs.free_bytes(asked) <= status.f_blocks * status.f_frsize
    assert safefs.free_bytes("/proc") == 0
