"""``restore``: bring a checkpoint back by hand, through the same pipeline as the agent."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from hibernode.cli.common import (
    ID,
    NAME,
    failed,
    finding_data,
    finding_table,
    note_event,
    open_signals,
    open_store,
    run_async,
)
from hibernode.cli.main import Context
from hibernode.cli.output import Progress, emit, human_seconds, output_option
from hibernode.errors import HibernodeError
from hibernode.workload import CheckpointId

if TYPE_CHECKING:
    from hibernode.answers import RestoreOutcome, RestoreRequest
    from hibernode.restore import Restorer


@click.command("restore")
@click.argument("id_", metavar="ID", type=ID)
@click.option(
    "--version", type=NAME, metavar="UUID", help="An older artifact of this id; see 'hibernode list'."
)
@click.option(
    "--into",
    type=NAME,
    metavar="CONTAINER",
    help="The container that takes the worker: id, at least 8 digits of it, name, or pod uid.",
)
@click.option("--digests", is_flag=True, help="Check every file's digest first, not only sizes.")
@click.option(
    "--strict", is_flag=True, help="Refuse when a fact cannot be compared or only differs a little."
)
@click.option("--dry-run", is_flag=True, help="Only the checks and the command; exit 4 if a check fails.")
@click.option("--wait", is_flag=True, help="Stay until the worker ends, and exit with its code.")
@output_option
@click.pass_obj
def restore_command(
    context: Context,
    id_: CheckpointId,
    version: str | None,
    into: str | None,
    output: str,
    *,
    digests: bool,
    strict: bool,
    dry_run: bool,
    wait: bool,
) -> None:
    """Bring a checkpoint back to life, on this machine or in a container, under the pids it had.

    Refused before anything is touched when it cannot succeed. On the machine itself standard output and error
    of the worker, when they were pipes, go on in files below the state directory; the table says where. In a
    container they go on in the container's log, and the container ends when the worker does.
    """
    from hibernode.answers import RestoreRequest
    from hibernode.host.cgroups import see_whole
    from hibernode.restore import Restorer
    from hibernode.restored import shell_code, wait_for_end
    from hibernode.state import StateDir

    see_whole()
    settings = context.load().settings
    state = StateDir.open(settings.state_dir)
    request = RestoreRequest(id_, version=version or "", digests=digests, strict=strict, into=into or "")
    with Progress(f"restore {id_}") as progress:
        restorer = Restorer(
            settings,
            open_store(settings),
            state,
            open_signals(settings),
            lambda _id, step: progress.label(step.value),
        )
        if dry_run:
            _dry_run(restorer, request, output)
            return
        outcome = run_async(lambda: restorer.run(request))
    event = ("Normal", "RestoreSucceeded") if outcome.success else ("Warning", "RestoreFailed")
    note_event(settings, *event, id_, f"by hand: {outcome.reason}: {outcome.message}")
    if not outcome.success:
        error = HibernodeError(outcome.message, remedy=outcome.remedy, reason=outcome.reason)
        worker = shell_code(state, outcome.directory) if wait else None
        error.exit_code = worker or outcome.exit_code  # type: ignore[misc]  # its own shadows the class's
        raise error
    _show(outcome, output)
    if wait:
        sys.exit(wait_for_end(state, outcome.directory))


def _show(outcome: RestoreOutcome, output: str) -> None:
    data = {
        "id": outcome.id,
        "pid": outcome.pid,
        "seconds": outcome.seconds,
        "phases": outcome.phases,
        "directory": outcome.directory,
    }

    def render() -> str:
        phases = ", ".join(f"{name} {human_seconds(value)}" for name, value in outcome.phases.items())
        took = human_seconds(outcome.seconds)
        return f"{outcome.id}: pid {outcome.pid} in {took} ({phases})\n{outcome.directory}"

    emit("Restore", data, output, render)


def _dry_run(restorer: Restorer, request: RestoreRequest, output: str) -> None:
    import shlex

    plan = run_async(lambda: restorer.plan(request))
    command = shlex.join(plan.argv)
    data = {
        "id": request.id,
        "path": str(plan.artifact.path),
        "findings": finding_data(plan.findings),
        "command": command,
    }
    emit(
        "RestorePlan",
        data,
        output,
        lambda: f"{finding_table(plan.findings)}\n\ncommand: {command}",
    )
    if failed(plan.findings):
        raise click.exceptions.Exit(4)
