"""The nouns of the store and the names of its parts.

::

    <store>/<id>/                     the current artifact: manifest.json, checkpoint.done, images/ ...
    <store>/.previous/<id>/<uuid>/    older artifacts, moved there by publish
    <store>/.staging/<id>.<uuid>/     work under way: journal.json, lock, artifact/ (what will be published)
    <store>/.locks/<id>               who uses this id (flock)
    <store>/.pins/<id>                an empty file: gc leaves this id alone

All directories are 0700, all files 0600.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Final

from hibernode.artifact.manifest import (
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    UUID_PATTERN,
    Manifest,
    parse_manifest,
    rfc3339,
)
from hibernode.errors import IntegrityError, RefusedError
from hibernode.host.safefs import Dir
from hibernode.workload import ID_PATTERN, CheckpointId

STAGING: Final = ".staging"
PREVIOUS: Final = ".previous"
LOCKS: Final = ".locks"
PINS: Final = ".pins"
PARTS: Final = (STAGING, PREVIOUS, LOCKS, PINS)

LOCK_FILE: Final = "lock"
ARTIFACT: Final = "artifact"
"""In a staging directory: what will be published."""

IMAGES: Final = "images"
"""In an artifact: what CRIU has written."""

OWED: Final = "owed"
"""A file in a staging directory that must stay, though nobody works on it: its worker is not as it was."""

NEW_PREFIX: Final = ".new."
"""In .staging: a directory that is not locked yet."""

TRASH_PREFIX: Final = ".trash."
"""In .staging: what gc is removing; it has lost its name already."""

_STAGING_NAME: Final = re.compile(rf"({ID_PATTERN.pattern})\.({UUID_PATTERN.pattern})", re.ASCII)


class ArtifactState(StrEnum):
    """What stands in the store."""

    COMPLETE = "complete"
    """Under its final name and whole, as far as names and sizes tell."""

    PREVIOUS = "previous"
    """Whole, but a newer one of the same id has taken its place."""

    PARTIAL = "partial"
    """Nobody works on it any more and it was never finished."""

    CORRUPT = "corrupt"
    """Was whole once: the manifest is damaged, or a file is not as it says."""

    IN_PROGRESS = "in-progress"
    """A staging directory with a live owner."""


@dataclass(frozen=True, slots=True)
class Artifact:
    """A published artifact. ``path`` is its directory, for outside programs."""

    path: Path
    manifest: Manifest
    pinned: bool


@dataclass(frozen=True, slots=True)
class ArtifactInfo:
    """One row of the store's list. ``bytes``: of its files; ``created_at``: RFC 3339, UTC; sorts by time.

    ``problem`` says what is wrong with one that is partial or corrupt. ``container``: the name in its pod, or
    the id, of the container that was dumped; empty for a process of the node.
    """

    id: CheckpointId
    uuid: str
    state: ArtifactState
    path: Path
    bytes: int
    created_at: str
    pinned: bool = False
    problem: str = ""
    container: str = ""

    @property
    def created_unix(self) -> float:
        """``created_at`` in seconds since 1970."""
        return datetime.fromisoformat(self.created_at).timestamp()


def moment(seconds: float) -> str:
    """Write seconds since 1970 as ``ArtifactInfo.created_at`` has them."""
    return rfc3339(datetime.fromtimestamp(seconds, UTC))


def split_staging(name: str) -> tuple[CheckpointId, str] | None:
    """Take the id and the uuid from a staging directory's name; None: it is none."""
    match = _STAGING_NAME.fullmatch(name)
    return (CheckpointId(match[1]), match[2]) if match else None


def exists(directory: Dir, path: str) -> bool:
    """Whether something stands under ``path``, whatever it is."""
    try:
        directory.stat(path)
    except FileNotFoundError:
        return False
    except RefusedError:  # a link or a file stands where a directory should
        return True
    return True


def load_manifest(top: Dir, id_: CheckpointId, uuid: str = "") -> Manifest:
    """Read the manifest of the artifact in ``top``, which must be of ``id_`` and, if given, ``uuid``.

    :raises IntegrityError: there is none (reason ``ArtifactPartial``), or it is damaged or another's.
    """
    path = top.path / MANIFEST_NAME
    try:
        content = top.read(MANIFEST_NAME, MAX_MANIFEST_BYTES)
    except FileNotFoundError:
        raise IntegrityError(
            f"{top.path}: there is no {MANIFEST_NAME}, so this was never finished",
            remedy="'hibernode gc' removes it; take the checkpoint again",
            reason="ArtifactPartial",
            path=str(path),
        ) from None
    except RefusedError as error:
        raise IntegrityError(error.message, remedy=error.remedy, path=str(path)) from None
    manifest = parse_manifest(content.data, source=str(path))
    for field, found, expected in (("id", manifest.id, id_), ("uuid", manifest.uuid, uuid or manifest.uuid)):
        if found != expected:
            raise IntegrityError(
                f"{path}: {field} is {found}, but it stands where {expected} belongs",
                remedy="something moved it by hand; move it back or take the checkpoint again",
                path=str(path),
            )
    return manifest


def entries(top: Dir, prefix: str = "", depth: int = 8) -> Iterator[tuple[str, int, int]]:
    """Yield (path, mode, size) of all that is below ``top`` but directories; nothing is followed.

    A directory ``depth`` levels down is yielded itself. What vanishes meanwhile is left out.
    """
    inner: list[str] = []
    for entry in top.scan():
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue
        if stat.S_ISDIR(status.st_mode) and depth:
            inner.append(entry.name)
        else:
            yield prefix + entry.name, status.st_mode, status.st_size
    for name in inner:
        with suppress(FileNotFoundError), top.subdir(name) as directory:
            yield from entries(directory, f"{prefix}{name}/", depth - 1)


def tree_bytes(top: Dir) -> int:
    """Add up the sizes of the regular files in a tree."""
    return sum(size for _, mode, size in entries(top) if stat.S_ISREG(mode))
