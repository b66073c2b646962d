"""The agent's look at its GPUs: polls NVML, keeps the last snapshot, tells what changes.

Nobody who asks waits for the driver: health, metrics and the API read the snapshot, which says how old it is.
NVML may be absent, come later, break, hang, or lose a GPU; the agent goes on, and NVML is started anew.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from hibernode.apart import uncut
from hibernode.gpu.calls import Calls, StuckError
from hibernode.gpu.events import WAIT_MS, EventWatch
from hibernode.gpu.nvml import LIBRARY_NOT_FOUND, OVER, UNKNOWN, Nvml, NvmlError, failed
from hibernode.gpu.owners import Owners, boot_ticks
from hibernode.gpu.podresources import PodResourcesError, allocations
from hibernode.gpu.roster import Roster
from hibernode.gpu.state import (
    Gpu,
    GpuState,
    Happened,
    NvmlState,
    Owner,
    OwnerKind,
    Snapshot,
    Versions,
)
from hibernode.settings import GpuSettings

log = logging.getLogger("hibernode.gpu")

NVML: Final = "NVML"
RESTART_SECONDS: Final = 60.0
"""While a GPU is not well NVML is started anew this often, for only a start finds one that came back."""

ALLOCATION_SECONDS: Final = 30.0
"""How old the kubelet's answer may be."""

Tell = Callable[[str, str, str], None]
"""Takes an event: ``Normal`` or ``Warning``, a CamelCase reason, a sentence."""


class GpuService:
    """Polls. To be used from one event loop; ``tell`` may be called from another thread."""

    def __init__(
        self,
        settings: GpuSettings,
        tell: Tell = lambda *_: None,
        *,
        owners: Owners | None = None,
        restart_seconds: float = RESTART_SECONDS,
        watch_events: bool = True,
        wait_ms: int = WAIT_MS,
    ) -> None:
        self._settings, self._tell = settings, tell
        self._restart_seconds, self._turn_seconds = restart_seconds, wait_ms / 1000
        self._owners = owners or Owners()
        self._nvml = Nvml()
        self._driver, self._node = Calls(), Calls()
        self._roster = Roster()
        self._was_up = False
        self._started_at = 0.0
        self._asked_kubelet_at: float | None = None
        fatal = frozenset(settings.fatal_xids)
        self._watch = EventWatch(self._nvml, fatal, self._tell_fatal, wait_ms=wait_ms)
        self._watching = not watch_events
        off = Snapshot(NvmlState.OFF, "gpu.enabled is off")
        starting = Snapshot(NvmlState.STARTING, "not asked yet", fatal_xids=settings.fatal_xids)
        self._snapshot = starting if settings.enabled else off

    @property
    def snapshot(self) -> Snapshot:
        """What is known now, from memory."""
        return replace(self._snapshot, happened=self._watch.happened(), events_error=self._watch.trouble())

    async def run(self) -> None:
        """Poll for as long as the agent runs."""
        if not self._settings.enabled:
            await asyncio.Event().wait()
        while True:
            await self.poll()
            await asyncio.sleep(self._settings.poll_seconds)

    async def poll(self) -> Snapshot:
        """Read everything once, and tell what has changed."""
        before = self._snapshot
        now = await self.read()
        self._say_changes(before, now)
        return now

    async def read(self) -> Snapshot:
        """Read everything once; nothing that NVML does is raised."""
        before, began = self._snapshot, time.monotonic()
        try:
            asked_at = boot_ticks()
            versions, count = await self._ask(NVML, self._inventory)
            gpus = [await self._gpu(index) for index in range(count)]
            if gpus and all(gpu.state is GpuState.FAILED for gpu in gpus):
                raise NvmlError(f"no GPU answers: {gpus[0].error}", UNKNOWN)  # noqa: TRY301 - as NVML would
            gpus = self._roster.join(gpus, self._nvml.generation, time.time())
            gpus = await self._with_owners(gpus, asked_at)
            now = Snapshot(
                NvmlState.UP,
                "" if gpus else "NVML lists no GPU",
                taken_at=time.time(),
                seconds=time.monotonic() - began,
                versions=versions,
                gpus=tuple(gpus),
                fatal_xids=self._settings.fatal_xids,
            )
            self._was_up = True
            await self._start_anew_if(not gpus or any(now.troubled()))
        except (StuckError, NvmlError) as error:
            now = self._down(before, error)
            if isinstance(error, NvmlError):
                await self._stop()
        self._snapshot = await self._with_allocations(now, before)
        return self.snapshot

    async def end(self) -> None:
        """Stop NVML for good, and let the threads end; where a call hangs, when that is back."""
        if self._driver.stuck:
            self._nvml.end()
        else:
            with suppress(StuckError):
                await self._driver.run(NVML, self._nvml.end, self._settings.deadline_seconds)
        self.close()

    def close(self) -> None:
        """Let the threads end, those that can."""
        self._watch.close()
        self._driver.close()
        self._node.close()

    # reading ------------------------------------------------------------------------------------------

    async def _ask(self, subject: str, work: Callable[[], Any]) -> Any:
        return await self._driver.run(subject, work, self._settings.deadline_seconds)

    def _inventory(self) -> tuple[Versions, int]:
        """Start NVML if need be, and count the GPUs."""
        if not self._nvml.up:
            self._nvml.start()
            self._started_at = time.monotonic()
        found = self._nvml.versions(), self._nvml.count()
        if not self._watching:
            self._watching = True
            self._watch.start()
        return found

    async def _gpu(self, index: int) -> Gpu:
        """Read one GPU; whatever is wrong with it stays with it."""
        try:
            found: Gpu = await self._ask(f"GPU {index}", lambda: self._nvml.gpu(index))
        except StuckError as error:
            return Gpu("", index, GpuState.STUCK, error.message, error.since)
        except NvmlError as error:
            if error.code in OVER:
                raise
            return failed(index, error)
        return found

    async def _with_owners(self, gpus: list[Gpu], asked_at: int) -> list[Gpu]:
        pids = {process.pid for gpu in gpus for process in gpu.processes or ()}
        if not pids:
            return gpus
        unknown = Owner(OwnerKind.UNKNOWN, "/proc has not answered in time")
        try:
            owners = await self._node.run(
                "/proc", lambda: self._owners.look(pids, asked_at), self._settings.deadline_seconds
            )
        except StuckError:
            owners = {}
        return [
            replace(
                gpu,
                processes=None
                if gpu.processes is None
                else tuple(replace(each, owner=owners.get(each.pid, unknown)) for each in gpu.processes),
            )
            for gpu in gpus
        ]

    async def _with_allocations(self, now: Snapshot, before: Snapshot) -> Snapshot:
        """Add what the kubelet has given, which is asked less often; none where no GPU was ever seen."""
        asked, this = self._asked_kubelet_at, time.monotonic()
        kept = replace(now, allocations=before.allocations, allocations_error=before.allocations_error)
        if not self._was_up or (asked is not None and this - asked < ALLOCATION_SECONDS):
            return kept
        self._asked_kubelet_at = this
        seconds = self._settings.deadline_seconds
        socket = Path(self._settings.pod_resources)
        try:
            given = await self._node.run("the kubelet", lambda: allocations(socket, seconds), seconds + 1)
        except (PodResourcesError, StuckError) as error:
            if error.message != before.allocations_error:
                log.warning("%s", error.message)
            return replace(now, allocations_error=error.message)
        return replace(now, allocations=given)

    # when it does not work ----------------------------------------------------------------------------

    def _down(self, before: Snapshot, error: StuckError | NvmlError) -> Snapshot:
        """Describe NVML as a whole not answering; what was last read stays, with its age."""
        if isinstance(error, StuckError):
            state = NvmlState.STUCK
        elif error.code == LIBRARY_NOT_FOUND and not self._was_up:
            return Snapshot(NvmlState.ABSENT, error.message, fatal_xids=before.fatal_xids)
        else:
            state = NvmlState.BROKEN
        return replace(
            before,
            state=state,
            reason=str(error.message),
            stale_since=before.taken_at or before.stale_since or time.time(),
        )

    async def _start_anew_if(self, unwell: bool) -> None:
        """Stop NVML, so that the next poll starts it, when a GPU is not well; not all the time."""
        if unwell and time.monotonic() - self._started_at > self._restart_seconds:
            await self._stop()

    async def _stop(self) -> None:
        """Stop NVML in its own thread. While a call hangs in it, it stays as it is.

        The stop waits for the wait for events to turn. One that hangs itself is NVML's silence as a whole.
        """
        seconds = self._settings.deadline_seconds + self._turn_seconds
        if self._driver.stuck or not self._nvml.up:
            return
        try:
            await self._driver.run(NVML, lambda: self._nvml.stop(seconds), seconds + 1)
        except StuckError as error:
            log.warning("%s", error.message)

    # telling ------------------------------------------------------------------------------------------

    def _say_changes(self, before: Snapshot, now: Snapshot) -> None:
        """Tell each change of state once, of NVML and of each GPU."""
        if now.state is not before.state:
            if now.state is NvmlState.UP:
                version = now.versions.driver or "unknown"
                log.info("NVML: driver %s, %d GPUs", version, len(now.gpus))
                if before.state in (NvmlState.STUCK, NvmlState.BROKEN):
                    self._tell("Normal", "NvmlRecovered", f"NVML answers again, driver {version}")
            elif now.state is NvmlState.ABSENT:
                log.info("no NVML on this node: %s", now.reason)
            else:
                log.warning("NVML is %s: %s", now.state.value, now.reason)
                self._tell("Warning", "NvmlDown", f"NVML is {now.state.value}: {now.reason}")
        if now.state is not NvmlState.UP:
            return
        old = {gpu.title: gpu for gpu in before.gpus}
        for gpu in now.gpus:
            was = old.get(gpu.title)
            if gpu.state is not GpuState.OK and (was is None or was.state is not gpu.state):
                log.warning("%s is %s: %s", gpu.title, gpu.state.value, gpu.error)
                self._tell("Warning", "GpuLost", f"{gpu.title} is {gpu.state.value}: {gpu.error}")
            elif gpu.state is GpuState.OK and was is not None and was.state is not GpuState.OK:
                self._tell("Normal", "GpuRecovered", f"{gpu.title} is well again, was {was.state.value}")

    def _tell_fatal(self, seen: Happened) -> None:
        log.error("%s: XID %d", seen.uuid, seen.code)
        self._tell(
            "Warning",
            "GpuXidFatal",
            f"{seen.uuid or 'an unknown GPU'} reported XID {seen.code}, {seen.count} so far; "
            "gpu.fatal_xids counts it as fatal",
        )


async def look_once(settings: GpuSettings) -> Snapshot:
    """Read everything once, for a command or a step of a pipeline: no events, no more than this look's time.

    NVML counts its starts: one that is not stopped would keep the agent's own from being started anew.
    """
    service = GpuService(settings, watch_events=False)
    if not settings.enabled:
        return service.snapshot
    try:
        return await service.read()
    finally:
        await uncut(service.end())
