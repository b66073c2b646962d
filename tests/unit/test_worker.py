"""The worker's tree after a dump: who was stopped before stays stopped, everybody else runs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hibernode.host import procfs
from hibernode.host.procfs import Process
from hibernode.worker import (
    STOPPED,
    WorkerState,
    end_since,
    note_states,
    noted_key,
    settle,
    settle_from_note,
    worker_state,
)
from hibernode.workload import ProcessKey

DEADLINE = 30.0
WORKER = """
import os, sys
child = os.fork()
if child == 0:
    os.write(1, b"%d\\n" % os.getpid())
    sys.stdin.read()
    os._exit(0)
os.wait()
"""


class Tree:
    """A real worker with one child; both wait for the end of their input."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        self.popen = process
        self.pid = process.pid
        self.child = int(process.stdout.readline())

    def stop(self, pid: int) -> None:
        """Stop a process as somebody else's SIGSTOP does."""
        os.kill(pid, signal.SIGSTOP)
        self.until(pid, stopped=True)

    def until(self, pid: int, *, stopped: bool) -> None:
        """Wait until a process is stopped, or is not."""
        wait_for(lambda: self.is_stopped(pid) == stopped)

    @staticmethod
    def is_stopped(pid: int) -> bool:
        """Whether a process is stopped."""
        return procfs.read_stat(pid).state in STOPPED

    def end(self) -> None:
        """End both."""
        for pid in (self.child, self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.popen.wait()


def wait_for(condition: Callable[[], bool]) -> None:
    """Poll until ``condition`` holds."""
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.fixture
def tree() -> Iterator[Tree]:
    """Start a worker."""
    with subprocess.Popen(
        [sys.executable, "-c", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        started = Tree(process)
        yield started
        started.end()


def test_every_process_of_the_tree_is_looked_at(tree: Tree) -> None:
    """The worker's state has the root and its child, untraced."""
    tree.stop(tree.child)
    states = {key.pid: state for key, state in worker_state(tree.pid).items()}
    assert set(states) == {tree.pid, tree.child}
    assert states[tree.child] == WorkerState("T", 0)
    assert states[tree.pid].state not in STOPPED


@pytest.mark.parametrize("who", ["root", "child", "both"])
def test_who_was_stopped_since_runs_again(tree: Tree, who: str) -> None:
    """A process that somebody has stopped after the look before the dump gets SIGCONT."""
    before = worker_state(tree.pid)
    pids = {"root": [tree.pid], "child": [tree.child], "both": [tree.pid, tree.child]}[who]
    for pid in pids:
        tree.stop(pid)
    with Process.open(tree.pid) as process:
        assert settle(process, before) == []
    assert not tree.is_stopped(tree.pid)
    assert not tree.is_stopped(tree.child)


def test_who_was_stopped_before_stays_stopped(tree: Tree) -> None:
    """A process that was stopped before the dump is left as it was, also beside one that was not."""
    tree.stop(tree.child)
    before = worker_state(tree.pid)
    tree.stop(tree.pid)
    with Process.open(tree.pid) as process:
        assert settle(process, before) == []
    assert tree.is_stopped(tree.child)
    assert not tree.is_stopped(tree.pid)


def test_a_running_tree_is_left_alone(tree: Tree) -> None:
    """Nothing is sent to a tree that is as it was."""
    with Process.open(tree.pid) as process:
        assert settle(process, worker_state(tree.pid)) == []


def test_a_dead_worker_needs_nothing(tree: Tree) -> None:
    """A worker that has ended, reaped or not, has nothing to be put back."""
    before = worker_state(tree.pid)
    with Process.open(tree.pid) as process:
        os.kill(tree.pid, signal.SIGKILL)
        wait_for(lambda: not process.alive())
        assert settle(process, before) == []
        tree.end()
        assert settle(process, before) == []


def note(tree: Tree, **changes: Any) -> dict[str, Any]:
    """Write what the agent's journal says before a dump, and read it as the next agent does."""
    states = worker_state(tree.pid)
    ticks = procfs.read_stat(tree.pid).start_ticks
    text = json.dumps({"pid": tree.pid, "start_ticks": ticks, **note_states(states), **changes})
    read: dict[str, Any] = json.loads(text)
    return read


def test_a_note_names_who_was_stopped() -> None:
    """The note lists the pids that were stopped, by a signal or by a tracer."""
    states = {
        ProcessKey(1, 5): WorkerState("S", 0),
        ProcessKey(2, 5): WorkerState("T", 0),
        ProcessKey(3, 5): WorkerState("t", 9),
    }
    assert note_states(states) == {"stopped_before": [2, 3]}


def test_the_next_agent_puts_the_worker_back(tree: Tree) -> None:
    """From the note of a dead agent the tree is put back as it was before the dump."""
    tree.stop(tree.child)
    journal = note(tree)
    tree.stop(tree.pid)
    assert settle_from_note(journal)
    assert tree.is_stopped(tree.child)
    assert not tree.is_stopped(tree.pid)


def test_a_note_without_stopped_processes_lets_all_run(tree: Tree) -> None:
    """A journal from before the look at the tree has no list; then all are to run."""
    journal = note(tree)
    del journal["stopped_before"]
    tree.stop(tree.pid)
    assert settle_from_note(journal)
    assert not tree.is_stopped(tree.pid)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"start_ticks": 1}, id="the pid is another process by now"),
        pytest.param({"start_ticks": None}, id="no start time"),
        pytest.param({"pid": "x"}, id="a pid that is no number"),
        pytest.param({"pid": None}, id="no pid"),
        pytest.param({"pid": -1}, id="a negative pid"),
        pytest.param({"pid": 1 << 22}, id="a pid that nobody can have"),
        pytest.param({"pid": 1 << 80}, id="a pid beyond all numbers"),
    ],
)
def test_a_note_that_names_nobody_touches_nobody(tree: Tree, changes: dict[str, Any]) -> None:
    """A note that does not name a living process says that the worker is gone, and nothing is sent."""
    journal = note(tree, **changes)
    tree.stop(tree.pid)
    assert not settle_from_note(journal)
    assert tree.is_stopped(tree.pid)


def test_an_empty_note_says_that_the_worker_is_gone() -> None:
    """A journal that was lost names no worker."""
    assert not settle_from_note({})


def test_a_note_of_a_dead_worker_says_so(tree: Tree) -> None:
    """A worker that has ended since is said to be gone."""
    journal = note(tree)
    tree.end()
    assert not settle_from_note(journal)


# half a tree ----------------------------------------------------------------------------------------------


def test_only_what_is_young_and_not_spared_is_ended() -> None:
    """By its start, not by its number alone; who is spared is asked only when all are held."""
    with (
        subprocess.Popen(["/bin/sleep", "1000"]) as one,
        subprocess.Popen(["/bin/sleep", "1000"]) as two,
    ):
        began = procfs.start_time(procfs.read_stat(one.pid).start_ticks)
        pids = [one.pid, two.pid, 1, 0, -1, 1 << 80, 1 << 22]
        try:
            assert end_since(pids, began + 3600) == []
            assert end_since(pids, began, lambda: {one.pid, two.pid}) == []
            assert end_since(pids, began, lambda: {two.pid}) == [one.pid]
            assert one.wait() == -signal.SIGKILL
            assert two.poll() is None
            assert end_since([one.pid], began) == []
        finally:
            one.kill()
            two.kill()


def test_a_thread_is_not_taken_for_a_process() -> None:
    """Images name threads too, and the number of one may be that of somebody's thread by now."""
    code = (
        "import threading, sys; thread = threading.Thread(target=sys.stdin.read); thread.start();"
        "print(thread.native_id, flush=True)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert end_since([int(process.stdout.readline())], 0.0) == []
        process.communicate(b"")
    assert process.returncode == 0


@pytest.mark.parametrize(
    "note",
    [
        None,
        7,
        [],
        {},
        {"pid": 7},
        {"pid": None, "start_ticks": 1},
        {"pid": 0, "start_ticks": 1},
        {"pid": -7, "start_ticks": 1},
        {"pid": 1 << 22, "start_ticks": 1},
        {"pid": float("inf"), "start_ticks": 1},
    ],
    ids=repr,
)
def test_a_damaged_note_names_no_process(note: object) -> None:
    """It is read from disk."""
    assert noted_key(note) is None
