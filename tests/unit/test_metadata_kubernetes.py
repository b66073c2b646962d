"""What only the Kubernetes backend has to stand: upstream's defects, the Rust server's records, outages."""

from __future__ import annotations

import asyncio
import base64
import json
import random
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
from kubernetes.aio.client import Configuration

from hibernode.errors import ConflictError, IntegrityError, TooLargeError, UnavailableError
from hibernode.kube.api import KubeApi, load_configuration
from hibernode.metadata.backend import ChangeKind, WorkerQuery
from hibernode.metadata.backends.kubernetes import KubernetesBackend
from hibernode.metadata.identity import identity_text
from hibernode.metadata.mapping import ANNOTATION_IDENTITY, LABEL_SOURCE, LABEL_WORKER
from hibernode.metadata.records import BackendPayload, BackendType, SourceStatus, WorkerRecord
from hibernode.metadata.service import change_message
from hibernode.metadata.wire import reference_message
from tests.unit.kube_fake import CONFIGMAPS, OBJECTS, FakeKube, Fault
from tests.unit.metadata_kit import (
    BASE,
    BASE_ID,
    MODEL,
    OTHER,
    POD,
    START,
    Clock,
    Store,
    central,
    kube_backend,
    kube_store,
    object_name,
    peer,
    tensors,
    until,
)

READY, STALE, UNKNOWN = SourceStatus.READY, SourceStatus.STALE, SourceStatus.UNKNOWN
NAME = object_name("w0")
RANDOM = random.Random(4)
WORKER_JSON = "modelmetadatas/[^/]+/status"


@pytest.fixture
async def fake() -> AsyncIterator[FakeKube]:
    """Start an API server in this process."""
    async with FakeKube() as server:
        yield server


@pytest.fixture
async def store(fake: FakeKube) -> AsyncIterator[Store]:
    """Open the records there."""
    async with kube_store(fake) as opened:
        yield opened


async def impatient(fake: FakeKube, **limits: float) -> KubernetesBackend:
    """Connect a backend that gives up soon."""
    backend = kube_backend(fake.url, Clock(), **{"total": 0.5, "call": 0.2, **limits})
    try:
        await backend.connect()
    except UnavailableError:
        await backend.close()
        raise
    return backend


def of_rust(worker_id: str, **status: Any) -> dict[str, Any]:
    """Write an object as the Rust server of release 0.5.0 did: every key, Unknown, its own times."""
    worker = {
        "workerRank": 0,
        "backendType": "nixl",
        "nixlMetadata": base64.b64encode(b"blob").decode(),
        "tensorCount": 1,
        "tensorConfigMap": f"{object_name(worker_id)}-tensors-worker-0",
        "metadataEndpoint": "",
        "agentName": "mx-auto-worker0-0badcafe",
        "workerGrpcEndpoint": "",
        "accelerator": "cuda",
        "status": "Ready",
        "updatedAt": "2026-09-21T14:13:20.123+00:00",
        **status,
    }
    return {
        "metadata": {
            "name": object_name(worker_id),
            "labels": {LABEL_SOURCE: BASE_ID, LABEL_WORKER: worker_id},
        },
        "spec": {"modelName": MODEL, "sourceType": "weights"},
        "status": {
            "worker": worker,
            "publishedAt": "2026-09-21T14:13:20.123456789+00:00",
            "conditions": [{"type": "Ready", "status": "True", "reason": "WorkerReady", "message": "x"}],
            "observedGeneration": 1,
        },
    }


def rust_tensors(worker_id: str, rows: list[Any]) -> dict[str, Any]:
    """Write a ConfigMap as the Rust server does: indented, no digest in its name."""
    name = f"{object_name(worker_id)}-tensors-worker-0"
    return {
        "metadata": {"name": name, "labels": {LABEL_SOURCE: BASE_ID}},
        "data": {"tensors.json": json.dumps(rows, indent=2)},
    }


ROW = {"name": "t", "addr": "4096", "size": "8", "device_id": 0, "dtype": "torch.bfloat16"}


# wire compatibility -----------------------------------------------------------------------------------


async def test_a_record_of_the_rust_server_is_read(fake: FakeKube) -> None:
    """With its tensors, its times and its status."""
    fake.put(CONFIGMAPS, rust_tensors("w0", [ROW]))
    fake.put(OBJECTS, of_rust("w0"))
    async with kube_store(fake) as store:
        record = await store.backend.get_metadata(BASE_ID, "w0")
        assert record is not None
        assert record.worker is not None
        assert record.worker.payload == BackendPayload(BackendType.NIXL, nixl=b"blob")
        assert [one.addr for one in record.worker.tensors] == [4096]
        assert record.worker.status is READY
        assert record.instance.updated_at == START // 10**6
        assert record.instance.generation == START
        assert record.identity is None


async def test_a_record_is_what_the_rust_server_reads(fake: FakeKube, store: Store) -> None:
    """Its names, labels, conditions, types and forms, and a ConfigMap that it finds by the status."""
    await store.backend.publish_metadata(BASE, "w0", central(2), owner=POD)
    await store.backend.update_status(BASE_ID, "w0", 2, READY, store.clock.forward(1))
    raw = fake.get(OBJECTS, NAME)
    assert raw["metadata"]["labels"] == {LABEL_SOURCE: BASE_ID, LABEL_WORKER: "w0"}
    assert [one["uid"] for one in raw["metadata"]["ownerReferences"]] == [POD.uid]
    assert raw["spec"] == {"modelName": MODEL, "sourceType": "weights"}
    worker, status = raw["status"]["worker"], raw["status"]
    assert (worker["workerRank"], worker["tensorCount"], worker["status"]) == (2, 3, "Ready")
    assert worker["updatedAt"] == "2026-09-21T14:13:21.123+00:00"
    assert status["publishedAt"] == "2026-09-21T14:13:20.123456789+00:00"
    assert status["observedGeneration"] == 1
    (condition,) = status["conditions"]
    assert (condition["type"], condition["status"], condition["reason"]) == ("Ready", "True", "WorkerReady")
    configmap = fake.get(CONFIGMAPS, worker["tensorConfigMap"])
    assert configmap["metadata"]["name"].startswith(f"{NAME}-tensors-worker-2")
    assert [row["addr"] for row in json.loads(configmap["data"]["tensors.json"])] == [
        str(one.addr) for one in tensors(3)
    ]
    (owner,) = configmap["metadata"]["ownerReferences"]
    assert (owner["uid"], owner["controller"]) == (raw["metadata"]["uid"], True)


async def test_the_rust_server_may_publish_over_a_record_and_back(fake: FakeKube, store: Store) -> None:
    """Each reads the other's last publication, and their generations differ."""
    first = await store.backend.publish_metadata(BASE, "w0", central())
    raw = json.loads(json.dumps(fake.get(OBJECTS, NAME)))
    raw["status"] |= {**of_rust("w0")["status"], "publishedAt": "2026-09-21T14:13:21Z"}
    fake.put(CONFIGMAPS, rust_tensors("w0", [ROW]))
    fake.put(OBJECTS, raw)

    async def seen() -> bool:
        record = await store.backend.get_metadata(BASE_ID, "w0")
        assert record is not None
        assert record.worker is not None
        return record.worker.payload.nixl == b"blob" and record.instance.generation != first.generation

    await until(seen)
    store.clock.forward(5)
    again = await store.backend.publish_metadata(BASE, "w0", central())
    assert again.generation > first.generation
    assert f"{NAME}-tensors-worker-0" not in fake.names(CONFIGMAPS)


async def test_a_packed_list_is_refused_by_an_old_reader(fake: FakeKube, store: Store) -> None:
    """It finds no tensors.json at all, never a part of one (defect 2)."""
    await store.backend.publish_metadata(BASE, "w0", central(tensors=tensors(12_000)))
    (name,) = fake.names(CONFIGMAPS)
    assert fake.get(CONFIGMAPS, name).get("data") is None


# defects, by their number in the reference ------------------------------------------------------------


async def test_nothing_is_asked_for_a_bad_id(fake: FakeKube, store: Store) -> None:
    """Defect 1: it is refused here, not by the API server half-way."""
    before = len(fake.calls)
    for worker_id in ("A_b", "../x", "a" * 64):
        with pytest.raises(Exception, match="is not a worker id"):
            await store.backend.publish_metadata(BASE, worker_id, peer())
    assert [call for call in fake.calls[before:] if "watch" not in str(call)] == []


@pytest.mark.parametrize(
    "worker",
    [
        central(blob=b"x" * (2 << 20), tensors=()),
        central(tensors=tuple(replace(one, name=RANDOM.randbytes(300).hex()) for one in tensors(8000))),
    ],
    ids=["blob", "tensors"],
)
async def test_what_does_not_fit_is_refused_before_anything_is_written(
    fake: FakeKube, store: Store, worker: WorkerRecord
) -> None:
    """Defect 2: no object is left without a status."""
    with pytest.raises(TooLargeError):
        await store.backend.publish_metadata(BASE, "w0", worker)
    assert (fake.names(OBJECTS), fake.names(CONFIGMAPS)) == ([], [])


@pytest.mark.parametrize("step", ["POST .*/configmaps", "PATCH .*/status"])
@pytest.mark.parametrize("code", [422, 413, 403])
async def test_a_publication_that_fails_half_way_is_undone(
    fake: FakeKube, store: Store, step: str, code: int
) -> None:
    """Defect 2: whichever step it is."""
    fake.fail(99, step, Fault(code))
    with pytest.raises(UnavailableError):
        await store.backend.publish_metadata(BASE, "w0", central())
    assert fake.names(OBJECTS) == []


async def test_a_publication_that_is_cancelled_is_undone(fake: FakeKube, store: Store) -> None:
    """Defect 2: the caller's deadline may end it anywhere."""
    fake.fail(99, "POST .*/configmaps", Fault(silent=True))
    task = asyncio.create_task(store.backend.publish_metadata(BASE, "w0", central()))
    await until(lambda: fake.names(OBJECTS))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert fake.names(OBJECTS) == []


async def test_a_failed_publication_leaves_an_older_record_alone(fake: FakeKube, store: Store) -> None:
    """It did not make it, so it does not undo it."""
    await store.backend.publish_metadata(BASE, "w0", central())
    fake.fail(99, "POST .*/configmaps", Fault(422))
    with pytest.raises(UnavailableError):
        await store.backend.publish_metadata(BASE, "w0", central(tensors=tensors(9)))
    record = await store.other.get_metadata(BASE_ID, "w0")
    assert record is not None
    assert record.worker is not None
    assert record.worker.tensors == tensors(3)


async def test_what_a_crash_left_is_seen_and_can_be_collected(fake: FakeKube, store: Store) -> None:
    """Defect 2: it has an age and a version, and a publication in between saves it."""
    raw = of_rust("w0")
    del raw["status"]
    fake.put(OBJECTS, raw)

    async def seen() -> bool:
        return bool(await store.backend.list_workers())

    await until(seen)
    (left,) = await store.backend.list_workers()
    assert (left.whole, left.status, left.updated_at) == (False, UNKNOWN, 0)
    assert left.created_at > 0
    assert await store.backend.list_workers(WorkerQuery(status=UNKNOWN)) == []
    record = await store.backend.get_metadata(BASE_ID, "w0")
    assert record is not None
    assert record.worker is None
    await store.backend.publish_metadata(BASE, "w0", central())
    with pytest.raises(ConflictError):
        await store.backend.remove_worker(BASE_ID, "w0", expect=left.version)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (None, "is gone"),
        ({}, "has no tensors.json"),
        ({"tensors.json": "[]"}, "0 tensors, and the record says 1"),
        ({"tensors.json": "[{}]"}, "no tensor"),
        ({"tensors.json": "["}, "not JSON"),
    ],
    ids=["gone", "empty", "another count", "odd", "cut"],
)
async def test_lost_tensors_are_an_error(fake: FakeKube, data: Any, said: str) -> None:
    """Defect 3: not zero tensors; the list still shows the record."""
    fake.put(OBJECTS, of_rust("w0"))
    if data is not None:
        fake.put(CONFIGMAPS, {**rust_tensors("w0", []), "data": data})
    async with kube_store(fake) as store:
        with pytest.raises(IntegrityError, match=said):
            await store.backend.get_metadata(BASE_ID, "w0")
        assert len(await store.backend.list_workers()) == 1


async def test_tensors_of_another_content_are_an_error(fake: FakeKube, store: Store) -> None:
    """Defect 3: the name has the digest, also where the count is right."""
    await store.backend.publish_metadata(BASE, "w0", central())
    (name,) = fake.names(CONFIGMAPS)
    raw = fake.get(CONFIGMAPS, name)
    raw["data"]["tensors.json"] = raw["data"]["tensors.json"].replace("4096", "8192")
    fake.put(CONFIGMAPS, raw)
    with pytest.raises(IntegrityError, match="digest"):
        await store.other.get_metadata(BASE_ID, "w0")


@pytest.mark.parametrize("place", ["other", "../secrets/x", f"{object_name('w1')}-tensors-worker-0"])
async def test_a_record_cannot_name_tensors_of_another(fake: FakeKube, place: str) -> None:
    """Whoever wrote it: it would get into a URL, or show what is another worker's."""
    fake.put(OBJECTS, of_rust("w0", tensorConfigMap=place))
    async with kube_store(fake) as store:
        with pytest.raises(IntegrityError, match="not its own"):
            await store.backend.get_metadata(BASE_ID, "w0")


async def test_what_others_wrote_stays_at_a_publication(fake: FakeKube, store: Store) -> None:
    """Defect 4: labels, owners, annotations."""
    await store.backend.publish_metadata(BASE, "w0", central(), owner=POD)
    raw = json.loads(json.dumps(fake.get(OBJECTS, NAME)))
    raw["metadata"]["labels"]["team"] = "x"
    raw["metadata"]["ownerReferences"].insert(
        0, {"apiVersion": "x/v1", "kind": "Leader", "name": "l", "uid": "u"}
    )
    fake.put(OBJECTS, raw)
    new_pod = replace(POD, uid="0b0e8d0c-0000-4000-8000-000000000002")
    await store.backend.publish_metadata(BASE, "w0", central(blob=b"new"), owner=new_pod)
    metadata = fake.get(OBJECTS, NAME)["metadata"]
    assert metadata["labels"]["team"] == "x"
    assert [one["uid"] for one in metadata["ownerReferences"]] == ["u", new_pod.uid]


async def test_a_change_of_rank_leaves_no_configmap(fake: FakeKube, store: Store) -> None:
    """Defect 5: the one that the record pointed to goes."""
    await store.backend.publish_metadata(BASE, "w0", central(0))
    await store.backend.publish_metadata(BASE, "w0", central(1))
    assert [name.split("-tensors-")[1][:8] for name in fake.names(CONFIGMAPS)] == ["worker-1"]


async def test_a_heartbeat_sends_status_and_time_only(fake: FakeKube, store: Store) -> None:
    """Defects 7 and 9: no blob every 30 seconds, and never without the version that was read."""
    await store.backend.publish_metadata(BASE, "w0", central(blob=b"x" * 200_000))
    fake.asked.clear()
    await store.backend.update_status(BASE_ID, "w0", 0, READY, store.clock.forward(1))
    ((body),) = [body for method, path, _, body in fake.asked if method == "PATCH"]
    assert body["status"]["worker"] == {"status": "Ready", "updatedAt": "2026-09-21T14:13:21.123+00:00"}
    assert body["status"].keys() == {"worker", "conditions", "observedGeneration"}
    assert body["metadata"]["resourceVersion"]


TRANSIENT = [
    pytest.param(Fault(429, {"Retry-After": "0"}), id="429"),
    pytest.param(Fault(500), id="500"),
    pytest.param(Fault(503), id="503"),
    pytest.param(Fault(504, after=True), id="504 after the effect"),
    pytest.param(Fault(cut=True), id="cut"),
    pytest.param(Fault(cut=True, after=True), id="cut after the effect"),
    pytest.param(Fault(409), id="409"),
]
STEPS = ["GET .*/modelmetadatas/", "POST .*/modelmetadatas", "POST .*/configmaps", "PATCH .*/status"]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("fault", TRANSIENT)
async def test_a_passing_fault_does_not_stop_a_publication(
    fake: FakeKube, store: Store, fault: Fault, step: str
) -> None:
    """Defect 9: at every step, before and after its effect; what comes of it is one whole record."""
    if fault.code == 409 and step.startswith("GET"):
        fault = Fault(502)  # no server answers a GET with 409
    fake.fail(4, step, fault)  # aiohttp itself asks again after an old connection broke
    await store.backend.publish_metadata(BASE, "w0", central())
    assert await store.backend.update_status(BASE_ID, "w0", 0, READY, store.clock.forward(1))
    record = await store.other.get_metadata(BASE_ID, "w0")
    assert record is not None
    assert record.worker is not None
    assert record.worker.tensors == tensors(3)
    assert len(fake.names(CONFIGMAPS)) == 1
    assert store.backend.stats().retries > 0


async def test_silence_is_asked_again(fake: FakeKube) -> None:
    """Defect 9: each try has its own time."""
    backend = await impatient(fake, total=30.0)
    fake.fail(1, "POST .*/modelmetadatas", Fault(silent=True))
    assert await backend.publish_metadata(BASE, "w0", central())
    await backend.close()


async def test_tries_have_an_end(fake: FakeKube) -> None:
    """Defect 9: the deadline, not a number of tries; the last failure is told."""
    backend = await impatient(fake)
    fake.fail(10_000, WORKER_JSON, Fault(503))
    with pytest.raises(UnavailableError, match="as it was told"):
        await backend.publish_metadata(BASE, "w0", central())
    assert fake.names(OBJECTS) == []
    await backend.close()


async def test_no_leave_is_said_at_once(fake: FakeKube, store: Store) -> None:
    """403 is not tried again; it names the document with the verbs."""
    fake.fail(1, "GET .*/modelmetadatas/", Fault(403))
    with pytest.raises(UnavailableError) as caught:
        await store.backend.get_metadata(BASE_ID, "w1")
    assert caught.value.reason == "ApiForbidden"


async def test_lists_ask_the_api_server_nothing(fake: FakeKube, store: Store) -> None:
    """Defect 10: they come from the watched list, and a record that was read comes from memory."""
    await store.backend.publish_metadata(BASE, "w0", central())
    await store.backend.get_metadata(BASE_ID, "w0")
    fake.calls.clear()
    for _ in range(50):
        assert await store.backend.list_workers()
        assert await store.backend.list_sources()
        assert await store.backend.get_metadata(BASE_ID, "w0")
    assert [call for call in fake.calls if call != ("GET", fake.calls[0][1])] == []
    assert len(fake.calls) <= 2


async def test_the_list_is_read_in_pages(fake: FakeKube) -> None:
    """Defect 10: never all of etcd at once."""
    for number in range(120):
        fake.put(OBJECTS, of_rust(f"w{number}"))
    async with kube_store(fake) as store:
        assert len(await store.backend.list_workers()) == 120
    lists = [
        query for method, path, query, _ in fake.asked if path.endswith(OBJECTS) and "watch" not in query
    ]
    assert all("limit" in query for query in lists)
    assert len(lists) == 6


async def test_a_list_that_grew_too_old_between_pages_is_begun_again(fake: FakeKube) -> None:
    """410 in the middle: nothing is missing."""
    for number in range(120):
        fake.put(OBJECTS, of_rust(f"w{number}"))
    asked = []

    def compact(method: str, path: str) -> None:
        asked.append(path)
        if len(asked) == 2:
            fake.put(OBJECTS, of_rust("late"))
            fake.forget()

    fake.faults.append(compact)
    async with kube_store(fake) as store:
        assert len(await store.backend.list_workers()) == 121


BAD_OBJECTS = [
    pytest.param({"workerRank": 1 << 40}, id="rank beyond u32"),
    pytest.param({"nixlMetadata": "%%%"}, id="no base64"),
    pytest.param({"artifactSource": {"totalSize": -1}}, id="negative size"),
    pytest.param({"status": ["Ready"], "agentName": {}}, id="other types"),
]


@pytest.mark.parametrize("worker", BAD_OBJECTS)
async def test_one_bad_object_hides_no_other(fake: FakeKube, worker: dict[str, Any]) -> None:
    """Defect 11: it is counted, and asking for it says what is wrong; mended, it is listed."""
    fake.put(OBJECTS, of_rust("w0"))
    fake.put(OBJECTS, of_rust("w1", **worker))
    fake.put(OBJECTS, {"metadata": {"name": "something-else"}, "spec": None})
    async with kube_store(fake) as store:
        assert [one.worker_id for one in await store.backend.list_workers()] == ["w0"]
        assert store.backend.stats().unreadable == 2
        with pytest.raises(IntegrityError):
            await store.backend.get_metadata(BASE_ID, "w1")
        fake.put(OBJECTS, of_rust("w1"))

        async def mended() -> bool:
            return len(await store.backend.list_workers()) == 2

        await until(mended)
        assert store.backend.stats().unreadable == 1


async def test_an_object_of_a_far_future_ends_nobodys_watch(fake: FakeKube) -> None:
    """Nor does a load that no number can be: both are on the wire as the largest, or not at all."""
    raw = of_rust("w0", updatedAt="9999-12-31T23:59:59Z", sourceLoad=10**400)
    raw["status"]["publishedAt"] = "9999-12-31T23:59:59Z"
    fake.put(OBJECTS, raw)
    async with kube_store(fake) as store, aclosing(store.backend.watch()) as watch:  # type: ignore[type-var]
        change = await anext(watch)
        assert change.instance is not None
        message = change_message(change.kind, change.instance)
        assert type(message).FromString(message.SerializeToString()).worker_id == "w0"
        assert reference_message(change.instance).source_load == 0


async def test_spec_and_labels_are_mended(fake: FakeKube) -> None:
    """Defect 13: an object without labels is listed by its name, and the next publication labels it."""
    raw = of_rust("w0")
    raw["spec"]["modelName"] = MODEL.upper()
    del raw["metadata"]["labels"]
    fake.put(OBJECTS, raw)
    async with kube_store(fake) as store:
        assert [one.source_id for one in await store.backend.list_workers()] == [BASE_ID]
        await store.backend.publish_metadata(BASE, "w0", central())
        raw = fake.get(OBJECTS, NAME)
        assert raw["metadata"]["labels"][LABEL_SOURCE] == BASE_ID
        assert raw["spec"]["modelName"] == MODEL
        assert raw["metadata"]["generation"] == raw["status"]["observedGeneration"] == 2


async def test_a_source_is_removed_as_far_as_it_can_be(fake: FakeKube, store: Store) -> None:
    """Defect 15: one that fails does not keep the others, and the error is not lost."""
    for number in range(4):
        await store.backend.publish_metadata(BASE, f"w{number}", central(number))
    fake.fail(99, "DELETE .*-w1$", Fault(422))
    with pytest.raises(UnavailableError):
        await store.backend.remove_metadata(BASE_ID)
    assert fake.names(OBJECTS) == [object_name("w1")]
    assert len(fake.names(CONFIGMAPS)) == 1


async def test_configmaps_without_an_owner_go_with_their_record(fake: FakeKube, store: Store) -> None:
    """Defect 15: older servers wrote such; those of other workers stay."""
    await store.backend.publish_metadata(BASE, "w0", central())
    await store.backend.publish_metadata(BASE, "w0-tensors-worker-0", central())
    fake.put(CONFIGMAPS, rust_tensors("w0", [ROW]))
    assert await store.backend.remove_worker(BASE_ID, "w0")
    (left,) = fake.names(CONFIGMAPS)
    assert left.startswith(object_name("w0-tensors-worker-0-tensors-worker-0"))


async def test_tensors_never_belong_to_an_object_that_is_gone(fake: FakeKube, store: Store) -> None:
    """Defect 16: the object was removed and made again while a publication was under way."""
    await store.backend.publish_metadata(BASE, "w0", central())
    fake.remove(OBJECTS, NAME)  # no collector runs here: its ConfigMap is still there
    (left,) = fake.names(CONFIGMAPS)
    dead = fake.get(CONFIGMAPS, left)["metadata"]["ownerReferences"][0]["uid"]
    await store.backend.publish_metadata(BASE, "w0", central())
    (name,) = fake.names(CONFIGMAPS)
    (owner,) = fake.get(CONFIGMAPS, name)["metadata"]["ownerReferences"]
    assert owner["uid"] == fake.get(OBJECTS, NAME)["metadata"]["uid"] != dead


async def test_an_object_that_goes_between_two_steps_is_made_again(fake: FakeKube, store: Store) -> None:
    """Defect 16: and then owns its tensors."""

    def vanish(method: str, path: str) -> None:
        if method == "PATCH" and path.endswith("/status") and not gone:
            gone.append(path)
            fake.remove(OBJECTS, NAME)

    gone: list[str] = []
    fake.faults.append(vanish)
    await store.backend.publish_metadata(BASE, "w0", central())
    (name,) = fake.names(CONFIGMAPS)
    (owner,) = fake.get(CONFIGMAPS, name)["metadata"]["ownerReferences"]
    assert owner["uid"] == fake.get(OBJECTS, NAME)["metadata"]["uid"]
    record = await store.other.get_metadata(BASE_ID, "w0")
    assert record is not None
    assert record.worker is not None


async def test_an_identity_that_is_not_the_records_is_not_served(fake: FakeKube) -> None:
    """Defect 17: it is kept in an annotation, and counts only if it has the record's id."""
    raw = of_rust("w0")
    raw["metadata"]["annotations"] = {ANNOTATION_IDENTITY: identity_text(OTHER)}
    fake.put(OBJECTS, raw)
    fake.put(CONFIGMAPS, rust_tensors("w0", [ROW]))
    async with kube_store(fake) as store:
        record = await store.backend.get_metadata(BASE_ID, "w0")
        assert record is not None
        assert record.identity is None


# outages ----------------------------------------------------------------------------------------------


async def test_an_outage_is_no_empty_list(fake: FakeKube) -> None:
    """Lists stand for a while, then it is an error; what comes back is caught up with."""
    backend = await impatient(fake, max_age=0.4)
    await backend.publish_metadata(BASE, "w0", central())
    assert await backend.get_metadata(BASE_ID, "w0")
    await fake.down()
    with pytest.raises(UnavailableError):
        await backend.get_metadata(BASE_ID, "w1")
    await until(lambda: backend.stats().age_seconds > 0.4)
    for call in (backend.list_workers(), backend.list_sources(), backend.get_metadata(BASE_ID, "w0")):
        with pytest.raises(UnavailableError):
            await call
    assert not backend.stats().synced
    fake.put(OBJECTS, of_rust("w9"))
    await fake.up()
    await until(lambda: backend.stats().synced)

    async def caught_up() -> bool:
        return len(await backend.list_workers()) == 2

    await until(caught_up)
    await backend.close()


async def test_a_short_outage_is_not_seen(fake: FakeKube, store: Store) -> None:
    """The list and what was read from it are served meanwhile."""
    await store.backend.publish_metadata(BASE, "w0", central())
    await store.backend.get_metadata(BASE_ID, "w0")
    await fake.down()
    assert len(await store.backend.list_workers()) == 1
    assert await store.backend.get_metadata(BASE_ID, "w0")
    await fake.up()
    assert await store.backend.update_status(BASE_ID, "w0", 0, READY, store.clock.forward(1))


async def test_a_watch_that_is_too_old_lists_again(fake: FakeKube) -> None:
    """410: what changed meanwhile is found, what went is gone, and watchers of ours hear of both."""
    fake.put(OBJECTS, of_rust("w0"))
    backend = await impatient(fake, total=30.0)
    async with aclosing(backend.watch()) as watch:  # type: ignore[type-var]
        assert [(await anext(watch)).kind for _ in range(2)] == [ChangeKind.PUT, ChangeKind.SYNCED]
        await fake.down()
        fake.remove(OBJECTS, NAME)
        fake.put(OBJECTS, of_rust("w1"))
        fake.forget()
        await fake.up()
        heard = {
            (one.kind, one.instance.worker_id)
            for one in [await anext(watch), await anext(watch)]
            if one.instance
        }
        assert heard == {(ChangeKind.GONE, "w0"), (ChangeKind.PUT, "w1")}
    assert backend.stats().relists == 2
    await backend.close()


async def test_no_crd_is_said(fake: FakeKube) -> None:
    """With the file that has it."""
    fake.fail(1, "GET", Fault(404))
    with pytest.raises(UnavailableError) as caught:
        await impatient(fake)
    assert caught.value.reason == "NoCrd"


async def test_a_kind_that_is_gone_is_an_outage_and_no_missing_record(fake: FakeKube, store: Store) -> None:
    """The definition was removed, or a proxy answers: nobody is told that a record is not there."""
    found = await store.backend.publish_metadata(BASE, "w0", central())
    fake.fail(99, OBJECTS, Fault(404))
    key, backend = (found.source_id, "w0"), store.backend
    for work in (
        store.other.get_metadata(*key),
        backend.update_status(*key, 0, SourceStatus.READY, store.clock.ms),
        backend.remove_worker(*key),
        backend.publish_metadata(BASE, "w1", central()),
    ):
        with pytest.raises(UnavailableError) as caught:
            await work
        assert caught.value.reason == "NoCrd"


async def test_what_keeps_the_list_from_being_kept_up_is_said_at_once(fake: FakeKube) -> None:
    """Long before the list is too old to be served; and no more once the API server is heard again."""
    backend = await impatient(fake)
    assert backend.stats().trouble == ""
    fake.fail(9999, OBJECTS, Fault(403))
    await fake.down()
    await fake.up()
    await until(lambda: "forbids" in backend.stats().trouble)
    assert backend.stats().synced
    fake.faults.clear()
    await until(lambda: not backend.stats().trouble)
    await backend.close()


async def test_an_answer_that_is_no_object_is_no_empty_list(fake: FakeKube) -> None:
    """A proxy in between may answer 200 with a page of its own."""
    fake.fail(99, "GET", Fault(200))
    with pytest.raises(UnavailableError):
        await impatient(fake)


async def test_no_cluster_is_said() -> None:
    """No service account, and no such kubeconfig."""
    for kubeconfig in ("", "/nonexistent"):
        with pytest.raises(UnavailableError) as caught:
            await load_configuration(kubeconfig)
        assert caught.value.reason == "NoCluster"


@pytest.mark.parametrize("namespace", ["", "A", "a/b", "..", "a" * 64])
async def test_a_namespace_is_a_name(namespace: str) -> None:
    """It gets into every URL."""
    api = KubeApi(Configuration(host="http://127.0.0.1:1"))
    with pytest.raises(UnavailableError):
        KubernetesBackend(api, namespace)
    await api.close()
