"""The metadata service as a part of the agent: its sockets, its backend, its health and its numbers."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, Final

from hibernode.errors import HibernodeError, StorageError, UnavailableError, UsageError
from hibernode.kube.account import own_namespace
from hibernode.listen import SocketLock, tcp_sockets
from hibernode.metadata import roster
from hibernode.metadata.absence import Absences
from hibernode.metadata.access import Gate, Reviewer, by_address, by_credentials, is_loopback
from hibernode.metadata.backend import BackendStats, ChangeKind, MetadataBackend
from hibernode.metadata.blobs import Blobs
from hibernode.metadata.front import Doors, Front
from hibernode.metadata.locality import LocalPlaces, Places
from hibernode.metadata.meter import Meter
from hibernode.metadata.nixl_ports import NixlPorts
from hibernode.metadata.owners import OwnerWatch
from hibernode.metadata.reaper import LEASE, Limits, Reaper
from hibernode.metadata.shares import LARGEST
from hibernode.settings import Settings

if TYPE_CHECKING:
    import grpc
    from prometheus_client import CollectorRegistry

    from hibernode.kube.api import KubeApi
    from hibernode.metadata.service import Service

log = logging.getLogger("hibernode.metadata")

RETRY_SECONDS: Final = 2.0
"""Between attempts to reach the backend."""

ROSTER_SECONDS: Final = 1.0
"""In which the processes that are watched are noted."""

GRACE_SECONDS: Final = 1.0
"""What requests in work have when the agent stops."""

SOCKET_MODE: Final = 0o666
"""Any worker may connect; who it is the kernel tells."""

DIRECTORY_MODE: Final = 0o755
MAX_SEND: Final = 100 << 20
"""Bytes of an answer: what the stock client takes."""


class MetadataPart:
    """Serves from :meth:`start` to :meth:`stop`; :meth:`run` makes it ready.

    ``backend`` and ``reviewer`` are those of the settings unless they are given.
    """

    def __init__(
        self,
        settings: Settings,
        registry: CollectorRegistry,
        *,
        backend: MetadataBackend | None = None,
        reviewer: Reviewer | None = None,
        places: Places | None = None,
    ) -> None:
        self._settings, self._node = settings.metadata, settings.node
        self._private = settings.state_dir / "metadata"
        self._roster = self._private / "processes.json"
        self._given, self._reviewer = backend, reviewer
        self._places = places or LocalPlaces(settings.node)
        self._lock = SocketLock(
            self._settings.socket, "metadata.socket", mode=SOCKET_MODE, directory_mode=DIRECTORY_MODE
        )
        self._inner = SocketLock(self._private / "grpc.sock", "state_dir", directory_mode=0o700)
        found = self._settings
        self._front = Front(
            self._inner.path,
            Doors(found.connections, max(1, found.connections // 8), LARGEST * found.max_message_bytes),
        )
        self._blobs = Blobs(
            seconds=found.confirm_seconds,
            keep_seconds=found.confirm_keep_seconds,
            max_bytes=found.cache_bytes,
        )
        self._meter = Meter(registry)
        self._grpc: grpc.aio.Server | None = None
        self._service: Service | None = None
        self._api: KubeApi | None = None
        self._owners: OwnerWatch | None = None
        self._absences: Absences | None = None
        self._reaper: Reaper | None = None
        self.backend: MetadataBackend | None = None
        self.addresses: list[tuple[str, int]] = []
        self.trouble = "starting"

    async def start(self) -> None:
        """Listen; every request is UNAVAILABLE until :meth:`run` has the records.

        :raises StorageError: a socket or an address cannot be had.
        :raises UsageError: the settings would let everybody publish.
        """
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> None:
        import grpc  # noqa: PLC0415 - 20 MiB that only this part needs

        from hibernode.metadata.service import Rules, Service  # noqa: PLC0415 - as above

        found = self._settings
        socket = self._inner.path
        self._inner.take()
        self._private.chmod(0o700)
        self.backend = self._given or await self._make_backend()
        if found.tokens and self._reviewer is None:
            from hibernode.metadata.token_review import KubeReviewer  # noqa: PLC0415 - only in a cluster

            self._reviewer = KubeReviewer(await self._connection(), found.audiences)
        gate = Gate(self._reviewer, accounts=found.accounts, keep_names=self.backend.name == "sqlite")
        self._owners = OwnerWatch(self.backend)
        self._absences = Absences(self._owners, self._front.cut)
        self._front.barred = self._owners.is_frozen
        self._reaper = await self._make_reaper(self.backend, self._owners)
        self._service = Service(
            self.backend,
            gate=gate,
            owners=self._owners,
            places=self._places,
            blobs=self._blobs,
            meter=self._meter,
            caller=self._front.caller,
            rules=Rules(
                heartbeat_seconds=found.heartbeat_seconds,
                request_seconds=found.request_seconds,
                requests=found.requests,
                watches=found.watches,
                message_bytes=found.max_message_bytes,
                locality=found.locality,
            ),
        )
        if found.nixl_listen:
            ports = NixlPorts(found.nixl_listen, self._service.confirmed_blob, reachable=found.nixl_open)
            await ports.check()
            self._service.ports = ports
        logging.getLogger("grpc._cython.cygrpc").addFilter(_is_news)
        self._grpc = grpc.aio.server(options=_options(found.max_message_bytes))
        self._grpc.add_generic_rpc_handlers(self._service.handlers())
        try:
            self._grpc.add_insecure_port(f"unix:{socket}")
        except RuntimeError as error:
            raise StorageError(
                f"{socket} cannot be listened on: {error}",
                remedy="set state_dir to a directory whose path is shorter than 90 bytes",
                reason="ListenFailed",
            ) from error
        await self._grpc.start()
        self._front.listen(self._lock.listen(), by_credentials)
        bound = await tcp_sockets(found.listen, "metadata.listen") if found.listen else []
        for sock in bound:
            host, port = sock.getsockname()[:2]
            if self._reviewer is None and not is_loopback(host):
                for each in bound:
                    each.close()
                raise UsageError(
                    f"metadata.listen: {host}:{port} is open to other machines, and nothing tells who calls",
                    remedy="set metadata.tokens=true, or listen on 127.0.0.1",
                    reason="OpenToAll",
                )
            self.addresses.append((host, port))
            self._front.listen(sock, by_address)

    async def run(self) -> None:
        """Reach the backend, as often as it takes, and then keep the records tidy until cancelled."""
        assert self.backend is not None
        assert self._service is not None
        assert self._reaper is not None
        while not self._service.ready:
            try:
                await self.backend.connect()
            except UnavailableError as error:
                if self.trouble != error.message:
                    log.warning("metadata: %s", error)
                self.trouble = error.message
                await asyncio.sleep(RETRY_SECONDS)
            else:
                self.trouble, self._service.ready = "", True
                log.info("metadata: records from %s, socket %s", self.backend.name, self._settings.socket)
        assert self._owners is not None
        with suppress(UnavailableError):
            await self._owners.resume(await asyncio.to_thread(roster.load, self._roster))
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep_roster(self._owners))
            group.create_task(self._reaper.run(self._settings.scan_seconds))
            group.create_task(self._follow(self.backend, self._service))

    async def _keep_roster(self, owners: OwnerWatch) -> None:
        """Note who is watched, for the next agent; what it does not find there it learns from heartbeats."""
        noted = -1
        while True:
            if noted != owners.changes:
                noted = owners.changes
                with suppress(UnavailableError, OSError):
                    await asyncio.to_thread(roster.save, self._roster, await owners.entries())
            await asyncio.sleep(ROSTER_SECONDS)

    async def _follow(self, backend: MetadataBackend, service: Service) -> None:
        """Keep nothing of records that are removed, whoever removes them."""
        assert self._owners is not None
        while True:
            try:
                async for change in backend.watch():
                    one = change.instance
                    if change.kind is not ChangeKind.GONE or one is None:
                        continue
                    key = (one.source_id, one.worker_id)
                    if await service.find(*key) is None:  # else it came back since, and has its new process
                        self._owners.forget(key)
                        if service.ports is not None:
                            await service.ports.drop(key)
            except UnavailableError as error:
                log.warning("metadata: %s", error.message)
            await asyncio.sleep(RETRY_SECONDS)

    def freezing(self, pid: int) -> AbstractAsyncContextManager[int]:
        """Have the records of a process and of all below it STALE while it is checkpointed.

        Gives how many there are; entering takes some seconds at most, and raises nothing.
        """
        return nullcontext(0) if self._absences is None else self._absences.freezing(pid)

    async def freezing_by(self, asker: int, pid: int) -> int:
        """Have them STALE for as long as the process ``asker`` lives; returns how many there are.

        :raises RefusedError: ``PeerUnknown``: it has ended, or its pids are not ours.
        """
        return 0 if self._absences is None else await self._absences.until_end_of(asker, pid)

    async def stop(self) -> None:
        """Close everything."""
        if self._service is not None:
            self._service.ready = False
        if self._grpc is not None:
            await self._grpc.stop(GRACE_SECONDS)
        await self._front.stop()
        await self._blobs.close()
        if self._absences is not None:
            await self._absences.close()
        if self._service is not None and self._service.ports is not None:
            await self._service.ports.close()
        if self._owners is not None:
            await self._owners.close()
        if self.backend is not None:
            await self.backend.close()
        if self._api is not None:
            await self._api.close()
        self.backend = self._grpc = self._service = self._api = None
        self._owners = self._absences = self._reaper = None
        self._lock.release()
        self._inner.release()
        self.addresses.clear()

    async def _make_backend(self) -> MetadataBackend:
        if self._settings.backend == "sqlite":
            from hibernode.metadata.backends.sqlite import SqliteBackend  # noqa: PLC0415 - one of two

            return SqliteBackend(self._private / "records.db")
        from hibernode.kube.api import KubeApi, load_configuration  # noqa: PLC0415
        from hibernode.metadata.backends.kubernetes import KubernetesBackend  # noqa: PLC0415

        api = KubeApi(await load_configuration(self._settings.kubeconfig))
        return KubernetesBackend(api, self._settings.namespace or _own_namespace())

    async def _make_reaper(self, backend: MetadataBackend, owners: OwnerWatch) -> Reaper:
        from hibernode.metadata.living import Living  # noqa: PLC0415 - as the others

        found, api, lease = self._settings, None, None
        if found.backend == "kubernetes":
            from hibernode.kube.lease import SECONDS, Lease  # noqa: PLC0415 - only in a cluster

            api = await self._connection()
            holder = f"{self._node}_{secrets.token_hex(8)}"
            seconds = max(SECONDS, int(3 * found.scan_seconds))
            lease = Lease(api, found.namespace or _own_namespace(), LEASE, holder, seconds=seconds)
        return Reaper(
            backend,
            owner_lives=Living(owners, self._places, api),
            lease=lease,
            limits=Limits(found.stale_seconds, found.remove_seconds),
        )

    async def _connection(self) -> KubeApi:
        """Connect to the API server, for what is not the backend's own."""
        if self._api is None:
            from hibernode.kube.api import KubeApi, load_configuration  # noqa: PLC0415

            self._api = KubeApi(await load_configuration(self._settings.kubeconfig))
        return self._api

    # what the agent asks ------------------------------------------------------------------------------

    async def check(self) -> str:
        """Tell how it is, for the agent's health.

        :raises HibernodeError: no records can be served.
        """
        if self._service is None or not self._service.ready or self.backend is None:
            raise HibernodeError(f"no records yet: {self.trouble}")
        for path in (self._lock.path, self._inner.path):
            if not path.is_socket():
                raise HibernodeError(f"{path} was removed, nobody can connect: start the agent again")
        stats = self.backend.stats()
        if stats.trouble or not stats.synced:
            age = f", the list of records is {stats.age_seconds:.0f} s old" if stats.age_seconds else ""
            raise HibernodeError(f"{stats.trouble or 'not known'}{age}")
        return f"{sum(stats.by_status.values())} records in {self.backend.name}"

    async def view(self, verb: str, query: Mapping[str, str]) -> dict[str, Any]:
        """Answer ``hibernode metadata``, see :class:`~hibernode.metadata.view.View`.

        :raises UnavailableError: there are no records yet.
        """
        if self._service is None:
            raise UnavailableError("the metadata service does not run", remedy="see the agent's log")
        return {**await self._service.view(verb, query), "socket": str(self._settings.socket)}

    def status(self) -> dict[str, Any]:
        """Describe it for ``hibernode status``."""
        backend = self.backend
        stats = BackendStats(synced=False, by_status={}) if backend is None else backend.stats()
        return {
            "backend": self._settings.backend if backend is None else backend.name,
            "socket": str(self._settings.socket),
            "addresses": [f"{host}:{port}" for host, port in self.addresses],
            "ready": self._service is not None and self._service.ready and stats.synced,
            "records": {status.name.lower(): count for status, count in stats.by_status.items() if count},
            "unreadable": stats.unreadable,
            "trouble": stats.trouble or self.trouble,
            "listAgeSeconds": stats.age_seconds,
            "connections": self._front.connections,
            "watched": 0 if self._owners is None else len(self._owners),
        }

    def reading(self) -> Mapping[str, float | Mapping[str, float]]:
        """Read the numbers for a scrape."""
        if self.backend is None:
            return {}
        stats = self.backend.stats()
        return {
            "hibernode_metadata_records": {one.name.lower(): n for one, n in stats.by_status.items()},
            "hibernode_metadata_unreadable_records": stats.unreadable,
            "hibernode_metadata_list_age_seconds": stats.age_seconds,
            "hibernode_metadata_cache_bytes": {"records": stats.cached_bytes, "answers": self._blobs.bytes},
            "hibernode_metadata_list_reads_total": stats.relists,
            "hibernode_metadata_working": self._service.working if self._service else 0,
            "hibernode_metadata_watching": self._service.watching if self._service else 0,
            "hibernode_metadata_connections": self._front.connections,
            "hibernode_metadata_refused_connections_total": dict(self._front.refused),
            "hibernode_metadata_blobs_total": dict(self._blobs.counts),
            "hibernode_metadata_watched_records": 0 if self._owners is None else len(self._owners),
            "hibernode_metadata_reaped_records_total": dict(self._reaper.totals) if self._reaper else {},
            "hibernode_metadata_nixl_ports": self._ports,
            "hibernode_metadata_backend_retries_total": stats.retries,
        }

    @property
    def _ports(self) -> int:
        ports = None if self._service is None else self._service.ports
        return 0 if ports is None else len(ports)


def _is_news(record: logging.LogRecord) -> bool:
    """Keep out of the log what gRPC says, with a trace, of each caller that went before its answer."""
    return not record.getMessage().startswith("ExecuteBatchError")


def _options(max_message: int) -> list[tuple[str, int]]:
    """Gather gRPC's own limits."""
    return [
        ("grpc.max_receive_message_length", max_message),
        ("grpc.max_send_message_length", MAX_SEND),
        ("grpc.max_concurrent_streams", 32),  # each may bring 64 KiB of metadata, and never end
        ("grpc.max_metadata_size", 32 << 10),
        ("grpc.absolute_max_metadata_size", 64 << 10),
        ("grpc.so_reuseport", 0),
        # A peer that vanished is found out.
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.max_connection_idle_ms", 600_000),
        # Who watches may ask that as often, though for long nothing happens.
        ("grpc.http2.min_ping_interval_without_data_ms", 20_000),
    ]


def _own_namespace() -> str:
    """Name the namespace of the agent's own pod, as ModelExpress' server would."""
    for name in ("MX_METADATA_NAMESPACE", "POD_NAMESPACE"):
        if os.environ.get(name):
            return os.environ[name]
    if namespace := own_namespace():
        return namespace
    raise UsageError(
        "metadata.namespace is not set, and the agent runs in no pod",
        remedy="set metadata.namespace to the namespace of the workers",
    )
