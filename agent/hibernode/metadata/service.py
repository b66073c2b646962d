"""``model_express.p2p.P2pService`` with the upstream server's semantics, and our Changes service beside it.

Two things differ from upstream on purpose: an outage is UNAVAILABLE and never an empty list or "not found",
and a record that is not whole is DATA_LOSS. The same methods answer on the Unix socket and on TCP.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakValueDictionary

import grpc

from hibernode.errors import (
    ConflictError,
    DeadlineError,
    HibernodeError,
    IntegrityError,
    InvalidArgumentError,
    NotFoundError,
    RefusedError,
    TooLargeError,
    UnavailableError,
)
from hibernode.metadata import proto
from hibernode.metadata.access import Caller, Gate
from hibernode.metadata.backend import ChangeKind, MetadataBackend, WorkerQuery
from hibernode.metadata.blobs import Blobs
from hibernode.metadata.health import HealthMethods
from hibernode.metadata.identity import ids_of, mx_source_id
from hibernode.metadata.ids import SourceId, WorkerId
from hibernode.metadata.locality import Node, Places, is_local, prefer
from hibernode.metadata.mapping import kept_bytes
from hibernode.metadata.meter import Meter
from hibernode.metadata.nixl_ports import NixlPorts
from hibernode.metadata.owners import OwnerWatch
from hibernode.metadata.publish import off_loop
from hibernode.metadata.quota import make_room
from hibernode.metadata.records import PodRef, SourceInstance, SourceRecord, SourceStatus
from hibernode.metadata.shares import LARGEST, Share
from hibernode.metadata.times import MS
from hibernode.metadata.view import View
from hibernode.metadata.wire import (
    P2P,
    PUBLISHED,
    check_fields,
    found_now,
    identity_of,
    reference_message,
    status_of,
    worker_of,
)

log = logging.getLogger("hibernode.metadata")

P2P_SERVICE: Final = "model_express.p2p.P2pService"
CHANGES: Final = proto.load("changes")
WATCH_SECONDS: Final = 1800.0
"""After which a watch over TCP is to begin again: its token may be good no longer."""

SMALL: Final = 256 << 10
"""Bytes of a message that needs no look at before it is decoded: what may come of it is 10 MiB at most."""

QUICK: Final = 16 << 10
"""Bytes of one that is decoded on the event loop."""

LARGE: Final = 2
"""Publications larger than that in work at one time, one of one caller."""

_Code = grpc.StatusCode
_CODES: Final[tuple[tuple[type[HibernodeError], grpc.StatusCode], ...]] = (
    (UnavailableError, _Code.UNAVAILABLE),
    (DeadlineError, _Code.DEADLINE_EXCEEDED),
    (IntegrityError, _Code.DATA_LOSS),
    (InvalidArgumentError, _Code.INVALID_ARGUMENT),
    (NotFoundError, _Code.NOT_FOUND),
    (ConflictError, _Code.ABORTED),
    (TooLargeError, _Code.RESOURCE_EXHAUSTED),
    (RefusedError, _Code.PERMISSION_DENIED),
    (HibernodeError, _Code.INTERNAL),
)
_KINDS: Final = {ChangeKind.PUT: 1, ChangeKind.GONE: 2, ChangeKind.SYNCED: 3}


@dataclass(frozen=True, slots=True)
class Rules:
    """Seconds, how many requests and watches at one time, and the largest request.

    One caller may have a quarter; of bytes under way there may be eight times the largest request.
    """

    heartbeat_seconds: float = 90.0
    request_seconds: float = 10.0
    requests: int = 256
    watches: int = 256
    message_bytes: int = 32 << 20
    locality: bool = True


class Service:
    """The methods. ``ready`` is set once the backend's lists are whole."""

    def __init__(
        self,
        backend: MetadataBackend,
        *,
        gate: Gate,
        owners: OwnerWatch,
        places: Places,
        blobs: Blobs,
        meter: Meter,
        caller: Callable[[str], Caller | None],
        rules: Rules,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self._backend, self._gate, self._places, self._blobs = backend, gate, places, blobs
        self._owners = owners
        self._meter, self._caller, self._rules, self._clock = meter, caller, rules, clock
        self._working, self._watching = Share(rules.requests, "requests"), Share(rules.watches, "watches")
        self._bytes = Share(LARGEST * rules.message_bytes, "bytes")
        self._large = asyncio.Semaphore(LARGE)
        self._lanes = WeakValueDictionary[str, asyncio.Lock]()
        self.ready = False
        self.ports: NixlPorts | None = None

    @property
    def working(self) -> int:
        """Requests in work."""
        return self._working.total

    @property
    def watching(self) -> int:
        """Open watches."""
        return self._watching.total

    def handlers(self) -> tuple[grpc.GenericRpcHandler, ...]:
        """Build what :meth:`grpc.aio.Server.add_generic_rpc_handlers` takes."""
        methods = {
            "PublishMetadata": self._publish,
            "ListSources": self._list,
            "GetMetadata": self._get,
            "UpdateStatus": self._update,
        }
        p2p = {name: self._unary(name, method) for name, method in methods.items()}
        watch = CHANGES.services["Changes"]["Watch"]
        streams = grpc.unary_stream_rpc_method_handler
        return (
            grpc.method_handlers_generic_handler(P2P_SERVICE, p2p),
            grpc.method_handlers_generic_handler(
                "hibernode.metadata.v1.Changes",
                {"Watch": streams(self._watch, watch.request.FromString, watch.response.SerializeToString)},
            ),
            HealthMethods((P2P_SERVICE,), self._serves, self._admit_watch).handler(),
        )

    # what all methods share ---------------------------------------------------------------------------

    def _unary(
        self, name: str, work: Callable[[Any, Caller], Awaitable[tuple[bool, bytes]]]
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Wrap a method that returns whether it succeeded, and its answer encoded."""
        method = P2P.services["P2pService"][name]

        async def handle(data: bytes, context: Any) -> bytes:
            began, result, sent = time.monotonic(), "CANCELLED", b""
            try:
                caller = self._known(context)
                _hold(context, self._working, caller)
                _hold(context, self._bytes, caller, len(data))
                async with asyncio.timeout(self._seconds_for(context)):
                    admitted = await self._admit(caller, context)
                    if len(data) <= SMALL:
                        request = await off_loop(len(data) > QUICK, lambda: _decode(method.request, data))
                        good, answer = await work(request, admitted)
                    else:
                        _check_large(name, data)
                        lane = self._lanes.setdefault(caller.key, asyncio.Lock())
                        async with lane, self._large:
                            await asyncio.to_thread(check_fields, PUBLISHED, data)
                            request = await asyncio.to_thread(_decode, method.request, data)
                            good, answer = await work(request, admitted)
                _hold(context, self._bytes, caller, len(answer))
                result, sent = "ok" if good else "rejected", answer
            except _AbortError as error:
                result = error.code.name
                await context.abort(error.code, error.text)
            except TimeoutError:
                result = _Code.DEADLINE_EXCEEDED.name
                await context.abort(_Code.DEADLINE_EXCEEDED, f"{name} took too long")
            except HibernodeError as error:
                code = next(code for kind, code in _CODES if isinstance(error, kind))
                result = code.name
                await context.abort(code, _said(error))
            except Exception:
                log.exception("%s: unexpected failure", name)
                result = _Code.INTERNAL.name
                await context.abort(_Code.INTERNAL, "unexpected failure; see the agent's log")
            finally:
                self._meter.ended(name, result, time.monotonic() - began)
                self._meter.carried(len(data), len(sent))
            return sent

        # Bytes in, bytes out: what is cached is sent as it is, and what is malformed is counted too.
        return grpc.unary_unary_rpc_method_handler(handle)

    def _known(self, context: Any) -> Caller:
        caller = self._caller(context.peer())
        if caller is None:
            raise _AbortError(_Code.PERMISSION_DENIED, "the caller did not come through the agent's door")
        return caller

    async def _admit(self, caller: Caller, context: Any) -> Caller:
        if not self.ready:
            raise UnavailableError("the records are not read yet", remedy="try again in a moment")
        header = next((value for key, value in context.invocation_metadata() if key == "authorization"), "")
        admitted = await self._gate.admit(caller, header if isinstance(header, str) else "")
        if admitted is None:
            raise _AbortError(_Code.UNAUTHENTICATED, "this port wants a bearer token that the cluster knows")
        return admitted

    def _seconds_for(self, context: Any) -> float:
        left = context.time_remaining()
        return self._rules.request_seconds if left is None else min(left, self._rules.request_seconds)

    # the four methods ---------------------------------------------------------------------------------

    async def _publish(self, request: Any, caller: Caller) -> tuple[bool, bytes]:
        answer = P2P.PublishMetadataResponse(worker_id=request.worker_id)
        try:
            _check_complete(request)
            identity, worker_id = identity_of(request.identity), WorkerId(request.worker_id)
            source_id = mx_source_id(identity)
            worker = await asyncio.to_thread(worker_of, request.worker)
            owner = self._gate.owner(caller, PodRef(request.pod_name, request.pod_uid, request.pod_namespace))
            key = (source_id, worker_id)
            self._gate.check(caller, await self.find(*key), key)
            await make_room(self._backend, caller.key, key, kept_bytes(worker, len(worker.tensors)))
            async with self._owners.publishing(caller, key, worker.rank):
                done = await self._backend.publish_metadata(identity, worker_id, worker, owner=owner)
        except (InvalidArgumentError, TooLargeError) as error:
            answer.message = _said(error)
            return False, answer.SerializeToString()
        self._gate.claim(caller, (done.source_id, done.worker_id))
        answer.success, answer.mx_source_id = True, done.source_id
        answer.message = f"published worker {done.worker_id} of source {done.source_id}"
        return True, answer.SerializeToString()

    async def _list(self, request: Any, caller: Caller) -> tuple[bool, bytes]:
        def given(name: str) -> Any:
            return getattr(request, name) if request.HasField(name) else None

        number, ids = given("status_filter"), None
        status = None if number is None else status_of(number)
        answer = P2P.ListSourcesResponse()
        if number is not None and status is None:
            return True, answer.SerializeToString()  # nothing has a status that there is not
        if request.identity.model_name:
            ids = ids_of(identity_of(request.identity))
        found = await self._backend.list_workers(
            WorkerQuery(
                source_ids=ids,
                status=status,
                model_name=given("model_name_filter"),
                rank=given("worker_rank_filter"),
                min_training_step=given("min_training_step"),
                min_updated_at=given("min_updated_at"),
            )
        )
        if status is SourceStatus.READY:
            oldest = self._clock() // MS - int(self._rules.heartbeat_seconds * 1000)
            found = [one for one in found if one.updated_at > 0 and one.updated_at >= oldest]
            node = await self._node(caller)
            if node is not None:
                found = prefer(found, lambda one: self._near(one, node))
        if request.limit:
            found = found[: request.limit]
        answer.instances.extend(reference_message(one) for one in found)
        return True, answer.SerializeToString()

    async def _get(self, request: Any, caller: Caller) -> tuple[bool, bytes]:
        try:
            source_id, worker_id = SourceId(request.mx_source_id), WorkerId(request.worker_id)
        except InvalidArgumentError:
            return True, b""  # found=false: no record has such an id
        record = await self._backend.get_metadata(source_id, worker_id)
        if record is None or record.worker is None:
            return True, b""
        one = record.instance
        node = await self._node(caller)
        key = (one.source_id, one.worker_id)
        owner = self._gate.owner_key(one, key)
        ask = node is not None and one.status is SourceStatus.READY and self._near(one, node)
        parts, confirmed = await self._blobs.answer(record, owner, node if ask else None)
        endpoint = await self.ports.endpoint(key, owner) if confirmed and self.ports is not None else ""
        return True, parts + found_now(record, endpoint)

    async def confirmed_blob(self, key: tuple[str, str]) -> bytes | None:
        """Find the blob of a READY worker of this node, if the worker confirms it."""
        record = await self._backend.get_metadata(*key)
        if record is None or record.instance.status is not SourceStatus.READY:
            return None
        node = await self._places.node()
        if not self._near(record.instance, node):
            return None
        return await self._blobs.blob(record, self._gate.owner_key(record.instance, key), node)

    async def _update(self, request: Any, caller: Caller) -> tuple[bool, bytes]:
        answer = P2P.UpdateStatusResponse()
        try:
            source_id, worker_id = SourceId(request.mx_source_id), WorkerId(request.worker_id)
            status = _status(request.status)
            standing = await self.find(source_id, worker_id)
            key = (standing.source_id if standing is not None else source_id, worker_id)
            self._gate.check(caller, standing, key)
            load = request.source_load if request.HasField("source_load") else None
            lives = status in (SourceStatus.READY, SourceStatus.INITIALIZING)
            async with self._owners.beating(caller, key, request.worker_rank) if lives else nullcontext():
                written = await self._backend.update_status(
                    *key, request.worker_rank, status, self._clock() // MS, source_load=load
                )
        except (InvalidArgumentError, NotFoundError) as error:
            answer.message = _said(error)
            return False, answer.SerializeToString()
        if standing is not None and not self._gate.owner_key(standing, key):
            self._gate.claim(caller, key)
        answer.success = True
        answer.message = "status updated" if written else "a newer status stands"
        return True, answer.SerializeToString()

    async def find(self, source_id: str, worker_id: str) -> SourceInstance | None:
        """Find what stands of a record."""
        found = await self._backend.list_workers(WorkerQuery(source_ids=[source_id]))
        return next((one for one in found if one.worker_id == worker_id), None)

    # where things are ---------------------------------------------------------------------------------

    async def _node(self, caller: Caller) -> Node | None:
        """Return what is known of this node, if that matters to the caller."""
        if not self._rules.locality:
            return None
        node = await self._places.node()
        here = caller.on_node or caller.pod_uid in node.pods
        return node if here or any(caller.address in each for each in node.pods.values()) else None

    def _near(self, one: SourceInstance, node: Node) -> bool:
        """Tell whether a record is of this node, and its worker did not fail to answer of late."""
        return self.local(one, node) and not self._blobs.suspect(one)

    def local(self, one: SourceInstance, node: Node) -> bool:
        """Tell whether a record is of this node."""
        owner = self._gate.owner_key(one, (one.source_id, one.worker_id))
        mine = owner.startswith(("uid:", "container:", "loopback"))
        return mine or owner in node.pods or is_local(one, node)

    async def view(self, verb: str, query: Mapping[str, str]) -> dict[str, Any]:
        """Answer the agent's own commands, see :class:`~hibernode.metadata.view.View`."""
        if not self.ready:
            raise UnavailableError("the records are not read yet", remedy="try again in a moment")
        node = await self._places.node()

        async def confirmed(record: SourceRecord) -> bytes:
            one = record.instance
            if not self.local(one, node):
                return b""
            owner = self._gate.owner_key(one, (one.source_id, one.worker_id))
            return await self._blobs.blob(record, owner, node) or b""

        look = View(self._backend, lambda one: self.local(one, node), confirmed, node.name)
        return await look.ask(verb, query)

    def _serves(self) -> bool:
        return self.ready and self._backend.stats().synced

    def _admit_watch(self, context: Any) -> Caller:
        caller = self._known(context)
        _hold(context, self._watching, caller)
        return caller

    # streams ------------------------------------------------------------------------------------------

    async def _watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        began, result = time.monotonic(), "ok"
        try:
            caller = self._admit_watch(context)
            await self._admit(caller, context)
            source = SourceId(request.mx_source_id) if request.mx_source_id else None
            async with asyncio.timeout(WATCH_SECONDS if caller.address else None):
                async for change in self._backend.watch(source):
                    yield change_message(change.kind, change.instance)
        except TimeoutError:
            result = _Code.UNAVAILABLE.name
            await context.abort(_Code.UNAVAILABLE, "a watch over TCP has an end; begin again")
        except _AbortError as error:
            result = error.code.name
            await context.abort(error.code, error.text)
        except HibernodeError as error:
            code = next(code for kind, code in _CODES if isinstance(error, kind))
            result = code.name
            await context.abort(code, _said(error))
        finally:
            self._meter.ended("Watch", result, time.monotonic() - began)


class _AbortError(Exception):
    """Ends a call with a code."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code, self.text = code, text


def _hold(context: Any, share: Share, caller: Caller, amount: int = 1) -> None:
    """Have a part of a share until the call is over, and its answer with the caller.

    :raises TooLargeError: there is none left.
    """
    share.take(caller.key, amount)
    context.add_done_callback(lambda _: share.give(caller.key, amount))


def _decode(kind: Any, data: bytes) -> Any:
    from google.protobuf.message import DecodeError  # noqa: PLC0415 - heavy, as gRPC

    try:
        return kind.FromString(data)
    except DecodeError:
        raise _AbortError(_Code.INVALID_ARGUMENT, "the message cannot be decoded") from None


def _check_large(name: str, data: bytes) -> None:
    """Refuse what only a publication may be."""
    if name != "PublishMetadata":
        raise TooLargeError(f"a {name} of {len(data)} bytes")


def _check_complete(request: Any) -> None:
    """Refuse a publication with a part missing, in the order in which upstream looks."""
    missing = {
        "identity": not request.HasField("identity"),
        "model_name": not request.identity.model_name,
        "worker_id": not request.worker_id,
        "worker": not request.HasField("worker"),
    }
    for name, is_missing in missing.items():
        if is_missing:
            raise InvalidArgumentError(f"{name} is required")


def _status(number: int) -> SourceStatus:
    status = status_of(number)
    if status is None:
        raise InvalidArgumentError(f"{number} is no status")
    return status


def _said(error: HibernodeError) -> str:
    """Put an error into one line; what a caller sent in it is bounded by the gates."""
    text = f"{error.reason}: {error.message}" + (f" ({error.remedy})" if error.remedy else "")
    return text[:2000]


def change_message(kind: ChangeKind, one: SourceInstance | None) -> Any:
    """Write a change for the stream."""
    if one is None:
        return CHANGES.Change(kind=_KINDS[kind])
    return CHANGES.Change(
        kind=_KINDS[kind],
        mx_source_id=one.source_id,
        worker_id=one.worker_id,
        model_name=one.model_name,
        worker_rank=one.rank,
        status=int(one.status),
        updated_at=one.updated_at,
        generation=one.generation,
        digest=one.digest,
        agent_name=one.agent_name,
    )
