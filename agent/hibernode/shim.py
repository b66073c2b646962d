"""The parent of one restored worker: starts CRIU, watches the worker, knows its exit code.

It runs as its own small process (``python -I -S shim.py DIR``; standard library and modules of ours that
need no more) so that a restored worker outlives the agent, and so that somebody is its real parent: an exit
code that is not waited for can only be guessed. ``DIR`` is the restore's own directory; ``spec.json`` in it
says what to do, ``state.json`` what has happened, whole at every instant. A lock on ``DIR/lock`` is held
while it lives.

As a child subreaper it inherits what CRIU leaves behind, also the half-restored tree of a CRIU that was
killed, and ends it. A worker that is restored into a container has the container's own init for a parent:
see :mod:`hibernode.shim_container`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import select
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":
    sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # noqa: PTH100, PTH120
if TYPE_CHECKING:
    from hibernode.shim_container import Container
    from hibernode.shim_marker import Marker

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
GRACE_SECONDS = 5.0
FIRST_INHERITED_FD = 200
"""CRIU wants inherited descriptors out of the way of those in the image; it moves its own above these."""

READ_AHEAD_CHUNK = 4 << 20
RESIDENCE_SAMPLES = 256
AWAKE = b"awake\n"
"""What the agent says to a shim whose spec has ``wake``, when the worker can run."""

LOG_NAME = "restore.log"
OUTPUT_NAME = "criu.out"
"""In the restore's directory: CRIU's own log, and what it, or we in its place, have printed."""

OUTPUT_BYTES = 64 << 10
"""Of what CRIU prints so much is kept; beyond it its writes fail, so that it fills no disk."""


def main() -> int:
    """Run the restore in the directory given, then wait for the worker to end."""
    directory = sys.argv[1]
    if os.fork():
        os._exit(0)  # whoever started us has nothing to reap and may end when it likes
    os.chdir(directory)
    os.umask(0o077)
    lock = os.open("lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if os.path.exists("undone"):  # noqa: PTH110
        return 1  # whoever asked for this has given it up
    with open("spec.json", encoding="utf-8") as file:  # noqa: PTH123 - pathlib costs 10 ms of start-up
        spec: dict[str, Any] = json.load(file)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    shim = Shim(spec, libc)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, shim.forward)
    return shim.run()


class MarkerError(Exception):
    """The restore marker cannot be written, so that the worker would not know what it is."""


class NotAwakeError(Exception):
    """Whoever brings the worker's GPU state back has failed, or is gone."""


class Shim:
    """One restore and its worker."""

    def __init__(self, spec: dict[str, Any], libc: ctypes.CDLL) -> None:
        self.spec = spec
        self.libc = libc
        self.root: int | None = None
        self.worker: dict[str, int] = {}
        self.not_held_back = ""
        self.container: Container | None = None
        if spec.get("container"):
            from hibernode.shim_container import Container  # noqa: PLC0415 - half of the restores need none

            self.container = Container(spec["container"], os.getcwd())  # noqa: PTH109
        self.marker: Marker | None = None
        if spec["marker"]:
            from hibernode.shim_marker import Marker  # noqa: PLC0415 - some workers have none

            self.marker = Marker(spec["marker"], self.container.enter_files if self.container else None)

    def run(self) -> int:
        """Restore, answer on standard output, wait for the end."""
        self.save(phase="starting")
        started = time.monotonic()
        try:
            if not self.spec.get("wake"):
                self.write_marker()
            with self.held_back():
                code, timed_out = self.run_criu()
            if self.container:
                self.container.check_mounts(code)
            if code == 0:
                self.root = self.read_root()
                if self.spec.get("wake"):
                    self.wait_awake(self.root)
                    self.write_marker()  # not before: it would use a GPU that it does not have yet
        except Exception as error:  # noqa: BLE001 - whatever it was, the agent is told and the tree is ended
            code, timed_out, self.root = None, False, None
            failure = str(error) if isinstance(error, MarkerError) else f"{type(error).__name__}: {error}"
        else:
            failure = ""
        seconds = time.monotonic() - started
        if self.root is None:
            self.end_children()
            self.remove_marker()
            with contextlib.suppress(OSError):  # on a full disk it is told at least
                self.save(
                    phase="failed", returncode=code, timed_out=timed_out, error=failure, criu_seconds=seconds
                )
            self.answer()
            return 1
        self.worker = {"pid": self.root, "start_ticks": start_ticks(self.root)}
        status = self.container.adopted(self.root) if self.container else self.status()
        if status is not None:
            self.ended(status)
        else:
            self.save(phase="running", **self.worker, criu_seconds=seconds)
        self.answer()
        return self.wait_in(self.container) if self.container else self.wait()

    def wait_awake(self, root: int) -> None:
        """Say that the tree is there, and wait until its GPU state is; a "no" is the end of the agent's pipe.

        In ``state.json`` it is not under ``pid``: who finds it there takes the worker for one that runs.
        It is there so that somebody can end the tree when we are killed.
        """
        self.save(phase="waking", asleep={"pid": root, "start_ticks": start_ticks(root)})
        os.write(1, (json.dumps({**self.state, "pid": root}) + "\n").encode())
        if os.read(0, len(AWAKE)) != AWAKE:
            raise NotAwakeError("the GPU state of the worker was not brought back")

    def status(self) -> int | None:
        """Reap the root if it has ended."""
        assert self.root is not None
        pid, status = os.waitpid(self.root, os.WNOHANG)
        return status if pid else None

    def save(self, **state: Any) -> None:
        """Replace ``state.json``; the last state stays known to :meth:`answer`."""
        self.state = {"shim_pid": os.getpid(), "time": time.time(), **state}
        if self.not_held_back:
            self.state["not_held_back"] = self.not_held_back
        text = json.dumps(self.state, indent=2) + "\n"
        fd = os.open("state.json.tmp", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.rename("state.json.tmp", "state.json")  # noqa: PTH104

    def answer(self) -> None:
        """Tell whoever started us, if they are still there, and let go of their pipe."""
        with contextlib.suppress(OSError):
            os.write(1, (json.dumps(self.state) + "\n").encode())
        null = os.open("/dev/null", os.O_RDWR)
        os.dup2(null, 1)
        os.close(null)

    # the marker ---------------------------------------------------------------------------------------

    def write_marker(self) -> None:
        """Write the restore marker before the worker runs, with the worker's own rights."""
        if self.marker and not self.marker.write():
            raise MarkerError(
                f"the worker's user cannot write the restore marker {self.spec['marker']['path']!r}"
            )

    def remove_marker(self) -> None:
        """Take the marker away again after a failed restore."""
        if self.marker:
            self.marker.remove()

    # CRIU ---------------------------------------------------------------------------------------------

    def held_back(self) -> contextlib.AbstractContextManager[Any]:
        """Drop the packets of the worker's own connections until both ends are there.

        CRIU sends what an end had not sent yet as soon as that end is there. Where the other one is not, the
        kernel answers with a reset, and the restore fails or the connection is dead.
        """
        if self.spec["connections"]:
            from hibernode.host import nftables  # noqa: PLC0415 - few workers have connections inside

            ends = [
                (version, bytes.fromhex(local), local_port, bytes.fromhex(remote), remote_port)
                for version, local, local_port, remote, remote_port in self.spec["connections"]
            ]
            try:
                with self.container.network() if self.container else contextlib.nullcontext():
                    return nftables.hold_back(f"hibernode-{os.getpid()}", ends)
            except OSError as error:  # an old kernel: mostly it goes well without, and a failure is told
                self.not_held_back = f"{error.strerror} (nftables, Linux >= 5.12)"
        return contextlib.nullcontext()

    def run_criu(self) -> tuple[int, bool]:
        """Run ``criu restore``; (return code, negative for a signal; whether the deadline fired)."""
        argv = [*self.spec["criu"], *self.inherited()]
        fds = [FIRST_INHERITED_FD + index for index in range(len(self.spec["inherit"]))]
        self.save(phase="criu")
        if self.container:
            self.container.prepare()
        output = os.memfd_create(OUTPUT_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.truncate(output, OUTPUT_BYTES)
        fcntl.fcntl(output, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        with self.container.pids() if self.container else contextlib.nullcontext():
            pid = self.start(argv, fds, output)
        for fd in fds:
            os.close(fd)
        if self.spec["read_ahead"]:
            threading.Thread(target=read_ahead, args=(self.spec["read_ahead"],), daemon=True).start()
        pidfd = os.pidfd_open(pid)
        timed_out = not ended_within(pidfd, self.spec["deadline_seconds"])
        if timed_out:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGTERM)
            ended_within(pidfd, GRACE_SECONDS)
        if timed_out or os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        os.close(pidfd)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(OSError), open(OUTPUT_NAME, "wb") as file:  # noqa: PTH123 - as above
            file.write(os.pread(output, os.lseek(output, 0, os.SEEK_CUR), 0))
        os.close(output)
        return code, timed_out

    def start(self, argv: list[str], fds: list[int], output: int) -> int:
        """Fork and exec CRIU in a group of its own, to die with us; by hand, for subprocess takes 10 ms."""
        if not os.access(argv[0], os.X_OK):
            raise OSError(errno.ENOENT, f"{argv[0]} cannot be started")
        null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        pid = os.fork()
        if pid == 0:
            try:
                self.libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
                os.setpgid(0, 0)
                for number, fd in ((0, null), (1, output), (2, output)):
                    os.dup2(fd, number)
                if self.container:
                    argv = [*argv, *self.container.enter()]
                for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
                    signal.signal(number, signal.SIG_DFL)
                for fd in fds:
                    os.set_inheritable(fd, True)
                os.chdir("/")
                os.execve(argv[0], argv, self.spec["env"])  # noqa: S606 - an argument list, no shell
            except BaseException as error:  # noqa: BLE001 - it is said where CRIU's own words would be
                os.write(2, f"{type(error).__name__}: {error}\n".encode())
            finally:
                os._exit(127)
        os.close(null)
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)  # whichever of the two comes first; before a signal to the group
        return pid

    def inherited(self) -> list[str]:
        """Open what takes the place of pipe ends outside the tree, and name it to CRIU."""
        args: list[str] = []
        for index, end in enumerate(self.spec["inherit"]):
            if end["mode"] == "read":
                fd = os.open("/dev/null", os.O_RDONLY)
            elif self.container:
                fd = self.container.opened(end["mode"])
            else:
                fd = os.open(end["file"], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
            os.dup2(fd, FIRST_INHERITED_FD + index)
            os.close(fd)
            args += ["--inherit-fd", f"fd[{FIRST_INHERITED_FD + index}]:{end['key']}"]
        return args

    def read_root(self) -> int:
        """Read the root's pid from CRIU's pid file and check that it is ours; it may have ended already."""
        with open(self.spec["pidfile"], encoding="ascii") as file:  # noqa: PTH123
            pid = int(file.read(32))
        if self.container:
            return self.container.host_pid(pid)
        if int(stat_fields(pid)[1]) != os.getpid():
            raise RuntimeError(f"the restored root, pid {pid}, is not our child")
        return pid

    def end_children(self) -> None:
        """End whatever is left of a restore that failed: a killed CRIU leaves half a tree to us."""
        if self.container:
            self.container.end_half_tree()
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline:
            for pid in children():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                return
            time.sleep(0.01)

    # afterwards ---------------------------------------------------------------------------------------

    def forward(self, number: int, _frame: object) -> None:
        """Hand a signal on to the worker."""
        if self.root is not None:
            with contextlib.suppress(ProcessLookupError):
                if self.container:
                    self.container.signal(number)
                else:
                    os.kill(self.root, number)

    def wait(self) -> int:
        """Reap until nothing is left; the root's end is written down when it happens."""
        while True:
            try:
                pid, status = os.waitpid(-1, 0)
            except ChildProcessError:
                return 0
            if pid == self.root:
                self.ended(status)

    def wait_in(self, container: Container) -> int:
        """Wait for a worker that the container's init is the parent of."""
        if self.root is not None:
            self.ended(container.status(self.root))
        container.finish()
        return 0

    def ended(self, status: int | None) -> None:
        """Write down how the worker ended; nothing is guessed where nobody knows."""
        self.root = None  # first of all: it is reaped, so its pid may be another's from now on
        end: dict[str, int] = {}
        if status is not None:
            code = os.waitstatus_to_exitcode(status)
            end = {"exit_code": code} if code >= 0 else {"exit_signal": -code}
        self.save(phase="exited", **self.worker, **end)
        self.remove_marker()  # else the next cold start would take itself for a restored copy


def ended_within(pidfd: int, seconds: float) -> bool:
    """Wait for a process to end; False when the time is up."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def children() -> list[int]:
    """List our own children."""
    with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:  # noqa: PTH123
        return [int(pid) for pid in file.read().split()]


def stat_fields(pid: int) -> list[str]:
    """Read /proc/PID/stat from its third field on; the command may hold any character."""
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
        return file.read().rpartition(")")[2].split()


def start_ticks(pid: int) -> int:
    """Read field 22, the start time in clock ticks since boot."""
    return int(stat_fields(pid)[19])


def read_ahead(paths: list[str]) -> None:
    """Read the images in the order in which CRIU will read them, ahead of it.

    Large reads into a buffer that is thrown away, so that the disk works while CRIU makes pages, whatever
    the disk's own read-ahead is. docs/benchmarks.md has the figures, and those of fadvise(WILLNEED). A file
    that is in memory already is left alone, but one is not skipped in parts: the kernel's own read-ahead
    makes parts look present, and to skip those costs all that was to be gained.
    """
    buffer = bytearray(READ_AHEAD_CHUNK)
    for path in paths:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            size = os.fstat(fd).st_size
            if not in_memory(fd, size):
                for offset in range(0, size, READ_AHEAD_CHUNK):
                    os.preadv(fd, [buffer], offset)
        except OSError:
            pass
        finally:
            os.close(fd)


def in_memory(fd: int, size: int) -> bool:
    """Whether the file can be read without the disk, as far as samples all over it tell."""
    byte = bytearray(1)
    try:
        return all(
            os.preadv(fd, [byte], offset, os.RWF_NOWAIT) == 1
            for offset in range(0, size, max(1, size // RESIDENCE_SAMPLES))
        )
    except BlockingIOError:
        return False


if __name__ == "__main__":
    sys.exit(main())
