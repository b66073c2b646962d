"""The store: where artifacts live, from the first byte of a dump to their removal.

Everything here blocks; run what takes long (seal, publish, verify, gc) in a thread. The directories are in
:mod:`hibernode.artifact.layout`, how publish survives a kill is in :mod:`hibernode.artifact.staging`.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Final, Self

from hibernode.artifact import links, listing
from hibernode.artifact import staging as steps
from hibernode.artifact.gc import GcItem, collect
from hibernode.artifact.layout import (
    ARTIFACT,
    LOCKS,
    NEW_PREFIX,
    PARTS,
    PINS,
    PREVIOUS,
    STAGING,
    TRASH_PREFIX,
    Artifact,
    ArtifactInfo,
    ArtifactState,
    entries,
    exists,
    load_manifest,
)
from hibernode.artifact.listing import StagingInfo
from hibernode.artifact.locks import is_free, take
from hibernode.artifact.manifest import Manifest
from hibernode.artifact.staging import Staging
from hibernode.artifact.verify import FileVerdict, check_tree
from hibernode.errors import (
    BusyError,
    IntegrityError,
    NotFoundError,
    RefusedError,
    StorageError,
    UsageError,
)
from hibernode.host import safefs
from hibernode.host.safefs import Dir
from hibernode.settings import GcSettings
from hibernode.workload import CheckpointId

__all__ = [
    "ARTIFACT",
    "Artifact",
    "ArtifactInfo",
    "ArtifactState",
    "FileVerdict",
    "GcItem",
    "Staging",
    "StagingInfo",
    "Store",
    "entries",
]

log = logging.getLogger("hibernode.store")

NEW_MAX_AGE_SECONDS: Final = 3600.0
"""A staging directory is locked within milliseconds of its making; one this old without a lock is dead."""

_VERSION: Final = re.compile(r"[0-9a-f]{8,32}", re.ASCII)
_SEE_LIST: Final = "'hibernode list' shows what is there"


class Store:
    """The store at ``path``; :meth:`open` it before anything else. Its methods may be called from threads.

    Ids pass the gate in every method: a text that is none is a UsageError and never becomes a path.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._root = Dir(-1, path)
        self._held: set[CheckpointId] = set()
        self._mutex = threading.Lock()

    def open(self) -> Self:
        """Open the store, making what is missing, and finish the moves that a kill has cut short.

        :raises RefusedError: the directory is not private, reason ``StoreNotPrivate``.
        :raises StorageError: it cannot be made or opened.
        """
        try:
            root = Dir.open(self.path, create=True)
        except OSError as error:
            raise StorageError(
                f"store {self.path}: {error.strerror}",
                remedy="store.path must name a directory that this user can make or write to",
                path=str(self.path),
            ) from error
        self.close()
        self._root = root
        try:
            self._check_private()
            for part in PARTS:
                root.subdir(part, create=True).close()
            self._bring_back()
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """Close the store; a second call does nothing."""
        self._root.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def free_bytes(self) -> int:
        """Return the space that the store's file system has left, in bytes."""
        return safefs.free_bytes(self._root.fd)

    def _check_private(self) -> None:
        status = os.fstat(self._root.fd)
        mode, us = stat.S_IMODE(status.st_mode), os.geteuid()
        if status.st_uid != us:
            why = f"belongs to uid {status.st_uid}, not {us}"
        elif mode & 0o077:
            why = f"has mode {mode:04o}, which lets others in"
        else:
            return
        raise RefusedError(
            f"store {self.path} {why}",
            remedy=f"images hold a worker's memory: chown {us} {self.path} && chmod 0700 {self.path}",
            reason="StoreNotPrivate",
            path=str(self.path),
            mode=mode,
            uid=status.st_uid,
        )

    def _bring_back(self) -> None:
        for id_, uuid in listing.staging_names(self._root):
            try:
                with self._root.subdir(f"{STAGING}/{id_}.{uuid}") as directory:
                    if not steps.is_stranded(directory):
                        continue
                with steps.adopt(self._root, id_, uuid) as staging, self._exclusive(id_):
                    steps.put_aside(staging)
            except (BusyError, FileNotFoundError):
                continue  # whoever is at it will do it

    # locks ----------------------------------------------------------------------------------------------

    @contextmanager
    def lock(self, id_: CheckpointId, *, wait: bool = False, shared: bool = False) -> Iterator[None]:
        """Hold ``id_`` against every other process, and against other callers in this one.

        ``shared``: together with others that share it; publish and gc then stay out.

        :raises BusyError: somebody holds it; ``fields["pid"]`` says who, where that is known.
        """
        id_ = CheckpointId(id_)
        with self._root.subdir(LOCKS) as locks:
            lock = take(locks, id_, id_, shared=shared, wait=wait)
        try:
            if not shared:
                with self._mutex:
                    self._held.add(id_)
            yield
        finally:
            if not shared:
                with self._mutex:
                    self._held.discard(id_)
            lock.close()

    def _exclusive(self, id_: CheckpointId) -> AbstractContextManager[None]:
        """Take the id's lock, unless the work that called this holds it already."""
        return nullcontext() if id_ in self._held else self.lock(id_)

    # from staging to artifact ---------------------------------------------------------------------------

    def stage(self, id_: CheckpointId, *, min_free_bytes: int = 0) -> Staging:
        """Make a staging directory for ``id_``; it belongs to the caller until closed.

        :raises RefusedError: less than ``min_free_bytes`` are free, reason ``NoSpace``.
        """
        id_ = CheckpointId(id_)
        free = self.free_bytes()
        if free < min_free_bytes:
            raise RefusedError(
                f"store {self.path} has {free} bytes free; {min_free_bytes} must be",
                remedy="'hibernode gc' removes what may go; or lower store.min_free_bytes",
                reason="NoSpace",
                free=free,
                limit=min_free_bytes,
            )
        return steps.create(self._root, id_)

    def stagings(self) -> list[StagingInfo]:
        """List the staging directories."""
        return list(listing.stagings(self._root))

    def orphans(self) -> Iterator[Staging]:
        """Take over each staging directory whose owner is dead; the caller closes them."""
        for id_, uuid in listing.staging_names(self._root):
            try:
                staging = steps.adopt(self._root, id_, uuid)
            except (BusyError, FileNotFoundError):
                continue
            yield staging

    def seal(self, staging: Staging, manifest: Manifest) -> None:
        """Make the staged files private and lasting, then write the manifest: the sign that all is there.

        :raises IntegrityError: the manifest's id or uuid is not the staging's.
        :raises RefusedError: a staged file has another name elsewhere (hard link).
        """
        steps.seal(staging, manifest)

    def publish(self, staging: Staging, id_: CheckpointId) -> Artifact:
        """Give what was sealed its final name, by one rename; what stood there becomes a previous one.

        It may be called again after a kill. The staging directory, with the journal, stays.

        :raises BusyError: the id is in use by another than the caller.
        :raises IntegrityError: it was not sealed, or a file is not as the manifest says.
        """
        id_ = CheckpointId(id_)
        if id_ != staging.id:
            raise UsageError(f"{staging.path} was staged for {staging.id}, not {id_}")
        with self._exclusive(id_):
            if not staging.published():
                steps.publish(staging)
        return self.get(id_, staging.uuid)

    def discard(self, staging: Staging) -> None:
        """Remove a staging directory; an artifact that was replaced from it is kept."""
        if not steps.is_stranded(staging.dir):
            steps.discard(staging)
            return
        try:
            with self._exclusive(staging.id):
                steps.discard(staging)
        except BusyError as error:
            log.warning("%s stays until the next gc: %s", staging.path, error.message)

    # looking --------------------------------------------------------------------------------------------

    def get(self, id_: CheckpointId, version: str | None = None) -> Artifact:
        """Find an artifact, reading its manifest only; :meth:`verify` looks at the files.

        ``version``: its uuid, or the first 8 digits or more of it; else the current one.

        :raises NotFoundError: there is none.
        :raises IntegrityError: it is partial (reason ``ArtifactPartial``) or its manifest is damaged.
        """
        id_ = CheckpointId(id_)
        path = self._find(id_, version) if version else str(id_)
        try:
            with self._root.subdir(path) as top:
                manifest = load_manifest(top, id_, "" if path == id_ else top.path.name)
                return Artifact(top.path, manifest, listing.is_pinned(self._root, id_))
        except FileNotFoundError:
            raise NotFoundError(
                f"{id_} is not in the store {self.path}", remedy=_SEE_LIST, id=str(id_)
            ) from None
        except RefusedError as error:
            raise IntegrityError(error.message, remedy=error.remedy, path=str(self.path / path)) from None

    def _find(self, id_: CheckpointId, version: str) -> str:
        if _VERSION.fullmatch(version) is None:
            raise UsageError(
                f"{version[:40]!r} is not a version", remedy="it is 8 to 32 hexadecimal digits of the uuid"
            )
        found: list[str] = []
        with suppress(NotFoundError, IntegrityError):
            if self.get(id_).manifest.uuid.startswith(version):
                found.append(str(id_))
        names = listing.version_names(self._root, id_)
        found += [f"{PREVIOUS}/{id_}/{name}" for name in names if name.startswith(version)]
        if len(found) == 1:
            return found[0]
        raise NotFoundError(
            f"{id_} has {'several versions' if found else 'no version'} {version}",
            remedy=_SEE_LIST,
            id=str(id_),
        )

    def artifacts(self) -> list[ArtifactInfo]:
        """List all that is in the store, whole or not, by id. Sizes are checked, contents are not."""
        return listing.artifacts(self._root)

    def verify(self, artifact: Artifact, *, digests: bool, workers: int = 0) -> list[FileVerdict]:
        """Compare an artifact with its manifest, file by file; what does not belong there is not ok either.

        ``workers``: threads that hash, 0 for one a core.

        :raises NotFoundError: it is gone by now.
        """
        try:
            with self._root.subdir(str(artifact.path.relative_to(self.path))) as top:
                return check_tree(top, artifact.manifest, digests=digests, workers=workers)
        except FileNotFoundError:
            raise NotFoundError(f"{artifact.path} is gone", remedy=_SEE_LIST) from None

    # keeping and removing -------------------------------------------------------------------------------

    def pin(self, id_: CheckpointId) -> None:
        """Keep all artifacts of ``id_`` whatever the retention rules say.

        :raises NotFoundError: there is none.
        """
        id_ = CheckpointId(id_)
        if not exists(self._root, id_) and not listing.version_names(self._root, id_):
            raise NotFoundError(f"{id_} is not in the store {self.path}", remedy=_SEE_LIST)
        with self._root.subdir(PINS) as pins:
            pins.write_atomic(id_, b"", 0o600)

    def unpin(self, id_: CheckpointId) -> None:
        """Let the retention rules apply to ``id_``; nothing happens if they do already."""
        with self._root.subdir(PINS) as pins:
            pins.unlink(CheckpointId(id_))
            pins.fsync()

    def gc(self, policy: GcSettings, *, dry_run: bool, now: float) -> list[GcItem]:
        """Remove what ``policy`` lets go, see :func:`hibernode.artifact.gc.collect`; returns what went.

        Nothing goes that is pinned, under way, or whose id somebody holds, a restore for one. ``now``:
        seconds since 1970.
        """
        if not dry_run:
            self._sweep()
        return collect(
            self.artifacts(),
            policy,
            free_bytes=self.free_bytes(),
            now=now,
            remove=self._could_go if dry_run else self._remove,
        )

    def remove(self, id_: CheckpointId) -> list[ArtifactInfo]:
        """Remove every artifact of ``id_``; returns those that stay: pinned, under way, or in use."""
        for info in self.artifacts():
            if info.id == id_ and not info.pinned:
                self._remove(info)
        return [info for info in self.artifacts() if info.id == id_]

    def _sweep(self) -> None:
        """Remove what interrupted work of ours has left in .staging under no id."""
        with self._root.subdir(STAGING) as parent:
            for name in parent.names():
                with suppress(FileNotFoundError):
                    old = time.time() - parent.stat(name).st_mtime > NEW_MAX_AGE_SECONDS
                    if name.startswith(TRASH_PREFIX) or (name.startswith(NEW_PREFIX) and old):
                        self._empty(parent, name)

    @staticmethod
    def _empty(parent: Dir, name: str) -> None:
        """Remove what has lost its place in the store, and its links outside."""
        with suppress(OSError, RefusedError), parent.subdir(name) as top:
            links.forget_of(top)
        parent.remove_tree(name)

    def _could_go(self, info: ArtifactInfo) -> bool:
        with self._root.subdir(LOCKS) as locks:
            return info.path.parent.name == STAGING or is_free(locks, info.id)

    def _remove(self, info: ArtifactInfo) -> bool:
        """Remove what ``info`` describes, if it is still there and nobody uses it."""
        try:
            if info.path.parent.name != STAGING:
                return self._remove_artifact(info)
            with steps.adopt(self._root, info.id, info.uuid) as staging:
                self.discard(staging)
            return not exists(self._root, f"{STAGING}/{info.path.name}")
        except (BusyError, FileNotFoundError):
            return False

    def _remove_artifact(self, info: ArtifactInfo) -> bool:
        path = info.path.relative_to(self.path)
        current = len(path.parts) == 1
        trash = f"{TRASH_PREFIX}{secrets.token_hex(8)}"
        with self._root.subdir(STAGING) as staging:
            # A lock of its own also within this process: what we are restoring is in use too.
            with self.lock(info.id):
                now = listing.describe(self._root, info.id, str(path))
                if now is None or now.pinned or now.uuid != info.uuid:
                    return False
                # It loses its name before its first file: what stands under a final name is whole.
                holder = nullcontext(self._root) if current else self._root.subdir(str(path.parent))
                with holder as parent:
                    parent.rename(path.name, trash, replace=True, to=staging)
                    parent.fsync()
                if not current:
                    with self._root.subdir(PREVIOUS) as previous, suppress(OSError):
                        os.rmdir(info.id, dir_fd=previous.fd)  # if that was the last one
            self._empty(staging, trash)
        return True
