"""Files that are open, have lost the name they were opened by, and have another (FC-45).

CRIU gives such a file a new link beside the lost name, ``link_remap.N``, and notes that in the image. When
the worker is left running it removes the link again at the end of the dump, so that the image cannot be
restored. So each such file gets a link of ours before the dump, in the same directory. The manifest says
which of CRIU's links it stands for; for the time of a restore it is linked to that name, which CRIU removes
when the file is open.

The directories belong to the worker: see :mod:`hibernode.host.hardlinks`.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from hibernode.apart import apart, uncut
from hibernode.artifact.links import crius_names, kept_name, note
from hibernode.artifact.manifest import LinkFacts
from hibernode.artifact.staging import Staging
from hibernode.criu.remaps import file_ids, link_remaps
from hibernode.errors import CriuError, RefusedError
from hibernode.host import hardlinks
from hibernode.host.hardlinks import Identity
from hibernode.preflight import Preflight
from hibernode.preflight.facts import RenamedFile

log = logging.getLogger("hibernode.links")


@dataclass(frozen=True, slots=True)
class Kept:
    """A link of ours: which descriptor's file it is, and that file's lost name."""

    pid: int
    fd: int
    lost: str
    path: str
    inode: Identity


def keep(staging: Staging, checked: Preflight) -> list[Kept]:
    """Give every file that has lost its name a link of ours; what was closed meanwhile needs none.

    The directories are noted in ``staging`` first, so that a dump that comes to nothing leaves no link.

    :raises RefusedError: reason ``LinkRemapFailed``, the directory does not let us.
    """
    facts = checked.facts
    if facts.root.namespaces.get("mnt") != facts.agent_namespaces.get("mnt"):
        return []  # its paths are not ours; :func:`match` says what that costs
    directories: dict[str, list[str]] = {}
    where = {file: _standing(os.path.dirname(file.path)) for file in facts.renamed}  # noqa: PTH120 - a string
    for path in sorted(set(where.values())):
        with hardlinks.directory(path) as dir_fd:
            directories[path] = crius_names(dir_fd)
    if not directories:
        return []
    note(staging.dir, directories)
    made: dict[tuple[str, Identity], str] = {}
    kept: list[Kept] = []
    for file, path in where.items():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            kept.append(_keep(file, path, staging.uuid, made))
    return kept


def _keep(file: RenamedFile, directory: str, uuid: str, made: dict[tuple[str, Identity], str]) -> Kept:
    try:
        with hardlinks.held(f"/proc/{file.pid}/fd/{file.fd}") as fd, hardlinks.directory(directory) as dir_fd:
            inode = hardlinks.identity(fd)
            if (directory, inode) not in made:
                name = kept_name(uuid, len(made))
                hardlinks.link(fd, dir_fd, name)
                made[directory, inode] = f"{directory.rstrip('/')}/{name}"
    except (FileNotFoundError, ProcessLookupError):
        raise
    except OSError as error:
        raise RefusedError(
            f"pid {file.pid} fd {file.fd} ({file.path}): {directory} takes no link: {error.strerror}",
            remedy="the file must be closed, or get its name back, before the worker says that it is ready",
            reason="LinkRemapFailed",
        ) from error
    return Kept(file.pid, file.fd, file.path, made[directory, inode], inode)


def _standing(path: str) -> str:
    """Find the nearest directory that is there, as CRIU does."""
    while True:
        try:
            with hardlinks.directory(path):
                return path or "/"
        except FileNotFoundError:
            path = path.rpartition("/")[0]


def match(
    staging: Staging,
    kept: Iterable[Kept],
    *,
    leave: str,
    carried: Callable[[str], bool] = lambda _path: False,
) -> tuple[LinkFacts, ...]:
    """Say which of our links stands for which of CRIU's.

    ``carried`` says whether a link of CRIU's goes along with the files of a container.

    :raises CriuError: reason ``LinkRemapLost``, CRIU has made and removed a link that we have none for.
    :raises IntegrityError: an image is damaged.
    """
    remaps = link_remaps(staging.images)
    if not remaps:
        return ()
    by_place = {(link.pid, link.fd): link for link in kept}
    by_file = {file: by_place[place] for place, file in file_ids(staging.images, by_place).items()}
    found: list[LinkFacts] = []
    for remap in remaps:
        link = by_file.get(remap.file_id)
        path = os.fsdecode(remap.path)
        if carried(path):
            continue
        # JSON carries no name that is not UTF-8.
        if link is not None and os.fsencode(link.lost) == remap.name and (path + link.path).isprintable():
            dev, ino = link.inode
            found.append(LinkFacts(path=path, kept=link.path, dev=dev, ino=ino))
        elif leave == "running":
            raise CriuError(
                f"{os.fsdecode(remap.name)!a}: the file lost its name while the worker was being frozen, or "
                "is mapped and not open; criu leaves no link to it, so it could not be restored",
                remedy="try again; if it stays, the file must keep its name, or use --leave killed",
                reason="LinkRemapLost",
            )
    return tuple(found)


@contextlib.contextmanager
def laid(links: Iterable[LinkFacts]) -> Iterator[None]:
    """Have CRIU's links in place while the block runs; what is left of them afterwards is removed.

    :raises RefusedError: reason ``RestoreIncompatible``, ours is gone or CRIU's name is taken.
    """
    links = tuple(links)
    try:
        for link in links:
            _lay(link)
        yield
    finally:
        take_away(links)


@contextlib.asynccontextmanager
async def laid_apart(links: Iterable[LinkFacts], owner: str) -> AsyncIterator[None]:
    """Do so from the event loop: the directories are the worker's, and may hang."""
    links = tuple(links)
    block, what = laid(links), "the way to files that have lost their names"
    if links:
        await apart(block.__enter__, owner, what)
    try:
        yield
    finally:
        if links:
            await uncut(apart(partial(block.__exit__, None, None, None), owner, what))


def _lay(link: LinkFacts) -> None:
    inode = (link.dev, link.ino)
    try:
        with _held_kept(link.kept) as fd:
            if hardlinks.identity(fd) != inode:
                raise _incompatible(f"{link.kept} is not the file any more that the worker had open")
            parent, _, name = link.path.rpartition("/")
            with hardlinks.directory(parent) as dir_fd:
                try:
                    hardlinks.link(fd, dir_fd, name)
                except FileExistsError:
                    if not hardlinks.is_at(dir_fd, name, inode):
                        raise _incompatible(f"{link.path} exists and is another file") from None
    except OSError as error:
        raise _incompatible(f"{error.filename or link.kept}: {error.strerror}") from error


@contextlib.contextmanager
def _held_kept(path: str) -> Iterator[int]:
    parent, _, name = path.rpartition("/")
    with hardlinks.directory(parent) as dir_fd, hardlinks.held(name, dir_fd=dir_fd) as fd:
        yield fd


def _incompatible(why: str) -> RefusedError:
    return RefusedError(
        f"a file that the worker had open and that had lost its name cannot be brought back: {why}",
        remedy="put it back, or take the checkpoint again",
        reason="RestoreIncompatible",
    )


def take_away(links: Iterable[LinkFacts]) -> None:
    """Remove what is left of CRIU's links after a restore."""
    for link in links:
        try:
            hardlinks.remove(link.path, (link.dev, link.ino))
        except OSError as error:
            log.warning("%s is left of a restore: %s", link.path, error)


def take_away_noted(noted: Any) -> None:
    """Do so for a dead agent's restore, from its journal."""
    with contextlib.suppress(ValueError, TypeError):
        take_away([LinkFacts.model_validate(entry) for entry in noted or ()])
