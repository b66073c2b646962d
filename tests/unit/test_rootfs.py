"""The diff of a container's root: saved from one overlay, applied to another, equal to the last attribute."""

from __future__ import annotations

import os
import re
import socket
import stat
import subprocess
import tarfile
from pathlib import Path

import pytest

from hibernode.artifact import rootfs
from hibernode.artifact.rootfs import compile_patterns
from hibernode.artifact.rootfs_read import check, read
from hibernode.artifact.rootfs_tar import Entry, Kind
from hibernode.errors import IntegrityError, RefusedError, UsageError
from tests.unit import rootfs_kit as kit


@pytest.fixture
def maker(tmp_path):
    """Make overlays on one image."""
    with kit.overlays(tmp_path) as made:
        kit.fill(made.lower)
        yield made


def entries(tar: Path) -> dict[bytes, Entry]:
    """Read a tar's entries by path."""
    with kit.descriptor(tar) as fd:
        return {entry.path: entry for entry in read(fd, max_bytes=kit.LIMIT)}


MOUNT_OPTIONS = [
    pytest.param("index=off", id="as containerd mounts"),
    pytest.param("redirect_dir=on", id="directories renamed by redirect"),
    pytest.param("redirect_dir=on,metacopy=on", id="metadata copied up alone"),
    pytest.param("userxattr", id="marks in user attributes"),
    pytest.param("index=on", id="an index of hard links"),
    pytest.param("xino=on", id="inode numbers composed"),
]


@pytest.mark.parametrize("options", MOUNT_OPTIONS)
def test_the_target_becomes_the_source_and_then_itself_again(maker, tmp_path, options):
    """Apply makes the two trees equal; undo makes the target what it was; both may be repeated."""
    source, target = maker.make(options), maker.make()
    before = kit.snapshot(target.merged)
    kit.change(source.merged)
    wanted = kit.snapshot(source.merged)
    source.save(tmp_path / "tar", index="index=on" in options)
    for _ in range(2):
        kit.apply(target.merged, tmp_path / "tar", tmp_path / "undo")
        assert kit.differences(wanted, kit.snapshot(target.merged)) == {}
        for _ in range(2):
            kit.take_back(target.merged, tmp_path / "undo")
            assert kit.differences(before, kit.snapshot(target.merged)) == {}
    assert kit.differences(wanted, kit.snapshot(source.merged)) == {}, "saving changes nothing"


def test_a_diff_applied_to_what_it_made_changes_nothing(maker, tmp_path):
    """A tree that already is as the tar says is so afterwards."""
    source = maker.make()
    kit.change(source.merged)
    wanted = kit.snapshot(source.merged)
    source.save(tmp_path / "tar")
    kit.apply(source.merged, tmp_path / "tar", tmp_path / "undo")
    assert kit.differences(wanted, kit.snapshot(source.merged)) == {}


def test_the_upper_layer_may_be_a_tmpfs(tmp_path):
    """Upper, work and lower directory on a tmpfs: the same promise."""
    with kit.tmpfs(tmp_path / "t") as base, kit.overlays(base) as maker:
        kit.fill(maker.lower)
        source, target = maker.make(), maker.make()
        kit.change(source.merged)
        source.save(tmp_path / "tar")
        kit.apply(target.merged, tmp_path / "tar", tmp_path / "undo")
        assert kit.differences(kit.snapshot(source.merged), kit.snapshot(target.merged)) == {}


def test_what_was_saved_is_counted(maker, tmp_path):
    """Entries, bytes without holes, whiteouts, and each kind of thing that is left out."""
    source = maker.make()
    root = source.merged
    (root / "etc/deleted").unlink()
    kit.sparse(root / "etc/sparse", 1 << 30, {0: b"x" * 4096})
    (root / "etc/__pycache__").mkdir()
    (root / "etc/__pycache__/x.pyc").write_text("x")
    with socket.socket(socket.AF_UNIX) as listener:
        (root / "tmp/s").unlink(missing_ok=True)
        listener.bind(str(root / "tmp/s"))
        os.mknod(root / "tmp/null", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        os.mknod(root / "tmp/disk", 0o666 | stat.S_IFBLK, os.makedev(7, 0))
        saved = source.save(tmp_path / "tar", excluded=["__pycache__"])
    # /, etc, deleted, sparse, tmp, and a whiteout each for the socket and the devices
    assert saved == rootfs.Saved(
        entries=8, bytes=4096, whiteouts=4, excluded=1, sockets=1, devices=2, mounts=0
    )
    with kit.descriptor(tmp_path / "tar") as fd:
        summary = check(fd, max_bytes=kit.LIMIT)
    assert (summary.entries, summary.logical_bytes, summary.whiteouts) == (8, 1 << 30, 4)
    assert (tmp_path / "tar").stat().st_size < 32 << 10


def test_an_overlay_that_nobody_changed_gives_its_root_alone(maker, tmp_path):
    """The root's own metadata are always there."""
    assert maker.make().save(tmp_path / "tar").entries == 1
    assert list(entries(tmp_path / "tar")) == [b""]


def test_a_socket_in_place_of_an_image_file_hides_it_in_the_target(maker, tmp_path):
    """The socket is not saved, and the file that it replaced does not come back."""
    source, target = maker.make(), maker.make()
    (source.merged / "etc/kept").unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(source.merged / "etc/kept"))
        source.save(tmp_path / "tar")
    kit.apply(target.merged, tmp_path / "tar", tmp_path / "undo")
    assert not (target.merged / "etc/kept").exists()


def test_a_broken_hard_link_of_the_image_is_a_file_of_its_own(maker, tmp_path):
    """With index=off, a change to one of two names in a lower layer copies it; so it is saved."""
    source, target = maker.make(), maker.make()
    (source.merged / "usr/lib/a").write_text("changed")
    wanted = kit.snapshot(source.merged)
    source.save(tmp_path / "tar")
    kit.apply(target.merged, tmp_path / "tar", tmp_path / "undo")
    assert kit.differences(wanted, kit.snapshot(target.merged)) == {}
    kit.take_back(target.merged, tmp_path / "undo")
    assert (target.merged / "usr/lib/a").read_text() == (target.merged / "usr/lib/b").read_text()


def test_a_changed_file_that_an_index_shares_with_a_lower_name_is_refused(maker, tmp_path):
    """With index=on the other name changes with it, though no upper directory shows that: nothing is lost."""
    source = maker.make("index=on")
    (source.merged / "usr/lib/a").write_text("changed")
    assert (source.merged / "usr/lib/b").read_text() == "changed"
    with pytest.raises(RefusedError, match="1 more names") as caught:
        source.save(tmp_path / "tar", index=True)
    assert caught.value.reason == "SharedHardLink"
    (source.merged / "usr/lib/b").write_text("changed by its other name, which copies that up too")
    assert source.save(tmp_path / "tar", index=True).entries
    os.rename(source.merged / "usr/lib/a", source.merged / "mnt/a")
    (source.merged / "usr/lib/b").unlink()
    assert source.save(tmp_path / "tar", index=True).entries


def test_whiteouts_are_what_the_merged_view_does_not_have(maker, tmp_path):
    """Both forms: a device 0/0, and an empty file with an attribute where the kernel takes it for one."""
    lower = maker.base / "middle"
    lower.mkdir()
    for name in ("etc", "usr"):
        (lower / name).mkdir()
    os.setxattr(lower / "etc", "trusted.overlay.opaque", b"x")
    (lower / "etc/modified").touch()
    os.setxattr(lower / "etc/modified", "trusted.overlay.whiteout", b"")
    os.mknod(lower / "etc/deleted", stat.S_IFCHR, 0)
    upper = maker.base / "made"
    upper.mkdir()
    kit.mount("-t", "overlay", "overlay", "-o", f"lowerdir={lower}:{maker.lower}", str(upper))
    maker.cleanup.callback(kit.unmount, upper)
    os.utime(lower, ns=(kit.MTIME, kit.MTIME))
    with kit.descriptor(lower) as up, kit.descriptor(upper) as merged, (tmp_path / "tar").open("wb") as out:
        rootfs.save(up, merged, out)
    found = entries(tmp_path / "tar")
    assert found[b"etc/deleted"].kind is found[b"etc/modified"].kind is Kind.WHITEOUT
    assert not any("overlay" in name for entry in found.values() for name in entry.metadata.xattrs)
    assert not found[b"etc"].opaque


def test_mount_points_and_what_is_on_them_are_left_out(maker, tmp_path):
    """A mounted directory, a mounted file and the empty things that a runtime made below them."""
    source, target = maker.make(), maker.make()
    (source.merged / "etc/resolv.conf").touch()
    (source.merged / "run").rmdir()
    (source.merged / "run/secrets/token").mkdir(parents=True)
    (source.merged / "run/secrets/mine").write_text("mine")
    (target.merged / "run/secrets/token").mkdir(parents=True)
    (target.merged / "run/secrets/theirs").write_text("theirs")
    kit.mount("--bind", str(maker.lower / "etc/kept"), str(source.merged / "etc/resolv.conf"))
    maker.cleanup.callback(kit.unmount, source.merged / "etc/resolv.conf")
    for root in (source.merged, target.merged):
        kit.mount("-t", "tmpfs", "tmpfs", str(root / "run/secrets/token"))
        maker.cleanup.callback(kit.unmount, root / "run/secrets/token")
        (root / "run/secrets/token/secret").write_text("secret")
    saved = source.save(tmp_path / "tar")
    found = entries(tmp_path / "tar")
    assert saved.mounts == 2
    assert found[b"run"].opaque, "it was removed and made anew"
    assert {path for path in found if path.startswith(b"run/")} == {b"run/secrets", b"run/secrets/mine"}
    assert b"etc/resolv.conf" not in found
    before = kit.snapshot(target.merged)
    kit.apply(target.merged, tmp_path / "tar", tmp_path / "undo")
    assert (target.merged / "run/secrets/mine").exists()
    assert not (target.merged / "run/secrets/theirs").exists()
    assert (target.merged / "run/secrets/token/secret").read_text() == "secret"
    kit.take_back(target.merged, tmp_path / "undo")
    assert kit.differences(before, kit.snapshot(target.merged)) == {}


def test_a_mount_on_a_directory_that_the_worker_deleted_in(maker, tmp_path):
    """What a mount covers in the upper directory is invisible to the processes, so it is not saved."""
    source = maker.make()
    (source.merged / "mnt/covered").write_text("covered")
    with kit.tmpfs(source.merged / "mnt"):
        source.save(tmp_path / "tar")
    assert b"mnt" not in entries(tmp_path / "tar")


EXCLUDED = [
    pytest.param("/proc/**", ["proc/1", "proc/1/fd"], ["proc", "usr/proc/1"], id="all in a directory"),
    pytest.param("/var/cache/*", ["var/cache/a"], ["var/cache", "x/var/cache/a"], id="names of a directory"),
    pytest.param("__pycache__", ["a/b/__pycache__", "__pycache__"], ["a/__pycache__x"], id="a name anywhere"),
    pytest.param("*.pyc", ["a/b.pyc", ".pyc", "\udcff.pyc"], ["a/b.pyc/c", "a.pyo"], id="an ending"),
    pytest.param("/a/**/z", ["a/z", "a/b/c/z"], ["a", "z", "b/a/z"], id="any names between"),
    pytest.param("a?c/x", ["abc/x", "q/a.c/x"], ["a/c/x", "abc"], id="one character"),
    pytest.param("/a[b]+(c)", ["a[b]+(c)"], ["ab"], id="other characters stand for themselves"),
]


@pytest.mark.parametrize(("pattern", "matching", "others"), EXCLUDED)
def test_patterns_match_paths_from_the_root(pattern, matching, others):
    """As the docstring of save says."""
    compiled = compile_patterns([pattern])
    assert compiled
    assert [path for path in matching if not compiled.fullmatch(os.fsencode("/" + path))] == []
    assert [path for path in others if compiled.fullmatch(os.fsencode("/" + path))] == []


@pytest.mark.parametrize("pattern", ["", "/", "a//b", "../x", "/a/./b", "a/"])
def test_a_pattern_that_makes_no_sense_is_a_usage_error(pattern):
    """It is shown, with a remedy."""
    with pytest.raises(UsageError, match=re.escape(repr(pattern))):
        compile_patterns([pattern])


def test_an_upper_directory_of_another_overlay_is_noticed(maker, tmp_path):
    """A whole diff of the wrong container would be worse than none."""
    one, two = maker.make(), maker.make()
    (one.merged / "etc/new").write_text("new")
    os.utime(one.merged, ns=(kit.MTIME, kit.MTIME))
    for same in (False, True):
        if same:
            os.utime(two.merged, ns=(kit.MTIME, kit.MTIME))
        with (
            kit.descriptor(one.upper) as upper,
            kit.descriptor(two.merged) as merged,
            (tmp_path / "tar").open("wb") as out,
            pytest.raises(IntegrityError, match="while it was read"),
        ):
            rootfs.save(upper, merged, out)


def test_a_tar_that_cannot_be_written_is_an_error(maker):
    """A full disk is never a diff that lacks something."""
    source = maker.make()
    (source.merged / "etc/new").write_bytes(b"x" * 100_000)
    with (
        kit.descriptor(source.upper) as upper,
        kit.descriptor(source.merged) as merged,
        open("/dev/full", "wb", buffering=0) as out,
        pytest.raises(OSError, match="No space left"),
    ):
        rootfs.save(upper, merged, out)


def test_a_file_that_grows_while_it_is_read_is_noticed(maker, tmp_path):
    """The tree is frozen; if something outside writes all the same, that is said."""
    source = maker.make()
    (source.merged / "etc/new").write_bytes(b"x" * 3_000_000)

    class Meddler:
        def write(self, data):
            with (source.merged / "etc/new").open("ab") as file:
                file.write(b"more")

    with (
        kit.descriptor(source.upper) as upper,
        kit.descriptor(source.merged) as merged,
        pytest.raises(IntegrityError, match="'/etc/new' changed"),
    ):
        rootfs.save(upper, merged, Meddler())


def test_a_tmpfs_is_saved_and_applied_beside_what_is_there(tmp_path):
    """As /dev/shm, which the containers of a pod share: files of others stay, those of one name come back."""
    with kit.tmpfs(tmp_path / "a") as source, kit.tmpfs(tmp_path / "b") as target:
        os.chmod(source, 0o1777)
        kit.sparse(source / "sem.x", 1 << 20, {8192: b"x"})
        (source / "d").mkdir()
        os.link(source / "sem.x", source / "d/again")
        (target / "theirs").write_text("theirs")
        (target / "sem.x").write_text("of the same name")
        before = kit.snapshot(target)
        with kit.descriptor(source) as top, (tmp_path / "tar").open("wb") as out:
            assert rootfs.save_tree(top, out).entries == 4
        kit.apply(target, tmp_path / "tar", tmp_path / "undo")
        assert (target / "theirs").read_text() == "theirs"
        (source / "theirs").touch()
        now = kit.differences(kit.snapshot(source), kit.snapshot(target))
        assert {path for path in now if "theirs" not in str(path)} <= {"", b"", "."}
        kit.take_back(target, tmp_path / "undo")
        assert kit.differences(before, kit.snapshot(target)) == {}


# GNU tar and Python read it ----------------------------------------------------------------------------


def test_gnu_tar_lists_and_extracts_it(maker, tmp_path):
    """Names, content, holes, owners, times, links, attributes; whiteouts come as devices 0/0."""
    source = maker.make()
    kit.change(source.merged)
    source.save(tmp_path / "tar")
    listed = subprocess.run(
        ["tar", "--warning=no-unknown-keyword", "--quoting-style=escape", "-tvf", str(tmp_path / "tar")],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "TZ": "UTC", "LC_ALL": "C"},
    )
    assert listed.stderr == ""
    assert re.search(r"^c--------- 0/0 +0,0 1970-01-01 00:00 \./etc/deleted$", listed.stdout, re.MULTILINE)
    assert re.search(r"^-rw-r--r-- 0/0 +52428800 .* \./var/holes$", listed.stdout, re.MULTILINE)
    (tmp_path / "x").mkdir()
    command = ["tar", "--warning=no-unknown-keyword", "--xattrs", "--xattrs-include=*", "--numeric-owner"]
    subprocess.run([*command, "-xpf", str(tmp_path / "tar"), "-C", str(tmp_path / "x")], check=True)
    got, wanted = kit.snapshot(tmp_path / "x"), kit.snapshot(source.merged)
    whiteouts = {path for path, entry in entries(tmp_path / "tar").items() if entry.kind is Kind.WHITEOUT}
    assert whiteouts
    for path, facts in got.items():
        if path[1:] in whiteouts:
            assert facts[0] == oct(stat.S_IFCHR)
        else:
            # GNU tar knows only one of our escapes in an attribute's name, and hides the line end.
            assert path.endswith(b"usr/lib/c") or facts == wanted[path], path


def test_python_reads_it(maker, tmp_path):
    """The standard library finds the same names, sizes and content."""
    source = maker.make()
    kit.change(source.merged)
    source.save(tmp_path / "tar")
    ours = entries(tmp_path / "tar")
    with tarfile.open(tmp_path / "tar", errors="surrogateescape") as tar:
        members = {os.fsencode(member.name).removeprefix(b"./"): member for member in tar}
        assert members.keys() - {b"."} == ours.keys() - {b""}
        for path, member in members.items():
            if member.isreg():
                content = tar.extractfile(member)
                assert content is not None
                assert content.read() == (source.merged / os.fsdecode(path)).read_bytes()
