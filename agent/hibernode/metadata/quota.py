"""How much one owner may keep: nobody fills the disk, or the cluster's store, for all."""

from __future__ import annotations

from contextlib import suppress
from typing import Final

from hibernode.errors import ConflictError, TooLargeError
from hibernode.metadata.access import ROOT
from hibernode.metadata.backend import MetadataBackend, WorkerQuery
from hibernode.metadata.records import SourceStatus

MAX_RECORDS: Final = 1024
"""A pod of 8 ranks with 9 kinds of sources has 72 that live."""

MAX_BYTES: Final = 512 << 20
"""Of payloads and tensors; etcd takes 2 GiB of all that a cluster has (its default)."""


async def make_room(backend: MetadataBackend, owner: str, key: tuple[str, str], size: int) -> None:
    """Have room for one record more of ``owner``: records of its own that are STALE go, the oldest first.

    :param key: the record; what stands of it is replaced, and counts for nothing.
    :raises TooLargeError: ``TooManyRecords``: too much is left. Root of the node may keep any number.
    """
    if owner == ROOT:
        return
    found = await backend.list_workers(WorkerQuery(owner=owner))
    mine = [one for one in found if (one.source_id, one.worker_id) != key]
    count, kept = len(mine) + 1, sum(one.size for one in mine) + size
    for one in reversed(mine):
        if count <= MAX_RECORDS and kept <= MAX_BYTES:
            break
        if one.status is SourceStatus.STALE:
            with suppress(ConflictError):
                await backend.remove_worker(one.source_id, one.worker_id, expect=one.version)
                count, kept = count - 1, kept - one.size
    if count > MAX_RECORDS or kept > MAX_BYTES:
        raise TooLargeError(
            f"{owner[:99]} would keep {count} records of {kept} bytes, and may {MAX_RECORDS} of {MAX_BYTES}",
            remedy="let workers go that are of no use; their records are Stale then, and make room",
            reason="TooManyRecords",
        )
