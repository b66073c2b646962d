"""An API server in this process: real HTTP on loopback, for the objects of the agent and the controller.

It keeps what clients have to reckon with: resource versions, 409, 410 and 422, merge patches, the status
subresource, finalizers, label selectors, pages, watches with bookmarks, preconditions, the CRD's schema
(defaults, pruning, checks), the limits of a ConfigMap and of etcd. Faults can be injected by method and path.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import yaml
from aiohttp import web

CRD = yaml.safe_load((Path(__file__).parents[2] / "daemonset/crds/modelmetadata.yaml").read_text())
SCHEMA = CRD["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
OBJECTS = "modelmetadatas"
CONFIGMAPS = "configmaps"
LEASES = "leases"
CHECKPOINTS = "dynamocheckpoints"
JOBS = "jobs"
EVENTS = "events"
WITH_STATUS = frozenset({OBJECTS, CHECKPOINTS, JOBS})
"""Kinds whose status is a part that is written by itself."""

GROUPS = {
    "api/v1": (CONFIGMAPS, EVENTS, "pods"),
    "apis/modelexpress.nvidia.com/v1alpha1": (OBJECTS,),
    "apis/coordination.k8s.io/v1": (LEASES,),
    "apis/nvidia.com/v1alpha1": (CHECKPOINTS,),
    "apis/batch/v1": (JOBS,),
}
PATH = re.compile(r"/(apis?/.*?v1(?:alpha1)?)(?:/namespaces/([^/]+))?/([a-z]+)(?:/([^/]+))?(/status)?")
CONFIGMAP_LIMIT = 1 << 20
ETCD_LIMIT = 1_572_864
NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
LABEL = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?")
DATE_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)")

Hook = Callable[[str, str], "Fault | None"]


class StatusError(Exception):
    """An answer that is no success."""

    def __init__(self, code: int, reason: str, message: str = ""):
        self.code, self.reason, self.message = code, reason, message


@dataclass
class Fault:
    """What happens to a request: an answer, silence, a cut connection; before or after its effect.

    404 is that of a path that the server does not know.
    """

    code: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    silent: bool = False
    cut: bool = False
    after: bool = False


class FakeKube:
    """The server; ``faults`` are asked first with (method, path).

    ``calls`` notes (method, path) of each request, ``asked`` also the query and the body.
    """

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str], dict[str, Any]] = {}
        self.history: list[tuple[int, str, str, str, dict[str, Any]]] = []
        self.version, self.oldest = 100, 0
        self.uids = 0
        self.calls: list[tuple[str, str]] = []
        self.asked: list[tuple[str, str, dict[str, str], Any]] = []
        self.faults: list[Hook] = []
        self.page_limit = 0
        self._news = asyncio.Event()
        self._over = asyncio.Event()
        self._runner: web.AppRunner | None = None
        self._port = 0

    async def __aenter__(self) -> Self:
        await self.up()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.down()

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self._port}"

    async def up(self) -> None:
        """Start, at the port that it had before."""
        app = web.Application(client_max_size=16 << 20)
        app.router.add_route("*", "/{path:.*}", self._serve)
        self._over = asyncio.Event()
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True)
        await site.start()
        self._port = self._runner.addresses[0][1]

    async def down(self) -> None:
        """Stop: connections are cut, what is kept stays."""
        self._over.set()
        self._news.set()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    # for tests ----------------------------------------------------------------------------------------

    def fail(self, times: int, match: str, fault: Fault) -> None:
        """Let the next ``times`` requests whose "METHOD /path" has ``match`` in it meet a fault."""
        left = [times]

        def hook(method: str, path: str) -> Fault | None:
            if left[0] and re.search(match, f"{method} {path}"):
                left[0] -= 1
                return fault
            return None

        self.faults.append(hook)

    def put(self, kind: str, raw: dict[str, Any], namespace: str = "ns") -> dict[str, Any]:
        """Store an object as it is, past the schema, as an older server or another writer did."""
        raw = copy.deepcopy(raw)
        old = self.objects.get((namespace, kind, raw["metadata"]["name"]))
        metadata = raw["metadata"]
        metadata.setdefault("namespace", namespace)
        metadata.setdefault("uid", old["metadata"]["uid"] if old else self._uid())
        metadata.setdefault("creationTimestamp", datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"))
        metadata.setdefault("generation", 1)
        return self._store(namespace, kind, raw, "MODIFIED" if old else "ADDED")

    def get(self, kind: str, name: str, namespace: str = "ns") -> dict[str, Any]:
        """Look at an object."""
        return self.objects[namespace, kind, name]

    def names(self, kind: str, namespace: str = "ns") -> list[str]:
        """List the names that are there."""
        return sorted(name for space, kinds, name in self.objects if (space, kinds) == (namespace, kind))

    def remove(self, kind: str, name: str, namespace: str = "ns") -> None:
        """Delete an object, or say that it is to go where it has finalizers."""
        raw = copy.deepcopy(self.get(kind, name, namespace))
        if not raw["metadata"].get("finalizers"):
            self._drop(namespace, kind, name)
        elif "deletionTimestamp" not in raw["metadata"]:
            raw["metadata"]["deletionTimestamp"] = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            self._store(namespace, kind, raw, "MODIFIED")

    def forget(self) -> None:
        """Compact: versions from before are answered with 410."""
        self.oldest = self.version
        self.history.clear()

    # HTTP ---------------------------------------------------------------------------------------------

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        self.calls.append((request.method, request.path))
        fault = next((found for hook in self.faults if (found := hook(request.method, request.path))), None)
        if fault is not None and not fault.after:
            return await self._faulty(request, fault)
        try:
            if request.query.get("watch") in {"1", "true"}:
                return await self._watch(request)
            body = json.loads(await request.read() or b"null")
            self.asked.append((request.method, request.path, dict(request.query), body))
            answer = self._answer(request, body)
        except StatusError as error:
            if not error.reason:
                return web.Response(status=error.code, text="404 page not found\n")
            status = {"kind": "Status", "status": "Failure", "code": error.code, "reason": error.reason}
            return web.json_response({**status, "message": error.message}, status=error.code)
        if fault is not None:
            return await self._faulty(request, fault)
        return web.json_response(answer[1], status=answer[0])

    async def _faulty(self, request: web.Request, fault: Fault) -> web.StreamResponse:
        if fault.silent:
            await self._over.wait()
        if fault.cut or fault.silent:
            cut(request)
            return web.Response()
        if fault.code == 404:
            return web.Response(status=404, text="404 page not found\n")
        status = {"kind": "Status", "code": fault.code, "reason": "Injected", "message": "as it was told"}
        return web.json_response(status, status=fault.code, headers=fault.headers)

    def _answer(self, request: web.Request, body: Any) -> tuple[int, dict[str, Any]]:
        namespace, kind, name, sub = parsed(request.path)
        if name is None:
            if request.method == "GET":
                return 200, self._list(request, namespace, kind)
            return 201, self._create(namespace, kind, body)
        if (namespace, kind, name) not in self.objects:
            raise StatusError(404, "NotFound", f'{kind} "{name}" not found')
        if request.method == "GET":
            return 200, self.objects[namespace, kind, name]
        if request.method == "DELETE":
            self._delete(namespace, kind, name, body or {})
            return 200, {"kind": "Status", "status": "Success"}
        if request.method == "PUT":
            return 200, self._replace(namespace, kind, name, body)
        assert request.method == "PATCH", request.method
        assert request.content_type == "application/merge-patch+json", request.content_type
        return 200, self._patch(namespace, kind, name, body, status_only=bool(sub))

    def _list(self, request: web.Request, namespace: str, kind: str) -> dict[str, Any]:
        selector = request.query.get("labelSelector", "")
        spaces = sorted(
            {space for space, kinds, _ in self.objects if kinds == kind and namespace in ("", space)}
        )
        found = {
            f"{space}/{name}": raw
            for space in spaces
            for name in self.names(kind, space)
            if selected(raw := self.get(kind, name, space), selector)
        }
        names = sorted(found)
        version, after = self.version, ""
        if "continue" in request.query:
            token = json.loads(base64.b64decode(request.query["continue"]))
            version, after = token["version"], token["after"]
            if version < self.oldest:
                raise StatusError(410, "Expired", "the provided continue parameter is too old")
        rest = [name for name in names if name > after]
        limit = self.page_limit or int(request.query.get("limit", "0")) or len(rest) or 1
        page, metadata = rest[:limit], {"resourceVersion": str(version)}
        if len(rest) > limit:
            token = json.dumps({"version": version, "after": page[-1]}).encode()
            metadata["continue"] = base64.b64encode(token).decode()
        items = [found[name] for name in page]
        if "PartialObjectMetadataList" in request.headers.get("Accept", ""):
            items = [{"metadata": item["metadata"]} for item in items]
        return {"metadata": metadata, "items": items}

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        seen = int(request.query["resourceVersion"])
        namespace, kind, _, _ = parsed(request.path)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        if seen < self.oldest:
            status = {"kind": "Status", "code": 410, "reason": "Expired"}
            await response.prepare(request)
            await response.write(json.dumps({"type": "ERROR", "object": status}).encode() + b"\n")
            return response
        await response.prepare(request)
        end = asyncio.get_running_loop().time() + int(request.query.get("timeoutSeconds", "60"))
        while not self._over.is_set():
            for version, space, kinds, event, raw in list(self.history):
                if version > seen and kinds == kind and namespace in ("", space):
                    await response.write(json.dumps({"type": event, "object": raw}).encode() + b"\n")
            seen = max(seen, self.version)
            self._news.clear()
            left = end - asyncio.get_running_loop().time()
            try:
                await asyncio.wait_for(self._news.wait(), max(left, 0))
            except TimeoutError:
                mark = {"metadata": {"resourceVersion": str(seen)}}
                await response.write(json.dumps({"type": "BOOKMARK", "object": mark}).encode() + b"\n")
                return response
            if seen < self.oldest:
                status = {"kind": "Status", "code": 410, "reason": "Expired"}
                await response.write(json.dumps({"type": "ERROR", "object": status}).encode() + b"\n")
                return response
        cut(request)
        return response

    # writes -------------------------------------------------------------------------------------------

    def _create(self, namespace: str, kind: str, body: dict[str, Any]) -> dict[str, Any]:
        name = body["metadata"]["name"]
        if (namespace, kind, name) in self.objects:
            raise StatusError(409, "AlreadyExists", f'{kind} "{name}" already exists')
        raw = copy.deepcopy(body)
        if kind in WITH_STATUS:
            raw.pop("status", None)
        raw["metadata"] |= {
            "namespace": namespace,
            "uid": self._uid(),
            "generation": 1,
            "creationTimestamp": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        return self._store(namespace, kind, self._admit(kind, raw), "ADDED")

    def _patch(
        self, namespace: str, kind: str, name: str, body: dict[str, Any], *, status_only: bool
    ) -> dict[str, Any]:
        old = self.objects[namespace, kind, name]
        version = (body.get("metadata") or {}).get("resourceVersion")
        if version is not None and version != old["metadata"]["resourceVersion"]:
            raise StatusError(409, "Conflict", "the object has been modified")
        if (body.get("metadata") or {}).get("uid", old["metadata"]["uid"]) != old["metadata"]["uid"]:
            raise StatusError(409, "Conflict", "Precondition failed: UID in precondition")
        merged = merge(old, body)
        new = copy.deepcopy(old)
        for part in merged.keys() | new.keys():
            if kind not in WITH_STATUS or (part == "status") == status_only:
                if part in merged:
                    new[part] = merged[part]
                else:
                    new.pop(part, None)
        new["metadata"]["uid"] = old["metadata"]["uid"]
        new = self._admit(kind, new)
        if new.get("spec") != old.get("spec"):
            new["metadata"]["generation"] += 1
        if new == old:
            return old
        if new["metadata"].get("deletionTimestamp") and not new["metadata"].get("finalizers"):
            self._drop(namespace, kind, name)
            return new
        return self._store(namespace, kind, new, "MODIFIED")

    def _replace(self, namespace: str, kind: str, name: str, body: dict[str, Any]) -> dict[str, Any]:
        assert kind == LEASES, kind
        old, new = self.objects[namespace, kind, name], copy.deepcopy(body)
        for key in ("resourceVersion", "uid"):
            if new["metadata"].get(key) != old["metadata"][key]:
                raise StatusError(409, "Conflict", "the object has been modified")
        return self._store(namespace, kind, self._admit(kind, new), "MODIFIED")

    def _delete(self, namespace: str, kind: str, name: str, body: dict[str, Any]) -> None:
        metadata = self.objects[namespace, kind, name]["metadata"]
        for key, value in (body.get("preconditions") or {}).items():
            if metadata[key] != value:
                raise StatusError(409, "Conflict", f"precondition failed: {key}")
        self.remove(kind, name, namespace)

    def _admit(self, kind: str, raw: dict[str, Any]) -> dict[str, Any]:
        """Check as the API server does; drops what the schema does not know."""
        metadata = raw["metadata"]
        if NAME.fullmatch(metadata["name"]) is None or len(metadata["name"]) > 253:
            raise StatusError(422, "Invalid", "metadata.name")
        for value in (metadata.get("labels") or {}).values():
            if LABEL.fullmatch(value) is None or len(value) > 63:
                raise StatusError(422, "Invalid", f"metadata.labels: {value}")
        if sum(map(len, (metadata.get("annotations") or {}).values())) > 256 << 10:
            raise StatusError(422, "Invalid", "metadata.annotations: Too long")
        if kind == CONFIGMAPS:
            size = sum(len(text.encode()) for text in (raw.get("data") or {}).values())
            size += sum(len(base64.b64decode(text)) for text in (raw.get("binaryData") or {}).values())
            if size > CONFIGMAP_LIMIT:
                raise StatusError(422, "Invalid", "data: Too long: must have at most 1048576 bytes")
        elif kind == OBJECTS:
            parts = {key: raw[key] for key in ("spec", "status") if key in raw}
            raw = {**raw, **shape(parts, SCHEMA, "")}
        if len(json.dumps(raw)) > ETCD_LIMIT * (1 if kind == OBJECTS else 2):
            raise StatusError(413, "RequestEntityTooLarge", "etcdserver: request is too large")
        return raw

    def _store(self, namespace: str, kind: str, raw: dict[str, Any], event: str) -> dict[str, Any]:
        self.version += 1
        raw["metadata"]["resourceVersion"] = str(self.version)
        self.objects[namespace, kind, raw["metadata"]["name"]] = raw
        self._tell(namespace, kind, event, raw)
        return raw

    def _drop(self, namespace: str, kind: str, name: str) -> None:
        raw = copy.deepcopy(self.objects.pop((namespace, kind, name)))
        self.version += 1
        raw["metadata"]["resourceVersion"] = str(self.version)
        self._tell(namespace, kind, "DELETED", raw)

    def _tell(self, namespace: str, kind: str, event: str, raw: dict[str, Any]) -> None:
        self.history.append((self.version, namespace, kind, event, copy.deepcopy(raw)))
        self._news.set()

    def _uid(self) -> str:
        self.uids += 1
        return f"00000000-0000-4000-8000-{self.uids:012d}"


def parsed(path: str) -> tuple[str, str, str | None, str | None]:
    """Take a path apart: namespace (empty for all), kind, name, subresource."""
    match = PATH.fullmatch(path)
    if match is None or match[3] not in GROUPS.get(match[1], ()):
        raise StatusError(404, "")
    return match[2] or "", match[3], match[4], match[5]


def selected(raw: dict[str, Any], selector: str) -> bool:
    """Tell whether an object has these labels; one without a value only has to be there."""
    labels = raw["metadata"].get("labels") or {}
    parts = [part.partition("=") for part in selector.split(",") if part]
    return all(labels.get(name) == value if equals else name in labels for name, equals, value in parts)


def cut(request: web.Request) -> None:
    """Break a connection, if it still stands."""
    if request.transport is not None:
        request.transport.abort()


def merge(old: Any, patch: Any) -> Any:
    """Apply a merge patch (RFC 7396), with a fault that servers of 1.20 have: see below."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    if not isinstance(old, dict):
        return {key: fresh(value) for key, value in patch.items() if value is not None}
    new = copy.deepcopy(old)
    for key, value in patch.items():
        if value is None:
            new.pop(key, None)
        else:
            new[key] = merge(new.get(key), value)
    return new


TYPES: dict[str, Any] = {"string": str, "integer": int, "number": (int, float), "object": dict, "array": list}


def fresh(value: Any) -> Any:
    """Take a part of a patch for which nothing was there: an empty text becomes null."""
    if isinstance(value, dict):
        return {key: fresh(item) for key, item in value.items() if item is not None}
    return None if value == "" else copy.deepcopy(value)


def shape(value: Any, schema: dict[str, Any], where: str) -> Any:
    """Check a value by a schema; sets defaults and drops unknown fields."""
    right = isinstance(value, TYPES[schema["type"]]) and not isinstance(value, bool)
    if not right or value not in schema.get("enum", [value]):
        raise StatusError(422, "Invalid", f"{where}: Invalid value: {value!r:.80}: no {schema['type']}")
    if schema.get("format") == "date-time" and DATE_TIME.fullmatch(value) is None:
        raise StatusError(422, "Invalid", f"{where}: must be date-time")
    if schema.get("format") == "int64" and not -(1 << 63) <= value < 1 << 63:
        raise StatusError(422, "Invalid", f"{where}: must be int64")
    if "minimum" in schema and value < schema["minimum"]:
        raise StatusError(422, "Invalid", f"{where}: should be greater than or equal to 0")
    if schema["type"] == "array":
        return [shape(item, schema["items"], f"{where}[{index}]") for index, item in enumerate(value)]
    if schema["type"] != "object":
        return value
    if "additionalProperties" in schema:
        inner = schema["additionalProperties"]
        return {key: shape(item, inner, f"{where}.{key}") for key, item in value.items()}
    missing = [key for key in schema.get("required", []) if key not in value]
    if missing:
        raise StatusError(422, "Invalid", f"{where}.{missing[0]}: Required value")
    known = schema.get("properties", {})
    shaped = {key: shape(item, known[key], f"{where}.{key}") for key, item in value.items() if key in known}
    return {**{key: item["default"] for key, item in known.items() if "default" in item}, **shaped}
