"""The quiesce step of a dump: which CUDA processes there are, who takes them off the GPU, and the way back.

What was done stands in the journal before it is done, so that whoever finds a dead agent's dump can wake the
processes. They are known there by pid and start; the tool is that of the settings, never one that a file
names.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from hibernode.apart import uncut
from hibernode.artifact.layout import OWED
from hibernode.artifact.manifest import CudaFacts, CudaProcessFacts, GpuFacts
from hibernode.criu.find import clean_env, end_group, untrusted
from hibernode.criu.options import NO_PLUGINS
from hibernode.errors import HibernodeError, NotFoundError, RefusedError
from hibernode.gpu import cuda
from hibernode.gpu.cuda import CudaProcess, Tool
from hibernode.gpu.service import look_once
from hibernode.gpu.state import NvmlState, Snapshot
from hibernode.host import nvidia, procfs
from hibernode.host.safefs import Dir
from hibernode.journal import Journal
from hibernode.settings import GpuSettings
from hibernode.worker import noted_key

log = logging.getLogger("hibernode.gpu")

NOTE: Final = "cuda"
PLUGIN: Final = "cuda_plugin.so"
LEFT_SECONDS: Final = 5.0
"""A call that a dead agent has left behind may still be at work; then it is ended."""

Look = Callable[[Callable[[], tuple[CudaProcess, ...]]], Awaitable[tuple[CudaProcess, ...]]]
"""Runs a look at the worker, which may hang, apart."""


@dataclass(slots=True)
class Quiesced:
    """CUDA processes that are off the GPU, or, with CRIU's plugin, will be while CRIU works."""

    tool: Tool
    settings: GpuSettings
    facts: CudaFacts
    processes: tuple[CudaProcess, ...]
    libdir: str = NO_PLUGINS
    awake: bool = False

    async def wake(self, journal: Journal) -> None:
        """Bring the processes that live back onto the GPU, until it has worked once.

        CRIU's plugin does that itself at the end of a dump that leaves them running, and of one that fails.

        :raises CudaError: some could not be brought back.
        """
        if not self.awake:
            by_plugin = self.facts.strategy == "criu-plugin"
            await cuda.wake(self.tool, cuda.alive(self.processes), self.settings, by_plugin=by_plugin)
            self.awake = True
            journal.note(**{NOTE: None})
            journal.dir.unlink(OWED, missing_ok=True)

    async def wake_or_say(self, journal: Journal) -> str:
        """Wake them; what the answer to the dump must say of it, empty if all is well.

        Where some were not, the journal stays, and a recovery tries again.
        """
        try:
            await self.wake(journal)
        except HibernodeError as error:
            _owe_in(journal, error)
            return f"; the worker is not back on its GPU: {error.message}{cuda.AGAIN}"
        return ""

    def how_to_wake(self) -> str:
        """Tell what the answer to a dump that leaves the worker stopped must say: it cannot be woken so."""
        return (
            f"; stopped and off the GPU: {', '.join(map(str, self.processes))}; after SIGCONT each wants "
            f"'{self.tool.path} --action restore --pid PID', and when all have it, --action unlock"
        )


@dataclass(frozen=True, slots=True)
class Seen:
    """What preflight has seen: the CUDA processes of the tree, and what NVML said of the GPUs then."""

    processes: tuple[CudaProcess, ...]
    snapshot: Snapshot

    def gpus(self) -> tuple[GpuFacts, ...]:
        """List the GPUs that the processes use; none where NVML does not tell.

        These are facts for a restore to compare, not a condition of a dump.
        """
        pids = {each.pid for each in self.processes}
        return tuple(
            GpuFacts(uuid=gpu.uuid, model=gpu.name, memory_bytes=gpu.readings.memory_total_bytes or 0)
            for gpu in self.snapshot.gpus
            if any(each.pid in pids for each in gpu.processes or ())
        )

    def used(self) -> dict[int, int]:
        """Tell how many bytes each process has on the GPUs, on two the sum, by pid."""
        used = dict.fromkeys((each.pid for each in self.processes), 0)
        for gpu in self.snapshot.gpus:
            for each in gpu.processes or ():
                if each.pid in used:
                    used[each.pid] += each.memory_bytes or 0
        return used


NOTHING: Final = Seen((), Snapshot(NvmlState.OFF))


async def quiesce(
    pid: int, settings: GpuSettings, look: Look, journal: Journal, seen: Seen = NOTHING
) -> Quiesced | None:
    """Take the CUDA processes of a tree off the GPU as ``gpu.quiesce`` says; None: there is nothing to do.

    ``seen``: what is known of the tree; NVML is asked again only of processes that are not in it.

    :raises CudaError: a call failed; all is as it was.
    :raises HibernodeError: the tool or the plugin is not there or not to be trusted, reason
        ``GpuDeviceOpen``: a process keeps a device open; ``CudaTreeChanged``: one began to use CUDA later,
        or has ended.
    """
    if settings.quiesce == "none":
        return None
    # Listed anew: since preflight the tree may have forked, ended processes, or begun to use CUDA.
    processes = await look(partial(cuda.cuda_processes, pid))
    if not processes:
        return None
    try:
        tool = await asyncio.to_thread(cuda.find_tool, settings)
    except NotFoundError:
        if settings.quiesce == "auto" and not any(each.devices for each in processes):
            return None  # it is linked with CUDA, and there is no driver to use it with
        raise
    by_plugin = settings.quiesce == "criu-plugin"
    libdir = plugins(settings, tool) if by_plugin else NO_PLUGINS
    fresh = set(processes) <= set(seen.processes)
    seen = Seen(processes, seen.snapshot if fresh else await look_once(settings))
    used = seen.used()
    facts = CudaFacts(  # made before anything is touched: what the driver says may not fit into a manifest
        strategy="criu-plugin" if by_plugin else "cuda-checkpoint",
        driver=seen.snapshot.versions.driver or "",
        tool=tool.version,
        gpus=seen.gpus(),
        processes=tuple(
            CudaProcessFacts(
                ns_pid=each.ns_pid,
                comm=each.comm,
                gpu_bytes=used[each.pid],
                state="plugin" if by_plugin else "checkpointed",
            )
            for each in processes
        ),
    )
    noted = partial(_note_in, journal)
    held = processes
    if by_plugin:
        noted(processes)
    else:
        held, seconds = await cuda.quiesce(tool, processes, settings, noted, partial(_owe_in, journal))
        taken = (its for its, each in zip(facts.processes, processes, strict=True) if each in held)
        times = {call: seconds[call] for call in ("lock", "checkpoint") if call in seconds}
        facts = facts.model_copy(update={"processes": tuple(taken), "seconds": times})
    done = Quiesced(tool, settings, facts, held, libdir)
    if not by_plugin:
        try:
            _see_free(processes, held, await look(partial(cuda.cuda_processes, pid)))
        except BaseException as error:
            left = await uncut(done.wake_or_say(journal))
            if isinstance(error, HibernodeError):
                error.message += left
            raise
    return done if held else None


def _note_in(journal: Journal, held: Sequence[CudaProcess]) -> None:
    journal.note(**{NOTE: [_note(each) for each in held]})
    journal.write()


def _owe_in(journal: Journal, error: HibernodeError) -> None:
    """Keep the journal of processes that were not brought back, for who tries again."""
    log.error("%s%s", error.message, cuda.AGAIN)
    owe(journal.dir)


def _see_free(before: Sequence[CudaProcess], held: Sequence[CudaProcess], now: Sequence[CudaProcess]) -> None:
    """See that no process has a device of the GPU any more, and that none has come or gone.

    ``held`` were taken off the GPU: an image without one of them could not be restored.
    """
    if holding := [str(each) for each in now if each.devices]:
        raise RefusedError(
            f"a device of NVIDIA's is still open in {', '.join(holding)}",
            remedy="a process that only uses NVML, or was forked from one that uses CUDA, must close "
            f"{nvidia.DEVICES}* before it is ready",
            reason="GpuDeviceOpen",
        )
    for what, some, others in (("began to use CUDA", now, before), ("ended", held, now)):
        known = {(each.pid, each.start_ticks) for each in others}
        if changed := [str(each) for each in some if (each.pid, each.start_ticks) not in known]:
            raise RefusedError(
                f"{what} while the others were taken off the GPU: {', '.join(changed)}",
                remedy="the worker must have started all of its processes before it says that it is ready, "
                "and they must stay",
                reason="CudaTreeChanged",
            )


def plugins(settings: GpuSettings, tool: Tool) -> str:
    """Check CRIU's plugin, which CRIU loads as root, with all else in its directory."""
    directory = settings.criu_plugins
    problem = ""
    if not (directory / PLUGIN).is_file():
        problem = f"{directory} has no {PLUGIN}"
    elif bad := next(filter(None, (untrusted(path.resolve()) for path in directory.glob("*.so"))), None):
        problem = f"{bad[0]} {bad[1]}"
    elif str(Path(tool.path).parent) not in clean_env()["PATH"].split(":"):
        problem = f"the plugin finds {cuda.NAME} only in {clean_env()['PATH']}, but it is {tool.path}"
    if problem:
        raise RefusedError(
            f"gpu.quiesce is criu-plugin: {problem}",
            remedy="set gpu.criu_plugins to the directory of CRIU's CUDA plugin, or gpu.quiesce to "
            "cuda-checkpoint, which needs no plugin",
            reason="CriuPluginUnusable",
        )
    return str(directory)


# what a dead agent has left -------------------------------------------------------------------------------


def _note(process: CudaProcess) -> dict[str, Any]:
    return {
        "pid": process.pid,
        "start_ticks": process.start_ticks,
        "ns_pid": process.ns_pid,
        "comm": process.comm,
    }


def owe(directory: Dir) -> None:
    """Leave the sign that a staging directory must stay, since its journal names processes off the GPU."""
    with suppress(OSError):
        directory.write_atomic(OWED, b"", 0o600, sync=False)


def wake_noted(journal: dict[str, Any], settings: GpuSettings) -> str:
    """Wake the processes that a dead agent has noted, wherever it has stopped; a sentence's end. Blocks.

    :raises CudaError: some are not back on the GPU.
    :raises HibernodeError: there is no tool to do it with.
    """
    noted = journal.get(NOTE)
    keys = [key for each in noted if (key := noted_key(each))] if isinstance(noted, list) else []
    processes = cuda.alive([CudaProcess(key.pid, key.pid, "noted", key.start_ticks) for key in keys])
    if not processes:
        return ""
    tool = cuda.find_tool(settings)
    _end_left(tool, {each.pid for each in processes})
    asyncio.run(cuda.wake(tool, processes, settings, unsure=True))
    return "; its CUDA processes are on the GPU now"


def _end_left(tool: Tool, pids: set[int]) -> None:
    """Wait for the calls that a dead agent has left behind for these processes, then end them.

    :raises CudaError: one does not end: it waits in the driver.
    """
    for kill in (True, False):
        deadline = time.monotonic() + LEFT_SECONDS
        while left := [pid for pid in procfs.all_stats() if _at(tool, pid, pids)]:
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        else:
            return
        for pid in left if kill else ():
            with suppress(ProcessLookupError), procfs.Process.open(pid):
                if _at(tool, pid, pids):
                    end_group(pid)
    raise cuda.CudaError(
        f"{cuda.NAME} calls that a dead agent has left behind do not end: pids {', '.join(map(str, left))}",
        remedy="they wait in the driver: see the kernel's log (journalctl -k --grep NVRM)",
        reason="CudaNotWoken",
    )


def _at(tool: Tool, pid: int, pids: set[int]) -> bool:
    """Tell whether a process is a call of the tool, or of a script in its place, for one of ``pids``.

    Calls are made where the agent is: a process of a container may be called as it likes.
    """
    with suppress(OSError):
        words = procfs.cmdline(pid)
        if tool.path in (procfs.exe(pid), *words[:2]) and "--pid" in words[:-1]:
            ours = procfs.namespaces(pid).get("mnt") == procfs.namespaces(os.getpid())["mnt"]
            return ours and words[words.index("--pid") + 1] in map(str, pids)
    return False
