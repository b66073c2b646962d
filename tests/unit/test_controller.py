"""The controller's pure parts: identities, Jobs, conditions, the queue, and what a watch makes it look at."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from hibernode.controller.identity import canonical, identity_hash
from hibernode.controller.job import JobOptions, build_job, job_name
from hibernode.controller.queue import WorkQueue
from hibernode.controller.shelf import Checkpoints, Jobs, seen
from hibernode.controller.status import Condition, bounded, moment, with_conditions
from hibernode.errors import RefusedError
from hibernode.kube.objects import stamp
from hibernode.workload import CheckpointId
from tests.unit.cli_kit import Machine, machine  # noqa: F401 - a fixture

GOLDEN = yaml.safe_load((Path(__file__).parent / "checkpoint_job.yaml").read_text())
ID = CheckpointId("96429b272576")
OPTIONS = JobOptions(pvc="checkpoints")
SMALL = {"model": "meta-llama/Llama-2-7b-hf", "backendFramework": "vllm"}
LARGE = {
    "model": "meta-llama/Llama-2-13b-hf",
    "backendFramework": "sglang",
    "frameworkVersion": "0.4.2",
    "tensorParallelSize": 2,
    "pipelineParallelSize": 1,
    "dtype": "float16",
    "maxModelLen": 4096,
    "extraParameters": {"gpu_memory_utilization": "0.9"},
}
LATE = {("dynamoVersion" if key == "frameworkVersion" else key): value for key, value in LARGE.items()}


@pytest.mark.parametrize(
    ("identity", "digits"),
    [
        pytest.param(SMALL, "96429b2725761a09", id="all else default"),
        pytest.param(LARGE, "0c5c7799bf09378f", id="early"),
        pytest.param(LATE, "f4ba65bccbb8e4fb", id="late"),
        pytest.param({"model": "m<a>&b", "backendFramework": "vllm"}, "e470635cc1e6edfc", id="escapes"),
        pytest.param({**SMALL, "tensorParallelSize": 0, "dtype": ""}, "96429b2725761a09", id="zero is unset"),
        pytest.param({**SMALL, "extraParameters": {}}, "96429b2725761a09", id="empty is none"),
        pytest.param(dict(reversed(LARGE.items())), "0c5c7799bf09378f", id="order does not matter"),
    ],
)
def test_the_hash_is_that_of_the_operator(identity: dict[str, Any], digits: str) -> None:
    """In both lengths."""
    assert identity_hash(identity, 16) == digits
    assert identity_hash(identity) == digits[:12]


def test_extra_parameters_are_sorted_and_strings_stay_as_they_are() -> None:
    """No trimming, no folding, raw UTF-8."""
    found = canonical({**SMALL, "model": " Ä ", "extraParameters": {"b": "1", "B": "\u2028"}})
    assert (
        found
        == (
            '{"model":" Ä ","backendFramework":"vllm","tensorParallelSize":1,"pipelineParallelSize":1,'
            '"extraParameters":{"B":"\\u2028","b":"1"}}'
        ).encode()
    )


@pytest.mark.parametrize(
    "identity",
    [
        None,
        [],
        {},
        {"model": "m"},
        {**SMALL, "model": ""},
        {**SMALL, "model": "\ud800"},
        {**SMALL, "model": 7},
        {**SMALL, "maxModelLen": "4"},
        {**SMALL, "maxModelLen": True},
        {**SMALL, "tensorParallelSize": -1},
        {**SMALL, "tensorParallelSize": 1 << 40},
        {**SMALL, "extraParameters": {"a": 1}},
        {**SMALL, "extraParameters": "a"},
    ],
)
def test_what_is_no_identity_is_refused(identity: Any) -> None:
    """With a reason, whatever it is."""
    with pytest.raises(RefusedError) as caught:
        canonical(identity)
    assert caught.value.reason == "InvalidIdentity"


# The Job.


def checkpoint(**template: Any) -> dict[str, Any]:
    """Make a DynamoCheckpoint whose pod has these fields."""
    spec = {"containers": [{"name": "main", "image": "worker"}], **template}
    return {
        "metadata": {"name": "llama", "namespace": "models", "uid": "u"},
        "spec": {"identity": SMALL, "job": {"podTemplateSpec": {"spec": spec}}},
    }


def pod(raw: dict[str, Any], options: JobOptions = OPTIONS) -> dict[str, Any]:
    """Build the Job and take its pod."""
    found: dict[str, Any] = build_job(raw, ID, options)["spec"]["template"]["spec"]
    return found


def test_the_job_is_as_the_rules_of_the_contract_say() -> None:
    """Field for field; and the object that it was made from is as before."""
    raw = copy.deepcopy(GOLDEN["checkpoint"])
    assert build_job(raw, ID, OPTIONS) == GOLDEN["job"]
    assert raw == GOLDEN["checkpoint"]


def test_without_a_claim_nothing_of_the_store_is_mounted() -> None:
    """As the operator has it."""
    found = pod(checkpoint(), JobOptions())
    assert [one["name"] for one in found["volumes"]] == ["checkpoint-signal", "podinfo"]


def test_a_template_that_was_taken_from_a_job_gives_the_same_job() -> None:
    """Nothing is put in twice."""
    once = build_job(GOLDEN["checkpoint"], ID, OPTIONS)
    raw = copy.deepcopy(GOLDEN["checkpoint"])
    raw["spec"]["job"]["podTemplateSpec"] = copy.deepcopy(once["spec"]["template"])
    assert build_job(raw, ID, OPTIONS) == once


def test_the_cleanup_is_roots_where_the_worker_is_not() -> None:
    """Or the answer of an earlier run stayed."""
    found = pod(checkpoint(securityContext={"runAsNonRoot": True, "runAsUser": 5}))
    assert found["initContainers"][0]["securityContext"] == {"runAsUser": 0, "runAsNonRoot": False}
    assert found["securityContext"]["runAsUser"] == 5


def test_the_target_is_main_or_the_only_one_or_the_one_asked_for() -> None:
    """The agent is told where it could not know."""
    two = checkpoint(containers=[{"name": "a"}, {"name": "b"}])
    two["spec"]["job"]["targetContainerName"] = "b"
    template = build_job(two, ID, OPTIONS)["spec"]["template"]
    assert template["metadata"]["annotations"] == {"nvidia.com/snapshot-target-containers": "b"}
    assert ["env" in one for one in template["spec"]["containers"]] == [False, True]
    only = build_job(checkpoint(containers=[{"name": "a"}]), ID, OPTIONS)["spec"]["template"]
    assert "annotations" not in only["metadata"]


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ({"containers": []}, "containers is empty"),
        ({"containers": None}, "containers is empty"),
        ({"containers": {}}, "is no list"),
        ({"containers": ["a"]}, "without a name"),
        ({"containers": [{"name": "a"}, {"name": "a"}]}, "without a name"),
        ({"containers": [{"name": "a"}, {"name": "b"}]}, "none is called main"),
        ({"containers": [{"name": f"c{i}"} for i in range(300)]}, "300 containers"),
        ({"containers": [{"name": "cleanup-signal-file"}]}, "a container is called"),
        ({"containers": [{"name": "main", "env": "a"}]}, "env is no list"),
        ({"securityContext": "a"}, "securityContext is no object"),
        (
            {"volumes": [{"name": "checkpoint-signal", "emptyDir": {}}]},
            "a volume checkpoint-signal of",
        ),
        (
            {"containers": [{"name": "main", "volumeMounts": [{"name": "a", "mountPath": "/etc/podinfo/"}]}]},
            "another mount at /etc/podinfo",
        ),
    ],
)
def test_a_template_that_cannot_work_is_refused(template: dict[str, Any], says: str) -> None:
    """By the field that is wrong, before there is a Job."""
    with pytest.raises(RefusedError, match=says) as caught:
        pod(checkpoint(**template))
    assert caught.value.reason == "InvalidPodTemplate"


@pytest.mark.parametrize("job", [None, [], {}, {"podTemplateSpec": "a"}, {"podTemplateSpec": {"spec": 1}}])
def test_what_is_no_template_is_refused(job: Any) -> None:
    """Whatever it is."""
    with pytest.raises(RefusedError, match=r"spec\.job"):
        build_job({"metadata": {"name": "a"}, "spec": {"job": job}}, ID, OPTIONS)


def test_long_names_are_cut_to_what_a_label_holds() -> None:
    """Still different for different names; the whole name is in an annotation."""
    one, other = "n" * 200 + "1", "n" * 200 + "2"
    assert len(job_name(one)) == 63
    assert job_name(one) != job_name(other)
    assert job_name("llama") == "checkpoint-llama"
    raw = checkpoint()
    raw["metadata"]["name"] = one
    template = build_job(raw, ID, OPTIONS)["spec"]["template"]
    assert len(template["metadata"]["labels"]["nvidia.com/checkpoint-name"]) == 63
    assert template["metadata"]["annotations"]["nvidia.com/checkpoint-name"] == one


def test_a_job_is_rendered_offline(machine: Machine, tmp_path: Path) -> None:  # noqa: F811 - the fixture
    """As YAML and as JSON, with the settings; what is no such object is a sentence."""
    file = tmp_path / "checkpoint.yaml"
    file.write_text(yaml.safe_dump(GOLDEN["checkpoint"]))
    for form in ("yaml", "json"):
        settings = ("--set", "controller.pvc=checkpoints", "--signals", JobOptions().signal_host_path)
        shown = machine.ok(*settings, "job", "render", file, "-o", form)
        assert yaml.safe_load(shown) == GOLDEN["job"]
    file.write_text("kind: Pod")
    assert "holds no DynamoCheckpoint" in machine.refused(2, "job", "render", file)


def test_a_rendered_job_is_what_the_api_server_would_be_given(machine: Machine, tmp_path: Path) -> None:  # noqa: F811
    """Dates and times are text, names of fields too; what no object can hold is refused, not traced."""
    file = tmp_path / "checkpoint.yaml"
    pod = "{containers: [{name: main, image: a, args: [12:30, 2026-12-03], 5: x%s}]}"
    text = (
        "kind: DynamoCheckpoint\nmetadata: {name: %s}\n"
        "spec: {identity: {model: m, backendFramework: vllm, frameworkVersion: 2026-01-02},"
        " job: {podTemplateSpec: {spec: %s}}}"
    )
    file.write_text(text % ("a", pod % ""))
    for form in ("yaml", "json"):
        shown = yaml.safe_load(machine.ok("job", "render", file, "-o", form))
        (container,) = shown["spec"]["template"]["spec"]["containers"]
        assert (container["args"], container["5"]) == (["12:30", "2026-12-03"], "x")
    for name in ('""', "Up_Case", "../x", '"a\\e[31m"', "a" * 254, "7"):
        file.write_text(text % (name, pod % ""))
        assert "takes" in machine.refused(2, "job", "render", file)
    for value in (".nan", "!!binary aGVsbG8=", "!!set {a}", "!!python/name:os.system ''"):
        file.write_text(text % ("a", pod % f", y: {value}"))
        machine.refused(2, "job", "render", file)
    said = machine.refused(2, "job", "render", tmp_path / "absent")
    assert "settings" not in said
    assert "--config" not in said


# Conditions, the queue, the watches.


def test_a_condition_keeps_its_time_while_its_status_stays() -> None:
    """And another's entries stay."""
    theirs = {"type": "Theirs", "status": "True"}
    raw: dict[str, Any] = {"metadata": {"generation": 3}, "status": {"conditions": [theirs, "junk"]}}
    first = with_conditions(raw, [Condition("A", True, "One", "m")], stamp(0))
    assert first[0] == theirs
    raw["status"]["conditions"] = first
    same = with_conditions(raw, [Condition("A", True, "Two", "m")], stamp(9))
    assert (same[1]["reason"], same[1]["lastTransitionTime"]) == ("Two", stamp(0))
    other = with_conditions(raw, [Condition("A", False, "Two", "m")], stamp(9), without="Theirs")
    assert [(one["status"], one["lastTransitionTime"]) for one in other] == [("False", stamp(9))]
    assert moment(stamp(1234)) == 1234
    assert moment("then") == 0
    assert len(bounded("x" * 9999)) < 5000


async def test_a_key_is_worked_on_by_one_and_comes_again_if_it_changed() -> None:
    """However often it was added."""
    queue, key = WorkQueue(), ("ns", "a")
    queue.add(key)
    queue.add(key)
    assert await queue.take() == key
    queue.add(key)
    queue.add(("ns", "b"))
    assert await queue.take() == ("ns", "b")
    queue.done(key)
    assert await queue.take() == key
    queue.done(key)
    assert len(queue) == 0
    queue.add_after(key, 3600)
    queue.add_after(key, 0)
    assert await queue.take() == key
    queue.failed(key)
    assert await queue.take() == key
    queue.close()


def test_a_job_that_is_only_new_is_no_reason_to_look() -> None:
    """Its change, its end and its disappearance are."""
    added: list[tuple[str, str]] = []
    jobs = Jobs(added.append, lambda namespace: namespace != "other")
    job = copy.deepcopy(GOLDEN["job"])
    job["metadata"]["uid"] = "1"
    jobs.apply(job)
    assert added == []
    jobs.apply(job)
    jobs.gone(job)
    jobs.apply({**job, "status": {"succeeded": 1}})
    jobs.listed({}, "5")
    assert added == [("models", "llama")] * 4
    jobs.apply({**job, "metadata": {**job["metadata"], "namespace": "other"}, "status": {"failed": 1}})
    jobs.apply({"metadata": {"ownerReferences": ["junk", {"controller": True}]}})
    assert len(added) == 4


async def test_those_that_wait_are_looked_at_when_another_goes_on() -> None:
    """The elder of one identity goes first."""
    added: list[tuple[str, str]] = []
    shelf = Checkpoints(added.append, lambda _: True)

    def made(name: str, at: float, phase: str) -> dict[str, Any]:
        metadata = {"name": name, "namespace": "ns", "uid": name, "creationTimestamp": stamp(at)}
        return {"metadata": metadata, "spec": {"identity": SMALL}, "status": {"phase": phase}}

    shelf.apply(made("young", 2, "Pending"))
    shelf.apply(made("old", 1, "Creating"))
    assert [one.key[1] for one in shelf.rivals(seen(made("young", 2, "Pending")), 12)] == ["old"]
    added.clear()
    shelf.apply(made("old", 1, "Ready"))
    assert added == [("ns", "old"), ("ns", "young")]
    assert shelf.phases()["Ready"] == 1
    await asyncio.sleep(0)
