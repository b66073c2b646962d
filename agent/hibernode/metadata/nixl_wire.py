"""What NIXL agents speak on their listener ports: asking for a blob, and answering in a worker's stead.

A frame is a length of eight bytes, little-endian, and that many bytes: ``NIXLCOMM:SEND`` asks for the blob,
``NIXLCOMM:LOAD`` and the blob answer, ``NIXLCOMM:INVL`` and a name tell that an agent goes. There is no
authentication: who connects gets the blob.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Self

from hibernode.errors import DeadlineError, HibernodeError, NotFoundError, RefusedError, StorageError
from hibernode.metadata.nixl_blob import LISTENER_MARK, MAX_BLOB_BYTES, too_large

_log: Final = logging.getLogger("hibernode.nixl")

SEND: Final = LISTENER_MARK + b"SEND"
LOAD: Final = LISTENER_MARK + b"LOAD"
INVL: Final = LISTENER_MARK + b"INVL"

_LENGTH: Final = struct.Struct("<Q")
_CHUNK: Final = 64 << 10
_KEEPALIVE: Final = {socket.TCP_KEEPIDLE: 60, socket.TCP_KEEPINTVL: 15, socket.TCP_KEEPCNT: 4}
"""Seconds, seconds, probes: a peer whose machine has gone is found out in two minutes."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Who asks: an IPv4 address and a port."""

    host: str
    port: int


Find = Callable[[Peer], Awaitable[bytes | None]]
"""Returns the blob for a peer that asks, or None if there is none now."""


async def fetch_blob(host: str, port: int, *, deadline: float, max_bytes: int = MAX_BLOB_BYTES) -> bytes:
    """Ask the NIXL agent that listens at ``host``:``port`` for its current blob.

    The blob is as untrusted as whoever listens there: :func:`~hibernode.metadata.nixl_blob.read_header` next.

    :param host: an IPv4 address; NIXL listens on no other.
    :param deadline: seconds for all of it.
    :raises NotFoundError: ``ListenerUnreachable``, or ``NoBlob``: it has none, since no backend is up.
    :raises DeadlineError: ``ListenerTimeout``.
    :raises RefusedError: ``BadEndpoint``, ``BlobTooLarge``, or ``NotAListener``: it speaks something else.
    """
    try:
        address = ipaddress.IPv4Address(host)
    except ValueError:
        address = None
    if address is None or not 0 < port < 1 << 16:
        raise RefusedError(
            f"{host!r:.200}:{port} is no IPv4 address and port",
            remedy="NIXL listens on IPv4 only, and takes no host names",
            reason="BadEndpoint",
        )
    where = f"{address}:{port}"
    try:
        async with asyncio.timeout(deadline):
            reader, writer = await asyncio.open_connection(str(address), port)
            try:
                return await _ask(reader, writer, where, max_bytes)
            finally:
                writer.transport.abort()  # nothing of ours is under way that a close would have to wait for
    except TimeoutError:
        raise DeadlineError(
            f"the NIXL listener at {where} has not sent its blob within {deadline:g} s",
            remedy="the worker may be stopped or busy; try again",
            reason="ListenerTimeout",
        ) from None
    except asyncio.IncompleteReadError:
        raise _not_a_listener(where, "it hung up") from None
    except OSError as error:
        raise NotFoundError(
            f"no NIXL listener answers at {where}: {error.strerror or error}",
            remedy="the worker has ended, or MX_METADATA_PORT names another port",
            reason="ListenerUnreachable",
        ) from error


async def _ask(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, where: str, max_bytes: int
) -> bytes:
    writer.write(_LENGTH.pack(len(SEND)) + SEND)
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if length < len(LOAD):
        raise _not_a_listener(where, f"its answer has {length} bytes")
    if (head := await reader.readexactly(len(LOAD))) != LOAD:
        raise _not_a_listener(where, f"it answered {head!r}")
    size = length - len(LOAD)
    if size > max_bytes:
        raise too_large(size, max_bytes)
    if size == 0:
        raise NotFoundError(
            f"the NIXL agent at {where} has no blob",
            remedy="none of its backends can be reached from other processes; it needs UCX or LIBFABRIC",
            reason="NoBlob",
        )
    return await reader.readexactly(size)  # memory grows with what arrives, not with what is claimed


def _not_a_listener(where: str, what: str) -> RefusedError:
    return RefusedError(
        f"what listens at {where} is no NIXL agent: {what}",
        remedy="MX_METADATA_PORT and MX_WORKER_GRPC_PORT must not overlap",
        reason="NotAListener",
    )


@dataclass(frozen=True, slots=True)
class Limits:
    """What one port gives its callers.

    ``connections``: at a time; one more ends the one that has been quiet longest. ``blob_bytes``: the
    largest blob that is sent, or that a caller may send. ``first``: seconds from the connection to a whole
    first request. ``body``: seconds for the rest of a later frame, and again for finding and sending the
    answer. ``idle``: seconds between requests; long, for stock agents keep the connection, and do not notice
    when it is gone: their next request is lost.
    """

    connections: int = 256
    blob_bytes: int = MAX_BLOB_BYTES
    first: float = 5.0
    body: float = 5.0
    idle: float = 3600.0


@dataclass(slots=True)
class Counts:
    """What happened on a port. ``empty``: there was no blob; ``crowded``: ended for a newer connection."""

    connections: int = 0
    answered: int = 0
    empty: int = 0
    refused: int = 0
    timed_out: int = 0
    crowded: int = 0


class WireServer:
    """One listening port that answers as the listener of one NIXL agent would. See :func:`serve`."""

    def __init__(self, find: Find, limits: Limits) -> None:
        self.counts = Counts()
        self._find = find
        self._limits = limits
        self._server: asyncio.Server | None = None
        self._open: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        """In the order of their last request: who has been quiet longest comes first."""

    async def __aenter__(self) -> Self:
        """Give itself: it listens already."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close."""
        await self.close()

    @property
    def port(self) -> int:
        """The port that it listens on."""
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    @property
    def connections(self) -> int:
        """How many are connected now."""
        return len(self._open)

    async def listen(self, host: str, port: int) -> None:
        """Begin; once."""
        try:
            self._server = await asyncio.start_server(
                self._accepted, host, port, family=socket.AF_INET, limit=_CHUNK, backlog=1024
            )
        except (OSError, OverflowError) as error:
            raise StorageError(
                f"the NIXL port {host}:{port} cannot be listened on: {error}",
                remedy="choose another port; 0 takes a free one",
                reason="ListenFailed",
            ) from error

    async def close(self) -> None:
        """Listen no more and end every connection."""
        if self._server is not None:
            self._server.close()
        tasks = list(self._open)
        for writer in self._open.values():
            writer.transport.abort()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._open.clear()

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.counts.connections += 1
        if len(self._open) >= self._limits.connections:
            self.counts.crowded += 1
            quietest = next(iter(self._open))
            self._open.pop(quietest).transport.abort()
        task = asyncio.get_running_loop().create_task(self._talk(reader, writer))
        self._open[task] = writer
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._open.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a NIXL connection failed", exc_info=error)

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = writer.get_extra_info("peername") or ("", 0)
        peer = Peer(host, port)
        try:
            _tune(writer)
            async with asyncio.timeout(self._limits.first):
                request = await self._request(reader)
            while await self._serve(request, peer, writer):
                async with asyncio.timeout(self._limits.idle):
                    begin = await reader.readexactly(1)
                async with asyncio.timeout(self._limits.body):
                    request = await self._request(reader, begin)
        except TimeoutError:
            self.counts.timed_out += 1
        except (OSError, asyncio.IncompleteReadError):
            pass  # it has gone
        finally:
            writer.transport.abort()

    async def _request(self, reader: asyncio.StreamReader, begin: bytes = b"") -> bytes:
        """Read a frame and return the command that it begins with; empty: it is too large."""
        raw = begin + await reader.readexactly(_LENGTH.size - len(begin))
        (length,) = _LENGTH.unpack(raw)
        if length > len(LOAD) + self._limits.blob_bytes:
            return b""
        command = await reader.readexactly(min(length, len(SEND)))
        left = length - len(command)
        while left > 0:  # an agent's own blob; what we hand out comes from elsewhere
            if not (chunk := await reader.read(min(left, _CHUNK))):
                raise asyncio.IncompleteReadError(b"", left)
            left -= len(chunk)
        return command

    async def _serve(self, request: bytes, peer: Peer, writer: asyncio.StreamWriter) -> bool:
        """Answer a request; false: the connection is of no use."""
        if (task := asyncio.current_task()) in self._open:
            self._open[task] = self._open.pop(task)
        if request in (LOAD, INVL):  # an agent tells of itself; it may ask on the same connection next
            return True
        if request != SEND:
            self.counts.refused += 1
            return False
        async with asyncio.timeout(self._limits.body):
            blob = await self._blob(peer)
            # An agent whose blob cannot be had answers just so. The caller logs it, and asks again later.
            writer.write(_LENGTH.pack(len(LOAD) + len(blob)) + LOAD)
            view = memoryview(blob)
            for start in range(0, len(blob), _CHUNK):
                writer.write(view[start : start + _CHUNK])
                await writer.drain()
        if blob:
            self.counts.answered += 1
        else:
            self.counts.empty += 1
        return True

    async def _blob(self, peer: Peer) -> bytes:
        try:
            blob = await self._find(peer) or b""
        except HibernodeError as error:
            _log.warning("no NIXL blob for %s: %s", peer.host, error)
            return b""
        if len(blob) > self._limits.blob_bytes or LISTENER_MARK in blob:
            _log.error("a NIXL blob of %d bytes is not fit to be sent", len(blob))
            return b""
        return blob


def _tune(writer: asyncio.StreamWriter) -> None:
    """Hold little of an answer while the caller does not read it, and find out callers that are gone."""
    writer.transport.set_write_buffer_limits(high=_CHUNK)
    sock: socket.socket = writer.get_extra_info("socket")
    with suppress(OSError):  # reset already
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


async def serve(host: str, port: int, find: Find, *, limits: Limits | None = None) -> WireServer:
    """Listen at an IPv4 address so that ``fetch_remote_metadata`` of a stock NIXL agent gets a blob from us.

    The wire carries no name, so one port stands for one worker: there is one server a record.

    :param port: 0 takes a free one.
    :param find: asked anew for each request, so that every answer is the current blob; it has ``limits.body``
        seconds.
    :raises StorageError: ``ListenFailed``.
    """
    server = WireServer(find, limits or Limits())
    await server.listen(host, port)
    return server
