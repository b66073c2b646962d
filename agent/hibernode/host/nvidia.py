"""By what /proc shows that a process has to do with a GPU of NVIDIA's."""

from __future__ import annotations

from typing import Final

DEVICES: Final = "/dev/nvidia"
"""How the driver's device nodes begin, as everybody names them."""

LIBCUDA: Final = "libcuda.so"


def is_libcuda(path: str) -> bool:
    """Whether what is mapped from ``path`` is the driver's CUDA library, of whichever version."""
    return path.rpartition("/")[2].startswith(LIBCUDA)
