"""The placeholder's program: found, trusted, installed, started; and who is taken for one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hibernode import shim_placeholder
from hibernode.errors import NotFoundError, RefusedError
from hibernode.host import linux, procfs
from hibernode.placeholder import INSTALLED_NAME, find_placeholder, install_placeholder
from hibernode.shim_placeholder import ADOPT_SIGNAL, end_with, exit_status, recognise, tell
from tests.unit.cli_kit import HIBERNODE, Machine, machine

__all__ = ["machine"]  # a fixture

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "agent" / "hibernode" / "data" / "placeholder.c"
NOBODY = 65534


def identity(path: Path) -> tuple[int, ...]:
    """Tell which file it is and when it was last changed."""
    status = path.stat()
    return (status.st_ino, status.st_mode, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def make_program(path: Path, data: bytes = b"program") -> Path:
    """Put something in the program's place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    path.chmod(0o755)
    return path


def give(path: Path, uid: int, gid: int) -> bool:
    """Make it somebody else's."""
    os.chown(path, uid, gid)
    return True


# finding ----------------------------------------------------------------------------------------------


def test_the_program_of_the_environment_comes_before_that_of_the_system(tmp_path):
    """What make setup built is used, else what the container image has."""
    system = tmp_path / "system"
    with pytest.raises(NotFoundError, match="not on this machine"):
        find_placeholder(prefix=tmp_path, system=system)
    own = make_program(tmp_path / "libexec/hibernode/placeholder")
    assert find_placeholder(prefix=tmp_path, system=system) == own


def test_the_system_s_program_is_found(monkeypatch):
    """Every directory above it is root's own, as in the image."""
    ls = Path("/usr/bin/ls")
    assert find_placeholder(prefix=Path("/nonexistent"), system=ls) == ls


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        pytest.param(lambda path: path.chmod(0o757), "can be written by others", id="open to all"),
        pytest.param(
            lambda path: path.parent.chmod(0o777), "can be written by others", id="in an open folder"
        ),
        pytest.param(lambda path: give(path, NOBODY, 0), "belongs to uid 65534", id="somebody else's"),
        pytest.param(lambda path: (path.unlink(), path.mkdir()), "is no program", id="a directory"),
        pytest.param(
            lambda path: (give(path, 0, NOBODY), path.chmod(0o775)),
            "can be written",
            id="open to a group",
        ),
    ],
)
def test_a_program_that_others_could_have_changed_is_refused(tmp_path, spoil, says):
    """It runs in every restore pod of the node."""
    spoil(make_program(tmp_path / "libexec/hibernode/placeholder"))
    with pytest.raises(RefusedError, match=says):
        find_placeholder(prefix=tmp_path)


# building and installing ------------------------------------------------------------------------------


def test_the_build_leaves_a_program_alone_that_is_the_same(tmp_path):
    """Pods that have it mounted see no change, and a build leaves nothing else behind."""
    program = tmp_path / "libexec" / "placeholder"
    build = [ROOT / "scripts" / "build-placeholder.sh", program]
    subprocess.run(build, check=True, timeout=60)
    before = identity(program)
    subprocess.run(build, check=True, timeout=60)
    assert identity(program) == before
    assert program.read_bytes() == find_placeholder().read_bytes(), "make setup"
    assert program.stat().st_mode & 0o7777 == 0o755
    assert os.listdir(program.parent) == ["placeholder"]


def test_the_build_says_how_it_is_done_by_hand():
    """The line in the source's header is the line of the script."""
    script = (ROOT / "scripts" / "build-placeholder.sh").read_text()
    flags = "-std=gnu11 -static -s -Os -Wall -Wextra -Werror"
    assert f'"${{CC:-gcc}}" {flags} -o "$new"' in script
    assert f"gcc {flags} -o placeholder placeholder.c" in SOURCE.read_text()


def test_it_is_static():
    """No loader and no library of an image is asked for."""
    data = find_placeholder().read_bytes()
    assert data.startswith(b"\x7fELF\x02")
    assert b"/lib64/ld-linux" not in data
    assert b"/lib/ld-linux" not in data


def test_source_and_module_agree():
    """The number, the name and the pidfd call stand in both."""
    source = SOURCE.read_text()
    assert f"MESSAGE = {ADOPT_SIGNAL}," in source
    assert f'"{shim_placeholder.COMM}"' in source
    assert len(shim_placeholder.COMM) < 16, "the kernel cuts longer names"
    assert shim_placeholder.PIDFD_INFO.size == 64


def test_installing_twice_changes_nothing(machine: Machine, tmp_path):
    """The file is whole and executable; it is put right when it has been changed."""
    into = tmp_path / "host" / "dir"
    path = into / INSTALLED_NAME
    assert machine.ok("placeholder", "--install", into) == f"installed {path}\n"
    before = identity(path)
    assert path.stat().st_mode & 0o7777 == 0o755
    assert path.read_bytes() == find_placeholder().read_bytes()
    answer = json.loads(machine.ok("placeholder", "--install", into, "-o", "json"))
    assert (answer["path"], answer["state"]) == (str(path), "unchanged")
    assert identity(path) == before
    path.chmod(0o700)
    assert install_placeholder(into) == (path, "updated")
    path.write_bytes(b"other")
    assert install_placeholder(into) == (path, "updated")
    assert os.listdir(into) == [INSTALLED_NAME]


def test_odd_things_in_the_program_s_place_are_refused(machine: Machine, tmp_path):
    """Nothing is written through a link."""
    (tmp_path / INSTALLED_NAME).symlink_to(tmp_path / "elsewhere")
    assert "symbolic link" in machine.refused(4, "placeholder", "--install", tmp_path)
    assert not (tmp_path / "elsewhere").exists()


# starting ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "code", "out"),
    [
        pytest.param(["--wait", "0", "--", "echo", "--wait", "-o", "x"], 0, "--wait -o x\n", id="after --"),
        pytest.param(["--wait", "0", "echo", "-o", "x"], 0, "-o x\n", id="without --"),
        pytest.param(["--wait", "0", "sh", "-c", "exit 3"], 3, "", id="its exit code"),
        pytest.param(["--wait", "0"], 124, "", id="no command"),
    ],
)
def test_the_command_becomes_the_program(machine: Machine, words, code, out):
    """Flags of the command to run are its own."""
    done = machine.run("placeholder", *words)
    assert (done.returncode, done.stdout) == (code, out)


def test_the_command_waits_as_the_program():
    """Same pid; what Python ignored and opened is gone."""
    with subprocess.Popen([HIBERNODE, "placeholder"], stdin=subprocess.DEVNULL) as process:
        while not recognise(process.pid):
            assert process.poll() is None
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM


@pytest.mark.parametrize("more", [["--wait", "1"], ["--", "true"]])
def test_installing_runs_nothing(machine: Machine, tmp_path, more):
    """Both at once are a mistake."""
    done = machine.run("placeholder", "--install", tmp_path, *more)
    assert done.returncode == 2
    assert "--install runs nothing" in done.stderr
    assert os.listdir(tmp_path) == []


# talking ----------------------------------------------------------------------------------------------


def test_the_module_needs_nothing_of_ours():
    """The shim can load it with nothing but the standard library."""
    code = (
        f"import runpy, sys; runpy.run_path({shim_placeholder.__file__!r}); print('hibernode' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "False\n"


def test_other_processes_are_no_placeholder():
    """Neither this one, nor none, nor one that has only the name."""
    assert not recognise(os.getpid())
    assert not recognise(2**22 + 1)
    named = "ctypes.CDLL(None).prctl(15, b'hibernode-ph')"
    code = f"import ctypes, sys; {named}; print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout
        assert process.stdout.readline() == b"\n"
        assert Path(f"/proc/{process.pid}/comm").read_text() == "hibernode-ph\n"
        assert not recognise(process.pid)


def test_a_process_that_is_gone_is_an_error_or_unknown():
    """Nothing is sent to another one, and no status is made up."""
    process = subprocess.Popen(["true"])
    pidfd = linux.pidfd_open(process.pid)
    process.wait()
    try:
        with pytest.raises(ProcessLookupError):
            tell(pidfd, 1)
        with pytest.raises(ProcessLookupError):
            end_with(process.pid, 1)
        with pytest.raises(ProcessLookupError):
            end_with(-1, 1)
        assert end_with(process.pid, 1, pidfd) == f"pid {process.pid} had ended already"
        assert exit_status(os.getpid(), pidfd) in (0, None)  # not this one's; the pidfd may remember
    finally:
        os.close(pidfd)


def test_a_thread_that_is_another_process_s_is_let_go():
    """Its number was given out again before it was traced: the other process goes on, untraced."""
    with (
        subprocess.Popen(["sleep", "1000"]) as init,
        subprocess.Popen(["sleep", "1000"]) as other,
    ):
        pidfd = linux.pidfd_open(init.pid)
        try:
            said: list[str] = []

            def trace() -> None:
                shim_placeholder._ptrace(shim_placeholder.PTRACE_SEIZE, other.pid)
                try:
                    shim_placeholder._check_thread(init.pid, other.pid, pidfd)
                except shim_placeholder._CannotError as error:
                    said.append(str(error))
                shim_placeholder._ptrace(shim_placeholder.PTRACE_SEIZE, init.pid)
                shim_placeholder._check_thread(init.pid, init.pid, pidfd)
                said.append("its own")

            tracer = threading.Thread(target=trace)
            tracer.start()
            tracer.join()
            assert said == [f"its thread {other.pid} ended, and the number is another's", "its own"]
            while procfs.read_status(other.pid).tracer_pid:  # its end, a moment after its last word
                assert other.poll() is None
            assert other.poll() is None
        finally:
            os.close(pidfd)
            init.kill()
            other.kill()
