"""What is in the store: found, described, never followed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hibernode.artifact.layout import (
    LOCK_FILE,
    OWED,
    PINS,
    PREVIOUS,
    STAGING,
    ArtifactInfo,
    ArtifactState,
    exists,
    load_manifest,
    moment,
    split_staging,
    tree_bytes,
)
from hibernode.artifact.locks import is_free
from hibernode.artifact.verify import check_tree, first_problem
from hibernode.errors import IntegrityError, RefusedError
from hibernode.host.safefs import Dir
from hibernode.workload import ID_PATTERN, CheckpointId

_ORDER: Final = tuple(ArtifactState)


@dataclass(frozen=True, slots=True)
class StagingInfo:
    """A staging directory and whether a living process owns it."""

    path: Path
    id: CheckpointId
    uuid: str
    owner_alive: bool


def is_pinned(root: Dir, id_: CheckpointId) -> bool:
    """Whether retention must leave ``id_`` alone."""
    return exists(root, f"{PINS}/{id_}")


def version_names(root: Dir, id_: CheckpointId) -> list[str]:
    """List the names of the older artifacts of ``id_``."""
    try:
        with root.subdir(f"{PREVIOUS}/{id_}") as versions:
            return sorted(versions.names())
    except FileNotFoundError:
        return []


def staging_names(root: Dir) -> list[tuple[CheckpointId, str]]:
    """List the staging directories as (id, uuid)."""
    with root.subdir(STAGING) as parent:
        return sorted(filter(None, map(split_staging, parent.names())))


def stagings(root: Dir) -> Iterator[StagingInfo]:
    """Look at each staging directory."""
    for id_, uuid in staging_names(root):
        with suppress(FileNotFoundError), root.subdir(f"{STAGING}/{id_}.{uuid}") as directory:
            alive = not is_free(directory, LOCK_FILE)
            yield StagingInfo(directory.path, id_, uuid, alive)


def artifacts(root: Dir) -> list[ArtifactInfo]:
    """List all that is in the store, by id, the current artifact first."""
    names = set(root.names())
    with root.subdir(PREVIOUS) as previous:
        names.update(previous.names())
    found: list[ArtifactInfo | None] = []
    for id_ in (CheckpointId(name) for name in names if ID_PATTERN.fullmatch(name)):
        found.append(describe(root, id_, str(id_)))
        found += [describe(root, id_, f"{PREVIOUS}/{id_}/{name}") for name in version_names(root, id_)]
    found += [_describe_staging(root, info) for info in stagings(root)]
    return sorted(filter(None, found), key=lambda info: (info.id, _ORDER.index(info.state), info.created_at))


def describe(root: Dir, id_: CheckpointId, path: str) -> ArtifactInfo | None:
    """Describe the artifact of ``id_`` at ``path`` below the store: names and sizes are checked.

    None: nothing is there any more.
    """
    state = ArtifactState.COMPLETE if path == id_ else ArtifactState.PREVIOUS
    uuid = "" if path == id_ else path.rpartition("/")[2]
    size, container = 0, ""
    try:
        created = moment(root.stat(path).st_mtime)
        try:
            with root.subdir(path) as top:
                size = tree_bytes(top)
                manifest = load_manifest(top, id_, uuid)
                uuid, created = manifest.uuid, manifest.created_at
                if manifest.container is not None:
                    container = manifest.container.name or manifest.container.id
                problem = first_problem(check_tree(top, manifest, digests=False))
        except (IntegrityError, RefusedError) as error:
            problem = error.message
            state = ArtifactState.PARTIAL if error.reason == "ArtifactPartial" else ArtifactState.CORRUPT
        else:
            state = ArtifactState.CORRUPT if problem else state
    except FileNotFoundError:
        return None
    pinned = is_pinned(root, id_)
    return ArtifactInfo(id_, uuid, state, root.path / path, size, created, pinned, problem, container)


def _describe_staging(root: Dir, info: StagingInfo) -> ArtifactInfo | None:
    path = f"{STAGING}/{info.path.name}"
    try:
        created = moment(root.stat(path).st_mtime)
        with root.subdir(path) as directory:
            size = tree_bytes(directory)
            owed = exists(directory, OWED)
    except FileNotFoundError:
        return None
    alive = info.owner_alive
    state = ArtifactState.IN_PROGRESS if alive or owed else ArtifactState.PARTIAL
    problem = "" if alive else f"whoever worked on it is gone{', and its worker is off the GPU' * owed}"
    return ArtifactInfo(info.id, info.uuid, state, info.path, size, created, problem=problem)
