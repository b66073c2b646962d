"""``gc``: by the agent if one runs on this store, else here, after what a dead agent left is recovered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from hibernode.cli.common import agent_answers, open_signals, open_store
from hibernode.cli.main import Context
from hibernode.cli.output import Progress, emit, human_bytes, output_option, table

if TYPE_CHECKING:
    from hibernode.artifact.store import Store
    from hibernode.settings import Settings


@click.command("gc")
@click.option("--dry-run", is_flag=True, help="Only say what would go and why.")
@output_option
@click.pass_obj
def gc_command(context: Context, output: str, *, dry_run: bool) -> None:
    """Remove what the retention rules let go: leftovers, too old, too many, too large.

    The rules are the settings gc.*; pinned checkpoints and those in use stay. A dump that a dead agent
    was in the middle of is finished or undone first. If an agent runs it is asked, by its own rules,
    unless a gc.* flag gives others.
    """
    loaded = context.load()
    settings = loaded.settings
    client = agent_answers(settings)
    own_rules = any(key.startswith("gc.") and source == "flag" for key, source in loaded.sources.items())
    recovered: list[dict[str, str]] = []
    with Progress("gc"):
        if client is not None and not own_rules:
            items = client.post("/v1/gc", dry_run="true" if dry_run else "false")["items"]
        else:
            store = open_store(settings)
            recovered = _recover(settings, store, dry_run=dry_run) if client is None else []
            items = _collect(settings, store, dry_run=dry_run)
    freed = sum(item["bytes"] for item in items)
    data = {"dryRun": dry_run, "bytes": freed, "items": items, "recovered": recovered}
    emit("GarbageCollection", data, output, lambda: _render(items, recovered, freed, dry_run=dry_run))


def _recover(settings: Settings, store: Store, *, dry_run: bool) -> list[dict[str, str]]:
    from hibernode.recover import recover_dumps
    from hibernode.state import StateDir

    if dry_run:
        return [
            {"id": staging.id, "ending": "pending", "message": f"{staging.path} is finished or undone first"}
            for staging in store.stagings()
            if not staging.owner_alive
        ]
    return [
        {"id": item.id, "ending": item.ending.value, "message": item.message}
        for item in recover_dumps(
            store, StateDir.open(settings.state_dir), open_signals(settings), gpu=settings.gpu
        )
    ]


def _collect(settings: Settings, store: Store, *, dry_run: bool) -> list[dict[str, Any]]:
    import time

    return [
        {"id": item.id, "uuid": item.uuid, "path": str(item.path), "bytes": item.bytes, "why": item.why}
        for item in store.gc(settings.gc, dry_run=dry_run, now=time.time())
    ]


def _render(
    items: list[dict[str, Any]], recovered: list[dict[str, str]], freed: int, *, dry_run: bool
) -> str:
    lines = [f"{item['id']}: {item['ending']}: {item['message']}" for item in recovered]
    if items:
        rows = [(i["id"], human_bytes(i["bytes"]), i["why"], i["path"]) for i in items]
        lines.append(table(rows, ("ID", "SIZE", "WHY", "PATH")))
        lines.append(f"{human_bytes(freed)} {'would be freed' if dry_run else 'freed'}")
    else:
        lines.append("nothing to remove")
    return "\n".join(lines)
