"""Whether NIXL itself takes a blob, found out in a process that may die of it.

One changed byte makes UCX abort the process that loads a blob, and loading opens connections to whatever
addresses are in it. So a child does it, without network, files, other processes or root
(:mod:`hibernode.metadata.nixl_child`), within limits and a deadline.
"""

from __future__ import annotations

import asyncio
import enum
import json
import math
import os
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from hibernode.errors import HibernodeError
from hibernode.metadata.nixl_blob import MAX_BLOB_BYTES, too_large
from hibernode.text import printable

if TYPE_CHECKING:
    from asyncio.subprocess import Process

DEADLINE: Final = 60.0
"""Seconds; import and start take one, on a loaded machine ten."""

_MAX_ANSWER: Final = 64 << 10
_MAX_LOG: Final = 4 << 10
_CHUNK: Final = 64 << 10


class Verdict(enum.Enum):
    """What came of loading a blob."""

    LOADED = "loaded"
    REFUSED = "refused"
    CRASHED = "crashed"
    TIMED_OUT = "timed out"
    NOT_INSTALLED = "nixl not installed"


@dataclass(frozen=True, slots=True)
class BlobCheck:
    """A verdict and what is behind it.

    ``agent``: the name that NIXL gave (LOADED); ``detail``: its exception, the signal's name, or the limit
    in words; ``version``: of the NIXL package; ``log``: the end of what NIXL and UCX printed, printable.
    """

    verdict: Verdict
    agent: str = ""
    detail: str = ""
    version: str = ""
    log: str = ""


async def check_blob(
    blob: bytes, *, deadline: float = DEADLINE, max_bytes: int = MAX_BLOB_BYTES
) -> BlobCheck:
    """Load an untrusted blob with NIXL's UCX backend in a child process. Needs root.

    LOADED says that the blob is well formed, not that its agent lives: no connection is made.

    :param deadline: seconds until the child is killed.
    :raises RefusedError: the blob is larger than ``max_bytes``.
    :raises HibernodeError: the child could not be confined, or NIXL does not work here.
    """
    if len(blob) > max_bytes:
        raise too_large(len(blob), max_bytes)
    # Nothing of our environment: NIXL and UCX take orders from it, such as an etcd to write to.
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-I", "-m", "hibernode.metadata.nixl_child", str(math.ceil(deadline) + 1)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={"PATH": os.defpath, "LC_ALL": "C.UTF-8"},
        cwd="/",
    )
    try:
        async with asyncio.timeout(deadline):
            answer, log = await _talk(process, blob)
            code = await process.wait()
    except TimeoutError:
        return BlobCheck(Verdict.TIMED_OUT, detail=f"killed after {deadline:g} s")
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if code < 0:
        return BlobCheck(Verdict.CRASHED, detail=_signal_name(-code), log=log)
    return _verdict(answer, log)


async def _talk(process: Process, blob: bytes) -> tuple[bytes, str]:
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None

    async def feed(stream: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):  # it ended without reading
            stream.write(blob)
            await stream.drain()
        stream.close()

    _, answer, log = await asyncio.gather(
        feed(process.stdin), _read(process.stdout, _MAX_ANSWER), _read(process.stderr, _MAX_LOG)
    )
    return answer, printable(log.decode("utf-8", "replace"), keep="\n")


async def _read(stream: asyncio.StreamReader, most: int) -> bytes:
    """Read to the end and keep the last ``most`` bytes."""
    kept = b""
    while chunk := await stream.read(_CHUNK):
        kept = (kept + chunk)[-most:]
    return kept


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _verdict(answer: bytes, log: str) -> BlobCheck:
    """Read the child's line; it may have been written by whoever made the blob."""
    try:
        fields = json.loads(answer)
        words = {str(key): printable(str(value))[:1000] for key, value in fields.items()}
    except (ValueError, AttributeError, RecursionError):
        words = {}
    version = words.get("version", "")
    if "loaded" in words:
        return BlobCheck(Verdict.LOADED, agent=words["loaded"], version=version, log=log)
    if "refused" in words:
        return BlobCheck(Verdict.REFUSED, detail=words["refused"], version=version, log=log)
    if "missing" in words:
        return BlobCheck(Verdict.NOT_INSTALLED, detail=words["missing"])
    last = log.strip().rpartition("\n")[2]
    raise HibernodeError(
        f"the blob could not be tried with NIXL: {last or 'the child said nothing'}",
        remedy="run it as root on a machine with an IPv4 interface; docs/nixl.md says what is needed",
        reason="BlobCheckFailed",
        log=log,
    )
