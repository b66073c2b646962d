"""What is asked of the two pipelines, and what they answer. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from hibernode.artifact.layout import Artifact
from hibernode.discovery.locate import Contract
from hibernode.errors import HibernodeError
from hibernode.host.procfs import Process
from hibernode.workload import CheckpointId

NOT_WOKEN: Final = "CapturedNotWoken"
"""The reason of a checkpoint that is good, of a worker that was not brought back onto its GPU."""


class Trigger(StrEnum):
    """What said that the worker may be frozen now."""

    SIGNAL = "signal"
    READY_FILE = "ready-file"
    POD_READY = "pod-ready"
    COMMAND = "command"


@dataclass(frozen=True, slots=True)
class Request:
    """One checkpoint to make. ``process`` is held by its pidfd and stays the caller's to close."""

    id: CheckpointId
    process: Process
    contract: Contract
    trigger: Trigger
    replace: bool = False
    announce: bool = True


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a checkpoint ended. ``phases`` are seconds by name, ``path`` the artifact's."""

    id: CheckpointId
    success: bool
    reason: str = ""
    message: str = ""
    remedy: str = ""
    exit_code: int = 0
    path: str = ""
    reused: bool = False
    bytes: int = 0
    seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    step: str = ""
    answered: bool = True

    @property
    def event_type(self) -> str:
        """Which type of event tells it."""
        return "Normal" if self.success and self.reason != NOT_WOKEN else "Warning"


@dataclass(frozen=True, slots=True)
class RestoreRequest:
    """One restore to make. ``version`` is an artifact's uuid; empty: the current one.

    ``into``: the container that shall take the worker; empty: this machine itself.
    """

    id: CheckpointId
    version: str = ""
    digests: bool = False
    strict: bool = False
    announce: bool = True
    into: str = ""
    requester_uid: int | None = None
    identity: tuple[int, int, int] | None = None


@dataclass(frozen=True, slots=True)
class RestoreOutcome:
    """How a restore ended. ``directory`` holds its logs and, while the worker lives, its shim's state."""

    id: CheckpointId
    success: bool
    pid: int = 0
    start_ticks: int = 0
    reason: str = ""
    message: str = ""
    remedy: str = ""
    exit_code: int = 0
    directory: str = ""
    seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    step: str = ""
    answered: bool = True


def failed(
    request: Request, error: HibernodeError, *, seconds: float = 0.0, step: str = "", answered: bool = True
) -> Outcome:
    """Answer for a checkpoint that came to nothing."""
    return Outcome(
        request.id,
        success=False,
        reason=error.reason,
        message=error.message,
        remedy=error.remedy,
        exit_code=error.exit_code,
        seconds=seconds,
        step=step,
        answered=answered,
    )


def already_there(request: Request, artifact: Artifact) -> Outcome:
    """Answer for a checkpoint that was in the store before."""
    return Outcome(
        request.id,
        success=True,
        reason="AlreadyCaptured",
        message=f"{request.id} is in the store already",
        path=str(artifact.path),
        reused=True,
        bytes=artifact.manifest.total_bytes,
    )


def sentence(outcome: Outcome | RestoreOutcome) -> str:
    """Say in one line what went wrong and what to do, the reason first."""
    text = outcome.message if not outcome.remedy else f"{outcome.message}; {outcome.remedy}"
    return f"{outcome.reason}: {text}"


def answer(outcome: RestoreOutcome) -> dict[str, Any]:
    """Build the body of ``<id>.restored``."""
    if outcome.success:
        return {"success": True, "pid": outcome.pid}
    return {"success": False, "error": sentence(outcome)}


def restore_failed(
    request: RestoreRequest,
    error: HibernodeError,
    *,
    directory: str = "",
    step: str = "",
    answered: bool = True,
) -> RestoreOutcome:
    """Answer for a restore that came to nothing."""
    return RestoreOutcome(
        request.id,
        success=False,
        reason=error.reason,
        message=error.message,
        remedy=error.remedy,
        exit_code=error.exit_code,
        directory=directory,
        step=step,
        answered=answered,
    )
