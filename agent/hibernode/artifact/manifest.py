"""The manifest: what an artifact is, which files it has, and what a restore must find on the machine.

It is read from an image, so it is hostile input: strict types, no unknown field, bounded size. The file is
one JSON object whose first member is the BLAKE3 digest of all bytes after it, so that a flipped bit shows
also where any value would do (a pid, a mode). The digest is against accidents, not against a forger: who
can write to the store can also compute it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from datetime import UTC, datetime
from typing import Annotated, Final, Literal, Self, TypeVar

from blake3 import blake3
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from hibernode.errors import IntegrityError
from hibernode.workload import ID_PATTERN

MANIFEST_NAME: Final = "manifest.json"
API_VERSION: Final = "hibernode.io/v1"
MAX_MANIFEST_BYTES: Final = 16 << 20
"""A worker with 10,000 mapped files and threads needs about 2 MiB."""

UUID_PATTERN: Final = re.compile(r"[0-9a-f]{32}", re.ASCII)

_HEAD: Final = b'{"manifest_digest":"'
_NECK: Final = b'",'
_DIGEST_CHARS: Final = 64
_NAME_MAX: Final = 255
_DEPTH_MAX: Final = 8
_SHOWN: Final = 120
"""How much of a hostile field an error repeats."""

T = TypeVar("T")


def rfc3339(moment: datetime) -> str:
    """Write a moment in UTC with microseconds, always in the same length: such texts sort by time."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _utc(text: str) -> str:
    moment = datetime.fromisoformat(text)
    if moment.utcoffset() is None or moment.utcoffset():
        raise ValueError("not in UTC")
    return rfc3339(moment)


def _readable(value: object) -> object:
    r"""Show the bytes of a name that is not UTF-8 as ``\xNN``: JSON and terminals cannot carry them."""
    return os.fsencode(value).decode("utf-8", "backslashreplace") if isinstance(value, str) else value


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _inside(path: str) -> str:
    """Let a path through that stays below its artifact; no name in it begins with a dot, as ``..`` does."""
    parts = path.split("/")
    if len(parts) > _DEPTH_MAX:
        raise ValueError(f"more than {_DEPTH_MAX} levels deep")
    for part in parts:
        if not part or part.startswith(".") or not part.isprintable() or len(part.encode()) > _NAME_MAX:
            raise ValueError("not a plain relative path inside the artifact")
    if path == MANIFEST_NAME:
        raise ValueError("the manifest cannot list itself")
    return path


Text = Annotated[str, BeforeValidator(_readable)]
Many = Annotated[tuple[T, ...], BeforeValidator(_as_tuple)]
Count = Annotated[int, Field(ge=0, lt=1 << 63)]
FourIds = Annotated[tuple[Count, ...], BeforeValidator(_as_tuple), Field(min_length=4, max_length=4)]
"""Real, effective, saved and file system id, in this order."""


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


class CriuFacts(_Part):
    """The CRIU that dumped. ``options``: its arguments without paths."""

    version: Text
    options: Many[Text] = ()


class ProcessFacts(_Part):
    """The tree's root as it was before the dump. ``start_ticks``: clock ticks since boot."""

    pid: Count
    start_ticks: Count
    comm: Text
    cmdline: Many[Text]
    exe: Text
    cwd: Text
    uids: FourIds
    gids: FourIds
    groups: Many[Count] = ()
    cap_eff: Count
    no_new_privs: bool
    seccomp_mode: Count


class RightsFacts(_Part):
    """What all threads of the tree have between them, as the images give it back.

    ``uids`` and ``gids``: every kind of id, groups among them. ``capabilities``: a mask, all that a thread
    has or a program that it starts may get. ``no_new_privs``, ``seccomp``: every thread has it, has a filter.
    """

    uids: Many[Count]
    gids: Many[Count]
    capabilities: Count
    no_new_privs: bool
    seccomp: bool


class TaskFacts(_Part):
    """One process of the tree; ids as in the pid namespace of the dump, ``threads`` with the leader."""

    pid: Count
    ppid: Count
    pgid: Count
    sid: Count
    threads: Many[Count]
    comm: Text


class ContractFacts(_Part):
    """The era's names that this worker was told; empty where it was told none."""

    era: Text = ""
    signal_file: Text = ""
    ready_file: Text = ""
    restore_marker: Text = ""


class MountFacts(_Part):
    """One mount that the tree saw; the fields are those of /proc/PID/mountinfo."""

    mount_point: Text
    fs_type: Text
    source: Text = ""
    root: Text = "/"
    options: Text = ""


class FdFacts(_Part):
    """A descriptor whose other end is outside the tree and must be given anew at restore.

    ``target`` as /proc/PID/fd shows it; ``kind``: pipe, file, tty, socket ...; ``access``: read or write.
    """

    pid: Count
    fd: Count
    target: Text
    kind: Text
    access: Text = ""


class MappedFile(_Part):
    """A file outside the artifact that the image maps or holds open, as it was at the dump.

    ``size_checked``: CRIU refuses to restore when its size is another then.
    """

    path: Text
    size: Count
    mtime_ns: int
    dev: Count
    ino: Count
    size_checked: bool = True


class LinkFacts(_Part):
    """A file that is open and has lost its name. CRIU asks for it at ``path``; we hold it as ``kept``."""

    path: Text
    kept: Text
    dev: Count
    ino: Count


class ExternalMount(_Part):
    """A mount that is not in the image: the container that takes the worker must have one at the same place.

    ``key`` is its name between dump and restore; ``directory``: it is a directory, else a file.
    """

    key: Annotated[str, Field(pattern=r"^m[0-9]{1,6}$")]
    mount_point: Text
    fs_type: Text
    directory: bool


class DiffFacts(_Part):
    """Files of a container that are in the artifact: of its rootfs, or of a tmpfs at ``mount_point``.

    ``file``: the tar, relative to the artifact. ``bytes``: its content, holes left out. ``skipped``: sockets
    and device nodes, which are not brought back.
    """

    file: Annotated[str, AfterValidator(_inside)]
    mount_point: Text
    entries: Count
    bytes: Count
    skipped: Count = 0


class ContainerFacts(_Part):
    """The container that the tree was; empty texts where nobody said.

    ``name``: in its pod. ``net``: the inode of its network namespace if that is not the node's. ``lower``:
    the rootfs's lower layers, where they were. ``memory_limit``: bytes, 0 for none. ``connected`` and
    ``listening``: addresses, neither loopback nor wildcard, that kept connections have, and that all other
    sockets are bound to, those of UDP too. ``devices``: paths of the device nodes below /dev.
    """

    id: Text
    name: Text = ""
    runtime: Text = ""
    pod_uid: Text = ""
    net: Count = 0
    uid_map: Text = ""
    gid_map: Text = ""
    memory_limit: Count = 0
    mounts: Many[ExternalMount] = ()
    skipped_mounts: Many[Text] = ()
    lower: Many[Text] = ()
    listening: Many[Text] = ()
    connected: Many[Text] = ()
    devices: Many[Text] = ()
    diffs: Many[DiffFacts] = ()

    def check(self, files: Collection[str]) -> None:
        """See that keys and places are there once, and that each diff has its file and its place.

        :raises ValueError: they are not.
        """
        for what in ([mount.key for mount in self.mounts], [mount.mount_point for mount in self.mounts]):
            if len(set(what)) != len(what):
                raise ValueError("container.mounts lists one twice")
        places = {"/", *(mount.mount_point for mount in self.mounts)}
        for diff in self.diffs:
            if diff.file not in files:
                raise ValueError(
                    f"container.diffs names {diff.file[:_SHOWN]!r}, which is not among the files"
                )
            if diff.mount_point not in places:
                raise ValueError("container.diffs names a place that is no mount")


class GpuFacts(_Part):
    """A GPU that the tree used. ``memory_bytes``: its whole memory; 0 where NVML did not tell."""

    uuid: Text
    model: Text
    memory_bytes: Count = 0


class CudaProcessFacts(_Part):
    """A CUDA process of the tree. ``ns_pid``: in the innermost pid namespace; ``gpu_bytes``: what it held.

    ``state``: what cuda-checkpoint left it in for the images, or ``plugin`` where CRIU's plugin did the work.
    """

    ns_pid: Count
    comm: Text = ""
    gpu_bytes: Count = 0
    state: Literal["checkpointed", "plugin"] = "checkpointed"


class CudaFacts(_Part):
    """What a restore must bring back to the GPUs, in the order in which the tree saw them.

    ``strategy``: who did it. ``driver`` and ``tool``: versions as NVML and cuda-checkpoint say them.
    ``seconds``: by call, ``lock`` and ``checkpoint``.
    """

    strategy: Literal["cuda-checkpoint", "criu-plugin"]
    driver: Text = ""
    tool: Text = ""
    gpus: Many[GpuFacts] = ()
    processes: Many[CudaProcessFacts] = ()
    seconds: dict[Text, Annotated[float, Field(ge=0)]] = Field(default_factory=dict)


class FileEntry(_Part):
    """A file of the artifact. ``path`` is relative to the artifact, ``size`` in bytes, ``digest`` BLAKE3."""

    path: Annotated[str, AfterValidator(_inside)]
    size: Count
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Manifest(_Part):
    """All about one artifact. ``phases``: seconds by step; ``total_bytes``: the sum of ``files``.

    ``rights``: None in artifacts of a release that did not note them. ``cuda``: None if no process used CUDA.
    """

    api_version: Literal["hibernode.io/v1"] = API_VERSION
    id: Annotated[str, Field(pattern=f"^(?:{ID_PATTERN.pattern})$")]
    uuid: Annotated[str, Field(pattern=f"^{UUID_PATTERN.pattern}$")]
    created_at: Annotated[str, AfterValidator(_utc)]
    node: Text
    kernel: Text
    boot_id: Text
    machine: Text
    cpu_features: Many[Text]
    criu: CriuFacts
    process: ProcessFacts
    rights: RightsFacts | None = None
    tree: Annotated[tuple[TaskFacts, ...], BeforeValidator(_as_tuple), Field(min_length=1)]
    shell_job: bool
    tcp: Literal["established", "close"]
    contract: ContractFacts
    mounts: Many[MountFacts] = ()
    namespaces: dict[Text, Count] = Field(default_factory=dict)
    fds: Many[FdFacts] = ()
    mapped_files: Many[MappedFile] = ()
    links: Many[LinkFacts] = ()
    files: Annotated[tuple[FileEntry, ...], BeforeValidator(_as_tuple), Field(min_length=1)]
    total_bytes: Count
    phases: dict[Text, Annotated[float, Field(ge=0)]] = Field(default_factory=dict)
    leave: Literal["running", "stopped", "killed"]
    container: ContainerFacts | None = None
    cuda: CudaFacts | None = None

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        seen: set[str] = set()
        for entry in self.files:
            if entry.path in seen:
                raise ValueError(f"files lists {entry.path[:_SHOWN]!r} twice")
            seen.add(entry.path)
        total = sum(entry.size for entry in self.files)
        if total != self.total_bytes:
            raise ValueError(f"total_bytes is {self.total_bytes}, but the files have {total} bytes")
        if self.container is not None:
            self.container.check(seen)
        return self


def manifest_bytes(manifest: Manifest) -> bytes:
    """Write the manifest as the bytes of its file."""
    rest = manifest.model_dump_json(indent=1).encode()[1:] + b"\n"
    return _HEAD + blake3(rest).hexdigest().encode() + _NECK + rest


def parse_manifest(data: bytes, *, source: str = MANIFEST_NAME) -> Manifest:
    """Read a manifest; ``source`` names it in errors.

    :raises IntegrityError: it is too large, damaged, of an unknown version (reason ``UnknownVersion``), or
        a field is wrong; the field is named.
    """
    if len(data) > MAX_MANIFEST_BYTES:
        raise _refused(source, f"it is larger than {MAX_MANIFEST_BYTES} bytes")
    start = len(_HEAD) + _DIGEST_CHARS
    rest = data[start + len(_NECK) :]
    if not data.startswith(_HEAD) or data[start : start + len(_NECK)] != _NECK:
        raise _refused(source, "it does not begin with its digest: it was cut, changed or written by hand")
    if data[len(_HEAD) : start] != blake3(rest).hexdigest().encode():
        raise _refused(source, "its digest does not fit: it was cut or changed")
    try:
        # This JSON reader stops at 200 levels, so that nesting cannot exhaust the stack.
        return Manifest.model_validate_json(b"{" + rest)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
    field = _shown(".".join(str(part) for part in first["loc"]))
    if field == "api_version":
        raise _refused(
            source,
            f"its api_version {_shown(first['input'])} is not known",
            f"this hibernode reads {API_VERSION}; use the release that made the checkpoint",
            "UnknownVersion",
        )
    raise _refused(source, f"{field}: {first['msg']}" if field else first["msg"])


def _shown(value: object) -> str:
    text = str(value)[:_SHOWN]
    return text if text.isprintable() else ascii(text)


def _refused(source: str, why: str, remedy: str = "", reason: str = "") -> IntegrityError:
    return IntegrityError(
        f"{source}: {why}",
        remedy=remedy or "take the checkpoint again; this one cannot be trusted",
        reason=reason,
        path=source,
    )
