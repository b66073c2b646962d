"""Health: named checks, each with a deadline, asked at most once a second however many probes come.

A check that hangs (a dead NFS server, a wedged driver) is reported when its deadline passes and is not
started again until it has ended, so it costs one thread and no answer is late.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from hibernode.apart import in_daemon

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

T = TypeVar("T")

DEADLINE_SECONDS: Final = 0.8
"""A kubelet's probe waits for 1 s unless told otherwise."""

KEEP_SECONDS: Final = 1.0


class State(StrEnum):
    """What a check says; degraded is alive and ready, with less than all of its parts."""

    OK = "ok"
    DEGRADED = "degraded"
    FAIL = "fail"


class DegradedError(Exception):
    """Raised by a check: it works, but not as it should; the message says why."""


@dataclass(frozen=True, slots=True)
class Check:
    """A named check.

    ``run`` returns a detail worth showing (or nothing), raises DegradedError, or fails with any other
    exception. A check that is not ``required`` is degraded at worst. ``deadline`` is in seconds.
    """

    name: str
    run: Callable[[], Awaitable[str]]
    deadline: float = DEADLINE_SECONDS
    required: bool = True


@dataclass(frozen=True, slots=True)
class Result:
    """What a check said, and how long it took in seconds."""

    name: str
    state: State
    message: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Answer(Generic[T]):
    """What a probe found: a value or an error. ``seconds`` is how long it took, so far if it hangs."""

    value: T | None
    error: Exception | None
    seconds: float


class Probe(Generic[T]):
    """An async callable that is asked once at a time and once in ``keep`` seconds, with a deadline."""

    def __init__(self, run: Callable[[], Awaitable[T]], *, deadline: float, keep: float) -> None:
        self._run = run
        self._deadline = deadline
        self._keep = keep
        self._task: asyncio.Task[Answer[T]] | None = None
        self._started = 0.0
        self._last: Answer[T] | None = None
        self._last_at = 0.0

    async def ask(self) -> Answer[T]:
        """Ask, join whoever asks already, or repeat the last answer. Raises nothing but cancellation."""
        if self._task is None:
            if self._last is not None and time.monotonic() - self._last_at < self._keep:
                return self._last
            self._started = time.monotonic()
            self._task = asyncio.create_task(self._ask())
        task = self._task
        left = self._started + self._deadline - time.monotonic()
        # Not wait_for: it would cancel the task, and a thread behind it cannot be cancelled.
        done, _ = await asyncio.wait({task}, timeout=max(0.0, left))
        if done and not task.cancelled():
            return task.result()
        seconds = time.monotonic() - self._started
        why = "the agent is stopping" if task.cancelled() else f"no answer for {seconds:.1f} s"
        return Answer(None, TimeoutError(why), seconds)

    async def _ask(self) -> Answer[T]:
        value, failure = None, None
        try:
            value = await self._run()
        except Exception as error:  # noqa: BLE001 - it is the answer
            failure = error
        answer: Answer[T] = Answer(value, failure, time.monotonic() - self._started)
        self._last, self._last_at, self._task = answer, time.monotonic(), None
        return answer

    def close(self) -> None:
        """Give up on what still runs."""
        if self._task is not None:
            self._task.cancel()


def in_thread(work: Callable[[], T]) -> Callable[[], Awaitable[T]]:
    """Make a blocking function awaitable, each call in a thread of its own (see :mod:`hibernode.apart`)."""
    return lambda: in_daemon(work)


class Health:
    """The agent's checks."""

    def __init__(self) -> None:
        self._checks: dict[str, tuple[Check, Probe[str]]] = {}

    def add(self, check: Check) -> None:
        """Register a check; its name must be new."""
        if check.name in self._checks:
            raise ValueError(f"there is a check {check.name} already")
        self._checks[check.name] = (check, Probe(check.run, deadline=check.deadline, keep=KEEP_SECONDS))

    async def results(self) -> list[Result]:
        """Ask all checks at once, in the order in which they were added."""
        checks = list(self._checks.values())
        answers = await asyncio.gather(*(probe.ask() for _, probe in checks))
        return [_result(check, answer) for (check, _), answer in zip(checks, answers, strict=True)]

    def close(self) -> None:
        """Give up on checks that hang."""
        for _, probe in self._checks.values():
            probe.close()


def worst(results: list[Result]) -> State:
    """Sum up: fail if one fails, degraded if one is, else ok."""
    states = {result.state for result in results}
    return next((state for state in (State.FAIL, State.DEGRADED) if state in states), State.OK)


def _result(check: Check, answer: Answer[str]) -> Result:
    error = answer.error
    if error is None:
        return Result(check.name, State.OK, answer.value or "", answer.seconds)
    state = State.FAIL if check.required and not isinstance(error, DegradedError) else State.DEGRADED
    message = str(error) or type(error).__name__
    return Result(check.name, state, message, answer.seconds)
