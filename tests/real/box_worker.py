"""The worker inside a test's container: plain Python; what it does can be seen from outside.

It counts, and says how far in a state file that is whole at every instant. On the way it leaves traces of
each kind that a checkpoint has to carry: a file of the image changed, one deleted, a directory made anew, new
files, an open log, a file in /dev/shm and a mapping of it, a thread. It speaks the checkpoint contract, and
ends with the number that it finds in the exit file. ``static_worker.c`` does the same without Python.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import json
import mmap
import os
import shutil
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

STATE_BYTES = 4096
PAUSE_SECONDS = 0.02
TICK_EVERY = 10
SHM_BYTES = 1 << 16
NR_IO_URING_SETUP = 425
NUMBER = struct.Struct("=Q")
"""A count, in shared memory and on a socket."""
PATIENCE_SECONDS = 30.0
"""For an answer of the other end: a freeze may lie between."""


def io_uring() -> str:
    """Ask for a ring by the raw system call: "fd", or the error's name."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.syscall(NR_IO_URING_SETUP, 8, ctypes.create_string_buffer(256))
    if fd < 0:
        return errno.errorcode[ctypes.get_errno()]
    os.close(fd)
    return "fd"


def touch_files() -> str:
    """Change the image's tree in every way an overlay knows; "ok", or the error's name."""
    try:
        Path("/etc/box/changed").write_text("changed by the worker\n")
        Path("/etc/box/doomed").unlink()
        shutil.rmtree("/opt/box")
        Path("/opt/box").mkdir()
        Path("/opt/box/new").write_text("new in a new directory\n")
        Path("/srv/box/deep/er").mkdir(parents=True)
        Path("/srv/box/deep/er/file").write_text("new\n")
        os.link("/srv/box/deep/er/file", "/srv/box/hard")
        os.symlink("deep/er/file", "/srv/box/soft")
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return "ok"


def open_log() -> int:
    """Open the log in the root file system; -1 where that cannot be written."""
    try:
        return os.open("/srv/box.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError:
        return -1


def proc_status(field: str) -> str:
    """Read one line of this process's status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(line.split(None, 1)[1] for line in lines if line.startswith(f"{field}:"))


class Thread:
    """A thread that counts too."""

    def __init__(self) -> None:
        self.count = 0
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            self.count += 1
            time.sleep(PAUSE_SECONDS)


class Tree:
    """Two children that count in memory shared with them."""

    def __init__(self) -> None:
        self._shared = mmap.mmap(-1, 4096)
        self.pids = [start(partial(self._child, slot)) for slot in (0, NUMBER.size)]

    def _child(self, slot: int) -> None:
        parent = os.getppid()
        while os.getppid() == parent:
            (count,) = NUMBER.unpack_from(self._shared, slot)
            NUMBER.pack_into(self._shared, slot, count + 1)
            time.sleep(PAUSE_SECONDS)

    def counts(self) -> list[int]:
        """How far each has come."""
        return [NUMBER.unpack_from(self._shared, slot)[0] for slot in (0, NUMBER.size)]


class Echo:
    """A child at the other end of a socket, that answers each number with the next one."""

    def __init__(self, ours: socket.socket, theirs: socket.socket) -> None:
        self._ours = ours
        self.pid = start(partial(self._child, theirs))
        theirs.close()
        self.last = 0

    def _child(self, end: socket.socket) -> None:
        self._ours.close()
        while True:
            message = end.recv(NUMBER.size, socket.MSG_WAITALL)
            if len(message) < NUMBER.size:
                return
            end.sendall(NUMBER.pack(NUMBER.unpack(message)[0] + 1))

    def ping(self) -> int:
        """Send the last answer, wait for the next; a connection that broke ends the worker."""
        self._ours.settimeout(PATIENCE_SECONDS)
        self._ours.sendall(NUMBER.pack(self.last))
        answer = b""
        while len(answer) < NUMBER.size:
            part = self._ours.recv(NUMBER.size - len(answer))
            if not part:
                raise ConnectionError("the other end is gone")
            answer += part
        number: int = NUMBER.unpack(answer)[0]
        if number != self.last + 1:
            raise ConnectionError(f"asked with {self.last}, got {number}")
        self.last = number
        return number


def start(body: Callable[[], None]) -> int:
    """Run ``body`` in a child that ends with it."""
    pid = os.fork()
    if pid == 0:
        try:
            body()
        finally:
            os._exit(0)
    return pid


def unix_echo() -> Echo:
    """Two processes joined by a Unix socket pair."""
    return Echo(*socket.socketpair())


def tcp_echo() -> Echo:
    """Two processes joined by a TCP connection over the loopback; nobody listens any more."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    return Echo(ours, theirs)


def serve(port: int, answer: Callable[[], int]) -> None:
    """Answer the count to whoever connects."""
    server = socket.create_server(("0.0.0.0", port))

    def run() -> None:
        while True:
            connection, _ = server.accept()
            with connection:
                connection.sendall(f"{answer()}\n".encode())

    threading.Thread(target=run, daemon=True).start()


class Worker:
    """What it holds, and its loop."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.count = 0
        self.restored = False
        self.io_uring = io_uring() if args.io_uring else ""
        self.held = [os.urandom(1 << 20) for _ in range(args.mib)]
        self.files = touch_files()
        self.log = open_log()
        # Forks come before the thread.
        self.tree = Tree() if args.tree else None
        self.unix = unix_echo() if args.socketpair else None
        self.tcp = tcp_echo() if args.pair else None
        self.echoes = [echo for echo in (self.unix, self.tcp) if echo is not None]
        shm = os.open(args.shm, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        os.ftruncate(shm, SHM_BYTES)
        self.shm_map = mmap.mmap(shm, SHM_BYTES)
        os.close(shm)
        self.thread = Thread()
        if args.listen:
            serve(args.listen, lambda: self.count)

    def step(self) -> None:
        """Count one further, everywhere."""
        self.count += 1
        NUMBER.pack_into(self.shm_map, 0, self.count)
        if self.log >= 0:
            os.write(self.log, f"line {self.count}\n".encode())
        for echo in self.echoes:
            echo.ping()
        if self.count % TICK_EVERY == 0:
            print("tick", self.count, flush=True)

    def state(self) -> dict[str, object]:
        """Tell all that can be compared before and after."""
        with open(self.args.shm, "rb") as file:
            (in_file,) = NUMBER.unpack(file.read(NUMBER.size))
        return {
            "count": self.count,
            "restored": self.restored,
            "thread": self.thread.count,
            "shm": in_file,
            "files": self.files,
            "io_uring": self.io_uring,
            "held": len(self.held),
            "pid": os.getpid(),
            "proc_self": os.readlink("/proc/self"),
            "pgrp": os.getpgrp(),
            "uid": os.getuid(),
            "hostname": socket.gethostname(),
            "seccomp": int(proc_status("Seccomp")),
            "no_new_privs": int(proc_status("NoNewPrivs")),
            "capabilities": proc_status("CapEff"),
            "pids": [*(self.tree.pids if self.tree else []), *(echo.pid for echo in self.echoes)],
            "children": self.tree.counts() if self.tree else [],
            "unix": self.unix.last if self.unix else -1,
            "tcp": self.tcp.last if self.tcp else -1,
        }

    def save(self) -> None:
        """Write the state: one write over a file that keeps its name and its size.

        A dump may fall between open and close, and the restored copy has to find the file as it was.
        """
        fd = os.open(self.args.state, os.O_WRONLY | os.O_CREAT, 0o644)
        os.pwrite(fd, json.dumps(self.state()).encode().ljust(STATE_BYTES), 0)
        os.close(fd)

    def run(self) -> int:
        """Say ready, poll, count; return the exit code."""
        signal_file, marker, ready = (
            os.environ.get(f"DYN_{name}_FILE", "")
            for name in ("CHECKPOINT_SIGNAL", "RESTORE_MARKER", "CHECKPOINT_READY")
        )
        self.step()
        self.save()
        if ready and not self.args.no_ready:
            Path(ready).touch()
        while True:
            self.step()
            if not self.restored and marker and os.path.exists(marker):
                self.restored = True
                print("restored at", self.count, flush=True)
            self.save()
            if not self.restored and signal_file and os.path.exists(signal_file):
                return 0 if json.loads(Path(signal_file).read_text())["success"] else 3
            if os.path.exists(self.args.exit_file):
                return int(Path(self.args.exit_file).read_text())
            time.sleep(PAUSE_SECONDS)


def main() -> int:
    """Read the arguments, run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--state", default="/srv/state.json")
    parser.add_argument("--exit-file", default="/srv/exit-code")
    parser.add_argument("--shm", default="/dev/shm/box")
    parser.add_argument("--mib", type=int, default=4, help="memory to hold")
    parser.add_argument("--io-uring", action="store_true", help="ask for a ring first")
    parser.add_argument("--no-ready", action="store_true")
    parser.add_argument("--tree", action="store_true", help="two children that count")
    parser.add_argument("--socketpair", action="store_true", help="a child behind a Unix socket pair")
    parser.add_argument("--pair", action="store_true", help="a child behind a TCP connection")
    parser.add_argument("--listen", type=int, default=0, metavar="PORT", help="answer the count")
    args = parser.parse_args()
    print("worker starts", flush=True)
    print("worker's standard error", file=sys.stderr, flush=True)
    return Worker(args).run()


if __name__ == "__main__":
    sys.exit(main())
