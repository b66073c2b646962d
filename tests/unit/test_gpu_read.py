"""What NVML says of each GPU, read by the unmodified nvidia-ml-py from a library that stands in for it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hibernode.gpu.nvml import Nvml, NvmlError
from hibernode.gpu.state import Gpu, GpuProcess, GpuState, NvmlState
from tests.gpu.fixtures import Make, library, make, stub, told
from tests.gpu.kit import GIB, NONE, SOURCE, UNKNOWN_MEMORY, Stub, mig_uuid, uuid

__all__ = ["library", "make", "stub", "told"]  # fixtures
pytestmark = pytest.mark.gpu

NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND, VERSION_MISMATCH = 3, 4, 13, 25


async def one(make: Make) -> Gpu:
    """Read the only GPU."""
    found = await make().poll()
    assert found.state is NvmlState.UP, found.reason
    (gpu,) = found.gpus
    return gpu


async def test_a_gpu_is_read_whole(stub: Stub, make: Make) -> None:
    """Every value that the driver gives arrives, in the unit that its name says."""
    stub.add_gpu(0)
    stub.set(0, util_gpu=97, util_memory=41, temperature=63, power=612345, power_limit=700000, energy=5000)
    stub.set(0, clock_sm=1980, clock_mem=2619, clock_graphics=1975, throttle=0x24, compute_mode=3)
    stub.set(0, ecc_vc=1, ecc_vu=2, ecc_ac=3, ecc_au=4, retired_sbe=5, retired_dbe=6, retired_pending=1)
    stub.set(0, remap_corr=7, remap_unc=8, remap_pending=1, remap_failed=1, nvlinks=18, nvlinks_down=2)
    found = await make().poll()
    assert (found.versions.driver, found.versions.nvml, found.versions.cuda) == (
        "570.86.10",
        "13.570.86",
        "13.0",
    )
    (gpu,) = found.gpus
    assert (gpu.uuid, gpu.index, gpu.minor, gpu.pci_bus_id) == (uuid(0), 0, 0, "00000000:18:00.0")
    assert (gpu.name, gpu.state, gpu.error) == ("NVIDIA H100 80GB HBM3", GpuState.OK, "")
    read = gpu.readings
    assert (read.memory_total_bytes, read.memory_used_bytes, read.memory_free_bytes) == (
        80 * GIB,
        GIB,
        79 * GIB,
    )
    assert read.memory_reserved_bytes == 1 << 20
    assert (read.utilization_gpu_percent, read.utilization_memory_percent) == (97, 41)
    assert (read.temperature_celsius, read.power_watts, read.power_limit_watts) == (63, 612.345, 700)
    assert read.energy_joules == 5
    assert (read.clock_graphics_mhz, read.clock_sm_mhz, read.clock_memory_mhz) == (1975, 1980, 2619)
    assert read.throttle_reasons == ("sw_power_cap", "sw_thermal_slowdown")
    assert (read.ecc_mode, read.ecc_volatile_corrected, read.ecc_volatile_uncorrected) == (True, 1, 2)
    assert (read.ecc_aggregate_corrected, read.ecc_aggregate_uncorrected) == (3, 4)
    assert (read.retired_pages_single_bit, read.retired_pages_double_bit) == (5, 6)
    assert read.retired_pages_pending is True
    assert (read.remapped_rows_corrected, read.remapped_rows_uncorrected) == (7, 8)
    assert (read.row_remap_pending, read.row_remap_failed) == (True, True)
    assert (read.persistence_mode, read.compute_mode) == (True, "exclusive_process")
    assert (read.mig_mode, read.mig_mode_pending) == (False, False)
    assert (read.nvlinks_active, read.nvlinks_inactive) == (16, 2)
    assert read.unavailable == {}
    assert gpu.processes == ()


OPTIONAL = {
    "DeviceGetUtilizationRates": "utilization_gpu_percent",
    "DeviceGetTemperature": "temperature_celsius",
    "DeviceGetPowerUsage": "power_watts",
    "DeviceGetEnforcedPowerLimit": "power_limit_watts",
    "DeviceGetTotalEnergyConsumption": "energy_joules",
    "DeviceGetClockInfo": "clock_sm_mhz",
    "DeviceGetEccMode": "ecc_mode",
    "DeviceGetTotalEccErrors": "ecc_volatile_uncorrected",
    "DeviceGetRetiredPages": "retired_pages_double_bit",
    "DeviceGetRetiredPagesPendingStatus": "retired_pages_pending",
    "DeviceGetRemappedRows": "remapped_rows_corrected",
    "DeviceGetNvLinkState": "nvlinks_active",
    "DeviceGetMigMode": "mig_mode",
    "DeviceGetPersistenceMode": "persistence_mode",
    "DeviceGetComputeMode": "compute_mode",
    "DeviceGetCurrentClocksEventReasons": "throttle_reasons",
}


@pytest.mark.parametrize("error", [NOT_SUPPORTED, NO_PERMISSION])
@pytest.mark.parametrize(("call", "field"), OPTIONAL.items())
async def test_what_is_not_supported_is_none_with_the_reason(
    stub: Stub, make: Make, call: str, field: str, error: int
) -> None:
    """One value that cannot be had costs nothing but itself."""
    stub.add_gpu(0)
    stub.say(f"fail {call} 0 {error}")
    read = (await one(make)).readings
    assert getattr(read, field) is None
    assert read.unavailable[field] == {3: "Not Supported", 4: "Insufficient Permissions"}[error]
    assert read.memory_used_bytes == GIB


async def test_a_gpu_that_supports_nothing_is_still_there(stub: Stub, make: Make) -> None:
    """An old card gives its UUID, and N/A for all the rest."""
    stub.add_gpu(0)
    stub.say("fail DeviceGetHandleByIndex -1 0", "fail DeviceGetUUID -1 0")
    stub.say("fail DeviceGetCount -2 0", "fail InitWithFlags -2 0", "fail Shutdown -2 0", "fail * 0 3")
    gpu = await one(make)
    assert (gpu.uuid, gpu.name, gpu.processes, gpu.state) == (uuid(0), "", None, GpuState.OK)
    values = {name: getattr(gpu.readings, name) for name in gpu.readings.__slots__ if name != "unavailable"}
    assert set(values.values()) == {None}
    assert gpu.readings.unavailable.keys() >= {*values, "processes"}


@pytest.mark.parametrize("number", [(1 << 64) - 1, (1 << 64) - 2, 1 << 63])
async def test_a_size_that_cannot_be_is_no_size(stub: Stub, make: Make, number: int) -> None:
    """No manifest could hold it, and a dump would fail for it."""
    stub.gpus[0] = f"gpu 0 {uuid(0)} 00000000:18:00.0 {number} 1 NVIDIA"
    stub.add_process(0, 4_000_001, number)
    gpu = await one(make)
    assert gpu.readings.memory_total_bytes is None
    assert [each.memory_bytes for each in gpu.processes or ()] == [None]


@pytest.mark.parametrize("number", [(1 << 32) - 1], ids=["all ones"])
async def test_not_available_is_no_number(stub: Stub, make: Make, number: int) -> None:
    """All ones are NVML's way to say that there is no value."""
    stub.add_gpu(0)
    stub.set(0, power=number, temperature=number)
    read = (await one(make)).readings
    assert (read.power_watts, read.temperature_celsius) == (None, None)
    assert read.unavailable["power_watts"] == "Not Available"


@pytest.mark.parametrize("error", [FUNCTION_NOT_FOUND, VERSION_MISMATCH])
async def test_an_old_library_gives_memory_by_the_first_version(stub: Stub, make: Make, error: int) -> None:
    """Where the library has no second one, or another, total, used and free still come."""
    stub.add_gpu(0)
    stub.say(f"fail DeviceGetMemoryInfo_v2 -1 {error}")
    read = (await one(make)).readings
    assert (read.memory_used_bytes, read.memory_reserved_bytes) == (GIB, None)


async def test_eight_gpus_with_seven_instances_each(stub: Stub, make: Make) -> None:
    """Each MIG device comes by its UUID, below its GPU; utilisation is N/A there, and nothing fails."""
    for index in range(8):
        stub.add_gpu(index)
        stub.add_mig(index)
    found = await make().poll()
    assert [gpu.uuid for gpu in found.gpus] == [uuid(index) for index in range(8)]
    uuids = [each.uuid for gpu in found.gpus for each in gpu.instances]
    assert uuids == [mig_uuid(index, slot) for index in range(8) for slot in range(7)]
    for gpu in found.gpus:
        assert gpu.readings.mig_mode is True
        assert gpu.readings.utilization_gpu_percent is None
        assert gpu.readings.unavailable["utilization_gpu_percent"] == "Not Supported"
        assert {each.profile for each in gpu.instances} == {"1g.10gb"}
        assert [each.memory_used_bytes for each in gpu.instances] == [slot << 20 for slot in range(7)]
        assert [each.gpu_instance for each in gpu.instances] == list(range(7, 14))


async def test_instances_may_have_gaps_and_go(stub: Stub, make: Make) -> None:
    """MIG numbers are not contiguous after one was destroyed, and one that goes is no fault."""
    stub.add_gpu(0)
    stub.add_mig(0, 3)
    service = make()
    assert len((await service.poll()).gpus[0].instances) == 3
    stub.unsay(next(line for line in stub.lines if line.startswith("mig 0 1 ")))
    found = await service.poll()
    assert [each.uuid for each in found.gpus[0].instances] == [mig_uuid(0, 0), mig_uuid(0, 2)]
    assert list(found.troubled()) == []


async def test_processes_come_once_with_their_kinds_and_instance(stub: Stub, make: Make) -> None:
    """One that computes and draws is one; in MIG mode it belongs to its instance; no memory is None."""
    stub.add_gpu(0)
    stub.add_gpu(1)
    stub.add_mig(1, 2)
    stub.add_process(0, 4_000_001, 5 * GIB)
    stub.add_process(0, 4_000_001, 5 * GIB, "graphics")
    stub.add_process(0, 4_000_002, UNKNOWN_MEMORY, "mps")
    stub.add_process(1, 4_000_003, GIB, gi=8, ci=0)
    whole, parts = (gpu.processes for gpu in (await make().poll()).gpus)
    assert whole is not None
    assert parts is not None

    def bare(process: GpuProcess) -> tuple[object, ...]:
        return process.pid, process.kinds, process.memory_bytes, process.instance

    assert list(map(bare, whole)) == [
        (4_000_001, ("compute", "graphics"), 5 * GIB, ""),
        (4_000_002, ("mps",), None, ""),
    ]
    assert list(map(bare, parts)) == [(4_000_003, ("compute",), GIB, mig_uuid(1, 1))]
    assert {each.owner.reason for each in (*whole, *parts)} == {"no process has this pid"}


@pytest.mark.parametrize("count", [257, 0xFFFFFFFF])
async def test_more_gpus_than_can_be_are_a_broken_nvml(stub: Stub, make: Make, count: int) -> None:
    """A library that lists millions is not asked for each of them."""
    stub.add_gpu(0)
    stub.say(f"many DeviceGetCount -1 {count}")
    snapshot = await make().poll()
    assert (snapshot.state, snapshot.gpus) == (NvmlState.BROKEN, ())
    assert f"{count} GPUs, which cannot be" in snapshot.reason


async def test_more_instances_than_can_be_are_not_asked_for(stub: Stub, make: Make) -> None:
    """Those that are there are found all the same."""
    stub.add_gpu(0)
    stub.add_mig(0)
    stub.say("many DeviceGetMaxMigDeviceCount 0 4294967295")
    assert len((await one(make)).instances) == 7


async def test_a_list_of_processes_that_is_none_is_not_an_empty_one(stub: Stub, make: Make) -> None:
    """Who cannot be told does not look like nobody, though other lists are there."""
    stub.add_gpu(0)
    stub.add_process(0, 4_000_001, kind="graphics")
    with stub.saying("many DeviceGetComputeRunningProcesses 0 2147483648"):
        gpu = await one(make)
    assert (gpu.state, gpu.processes) == (GpuState.OK, None)
    assert gpu.readings.unavailable["processes"] == "IndexError"
    stub.say("fail DeviceGetMPSComputeRunningProcesses 0 13", "fail DeviceGetComputeRunningProcesses 0 999")
    assert (await one(make)).readings.unavailable["processes"] == "Unknown Error"


@pytest.mark.parametrize("text", ["GPU", "none", "GPU-\x1b[2J", "GPU-" + "a" * 91])
async def test_a_uuid_that_is_none_keys_nothing(stub: Stub, make: Make, text: str) -> None:
    """What is no UUID becomes the key of nothing: that GPU has failed."""
    stub.add_gpu(0)
    stub.add_gpu(1, uuid_=text)
    first, second = (await make().poll()).gpus
    assert (first.uuid, first.state) == (uuid(0), GpuState.OK)
    assert (second.uuid, second.state) == ("", GpuState.FAILED)
    assert second.error.isprintable()


async def test_texts_of_the_driver_are_harmless(stub: Stub, make: Make) -> None:
    """A name with control characters steers no terminal."""
    stub.add_gpu(0, name="NVIDIA \x1b[2J\x07 X")
    assert (await one(make)).name == r"NVIDIA \x1b[2J\x07 X"


def test_nothing_is_asked_before_a_start() -> None:
    """A call on a library that is not up says so; it does not crash in it."""
    with pytest.raises(NvmlError, match="not up"):
        Nvml().count()


def test_the_stand_in_has_every_process_struct_of_the_binding() -> None:
    """The sizes that nvidia-ml-py has are those that the stand-in asserts when it is built."""
    import ctypes

    import pynvml

    asserted = dict(re.findall(r"sizeof\((nvml\w+)_t\) == (\d+)", Path(SOURCE).read_text()))
    structs = {
        "nvmlProcessInfo": pynvml.c_nvmlProcessInfo_v3_t,
        "nvmlMemory_v2": pynvml.c_nvmlMemory_v2_t,
        "nvmlPciInfo": pynvml.nvmlPciInfo_t,
        "nvmlEventData": pynvml.c_nvmlEventData_t,
    }
    assert {name: str(ctypes.sizeof(struct)) for name, struct in structs.items()} == asserted
    assert NONE == 0xFFFFFFFF
