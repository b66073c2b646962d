"""What would make the GPU's part of a dump fail, asked before it; only of a tree that uses CUDA."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from hibernode.errors import HibernodeError, NotFoundError, RefusedError
from hibernode.gpu.checks import QUIET
from hibernode.gpu.cuda import CudaProcess, find_tool
from hibernode.gpu.devicemap import version
from hibernode.gpu.here import unknown
from hibernode.gpu.quiesce import NOTHING, Seen, plugins
from hibernode.gpu.service import look_once
from hibernode.gpu.state import GpuProcess, Snapshot
from hibernode.host import cgroups, nvidia, procfs
from hibernode.preflight import Facts
from hibernode.preflight.rows import row, size
from hibernode.preflight.store_checks import SPARE_MEMORY_BYTES
from hibernode.settings import GpuSettings, Settings
from hibernode.workload import Finding, Verdict

LEAST_DRIVER: Final = 570
"""With an older one a process that uses NVML itself stays on the GPU; before 555 there is no ``--action``."""

UVM: Final = "/dev/nvidia-uvm"
NODES: Final = ("/dev/nvidiactl", UVM)
"""What cuda-checkpoint opens, as every program of CUDA does."""

NCCL: Final[Mapping[str, str]] = {
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_IB_DISABLE": "1",
    "NCCL_RAS_ENABLE": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
}
"""What Dynamo sets for workers of several processes before it freezes them."""


@dataclass(frozen=True, slots=True)
class OnGpu:
    """What is known before a dump. ``held``: by NVML, the tree's processes alone, by pid.

    ``why``: why NVML tells nothing; ``free_bytes``: memory that may still be taken, of cgroup and node the
    lesser; ``tool`` and ``tool_error``: what would do the work, or why it would not; ``uvm``: who maps
    /dev/nvidia-uvm; ``missing``: device nodes that are not there; ``nccl``: by pid, what is set otherwise.
    """

    processes: tuple[CudaProcess, ...]
    held: tuple[GpuProcess, ...] = ()
    driver: str = ""
    why: str = ""
    free_bytes: int = 0
    tool: str = ""
    tool_error: Finding | None = None
    uvm: tuple[int, ...] = ()
    missing: tuple[str, ...] = ()
    nccl: Mapping[int, tuple[str, ...]] | None = None

    @property
    def gpu_bytes(self) -> int:
        """GPU memory that moves to the host: what NVML knows, of a process on two GPUs both parts."""
        return sum(each.memory_bytes or 0 for each in self.held)


@dataclass(frozen=True, slots=True)
class GpuLook:
    """What was found before a dump: the rows, by how much the image grows; ``seen``: for the quiesce step."""

    findings: tuple[Finding, ...] = ()
    gpu_bytes: int = 0
    seen: Seen = NOTHING


async def look_at(facts: Facts, settings: Settings, snapshot: Snapshot | None = None) -> GpuLook:
    """Look at the tree's CUDA processes and ask the driver, once, unless its answer is given.

    Nothing is asked, and there is no row, where no process uses CUDA.
    """
    processes = tuple(_processes(facts))
    if not processes:
        return GpuLook()
    seen = Seen(processes, snapshot or await look_once(settings.gpu))
    uvm = {mapping.pid for mapping in facts.mapped if mapping.path == UVM}
    found = await asyncio.to_thread(_look, seen, uvm, settings.gpu)
    return GpuLook(tuple(findings(found, facts, settings)), found.gpu_bytes, seen)


def _processes(facts: Facts) -> Iterator[CudaProcess]:
    """Tell which :func:`hibernode.gpu.cuda.cuda_processes` would list, by what preflight has read already."""
    for task in facts.tasks:
        devices = any(fd.target.startswith(nvidia.DEVICES) for fd in task.fds)
        if devices or task.libcuda:
            key = task.stat.key
            yield CudaProcess(key.pid, task.status.ns_pids[-1], task.stat.comm, key.start_ticks, devices)


def _look(seen: Seen, uvm: Collection[int], settings: GpuSettings) -> OnGpu:
    processes, snapshot = seen.processes, seen.snapshot
    pids = {each.pid for each in processes}
    held = tuple(each for gpu in snapshot.gpus for each in gpu.processes or () if each.pid in pids)
    tool, error = _tool(settings, devices=any(each.devices for each in processes))
    return OnGpu(
        processes,
        held,
        snapshot.versions.driver or "",
        unknown(snapshot) or unlisted(processes, held, snapshot),
        _free_bytes(processes[0].pid),
        tool,
        error,
        tuple(each.pid for each in processes if each.pid in uvm),
        tuple(node for node in NODES if not os.path.exists(node)),  # noqa: PTH110 - of the agent's own /dev
        {each.pid: _nccl(each.pid) for each in processes},
    )


def unlisted(processes: Sequence[CudaProcess], held: Sequence[GpuProcess], snapshot: Snapshot) -> str:
    """Say why NVML may tell less than the tree has on the GPUs; empty where it tells of it.

    A tree that has a device open and is not listed at all is one whose pids the driver knows otherwise.
    """
    for gpu in snapshot.gpus:
        if gpu.processes is None:
            why = gpu.readings.unavailable.get("processes", "")
            return f"NVML has no list of the processes of {gpu.title}: {why}"
    if not held and any(each.devices for each in processes):
        return "NVML lists no process of this tree: does the agent see the pids of the node (hostPID)?"
    return ""


def _tool(settings: GpuSettings, *, devices: bool) -> tuple[str, Finding | None]:
    expected = "what takes CUDA processes off the GPU (gpu.quiesce)"
    if settings.quiesce == "none":
        return "", Finding(
            "cuda.tool",
            Verdict.WARN,
            expected,
            "gpu.quiesce is none: CRIU will find GPU state that it cannot dump",
            "set gpu.quiesce to auto",
            "CudaNotQuiesced",
        )
    try:
        tool = find_tool(settings)
        if settings.quiesce == "criu-plugin":
            plugins(settings, tool)  # which starts the tool
    except NotFoundError as error:
        if settings.quiesce == "auto" and not devices:
            return "", Finding("cuda.tool", Verdict.OK, expected, f"{error.message}; no device is open")
        return "", Finding("cuda.tool", Verdict.FAIL, expected, error.message, error.remedy, error.reason)
    except HibernodeError as error:
        return "", Finding("cuda.tool", Verdict.FAIL, expected, error.message, error.remedy, error.reason)
    return f"{tool.path}, {tool.version}", None


def _free_bytes(pid: int) -> int:
    free = procfs.mem_available_bytes()
    try:
        limited = cgroups.memory(pid).free
    except (RefusedError, OSError):
        return free
    return free if limited is None else min(free, limited)


def _nccl(pid: int) -> tuple[str, ...]:
    try:
        environ = procfs.environ(pid)
    except OSError:
        return ()
    return tuple(f"{name}={value}" for name, value in NCCL.items() if environ.get(name) != value)


def doctor_finding(snapshot: Snapshot, settings: GpuSettings) -> list[Finding]:
    """Say whether a node with a driver has what takes processes off its GPUs; no row where none is."""
    if snapshot.state in QUIET:
        return []
    tool, error = _tool(settings, devices=True)
    found = error or Finding("cuda.tool", Verdict.OK, "cuda-checkpoint", tool)
    verdict = (
        Verdict.WARN if found.verdict is Verdict.FAIL else found.verdict
    )  # not every node freezes workers
    return [replace(found, check="node.cuda_tool", verdict=verdict)]


# rows -------------------------------------------------------------------------------------------------


def findings(seen: OnGpu, facts: Facts, settings: Settings) -> list[Finding]:
    """Judge it, one row a check. Pure."""
    tool = Finding("cuda.tool", Verdict.OK, "what takes CUDA processes off the GPU", seen.tool)
    return [
        Finding("cuda.processes", Verdict.OK, "", f"{len(seen.processes)} use CUDA, or have its library"),
        seen.tool_error or tool,
        _driver(seen),
        _kinds(seen),
        Finding(
            "cuda.managed_memory",
            Verdict.OK,
            "no managed memory (UVM): it cannot be seen from outside, the lock or the checkpoint refuses it",
            f"{len(seen.uvm)} processes map {UVM}",
        ),
        row(
            "cuda.devices",
            "the driver's device nodes, for cuda-checkpoint",
            (f"no {node}" for node in seen.missing),
            remedy="give the agent the node's /dev, or NVIDIA's runtime class",
            reason="GpuDeviceMissing",
            verdict=Verdict.WARN,
            fine="there",
        ),
        _memory(seen),
        _space(seen, facts, settings),
        _environment(seen),
    ]


def _driver(seen: OnGpu) -> Finding:
    expected = f"a driver >= {LEAST_DRIVER}"
    now = version(seen.driver)
    if now is None:
        return Finding("cuda.driver", Verdict.SKIP, expected, seen.why or "NVML does not tell its version")
    return row(
        "cuda.driver",
        expected,
        [f"driver {seen.driver}"] if now[0] < LEAST_DRIVER else [],
        remedy="update the driver: an older one does not take processes off the GPU that use NVML",
        reason="GpuDriverTooOld",
        verdict=Verdict.WARN,
        fine=f"driver {seen.driver}",
    )


def _kinds(seen: OnGpu) -> Finding:
    """See that no process is on a MIG device or a client of MPS: NVIDIA's tool knows neither."""

    def offenders() -> Iterator[str]:
        for each in seen.held:
            if each.instance:
                yield f"pid {each.pid} is on the MIG device {each.instance}"
            if "mps" in each.kinds:
                yield f"pid {each.pid} is a client of MPS"

    found = list(offenders())
    if seen.why and not found:
        return Finding("cuda.sharing", Verdict.SKIP, "whole GPUs, no MIG and no MPS", seen.why)
    return row(
        "cuda.sharing",
        "whole GPUs, no MIG and no MPS",
        found,
        remedy="run the worker on a whole GPU, without nvidia-cuda-mps-control",
        reason="GpuShared",
        fine=f"{len(seen.held)} processes on whole GPUs",
    )


def _memory(seen: OnGpu) -> Finding:
    """See that the GPU's bytes fit into the host's memory: the worker takes them, and is killed if not."""
    need = seen.gpu_bytes + SPARE_MEMORY_BYTES
    if seen.why and seen.free_bytes >= seen.gpu_bytes:
        return Finding("cuda.host_memory", Verdict.SKIP, "host memory for the GPU's", seen.why)
    return row(
        "cuda.host_memory",
        f"{size(need)} of host memory for what is on the GPU",
        [f"{size(seen.free_bytes)} free"] if seen.free_bytes < need else [],
        remedy="raise resources.limits.memory of the worker by the GPU memory that it uses, or free memory",
        reason="InsufficientMemory",
        fine=f"{size(seen.free_bytes)} free",
    )


def _space(seen: OnGpu, facts: Facts, settings: Settings) -> Finding:
    """See that the image fits with the GPU's bytes, which are host memory by then."""
    need, floor, free = (
        facts.estimate_bytes + seen.gpu_bytes,
        settings.store.min_free_bytes,
        facts.store.free_bytes,
    )
    return row(
        "cuda.space",
        f"{size(need)} for the image with the GPU's memory, and {size(floor)} that stay free",
        [f"{size(free)} free on {facts.store.path}"] if free < need + floor else [],
        remedy="free space ('hibernode gc'), or lower store.min_free_bytes",
        reason="NoSpace",
        fine=f"{size(free)} free",
    )


def _environment(seen: OnGpu) -> Finding:
    """Say what processes that work with each other should have set; of a single one nothing is asked."""
    expected = "NCCL and its transports as they can be frozen"
    if len(seen.processes) == 1:
        return Finding("cuda.nccl", Verdict.OK, expected, "one process")
    missing = [f"pid {pid} lacks {' '.join(lacks)}" for pid, lacks in (seen.nccl or {}).items() if lacks]
    return row(
        "cuda.nccl",
        expected,
        missing,
        remedy="processes that use NCCL with each other may not be lockable without; others may ignore this",
        reason="NcclEnvironment",
        verdict=Verdict.WARN,
        fine="as asked",
    )
