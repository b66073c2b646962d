"""What the quiesce step asks NVML, what it refuses, and which tool it runs; no dump."""

from __future__ import annotations

import asyncio
import os
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import pynvml
import pytest

from hibernode.artifact.manifest import CudaFacts
from hibernode.criu import find
from hibernode.errors import HibernodeError
from hibernode.gpu import cuda, quiesce
from hibernode.gpu.cuda import CudaProcess, Tool
from hibernode.gpu.quiesce import Seen
from hibernode.gpu.service import look_once
from hibernode.gpu.state import NvmlState
from hibernode.host import procfs
from hibernode.host.safefs import Dir
from hibernode.journal import Journal
from hibernode.settings import GpuSettings
from tests.gpu.cuda_kit import VERSION, CudaTool
from tests.gpu.fixtures import built, library, stub, until
from tests.gpu.kit import GIB, Stub, uuid
from tests.real import node
from tests.real.node import state_letter

__all__ = ["built", "library", "stub"]  # fixtures
pytestmark = pytest.mark.gpu

Run = Callable[[str, float], tuple[int | None, str]]
ONE, TWO = CudaProcess(101, 7, "one", 5), CudaProcess(102, 8, "two", 6)


async def test_the_manifest_gets_the_gpus_that_the_tree_uses_and_what_it_has_there(stub: Stub) -> None:
    """A GPU of others is not in it; a process on two GPUs has the sum, one on none has nothing."""
    for index in range(3):
        stub.add_gpu(index)
    stub.add_process(0, 999)
    stub.add_process(1, ONE.pid, 2 * GIB)
    stub.add_process(2, ONE.pid, GIB)
    seen = Seen((ONE, TWO), await look_once(GpuSettings(deadline_seconds=30)))
    assert [(gpu.uuid, gpu.memory_bytes) for gpu in seen.gpus()] == [(uuid(1), 80 * GIB), (uuid(2), 80 * GIB)]
    assert seen.used() == {ONE.pid: 3 * GIB, TWO.pid: 0}


@pytest.mark.parametrize("settings", [GpuSettings(deadline_seconds=0.1), GpuSettings(enabled=False)])
async def test_a_silent_nvml_is_no_reason_to_fail(stub: Stub, settings: GpuSettings) -> None:
    """The facts are empty then."""
    stub.add_gpu(0)
    with stub.saying("hang DeviceGetCount_v2 -1", "hang DeviceGetCount -1", "hang Init -1"):
        seen = Seen((ONE,), await look_once(settings))
    assert (seen.gpus(), seen.used()) == ((), {ONE.pid: 0})
    assert seen.snapshot.state is (NvmlState.STUCK if settings.enabled else NvmlState.OFF)


def is_down() -> bool:
    """Whether NVML was stopped as often as it was started."""
    try:
        pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError_Uninitialized:
        return True
    return False


@pytest.mark.parametrize("hangs", ["", "InitWithFlags", "DeviceGetCount", "DeviceGetName"])
async def test_a_look_stops_what_it_has_started(stub: Stub, hangs: str) -> None:
    """NVML counts its starts: else the agent's own could not start it anew for a GPU that is back."""
    while not is_down():  # what other tests of this process have started
        pynvml.nvmlShutdown()
    stub.add_gpu(0)
    if hangs:
        with stub.saying(f"hang {hangs} -1"):
            found = await look_once(GpuSettings(deadline_seconds=0.05))
            assert found.state is NvmlState.STUCK or not any(gpu.state == "ok" for gpu in found.gpus)
    else:
        assert len((await look_once(GpuSettings(deadline_seconds=30))).gpus) == 1
    await until(lambda: not any(thread.name == "hibernode-gpu" for thread in threading.enumerate()))
    assert is_down()


@pytest.mark.parametrize("later", [False, True], ids=["as preflight saw it", "with one process more"])
async def test_the_driver_is_asked_again_only_of_who_came_later(
    tmp_path: Path, built: Path, stub: Stub, later: bool
) -> None:
    """What preflight was told goes into the manifest; a process that it has not seen may use another GPU."""
    tool = CudaTool(tmp_path / "tool", built)
    settings = GpuSettings(cuda_checkpoint=str(tool.path), deadline_seconds=30)
    with tool.tree(2) as root, Dir.open(tmp_path) as directory:
        processes = cuda.cuda_processes(root)
        for index, process in enumerate(processes):
            stub.add_gpu(index)
            stub.add_process(index, process.pid, GIB)
        seen = Seen(processes[: 1 if later else 2], await look_once(settings))
        stub.lines.clear()
        stub.add_gpu(7)
        stub.add_process(7, processes[0].pid, 2 * GIB)
        journal = Journal(directory, "checkpoint", {})
        quiesced = await quiesce.quiesce(root, settings, asyncio.to_thread, journal, seen)
        assert quiesced is not None
        await quiesced.wake(journal)
    assert [gpu.uuid for gpu in quiesced.facts.gpus] == ([uuid(7)] if later else [uuid(0), uuid(1)])
    assert [each.gpu_bytes for each in quiesced.facts.processes] == ([2 * GIB, 0] if later else [GIB, GIB])


def test_who_keeps_a_device_open_or_comes_or_goes_is_named() -> None:
    """All would make CRIU fail, escape from the dump, or make an image that cannot be restored."""
    quiesce._see_free([ONE, TWO], [ONE, TWO], [TWO, ONE])
    quiesce._see_free([ONE, TWO], [ONE], [ONE])  # who was merely linked with CUDA may go
    holding = CudaProcess(103, 9, "nvml", 7, devices=True)
    with pytest.raises(HibernodeError, match=r"open in pid 103 \(nvml\)") as caught:
        quiesce._see_free([ONE, holding], [ONE], [ONE, holding])
    assert caught.value.reason == "GpuDeviceOpen"
    for before, now in (([ONE], [ONE, TWO]), ([ONE, TWO], [ONE])):
        with pytest.raises(HibernodeError, match=r"pid 102 \(two\)") as caught:
            quiesce._see_free(before, before, now)
        assert caught.value.reason == "CudaTreeChanged"


async def test_after_criu_s_plugin_only_who_is_not_awake_is_woken(tmp_path: Path, built: Path) -> None:
    """CRIU does not say whether its plugin could; a look costs one call, and nobody is woken twice."""
    tool = CudaTool(tmp_path / "tool", built)
    with tool.tree(2, 1) as root, Dir.open(tmp_path) as directory:
        processes, found = cuda.cuda_processes(root), cuda.Tool(str(tool.path), VERSION)
        facts = CudaFacts(strategy="criu-plugin", processes=())
        for asleep in ([], [processes[1].pid]):
            for pid in asleep:
                for action in ("lock", "checkpoint"):
                    subprocess.run([tool.path, "--action", action, "--pid", str(pid)], check=True)
            tool.control()
            quiesced = quiesce.Quiesced(found, GpuSettings(), facts, processes)
            await quiesced.wake(Journal(directory, "checkpoint", {}))
            looks = [f"get-state {each.pid}" for each in processes]
            assert sorted(tool.calls()[:4]) == sorted([*looks, f"get-restore-tid {processes[2].pid}"])
            calls = [f"{call} {pid}" for pid in asleep for call in ("restore", "unlock", "get-state")]
            assert tool.calls()[4:] == calls
            assert tool.states(root)[:2] == ["running", "running"]


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("", "CudaCheckpointMissing"),
        ("exit 127", "CudaCheckpointBroken"),
        ("echo Version 550.54.14. --toggle", "CudaCheckpointTooOld"),
    ],
)
def test_a_tool_that_cannot_do_it_is_refused(tmp_path: Path, script: str, reason: str) -> None:
    """Absent, without a driver behind it, or too old."""
    path = tmp_path / "cuda-checkpoint"
    if script:
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
    with pytest.raises(HibernodeError) as caught:
        cuda.find_tool(GpuSettings(cuda_checkpoint=str(path)))
    assert caught.value.reason == reason


def test_a_tool_or_a_plugin_that_others_could_change_is_not_run(tmp_path: Path) -> None:
    """Both run as root."""
    path = tmp_path / "cuda-checkpoint"
    path.write_text("#!/bin/sh\necho Version 580.65.06. --action\n")
    path.chmod(0o755)
    settings = GpuSettings(cuda_checkpoint=str(path), criu_plugins=tmp_path)
    tool = cuda.find_tool(settings)
    os.chown(path, 65534, 0)
    with pytest.raises(HibernodeError) as caught:
        cuda.find_tool(settings)
    assert caught.value.reason == "CudaCheckpointUntrusted"
    (tmp_path / "cuda_plugin.so").touch()
    with pytest.raises(HibernodeError, match="finds cuda-checkpoint only in"):
        quiesce.plugins(settings, tool)
    (tmp_path / "cuda_plugin.so").chmod(0o666)
    with pytest.raises(HibernodeError, match="can be written by others"):
        quiesce.plugins(settings, tool)


async def test_only_what_copies_memory_may_take_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock that hangs makes other calls hang (NCCL); the worker must not wait for minutes then."""
    deadlines = {}

    async def run(argv: Sequence[str], deadline: float) -> tuple[int | None, str]:
        deadlines[argv[2] if argv[1] == "--action" else argv[1]] = deadline
        return 0, ""

    monkeypatch.setattr(cuda, "_run", run)
    calls = cuda._Calls(
        Tool("/tool", "580"), GpuSettings(lock_seconds=10, quiesce_seconds=300, start_seconds=30)
    )
    for call in ("lock", "checkpoint", "restore", "unlock", "get-state", "get-restore-tid"):
        await calls.all(call, [ONE])
    short = dict.fromkeys(("lock", "unlock", "--get-state", "--get-restore-tid"), 40.0)
    assert deadlines == {"checkpoint": 330.0, "restore": 330.0, **short}


def ended(pid: int) -> bool:
    """Whether a process is gone, or dead."""
    return state_letter(pid) in ("", "Z")


def by_ask(script: str, seconds: float) -> tuple[int | None, str]:
    """Run it as what is asked for its version."""
    with suppress(subprocess.TimeoutExpired):
        return find.ask(["/bin/sh", "-c", script], seconds, cuda.MAX_OUTPUT_BYTES)
    return None, ""


def by_call(script: str, seconds: float) -> tuple[int | None, str]:
    """Run it as a call of the tool."""
    return asyncio.run(cuda._run(["/bin/sh", "-c", script], seconds))


@pytest.mark.parametrize("run", [by_ask, by_call])
def test_output_without_an_end_is_refused_to_who_prints_it(run: Run) -> None:
    """Beyond what is kept a write fails, so that a program takes no more memory; else it goes on."""
    code, text = run("echo begun; head -c 1000000 /dev/zero 2>/dev/null || exit 7", 60)
    assert (code, len(text)) == (7, cuda.MAX_OUTPUT_BYTES)
    assert text.startswith("begun\n")


@pytest.mark.parametrize("run", [by_ask, by_call])
def test_a_program_is_killed_with_what_it_has_started(run: Run, tmp_path: Path) -> None:
    """A wrapper's child would go on with the call that was given up."""
    pids = tmp_path / "pids"
    pids.touch()
    seconds = 0.3
    while not pids.read_text().endswith("\n"):
        assert run(f"trap '' TERM; sleep 1000 & echo $! >>{pids}; wait", seconds)[0] is None
        seconds *= 2  # so slow a machine
    for pid in pids.read_text().split():
        node.until("end", partial(ended, int(pid)))


@pytest.fixture
def left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Tool, subprocess.Popen[bytes]]]:
    """Run a call of a tool that is a script, as a dead agent has left it behind; it does not end."""
    path = tmp_path / "cuda-checkpoint"
    path.write_text("#!/bin/sh\ntrap '' TERM\nsleep 1000 &\nwait\n")
    path.chmod(0o755)
    monkeypatch.setattr(quiesce, "LEFT_SECONDS", 0.1)
    with subprocess.Popen([path, "--action", "lock", "--pid", "101"], start_new_session=True) as call:
        node.until("start", lambda: procfs.cmdline(call.pid)[1:2] == [str(path)])
        yield Tool(str(path), "580"), call
        find.end_group(call.pid)


def test_a_call_that_was_left_behind_is_ended_also_of_a_script(
    left_behind: tuple[Tool, subprocess.Popen[bytes]],
) -> None:
    """It is known by its words, and is not one for another process."""
    tool, call = left_behind
    quiesce._end_left(tool, {102})
    assert call.poll() is None
    quiesce._end_left(tool, {101, 102})
    assert call.wait(60) < 0


def test_a_call_that_cannot_be_ended_is_waited_for_no_longer(
    left_behind: tuple[Tool, subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits in the driver; who recovers says so and goes on."""
    tool, call = left_behind
    monkeypatch.setattr(quiesce, "end_group", lambda _pid: None)
    with pytest.raises(HibernodeError, match=f"do not end: pids {call.pid}"):
        quiesce._end_left(tool, {101})
