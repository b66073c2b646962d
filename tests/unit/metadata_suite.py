"""The one suite that every backend passes: who imports it brings the fixture ``store``."""

from __future__ import annotations

import asyncio
import math
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from hibernode.errors import (
    ConflictError,
    HibernodeError,
    InvalidArgumentError,
    NotFoundError,
    TooLargeError,
)
from hibernode.metadata.backend import Change, ChangeKind, WorkerQuery
from hibernode.metadata.identity import ids_of
from hibernode.metadata.records import (
    ArtifactSource,
    BackendPayload,
    BackendType,
    SourceIdentity,
    SourceInstance,
    SourceStatus,
    TensorDescriptor,
    Version,
    WorkerRecord,
)
from tests.unit.metadata_kit import (
    BASE,
    BASE_ID,
    MODEL,
    OTHER,
    OTHER_ID,
    POD,
    Store,
    central,
    peer,
    tensors,
    until,
)

READY, STALE, UNKNOWN = SourceStatus.READY, SourceStatus.STALE, SourceStatus.UNKNOWN
INITIALIZING = SourceStatus.INITIALIZING


async def ready(
    store: Store, worker_id: str, rank: int = 0, *, identity: SourceIdentity = BASE, after: float = 1.0
) -> SourceInstance:
    """Publish a worker and say that it is READY, as stock clients do."""
    instance = await store.backend.publish_metadata(identity, worker_id, peer(rank))
    now = store.clock.forward(after)
    assert await store.backend.update_status(instance.source_id, worker_id, rank, READY, now)
    return instance


async def worker_of(store: Store, worker_id: str, source_id: str = BASE_ID) -> WorkerRecord:
    """Read a worker that is there."""
    record = await store.backend.get_metadata(source_id, worker_id)
    assert record is not None
    assert record.worker is not None
    return record.worker


async def listed(store: Store, **query: Any) -> list[str]:
    """List worker ids."""
    return [one.worker_id for one in await store.backend.list_workers(WorkerQuery(**query))]


# publish and get --------------------------------------------------------------------------------------

U64 = (1 << 64) - 1
PUBLISHED = [
    pytest.param(central(3), id="central"),
    pytest.param(central(0, bytes(range(256)) * 1000, tensors=()), id="central, large blob"),
    pytest.param(peer(7, topology={"host": "node-1", "rack": "r"}, source_load=0.25), id="peer to peer"),
    pytest.param(
        central(tensors=(TensorDescriptor('Modèle "ü"\n', U64, U64, (1 << 32) - 1, ""),)),
        id="largest numbers, odd names",
    ),
    pytest.param(
        WorkerRecord(rank=1, payload=BackendPayload(BackendType.TRANSFER_ENGINE, session_id="host:1")),
        id="transfer engine",
    ),
    pytest.param(peer(artifact=ArtifactSource("triton", (1 << 63) - 1, 3, (1 << 32) - 1, 2)), id="artifact"),
    pytest.param(central(rank=(1 << 31) - 1, status=INITIALIZING), id="largest rank"),
]


@pytest.mark.parametrize("worker", PUBLISHED)
async def test_what_was_published_is_read_back(store: Store, worker: WorkerRecord) -> None:
    """Every field, here and by another agent."""
    instance = await store.backend.publish_metadata(BASE, "w0", worker)
    expected = replace(worker, updated_at=store.clock.ms)
    for backend in (store.backend, store.other):
        record = await backend.get_metadata(BASE_ID, "w0")
        assert record is not None
        assert record.worker == expected
        assert record.identity == BASE
        assert record.instance == instance
    assert (instance.source_id, instance.worker_id, instance.model_name) == (BASE_ID, "w0", MODEL)
    assert (instance.tensor_count, instance.updated_at) == (len(worker.tensors), store.clock.ms)
    assert instance.whole


@pytest.mark.parametrize("count", [0, 1, 1_300, 12_000])
async def test_any_real_number_of_tensors_is_kept(store: Store, count: int) -> None:
    """Also more than fit into a ConfigMap as text."""
    await store.backend.publish_metadata(BASE, "w0", central(tensors=tensors(count)))
    record = await store.other.get_metadata(BASE_ID, "w0")
    assert record is not None
    assert record.worker is not None
    assert record.worker.tensors == tensors(count)


async def test_the_owner_is_kept(store: Store) -> None:
    """With all its parts; one that lacks a part counts for none, and a publication without one keeps it."""
    pod = replace(POD, namespace=store.namespace)
    first = await store.backend.publish_metadata(BASE, "w0", peer(), owner=pod)
    again = await store.backend.publish_metadata(BASE, "w0", peer(1))
    half = await store.backend.publish_metadata(BASE, "w1", peer(), owner=replace(pod, uid=""))
    assert (first.owner, again.owner, half.owner) == (pod, pod, None)


async def test_what_is_not_there_is_none(store: Store) -> None:
    """Not an error."""
    await store.backend.publish_metadata(BASE, "w0", peer())
    assert await store.backend.get_metadata(BASE_ID, "w1") is None
    assert await store.backend.get_metadata(OTHER_ID, "w0") is None


async def test_both_ids_of_a_name_beyond_ascii_lead_to_the_record(store: Store) -> None:
    """The Python client computes another id than the server; each kind finds what the other published."""
    identity = replace(BASE, model_name="Org/Modèle-Ü")
    server, client = ids_of(identity)
    instance = await store.backend.publish_metadata(identity, "w0", peer(2))
    assert (instance.source_id, instance.alias) == (server, client)
    for source_id in (server, client):
        record = await store.backend.get_metadata(source_id, "w0")
        assert record is not None
        assert record.instance.source_id == server
        assert await store.backend.update_status(source_id, "w0", 2, READY, store.clock.forward(1))
        assert await listed(store, source_ids=[source_id], status=READY) == ["w0"]
    assert await listed(store, source_ids=[server, client]) == ["w0"]
    assert await store.backend.remove_worker(client, "w0")
    assert await listed(store) == []


# what is refused --------------------------------------------------------------------------------------

BAD_WORKER_IDS = ["", "A", "a_b", "-a", "a-", "a.b", "a/b", "a" * 64, "é", "a\n", "..", "a%2f", " a"]
BAD_SOURCE_IDS = [
    "",
    "5A5F555570065064",
    "5a5f55557006506",
    "../../secrets/abc",
    "5a5f555570065064\n",
    "a,b=c",
]


@pytest.mark.parametrize("worker_id", BAD_WORKER_IDS)
async def test_a_bad_worker_id_is_refused_before_anything_is_written(store: Store, worker_id: str) -> None:
    """By every method that takes one."""
    backend = store.backend
    for call in (
        backend.publish_metadata(BASE, worker_id, peer()),
        backend.get_metadata(BASE_ID, worker_id),
        backend.remove_worker(BASE_ID, worker_id),
        backend.update_status(BASE_ID, worker_id, 0, READY, store.clock.ms),
    ):
        with pytest.raises(InvalidArgumentError) as caught:
            await call
        assert caught.value.reason == "InvalidWorkerId"
    assert await listed(store) == []


@pytest.mark.parametrize("source_id", BAD_SOURCE_IDS)
async def test_a_bad_source_id_is_refused(store: Store, source_id: str) -> None:
    """It would get into a URL and a label selector."""
    backend = store.backend
    for call in (
        backend.get_metadata(source_id, "w0"),
        backend.remove_worker(source_id, "w0"),
        backend.remove_metadata(source_id),
        backend.update_status(source_id, "w0", 0, READY, store.clock.ms),
    ):
        with pytest.raises(InvalidArgumentError) as caught:
            await call
        assert caught.value.reason == "InvalidSourceId"


TENSOR = TensorDescriptor("t", 0, 0, 0, "")
BAD_WORKERS = [
    pytest.param(peer(rank=1 << 31), id="rank beyond i32"),
    pytest.param(peer(rank=-1), id="negative rank"),
    pytest.param(central(tensors=(replace(TENSOR, addr=1 << 64),)), id="address beyond u64"),
    pytest.param(central(tensors=(replace(TENSOR, size=-1),)), id="negative size"),
    pytest.param(central(tensors=(replace(TENSOR, device_id=1 << 32),)), id="device beyond u32"),
    pytest.param(central(tensors=(replace(TENSOR, name="x" * 5000),)), id="long tensor name"),
    pytest.param(peer(artifact=ArtifactSource("a", 1 << 63)), id="artifact beyond i64"),
    pytest.param(peer(artifact=ArtifactSource("a", file_count=1 << 32)), id="file count beyond u32"),
    pytest.param(central(artifact=ArtifactSource("a")), id="artifact and tensors"),
    pytest.param(peer(agent_name="x" * 5000), id="long agent name"),
    pytest.param(peer(metadata_endpoint="\ud800"), id="no text"),
    pytest.param(peer(topology=dict.fromkeys(map(str, range(300)), "")), id="large topology"),
    pytest.param(peer(topology=dict.fromkeys("abcde", "x" * 2000)), id="large texts together"),
    pytest.param(peer(source_load=math.inf), id="endless load"),
    pytest.param(peer(payload=BackendPayload(BackendType.NONE, nixl=b"x")), id="payload of another type"),
]


@pytest.mark.parametrize("worker", BAD_WORKERS)
async def test_a_bad_field_is_refused_before_anything_is_written(store: Store, worker: WorkerRecord) -> None:
    """Not half-way, as the seed did."""
    with pytest.raises(InvalidArgumentError):
        await store.backend.publish_metadata(BASE, "w0", worker)
    assert await listed(store) == []


@pytest.mark.parametrize(
    ("identity", "kind"),
    [
        (replace(BASE, model_name=""), InvalidArgumentError),
        (replace(BASE, tensor_parallel_size=1 << 32), InvalidArgumentError),
        (replace(BASE, mx_version="x" * 5000), InvalidArgumentError),
        (replace(BASE, extra_parameters={str(n): "v" * 4000 for n in range(200)}), TooLargeError),
        (replace(BASE, extra_parameters={str(n): "\1" * 4000 for n in range(15)}), TooLargeError),
    ],
    ids=["no model name", "size beyond u32", "long version", "large in all", "large once it is written"],
)
async def test_a_bad_identity_is_refused(store: Store, identity: SourceIdentity, kind: type) -> None:
    """Nothing is written under it."""
    with pytest.raises(HibernodeError) as caught:
        await store.backend.publish_metadata(identity, "w0", peer())
    assert isinstance(caught.value, kind)
    assert await listed(store) == []


# publish again ----------------------------------------------------------------------------------------


async def test_the_same_content_again_changes_neither_status_nor_generation(store: Store) -> None:
    """A publication's status of UNKNOWN does not take READY away, and peers need not fetch again."""
    first = await ready(store, "w0")
    store.clock.forward(5)
    again = await store.backend.publish_metadata(BASE, "w0", peer())
    assert again.status is READY
    assert (again.generation, again.digest) == (first.generation, first.digest)
    assert again.updated_at == store.clock.ms
    assert (await worker_of(store, "w0")).status is READY


async def test_other_content_has_another_generation(store: Store) -> None:
    """It is not READY until the worker says so; the generation grows even where the clock goes back."""
    first = await store.backend.publish_metadata(BASE, "w0", central(blob=b"one", status=READY))
    store.clock.forward(-100)
    second = await store.backend.publish_metadata(BASE, "w0", central(blob=b"two"))
    assert second.generation > first.generation
    assert second.digest != first.digest
    assert second.status is UNKNOWN
    assert (await worker_of(store, "w0")).payload.nixl == b"two"


@pytest.mark.parametrize("change", [{"tensors": tensors(4)}, {"agent_name": "b"}, {"rank": 1}], ids=str)
async def test_any_change_of_content_is_seen(store: Store, change: dict[str, Any]) -> None:
    """Tensors, the agent's name, the rank; and no other agent serves what was before."""
    first = await store.backend.publish_metadata(BASE, "w0", central())
    assert await store.other.get_metadata(BASE_ID, "w0")
    store.clock.forward(1)
    second = await store.backend.publish_metadata(BASE, "w0", central(**change))
    assert second.generation > first.generation

    async def seen() -> bool:
        record = await store.other.get_metadata(BASE_ID, "w0")
        assert record is not None
        assert record.worker is not None
        return all(getattr(record.worker, name) == value for name, value in change.items())

    await until(seen)


async def test_a_worker_that_was_stale_has_a_new_generation(store: Store) -> None:
    """The same content from a process that was dead or frozen: peers have to connect anew."""
    first = await ready(store, "w0")
    await store.backend.update_status(BASE_ID, "w0", 0, STALE, store.clock.forward(1))
    store.clock.forward(1)
    again = await store.backend.publish_metadata(BASE, "w0", peer())
    assert again.generation > first.generation
    assert again.status is UNKNOWN


async def test_what_an_older_client_does_not_tell_stays(store: Store) -> None:
    """Topology and load are known to newer clients only; a new topology replaces the old one whole."""
    told = peer(topology={"host": "a", "rack": "r"}, source_load=0.5)
    await store.backend.publish_metadata(BASE, "w0", told)
    await store.backend.publish_metadata(BASE, "w0", peer(1))
    worker = await worker_of(store, "w0")
    assert (worker.topology, worker.source_load) == ({"host": "a", "rack": "r"}, 0.5)
    await store.backend.publish_metadata(BASE, "w0", peer(topology={"host": "b"}))
    assert (await worker_of(store, "w0")).topology == {"host": "b"}


# status -----------------------------------------------------------------------------------------------


async def test_a_status_changes_nothing_else(store: Store) -> None:
    """Payload, tensors, generation and all stay."""
    before = await store.backend.publish_metadata(BASE, "w0", central())
    now = store.clock.forward(3)
    assert await store.backend.update_status(BASE_ID, "w0", 0, READY, now, source_load=0.75)
    assert await worker_of(store, "w0") == replace(central(), status=READY, updated_at=now, source_load=0.75)
    (after,) = await store.backend.list_workers()
    changed: dict[str, Any] = {"status": READY, "updated_at": now, "source_load": 0.75}
    assert after == replace(before, version=after.version, **changed)
    assert after.version != before.version


@pytest.mark.parametrize("status", list(SourceStatus))
async def test_every_status_is_kept(store: Store, status: SourceStatus) -> None:
    """And found by it."""
    await store.backend.publish_metadata(BASE, "w0", peer())
    assert await store.backend.update_status(BASE_ID, "w0", 0, status, store.clock.forward(1))
    assert (await worker_of(store, "w0")).status is status
    assert await listed(store, status=status) == ["w0"]


async def test_an_older_status_does_not_replace_a_newer_one(store: Store) -> None:
    """It says that it was not written; one of the same time is."""
    await ready(store, "w0")
    now = store.clock.ms
    assert not await store.backend.update_status(BASE_ID, "w0", 0, STALE, now - 1)
    assert (await worker_of(store, "w0")).status is READY
    assert await store.backend.update_status(BASE_ID, "w0", 0, STALE, now)
    assert (await worker_of(store, "w0")).status is STALE


async def test_a_time_far_ahead_does_not_lock_a_record(store: Store) -> None:
    """A machine whose clock is an hour ahead wrote it; the worker's next heartbeat counts."""
    await store.backend.publish_metadata(BASE, "w0", peer())
    hour = store.clock.ms + 3_600_000
    assert await store.backend.update_status(BASE_ID, "w0", 0, STALE, hour)
    assert await store.backend.update_status(BASE_ID, "w0", 0, READY, store.clock.ms)
    assert (await worker_of(store, "w0")).updated_at == store.clock.ms


async def test_a_status_for_another_rank_is_refused(store: Store) -> None:
    """The seed took any."""
    await ready(store, "w0", 3)
    with pytest.raises(InvalidArgumentError, match="rank 3, not 4"):
        await store.backend.update_status(BASE_ID, "w0", 4, STALE, store.clock.forward(1))


async def test_a_status_of_what_is_not_there_is_an_error(store: Store) -> None:
    """So that a client can publish again."""
    await ready(store, "w0")
    await store.backend.remove_worker(BASE_ID, "w0")
    with pytest.raises(NotFoundError):
        await store.backend.update_status(BASE_ID, "w0", 0, READY, store.clock.forward(1))


async def test_a_heartbeat_in_between_saves_a_record_from_the_reaper(store: Store) -> None:
    """Neither marked nor removed by who saw an older state of it."""
    await ready(store, "w0")
    (seen,) = await store.backend.list_workers()
    assert await store.backend.update_status(BASE_ID, "w0", 0, READY, store.clock.forward(1))
    with pytest.raises(ConflictError):
        await store.backend.update_status(
            BASE_ID, "w0", 0, STALE, store.clock.forward(1), expect=seen.version
        )
    with pytest.raises(ConflictError):
        await store.backend.remove_worker(BASE_ID, "w0", expect=seen.version)
    assert await listed(store, status=READY) == ["w0"]


async def test_a_change_with_the_right_precondition_is_made(store: Store) -> None:
    """The reaper's own way: list, mark; list, remove."""
    await ready(store, "w0")
    (seen,) = await store.backend.list_workers()
    now = store.clock.forward(1)
    assert await store.backend.update_status(BASE_ID, "w0", 0, STALE, now, expect=seen.version)
    (seen,) = await store.backend.list_workers()
    assert await store.backend.remove_worker(BASE_ID, "w0", expect=seen.version)
    assert not await store.backend.remove_worker(BASE_ID, "w0", expect=seen.version)


async def test_a_precondition_of_another_object_is_no_precondition_of_this(store: Store) -> None:
    """A record that was removed and published again is another one."""
    await ready(store, "w0")
    (seen,) = await store.backend.list_workers()
    await store.backend.remove_worker(BASE_ID, "w0")
    await ready(store, "w0")
    with pytest.raises(ConflictError):
        await store.backend.remove_worker(BASE_ID, "w0", expect=seen.version)
    with pytest.raises(ConflictError):
        await store.backend.remove_worker(BASE_ID, "w0", expect=Version("", ""))


async def test_two_racing_writers_lose_no_newer_status(store: Store) -> None:
    """However the two agents' updates meet, the newest time stands at the end."""
    await ready(store, "w0")
    base, errors = store.clock.ms, []
    store.clock.forward(10)

    async def write(backend: Any, times: range, status: SourceStatus) -> int:
        count = 0
        for at in times:
            try:
                count += await backend.update_status(BASE_ID, "w0", 0, status, base + at)
            except HibernodeError as error:
                errors.append(error)
        return count

    total = store.races
    written = await asyncio.gather(
        write(store.backend, range(1, total, 2), READY), write(store.other, range(2, total + 1, 2), STALE)
    )
    assert errors == []
    assert sum(written) > 0
    record = await store.backend.get_metadata(BASE_ID, "w0")
    assert record is not None
    assert record.worker is not None

    async def newest() -> bool:
        (one,) = await store.backend.list_workers()
        return one.updated_at == base + total and one.status is (STALE if total % 2 == 0 else READY)

    await until(newest)


# lists ------------------------------------------------------------------------------------------------


async def test_lists_choose_by_every_field(store: Store) -> None:
    """The newest first; a status filter with any rank."""
    await ready(store, "a0", 0)
    await ready(store, "a1", 1)
    await ready(store, "b0", 0, identity=OTHER)
    last = store.clock.ms
    await store.backend.update_status(BASE_ID, "a0", 0, STALE, store.clock.forward(1))
    assert await listed(store) == ["a0", "b0", "a1"]
    assert await listed(store, status=READY) == ["b0", "a1"]
    assert await listed(store, status=INITIALIZING) == []
    assert await listed(store, source_ids=[BASE_ID]) == ["a0", "a1"]
    assert await listed(store, source_ids=[BASE_ID, OTHER_ID], rank=0) == ["a0", "b0"]
    assert await listed(store, source_ids=[]) == []
    assert await listed(store, source_ids=["f" * 16]) == []
    assert await listed(store, model_name=MODEL.lower()) == []
    assert await listed(store, model_name=MODEL, limit=2) == ["a0", "b0"]
    assert await listed(store, min_updated_at=last) == ["a0", "b0"]
    assert await listed(store, min_training_step=0) == []


async def test_sources_are_listed_once(store: Store) -> None:
    """By id, with a model name."""
    assert await store.backend.list_sources() == []
    for worker_id in ("w0", "w1"):
        await ready(store, worker_id)
    await ready(store, "w2", identity=OTHER)
    assert await store.backend.list_sources() == [(BASE_ID, MODEL), (OTHER_ID, MODEL)]


async def test_a_source_goes_with_its_last_worker(store: Store) -> None:
    """Not before."""
    await ready(store, "w0")
    await ready(store, "w1", 1)
    assert await store.backend.remove_worker(BASE_ID, "w0")
    assert await store.backend.list_sources() == [(BASE_ID, MODEL)]
    assert await store.backend.get_metadata(BASE_ID, "w0") is None
    assert await store.backend.remove_worker(BASE_ID, "w1")
    assert await store.backend.list_sources() == []


async def test_a_source_is_removed_whole(store: Store) -> None:
    """Other sources stay."""
    for number in range(3):
        await ready(store, f"w{number}", number)
    await ready(store, "other", identity=OTHER)
    assert await store.backend.remove_metadata(BASE_ID) == 3
    assert await listed(store) == ["other"]
    assert await store.backend.remove_metadata(BASE_ID) == 0


async def test_many_workers_publish_at_once(store: Store) -> None:
    """Each record is its own."""
    count = 24
    await asyncio.gather(
        *(
            store.backend.publish_metadata(BASE, f"w{rank}", central(rank, bytes([rank]) * 9))
            for rank in range(count)
        )
    )
    assert len(await listed(store)) == count
    for rank in range(count):
        assert (await worker_of(store, f"w{rank}")).payload.nixl == bytes([rank]) * 9


async def test_what_one_agent_writes_another_lists(store: Store) -> None:
    """Soon, and it is gone as soon."""
    await ready(store, "w0")

    async def there() -> bool:
        return [one.status for one in await store.other.list_workers()] == [READY]

    async def gone() -> bool:
        return await store.other.list_workers() == []

    await until(there)
    await store.backend.remove_worker(BASE_ID, "w0")
    await until(gone)
    assert await store.other.get_metadata(BASE_ID, "w0") is None


async def test_the_numbers_say_how_it_is(store: Store) -> None:
    """Records by status; nothing that cannot be read."""
    await ready(store, "w0")
    await store.backend.publish_metadata(BASE, "w1", peer(1))
    stats = store.backend.stats()
    assert stats.synced
    assert stats.by_status == {UNKNOWN: 1, INITIALIZING: 0, READY: 1, STALE: 0}
    assert stats.unreadable == 0


# watches ----------------------------------------------------------------------------------------------


async def test_a_watch_begins_with_what_is_there_and_goes_on_with_what_happens(store: Store) -> None:
    """PUT for each, SYNCED, then changes with their generations."""
    await ready(store, "w0")
    async with aclosing(store.other.watch()) as watch:  # type: ignore[type-var]
        kinds: list[tuple[str, str, SourceStatus | None]] = []

        async def collect(last: tuple[str, str, SourceStatus | None]) -> Change:
            while True:
                change: Change = await anext(watch)
                one = change.instance
                kinds.append((change.kind, one.worker_id if one else "", one.status if one else None))
                if kinds[-1] == last:
                    return change

        await collect((ChangeKind.SYNCED, "", None))
        await store.backend.update_status(BASE_ID, "w0", 0, STALE, store.clock.forward(1))
        stale = await collect((ChangeKind.PUT, "w0", STALE))
        store.clock.forward(1)
        await store.backend.publish_metadata(BASE, "w0", peer())
        again = await collect((ChangeKind.PUT, "w0", UNKNOWN))
        assert stale.instance is not None
        assert again.instance is not None
        assert again.instance.generation > stale.instance.generation
        await store.backend.remove_worker(BASE_ID, "w0")
        await collect((ChangeKind.GONE, "w0", UNKNOWN))


async def test_a_watch_of_one_source_hears_of_no_other(store: Store) -> None:
    """Nor begins with one."""
    await ready(store, "w0")
    async with aclosing(store.backend.watch(OTHER_ID)) as watch:  # type: ignore[type-var]
        assert (await anext(watch)).kind is ChangeKind.SYNCED
        await ready(store, "w1")
        await ready(store, "x0", identity=OTHER)
        change = await anext(watch)
        assert change.instance is not None
        assert change.instance.worker_id == "x0"


async def test_a_slow_watcher_gets_the_newest_state_once(store: Store) -> None:
    """What it has not read is merged, so its backlog has an end."""
    await ready(store, "w0")
    async with aclosing(store.backend.watch()) as watch:  # type: ignore[type-var]
        await anext(watch)
        for _ in range(20):
            await store.backend.update_status(BASE_ID, "w0", 0, READY, store.clock.forward(1))
        change = await anext(watch)
        assert change.instance is not None
        assert change.instance.updated_at == store.clock.ms
        assert (await anext(watch)).kind is ChangeKind.SYNCED


async def test_watches_end_with_the_backend(store: Store) -> None:
    """Nobody waits for ever."""

    async def follow() -> int:
        return len([change async for change in store.backend.watch()])

    task = asyncio.create_task(follow())
    await asyncio.sleep(0)
    await store.backend.close()
    assert await task >= 1
