"""Hibernode itself in the one-node cluster: the image that ``make image`` builds, the manifests that ship.

What ``daemonset/`` says is applied as it is, but for the places on the node: those are below the kit's
directory, and the server has a port of its own, so that the machine stays what it was and other agents on it
are left alone.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from hibernode.manifests import manifests
from tests.cluster.node import Cluster
from tests.real.boxes_ctr import KUBERNETES
from tests.real.node import free_port

ROOT = Path(__file__).parents[2]
DAEMONSET = ROOT / "daemonset"
IMAGE = ROOT / "build" / "hibernode-image.tar"
NAMESPACE = "hibernode"


def import_agent(cluster: Cluster) -> None:
    """Make the agent's image known to the node, under the name that the manifests have."""
    assert IMAGE.exists(), "no image: make image"
    cluster.kit.daemon().ctr(KUBERNETES, "image", "import", "--snapshotter", "overlayfs", IMAGE)


class Installation:
    """``kubectl apply -k daemonset/`` on a cluster, with the given overlays' components and settings."""

    def __init__(self, cluster: Cluster, *components: str, **settings: str) -> None:
        assert cluster.kube
        self.cluster, self.kube, self.port = cluster, cluster.kube, free_port()
        self.base = Path(mkdtemp(prefix="install-", dir=cluster.kit.base))
        self.base.chmod(0o755)
        self.signals = self.base / "signals"
        self.pods = self.base / "placeholder"
        self._write(components, {"SERVER_LISTEN": f"127.0.0.1:{self.port}", **settings})

    def _write(self, components: tuple[str, ...], values: dict[str, str]) -> None:
        """Write a kustomization over the one that ships."""
        kubelet = self.cluster.kit.base / "kubelet"
        places = {
            "checkpoints": self.base / "checkpoints",
            "signals": self.signals,
            "state": self.base / "state",
            "run": self.base / "run",
            "kubelet-seccomp": kubelet / "seccomp",
            "pod-resources": kubelet / "pod-resources",
            "placeholder": self.pods,
        }
        template = "/spec/template/spec"
        (agent,) = (each for each in manifests(components) if each["kind"] == "DaemonSet")
        volumes = agent["spec"]["template"]["spec"]["volumes"]
        on_node = {each["name"] for each in volumes if "hostPath" in each}
        assert on_node <= {*places, "cgroup"}
        patch: list[dict[str, Any]] = [
            {
                "op": "replace",
                "path": f"{template}/volumes/{at}/hostPath/path",
                "value": str(places[each["name"]]),
            }
            for at, each in enumerate(volumes)
            if each["name"] in on_node & {*places}
        ]
        patch += [
            {"op": "replace", "path": f"{template}/containers/0/{probe}/httpGet/port", "value": self.port}
            for probe in ("livenessProbe", "readinessProbe")
        ]
        # Where pid 1 has more rights than anybody else (CAP_SYS_RESOURCE on some virtual machines) its root
        # cannot be looked into, and the agent looks for the containers' upper layers at their own place.
        layers = str(self.cluster.kit.base / "root")
        for place, value in (
            ("volumes", {"name": "layers", "hostPath": {"path": layers}}),
            ("containers/0/volumeMounts", {"name": "layers", "mountPath": layers}),
        ):
            if "signals" in on_node:  # an agent that only reports looks into no container
                patch.append({"op": "add", "path": f"{template}/{place}/-", "value": value})
        settings = [
            {"op": "add", "path": f"/data/HIBERNODE_{name}", "value": value} for name, value in values.items()
        ]
        daemonset = Path(os.path.relpath(DAEMONSET, self.base))
        kustomization = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "resources": [str(daemonset)],
            "components": [str(daemonset / "components" / name) for name in components],
            "patches": [
                {"patch": json.dumps(patch), "target": {"kind": "DaemonSet", "name": "hibernode-agent"}},
                {"patch": json.dumps(settings), "target": {"kind": "ConfigMap", "name": "hibernode-config"}},
            ],
        }
        (self.base / "kustomization.yaml").write_text(json.dumps(kustomization))

    def apply(self) -> None:
        """Apply it as a user does."""
        self.kube.kubectl("apply", "-k", self.base)

    def remove(self) -> None:
        """Take it away again, and wait until it is gone."""
        self.kube.kubectl("delete", "-k", self.base, "--ignore-not-found")

    def wait(self, workload: str, seconds: int = 120) -> None:
        """Wait until all pods of ``daemonset/NAME`` or ``deployment/NAME`` are Ready."""
        kube = self.kube
        done = kube.kubectl(
            "-n", NAMESPACE, "rollout", "status", f"--timeout={seconds}s", workload, check=False
        )
        if done.returncode != 0:
            raise AssertionError(done.stdout + done.stderr + self.report())

    def report(self) -> str:
        """Tell what a person would look at: pods, their events, the end of their logs."""
        kube = self.kube
        parts = [
            kube.kubectl("-n", NAMESPACE, *arguments, check=False).stdout
            for arguments in (
                ("describe", "pods"),
                ("logs", "--all-containers", "--tail=40", "-l", "app.kubernetes.io/part-of=hibernode"),
            )
        ]
        return "\n".join(parts)

    def agent(self, *arguments: str, check: bool = True) -> str:
        """Run ``hibernode`` in the agent's pod."""
        return self.inside("hibernode", *arguments, check=check)

    def inside(self, *command: str, check: bool = True) -> str:
        """Run a command in the agent's pod."""
        words = ["exec", "daemonset/hibernode-agent", "-c", "agent", "--", *command]
        return self.kube.kubectl("-n", NAMESPACE, *words, check=check).stdout
