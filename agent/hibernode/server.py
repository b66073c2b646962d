"""The agent's server: health and metrics over TCP for everybody, JSON over a Unix socket for root.

No request carries a path or a body, each connection carries one request, and every connection has a
deadline, so a peer can hold a descriptor for seconds and no more. The Unix socket's lock is also what
makes sure that one agent runs: it is taken before anything else is looked at.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

from aiohttp import web

from hibernode.errors import HibernodeError, RefusedError, UsageError
from hibernode.events import clean
from hibernode.health import Health, State, worst
from hibernode.listen import BACKLOG, SocketLock, peer, tcp_sockets
from hibernode.metrics import CONTENT_TYPE
from hibernode.workload import CheckpointId

if TYPE_CHECKING:
    import socket

    from hibernode.metrics import Metrics
    from hibernode.settings import Settings

log = logging.getLogger("hibernode.server")

API_VERSION: Final = "hibernode.io/v1"
MAX_EVENTS: Final = 1000
_NUMBER: Final = re.compile(r"[1-9][0-9]{0,3}")
_PID: Final = re.compile(r"[1-9][0-9]{0,6}")
"""Up to PID_MAX_LIMIT of linux/threads.h, and some more."""

_HTTP_STATUS: Final = {1: 404, 2: 400, 4: 409}
"""Exit code of an error to the status that carries it; 500 for the others."""

# aiohttp logs every request, and malformed ones with a traceback; what matters is logged here.
_quiet = logging.getLogger("hibernode.server.http")
_quiet.setLevel(logging.CRITICAL)


class Api(Protocol):
    """What the JSON API asks the agent.

    ``status``, ``events``, ``jobs`` and ``gpu`` run on the loop, so they answer from memory, but ``status``
    may be a coroutine function; ``gc`` and ``retry`` run in a thread. HibernodeErrors reach the client with
    their reason, remedy and exit code.
    """

    def status(self) -> dict[str, Any] | Awaitable[dict[str, Any]]:
        """Describe the agent."""

    def events(self, limit: int) -> list[dict[str, Any]]:
        """List the newest events, the newest last."""

    def jobs(self) -> list[dict[str, Any]]:
        """List what runs and waits."""

    def gpu(self) -> dict[str, Any]:
        """Describe the GPUs."""

    async def records(self, verb: str, query: Mapping[str, str]) -> dict[str, Any]:
        """Answer ``sources``, ``workers`` and ``worker`` of the metadata service, or ``remove``."""

    def gc(self, dry_run: bool) -> list[dict[str, Any]]:
        """Apply the retention rules; list what went, or what would go."""

    def retry(self, id_: CheckpointId) -> dict[str, Any]:
        """Forget the failed attempts on an id."""

    async def absent(self, pid: int, asker: int) -> dict[str, Any]:
        """Count a worker as absent, since the process ``asker`` freezes it, until that one ends."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a peer may use: seconds to send its request, seconds for all, connections, bytes."""

    request_seconds: float = 5.0
    connection_seconds: float = 30.0
    connections: int = 256
    line_bytes: int = 2048
    header_bytes: int = 4096
    headers: int = 64


@dataclass(slots=True)
class Reply:
    """An answer before it is put on the wire."""

    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


Handler = Callable[[web.BaseRequest], Awaitable[Reply]]
Routes = Mapping[tuple[str, str], Handler]


class PublicServer:
    """Health and metrics over TCP. :meth:`start` raises if the address cannot be had."""

    def __init__(
        self, settings: Settings, metrics: Metrics, health: Health, limits: Limits | None = None
    ) -> None:
        self._settings = settings
        self._metrics = metrics
        self._health = health
        self._limits = limits or Limits()
        self._runners: list[web.ServerRunner] = []
        self.addresses: list[tuple[str, int]] = []

    async def start(self) -> None:
        """Listen.

        :raises StorageError: the address cannot be had.
        """
        public: Routes = {
            ("GET", "/livez"): self._livez,
            ("GET", "/readyz"): self._readyz,
            ("GET", "/healthz"): self._healthz,
            ("GET", "/health"): self._era_health,
            ("GET", "/metrics"): self._render_metrics,
        }
        try:
            for found in await tcp_sockets(self._settings.server.listen):
                host, port = found.getsockname()[:2]
                self.addresses.append((host, port))
                await self._listen(found, public, root_only=False)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Close everything; requests in progress have a second to end."""
        self._health.close()
        self._metrics.close()
        for runner in self._runners:
            await runner.cleanup()
        self._runners.clear()
        self.addresses.clear()

    async def _listen(self, sock: socket.socket, routes: Routes, *, root_only: bool) -> None:
        server = _HttpServer(_dispatcher(routes, root_only=root_only), self._limits, lives=not root_only)
        runner = web.ServerRunner(server, shutdown_timeout=1.0)
        await runner.setup()
        self._runners.append(runner)
        await web.SockSite(runner, sock, backlog=BACKLOG).start()

    async def _livez(self, _request: web.BaseRequest) -> Reply:
        return Reply(b"ok\n")  # the loop turns, or nobody would say so

    async def _readyz(self, _request: web.BaseRequest) -> Reply:
        return await self._checks(verbose=False)

    async def _healthz(self, request: web.BaseRequest) -> Reply:
        return await self._checks(verbose="verbose" in request.query)

    async def _checks(self, *, verbose: bool) -> Reply:
        results = await self._health.results()
        state = worst(results)
        shown = [result for result in results if verbose or result.state is not State.OK]
        lines = [f"{result.state.value:<9} {result.name}: {clean(result.message)}" for result in shown]
        text = "\n".join([state.value, *(line.removesuffix(": ") for line in lines)]) + "\n"
        return Reply(text.encode(), status=503 if state is State.FAIL else 200)

    async def _era_health(self, _request: web.BaseRequest) -> Reply:
        return _json({"status": "healthy", "node_name": self._settings.node})

    async def _render_metrics(self, _request: web.BaseRequest) -> Reply:
        return Reply(await self._metrics.render(), CONTENT_TYPE)


class Server(PublicServer):
    """The agent's: both sites. :meth:`start` raises if another agent runs or an address cannot be had."""

    def __init__(
        self, settings: Settings, api: Api, metrics: Metrics, health: Health, limits: Limits | None = None
    ) -> None:
        super().__init__(settings, metrics, health, limits)
        self._api = api
        self._lock = SocketLock(settings.server.socket)

    async def start(self) -> None:
        """Take the socket's lock, then listen on both.

        :raises BusyError: another agent is running.
        :raises StorageError: the socket or the address cannot be had.
        """
        private: Routes = {
            ("GET", "/v1/status"): self._status,
            ("GET", "/v1/events"): self._events,
            ("GET", "/v1/jobs"): self._jobs,
            ("GET", "/v1/gpu"): self._gpu,
            ("GET", "/v1/metadata/sources"): self._records("sources"),
            ("GET", "/v1/metadata/workers"): self._records("workers", "source"),
            ("GET", "/v1/metadata/worker"): self._records("worker", "source", "worker", "with"),
            ("POST", "/v1/metadata/remove"): self._records("remove", "source", "worker"),
            ("POST", "/v1/gc"): self._gc,
            ("POST", "/v1/retry"): self._retry,
            ("POST", "/v1/absent"): self._absent,
        }
        try:
            await self._listen(self._lock.listen(), private, root_only=True)
            await super().start()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Close everything, and let the next agent start."""
        await super().stop()
        self._lock.release()

    async def _status(self, request: web.BaseRequest) -> Reply:
        _query(request)
        found = self._api.status()
        return _object("Status", await found if inspect.isawaitable(found) else found)

    async def _events(self, request: web.BaseRequest) -> Reply:
        text = _query(request, "limit").get("limit", "50")
        if _NUMBER.fullmatch(text) is None or int(text) > MAX_EVENTS:
            raise UsageError(f"limit={text[:20]!r}", remedy=f"a number from 1 to {MAX_EVENTS}")
        return _object("EventList", {"items": self._api.events(int(text))})

    async def _jobs(self, request: web.BaseRequest) -> Reply:
        _query(request)
        return _object("JobList", {"items": self._api.jobs()})

    async def _gpu(self, request: web.BaseRequest) -> Reply:
        _query(request)
        return _object("Gpus", self._api.gpu())

    def _records(self, verb: str, *keys: str) -> Handler:
        async def answer(request: web.BaseRequest) -> Reply:
            found = await self._api.records(verb, _query(request, *keys))
            # In a thread: ten thousand records are megabytes.
            return await asyncio.to_thread(_object, f"Metadata{verb.capitalize()}", found)

        return answer

    async def _gc(self, request: web.BaseRequest) -> Reply:
        """Remove nothing unless ``dry_run=false`` says so in as many words."""
        text = _query(request, "dry_run").get("dry_run", "true")
        if text not in ("true", "false"):
            raise UsageError(f"dry_run={text[:20]!r}", remedy="true or false")
        items = await asyncio.to_thread(self._api.gc, text == "true")
        return _object("GarbageCollection", {"dryRun": text == "true", "items": items})

    async def _retry(self, request: web.BaseRequest) -> Reply:
        id_ = CheckpointId(_query(request, "id").get("id", ""))
        return _object("Retry", await asyncio.to_thread(self._api.retry, id_))

    async def _absent(self, request: web.BaseRequest) -> Reply:
        text = _query(request, "pid").get("pid", "")
        if _PID.fullmatch(text) is None:
            raise UsageError(f"pid={text[:20]!r}", remedy="a process id")
        sock = request.get_extra_info("socket")
        asker = peer(sock)[0] if sock is not None else 0
        return _object("Absence", await self._api.absent(int(text), asker))


# HTTP -------------------------------------------------------------------------------------------------


class _HttpServer(web.Server):
    """A server whose connections are bounded in number, and in time if ``lives``."""

    def __init__(self, handler: Callable[..., Any], limits: Limits, *, lives: bool) -> None:
        super().__init__(handler)
        self.limits = limits
        self.lives = lives

    def __call__(self) -> web.RequestHandler:
        limits = self.limits
        return _Connection(
            self,
            loop=self._loop,
            logger=_quiet,
            access_log=_quiet,
            keepalive_timeout=limits.request_seconds,
            lingering_time=0.0,
            auto_decompress=False,
            max_line_size=limits.line_bytes,
            max_field_size=limits.header_bytes,
            max_headers=limits.headers,
        )


class _Connection(web.RequestHandler):
    """One connection: aiohttp closes it when no request comes, this when all takes too long."""

    __slots__ = ("_end",)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        server = self._manager
        assert isinstance(server, _HttpServer)
        assert isinstance(transport, asyncio.WriteTransport)
        self._end: asyncio.TimerHandle | None = None
        if len(server.connections) > server.limits.connections:
            transport.abort()
        elif server.lives:
            self._end = self._loop.call_later(server.limits.connection_seconds, transport.abort)

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._end is not None:
            self._end.cancel()
        super().connection_lost(exc)


def _dispatcher(routes: Routes, *, root_only: bool) -> Callable[[web.BaseRequest], Awaitable[web.Response]]:
    methods = {path: method for method, path in routes}

    async def dispatch(request: web.BaseRequest) -> Reply:
        if root_only:
            _refuse_others(request)
        method = methods.get(request.path)
        if method is None:
            return Reply(b"not found\n", status=404)
        if request.method != method:
            return Reply(b"method not allowed\n", status=405, headers={"Allow": method})
        if request.body_exists:
            return Reply(b"no request has a body\n", status=413)
        return await routes[method, request.path](request)

    async def handle(request: web.BaseRequest) -> web.Response:
        try:
            reply = await dispatch(request)
        except HibernodeError as error:
            reply = _error(error)
        except Exception:
            log.exception("%s %s: unexpected failure", request.method, clean(request.path, 100))
            reply = _error(
                HibernodeError("unexpected failure", remedy="see the agent's log", reason="InternalError"),
                500,
            )
        headers = {"Content-Type": reply.content_type, "Server": "hibernode", "Cache-Control": "no-store"}
        response = web.Response(body=reply.body, status=reply.status, headers={**headers, **reply.headers})
        response.force_close()
        return response

    return handle


def _refuse_others(request: web.BaseRequest) -> None:
    sock = request.get_extra_info("socket")
    uid = peer(sock)[1] if sock is not None else None  # None: it has gone already
    if uid != 0:
        raise RefusedError(f"the peer's uid is {uid}", remedy="ask as root", reason="PeerRefused")


def _query(request: web.BaseRequest, *known: str) -> dict[str, str]:
    """Take the query apart; a key that is unknown or stands twice is a UsageError."""
    pairs = dict(request.query)
    for key in request.query:
        if key not in known or len(request.query.getall(key)) > 1:
            raise UsageError(f"query key {clean(key, 40)!r} is unknown or repeated", remedy=f"known: {known}")
    return pairs


def _json(data: Mapping[str, Any], status: int = 200) -> Reply:
    return Reply(json.dumps(data, default=str).encode() + b"\n", "application/json", status)


def _object(kind: str, data: Mapping[str, Any]) -> Reply:
    return _json({"apiVersion": API_VERSION, "kind": kind, **data})


def _error(error: HibernodeError, status: int = 0) -> Reply:
    data = {
        "apiVersion": API_VERSION,
        "kind": "Error",
        "reason": error.reason,
        "message": error.message,
        "remedy": error.remedy,
        "exitCode": error.exit_code,
    }
    refused = 403 if error.reason == "PeerRefused" else 0
    return _json(data, status or refused or _HTTP_STATUS.get(error.exit_code, 500))
