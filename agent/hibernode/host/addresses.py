"""The addresses of a process's network namespace, from /proc: no socket of ours has to be in there."""

from __future__ import annotations

import ipaddress
import re
from typing import Final

from hibernode.host.procfs import read_bounded

MAX_BYTES: Final = 16 << 20
"""A node with host networking may have thousands of routes, each some lines of fib_trie."""

_LOCAL: Final = re.compile(r"\|-- (\d+\.\d+\.\d+\.\d+)\n(?:\s+/\d+ (?!host LOCAL).*\n)*?\s+/32 host LOCAL")
"""fib_trie lists an address and below it what is known of it; LOCAL: it is this machine's own."""


def addresses(pid: int) -> frozenset[str]:
    """List the IPv4 and IPv6 addresses that sockets of a process can be bound to, as text.

    :raises ProcessLookupError: it has ended.
    """
    found = set(_LOCAL.findall(_read(pid, "fib_trie")))
    for line in _read(pid, "if_inet6").splitlines():
        found.add(str(ipaddress.IPv6Address(bytes.fromhex(line.split()[0]))))
    return frozenset(found)


def _read(pid: int, name: str) -> str:
    try:
        return read_bounded(f"/proc/{pid}/net/{name}", MAX_BYTES).decode("ascii", "replace")
    except FileNotFoundError:  # a kernel without this kind of address
        return ""
