"""From a pod's JSON to what it asks of this node's agent. Pure.

Whoever may create pods writes labels, annotations, names and environment, so none of it is believed before it
fits: names and uids pass as what the API server lets through, paths are absolute and bounded, the id passes
:class:`CheckpointId`. What does not fit becomes a :class:`Problem` that is told on the pod.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Any, Final

from hibernode.errors import UsageError
from hibernode.kube.names import CONTROL_DIR, ERAS, MAIN_CONTAINER, TRUE, KubeEra, Word
from hibernode.kube.objects import conditions_of, is_label_value, is_name, is_short_name, metadata_of
from hibernode.placeholder import INSTALLED_NAME
from hibernode.text import printable
from hibernode.workload import ERA_A1, CheckpointId

MAX_PATH: Final = 4096
SHOWN: Final = 63

_UID: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{32}", re.ASCII)
_CONTAINER_ID: Final = re.compile(r"[a-z][-a-z]{0,31}://([0-9a-f]{64})", re.ASCII)

_PREFIX, _A0_PREFIX = "DYN_CHECKPOINT_", "DYNAMO_CHECKPOINT_"
"""Era A0 has the same variables with another beginning."""


class Kind(StrEnum):
    """What a pod asks for."""

    CHECKPOINT = "checkpoint"
    RESTORE = "restore"


@dataclass(frozen=True, slots=True)
class Problem:
    """Why nothing can be done for a pod; as an error has it."""

    reason: str
    message: str
    remedy: str = ""

    def __str__(self) -> str:
        """Say it in one line, the reason first."""
        return f"{self.reason}: {self.message}" + (f"; {self.remedy}" if self.remedy else "")


@dataclass(frozen=True, slots=True)
class Ref:
    """An object of the cluster, for events and patches: the uid tells it from a later one of that name."""

    kind: str
    namespace: str
    name: str
    uid: str
    api_version: str = "v1"


@dataclass(frozen=True, slots=True)
class Told:
    """Paths that the worker is given; empty where it is given none."""

    signal_file: str = ""
    ready_file: str = ""
    restore_marker: str = ""
    control_dir: str = ""


@dataclass(frozen=True, slots=True)
class Ask:
    """A pod of this node that asks for something.

    ``id`` is empty where ``problem`` says why; ``label`` is then what the label has in its place, if that is
    a word. ``container``: the target, or with a ``problem`` the likeliest to be a worker. ``container_id``:
    64 hexadecimal digits of it while it runs, else empty. ``ready``: the kubelet says that it is, by a probe
    of its own. ``over``: the pod has ended or is about to; ``succeeded``: it has, and well.
    ``placeholder``: the target's command is ``hibernode-placeholder``.
    """

    pod: Ref
    kind: Kind
    era: KubeEra
    id: str
    container: str
    container_id: str
    ready: bool
    over: bool
    succeeded: bool
    told: Told
    job: Ref | None = None
    placeholder: bool = False
    problem: Problem | None = None
    label: str = ""


def ask_of(raw: Mapping[str, Any], node: str) -> Ask | None:
    """Read what a pod asks of the agent of ``node``; None for all other pods."""
    metadata, spec, status = metadata_of(raw), _object(raw.get("spec")), _object(raw.get("status"))
    pod = _ref("Pod", metadata)
    if pod is None or spec.get("nodeName") != node:
        return None
    labels, annotations = _strings(metadata.get("labels")), _strings(metadata.get("annotations"))
    asked = [(era, kind) for era in ERAS if (kind := _kind(era, labels)) is not None]
    if not asked:
        return None
    era, kind = asked[0]
    containers = [each for each in _objects(spec.get("containers")) if is_short_name(each.get("name"))]
    chosen, problem = _target(containers, era, annotations)
    id_, wrong = _id(era, labels)
    if len(asked) > 1:
        wrong = Problem(
            reason="AmbiguousLabels",
            message="its labels ask for "
            + " and ".join(f"a {kind} of era {era.name}" for era, kind in asked),
            remedy="keep the labels of one",
        )
    target = chosen or _likeliest(containers)
    name = str(target.get("name", ""))
    container_id, ready = _state(status, name)
    return Ask(
        pod=pod,
        kind=kind,
        era=era,
        id="" if wrong else id_,
        container=name,
        container_id=container_id,
        ready="readinessProbe" in target and (ready or _is_ready(raw)),
        over=status.get("phase") in ("Succeeded", "Failed") or bool(metadata.get("deletionTimestamp")),
        succeeded=status.get("phase") == "Succeeded",
        told=_told_by_spec(target, era),
        job=_job(metadata, pod.namespace),
        placeholder=any(_is_placeholder(word) for word in _words(target)),
        problem=wrong or problem,
        label=next((text for name in era.ids if is_label_value(text := labels.get(name, ""))), "")
        if wrong
        else "",
    )


def _kind(era: KubeEra, labels: Mapping[str, str]) -> Kind | None:
    if labels.get(era.source) == TRUE:
        return Kind.CHECKPOINT
    if era.restore and labels.get(era.restore) == TRUE:
        return Kind.RESTORE
    return Kind.RESTORE if era.restore_by_id and era.ids[0] in labels else None


def _id(era: KubeEra, labels: Mapping[str, str]) -> tuple[str, Problem | None]:
    given = {label: labels[label] for label in era.ids if label in labels}
    if not given:
        return "", Problem(
            reason="NoCheckpointId",
            message="it has no label with a checkpoint id",
            remedy=f"set the label {era.ids[0]}",
        )
    if len(set(given.values())) > 1:
        shown = " and ".join(f"{label}={_shown(value)}" for label, value in given.items())
        return "", Problem(
            reason="AmbiguousLabels", message=f"its labels name two ids: {shown}", remedy="keep one of them"
        )
    ((label, value),) = list(given.items())[:1]
    try:
        return str(CheckpointId(value)), None
    except UsageError as error:
        return "", Problem(error.reason, f"label {label}: {error.message}", error.remedy)


def _target(
    containers: list[Mapping[str, Any]], era: KubeEra, annotations: Mapping[str, str]
) -> tuple[Mapping[str, Any] | None, Problem | None]:
    """Choose the container that is meant: the annotated one, else ``main``, else the only one."""
    by_name = {str(each["name"]): each for each in containers}
    shown = ", ".join(by_name) or "none"
    if era.target_containers and era.target_containers in annotations:
        names = [name.strip() for name in annotations[era.target_containers].split(",")]
        if len(names) == 1 and names[0] in by_name:
            return by_name[names[0]], None
        why = f"{era.target_containers}={_shown(annotations[era.target_containers])}"
        return None, Problem(
            reason="InvalidTargetContainer",
            message=f"{why} does not name exactly one container of it; there is {shown}",
            remedy="name the worker's container, and no other",
        )
    if MAIN_CONTAINER in by_name:
        return by_name[MAIN_CONTAINER], None
    if len(by_name) == 1:
        return containers[0], None
    return None, Problem(
        reason="AmbiguousTarget",
        message=f"none of its {len(by_name)} containers is called {MAIN_CONTAINER}; there is {shown}",
        remedy=f"call the worker's container {MAIN_CONTAINER}"
        + (f", or name it in the annotation {era.target_containers}" if era.target_containers else ""),
    )


def _likeliest(containers: list[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Choose who is to be told that nobody can be chosen: one with a signal file, else the first."""
    waiting = [each for each in containers if _told_by_env(each).signal_file]
    return next(iter([*waiting, *containers]), {})


def told(env: Mapping[str, str]) -> Told:
    """Read the contract's paths out of an environment, of a pod's spec or of a process."""
    named = {
        name.replace(_A0_PREFIX, _PREFIX, 1) if name.startswith(_A0_PREFIX) else name: value
        for name, value in env.items()
    }
    return Told(
        signal_file=_path(named.get(ERA_A1.env_signal_file)),
        ready_file=_path(named.get(ERA_A1.env_ready_file)) or _path(named.get(ERA_A1.later_env_ready_file)),
        restore_marker=_path(named.get(ERA_A1.env_restore_marker)),
        control_dir=_path(named.get(ERA_A1.later_env_control_dir)),
    )


def completed(ask: Ask, seen: Told) -> Told:
    """Say what holds for a worker: what its spec gives, else what it runs with, else the era's defaults."""
    mine, era = ask.told, ask.era
    control_dir = mine.control_dir or seen.control_dir
    ready = mine.ready_file or seen.ready_file
    if not ready:
        inside = f"{control_dir.rstrip('/')}/{era.ready_file}" if control_dir else ""
        ready = inside if era.word is Word.SENTINEL else era.ready_file
    marker = mine.restore_marker or seen.restore_marker
    return Told(
        signal_file=mine.signal_file or seen.signal_file,
        ready_file=ready,
        restore_marker=marker or (ERA_A1.restore_marker if era.word is Word.FILE else ""),
        control_dir=control_dir,
    )


def _told_by_env(container: Mapping[str, Any]) -> Told:
    env: dict[str, str] = {}
    for entry in _objects(container.get("env")):
        name, value = entry.get("name"), entry.get("value")
        # What refers to other variables is only known where it runs.
        if isinstance(name, str) and isinstance(value, str) and "$(" not in value:
            env[name] = value
    return told(env)


def _told_by_spec(container: Mapping[str, Any], era: KubeEra) -> Told:
    found = _told_by_env(container)
    mounts = [str(each.get("mountPath")).rstrip("/") for each in _objects(container.get("volumeMounts"))]
    if era.word is Word.SENTINEL and not found.control_dir and CONTROL_DIR in mounts:
        return replace(found, control_dir=CONTROL_DIR)
    return found


def _state(status: Mapping[str, Any], name: str) -> tuple[str, bool]:
    """Tell the id of a container that runs, and whether the kubelet calls it ready."""
    for each in _objects(status.get("containerStatuses")):
        if each.get("name") == name and name and "running" in _object(each.get("state")):
            match = _CONTAINER_ID.fullmatch(str(each.get("containerID")))
            return (match[1] if match else ""), each.get("ready") is True
    return "", False


def _is_ready(raw: Mapping[str, Any]) -> bool:
    found = [each for each in conditions_of(raw) if isinstance(each, dict) and each.get("type") == "Ready"]
    return any(each.get("status") == "True" for each in found)


def _job(metadata: Mapping[str, Any], namespace: str) -> Ref | None:
    """Find the Job that controls a pod."""
    for owner in _objects(metadata.get("ownerReferences")):
        version = str(owner.get("apiVersion"))
        if owner.get("kind") == "Job" and version.startswith("batch/") and owner.get("controller") is True:
            return _ref("Job", {**owner, "namespace": namespace}, "batch/v1")
    return None


def _ref(kind: str, metadata: Mapping[str, Any], api_version: str = "v1") -> Ref | None:
    namespace, name, uid = (metadata.get(key) for key in ("namespace", "name", "uid"))
    if is_name(namespace) and is_name(name) and _fits(_UID, uid):
        return Ref(kind, str(namespace), str(name), str(uid), api_version)
    return None


def _words(container: Mapping[str, Any]) -> Iterable[object]:
    command = container.get("command")
    return command if isinstance(command, list) else ()


def _is_placeholder(word: object) -> bool:
    return isinstance(word, str) and PurePosixPath(word).name == INSTALLED_NAME


def _fits(pattern: re.Pattern[str], value: object) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def _path(value: str | None) -> str:
    """Let an absolute path through; anything else counts as not given."""
    fits = value and value.startswith("/") and "\0" not in value and len(value) <= MAX_PATH
    return value if fits and value else ""


def _shown(value: str) -> str:
    return printable(repr(value if len(value) <= SHOWN else value[:SHOWN] + "..."))


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _objects(value: object) -> list[Mapping[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _strings(value: object) -> dict[str, str]:
    return {key: text for key, text in _object(value).items() if isinstance(text, str)}
