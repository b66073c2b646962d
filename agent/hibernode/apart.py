"""Work that may never come back, in threads that nobody has to wait for.

A path inside a container can lead onto a file system whose server is the container's own (FUSE) or has gone
(NFS), and the kernel lets whoever looks there wait for as long as the server likes. So that is never done in
the event loop, and not in the loop's executor either: that has few threads, and the interpreter waits for
every one of them at its end.

Here such work has a daemon thread, which is left behind at its deadline. :func:`stuck` names what was left
behind, and no more work of the same kind is begun for the same owner before it has come back. The threads
themselves are the record of that.

What one costs: a thread with its stack. And as long as the server holds the request that it waits for, the
kernel ends neither the thread nor, after ``kill -9``, the process.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Awaitable, Callable, Hashable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from hibernode.errors import StuckError

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

LOOK_SECONDS: Final = 2.0
"""One look at one file or process takes microseconds; this is long even where the machine swaps."""

STEP_SECONDS: Final = 60.0
"""A step of a pipeline makes some thousand looks, below a second in all; the rest is for a machine that is
busy. A container that hangs holds a place in the queue for this long."""

FILES_SECONDS: Final = 300.0
"""The same where files are written: they are synced, and a slow disk takes so long for tens of gigabytes."""

MAX_STUCK: Final = 256
"""Twice the pods that a kubelet runs unless told otherwise. With more left behind no new work is begun."""


@dataclass(frozen=True, slots=True)
class Stuck:
    """Work that was left behind: whose it is (a container or a process), what it is, for how many seconds."""

    owner: str
    what: str
    seconds: float


class _Thread(threading.Thread):
    """A thread that may be left behind. ``since``: when the work began at which it is now, or went on."""

    def __init__(self, owner: str, what: str) -> None:
        super().__init__(name="hibernode-apart", daemon=True)
        self.owner, self.what, self.since, self.left = owner, what, time.monotonic(), False


def stuck() -> list[Stuck]:
    """List what was left behind and has not come back, the oldest first."""
    now = time.monotonic()
    threads = [each for each in threading.enumerate() if isinstance(each, _Thread) and each.left]
    return [Stuck(each.owner, each.what, now - each.since) for each in sorted(threads, key=lambda t: t.since)]


def go_on() -> None:
    """Say that long work makes progress: its deadline begins anew. Elsewhere this does nothing.

    :raises StuckError: it was left behind, so that it may change nothing any more.
    """
    thread = threading.current_thread()
    if isinstance(thread, _Thread):
        if thread.left:
            raise _error(thread.owner, thread.what, time.monotonic() - thread.since)
        thread.since = time.monotonic()


def _error(owner: str, what: str, seconds: float) -> StuckError:
    return StuckError(
        f"{owner}: {what} did not come back within {seconds:.0f} s",
        remedy="a file system there hangs (FUSE or NFS): bring its server back, or end the container",
        owner=owner,
    )


def _barred(what: str) -> set[str]:
    """List the owners for whom no work of this kind may begin.

    :raises StuckError: for none, since too much was left behind.
    """
    all_of_it = stuck()
    if len(all_of_it) >= MAX_STUCK:
        raise _error(all_of_it[0].owner, f"{MAX_STUCK} looks hang; {all_of_it[0].what}", all_of_it[0].seconds)
    return {each.owner for each in all_of_it if each.what == what}


async def uncut(work: Awaitable[T]) -> T:
    """Wait for ``work`` to its end; a cancellation on the way is raised then.

    A thread cannot be cancelled: what it does would go on behind whoever undoes it.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # it has been looked at
        raise cancelled
    return task.result()


# one piece of work, for a coroutine ---------------------------------------------------------------------


class _Job(_Thread, Generic[T]):
    def __init__(self, work: Callable[[], T], owner: str, what: str) -> None:
        super().__init__(owner, what)
        self._work = work
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[T] = self._loop.create_future()

    def run(self) -> None:
        method: Callable[[Any], None] = self.future.set_result
        result: object
        try:
            result = self._work()
        except Exception as error:  # noqa: BLE001 - it is handed to whoever waits
            method, result = self.future.set_exception, error
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._settle, method, result)

    def _settle(self, method: Callable[[Any], None], result: object) -> None:
        if not self.left:
            method(result)


async def apart(work: Callable[[], T], owner: str, what: str, *, seconds: float = STEP_SECONDS) -> T:
    """Do blocking ``work`` in a thread of its own; what it raises is raised.

    ``seconds``: how long it may take, or be without a sign that it goes on (:func:`go_on`). A cancellation
    leaves it behind too.

    :raises StuckError: it took longer, or earlier work of this kind for this owner has not come back.
    """
    if owner in _barred(what):
        raise _still(owner, what)
    return await _await(_Job(work, owner, what), seconds)


async def in_daemon(work: Callable[[], T]) -> T:
    """Do blocking ``work`` of the agent's own in a daemon thread, whatever else hangs."""
    return await _await(_Job(work, "the agent", "a check"), math.inf)


async def _await(job: _Job[T], seconds: float) -> T:
    job.start()
    try:
        while not job.future.done() and (rest := job.since + seconds - time.monotonic()) > 0:
            await asyncio.wait({job.future}, timeout=None if rest == math.inf else rest)
    finally:
        job.left = not job.future.done()
    if job.left:
        raise _error(job.owner, job.what, seconds)
    return job.future.result()


def _still(owner: str, what: str) -> StuckError:
    oldest = next((each for each in stuck() if (each.owner, each.what) == (owner, what)), None)
    return _error(owner, what, oldest.seconds if oldest is not None else 0)


# many looks, for a thread -------------------------------------------------------------------------------


class _Turn(_Thread, Generic[K, T]):
    """Looks at one item after the other."""

    def __init__(
        self, items: list[K], look: Callable[[K], T], what: str, drop: Callable[[T], object]
    ) -> None:
        super().__init__("", what)
        self.items = items
        self.found: dict[K, T] = {}
        self.error: Exception | None = None
        self._look, self._drop = look, drop
        self._lock = threading.Lock()
        self._over = threading.Event()

    def run(self) -> None:
        try:
            for item in self.items:
                result = self._look(item)
                with self._lock:
                    if self.left:
                        self._drop(result)
                        return
                    self.found[item] = result
                    self.since = time.monotonic()
        except Exception as error:  # noqa: BLE001 - it is handed to whoever waits
            self.error = error
        finally:
            self._over.set()

    def wait(self, seconds: float, owner_of: Callable[[K], str]) -> bool:
        """Wait for the end; False when it was left behind at the item after those in ``found``."""
        while not self._over.wait(max(0.0, self.since + seconds - time.monotonic())):
            with self._lock:
                done = len(self.found)
                if done < len(self.items) and time.monotonic() >= self.since + seconds:
                    self.owner = owner_of(self.items[done])
                    self.left = True
                    return False
        return True


def each(
    items: Iterable[K],
    look: Callable[[K], T],
    owner_of: Callable[[K], str],
    what: str,
    *,
    seconds: float = LOOK_SECONDS,
    drop: Callable[[T], object] = lambda _result: None,
) -> dict[K, T]:
    """Look at one item after the other; those whose look hangs, and all others of its owner, are missing.

    Items are distinct. Blocks for ``seconds`` at most for each owner that begins to hang. ``look`` is called
    in another thread, ``owner_of`` only where something hangs, and neither may raise; ``drop`` gets what
    comes too late.

    :raises StuckError: too much hangs already.
    """
    rest, found = list(items), dict[K, T]()
    while rest:
        barred = _barred(what)
        rest = [item for item in rest if not barred or owner_of(item) not in barred]
        turn = _Turn(rest, look, what, drop)
        turn.start()
        ended = turn.wait(seconds, owner_of)
        found.update(turn.found)
        if turn.error is not None:
            raise turn.error
        if ended:
            break
        rest = rest[len(turn.found) + 1 :]
    return found


def within(work: Callable[[], T], owner: str, what: str, *, seconds: float = LOOK_SECONDS) -> T:
    """Do ``work`` in a thread of its own while this one waits; what it raises is raised.

    :raises StuckError: as :func:`apart`.
    """
    found = each([owner], lambda _owner: work(), lambda owner: owner, what, seconds=seconds)
    if owner not in found:
        raise _still(owner, what)
    return found[owner]
