"""Who calls, and what they may change.

A caller is known by a *key* that it cannot choose: the uid of its pod, the cgroup of its container, or its
user id on the node, told from the kernel's credentials of a Unix socket; on TCP the pod that a token is bound
to, or only that it came from this machine. A record belongs to the key that published it: nobody else may
publish over it or change its status, but root of the node may.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import ipaddress
import os
import select
import socket
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Final, Protocol

from hibernode.discovery.container_look import pid_namespace
from hibernode.discovery.container_ref import ContainerRef, container_ref, parse_path
from hibernode.errors import RefusedError
from hibernode.host import cgroups, linux
from hibernode.host.procfs import read_stat
from hibernode.listen import peer
from hibernode.metadata.records import NOBODY, PodRef, SourceInstance
from hibernode.workload import ProcessKey

SO_PEERPIDFD: Final = 77
"""<asm-generic/socket.h>, since Linux 6.5; Python has no name for it yet."""

LOOPBACK: Final = "loopback"
ROOT: Final = "uid:0"
MAX_CLAIMS: Final = 65_536
TOKEN_SECONDS: Final = 60.0
"""How long a token's review is believed; the stock client reads its file again as often."""

DENIED_SECONDS: Final = 5.0
"""How long one that was no good is not asked about again: the API server may not know its pod yet."""

MAX_TOKENS: Final = 4096
MAX_TOKEN: Final = 16 << 10
"""Bytes of a token; Kubernetes' have about one KiB."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who is at the other end.

    ``key`` is what its records belong to. ``pod_uid`` is empty outside of pods. ``address`` is its IP address
    where it came by TCP. ``pod`` is its pod with name and namespace, where a token tells. ``process`` is the
    one that connected the Unix socket: when it ends, so has the worker.
    """

    key: str
    pod_uid: str = ""
    address: str = ""
    pod: PodRef | None = None
    process: ProcessKey | None = None

    @property
    def on_node(self) -> bool:
        """Whether it is known to be on this machine."""
        return not self.address or is_loopback(self.address)


@dataclass(frozen=True, slots=True)
class Reviewed:
    """What the API server says of a token: whose account, and the pod it is bound to, if it is."""

    user: str
    pod: PodRef | None


class Reviewer(Protocol):
    """Asks whether a bearer token is good."""

    async def review(self, token: str) -> Reviewed | None:
        """Return whose it is; None if it is not good.

        :raises UnavailableError: nobody can say now.
        """


def is_loopback(address: str) -> bool:
    """Tell whether an IP address is this machine's own inner one."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = getattr(found, "ipv4_mapped", None)
    return bool((mapped or found).is_loopback)


# by what the kernel says --------------------------------------------------------------------------------


def by_credentials(sock: socket.socket) -> Caller:
    """Identify the process that connected a Unix socket.

    :raises RefusedError: it has gone, or lives where the agent cannot see it.
    """
    pid, uid = peer(sock)
    if pid <= 0:
        raise RefusedError(
            "the caller has no process id here: its pid namespace is not below the agent's",
            remedy="run the agent with hostPID",
            reason="PeerUnknown",
        )
    fd = _hold(sock, pid)
    try:
        key, pod_uid = _place(pid, uid)
        process = read_stat(pid).key
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        if poll.poll(0):  # it lives now, so the pid was its own while /proc was read
            raise _gone(pid)
    except (OSError, ValueError):
        raise _gone(pid) from None
    finally:
        os.close(fd)
    return Caller(key, pod_uid, process=process)


def _hold(sock: socket.socket, pid: int) -> int:
    """Return a pidfd of the process that connected."""
    try:
        return sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:
            raise _gone(pid) from None
    try:  # before Linux 6.5 the pid may have become another process's since it connected
        return linux.pidfd_open(pid)
    except OSError:
        raise _gone(pid) from None


def _gone(pid: int) -> RefusedError:
    return RefusedError(f"process {pid}, which called, has ended", reason="PeerGone")


def _place(pid: int, uid: int) -> tuple[str, str]:
    """Tell the key of a process, and the uid of its pod."""
    ref = outermost(
        (each.path for each in cgroups.memberships(pid)),
        (each.path for each in cgroups.memberships(os.getpid())),
    )
    if ref.pod_uid:
        return ref.pod_uid, ref.pod_uid
    if ref.known or pid_namespace(pid) != pid_namespace():
        return container_key(ref), ""
    return f"uid:{uid}", ""


def outermost(paths: Iterable[str], own: Iterable[str] = ()) -> ContainerRef:
    """Tell the container from cgroups as the node's runtime made them.

    A process that may make cgroups inside its own can give them names of other containers, so only the first
    container below those around the agent itself counts.
    """
    depth = len(container_ref(own).within)
    ref = container_ref(paths)
    while len(ref.within) > depth:
        ref = parse_path(str(PurePosixPath(ref.cgroup).parent))
    return ref


def container_key(ref: ContainerRef) -> str:
    """Name a container that is in no pod by its cgroup: nobody can choose where that begins."""
    digest = hashlib.sha256(ref.cgroup.encode(errors="surrogateescape")).hexdigest()[:16]
    return f"container:{ref.id[:64] if ref.known else ''}:{digest}"


def by_address(sock: socket.socket) -> Caller:
    """Identify a TCP peer as far as can be: by where it comes from."""
    address = str(sock.getpeername()[0]).partition("%")[0]
    return Caller(LOOPBACK if is_loopback(address) else f"address:{address}", address=address)


# what they may do ---------------------------------------------------------------------------------------


class Gate:
    """Decides what callers may do.

    :param reviewer: asks about tokens; without one TCP is for this machine only.
    :param accounts: user names that tokens must be of; empty: all that the API server knows.
    :param keep_names: whether the backend can keep an owner that is no pod.
    """

    def __init__(
        self, reviewer: Reviewer | None = None, *, accounts: Iterable[str] = (), keep_names: bool = False
    ) -> None:
        self._reviewer, self._accounts, self._keep_names = reviewer, frozenset(accounts), keep_names
        self._tokens: OrderedDict[str, tuple[float, Reviewed | None]] = OrderedDict()
        self._asking: dict[str, asyncio.Future[Reviewed | None]] = {}
        self._claims: OrderedDict[tuple[str, str], Caller] = OrderedDict()

    async def admit(self, caller: Caller, authorization: str) -> Caller | None:
        """Let a caller in, or return None: it has to bring a good token.

        :raises UnavailableError: the token cannot be checked now.
        :raises RefusedError: the account is not among those allowed.
        """
        if not caller.address:
            return caller
        if self._reviewer is None:
            return caller if caller.on_node else None
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer" or not token or len(token) > MAX_TOKEN:
            return None
        found = await self._review(self._reviewer, token)
        if found is None:
            return None
        if self._accounts and found.user not in self._accounts:
            raise RefusedError(
                f"{found.user[:200]} may not use this service",
                remedy="name the account in metadata.accounts",
                reason="AccountRefused",
            )
        pod = found.pod
        return replace(
            caller, key=pod.uid if pod else f"user:{found.user}", pod=pod, pod_uid=pod.uid if pod else ""
        )

    async def _review(self, reviewer: Reviewer, token: str) -> Reviewed | None:
        key = hashlib.sha256(token.encode(errors="replace")).hexdigest()  # no token is kept
        known = self._tokens.get(key)
        if known is not None and time.monotonic() < known[0]:
            return known[1]
        asking = self._asking.get(key)
        if asking is None:
            asking = self._asking[key] = asyncio.ensure_future(reviewer.review(token))
            asking.add_done_callback(lambda done: self._reviewed(key, done))
        return await asyncio.shield(asking)

    def _reviewed(self, key: str, done: asyncio.Future[Reviewed | None]) -> None:
        """Keep an answer in the same turn in which it is no longer asked for: who comes next finds it."""
        self._asking.pop(key, None)
        if done.cancelled() or done.exception() is not None:
            return
        seconds = DENIED_SECONDS if done.result() is None else TOKEN_SECONDS
        self._tokens[key] = (time.monotonic() + seconds, done.result())
        self._tokens.move_to_end(key)
        while len(self._tokens) > MAX_TOKENS:
            self._tokens.popitem(last=False)

    def owner(self, caller: Caller, asked: PodRef) -> PodRef | None:
        """Decide whose a publication is that names the pod ``asked`` (any part may be empty).

        :raises RefusedError: ``WrongPod``: it names a pod that the caller has not proved to be.
        """
        if asked.uid and asked.uid != caller.pod_uid:
            raise _wrong_pod(
                f"the caller is {_shown(caller.key)} and cannot publish for pod {_shown(asked.uid)}"
            )
        if caller.pod is not None:
            return caller.pod
        if asked.uid and asked.name and asked.namespace:
            return asked
        return PodRef(NOBODY, caller.key, NOBODY) if caller.pod_uid or self._keep_names else None

    def check(self, caller: Caller, standing: SourceInstance | None, key: tuple[str, str]) -> None:
        """Refuse a change of another's record.

        A record of which nobody knows whose it is belongs to who asks first: another server wrote it, or this
        agent before it restarted, in a cluster where the worker did not tell its pod's name.

        :raises RefusedError: ``WrongPod``.
        """
        owner = self.owner_key(standing, key)
        if standing is not None and owner not in ("", caller.key) and caller.key != ROOT:
            raise _wrong_pod(
                f"the record {key[1]} belongs to {_shown(owner)}, the caller is {_shown(caller.key)}"
            )

    def claim(self, caller: Caller, key: tuple[str, str]) -> None:
        """Remember who published a record."""
        self._claims[key] = caller
        self._claims.move_to_end(key)
        while len(self._claims) > MAX_CLAIMS:
            self._claims.popitem(last=False)

    def owner_key(self, standing: SourceInstance | None, key: tuple[str, str]) -> str:
        """Return whose a record is; empty when nobody knows."""
        if standing is not None and standing.owner is not None:
            return standing.owner.uid
        claimed = self._claims.get(key)
        return claimed.key if claimed else ""

    def publisher(self, key: tuple[str, str]) -> Caller | None:
        """Return who published a record, if that was since this agent started."""
        return self._claims.get(key)


def _shown(text: str) -> str:
    return repr(text[:100])


def _wrong_pod(text: str) -> RefusedError:
    return RefusedError(
        text,
        remedy="publish from the pod by the Unix socket, or by TCP with a token that is bound to the pod",
        reason="WrongPod",
    )
