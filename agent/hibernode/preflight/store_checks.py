"""Checks of what a dump needs beside its tree: CRIU, the store, space and memory."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from hibernode.criu.find import MIN_VERSION
from hibernode.host import linux
from hibernode.preflight.rows import row, size
from hibernode.workload import Finding, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hibernode.preflight.facts import Facts, StoreFacts
    from hibernode.settings import Settings

SPARE_MEMORY_BYTES: Final = 256 << 20
"""What CRIU and the page cache should find free; CRIU itself takes some 20 MiB."""

FILE_SYSTEMS: Final = {
    linux.TMPFS_MAGIC: "tmpfs",
    linux.NFS_SUPER_MAGIC: "nfs",
    linux.CIFS_SUPER_MAGIC: "cifs",
    linux.SMB2_SUPER_MAGIC: "smb2",
    linux.FUSE_SUPER_MAGIC: "fuse",
    linux.CEPH_SUPER_MAGIC: "ceph",
    linux.LUSTRE_SUPER_MAGIC: "lustre",
    linux.EXT4_SUPER_MAGIC: "ext4",
    linux.XFS_SUPER_MAGIC: "xfs",
    linux.OVERLAYFS_SUPER_MAGIC: "overlayfs",
}
REMOTE_FILE_SYSTEMS: Final = frozenset({"nfs", "cifs", "smb2", "fuse", "ceph", "lustre"})

ROOT_ONLY: Final = 0o077
"""The bits of a mode that let others in."""


def findings(facts: Facts, settings: Settings) -> list[Finding]:
    """Judge what a dump needs beside its tree, one row a check."""
    return [
        check_criu_present(facts.criu_version),
        check_criu_version(facts.criu_version),
        check_store_private(facts.store),
        check_store_filesystem(facts.store),
        check_space(facts, settings),
        check_memory(facts),
    ]


def check_criu_present(version: str | None) -> Finding:
    """Check that there is a CRIU."""
    return row(
        "criu.present",
        "a criu program",
        ["none found"] if version is None else [],
        remedy="make setup, or set criu.binary",
        reason="CriuMissing",
        fine="found",
    )


def check_criu_version(version: str | None) -> Finding:
    """Check that CRIU is new enough."""
    least = ".".join(map(str, MIN_VERSION))
    if version is None:
        return Finding("criu.version", Verdict.SKIP, f"at least {least}", "no criu")
    return row(
        "criu.version",
        f"at least {least}",
        [version] if numbers(version) < MIN_VERSION else [],
        remedy="make setup installs one that is new enough",
        reason="CriuTooOld",
        fine=version,
    )


def numbers(version: str) -> tuple[int, ...]:
    """Read the first two numbers of a version."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def check_store_private(store: StoreFacts) -> Finding:
    """Check that only root may look into the store: images hold all that the worker had in memory."""
    expected = "a directory of root's, mode 0700, no link"
    if not store.exists:
        return Finding(
            "store.private",
            Verdict.WARN,
            expected,
            f"{store.path} does not exist",
            "it will be made",
            "NoStore",
        )

    def offenders() -> Iterator[str]:
        if not store.is_directory:
            yield f"{store.path} is a link or no directory"
        if store.uid != 0:
            yield f"{store.path} belongs to uid {store.uid}"
        if store.is_directory and store.mode & ROOT_ONLY:
            yield f"{store.path} has mode {store.mode:04o}"

    return row(
        "store.private",
        expected,
        offenders(),
        remedy=f"chown root {store.path} && chmod 0700 {store.path}",
        reason="StoreNotPrivate",
        fine=f"{store.path}, mode {store.mode:04o}",
    )


def check_store_filesystem(store: StoreFacts) -> Finding:
    """Check that the store survives a reboot, and is not at the mercy of a server."""
    name = FILE_SYSTEMS.get(store.fs_type, f"type {store.fs_type:#x}")
    return row(
        "store.filesystem",
        "a local file system on a disk",
        [f"{store.path} is on {name}"] if name == "tmpfs" or name in REMOTE_FILE_SYSTEMS else [],
        remedy="tmpfs is memory and gone after a reboot"
        if name == "tmpfs"
        else "a dump is as fast as the server, and renames and locks are what it makes of them",
        reason="StoreFileSystem",
        verdict=Verdict.WARN,
        fine=name,
    )


def check_space(facts: Facts, settings: Settings) -> Finding:
    """Check that the image fits, and leaves the floor that is set (FC-39)."""
    need, floor, free = facts.estimate_bytes, settings.store.min_free_bytes, facts.store.free_bytes
    sentence = f"{size(free)} free on {facts.store.path}, the image takes about {size(need)}"
    return row(
        "store.space",
        f"{size(need)} for the image and {size(floor)} that stay free",
        [sentence] if free < need + floor else [],
        remedy="free space ('hibernode gc'), or lower store.min_free_bytes",
        reason="NoSpace",
        fine=sentence,
    )


def check_memory(facts: Facts) -> Finding:
    """Check that the dump does not push the machine out of memory."""
    in_memory = facts.estimate_bytes if facts.store.fs_type == linux.TMPFS_MAGIC else 0
    need, available = SPARE_MEMORY_BYTES + in_memory, facts.mem_available_bytes
    return row(
        "memory.available",
        f"{size(need)} available",
        [f"{size(available)} available"] if available < need else [],
        remedy="the dump may be slow, or the kernel may kill something for want of memory",
        reason="InsufficientMemory",
        verdict=Verdict.WARN,
        fine=f"{size(available)} available",
    )
