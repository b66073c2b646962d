"""Processes as /proc shows them: odd names, vanished processes, hostile sizes."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from hibernode.host import procfs
from hibernode.host.procfs import Process, Stat


@contextmanager
def running(code: str, *args: str, **options):
    """Run ``code`` in a Python of its own, which then waits for the end of its standard input."""
    script = f"import os, signal, sys\n{code}\nprint('ready', flush=True)\nsys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", script, *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        **options,
    ) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            yield child
        finally:
            child.kill()


@contextmanager
def zombie():
    """Make a process that has ended and is not reaped."""
    with subprocess.Popen(["true"]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        yield child.pid


@pytest.fixture
def gone():
    """Find a pid that was a process's and is nobody's."""
    child = subprocess.Popen(["true"])
    child.wait()
    return child.pid


# stat and status ----------------------------------------------------------------------------------------


def test_a_process_that_renames_itself_is_still_read():
    """The kernel lets a process put parentheses and line ends into its name."""
    with running("open('/proc/self/comm', 'w').write(') R (1\\n2')") as child:
        found = procfs.read_stat(child.pid)
    assert found.comm == ") R (1\n2"
    assert (found.ppid, found.num_threads) == (os.getpid(), 1)


def test_our_own_stat_and_status_agree_with_the_system_calls():
    """Ids, session, groups and the tracer are those of this process."""
    found, status = procfs.read_stat(os.getpid()), procfs.read_status(os.getpid())
    assert (found.ppid, found.pgrp, found.session) == (os.getppid(), os.getpgrp(), os.getsid(0))
    assert status.uids[:3] == os.getresuid()
    assert status.gids[:3] == os.getresgid()
    assert status.groups == tuple(os.getgroups())
    assert status.ns_pids[0] == os.getpid()
    assert (status.tracer_pid, status.no_new_privs) == (0, False)
    assert status.vm_rss_bytes > 1 << 20
    assert found.rss_bytes > 1 << 20
    assert not found.is_kernel_thread


def test_status_shows_what_a_process_has_given_up():
    """Another user's ids, groups, no_new_privs and the lost capabilities are seen."""
    code = (
        "from hibernode.host import linux; linux.set_no_new_privs()\n"
        "os.setgroups([7, 8]); os.setresgid(4, 5, 6); os.setresuid(1, 2, 3)"
    )
    with running(code) as child:
        status = procfs.read_status(child.pid)
    assert (status.uids, status.gids, status.groups) == ((1, 2, 3, 2), (4, 5, 6, 5), (7, 8))
    assert status.no_new_privs
    assert status.cap_eff == 0


# the vanished -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "look",
    [
        procfs.read_stat,
        procfs.read_status,
        procfs.environ,
        procfs.cmdline,
        procfs.exe,
        procfs.cwd,
        procfs.threads,
        procfs.namespaces,
        procfs.fds,
        procfs.tree,
        Process.open,
        pytest.param(lambda pid: list(procfs.maps(pid)), id="maps"),
        pytest.param(lambda pid: procfs.read_stat(os.getpid(), pid), id="stat of a thread"),
    ],
)
def test_a_process_that_is_gone_is_one_error(gone, look):
    """Whatever is asked of a process that is not there, the answer is ProcessLookupError."""
    for pid in (gone, 0, -1, 1 << 40):
        with pytest.raises(ProcessLookupError):
            look(pid)


def test_a_zombie_has_a_stat_and_nothing_else():
    """It is seen as a zombie, it can be reported, and it cannot be held."""
    with zombie() as pid:
        assert procfs.read_stat(pid).state == "Z"
        assert procfs.read_status(pid).vm_rss_bytes == 0
        assert (procfs.cmdline(pid), procfs.environ(pid), list(procfs.maps(pid))) == ([], {}, [])
        assert (procfs.exe(pid), procfs.cwd(pid)) == (None, None)
        assert procfs.fds(pid) == []
        assert procfs.namespaces(pid).get("mnt") is None
        assert [stat.pid for stat in procfs.tree(pid)] == [pid]
        with pytest.raises(ProcessLookupError):
            Process.open(pid)


def test_processes_that_come_and_go_are_no_error():
    """While processes start and end, a pass over all of them fails for none."""
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            subprocess.run(["true"], check=True)

    workers = [threading.Thread(target=churn) for _ in range(2)]
    for worker in workers:
        worker.start()
    looks = (
        procfs.read_status,
        procfs.environ,
        procfs.fds,
        procfs.cmdline,
        procfs.exe,
        procfs.threads,
        lambda pid: list(procfs.maps(pid)),
    )
    met = 0
    deadline = time.monotonic() + 60
    try:
        while met < 30 and time.monotonic() < deadline:
            for found in procfs.tree(os.getpid())[1:]:
                for look in looks:
                    try:
                        look(found.pid)
                    except ProcessLookupError:
                        met += 1
    finally:
        stop.set()
        for worker in workers:
            worker.join()
    assert met


# texts --------------------------------------------------------------------------------------------------


def test_the_environment_comes_as_it_was_set():
    """Equals signs, empty values, line ends and bytes that are not UTF-8 survive."""
    env = {"A": "1=2=3", "EMPTY": "", "LINES": "a\nb", "RAW": "\udcff"}
    with running("", env=env) as child:
        assert procfs.environ(child.pid) == env


def test_of_a_name_that_stands_twice_the_first_counts():
    """getenv(3) finds the first one, so the worker's own view is that too."""
    code = (
        "import ctypes, os\n"
        "argv = (ctypes.c_char_p * 2)(b'cat', None)\n"
        "envp = (ctypes.c_char_p * 5)(b'X=first', b'X=second', b'no equals sign', b'=odd', None)\n"
        "ctypes.CDLL(None).execve(b'/bin/cat', argv, envp)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as child:
        deadline = time.monotonic() + 60
        while procfs.environ(child.pid).get("X") is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert procfs.environ(child.pid) == {"X": "first"}
        child.kill()


def test_an_environment_beyond_the_limit_is_dropped():
    """What is cut in the middle does not appear with half its value."""
    with running("", env={"A": "1", "B": "x" * 100_000, "C": "3"}) as child:
        assert procfs.environ(child.pid, limit=50_000) == {"A": "1"}
        assert procfs.environ(child.pid).keys() == {"A", "B", "C"}


def test_empty_arguments_are_arguments():
    """The list is what the program was given, odd bytes included."""
    with running("", "a b", "", "\udcff", "") as child:
        assert procfs.cmdline(child.pid)[3:] == ["a b", "", "\udcff", ""]


def test_a_deleted_program_and_a_deleted_directory_say_so(tmp_path):
    """The kernel's own mark stays in the text."""
    (tmp_path / "here").mkdir()
    program = tmp_path / "program"
    shutil.copy("/bin/cat", program)
    with subprocess.Popen([program], stdin=subprocess.PIPE, cwd=tmp_path / "here") as child:
        assert procfs.exe(child.pid) == str(program)
        assert procfs.cwd(child.pid) == str(tmp_path / "here")
        program.unlink()
        (tmp_path / "here").rmdir()
        assert procfs.exe(child.pid) == f"{program} (deleted)"
        assert procfs.cwd(child.pid) == f"{tmp_path}/here (deleted)"
        child.kill()


# trees and threads --------------------------------------------------------------------------------------


def made_up(*pairs: tuple[int, int]) -> dict[int, Stat]:
    """Stats of processes (pid, parent), in this order of their start."""
    return {
        pid: Stat(pid, "x", "S", ppid, 1, 1, 0, 0, 1, ticks, 0, 0) for ticks, (pid, ppid) in enumerate(pairs)
    }


@pytest.mark.parametrize(
    ("stats", "root", "expected"),
    [
        pytest.param(made_up((1, 0), (5, 1)), 5, [5], id="a process without children"),
        pytest.param(
            made_up((5, 1), (9, 5), (7, 5), (8, 9)), 5, [5, 9, 7, 8], id="elder siblings come first"
        ),
        pytest.param(made_up((5, 1), (3, 5), (2, 3)), 5, [5, 3, 2], id="pids that have wrapped around"),
        pytest.param(made_up((5, 7), (7, 5), (1, 0)), 5, [5, 7], id="a circle made by a reused pid"),
        pytest.param(made_up((5, 5), (6, 5)), 5, [5, 6], id="a process that is its own parent"),
        pytest.param(made_up((5, 1), (6, 2)), 5, [5], id="other people's children"),
    ],
)
def test_a_tree_lists_parents_before_children(stats, root, expected):
    """The root comes first, and the walk ends whatever the numbers say."""
    assert [found.pid for found in procfs.tree(root, stats)] == expected


def test_a_real_tree_and_its_threads_are_found():
    """A child, its child and its threads are listed; the children are not among the parent's threads."""
    code = (
        "import threading\n"
        "for _ in range(3): threading.Thread(target=signal.pause, daemon=True).start()\n"
        "import subprocess; inner = subprocess.Popen(['sleep', '600'])"
    )
    with running(code) as child:
        tree = procfs.tree(child.pid)
        assert [found.ppid for found in tree] == [os.getpid(), child.pid]
        assert tree[0].key == procfs.read_stat(child.pid).key
        tids = procfs.threads(child.pid)
        assert len(tids) == 4
        assert tids[0] == child.pid
        assert {procfs.read_stat(child.pid, tid).pid for tid in tids} == set(tids)
        assert tree[0].num_threads == 4
        os.kill(tree[1].pid, signal.SIGKILL)


# descriptors and mappings -------------------------------------------------------------------------------


def test_descriptors_are_described_without_opening_them(tmp_path):
    """A pipe, a deleted file, a device, a socket and a FIFO that nobody writes to: each as fstat shows it."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "log").write_bytes(b"12345")
    pipe = os.pipe()
    opened = [
        os.open(tmp_path / "log", os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC),
        os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK),
        os.open("/dev/null", os.O_RDWR),
        *pipe,
    ]
    (tmp_path / "log").unlink()
    with socket.socket() as sock:
        found = {fd.fd: fd for fd in procfs.fds(os.getpid())}
        for number in (*opened, sock.fileno()):
            plain, fd = os.fstat(number), found[number]
            assert (fd.mode, fd.dev, fd.ino, fd.rdev) == (
                plain.st_mode,
                plain.st_dev,
                plain.st_ino,
                plain.st_rdev,
            )
            assert (fd.nlink, fd.size) == (plain.st_nlink, plain.st_size)
            assert fd.target == str(Path(f"/proc/self/fd/{number}").readlink())
        log, fifo, null, reading, writing = (found[number] for number in opened)
        assert (log.target, log.nlink, log.size) == (f"{tmp_path}/log (deleted)", 0, 5)
        assert (
            log.flags & (os.O_APPEND | os.O_CLOEXEC | os.O_ACCMODE)
            == os.O_APPEND | os.O_CLOEXEC | os.O_WRONLY
        )
        assert stat.S_ISFIFO(fifo.mode)
        assert null.rdev == os.makedev(1, 3)
        assert reading.target == writing.target == f"pipe:[{reading.ino}]"
        assert stat.S_ISSOCK(found[sock.fileno()].mode)
        assert log.mnt_id != null.mnt_id
    for number in opened:
        os.close(number)


ON_A_DEAD_FUSE = """
import ctypes
device = os.open("/dev/fuse", os.O_RDWR)
options = f"fd={device},rootmode=40000,user_id=0,group_id=0".encode()
libc = ctypes.CDLL(None, use_errno=True)
assert libc.unshare(0x20000) == 0
assert libc.mount(b"none", b"/", None, 0x44000, None) == 0
assert libc.mount(b"dead", os.fsencode(sys.argv[1]), b"fuse", 0, options) == 0, ctypes.get_errno()
held = os.open(sys.argv[1], os.O_PATH)
"""


def test_fc_43_a_descriptor_on_a_file_system_that_hangs_does_not_hang_us(tmp_path):
    """Nobody answers for this FUSE mount, so a plain stat of the worker's descriptor would never return."""
    with running(ON_A_DEAD_FUSE, str(tmp_path)) as child:
        # Should we hang all the same, not even a signal helps, but the end of the mount's owner does.
        rescue = threading.Timer(30, child.kill)
        rescue.start()
        (held,) = [fd for fd in procfs.fds(child.pid) if fd.target == str(tmp_path)]
        assert stat.S_ISDIR(held.mode)
        assert rescue.is_alive()
        rescue.cancel()


def test_a_mapped_file_is_found_and_its_deletion_seen(tmp_path):
    """The mapping names the file's device and inode, before and after it is deleted."""
    file = tmp_path / "a b\nc"
    file.write_bytes(b"x" * 8192)
    code = "import mmap; kept = mmap.mmap(os.open(sys.argv[1], os.O_RDONLY), 8192, prot=mmap.PROT_READ)"
    with running(code, str(file)) as child:
        (found,) = [mapping for mapping in procfs.maps(child.pid) if mapping.path == str(file)]
        status = file.stat()
        assert (found.inode, os.makedev(*found.dev)) == (status.st_ino, status.st_dev)
        assert (found.end - found.start, found.deleted) == (8192, False)
        file.unlink()
        (found,) = [mapping for mapping in procfs.maps(child.pid) if mapping.path == str(file)]
        assert found.deleted


def test_namespaces_are_told_by_their_inodes():
    """A child with a network of its own differs in that and in nothing else."""
    ours = procfs.namespaces(os.getpid())
    assert ours["net"] == Path("/proc/self/ns/net").stat().st_ino
    with running("import ctypes; assert ctypes.CDLL(None).unshare(0x40000000) == 0") as child:
        theirs = procfs.namespaces(child.pid)
    assert {name for name in ours if ours[name] != theirs[name]} == {"net"}


# a process that is held ---------------------------------------------------------------------------------


def test_a_held_process_lives_gets_signals_and_ends():
    """Its pidfd tells its end before it is reaped, and signals go to nobody else afterwards."""
    child = subprocess.Popen(["sleep", "600"])
    with Process.open(child.pid) as process:
        assert process.key == procfs.read_stat(child.pid).key
        assert (process.pid, process.alive()) == (child.pid, True)
        process.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not process.alive()
        process.send_signal(0)
        child.wait()
        assert not process.alive()
        with pytest.raises(ProcessLookupError):
            process.send_signal(signal.SIGKILL)


def test_a_stopped_process_lives():
    """Stopped is not ended."""
    with running("") as child, Process.open(child.pid) as process:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        assert process.alive()
        assert procfs.read_stat(child.pid).state == "T"


def test_a_thread_is_no_process():
    """The id of a thread that leads no process is refused, though /proc answers for it."""
    code = "import threading; threading.Thread(target=signal.pause, daemon=True).start()"
    with running(code) as child:
        tid = procfs.threads(child.pid)[1]
        assert procfs.read_stat(tid).pid == tid
        with pytest.raises(ProcessLookupError):
            Process.open(tid)


def test_a_closed_process_says_so_and_leaks_nothing():
    """Closing twice is fine, use after it is an error, and the descriptor is gone."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    process = Process.open(os.getpid())
    process.close()
    process.close()
    with pytest.raises(ValueError, match="closed"):
        process.alive()
    with zombie() as pid, pytest.raises(ProcessLookupError):
        Process.open(pid)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


# clocks and the machine ---------------------------------------------------------------------------------


def test_a_start_time_is_the_time_of_the_start():
    """It lies between the times before and after the start, to one clock tick."""
    before = time.time()
    with running("") as child:
        after = time.time()
        started = procfs.start_time(procfs.read_stat(child.pid).start_ticks)
    assert before - 0.05 <= started <= after + 0.05


def test_the_machine_names_its_boot_and_its_memory():
    """The boot id is a UUID, and there is memory, less than there is in all."""
    assert re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", procfs.boot_id())
    assert 0 < procfs.mem_available_bytes() <= os.sysconf("SC_PHYS_PAGES") * procfs.PAGE_SIZE
