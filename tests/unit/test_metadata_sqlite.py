"""What only the SQLite backend has to stand: restarts, a second agent, broken files."""

from __future__ import annotations

import asyncio
import sqlite3
import stat
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from hibernode.errors import IntegrityError, UnavailableError
from hibernode.metadata.backends.sqlite import SqliteBackend
from hibernode.metadata.records import SourceStatus
from tests.unit.metadata_kit import BASE, BASE_ID, POD, Clock, central, peer

READY = SourceStatus.READY


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Name the file."""
    return tmp_path / "state" / "metadata.sqlite"


async def opened(path: Path) -> SqliteBackend:
    """Open the file, or leave nothing open."""
    backend = SqliteBackend(path, clock=Clock())
    try:
        await backend.connect()
    except UnavailableError:
        await backend.close()
        raise
    return backend


def spoil(path: Path, statement: str, *values: Any) -> None:
    """Change the file behind the agent's back, while it is closed."""
    db = sqlite3.connect(path)
    db.execute(statement, values)
    db.commit()
    db.close()


async def test_records_outlive_the_agent(path: Path) -> None:
    """All of them, and what is written next is newer."""
    first = await opened(path)
    worker = central(topology={"host": "a"}, source_load=0.5, unknown={"later": 1})
    await first.publish_metadata(BASE, "w0", worker, owner=POD)
    await first.update_status(BASE_ID, "w0", 0, READY, 1_800_000_000_000)
    before = (await first.list_workers(), await first.get_metadata(BASE_ID, "w0"))
    await first.close()
    second = await opened(path)
    assert (await second.list_workers(), await second.get_metadata(BASE_ID, "w0")) == before
    new = await second.publish_metadata(BASE, "w1", peer())
    assert int(new.version.revision) > int(before[0][0].version.revision)
    await second.close()


async def test_the_list_is_read_without_the_weight_of_the_records(path: Path) -> None:
    """Payloads pass one by one, tensors not at all: a store of gigabytes needs no gigabytes to open."""
    size, count = 1 << 20, 24
    first = await opened(path)
    for number in range(count):
        await first.publish_metadata(BASE, f"w{number}", central(blob=bytes(size)))
    await first.close()
    tracemalloc.start()
    try:
        second = await opened(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(await second.list_workers()) == count
    assert peak < size * count / 3
    await second.close()


async def test_the_file_is_its_owners(path: Path) -> None:
    """Its directory too, whatever the umask is."""
    backend = await opened(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    await backend.close()


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """Name a file on a disk of 12 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(disk)], check=True)
    yield disk / "records.db"
    subprocess.run(["umount", str(disk)], check=True)


async def test_a_disk_that_is_nearly_full_still_takes_heartbeats_and_removals(
    small: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Publications leave room for them; it is said in the log once, and in the numbers all the time."""
    backend = await opened(small)
    for number in range(9):
        with suppress(UnavailableError):
            await backend.publish_metadata(BASE, f"w{number}", central(blob=bytes(1 << 20)))
    with pytest.raises(UnavailableError) as caught:
        await backend.publish_metadata(BASE, "w9", central(blob=bytes(1 << 20)))
    assert caught.value.reason == "NoSpace"
    assert len(caplog.records) == 1
    assert "bytes" in backend.stats().trouble
    last = len(await backend.list_workers())
    assert 0 < last < 9
    for number in range(last):
        assert await backend.update_status(BASE_ID, f"w{number}", 0, READY, 1_800_000_000_000)
    assert "free" in backend.stats().trouble
    for number in range(last):
        assert await backend.remove_worker(BASE_ID, f"w{number}")
    await backend.close()


async def test_a_file_that_is_removed_beneath_the_agent_is_said(path: Path) -> None:
    """What is published from then on would be lost with the agent, and it alone knows."""
    backend = await opened(path)
    await backend.publish_metadata(BASE, "w0", central())
    assert backend.stats().trouble == ""
    path.unlink()
    assert "removed" in backend.stats().trouble
    path.touch()
    assert "removed" in backend.stats().trouble
    await backend.close()


async def test_a_second_agent_is_refused(path: Path) -> None:
    """The first one's list would no longer be the file's."""
    backend = await opened(path)
    await backend.publish_metadata(BASE, "w0", peer())
    with pytest.raises(UnavailableError, match="locked"):
        await opened(path)
    assert len(await backend.list_workers()) == 1
    await backend.close()


def test_an_agent_that_is_killed_loses_nothing(path: Path) -> None:
    """What was answered is in the file."""
    code = f"""
import asyncio, os, signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from hibernode.metadata.backends.sqlite import SqliteBackend
from tests.unit.metadata_kit import BASE, central
async def main():
    backend = SqliteBackend(Path({str(path)!r}))
    await backend.connect()
    for rank in range(5):
        await backend.publish_metadata(BASE, f"w{{rank}}", central(rank))
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == -9

    async def look() -> int:
        backend = await opened(path)
        count = len(await backend.list_workers())
        await backend.close()
        return count

    assert asyncio.run(look()) == 5


async def test_a_caller_that_goes_leaves_list_and_file_the_same(path: Path) -> None:
    """Its change is made whole or not at all."""
    backend = await opened(path)
    for worker_id, turns in (("w0", 0), ("w1", 1), ("w2", 2), ("w3", 5)):
        task = asyncio.create_task(backend.publish_metadata(BASE, worker_id, peer()))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await backend.close()
    listed = {one.worker_id for one in await backend.list_workers()}
    again = await opened(path)
    assert {one.worker_id for one in await again.list_workers()} == listed
    await again.close()


@pytest.mark.parametrize("content", [b"no database at all, but long enough to look at" * 99, b"\x00" * 5000])
async def test_a_broken_file_is_said(path: Path, content: bytes) -> None:
    """It is named, and left as it is."""
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(UnavailableError, match=r"metadata\.sqlite"):
        await opened(path)
    assert path.read_bytes() == content


async def test_a_file_of_a_later_release_is_left_alone(path: Path) -> None:
    """Its records may mean something else."""
    await (await opened(path)).close()
    spoil(path, "PRAGMA user_version = 99")
    with pytest.raises(UnavailableError, match="schema 99"):
        await opened(path)


async def test_a_link_is_not_followed(path: Path, tmp_path: Path) -> None:
    """Whatever put it there."""
    path.parent.mkdir()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnavailableError):
        await opened(path)
    assert not (tmp_path / "elsewhere").exists()


async def test_tensors_that_changed_in_the_file_are_an_error(path: Path) -> None:
    """Digest and count are checked, as in the cluster."""
    backend = await opened(path)
    await backend.publish_metadata(BASE, "w0", central())
    await backend.close()
    spoil(path, "UPDATE records SET tensors = ?", b"[]")
    backend = await opened(path)
    with pytest.raises(IntegrityError):
        await backend.get_metadata(BASE_ID, "w0")
    await backend.close()


@pytest.mark.parametrize("column", ["worker", "owner"])
async def test_one_bad_row_hides_no_other(path: Path, column: str) -> None:
    """It is counted, and a new publication replaces it."""
    backend = await opened(path)
    await backend.publish_metadata(BASE, "w0", central())
    await backend.publish_metadata(BASE, "w1", central())
    await backend.close()
    spoil(path, f"UPDATE records SET {column} = '[' WHERE worker_id = 'w0'")
    backend = await opened(path)
    assert [one.worker_id for one in await backend.list_workers()] == ["w1"]
    assert backend.stats().unreadable == 1
    await backend.publish_metadata(BASE, "w0", central())
    assert len(await backend.list_workers()) == 2
    await backend.close()


async def test_a_closed_backend_says_so(path: Path) -> None:
    """To whoever still asks."""
    backend = await opened(path)
    await backend.publish_metadata(BASE, "w0", central())
    await backend.close()
    with pytest.raises(UnavailableError):
        await backend.publish_metadata(BASE, "w1", central())
    assert not backend.stats().synced


def test_the_modules_import_nothing_heavy() -> None:
    """The Kubernetes client and the HTTP one come with the first connection, not with the names."""
    code = (
        "import sys, hibernode.metadata.backends.kubernetes, hibernode.metadata.backends.sqlite;"
        "print(*sys.modules)"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not {"kubernetes", "aiohttp", "grpc", "pydantic"} & set(loaded.split())
