"""Whatever two trees look like: the diff of one makes the other equal, and its inverse gives it back."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit import rootfs_kit as kit

NAMES = st.sampled_from([b"a", b"b", b"c", b"d-e", b"d.", b"\xff", b" \n"])
PATHS = st.lists(NAMES, min_size=1, max_size=4).map(b"/".join)
# Without a slash or a dot: what is done to the tree may follow the links, and must stay in it.
TARGETS = st.binary(min_size=1, max_size=20).map(lambda raw: raw.translate(bytes.maketrans(b"\0/.", b"000")))
ACTIONS = st.one_of(
    st.tuples(st.just("file"), PATHS, st.binary(max_size=2000)),
    st.tuples(st.just("holes"), PATHS, st.integers(1, 20)),
    st.tuples(st.just("directory"), PATHS),
    st.tuples(st.just("directory"), PATHS),
    st.tuples(st.just("symlink"), PATHS, TARGETS),
    st.tuples(st.just("fifo"), PATHS),
    st.tuples(st.just("link"), PATHS, PATHS),
    st.tuples(st.just("remove"), PATHS),
    st.tuples(st.just("move"), PATHS, PATHS),
    st.tuples(st.just("mode"), PATHS, st.integers(0, 0o7777)),
    st.tuples(st.just("owner"), PATHS, st.integers(0, 100_000), st.integers(0, 100_000)),
    st.tuples(st.just("time"), PATHS, st.integers(-(10**18), 4 * 10**18)),
    st.tuples(st.just("xattr"), PATHS, st.sampled_from(["trusted.x", "trusted.y=%"]), st.binary(max_size=50)),
)


def perform(root: Path, actions: list[tuple[object, ...]]) -> None:
    """Do to a tree what can be done; what the kernel refuses is not done."""
    for name, *arguments in actions:
        try:
            _perform(os.fsencode(root) + b"/", str(name), arguments)
        except (OSError, shutil.Error):
            continue


def _no_wait(path: str, flags: int) -> int:
    """Open; a FIFO that nobody reads is an error."""
    return os.open(path, flags | os.O_NONBLOCK)


def _perform(top: bytes, name: str, arguments: list[object]) -> None:
    path = top + bytes(arguments[0])  # type: ignore[call-overload]
    rest = arguments[1:]
    match name, rest:
        case "file", [bytes(content)]:
            with open(path, "wb", opener=_no_wait) as file:
                file.write(content)
        case "holes", [int(count)]:
            with open(path, "wb", opener=_no_wait) as file:
                for number in range(count):
                    file.seek(number * 12288 + 5000)
                    file.write(b"data")
                file.truncate(count * 12288)
        case "directory", []:
            os.mkdir(path)
        case "symlink", [bytes(target)]:
            os.symlink(target, path)
        case "fifo", []:
            os.mkfifo(path)
        case "link", [bytes(other)]:
            os.link(path, top + other, follow_symlinks=False)
        case "remove", []:
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            else:
                os.unlink(path)
        case "move", [bytes(other)]:
            shutil.move(os.fsdecode(path), os.fsdecode(top + other))
        case "mode", [int(mode)]:
            os.chmod(path, mode)
        case "owner", [int(uid), int(gid)]:
            os.lchown(path, uid, gid)
        case "time", [int(time)]:
            os.utime(path, ns=(time, time), follow_symlinks=False)
        case "xattr", [str(attribute), bytes(value)]:
            os.setxattr(path, attribute, value, follow_symlinks=False)
        case _:
            raise AssertionError(name)


def without_groups(tree: dict[bytes, tuple[object, ...]]) -> dict[bytes, tuple[object, ...]]:
    """Drop the hard links: undo parts names of which only some were touched."""
    return {path: facts[:6] for path, facts in tree.items()}


OPTIONS = st.sampled_from(["index=off", "redirect_dir=on", "redirect_dir=on,metacopy=on"])


@pytest.fixture(scope="module")
def memory(tmp_path_factory):
    """Give a tmpfs, for speed."""
    with kit.tmpfs(tmp_path_factory.mktemp("random") / "t") as top:
        yield top


@given(st.lists(ACTIONS, max_size=15), st.lists(ACTIONS, max_size=25), st.lists(ACTIONS, max_size=8), OPTIONS)
@settings(max_examples=60, deadline=None)
def test_the_diff_of_one_tree_makes_the_other_equal(memory, image, source_actions, target_actions, options):
    """On one image; the target may have changed too, where it does not matter to the diff."""
    with tempfile.TemporaryDirectory(dir=memory) as base, kit.overlays(Path(base)) as maker:
        tar, undo = Path(base, "tar"), Path(base, "undo")
        perform(maker.lower, image)
        source, target, dirty = maker.make(options), maker.make(), maker.make()
        before = kit.snapshot(target.merged)
        perform(source.merged, source_actions)
        source.save(tar)
        kit.apply(target.merged, tar, undo)
        assert kit.differences(kit.snapshot(source.merged), kit.snapshot(target.merged)) == {}
        kit.take_back(target.merged, undo)
        now = kit.snapshot(target.merged)
        assert kit.differences(without_groups(before), without_groups(now)) == {}

        perform(dirty.merged, target_actions)
        before = kit.snapshot(dirty.merged)
        kit.apply(dirty.merged, tar, undo)
        once = kit.snapshot(dirty.merged)
        kit.take_back(dirty.merged, undo)
        now = kit.snapshot(dirty.merged)
        assert kit.differences(without_groups(before), without_groups(now)) == {}
        kit.apply(dirty.merged, tar, undo)
        assert kit.differences(without_groups(once), without_groups(kit.snapshot(dirty.merged))) == {}
