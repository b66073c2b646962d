"""The exceptions people see. Each carries an exit code, a stable reason and a remedy.

Exit codes of the ``hibernode`` command:

=====  =============================================
0      ok
1      a check failed, or what was asked for is not there
2      usage: bad flag, bad setting, bad id
3      the agent cannot be reached
4      incompatible or refused: nothing was touched
5      input/output failed, or an artifact is not whole
128+N  ended by signal N: what was begun is undone
=====  =============================================
"""

from __future__ import annotations

from typing import ClassVar


class HibernodeError(Exception):
    """Something went wrong, said for people: one line what, the next line what to do.

    ``reason`` is a CamelCase word that is stable across releases: it is what events, metrics and JSON
    answers carry. ``fields`` hold the facts behind the sentence (pid, fd, path, both values).
    """

    exit_code: ClassVar[int] = 1
    default_reason: ClassVar[str] = "Failed"

    def __init__(self, message: str, *, remedy: str = "", reason: str = "", **fields: object) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy
        self.reason = reason or self.default_reason
        self.fields = fields

    def __str__(self) -> str:
        return f"{self.message}\n  {self.remedy}" if self.remedy else self.message


class CheckFailedError(HibernodeError):
    """A check that was asked for says no."""

    default_reason = "CheckFailed"


class NotFoundError(HibernodeError):
    """What was asked for is not there."""

    default_reason = "NotFound"


class CriuError(HibernodeError):
    """CRIU ran and failed; ``fields`` hold the diagnosis and the path of its log."""

    default_reason = "CriuFailed"


class DeadlineError(HibernodeError):
    """A deadline of ours fired."""

    default_reason = "DeadlineExceeded"


class UsageError(HibernodeError):
    """A flag, a setting or an id is not acceptable."""

    exit_code = 2
    default_reason = "Usage"


class AgentUnreachableError(HibernodeError):
    """No agent answers on the Unix socket."""

    exit_code = 3
    default_reason = "AgentUnreachable"


class RefusedError(HibernodeError):
    """Refused before anything was touched: preflight, compatibility, policy or a hostile input."""

    exit_code = 4
    default_reason = "Refused"


class BusyError(RefusedError):
    """Somebody else holds the lock on this id or on the only slot."""

    default_reason = "Busy"


class StuckError(RefusedError):
    """A container's files do not answer, so that nothing is begun that needs them."""

    default_reason = "ContainerStuck"


class StorageError(HibernodeError):
    """Input or output failed: no space, no permission, a vanished directory."""

    exit_code = 5
    default_reason = "StorageFailed"


class IntegrityError(StorageError):
    """An artifact is not whole; the file is named."""

    default_reason = "ArtifactCorrupt"


class UnavailableError(HibernodeError):
    """What keeps the answer cannot be asked now; the same question may succeed later."""

    exit_code = 5
    default_reason = "Unavailable"


class InvalidArgumentError(UsageError):
    """A field of a request is not acceptable; the same request never will be."""

    default_reason = "InvalidArgument"


class ConflictError(HibernodeError):
    """What should have been changed is no longer what the caller saw."""

    default_reason = "Conflict"


class TooLargeError(RefusedError):
    """More than the place that would keep it can hold; nothing was written."""

    default_reason = "TooLarge"
