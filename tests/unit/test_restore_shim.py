"""A restore whose shim is killed or hangs: nothing is left of it, and the reason is the right one.

CRIU is a program of the test's that makes a worker; what wakes the worker is a coroutine of the test's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from hibernode import recover, restore_shim, restored
from hibernode.errors import CriuError, DeadlineError
from hibernode.host import procfs
from hibernode.journal import JOURNAL, Step
from hibernode.recover import Ending
from hibernode.restore_shim import run_shim
from tests.unit.test_recover import Node, node, write
from tests.unit.test_shim import HEADER, SLEEPS, wait_for
from tests.unit.test_shim import worker as made

__all__ = ["node"]  # a fixture

PATIENCE = 60.0
KILLS = "os.kill(os.getppid(), 9)\n" + SLEEPS
"""What CRIU does when the worker is there: it kills the shim, and ends with it."""

FORKS = "os.fork()\n    " + SLEEPS
"""A worker with a child that no image knows."""


class Begun:
    """A restore whose shim is about to be started."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.began = time.time()
        self.path = node.restore(Step.RESTORE)
        self.marker = self.path.parent.parent / "restored"
        self.criu = self.path.parent.parent / "criu"

    def pids(self) -> list[int]:
        """List the processes of this restore's tree that live."""
        found = []
        for pid, stat in procfs.all_stats().items():
            with contextlib.suppress(OSError):
                if stat.state not in "ZX" and procfs.environ(pid).get("WORK") == str(self.path):
                    found.append(pid)
        return found

    async def run(
        self,
        script: str,
        awaken: Callable[[], Coroutine[Any, Any, None]] | None = None,
        *,
        end_left: bool = True,
        seconds: float = PATIENCE,
    ) -> dict[str, Any]:
        """Run the shim; ``end_left``: as the agent would, else it was killed too."""
        self.criu.write_text(HEADER + script)
        self.criu.chmod(0o755)
        spec = {
            "criu": [str(self.criu)],
            "env": {"WORK": str(self.path)},
            "pidfile": str(self.path / "pidfile"),
            "deadline_seconds": PATIENCE,
            "inherit": [],
            "connections": [],
            "marker": {"path": str(self.marker), "uid": 0, "gid": 0, "groups": [], "capabilities": 0},
            "read_ahead": [],
            "wake": awaken is not None,
        }
        write(self.path / "spec.json", spec)

        async def wake(_root: int) -> None:
            assert awaken is not None
            self.note_pids()
            await awaken()

        async def end() -> None:
            self.note_pids()
            if end_left:
                await asyncio.to_thread(recover.end_left, self.node.state, self.path.name)

        with self.node.state.restores_dir.subdir(self.path.name) as directory:
            return await run_shim(directory, seconds, wake, end)

    def note_pids(self) -> None:
        """Write into the journal which pid CRIU was to give, as the agent does before it starts the shim."""
        pidfile = self.path / "pidfile"
        pids = [int(pidfile.read_text())] if pidfile.exists() else []
        journal = {"step": Step.RESTORE, "started_at": self.began, "boot_id": procfs.boot_id()}
        write(self.path / JOURNAL, {**journal, "pids": pids})

    async def killed_before_its_note(self) -> None:
        """Kill the shim when it has written the marker, and not yet that the worker runs."""
        os.mkfifo(self.path / "state.json.tmp")  # where it waits for a reader
        self.killer = asyncio.create_task(asyncio.to_thread(self._kill_with_marker))

    def _kill_with_marker(self) -> None:
        shim = json.loads((self.path / "state.json").read_text())["shim_pid"]
        wait_for(self.marker.exists)
        os.kill(shim, signal.SIGKILL)

    def is_gone(self) -> bool:
        """Whether nothing is left: no process, and no marker that a worker would take for its own."""
        return not self.pids() and not self.marker.exists()


@pytest.fixture
async def begun(node: Node) -> AsyncIterator[Begun]:
    """Begin a restore; nothing of it is left running."""
    restore = Begun(node)
    yield restore
    for pid in restore.pids():
        os.kill(pid, signal.SIGKILL)
    shutil.rmtree(restore.path)


WHO = pytest.mark.parametrize(
    "agent_lives", [True, False], ids=["the agent lives", "the agent is killed too"]
)


@WHO
@pytest.mark.parametrize("wake", [False, True], ids=["without a GPU", "with one"])
async def test_a_shim_that_is_killed_when_criu_has_ended_leaves_no_tree(
    begun: Begun, wake: bool, agent_lives: bool
) -> None:
    """Nobody would know of the tree, nor wake it: it is ended, with what it has started since."""

    async def never() -> None:
        raise AssertionError

    with pytest.raises(CriuError, match="before CRIU had ended, or") as caught:
        await begun.run(made(body=FORKS, after=KILLS), never if wake else None, end_left=agent_lives)
    assert caught.value.reason == "ShimEnded"
    if not agent_lives:
        assert begun.pids()
        assert begun.marker.exists() is not wake
        (found,) = begun.node.recover()
        assert found.ending is Ending.UNDONE
    assert begun.is_gone()


@WHO
async def test_a_shim_that_is_killed_between_the_marker_and_its_note_leaves_neither(
    begun: Begun, agent_lives: bool
) -> None:
    """The tree was awake by then; it is ended, and a worker that starts cold is not told otherwise."""
    with pytest.raises(CriuError, match="before the GPU state") as caught:
        await begun.run(made(body=FORKS), begun.killed_before_its_note, end_left=agent_lives)
    assert caught.value.reason == "ShimEnded"
    if not agent_lives:
        assert begun.marker.exists()
        (found,) = begun.node.recover()
        assert found.ending is Ending.UNDONE
    assert begun.is_gone()


async def test_a_shim_that_is_killed_when_the_worker_runs_has_restored_it(begun: Begun) -> None:
    """It has written down that it runs, and the worker finds its marker."""
    state = await begun.run(made())
    begun.note_pids()
    assert state["phase"] == "running"
    os.kill(state["shim_pid"], signal.SIGKILL)
    wait_for(lambda: not restored.read(begun.node.state, begun.path.name).shim_alive)
    (found,) = begun.node.recover()
    assert found.ending is Ending.FINISHED
    assert begun.pids()
    assert begun.marker.exists()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have little patience with a shim."""
    monkeypatch.setattr(restore_shim, "SLACK_SECONDS", 0.2)
    monkeypatch.setattr(restored, "END_SECONDS", 0.2)


@pytest.mark.usefixtures("impatient")
async def test_a_shim_that_gives_no_answer_has_hit_a_deadline(begun: Begun) -> None:
    """It is not said that a disk has failed; what it has begun is ended."""
    with pytest.raises(DeadlineError, match="the shim gave no answer within"):
        await begun.run(made(after=SLEEPS), seconds=1.0)
    assert begun.is_gone()


@pytest.mark.usefixtures("impatient")
async def test_a_shim_that_hangs_after_the_gpu_state_is_back_has_hit_a_deadline(begun: Begun) -> None:
    """The place of the marker hangs, say, or its disk."""

    async def hang() -> None:
        os.mkfifo(begun.path / "state.json.tmp")

    with pytest.raises(DeadlineError, match="did not say that it runs within"):
        await begun.run(made(), hang)
    assert begun.is_gone()


async def test_a_shim_that_cannot_begin_is_named(begun: Begun) -> None:
    """It has written nothing down at all."""
    (begun.path / restored.UNDONE).touch()
    with pytest.raises(CriuError, match="before CRIU had ended, or"):
        await begun.run("note('ran')")
    assert not (begun.path / "ran").exists()
