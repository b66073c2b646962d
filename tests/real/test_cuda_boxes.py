"""CUDA workers in real containers: dumped from one and restored into another, with stand-ins for CUDA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.gpu import cuda_kit
from tests.gpu.cuda_kit import CudaTool
from tests.real.boxes import Kit
from tests.real.node import Node, read_json, until
from tests.real.places import descendants, inner_pid, placed

pytestmark = [pytest.mark.gpu, pytest.mark.criu, pytest.mark.containers]

PROCESSES = 3
RUNNING = ["running"] * PROCESSES


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the stand-ins."""
    return cuda_kit.build(tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def tool(node: Node, built: Path) -> CudaTool:
    """Give this test's own tool, and settings that use it."""
    made = CudaTool(node.base / "cuda", built)
    node.config["GPU_CUDA_CHECKPOINT"] = str(made.path)
    return made


def inner(pids: list[int]) -> dict[int, int]:
    """Give each process's pid as itself sees it, and as the node does."""
    return {inner_pid(pid): pid for pid in pids}


def test_a_worker_is_taken_off_the_gpu_in_one_container_and_woken_in_another(
    node: Node, kit: Kit, tool: CudaTool
) -> None:
    """All are woken in the old one and, by the pids that they have inside, in the new one too."""
    with placed(node, kit, "runc") as place:
        more: dict[str, Any] = {"more_binds": [(tool.built, cuda_kit.IN_BOX, "ro")]}
        id_ = node.new_id()
        box = place.start(id_, argv=(f"{cuda_kit.IN_BOX}/worker", str(PROCESSES)), **more)
        until("CUDA in all processes", lambda: tool.states(box.pid) == RUNNING)
        tool.control()
        node.run("checkpoint", "--container", box.id)
        assert tool.states(box.pid) == RUNNING
        assert tool.count("checkpoint") == PROCESSES
        before = inner([box.pid, *descendants(box.pid)])
        manifest = read_json(node.store / id_ / "manifest.json") or {}
        assert [each["ns_pid"] for each in manifest["cuda"]["processes"]] == sorted(before)

        tool.control()
        waiting = place.placeholder(id_, **more)
        root = place.thaw(id_, waiting)
        after = inner([root, *descendants(root)])
        assert sorted(after) == sorted(before)
        assert tool.states(root) == RUNNING
        assert sorted(line.split()[1] for line in tool.calls() if line.startswith("restore")) == sorted(
            map(str, after.values())
        )
        assert waiting.alive()
        assert tool.states(box.pid) == RUNNING
