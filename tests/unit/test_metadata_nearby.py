"""The metadata service on one node: local sources first, blobs that workers confirm, changes, the wire."""

from __future__ import annotations

import asyncio
import base64
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest

from hibernode.errors import HibernodeError, NotFoundError, StorageError, UsageError
from hibernode.metadata import nixl_ports, proto
from hibernode.metadata.access import Reviewed
from hibernode.metadata.locality import LocalPlaces, Node, is_local, prefer, reachable, split_endpoint
from hibernode.metadata.nixl_wire import fetch_blob, serve
from hibernode.metadata.records import PodRef, SourceInstance
from hibernode.metadata.service import CHANGES
from tests.unit.metadata_kit import until
from tests.unit.service_kit import (
    CODE,
    LOCAL,
    P2P,
    READY,
    A,
    B,
    FixedPlaces,
    Tokens,
    identity,
    open_files,
    pod,
    publication,
    refused,
    serving,
    tensors,
)
from tests.unit.test_nixl_blob import make_blob as blob

# local first --------------------------------------------------------------------------------------------


def one(worker_id: str = "w", rank: int = 0, **fields: Any) -> SourceInstance:
    return SourceInstance("0" * 16, worker_id, "m", rank=rank, **fields)


NODE = Node("here", frozenset({"10.0.0.1", "127.0.0.1"}), {A: frozenset({"10.1.0.5"})})


@pytest.mark.parametrize(
    ("instance", "expected"),
    [
        (one(owner=PodRef("p", A, "n")), True),
        (one(owner=PodRef("p", B, "n")), False),
        (one(worker_grpc_endpoint="10.1.0.5:6555"), True),
        (one(metadata_endpoint="10.0.0.1:5555"), True),
        (one(metadata_endpoint="10.9.9.9:5555"), False),
        (one(metadata_endpoint="127.0.0.1:5555"), False),
        (one(topology={"host": "here"}), True),
        (one(topology={"host": "there"}), False),
        (one(), False),
    ],
    ids=["pod", "other pod", "pod ip", "node ip", "other ip", "a loopback", "host", "other host", "nothing"],
)
def test_a_record_is_of_this_node_by_pod_address_or_host(instance: SourceInstance, expected: bool) -> None:
    """Each of the three is enough; a loopback address says nothing of which node."""
    assert is_local(instance, NODE) is expected


def test_of_each_rank_local_records_come_alone() -> None:
    """A rank without a local record keeps all of its own."""
    near = one("a0", 0)
    every = [near, one("b0", 0), one("b1", 1), one("c1", 1)]
    assert prefer(every, lambda each: each is near) == [every[0], every[2], every[3]]
    assert prefer(every, lambda _: False) == every


@pytest.mark.parametrize(
    ("owner", "address", "expected"),
    [
        (A, "10.1.0.5", True),
        (A, "127.0.0.1", False),
        (A, "10.0.0.1", False),
        (B, "10.1.0.5", False),
        ("", "127.0.0.1", True),
        ("uid:0", "10.0.0.1", True),
        ("loopback", "127.0.0.1", True),
        ("", "169.254.169.254", False),
    ],
)
def test_we_connect_only_where_the_owner_can_listen(owner: str, address: str, expected: bool) -> None:
    """A record cannot send the agent to another pod, to the node, or to a cloud's metadata."""
    assert reachable(owner, address, NODE) is expected


@pytest.mark.parametrize(
    "text", ["", ":", "host:1", "1.2.3.4", "1.2.3.4:0", "1.2.3.4:65536", "1.2.3.4:٣", "x" * 9]
)
def test_an_endpoint_is_an_address_and_a_port_or_nothing(text: str) -> None:
    """Names are not looked up."""
    assert split_endpoint(text) is None
    assert split_endpoint("[::1]:5") == ("::1", 5)


async def test_local_sources_come_alone_for_local_callers() -> None:
    """A caller of this node sees its neighbours; one from elsewhere, and with the setting off, all."""
    places = FixedPlaces(**{A: "10.1.0.5"})
    for locality in (True, False):
        async with serving(places, locality=locality) as service:
            async with service.client(pod(A)) as near:
                await near.publish("near", pod_uid=A, pod_name="p", pod_namespace="n")
            async with service.client(pod(B, address="10.2.0.9")) as far:
                service.methods._gate._reviewer = Tokens()
                service.methods._gate._reviewer.known["far"] = Reviewed("u", PodRef("q", B, "n"))
                assert (await far.call("PublishMetadata", publication("far"), token="far")).success
                source = (await far.call("ListSources", P2P.ListSourcesRequest(), token="far")).instances[0]
                status = P2P.UpdateStatusRequest(
                    mx_source_id=source.mx_source_id, worker_id="far", status=READY
                )
                assert (await far.call("UpdateStatus", status, token="far")).success
                request = P2P.ListSourcesRequest(identity=identity(), status_filter=READY)
                found = (await far.call("ListSources", request, token="far")).instances
                assert {each.worker_id for each in found} == {"near", "far"}
            async with service.client(pod(A)) as near:
                found = await near.list(identity=identity(), status_filter=READY)
                assert {each.worker_id for each in found} == ({"near"} if locality else {"near", "far"})


async def test_this_machine_is_known_by_looking_at_it() -> None:
    """Its own addresses are there, and a second question does not look again."""
    places = LocalPlaces("here")
    found = await places.node()
    assert "127.0.0.1" in found.addresses
    assert await places.node() is found


# blobs --------------------------------------------------------------------------------------------------


@asynccontextmanager
async def worker_at(answer: Any, given: bytes) -> AsyncIterator[dict[str, Any]]:
    """Run a worker: its manifest service says ``answer``, its NIXL listener gives ``given``."""
    method = P2P.services["WorkerService"]["GetTensorManifest"]

    async def manifest(request: Any, _: Any) -> Any:
        return answer(request)

    async def find(_: Any) -> bytes:
        return given

    server = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(
        manifest, method.request.FromString, method.response.SerializeToString
    )
    service, name = method.path.strip("/").split("/")
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, {name: handler})])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with await serve("127.0.0.1", 0, find) as listener:
            yield {
                "worker_grpc_endpoint": f"127.0.0.1:{port}",
                "metadata_endpoint": f"127.0.0.1:{listener.port}",
                "agent_name": "worker-a",
            }
    finally:
        await server.stop(0)


def manifest(request: Any, **changes: Any) -> Any:
    """Answer as the stock worker does, but for ``changes``."""
    fields = {
        "mx_source_id": request.mx_source_id,
        "worker_id": request.worker_id,
        "agent_name": "worker-a",
        "tensors": tensors(3),
        **changes,
    }
    return P2P.GetTensorManifestResponse(**fields)


async def test_a_blob_is_served_once_the_worker_has_confirmed_it() -> None:
    """Blob and manifest come in place of the endpoints; within the keeping time nobody is asked again."""
    given = blob(b"worker-a")
    async with (
        worker_at(manifest, given) as endpoints,
        serving(LOCAL, confirm_keep_seconds=60) as service,
        service.client() as client,
    ):
        source = await client.publish(count=0, **endpoints)
        for _ in range(3):
            worker = (await client.get(source, "w0")).worker
            assert (worker.nixl_metadata, worker.worker_grpc_endpoint) == (given, "")
            assert (worker.metadata_endpoint, len(worker.tensors)) == ("", 3)
            assert (worker.status, worker.agent_name) == (READY, "worker-a")
        assert dict(service.blobs.counts) == {"confirmed": 1, "cached": 2}
        # A record that says that its worker has gone is answered as it was published.
        await client.status(source, "w0", status=3)
        assert (await client.get(source, "w0")).worker.worker_grpc_endpoint


async def test_the_commands_get_the_blob_that_a_local_worker_confirms() -> None:
    """A record of endpoints only has none of its own; what the answer comes from is said."""
    given = blob(b"worker-a")
    async with (
        worker_at(manifest, given) as endpoints,
        serving(LOCAL, confirm_keep_seconds=60) as service,
        service.client() as client,
    ):
        await client.publish(count=0, **endpoints)
        found = await service.part.view("worker", {"worker": "w0", "with": "blob"})
        assert (base64.b64decode(found["blob"]), found["blobFrom"]) == (given, "worker")


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"mx_source_id": "f" * 16}, "worker-a"),
        ({"worker_id": "other"}, "worker-a"),
        ({"agent_name": "other"}, "worker-a"),
        ({"worker_rank": 5}, "worker-a"),
        ({"tensors": []}, "worker-a"),
        ({}, "worker-b"),
    ],
    ids=["source", "worker", "agent", "rank", "no tensors", "another agent's blob"],
)
async def test_a_worker_that_does_not_confirm_is_answered_as_it_published(changes: Any, name: str) -> None:
    """The endpoints are passed on, and for a while it is no reason to hide other sources."""
    async with (
        worker_at(lambda r: manifest(r, **changes), blob(name.encode())) as endpoints,
        serving(LOCAL) as service,
        service.client() as client,
    ):
        source = await client.publish(count=0, **endpoints)
        worker = (await client.get(source, "w0")).worker
        assert worker.nixl_metadata == b""
        assert worker.worker_grpc_endpoint == endpoints["worker_grpc_endpoint"]
        [standing] = await service.backend.list_workers()
        assert service.blobs.suspect(standing)


async def test_a_worker_that_hangs_costs_a_bounded_time() -> None:
    """The answer comes after confirm_seconds, with the endpoints, for all who wait."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"127.0.0.1:{silent.getsockname()[1]}"
        async with (
            serving(LOCAL, confirm_seconds=0.3, request_seconds=60) as service,
            service.client() as client,
        ):
            source = await client.publish(
                count=0, worker_grpc_endpoint=endpoint, metadata_endpoint=endpoint, agent_name="a"
            )
            found = await asyncio.gather(*(client.get(source, "w0") for _ in range(10)))
            assert {each.worker.worker_grpc_endpoint for each in found} == {endpoint}
            assert service.blobs.counts["unconfirmed"] == 1


async def test_a_manifest_that_would_grow_in_memory_is_not_decoded() -> None:
    """Seven million empty tensors fit into 14 MiB, and would take 600 MB."""
    method = P2P.services["WorkerService"]["GetTensorManifest"]
    service_name, name = method.path.strip("/").split("/")

    async def endless(*_: Any) -> bytes:
        return b"\x0a\x00" * (7 << 20)

    server = grpc.aio.server()
    handler: Any = grpc.unary_unary_rpc_method_handler(endless)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service_name, {name: handler})])
    endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with (
        serving(LOCAL, confirm_seconds=30, request_seconds=60) as service,
        service.client() as client,
    ):
        source = await client.publish(
            count=0, worker_grpc_endpoint=endpoint, metadata_endpoint=endpoint, agent_name="a"
        )
        usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert (await client.get(source, "w0")).worker.worker_grpc_endpoint == endpoint
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < usage + (250 << 10)
        assert service.blobs.counts["unconfirmed"] == 1
    await server.stop(0)


async def test_workers_of_one_pod_that_hang_leave_places_to_others() -> None:
    """Those that wait for a place would not be confirmed, though they answer at once."""
    given = blob(b"worker-a")
    places = FixedPlaces(**{A: "127.0.0.1"})
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.listen(64)
        where = f"127.0.0.1:{silent.getsockname()[1]}"
        hung: dict[str, Any] = {"worker_grpc_endpoint": where, "metadata_endpoint": where, "agent_name": "a"}
        async with (
            worker_at(manifest, given) as endpoints,
            serving(places, confirm_seconds=20, request_seconds=60) as service,
            service.client() as good,
        ):
            source = await good.publish("good", count=0, **endpoints)
            async with service.client(pod(A)) as bad:
                names = [f"bad{number}" for number in range(12)]
                for one in names:
                    await bad.publish(one, count=0, **hung)
                calls = [asyncio.create_task(bad.get(source, one)) for one in names]
                while len(service.blobs._asked) < len(names):
                    await asyncio.sleep(0.01)
                assert (await good.get(source, "good")).worker.nixl_metadata == given
                for call in calls:
                    call.cancel()


async def test_a_nixl_agent_fetches_a_confirmed_blob_from_us() -> None:
    """At the port that the answer names; not once the worker is Stale, gone, or another agent."""
    given = blob(b"worker-a")
    async with (
        worker_at(manifest, given) as endpoints,
        serving(LOCAL, confirm_keep_seconds=0, nixl_listen="127.0.0.1") as service,
        service.client() as client,
    ):
        source = await client.publish(count=0, **endpoints)
        worker = (await client.get(source, "w0")).worker
        assert (worker.nixl_metadata, worker.worker_grpc_endpoint) == (given, "")
        assert worker.metadata_endpoint != endpoints["metadata_endpoint"]
        host, port = worker.metadata_endpoint.rsplit(":", 1)
        assert host == "127.0.0.1"
        assert await fetch_blob(host, int(port), deadline=20) == given
        held = [await service.methods.confirmed_blob((source, "w0")) for _ in range(2)]
        assert held[0] is held[1]  # callers who do not read their answers hold one copy of it
        assert (await client.get(source, "w0")).worker.metadata_endpoint == worker.metadata_endpoint
        assert service.part.reading()["hibernode_metadata_nixl_ports"] == 1
        for status, reason in ((3, "NoBlob"), (READY, "")):
            await client.status(source, "w0", status=status)
            if reason:
                with pytest.raises(NotFoundError) as caught:
                    await fetch_blob(host, int(port), deadline=20)
                assert caught.value.reason == reason
        await client.publish(count=0, **{**endpoints, "agent_name": "worker-b"})
        with pytest.raises(NotFoundError):
            await fetch_blob(host, int(port), deadline=20)
        await service.backend.remove_worker(source, "w0")
        await until(lambda: service.part.reading()["hibernode_metadata_nixl_ports"] == 0)
        with pytest.raises(NotFoundError) as caught:
            await fetch_blob(host, int(port), deadline=20)
        assert caught.value.reason == "ListenerUnreachable"


async def test_a_record_that_names_our_own_port_is_not_confirmed_by_us() -> None:
    """It would be asked for its blob in a circle: that ends with the time for a confirmation."""
    async with (
        worker_at(manifest, blob(b"worker-a")) as endpoints,
        serving(LOCAL, confirm_keep_seconds=0, confirm_seconds=0.5, nixl_listen="127.0.0.1") as service,
        service.client() as client,
    ):
        source = await client.publish(count=0, **endpoints)
        ours = (await client.get(source, "w0")).worker.metadata_endpoint
        await client.publish(count=0, **{**endpoints, "metadata_endpoint": ours})
        assert (await client.get(source, "w0")).worker.nixl_metadata == b""


async def test_ports_for_nixl_agents_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """One pod's oldest port goes for its newest one, and takes none of another pod's."""
    monkeypatch.setattr(nixl_ports, "MAX_PORTS", 3)
    monkeypatch.setattr(nixl_ports, "PER_OWNER", 2)

    async def find(key: tuple[str, str]) -> bytes | None:
        return key[1].encode()

    ports = nixl_ports.NixlPorts("127.0.0.1", find)
    await ports.check()
    before = open_files()
    at = {name: await ports.endpoint(("s", name), name[0]) for name in ("a0", "b0", "a1", "a2", "b1")}
    assert (len(ports), at["b1"]) == (3, "")
    assert await ports.endpoint(("s", "b0"), "b") == at["b0"]
    for name in ("b0", "a1", "a2"):
        host, port = at[name].rsplit(":", 1)
        assert await fetch_blob(host, int(port), deadline=20) == name.encode()
    with pytest.raises(NotFoundError):
        await fetch_blob("127.0.0.1", int(at["a0"].rsplit(":", 1)[1]), deadline=20)
    many = [socket.create_connection(("127.0.0.1", int(at["a1"].rsplit(":", 1)[1]))) for _ in range(100)]
    assert await fetch_blob("127.0.0.1", int(at["a1"].rsplit(":", 1)[1]), deadline=20) == b"a1"
    for sock in many:
        sock.close()
    await ports.close()
    await until(lambda: open_files() <= before)


@pytest.mark.parametrize(
    ("address", "error", "reason"),
    [
        ("0.0.0.0", UsageError, "OpenToAll"),
        ("192.0.2.1", UsageError, "OpenToAll"),
        ("127.0.0.999", UsageError, "OpenToAll"),
        ("192.0.2.1 open", StorageError, "ListenFailed"),
    ],
)
async def test_a_nixl_address_that_cannot_be_is_an_error_at_the_start(
    address: str, error: type[HibernodeError], reason: str
) -> None:
    """Other machines reach no blob unless that is said in as many words."""
    host, _, how = address.partition(" ")
    with pytest.raises(error) as caught:
        async with serving(nixl_listen=host, nixl_open=bool(how)):
            pass
    assert caught.value.reason == reason


async def test_the_cache_of_answers_is_bounded() -> None:
    """However many large records are read, the encoded ones stay within their bytes."""
    async with serving(cache_bytes=1 << 20) as service, service.client() as client:
        for number in range(8):
            source = await client.publish(f"w{number}", nixl_metadata=b"x" * 300_000)
            assert (await client.get(source, f"w{number}")).found
            assert service.blobs.bytes <= 1 << 20


# changes ------------------------------------------------------------------------------------------------


async def test_a_watch_tells_of_new_generations() -> None:
    """What is there, then SYNCED, then each change; the same content again has the same generation."""
    watch = CHANGES.services["Changes"]["Watch"]
    async with serving() as service, service.client() as client:
        source = await client.publish(nixl_metadata=b"1")
        call: Any = client.channel.unary_stream(
            watch.path, watch.request.SerializeToString, watch.response.FromString
        )
        stream = call(watch.request(mx_source_id=source))
        first = await stream.read()
        assert (first.kind, first.worker_id, first.status) == (1, "w0", READY)
        assert (await stream.read()).kind == 3
        await client.publish(nixl_metadata=b"1", ready=False)
        same = await stream.read()
        assert (same.generation, same.digest) == (first.generation, first.digest)
        await client.publish(nixl_metadata=b"2", ready=False)
        other = await stream.read()
        assert other.generation > first.generation
        assert other.digest != first.digest
        await service.backend.remove_worker(source, "w0")
        assert (await stream.read()).kind == 2
        stream.cancel()
        assert (await refused(call(watch.request(mx_source_id="x")).read()))[0] is CODE.INVALID_ARGUMENT


# the proto files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ['syntax = "proto2";', "package a; import", "message A { int128 x 1; }", "service S { rpm }", "hello"],
)
def test_a_proto_file_that_is_not_understood_is_an_error(text: str) -> None:
    """Nothing is passed over."""
    with pytest.raises((ValueError, StopIteration, RuntimeError)):
        proto.parse("x.proto", text)


def test_each_proto_file_has_a_pool_of_its_own() -> None:
    """The default pool does not know ModelExpress's names, so that the stock client may bring its own."""
    from google.protobuf import descriptor_pool

    proto.load("p2p")
    with pytest.raises(KeyError):
        descriptor_pool.Default().FindMessageTypeByName("model_express.p2p.SourceIdentity")
    assert replace(proto.load("p2p")).SourceIdentity is P2P.SourceIdentity
