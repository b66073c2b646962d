"""Real processes behind records: their end, and their freeze, make the records STALE."""

from __future__ import annotations

import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hibernode.errors import RefusedError, UnavailableError
from hibernode.host import procfs
from hibernode.metadata import owners, roster
from hibernode.metadata.access import Caller
from hibernode.metadata.owners import OwnerWatch
from hibernode.metadata.records import SourceStatus
from tests.unit.kube_fake import FakeKube, Fault
from tests.unit.metadata_kit import (
    BASE,
    BASE_ID,
    Clock,
    Store,
    kube_backend,
    kube_store,
    peer,
    sqlite_store,
    until,
)

READY, STALE = SourceStatus.READY, SourceStatus.STALE


class Worker:
    """A process that lives until it is killed, and what it is as a caller."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(["sleep", "infinity"])
        self.key = procfs.read_stat(self.process.pid).key
        self.caller = Caller("uid:0", process=self.key)

    def kill(self) -> None:
        """End it, and reap it."""
        self.process.kill()
        self.process.wait()


@pytest.fixture
def workers() -> Iterator[list[Worker]]:
    """Start two processes."""
    made = [Worker(), Worker()]
    yield made
    for one in made:
        one.kill()


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
    """Publish a worker that is READY, as the service does."""
    key = (BASE_ID, worker_id)
    async with watch.publishing(worker.caller, key, rank):
        await store.backend.publish_metadata(BASE, worker_id, peer(rank))
    await beat(store, watch, worker_id, rank, worker)


async def beat(store: Store, watch: OwnerWatch, worker_id: str, rank: int, worker: Worker) -> None:
    """Let a worker say that it is READY, as the service does."""
    async with watch.beating(worker.caller, (BASE_ID, worker_id), rank):
        await store.backend.update_status(BASE_ID, worker_id, rank, READY, store.clock.ms)


async def statuses(store: Store) -> dict[str, SourceStatus]:
    """List the status of each worker."""
    return {one.worker_id: one.status for one in await store.backend.list_workers()}


async def until_statuses(store: Store, **wanted: SourceStatus) -> None:
    """Wait until the list says so."""

    async def so() -> bool:
        return await statuses(store) == wanted

    await until(so)


def descriptors() -> int:
    """Count the processes that this one holds; connections to an API server come and go."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found += "pidfd" in os.readlink(f"/proc/self/fd/{name}")
    return found


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


async def test_a_process_that_ends_while_it_publishes_is_noticed(
    store: Store, watch: OwnerWatch, workers: list[Worker]
) -> None:
    """Its record is STALE as soon as it is there."""
    await publish(store, watch, "w0", 0, workers[0])
    async with watch.publishing(workers[1].caller, (BASE_ID, "w0"), 0):
        workers[1].kill()
        await store.backend.publish_metadata(BASE, "w0", peer(0, agent_name="other"))
    await until_statuses(store, w0=STALE)
    assert len(watch) == 0


async def test_a_process_that_has_ended_publishes_nothing(
    store: Store, watch: OwnerWatch, workers: list[Worker]
) -> None:
    """Whoever has its connection now is somebody else."""
    workers[0].kill()
    with pytest.raises(RefusedError, match="has ended"):
        await publish(store, watch, "w0", 0, workers[0])
    assert await statuses(store) == {}


async def test_a_publication_that_fails_leaves_the_older_process_watched(
    store: Store, watch: OwnerWatch, workers: list[Worker]
) -> None:
    """Also if that one ends meanwhile: then the record is STALE when the publication has failed."""
    await publish(store, watch, "w0", 0, workers[0])
    await publish(store, watch, "w1", 1, workers[0])

    async def fail(end: bool) -> None:
        async with watch.publishing(workers[1].caller, (BASE_ID, "w0"), 0):
            if end:
                workers[0].kill()
                await until_statuses(store, w0=READY, w1=STALE)
            raise ZeroDivisionError

    for end in (False, True):
        with pytest.raises(ZeroDivisionError):
            await fail(end)
        assert watch.lives((BASE_ID, "w0")) is not end
    await until_statuses(store, w0=STALE, w1=STALE)


async def test_a_worker_that_was_there_before_the_agent_is_watched_from_its_heartbeat_on(
    store: Store, watch: OwnerWatch, workers: list[Worker]
) -> None:
    """A restart of the agent forgets who published; nobody takes a known process's place by a heartbeat."""
    await store.backend.publish_metadata(BASE, "w0", peer(0))
    await beat(store, watch, "w0", 0, workers[0])
    await beat(store, watch, "w0", 0, workers[1])
    workers[1].kill()
    assert watch.lives((BASE_ID, "w0"))
    workers[0].kill()
    await until_statuses(store, w0=STALE)


async def test_a_caller_without_a_process_takes_the_record_over(
    store: Store, watch: OwnerWatch, workers: list[Worker]
) -> None:
    """It came by TCP: the older process's end says nothing of the new worker."""
    await publish(store, watch, "w0", 0, workers[0])
    await publish(store, watch, "w1", 1, workers[0])
    async with watch.publishing(Caller("loopback", address="127.0.0.1"), (BASE_ID, "w0"), 0):
        pass
    workers[0].kill()
    await until_statuses(store, w0=READY, w1=STALE)


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
    """A restored worker publishes under the same ids."""
    await publish(store, watch, "w0", 0, workers[0])
    await publish(store, watch, "w1", 1, workers[0])
    await publish(store, watch, "w0", 0, workers[1])
    workers[0].kill()
    await until_statuses(store, w0=READY, w1=STALE)


async def test_workers_are_stale_before_they_are_frozen(
    store: Store, watch: OwnerWatch, workers: list[Worker]
) -> None:
    """Those of the checkpoint only; until its end no heartbeat of theirs counts, by whatever way."""
    await publish(store, watch, "w0", 0, workers[0])
    await publish(store, watch, "w1", 1, workers[1])
    async with watch.freezing([workers[0].key], seconds=60.0) as count:
        assert count == 1
        assert await statuses(store) == {"w0": STALE, "w1": READY}
        store.clock.forward(1)
        for worker_id, worker in (("w0", workers[0]), ("w0", workers[1]), ("w2", workers[0])):
            with pytest.raises(UnavailableError) as caught:
                await beat(store, watch, worker_id, 0, worker)
            assert caught.value.reason == "WorkerFrozen"
            with pytest.raises(UnavailableError):
                await publish(store, watch, worker_id, 0, worker)
        await beat(store, watch, "w1", 1, workers[1])
        assert await statuses(store) == {"w0": STALE, "w1": READY}
    await beat(store, watch, "w0", 0, workers[0])
    assert await statuses(store) == {"w0": READY, "w1": READY}
    workers[0].kill()
    await until_statuses(store, w0=STALE, w1=READY)
    async with watch.freezing([]) as count:
        assert count == 0


async def test_what_is_under_way_when_a_checkpoint_begins_does_not_win(
    store: Store, watch: OwnerWatch, workers: list[Worker]
) -> None:
    """Neither a heartbeat nor a publication that is written after the mark."""
    await publish(store, watch, "w0", 0, workers[0])
    caller, freezing = workers[0].caller, watch.freezing([workers[0].key])
    async with watch.publishing(caller, (BASE_ID, "w1"), 1):
        async with watch.beating(caller, (BASE_ID, "w0"), 0):
            assert await freezing.__aenter__() == 1
            await store.backend.update_status(BASE_ID, "w0", 0, READY, store.clock.forward(1))
        assert await statuses(store) == {"w0": STALE}
        await store.backend.publish_metadata(BASE, "w1", peer(1))
        await store.backend.update_status(BASE_ID, "w1", 1, READY, store.clock.ms)
    assert await statuses(store) == {"w0": STALE, "w1": STALE}
    await freezing.__aexit__(None, None, None)


async def test_two_checkpoints_of_one_worker_hold_it_until_the_last_ends(
    store: Store, watch: OwnerWatch, workers: list[Worker]
) -> None:
    """A person's command is told of beside the agent's own."""
    await publish(store, watch, "w0", 0, workers[0])
    async with watch.freezing([workers[0].key]):
        async with watch.freezing([workers[0].key]):
            pass
        with pytest.raises(UnavailableError):
            await beat(store, watch, "w0", 0, workers[0])
    await beat(store, watch, "w0", 0, workers[0])


async def test_a_freeze_waits_for_no_api_server(fake: FakeKube, workers: list[Worker]) -> None:
    """It says how many records are STALE, and the checkpoint goes on."""
    async with kube_store(fake) as store:
        watch = OwnerWatch(store.backend, clock=store.clock)
        await publish(store, watch, "w0", 0, workers[0])
        fake.fail(100, "/status", Fault(silent=True))
        async with watch.freezing([workers[0].key], seconds=0.05) as count:
            assert count == 0
        await watch.close()


async def test_a_death_in_an_outage_is_told_when_it_is_over(
    fake: FakeKube, workers: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would be READY for as long as a heartbeat counts, and the agent beside it knows better."""
    monkeypatch.setattr(owners, "DEAD_PAUSE", 0.01)
    clock = Clock()
    backend = kube_backend(fake.url, clock, total=0.2)
    await backend.connect()
    store, watch = Store(backend, backend, clock), OwnerWatch(backend, clock=clock)
    await publish(store, watch, "w0", 0, workers[0])
    fake.fail(10_000, "modelmetadatas", Fault(503))
    tried = backend.stats().retries
    workers[0].kill()
    await until(lambda: backend.stats().retries > tried + 3)
    assert await statuses(store) == {"w0": READY}
    fake.faults.clear()
    await until_statuses(store, w0=STALE)
    await watch.close()
    await backend.close()


async def test_a_worker_whose_last_word_is_a_heartbeat_is_stale(
    store: Store, watch: OwnerWatch, workers: list[Worker]
) -> None:
    """The agent had not held it since its own start, and cannot any more."""
    await store.backend.publish_metadata(BASE, "w0", peer(0))
    async with watch.beating(workers[0].caller, (BASE_ID, "w0"), 0):
        await store.backend.update_status(BASE_ID, "w0", 0, READY, store.clock.ms)
        workers[0].kill()
    await until_statuses(store, w0=STALE)
    with pytest.raises(RefusedError) as caught:  # as a child would, by the connection that it got from it
        async with watch.beating(workers[0].caller, (BASE_ID, "w0"), 0):
            raise AssertionError
    assert caught.value.reason == "PeerGone"


async def test_who_ended_while_no_agent_ran_is_stale_when_the_next_one_starts(
    store: Store, watch: OwnerWatch, workers: list[Worker], tmp_path: Path
) -> None:
    """The others are watched on, and what was published anew since is another's."""
    for number, worker in enumerate([workers[0], workers[1], workers[0]]):
        await publish(store, watch, f"w{number}", number, worker)
    roster.save(tmp_path / "roster", await watch.entries())
    await watch.close()
    workers[0].kill()
    await store.backend.publish_metadata(BASE, "w2", peer(2, agent_name="elsewhere"))
    await store.backend.update_status(BASE_ID, "w2", 2, READY, store.clock.forward(1))
    following = OwnerWatch(store.backend, clock=store.clock)
    await following.resume(roster.load(tmp_path / "roster"))
    await until_statuses(store, w0=STALE, w1=READY, w2=READY)
    assert len(following) == 1
    workers[1].kill()
    await until_statuses(store, w0=STALE, w1=STALE, w2=READY)
    await following.close()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"boot": "x", "entries": []}', '{"entries": [[1, 2]]}'])
def test_a_broken_roster_is_none(tmp_path: Path, text: str) -> None:
    """So is one from before the machine's start, whose pids mean nothing now, and one with odd fields."""
    (tmp_path / "roster").write_text(text)
    assert roster.load(tmp_path / "roster") == []
    entry = roster.Entry(1, 2, "uid:0", "s", "w", 0, 1)
    roster.save(tmp_path / "roster", [entry])
    assert roster.load(tmp_path / "roster") == [entry]
    roster.save(tmp_path / "roster", [replace(entry, pid="1")])  # type: ignore[arg-type]
    assert roster.load(tmp_path / "roster") == []


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
    """One a process, however many records it has; none after they are forgotten, an end, or a close."""
    await publish(store, watch, "w0", 0, workers[0])
    watch.forget((BASE_ID, "w0"))
    await store.backend.list_workers()
    before = descriptors()
    for _ in range(3):
        for number in range(4):
            await publish(store, watch, f"w{number}", 0, workers[0])
    await publish(store, watch, "w9", 1, workers[1])
    assert (descriptors(), len(watch)) == (before + 2, 5)
    watch.forget((BASE_ID, "w9"))
    watch.forget((BASE_ID, "unknown"))
    assert (descriptors(), len(watch)) == (before + 1, 4)
    workers[0].kill()
    await until(lambda: len(watch) == 0)
    assert descriptors() == before
    await publish(store, watch, "w9", 1, workers[1])
    await watch.close()
    assert descriptors() == before


async def test_one_pod_cannot_take_all_descriptors(
    store: Store, watch: OwnerWatch, workers: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process too many publishes all the same, and is left to the reaper."""
    monkeypatch.setattr(owners, "MAX_PROCESSES", 8)
    await publish(store, watch, "w0", 0, workers[0])
    await publish(store, watch, "w1", 1, workers[1])
    assert (watch.lives((BASE_ID, "w0")), watch.lives((BASE_ID, "w1"))) == (True, False)
    assert await statuses(store) == {"w0": READY, "w1": READY}
    watch.forget((BASE_ID, "w0"))
    await publish(store, watch, "w1", 1, workers[1])
    assert watch.lives((BASE_ID, "w1"))
