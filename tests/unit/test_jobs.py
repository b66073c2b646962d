"""The queue: one job an id and kind, and limits on what runs and what waits."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from hibernode.jobs import Job, Jobs
from hibernode.journal import Step
from hibernode.workload import CheckpointId

DEADLINE = 30.0


def id_(number: int) -> CheckpointId:
    """Make an id."""
    return CheckpointId(f"{number:012x}")


class Bench:
    """A queue whose jobs wait for :attr:`go`; what happened is in ``began`` and ``ends``."""

    def __init__(self, concurrency: int, limit: int) -> None:
        self.jobs = Jobs(concurrency, limit)
        self.go = asyncio.Event()
        self.began: list[tuple[str, str]] = []
        self.ends: list[tuple[str, str, Any]] = []
        self.at_once = 0
        self.most_at_once = 0

    def submit(self, kind: str, number: int) -> bool:
        """Queue a job that says when it begins."""
        name = id_(number)

        async def work(job: Job) -> str:
            assert (job.kind, job.id) == (kind, name)
            self.began.append((kind, name))
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            try:
                await self.go.wait()
            finally:
                self.at_once -= 1
            return f"done {number}"

        def ended(result: str | None) -> None:
            assert not self.jobs.has(kind, name)
            self.ends.append((kind, name, result))

        return self.jobs.submit(kind, name, work, ended)

    async def until(self, *, began: int = 0, ends: int = 0) -> None:
        """Wait until so many jobs have begun and ended."""
        async with asyncio.timeout(DEADLINE):
            while len(self.began) < began or len(self.ends) < ends:
                await asyncio.sleep(0)


async def test_a_job_returns_its_result_when_it_has_left() -> None:
    """``ended`` gets what the work returned, once, when the job is not in the queue any more."""
    bench = Bench(1, 10)
    assert bench.submit("checkpoint", 1)
    assert bench.jobs.has("checkpoint", id_(1))
    bench.go.set()
    await bench.until(ends=1)
    assert bench.ends == [("checkpoint", id_(1), "done 1")]
    assert (bench.jobs.running, bench.jobs.waiting, bench.jobs.describe()) == (0, 0, [])
    await bench.jobs.close()
    assert len(bench.ends) == 1


async def test_a_second_job_for_the_same_kind_and_id_is_dropped() -> None:
    """The same work is queued once, waiting or running; another kind or another id is other work."""
    bench = Bench(1, 10)
    assert bench.submit("checkpoint", 1)
    assert not bench.submit("checkpoint", 1)
    await bench.until(began=1)
    assert not bench.submit("checkpoint", 1)
    assert bench.submit("restore", 1)
    assert bench.submit("checkpoint", 2)
    assert not bench.submit("checkpoint", 2)
    bench.go.set()
    await bench.until(ends=3)
    assert bench.submit("checkpoint", 1)
    await bench.until(ends=4)
    await bench.jobs.close()


@pytest.mark.parametrize("concurrency", [1, 2, 3], ids=lambda n: f"{n} at a time")
async def test_no_more_run_than_may(concurrency: int) -> None:
    """Jobs run at most ``concurrency`` at a time, in the order in which they came."""
    bench = Bench(concurrency, 10)
    for number in range(6):
        assert bench.submit("checkpoint", number)
    await bench.until(began=concurrency)
    assert (bench.jobs.running, bench.jobs.waiting) == (concurrency, 6 - concurrency)
    bench.go.set()
    await bench.until(ends=6)
    assert bench.most_at_once == concurrency
    assert bench.began == [("checkpoint", id_(number)) for number in range(6)]


async def test_a_full_queue_drops_requests() -> None:
    """Running and waiting jobs together are bounded; there is room again when one has left."""
    bench = Bench(1, 3)
    assert [bench.submit("checkpoint", number) for number in range(5)] == [True, True, True, False, False]
    assert not bench.jobs.has("checkpoint", id_(4))
    bench.go.set()
    await bench.until(ends=1)
    assert bench.submit("checkpoint", 4)
    await bench.until(ends=4)


async def test_closing_ends_every_job_once() -> None:
    """A close cancels running and waiting jobs; ``ended`` is called also for those that never began."""
    bench = Bench(1, 10)
    for number in range(3):
        bench.submit("checkpoint", number)
    await bench.until(began=1)
    await bench.jobs.close()
    assert len(bench.began) == 1
    assert sorted(bench.ends) == [("checkpoint", id_(number), None) for number in range(3)]
    assert not bench.submit("checkpoint", 9)


async def test_a_job_cancelled_before_its_task_starts_calls_ended() -> None:
    """A close in the very moment of the submission still calls ``ended``."""
    bench = Bench(1, 10)
    bench.submit("checkpoint", 1)
    await bench.jobs.close()
    assert bench.began == []
    assert bench.ends == [("checkpoint", id_(1), None)]


async def test_closing_waits_until_work_has_undone_itself() -> None:
    """A job's clean-up after its cancellation is over when the close returns."""
    jobs = Jobs(1, 10)
    said: list[str] = []
    began = asyncio.Event()

    async def work(_job: Job) -> None:
        try:
            began.set()
            await asyncio.Event().wait()
        finally:
            for _ in range(10):
                await asyncio.sleep(0)
            said.append("undone")

    jobs.submit("restore", id_(1), work, lambda _result: said.append("ended"))
    await began.wait()
    await jobs.close()
    assert said == ["undone", "ended"]


async def test_an_exception_is_logged_and_the_queue_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    """Work that raises ends with None and a traceback in the log, and gives its slot back."""
    bench = Bench(1, 10)
    ends: list[object] = []

    async def work(_job: Job) -> str:
        raise ValueError("quite unexpected")

    with caplog.at_level(logging.ERROR, "hibernode.jobs"):
        assert bench.jobs.submit("restore", id_(7), work, ends.append)
        bench.go.set()
        bench.submit("checkpoint", 1)
        await bench.until(ends=1)
    assert ends == [None]
    assert f"restore {id_(7)}: unexpected failure" in caplog.text
    assert "ValueError: quite unexpected" in caplog.text


async def test_a_job_says_where_it_is() -> None:
    """Running jobs come first; each says its kind, id, step and times."""
    bench = Bench(1, 10)
    bench.submit("checkpoint", 1)
    bench.submit("restore", 2)
    await bench.until(began=1)
    bench.jobs.enter("checkpoint", id_(1), Step.DUMP)
    bench.jobs.enter("checkpoint", id_(9), Step.DUMP)
    running, waiting = bench.jobs.describe()
    assert (running["kind"], running["id"], running["step"]) == ("checkpoint", id_(1), "dump")
    assert (waiting["kind"], waiting["id"], waiting["step"]) == ("restore", id_(2), "queued")
    assert type(running["id"]) is str
    assert (waiting["elapsedSeconds"], waiting["stepSeconds"]) == (0.0, 0.0)
    assert all(running[name] >= 0 for name in ("queuedSeconds", "elapsedSeconds", "stepSeconds"))
    await bench.jobs.close()
