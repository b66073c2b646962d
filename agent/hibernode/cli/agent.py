"""``status``, ``events``, ``retry``: what the agent is doing and has done."""

from __future__ import annotations

from typing import Any

import click

from hibernode.cli.common import ID, agent_answers
from hibernode.cli.main import Context
from hibernode.cli.output import age, emit, human_bytes, human_seconds, output_option, table
from hibernode.workload import CheckpointId


@click.command("status")
@output_option
@click.pass_obj
def status_command(context: Context, output: str) -> None:
    """Show what the agent is doing; exit 3 if none answers."""
    from hibernode.client import AgentClient

    status = AgentClient(context.load().settings.server.socket).get("/v1/status")
    emit("Status", status, output, lambda: _status(status))


def _status(status: dict[str, Any]) -> str:
    signals, store = status["signals"], status["store"]
    up = status["uptimeSeconds"]
    space = f"{human_bytes(store['bytes'])}, {human_bytes(store['freeBytes'])} free"
    lines = [
        f"agent      {status['version']} on {status['node']}, pid {status['pid']}, up {human_seconds(up)}",
        f"signals    {signals['path']}: {signals['mode']}"
        + (f" ({signals['reason']})" if signals["reason"] else "")
        + f", {signals['rescans']} rescans, {signals['overflows']} overflows",
        f"store      {store['path']}: {store['artifacts']} checkpoints, {space}",
        f"criu       {status['criu']}",
        f"queue      {status['queue']['running']} running, {status['queue']['waiting']} waiting",
    ]
    lines += [
        f"  {job['kind']} {job['id']}: {job['step']} for {human_seconds(job['stepSeconds'])}"
        for job in status["jobs"]
    ]
    lines.append(f"restored   {len(status['restored'])} workers")
    lines += [f"  {worker['id']}: pid {worker['pid']}" for worker in status["restored"]]
    lines += [
        f"stuck      {entry['owner']}: {entry['what']}, for {human_seconds(entry['seconds'])}"
        for entry in status["stuck"]
    ]
    lines += _gpu(status.get("gpu") or {"nvml": "unknown"})
    if status.get("metadata"):
        lines += _metadata(status["metadata"])
    lines += _kubernetes(status.get("kubernetes"))
    lines.append(f"failure    {status['lastFailure'] or 'none'}")
    return "\n".join(lines)


def _kubernetes(kube: dict[str, Any] | None) -> list[str]:
    """Say what the cluster asks for: a line, and one for each pod."""
    if kube is None:
        return []
    heard = "in step" if kube["synced"] else f"not heard: {kube['trouble'] or 'the API server is away'}"
    where = kube["namespace"] or "all namespaces"
    return [
        f"kubernetes {kube['pods']} pods of {where}, {heard}; {kube['untold']} messages wait",
        *(
            f"  {pod['namespace']}/{pod['name']}: {pod['kind']} {pod['id'] or '?'}, {pod['state']}"
            for pod in kube["asking"]
        ),
    ]


def _metadata(found: dict[str, Any]) -> list[str]:
    """Say it in a line, and one more for what is out of the ordinary."""
    records = ", ".join(f"{count} {name}" for name, count in found["records"].items()) or "no records"
    lines = [
        f"metadata   {found['socket']} ({found['backend']}): "
        + (f"{records}, {found['connections']} connections" if found["ready"] else "not ready")
    ]
    if found["trouble"]:
        lines.append(f"  {found['trouble']}")
    if found["unreadable"]:
        lines.append(f"  {found['unreadable']} objects that no record can be made of")
    if found["listAgeSeconds"] >= 1:
        lines.append(f"  the list is {human_seconds(found['listAgeSeconds'])} old")
    return lines


def _gpu(gpu: dict[str, Any]) -> list[str]:
    """Say it in a line, and one for each trouble."""
    if gpu["nvml"] != "up":
        stale = f", last read {age(gpu['staleSince'])} ago" if gpu.get("staleSince") else ""
        return [f"gpu        NVML {gpu['nvml']}{stale}: {gpu.get('reason') or 'nothing known'}"]
    counts = f"{gpu['gpus']} GPUs, {gpu['migInstances']} MIG instances"
    held = f"{gpu['processes']} processes in {gpu['pods']} pods"
    return [
        f"gpu        driver {gpu['driver'] or '?'}, {counts}, {held}",
        *(f"  {trouble}" for trouble in gpu["troubles"]),
    ]


@click.command("events")
@click.option("--limit", type=click.IntRange(1, 1000), default=50, help="Newest events to show.")
@output_option
@click.pass_obj
def events_command(context: Context, limit: int, output: str) -> None:
    """Show what the agent did, the newest last; from the disk when no agent runs."""
    from hibernode.events import read_events

    state_dir = context.load().settings.state_dir
    events = read_events(state_dir, limit)

    def render() -> str:
        rows = [(age(e["time"]), e["type"], e["reason"], e["object"], e["message"]) for e in events]
        return (
            table(rows, ("AGE", "TYPE", "REASON", "ID", "MESSAGE")) if rows else f"no events in {state_dir}"
        )

    emit("EventList", {"items": events}, output, render)


@click.command("retry")
@click.argument("id_", metavar="ID", type=ID)
@output_option
@click.pass_obj
def retry_command(context: Context, id_: CheckpointId, output: str) -> None:
    """Forget the failed attempts on an id, so that its next ready file is taken up again.

    The agent is asked if one runs.
    """
    from hibernode.state import StateDir

    settings = context.load().settings
    client = agent_answers(settings)
    if client is not None:
        had = bool(client.post("/v1/retry", id=id_).get("forgotten"))
    else:
        had = StateDir.open(settings.state_dir).attempts_clear(id_)
    emit(
        "Retry",
        {"id": id_, "forgotten": had},
        output,
        lambda: f"{id_}: {'failed attempts forgotten' if had else 'there were no failed attempts'}",
    )
