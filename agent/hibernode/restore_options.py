"""What CRIU is asked at a restore, and what it gets in the place of pipes, from the manifest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hibernode.artifact.manifest import Manifest
from hibernode.container import target as targets
from hibernode.container.gate import keeps_connections
from hibernode.container.target import Target
from hibernode.criu import options
from hibernode.criu.image_sockets import tcp_connections
from hibernode.settings import Settings


def restore_options(
    manifest: Manifest, settings: Settings, directory: Path, target: Target | None
) -> options.RestoreOptions:
    """Take what must match the dump from the manifest, the rest from the settings.

    ``directory``: the restore's own, where the shim puts the mounts of a container.
    """
    into = target if manifest.container is not None else None
    kept = manifest.container is None or into is None or keeps_connections(manifest.container, into)
    plugin = manifest.cuda is not None and manifest.cuda.strategy == "criu-plugin"
    return options.RestoreOptions(
        libdir=str(settings.gpu.criu_plugins) if plugin else options.NO_PLUGINS,
        external=() if into is None else targets.external(manifest, directory),
        root=None if into is None else str(directory / "root"),
        shell_job=manifest.shell_job,
        tcp="established" if manifest.tcp == "established" and kept else "close",
        file_locks=settings.criu.file_locks,
        link_remap=settings.criu.link_remap,
        ghost_limit_bytes=settings.criu.ghost_limit_bytes,
        log_level=settings.criu.log_level,
    )


def inherit(manifest: Manifest) -> list[dict[str, str]]:
    """List the pipe ends outside the tree and what takes their place: /dev/null, or a file to append to.

    Two descriptors on one pipe share one file, so that the order of lines is kept.
    """
    ends: dict[str, dict[str, str]] = {}
    for entry in manifest.fds:
        if entry.kind == "pipe" and entry.target not in ends:
            number = entry.target.removeprefix("pipe:[").removesuffix("]")
            name = {1: "stdout", 2: "stderr"}.get(entry.fd, "pipe")
            mode = "read" if entry.access == "read" else "append"
            ends[entry.target] = {"key": entry.target, "mode": mode, "file": f"{name}.{number}.log"}
    return list(ends.values())


def connections(images: Path) -> list[list[Any]]:
    """List the ends that come back, for the shim: IP version, then address (hex) and port of either side."""
    return [
        [version, local.hex(), local_port, remote.hex(), remote_port]
        for version, local, local_port, remote, remote_port in tcp_connections(images)
    ]
