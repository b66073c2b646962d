"""Parts of ``metadata check`` and ``metadata watch``: a blob's verdict, the agent's stream of changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hibernode.cli.output import human_bytes
from hibernode.errors import AgentUnreachableError
from hibernode.text import printable

if TYPE_CHECKING:
    from hibernode.metadata.nixl_check import BlobCheck


def add_verdict(data: dict[str, Any], result: BlobCheck) -> None:
    """Add what NIXL said, and whether the names agree."""
    from hibernode.metadata.nixl_check import Verdict

    loaded = result.verdict is Verdict.LOADED
    data["verdict"], data["detail"], data["log"] = result.verdict.value, result.detail, result.log
    data["nixl"], data["loadedAgent"] = result.version, result.agent
    data["agentEqual"] = loaded and result.agent == data["agentName"]
    data["ok"] = loaded and data["agentEqual"] and data["header"] is not None


def show_check(data: dict[str, Any]) -> str:
    """Lay a verdict out for people."""
    header = data["header"]
    names = {True: "equal", False: "NOT equal"}[data["agentEqual"]]
    rows = [
        ("verdict", data["verdict"] + (f": {data['detail']}" if data["detail"] else "")),
        ("worker", f"{data['workerId']} of source {data['sourceId']}"),
        ("blob", f"{human_bytes(data['blobBytes'])}, from the {data['blobFrom']}"),
    ]
    if header is None:
        rows.append(("header", data["headerProblem"]))
    else:
        backends = ", ".join(f"{name} ({size} B)" for name, size in header["backends"].items())
        rows += [
            ("agent", header["agent"]),
            ("backends", backends),
            ("memory", f"{human_bytes(header['memoryBytes'])} of descriptions"),
            ("sha256", header["sha256"]),
        ]
    if data["verdict"] == "loaded":
        rows.append(
            ("names", f"{names}: the record says {data['agentName']!r}, NIXL {data['loadedAgent']!r}")
        )
    rows.append(("nixl", data["nixl"]))
    return "\n".join(f"{name:<10}{printable(str(value), keep='')}" for name, value in rows if value)


def changes(socket: str, source: str) -> Iterator[dict[str, Any]]:
    """Yield changes from the agent's stream.

    :raises AgentUnreachableError: it has ended.
    """
    import grpc

    from hibernode.metadata import proto
    from hibernode.metadata.records import SourceStatus

    method = proto.load("changes").services["Changes"]["Watch"]
    # A stopped agent says nothing, and so does one of which nothing is to be said: ask now and then.
    options = [
        ("grpc.enable_http_proxy", 0),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    with grpc.insecure_channel(f"unix:{socket}", options=options) as channel:
        call = channel.unary_stream(method.path, method.request.SerializeToString, method.response.FromString)
        try:
            for one in call(method.request(mx_source_id=source)):
                kind = ("unknown", "put", "gone", "synced")[one.kind] if one.kind < 4 else "unknown"  # noqa: PLR2004
                if kind == "synced":
                    yield {"change": kind}
                    continue
                known = one.status in set(SourceStatus)
                yield {
                    "change": kind,
                    "sourceId": one.mx_source_id,
                    "workerId": one.worker_id,
                    "model": one.model_name,
                    "rank": one.worker_rank,
                    "status": SourceStatus(one.status).name.lower() if known else str(one.status),
                    "updatedAt": one.updated_at,
                    "generation": one.generation,
                    "digest": one.digest,
                    "agentName": one.agent_name,
                }
        except grpc.RpcError as error:
            raise AgentUnreachableError(
                f"the agent's watch at {socket} has ended: {error.code().name}: {error.details()}",
                remedy="the agent may have stopped; see its log",
            ) from None
    raise AgentUnreachableError(f"the agent has ended the watch at {socket}", remedy="see its log")
