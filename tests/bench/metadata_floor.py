"""What gRPC for Python itself takes: a bare grpc.aio server that answers GetMetadata with constant bytes.

``python -m tests.bench.metadata_floor SOCKET BYTES``: says "ready" and serves until it is ended.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

import grpc


async def _main(socket: str, size: int) -> None:
    data = os.urandom(size)

    async def answer(_request: bytes, _context: Any) -> bytes:
        return data

    handlers: Any = {"GetMetadata": grpc.unary_unary_rpc_method_handler(answer)}
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("model_express.p2p.P2pService", handlers),)
    )
    server.add_insecure_port(f"unix:{socket}")
    await server.start()
    print("ready", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], int(sys.argv[2])))
