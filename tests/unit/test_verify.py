"""Hostile artifacts: whatever was done to one, the file is named, and nothing is followed or waited for."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from hibernode.artifact.manifest import manifest_bytes
from hibernode.artifact.store import ArtifactState, Store
from hibernode.errors import IntegrityError
from tests.unit import hostile
from tests.unit.artifact_kit import ID, OTHER, UUID, forged, manifest, put
from tests.unit.hostile import open_descriptors

PAGES = "images/pages-1.img"
Spoil = Callable[[Path], object]


@pytest.fixture
def store(tmp_path):
    """Open a store; no descriptor may be left over."""
    before = open_descriptors()
    with Store(tmp_path / "store").open() as store:
        yield store
    assert open_descriptors() == before


def bad(store: Store, *, digests: bool = False) -> dict[str, str]:
    verdicts = store.verify(store.get(ID), digests=digests)
    return {verdict.path: verdict.problem for verdict in verdicts if not verdict.ok}


def states(store: Store) -> list[tuple[str, str]]:
    return [(info.id, info.state) for info in store.artifacts()]


def make_socket(path: Path) -> None:
    os.mknod(path, stat.S_IFSOCK | 0o600)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)


def swap_for(make: Spoil) -> Spoil:
    def spoil(top: Path) -> None:
        (top / PAGES).unlink()
        make(top / PAGES)

    return spoil


@pytest.mark.parametrize(
    ("spoil", "named", "problem"),
    [
        pytest.param(lambda t: os.truncate(t / PAGES, 5), PAGES, "has 5 bytes, not 16384", id="a cut file"),
        pytest.param(lambda t: os.truncate(t / PAGES, 0), PAGES, "has 0 bytes", id="an empty file"),
        pytest.param(lambda t: os.truncate(t / PAGES, 1 << 40), PAGES, "bytes, not 16384", id="a huge file"),
        pytest.param(lambda t: (t / PAGES).unlink(), PAGES, "is missing", id="a missing file"),
        pytest.param(lambda t: flip(t / PAGES), PAGES, "digest", id="a flipped bit"),
        pytest.param(
            lambda t: (t / "images" / "x.img").write_bytes(b""),
            "images/x.img",
            "does not belong",
            id="an extra file",
        ),
        pytest.param(
            lambda t: (t / ".x").write_bytes(b""), ".x", "does not belong", id="an extra hidden file"
        ),
        pytest.param(
            lambda t: (t / "x").mkdir(), "x", "a directory that does not belong", id="an extra directory"
        ),
        pytest.param(
            lambda t: (t / "images" / "x").symlink_to("/etc"),
            "images/x",
            "a symbolic link",
            id="an extra link",
        ),
        pytest.param(
            swap_for(lambda p: p.symlink_to("/etc/hostname")),
            PAGES,
            "a symbolic link, not a file",
            id="a link for a file",
        ),
        pytest.param(
            swap_for(lambda p: p.symlink_to("pstree.img")), PAGES, "a symbolic link", id="a link inside"
        ),
        pytest.param(swap_for(os.mkfifo), PAGES, "is a FIFO, not a file", id="a FIFO for a file"),
        pytest.param(swap_for(hostile.make_device), PAGES, "a character device", id="a device for a file"),
        pytest.param(swap_for(hostile.make_block_device), PAGES, "a block device", id="a disk for a file"),
        pytest.param(swap_for(make_socket), PAGES, "is a socket, not a file", id="a socket for a file"),
        pytest.param(swap_for(Path.mkdir), PAGES, "is a directory, not a file", id="a directory for a file"),
        pytest.param(
            lambda t: os.link(t / PAGES, t.parent / "other"),
            PAGES,
            "has 2 names",
            id="a second name elsewhere",
        ),
        pytest.param(lambda t: (t / PAGES).chmod(0o644), PAGES, "has mode 0644", id="a file open to others"),
        pytest.param(
            lambda t: (t / "images").chmod(0o755), "images", "has mode 0755", id="a directory open to others"
        ),
        pytest.param(
            lambda t: os.chown(t / PAGES, 1, -1), PAGES, "belongs to uid 1", id="a file of somebody else"
        ),
    ],
)
def test_a_spoilt_artifact_is_refused_by_the_file(store, spoil, named, problem):
    """Verification names the file and what is wrong with it, follows nothing and waits for nothing."""
    spoil(put(store).path)
    found = bad(store, digests=True)
    assert list(found) == [named]
    assert problem in found[named]
    listed = store.artifacts()[0]
    if problem != "digest":  # a listing does not read the files
        assert listed.state is ArtifactState.CORRUPT
        assert named in listed.problem


@pytest.mark.parametrize("make", [os.mkfifo, hostile.dangling_link, Path.touch])
def test_a_directory_that_is_something_else_is_refused(store, make):
    """Where the images' directory should be stands something else: it is named, the files are missing."""
    path = put(store).path
    (path / "images").rename(path.parent / "elsewhere")
    make(path / "images")
    assert {"images", PAGES} <= bad(store).keys()


def test_a_link_for_the_directory_of_images_is_not_followed(store):
    """A link that leads to the very same files is refused all the same."""
    path = put(store).path
    (path / "images").rename(path.parent / "elsewhere")
    (path / "images").symlink_to(path.parent / "elsewhere")
    assert "symbolic link" in bad(store)["images"]
    assert bad(store)[PAGES] == "is missing"


def test_millions_of_extras_do_not_fill_the_memory(store):
    """Only so many things that do not belong there are named."""
    path = put(store).path
    for number in range(1500):
        (path / f"x{number}").touch()
    assert len(bad(store)) == 1000


def test_an_unprintable_name_is_shown_escaped(store):
    """A file's name cannot steer the terminal that shows the verdict."""
    os.close(os.open(os.fsencode(put(store).path) + b"/\x1b[2J\xff", os.O_CREAT, 0o600))
    (name,) = bad(store)
    assert name.isprintable()
    assert name.isascii()


def write(data: bytes) -> Spoil:
    return lambda top: (top / "manifest.json").write_bytes(data)


def replace_manifest(make: Spoil) -> Spoil:
    def spoil(top: Path) -> None:
        (top / "manifest.json").unlink()
        make(top / "manifest.json")

    return spoil


def nest(top: Path) -> None:
    (top / "manifest.json").write_bytes(b'{"a":' * 100_000)


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(write(b""), id="empty"),
        pytest.param(lambda t: os.truncate(t / "manifest.json", 100), id="cut"),
        pytest.param(lambda t: flip(t / "manifest.json"), id="a flipped bit"),
        pytest.param(write(b" " * (17 << 20)), id="17 MiB"),
        pytest.param(lambda t: os.truncate(t / "manifest.json", 1 << 40), id="a terabyte"),
        pytest.param(nest, id="nested deep"),
        pytest.param(
            write(forged(files=[{"path": "../x", "size": 0, "digest": "0" * 64}], total_bytes=0)),
            id="a path out",
        ),
        pytest.param(write(forged(unknown=1)), id="an unknown field"),
        pytest.param(write(manifest_bytes(manifest(id=OTHER))), id="of another id"),
        pytest.param(replace_manifest(lambda p: p.symlink_to("/etc/hostname")), id="a link"),
        pytest.param(replace_manifest(os.mkfifo), id="a FIFO"),
        pytest.param(replace_manifest(hostile.make_device), id="a device without end"),
        pytest.param(replace_manifest(Path.mkdir), id="a directory"),
        pytest.param(lambda t: os.link(t / "manifest.json", t.parent / "other"), id="a hard link"),
    ],
)
def test_a_spoilt_manifest_is_refused(store, spoil):
    """What cannot be trusted is refused with the manifest's path, and listed as corrupt with the reason."""
    artifact = put(store)
    spoil(artifact.path)
    with pytest.raises(IntegrityError) as caught:
        store.get(ID)
    assert str(artifact.path / "manifest.json") in caught.value.message
    (listed,) = store.artifacts()
    assert listed.state is ArtifactState.CORRUPT
    assert listed.problem == caught.value.message
    assert not store.verify(artifact, digests=False)[0].ok


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(
            lambda path: path.symlink_to(path.parent.parent / "elsewhere"), id="a link to an artifact"
        ),
        pytest.param(os.mkfifo, id="a FIFO"),
        pytest.param(Path.touch, id="a file"),
    ],
)
def test_an_artifact_must_be_a_directory(store, make):
    """Something else under an id is refused and not followed; a publish takes its place."""
    put(store).path.rename(store.path.parent / "elsewhere")
    make(store.path / ID)
    with pytest.raises(IntegrityError):
        store.get(ID)
    assert states(store) == [(ID, "corrupt")]
    new = put(store)
    assert store.get(ID) == new
    assert bad(store, digests=True) == {}
    assert (store.path.parent / "elsewhere" / "manifest.json").exists()


def test_a_replaced_artifact_is_noticed(store):
    """An artifact that was looked up before another took its place is not said to be good."""
    old = put(store)
    put(store)
    verdict = store.verify(old, digests=False)[0]
    assert (verdict.path, verdict.ok) == ("manifest.json", False)


def test_a_previous_artifact_under_another_name_is_corrupt(store):
    """The directory of an older artifact must be named as its manifest says."""
    old = put(store)
    put(store)
    versions = store.path / ".previous" / ID
    (versions / old.manifest.uuid).rename(versions / UUID)
    assert states(store) == [(ID, "complete"), (ID, "corrupt")]
    with pytest.raises(IntegrityError, match=UUID):
        store.get(ID, UUID)


def test_what_is_no_artifact_is_not_listed(store):
    """Other names in the store, lost+found for one, are nobody's business."""
    for name in ("lost+found", "x", ID + ".bak"):
        (store.path / name).mkdir()
        (store.path / ".staging" / name).mkdir()
        (store.path / ".previous" / name).mkdir()
    assert store.artifacts() == []
    assert store.stagings() == []
