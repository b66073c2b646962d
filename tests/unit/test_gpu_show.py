"""What is shown of the GPUs: metrics by dcgm-exporter's labels, the command, the rows of doctor."""

from __future__ import annotations

import csv
import json
import re
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from hibernode.config import load
from hibernode.errors import UsageError
from hibernode.gpu.metrics import metrics
from hibernode.gpu.state import (
    Allocation,
    Gpu,
    GpuProcess,
    GpuState,
    Happened,
    MigInstance,
    NvmlState,
    Owner,
    OwnerKind,
    Readings,
    Snapshot,
    Versions,
)
from hibernode.metrics import Metrics
from hibernode.settings import FATAL_XIDS
from tests.gpu.fixtures import library
from tests.gpu.kit import GIB, Stub, mig_uuid, uuid
from tests.unit.cli_kit import HIBERNODE, Machine, machine

__all__ = ["library", "machine"]  # fixtures
pytestmark = pytest.mark.gpu

READ = Readings(
    memory_total_bytes=80 * GIB,
    memory_used_bytes=GIB,
    memory_free_bytes=79 * GIB,
    utilization_gpu_percent=50,
    power_watts=70.5,
    energy_joules=5.0,
    clock_sm_mhz=1980,
    throttle_reasons=("gpu_idle",),
    ecc_volatile_corrected=1,
    ecc_volatile_uncorrected=2,
    nvlinks_active=18,
    nvlinks_inactive=0,
)
MIG = MigInstance(mig_uuid(0, 0), 7, 0, "1g.10gb", 16, 10 * GIB, GIB, 9 * GIB)
MINE = Owner(OwnerKind.POD, pod_uid="u", namespace="ns", pod="worker-0", container="main")
SNAPSHOT = Snapshot(
    NvmlState.UP,
    taken_at=1000.0,
    seconds=0.01,
    versions=Versions("570", "13", "13.0"),
    gpus=(
        Gpu(
            uuid(0),
            0,
            name="NVIDIA H100",
            pci_bus_id="00000000:18:00.0",
            minor=3,
            readings=READ,
            instances=(MIG,),
            processes=(
                GpuProcess(1, ("compute",), GIB, MIG.uuid, MINE),
                GpuProcess(2, ("compute",), GIB, MIG.uuid, MINE),
                GpuProcess(3, ("compute",), None, "", Owner(OwnerKind.UNKNOWN, "gone")),
            ),
        ),
        Gpu(uuid(1), 1, GpuState.LOST, "GPU is lost", name="NVIDIA H100"),
    ),
    happened=(Happened(uuid(0), "xid", 31, 2, 900.0, 950.0), Happened(uuid(0), "clock", 0, 7, 1.0, 2.0)),
    fatal_xids=FATAL_XIDS,
    allocations=(Allocation("ns", "worker-0", "main", "nvidia.com/mig-1g.10gb", MIG.uuid),),
)


async def rendered(snapshot: Snapshot) -> dict[str, dict[frozenset[tuple[str, str]], float]]:
    """Render and parse: values by labels by name."""
    exporter = Metrics()
    exporter.add_collector("gpu", lambda: metrics(snapshot))
    found: dict[str, dict[frozenset[tuple[str, str]], float]] = {}
    for family in text_string_to_metric_families((await exporter.render()).decode()):
        if re.match("hibernode_(gpu|nvml)_", family.name):
            assert family.documentation.endswith(".")
            assert not re.search(r"_(ms|mhz|mib|percent|count)$", family.name)
            for sample in family.samples:
                found.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
    return found


async def test_metrics_have_the_labels_that_dashboards_know() -> None:
    """A GPU's are dcgm-exporter's; an instance has the GPU's UUID with its profile and id; base units."""
    found = await rendered(SNAPSHOT)
    gpu = {
        "gpu": "0",
        "UUID": uuid(0),
        "pci_bus_id": "00000000:18:00.0",
        "device": "nvidia3",
        "modelName": "NVIDIA H100",
    }.items()
    whole = frozenset({*gpu, ("GPU_I_PROFILE", ""), ("GPU_I_ID", "")})
    part = frozenset({*gpu, ("GPU_I_PROFILE", "1g.10gb"), ("GPU_I_ID", "7")})
    assert found["hibernode_gpu_memory_total_bytes"] == {whole: 80 * GIB, part: 10 * GIB}
    assert found["hibernode_gpu_utilization_ratio"] == {frozenset(gpu): 0.5}
    assert found["hibernode_gpu_sm_clock_hertz"] == {frozenset(gpu): 1.98e9}
    assert found["hibernode_gpu_energy_joules_total"] == {frozenset(gpu): 5.0}
    pods = {("namespace", "ns"), ("pod", "worker-0"), ("container", "main")}
    nobody = {("namespace", ""), ("pod", ""), ("container", "")}
    assert found["hibernode_gpu_container_memory_bytes"] == {part | pods: 2 * GIB, whole | nobody: 0}
    assert found["hibernode_gpu_allocated"] == {frozenset({("UUID", MIG.uuid), *pods}): 1}
    assert found["hibernode_gpu_xid_total"] == {frozenset({("UUID", uuid(0)), ("xid", "31")}): 2}
    assert list(found["hibernode_gpu_xid_last_timestamp_seconds"].values()) == [950.0]
    assert found["hibernode_gpu_events_total"] == {frozenset({("UUID", uuid(0)), ("event", "clock")}): 7}
    states = {dict(labels)["UUID"]: dict(labels)["state"] for labels in found["hibernode_gpu_state"]}
    assert states == {uuid(0): "ok", uuid(1): "lost"}
    assert found["hibernode_nvml_up"] == {frozenset(): 1}
    assert "hibernode_gpu_temperature_celsius" not in found  # not supported is no sample, and no zero


async def test_what_is_old_is_left_out() -> None:
    """A gauge that repeats itself looks alive; counters stay, and the time of the last success."""
    found = await rendered(replace(SNAPSHOT, state=NvmlState.STUCK, stale_since=1000.0))
    assert found["hibernode_nvml_up"] == {frozenset(): 0}
    assert found["hibernode_nvml_last_success_timestamp_seconds"] == {frozenset(): 1000.0}
    assert {dict(labels)["state"] for labels in found["hibernode_gpu_state"]} == {"stale"}
    assert "hibernode_gpu_xid_total" in found
    assert not found.keys() & {"hibernode_gpu_power_watts", "hibernode_gpu_container_memory_bytes"}


# settings ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "codes"), [("48, 79", (48, 79)), ("79", (79,)), ("", ())])
def test_fatal_xids_are_a_list_of_numbers(text: str, codes: tuple[int, ...]) -> None:
    """With commas between them, as the environment and flags write it; none is a choice too."""
    loaded = load(environ={}, flags=[("gpu.fatal_xids", text)])
    assert loaded.settings.gpu.fatal_xids == codes
    (option,) = (option for option in loaded.options() if option.key == "gpu.fatal_xids")
    assert option.value == ", ".join(map(str, codes))


@pytest.mark.parametrize("text", ["all", "48;79", "-1", "4.5"])
def test_what_is_no_number_is_no_xid(text: str) -> None:
    """The key and the form are named."""
    with pytest.raises(UsageError, match=r"gpu\.fatal_xids"):
        load(environ={}, flags=[("gpu.fatal_xids", text)])


# the command ------------------------------------------------------------------------------------------


@pytest.fixture
def node(machine: Machine, library: Path, tmp_path: Path) -> tuple[Machine, dict[str, str], Stub]:
    """Give a machine whose commands find two GPUs, the second one in MIG mode."""
    stub = Stub(tmp_path / "nvml.txt", 2)
    stub.add_mig(1, 2)
    return machine, stub.env(library), stub


def test_the_table_shows_gpus_instances_and_processes(node: tuple[Machine, dict[str, str], Stub]) -> None:
    """UUID first, MIG rows below their GPU, N/A where there is no value, and no agent is needed."""
    here, env, stub = node
    with subprocess.Popen(["sleep", "600"]) as sleeper:
        try:
            stub.add_process(0, sleeper.pid, 3 * GIB)
            stub.add_process(1, 4_000_001, GIB, gi=7, ci=0)
            out = here.ok("gpu", **env)
        finally:
            sleeper.kill()
    assert out.startswith("driver 570.86.10, CUDA 13.0, NVML 13.570.86\n")
    lines = out.splitlines()
    (first, second) = (next(line for line in lines if uuid(index) in line) for index in range(2))
    assert "1.0 GiB / 80.0 GiB" in first
    assert "N/A" in second
    below = lines[lines.index(second) + 1]
    assert mig_uuid(1, 0) in below
    assert "MIG 1g.10gb" in below
    assert re.search(rf"\b{sleeper.pid}\b.*sleep.*3\.0 GiB", out)
    assert re.search(rf"{mig_uuid(1, 0)} +4000001 .*unknown: ", out)


def test_csv_has_a_line_for_each_device(node: tuple[Machine, dict[str, str], Stub]) -> None:
    """With nvidia-smi's names, numbers without units, and N/A never blank; also of who cannot be told."""
    here, env, stub = node
    stub.say("fail DeviceGetComputeRunningProcesses 1 999")
    rows = list(csv.DictReader(here.ok("gpu", "-o", "csv", **env).splitlines()))
    assert [row["uuid"] for row in rows] == [uuid(0), uuid(1), mig_uuid(1, 0), mig_uuid(1, 1)]
    assert [row["memory.total [MiB]"] for row in rows] == ["81920", "81920", "10240", "10240"]
    assert [row["utilization.gpu [%]"] for row in rows] == ["0", "N/A", "N/A", "N/A"]
    assert [row["mig.mode.current"] for row in rows] == ["Disabled", "Enabled", "N/A", "N/A"]
    assert [row["mig.parent"] for row in rows] == ["", "", uuid(1), uuid(1)]
    assert [row["processes"] for row in rows] == ["0", "N/A", "N/A", "N/A"]


def test_json_has_all_of_it(node: tuple[Machine, dict[str, str], Stub]) -> None:
    """The same object as the agent gives, with the reasons of what is not there."""
    here, env, stub = node
    stub.say("fail DeviceGetTemperature 0 3")
    data = json.loads(here.ok("gpu", "-o", "json", **env))
    assert (data["kind"], data["state"]) == ("Gpus", "up")
    read = data["gpus"][0]["readings"]
    assert (read["temperatureCelsius"], read["unavailable"]) == (
        None,
        {"temperatureCelsius": "Not Supported"},
    )
    assert "T" in data["takenAt"]


def test_no_driver_is_a_sentence(machine: Machine) -> None:
    """On a node without GPUs the command is no error."""
    assert machine.ok("gpu").startswith("no NVML: ")
    assert machine.ok("gpu", "-o", "csv").startswith("uuid,index,")
    doctor = json.loads(machine.run("doctor", "-o", "json").stdout)
    rows = {row["check"]: row["verdict"] for row in doctor["findings"]}
    assert (rows["node.nvml"], rows["node.gpus"]) == ("skip", "skip")


def test_a_lost_gpu_is_a_row_and_a_warning_of_doctor(node: tuple[Machine, dict[str, str], Stub]) -> None:
    """The rest of the table stands."""
    here, env, stub = node
    stub.say("fail DeviceGetMemoryInfo_v2 0 15")
    out = here.ok("gpu", **env)
    assert "GPU is lost" in out
    assert mig_uuid(1, 1) in out
    doctor = json.loads(here.run("doctor", "-o", "json", **env).stdout)
    rows = {row["check"]: row for row in doctor["findings"]}
    assert rows["node.nvml"]["verdict"] == "ok"
    assert (rows["node.gpus"]["verdict"], rows["node.gpus"]["reason"]) == ("warn", "GpuLost")


def test_watch_goes_on_until_it_is_interrupted(node: tuple[Machine, dict[str, str], Stub]) -> None:
    """It shows it again and again; Ctrl-C ends it without a traceback."""
    here, env, _ = node
    with subprocess.Popen(
        [HIBERNODE, "gpu", "--watch", "0.2"],
        env=here.env(**env, PYTHONUNBUFFERED="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        seen = 0
        for line in process.stdout:
            seen += line.startswith("driver ")
            if seen == 3:
                break
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert "Traceback" not in process.stderr.read()


def test_watch_takes_seconds_that_are_some(node: tuple[Machine, dict[str, str], Stub]) -> None:
    """What nobody can wait for is a usage error, no trace."""
    here, env, _ = node
    for seconds in ("0", "inf", "1e300"):
        assert "is not in the range" in here.refused(2, "gpu", "--watch", seconds, **env)


def test_the_driver_that_hangs_ends_the_command(node: tuple[Machine, dict[str, str], Stub]) -> None:
    """After the deadline it says so; the thread that hangs does not keep the process."""
    here, env, stub = node
    stub.say("hang DeviceGetCount -2")
    out = here.ok("--set", "gpu.deadline_seconds=300ms", "gpu", **env)
    assert "NVML is stuck" in out


def test_a_library_that_cannot_be_loaded_is_no_absent_one(machine: Machine, tmp_path: Path) -> None:
    """A damaged one says that somebody wanted a GPU here; nvidia-ml-py alone would call it not found."""
    (tmp_path / "libnvidia-ml.so.1").write_bytes(b"no library at all")
    out = machine.ok("gpu", LD_LIBRARY_PATH=str(tmp_path))
    assert "NVML is broken: " in out
    assert "file too short" in out or "invalid ELF header" in out


def test_every_metric_is_in_the_document() -> None:
    """Under its whole name, and no other is."""
    text = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text()
    named = set(re.findall(r"`(hibernode_(?:gpu|nvml)_\w+)`", text))
    names = {family.name + "_total" * (family.type == "counter") for family in metrics(SNAPSHOT)}
    assert named == names
