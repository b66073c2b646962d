"""The directory watcher on real inotify: latency is not asserted, completeness is."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import resource
import shutil
import struct
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from hibernode.discovery.signals import SignalDir
from hibernode.discovery.watch import MAX_NAMES, DirectoryWatcher, Inotify, Mode
from hibernode.settings import SignalSettings

GENEROUS_SECONDS = 30.0

ID = "96429b272576"


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


def watch_threads() -> int:
    """Count the threads of watches: other tests of this process may have some of other kinds."""
    return sum(isinstance(thread, Inotify) for thread in threading.enumerate())


@asynccontextmanager
async def watching(path: Path, **settings: object) -> AsyncIterator[tuple[DirectoryWatcher, Seen]]:
    """Watch ``path`` with short periods; nothing is left afterwards."""
    threads = watch_threads()
    values = {"path": path, "rescan_seconds": 3600.0, "poll_seconds": 0.02, **settings}
    seen = Seen(path)
    watcher = DirectoryWatcher(path, SignalSettings.model_validate(values), seen)
    await watcher.start()
    try:
        yield watcher, seen
    finally:
        await watcher.stop()
        await until(lambda: watch_threads() <= threads)


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


async def test_the_watch_settles_after_its_directory_was_moved_away(tmp_path: Path) -> None:
    """Giving up the old directory, which still exists, is no news of the new one."""
    path = tmp_path / "d"
    path.mkdir()
    async with watching(path) as (watcher, seen):
        path.rename(tmp_path / "old")
        path.mkdir()
        await until(lambda: watcher.rescans >= 2)
        for number in range(20):
            (path / f"event{number}").touch()
            await until(lambda name=f"event{number}": name in seen.found)  # type: ignore[misc]  # a default's type
        assert watcher.rescans <= 4
        assert seen.calls[-1] == {"event19"}


async def test_a_directory_that_is_swapped_all_the_time_is_watched_when_that_ends(tmp_path: Path) -> None:
    """A thousand swaps cost a few looks, not a thousand threads, and none is the last that counts."""
    paths = [tmp_path / "d", tmp_path / "e"]
    for path in paths:
        path.mkdir()
    async with watching(paths[0]) as (watcher, seen):
        for _ in range(1000):
            os.rename(paths[0], tmp_path / "swap")
            os.rename(paths[1], paths[0])
            os.rename(tmp_path / "swap", paths[1])
            await asyncio.sleep(0)
        (paths[0] / "now").touch()
        await until(lambda: "now" in seen.found)
        await until(lambda: watcher.mode is Mode.INOTIFY)
        assert watcher.rescans < 1000
        before = len(seen.calls)
        (paths[0] / "event").touch()
        await until(lambda: "event" in seen.found)
        assert len(seen.calls) > before


async def test_a_parent_that_is_replaced_is_noticed_at_the_next_rescan(tmp_path: Path) -> None:
    """No event tells of it: the directory itself stays as it was."""
    path = tmp_path / "parent" / "d"
    path.mkdir(parents=True)
    async with watching(path, rescan_seconds=0.05) as (_, seen):
        (tmp_path / "parent").rename(tmp_path / "old")
        path.mkdir(parents=True)
        (path / "new").touch()
        await until(lambda: "new" in seen.found)
        (tmp_path / "old" / "d" / "unseen").touch()
        (path / "event").touch()
        await until(lambda: "event" in seen.found)
        assert "unseen" not in seen.found


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: path.touch(), "no directory"),
        (lambda path: path.symlink_to("/tmp"), "a symbolic link"),
        (os.mkfifo, "no directory"),
    ],
    ids=["a file", "a link to a directory", "a FIFO"],
)
async def test_what_is_no_directory_counts_as_absent_and_is_named(
    tmp_path: Path, make: Callable[[Path], object], reason: str
) -> None:
    """It is neither followed nor opened, and a directory in its place is taken up."""
    path = tmp_path / "d"
    make(path)
    async with watching(path) as (watcher, seen):
        assert watcher.mode is Mode.ABSENT
        assert reason in watcher.mode_reason
        assert not seen.calls
        path.unlink()
        path.mkdir()
        (path / "f").touch()
        await until(lambda: "f" in seen.found)


async def make_anew(path: Path, rounds: int, shell: subprocess.Popen[str]) -> list[str]:
    """Remove and make ``path`` again and again under one watcher; returns the requests taken."""
    signals = SignalDir(SignalSettings(path=path, rescan_seconds=3600.0, poll_seconds=0.01))
    taken: list[str] = []
    again: list[asyncio.TimerHandle] = []

    def look(names: set[str] | None) -> None:
        scan = signals.scan(names)
        for request in scan.ready:
            taken.append(request.id)
            signals.answer_done(request.id, checkpoint_path="", success=False, error="test")
        if scan.unsettled:
            again.append(asyncio.get_running_loop().call_later(0.02, look, None))

    watcher = DirectoryWatcher(path, signals.settings, look)
    await watcher.start()
    try:
        for number in range(rounds):
            # One line: a process of its own makes all of it within some microseconds. The ready file goes
            # first: where only its answer is gone yet, it is a new request, and rightly so.
            away = f"rm -f {path}/*.ready; rm -rf {path.parent}"
            line = f"{away}; mkdir -p {path} && : > {path}/{number:012x}.ready\n"
            assert shell.stdin is not None
            shell.stdin.write(line)
            shell.stdin.flush()
            await until(lambda number=number: len(taken) > number)  # type: ignore[misc]  # a default's type
    finally:
        for timer in again:
            timer.cancel()
        await watcher.stop()
    return taken


async def test_directories_made_anew_500_times_lose_no_request_and_repeat_none(tmp_path: Path) -> None:
    """FC-25: ``rm -r``, then ``mkdir -p a/b && touch`` in one shell line, in 20 places, 25 times each."""
    with subprocess.Popen(["sh"], stdin=subprocess.PIPE, text=True) as shell:
        results = await asyncio.gather(
            *(make_anew(tmp_path / str(number) / "a" / "b", 25, shell) for number in range(20))
        )
    assert results == [[f"{number:012x}" for number in range(25)]] * 20


async def test_files_that_were_there_before_are_looked_at_first(tmp_path: Path) -> None:
    """FC-26: an agent that starts late misses nothing."""
    (tmp_path / "early").touch()
    async with watching(tmp_path) as (_, seen):
        assert seen.calls == [None]
        assert "early" in seen.found


async def test_an_overflow_that_swallows_the_end_of_the_directory_is_survived(tmp_path: Path) -> None:
    """FC-24: the new directory can even have the old one's inode, so every overflow arms anew."""
    limit = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    path = tmp_path / "d"
    path.mkdir()
    (path / "a").touch()
    async with watching(path) as (watcher, seen):
        inotify = watcher._inotify
        assert inotify is not None
        with inotify._lock:
            for _ in range(limit // 2 + 1024):
                os.rename(path / "a", path / "b")
                os.rename(path / "b", path / "a")
            shutil.rmtree(path)
            path.mkdir()
        await until(lambda: watcher.overflows)
        await until(lambda: watcher.rescans >= 2)
        (path / "event").touch()
        await until(lambda: "event" in seen.found)


async def test_a_loop_that_is_busy_is_not_buried_in_names(tmp_path: Path) -> None:
    """Beyond a bound the names are given up for one look at everything."""
    async with watching(tmp_path) as (watcher, seen):
        for number in range(MAX_NAMES + 100):  # the loop is not at work in here, the thread is
            (tmp_path / f"{number}").touch()
        await until(lambda: len(seen.found) == MAX_NAMES + 100)
        assert all(names is None or len(names) <= MAX_NAMES for names in seen.calls)
        (tmp_path / "event").touch()
        await until(lambda: "event" in seen.found)
        assert watcher.mode is Mode.INOTIFY


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


def in_namespace(flags: list[str], function: Callable[[Path], None], path: Path) -> None:
    """Run a function of this module in a process of its own, in namespaces of its own."""
    code = f"import pathlib, sys; from tests.real.test_watch import {function.__name__} as run; "
    result = subprocess.run(
        [
            "unshare",
            *flags,
            sys.executable,
            "-W",
            "error",
            "-c",
            code + "run(pathlib.Path(sys.argv[1]))",
            str(path),
        ],
        cwd=Path(__file__).parents[2],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def _limited(path: Path, limit: str, word: str) -> None:
    """Watch with no room for inotify; then make room."""

    async def run() -> None:
        Path("/proc/sys/user", limit).write_text("0")
        before = sorted(os.listdir("/proc/self/fd"))
        seen = Seen(path)
        settings = SignalSettings(path=path, rescan_seconds=3600.0, poll_seconds=0.02)
        watcher = DirectoryWatcher(path, settings, seen, retry_seconds=0.1)
        await watcher.start()
        assert watcher.mode is Mode.POLL
        assert word in watcher.mode_reason, watcher.mode_reason
        (path / "polled").touch()
        await until(lambda: "polled" in seen.found)
        asked = watcher._retry_at
        await until(lambda: watcher._retry_at > asked)  # it has asked again, in vain
        assert sorted(os.listdir("/proc/self/fd")) == before
        Path("/proc/sys/user", limit).write_text("100")
        await until(lambda: watcher.mode is Mode.INOTIFY)
        assert watcher.mode_reason == ""
        (path / "event").touch()
        await until(lambda: {"event"} in seen.calls)
        await watcher.stop()
        assert sorted(os.listdir("/proc/self/fd")) == before

    asyncio.run(run())


def no_instances(path: Path) -> None:
    """EMFILE of inotify_init."""
    _limited(path, "max_inotify_instances", "instances")


def no_watches(path: Path) -> None:
    """ENOSPC of inotify_add_watch."""
    _limited(path, "max_inotify_watches", "watches")


@pytest.mark.parametrize("limited", [no_instances, no_watches])
def test_polling_ends_when_there_is_room_for_inotify_again(
    tmp_path: Path, limited: Callable[[Path], None]
) -> None:
    """The limits of a user namespace of the test's own are real; nothing leaks while it asks in vain."""
    in_namespace(["--user", "--map-root-user"], limited, tmp_path)


def serve_fuse(fd: int) -> None:
    """Answer for a file system that holds nothing but its root."""
    attributes = struct.pack("<6Q10I", 1, 0, 0, 0, 0, 0, 0, 0, 0, 0o040755, 2, 0, 0, 0, 4096, 0)
    replies = {
        26: struct.pack("<4I2H2I2H8I", 7, 31, 65536, 0, 16, 12, 4096, 1, 1, 0, *[0] * 8),  # INIT
        3: struct.pack("<Q2I", 0, 0, 0) + attributes,  # GETATTR
        17: struct.pack("<5Q10I", 0, 0, 0, 0, 0, 4096, 255, 4096, *[0] * 7),  # STATFS
    }
    while True:
        try:
            request = os.read(fd, 1 << 20)
        except OSError:  # unmounted
            return
        _, opcode, unique = struct.unpack_from("<IIQ", request)
        if opcode in (2, 36, 42):  # FORGET, INTERRUPT, BATCH_FORGET: no answer is wanted
            continue
        body = replies.get(opcode)
        head = struct.pack("<IiQ", 16 + len(body or b""), 0 if body else -38, unique)
        os.write(fd, head + (body or b""))


def on_fuse(path: Path) -> None:
    """Watch a directory whose files can change without this kernel's knowledge."""
    fd = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={fd},rootmode=40000,user_id=0,group_id=0".encode()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mount(b"test", bytes(path), b"fuse.test", 0, options) == 0, os.strerror(ctypes.get_errno())
    threading.Thread(target=serve_fuse, args=(fd,), daemon=True).start()

    async def run() -> None:
        for watch, mode in (("auto", Mode.POLL), ("inotify", Mode.INOTIFY)):
            calls: list[set[str] | None] = []
            settings = SignalSettings.model_validate({"path": path, "watch": watch, "poll_seconds": 0.02})
            watcher = DirectoryWatcher(path, settings, calls.append)
            await watcher.start()
            assert watcher.mode is mode, watcher.mode_reason
            if mode is Mode.POLL:
                assert "file system" in watcher.mode_reason
                await until(lambda calls=calls: len(calls) > 3)  # type: ignore[misc]  # a default's type
            await watcher.stop()

    asyncio.run(run())
    assert libc.umount2(bytes(path), 2) == 0  # MNT_DETACH


def test_a_file_system_that_changes_elsewhere_is_polled_unless_told_otherwise(tmp_path: Path) -> None:
    """On a real FUSE mount, in a mount namespace of its own; ``watch: inotify`` insists."""
    in_namespace(["--mount"], on_fuse, tmp_path)


def few_descriptors(path: Path) -> None:
    """Leave none, one and two descriptors: inotify, or one end or both of watchdog's pipe fail."""

    async def run() -> None:
        await asyncio.to_thread(path.lstat)  # what a first call opens stays open
        for left in range(4):
            spare = [os.open("/dev/null", os.O_RDONLY)]
            highest = max(spare[0], *(int(name) for name in os.listdir("/proc/self/fd")))
            _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 20, hard))
            with contextlib.suppress(OSError):
                while True:
                    spare.append(os.open("/dev/null", os.O_RDONLY))
            for _ in range(left):
                os.close(spare.pop())
            watcher = DirectoryWatcher(path, SignalSettings(path=path, poll_seconds=0.02), lambda _: None)
            await watcher.start()
            assert watcher.mode is (Mode.INOTIFY if left >= 3 else Mode.POLL), (left, watcher.mode_reason)
            await watcher.stop()
            free = [os.open("/dev/null", os.O_RDONLY) for _ in range(left)]
            with pytest.raises(OSError, match="open"):
                os.open("/dev/null", os.O_RDONLY)
            for fd in spare + free:
                os.close(fd)

    asyncio.run(run())


def test_no_descriptor_leaks_when_the_last_ones_are_taken(tmp_path: Path) -> None:
    """Watchdog opens three; a shortage may end after any of them."""
    in_namespace(["--uts"], few_descriptors, tmp_path)


async def test_no_child_inherits_the_watch(tmp_path: Path) -> None:
    """CRIU and restored workers get no inotify descriptor of ours, even where all others are passed on."""
    async with watching(tmp_path) as (watcher, _):
        assert watcher.mode is Mode.INOTIFY
        own = {
            os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.lexists(entry.path)
        }
        assert "anon_inode:inotify" in own
        result = subprocess.run(
            ["sh", "-c", "ls -l /proc/self/fd"], check=True, capture_output=True, text=True, close_fds=False
        )
        assert "inotify" not in result.stdout


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
