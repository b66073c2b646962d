"""The init of a container that a worker is restored into: told about the worker, or made to end as it ended.

Like the shim: standard library only, nothing of ours, so its own few system calls are here too. An init of
ours is the static program of ``data/placeholder.c``, which listens. Any other (``sleep infinity``) neither
reaps nor ends when the worker does, and is made to call exit_group(2).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import select
import signal
import struct
import threading
import time
from typing import Final, NamedTuple

ADOPT_SIGNAL: Final = 40
COMM: Final = "hibernode-ph"
"""What ``data/placeholder.c`` listens for, and the name it gives itself."""

FAILED: Final = 0
"""The message "nothing was restored: start cold"; a positive one is the worker's pid in its namespace."""

MAX_CODE: Final = 255
END_SECONDS: Final = 2.0
POLL_SECONDS: Final = 0.002
MAX_STATUS_BYTES: Final = 16384
MAX_THREADS: Final = 64
"""How many threads are tried when the first one of a process has ended alone."""

# linux/ptrace.h, linux/elf.h, linux/auxvec.h, linux/wait.h
PTRACE_SYSCALL: Final = 24
PTRACE_GETREGSET: Final = 0x4204
PTRACE_SETREGSET: Final = 0x4205
PTRACE_SEIZE: Final = 0x4206
PTRACE_INTERRUPT: Final = 0x4207
PTRACE_O_TRACESYSGOOD: Final = 1
SYSCALL_STOP: Final = signal.SIGTRAP | 0x80
NT_PRSTATUS: Final = 1
AT_SYSINFO_EHDR: Final = 33
WAIT_ALL: Final = 0x40000000

# asm-generic/unistd.h and asm-generic/siginfo.h
SYS_PIDFD_SEND_SIGNAL: Final = 424
SYS_PIDFD_OPEN: Final = 434
SI_QUEUE: Final = -1

# linux/pidfd.h of 6.15: PIDFD_GET_INFO with struct pidfd_info in its first form, of 64 bytes
PIDFD_GET_INFO: Final = 0xC040FF0B
PIDFD_INFO_EXIT: Final = 1 << 3
PIDFD_INFO: Final = struct.Struct("=Q52xi")

VDSO_BYTES: Final = 8192
AUXV_BYTES: Final = 8192
MAX_ADDRESS: Final = 1 << 63

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.restype = ctypes.c_long
_libc.syscall.restype = ctypes.c_long


class _Arch(NamedTuple):
    """Where the registers of a 64-bit process are in NT_PRSTATUS, and how it calls the kernel.

    ``entry`` is the register that says which call was interrupted, if there is one; ``segment`` is one with
    its value in 64-bit mode. ``instruction`` is aligned to ``align`` bytes.
    """

    registers: int
    pc: int
    number: int
    argument: int
    exit_group: int
    instruction: bytes
    align: int
    entry: int | None = None
    segment: tuple[int, int] | None = None


# struct user_regs_struct of asm/user_64.h; struct user_pt_regs of arm64's asm/ptrace.h
_ARCHITECTURES: Final = {
    "x86_64": _Arch(27, 16, 10, 14, 231, b"\x0f\x05", 1, entry=15, segment=(17, 0x33)),
    "aarch64": _Arch(34, 32, 8, 0, 94, b"\x01\x00\x00\xd4", 4),
}


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class _CannotError(Exception):
    """Why a process cannot be made to call exit_group."""


def recognise(pid: int) -> bool:
    """Whether ``pid`` is a placeholder that listens by now.

    Another program can look the same. It gets the message then, which a process that has all signals blocked
    can ignore, and its container ends as it likes; that it could have had without looking the same.
    """
    try:
        text = _read(f"/proc/{pid}/status", MAX_STATUS_BYTES).decode(errors="replace")
        fields = dict(line.partition(":\t")[::2] for line in text.splitlines())
        blocked = int(fields["SigBlk"], 16)
    except (OSError, KeyError, ValueError):
        return False
    return fields.get("Name") == COMM and bool(blocked >> (ADOPT_SIGNAL - 1) & 1)


def tell(pidfd: int, value: int) -> None:
    """Tell the placeholder its worker's pid (as seen in its own pid namespace), or ``FAILED``.

    Only to one that :func:`recognise` knows: the signal ends other programs.

    :raises ProcessLookupError: it has been reaped.
    """
    # siginfo_t of 128 bytes: si_signo, si_errno, si_code, then si_pid, si_uid, si_value. The kernel sets
    # si_pid to 0 for a receiver in an inner pid namespace; elsewhere it is taken as it stands here.
    info = struct.pack("=iii4xiIq", ADOPT_SIGNAL, 0, SI_QUEUE, 0, os.getuid(), value).ljust(128, b"\0")
    _pidfd_signal(pidfd, ADOPT_SIGNAL, info)


def exit_status(pid: int, pidfd: int) -> int | None:
    """Return the wait status of a process that has ended; None if it runs, or if nobody knows (any more).

    First source is field 52 of /proc/PID/stat, while it is a zombie; then the pidfd, which remembers from
    Linux 6.15 on if it was opened before the end.
    """
    if not _ended(pidfd, 0):
        return None
    with contextlib.suppress(OSError, IndexError, ValueError):
        fields = _read(f"/proc/{pid}/stat", MAX_STATUS_BYTES).rpartition(b")")[2].split()
        status = int(fields[49])
        # Whoever may not trace it reads a 0; the same right is asked for by this link.
        os.readlink(f"/proc/{pid}/ns/user")  # noqa: PTH115 - pathlib costs the shim 10 ms of start-up
        _pidfd_signal(pidfd, 0)  # not reaped: so it was its stat that we read, not that of a later process
        return status
    with contextlib.suppress(OSError):
        request = PIDFD_INFO.pack(PIDFD_INFO_EXIT, 0)
        mask, status = PIDFD_INFO.unpack(fcntl.ioctl(pidfd, PIDFD_GET_INFO, request))
        if mask & PIDFD_INFO_EXIT:
            return int(status)
    return None


def end_with(pid: int, code: int, pidfd: int | None = None) -> str:
    """End process ``pid``, no child of ours, with exit code ``code`` (0 to 255), or with SIGKILL.

    With ``pidfd`` it must be the process behind it. Returns "" if it has ended with the code, else why it had
    to be killed, in one sentence. Takes some seconds at most: a process in the D state, or the init of a pid
    namespace with processes that somebody outside does not reap, may end later.

    :raises ProcessLookupError: there is no such process.
    """
    if not 0 <= code <= MAX_CODE:
        raise ValueError(f"{code} is no exit code")
    held = _pidfd_open(pid) if pidfd is None else os.dup(pidfd)
    try:
        if _ended(held, 0):
            return f"pid {pid} had ended already"
        # A tracer cannot let go of what is not stopped. The end of its thread lets go of everything, so that
        # also the parent of an init that ends later has the news of it.
        answer: list[str] = []
        tracer = threading.Thread(target=lambda: answer.append(_trace(pid, held, code)))
        tracer.start()
        tracer.join()
        problem = answer[0]
        if problem and not _ended(held, END_SECONDS):
            problem += f"; SIGKILL did not end it in {END_SECONDS:g} s"
        return problem
    finally:
        os.close(held)


def _trace(pid: int, pidfd: int, code: int) -> str:
    """Make it call exit_group, or kill it and return why."""
    try:
        _exit_traced(_seize(pid, pidfd), code)
    except (_CannotError, OSError) as error:
        # Here, where it is still traced: it is not to run on with the registers that we have set.
        with contextlib.suppress(ProcessLookupError):
            _pidfd_signal(pidfd, signal.SIGKILL)
        return f"pid {pid} was killed: {error.strerror if isinstance(error, OSError) else error}"
    return ""


def _exit_traced(tid: int, code: int) -> None:
    arch = _ARCHITECTURES.get(os.uname().machine)
    if arch is None:
        raise _CannotError(f"no way is known on {os.uname().machine}")
    _ptrace(PTRACE_INTERRUPT, tid)
    deadline = time.monotonic() + END_SECONDS
    prepared = entered = False
    while True:
        status = _next_stop(tid, deadline)
        if not os.WIFSTOPPED(status):
            if status != code << 8:
                raise _CannotError(f"it ended by itself, exit code {os.waitstatus_to_exitcode(status)}")
            return
        if not prepared:
            _prepare(tid, arch, code)
            prepared = True
        elif os.WSTOPSIG(status) == SYSCALL_STOP:
            if entered:
                raise _CannotError("exit_group came back, a seccomp filter forbids it")
            entered = True
        # Signals that come in between are dropped.
        _ptrace(PTRACE_SYSCALL, tid)


def _seize(pid: int, pidfd: int) -> int:
    """Begin to trace one living thread of the process behind ``pidfd``; any of them can end them all."""
    tids = [pid, *(int(name) for name in os.listdir(f"/proc/{pid}/task") if int(name) != pid)]  # noqa: PTH208
    for tid in tids[:MAX_THREADS]:
        try:
            _ptrace(PTRACE_SEIZE, tid, 0, PTRACE_O_TRACESYSGOOD)
        except OSError as error:
            failure = error
            continue
        _check_thread(pid, tid, pidfd)
        return tid
    raise failure


def _check_thread(pid: int, tid: int, pidfd: int) -> None:
    """See that ``tid``, which is traced, is of the process behind ``pidfd``, not a later task of that id.

    From now on it keeps its id, for its tracer has to reap it. Whoever else it is, he is let go with our
    thread, and unharmed: nothing has stopped him yet.

    :raises _CannotError, ProcessLookupError: it is another's.
    """
    if not os.path.lexists(f"/proc/{pid}/task/{tid}"):
        raise _CannotError(f"its thread {tid} ended, and the number is another's")
    _pidfd_signal(pidfd, 0)  # not reaped, so that the pid is still its


def _next_stop(tid: int, deadline: float) -> int:
    while True:
        try:
            found, status = os.waitpid(tid, os.WNOHANG | WAIT_ALL)
        except ChildProcessError:
            raise _CannotError("it ended without telling how") from None
        if found:
            return status
        if time.monotonic() > deadline:
            raise _CannotError(f"it did not stop and end in {END_SECONDS:g} s")
        time.sleep(POLL_SECONDS)


def _prepare(tid: int, arch: _Arch, code: int) -> None:
    """Set a stopped thread's registers so that it calls exit_group(code) next, in the place of all else."""
    # Room for more: a 32-bit process gives fewer bytes, and that is how it is known.
    registers = (ctypes.c_uint64 * (arch.registers + 8))()
    area = _Iovec(ctypes.addressof(registers), ctypes.sizeof(registers))
    _ptrace(PTRACE_GETREGSET, tid, NT_PRSTATUS, ctypes.addressof(area))
    wide = area.length == arch.registers * 8
    if not wide or (arch.segment and registers[arch.segment[0]] != arch.segment[1]):
        raise _CannotError("it is no 64-bit process")
    registers[arch.pc] = _find_instruction(tid, arch, registers[arch.pc])
    registers[arch.number] = arch.exit_group
    registers[arch.argument] = code
    if arch.entry is not None:
        registers[arch.entry] = (1 << 64) - 1  # no call was interrupted, so none is taken up again
    _ptrace(PTRACE_SETREGSET, tid, NT_PRSTATUS, ctypes.addressof(area))


def _find_instruction(tid: int, arch: _Arch, pc: int) -> int:
    """Find a system call instruction: in the vdso, which every process has, else the one just executed.

    The vdso is first because it is always in memory, and because arm64 takes an interrupted call up again
    when the thread goes on exactly where that call is.
    """
    auxv = _read(f"/proc/{tid}/auxv", AUXV_BYTES)
    whole = len(auxv) // 16 * 16
    vdso = dict(struct.iter_unpack("=QQ", auxv[:whole])).get(AT_SYSINFO_EHDR, 0)
    size = len(arch.instruction)
    fd = os.open(f"/proc/{tid}/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        for start, length in ((vdso, VDSO_BYTES), (pc - size, size)):
            code = b""
            if 0 < start < MAX_ADDRESS:
                with contextlib.suppress(OSError):
                    code = os.pread(fd, length, start)
            at = code.find(arch.instruction)
            while at >= 0:
                if (start + at) % arch.align == 0:
                    return int(start + at)
                at = code.find(arch.instruction, at + 1)
    finally:
        os.close(fd)
    raise _CannotError("no system call instruction was found in it")


def _ended(pidfd: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def _read(path: str, limit: int) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, limit)
    finally:
        os.close(fd)


def _error(call: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}")


def _ptrace(request: int, tid: int, address: int = 0, data: int = 0) -> None:
    words = (ctypes.c_long(request), ctypes.c_int(tid), ctypes.c_void_p(address), ctypes.c_void_p(data))
    if _libc.ptrace(*words) != 0:
        raise _error("ptrace")


def _pidfd_open(pid: int) -> int:
    if not 0 < pid < 1 << 31:
        raise ProcessLookupError(errno.ESRCH, f"{pid} cannot be a process id")
    fd = _libc.syscall(ctypes.c_long(SYS_PIDFD_OPEN), ctypes.c_int(pid), ctypes.c_uint(0))
    if fd < 0:
        raise _error("pidfd_open")
    return int(fd)


def _pidfd_signal(pidfd: int, number: int, info: bytes | None = None) -> None:
    words = (ctypes.c_int(pidfd), ctypes.c_int(number), ctypes.c_char_p(info), ctypes.c_uint(0))
    if _libc.syscall(ctypes.c_long(SYS_PIDFD_SEND_SIGNAL), *words) != 0:
        raise _error("pidfd_send_signal")
