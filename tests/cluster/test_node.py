"""The one-node cluster itself: pods run, and afterwards the machine is as it was."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.node import CONTAINER_LOGS, POD_LOGS, Cluster, read_sysctls
from tests.real import images
from tests.real.boxes import Kit
from tests.real.node import until

pytestmark = [pytest.mark.cluster, pytest.mark.containers]

FIXED = (
    POD_LOGS,
    CONTAINER_LOGS,
    Path("/var/lib/kubelet"),
    Path("/usr/libexec/kubernetes"),
    Path("/var/lib/cni"),
)
"""Where kubelets and network plugins write whatever they are told."""


def machine() -> dict[str, object]:
    """Note what a node could leave behind and a kit does not look for."""
    return {
        "sysctls": read_sysctls(),
        "links": {name for name in os.listdir("/sys/class/net") if name.startswith(("hb", "nd", "veth"))},
        "files": {str(path) for folder in FIXED for path in folder.rglob("*")},
        "folders": {str(path) for path in FIXED if path.exists()},
    }


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Give a cluster, and see that nothing of it is left."""
    before = machine()
    kit = Kit()
    try:
        cluster = Cluster(kit)
        try:
            yield cluster
            print(f"node ready in {cluster.start_seconds:.1f} s, {cluster.resident() / 2**20:.0f} MiB")
        finally:
            cluster.close()
    finally:
        kit.close()
    assert kit.leftovers() == []
    after = machine()
    assert {key: (before[key], after[key]) for key in before if before[key] != after[key]} == {}


def test_a_job_runs_in_a_real_container_and_completes(cluster):
    """Controller manager, scheduler, kubelet and containerd each do their part; the log can be read."""
    image = cluster.import_image(images.busybox())
    script = "echo asleep at $NODE"
    container = {
        "name": "main",
        "image": image,
        "imagePullPolicy": "Never",
        "command": ["sh", "-c", script],
        "env": [{"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}],
    }
    template = {"spec": {"restartPolicy": "Never", "containers": [container]}}
    jobs = "/apis/batch/v1/namespaces/default/jobs"
    kube = cluster.kube
    kube.make(jobs, {"metadata": {"name": "nap"}, "spec": {"template": template}})
    until("end", lambda: kube.request("GET", f"{jobs}/nap").body.get("status", {}).get("succeeded") == 1, 120)
    assert kube.kubectl("logs", "job/nap").stdout == f"asleep at {cluster.node}\n"


def test_a_pod_reaches_the_api_server_at_the_service_and_the_node_reaches_the_pod(cluster):
    """The in-cluster address works without a proxy, from the pods' network too."""
    image = cluster.import_image(images.busybox())
    script = "nc -z $KUBERNETES_SERVICE_HOST $KUBERNETES_SERVICE_PORT && nc -lk -p 8080 -e echo awake"
    container = {
        "name": "main",
        "image": image,
        "imagePullPolicy": "Never",
        "command": ["sh", "-c", script],
        "readinessProbe": {"tcpSocket": {"port": 8080}, "periodSeconds": 1},
    }
    kube = cluster.kube
    pods = "/api/v1/namespaces/default/pods"
    kube.make(pods, {"metadata": {"name": "server"}, "spec": {"containers": [container]}})
    kube.kubectl("wait", "--for=condition=Ready", "--timeout=120s", "pod/server")
    kube.request("DELETE", f"{pods}/server?gracePeriodSeconds=0")
    until("end of the pod", lambda: kube.request("GET", f"{pods}/server").status == 404, 60)
