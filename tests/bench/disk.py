"""The floor: what the disk gives to ``dd``."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests.bench.measure import Report, drop_cache, settle


def floor(report: Report, base: Path, mib: int, rounds: int) -> None:
    """Measure writing with fdatasync and reading what is not in memory."""
    report.section(f"disk by dd, {mib} MiB")
    directory = base / "dd"
    directory.mkdir()
    path = directory / "zeros"
    written, read = [], []
    for _ in range(rounds):
        path.unlink(missing_ok=True)
        settle()
        written.append(_dd(mib, "if=/dev/zero", f"of={path}", f"count={mib}", "conv=fdatasync"))
        settle()
        drop_cache(directory)
        read.append(_dd(mib, f"if={path}", "of=/dev/null"))
    path.unlink()
    report.add("dd: write, with fdatasync", "MB/s", written)
    report.add("dd: read, cold", "MB/s", read)


def _dd(mib: int, *words: str) -> float:
    """Run dd; MB/s by its own clock."""
    result = subprocess.run(
        ["dd", "bs=1M", *words],
        capture_output=True,
        text=True,
        check=True,
        env={"LC_ALL": "C", "PATH": "/usr/bin:/bin"},
    )
    match = re.search(r"copied, ([0-9.e+-]+) s", result.stderr)
    assert match is not None, result.stderr
    return (mib << 20) / float(match[1]) / 1e6
