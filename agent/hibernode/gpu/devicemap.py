"""Which GPU takes the place of which: the manifest's GPUs against those that a restore may use. Pure.

A GPU that is there is its own successor. For each of the others the first free one of its model, in NVML's
order, steps in. Nothing is guessed: a model or a UUID that is not known has no successor. The manifest is
hostile, so its UUIDs pass a gate before they are shown to a program.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from hibernode.artifact.manifest import CudaFacts, GpuFacts
from hibernode.compat import row
from hibernode.preflight.rows import listed, size
from hibernode.workload import Finding, Verdict

MAP_DRIVER: Final = 580
"""The first driver whose cuda-checkpoint has ``--device-map``: NVIDIA/cuda-checkpoint#18."""

WHOLE_GPU: Final = re.compile(r"GPU-[0-9A-Za-z][0-9A-Za-z-]{0,89}", re.ASCII)
"""A UUID as it may stand in a map, which has ``=`` and ``,`` of its own."""

_VERSION: Final = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6}){0,3}", re.ASCII)


@dataclass(frozen=True, slots=True)
class GpuHere:
    """A GPU that the restore may use. ``memory_bytes``: 0 where NVML does not tell; ``trouble``: why not."""

    uuid: str
    model: str = ""
    memory_bytes: int = 0
    mig: bool = False
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Here:
    """The GPUs here, in NVML's order. ``driver`` is empty where nobody knows, ``why`` says then why.

    ``whose``: who has them, for people. ``given``: they were given to the worker's new container, so that
    it must have as many as the old one; a process of the node takes of all that there are.
    """

    driver: str = ""
    gpus: tuple[GpuHere, ...] = ()
    whose: str = "the node"
    given: bool = False
    why: str = ""


@dataclass(frozen=True, slots=True)
class Match:
    """``pairs``: old UUID to new UUID; the others say by check what is in the way, both values in each."""

    pairs: Mapping[str, str]
    count: tuple[str, ...] = ()
    usable: tuple[str, ...] = ()
    model: tuple[str, ...] = ()
    memory: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether every GPU has its successor and nothing stands against it."""
        return not (self.count or self.usable or self.model or self.memory)


def match(then: Sequence[GpuFacts], here: Here) -> Match:
    """Find the successor of each GPU of the manifest."""
    there = {gpu.uuid: gpu for gpu in here.gpus}
    known = {gpu.uuid: gpu for gpu in then}
    chosen = {uuid: there[uuid] for uuid in known if uuid in there}
    free = [gpu for gpu in there.values() if gpu.uuid not in chosen and not gpu.trouble and not gpu.mig]
    model: list[str] = []
    memory: list[str] = []
    for gpu in known.values():
        if gpu.uuid in chosen:
            continue
        like = [each for each in free if gpu.model and each.model == gpu.model]
        fitting = [each for each in like if each.memory_bytes >= gpu.memory_bytes]
        if fitting:
            chosen[gpu.uuid] = fitting[0]
            free.remove(fitting[0])
        elif like:
            memory.append(_less(gpu, like[0]))
        elif free:
            others = listed(f"{each.uuid} is {each.model or 'of no known model'}" for each in free)
            model.append(f"{gpu.uuid} was {gpu.model or 'of no known model'}; free here: {others}")
    for uuid, each in chosen.items():
        gpu = known[uuid]
        if (
            gpu.model and each.model and gpu.model != each.model
        ):  # only under the same UUID: a forged manifest
            model.append(f"{uuid} was {gpu.model} and is {each.model}")
        if each.memory_bytes and each.memory_bytes < gpu.memory_bytes:
            memory.append(_less(gpu, each))
    return Match(
        {uuid: chosen[uuid].uuid for uuid in known if uuid in chosen},
        tuple(_miscounted(then, known, there, here)),
        tuple(_unusable(known, chosen, here)),
        tuple(model),
        tuple(memory),
    )


def _less(gpu: GpuFacts, here: GpuHere) -> str:
    return f"{gpu.uuid} had {size(gpu.memory_bytes)}, {here.uuid} has {size(here.memory_bytes)}"


def _miscounted(
    then: Sequence[GpuFacts], known: Collection[str], there: Collection[str], here: Here
) -> Iterator[str]:
    """Say where the numbers differ; more than the worker had are no harm while its own are among them."""
    if len(known) != len(then):
        yield f"the manifest lists {listed(_twice([gpu.uuid for gpu in then]))} twice"
    if len(there) != len(here.gpus):
        yield f"NVML lists {listed(_twice([gpu.uuid for gpu in here.gpus]))} twice"
    moved = [uuid for uuid in known if uuid not in there]
    if moved and (len(there) < len(known) or (here.given and len(there) != len(known))):
        yield f"{len(known)} GPUs then, {len(there)} now ({listed(there) or 'none'}); gone: {listed(moved)}"


def _twice(uuids: list[str]) -> list[str]:
    return [uuid for uuid in dict.fromkeys(uuids) if uuids.count(uuid) > 1]


def _unusable(known: Collection[str], chosen: Mapping[str, GpuHere], here: Here) -> Iterator[str]:
    for uuid in known:
        if uuid.startswith("MIG-"):
            yield f"{uuid} was a MIG device, and none of them can be restored"
        elif WHOLE_GPU.fullmatch(uuid) is None:
            yield f"{uuid[:100]!a} is no UUID of a GPU"
    for each in chosen.values():
        if each.mig:
            yield f"{each.uuid} is in MIG mode"
        if each.trouble:
            yield f"{each.uuid}: {each.trouble}"
    if len(chosen) < len(known):  # a GPU that cannot be one's successor is of interest where one has none
        taken = {each.uuid for each in chosen.values()}
        for each in here.gpus:
            if each.uuid not in taken and (each.mig or each.trouble):
                yield f"{each.uuid}: {each.trouble or 'in MIG mode'}"


def map_text(pairs: Mapping[str, str]) -> str:
    """Write what cuda-checkpoint gets as ``--device-map``: all pairs, or nothing where none has moved."""
    if all(old == new for old, new in pairs.items()):
        return ""
    return ",".join(f"{old}={new}" for old, new in pairs.items())


# the gate's rows --------------------------------------------------------------------------------------


def findings(cuda: CudaFacts, tree: Collection[int], here: Here) -> list[Finding]:
    """Compare what the tree had with what is here; one row a check. ``tree``: pids of the manifest's tree."""
    rows = [_processes(cuda, tree), _driver(cuda.driver, here)]
    if here.why or not cuda.gpus:
        why = here.why or "the manifest names no GPU: NVML did not tell when it was made"
        return [*rows, row("restore.gpu_map", Verdict.SKIP, _named(cuda.gpus), why, "compare by hand")]
    found = match(cuda.gpus, here)
    like = "restore on GPUs like those of the dump"
    rows += [
        _judged("restore.gpu_count", found.count, _named(cuda.gpus), "give the container as many"),
        _judged("restore.gpu_usable", found.usable, "whole GPUs that answer", "reset it, or turn MIG off"),
        _judged("restore.gpu_model", found.model, "the same models", like),
        _judged("restore.gpu_memory", found.memory, "as much memory", like),
    ]
    return [*rows, _map(cuda, found, here)]


def _named(gpus: Sequence[GpuFacts]) -> str:
    return f"{len(gpus)} GPUs: {listed(gpu.uuid for gpu in gpus)}"


def _judged(check: str, problems: Sequence[str], expected: str, remedy: str) -> Finding:
    verdict = Verdict.FAIL if problems else Verdict.OK
    return row(check, verdict, expected, listed(problems) or "as asked", remedy)


def _processes(cuda: CudaFacts, tree: Collection[int]) -> Finding:
    """See that the manifest's CUDA processes are some of its tree: these are called by their pid."""
    pids = [process.ns_pid for process in cuda.processes]
    wrong = [f"pid {pid} is not in the tree" for pid in pids if pid not in tree]
    wrong += [f"pid {pid} is there twice" for pid in dict.fromkeys(pids) if pids.count(pid) > 1]
    if not pids:
        wrong = ["none is named"]
    return row(
        "restore.cuda_processes",
        Verdict.FAIL if wrong else Verdict.OK,
        "CUDA processes that are in the tree",
        listed(wrong) or f"{len(pids)} processes",
        "take the checkpoint again: this manifest contradicts itself",
    )


def version(text: str) -> tuple[int, ...] | None:
    """Read a driver's version, such as 570.86.10."""
    return tuple(map(int, text.split("."))) if _VERSION.fullmatch(text) else None


def _driver(then: str, here: Here) -> Finding:
    """Compare drivers: the state that one has saved is for itself, or for a later one of its branch."""
    was, now = version(then), version(here.driver)
    if was is None or now is None:
        found = here.driver or here.why or "not known"
        return row("restore.gpu_driver", Verdict.SKIP, then or "not known", found, "compare by hand")
    verdict = Verdict.OK if was == now else Verdict.WARN if was[0] == now[0] and was < now else Verdict.FAIL
    return row(
        "restore.gpu_driver",
        verdict,
        f"driver {then}",
        f"driver {here.driver}",
        "a newer driver of the same branch should do; the same one is sure"
        if verdict is Verdict.WARN
        else "restore on a node with the driver that the checkpoint was made with",
    )


def _map(cuda: CudaFacts, found: Match, here: Here) -> Finding:
    """Show the map, as the tool will get it."""
    text = map_text(found.pairs)
    expected = f"a successor for each GPU, of those of {here.whose}"
    if not found.whole:
        return row("restore.gpu_map", Verdict.FAIL, expected, "no map", "see the rows above")
    if not text:
        return row("restore.gpu_map", Verdict.OK, expected, "each is there itself")
    now = version(here.driver)
    if cuda.strategy == "criu-plugin":
        return row(
            "restore.gpu_map",
            Verdict.FAIL,
            "the GPUs themselves: CRIU's plugin knows no map",
            text,
            "restore on the GPUs of the dump, or dump with the other strategy",
        )
    if now is not None and now[0] < MAP_DRIVER:
        return row(
            "restore.gpu_map",
            Verdict.FAIL,
            f"the GPUs themselves, or a driver >= {MAP_DRIVER} that knows --device-map",
            f"driver {here.driver}, and {text}",
            "restore on the GPUs of the dump, or update the driver on both nodes",
        )
    return row("restore.gpu_map", Verdict.OK, expected, text)
