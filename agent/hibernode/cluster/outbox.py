"""What is to be told to the API server, kept while it is away and told later, in order and bounded."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from hibernode.errors import UnavailableError
from hibernode.kube.api import LONGEST_PAUSE, KubeStatusError

log = logging.getLogger("hibernode.cluster")

KEPT: Final = 1000
"""Messages; an outage of minutes on a busy node makes some dozens. Beyond these the oldest are lost."""

FORBIDDEN: Final = "ApiForbidden"

FORBIDDEN_TRIES: Final = 30
"""So often is a message sent that is forbidden, in about as many pauses, 45 s. An API server that has just
started knows no roles yet and forbids all; whoever mends a role does it in two steps."""

Send = Callable[[], Awaitable[None]]


@dataclass(slots=True)
class _Message:
    send: Send
    forbidden: int = 0


class Outbox:
    """Sends one message after the other. ``lost`` counts those that were refused or were too many."""

    def __init__(self, kept: int = KEPT) -> None:
        self.lost = 0
        self._kept = kept
        self._waiting: OrderedDict[str, _Message] = OrderedDict()
        self._numbers = itertools.count()
        self._news = asyncio.Event()

    def __len__(self) -> int:
        """Count what waits."""
        return len(self._waiting)

    def put(self, send: Send, key: str = "") -> None:
        """Have something sent; with a ``key`` it takes the place of what waits under the same."""
        key = key or f"#{next(self._numbers)}"
        self._waiting.pop(key, None)
        self._waiting[key] = _Message(send)
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
            if await self._round():
                await self._news.wait()
                self._news.clear()
            else:
                await asyncio.sleep(random.uniform(LONGEST_PAUSE / 2, LONGEST_PAUSE))  # noqa: S311 - spreads callers

    async def _round(self) -> bool:
        """Send what waits, in order; False if some of it has to be tried again."""
        for key, message in list(self._waiting.items()):
            if self._waiting.get(key) is not message:  # a newer one has taken its place, or it was too old
                continue
            try:
                await message.send()
            except KubeStatusError as error:
                self._refused(key, error)
            except UnavailableError as error:
                if error.reason != FORBIDDEN:
                    return False  # nothing else would go either
                message.forbidden += 1
                if message.forbidden < FORBIDDEN_TRIES:
                    continue  # what others are told is not held up by it
                self._refused(key, error)
            except Exception as error:
                log.exception("a message to the API server cannot be sent")
                self._refused(key, error)
            if self._waiting.get(key) is message:
                del self._waiting[key]
        return not any(message.forbidden for message in self._waiting.values())

    def _refused(self, key: str, error: Exception) -> None:
        """Give a message up: its object has gone, or we may not."""
        self.lost += 1
        log.warning("the API server does not take %s: %s", key, str(error).partition("\n")[0][:600])
