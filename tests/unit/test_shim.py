"""The shim, driven with real programs in CRIU's place: what it notes, whom it ends, what it leaves."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hibernode import restored, shim
from hibernode.host import procfs
from hibernode.host.safefs import Dir
from hibernode.shim_marker import CONTENT

NOBODY = 65534
DEADLINE = 60.0
HEADER = f"""#!{sys.executable} -IS
import os, signal, sys, time
WORK = os.environ["WORK"]
def note(name, text=""):
    with open(f"{{WORK}}/{{name}}.tmp", "w") as file:
        file.write(str(text))
    os.rename(f"{{WORK}}/{{name}}.tmp", f"{{WORK}}/{{name}}")
"""
WORKER = """
ready = os.pipe()
child = os.fork()
if child == 0:
    os.setsid()
    {setup}
    os.write(ready[1], b"x")
    {body}
    os._exit(0)
os.read(ready[0], 1)
note("pidfile", child)
{after}
"""
SLEEPS = "while True: signal.pause()"


def worker(setup: str = "pass", body: str = SLEEPS, after: str = "pass") -> str:
    """Write a CRIU that leaves one worker behind, with its pid in the pid file."""
    return WORKER.format(setup=setup, body=body, after=after)


class Restore:
    """One restore's directory and the shim that runs in it."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "restore"
        self.path.mkdir(mode=0o700)
        self.open_to_all = directory / "open"
        self.open_to_all.mkdir()
        self.open_to_all.chmod(0o1777)
        self.closed = directory / "closed"
        self.closed.mkdir(mode=0o755)
        self.criu = directory / "criu"
        self.spec: dict[str, Any] = {
            "criu": [str(self.criu)],
            "env": {"WORK": str(self.path)},
            "pidfile": str(self.path / "pidfile"),
            "deadline_seconds": DEADLINE,
            "inherit": [],
            "connections": [],
            "marker": None,
            "read_ahead": [],
        }

    def run(self, script: str, **spec: Any) -> dict[str, Any]:
        """Start the shim on a CRIU; returns its answer."""
        self.criu.write_text(HEADER + script)
        self.criu.chmod(0o755)
        (self.path / "spec.json").write_text(json.dumps({**self.spec, **spec}))
        with self.start() as process:
            assert process.stdout is not None
            line = process.stdout.readline()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def start(self) -> subprocess.Popen[bytes]:
        """Start the shim as the agent does."""
        return subprocess.Popen(
            [sys.executable, "-I", "-S", shim.__file__, str(self.path)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )

    def state(self) -> dict[str, Any]:
        """Read state.json."""
        read: dict[str, Any] = json.loads((self.path / "state.json").read_text())
        return read

    def lives(self) -> bool:
        """Whether the shim holds its lock."""
        with Dir.open(self.path) as directory:
            return restored.locked(directory)

    def end(self) -> dict[str, Any]:
        """Wait until the shim has ended; its last state."""
        wait_for(lambda: not self.lives())
        return self.state()

    def marker(self, path: Path) -> dict[str, Any]:
        """Ask for a marker that an unprivileged worker would write."""
        return {"path": str(path), "uid": NOBODY, "gid": NOBODY, "groups": [], "capabilities": 0}


def wait_for(condition: Callable[[], bool]) -> None:
    """Poll until ``condition`` holds."""
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def is_gone(pid: int) -> bool:
    """Whether a process has ended and is reaped."""
    try:
        procfs.read_stat(pid)
    except ProcessLookupError:
        return True
    return False


@pytest.fixture
def restore() -> Iterator[Restore]:
    """Make a restore in a directory that every user can reach; nothing of it is left running."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o755)
    made = Restore(path)
    try:
        yield made
    finally:
        for pid in left_of(made):  # the shim ends with the last of them
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not made.lives())
        shutil.rmtree(path)


def test_a_restored_worker_is_watched_until_it_ends(restore: Restore) -> None:
    """The answer and state.json name the running worker; the shim lives as long as it does."""
    answer = restore.run(worker())
    assert answer == restore.state()
    assert answer["phase"] == "running"
    assert answer["criu_seconds"] > 0
    stat = procfs.read_stat(answer["pid"])
    assert (stat.start_ticks, stat.ppid) == (answer["start_ticks"], answer["shim_pid"])
    assert restore.lives()
    os.kill(answer["pid"], signal.SIGKILL)
    end = restore.end()
    assert (end["phase"], end["pid"], end["start_ticks"]) == ("exited", answer["pid"], answer["start_ticks"])
    assert end["exit_signal"] == signal.SIGKILL
    assert "exit_code" not in end
    assert is_gone(answer["pid"])


GO = "open(f'{WORK}/go', 'rb', 0).read(1)"


@pytest.mark.parametrize(
    ("body", "end"),
    [
        pytest.param(f"{GO}; os._exit(0)", {"exit_code": 0}, id="exit code 0"),
        pytest.param(f"{GO}; os._exit(3)", {"exit_code": 3}, id="exit code 3"),
        pytest.param(f"{GO}; os.kill(os.getpid(), 10)", {"exit_signal": 10}, id="signal 10"),
        pytest.param(
            f"grandchild = os.fork()\n    if not grandchild: {GO}; os._exit(9)\n    {GO}; os._exit(4)",
            {"exit_code": 4},
            id="exit code 4, with a child that ends by another",
        ),
    ],
)
def test_how_the_worker_ends_is_noted(restore: Restore, body: str, end: dict[str, int]) -> None:
    """The exit code or the signal of the worker itself is written down."""
    os.mkfifo(restore.path / "go")
    assert restore.run(worker(body=body))["phase"] == "running"
    # Held open: one of two readers may come when the other has its byte already.
    with (restore.path / "go").open("r+b", 0) as go:
        go.write(b"xx")
        state = restore.end()
    assert state["phase"] == "exited"
    assert {name: state[name] for name in ("exit_code", "exit_signal") if name in state} == end


def test_a_worker_that_ended_at_once_is_no_failure(restore: Restore) -> None:
    """A worker that has ended when CRIU does was restored; the answer has its exit code."""
    after = "os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)"
    answer = restore.run(worker(body="os._exit(6)", after=after))
    assert (answer["phase"], answer["exit_code"]) == ("exited", 6)
    assert restore.end() == answer


def test_a_signal_to_the_shim_reaches_the_worker(restore: Restore) -> None:
    """SIGTERM is handed on, and the worker may end as it likes."""
    answer = restore.run(worker(setup="signal.signal(15, lambda *_: os._exit(7))"))
    os.kill(answer["shim_pid"], signal.SIGTERM)
    assert restore.end()["exit_code"] == 7


@pytest.mark.parametrize(
    ("script", "code", "said"),
    [
        pytest.param("sys.exit(1)", 1, "", id="CRIU fails"),
        pytest.param("os.kill(os.getpid(), 11)", -11, "", id="CRIU crashes"),
        pytest.param("pass", None, "FileNotFoundError", id="CRIU writes no pid file"),
        pytest.param("note('pidfile', 'x')", None, "ValueError", id="CRIU writes a pid that is none"),
        pytest.param("note('pidfile', 1)", None, "not our child", id="CRIU names a process that is not its"),
        pytest.param("note('pidfile', 1 << 22)", None, "FileNotFoundError", id="CRIU names nobody"),
        pytest.param(worker(after="sys.exit(2)"), 2, "", id="CRIU fails and leaves half a tree"),
        pytest.param(
            worker(after="note('half', child); note('pidfile', 1)"),
            None,
            "not our child",
            id="CRIU leaves a tree and names another process",
        ),
        pytest.param(
            worker(setup="[signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15)]; os.fork() or os.fork()")
            + "sys.exit(2)",
            2,
            "",
            id="CRIU leaves several that ignore signals",
        ),
    ],
)
def test_a_failed_restore_leaves_nothing(restore: Restore, script: str, code: int | None, said: str) -> None:
    """A restore that fails says how, and whatever CRIU has left is ended before the answer."""
    answer = restore.run(script)
    assert answer == restore.end()
    assert (answer["phase"], answer["returncode"], answer["timed_out"]) == ("failed", code, False)
    assert said in answer["error"]
    assert bool(said) == bool(answer["error"])
    assert {"pid", "start_ticks", "exit_code"}.isdisjoint(answer)
    name = "half" if (restore.path / "half").exists() else "pidfile"
    if "os.fork()" in script:
        assert is_gone(int((restore.path / name).read_text()))
    assert left_of(restore) == []


def left_of(restore: Restore) -> list[int]:
    """List the processes that carry this restore's directory in their environment."""
    left = []
    for pid in procfs.all_stats():
        with contextlib.suppress(OSError):
            if procfs.environ(pid).get("WORK") == str(restore.path):
                left.append(pid)
    return left


def test_a_criu_that_cannot_start_is_a_failure(restore: Restore) -> None:
    """A CRIU that is not there is said in the answer."""
    answer = restore.run("", criu=["/no/such/criu"])
    assert (answer["phase"], answer["returncode"]) == ("failed", None)
    assert "/no/such/criu" in answer["error"]


@pytest.mark.parametrize(
    "before",
    [
        pytest.param("pass", id="that ends on SIGTERM"),
        pytest.param("signal.signal(15, signal.SIG_IGN)", id="that ignores SIGTERM"),
    ],
)
def test_a_criu_past_its_deadline_is_ended(restore: Restore, before: str) -> None:
    """A CRIU that hangs is ended, by SIGKILL if need be, with the tree that it has begun."""
    script = before + "\n" + worker(after=SLEEPS)
    answer = restore.run(script, deadline_seconds=1.0)
    assert (answer["phase"], answer["timed_out"]) == ("failed", True)
    assert answer["returncode"] in (-signal.SIGTERM, -signal.SIGKILL)
    assert answer["returncode"] == (-15 if before == "pass" else -9)
    assert restore.end() == answer
    assert left_of(restore) == []


def test_a_shim_whose_restore_was_undone_does_not_begin(restore):
    """It was started, and given up before it held its lock: CRIU is not run any more."""
    (restore.path / restored.UNDONE).touch()
    restore.criu.write_text(HEADER + 'note("ran")')
    restore.criu.chmod(0o755)
    (restore.path / "spec.json").write_text(json.dumps(restore.spec))
    with restore.start() as process:
        assert process.stdout is not None
        assert process.stdout.read() == b""
    wait_for(lambda: not restore.lives())
    assert not (restore.path / "ran").exists()
    assert not (restore.path / "state.json").exists()


def test_two_shims_do_not_share_a_directory(restore: Restore) -> None:
    """A second shim in the directory ends at once, without an answer and without touching the state."""
    answer = restore.run(worker())
    with restore.start() as second:
        assert second.communicate()[0] == b""
    assert restore.state() == answer
    os.kill(answer["pid"], signal.SIGKILL)
    restore.end()


# a worker whose GPU state must come back ------------------------------------------------------------------


class Asleep:
    """A shim whose tree is there and that waits for word."""

    def __init__(self, restore: Restore, script: str, **spec: Any) -> None:
        restore.criu.write_text(HEADER + script)
        restore.criu.chmod(0o755)
        (restore.path / "spec.json").write_text(json.dumps({**restore.spec, "wake": True, **spec}))
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", shim.__file__, str(restore.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            cwd="/",
        )
        self.said = self.answer()

    def answer(self) -> dict[str, Any]:
        """Read a line."""
        assert self.process.stdout is not None
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found

    def say(self, word: bytes) -> dict[str, Any]:
        """Say something, let go of the pipe, and give the last answer."""
        with self.process as process:
            assert process.stdin is not None
            process.stdin.write(word)
            process.stdin.close()
            return self.answer()


def test_a_worker_that_is_woken_is_told_so_and_runs(restore: Restore) -> None:
    """Its marker is there only then; until then state.json names no worker that one could take it for."""
    path = restore.open_to_all / "restored"
    asleep = Asleep(
        restore, f"assert not os.path.exists({str(path)!r})" + worker(), marker=restore.marker(path)
    )
    assert asleep.said["phase"] == "waking"
    assert restore.state()["phase"] == "waking"
    assert "pid" not in restore.state()
    assert not path.exists()
    answer = asleep.say(shim.AWAKE)
    assert (answer["phase"], answer["pid"]) == ("running", asleep.said["pid"])
    assert path.exists()
    os.kill(answer["pid"], signal.SIGKILL)
    assert restore.end()["exit_signal"] == signal.SIGKILL


@pytest.mark.parametrize(
    "word", [b"", b"awak", b"no\n"], ids=["the agent is gone", "half a word", "another word"]
)
def test_a_worker_that_is_not_woken_is_ended(restore: Restore, word: bytes) -> None:
    """Nothing half alive is left, and no marker."""
    path = restore.open_to_all / "restored"
    asleep = Asleep(restore, worker(), marker=restore.marker(path))
    answer = asleep.say(word)
    assert answer["phase"] == "failed"
    assert "GPU state" in answer["error"]
    assert restore.end() == answer
    assert left_of(restore) == []
    assert not path.exists()


def test_a_criu_that_fails_is_not_waited_for(restore: Restore) -> None:
    """There is nobody to wake."""
    asleep = Asleep(restore, worker(after="sys.exit(2)"))
    assert (asleep.said["phase"], asleep.said["returncode"]) == ("failed", 2)
    asleep.process.communicate()
    restore.end()


# the marker -----------------------------------------------------------------------------------------------


def test_the_marker_is_there_before_criu_and_is_the_worker_s(restore: Restore) -> None:
    """It has the worker's user and group, and goes when the worker ends, for the next cold start."""
    path = restore.open_to_all / "restored"
    answer = restore.run(f"assert os.path.exists({str(path)!r})" + worker(), marker=restore.marker(path))
    assert answer["phase"] == "running"
    stat = path.stat()
    assert (stat.st_uid, stat.st_gid, stat.st_mode & 0o7777) == (NOBODY, NOBODY, 0o644)
    os.kill(answer["pid"], signal.SIGKILL)
    restore.end()
    assert not path.exists()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("closed/restored", id="a directory that the user cannot write to"),
        pytest.param("restore/restored", id="a directory that the user cannot reach"),
        pytest.param("absent/restored", id="a directory that is not there"),
        pytest.param("open/" + "x" * 300, id="a name that is too long"),
        pytest.param("open/a\0b", id="a name with a NUL"),
        pytest.param("open/a\ud800b", id="a name that has no bytes"),
    ],
)
def test_a_marker_that_the_worker_could_not_write_is_refused(restore: Restore, name: str) -> None:
    """The agent's rights are not lent: the restore fails before CRIU is started, in one process."""
    answer = restore.run("note('started')" + worker(), marker=restore.marker(restore.path.parent / name))
    assert (answer["phase"], answer["returncode"]) == ("failed", None)
    assert "cannot write the restore marker" in answer["error"]
    assert restore.end() == answer
    assert not (restore.path / "started").exists()
    assert list(restore.closed.iterdir()) == list(restore.open_to_all.iterdir()) == []


def test_a_marker_that_is_a_link_leads_nowhere(restore: Restore) -> None:
    """A link in the marker's place is taken for a marker, and what it leads to is not written."""
    (restore.open_to_all / "restored").symlink_to(restore.open_to_all / "target")
    answer = restore.run("sys.exit(1)", marker=restore.marker(restore.open_to_all / "restored"))
    assert answer["phase"] == "failed"
    assert [entry.name for entry in restore.open_to_all.iterdir()] == ["restored"]


def test_the_marker_goes_after_a_failure(restore: Restore) -> None:
    """A failed restore takes its marker away again."""
    path = restore.open_to_all / "restored"
    script = f"sys.exit(5 if os.path.exists({str(path)!r}) else 6)"
    assert restore.run(script, marker=restore.marker(path))["returncode"] == 5
    assert not path.exists()


def test_a_marker_that_was_there_stays_after_a_failure(restore: Restore) -> None:
    """A marker from before the restore is neither changed nor removed."""
    path = restore.open_to_all / "restored"
    path.write_text("older")
    os.chown(path, NOBODY, NOBODY)
    assert restore.run("sys.exit(5)", marker=restore.marker(path))["returncode"] == 5
    assert path.read_text() == "older"


def test_a_marker_that_a_killed_shim_has_left_is_taken_over(restore: Restore) -> None:
    """It goes with this worker: else the next cold start would take itself for a restored copy."""
    path = restore.open_to_all / "restored"
    path.write_bytes(CONTENT)
    os.chown(path, NOBODY, NOBODY)
    answer = restore.run(worker(), marker=restore.marker(path))
    assert answer["phase"] == "running"
    assert path.read_bytes() == CONTENT
    os.kill(answer["pid"], signal.SIGKILL)
    restore.end()
    assert not path.exists()


def test_a_full_disk_leaves_no_empty_marker(restore: Restore) -> None:
    """A worker looks only whether there is one."""
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4k,mode=1777", "full", restore.open_to_all], check=True
    )
    try:
        (restore.open_to_all / "full").write_bytes(b"x" * 4096)
        answer = restore.run(worker(), marker=restore.marker(restore.open_to_all / "restored"))
        assert "cannot write the restore marker" in answer["error"]
        restore.end()
        assert [entry.name for entry in restore.open_to_all.iterdir()] == ["full"]
    finally:
        subprocess.run(["umount", restore.open_to_all], check=True)


CAP_DAC_OVERRIDE = 1 << 1


@pytest.mark.parametrize(("capabilities", "may"), [(0, False), (CAP_DAC_OVERRIDE, True)])
@pytest.mark.parametrize("odd", [False, True], ids=["nothing there", "a link there"])
def test_root_s_marker_is_written_with_the_worker_s_capabilities(
    restore: Restore, capabilities: int, may: bool, odd: bool
) -> None:
    """Root of a container without CAP_DAC_OVERRIDE may not write, or remove, where it is not the owner."""
    os.chown(restore.closed, NOBODY, NOBODY)
    path = restore.closed / "restored"
    if odd:
        path.symlink_to("elsewhere")
    marker = {**restore.marker(path), "uid": 0, "gid": 0, "capabilities": capabilities}
    answer = restore.run(f"sys.exit(5 if os.path.isfile({str(path)!r}) else 6)", marker=marker)
    assert answer["returncode"] == (5 if may else None)
    assert ("cannot write the restore marker" in answer["error"]) is not may
    assert [entry.name for entry in restore.closed.iterdir()] == (["restored"] if odd and not may else [])


@pytest.mark.parametrize("odd", [False, True], ids=["nothing there", "a link there"])
@pytest.mark.parametrize("way", ["root", "cwd", "a link"])
def test_a_marker_behind_a_link_of_proc_is_refused(restore: Restore, way: str, odd: bool) -> None:
    """In a container that sees the node's /proc it would lead out of it; not even root's is written there."""
    target = restore.open_to_all / "restored"
    if odd:
        target.symlink_to("elsewhere")
    link = restore.path.parent / "link"
    link.symlink_to(f"/proc/{os.getpid()}/root{restore.open_to_all}")
    inside = {
        "root": f"/proc/{os.getpid()}/root{target}",
        "cwd": f"/proc/{os.getpid()}/cwd/{os.path.relpath(target)}",
        "a link": f"{link}/restored",
    }[way]
    assert os.path.lexists(inside) is odd
    marker = {**restore.marker(Path()), "path": inside, "uid": 0, "gid": 0, "capabilities": (1 << 41) - 1}
    answer = restore.run("note('started')", marker=marker)
    assert "cannot write the restore marker" in answer["error"]
    assert not (restore.path / "started").exists()
    assert [entry.is_symlink() for entry in restore.open_to_all.iterdir()] == ([True] if odd else [])


@pytest.mark.parametrize("name", ["", ".", ".."])
def test_a_marker_without_a_name_is_refused(restore: Restore, name: str) -> None:
    """A directory is no marker, and nobody's to remove."""
    marker = restore.marker(restore.open_to_all)
    marker["path"] += f"/{name}"
    assert "cannot write the restore marker" in restore.run("pass", marker=marker)["error"]
    assert restore.open_to_all.is_dir()


def test_an_ordinary_link_leads_to_the_marker(restore: Restore) -> None:
    """Such as /var/run to /run."""
    link = restore.path.parent / "link"
    link.symlink_to("open")
    script = f"sys.exit(5 if os.path.exists({str(restore.open_to_all / 'restored')!r}) else 6)"
    assert restore.run(script, marker=restore.marker(link / "restored"))["returncode"] == 5


# what CRIU is given ---------------------------------------------------------------------------------------


def test_criu_is_given_the_descriptors_that_it_inherits(restore: Restore) -> None:
    """A pipe that was read is /dev/null, one that was written to appends to a file of the restore."""
    script = """
note("argv", sys.argv[1:])
note("null", os.readlink("/proc/self/fd/200"))
os.write(201, b"more\\n")
sys.exit(1)
"""
    (restore.path / "stdout").write_text("line\n")
    ends = [{"mode": "read", "key": "pipe:[7]"}, {"mode": "write", "key": "pipe:[8]", "file": "stdout"}]
    restore.run(script, inherit=ends)
    assert (restore.path / "argv").read_text() == str(
        ["--inherit-fd", "fd[200]:pipe:[7]", "--inherit-fd", "fd[201]:pipe:[8]"]
    )
    assert (restore.path / "null").read_text() == "/dev/null"
    assert (restore.path / "stdout").read_text() == "line\nmore\n"


def test_criu_s_output_is_kept(restore: Restore) -> None:
    """What CRIU prints goes to criu.out, and its environment is the one that was asked for."""
    restore.run("os.write(1, b'out '); os.write(2, b'err'); note('env', sorted(os.environ)); sys.exit(1)")
    assert (restore.path / "criu.out").read_bytes() == b"out err"
    assert "WORK" in (restore.path / "env").read_text()
    assert "PATH" not in (restore.path / "env").read_text()


def test_output_of_criu_without_an_end_fills_no_disk(restore: Restore) -> None:
    """Beyond what is kept its writes fail; what came first is there."""
    restore.run(
        "os.write(1, b'begun'); left = 1000000\nwhile left: left -= os.write(1, bytes(left))\nsys.exit(1)"
    )
    kept = (restore.path / "criu.out").read_bytes()
    assert (kept[:5], len(kept)) == (b"begun", shim.OUTPUT_BYTES)


def test_reading_ahead_does_no_harm(restore: Restore) -> None:
    """Images are read ahead where they can be; what is missing or no file is passed over."""
    (restore.path / "pages-1.img").write_bytes(b"x" * 10_000)
    paths = [str(restore.path / "pages-1.img"), "/no/such/file", str(restore.path)]
    answer = restore.run(worker(), read_ahead=paths)
    assert answer["phase"] == "running"
    os.kill(answer["pid"], signal.SIGKILL)
    restore.end()
