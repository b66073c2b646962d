"""How CRIU gets into a container: a real process with namespaces of its own, entered as by the shim."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from hibernode import shim, shim_container, shim_enter
from hibernode.container import mountplan
from hibernode.host import linux, procfs
from hibernode.host.procfs import Process
from hibernode.shim_container import Container, ContainerGoneError
from tests.unit import rootfs_kit as kit
from tests.unit.box_kit import KINDS, SLEEPS, box

SHIM = """
import json, os, sys
from hibernode.shim_container import Container
spec, directory, argv = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3:]
asks = spec.pop("asks", False)
container = Container(spec, directory)
container.prepare()
with container.pids():
    child = os.fork()
    if child == 0:
        try:
            more = container.enter()
            os.chdir("/")
            os.execv(argv[0], [*argv, *more])
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(127)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
if asks:
    try:
        container.check_mounts(code)
    except Exception as error:
        os.write(2, str(error).encode())
sys.exit(code)
"""
"""What the shim does around CRIU; ``argv`` stands in CRIU's place."""

SETUP = """
echo root >etc-of-box
mkdir data/dir data/hostile; touch data/file; echo bound >other
mount -t tmpfs dir data/dir; echo dir >data/dir/name
mount --bind other data/file
mkdir data/dir/below; mount -t tmpfs below data/dir/below; echo below >data/dir/below/name
ln -s dir data/link; ln -s / data/out
"""
ALL = KINDS | linux.CLONE_NEWNET | linux.CLONE_NEWUTS | linux.CLONE_NEWIPC


class Place:
    """A box, and the spec that the shim gets of it."""

    def __init__(self, pid: int, directory: Path) -> None:
        self.pid = pid
        self.directory = directory
        self.joined = directory / "cgroup.procs"
        self.joined.touch()
        with Process.open(pid) as process:
            plan = mountplan.look(pid)
            self.spec: dict[str, Any] = {
                "pid": pid,
                "start_ticks": process.key.start_ticks,
                "depth": 1,
                "join": [str(self.joined)],
                "root_id": plan.root.id,
                "mounts": [
                    {"mount_point": place.mount_point, "id": place.id, "directory": place.directory}
                    for place in plan.external
                ],
            }

    def run(self, *argv: str, **changes: Any) -> subprocess.CompletedProcess[str]:
        """Run a program where CRIU would run."""
        spec = json.dumps({**self.spec, **changes})
        command = [sys.executable, "-c", SHIM, spec, str(self.directory), *argv]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)

    def sh(self, script: str) -> str:
        """Run a script of the node's shell there, which must succeed."""
        done = self.run("/bin/sh", "-euc", script)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        return done.stdout

    def mounts(self, path: str, **changes: Any) -> list[dict[str, Any]]:
        """Give the list of mounts with one of them changed."""
        return [
            {**mount, **changes} if mount["mount_point"] == path else mount for mount in self.spec["mounts"]
        ]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """Give a container and a directory for its restore."""
    for name in ("root", "restore"):
        (tmp_path / name).mkdir()
    with box(tmp_path / "root", SETUP, kinds=ALL) as pid:
        yield Place(pid, tmp_path / "restore")


def test_root_and_mounts_are_there_under_names_of_ours(place: Place) -> None:
    """Each mount is a copy with nothing below it; the node's own files are where they were."""
    points = [mount["mount_point"] for mount in place.spec["mounts"]]
    assert points == ["/data/dir", "/data/file", "/data/dir/below"]
    script = f"""
cd {place.directory}
cat root/etc-of-box mounts/0/name mounts/1 mounts/2/name
ls root/data/dir mounts/0/below
test -e /usr/bin/env
echo changed >mounts/0/new
"""
    lines = place.sh(script).split()
    assert lines[:4] == ["root", "dir", "bound", "below"]
    assert lines[4:] == ["mounts/0/below:", "root/data/dir:"]
    assert Path(f"/proc/{place.pid}/root/data/dir/new").read_text() == "changed\n"


def test_the_namespaces_are_the_containers_but_for_its_mounts(place: Place) -> None:
    """Network, IPC, UTS and pids are its own; the mount namespace is neither its nor the node's."""
    kinds = ("mnt", "net", "ipc", "uts", "pid")
    links = place.sh(f"for n in {' '.join(kinds)}; do readlink /proc/self/ns/$n; done").split()
    seen = dict(zip(kinds, links, strict=True))
    for kind in kinds:
        theirs = os.readlink(f"/proc/{place.pid}/ns/{kind}")
        assert (seen[kind] == theirs) == (kind != "mnt"), kind
        assert seen[kind] != os.readlink(f"/proc/self/ns/{kind}")


def test_proc_is_that_of_the_containers_pids(place: Place) -> None:
    """CRIU counts pids as the container does; init is 1 there, and the node's processes are not seen."""
    pids = place.sh("ls /proc; cat /proc/self/status")
    numbers = {int(word) for word in pids.split("\n") if word.isdigit()}
    assert 1 in numbers
    assert len(numbers) <= 4
    assert "NSpid:\t" in pids


def test_the_child_is_in_the_containers_cgroups(place: Place) -> None:
    """It has written itself into each of them before anything else."""
    place.sh("true")
    assert place.joined.read_bytes() == b"0"


def test_nothing_is_left_on_either_side(place: Place) -> None:
    """Neither the container's mount namespace nor the node's has a mount more afterwards."""
    before = Path(f"/proc/{place.pid}/mountinfo").read_text()
    place.sh("true")
    assert Path(f"/proc/{place.pid}/mountinfo").read_text() == before
    assert str(place.directory) not in Path("/proc/self/mountinfo").read_text()
    assert list((place.directory / "root").iterdir()) == []
    assert (place.directory / "mounts/1").read_bytes() == b""


def test_nothing_stays_open_but_the_script_and_its_pipes(place: Place) -> None:
    """What CRIU gets is standard input, output and error besides; ``ls`` itself has one more."""
    fds = {int(fd) for fd in place.sh("ls /proc/self/fd").split()}
    assert {fd for fd in fds if fd < shim_container.HOOK_FDS} == {0, 1, 2, 3}
    assert len(fds) == 4 + 3


@pytest.mark.parametrize(
    ("action", "pid", "code", "error"),
    [
        pytest.param("post-restore", "$$", 1, "have the container's mounts: the container has", id="others"),
        pytest.param("post-restore", "", 1, "have the container's mounts: invalid literal", id="nobody"),
        pytest.param("pre-restore", "$$", 0, "CRIU has not let the worker have", id="not asked"),
    ],
)
def test_the_script_fails_when_the_worker_cannot_have_the_mounts(
    place: Place, action: str, pid: str, code: int, error: str
) -> None:
    """CRIU ends its tasks then, and the shim says why; a CRIU that never asks has failed too."""
    script = f'export CRTOOLS_SCRIPT_ACTION={action} CRTOOLS_INIT_PID={pid}; exec "$1"'
    done = place.run("/bin/sh", "-euc", script, asks=True)
    assert (done.returncode, error in done.stderr) == (code, True), done.stderr


# refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        pytest.param({"root_id": 1}, "the mount at / has the id", id="another root"),
        pytest.param(("/data/dir", {"id": 1}), "the mount at /data/dir has the id", id="another mount"),
        pytest.param(("/data/file", {"directory": True}), "/data/file was a directory", id="no directory"),
        pytest.param(("/data/dir", {"directory": False}), "/data/dir was a file", id="a directory"),
        pytest.param(("/data/dir", {"mount_point": "/data/link"}), "symbolic link", id="a link in its place"),
        pytest.param(
            ("/data/dir/below", {"mount_point": "/data/link/below"}), "symbolic link", id="a link on the way"
        ),
        pytest.param(
            ("/data/dir", {"mount_point": "/data/out"}), "symbolic link", id="a link that leads out"
        ),
        pytest.param(
            ("/data/dir", {"mount_point": "/proc/1/root"}), "symbolic link", id="a magic link of the kernel"
        ),
        pytest.param(("/data/dir", {"mount_point": "/../data/dir"}), "EXDEV", id="a way out of the root"),
        pytest.param(("/data/dir", {"mount_point": "/data/none"}), "No such file", id="gone"),
        pytest.param(
            ("/data/dir", {"mount_point": "/data"}), "has the id", id="a directory that is no mount"
        ),
        pytest.param(("/data/dir", {"mount_point": "/data/a\0b"}), "null byte", id="a NUL"),
    ],
)
def test_what_is_not_as_it_was_seen_is_refused(place: Place, changes: Any, words: str) -> None:
    """Nothing is run then; the shim reports the sentence."""
    given: Mapping[str, Any] = (
        changes if isinstance(changes, dict) else {"mounts": place.mounts(changes[0], **changes[1])}
    )
    done = place.run("/bin/echo", "entered", **given)
    assert done.returncode == 127
    assert done.stdout == ""
    expected = "Invalid cross-device link" if words == "EXDEV" else words
    assert expected.lower() in done.stderr.lower()


def test_a_mount_that_was_covered_meanwhile_is_refused(place: Place) -> None:
    """What lies over it is another mount, whoever put it there."""
    with open(f"/proc/{place.pid}/ns/mnt", "rb") as namespace:
        code = (
            "import ctypes, os, sys; libc = ctypes.CDLL(None);"
            f"assert libc.setns({namespace.fileno()}, 0) == 0;"
            "assert libc.mount(b'over', b'/data/dir', b'tmpfs', 0, None) == 0"
        )
        subprocess.run([sys.executable, "-c", code], check=True, pass_fds=[namespace.fileno()])
    done = place.run("/bin/echo", "entered")
    assert done.returncode == 127
    assert "the mount at /data/dir has the id" in done.stderr


def test_a_cgroup_that_is_gone_is_said(place: Place) -> None:
    """With the path; nothing is run outside of the container's limits."""
    done = place.run("/bin/echo", "entered", join=["/sys/fs/cgroup/none/cgroup.procs"])
    assert done.returncode == 127
    assert "FileNotFoundError" in done.stderr
    assert "/sys/fs/cgroup/none" in done.stderr


def test_check_names_both_ids() -> None:
    """So that a log tells what was expected."""
    with kit.descriptor("/", os.O_PATH) as root:
        shim_enter.check(root, linux.mount_id(root), "/")
        with pytest.raises(shim_enter.EnterError, match=r"has the id \d+ now and had -1"):
            shim_enter.check(root, -1, "/")


# the container's init and its tree --------------------------------------------------------------------


def held(place: Place, **changes: Any) -> Container:
    """Take hold of the container as the shim does, and close what that opens with the test's process."""
    return Container({**place.spec, **changes}, str(place.directory))


def close(container: Container) -> None:
    """Close what a shim leaves to its end."""
    for fd in (container.pidfd, container.own, *container.namespaces.values(), container.rootfd):
        if fd is not None:
            os.close(fd)


def test_another_process_under_the_pid_is_refused(place: Place) -> None:
    """A pid alone may be another's by now."""
    with pytest.raises(ContainerGoneError, match="another process"):
        held(place, start_ticks=1)
    with pytest.raises(ProcessLookupError):
        held(place, pid=1 << 22)


def test_output_is_the_inits_and_what_it_has_not_is_null(place: Place) -> None:
    """The worker's output goes on in the container's log; a pipe to nobody goes nowhere."""
    container = held(place)
    try:
        for mode in ("stdout", "stderr"):
            fd = container.opened(mode)
            number = {"stdout": 1, "stderr": 2}[mode]
            assert os.fstat(fd).st_ino == os.stat(f"/proc/{place.pid}/fd/{number}").st_ino
            assert not os.get_inheritable(fd)
            os.close(fd)
        for mode, path in (("null", "/dev/null"), ("net", f"/proc/{place.pid}/ns/net")):
            fd = container.opened(mode)
            assert os.fstat(fd).st_ino == os.stat(path).st_ino
            os.close(fd)
    finally:
        close(container)


def test_the_tree_is_found_by_its_own_pids(place: Place) -> None:
    """A process is known by its pid in there; one that is not there is an error in the end."""
    container = held(place)
    try:
        assert container.tree() == []
        assert shim_container.inner_pid(place.pid, 1) == 1
        assert shim_container.inner_pid(os.getpid(), 1) == 0
        assert shim_container.children(1 << 22) == []
        assert shim_container.is_zombie(1 << 22)
        assert not shim_container.is_zombie(os.getpid())
        assert shim.start_ticks(place.pid) == place.spec["start_ticks"]
    finally:
        close(container)


def test_half_a_tree_is_ended_and_nothing_else(tmp_path: Path) -> None:
    """What was there before the restore stays, as does the init; what came since goes."""
    for name in ("root", "restore"):
        (tmp_path / name).mkdir()
    setup = f"for n in 1000 2000; do {SLEEPS.format('$n')}; done"
    with box(tmp_path / "root", setup) as pid:
        container = held(Place(pid, tmp_path / "restore"))
        try:
            (since,) = [each for each in container.before if b"2000" in cmdline(each)]
            (before,) = container.before - {since}
            container.before.discard(since)
            container.end_half_tree()
            assert shim_container.is_zombie(since)
            assert not shim_container.is_zombie(before)
            assert not shim_container.is_zombie(pid)
        finally:
            close(container)


def cmdline(pid: int) -> bytes:
    """Read a command line; nothing of a process that is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return b""


@pytest.mark.parametrize(
    ("ours", "code", "expected"),
    [
        pytest.param(False, 7, 7, id="the worker's"),
        pytest.param(False, 0, 0, id="success"),
        pytest.param(False, None, 1, id="not known, which is no success"),
    ],
)
def test_a_foreign_init_ends_with_the_workers_code(ours: bool, code: int | None, expected: int) -> None:
    """It is made to call exit_group, whatever it is."""
    command = ["sh", "-c", "sleep 1000 & echo $!; wait $!; exit $?"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        container = Container.__new__(Container)
        container.ours, container.code, container.pid = ours, code, int(parent.stdout.readline())
        container.pidfd = linux.pidfd_open(container.pid)
        container.finish()
        os.close(container.pidfd)
        assert parent.wait(30) == expected


@pytest.mark.parametrize(
    ("script", "status", "code"),
    [
        pytest.param("exit 3", 3 << 8, 3, id="a code"),
        pytest.param("exit 0", 0, 0, id="success"),
        pytest.param("kill -9 $$", signal.SIGKILL, 128 + signal.SIGKILL, id="a signal"),
    ],
)
def test_the_workers_end_is_known_before_it_is_reaped(script: str, status: int, code: int) -> None:
    """Its wait status as the kernel has it; None while it runs."""
    with subprocess.Popen(["sh", "-c", f"read line; {script}"], stdin=subprocess.PIPE) as worker:
        container = Container.__new__(Container)
        container.code = 99
        container.rootfd = pidfd = linux.pidfd_open(worker.pid)
        assert container.status(worker.pid, wait=False) is None
        assert worker.stdin is not None
        worker.stdin.close()
        assert (container.status(worker.pid), container.code) == (status, code)
        os.close(pidfd)


def test_a_container_that_has_ended_has_no_tree(place: Place) -> None:
    """And asking is no error."""
    container = held(place)
    try:
        os.kill(place.pid, signal.SIGKILL)
        while procfs.read_stat(place.pid).state not in "ZX":
            time.sleep(0.001)
        assert container.tree() == []
        container.end_half_tree()
    finally:
        close(container)
