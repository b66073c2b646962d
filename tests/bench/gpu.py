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

from hibernode.gpu.metrics import metrics
from hibernode.gpu.owners import Owners
from hibernode.gpu.service import GpuService
from hibernode.metrics import Metrics
from hibernode.settings import GpuSettings
from tests.bench.measure import Report
from tests.gpu import kit

GPUS, PROCESSES = 8, 200
POLLS_PER_MINUTE = 6
"""With gpu.poll_seconds at its default."""

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
