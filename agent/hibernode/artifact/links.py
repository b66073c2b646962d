"""Hard links of ours outside the store: how they are called, and their end.

A dump that leaves its worker running needs a name of its own for every file that has lost its name (see
:mod:`hibernode.links`). Such a link lives as long as its artifact: it goes with a staging directory that
was not published, and with an artifact that is removed.
"""

from __future__ import annotations

import json
import logging
import os
import re
from contextlib import suppress
from typing import Final

from hibernode.artifact.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, Manifest, parse_manifest
from hibernode.errors import HibernodeError
from hibernode.host import hardlinks
from hibernode.host.safefs import Dir

log = logging.getLogger("hibernode.links")

LINKS_FILE: Final = "links.json"
"""In a staging directory: the directories that get links, each with the links of CRIU's kind that were
there before."""

MAX_LINKS_BYTES: Final = 16 << 20

_CRIUS: Final = re.compile(r"link_remap\.[0-9]{1,10}", re.ASCII)


def kept_name(uuid: str, number: int) -> str:
    """Name a link of the work ``uuid``."""
    return f".hibernode-{uuid}.{number}"


def crius_names(dir_fd: int) -> list[str]:
    """List what is called as ``--link-remap`` calls its links."""
    return sorted(name for name in os.listdir(dir_fd) if _CRIUS.fullmatch(name))


def note(staging: Dir, directories: dict[str, list[str]]) -> None:
    """Write down where there will be links, before there are any."""
    staging.write_atomic(LINKS_FILE, json.dumps(directories).encode(), 0o600)


def forget_staged(staging: Dir, uuid: str) -> None:
    """Remove the links of work that comes to nothing, and those that its CRIU has left of the same files."""
    try:
        noted = json.loads(staging.read(LINKS_FILE, MAX_LINKS_BYTES).data)
    except FileNotFoundError:
        return
    except (ValueError, HibernodeError) as error:
        log.warning("%s: %s", staging.path / LINKS_FILE, error)
        return
    for path, before in noted.items():
        try:
            with hardlinks.directory(path) as dir_fd:
                _forget_in(dir_fd, kept_name(uuid, 0)[:-1], set(before))
        except FileNotFoundError:
            continue
        except OSError as error:
            log.warning("%s: links of a failed dump may be left there: %s", path, error)


def _forget_in(dir_fd: int, prefix: str, before: set[str]) -> None:
    ours = [name for name in os.listdir(dir_fd) if name.startswith(prefix)]
    inodes = set()
    for name in ours:
        with suppress(FileNotFoundError), hardlinks.held(name, dir_fd=dir_fd) as fd:
            inodes.add(hardlinks.identity(fd))
    crius = [name for name in crius_names(dir_fd) if name not in before]
    for name in [
        name for name in crius if any(hardlinks.is_at(dir_fd, name, inode) for inode in inodes)
    ] + ours:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=dir_fd)


def forget_of(artifact: Dir) -> None:
    """Remove the links of an artifact that is about to be removed."""
    try:
        manifest = parse_manifest(artifact.read(MANIFEST_NAME, MAX_MANIFEST_BYTES).data)
    except (OSError, HibernodeError):
        return  # without a manifest it was never finished, and its staging directory knew
    forget(manifest)


def forget(manifest: Manifest) -> None:
    """Remove the links that a manifest names, and those that a CRIU which ended its worker left."""
    for link in manifest.links:
        paths = [link.kept] if manifest.leave == "running" else [link.kept, link.path]
        for path in paths:
            try:
                hardlinks.remove(path, (link.dev, link.ino))
            except OSError as error:
                log.warning("%s stays: %s", path, error)
