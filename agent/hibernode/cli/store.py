"""``list``, ``inspect``, ``verify``, ``gc``, ``pin``, ``unpin``: the store, read and kept in order."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from hibernode.cli.common import ID, open_store, run_async
from hibernode.cli.main import Context
from hibernode.cli.output import Progress, age, emit, human_bytes, human_seconds, output_option, table
from hibernode.errors import UsageError
from hibernode.workload import CheckpointId

if TYPE_CHECKING:
    from hibernode.artifact.manifest import Manifest
    from hibernode.artifact.store import ArtifactInfo

STATES = ["complete", "previous", "partial", "in-progress", "corrupt"]
SORTS = {"id": lambda info: info.id, "age": lambda info: info.created_at, "size": lambda info: info.bytes}


def _info(info: ArtifactInfo) -> dict[str, Any]:
    return {
        "id": info.id,
        "uuid": info.uuid,
        "state": str(info.state),
        "bytes": info.bytes,
        "createdAt": info.created_at,
        "pinned": info.pinned,
        "path": str(info.path),
        "problem": info.problem,
    }


@click.command("list")
@click.option("--state", type=click.Choice(STATES), help="Only those in this state.")
@click.option("--sort", type=click.Choice(list(SORTS)), default="id", help="Order of the rows.")
@output_option
@click.pass_obj
def list_command(context: Context, state: str | None, sort: str, output: str) -> None:
    """List the checkpoints in the store, whole or not."""
    infos = [info for info in open_store(context.load().settings).artifacts() if state in (None, info.state)]
    infos.sort(key=SORTS[sort], reverse=sort != "id")

    def render() -> str:
        rows = [
            (
                info.id,
                str(info.state),
                human_bytes(info.bytes),
                age(info.created_at),
                "yes" if info.pinned else "",
                info.uuid[:8],
                info.problem,
            )
            for info in infos
        ]
        return table(rows, ("ID", "STATE", "SIZE", "AGE", "PINNED", "UUID", "PROBLEM"))

    emit("ArtifactList", {"items": [_info(info) for info in infos]}, output, render)


@click.command("inspect")
@click.argument("id_", metavar="ID", type=ID)
@click.option("--version", default="", metavar="UUID", help="An older artifact of this id.")
@output_option
@click.pass_obj
def inspect_command(context: Context, id_: CheckpointId, version: str, output: str) -> None:
    """Show all about one checkpoint: worker, machine, process tree, files, phase times."""
    artifact = open_store(context.load().settings).get(id_, version or None)
    data = {
        "path": str(artifact.path),
        "pinned": artifact.pinned,
        **json.loads(artifact.manifest.model_dump_json()),
    }
    emit("Artifact", data, output, lambda: _tree(artifact.manifest, str(artifact.path)))


def _tree(manifest: Manifest, path: str) -> str:
    process = manifest.process
    lines = [
        f"{manifest.id}  {human_bytes(manifest.total_bytes)}  {manifest.created_at}",
        f"├─ path      {path}",
        f"├─ uuid      {manifest.uuid}",
        f"├─ node      {manifest.node}, kernel {manifest.kernel}, {manifest.machine}",
        f"├─ criu      {manifest.criu.version}, tcp {manifest.tcp}, left {manifest.leave}",
        f"├─ worker    pid {process.pid} ({process.comm}), uid {process.uids[0]}, seccomp mode {process.seccomp_mode}",
        f"│            {' '.join(process.cmdline)[:200]}",
        f"├─ contract  {manifest.contract.era or 'none'} {manifest.contract.signal_file}",
        "├─ processes",
    ]
    depth = {manifest.process.pid: 0}
    for task in manifest.tree:
        depth[task.pid] = depth.get(task.ppid, -1) + 1
        threads = f", {len(task.threads)} threads" if len(task.threads) > 1 else ""
        lines.append(f"│  {'  ' * depth[task.pid]}└─ {task.pid} {task.comm}{threads}")
    lines.append(f"├─ files     {len(manifest.files)}")
    largest = sorted(manifest.files, key=lambda file: file.size, reverse=True)
    lines += [f"│  {human_bytes(file.size):>10}  {file.path}" for file in largest[:10]]
    lines += [f"│  {'':>10}  and {len(largest) - 10} smaller"] if len(largest) > 10 else []  # noqa: PLR2004
    lines.append("└─ phases")
    lines += [f"   {human_seconds(value):>10}  {name}" for name, value in manifest.phases.items()]
    return "\n".join(lines)


@click.command("verify")
@click.argument("ids", metavar="[ID]...", type=ID, nargs=-1)
@click.option("--all", "all_", is_flag=True, help="Every whole checkpoint in the store.")
@output_option
@click.pass_obj
def verify_command(context: Context, ids: tuple[CheckpointId, ...], output: str, *, all_: bool) -> None:
    """Check every file of checkpoints against its size and digest; exit 1 if one is bad."""
    import asyncio
    import time

    if bool(ids) == all_:
        raise UsageError(
            "name checkpoints, or say --all", remedy="hibernode verify ID..., hibernode verify --all"
        )
    store = open_store(context.load().settings)
    if all_:
        chosen = [
            (CheckpointId(i.id), i.uuid)
            for i in store.artifacts()
            if i.state in ("complete", "previous", "corrupt")
        ]
    else:
        chosen = [(id_, "") for id_ in ids]
    items: list[dict[str, Any]] = []
    rows: list[tuple[str, str, str, str]] = []
    for id_, version in chosen:
        start = time.perf_counter()
        with Progress(f"verify {id_}"):
            artifact = store.get(id_, version or None)
            verdicts = run_async(partial(asyncio.to_thread, store.verify, artifact, digests=True))
        seconds = time.perf_counter() - start
        bad = [verdict for verdict in verdicts if not verdict.ok]
        rate = artifact.manifest.total_bytes / seconds / 1e9
        items.append(
            {
                "id": id_,
                "uuid": artifact.manifest.uuid,
                "ok": not bad,
                "bytes": artifact.manifest.total_bytes,
                "seconds": seconds,
                "files": [{"path": v.path, "ok": v.ok, "problem": v.problem} for v in verdicts],
            }
        )
        rows += [(id_, "bad", verdict.path, verdict.problem) for verdict in bad]
        if not bad:
            rows.append((id_, "ok", f"{len(verdicts)} files", f"{human_seconds(seconds)}, {rate:.2f} GB/s"))
    emit("Verification", {"items": items}, output, lambda: table(rows, ("ID", "VERDICT", "FILE", "DETAIL")))
    if not all(item["ok"] for item in items):
        raise click.exceptions.Exit(1)


@click.command("gc")
@click.option("--dry-run", is_flag=True, help="Only say what would go and why.")
@output_option
@click.pass_obj
def gc_command(context: Context, output: str, *, dry_run: bool) -> None:
    """Remove what the retention rules let go: leftovers, too old, too many, too large.

    The rules are the settings gc.*; pinned checkpoints and those in use stay.
    """
    import time

    settings = context.load().settings
    items = open_store(settings).gc(settings.gc, dry_run=dry_run, now=time.time())
    data = {
        "dryRun": dry_run,
        "bytes": sum(item.bytes for item in items),
        "items": [
            {"id": item.id, "uuid": item.uuid, "path": str(item.path), "bytes": item.bytes, "why": item.why}
            for item in items
        ],
    }

    def render() -> str:
        rows = table(
            [(i.id, human_bytes(i.bytes), i.why, str(i.path)) for i in items], ("ID", "SIZE", "WHY", "PATH")
        )
        verb = "would be freed" if dry_run else "freed"
        return f"{rows}\n{human_bytes(sum(item.bytes for item in items))} {verb}"

    emit("GarbageCollection", data, output, render)


@click.command("pin")
@click.argument("id_", metavar="ID", type=ID)
@click.pass_obj
def pin_command(context: Context, id_: CheckpointId) -> None:
    """Keep a checkpoint whatever the retention rules say."""
    open_store(context.load().settings).pin(id_)
    click.echo(f"{id_} is pinned")


@click.command("unpin")
@click.argument("id_", metavar="ID", type=ID)
@click.pass_obj
def unpin_command(context: Context, id_: CheckpointId) -> None:
    """Let the retention rules apply again."""
    open_store(context.load().settings).unpin(id_)
    click.echo(f"{id_} is not pinned")
