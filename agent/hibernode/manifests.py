"""The Kubernetes objects that install Hibernode, with settings filled in.

The files are those of ``daemonset/``, which come with the package. Of kustomize only what they use is done
here: resources, components, patches by JSON Patch (RFC 6902) with a target, and ``$patch: delete``; anything
else in a kustomization is an error, so that the two cannot part in silence.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from hibernode.config import env_name, load
from hibernode.errors import HibernodeError, UsageError

FILES: Final = Path(__file__).parent / "data/daemonset"
CONFIG: Final = "hibernode-config"
CONTROLLER_CONFIG: Final = "hibernode-controller-config"
NAMESPACE: Final = "hibernode"
IMAGE: Final = "hibernode:"
"""How the image's name begins in the files; the version follows."""

Object = dict[str, Any]

LAST: Final = ("restricted-namespace", "reporter-only")
"""Overlays that change what others bring, so that they come after them."""

REPORTERS: Final = {"reporter-only", "gpu-node", "podmonitor"}
"""What can be with an agent that only reports: the others give rights and volumes that it has not."""

FIXED: Final = {
    "node_name": "each agent is told that of its node",
    "state_dir": "a volume is mounted there",
    "store.path": "a volume is mounted there; where it is on the node says its hostPath",
    "server.socket": "a volume is mounted there",
    "server.listen": "the probes ask there; the overlay podmonitor opens it to others",
}
"""Settings that are not in the ConfigMap alone."""

SIGNALS: Final = "signals.path"

_KEYS: Final = {"apiVersion", "kind", "resources", "components", "patches"}


def overlays() -> list[str]:
    """List the names of the components, each of which is an overlay too."""
    return sorted(path.name for path in (FILES / "components").iterdir() if path.is_dir())


def manifests(
    names: Sequence[str] = (),
    *,
    namespace: str = NAMESPACE,
    image: str = "",
    flags: Sequence[tuple[str, str]] = (),
) -> list[Object]:
    """Build the objects of the base with the named overlays on it, in the order in which to apply them.

    ``flags`` are settings, ``(key, value)`` as ``--set`` has them; they go into the ConfigMap of agent,
    controller or both. A signal directory of another place is mounted from there.

    :raises UsageError: no such overlay or setting, a value is not acceptable, or they do not go together.
    """
    names = sorted(dict.fromkeys(names), key=lambda name: LAST.index(name) if name in LAST else -1)
    _check(names, flags)
    objects: list[Object] = []
    _add(FILES / "base", objects)
    for name in names:
        _add(FILES / "components" / name, objects)
    for each in objects:
        _fill(each, namespace, image)
        _set(each, dict(flags))
    # Namespaces and definitions before what needs them; else as written.
    first = ("Namespace", "CustomResourceDefinition")
    return sorted(
        objects, key=lambda each: first.index(each["kind"]) if each["kind"] in first else len(first)
    )


def _check(names: Sequence[str], flags: Sequence[tuple[str, str]]) -> None:
    """Refuse what cannot be, and what the agent would refuse when it starts."""
    for name in names:
        if name not in overlays():
            raise UsageError(f"{name} is no overlay", remedy=f"there are {', '.join(overlays())}")
    if "reporter-only" in names and (more := sorted({*names} - REPORTERS)):
        raise UsageError(
            f"reporter-only does not go with {', '.join(more)}",
            remedy="it has no rights and no store; gpu-node, podmonitor, --set metadata.enabled=true do",
        )
    load(environ={}, flags=flags)
    for key, _ in flags:
        if key in FIXED:
            raise UsageError(
                f"{key} cannot be set here: {FIXED[key]}", remedy="change both places in a kustomization"
            )
        if _is_controllers(key) and "controller" not in names:
            raise UsageError(f"{key} is of the controller, which is not there", remedy="--overlay controller")


def _is_controllers(key: str) -> bool:
    return key.startswith("controller.")


def _add(folder: Path, objects: list[Object]) -> None:
    """Add what a kustomization holds, and change what it patches."""
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    if unknown := kustomization.keys() - _KEYS:
        raise HibernodeError(
            f"{folder}: {', '.join(sorted(unknown))} is not understood here",
            remedy="use kubectl kustomize",
            reason="UnknownKustomization",
        )
    for name in kustomization.get("resources", ()):
        path = folder / name
        if path.is_dir():
            _add(path, objects)
        else:
            objects += read_objects(path.read_text())
    for name in kustomization.get("components", ()):
        _add(folder / name, objects)
    for entry in kustomization.get("patches", ()):
        content = yaml.safe_load((folder / entry["path"]).read_text())
        if isinstance(content, list):
            for each in [found for found in objects if _matches(found, entry["target"])]:
                patch(each, content)
        elif content.pop("$patch", None) == "delete":
            target = {"kind": content["kind"], "name": content["metadata"]["name"]}
            objects[:] = [found for found in objects if not _matches(found, target)]
        else:
            raise HibernodeError(
                f"{folder / entry['path']}: no list of operations, and no deletion",
                remedy="use kubectl kustomize",
                reason="UnknownKustomization",
            )


def read_objects(text: str) -> list[Object]:
    """Read a YAML stream; what an anchor shares becomes each one's own, or a patch would change all."""
    return [json.loads(json.dumps(each)) for each in yaml.safe_load_all(text) if each]


def _matches(found: Object, target: Mapping[str, str]) -> bool:
    return (found["kind"], found["metadata"]["name"]) == (target["kind"], target["name"])


def patch(document: Any, operations: Iterable[Mapping[str, Any]]) -> None:
    """Change a document in place by the ``add``, ``replace``, ``remove`` and ``test`` of RFC 6902.

    :raises ValueError: an operation does not fit the document.
    """
    for operation in operations:
        *parents, last = (
            part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]
        )
        place, value = document, copy.deepcopy(operation.get("value"))
        for part in parents:
            place = place[int(part) if isinstance(place, list) else part]
        kind = operation["op"]
        key: Any = last
        if isinstance(place, list):
            key = len(place) if last == "-" else int(last)
        there = key < len(place) if isinstance(place, list) else key in place
        if kind == "add" and isinstance(place, list):
            place.insert(key, value)
        elif kind == "add" or (kind == "replace" and there):
            place[key] = value
        elif kind == "remove" and there:
            del place[key]
        elif kind != "test" or not there or place[key] != value:
            raise ValueError(f"{operation} does not fit")


def _set(each: Object, flags: Mapping[str, str]) -> None:
    """Put settings into one object."""
    if each["kind"] == "ConfigMap":
        for key, value in flags.items():
            if each["metadata"]["name"] in _configs(key):
                each["data"][env_name(key)] = value
    if each["kind"] == "DaemonSet" and SIGNALS in flags:
        pod = each["spec"]["template"]["spec"]
        for volume in pod["volumes"]:
            if volume["name"] == "signals":
                volume["hostPath"]["path"] = flags[SIGNALS]
        for mount in pod["containers"][0]["volumeMounts"]:
            if mount["name"] == "signals":
                mount["mountPath"] = flags[SIGNALS]


def _configs(key: str) -> set[str]:
    """Tell which ConfigMaps a setting is for."""
    if key == SIGNALS or key.startswith("log."):
        return {CONFIG, CONTROLLER_CONFIG}
    return {CONTROLLER_CONFIG if _is_controllers(key) else CONFIG}


def _fill(each: Object, namespace: str, image: str) -> None:
    """Put the user's names into one object."""
    meta = each["metadata"]
    if each["kind"] == "Namespace" and meta["name"] == NAMESPACE:
        meta["name"] = namespace
    if meta.get("namespace") == NAMESPACE:
        meta["namespace"] = namespace
    for subject in each.get("subjects", ()):
        if subject.get("namespace") == NAMESPACE:
            subject["namespace"] = namespace
    pod = each.get("spec", {}).get("template", {}).get("spec", {})
    for container in (*pod.get("initContainers", ()), *pod.get("containers", ())):
        if image and container["image"].startswith(IMAGE):
            container["image"] = image
        for variable in container.get("env", ()):  # the controller's Jobs have an init container
            if image and variable.get("value", "").startswith(IMAGE):
                variable["value"] = image
