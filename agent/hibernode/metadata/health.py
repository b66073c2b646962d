"""``grpc.health.v1.Health``: whether records are served."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import grpc

from hibernode.errors import HibernodeError
from hibernode.metadata import proto

HEALTH: Final = proto.load("health")
PERIOD: Final = 1.0
"""Seconds in which a watcher sees a change."""

KEEP: Final = 0.2
"""Seconds for which SERVING holds, however many ask: it takes a look at every record."""

_SERVING: Final = 1
_NOT_SERVING: Final = 2
_UNKNOWN: Final = 3
"""SERVICE_UNKNOWN: a watch tells it, and Check has a code for it."""


class HealthMethods:
    """Answers for the whole server and for each of ``names``.

    :param serves: whether it serves now.
    :param admit: counts a watch until its end; raises a HibernodeError if there is no place for it.
    """

    def __init__(
        self, names: tuple[str, ...], serves: Callable[[], bool], admit: Callable[[Any], object]
    ) -> None:
        self._names, self._serves, self._admit = ("", *names), serves, admit
        self._last, self._until = False, 0.0

    def handler(self) -> grpc.GenericRpcHandler:
        """Build what :meth:`grpc.aio.Server.add_generic_rpc_handlers` takes."""
        check, watch = (HEALTH.services["Health"][name] for name in ("Check", "Watch"))
        return grpc.method_handlers_generic_handler(
            "grpc.health.v1.Health",
            {
                "Check": grpc.unary_unary_rpc_method_handler(
                    self._check, check.request.FromString, check.response.SerializeToString
                ),
                "Watch": grpc.unary_stream_rpc_method_handler(
                    self._watch, watch.request.FromString, watch.response.SerializeToString
                ),
            },
        )

    async def _check(self, request: Any, context: Any) -> Any:
        if (status := self._status(request.service)) == _UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is no such service")
        return HEALTH.HealthCheckResponse(status=status)

    async def _watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            self._admit(context)
        except HibernodeError as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, error.message)
        last = -1
        while True:
            if (status := self._status(request.service)) != last:
                last = status
                yield HEALTH.HealthCheckResponse(status=status)
            await asyncio.sleep(PERIOD)

    def _status(self, service: str) -> int:
        if service not in self._names:
            return _UNKNOWN
        if not self._last or time.monotonic() >= self._until:
            self._last, self._until = self._serves(), time.monotonic() + KEEP
        return _SERVING if self._last else _NOT_SERVING
