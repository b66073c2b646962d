"""The door of the metadata service: every connection passes here before gRPC sees it.

gRPC for Python does not tell who is at the other end of a Unix socket, and has no limit on connections. So
gRPC listens on a socket in a private directory only, and this module listens where workers connect: it
learns who a caller is, waits for the first bytes of HTTP/2, and then hands bytes on, as long as not too many
of them are of requests that do not end. Its end of the private connection is bound to a name that the kernel
chose, which gRPC gives as the peer's address: that tells a method who called. Half-open connections never
reach gRPC.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hibernode.errors import HibernodeError, TooLargeError
from hibernode.metadata.access import Caller
from hibernode.metadata.frames import Unfinished
from hibernode.metadata.shares import Share

log = logging.getLogger("hibernode.metadata")

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""What every HTTP/2 client sends first (RFC 9113, section 3.4)."""

ABSTRACT: Final = "unix-abstract:"
"""How gRPC spells the peer whose Unix socket has a name in the abstract namespace."""

HIGH_WATER: Final = 256 << 10
"""Bytes that wait for a slow end before the other one is no longer read."""


FLUSH_SECONDS: Final = 2.0
"""How long the last bytes may take to a peer whose other end has closed."""


@dataclass(frozen=True, slots=True)
class Doors:
    """Limits: connections in all and of one caller, bytes of unfinished requests, seconds to the first bytes.

    Of the bytes a caller may have a quarter.
    """

    connections: int = 512
    per_caller: int = 64
    unfinished: int = 256 << 20
    preface_seconds: float = 5.0


Identify = Callable[[socket.socket], Caller]
"""Tells who is at the other end. It may raise a HibernodeError: the connection is closed."""


class Front:
    """Listens, identifies, and forwards to gRPC's socket at ``private``."""

    def __init__(self, private: Path, doors: Doors) -> None:
        self._private, self._doors = private, doors
        self._tasks: set[asyncio.Task[None]] = set()
        self._served: dict[asyncio.Task[None], Caller] = {}
        self._pipes: set[_Pipe] = set()
        self._held: Counter[str] = Counter()
        self._unfinished = Share(doors.unfinished, "bytes")
        self._callers: dict[str, Caller] = {}
        self.refused: Counter[str] = Counter()
        self.barred: Callable[[Caller], bool] = lambda _: False
        """Tells who gets no connection now: a process that is being frozen must have none to outside."""

    @property
    def connections(self) -> int:
        """Connections that are open now."""
        return self._held.total()

    def caller(self, peer: str) -> Caller | None:
        """Find who called, by gRPC's name for the peer."""
        return self._callers.get(peer)

    def listen(self, sock: socket.socket, identify: Identify) -> None:
        """Take connections of a listening socket; it is closed by :meth:`stop`."""
        sock.setblocking(False)
        task = asyncio.create_task(self._accept(sock, identify), name="metadata front")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def cut(self) -> None:
        """Close the connections of those who are barred."""
        tasks = [task for task, caller in self._served.items() if self.barred(caller)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def stop(self) -> None:
        """Close everything."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for pipe in list(self._pipes):
            pipe.abort()

    async def _accept(self, sock: socket.socket, identify: Identify) -> None:
        loop = asyncio.get_running_loop()
        with sock:
            while True:
                try:
                    found, _ = await loop.sock_accept(sock)
                except OSError as error:
                    # No descriptors or memory left, or the peer went: neither may spin or end this.
                    log.debug("accept: %s", error)
                    await asyncio.sleep(0.05)
                    continue
                self._admit(found, identify)

    def _admit(self, sock: socket.socket, identify: Identify) -> None:
        try:
            if self.connections >= self._doors.connections:
                return self._refuse(sock, "TooManyConnections")
            caller = identify(sock)
        except (HibernodeError, OSError) as error:
            log.debug("connection refused: %s", error)
            return self._refuse(sock, getattr(error, "reason", "PeerGone"))
        if self.barred(caller):
            return self._refuse(sock, "WorkerFrozen")
        if self._held[caller.key] >= self._doors.per_caller:
            return self._refuse(sock, "TooManyOfCaller")
        self._held[caller.key] += 1
        task = asyncio.create_task(self._serve(sock, caller))
        self._tasks.add(task)
        self._served[task] = caller
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(self._served.pop)
        return None

    def _refuse(self, sock: socket.socket, reason: str) -> None:
        self.refused[reason] += 1
        sock.close()

    async def _serve(self, sock: socket.socket, caller: Caller) -> None:
        """Carry one connection from its first bytes to its end."""
        loop, name = asyncio.get_running_loop(), ""
        inner = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        pipe = _Pipe(lambda more: self._count(caller, more))
        self._pipes.add(pipe)
        try:
            with contextlib.suppress(TimeoutError, OSError):
                async with asyncio.timeout(self._doors.preface_seconds):
                    first = await self._preface(sock)
                    if first is None:
                        self.refused["NotHttp2"] += 1
                        return
                    inner.setblocking(False)
                    inner.bind(b"")  # the kernel chooses a name that nobody else has
                    name = ABSTRACT + inner.getsockname()[1:].decode()
                    self._callers[name] = caller
                    await loop.sock_connect(inner, str(self._private))
                    await loop.connect_accepted_socket(lambda: pipe.ends[0], sock)
                    await loop.create_connection(lambda: pipe.ends[1], sock=inner)
                pipe.start(first)
                await pipe.closing.wait()
                async with asyncio.timeout(FLUSH_SECONDS):
                    await pipe.ended.wait()
        finally:
            pipe.abort()
            self._unfinished.give(caller.key, pipe.counted)
            self._pipes.discard(pipe)
            self._callers.pop(name, None)
            sock.close()
            inner.close()
            self._held[caller.key] -= 1
            if not self._held[caller.key]:
                del self._held[caller.key]

    def _count(self, caller: Caller, more: int) -> bool:
        """Count bytes of requests that have not ended; False: the caller has too many."""
        try:
            self._unfinished.take(caller.key, more) if more > 0 else self._unfinished.give(caller.key, -more)
        except TooLargeError as error:
            self.refused[error.reason] += 1
            return False
        return True

    @staticmethod
    async def _preface(sock: socket.socket) -> bytes | None:
        """Read the first bytes; None if they are not HTTP/2's."""
        loop, got = asyncio.get_running_loop(), b""
        while len(got) < len(PREFACE):
            data = await loop.sock_recv(sock, len(PREFACE) - len(got))
            got += data
            if not data or not PREFACE.startswith(got):
                return None
        return got


class _Pipe:
    """Two transports that hand each other what they read, no faster than the other end takes it.

    ``count`` is told how many bytes more are of requests that have not ended; it says whether that may be.
    """

    def __init__(self, count: Callable[[int], bool]) -> None:
        self.counted = 0
        self._count, self._unfinished = count, Unfinished()
        self.ends = (_End(self, self._unfinished.asked), _End(self, self._unfinished.answered))
        self.ends[0].other, self.ends[1].other = self.ends[1], self.ends[0]
        self.closing, self.ended = asyncio.Event(), asyncio.Event()
        self._open = len(self.ends)

    def lost(self) -> None:
        """Take in that an end is closed: the other one has what was on its way flushed, no more."""
        self._open -= 1
        self.closing.set()
        if not self._open:
            self.ended.set()

    def admits(self) -> bool:
        """Count what has changed; False: the connection is to end."""
        now = self._unfinished.bytes
        if now != self.counted:
            if not self._count(now - self.counted):
                return False
            self.counted = now
        return True

    def start(self, first: bytes) -> None:
        """Begin to read, with what was read already going to the inner end."""
        if self.closing.is_set():
            return
        self.ends[1].write(first)
        for end in self.ends:
            end.resume()

    def abort(self) -> None:
        """End both directions at once."""
        for end in self.ends:
            if end.transport is not None:
                end.transport.abort()


class _End(asyncio.Protocol):
    """One end of a pipe."""

    def __init__(self, pipe: _Pipe, note: Callable[[bytes], None]) -> None:
        self._pipe, self._note = pipe, note
        self.other: _End | None = None
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.pause_reading()
        transport.set_write_buffer_limits(HIGH_WATER)
        self.transport = transport

    def write(self, data: bytes) -> None:
        if self.transport is not None:
            self.transport.write(data)

    def resume(self) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self.transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        assert self.other is not None
        self._note(data)
        if self._pipe.admits():
            self.other.write(data)
        else:
            self._pipe.abort()

    def eof_received(self) -> bool:
        """Let what is on its way to the other end arrive; HTTP/2 has no use for half a connection."""
        if self.other is not None and self.other.transport is not None:
            self.other.transport.close()
        return False

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        if self.other is not None and self.other.transport is not None:
            self.other.transport.close()
        self._pipe.lost()

    def pause_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None:
            self.other.resume()
