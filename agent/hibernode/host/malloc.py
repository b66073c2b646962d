"""What glibc is told about the memory that it keeps."""

from __future__ import annotations

import ctypes
from typing import Final

# malloc.h of glibc
M_TRIM_THRESHOLD: Final = -1
M_MMAP_THRESHOLD: Final = -3
M_ARENA_MAX: Final = -8

LARGE_BYTES: Final = 128 << 10
"""glibc's own start value of both thresholds; it raises them by itself until they are set."""


def limit_malloc() -> None:
    """Keep glibc from holding what was used once; nothing happens with another libc.

    One arena, for our threads wait for disks and subprocesses and do not compete for malloc. Fixed
    thresholds, for a large buffer that is freed once otherwise makes the next ones come from the heap, which
    then stays as large as it ever was.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_ARENA_MAX, 1)
        mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)
        mallopt(M_TRIM_THRESHOLD, LARGE_BYTES)
