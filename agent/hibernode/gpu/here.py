"""Which GPUs a restore may use: asked once, before it, off the event loop and with the deadlines of NVML.

For a process of the node these are all that NVML lists. For a container they are those whose device nodes
(``/dev/nvidia0`` ...) it has: all runtimes make them, the older hook, CDI and DRA alike, and the kernel lets
it use no others. A privileged container has all nodes; of those count what the kubelet's PodResources say
that it was given, or else those that ``NVIDIA_VISIBLE_DEVICES`` names by UUID or index. The variable alone is
no answer: images set it to ``all``, and with CDI it is ``void``.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from hibernode.gpu.devicemap import GpuHere, Here
from hibernode.gpu.owners import Owners, boot_ticks
from hibernode.gpu.state import Gpu, NvmlState, Owner, Snapshot
from hibernode.host import nvidia, procfs

VISIBLE: Final = "NVIDIA_VISIBLE_DEVICES"


def of_node(snapshot: Snapshot) -> Here:
    """Take all that the node has."""
    if why := unknown(snapshot):
        return Here(why=why)
    return Here(snapshot.versions.driver or "", tuple(map(_here, snapshot.gpus)))


def of_container(snapshot: Snapshot, pid: int, devices: Collection[str]) -> Here:
    """Take what a container has whose init is ``pid``; ``devices`` are its device nodes below /dev.

    Blocks on /proc of a container, which may hang.
    """
    if why := unknown(snapshot):
        return Here(why=why, given=True)
    owner = Owners().look([pid], boot_ticks())[pid]
    return choose(snapshot, devices, owner, procfs.environ(pid).get(VISIBLE, ""))


def choose(snapshot: Snapshot, devices: Collection[str], owner: Owner, visible: str) -> Here:
    """Pick a container's GPUs out of the node's, see the module's text."""
    there = [gpu for gpu in snapshot.gpus if f"{nvidia.DEVICES}{gpu.minor}" in devices]
    given = {
        each.device
        for each in snapshot.allocations
        if (each.namespace, each.pod, each.container) == (owner.namespace, owner.pod, owner.container)
    }
    names = {name.strip() for name in visible.split(",")}
    named = [gpu for gpu in there if names & {gpu.uuid, str(gpu.index)}]
    granted = [gpu for gpu in there if gpu.uuid in given]
    gpus, how = there, "its device nodes"
    if granted:
        gpus, how = granted, "as the kubelet says"
    elif named:
        gpus, how = named, f"as {VISIBLE} says"
    whose = f"container {owner.container or owner.container_id[:12] or 'of the restore'} ({how})"
    return Here(snapshot.versions.driver or "", tuple(map(_here, gpus)), whose, given=True)


def unknown(snapshot: Snapshot) -> str:
    """Say why nothing is known of the GPUs; empty where all is."""
    if snapshot.state is NvmlState.UP:
        return ""
    return f"NVML is {snapshot.state.value}: {snapshot.reason or 'no reason given'}"


def _here(gpu: Gpu) -> GpuHere:
    trouble = f"{gpu.state.value}: {gpu.error}" if gpu.state != "ok" else ""
    memory = gpu.readings.memory_total_bytes or 0
    return GpuHere(gpu.uuid or f"index {gpu.index}", gpu.name, memory, bool(gpu.readings.mig_mode), trouble)
