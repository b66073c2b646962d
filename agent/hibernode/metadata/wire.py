"""Messages of ``model_express.p2p`` to records and back, with the upstream server's rules of precedence."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, Final

from hibernode.errors import InvalidArgumentError, TooLargeError
from hibernode.host import protobuf
from hibernode.metadata import proto
from hibernode.metadata.nixl_blob import MAX_BLOB_BYTES
from hibernode.metadata.records import (
    ArtifactSource,
    BackendPayload,
    BackendType,
    SourceIdentity,
    SourceInstance,
    SourceRecord,
    SourceStatus,
    TensorDescriptor,
    WorkerRecord,
)

P2P: Final = proto.load("p2p")
_IDENTITY: Final = tuple(field.name for field in fields(SourceIdentity))
_ARTIFACT: Final = tuple(field.name for field in fields(ArtifactSource))
PUBLISHED: Final[protobuf.Table] = {
    "identity": (1, {"extra_parameters": (10, {})}),
    "worker": (
        2,
        {"tensors": (3, {}), "topology": (11, {}), "tensor_source": (20, {"tensors": (1, {})})},
    ),
}
"""What in a publication may come in any number."""

MANIFEST: Final[protobuf.Table] = {"tensors": (1, {})}
"""And what in a worker's manifest."""

MAX_FIELDS: Final = 1 << 20
"""Of one of both: an empty tensor takes two bytes of a message, and 80 once it is decoded."""

MAX_TENSORS: Final = 1 << 17
"""Of one worker over the wire; real ones have some ten thousand at most."""

_STATUSES: Final = frozenset(int(status) for status in SourceStatus)
_PLAIN: Final = ("metadata_endpoint", "agent_name", "worker_grpc_endpoint", "accelerator")


def identity_of(message: Any) -> SourceIdentity:
    """Read an identity."""
    values = {name: getattr(message, name) for name in _IDENTITY}
    return SourceIdentity(**{**values, "extra_parameters": dict(message.extra_parameters)})


def identity_message(identity: SourceIdentity) -> Any:
    """Write an identity."""
    return P2P.SourceIdentity(**{name: getattr(identity, name) for name in _IDENTITY})


def status_of(number: int) -> SourceStatus | None:
    """Read a status; None for a number that is none."""
    return SourceStatus(number) if number in _STATUSES else None


def check_fields(table: protobuf.Table, data: bytes) -> None:
    """Refuse a message that would become many times as large in memory, before it is decoded.

    :raises TooLargeError: it has too many fields.
    :raises InvalidArgumentError: it is no such message.
    """
    try:
        protobuf.decode(table, data, MAX_FIELDS)
    except ValueError as error:
        if f"more than {MAX_FIELDS} fields" in str(error):
            raise TooLargeError(f"the message has {error}", remedy="publish fewer tensors") from None
        raise InvalidArgumentError(f"the message cannot be decoded: {error}") from None


def tensors_of(messages: Any) -> tuple[TensorDescriptor, ...]:
    """Read tensors.

    :raises TooLargeError: more than any worker has.
    """
    if len(messages) > MAX_TENSORS:
        raise TooLargeError(f"the worker has {len(messages)} tensors, more than {MAX_TENSORS}")
    return tuple(TensorDescriptor(one.name, one.addr, one.size, one.device_id, one.dtype) for one in messages)


def worker_of(message: Any) -> WorkerRecord:
    """Read what a worker publishes; ``source_payload`` wins over the deprecated ``tensors``.

    :raises TooLargeError: a NIXL blob larger than any that NIXL would load.
    """
    artifact, tensors = None, message.tensors
    which = message.WhichOneof("source_payload")
    if which == "artifact_source":
        found = message.artifact_source
        artifact, tensors = ArtifactSource(*(getattr(found, name) for name in _ARTIFACT)), ()
    elif which == "tensor_source":
        tensors = message.tensor_source.tensors
    if (size := len(message.nixl_metadata)) > MAX_BLOB_BYTES:
        raise TooLargeError(
            f"the NIXL metadata has {size} bytes, more than {MAX_BLOB_BYTES}",
            remedy="register memory in fewer, larger parts (MX_POOL_REG=1)",
            reason="BlobTooLarge",
        )
    payload = BackendPayload()
    if message.nixl_metadata:
        payload = BackendPayload(BackendType.NIXL, nixl=message.nixl_metadata)
    elif message.transfer_engine_session_id:
        payload = BackendPayload(BackendType.TRANSFER_ENGINE, session_id=message.transfer_engine_session_id)
    return WorkerRecord(
        rank=message.worker_rank,
        payload=payload,
        tensors=tensors_of(tensors),
        artifact=artifact,
        status=status_of(message.status) or SourceStatus.UNKNOWN,
        topology=dict(message.topology),
        **{name: getattr(message, name) for name in _PLAIN},
    )


def worker_message(worker: WorkerRecord) -> Any:
    """Write what a worker published, but for status and time; tensors stand in both of their places."""
    message = P2P.WorkerMetadata(
        worker_rank=worker.rank, topology=dict(worker.topology), **{n: getattr(worker, n) for n in _PLAIN}
    )
    if worker.payload.type is BackendType.NIXL:
        message.nixl_metadata = worker.payload.nixl
    elif worker.payload.type is BackendType.TRANSFER_ENGINE:
        message.transfer_engine_session_id = worker.payload.session_id
    if worker.artifact is not None:
        message.artifact_source.SetInParent()
        for name in _ARTIFACT:
            setattr(message.artifact_source, name, getattr(worker.artifact, name))
        return message
    message.tensor_source.SetInParent()
    for one in worker.tensors:
        message.tensors.add(
            name=one.name, addr=one.addr, size=one.size, device_id=one.device_id, dtype=one.dtype
        )
    message.tensor_source.tensors.extend(message.tensors)
    return message


def found_parts(record: SourceRecord) -> bytes:
    """Encode the part of GetMetadata's answer that stays the same until the worker publishes anew."""
    assert record.worker is not None
    static = replace(record.worker, status=SourceStatus.UNKNOWN, updated_at=0)
    answer = P2P.GetMetadataResponse(
        found=True,
        worker=worker_message(static),
        mx_source_id=record.instance.source_id,
        worker_id=record.instance.worker_id,
    )
    if record.identity is not None:
        answer.identity.CopyFrom(identity_message(record.identity))
    encoded: bytes = answer.SerializeToString()
    return encoded


def found_now(record: SourceRecord, metadata_endpoint: str = "") -> bytes:
    """Encode status and time of GetMetadata's answer, to stand behind :func:`found_parts`.

    ``metadata_endpoint``: where we answer in the worker's stead; empty: it stays as it is.

    Protobuf merges a message that stands twice in the encoding, so a heartbeat costs some bytes of encoding
    in place of all tensors.
    """
    assert record.worker is not None
    now = P2P.WorkerMetadata(
        status=int(record.worker.status),
        updated_at=record.worker.updated_at,
        metadata_endpoint=metadata_endpoint,
    )
    encoded: bytes = P2P.GetMetadataResponse(worker=now).SerializeToString()
    return encoded


def reference_message(one: SourceInstance) -> Any:
    """Write an entry of a list."""
    return P2P.SourceInstanceRef(
        mx_source_id=one.source_id,
        worker_id=one.worker_id,
        model_name=one.model_name,
        worker_rank=one.rank,
        accelerator=one.accelerator,
        updated_at=one.updated_at,
        topology=dict(one.topology),
        source_load=one.source_load,
    )
