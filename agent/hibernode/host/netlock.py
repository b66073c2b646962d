"""What a CRIU that was killed leaves on TCP connections, and how to take it away.

While it dumps established connections CRIU drops their packets by an nftables table of its own, and puts
their sockets into repair mode, in which every recv(2) of the worker fails with EPERM. It undoes both at its
end; killed, it undoes neither, and the kernel lets the worker run that very instant. So before we kill a
CRIU the tree gets SIGSTOP (:func:`hold`), which takes effect when CRIU lets go of it; then the sockets leave
repair mode and the table goes (:func:`heal`), and only then is the tree continued.

A CRIU that others kill is healed too, but too late for a read that the worker was in; so that the kernel
does not pick it when memory runs out, :func:`spare` tells it not to.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
from collections.abc import Collection
from pathlib import Path
from typing import Final

from hibernode.host import linux, nftables, procfs

log = logging.getLogger("hibernode.netlock")

TCP_REPAIR: Final = 19
"""linux/tcp.h"""

OOM_NEVER: Final = "-1000"
"""linux/oom.h: OOM_SCORE_ADJ_MIN."""

LOG_HEAD_BYTES: Final = 64 << 10

_RUN_ID: Final = re.compile(rb"CRIU run id = ([0-9a-f-]{36})\n")
_TABLE_CHARS: Final = 31 - len("inet ")
"""CRIU prints family and name into 32 bytes (criu/netfilter.c), so the name is cut."""


def spare(pid: int) -> None:
    """Keep the kernel from picking this process when memory runs out."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/oom_score_adj").write_text(OOM_NEVER)


def hold(root_pid: int) -> None:
    """Stop the tree as soon as whoever traces it lets go; :func:`heal` continues it."""
    for stat in procfs.tree(root_pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(stat.pid, signal.SIGSTOP)


def heal(root_pid: int, dump_log: Path, *, stopped: Collection[int] = ()) -> int:
    """Let the tree's connections flow again after its CRIU has died; returns how many were in repair mode.

    ``dump_log`` is that CRIU's log; its head says what the table is called. The tree is continued, but for
    the pids ``stopped``, which were stopped before the dump.
    """
    tree = procfs.tree(root_pid)
    healed = sum(_heal_process(stat.pid) for stat in tree)
    table = table_of(dump_log)
    if table:
        try:
            nftables.delete_table(table)
        except FileNotFoundError:
            pass
        except OSError as error:
            log.error("nftables table inet %s is left by a killed criu: %s", table, error)  # noqa: TRY400
        else:
            log.warning("removed nftables table inet %s, which a killed criu had left", table)
    for stat in tree:
        # Always: a stop that is still on its way is taken back by this too.
        if stat.pid not in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(stat.pid, signal.SIGCONT)
    return healed


def _heal_process(pid: int) -> int:
    healed = 0
    try:
        with procfs.Process.open(pid) as process:
            for fd in procfs.fds(pid):
                if fd.target.startswith("socket:["):
                    with contextlib.suppress(OSError):
                        healed += _heal_socket(linux.pidfd_getfd(process.fileno(), fd.fd))
    except (ProcessLookupError, PermissionError) as error:
        log.warning("pid %d: its sockets cannot be looked at: %s", pid, error)
    return healed


def _heal_socket(fd: int) -> bool:
    with socket.socket(fileno=fd) as sock:
        if sock.type != socket.SOCK_STREAM or sock.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        if sock.getsockopt(socket.IPPROTO_TCP, TCP_REPAIR) != 1:
            return False
        sock.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, 0)
        return True


def table_of(dump_log: Path) -> str:
    """Read from the head of CRIU's log what its table is called; empty when it does not say."""
    try:
        with dump_log.open("rb") as file:
            match = _RUN_ID.search(file.read(LOG_HEAD_BYTES))
    except OSError:
        return ""
    return f"CRIU-{match[1].decode()}"[:_TABLE_CHARS] if match else ""
