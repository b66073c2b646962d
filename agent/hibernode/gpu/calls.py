"""Calls that may never come back, made off the event loop: one worker thread, a deadline for each call.

A call that passes its deadline is *stuck*: its thread is left behind with it, and a new one takes over. Its
subject is not called again until it has come back, so a subject costs one thread at most, and of those who
begin anew for each look no more than :data:`MAX_LEFT` do.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Final, TypeVar

from hibernode.errors import DeadlineError

T = TypeVar("T")

MAX_LEFT: Final = 32
"""Twice the GPUs of a machine. With more threads left behind nothing new is called in this process."""


class StuckError(DeadlineError):
    """A call has not come back. ``since`` is when it was made, in seconds since the epoch."""

    def __init__(self, subject: str, since: float) -> None:
        super().__init__(f"{subject} has not answered for {max(time.time() - since, 0):.0f} s")
        self.since = since


class Calls:
    """Calls by subject. To be used from one event loop; calls that wait for each other run in order."""

    def __init__(self) -> None:
        self._lane: _Lane | None = None
        self._stuck: dict[str, float] = {}

    @property
    def stuck(self) -> dict[str, float]:
        """Since when each subject has been silent, in seconds since the epoch."""
        return dict(self._stuck)

    async def run(self, subject: str, work: Callable[[], T], deadline: float) -> T:
        """Call ``work`` and hand back what it gives or raises; wait for ``deadline`` seconds at most.

        :raises StuckError: this call, or an earlier one of the same subject, has not come back.
        """
        if subject in self._stuck:
            raise StuckError(subject, self._stuck[subject])
        left = [thread.left for thread in threading.enumerate() if isinstance(thread, _Lane) and thread.left]
        if len(left) >= MAX_LEFT:
            raise StuckError(subject, min(left))
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        lane = self._lane = self._lane or _Lane()
        since = time.time()
        lane.put(lambda: _settle(loop, future, work))
        await asyncio.wait({future}, timeout=deadline)
        if future.done():
            return future.result()
        self._stuck[subject] = lane.left = since
        self._lane = None
        lane.close()
        future.add_done_callback(lambda done: self._back(subject, done))
        raise StuckError(subject, since)

    def _back(self, subject: str, done: asyncio.Future[Any]) -> None:
        """Take note that a stuck call has come back; what it brought is too old to use."""
        self._stuck.pop(subject, None)
        if not done.cancelled():
            done.exception()  # so that asyncio does not complain that nobody looked

    def close(self) -> None:
        """Let the thread end; one that is stuck is a daemon and is left behind."""
        if self._lane is not None:
            self._lane.close()
            self._lane = None


def _settle(loop: asyncio.AbstractEventLoop, future: asyncio.Future[T], work: Callable[[], T]) -> None:
    result: Any
    try:
        result, method = work(), future.set_result
    except Exception as error:  # noqa: BLE001 - it is handed to whoever waits
        result, method = error, future.set_exception  # type: ignore[assignment]

    def deliver() -> None:
        if not future.done():
            method(result)

    with suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(deliver)


class _Lane(threading.Thread):
    """A daemon thread that does one thing after another. ``left``: since when it is left behind, 0 if not."""

    def __init__(self) -> None:
        super().__init__(name="hibernode-gpu", daemon=True)
        self.left = 0.0
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.start()

    def put(self, job: Callable[[], None]) -> None:
        self._queue.put(job)

    def close(self) -> None:
        """End after what is under way."""
        self._queue.put(None)

    def run(self) -> None:
        while (job := self._queue.get()) is not None:
            job()
