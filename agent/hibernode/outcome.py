"""From what went wrong to what is said: shared by the two pipelines."""

from __future__ import annotations

import errno
from typing import Final

from hibernode.criu import diagnose
from hibernode.errors import CriuError, DeadlineError, HibernodeError, RefusedError, StorageError

NO_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


def as_ours(error: BaseException) -> HibernodeError:
    """Turn any exception into one that carries a reason, a remedy and an exit code."""
    if isinstance(error, HibernodeError):
        return error
    if isinstance(error, ProcessLookupError):
        return worker_gone(f"the worker has ended: {error}")
    if isinstance(error, TimeoutError) and error.errno is None:  # an OSError, but no file's or disk's
        return DeadlineError(
            f"something took longer than it may{f': {error}' if str(error) else ''}",
            remedy="the machine or what is asked is slow or hangs; the log may say which",
        )
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        full = error.errno in NO_SPACE
        return StorageError(
            f"{where}{error.strerror or error}",
            remedy="make room ('hibernode gc'), or move the store to a larger disk" if full else "",
            reason="NoSpace" if full else "StorageFailed",
        )
    return HibernodeError(
        f"{type(error).__name__}: {error}",
        reason="InternalError",
        remedy="this is a fault of hibernode itself; its log has the traceback",
    )


def worker_gone(message: str) -> RefusedError:
    """Say that the worker ended before it could be frozen."""
    return RefusedError(
        message, remedy="the worker must stay alive until it reads the signal file", reason="WorkerGone"
    )


def criu_failed(
    text: str, *, operation: str, returncode: int, timed_out: bool, deadline: float, log: str
) -> CriuError:
    """Name the cause of a CRIU that failed, and where its log is kept.

    ``text`` is CRIU's log, or what it printed when there is none.
    """
    if timed_out:
        setting = "checkpoint.deadline_seconds" if operation == "dump" else "restore.deadline_seconds"
        return CriuError(
            f"criu {operation} gave no result within {deadline:g} s and was ended (log: {log})",
            remedy=f"raise {setting} if the machine is only slow; else read how the log ends",
            reason="DeadlineExceeded",
            log=log,
        )
    found = diagnose.diagnose(text, returncode, "dump" if operation == "dump" else "restore")
    if found.causes:
        first = found.causes[0]
        return CriuError(
            f"criu {operation} failed: {first.message} (log: {log})",
            remedy=first.remedy,
            reason=first.reason,
            log=log,
            line=first.line,
        )
    how = f"signal {-returncode}" if returncode < 0 else f"exit code {returncode}"
    lines = "; ".join(found.raw[-3:]) or "it printed nothing"
    return CriuError(
        f"criu {operation} failed ({how}): {lines} (log: {log})",
        remedy=f"'hibernode explain {log}' shows the error lines",
        log=log,
    )
