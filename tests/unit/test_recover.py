"""After a restart: what becomes of dumps and restores whose agent is dead, without a CRIU."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hibernode import restored, shim
from hibernode.artifact.store import Store
from hibernode.criu.runner import JOB_ENV
from hibernode.discovery.signals import SignalDir
from hibernode.host import procfs
from hibernode.journal import JOURNAL, Step
from hibernode.recover import Ending, Recovered, recover
from hibernode.settings import SignalSettings
from hibernode.state import StateDir
from tests.unit.artifact_kit import ID, OTHER, put, seal

NOBODY_PID = 1 << 22
UUID = "00112233445566778899aabbccddeeff"


class Node:
    """A node after a restart: its store, its state, its signal directory and a worker."""

    def __init__(self, path: Path, worker: subprocess.Popen[bytes]) -> None:
        self.store = Store(path / "store").open()
        self.state = StateDir.open(path / "state")
        self.signals = SignalDir(SignalSettings(path=path / "signals"))
        self.signals.create()
        self.worker = worker

    def close(self) -> None:
        """Close what is open."""
        self.store.close()
        self.state.close()

    def recover(self) -> list[Recovered]:
        """Recover what there is; a second time there must be nothing left."""
        found = list(recover(self.store, self.state, self.signals))
        assert list(recover(self.store, self.state, self.signals)) == []
        return found

    def is_empty(self) -> bool:
        """Whether the store has neither artifacts nor staging directories."""
        return not self.store.stagings() and not self.store.artifacts()

    def worker_facts(self) -> dict[str, Any]:
        """Say in a journal who the worker is."""
        return {"pid": self.worker.pid, "start_ticks": procfs.read_stat(self.worker.pid).start_ticks}

    def dump(self, step: str, *, alive: bool = True, sealed: bool = False, **facts: Any) -> None:
        """Leave the staging directory of a dump that was cut off in ``step``."""
        who = self.worker_facts() if alive else {"pid": NOBODY_PID, "start_ticks": 1}
        with self.store.stage(ID) as staging:
            if sealed:
                seal(self.store, staging)
            write(staging.path / JOURNAL, {"kind": "checkpoint", "step": step, **who, **facts})

    def restore(self, step: str, state: dict[str, Any] | None = None, **facts: Any) -> Path:
        """Leave the directory of a restore that was cut off in ``step``."""
        path = self.state.restores_dir.path / f"{ID}.{UUID}"
        path.mkdir(mode=0o700)
        write(path / JOURNAL, {"kind": "restore", "step": step, "started_at": time.time(), **facts})
        if state is not None:
            write(path / "state.json", state)
        return path

    def answer(self, suffix: str = ".done") -> dict[str, Any] | None:
        """Read the answer to the request."""
        path = self.signals.path / f"{ID}{suffix}"
        return json.loads(path.read_text()) if path.exists() else None


def write(path: Path, data: dict[str, Any]) -> None:
    """Write a note."""
    path.write_text(json.dumps(data))


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """Make a node with a worker that lives."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as worker:
        made = Node(tmp_path, worker)
        yield made
        worker.kill()
        made.close()


BEFORE_PUBLISH = [Step.LOCATE, Step.PREFLIGHT, Step.QUIESCE_GPU, Step.DUMP, Step.ROOTFS, Step.SEAL]


@pytest.mark.parametrize("step", [*BEFORE_PUBLISH, Step.PUBLISH])
def test_a_dump_that_was_cut_off_is_undone(node: Node, step: Step) -> None:
    """What was not published is removed; the worker lives, so its request stays open."""
    node.dump(step)
    (found,) = node.recover()
    assert (found.id, found.kind, found.step, found.ending) == (ID, "checkpoint", step, Ending.UNDONE)
    assert node.answer() is None
    assert node.is_empty()


@pytest.mark.parametrize("step", [*BEFORE_PUBLISH, Step.PUBLISH])
def test_a_dump_whose_worker_has_ended_has_failed(node: Node, step: Step) -> None:
    """Nobody can take the request up again, so it is answered."""
    node.dump(step, alive=False)
    (found,) = node.recover()
    assert (found.step, found.ending) == (step, Ending.FAILED)
    answer = node.answer() or {}
    assert answer["success"] is False
    assert answer["error"] == found.message
    assert found.message.startswith("WorkerGone: ")
    assert node.is_empty()


@pytest.mark.parametrize("stopped_before", [False, True], ids=["running before", "stopped before"])
def test_a_worker_that_the_dump_left_stopped_is_put_back(node: Node, stopped_before: bool) -> None:
    """A worker that is stopped runs again, unless it was stopped before the dump."""
    node.worker.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, node.worker.pid, os.WSTOPPED | os.WNOWAIT)
    node.dump(Step.DUMP, stopped_before=[node.worker.pid] if stopped_before else [])
    (found,) = node.recover()
    assert found.ending is Ending.UNDONE
    assert (procfs.read_stat(node.worker.pid).state == "T") == stopped_before


@pytest.mark.parametrize("alive", [True, False], ids=["the worker lives", "the worker has ended"])
@pytest.mark.parametrize(
    ("step", "published"),
    [
        pytest.param(Step.PUBLISH, False, id="sealed"),
        pytest.param(Step.PUBLISH, True, id="published"),
        pytest.param(Step.ANNOUNCE, True, id="published and not announced"),
    ],
)
def test_a_whole_artifact_is_published_and_announced(
    node: Node, step: Step, published: bool, alive: bool
) -> None:
    """What was sealed becomes an artifact, and the request is answered with its path."""
    with node.store.stage(ID) as staging:
        seal(node.store, staging)
        if published:
            node.store.publish(staging, ID)
        who = node.worker_facts() if alive else {}
        write(staging.path / JOURNAL, {"step": step, **who})
    (found,) = node.recover()
    assert (found.step, found.ending) == (step, Ending.FINISHED)
    artifact = node.store.get(ID)
    assert artifact.manifest.uuid == staging.uuid
    assert node.answer() == {**(node.answer() or {}), "success": True, "checkpoint_path": str(artifact.path)}
    assert node.store.stagings() == []


@pytest.mark.parametrize(
    ("error", "said"),
    [
        pytest.param(
            "IoUring: the worker uses io_uring", "IoUring: the worker uses io_uring", id="its error"
        ),
        pytest.param("", "the agent ended before it could answer", id="no error"),
    ],
)
def test_a_failure_that_was_not_announced_is_announced(node: Node, error: str, said: str) -> None:
    """An agent that died before it could answer has its successor answer, with the same error."""
    node.dump(Step.ANNOUNCE, error=error)
    (found,) = node.recover()
    assert (found.ending, found.message) == (Ending.FAILED, said)
    assert (node.answer() or {})["error"] == said
    assert node.store.stagings() == []


def test_a_damaged_sealed_dump_is_not_published(node: Node) -> None:
    """A staged file that is not as the manifest says keeps the artifact out of the store."""
    node.dump(Step.PUBLISH, sealed=True)
    (info,) = node.store.stagings()
    (info.path / "artifact/images/pages-1.img").write_bytes(b"short")
    (found,) = node.recover()
    assert found.ending is Ending.UNDONE
    assert node.is_empty()
    assert node.answer() is None


def test_an_older_artifact_survives_a_dump_that_was_cut_off(node: Node) -> None:
    """What stood in the store before is what stands there afterwards."""
    uuid_ = put(node.store).manifest.uuid
    node.dump(Step.SEAL, sealed=True)
    (found,) = node.recover()
    assert found.ending is Ending.UNDONE
    assert node.store.get(ID).manifest.uuid == uuid_


@pytest.mark.parametrize(
    "journal", [None, "", "{", "[]", "{}"], ids=["absent", "empty", "cut", "a list", "bare"]
)
def test_a_dump_without_a_journal_has_begun_nothing(node: Node, journal: str | None) -> None:
    """An agent that died before its first step has done nothing; the request stays open."""
    with node.store.stage(ID) as staging:
        if journal is not None:
            (staging.path / JOURNAL).write_text(journal)
    (found,) = node.recover()
    assert (found.step, found.ending) == ("", Ending.UNDONE)
    assert node.answer() is None
    assert node.store.stagings() == []


@pytest.mark.parametrize("step", [Step.DUMP, Step.ANNOUNCE])
def test_a_dump_that_nobody_waits_for_is_not_answered(node: Node, step: Step) -> None:
    """A dump by command line has no request, so no signal file is written for it."""
    node.dump(step, alive=False, announce=False)
    (found,) = node.recover()
    assert found.ending is Ending.FAILED
    assert node.answer() is None


def test_a_dump_whose_agent_lives_is_left_alone(node: Node) -> None:
    """Work that has an owner is not recovered."""
    with node.store.stage(ID) as staging:
        write(staging.path / JOURNAL, {"step": "dump", **node.worker_facts()})
        assert node.recover() == []
        assert len(node.store.stagings()) == 1
    assert len(node.recover()) == 1


def test_a_signal_directory_that_is_gone_does_not_stop_recovery(node: Node) -> None:
    """An answer that cannot be written is not worth the agent's start."""
    node.dump(Step.DUMP, alive=False)
    node.signals.path.rmdir()
    (found,) = node.recover()
    assert found.ending is Ending.FAILED


# restores -------------------------------------------------------------------------------------------------


def step_of(path: Path) -> str:
    """Read where a restore stands now."""
    return str(json.loads((path / JOURNAL).read_text())["step"])


@pytest.mark.parametrize("step", [Step.VERIFY, Step.COMPATIBILITY, Step.PREPARE, Step.RESTORE])
@pytest.mark.parametrize(
    "state",
    [
        pytest.param(None, id="no shim was started"),
        pytest.param({"phase": "starting", "shim_pid": NOBODY_PID}, id="the shim had started"),
        pytest.param({"phase": "criu", "shim_pid": NOBODY_PID}, id="CRIU had started"),
        pytest.param({"phase": "failed", "returncode": 1}, id="CRIU had failed"),
    ],
)
def test_a_restore_without_a_worker_is_undone(node: Node, step: Step, state: dict[str, Any] | None) -> None:
    """A restore that brought no worker back leaves nothing, and its request stays open."""
    path = node.restore(step, state)
    (found,) = node.recover()
    assert (found.id, found.kind, found.step, found.ending) == (ID, "restore", step, Ending.UNDONE)
    assert node.answer(".restored") is None
    assert step_of(path) == Step.DONE


@pytest.mark.parametrize("step", [Step.RESTORE, Step.ANNOUNCE])
def test_a_restored_worker_is_announced(node: Node, step: Step) -> None:
    """A worker that runs is announced, and its request taken away."""
    (node.signals.path / f"{ID}.restore").write_text("")
    node.restore(step, {"phase": "running", **node.worker_facts()})
    (found,) = node.recover()
    assert found.ending is Ending.FINISHED
    answer = node.answer(".restored") or {}
    assert (answer["success"], answer["pid"]) == (True, node.worker.pid)
    assert node.answer(".restore") is None
    assert node.worker.poll() is None


@pytest.mark.parametrize(
    "end", [{"exit_code": 3}, {"exit_signal": 9}], ids=["by an exit code", "by a signal"]
)
def test_a_worker_that_has_ended_since_is_announced_with_its_end(node: Node, end: dict[str, int]) -> None:
    """A worker that was restored and has ended was restored all the same."""
    node.restore(Step.RESTORE, {"phase": "exited", "pid": NOBODY_PID, "start_ticks": 5, **end})
    (found,) = node.recover()
    assert found.ending is Ending.FINISHED
    answer = node.answer(".restored") or {}
    assert answer["success"] is True
    assert {name: answer[name] for name in ("exit_code", "exit_signal") if name in answer} == end


@pytest.mark.parametrize("error", ["PidInUse: 100", ""], ids=["with its error", "without an error"])
def test_a_failed_restore_is_announced(node: Node, error: str) -> None:
    """A failure that the dead agent had not announced is announced."""
    node.restore(Step.ANNOUNCE, {"phase": "failed"}, error=error)
    (found,) = node.recover()
    assert found.ending is Ending.FAILED
    answer = node.answer(".restored") or {}
    assert (answer["success"], answer["error"]) == (False, found.message)
    assert found.message == (error or "the agent ended before it could answer")


def test_a_restore_by_command_is_not_announced(node: Node) -> None:
    """A restore that no file asked for is finished without an answer."""
    node.restore(Step.RESTORE, {"phase": "running", **node.worker_facts()}, announce=False)
    (found,) = node.recover()
    assert found.ending is Ending.FINISHED
    assert node.answer(".restored") is None


def test_a_restore_that_is_done_is_left_alone(node: Node) -> None:
    """A restore whose journal says done needs nothing."""
    node.restore(Step.DONE, {"phase": "running", **node.worker_facts()})
    assert node.recover() == []


def test_what_is_no_restore_does_not_stop_recovery(node: Node) -> None:
    """Foreign names, files and damaged notes beside the restores are passed over."""
    top = node.state.restores_dir.path
    for name in ("lost+found", ".git", f"{OTHER}.bad", f"{OTHER}.odd"):
        (top / name).mkdir()
    (top / f"{OTHER}.file").write_text("")
    write(top / f"{OTHER}.bad" / "state.json", {"phase": "dancing"})
    write(top / f"{OTHER}.odd" / "state.json", {"phase": "running", "pid": {"a": 1}})
    node.restore(Step.RESTORE, {"phase": "failed"})
    assert [found.id for found in node.recover()] == [ID]


def test_half_a_tree_is_ended_by_its_pids(node: Node) -> None:
    """A task that CRIU gave one of the image's pids after the restore began is ended; an older one is not."""
    began = procfs.start_time(procfs.read_stat(node.worker.pid).start_ticks)
    path = node.restore(Step.RESTORE, {"phase": "criu"}, pids=[node.worker.pid], started_at=began + 3600)
    assert len(node.recover()) == 1
    assert node.worker.poll() is None
    shutil.rmtree(path)
    pids = [NOBODY_PID, node.worker.pid]
    node.restore(Step.RESTORE, {"phase": "criu"}, pids=pids, started_at=began - 3600)
    assert len(node.recover()) == 1
    assert node.worker.wait() == -signal.SIGKILL


def test_a_criu_that_still_runs_is_ended_with_its_shim(node: Node) -> None:
    """A restore that is still under way is undone: CRIU is ended, then the shim ends by itself."""
    path = node.state.restores_dir.path / f"{ID}.{uuid.uuid4().hex}"
    path.mkdir(mode=0o700)
    shutil.copy("/bin/sleep", path / "criu")
    write(path / JOURNAL, {"step": "restore", "started_at": time.time()})
    spec = {
        "criu": [str(path / "criu"), "1000"],
        "env": {JOB_ENV: path.name.partition(".")[2]},
        "pidfile": str(path / "pid"),
        "deadline_seconds": 600,
        "inherit": [],
        "connections": [],
        "marker": None,
        "read_ahead": [],
    }
    write(path / "spec.json", spec)
    with subprocess.Popen(
        [sys.executable, "-I", "-S", shim.__file__, str(path)], stdout=subprocess.PIPE
    ) as process:
        deadline = time.monotonic() + 60
        while restored.read(node.state, path.name).phase is not restored.Phase.CRIU:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        (found,) = node.recover()
        assert process.stdout is not None
        answer = json.loads(process.stdout.read())
    assert found.ending is Ending.UNDONE
    assert (answer["phase"], answer["returncode"]) == ("failed", -signal.SIGKILL)
    assert not restored.read(node.state, path.name).shim_alive


def test_a_lock_that_lives_means_a_shim_that_lives(node: Node) -> None:
    """The shim's lock, not its pid, says whether it lives."""
    path = node.restore(Step.RESTORE, {"phase": "criu", "shim_pid": os.getpid()})
    assert restored.read(node.state, path.name).phase is restored.Phase.LOST
    with (path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert restored.read(node.state, path.name).phase is restored.Phase.CRIU
        assert restored.read(node.state, path.name).shim_alive
    assert not restored.read(node.state, path.name).shim_alive
