"""What several commands share: ids through the gate, the store, the directories, tables of findings."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from hibernode.cli.main import Context
from hibernode.cli.output import table
from hibernode.errors import AgentUnreachableError, HibernodeError, NotFoundError
from hibernode.workload import CheckpointId, Finding, Verdict

if TYPE_CHECKING:
    from hibernode.artifact.store import Store
    from hibernode.client import AgentClient
    from hibernode.discovery.signals import SignalDir
    from hibernode.host.procfs import Process
    from hibernode.settings import Settings

T = TypeVar("T")

AGENT_SECONDS: Final = 600.0
"""What the agent may take for one answer; removing much of a store takes minutes."""


class IdType(click.ParamType[CheckpointId]):
    """A checkpoint id on the command line."""

    name = "id"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> CheckpointId:
        """Let the text through the gate; its own error is the one shown."""
        del param, ctx
        return CheckpointId(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
        """Complete ids that are in the store; nothing is made, and nothing is said, where there is none."""
        from click.shell_completion import CompletionItem

        del param
        context = Context()
        context.take(ctx.find_root().params)
        try:
            settings = context.load().settings
            if not settings.store.path.is_dir():
                return []
            with open_store(settings) as store:
                infos = store.artifacts()
        except (HibernodeError, OSError):
            return []
        ids = {info.id for info in infos if info.state == "complete" and info.id.startswith(incomplete)}
        return [CompletionItem(id_) for id_ in sorted(ids)]


ID = IdType()


class NameType(click.ParamType[str]):
    """A name on the command line; a variable that was empty is no name, and does not stand for no option."""

    name = "name"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Take any text but a blank one."""
        if not str(value).strip():
            self.fail("it is empty", param, ctx)
        return str(value)


class PathType(click.Path):
    """A path on the command line; an empty one does not stand for the current directory."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Take any text but an empty one."""
        if not os.fspath(value):
            self.fail("it is empty", param, ctx)
        return super().convert(value, param, ctx)


NAME = NameType()
PATH = PathType(path_type=Path)


def open_store(settings: Settings) -> Store:
    """Open the store; a missing one is made, private."""
    from hibernode.artifact.store import Store

    store = Store(settings.store.path)
    store.open()
    return store


def agent_answers(settings: Settings) -> AgentClient | None:
    """Find the agent that runs on this store; None when there is none, or it keeps another store.

    :raises AgentUnreachableError: there is one, and it does not answer.
    """
    from hibernode.client import NO_AGENT, AgentClient

    client = AgentClient(settings.server.socket, timeout=AGENT_SECONDS)
    try:
        status = client.get("/v1/status")
    except AgentUnreachableError as error:
        if error.reason == NO_AGENT:
            return None
        raise
    return client if status.get("store", {}).get("path") == str(settings.store.path) else None


def open_process(pid: int) -> Process:
    """Hold a process by its pid.

    :raises NotFoundError: there is none.
    """
    from hibernode.host.procfs import Process

    try:
        return Process.open(pid)
    except ProcessLookupError:
        raise NotFoundError(
            f"no process has the pid {pid}", remedy="name a running process", reason="WorkerGone"
        ) from None


def open_signals(settings: Settings) -> SignalDir | None:
    """Open the signal directory if there is one; commands never make it."""
    from hibernode.discovery.signals import SignalDir

    return SignalDir(settings.signals) if settings.signals.path.is_dir() else None


def run_async(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run one coroutine; Ctrl-C, SIGTERM and SIGHUP cancel it, so that it can undo itself.

    :raises HibernodeError: a signal has ended it; the exit code is 128 and the signal's number.
    """
    import asyncio
    import signal

    enders = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    numbers = [number for number in enders if signal.getsignal(number) is not signal.SIG_IGN]  # nohup(1)
    got: list[signal.Signals] = []

    async def stoppable() -> T:
        task, loop = asyncio.ensure_future(work()), asyncio.get_running_loop()

        def stop(number: signal.Signals) -> None:
            got.append(number)
            task.cancel()
            for other in numbers:  # the next one is not to cut off what undoes it
                loop.remove_signal_handler(other)
                signal.signal(other, signal.SIG_IGN)

        for number in numbers:
            loop.add_signal_handler(number, stop, number)
        return await task

    with asyncio.Runner() as runner:
        try:
            return runner.run(stoppable())
        except asyncio.CancelledError:
            error = HibernodeError(
                f"interrupted by {got[0].name}", remedy="what had been begun is undone", reason="Interrupted"
            )
            error.exit_code = 128 + got[0]  # type: ignore[misc]  # its own code shadows the class's
            raise error from None


def finding_table(findings: Iterable[Finding]) -> str:
    """Lay findings out as a table; what to do stands below the row that it is about."""
    shown = list(findings)
    return table(
        [(f.verdict.value, f.check, f.expected, f.found) for f in shown],
        ("VERDICT", "CHECK", "EXPECTED", "FOUND"),
        [[("remedy: ", f.remedy)] if f.remedy else [] for f in shown],
    )


def finding_data(findings: Iterable[Finding]) -> list[dict[str, str]]:
    """Lay findings out as JSON."""
    return [
        {
            "check": f.check,
            "verdict": f.verdict.value,
            "expected": f.expected,
            "found": f.found,
            "remedy": f.remedy,
            "reason": f.reason,
        }
        for f in findings
    ]


def failed(findings: Iterable[Finding]) -> bool:
    """Whether any row fails."""
    return any(finding.verdict is Verdict.FAIL for finding in findings)


def note_event(settings: Settings, kind: str, reason: str, id_: CheckpointId, message: str) -> None:
    """Note what was done by hand among the agent's events."""
    from hibernode.events import EventLog

    events = EventLog(settings.state_dir)
    events.add(kind, reason, id_, message)
    events.close()
