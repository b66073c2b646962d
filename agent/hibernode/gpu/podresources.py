"""What the kubelet has given to whom: one question of its PodResources v1 API, over its socket.

The kubelet is trusted with what it gives to whom, and no further: its answer has a deadline and a largest
size, and names pass a gate. Devices that a DRA driver has given are not in it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, cast
from urllib.parse import quote

from hibernode.errors import HibernodeError
from hibernode.gpu.state import Allocation
from hibernode.host.protobuf import Table, decode
from hibernode.text import printable

METHOD: Final = "/v1.PodResourcesLister/List"
MAX_ANSWER_BYTES: Final = 16 << 20
"""Its default is 4 MiB (gRPC's own); a node has some hundred pods, each some 200 bytes."""

RESOURCES: Final = "nvidia.com/"
"""What the names of NVIDIA's resources begin with: ``gpu``, ``mig-1g.10gb``, ``gpu.shared``."""

ANSWER: Final[Table] = {
    "pods": (
        1,
        [
            {
                "name": (1, str),
                "namespace": (2, str),
                "containers": (
                    3,
                    [
                        {
                            "name": (1, str),
                            "devices": (2, [{"resource": (1, str), "ids": (2, [str])}]),
                        }
                    ],
                ),
            }
        ],
    )
}
"""k8s.io/kubelet/pkg/apis/podresources/v1: ListPodResourcesResponse, as far as it is of use."""

NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
"""A name in Kubernetes: a DNS subdomain."""

_DEVICE: Final = re.compile(r"[0-9A-Za-z][0-9A-Za-z/.-]{0,127}")


class PodResourcesError(HibernodeError):
    """The kubelet's PodResources socket is there and does not answer as it should."""

    default_reason = "PodResourcesFailed"


def allocations(socket: Path, seconds: float) -> tuple[Allocation, ...]:
    """Ask which of NVIDIA's devices are given to which containers; none where no kubelet is.

    :raises PodResourcesError: there is a socket and no true answer.
    """
    if not socket.is_socket():
        return ()
    import grpc  # noqa: PLC0415 - 50 ms and some MiB that only a node of Kubernetes should take

    options = [
        ("grpc.default_authority", "localhost"),
        ("grpc.enable_retries", 0),
        ("grpc.max_receive_message_length", MAX_ANSWER_BYTES),
    ]
    with grpc.insecure_channel(f"unix:{quote(str(socket))}", options=options) as channel:
        ask: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(METHOD)
        try:
            return parse(ask(b"", timeout=seconds))
        except grpc.RpcError as error:
            code = cast("grpc.Call", error).code().name  # of a call that blocks it is both
            raise PodResourcesError(
                f"{socket} answers {code}", remedy="does the kubelet run, and is its socket mounted whole?"
            ) from error
        except ValueError as error:
            raise PodResourcesError(
                f"{socket}: no such answer: {printable(str(error)[:200], keep='')}",
                remedy="is it the kubelet's? gpu.pod_resources says which is asked",
            ) from error


def parse(data: bytes) -> tuple[Allocation, ...]:
    """Take the answer apart. A replica of a shared GPU has the GPU's UUID before ``::``.

    :raises ValueError: these bytes are no such message, or a name in it is none.
    """
    found: list[Allocation] = []
    for pod in decode(ANSWER, data)["pods"]:
        for container in pod["containers"]:
            names = (pod["namespace"], pod["name"], container["name"])
            for devices in container["devices"]:
                if not devices["resource"].startswith(RESOURCES):
                    continue
                for id_ in devices["ids"]:
                    device = id_.partition("::")[0]
                    if not all(map(NAME.fullmatch, names)) or _DEVICE.fullmatch(device) is None:
                        raise ValueError(f"{names} or {device!a} is no name")
                    found.append(Allocation(*names, devices["resource"][:253], device))
    return tuple(dict.fromkeys(found))
