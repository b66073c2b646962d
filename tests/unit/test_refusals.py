"""Pods for which nothing can be done: their workers are told at once; none waits for its deadline."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hibernode.answers import Outcome, Trigger
from hibernode.cluster.checkpoints import Checkpoints
from hibernode.cluster.outbox import Outbox
from hibernode.cluster.part import NO_ID, _state
from hibernode.cluster.pods import Ask
from hibernode.cluster.roster import Entry
from hibernode.cluster.shared import Shared
from hibernode.discovery.containers import Container
from hibernode.discovery.locate import Contract
from hibernode.host.procfs import Process
from hibernode.kube.names import ERAS, TRUE
from hibernode.workload import CheckpointId
from tests.unit.test_cluster import JOB
from tests.unit.test_pods import CONTAINER, ID, read, source

A1 = ERAS[0]
BAD = "Not.An-Id"


class Told:
    """Notes what pods and Jobs are told."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.outbox, self.api = Outbox(), None

    def both(self, _ask: Ask, _type: str, reason: str, _text: str) -> None:
        """Note an event."""
        self.reasons.append(reason)

    def annotate(self, *_: object) -> None:
        """Take an annotation."""


@pytest.fixture
def worker() -> Iterator[subprocess.Popen[bytes]]:
    """Run what stands for a worker's container."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as run:
        yield run
        run.kill()


class Bench:
    """The checkpoints of an agent, with one worker whose container is this machine."""

    def __init__(self, pid: int, monkeypatch: pytest.MonkeyPatch, signals: Path) -> None:
        monkeypatch.setattr("hibernode.cluster.checkpoints.hold", lambda _container: Process.open(pid))
        self.told, self.ready = Told(), Trigger.READY_FILE
        parts = SimpleNamespace(
            metrics=SimpleNamespace(rejected=lambda _reason: None),
            events=SimpleNamespace(add=lambda *_: None),
            signals=SimpleNamespace(path=signals),
            restorer=SimpleNamespace(state=SimpleNamespace(tried=lambda _note: False)),
        )
        requests = SimpleNamespace(parts=parts, index=SimpleNamespace(claims=list))
        shared = SimpleNamespace(
            teller=self.told, requests=requests, heard=lambda: 0.0, roster=SimpleNamespace(entries={})
        )
        self.checkpoints = Checkpoints(cast("Shared", shared))

    async def entry(self, path: str, labels: dict[str, str], **more: Any) -> Entry:
        """Look once at a pod whose worker waits at ``path``."""
        contract = Contract(A1.name, path, "/absent/ready", "/absent/marker")
        entry = Entry(read(labels, **more), run=CONTAINER, contract=contract)
        entry.container = cast("Container", SimpleNamespace())
        await self.checkpoints.advance(entry)
        return entry


@pytest.fixture
def bench(worker: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bench:
    """Give an agent's checkpoints."""
    (tmp_path / "signals").mkdir()
    return Bench(worker.pid, monkeypatch, tmp_path / "signals")


@pytest.mark.parametrize(
    "labels",
    [{A1.source: TRUE, A1.ids[0]: BAD}, {A1.source: TRUE, A1.ids[0]: "a" * 63}],
    ids=["word", "long"],
)
async def test_a_worker_with_a_label_that_is_no_id_reads_so_in_the_file_of_that_name(
    bench: Bench, tmp_path: Path, labels: dict[str, str], worker: subprocess.Popen[bytes]
) -> None:
    """At once, and again when it is ready: one that starts removes what it finds; a Job's is not killed."""
    path = tmp_path / f"{labels[A1.ids[0]]}.done"
    entry = await bench.entry(str(path), labels, metadata={"ownerReferences": [JOB]})
    answer = json.loads(path.read_bytes())
    assert (answer["success"], answer["checkpoint_id"]) == (False, labels[A1.ids[0]])
    assert answer["error"].startswith("InvalidCheckpointId: ")
    assert (_state(entry), entry.settled) == ("refused", False)
    path.unlink()
    await bench.checkpoints.advance(entry)
    assert not path.exists()
    entry.trigger = bench.ready
    await bench.checkpoints.advance(entry)
    assert path.exists()
    assert entry.settled
    assert bench.told.reasons == ["CheckpointFailed"]
    assert worker.poll() is None


@pytest.mark.parametrize("name", ["passwd", "../Not.An-Id.done", "other.done", f"{BAD}.done/"])
async def test_a_worker_that_waits_elsewhere_gets_no_file(
    bench: Bench, tmp_path: Path, name: str, worker: subprocess.Popen[bytes]
) -> None:
    """The path is its own and leads anywhere. A bare pod is only told of; it has no deadline."""
    before = sorted(os.listdir(tmp_path))
    await bench.entry(str(tmp_path / "absent" / name), {A1.source: TRUE, A1.ids[0]: BAD})
    assert sorted(os.listdir(tmp_path)) == before
    assert worker.poll() is None


@pytest.mark.parametrize("path", ["", "/etc/passwd", "/absent/96429b272576.done"])
async def test_the_worker_of_a_job_that_cannot_be_told_is_ended(
    bench: Bench, path: str, worker: subprocess.Popen[bytes]
) -> None:
    """It would wait for the deadline of its Job, an hour by default."""
    labels = {A1.source: TRUE, A1.ids[0]: BAD}
    if path == "/etc/passwd":
        labels = source(A1)  # a good label, and a file that is not its own
    entry = await bench.entry(path, labels, metadata={"ownerReferences": [JOB]})
    assert worker.wait(timeout=60) == -9
    assert entry.settled
    assert bench.told.reasons == ["CheckpointFailed", "WorkerKilled"]


async def test_the_worker_of_a_job_whose_answer_cannot_be_written_is_ended_in_the_end(
    bench: Bench, tmp_path: Path, worker: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its signal directory is not there: whatever became of its dump, it would wait for a deadline."""
    entry = await bench.entry(
        str(tmp_path / "absent" / f"{ID}.done"), source(A1), metadata={"ownerReferences": [JOB]}
    )
    assert entry.refusal is None
    outcome = Outcome(CheckpointId(ID), success=True, reason="Captured", message="captured")
    await bench.checkpoints._conclude(entry, outcome)
    await bench.checkpoints._conclude(entry, outcome)
    assert bench.told.reasons == ["AnswerFailed"]
    assert worker.poll() is None
    monkeypatch.setattr("hibernode.cluster.checkpoints.UNTOLD_SECONDS", 0.0)
    await bench.checkpoints._conclude(entry, outcome)
    assert worker.wait(timeout=60) == -9
    assert bench.told.reasons == ["AnswerFailed", "WorkerKilled"]
    assert entry.unsaid is outcome  # for the file of the node, now that it has ended


def test_where_no_target_can_be_chosen_whoever_waits_for_an_answer_is_told() -> None:
    """Before its container runs an answer would be removed by it, so one has to be watched."""
    waits = {"name": "b", "env": [{"name": "DYN_CHECKPOINT_SIGNAL_FILE", "value": f"/s/{ID}.done"}]}
    found = read(source(A1), containers=[{"name": "a"}, waits])
    assert (found.container, found.told.signal_file) == ("b", f"/s/{ID}.done")
    assert read(source(A1), containers=[{"name": "a"}, {"name": "c"}]).container == "a"
    assert found.problem is not None
    assert NO_ID != ID
