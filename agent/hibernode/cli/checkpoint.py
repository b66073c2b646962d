"""``checkpoint``: freeze a process by hand, through the same pipeline as the agent."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import click

from hibernode.cli.common import (
    ID,
    NAME,
    failed,
    finding_data,
    finding_table,
    note_event,
    open_process,
    open_signals,
    open_store,
    run_async,
)
from hibernode.cli.main import Context
from hibernode.cli.output import Progress, emit, human_bytes, human_seconds, output_option
from hibernode.errors import HibernodeError, UsageError
from hibernode.workload import ERA_A1, CheckpointId

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from hibernode.answers import Outcome
    from hibernode.discovery.locate import Contract
    from hibernode.host.procfs import Process
    from hibernode.settings import Settings

ABSENT_SECONDS: Final = 10.0
"""The agent answers when the worker's metadata records are Stale, or after five seconds."""


@click.command("checkpoint")
@click.option("--pid", type=click.IntRange(min=2), help="Root of the process tree to freeze.")
@click.option(
    "--container",
    type=NAME,
    metavar="CONTAINER",
    help="The container to freeze: id, at least 8 digits of it, name, or pod uid.",
)
@click.option("--id", "id_", type=ID, help="Checkpoint id; default: the process's own, else a new one.")
@click.option(
    "--replace",
    is_flag=True,
    help="Take the place of a checkpoint with this id; gc.keep_per_id says which old ones stay.",
)
@click.option(
    "--leave", type=click.Choice(["running", "stopped", "killed"]), help="The process's state afterwards."
)
@click.option("--dry-run", is_flag=True, help="Only the checks and the command; exit 4 if a check fails.")
@output_option
@click.pass_obj
def checkpoint_command(
    context: Context,
    pid: int | None,
    container: str | None,
    id_: CheckpointId | None,
    leave: str | None,
    *,
    output: str,
    replace: bool,
    dry_run: bool,
) -> None:
    """Freeze a process and its descendants, or a container, into a checkpoint.

    Of a process in a container the whole container is frozen. The worker goes on running unless --leave says
    otherwise. A dump that fails leaves it as it was.
    """
    from hibernode.discovery.locate import contract_of
    from hibernode.host import procfs
    from hibernode.host.cgroups import see_whole

    see_whole()
    settings = context.load([("checkpoint.leave", leave)] if leave else []).settings
    with _named(pid, container) as process:
        pid = process.pid
        environ = procfs.environ(pid)
        own = environ.get(ERA_A1.env_hash, "")
        chosen = id_ or (CheckpointId(own) if own else CheckpointId(secrets.token_hex(8)))
        if own and own != chosen:
            raise UsageError(
                f"pid {pid} was started as {own}, not as {chosen}",
                remedy="leave --id out to use the process's own id",
            )
        if dry_run:
            _dry_run(settings, process, output)
        else:
            _run(settings, process, chosen, contract_of(environ, ERA_A1), output, replace=replace)


def _named(pid: int | None, container: str | None) -> Process:
    """Hold the root of the tree that is meant."""
    from hibernode.discovery.containers import container_of, find, hold

    if (pid is None) == (container is None):
        raise UsageError(
            "nothing or too much is named to be frozen", remedy="give either --pid or --container"
        )
    if container is not None:
        found = find(container)
        for sidecar in found.sidecars:
            click.echo(
                f"left alone: container {sidecar.ref.id} (pid {sidecar.pid}) of the same pod", err=True
            )
        return hold(found.container)
    assert pid is not None
    process = open_process(pid)
    inside = container_of(pid)
    if inside is None or inside.init == process.key:
        return process
    process.close()
    return hold(inside)


def _dry_run(settings: Settings, process: Process, output: str) -> None:
    import shlex
    from pathlib import Path

    from hibernode.container import dump as containers
    from hibernode.criu.options import dump_args
    from hibernode.criu.runner import find_criu
    from hibernode.discovery.containers import container_of
    from hibernode.dump_work import dump_options
    from hibernode.gpu.preflight import look_at
    from hibernode.preflight import preflight

    criu = find_criu(settings.criu.binary)
    checked = preflight(process, settings, criu, settings.store.path)
    on_gpu = run_async(lambda: look_at(checked.facts, settings))
    findings, estimate = [*checked.findings, *on_gpu.findings], checked.estimate_bytes + on_gpu.gpu_bytes
    chosen = dump_options(settings, checked)
    container = container_of(process.pid)
    if container is not None and not failed(findings):
        chosen = containers.options(chosen, containers.look(container, process, checked, settings))
    args = dump_args(process.pid, Path("IMAGES"), chosen, work_dir=Path("WORK"))
    command = shlex.join([*criu.argv, *args])
    data = {
        "pid": process.pid,
        "findings": finding_data(findings),
        "estimateBytes": estimate,
        "command": command,
    }

    def render() -> str:
        rows = finding_table(findings)
        return f"{rows}\n\nestimated image: {human_bytes(estimate)}\ncommand: {command}"

    emit("CheckpointPlan", data, output, render)
    if failed(findings):
        raise click.exceptions.Exit(4)


def _run(
    settings: Settings, process: Process, id_: CheckpointId, contract: Contract, output: str, *, replace: bool
) -> None:
    from hibernode.answers import Request, Trigger
    from hibernode.checkpoint import Checkpointer
    from hibernode.state import StateDir

    store = open_store(settings)
    signals = open_signals(settings) if contract.signal_file else None
    state = StateDir.open(settings.state_dir)

    async def work() -> Outcome:
        with Progress(f"checkpoint {id_}") as progress:
            checkpointer = Checkpointer(
                settings,
                store,
                state,
                signals,
                lambda _id, step: progress.label(step.value),
                absent=lambda pid: _absent(settings.server.socket, pid),
            )
            return await checkpointer.run(Request(id_, process, contract, Trigger.COMMAND, replace=replace))

    outcome = run_async(work)
    event = "CheckpointSucceeded" if outcome.success else "CheckpointFailed"
    note_event(settings, outcome.event_type, event, id_, f"by hand: {outcome.reason}: {outcome.message}")
    if not outcome.success:
        raise failure(outcome)
    data = {
        "id": outcome.id,
        "path": outcome.path,
        "bytes": outcome.bytes,
        "seconds": outcome.seconds,
        "reused": outcome.reused,
        "phases": outcome.phases,
        "message": outcome.message,
    }

    def render() -> str:
        if outcome.reused:
            return f"{outcome.id}: in the store already ({outcome.path}); --replace takes it again"
        phases = ", ".join(f"{name} {human_seconds(value)}" for name, value in outcome.phases.items())
        return (
            f"{outcome.id}: {human_bytes(outcome.bytes)} in {human_seconds(outcome.seconds)} ({phases})\n"
            f"{outcome.path}\n{outcome.message}"
        )

    emit("Checkpoint", data, output, render)


@asynccontextmanager
async def _absent(path: Path, pid: int) -> AsyncIterator[None]:
    """Have an agent that runs count the worker as absent, for as long as this process lives."""
    from hibernode.client import NO_AGENT, AgentClient

    try:
        client = AgentClient(path, timeout=ABSENT_SECONDS)
        await asyncio.to_thread(client.post, "/v1/absent", pid=pid)
    except HibernodeError as error:
        if error.reason != NO_AGENT:
            click.echo(f"the agent was not told, so peers find out by themselves: {error.message}", err=True)
    yield


def failure(outcome: Outcome) -> HibernodeError:
    """Turn a failed outcome into the error that ends the command with its exit code."""
    error = HibernodeError(outcome.message, remedy=outcome.remedy, reason=outcome.reason)
    error.exit_code = outcome.exit_code  # type: ignore[misc]  # an instance's own code shadows the class's
    return error
