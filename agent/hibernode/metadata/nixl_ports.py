"""Ports at which NIXL agents fetch the blobs of local workers from us: one for each record.

The wire carries no name, so the port alone tells whose blob is meant.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from hibernode.errors import HibernodeError, UsageError
from hibernode.metadata.access import is_loopback
from hibernode.metadata.nixl_wire import Limits, Peer, WireServer, serve

MAX_PORTS: Final = 64
PER_OWNER: Final = 16
"""Ports of one pod: two for each of eight GPUs. Its own oldest one goes for one more."""

LIMITS: Final = Limits(connections=32)

log = logging.getLogger("hibernode.nixl")

Key = tuple[str, str]
Find = Callable[[Key], Awaitable[bytes | None]]
"""Returns the blob of a record, confirmed by its worker; None: there is none now."""


@dataclass(frozen=True, slots=True)
class _Port:
    server: WireServer
    owner: str


class NixlPorts:
    """Listens at ``host``, at ports that the kernel chooses.

    :param reachable: whether ``host`` may be one that other machines reach.
    :raises UsageError: it is one, and may not be.
    """

    def __init__(self, host: str, find: Find, *, reachable: bool = False, limits: Limits = LIMITS) -> None:
        if not reachable and not is_loopback(host):
            raise UsageError(
                f"metadata.nixl_listen: {host} is open to other machines, and nothing tells who asks",
                remedy="set metadata.nixl_open=true, or listen on 127.0.0.1",
                reason="OpenToAll",
            )
        self._host, self._find, self._limits = host, find, limits
        self._ports: dict[Key, _Port] = {}
        self._opening = asyncio.Lock()

    def __len__(self) -> int:
        """Count the ports."""
        return len(self._ports)

    async def check(self) -> None:
        """Try whether the address is there.

        :raises StorageError: ``ListenFailed``.
        """
        async with await serve(self._host, 0, self._nothing):
            pass

    async def endpoint(self, key: Key, owner: str) -> str:
        """Give ``address:port`` for a record of ``owner``; empty when none can be had."""
        async with self._opening:
            port = self._ports.get(key)
            if port is None:
                mine = [each for each, other in self._ports.items() if other.owner == owner]
                if len(mine) >= PER_OWNER:
                    await self.drop(mine[0])
                if len(self._ports) >= MAX_PORTS:
                    return ""

                async def find(_: Peer) -> bytes | None:
                    return await self._find(key)

                try:
                    port = _Port(await serve(self._host, 0, find, limits=self._limits), owner)
                except HibernodeError as error:
                    log.warning("no NIXL port for worker %s: %s", key[1], error.message)
                    return ""
                self._ports[key] = port
        return f"{self._host}:{port.server.port}"

    async def drop(self, key: Key) -> None:
        """Close the port of a record that is gone."""
        port = self._ports.pop(key, None)
        if port is not None:
            await port.server.close()

    async def close(self) -> None:
        """Close all."""
        for key in list(self._ports):
            await self.drop(key)

    @staticmethod
    async def _nothing(_: Peer) -> bytes | None:
        return None
