"""``metadata``: the records of the agent, looked at, tried and removed. Only a running agent has them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from hibernode.cli.common import PATH, NameType, run_async
from hibernode.cli.main import Context
from hibernode.cli.metadata_parts import add_verdict, changes, show_check
from hibernode.cli.output import FORMATS, age, emit, human_bytes, output_option, table
from hibernode.errors import (
    CheckFailedError,
    HibernodeError,
    IntegrityError,
    NotFoundError,
    RefusedError,
    UsageError,
)
from hibernode.metadata.ids import MAX_WORKER_ID
from hibernode.metadata.records import NOBODY
from hibernode.text import printable

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from hibernode.client import AgentClient

MAX_BYTES: Final = 64 << 20
"""Of an answer: a blob of 16 MiB as base64, the tensors of any worker, ten thousand records."""

SHOWN: Final = 64
"""Characters of a cell in a table; a worker may have chosen 4,096, and all columns after it would be gone."""

SOURCES: Final = ("SOURCE", "MODEL", "TYPE", "WORKERS", "LOCAL", "STATUS", "HEARD")
WORKERS: Final = (
    *("WORKER", "SOURCE", "RANK", "STATUS", "LOCAL", "NODE", "HEARD", "ENDPOINT", "BACKEND", "GENERATION"),
)
CSV_SOURCES: Final = ("sourceId", "model", "type", "workers", "local", "status", "updatedAt")
CSV_WORKERS: Final = (
    *("workerId", "sourceId", "model", "rank", "status", "local", "node", "updatedAt", "agentName"),
    *("metadataEndpoint", "workerEndpoint", "backend", "generation", "digest"),
)

_format = click.option(
    "-o",
    "--output",
    type=click.Choice((*FORMATS, "csv")),
    default="table",
    show_default=True,
    help="A table for people, JSON or YAML, or a CSV line for each.",
)


class _RecordType(NameType):
    """The id of a source or a worker, or the beginning of one."""

    def __init__(self, verb: str, field: str) -> None:
        self._verb, self._field = verb, field

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Take no text that is longer than any id."""
        text = super().convert(value, param, ctx)
        if len(text) > MAX_WORKER_ID:
            self.fail(f"it has {len(text)} characters, and no id has more than {MAX_WORKER_ID}", param, ctx)
        return text

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Complete ids that the agent knows; nothing is said where none answers."""
        from click.shell_completion import CompletionItem

        del param
        context = Context()
        context.take(ctx.find_root().params)
        try:
            items = _client(context).get(f"/v1/metadata/{self._verb}")["items"]
            ids = {str(item[self._field]) for item in items}
        except (HibernodeError, OSError, LookupError, TypeError):
            return []
        return [
            CompletionItem(id_) for id_ in sorted(ids) if id_.startswith(incomplete) and id_.isprintable()
        ]


SOURCE: Final = _RecordType("sources", "sourceId")
WORKER: Final = _RecordType("workers", "workerId")
_source_option = click.option(
    "--source", type=SOURCE, help="The worker's source, if the worker is in several."
)


@click.group("metadata")
def metadata_command() -> None:
    """Look at the metadata records that the agent serves to workers, try their NIXL blobs, remove them.

    Sources and workers are named by their ids or by the beginning of them.
    """


def _client(context: Context) -> AgentClient:
    from hibernode.client import AgentClient

    return AgentClient(context.load().settings.server.socket, timeout=30.0, max_bytes=MAX_BYTES)


def _get(context: Context, source: str | None, worker: str, more: str = "") -> dict[str, Any]:
    query = {"source": source or "", "worker": worker, "with": more}
    return _client(context).get("/v1/metadata/worker", **query)


# lists ------------------------------------------------------------------------------------------------


@metadata_command.command("sources")
@_format
@click.pass_obj
def sources_command(context: Context, output: str) -> None:
    """List the sources: model, workers, how many of this node, how many of each status."""
    found = _client(context).get("/v1/metadata/sources")
    items = found["items"]

    def render() -> str:
        keys = ("sourceId", "model", "type", "workers", "local")
        rows = [(*(_cut(i[key]) for key in keys), _counts(i["status"]), age(i["updatedAt"])) for i in items]
        return table(rows, SOURCES) if rows else "no records"

    if output == "csv":
        click.echo(_csv([{**item, "status": _counts(item["status"])} for item in items], CSV_SOURCES))
    else:
        emit("MetadataSources", found, output, render)


def _cut(cell: object) -> str:
    text = str(cell)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


def _counts(status: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in status.items())


@metadata_command.command("workers")
@click.argument("source", type=SOURCE, required=False)
@_format
@click.pass_obj
def workers_command(context: Context, source: str | None, output: str) -> None:
    """List the workers of SOURCE, or of all sources, those last heard of first."""
    found = _client(context).get("/v1/metadata/workers", **({"source": source} if source else {}))

    def render() -> str:
        rows = [
            (
                *(i[key] for key in ("workerId", "sourceId", "rank", "status")),
                "yes" if i["local"] else "no",
                _cut(i["node"]),
                age(i["updatedAt"]),
                _cut(i["workerEndpoint"] or i["metadataEndpoint"]),
                i["backend"],
                i["generation"] or "",
            )
            for i in found["items"]
        ]
        return table(rows, WORKERS) if rows else "no records"

    if output == "csv":
        click.echo(_csv(found["items"], CSV_WORKERS))
    else:
        emit("MetadataWorkers", found, output, render)


def _csv(items: Sequence[dict[str, Any]], keys: Sequence[str]) -> str:
    import csv
    import io

    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(keys)
    for item in items:
        writer.writerow([printable(str(item[key]), keep="") for key in keys])
    return out.getvalue().rstrip("\n")


# one worker -------------------------------------------------------------------------------------------


@metadata_command.command("get")
@click.argument("worker", type=WORKER)
@_source_option
@click.option("--tensors", is_flag=True, help="List every tensor.")
@click.option(
    "--blob", type=PATH, metavar="FILE", help="Write the NIXL blob to FILE, readable by root alone."
)
@click.option("--force", is_flag=True, help="Replace FILE if it is there.")
@output_option
@click.pass_obj
def get_command(
    context: Context,
    worker: str,
    source: str | None,
    blob: Path | None,
    output: str,
    *,
    tensors: bool,
    force: bool,
) -> None:
    """Show all that is known of WORKER, and write its NIXL blob to a file.

    A local worker that published endpoints only is asked for its blob. A blob is a secret: it holds
    addresses and keys of the worker's memory.
    """
    if tensors and blob:
        raise UsageError("--tensors and --blob are two questions", remedy="ask one after the other")
    found = _get(context, source, worker, "tensors" if tensors else "blob" if blob else "")
    if blob is not None:
        content = _blob(found)
        _write(blob, content, force=force)
        found |= {"blobFile": str(blob), "blobBytes": len(content)}
        del found["blob"]
    emit("MetadataWorker", found, output, lambda: _describe(found))


def _describe(found: dict[str, Any]) -> str:
    sums, owner = found["tensors"], found["owner"]
    dtypes = ", ".join(f"{count} {dtype}" for dtype, count in sums["dtypes"].items())
    topology = ", ".join(f"{key}={value}" for key, value in found["topology"].items())
    identity = ", ".join(f"{key}={value}" for key, value in (found["identity"] or {}).items())
    pod = ""
    if owner:
        name = "" if owner["name"] == NOBODY else f"pod {owner['namespace']}/{owner['name']}, "
        pod = name + owner["uid"]
    artifact = ", ".join(f"{key}={value}" for key, value in (found["artifact"] or {}).items())
    rows = (
        ("worker", found["workerId"]),
        ("source", found["sourceId"] + (f", also {found['alias']}" if found["alias"] else "")),
        ("model", f"{found['model']} ({found['type']})"),
        ("identity", identity),
        ("rank", found["rank"]),
        ("status", f"{found['status']}, heard of {age(found['updatedAt'])} ago"),
        ("node", f"{found['node'] or 'unknown'}, {'this one' if found['local'] else 'another, or unknown'}"),
        ("owner", pod),
        ("agent", found["agentName"]),
        ("endpoints", f"worker {found['workerEndpoint'] or '-'}, NIXL {found['metadataEndpoint'] or '-'}"),
        ("generation", f"{found['generation']}, digest {found['digest'] or '-'}, of {found['publishedAt']}"),
        ("backend", f"{found['backend']}, blob of {human_bytes(found['blobBytes'])} {found['sessionId']}"),
        ("accelerator", found["accelerator"]),
        ("topology", topology),
        ("load", "" if found["load"] is None else found["load"]),
        ("artifact", artifact),
        (
            "tensors",
            f"{sums['count']}, {human_bytes(sums['bytes'])}: {dtypes or 'none'}, devices {sums['devices']}",
        ),
        ("blob file", found.get("blobFile", "")),
    )
    lines = [f"{name:<12}{printable(str(value), keep='')}" for name, value in rows if value != ""]
    if "tensorList" in found:
        heads = ("TENSOR", "DTYPE", "SIZE", "DEVICE", "ADDRESS")
        list_ = [
            (t["name"], t["dtype"], human_bytes(t["size"]), t["device_id"], f"{t['addr']:#x}")
            for t in found["tensorList"]
        ]
        lines += ["", table(list_, heads)] if list_ else ["", "no tensors"]
    return "\n".join(lines)


def _blob(found: dict[str, Any]) -> bytes:
    import base64

    content = base64.b64decode(found.get("blob", ""))
    if not content:
        raise NotFoundError(
            f"there is no NIXL blob of worker {found['workerId']}",
            remedy="it publishes endpoints only, and is not of this node or does not answer",
            reason="NoBlob",
        )
    return content


def _write(path: Path, content: bytes, *, force: bool) -> None:
    """Write a file whole or not at all, for root alone; a link in its place is replaced, not followed."""
    import secrets

    temporary = path.with_name(f".{secrets.token_hex(8)}.tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(content)
        if force:
            temporary.replace(path)
        else:
            path.hardlink_to(temporary)
    except FileExistsError:
        raise RefusedError(
            f"{path} is there already", remedy="name another file, or say --force", reason="FileExists"
        ) from None
    finally:
        temporary.unlink(missing_ok=True)


@metadata_command.command("check")
@click.argument("worker", type=WORKER)
@_source_option
@output_option
@click.pass_obj
def check_command(context: Context, worker: str, source: str | None, output: str) -> None:
    """Load WORKER's NIXL blob in a confined child process, and say what it holds; exit 5 if it is bad.

    Loaded says that the blob is well formed and its agent's name is the record's, not that the worker lives.
    """
    from hibernode.metadata.nixl_blob import read_header
    from hibernode.metadata.nixl_check import Verdict, check_blob

    found = _get(context, source, worker, "blob")
    blob = _blob(found)
    data: dict[str, Any] = {key: found[key] for key in ("workerId", "sourceId", "agentName", "blobFrom")}
    data |= {"blobBytes": len(blob), "header": None, "headerProblem": ""}
    try:
        header = read_header(blob)
    except HibernodeError as error:
        data["headerProblem"] = error.message
    else:
        backends = {one.backend: one.size for one in header.connections}
        data["header"] = {
            "agent": header.agent,
            "backends": backends,
            "memoryBytes": header.memory_size,
            "sha256": header.digest,
        }
    result = run_async(lambda: check_blob(blob))
    if result.verdict is Verdict.NOT_INSTALLED:
        raise CheckFailedError(
            f"the blob was not tried: NIXL is not installed ({result.detail})",
            remedy="install the nixl extra of hibernode; docs/nixl.md says how",
        )
    add_verdict(data, result)
    emit("BlobCheck", data, output, lambda: show_check(data))
    if not data["ok"]:
        raise click.exceptions.Exit(IntegrityError.exit_code)


# changes ----------------------------------------------------------------------------------------------


@metadata_command.command("watch")
@click.argument("source", type=SOURCE, required=False)
@click.option(
    "-o", "--output", type=click.Choice(("table", "json")), default="table", help="Or a JSON line for each."
)
@click.pass_obj
def watch_command(context: Context, source: str | None, output: str) -> None:
    """Follow the records of SOURCE, or all, until Ctrl-C: first what there is, then what happens."""
    client = _client(context)
    found = (
        client.get("/v1/metadata/workers", source=source) if source else client.get("/v1/metadata/sources")
    )
    id_ = found["items"][0]["sourceId"] if source else ""
    for change in changes(str(found["socket"]), id_):
        if output == "json":
            click.echo(json.dumps(change))
        elif change["change"] == "synced":
            click.echo("-- that is all there was; what follows has happened since --")
        else:
            words = ("change", "status", "workerId", "sourceId", "rank", "generation", "model")
            click.echo(printable("  ".join(str(change[key]) for key in words), keep=""))


# removal ----------------------------------------------------------------------------------------------


@metadata_command.command("rm")
@click.argument("worker", type=WORKER, required=False)
@click.option("--source", type=SOURCE, help="The worker's source; without WORKER, all of it goes.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@output_option
@click.pass_obj
def rm_command(context: Context, worker: str | None, source: str | None, output: str, *, yes: bool) -> None:
    """Remove WORKER's record, or every record of a source.

    The worker itself is left alone; it is found again only when it publishes again, and its heartbeats are
    answered with an error until then.
    """
    import sys

    if not worker and not source:
        raise UsageError(
            "name a worker or a source", remedy="hibernode metadata rm WORKER, or --source SOURCE"
        )
    if worker:
        items = [_get(context, source, worker)]
    else:
        items = _client(context).get("/v1/metadata/workers", source=source or "")["items"]
    chosen = {"source": items[0]["sourceId"], "worker": items[0]["workerId"] if worker else ""}
    what = f"{len(items)} records of source {chosen['source']} ({items[0]['model']})"
    if worker:
        what = f"the record of worker {chosen['worker']} of source {chosen['source']} ({items[0]['model']})"
    what = printable(what, keep="")
    if not yes:
        if not sys.stdin.isatty():
            raise UsageError(f"this would remove {what}", remedy="say --yes if that is meant")
        click.confirm(f"Remove {what}?", abort=True, err=True)
    query = {key: value for key, value in chosen.items() if value}
    found = _client(context).post("/v1/metadata/remove", **query)
    emit("MetadataRemove", found, output, lambda: f"removed {found['removed']}: {what}")
