"""The agent in a cluster: real API server, the role that ships, pods backed by real containers, real CRIU."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hibernode.cluster.roster import Roster
from hibernode.kube.api import KubeApi
from hibernode.kube.follow import Follower, Listing
from hibernode.kube.names import INCOMPATIBLE_CONDITION
from tests.cluster.kube import Kube
from tests.cluster.pods_kit import A1, ACCOUNT, RBAC, SECONDS, B, C, Pods, labels, later, pods_on, token_for
from tests.real import images
from tests.real.boxes import Kit
from tests.real.conftest import kit, node  # noqa: F401 - fixtures
from tests.real.node import Node, read_json, until

pytestmark = [pytest.mark.cluster, pytest.mark.containers, pytest.mark.criu]

SIGNALLED = """
trap 'exit 0' USR1; trap 'exit 7' CONT; echo ready
while true; do sleep 0.1; done
"""
"""A worker of era B: handlers, and then it says that it is ready."""

SIGNAL_FILE = "DYN_CHECKPOINT_SIGNAL_FILE"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/{}/leases"
OUTAGE_SECONDS = 60.0
"""How long the API server is away."""


@pytest.fixture
def pods(kube: Kube, namespace: str, kit: Kit, node: Node) -> Iterator[Pods]:  # noqa: F811
    """Give pods, and an agent with exactly the role that ships."""
    with pods_on(kube, namespace, kit, node) as pods:
        pods.agent(token_for(kube, namespace))
        yield pods


def test_a_pod_is_frozen_and_its_worker_thawed_in_a_pod_that_waits(pods: Pods) -> None:
    """The label decides, the worker is answered, both pods get their events; each pod is served once."""
    id_ = pods.node.new_id()
    target = pods.pod("restored", labels(A1, id_, restore=True), command=["/h/hibernode-placeholder"])
    waiting = pods.run(target, id_, argv=("/hibernode-placeholder",))
    pods.events("restored", "RestoreWaiting")
    job = pods.job("job")
    source = pods.pod("source", labels(A1, id_), job=job)
    box = pods.run(source, id_)
    answer = pods.node.done(id_)
    assert answer["success"] is True, (answer, pods.node.tail())
    assert box.wait() == 0
    frozen = answer["checkpoint_path"]
    assert frozen.endswith(id_)
    for name in ("source", "job"):
        pods.events(name, "CheckpointStarted", "CheckpointSucceeded")
    path = f"/apis/batch/v1/namespaces/{pods.namespace}/jobs/job"
    until("status", lambda: pods.annotation(path, A1.status) == "completed", SECONDS)
    assert pods.kube.request("GET", f"{LEASES.format(pods.namespace)}/job").status == 404
    until("restored worker", lambda: (waiting.state() or {}).get("restored"), SECONDS)
    waiting.counts_on()
    pods.events("restored", "RestoreStarted", "RestoreSucceeded")
    assert pods.reasons("source").count("CheckpointStarted") == 1
    assert pods.reasons("restored").count("RestoreWaiting") == 1
    waiting.ask_exit(7)
    assert waiting.wait() == 7


def test_era_c_is_told_by_its_job_and_by_sentinels(pods: Pods, tmp_path: Path) -> None:
    """The Job's annotation is set before the worker ends, and the Lease was held; a restore likewise."""
    id_ = pods.node.new_id()
    job = pods.job("job")
    box = later(pods, pods.pod("source", labels(C, id_), job=job), id_, tmp_path / "one")
    assert box.wait() == 0
    path = f"/apis/batch/v1/namespaces/{pods.namespace}/jobs/job"
    assert pods.annotation(path, C.status) == "completed"
    assert box.log() == "done\n"
    spec = pods.kube.request("GET", f"{LEASES.format(pods.namespace)}/job").body["spec"]
    assert spec["leaseDurationSeconds"] == 30
    assert spec["holderIdentity"] == "" or spec["holderIdentity"].startswith("snapshot-agent/")
    target = pods.pod("restored", labels(C, id_, restore=True))
    again = later(pods, target, id_, tmp_path / "two", waits=True)
    assert again.wait() == 7, pods.node.tail()
    assert "restored after" in again.log()
    until("status", lambda: pods.annotation(target.path, C.restore_status) == "completed", SECONDS)


def test_an_outage_of_the_api_server_loses_nothing(pods: Pods, tmp_path: Path) -> None:
    """Workers are frozen and answered while it is away, and it is told of all when it is back."""
    id_, later_id = pods.node.new_id(), pods.node.new_id()
    box = pods.run(pods.pod("source", labels(A1, id_)), id_, argv=(pods.place.worker, "--no-ready"))
    job = pods.job("job")
    until("known pod", lambda: pods.said()["asking"][0]["state"] == "found", SECONDS)
    pods.kube.stop_api()
    ends = time.monotonic() + OUTAGE_SECONDS
    try:
        until("outage", lambda: not pods.said()["synced"] or pods.said()["ageSeconds"] > 1, SECONDS)
        (box.root / "srv/ready").touch()
        assert pods.node.done(id_)["success"] is True, pods.node.tail()
        assert box.wait() == 0
        time.sleep(max(0.0, ends - time.monotonic()))
        assert pods.said()["untold"] >= 2
    finally:
        pods.kube.start_api()
    pods.events("source", "CheckpointStarted", "CheckpointSucceeded")
    worker = later(pods, pods.pod("new", labels(C, later_id), job=job), later_id, tmp_path / "one")
    assert worker.wait() == 0, pods.node.tail()
    assert pods.said()["lost"] == 0


def test_an_expired_watch_is_survived(pods: Pods) -> None:
    """What came after it is seen; a bad label gets an event and its worker an answer, not a crash.

    Also one whose file bears the label's name; the worker of a Job that cannot be told at all is ended.
    """
    pods.kube.expire()
    id_ = pods.node.new_id()
    bad_labels = {A1.source: "true", A1.ids[0]: "Not-An-Id"}
    bad = pods.pod("bad", bad_labels, env={SIGNAL_FILE: f"/signals/{id_}.done"})
    box = pods.run(bad, id_)
    pods.events("bad", "CheckpointFailed")
    answer = pods.node.done(id_)
    assert answer["success"] is False
    assert "InvalidCheckpointId" in answer["error"]
    assert box.wait() == 3
    path = "/signals/Not-An-Id.done"
    named = pods.run(pods.pod("named", bad_labels, env={SIGNAL_FILE: path}), id_, env={SIGNAL_FILE: path})
    assert named.wait() == 3, pods.node.tail()
    untold = pods.run(pods.pod("untold", bad_labels, job=pods.job("job")), id_, env={SIGNAL_FILE: "/x.done"})
    assert untold.wait() == 128 + 9
    pods.events("job", "CheckpointFailed", "WorkerKilled")
    pods.wait_synced()


def test_era_b_is_told_by_signals_and_by_the_pods_annotation(pods: Pods) -> None:
    """The readiness that a probe reports is the trigger; SIGUSR1 ends the worker well, SIGCONT wakes it."""
    id_ = pods.node.new_id()
    source = pods.pod("source", labels(B, id_), probe=True)
    argv, env = ("sh", "-c", SIGNALLED), {"DYN_CHECKPOINT_SIGNAL_FILE": ""}
    box = pods.run(source, id_, argv=argv, env=env, image=images.busybox())
    until("handlers", lambda: "ready" in box.log())
    pods.status(source, pods.containers["source"], ready=True)
    assert box.wait() == 0, (box.log(), pods.node.tail())
    until("status", lambda: pods.annotation(source.path, B.status) == "completed", SECONDS)
    pods.events("source", "CheckpointSucceeded")
    target = pods.pod("restored", labels(B, id_, restore=True))
    again = pods.run(target, id_, argv=("sleep", "1000000"), env=env, image=images.busybox())
    assert again.wait() == 7, (again.log(), pods.node.tail())
    until("status", lambda: pods.annotation(target.path, B.restore_status) == "completed", SECONDS)


def test_a_source_of_era_c_with_a_bad_id_ends_at_once_and_its_job_is_told(pods: Pods, tmp_path: Path) -> None:
    """It would wait for its deadline: nobody else can tell it."""
    job = pods.job("job")
    bad = pods.pod("bad", {C.source: "true", C.ids[0]: "Not-An-Id"}, job=job)
    box = later(pods, bad, pods.node.new_id(), tmp_path / "one")
    assert box.wait() == 128 + 9
    pods.events("bad", "CheckpointFailed")
    pods.events("job", "CheckpointFailed")
    path = f"/apis/batch/v1/namespaces/{pods.namespace}/jobs/job"
    assert pods.annotation(path, C.status) == "failed"


def test_a_restore_that_does_not_fit_leaves_a_condition_with_both_values(pods: Pods) -> None:
    """Nothing is touched, and the placeholder starts cold."""
    id_ = pods.node.new_id()
    box = pods.run(pods.pod("source", labels(A1, id_)), id_)
    assert pods.node.done(id_)["success"] is True, pods.node.tail()
    assert box.wait() == 0
    target = pods.pod("small", labels(A1, id_, restore=True), command=["/h/hibernode-placeholder"])
    cold = ("/hibernode-placeholder", "--", "/bin/sh", "-c", "echo started cold; exec sleep 1000")
    small = pods.run(target, id_, argv=cold, memory=6 << 20)
    until("cold start", lambda: "started cold" in small.log(), SECONDS)
    pods.events("small", "RestoreIncompatible")

    def conditions() -> list[str]:
        found = pods.kube.request("GET", target.path).body["status"]["conditions"]
        return [one["message"] for one in found if one["type"] == INCOMPATIBLE_CONDITION]

    message = until("condition", conditions, SECONDS)[0]
    assert "limit" in message


def test_the_answer_goes_through_the_containers_root_where_the_hostpath_is_not_mounted(
    pods: Pods, tmp_path: Path
) -> None:
    """The worker's directory is none that the agent watches; ours has no file for it."""
    id_ = pods.node.new_id()
    tmp_path.chmod(0o777)
    box = pods.run(
        pods.pod("source", labels(A1, id_)), id_, binds=[(tmp_path, "/signals", "rw")], more_binds=()
    )
    assert box.wait() == 0, pods.node.tail()
    assert read_json(tmp_path / f"{id_}.done")["checkpoint_id"] == id_  # type: ignore[index]
    assert not (pods.node.signals / f"{id_}.done").exists()


def test_an_agent_that_starts_anew_answers_nobody_twice(pods: Pods, tmp_path: Path) -> None:
    """The pod is still there and still ready, and its worker has not ended."""
    id_ = pods.node.new_id()
    argv = ("sh", "-c", "touch /ready; while true; do sleep 0.1; done")
    source = pods.pod("source", labels(A1, id_), probe=True)
    env = {"DYN_CHECKPOINT_READY_FILE": "/ready"}
    pods.run(source, id_, argv=argv, env=env, image=images.busybox())
    assert pods.node.done(id_)["success"] is True, pods.node.tail()
    pods.events("source", "CheckpointSucceeded")
    (pods.node.signals / f"{id_}.done").unlink()
    pods.node.agents[-1].terminate()
    pods.node.agents[-1].wait()
    pods.node.start_agent()
    until("settled pod", lambda: [one["state"] for one in pods.said()["asking"]] == ["settled"], SECONDS)
    assert not (pods.node.signals / f"{id_}.done").exists()


def test_the_node_is_told_what_schedulers_can_use(pods: Pods, kube: Kube) -> None:
    """By an agent with the role for it, when the settings say so; its free space is an annotation."""
    kube.make("/api/v1/nodes", {"metadata": {"name": pods.node_name}})
    kube.apply(RBAC / "node.yaml")
    kube.bind(pods.namespace, ACCOUNT, "hibernode-agent-node")
    pods.node.agents[-1].terminate()
    pods.node.agents[-1].wait()
    pods.node.start_agent(KUBERNETES_NODE_LABELS="true", KUBERNETES_NODE_CONDITION="true")

    def metadata() -> dict[str, Any]:
        found: dict[str, Any] = kube.request("GET", f"/api/v1/nodes/{pods.node_name}").body["metadata"]
        return found if "hibernode.io/criu" in found.get("labels", {}) else {}

    found = until("label", metadata, SECONDS)
    assert found["labels"]["hibernode.io/criu"][0].isdigit()
    assert int(found["annotations"]["hibernode.io/store-free-bytes"]) > 0


def test_a_thousand_pods_of_a_node_are_listed(
    kube: Kube, namespace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are read page by page, only what asks is kept; the time and the memory are said."""
    node_name = f"node-{secrets.token_hex(4)}"

    def make(number: int) -> None:
        container = {
            "name": "main",
            "image": "none",
            "env": [{"name": f"V{n}", "value": "x" * 64} for n in range(20)],
        }
        asks = labels(A1, f"{number:012x}") if number % 100 == 0 else {}
        metadata = {"name": f"pod-{number}", "labels": asks}
        spec = {"nodeName": node_name, "containers": [container]}
        kube.make(f"/api/v1/namespaces/{namespace}/pods", {"metadata": metadata, "spec": spec})

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(make, range(1000)))
    import asyncio

    async def listed() -> tuple[Roster, float, int]:
        api = KubeApi(kube.configuration(), call_seconds=20.0, total_seconds=60.0)
        roster = Roster(node_name, lambda: None)
        follower = Follower(api, Listing("/api/v1/pods", "pods", fields=f"spec.nodeName={node_name}"), roster)
        import tracemalloc

        began = time.perf_counter()
        await follower.start()
        seconds = time.perf_counter() - began
        await follower.stop()
        tracemalloc.start()
        await follower.start()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        await follower.stop()
        await api.close()
        return roster, seconds, peak

    roster, seconds, peak = asyncio.run(listed())
    assert (len(roster), len(roster.entries)) == (1000, 10)
    with capsys.disabled():
        print(f"\n1,000 pods of a node: listed in {seconds:.2f} s, {peak / 2**20:.1f} MiB at the peak")
