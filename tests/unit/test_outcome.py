"""From exceptions and CRIU's ends to errors with a reason and a remedy."""

from __future__ import annotations

import errno

import pytest

from hibernode.errors import DeadlineError, HibernodeError, RefusedError, StorageError
from hibernode.outcome import as_ours, criu_failed


def test_our_own_error_stays_as_it_is() -> None:
    """An error that has a reason already is passed on, the very object."""
    error = RefusedError("no", reason="Because")
    assert as_ours(error) is error


@pytest.mark.parametrize(
    ("error", "reason", "message", "has_remedy"),
    [
        pytest.param(
            OSError(errno.ENOSPC, "No space left on device", "/s/pages-1.img"),
            "NoSpace",
            "/s/pages-1.img: No space left on device",
            True,
            id="a full disk",
        ),
        pytest.param(
            OSError(errno.EDQUOT, "Disk quota exceeded"),
            "NoSpace",
            "Disk quota exceeded",
            True,
            id="a full quota",
        ),
        pytest.param(
            OSError(errno.EIO, "Input/output error"),
            "StorageFailed",
            "Input/output error",
            False,
            id="a broken disk",
        ),
        pytest.param(OSError("odd"), "StorageFailed", "odd", False, id="an OSError without a number"),
        pytest.param(
            TimeoutError(errno.ETIMEDOUT, "Connection timed out", "/nfs/store"),
            "StorageFailed",
            "/nfs/store: Connection timed out",
            False,
            id="a store on a network that is away",
        ),
        pytest.param(
            FileNotFoundError(errno.ENOENT, "No such file or directory", "/gone"),
            "StorageFailed",
            "/gone: No such file or directory",
            False,
            id="a vanished file",
        ),
    ],
)
def test_an_os_error_is_a_storage_failure(
    error: OSError, reason: str, message: str, has_remedy: bool
) -> None:
    """An OSError names its file, has exit code 5, and a remedy when the disk is full."""
    ours = as_ours(error)
    assert isinstance(ours, StorageError)
    assert (ours.reason, ours.message, ours.exit_code) == (reason, message, 5)
    assert bool(ours.remedy) == has_remedy


def test_a_deadline_without_a_sentence_of_its_own_is_no_storage_failure() -> None:
    """Python counts TimeoutError among the errors of the system; asyncio's has no number."""
    ours = as_ours(TimeoutError())
    assert isinstance(ours, DeadlineError)
    assert (ours.reason, ours.exit_code) == ("DeadlineExceeded", 1)
    assert ours.remedy


@pytest.mark.parametrize(
    "error",
    [ValueError("x"), KeyError("k"), RecursionError(), KeyboardInterrupt()],
    ids=lambda e: type(e).__name__,
)
def test_any_other_exception_is_a_fault_of_ours(error: BaseException) -> None:
    """What nobody foresaw is an InternalError that names the exception's type."""
    ours = as_ours(error)
    assert type(ours) is HibernodeError
    assert ours.reason == "InternalError"
    assert ours.message.startswith(f"{type(error).__name__}: ")
    assert ours.remedy


@pytest.mark.parametrize(
    ("operation", "setting"),
    [
        pytest.param("dump", "checkpoint.deadline_seconds", id="a dump"),
        pytest.param("restore", "restore.deadline_seconds", id="a restore"),
    ],
)
def test_a_criu_past_its_deadline_names_the_setting(operation: str, setting: str) -> None:
    """A deadline that fired is DeadlineExceeded, whatever the log says, and the remedy names its setting."""
    error = criu_failed(
        "Error (x.c:1): something", operation=operation, returncode=-9, timed_out=True, deadline=2.5, log="/l"
    )
    assert error.reason == "DeadlineExceeded"
    assert "2.5 s" in error.message
    assert f"criu {operation}" in error.message
    assert setting in error.remedy
    assert error.fields["log"] == "/l"


def test_a_known_cause_is_named() -> None:
    """A log line that is known gives its own reason and remedy, and the line itself."""
    line = "(00.010000) Error (criu/files-reg.c:2274): File usr/lib/x.so has bad size 10 (expect 20)"
    error = criu_failed(line + "\n", operation="restore", returncode=1, timed_out=False, deadline=1, log="/l")
    assert error.reason != "CriuFailed"
    assert error.remedy
    assert "/l" in error.message
    assert error.fields["line"]


@pytest.mark.parametrize(
    ("text", "returncode", "said"),
    [
        pytest.param("", 1, "(exit code 1): it printed nothing", id="nothing printed"),
        pytest.param("", 52, "(exit code 52): it printed nothing", id="an odd exit code"),
        pytest.param(
            "".join(f"(00.0{n}) Error (criu/odd.c:{n}): quite odd {n}\n" for n in range(1, 6)),
            1,
            "quite odd 5",
            id="errors that nobody knows",
        ),
    ],
)
def test_an_unknown_cause_shows_how_criu_ended(text: str, returncode: int, said: str) -> None:
    """Without a known cause the error has CRIU's end, its last lines, and where to read on."""
    error = criu_failed(
        text, operation="dump", returncode=returncode, timed_out=False, deadline=1, log="/var/l"
    )
    assert error.reason == "CriuFailed"
    assert said in error.message
    assert "hibernode explain /var/l" in error.remedy
    assert "odd 2" not in error.message


def test_a_killed_criu_is_said_to_be_killed() -> None:
    """A CRIU that a signal has ended has a reason of its own."""
    error = criu_failed("", operation="dump", returncode=-11, timed_out=False, deadline=1, log="/l")
    assert error.reason == "CriuKilled"
    assert error.remedy
