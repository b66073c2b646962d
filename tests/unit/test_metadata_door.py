"""The metadata service under hostile callers: it stays up, and descriptors and memory stay flat."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from hibernode.daemon import Agent
from hibernode.errors import BusyError, HibernodeError, StorageError
from hibernode.host.procfs import read_stat
from hibernode.metadata.frames import Unfinished
from hibernode.metadata.front import PREFACE, Doors
from hibernode.metadata.part import MetadataPart
from hibernode.metadata.shares import Share
from hibernode.settings import MetadataSettings, Settings
from tests.unit.service_kit import (
    CODE,
    P2P,
    A,
    B,
    asking,
    frame,
    open_files,
    pod,
    publication,
    refused,
    serving,
)

ROOT = Path(__file__).parents[2]
SLACK = 8
"""Descriptors that come and go with threads and channels of the test itself."""


def resident() -> int:
    """Return this process's memory in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def until(true: Any) -> None:
    async with asyncio.timeout(30):
        while not true():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("door", ["unix", "tcp"])
async def test_a_thousand_half_open_connections_leave_the_service_up(door: str) -> None:
    """They wait in front of gRPC, a bounded number of them, and are gone after a moment."""
    async with serving() as service:
        front = service.front
        front._doors = Doors(connections=100, per_caller=100, preface_seconds=0.5)
        async with service.client() as client:
            await client.publish()
            before, memory = open_files(), resident()
            many = []
            for number in range(1000):
                sock = socket.socket(socket.AF_UNIX if door == "unix" else socket.AF_INET)
                many.append(sock)
                sock.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    sock.connect(str(service.path) if door == "unix" else service.part.addresses[0])
                with contextlib.suppress(OSError):
                    sock.send(PREFACE[: number % len(PREFACE)])
                await asyncio.sleep(0)
            assert len(await client.list()) == 1
            assert front.connections <= 100
            assert open_files() <= before + 1000 + 2 * 100 + SLACK
            await until(lambda: front.refused["TooManyConnections"] > 0)
            await until(lambda: front.connections == 1)  # by their deadline: nobody has closed them yet
            assert open_files() <= before + 1000 + SLACK
            for sock in many:
                sock.close()
            assert open_files() <= before + SLACK
            assert resident() < memory + (32 << 20)
            assert len(await client.list()) == 1


async def test_a_thousand_publications_for_another_pod_leave_nothing() -> None:
    """Nor do changes of its records: no descriptor, no memory, no record, nobody who is watched."""
    fields: dict[str, Any] = {
        "pod": {"pod_uid": B, "pod_name": "p", "pod_namespace": "n"},
        "nixl_metadata": b"x" * 4096,
    }
    with subprocess.Popen(["sleep", "1000"]) as process:
        liar = pod(A, process=read_stat(process.pid).key)
        try:
            async with serving() as service:
                async with service.client(pod(B)) as owner:
                    source = await owner.publish("theirs")
                before, memory = open_files(), resident()
                async with service.client(liar) as client:
                    for number in range(1000):
                        call = client.call("PublishMetadata", publication(f"w{number}", **fields))
                        assert (await refused(call))[0] is CODE.PERMISSION_DENIED
                    for _ in range(100):
                        over = client.call("PublishMetadata", publication("theirs"))
                        for call in (over, client.status(source, "theirs", status=3)):
                            assert (await refused(call))[0] is CODE.PERMISSION_DENIED
                    [one] = await client.list()
                    assert one.worker_id == "theirs"
                assert service.part.status()["watched"] == 0
                gc.collect()
                assert open_files() <= before + SLACK
                assert resident() < memory + (32 << 20)
        finally:
            process.kill()


async def test_one_caller_cannot_take_all_connections() -> None:
    """A pod that opens many keeps the others out of nothing."""
    async with serving(connections=16) as service:
        service.who = pod(A)
        many = [await asyncio.open_unix_connection(str(service.path)) for _ in range(20)]
        await until(lambda: service.front.refused["TooManyOfCaller"] == 18)
        async with service.client(pod(B)) as other:
            assert await other.list() == []
        for _, writer in many:
            writer.transport.abort()
        await until(lambda: service.front.connections <= 1)


@pytest.mark.parametrize(
    "first", [b"GET / HTTP/1.1\r\n\r\n", b"\0" * 64, PREFACE[:-1] + b"x", b"\x16\x03\x01"]
)
async def test_what_is_not_http2_is_hung_up_on(first: bytes) -> None:
    """It never reaches gRPC."""
    async with serving() as service:
        for target in (None, service.part.addresses[0]):
            if target is None:
                reader, writer = await asyncio.open_unix_connection(str(service.path))
            else:
                reader, writer = await asyncio.open_connection(*target)
            writer.write(first)
            async with asyncio.timeout(20):
                assert await _rest(reader) == b""
            writer.close()
        assert service.front.refused["NotHttp2"] == 2


async def _rest(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""


async def test_garbage_after_the_preface_ends_that_connection_only() -> None:
    """GRPC hangs up; who calls properly is answered."""
    async with serving() as service, service.client() as client:
        before = open_files()
        for number in range(50):
            reader, writer = await asyncio.open_unix_connection(str(service.path))
            writer.write(PREFACE + os.urandom(1 + number * 40))
            writer.write_eof()
            async with asyncio.timeout(20):
                await _rest(reader)
            writer.close()
        assert await client.list() == []
        await until(lambda: service.front.connections == 1)
        assert open_files() <= before + SLACK


async def test_who_cannot_be_identified_is_not_let_in() -> None:
    """A caller that has ended, or that the agent cannot see, gets no connection."""
    async with serving() as service:

        def nobody(_: Any) -> Any:
            raise HibernodeError("gone", reason="PeerGone")

        service.front._admit(socket.socket(socket.AF_UNIX), nobody)
        assert service.front.refused["PeerGone"] == 1


HUGE = """
import asyncio, sys
import grpc
from tests.unit.service_kit import Client, publication

async def main():
    options = [("grpc.max_send_message_length", 200 << 20)]
    async with grpc.aio.insecure_channel(sys.argv[1], options) as channel:
        for _ in range(int(sys.argv[2])):
            try:
                await Client(channel).call("PublishMetadata", publication(nixl_metadata=b"x" * (100 << 20)))
            except grpc.aio.AioRpcError as error:
                print(error.code().name)

asyncio.run(main())
"""


async def test_a_blob_of_100_mb_is_refused_and_leaves_nothing() -> None:
    """GRPC refuses it from its length: memory does not grow by a message, whatever their number."""

    async def send(times: int) -> None:
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", HUGE, service.target, str(times)),
            stdout=asyncio.subprocess.PIPE,
            cwd=ROOT,
        )
        out, _ = await child.communicate()
        assert out.split() == [b"RESOURCE_EXHAUSTED"] * times

    async with serving() as service:
        await send(1)
        before, files = resident(), open_files()
        await send(4)
        assert resident() < before + (64 << 20)
        await until(lambda: open_files() <= files + SLACK)
        async with service.client() as client:
            assert await client.list() == []


async def test_a_message_that_would_grow_in_memory_is_refused_before_it_is_decoded() -> None:
    """15 million empty tensors fit into 30 MiB, and would take 1.2 GB; other methods take nothing large."""

    def field(tag: bytes, data: bytes) -> bytes:
        size, length = len(data), b""
        while size > 127:
            size, length = size >> 7, length + bytes([size & 127 | 128])
        return tag + length + bytes([size]) + data

    many = field(b"\x12", field(b"\xa2\x01", b"\x0a\x00" * (15 << 20)))
    async with serving() as service, service.client() as client:
        for name, data, size in (
            ("PublishMetadata", many, 150 << 20),
            ("ListSources", field(b"\x0a", field(b"\x52", b"") * (10 << 20)), 150 << 20),
        ):
            call: Any = client.channel.unary_unary(f"/model_express.p2p.P2pService/{name}")
            before = resident()
            assert (await refused(call(data, timeout=120)))[0] is CODE.RESOURCE_EXHAUSTED
            assert resident() < before + size
        assert await client.list() == []


async def test_too_many_requests_at_one_time_are_refused() -> None:
    """One pod may have a quarter of the places; the others still get theirs, and places come back."""
    async with serving(requests=8) as service:
        backend, release = service.backend, asyncio.Event()
        list_workers = backend.list_workers

        async def slow(query: Any) -> Any:
            await release.wait()
            return await list_workers(query)

        backend.list_workers = slow
        async with service.client(pod(A)) as greedy:
            calls = [asyncio.create_task(greedy.list()) for _ in range(6)]
            done: set[Any] = set()
            await until(lambda: sum(call.done() for call in calls) == 4)
            done = {call for call in calls if call.done()}
            for call in done:
                error = call.exception()
                assert isinstance(error, grpc.aio.AioRpcError)
                assert error.code() is CODE.RESOURCE_EXHAUSTED
            async with service.client(pod(B)) as other:
                waiting = asyncio.create_task(other.list())
                await until(lambda: service.methods._working.of(B) == 1)
                release.set()
                assert await waiting == []
            await asyncio.gather(*calls, return_exceptions=True)
            assert await greedy.list() == []


async def test_requests_that_do_not_end_cannot_fill_the_memory() -> None:
    """GRPC keeps what has come of each, so the door counts it and cuts off who has too much under way."""
    async with serving() as service:
        shares = service.front._unfinished = Share(64 << 10, "bytes")
        service.who = pod(A)
        _, writer = await asyncio.open_unix_connection(str(service.path))
        writer.write(PREFACE + frame(4, 0, 0))
        part = b"\0" + (1 << 20).to_bytes(4) + bytes(10 << 10)
        writer.write(asking("PublishMetadata", 1) + frame(0, 0, 1, part))
        await until(lambda: shares.of(A) == len(part))
        async with service.client(pod(B)) as other:
            await other.publish(count=200)
        assert shares.total == len(part)
        writer.write(frame(3, 0, 1, bytes(4)))  # given up: its bytes are free again
        await until(lambda: shares.total == 0)
        writer.write(asking("PublishMetadata", 3) + frame(0, 0, 3, part))
        await until(lambda: shares.total == len(part))
        writer.write(asking("PublishMetadata", 5) + frame(0, 0, 5, part))
        await until(lambda: service.front.refused["TooMuchAtOnce"] == 1)
        await until(lambda: shares.total == 0 and service.front.connections <= 1)
        writer.transport.abort()


async def test_answers_that_nobody_reads_cannot_fill_the_memory(caplog: pytest.LogCaptureFixture) -> None:
    """They count until they are with their caller, and who leaves them behind makes no noise in the log."""
    async with serving() as service:
        methods = service.methods
        methods._bytes = Share(8 << 20, "bytes")
        async with service.client(pod(A)) as owner:
            source = await owner.publish(nixl_metadata=bytes(900 << 10))
        request = P2P.GetMetadataRequest(mx_source_id=source, worker_id="w0").SerializeToString()
        data = b"\0" + len(request).to_bytes(4) + request
        service.who = pod(A)
        _, writer = await asyncio.open_unix_connection(str(service.path))
        writer.write(PREFACE + frame(4, 0, 0))
        for stream in range(1, 21, 2):
            writer.write(asking("GetMetadata", stream) + frame(0, 1, stream, data))
        exhausted = {"method": "GetMetadata", "result": "RESOURCE_EXHAUSTED"}
        await until(lambda: service.sample("hibernode_metadata_requests_total", **exhausted) == 8)
        assert methods.working >= 2
        assert 1 << 20 < methods._bytes.total < 2 << 20
        async with service.client(pod(B)) as other:
            assert (await other.get(source, "w0")).found
        writer.transport.abort()
        await until(lambda: methods.working == 0 and methods._bytes.total == 0)
        assert "ExecuteBatchError" not in caplog.text


def test_bytes_of_a_request_count_until_either_side_ends_it() -> None:
    """However the frames are cut; padding and frames of the connection itself do not confuse it."""
    asked = (
        frame(4, 0, 0, bytes(12))
        + asking("PublishMetadata", 1)
        + frame(0, 0, 1, bytes(100))
        + frame(8, 0, 0, bytes(4))
        + asking("GetMetadata", 3)
        + frame(0, 8, 3, bytes(50))
        + asking("ListSources", 5)
        + frame(0, 1, 5, bytes(25))
    )
    for size in (1, 2, 7, 9, 10, len(asked)):
        unfinished = Unfinished()
        for at in range(0, len(asked), size):
            unfinished.asked(asked[at : at + size])
        assert unfinished.bytes == 150
        unfinished.answered(frame(0, 0, 3, bytes(5)) + frame(1, 5, 3))
        assert unfinished.bytes == 100
        unfinished.asked(frame(0, 1, 1, b"12")[:-1])  # the last frame of a request, but for its last byte
        assert unfinished.bytes == 102
        unfinished.asked(b"2")
        unfinished.answered(frame(3, 0, 7, bytes(4)))
        assert unfinished.bytes == 0


async def test_large_publications_of_one_pod_leave_a_lane_to_others() -> None:
    """However many it sends, and however long each takes."""
    async with serving() as service:
        release, publish = asyncio.Event(), service.backend.publish_metadata

        async def slow(identity: Any, worker_id: str, *rest: Any, **more: Any) -> Any:
            if worker_id.startswith("slow"):
                await release.wait()
            return await publish(identity, worker_id, *rest, **more)

        service.backend.publish_metadata = slow
        large: dict[str, Any] = {"nixl_metadata": bytes(300 << 10)}
        async with service.client(pod(A)) as greedy:
            calls = [
                asyncio.create_task(greedy.call("PublishMetadata", publication(f"slow{number}", **large)))
                for number in range(4)
            ]
            await until(lambda: service.methods._working.of(A) == 4)
            async with service.client(pod(B)) as other:
                assert (await other.call("PublishMetadata", publication("w0", **large))).success
            assert not any(call.done() for call in calls)
            release.set()
            assert all(answer.success for answer in await asyncio.gather(*calls))


async def test_a_deadline_ends_a_request_that_takes_too_long() -> None:
    """The client's if it is sooner, else ours."""
    async with serving(request_seconds=0.2) as service, service.client() as client:

        async def never(_: Any) -> Any:
            await asyncio.Event().wait()

        service.backend.list_workers = never
        assert (await refused(client.list()))[0] is CODE.DEADLINE_EXCEEDED
        assert not service.methods.working


async def test_callers_that_hang_up_leave_nothing_behind() -> None:
    """Watches and requests of a connection that is cut end with it."""
    from hibernode.metadata.service import CHANGES

    watch = CHANGES.services["Changes"]["Watch"]
    async with serving() as service:
        before = open_files()

        async def call_and_go() -> None:
            async with service.client() as client:
                call: Any = client.channel.unary_stream(
                    watch.path, watch.request.SerializeToString, watch.response.FromString
                )
                streams = [call(watch.request()) for _ in range(10)]
                for stream in streams:
                    assert (await stream.read()).kind == 3

        for _ in range(5):
            await call_and_go()
            gc.collect()  # a channel of gRPC's closes its socket when it is freed
        await until(lambda: not service.methods.watching and not service.front.connections)
        assert open_files() <= before + SLACK


MUTATIONS = st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), min_size=1, max_size=12)


def test_mutated_requests_are_answered_or_refused_and_nothing_grows() -> None:
    """2,100 a method: the answer is OK or a code of the caller's fault, never INTERNAL, never silence."""
    fine = {CODE.OK, CODE.INVALID_ARGUMENT, CODE.PERMISSION_DENIED, CODE.RESOURCE_EXHAUSTED}
    seeds = [
        (
            "PublishMetadata",
            publication(nixl_metadata=b"nixlSerDes|", topology={"host": "n"}, agent_name="a"),
        ),
        ("ListSources", P2P.ListSourcesRequest(identity=publication().identity, status_filter=2, limit=3)),
        ("GetMetadata", P2P.GetMetadataRequest(mx_source_id="5a5f555570065064", worker_id="w0")),
        ("UpdateStatus", P2P.UpdateStatusRequest(mx_source_id="5a5f555570065064", worker_id="w0", status=2)),
    ]
    with asyncio.Runner() as runner:
        stack = serving()
        service = runner.run(stack.__aenter__())
        opened = service.client(pod(A))
        client = runner.run(opened.__aenter__())

        async def ask(call: Any, mutated: bytes) -> grpc.StatusCode:
            try:
                await call(mutated, timeout=30)
            except grpc.aio.AioRpcError as error:
                return error.code()
            return CODE.OK

        def hold(name: str, data: bytes, times: int) -> None:
            call: Any = client.channel.unary_unary(f"/model_express.p2p.P2pService/{name}")

            @settings(
                max_examples=times, deadline=None, database=None, suppress_health_check=list(HealthCheck)
            )
            @given(edits=MUTATIONS, cut=st.integers(0, 1 << 16))
            def mutate(edits: Any, cut: int) -> None:
                mutated = bytearray(data)
                for place, value in edits:
                    mutated[place % len(mutated)] = value
                assert runner.run(ask(call, bytes(mutated[: cut % (2 * len(mutated)) + 1]))) in fine

            mutate()

        try:
            for name, request in seeds:
                hold(name, request.SerializeToString(), 100)
            before = open_files(), resident()
            for name, request in seeds:
                hold(name, request.SerializeToString(), 2000)
            assert open_files() <= before[0] + SLACK
            assert resident() < before[1] + (64 << 20)
        finally:
            runner.run(opened.__aexit__(None, None, None))
            runner.run(stack.__aexit__(None, None, None))


# the sockets --------------------------------------------------------------------------------------------


async def test_the_socket_is_open_to_workers_and_its_directory_only_to_root() -> None:
    """Mode 0666 below 0755 of root's, whatever the umask; what is behind it only root reaches."""
    old = os.umask(0o077)
    try:
        async with serving() as service:

            def mode(path: Path) -> int:
                return stat.S_IMODE(path.lstat().st_mode)

            assert (mode(service.path), mode(service.path.parent)) == (0o666, 0o755)
            assert mode(service.part._private) == 0o700
    finally:
        os.umask(old)
    assert not service.path.exists()


async def test_a_directory_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    """Anybody could put a socket of their own in the place of ours."""
    directory = tmp_path / "open"
    directory.mkdir()
    directory.chmod(0o777)
    with pytest.raises(StorageError, match=r"metadata\.socket") as caught:
        async with serving(socket=directory / "mx.sock"):
            pass
    assert caught.value.reason == "SocketDirectoryUnsafe"


async def test_a_second_agent_with_the_same_state_is_refused_and_takes_nothing_away(tmp_path: Path) -> None:
    """It had removed the private socket of the first, whose callers then came out at the second."""
    async with serving() as service, service.client() as client:
        await client.publish("w0")
        found = Settings(
            state_dir=service.part._private.parent,
            metadata=MetadataSettings(socket=tmp_path / "own" / "mx.sock", listen=""),
        )
        with pytest.raises(BusyError) as caught:
            await MetadataPart(found, CollectorRegistry()).start()
        assert "grpc.sock" in caught.value.message
        async with service.client() as other:
            assert len(await other.list()) == 1


async def test_a_socket_that_is_removed_beneath_the_agent_is_said() -> None:
    """Workers cannot reach it, and it would not notice."""
    async with serving() as service:
        assert "records" in await service.part.check()
        service.path.unlink()
        with pytest.raises(HibernodeError, match="was removed"):
            await service.part.check()


async def test_an_agent_serves_it_when_enabled_and_tells_of_it(tmp_path: Path) -> None:
    """It is in status and health and metrics, and gone when the agent stops; off, nothing of it is there."""
    found = Settings(
        state_dir=tmp_path / "state",
        store={"path": tmp_path / "store"},
        signals={"path": tmp_path / "signals"},
        server={"listen": "127.0.0.1:0", "socket": tmp_path / "run" / "agent.sock"},
        metadata=MetadataSettings(enabled=True, socket=tmp_path / "mx" / "mx.sock", listen="127.0.0.1:0"),
    )
    agent = Agent(found)
    task = asyncio.create_task(agent.run())
    assert agent.metadata is not None
    await until(lambda: task.done() or not agent.metadata.trouble)
    async with grpc.aio.insecure_channel(f"unix:{found.metadata.socket}") as channel:
        call: Any = channel.unary_unary("/model_express.p2p.P2pService/ListSources")
        assert await call(b"", timeout=30) == b""
    status = (await agent.status())["metadata"]
    assert (status["backend"], status["ready"], status["records"]) == ("sqlite", True, {})
    assert "metadata" in {result.name for result in await agent.health.results()}
    text = (await agent.metrics.render()).decode()
    assert 'hibernode_metadata_requests_total{method="ListSources",result="ok"} 1.0' in text
    assert 'hibernode_metadata_records{status="ready"} 0.0' in text
    agent._stop.set()
    await task
    assert not found.metadata.socket.exists()
    assert Agent(found.model_copy(update={"metadata": MetadataSettings()})).metadata is None
