"""What a pod asks of its node's agent, as tables: every era, every wrong label, and pods that lie."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hibernode.cluster.pods import Ask, Kind, Told, ask_of, completed, told
from hibernode.kube.names import ERAS, TRUE, KubeEra, Word

NODE = "node-a"
UID = "0f3a9c52-7d1e-4b6a-9c1d-2e5f8a7b6c4d"
ID = "96429b272576"
CONTAINER = "ab" * 32
A1, B, C = ERAS


def pod(labels: dict[str, str], **more: Any) -> dict[str, Any]:
    """Build a pod that runs; ``more``: annotations, containers, status, metadata and spec to add."""
    containers = more.get("containers", [{"name": "main", "readinessProbe": {"exec": {}}}])
    state = {
        "name": containers[0].get("name") if containers else "",
        "ready": False,
        "containerID": f"containerd://{CONTAINER}",
        "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}},
    }
    return {
        "metadata": {
            "namespace": "workers",
            "name": "worker-0",
            "uid": UID,
            "labels": labels,
            "annotations": more.get("annotations", {}),
            **more.get("metadata", {}),
        },
        "spec": {"nodeName": NODE, "containers": containers, **more.get("spec", {})},
        "status": {"phase": "Running", "containerStatuses": [state], **more.get("status", {})},
    }


def read(labels: dict[str, str], **more: Any) -> Ask:
    """Read a pod that asks for something."""
    found = ask_of(pod(labels, **more), NODE)
    assert found is not None
    return found


def source(era: KubeEra) -> dict[str, str]:
    """Give the labels of an era's checkpoint source."""
    return {era.source: TRUE, era.ids[0]: ID}


@pytest.mark.parametrize("era", ERAS, ids=lambda era: era.name)
def test_each_era_marks_sources_and_targets_by_its_labels(era: KubeEra) -> None:
    """The id is the label's, the container the runtime's."""
    found = read(source(era))
    assert (found.kind, found.era, found.id, found.problem) == (Kind.CHECKPOINT, era, ID, None)
    assert (found.container, found.container_id, found.pod.uid) == ("main", CONTAINER, UID)
    target = read({era.restore: TRUE, era.ids[0]: ID})
    assert (target.kind, target.id) == (Kind.RESTORE, ID)


@pytest.mark.parametrize("label", C.ids)
def test_era_c_takes_either_label_of_the_id(label: str) -> None:
    """The early one and the later one."""
    assert read({C.source: TRUE, label: ID}).id == ID


def test_a_later_pod_of_era_c_with_an_id_that_is_no_source_is_a_target() -> None:
    """It has no restore label; in other eras an id alone means nothing."""
    assert read({C.ids[0]: ID}).kind is Kind.RESTORE
    for era in (A1, B):
        assert ask_of(pod({era.ids[0]: ID}), NODE) is None


@pytest.mark.parametrize(
    "change",
    [
        {"metadata": {"labels": {}}},
        {"metadata": {"labels": {A1.source: "false", A1.ids[0]: ID}}},
        {"metadata": {"labels": {A1.source: "True"}}},
        {"metadata": {"labels": [A1.source]}},
        {"metadata": {"uid": "../../etc"}},
        {"metadata": {"uid": 7}},
        {"metadata": {"name": "a/b"}},
        {"metadata": {"namespace": "x" * 300}},
        {"spec": {"nodeName": "node-b"}},
        {"spec": {"nodeName": None}},
    ],
    ids=lambda change: json.dumps(change)[:60],
)
def test_pods_that_are_none_of_ours_are_left_alone(change: dict[str, Any]) -> None:
    """Other nodes, no label, a label that says no, names that could lead a URL elsewhere."""
    assert ask_of(pod(source(A1), **change), NODE) is None


@pytest.mark.parametrize(
    ("labels", "more", "reason"),
    [
        ({A1.source: TRUE}, {}, "NoCheckpointId"),
        ({A1.source: TRUE, A1.ids[0]: ""}, {}, "InvalidCheckpointId"),
        ({A1.source: TRUE, A1.ids[0]: "../96429b27257"}, {}, "InvalidCheckpointId"),
        ({A1.source: TRUE, A1.ids[0]: ID.upper()}, {}, "InvalidCheckpointId"),
        ({A1.source: TRUE, A1.ids[0]: ID + "\n"}, {}, "InvalidCheckpointId"),
        ({A1.source: TRUE, A1.ids[0]: "x" * 10_000}, {}, "InvalidCheckpointId"),
        ({C.source: TRUE, C.ids[0]: ID, C.ids[1]: "0" * 12}, {}, "AmbiguousLabels"),
        ({**source(A1), **source(C)}, {}, "AmbiguousLabels"),
        (source(A1), {"containers": []}, "AmbiguousTarget"),
        (source(A1), {"containers": [{"name": "a"}, {"name": "b"}]}, "AmbiguousTarget"),
        (source(A1), {"containers": "main"}, "AmbiguousTarget"),
        (source(A1), {"containers": [{"name": "../x"}]}, "AmbiguousTarget"),
        (source(C), {"annotations": {C.target_containers: ""}}, "InvalidTargetContainer"),
        (source(C), {"annotations": {C.target_containers: "main,main"}}, "InvalidTargetContainer"),
        (source(C), {"annotations": {C.target_containers: "other"}}, "InvalidTargetContainer"),
    ],
)
def test_what_cannot_be_right_is_a_problem_with_a_reason(
    labels: dict[str, str], more: dict[str, Any], reason: str
) -> None:
    """No crash, one bounded line, and nothing that steers a terminal."""
    found = ask_of(
        {**pod(labels), "spec": {"nodeName": NODE, "containers": [{"name": "main"}], **more}}, NODE
    )
    found = ask_of(pod(labels, **more), NODE) if more.get("containers") != "main" else found
    assert found is not None
    assert found.problem is not None
    assert found.problem.reason == reason
    assert len(str(found.problem)) < 1000
    assert str(found.problem).isprintable()


@pytest.mark.parametrize(
    ("names", "annotations", "chosen"),
    [
        (["sidecar", "main"], {}, "main"),
        (["only"], {}, "only"),
        (["a", "b"], {C.target_containers: " b "}, "b"),
        (["main", "b"], {C.target_containers: "b"}, "b"),
    ],
)
def test_the_target_is_the_annotated_container_else_main_else_the_only_one(
    names: list[str], annotations: dict[str, str], chosen: str
) -> None:
    """As era C has it; in the others there is no annotation."""
    found = read(source(C), containers=[{"name": name} for name in names], annotations=annotations)
    assert (found.container, found.problem) == (chosen, None)


def test_readiness_counts_only_where_a_probe_of_the_target_says_it() -> None:
    """Without one a pod is Ready as soon as it runs, with a model that is half loaded."""
    ready = {"conditions": [{"type": "Ready", "status": "True"}]}
    assert read(source(A1), status=ready).ready
    assert not read(source(A1), status=ready, containers=[{"name": "main"}]).ready
    assert not read(source(A1), status={"conditions": [{"type": "Ready", "status": "False"}]}).ready


@pytest.mark.parametrize(
    "status",
    [
        {"containerStatuses": []},
        {"containerStatuses": [{"name": "main", "state": {"waiting": {}}, "containerID": "containerd://x"}]},
        {
            "containerStatuses": [
                {"name": "main", "state": {"running": {}}, "containerID": "containerd://../x"}
            ]
        },
        {"containerStatuses": [{"name": "main", "state": {"running": {}}}]},
        {
            "containerStatuses": [
                {"name": "other", "state": {"running": {}}, "containerID": f"a://{CONTAINER}"}
            ]
        },
        {"containerStatuses": {"name": "main"}},
    ],
)
def test_a_container_that_does_not_run_or_has_no_good_id_has_none(status: dict[str, Any]) -> None:
    """What names no container leads to none."""
    assert read(source(A1), status=status).container_id == ""


def test_a_pod_that_ends_is_over() -> None:
    """By its phase or because it is being deleted."""
    assert read(source(A1), status={"phase": "Succeeded"}).succeeded
    assert read(source(A1), status={"phase": "Failed"}).over
    assert read(source(A1), metadata={"deletionTimestamp": "2026-01-01T00:00:00Z"}).over


def test_the_job_that_controls_a_pod_is_known() -> None:
    """Another owner, or a Job that only owns, is not taken for it."""
    job = {"apiVersion": "batch/v1", "kind": "Job", "name": "job", "uid": UID, "controller": True}
    found = read(source(C), metadata={"ownerReferences": [job]}).job
    assert found is not None
    assert (found.kind, found.namespace, found.name) == ("Job", "workers", "job")
    for wrong in ({"controller": False}, {"kind": "ReplicaSet"}, {"apiVersion": "evil/v1"}, {"name": "a/b"}):
        assert read(source(C), metadata={"ownerReferences": [{**job, **wrong}]}).job is None


@pytest.mark.parametrize(
    ("env", "field", "path"),
    [
        ({"DYN_CHECKPOINT_READY_FILE": "/a"}, "ready_file", "/a"),
        ({"DYNAMO_CHECKPOINT_READY_FILE": "/a"}, "ready_file", "/a"),
        ({"DYN_READY_FOR_CHECKPOINT_FILE": "/b"}, "ready_file", "/b"),
        ({"DYN_CHECKPOINT_SIGNAL_FILE": "relative"}, "signal_file", ""),
        ({"DYN_CHECKPOINT_SIGNAL_FILE": "/a\0b"}, "signal_file", ""),
        ({"DYN_CHECKPOINT_SIGNAL_FILE": "/" + "x" * 5000}, "signal_file", ""),
        ({"DYN_SNAPSHOT_CONTROL_DIR": "/c"}, "control_dir", "/c"),
    ],
)
def test_paths_come_from_the_environment_of_every_era(env: dict[str, str], field: str, path: str) -> None:
    """Absolute and bounded, else they count as not given."""
    assert getattr(told(env), field) == path


def test_the_spec_comes_before_the_process_and_defaults_last() -> None:
    """A value that refers to another variable is known only where it runs."""
    env = [{"name": "DYN_CHECKPOINT_READY_FILE", "value": "$(BASE)/ready"}, {"name": "X", "valueFrom": {}}, 7]
    found = read(source(A1), containers=[{"name": "main", "env": env}])
    assert completed(found, told({"DYN_CHECKPOINT_READY_FILE": "/run/ready"})).ready_file == "/run/ready"
    assert completed(found, Told()).ready_file == "/tmp/checkpoint-ready"
    assert completed(found, Told()).restore_marker == "/tmp/dynamo-restored"
    assert completed(read(source(B)), Told()).ready_file == "/tmp/ready-for-checkpoint"
    mounted = [{"name": "main", "volumeMounts": [{"mountPath": "/snapshot-control/"}]}]
    later = completed(read(source(C), containers=mounted), Told())
    assert (later.control_dir, later.ready_file) == (
        "/snapshot-control",
        "/snapshot-control/ready-for-checkpoint",
    )
    assert later.restore_marker == ""


def test_a_placeholder_is_known_by_its_command() -> None:
    """Wherever the program is mounted."""
    command = ["/hibernode/hibernode-placeholder", "--wait", "600"]
    assert read(
        {A1.restore: TRUE, A1.ids[0]: ID}, containers=[{"name": "main", "command": command}]
    ).placeholder
    assert not read({A1.restore: TRUE, A1.ids[0]: ID}).placeholder


def test_eras_speak_differently() -> None:
    """The table says how each tells its workers."""
    assert [era.word for era in ERAS] == [Word.FILE, Word.UNIX, Word.SENTINEL]


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
PLACES = [
    ("metadata",),
    ("metadata", "labels"),
    ("metadata", "annotations"),
    ("metadata", "ownerReferences"),
    ("spec",),
    ("spec", "containers"),
    ("status",),
    ("status", "containerStatuses"),
    ("status", "conditions"),
]


@given(place=st.sampled_from(PLACES), anything=ANYTHING)
def test_no_pod_makes_it_fail(place: tuple[str, ...], anything: object) -> None:
    """Whatever JSON stands anywhere in it."""
    raw = copy.deepcopy(pod(source(C)))
    where: Any = raw
    for key in place[:-1]:
        where = where[key]
    where[place[-1]] = anything
    found = ask_of(raw, NODE)
    assert found is None or found.pod.uid == UID
