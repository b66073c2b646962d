"""Figures as medians with their spread, and the small tools that the benchmarks share."""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

VICTIM = Path(__file__).with_name("victim.py")
SETTLED_KIB = 4096
"""Dirty and writeback pages that a machine at rest may have."""

COLD_SHARE = 0.001
"""At most this share of an image may be in memory for a round to be called cold."""


@dataclass(frozen=True)
class Figure:
    """One figure: its unit, its runs, their median and extremes, and the aim if there is one.

    ``limit`` is the aim as a number in the figure's unit: the median must not be above it.
    """

    name: str
    unit: str
    runs: tuple[float, ...]
    aim: str = ""
    limit: float | None = None

    @property
    def median(self) -> float:
        """The figure to quote."""
        return statistics.median(self.runs)

    @property
    def met(self) -> bool | None:
        """Whether the aim is met; None without one."""
        return None if self.limit is None else self.median <= self.limit

    def line(self) -> str:
        """Lay the figure out as a row."""
        verdict = {None: self.aim, True: f"aim {self.aim}: met", False: f"aim {self.aim}: MISSED"}[self.met]
        spread = f"{min(self.runs):.4g} .. {max(self.runs):.4g}"
        value = f"{self.median:>9.4g} {self.unit:<5} {spread:>20}"
        return f"{self.name:<50} {value}  n={len(self.runs):<5} {verdict}".rstrip()

    def data(self) -> dict[str, Any]:
        """Lay the figure out as JSON."""
        return {
            **asdict(self),
            "median": self.median,
            "min": min(self.runs),
            "max": max(self.runs),
            "n": len(self.runs),
            "met": self.met,
        }


class Report:
    """Collects figures and prints each as it comes."""

    def __init__(self, machine: Mapping[str, str], json_path: Path) -> None:
        self.machine = machine
        self.figures: list[Figure] = []
        self._json_path = json_path
        for name, value in machine.items():
            print(f"{name:<10} {value}")

    def section(self, title: str) -> None:
        """Begin a group of rows."""
        print(f"\n{title}", flush=True)

    def add(
        self, name: str, unit: str, runs: Sequence[float], aim: str = "", limit: float | None = None
    ) -> Figure:
        """Add one figure; what there is so far is on disk after each."""
        figure = Figure(name, unit, tuple(runs), aim, limit)
        self.figures.append(figure)
        print(figure.line(), flush=True)
        self._save()
        return figure

    def ratio(
        self, name: str, ours: Sequence[float], bare: Sequence[float], aim: str, limit: float
    ) -> Figure:
        """Add the ratio of runs that were made in pairs."""
        return self.add(name, "x", [a / b for a, b in zip(ours, bare, strict=True)], aim, limit)

    def _save(self) -> None:
        self._json_path.parent.mkdir(parents=True, exist_ok=True)
        content = {"machine": self.machine, "figures": [figure.data() for figure in self.figures]}
        self._json_path.write_text(json.dumps(content, indent=2) + "\n")


def machine_facts(directory: Path, criu: str) -> dict[str, str]:
    """Say what was measured on."""
    cpu = next(
        (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        os.uname().machine,
    )
    memory = int(_meminfo()["MemTotal"]) / (1 << 20)
    found = subprocess.run(
        ["findmnt", "-no", "SOURCE,FSTYPE", "-T", directory], capture_output=True, text=True, check=True
    ).stdout.split()
    device = os.stat(directory).st_dev
    queue = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/queue/read_ahead_kb")
    ahead = queue.read_text().strip() if queue.exists() else "?"
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": f"{cpu}, {os.cpu_count()} cores",
        "memory": f"{memory:.0f} GiB",
        "kernel": os.uname().release,
        "disk": f"{directory}: {found[1]} on {found[0]}, read_ahead_kb {ahead}",
        "criu": criu,
        "python": sys.version.split()[0],
        "load": f"{os.getloadavg()[0]:.2f} at the start",
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


def _meminfo() -> dict[str, int]:
    return {line.partition(":")[0]: int(line.split()[1]) for line in _lines("/proc/meminfo")}


def percentile(values: Sequence[float], share: float) -> float:
    """Tell the value that ``share`` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def settle() -> None:
    """Wait until the disk has taken in what was written, so that nobody pays for what ran before."""
    os.sync()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        facts = _meminfo()
        if facts["Dirty"] + facts["Writeback"] < SETTLED_KIB:
            break
        time.sleep(0.05)
    time.sleep(0.2)


@contextlib.contextmanager
def victim(mib: int, env: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """Run a victim of ``mib`` MiB; it is ended if it still runs."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", VICTIM, str(mib)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd="/",
        env={"PATH": os.environ["PATH"], **(env or {})},
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
    for path in directory.rglob("pages-*.img"):
        share = cached_share(path)
        if share > COLD_SHARE:
            raise SystemExit(f"{path}: {share:.1%} of it is still in the page cache, so this is no cold run")


def cached_share(path: Path) -> float:
    """Tell which share of a file is in the page cache, by mincore, so that "cold" is known to be cold."""
    size = path.stat().st_size
    if not size:
        return 0.0
    with path.open("rb") as file:
        area = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ | mmap.PROT_WRITE, flags=mmap.MAP_PRIVATE)
    pages = (size + mmap.PAGESIZE - 1) // mmap.PAGESIZE
    vector = (ctypes.c_ubyte * pages)()
    start = ctypes.addressof(ctypes.c_char.from_buffer(area))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(size), vector) != 0:
        raise OSError(ctypes.get_errno(), "mincore")
    return sum(byte & 1 for byte in bytes(vector)) / pages
