"""Workers that are away for a checkpoint, the agent's or a command's: their records are STALE meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from hibernode.discovery.container_look import pid_namespace
from hibernode.errors import RefusedError
from hibernode.host import procfs
from hibernode.host.procfs import Process
from hibernode.metadata.owners import OwnerWatch
from hibernode.workload import ProcessKey


class Absences:
    """Keeps those that end with a process; :meth:`close` ends them.

    :param cut: closes the connections of who is being frozen: CRIU could not bring them back.
    """

    def __init__(self, owners: OwnerWatch, cut: Callable[[], Awaitable[None]]) -> None:
        self._owners, self._cut = owners, cut
        self._tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def freezing(self, pid: int) -> AsyncIterator[int]:
        """Have the records of a process and of all below it STALE; gives how many there are."""
        async with self._owners.freezing(await asyncio.to_thread(_tree, pid)) as count:
            await self._cut()
            yield count

    async def until_end_of(self, asker: int, pid: int) -> int:
        """Have them STALE for as long as the process ``asker`` lives; returns how many there are.

        :raises RefusedError: ``PeerUnknown``: it has ended, or its pids are not ours.
        """
        process = await asyncio.to_thread(_hold, asker)
        entered: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._hold_until_end(process, pid, entered), name="metadata absence")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(entered)

    async def close(self) -> None:
        """End all."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _hold_until_end(self, process: Process, pid: int, entered: asyncio.Future[int]) -> None:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        with process:
            loop.add_reader(process.fileno(), ended.set)
            try:
                async with self.freezing(pid) as count:
                    entered.set_result(count)
                    await ended.wait()
            finally:
                loop.remove_reader(process.fileno())
                entered.cancel()


def _hold(pid: int) -> Process:
    """Hold a process whose pids mean the same as ours."""
    try:
        process = Process.open(pid)
        if pid_namespace(pid) == pid_namespace():
            return process
        process.close()
    except (OSError, ValueError):
        pass
    raise RefusedError(
        f"process {pid}, which asks, is not in the agent's pid namespace",
        remedy="run the command where the agent runs",
        reason="PeerUnknown",
    )


def _tree(pid: int) -> set[ProcessKey]:
    """List a process and all below it; none if it has ended."""
    try:
        return {stat.key for stat in procfs.tree(pid)}
    except OSError:
        return set()
