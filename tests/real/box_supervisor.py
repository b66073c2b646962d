"""The parent of one runc or crun container: it collects what the container says and learns how it ended.

Usage: ``box_supervisor.py FOLDER RUNTIME-COMMAND...``. The command starts a container in the background and
leaves its init in ``FOLDER/pid``; init then becomes a child of this process, which is a subreaper. The
container's stdout and stderr, or its terminal, go to ``FOLDER/log``; ``FOLDER/exit`` gets init's exit code
(128 + N for a signal), ``FOLDER/failed`` the runtime's words when it did not start. When stdin closes, the
tests are gone, and the container is killed. Only the standard library: it starts in a few milliseconds.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
SECONDS_BETWEEN_REAPS = 0.5
CONSOLE = "console.sock"


def put(path: Path, text: str) -> None:
    """Write a file that appears whole."""
    new = path.with_name(f".{path.name}")
    new.write_text(text)
    new.rename(path)


def receive(server: socket.socket) -> int:
    """Take the terminal that the runtime hands over."""
    connection, _ = server.accept()
    with connection:
        _, ancillary, _, _ = connection.recvmsg(4096, socket.CMSG_SPACE(4))
        return array.array("i", ancillary[0][2])[0]


class Supervisor:
    """The files of one container, and what is still open of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self.sources: list[int] = []
        self.init = 0

    def start(self, command: list[str]) -> bool:
        """Run the runtime with a pipe each for stdout and stderr."""
        terminal = socket.socket(socket.AF_UNIX) if CONSOLE in " ".join(command) else None
        if terminal:
            terminal.bind(str(self.folder / CONSOLE))
            terminal.listen()
        pipes = [os.pipe(), os.pipe()]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=pipes[0][1], stderr=pipes[1][1], check=False
        )
        for _, write in pipes:
            os.close(write)
        self.sources = [read for read, _ in pipes]
        for read in self.sources:
            os.set_blocking(read, False)
        if done.returncode:
            self.drain()
            put(self.folder / "failed", f"{command}: {done.returncode}\n{(self.folder / 'log').read_text()}")
            return False
        if terminal:
            self.sources.append(receive(terminal))
            os.set_blocking(self.sources[-1], False)
        self.init = int((self.folder / "pid").read_text())
        return True

    def drain(self) -> None:
        """Take what lies in the pipes; close those that ended."""
        for source in list(self.sources):
            try:
                while data := os.read(source, 1 << 16):
                    os.write(self.log, data)
            except BlockingIOError:
                continue
            except OSError:  # a terminal that nobody holds any more
                pass
            os.close(source)
            self.sources.remove(source)

    def reap(self) -> None:
        """Reap all that ended below; say so when it is init."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self.init:
                    self.init = 0
                    self.drain()
                    code = os.waitstatus_to_exitcode(status)
                    put(self.folder / "exit", str(code if code >= 0 else 128 - code))

    def run(self) -> None:
        """Collect until the container has ended and nobody holds its output, or the tests are gone."""
        ended = os.pidfd_open(self.init)
        lifeline = sys.stdin.fileno()
        while self.init or self.sources:
            watched = [*self.sources, lifeline, *([ended] if self.init else [])]
            ready = select.select(watched, [], [], SECONDS_BETWEEN_REAPS)[0]
            if lifeline in ready:
                if self.init:
                    signal.pidfd_send_signal(ended, signal.SIGKILL)
                return
            self.drain()
            self.reap()


def main() -> None:
    """Start, then watch."""
    if ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError("no subreaper")
    supervisor = Supervisor(Path(sys.argv[1]))
    if supervisor.start(sys.argv[2:]):
        put(supervisor.folder / "started", "")
        supervisor.run()


if __name__ == "__main__":
    main()
