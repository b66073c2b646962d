"""Real CRIU on real processes, through options, runner, images and diagnose."""

import asyncio
import contextlib
import ctypes
import os
import platform
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hibernode.criu.diagnose import Cause, diagnose, read_log
from hibernode.criu.images import page_files, read_pstree
from hibernode.criu.options import DUMP_LOG, RESTORE_LOG, DumpOptions, RestoreOptions, dump_args, restore_args
from hibernode.criu.runner import Criu, CriuResult, find_criu, kill_leftovers, run_criu
from hibernode.host import procfs
from tests.real.node import until

pytestmark = pytest.mark.criu

DUMP = DumpOptions(
    leave="killed",
    shell_job=False,
    tcp="close",
    file_locks=True,
    link_remap=True,
    ghost_limit_bytes=1 << 20,
    freeze_timeout_seconds=60,
    log_level=4,
)
RESTORE = RestoreOptions(
    shell_job=False, tcp="close", file_locks=True, link_remap=True, ghost_limit_bytes=1 << 20, log_level=4
)
DEADLINE = 60.0

COUNTER = """
import mmap, os, sys, threading, time
shared = mmap.mmap(-1, 1 << 16)
shared[:6] = b"shared"
deleted = open("deleted", "w+")
deleted.write("deleted"), deleted.flush(), os.unlink("deleted")
threading.Thread(target=time.sleep, args=(1e6,), daemon=True).start()
if os.fork() == 0:
    while True:
        time.sleep(0.01)
if os.fork() == 0:
    os._exit(0)  # a zombie from now on
memory = os.urandom(1 << 20)
count = 0
while True:
    count += 1
    with open("new", "w") as file:
        file.write(f"{count} {hash(memory)} {shared[:6].decode()}")
    os.rename("new", "count")
    time.sleep(0.01)
"""
RING = """
import ctypes, time
assert ctypes.CDLL(None).syscall(425, 4, ctypes.create_string_buffer(120)) >= 0
"""
CLONE = {"x86_64": 56}.get(platform.machine(), 220)
"""The number of clone(2); 220 wherever the table of numbers is the common one."""

DEAF = f"""
import ctypes, sys, time
CLONE_VFORK, SIGCHLD = 0x4000, 17
# Until its child execs or ends, the parent of a vfork is in D state.
if ctypes.CDLL(None).syscall({CLONE}, CLONE_VFORK | SIGCHLD, 0, 0, 0, 0) == 0:
    time.sleep(1e6)
"""
LOST_NAME = """
import os
file = open("name", "w")
file.write("text"), file.flush(), os.link("name", "other"), os.unlink("name")
"""
READER = """
file = open("file", "w")
file.write("text"), file.flush()
"""
IDLE = """
import time
while True:
    open("ready", "w").close()
    time.sleep(0.01)
"""


@pytest.fixture
def criu() -> Criu:
    """Find the CRIU that make setup has installed."""
    return find_criu("")


class Site:
    """Directories for one dump, and the process that is dumped."""

    def __init__(self, base: Path, criu: Criu) -> None:
        self.criu = criu
        self.data, self.images, self.work = base / "data", base / "images", base / "work"
        for directory in (self.data, self.images, self.work):
            directory.mkdir()
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, code: str, wait: str = "ready") -> subprocess.Popen[bytes]:
        """Start a victim in its own session and wait for the file that says it is ready."""
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", textwrap.dedent(code)],
            cwd=self.data,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.processes.append(process)
        until(f"file {wait}", (self.data / wait).exists)
        return process

    async def run(self, args: list[str]) -> CriuResult:
        """Run CRIU."""
        return await run_criu(self.criu, args, work_dir=self.work, deadline=DEADLINE, marker="test")

    async def dump(self, pid: int, **changes) -> CriuResult:
        """Dump a process."""
        return await self.run(dump_args(pid, self.images, replace(DUMP, **changes)))

    async def failed_dump(self, process: subprocess.Popen[bytes], **changes) -> tuple[Cause, ...]:
        """Dump a process that cannot be dumped; returns the causes. It must run on."""
        result = await self.dump(process.pid, leave="running", **changes)
        assert result.returncode == 1
        assert process.poll() is None
        assert procfs.read_status(process.pid).tracer_pid == 0
        return diagnose(read_log(self.work / DUMP_LOG), result.returncode, "dump").causes

    def restore_args(self, *, detach: bool = True, **changes) -> list[str]:
        """Make the arguments of a restore."""
        return restore_args(self.images, self.work / "pid", replace(RESTORE, **changes), detach=detach)

    async def restore(self, **changes) -> int:
        """Restore; returns the root's pid, which is our child now."""
        result = await self.run(self.restore_args(**changes))
        assert (result.returncode, result.timed_out) == (0, False), read_log(self.work / RESTORE_LOG)[-2000:]
        return int((self.work / "pid").read_text())

    async def failed_restore(self) -> tuple[Cause, ...]:
        """Restore what cannot be restored; returns the causes."""
        result = await self.run(self.restore_args())
        assert result.returncode == 1
        return diagnose(read_log(self.work / RESTORE_LOG), result.returncode, "restore").causes

    def count(self) -> tuple[int, str]:
        """Read how far the counter is, and what its memory says."""
        number, _, rest = (self.data / "count").read_text().partition(" ")
        return int(number), rest

    def ticks(self) -> None:
        """Wait until a victim that idles runs on."""
        (self.data / "ready").unlink()
        until("tick", (self.data / "ready").exists)

    def end(self, pid: int) -> None:
        """Kill a victim's session and reap all of it, so that its pids are free."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-pid, 0)

    def close(self) -> None:
        """End the victims and their children, also those that were restored."""
        for process in self.processes:
            process.kill()
            process.wait()
            self.end(process.pid)


def set_subreaper(on: int) -> None:
    """Become, or stop being, the one who reaps: the machine's first process may be slow at it."""
    pr_set_child_subreaper = 36
    assert ctypes.CDLL(None).prctl(pr_set_child_subreaper, on, 0, 0, 0) == 0


@pytest.fixture
def site(tmp_path, criu) -> Iterator[Site]:
    """Give directories, and end all that was started."""
    here = Site(tmp_path, criu)
    set_subreaper(1)
    try:
        yield here
    finally:
        here.close()
        set_subreaper(0)


def test_the_installed_criu_is_started_without_a_shell(criu):
    """What make setup installs is found, new enough, and a loader or CRIU itself is what is started."""
    assert tuple(map(int, criu.version.split("."))) >= (4, 2)
    assert Path(criu.argv[0]).read_bytes().startswith(b"\x7fELF")


async def test_a_tree_is_dumped_and_goes_on_from_there(site):
    """A tree with a thread, a child, a zombie, shared memory and a deleted file goes on after a restore."""
    process = site.start(COUNTER, wait="count")
    until("a second task, and a zombie", lambda: len(procfs.tree(process.pid)) == 3)
    seen = {
        stat.pid: (stat.ppid, stat.pgrp, stat.session, tuple(procfs.threads(stat.pid)))
        for stat in procfs.tree(process.pid)
    }
    result = await site.dump(process.pid)
    assert (result.returncode, result.timed_out) == (0, False), read_log(site.work / DUMP_LOG)[-2000:]
    process.wait()
    site.end(process.pid)

    tasks = read_pstree(site.images)
    assert tasks[0].pid == process.pid
    assert tasks[0].ppid == 0
    in_image = {task.pid: (task.ppid, task.pgid, task.sid, tuple(sorted(task.threads))) for task in tasks}
    assert in_image == seen | {process.pid: (0, *seen[process.pid][1:])}
    files = page_files(site.images)
    assert files[0].startswith("ghost-file-")
    assert set(files[1:]) == {path.name for path in site.images.glob("pages-*.img")}
    assert {path.stat().st_mode & 0o077 for path in site.images.iterdir()} == {0}

    before, memory = site.count()
    assert await site.restore() == process.pid
    until("further count", lambda: site.count()[0] > before + 1)
    assert site.count()[1] == memory
    assert {stat.pid for stat in procfs.tree(process.pid)} == set(seen)
    assert "HIBERNODE_JOB" not in procfs.environ(process.pid)


async def test_io_uring_is_named_although_criu_does_not(site):
    """FC-01: CRIU says only that descriptors cannot be sent; the cause says io_uring."""
    causes = await site.failed_dump(site.start(RING + IDLE))
    assert [cause.reason for cause in causes] == ["IoUring"]
    assert "io_uring" in causes[0].message


async def test_a_task_in_d_state_is_named(site):
    """FC-43: the timeout of the freeze fires, and the cause names the task that does not stop."""
    process = site.start("open('ready', 'w').close()" + DEAF)
    until("D state", lambda: procfs.read_stat(process.pid).state == "D")
    causes = await site.failed_dump(process, freeze_timeout_seconds=1)
    assert [cause.reason for cause in causes] == ["TaskUninterruptible"]
    assert f"task {process.pid}" in causes[0].message


async def test_a_leftover_link_remap_is_named(site):
    """FC-45: a link_remap file that stands there makes the dump fail; the file in question is named."""
    process = site.start(LOST_NAME + IDLE)
    for number in range(200):  # CRIU numbers them by the open files
        (site.data / f"link_remap.{number}").touch()
    causes = await site.failed_dump(process)
    assert [cause.reason for cause in causes] == ["LinkRemapExists"]
    assert str(site.data / "name") in causes[0].message
    assert (site.data / "link_remap.1").exists()


@pytest.mark.parametrize(
    ("code", "changes", "reason"),
    [
        pytest.param(LOST_NAME, {"link_remap": False}, "LinkRemapOff", id="a file that lost its name"),
        pytest.param(
            "import ctypes\nassert ctypes.CDLL(None).syscall(430, b'tmpfs', 0) >= 0",
            {},
            "UnsupportedFd",
            id="a descriptor of fsopen",
        ),
        pytest.param(
            "import os\nfile = open('f', 'w+')\nfile.write('x' * 3000000), file.flush(), os.unlink('f')",
            {},
            "GhostFileTooLarge",
            id="a large deleted file",
        ),
        pytest.param(
            "import fcntl\nfile = open('f', 'w')\nfcntl.flock(file, 2)",
            {"file_locks": False},
            "FileLocksOff",
            id="a file lock",
        ),
        pytest.param(
            "import socket\nsock = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)",
            {},
            "SocketKind",
            id="a vsock socket",
        ),
    ],
)
async def test_a_dump_that_must_fail_says_why(site, code, changes, reason):
    """The real CRIU's words lead to the cause, and the worker runs on."""
    causes = await site.failed_dump(site.start(code + "\n" + IDLE), **changes)
    assert [cause.reason for cause in causes] == [reason]


async def test_established_connections_are_kept_without_iptables(site):
    """A connection within the tree is dumped and restored where no iptables program is."""
    process = site.start(
        "import socket\nserver = socket.create_server(('127.0.0.1', 0))\n"
        "client = socket.create_connection(server.getsockname())\nother, _ = server.accept()\n" + IDLE
    )
    result = await site.dump(process.pid, tcp="established")
    assert result.returncode == 0, read_log(site.work / DUMP_LOG)[-2000:]
    process.wait()
    assert await site.restore(tcp="established") == process.pid
    site.ticks()


async def test_a_pid_that_is_taken_is_named(site):
    """FC-08: the worker itself still lives, so its pid is taken; nothing of it is touched."""
    process = site.start(IDLE)
    assert (await site.dump(process.pid, leave="running")).returncode == 0
    (cause,) = await site.failed_restore()
    assert cause.reason == "PidInUse"
    assert f"pid {process.pid}" in cause.message
    assert process.poll() is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param(lambda site, pid: (site.data / "file").unlink(), "FileMissing", id="a file is gone"),
        pytest.param(
            lambda site, pid: (site.data / "file").write_text("other text"),
            "FileChanged",
            id="a file has grown",
        ),
        pytest.param(
            lambda site, pid: os.truncate(site.images / f"mm-{pid}.img", 30),
            "ImageTruncated",
            id="a cut image",
        ),
        pytest.param(
            lambda site, pid: (site.images / f"core-{pid}.img").write_bytes(b"junk" * 99),
            "ImageMagic",
            id="another file in place of an image",
        ),
        pytest.param(
            lambda site, pid: (site.work / "pid").touch(), "PidFileExists", id="a pid file is there"
        ),
    ],
)
async def test_a_restore_that_must_fail_says_why(site, change, reason):
    """The real CRIU's words lead to the cause."""
    process = site.start(READER + IDLE)
    assert (await site.dump(process.pid)).returncode == 0
    process.wait()
    change(site, process.pid)
    causes = await site.failed_restore()
    assert [cause.reason for cause in causes] == [reason]


async def test_a_criu_of_a_dead_agent_is_found_through_its_loader(site):
    """A CRIU that waits for its tree is found by its marker; the restored worker is not taken for it."""
    process = site.start(IDLE)
    assert (await site.dump(process.pid)).returncode == 0
    process.wait()
    (site.data / "ready").unlink()
    restore = asyncio.create_task(site.run(site.restore_args(detach=False)))
    await asyncio.to_thread(until, "restored worker", (site.data / "ready").exists)
    killed = await asyncio.to_thread(kill_leftovers, "test")
    assert len(killed) == 1
    assert (await restore).returncode == -signal.SIGKILL
    site.ticks()
