"""A NIXL agent that does as it is told: one line of JSON in, one out. ``tests.real.nixl_kit`` runs it.

``argv``: name, port to listen on (0: none). Every answer has ``ok``; a failure has ``error`` and ``message``.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import sys
import time
from typing import Any

import numpy as np
from nixl_cu12._api import nixl_agent, nixl_agent_config


class Program:
    def __init__(self, name: str, port: int) -> None:
        config = nixl_agent_config(
            enable_prog_thread=True, enable_listen_thread=port > 0, listen_port=port, backends=["UCX"]
        )
        self.agent = nixl_agent(name, config)
        self.buffers: list[Any] = []

    def register(self, size: int, seed: int, regions: int) -> dict[str, Any]:
        """Register fresh memory with random bytes in it, as one region or more of equal size."""
        buffer = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
        step = size // regions
        addresses = [buffer.ctypes.data + number * step for number in range(regions)]
        held = self.agent.register_memory([(address, step, 0, "") for address in addresses], "DRAM")
        self.buffers.append((buffer, held))
        return {"address": buffer.ctypes.data, "digest": hashlib.sha256(buffer.data).hexdigest()}

    def blob(self) -> dict[str, Any]:
        return {"blob": base64.b64encode(self.agent.get_agent_metadata()).decode()}

    def add(self, blob: str) -> dict[str, Any]:
        name: Any = self.agent.add_remote_agent(base64.b64decode(blob))
        return {"agent": name.decode() if isinstance(name, bytes) else name}

    def remove(self, agent: str) -> dict[str, Any]:
        self.agent.remove_remote_agent(agent)
        return {}

    def fetch(self, agent: str, host: str, port: int) -> dict[str, Any]:
        """Ask a listener for its blob; whether it came, ``known`` tells."""
        self.agent.fetch_remote_metadata(agent, host, port)
        return {}

    def send(self, host: str, port: int) -> dict[str, Any]:
        self.agent.send_local_metadata(host, port)
        return {}

    def invalidate(self, host: str, port: int) -> dict[str, Any]:
        self.agent.invalidate_local_metadata(host, port)
        return {}

    def known(self, agent: str) -> dict[str, Any]:
        return {"known": self.agent.check_remote_metadata(agent)}

    def read(self, agent: str, address: int, size: int, seconds: float) -> dict[str, Any]:
        """Read a peer's memory into memory of our own."""
        buffer = np.zeros(size, dtype=np.uint8)
        registered = self.agent.register_memory([(buffer.ctypes.data, size, 0, "")], "DRAM")
        began = time.monotonic()
        local = self.agent.get_xfer_descs([(buffer.ctypes.data, size, 0)], "DRAM")
        remote = self.agent.get_xfer_descs([(address, size, 0)], "DRAM")
        handle = self.agent.initialize_xfer("READ", local, remote, agent, b"")
        state = self.agent.transfer(handle)
        while state == "PROC" and time.monotonic() < began + seconds:
            time.sleep(0.002)
            state = self.agent.check_xfer_state(handle)
        took = time.monotonic() - began
        self.agent.release_xfer_handle(handle)
        self.agent.deregister_memory(registered)
        if state != "DONE":
            raise RuntimeError(f"the transfer is {state} after {took:.1f} s")
        return {"digest": hashlib.sha256(buffer.data).hexdigest(), "seconds": took}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # UCX prints to standard output
    program = Program(sys.argv[1], int(sys.argv[2]))
    print(json.dumps({"ok": True}), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"ok": True, **getattr(program, request.pop("do"))(**request)}
        except Exception as error:
            answer = {"ok": False, "error": type(error).__name__, "message": str(error)}
        print(json.dumps(answer), file=answers)
    os._exit(0)


if __name__ == "__main__":
    main()
