"""Which GPU takes the place of which, and what the gate says of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from hibernode.artifact.manifest import CudaFacts, CudaProcessFacts, GpuFacts
from hibernode.criu.options import NO_PLUGINS
from hibernode.gpu.cuda import CudaError
from hibernode.gpu.devicemap import GpuHere, Here, findings, map_text, match
from hibernode.gpu.here import choose, of_node
from hibernode.gpu.state import (
    Allocation,
    Gpu,
    GpuState,
    NvmlState,
    Owner,
    OwnerKind,
    Readings,
    Snapshot,
    Versions,
)
from hibernode.gpu.thaw import Thaw, plan, restored_processes
from hibernode.host import procfs
from hibernode.restore_options import restore_options
from hibernode.settings import GpuSettings, Settings
from hibernode.workload import Finding, Verdict
from tests.unit.artifact_kit import manifest

GIB = 1 << 30
H100, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"
DRIVER = "580.65.06"


def was(*names: str, model: str = H100, memory: int = 80 * GIB) -> tuple[GpuFacts, ...]:
    """List GPUs of a manifest."""
    return tuple(GpuFacts(uuid=f"GPU-{name}", model=model, memory_bytes=memory) for name in names)


def here(*names: str, model: str = H100, memory: int = 80 * GIB, **more: Any) -> tuple[GpuHere, ...]:
    """List GPUs that are there."""
    return tuple(GpuHere(f"GPU-{name}", model, memory, **more) for name in names)


def facts(gpus: tuple[GpuFacts, ...], **changes: Any) -> CudaFacts:
    """Write what a manifest has of CUDA."""
    processes = (CudaProcessFacts(ns_pid=100), CudaProcessFacts(ns_pid=101))
    given: dict[str, Any] = {"strategy": "cuda-checkpoint", "driver": DRIVER, "gpus": gpus}
    return CudaFacts(**{"processes": processes, **given, **changes})


def rows_of(
    cuda: CudaFacts, gpus: tuple[GpuHere, ...], *, driver: str = DRIVER, given: bool = True, why: str = ""
) -> dict[str, Finding]:
    """Run the rows."""
    found = findings(cuda, {100, 101, 102}, Here(driver, gpus, "container c", given, why))
    rows = {row.check.removeprefix("restore."): row for row in found}
    assert len(rows) == len(found)
    return rows


def failing(rows: dict[str, Finding]) -> dict[str, str]:
    """Give what the failing rows have found; the map fails with any of the others."""
    failed = {check: row.found for check, row in rows.items() if row.verdict is Verdict.FAIL}
    assert all(rows[check].remedy and rows[check].reason == "RestoreIncompatible" for check in failed)
    return {check: found for check, found in failed.items() if check != "gpu_map"}


@pytest.mark.parametrize(
    ("then", "now", "text"),
    [
        pytest.param(was("a"), here("a"), "", id="the same GPU"),
        pytest.param(was("a", "b"), here("b", "a"), "", id="the same GPUs in another order"),
        pytest.param(was("a"), here("x"), "GPU-a=GPU-x", id="another GPU"),
        pytest.param(was("a", "b"), here("x", "y"), "GPU-a=GPU-x,GPU-b=GPU-y", id="by order"),
        pytest.param(
            was("a", "b"), here("x", "a"), "GPU-a=GPU-a,GPU-b=GPU-x", id="one is there itself: both are named"
        ),
        pytest.param(
            (*was("a"), *was("b", model=A100)),
            (*here("x", model=A100), *here("y")),
            "GPU-a=GPU-y,GPU-b=GPU-x",
            id="by model, then by order",
        ),
        pytest.param(
            (*was("big", memory=90 * GIB), *was("small")),
            (*here("x"), *here("y", memory=90 * GIB)),
            "GPU-big=GPU-y,GPU-small=GPU-x",
            id="one with enough memory",
        ),
    ],
)
def test_each_gpu_has_its_successor(then: tuple[GpuFacts, ...], now: tuple[GpuHere, ...], text: str) -> None:
    """The GPU itself, else the first free one of its model that is large enough; identity needs no map."""
    found = match(then, Here(DRIVER, now, given=True))
    assert found.whole
    assert map_text(found.pairs) == text
    rows = rows_of(facts(then), now)
    assert {row.verdict for row in rows.values()} == {Verdict.OK}
    assert rows["gpu_map"].found == (text or "each is there itself")


@pytest.mark.parametrize(
    ("then", "now", "check", "words"),
    [
        pytest.param(
            was("a", "b"), here("a"), "gpu_count", ("2 GPUs then, 1 now", "gone: GPU-b"), id="fewer"
        ),
        pytest.param(
            was("a"),
            here("x", "y"),
            "gpu_count",
            ("1 GPUs then, 2 now", "gone: GPU-a"),
            id="more, and not itself",
        ),
        pytest.param(was("a"), (), "gpu_count", ("1 GPUs then, 0 now (none)",), id="none"),
        pytest.param(
            was("a", "a"), here("a", "x"), "gpu_count", ("lists GPU-a twice",), id="FC-14: one twice"
        ),
        pytest.param(was("a"), here("x", "x"), "gpu_count", ("NVML lists GPU-x twice",), id="one twice here"),
        pytest.param(was("a"), here("x", model=A100), "gpu_model", (H100, A100), id="FC-14: another model"),
        pytest.param(
            was("a", model=""), here("x"), "gpu_model", ("no known model", H100), id="a model nobody knows"
        ),
        pytest.param(was("a"), here("a", model=A100), "gpu_model", (H100, A100), id="a forged model"),
        pytest.param(
            was("a"),
            here("x", memory=40 * GIB),
            "gpu_memory",
            ("80.0 GiB", "40.0 GiB"),
            id="FC-14: less memory",
        ),
        pytest.param(
            was("a"),
            here("a", memory=40 * GIB),
            "gpu_memory",
            ("80.0 GiB", "40.0 GiB"),
            id="itself, with less",
        ),
        pytest.param(
            was("a"), here("a", mig=True), "gpu_usable", ("GPU-a is in MIG mode",), id="FC-22: MIG is on"
        ),
        pytest.param(
            was("a"), here("x", mig=True), "gpu_usable", ("GPU-x: in MIG mode",), id="the only other has MIG"
        ),
        pytest.param(
            was("a"), here("a", trouble="lost: x"), "gpu_usable", ("GPU-a: lost: x",), id="it is lost"
        ),
        pytest.param(
            (GpuFacts(uuid="MIG-1", model=H100),),
            here("a"),
            "gpu_usable",
            ("MIG-1 was a MIG device",),
            id="a MIG device",
        ),
        *(
            pytest.param(
                (GpuFacts(uuid=bad, model=H100),),
                here("a"),
                "gpu_usable",
                ("is no UUID",),
                id=f"hostile: {bad[:12]!a}",
            )
            for bad in ("", "GPU-a=GPU-b", "GPU-a,GPU-b", "GPU-" + "a" * 91, "--action", "GPU-\n", "GPU-٣")
        ),
    ],
)
def test_what_has_no_successor_is_refused_by_name(
    then: tuple[GpuFacts, ...], now: tuple[GpuHere, ...], check: str, words: tuple[str, ...]
) -> None:
    """The row names the GPU and both values, and there is no map."""
    rows = rows_of(facts(then), now)
    found = failing(rows)
    assert check in found
    for word in words:
        assert word in found[check]
    assert rows["gpu_map"].verdict is Verdict.FAIL
    assert rows["gpu_map"].found == "no map"


def test_a_process_of_the_node_takes_of_all_gpus() -> None:
    """Nobody has given it a number of them, so more are no difference."""
    assert failing(rows_of(facts(was("a")), here("x", "y"), given=False)) == {}


def test_more_gpus_are_no_harm_where_the_workers_own_are_among_them() -> None:
    """A privileged container sees all."""
    assert failing(rows_of(facts(was("b")), here("a", "b", "c"))) == {}


@pytest.mark.parametrize(
    ("then", "now", "verdict"),
    [
        (DRIVER, DRIVER, Verdict.OK),
        ("580.65.06", "580.82.07", Verdict.WARN),
        ("580.82.07", "580.65.06", Verdict.FAIL),
        ("570.86.10", "580.65.06", Verdict.FAIL),
        ("590.44.01", "580.65.06", Verdict.FAIL),
        ("", DRIVER, Verdict.SKIP),
        (DRIVER, "", Verdict.SKIP),
        ("580.x", DRIVER, Verdict.SKIP),
        ("9" * 9999, DRIVER, Verdict.SKIP),
    ],
)
def test_the_driver_must_be_of_the_same_branch_and_no_older(then: str, now: str, verdict: Verdict) -> None:
    """What a driver has saved is for itself; what cannot be compared is skipped."""
    assert rows_of(facts(was("a"), driver=then), here("a"), driver=now)["gpu_driver"].verdict is verdict


@pytest.mark.parametrize(
    ("changes", "driver", "words"),
    [
        ({"strategy": "criu-plugin"}, DRIVER, "plugin"),
        ({"driver": "570.86.10"}, "570.86.10", ">= 580"),
    ],
)
def test_a_map_is_refused_where_nobody_can_use_it(changes: dict[str, Any], driver: str, words: str) -> None:
    """CRIU's plugin has no map, nor has a driver before 580; the GPUs themselves are well with both."""
    row = rows_of(facts(was("a"), **changes), here("x"), driver=driver)["gpu_map"]
    assert row.verdict is Verdict.FAIL
    assert words in row.expected
    assert "GPU-a=GPU-x" in row.found
    assert rows_of(facts(was("a"), **changes), here("a"), driver=driver)["gpu_map"].verdict is Verdict.OK


def test_without_nvml_nothing_is_compared_and_nothing_is_guessed() -> None:
    """The row is skipped, with the reason; so it is where the manifest names no GPU."""
    row = rows_of(facts(was("a")), (), driver="", why="NVML is absent: no library")["gpu_map"]
    assert (row.verdict, row.found) == (Verdict.SKIP, "NVML is absent: no library")
    assert rows_of(facts(()), here("a"))["gpu_map"].verdict is Verdict.SKIP


@pytest.mark.parametrize(
    ("pids", "words"),
    [
        ((100, 999), "pid 999 is not in the tree"),
        ((100, 100), "pid 100 is there twice"),
        ((), "none is named"),
    ],
)
def test_processes_that_are_not_the_trees_are_refused(pids: tuple[int, ...], words: str) -> None:
    """A manifest cannot have a program called for a process that is none of its own."""
    processes = tuple(CudaProcessFacts(ns_pid=pid) for pid in pids)
    assert words in failing(rows_of(facts(was("a"), processes=processes), here("a")))["cuda_processes"]


# whose GPUs -----------------------------------------------------------------------------------------------

NODE = Snapshot(
    NvmlState.UP,
    versions=Versions(DRIVER),
    gpus=tuple(
        Gpu(f"GPU-{index}", index, name=H100, minor=index, readings=Readings(memory_total_bytes=GIB))
        for index in range(4)
    ),
    allocations=(Allocation("ns", "pod", "worker", "nvidia.com/gpu", "GPU-3"),),
)
POD = Owner(OwnerKind.POD, namespace="ns", pod="pod", container="worker", container_id="c" * 64)
OTHER = Owner(OwnerKind.CONTAINER, container_id="d" * 64)
ALL = frozenset({"/dev/null", "/dev/nvidiactl", *(f"/dev/nvidia{index}" for index in range(4))})


@pytest.mark.parametrize(
    ("devices", "owner", "visible", "uuids"),
    [
        pytest.param({"/dev/nvidia1", "/dev/nvidiactl"}, OTHER, "", "1", id="its device nodes"),
        pytest.param({"/dev/nvidia1"}, OTHER, "all", "1", id="an image that says all"),
        pytest.param({"/dev/nvidia1"}, OTHER, "void", "1", id="CDI"),
        pytest.param({"/dev/nvidia1"}, OTHER, "GPU-2", "1", id="a name without its node"),
        pytest.param(ALL, OTHER, "all", "0123", id="privileged, nobody knows more"),
        pytest.param(ALL, OTHER, "GPU-2,GPU-0", "02", id="privileged, by UUID, in NVML's order"),
        pytest.param(ALL, OTHER, "1, 3", "13", id="privileged, by index"),
        pytest.param(ALL, POD, "GPU-2", "3", id="privileged, the kubelet knows"),
        pytest.param({"/dev/nvidia1"}, POD, "", "1", id="a kubelet that says otherwise"),
        pytest.param(frozenset(), POD, "all", "", id="no node"),
    ],
)
def test_a_container_has_the_gpus_of_its_device_nodes(
    devices: set[str], owner: Owner, visible: str, uuids: str
) -> None:
    """What the kubelet has given, or the variable names, chooses among them."""
    found = choose(NODE, devices, owner, visible)
    assert [gpu.uuid for gpu in found.gpus] == [f"GPU-{number}" for number in uuids]
    assert found.given
    assert found.driver == DRIVER


def test_a_node_has_all_gpus_with_what_is_wrong_with_them() -> None:
    """A lost one is there and cannot be used."""
    lost = Gpu("GPU-9", 4, GpuState.LOST, "GPU is lost")
    found = of_node(Snapshot(NvmlState.UP, versions=Versions(DRIVER), gpus=(*NODE.gpus, lost)))
    assert [gpu.uuid for gpu in found.gpus] == [*(gpu.uuid for gpu in NODE.gpus), "GPU-9"]
    assert found.gpus[-1].trouble == "lost: GPU is lost"
    assert not found.given


@pytest.mark.parametrize("state", [NvmlState.ABSENT, NvmlState.BROKEN, NvmlState.STUCK])
def test_an_nvml_that_does_not_answer_is_said(state: NvmlState) -> None:
    """It is no node without GPUs."""
    assert of_node(Snapshot(state, "words")).why == f"NVML is {state.value}: words"


# the plan of a restore ------------------------------------------------------------------------------------


def planned(cuda: CudaFacts | None, settings: GpuSettings) -> Thaw:
    """Plan a restore of a manifest with these facts."""
    return plan(manifest(cuda=None if cuda is None else cuda.model_dump()), settings, Here(DRIVER, here("x")))


def test_a_tree_without_cuda_needs_nothing() -> None:
    """No row, and nobody to wake."""
    assert planned(None, GpuSettings()) == Thaw()


def test_a_tool_that_is_missing_is_a_row() -> None:
    """With its own reason, which is that of the refusal."""
    thaw = planned(facts(was("a")), GpuSettings(cuda_checkpoint="/no/such/cuda-checkpoint"))
    assert thaw.tool is None
    assert (thaw.findings[-1].check, thaw.findings[-1].reason) == (
        "restore.cuda_tool",
        "CudaCheckpointMissing",
    )


def test_crius_plugin_wakes_what_it_has_frozen(tmp_path: Path) -> None:
    """CRIU gets its directory, which must have it; the agent wakes nobody, and others load no plugin."""
    cuda = facts(was("x"), strategy="criu-plugin")
    settings = Settings(gpu=GpuSettings(criu_plugins=tmp_path, cuda_checkpoint="/no/such/cuda-checkpoint"))
    thaw = planned(cuda, settings.gpu)
    assert (thaw.findings[-1].verdict, thaw.tool) == (Verdict.FAIL, None)
    for strategy, libdir in (("criu-plugin", str(tmp_path)), ("cuda-checkpoint", NO_PLUGINS)):
        image = manifest(cuda=cuda.model_copy(update={"strategy": strategy}).model_dump())
        assert restore_options(image, settings, tmp_path, None).libdir == libdir


# the restored tree ----------------------------------------------------------------------------------------


def test_restored_processes_are_found_by_pid_and_name() -> None:
    """A pid that is not below the root, and another name, are told."""
    pid, comm = os.getpid(), Path("/proc/self/comm").read_text().strip()
    inner = procfs.read_status(pid).ns_pids[-1]
    (found,) = restored_processes(facts((), processes=(CudaProcessFacts(ns_pid=inner, comm=comm),)), pid)
    assert (found.pid, found.ns_pid, found.comm) == (pid, inner, comm)
    for wrong, words in (
        (CudaProcessFacts(ns_pid=1 << 22, comm=comm), "has no process with pid 4194304"),
        (CudaProcessFacts(ns_pid=inner, comm="other"), f"was other and is {comm}"),
    ):
        with pytest.raises(CudaError, match=words) as caught:
            restored_processes(facts((), processes=(wrong,)), pid)
        assert caught.value.reason == "CudaProcessMissing"
