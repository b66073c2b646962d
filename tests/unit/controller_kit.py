"""A controller on an API server in this process: its looks one by one, and a clock that is set."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml
from kubernetes.aio.client import Configuration

from hibernode.controller.artifacts import Artifacts
from hibernode.controller.reconcile import Reconciler
from hibernode.controller.shelf import Checkpoints
from hibernode.controller.writes import Writes
from hibernode.kube.api import KubeApi
from hibernode.kube.events import EventWriter
from hibernode.kube.objects import stamp
from hibernode.settings import Settings
from tests.unit.kube_fake import CHECKPOINTS, EVENTS, JOBS, FakeKube

GOLDEN = yaml.safe_load((Path(__file__).parent / "checkpoint_job.yaml").read_text())
IDENTITY = {"model": "meta-llama/Llama-2-7b-hf", "backendFramework": "vllm"}
START = 1_790_000_000.0


def api_of(fake: FakeKube) -> KubeApi:
    """Make a patient client."""
    return KubeApi(Configuration(host=fake.url), call_seconds=20.0, total_seconds=60.0)


def make(
    fake: FakeKube,
    name: str = "llama",
    namespace: str = "ns",
    identity: dict[str, Any] = IDENTITY,
    created: float = START,
) -> dict[str, Any]:
    """Store the object of the golden file under this name."""
    raw = copy.deepcopy(GOLDEN["checkpoint"])
    raw["metadata"] = {"name": name, "creationTimestamp": stamp(created)}
    raw["spec"]["identity"] = dict(identity)
    return fake.put(CHECKPOINTS, raw, namespace)


def condition_of(raw: dict[str, Any], type_: str) -> tuple[str, str]:
    """Give a condition's status and reason."""
    (found,) = (one for one in raw["status"]["conditions"] if one["type"] == type_)
    return found["status"], found["reason"]


def reasons(fake: FakeKube) -> list[str]:
    """List the reasons of all events, each as often as it counts."""
    events = [fake.get(EVENTS, name) for name in fake.names(EVENTS)]
    return sorted(one["reason"] for one in events for _ in range(one["count"]))


class Desk:
    """Looks at objects of the namespace ``ns``, whenever a test says so."""

    def __init__(self, fake: FakeKube, api: KubeApi, store: Path | None, ours: dict[str, Any]) -> None:
        self.fake, self.wall = fake, START
        settings = Settings.model_validate({"controller": {"pvc": "checkpoints", **ours}})
        self.shelf = Checkpoints(
            lambda _: None, lambda name: name not in settings.controller.excluded_namespaces
        )
        self.artifacts = None if store is None else Artifacts(store)
        writes = Writes(api, wall=lambda: self.wall)
        events = EventWriter(api, "hibernode-controller")
        self.reconciler = Reconciler(writes, events, settings, self.shelf, self.artifacts)

    def close(self) -> None:
        """Let the store go."""
        if self.artifacts is not None:
            self.artifacts.close()

    async def look(self, name: str = "llama") -> float | None:
        """Look once, with all objects known as they are."""
        for (_, kind, _), raw in self.fake.objects.items():
            if kind == CHECKPOINTS:
                self.shelf.apply(raw)
        return await self.reconciler.look("ns", name)

    async def settle(self, name: str = "llama") -> dict[str, Any]:
        """Look until nothing changes; gives the object."""
        version = -1
        while version != self.fake.version:
            version = self.fake.version
            await self.look(name)
        return self.fake.get(CHECKPOINTS, name)

    def end(self, name: str = "llama") -> None:
        """Let its Job succeed now."""
        job = copy.deepcopy(self.fake.get(JOBS, f"checkpoint-{name}"))
        job["status"] = {"succeeded": 1, "completionTime": stamp(self.wall)}
        self.fake.put(JOBS, job)


@asynccontextmanager
async def desk(store: Path | None = None, **ours: Any) -> AsyncIterator[Desk]:
    """Give a desk with these settings ``controller.*``."""
    async with FakeKube() as fake:
        api = api_of(fake)
        made = Desk(fake, api, store, ours)
        try:
            yield made
        finally:
            made.close()
            await api.close()
