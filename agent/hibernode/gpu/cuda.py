"""NVIDIA's ``cuda-checkpoint``: takes CUDA processes off the GPU before a dump, and brings them back.

One call deals with one process, and each start costs seconds where the driver has to attach. So there are two
for each process at a dump (``lock``, ``checkpoint``) and three when it is woken (``restore``, ``unlock``,
``--get-state``); no state is polled. A lock waits for the GPU work that the process has submitted; of processes
that work with each other (NCCL) it may wait for ever, which is why ``--timeout`` and a deadline of ours always
stand above it.

The program is NVIDIA's and not shipped with Hibernode. Its command line is part of the driver (``libcuda``).
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hibernode.criu.find import clean_env, signature, untrusted
from hibernode.errors import HibernodeError, NotFoundError, RefusedError
from hibernode.host import procfs
from hibernode.host.procfs import Process
from hibernode.settings import GpuSettings
from hibernode.text import printable
from hibernode.workload import ProcessKey

NAME: Final = "cuda-checkpoint"
LIBCUDA: Final = "libcuda.so"
DEVICES: Final = "/dev/nvidia"

START_SECONDS: Final = 30.0
"""What a call may take besides its work: to start and to attach to the driver, 2.7 s on nodes that were seen."""

KILL_SECONDS: Final = 5.0
"""A call that was killed and is not gone by then waits in the driver; it is left behind."""

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
    return Tool(str(real), _version(str(real), (signature(real), driver)))


@functools.lru_cache(maxsize=4)
def _version(path: str, _changes: object) -> str:
    """Read the version from the help, which comes from the driver and so shows that it can be reached."""
    with open(os.memfd_create(NAME), "w+b") as output:  # noqa: PTH123 - a pipe could be kept open by a child
        try:
            code = subprocess.run(
                [path, "--help"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd="/",
                env=clean_env(),
                timeout=START_SECONDS,
                check=False,
                start_new_session=True,
            ).returncode
        except subprocess.TimeoutExpired:
            raise _refused(f"{path} did not answer in {START_SECONDS:g} s", "CudaCheckpointBroken") from None
        except OSError as error:
            raise _refused(f"{path} cannot be started: {error.strerror}", "CudaCheckpointBroken") from None
        output.seek(0)
        text = output.read(MAX_OUTPUT_BYTES).decode(errors="replace")
    match = _VERSION.search(text)
    if code != 0 or match is None:
        raise _refused(
            f"{path} does not tell its version (exit code {code}, it said: {_said(text)})",
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
            devices = any(fd.target.startswith(DEVICES) for fd in procfs.fds(stat.pid))
            if devices or any(_is_libcuda(mapping.path) for mapping in procfs.maps(stat.pid)):
                ns_pid = procfs.read_status(stat.pid).ns_pids[-1]
                found.append(CudaProcess(stat.pid, ns_pid, stat.comm, stat.key.start_ticks, devices))
    return tuple(found)


def _is_libcuda(path: str) -> bool:
    return os.path.basename(path).startswith(LIBCUDA)  # noqa: PTH119 - a text, not always a path


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
) -> tuple[tuple[CudaProcess, ...], dict[str, float]]:
    """Lock all the processes, then checkpoint all: their GPU memory is in their own memory then.

    ``noted`` is called with them before the first call. Gives those that were taken off the GPU (without those
    that only looked like CUDA processes, which the tool does not know) and the seconds by call. When a call
    fails, and when this is cancelled, everything is undone in reverse before it raises.

    :raises CudaError: a call failed or hung; the message names pids, calls, what the tool said, and who could
        not be brought back.
    """
    raise NotImplementedError


async def wake(
    tool: Tool, processes: Sequence[CudaProcess], settings: GpuSettings, *, device_map: str = ""
) -> dict[str, float]:
    """Restore all the processes, then unlock all, then look once at the state of each.

    One that fails does not keep the others from it, and one that runs at the end is well whatever its calls
    said: so this is also what undoes a dump that stopped anywhere. ``device_map``: ``old=new,...`` by UUID, with
    every GPU that was checkpointed. Gives the seconds by call.

    :raises CudaError: some are not ``running`` at the end, reason ``CudaNotWoken``; pids, states and what the
        tool said are named.
    """
    raise NotImplementedError


def _said(text: str) -> str:
    """Cut what the tool printed to one line."""
    return printable(" ".join(text.split())[:_SHOWN], keep="") or "nothing"


def _refused(what: str, reason: str) -> RefusedError:
    return RefusedError(
        f"{NAME}: {what}",
        remedy="see 'GPUs: freezing' in docs/gpu.md, or set gpu.cuda_checkpoint",
        reason=reason,
    )
