"""The service with all that belongs to it: publishers are watched, old records go, NIXL agents get blobs."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from kubernetes.aio.client import Configuration

from hibernode.errors import RefusedError
from hibernode.host import procfs
from hibernode.kube.api import KubeApi
from hibernode.metadata.access import Caller
from hibernode.metadata.living import Living
from hibernode.metadata.owners import OwnerWatch
from hibernode.metadata.reaper import LEASE
from hibernode.metadata.records import NOBODY, PodRef, SourceInstance
from tests.unit.kube_fake import LEASES, FakeKube, Fault
from tests.unit.metadata_kit import POD, until
from tests.unit.service_kit import CODE, LOCAL, FixedPlaces, Running, refused, serving

PODS = "pods"


class Worker:
    """A shell with a process below it; the lower one is who calls."""

    def __init__(self) -> None:
        self.shell = subprocess.Popen(["sh", "-c", "sleep 1000 & wait"])
        self.pid = child_of(self.shell.pid)
        self.caller = Caller("uid:0", process=procfs.read_stat(self.pid).key)

    def end(self) -> None:
        """Kill both."""
        with suppress(ProcessLookupError), procfs.Process.open(self.pid) as process:
            process.send_signal(9)
        self.shell.kill()
        self.shell.wait()


def child_of(pid: int) -> int:
    """Wait for the child of a process."""
    while True:
        if children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            return int(children[0])


@pytest.fixture
def worker() -> Iterator[Worker]:
    """Start one."""
    made = Worker()
    yield made
    made.end()


async def ready(service: Running) -> set[str]:
    """List the workers that are READY."""
    async with service.client() as client:
        return {one.worker_id for one in await client.list(status_filter=2)}


async def test_a_killed_worker_is_gone_from_the_list_at_once(worker: Worker) -> None:
    """Its process was told by the kernel when it connected; others stay."""
    async with serving() as service:
        async with service.client(worker.caller) as client:
            await client.publish("w0")
        async with service.client() as client:
            await client.publish("w1")
        assert await ready(service) == {"w0", "w1"}
        assert service.part.status()["watched"] == 2
        worker.end()

        async def gone() -> bool:
            return await ready(service) == {"w1"}

        await until(gone)


async def test_a_removed_record_is_forgotten(worker: Worker) -> None:
    """Whoever removed it; no process is held for it any more."""
    async with serving() as service:
        async with service.client(worker.caller) as client:
            source = await client.publish("w0")
        await service.backend.remove_worker(source, "w0")
        await until(lambda: service.part.status()["watched"] == 0)


async def test_no_heartbeat_counts_between_the_mark_and_the_end_of_a_checkpoint(worker: Worker) -> None:
    """Of the whole tree, whoever sends it; the code is one after which the stock client tries again."""
    async with serving() as service, service.client(worker.caller) as client:
        source = await client.publish("w0")
        async with service.part.freezing(worker.shell.pid) as count, service.client() as other:
            assert count == 1
            assert await other.list(status_filter=2) == []
            code, text = await refused(other.status(source, "w0"))
            assert (code, "WorkerFrozen" in text) == (CODE.UNAVAILABLE, True)
            code, _ = await refused(other.publish("w0"))
            assert code is CODE.UNAVAILABLE
            assert (await other.status(source, "w0", status=3)).success
            assert await other.list(status_filter=2) == []
        assert (await client.status(source, "w0")).success
        assert [one.worker_id for one in await client.list(status_filter=2)] == ["w0"]


async def test_a_worker_has_no_connection_to_us_while_it_is_frozen(worker: Worker) -> None:
    """CRIU could not bring one back: those that there are are cut, new ones are refused, others' stay."""
    async with serving() as service, service.client() as other, service.client(worker.caller) as client:
        await client.publish("w0")
        service.who = None
        await other.list()
        half_open = connect(service, worker.caller)
        await until(lambda: service.front.connections == 3)
        async with service.part.freezing(worker.shell.pid):
            assert await ended(half_open)
            assert await ended(connect(service, worker.caller))
            assert service.front.refused["WorkerFrozen"] > 0
            assert service.front.connections == 1
            assert len(await other.list()) == 1
        service.who = worker.caller
        assert len(await client.list()) == 1


def connect(service: Running, who: Caller) -> socket.socket:
    """Connect and say nothing."""
    service.who = who
    sock = socket.socket(socket.AF_UNIX)
    sock.setblocking(False)
    sock.connect(str(service.path))
    return sock


async def ended(sock: socket.socket) -> bool:
    """Wait until the other end hangs up."""
    with sock, suppress(ConnectionResetError):
        return await asyncio.get_running_loop().sock_recv(sock, 1) == b""
    return True


async def test_a_command_that_freezes_counts_until_its_end(worker: Worker) -> None:
    """However it ends; who is no process of this pid namespace is refused."""
    async with serving() as service, service.client(worker.caller) as client:
        source = await client.publish("w0")
        command = subprocess.Popen(["sleep", "1000"])
        try:
            assert await service.part.freezing_by(command.pid, worker.shell.pid) == 1
            async with service.client() as other:
                assert (await refused(other.status(source, "w0")))[0] is CODE.UNAVAILABLE
            assert await service.part.freezing_by(command.pid, 1 << 22) == 0
        finally:
            command.kill()
            command.wait()

        async def back() -> bool:
            async with service.client() as other:
                with suppress(grpc.aio.AioRpcError):
                    await other.status(source, "w0")
            return await ready(service) == {"w0"}

        await until(back)
        with pytest.raises(RefusedError, match="pid namespace"):
            await service.part.freezing_by(command.pid, worker.shell.pid)
        apart = subprocess.Popen(["unshare", "--pid", "--fork", "--kill-child", "sleep", "1000"])
        try:
            with pytest.raises(RefusedError, match="pid namespace"):
                await service.part.freezing_by(child_of(apart.pid), worker.shell.pid)
        finally:
            apart.kill()
            apart.wait()


async def test_a_restored_worker_is_ready_again_with_another_generation(worker: Worker) -> None:
    """It publishes the same under the same id: who watches sees STALE, and then a new generation."""
    restored = Worker()
    try:
        async with serving() as service:
            seen: list[tuple[int, int]] = []

            async def watch() -> None:
                async for change in service.backend.watch():
                    one = change.instance
                    seen.extend([(int(one.status), one.generation)] if one is not None else [])

            task = asyncio.create_task(watch())
            async with service.client(worker.caller) as client:
                await client.publish("w0")
            await until(lambda: seen and seen[-1][0] == 2)
            async with service.part.freezing(worker.shell.pid):
                await until(lambda: seen[-1][0] == 3)
                worker.end()
            async with service.client(restored.caller) as client:
                await client.publish("w0")
            await until(lambda: seen[-1][0] == 2)
            generations = list(dict.fromkeys(generation for _, generation in seen))
            assert generations == sorted(generations)
            assert len(generations) == 2
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    finally:
        restored.end()


# the reaper -------------------------------------------------------------------------------------------


async def test_old_records_are_marked_and_removed_by_the_settings() -> None:
    """And counted."""
    async with serving(stale_seconds=0.1, remove_seconds=0.1, scan_seconds=0.1) as service:
        async with service.client(target=service.tcp) as client:
            await client.publish("w0")
        await until(lambda: not any(service.backend.stats().by_status.values()))
        reaped: Any = service.part.reading()["hibernode_metadata_reaped_records_total"]
        assert (reaped["marked"], reaped["removed"]) == (1, 1)


@pytest.fixture
async def fake() -> AsyncIterator[FakeKube]:
    """Start an API server in this process."""
    async with FakeKube() as server:
        yield server


@asynccontextmanager
async def in_cluster(fake: FakeKube, folder: Path, **settings: Any) -> AsyncIterator[Running]:
    """Run a service whose records are in the fake cluster."""
    kubeconfig = folder / "kubeconfig"
    kubeconfig.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "c", "cluster": {"server": fake.url}}],
                "users": [{"name": "u", "user": {}}],
                "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
                "current-context": "x",
            }
        )
    )
    chosen = {"backend": "kubernetes", "namespace": "ns", "kubeconfig": str(kubeconfig), **settings}
    async with serving(**chosen) as service:
        yield service


async def test_a_cluster_without_leave_yet_is_asked_again(
    fake: FakeKube, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At an API server's start its roles are not there at once: 403 passes."""
    monkeypatch.setattr("hibernode.metadata.part.RETRY_SECONDS", 0.02)
    fake.fail(3, "GET .*/modelmetadatas", Fault(403))
    async with in_cluster(fake, tmp_path) as service, service.client() as client:
        await client.publish("w0")
        assert await ready(service) == {"w0"}
        refused_first = [path for method, path in fake.calls if path.endswith("/modelmetadatas")]
        assert len(refused_first) > 3


async def test_of_the_agents_of_a_cluster_one_reaps(fake: FakeKube, tmp_path: Path) -> None:
    """Each process has a name of its own in the lease, also two of one node; it is given back at the end."""

    def holder() -> str:
        lease = fake.objects.get(("ns", LEASES, LEASE), {})
        return str(lease.get("spec", {}).get("holderIdentity", ""))

    holders = []
    for _ in range(2):
        async with in_cluster(fake, tmp_path, scan_seconds=0.1):
            await until(holder)
            holders.append(holder())
        assert holder() == ""
    assert holders[0] != holders[1]


# who lives --------------------------------------------------------------------------------------------


nothing: Any = None
"""In the place of a backend that is not asked."""


def pod_object(**fields: Any) -> dict[str, Any]:
    """Make a pod."""
    return {"metadata": {"name": POD.name, "uid": POD.uid}, "status": {"phase": "Running"}, **fields}


@pytest.mark.parametrize(
    ("there", "fault", "lives"),
    [
        (pod_object(), None, True),
        (pod_object(metadata={"name": POD.name, "uid": "another"}), None, False),
        (pod_object(status={"phase": "Succeeded"}), None, False),
        (pod_object(status="odd"), None, True),
        (None, None, False),
        (pod_object(), Fault(403), True),
        (pod_object(), Fault(500), True),
        (pod_object(), Fault(422), True),
        (pod_object(), Fault(cut=True), True),
    ],
)
async def test_an_owner_in_the_cluster_lives_unless_it_surely_does_not(
    fake: FakeKube, there: dict[str, Any] | None, fault: Fault | None, lives: bool
) -> None:
    """By the pod of its name and its uid; an answer holds for a while."""
    if there is not None:
        fake.put(PODS, there)
    if fault is not None:
        fake.fail(10**6, "/pods/", fault)
    api = KubeApi(Configuration(host=fake.url), total_seconds=0.2)
    living = Living(OwnerWatch(nothing), LOCAL, api)
    one = SourceInstance("s", "w", "m", owner=POD)
    assert await living(one) is lives
    asked = len(fake.calls)
    assert await living(one) is lives
    assert len(fake.calls) == asked
    await api.close()


async def test_the_cluster_is_asked_only_where_the_node_does_not_know(
    fake: FakeKube, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor about a name that no pod has: it would get into a URL; what is known stays bounded."""
    monkeypatch.setattr("hibernode.metadata.living.MAX_ANSWERS", 2)
    api = KubeApi(Configuration(host=fake.url))
    living = Living(OwnerWatch(nothing), FixedPlaces(here="10.0.0.7"), api)

    async def lives(owner: PodRef | None) -> bool:
        return await living(SourceInstance("s", "w", "m", owner=owner))

    assert await lives(PodRef("p", "here", "ns"))
    assert not await lives(None)
    assert not await lives(PodRef(NOBODY, "uid:0", NOBODY))
    for name in ("../secrets/x", "a b", "A", "", "x" * 254):
        assert not await lives(PodRef(name, f"u{name}", "ns"))
        assert not await lives(PodRef("p", f"v{name}", name))
    assert fake.calls == []
    for number in range(5):
        assert not await lives(PodRef("p", f"n{number}", "ns"))
    assert len(fake.calls) == 5
    assert len(living._answers) == 2
    await api.close()
