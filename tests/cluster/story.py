"""What Hibernode is for, in a cluster: a DynamoCheckpoint becomes Ready, a restore pod answers as its worker.

The one-node cluster of :mod:`tests.cluster.node`, the manifests and the image as they ship, a worker in
Python.
"""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable
from typing import Any

from tests.cluster.install import NAMESPACE, ROOT, Installation, import_agent
from tests.cluster.node import Cluster
from tests.real import images
from tests.real.node import until

WORKER = ROOT / "scripts" / "demo_worker.py"
PORT, QUERY = 8000, 20260
PATIENCE = 180.0
"""Seconds for a step that takes some, on a loaded machine."""
NAME = "demo"

Say = Callable[[str], None]


class Story:
    """The steps in their order; each says what it has seen."""

    def __init__(self, cluster: Cluster, say: Say, mib: int = 64) -> None:
        assert cluster.kube
        self.cluster, self.kube, self.say = cluster, cluster.kube, say
        self.installation = Installation(cluster, "controller")
        self.command = [
            "python3", "/worker/demo_worker.py", f"--mib={mib}", "--host=0.0.0.0", f"--port={PORT}",
        ]  # fmt: skip
        self.id = ""
        self.first: dict[str, Any] = {}
        self.cold = 0.0

    def run(self) -> str:
        """Tell it from start to end; return the last line."""
        begun = time.monotonic()
        self._install()
        installed = time.monotonic()
        self._checkpoint()
        frozen = time.monotonic()
        thaw = self._restore()
        return (
            f"installed in {installed - begun:.1f} s, "
            f"checkpoint Ready {frozen - installed:.1f} s after it was asked for, "
            f"restored worker answers {thaw:.1f} s after its pod was"
        )

    def _install(self) -> None:
        """Bring up the DaemonSet and the controller."""
        import_agent(self.cluster)
        installation = self.installation
        installation.apply()
        self.kube.kubectl(
            "wait", "--for=condition=Established", "--timeout=60s", "crd/dynamocheckpoints.nvidia.com"
        )
        installation.wait("daemonset/hibernode-agent")
        installation.wait("deployment/hibernode-controller")
        self.say("kubectl apply -k daemonset/: agent and controller are Ready")
        self.say(self.kube.kubectl("-n", NAMESPACE, "get", "daemonset,deployment,pod").stdout)

    def _pod(self, command: list[str]) -> dict[str, Any]:
        """Give the worker's pod: all that checkpoint Job and restore pod have in common."""
        mounts = [
            {"name": "worker", "mountPath": "/worker", "readOnly": True},
            {"name": "hibernode", "mountPath": "/hibernode", "readOnly": True},
        ]
        container = {
            "name": "main",
            "image": self.cluster.import_image(images.debian()),
            "imagePullPolicy": "Never",
            "command": command,
            "env": [{"name": "DYN_RESTORE_MARKER_FILE", "value": "/tmp/dynamo-restored"}],
            "volumeMounts": mounts,
        }
        volumes = [
            {"name": "worker", "configMap": {"name": "worker"}},
            {"name": "hibernode", "hostPath": {"path": str(self.installation.pods)}},
        ]
        return {"containers": [container], "volumes": volumes}

    def _checkpoint(self) -> None:
        """Make a DynamoCheckpoint by kubectl, and wait until it is Ready."""
        kubectl = self.kube.kubectl
        kubectl("create", "configmap", "worker", f"--from-file={WORKER}")
        path = self.installation.base / "checkpoint.json"
        path.write_text(
            json.dumps(
                {
                    "apiVersion": "nvidia.com/v1alpha1",
                    "kind": "DynamoCheckpoint",
                    "metadata": {"name": NAME, "namespace": "default"},
                    "spec": {
                        "identity": {"model": "demo/worker", "backendFramework": "vllm"},
                        "job": {"podTemplateSpec": {"spec": self._pod(self.command)}, "backoffLimit": 0},
                    },
                }
            )
        )
        begun = time.monotonic()
        kubectl("apply", "-f", path)
        selector = "nvidia.com/checkpoint-source=true"

        def asked() -> bool:
            pods = json.loads(kubectl("get", "pods", "-l", selector, "-o", "json").stdout)["items"]
            address = pods[0]["status"].get("podIP") if pods else None
            answer = self._ask(address) if address else None
            if answer:
                self.first, self.cold = answer, time.monotonic() - begun
            return bool(answer) or self._phase() in ("Ready", "Failed")

        until("answer of the worker", asked, PATIENCE)
        if self.first:
            self.say(f"the worker answers {str(self.first['answer'])[:16]}... after {self.cold:.1f} s, cold")
        until("end of the checkpoint", lambda: self._phase() in ("Ready", "Failed"), PATIENCE)
        self.say(kubectl("get", "dynamocheckpoint,job,pod").stdout)
        assert self._phase() == "Ready", self.report()
        self.id = self._object()["status"]["identityHash"]
        self.say(self.installation.agent("list"))

    def _object(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(
            self.kube.kubectl("get", "dynamocheckpoint", NAME, "-o", "json").stdout
        )
        return answer

    def _phase(self) -> str:
        return str(self._object().get("status", {}).get("phase", ""))

    def _restore(self) -> float:
        """Make a restore pod like the Job's, and ask it; return the seconds until it answered."""
        kubectl = self.kube.kubectl
        # Other tests' Jobs may be in this namespace.
        job = json.loads(kubectl("get", "job", self._object()["status"]["jobName"], "-o", "json").stdout)
        spec = job["spec"]["template"]["spec"]
        (container,) = spec["containers"]
        container["command"] = ["/hibernode/hibernode-placeholder", "--wait", "120", "--", *self.command]
        container.pop("readinessProbe", None)
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": "restored",
                "namespace": "default",
                "labels": {"nvidia.com/checkpoint-restore": "true", "nvidia.com/checkpoint-hash": self.id},
            },
            "spec": {
                name: spec[name] for name in ("containers", "volumes", "securityContext") if name in spec
            },
        }
        path = self.installation.base / "restored.json"
        path.write_text(json.dumps(pod))
        begun = time.monotonic()
        kubectl("apply", "-f", path)
        found: dict[str, Any] = {}

        def answers() -> bool:
            status = json.loads(kubectl("get", "pod", "restored", "-o", "json").stdout)["status"]
            if status.get("podIP"):
                found.update(self._ask(status["podIP"]) or {})
            return bool(found)

        try:
            until("answer of the restored worker", answers, PATIENCE)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.report()}") from error
        seconds = time.monotonic() - begun
        log = kubectl("logs", "restored").stdout
        assert "restored, serving" in log, log
        assert not self.first or found["answer"] == self.first["answer"], (found, self.first)
        self.say(f"the restored worker answers {str(found['answer'])[:16]}... after {seconds:.1f} s")
        self.say(kubectl("get", "events", "--field-selector", "involvedObject.name=restored").stdout)
        return seconds

    def _ask(self, address: str) -> dict[str, Any] | None:
        """Ask the worker in a pod; None when nobody answers."""
        try:
            with urllib.request.urlopen(f"http://{address}:{PORT}/?q={QUERY}", timeout=5) as reply:
                answer: dict[str, Any] = json.load(reply)
                return answer
        except OSError:
            return None

    def report(self) -> str:
        """Tell what a person would look at when it did not work."""
        kubectl = self.kube.kubectl
        parts = [
            kubectl(*arguments, check=False).stdout
            for arguments in (
                ("get", "events"),
                ("logs", "-l", "nvidia.com/checkpoint-hash", "--tail=20"),
                ("-n", NAMESPACE, "logs", "-l", "app.kubernetes.io/part-of=hibernode", "--tail=40"),
            )
        ]
        if self._phase() and (id_ := self._object()["status"].get("identityHash")):
            parts.append(self.installation.agent("logs", id_, check=False))
        return "\n".join(parts)

    def close(self) -> None:
        """Take away what runs, so that the cluster can be used again."""
        kubectl = self.kube.kubectl
        kubectl("delete", "pod", "restored", "--ignore-not-found", "--grace-period=0", "--force")
        kubectl("delete", "dynamocheckpoint", NAME, "--ignore-not-found", check=False)
        kubectl("delete", "configmap", "worker", "--ignore-not-found")
        self.installation.remove()
