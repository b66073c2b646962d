"""The shim as the restore sees it: started, waited for, told that the GPU is back; what its failure means."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import IO, Any, Final, TypeVar

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

DEADLINE: Final = "it ends CRIU at restore.deadline_seconds and answers; the disk of state_dir may hang"

Awaken = Callable[[int], Coroutine[Any, Any, None]]
"""Gets the pid of the restored tree's root, and brings back what CRIU does not."""

EndLeft = Callable[[], Coroutine[Any, Any, None]]
"""Ends what a shim has made that cannot do so itself; raises nothing."""

T = TypeVar("T")


async def run_shim(directory: Dir, seconds: float, awaken: Awaken, end_left: EndLeft) -> dict[str, Any]:
    """Start the shim and wait for its answer; it stays when we go.

    A shim that says that the tree is there and asleep gets word when ``awaken`` has come to its end. When
    that fails, and when we die, its input ends, and the shim ends the tree. What comes of a shim that is
    killed, or does not answer, is ended by ``end_left``.

    :raises CriuError: it was killed, reason ``ShimEnded``. :raises DeadlineError: it has not answered.
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
        line = await _within(seconds + SLACK_SECONDS, reader.readline(), "the shim gave no answer", DEADLINE)
        state = _parsed(line)
        if state.get("phase") == Phase.WAKING:
            line = await _woken(awaken(int(state["pid"])), seconds, process.stdin, reader)
        if not line:
            _see_answered(directory, "the GPU state of the worker was back" if state else "CRIU had ended")
    except BaseException:
        # A restore that nobody waits for any more is undone: the shim ends CRIU's tree with itself.
        process.stdin.close()
        await uncut(end_left())
        if not restored.has_worker(directory):
            raise
        line = b""  # it came too late: the worker is there
    finally:
        process.stdin.close()
        transport.close()
        process.wait()
    return _parsed(line) or _noted(directory)


def _noted(directory: Dir) -> dict[str, Any]:
    return read_json(directory, "state.json") or {}


def _see_answered(directory: Dir, before: str) -> None:
    """See that a shim which has gone without an answer has at least written one down.

    :raises CriuError: it has not.
    """
    if _noted(directory).get("phase") in (None, *restored.UNFINISHED):
        raise CriuError(
            f"the shim ended before {before}, or before it could say so; what it had restored was ended",
            remedy="see who has killed it: journalctl -k has the kernel's reasons, one is the lack of memory",
            reason="ShimEnded",
        )


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        state = json.loads(line)
    except ValueError:
        return {}
    return state if isinstance(state, dict) else {}


async def _woken(
    work: Coroutine[Any, Any, None], seconds: float, word: IO[bytes], reader: asyncio.StreamReader
) -> bytes:
    """Wait for the GPU state, give the shim word, and wait for its answer; it is empty if the shim has ended.

    The work is not waited for when the shim ends meanwhile.
    """
    answer = asyncio.create_task(reader.readline())
    waking = asyncio.create_task(work)
    try:
        first = asyncio.wait({answer, waking}, return_when=asyncio.FIRST_COMPLETED)
        await _within(
            seconds,
            first,
            "the GPU state of the restored worker was not back",
            "raise restore.deadline_seconds: GPU memory takes as long as it is large",
        )
        if waking.done():
            await waking
            with suppress(BrokenPipeError):
                word.write(shim.AWAKE)
                word.flush()
            await _within(
                SLACK_SECONDS,
                asyncio.wait({answer}),
                "the GPU state of the restored worker is back, and the shim did not say that it runs",
                "the place of its restore marker may hang (NFS, FUSE), or the disk of state_dir",
            )
        return answer.result()
    finally:
        for task in (waking, answer):
            task.cancel()
        await uncut(asyncio.wait({waking, answer}))


async def _within(seconds: float, work: Awaitable[T], problem: str, remedy: str) -> T:
    """Wait for ``work``, which raises no TimeoutError of its own.

    :raises DeadlineError: it took longer; ``problem`` says what that means.
    """
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError:
        raise DeadlineError(f"{problem} within {seconds:g} s", remedy=remedy) from None


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
