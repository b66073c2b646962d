"""The placeholder as pid 1 of real pid namespaces, and foreign inits that are made to end with a code."""

from __future__ import annotations

import contextlib
import os
import platform
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hibernode.host import linux
from hibernode.placeholder import find_placeholder
from hibernode.shim_placeholder import ADOPT_SIGNAL, FAILED, end_with, exit_status, recognise, tell

DEADLINE = 60.0
NOBODY = 65534
CRASH = 128 + signal.SIGSEGV

INJECT = """
import ctypes, os, sys
code, init = sys.argv[1], sys.argv[2]
assert ctypes.CDLL(None).setns(os.open(f"/proc/{init}/ns/pid", os.O_RDONLY), 0x20000000) == 0
middle = os.fork()
if middle == 0:
    if os.fork() == 0:
        os.setsid()
        exec(code)
    os._exit(0)
os.waitpid(middle, 0)
"""
"""Leaves a process in a pid namespace as CRIU does: its parent, from outside, has ended."""

HEADER = """
import ctypes, os, signal, sys, time
def note(name, text=""):
    with open(f"{WORK}/{name}.tmp", "w") as file:
        file.write(str(text))
    os.rename(f"{WORK}/{name}.tmp", f"{WORK}/{name}")
def until(name):
    while not os.path.exists(f"{WORK}/{name}"):
        time.sleep(0.005)
"""
SLEEPS = "while True: time.sleep(0.005)"
LEAVE = """
for _ in range(5):
    child = os.fork()
    if child == 0:
        os.fork()
        os._exit(0)
    os.waitpid(child, 0)
"""
TRACE = """
import ctypes, sys
print(ctypes.CDLL(None).ptrace(0x4206, int(sys.argv[1]), None, None), flush=True)
input()
"""


def wait_for(condition: Callable[[], object]) -> None:
    """Poll until ``condition`` holds."""
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.005)


def status_field(pid: int, name: str) -> str:
    """Read one field of /proc/PID/status; empty when the process is gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return line.partition(":")[2].strip()
    return ""


def children(pid: int) -> list[int]:
    """List a process's children, dead ones too."""
    with contextlib.suppress(OSError):
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


class Box:
    """A pid namespace; ``init`` is its pid 1 as the host numbers it."""

    def __init__(
        self, work: Path, argv: list[str], *, options: tuple[str, ...] = (), before: tuple[str, ...] = ()
    ):
        self.work = work
        self.out, self.err = work / "out", work / "err"
        unshare = ["unshare", "--pid", "--fork", "--kill-child", *options, "--", *argv]
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                [*before, *unshare], stdin=subprocess.PIPE, stdout=out, stderr=err, cwd="/"
            )
        wait_for(lambda: children(self.process.pid))
        self.init = children(self.process.pid)[0]
        self.pidfd = linux.pidfd_open(self.init)

    def listens(self) -> Box:
        """Wait until the placeholder listens."""
        wait_for(lambda: recognise(self.init))
        return self

    def inject(self, code: str) -> int:
        """Start Python code as CRIU starts a worker; returns its pid in the namespace."""
        source = f"WORK = {str(self.work)!r}\n{HEADER}\nnote('pid', os.getpid())\n{code}"
        (self.work / "pid").unlink(missing_ok=True)
        subprocess.run(
            [sys.executable, "-c", INJECT, source, str(self.init)],
            check=True,
            timeout=DEADLINE,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_for((self.work / "pid").exists)
        return int((self.work / "pid").read_text())

    def host_pid(self, inner: int) -> int:
        """Turn the namespace's pid of a child of init into ours."""
        return next(
            pid for pid in children(self.init) if status_field(pid, "NSpid").split()[-1] == str(inner)
        )

    def adopt(self, code: str) -> int:
        """Inject a worker and tell the placeholder; returns its pid on the host."""
        inner = self.inject(code)
        host = self.host_pid(inner)
        tell(self.pidfd, inner)
        return host

    def note(self, name: str) -> None:
        """Let code that waits for ``name`` go on."""
        (self.work / name).touch()

    def has(self, name: str) -> None:
        """Wait until the code inside has noted ``name``."""
        wait_for((self.work / name).exists)

    def code(self) -> int:
        """Wait for the end of init and return its exit code, as its parent sees it."""
        return self.process.wait(DEADLINE)

    def ended_by(self) -> int:
        """Wait for the end of init and return the signal that ended it."""
        self.process.wait(DEADLINE)  # unshare's own code is not told apart from an exit code
        status = exit_status(self.init, self.pidfd)
        assert status is not None
        return os.WTERMSIG(status)


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Callable[..., Box]]:
    """Make pid namespaces; nothing of them is left running."""
    made: list[Box] = []

    def make(argv: list[str], **more: tuple[str, ...]) -> Box:
        work = tmp_path / str(len(made))
        work.mkdir()
        made.append(Box(work, argv, **more))
        return made[-1]

    yield make
    for each in made:
        with contextlib.suppress(ProcessLookupError):
            linux.pidfd_send_signal(each.pidfd, signal.SIGKILL)
        each.process.wait(DEADLINE)
        if each.process.stdin:
            each.process.stdin.close()
        os.close(each.pidfd)


@pytest.fixture
def placeholder(box: Callable[..., Box]) -> Callable[..., Box]:
    """Make pid namespaces whose pid 1 is the placeholder."""

    def make(*argv: str, **more: tuple[str, ...]) -> Box:
        return box([str(find_placeholder()), *argv], **more)

    return make


@pytest.fixture(scope="session")
def modes(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Build the inits of init_modes.c."""
    program = tmp_path_factory.mktemp("modes") / "init-modes"
    source = Path(__file__).parent / "init_modes.c"
    subprocess.run(
        ["gcc", "-O1", "-static", "-pthread", "-o", program, source],
        check=True,
        timeout=60,
        capture_output=True,
    )
    return str(program)


# standing in for a worker -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("os._exit(0)", 0),
        ("os._exit(3)", 3),
        ("os._exit(255)", 255),
        ("os.kill(os.getpid(), signal.SIGSEGV)", CRASH),
        ("os.kill(os.getpid(), signal.SIGKILL)", 128 + signal.SIGKILL),
    ],
)
def test_it_ends_as_its_worker_ends(placeholder, end, code):
    """The exit code is the worker's own, and a crash is never a 0."""
    made = placeholder().listens()
    made.adopt(f"until('go')\n{end}")
    made.note("go")
    assert made.code() == code


def test_a_worker_that_ended_before_the_message_keeps_its_code(placeholder):
    """Nothing is reaped before the agent has spoken."""
    made = placeholder().listens()
    inner = made.inject("os._exit(9)")
    wait_for(lambda: status_field(made.host_pid(inner), "State").startswith("Z"))
    other = made.inject("os._exit(4)")
    wait_for(lambda: status_field(made.host_pid(other), "State").startswith("Z"))
    tell(made.pidfd, inner)
    assert made.code() == 9


def test_the_agent_can_read_how_the_worker_ended(placeholder):
    """The zombie stays for a moment before the namespace goes; later the pidfd tells."""
    made = placeholder().listens()
    pid = made.adopt("until('go')\nos._exit(3)")
    pidfd = linux.pidfd_open(pid)
    try:
        assert exit_status(pid, pidfd) is None
        made.note("go")
        assert select.select([pidfd], [], [], DEADLINE)[0]
        assert exit_status(pid, pidfd) == 3 << 8
        assert made.code() == 3
        assert exit_status(pid, pidfd) == 3 << 8
    finally:
        os.close(pidfd)


def test_orphans_are_reaped(placeholder):
    """What the worker's own processes leave behind does not stay, from before or after the message."""
    made = placeholder().listens()
    worker = made.adopt(f"{LEAVE}until('go')\n{LEAVE}note('done')\nuntil('end')\nos._exit(0)")
    wait_for(lambda: children(made.init) == [worker])
    made.note("go")
    made.has("done")
    wait_for(lambda: children(made.init) == [worker])
    made.note("end")
    assert made.code() == 0


def test_signals_are_handed_on(placeholder):
    """What can be caught reaches the worker, which may end itself in its own way."""
    names = ["HUP", "INT", "QUIT", "USR1", "USR2", "PIPE", "ALRM", "CONT", "TSTP", "WINCH", "PWR", "RTMAX"]
    made = placeholder().listens()
    traps = "\n".join(f"signal.signal(signal.SIG{name}, lambda *_: note('{name}'))" for name in names)
    made.adopt(f"{traps}\nsignal.signal(signal.SIGTERM, lambda *_: os._exit(7))\nnote('ready')\n{SLEEPS}")
    made.has("ready")
    for name in names:
        os.kill(made.init, signal.Signals[f"SIG{name}"])
        made.has(name)
    os.kill(made.init, signal.SIGTERM)
    assert made.code() == 7


def test_a_signal_that_follows_the_message_is_for_the_worker(placeholder):
    """However late the placeholder reads them: a pod that is deleted right then stops its worker."""
    made = placeholder().listens()
    inner = made.inject(f"signal.signal(signal.SIGTERM, lambda *_: os._exit(7))\nnote('ready')\n{SLEEPS}")
    made.has("ready")
    os.kill(made.init, signal.SIGSTOP)
    wait_for(lambda: status_field(made.init, "State")[0] == "T")
    tell(made.pidfd, inner)
    os.kill(made.init, signal.SIGTERM)
    os.kill(made.init, signal.SIGCONT)
    assert made.code() == 7


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT])
def test_a_pod_can_be_deleted_before_a_worker_is_there(placeholder, number):
    """The signals that ask to end are obeyed at once."""
    made = placeholder("--", "true").listens()
    os.kill(made.init, number)
    assert made.code() == 128 + number


def test_other_signals_before_a_worker_is_there_change_nothing(placeholder):
    """They are dropped: nobody is there to have them."""
    made = placeholder("false").listens()
    for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD, signal.SIGWINCH, signal.SIGSEGV):
        os.kill(made.init, number)
    made.adopt("os._exit(5)")
    assert made.code() == 5


def test_signals_that_are_no_message_are_ignored(placeholder):
    """A message from inside, one sent by kill(2), and a reserved value are none."""
    made = placeholder("false").listens()
    assert made.inject(
        "libc = ctypes.CDLL(None)\n"
        f"libc.sigqueue(1, {ADOPT_SIGNAL}, ctypes.c_void_p(0))\n"
        f"libc.sigqueue(1, {ADOPT_SIGNAL}, ctypes.c_void_p(1))\n"
        f"os.kill(1, {ADOPT_SIGNAL})\n"
        "note('sent')"
    )
    made.has("sent")
    os.kill(made.init, ADOPT_SIGNAL)
    tell(made.pidfd, -1)
    worker = made.adopt("note('ready')\nuntil('go')\nos._exit(5)")
    made.has("ready")
    for value in (FAILED, 4242):  # it has its worker
        tell(made.pidfd, value)
    wait_for(lambda: children(made.init) == [worker])
    made.note("go")
    assert made.code() == 5


@pytest.mark.parametrize("inner", [4242, 1])
def test_a_worker_that_is_not_there_is_an_error(placeholder, inner):
    """A wrong pid ends the container with a code of its own and a line that says why."""
    made = placeholder().listens()
    tell(made.pidfd, inner)
    assert made.code() == 125
    assert made.err.read_text() == f"hibernode-placeholder: process {inner} is not there to be adopted\n"


def test_a_worker_of_another_init_is_watched(placeholder, box):
    """Where pid 1 is another program that reaps the worker, the kernel still tells the code."""
    code = f"""
import os, sys
child = os.fork()
if child == 0:
    os.execv({str(find_placeholder())!r}, ["placeholder"])
while True:
    pid, status = os.wait()
    if pid == child:
        os._exit(os.waitstatus_to_exitcode(status))
"""
    made = box([sys.executable, "-c", code])
    wait_for(lambda: any(map(recognise, children(made.init))))
    pid = next(filter(recognise, children(made.init)))
    pidfd = linux.pidfd_open(pid)
    try:
        inner = made.inject("signal.signal(signal.SIGHUP, lambda *_: os._exit(6))\nnote('ready')\n" + SLEEPS)
        made.has("ready")
        tell(pidfd, inner)
        wait_for(lambda: any("pidfd" in os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()))
        os.kill(pid, signal.SIGHUP)
        assert made.code() == 6
    finally:
        os.close(pidfd)


def test_it_needs_nothing_of_its_image(box, tmp_path):
    """An empty root, no /proc, and closed descriptors do: it opens none of 0, 1 and 2 again."""
    root = tmp_path / "root"
    root.mkdir()
    shutil.copy(find_placeholder(), root / "p")
    root.chmod(0o555)
    shell = 'exec unshare --pid --fork --kill-child --root "$0" -- /p <&- >&- 2>&-'
    made = box(["sh", "-c", shell, str(root)])
    wait_for(lambda: any(map(recognise, descendants(made.init))))
    made.init = next(filter(recognise, descendants(made.init)))
    os.close(made.pidfd)
    made.pidfd = linux.pidfd_open(made.init)
    assert [entry.name for entry in Path(f"/proc/{made.init}/fd").iterdir()] == ["3", "4"]
    made.adopt("os._exit(11)")
    assert made.code() == 11


def descendants(pid: int) -> list[int]:
    """List the processes below ``pid``."""
    below = children(pid)
    return below + [deeper for child in below for deeper in descendants(child)]


# cold start -------------------------------------------------------------------------------------------


def test_a_cold_start_is_the_command_as_pid_1(placeholder, tmp_path):
    """No signal is blocked or ignored, whatever was inherited, and nothing dead is left."""
    code = f"WORK = {str(tmp_path)!r}\n{HEADER}\nnote('ready', os.getpid())\n{SLEEPS}"
    inherited = ("env", "--ignore-signal=HUP,CHLD", "--block-signal=USR1")
    made = placeholder("--", sys.executable, "-SEc", code, before=inherited).listens()
    made.inject("os._exit(0)")
    wait_for(lambda: [status_field(pid, "State")[0] for pid in children(made.init)] == ["Z"])
    tell(made.pidfd, FAILED)
    wait_for((tmp_path / "ready").exists)
    assert (tmp_path / "ready").read_text() == "1"
    assert int(status_field(made.init, "SigBlk"), 16) == 0
    ignored = int(status_field(made.init, "SigIgn"), 16)
    assert ignored == 1 << signal.SIGPIPE - 1 | 1 << signal.SIGXFSZ - 1  # these are Python's own
    assert children(made.init) == []
    assert not recognise(made.init)


def test_without_a_command_a_refusal_leaves_it_waiting(placeholder):
    """Another try may come."""
    made = placeholder().listens()
    tell(made.pidfd, FAILED)
    made.adopt("os._exit(8)")
    assert made.code() == 8


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        pytest.param(["--wait", "0", "sh", "-c", "exit 12"], 12, "", id="cold start when nothing comes"),
        pytest.param(["--wait", "1", "sh", "-c", "exit 12"], 12, "", id="cold start after a while"),
        pytest.param(["--wait", "0"], 124, "", id="nothing comes and there is no command"),
        pytest.param(
            ["--wait", "0", "--", "/nowhere/x"], 127, "/nowhere/x: No such file", id="no such command"
        ),
        pytest.param(["--wait", "0", "no-such-program"], 127, "no-such-program: No such", id="not on PATH"),
        pytest.param(["--wait", "0", "/etc/passwd"], 126, "/etc/passwd: Permission denied", id="no program"),
        pytest.param(["--wait"], 2, "--wait: not understood", id="a flag without its value"),
        pytest.param(["--wait", "-1"], 2, "not understood", id="a negative time"),
        pytest.param(["--wait", "1x"], 2, "1x: not understood", id="a time that is no number"),
        pytest.param(["--wait", "9" * 30], 2, "not understood", id="a time without end"),
        pytest.param(["--other"], 2, "--other: not understood", id="an unknown flag"),
    ],
)
def test_what_it_does_by_itself(argv, code, says):
    """Exit codes and messages are those of its header."""
    unshare = ["unshare", "--pid", "--fork", "--kill-child", "--", find_placeholder(), *argv]
    done = subprocess.run(
        unshare, capture_output=True, text=True, timeout=DEADLINE, check=False, stdin=subprocess.DEVNULL
    )
    assert done.returncode == code
    assert says in done.stderr
    assert bool(done.stderr) == bool(says)


# foreign inits ----------------------------------------------------------------------------------------

THREADS = """
import threading, time
for _ in range(4):
    threading.Thread(target=time.sleep, args=(1000,)).start()
print("ready", flush=True)
"""


def ready(made: Box) -> Box:
    """Wait until an init has printed its line."""
    wait_for(lambda: made.out.read_text().startswith("ready"))
    return made


def sleeping(made: Box) -> Box:
    """Wait until init is asleep in the program that it was to become."""
    wait_for(
        lambda: status_field(made.init, "Name") != "unshare" and status_field(made.init, "State")[0] == "S"
    )
    return made


@pytest.mark.parametrize("code", [0, 3, 42, 137, 255])
def test_a_sleeping_init_ends_with_the_code_it_is_given(box, code):
    """What Dynamo's operator has as a placeholder ends with the worker's code, and its parent sees it."""
    made = sleeping(box(["sleep", "infinity"]))
    assert end_with(made.init, code, made.pidfd) == ""
    assert made.code() == code


def test_a_static_init_ends_with_the_code_it_is_given(box):
    """No libc that we know is needed."""
    made = sleeping(box(["busybox", "sleep", "100000"]))
    assert end_with(made.init, 42) == ""
    assert made.code() == 42


def test_an_init_of_many_threads_ends_with_the_code_it_is_given(box):
    """One thread ends them all."""
    made = ready(box([sys.executable, "-c", THREADS]))
    assert end_with(made.init, 42, made.pidfd) == ""
    assert made.code() == 42


@pytest.mark.parametrize("mode", ["spin", "first-thread-gone"])
def test_an_odd_init_ends_with_the_code_it_is_given(box, modes, mode):
    """One that makes no system call, and one whose first thread has ended alone."""
    made = ready(box([modes, mode]))
    assert end_with(made.init, 42, made.pidfd) == ""
    assert made.code() == 42


def test_a_stopped_init_ends_with_the_code_it_is_given(box):
    """A stopped process is taken on like any other, and signals that wait for it do not change the code."""
    made = sleeping(box(["sleep", "infinity"]))
    os.kill(made.init, signal.SIGSTOP)
    wait_for(lambda: status_field(made.init, "State")[0] == "T")
    os.kill(made.init, signal.SIGUSR1)
    assert end_with(made.init, 42, made.pidfd) == ""
    assert made.code() == 42


@pytest.mark.parametrize(
    ("mode", "says"),
    [
        pytest.param("vfork", "did not stop", id="a process in the D state"),
        pytest.param("no-exit-group", "seccomp", id="a filter that forbids it"),
    ],
)
def test_an_init_that_cannot_be_told_is_killed(box, modes, mode, says):
    """The container then ends with a code that is no success, and the answer says why."""
    made = ready(box([modes, mode]))
    text = end_with(made.init, 0, made.pidfd)
    assert text.startswith(f"pid {made.init} was killed: ")
    assert says in text
    assert made.ended_by() == signal.SIGKILL


if platform.machine() == "x86_64":

    def test_a_32_bit_init_is_killed(box, tmp_path):
        """Its registers are others; nothing is tried."""
        source, program = tmp_path / "narrow.c", tmp_path / "narrow"
        source.write_text(
            "void _start(void) { for (;;) { int r; "
            '__asm__ volatile("int $0x80" : "=a"(r) : "a"(29) : "memory"); } }'  # pause
        )
        build = ["gcc", "-m32", "-nostdlib", "-static", "-fno-pie", "-no-pie", "-o", program, source]
        subprocess.run(build, check=True, timeout=60, capture_output=True)
        made = sleeping(box([str(program)]))
        assert end_with(made.init, 0, made.pidfd) == f"pid {made.init} was killed: it is no 64-bit process"
        assert made.ended_by() == signal.SIGKILL


def test_an_init_that_somebody_else_traces_is_killed(box):
    """Only one may trace a process."""
    made = sleeping(box(["sleep", "infinity"]))
    with subprocess.Popen(
        [sys.executable, "-c", TRACE, str(made.init)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout
        assert process.stdout.readline() == b"0\n"
        assert "Operation not permitted" in end_with(made.init, 0, made.pidfd)
        process.communicate(b"\n", DEADLINE)
    assert made.ended_by() == signal.SIGKILL


def test_a_child_of_somebody_outside_holds_an_init_up(box):
    """The kernel keeps init until they are reaped; the call comes back, and the code is kept."""
    made = sleeping(box(["sleep", "infinity"]))
    code = INJECT.replace("os.fork() == 0", "True").replace(
        "os.waitpid(middle, 0)", "print(1, flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, "os._exit(0)", str(made.init)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout
        assert process.stdout.readline() == b"1\n"
        assert "SIGKILL did not end it" in end_with(made.init, 42, made.pidfd)
        process.communicate(b"\n", DEADLINE)
    assert made.code() == 42


def test_an_init_that_has_ended_is_left_alone(box):
    """Nothing is sent to a pid that may be another's by now."""
    gone, other = (sleeping(box(["sleep", "infinity"])) for _ in range(2))
    linux.pidfd_send_signal(gone.pidfd, signal.SIGKILL)
    assert gone.ended_by() == signal.SIGKILL
    assert end_with(other.init, 0, gone.pidfd) == f"pid {other.init} had ended already"
    assert other.process.poll() is None
    with pytest.raises(ValueError, match="256 is no exit code"):
        end_with(other.init, 256, other.pidfd)


# how a process ended ----------------------------------------------------------------------------------


def zombie(argv: list[str]) -> tuple[subprocess.Popen[bytes], int]:
    """Start a program that waits for its input to end; returns it and a pidfd of it."""
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    return process, linux.pidfd_open(process.pid)


@pytest.mark.parametrize(
    ("argv", "status"),
    [
        pytest.param(["sh", "-c", "read x; exit 0"], 0, id="success"),
        pytest.param(["sh", "-c", "read x; exit 255"], 255 << 8, id="failure"),
        pytest.param(["sh", "-c", "read x; kill -TERM $$"], signal.SIGTERM, id="a signal"),
        pytest.param(["first-thread-gone-7"], 7 << 8, id="the first thread ended before"),
    ],
)
def test_the_wait_status_is_known_before_and_after_reaping(modes, argv, status):
    """It comes from the zombie first, from the pidfd afterwards."""
    process, pidfd = zombie([modes, *argv] if len(argv) == 1 else argv)
    with process:
        assert exit_status(process.pid, pidfd) is None
        assert process.stdin
        process.stdin.close()
        assert select.select([pidfd], [], [], DEADLINE)[0]
        assert exit_status(process.pid, pidfd) == status
        process.wait()
        assert exit_status(process.pid, pidfd) == status
    os.close(pidfd)


def test_a_status_that_may_not_be_read_is_unknown():
    """The kernel shows a 0 to those who may not trace the process; it is not taken for success."""
    process, pidfd = zombie(["sh", "-c", "read x; exit 3"])
    with process:
        assert process.stdin
        process.stdin.close()
        assert select.select([pidfd], [], [], DEADLINE)[0]
        child = os.fork()
        if child == 0:
            os.setresuid(NOBODY, NOBODY, NOBODY)
            stat = Path(f"/proc/{process.pid}/stat").read_text().split()
            os._exit(42 if (stat[51], exit_status(process.pid, pidfd)) == ("0", None) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
    os.close(pidfd)
