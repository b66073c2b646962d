"""Artifacts to test with: manifests, staged files, published artifacts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from blake3 import blake3

from hibernode.artifact.manifest import Manifest
from hibernode.artifact.store import Artifact, Staging, Store
from hibernode.workload import CheckpointId

ID = CheckpointId("96429b272576")
OTHER = CheckpointId("0123456789abcdef")
UUID = "0123456789abcdef0123456789abcdef"
FILES: Mapping[str, bytes] = {
    "checkpoint.done": b"{}",
    "dump.log": b"(00.000) all well\n",
    "images/pages-1.img": bytes(range(256)) * 64,
    "images/pstree.img": b"pstree",
}

PROCESS = {
    "pid": 100,
    "start_ticks": 12345,
    "comm": "worker",
    "cmdline": ["python3", "worker.py"],
    "exe": "/usr/bin/python3",
    "cwd": "/",
    "uids": [0, 0, 0, 0],
    "gids": [0, 0, 0, 0],
    "groups": [0],
    "cap_eff": 0,
    "no_new_privs": False,
    "seccomp_mode": 0,
}
RIGHTS = {"uids": [0], "gids": [0], "capabilities": 0, "no_new_privs": False, "seccomp": False}


def files_of(contents: Mapping[str, bytes]) -> list[dict[str, Any]]:
    """List files as a manifest does."""
    return [
        {"path": path, "size": len(data), "digest": blake3(data).hexdigest()}
        for path, data in contents.items()
    ]


def fields(contents: Mapping[str, bytes] = FILES, **changes: Any) -> dict[str, Any]:
    """Build a manifest's fields; ``changes`` replace some."""
    files = changes.pop("files", files_of(contents))
    return {
        "id": ID,
        "uuid": UUID,
        "created_at": "2026-12-01T04:00:00.000000Z",
        "node": "node-a",
        "kernel": "6.18.5",
        "boot_id": "b",
        "machine": "x86_64",
        "cpu_features": ["avx2", "sse4_2"],
        "criu": {"version": "4.2.1", "options": ["dump", "--tcp-established"]},
        "process": PROCESS,
        "rights": RIGHTS,
        "tree": [{"pid": 100, "ppid": 1, "pgid": 100, "sid": 100, "threads": [100, 101], "comm": "worker"}],
        "shell_job": False,
        "tcp": "close",
        "contract": {"era": "A1", "signal_file": "/signals/x.done", "ready_file": "", "restore_marker": ""},
        "mounts": [
            {"mount_point": "/", "fs_type": "ext4", "source": "/dev/vda", "root": "/", "options": "rw"}
        ],
        "namespaces": {"mnt": 4026531841},
        "fds": [{"pid": 100, "fd": 1, "target": "pipe:[7]", "kind": "pipe", "access": "write"}],
        "mapped_files": [{"path": "/usr/bin/python3", "size": 1, "mtime_ns": -1, "dev": 2, "ino": 3}],
        "files": files,
        "total_bytes": sum(file["size"] for file in files),
        "phases": {"dump": 1.5},
        "leave": "running",
        **changes,
    }


def manifest(contents: Mapping[str, bytes] = FILES, **changes: Any) -> Manifest:
    """Build a manifest; ``changes`` replace fields."""
    return Manifest(**fields(contents, **changes))


def with_digest(text: str) -> bytes:
    """Write any JSON object as the bytes of a manifest whose digest fits, as a forger would."""
    rest = text.removeprefix("{").encode()
    return b'{"manifest_digest":"' + blake3(rest).hexdigest().encode() + b'",' + rest


def forged(**changes: Any) -> bytes:
    """Write a manifest that no check has seen."""
    return with_digest(json.dumps({"api_version": "hibernode.io/v1", **fields(**changes)}))


def fill(staging: Staging, contents: Mapping[str, bytes] = FILES) -> None:
    """Write files as CRIU does: modes of its own, names below what will be published."""
    for path, data in contents.items():
        where = staging.artifact_path / path
        where.parent.mkdir(exist_ok=True)
        where.parent.chmod(0o755)
        where.write_bytes(data)
        where.chmod(0o644)


def seal(store: Store, staging: Staging, contents: Mapping[str, bytes] = FILES, **changes: Any) -> None:
    """Fill a staging directory and seal it."""
    fill(staging, contents)
    store.seal(staging, manifest(contents, id=staging.id, uuid=staging.uuid, **changes))


def put(
    store: Store, id_: CheckpointId = ID, contents: Mapping[str, bytes] = FILES, **changes: Any
) -> Artifact:
    """Publish an artifact."""
    with store.stage(id_) as staging:
        seal(store, staging, contents, **changes)
        artifact = store.publish(staging, id_)
        store.discard(staging)
    return artifact
