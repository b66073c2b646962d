"""The agent as a process and its GPUs: without a driver, with one that comes later, hangs or breaks."""

from __future__ import annotations

import json
import shutil
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.fixtures import library
from tests.gpu.kit import XID, Stub, uuid
from tests.real.node import Node, until

__all__ = ["library"]  # a fixture
pytestmark = pytest.mark.gpu

ANSWER_SECONDS = 1.0
"""What a scrape or a probe may take, whatever the driver does."""


class GpuNode:
    """A node whose agent looks for the library in a directory that is empty at first."""

    def __init__(self, node: Node, library: Path) -> None:
        self.node, self._library = node, library
        self.here = node.base / "lib"
        self.here.mkdir()
        self.stub = Stub(node.base / "nvml.txt", 2)
        node.config |= {"GPU_POLL_SECONDS": "0.1", "GPU_DEADLINE_SECONDS": "2s"}

    def start(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Start the agent."""
        for name, value in self.stub.env(self.here / "any").items():
            monkeypatch.setenv(name, value)
        self.node.start_agent()

    def install(self) -> None:
        """Put the library there, whole."""
        new = self.here / "new"
        shutil.copy2(self._library, new)
        new.rename(self.here / self._library.name)

    def get(self, path: str) -> tuple[str, float]:
        """Ask the agent over TCP; also give the seconds that it took."""
        began = time.monotonic()
        with urllib.request.urlopen(f"http://127.0.0.1:{self.node.port}{path}", timeout=30) as answer:
            return answer.read().decode(), time.monotonic() - began

    def gpus(self) -> dict[str, Any]:
        """Ask the command, which asks the agent."""
        found: dict[str, Any] = json.loads(self.node.run("gpu", "-o", "json").stdout)
        return found


@pytest.fixture
def gpu_node(node: Node, library: Path) -> Iterator[GpuNode]:
    """Give a node; its driver stops hanging at the end."""
    made = GpuNode(node, library)
    yield made
    made.stub.lines.clear()
    made.stub.write()


def test_an_agent_without_a_driver_is_quiet_and_finds_one_that_comes(
    gpu_node: GpuNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line in the log and no warning; after the install the GPUs are there, with no restart."""
    gpu_node.start(monkeypatch)
    until("no NVML", lambda: "no NVML on this node" in gpu_node.node.log.read_text())
    text, _ = gpu_node.get("/healthz?verbose")
    assert text.startswith("ok\n")
    assert "nvml: libnvidia-ml.so.1: cannot open shared object file: No such file" in text
    log = gpu_node.node.log.read_text()
    assert [line.partition("NVML")[1] for line in log.splitlines() if "nv" in line.lower()] == ["NVML"]
    assert "warning" not in log.lower()
    assert gpu_node.node.run("gpu").stdout.startswith("no NVML: ")
    assert "hibernode_nvml_up 0.0" in gpu_node.get("/metrics")[0]
    gpu_node.install()
    until("GPUs", lambda: len(gpu_node.gpus()["gpus"]) == 2)
    assert "hibernode_nvml_up 1.0" in gpu_node.get("/metrics")[0]
    assert "gpu        driver 570.86.10, 2 GPUs" in gpu_node.node.run("status").stdout


def test_an_agent_whose_driver_hangs_answers_and_stops(
    gpu_node: GpuNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Metrics and health come within a second with the age, the agent is degraded, and SIGTERM ends it."""
    gpu_node.install()
    gpu_node.start(monkeypatch)
    until("GPUs", lambda: len(gpu_node.gpus()["gpus"]) == 2)
    gpu_node.stub.say("hang * -1", "hang * -2")
    until("stuck", lambda: gpu_node.gpus()["state"] == "stuck")
    for path in ("/metrics", "/healthz", "/readyz"):
        answers = [gpu_node.get(path) for _ in range(5)]
        assert (
            min(seconds for _, seconds in answers) < ANSWER_SECONDS
        )  # the others may have met a busy machine
        assert all(("hibernode_nvml_up 0.0" in text) == (path == "/metrics") for text, _ in answers)
    text = gpu_node.get("/healthz")[0]
    assert text.startswith("degraded\n")
    assert "NVML is stuck" in text
    found = gpu_node.gpus()
    assert found["staleSince"] == found["takenAt"]
    assert [gpu["uuid"] for gpu in found["gpus"]] == [uuid(0), uuid(1)]
    (agent,) = gpu_node.node.agents
    agent.terminate()
    assert agent.wait(30) == 0


def test_a_fatal_xid_is_an_event(gpu_node: GpuNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is among the agent's events, in the table with its age, in the metrics, and in health."""
    gpu_node.install()
    gpu_node.start(monkeypatch)
    until("GPUs", lambda: len(gpu_node.gpus()["gpus"]) == 2)
    gpu_node.stub.happen(1, XID, 79, 3)
    until("XIDs", lambda: sum(each["count"] for each in gpu_node.gpus()["happened"]) == 3)
    events = json.loads(gpu_node.node.run("events", "-o", "json").stdout)["items"]
    (event,) = (event for event in events if event["reason"] == "GpuXidFatal")
    assert (event["type"], uuid(1) in event["message"]) == ("Warning", True)
    assert f'hibernode_gpu_xid_total{{UUID="{uuid(1)}",xid="79"}} 3.0' in gpu_node.get("/metrics")[0]
    assert f"{uuid(1)}: XID 79" in gpu_node.get("/healthz")[0]
    assert "fatal" in gpu_node.node.run("gpu").stdout
