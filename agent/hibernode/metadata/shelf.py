"""Whole records that were read lately, payload and tensors and all, within a budget of bytes."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from hibernode.metadata.records import SourceIdentity, SourceInstance, WorkerRecord

MAX_BYTES: Final = 256 << 20
TENSOR_BYTES: Final = 400
"""Of one TensorDescriptor in memory: the object, its name and two large numbers."""

Entry = tuple[WorkerRecord, SourceIdentity | None]
ContentKey = tuple[str, str, str, int, str]


class Shelf:
    """The least lately used record goes first."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max, self.bytes = max_bytes, 0
        self._entries: OrderedDict[ContentKey, tuple[Entry, int]] = OrderedDict()

    def get(self, instance: SourceInstance) -> Entry | None:
        """Find what was kept of exactly this content."""
        key = content_key(instance)
        found = self._entries.get(key)
        if found is None:
            return None
        self._entries.move_to_end(key)
        return found[0]

    def put(self, instance: SourceInstance, worker: WorkerRecord, identity: SourceIdentity | None) -> None:
        """Keep a record; one that alone is over the budget is not kept."""
        key = content_key(instance)
        size = len(worker.payload.nixl) + TENSOR_BYTES * len(worker.tensors) + 2048
        old = self._entries.pop(key, None)
        self.bytes += size - (old[1] if old else 0)
        self._entries[key] = ((worker, identity), size)
        while self.bytes > self._max:
            self.bytes -= self._entries.popitem(last=False)[1][1]


def content_key(instance: SourceInstance) -> ContentKey:
    """Tell one content of a record from every other: object, publication and digest."""
    uid = instance.version.uid
    return (uid, instance.source_id, instance.worker_id, instance.generation, instance.digest)
