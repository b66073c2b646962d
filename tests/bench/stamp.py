"""A CRIU that notes when it was started: the end of "own work before CRIU"."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

from hibernode.criu.find import find_criu

SOURCE = Path(__file__).with_name("stamp.c")


@dataclass(frozen=True)
class StampedCriu:
    """The program to run in the place of CRIU, and the file of its times."""

    path: Path
    stamps: Path

    def last(self, operation: str) -> float:
        """Tell when it last began to ``dump`` or ``restore``, by ``time.monotonic()``."""
        words = [line.split() for line in self.stamps.read_text().splitlines()]
        return [float(time) for what, time in words if what == operation][-1]


def build(directory: Path) -> StampedCriu:
    """Compile it around the CRIU that the agent would take by itself."""
    path, stamps = directory / "stamped-criu", directory / "stamps"
    # A JSON string of plain path letters is a C string too.
    words = ", ".join(json.dumps(word) for word in find_criu().argv)
    defines = [f"-DSTAMPS={json.dumps(str(stamps))}", f"-DARGV={words}"]
    subprocess.run(["gcc", "-O2", "-static", "-o", path, *defines, SOURCE], check=True)
    path.chmod(0o755)
    return StampedCriu(path, stamps)
