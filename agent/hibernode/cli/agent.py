"""``status``, ``events``, ``retry``: what the agent is doing and has done."""

from __future__ import annotations

from typing import Any

import click

from hibernode.cli.common import ID
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
    lines = [
        f"agent      {status['version']} on {status['node']}, pid {status['pid']}, up {human_seconds(status['uptimeSeconds'])}",
        f"signals    {signals['path']}: {signals['mode']}"
        + (f" ({signals['reason']})" if signals["reason"] else "")
        + f", {signals['rescans']} rescans, {signals['overflows']} overflows",
        f"store      {store['path']}: {store['artifacts']} checkpoints, {human_bytes(store['bytes'])}, "
        f"{human_bytes(store['freeBytes'])} free",
        f"criu       {status['criu']}",
        f"queue      {status['queue']['running']} running, {status['queue']['waiting']} waiting",
    ]
    lines += [
        f"  {job['kind']} {job['id']}: {job['step']} for {human_seconds(job['stepSeconds'])}"
        for job in status["jobs"]
    ]
    lines.append(f"restored   {len(status['restored'])} workers")
    lines += [f"  {worker['id']}: pid {worker['pid']}" for worker in status["restored"]]
    lines.append(f"failure    {status['lastFailure'] or 'none'}")
    return "\n".join(lines)


@click.command("events")
@click.option("--limit", type=click.IntRange(1, 1000), default=50, help="Newest events to show.")
@output_option
@click.pass_obj
def events_command(context: Context, limit: int, output: str) -> None:
    """Show what the agent did, the newest last; from the disk when no agent runs."""
    from hibernode.events import read_events

    events = read_events(context.load().settings.state_dir, limit)
    emit(
        "EventList",
        {"items": events},
        output,
        lambda: table(
            [(age(e["time"]), e["type"], e["reason"], e["object"], e["message"]) for e in events],
            ("AGE", "TYPE", "REASON", "ID", "MESSAGE"),
        ),
    )


@click.command("retry")
@click.argument("id_", metavar="ID", type=ID)
@click.pass_obj
def retry_command(context: Context, id_: CheckpointId) -> None:
    """Forget the failed attempts on an id, so that its next ready file is taken up again."""
    from hibernode.state import StateDir

    state = StateDir.open(context.load().settings.state_dir)
    had = state.attempts_clear(id_)
    click.echo(f"{id_}: {'failed attempts forgotten' if had else 'there were no failed attempts'}")
