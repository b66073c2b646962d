"""The suite of all metadata backends on a real API server, with the rights that ship; and its outage."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import yaml

from hibernode.errors import UnavailableError
from hibernode.kube.api import KubeApi, KubeStatusError
from hibernode.kube.lease import Lease
from hibernode.metadata.backend import ChangeKind
from hibernode.metadata.backends.kubernetes import KubernetesBackend
from hibernode.metadata.living import Living
from hibernode.metadata.owners import OwnerWatch
from hibernode.metadata.reaper import LEASE, Reaped, Reaper
from hibernode.metadata.records import PodRef, SourceInstance, SourceStatus
from tests.cluster.kube import Kube
from tests.real import node
from tests.unit.metadata_kit import BASE, BASE_ID, Clock, Store, central, tensors, until
from tests.unit.service_kit import FixedPlaces

pytest.register_assert_rewrite("tests.unit.metadata_suite")

from tests.unit.metadata_suite import *  # noqa: E402, F403
from tests.unit.metadata_suite import ready  # noqa: E402

pytestmark = pytest.mark.cluster

DAEMONSET = Path(__file__).parents[2] / "daemonset"
ACCOUNT = "agent"
OUTAGE_SECONDS = 8.0
"""How old a list may grow in the test of an outage: enough for a loaded machine, and worth waiting for."""


@pytest.fixture(scope="session")
def crd(kube: Kube) -> None:
    """Install the definition that ships, once."""
    kube.apply(DAEMONSET / "crds/modelmetadata.yaml")


@pytest.fixture
def token(kube: Kube, namespace: str, crd: None) -> str:
    """Make a service account with exactly the role that ships, and wait until its rights count."""
    token = kube.account(namespace, ACCOUNT)
    role = yaml.safe_load((DAEMONSET / "rbac/metadata.yaml").read_text())
    kube.bind(namespace, ACCOUNT, role["rules"])
    places = [f"/apis/modelexpress.nvidia.com/v1alpha1/namespaces/{namespace}/modelmetadatas"]
    places.append(f"/api/v1/namespaces/{namespace}/configmaps")
    node.until("rights", lambda: all(kube.request("GET", one, token=token).status == 200 for one in places))
    return token


def backend(kube: Kube, namespace: str, token: str, clock: Clock, **limits: Any) -> KubernetesBackend:
    """Make a backend of the service account; it is patient, as the machine may be busy."""
    values = {"call": 20.0, "total": 60.0, "watch": 30, "max_age": 90.0, **limits}
    api = KubeApi(
        kube.configuration(token),
        call_seconds=values["call"],
        total_seconds=values["total"],
        watch_seconds=values["watch"],
    )
    return KubernetesBackend(api, namespace, clock=clock, max_age=values["max_age"])


@pytest.fixture
async def store(kube: Kube, namespace: str, token: str) -> AsyncIterator[Store]:
    """Open an empty namespace from two agents."""
    clock = Clock()
    one, other = (backend(kube, namespace, token, clock) for _ in range(2))
    await one.connect()
    await other.connect()
    yield Store(one, other, clock, races=1000, namespace=namespace)
    await one.close()
    await other.close()


def test_the_role_grants_no_more_than_the_docs_say(kube, namespace, token):
    """Neither other objects, nor a change of a ConfigMap, nor a whole status."""
    secrets = f"/api/v1/namespaces/{namespace}/secrets"
    assert kube.request("GET", secrets, token=token).status == 403
    configmaps = f"/api/v1/namespaces/{namespace}/configmaps"
    kube.make(configmaps, {"metadata": {"name": "theirs"}})
    assert kube.request("PUT", f"{configmaps}/theirs", {}, token=token).status == 403
    elsewhere = "/apis/modelexpress.nvidia.com/v1alpha1/namespaces/default/modelmetadatas"
    assert kube.request("GET", elsewhere, token=token).status == 403


async def test_the_role_lets_one_reaper_have_the_lease(kube: Kube, namespace: str, token: str) -> None:
    """It makes, renews, gives back and takes it; the other does not get it meanwhile."""
    apis = [KubeApi(kube.configuration(token), call_seconds=20.0, total_seconds=60.0) for _ in range(2)]
    first, second = (Lease(api, namespace, LEASE, f"agent-{number}") for number, api in enumerate(apis))
    assert await first.ask()
    assert await first.ask()
    assert not await second.ask()
    await first.release()
    assert await second.ask()
    assert not await first.ask()
    for api in apis:
        await api.close()


async def test_the_role_lets_the_reaper_ask_who_lives(kube: Kube, namespace: str, token: str) -> None:
    """A pod that is not there is known not to live; without the right to ask it would be taken for living."""
    api = KubeApi(kube.configuration(token), call_seconds=20.0, total_seconds=60.0)
    nothing: Any = None
    living = Living(OwnerWatch(nothing), FixedPlaces(), api)
    owner = PodRef("gone", "0b0e8d0c-0000-4000-8000-000000000001", namespace)
    assert not await living(SourceInstance(BASE_ID, "w0", "m", owner=owner))
    await api.close()


async def test_the_reaper_works_with_the_role(store: Store) -> None:
    """It marks, and removes with preconditions."""
    await ready(store, "w0")
    await ready(store, "w1")

    async def nobody(_: object) -> bool:
        return False

    reaper = Reaper(store.backend, owner_lives=nobody, clock=store.clock)
    store.clock.forward(91)
    assert await reaper.scan() == Reaped(marked=2)
    store.clock.forward(3500)
    assert await store.other.update_status(BASE_ID, "w1", 0, SourceStatus.READY, store.clock.ms)

    async def heard() -> bool:
        return {one.status for one in await store.backend.list_workers()} == {
            SourceStatus.READY,
            SourceStatus.STALE,
        }

    await until(heard)
    store.clock.forward(101)
    assert (await reaper.scan()).removed == 1
    assert [one.worker_id for one in await store.backend.list_workers()] == ["w1"]


async def test_a_kind_that_the_server_does_not_know_is_told_from_an_object_that_is_not_there(
    kube: Kube, namespace: str, crd: None
) -> None:
    """The one is an outage, the other no record; both are a 404."""
    everything = {"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}
    token = kube.account(namespace, "all")
    kube.bind(namespace, "all", [everything])
    place = f"/apis/modelexpress.nvidia.com/v1alpha1/namespaces/{namespace}"
    node.until("rights", lambda: kube.request("GET", f"{place}/modelmetadatas", token=token).status == 200)
    api = KubeApi(kube.configuration(token), call_seconds=20.0, total_seconds=60.0)
    with pytest.raises(KubeStatusError) as missing:
        await api.call("GET", f"{place}/modelmetadatas/none", api.budget())
    assert missing.value.code == 404
    with pytest.raises(UnavailableError) as unknown:
        await api.call("GET", f"{place}/nothings/none", api.budget())
    assert unknown.value.reason == "NoCrd"
    await api.close()


async def test_nothing_is_lost_while_the_api_server_is_away(kube: Kube, namespace: str, token: str) -> None:
    """Lists stand up to their age, then they are an error; later they, the records and a watch go on."""
    clock = Clock()
    one = backend(kube, namespace, token, clock, watch=1, total=3.0, max_age=OUTAGE_SECONDS)
    other = backend(kube, namespace, token, clock, watch=1, max_age=3600.0)
    await one.connect()
    await other.connect()
    store = Store(one, other, clock)
    await ready(store, "w0")
    await other.publish_metadata(BASE, "w1", central(1, tensors=tensors(300)))
    heard: list[tuple[str, str, SourceStatus]] = []

    async def follow() -> None:
        async with aclosing(other.watch()) as changes:  # type: ignore[type-var]
            async for change in changes:
                if change.instance is not None:
                    found = change.instance
                    heard.append((change.kind, found.worker_id, found.status))

    async def silent() -> bool:
        try:
            await one.list_workers()
        except UnavailableError:
            return True
        return False

    async def back() -> bool:
        return not await silent()

    following = asyncio.create_task(follow())
    await until(lambda: len(heard) >= 2)
    await asyncio.to_thread(kube.stop_api)
    try:
        await until(silent)
        for call in (
            one.list_sources(),
            one.get_metadata(BASE_ID, "w0"),
            one.update_status(BASE_ID, "w0", 0, SourceStatus.READY, clock.forward(1)),
            one.publish_metadata(BASE, "w2", central(2)),
        ):
            with pytest.raises(UnavailableError):
                await call
        assert {found.worker_id for found in await other.list_workers()} == {"w0", "w1"}
    finally:
        await asyncio.to_thread(kube.start_api)
    await until(back)
    assert {found.worker_id for found in await one.list_workers()} == {"w0", "w1"}
    record = await one.get_metadata(BASE_ID, "w1")
    assert record is not None
    assert record.worker is not None
    assert (record.worker.payload, record.worker.tensors) == (central(1).payload, tensors(300))
    assert await one.update_status(BASE_ID, "w0", 0, SourceStatus.STALE, clock.forward(1))
    await until(lambda: (ChangeKind.PUT, "w0", SourceStatus.STALE) in heard)
    await one.close()
    await other.close()
    await following
