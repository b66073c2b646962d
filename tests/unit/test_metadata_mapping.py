"""Identities, words, times, conditions, tensors: the rules of the contract as tables."""

from __future__ import annotations

import json
import zlib
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hibernode.errors import IntegrityError
from hibernode.metadata.backends.kube_objects import mend, object_body
from hibernode.metadata.identity import canonical, identity_from, identity_text, ids_of, mx_source_id
from hibernode.metadata.mapping import (
    configmap_digest,
    configmap_name,
    ids_of_name,
    instance_of,
    owner_of,
    owner_reference,
    payload_of,
    ready_condition,
    source_type_name,
    status_name,
    status_of,
    worker_json,
    worker_of,
)
from hibernode.metadata.publish import superseded
from hibernode.metadata.records import (
    BackendType,
    PodRef,
    SourceIdentity,
    SourceStatus,
    TensorDescriptor,
)
from hibernode.metadata.tensors import (
    PACKED_KEY,
    PLAIN_KEY,
    UNPACKED_MAX,
    StoredTensors,
    digest_of,
    load,
    store,
)
from hibernode.metadata.times import MAX_NS, read_time, write_time
from tests.unit.metadata_kit import BASE, BASE_ID, POD, central, object_name, peer, tensors

# identity ---------------------------------------------------------------------------------------------

REVISED = replace(BASE, revision="REV", extra_parameters={"b_Key": "V2", "a_key": "V1"})
IDS = [
    pytest.param(BASE, "5a5f555570065064", id="base"),
    pytest.param(replace(BASE, revision="abc123def4567890"), "d0c184b2a9a34c82", id="revision"),
    pytest.param(
        replace(BASE, extra_parameters={"Foo": "a", "foo": "b"}), "bf71fb9340cd940a", id="keys collide"
    ),
    pytest.param(
        replace(BASE, extra_parameters={"foo": "b", "Foo": "a"}), "bf71fb9340cd940a", id="any order"
    ),
    pytest.param(SourceIdentity(), "125556319d66d2f8", id="empty"),
    pytest.param(SourceIdentity(model_name="my-model"), "5f551110b22c81f2", id="only a model"),
    pytest.param(REVISED, "5158ae680b97610d", id="revision and extra parameters"),
    pytest.param(replace(BASE, model_name=BASE.model_name.upper()), BASE_ID, id="case"),
    pytest.param(replace(BASE, torch_version="", gpu_arch=""), BASE_ID, id="empty optional fields"),
]
TWO_IDS = [
    pytest.param(replace(BASE, model_name="Org/Modèle-Ü"), "0cc7d6be5d168642", "590c2a3179bf945e", id="name"),
    pytest.param(
        replace(BASE, extra_parameters={"Clé": "É"}), "2e9104178b6af33c", "ad1a5abc2d3cef08", id="parameters"
    ),
    pytest.param(
        replace(BASE, model_name="İSTANBUL/ΟΔΟΣ"), "eaaabb6dfbd00ebf", "aa016804e04c9c7e", id="final sigma"
    ),
]


@pytest.mark.parametrize(("identity", "expected"), IDS)
def test_an_id_is_the_servers(identity: SourceIdentity, expected: str) -> None:
    """The vectors that upstream pins, and those that its client computed; there is but one id."""
    assert ids_of(identity) == (expected,)
    assert mx_source_id(identity) == expected


@pytest.mark.parametrize(("identity", "server", "client"), TWO_IDS)
def test_text_beyond_ascii_has_two_ids(identity: SourceIdentity, server: str, client: str) -> None:
    """The server's is first: that is the one a record is published under."""
    assert ids_of(identity) == (server, client)
    assert mx_source_id(identity) == server


def test_the_text_that_is_hashed() -> None:
    """Sorted keys, no spaces, all in lower case."""
    assert canonical(BASE) == (
        '{"backend_framework":1,"dtype":"bfloat16","expert_parallel_size":0,"extra_parameters":{},'
        '"model_name":"deepseek-ai/deepseek-v3","mx_source_type":0,"mx_version":"0.5.0",'
        '"pipeline_parallel_size":1,"quantization":"","revision":"","tensor_parallel_size":8}'
    )


@pytest.mark.parametrize(
    "change",
    [
        {"tensor_parallel_size": 4},
        {"dtype": "float16"},
        {"mx_source_type": 1},
        {"revision": "x"},
        {"torch_version": "2.9"},
        {"compile_config_digest": "x"},
        {"extra_parameters": {"a": ""}},
    ],
    ids=str,
)
def test_every_field_is_in_the_id(change: dict[str, Any]) -> None:
    """Two sources that differ are two."""
    assert mx_source_id(replace(BASE, **change)) != BASE_ID


@given(
    st.builds(
        SourceIdentity,
        model_name=st.text(st.characters(codec="utf-8")),
        mx_source_type=st.integers(0, 1 << 32),
        extra_parameters=st.dictionaries(st.text(max_size=5), st.text(max_size=5)),
    ).filter(lambda one: all(char < "\ud800" or char > "\udfff" for char in repr(one)))
)
def test_an_identity_that_was_kept_is_read_back(identity: SourceIdentity) -> None:
    """And only under its own id."""
    try:
        source_id = mx_source_id(identity)
    except UnicodeEncodeError:
        return
    assert identity_from(identity_text(identity), source_id) == identity
    assert identity_from(identity_text(identity), "0" * 16) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"odd":1}',
        '{"model_name":1}',
        '{"extra_parameters":{"a":1}}',
        '{"mx_source_type":true}',
        "[" * 9999,
    ],
)
def test_what_is_no_identity_is_none(text: str) -> None:
    """An annotation can hold anything."""
    assert identity_from(text, BASE_ID) is None


# names and words --------------------------------------------------------------------------------------


@pytest.mark.parametrize("worker_id", ["a", "0badcafe", "a-tensors-worker-0", "a" * 63])
def test_names_lead_back_to_their_ids(worker_id: str) -> None:
    """Also for a worker id that looks like the end of a ConfigMap's name."""
    name = object_name(worker_id)
    assert ids_of_name(name) == (BASE_ID, worker_id)
    assert configmap_digest(name, configmap_name(name, 12, "0123456789abcdef")) == "0123456789abcdef"
    assert configmap_digest(name, configmap_name(name, 12)) == ""


@pytest.mark.parametrize("other", ["a-tensors-worker-0", "b", ""])
def test_a_configmap_of_another_worker_is_not_taken(other: str) -> None:
    """Whatever its worker is called."""
    theirs = configmap_name(object_name(other), 1)
    assert configmap_digest(object_name("a"), theirs) is None
    assert configmap_digest(object_name("a"), "../secrets/x") is None


@pytest.mark.parametrize(
    "name",
    [
        *("", "mx-source-", "mx-source-5a5f555570065064-", "mx-source-5A5F555570065064-a", "x"),
        "mx-source-5a5f555570065064-" + "a" * 64,
    ],
)
def test_a_name_that_is_no_records_has_no_ids(name: str) -> None:
    """Nothing is guessed."""
    assert ids_of_name(name) is None


@pytest.mark.parametrize(
    ("number", "name"),
    [
        *((0, "weights"), (3, "torch_compile_cache"), (5, "deep_gemm_cache"), (6, "tilelang_cache")),
        *((7, "cute_dsl_cache"), (8, "flashinfer_cache"), (9, "tvm_ffi_cache")),
        *((10, "unknown"), (99, "unknown"), (-1, "unknown")),
    ],
)
def test_source_types_have_their_names(number: int, name: str) -> None:
    """A number without one is unknown."""
    assert source_type_name(number) == name


@pytest.mark.parametrize(
    ("number", "name"),
    [(0, "Unknown"), (1, "Initializing"), (2, "Ready"), (3, "Stale"), (4, "Unknown"), (99, "Unknown")],
)
def test_statuses_have_their_names(number: int, name: str) -> None:
    """And are read back by them."""
    assert status_name(number) == name
    assert status_of(name) == (number if number <= 3 else 0)


@pytest.mark.parametrize("text", ["", "ready", "READY", None, 2, []])
def test_any_other_text_is_no_status(text: Any) -> None:
    """It counts for Unknown, as in the Rust server."""
    assert status_of(text) is SourceStatus.UNKNOWN


@pytest.mark.parametrize(
    ("nixl", "session", "told", "kind"),
    [
        (b"x", "", "nixl", BackendType.NIXL),
        (b"x", "s", "transfer_engine", BackendType.TRANSFER_ENGINE),
        (b"x", "s", "none", BackendType.NONE),
        (b"x", "s", None, BackendType.TRANSFER_ENGINE),
        (b"x", "", "odd", BackendType.NIXL),
        (b"", "", "", BackendType.NONE),
        (b"x", "", 7, BackendType.NIXL),
    ],
)
def test_a_payload_is_told_by_its_type_then_by_what_is_filled(
    nixl: bytes, session: str, told: Any, kind: BackendType
) -> None:
    """A known type is the authority; of the other types nothing is kept."""
    payload = payload_of(nixl, session, told)
    assert payload.type is kind
    assert bool(payload.nixl) == (kind is BackendType.NIXL)
    assert bool(payload.session_id) == (kind is BackendType.TRANSFER_ENGINE)


# times and conditions ---------------------------------------------------------------------------------

NOW = 1_790_000_000 * 10**9


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (0, "1970-01-01T00:00:00+00:00"),
        (NOW, "2026-09-21T14:13:20+00:00"),
        (NOW + 5_000_000, "2026-09-21T14:13:20.005+00:00"),
        (NOW + 5_000, "2026-09-21T14:13:20.000005+00:00"),
        (NOW + 123_456_789, "2026-09-21T14:13:20.123456789+00:00"),
    ],
)
def test_times_are_written_as_the_rust_server_does(ns: int, text: str) -> None:
    """With as many digits as it takes, and an offset."""
    assert write_time(ns) == text
    assert read_time(text) == ns


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("2026-09-21T14:13:20Z", NOW),
        ("2026-09-21T16:13:20.5+02:00", NOW + 500_000_000),
        ("2026-09-21t14:13:20.1234567891z", NOW + 123_456_789),
        *(
            (text, 0)
            for text in ("", "now", "2026-09-21", "2026-13-21T14:13:20Z", "2026-09-21T14:13:20", None, 7)
        ),
        ("1969-12-31T23:59:59Z", 0),
        ("9999-12-31T23:59:59Z", MAX_NS),
    ],
)
def test_times_of_others_are_read(text: Any, ns: int) -> None:
    """With Z or an offset; what is no time is 0."""
    assert read_time(text) == ns


@pytest.mark.parametrize(
    ("status", "value", "reason"),
    [
        (2, "True", "WorkerReady"),
        (0, "False", "WorkerUnknown"),
        (1, "False", "WorkerInitializing"),
        (3, "False", "WorkerStale"),
    ],
)
def test_the_ready_condition_follows_the_status(status: int, value: str, reason: str) -> None:
    """Its time moves when its value does."""
    old = {
        "type": "Ready",
        "status": "True",
        "reason": "x",
        "message": "x",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    (first,) = ready_condition(None, status, NOW)
    assert (first["status"], first["reason"]) == (value, reason)
    assert first["message"] == ("Worker is ready" if status == 2 else "Worker is not ready")
    (again,) = ready_condition([old], status, NOW)
    assert again["lastTransitionTime"] == (old["lastTransitionTime"] if value == "True" else write_time(NOW))


@pytest.mark.parametrize(
    "odd",
    [
        {"type": "Ready", "status": "True", "lastTransitionTime": None},
        {"type": "Ready", "status": "True"},
        {"type": "Other", "status": "True", "reason": None, "lastTransitionTime": None},
        "text",
        {},
    ],
    ids=str,
)
def test_no_condition_has_a_null(odd: Any) -> None:
    """Within a list a merge patch deletes nothing, and the schema refuses null (upstream's defect 14)."""
    written = ready_condition([odd], 2, NOW)
    assert all(value is not None for one in written for value in one.values())
    assert [one["lastTransitionTime"] for one in written if one["type"] == "Ready"] == [write_time(NOW)]


@pytest.mark.parametrize(
    ("stored", "updated", "now", "old"),
    [
        (10, 9, 10, True),
        (10, 10, 10, False),
        (10, 11, 10, False),
        (90_000, 9, 10, False),
        (60_010, 9, 10, True),
    ],
)
def test_which_news_is_old(stored: int, updated: int, now: int, old: bool) -> None:
    """Older than what stands, unless that was written by a clock more than a minute ahead."""
    assert superseded(stored, updated, now * 1_000_000) is old


# workers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "worker", [central(3), peer(2, topology={"host": "a"}, source_load=1.0)], ids=["central", "peer"]
)
def test_a_worker_is_read_back(worker: Any) -> None:
    """But for its tensors, which have their own place."""
    raw = {key: value for key, value in worker_json(worker, "cm", NOW).items() if value is not None}
    assert worker_of(json.loads(json.dumps(raw)), "x") == replace(worker, tensors=(), updated_at=NOW // 10**6)


def test_fields_of_another_release_are_kept() -> None:
    """What this one does not read it writes back."""
    worker = worker_of({"workerRank": 0, "later": {"a": [1]}}, "x")
    assert worker.unknown == {"later": {"a": [1]}}
    assert worker_json(worker, "cm", NOW)["later"] == {"a": [1]}


@pytest.mark.parametrize(
    "change",
    [
        {"workerRank": None},
        {"workerRank": 1 << 32},
        {"workerRank": "0"},
        {"workerRank": True},
        {"nixlMetadata": "no base64!"},
        {"agentName": 7},
        {"agentName": "\ud800"},
        {"artifactSource": []},
        {"artifactSource": {"totalSize": -1}},
        {"artifactSource": {"fileCount": 1.5}},
    ],
    ids=str,
)
def test_a_worker_that_cannot_be_is_an_error(change: dict[str, Any]) -> None:
    """It names the object, and is nobody else's."""
    with pytest.raises(IntegrityError) as caught:
        worker_of({"workerRank": 0, **change}, "ModelMetadata x")
    assert "ModelMetadata x" in caught.value.message
    assert caught.value.reason == "RecordCorrupt"


def test_a_rank_that_the_rust_server_wrote_negative_is_read() -> None:
    """It casts u32 to i32 (upstream's defect 12)."""
    assert worker_of({"workerRank": -1}, "x").rank == (1 << 32) - 1


def test_an_artifact_without_counts_is_read() -> None:
    """The schema asks for none; one such object broke every list of the Rust server (its defect 11)."""
    artifact = worker_of({"workerRank": 0, "artifactSource": {"artifactId": "a"}}, "x").artifact
    assert artifact is not None
    assert (artifact.artifact_id, artifact.file_count) == ("a", 0)


def test_an_object_without_status_is_not_whole() -> None:
    """Its source type is unknown where the object does not tell."""
    instance = instance_of({"metadata": {"name": object_name("a")}, "spec": {"modelName": "m"}})
    assert (instance.whole, instance.status, instance.source_type) == (False, SourceStatus.UNKNOWN, "unknown")


@pytest.mark.parametrize(
    "owner", [None, replace(POD, name=""), replace(POD, uid=""), replace(POD, namespace="other")], ids=str
)
def test_a_pod_that_is_not_complete_owns_nothing(owner: PodRef | None) -> None:
    """Nor does one of another namespace: Kubernetes would collect the record."""
    assert owner_reference(owner, "ns") == []


def test_a_pod_owns_its_record() -> None:
    """Without controlling it."""
    (reference,) = owner_reference(POD, "ns")
    assert reference == {
        "apiVersion": "v1",
        "kind": "Pod",
        "name": POD.name,
        "uid": POD.uid,
        "controller": False,
        "blockOwnerDeletion": False,
    }
    assert owner_of({"namespace": "ns", "ownerReferences": [{"kind": "Other"}, reference]}) == POD


def test_mending_keeps_what_is_others() -> None:
    """Labels, annotations and owners that others set; only the pod gives way (defects 4 and 13)."""
    wanted = object_body(object_name("a"), "ns", BASE, POD)
    have = json.loads(json.dumps(wanted))
    assert mend(have, wanted) == {}
    have["metadata"]["labels"] = {"team": "x"}
    have["metadata"]["annotations"] = {"note": "y"}
    foreign = {"apiVersion": "x/v1", "kind": "Leader", "name": "l", "uid": "1"}
    old_pod = {"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "2"}
    have["metadata"]["ownerReferences"] = [foreign, old_pod]
    have["spec"] = {"modelName": "DEEPSEEK-AI/deepseek-v3"}
    patch = mend(have, wanted)
    assert patch["metadata"]["labels"] == wanted["metadata"]["labels"]
    assert patch["metadata"]["annotations"] == wanted["metadata"]["annotations"]
    assert patch["metadata"]["ownerReferences"] == [foreign, *wanted["metadata"]["ownerReferences"]]
    assert patch["spec"] == wanted["spec"]


# tensors ----------------------------------------------------------------------------------------------

ONE = TensorDescriptor("t", (1 << 64) - 1, 1, 2, "torch.bfloat16")
ROW = {"name": "t", "addr": "1", "size": "2", "device_id": 0, "dtype": "d"}


def test_tensors_are_written_as_the_rust_server_reads_them() -> None:
    """Numbers of 64 bits as text, the keys in its order; an empty list as it writes it."""
    assert json.loads(store([ONE]).data) == [
        {"name": "t", "addr": "18446744073709551615", "size": "1", "device_id": 2, "dtype": "torch.bfloat16"}
    ]
    assert list(json.loads(store([ONE]).data)[0]) == ["name", "addr", "size", "device_id", "dtype"]
    assert (store([]).key, store([]).data) == (PLAIN_KEY, b"[]")


def test_what_the_rust_server_wrote_is_read() -> None:
    """Indented, with keys that are not known here."""
    text = json.dumps([{**ROW, "later": 1}], indent=2)
    (tensor,) = load(StoredTensors(PLAIN_KEY, text.encode(), ""), count=1, where="x")
    assert tensor == TensorDescriptor("t", 1, 2, 0, "d")


def test_large_lists_are_packed() -> None:
    """A reader that knows only the plain key finds none."""
    stored = store(tensors(12_000))
    assert stored.key == PACKED_KEY
    assert len(stored.data) < 1 << 20
    assert load(stored, count=12_000, where="x") == tensors(12_000)


@pytest.mark.parametrize(
    "row",
    [
        {**ROW, "addr": 1},
        {**ROW, "size": "-1"},
        {**ROW, "size": ""},
        {**ROW, "addr": "18446744073709551616"},
        {**ROW, "addr": "٣"},
        {**ROW, "device_id": "0"},
        {**ROW, "device_id": 1 << 32},
        {**ROW, "name": None},
        {"name": "t"},
        7,
    ],
    ids=str,
)
def test_a_row_that_is_no_tensor_is_an_error(row: Any) -> None:
    """Not a tensor less."""
    with pytest.raises(IntegrityError, match="no tensor"):
        load(StoredTensors(PLAIN_KEY, json.dumps([row]).encode(), ""), count=1, where="x")


GOOD = store([ONE])
BAD_STORED = [
    pytest.param(replace(GOOD, data=GOOD.data[:-1], digest=""), 1, "not JSON", id="cut"),
    pytest.param(replace(GOOD, data=GOOD.data + b" "), 1, "digest", id="another digest"),
    pytest.param(GOOD, 2, "1 tensors, and the record says 2", id="another count"),
    pytest.param(StoredTensors(PLAIN_KEY, b"{}", ""), 0, "not a list", id="no list"),
    pytest.param(StoredTensors(PLAIN_KEY, b"[" * 100_000, ""), 0, "not JSON", id="deep"),
    pytest.param(StoredTensors(PACKED_KEY, b"no zlib", ""), 0, "unpacked", id="not packed"),
    pytest.param(StoredTensors(PACKED_KEY, zlib.compress(b"[]")[:-1], ""), 0, "is cut", id="packed and cut"),
    pytest.param(
        StoredTensors(PACKED_KEY, zlib.compress(b"[" * (UNPACKED_MAX + 1), 1), ""), 0, "more than", id="bomb"
    ),
]


@pytest.mark.parametrize(("stored", "count", "said"), BAD_STORED)
def test_tensors_that_are_not_whole_are_an_error(stored: StoredTensors, count: int, said: str) -> None:
    """Never zero tensors in place of those that were published (upstream's defect 3)."""
    with pytest.raises(IntegrityError, match=said):
        load(stored, count=count, where="x")


def test_a_digest_is_of_the_bytes() -> None:
    """So it can be checked before anything is unpacked."""
    assert GOOD.digest == digest_of(GOOD.data)
