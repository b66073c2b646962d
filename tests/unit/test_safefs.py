"""A directory that somebody hostile writes to: nothing outside of it is read, written or waited for."""

from __future__ import annotations

import ctypes
import os
import stat
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from hibernode.errors import RefusedError, StorageError
from hibernode.host.safefs import Dir
from tests.unit import hostile
from tests.unit.hostile import PUBLIC, attacker


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


ODD_THINGS = [
    pytest.param(hostile.relative_link, "a symbolic link", id="a link to the outside"),
    pytest.param(hostile.absolute_link, "a symbolic link", id="an absolute link"),
    pytest.param(hostile.link_inside, "a symbolic link", id="a link that stays inside"),
    pytest.param(hostile.dangling_link, "a symbolic link", id="a link to nothing"),
    pytest.param(hostile.loop, "a symbolic link", id="a link to itself"),
    pytest.param(hostile.hard_link, "2 names (hard links)", id="a hard link to the outside"),
    pytest.param(os.mkfifo, "a FIFO", id="a FIFO that nobody writes to"),
    pytest.param(hostile.make_device, "a character device", id="a device that never ends"),
    pytest.param(hostile.make_block_device, "a block device", id="a block device without a driver"),
    pytest.param(hostile.make_socket, "a socket", id="a socket"),
    pytest.param(Path.mkdir, "a directory", id="a directory"),
    pytest.param(hostile.make_sparse, "is larger than 100 bytes", id="a file of a tebibyte"),
]


# reading ------------------------------------------------------------------------------------------------


def test_a_regular_file_is_read_with_its_stat(top):
    """The bytes come with the stat of the very file they were read from."""
    (top.path / "x").write_bytes(PUBLIC)
    content = top.read("x", 100)
    assert content.data == PUBLIC
    assert content.stat.st_ino == (top.path / "x").stat().st_ino == top.stat("x").st_ino


@pytest.mark.parametrize(("make", "why"), ODD_THINGS)
def test_what_is_no_plain_file_is_refused_and_named(top, secret, make, why):
    """It is neither followed nor opened nor waited for, and the error says what stands there."""
    make(top.path / "x")
    with pytest.raises(RefusedError) as caught:
        top.read("x", 100)
    assert repr(f"{top.path}/x") in caught.value.message
    assert why in caught.value.message
    assert caught.value.remedy
    assert caught.value.fields["path"] == f"{top.path}/x"


def test_a_fifo_is_not_even_opened(top):
    """Opening the reading end would let a writer's open return: it must still be waiting."""
    os.mkfifo(top.path / "x")
    with pytest.raises(RefusedError, match="a FIFO"):
        top.read("x", 100)
    with pytest.raises(OSError, match="No such device or address"):  # ENXIO: nobody has it open
        os.open(top.path / "x", os.O_WRONLY | os.O_NONBLOCK)


@pytest.mark.parametrize("size", [0, 1, 99, 100])
def test_a_file_up_to_the_limit_is_read(top, size):
    """The limit itself is allowed."""
    (top.path / "x").write_bytes(b"x" * size)
    assert top.read("x", 100).data == b"x" * size


def test_a_file_over_the_limit_is_refused_with_both_numbers(top):
    """One byte too many is too many."""
    (top.path / "x").write_bytes(b"x" * 101)
    with pytest.raises(RefusedError) as caught:
        top.read("x", 100)
    assert caught.value.reason == "TooLarge"
    assert (caught.value.fields["size"], caught.value.fields["limit"]) == (101, 100)


def test_an_absent_file_is_absent(top):
    """Absence is no refusal."""
    with pytest.raises(FileNotFoundError):
        top.read("x", 100)
    with pytest.raises(FileNotFoundError):
        top.stat("x")
    with pytest.raises(FileNotFoundError):
        top.subdir("x")


def test_a_second_name_can_be_allowed(top):
    """In a directory of our own a hard link is no attack."""
    (top.path / "x").write_bytes(PUBLIC)
    os.link(top.path / "x", top.path / "y")
    assert top.read("x", 100, require_single_link=False).data == PUBLIC


def test_a_file_under_a_lease_is_refused_and_not_waited_for(top):
    """A worker that holds a write lease would delay an open by the lease-break time, 45 s."""
    (top.path / "x").write_bytes(PUBLIC)
    code = (
        "import fcntl, os, signal, sys\n"
        "signal.signal(signal.SIGIO, signal.SIG_IGN)\n"
        "fd = os.open(sys.argv[1], os.O_RDWR)\n"
        "fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read()"
    )
    with attacker(code, top.path / "x"), pytest.raises(RefusedError) as caught:
        top.read("x", 100)
    assert caught.value.reason == "FileBusy"


@pytest.mark.parametrize("target", ["../outside", "/etc", "inner"])
def test_a_link_in_the_middle_of_a_path_is_refused(top, secret, target):
    """Wherever it leads, also if it stays inside."""
    (top.path / "inner").mkdir()
    (top.path / "link").symlink_to(target)
    for path in ("link/secret", "link/passwd", "link/absent"):
        for operation in (lambda path: top.read(path, 100), top.stat, top.subdir):
            with pytest.raises(RefusedError, match="a symbolic link"):
                operation(path)


def test_a_path_below_is_read(top):
    """A path of plain names leads down."""
    (top.path / "a" / "b").mkdir(parents=True)
    (top.path / "a" / "b" / "c").write_bytes(PUBLIC)
    assert top.read("a/b/c", 100).data == PUBLIC
    with top.subdir("a/b") as inner:
        assert inner.path == top.path / "a" / "b"
        assert inner.read("c", 100).data == PUBLIC


# names --------------------------------------------------------------------------------------------------

BAD_NAMES = [
    pytest.param("", id="empty"),
    pytest.param(".", id="the directory itself"),
    pytest.param("..", id="its parent"),
    pytest.param("../x", id="out by its parent"),
    pytest.param("../outside/secret", id="the secret"),
    pytest.param("a/../../outside/secret", id="in and out again"),
    pytest.param("/etc/passwd", id="absolute"),
    pytest.param("a//x", id="an empty part"),
    pytest.param("a/", id="a slash at the end"),
    pytest.param("./a", id="a dot part"),
    pytest.param("x\0", id="a NUL at the end"),
    pytest.param("\0", id="a NUL"),
    pytest.param("x\0/../../outside/secret", id="a NUL in the middle"),
    pytest.param("x" * 300, id="300 letters"),
    pytest.param("\N{GREEK SMALL LETTER ALPHA}" * 128, id="128 letters of two bytes"),
    pytest.param("\ud800", id="half a surrogate pair"),
]


def operations(directory: Dir):
    """Every way to hand a name to a directory; the changing ones take one name only."""
    looking = [lambda name: directory.read(name, 100), directory.stat, directory.subdir, directory.open_file]
    changing = [
        lambda name: directory.subdir(name, create=True),
        lambda name: directory.write_atomic(name, PUBLIC),
        directory.unlink,
        directory.remove_tree,
        lambda name: directory.rename("plain", name),
        lambda name: directory.rename(name, "other"),
        lambda name: directory.rename("plain", name, exchange=True),
    ]
    return looking, changing


@pytest.mark.parametrize("name", BAD_NAMES)
def test_fc_37_a_bad_name_is_refused_by_every_operation(top, secret, name):
    """Nothing is looked up, made, moved or removed under it."""
    (top.path / "a").mkdir()
    hostile.plain(top.path / "plain")
    looking, changing = operations(top)
    for operation in looking + changing:
        with pytest.raises(RefusedError) as caught:
            operation(name)
        assert caught.value.reason == "BadName"
        assert len(caught.value.message) < 2000
    assert sorted(top.names()) == ["a", "plain"]


def test_fc_37_a_path_is_no_name_to_change(top, secret):
    """What changes a directory takes one name: a path is refused though it would stay inside."""
    (top.path / "a").mkdir()
    hostile.plain(top.path / "a" / "b")
    hostile.plain(top.path / "plain")
    for operation in operations(top)[1]:
        with pytest.raises(RefusedError) as caught:
            operation("a/b")
        assert caught.value.reason == "BadName"
    assert (top.path / "a" / "b").read_bytes() == PUBLIC


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("two\nlines", id="a line end"),
        pytest.param("\x1b[31m", id="a terminal's escape"),
        pytest.param("\N{TWO DOT LEADER}", id="a look-alike of dot-dot"),
        pytest.param("..\N{DIVISION SLASH}x", id="a look-alike of a slash"),
        pytest.param("\udcff", id="not UTF-8"),
        pytest.param("-rf", id="a flag"),
        pytest.param("x" * 255, id="255 letters"),
    ],
)
def test_a_strange_name_is_a_name_and_is_shown_escaped(top, name):
    """The kernel takes it, so it can be written, read and removed; no message carries it raw."""
    top.write_atomic(name, PUBLIC)
    assert top.read(name, 100).data == PUBLIC
    assert top.names() == [name]
    with pytest.raises(RefusedError) as caught:
        top.read(name, 1)
    assert "\n" not in caught.value.message
    assert "\x1b" not in caught.value.message
    top.unlink(name)
    assert top.names() == []


def test_ten_thousand_names_are_listed_up_to_a_limit(top):
    """A limit bounds the list and leaves no descriptor behind; two scans do not disturb each other."""
    for number in range(10_000):
        os.mknod(f"{number}.ready", dir_fd=top.fd)
    assert len(top.names(limit=64)) == 64
    assert len(top.names(limit=0)) == 0
    one, other = top.scan(), top.scan()
    assert len({next(one).name for _ in range(5000)} | {entry.name for entry in one}) == 10_000
    assert sum(entry.is_file(follow_symlinks=False) for entry in other) == 10_000
    assert len(set(top.names())) == 10_000


# writing ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("mode", [0o644, 0o600])
def test_a_file_is_written_with_its_mode_whatever_the_umask(top, mode, sync):
    """The mode is the one asked for, and nothing else is left in the directory."""
    before = os.umask(0o077)
    try:
        top.write_atomic("x", b"one", mode, sync=sync)
        top.write_atomic("x", b"two", mode, sync=sync)
        top.write_atomic("empty", b"", mode, sync=sync)
    finally:
        os.umask(before)
    assert (top.path / "x").read_bytes() == b"two"
    assert (top.path / "empty").read_bytes() == b""
    assert stat.S_IMODE((top.path / "x").stat().st_mode) == mode
    assert sorted(top.names()) == ["empty", "x"]


@pytest.mark.parametrize(
    "make",
    [
        hostile.relative_link,
        hostile.absolute_link,
        hostile.dangling_link,
        hostile.loop,
        hostile.hard_link,
        os.mkfifo,
        hostile.make_device,
        hostile.make_socket,
        hostile.make_sparse,
    ],
)
def test_an_odd_thing_under_the_name_is_replaced_and_not_followed(top, secret, make):
    """The new file stands in its place; what it led to is untouched, and nobody is waited for."""
    make(top.path / "x")
    top.write_atomic("x", PUBLIC)
    assert top.read("x", 100).data == PUBLIC


def test_a_directory_under_the_name_is_refused(top):
    """It stays, and so does what is in it; no temporary file is left."""
    (top.path / "x").mkdir()
    hostile.plain(top.path / "x" / "kept")
    with pytest.raises(RefusedError, match="is a directory"):
        top.write_atomic("x", PUBLIC)
    assert top.names() == ["x"]
    assert (top.path / "x" / "kept").read_bytes() == PUBLIC


FULL = """
import resource, sys
from pathlib import Path
from hibernode.host.safefs import Dir
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    Dir.open(Path(sys.argv[1])).write_atomic("x", b"new" * 1000)
except OSError as error:
    print(error.strerror)
"""


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(top):
    """No room in the middle of the write: the old version stays, the temporary file goes."""
    top.write_atomic("x", b"old")
    done = subprocess.run([sys.executable, "-c", FULL, top.path], capture_output=True, text=True, check=True)
    assert done.stdout == "File too large\n"
    assert top.names() == ["x"]
    assert top.read("x", 10).data == b"old"


def test_fc_30_each_replacement_is_one_event_under_the_name(top):
    """Who watches the directory sees one move to the name for each write, and no removal."""
    libc = ctypes.CDLL(None)
    watch = libc.inotify_init1(os.O_NONBLOCK)
    moved_to, delete = 0x80, 0x200
    assert libc.inotify_add_watch(watch, os.fsencode(top.path), 0xFFF) == 1
    try:
        for number in range(3):
            top.write_atomic("x", b"%d" % number)
        data = os.read(watch, 1 << 16)
    finally:
        os.close(watch)
    events: list[tuple[int, str]] = []
    while data:
        _, mask, _, size = struct.unpack_from("iIII", data)
        events.append((mask, data[16 : 16 + size].rstrip(b"\0").decode()))
        data = data[16 + size :]
    assert [mask for mask, name in events if name == "x"] == [moved_to] * 3
    assert not [mask for mask, _ in events if mask & delete]


# directories --------------------------------------------------------------------------------------------


def test_a_directory_is_made_with_its_parents_and_its_mode(tmp_path):
    """An existing one is opened and keeps its mode; without ``create`` an absent one is absent."""
    with pytest.raises(FileNotFoundError):
        Dir.open(tmp_path / "a" / "b")
    before = os.umask(0o077)
    try:
        with Dir.open(tmp_path / "a" / "b", create=True, mode=0o755) as made:
            assert stat.S_IMODE(os.fstat(made.fd).st_mode) == 0o755
            with made.subdir("c", create=True, mode=0o1777) as inner:
                assert stat.S_IMODE(os.fstat(inner.fd).st_mode) == 0o1777
            with made.subdir("c", create=True, mode=0o700) as inner:
                assert stat.S_IMODE(os.fstat(inner.fd).st_mode) == 0o1777
    finally:
        os.umask(before)
    with Dir.open(tmp_path / "a" / "b", create=True) as again:
        assert stat.S_IMODE(os.fstat(again.fd).st_mode) == 0o755
        assert again.names() == ["c"]


@pytest.mark.parametrize(
    "make",
    [
        hostile.relative_link,
        hostile.dangling_link,
        hostile.hard_link,
        os.mkfifo,
        hostile.make_device,
        hostile.make_socket,
        hostile.plain,
    ],
)
def test_what_is_no_directory_is_not_opened_as_one(top, secret, make):
    """Neither by its path nor by its name, and not when it should be made."""
    make(top.path / "x")
    for create in (False, True):
        with pytest.raises(RefusedError):
            Dir.open(top.path / "x", create=create)
        with pytest.raises(RefusedError):
            top.subdir("x", create=create)
    with pytest.raises(RefusedError):
        top.read("x/y", 100)


def test_a_link_to_a_directory_is_not_the_directory(top, secret):
    """The last part of a path may be no link; links before it are the operator's own."""
    (top.path.parent / "link").symlink_to("top")
    with pytest.raises(RefusedError, match="not a directory"):
        Dir.open(top.path.parent / "link")
    (top.path / "inner").mkdir()
    with Dir.open(top.path.parent / "link" / "inner") as inner:
        assert inner.names() == []


def test_a_closed_directory_says_so(tmp_path):
    """Closing twice is fine; use after it is an error that names the directory."""
    directory = Dir.open(tmp_path)
    directory.close()
    directory.close()
    with pytest.raises(ValueError, match=str(tmp_path)):
        directory.names()


def test_a_directory_that_was_replaced_is_still_the_one_opened(top):
    """Its descriptor stays with it, so a new directory under the old name gets nothing."""
    top.path.rename(top.path.parent / "moved")
    top.path.mkdir()
    top.write_atomic("x", PUBLIC)
    assert (top.path.parent / "moved" / "x").read_bytes() == PUBLIC
    assert list(top.path.iterdir()) == []


def test_removal_of_a_name_takes_links_and_files_and_leaves_directories(top, secret):
    """A link goes and what it led to stays."""
    hostile.relative_link(top.path / "link")
    (top.path / "directory").mkdir()
    top.unlink("link")
    top.unlink("absent")
    with pytest.raises(FileNotFoundError):
        top.unlink("absent", missing_ok=False)
    with pytest.raises(RefusedError, match="is a directory"):
        top.unlink("directory")
    assert top.names() == ["directory"]


def test_a_rename_replaces_or_swaps_only_when_told(top):
    """By default an existing name is kept, in the same directory and in another."""
    (top.path / "a").mkdir()
    hostile.plain(top.path / "a" / "in a")
    (top.path / "b").mkdir()
    hostile.plain(top.path / "file")
    with pytest.raises(FileExistsError):
        top.rename("a", "b")
    top.rename("a", "b", exchange=True)
    assert (top.path / "b" / "in a").exists()
    with top.subdir("b") as inner:
        top.rename("file", "moved", to=inner)
        with pytest.raises(FileExistsError):
            inner.rename("moved", "in a")
        inner.rename("moved", "in a", replace=True)
        assert inner.names() == ["in a"]
        inner.rename("in a", "back", to=top)
    with pytest.raises(FileNotFoundError):
        top.rename("absent", "x")
    with pytest.raises(StorageError, match="in one step"), top.subdir("b") as inner:
        top.rename("b", "x", to=inner)
    assert sorted(top.names()) == ["a", "b", "back"]
