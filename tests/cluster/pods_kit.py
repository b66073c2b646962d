"""Pods of a node that has no kubelet: objects at the real API server, backed by real containers of runc."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hibernode.kube.names import ERAS, KubeEra
from tests.cluster.kube import Kube
from tests.real import images
from tests.real.boxes import Box, Kit
from tests.real.node import Node, until
from tests.real.places import Place, placed

RBAC = Path(__file__).parents[2] / "daemonset" / "rbac"
ACCOUNT = "hibernode-agent"
MERGE = "application/merge-patch+json"
SECONDS = 60.0
A1, B, C = ERAS
CONTROL = "/snapshot-control"

LATER_WORKER = f"""
cd {CONTROL}; touch ready-for-checkpoint; ticks=0
while true; do
    [ -e restore-complete ] && {{ echo restored after $ticks; exit 7; }}
    [ -e snapshot-complete ] && {{ cat snapshot-complete; exit 0; }}
    ticks=$((ticks + 1)); sleep 0.1
done
"""
"""A worker of era C, as its operator's."""


@dataclass
class Pod:
    """A pod object; ``uid`` is the API server's."""

    name: str
    uid: str
    path: str


class Pods:
    """Makes pods in a namespace, with the containers that a kubelet would have made for them."""

    def __init__(self, kube: Kube, namespace: str, kit: Kit, place: Place) -> None:
        self.kube, self.namespace, self.kit, self.place = kube, namespace, kit, place
        self.node, self.node_name = place.node, f"node-{kit.token}"
        self.containers: dict[str, str] = {}
        self.folder = f"/api/v1/namespaces/{namespace}/pods"

    def agent(self, token: str, **settings: str) -> None:
        """Start an agent with the rights of a token, and wait until it knows the pods."""
        config = self.kube.authority.kubeconfig(self.namespace, self.kube.url, {"token": token})
        self.node.config |= {
            "NODE_NAME": self.node_name,
            "KUBERNETES_ENABLED": "on",
            "KUBERNETES_KUBECONFIG": str(config),
            "KUBERNETES_NAMESPACE": self.namespace,
            **settings,
        }
        self.node.start_agent()
        self.wait_synced()

    def wait_synced(self) -> None:
        """Wait until the agent has heard the API server."""
        until("list of pods", lambda: self.said()["synced"], SECONDS)

    def said(self) -> dict[str, Any]:
        """Ask the agent what it knows of the cluster."""
        found: dict[str, Any] = json.loads(self.node.run("status", "-o", "json").stdout)["kubernetes"]
        return found

    def pod(
        self,
        name: str,
        labels: Mapping[str, str],
        *,
        env: Mapping[str, str] | None = None,
        job: Mapping[str, Any] | None = None,
        command: list[str] | None = None,
        probe: bool = False,
    ) -> Pod:
        """Make a pod object of this node; nothing runs yet."""
        container: dict[str, Any] = {"name": "main", "image": "none", "command": command or ["worker"]}
        container["env"] = [{"name": key, "value": value} for key, value in (env or {}).items()]
        if probe:
            container["readinessProbe"] = {"exec": {"command": ["cat", "/srv/ready"]}}
        metadata: dict[str, Any] = {"name": name, "labels": dict(labels)}
        if job is not None:
            owner = {"apiVersion": "batch/v1", "kind": "Job", "controller": True}
            metadata["ownerReferences"] = [owner | {key: job["metadata"][key] for key in ("name", "uid")}]
        spec = {"nodeName": self.node_name, "containers": [container], "restartPolicy": "Never"}
        made = self.kube.make(self.folder, {"metadata": metadata, "spec": spec}).body
        return Pod(name, made["metadata"]["uid"], f"{self.folder}/{name}")

    def job(self, name: str) -> dict[str, Any]:
        """Make a Job that has no controller."""
        template = {"spec": {"restartPolicy": "Never", "containers": [{"name": "main", "image": "none"}]}}
        path = f"/apis/batch/v1/namespaces/{self.namespace}/jobs"
        return self.kube.make(path, {"metadata": {"name": name}, "spec": {"template": template}}).body

    def run(self, pod: Pod, id_: str, **more: Any) -> Box:
        """Start the pod's container, in a cgroup that bears its uid, and say so in its status."""
        container = self.containers[pod.name] = self.kit.new_id()
        cgroup = f"/runc-{self.kit.token}/kubepods/besteffort/pod{pod.uid}/{container}"
        box = self.place.start(id_, linux={"cgroupsPath": cgroup}, name=pod.name, **more)
        self.status(pod, container)
        return box

    def status(self, pod: Pod, container: str, *, ready: bool = False) -> None:
        """Set the status that a kubelet would set for a container that runs."""
        state = {
            "name": "main",
            "image": "none",
            "imageID": "none",
            "ready": ready,
            "restartCount": 0,
            "containerID": f"containerd://{container}",
            "state": {"running": {"startedAt": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}},
        }
        condition = {"type": "Ready", "status": str(ready)}
        body = {"status": {"phase": "Running", "conditions": [condition], "containerStatuses": [state]}}
        answer = self.kube.request("PATCH", f"{pod.path}/status", body, content_type=MERGE)
        assert answer.status == 200, answer

    def reasons(self, name: str) -> list[str]:
        """List the reasons of the events on an object."""
        path = f"/api/v1/namespaces/{self.namespace}/events?fieldSelector=involvedObject.name={name}"
        return [each["reason"] for each in self.kube.request("GET", path).body["items"]]

    def events(self, name: str, *reasons: str) -> None:
        """Wait until an object has events of these reasons."""
        until(f"{reasons} on {name}", lambda: set(reasons) <= set(self.reasons(name)), SECONDS)

    def annotation(self, path: str, name: str) -> str | None:
        """Read an annotation of an object."""
        found = self.kube.request("GET", path).body["metadata"].get("annotations", {}).get(name)
        return None if found is None else str(found)


def labels(era: KubeEra, id_: str, *, restore: bool = False) -> dict[str, str]:
    """Give the labels that an era's operator sets."""
    return {era.restore if restore else era.source: "true", era.ids[0]: id_}


def token_for(kube: Kube, namespace: str, file: str = "agent.yaml") -> str:
    """Make a service account with exactly the rules that ship, and wait until they count."""
    token = kube.account(namespace, ACCOUNT)
    kube.bind(namespace, ACCOUNT, yaml.safe_load((RBAC / file).read_text())["rules"])
    path = f"/api/v1/namespaces/{namespace}/pods"
    until("rights", lambda: kube.request("GET", path, token=token).status == 200)
    return token


@contextmanager
def pods_on(kube: Kube, namespace: str, kit: Kit, node: Node) -> Iterator[Pods]:
    """Give pods of a node, and end all that runs of them."""
    with placed(node, kit, "runc") as place:
        yield Pods(kube, namespace, kit, place)


def later(pods: Pods, pod: Pod, id_: str, control: Path, *, waits: bool = False) -> Box:
    """Run a container of era C: its worker, or the one that waits for it."""
    control.mkdir()
    env = {
        "DYN_SNAPSHOT_CONTROL_DIR": CONTROL,
        "DYN_CHECKPOINT_SIGNAL_FILE": "",
        "DYN_CHECKPOINT_READY_FILE": "",
    }
    argv = ("sleep", "1000000") if waits else ("sh", "-c", LATER_WORKER)
    binds = [(control, CONTROL, "rw")]
    return pods.run(pod, id_, argv=argv, env=env, binds=binds, image=images.busybox())
