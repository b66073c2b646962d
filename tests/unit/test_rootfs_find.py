"""Where a process has its root, and where its overlay keeps what was changed: read from real mounts."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from hibernode.artifact import rootfs
from hibernode.artifact.rootfs_find import open_upper, root_of
from hibernode.errors import RefusedError
from tests.unit import rootfs_kit as kit


@pytest.fixture
def maker(tmp_path):
    """Make overlays on one image."""
    with kit.overlays(tmp_path) as made:
        kit.fill(made.lower)
        yield made


@pytest.fixture
def inhabitant():
    """Start processes with a root of their own, and end them."""
    pids = []

    def start(root):
        ready, told = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.chroot(root)
                os.chdir("/")
                os.close(ready)
                os.close(told)
                signal.pause()
            finally:
                os._exit(1)
        os.close(told)
        os.read(ready, 1)
        os.close(ready)
        pids.append(pid)
        return pid

    yield start
    for pid in pids:
        os.kill(pid, 9)
        os.waitpid(pid, 0)


def test_the_upper_directory_of_a_process_is_found_and_saved(maker, tmp_path, inhabitant):
    """From mountinfo, with the mounts below its root named."""
    source = maker.make()
    (source.merged / "etc/new").write_text("new")
    with kit.tmpfs(source.merged / "mnt"):
        pid = inhabitant(source.merged)
        root = root_of(pid)
        assert (root.fs_type, root.upper, root.index) == ("overlay", str(source.upper), False)
        assert root.mount_points == ("/mnt",)
        assert root.upper
        upper = open_upper(root.upper, runtime_pid=os.getpid())
        with kit.descriptor(f"/proc/{pid}/root", os.O_PATH) as merged, (tmp_path / "tar").open("wb") as out:
            assert rootfs.save(upper, merged, out, index=root.index).entries == 3
        os.close(upper)


def test_an_overlay_with_an_index_is_recognised(maker, inhabitant):
    """Since a changed hard link means more there."""
    assert root_of(inhabitant(maker.make("index=on").merged)).index


def test_a_root_that_is_read_only_is_recognised(maker, inhabitant):
    """Its processes changed nothing."""
    target = maker.make()
    assert not root_of(inhabitant(target.merged)).read_only
    kit.mount("-o", "remount,bind,ro", str(target.merged))
    assert root_of(inhabitant(target.merged)).read_only


def test_a_root_that_is_no_overlay_has_no_upper_directory(tmp_path, inhabitant):
    """A plain file system: the caller says so and goes on without a diff."""
    with kit.tmpfs(tmp_path / "t") as top:
        root = root_of(inhabitant(top))
    assert (root.fs_type, root.upper, root.index) == ("tmpfs", None, False)


def test_a_root_that_is_no_mount_is_refused(tmp_path, inhabitant):
    """Nothing tells what belongs to it."""
    with pytest.raises(RefusedError, match="no mount"):
        root_of(inhabitant(tmp_path))


def test_a_relative_upper_directory_is_refused(maker, inhabitant):
    """Nobody knows what it was relative to."""
    top = maker.base / "relative"
    for name in ("u", "w", "m"):
        (top / name).mkdir(parents=True)
    options = f"lowerdir={maker.lower},upperdir=u,workdir=w"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, "m"], cwd=top, check=True)
    maker.cleanup.callback(kit.unmount, top / "m")
    with pytest.raises(RefusedError, match="relative upperdir 'u'"):
        root_of(inhabitant(top / "m"))
