"""Swaps while we look, and readers while we write: by processes of their own that never pause."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hibernode.errors import RefusedError
from hibernode.host import safefs
from tests.unit import hostile
from tests.unit.hostile import PUBLIC, SECRET, attacker

ROUNDS = 2000


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


# swaps while we look ------------------------------------------------------------------------------------

SWAP = """
import os, sys
from hibernode.host.linux import RENAME_EXCHANGE, renameat2
fd = os.open(sys.argv[1], os.O_RDONLY)
print("ready", flush=True)
while True:
    renameat2(fd, "x", fd, "y", RENAME_EXCHANGE)
"""


def outcomes(look: Callable[[], bytes], *, rounds: int = ROUNDS) -> set[bytes]:
    """Look ``rounds`` times and on until both a result and a refusal were seen, or long enough."""
    seen: set[bytes] = set()
    deadline = time.monotonic() + 60
    done = 0
    while done < rounds or (len(seen) < 2 and time.monotonic() < deadline):
        done += 1
        try:
            seen.add(look())
        except RefusedError as error:
            seen.add(error.reason.encode())
    return seen


@pytest.mark.parametrize(
    ("make", "refusals"),
    [
        pytest.param(hostile.relative_link, {b"NotRegularFile"}, id="a link"),
        pytest.param(hostile.absolute_link, {b"NotRegularFile"}, id="an absolute link"),
        pytest.param(hostile.hard_link, {b"HardLinked"}, id="a hard link"),
        pytest.param(os.mkfifo, {b"NotRegularFile"}, id="a FIFO"),
        pytest.param(hostile.make_device, {b"NotRegularFile"}, id="a device"),
        pytest.param(Path.mkdir, {b"NotRegularFile"}, id="a directory"),
    ],
)
def test_a_swap_while_we_read_never_shows_the_secret(top, secret, make, refusals):
    """A file is swapped with something odd without a pause: we get the file or a refusal, nothing else."""
    hostile.plain(top.path / "x")
    make(top.path / "y")
    with attacker(SWAP, top.path):
        seen = outcomes(lambda: top.read("x", 100).data)
    assert seen - {b"FileBusy"} == {PUBLIC} | refusals


def test_a_directory_swapped_with_a_link_never_leads_out(top, secret):
    """The same in the middle of a path."""
    (top.path / "x").mkdir()
    (top.path / "x" / "secret").write_bytes(PUBLIC)
    (top.path / "y").symlink_to("../outside")

    def through_subdir():
        with top.subdir("x") as inner:
            return inner.read("secret", 100).data

    with attacker(SWAP, top.path):
        assert outcomes(lambda: top.read("x/secret", 100).data) == {PUBLIC, b"NotRegularFile"}
        seen = outcomes(through_subdir)
    assert seen <= {PUBLIC, b"NotRegularFile", b"NotADirectory"}
    assert SECRET not in seen


HIJACK = """
import contextlib, os, sys
os.chdir(sys.argv[1])
print("ready", flush=True)
while True:
    for name in os.listdir():
        with contextlib.suppress(OSError):
            os.unlink(name)
            os.symlink("../outside/" + sys.argv[2], name)
"""


@pytest.mark.parametrize(
    "target", [pytest.param("secret", id="the secret"), pytest.param("new", id="a new file")]
)
def test_a_swap_while_we_write_never_writes_outside(top, secret, target):
    """Whatever the temporary name and the final one are replaced with, only our own file is written to."""
    with attacker(HIJACK, top.path, target):
        for _ in range(ROUNDS):
            with contextlib.suppress(FileNotFoundError, FileExistsError):
                top.write_atomic("x", PUBLIC * 100, sync=False)


REFILL = """
import contextlib, os, sys
from hibernode.host.linux import RENAME_EXCHANGE, RENAME_NOREPLACE, renameat2
top = os.open(sys.argv[1], os.O_RDONLY)
print("ready", flush=True)
while True:
    with contextlib.suppress(OSError):
        os.mkdir("new", dir_fd=top)
        inner = os.open("new", os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
        os.close(os.open("secret", os.O_CREAT | os.O_WRONLY, dir_fd=inner))
        os.close(inner)
        renameat2(top, "new", top, "x", RENAME_NOREPLACE)
    for _ in range(20):
        with contextlib.suppress(OSError):
            renameat2(top, "x", top, "link", RENAME_EXCHANGE)
    with contextlib.suppress(OSError):
        os.symlink("../outside", "link", dir_fd=top)
"""


def test_a_swap_while_a_tree_is_removed_never_removes_outside(top, secret):
    """A directory that turns into a link is refused or its link is removed; what it leads to stays."""
    removed = 0
    deadline = time.monotonic() + 60
    with attacker(REFILL, top.path):
        while removed < ROUNDS and time.monotonic() < deadline:
            with contextlib.suppress(OSError, RefusedError):
                top.remove_tree("x")
                removed += 1
    assert removed == ROUNDS


# readers while we write ---------------------------------------------------------------------------------

POLL = """
import sys
sizes = set()
print("ready", flush=True)
for _ in range(2000):
    with open(sys.argv[1], "rb") as file:
        data = file.read()
    sizes.add(len(data))
    assert data in (b"A" * 200_000, b"B" * 300_000), (len(data), set(data))
# One write: the other side reads without blocking and would take a part for the line.
sys.stdout.write(f"done {len(sizes)}\\n")
sys.stdout.flush()
sys.stdin.read()
"""


def test_a_reader_that_polls_never_sees_a_part(top):
    """Another process reads without a pause while the file is rewritten: always one whole version."""
    versions = (b"A" * 200_000, b"B" * 300_000)
    top.write_atomic("x", versions[0])
    with attacker(POLL, top.path / "x") as reader:
        os.set_blocking(reader.stdout.fileno(), False)
        deadline = time.monotonic() + 120
        number = 0
        while (line := reader.stdout.readline()) == b"":
            number += 1
            top.write_atomic("x", versions[number % 2], sync=False)
            assert reader.poll() is None, "the reader saw a part of a file"
            assert time.monotonic() < deadline
    assert line == b"done 2\n"


REWRITE = """
import sys
from pathlib import Path
from hibernode.host.safefs import Dir
with Dir.open(Path(sys.argv[1])) as top:
    print("ready", flush=True)
    while True:
        for letter in b"AB":
            top.write_atomic("x", bytes([letter]) * 100_000, sync=False)
"""


def test_our_own_reader_gets_a_whole_file_from_a_writer_that_does_not_stop(top):
    """A file that is replaced between its opening and its check is looked for again, not refused."""
    top.write_atomic("x", b"A" * 100_000)
    with attacker(REWRITE, top.path):
        for _ in range(ROUNDS):
            data = top.read("x", 1 << 20).data
            assert data in {b"A" * 100_000, b"B" * 100_000}


def test_a_kill_in_the_middle_leaves_a_whole_file_and_temporary_names_only(top):
    """Kill -9 at any moment: the name holds the old version or the new one."""
    for _ in range(8):
        with attacker(REWRITE, top.path):
            deadline = time.monotonic() + 60
            while "x" not in top.names() and time.monotonic() < deadline:
                pass
        data = top.read("x", 1 << 20).data
        assert data in {b"A" * 100_000, b"B" * 100_000}
    assert all(safefs.is_temporary(name) for name in top.names() if name != "x")
    assert not safefs.is_temporary("x")
