"""Everything that would make CRIU fail, found while the worker still runs.

:func:`gather` looks once, the checks judge what it saw, :func:`refuse` turns a failing row into an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from hibernode.errors import RefusedError
from hibernode.preflight.checks import dump_findings
from hibernode.preflight.facts import Facts
from hibernode.preflight.gather import gather
from hibernode.preflight.host_checks import host_findings
from hibernode.preflight.socket_checks import check_cut, decide_tcp, door_sockets
from hibernode.workload import Finding, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from hibernode.criu.find import Criu
    from hibernode.host.procfs import Process
    from hibernode.settings import Settings

__all__ = [
    "Facts",
    "Preflight",
    "check_cut",
    "decide_tcp",
    "dump_findings",
    "gather",
    "host_findings",
    "preflight",
    "refuse",
]

MAX_MESSAGE: int = 1000
"""An event's message holds at most 1,024 characters."""


@dataclass(frozen=True, slots=True)
class Preflight:
    """The rows, what they were judged by, and what follows for CRIU.

    ``shell_job``: the root leads no session, so CRIU must be told that its session lies outside.
    ``estimate_bytes``: the size of the image; how it is reckoned says :attr:`Facts.estimate_bytes`.
    ``door``: sockets connected to the agent's metadata socket, which must be closed before the dump.
    """

    findings: tuple[Finding, ...]
    facts: Facts
    tcp: Literal["established", "close"]
    shell_job: bool
    estimate_bytes: int
    door: frozenset[int] = frozenset()


def preflight(process: Process, settings: Settings, criu: Criu | None, store: Path) -> Preflight:
    """Look at a process tree and say whether it can be dumped into ``store``. Nothing is changed.

    :raises RefusedError: the process has ended, reason ``WorkerGone``.
    """
    facts = gather(process, settings, criu, store)
    tcp, _ = decide_tcp(settings.criu.tcp, facts.tcp, facts.socket_inodes)
    return Preflight(
        findings=tuple(dump_findings(facts, settings)),
        facts=facts,
        tcp=tcp,
        shell_job=facts.root.stat.session != facts.root.pid,
        estimate_bytes=facts.estimate_bytes,
        door=door_sockets(facts, settings),
    )


def _both(finding: Finding) -> str:
    """Say what was found and what should have been."""
    wanted = f" (expected: {finding.expected})" if finding.expected else ""
    return f"{finding.check}: {finding.found}{wanted}"


def refuse(findings: Iterable[Finding]) -> None:
    """Raise if a row fails: all that was found in the message, the first row's reason, every remedy.

    :raises RefusedError: ``checks`` among its fields names the failing rows.
    """
    failing = [finding for finding in findings if finding.verdict is Verdict.FAIL]
    if not failing:
        return
    message = "; ".join(map(_both, failing))
    remedies = dict.fromkeys(finding.remedy for finding in failing if finding.remedy)
    raise RefusedError(
        message if len(message) <= MAX_MESSAGE else message[:MAX_MESSAGE] + " [truncated]",
        remedy="; ".join(remedies),
        reason=failing[0].reason,
        checks=[finding.check for finding in failing],
    )
