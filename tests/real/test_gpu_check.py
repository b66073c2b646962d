"""The script for a machine with a GPU, where all that it wants is a stand-in: whether it sees what fails."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from tests.gpu.cuda_kit import CudaTool
from tests.gpu.fixtures import built, library
from tests.gpu.kit import Stub
from tests.real.node import HIBERNODE, until

__all__ = ["built", "library"]  # fixtures
pytestmark = [pytest.mark.gpu, pytest.mark.criu]

CHECK = Path(__file__).parents[1] / "gpu" / "check.sh"
DRIVER = "570.86.10"
SECONDS = 120.0


class Machine:
    """What the script looks for; ``below`` is where it makes its directory."""

    def __init__(self, path: Path, built: Path, library: Path) -> None:
        self.below, self.root = path / "below", path / "root"
        self.below.mkdir()
        for name, text in (
            ("proc/driver/nvidia/version", "NVRM version: a stand-in"),
            ("proc/driver/nvidia/gpus/0000:18:00.0/information", "Model: \t\t NVIDIA H100 80GB HBM3\n"),
            ("sys/module/nvidia/version", DRIVER),
            ("dev/nvidia0", ""),
        ):
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            (self.root / name).write_text(text)
        self.stub = Stub(path / "nvml.txt", 1)
        self.tool = CudaTool(path / "tool", built)
        self.env = {
            **self.stub.env(library),
            "LD_LIBRARY_PATH": f"{library.parent}:{built}",
            "PATH": f"{self.tool.directory}:{os.environ['PATH']}",
            "HOME": str(path),
            "TMPDIR": str(self.below),
            "HIBERNODE_CHECK_ROOT": str(self.root),
            "HIBERNODE_GPU_QUIESCE": "none",  # a setting of the node's, which counts for nothing
        }

    def start(self) -> subprocess.Popen[str]:
        """Start it; when its program says that it has begun, NVML lists it."""
        process = subprocess.Popen(
            [CHECK, HIBERNODE], env=self.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        threading.Thread(target=self._list, args=(process,), daemon=True).start()
        return process

    def _list(self, process: subprocess.Popen[str]) -> None:
        while process.poll() is None:
            for log in self.below.glob("*/worker.log"):
                if log.read_text().startswith("ready "):
                    self.stub.add_process(0, int(log.read_text().split()[1]))
                    return

    def left(self) -> list[str]:
        """List what is left of it: files, and processes that name them."""
        found = [str(path) for path in self.below.iterdir()]
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                text = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if str(self.below) in text:
                found.append(text)
        return found


@pytest.fixture
def machine(tmp_path: Path, built: Path, library: Path) -> Machine:
    """Give such a machine."""
    return Machine(tmp_path, built, library)


def rows(text: str) -> dict[str, str]:
    """Read the report: the outcome of each step by its name."""
    lines = text.partition("=== report\n")[2].splitlines()
    return {line[:46].strip(): line[46:].split(maxsplit=1)[0] for line in lines if line[46:].strip()}


def test_all_is_seen_where_all_works(machine: Machine) -> None:
    """The report names the driver, says that it is none, and what was never tried; nothing is left."""
    process = machine.start()
    text = process.communicate(timeout=SECONDS)[0]
    assert process.returncode == 0, text
    assert text.endswith("all of it was seen\n"), text[-600:]
    assert {rows(text)[name] for name in steps()} == {"ok"}
    assert f"driver {DRIVER}, 1 x NVIDIA H100 80GB HBM3" in text
    assert "NOT A REAL DRIVER" in text
    assert "never tried by this: several processes (NCCL)" in text
    assert machine.left() == []


def steps() -> list[str]:
    """List the steps that the script says it has."""
    return re.findall(r"'([^']*)'", CHECK.read_text().partition("STEPS=(")[2].partition("\n)")[0])


def test_what_fails_and_what_was_not_tried_is_said(machine: Machine) -> None:
    """A driver without GPUs, a tool that hangs, and somebody who ends it then: nothing is left of it."""
    machine.tool.control("hang lock 1")
    machine.env["NVML_STUB"] = str(machine.root / "none.txt")
    (machine.root / "none.txt").write_text("")
    process = machine.start()
    until("hanging call", lambda: machine.tool.count("lock") == 1, SECONDS)
    process.send_signal(signal.SIGTERM)
    text = process.communicate(timeout=SECONDS)[0]
    assert process.returncode == 1, text
    found = rows(text)
    assert found["NVML: the GPUs and the driver"] == "FAILED"
    assert found["its GPU memory is readable"] == "ok"
    assert found["NVML: its process is listed"] == "FAILED"
    assert {found[name] for name in steps()[steps().index("its GPU memory is the same") :]} == {"not"}
    assert "FAILED: not all was seen, and it was cut" in text
    assert machine.left() == []
