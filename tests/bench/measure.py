"""Figures as medians with their spread, and the small tools that the benchmarks share."""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

VICTIM = Path(__file__).with_name("victim.py")


@dataclass(frozen=True)
class Figure:
    """One figure: its unit, its runs, their median and extremes, and the aim if there is one."""

    name: str
    unit: str
    runs: tuple[float, ...]
    aim: str = ""

    @property
    def median(self) -> float:
        """The figure to quote."""
        return statistics.median(self.runs)

    def line(self) -> str:
        """Lay the figure out as a row."""
        spread = f"{min(self.runs):.4g} .. {max(self.runs):.4g}"
        return f"{self.name:<52} {self.median:>10.4g} {self.unit:<6} {spread:>22}  n={len(self.runs):<3} {self.aim}"

    def data(self) -> dict[str, Any]:
        """Lay the figure out as JSON."""
        return {**asdict(self), "median": self.median}


class Report:
    """Collects figures and prints each as it comes."""

    def __init__(self) -> None:
        self.figures: list[Figure] = []

    def add(self, name: str, unit: str, runs: Sequence[float], aim: str = "") -> Figure:
        """Add one figure."""
        figure = Figure(name, unit, tuple(runs), aim)
        self.figures.append(figure)
        print(figure.line(), flush=True)
        return figure


def percentile(values: Sequence[float], share: float) -> float:
    """Tell the value that ``share`` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@contextlib.contextmanager
def victim(mib: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run a victim of ``mib`` MiB; it is ended if it still runs."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", VICTIM, str(mib)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd="/",
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def end(pid: int) -> None:
    """Kill a restored process and wait until its pid is free."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 9)
    while Path(f"/proc/{pid}").exists():
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
        time.sleep(0.001)


def drop_cache(directory: Path) -> None:
    """Put the files of a directory out of the page cache; nothing else on the machine is touched."""
    for path in directory.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def cached_share(path: Path) -> float:
    """Tell which share of a file is in the page cache, by mincore, so that "cold" is known to be cold."""
    import ctypes
    import mmap

    size = path.stat().st_size
    if not size:
        return 0.0
    with path.open("rb") as file:
        area = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ | mmap.PROT_WRITE, flags=mmap.MAP_PRIVATE)
    pages = (size + 4095) // 4096
    vector = (ctypes.c_ubyte * pages)()
    start = ctypes.addressof(ctypes.c_char.from_buffer(area))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(size), vector) != 0:
        raise OSError(ctypes.get_errno(), "mincore")
    return sum(byte & 1 for byte in vector) / pages
