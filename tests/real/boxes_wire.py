"""gRPC calls to containerd with the few messages that the tests use.

The numbers are those of Kubernetes' CRI API v1 (``runtime.v1``) and of ``containerd.services.tasks.v1``; what
a table is says :mod:`hibernode.host.protobuf`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc

from hibernode.host.protobuf import PAIR, Message, Table, decode, encode, pairs

__all__ = (
    "CONTAINER",
    "EXITED",
    "LOCALHOST",
    "NODE",
    "PAIR",
    "POD",
    "RUNTIME_DEFAULT",
    "UNCONFINED",
    "Message",
    "RpcError",
    "Table",
    "Wire",
    "decode",
    "encode",
    "pairs",
)

RpcError = grpc.RpcError
RPC_SECONDS = 60.0

NUMBER: Table = {"value": (1, int)}
NAMESPACES: Table = {"network": (1, int), "pid": (2, int), "ipc": (3, int)}
POD, CONTAINER, NODE = 0, 1, 2
SECCOMP: Table = {"profile_type": (1, int), "localhost_ref": (2, str)}
RUNTIME_DEFAULT, UNCONFINED, LOCALHOST = 0, 1, 2
POD_METADATA: Table = {"name": (1, str), "uid": (2, str), "namespace": (3, str), "attempt": (4, int)}
SANDBOX: Table = {
    "metadata": (1, POD_METADATA),
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
    "runtime.v1.RuntimeService/ListPodSandbox": ({}, {"items": (1, [{"metadata": (2, POD_METADATA)}])}),
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
