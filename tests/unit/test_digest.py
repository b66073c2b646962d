"""Digests: the right ones, of regular files only, and nothing is left running."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path

import pytest
from blake3 import blake3

from hibernode.artifact.digest import MAX_WORKERS, PIECE_BYTES, default_workers, digest_all, digest_files
from hibernode.errors import IntegrityError, RefusedError
from tests.unit import hostile
from tests.unit.hostile import attacker, open_descriptors


@pytest.fixture
def top(tmp_path):
    """Open a directory beside a secret."""
    with hostile.directory_beside_a_secret(tmp_path) as directory:
        yield directory


def content(size: int) -> bytes:
    return (bytes(range(251)) * (size // 251 + 1))[:size]


SIZES = [0, 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 2 * PIECE_BYTES, 5 * PIECE_BYTES + 3]


@pytest.mark.parametrize("workers", [0, 1, 2, 3, 8])
async def test_digests_are_those_of_the_bytes(top, workers):
    """Files of all sizes, in directories too, get their BLAKE3 digest and size, whatever the threads."""
    (top.path / "images").mkdir()
    expected = {}
    for size in SIZES:
        name = f"images/{size}"
        (top.path / name).write_bytes(content(size))
        expected[name] = (size, blake3(content(size)).hexdigest())
    found = await digest_files(top, expected, workers)
    assert found == expected
    assert found.total_bytes == sum(SIZES)
    assert found.bytes_per_second == pytest.approx(found.total_bytes / found.seconds)


async def test_no_files_are_no_digests(top):
    """An empty list is fine and has a rate of zero."""
    found = await digest_files(top, [])
    assert found == {}
    assert found.bytes_per_second == 0


def test_threads_follow_the_cores():
    """Without a setting there is a thread for each core that we may use, and a bound."""
    assert default_workers() == min(MAX_WORKERS, len(os.sched_getaffinity(0)))


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(hostile.relative_link, id="a link"),
        pytest.param(hostile.link_inside, id="a link inside"),
        pytest.param(os.mkfifo, id="a FIFO"),
        pytest.param(hostile.make_device, id="a device"),
        pytest.param(hostile.make_socket, id="a socket"),
        pytest.param(Path.mkdir, id="a directory"),
        pytest.param(hostile.hard_link, id="a hard link"),
    ],
)
def test_only_regular_files_are_hashed(top, make):
    """What is no regular file with one name is refused by name, among good files too."""
    for number in range(5):
        hostile.plain(top.path / str(number))
    make(top.path / "odd")
    with pytest.raises(RefusedError, match="odd"):
        digest_all(top, ["0", "1", "odd", "2", "3", "4"], 4)


def test_a_missing_file_is_an_error(top):
    """A name that leads nowhere is FileNotFoundError, as everywhere."""
    with pytest.raises(FileNotFoundError):
        digest_all(top, ["missing"])


CHANGE = """
import os, sys
path, small, large = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
print("ready", flush=True)
while True:
    os.truncate(path, small)
    os.truncate(path, large)
"""


def refusal(top) -> str:
    try:
        digest_all(top, ["pages"])
    except IntegrityError as error:
        return error.message
    return ""


def test_a_file_that_changes_is_named(top):
    """A file that shrinks and grows while it is read is an IntegrityError, never a crash or a hang."""
    path = top.path / "pages"
    path.write_bytes(bytes(4 * PIECE_BYTES))
    deadline = time.monotonic() + 60
    with attacker(CHANGE, path, PIECE_BYTES, 4 * PIECE_BYTES):
        while not (message := refusal(top)):
            assert time.monotonic() < deadline, "no change was seen"
    assert str(path) in message


def hashing() -> bool:
    return any(thread.name.startswith(("hash_", "read_")) for thread in threading.enumerate())


def wait_until_hashing() -> None:
    deadline = time.monotonic() + 60
    while not hashing():
        assert time.monotonic() < deadline, "nothing is hashed"
        time.sleep(0.01)


async def test_a_cancelled_digest_leaves_nothing_running(top):
    """Cancelling a digest of a huge file ends its threads and closes what they had open."""
    hostile.make_sparse(top.path / "huge")
    before = open_descriptors()
    task = asyncio.create_task(digest_files(top, ["huge"]))
    await asyncio.to_thread(wait_until_hashing)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not hashing()
    assert open_descriptors() == before


def test_a_failure_ends_the_others(top):
    """When one file fails the rest is not hashed to its end."""
    hostile.make_sparse(top.path / "huge")
    os.mkfifo(top.path / "odd")
    with pytest.raises(RefusedError, match="odd"):
        digest_all(top, ["odd", "huge"], 4)
    assert not hashing()
