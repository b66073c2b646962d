"""Which GPUs there have been: one that does not say its UUID, or is not listed any more, stays. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from hibernode.gpu.state import Gpu, GpuState


class Roster:
    """Remembers each GPU from poll to poll."""

    def __init__(self) -> None:
        self._known: dict[str, Gpu] = {}
        self._at: dict[int, str] = {}
        self._generation = 0

    def join(self, read: Iterable[Gpu], generation: int, now: float) -> list[Gpu]:
        """Name those that did not say who they are, and add those that were there and are not.

        Indices hold within one ``generation`` of NVML. Beyond it a nameless one has a name only if one is
        missing and one is nameless; else it stays nameless rather than get another's name.
        """
        gpus = list(read)
        seen = {gpu.uuid for gpu in gpus if gpu.uuid}
        missing = self._known.keys() - seen
        nameless = [gpu for gpu in gpus if not gpu.uuid]
        if generation != self._generation:
            self._at = {}
        self._generation = generation
        named: list[Gpu] = []
        for gpu in gpus:
            uuid = gpu.uuid or self._at.get(gpu.index, "")
            if not uuid and len(missing) == len(nameless) == 1:
                (uuid,) = missing
            named.append(self._with_past(replace(gpu, uuid=uuid), now))
        self._at.update({gpu.index: gpu.uuid for gpu in named if gpu.uuid})
        there = {gpu.uuid for gpu in named}
        gone = [
            self._with_past(Gpu(uuid, known.index, GpuState.MISSING, "NVML does not list it any more"), now)
            for uuid, known in self._known.items()
            if uuid not in there
        ]
        found = named + gone
        self._known.update({gpu.uuid: gpu for gpu in found if gpu.uuid})
        return found

    def _with_past(self, gpu: Gpu, now: float) -> Gpu:
        """Add since when it is in this state, and what of it does not change."""
        known = self._known.get(gpu.uuid)
        if known is None:
            return replace(gpu, since=gpu.since or now)
        since = known.since if known.state is gpu.state else gpu.since or now
        if gpu.state is GpuState.OK:
            return replace(gpu, since=since)
        return replace(gpu, since=since, name=known.name, pci_bus_id=known.pci_bus_id, minor=known.minor)
