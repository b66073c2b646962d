"""What is said of the GPU before a dump."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hibernode.gpu.cuda import CudaProcess, cuda_processes
from hibernode.gpu.preflight import (
    NCCL,
    GpuLook,
    OnGpu,
    _processes,
    doctor_finding,
    findings,
    look_at,
    unlisted,
)
from hibernode.gpu.state import Gpu, GpuProcess, NvmlState, Readings, Snapshot
from hibernode.host import procfs
from hibernode.host.procfs import Process
from hibernode.preflight import Facts, gather
from hibernode.preflight.facts import StoreFacts, Task
from hibernode.settings import GpuSettings, Settings
from hibernode.workload import Finding, Verdict
from tests.gpu.cuda_kit import CudaTool
from tests.gpu.fixtures import built

__all__ = ["built"]  # a fixture

GIB = 1 << 30
WELL = OnGpu(
    processes=(
        CudaProcess(100, 1, "worker", 1, devices=True),
        CudaProcess(101, 2, "worker", 1, devices=True),
    ),
    held=(GpuProcess(100, ("compute",), 10 * GIB), GpuProcess(101, ("compute",), 10 * GIB)),
    driver="580.65.06",
    free_bytes=64 * GIB,
    tool="/usr/bin/cuda-checkpoint, 580.65.06",
    nccl={100: (), 101: ()},
)


def facts(pid: int = 100, free: int = 64 * GIB) -> Facts:
    """Describe a tree of one process that takes no memory of its own."""
    task = Task(procfs.read_stat(os.getpid()), procfs.read_status(os.getpid()))
    task = replace(task, stat=replace(task.stat, pid=pid), status=replace(task.status, vm_swap_bytes=0))
    return Facts((task,), 1, {}, (), StoreFacts("/store", free_bytes=free), "4.2.1", GIB)


def rows_of(free: int = 64 * GIB, **changes: Any) -> dict[str, Finding]:
    """Judge what is well, with changes."""
    found = findings(replace(WELL, **changes), facts(free=free), Settings())
    return {row.check.removeprefix("cuda."): row for row in found}


def test_a_tree_on_whole_gpus_with_room_for_them_can_be_dumped() -> None:
    """Every row is ok."""
    assert {row.verdict for row in rows_of().values()} == {Verdict.OK}
    assert WELL.gpu_bytes == 20 * GIB


CASES: list[tuple[str, dict[str, Any], str, Verdict]] = [
    ("driver", {"driver": "560.35.03"}, "560.35.03", Verdict.WARN),
    ("driver", {"driver": "", "why": "NVML is absent: none"}, "NVML is absent", Verdict.SKIP),
    ("host_memory", {"free_bytes": 10 * GIB}, "10.0 GiB free", Verdict.FAIL),
    ("host_memory", {"why": "NVML is stuck: x"}, "NVML is stuck", Verdict.SKIP),
    ("host_memory", {"why": "no list", "free_bytes": 10 * GIB}, "10.0 GiB free", Verdict.FAIL),
    ("space", {"free": 10 * GIB}, "10.0 GiB free on /store", Verdict.FAIL),
    ("sharing", {"held": (GpuProcess(100, ("compute",), 1, "MIG-7"),)}, "MIG-7", Verdict.FAIL),
    ("sharing", {"why": "x", "held": (GpuProcess(100, ("mps",), 1),)}, "client of MPS", Verdict.FAIL),
    (
        "sharing",
        {"held": (GpuProcess(100, ("compute", "mps"), 1),)},
        "pid 100 is a client of MPS",
        Verdict.FAIL,
    ),
    ("devices", {"missing": ("/dev/nvidiactl",)}, "no /dev/nvidiactl", Verdict.WARN),
    ("nccl", {"nccl": {100: (), 101: ("NCCL_RAS_ENABLE=0",)}}, "101 lacks NCCL_RAS_ENABLE=0", Verdict.WARN),
]


@pytest.mark.parametrize(
    ("check", "changes", "words", "verdict"), CASES, ids=[f"{c[0]}-{c[2]}" for c in CASES]
)
def test_what_is_not_well_is_said(check: str, changes: dict[str, Any], words: str, verdict: Verdict) -> None:
    """One row, with what was found, and a remedy where one can do something."""
    row = rows_of(**changes)[check]
    assert (row.verdict, words in row.found) == (verdict, True), row
    assert verdict is Verdict.SKIP or (row.remedy and row.reason)


def test_what_nvml_does_not_list_is_not_taken_for_nothing() -> None:
    """No list, or one without the tree, says nothing of what it has; without a device it has nothing."""
    gpu = Gpu("GPU-1", 0)
    silent = Gpu("GPU-2", 1, processes=None, readings=Readings(unavailable={"processes": "No Permission"}))
    up = Snapshot(NvmlState.UP, gpus=(gpu,))
    linked = CudaProcess(102, 3, "linked", 1)
    assert unlisted(WELL.processes, WELL.held, up) == ""
    assert unlisted([linked], (), up) == ""
    assert "lists no process of this tree" in unlisted(WELL.processes, (), up)
    silent_too = Snapshot(NvmlState.UP, gpus=(gpu, silent))
    assert "GPU-2: No Permission" in unlisted(WELL.processes, WELL.held, silent_too)


def test_one_process_needs_no_nccl() -> None:
    """Nothing is asked of its environment."""
    lacks = tuple(f"{name}={value}" for name, value in NCCL.items())
    assert rows_of(processes=WELL.processes[:1], nccl={100: lacks})["nccl"].verdict is Verdict.OK


def test_a_tree_without_cuda_has_no_rows() -> None:
    """And NVML is not asked."""
    assert asyncio.run(look_at(facts(os.getpid()), Settings())) == GpuLook()


def test_what_preflight_has_read_tells_who_uses_cuda(tmp_path: Path, built: Path) -> None:
    """Those that a look of its own would find, one that only has the library among them."""
    with CudaTool(tmp_path / "tool", built).tree(2, 1) as root, Process.open(root) as process:
        seen = gather(process, Settings(), None, tmp_path)
        assert tuple(_processes(seen)) == cuda_processes(root)
        assert len(cuda_processes(root)) == 3


def test_a_node_without_a_driver_has_no_row_of_the_tool() -> None:
    """One with a driver has; that the program is missing is a warning there."""
    settings = GpuSettings(cuda_checkpoint="/no/such/cuda-checkpoint")
    assert doctor_finding(Snapshot(NvmlState.ABSENT), settings) == []
    (row,) = doctor_finding(Snapshot(NvmlState.UP), settings)
    assert (row.check, row.verdict, row.reason) == ("node.cuda_tool", Verdict.WARN, "CudaCheckpointMissing")
