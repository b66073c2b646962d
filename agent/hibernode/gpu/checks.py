"""What a snapshot means for health, for ``status`` and for ``hibernode doctor``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from hibernode.gpu.events import XID
from hibernode.gpu.state import Gpu, NvmlState, Snapshot, rfc3339
from hibernode.health import Check, DegradedError
from hibernode.preflight.rows import listed
from hibernode.workload import Finding, Verdict

QUIET: Final = (NvmlState.OFF, NvmlState.ABSENT, NvmlState.STARTING)
"""With these there is nothing to see, and nothing wrong."""

FATAL_SECONDS: Final = 3600.0
"""How long a fatal XID makes its GPU one to look at."""


def nvml_trouble(snapshot: Snapshot) -> str:
    """Say what is wrong with NVML as a whole, or nothing."""
    if snapshot.state in QUIET:
        return ""
    if snapshot.state is NvmlState.UP:
        return snapshot.reason or snapshot.events_error
    stale = time.time() - (snapshot.stale_since or time.time())
    return f"NVML is {snapshot.state.value}: {snapshot.reason}; what is known is {stale:.0f} s old"


def gpu_troubles(snapshot: Snapshot) -> Iterator[str]:
    """Say what is wrong with single GPUs."""
    if snapshot.state is NvmlState.UP:
        yield from (f"{gpu.title} is {gpu.state.value}: {gpu.error}" for gpu in snapshot.troubled())
    recent = time.time() - FATAL_SECONDS
    for seen in snapshot.happened:
        if seen.event == XID and seen.code in snapshot.fatal_xids and seen.last > recent:
            yield f"{seen.uuid or 'an unknown GPU'}: XID {seen.code}, {time.time() - seen.last:.0f} s ago"


def health_checks(look: Callable[[], Snapshot]) -> list[Check]:
    """Make the agent's two rows on its GPUs; they read what is known, and are degraded at worst."""

    async def nvml() -> str:
        found = look()
        if trouble := nvml_trouble(found):
            raise DegradedError(trouble)
        return found.reason or found.state.value

    async def gpus() -> str:
        found = look()
        if troubles := list(gpu_troubles(found)):
            raise DegradedError("; ".join(troubles))
        return f"{len(found.gpus)} GPUs"

    return [Check("nvml", nvml, required=False), Check("gpus", gpus, required=False)]


def summary(snapshot: Snapshot) -> dict[str, Any]:
    """Describe the GPUs for ``hibernode status``."""
    pods = {
        (process.owner.namespace, process.owner.pod, process.owner.pod_uid)
        for gpu in snapshot.gpus
        for process in gpu.processes or ()
        if process.owner.pod_uid
    }
    return {
        "nvml": snapshot.state.value,
        "reason": snapshot.reason,
        "driver": snapshot.versions.driver,
        "staleSince": rfc3339(snapshot.stale_since),
        "gpus": len(snapshot.gpus),
        "migInstances": sum(len(gpu.instances) for gpu in snapshot.gpus),
        "processes": sum(len(gpu.processes or ()) for gpu in snapshot.gpus),
        "pods": len(pods),
        "troubles": list(gpu_troubles(snapshot)),
    }


_NVML: Final = "NVML answers, or there is no NVIDIA driver"
_GPUS: Final = "every GPU answers"


def findings(snapshot: Snapshot) -> list[Finding]:
    """Make the rows of ``hibernode doctor``."""
    if snapshot.state in QUIET:
        return [
            Finding("node.nvml", Verdict.SKIP, _NVML, snapshot.reason or snapshot.state.value),
            Finding("node.gpus", Verdict.SKIP, _GPUS, "no NVML"),
        ]
    if trouble := nvml_trouble(snapshot):
        nvml = Finding(
            "node.nvml",
            Verdict.WARN,
            _NVML,
            trouble,
            "nvidia-smi on the node; journalctl -k --grep NVRM; a pod may have to be started anew",
            "NvmlFailed",
        )
    else:
        versions = snapshot.versions
        found = f"driver {versions.driver or '?'}, CUDA {versions.cuda or '?'}, {snapshot.seconds:.2f} s"
        nvml = Finding("node.nvml", Verdict.OK, _NVML, found)
    troubles = list(gpu_troubles(snapshot))
    if troubles:
        gpus = Finding(
            "node.gpus",
            Verdict.WARN,
            _GPUS,
            listed(troubles),
            "reset or replace it, then look again",
            "GpuLost",
        )
    elif trouble:
        gpus = Finding("node.gpus", Verdict.SKIP, _GPUS, "nobody knows, see node.nvml")
    else:
        names = listed(f"{count} x {name}" for name, count in _counted(snapshot.gpus))
        gpus = Finding("node.gpus", Verdict.OK, _GPUS, names or "none")
    return [nvml, gpus]


def _counted(gpus: tuple[Gpu, ...]) -> list[tuple[str, int]]:
    names = [gpu.name or "a nameless GPU" for gpu in gpus]
    return [(name, names.count(name)) for name in dict.fromkeys(names)]
