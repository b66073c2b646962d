"""The snapshot as Prometheus families: our own names, dcgm-exporter's labels, so that both can be joined.

While a GPU, or all of NVML, does not answer, its readings are left out rather than repeated; what stays says
so: ``hibernode_nvml_up``, the time of the last success, each GPU's state, and what was counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from hibernode.gpu.events import XID
from hibernode.gpu.state import Gpu, GpuState, MigInstance, NvmlState, Snapshot

GPU_LABELS: Final = ("gpu", "UUID", "pci_bus_id", "device", "modelName")
"""As dcgm-exporter has them: index, UUID, PCI id, ``nvidia0``, name."""

MIG_LABELS: Final = (*GPU_LABELS, "GPU_I_PROFILE", "GPU_I_ID")
"""Both empty for a whole GPU. ``UUID`` is the GPU's for an instance too, as dcgm-exporter has it."""

POD_LABELS: Final = ("namespace", "pod", "container")


@dataclass(frozen=True, slots=True)
class _Gauge:
    """A family of one field of the readings; ``scale`` makes base units of it."""

    name: str
    help: str
    field: str
    scale: float = 1.0


_GAUGES: Final = (
    _Gauge("memory_reserved_bytes", "Bytes that the driver keeps for itself.", "memory_reserved_bytes"),
    _Gauge("utilization_ratio", "Share of the time that a kernel ran.", "utilization_gpu_percent", 0.01),
    _Gauge(
        "memory_utilization_ratio",
        "Share of the time that memory was read or written.",
        "utilization_memory_percent",
        0.01,
    ),
    _Gauge("temperature_celsius", "Temperature.", "temperature_celsius"),
    _Gauge("power_watts", "Power drawn.", "power_watts"),
    _Gauge("power_limit_watts", "Limit that is in force.", "power_limit_watts"),
    _Gauge("sm_clock_hertz", "Clock of the multiprocessors.", "clock_sm_mhz", 1e6),
    _Gauge("memory_clock_hertz", "Clock of the memory.", "clock_memory_mhz", 1e6),
    _Gauge("row_remap_pending", "Whether a remapping waits for a reset.", "row_remap_pending"),
    _Gauge("row_remap_failed", "Whether a remapping has failed.", "row_remap_failed"),
    _Gauge("mig_mode", "Whether MIG is on.", "mig_mode"),
    _Gauge("persistence_mode", "Whether the driver stays loaded without users.", "persistence_mode"),
)

_MEMORY: Final = (
    ("memory_total_bytes", "Bytes of memory."),
    ("memory_used_bytes", "Bytes of memory in use."),
    ("memory_free_bytes", "Bytes of memory that are free."),
)

_BY_KIND: Final = (
    (
        "remapped_rows",
        "Rows of memory that were remapped.",
        {"corrected": "remapped_rows_corrected", "uncorrected": "remapped_rows_uncorrected"},
    ),
    (
        "retired_pages",
        "Pages of memory that were retired.",
        {"single_bit": "retired_pages_single_bit", "double_bit": "retired_pages_double_bit"},
    ),
    ("nvlinks", "NVLinks by what they are.", {"active": "nvlinks_active", "inactive": "nvlinks_inactive"}),
    (
        "ecc_volatile_errors",
        "Errors of memory since the driver was loaded.",
        {"corrected": "ecc_volatile_corrected", "uncorrected": "ecc_volatile_uncorrected"},
    ),
    (
        "ecc_aggregate_errors",
        "Errors of memory in the GPU's life.",
        {"corrected": "ecc_aggregate_corrected", "uncorrected": "ecc_aggregate_uncorrected"},
    ),
)


def metrics(snapshot: Snapshot) -> list[Metric]:
    """Lay a snapshot out; nothing at all where the GPUs are not looked at."""
    if snapshot.state is NvmlState.OFF:
        return []
    return [*_node(snapshot), *_state(snapshot), *_gpus(snapshot), *_events(snapshot), *_pods(snapshot)]


def _gauge(name: str, text: str, labels: Iterable[str] = ()) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"hibernode_{name}", text, labels=list(labels))


def _node(snapshot: Snapshot) -> Iterator[Metric]:
    up = _gauge("nvml_up", "Whether NVML answers (1) or not (0).")
    up.add_metric([], float(snapshot.state is NvmlState.UP))
    yield up
    if snapshot.taken_at:
        last = _gauge("nvml_last_success_timestamp_seconds", "When the GPUs were last read.")
        last.add_metric([], snapshot.taken_at)
        took = _gauge("nvml_poll_duration_seconds", "Seconds that the last look at all GPUs took.")
        took.add_metric([], snapshot.seconds)
        info = _gauge("nvml_info", "Versions of the driver; the value is 1.", ("driver", "cuda", "nvml"))
        versions = snapshot.versions
        info.add_metric([versions.driver or "", versions.cuda or "", versions.nvml or ""], 1)
        yield from (last, took, info)


def _labels(gpu: Gpu) -> list[str]:
    device = "" if gpu.minor is None else f"nvidia{gpu.minor}"
    return [str(gpu.index), gpu.uuid, gpu.pci_bus_id, device, gpu.name]


def _instance(mig: MigInstance | None) -> list[str]:
    if mig is None:
        return ["", ""]
    return [mig.profile or "", "" if mig.gpu_instance is None else str(mig.gpu_instance)]


def _state(snapshot: Snapshot) -> Iterator[Metric]:
    """Say the state of each; while NVML does not answer nobody knows it, so it is ``stale``."""
    state = _gauge("gpu_state", "State of a GPU; the value is 1.", (*GPU_LABELS, "state"))
    for gpu in snapshot.gpus:
        known = snapshot.stale_since is None
        state.add_metric([*_labels(gpu), gpu.state.value if known else "stale"], 1)
    yield state


def _gpus(snapshot: Snapshot) -> Iterator[Metric]:
    """Give the readings of the GPUs that are well; none that are old."""
    if snapshot.stale_since is None:
        gpus = [gpu for gpu in snapshot.gpus if gpu.state is GpuState.OK]
        yield from _memory(gpus)
        yield from _readings(gpus)
        yield from _energy_and_throttling(gpus)


def _memory(gpus: list[Gpu]) -> Iterator[Metric]:
    for field, text in _MEMORY:
        family = _gauge(f"gpu_{field}", text, MIG_LABELS)
        for gpu in gpus:
            parts: list[MigInstance | None] = [None, *gpu.instances]
            for part in parts:
                value = getattr(gpu.readings if part is None else part, field)
                if value is not None:
                    family.add_metric([*_labels(gpu), *_instance(part)], value)
        yield family


def _readings(gpus: list[Gpu]) -> Iterator[Metric]:
    for one in _GAUGES:
        family = _gauge(f"gpu_{one.name}", one.help, GPU_LABELS)
        for gpu in gpus:
            if (value := getattr(gpu.readings, one.field)) is not None:
                family.add_metric(_labels(gpu), value * one.scale)
        yield family
    for name, text, kinds in _BY_KIND:
        family = _gauge(f"gpu_{name}", text, (*GPU_LABELS, "kind"))
        for gpu in gpus:
            for kind, field in kinds.items():
                if (value := getattr(gpu.readings, field)) is not None:
                    family.add_metric([*_labels(gpu), kind], value)
        yield family


def _energy_and_throttling(gpus: list[Gpu]) -> Iterator[Metric]:
    energy = CounterMetricFamily(
        "hibernode_gpu_energy_joules", "Energy used since the driver was loaded.", labels=list(GPU_LABELS)
    )
    throttled = _gauge(
        "gpu_throttled", "Why the clocks are lowered; the value is 1.", (*GPU_LABELS, "reason")
    )
    for gpu in gpus:
        if gpu.readings.energy_joules is not None:
            energy.add_metric(_labels(gpu), gpu.readings.energy_joules)
        for reason in gpu.readings.throttle_reasons or ():
            throttled.add_metric([*_labels(gpu), reason], 1)
    yield from (energy, throttled)


def _events(snapshot: Snapshot) -> Iterator[Metric]:
    """Give what was counted, which stays true when NVML does not answer."""
    xids = CounterMetricFamily("hibernode_gpu_xid", "XIDs by number.", labels=["UUID", "xid"])
    last = _gauge("gpu_xid_last_timestamp_seconds", "When an XID was last seen.", ("UUID", "xid"))
    events = CounterMetricFamily(
        "hibernode_gpu_events", "What else the driver has reported.", labels=["UUID", "event"]
    )
    for seen in snapshot.happened:
        if seen.event == XID:
            xids.add_metric([seen.uuid, str(seen.code)], seen.count)
            last.add_metric([seen.uuid, str(seen.code)], seen.last)
        else:
            events.add_metric([seen.uuid, seen.event], seen.count)
    yield from (xids, last, events)


def _pods(snapshot: Snapshot) -> Iterator[Metric]:
    """Sum the memory by container; processes of no known container are together under empty names."""
    used = _gauge(
        "gpu_container_memory_bytes",
        "Bytes of memory in use by the processes of a container.",
        (*MIG_LABELS, *POD_LABELS),
    )
    given = _gauge(
        "gpu_allocated", "A device that the kubelet has given; the value is 1.", ("UUID", *POD_LABELS)
    )
    for gpu in snapshot.gpus if snapshot.stale_since is None else ():
        parts = {each.uuid: each for each in gpu.instances}
        sums: dict[tuple[str, ...], int] = {}
        for process in gpu.processes or ():
            owner = process.owner
            names = (owner.namespace or "", owner.pod or "", owner.container or "")
            key = (*_labels(gpu), *_instance(parts.get(process.instance)), *names)
            sums[key] = sums.get(key, 0) + (process.memory_bytes or 0)
        for labels, value in sums.items():
            used.add_metric(list(labels), value)
    for each in snapshot.allocations:
        given.add_metric([each.device, each.namespace, each.pod, each.container], 1)
    yield from (used, given)
