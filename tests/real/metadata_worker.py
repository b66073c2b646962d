"""A worker that publishes when it is told to, for tests: ``argv`` is the metadata socket and a directory.

A file ``publish`` or ``beat`` in the directory is the command; it is gone when it was done. As the stock
client it keeps its connection. ``refused`` has gRPC's code of what failed.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import grpc

from hibernode.metadata import proto

P2P = proto.load("p2p")
SOURCE = P2P.SourceIdentity(mx_version="0.7.0", model_name="org/model", tensor_parallel_size=1)


def call(channel: grpc.Channel, name: str, request: Any) -> Any:
    method = P2P.services["P2pService"][name]
    stub: Any = channel.unary_unary(method.path, method.request.SerializeToString, method.response.FromString)
    return stub(request, timeout=30, wait_for_ready=True)


def main() -> None:
    channel, folder, source = grpc.insecure_channel(f"unix:{sys.argv[1]}"), Path(sys.argv[2]), ""
    while True:
        for command in ("publish", "beat"):
            if not (folder / command).exists():
                continue
            try:
                if command == "publish":
                    worker = P2P.WorkerMetadata(worker_rank=0, nixl_metadata=b"opaque", agent_name="a")
                    worker.tensor_source.tensors.add(name="w", addr=1, size=2, dtype="uint8")
                    request = P2P.PublishMetadataRequest(identity=SOURCE, worker=worker, worker_id="cafe0123")
                    answer = call(channel, "PublishMetadata", request)
                    assert answer.success, answer.message
                    source = answer.mx_source_id
                beat = P2P.UpdateStatusRequest(mx_source_id=source, worker_id="cafe0123", status=2)
                assert call(channel, "UpdateStatus", beat).success
            except grpc.RpcError as error:
                (folder / "refused").write_text(error.code().name)
            (folder / command).unlink()
        time.sleep(0.01)


main()
