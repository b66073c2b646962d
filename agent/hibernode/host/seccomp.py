"""Seccomp: a profile put on through libseccomp, and what the kernel says is on.

CRIU cannot checkpoint io_uring; the profile that ships with the package denies its three calls and nothing
else.
"""

from __future__ import annotations

import ctypes
import enum
import errno
import logging
import os
import signal
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

from hibernode.errors import HibernodeError, NotFoundError, RefusedError
from hibernode.host import procfs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hibernode.host.seccomp_profile import Condition, Profile

# enum scmp_filter_attr of libseccomp's seccomp.h.in.
_ATTR_NO_NEW_PRIVS: Final = 3
_ATTR_TSYNC: Final = 4
_ATTR_RAW_RETURN_CODES: Final = 9
_UNKNOWN_SYSCALL: Final = -1  # __NR_SCMP_ERROR
_IO_URING: Final = "anon_inode:[io_uring]"

_log: Final = logging.getLogger("hibernode.seccomp")


class _ArgumentComparison(ctypes.Structure):
    """``struct scmp_arg_cmp``."""

    _fields_ = (
        ("arg", ctypes.c_uint),
        ("op", ctypes.c_int),
        ("datum_a", ctypes.c_uint64),
        ("datum_b", ctypes.c_uint64),
    )


@cache
def _libseccomp() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libseccomp.so.2")
    except OSError as error:
        raise NotFoundError(
            f"libseccomp cannot be loaded: {error}",
            remedy="apt-get install libseccomp2",
            reason="NoLibseccomp",
        ) from error
    pointer, word, integer = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int
    for name, result, arguments in (
        ("seccomp_init", pointer, (word,)),
        ("seccomp_release", None, (pointer,)),
        ("seccomp_arch_resolve_name", word, (ctypes.c_char_p,)),
        ("seccomp_arch_add", integer, (pointer, word)),
        ("seccomp_attr_set", integer, (pointer, integer, word)),
        ("seccomp_syscall_resolve_name", integer, (ctypes.c_char_p,)),
        (
            "seccomp_rule_add_array",
            integer,
            (pointer, word, integer, ctypes.c_uint, ctypes.POINTER(_ArgumentComparison)),
        ),
        ("seccomp_load", integer, (pointer,)),
    ):
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    return library


def _check(code: int, what: str) -> None:
    """Turn libseccomp's negative error number into a sentence."""
    if code in (-errno.EACCES, -errno.EPERM):
        raise RefusedError(
            f"{what}: {os.strerror(-code)}",
            remedy="without CAP_SYS_ADMIN a filter goes on only together with no_new_privs",
            reason="SeccompRefused",
        )
    if code < 0:
        raise HibernodeError(
            f"{what}: {os.strerror(-code)}",
            remedy="a kernel with CONFIG_SECCOMP_FILTER and libseccomp >= 2.4 are needed",
            reason="SeccompFailed",
        )


def apply(profile: Profile, *, no_new_privs: bool = True) -> tuple[str, ...]:
    """Put the profile on every thread of this process, for good; children inherit it.

    Returns the names of syscalls that this libseccomp does not know; they are left out, as container
    runtimes do. Rules that say what the default says already are left out too (libseccomp refuses them).

    :raises NotFoundError: there is no libseccomp.
    :raises HibernodeError: libseccomp or the kernel refuses the filter; nothing is on then.
    """
    library = _libseccomp()
    filter_ = library.seccomp_init(profile.default_action)
    if not filter_:
        raise HibernodeError("libseccomp cannot make a filter", reason="SeccompFailed")
    try:
        # Optional (libseccomp 2.5): the kernel's own error number instead of ECANCELED.
        library.seccomp_attr_set(filter_, _ATTR_RAW_RETURN_CODES, 1)
        _check(library.seccomp_attr_set(filter_, _ATTR_NO_NEW_PRIVS, int(no_new_privs)), "no_new_privs")
        for attribute in {_ATTR_TSYNC, *profile.flags}:
            _check(library.seccomp_attr_set(filter_, attribute, 1), f"filter attribute {attribute}")
        for name in profile.architectures:
            token = library.seccomp_arch_resolve_name(name.removeprefix("SCMP_ARCH_").lower().encode())
            code = library.seccomp_arch_add(filter_, token) if token else -errno.EINVAL
            if code != -errno.EEXIST:  # the machine's own is there from the start
                _check(code, f"architecture {name}")
        unknown = _add_rules(library, filter_, profile)
        _check(library.seccomp_load(filter_), "loading the seccomp filter")
    finally:
        library.seccomp_release(filter_)
    return unknown


def _add_rules(library: ctypes.CDLL, filter_: int, profile: Profile) -> tuple[str, ...]:
    unknown: list[str] = []
    for rule in profile.rules:
        if rule.action == profile.default_action:
            continue
        for name in rule.names:
            number = library.seccomp_syscall_resolve_name(name.encode())
            if number == _UNKNOWN_SYSCALL:
                unknown.append(name)
                continue
            for conditions in _alternatives(rule.conditions):
                array = (_ArgumentComparison * len(conditions))(
                    *(_ArgumentComparison(c.index, c.op, c.value, c.value_two) for c in conditions)
                )
                code = library.seccomp_rule_add_array(filter_, rule.action, number, len(conditions), array)
                _check(code, f"rule for {name}")
    return tuple(unknown)


def _alternatives(conditions: tuple[Condition, ...]) -> list[tuple[Condition, ...]]:
    """Conditions on different arguments must all hold; two on the same argument mean either, as in runc."""
    if len({condition.index for condition in conditions}) == len(conditions):
        return [conditions]
    return [(condition,) for condition in conditions]


def exec_under(profile: Profile, argv: Sequence[str], *, no_new_privs: bool = True) -> NoReturn:
    """Put the profile on and become ``argv``: same pid, and the exit code is the program's.

    The program finds the signals and the environment as they were before Python started.

    :raises OSError: ``argv[0]`` cannot be run; this process is under the profile by then.
    """
    environment = dict(os.environb)
    if b"\0LC_CTYPE=" not in b"\0" + Path("/proc/self/environ").read_bytes():
        environment.pop(b"LC_CTYPE", None)  # Python sets it when it starts in the C locale (PEP 538)
    unknown = apply(profile, no_new_privs=no_new_privs)
    if unknown:
        _log.warning("left out, since this libseccomp does not know them: %s", ", ".join(unknown))
    # Python ignores these two, and an ignored signal stays ignored across exec.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    os.execvpe(argv[0], list(argv), environment)  # noqa: S606 - the program is what the caller wants to become


class Mode(enum.IntEnum):
    """``Seccomp:`` in ``/proc/PID/status``."""

    NONE = 0
    STRICT = 1
    FILTER = 2


@dataclass(frozen=True, slots=True)
class ProcessState:
    """A process: its tasks' modes by tid, and where it holds io_uring (``fd 5``, ``mapping 7f..-7f..``)."""

    pid: int
    comm: str
    modes: Mapping[int, Mode]
    io_uring: tuple[str, ...]

    @property
    def unfiltered(self) -> tuple[int, ...]:
        """The tasks that no filter is on."""
        return tuple(tid for tid, mode in self.modes.items() if mode is Mode.NONE)


def seccomp_state(pid: int) -> dict[int, Mode]:
    """Tell the seccomp mode of every task of ``pid``; tasks that end meanwhile are left out.

    :raises ProcessLookupError: there is no such process.
    """
    modes: dict[int, Mode] = {}
    for tid in procfs.threads(pid):
        try:
            modes[tid] = Mode(procfs.read_status(tid).seccomp_mode)
        except ProcessLookupError:
            continue
    return modes


def tree_state(root_pid: int) -> list[ProcessState]:
    """Tell the same of the whole tree below ``root_pid``, and where it holds io_uring.

    A ring is found by its descriptor and by its mapping, which outlives the descriptor. Zombies and
    processes that end meanwhile are left out.

    :raises ProcessLookupError: there is no such process.
    """
    found: list[ProcessState] = []
    for process in procfs.tree(root_pid):
        if process.state in "ZX":
            continue
        try:
            rings = [f"fd {fd.fd}" for fd in procfs.fds(process.pid) if fd.target == _IO_URING]
            rings += [
                f"mapping {m.start:x}-{m.end:x}" for m in procfs.maps(process.pid) if m.path == _IO_URING
            ]
            modes = seccomp_state(process.pid)
        except ProcessLookupError:
            continue
        found.append(ProcessState(process.pid, process.comm, modes, tuple(rings)))
    if not found:
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH), str(root_pid))
    return found
