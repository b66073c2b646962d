"""A queue of keys to be looked at: a key waits in it once, and comes again if it changed during the look.

Nothing about the change is kept: whoever takes a key looks at the state of things as it is then.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from typing import Final

Key = tuple[str, str]
"""Namespace and name."""

FIRST_SECONDS: Final = 0.25
LONGEST_SECONDS: Final = 300.0
"""Between two failing looks at one key: doubling, with jitter."""


class WorkQueue:
    """The queue; all of it runs on one event loop."""

    def __init__(self) -> None:
        self.retries = 0
        self._ready: deque[Key] = deque()
        self._waiting: set[Key] = set()
        self._working: set[Key] = set()
        self._failures: dict[Key, int] = {}
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._news = asyncio.Event()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, key: Key) -> None:
        """Let a key be looked at; while somebody looks, once more after that."""
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()
        if key in self._waiting:
            return
        self._waiting.add(key)
        if key not in self._working:
            self._ready.append(key)
            self._news.set()

    def add_after(self, key: Key, seconds: float) -> None:
        """Let a key be looked at later, unless it comes sooner."""
        loop = asyncio.get_running_loop()
        timer = self._timers.get(key)
        if timer is not None and timer.when() <= loop.time() + seconds:
            return
        if timer is not None:
            timer.cancel()
        self._timers[key] = loop.call_later(seconds, self.add, key)

    async def take(self) -> Key:
        """Wait for a key; :meth:`done`, :meth:`again` or :meth:`failed` must follow."""
        while not self._ready:
            self._news.clear()
            await self._news.wait()
        key = self._ready.popleft()
        self._waiting.discard(key)
        self._working.add(key)
        return key

    def done(self, key: Key, again: float | None = None) -> None:
        """End the work on a key, which went well; ``again``: look once more after this many seconds."""
        self._failures.pop(key, None)
        self._end(key)
        if again is not None and key not in self._waiting:
            self.add_after(key, again)

    def failed(self, key: Key) -> None:
        """End the work on a key, which failed: it comes again, later each time."""
        count = self._failures[key] = self._failures.get(key, 0) + 1
        self.retries += 1
        self._end(key)
        ceiling = min(FIRST_SECONDS * 2 ** min(count - 1, 20), LONGEST_SECONDS)
        if key not in self._waiting:
            self.add_after(key, ceiling * random.uniform(0.5, 1.0))  # noqa: S311 - spreads calls, no secret

    def close(self) -> None:
        """Forget all timers."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _end(self, key: Key) -> None:
        self._working.discard(key)
        if key in self._waiting:
            self._ready.append(key)
            self._news.set()
