"""What several commands share: ids through the gate, the store, the directories, tables of findings."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from hibernode.errors import UsageError
from hibernode.workload import CheckpointId, Finding, Verdict

if TYPE_CHECKING:
    from hibernode.artifact.store import Store
    from hibernode.config import Settings
    from hibernode.discovery.signals import SignalDir

T = TypeVar("T")


class IdType(click.ParamType[CheckpointId]):
    """A checkpoint id on the command line."""

    name = "id"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> CheckpointId:
        """Let the text through the gate."""
        try:
            return CheckpointId(value)
        except UsageError as error:
            self.fail(str(error).replace("\n", ";"), param, ctx)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
        """Complete ids that are in the store."""
        from click.shell_completion import CompletionItem

        del param
        try:
            root = ctx.find_root()
            from hibernode.cli.main import Context

            holder = root.obj if isinstance(root.obj, Context) else Context(None, [])
            infos = open_store(holder.load().settings).artifacts()
        except Exception:  # noqa: BLE001 - a completion must never print a traceback into the shell
            return []
        return [
            CompletionItem(info.id)
            for info in infos
            if info.state == "complete" and info.id.startswith(incomplete)
        ]


ID = IdType()


def open_store(settings: Settings) -> Store:
    """Open the store; a missing one is made, private."""
    from hibernode.artifact.store import Store

    store = Store(settings.store.path)
    store.open()
    return store


def open_signals(settings: Settings) -> SignalDir | None:
    """Open the signal directory if there is one; commands never make it."""
    from hibernode.discovery.signals import SignalDir

    return SignalDir(settings.signals) if settings.signals.path.is_dir() else None


def run_async(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run one coroutine; Ctrl-C cancels it, so that it can undo itself."""
    with asyncio.Runner() as runner:
        return runner.run(work())


def finding_rows(findings: Iterable[Finding]) -> list[tuple[str, str, str, str, str]]:
    """Lay findings out as table rows."""
    return [(f.verdict.value, f.check, f.expected, f.found, f.remedy) for f in findings]


FINDING_HEADERS = ("VERDICT", "CHECK", "EXPECTED", "FOUND", "REMEDY")


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
