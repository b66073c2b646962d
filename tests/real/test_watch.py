"""The directory watcher on real inotify: latency is not asserted, completeness is."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from hibernode.config import SignalSettings
from hibernode.discovery.signals import SignalDir
from hibernode.discovery.watch import DirectoryWatcher, Mode

GENEROUS_SECONDS = 30.0


class Seen:
    """What the watcher has said: the names, and how often it asked for a look at everything."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.calls: list[set[str] | None] = []
        self.found: set[str] = set()

    def __call__(self, names: set[str] | None) -> None:
        """Do what the agent does: look at the names, or at everything."""
        self.calls.append(names)
        if names is not None:
            self.found |= names
            return
        with contextlib.suppress(OSError):
            self.found |= set(os.listdir(self.path))


async def until(test: Callable[[], object]) -> None:
    """Wait until ``test`` is true."""
    async with asyncio.timeout(GENEROUS_SECONDS):
        while not test():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def watching(path: Path, **settings: object) -> AsyncIterator[tuple[DirectoryWatcher, Seen]]:
    """Watch ``path`` with short periods; nothing is left afterwards."""
    threads = threading.active_count()
    values = {"path": path, "rescan_seconds": 3600.0, "poll_seconds": 0.02, **settings}
    seen = Seen(path)
    watcher = DirectoryWatcher(path, SignalSettings.model_validate(values), seen)
    await watcher.start()
    try:
        yield watcher, seen
    finally:
        await watcher.stop()
        await until(lambda: threading.active_count() <= threads + 1)  # to_thread keeps one of its own


async def test_each_file_is_seen_by_its_own_event(tmp_path: Path) -> None:
    """A file that is closed after writing, and one that is renamed in, come by name."""
    async with watching(tmp_path) as (watcher, seen):
        await until(lambda: seen.calls)
        assert watcher.mode is Mode.INOTIFY
        (tmp_path / "written").write_text("x")
        await until(lambda: {"written"} in seen.calls)
        (tmp_path / "hidden").write_text("x")
        (tmp_path / "hidden").rename(tmp_path / "renamed")
        await until(lambda: "renamed" in seen.found)


async def test_two_atomic_replaces_are_two_events_and_the_watcher_lives(tmp_path: Path) -> None:
    """FC-30: a rename over the same name is seen each time."""
    async with watching(tmp_path) as (_, seen):

        def times() -> int:
            return sum("f" in (names or ()) for names in seen.calls)

        for number in range(2):
            (tmp_path / "new").write_text(str(number))
            (tmp_path / "new").rename(tmp_path / "f")
            await until(lambda wanted=number + 1: times() >= wanted)  # type: ignore[misc]  # a default's type
        (tmp_path / "g").touch()
        await until(lambda: "g" in seen.found)


async def test_five_hundred_files_made_right_after_their_directory_are_all_seen(tmp_path: Path) -> None:
    """FC-25: the directory and its parent appear together with the file in one shell line."""
    for number in range(500):
        path = tmp_path / str(number) / "a" / "b"
        settings = SignalSettings(path=path, rescan_seconds=3600.0, poll_seconds=0.001)
        seen = Seen(path)
        watcher = DirectoryWatcher(path, settings, seen)
        await watcher.start()
        try:
            path.mkdir(parents=True)
            (path / "96429b272576.ready").touch()
            await until(lambda found=seen.found: "96429b272576.ready" in found)  # type: ignore[misc]  # likewise
        finally:
            await watcher.stop()


async def test_a_directory_that_appears_later_is_watched_from_then_on(tmp_path: Path) -> None:
    """Absent is a mode with a reason; then a look at everything, then events."""
    path = tmp_path / "later"
    async with watching(path) as (watcher, seen):
        assert watcher.mode is Mode.ABSENT
        assert "not exist" in watcher.mode_reason
        path.mkdir()
        (path / "early").touch()
        await until(lambda: "early" in seen.found)
        await until(lambda: watcher.mode is Mode.INOTIFY)
        (path / "event").touch()
        await until(lambda: "event" in seen.found)


async def test_a_directory_that_vanishes_and_comes_back_is_watched_again(tmp_path: Path) -> None:
    """Removal turns the mode to absent; a new directory is looked at and watched."""
    path = tmp_path / "d"
    path.mkdir()
    async with watching(path) as (watcher, seen):
        await until(lambda: seen.calls)
        path.rmdir()
        await until(lambda: watcher.mode is Mode.ABSENT)
        path.mkdir()
        (path / "again").touch()
        await until(lambda: "again" in seen.found)
        (path / "event").touch()
        await until(lambda: "event" in seen.found)


async def test_a_directory_that_is_replaced_is_noticed(tmp_path: Path) -> None:
    """Another directory under the same path takes the watch over; the old one is not listened to."""
    path, other = tmp_path / "d", tmp_path / "other"
    path.mkdir()
    other.mkdir()
    (other / "was-there").touch()
    async with watching(path) as (_, seen):
        await until(lambda: seen.calls)
        path.rename(tmp_path / "old")
        other.rename(path)
        await until(lambda: "was-there" in seen.found)
        (tmp_path / "old" / "unseen").touch()
        (path / "event").touch()
        await until(lambda: "event" in seen.found)
        assert "unseen" not in seen.found


async def test_a_queue_that_overflows_is_counted_and_everything_is_looked_at(tmp_path: Path) -> None:
    """FC-24: events that the kernel drops lose no file."""
    limit = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    async with watching(tmp_path) as (watcher, seen):
        await until(lambda: seen.calls)
        inotify = watcher._inotify
        assert inotify is not None
        with inotify._lock:  # the reader cannot go on until the queue has run over
            for number in range(limit + 2048):
                os.close(os.open(tmp_path / str(number % 1000), os.O_WRONLY | os.O_CREAT))
                os.rename(tmp_path / str(number % 1000), tmp_path / f"r{number % 7}")
            (tmp_path / "last").touch()
        await until(lambda: watcher.overflows >= 1)
        await until(lambda: "last" in seen.found)
        assert watcher.rescans >= 1


async def test_polling_takes_over_where_no_inotify_instance_is_left(tmp_path: Path) -> None:
    """Without a free descriptor the directory is polled, and the reason says why."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(int(name) for name in os.listdir("/proc/self/fd"))
    async with watching(tmp_path, watch="inotify") as (watcher, _):
        assert watcher.mode is Mode.INOTIFY
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 1, hard))
    spare: list[int] = []
    with contextlib.suppress(OSError):
        while True:
            spare.append(os.open("/dev/null", os.O_RDONLY))
    try:
        seen = Seen(tmp_path)
        settings = SignalSettings(path=tmp_path, watch="inotify", rescan_seconds=3600.0, poll_seconds=0.02)
        watcher = DirectoryWatcher(tmp_path, settings, seen)
        await watcher.start()
    finally:
        for fd in spare:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        assert watcher.mode is Mode.POLL
        assert "descriptors" in watcher.mode_reason
        (tmp_path / "polled").touch()
        await until(lambda: "polled" in seen.found)
    finally:
        await watcher.stop()


async def test_polling_that_was_asked_for_sees_files_too(tmp_path: Path) -> None:
    """The setting turns inotify off."""
    async with watching(tmp_path, watch="poll") as (watcher, seen):
        assert watcher.mode is Mode.POLL
        (tmp_path / "f").touch()
        await until(lambda: "f" in seen.found)


async def test_a_failing_callback_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An exception is logged and the next event comes through."""
    seen: list[object] = []

    def fails_first(names: set[str] | None) -> None:
        seen.append(names)
        if len(seen) == 1:
            raise ValueError("first")

    watcher = DirectoryWatcher(tmp_path, SignalSettings(path=tmp_path), fails_first)
    await watcher.start()
    try:
        await until(lambda: seen)
        (tmp_path / "f").touch()
        await until(lambda: {"f"} in seen)
    finally:
        await watcher.stop()
    assert "could not be handled" in caplog.text


async def test_stopping_leaves_no_thread_and_no_descriptor(tmp_path: Path) -> None:
    """Fifty watchers come and go."""
    async with watching(tmp_path):
        pass
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        async with watching(tmp_path):
            pass
    assert len(os.listdir("/proc/self/fd")) <= before


async def test_the_real_contract_sees_each_request_once(tmp_path: Path) -> None:
    """Watcher and signal directory together: 200 requests, each found, none twice once answered."""
    signals = SignalDir(SignalSettings(path=tmp_path))
    taken: list[str] = []

    def look(names: set[str] | None) -> None:
        for request in signals.scan(names).ready:
            taken.append(request.id)
            signals.answer_done(request.id, checkpoint_path="", success=False, error="test")

    watcher = DirectoryWatcher(tmp_path, SignalSettings(path=tmp_path, rescan_seconds=0.2), look)
    await watcher.start()
    try:
        for number in range(200):
            (tmp_path / f"{number:012x}.ready").touch()
        await until(lambda: len(set(taken)) == 200)
    finally:
        await watcher.stop()
    assert len(taken) == 200
