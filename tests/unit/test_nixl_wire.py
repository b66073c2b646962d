"""The wire of NIXL's listener, against real sockets that behave badly."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import struct
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from hibernode.errors import HibernodeError, NotFoundError, StorageError
from hibernode.metadata.nixl_wire import INVL, LOAD, SEND, Find, Limits, Peer, WireServer, fetch_blob, serve

LOCALHOST = "127.0.0.1"
BLOB = bytes(range(256)) * 20
PATIENT = 60.0


def frame(payload: bytes) -> bytes:
    """Make a frame as NIXL does."""
    return struct.pack("<Q", len(payload)) + payload


def answer(blob: bytes | None) -> Find:
    """Give a finder that always has this."""

    async def find(_: Peer) -> bytes | None:
        return blob

    return find


async def until(condition: Callable[[], bool]) -> None:
    """Wait until something is so."""
    async with asyncio.timeout(PATIENT):
        while not condition():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def listener(
    behave: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[int]:
    """Listen and behave so to whoever connects."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await behave(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.transport.abort()

    server = await asyncio.start_server(connected, LOCALHOST, 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


@asynccontextmanager
async def caller(server: WireServer) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connect as an agent would."""
    reader, writer = await asyncio.open_connection(LOCALHOST, server.port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """Read one whole frame."""
    async with asyncio.timeout(PATIENT):
        (length,) = struct.unpack("<Q", await reader.readexactly(8))
        return await reader.readexactly(length)


async def ended(reader: asyncio.StreamReader) -> bool:
    """Wait for the end of the connection, which must come without another byte."""
    async with asyncio.timeout(PATIENT):
        try:
            return await reader.read(1) == b""
        except ConnectionError:
            return True


async def test_our_client_gets_our_servers_blob() -> None:
    """Byte for byte, also a large one, and the finder is told who asks."""
    large = random.Random(1).randbytes(5_000_000)
    peers: list[Peer] = []

    async def find(peer: Peer) -> bytes:
        peers.append(peer)
        return large

    async with await serve(LOCALHOST, 0, find) as server:
        assert await fetch_blob(LOCALHOST, server.port, deadline=PATIENT) == large
        await until(lambda: server.connections == 0)
    assert [peer.host for peer in peers] == [LOCALHOST]
    assert server.counts.answered == server.counts.connections == 1


async def raised(port: int, *, host: str = LOCALHOST, deadline: float = PATIENT, most: int = 1000) -> str:
    """Fetch, and return the reason of the error."""
    with pytest.raises(HibernodeError) as caught:
        await fetch_blob(host, port, deadline=deadline, max_bytes=most)
    assert len(str(caught.value)) < 1000
    return caught.value.reason


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"", "NotAListener"),
        (b"\x01\x00", "NotAListener"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "NotAListener"),
        (frame(b""), "NotAListener"),
        (frame(b"NIXLCOMM:"), "NotAListener"),
        (frame(SEND), "NotAListener"),
        (frame(INVL + b"agent"), "NotAListener"),
        (frame(LOAD + BLOB[:100])[:-1], "NotAListener"),
        (frame(LOAD), "NoBlob"),
        (frame(LOAD + bytes(1001)), "BlobTooLarge"),
        (struct.pack("<Q", 1 << 63) + LOAD, "BlobTooLarge"),
        (b"\xff" * 8 + LOAD, "BlobTooLarge"),
    ],
)
async def test_a_listener_that_answers_something_else_gets_a_reason(sent: bytes, reason: str) -> None:
    """Whatever listens there, the client ends with an error of ours."""

    async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(8 + len(SEND))
        writer.write(sent)
        await writer.drain()
        writer.write_eof()
        await reader.read()

    async with listener(behave) as port:
        assert await raised(port) == reason


async def test_a_listener_that_sends_a_byte_at_a_time_meets_the_deadline() -> None:
    """The deadline is for all of it, so that progress does not extend it."""

    async def behave(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for byte in frame(LOAD + bytes(1000)):
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0.02)

    async with listener(behave) as port:
        assert await raised(port, deadline=0.5) == "ListenerTimeout"


async def test_a_claimed_length_takes_no_memory() -> None:
    """A gigabyte that is announced and never sent is not set aside."""

    async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(struct.pack("<Q", 1 << 30) + LOAD + b"x")
        await writer.drain()
        await reader.read()
        await asyncio.Event().wait()

    tracemalloc.start()
    try:
        async with listener(behave) as port:
            assert await raised(port, deadline=0.5, most=1 << 30) == "ListenerTimeout"
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("host", ["localhost", "::1", "127.0.0.1 ", "", "1.2.3", "0x7f.1", "a" * 10_000])
async def test_only_an_ipv4_address_is_connected_to(host: str) -> None:
    """Names are not looked up: what a record says would choose where we connect to."""
    assert await raised(5555, host=host) == "BadEndpoint"


@pytest.mark.parametrize("port", [0, -1, 65536])
async def test_a_port_outside_the_range_is_refused(port: int) -> None:
    """It would be cut to another one."""
    assert await raised(port) == "BadEndpoint"


async def test_nobody_there_is_not_found() -> None:
    """A refused connection is its own reason."""
    with socket.socket() as sock:
        sock.bind((LOCALHOST, 0))
        with pytest.raises(NotFoundError) as caught:
            await fetch_blob(LOCALHOST, sock.getsockname()[1], deadline=PATIENT)
    assert caught.value.reason == "ListenerUnreachable"


async def test_a_connection_serves_many_requests_with_the_blob_of_the_moment() -> None:
    """Stock agents keep their connection, and tell of themselves on it."""
    blobs = [b"one", b"", b"two" * 100_000]

    async def find(_: Peer) -> bytes | None:
        return blobs.pop(0) or None

    async with await serve(LOCALHOST, 0, find) as server, caller(server) as (reader, writer):
        writer.write(frame(LOAD + bytes(1_000_000)) + frame(INVL + b"somebody") + frame(SEND))
        assert await read_frame(reader) == LOAD + b"one"
        for part in (frame(SEND)[:3], frame(SEND)[3:10], frame(SEND)[10:] + frame(SEND)):
            writer.write(part)
            await writer.drain()
        assert await read_frame(reader) == LOAD
        assert await read_frame(reader) == LOAD + b"two" * 100_000
        await until(lambda: server.counts.answered == 2)
        assert server.counts.empty == 1
        assert server.connections == 1


@pytest.mark.parametrize(
    "sent",
    [
        frame(b""),
        frame(b"NIXLCOMM:"),
        frame(b"NIXLCOMM:DUMP"),
        frame(b"SEND"),
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 8,
        struct.pack("<Q", (16 << 20) + 14),
    ],
)
async def test_a_caller_that_says_something_else_is_let_go(sent: bytes) -> None:
    """At once, and without an answer."""
    async with await serve(LOCALHOST, 0, answer(BLOB)) as server, caller(server) as (reader, writer):
        writer.write(sent)
        assert await ended(reader)
        await until(lambda: server.connections == 0)
        assert server.counts.refused == 1


@pytest.mark.parametrize("sent", [b"", b"\x0d", frame(SEND)[:-1], frame(LOAD + bytes(1000))[:100]])
async def test_a_caller_that_does_not_finish_its_first_request_is_let_go(sent: bytes) -> None:
    """Half-open connections have the time of ``first``."""
    limits = Limits(first=0.2)
    async with await serve(LOCALHOST, 0, answer(BLOB), limits=limits) as server, caller(server) as streams:
        streams[1].write(sent)
        assert await ended(streams[0])
        await until(lambda: server.counts.timed_out == 1)


@pytest.mark.parametrize(("limits", "more"), [(Limits(idle=0.2), b""), (Limits(body=0.5), b"\x0d")])
async def test_a_caller_that_falls_silent_later_is_let_go(limits: Limits, more: bytes) -> None:
    """Between requests after ``idle``, within one after ``body``."""
    async with await serve(LOCALHOST, 0, answer(BLOB), limits=limits) as server, caller(server) as streams:
        streams[1].write(frame(SEND))
        assert await read_frame(streams[0]) == LOAD + BLOB
        streams[1].write(more)
        assert await ended(streams[0])
        await until(lambda: server.counts.timed_out == 1)


async def test_callers_that_do_not_read_cost_no_copies_of_the_blob() -> None:
    """64 of them, each asking for 16 MiB and reading nothing."""
    blob = bytes(16 << 20)
    async with await serve(LOCALHOST, 0, answer(blob), limits=Limits(body=2)) as server:
        tracemalloc.start()
        try:
            callers = [await asyncio.open_connection(LOCALHOST, server.port) for _ in range(64)]
            for reader, writer in callers:
                reader._transport.pause_reading()  # type: ignore[attr-defined]
                writer.write(frame(SEND))
            await until(lambda: server.counts.timed_out == 64)
            assert tracemalloc.get_traced_memory()[1] < 48 << 20
        finally:
            tracemalloc.stop()
            for _, writer in callers:
                writer.transport.abort()


async def test_a_thousand_half_open_connections_leave_room_for_an_agent() -> None:
    """The quietest goes for the newest, descriptors stay within the limit, and a real request is answered."""
    before = len(os.listdir("/proc/self/fd"))
    crowd: list[socket.socket] = []
    limits = Limits(connections=32, first=PATIENT)
    try:
        async with await serve(LOCALHOST, 0, answer(BLOB), limits=limits) as server:
            for _ in range(1000):
                sock = socket.socket()
                sock.setblocking(False)
                crowd.append(sock)
                await asyncio.get_running_loop().sock_connect(sock, (LOCALHOST, server.port))
            await until(lambda: server.counts.connections == 1000)
            await until(lambda: len(os.listdir("/proc/self/fd")) < before + 1000 + 32 + 10)
            assert server.connections == 32
            assert server.counts.crowded == 968
            assert await fetch_blob(LOCALHOST, server.port, deadline=PATIENT) == BLOB
    finally:
        for sock in crowd:
            sock.close()
    await until(lambda: len(os.listdir("/proc/self/fd")) <= before + 2)


async def test_who_asked_last_stays_longest() -> None:
    """An agent that asks now and then is not the one that goes."""
    async with (
        await serve(LOCALHOST, 0, answer(BLOB), limits=Limits(connections=2)) as server,
        caller(server) as old,
    ):
        old[1].write(frame(SEND))
        await read_frame(old[0])
        async with caller(server) as silent:
            await until(lambda: server.connections == 2)
            old[1].write(frame(SEND))
            await read_frame(old[0])
            async with caller(server):
                assert await ended(silent[0])
                old[1].write(frame(SEND))
                assert await read_frame(old[0]) == LOAD + BLOB


async def fails(_: Peer) -> bytes:
    """Find nothing, with a reason."""
    raise NotFoundError("no record", reason="NotFound")


@pytest.mark.parametrize(
    "find", [answer(None), answer(b""), answer(b"x NIXLCOMM:INVL"), answer(bytes(101)), fails]
)
async def test_without_a_fit_blob_the_answer_is_empty(find: Find) -> None:
    """As a stock agent answers that has none; the connection stays."""
    async with await serve(LOCALHOST, 0, find, limits=Limits(blob_bytes=100)) as server:
        async with caller(server) as (reader, writer):
            for _ in range(2):
                writer.write(frame(SEND))
                assert await read_frame(reader) == LOAD
        assert await raised(server.port) == "NoBlob"


async def test_a_finder_that_hangs_or_breaks_ends_only_its_connection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The port stays up, and a fault of ours is logged with its traceback."""
    mode = ["hang", "break", "work"]

    async def find(_: Peer) -> bytes:
        match mode.pop(0):
            case "hang":
                await asyncio.Event().wait()
            case "break":
                raise ZeroDivisionError("a fault")
        return BLOB

    async with await serve(LOCALHOST, 0, find, limits=Limits(body=0.3)) as server:
        assert await raised(server.port) == "NotAListener"
        assert server.counts.timed_out == 1
        assert await raised(server.port) == "NotAListener"
        assert await fetch_blob(LOCALHOST, server.port, deadline=PATIENT) == BLOB
    (record,) = [record for record in caplog.records if record.exc_info]
    assert "a NIXL connection failed" in record.message


async def test_closing_ends_every_connection_at_once() -> None:
    """Also those whose answer is under way."""
    never = asyncio.Event()

    async def find(_: Peer) -> bytes:
        await never.wait()
        return b""

    server = await serve(LOCALHOST, 0, find, limits=Limits(body=PATIENT))
    async with caller(server) as waiting, caller(server) as silent:
        waiting[1].write(frame(SEND))
        await until(lambda: server.connections == 2)
        port = server.port
        await server.close()
        assert await ended(waiting[0])
        assert await ended(silent[0])
        assert server.connections == 0
        assert await raised(port) == "ListenerUnreachable"


async def test_a_taken_port_is_a_clear_error() -> None:
    """And so is one that is none."""
    async with await serve(LOCALHOST, 0, answer(BLOB)) as server:
        for port in (server.port, 70000):
            with pytest.raises(StorageError) as caught:
                await serve(LOCALHOST, port, answer(BLOB))
            assert caught.value.reason == "ListenFailed"
