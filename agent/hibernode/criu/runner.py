"""CRIU as a subprocess: bounded in time and in output, ended whole, found again after a crash of ours."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from hibernode.criu.find import MIN_VERSION, Criu, clean_env, find_criu
from hibernode.errors import CriuError
from hibernode.host import procfs
from hibernode.host.namespaces import inside
from hibernode.workload import ProcessKey

__all__ = [
    "JOB_ENV",
    "MIN_VERSION",
    "Criu",
    "CriuResult",
    "clean_env",
    "find_criu",
    "kill_leftovers",
    "run_criu",
]

log = logging.getLogger("hibernode.criu")

JOB_ENV: Final = "HIBERNODE_JOB"
"""Names the piece of work in CRIU's environment, so that a new agent can find what a dead one left."""

GRACE_SECONDS: Final = 5.0
"""Between SIGTERM and SIGKILL, and for a killed CRIU to be gone."""

REST_SECONDS: Final = 0.005
"""What was stopped has come to rest after this time, and what was continued has got somewhere else."""

OUTPUT_BYTES: Final = 64 << 10
READ_BYTES: Final = 64 << 10
DRAIN_READS: Final = 16
"""What is still read after the end: a child that keeps the pipe may write to it for ever."""

LEFTOVER_SECONDS: Final = 10.0
MAX_ENVIRON_BYTES: Final = 256 << 10


@dataclass(frozen=True, slots=True)
class CriuResult:
    """How a CRIU ended.

    ``returncode`` is negative for a signal. ``output`` is the end of what it printed, at most 64 KiB; what
    matters is in its log file.
    """

    returncode: int
    timed_out: bool
    output: str
    seconds: float
    argv: tuple[str, ...]


async def run_criu(
    criu: Criu,
    args: Sequence[str],
    *,
    work_dir: Path,
    deadline: float,
    marker: str,
    pass_fds: Sequence[int] = (),
    on_start: Callable[[int], None] | None = None,
    before_kill: Callable[[], None] | None = None,
    safe: Callable[[], bool] | None = None,
    grace: float = GRACE_SECONDS,
    tree: procfs.Process | None = None,
    namespaces: Sequence[int] = (),
) -> CriuResult:
    """Run CRIU to its end, or until ``deadline`` seconds have passed.

    It gets a session of its own, ``work_dir`` for its log, and an environment that holds PATH, LC_ALL and
    ``marker``. At the deadline, or when this call is cancelled, its process group gets SIGTERM and ``grace``
    seconds later SIGKILL; in every case it is reaped before this returns or raises. ``on_start`` is told
    the pid; ``before_kill`` is called before the first of these signals, and before that ``safe`` is asked,
    in a thread and with the group stopped, until this is a moment to kill, or ``grace`` is over. ``tree`` is
    the first process of what is dumped: when that ends, or a process below it is killed, CRIU may wait for
    its word for ever, so it is killed then.
    ``namespaces``: descriptors of those that it shall be in.

    :raises CriuError: it could not be started.
    """
    argv = (*criu.argv, *args)
    if "--work-dir" not in args:
        argv += ("--work-dir", str(work_dir))
    started = time.monotonic()
    try:
        child = _Child(
            argv,
            {**clean_env(), JOB_ENV: marker},
            pass_fds,
            grace,
            before_kill=before_kill,
            safe=safe,
            namespaces=namespaces,
        )
    except OSError as error:
        raise CriuError(
            f"criu: {argv[0]} cannot be started: {error.strerror}", remedy="make setup", reason="CriuBroken"
        ) from error
    timed_out = False
    code: int | None = None
    try:
        if on_start is not None:
            on_start(child.pid)
        if tree is not None:
            child.follow(tree)
        timed_out = not await child.ends_within(deadline)
    finally:
        code = await child.end()
        seconds = time.monotonic() - started
        if code != 0 or timed_out:
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            late = f", ended at the deadline of {deadline:g} s" if timed_out else ""
            log.warning("criu failed (%s%s) after %.2f s: %s", how, late, seconds, shlex.join(argv))
    return CriuResult(code, timed_out, child.output(), seconds, argv)


class _Child:
    """One process, led from the event loop by its pidfd: no thread, no polling.

    asyncio's own subprocess waits for the pipe's end too, which a child of the child can hold off.
    """

    def __init__(
        self,
        argv: Sequence[str],
        env: dict[str, str],
        pass_fds: Sequence[int],
        grace: float,
        *,
        before_kill: Callable[[], None] | None,
        safe: Callable[[], bool] | None,
        namespaces: Sequence[int],
    ) -> None:
        self._grace = grace
        self._before_kill = before_kill
        self._safe = safe
        self._loop = asyncio.get_running_loop()
        self._exited = asyncio.Event()
        self._followed = -1
        self._mourner: asyncio.Task[None] | None = None
        self._tail = bytearray()
        self._pipe, writer = os.pipe()
        os.set_blocking(self._pipe, False)
        try:
            popen = partial(
                subprocess.Popen,
                argv,
                stdin=subprocess.DEVNULL,
                stdout=writer,
                stderr=writer,
                cwd="/",
                env=env,
                umask=0o077,
                pass_fds=pass_fds,
                start_new_session=True,
            )
            self._process = inside(namespaces, popen) if namespaces else popen()
        except BaseException:
            os.close(self._pipe)
            raise
        finally:
            os.close(writer)
        self.pid = self._process.pid
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except BaseException:
            os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
            os.close(self._pipe)
            raise
        self._loop.add_reader(self._pidfd, self._on_exit)
        self._loop.add_reader(self._pipe, self._on_output)

    def follow(self, tree: procfs.Process) -> None:
        """Kill it some time after the tree that it traces has ended, if it has not ended itself."""
        self._followed = os.dup(tree.fileno())
        self._loop.add_reader(self._followed, self._on_gone)
        self._mourner = self._loop.create_task(self._mourn(tree.pid))

    async def _mourn(self, root: int) -> None:
        """Look for the dead whose end nobody is told, as this one waits for their first thread."""
        before: set[ProcessKey] = set()
        while True:
            await asyncio.sleep(GRACE_SECONDS)
            now = await asyncio.to_thread(procfs.unburied, root)
            if now & before:
                log.warning("criu waits for what was killed: pids %s", [key.pid for key in now & before])
                self._give_up()
                return
            before = now

    def _on_gone(self) -> None:
        self._unfollow()
        self._loop.call_later(GRACE_SECONDS, self._give_up)

    def _give_up(self) -> None:
        if not self._exited.is_set():
            self._signal(signal.SIGKILL)

    def _unfollow(self) -> None:
        if self._mourner is not None:
            self._mourner.cancel()
        if self._followed >= 0:
            self._loop.remove_reader(self._followed)
            os.close(self._followed)
            self._followed = -1

    def output(self) -> str:
        return self._tail.decode(errors="replace")

    async def ends_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._exited.wait()
        return self._exited.is_set()

    async def end(self) -> int:
        """End it if it runs, reap it, take the rest of its output; returns its code.

        A cancellation on the way is held back until that is done, which takes twice the grace at most.
        """
        cancelled: asyncio.CancelledError | None = None
        ending = self._loop.create_task(self._kill())
        while not ending.done():
            try:
                await asyncio.shield(ending)
            except asyncio.CancelledError as error:
                if ending.cancelled():  # the loop itself is going down
                    self._signal(signal.SIGKILL)
                cancelled = error
        try:
            code = self._reap()
        finally:
            self._close()
        if cancelled is not None:
            raise cancelled
        return code

    async def _kill(self) -> None:
        if self._exited.is_set():
            return
        await self._find_moment()
        if self._before_kill is not None:
            self._before_kill()
        self._signal(signal.SIGTERM)
        self._signal(signal.SIGCONT)  # it takes SIGTERM first
        await self.ends_within(self._grace)
        # The group, not the leader: helpers of CRIU must not outlive it. The leader is not reaped yet, so
        # the number is still this group's.
        self._signal(signal.SIGKILL)
        await self.ends_within(GRACE_SECONDS)

    async def _find_moment(self) -> None:
        """Stop the group where its death does no harm, as far as anybody knows."""
        if self._safe is None:
            return
        deadline = self._loop.time() + self._grace
        while not self._exited.is_set() and self._loop.time() < deadline:
            self._signal(signal.SIGSTOP)
            await self.ends_within(REST_SECONDS)
            if await asyncio.to_thread(self._safe):
                return
            self._signal(signal.SIGCONT)
            await self.ends_within(REST_SECONDS)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def _reap(self) -> int:
        if self._exited.is_set():
            return self._process.wait()
        code = self._process.poll()
        if code is None:
            log.error("criu, pid %d, does not die of SIGKILL: it waits in the kernel", self.pid)
            threading.Thread(target=self._process.wait, daemon=True).start()
            return -signal.SIGKILL
        return code

    def _on_exit(self) -> None:
        self._loop.remove_reader(self._pidfd)
        self._exited.set()

    def _on_output(self) -> bool:
        """Take one read's worth; False when there is no more."""
        try:
            chunk = os.read(self._pipe, READ_BYTES)
        except BlockingIOError:
            return False
        if not chunk:
            self._loop.remove_reader(self._pipe)
            return False
        self._tail += chunk
        del self._tail[:-OUTPUT_BYTES]
        return True

    def _close(self) -> None:
        self._unfollow()
        for _ in range(DRAIN_READS):
            if not self._on_output():
                break
        self._loop.remove_reader(self._pipe)
        self._loop.remove_reader(self._pidfd)
        os.close(self._pipe)
        os.close(self._pidfd)


def kill_leftovers(
    marker: str,
    *,
    safe: Callable[[], bool] | None = None,
    before_kill: Callable[[], None] | None = None,
) -> list[int]:
    """Kill every CRIU whose environment names ``marker`` and wait until it is gone; returns their pids.

    For a new agent after the death of one that had a CRIU running. A *restored worker* is not found:
    when CRIU has put a task's memory in place, its environment and its executable are those of the image,
    and it is the shim, the tree's parent, that ends it. A half-restored task that is still CRIU inside
    (forked, memory not yet in place) is found and killed. ``safe`` is asked, while CRIU is stopped, whether
    its death would harm the dumped tree now; it is given GRACE_SECONDS to come to a better moment. Then
    ``before_kill`` is called.
    """
    if safe is not None:
        _stop_safely(marker, safe)
    if before_kill is not None:
        before_kill()
    killed: list[int] = []
    deadline = time.monotonic() + LEFTOVER_SECONDS
    while True:
        # Again until there is none: one that was being forked while we looked is seen the next time.
        found = [process for pid in _pids() if (process := _leftover(pid, marker)) is not None]
        for process in found:
            with process:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGKILL)
                gone = _wait_gone(process, deadline - time.monotonic())
            if process.pid not in killed:
                killed.append(process.pid)
            if not gone:
                log.error("criu, pid %d, does not die of SIGKILL: it waits in the kernel", process.pid)
        if not found or time.monotonic() >= deadline:
            return killed


def _stop_safely(marker: str, safe: Callable[[], bool]) -> None:
    deadline = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < deadline:
        with contextlib.ExitStack() as held:
            found = [process for pid in _pids() if (process := _leftover(pid, marker)) is not None]
            for process in found:
                held.enter_context(process)
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGSTOP)
            time.sleep(REST_SECONDS)
            if not found or safe():
                return
            for process in found:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGCONT)
        time.sleep(REST_SECONDS)


def _wait_gone(process: procfs.Process, seconds: float) -> bool:
    poll = select.poll()
    poll.register(process.fileno(), select.POLLIN)
    return bool(poll.poll(max(0.0, seconds) * 1000))


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]  # noqa: PTH208 - names, not paths


def _leftover(pid: int, marker: str) -> procfs.Process | None:
    """Hold the process if it is a living CRIU of ``marker``."""
    try:
        if not _is_criu(procfs.exe(pid)):
            return None
        process = procfs.Process.open(pid)
    except (ProcessLookupError, PermissionError):
        return None
    try:
        # Asked again now that it is held: the pid could have been another's before.
        named = procfs.environ(pid, MAX_ENVIRON_BYTES).get(JOB_ENV) == marker
        if named and _is_criu(procfs.exe(pid)) and process.alive():
            return process
    except (ProcessLookupError, PermissionError):
        pass
    process.close()
    return None


def _is_criu(exe: str | None) -> bool:
    """Whether an executable is CRIU or the loader that a private tree starts it with."""
    name = (exe or "").removesuffix(" (deleted)").rpartition("/")[2]
    return name == "criu" or (name.startswith("ld-") and ".so" in name)
