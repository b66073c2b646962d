"""gRPC calls to containerd with the few messages that the tests use: tables instead of generated code.

A message is a dict. A table gives each field its number and its type: ``int`` (also for booleans and enums),
``str``, or the table of a message; ``[type]`` when it is repeated. A map is a repeated :data:`PAIR`. The
numbers are those of Kubernetes' CRI API v1 (``runtime.v1``) and of ``containerd.services.tasks.v1``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import grpc

Message: TypeAlias = dict[str, Any]
Table: TypeAlias = dict[str, tuple[int, Any]]
VARINT, BYTES = 0, 2
FIXED = {1: 8, 5: 4}
"""Wire types of a fixed length, in bytes; nothing here needs their values."""
RpcError = grpc.RpcError
RPC_SECONDS = 60.0

PAIR: Table = {"key": (1, str), "value": (2, str)}
NUMBER: Table = {"value": (1, int)}
NAMESPACES: Table = {"network": (1, int), "pid": (2, int), "ipc": (3, int)}
POD, CONTAINER, NODE = 0, 1, 2
SECCOMP: Table = {"profile_type": (1, int), "localhost_ref": (2, str)}
RUNTIME_DEFAULT, UNCONFINED, LOCALHOST = 0, 1, 2
SANDBOX: Table = {
    "metadata": (1, {"name": (1, str), "uid": (2, str), "namespace": (3, str), "attempt": (4, int)}),
    "hostname": (2, str),
    "log_directory": (3, str),
    "labels": (6, [PAIR]),
    "linux": (
        8,
        {"cgroup_parent": (1, str), "security_context": (2, {"namespace_options": (1, NAMESPACES)})},
    ),
}
IMAGE: Table = {"image": (1, str)}
SECURITY: Table = {
    "namespace_options": (3, NAMESPACES),
    "run_as_user": (5, NUMBER),
    "readonly_rootfs": (7, int),
    "no_new_privs": (11, int),
    "run_as_group": (12, NUMBER),
    "masked_paths": (13, [str]),
    "readonly_paths": (14, [str]),
    "seccomp": (15, SECCOMP),
}
CONFIG: Table = {
    "metadata": (1, {"name": (1, str), "attempt": (2, int)}),
    "image": (2, IMAGE),
    "command": (3, [str]),
    "envs": (6, [PAIR]),
    "mounts": (7, [{"container_path": (1, str), "host_path": (2, str), "readonly": (3, int)}]),
    "labels": (9, [PAIR]),
    "log_path": (11, str),
    "tty": (14, int),
    "linux": (15, {"resources": (1, {"memory_limit_in_bytes": (4, int)}), "security_context": (2, SECURITY)}),
}
EXITED = 2
STATUS: Table = {"state": (3, int), "exit_code": (7, int), "reason": (10, str), "message": (11, str)}
SANDBOX_ID: Table = {"pod_sandbox_id": (1, str)}
CONTAINER_ID: Table = {"container_id": (1, str)}

METHODS: dict[str, tuple[Table, Table]] = {
    "runtime.v1.RuntimeService/Version": ({"version": (1, str)}, {"runtime_version": (3, str)}),
    "runtime.v1.RuntimeService/RunPodSandbox": ({"config": (1, SANDBOX)}, SANDBOX_ID),
    "runtime.v1.RuntimeService/StopPodSandbox": (SANDBOX_ID, {}),
    "runtime.v1.RuntimeService/RemovePodSandbox": (SANDBOX_ID, {}),
    "runtime.v1.RuntimeService/CreateContainer": (
        {"pod_sandbox_id": (1, str), "config": (2, CONFIG), "sandbox_config": (3, SANDBOX)},
        CONTAINER_ID,
    ),
    "runtime.v1.RuntimeService/StartContainer": (CONTAINER_ID, {}),
    "runtime.v1.RuntimeService/StopContainer": ({**CONTAINER_ID, "timeout": (2, int)}, {}),
    "runtime.v1.RuntimeService/RemoveContainer": (CONTAINER_ID, {}),
    "runtime.v1.RuntimeService/ContainerStatus": (
        {**CONTAINER_ID, "verbose": (2, int)},
        {"status": (1, STATUS), "info": (2, [PAIR])},
    ),
    "runtime.v1.ImageService/ImageStatus": ({"image": (1, IMAGE)}, {"image": (1, {"id": (1, str)})}),
    "containerd.services.tasks.v1.Tasks/Wait": (CONTAINER_ID, {"exit_status": (1, int)}),
}


class Wire:
    """A connection to a containerd."""

    def __init__(self, socket: Path) -> None:
        self._channel = grpc.insecure_channel(f"unix://{socket}")

    def call(
        self, method: str, *, namespace: str = "", seconds: float = RPC_SECONDS, **request: Any
    ) -> Message:
        """Call a method of :data:`METHODS`; ``namespace`` is containerd's.

        Raises:
            grpc.RpcError: With the daemon's words.
        """
        sent, got = METHODS[method]
        stub: grpc.UnaryUnaryMultiCallable[Message, Message] = self._channel.unary_unary(
            f"/{method}",
            request_serializer=lambda message: encode(sent, message),
            response_deserializer=lambda data: decode(got, data),
        )
        metadata = (("containerd-namespace", namespace),) if namespace else ()
        return stub(request, timeout=seconds, wait_for_ready=True, metadata=metadata)

    def close(self) -> None:
        """Hang up."""
        self._channel.close()


def encode(table: Table, message: Message) -> bytes:
    """Encode a message; fields that are absent, zero or empty take no room, as protobuf has it."""
    return b"".join(_fields(table, message))


def _fields(table: Table, message: Message) -> Iterator[bytes]:
    for name, value in message.items():
        number, kind = table[name]
        repeated = isinstance(kind, list)
        for one in value if repeated else [value]:
            what = kind[0] if repeated else kind
            if what is int:
                if one:
                    yield _varint(number << 3 | VARINT) + _varint(one)
            elif one or repeated or isinstance(what, dict):
                data = str(one).encode() if what is str else encode(what, one)
                yield _varint(number << 3 | BYTES) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    """Encode a number of up to 64 bits, negative ones as their two's complement."""
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def decode(table: Table, data: bytes) -> Message:
    """Decode a message; fields that the table does not know are passed over, absent ones get their zero."""
    names = {number: (name, kind) for name, (number, kind) in table.items()}
    message: Message = {name: _zero(kind) for name, (_, kind) in table.items()}
    at = 0
    while at < len(data):
        key, at = _read_varint(data, at)
        value: Any
        if key & 7 == VARINT:
            value, at = _read_varint(data, at)
        else:
            length, at = _read_varint(data, at) if key & 7 == BYTES else (FIXED[key & 7], at)
            value, at = data[at : at + length], at + length
        if key >> 3 not in names:
            continue
        name, kind = names[key >> 3]
        if isinstance(kind, list):
            message[name].append(_value(kind[0], value))
        else:
            message[name] = _value(kind, value)
    return message


def _zero(kind: Any) -> Any:
    """Give what an absent field stands for."""
    return [] if isinstance(kind, list) else None if isinstance(kind, dict) else kind()


def _value(kind: Any, raw: Any) -> Any:
    """Turn raw bytes or a number into what the table says."""
    if isinstance(kind, dict):
        return decode(kind, raw)
    return raw.decode() if kind is str else raw


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Read a number; also give where it ends."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def pairs(mapping: dict[str, str]) -> list[Message]:
    """Write a mapping as protobuf does."""
    return [{"key": key, "value": value} for key, value in mapping.items()]
