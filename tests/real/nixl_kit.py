"""Real NIXL agents in processes of their own, for tests: a NIXL agent can take its process down with it."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[2]
LOCALHOST = "127.0.0.1"
PATIENCE = 60.0
"""Seconds for one command; a loaded machine takes ten to start an agent."""


class NixlError(Exception):
    """NIXL refused a command; ``name`` is the class of its exception."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(f"{name}: {message}")
        self.name = name


@dataclass(frozen=True, slots=True)
class Memory:
    """Registered memory of an agent; ``digest`` is the SHA-256 of what is in it."""

    address: int
    size: int
    digest: str


class Agent:
    """An agent with UCX that runs in a child process; ``async with`` ends it."""

    def __init__(self, name: str, *, port: int = 0) -> None:
        """``port``: where its listener listens; 0: it has none."""
        self.name = name
        self.port = port
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "tests.real.nixl_program", self.name, str(self.port)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=ROOT,
            limit=64 << 20,
        )
        try:
            await self._answer()
        except BaseException:
            await self.kill()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    async def kill(self) -> None:
        """End it at once, as a crash would."""
        assert self._process is not None
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()

    async def _answer(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), PATIENCE)
        if not line:
            raise RuntimeError(f"agent {self.name} ended with {await self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if not answer.pop("ok"):
            raise NixlError(answer["error"], answer["message"])
        return answer

    async def _do(self, what: str, **arguments: object) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": what, **arguments}).encode() + b"\n")
        await self._process.stdin.drain()
        return await self._answer()

    async def register(self, size: int, *, seed: int = 1, regions: int = 1) -> Memory:
        """Register ``size`` bytes of fresh memory, whose content ``seed`` decides, in equal regions."""
        answer = await self._do("register", size=size, seed=seed, regions=regions)
        return Memory(answer["address"], size, answer["digest"])

    async def blob(self) -> bytes:
        """Return its metadata as get_agent_metadata() gives it."""
        return base64.b64decode((await self._do("blob"))["blob"])

    async def add(self, blob: bytes) -> str:
        """Load a peer's blob; returns the peer's name."""
        return str((await self._do("add", blob=base64.b64encode(blob).decode()))["agent"])

    async def remove(self, agent: str) -> None:
        """Forget a peer."""
        await self._do("remove", agent=agent)

    async def read(self, agent: str, memory: Memory) -> str:
        """Read a peer's memory; returns the SHA-256 of what came."""
        answer = await self._do(
            "read", agent=agent, address=memory.address, size=memory.size, seconds=PATIENCE / 2
        )
        return str(answer["digest"])

    async def fetch(self, agent: str, port: int, *, host: str = LOCALHOST) -> None:
        """Ask a listener for a peer's blob (fetch_remote_metadata); returns at once."""
        await self._do("fetch", agent=agent, host=host, port=port)

    async def send(self, port: int, *, host: str = LOCALHOST) -> None:
        """Send its own blob to a listener (send_local_metadata)."""
        await self._do("send", host=host, port=port)

    async def invalidate(self, port: int, *, host: str = LOCALHOST) -> None:
        """Tell a listener that it goes (invalidate_local_metadata)."""
        await self._do("invalidate", host=host, port=port)

    async def known(self, agent: str) -> bool:
        """Say whether it has loaded a peer's blob."""
        return bool((await self._do("known", agent=agent))["known"])

    async def wait_known(self, agent: str, *, known: bool = True) -> None:
        """Wait until it has loaded a peer's blob, or forgotten the peer."""
        async with asyncio.timeout(PATIENCE):
            while await self.known(agent) != known:
                await asyncio.sleep(0.02)


@contextmanager
def free_port() -> Iterator[int]:
    """Give a port that nobody listens on, and keep other tests from being given it meanwhile."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("", 0))
        yield sock.getsockname()[1]
