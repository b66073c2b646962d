"""A diff applied to a target that is hostile, or while everything fails: nothing leaks, all comes back."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
from pathlib import Path

import pytest

from hibernode.artifact import rootfs_apply
from hibernode.errors import HibernodeError, IntegrityError, RefusedError
from tests.unit import rootfs_kit as kit


@pytest.fixture
def maker(tmp_path):
    """Make overlays on one image, on a tmpfs for speed."""
    with kit.tmpfs(tmp_path / "t", "256m") as base, kit.overlays(base) as made:
        kit.fill(made.lower)
        yield made


@pytest.fixture
def changed(maker, tmp_path):
    """Save the diff of an overlay that was changed in every way; gives the tree that it leads to."""
    source = maker.make()
    kit.change(source.merged)
    source.save(tmp_path / "tar")
    return kit.snapshot(source.merged)


class Fault(BaseException):
    """Not an Exception: nothing may catch it, as nothing catches SIGKILL."""


class FailAt:
    """A hook that raises, or kills this process, at its n-th call."""

    def __init__(self, number: int, *, kill: bool = False) -> None:
        self.left = number
        self.kill = kill

    def __call__(self, path: bytes) -> None:
        self.left -= 1
        if self.left == 0:
            if self.kill:
                os.kill(os.getpid(), 9)
            raise Fault


def count_steps(target: Path, tar: Path) -> int:
    """Count the steps of phase two."""
    counter = FailAt(-1)
    with kit.descriptor(target) as root, kit.descriptor(tar) as source:
        rootfs_apply.perform(root, source, max_bytes=kit.LIMIT, hook=counter)
    return -1 - counter.left


def prepare(target: Path, tar: Path, undo: Path) -> object:
    """Do phase one."""
    with kit.descriptor(target) as root, kit.descriptor(tar) as source, undo.open("wb") as out:
        return rootfs_apply.prepare(root, source, out, max_bytes=kit.LIMIT)


# everything fails --------------------------------------------------------------------------------------


def test_undo_brings_the_tree_back_from_every_step(maker, changed, tmp_path):
    """Phase two fails at each of its steps in turn, and undo at some of its own before it is repeated."""
    target = maker.make()
    before = kit.snapshot(target.merged)
    prepare(target.merged, tmp_path / "tar", tmp_path / "undo")
    assert kit.differences(before, kit.snapshot(target.merged)) == {}, "phase one changes nothing"
    steps = count_steps(target.merged, tmp_path / "tar")
    kit.take_back(target.merged, tmp_path / "undo")
    assert kit.differences(before, kit.snapshot(target.merged)) == {}
    assert steps > 100
    for step in range(1, steps + 1):
        with kit.descriptor(target.merged) as root, kit.descriptor(tmp_path / "tar") as tar:
            with pytest.raises(Fault):
                rootfs_apply.perform(root, tar, max_bytes=kit.LIMIT, hook=FailAt(step))
            with kit.descriptor(tmp_path / "undo") as undo:
                try:
                    rootfs_apply.undo(root, undo, hook=FailAt(step * 7 % 50 + 1))
                except Fault:
                    rootfs_apply.undo(root, undo)
        assert kit.differences(before, kit.snapshot(target.merged)) == {}, step


@pytest.mark.parametrize("step", [1, 17, 60, 111])
def test_undo_brings_the_tree_back_after_a_kill(maker, changed, tmp_path, step):
    """A process that applies is killed for good; another one undoes, and can apply again."""
    target = maker.make()
    before = kit.snapshot(target.merged)
    prepare(target.merged, tmp_path / "tar", tmp_path / "undo")
    pid = os.fork()
    if pid == 0:
        try:
            with kit.descriptor(target.merged) as root, kit.descriptor(tmp_path / "tar") as tar:
                rootfs_apply.perform(root, tar, max_bytes=kit.LIMIT, hook=FailAt(step, kill=True))
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == 9
    kit.take_back(target.merged, tmp_path / "undo")
    assert kit.differences(before, kit.snapshot(target.merged)) == {}
    kit.apply(target.merged, tmp_path / "tar", tmp_path / "undo")
    assert kit.differences(changed, kit.snapshot(target.merged)) == {}


def test_an_inverse_that_was_never_finished_is_told_from_a_whole_one(maker, changed, tmp_path):
    """Undo says so and changes nothing, for nothing had been changed."""
    target = maker.make()
    before = kit.snapshot(target.merged)
    prepare(target.merged, tmp_path / "tar", tmp_path / "undo")
    whole = (tmp_path / "undo").read_bytes()
    for size in (0, 512, len(whole) // 2, len(whole) - 512):
        (tmp_path / "cut").write_bytes(whole[:size])
        with pytest.raises(IntegrityError, match="not whole"):
            kit.take_back(target.merged, tmp_path / "cut")
    assert kit.differences(before, kit.snapshot(target.merged)) == {}


def test_a_target_that_is_full_in_the_middle_can_be_brought_back(maker, tmp_path):
    """The kernel says ENOSPC, which the check of the free space could not foresee."""
    source = maker.make()
    (source.merged / "etc/modified").write_bytes(os.urandom(2 << 20))
    source.save(tmp_path / "tar")
    with kit.tmpfs(tmp_path / "small", "4m") as small:
        (small / "etc").mkdir()
        (small / "etc/modified").write_text("image")
        (small / "filler").write_bytes(b"")
        before = kit.snapshot(small)
        prepare(small, tmp_path / "tar", tmp_path / "undo")
        (small / "filler").write_bytes(b"x" * (3 << 20))
        with (
            kit.descriptor(small) as root,
            kit.descriptor(tmp_path / "tar") as tar,
            pytest.raises(OSError, match="No space left"),
        ):
            rootfs_apply.perform(root, tar, max_bytes=kit.LIMIT)
        kit.take_back(small, tmp_path / "undo")
        after = kit.snapshot(small)
    assert before.pop(b"/filler") != after.pop(b"/filler")
    assert kit.differences(before, after) == {}


# refused, and nothing touched --------------------------------------------------------------------------


def refused(target: Path, tmp_path: Path, reason: str, **options: object) -> HibernodeError:
    """Apply, see it refused for a reason, and find the tree as it was."""
    before = kit.snapshot(target)
    with pytest.raises(HibernodeError) as caught:
        kit.apply(target, tmp_path / "tar", tmp_path / "undo", **options)
    assert caught.value.reason == reason
    assert caught.value.remedy
    assert kit.differences(before, kit.snapshot(target)) == {}
    return caught.value


def test_a_diff_that_is_larger_than_allowed_is_refused(maker, changed, tmp_path):
    """The caller's bound counts what is stored, not holes."""
    target = maker.make()
    assert isinstance(refused(target.merged, tmp_path, "RootfsTarTooLarge", max_bytes=100_000), RefusedError)


def test_a_diff_that_surely_does_not_fit_is_refused(maker, tmp_path):
    """By the free space of the target's file system."""
    source = maker.make()
    (source.merged / "etc/new").write_bytes(b"x" * (3 << 20))
    source.save(tmp_path / "tar")
    with kit.tmpfs(tmp_path / "small", "2m") as small:
        assert "needs 3145728 bytes" in refused(small, tmp_path, "NoSpace").message


MOUNTS = [
    pytest.param("etc/modified", "etc/modified", id="on a file that is modified"),
    pytest.param("etc/deleted", "etc/deleted", id="on a file that is deleted"),
    pytest.param("usr/lib/deep/er", "usr/lib/deep", id="inside a directory that is deleted"),
    pytest.param("etc/dir-to-file/inner", "etc/dir-to-file", id="inside a directory that becomes a file"),
    pytest.param("etc", "etc", id="on a directory that is changed"),
    pytest.param("opt/opaque/again", "opt/opaque/again", id="on a file of an opaque directory"),
]


@pytest.mark.parametrize(("point", "named"), MOUNTS)
@pytest.mark.usefixtures("changed")
def test_nothing_is_done_on_a_mount(maker, tmp_path, point, named):
    """The mount stays, and what it covers too."""
    target = maker.make()
    if (target.merged / point).is_dir():
        kit.mount("-t", "tmpfs", "tmpfs", str(target.merged / point))
    else:
        kit.mount("--bind", str(maker.lower / "etc/kept"), str(target.merged / point))
    try:
        error = refused(target.merged, tmp_path, "OtherMount")
        assert error.fields["path"] == named
    finally:
        kit.unmount(target.merged / point)


def test_a_file_in_place_of_the_way_to_a_mount_is_refused(maker, tmp_path):
    """In an opaque directory the way to a mount stays, so nothing else can stand there."""
    source, target = maker.make(), maker.make()
    (source.merged / "run").rmdir()
    (source.merged / "run").mkdir()
    (source.merged / "run/x").write_text("x")
    source.save(tmp_path / "tar")
    (target.merged / "run/x/y").mkdir(parents=True)
    with kit.tmpfs(target.merged / "run/x/y"):
        assert refused(target.merged, tmp_path, "OtherMount").fields["path"] == "run/x"


@pytest.mark.parametrize("kind", ["socket", "device"])
def test_what_could_not_be_brought_back_is_not_removed(maker, changed, tmp_path, kind):
    """A socket that somebody listens on, a device: refused before anything is touched."""
    target = maker.make()
    path = target.merged / "usr/lib/deep/odd"
    with socket.socket(socket.AF_UNIX) as listener:
        if kind == "socket":
            listener.bind(str(path))
        else:
            os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))
        assert "'/usr/lib/deep/odd'" in refused(target.merged, tmp_path, "CannotUndo").message


@pytest.mark.usefixtures("changed")
def test_a_target_that_is_read_only_is_refused(maker, tmp_path):
    """As with readOnlyRootFilesystem in one pod and not in the other."""
    target = maker.make()
    kit.mount("-o", "remount,bind,ro", str(target.merged))
    assert refused(target.merged, tmp_path, "ReadOnlyTarget")


def test_an_inverse_that_cannot_be_written_stops_before_any_change(maker, changed, tmp_path):
    """A full disk on our side."""
    target = maker.make()
    before = kit.snapshot(target.merged)
    with (
        kit.descriptor(target.merged) as root,
        kit.descriptor(tmp_path / "tar") as tar,
        open("/dev/full", "wb", buffering=0) as out,
        pytest.raises(OSError, match="No space left"),
    ):
        rootfs_apply.apply(root, tar, out, max_bytes=kit.LIMIT)
    assert kit.differences(before, kit.snapshot(target.merged)) == {}


# a hostile tree ----------------------------------------------------------------------------------------

LINKS = [
    pytest.param("etc", id="a parent of changed files"),
    pytest.param("usr/lib", id="a parent of deleted files"),
    pytest.param("opt/opaque", id="an opaque directory"),
    pytest.param("etc/modified", id="a changed file"),
    pytest.param("etc/new", id="a new file"),
    pytest.param("links", id="a parent of hard links"),
]


@pytest.mark.parametrize("place", LINKS)
@pytest.mark.parametrize("absolute", [True, False], ids=["absolute", "relative"])
def test_links_in_the_target_lead_nowhere(maker, changed, tmp_path, place, absolute):
    """They are replaced as what they are; the directory outside that they name stays as it is."""
    target = maker.make()
    outside = tmp_path / "t/outside"
    kit.fill(outside)
    (target.merged / place).parent.mkdir(exist_ok=True)
    kit.remove(target.merged / place)
    (target.merged / place).symlink_to(
        outside / place if absolute else os.path.relpath(outside / place, (target.merged / place).parent)
    )
    before, there = kit.snapshot(target.merged), kit.snapshot(outside)
    kit.apply(target.merged, tmp_path / "tar", tmp_path / "undo")
    paths = [
        path for path in kit.differences(changed, kit.snapshot(target.merged)) if path.startswith(b"/etc/n")
    ]
    assert paths == []
    assert kit.differences(there, kit.snapshot(outside)) == {}
    kit.take_back(target.merged, tmp_path / "undo")
    assert kit.differences(there, kit.snapshot(outside)) == {}
    assert kit.differences(before, kit.snapshot(target.merged)) == {}


def test_a_parent_that_becomes_a_link_in_the_middle_is_not_followed(maker, changed, tmp_path):
    """A process of the target swaps a directory while we work in it: an error, and nothing outside."""
    target = maker.make()
    outside = tmp_path / "t/outside"
    kit.fill(outside)
    there = kit.snapshot(outside)

    def swap(path):
        if path == b"etc/new" and not (target.merged / "etc").is_symlink():
            (target.merged / "etc").rename(target.merged / "moved")
            (target.merged / "etc").symlink_to(outside / "etc")

    with (
        kit.descriptor(target.merged) as root,
        kit.descriptor(tmp_path / "tar") as tar,
        pytest.raises((OSError, RefusedError)),
    ):
        rootfs_apply.perform(root, tar, max_bytes=kit.LIMIT, hook=swap)
    assert kit.differences(there, kit.snapshot(outside)) == {}


def test_a_deep_tree_in_the_target_is_removed_and_brought_back(maker, changed, tmp_path):
    """Deeper than Python recurses, wide enough for the longest path."""
    target = maker.make()
    deep = target.merged / "usr/lib/deep" / "/".join(["d"] * 1500)
    subprocess.run(["mkdir", "-p", str(deep)], check=True)
    (deep / "bottom").write_text("bottom")
    before = kit.snapshot(target.merged)
    kit.apply(target.merged, tmp_path / "tar", tmp_path / "undo")
    assert kit.differences(changed, kit.snapshot(target.merged)) == {}
    kit.take_back(target.merged, tmp_path / "undo")
    assert kit.differences(before, kit.snapshot(target.merged)) == {}


def test_a_mount_of_another_namespace_survives(maker, changed, tmp_path):
    """Removing a mount point from outside would unmount it there, silently; so it is found beforehand."""
    target = maker.make()
    told, tell = os.pipe()
    end, stop = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            kit.own_mounts()
            kit.mount("-t", "tmpfs", "tmpfs", str(target.merged / "usr/lib/deep/er"))
            os.write(tell, b"x")
            os.close(stop)
            os.read(end, 1)
            (target.merged / "usr/lib/deep/er/still-here").touch()
            with open("/proc/self/mountinfo") as file:
                os._exit(0 if "/usr/lib/deep/er" in file.read() else 2)
        finally:
            os._exit(1)
    os.close(tell)
    assert os.read(told, 1) == b"x"
    with (
        kit.descriptor(f"/proc/{pid}/root{target.merged}") as root,
        kit.descriptor(tmp_path / "tar") as tar,
        (tmp_path / "undo").open("wb") as out,
        pytest.raises(RefusedError, match="mount"),
    ):
        rootfs_apply.apply(root, tar, out, max_bytes=kit.LIMIT)
    os.close(stop)
    assert os.waitpid(pid, 0)[1] == 0
    for fd in (told, end):
        os.close(fd)
