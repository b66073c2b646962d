"""Clients of the metadata service in one process: GetMetadata as often as ``pause`` lets, timed one by one.

``python -m tests.bench.metadata_client SOCKET CLIENTS SECONDS PAUSE SOURCE WORKER``: each client has a
connection of its own. It says "ready", begins with a line on standard input, and prints milliseconds as JSON.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from dataclasses import dataclass
from typing import Any

import grpc

from hibernode.metadata import proto

P2P = proto.load("p2p")


@dataclass(frozen=True)
class Load:
    """What each client asks, how often, and for how long; seconds of the answers gather in ``found``."""

    socket: str
    seconds: float
    pause: float
    request: bytes
    begin: asyncio.Barrier
    found: list[float]


async def _client(load: Load) -> None:
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", 100 << 20)]
    async with grpc.aio.insecure_channel(f"unix:{load.socket}", options) as channel:
        call: Any = channel.unary_unary(P2P.services["P2pService"]["GetMetadata"].path)  # bytes in, bytes out
        await call(load.request, wait_for_ready=True)
        await load.begin.wait()
        end = time.monotonic() + load.seconds
        await asyncio.sleep(random.random() * load.pause)
        while time.monotonic() < end:
            began = time.monotonic()
            await call(load.request)
            took = time.monotonic() - began
            load.found.append(took)
            await asyncio.sleep(max(0.0, load.pause - took))


async def _main(socket: str, clients: int, seconds: float, pause: float, request: bytes) -> list[float]:
    begin = asyncio.Barrier(clients)  # nobody is timed while another still connects
    load = Load(socket, seconds, pause, request, begin, [])
    await asyncio.gather(*(_client(load) for _ in range(clients)))
    return load.found


if __name__ == "__main__":
    path, clients, seconds, pause, source, worker = sys.argv[1:]
    message = P2P.GetMetadataRequest(mx_source_id=source, worker_id=worker).SerializeToString()
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps(asyncio.run(_main(path, int(clients), float(seconds), float(pause), message))))
