"""What the driver reports by itself: XIDs, ECC errors, changes of clocks and of power, in its own thread.

An XID is counted by GPU and number, with the times of the first and the last: a gauge of the last number, as
other exporters have it, keeps it for ever and shows two equal ones as one. Events from before the agent's
start are not to be had.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from hibernode.gpu.nvml import GONE, OVER, TIMEOUT, Nvml, NvmlError, named, translated
from hibernode.gpu.state import Happened

log = logging.getLogger("hibernode.gpu")

XID: Final = "xid"
TYPES: Final = {
    0x0001: "ecc_single_bit",
    0x0002: "ecc_double_bit",
    0x0004: "pstate",
    0x0008: XID,
    0x0010: "clock",
    0x0080: "power_source",
    0x0200: "ecc_single_bit_storm",
    0x0400: "dram_retirement",
    0x0800: "dram_retirement_failure",
    0x1000: "poison_non_fatal",
    0x2000: "poison_fatal",
    0x4000: "gpu_unavailable",
    0x8000: "gpu_recovery_action",
}
"""nvml.h: nvmlEventType*; one of MIG's configuration is left out."""

WAIT_MS: Final = 1000
"""How long the driver may wait for an event; a stop of the library waits for that."""

RETRY_SECONDS: Final = 5.0
SILENT_SECONDS: Final = 30.0
"""A wait that is this much overdue hangs."""

REPEAT_SECONDS: Final = 300.0
"""A fatal XID of one GPU is told once in this time; the counter has them all."""

MAX_KINDS: Final = 256
"""Different numbers of one GPU that are counted apart; the driver knows some 170. The rest is number 0."""


class EventWatch:
    """The thread. ``tell`` is called from it with the first of several fatal XIDs."""

    def __init__(
        self,
        nvml: Nvml,
        fatal: frozenset[int],
        tell: Callable[[Happened], None],
        *,
        wait_ms: int = WAIT_MS,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        self._nvml, self._fatal, self._tell = nvml, fatal, tell
        self._wait_ms, self._retry_seconds = wait_ms, retry_seconds
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, str, int], Happened] = {}
        self._told: dict[tuple[str, int], float] = {}
        self._turned_at = 0.0
        self._over = threading.Event()
        self.error = ""

    def start(self) -> None:
        """Begin; a daemon, for a wait that hangs cannot be ended."""
        threading.Thread(target=self._run, name="hibernode-gpu-events", daemon=True).start()

    def close(self) -> None:
        """Have the thread end with its next turn."""
        self._over.set()

    def happened(self) -> tuple[Happened, ...]:
        """List what has happened since the agent's start."""
        with self._lock:
            return tuple(self._counts.values())

    def trouble(self) -> str:
        """Say why no events come, or nothing."""
        if self._turned_at and (late := time.monotonic() - self._turned_at) > SILENT_SECONDS:
            return f"the wait for events has not come back for {late:.0f} s"
        return self.error

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                with self._nvml.use() as pynvml:
                    self._watch(pynvml)
            except NvmlError as error:
                said = error.message if self._nvml.up else ""  # the poll says that of NVML as a whole
                if said and said != self.error:
                    log.warning("GPU events: %s", said)
                self.error = said
            except Exception:
                log.exception("GPU events: failed, going on")
            self._turned_at = 0.0
            self._over.wait(self._retry_seconds)

    def _watch(self, pynvml: Any) -> None:
        """Register all GPUs and wait, until the library is to be stopped or an error comes."""
        with translated("events"):
            events = pynvml.nvmlEventSetCreate()
        try:
            uuids = self._register(pynvml, events)
            while uuids and self._nvml.up and not self._over.is_set():
                self._turned_at = time.monotonic()
                self._one(pynvml, events, uuids)
                self.error = ""
        finally:
            with suppress(pynvml.NVMLError):
                pynvml.nvmlEventSetFree(events)

    def _register(self, pynvml: Any, events: Any) -> dict[int | None, str]:
        """Ask for what each GPU can report; returns UUIDs by the handles' addresses.

        One that cannot is left out: the poll tells why.
        """
        uuids: dict[int | None, str] = {}
        for index in range(self._nvml.count()):
            try:
                with translated(f"events of the GPU with index {index}"):
                    handle, uuid = named(pynvml, index)
                    wanted = pynvml.nvmlDeviceGetSupportedEventTypes(handle) & sum(TYPES)
                    if wanted:
                        pynvml.nvmlDeviceRegisterEvents(handle, wanted, events)
                        uuids[_address(handle)] = uuid
            except NvmlError as error:
                if error.code in OVER:
                    raise
                log.debug("%s", error.message)
        return uuids

    def _one(self, pynvml: Any, events: Any, uuids: dict[int | None, str]) -> None:
        """Wait for one event and count it."""
        try:
            with translated("events"):
                event = pynvml.nvmlEventSetWait_v2(events, self._wait_ms)
        except NvmlError as error:
            if error.code == TIMEOUT:
                return
            if error.code in GONE:
                log.warning("GPU events: a GPU is lost; the others are registered again")
            raise
        uuid = uuids.get(_address(event.device), "")
        for bit, kind in TYPES.items():
            if event.eventType & bit:
                self._count(uuid, kind, int(event.eventData) if kind == XID else 0)

    def _count(self, uuid: str, kind: str, code: int) -> None:
        now = time.time()
        with self._lock:
            key = (uuid, kind, code)
            if key not in self._counts and sum(one[0] == uuid for one in self._counts) >= MAX_KINDS:
                key = (uuid, kind, 0)
            before = self._counts.get(key) or Happened(*key, 0, now, now)
            seen = self._counts[key] = replace(before, count=before.count + 1, last=now)
        told = self._told.get((uuid, code))
        if kind == XID and code in self._fatal and (told is None or now - told >= REPEAT_SECONDS):
            self._told[uuid, code] = now
            self._tell(seen)


def _address(handle: Any) -> int | None:
    """Tell handles apart: the driver gives the same address for the same GPU."""
    return ctypes.cast(handle, ctypes.c_void_p).value
