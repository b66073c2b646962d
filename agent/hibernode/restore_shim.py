"""The shim as the restore sees it: started, waited for, told that the GPU is back; what its failure means."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import IO, Any, Final

from hibernode import restored, shim
from hibernode.apart import uncut
from hibernode.criu import diagnose
from hibernode.criu.find import clean_env
from hibernode.errors import CriuError, DeadlineError
from hibernode.host.safefs import Dir
from hibernode.outcome import criu_failed
from hibernode.restored import Phase
from hibernode.state import StateDir, read_json
from hibernode.workload import CheckpointId

SLACK_SECONDS: Final = 30.0
"""The shim has its own deadline on CRIU; this much later it is taken for dead."""

Awaken = Callable[[int], Coroutine[Any, Any, None]]
"""Gets the pid of the restored tree's root, and brings back what CRIU does not."""


async def run_shim(directory: Dir, seconds: float, awaken: Awaken) -> dict[str, Any]:
    """Start the shim and wait for its answer; it stays when we go.

    A shim that says that the tree is there and asleep gets word when ``awaken`` has come to its end. When
    that fails, and when we die, its input ends, and the shim ends the tree.
    """
    process = subprocess.Popen(  # noqa: ASYNC220 - it forks and is gone; starting it is all the work
        [sys.executable, "-I", "-S", shim.__file__, str(directory.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd="/",
        env=clean_env(),
    )
    assert process.stdin is not None
    assert process.stdout is not None
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), process.stdout)
    try:
        async with asyncio.timeout(seconds + SLACK_SECONDS):
            line = await reader.readline()
        state = _parsed(line)
        if state.get("phase") == Phase.WAKING:
            line = await _woken(awaken(int(state["pid"])), seconds, process.stdin, reader)
    except BaseException:
        # A restore that nobody waits for any more is undone: the shim ends CRIU's tree with itself.
        process.stdin.close()
        await uncut(asyncio.to_thread(restored.undo, directory))
        if not restored.has_worker(directory):
            raise
        line = b""  # it came too late: the worker is there
    finally:
        process.stdin.close()
        transport.close()
        process.wait()
    return _parsed(line) or read_json(directory, "state.json") or {}


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        state = json.loads(line)
    except ValueError:
        return {}
    return state if isinstance(state, dict) else {}


async def _woken(
    work: Coroutine[Any, Any, None], seconds: float, word: IO[bytes], reader: asyncio.StreamReader
) -> bytes:
    """Wait for the GPU state, give the shim word, and wait for its answer.

    The work is not waited for when the shim ends meanwhile.

    :raises CriuError: it has ended, reason ``ShimEnded``.
    """
    answer = asyncio.create_task(reader.readline())
    waking = asyncio.create_task(work)
    try:
        await _within(seconds, asyncio.wait({answer, waking}, return_when=asyncio.FIRST_COMPLETED))
        if waking.done():
            await waking
            with suppress(BrokenPipeError):
                word.write(shim.AWAKE)
                word.flush()
            async with asyncio.timeout(SLACK_SECONDS):
                await asyncio.wait({answer})
        line = answer.result()
    finally:
        for task in (waking, answer):
            task.cancel()
        await uncut(asyncio.wait({waking, answer}))
    if not line:
        raise CriuError(
            "the shim ended while the GPU state of the restored worker was brought back",
            remedy="see who has killed it: journalctl -k has the kernel's reasons, one is the lack of memory",
            reason="ShimEnded",
        )
    return line


async def _within(seconds: float, work: Awaitable[object]) -> None:
    """Wait for the GPU state, which has deadlines of its own, one for each call."""
    try:
        async with asyncio.timeout(seconds):
            await work
    except TimeoutError:
        raise DeadlineError(
            f"the GPU state of the restored worker was not back within {seconds:g} s",
            remedy="raise restore.deadline_seconds: GPU memory takes as long as it is large",
        ) from None


def shim_failed(
    id_: CheckpointId, state: dict[str, Any], directory: Dir, *, keep: StateDir, deadline: float
) -> CriuError:
    """Say why no worker came of it; the log is kept in the state directory."""
    paths = (directory.path / name for name in (shim.LOG_NAME, shim.OUTPUT_NAME))
    text = next((diagnose.read_log(path) for path in paths if path.exists()), "")
    kept = str(keep.keep_log(id_, "restore", text.encode(errors="replace")))
    code = state.get("returncode")
    if code in (0, None) and not state.get("timed_out"):
        why = state.get("error") or "the shim ended without an answer"
        if "restore marker" in why:
            return CriuError(
                f"{id_}: {why}",
                remedy="its directory must exist and the worker's user must be able to write there",
                reason="MarkerNotWritable",
            )
        if "ContainerMountsError: " in why:
            return CriuError(
                f"{id_}: {why.partition(': ')[2]}",
                remedy="give the container the mounts that the worker had, writable where it writes",
                reason="MountsDiffer",
                log=kept,
            )
        return CriuError(f"the restore failed: {why} (log: {kept})", reason="RestoreFailed", log=kept)
    return criu_failed(
        text,
        operation="restore",
        returncode=int(code or 0),
        timed_out=bool(state.get("timed_out")),
        deadline=deadline,
        log=kept,
    )
