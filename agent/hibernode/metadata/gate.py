"""The gate for what a worker publishes: checked whole before anything is written anywhere."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import fields
from typing import Final

from hibernode.errors import InvalidArgumentError, TooLargeError
from hibernode.metadata.identity import identity_text
from hibernode.metadata.nixl_blob import refuse_foreign
from hibernode.metadata.records import (
    I64_MAX,
    U32_MAX,
    U64_MAX,
    ArtifactSource,
    BackendType,
    PodRef,
    SourceIdentity,
    TensorDescriptor,
    WorkerRecord,
)

RANK_MAX: Final = (1 << 31) - 1
"""The Rust server keeps a rank as i32, and one that does not fit hides every other record from it."""

TEXT_MAX: Final = 4096
"""Characters of a name, an endpoint or a value; real ones have some hundred at most."""

MAP_MAX: Final = 256
"""Entries of a topology or of extra parameters."""

WORKER_MAX: Final = 8 << 10
"""Bytes of a worker's texts together: all lists of its source have them, and an answer may have 100 MB."""

IDENTITY_MAX: Final = 64 << 10
"""Bytes of an identity as JSON: an object's annotations may have 256 KiB in all (apimachinery's limit)."""

TENSORS_MAX: Final = 1 << 18
"""Of one worker; the largest known has some ten thousand."""


def check_identity(identity: SourceIdentity) -> None:
    """Refuse an identity that no record can be kept under.

    :raises InvalidArgumentError: no model name, or a field that the wire could not carry.
    """
    if not identity.model_name:
        raise InvalidArgumentError("the identity has no model name", remedy="set identity.model_name")
    for field in fields(identity):
        value = getattr(identity, field.name)
        where = f"identity.{field.name}"
        if isinstance(value, str):
            _text(where, value)
        elif isinstance(value, int):
            _number(where, value, U32_MAX)
        else:
            _pairs(where, value.items())
    size = len(identity_text(identity).encode())
    if size > IDENTITY_MAX:
        raise TooLargeError(f"the identity has {size} bytes as JSON, more than {IDENTITY_MAX}")


def check_worker(worker: WorkerRecord) -> None:
    """Refuse a worker's record with a field out of its range.

    :raises InvalidArgumentError: the field is named.
    :raises TooLargeError: more tensors than any worker has.
    """
    _number("worker_rank", worker.rank, RANK_MAX)
    payload, names = (
        worker.payload,
        ("metadata_endpoint", "agent_name", "worker_grpc_endpoint", "accelerator"),
    )
    size = sum(_text(name, getattr(worker, name)) for name in names) + _pairs(
        "topology", worker.topology.items()
    )
    size += _text("transfer_engine_session_id", payload.session_id)
    if size > WORKER_MAX:
        raise InvalidArgumentError(f"topology, endpoints and names have {size} bytes, more than {WORKER_MAX}")
    check_load(worker.source_load)
    if bool(payload.nixl) > (payload.type is BackendType.NIXL) or bool(payload.session_id) > (
        payload.type is BackendType.TRANSFER_ENGINE
    ):
        raise InvalidArgumentError(f"a payload of type {payload.type} carries what another type does")
    refuse_foreign(payload.nixl, worker.agent_name, InvalidArgumentError)
    if worker.artifact is not None:
        _check_artifact(worker.artifact, worker.tensors)
    if len(worker.tensors) > TENSORS_MAX:
        raise TooLargeError(f"the worker has {len(worker.tensors)} tensors, more than {TENSORS_MAX}")
    for tensor in worker.tensors:
        _check_tensor(tensor)


def check_load(load: float | None) -> None:
    """Refuse a load that JSON cannot carry.

    :raises InvalidArgumentError: it is not a finite number.
    """
    if load is not None and not math.isfinite(load):
        raise InvalidArgumentError(f"source_load is {load}", remedy="send a finite number, or none")


def complete_owner(owner: PodRef | None) -> PodRef | None:
    """Take an owner only with all its parts, as the server does.

    :raises InvalidArgumentError: a part is no name.
    """
    if owner is None or not (owner.name and owner.uid and owner.namespace):
        return None
    for name in ("name", "uid", "namespace"):
        if _text(f"pod {name}", getattr(owner, name)) > 253:  # noqa: PLR2004 - a DNS subdomain's length
            raise InvalidArgumentError(f"the pod's {name} has more than 253 bytes")
    return owner


def _check_artifact(artifact: ArtifactSource, tensors: tuple[TensorDescriptor, ...]) -> None:
    if tensors:
        raise InvalidArgumentError("a source of an artifact has no tensors", remedy="send one of the two")
    _text("artifact_id", artifact.artifact_id)
    _number("total_size", artifact.total_size, I64_MAX)
    for name in ("file_count", "chunk_count", "node_rank"):
        _number(name, getattr(artifact, name), U32_MAX)


def _check_tensor(tensor: TensorDescriptor) -> None:
    _text("a tensor's name", tensor.name)
    _text("a tensor's dtype", tensor.dtype)
    _number(f"addr of {tensor.name}", tensor.addr, U64_MAX)
    _number(f"size of {tensor.name}", tensor.size, U64_MAX)
    _number(f"device_id of {tensor.name}", tensor.device_id, U32_MAX)


def _pairs(name: str, pairs: Iterable[tuple[str, str]]) -> int:
    """Check texts by name; returns the bytes of all."""
    pairs = list(pairs)
    if len(pairs) > MAP_MAX:
        raise InvalidArgumentError(f"{name} has {len(pairs)} entries, more than {MAP_MAX}")
    return sum(_text(f"a key of {name}", key) + _text(f"{name}[{key[:80]!r}]", value) for key, value in pairs)


def _text(name: str, value: str) -> int:
    """Check a text; returns its bytes."""
    if len(value) > TEXT_MAX:
        raise InvalidArgumentError(f"{name} has {len(value)} characters, more than {TEXT_MAX}")
    try:
        return len(value.encode())
    except UnicodeEncodeError:
        raise InvalidArgumentError(f"{name} is no text that UTF-8 can carry") from None


def _number(name: str, value: int, most: int) -> None:
    if not 0 <= value <= most:
        raise InvalidArgumentError(f"{name[:200]} is {value}, not within 0 and {most}")
