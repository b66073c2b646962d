"""Real processes behind records: their end, and their freeze, make the records STALE."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from hibernode.host import linux
from hibernode.metadata.owners import OwnerWatch
from hibernode.metadata.records import SourceStatus
from tests.unit.kube_fake import FakeKube, Fault
from tests.unit.metadata_kit import BASE, BASE_ID, Store, kube_store, peer, sqlite_store, until

READY, STALE = SourceStatus.READY, SourceStatus.STALE


class Worker:
    """A process that lives until it is killed, and its pidfd."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(["sleep", "infinity"])
        self.pidfd = linux.pidfd_open(self.process.pid)

    def kill(self) -> None:
        """End it, and reap it."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """Clean up."""
        self.kill()
        os.close(self.pidfd)


@pytest.fixture
def workers() -> Iterator[list[Worker]]:
    """Start two processes."""
    made = [Worker(), Worker()]
    yield made
    for one in made:
        one.close()


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


@pytest.fixture
async def watch(store: Store) -> AsyncIterator[OwnerWatch]:
    """Watch the owners of the store's records."""
    made = OwnerWatch(store.backend, clock=store.clock)
    yield made
    await made.close()


async def publish(store: Store, watch: OwnerWatch, worker_id: str, rank: int, worker: Worker) -> None:
    """Publish a worker that is READY, and register its process, as the service does."""
    watch.register(BASE_ID, worker_id, rank, worker.pidfd)
    await store.backend.publish_metadata(BASE, worker_id, peer(rank))
    await store.backend.update_status(BASE_ID, worker_id, rank, READY, store.clock.ms)
    watch.register(BASE_ID, worker_id, rank, worker.pidfd)


async def statuses(store: Store) -> dict[str, SourceStatus]:
    """List the status of each worker."""
    return {one.worker_id: one.status for one in await store.backend.list_workers()}


async def until_statuses(store: Store, **wanted: SourceStatus) -> None:
    """Wait until the list says so."""

    async def so() -> bool:
        return await statuses(store) == wanted

    await until(so)


def descriptors() -> int:
    """Count what this process has open."""
    return len(os.listdir("/proc/self/fd"))


async def test_a_worker_that_is_killed_is_stale_at_once(
    store: Store, watch: OwnerWatch, workers: list[Worker]
) -> None:
    """Without a heartbeat's time; the others stay READY."""
    await publish(store, watch, "w0", 0, workers[0])
    await publish(store, watch, "w1", 1, workers[1])
    workers[0].kill()
    await until_statuses(store, w0=STALE, w1=READY)
    assert len(watch) == 1


async def test_a_process_with_several_records_takes_them_all(
    store: Store, watch: OwnerWatch, workers: list[Worker]
) -> None:
    """A worker publishes weights and caches."""
    await publish(store, watch, "w0", 0, workers[0])
    await publish(store, watch, "w1", 0, workers[0])
    workers[0].kill()
    await until_statuses(store, w0=STALE, w1=STALE)


async def test_a_process_that_has_ended_already_is_noticed(
    store: Store, watch: OwnerWatch, workers: list[Worker]
) -> None:
    """It died while it published."""
    workers[0].kill()
    await publish(store, watch, "w0", 0, workers[0])
    await until_statuses(store, w0=STALE)


async def test_a_time_ahead_does_not_keep_a_dead_worker(
    store: Store, watch: OwnerWatch, workers: list[Worker]
) -> None:
    """Its last heartbeat came from a clock that is a little or much ahead."""
    await publish(store, watch, "w0", 0, workers[0])
    await publish(store, watch, "w1", 1, workers[0])
    await store.backend.update_status(BASE_ID, "w0", 0, READY, store.clock.ms + 30_000)
    await store.backend.update_status(BASE_ID, "w1", 1, READY, store.clock.ms + 3_600_000)
    workers[0].kill()
    await until_statuses(store, w0=STALE, w1=STALE)


async def test_a_last_heartbeat_that_is_under_way_does_not_win(
    store: Store, watch: OwnerWatch, workers: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes between list and mark: the newer state is marked."""
    await publish(store, watch, "w0", 0, workers[0])
    real, beats = store.backend.update_status, [3]

    async def beaten(*args: Any, **more: Any) -> bool:
        if args[3] is STALE and beats[0]:
            beats[0] -= 1
            await real(BASE_ID, "w0", 0, READY, store.clock.forward(1))
        return await real(*args, **more)

    monkeypatch.setattr(store.backend, "update_status", beaten)
    workers[0].kill()
    await until_statuses(store, w0=STALE)
    assert beats == [0]


async def test_the_end_of_an_older_process_does_not_touch_a_newer_one(
    store: Store, watch: OwnerWatch, workers: list[Worker]
) -> None:
    """A restored worker registers under the same ids."""
    await publish(store, watch, "w0", 0, workers[0])
    workers[0].kill()
    await publish(store, watch, "w0", 0, workers[1])
    await publish(store, watch, "w1", 1, workers[0])
    await until_statuses(store, w0=READY, w1=STALE)


async def test_workers_are_stale_before_they_are_frozen(
    store: Store, watch: OwnerWatch, workers: list[Worker]
) -> None:
    """Those of the checkpoint only; they are watched on, and may be READY again."""
    await publish(store, watch, "w0", 0, workers[0])
    await publish(store, watch, "w1", 1, workers[1])
    assert await watch.before_freeze([1, workers[0].process.pid], seconds=60.0) == 1
    assert await statuses(store) == {"w0": STALE, "w1": READY}
    await store.backend.update_status(BASE_ID, "w0", 0, READY, store.clock.forward(1))
    workers[0].kill()
    await until_statuses(store, w0=STALE, w1=READY)
    assert await watch.before_freeze([]) == 0


async def test_a_freeze_waits_for_no_api_server(fake: FakeKube, workers: list[Worker]) -> None:
    """It says how many records are STALE, and the checkpoint goes on."""
    async with kube_store(fake) as store:
        watch = OwnerWatch(store.backend, clock=store.clock)
        await publish(store, watch, "w0", 0, workers[0])
        fake.fail(100, "/status", Fault(silent=True))
        assert await watch.before_freeze([workers[0].process.pid], seconds=0.05) == 0
        await watch.close()


async def test_a_record_that_is_gone_is_no_trouble(
    store: Store, watch: OwnerWatch, workers: list[Worker]
) -> None:
    """It was removed while its process lived."""
    await publish(store, watch, "w0", 0, workers[0])
    await publish(store, watch, "w1", 1, workers[0])
    await store.backend.remove_worker(BASE_ID, "w0")
    workers[0].kill()
    await until_statuses(store, w1=STALE)


async def test_no_descriptor_is_left(store: Store, watch: OwnerWatch, workers: list[Worker]) -> None:
    """Neither by a replaced registration, a forgotten one, an end, nor a close."""
    await publish(store, watch, "w0", 0, workers[0])
    watch.forget(BASE_ID, "w0")
    await store.backend.list_workers()
    before = descriptors()
    for _ in range(10):
        watch.register(BASE_ID, "w0", 0, workers[0].pidfd)
    watch.register(BASE_ID, "w1", 0, workers[1].pidfd)
    assert descriptors() == before + 2
    watch.forget(BASE_ID, "w1")
    watch.forget(BASE_ID, "unknown")
    with pytest.raises(OSError, match="Bad file descriptor"):
        watch.register(BASE_ID, "w0", 0, 1 << 20)
    assert len(watch) == 1
    await watch.close()
    await asyncio.sleep(0)
    assert descriptors() == before
