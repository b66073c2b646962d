"""The GPU's part of a restore: what is found out before it, and how its processes are woken after CRIU."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import dataclass

from hibernode.artifact.manifest import CudaFacts, Manifest
from hibernode.errors import HibernodeError
from hibernode.gpu.cuda import CudaError, CudaProcess, Tool, alive, find_tool, wake
from hibernode.gpu.devicemap import Here, findings, map_text, match
from hibernode.gpu.quiesce import PLUGIN, plugins
from hibernode.host import procfs
from hibernode.settings import GpuSettings
from hibernode.workload import Finding, Verdict


@dataclass(frozen=True, slots=True)
class Thaw:
    """What a restore does about GPUs. ``tool`` is None where it has nothing to wake itself."""

    findings: tuple[Finding, ...] = ()
    device_map: str = ""
    tool: Tool | None = None

    def moved(self) -> str:
        """Tell of the worker's other GPUs, for the answer; empty where each has its own."""
        return f", on other GPUs: {self.device_map}" if self.device_map else ""


def plan(manifest: Manifest, settings: GpuSettings, here: Here) -> Thaw:
    """Compare the GPUs, and find the program that wakes the processes. Blocks on its first start."""
    cuda = manifest.cuda
    if cuda is None:
        return Thaw()
    pids = {task.pid for task in manifest.tree}
    rows = findings(cuda, pids, here)
    tool, found = _tool(cuda, settings)
    if cuda.strategy == "criu-plugin":
        return Thaw((*rows, found))
    device_map = "" if here.why else map_text(match(cuda.gpus, here).pairs)
    return Thaw((*rows, found), device_map, tool)


def _tool(cuda: CudaFacts, settings: GpuSettings) -> tuple[Tool | None, Finding]:
    """Find the tool, and CRIU's plugin where that has made the checkpoint: it starts the tool too."""
    expected = f"cuda-checkpoint (it was {cuda.tool or 'of no known version'})"
    try:
        tool = find_tool(settings)
        if cuda.strategy == "criu-plugin":
            expected = f"{expected} and CRIU's {PLUGIN}, which has made the checkpoint"
            plugins(settings, tool)
    except HibernodeError as error:
        return None, Finding(
            "restore.cuda_tool", Verdict.FAIL, expected, error.message, error.remedy, error.reason
        )
    return tool, Finding("restore.cuda_tool", Verdict.OK, expected, f"{tool.path}, {tool.version}")


def restored_processes(cuda: CudaFacts, root: int) -> tuple[CudaProcess, ...]:
    """Find the CUDA processes in the tree that CRIU has made below ``root``, by the pids that they had.

    Only those of the root's own pid namespace count, and only under the name that they had: what the tree
    has started since, in a namespace of its own perhaps, may have any pid in there.

    :raises CudaError: one is not there, reason ``CudaProcessMissing``.
    """
    there = {each.ns_pid: each for each in _below(root)}
    found: list[CudaProcess] = []
    for process in cuda.processes:
        each = there.get(process.ns_pid)
        if each is None:
            raise _missing(f"the restored tree has no process with pid {process.ns_pid} ({process.comm})")
        if process.comm and _shown(each.comm) != process.comm:
            raise _missing(f"pid {process.ns_pid} was {process.comm} and is {_shown(each.comm)}")
        found.append(each)
    return tuple(found)


def _below(root: int) -> Iterator[CudaProcess]:
    depth = len(procfs.read_status(root).ns_pids)
    for stat in procfs.tree(root):
        try:
            ns_pids = procfs.read_status(stat.pid).ns_pids
        except ProcessLookupError:
            continue
        if len(ns_pids) == depth and stat.state not in "ZX":
            yield CudaProcess(stat.pid, ns_pids[-1], stat.comm, stat.key.start_ticks, devices=True)


def _shown(comm: str) -> str:
    """Write a name as the manifest has it."""
    return os.fsencode(comm).decode("utf-8", "backslashreplace")


def _missing(message: str) -> CudaError:
    return CudaError(
        message,
        remedy="it has ended at once, or the manifest is another tree's: see the worker's output",
        reason="CudaProcessMissing",
    )


async def awaken(thaw: Thaw, cuda: CudaFacts, root: int, settings: GpuSettings) -> dict[str, float]:
    """Bring the GPU state of a restored tree back and let it run; seconds by call.

    :raises CudaError: a process is not there, or one does not run afterwards.
    """
    if thaw.tool is None:
        return {}
    processes = await asyncio.to_thread(restored_processes, cuda, root)
    try:
        seconds = await wake(thaw.tool, processes, settings, device_map=thaw.device_map)
    except CudaError as error:  # its remedy is for a tree that lives
        raise CudaError(
            f"{error.message}; the restored tree was ended",
            remedy="the kernel's log may say why (journalctl -k --grep NVRM); a call that was cut may want "
            "more gpu.quiesce_seconds; the checkpoint is as it was",
            reason=error.reason,
        ) from error
    if gone := set(processes) - set(await asyncio.to_thread(alive, processes)):
        raise _missing(f"{', '.join(sorted(map(str, gone)))} ended while the GPU state was brought back")
    return seconds
