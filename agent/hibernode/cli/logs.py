"""``logs`` and ``explain``: CRIU's own words, and what they mean."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hibernode.cli.common import ID, open_store
from hibernode.cli.main import Context
from hibernode.cli.output import emit, output_option
from hibernode.errors import HibernodeError, NotFoundError
from hibernode.text import printable
from hibernode.workload import CheckpointId

if TYPE_CHECKING:
    from hibernode.criu.diagnose import Diagnosis
    from hibernode.settings import Settings


def _find(settings: Settings, id_: CheckpointId, operation: str) -> Path:
    """Find the newest log of ``operation`` on ``id_``: of a failure, else of what stands in the store."""
    from hibernode.state import StateDir

    state = StateDir.open(settings.state_dir)
    kept = state.log_path(id_, operation)
    if operation == "restore":
        runs = [
            settings.state_dir / "restores" / name
            for name in state.restores_dir.names()
            if name.startswith(id_)
        ]
        found = [run / "restore.log" for run in runs if (run / "restore.log").exists()]
        candidates = [*found, *([kept] if kept else [])]
    else:
        candidates = [kept] if kept else []
        with suppress(HibernodeError):
            candidates.append(open_store(settings).get(id_).path / "dump.log")
    candidates = [path for path in candidates if path.exists()]
    if not candidates:
        failure = _failure(settings, id_) if operation == "restore" else ""
        raise NotFoundError(
            f"no {operation} log of {id_} on this node"
            + (f"; its last restore failed before criu began: {failure}" if failure else ""),
            remedy="'hibernode list' shows what is there; --restore shows the log of a restore",
        )
    return max(candidates, key=lambda path: path.stat().st_mtime)


def _diagnosis(text: str, operation: str) -> Diagnosis:
    from hibernode.criu.diagnose import diagnose

    return diagnose(text, 1, "restore" if operation == "restore" else "dump")


@click.command("logs")
@click.argument("id_", metavar="ID", type=ID)
@click.option("--restore", "restore_", is_flag=True, help="The log of the last restore, not of the dump.")
@click.option("--lines", type=click.IntRange(min=0), default=20, help="Last lines to show; 0: all.")
@output_option
@click.pass_obj
def logs_command(context: Context, id_: CheckpointId, lines: int, output: str, *, restore_: bool) -> None:
    """Show the end of CRIU's log, then its error lines and what they mean."""
    from hibernode.criu.diagnose import read_log

    operation = "restore" if restore_ else "dump"
    path = _find(context.load().settings, id_, operation)
    text = read_log(path)
    found = _diagnosis(text, operation)
    failure = _failure(context.load().settings, id_) if restore_ else ""
    shown = text.splitlines()[-lines:]  # 0: all
    data = {"id": id_, "operation": operation, "path": str(path), "lines": shown, **_found_data(found)}
    last = [f"the last restore failed: {failure}"] if failure else []
    emit(
        "Log",
        {**data, "failure": failure},
        output,
        lambda: "\n".join([*shown, "", str(path), *last, _found_text(found)]),
    )


def _failure(settings: Settings, id_: CheckpointId) -> str:
    """Read why the last restore failed; one that is refused has no log of CRIU's at all."""
    from hibernode.journal import read_journal
    from hibernode.state import StateDir

    newest, failure = 0.0, ""
    runs = StateDir.open(settings.state_dir).restores_dir
    for name in runs.names():
        if name.startswith(id_):
            with suppress(OSError, HibernodeError, ValueError, TypeError), runs.subdir(name) as run:
                journal = read_journal(run) or {}
                began = float(journal.get("started_at", 0))
                if began > newest:
                    newest, failure = began, str(journal.get("error", ""))
    return printable(failure, keep="")


def _found_data(found: Diagnosis) -> dict[str, Any]:
    causes = [
        {"reason": c.reason, "message": c.message, "remedy": c.remedy, "line": c.line} for c in found.causes
    ]
    return {"causes": causes, "errorLines": list(found.raw)}


def _found_text(found: Diagnosis) -> str:
    none = "criu itself has succeeded" if found.success else "no known cause"
    causes = [f"{c.reason}: {c.message}\n  {c.remedy}" for c in found.causes] or [none]
    lines = [f"  {line}" for line in found.raw] or ["  none"]
    return "\n".join([*causes, "error lines:", *lines])


@click.command("explain")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--operation", type=click.Choice(["auto", "dump", "restore"]), default="auto", help="What was run."
)
@output_option
def explain_command(file: Path, operation: str, output: str) -> None:
    """Name the cause in a CRIU log, and what to do; exit 1 if it holds no cause that is known."""
    from hibernode.criu.diagnose import read_log

    text = read_log(file)
    chosen = operation
    if operation == "auto":
        chosen = "restore" if "Restoring" in text or "restore" in file.name else "dump"
    found = _diagnosis(text, chosen)
    emit(
        "Explanation",
        {"operation": chosen, **_found_data(found)},
        output,
        lambda: _found_text(found),
    )
    if not found.causes:
        raise click.exceptions.Exit(1)
