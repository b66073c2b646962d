"""The controller on a real API server, with exactly the rights that ship."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from hibernode.controller.service import Controller
from hibernode.kube.api import KubeApi
from hibernode.settings import Settings
from tests.cluster.kube import Kube
from tests.real import node
from tests.unit.metadata_kit import until

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2]
GOLDEN = yaml.safe_load((ROOT / "tests/unit/checkpoint_job.yaml").read_text())
ID = "96429b272576"


@pytest.fixture(scope="session")
def crd(kube: Kube) -> None:
    """Install the definition that ships, once."""
    kube.apply(ROOT / "daemonset/crds/dynamocheckpoint.yaml")


class Bench:
    """A namespace with the rights of the controller, and what a test does in it as the administrator."""

    def __init__(self, kube: Kube, namespace: str) -> None:
        self.kube, self.namespace = kube, namespace
        self.token = kube.account(namespace, "controller")
        role = yaml.safe_load((ROOT / "daemonset/rbac/controller.yaml").read_text())
        kube.bind(namespace, "controller", role["rules"])
        self.objects = f"/apis/nvidia.com/v1alpha1/namespaces/{namespace}/dynamocheckpoints"
        self.jobs = f"/apis/batch/v1/namespaces/{namespace}/jobs"
        places = (self.objects, self.jobs)
        node.until("rights", lambda: all(self._may(place) for place in places))

    def _may(self, place: str) -> bool:
        return self.kube.request("GET", place, token=self.token).status == 200

    @asynccontextmanager
    async def controller(self, store: Path = ROOT, **ours: Any) -> AsyncIterator[Controller]:
        """Run one; it is patient, as the machine may be busy."""
        values = {"namespace": self.namespace, "lease_namespace": self.namespace, "pvc": "checkpoints"}
        settings = Settings.model_validate(
            {"controller": {**values, "lease_seconds": 60, **ours}, "store": {"path": store}}
        )
        api = KubeApi(self.kube.configuration(self.token), call_seconds=20.0, total_seconds=60.0)
        controller = Controller(settings, api)
        task = asyncio.create_task(controller.run())
        try:
            yield controller
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await api.close()

    def make(self, name: str = "llama", **changes: Any) -> dict[str, Any]:
        """Make the object of the golden file, with these fields of its pod."""
        raw = copy.deepcopy(GOLDEN["checkpoint"])
        raw["metadata"] = {"name": name}
        raw["spec"]["job"]["podTemplateSpec"]["spec"].update(changes)
        return self.kube.make(self.objects, raw).body

    def get(self, name: str = "llama") -> dict[str, Any]:
        """Read an object."""
        return self.kube.request("GET", f"{self.objects}/{name}").body

    def job(self, name: str = "llama") -> dict[str, Any]:
        """Read its Job."""
        return self.kube.request("GET", f"{self.jobs}/checkpoint-{name}").body

    def patch(self, path: str, body: object) -> None:
        """Change an object as somebody else would."""
        done = self.kube.request("PATCH", path, body, content_type="application/merge-patch+json")
        assert done.status == 200, done

    def end(self, status: dict[str, Any], name: str = "llama") -> None:
        """End its Job, as the Job controller does."""
        self.patch(f"{self.jobs}/checkpoint-{name}/status", {"status": status})

    def events(self) -> list[tuple[str, str, int]]:
        """List the events: object, reason, count."""
        found = self.kube.request("GET", f"/api/v1/namespaces/{self.namespace}/events").body["items"]
        ours = [one for one in found if one["source"].get("component") == "hibernode-controller"]
        return sorted((one["involvedObject"]["name"], one["reason"], one["count"]) for one in ours)

    async def phase(self, phase: str, name: str = "llama") -> dict[str, Any]:
        """Wait until the object is there."""
        await self.seen(lambda: self.get(name).get("status", {}).get("phase") == phase)
        return self.get(name)

    async def seen(self, what: Callable[[], bool]) -> None:
        """Wait for anything that the API server tells."""

        async def ask() -> bool:
            return await asyncio.to_thread(what)

        await until(ask)


@pytest.fixture
def bench(kube: Kube, namespace: str, crd: None) -> Bench:
    """Give a namespace."""
    return Bench(kube, namespace)


SUCCESS = {"succeeded": 1}
FAILURE = {
    "failed": 1,
    "conditions": [
        {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded", "message": "too often"}
    ],
}


def conditions(raw: dict[str, Any]) -> dict[str, tuple[str, str, str]]:
    """Take the conditions apart."""
    found = raw["status"]["conditions"]
    return {one["type"]: (one["status"], one["reason"], one["message"]) for one in found}


def covers(have: Any, want: Any) -> bool:
    """Tell whether all that is wanted is there; the API server adds defaults."""
    if isinstance(want, dict):
        return all(key in have and covers(have[key], value) for key, value in want.items())
    if isinstance(want, list):
        return len(have) == len(want) and all(map(covers, have, want))
    return bool(have == want)


async def test_a_checkpoint_goes_through_to_ready(bench: Bench) -> None:
    """The server takes the Job as the golden file has it; status and events are the operator's."""
    async with bench.controller() as controller:
        made = bench.make()
        creating = await bench.phase("Creating")
        assert creating["status"]["identityHash"] == ID
        assert creating["status"]["jobName"] == "checkpoint-llama"
        said = ("True", "JobCreated", "Checkpoint job checkpoint-llama created")
        assert conditions(creating) == {"JobCreated": said}
        job = bench.job()
        owner = {**GOLDEN["job"]["metadata"]["ownerReferences"][0], "uid": made["metadata"]["uid"]}
        assert job["metadata"]["ownerReferences"] == [owner]
        golden = dict(GOLDEN["job"]["spec"])
        del golden["ttlSecondsAfterFinished"]  # this server is too old to know it
        assert covers(job["spec"], golden)
        assert job["metadata"]["labels"].items() >= GOLDEN["job"]["metadata"]["labels"].items()
        bench.end(SUCCESS)
        ready = await bench.phase("Ready")
        assert ready["status"]["location"] == f"/checkpoints/{ID}"
        assert ready["status"]["storageType"] == "pvc"
        assert ready["status"]["createdAt"]
        assert conditions(ready) == {
            "JobCreated": said,
            "JobCompleted": ("True", "JobSucceeded", "Checkpoint job completed successfully"),
            "TarAvailable": ("True", "TarCreated", f"Checkpoint available at /checkpoints/{ID}"),
        }
        await bench.seen(
            lambda: bench.events() == [("llama", "CheckpointReady", 1), ("llama", "JobCreated", 1)]
        )
        # A Job that goes after that changes nothing; each step was one look, and our own writes some more.
        bench.kube.request("DELETE", f"{bench.jobs}/checkpoint-llama")
        await until(lambda: not len(controller.queue))
        assert bench.get()["status"] == ready["status"]
        assert controller.looks["done"] <= 8


async def test_a_job_that_fails_fails_the_checkpoint(bench: Bench) -> None:
    """One failed pod of several tries does not; the Job's end does. It stays so."""
    async with bench.controller():
        bench.make()
        await bench.phase("Creating")
        bench.end({"failed": 1})
        await bench.seen(lambda: "the job tries again" in bench.get()["status"].get("message", ""))
        bench.end(FAILURE)
        failed = await bench.phase("Failed")
        assert failed["status"]["message"] == "Checkpoint job failed"
        assert conditions(failed)["JobCompleted"] == ("False", "JobFailed", "Checkpoint job failed")
        await bench.seen(lambda: ("llama", "CheckpointFailed", 1) in bench.events())


async def test_a_job_that_was_deleted_is_made_anew(bench: Bench) -> None:
    """By way of Pending; an unknown phase leads there too."""
    async with bench.controller():
        bench.make()
        await bench.phase("Creating")
        first = bench.job()["metadata"]["uid"]
        bench.kube.request("DELETE", f"{bench.jobs}/checkpoint-llama?propagationPolicy=Background")
        await bench.seen(lambda: bench.job().get("metadata", {}).get("uid") not in (None, first))
        await bench.phase("Creating")
        second = bench.job()["metadata"]["uid"]
        bench.patch(f"{bench.objects}/llama/status", {"status": {"phase": "Elsewhere"}})
        await bench.phase("Creating")
        assert bench.job()["metadata"]["uid"] == second


async def test_a_template_that_cannot_work_is_told_and_can_be_mended(bench: Bench) -> None:
    """Refused by us or by the API server; a changed spec begins anew."""
    async with bench.controller():
        bench.make(containers=[])
        failed = await bench.phase("Failed")
        assert "containers is empty" in failed["status"]["message"]
        assert conditions(failed)["JobCreated"][1] == "InvalidPodTemplate"
        bench.make("typo", containers=[{"name": "main", "image": "a", "imagePullPolicy": "Sometimes"}])
        failed = await bench.phase("Failed", "typo")
        assert "imagePullPolicy" in failed["status"]["message"]
        await bench.seen(lambda: ("typo", "InvalidPodTemplate", 1) in bench.events())
        assert bench.job("typo")["code"] == 404
        containers = [{"name": "main", "image": "a"}]
        mended = {"spec": {"job": {"podTemplateSpec": {"spec": {"containers": containers}}}}}
        bench.kube.request("DELETE", f"{bench.objects}/llama")
        bench.patch(f"{bench.objects}/typo", mended)
        await bench.seen(lambda: bench.job("typo").get("kind") == "Job")
        await bench.phase("Creating", "typo")


async def test_a_failed_checkpoint_is_tried_again_as_often_as_it_may(bench: Bench) -> None:
    """By the annotation, with a new Job each time."""
    async with bench.controller(retry_seconds=0.1):
        bench.make()
        bench.patch(f"{bench.objects}/llama", {"metadata": {"annotations": {"hibernode.io/retries": "1"}}})
        await bench.phase("Creating")
        first = bench.job()["metadata"]["uid"]
        bench.end(FAILURE)
        await bench.seen(lambda: bench.job().get("metadata", {}).get("uid") not in (None, first))
        await bench.phase("Creating")
        bench.end(FAILURE)
        failed = await bench.phase("Failed")
        assert failed["metadata"]["annotations"]["hibernode.io/attempts"] == "1"


async def test_one_goes_first_of_two_with_one_identity(bench: Bench) -> None:
    """The other waits for it, and says so; a Job of another is not taken over."""
    async with bench.controller():
        bench.make("a")
        await bench.phase("Creating", "a")
        bench.make("b")
        await bench.seen(lambda: "waits for a" in bench.get("b").get("status", {}).get("message", ""))
        assert bench.job("b")["code"] == 404
        theirs = copy.deepcopy(GOLDEN["job"])
        theirs["metadata"] = {"name": "checkpoint-b"}
        uid = bench.kube.make(bench.jobs, theirs).body["metadata"]["uid"]
        bench.end(SUCCESS, "a")
        await bench.seen(lambda: "another's" in bench.get("b")["status"]["message"])
        assert bench.job("b")["metadata"]["uid"] == uid


async def test_the_agents_word_is_waited_for_if_that_is_wanted(bench: Bench) -> None:
    """The Job's success alone is not Ready; without the word it fails in time."""
    async with bench.controller(verify="agent", verify_seconds=3600):
        bench.make()
        await bench.phase("Creating")
        bench.end({**SUCCESS, "completionTime": "2999-01-01T00:00:00Z"})
        told = {"metadata": {"annotations": {"nvidia.com/snapshot-checkpoint-status": "completed"}}}
        assert bench.get()["status"]["phase"] == "Creating"
        bench.patch(f"{bench.jobs}/checkpoint-llama", told)
        await bench.phase("Ready")
        bench.make("other")
        await bench.phase("Creating", "other")
        bench.end({**SUCCESS, "completionTime": "2001-01-01T00:00:00Z"}, "other")
        failed = await bench.phase("Failed", "other")
        assert conditions(failed)["JobCompleted"][1] == "CheckpointVerificationFailed"


async def test_the_artifact_goes_with_the_object_if_that_is_wanted(bench: Bench, tmp_path: Path) -> None:
    """The finalizer holds the object until then, and goes too where the setting is off again."""
    async with bench.controller(cleanup="store", store=tmp_path / "store"):
        bench.make()
        creating = await bench.phase("Creating")
        assert creating["metadata"]["finalizers"] == ["hibernode.io/artifact"]
        bench.end(SUCCESS)
        await bench.phase("Ready")
        bench.kube.request("DELETE", f"{bench.jobs}/checkpoint-llama?propagationPolicy=Background")
        bench.kube.request("DELETE", f"{bench.objects}/llama")
        await bench.seen(lambda: bench.get().get("code") == 404)
        await bench.seen(lambda: ("llama", "ArtifactRemoved", 1) in bench.events())
        bench.make("later")
        await bench.phase("Creating", "later")
    async with bench.controller():
        bench.kube.request("DELETE", f"{bench.objects}/later")
        await bench.seen(lambda: bench.get("later").get("code") == 404)


async def test_two_controllers_a_restart_and_conflicts_change_nothing_twice(bench: Bench) -> None:
    """One leads; while others write the object, and after the leader is gone, there is one Job."""
    async with bench.controller() as second:
        await until(lambda: second.leads)
        async with bench.controller() as waiting:
            bench.make()
            for number in range(20):  # its version changes under the controller's hands
                bench.patch(f"{bench.objects}/llama", {"metadata": {"annotations": {"n": str(number)}}})
                await asyncio.sleep(0)
            await bench.phase("Creating")
            uid = bench.job()["metadata"]["uid"]
            assert not waiting.leads
    async with bench.controller(workers=1), bench.controller(election=False):
        bench.end(SUCCESS)
        await bench.phase("Ready")
    assert bench.job()["metadata"]["uid"] == uid
    events = [event for event in bench.events() if event[1] != "CheckpointReady"]
    assert events == [("llama", "JobCreated", 1)]


async def test_nothing_is_lost_while_the_api_server_is_away(bench: Bench) -> None:
    """What happened meanwhile is found afterwards."""
    async with bench.controller(resync_seconds=2) as controller:
        bench.make()
        await bench.phase("Creating")
        await asyncio.to_thread(bench.kube.stop_api)
        try:
            await until(lambda: max(one.age() for one in controller._followers) > 1)
        finally:
            # Not in a thread: the server ends with the one that started it.
            bench.kube.start_api()
        bench.end(SUCCESS)
        await bench.phase("Ready")


@pytest.mark.usefixtures("controllers")
async def test_the_job_controller_makes_the_pod(bench: Bench) -> None:
    """With its labels; the Job goes with the object, as it is its owner."""
    pods = f"/api/v1/namespaces/{bench.namespace}/pods"
    async with bench.controller():
        bench.make()
        await bench.seen(lambda: bool(bench.kube.request("GET", pods).body["items"]))
        labels = bench.kube.request("GET", pods).body["items"][0]["metadata"]["labels"]
        assert labels["nvidia.com/checkpoint-hash"] == ID
        assert labels["nvidia.com/checkpoint-source"] == "true"
        bench.kube.request("DELETE", f"{bench.objects}/llama")
        await bench.seen(lambda: bench.job().get("code") == 404)


def test_the_role_grants_no_more_than_is_used(bench: Bench) -> None:
    """No pods, no secrets, no deletion of objects."""
    for method, path in (
        ("GET", f"/api/v1/namespaces/{bench.namespace}/secrets"),
        ("GET", f"/api/v1/namespaces/{bench.namespace}/pods"),
        ("DELETE", f"{bench.objects}/llama"),
        ("PATCH", f"{bench.jobs}/checkpoint-llama"),
    ):
        done = bench.kube.request(
            method, path, {}, token=bench.token, content_type="application/merge-patch+json"
        )
        assert done.status == 403, (method, path)


def test_the_definition_has_defaults_columns_and_a_short_name(bench: Bench) -> None:
    """As people see them."""
    made = bench.make()
    assert made["spec"]["identity"]["tensorParallelSize"] == 1
    assert made["spec"]["job"]["ttlSecondsAfterFinished"] == 300
    shown = bench.kube.kubectl("get", "dckpt", "-n", bench.namespace).stdout.splitlines()[0].split()
    assert shown == ["NAME", "MODEL", "BACKEND", "PHASE", "HASH", "AGE"]
    bad = copy.deepcopy(GOLDEN["checkpoint"])
    bad["metadata"], bad["spec"]["identity"]["backendFramework"] = {"name": "bad"}, "other"
    assert bench.kube.request("POST", bench.objects, bad).status == 422
