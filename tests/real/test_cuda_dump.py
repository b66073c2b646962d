"""Dumps of trees that use CUDA: off the GPU before CRIU works, and back on it whatever fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hibernode.host import procfs
from tests.gpu import cuda_kit
from tests.gpu.cuda_kit import CudaTool
from tests.gpu.fixtures import built
from tests.real.node import HIBERNODE, Node, read_json, state_letter, until

__all__ = ["built"]  # a fixture
pytestmark = [pytest.mark.gpu, pytest.mark.criu]

PROCESSES = 5
RUNNING = ["running"] * PROCESSES
FAILURES = [
    *(f"fail {call} {number}" for call in ("lock", "checkpoint") for number in range(1, PROCESSES + 1)),
    "busy lock 2",
    "hang lock 3",
    "half lock 1",
    "hang checkpoint 4",
    "half checkpoint 5",
]


@pytest.fixture
def tool(node: Node, built: Path) -> CudaTool:
    """Give this test's own tool, and settings that use it."""
    made = CudaTool(node.base / "cuda", built)
    node.config |= {
        "GPU_CUDA_CHECKPOINT": str(made.path),
        "GPU_LOCK_SECONDS": "0.3",
        "GPU_START_SECONDS": "1",
        "GPU_QUIESCE_SECONDS": "1",
    }
    return made


@pytest.fixture
def root(tool: CudaTool) -> Iterator[int]:
    """Run the tree."""
    with tool.tree(PROCESSES) as pid:
        yield pid


def dump(node: Node, root: int, *, ok: bool = True, **settings: str) -> str:
    """Dump the tree by the command; gives the id, or of one that is to fail what it said."""
    id_ = node.new_id()
    done = node.run("checkpoint", "--pid", root, "--id", id_, check=None, **settings)
    assert (done.returncode == 0) == ok, (done.stdout, done.stderr)
    assert node.final_name(id_) == ("whole" if ok else "absent")
    return id_ if ok else done.stderr


def tree(root: int) -> list[int]:
    """List the tree's pids in the order of the tool's states."""
    return [stat.pid for stat in procfs.tree(root)]


def free(tool: CudaTool, root: int) -> bool:
    """Whether the tree runs, none of it stopped, all of it on the GPU."""
    return tool.states(root) == RUNNING and state_letter(root) == "S"


def test_a_dump_takes_the_tree_off_the_gpu_and_back_with_few_calls(
    node: Node, tool: CudaTool, root: int
) -> None:
    """Two calls a process before CRIU, three after it; the manifest tells who was on the GPU."""
    id_ = dump(node, root)
    assert free(tool, root)
    assert len(tool.calls()) == 5 * PROCESSES
    manifest = read_json(node.store / id_ / "manifest.json")
    assert manifest is not None
    facts = manifest["cuda"]
    assert (facts["strategy"], facts["tool"]) == ("cuda-checkpoint", cuda_kit.VERSION)
    assert [each["state"] for each in facts["processes"]] == ["checkpointed"] * PROCESSES
    assert set(facts["seconds"]) == {"lock", "checkpoint"}
    assert f"{root} worker: checkpointed" in node.run("inspect", id_).stdout


@pytest.mark.parametrize("failure", FAILURES)
def test_a_call_that_fails_leaves_the_tree_running_and_unlocked(
    node: Node, tool: CudaTool, root: int, failure: str
) -> None:
    """Whichever call fails or hangs: nothing is dumped, the answer names it, and every process is back."""
    tool.control(failure)
    assert failure.split()[1] + " of pid" in dump(node, root, ok=False)
    assert free(tool, root)


def test_a_criu_that_fails_leaves_the_tree_on_the_gpu(node: Node, tool: CudaTool, root: int) -> None:
    """What fails later wakes the processes too."""
    fake = node.base / "criu"
    fake.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Version: 4.2.1" && exit 0\nexit 1\n')
    fake.chmod(0o755)
    dump(node, root, ok=False, CRIU_BINARY=str(fake))
    assert tool.count("checkpoint") == PROCESSES
    assert free(tool, root)


@pytest.mark.parametrize("where", ["lock 4", "checkpoint 3", "restore 2"])
def test_an_agent_that_is_killed_leaves_processes_that_the_next_one_wakes(
    node: Node, tool: CudaTool, root: int, where: str
) -> None:
    """The journal tells the next agent who was off the GPU; a call that was left behind is ended first."""
    tool.control(f"half {where}")
    call, number = where.split()
    command = subprocess.Popen(
        [HIBERNODE, "checkpoint", "--pid", str(root)],
        env=node.env(GPU_START_SECONDS="60"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    until("call", lambda: tool.count(call) >= int(number))
    command.send_signal(signal.SIGKILL)
    command.wait()
    assert tool.states(root) != RUNNING
    tool.control()
    node.run("gc")
    assert free(tool, root)


def test_a_worker_that_is_not_woken_after_its_dump_is_named_and_woken_later(
    node: Node, tool: CudaTool, root: int
) -> None:
    """The checkpoint is kept; as long as the tool fails the journal stays, and then the worker is woken."""
    tool.control("fail restore 3")
    id_ = node.new_id()
    said = node.run("checkpoint", "--pid", root, "--id", id_).stdout
    assert "the worker is not back on its GPU" in said
    (asleep,) = (pid for pid, state in zip(tree(root), tool.states(root), strict=True) if state != "running")
    assert f"pid {asleep} (worker) is checkpointed" in said
    (event,) = json.loads(node.run("events", "-o", "json").stdout)["items"]
    assert (event["type"], event["reason"]) == ("Warning", "CheckpointSucceeded")
    assert "CapturedNotWoken" in event["message"]
    assert node.final_name(id_) == "whole"
    tool.control("fail restore 0")
    node.run("gc", check=None)
    assert tool.ask(asleep) == "checkpointed"
    tool.control()
    node.run("gc")
    assert free(tool, root)
    assert node.final_name(id_) == "whole"
    tool.control()
    node.run("gc")
    assert tool.calls() == []


def test_a_worker_that_is_not_woken_after_a_dump_that_failed_is_woken_later(
    node: Node, tool: CudaTool, root: int
) -> None:
    """The answer says both; the next dump of the same worker wakes it first, and works."""
    fake = node.base / "criu"
    fake.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Version: 4.2.1" && exit 0\nexit 1\n')
    fake.chmod(0o755)
    tool.control("fail unlock 0")
    assert "is not back on its GPU" in dump(node, root, ok=False, CRIU_BINARY=str(fake))
    assert tool.states(root) == ["locked"] * PROCESSES
    tool.control()
    dump(node, root)
    assert free(tool, root)


@pytest.mark.parametrize("cut", [False, True])
def test_a_worker_that_a_failed_quiesce_has_left_locked_is_woken_later(
    node: Node, tool: CudaTool, root: int, *, cut: bool
) -> None:
    """A call that fails, or Ctrl-C, before CRIU has begun: what cannot be undone now is not forgotten."""
    tool.control("half checkpoint 2" if cut else "fail checkpoint 2", "fail unlock 0")
    if cut:
        command = subprocess.Popen(
            [HIBERNODE, "checkpoint", "--pid", str(root)],
            env=node.env(GPU_START_SECONDS="60"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        until("call", lambda: tool.count("checkpoint") >= PROCESSES)
        command.send_signal(signal.SIGINT)
        assert command.wait(timeout=60) == 128 + signal.SIGINT
    else:
        said = dump(node, root, ok=False)
        assert "is locked" in said
        assert "its next dump and 'hibernode gc' try again" in said
        assert "gpu.quiesce_seconds; 'cuda-checkpoint --get-state" in said
    assert tool.states(root) == ["locked"] * PROCESSES
    tool.control()
    assert cut or "; its CUDA processes are on the GPU now" in node.run("gc").stdout
    node.run("gc")
    assert free(tool, root)


def test_a_process_that_only_has_the_library_is_left_alone(node: Node, tool: CudaTool) -> None:
    """Who is linked with CUDA and has never begun it is asked for once, and is no reason to fail."""
    with tool.tree(PROCESSES - 1, 1) as root:
        dump(node, root)
        assert tool.count("get-restore-tid") == 1
        assert tool.states(root)[: PROCESSES - 1] == RUNNING[1:]


def test_a_worker_that_is_stopped_by_its_dump_stays_off_the_gpu(
    node: Node, tool: CudaTool, root: int
) -> None:
    """No call waits for a stopped process; the answer says how it comes back, and so it does."""
    id_ = node.new_id()
    said = node.run("checkpoint", "--pid", root, "--id", id_, "--leave", "stopped").stdout
    assert f"stopped and off the GPU: pid {root} (worker)" in said
    assert {state_letter(pid) for pid in tree(root)} == {"T"}
    assert tool.states(root) == ["checkpointed"] * PROCESSES
    assert tool.count("restore") == 0
    node.run("gc")
    assert tool.states(root) == ["checkpointed"] * PROCESSES
    for pid in tree(root):
        os.kill(pid, signal.SIGCONT)
    for pid in tree(root):
        for action in ("restore", "unlock"):
            subprocess.run([tool.path, "--action", action, "--pid", str(pid)], check=True, timeout=60)
    assert free(tool, root)


@pytest.mark.parametrize("leave", ["stopped", "killed"])
def test_an_agent_that_is_killed_after_criu_has_left_the_worker_so(
    node: Node, tool: CudaTool, root: int, leave: str
) -> None:
    """What was stopped runs and is woken; what was killed is not asked for."""
    done = node.run("checkpoint", "--pid", root, "--leave", leave, check=None, FAULT="kill@checkpoint.seal")
    assert done.returncode == -signal.SIGKILL
    tool.control()
    node.run("gc")
    if leave == "stopped":
        assert free(tool, root)
    else:
        assert tool.calls() == []


def test_a_worker_that_is_killed_by_its_dump_is_not_woken(node: Node, tool: CudaTool, root: int) -> None:
    """With leave=killed there is nobody to wake."""
    dump(node, root, CHECKPOINT_LEAVE="killed")
    assert tool.count("restore") == 0


def test_the_plugin_is_refused_where_there_is_none(node: Node, tool: CudaTool, root: int) -> None:
    """The other strategy needs a file, which is named; nothing was touched."""
    said = dump(node, root, ok=False, GPU_QUIESCE="criu-plugin", GPU_CRIU_PLUGINS=str(node.base))
    assert "has no cuda_plugin.so" in said
    assert tool.calls() == []
