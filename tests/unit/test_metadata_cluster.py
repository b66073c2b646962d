"""The metadata service over records in a cluster, and what it knows of this machine's pods."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import pytest

from hibernode.metadata import quota
from hibernode.metadata.locality import reachable, survey
from hibernode.metadata.mapping import ANNOTATION_OWNER, owner_of
from tests.unit.cgroup_kit import Cgroups, _cgroup_kit, box, container_id, pod_uid  # noqa: F401 - a fixture
from tests.unit.kube_fake import FakeKube, Fault
from tests.unit.metadata_kit import kube_backend
from tests.unit.service_kit import CODE, READY, A, B, pod, publication, refused, serving

NAMES: dict[str, Any] = {"pod_uid": A, "pod_name": "decode-0", "pod_namespace": "ns"}


async def test_in_a_cluster_a_record_belongs_to_its_pods_object() -> None:
    """The owner outlives the agent, also a pod's that tells no name: no reference is made up for it."""
    async with FakeKube() as kube:
        async with serving(records=kube_backend(kube.url, time.time_ns, total=1.0)) as service:
            async with service.client(pod(A)) as worker:
                source = await worker.publish("named", **NAMES)
                await worker.publish("nameless", 1)
            async with service.client(pod(B)) as stranger:
                for name, rank in (("named", 0), ("nameless", 1)):
                    assert (await refused(stranger.status(source, name, rank)))[0] is CODE.PERMISSION_DENIED
                assert len(await stranger.list(status_filter=READY)) == 2
                assert (await stranger.get(source, "named")).worker.tensors
        owners = {
            name: kube.get("modelmetadatas", f"mx-source-{source}-{name}")["metadata"].get(
                "ownerReferences", []
            )
            for name in ("named", "nameless")
        }
        assert [one["uid"] for one in owners["named"]] == [A]
        assert owners["nameless"] == []
        async with serving(records=kube_backend(kube.url, time.time_ns, total=1.0)) as service:
            async with service.client(pod(B)) as stranger:
                for name, rank in (("named", 0), ("nameless", 1)):
                    assert (await refused(stranger.status(source, name, rank)))[0] is CODE.PERMISSION_DENIED
            async with service.client(pod(A)) as worker:
                assert (await worker.status(source, "nameless", 1)).success
                assert (await worker.status(source, "named")).success


async def test_a_record_of_another_namespaces_pod_is_nobody_elses_on_any_node() -> None:
    """No reference leads out of a namespace, so the object says by itself whose it is, to every agent."""
    async with FakeKube() as kube:
        here, there = (kube_backend(kube.url, time.time_ns, total=1.0) for _ in range(2))
        async with serving(records=here) as one, serving(records=there) as two:
            async with one.client(pod(A)) as worker:
                source = await worker.publish("w0", **{**NAMES, "pod_namespace": "team"})
            async with two.client(pod(B)) as stranger:
                while not await stranger.list(status_filter=READY):
                    await asyncio.sleep(0.01)
                for call in (
                    stranger.status(source, "w0", status=3),
                    stranger.call("PublishMetadata", publication("w0")),
                ):
                    assert (await refused(call))[0] is CODE.PERMISSION_DENIED


@pytest.mark.parametrize("uid", ["uid:0", "loopback", "container::0123", ""])
def test_an_object_cannot_name_an_owner_that_is_no_pod(uid: str) -> None:
    """Else who may write objects could have every agent take one for its own node's, and connect to it."""
    reference = {"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": uid}
    assert owner_of({"ownerReferences": [reference]}) is None
    assert owner_of({"annotations": {ANNOTATION_OWNER: uid}}) is None


@pytest.mark.parametrize("kind", ["sqlite", "kubernetes"])
async def test_one_pod_cannot_keep_any_number_of_records(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Its own stale ones make room, as a worker that starts again and again leaves; others' do not count."""
    monkeypatch.setattr(quota, "MAX_RECORDS", 3)
    async with FakeKube() as kube:
        records = kube_backend(kube.url, time.time_ns, total=1.0) if kind == "kubernetes" else None
        async with serving(records=records) as service:
            async with service.client(pod(A)) as worker:
                source = await worker.publish("w0")
                for number in range(2):
                    await worker.publish(f"w{number + 1}", number)
                answer = await worker.call("PublishMetadata", publication("w9"))
                assert (answer.success, "TooManyRecords" in answer.message) == (False, True)
                assert (await worker.call("PublishMetadata", publication("w0", agent_name="new"))).success
                await worker.status(source, "w1", status=3)
                assert (await worker.call("PublishMetadata", publication("w9"))).success
                assert {one.worker_id for one in await worker.list()} == {"w0", "w2", "w9"}
                monkeypatch.setattr(quota, "MAX_RECORDS", 9)
                monkeypatch.setattr(quota, "MAX_BYTES", 1 << 16)
                large = publication("w7", nixl_metadata=bytes(1 << 16))
                assert not (await worker.call("PublishMetadata", large)).success
            async with service.client(pod(B)) as other:
                assert (await other.call("PublishMetadata", publication("w8"))).success
                assert {one.worker_id for one in await other.list()} == {"w0", "w2", "w8", "w9"}


async def test_an_api_server_that_is_down_is_unavailable_and_comes_back() -> None:
    """A publication that cannot be written is no success, and no empty answer."""
    async with FakeKube() as kube:
        backend = kube_backend(kube.url, time.time_ns, total=1.0)
        async with serving(records=backend) as service, service.client(pod(A)) as worker:
            source = await worker.publish("w0", **NAMES)
            down = Fault(503)
            kube.faults.append(lambda *_: down)
            assert (await refused(worker.publish("w1", 1, **NAMES)))[0] is CODE.UNAVAILABLE
            assert (await refused(worker.status(source, "w0")))[0] is CODE.UNAVAILABLE
            assert len(await worker.list(status_filter=READY)) == 1  # the watched list still stands
            kube.faults.clear()
            assert (await worker.status(source, "w0")).success


def test_a_pod_of_this_machine_is_found_with_its_addresses(cgroup_kit: Cgroups) -> None:
    """By its cgroup; one that shares the node's network is at the node's addresses."""
    uid = pod_uid()
    with box(cgroup_kit.joins(f"kubepods/burstable/pod{uid}/{container_id()}")) as pid:
        node = survey("here")
        assert os.readlink(f"/proc/{pid}/ns/net") == os.readlink("/proc/self/ns/net")
        assert node.pods[uid] == node.addresses
        assert reachable(uid, "127.0.0.1", node)
    assert uid not in survey("here").pods
