"""Where a process has its root file system, and where an overlay keeps what was changed in it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hibernode.errors import RefusedError
from hibernode.host import inroot
from hibernode.host.mounts import Mount, mounts

INDEX_DEFAULT: Final = Path("/sys/module/overlay/parameters/index")


@dataclass(frozen=True, slots=True)
class Root:
    """The root file system of a process.

    ``upper``: the upper directory of its overlay, as the container runtime named it; None: the root is no
    overlay, and nothing tells what was changed in it. ``index``: the overlay keeps the hard links of lower
    layers together (``index=on``). ``read_only``: its processes cannot change anything, so what the upper
    directory has is the runtime's, and nothing can be applied. ``mount_points``: what is mounted below it.
    """

    fs_type: str
    upper: str | None
    index: bool
    read_only: bool
    mount_points: tuple[str, ...]


def root_of(pid: int) -> Root:
    """Find out on what a process has its root.

    :raises ProcessLookupError: the process is gone.
    :raises RefusedError: nothing is mounted at its root, or the overlay does not say where its upper
        directory is.
    """
    seen = mounts(pid)
    at_root = [mount for mount in seen if mount.mount_point == "/"]
    if not at_root:
        raise RefusedError(
            f"process {pid} has a root directory that is no mount",
            remedy="only containers whose root is a mount of its own can be looked at",
            reason="NoRootMount",
            pid=pid,
        )
    root = at_root[-1]  # it covers the others
    points = tuple(mount.mount_point for mount in seen if mount.mount_point != "/")
    upper = root.super_option("upperdir") if root.fs_type == "overlay" else None
    if upper is not None and not upper.startswith("/"):
        raise RefusedError(
            f"the overlay of process {pid} was mounted with the relative upperdir {upper!r}",
            remedy="let the container runtime mount it with an absolute path",
            reason="RelativeUpper",
            pid=pid,
            upperdir=upper,
        )
    return Root(
        fs_type=root.fs_type,
        upper=upper,
        index=upper is not None and _has_index(root),
        read_only="ro" in root.options.split(","),
        mount_points=points,
    )


def _has_index(overlay: Mount) -> bool:
    """Whether an overlay has ``index=on``; mountinfo says so only where it is not the module's default."""
    option = overlay.super_option("index")
    if option is None:
        try:
            option = INDEX_DEFAULT.read_text().strip()
        except FileNotFoundError:  # a kernel older than the option
            return False
    return option in {"on", "Y"}


def open_upper(upper: str, *, runtime_pid: int = 1) -> int:
    """Open an upper directory as the container runtime sees it, who shares the mounts of pid 1.

    Where that process may not be looked into, it has more rights than we: then our own mounts are tried.
    :func:`hibernode.artifact.rootfs.save` compares what is found with the container's root.

    :raises OSError: it cannot be reached there.
    """
    try:
        root = inroot.open_root(runtime_pid)
    except PermissionError:
        root = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return inroot.open_below(root, upper, os.O_RDONLY | os.O_DIRECTORY)
    finally:
        os.close(root)
