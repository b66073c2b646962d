"""Work under way, and the steps that turn it into a published artifact.

Publish is built so that a kill -9 or a power loss at any instant leaves the final name whole or absent:

1. seal: the files are synced, then the directories that name them, then the manifest is written and
   synced. A manifest on disk thus means that all it lists is on disk.
2. ``artifact`` gets the name ``.publishing``, so that from here on nobody takes for garbage what may be the
   artifact that was replaced.
3. one rename gives it the final name; where an artifact stands already, one exchange of the two.
4. the parents are synced, then the old one moves from ``.publishing`` to ``.previous``.

NFS cannot exchange. There the old one moves to ``.replaced`` first, and for the moment until the next
rename the id is absent, never partial. :func:`put_aside` brings it back after a kill in that moment.
"""

from __future__ import annotations

import errno
import os
import uuid as uuids
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from hibernode.artifact import links
from hibernode.artifact.layout import (
    ARTIFACT,
    IMAGES,
    LOCK_FILE,
    NEW_PREFIX,
    PREVIOUS,
    STAGING,
    exists,
    load_manifest,
)
from hibernode.artifact.locks import Lock, take
from hibernode.artifact.manifest import MANIFEST_NAME, Manifest, manifest_bytes
from hibernode.artifact.verify import check_tree, first_problem
from hibernode.errors import HibernodeError, IntegrityError, StorageError
from hibernode.host.safefs import Dir, chmod_tree, sync_tree
from hibernode.workload import CheckpointId

PUBLISHING: Final = ".publishing"
"""The artifact on its way to its final name; after an exchange, the one that stood there."""

REPLACED: Final = ".replaced"
"""The one that stood there, on file systems that cannot exchange."""

_TAKEN: Final = frozenset({errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR})
"""What rename(2) of a directory says when the new name is taken, by a directory or by something else."""


@dataclass(slots=True)
class Staging:
    """A staging directory of the store ``root`` that this process owns until :meth:`close`."""

    id: CheckpointId
    uuid: str
    dir: Dir
    root: Dir
    lock: Lock

    @property
    def path(self) -> Path:
        """The directory, for outside programs."""
        return self.dir.path

    @property
    def artifact_path(self) -> Path:
        """What will be published, for outside programs."""
        return self.dir.path / ARTIFACT

    @property
    def images(self) -> Path:
        """Where CRIU's images go."""
        return self.artifact_path / IMAGES

    def artifact(self) -> Dir:
        """Open what will be published; close it after use."""
        return self.dir.subdir(ARTIFACT)

    def published(self) -> bool:
        """Whether what was staged here is in the store, as the current artifact or as an older one."""
        if exists(self.root, f"{PREVIOUS}/{self.id}/{self.uuid}"):
            return True
        return _uuid_of(self.root, self.id, self.id) == self.uuid

    def close(self) -> None:
        """Give it up. What is left in it stays for whoever recovers it; :func:`discard` removes it."""
        self.dir.close()
        self.lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def create(root: Dir, id_: CheckpointId) -> Staging:
    """Make a new staging directory in the store ``root``, locked from its first instant."""
    uuid = uuids.uuid4().hex
    fresh, name = f"{NEW_PREFIX}{uuid}", f"{id_}.{uuid}"
    with root.subdir(STAGING) as parent:
        directory = parent.subdir(fresh, create=True)
        lock: Lock | None = None
        try:
            # It gets the name that others look for only when the lock is held: one without a lock is dead.
            lock = take(directory, LOCK_FILE, name)
            with directory.subdir(ARTIFACT, create=True) as artifact:
                artifact.subdir(IMAGES, create=True).close()
            parent.rename(fresh, name, replace=True)
            parent.fsync()
        except BaseException:
            directory.close()
            if lock is not None:
                lock.close()
            with suppress(OSError, HibernodeError):
                parent.remove_tree(fresh)
            raise
        directory.path = parent.path / name
    return Staging(id_, uuid, directory, root, lock)


def adopt(root: Dir, id_: CheckpointId, uuid: str) -> Staging:
    """Take over a staging directory whose owner is dead.

    :raises BusyError: its owner lives.
    :raises FileNotFoundError: it is gone.
    """
    name = f"{id_}.{uuid}"
    directory = root.subdir(f"{STAGING}/{name}")
    try:
        lock = take(directory, LOCK_FILE, name)
    except BaseException:
        directory.close()
        raise
    staging = Staging(id_, uuid, directory, root, lock)
    if not os.fstat(lock.fd).st_nlink:
        staging.close()
        raise FileNotFoundError(errno.ENOENT, "removed by whoever held it before", str(directory.path))
    return staging


def seal(staging: Staging, manifest: Manifest) -> None:
    """Close the staged files to others, make them survive a power loss, then write the manifest.

    :raises IntegrityError: the manifest is of other work.
    """
    if (manifest.id, manifest.uuid) != (staging.id, staging.uuid):
        raise IntegrityError(
            f"{staging.path}: the manifest is of {manifest.id}.{manifest.uuid}",
            remedy="this is a fault of hibernode itself",
            path=str(staging.path),
        )
    with staging.artifact() as artifact:
        chmod_tree(artifact)
        # The order is the point: contents, then the directories that name them, then the manifest. Sealed
        # the other way round, a power loss could leave a manifest without what it lists.
        sync_tree(artifact)
        artifact.write_atomic(MANIFEST_NAME, manifest_bytes(manifest), 0o600)


def publish(staging: Staging) -> None:
    """Give the sealed artifact its final name; the caller holds the id's lock.

    After a kill in the middle it can be called again.

    :raises IntegrityError: it was not sealed, or a file is not as the manifest says.
    """
    top, root, id_ = staging.dir, staging.root, staging.id
    ready = PUBLISHING if _uuid_of(top, PUBLISHING, id_) == staging.uuid else ARTIFACT
    try:
        with top.subdir(ready) as artifact:
            manifest = load_manifest(artifact, id_, staging.uuid)
            problem = first_problem(check_tree(artifact, manifest, digests=False))
    except FileNotFoundError:
        problem = "there is nothing to publish"
    if problem:
        raise IntegrityError(
            f"{staging.path}: {problem}", remedy="take the checkpoint again", path=str(staging.path)
        )
    if ready == ARTIFACT:
        top.rename(ARTIFACT, PUBLISHING, replace=True)
        top.fsync()
    _swap_in(staging)
    # Both parents: a power loss may now keep the new name or the old, but not neither. Only then does the
    # old artifact leave the place where recovery looks for it.
    root.fsync()
    top.fsync()
    put_aside(staging)


def _swap_in(staging: Staging) -> None:
    top, root, id_ = staging.dir, staging.root, staging.id
    try:
        # rename(2) puts a directory in the place of nothing but an empty one, so this needs no
        # RENAME_NOREPLACE, which NFS does not have.
        top.rename(PUBLISHING, id_, replace=True, to=root)
    except OSError as error:
        if error.errno not in _TAKEN:
            raise
    else:
        return
    try:
        top.rename(PUBLISHING, id_, exchange=True, to=root)
    except StorageError as error:
        if error.reason != "RenameUnsupported":
            raise
        root.rename(id_, REPLACED, replace=True, to=top)
        top.rename(PUBLISHING, id_, replace=True, to=root)


def put_aside(staging: Staging) -> None:
    """Give a replaced artifact a place outside the staging directory; the caller holds the id's lock.

    That is its final name again if nothing has taken it, else ``.previous``. What is damaged never gets a
    final name.
    """
    top, root, id_ = staging.dir, staging.root, staging.id
    for name in (REPLACED, PUBLISHING):
        uuid = _uuid_of(top, name, id_)
        if not exists(top, name) or uuid == staging.uuid:
            continue
        if uuid and not exists(root, id_):
            top.rename(name, id_, replace=True, to=root)
            root.fsync()
        else:
            with root.subdir(PREVIOUS) as previous, previous.subdir(id_, create=True) as versions:
                # One that is damaged, or whose name is taken, gets a name of its own.
                free = uuid and not exists(versions, uuid)
                top.rename(name, uuid if free else uuids.uuid4().hex, replace=True, to=versions)
                versions.fsync()
                previous.fsync()
        top.fsync()


def is_stranded(directory: Dir) -> bool:
    """Whether a replaced artifact waits in this staging directory, or may do so."""
    return exists(directory, REPLACED) or exists(directory, PUBLISHING)


def discard(staging: Staging) -> None:
    """Remove what was staged, but never an artifact that it has replaced; the caller holds the id's lock."""
    put_aside(staging)
    if not staging.published():
        links.forget_staged(staging.dir, staging.uuid)
    with staging.root.subdir(STAGING) as parent:
        parent.remove_tree(staging.path.name)


def _uuid_of(directory: Dir, name: str, id_: CheckpointId) -> str:
    """Read the uuid of the artifact ``name``; empty when there is none or it is damaged."""
    try:
        with directory.subdir(name) as artifact:
            return load_manifest(artifact, id_).uuid
    except (OSError, HibernodeError):
        return ""
