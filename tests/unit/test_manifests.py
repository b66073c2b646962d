"""The manifests: what the command prints, what the files promise to others, what belongs together."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from hibernode import __version__
from hibernode.cli.main import Context, cli
from hibernode.errors import UsageError
from hibernode.manifests import FILES, REPORTERS, manifests, overlays, patch
from hibernode.workload import ERA_A1

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> str:
    """Give what the command prints."""
    result = CliRunner().invoke(cli, arguments, obj=Context())
    assert result.exit_code == 0, result.output
    return result.output


def find(objects: list[Any], kind: str, name: str | None = None) -> Any:
    """Give the one object of a kind and name; without a name, the agent's."""
    (found,) = [each for each in objects if each["kind"] == kind and name in (None, each["metadata"]["name"])]
    return found


def pod(objects: list[Any]) -> Any:
    """Give the agent's pod."""
    return find(objects, "DaemonSet")["spec"]["template"]["spec"]


def test_the_files_are_those_of_the_checkout():
    """There is one source: the package holds daemonset/, not a copy."""
    assert FILES.resolve() == ROOT / "daemonset"


def test_dynamos_operator_finds_agent_and_store():
    """It looks for a component, a container and a volume by name; the store is where the contract says."""
    for names in ([], ["store-pvc"]):
        objects = manifests(names)
        labels = find(objects, "DaemonSet")["metadata"]["labels"]
        assert labels["app.kubernetes.io/component"] == "snapshot-agent"
        (agent,) = pod(objects)["containers"]
        assert agent["name"] == "agent"
        (mount,) = [each for each in agent["volumeMounts"] if each["name"] == "checkpoints"]
        assert mount["mountPath"] == ERA_A1.checkpoint_base
        assert "checkpoints" in {each["name"] for each in pod(objects)["volumes"]}


def test_the_signal_directory_is_the_same_path_on_node_and_in_the_agent():
    """The default of agent, manifests and operator is one."""
    objects = manifests()
    (volume,) = [each for each in pod(objects)["volumes"] if each["name"] == "signals"]
    (mount,) = [each for each in pod(objects)["containers"][0]["volumeMounts"] if each["name"] == "signals"]
    assert volume["hostPath"]["path"] == mount["mountPath"] == ERA_A1.signal_dir


def test_every_mount_has_a_volume_and_every_volume_a_mount():
    """In each variant alone and in all that go together."""
    for names in ([], *([name] for name in overlays()), ["gpu-node", "openshift", "store-pvc", "podmonitor"]):
        spec = pod(manifests(names))
        containers = [*spec.get("initContainers", ()), *spec["containers"]]
        mounts = {mount["name"] for each in containers for mount in each["volumeMounts"]}
        assert mounts == {each["name"] for each in spec["volumes"]}, names


def test_images_bear_the_packages_version():
    """Files, Dockerfile and package are released as one."""
    spec = pod(manifests())
    images = {each["image"] for each in (*spec["initContainers"], *spec["containers"])}
    assert images == {f"hibernode:{__version__}"}
    assert f'image.version="{__version__}"' in (FILES / "Dockerfile").read_text()


def test_a_restricted_agent_has_the_same_rules_in_a_role():
    """The role of one namespace is the cluster role's, rule by rule, and nothing of the cluster's is left."""
    objects = manifests(["restricted-namespace"])
    assert find(objects, "Role")["rules"] == find(manifests(), "ClusterRole", "hibernode-agent")["rules"]
    assert not [each for each in objects if each["kind"].startswith("ClusterRole")]


def test_a_reporter_is_not_privileged_and_sees_no_worker():
    """No capability, no store or signal directory of the node, no right in the cluster."""
    objects = manifests(["reporter-only"])
    (agent,) = pod(objects)["containers"]
    assert agent["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert "privileged" not in agent["securityContext"]
    places = {each["hostPath"]["path"] for each in pod(objects)["volumes"] if "hostPath" in each}
    assert places == {"/run/hibernode", "/var/lib/kubelet/pod-resources"}
    assert not [each for each in objects if "Role" in each["kind"]]


def test_every_overlay_is_a_thin_cover_of_its_component():
    """So what can be applied alone can be combined, and the command and kustomize have one source."""
    assert overlays() == sorted(path.name for path in (FILES / "overlays").iterdir())
    for name in overlays():
        content = yaml.safe_load((FILES / "overlays" / name / "kustomization.yaml").read_text())
        assert content["components"] == [f"../../components/{name}"]
        assert content["resources"] == ["../../base"]
        assert set(content) == {"apiVersion", "kind", "resources", "components"}


def test_namespace_image_and_settings_are_filled_in():
    """Everywhere they stand; settings get their names in the environment."""
    objects = manifests(
        ["openshift"], namespace="frost", image="example.org/h:1", flags=[("store.min_free_bytes", "2GiB")]
    )
    text = json.dumps(objects)
    assert find(objects, "Namespace")["metadata"]["name"] == "frost"
    assert '"namespace": "hibernode"' not in text
    assert '"image": "hibernode:' not in text
    assert text.count('"image": "example.org/h:1"') == 4
    assert find(objects, "ConfigMap", "hibernode-config")["data"]["HIBERNODE_STORE_MIN_FREE_BYTES"] == "2GiB"


def test_what_the_agent_would_refuse_is_refused_at_once():
    """A wrong key or value is an error here, not a pod that crashes."""
    for flag in (("store.pth", "/x"), ("store.path", "relative"), ("criu.log_level", "9")):
        with pytest.raises(UsageError):
            manifests(flags=[flag])
    with pytest.raises(UsageError, match="no overlay"):
        manifests(["../base"])


def test_every_setting_of_a_config_map_exists():
    """The agent refuses names that it does not know."""
    from hibernode.config import load

    for names in ([], *([name] for name in overlays())):
        for each in manifests(names):
            if each["kind"] == "ConfigMap":
                load(environ=each["data"])


def test_no_field_or_kind_is_newer_than_kubernetes_1_20():
    """Stable versions of the oldest server that is tested; definitions of others excepted."""
    known = {"v1", "apps/v1", "batch/v1", "rbac.authorization.k8s.io/v1", "apiextensions.k8s.io/v1"}
    found = {each["apiVersion"] for names in ([], overlays()[:0]) for each in manifests(names)}
    found |= {each["apiVersion"] for name in overlays() for each in manifests([name])}
    assert found - known <= {"monitoring.coreos.com/v1"}


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        ({"op": "add", "path": "/a~1b", "value": 1}, {"list": [1, 2], "a/b": 1}),
        ({"op": "add", "path": "/list/-", "value": 3}, {"list": [1, 2, 3]}),
        ({"op": "add", "path": "/list/0", "value": 3}, {"list": [3, 1, 2]}),
        ({"op": "replace", "path": "/list/1", "value": 3}, {"list": [1, 3]}),
        ({"op": "remove", "path": "/list/0"}, {"list": [2]}),
        ({"op": "test", "path": "/list", "value": [1, 2]}, {"list": [1, 2]}),
    ],
)
def test_patches_do_what_rfc_6902_says(operation, expected):
    """Adding, replacing, removing, in objects and lists."""
    document = {"list": [1, 2]}
    patch(document, [operation])
    assert document == expected


@pytest.mark.parametrize(
    "operation",
    [
        {"op": "test", "path": "/list/0", "value": 2},
        {"op": "replace", "path": "/none", "value": 2},
        {"op": "remove", "path": "/none"},
        {"op": "copy", "path": "/list", "from": "/list"},
    ],
)
def test_patches_that_do_not_fit_are_errors(operation):
    """A file that moved must not be patched at the wrong place."""
    with pytest.raises(ValueError, match="does not fit"):
        patch({"list": [1, 2]}, [operation])


def test_the_command_prints_yaml_without_anchors_and_json_that_kubectl_takes():
    """Both forms hold the same objects."""
    from_yaml = [*yaml.safe_load_all(run("manifests"))]
    assert not re.search(r"[&*]id\d", run("manifests"))
    listed = json.loads(run("manifests", "-o", "json"))
    assert listed["kind"] == "List"
    assert listed["items"] == from_yaml == manifests()


def test_any_two_overlays_go_together_or_are_refused_with_a_sentence():
    """In either order the same, without a trace, each mount with its volume; one named twice counts once."""
    for one in overlays():
        assert manifests([one, one]) == manifests([one])
        for other in overlays():
            if "reporter-only" in (one, other) and not {one, other} <= REPORTERS:
                with pytest.raises(UsageError, match="reporter-only does not go with"):
                    manifests([one, other])
                continue
            both = manifests([one, other])
            named = {(each["kind"], each["metadata"]["name"]) for each in both}
            assert len(named) == len(both)
            assert named == {(each["kind"], each["metadata"]["name"]) for each in manifests([other, one])}, (
                one,
                other,
            )
            spec = pod(both)
            mounts = {mount["name"] for mount in spec["containers"][0]["volumeMounts"]}
            assert mounts <= {each["name"] for each in spec["volumes"]}


@pytest.mark.parametrize(
    "flag",
    ["node_name=a", "store.path=/data", "server.listen=0.0.0.0:80", "state_dir=/s", "controller.pvc=x"],
)
def test_a_setting_that_the_manifests_contradict_is_refused(flag):
    """The pod would not find its store, or never be Ready; nobody would hear a setting of the controller."""
    with pytest.raises(UsageError, match=re.escape(flag.partition("=")[0])):
        manifests(flags=[tuple(flag.split("="))])


def test_settings_reach_whom_they_are_for():
    """The controller's go to the controller; both have one signal directory, and it is mounted."""
    flags = [("controller.pvc", "claim"), ("signals.path", "/var/lib/chrek/signals"), ("log.level", "debug")]
    objects = manifests(["controller"], flags=flags)
    agent = find(objects, "ConfigMap", "hibernode-config")["data"]
    controller = find(objects, "ConfigMap", "hibernode-controller-config")["data"]
    assert "HIBERNODE_CONTROLLER_PVC" not in agent
    assert controller["HIBERNODE_CONTROLLER_PVC"] == "claim"
    for data in (agent, controller):
        assert (data["HIBERNODE_SIGNALS_PATH"], data["HIBERNODE_LOG_LEVEL"]) == (
            "/var/lib/chrek/signals",
            "debug",
        )
    (volume,) = [each for each in pod(objects)["volumes"] if each["name"] == "signals"]
    (mount,) = [each for each in pod(objects)["containers"][0]["volumeMounts"] if each["name"] == "signals"]
    assert volume["hostPath"] == {"path": "/var/lib/chrek/signals", "type": "DirectoryOrCreate"}
    assert mount["mountPath"] == "/var/lib/chrek/signals"


def test_the_controller_of_a_restricted_agent_looks_at_its_namespace_only():
    """In whatever order they are named: Jobs elsewhere would find no agent."""
    for names in (["controller", "restricted-namespace"], ["restricted-namespace", "controller"]):
        spec = find(manifests(names), "Deployment")["spec"]["template"]["spec"]
        env = {each["name"]: each for each in spec["containers"][0]["env"]}
        (path,) = env["HIBERNODE_CONTROLLER_NAMESPACE"]["valueFrom"]["fieldRef"].values()
        assert path == "metadata.namespace"


@pytest.mark.parametrize("image", ["a b", "x\ny: z", "/x", "", "-x", "reg:5000/h@sha256:" + "a" * 64])
def test_an_image_is_a_name_that_a_registry_can_have(image):
    """A blank would be found by the kubelet, on each node."""
    result = CliRunner().invoke(cli, ["manifests", "--image", image], obj=Context(), standalone_mode=False)
    assert (result.exception is None) == (not image or image.startswith("reg"))


def test_the_removal_that_is_documented_finds_all_but_what_stays():
    """By its label, whatever the overlay; definitions, claim and namespace stay."""
    text = (ROOT / "docs/install.md").read_text()
    lines = [line.split() for line in text[text.index("## Removal") :].splitlines() if "kubectl" in line]
    kinds = {kind for line in lines for kind in line[line.index("delete") + 1].split(",")}
    for each in [one for name in overlays() for one in manifests([name])]:
        if each["kind"] in ("Namespace", "CustomResourceDefinition", "PersistentVolumeClaim"):
            continue
        assert each["kind"].lower() in kinds
        assert each["metadata"]["labels"]["app.kubernetes.io/part-of"] == "hibernode", each["metadata"]
