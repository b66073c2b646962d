"""What the server listens on: bound TCP sockets, and a Unix socket that one agent holds at a time."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from hibernode.errors import BusyError, StorageError

if TYPE_CHECKING:
    from asyncio.trsock import TransportSocket
    from pathlib import Path

BACKLOG: Final = 1024
_UCRED: Final = struct.Struct("iII")
"""struct ucred of <bits/socket.h>: pid, uid, gid."""


def peer(sock: socket.socket | TransportSocket) -> tuple[int, int]:
    """Return pid and uid of the other end of a Unix socket, as of its connect() or listen()."""
    pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid, uid


async def tcp_sockets(listen: str, setting: str = "server.listen") -> list[socket.socket]:
    """Bind every address that ``host:port`` stands for; an empty host is all of them.

    :raises StorageError: one of them cannot be had.
    """
    host, _, port = listen.rpartition(":")
    bound: list[socket.socket] = []
    try:
        infos = await asyncio.get_running_loop().getaddrinfo(
            host.strip("[]") or None, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        for family, kind, proto, _, address in dict.fromkeys(infos):
            try:
                sock = socket.socket(family, kind, proto)
            except OSError:
                continue  # a kernel without IPv6
            bound.append(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            # The port anew: getaddrinfo cuts a number that is too large to 16 bits, bind refuses it.
            sock.bind((address[0], int(port), *address[2:]))
            sock.listen(BACKLOG)
    except (OSError, OverflowError, UnicodeError) as error:
        for sock in bound:
            sock.close()
        raise _not_listening(listen, setting, error) from error
    if not bound:
        raise _not_listening(listen, setting, OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT)))
    return bound


def _not_listening(listen: str, setting: str, error: Exception) -> StorageError:
    used = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
    why = "is in use by another program" if used else f"cannot be listened on: {error}"
    return StorageError(
        f"{setting}: {listen} {why}",
        remedy=f"set {setting} to an address of this machine and a free port, such as 127.0.0.1:9465",
        reason="AddressInUse" if used else "ListenFailed",
    )


class SocketLock:
    """The Unix socket's path, held by one agent at a time.

    ``<socket>.lock`` is locked for as long as the agent lives, whatever ends it, so a socket that is
    found while the lock is free belongs to a dead agent.

    :param setting: the key that names the path, for sentences.
    :param mode: of the socket: who may connect.
    :param directory_mode: of its directory where that has to be made.
    """

    def __init__(
        self, path: Path, setting: str = "server.socket", *, mode: int = 0o600, directory_mode: int = 0o750
    ) -> None:
        self.path = path
        self._setting, self._mode, self._directory_mode = setting, mode, directory_mode
        self._lock = -1
        self._inode: tuple[int, int] | None = None

    def listen(self) -> socket.socket:
        """Take the path and listen on it, in a directory that only root can write to.

        :raises BusyError: another agent is running.
        :raises StorageError: the directory or what stands there is not fit.
        """
        self.take()
        with self._said():
            return self._bind()

    def take(self) -> None:
        """Take the path, for somebody else to listen on it. Raises as :meth:`listen`."""
        with self._said():
            self._prepare_directory()
            self._acquire()
            self._remove_stale()

    @contextmanager
    def _said(self) -> Iterator[None]:
        """Say for people what the system refuses."""
        try:
            yield
        except OSError as error:
            raise StorageError(
                f"{self._setting}: {self.path}: {error.strerror or error}",
                remedy=f"set {self._setting} to a path of at most 107 bytes below a directory of root's",
            ) from error

    def release(self) -> None:
        """Remove the socket if it is still ours, and let the next agent in."""
        if self._inode is not None:
            with suppress(OSError):
                status = self.path.lstat()
                if (status.st_dev, status.st_ino) == self._inode:
                    self.path.unlink()
            self._inode = None
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _prepare_directory(self) -> None:
        directory = self.path.parent
        directory.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            directory.mkdir(mode=self._directory_mode)
            directory.chmod(self._directory_mode)
        status = directory.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise StorageError(
                f"{self._setting}: {directory} can be written to by others than the agent's user",
                remedy=f"chown root {directory} && chmod 0750 {directory}, or set {self._setting} elsewhere",
                reason="SocketDirectoryUnsafe",
            )

    def _acquire(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        self._lock = os.open(f"{self.path}.lock", flags, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._running() from None

    def _remove_stale(self) -> None:
        try:
            mode = self.path.lstat().st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(mode):
            raise StorageError(
                f"{self._setting}: {self.path} is there and is not a socket",
                remedy=f"remove it, or set {self._setting} to another path",
                reason="NotASocket",
            )
        if self._listener():
            raise self._running()  # somebody removed its lock file
        self.path.unlink()

    def _bind(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            os.fchmod(
                sock.fileno(), self._mode
            )  # the file that bind() makes takes the socket's mode, less umask
            sock.bind(str(self.path))
            status = self.path.lstat()
            self._inode = (status.st_dev, status.st_ino)
            if stat.S_IMODE(status.st_mode) != self._mode:
                self.path.chmod(self._mode)  # the umask took some; nobody else can write to the directory
            sock.listen(BACKLOG)
        except BaseException:
            sock.close()
            raise
        return sock

    def _listener(self) -> int:
        """Return the pid of who listens on the path; 0 if nobody does."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.setblocking(False)  # a full backlog is an answer too
            try:
                sock.connect(str(self.path))
            except BlockingIOError:
                return -1
            except OSError:
                return 0
            return peer(sock)[0]

    def _running(self) -> BusyError:
        pid = self._listener()
        who = f" (pid {pid})" if pid > 0 else ""
        return BusyError(
            f"another agent is running{who}: it holds {self.path}",
            remedy="stop it first, or give this one sockets, state_dir, store and signals of its own",
            reason="AgentRunning",
            pid=pid,
        )
