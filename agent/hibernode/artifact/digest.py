"""Digests of an artifact's files, about as fast as memory delivers them.

BLAKE3 was chosen by measurement (docs/benchmarks.md has the machine; one thread, bytes in memory): blake3
4.9 GB/s, sha256 1.8, blake2b 0.9. The package releases the GIL, and one file can use several threads.

A file is read piece by piece with read(2), the next piece while this one is hashed. It is not mapped:
touching a map of a file that somebody truncates is a SIGBUS, which would end the agent.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import closing, suppress
from typing import Final

from blake3 import blake3

from hibernode.errors import IntegrityError
from hibernode.host.safefs import Dir

DIGEST: Final = "blake3"
MAX_WORKERS: Final = 8
"""More threads than this wait for memory, and the node has other work."""

PIECE_BYTES: Final = 2 << 20
"""Measured: 1 to 4 MiB are alike; 16 MiB is slower, for it leaves the cache between reading and hashing."""


class Digests(dict[str, tuple[int, str]]):
    """(Size in bytes, hexadecimal digest) by name, and how long it took."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    @property
    def total_bytes(self) -> int:
        """What was hashed, in bytes."""
        return sum(size for size, _ in self.values())

    @property
    def bytes_per_second(self) -> float:
        """The rate; divide by 1e9 for GB/s."""
        return self.total_bytes / self.seconds if self.seconds else 0.0


def default_workers() -> int:
    """One thread a core that this process may use, at most MAX_WORKERS."""
    return min(MAX_WORKERS, len(os.sched_getaffinity(0)))


async def digest_files(directory: Dir, names: Iterable[str], workers: int = 0) -> Digests:
    """Hash the files ``names`` (paths below ``directory``) in threads; see :func:`digest_all`.

    When it is cancelled it returns only after its threads have ended, for they use ``directory``.
    """
    stop = threading.Event()
    work = asyncio.ensure_future(asyncio.to_thread(digest_all, directory, names, workers, stop=stop))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        stop.set()
        await asyncio.wait([work])
        if not work.cancelled():
            work.exception()  # looked at, else asyncio complains
        raise


def digest_all(
    directory: Dir, names: Iterable[str], workers: int = 0, *, stop: threading.Event | None = None
) -> Digests:
    """Hash files with about ``workers`` threads (0: :func:`default_workers`), until ``stop`` is set.

    Half the threads read and half hash; a file of more than one piece is itself hashed by several when
    there are fewer such files than threads.

    :raises IntegrityError: a file changed while it was read.
    :raises RefusedError: a file is no regular file with one name.
    :raises InterruptedError: ``stop`` was set.
    """
    stop = stop or threading.Event()
    workers = workers or default_workers()
    start = time.perf_counter()
    # The largest first: begun last it would keep one thread busy while the others have nothing left.
    sizes = sorted(((directory.stat(name).st_size, name) for name in set(names)), reverse=True)
    result = Digests()
    if not sizes:
        return result
    lanes = min(len(sizes), max(1, workers // 2))
    large = sum(size > PIECE_BYTES for size, _ in sizes)
    threads = max(1, workers // min(lanes, large)) if large else 1
    with ThreadPoolExecutor(lanes, "hash") as hashers, ThreadPoolExecutor(lanes, "read") as readers:
        jobs = {
            hashers.submit(_digest_file, directory, name, readers, threads, stop): name for _, name in sizes
        }
        try:
            for job in as_completed(jobs):
                result[jobs[job]] = job.result()
        finally:
            stop.set()  # after a failure the others need not go on
    result.seconds = time.perf_counter() - start
    return result


def _digest_file(
    directory: Dir, name: str, readers: ThreadPoolExecutor, threads: int, stop: threading.Event
) -> tuple[int, str]:
    if stop.is_set():
        raise InterruptedError("hashing was stopped")
    fd = directory.open_file(name)
    try:
        size = os.fstat(fd).st_size
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)  # twice the kernel's read-ahead
        hasher = blake3(max_threads=threads if size > PIECE_BYTES else 1)
        seen = 0
        with closing(_pieces(fd, size, readers)) as pieces:
            for piece in pieces:
                if stop.is_set():
                    raise InterruptedError("hashing was stopped")
                hasher.update(piece)
                seen += len(piece)
                if seen > size:
                    break  # it grows; it may do so for ever
        if seen != size or os.fstat(fd).st_size != size:
            raise IntegrityError(
                f"{directory.path / name}: changed while it was read",
                remedy="find out what writes to it; nothing may",
                path=str(directory.path / name),
            )
    finally:
        os.close(fd)
    return size, hasher.hexdigest()


def _pieces(fd: int, size: int, readers: ThreadPoolExecutor) -> Generator[memoryview]:
    """Yield the file piece by piece; a piece is valid until the next one is asked for."""
    if size <= PIECE_BYTES:
        small = memoryview(bytearray(size + 1))
        while count := os.readv(fd, [small]):
            yield small[:count]
        return
    filling, spare = (memoryview(bytearray(PIECE_BYTES)) for _ in range(2))
    pending: Future[int] = readers.submit(os.readv, fd, [filling])
    try:
        while count := pending.result():
            full, filling, spare = filling, spare, filling
            pending = readers.submit(os.readv, fd, [filling])
            yield full[:count]
    finally:
        with suppress(OSError):
            pending.result()  # the caller closes the descriptor next
