"""Images made by hand: which entries of files.img become appending, and that nothing else changes."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hibernode.criu.stdio import FDINFO_MAGIC, FILES_MAGIC, append_stdio
from hibernode.errors import IntegrityError
from hibernode.host.safefs import Dir
from tests.unit.image_kit import data, image, images, number, varint

REG, PIPE = 1, 2
RDONLY, WRONLY, RDWR = os.O_RDONLY, os.O_WRONLY, os.O_RDWR
LARGEFILE = 0o100000


def fd(number_: int, file_id: int, kind: int = REG) -> bytes:
    """Write an entry of fdinfo: id, flags, type, fd."""
    return number(1, file_id) + number(2, 1) + number(3, kind) + number(4, number_)


def reg(file_id: int, flags: int, *, checked: bool = True, name: bytes = b"var/log/worker.log") -> bytes:
    """Write an entry of files.img for a regular file; ``checked``: with size, build id and checksums."""
    checks = number(8, 12345), data(11, b"\x01\x02"), number(12, 1), number(13, 2), number(14, 3)
    size, *others = checks if checked else (b"",) * 5
    owner = number(5, 1) + data(6, b"\x08\x01")
    inner = number(1, file_id) + number(2, flags) + number(3, 77) + owner + data(7, name)
    inner += size + number(9, 5) + number(10, 0o100644) + b"".join(others)
    # A field of fixed width, unknown to us, must come through as well.
    inner += varint(30 << 3 | 1) + b"\1\2\3\4\5\6\7\x08" + varint(31 << 3 | 5) + b"abcd"
    return number(1, REG) + number(2, file_id) + data(3, inner)


def pipe(file_id: int) -> bytes:
    """Write an entry of files.img for a pipe."""
    return number(1, PIPE) + number(2, file_id) + data(5, number(1, file_id) + number(2, 9))


def read(directory: Dir) -> bytes:
    """Read files.img."""
    return (directory.path / "files.img").read_bytes()


@pytest.mark.parametrize(
    ("fds", "before", "after", "changed"),
    [
        pytest.param(
            [fd(1, 7)],
            [reg(7, WRONLY)],
            [reg(7, WRONLY | os.O_APPEND, checked=False)],
            [7],
            id="standard output",
        ),
        pytest.param(
            [fd(0, 7)],
            [reg(7, RDWR)],
            [reg(7, RDWR | os.O_APPEND, checked=False)],
            [7],
            id="standard input, opened for both",
        ),
        pytest.param(
            [fd(1, 7), fd(2, 7)],
            [reg(7, WRONLY | LARGEFILE)],
            [reg(7, WRONLY | LARGEFILE | os.O_APPEND, checked=False)],
            [7],
            id="output and errors on one file",
        ),
        pytest.param(
            [fd(1, 7), fd(2, 300)],
            [reg(300, WRONLY), reg(5, WRONLY), reg(7, WRONLY)],
            [
                reg(300, WRONLY | os.O_APPEND, checked=False),
                reg(5, WRONLY),
                reg(7, WRONLY | os.O_APPEND, checked=False),
            ],
            [300, 7],
            id="output and errors on two files beside a third",
        ),
        pytest.param(
            [fd(1, 7)],
            [reg(7, WRONLY | os.O_APPEND)],
            [reg(7, WRONLY | os.O_APPEND, checked=False)],
            [7],
            id="an appending file loses its size",
        ),
    ],
)
def test_what_stdio_writes_to_is_appended_to(
    fds: list[bytes], before: list[bytes], after: list[bytes], changed: list[int]
) -> None:
    """The flags get O_APPEND, size, build id and checksums go; every other byte is as it was."""
    with images(fdinfo_2=image(FDINFO_MAGIC, *fds), files=image(FILES_MAGIC, *before)) as directory:
        assert append_stdio(directory) == changed
        assert read(directory) == image(FILES_MAGIC, *after)
        assert (directory.path / "files.img").stat().st_mode & 0o777 == 0o600
        assert sorted(directory.names()) == ["fdinfo-2.img", "files.img"]


@pytest.mark.parametrize(
    ("fds", "files"),
    [
        pytest.param([], [reg(7, WRONLY)], id="no descriptors"),
        pytest.param([fd(3, 7), fd(255, 7)], [reg(7, WRONLY)], id="descriptors from three on"),
        pytest.param([fd(0, 7)], [reg(7, RDONLY)], id="a file that is only read"),
        pytest.param([fd(1, 7, PIPE)], [pipe(7), reg(8, WRONLY)], id="a pipe"),
        pytest.param([fd(1, 7, PIPE)], [reg(7, WRONLY)], id="a regular file with a pipe's id"),
        pytest.param([fd(1, 7)], [pipe(7), reg(8, WRONLY)], id="a pipe with a regular file's id"),
        pytest.param([fd(1, 9)], [reg(7, WRONLY)], id="an id that no file has"),
        pytest.param(
            [fd(1, 7)], [reg(7, WRONLY | os.O_APPEND, checked=False)], id="a file that is appending already"
        ),
    ],
)
def test_everything_else_is_left_alone(fds: list[bytes], files: list[bytes]) -> None:
    """What is no regular file that stdio writes to is not changed, and the image not even rewritten."""
    before = image(FILES_MAGIC, *files)
    with images(fdinfo_2=image(FDINFO_MAGIC, *fds), files=before) as directory:
        inode = (directory.path / "files.img").stat().st_ino
        assert append_stdio(directory) == []
        assert read(directory) == before
        assert (directory.path / "files.img").stat().st_ino == inode


def test_every_process_of_the_tree_counts() -> None:
    """The descriptors of all processes are looked at, other images are not."""
    with images(
        fdinfo_2=image(FDINFO_MAGIC, fd(1, 7)),
        fdinfo_3=image(FDINFO_MAGIC, fd(2, 8)),
        pstree=b"not looked at",
        files=image(FILES_MAGIC, reg(7, WRONLY), reg(8, WRONLY), reg(9, WRONLY)),
    ) as directory:
        assert append_stdio(directory) == [7, 8]


def test_a_second_run_changes_nothing() -> None:
    """An image that was changed is not changed again."""
    with images(
        fdinfo_2=image(FDINFO_MAGIC, fd(1, 7)), files=image(FILES_MAGIC, reg(7, WRONLY))
    ) as directory:
        assert append_stdio(directory) == [7]
        once = read(directory)
        assert append_stdio(directory) == []
        assert read(directory) == once


GOOD_FD = image(FDINFO_MAGIC, fd(1, 7))
GOOD_FILES = image(FILES_MAGIC, reg(7, WRONLY), pipe(8))


@pytest.mark.parametrize(
    ("fdinfo", "files"),
    [
        pytest.param(b"", GOOD_FILES, id="an empty fdinfo"),
        pytest.param(GOOD_FILES, GOOD_FILES, id="an fdinfo of another kind"),
        pytest.param(GOOD_FD, GOOD_FD, id="a files.img of another kind"),
        pytest.param(GOOD_FD, GOOD_FILES[:-1], id="a cut message"),
        pytest.param(GOOD_FD, GOOD_FILES + b"\1\0", id="a cut length"),
        pytest.param(GOOD_FD, image(FILES_MAGIC, b"\x08"), id="a number that is missing"),
        pytest.param(GOOD_FD, image(FILES_MAGIC, b"\xff" * 11), id="a number without end"),
        pytest.param(GOOD_FD, image(FILES_MAGIC, b"\x1a\x05a"), id="bytes that are cut"),
        pytest.param(GOOD_FD, image(FILES_MAGIC, b"\x1d\x00"), id="a fixed width that is cut"),
        pytest.param(GOOD_FD, image(FILES_MAGIC, b"\x0b"), id="a wire type that nobody uses"),
        pytest.param(
            GOOD_FD,
            image(FILES_MAGIC, number(1, REG) + number(2, 7) + number(3, 9)),
            id="a number for a message",
        ),
        pytest.param(
            GOOD_FD,
            image(FILES_MAGIC, number(1, REG) + number(2, 7) + data(3, b"\x0b")),
            id="a bad message inside",
        ),
    ],
)
def test_a_damaged_image_is_refused(fdinfo: bytes, files: bytes) -> None:
    """What CRIU does not write is an IntegrityError that names the image, and nothing is changed."""
    with images(fdinfo_2=fdinfo, files=files) as directory:
        with pytest.raises(IntegrityError, match=r"\.img"):
            append_stdio(directory)
        assert read(directory) == files


def test_a_missing_files_image_is_refused() -> None:
    """Descriptors without a files.img are a dump that is not whole."""
    with images(fdinfo_2=GOOD_FD) as directory, pytest.raises(IntegrityError, match="missing"):
        append_stdio(directory)


def test_a_link_in_the_image_s_place_is_refused() -> None:
    """An image that is a link is not followed, and is an IntegrityError as well."""
    with images(fdinfo_2=GOOD_FD, other=GOOD_FILES) as directory:
        (directory.path / "files.img").symlink_to("other.img")
        with pytest.raises(IntegrityError):
            append_stdio(directory)
        assert (directory.path / "other.img").read_bytes() == GOOD_FILES


FIELDS = st.one_of(
    st.builds(number, st.integers(0, 40), st.integers(0, (1 << 64) - 1)),
    st.builds(data, st.integers(0, 15), st.binary(max_size=20)),
    st.sampled_from(
        [number(1, REG), number(2, 7), number(2, WRONLY), data(2, b"xx"), number(3, 7), data(3, b"")]
    ),
    st.binary(max_size=4),
)
MESSAGES = st.lists(FIELDS, max_size=6).map(b"".join)
NESTED = MESSAGES.map(lambda inner: number(1, REG) + number(2, 7) + data(3, inner))
FILES = st.one_of(
    st.binary(max_size=60),
    st.lists(st.one_of(MESSAGES, NESTED), max_size=3).map(lambda messages: image(FILES_MAGIC, *messages)),
    st.tuples(st.integers(0, len(GOOD_FILES) - 1), st.integers(1, 255)).map(
        lambda flip: (
            GOOD_FILES[: flip[0]] + bytes([GOOD_FILES[flip[0]] ^ flip[1]]) + GOOD_FILES[flip[0] + 1 :]
        )
    ),
)
FDINFO = st.one_of(
    st.just(GOOD_FD), st.binary(max_size=40), MESSAGES.map(lambda message: image(FDINFO_MAGIC, message))
)


@given(FDINFO, FILES)
@settings(max_examples=300, deadline=None)
def test_whatever_an_image_holds_only_our_error_is_raised(fdinfo: bytes, files: bytes) -> None:
    """Hostile images raise IntegrityError or are changed into images that can be read again."""
    with images(fdinfo_2=fdinfo, files=files) as directory:
        try:
            changed = append_stdio(directory)
        except IntegrityError:
            assert read(directory) == files
            return
        if changed:
            assert append_stdio(directory) == []
        else:
            assert read(directory) == files
