"""Work that is done while the dumped tree is frozen and its images are whole.

CRIU runs an *action script* at several moments; at ``post-dump`` all images are written and no task has been
let go yet. Ours is three lines of shell that say so through a pipe and wait for an answer on another, so
that the work itself is done by the agent, with all that it holds open. An answer other than 0 makes CRIU
fail, and the tree runs on.

The script is a file in memory and the pipes have no names: CRIU reaches all three through /proc/AGENT/fd. So
nothing depends on where files may be executed, and when the agent dies the script ends, with an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Final, Self

FAILED: Final = 70
"""sysexits.h: EX_SOFTWARE. CRIU ends with an error when its script ends with another code than 0."""

SCRIPT: Final = """#!/bin/sh
[ "$CRTOOLS_SCRIPT_ACTION" = post-dump ] || exit 0
echo frozen >/proc/{pid}/fd/{say} && read -r code </proc/{pid}/fd/{answer} && exit "$code"
exit 1
"""


class FrozenHook:
    """Calls ``work`` once while CRIU holds the tree. Use it as a context around CRIU.

    ``argument`` is the value of ``--action-script``. ``error`` is what ``work`` raised, for the caller to
    raise again when CRIU has failed.
    """

    def __init__(self, work: Callable[[], Awaitable[None]]) -> None:
        self.error: Exception | None = None
        self._work = work
        self._task: asyncio.Task[None] | None = None
        self._heard, self._say = os.pipe2(os.O_CLOEXEC)
        self._wait, self._answer = os.pipe2(os.O_CLOEXEC)
        text = SCRIPT.format(pid=os.getpid(), say=self._say, answer=self._wait).encode()
        self._script = _program(text)

    @property
    def argument(self) -> str:
        """The script's path, which is there as long as this process and the context are."""
        return f"/proc/{os.getpid()}/fd/{self._script}"

    async def __aenter__(self) -> Self:
        """Begin to listen."""
        asyncio.get_running_loop().add_reader(self._heard, self._on_frozen)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for the work, which may not go on behind whoever undoes the dump."""
        asyncio.get_running_loop().remove_reader(self._heard)
        if self._task is not None:
            if error is not None:
                self._task.cancel()
            await asyncio.wait({self._task})
        for fd in (self._heard, self._say, self._wait, self._answer, self._script):
            os.close(fd)

    def _on_frozen(self) -> None:
        os.read(self._heard, 64)
        if self._task is None:
            self._task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        code = FAILED
        try:
            await self._work()
            code = 0
        except Exception as error:  # noqa: BLE001 - it is raised by whoever runs CRIU
            self.error = error
        finally:
            os.write(self._answer, b"%d\n" % code)


def _program(text: bytes) -> int:
    """Make an executable file in memory; open for reading only, for what may be written is not executed."""
    writable = os.memfd_create("post-dump", os.MFD_CLOEXEC)
    try:
        with contextlib.closing(os.fdopen(os.dup(writable), "wb")) as file:
            file.write(text)
        os.fchmod(writable, 0o500)
        return os.open(f"/proc/self/fd/{writable}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(writable)
