"""The stock ModelExpress client as it is on PyPI, doing as it is told: one line of JSON in, one out.

It runs in a process of its own: its descriptors are in the process's one pool. MX_SERVER_ADDRESS says where
the server is, as in a worker. ``modelexpress_kit`` runs it.
"""

# ruff: noqa: E402 - a stand-in for the package has to be there first
from __future__ import annotations

import base64
import json
import sys
import types
from pathlib import Path
from typing import Any

# The package's __init__ registers loaders with vLLM and wants torch; its modules for the server want neither.
_package = types.ModuleType("modelexpress")
_package.__path__ = [str(Path(sys.prefix) / "libexec" / "modelexpress" / "modelexpress")]
sys.modules["modelexpress"] = _package

from modelexpress import p2p_pb2
from modelexpress.client import MxClient
from modelexpress.metadata.payload import tensor_source_metadata, worker_tensor_descriptors
from modelexpress.metadata.publisher import PublisherThread
from modelexpress.metadata.source_id import compute_mx_source_id
from modelexpress.metadata.worker_server import WorkerGrpcServer


def tensors(many: list[list[Any]]) -> list[Any]:
    return [
        p2p_pb2.TensorDescriptor(name=name, addr=addr, size=size, device_id=0, dtype="torch.uint8")
        for name, addr, size in many
    ]


class Program:
    def __init__(self) -> None:
        self.client = MxClient()
        self.workers: list[Any] = []
        self.publisher: Any = None

    def identity(self, model: str) -> Any:
        return p2p_pb2.SourceIdentity(
            mx_version="0.7.0",
            model_name=model,
            backend_framework=p2p_pb2.BACKEND_FRAMEWORK_VLLM,
            tensor_parallel_size=1,
            dtype="uint8",
        )

    def descriptors(self) -> Any:
        return base64.b64encode(p2p_pb2.DESCRIPTOR.serialized_pb).decode()

    def source_id(self, model: str) -> Any:
        return compute_mx_source_id(self.identity(model))

    def start(
        self, *, model: str, worker_id: str, rank: int, agent: str, memory: list[list[Any]], port: int
    ) -> Any:
        """Publish as a worker in P2P mode does, by its publisher thread, with its own manifest server."""
        server = WorkerGrpcServer(
            tensor_protos=tensors(memory),
            mx_source_id=None,
            metadata_endpoint=f"127.0.0.1:{port}",
            agent_name=agent,
            worker_rank=rank,
            worker_id=worker_id,
        )
        server.start()
        self.workers.append(server)

        def publish() -> str:
            worker = p2p_pb2.WorkerMetadata(
                worker_rank=rank,
                metadata_endpoint=f"127.0.0.1:{port}",
                agent_name=agent,
                worker_grpc_endpoint=f"127.0.0.1:{server.port}",
                accelerator="cuda",
            )
            found: str = self.client.publish_metadata(self.identity(model), worker, worker_id)
            server.set_mx_source_id(found)
            return found

        self.publisher = PublisherThread(
            self.client,
            worker_id=worker_id,
            worker_rank=rank,
            publish_fn=publish,
            ready_fn=lambda: True,
            interval_secs=1,
        )
        self.publisher.start()
        return server.port

    def stop(self) -> Any:
        self.publisher.stop()

    def publish(self, model: str, worker_id: str, rank: int, blob: str, memory: list[list[Any]]) -> Any:
        """Publish as a worker in central mode does."""
        worker = p2p_pb2.WorkerMetadata(
            worker_rank=rank,
            nixl_metadata=base64.b64decode(blob),
            tensor_source=tensor_source_metadata(tensors(memory)),
        )
        return self.client.publish_metadata(self.identity(model), worker, worker_id)

    def heartbeat(self, source: str, worker_id: str, rank: int, status: int) -> Any:
        return self.client.update_status(source, worker_id, rank, status, source_load=0.25)

    def ready(self, model: str) -> Any:
        found = self.client.list_sources(self.identity(model), p2p_pb2.SOURCE_STATUS_READY)
        return [[one.mx_source_id, one.worker_id, one.worker_rank, one.updated_at] for one in found.instances]

    def get(self, source: str, worker_id: str) -> Any:
        found = self.client.get_metadata(source, worker_id)
        worker = found.worker
        return {
            "found": found.found,
            "status": worker.status,
            "blob": base64.b64encode(worker.nixl_metadata).decode(),
            "agent": worker.agent_name,
            "endpoint": worker.worker_grpc_endpoint,
            "listener": worker.metadata_endpoint,
            "tensors": [[one.name, one.addr, one.size] for one in worker_tensor_descriptors(worker)],
        }


def main() -> None:
    program = Program()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"ok": True, "value": getattr(program, request.pop("do"))(**request)}
        except Exception as error:
            answer = {"ok": False, "error": type(error).__name__, "message": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
