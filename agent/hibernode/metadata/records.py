"""What the metadata service keeps: plain data, the same for every backend and for the gRPC service.

Times are integers: milliseconds since 1970 where a name ends in ``_at``, as on the wire, and nanoseconds
for a generation. Numbers that the wire has as u32 or u64 keep that range.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any, Final

U32_MAX: Final = (1 << 32) - 1
U64_MAX: Final = (1 << 64) - 1
I64_MAX: Final = (1 << 63) - 1


class SourceStatus(IntEnum):
    """What a worker says of itself (``model_express.p2p.SourceStatus``)."""

    UNKNOWN = 0
    INITIALIZING = 1
    READY = 2
    STALE = 3


class SourceType(IntEnum):
    """What a source holds (``model_express.p2p.MxSourceType``)."""

    WEIGHTS = 0
    LORA = 1
    CUDA_GRAPH = 2
    TORCH_COMPILE_CACHE = 3
    TRITON_CACHE = 4
    DEEP_GEMM_CACHE = 5
    TILELANG_CACHE = 6
    CUTE_DSL_CACHE = 7
    FLASHINFER_CACHE = 8
    TVM_FFI_CACHE = 9


class BackendType(StrEnum):
    """How a worker's memory is reached; NONE: peers ask the worker itself, at its endpoints."""

    NIXL = "nixl"
    TRANSFER_ENGINE = "transfer_engine"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class SourceIdentity:
    """What makes two sources the same (``model_express.p2p.SourceIdentity``, fields 1 to 17).

    ``mx_source_type`` and ``backend_framework`` are the numbers of the wire: a number that this release
    has no name for is an identity like any other.
    """

    mx_version: str = ""
    mx_source_type: int = 0
    model_name: str = ""
    backend_framework: int = 0
    tensor_parallel_size: int = 0
    pipeline_parallel_size: int = 0
    expert_parallel_size: int = 0
    dtype: str = ""
    quantization: str = ""
    extra_parameters: Mapping[str, str] = field(default_factory=dict)
    revision: str = ""
    backend_framework_version: str = ""
    torch_version: str = ""
    cuda_version: str = ""
    triton_version: str = ""
    gpu_arch: str = ""
    compile_config_digest: str = ""


@dataclass(frozen=True, slots=True)
class TensorDescriptor:
    """One tensor in a worker's memory: ``addr`` and ``size`` in bytes (u64), ``device_id`` u32."""

    name: str
    addr: int
    size: int
    device_id: int
    dtype: str


@dataclass(frozen=True, slots=True)
class ArtifactSource:
    """A cache of files that a worker serves in place of tensors: sizes in bytes, counts u32."""

    artifact_id: str = ""
    total_size: int = 0
    file_count: int = 0
    chunk_count: int = 0
    node_rank: int = 0


@dataclass(frozen=True, slots=True)
class BackendPayload:
    """How the worker's memory is reached.

    ``nixl`` is the NIXL agent's metadata as the worker gave it, opaque here, filled for ``NIXL`` only;
    ``session_id`` for ``TRANSFER_ENGINE`` only.
    """

    type: BackendType = BackendType.NONE
    nixl: bytes = b""
    session_id: str = ""


NOBODY: Final = "-"
"""Stands for name and namespace of an owner of which only the uid is known, or that is no pod."""


@dataclass(frozen=True, slots=True)
class PodRef:
    """A pod that owns a record. Which node it is on, the pod's own object says."""

    name: str
    uid: str
    namespace: str


@dataclass(frozen=True, slots=True)
class Version:
    """Which object, and which state of it: the precondition of a change.

    Both are opaque words of the backend; on Kubernetes ``metadata.uid`` and ``metadata.resourceVersion``.
    """

    uid: str
    revision: str


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """What one worker publishes.

    ``tensors`` is empty for an artifact, and for a worker whom peers ask themselves. ``source_load`` is a
    number without unit, None when the worker never told. ``unknown`` are keys of ``status.worker`` that
    another release wrote: they are kept.
    """

    rank: int = 0
    payload: BackendPayload = BackendPayload()
    tensors: tuple[TensorDescriptor, ...] = ()
    artifact: ArtifactSource | None = None
    status: SourceStatus = SourceStatus.UNKNOWN
    updated_at: int = 0
    metadata_endpoint: str = ""
    agent_name: str = ""
    worker_grpc_endpoint: str = ""
    accelerator: str = ""
    topology: Mapping[str, str] = field(default_factory=dict)
    source_load: float | None = None
    unknown: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SourceInstance:
    """A record without its payload and tensors: what lists and watches give, and what a cache holds.

    ``alias`` is the id that a Python client computes for the same identity where that differs (a name that
    is not ASCII), else empty. ``published_at`` is when this content was first published, and ``generation``
    the same instant in nanoseconds: it grows with every new content, and whenever a worker that was Stale
    publishes again, so a peer that holds another generation has to fetch again. ``digest`` (16 hexadecimal
    digits) is over what a peer connects with: payload, agent name, endpoints, tensors' place.
    ``size`` is about how many bytes are kept.
    ``whole`` is False for an object that has no worker in it, or not yet: rank 0, status UNKNOWN, no times
    but ``created_at``. ``version`` is the precondition for a change that must not hit anything newer.
    """

    source_id: str
    worker_id: str
    model_name: str
    rank: int = 0
    status: SourceStatus = SourceStatus.UNKNOWN
    source_type: str = "weights"
    backend_type: BackendType = BackendType.NONE
    accelerator: str = ""
    agent_name: str = ""
    metadata_endpoint: str = ""
    worker_grpc_endpoint: str = ""
    topology: Mapping[str, str] = field(default_factory=dict)
    source_load: float | None = None
    artifact: ArtifactSource | None = None
    tensor_count: int = 0
    size: int = 0
    updated_at: int = 0
    published_at: int = 0
    created_at: int = 0
    generation: int = 0
    digest: str = ""
    owner: PodRef | None = None
    version: Version = Version("", "")
    alias: str = ""
    whole: bool = True


@dataclass(frozen=True, slots=True)
class SourceRecord:
    """All that is known of one worker's record; ``worker`` is None where ``instance.whole`` is False.

    ``identity`` is None where the writer did not store it (the Rust server does not).
    """

    instance: SourceInstance
    worker: WorkerRecord | None
    identity: SourceIdentity | None = None
