"""Fixtures: the stand-in of NVML in this process, and services that leave nothing behind."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hibernode.gpu.owners import Owners
from hibernode.gpu.service import GpuService
from hibernode.settings import GpuSettings
from tests.gpu import cuda_kit, kit
from tests.gpu.kit import Stub

GENEROUS_SECONDS = 30.0


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the stand-in; it is not loaded."""
    return kit.build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the stand-ins of CUDA's library and of cuda-checkpoint, with a worker that uses them."""
    return cuda_kit.build(tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def stub(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    """Load the stand-in, with no GPU yet; without its file it is as if there were none."""
    kit.load(library)
    made = Stub(tmp_path / "nvml.txt")
    monkeypatch.setenv("NVML_STUB", str(made.path))
    yield made
    made.lines.clear()
    made.write()


class Told:
    """The events that a service has told."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, str]] = []

    def __call__(self, kind: str, reason: str, text: str) -> None:
        self.events.append((kind, reason, text))

    def reasons(self) -> list[str]:
        """List their reasons."""
        return [reason for _, reason, _ in self.events]


Make = Callable[..., GpuService]


@pytest.fixture
def told() -> Told:
    """Collect what is told."""
    return Told()


@pytest.fixture
async def make(stub: Stub, told: Told) -> AsyncIterator[Make]:
    """Make services whose threads have ended afterwards, so that NVML is down for the next test."""
    made: list[GpuService] = []

    def new(*, watch_events: bool = False, restart_seconds: float = 0.0, **settings: Any) -> GpuService:
        service = GpuService(
            GpuSettings(**{"deadline_seconds": GENEROUS_SECONDS, **settings}),
            told,
            owners=Owners(Path(tempfile.gettempdir()) / "none", same_pids=True),
            restart_seconds=restart_seconds,
            watch_events=watch_events,
            wait_ms=20,
        )
        made.append(service)
        return service

    yield new
    stub.lines.clear()
    stub.write()
    for service in made:
        while service._driver.stuck:
            await asyncio.sleep(0.005)
        service.close()
        assert await asyncio.to_thread(service._nvml.stop, GENEROUS_SECONDS)
    os.environ.pop("NVML_STUB", None)


async def until(test: Callable[[], Any]) -> Any:
    """Wait on the loop until ``test`` gives something true, and return it."""
    deadline = time.monotonic() + GENEROUS_SECONDS
    while not (value := test()):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)
    return value
