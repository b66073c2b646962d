"""The image and the manifests: built here, started by a real kubelet."""

from __future__ import annotations

import json
import os
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from hibernode.manifests import manifests, overlays, read_objects
from tests.cluster.install import DAEMONSET, Installation, import_agent
from tests.real.node import free_port, until

pytestmark = [pytest.mark.cluster, pytest.mark.containers]


def test_apply_k_brings_the_agent_up_as_a_daemonset(cluster):
    """The pod is Ready by its own probes, has put profile and placeholder on the node, and finds its CRIU.

    With the rights that two overlays add it labels its node and reads records of the cluster.
    """
    import_agent(cluster)
    listen = f"127.0.0.1:{free_port()}"
    installation = Installation(cluster, "metadata", "node-status", METADATA_LISTEN=listen)
    try:
        installation.apply()
        installation.wait("daemonset/hibernode-agent")
        assert (cluster.kit.base / "kubelet/seccomp/profiles/block-iouring.json").is_file()
        assert (installation.pods / "hibernode-placeholder").stat().st_mode & 0o111
        rows = json.loads(installation.agent("doctor", "-o", "json"))
        found = {row["check"]: row["verdict"] for row in rows["findings"]}
        assert rows["summary"]["fail"] == 0, rows
        checks = ("criu.version", "criu.self_test", "store.private", "host.paths", "seccomp.profile")
        assert {name: found[name] for name in checks} == dict.fromkeys(checks, "ok")
        assert json.loads(installation.agent("metadata", "workers", "-o", "json"))["items"] == []
        node = f"/api/v1/nodes/{cluster.node}"
        until(
            "label",
            lambda: "hibernode.io/criu" in cluster.kube.request("GET", node).body["metadata"]["labels"],
            60,
        )
    finally:
        installation.remove()


def test_a_reporter_runs_without_any_privilege_and_tells_what_it_can(cluster):
    """GPUs and metadata: no capability, no new privileges, a filter; nothing that it is not for fails."""
    import_agent(cluster)
    settings = {"METADATA_ENABLED": "true", "METADATA_LISTEN": f"127.0.0.1:{free_port()}"}
    installation = Installation(cluster, "reporter-only", **settings)
    try:
        installation.apply()
        installation.wait("daemonset/hibernode-agent")
        status = json.loads(installation.agent("status", "-o", "json"))
        # It is in the node's pid namespace, so that the processes on the GPUs have their names.
        said = Path(f"/proc/{status['pid']}/status").read_text()
        rights = dict(line.split(":\t", 1) for line in said.splitlines() if ":\t" in line)
        assert {int(rights[name], 16) for name in ("CapPrm", "CapEff", "CapBnd", "CapAmb")} == {0}
        assert (rights["NoNewPrivs"], rights["Seccomp"]) == ("1", "2")
        assert status["kubernetes"] is None
        assert json.loads(installation.agent("gpu", "-o", "json"))["state"] == "absent"
        assert json.loads(installation.agent("metadata", "workers", "-o", "json"))["items"] == []
        installation.inside("python3", "-I", "-c", "import numpy, nixl_cu12._api")
        summary = json.loads(installation.agent("doctor", "-o", "json"))["summary"]
        assert summary["fail"] == summary["warn"] == 0
        with urllib.request.urlopen(f"http://127.0.0.1:{installation.port}/metrics", timeout=20) as answer:
            assert b"hibernode_" in answer.read()
    finally:
        installation.remove()


STUB = """
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: podmonitors.monitoring.coreos.com}
spec:
  group: monitoring.coreos.com
  scope: Namespaced
  names: {kind: PodMonitor, plural: podmonitors}
  versions:
  - name: v1
    served: true
    storage: true
    schema:
      openAPIV3Schema:
        type: object
        properties:
          spec:
            type: object
            required: [selector]
            properties:
              selector: {type: object, x-kubernetes-preserve-unknown-fields: true}
              podMetricsEndpoints:
                type: array
                items:
                  type: object
                  properties:
                    port: {type: string}
                    path: {type: string}
                    interval: {type: string}
                    relabelings:
                      type: array
                      items:
                        type: object
                        properties:
                          sourceLabels: {type: array, items: {type: string}}
                          targetLabel: {type: string}
"""
"""The part of the Prometheus operator's definition that we use; it is not on the tests' server."""
COMBINED = ["gpu-node", "openshift", "controller", "store-pvc", "podmonitor", "restricted-namespace"]


def identified(objects: list[dict[str, Any]]) -> dict[tuple[str, str | None, str], dict[str, Any]]:
    """Give objects by kind, namespace and name."""
    return {
        (each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"]): each for each in objects
    }


@pytest.mark.parametrize("name", ["", *overlays()])
def test_the_command_prints_what_kustomize_builds(kube, name):
    """Base and every overlay, object by object."""
    folder = DAEMONSET / "overlays" / name if name else DAEMONSET
    built = read_objects(kube.kubectl("kustomize", folder).stdout)
    assert identified(built) == identified(manifests([name] if name else []))


def test_overlays_combine_as_components_do(kube, tmp_path):
    """Several at once, in the order in which they are named."""
    daemonset = os.path.relpath(DAEMONSET, tmp_path.resolve())
    (tmp_path / "kustomization.yaml").write_text(
        json.dumps(
            {
                "resources": [f"{daemonset}/base"],
                "components": [f"{daemonset}/components/{name}" for name in COMBINED],
            }
        )
    )
    built = read_objects(kube.kubectl("kustomize", tmp_path).stdout)
    assert identified(built) == identified(manifests(COMBINED))


def test_the_kustomization_of_the_documentation_is_what_the_command_prints(kube, tmp_path):
    """Image and namespace everywhere, also the image that the controller's Jobs start."""
    text = (DAEMONSET.parent / "docs/install.md").read_text()
    text = text.replace("REGISTRY", "registry.example:5000")
    one, more = [yaml.safe_load(block.partition("```")[0]) for block in text.split("```yaml\n")[1:]]
    daemonset = os.path.relpath(DAEMONSET, tmp_path.resolve())
    image = "registry.example:5000/hibernode:0.1.0"
    for content, names in ((one, ["gpu-node", "store-pvc"]), ({**one, **more}, COMBINED)):
        content["resources"] = [f"{daemonset}/base"]
        content["components"] = [f"{daemonset}/components/{name}" for name in names]
        content["namespace"] = "frost"
        (tmp_path / "kustomization.yaml").write_text(json.dumps(content))
        built = read_objects(kube.kubectl("kustomize", tmp_path).stdout)
        assert identified(built) == identified(manifests(names, namespace="frost", image=image))


@pytest.mark.parametrize("names", [[], *([name] for name in overlays()), COMBINED], ids="+".join)
def test_the_server_takes_every_object(kube, tmp_path, names):
    """A dry run of the server's on each overlay: kinds, fields and values are what it knows."""
    (tmp_path / "stub.yaml").write_text(STUB)
    kube.apply(tmp_path / "stub.yaml")
    objects = manifests(names)
    # In a dry run the namespace is not made, so it must be there.
    (tmp_path / "namespace.json").write_text(json.dumps(objects[0]))
    kube.apply(tmp_path / "namespace.json")
    (tmp_path / "all.json").write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))
    answers = json.loads(
        kube.kubectl(
            "apply", "--server-side", "--force-conflicts", "--dry-run=server", "--validate=true",
            "-o", "json", "-f", tmp_path / "all.json",
        ).stdout
    )  # fmt: skip
    accepted = identified(answers.get("items", [answers]))
    for key, sent in identified(objects).items():
        assert lost(sent, accepted[key]) == [], key


def lost(sent: object, kept: object, path: str = "") -> list[str]:
    """List the fields of an object that the server has not kept: an old one drops what it does not know."""
    if isinstance(sent, dict) and isinstance(kept, dict):
        return [
            found
            for name, value in sent.items()
            for found in (
                [f"{path}/{name}"] if name not in kept else lost(value, kept[name], f"{path}/{name}")
            )
        ]
    if isinstance(sent, list) and isinstance(kept, list) and len(sent) == len(kept):
        pairs = enumerate(zip(sent, kept, strict=True))
        return [found for at, (one, other) in pairs for found in lost(one, other, f"{path}/{at}")]
    return [] if sent == kept or path.endswith(("/cpu", "/memory", "/storage")) else [path]
