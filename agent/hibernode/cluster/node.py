"""What the node object is told: what schedulers can choose by, and whether its GPUs are well. Pure."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

from hibernode.events import clean
from hibernode.gpu.state import GpuState, NvmlState, Snapshot
from hibernode.kube.objects import is_label_value, stamp

CRIU: Final = "hibernode.io/criu"
CUDA_CHECKPOINT: Final = "hibernode.io/cuda-checkpoint"
FREE: Final = "hibernode.io/store-free-bytes"
"""Labels, and the annotation: no selector compares numbers."""

GPU_CONDITION: Final = "GpuUnhealthy"
"""True is the bad case, as with the kubelet's pressures."""

STEP_BYTES: Final = 1 << 30
"""Free space is told in whole GiB, so that a node does not change with every write."""


def facts(criu: str | None, cuda_checkpoint: str | None, free_bytes: int | None) -> dict[str, Any]:
    """Build the patch of labels and annotations; what is None is taken away."""
    free = None if free_bytes is None else str(free_bytes // STEP_BYTES * STEP_BYTES)
    return {
        "metadata": {
            "labels": {CRIU: _label(criu), CUDA_CHECKPOINT: _label(cuda_checkpoint)},
            "annotations": {FREE: free},
        }
    }


def condition(snapshot: Snapshot) -> tuple[str, str, str] | None:
    """Judge the GPUs: status, reason and message of the condition; None on a node without NVIDIA's driver."""
    if snapshot.state in (NvmlState.OFF, NvmlState.ABSENT):
        return None
    if snapshot.state is NvmlState.STARTING:
        return "Unknown", "Starting", "the GPUs have not been looked at yet"
    if snapshot.state is not NvmlState.UP:
        return "True", "NvmlDown", clean(f"NVML is {snapshot.state.value}: {snapshot.reason}")
    unwell = [gpu for gpu in snapshot.gpus if gpu.state is not GpuState.OK]
    if unwell:
        named = "; ".join(f"{gpu.title} is {gpu.state.value}: {gpu.error}" for gpu in unwell)
        return "True", "GpuLost", clean(named)
    fatal = [seen for seen in snapshot.happened if seen.code in snapshot.fatal_xids]
    if fatal:
        named = "; ".join(f"{seen.uuid or 'a GPU'} reported XID {seen.code}" for seen in fatal)
        return "True", "GpuXidFatal", clean(named)
    return "False", "GpusWell", f"{len(snapshot.gpus)} GPUs"


def condition_patch(judged: tuple[str, str, str], *, changed: bool) -> Mapping[str, Any]:
    """Build the patch of the node's status; ``changed``: the status is another one than before."""
    status, reason, message = judged
    now = stamp(time.time())
    found = {
        "type": GPU_CONDITION,
        "status": status,
        "reason": reason,
        "message": message,
        "lastHeartbeatTime": now,
    }
    if changed:
        found["lastTransitionTime"] = now
    return {"status": {"conditions": [found]}}


def _label(text: str | None) -> str | None:
    """Let a label's value through, else none."""
    return text if is_label_value(text) else None
