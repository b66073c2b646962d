"""Blobs of local workers, fetched from the workers themselves.

A stock client loads a blob that comes with an empty worker endpoint without asking the worker, and a wrong
one can end its process. So an answer has that form only when the worker has just confirmed, at the endpoints
of its record, that it is the one: its manifest echoes the ids, and its NIXL listener gives a blob with its
agent's name. Everything else is answered as it was published.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass, replace
from typing import Any, Final
from weakref import WeakValueDictionary

from hibernode.errors import HibernodeError, IntegrityError, RefusedError
from hibernode.metadata.gate import check_worker
from hibernode.metadata.locality import Node, reachable, split_endpoint
from hibernode.metadata.nixl_blob import read_header, refuse_foreign, require_agent
from hibernode.metadata.nixl_wire import fetch_blob
from hibernode.metadata.publish import off_loop
from hibernode.metadata.records import BackendPayload, BackendType, SourceInstance, SourceRecord, WorkerRecord
from hibernode.metadata.shelf import ContentKey, content_key
from hibernode.metadata.wire import MANIFEST, P2P, check_fields, found_parts, tensors_of

log = logging.getLogger("hibernode.metadata")

MAX_MANIFEST: Final = 16 << 20
"""Bytes of a worker's manifest; some 100 a tensor."""

ASKING: Final = 8
"""Workers that are asked at one time; half of them may be of one owner, for they may not answer."""

SUSPECT_SECONDS: Final = 10.0
"""How long a worker that did not answer is no reason to hide others."""

MAX_SUSPECTS: Final = 4096
MANY: Final = 1000
"""Tensors that take longer to encode than the event loop should be kept waiting."""

ENTRY_BYTES: Final = 1024
"""Of an entry beside its encoded answer."""


@dataclass(slots=True)
class _Entry:
    """An encoded answer; of one that was confirmed ``digest``, ``at`` (monotonic seconds), and the blob.

    Whoever sends the blob sends this very object, so that callers who do not read cost no copies.
    """

    encoded: bytes
    digest: str = ""
    at: float = 0.0
    blob: bytes = b""

    @property
    def size(self) -> int:
        """Bytes that it takes."""
        return len(self.encoded) + len(self.blob) + ENTRY_BYTES


class Blobs:
    """Encoded answers of GetMetadata, the least lately used one going first when there are ``max_bytes``.

    :param seconds: what all questions to a worker may take for one answer.
    :param keep_seconds: how long its confirmation holds.
    """

    def __init__(self, *, seconds: float, keep_seconds: float, max_bytes: int) -> None:
        self._seconds, self._keep, self._max = seconds, keep_seconds, max_bytes
        self._entries: OrderedDict[ContentKey, _Entry] = OrderedDict()
        self._asked: dict[ContentKey, asyncio.Task[_Entry | None]] = {}
        self._slots = asyncio.Semaphore(ASKING)
        self._lanes = WeakValueDictionary[str, asyncio.Semaphore]()
        self._suspects: OrderedDict[ContentKey, float] = OrderedDict()
        self.bytes = 0
        self.counts: Counter[str] = Counter()

    async def close(self) -> None:
        """Give up on questions under way."""
        for task in self._asked.values():
            task.cancel()
        await asyncio.gather(*self._asked.values(), return_exceptions=True)

    def suspect(self, one: SourceInstance) -> bool:
        """Tell whether a worker was asked of late and did not confirm."""
        return time.monotonic() < self._suspects.get(content_key(one), 0.0)

    async def answer(self, record: SourceRecord, owner: str, node: Node | None) -> tuple[bytes, bool]:
        """Encode the lasting part of an answer: with the worker's blob if it confirms, else as published.

        ``owner`` is whose the record is; ``node`` None: no worker is to be asked. Returns also whether the
        worker has confirmed it.

        :raises IntegrityError: ``BlobAgentMismatch``: another writer's record has another agent's blob.
        """
        worker = record.worker
        assert worker is not None
        if node is None or not _askable(worker, owner, node):
            key = content_key(record.instance)
            entry = self._entries.get(key)
            if entry is None or entry.digest:
                refuse_foreign(worker.payload.nixl, worker.agent_name, IntegrityError)
                entry = _Entry(await _encoded(record))
                self._put(key, entry)
            return entry.encoded, False
        entry = await self._confirmed(record, worker, owner, node)
        return (await _encoded(record), False) if entry is None else (entry.encoded, True)

    async def blob(self, record: SourceRecord, owner: str, node: Node) -> bytes | None:
        """Return a worker's blob if the worker confirms it."""
        worker = record.worker
        if worker is None or not _askable(worker, owner, node):
            return None
        entry = await self._confirmed(record, worker, owner, node)
        return None if entry is None else entry.blob

    async def _confirmed(
        self, record: SourceRecord, worker: WorkerRecord, owner: str, node: Node
    ) -> _Entry | None:
        """Find what the worker confirmed a moment ago, or ask it; None when it does not confirm."""
        key = content_key(record.instance)
        if (entry := self._fresh(key)) is not None:
            self.counts["cached"] += 1
            return entry
        task = self._asked.get(key)
        if task is None:
            task = self._asked[key] = asyncio.create_task(self._ask(key, record, worker, owner, node))
            task.add_done_callback(lambda _: self._asked.pop(key, None))
        return await asyncio.shield(task)

    def _fresh(self, key: ContentKey) -> _Entry | None:
        entry = self._entries.get(key)
        if entry is None or not entry.digest or time.monotonic() > entry.at + self._keep:
            return None
        self._entries.move_to_end(key)
        return entry

    async def _ask(
        self, key: ContentKey, record: SourceRecord, worker: WorkerRecord, owner: str, node: Node
    ) -> _Entry | None:
        """Ask the worker; None when it did not confirm."""
        lane = self._lanes.setdefault(owner, asyncio.Semaphore(ASKING // 2))
        try:
            async with asyncio.timeout(self._seconds), lane, self._slots:
                confirmed, digest = await self._confirm(record.instance, worker, owner, node)
        except (HibernodeError, OSError, TimeoutError, ValueError) as error:
            self.counts["unconfirmed"] += 1
            log.info("worker %s did not confirm its record: %s", record.instance.worker_id, error)
            self._suspects[key] = time.monotonic() + SUSPECT_SECONDS
            self._suspects.move_to_end(key)
            while len(self._suspects) > MAX_SUSPECTS:
                self._suspects.popitem(last=False)
            return None
        self.counts["confirmed"] += 1
        self._suspects.pop(key, None)
        old = self._entries.get(key)
        if old is not None and old.digest == digest:
            old.at = time.monotonic()
            return old
        encoded = await asyncio.to_thread(found_parts, replace(record, worker=confirmed))
        entry = _Entry(encoded, digest, time.monotonic(), confirmed.payload.nixl)
        self._put(key, entry)
        return entry

    async def _confirm(
        self, one: SourceInstance, worker: WorkerRecord, owner: str, node: Node
    ) -> tuple[WorkerRecord, str]:
        manifest = await _manifest(worker.worker_grpc_endpoint, one, self._seconds)
        for name, theirs, ours in (
            ("source id", manifest.mx_source_id, one.source_id),
            ("worker id", manifest.worker_id or one.worker_id, one.worker_id),
            ("agent name", manifest.agent_name or worker.agent_name, worker.agent_name),
            ("rank", manifest.worker_rank, one.rank),
        ):
            if theirs != ours and not (name == "source id" and theirs == one.alias):
                raise RefusedError(f"its {name} is {theirs!r:.100}, the record says {ours!r:.100}")
        endpoint = split_endpoint(worker.metadata_endpoint or manifest.metadata_endpoint)
        if endpoint is None or not reachable(owner, endpoint[0], node):
            raise RefusedError("its NIXL listener is at no address of its own")
        blob = await fetch_blob(*endpoint, deadline=self._seconds)
        header = read_header(blob)
        require_agent(header, worker.agent_name)
        confirmed = replace(
            worker,
            payload=BackendPayload(BackendType.NIXL, nixl=blob),
            tensors=await asyncio.to_thread(tensors_of, manifest.tensors),
            metadata_endpoint="",
            worker_grpc_endpoint="",
        )
        if not confirmed.tensors:
            raise RefusedError("its manifest has no tensors")
        await asyncio.to_thread(check_worker, confirmed)
        tensors = hashlib.sha256(manifest.SerializeToString(deterministic=True)).hexdigest()
        return confirmed, f"{header.digest}-{tensors}"

    def _put(self, key: ContentKey, entry: _Entry) -> None:
        old = self._entries.pop(key, None)
        self.bytes += entry.size - (old.size if old else 0)
        self._entries[key] = entry
        while self.bytes > self._max and self._entries:
            self.bytes -= self._entries.popitem(last=False)[1].size


async def _encoded(record: SourceRecord) -> bytes:
    return await off_loop(record.instance.tensor_count > MANY, lambda: found_parts(record))


def _askable(worker: WorkerRecord, owner: str, node: Node) -> bool:
    """Tell whether this is a worker that peers would ask, at an address that is its own."""
    endpoint = split_endpoint(worker.worker_grpc_endpoint)
    return (
        worker.artifact is None
        and worker.payload.type is BackendType.NONE
        and bool(worker.agent_name)
        and endpoint is not None
        and reachable(owner, endpoint[0], node)
    )


async def _manifest(endpoint: str, one: SourceInstance, seconds: float) -> Any:
    """Ask a worker for its manifest.

    :raises RefusedError: it did not give one.
    """
    import grpc  # noqa: PLC0415 - only where the service runs

    method = P2P.services["WorkerService"]["GetTensorManifest"]
    options = [
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.max_receive_message_length", MAX_MANIFEST),
    ]
    async with grpc.aio.insecure_channel(endpoint.removeprefix("http://"), options) as channel:
        call: Any = channel.unary_unary(method.path, method.request.SerializeToString)
        try:
            data: bytes = await call(
                method.request(mx_source_id=one.source_id, worker_id=one.worker_id), timeout=seconds
            )
        except grpc.aio.AioRpcError as error:
            raise RefusedError(
                f"{endpoint} gives no manifest: {error.code().name}: {error.details() or ''!s:.200}"
            ) from None
    return await asyncio.to_thread(_decode, method.response, data)


def _decode(kind: Any, data: bytes) -> Any:
    """Decode a manifest, if it does not become many times as large by that."""
    from google.protobuf.message import DecodeError  # noqa: PLC0415 - heavy, as gRPC

    check_fields(MANIFEST, data)
    try:
        return kind.FromString(data)
    except DecodeError:
        raise RefusedError("its manifest cannot be decoded") from None
