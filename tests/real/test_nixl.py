"""Real NIXL agents in processes of their own, with our wire between them."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time

import pytest

from hibernode.errors import HibernodeError, NotFoundError, RefusedError
from hibernode.metadata import nixl_check
from hibernode.metadata.nixl_blob import read_header, require_agent
from hibernode.metadata.nixl_check import Verdict, check_blob
from hibernode.metadata.nixl_wire import Peer, fetch_blob, serve
from tests.real.nixl_kit import LOCALHOST, PATIENCE, Agent, NixlError, free_port

pytestmark = pytest.mark.nixl

SIZE = 64 << 20


async def fetch(port: int) -> bytes:
    """Take the current blob of the agent that listens at ``port``."""
    return await fetch_blob(LOCALHOST, port, deadline=PATIENCE)


class Shelf:
    """What our server hands out: the blob of the moment."""

    def __init__(self) -> None:
        self.blob: bytes | None = None
        self.asked = 0

    async def find(self, _: Peer) -> bytes | None:
        self.asked += 1
        return self.blob


async def test_a_stock_agent_gets_a_blob_from_us_and_reads_64_mib() -> None:
    """Blob by our client, handed on by our server; after a restart the new one replaces it."""
    shelf = Shelf()
    with free_port() as source_port, free_port() as target_port:
        async with (
            await serve(LOCALHOST, 0, shelf.find) as server,
            Agent("worker-b", port=target_port) as target,
        ):
            async with Agent("worker-a", port=source_port) as source:
                memory = await source.register(SIZE)
                first = shelf.blob = await fetch(source_port)
                assert first == await source.blob()
                require_agent(read_header(first), "worker-a")
                await target.fetch("worker-a", server.port)
                await target.wait_known("worker-a")
                assert await target.read("worker-a", memory) == memory.digest
                await source.kill()
            with pytest.raises(NotFoundError):
                await fetch(source_port)
            async with Agent("worker-a", port=source_port) as source:
                memory = await source.register(SIZE, seed=2)
                second = shelf.blob = await fetch(source_port)
                assert read_header(second).agent == "worker-a"
                assert read_header(second).digest != read_header(first).digest
                with pytest.raises(NixlError) as caught:
                    await target.add(second)
                assert caught.value.name == "nixlNotAllowedError"
                await target.remove("worker-a")
                await target.fetch("worker-a", server.port)
                await target.wait_known("worker-a")
                assert await target.read("worker-a", memory) == memory.digest
            assert server.counts.answered == shelf.asked == 2
            assert server.counts.connections == 1, "a stock agent keeps its connection"


async def test_a_blob_that_went_through_us_is_loaded_by_add_remote_agent() -> None:
    """The way of ModelExpress's central mode: remove and add."""
    with free_port() as port:
        async with Agent("worker-a", port=port) as source, Agent("worker-b") as target:
            memory = await source.register(1 << 20)
            for _ in range(2):
                assert await target.add(await fetch(port)) == "worker-a"
                assert await target.read("worker-a", memory) == memory.digest
                await target.remove("worker-a")
                assert not await target.known("worker-a")


async def test_a_new_registration_is_a_new_generation() -> None:
    """The digest changes with what is registered, and only then."""
    with free_port() as port:
        async with Agent("worker-a", port=port) as source:
            bare = read_header(await fetch(port))
            assert [connection.backend for connection in bare.connections] == ["UCX"]
            assert read_header(await fetch(port)) == bare
            await source.register(4096)
            full = read_header(await fetch(port))
            assert full.digest != bare.digest
            assert full.connections == bare.connections
            assert full.memory_size > bare.memory_size


async def test_an_agent_that_tells_us_of_itself_is_still_served() -> None:
    """send_local_metadata and invalidate_local_metadata go over the connection that asks next."""
    shelf = Shelf()
    with free_port() as port, free_port() as other:
        async with (
            await serve(LOCALHOST, 0, shelf.find) as server,
            Agent("worker-a", port=port),
            Agent("worker-b", port=other) as target,
        ):
            await target.send(server.port)
            await target.invalidate(server.port)
            await target.fetch("worker-a", server.port)
            async with asyncio.timeout(PATIENCE):
                while server.counts.empty < 1:  # no blob yet: the agent only logs it
                    await asyncio.sleep(0.02)
            assert not await target.known("worker-a")
            shelf.blob = await fetch(port)
            await target.fetch("worker-a", server.port)
            await target.wait_known("worker-a")
            assert (server.counts.connections, server.counts.refused) == (1, 0)


async def one_blob() -> bytes:
    """Take the blob of an agent that has some memory, and ends then."""
    async with Agent("worker-a") as source:
        await source.register(4096)
        return await source.blob()


async def test_nixl_takes_a_good_blob_in_the_child_also_after_its_agent_ended() -> None:
    """The agent's name comes back, and nobody was connected to."""
    began = time.monotonic()
    check = await check_blob(await one_blob())
    assert (check.verdict, check.agent) == (Verdict.LOADED, "worker-a"), check
    assert check.version
    assert time.monotonic() - began < PATIENCE


async def test_a_blob_that_aborts_the_process_is_told_by_its_signal() -> None:
    """One byte, the version of UCX's address: the header is right, and NIXL dies of it."""
    blob = bytearray(await one_blob())
    address = blob.index(b"|c") + 2 + 8
    blob[address] = 0x7F
    assert read_header(bytes(blob)).agent == "worker-a"
    check = await check_blob(bytes(blob))
    assert (check.verdict, check.detail) == (Verdict.CRASHED, "SIGABRT"), check
    assert "addr version" in check.log


@pytest.mark.parametrize("cut", [0, 11, 100, -1])
async def test_a_cut_blob_is_refused_by_nixl_too(cut: int) -> None:
    """Its exception is named."""
    check = await check_blob((await one_blob())[:cut])
    assert check.verdict is Verdict.REFUSED, check
    assert check.detail.startswith("nixl")


async def test_a_blob_with_many_regions_passes_the_wire_and_the_child() -> None:
    """20,000 regions, more than a model has tensors: 44 bytes each, one NIXL frame."""
    with free_port() as port:
        async with Agent("worker-a", port=port) as source:
            await source.register(20_000 * 64, regions=20_000)
            blob = await fetch(port)
    assert 800_000 < read_header(blob).memory_size < 1_000_000
    check = await check_blob(blob)
    assert check.verdict is Verdict.LOADED, check


async def test_a_check_that_takes_too_long_is_killed() -> None:
    """The deadline counts from the start of the child."""
    check = await check_blob(b"", deadline=0.01)
    assert check.verdict is Verdict.TIMED_OUT


async def test_a_blob_over_the_limit_starts_no_child() -> None:
    """As everywhere, its size comes first."""
    with pytest.raises(RefusedError) as caught:
        await check_blob(bytes(1001), max_bytes=1000)
    assert caught.value.reason == "BlobTooLarge"


async def run(code: str) -> bytes:
    """Run a program with the child's functions and return what it printed."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-c", code, "60", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    )
    output, _ = await asyncio.wait_for(process.communicate(), PATIENCE)
    return output


ATTEMPTS = """
import errno, json, os, signal, socket, subprocess, threading
from hibernode.metadata.nixl_child import _confine
stream = socket.socket()
datagram = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
listening = socket.create_server(("127.0.0.1", 0))
parent = os.getppid()
file = os.open("/etc/hostname", os.O_RDONLY)
_confine(60)
attempts = {
    "connect": lambda: stream.connect(listening.getsockname()),
    "send": lambda: datagram.sendto(b"x", ("127.0.0.1", 9)),
    "listen": lambda: stream.bind(("127.0.0.1", 0)),
    "accept": listening.accept,
    "kill": lambda: os.kill(parent, 0),
    "fork": os.fork,
    "exec": lambda: os.execv("/bin/true", ["true"]),
    "open": lambda: os.open("/etc/hostname", os.O_RDONLY),
    "up": lambda: os.open("../../../etc/hostname", os.O_RDONLY),
    "create": lambda: os.open("file", os.O_CREAT | os.O_WRONLY),
    "root": lambda: os.setuid(0),
    "chroot": lambda: os.chroot("/"),
    "nice": lambda: os.nice(-5),
    "thread": threading.Thread(target=print).start,
    "memory": lambda: bytearray(5 << 30),
}
answers = {}
for name, attempt in attempts.items():
    try:
        answers[name] = "done: " + repr(attempt())
    except OSError as error:
        answers[name] = errno.errorcode[error.errno]
    except Exception as error:
        answers[name] = type(error).__name__
answers["ids"] = [*os.getresuid(), *os.getresgid(), *os.getgroups()]
os.write(1, json.dumps(answers).encode())
os._exit(0)
"""


async def test_the_child_has_no_network_no_files_no_processes_and_no_root() -> None:
    """What a hostile blob could try once it runs code of its own."""
    assert json.loads(await run(ATTEMPTS)) == {
        "connect": "EINPROGRESS",
        "send": "EPERM",
        "listen": "EPERM",
        "accept": "EPERM",
        "kill": "EPERM",
        "fork": "EAGAIN",
        "exec": "EPERM",
        "open": "EACCES",
        "up": "EACCES",
        "create": "EACCES",
        "root": "EPERM",
        "chroot": "EACCES",
        "nice": "EPERM",
        "thread": "RuntimeError",
        "memory": "MemoryError",
        "ids": [65534] * 6,
    }


async def test_a_machine_without_nixl_says_so() -> None:
    """That is a verdict, not an error."""
    said = await run(
        "from hibernode.metadata import nixl_child; nixl_child.PACKAGES = ('absent',); nixl_child.main()"
    )
    check = nixl_check._verdict(said, "")
    assert (check.verdict, check.detail) == (
        Verdict.NOT_INSTALLED,
        "no package of absent can be imported",
    )


@pytest.mark.parametrize(
    "said", [b"", b"{}", b"[1]", b"null", b"\xff", b'{"loaded"', b"[" * 60_000, b'{"other": 1}']
)
def test_a_child_that_says_nonsense_is_an_error(said: bytes) -> None:
    """A hostile blob may have written it."""
    with pytest.raises(HibernodeError) as caught:
        nixl_check._verdict(said, "first\nlast line\n")
    assert caught.value.reason == "BlobCheckFailed"
    assert "last line" in str(caught.value)


def test_what_the_child_says_is_made_printable_and_short() -> None:
    """Before a terminal shows it."""
    check = nixl_check._verdict(json.dumps({"loaded": "\x1b[31m" + "a" * 5000}).encode(), "")
    assert check.agent.startswith("\\x1b[31maaa")
    assert len(check.agent) == 1000
