"""NVIDIA's ``cuda-checkpoint``: takes CUDA processes off the GPU before a dump, and brings them back.

One call deals with one process, and each start costs seconds where the driver has to attach. So there are
two for each process at a dump (``lock``, ``checkpoint``) and three when it is woken (``restore``, ``unlock``,
``--get-state``); no state is polled. A lock waits for the GPU work that the process has submitted; of
processes that work with each other (NCCL) it may wait for ever, which is why ``--timeout`` and a deadline of
ours always stand above it.

The program is NVIDIA's and not shipped with Hibernode. Its command line is part of the driver (``libcuda``).
"""

from __future__ import annotations

import asyncio
import functools
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hibernode.apart import uncut
from hibernode.criu.find import (
    KILL_SECONDS,
    alone,
    ask,
    clean_env,
    end_group,
    kept_output,
    printed,
    signature,
    untrusted,
)
from hibernode.errors import HibernodeError, NotFoundError, RefusedError
from hibernode.host import nvidia, procfs
from hibernode.host.procfs import Process
from hibernode.settings import GpuSettings
from hibernode.text import printable
from hibernode.workload import ProcessKey

NAME: Final = "cuda-checkpoint"

AGAIN: Final = "; the agent, its next dump and 'hibernode gc' try again"
"""What is said of processes that are left off the GPU, while the journal stays."""

MAX_OUTPUT_BYTES: Final = 4096
_SHOWN: Final = 300
_VERSION: Final = re.compile(r"\bVersion (\d+(?:\.\d+)+)")


class CudaError(HibernodeError):
    """``cuda-checkpoint`` has failed, or has not come back; the pids and calls are named."""

    default_reason = "CudaCheckpointFailed"


@dataclass(frozen=True, slots=True)
class Tool:
    """A ``cuda-checkpoint`` that may be run; ``version`` is that of the driver's library behind it."""

    path: str
    version: str


@dataclass(frozen=True, slots=True)
class CudaProcess:
    """A process that uses CUDA, or seems to.

    ``ns_pid``: in its innermost pid namespace. ``devices``: it holds a device of NVIDIA's open, so it is not
    merely linked with CUDA.
    """

    pid: int
    ns_pid: int
    comm: str
    start_ticks: int
    devices: bool = False

    def __str__(self) -> str:
        return f"pid {self.pid} ({printable(self.comm, keep='')})"


# finding --------------------------------------------------------------------------------------------------


def find_tool(settings: GpuSettings) -> Tool:
    """Find ``cuda-checkpoint`` and ask it once for its version, until it or the driver changes. Blocks.

    :raises NotFoundError: there is none, reason ``CudaCheckpointMissing``.
    :raises RefusedError: it does not run, knows no ``--action`` (a driver before 555), or others than root
        could change it.
    """
    found = settings.cuda_checkpoint or shutil.which(NAME, path=clean_env()["PATH"])
    try:
        real = Path(found or NAME).resolve(strict=True)
        if not found or not real.is_file():
            raise FileNotFoundError(found)
    except (OSError, RuntimeError):
        raise NotFoundError(
            f"no {NAME} at {found}" if found else f"no {NAME} on this machine",
            remedy="take it from github.com/NVIDIA/cuda-checkpoint, or set gpu.cuda_checkpoint",
            reason="CudaCheckpointMissing",
        ) from None
    if bad := untrusted(real):
        raise _refused(f"{bad[0]} {bad[1]}", "CudaCheckpointUntrusted")
    driver = ""
    with suppress(OSError):
        driver = Path("/sys/module/nvidia/version").read_text()
    return Tool(str(real), _version(str(real), settings.start_seconds, (signature(real), driver)))


@functools.lru_cache(maxsize=4)
def _version(path: str, seconds: float, _changes: object) -> str:
    """Read the version from the help, which comes from the driver and so shows that it can be reached."""
    try:
        code, text = ask([path, "--help"], seconds, MAX_OUTPUT_BYTES)
    except subprocess.TimeoutExpired:
        raise _refused(f"{path} did not answer in {seconds:g} s", "CudaCheckpointBroken") from None
    except OSError as error:
        raise _refused(f"{path} cannot be started: {error.strerror}", "CudaCheckpointBroken") from None
    match = _VERSION.search(text)
    if code != 0 or match is None:
        raise _refused(
            f"{path} does not tell its version (exit code {code}, it said: {_said(text) or 'nothing'})",
            "CudaCheckpointBroken",
        )
    if "--action" not in text:
        raise _refused(
            f"{path} knows no --action: the driver {match[1]} is older than 555", "CudaCheckpointTooOld"
        )
    return match[1]


def cuda_processes(root_pid: int) -> tuple[CudaProcess, ...]:
    """List the processes of a tree that map the CUDA library or hold a device of NVIDIA's; nothing is run.

    :raises ProcessLookupError: the root is gone.
    """
    found = []
    for stat in procfs.tree(root_pid):
        with suppress(ProcessLookupError):
            devices = any(fd.target.startswith(nvidia.DEVICES) for fd in procfs.fds(stat.pid))
            if devices or any(nvidia.is_libcuda(mapping.path) for mapping in procfs.maps(stat.pid)):
                ns_pid = procfs.read_status(stat.pid).ns_pids[-1]
                found.append(CudaProcess(stat.pid, ns_pid, stat.comm, stat.key.start_ticks, devices))
    return tuple(found)


def alive(processes: Iterable[CudaProcess]) -> tuple[CudaProcess, ...]:
    """Leave out those that have ended, whose pid another process may have by now."""
    found = []
    for each in processes:
        with suppress(ProcessLookupError), Process.open(each.pid) as process:
            if process.key == ProcessKey(each.pid, each.start_ticks):
                found.append(each)
    return tuple(found)


# the two directions ---------------------------------------------------------------------------------------


async def quiesce(
    tool: Tool,
    processes: Sequence[CudaProcess],
    settings: GpuSettings,
    noted: Callable[[Sequence[CudaProcess]], None] = lambda _: None,
    owed: Callable[[CudaError], None] = lambda _: None,
) -> tuple[tuple[CudaProcess, ...], dict[str, float]]:
    """Lock all the processes, then checkpoint all: their GPU memory is in their own memory then.

    ``noted`` is called with them before the first call, ``owed`` where they could not be brought back. Gives
    those that were taken off the GPU (without those that only looked like CUDA processes, which the tool does
    not know) and the seconds by call. When a call fails, and when this is cancelled, everything is undone
    before it raises.

    :raises CudaError: a call failed or hung; the message names pids, calls, what the tool said, and who could
        not be brought back.
    """
    calls = _Calls(tool, settings)
    noted(processes)
    try:
        answers = await calls.all("lock", processes)
        refused = [each.process for each in answers if each.failed and not each.late]
        others = await _unknown(calls, refused)
        calls.unknown |= others
        held = tuple(each for each in processes if each not in others)
        _check(answer for answer in answers if answer.process not in others)
        if others:
            noted(held)
        _check(await calls.all("checkpoint", held))
    except BaseException as error:
        try:
            await uncut(_undo(calls, processes, owed))
        except CudaError as problem:
            if not isinstance(error, CudaError):
                raise error from problem
            raise CudaError(
                f"{error.message}; {problem.message}{AGAIN}",
                remedy=f"{error.remedy}; {problem.remedy}",
                reason=problem.reason,
            ) from error
        raise
    return held, calls.seconds


async def _unknown(calls: _Calls, processes: Sequence[CudaProcess]) -> set[CudaProcess]:
    """Tell which of the processes the tool does not know: those linked with CUDA that have never begun it.

    Only a process that CUDA works in has a thread that can restore it.
    """
    answers = await calls.all("get-restore-tid", processes)
    return {each.process for each in answers if each.failed and not each.late}


async def _undo(calls: _Calls, processes: Sequence[CudaProcess], owed: Callable[[CudaError], None]) -> None:
    """Bring back what a quiesce has changed, the last first; the calls say how far each has come."""
    began = [each for each in processes if each in calls.began("checkpoint")]
    locked = [each for each in processes if each in calls.began("lock") and each not in calls.unknown]
    try:
        await _bring_back(calls, began[::-1], locked[::-1])
    except CudaError as error:
        owed(error)
        raise


async def wake(
    tool: Tool,
    processes: Sequence[CudaProcess],
    settings: GpuSettings,
    *,
    device_map: str = "",
    unsure: bool = False,
    by_plugin: bool = False,
) -> dict[str, float]:
    """Restore all the processes, then unlock all, then look once at the state of each.

    One that fails does not keep the others from it, and one that runs at the end is well whatever its calls
    said: so this is also what undoes a dump that stopped anywhere. ``device_map``: ``old=new,...`` by UUID,
    with every GPU that was checkpointed. ``unsure``: some may be no CUDA processes, which the tool does not
    know; they are left out. ``by_plugin``: CRIU's plugin has woken them, and CRIU does not say whether it
    could; so their states come first, and only who does not run is called. Gives the seconds by call.

    :raises CudaError: some are not ``running`` at the end, reason ``CudaNotWoken``; pids, states and what the
        tool said are named.
    """
    calls = _Calls(tool, settings, device_map)
    if by_plugin:
        asleep = [each for each in await calls.all("get-state", processes) if each.text != "running"]
        unknown = await _unknown(calls, [each.process for each in asleep if each.failed and not each.late])
        processes = [each.process for each in asleep if each.process not in unknown]
    await _bring_back(calls, processes, processes, unsure=unsure)
    return calls.seconds


async def _bring_back(
    calls: _Calls, checkpointed: Sequence[CudaProcess], locked: Sequence[CudaProcess], *, unsure: bool = False
) -> None:
    """Restore and unlock, then see that all of ``locked`` run; those that have ended are nobody's concern."""
    answers = await calls.all("restore", checkpointed)
    answers += await calls.all("unlock", locked)
    bad = [state for state in await calls.all("get-state", locked) if state.failed or state.text != "running"]
    left = alive(state.process for state in bad)
    if unsure:
        unknown = await _unknown(calls, [each.process for each in bad if each.failed and not each.late])
        left = tuple(each for each in left if each not in unknown)
    if not left:
        return
    said = [str(each) for each in answers if each.failed and each.process in left]
    states = [
        str(each) if each.failed else f"{each.process} is {each.text}" for each in bad if each.process in left
    ]
    raise CudaError(
        f"not back on the GPU: {'; '.join([*states, *said])}",
        remedy="'cuda-checkpoint --get-state --pid PID' shows the state: who is checkpointed wants "
        "--action restore and then unlock, who is locked only unlock; who has failed can only be ended",
        reason="CudaNotWoken",
    )


# calls ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Answer:
    """What came of one call. ``late``: it hit its deadline, or the tool its own, and may have worked."""

    process: CudaProcess
    call: str
    text: str
    failed: bool
    late: bool
    seconds: float

    def __str__(self) -> str:
        said = f"the tool said: {self.text or 'nothing'}"
        how = f"was cut after {self.seconds:.1f} s" if self.late else "failed"
        return f"{self.call} of {self.process} {how}, {said}"


class _Calls:
    """Calls of the tool: so many at one time, all with deadlines, and what has begun."""

    def __init__(self, tool: Tool, settings: GpuSettings, device_map: str = "") -> None:
        self._tool = tool
        self._settings = settings
        self._map = device_map
        self._places = asyncio.Semaphore(settings.parallel)
        self._began: dict[str, list[CudaProcess]] = {}
        self.unknown: set[CudaProcess] = set()
        self.seconds: dict[str, float] = {}

    def began(self, call: str) -> list[CudaProcess]:
        """List the processes for which a call was started, whatever came of it."""
        return self._began.get(call, [])

    async def all(self, call: str, processes: Sequence[CudaProcess]) -> list[_Answer]:
        """Call for each of the processes side by side, to the end of all; one cancelled ends its programs."""
        began = time.monotonic()
        tasks = [asyncio.create_task(self._one(call, each)) for each in processes]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            if tasks:
                await uncut(asyncio.wait(tasks))
                self.seconds[call] = self.seconds.get(call, 0.0) + time.monotonic() - began

    async def _one(self, call: str, process: CudaProcess) -> _Answer:
        async with self._places:
            self._began.setdefault(call, []).append(process)
            began = time.monotonic()
            deadline = self._settings.start_seconds
            copies = call in ("checkpoint", "restore")
            deadline += self._settings.quiesce_seconds if copies else self._settings.lock_seconds
            code, text = await _run([self._tool.path, *self._words(call, process)], deadline)
            seconds = time.monotonic() - began
            late = code is None or (code != 0 and call == "lock" and seconds >= self._settings.lock_seconds)
            return _Answer(process, call, _said(text), code != 0, late, seconds)

    def _words(self, call: str, process: CudaProcess) -> list[str]:
        words = [f"--{call}"] if call.startswith("get-") else ["--action", call]
        words += ["--pid", str(process.pid)]
        if call == "lock":  # it knows a time for nothing else
            words += ["--timeout", str(round(self._settings.lock_seconds * 1000))]
        if call == "restore" and self._map:
            words += ["--device-map", self._map]
        return words


async def _run(argv: Sequence[str], deadline: float) -> tuple[int | None, str]:
    """Run the tool; its exit code (None: it was killed at the deadline) and what it printed."""
    with kept_output() as output:
        try:
            child = await asyncio.create_subprocess_exec(*argv, **alone(output))
        except OSError as error:
            return -1, f"{argv[0]} cannot be started: {error.strerror}"
        code: int | None = None
        try:
            async with asyncio.timeout(deadline):
                code = await child.wait()
        except TimeoutError:
            pass
        finally:
            if child.returncode is None:
                end_group(child.pid)
                await uncut(asyncio.wait([asyncio.ensure_future(child.wait())], timeout=KILL_SECONDS))
        return code, printed(output, MAX_OUTPUT_BYTES)


def _check(answers: Iterable[_Answer]) -> None:
    """See that all calls have worked.

    :raises CudaError: some have not; reason ``CudaLockTimeout`` if one could not be locked in time.
    """
    failed = [each for each in answers if each.failed]
    if not failed:
        return
    waits = any(each.late and each.call == "lock" for each in failed)
    raise CudaError(
        f"{NAME}: {'; '.join(map(str, failed))}",
        remedy="a lock waits for the GPU work of the process: those that work with each other (NCCL) must "
        "be idle, with their communicators torn down; or raise gpu.lock_seconds"
        if waits
        else "see 'What a dump does to the GPU' in docs/gpu.md; one that was cut may want more "
        "gpu.quiesce_seconds",
        reason="CudaLockTimeout" if waits else "",
    )


def _said(text: str) -> str:
    """Cut what the tool printed to one line."""
    return printable(" ".join(text.split())[:_SHOWN], keep="")


def _refused(what: str, reason: str) -> RefusedError:
    return RefusedError(
        f"{NAME}: {what}",
        remedy="install the tool and the driver as NVIDIA ships them, or set gpu.cuda_checkpoint",
        reason=reason,
    )
