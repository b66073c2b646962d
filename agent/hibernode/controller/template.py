"""A pod template that somebody else wrote: looked at before it is changed, and changed without loss.

What Kubernetes itself checks (images, quantities, names of all kinds) is left to the API server, which says
it better; what is checked here is what we build on, and what would give a pod that can never be dumped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from hibernode.errors import RefusedError
from hibernode.kube import names
from hibernode.text import printable

MAX_CONTAINERS: Final = 256
"""No node starts such a pod; it bounds what a template can make us do."""

_SHOWN: Final = 100


def refused(message: str, remedy: str) -> RefusedError:
    """Make the refusal of a template."""
    return RefusedError(
        printable(message, keep=""), remedy=printable(remedy, keep=""), reason="InvalidPodTemplate"
    )


class Template:
    """A pod template; ``raw`` is it, ours to change, ``spec`` its pod.

    :raises RefusedError: it is none; the field is named.
    """

    def __init__(self, raw: Any) -> None:
        if not isinstance(raw, dict):
            raise refused("spec.job.podTemplateSpec is missing", "give the worker's pod template")
        self.raw: dict[str, Any] = raw
        self.metadata = _object(raw, "metadata", "")
        self.spec = _object(raw, "spec", "")
        self.containers = _named(self.spec, "containers")
        self._inits = _named(self.spec, "initContainers")
        self._volumes = _named(self.spec, "volumes")
        if not self.containers:
            raise refused(
                "spec.job.podTemplateSpec.spec.containers is empty", "a Job needs the container of the worker"
            )

    # metadata -----------------------------------------------------------------------------------------

    def label(self, labels: Mapping[str, str]) -> None:
        """Set labels; the template's own of these names give way."""
        _object(self.metadata, "labels", "metadata.").update(labels)

    def annotate(self, annotations: Mapping[str, str]) -> None:
        """Set annotations likewise."""
        _object(self.metadata, "annotations", "metadata.").update(annotations)

    # the container that is dumped ---------------------------------------------------------------------

    def target(self, asked: Any, annotation: str) -> dict[str, Any]:
        """Find the container that is dumped: the one asked for, else ``main``, else the only one.

        ``annotation`` asks too. It is set where the agent would not find the container by itself.
        """
        by_name = {container["name"]: container for container in self.containers}
        annotations = _object(self.metadata, "annotations", "metadata.")
        if not annotations:
            del self.metadata["annotations"]
        named = asked or annotations.get(annotation)
        only = self.containers[0]["name"] if len(self.containers) == 1 else None
        default = names.MAIN_CONTAINER if names.MAIN_CONTAINER in by_name else only
        wanted = named or default
        if wanted is None:
            raise refused(
                f"the pod template has {len(by_name)} containers and none is called {names.MAIN_CONTAINER}",
                "say by spec.job.targetContainerName which one is to be checkpointed",
            )
        if not isinstance(wanted, str) or wanted not in by_name:
            raise refused(
                f"there is no container {str(wanted)[:_SHOWN]!r} in the pod template",
                f"its containers are {', '.join(by_name)}"[: 3 * _SHOWN],
            )
        if wanted != default:
            self.annotate({annotation: wanted})
        return by_name[wanted]

    # what is put in -----------------------------------------------------------------------------------

    def volume(self, volume: dict[str, Any]) -> None:
        """Add a volume; one that is there already must be the same."""
        found = next((one for one in self._volumes if one["name"] == volume["name"]), None)
        if found is None:
            self._volumes.append(volume)
        elif not _covers(found, volume):
            raise refused(
                f"the pod template has a volume {volume['name']} of its own, which is another",
                "rename it, or leave it out: it is put in",
            )

    def mount(self, container: dict[str, Any], mount: dict[str, Any]) -> None:
        """Mount a volume into a container; what is there already must be the same."""
        mounts = _list(container, "volumeMounts", f"{container['name']}.")
        place = mount["mountPath"].rstrip("/")
        for one in mounts:
            if not isinstance(one, dict) or str(one.get("mountPath", "")).rstrip("/") != place:
                continue
            if not _covers({**one, "mountPath": mount["mountPath"]}, mount) or one.get("subPath"):
                raise refused(
                    f"container {container['name']} has another mount at {mount['mountPath']}",
                    f"leave that path to the volume {mount['name']}",
                )
            return
        mounts.append(dict(mount))

    def init_container(self, container: dict[str, Any]) -> None:
        """Add an init container, in place of one of its name."""
        self._inits[:] = [one for one in self._inits if one["name"] != container["name"]]
        if any(one["name"] == container["name"] for one in self.containers):
            raise refused(
                f"a container is called {container['name']}", "rename it: an init container has that name"
            )
        self._inits.append(container)

    def environment(self, container: dict[str, Any], values: Mapping[str, str]) -> None:
        """Set variables of a container; the template's own of these names give way."""
        variables = _list(container, "env", f"{container['name']}.")
        variables[:] = [one for one in variables if not (isinstance(one, dict) and one.get("name") in values)]
        variables += [{"name": name, "value": value} for name, value in values.items()]

    # security -----------------------------------------------------------------------------------------

    def runs_as_user(self) -> bool:
        """Tell whether the pod says as whom its containers run."""
        context = self.spec.get("securityContext")
        return isinstance(context, dict) and any(
            context.get(name) is not None for name in ("runAsUser", "runAsNonRoot")
        )

    def seccomp(self, target: dict[str, Any], profile: dict[str, Any]) -> None:
        """Put the pod under a seccomp profile; the rest of its security context stays as it is.

        A profile of the target's own would be stronger than the pod's, so it goes.
        """
        _object(self.spec, "securityContext", "spec.")["seccompProfile"] = profile
        context = target.get("securityContext")
        if isinstance(context, dict):
            context.pop("seccompProfile", None)


def _object(parent: dict[str, Any], key: str, where: str) -> dict[str, Any]:
    """Take an object out of another, made where it is missing."""
    if parent.get(key) is None:
        parent[key] = {}
    found = parent[key]
    if not isinstance(found, dict):
        raise refused(f"spec.job.podTemplateSpec.{where}{key} is no object", "see 'kubectl explain pod'")
    return found


def _list(parent: dict[str, Any], key: str, where: str) -> list[Any]:
    if parent.get(key) is None:
        parent[key] = []
    found = parent[key]
    if not isinstance(found, list):
        raise refused(f"spec.job.podTemplateSpec: {where}{key} is no list", "see 'kubectl explain pod'")
    return found


def _named(spec: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """Take a list of objects that have names, each another."""
    found = _list(spec, key, "spec.")
    if len(found) > MAX_CONTAINERS:
        raise refused(f"the pod template has {len(found)} {key}", f"{MAX_CONTAINERS} are enough")
    seen = set()
    for one in found:
        name = one.get("name") if isinstance(one, dict) else None
        if not isinstance(name, str) or not name or name in seen:
            raise refused(
                f"spec.job.podTemplateSpec.spec.{key} has an entry without a name of its own",
                "each needs one that no other has",
            )
        seen.add(name)
    return found


def _covers(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Tell whether an object has all that is wanted; what the API server puts in may be there too."""
    for key, value in wanted.items():
        have = found.get(key)
        if isinstance(value, Mapping) and isinstance(have, Mapping):
            if not _covers(have, value):
                return False
        elif key != "items" and have != value:
            return False
    return not found.get("readOnly") or bool(wanted.get("readOnly"))
