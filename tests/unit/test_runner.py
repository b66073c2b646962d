"""CRIU as a subprocess. Stand-ins are real programs: shell scripts and copies of sleep."""

import asyncio
import contextlib
import logging
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hibernode.criu.runner import (
    JOB_ENV,
    OUTPUT_BYTES,
    Criu,
    CriuResult,
    clean_env,
    find_criu,
    kill_leftovers,
    run_criu,
)
from hibernode.errors import CriuError, HibernodeError, NotFoundError, RefusedError
from hibernode.host import procfs
from hibernode.host.procfs import Process
from tests.unit.hostile import open_descriptors

LONG = 60.0
"""No test waits this long unless something is broken."""


def program(path: Path, text: str) -> Path:
    """Write a program."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def script(path: Path, body: str) -> Path:
    """Write a shell script."""
    return program(path, f"#!/bin/sh\n{body}\n")


def gone(pid: int) -> bool:
    """Wait until a process has ended; one that nobody reaps has ended too."""
    deadline = time.monotonic() + LONG
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state in "ZX":
            return True
        time.sleep(0.005)
    return False


@pytest.fixture
def run(tmp_path):
    """Run a shell script as if it were CRIU."""

    async def run_(body: str, *args: str, deadline: float = LONG, **options) -> CriuResult:
        path = script(tmp_path / "criu", body)
        before = open_descriptors()
        result = await run_criu(
            Criu((str(path),), "4.2", str(path)),
            args,
            work_dir=tmp_path,
            deadline=deadline,
            marker="job-1",
            **{"grace": LONG, **options},
        )
        assert open_descriptors() == before
        return result

    return run_


async def test_it_is_in_the_namespaces_that_it_shall_be_in(run):
    """And none of our own threads is, nor goes there when it cannot be started."""
    kinds = ("ipc", "uts")
    before = [os.readlink(f"/proc/self/ns/{kind}") for kind in kinds]
    with subprocess.Popen(
        ["unshare", *(f"--{kind}" for kind in kinds), "cat"], stdin=subprocess.PIPE
    ) as other:
        theirs = [os.readlink(f"/proc/{other.pid}/ns/{kind}") for kind in kinds]
        while theirs[0] == before[0] or theirs[1] == before[1]:
            theirs = [os.readlink(f"/proc/{other.pid}/ns/{kind}") for kind in kinds]
        fds = [os.open(f"/proc/{other.pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in kinds]
        result = await run("readlink /proc/self/ns/ipc /proc/self/ns/uts", namespaces=fds)
        for fd in fds:
            os.close(fd)
        other.communicate()
    assert result.output.split() == theirs
    assert [os.readlink(f"/proc/thread-self/ns/{kind}") for kind in kinds] == before


class Started:
    """Takes the pid that on_start tells, and lets a test wait for it."""

    def __init__(self) -> None:
        self.pid = 0
        self._event = asyncio.Event()

    def __call__(self, pid: int) -> None:
        self.pid = pid
        self._event.set()

    async def wait(self) -> None:
        await self._event.wait()

    def reaped(self) -> bool:
        """Whether the process is not even a zombie."""
        return not os.path.lexists(f"/proc/{self.pid}")


# how it runs ------------------------------------------------------------------------------------------


async def test_the_result_of_a_run(run, tmp_path):
    """Exit code, output of both streams, time and the whole command line come back."""
    result = await run("echo out; echo err >&2; exit 3", "dump", "-x")
    assert (result.returncode, result.timed_out, result.output) == (3, False, "out\nerr\n")
    assert result.argv == (f"{tmp_path}/criu", "dump", "-x", "--work-dir", str(tmp_path))
    assert 0 < result.seconds < LONG


async def test_a_work_dir_that_is_given_is_kept(run):
    """The directory is added only where the arguments name none."""
    result = await run('echo "$@"', "dump", "--work-dir", "/elsewhere")
    assert result.output == "dump --work-dir /elsewhere\n"


async def test_the_environment_is_clean(run, monkeypatch):
    """FC-09: nothing of ours reaches CRIU, least of all LD_PRELOAD and LD_LIBRARY_PATH."""
    for name in ("LD_PRELOAD", "LD_LIBRARY_PATH", "CRIU_CONFIG_FILE", "HOME"):
        monkeypatch.setenv(name, "/nonexistent")
    result = await run("tr '\\0' '\\n' </proc/$$/environ")
    expected = {**clean_env(), JOB_ENV: "job-1"}
    assert sorted(result.output.splitlines()) == sorted(f"{name}={value}" for name, value in expected.items())
    assert set(expected) == {"PATH", "LC_ALL", JOB_ENV}


async def test_the_surroundings_are_fixed(run):
    """It runs in /, with umask 077, in a session of its own, and reads nothing."""
    result = await run("pwd; umask; cut -d' ' -f5,6 /proc/$$/stat; echo $$ $$; cat")
    cwd, umask, ids, pids = result.output.splitlines()
    assert (cwd, umask) == ("/", "0077")
    assert ids == pids


async def test_descriptors_are_handed_on_by_request_only(run, tmp_path):
    """It gets the descriptors that are named, under their numbers, and no other."""
    (tmp_path / "data").write_text("content\n")
    with (tmp_path / "data").open() as file, (tmp_path / "data").open() as other:
        os.set_inheritable(other.fileno(), True)
        result = await run(f"cat /proc/$$/fd/{file.fileno()}; ls /proc/$$/fd", pass_fds=[file.fileno()])
        numbers = {int(word) for word in result.output.split()[1:]}
        assert result.output.startswith("content\n")
        assert file.fileno() in numbers
        assert other.fileno() not in numbers


async def test_a_signal_is_a_negative_code(run):
    """A CRIU that crashes says by which signal."""
    assert (await run("kill -SEGV $$")).returncode == -signal.SIGSEGV


async def test_the_pid_is_told_while_it_runs(run):
    """The caller learns the pid before the end."""
    pids: list[int] = []
    result = await run("echo $$", on_start=pids.append)
    assert result.output == f"{pids[0]}\n"


async def test_a_program_that_cannot_be_started_is_an_error(tmp_path):
    """A CRIU that has vanished since it was found is said, and nothing is left open."""
    before = open_descriptors()
    with pytest.raises(CriuError, match="/no/such"):
        await run_criu(Criu(("/no/such",), "4.2", ""), [], work_dir=tmp_path, deadline=1, marker="m")
    assert open_descriptors() == before


# output -----------------------------------------------------------------------------------------------


async def test_of_100_mb_the_end_is_kept(run):
    """Output without bounds costs no memory and does not stop CRIU."""
    result = await run("head -c 100000000 /dev/zero | tr '\\0' x; echo the end")
    assert result.returncode == 0
    assert len(result.output) == OUTPUT_BYTES
    assert result.output.endswith("xxxthe end\n")


async def test_a_child_that_keeps_the_pipe_is_not_waited_for(run):
    """CRIU's end is its own end, whoever still holds its output."""
    result = await run("sleep 1000 & echo $!")
    os.kill(int(result.output), signal.SIGKILL)
    assert result.returncode == 0


async def test_a_child_that_writes_for_ever_is_not_waited_for(run):
    """What is still read after CRIU's end has a bound."""
    result = await run("yes & echo $$")
    assert result.returncode == 0
    assert len(result.output) <= OUTPUT_BYTES


# ends -------------------------------------------------------------------------------------------------

STUBBORN = "trap '' TERM; sleep 1000 & echo $!; while :; do sleep 1000; done"


async def test_at_the_deadline_it_is_asked_to_end(run):
    """A CRIU that obeys SIGTERM is not killed."""
    result = await run("trap 'echo asked; exit 7' TERM; sleep 1000 & wait", deadline=0.3)
    assert (result.returncode, result.timed_out, result.output) == (7, True, "asked\n")


async def test_one_that_ignores_sigterm_is_killed_with_its_group(run):
    """FC-06: after the grace SIGKILL ends it and its helpers; nothing of the group is left."""
    result = await run(STUBBORN, deadline=0.3, grace=0.3)
    assert (result.returncode, result.timed_out) == (-signal.SIGKILL, True)
    assert gone(int(result.output))


async def test_a_helper_does_not_outlive_the_deadline(run):
    """CRIU obeys SIGTERM, its helper does not: both are gone."""
    result = await run(
        "(trap '' TERM; while :; do sleep 1000; done) & echo $!; wait", deadline=0.3, grace=0.3
    )
    assert (result.returncode, result.timed_out) == (-signal.SIGTERM, True)
    assert gone(int(result.output))


async def test_one_that_is_done_is_not_late(run):
    """The deadline means nothing to a CRIU that has ended."""
    result = await run("exit 0", deadline=LONG)
    assert (result.returncode, result.timed_out) == (0, False)


@pytest.mark.parametrize("cancellations", [1, 2, 5])
async def test_cancelled_it_is_ended_and_reaped(run, cancellations):
    """A cancelled caller leaves no CRIU behind, however often it is cancelled."""
    started = Started()
    task = asyncio.create_task(run(STUBBORN, grace=0.3, on_start=started))
    await started.wait()
    for _ in range(cancellations):
        task.cancel()
        await asyncio.sleep(0.01)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert started.reaped()


def test_a_loop_that_goes_down_leaves_no_criu(run):
    """Also when the whole event loop is taken down, CRIU is killed and reaped."""
    started = Started()

    async def main() -> None:
        task = asyncio.create_task(run(STUBBORN, on_start=started))
        await started.wait()
        task.cancel()
        await asyncio.sleep(0.01)  # it is in its grace now

    asyncio.run(main())
    assert gone(started.pid)


async def test_a_callback_that_fails_ends_it(run):
    """An error in on_start does not leave CRIU running."""
    started = Started()

    def fail(pid: int) -> None:
        started(pid)
        raise LookupError("no")

    with pytest.raises(LookupError):
        await run("exec sleep 1000", on_start=fail)
    assert started.reaped()


async def test_a_failure_is_logged_once_ready_to_paste(run, caplog):
    """The log holds the command as a shell takes it; a success is not logged."""
    with caplog.at_level(logging.INFO, "hibernode.criu"):
        assert (await run("exit 0")).returncode == 0
        assert caplog.records == []
        result = await run("exit 4", "dump", "a b", "it's")
    (record,) = caplog.records
    text = record.getMessage()
    assert text.startswith("criu failed (exit code 4) after ")
    assert tuple(shlex.split(text.split(" s: ", 1)[1])) == result.argv


# which CRIU -------------------------------------------------------------------------------------------


def fake(path: Path, version: str = "4.2.1") -> Path:
    return script(path, f"echo Version: {version}; echo GitID: x")


def give_away(path: Path) -> None:
    os.chown(path, 1000, 0)


def link_a_library_away(tree: Path) -> None:
    """Put a library into a directory that all can write, and a link to it into the tree."""
    library = program(tree.parent / "open/libx.so.1", "")
    library.parent.chmod(0o777)
    (tree / "usr/lib/x86_64-linux-gnu/libx.so").symlink_to(library)


def group_writable(path: Path) -> None:
    os.chown(path, 0, 1000)
    path.chmod(0o775)


@pytest.fixture
def private_tree(tmp_path):
    """Make a private tree as scripts/install-criu.sh does; its loader is a script."""

    def make(name: str = "tree") -> Path:
        tree = Path(tmp_path, name)
        fake(tree / "usr/lib64/ld-linux-x86-64.so.2")
        program(tree / "usr/sbin/criu", "not run by itself")
        (tree / "usr/lib/x86_64-linux-gnu").mkdir(parents=True)
        (tree / "usr/lib/x86_64-linux-gnu/libnet.so.9").touch()
        (tree / "usr/lib/x86_64-linux-gnu/libnet.so").symlink_to("libnet.so.9")
        words = [f"{tree}/usr/lib64/ld-linux-x86-64.so.2"]
        words += [f"{tree}/usr/lib/x86_64-linux-gnu:{tree}/lib/x86_64-linux-gnu", f"{tree}/usr/sbin/criu"]
        loader, libraries, criu = ("'" + word.replace("'", "'\\''") + "'" for word in words)
        program(tree / "bin/criu", f'#!/bin/sh\nexec {loader} --library-path {libraries} {criu} "$@"\n')
        return tree

    return make


@pytest.mark.parametrize("name", ["tree", "a tree", "it's"])
def test_the_wrapper_of_a_private_tree_is_opened_up(private_tree, name):
    """No shell stands between us and CRIU: the loader is started directly."""
    tree = private_tree(name)
    criu = find_criu(str(tree / "bin/criu"))
    assert criu.argv == (
        f"{tree}/usr/lib64/ld-linux-x86-64.so.2",
        "--library-path",
        f"{tree}/usr/lib/x86_64-linux-gnu:{tree}/lib/x86_64-linux-gnu",
        f"{tree}/usr/sbin/criu",
    )
    assert (criu.version, criu.path) == ("4.2.1", str(tree / "bin/criu"))


@pytest.mark.parametrize(
    "text",
    [
        pytest.param('#!/bin/sh\nexec /l --library-path /x /c "$@"; reboot\n', id="another command"),
        pytest.param('#!/bin/sh\nexec /l --library-path /x /c $(id) "$@"\n', id="a substitution"),
        pytest.param('#!/bin/sh\nLD_PRELOAD=/x exec /l --library-path /x /c "$@"\n', id="a variable"),
        pytest.param('#!/bin/sh\nexec /l --library-path /x /c "$@"\n\n', id="more lines"),
        pytest.param('#!/bin/bash\nexec /l --library-path /x /c "$@"\n', id="another shell"),
        pytest.param('#!/bin/sh\nexec /l --library-path "/x" /c "$@"\n', id="double quotes"),
    ],
)
def test_any_other_script_is_not_opened_up(tmp_path, text):
    """A script is read as a wrapper only if it is exactly one; else it is a program like others."""
    path = program(
        tmp_path / "criu", text.replace("\n", "\n[ $1 = --version ] && echo Version: 4.2 && exit\n", 1)
    )
    assert find_criu(str(path)).argv == (str(path),)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        pytest.param("ld.so --library-path /lib /bin/criu", "relative", id="a loader by name"),
        pytest.param("/bin/sh --library-path /lib:. /bin/criu", "relative", id="the current directory"),
        pytest.param("/bin/sh --library-path /lib: /bin/criu", "relative", id="an empty directory"),
        pytest.param("/no/such/ld.so --library-path /lib /bin/sh", "absent", id="no loader"),
    ],
)
def test_a_wrapper_with_odd_paths_is_refused(tmp_path, words, why):
    """The three words of a wrapper must be absolute and there."""
    path = program(tmp_path / "criu", f'#!/bin/sh\nexec {words} "$@"\n')
    with pytest.raises(RefusedError, match=why):
        find_criu(str(path))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        pytest.param(lambda tree: give_away(tree / "bin/criu"), "uid 1000", id="the wrapper's owner"),
        pytest.param(
            lambda tree: (tree / "bin/criu").chmod(0o777), "written", id="a wrapper for all to write"
        ),
        pytest.param(lambda tree: (tree / "bin").chmod(0o777), "written", id="its directory"),
        pytest.param(lambda tree: tree.chmod(0o777), "written", id="a directory above"),
        pytest.param(lambda tree: group_writable(tree / "usr"), "written", id="a group"),
        pytest.param(lambda tree: give_away(tree / "usr/sbin/criu"), "uid 1000", id="the program"),
        pytest.param(lambda tree: give_away(tree / "usr/lib64"), "uid 1000", id="the loader's directory"),
        pytest.param(
            lambda tree: (tree / "usr/lib/x86_64-linux-gnu/libnet.so.9").chmod(0o666),
            "written",
            id="a library",
        ),
        pytest.param(link_a_library_away, "written", id="where a library's link leads"),
    ],
)
def test_what_others_could_change_is_refused(private_tree, change, why):
    """CRIU runs as root, so program, loader, libraries and their directories must be root's alone."""
    tree = private_tree()
    change(tree)
    with pytest.raises(RefusedError, match=why) as caught:
        find_criu(str(tree / "bin/criu"))
    assert caught.value.reason == "CriuUntrusted"
    assert "make setup" in caught.value.remedy


def test_a_link_is_followed_before_it_is_judged(tmp_path):
    """What a link leads to counts, and is what is run."""
    real = fake(tmp_path / "real/criu")
    (tmp_path / "link").symlink_to(real)
    assert find_criu(str(tmp_path / "link")).argv == (str(real),)
    real.chmod(0o757)
    with pytest.raises(RefusedError):
        find_criu(str(tmp_path / "link"))


@pytest.mark.parametrize(
    ("version", "good"),
    [
        ("3.17.1", False),
        ("4.1.1", False),
        ("4", False),
        ("4.2", True),
        ("4.2.1", True),
        ("4.10", True),
        ("5.0", True),
    ],
)
def test_the_version_must_be_new_enough(tmp_path, version, good):
    """Before 4.2 CRIU fails on every socket on today's kernels; versions compare as numbers."""
    path = fake(tmp_path / "criu", version)
    if good:
        assert find_criu(str(path)).version == version
    else:
        with pytest.raises(RefusedError, match=r"at least 4\.2") as caught:
            find_criu(str(path))
        assert caught.value.reason == "CriuTooOld"


@pytest.mark.parametrize(
    ("body", "why"),
    [
        pytest.param("exit 0", "nothing", id="says nothing"),
        pytest.param("echo Version: 4.2; exit 1", "exit code 1", id="fails"),
        pytest.param("echo hello", "hello", id="is no CRIU"),
        pytest.param("sleep 1000 & echo Version: x", "Version: x", id="leaves a child behind"),
    ],
)
def test_a_program_that_tells_no_version_is_refused(tmp_path, body, why):
    """What it did say is in the message."""
    path = script(tmp_path / "criu", f"echo $$ >{tmp_path}/pid; {body}")
    with pytest.raises(RefusedError, match=why):
        find_criu(str(path))
    with contextlib.suppress(ProcessLookupError):
        os.killpg(int((tmp_path / "pid").read_text()), signal.SIGKILL)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        pytest.param(lambda path: None, NotFoundError, id="absent"),
        pytest.param(lambda path: path.mkdir(), RefusedError, id="a directory"),
        pytest.param(lambda path: path.touch(), RefusedError, id="not executable"),
        pytest.param(lambda path: path.symlink_to(path), NotFoundError, id="a link to itself"),
        pytest.param(os.mkfifo, RefusedError, id="a FIFO"),
        pytest.param(lambda path: program(path, "\x7fELF"), RefusedError, id="a program that does not start"),
    ],
)
def test_a_setting_that_names_no_program(tmp_path, make, error):
    """The setting is the only choice where it is given, and it is said what is wrong with it."""
    make(tmp_path / "criu")
    with pytest.raises(error, match=str(tmp_path / "criu")) as caught:
        find_criu(str(tmp_path / "criu"))
    assert "make setup" in caught.value.remedy


def test_a_relative_setting_is_refused():
    """A path that depends on where the agent was started is none."""
    with pytest.raises(RefusedError, match="absolute"):
        find_criu("bin/criu")


def test_the_version_is_asked_again_only_after_a_change(tmp_path):
    """Starting CRIU for its version costs more than a restore may; a new file is a new question."""
    path = script(tmp_path / "criu", f"echo x >>{tmp_path}/calls; echo Version: 4.2")
    assert [find_criu(str(path)).version for _ in range(3)] == ["4.2"] * 3
    assert (tmp_path / "calls").read_text() == "x\n"
    fake(path, "4.3")
    assert find_criu(str(path)).version == "4.3"


@pytest.mark.parametrize(
    ("prefix", "search", "system", "found"),
    [
        pytest.param("4.2", "4.3", "4.4", "4.2", id="our own first"),
        pytest.param("", "4.3", "4.4", "4.3", id="then PATH"),
        pytest.param("", "", "4.4", "4.4", id="then the system's tree"),
        pytest.param("", "3.17.1", "4.4", "4.4", id="one that is too old is passed over"),
        pytest.param("4.1", "3.17.1", "", "CriuTooOld", id="all too old"),
        pytest.param("", "", "", "CriuMissing", id="none"),
    ],
)
def test_where_criu_is_looked_for(tmp_path, prefix, search, system, found):
    """The first usable one wins; if none is usable, the first one's fault is said."""
    places = {"prefix/libexec/criu/bin": prefix, "search": search, "system/bin": system}
    for place, version in places.items():
        if version:
            fake(tmp_path / place / "criu", version)
    try:
        criu = find_criu(
            prefix=tmp_path / "prefix", search=str(tmp_path / "search"), system=tmp_path / "system"
        )
        result = criu.version
    except HibernodeError as error:
        result = error.reason
    assert result == found


def test_above_our_own_prefix_nothing_is_checked(tmp_path):
    """Whoever owns what lies above the running Python owns us already; a checkout may be a user's."""
    fake(tmp_path / "home/prefix/libexec/criu/bin/criu")
    os.chown(tmp_path / "home", 1000, 1000)
    assert find_criu(prefix=tmp_path / "home/prefix", search="", system=tmp_path).version == "4.2.1"
    with pytest.raises(RefusedError):
        find_criu(str(tmp_path / "home/prefix/libexec/criu/bin/criu"))


# leftovers --------------------------------------------------------------------------------------------


@pytest.fixture
def sleeper(tmp_path):
    """Start copies of sleep under other names, with a marker in their environment."""
    running: list[subprocess.Popen[bytes]] = []

    def start(name: str, marker: str) -> subprocess.Popen[bytes]:
        path = tmp_path / name
        if not path.exists():
            shutil.copy("/bin/sleep", path)
        process = subprocess.Popen([path, "1000"], env={JOB_ENV: marker, "LC_ALL": "C"})
        running.append(process)
        return process

    yield start
    for process in running:
        process.kill()
        process.wait()


def test_leftovers_are_killed_and_nobody_else(sleeper, tmp_path):
    """Only CRIU, or the loader it runs through, with exactly this marker; deleted programs too."""
    ours = [sleeper("criu", "job-7"), sleeper("ld-linux-x86-64.so.2", "job-7"), sleeper("criu", "job-7")]
    others = [sleeper("criu", "job-70"), sleeper("worker", "job-7"), sleeper("criu", "")]
    (tmp_path / "criu").unlink()
    assert sorted(kill_leftovers("job-7")) == sorted(process.pid for process in ours)
    assert [process.wait() for process in ours] == [-signal.SIGKILL] * 3
    assert [process.poll() for process in others] == [None] * 3


def test_without_leftovers_nothing_is_killed(sleeper):
    """A second call finds nothing, also while the dead are not reaped yet."""
    process = sleeper("criu", "job-8")
    assert kill_leftovers("job-8") == [process.pid]
    assert kill_leftovers("job-8") == []


async def test_what_run_criu_starts_is_found_by_its_marker(tmp_path):
    """What an agent that died has left running carries the marker that it was given."""
    shutil.copy("/bin/sh", tmp_path / "criu")
    criu = Criu((str(tmp_path / "criu"), "-c", "kill -STOP $$"), "4.2", "")
    started = Started()
    task = asyncio.create_task(
        run_criu(criu, [], work_dir=tmp_path, deadline=LONG, marker="job-9", on_start=started)
    )
    await started.wait()
    while procfs.read_stat(started.pid).state != "T":  # in its first moments it has no environment yet
        await asyncio.sleep(0.01)
    assert await asyncio.to_thread(kill_leftovers, "job-9") == [started.pid]
    assert (await task).returncode == -signal.SIGKILL


async def test_a_criu_whose_tree_has_ended_is_killed(tmp_path, monkeypatch):
    """It may wait for a word of the dead for ever; the deadline of the whole dump is an hour."""
    monkeypatch.setattr("hibernode.criu.runner.GRACE_SECONDS", 0.05)
    with subprocess.Popen(["sleep", "1000"]) as tree, Process.open(tree.pid) as process:
        criu = Criu(("/bin/sh", "-c", "exec sleep 1000"), "4.2.1", "/bin/sh")
        work = run_criu(criu, [], work_dir=tmp_path, deadline=30, marker="m", tree=process)
        running = asyncio.ensure_future(work)
        await asyncio.sleep(0)
        tree.kill()
        result = await running
        assert (result.returncode, result.timed_out) == (-signal.SIGKILL, False)


THREADED = (
    "import threading, time; threading.Thread(target=time.sleep, args=(1000,)).start(); print(1, flush=True)"
)
TRACER = """
import ctypes, os, sys, time
pid = int(sys.argv[1])
for tid in map(int, os.listdir(f"/proc/{pid}/task")):
    assert ctypes.CDLL(None, use_errno=True).ptrace(0x4206, tid, None, None) == 0  # PTRACE_SEIZE
open(sys.argv[2], "w").close()
os.waitpid(pid, 0x40000000)  # __WALL
"""


@pytest.mark.parametrize("below", [False, True], ids=["the first process", "one below it"])
async def test_a_criu_that_waits_for_a_killed_process_with_threads_is_killed(tmp_path, monkeypatch, below):
    """A pod that is deleted, or a rank out of memory, in mid-dump: nobody is told while it is traced."""
    monkeypatch.setattr("hibernode.criu.runner.GRACE_SECONDS", 0.2)
    (tmp_path / "tracer").write_text(TRACER)
    wrapped = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {THREADED!r}])"
    code = wrapped if below else THREADED
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as tree:
        assert tree.stdout
        assert tree.stdout.readline()
        victim = procfs.tree(tree.pid)[-1].pid
        assert (victim == tree.pid) != below
        with Process.open(tree.pid) as process:
            argv = (sys.executable, str(tmp_path / "tracer"), str(victim), str(tmp_path / "traced"))
            work = run_criu(
                Criu(argv, "4.2.1", sys.executable),
                [],
                work_dir=tmp_path,
                deadline=60,
                marker="m",
                tree=process,
            )
            running = asyncio.ensure_future(work)
            while not (tmp_path / "traced").exists():
                await asyncio.sleep(0.01)
            os.kill(victim, signal.SIGKILL)
            result = await running
            assert (result.returncode, result.timed_out) == (-signal.SIGKILL, False)
        tree.wait(timeout=60)
