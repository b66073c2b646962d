"""CRIU's own links to files (``--link-remap``), read from images made by hand; every odd byte is named."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hibernode.criu.remaps import (
    FDINFO_MAGIC,
    FILES_MAGIC,
    IDS_MAGIC,
    REMAP_FPATH_MAGIC,
    LinkRemap,
    file_ids,
    link_remaps,
)
from hibernode.errors import IntegrityError
from tests.unit.image_kit import data, image, images, number

FILE, LINK, OTHER = 5, 6, 7


def remap(file_id: int, link_id: int, kind: int | None = None) -> bytes:
    """Write an entry of remap-fpath.img; kind 0 (the default) is a link, 1 a ghost file, 2 a process."""
    return number(1, file_id) + number(2, link_id) + (b"" if kind is None else number(3, kind))


def reg(file_id: int, name: bytes | None) -> bytes:
    """Write an entry of files.img for a regular file."""
    inner = number(1, file_id) + (b"" if name is None else data(6, name))
    return number(1, 1) + number(2, file_id) + data(3, inner)


FILES = image(FILES_MAGIC, reg(FILE, b"/tmp/gone"), reg(LINK, b"tmp/link_remap.5"), reg(OTHER, b"/tmp/x"))


@pytest.mark.parametrize("kind", [None, 0])
def test_a_link_is_listed_with_the_file_s_own_name(kind: int | None) -> None:
    """The type is a link where the field is absent, too."""
    with images(files=FILES, remap_fpath=image(REMAP_FPATH_MAGIC, remap(FILE, LINK, kind))) as directory:
        assert link_remaps(directory) == (LinkRemap(FILE, b"/tmp/gone", b"tmp/link_remap.5"),)


@pytest.mark.parametrize("kind", [1, 2, 99])
def test_ghosts_and_dead_processes_are_no_links(kind: int) -> None:
    """Their second number is no file, so it is looked up for nobody."""
    with images(files=FILES, remap_fpath=image(REMAP_FPATH_MAGIC, remap(FILE, 4242, kind))) as directory:
        assert link_remaps(directory) == ()


def test_a_dump_without_remaps_has_no_links() -> None:
    """CRIU writes the image only when there is one."""
    with images(files=FILES) as directory:
        assert link_remaps(directory) == ()


GOOD = image(REMAP_FPATH_MAGIC, remap(FILE, LINK))


@pytest.mark.parametrize(
    ("files", "remaps", "named"),
    [
        pytest.param(FILES, image(FILES_MAGIC, remap(FILE, LINK)), "remap-fpath.img", id="another magic"),
        pytest.param(FILES, GOOD[:-1], "remap-fpath.img", id="cut short"),
        pytest.param(FILES, image(REMAP_FPATH_MAGIC, remap(FILE, 4242)), "files.img", id="link unknown"),
        pytest.param(image(FILES_MAGIC, reg(FILE, None)), GOOD, "files.img", id="a file without a name"),
        pytest.param(FILES[:-3], GOOD, "files.img", id="files cut short"),
    ],
)
def test_damage_names_its_file(files: bytes, remaps: bytes, named: str) -> None:
    """Nothing is guessed from half an image."""
    with images(files=files, remap_fpath=remaps) as directory, pytest.raises(IntegrityError) as caught:
        link_remaps(directory)
    assert named in str(caught.value)


def test_absent_files_image_is_named() -> None:
    """A dump with remaps has files."""
    with images(remap_fpath=GOOD) as directory, pytest.raises(IntegrityError, match=r"files\.img is absent"):
        link_remaps(directory)


def fd(number_: int, file_id: int) -> bytes:
    """Write an entry of fdinfo: id, flags, type, fd."""
    return number(1, file_id) + number(2, 1) + number(3, 1) + number(4, number_)


def test_files_are_found_by_pid_and_descriptor() -> None:
    """Each task names its table; what was closed, and what has no table, is left out."""
    tables = {
        "ids_10": image(IDS_MAGIC, number(1, 1) + number(2, 3)),
        "ids_11": image(IDS_MAGIC, number(1, 1) + number(2, 4)),
        "ids_12": image(IDS_MAGIC, number(1, 1) + number(2, 99)),
        "fdinfo_3": image(FDINFO_MAGIC, fd(0, OTHER), fd(5, FILE)),
        "fdinfo_4": image(FDINFO_MAGIC, fd(5, LINK)),
    }
    with images(**tables) as directory:
        found = file_ids(directory, [(10, 5), (10, 6), (11, 5), (12, 5), (13, 5)])
    assert found == {(10, 5): FILE, (11, 5): LINK}


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=64), st.binary(max_size=64))
def test_whatever_an_image_holds_only_our_error_is_raised(remaps: bytes, files: bytes) -> None:
    """A hostile artifact may hold any bytes."""
    with images(files=image(FILES_MAGIC) + files, remap_fpath=image(REMAP_FPATH_MAGIC) + remaps) as directory:
        try:
            link_remaps(directory)
        except IntegrityError:
            return
