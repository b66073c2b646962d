"""The settings themselves: every key with its type, its bounds, its default and what it is for.

:mod:`hibernode.config` gathers them from file, environment and flags.
"""

from __future__ import annotations

import os
import re
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from hibernode.workload import ERA_A1

_NUMBER: Final = r"([0-9]{1,20}(?:\.[0-9]{1,20})?)"
_SIZE: Final = re.compile(_NUMBER + r" ?(?:([kKMGT])(i?))?B?")
_DURATION: Final = re.compile(_NUMBER + r" ?(ms|s|m|h|d)?")
_SECONDS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, None: 1.0}
_MAX_BYTES: Final = (1 << 63) - 1
_MAX_SECONDS: Final = 100 * 365.25 * 86400
"""A century: what is meant as "for ever" still fits every clock and timer."""


def parse_size(value: object) -> object:
    """Turn ``"512MiB"``, ``"1.5 GB"`` or a number into bytes."""
    if isinstance(value, str):
        match = _SIZE.fullmatch(value.strip())
        if match is None:
            raise ValueError("not a size; write 512MiB, 10GB or a number of bytes")
        number, unit, binary = match.groups()
        return int(Decimal(number) * (1024 if binary else 1000) ** " KMGT".index((unit or " ").upper()))
    return _no_bool(value)


def parse_seconds(value: object) -> object:
    """Turn ``"90s"``, ``"15m"``, ``"7d"`` or a number into seconds."""
    if isinstance(value, str):
        match = _DURATION.fullmatch(value.strip())
        if match is None:
            raise ValueError("not a duration; write 250ms, 90s, 15m, 6h, 7d or a number of seconds")
        return float(match.group(1)) * _SECONDS[match.group(2)]
    return _no_bool(value)


def _no_bool(value: object) -> object:
    if isinstance(value, bool):
        # YAML's yes and on; pydantic would take them for 1.
        raise ValueError("must be a number")  # noqa: TRY004 - pydantic turns no TypeError into a sentence
    return value


def _absolute(value: object) -> object:
    if isinstance(value, (str, Path)) and (not Path(value).is_absolute() or "\0" in str(value)):
        raise ValueError("must be an absolute path")
    return value


def _absolute_or_empty(value: object) -> object:
    return value if value == "" else _absolute(value)


def _on_off(value: object) -> object:
    """Take YAML's on and off, which are booleans there."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


def _words(value: object) -> object:
    """Take ``"a, b"`` for a list, as the environment and flags have no other way to write one."""
    if isinstance(value, str):
        return tuple(word.strip() for word in value.split(",") if word.strip())
    return tuple(value) if isinstance(value, list) else value


def _numbers(value: object) -> object:
    """Take ``"48, 79"`` for a list of numbers, and no boolean for one."""
    found = _words(value)
    if isinstance(found, tuple):
        if not all(isinstance(each, int) or (isinstance(each, str) and each.isdecimal()) for each in found):
            raise ValueError("not a list of numbers; write 48, 79")
        return tuple(int(_no_bool(each)) for each in found)  # type: ignore[call-overload]
    return (found,) if isinstance(found, int) else found


def _number_of_text(value: object) -> object:
    """Take a number as the environment and flags write it, where a choice of numbers is asked for."""
    return int(value) if isinstance(value, str) and value.isascii() and value.isdecimal() else value


def _log_level(value: object) -> object:
    """Take the names of the eras' charts too, in any case."""
    if isinstance(value, str):
        return {"trace": "debug", "warn": "warning"}.get(value.lower(), value.lower())
    return value


Count = Annotated[int, BeforeValidator(_no_bool)]
Bytes = Annotated[int, BeforeValidator(parse_size), Field(ge=0, le=_MAX_BYTES)]
Seconds = Annotated[float, BeforeValidator(parse_seconds), Field(ge=0, le=_MAX_SECONDS, allow_inf_nan=False)]
Words = Annotated[tuple[str, ...], BeforeValidator(_words)]
Numbers = Annotated[tuple[int, ...], BeforeValidator(_numbers)]
AbsolutePath = Annotated[Path, BeforeValidator(_absolute)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, hide_input_in_errors=True)


class StoreSettings(_Section):
    """Where checkpoints live."""

    path: AbsolutePath = Field(Path(ERA_A1.checkpoint_base), description="directory that holds the artifacts")
    min_free_bytes: Bytes = Field(
        1 << 30, description="a dump is refused when less than this would stay free after it"
    )
    workers: Count = Field(0, ge=0, le=64, description="threads that hash files; 0 is one a core, at most 8")


class SignalSettings(_Section):
    """The signal directory."""

    path: AbsolutePath = Field(Path(ERA_A1.signal_dir), description="the hostPath shared with the workers")
    watch: Literal["auto", "inotify", "poll"] = Field(
        "auto", description="auto polls where inotify cannot work"
    )
    rescan_seconds: Seconds = Field(10.0, gt=0, description="full look at the directory, events or not")
    poll_seconds: Seconds = Field(0.25, gt=0, description="period where inotify cannot work")
    max_file_bytes: Count = Field(65536, ge=256, description="a request file larger than this is refused")


class CriuSettings(_Section):
    """How CRIU is run."""

    binary: Annotated[str, BeforeValidator(_absolute_or_empty)] = Field(
        "", description="absolute path of criu; empty: the one that make setup installed, else PATH"
    )
    log_level: Count = Field(4, ge=0, le=4, description="CRIU's -v")
    freeze_timeout_seconds: Seconds = Field(
        60.0, description="CRIU's --timeout, which covers freezing; 10 s is its own default"
    )
    ghost_limit_bytes: Bytes = Field(512 << 20, description="largest deleted file kept in the image")
    tcp: Literal["auto", "established", "close"] = Field(
        "auto", description="auto keeps connections when both ends are in the tree, else closes them"
    )
    file_locks: bool = Field(True, description="dump file locks")
    link_remap: bool = Field(True, description="dump files that lost their name but have another")
    freeze_cgroup: bool = Field(
        True, description="stop a container through its cgroup's freezer, if it has one of its own"
    )


class RuntimeSettings(_Section):
    """The node's container runtime. Only ``doctor`` asks it: containers are found without."""

    socket: Annotated[str, BeforeValidator(_absolute_or_empty)] = Field(
        "",
        description="absolute path of its CRI socket; empty: that of containerd, CRI-O, k3s or cri-dockerd",
    )


class CheckpointSettings(_Section):
    """The dump pipeline."""

    enabled: bool = Field(
        True, description="dump and restore at all; false: an agent that only reports, without CRIU and store"
    )
    deadline_seconds: Seconds = Field(3600.0, gt=0, description="the whole pipeline, from trigger to answer")
    attempts: Count = Field(3, ge=1, le=100, description="dumps that may fail before an id is left alone")
    attempts_window_seconds: Seconds = Field(
        3600.0, description="failed attempts older than this are forgotten"
    )
    concurrency: Count = Field(1, ge=1, le=16, description="dumps at one time")
    queue_limit: Count = Field(1000, ge=1, description="requests held in memory; the rest wait as files")
    leave: Literal["running", "stopped", "killed"] = Field(
        "running", description="the worker's state after a dump"
    )
    rootfs_exclude: Words = Field(
        (), description="paths of a container that are not saved, such as /var/cache/**, with commas between"
    )


class RestoreSettings(_Section):
    """The restore pipeline."""

    deadline_seconds: Seconds = Field(600.0, gt=0, description="from request to a running worker")
    verify: Literal["sizes", "digests"] = Field("sizes", description="what is checked before CRIU runs")
    strict: bool = Field(False, description="a compatibility fact that cannot be compared refuses")
    read_ahead: bool = Field(True, description="read the images ahead of CRIU when they are not in memory")
    placeholders: bool = Field(
        False, description="restore into any 'hibernode placeholder' that names a checkpoint of the store"
    )


FATAL_XIDS: Final = (46, 48, 63, 64, 74, 79, 94, 95, 119, 120)
"""XIDs after which a GPU wants a reset or a repair, not only its application a restart.

Chosen from NVIDIA's catalogue (docs.nvidia.com/deploy/xid-errors): 46 the GPU stopped; 48, 94, 95
uncorrectable memory errors; 63, 64 rows or pages retired, and the failure to; 74 NVLink; 79 off the bus; 119,
120 the GPU's own processor.
"""


class GpuSettings(_Section):
    """What the agent asks NVIDIA's driver."""

    enabled: bool = Field(True, description="look at the GPUs; without a driver nothing is done either way")
    poll_seconds: Seconds = Field(10.0, ge=0.1, description="period of the look at all GPUs")
    deadline_seconds: Seconds = Field(
        5.0, gt=0, description="a call of the driver's that takes longer is stuck"
    )
    fatal_xids: Numbers = Field(FATAL_XIDS, description="XIDs that make an event, with commas between them")
    pod_resources: AbsolutePath = Field(
        Path("/var/lib/kubelet/pod-resources/kubelet.sock"),
        description="the kubelet's socket that tells who has which GPU; it need not be there",
    )
    quiesce: Literal["auto", "cuda-checkpoint", "criu-plugin", "none"] = Field(
        "auto", description="who takes CUDA processes off the GPU for a dump; auto: cuda-checkpoint"
    )
    cuda_checkpoint: Annotated[str, BeforeValidator(_absolute_or_empty)] = Field(
        "", description="absolute path of cuda-checkpoint; empty: the one in PATH"
    )
    criu_plugins: AbsolutePath = Field(
        Path("/usr/lib/criu"), description="directory with cuda_plugin.so, for gpu.quiesce=criu-plugin"
    )
    lock_seconds: Seconds = Field(
        10.0,
        ge=0.1,
        le=86400,
        description="for one process to finish its GPU work and be locked, or to be unlocked",
    )
    quiesce_seconds: Seconds = Field(
        300.0,
        ge=0.1,
        le=86400,
        description="for a checkpoint or a restore of one process, which copies GPU memory",
    )
    start_seconds: Seconds = Field(
        30.0,
        ge=0.1,
        le=86400,
        description="for a call of cuda-checkpoint to start and reach the driver",
    )
    parallel: Count = Field(16, ge=1, le=256, description="calls of cuda-checkpoint at one time")


class GcSettings(_Section):
    """Retention. Zero turns a rule off; pinned artifacts are never removed."""

    interval_seconds: Seconds = Field(3600.0, description="period of the agent's own gc; 0: never")
    keep_per_id: Count = Field(2, ge=0, description="whole artifacts kept for each id, the newest first")
    max_age_seconds: Seconds = Field(0.0, description="remove artifacts older than this")
    max_total_bytes: Bytes = Field(0, description="remove the oldest until the store is this small")
    min_free_bytes: Bytes = Field(0, description="remove the oldest until this much is free")


class ServerSettings(_Section):
    """Health and metrics."""

    listen: str = Field("127.0.0.1:9465", pattern=r"^[\w.:\[\]-]*:\d{1,5}$", description="address:port")
    socket: AbsolutePath = Field(
        Path("/run/hibernode/agent.sock"), description="JSON for the debugging commands, root only"
    )


class MetadataSettings(_Section):
    """The metadata service for the workers of this node."""

    enabled: bool = Field(False, description="serve NIXL metadata to the workers of this node")
    backend: Literal["sqlite", "kubernetes"] = Field(
        "sqlite", description="where records are kept: on this node, or as objects in the cluster"
    )
    namespace: str = Field("", description="of the records in the cluster; empty: the agent's own")
    kubeconfig: Annotated[str, BeforeValidator(_absolute_or_empty)] = Field(
        "", description="absolute path of a kubeconfig file; empty: the agent's service account"
    )
    socket: AbsolutePath = Field(
        Path("/run/hibernode/metadata/mx.sock"), description="gRPC for workers, known by their pod"
    )
    listen: str = Field(
        "127.0.0.1:8001", pattern=r"^([\w.:\[\]-]*:\d{1,5})?$", description="gRPC address:port; empty: none"
    )
    tokens: bool = Field(False, description="TCP callers bring a bearer token, checked by TokenReview")
    audiences: Words = Field((), description="what tokens must be for; empty: the API server")
    accounts: Words = Field((), description="user names that tokens may be of; empty: all of the cluster")
    locality: bool = Field(True, description="workers of this node come alone in lists, where there are any")
    heartbeat_seconds: Seconds = Field(90.0, gt=0, description="a record unheard of for longer is not listed")
    stale_seconds: Seconds = Field(90.0, gt=0, description="a record unheard of for longer becomes Stale")
    remove_seconds: Seconds = Field(
        3600.0, gt=0, description="a record that is Stale, or never had a status, for longer is removed"
    )
    scan_seconds: Seconds = Field(
        30.0, ge=0.1, le=1200, description="period of the look for old records; one agent of a cluster looks"
    )
    nixl_listen: str = Field(
        "",
        pattern=r"^(\d{1,3}(\.\d{1,3}){3})?$",
        description="IPv4 address at which NIXL agents fetch confirmed blobs of local workers; empty: none",
    )
    nixl_open: bool = Field(
        False, description="nixl_listen may be open to other machines, though nobody tells there who asks"
    )
    confirm_seconds: Seconds = Field(2.0, gt=0, description="for a worker to confirm its record")
    confirm_keep_seconds: Seconds = Field(2.0, description="how long a worker's confirmation holds")
    request_seconds: Seconds = Field(10.0, gt=0, description="for one request")
    requests: Count = Field(256, ge=4, le=4096, description="requests in work; a quarter for one pod")
    watches: Count = Field(256, ge=4, le=4096, description="open watches; a quarter for one pod")
    connections: Count = Field(512, ge=8, le=8192, description="open connections; an eighth for one pod")
    max_message_bytes: Bytes = Field(32 << 20, ge=1 << 20, le=100 << 20, description="largest request")
    cache_bytes: Bytes = Field(256 << 20, description="encoded answers kept in memory")


class KubernetesSettings(_Section):
    """The cluster that this node is of."""

    enabled: Annotated[Literal["auto", "on", "off"], BeforeValidator(_on_off)] = Field(
        "auto", description="serve the pods of this node; auto: in a pod with a service account"
    )
    kubeconfig: Annotated[str, BeforeValidator(_absolute_or_empty)] = Field(
        "", description="absolute path of a kubeconfig file; empty: the agent's service account"
    )
    namespace: str = Field(
        "", pattern=r"^([a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)?$", description="of the pods; empty: all of them"
    )
    restore: bool = Field(
        True, description="restore into pods that a restore label and a placeholder ask for"
    )
    node_labels: bool = Field(
        False, description="label the node with CRIU's version and the store's free space"
    )
    node_condition: bool = Field(False, description="keep the node's condition GpuUnhealthy")


class ControllerSettings(_Section):
    """The controller of DynamoCheckpoint objects."""

    namespace: str = Field("", description="the only namespace that is looked at; empty: all of the cluster")
    excluded_namespaces: Words = Field((), description="namespaces left to other controllers")
    election: bool = Field(True, description="one of several controllers works, by a Lease")
    lease_namespace: str = Field("", description="of the Lease; empty: the controller's own")
    lease_seconds: Count = Field(
        30, ge=3, le=3600, description="a controller that is silent for this is over"
    )
    workers: Count = Field(4, ge=1, le=64, description="objects that are worked on at one time")
    resync_seconds: Seconds = Field(300.0, gt=0, description="period of the look at all objects")
    hash_length: Annotated[Literal[12, 16], BeforeValidator(_number_of_text)] = Field(
        12, description="digits of an identity's hash"
    )
    base_path: AbsolutePath = Field(
        Path(ERA_A1.checkpoint_base), description="where workers' pods see the artifacts"
    )
    pvc: str = Field("", description="the claim mounted there into Jobs; empty: none")
    cleanup_image: str = Field("busybox:latest", min_length=1, description="of the Jobs' init container")
    seccomp_profile: str = Field(
        "profiles/block-iouring.json", description="the Jobs' profile below the kubelet's; empty: none"
    )
    retries: Count = Field(0, ge=0, le=100, description="new Jobs after one that failed")
    retry_seconds: Seconds = Field(60.0, gt=0, description="before the first of them; doubled for each more")
    verify: Literal["off", "agent", "store"] = Field(
        "off", description="who must say before Ready that the artifact is whole: the agent, or the store"
    )
    verify_seconds: Seconds = Field(60.0, description="for that word, after the Job's success")
    cleanup: Literal["off", "store"] = Field(
        "off", description="store: artifacts go with their object; needs the store mounted at store.path"
    )


class LogSettings(_Section):
    """What the agent prints."""

    level: Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(_log_level)] = Field(
        "info", description="least severe line shown"
    )
    format: Literal["text", "json"] = Field("text", description="text for people, json for collectors")


class Settings(_Section):
    """All settings; see ``hibernode config show``."""

    node_name: str = Field("", description="this node's name; empty: the host's name")
    state_dir: AbsolutePath = Field(
        Path("/var/lib/hibernode"), description="attempts, restores, events: what outlives the agent"
    )
    store: StoreSettings = StoreSettings()
    signals: SignalSettings = SignalSettings()
    criu: CriuSettings = CriuSettings()
    runtime: RuntimeSettings = RuntimeSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    restore: RestoreSettings = RestoreSettings()
    gpu: GpuSettings = GpuSettings()
    gc: GcSettings = GcSettings()
    server: ServerSettings = ServerSettings()
    metadata: MetadataSettings = MetadataSettings()
    kubernetes: KubernetesSettings = KubernetesSettings()
    controller: ControllerSettings = ControllerSettings()
    log: LogSettings = LogSettings()

    @property
    def node(self) -> str:
        """The node's name, never empty."""
        return self.node_name or os.uname().nodename
