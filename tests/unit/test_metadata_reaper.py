"""The reaper: what it decides, that it changes nothing newer than it saw, and that there is one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kubernetes.aio.client import Configuration

from hibernode.errors import UnavailableError
from hibernode.kube.api import KubeApi
from hibernode.kube.lease import Lease
from hibernode.metadata.reaper import LEASE, Limits, Reaped, Reaper, Verdict, decide
from hibernode.metadata.records import SourceInstance, SourceStatus
from tests.unit.kube_fake import LEASES, OBJECTS, FakeKube, Fault
from tests.unit.metadata_kit import (
    BASE,
    BASE_ID,
    MODEL,
    POD,
    Clock,
    Store,
    kube_store,
    object_name,
    peer,
    sqlite_store,
    until,
)

READY, STALE, UNKNOWN = SourceStatus.READY, SourceStatus.STALE, SourceStatus.UNKNOWN
INITIALIZING = SourceStatus.INITIALIZING
KEEP, MARK, REMOVE = Verdict.KEEP, Verdict.MARK, Verdict.REMOVE
ONE = SourceInstance(BASE_ID, "w0", MODEL, updated_at=1)


async def nobody(_: SourceInstance) -> bool:
    """Say that no owner lives."""
    return False


# what it decides --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "seconds", "verdict"),
    [
        (READY, 120, MARK),
        (READY, 10, KEEP),
        (READY, 0, KEEP),
        (READY, 90, KEEP),
        (READY, 90.001, MARK),
        (READY, 7200, MARK),
        (INITIALIZING, 120, MARK),
        (INITIALIZING, 90, KEEP),
        (STALE, 7200, REMOVE),
        (STALE, 3600, KEEP),
        (STALE, 3600.001, REMOVE),
        (STALE, 120, KEEP),
        (UNKNOWN, 120, KEEP),
        (UNKNOWN, 3600, KEEP),
        (UNKNOWN, 7200, REMOVE),
    ],
)
def test_age_decides(status: SourceStatus, seconds: float, verdict: Verdict) -> None:
    """Upstream's cases and its limits, over which a record has to be, not at them."""
    assert decide(replace(ONE, status=status), int(seconds * 1000), Limits(), owned=False) is verdict


@pytest.mark.parametrize(
    ("fields", "verdict"),
    [
        ({"status": UNKNOWN}, KEEP),
        ({"whole": False}, KEEP),
        ({"status": STALE}, REMOVE),
        ({"status": READY}, MARK),
    ],
    ids=str,
)
def test_a_living_owner_saves_what_never_had_a_status(fields: dict[str, Any], verdict: Verdict) -> None:
    """And nothing else: a worker that was ready has heartbeats."""
    assert decide(replace(ONE, **fields), 7_200_000, Limits(), owned=True) is verdict
    assert decide(replace(ONE, whole=False), 7_200_000, Limits(), owned=False) is REMOVE
    assert decide(replace(ONE, whole=False, status=READY), 120_000, Limits(), owned=False) is KEEP


# scans, on both backends ------------------------------------------------------------------------------


@pytest.fixture
async def fake() -> AsyncIterator[FakeKube]:
    """Start an API server in this process."""
    async with FakeKube() as server:
        yield server


@pytest.fixture(params=["sqlite", "kubernetes"])
async def store(request: pytest.FixtureRequest, tmp_path: Path, fake: FakeKube) -> AsyncIterator[Store]:
    """Open an empty store."""
    async with sqlite_store(tmp_path) if request.param == "sqlite" else kube_store(fake) as opened:
        yield opened


async def publish(store: Store, worker_id: str = "w0", status: SourceStatus = READY, **fields: Any) -> None:
    """Publish a worker of a status."""
    await store.backend.publish_metadata(BASE, worker_id, peer(), **fields)
    await store.backend.update_status(BASE_ID, worker_id, 0, status, store.clock.ms)


async def statuses(store: Store) -> dict[str, SourceStatus]:
    """List the status of each worker."""
    return {one.worker_id: one.status for one in await store.backend.list_workers()}


def reaper(store: Store, **options: Any) -> Reaper:
    """Make a reaper of the store's records."""
    return Reaper(store.backend, owner_lives=options.pop("owner_lives", nobody), clock=store.clock, **options)


@pytest.mark.parametrize("status", [READY, INITIALIZING])
async def test_a_silent_worker_is_marked_then_removed(store: Store, status: SourceStatus) -> None:
    """The hour begins with the mark; the others stay as they are."""
    await publish(store, status=status)
    store.clock.forward(110)
    await publish(store, "w1")
    store.clock.forward(10)
    scan = reaper(store).scan
    assert await scan() == Reaped(marked=1)
    assert await statuses(store) == {"w0": STALE, "w1": READY}
    for _ in range(120):
        await store.backend.update_status(BASE_ID, "w1", 0, READY, store.clock.forward(30))
        assert await scan() == Reaped()
    store.clock.forward(1)
    assert await scan() == Reaped(removed=1)
    assert await statuses(store) == {"w1": READY}


async def test_unknown_records_are_removed_without_a_living_owner(store: Store) -> None:
    """The worker died after its publication and before its first heartbeat."""
    pod = replace(POD, namespace=store.namespace)
    dead = replace(pod, name="gone", uid="0b0e8d0c-0000-4000-8000-000000000009")
    for worker_id, owner in (("w0", None), ("w1", pod), ("w2", dead)):
        await store.backend.publish_metadata(BASE, worker_id, peer(), owner=owner)

    async def lives(one: SourceInstance) -> bool:
        return one.owner == pod

    scan = reaper(store, owner_lives=lives).scan
    store.clock.forward(3600)
    assert await scan() == Reaped()
    store.clock.forward(1)
    assert await scan() == Reaped(removed=2)
    assert await statuses(store) == {"w1": UNKNOWN}


@pytest.mark.parametrize("seconds", [120, 7200])
async def test_a_heartbeat_between_list_and_write_is_not_overwritten(store: Store, seconds: int) -> None:
    """Neither by a mark nor by a removal; the next scan sees a living worker."""
    await publish(store, status=READY if seconds == 120 else STALE)
    store.clock.forward(seconds)
    backend, real = store.backend, store.backend.list_workers
    assert await backend.list_workers()

    async def then_a_heartbeat(*query: Any) -> list[SourceInstance]:
        found = await real(*query)
        await backend.update_status(BASE_ID, "w0", 0, READY, store.clock.ms)
        return found

    one = reaper(store)
    backend.list_workers = then_a_heartbeat  # type: ignore[assignment,method-assign]
    assert await one.scan() == Reaped(kept=1)
    backend.list_workers = real  # type: ignore[method-assign]
    assert await statuses(store) == {"w0": READY}
    assert await one.scan() == Reaped()


async def test_many_heartbeats_race_with_many_scans(store: Store) -> None:
    """The last heartbeat is newer than any scan, so it stands."""
    await publish(store)
    one = reaper(store, limits=Limits(stale_seconds=0.5, remove_seconds=3600))

    async def beat() -> None:
        for _ in range(50):
            await store.backend.update_status(BASE_ID, "w0", 0, READY, store.clock.forward(1))
            await asyncio.sleep(0)

    async def scans() -> None:
        for _ in range(50):
            assert (await one.scan()).failed == 0
            await asyncio.sleep(0)

    await asyncio.gather(beat(), scans())
    await store.backend.update_status(BASE_ID, "w0", 0, READY, store.clock.ms)
    assert await one.scan() == Reaped()
    assert await statuses(store) == {"w0": READY}


# clocks that are wrong --------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [30, 3600, 10**7])
async def test_a_time_ahead_counts_as_now_and_ages(store: Store, ahead: int) -> None:
    """It does not keep a dead worker's record for as long as its clock was wrong."""
    await publish(store)
    await store.backend.update_status(BASE_ID, "w0", 0, READY, store.clock.ms + ahead * 1000)
    scan = reaper(store).scan
    assert await scan() == Reaped()
    store.clock.forward(90)
    assert await scan() == Reaped()
    store.clock.forward(1)
    assert await scan() == Reaped(marked=1)
    store.clock.forward(30)
    assert await scan() == Reaped()
    store.clock.forward(3601)
    assert await scan() == Reaped(removed=1)


async def test_a_worker_whose_clock_is_behind_is_not_marked_again_and_again(store: Store) -> None:
    """From the first scan on its heartbeats are from between two scans, whatever they say."""
    await publish(store)
    behind = store.clock.ms - 600_000
    one = reaper(store)
    assert await one.scan() == Reaped()
    for beat in range(10):
        store.clock.forward(30)
        await store.backend.update_status(BASE_ID, "w0", 0, READY, store.clock.ms)
        raw = store.backend.list_workers

        async def told(
            *query: Any, at: int = behind + beat * 30_000, real: Any = raw
        ) -> list[SourceInstance]:
            return [replace(found, updated_at=at) for found in await real(*query)]

        store.backend.list_workers = told  # type: ignore[assignment,method-assign]
        assert await one.scan() == Reaped()
        store.backend.list_workers = raw  # type: ignore[method-assign]


async def test_a_clock_that_goes_back_stops_no_reaper(store: Store) -> None:
    """The age counts from then on."""
    await publish(store)
    scan = reaper(store).scan
    assert await scan() == Reaped()
    store.clock.forward(-(10**6))
    assert await scan() == Reaped()
    store.clock.forward(91)
    assert await scan() == Reaped(marked=1)


# in a cluster -----------------------------------------------------------------------------------------


async def test_an_object_that_is_not_whole_is_collected(fake: FakeKube) -> None:
    """A crash left it; its age is the object's own."""
    clock = Clock()
    raw = {
        "metadata": {"name": object_name("w0"), "creationTimestamp": "2026-09-21T13:00:00Z"},
        "spec": {"modelName": MODEL},
    }
    fake.put(OBJECTS, raw)
    fake.put(OBJECTS, {**raw, "metadata": {"name": object_name("w1")}})
    async with kube_store(fake) as store:
        assert clock.ms == store.clock.ms
        assert await reaper(store).scan() == Reaped(removed=1)
    assert fake.names(OBJECTS) == [object_name("w1")]


async def test_one_record_that_fails_keeps_no_other(fake: FakeKube) -> None:
    """It is tried again at the next scan."""
    async with kube_store(fake) as store:
        await publish(store, "w0")
        await publish(store, "w1")
        store.clock.forward(120)
        fake.fail(1, f"PATCH .*{object_name('w0')}/status", Fault(422))
        one = reaper(store)
        assert await one.scan() == Reaped(marked=1, failed=1)
        assert await one.scan() == Reaped(marked=1)


class Seconds:
    """A monotonic clock, as the test has it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
async def apis(fake: FakeKube) -> AsyncIterator[list[KubeApi]]:
    """Connect two agents."""
    made = [KubeApi(Configuration(host=fake.url), call_seconds=10.0, total_seconds=1.0) for _ in range(2)]
    yield made
    for api in made:
        await api.close()


@pytest.fixture
def seconds() -> Seconds:
    """Give the time of both agents."""
    return Seconds()


@pytest.fixture
def leases(apis: list[KubeApi], seconds: Seconds) -> list[Lease]:
    """Give each agent its own view of the lease."""
    return [
        Lease(api, "ns", LEASE, f"agent-{number}", seconds=90, clock=seconds, wall=Clock())
        for number, api in enumerate(apis)
    ]


async def test_one_holds_the_lease_as_long_as_it_renews_it(leases: list[Lease], seconds: Seconds) -> None:
    """The other asks in vain, however long."""
    first, second = leases
    for _ in range(10):
        assert await first.ask()
        assert not await second.ask()
        assert (first.left(), second.left()) == (60.0, 0.0)
        seconds.now += 45


async def test_the_lease_is_taken_over_after_its_time_and_never_held_by_two(
    fake: FakeKube, leases: list[Lease], seconds: Seconds
) -> None:
    """The first does not count on it for 30 s before the second may take it, and sees that it was taken."""
    first, second = leases
    assert await first.ask()
    for step in range(10):
        assert not await second.ask()
        assert (first.left() > 0) == (step < 6)
        seconds.now += 10
    assert await second.ask()
    assert (first.left(), second.left()) == (0.0, 60.0)
    assert not await first.ask()
    spec = fake.get(LEASES, LEASE)["spec"]
    assert (spec["holderIdentity"], spec["leaseTransitions"]) == ("agent-1", 1)
    assert spec["renewTime"] == "2026-09-21T14:13:20.123456Z"


async def test_two_who_ask_at_once_are_not_both_told_yes(fake: FakeKube, leases: list[Lease]) -> None:
    """Neither when there is none yet, nor when one has given it back."""
    assert sorted(await asyncio.gather(*(one.ask() for one in leases))) == [False, True]
    for one in leases:
        await one.release()
    assert fake.get(LEASES, LEASE)["spec"]["holderIdentity"] == ""
    assert sorted(await asyncio.gather(*(one.ask() for one in leases))) == [False, True]


@pytest.mark.parametrize("after", [False, True])
async def test_a_broken_answer_gives_nobody_two_leases(
    fake: FakeKube, leases: list[Lease], seconds: Seconds, after: bool
) -> None:
    """Before or after its effect: the one who has it learns so at the next turn at the latest."""
    first, second = leases
    fake.fail(2, "POST .*/leases", Fault(cut=True, after=after))
    await first.ask()
    assert not await second.ask()
    seconds.now += 30
    assert await first.ask()
    fake.fail(2, "PUT .*/leases", Fault(cut=True, after=after))
    await first.ask()
    assert not await second.ask()
    assert await first.ask()


@pytest.mark.parametrize("method", ["POST", "PUT"])
async def test_a_lease_whose_answer_did_not_come_is_given_back(
    fake: FakeKube, leases: list[Lease], seconds: Seconds, method: str
) -> None:
    """Who is ended while he asks may have got it; the next one need not wait until it runs out."""
    first, second = leases
    if method == "PUT":
        assert await second.ask()
        await second.release()
    fake.fail(1, f"{method} .*/leases", Fault(silent=True, after=True))
    asking = asyncio.create_task(first.ask())
    async with asyncio.timeout(60):
        while fake.objects.get(("ns", LEASES, LEASE), {}).get("spec", {}).get("holderIdentity") != "agent-0":
            await asyncio.sleep(0.001)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert first.left() == 0.0
    await first.release()
    assert await second.ask()
    seconds.now += 10
    await first.release()
    assert fake.get(LEASES, LEASE)["spec"]["holderIdentity"] == "agent-1"


async def test_without_the_api_server_the_lease_runs_out(
    fake: FakeKube, leases: list[Lease], seconds: Seconds
) -> None:
    """It is an error, and the holder has it until its time is over."""
    first, _ = leases
    assert await first.ask()
    fake.fail(10**6, "/leases", Fault(503))
    seconds.now += 30
    with pytest.raises(UnavailableError):
        await first.ask()
    assert first.left() == 30.0
    seconds.now += 30
    assert first.left() == 0.0


@pytest.mark.parametrize("spec", [None, {}, {"holderIdentity": "x", "leaseDurationSeconds": "long"}, "text"])
async def test_an_odd_lease_is_taken_in_the_end(
    fake: FakeKube, leases: list[Lease], seconds: Seconds, spec: Any
) -> None:
    """Whoever wrote it."""
    fake.put(LEASES, {"metadata": {"name": LEASE}, "spec": spec})
    await leases[0].ask()
    seconds.now += 91
    assert await leases[0].ask()


async def test_of_two_reapers_one_works(fake: FakeKube, leases: list[Lease], seconds: Seconds) -> None:
    """The other follows when the first is silent for long; one whose lease ran out changes nothing."""
    async with kube_store(fake) as store:
        await publish(store)
        store.clock.forward(120)
        first = reaper(store, lease=leases[0])
        second = Reaper(store.other, owner_lives=nobody, lease=leases[1], clock=store.clock)
        assert await first.turn() == Reaped(marked=1)
        assert await second.turn() is None
        seconds.now += 91
        store.clock.forward(3601)

        async def heard() -> bool:
            return [one.status for one in await store.other.list_workers()] == [STALE]

        await until(heard)
        assert await first.scan() == Reaped()
        assert await second.turn() == Reaped(removed=1)
        assert await first.turn() is None


async def test_a_reaper_that_runs_outlives_failures_and_gives_its_lease_back(
    fake: FakeKube, leases: list[Lease]
) -> None:
    """Whatever fails in one scan; the next agent need not wait."""
    async with kube_store(fake) as store:
        await publish(store)
        store.clock.forward(120)
        fake.fail(1, "GET .*/leases", Fault(422))
        task = asyncio.create_task(reaper(store, lease=leases[0]).run(0.01))

        async def marked() -> bool:
            return await statuses(store) == {"w0": STALE}

        await until(marked)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await leases[1].ask()
