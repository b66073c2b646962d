"""What tests of the metadata service share: a clock that is set, records, and stores to publish them into."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kubernetes.aio.client import Configuration

from hibernode.kube.api import KubeApi
from hibernode.metadata.backend import MetadataBackend
from hibernode.metadata.backends.kubernetes import KubernetesBackend
from hibernode.metadata.backends.sqlite import SqliteBackend
from hibernode.metadata.identity import mx_source_id
from hibernode.metadata.records import (
    BackendPayload,
    BackendType,
    PodRef,
    SourceIdentity,
    TensorDescriptor,
    WorkerRecord,
)
from tests.unit.kube_fake import FakeKube

MODEL = "deepseek-ai/DeepSeek-V3"
BASE = SourceIdentity(
    mx_version="0.5.0",
    model_name=MODEL,
    backend_framework=1,
    tensor_parallel_size=8,
    pipeline_parallel_size=1,
    dtype="bfloat16",
)
BASE_ID = "5a5f555570065064"
OTHER = replace(BASE, revision="abc123def4567890")
OTHER_ID = "d0c184b2a9a34c82"
POD = PodRef("decode-0", "0b0e8d0c-0000-4000-8000-000000000001", "ns")
START = 1_790_000_000_123_456_789


class Clock:
    """Nanoseconds since 1970, as the test has it."""

    def __init__(self) -> None:
        self.ns = START

    def __call__(self) -> int:
        return self.ns

    @property
    def ms(self) -> int:
        """The same in milliseconds."""
        return self.ns // 1_000_000

    def forward(self, seconds: float) -> int:
        """Let time pass; returns the new time in milliseconds."""
        self.ns += int(seconds * 1e9)
        return self.ms


@dataclass
class Store:
    """A backend to test, another one on the same records (another agent's), and their clock.

    ``races``: updates in the test of two racing writers. ``namespace``: where a pod must be to own records.
    """

    backend: MetadataBackend
    other: MetadataBackend
    clock: Clock
    races: int = 100
    namespace: str = "ns"


def tensors(count: int, prefix: str = "model.layers") -> tuple[TensorDescriptor, ...]:
    """Make tensors with names as real ones have."""
    return tuple(
        TensorDescriptor(
            f"{prefix}.{index // 256}.mlp.experts.{index % 256}.down_proj.weight",
            0x7F00_0000_0000 + index * 4096,
            4096,
            index % 8,
            "torch.bfloat16",
        )
        for index in range(count)
    )


def central(rank: int = 0, blob: bytes = b"nixlSerDes|\x00\xff", **fields: Any) -> WorkerRecord:
    """Make a worker that publishes its NIXL metadata and tensors."""
    values: dict[str, Any] = {
        "rank": rank,
        "payload": BackendPayload(BackendType.NIXL, nixl=blob),
        "tensors": tensors(3),
        "agent_name": f"mx-auto-worker{rank}-0badcafe",
        "accelerator": "cuda",
        **fields,
    }
    return WorkerRecord(**values)


def peer(rank: int = 0, **fields: Any) -> WorkerRecord:
    """Make a worker whom peers ask themselves."""
    values: dict[str, Any] = {
        "rank": rank,
        "metadata_endpoint": "10.0.0.7:5555",
        "worker_grpc_endpoint": "10.0.0.7:6555",
        "agent_name": f"mx-auto-worker{rank}-0badcafe",
        **fields,
    }
    return WorkerRecord(**values)


def object_name(worker_id: str, identity: SourceIdentity = BASE) -> str:
    """Name the object of a record in the cluster."""
    return f"mx-source-{mx_source_id(identity)}-{worker_id}"


@asynccontextmanager
async def sqlite_store(folder: Path) -> AsyncIterator[Store]:
    """Open records in a file; it has but one agent, so the other one is the same."""
    clock = Clock()
    backend = SqliteBackend(folder / "metadata.sqlite", clock=clock)
    await backend.connect()
    yield Store(backend, backend, clock)
    await backend.close()


def kube_backend(
    url: str, clock: Callable[[], int], *, total: float = 30.0, call: float = 10.0, max_age: float = 90.0
) -> KubernetesBackend:
    """Make a backend for the server at ``url``."""
    api = KubeApi(Configuration(host=url), call_seconds=call, total_seconds=total)
    return KubernetesBackend(api, "ns", clock=clock, max_age=max_age)


@asynccontextmanager
async def kube_store(fake: FakeKube) -> AsyncIterator[Store]:
    """Open records in a fake cluster, from two agents."""
    clock = Clock()
    backend, other = (kube_backend(fake.url, clock) for _ in range(2))
    await backend.connect()
    await other.connect()
    yield Store(backend, other, clock)
    await backend.close()
    await other.close()


async def until(condition: Any) -> None:
    """Wait until something is so; the test's own time limit ends a wait in vain."""
    import asyncio

    for pause in itertools.chain([0.0, 0.001], itertools.repeat(0.01)):
        found = condition()
        if found if not hasattr(found, "__await__") else await found:
            return
        await asyncio.sleep(pause)
