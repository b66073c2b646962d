"""The programs that stand in for CUDA: NVIDIA's tool, the library, and a tree of processes that use it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hibernode.host import procfs

SONAME = "libcuda.so.1"
IN_BOX = "/opt/cuda"
"""Where a container has what was built."""

HERE = Path(__file__).parent
VERSION = "580.65.06"


def build(directory: Path) -> Path:
    """Build all of it in a directory; returns that."""
    directory.mkdir(parents=True, exist_ok=True)
    library, source = directory / SONAME, HERE / "cuda_library.c"
    gcc: list[str | Path] = ["gcc", "-O1", "-Wall"]
    for command in (
        [*gcc, "-shared", "-fPIC", f"-Wl,-soname,{SONAME}", "-o", library, source],
        [*gcc, "-DWORKER", f"-Wl,-rpath,{directory}:{IN_BOX}", "-o", directory / "worker", source, library],
        [*gcc, "-o", directory / "cuda-checkpoint", HERE / "cuda_tool.c"],
    ):
        subprocess.run(command, check=True)
    return directory


@dataclass
class CudaTool:
    """A stand-in of one test's own, with its control and its calls; ``built``: from :func:`build`."""

    directory: Path
    built: Path

    def __post_init__(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        shutil.copy(self.built / "cuda-checkpoint", self.path)

    @property
    def path(self) -> Path:
        """Where the program is."""
        return self.directory / "cuda-checkpoint"

    def control(self, *lines: str) -> None:
        """Say what calls do from now on, see cuda_tool.c; the counts begin anew."""
        (self.directory / "calls").unlink(missing_ok=True)
        (self.directory / "control").write_text("".join(f"{line}\n" for line in lines))

    def calls(self) -> list[str]:
        """List the calls, each ``CALL PID``."""
        try:
            return (self.directory / "calls").read_text().splitlines()
        except FileNotFoundError:
            return []

    def count(self, call: str) -> int:
        """Count the calls of one kind."""
        return sum(line.split()[0] == call for line in self.calls())

    def states(self, root: int) -> list[str]:
        """Tell the states of a tree's processes, in order of pids; a process without CUDA has an error."""
        return [self.ask(stat.pid) for stat in procfs.tree(root)]

    def ask(self, pid: int) -> str:
        """Tell the state of one process. It is asked by another copy, so that it is no call of the test's."""
        command = [str(self.built / "cuda-checkpoint"), "--get-state", "--pid", str(pid)]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    @contextmanager
    def tree(self, with_cuda: int = 5, without: int = 0) -> Iterator[int]:
        """Run a tree of processes, of which so many use CUDA and so many have only its library; its root."""
        log = (self.directory / "worker.log").open("ab")
        worker = subprocess.Popen(
            [self.built / "worker", str(with_cuda), str(without)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        log.close()
        try:
            wanted = (with_cuda + without, with_cuda)
            while (len(procfs.tree(worker.pid)), self.states(worker.pid).count("running")) != wanted:
                assert worker.poll() is None
            yield worker.pid
        finally:
            worker.kill()
            worker.wait()
