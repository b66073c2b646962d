"""The library that stands in for the driver's, and the file that tells it what to answer."""

from __future__ import annotations

import ctypes
import itertools
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SONAME = "libnvidia-ml.so.1"
SOURCE = Path(__file__).with_name("nvml_stub.c")
NONE = 0xFFFFFFFF
UNKNOWN_MEMORY = (1 << 64) - 1
GIB = 1 << 30
XID, DOUBLE_BIT, CLOCK, POWER = 0x8, 0x2, 0x10, 0x80
_event_numbers = itertools.count(1)
"""Of one process: the library takes each number once."""


def build(directory: Path) -> Path:
    """Build the library; returns its path."""
    directory.mkdir(parents=True, exist_ok=True)
    library = directory / SONAME
    command: list[str | Path] = [
        "gcc",
        "-O1",
        "-shared",
        "-fPIC",
        f"-Wl,-soname,{SONAME}",
        "-o",
        library,
        SOURCE,
        "-lpthread",
    ]
    subprocess.run(command, check=True, capture_output=True)
    return library


def load(library: Path) -> None:
    """Load the library into this process, where nvidia-ml-py then finds it by its soname."""
    ctypes.CDLL(str(library))


def uuid(index: int) -> str:
    """Name a GPU."""
    return f"GPU-{index:08x}-0000-0000-0000-000000000000"


def mig_uuid(index: int, slot: int) -> str:
    """Name a MIG device."""
    return f"MIG-{index:08x}-{slot:04x}-0000-0000-000000000000"


class Stub:
    """What the library answers. Every change is whole: the file is replaced."""

    def __init__(self, path: Path, gpus: int = 0, name: str = "NVIDIA H100 80GB HBM3") -> None:
        self.path = path
        self.system = "570.86.10 13.570.86 13000"
        self.gpus: dict[int, str] = {}
        self.lines: list[str] = []
        self.events: list[str] = []
        for index in range(gpus):
            self.add_gpu(index, name)
        self.write()

    def add_gpu(self, index: int, name: str = "NVIDIA H100 80GB HBM3", uuid_: str = "") -> None:
        """Put a GPU in."""
        pci = f"00000000:{index + 0x18:02X}:00.0"
        self.gpus[index] = f"gpu {index} {uuid_ or uuid(index)} {pci} {80 * GIB} {GIB} {name}"
        self.write()

    def set(self, index: int, **numbers: int) -> None:
        """Set numbers of a GPU."""
        self.say(*(f"set {index} {key} {value}" for key, value in numbers.items()))

    def add_mig(self, index: int, count: int = 7) -> None:
        """Turn MIG on and make instances."""
        self.set(index, mig=1, mig_pending=1)
        self.say(
            *(
                f"mig {index} {slot} {mig_uuid(index, slot)} {slot + 7} 0 {10 * GIB} {slot << 20} 1g.10gb"
                for slot in range(count)
            )
        )

    def add_process(
        self,
        index: int,
        pid: int,
        memory: int = GIB,
        kind: str = "compute",
        *,
        gi: int = NONE,
        ci: int = NONE,
    ) -> None:
        """Have a process on a GPU."""
        self.say(f"proc {index} {kind} {pid} {memory} {gi} {ci}")

    def happen(self, index: int, type_: int = XID, data: int = 0, count: int = 1) -> None:
        """Let the driver report something."""
        self.events.append(f"event {next(_event_numbers)} {index} {type_} {data} {count}")
        self.write()

    def say(self, *lines: str) -> None:
        """Add lines, see nvml_stub.c."""
        self.lines += lines
        self.write()

    def unsay(self, *lines: str) -> None:
        """Take lines out again."""
        self.lines = [line for line in self.lines if line not in lines]
        self.write()

    @contextmanager
    def saying(self, *lines: str) -> Iterator[None]:
        """Have lines while the block runs."""
        self.say(*lines)
        try:
            yield
        finally:
            self.unsay(*lines)

    def write(self) -> None:
        """Replace the file."""
        new = self.path.with_suffix(".new")
        lines = [f"system {self.system}", *self.gpus.values(), *self.lines, *self.events]
        new.write_text("\n".join(lines) + "\n")
        new.rename(self.path)

    def env(self, library: Path) -> dict[str, str]:
        """Build what a child process needs to find the library and this file."""
        return {"LD_LIBRARY_PATH": str(library.parent), "NVML_STUB": str(self.path)}
