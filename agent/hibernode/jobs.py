"""The queue: one job an id and kind, a limit on how many run, a limit on how many wait."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hibernode.journal import Step
from hibernode.workload import CheckpointId

log = logging.getLogger("hibernode.jobs")

T = TypeVar("T")
Key = tuple[str, CheckpointId]


@dataclass(slots=True)
class Job:
    """One piece of work in the queue. ``step`` is where it is, or "queued"."""

    kind: str
    id: CheckpointId
    queued_at: float = field(default_factory=time.time)
    started_at: float = 0.0
    step: str = "queued"
    step_at: float = 0.0

    def enter(self, step: str) -> None:
        """Say that the job is now in ``step``."""
        self.step, self.step_at = step, time.time()

    def describe(self) -> dict[str, Any]:
        """Show the job as JSON; times are seconds."""
        now = time.time()
        return {
            "kind": self.kind,
            "id": str(self.id),
            "step": self.step,
            "queuedSeconds": round((self.started_at or now) - self.queued_at, 3),
            "elapsedSeconds": round(now - self.started_at, 3) if self.started_at else 0.0,
            "stepSeconds": round(now - self.step_at, 3) if self.step_at else 0.0,
        }


class Jobs:
    """Runs jobs, at most ``concurrency`` at a time; a second job for the same kind and id is dropped.

    Requests that find the queue full are dropped too: they are files, and the next rescan brings them
    again.
    """

    def __init__(self, concurrency: int, limit: int) -> None:
        self._slots = asyncio.Semaphore(concurrency)
        self._limit = limit
        self._jobs: dict[Key, tuple[Job, asyncio.Task[Any]]] = {}
        self._closing = False

    def submit(
        self,
        kind: str,
        id_: CheckpointId,
        work: Callable[[Job], Awaitable[T]],
        ended: Callable[[T | None], None],
    ) -> bool:
        """Queue ``work``; False when it is there already, the queue is full, or we are stopping.

        ``ended`` is called once, after the job has left the queue, however it ends: with what ``work``
        returned, or None when it failed or was cancelled, also before it began.
        """
        key = (kind, id_)
        if self._closing or key in self._jobs or len(self._jobs) >= self._limit:
            return False
        job = Job(kind, id_)
        task = asyncio.create_task(self._run(job, work), name=f"{kind} {id_}")
        self._jobs[key] = (job, task)

        def leave(done: asyncio.Task[T | None]) -> None:
            self._jobs.pop(key, None)
            ended(None if done.cancelled() else done.result())

        task.add_done_callback(leave)
        return True

    async def _run(self, job: Job, work: Callable[[Job], Awaitable[T]]) -> T | None:
        async with self._slots:
            job.started_at = time.time()
            try:
                return await work(job)
            except Exception:
                log.exception("%s %s: unexpected failure", job.kind, job.id)
                return None

    def enter(self, kind: str, id_: CheckpointId, step: Step) -> None:
        """Note the step that a running job has entered."""
        if (kind, id_) in self._jobs:
            self._jobs[kind, id_][0].enter(step.value)

    def has(self, kind: str, id_: CheckpointId) -> bool:
        """Whether such a job waits or runs."""
        return (kind, id_) in self._jobs

    def describe(self) -> list[dict[str, Any]]:
        """List the jobs, running ones first."""
        jobs = sorted(
            (job for job, _ in self._jobs.values()), key=lambda job: (not job.started_at, job.queued_at)
        )
        return [job.describe() for job in jobs]

    @property
    def running(self) -> int:
        """Jobs that hold a slot."""
        return sum(1 for job, _ in self._jobs.values() if job.started_at)

    @property
    def waiting(self) -> int:
        """Jobs that wait for a slot."""
        return len(self._jobs) - self.running

    async def close(self) -> None:
        """Cancel everything and wait until it has undone itself."""
        self._closing = True
        tasks = [task for _, task in self._jobs.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
