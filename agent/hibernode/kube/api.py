"""Calls of the Kubernetes API with retries, deadlines and bounded answers.

``kubernetes.aio`` brings the connection and the credentials; objects stay the JSON that they are, so that
fields of another release pass through.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlencode

from hibernode.errors import UnavailableError
from hibernode.kube.objects import metadata_of
from hibernode.text import printable

if TYPE_CHECKING:
    from aiohttp import ClientResponse
    from kubernetes.aio.client import Configuration

CALL_SECONDS: Final = 5.0
"""One try of one call; a list of fifty large objects takes about a tenth."""

TOTAL_SECONDS: Final = 15.0
"""One operation with all its calls and tries."""

WATCH_SECONDS: Final = 30
"""A watch is opened anew after this time, so that one that died silently is noticed."""

PAGE: Final = 50
"""Objects of a page: each may have 1.5 MiB, etcd's own limit."""

MAX_ANSWER: Final = 128 << 20
MAX_EVENT: Final = 8 << 20
FIRST_PAUSE: Final = 0.05
LONGEST_PAUSE: Final = 2.0

MERGE: Final = "application/merge-patch+json"
JSON: Final = "application/json"
NAMES_ONLY: Final = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json"
"""Asks for a list without the objects' content."""

TLS_END_SECONDS: Final = 0.1
"""asyncio ends a TLS connection some turns of its loop after it was told to, and aiohttp waits for none."""

NOT_FOUND: Final = 404
CONFLICT: Final = 409
GONE: Final = 410
TRANSIENT: Final = frozenset({429, 500, 502, 503, 504})


class KubeStatusError(Exception):
    """The API server said no: ``code`` is HTTP's, ``reason`` Kubernetes' word."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(f"{code} {reason}: {message}")
        self.code, self.reason, self.message = code, reason, message


@dataclass(slots=True)
class Counters:
    """What the API costs, for metrics."""

    retries: int = 0


class Budget:
    """The time of one operation, and how its tries are spaced: doubling, with full jitter."""

    def __init__(self, seconds: float, counters: Counters) -> None:
        self._end, self._tries, self._counters = time.monotonic() + seconds, 0, counters

    def left(self) -> float:
        """Seconds that are left."""
        return self._end - time.monotonic()

    async def again(self, why: Exception, at_least: float = 0.0) -> None:
        """Wait before another try.

        :raises UnavailableError: there is no time for one; it says why the last one failed.
        """
        ceiling = min(FIRST_PAUSE * 2**self._tries, LONGEST_PAUSE)
        pause = at_least + random.uniform(0, ceiling)  # noqa: S311 - spreads callers, no secret
        if pause >= self.left():
            raise UnavailableError(
                f"the Kubernetes API did not do it in time, after {self._tries + 1} tries: {_said(why)}",
                remedy="is the API server up, and can this node reach it?",
            ) from why
        self._tries += 1
        self._counters.retries += 1
        await asyncio.sleep(pause)


class KubeApi:
    """A connection to the API server."""

    def __init__(
        self,
        configuration: Configuration,
        *,
        call_seconds: float = CALL_SECONDS,
        total_seconds: float = TOTAL_SECONDS,
        watch_seconds: int = WATCH_SECONDS,
    ) -> None:
        from kubernetes.aio.client import ApiClient  # noqa: PLC0415 - 20 MiB that only a cluster needs

        configuration.retries = None  # tries are counted here, and False would be a number to it
        self._client = ApiClient(configuration)
        self._client.user_agent = "hibernode"
        self._call, self._total, self._watch = call_seconds, total_seconds, watch_seconds
        self.counters = Counters()

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()
        if self._client.configuration.host.startswith("https:"):
            await asyncio.sleep(TLS_END_SECONDS)

    def budget(self) -> Budget:
        """Begin an operation."""
        return Budget(self._total, self.counters)

    async def call(
        self,
        method: str,
        path: str,
        budget: Budget,
        *,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        content: str = JSON,
        accept: str = JSON,
    ) -> dict[str, Any]:
        """Ask, again after 429, 5xx, a broken connection or silence, while ``budget`` lasts.

        :raises KubeStatusError: another answer than success.
        :raises UnavailableError: no answer in time, or this agent has no leave.
        """
        import aiohttp  # noqa: PLC0415 - as the client's

        while True:
            wait = 0.0
            try:
                seconds = max(min(self._call, budget.left()), 0.001)
                async with asyncio.timeout(seconds):
                    response = await self._open(
                        method, path, seconds, query=query, body=body, content=content, accept=accept
                    )
                    async with _held(response):
                        data = await _bounded(response)
                return _answer(response.status, data)
            except KubeStatusError as error:
                if error.code in {401, 403}:
                    raise UnavailableError(
                        f"the Kubernetes API forbids {method} {path}: {printable(error.message)[:300]}",
                        remedy="give the agent's service account the rights that daemonset/rbac has for it",
                        reason="ApiForbidden",
                    ) from error
                if error.code == NOT_FOUND and not error.reason:
                    # No Status of an object: the path is one that the server, or a proxy, does not know.
                    raise UnavailableError(
                        f"the Kubernetes API does not know {path}",
                        remedy="is the object's kind installed?",
                        reason="NoCrd",
                    ) from error
                if error.code not in TRANSIENT:
                    raise
                why: Exception = error
                wait = _retry_after(response.headers.get("Retry-After"))
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                why = error
            await budget.again(why, wait)

    async def pages(
        self, path: str, budget: Budget, *, labels: str = "", fields: str = "", accept: str = JSON
    ) -> AsyncIterator[dict[str, Any]]:
        """List page by page what the selectors ``labels`` and ``fields`` select.

        :raises KubeStatusError: 410, when the list took so long that its rest is gone: begin again.
        """
        more = ""
        while True:
            query = {"limit": str(PAGE), **_selectors(labels, fields)}
            query |= {"continue": more} if more else {}
            page = await self.call("GET", path, budget, query=query, accept=accept)
            version = metadata_of(page).get("resourceVersion")
            if not version or not isinstance(page.get("items", ""), list | None):
                raise UnavailableError("the Kubernetes API sent what is no list", reason="ApiRefused")
            yield page
            more = str(metadata_of(page).get("continue") or "")
            if not more:
                return

    async def events(
        self, path: str, version: str, *, labels: str = "", fields: str = ""
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Follow changes after ``version`` until the server ends it, which it does before long.

        The first event is an OPEN of ours: the server has answered.

        :raises KubeStatusError: 410, ``version`` is too old.
        :raises UnavailableError: the connection failed.
        """
        import aiohttp  # noqa: PLC0415 - as the client's

        query = {
            "watch": "1",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(self._watch),
            **_selectors(labels, fields),
        }
        try:
            response = await self._open("GET", path, self._watch + self._call, query=query)
            async with _held(response):
                if response.status != 200:  # noqa: PLR2004 - HTTP's OK
                    _answer(response.status, await _bounded(response))
                yield {"type": "OPEN", "object": {}}
                rest = b""
                async for chunk in response.content.iter_any():
                    *lines, rest = (rest + chunk).split(b"\n")
                    if len(rest) > MAX_EVENT:
                        raise UnavailableError(f"an event of the watch has more than {MAX_EVENT} bytes")
                    for line in lines:
                        yield _event(line)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise UnavailableError(f"the watch of the Kubernetes API broke: {_said(error)}") from error

    async def _open(
        self,
        method: str,
        path: str,
        seconds: float,
        *,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        content: str = JSON,
        accept: str = JSON,
    ) -> ClientResponse:
        import aiohttp  # noqa: PLC0415 - as the client's

        headers = {**self._client.default_headers, "Accept": accept, "Content-Type": content}
        await self._client.update_params_for_auth(headers, [], ["BearerToken"], path, method, body)
        url = self._client.configuration.host + quote(path) + (f"?{urlencode(query)}" if query else "")
        answer = await self._client.call_api(
            method, url, headers, body=body, _request_timeout=aiohttp.ClientTimeout(total=seconds)
        )
        response: ClientResponse = answer.response
        return response


async def load_configuration(kubeconfig: str = "", context: str = "") -> Configuration:
    """Find the API server: in a pod by its service account, else by a kubeconfig file.

    :raises UnavailableError: neither is there, or it cannot be read.
    """
    from kubernetes.aio import config  # noqa: PLC0415 - 20 MiB that only a cluster needs
    from kubernetes.aio.client import Configuration  # noqa: PLC0415

    found = Configuration()
    try:
        if kubeconfig:
            await config.load_kube_config(
                config_file=kubeconfig, context=context or None, client_configuration=found
            )
        else:
            config.load_incluster_config(client_configuration=found)
    except (config.ConfigException, OSError) as error:
        raise UnavailableError(
            f"there is no way to the Kubernetes API: {error}",
            remedy="run in a pod with a service account, or name a kubeconfig file",
            reason="NoCluster",
        ) from error
    return found


@asynccontextmanager
async def _held(response: ClientResponse) -> AsyncIterator[None]:
    """Hold an answer; one that is left before its end is cut off.

    Over TLS a polite close would wait for the server, which a watch keeps silent for long.
    """
    try:
        yield
    finally:
        connection = response.connection
        if connection is not None and connection.transport is not None:
            connection.transport.abort()
        response.release()


async def _bounded(response: ClientResponse) -> bytes:
    """Read an answer, but no more than ``MAX_ANSWER``."""
    parts, size = [], 0
    async for part in response.content.iter_any():
        parts.append(part)
        size += len(part)
        if size > MAX_ANSWER:
            raise UnavailableError(f"the Kubernetes API answers with more than {MAX_ANSWER} bytes")
    return b"".join(parts)


def _selectors(labels: str, fields: str) -> dict[str, str]:
    return {name: text for name, text in (("labelSelector", labels), ("fieldSelector", fields)) if text}


def _answer(code: int, data: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(data)
    except (ValueError, RecursionError):
        parsed = None
    if code // 100 == 2:  # noqa: PLR2004 - HTTP's success
        if not isinstance(parsed, dict):
            raise UnavailableError("the Kubernetes API answered with what is no object", reason="ApiRefused")
        return parsed
    parsed = parsed if isinstance(parsed, dict) else {}
    raise KubeStatusError(code, str(parsed.get("reason", ""))[:100], str(parsed.get("message", ""))[:1000])


def _event(line: bytes) -> dict[str, Any]:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UnavailableError("the watch of the Kubernetes API sent what is no JSON") from error
    if not isinstance(event, dict) or not isinstance(event.get("object"), dict):
        raise UnavailableError("the watch of the Kubernetes API sent what is no event")
    if event.get("type") == "ERROR":
        status = event["object"]
        code = status.get("code")
        raise KubeStatusError(code if isinstance(code, int) else 500, str(status.get("reason")), "")
    return event


def _retry_after(text: str | None) -> float:
    """Read the seconds that a server asks for, but no more than the longest pause of our own."""
    return min(float(text), LONGEST_PAUSE) if text and text.isascii() and text.isdigit() else 0.0


def _said(error: Exception) -> str:
    return printable(str(error))[:300] or type(error).__name__
