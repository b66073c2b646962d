"""The profile on real processes: what it denies, what exec keeps, what check sees."""

import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hibernode.host.seccomp import Mode, seccomp_state, tree_state

HIBERNODE = (sys.executable, "-m", "hibernode.cli.main")
EXEC = (*HIBERNODE, "seccomp", "exec")
EPERM = 1

# A Python program that makes a ring by the raw syscall (425 on every architecture), keeps it as its argument
# says, says "ready" or the error, and ends when its standard input does.
RING = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
fd = libc.syscall(425, 1, ctypes.create_string_buffer(120))
if fd < 0:
    sys.exit(f"errno {ctypes.get_errno()}")
if sys.argv[1] == "mapping":
    assert libc.mmap(None, 4096, 3, 1, fd, 0) not in (None, 2**64 - 1)
    os.close(fd)
print("ready", fd, flush=True)
sys.stdin.read()
"""

# io_uring_setup through each of the kernel's entries; the result, negative for an error, is printed.
ENTRIES = r"""
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
int main(int argc, char **argv) {
    long result = -1000, flags = MAP_PRIVATE | MAP_ANONYMOUS;
#ifdef __x86_64__
    flags |= MAP_32BIT; /* the 32-bit entry takes 32-bit pointers */
#endif
    void *params = mmap(0, 4096, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (argc < 2 || params == MAP_FAILED) return 2;
    if (!strcmp(argv[1], "native")) {
        result = syscall(425, 1, params);
        if (result < 0) result = -errno;
    }
#ifdef __x86_64__
    if (!strcmp(argv[1], "x32")) {
        result = syscall(0x40000000 + 425, 1, params);
        if (result < 0) result = -errno;
    }
    if (!strcmp(argv[1], "i386")) {
        int short_result;
        __asm__ volatile("int $0x80" : "=a"(short_result)
                         : "a"(425), "b"(1), "c"((unsigned)(unsigned long)params) : "memory");
        result = short_result;
    }
#endif
    printf("%ld\n", result);
    return 0;
}
"""


def run(*arguments: object, **options) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        [*map(str, arguments)], capture_output=True, text=True, check=False, timeout=60, **options
    )


@contextmanager
def running(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a program that prints a line when it is ready; yields it and the line, and ends it."""
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin
        assert process.stdout
        try:
            yield process, process.stdout.readline()
        finally:
            process.kill()


def shell(then: str = "read line") -> tuple[str, str, str]:
    """Make the command line of a shell that says it is ready and then does ``then``."""
    return ("sh", "-c", f"echo ready; {then}")


@pytest.fixture(scope="module")
def entries(tmp_path_factory) -> Path:
    """Build the program that calls io_uring_setup by the entry it is told."""
    folder = Path(tmp_path_factory.mktemp("entries"))
    (folder / "entries.c").write_text(ENTRIES)
    subprocess.run(["gcc", "-O1", "-o", folder / "entries", folder / "entries.c"], check=True, timeout=60)
    return folder / "entries"


@pytest.fixture
def profile(tmp_path):
    """Write a profile that allows all but the given rules."""

    def write(*rules: dict[str, object], default: str = "SCMP_ACT_ALLOW") -> Path:
        path = Path(tmp_path) / "profile.json"
        path.write_text(json.dumps({"defaultAction": default, "syscalls": rules}))
        return path

    return write


def test_without_the_profile_io_uring_works_here(entries):
    """The denials below are the profile's and not the machine's."""
    assert int(run(entries, "native").stdout) > 0


@pytest.mark.parametrize("entry", ["native", "x32", "i386"] if platform.machine() == "x86_64" else ["native"])
def test_under_the_profile_io_uring_setup_gets_eperm_through_every_entry(entries, entry):
    """The 32-bit entry and the x32 numbers are no way around the profile."""
    assert run(*EXEC, entries, entry).stdout == f"-{EPERM}\n"


def test_a_python_program_gets_eperm_under_the_profile():
    """A program that tries io_uring by the raw syscall sees EPERM and nothing worse."""
    result = run(*EXEC, "--", sys.executable, "-c", RING, "fd")
    assert (result.returncode, result.stderr) == (1, f"errno {EPERM}\n")


def test_exec_keeps_the_pid_and_puts_a_filter_on():
    """The program runs in the process that was started, with seccomp mode 2 and no_new_privs."""
    with subprocess.Popen(
        [*EXEC, "--", "cat", "/proc/self/status"], stdout=subprocess.PIPE, text=True
    ) as process:
        status = dict(line.split(":\t", 1) for line in process.communicate()[0].splitlines())
    assert int(status["Pid"]) == process.pid
    assert (status["Seccomp"], status["NoNewPrivs"]) == ("2", "1")
    assert int(status["SigIgn"], 16) & (1 << signal.SIGPIPE - 1 | 1 << signal.SIGXFSZ - 1) == 0


def test_exec_can_leave_no_new_privs_off():
    """With --allow-new-privileges the filter is on and no_new_privs is not."""
    lines = run(*EXEC, "--allow-new-privileges", "cat", "/proc/self/status").stdout.splitlines()
    assert {"Seccomp:\t2", "NoNewPrivs:\t0"} <= set(lines)


@pytest.mark.parametrize(
    ("command", "code"),
    [
        pytest.param(["sh", "-c", "exit 7"], 7, id="the program's own code"),
        pytest.param(["sh", "-c", "kill -TERM $$"], -signal.SIGTERM, id="a signal"),
        pytest.param(["/no/such/program"], 127, id="no such program"),
        pytest.param(["no-such-program-anywhere"], 127, id="no such program on PATH"),
        pytest.param(["/etc/hostname/x"], 127, id="a path through a file"),
        pytest.param(["/etc/passwd"], 126, id="a file that is no program"),
        pytest.param(["/proc"], 126, id="a folder"),
        pytest.param([], 2, id="no command"),
    ],
)
def test_exec_exit_codes(command, code):
    """The code is the program's; else 127, 126 or 2, with one sentence and no traceback."""
    result = run(*EXEC, "--", *command)
    assert result.returncode == code
    assert "Traceback" not in result.stderr


def test_options_after_the_command_are_the_command_s():
    """Exec takes nothing that stands behind the command, a second -- included."""
    result = run(*EXEC, "printf", "%s|", "--profile", "--", "-h")
    assert result.stdout == "--profile|--|-h|"


def test_exec_keeps_the_environment():
    """The program's environment is the caller's, also in the C locale where Python adds to its own."""
    given = {"PATH": os.environ["PATH"], "ODD": "\udcff=x"}
    assert run(*EXEC, "env", "-0", env=given, errors="surrogateescape").stdout == (
        f"PATH={given['PATH']}\0ODD={given['ODD']}\0"
    )


def test_a_profile_of_ones_own(profile):
    """Error numbers count, two conditions on one argument mean either, unknown calls are left out."""
    path = profile(
        {
            "names": ["no_such_call", "setpriority"],
            "action": "SCMP_ACT_ERRNO",
            "errnoRet": 71,
            "args": [{"index": 2, "value": value, "op": "SCMP_CMP_EQ"} for value in (7, 9)],
        },
        {"names": ["read"], "action": "SCMP_ACT_ALLOW"},
    )
    program = """
import os
for priority in 7, 8, 9:
    try:
        os.setpriority(os.PRIO_PROCESS, 0, priority)
        print("ok")
    except OSError as error:
        print(error.errno)
"""
    result = run(*EXEC, "--profile", path, "--", sys.executable, "-c", program)
    assert result.stdout.split() == ["71", "ok", "71"]
    assert "no_such_call" in result.stderr


def test_conditions_on_two_arguments_must_both_hold(profile):
    """A rule with conditions on different arguments fits only where all of them hold."""
    path = profile(
        {
            "names": ["setpriority"],
            "action": "SCMP_ACT_ERRNO",
            "args": [{"index": i, "value": value, "op": "SCMP_CMP_EQ"} for i, value in ((0, 0), (2, 7))],
        }
    )
    program = (
        "import os; os.setpriority(0, 0, 8); os.setpriority(1, 0, 7); print('ok'); os.setpriority(0, 0, 7)"
    )
    result = run(*EXEC, "--profile", path, "--", sys.executable, "-c", program)
    assert result.stdout == "ok\n"
    assert "PermissionError" in result.stderr


def test_kill_process_kills(profile):
    """SCMP_ACT_KILL_PROCESS ends the program by SIGSYS."""
    path = profile({"names": ["setpriority"], "action": "SCMP_ACT_KILL_PROCESS"})
    result = run(*EXEC, "--profile", path, "--", sys.executable, "-c", "import os; os.setpriority(0, 0, 1)")
    assert result.returncode == -signal.SIGSYS


def test_a_wrong_profile_runs_nothing(profile):
    """A profile with a fault is a usage error, and the command is not run without it."""
    path = profile({"names": ["read"], "action": "SCMP_ACT_NOTIFY"})
    result = run(*EXEC, "--profile", path, "--", "echo", "ran")
    assert (result.returncode, result.stdout) == (2, "")
    assert "syscalls[0].action" in result.stderr


def test_apply_covers_threads_that_run_already():
    """The filter is put on every thread of the process at once."""
    program = """
import os, threading
from pathlib import Path
from hibernode.host.seccomp import apply, seccomp_state
from hibernode.host.seccomp_profile import BUILTIN_PROFILE, load_profile
stop = threading.Event()
threading.Thread(target=stop.wait).start()
before = list(seccomp_state(os.getpid()).values())
unknown = apply(load_profile(BUILTIN_PROFILE))
after = list(seccomp_state(os.getpid()).values())
stop.set()
print([int(mode) for mode in before], [int(mode) for mode in after], unknown)
"""
    result = run(sys.executable, "-c", program)
    assert result.stdout == "[0, 0] [2, 2] ()\n", result.stderr


def test_state_of_a_process_that_is_gone():
    """A process that has ended and is reaped is said to be no process."""
    with subprocess.Popen(["true"]) as process:
        process.wait(60)
    with pytest.raises(ProcessLookupError):
        seccomp_state(process.pid)
    with pytest.raises(ProcessLookupError):
        tree_state(process.pid)
    result = run(*HIBERNODE, "seccomp", "check", process.pid)
    assert (result.returncode, result.stdout) == (1, "")
    assert f"no process {process.pid}" in result.stderr


def test_check_is_content_with_a_tree_under_the_profile():
    """Children of a filtered process have the filter too, and check tells each task's mode."""
    with running(*EXEC, *shell("sh -c 'echo; read line'; true")) as (process, _):
        assert process.stdout
        process.stdout.readline()
        result = run(*HIBERNODE, "seccomp", "check", process.pid, "-o", "json")
        assert result.returncode == 0, result.stderr
        answer = json.loads(result.stdout)
        assert answer["ok"] is True
        assert len(answer["processes"]) == 2
        assert {task["mode"] for entry in answer["processes"] for task in entry["tasks"]} == {"filter"}
        assert seccomp_state(process.pid) == {process.pid: Mode.FILTER}


def test_check_names_the_task_without_a_filter():
    """A process without a filter fails the check, is named, and is told what to do."""
    with running(*shell()) as (process, _):
        result = run(*HIBERNODE, "seccomp", "check", process.pid)
        assert result.returncode == 1
        assert f"no seccomp filter on task {process.pid}\n" in result.stderr
        assert "seccomp exec" in result.stderr
        assert "0 of 1" in result.stdout


def test_check_finds_the_one_bare_process_of_a_tree():
    """A filter on a child does not hide that its parent has none."""
    with running(*shell(" ".join((*EXEC, "sh -c 'echo; read line'; true")))) as (process, _):
        assert process.stdout
        process.stdout.readline()
        by_pid = {entry.pid: entry.unfiltered for entry in tree_state(process.pid)}
        assert by_pid.pop(process.pid) == (process.pid,)
        assert list(by_pid.values()) == [()]
        assert run(*HIBERNODE, "seccomp", "check", process.pid).returncode == 1


@pytest.mark.parametrize("kept", ["fd", "mapping"])
def test_check_names_the_ring(kept):
    """A ring is found by its descriptor, and by its mapping when the descriptor is closed (FC-01)."""
    with running(sys.executable, "-c", RING, kept) as (process, line):
        fd = line.split()[1]
        result = run(*HIBERNODE, "seccomp", "check", process.pid, "-o", "json")
        (entry,) = json.loads(result.stdout)["processes"]
        assert result.returncode == 1
        assert f"io_uring is in use: pid {process.pid} {kept}" in result.stderr
        (ring,) = entry["ioUring"]
        assert ring == f"fd {fd}" if kept == "fd" else ring.startswith("mapping ")
