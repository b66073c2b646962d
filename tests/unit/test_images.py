"""CRIU's images, whole and hostile."""

import contextlib
import os
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hibernode.criu.images import (
    COMMON_MAGIC,
    MAX_PSTREE_BYTES,
    PAGEMAP_MAGIC,
    PID_MAX_LIMIT,
    PSTREE_MAGIC,
    ImageTask,
    page_files,
    read_pstree,
)
from hibernode.errors import IntegrityError
from hibernode.host.safefs import Dir


def varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def task(pid: int, ppid: int, pgid: int, sid: int, *threads: int) -> bytes:
    """Encode a task as CRIU does."""
    fields = [number(at, value) for at, value in enumerate((pid, ppid, pgid, sid), 1)]
    return b"".join([*fields, *(number(5, thread) for thread in threads)])


def image(*records: bytes, magic: int = PSTREE_MAGIC, head: int = COMMON_MAGIC) -> bytes:
    return struct.pack("<II", head, magic) + b"".join(struct.pack("<I", len(data)) + data for data in records)


def pagemap(pages_id: int) -> bytes:
    return image(number(1, pages_id), number(1, 0x7F0000000000) + number(2, 3), magic=PAGEMAP_MAGIC)


ROOT = task(10, 0, 10, 10, 10)
ZOMBIE = task(11, 10, 10, 10, 0x6E2F1F70)
"""CRIU 4.2.1 leaves a zombie's thread id uninitialised: this one was seen."""


@pytest.fixture
def read(tmp_path):
    def read_(data: bytes) -> tuple[ImageTask, ...]:
        (tmp_path / "pstree.img").write_bytes(data)
        return read_pstree(tmp_path)

    return read_


def test_a_tree_is_read(read):
    """Tasks come in the order of the image, with their ids and threads."""
    data = image(task(10, 0, 10, 10, 10, 12), ZOMBIE, task(13, 11, 0, 0, 13))
    assert read(data) == (
        ImageTask(10, 0, 10, 10, (10, 12)),
        ImageTask(11, 10, 10, 10, (11,)),
        ImageTask(13, 11, 0, 0, (13,)),
    )


def test_fields_of_a_newer_criu_are_passed_over(read):
    """A field that is not known yet, of any kind, does no harm."""
    extra = (
        number(9, 1 << 40)
        + varint(7 << 3 | 2)
        + b"\x03abc"
        + varint(8 << 3 | 1)
        + bytes(8)
        + varint(6 << 3 | 5)
    )
    assert read(image(ROOT + extra + bytes(4)))[0].pid == 10


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="empty"),
        pytest.param(image(ROOT)[:7], id="half a head"),
        pytest.param(image(ROOT, head=1), id="other first magic"),
        pytest.param(image(ROOT, magic=PAGEMAP_MAGIC), id="another image's magic"),
        pytest.param(image(), id="no task"),
        pytest.param(image(ROOT)[:-1], id="cut record"),
        pytest.param(image(ROOT) + b"\x01\x00", id="cut length"),
        pytest.param(image(ROOT) + b"\xff\xff\xff\xff", id="length of 4 GiB"),
        pytest.param(image(b""), id="empty task"),
        pytest.param(image(number(1, 10) + number(2, 0) + number(3, 10)), id="no session"),
        pytest.param(image(ROOT + number(1, 10)), id="two pids"),
        pytest.param(image(task(0, 0, 1, 1, 0)), id="pid 0"),
        pytest.param(image(task(PID_MAX_LIMIT, 0, 1, 1, 1)), id="pid too large"),
        pytest.param(image(task(10, 0, 1 << 31, 1, 10)), id="group too large"),
        pytest.param(image(task(10, 0, 10, 10, 10, PID_MAX_LIMIT)), id="thread too large"),
        pytest.param(image(task(10, 0, 10, 10, 10, 12, 12)), id="a thread twice"),
        pytest.param(image(task(10, 0, 10, 10, 10, 10)), id="the leader as another thread"),
        pytest.param(image(ROOT, task(10, 10, 10, 10, 10)), id="a pid twice"),
        pytest.param(image(ROOT, task(11, 0, 11, 11, 11)), id="two roots"),
        pytest.param(image(ROOT, task(11, 12, 11, 11, 11)), id="a parent that is not there"),
        pytest.param(image(task(11, 10, 11, 11, 11), ROOT), id="a child before its parent"),
        pytest.param(image(task(10, 10, 10, 10, 10)), id="its own parent"),
        pytest.param(image(b"\x08" + b"\xff" * 11), id="a number without an end"),
        pytest.param(image(b"\x08" + b"\xff" * 9 + b"\x7f"), id="a number over 64 bits"),
        pytest.param(image(b"\x0b"), id="a group, which protobuf has given up"),
        pytest.param(image(b"\x00\x01"), id="field 0"),
        pytest.param(image(b"\x0a\x01\x01"), id="bytes where a number belongs"),
        pytest.param(image(b"\x4a\x7f"), id="a field longer than its record"),
    ],
)
def test_a_damaged_tree_is_refused_by_name(read, data):
    """Whatever is odd is an IntegrityError that names the file."""
    with pytest.raises(IntegrityError, match=r"pstree\.img") as caught:
        read(data)
    assert caught.value.fields["file"] == "pstree.img"


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda path: None, id="absent"),
        pytest.param(lambda path: path.symlink_to("/dev/zero"), id="a link"),
        pytest.param(os.mkfifo, id="a FIFO"),
        pytest.param(lambda path: path.mkdir(), id="a directory"),
        pytest.param(lambda path: path.write_bytes(bytes(MAX_PSTREE_BYTES + 1)), id="huge"),
    ],
)
def test_a_tree_that_is_no_plain_file_is_refused(tmp_path, make):
    """A hostile image directory can neither lead elsewhere nor make the reader wait."""
    make(tmp_path / "pstree.img")
    with pytest.raises(IntegrityError, match=r"pstree\.img"):
        read_pstree(tmp_path)


@pytest.mark.parametrize("name", ["absent", "file", "link"])
def test_images_that_are_no_directory_are_refused(tmp_path, name):
    """The directory itself must be one."""
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(IntegrityError):
        read_pstree(tmp_path / name)


tasks = st.builds(task, *[st.integers(0, 20)] * 4, *[st.integers(0, 20)] * 2)
noise = st.one_of(
    st.binary(max_size=60),
    st.builds(image, tasks, st.one_of(tasks, st.binary(max_size=30))),
    st.builds(
        lambda data, at, byte: data[:at] + byte + data[at:],
        st.just(image(ROOT, ZOMBIE)),
        st.integers(0, 60),
        st.binary(max_size=3),
    ),
    st.builds(lambda body: struct.pack("<II", COMMON_MAGIC, PSTREE_MAGIC) + body, st.binary(max_size=60)),
)


@settings(max_examples=400, deadline=None)
@given(noise)
def test_no_bytes_raise_anything_but_integrity_error(tmp_path_factory, data):
    """Whatever stands in pstree.img, the reader says a tree or IntegrityError, and never spins."""
    folder = tmp_path_factory.getbasetemp() / "fuzz"
    folder.mkdir(exist_ok=True)
    (folder / "pstree.img").write_bytes(data)
    (folder / "pagemap-10.img").write_bytes(data)
    for function in (read_pstree, page_files):
        with contextlib.suppress(IntegrityError):
            function(folder)


@pytest.fixture
def images(tmp_path):
    """Make images of two tasks and a zombie with shared memory and deleted files."""
    files = {
        "pstree.img": image(ROOT, ZOMBIE, task(13, 10, 13, 13, 13)),
        "pagemap-10.img": pagemap(3),
        "pagemap-13.img": pagemap(4),
        "pagemap-shmem-369.img": pagemap(1),
        "pagemap-shmem-90.img": pagemap(2),
        "ghost-file-1.img": b"",
        "ghost-file-1f.img": b"",
        "ghost-file-a.img": b"",
        "inventory.img": b"",
        **{f"pages-{at}.img": b"" for at in (1, 2, 3, 4)},
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    return tmp_path


def test_pages_are_named_in_the_order_of_the_restore(images):
    """Deleted files, then each task from the root down, then shared memory: what CRIU's own log shows."""
    expected = ["ghost-file-1.img", "ghost-file-a.img", "ghost-file-1f.img"]
    expected += ["pages-3.img", "pages-4.img", "pages-2.img", "pages-1.img"]
    assert page_files(images) == expected
    with Dir.open(images) as directory:
        assert page_files(directory) == expected


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(pagemap(9), id="names pages that are absent"),
        pytest.param(pagemap(1 << 33), id="a number over 32 bits"),
        pytest.param(pagemap(3)[:11], id="cut"),
        pytest.param(image(magic=PAGEMAP_MAGIC), id="no record"),
        pytest.param(image(number(2, 3), magic=PAGEMAP_MAGIC), id="names nothing"),
        pytest.param(b"", id="empty"),
    ],
)
def test_a_damaged_page_map_is_refused_by_name(images, data):
    """A page map that names no file that is there is an IntegrityError with its name."""
    (images / "pagemap-13.img").write_bytes(data)
    with pytest.raises(IntegrityError, match=r"pagemap-13\.img"):
        page_files(images)


def test_a_large_page_map_is_read_at_its_head_only(images):
    """The page map of a large worker is not read whole to learn one number."""
    with (images / "pagemap-13.img").open("ab") as file:
        file.truncate(1 << 40)
    assert "pages-4.img" in page_files(images)
