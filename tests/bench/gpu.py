"""The look at the GPUs: 8 of them with 200 processes, against a library that answers at once.

So this is our own work and nvidia-ml-py's; the driver's own time comes on top of it.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

from hibernode.gpu.cuda import cuda_processes
from hibernode.gpu.metrics import metrics
from hibernode.gpu.owners import Owners
from hibernode.gpu.quiesce import Seen
from hibernode.gpu.quiesce import quiesce as take_off
from hibernode.gpu.service import GpuService, look_once
from hibernode.host.safefs import Dir
from hibernode.journal import Journal
from hibernode.metrics import Metrics
from hibernode.settings import GpuSettings
from tests.bench.measure import Report
from tests.gpu import cuda_kit, kit

GPUS, PROCESSES = 8, 200
POLLS_PER_MINUTE = 6
"""With gpu.poll_seconds at its default."""

CUDA_PROCESSES = 5
TOOL_SECONDS = 0.3
"""What each call of the stand-in for cuda-checkpoint takes; calls for several processes run side by side."""

ADDED_SECONDS = 0.05
"""What the quiesce step may add to a dump beyond the tool's own time."""

CPU_SECONDS_PER_MINUTE = 0.6
"""One per cent of a core."""


def poll(report: Report, base: Path, rounds: int) -> None:
    """Measure polls, and a scrape of what they found."""
    report.section(f"NVML: {GPUS} GPUs, {PROCESSES} processes, {rounds} polls")
    directory = base / "gpu"
    kit.load(kit.build(directory))
    stub = kit.Stub(directory / "nvml.txt", GPUS)
    os.environ["NVML_STUB"] = str(stub.path)
    command = [sys.executable, "-I", "-S", "-c", "import signal; signal.pause()"]
    sleepers = [subprocess.Popen(command) for _ in range(PROCESSES)]
    try:
        for number, sleeper in enumerate(sleepers):
            stub.add_process(number % GPUS, sleeper.pid)
        asyncio.run(_measure(report, rounds))
    finally:
        for sleeper in sleepers:
            sleeper.kill()
            sleeper.wait()
        os.environ.pop("NVML_STUB")


async def _measure(report: Report, rounds: int) -> None:
    service = GpuService(GpuSettings(), owners=Owners(same_pids=True), watch_events=False)
    exporter = Metrics()
    exporter.add_collector("gpu", lambda: metrics(service.snapshot))
    await service.poll()
    polls, cpu, scrapes = [], [], []
    for _ in range(rounds):
        used, began = time.process_time(), time.monotonic()
        found = await service.poll()
        polls.append(time.monotonic() - began)
        cpu.append((time.process_time() - used) * POLLS_PER_MINUTE)
        assert sum(len(gpu.processes or ()) for gpu in found.gpus) == PROCESSES
        began = time.monotonic()
        await exporter.render()
        scrapes.append(time.monotonic() - began)
    service.close()
    report.add("poll of 8 GPUs, 200 processes", "s", polls)
    report.add("the same, CPU per minute at 10 s", "s", cpu, "< 0.6", CPU_SECONDS_PER_MINUTE)
    report.add("scrape of them", "s", scrapes)


def quiesce(report: Report, base: Path, rounds: int) -> None:
    """Measure the quiesce step and the way back, less what the tool takes."""
    report.section(
        f"quiesce: {CUDA_PROCESSES} CUDA processes, {rounds} times, each call takes {TOOL_SECONDS} s"
    )
    tool = cuda_kit.CudaTool(base / "cuda", cuda_kit.build(base / "cuda-built"))
    with tool.tree(CUDA_PROCESSES) as root, Dir.open(tool.directory) as directory:
        tool.control(f"cost {TOOL_SECONDS * 1000:.0f}")
        asyncio.run(_quiesce(report, GpuSettings(cuda_checkpoint=str(tool.path)), directory, root, rounds))


async def _quiesce(report: Report, settings: GpuSettings, directory: Dir, root: int, rounds: int) -> None:
    journal = Journal(directory, "checkpoint", {})
    seen = Seen(cuda_processes(root), await look_once(settings))  # which is preflight's work
    off, back = [], []
    for _ in range(rounds):
        began = time.monotonic()
        held = await take_off(root, settings, asyncio.to_thread, journal, seen)
        off.append(time.monotonic() - began - 2 * TOOL_SECONDS)
        assert held is not None
        began = time.monotonic()
        await held.wake(journal)
        back.append(time.monotonic() - began - 3 * TOOL_SECONDS)
    report.add("quiesce step beyond the tool's own time", "s", off, "< 0.05", ADDED_SECONDS)
    report.add("waking beyond the tool's own time", "s", back)
