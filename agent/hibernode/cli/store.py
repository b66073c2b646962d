"""``list``, ``inspect``, ``verify``, ``pin``, ``unpin``: the store, read and kept in order."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from hibernode.cli.common import ID, NAME, open_store, run_async
from hibernode.cli.main import Context
from hibernode.cli.output import Progress, age, emit, human_bytes, human_seconds, output_option, table
from hibernode.errors import IntegrityError, UsageError
from hibernode.text import printable
from hibernode.workload import CheckpointId

if TYPE_CHECKING:
    from hibernode.artifact.manifest import ContainerFacts, CudaFacts, Manifest
    from hibernode.artifact.store import ArtifactInfo, Store

ID_DIGITS = 12
"""Of a container's id, as the tools of runtimes show it; a name is cut too."""

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
        "container": info.container,
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
    settings = context.load().settings
    path = settings.store.path
    # Looking makes nothing: a store that is not there yet is empty.
    infos = [i for i in open_store(settings).artifacts() if state in (None, i.state)] if path.is_dir() else []
    infos.sort(key=SORTS[sort], reverse=sort != "id")

    def render() -> str:
        rows = [
            (
                info.id,
                str(info.state),
                human_bytes(info.bytes),
                age(info.created_at),
                "yes" if info.pinned else "",
                info.container[:ID_DIGITS],
                info.uuid[:8],
                info.problem,
            )
            for info in infos
        ]
        empty = f"no {state or ''} checkpoints in the store {path}".replace("  ", " ")
        return (
            table(rows, ("ID", "STATE", "SIZE", "AGE", "PINNED", "CONTAINER", "UUID", "PROBLEM"))
            if rows
            else empty
        )

    emit("ArtifactList", {"items": [_info(info) for info in infos]}, output, render)


@click.command("inspect")
@click.argument("id_", metavar="ID", type=ID)
@click.option("--version", type=NAME, metavar="UUID", help="An older artifact of this id.")
@output_option
@click.pass_obj
def inspect_command(context: Context, id_: CheckpointId, version: str | None, output: str) -> None:
    """Show all about one checkpoint: worker, machine, process tree, files, phase times."""
    artifact = open_store(context.load().settings).get(id_, version)
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
        f"├─ worker    pid {process.pid} ({process.comm}), uid {process.uids[0]}",
        f"│            seccomp mode {process.seccomp_mode}",
        f"│            {' '.join(process.cmdline)[:200]}",
        *_container(manifest.container),
        *_cuda(manifest.cuda),
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
    return "\n".join(printable(line, keep="") for line in lines)


def _cuda(facts: CudaFacts | None) -> list[str]:
    if facts is None:
        return []
    versions = ", ".join(
        f"{name} {value}" for name, value in (("driver", facts.driver), ("tool", facts.tool)) if value
    )
    gpus = [f"│            {gpu.uuid} {gpu.model}, {human_bytes(gpu.memory_bytes)}" for gpu in facts.gpus]
    processes = [
        f"│            {each.ns_pid} {each.comm}: {each.state}, {human_bytes(each.gpu_bytes)} on the GPU"
        for each in facts.processes
    ]
    return [f"├─ cuda      {facts.strategy}, {versions}", *gpus, *processes]


def _container(facts: ContainerFacts | None) -> list[str]:
    if facts is None:
        return []
    pod = f"pod {facts.pod_uid}" if facts.pod_uid else ""
    named = ", ".join(word for word in (facts.name, facts.id[:ID_DIGITS], facts.runtime, pod) if word)
    image = f"{len(facts.lower)} layers, the topmost {facts.lower[0]}" if facts.lower else "no overlay"
    diffs = [f"{diff.file}: {diff.entries} entries, {human_bytes(diff.bytes)}" for diff in facts.diffs]
    places = [mount.mount_point for mount in facts.mounts]
    return [
        f"├─ container {named}",
        f"│            image   {image}",
        f"│            changed {'; '.join(diffs) or 'not carried'}",
        f"│            mounts  {' '.join(places) or 'none'}",
    ]


@click.command("verify")
@click.argument("ids", metavar="[ID]...", type=ID, nargs=-1)
@click.option("--all", "all_", is_flag=True, help="Every whole checkpoint in the store.")
@output_option
@click.pass_obj
def verify_command(context: Context, ids: tuple[CheckpointId, ...], output: str, *, all_: bool) -> None:
    """Check every file of checkpoints against its size and digest; exit 5 if one is bad."""
    if bool(ids) == all_:
        raise UsageError(
            "name checkpoints, or say --all", remedy="hibernode verify ID..., hibernode verify --all"
        )
    store = open_store(context.load().settings)
    if all_:
        whole = ("complete", "previous", "corrupt")
        chosen = [(CheckpointId(i.id), i.uuid) for i in store.artifacts() if i.state in whole]
    else:
        chosen = [(id_, "") for id_ in ids]
    items = [_verify(store, *which) for which in chosen]

    def render() -> str:
        rows: list[tuple[str, str, str, str]] = []
        for item in items:
            id_, bad = item["id"], [file for file in item["files"] if not file["ok"]]
            rows += [(id_, "bad", file["path"], file["problem"]) for file in bad]
            if item["ok"]:
                rate = item["bytes"] / max(item["seconds"], 1e-9) / 1e9
                took = f"{human_seconds(item['seconds'])}, {rate:.2f} GB/s"
                rows.append((id_, "ok", f"{len(item['files'])} files", took))
        return table(rows, ("ID", "VERDICT", "FILE", "DETAIL")) if rows else f"no checkpoints in {store.path}"

    emit("Verification", {"items": items}, output, render)
    if not all(item["ok"] for item in items):
        raise click.exceptions.Exit(IntegrityError.exit_code)


def _verify(store: Store, id_: CheckpointId, version: str) -> dict[str, Any]:
    """Verify one artifact; one whose manifest is damaged is a bad file like any other."""
    import asyncio
    import time

    start = time.perf_counter()
    try:
        with Progress(f"verify {id_}"):
            artifact = store.get(id_, version or None)
            verdicts = run_async(partial(asyncio.to_thread, store.verify, artifact, digests=True))
    except IntegrityError as error:
        bad = [{"path": "manifest.json", "ok": False, "problem": error.message}]
        return {"id": id_, "uuid": version, "ok": False, "bytes": 0, "seconds": 0.0, "files": bad}
    return {
        "id": id_,
        "uuid": artifact.manifest.uuid,
        "ok": all(verdict.ok for verdict in verdicts),
        "bytes": artifact.manifest.total_bytes,
        "seconds": time.perf_counter() - start,
        "files": [{"path": v.path, "ok": v.ok, "problem": v.problem} for v in verdicts],
    }


@click.command("pin")
@click.argument("id_", metavar="ID", type=ID)
@output_option
@click.pass_obj
def pin_command(context: Context, id_: CheckpointId, output: str) -> None:
    """Keep a checkpoint whatever the retention rules say."""
    open_store(context.load().settings).pin(id_)
    emit("Pin", {"id": id_, "pinned": True}, output, lambda: f"{id_} is pinned")


@click.command("unpin")
@click.argument("id_", metavar="ID", type=ID)
@output_option
@click.pass_obj
def unpin_command(context: Context, id_: CheckpointId, output: str) -> None:
    """Let the retention rules apply again."""
    open_store(context.load().settings).unpin(id_)
    emit("Pin", {"id": id_, "pinned": False}, output, lambda: f"{id_} is no longer pinned")
