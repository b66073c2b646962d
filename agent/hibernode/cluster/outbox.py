"""What is to be told to the API server, kept while it is away and told later, in order and bounded."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Final

from hibernode.errors import UnavailableError
from hibernode.kube.api import LONGEST_PAUSE, KubeStatusError

log = logging.getLogger("hibernode.cluster")

KEPT: Final = 1000
"""Messages; an outage of minutes on a busy node makes some dozens. Beyond these the oldest are lost."""

FORBIDDEN: Final = "ApiForbidden"

Send = Callable[[], Awaitable[None]]


class Outbox:
    """Sends one message after the other. ``lost`` counts those that were refused or were too many."""

    def __init__(self, kept: int = KEPT) -> None:
        self.lost = 0
        self._kept = kept
        self._waiting: OrderedDict[str, Send] = OrderedDict()
        self._numbers = itertools.count()
        self._news = asyncio.Event()

    def __len__(self) -> int:
        """Count what waits."""
        return len(self._waiting)

    def put(self, send: Send, key: str = "") -> None:
        """Have something sent; with a ``key`` it takes the place of what waits under the same."""
        key = key or f"#{next(self._numbers)}"
        self._waiting.pop(key, None)
        self._waiting[key] = send
        while len(self._waiting) > self._kept:
            name, _ = self._waiting.popitem(last=False)
            self.lost += 1
            log.warning("too much waits for the API server: %s is lost", name)
        self._news.set()

    async def now(self, send: Send, key: str, seconds: float) -> bool:
        """Send at once, before all that waits; what does not go within ``seconds`` waits with the others."""
        try:
            async with asyncio.timeout(seconds):
                await send()
        except KubeStatusError as error:
            self._refused(key, error)
            return False
        except (UnavailableError, TimeoutError):
            self.put(send, key)
            return False
        self._waiting.pop(key, None)
        return True

    async def run(self) -> None:
        """Send for ever."""
        while True:
            await self._news.wait()
            self._news.clear()
            while self._waiting:
                await self._first()

    async def _first(self) -> None:
        """Send the oldest message; one that cannot be sent now keeps its place."""
        key, send = next(iter(self._waiting.items()))
        try:
            await send()
        except KubeStatusError as error:
            self._refused(key, error)
        except UnavailableError as error:
            if error.reason != FORBIDDEN:
                await asyncio.sleep(random.uniform(LONGEST_PAUSE / 2, LONGEST_PAUSE))  # noqa: S311 - spreads callers
                return
            self._refused(key, error)
        except Exception as error:
            log.exception("a message to the API server cannot be sent")
            self._refused(key, error)
        if self._waiting.get(key) is send:  # nothing newer has taken its place meanwhile
            del self._waiting[key]

    def _refused(self, key: str, error: Exception) -> None:
        """Give a message up: its object has gone, or we may not."""
        self.lost += 1
        log.warning("the API server does not take %s: %s", key, str(error).partition("\n")[0][:600])
