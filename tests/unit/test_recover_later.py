"""Recovery beside later work: what another restore has taken since is not touched, nor what is under way."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hibernode import recover, restored
from hibernode.container.leftovers import MARKER
from hibernode.daemon import Agent
from hibernode.errors import BusyError, RefusedError
from hibernode.host import procfs
from hibernode.journal import JOURNAL, Step
from hibernode.recover import Ending, Held, make_way, see_clean
from hibernode.workload import CheckpointId
from tests.unit.artifact_kit import ID, OTHER
from tests.unit.box_kit import SLEEPS, box
from tests.unit.test_recover import UUID, Node, node, step_of, write

__all__ = ["node"]  # a fixture

LATER = "ffeeddccbbaa99887766554433221100"
HOUR = 3600.0


def leave(node: Node, step: str, id_: str = ID, uuid: str = UUID, **facts: Any) -> Path:
    """Leave the directory of a restore; ``state`` and ``spec`` are the shim's two files."""
    path = node.state.restores_dir.path / f"{id_}.{uuid}"
    path.mkdir(mode=0o700)
    for name in ("state", "spec"):
        if name in facts:
            write(path / f"{name}.json", facts.pop(name))
    write(path / JOURNAL, {"step": step, "started_at": time.time() - HOUR, **facts})
    return path


def running(pid: int) -> dict[str, Any]:
    """Say in a shim's words that a worker runs."""
    return {"phase": "running", "pid": pid, "start_ticks": procfs.read_stat(pid).start_ticks}


class Filled:
    """A container with a process in it, and a restore into it that its owner has not ended."""

    def __init__(self, node: Node, pid: int) -> None:
        self.node, self.pid = node, pid
        self.key = procfs.read_stat(pid).key
        (self.inside,) = [stat.pid for stat in procfs.tree(pid) if stat.pid != pid]
        self.target = {"pid": pid, "start_ticks": self.key.start_ticks}
        self.applied = [{"undo": "rootfs.tar.undo", "mount_point": "/"}]
        self.old = leave(node, Step.RESTORE, target=self.target, applied=self.applied)
        (self.old / "rootfs.tar.undo").write_bytes(b"")

    def lives(self) -> bool:
        """Whether the process in it lives."""
        return procfs.read_stat(self.inside).state not in "ZX"


@pytest.fixture
def filled(node: Node, tmp_path: Path) -> Iterator[Filled]:
    """Give such a container."""
    (tmp_path / "root").mkdir()
    with box(tmp_path / "root", SLEEPS.format(1000)) as pid:
        yield Filled(node, pid)


def test_the_half_tree_of_a_dead_restore_is_ended(filled: Filled) -> None:
    """Nobody has restored into the container since, so what is younger is of the dead one."""
    (found,) = filled.node.recover()
    assert found.ending is Ending.UNDONE
    while filled.lives():
        time.sleep(0.001)


@pytest.mark.parametrize("step", [Step.DONE, Step.ANNOUNCE, Step.RESTORE])
def test_a_container_that_a_later_restore_has_taken_is_not_touched(filled: Filled, step: Step) -> None:
    """Its worker lives, whether that restore was answered or not, and the old one's undo is gone."""
    state = running(filled.inside)
    leave(filled.node, step, OTHER, LATER, target=filled.target, state=state, started_at=time.time())
    found = {item.id: item for item in filled.node.recover()}
    assert found[CheckpointId(ID)].ending is Ending.UNDONE
    assert "another worker" in found[CheckpointId(ID)].message
    assert filled.lives()
    assert not (filled.old / "rootfs.tar.undo").exists()


def test_a_container_that_did_not_wait_is_not_touched(filled: Filled) -> None:
    """Its init has become another program, a cold start, so what runs there is none of the restore's."""
    write(
        filled.old / JOURNAL,
        {"step": "restore", "target": {**filled.target, "comm": "hibernode-ph"}, "applied": filled.applied},
    )
    (found,) = filled.node.recover()
    assert "runs something else" in found.message
    assert filled.lives()


def test_a_container_that_is_claimed_is_left_to_whoever_has_it(filled: Filled) -> None:
    """Another id is being restored into it just now."""
    with filled.node.state.claim(filled.pid):
        assert filled.node.recover() == []
        assert filled.lives()
        assert step_of(filled.old) == Step.RESTORE
    assert len(filled.node.recover()) == 1


def test_a_restore_whose_id_is_held_is_left_to_whoever_has_it(node: Node) -> None:
    """Its owner lives, and will answer for it."""
    path = node.restore(Step.RESTORE, {"phase": "failed"})
    with node.store.lock(CheckpointId(ID)):
        assert node.recover() == []
        assert step_of(path) == Step.RESTORE
    assert len(node.recover()) == 1


@pytest.mark.parametrize("id_", [ID, OTHER], ids=["the same id", "another id"])
def test_pids_that_a_later_restore_has_taken_are_not_ended(node: Node, id_: str) -> None:
    """The pids of an image come back with each restore of it; those of the last one run."""
    pids = [node.worker.pid]
    leave(node, Step.RESTORE, pids=pids, state={"phase": "criu"})
    leave(node, Step.DONE, id_, LATER, pids=pids, state=running(node.worker.pid), started_at=time.time())
    (found,) = node.recover()
    assert found.ending is Ending.UNDONE
    assert node.worker.poll() is None


def test_pids_of_another_boot_are_not_ended(node: Node) -> None:
    """The machine was started anew, so that a process with the number is another one."""
    leave(node, Step.RESTORE, pids=[node.worker.pid], boot_id="another", state={"phase": "criu"})
    (found,) = node.recover()
    assert found.ending is Ending.UNDONE
    assert node.worker.poll() is None


def test_a_container_of_another_boot_is_not_looked_for(filled: Filled) -> None:
    """Even if a process with its pid and its start should be there."""
    write(
        filled.old / JOURNAL,
        {"step": "restore", "target": filled.target, "applied": filled.applied, "boot_id": "another"},
    )
    (found,) = filled.node.recover()
    assert "its container is gone" in found.message
    assert filled.lives()


@pytest.mark.parametrize("pids", [None, 7, "1", {"1": 1}, ["1", None, [1], -1, 0, 1 << 80]], ids=repr)
def test_damaged_pids_end_nothing(node: Node, pids: object) -> None:
    """The note is read from disk and may say anything."""
    leave(node, Step.RESTORE, pids=pids, state={"phase": "criu"})
    (found,) = node.recover()
    assert found.ending is Ending.UNDONE


# what a dead restore has left beside its worker -----------------------------------------------------------


def marked(path: Path, *, inside: str = "") -> dict[str, Any]:
    """Write a marker, and what the shim was told of it; ``inside``: as its container sees it."""
    path.write_bytes(MARKER)
    return {"marker": {"path": inside or str(path), "uid": os.getuid(), "gid": 0, "groups": []}}


def test_the_marker_of_a_dead_restore_is_removed(node: Node, tmp_path: Path) -> None:
    """Else the next cold start would take itself for the restored copy."""
    leave(node, Step.RESTORE, spec=marked(tmp_path / "restored"))
    assert len(node.recover()) == 1
    assert not (tmp_path / "restored").exists()


@pytest.mark.parametrize(("state", "ends"), [({"phase": "criu"}, True), ({"phase": "failed"}, False)])
def test_who_restores_ends_what_the_killed_shim_has_left_in_the_container(
    filled: Filled, state: dict[str, Any], ends: bool
) -> None:
    """With the marker; one that lived to say that it has failed has done so itself."""
    root = Path(f"/proc/{filled.pid}/root")
    write(filled.old / "spec.json", marked(root / "restored", inside="/restored"))
    write(filled.old / "state.json", state)
    recover.end_left(filled.node.state, filled.old.name)
    assert (root / "restored").exists() is not ends
    assert filled.lives() is not ends


def test_who_restores_touches_nothing_in_a_container_that_did_not_wait(filled: Filled) -> None:
    """What runs there now is the cold start, and none of the restore's."""
    journal = {"step": "restore", "target": {**filled.target, "comm": "hibernode-ph"}}
    write(filled.old / JOURNAL, {**journal, "applied": filled.applied})
    write(filled.old / "state.json", {"phase": "criu"})
    recover.end_left(filled.node.state, filled.old.name)
    assert filled.lives()


@pytest.mark.parametrize("phase", ["", "starting", "failed", "running"])
def test_pids_of_a_restore_that_has_left_no_tree_are_not_ended(node: Node, phase: str) -> None:
    """CRIU was not started, or the shim has ended it: who has one of the numbers is another. Or it runs."""
    noted = running(node.worker.pid) if phase == "running" else {"phase": phase}
    path = leave(node, Step.RESTORE, pids=[node.worker.pid])
    if phase:
        write(path / "state.json", noted)
    recover.end_left(node.state, path.name)
    assert len(node.recover()) == 1
    assert node.worker.poll() is None


@pytest.mark.parametrize("later", [False, True], ids=["the last restore", "one before the last"])
def test_the_marker_of_a_worker_that_has_ended_without_its_shim_is_forgotten(
    node: Node, tmp_path: Path, later: bool
) -> None:
    """Unless it is a later worker's by now."""
    spec = marked(tmp_path / "restored")
    state = {"phase": "running", "pid": 1 << 22, "start_ticks": 1}
    path = leave(node, Step.DONE, spec=spec, state=state)
    if later:
        leave(
            node, Step.DONE, OTHER, LATER, spec=spec, state=running(node.worker.pid), started_at=time.time()
        )
    recover.forget_marker(node.state, restored.read(node.state, path.name))
    assert (tmp_path / "restored").exists() is later


async def test_a_worker_that_was_never_seen_to_run_is_told_of_when_it_ends(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen before it began, and then when shim and worker had ended: LOST twice, and not the same."""
    path = leave(node, Step.RESTORE)
    told: list[restored.Restored] = []
    turns = iter([False, True, False])

    async def rest(_seconds: float) -> None:
        if next(turns):  # the last one ends the watch
            write(path / "state.json", {"phase": "running", "pid": 1 << 22, "start_ticks": 1})

    async def forget(_entry: restored.Restored) -> None:
        pass

    monkeypatch.setattr(asyncio, "sleep", rest)
    requests = SimpleNamespace(restored_keys=set(), say_ended=told.append)
    agent = SimpleNamespace(state=node.state, requests=requests, _restored={}, _forget_marker=forget)
    with pytest.raises(RuntimeError):
        await Agent._watch_restored(cast("Agent", agent))
    assert [entry.phase for entry in told] == [restored.Phase.LOST]


def test_the_marker_in_a_container_that_goes_on_is_forgotten(filled: Filled) -> None:
    """A foreign placeholder outlives its worker and the shim."""
    root = Path(f"/proc/{filled.pid}/root")
    write(filled.old / "spec.json", marked(root / "restored", inside="/restored"))
    recover.forget_marker(filled.node.state, restored.read(filled.node.state, filled.old.name))
    assert not (root / "restored").exists()


def test_the_marker_that_a_later_restore_has_taken_stays(node: Node, tmp_path: Path) -> None:
    """Its worker looks at it."""
    spec = marked(tmp_path / "restored")
    leave(node, Step.RESTORE, spec=spec)
    leave(node, Step.DONE, OTHER, LATER, spec=spec, state=running(node.worker.pid), started_at=time.time())
    assert len(node.recover()) == 1
    assert (tmp_path / "restored").exists()


def test_what_would_undo_a_success_is_forgotten(node: Node) -> None:
    """The owner died when all was restored: what was replaced is not needed any more, and may be large."""
    applied = [{"undo": "rootfs.tar.undo", "mount_point": "/"}]
    path = leave(node, Step.RESTORE, state=running(node.worker.pid), applied=applied)
    (path / "rootfs.tar.undo").write_bytes(b"x" * 1024)
    (found,) = node.recover()
    assert found.ending is Ending.FINISHED
    assert not (path / "rootfs.tar.undo").exists()


# before something begins ----------------------------------------------------------------------------------


def test_whoever_begins_settles_what_is_left_of_its_id(node: Node) -> None:
    """And nothing of other ids; its own directory, which is unfinished too, stays."""
    mine = leave(node, Step.VERIFY, uuid=LATER)
    old, other = leave(node, Step.RESTORE), leave(node, Step.RESTORE, OTHER)
    with node.store.lock(CheckpointId(ID)):
        found = make_way(node.store, node.state, None, Held(CheckpointId(ID), None, mine.name))
    assert [(item.id, item.ending) for item in found] == [(ID, Ending.UNDONE)]
    assert [step_of(path) for path in (mine, old, other)] == [Step.VERIFY, Step.DONE, Step.RESTORE]


def test_whoever_begins_settles_what_is_left_in_its_container(filled: Filled) -> None:
    """Also what a restore of another id has left there."""
    node = filled.node
    held = Held(CheckpointId(OTHER), filled.key)
    with node.store.lock(CheckpointId(OTHER)), node.state.claim(filled.pid):
        found = make_way(node.store, node.state, None, held)
        see_clean(node.state, held)
    assert [item.id for item in found] == [ID]
    while filled.lives():
        time.sleep(0.001)


def test_whoever_begins_waits_for_another_who_settles(filled: Filled) -> None:
    """The container is not to be filled while it is being emptied."""
    node = filled.node
    with node.store.lock(CheckpointId(ID)), pytest.raises(BusyError):
        make_way(node.store, node.state, None, Held(CheckpointId(OTHER), filled.key))


def test_a_container_that_could_not_be_emptied_is_refused(filled: Filled) -> None:
    """What is left is named, now and whenever it is asked for again."""
    node = filled.node
    held = Held(CheckpointId(OTHER), filled.key)
    (filled.old / "rootfs.tar.undo").unlink()
    (filled.old / "rootfs.tar.undo").mkdir()
    for _ in range(2):
        make_way(node.store, node.state, None, held)
        with pytest.raises(RefusedError, match="directory") as refusal:
            see_clean(node.state, held)
        assert refusal.value.reason == "TargetDirty"


def test_a_container_with_an_unsettled_restore_is_refused(filled: Filled) -> None:
    """Its disk is broken, say: it is not known what is left, so nothing is put there."""
    with pytest.raises(RefusedError, match="cannot be undone now"):
        see_clean(filled.node.state, Held(CheckpointId(OTHER), filled.key))


# dumps ----------------------------------------------------------------------------------------------------


def test_a_dead_dump_of_a_worker_that_is_dumped_again_waits(node: Node) -> None:
    """To put the worker back as it was would make it run in the middle of the other dump."""
    node.dump(Step.DUMP)
    node.worker.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, node.worker.pid, os.WSTOPPED | os.WNOWAIT)
    with node.state.claim(node.worker.pid):
        assert node.recover() == []
    assert procfs.read_stat(node.worker.pid).state == "T"
    (found,) = node.recover()
    assert found.ending is Ending.UNDONE
    assert procfs.read_stat(node.worker.pid).state != "T"


def test_a_dump_of_another_boot_is_left_to_its_own_node(node: Node) -> None:
    """While an agent runs: in a shared store the dead of another node are not ours to judge."""
    node.dump(Step.DUMP, boot_id="another")
    assert list(recover.recover(node.store, node.state, node.signals, this_boot=True)) == []
    assert len(node.store.stagings()) == 1
    assert len(node.recover()) == 1


def test_whoever_dumps_settles_what_is_left_of_the_worker(node: Node) -> None:
    """Whatever id the dead dump had."""
    node.dump(Step.DUMP, boot_id=procfs.boot_id())
    key = procfs.read_stat(node.worker.pid).key
    with node.state.claim(node.worker.pid):
        assert make_way(node.store, node.state, None, Held(CheckpointId(OTHER), None)) == []
        (found,) = make_way(node.store, node.state, None, Held(CheckpointId(OTHER), key))
    assert (found.kind, found.ending) == ("checkpoint", Ending.UNDONE)


# the directories ------------------------------------------------------------------------------------------


def test_old_restores_that_are_still_to_be_undone_are_kept(node: Node) -> None:
    """Only what is done is forgotten, the oldest first."""
    kept = leave(node, Step.RESTORE, OTHER)
    for number in range(restored.KEEP_RESTORES + 3):
        leave(node, Step.DONE, uuid=f"{number:032x}", started_at=time.time() + number)
    restored.forget_old(node.state)
    names = sorted(node.state.restores_dir.names())
    assert len(names) == restored.KEEP_RESTORES + 1
    assert kept.name in names
    assert f"{ID}.{0:032x}" not in names


def test_a_shim_that_has_a_worker_is_left_alone(node: Node) -> None:
    """It was too late to undo its restore: the worker runs, and somebody has to know its exit code."""
    name = f"{ID}.{UUID}"
    path = leave(node, Step.RESTORE, state={**running(node.worker.pid), "shim_pid": 0})
    code = (
        "import fcntl, sys; lock = open(sys.argv[1], 'w'); fcntl.flock(lock, fcntl.LOCK_EX);"
        "print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, path / "lock"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as shim:
        assert shim.stdout is not None
        shim.stdout.readline()
        write(path / "state.json", {**running(node.worker.pid), "shim_pid": shim.pid})
        began = time.monotonic()
        with node.state.restores_dir.subdir(name) as directory:
            restored.undo(directory)
        assert time.monotonic() - began < restored.END_SECONDS
        assert shim.poll() is None
        shim.communicate()
    assert shim.returncode == 0
