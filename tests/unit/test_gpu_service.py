"""When it does not work: NVML absent, broken, hanging; a GPU lost, missing, silent. The agent goes on."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from hibernode.gpu.calls import MAX_LEFT, Calls, StuckError, _Lane
from hibernode.gpu.checks import findings, gpu_troubles, health_checks, nvml_trouble, summary
from hibernode.gpu.metrics import metrics
from hibernode.gpu.roster import Roster
from hibernode.gpu.service import GpuService
from hibernode.gpu.state import Gpu, GpuState, NvmlState, Snapshot
from hibernode.health import Health, State, worst
from hibernode.metrics import Metrics
from hibernode.workload import Verdict
from tests.gpu.fixtures import GENEROUS_SECONDS, Make, Told, library, make, stub, told, until
from tests.gpu.kit import CLOCK, DOUBLE_BIT, POWER, XID, Stub, uuid

__all__ = ["library", "make", "stub", "told"]  # fixtures
pytestmark = pytest.mark.gpu

DRIVER_NOT_LOADED, NO_LIBRARY, LOST, MISMATCH, UNKNOWN = 9, 12, 15, 18, 999
SHORT = 0.2
"""A deadline that a call which hangs outlasts for certain."""


def states(found: Snapshot) -> list[GpuState]:
    """List the GPUs' states."""
    return [gpu.state for gpu in found.gpus]


async def health_of(found: Snapshot) -> State:
    """Ask the agent's rows."""
    health = Health()
    for check in health_checks(lambda: found):
        health.add(check)
    return worst(await health.results())


# without a driver -------------------------------------------------------------------------------------


async def test_no_driver_is_quiet_and_healthy(
    make: Make, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node without GPUs has nothing to tell, and nothing is wrong with it."""
    monkeypatch.delenv("NVML_STUB")
    service = make()
    for _ in range(3):
        found = await service.poll()
        assert found.state is NvmlState.ABSENT
    assert told.events == []
    assert (nvml_trouble(found), list(gpu_troubles(found))) == ("", [])
    assert await health_of(found) is State.OK
    assert {row.verdict for row in findings(found)} == {Verdict.SKIP}
    assert summary(found)["nvml"] == "absent"


async def test_a_driver_that_comes_later_is_found(
    stub: Stub, make: Make, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next poll after an install sees the GPUs, and the one after a removal says that it is broken."""
    stub.add_gpu(0)
    stub.write()
    monkeypatch.delenv("NVML_STUB")
    service = make()
    assert (await service.poll()).state is NvmlState.ABSENT
    monkeypatch.setenv("NVML_STUB", str(stub.path))
    assert states(await service.poll()) == [GpuState.OK]
    assert told.events == []
    monkeypatch.delenv("NVML_STUB")
    gone = await service.poll()
    assert gone.state is NvmlState.BROKEN
    assert gone.stale_since == gone.taken_at > 0
    assert [gpu.uuid for gpu in gone.gpus] == [uuid(0)]
    assert await health_of(gone) is State.DEGRADED
    monkeypatch.setenv("NVML_STUB", str(stub.path))
    await service.poll()
    assert states(await service.poll()) == [GpuState.OK]
    assert told.reasons() == ["NvmlDown", "NvmlRecovered"]


async def test_looking_at_gpus_can_be_turned_off(stub: Stub, make: Make) -> None:
    """With gpu.enabled off nothing is asked and nothing is exported."""
    service = make(enabled=False)
    assert service.snapshot.state is NvmlState.OFF
    assert metrics(service.snapshot) == []
    task = asyncio.create_task(service.run())
    await asyncio.sleep(0)
    assert not task.done()
    task.cancel()


# broken -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(f"fail * -1 {UNKNOWN}", id="every call fails, as after a daemon-reload"),
        pytest.param(f"fail DeviceGetCount -2 {UNKNOWN}", id="the count fails"),
        pytest.param(f"fail DeviceGetHandleByIndex -1 {UNKNOWN}", id="no GPU can be had"),
        pytest.param(f"fail SystemGetDriverVersion -2 {DRIVER_NOT_LOADED}", id="the module was unloaded"),
        pytest.param(f"fail DeviceGetPowerUsage 0 {MISMATCH}", id="the driver was replaced"),
    ],
)
async def test_a_broken_nvml_is_degraded_and_started_anew(
    stub: Stub, make: Make, told: Told, line: str
) -> None:
    """It is never "no GPUs, healthy": the reason and the age are told, and NVML is started anew."""
    stub.add_gpu(0)
    stub.write()
    service = make()
    good = await service.poll()
    generation = service._nvml.generation
    with stub.saying(line):
        found = await service.poll()
        assert found.state is NvmlState.BROKEN
        assert found.stale_since == good.taken_at
        assert found.reason
        assert await health_of(found) is State.DEGRADED
        assert findings(found)[0].verdict is Verdict.WARN
        await service.poll()
    await service.poll()
    found = await service.poll()
    assert (found.state, found.stale_since, states(found)) == (NvmlState.UP, None, [GpuState.OK])
    assert service._nvml.generation > generation
    assert told.reasons() == ["NvmlDown", "NvmlRecovered"]


async def test_a_driver_that_is_not_loaded_is_no_absent_one(stub: Stub, make: Make) -> None:
    """The library says that somebody wanted a GPU here."""
    with stub.saying(f"fail InitWithFlags -2 {DRIVER_NOT_LOADED}"):
        found = await make().poll()
    assert found.state is NvmlState.BROKEN
    assert "Driver Not Loaded" in found.reason


async def test_no_gpu_in_the_list_is_not_healthy(stub: Stub, make: Make) -> None:
    """A driver without any GPU has lost them."""
    found = await make().poll()
    assert (found.state, found.reason) == (NvmlState.UP, "NVML lists no GPU")
    assert await health_of(found) is State.DEGRADED


# one GPU ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["*", "DeviceGetHandleByIndex", "DeviceGetPowerUsage", "DeviceGetUUID"])
async def test_a_lost_gpu_is_lost_alone(stub: Stub, make: Make, told: Told, call: str) -> None:
    """The others keep reporting, it keeps its name, and it is told once; so is its return."""
    for index in range(8):
        stub.add_gpu(index)
    stub.write()
    service = make()
    await service.poll()
    with stub.saying(f"fail {call} 5 {LOST}"):
        for _ in range(3):
            found = await service.poll()
            assert states(found) == [GpuState.OK] * 5 + [GpuState.LOST] + [GpuState.OK] * 2
            lost = found.gpus[5]
            assert (lost.uuid, lost.name) == (uuid(5), "NVIDIA H100 80GB HBM3")
            assert lost.readings.memory_used_bytes is None
        assert await health_of(found) is State.DEGRADED
        assert findings(found)[1].verdict is Verdict.WARN
        assert "GPU is lost" in findings(found)[1].found
    assert states(await service.poll()) == [GpuState.OK] * 8
    assert told.reasons() == ["GpuLost", "GpuRecovered"]


async def test_a_gpu_that_is_not_listed_any_more_is_missing(stub: Stub, make: Make, told: Told) -> None:
    """A list that shrinks does not make the node healthy; indices move, UUIDs do not."""
    for index in range(3):
        stub.add_gpu(index)
    stub.write()
    service = make()
    await service.poll()
    kept = stub.gpus.copy()
    stub.gpus.clear()
    stub.add_gpu(0, uuid_=uuid(0))
    stub.add_gpu(1, uuid_=uuid(2))
    stub.write()
    found = await service.poll()
    assert {gpu.uuid: gpu.state for gpu in found.gpus} == {
        uuid(0): GpuState.OK,
        uuid(2): GpuState.OK,
        uuid(1): GpuState.MISSING,
    }
    stub.gpus = kept
    stub.write()
    assert states(await service.poll()) == [GpuState.OK] * 3
    assert told.reasons() == ["GpuLost", "GpuRecovered"]


async def test_a_gpu_that_hangs_is_stuck_alone(stub: Stub, make: Make, told: Told) -> None:
    """It costs one thread and one deadline, and is not asked again until it answers."""
    for index in range(4):
        stub.add_gpu(index)
    stub.write()
    service = make(deadline_seconds=3.0)
    await until_up(service)
    told.events.clear()
    threads = threading.active_count()
    with stub.saying("hang DeviceGetPowerUsage 2"):
        for _ in range(5):
            found = await service.poll()
            assert [gpu.uuid for gpu in found.gpus] == [uuid(index) for index in range(4)]
            assert found.gpus[2].state is GpuState.STUCK
            assert states(found).count(GpuState.OK) == 3
            assert threading.active_count() <= threads + 1
    await until(lambda: not service._driver.stuck)
    assert states(await service.poll()) == [GpuState.OK] * 4
    assert told.reasons() == ["GpuLost", "GpuRecovered"]


async def test_a_driver_that_hangs_makes_no_answer_late(stub: Stub, make: Make, told: Told) -> None:
    """A minute or an hour: metrics and health come from memory, with the age, and threads do not pile up."""
    stub.add_gpu(0)
    stub.write()
    service = make(deadline_seconds=SHORT)
    good = await until_up(service)
    told.events.clear()
    threads = threading.active_count()
    exporter = Metrics()
    exporter.add_collector("gpu", lambda: metrics(service.snapshot))
    with stub.saying("hang * -2"):
        for _ in range(4):
            found = await service.poll()
            assert (found.state, found.stale_since) == (NvmlState.STUCK, good.taken_at)
            began = time.monotonic()
            text = (await exporter.render()).decode()
            assert await health_of(service.snapshot) is State.DEGRADED
            assert time.monotonic() - began < 1
            assert "hibernode_nvml_up 0.0" in text
            assert f'UUID="{uuid(0)}"' in text
            assert 'state="stale"' in text
            assert "hibernode_gpu_power_watts{" not in text
            assert threading.active_count() <= threads + 1
    await until(lambda: not service._driver.stuck)
    assert states(await until_up(service)) == [GpuState.OK]
    assert told.reasons()[0] == "NvmlDown"
    assert told.reasons()[-1] == "NvmlRecovered"


async def test_a_stop_that_hangs_is_waited_for(stub: Stub, make: Make) -> None:
    """NVML is not started while its stop hangs; when that is back it is."""
    stub.add_gpu(0)
    service = make(deadline_seconds=2.0)
    await until_up(service)
    generation = service._nvml.generation
    hang, fail = "hang Shutdown -2", f"fail SystemGetDriverVersion -2 {DRIVER_NOT_LOADED}"
    with stub.saying(hang):
        with stub.saying(fail):
            assert (await service.poll()).state is NvmlState.BROKEN
        for _ in range(2):
            found = await service.poll()
            assert found.state is NvmlState.STUCK
        assert service._nvml.generation == generation
    await until(lambda: not service._driver.stuck)
    assert states(await until_up(service)) == [GpuState.OK]
    assert service._nvml.generation > generation


async def until_up(service: GpuService) -> Snapshot:
    """Poll until a short deadline was enough, which a loaded machine may miss."""
    deadline = time.monotonic() + GENEROUS_SECONDS
    while (found := await service.poll()).state is not NvmlState.UP or any(found.troubled()):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    return found


# events -----------------------------------------------------------------------------------------------


def counts(found: Snapshot) -> dict[tuple[str, str, int], int]:
    """Lay out what has happened."""
    return {(each.uuid, each.event, each.code): each.count for each in found.happened}


async def test_equal_xids_are_counted_and_dated(stub: Stub, make: Make, told: Told) -> None:
    """Two equal XIDs in a row are two, and the quiet after them shows in the time of the last."""
    stub.add_gpu(0)
    stub.add_gpu(1)
    service = make(watch_events=True)
    stub.happen(1, XID, 31)
    stub.happen(1, XID, 31)
    stub.happen(0, XID, 13)
    await service.poll()
    await until(lambda: sum(counts(service.snapshot).values()) == 3)
    assert counts(service.snapshot) == {(uuid(1), "xid", 31): 2, (uuid(0), "xid", 13): 1}
    (seen,) = (each for each in service.snapshot.happened if each.code == 31)
    assert time.time() - 60 < seen.first <= seen.last <= time.time()
    assert told.events == []
    assert list(gpu_troubles(service.snapshot)) == []


async def test_other_events_are_counted_by_kind(stub: Stub, make: Make) -> None:
    """ECC errors, clocks and power."""
    stub.add_gpu(0)
    for kind in (DOUBLE_BIT, CLOCK, POWER):
        stub.happen(0, kind)
    service = make(watch_events=True)
    await service.poll()
    wanted = {(uuid(0), kind, 0): 1 for kind in ("ecc_double_bit", "clock", "power_source")}
    await until(lambda: counts(service.snapshot) == wanted)


async def test_a_storm_of_xids_is_counted_and_told_once(stub: Stub, make: Make, told: Told) -> None:
    """Twenty thousand of a fatal one are twenty thousand in the counter and one event."""
    stub.add_gpu(0)
    stub.happen(0, XID, 79, 20_000)
    stub.happen(0, XID, 48)
    service = make(watch_events=True, fatal_xids="48, 79")
    await service.poll()
    await until(lambda: counts(service.snapshot) == {(uuid(0), "xid", 79): 20_000, (uuid(0), "xid", 48): 1})
    # Told is after counted, by another thread.
    await until(lambda: len(told.events) == 2)
    assert told.reasons() == ["GpuXidFatal", "GpuXidFatal"]
    assert [text.split("XID ")[1].split(",")[0] for _, _, text in told.events] == ["79", "48"]
    assert await health_of(service.snapshot) is State.DEGRADED


async def test_numbers_without_end_are_counted_together(stub: Stub, make: Make) -> None:
    """A driver that makes up numbers makes no metrics without end."""
    stub.add_gpu(0)
    for code in range(1, 301):
        stub.events.append("")
        stub.happen(0, XID, code)
    service = make(watch_events=True)
    await service.poll()
    await until(lambda: sum(counts(service.snapshot).values()) == 300)
    assert len(counts(service.snapshot)) <= 257


async def test_a_gpu_without_events_costs_the_others_none(stub: Stub, make: Make) -> None:
    """One that supports none, that fails, or that has no UUID, is left out."""
    for index in range(3):
        stub.add_gpu(index)
    stub.add_gpu(3, uuid_="GPU-\x1b[2J")
    stub.set(0, events=0)
    stub.say("fail DeviceRegisterEvents 1 3")
    service = make(watch_events=True)
    stub.happen(2, XID, 31)
    await service.poll()
    await until(lambda: counts(service.snapshot) == {(uuid(2), "xid", 31): 1})


async def test_events_go_on_after_nvml_was_started_anew(stub: Stub, make: Make) -> None:
    """The thread lets go of the library when it is stopped, and registers anew."""
    stub.add_gpu(0)
    stub.happen(0, XID, 31)
    service = make(watch_events=True)
    service._watch._retry_seconds = 0.01
    await service.poll()
    await until(lambda: counts(service.snapshot))
    with stub.saying(f"fail SystemGetDriverVersion -2 {DRIVER_NOT_LOADED}"):
        assert (await service.poll()).state is NvmlState.BROKEN
    assert (await service.poll()).state is NvmlState.UP
    stub.happen(0, XID, 31)
    await until(lambda: counts(service.snapshot) == {(uuid(0), "xid", 31): 2})


async def test_a_wait_for_events_that_fails_is_told(stub: Stub, make: Make) -> None:
    """The readings go on; that no events come is said."""
    stub.add_gpu(0)
    service = make(watch_events=True)
    service._watch._retry_seconds = 0.01
    with stub.saying(f"fail EventSetWait -2 {UNKNOWN}"):
        await service.poll()
        await until(lambda: service.snapshot.events_error)
        assert states(await service.poll()) == [GpuState.OK]
        assert await health_of(service.snapshot) is State.DEGRADED
    await until(lambda: not service.snapshot.events_error)


async def test_a_wait_for_events_that_hangs_keeps_the_library(stub: Stub, make: Make) -> None:
    """While it hangs NVML is not stopped under it; the readings go on."""
    stub.add_gpu(0)
    service = make(watch_events=True)
    with stub.saying("hang EventSetWait -2"):
        await service.poll()
        await until(lambda: service._watch._turned_at)
        assert await asyncio.to_thread(service._nvml.stop, 0.1) is False
        assert states(await service.poll()) == [GpuState.OK]


# the parts --------------------------------------------------------------------------------------------


async def test_a_call_that_comes_back_late_is_asked_again() -> None:
    """Its thread was left behind, others went on, and what it brought is dropped."""
    calls, go = Calls(), threading.Event()
    with pytest.raises(StuckError, match="one has not answered"):
        await calls.run("one", go.wait, 0.05)
    with pytest.raises(StuckError):
        await calls.run("one", lambda: 1, 30)
    assert await calls.run("two", lambda: 2, 30) == 2
    assert calls.stuck.keys() == {"one"}
    go.set()
    await until(lambda: not calls.stuck)
    assert await calls.run("one", lambda: 1, 30) == 1
    calls.close()


async def test_looks_that_begin_anew_leave_no_end_of_threads_behind() -> None:
    """Each dump looks once; while the driver hangs the later ones wait for nothing and cost no thread."""
    go = threading.Event()

    def left() -> int:
        return sum(isinstance(each, _Lane) and each.left > 0 for each in threading.enumerate())

    await until(lambda: not left())
    for _ in range(MAX_LEFT + 3):
        with pytest.raises(StuckError):
            await Calls().run("NVML", go.wait, 0.001)
    assert left() == MAX_LEFT
    go.set()
    await until(lambda: not left())
    calls = Calls()
    assert await calls.run("NVML", lambda: 1, 30) == 1
    calls.close()


async def test_what_a_call_raises_is_raised() -> None:
    """It comes to whoever asked, and the thread goes on."""
    calls = Calls()

    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await calls.run("one", fail, 30)
    assert await calls.run("one", threading.get_ident, 30) != threading.get_ident()
    calls.close()


OK, BAD = GpuState.OK, GpuState.FAILED


@pytest.mark.parametrize(
    ("before", "after", "anew", "names"),
    [
        pytest.param("ab", [("a", OK), ("", BAD)], False, {"a", "b"}, id="its index is known"),
        pytest.param("ab", [("a", OK), ("", BAD)], True, {"a", "b"}, id="it is the only one that lacks"),
        pytest.param("abc", [("a", OK), ("", BAD)], True, {"a", "", "b", "c"}, id="two lack: no guess"),
        pytest.param("ab", [("", BAD), ("", BAD)], True, {"", "a", "b"}, id="two are nameless: no guess"),
        pytest.param("", [("", BAD)], False, {""}, id="it never had a name"),
    ],
)
def test_a_nameless_gpu_gets_no_wrong_name(
    before: str, after: list[tuple[str, GpuState]], anew: bool, names: set[str]
) -> None:
    """Its name is taken from before only where it can be no other."""
    roster = Roster()
    roster.join([Gpu(name, index) for index, name in enumerate(before)], 1, 10.0)
    read = [Gpu(name, index, state) for index, (name, state) in enumerate(after)]
    assert {gpu.uuid for gpu in roster.join(read, 1 + anew, 20.0)} == names


def test_a_state_keeps_its_beginning() -> None:
    """Since when a GPU is lost does not move with each poll."""
    roster = Roster()
    roster.join([Gpu("a", 0)], 1, 10.0)
    lost = [Gpu("a", 0, GpuState.LOST, "x")]
    assert [roster.join(lost, 1, now)[0].since for now in (20.0, 30.0)] == [20.0, 20.0]
    assert roster.join([Gpu("a", 0)], 1, 40.0)[0].since == 40.0
