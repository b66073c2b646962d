"""The stock ModelExpress client and real NIXL agents, with the metadata service between them."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import pytest

from tests.real.modelexpress_kit import PATIENCE, Stock, StockError
from tests.real.nixl_kit import Agent, Memory, free_port
from tests.unit.cgroup_kit import Cgroups, _cgroup_kit, container_id, pod_uid  # noqa: F401 - a fixture
from tests.unit.service_kit import LOCAL, P2P, serving

SIZE = 64 << 20
MODEL = "Org/Modèle-Ü"
"""Not ASCII: the stock client computes another id for it than the server."""


async def test_the_wire_is_the_stock_clients() -> None:
    """Every message, enum and service of ours has the fields, numbers and types of the client on PyPI."""
    async with Stock("nowhere:1") as stock:
        theirs = type(P2P.file).FromString(base64.b64decode(await stock.do("descriptors")))
    ours = P2P.file
    assert ours.package == theirs.package
    assert list(ours.enum_type) == list(theirs.enum_type)
    messages = {message.name: message for message in theirs.message_type}
    for message in ours.message_type:
        known = messages[message.name]
        assert _fields(message) == _fields(known), message.name
        assert message.oneof_decl == known.oneof_decl
        assert list(map(_fields, message.nested_type)) == list(map(_fields, known.nested_type))
    methods = {(s.name, m.name): m for s in theirs.service for m in s.method}
    for service in ours.service:
        for method in service.method:
            assert method == methods[service.name, method.name]


def _fields(message: Any) -> list[Any]:
    """List the fields by number, without what is not on the wire."""
    for field in message.field:
        field.ClearField("options")
        field.ClearField("json_name")
    return sorted(message.field, key=lambda field: field.number)


@pytest.mark.parametrize("door", ["unix", "tcp"])
async def test_the_stock_client_works_unchanged(door: str) -> None:
    """It publishes, heartbeats, lists, discovers and gets, by the Unix socket and by TCP."""
    async with serving(LOCAL) as service:
        target = service.target if door == "unix" else service.tcp
        async with Stock(target) as source, Stock(target) as peer:
            assert await peer.do("ready", model=MODEL) == []
            blob = base64.b64encode(b"opaque" * 1000).decode()
            memory = [["a.weight", 2**63, 4096], ["b.weight", 1, 2]]
            published = await source.do(
                "publish", model=MODEL, worker_id="cafe0123", rank=3, blob=blob, memory=memory
            )
            assert await peer.do("ready", model=MODEL) == []
            assert await source.do("heartbeat", source=published, worker_id="cafe0123", rank=3, status=2)
            [[found, worker, rank, updated]] = await peer.do("ready", model=MODEL)
            assert (found, worker, rank) == (published, "cafe0123", 3)
            assert updated > 0
            answer = await peer.do("get", source=found, worker_id=worker)
            assert answer == {
                "found": True, "status": 2, "blob": blob, "agent": "", "endpoint": "", "listener": "",
                "tensors": memory,
            }  # fmt: skip
            # The client's own id for this name is another one, and finds the same record.
            alias = await peer.do("source_id", model=MODEL)
            assert alias != published
            assert (await peer.do("get", source=alias, worker_id=worker))["found"]
            assert await source.do("heartbeat", source=published, worker_id="cafe0123", rank=3, status=3)
            assert await peer.do("ready", model=MODEL) == []
            assert not await source.do("heartbeat", source=published, worker_id="cafe0123", rank=4, status=2)
            assert not (await peer.do("get", source="0" * 16, worker_id=worker))["found"]


async def test_the_stock_client_cannot_name_a_pod_that_it_is_not_in() -> None:
    """POD_UID of another pod is refused on both doors, and nothing is written."""
    async with serving(LOCAL) as service:
        for target in (service.target, service.tcp):
            uid = "0f0e0d0c-0000-4000-8000-000000000001"
            async with Stock(target, POD_NAME="p", POD_UID=uid, POD_NAMESPACE="n") as thief:
                with pytest.raises(StockError, match="WrongPod"):
                    await thief.do("publish", model=MODEL, worker_id="w", rank=0, blob="", memory=[])
                assert await thief.do("ready", model=MODEL) == []


async def test_a_pod_publishes_for_itself_only(cgroup_kit: Cgroups) -> None:
    """Pods are told by their cgroups; one inside a pod that has another's name is still that pod."""
    mine, other, container = pod_uid(), pod_uid(), container_id()
    path = f"kubepods/burstable/pod{mine}/{container}"
    theirs = f"kubepods/besteffort/pod{other}/{container_id()}"
    lie = f"{path}/kubepods/besteffort/pod{other}/{container_id()}"
    identity = {"POD_NAME": "p", "POD_NAMESPACE": "n"}
    publish: dict[str, Any] = {
        "model": MODEL,
        "worker_id": "w",
        "rank": 0,
        "blob": "",
        "memory": [["t", 1, 2]],
    }
    async with (
        serving(LOCAL) as service,
        Stock(service.target, joins=cgroup_kit.joins(path), POD_UID=mine, **identity) as worker,
        Stock(service.target, joins=cgroup_kit.joins(path)) as neighbour,
        Stock(service.target, joins=cgroup_kit.joins(theirs)) as stranger,
        Stock(service.target, joins=cgroup_kit.joins(lie), POD_UID=other, **identity) as liar,
        Stock(service.tcp) as outside,
    ):
        source = await worker.do("publish", **publish)
        beat = {"source": source, "worker_id": "w", "rank": 0}
        assert await worker.do("heartbeat", **beat, status=2)
        assert await neighbour.do("heartbeat", **beat, status=2)  # another process of the same pod
        for thief in (stranger, liar, outside):
            with pytest.raises(StockError, match="WrongPod"):
                await thief.do("publish", **publish)
        for thief in (stranger, outside):
            with pytest.raises(StockError, match="WrongPod"):
                await thief.do("heartbeat", **beat, status=3)
        assert await liar.do("heartbeat", **beat, status=2)  # it is in the worker's pod, whatever it says
        [[_, _, _, _]] = await stranger.do("ready", model=MODEL)
        assert (await stranger.do("get", source=source, worker_id="w"))["tensors"] == [["t", 1, 2]]


@pytest.mark.nixl
async def test_a_peer_gets_the_blob_from_us_and_reads_64_mib_before_and_after_a_restart() -> None:
    """The worker confirms its record, the peer loads its blob; killed it is gone, restarted it is read again.

    Nothing but the end of its process can take it from the list: a heartbeat counts for 90 s. The peer takes
    the first blob from the answer, and the second as NIXL agents do, from the port that the answer names.
    """
    generations: list[int] = []
    async with (
        serving(LOCAL, confirm_keep_seconds=0, nixl_listen="127.0.0.1") as service,
        Stock(service.target) as asker,
    ):
        changes = asyncio.create_task(_generations(service.target, generations))
        with free_port() as port, free_port() as own:
            async with Agent("target", port=own) as target:
                for seed in (1, 2):
                    async with (
                        Agent("mx-auto-worker0-1", port=port) as source,
                        Stock(service.target) as worker,
                    ):
                        memory = await source.register(SIZE, seed=seed)
                        await worker.do(
                            "start",
                            model=MODEL,
                            worker_id="cafe0123",
                            rank=0,
                            agent=source.name,
                            memory=[["w", memory.address, memory.size]],
                            port=port,
                        )
                        [[found, _, _, _]] = await asker.wait_ready(MODEL, "cafe0123")
                        answer = await confirmed(asker, found)
                        blob = base64.b64decode(answer["blob"])
                        assert blob == await source.blob()
                        [[_, address, size]] = answer["tensors"]
                        if seed == 1:
                            assert await target.add(blob) == source.name
                        else:
                            await target.fetch(source.name, int(answer["listener"].rpartition(":")[2]))
                            await target.wait_known(source.name)
                        read = await target.read(source.name, Memory(address, size, ""))
                        assert read == memory.digest
                        await source.kill()
                        await worker.kill()
                    await asker.wait_ready(MODEL)
                    await target.remove("mx-auto-worker0-1")
                    # Dead: the blob that was good a moment ago is not served, the endpoints are.
                    answer = await asker.do("get", source=found, worker_id="cafe0123")
                    assert (answer["blob"], bool(answer["endpoint"])) == ("", True)
                    async with asyncio.timeout(PATIENCE):
                        while len(set(generations)) < seed:
                            await asyncio.sleep(0.02)
        changes.cancel()
        await asyncio.gather(changes, return_exceptions=True)
    assert generations == sorted(generations)
    assert len(set(generations)) == 2


async def test_a_stock_worker_survives_that_its_heartbeats_are_refused() -> None:
    """While it is checkpointed it is not READY; afterwards its own next heartbeat makes it so."""
    async with serving(LOCAL) as service, Stock(service.target) as asker, Stock(service.target) as worker:
        start = {"model": MODEL, "worker_id": "cafe0123", "rank": 0, "agent": "a", "memory": [], "port": 1}
        await worker.do("start", **start)
        await asker.wait_ready(MODEL, "cafe0123")
        async with service.part.freezing(worker.pid) as count:
            assert count == 1
            assert await asker.do("ready", model=MODEL) == []
            await _until(lambda: service.front.refused["WorkerFrozen"])  # it has no connection meanwhile
            assert await asker.do("ready", model=MODEL) == []
        await asker.wait_ready(MODEL, "cafe0123")
        [one] = await service.backend.list_workers()
        assert one.status == 2


async def _until(true: Any) -> None:
    async with asyncio.timeout(PATIENCE):
        while not true():
            await asyncio.sleep(0.02)


async def confirmed(asker: Stock, source: str) -> dict[str, Any]:
    """Ask until the worker, which may be just starting, has confirmed its record."""
    async with asyncio.timeout(PATIENCE):
        while True:
            answer: dict[str, Any] = await asker.do("get", source=source, worker_id="cafe0123")
            if answer["blob"]:
                assert answer["endpoint"] == ""
                return answer
            await asyncio.sleep(0.1)


async def _generations(target: str, seen: list[int]) -> None:
    """Note the generations that the change signal tells of."""
    import grpc

    from hibernode.metadata.service import CHANGES

    watch = CHANGES.services["Changes"]["Watch"]
    async with grpc.aio.insecure_channel(target, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        call = channel.unary_stream(watch.path, watch.request.SerializeToString, watch.response.FromString)
        async for change in call(watch.request()):
            seen += [change.generation] if change.worker_id else []
