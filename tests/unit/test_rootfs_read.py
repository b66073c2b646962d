"""A tar of somebody hostile is refused by its headers, before anything is touched."""

from __future__ import annotations

import io
import tarfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hibernode.artifact.rootfs_read import check
from hibernode.artifact.rootfs_tar import Entry, Kind, Metadata, Writer
from hibernode.errors import HibernodeError, IntegrityError
from tests.unit import rootfs_kit as kit

ROOT = Entry(b"", Kind.DIRECTORY)
DIRECTORY = Entry(b"d", Kind.DIRECTORY)


def written(*made: Entry, root: bool = True) -> bytes:
    """Write entries as ours are written, whatever they say."""
    out = io.BytesIO()
    writer = Writer(out)
    for entry in (ROOT, *made) if root else made:
        writer.add(entry)
    writer.finish()
    return out.getvalue()


def member(
    name: str = "./x", content: bytes = b"", pax: dict[str, str] | None = None, **fields: object
) -> bytes:
    """Write a tar with the root directory and one member that tarfile makes."""
    out = io.BytesIO()
    Writer(out).add(ROOT)
    info = tarfile.TarInfo(name)
    info.size = len(content)
    info.pax_headers = {"mtime": "1.000000000"} if pax is None else pax
    for field, value in fields.items():
        setattr(info, field, value)
    header = info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
    return out.getvalue() + header + content + bytes(-len(content) % 512) + bytes(1024)


def sparse(text: bytes, data: bytes = b"", size: int = 10_000) -> bytes:
    """Write a tar with a sparse file whose map is ``text``."""
    pax = {"mtime": "1.000000000", "GNU.sparse.major": "1", "GNU.sparse.minor": "0"}
    pax |= {"GNU.sparse.name": "./x", "GNU.sparse.realsize": str(size)}
    return member("./GNUSparseFile.0/x", text + bytes(-len(text) % 512) + data, pax)


def checked(content: bytes, path: Path, limit: int = kit.LIMIT) -> object:
    """Check bytes as a file."""
    path.write_bytes(content)
    with kit.descriptor(path) as fd:
        return check(fd, max_bytes=limit)


def mtime(value: str) -> bytes:
    """Write a tar with a file of such a time."""
    return member(pax={"mtime": value})


def with_xattr(name: str, value: str = "x") -> bytes:
    """Write a tar with a file of such an attribute."""
    return member(pax={"mtime": "1.000000000", f"SCHILY.xattr.{name}": value})


HOSTILE = [
    pytest.param(b"", "ends at byte 0", id="nothing"),
    pytest.param(bytes(1024), "empty", id="an end and nothing else"),
    pytest.param(b"x" * 2048, "checksum|header", id="no tar"),
    pytest.param(written(DIRECTORY, root=False), "root directory", id="no root directory"),
    pytest.param(written(ROOT), "wrong place", id="two root directories"),
    pytest.param(written(DIRECTORY)[:-512], "ends at", id="half an end"),
    pytest.param(written(DIRECTORY) + bytes(512), "bytes, not", id="more than an end"),
    pytest.param(written(DIRECTORY)[:-512] + b"x" * 512, "behind its end", id="something behind the end"),
    pytest.param(member("/etc/passwd"), "no name below", id="an absolute name"),
    pytest.param(member("etc"), "no name below", id="a name of another habit"),
    pytest.param(member("./../x"), "no name below", id="a way up"),
    pytest.param(member("./a/../../x"), "no name below", id="a way up further in"),
    pytest.param(member("./a//x"), "no name below", id="an empty name"),
    pytest.param(member("./a/./x"), "no name below", id="a name that is a dot"),
    pytest.param(member("./" + "n" * 256), "no name below", id="a name too long"),
    pytest.param(member("./" + "n/" * 2100 + "x"), "no name below", id="a path too long"),
    pytest.param(member(pax={"mtime": "1.000000000", "path": "./a\0b"}), "no name below", id="a NUL"),
    pytest.param(member("./a/x"), "wrong place", id="a parent that is not in the tar"),
    pytest.param(written(DIRECTORY, DIRECTORY), "wrong place", id="a name twice"),
    pytest.param(
        written(Entry(b"a", Kind.SYMLINK, target=b"/etc"), Entry(b"a/passwd", Kind.FIFO)),
        "wrong place",
        id="a name through a link of the tar",
    ),
    pytest.param(
        written(Entry(b"a", Kind.DIRECTORY), Entry(b"a", Kind.SYMLINK, target=b"/etc")),
        "wrong place",
        id="a directory that becomes a link",
    ),
    pytest.param(
        written(Entry(b"b", Kind.FIFO), Entry(b"a", Kind.FIFO)), "wrong place", id="names not in order"
    ),
    pytest.param(
        written(Entry(b"x", Kind.HARD_LINK, target=b"etc/shadow")),
        "hard link",
        id="a hard link into the target",
    ),
    pytest.param(
        written(Entry(b"x", Kind.HARD_LINK, target=b"../x")), "no name below", id="a hard link out of it"
    ),
    pytest.param(
        written(DIRECTORY, Entry(b"x", Kind.HARD_LINK, target=b"d")),
        "hard link",
        id="a hard link to a directory",
    ),
    pytest.param(written(Entry(b"x", Kind.SYMLINK, target=b"")), "leads nowhere", id="a link to nothing"),
    pytest.param(member(type=tarfile.CHRTYPE, devmajor=1, devminor=3), "device 1/3", id="a device"),
    pytest.param(member(type=tarfile.BLKTYPE), "at byte", id="a block device"),
    pytest.param(member(type=tarfile.CONTTYPE), "at byte", id="a contiguous file"),
    pytest.param(member(type=b"S"), "at byte", id="a sparse file of old"),
    pytest.param(member(type=tarfile.AREGTYPE), "at byte", id="a file of old"),
    pytest.param(member(pax={}), "no pax header", id="no pax header"),
    pytest.param(member(pax={"mtime": "1.000000000", "comment": "x"}), "pax record", id="an unknown record"),
    pytest.param(
        member(pax={"mtime": "1.000000000", "size": "-1"}), "size is no number", id="a negative size"
    ),
    pytest.param(member(pax={"mtime": "1.000000000", "size": "9" * 19}), "size is 9", id="a size past 2^63"),
    pytest.param(
        member(pax={"mtime": "1.000000000", "size": "99999999"}), "ends at", id="a size past the end"
    ),
    pytest.param(member(pax={"mtime": "1.000000000", "uid": "4294967295"}), "uid is", id="no owner"),
    pytest.param(member(uid=-5), "uid is no number", id="a negative owner"),
    pytest.param(mtime("nan"), "mtime", id="a time that is no number"),
    pytest.param(mtime("1e9"), "mtime", id="a time in another form"),
    pytest.param(mtime("9999999999999.000000000"), "mtime", id="a time that nothing can hold"),
    pytest.param(with_xattr("trusted.overlay.opaque", "y"), "attribute", id="a mark for overlayfs"),
    pytest.param(with_xattr("user.overlay.redirect"), "attribute", id="a user's mark for overlayfs"),
    pytest.param(with_xattr("trusted%2Eoverlay.opaque"), "attribute", id="an escaped mark for overlayfs"),
    pytest.param(with_xattr("system.nfs4_acl"), "attribute", id="an attribute of another kind"),
    pytest.param(with_xattr("user.x%00y"), "attribute", id="an attribute with a NUL"),
    pytest.param(with_xattr("user." + "x" * 251), "attribute", id="an attribute with a long name"),
    pytest.param(with_xattr("user.x", "x" * 65537), "attribute", id="an attribute that is too large"),
    pytest.param(with_xattr("user.x", "x" * (9 << 20)), "no pax header", id="a huge header"),
    pytest.param(
        member(type=tarfile.FIFOTYPE, size=512, content=b""), "has content", id="a FIFO with content"
    ),
    pytest.param(
        member(type=tarfile.SYMTYPE, linkname="x", pax={"mtime": "1.000000000", "HIBERNODE.opaque": "1"}),
        "no directory",
        id="a link that is opaque",
    ),
    pytest.param(
        member(pax={"mtime": "1.000000000", "HIBERNODE.links": "2"}), "flag", id="a flag with another value"
    ),
    pytest.param(sparse(b""), "map", id="a sparse file without a map"),
    pytest.param(sparse(b"x\n"), "map", id="a map that is no number"),
    pytest.param(sparse(b"99999999999\n"), "map", id="a map of many pieces"),
    pytest.param(sparse(b"2\n0\n512\n"), "map", id="a map cut short"),
    pytest.param(sparse(b"1\n0\n512\n"), "map", id="a map of more than there is"),
    pytest.param(sparse(b"1\n0\n512\n", bytes(1024)), "map", id="a map of less than there is"),
    pytest.param(sparse(b"1\n9999999999\n512\n", bytes(512)), "map", id="a piece behind the end"),
    pytest.param(sparse(b"1\n0\n-512\n"), "map", id="a negative piece"),
    pytest.param(sparse(b"2\n512\n512\n0\n512\n", bytes(1024)), "map", id="pieces out of order"),
    pytest.param(sparse(b"2\n0\n1024\n512\n512\n", bytes(1536)), "map", id="pieces that overlap"),
    pytest.param(sparse(b"1\n0\n100\n", bytes(100)), "map", id="a piece of no whole blocks"),
]


@pytest.mark.parametrize(("content", "message"), HOSTILE)
def test_what_no_writer_of_ours_wrote_is_refused(tmp_path, content, message):
    """With a sentence that says what, a remedy and one stable reason."""
    with pytest.raises(IntegrityError, match=message) as caught:
        checked(content, tmp_path / "tar")
    assert caught.value.reason == "RootfsTarDamaged"
    assert caught.value.remedy
    assert len(caught.value.message) < 1000


def test_a_refused_tar_changes_nothing(tmp_path):
    """The bad entry comes last; what stands before it is not applied."""
    (tmp_path / "t").mkdir()
    (tmp_path / "t/a").write_text("a")
    before = kit.snapshot(tmp_path / "t")
    good = written(Entry(b"a", Kind.WHITEOUT))
    (tmp_path / "tar").write_bytes(good[:-1024] + member("./../x")[len(written()) - 1024 :])
    with pytest.raises(IntegrityError, match="no name below"):
        kit.apply(tmp_path / "t", tmp_path / "tar", tmp_path / "undo")
    assert kit.snapshot(tmp_path / "t") == before


def test_the_good_of_each_kind_passes(tmp_path):
    """So the refusals above are for what is wrong with them alone."""
    for content in (written(DIRECTORY), member(), sparse(b"1\n512\n512\n", bytes(512)), sparse(b"0\n")):
        assert checked(content, tmp_path / "tar")
    assert checked(with_xattr("user.a%3Db%25"), tmp_path / "tar")


def test_a_tar_cut_anywhere_is_refused(tmp_path):
    """The last block is what makes it whole."""
    whole = written(
        DIRECTORY, Entry(b"d/x", Kind.SYMLINK, Metadata(xattrs={"trusted.x": b"\xff"}), target=b"\xfe")
    )
    assert checked(whole, tmp_path / "tar")
    for size in range(0, len(whole), 100):
        with pytest.raises(IntegrityError, match="not whole"):
            checked(whole[:size], tmp_path / "tar")


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """Save an overlay that was changed in every way."""
    base = tmp_path_factory.mktemp("real")
    with kit.overlays(base) as maker:
        kit.fill(maker.lower)
        source = maker.make()
        kit.change(source.merged)
        source.save(base / "tar")
    return base / "tar"


@given(st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_flipped_bytes_are_refused_or_harmless(real, tmp_path, data):
    """Nothing but our own errors comes out of a reader that is fed with damage."""
    content = bytearray(real.read_bytes())
    for _ in range(data.draw(st.integers(1, 8))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    with suppress(HibernodeError):
        checked(bytes(content), tmp_path / "tar")
