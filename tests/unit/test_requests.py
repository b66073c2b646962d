"""From requests to jobs and from outcomes to events: real queue, real signal directory, real workers."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from hibernode.answers import Outcome, Request, RestoreOutcome, RestoreRequest, Trigger
from hibernode.checkpoint import Checkpointer
from hibernode.discovery.signals import ReadyRequest, Rejected, Scan, SignalDir
from hibernode.discovery.signals import RestoreRequest as RestoreFile
from hibernode.errors import RefusedError
from hibernode.events import EventLog
from hibernode.host import procfs
from hibernode.jobs import Jobs
from hibernode.metrics import Metrics
from hibernode.requests import Parts, Requests
from hibernode.restore import Restorer
from hibernode.restored import Phase, Restored
from hibernode.settings import Settings, SignalSettings
from hibernode.workload import ProcessKey
from tests.unit.artifact_kit import ID, OTHER
from tests.unit.hostile import open_descriptors

DEADLINE = 60.0


class Pipeline:
    """Stands where a pipeline does: notes what it is asked and gives the outcome that it was told."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.outcome: Any = None
        self.go = asyncio.Event()
        self.go.set()

    async def run(self, request: Any) -> Any:
        """Note the request; the process must be held while the work runs."""
        self.asked.append(request)
        await self.go.wait()
        if isinstance(request, Request):
            assert request.process.alive()
        return self.outcome


class Bench:
    """The handling of requests with all that it needs."""

    def __init__(self, path: Path) -> None:
        settings = Settings(signals=SignalSettings(path=path / "signals"))
        self.signals = SignalDir(settings.signals)
        self.signals.create()
        self.checkpoints, self.restores = Pipeline(), Pipeline()
        self.checkpoints.outcome = Outcome(ID, success=True, message="done", path="/store/x", bytes=5)
        self.restores.outcome = RestoreOutcome(ID, success=True, message="back")
        self.jobs = Jobs(1, 10)
        self.events = EventLog(path / "state")
        self.looks: list[set[str]] = []
        self.requests = Requests(
            Parts(
                settings=settings,
                signals=self.signals,
                checkpointer=cast("Checkpointer", self.checkpoints),
                restorer=cast("Restorer", self.restores),
                jobs=self.jobs,
                events=self.events,
                metrics=Metrics(),
                look_again=self.looks.append,
            )
        )

    def said(self) -> list[tuple[str, str]]:
        """List the events: type and reason, oldest first."""
        return sorted((event["type"], event["reason"]) for event in self.events.recent())

    def answer(self, suffix: str = ".done") -> dict[str, Any] | None:
        """Read an answer."""
        path = self.signals.path / f"{ID}{suffix}"
        return json.loads(path.read_text()) if path.exists() else None

    async def until(self, condition: Callable[[], bool]) -> None:
        """Poll until ``condition`` holds."""
        async with asyncio.timeout(DEADLINE):
            while not condition():
                await asyncio.sleep(0.001)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    """Make a bench; no descriptor may be left over."""
    before = open_descriptors()
    made = Bench(tmp_path)
    yield made
    await made.jobs.close()
    made.events.close()
    assert open_descriptors() == before


@pytest.fixture
def worker() -> Iterator[int]:
    """Run a worker that names nothing; its pid."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process.pid
        process.kill()


def ready(pid: int | None, *, age: float = 0.0) -> ReadyRequest:
    """Build a ready file of our own user."""
    return ReadyRequest(ID, pid, os.getuid(), os.getgid(), time.time() - age, (1, 2, 3))


async def test_a_ready_worker_is_dumped_once(bench: Bench, worker: int) -> None:
    """The worker is dumped, a second look while it is at work adds nothing, and it is looked at after."""
    bench.checkpoints.go.clear()
    await bench.requests.take(Scan(ready=[ready(worker)]))
    await bench.until(lambda: len(bench.checkpoints.asked) == 1)
    await bench.requests.take(Scan(ready=[ready(worker)]))
    assert bench.looks == []
    bench.checkpoints.go.set()
    await bench.until(lambda: bench.looks == [{f"{ID}.ready"}])
    (asked,) = bench.checkpoints.asked
    assert (asked.id, asked.process.pid, asked.trigger, asked.announce) == (ID, worker, Trigger.SIGNAL, True)
    assert bench.said() == [("Normal", "CheckpointStarted"), ("Normal", "CheckpointSucceeded")]
    assert bench.requests.last_failure == ""


async def test_an_own_ready_file_has_its_own_trigger(bench: Bench, worker: int) -> None:
    """A worker whose own ready file is there is dumped for that reason."""
    await bench.requests.take_own(ready(worker))
    await bench.until(lambda: len(bench.looks) == 1)
    assert bench.checkpoints.asked[0].trigger is Trigger.READY_FILE


async def test_a_failed_dump_is_said(bench: Bench, worker: int) -> None:
    """A failure is an event with its reason, and the last failure that the agent shows."""
    bench.checkpoints.outcome = Outcome(ID, success=False, reason="IoUring", message="no", exit_code=4)
    await bench.requests.take(Scan(ready=[ready(worker)]))
    await bench.until(lambda: len(bench.looks) == 1)
    assert ("Warning", "CheckpointFailed") in bench.said()
    assert bench.requests.last_failure == f"{ID}: IoUring: no"


async def test_a_request_that_could_not_be_answered_waits(bench: Bench, worker: int) -> None:
    """A request whose answer is open is looked at again, but not at once."""
    bench.checkpoints.outcome = Outcome(ID, success=False, reason="Busy", message="no", answered=False)
    await bench.requests.take(Scan(ready=[ready(worker)]))
    await bench.until(lambda: not bench.jobs.has("checkpoint", ID))
    assert bench.looks == []
    await bench.until(lambda: bench.looks == [{f"{ID}.ready"}])


async def test_a_restored_worker_is_not_dumped_again(bench: Bench, worker: int) -> None:
    """A worker that came out of a restore goes on in its waiting loop; its ready file asks for nothing."""
    bench.requests.restored_keys.add(ProcessKey(worker, procfs.read_stat(worker).start_ticks))
    await bench.requests.take(Scan(ready=[ready(worker)]))
    assert bench.jobs.describe() == []
    assert bench.said() == []


@pytest.mark.parametrize(
    ("pid", "reason"),
    [
        pytest.param(None, "NoClaimant", id="nobody names the id"),
        pytest.param(1 << 21, "WorkerGone", id="the pid is nobody's"),
    ],
)
async def test_a_request_that_leads_nowhere_is_answered(bench: Bench, pid: int | None, reason: str) -> None:
    """A ready file without a worker is answered at once with what to do."""
    await bench.requests.take(Scan(ready=[ready(pid)]))
    answer = bench.answer() or {}
    assert answer["success"] is False
    assert answer["error"].startswith(f"{reason}: ")
    assert bench.said() == [("Warning", "CheckpointFailed")]
    assert bench.jobs.describe() == []


async def test_a_stale_ready_file_is_removed_and_not_answered(bench: Bench, worker: int) -> None:
    """A file older than the worker is another's: an answer would reach the wrong one; a newer file stays."""
    path = bench.signals.path / f"{ID}.ready"
    path.write_text("")
    stale = ready(worker, age=3600)
    await bench.requests.take(Scan(ready=[stale]))
    assert path.exists()
    stat = path.stat()
    identity = (stat.st_dev, stat.st_ino, stat.st_ctime_ns)
    await bench.requests.take(Scan(ready=[dataclasses.replace(stale, identity=identity)]))
    assert not path.exists()
    assert bench.answer() is None


async def test_an_answer_that_cannot_be_written_is_no_end(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """A signal directory that is gone is said in the log."""
    bench.signals.path.rmdir()
    await bench.requests.take(Scan(ready=[ready(None)]))
    assert "cannot write the signal file" in caplog.text


async def test_what_is_no_request_is_said(bench: Bench) -> None:
    """A file that was rejected is an event of its reason."""
    await bench.requests.take(Scan(rejected=[Rejected("x.ready", "BadRequest", "not JSON")]))
    assert bench.said() == [("Warning", "BadRequest")]


@pytest.mark.parametrize(
    ("outcome", "event"),
    [
        pytest.param(
            RestoreOutcome(ID, success=True, message="ok"), ("Normal", "RestoreSucceeded"), id="a success"
        ),
        pytest.param(
            RestoreOutcome(ID, success=False, reason="PidInUse", message="no", exit_code=4),
            ("Warning", "RestoreIncompatible"),
            id="a refusal",
        ),
        pytest.param(
            RestoreOutcome(ID, success=False, reason="CriuFailed", message="no", exit_code=1),
            ("Warning", "RestoreFailed"),
            id="a failure",
        ),
    ],
)
async def test_a_restore_is_run_and_said(
    bench: Bench, outcome: RestoreOutcome, event: tuple[str, str]
) -> None:
    """A restore file is taken up in its writer's name, and its end is an event."""
    bench.restores.outcome = outcome
    await bench.requests.take(Scan(restore=[RestoreFile(ID, 1000, 1000, 1.0, (4, 5, 6))]))
    await bench.until(lambda: bench.looks == [{f"{ID}.restore"}])
    assert bench.restores.asked == [RestoreRequest(ID, requester_uid=1000, identity=(4, 5, 6))]
    assert bench.said() == sorted([("Normal", "RestoreStarted"), event])


def ended(end: dict[str, int], *, announce: bool = True) -> Restored:
    """Build a restored worker that has ended."""
    return Restored(
        id=ID,
        name=f"{ID}.x",
        phase=Phase.EXITED,
        step="done",
        announce=announce,
        started_at=1.0,
        shim_alive=False,
        key=ProcessKey(77, 5),
        **cast("Any", end),
    )


@pytest.mark.parametrize(
    ("end", "kind", "text"),
    [
        pytest.param({"exit_code": 0}, "Normal", "exit_code 0", id="well"),
        pytest.param({"exit_code": 3}, "Warning", "exit_code 3", id="badly"),
        pytest.param({"exit_signal": 9}, "Warning", "exit_signal 9", id="by a signal"),
        pytest.param({}, "Warning", "nobody knows", id="unseen"),
    ],
)
async def test_the_end_of_a_restored_worker_is_said(
    bench: Bench, end: dict[str, int], kind: str, text: str
) -> None:
    """How a restored worker ended is an event, and an answer if the restore had one."""
    bench.requests.say_ended(ended(end))
    (event,) = bench.events.recent()
    assert (event["type"], event["reason"]) == (kind, "WorkerEnded")
    assert text in event["message"]
    answer = bench.answer(".restored") or {}
    assert (answer["pid"], answer["ended"]) == (77, True)
    assert {name: answer[name] for name in ("exit_code", "exit_signal") if name in answer} == end
    (bench.signals.path / f"{ID}.restored").unlink()
    bench.requests.say_ended(ended(end, announce=False))
    assert bench.answer(".restored") is None


async def test_a_full_queue_lets_the_worker_go(bench: Bench, worker: int) -> None:
    """A request that finds the queue closed is dropped, and the process not held any longer."""
    await bench.jobs.close()
    await bench.requests.take(Scan(ready=[ready(worker)], restore=[RestoreFile(OTHER, 0, 0, 1.0, (1, 1, 1))]))
    assert bench.checkpoints.asked == bench.restores.asked == []


class Labels:
    """A cluster with one pod: the one that a process is in, and its label."""

    def __init__(self, pid: int, label: str) -> None:
        self.pid, self.label, self.taken = pid, label, list[str]()

    def label_of(self, pid: int) -> str | None:
        """Tell its label."""
        return self.label if pid == self.pid else None

    def takes(self, pid: int, id_: str) -> bool:
        """Take what is for the pod, and refuse what mixes it with another."""
        if pid == self.pid and id_ != self.label:
            raise RefusedError("another pod's", reason="WrongPod")
        self.taken += [id_] if pid == self.pid else []
        return pid == self.pid


async def test_the_ready_file_of_a_labelled_pod_is_the_clusters(bench: Bench, worker: int) -> None:
    """No job of the signal directory's own begins, and nothing is held."""
    pods = Labels(worker, ID)
    bench.requests.pods = pods
    await bench.requests.take(Scan(ready=[ready(worker)]))
    assert pods.taken == [ID]
    assert bench.checkpoints.asked == []


async def test_a_ready_file_that_leads_to_another_pod_is_removed_and_answers_nobody(
    bench: Bench, worker: int
) -> None:
    """The answer would reach the worker whose id it is, and who has not asked."""
    bench.requests.pods = Labels(worker, OTHER)
    path = bench.signals.path / f"{ID}.ready"
    path.touch()
    found = path.stat()
    asked = dataclasses.replace(ready(worker), identity=(found.st_dev, found.st_ino, found.st_ctime_ns))
    await bench.requests.take(Scan(ready=[asked]))
    assert bench.checkpoints.asked == []
    assert bench.answer() is None
    assert not (bench.signals.path / f"{ID}.ready").exists()
    assert bench.said() == [("Warning", "CheckpointFailed")]
