"""CUDA workers in real containers: dumped from one and restored into another, with stand-ins for CUDA."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu import cuda_kit
from tests.gpu.cuda_kit import CudaTool
from tests.gpu.fixtures import built
from tests.real.boxes import Box, Kit
from tests.real.node import HIBERNODE, Node, read_json, state_letter, until
from tests.real.places import Place, descendants, inner_pid, placed

__all__ = ["built"]  # a fixture
pytestmark = [pytest.mark.gpu, pytest.mark.criu, pytest.mark.containers]

PROCESSES = 3
RUNNING = ["running"] * PROCESSES


@pytest.fixture
def tool(node: Node, built: Path) -> CudaTool:
    """Give this test's own tool, and settings that use it."""
    made = CudaTool(node.base / "cuda", built)
    node.config["GPU_CUDA_CHECKPOINT"] = str(made.path)
    return made


def inner(pids: list[int]) -> dict[int, int]:
    """Give each process's pid as itself sees it, and as the node does."""
    return {inner_pid(pid): pid for pid in pids}


@pytest.fixture
def place(node: Node, kit: Kit) -> Iterator[Place]:
    """Give a place for boxes with the stand-ins in them."""
    with placed(node, kit, "runc") as here:
        yield here


def start(place: Place, tool: CudaTool, id_: str) -> Box:
    """Start a worker."""
    argv = (f"{cuda_kit.IN_BOX}/worker", str(PROCESSES))
    box = place.start(id_, argv=argv, more_binds=[(tool.built, cuda_kit.IN_BOX, "ro")])
    until("CUDA in all processes", lambda: tool.states(box.pid) == RUNNING)
    return box


def placeholder(place: Place, tool: CudaTool, id_: str) -> Box:
    """Start a container that waits for it."""
    return place.placeholder(id_, more_binds=[(tool.built, cuda_kit.IN_BOX, "ro")])


def test_a_worker_is_taken_off_the_gpu_in_one_container_and_woken_in_another(
    place: Place, tool: CudaTool
) -> None:
    """All are woken in the old one and, by the pids that they have inside, in the new one too."""
    node, id_ = place.node, place.node.new_id()
    box = start(place, tool, id_)
    tool.control()
    node.run("checkpoint", "--container", box.id)
    assert tool.states(box.pid) == RUNNING
    assert tool.count("checkpoint") == PROCESSES
    before = inner([box.pid, *descendants(box.pid)])
    manifest = read_json(node.store / id_ / "manifest.json") or {}
    assert [each["ns_pid"] for each in manifest["cuda"]["processes"]] == sorted(before)

    tool.control()
    waiting = placeholder(place, tool, id_)
    root = place.thaw(id_, waiting)
    after = inner([root, *descendants(root)])
    assert sorted(after) == sorted(before)
    assert tool.states(root) == RUNNING
    woken = [int(line.split()[1]) for line in tool.calls() if line.startswith("restore")]
    assert sorted(woken) == sorted(after.values())
    assert waiting.alive()
    assert tool.states(box.pid) == RUNNING


@pytest.mark.parametrize("agent_too", [False, True], ids=["the shim", "the agent too"])
def test_a_shim_that_is_killed_leaves_no_tree_in_the_container(
    place: Place, tool: CudaTool, agent_too: bool
) -> None:
    """The agent or whoever comes next ends what was asleep there; then a container gets the worker."""
    node, id_ = place.node, place.node.new_id()
    box = start(place, tool, id_)
    node.run("checkpoint", "--container", box.id)
    waiting = placeholder(place, tool, id_)
    tool.control("hang restore 2")
    command = subprocess.Popen(
        [HIBERNODE, "restore", id_, "--into", waiting.id],
        env=node.env(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    until("hanging call", lambda: tool.count("restore") == PROCESSES)
    asleep = descendants(waiting.pid)
    (state,) = (node.state / "restores").glob("*/state.json")
    shim = (read_json(state) or {})["shim_pid"]
    if agent_too:
        os.kill(shim, signal.SIGSTOP)  # else it sees the agent's end and does it itself
        command.kill()
        command.wait()
    os.kill(shim, signal.SIGKILL)
    assert command.wait(timeout=60) != 0
    until("the shim's end", lambda: state_letter(shim) in ("", "Z"))
    tool.control()
    if not agent_too:  # the first was told that nobody comes
        assert not {state_letter(pid) for pid in asleep} - {"", "Z"}
        waiting = placeholder(place, tool, id_)
    root = place.thaw(id_, waiting)
    assert asleep
    assert not {state_letter(pid) for pid in asleep} - {"", "Z"}
    assert tool.states(root) == RUNNING
