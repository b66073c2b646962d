"""Preflight on real processes, and CRIU asked whether it was right."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hibernode.criu.find import Criu, find_criu
from hibernode.errors import RefusedError
from hibernode.host import procfs
from hibernode.host.procfs import Process
from hibernode.preflight import Preflight, gather, host_findings, preflight, refuse
from hibernode.settings import CriuSettings, Settings, StoreSettings
from hibernode.workload import Finding, Verdict
from tests.real.node import until
from tests.real.preflight_cases import CASES, POSTLUDE, PRELUDE, RING, Case

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FAIL, WARN, OK = Verdict.FAIL, Verdict.WARN, Verdict.OK
MIB = 1 << 20
LIMIT = MIB
SETTINGS = Settings(criu=CriuSettings(ghost_limit_bytes=LIMIT), store=StoreSettings(min_free_bytes=0))
SOME_CRIU = Criu(argv=("/bin/false",), version="4.2.1", path="/bin/false")
PTRACE_SEIZE = 0x4206

DUMP_OPTIONS = (
    "--tcp-close", "--file-locks", f"--ghost-limit={LIMIT}", "--link-remap", "--ext-unix-sk",
    "--skip-in-flight", "--manage-cgroups=ignore", "--timeout=20", "-v4",
)  # fmt: skip


@dataclass
class Worker:
    """A process under test; ``directory`` is its own."""

    pid: int
    popen: subprocess.Popen[bytes]
    directory: Path

    def preflight(self, settings: Settings = SETTINGS) -> Preflight:
        with Process.open(self.pid) as process:
            return preflight(process, settings, SOME_CRIU, self.directory)

    def row(self, check: str) -> Finding:
        (found,) = [finding for finding in self.preflight().findings if finding.check == check]
        return found


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Worker]]:
    """Give a function that starts a Python program as a session's leader, and waits until it is ready."""
    started: list[subprocess.Popen[bytes]] = []

    def go(code: str, *prefix: str, session: bool = True, env: dict[str, str] | None = None) -> Worker:
        popen = subprocess.Popen(
            [*prefix, sys.executable, "-S", "-c", PRELUDE + code + POSTLUDE, str(tmp_path)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=session,
            env=None if env is None else {**os.environ, **env},
        )
        started.append(popen)
        assert popen.stdout is not None
        line = popen.stdout.readline()
        assert line == b"ready\n", "the program failed"
        return Worker(popen.pid, popen, tmp_path)

    yield go
    for popen in started:
        end(popen)


def end(popen: subprocess.Popen[bytes]) -> None:
    """Kill a program, all below it, and what has left its tree but not its session."""
    with contextlib.suppress(ProcessLookupError):
        for stat in procfs.tree(popen.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(stat.pid, signal.SIGKILL)
    for stat in procfs.all_stats().values():
        if stat.session == popen.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(stat.pid, signal.SIGKILL)
    popen.wait()
    if popen.stdout is not None:
        popen.stdout.close()


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[None]:
    """Give Unix sockets outside the tree: one that accepts, one that does not, one for datagrams."""
    with contextlib.ExitStack() as stack:
        sockets = {
            name: stack.enter_context(socket.socket(socket.AF_UNIX, kind))
            for name, kind in (
                ("stream", socket.SOCK_STREAM),
                ("busy", socket.SOCK_STREAM),
                ("dgram", socket.SOCK_DGRAM),
            )
        }
        for name, listener in sockets.items():
            listener.bind(str(tmp_path / name))
        sockets["stream"].listen()
        sockets["busy"].listen()
        accepted: list[socket.socket] = []
        thread = threading.Thread(target=_accept, args=(sockets["stream"], accepted))
        thread.start()
        yield
        sockets["stream"].shutdown(socket.SHUT_RDWR)
        thread.join()
        for connection in accepted:
            connection.close()


def _accept(listener: socket.socket, accepted: list[socket.socket]) -> None:
    with contextlib.suppress(OSError):  # it was shut down
        while True:
            accepted.append(listener.accept()[0])
            accepted[-1].send(b"x")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.usefixtures("peers")
def test_preflight_sees(case: Case, start: Callable[..., Worker]) -> None:
    """Preflight gives its verdict on a real process and names the pid and the descriptor."""
    worker = start(case.code)
    row = worker.row(case.check)
    assert row.verdict is case.verdict, row
    assert case.word.format(pid=worker.pid, dir=worker.directory) in row.found


@pytest.fixture(scope="module")
def criu() -> Criu:
    """Give the CRIU that make setup installed."""
    return find_criu("")


def run(criu: Criu, command: str, *arguments: str) -> int:
    return subprocess.run(
        [*criu.argv, command, *arguments, *DUMP_OPTIONS],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    ).returncode


@contextlib.contextmanager
def restored(criu: Criu, images: Path, *options: str) -> Iterator[bool]:
    """Restore, tell whether it worked, and end what was restored. CRIU stays its parent and reaps it."""
    pidfile = images / "pid"
    popen = subprocess.Popen(
        [*criu.argv, "restore", "-D", str(images), f"--pidfile={pidfile}", *DUMP_OPTIONS, *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    log = images / "restore.log"
    try:
        until("answer of criu", lambda: popen.poll() is not None or "Restore finished" in _text(log))
        yield popen.poll() is None
    finally:
        if popen.poll() is None:
            os.kill(int(pidfile.read_text()), signal.SIGKILL)
        popen.wait()


def _text(path: Path) -> str:
    with contextlib.suppress(FileNotFoundError):
        return path.read_text(errors="replace")
    return ""


@pytest.mark.criu
@pytest.mark.parametrize(
    "case", [case for case in CASES if case.dumps is not None], ids=lambda case: case.name
)
@pytest.mark.usefixtures("peers")
def test_criu_agrees(case: Case, start: Callable[..., Worker], criu: Criu) -> None:
    """CRIU fails where preflight says so, passes where it does not, and the worker lives either way."""
    worker = start(case.code)
    images = worker.directory / "images"
    images.mkdir()
    returncode = run(criu, "dump", "-t", str(worker.pid), "-D", str(images), "-R", "-o", "dump.log")
    assert (returncode == 0) == case.dumps, _text(images / "dump.log")[-2000:]
    assert worker.popen.poll() is None
    if case.restores is None:
        return
    if case.restores:
        end(worker.popen)
    else:  # what has left the tree goes on
        tree = [stat.pid for stat in procfs.tree(worker.pid)]
        for pid in tree:
            os.kill(pid, signal.SIGKILL)
        worker.popen.wait()
    with restored(criu, images, "-o", "restore.log") as alive:
        assert alive == case.restores, _text(images / "restore.log")[-2000:]


@pytest.mark.criu
def test_a_terminal_from_outside_fails_for_the_restore_would(tmp_path: Path, criu: Criu) -> None:
    """A worker on a terminal is refused: CRIU dumps it with --shell-job, but cannot restore it without."""
    master, slave = pty.openpty()
    popen = subprocess.Popen(
        [sys.executable, "-S", "-c", PRELUDE + POSTLUDE, str(tmp_path)],
        stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
    )  # fmt: skip
    try:
        assert b"ready" in os.read(master, 100)
        worker = Worker(popen.pid, popen, tmp_path)
        row = worker.row("tree.tty")
        assert row.verdict is FAIL
        assert f"pid {popen.pid} fd 0 (/dev/pts/" in row.found
        images = ["-D", str(tmp_path)]
        assert run(criu, "dump", "-t", str(popen.pid), *images, "-R") != 0
        assert run(criu, "dump", "-t", str(popen.pid), *images, "--shell-job") == 0
    finally:
        end(popen)
        os.close(master)
        os.close(slave)
    with restored(criu, tmp_path, "-o", "restore.log", "--shell-job") as alive:
        assert not alive


def test_a_plain_worker_passes(start: Callable[..., Worker]) -> None:
    """A worker that does nothing special is not refused, and every row is ok but that of the store."""
    checked = start("").preflight()
    refuse(checked.findings)
    # The temporary directory that stands for the store may lie in memory.
    assert {row.check for row in checked.findings if row.verdict is not OK} <= {"store.filesystem"}


def test_a_refusal_names_pid_and_fd_of_a_ring(start: Callable[..., Worker]) -> None:
    """FC-01: the error of a real io_uring user names io_uring, the pid and the descriptor."""
    worker = start(RING)
    with pytest.raises(RefusedError, match=rf"io_uring: pid {worker.pid} fd 3") as caught:
        refuse([row for row in worker.preflight().findings if row.check.startswith("tree.")])
    assert caught.value.reason == "IoUringInUse"
    assert "seccomp" in caught.value.remedy


def test_a_traced_task_is_named_with_its_tracer(start: Callable[..., Worker]) -> None:
    """A process under a debugger fails, and the debugger is named."""
    worker = start("")
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.ptrace(PTRACE_SEIZE, worker.pid, None, None) == 0
    try:
        row = worker.row("tree.state")
    finally:
        os.kill(worker.pid, signal.SIGKILL)  # a detach needs a stopped task
    assert row.verdict is FAIL
    assert f"pid {worker.pid} is traced by pid {os.getpid()}" in row.found


def test_a_stopped_task_is_worth_a_word(start: Callable[..., Worker]) -> None:
    """A process that was stopped before gets a warning."""
    worker = start("")
    os.kill(worker.pid, signal.SIGSTOP)
    until("stop", lambda: procfs.read_stat(worker.pid).state == "T")
    assert worker.row("tree.state").verdict is WARN


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["-m"], "ContainerNotSupported"),
        (["-n"], "ContainerNotSupported"),
        (["-p", "--fork"], "ContainerNotSupported"),
        (["-U"], "UserNamespace"),
    ],
    ids=["mnt", "net", "pid", "user"],
)
def test_half_a_container_is_refused(start: Callable[..., Worker], options: list[str], reason: str) -> None:
    """A root with some namespaces of its own, but not those of a container, cannot be dumped."""
    worker = start("", "unshare", *options)
    root = next(stat.pid for stat in procfs.tree(worker.pid) if stat.comm.startswith("python"))
    row = Worker(root, worker.popen, worker.directory).row("tree.namespaces")
    assert row.verdict is FAIL
    assert row.reason == reason


@pytest.mark.parametrize(
    ("pid", "word"), [(1, "init"), (2, "kernel"), (os.getpid(), "agent")], ids=["init", "kthreadd", "self"]
)
def test_what_is_no_worker_is_refused(pid: int, word: str, tmp_path: Path) -> None:
    """Init, a kernel thread and the agent itself are refused."""
    with Process.open(pid) as process:
        rows = preflight(process, SETTINGS, None, tmp_path).findings
    row = next(row for row in rows if row.check == "tree.identity")
    assert row.verdict is FAIL
    assert word in row.found


def test_a_process_that_has_ended_is_refused(start: Callable[..., Worker]) -> None:
    """A worker that ended before it could be looked at is a refusal with a reason of its own."""
    worker = start("")
    with Process.open(worker.pid) as process:
        end(worker.popen)
        with pytest.raises(RefusedError, match="has ended") as caught:
            preflight(process, SETTINGS, None, worker.directory)
    assert caught.value.reason == "WorkerGone"


def test_a_session_whose_leader_is_outside_fails(start: Callable[..., Worker]) -> None:
    """A child that stayed in the session of a living process outside cannot be restored."""
    leader = start("""
if os.fork() == 0:
    if os.fork() == 0:
        rest()
    os.setsid(); ready(); rest()
ready = lambda: None""")
    root = until(
        "the root",
        lambda: [stat.pid for stat in procfs.tree(leader.pid) if stat.session == stat.pid != leader.pid],
    )
    row = Worker(root[0], leader.popen, leader.directory).row("tree.session")
    assert row.verdict is FAIL
    assert f"session {leader.pid}, whose leader is outside" in row.found
    for stat in procfs.tree(leader.pid):
        os.kill(stat.pid, signal.SIGKILL)


@pytest.mark.parametrize("session", [True, False])
def test_shell_job_when_the_root_leads_no_session(start: Callable[..., Worker], session: bool) -> None:
    """CRIU must be told when the session of the root lies outside."""
    assert start("", session=session).preflight().shell_job is not session


TCP_PAIR = """
l = socket.socket(socket.AF_INET6 if {v6} else socket.AF_INET); l.bind(("", 0)); l.listen()
c = socket.create_connection(("127.0.0.1", l.getsockname()[1])); a, _ = l.accept()
"""


@pytest.mark.parametrize("v6", [False, True], ids=["IPv4", "an IPv6 socket with an IPv4 peer"])
def test_tcp_inside_the_tree_is_kept(start: Callable[..., Worker], v6: bool) -> None:
    """A loopback pair whose both ends the tree holds is kept."""
    checked = start(TCP_PAIR.format(v6=v6)).preflight()
    assert checked.tcp == "established"


def test_tcp_to_outside_is_closed_and_named(start: Callable[..., Worker]) -> None:
    """A connection to a process outside is closed, and the row names pid, descriptor and both ends."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        worker = start(f's = socket.create_connection(("127.0.0.1", {port}))')
        checked = worker.preflight()
    row = next(row for row in checked.findings if row.check == "tree.tcp")
    assert checked.tcp == "close"
    assert row.verdict is WARN
    assert f"pid {worker.pid} fd 3 (127.0.0.1:" in row.found
    assert f"to 127.0.0.1:{port}, ESTABLISHED" in row.found


def test_stdio_pipes_are_listed_to_reconnect(start: Callable[..., Worker]) -> None:
    """Stdout into a pipe of somebody else is fine, and listed with its direction."""
    worker = start("")
    (entry,) = worker.preflight().facts.outside_pipes
    assert (entry[:2], entry[3]) == ((worker.pid, 1), "w")
    assert worker.row("tree.pipes").verdict is OK


def test_ld_preload_is_named(start: Callable[..., Worker]) -> None:
    """FC-09: LD_PRELOAD in a process's environment is a warning."""
    row = start("", env={"LD_PRELOAD": "libc.so.6"}).row("tree.ld_preload")
    assert row.verdict is WARN
    assert "libc.so.6" in row.found


@pytest.mark.parametrize("how", ["file", "link", "empty", "absent"])
def test_the_preload_file_is_read_inside_the_workers_root(
    start: Callable[..., Worker], tmp_path: Path, how: str
) -> None:
    """FC-09: /etc/ld.so.preload counts if it stands in the worker's own root; no link leads out of it."""
    path = tmp_path / "etc/ld.so.preload"
    path.parent.mkdir()
    if how == "link":
        path.symlink_to(__file__)
    elif how != "absent":
        path.write_text("/x.so\n" if how == "file" else "")
    assert start("os.chroot(DIR)").preflight().facts.preload_file is (how == "file")


def test_link_remap_leftovers_are_named(start: Callable[..., Worker]) -> None:
    """FC-45: a file that CRIU will link anew is fine; a link_remap file that stands beside it is named."""
    code = 'f = open(DIR + "/a", "w"); os.link(DIR + "/a", DIR + "/b"); os.unlink(DIR + "/a")'
    worker = start(code)
    assert worker.row("tree.link_remap").verdict is OK
    (worker.directory / "link_remap.7").touch()
    row = worker.row("tree.link_remap")
    assert row.verdict is WARN
    assert f"{worker.directory}/link_remap.7" in row.found


def test_a_name_that_ends_in_deleted_is_no_deleted_file(start: Callable[..., Worker]) -> None:
    """A file whose own name ends in " (deleted)" needs no link."""
    worker = start('f = open(DIR + "/a (deleted)", "w")')
    assert worker.preflight().facts.renamed == ()


def test_file_locks_matter_where_they_are_not_dumped(start: Callable[..., Worker]) -> None:
    """A held lock fails where criu.file_locks is off."""
    worker = start('import fcntl; f = open(DIR + "/l", "w"); fcntl.flock(f, 2)')
    rows = worker.preflight(Settings(criu=CriuSettings(file_locks=False))).findings
    row = next(row for row in rows if row.check == "tree.file_locks")
    assert row.verdict is FAIL
    assert f"pid {worker.pid}" in row.found


MEMORY = """
private = bytearray(os.urandom(64 << 20))
shared = mmap.mmap(-1, 32 << 20); shared.write(os.urandom(32 << 20))
memfd = os.memfd_create("x"); os.write(memfd, os.urandom(16 << 20))
ghost = open(DIR + "/g", "wb", 0); ghost.write(os.urandom(512 << 10)); os.unlink(DIR + "/g")
if os.fork() == 0:
    rest()
"""


@pytest.mark.criu
def test_the_estimate_is_the_size_of_the_image(start: Callable[..., Worker], criu: Criu) -> None:
    """FC-39: the estimate is at least what CRIU writes, and at most a tenth more."""
    worker = start(MEMORY)
    estimate = worker.preflight().estimate_bytes
    images = worker.directory / "images"
    images.mkdir()
    assert run(criu, "dump", "-t", str(worker.pid), "-D", str(images), "-R", "-o", "dump.log") == 0
    written = sum(path.stat().st_size for path in images.iterdir() if path.suffix == ".img")
    assert written <= estimate <= written * 1.1


def test_processes_that_come_and_go_do_not_disturb(start: Callable[..., Worker]) -> None:
    """A tree that forks, opens and closes all the time can be looked at again and again."""
    worker = start("""
ready()
while True:
    if os.fork() == 0:
        for _ in range(20):
            f = open("/etc/passwd"); s = socket.socket(); m = mmap.mmap(-1, 4096); del f, s, m
        os._exit(0)
    if threading.active_count() < 20:
        threading.Thread(target=time.sleep, args=(0.01,)).start()
    os.waitpid(-1, 0)
""")
    for _ in range(50):
        checked = worker.preflight()
        assert checked.facts.root.pid == worker.pid
        assert all(thread.fds is None for task in checked.facts.tasks for thread in task.threads)


def test_nothing_is_left_open(start: Callable[..., Worker]) -> None:
    """Preflight closes what it opens."""
    worker = start(TCP_PAIR.format(v6=False))
    worker.preflight()
    before = len(list(Path("/proc/self/fd").iterdir()))
    worker.preflight()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_huge_tree_of_mappings_is_looked_at_whole(start: Callable[..., Worker]) -> None:
    """A ring behind thousands of mappings is found."""
    worker = start("m = [mmap.mmap(-1, 4096, prot=1 + i % 2 * 2) for i in range(5000)]\n" + RING)
    assert worker.row("tree.io_uring").verdict is FAIL


def test_gather_takes_the_stores_nearest_directory(start: Callable[..., Worker], tmp_path: Path) -> None:
    """A store that does not exist yet is judged by the directory that it will be made in."""
    worker = start("")
    with Process.open(worker.pid) as process:
        facts = gather(process, SETTINGS, None, tmp_path / "a/b/c")
    assert not facts.store.exists
    assert facts.store.free_bytes > 0


@pytest.mark.criu
def test_doctor_finds_this_machine_fit(criu: Criu, tmp_path: Path) -> None:
    """The doctor's rows are ok, warnings or skipped on the machine that the tests pass on."""
    tmp_path.chmod(0o700)
    settings = Settings(state_dir=tmp_path, store=StoreSettings(path=tmp_path, min_free_bytes=0))
    rows = host_findings(settings, criu)
    assert [row for row in rows if row.verdict is FAIL] == []
    assert len({row.check for row in rows}) == len(rows)
    assert next(row for row in rows if row.check == "criu.self_test").verdict is OK


def test_doctor_says_what_a_failing_self_test_said(tmp_path: Path) -> None:
    """The last lines of a ``criu check`` that fails stand in the row."""
    program = tmp_path / "criu"
    program.write_text("#!/bin/sh\necho 'no userfaultfd here' >&2\nexit 1\n")
    program.chmod(0o755)
    fake = Criu(argv=(str(program),), version="4.2.1", path=str(program))
    row = next(row for row in host_findings(SETTINGS, fake) if row.check == "criu.self_test")
    assert row.verdict is FAIL
    assert "no userfaultfd here" in row.found
