"""The one-node cluster itself: its pods run and reach what they need."""

from __future__ import annotations

import pytest

from tests.real import images
from tests.real.node import until

pytestmark = [pytest.mark.cluster, pytest.mark.containers]


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
    script = "nc $KUBERNETES_SERVICE_HOST $KUBERNETES_SERVICE_PORT </dev/null && exec httpd -f -p 8080"
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
    waited = kube.kubectl("wait", "--for=condition=Ready", "--timeout=60s", "pod/server", check=False)
    assert waited.returncode == 0, kube.kubectl("describe", "pod/server").stdout
    kube.request("DELETE", f"{pods}/server?gracePeriodSeconds=0")
    until("end of the pod", lambda: kube.request("GET", f"{pods}/server").status == 404, 60)
