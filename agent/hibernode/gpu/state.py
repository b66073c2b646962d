"""What is known of the node's GPUs, as plain data.

A GPU, and a MIG instance, is known by its UUID: indices and PCI ids change with the driver's mood. A value
that NVML does not give is None, and ``unavailable`` says why, by the field's name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import UTC, datetime
from enum import Enum, StrEnum
from typing import Any, Final


class NvmlState(StrEnum):
    """How it stands with NVML. ``absent`` is a node without NVIDIA's driver, which is no fault."""

    OFF = "off"
    STARTING = "starting"
    ABSENT = "absent"
    UP = "up"
    STUCK = "stuck"
    BROKEN = "broken"


class GpuState(StrEnum):
    """How it stands with one GPU.

    ``lost`` is NVML's word for one that has left the bus; ``stuck`` does not answer; ``missing`` was there
    and is not listed any more.
    """

    OK = "ok"
    LOST = "lost"
    STUCK = "stuck"
    FAILED = "failed"
    MISSING = "missing"


class OwnerKind(StrEnum):
    """Where a process lives: in a pod, in another container, on the node itself, or nobody can tell."""

    POD = "pod"
    CONTAINER = "container"
    NODE = "node"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Readings:
    """What a GPU's sensors and counters say; units are in the names."""

    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    memory_free_bytes: int | None = None
    memory_reserved_bytes: int | None = None
    utilization_gpu_percent: int | None = None
    utilization_memory_percent: int | None = None
    temperature_celsius: int | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    energy_joules: float | None = None
    clock_graphics_mhz: int | None = None
    clock_sm_mhz: int | None = None
    clock_memory_mhz: int | None = None
    throttle_reasons: tuple[str, ...] | None = None
    ecc_mode: bool | None = None
    ecc_volatile_corrected: int | None = None
    ecc_volatile_uncorrected: int | None = None
    ecc_aggregate_corrected: int | None = None
    ecc_aggregate_uncorrected: int | None = None
    retired_pages_single_bit: int | None = None
    retired_pages_double_bit: int | None = None
    retired_pages_pending: bool | None = None
    remapped_rows_corrected: int | None = None
    remapped_rows_uncorrected: int | None = None
    row_remap_pending: bool | None = None
    row_remap_failed: bool | None = None
    persistence_mode: bool | None = None
    compute_mode: str | None = None
    mig_mode: bool | None = None
    mig_mode_pending: bool | None = None
    nvlinks_active: int | None = None
    nvlinks_inactive: int | None = None
    unavailable: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MigInstance:
    """A MIG device; ``profile`` is such as ``1g.10gb``."""

    uuid: str
    gpu_instance: int | None = None
    compute_instance: int | None = None
    profile: str | None = None
    multiprocessors: int | None = None
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    memory_free_bytes: int | None = None
    unavailable: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Owner:
    """Who a process is. ``reason`` says what could not be told, empty when all is known.

    The pod's uid, its container's id, and whether there is one at all come from the cgroup. The names come
    from what the kubelet has made on the node; None when it has not.
    """

    kind: OwnerKind
    reason: str = ""
    name: str = ""
    pod_uid: str = ""
    container_id: str = ""
    namespace: str | None = None
    pod: str | None = None
    container: str | None = None


NOT_LOOKED: Final = Owner(OwnerKind.UNKNOWN, "not looked for yet")


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that holds a GPU, or a MIG instance of it.

    ``kinds`` are of ``compute``, ``graphics`` and ``mps``. ``instance`` is the MIG device's UUID, empty for
    the whole GPU. ``memory_bytes`` is None when the driver does not tell.
    """

    pid: int
    kinds: tuple[str, ...]
    memory_bytes: int | None
    instance: str = ""
    owner: Owner = NOT_LOOKED


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. ``uuid`` is empty for one that never said it.

    ``since`` is when it got into its state (seconds since the epoch), ``error`` why it is not ``ok``. One
    that is not has no readings, instances and processes: nothing old is shown as new.
    """

    uuid: str
    index: int
    state: GpuState = GpuState.OK
    error: str = ""
    since: float = 0.0
    name: str = ""
    pci_bus_id: str = ""
    minor: int | None = None
    readings: Readings = Readings()
    instances: tuple[MigInstance, ...] = ()
    processes: tuple[GpuProcess, ...] | None = ()

    @property
    def title(self) -> str:
        """What a sentence calls it."""
        return self.uuid or f"the GPU with index {self.index}"


@dataclass(frozen=True, slots=True)
class Allocation:
    """A device that the kubelet has given to a container."""

    namespace: str
    pod: str
    container: str
    resource: str
    device: str


@dataclass(frozen=True, slots=True)
class Versions:
    """Versions of the driver; None when it does not tell. ``cuda`` is the newest that it speaks."""

    driver: str | None = None
    nvml: str | None = None
    cuda: str | None = None


@dataclass(frozen=True, slots=True)
class Happened:
    """What the driver has reported of one GPU: ``count`` times, the first and last time since the epoch.

    ``event`` is ``xid`` with its number as ``code``, or another kind with code 0.
    """

    uuid: str
    event: str
    code: int
    count: int
    first: float
    last: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All of it at one time.

    ``taken_at`` is when the GPUs were last read, 0 for never; ``stale_since`` the same when a later attempt
    has failed, and ``reason`` says how. Times are seconds since the epoch.
    """

    state: NvmlState
    reason: str = ""
    taken_at: float = 0.0
    stale_since: float | None = None
    seconds: float = 0.0
    versions: Versions = Versions()
    gpus: tuple[Gpu, ...] = ()
    happened: tuple[Happened, ...] = ()
    fatal_xids: tuple[int, ...] = ()
    allocations: tuple[Allocation, ...] = ()
    allocations_error: str = ""
    events_error: str = ""

    def troubled(self) -> Iterator[Gpu]:
        """Yield the GPUs that are not well."""
        return (gpu for gpu in self.gpus if gpu.state is not GpuState.OK)


def rfc3339(seconds: float | None) -> str | None:
    """Write a time; None for one that is not known or never was."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds") if seconds else None


_WORD: Final = re.compile(r"_([a-z0-9])")


def camel(name: str) -> str:
    """Write a field's name as JSON has it here."""
    return _WORD.sub(lambda match: match[1].upper(), name)


_TIMES: Final = frozenset({"taken_at", "stale_since", "since", "first", "last"})


def as_json(value: Any) -> Any:
    """Lay plain data out as JSON: names in camelCase, times in RFC 3339, None for what is not known."""
    if is_dataclass(value):
        found = {each.name: getattr(value, each.name) for each in fields(value)}
        return {
            camel(name): rfc3339(content) if name in _TIMES else as_json(content)
            for name, content in found.items()
        }
    if isinstance(value, Mapping):
        return {camel(key): as_json(content) for key, content in value.items()}
    if isinstance(value, (tuple, list)):
        return [as_json(each) for each in value]
    return value.value if isinstance(value, Enum) else value
