"""Restores of a tree that was off the GPU: real CRIU; CUDA's library and cuda-checkpoint are stand-ins."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from hibernode.artifact.manifest import CudaFacts, CudaProcessFacts, GpuFacts, manifest_bytes, parse_manifest
from hibernode.criu.runner import find_criu
from hibernode.gpu.cuda import Tool, cuda_processes, quiesce
from hibernode.settings import GpuSettings
from tests.gpu.cuda_kit import VERSION, CudaTool
from tests.gpu.fixtures import built, library
from tests.gpu.kit import GIB, Stub, uuid
from tests.real.node import HIBERNODE, Node, read_json, state_letter, until

__all__ = ["built", "library"]  # fixtures
pytestmark = [pytest.mark.criu, pytest.mark.gpu]

MODEL = "NVIDIA H100 80GB HBM3"
MOVED = ["GPU-aaaa", uuid(1)]
"""What the GPUs were called where the checkpoint was made: the second is here, the first is not."""

MAP = f"GPU-aaaa={uuid(0)},{uuid(1)}={uuid(1)}"


class Frozen:
    """A checkpoint of five CUDA processes, and what restores of it need."""

    def __init__(self, node: Node, tool: CudaTool, stub: Stub) -> None:
        self.node, self.tool, self.stub, self.id = node, tool, stub, node.new_id()
        node.config |= {"GPU_CUDA_CHECKPOINT": str(tool.path), "GPU_QUIESCE": "none"}
        with tool.tree() as root:
            found = cuda_processes(root)
            asyncio.run(quiesce(Tool(str(tool.path), VERSION), found, GpuSettings()))
            node.run("checkpoint", "--pid", root, "--id", self.id)
        self.path = node.store / self.id / "manifest.json"
        self.facts = CudaFacts(
            strategy="cuda-checkpoint",
            driver=VERSION,
            gpus=tuple(GpuFacts(uuid=name, model=MODEL, memory_bytes=80 * GIB) for name in MOVED),
            processes=tuple(CudaProcessFacts(ns_pid=each.ns_pid, comm=each.comm) for each in found),
        )
        self.write(self.facts)
        self.pids = [each.pid for each in found]

    def write(self, facts: CudaFacts) -> None:
        """Change what the manifest says of CUDA."""
        manifest = parse_manifest(self.path.read_bytes())
        self.path.write_bytes(manifest_bytes(manifest.model_copy(update={"cuda": facts})))

    def refused(self, **settings: str) -> str:
        """Restore in vain, and see that nothing of it is left; gives what was said."""
        self.node.pids_free(self.id)
        result = self.node.run("restore", self.id, check=None, **settings)
        assert result.returncode != 0
        self.node.pids_free(self.id)
        return result.stderr + result.stdout

    def restore(self) -> str:
        """Restore; gives what was said."""
        self.node.pids_free(self.id)
        return self.node.run("restore", self.id).stdout


@pytest.fixture
def frozen(node: Node, built: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> Frozen:
    """Make a checkpoint on a node with two GPUs; whatever comes of it is ended."""
    stub = Stub(node.base / "nvml.txt", 2, MODEL)
    stub.system = f"{VERSION} 13.{VERSION} 13000"
    stub.write()
    for name, value in stub.env(library).items():
        monkeypatch.setenv(name, value)
    shutil.copytree(built, node.base / "cuda")
    made = Frozen(node, CudaTool(node.base / "tool", node.base / "cuda"), stub)
    made.tool.control()
    node.pids_free(made.id)
    return made


def test_a_restored_tree_runs_on_the_gpus_that_are_here(frozen: Frozen) -> None:
    """FC-14: all five are restored with one map, then unlocked, and run; the map was shown before."""
    plan = json.loads(frozen.node.run("restore", frozen.id, "--dry-run", "-o", "json").stdout)
    rows = {row["check"]: row for row in plan["findings"]}
    assert rows["restore.gpu_map"]["found"] == MAP
    assert frozen.tool.calls() == []
    directory = frozen.restore().splitlines()[-1]
    assert json.loads((Path(directory) / "journal.json").read_text())["gpu_map"] == MAP
    assert [frozen.tool.ask(pid) for pid in frozen.pids] == ["running"] * 5
    calls = [line.split() for line in frozen.tool.calls()]
    assert {int(words[1]) for words in calls} == set(frozen.pids)
    assert {words[2] for words in calls if words[0] == "restore"} == {MAP}
    kinds = [words[0] for words in calls]
    assert kinds == ["restore"] * 5 + ["unlock"] * 5 + ["get-state"] * 5


@pytest.mark.parametrize("number", [1, 3, 5])
@pytest.mark.parametrize("call", ["restore", "unlock"])
def test_a_call_that_fails_leaves_no_tree(frozen: Frozen, call: str, number: int) -> None:
    """What the tool said is told; and the next restore of the same checkpoint succeeds."""
    frozen.tool.control(f"fail {call} {number}")
    said = frozen.refused()
    assert "not back on the GPU" in said
    assert "the restored tree was ended" in said
    assert f"{call} of pid" in said
    if number == 1:
        frozen.tool.control()
        frozen.restore()
        assert [frozen.tool.ask(pid) for pid in frozen.pids] == ["running"] * 5


def test_a_call_that_hangs_is_cut_by_the_deadline(frozen: Frozen) -> None:
    """The tree is ended with it, and so is the program that hung."""
    frozen.tool.control("hang restore 2")
    assert "the GPU state of the restored worker was not back" in frozen.refused(
        RESTORE_DEADLINE_SECONDS="4s"
    )


def test_an_agent_that_is_killed_while_it_wakes_leaves_no_tree(frozen: Frozen) -> None:
    """The shim ends what CRIU has made; the next agent takes the request up anew."""
    node = frozen.node
    agent = node.start_agent(wait=False, FAULT="kill@restore.wake-gpu")
    until("signal directory", node.signals.is_dir)
    (node.signals / f"{frozen.id}.restore").touch()
    assert agent.wait(timeout=60) == -signal.SIGKILL
    node.pids_free(frozen.id)
    node.start_agent()
    assert node.restored(frozen.id)["success"] is True, node.tail()
    assert [frozen.tool.ask(pid) for pid in frozen.pids] == ["running"] * 5


def test_a_shim_that_is_killed_while_the_tree_is_woken_leaves_no_tree(frozen: Frozen) -> None:
    """The restore fails at once, whatever the call that hangs; then it can be made again."""
    node = frozen.node
    frozen.tool.control("hang restore 2")
    command = subprocess.Popen(
        [HIBERNODE, "restore", frozen.id], env=node.env(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    until("hanging call", lambda: frozen.tool.count("restore") == 5)
    (state,) = (node.state / "restores").glob("*/state.json")
    os.kill((read_json(state) or {})["shim_pid"], signal.SIGKILL)
    said = command.communicate(timeout=60)[1].decode()
    assert command.returncode != 0
    assert "the shim ended before the GPU state" in said
    node.pids_free(frozen.id)
    frozen.tool.control()
    frozen.restore()
    assert [frozen.tool.ask(pid) for pid in frozen.pids] == ["running"] * 5


def test_a_shim_that_is_killed_when_criu_has_ended_leaves_no_tree(frozen: Frozen) -> None:
    """Nobody knew of the tree by then, and no call had been made; then it can be made again."""
    node, criu, once = frozen.node, " ".join(find_criu("").argv), frozen.node.base / "once"
    wrapper = node.base / "criu"
    wrapper.write_text(
        f'#!/bin/bash\n{criu} "$@"\ncode=$?\n'
        f'if [ "$1" = restore ] && [ ! -e {once} ]; then touch {once}; kill -9 $PPID; fi\nexit $code\n'
    )
    wrapper.chmod(0o755)
    said = frozen.refused(CRIU_BINARY=str(wrapper))
    assert "the shim ended before CRIU had ended, or before it could say so" in said
    assert once.exists()
    assert frozen.tool.calls() == []
    frozen.restore()
    assert [frozen.tool.ask(pid) for pid in frozen.pids] == ["running"] * 5


def test_gpus_that_do_not_fit_are_refused_before_anything(frozen: Frozen) -> None:
    """FC-14, FC-22: by name, with both values, and CRIU is not even started."""
    frozen.stub.add_mig(0)
    assert "in MIG mode" in frozen.refused()
    frozen.write(frozen.facts.model_copy(update={"driver": "570.86.10"}))
    assert "570.86.10" in frozen.refused()
    processes = (*frozen.facts.processes[:4], CudaProcessFacts(ns_pid=1))
    frozen.write(frozen.facts.model_copy(update={"processes": processes}))
    assert "pid 1 is not in the tree" in frozen.refused()
    assert frozen.tool.calls() == []


def test_a_process_that_has_another_name_is_not_touched(frozen: Frozen) -> None:
    """A manifest that names a process of the tree that is another one ends in a refusal, and in no tree."""
    wrong = CudaProcessFacts(ns_pid=frozen.pids[0], comm="other")
    frozen.write(frozen.facts.model_copy(update={"processes": (wrong,)}))
    said = frozen.refused()
    assert "was other and is worker" in said
    assert frozen.tool.calls() == []
    assert not any(state_letter(pid) for pid in frozen.pids)
