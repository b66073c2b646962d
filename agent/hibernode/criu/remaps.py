"""Which open files CRIU made a new link for (``--link-remap``), from a dump's images.

Formats: criu/images/remap-file-path.proto, regfile.proto, fdinfo.proto and core.proto (the ids of a task).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hibernode.criu.images import OddError, as_integrity, fields, opened, records
from hibernode.host.safefs import Dir

FILES_MAGIC: Final = 0x56303138
FDINFO_MAGIC: Final = 0x56213732
IDS_MAGIC: Final = 0x54432030
REMAP_FPATH_MAGIC: Final = 0x59133954
"""criu/include/magic.h."""

MAX_IMAGE_BYTES: Final = 256 << 20
"""files.img has one entry of some 100 bytes for each open file."""

REMAP_LINKED: Final = 0

_REMAPS: Final = "remap-fpath.img"
_FILES: Final = "files.img"
_NAME, _FILE_ID, _FILE_REG, _FILES_ID = 6, 2, 3, 2
"""Numbers of fields: of a regular file, of a file, and of a task's ids."""


@dataclass(frozen=True, slots=True)
class LinkRemap:
    """CRIU's link to a file: the file's own former name, and the link's path."""

    file_id: int
    name: bytes
    path: bytes


def link_remaps(images_dir: Dir | Path) -> tuple[LinkRemap, ...]:
    """List the links that CRIU has made.

    :raises IntegrityError: an image is damaged.
    """
    with opened(images_dir) as directory:
        if _REMAPS not in directory.names():
            return ()
        pairs = [
            (entry[1], entry[2])
            for entry in _numbers(directory, _REMAPS, REMAP_FPATH_MAGIC)
            if entry.get(3, REMAP_LINKED) == REMAP_LINKED and {1, 2} <= entry.keys()
        ]
        names = _names(directory, {number for pair in pairs for number in pair}) if pairs else {}
        with as_integrity(directory, _FILES):
            if any(number not in names for pair in pairs for number in pair):
                raise OddError(f"lacks a file that {_REMAPS} names")
        return tuple(LinkRemap(file, names[file], names[link]) for file, link in pairs)


def file_ids(images_dir: Dir | Path, places: Iterable[tuple[int, int]]) -> dict[tuple[int, int], int]:
    """Find the file of each (pid, descriptor); what was closed before the freeze is left out.

    :raises IntegrityError: an image is damaged.
    """
    wanted: dict[int, set[int]] = {}
    for pid, fd in places:
        wanted.setdefault(pid, set()).add(fd)
    found: dict[tuple[int, int], int] = {}
    with opened(images_dir) as directory:
        present = set(directory.names())
        for pid, fds in wanted.items():
            if f"ids-{pid}.img" not in present:
                continue
            for ids in _numbers(directory, f"ids-{pid}.img", IDS_MAGIC):
                table = f"fdinfo-{ids.get(_FILES_ID, 0)}.img"
                if table in present:
                    entries = _numbers(directory, table, FDINFO_MAGIC)
                    found |= {(pid, entry[4]): entry[1] for entry in entries if entry.get(4) in fds}
    return found


def _numbers(directory: Dir, name: str, magic: int) -> Iterator[dict[int, int]]:
    """Yield the numeric fields of each record."""
    with as_integrity(directory, name):
        for record in records(directory.read(name, MAX_IMAGE_BYTES).data, magic):
            yield {number: value for number, value in fields(record) if isinstance(value, int)}


def _names(directory: Dir, wanted: set[int]) -> dict[int, bytes]:
    names: dict[int, bytes] = {}
    with as_integrity(directory, _FILES):
        for record in records(directory.read(_FILES, MAX_IMAGE_BYTES).data, FILES_MAGIC):
            entry = dict(fields(record))
            number, regular = entry.get(_FILE_ID), entry.get(_FILE_REG)
            if isinstance(number, int) and number in wanted and isinstance(regular, memoryview):
                name = dict(fields(regular)).get(_NAME)
                if not isinstance(name, memoryview):
                    raise OddError(f"holds file {number} without a name")
                names[number] = bytes(name)
    return names
