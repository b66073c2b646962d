"""The stock ModelExpress client in a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 60.0
JOIN = """
for each; do echo 0 >"$each" || exit 1; done
exec "$PY" -m tests.real.modelexpress_program
"""


class StockError(Exception):
    """The stock client raised."""


class Stock:
    """A worker that has the stock client, its server at ``target``; ``async with`` ends it.

    ``joins``: cgroup.procs files of the cgroups that it is in.
    """

    def __init__(self, target: str, *, joins: Sequence[str] = (), **env: str) -> None:
        self._target, self._env, self._joins = target, env, joins
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        """Its pid."""
        assert self._process is not None
        return self._process.pid

    async def __aenter__(self) -> Self:
        environ = {key: value for key, value in os.environ.items() if not key.startswith(("MX_", "POD_"))}
        self._process = await asyncio.create_subprocess_exec(
            *("/bin/sh", "-c", JOIN, "join", *self._joins),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=ROOT,
            env={**environ, "MX_SERVER_ADDRESS": self._target, "PY": sys.executable, **self._env},
            limit=64 << 20,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    async def kill(self) -> None:
        """End it at once, as a crash would."""
        assert self._process is not None
        assert self._process.stdin is not None
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()
        self._process.stdin.close()

    async def do(self, what: str, **arguments: object) -> Any:
        """Have it do something; returns what came of it."""
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": what, **arguments}).encode() + b"\n")
        await self._process.stdin.drain()
        line = await asyncio.wait_for(self._process.stdout.readline(), PATIENCE)
        if not line:
            raise RuntimeError(f"the stock client ended with {await self._process.wait()}")
        answer = json.loads(line)
        if not answer["ok"]:
            raise StockError(f"{answer['error']}: {answer['message']}")
        return answer["value"]

    async def wait_ready(self, model: str, *workers: str) -> list[Any]:
        """Wait until exactly these workers are listed as READY."""
        async with asyncio.timeout(PATIENCE):
            while True:
                found = await self.do("ready", model=model)
                if {each[1] for each in found} == set(workers):
                    return list(found)
                await asyncio.sleep(0.02)
