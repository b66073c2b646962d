"""A metadata service in this process, and clients for it with descriptors of our own."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from hibernode.errors import UnavailableError
from hibernode.metadata import proto
from hibernode.metadata.access import Caller, Reviewed
from hibernode.metadata.locality import Node
from hibernode.metadata.part import MetadataPart
from hibernode.metadata.records import PodRef
from hibernode.settings import MetadataSettings, Settings

P2P = proto.load("p2p")
READY = 2
CODE = grpc.StatusCode
A, B = "aaaaaaaa-0000-4000-8000-00000000000a", "bbbbbbbb-0000-4000-8000-00000000000b"


class FixedPlaces:
    """A node of which all is known."""

    def __init__(self, **pods: str) -> None:
        self.known = Node(
            "here", frozenset({"127.0.0.1"}), {uid: frozenset({address}) for uid, address in pods.items()}
        )

    async def node(self) -> Node:
        return self.known


LOCAL = FixedPlaces()


@dataclass
class Running:
    """A service that listens; ``become`` decides who its Unix socket's callers are from now on."""

    part: MetadataPart
    registry: CollectorRegistry
    path: Path
    who: Caller | None = None

    @property
    def methods(self) -> Any:
        return self.part._service

    @property
    def backend(self) -> Any:
        return self.part.backend

    @property
    def front(self) -> Any:
        return self.part._front

    @property
    def blobs(self) -> Any:
        return self.part._blobs

    @property
    def target(self) -> str:
        return f"unix:{self.path}"

    @property
    def tcp(self) -> str:
        host, port = self.part.addresses[0]
        return f"{host}:{port}"

    @asynccontextmanager
    async def client(self, who: Caller | None = None, target: str = "") -> AsyncIterator[Client]:
        self.who = who
        options = [
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.max_receive_message_length", 100 << 20),
            ("grpc.max_send_message_length", 200 << 20),
        ]
        async with grpc.aio.insecure_channel(target or self.target, options) as channel:
            yield Client(channel)

    def sample(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0


class Client:
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel

    async def call(
        self, name: str, request: Any, *, timeout: float = 30.0, token: str = "", service: str = "P2pService"
    ) -> Any:
        method = P2P.services[service][name]
        call = self.channel.unary_unary(
            method.path, method.request.SerializeToString, method.response.FromString
        )
        metadata = (("authorization", f"Bearer {token}"),) if token else None
        return await call(request, timeout=timeout, metadata=metadata, wait_for_ready=True)

    async def publish(
        self, worker_id: str = "w0", rank: int = 0, *, ready: bool = True, **fields: Any
    ) -> str:
        """Publish and say READY, as the stock client does; returns the source's id."""
        pod = {key: fields.pop(key) for key in list(fields) if key.startswith("pod_")}
        answer = await self.call("PublishMetadata", publication(worker_id, rank, pod=pod, **fields))
        assert answer.success, answer.message
        if ready:
            assert (await self.status(answer.mx_source_id, worker_id, rank)).success
        return str(answer.mx_source_id)

    async def status(self, source_id: str, worker_id: str, rank: int = 0, status: int = READY) -> Any:
        request = P2P.UpdateStatusRequest(
            mx_source_id=source_id, worker_id=worker_id, worker_rank=rank, status=status
        )
        return await self.call("UpdateStatus", request)

    async def list(self, **filters: Any) -> list[Any]:
        return list((await self.call("ListSources", P2P.ListSourcesRequest(**filters))).instances)

    async def get(self, source_id: str, worker_id: str) -> Any:
        return await self.call(
            "GetMetadata", P2P.GetMetadataRequest(mx_source_id=source_id, worker_id=worker_id)
        )


def identity(model: str = "org/model") -> Any:
    return P2P.SourceIdentity(
        mx_version="0.7.0", model_name=model, backend_framework=1, tensor_parallel_size=8
    )


def tensors(count: int = 2) -> list[Any]:
    return [
        P2P.TensorDescriptor(
            name=f"layers.{number}.weight", addr=(1 << 40) + number, size=4096, dtype="torch.bfloat16"
        )
        for number in range(count)
    ]


def publication(
    worker_id: str = "w0",
    rank: int = 0,
    *,
    model: str = "org/model",
    pod: Mapping[str, str] | None = None,
    count: int = 2,
    **fields: Any,
) -> Any:
    worker = P2P.WorkerMetadata(worker_rank=rank, **fields)
    worker.tensor_source.tensors.extend(tensors(count))
    return P2P.PublishMetadataRequest(
        identity=identity(model), worker=worker, worker_id=worker_id, **(pod or {})
    )


def frame(kind: int, flags: int, stream: int, data: bytes = b"") -> bytes:
    """Write a frame of HTTP/2 (RFC 9113, section 4.1): DATA is 0, HEADERS 1, RST_STREAM 3, SETTINGS 4."""
    return len(data).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + data


def asking(method: str, stream: int) -> bytes:
    """Write the HEADERS frame of a call; its fields are literals (RFC 7541, section 6.2.2)."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": f"/model_express.p2p.P2pService/{method}",
        ":authority": "here",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    block = b"".join(
        b"\0" + b"".join(bytes([len(text)]) + text.encode() for text in pair) for pair in fields.items()
    )
    return frame(1, 4, stream, block)


@asynccontextmanager
async def serving(
    places: Any = None, reviewer: Any = None, records: Any = None, **settings: Any
) -> AsyncIterator[Running]:
    """Run a service with the real sockets; callers are who ``client(who=...)`` says, else who they are."""
    with tempfile.TemporaryDirectory(prefix="hibernode-mx-") as name:
        root = Path(name)
        path = root / "door" / "mx.sock"
        found = Settings(
            state_dir=root / "state",
            metadata=MetadataSettings(**{"socket": path, "listen": "127.0.0.1:0", **settings}),
        )
        registry = CollectorRegistry()
        part = MetadataPart(
            found, registry, places=places or FixedPlaces(), reviewer=reviewer, backend=records
        )
        running = Running(part, registry, path)
        await part.start()
        listen = part._front._admit

        def admit(sock: Any, identify: Any) -> None:
            listen(sock, lambda each: running.who or identify(each))

        part._front._admit = admit  # type: ignore[method-assign]
        task = asyncio.create_task(part.run())
        try:
            async with asyncio.timeout(20):
                while part.trouble:
                    await asyncio.sleep(0.01)
            yield running
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await part.stop()


def pod(uid: str, **fields: Any) -> Caller:
    """Make a caller that is in a pod."""
    return Caller(uid, uid, **fields)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def refused(call: Any) -> tuple[grpc.StatusCode, str]:
    """Return what a call failed with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details() or ""


class Tokens:
    """A reviewer that knows some tokens, and counts how often it is asked."""

    def __init__(self) -> None:
        self.known = {"good": Reviewed("system:serviceaccount:n:sa", PodRef("p", A, "n"))}
        self.asked = 0
        self.down = False

    async def review(self, token: str) -> Reviewed | None:
        self.asked += 1
        if self.down:
            raise UnavailableError("no API server")
        return self.known.get(token)
