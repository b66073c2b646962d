"""Real workers that publish, are frozen by CRIU and brought back, with a real agent beside them."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from hibernode.metadata.service import CHANGES
from tests.real.nixl_kit import PATIENCE
from tests.real.node import Node, until

pytestmark = pytest.mark.criu

ROOT = Path(__file__).resolve().parents[2]
READY, STALE = 2, 3


class Seen:
    """The states of the one record, as a peer that watches gets to know them: status and generation."""

    def __init__(self) -> None:
        self.states: list[tuple[int, int]] = []

    async def wait(self, status: int, *, after: int = 0) -> int:
        """Wait until the record has a status in a generation above ``after``; returns the generation."""
        async with asyncio.timeout(PATIENCE):
            while not self.states or self.states[-1][0] != status or self.states[-1][1] <= after:
                await asyncio.sleep(0.01)
        return self.states[-1][1]


@asynccontextmanager
async def watching(path: Path) -> AsyncIterator[Seen]:
    """Watch the records behind a socket."""
    seen, watch = Seen(), CHANGES.services["Changes"]["Watch"]

    async def follow(channel: grpc.aio.Channel) -> None:
        call: Any = channel.unary_stream(
            watch.path, watch.request.SerializeToString, watch.response.FromString
        )
        async for change in call(watch.request(), wait_for_ready=True):
            if change.worker_id:
                assert change.worker_id == "cafe0123"
                seen.states.append((change.status, change.generation))

    async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
        task = asyncio.create_task(follow(channel))
        yield seen
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def tell(folder: Path, command: str) -> None:
    """Have the worker do something, and wait until it has."""
    file = folder / command
    file.touch()
    async with asyncio.timeout(PATIENCE):
        while file.exists():
            await asyncio.sleep(0.01)
    assert not (folder / "refused").exists(), (folder / "refused").read_text()


async def test_a_worker_is_stale_while_it_is_frozen_and_comes_back_as_another_generation(node: Node) -> None:
    """By its ready file and by hand: what runs on is READY at its heartbeat, what ends is restored."""
    door, folder, id_ = node.base / "mx" / "mx.sock", node.base / "worker", node.new_id()
    folder.mkdir()
    node.config |= {
        "METADATA_ENABLED": "true",
        "METADATA_SOCKET": str(door),
        "METADATA_LISTEN": "",
    }
    await asyncio.to_thread(node.start_agent)
    worker = subprocess.Popen(
        [sys.executable, "-m", "tests.real.metadata_worker", str(door), str(folder)],
        cwd=ROOT,
        env={
            **os.environ,
            "DYN_CHECKPOINT_HASH": id_,
            "DYN_CHECKPOINT_SIGNAL_FILE": str(node.signals / f"{id_}.done"),
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        async with watching(door) as seen:
            await tell(folder, "publish")
            first = await seen.wait(READY)
            (node.signals / f"{id_}.ready").touch()
            answer = await asyncio.to_thread(node.done, id_)
            assert answer["success"] is True, (answer, node.tail())
            assert await seen.wait(STALE) == first
            node.forget(id_)
            again = ("checkpoint", "--pid", worker.pid, "--replace", "--leave")
            for leave in ("running", "killed"):
                await tell(folder, "beat")
                assert await seen.wait(READY) == first
                await asyncio.to_thread(node.run, *again, leave)
                assert await seen.wait(STALE) == first
            worker.wait(timeout=PATIENCE)
            await asyncio.to_thread(node.run, "restore", id_)
            await tell(folder, "publish")
            assert await seen.wait(READY, after=first) > first
            statuses = [status for status, _ in seen.states]
            assert statuses.count(STALE) == 3, seen.states
    finally:
        worker.kill()
        worker.wait()


WAITING = """
import socket, sys, time
from pathlib import Path
kept = socket.socket(socket.AF_UNIX)
kept.connect(sys.argv[1])
Path(sys.argv[2]).touch()
time.sleep(1000)
"""


def test_a_connection_to_the_metadata_socket_that_nobody_closes_is_refused(node: Node) -> None:
    """Preflight lets it pass, as the agent closes it; if none does, nothing is dumped, the worker runs on."""
    door, connected = node.base / "mx.sock", node.base / "connected"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(door))
        listener.listen()
        worker = subprocess.Popen(
            [sys.executable, "-c", WAITING, str(door), str(connected)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            until("connection", connected.exists)
            accepted, _ = listener.accept()
            with accepted:
                command = ("checkpoint", "--pid", worker.pid)
                named = {"METADATA_SOCKET": str(door)}
                result = node.run(*command, "--dry-run", check=0, **named)
                assert "to the agent" in result.stdout
                result = node.run(*command, check=4, **named)
                assert "metadata socket" in result.stderr
                assert "tree.unix_peers" in node.run(*command, check=4).stderr
            assert worker.poll() is None
        finally:
            worker.kill()
            worker.wait()
