"""Which records are of this node: a worker beside the caller is better than one across the network."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from hibernode.discovery.container_look import look
from hibernode.host.addresses import addresses
from hibernode.metadata.access import LOOPBACK, container_key, is_loopback
from hibernode.metadata.records import SourceInstance

REFRESH_SECONDS: Final = 5.0
"""Age at which what is known of the node is looked up again; a look at /proc costs some 20 ms."""


@dataclass(frozen=True, slots=True)
class Node:
    """What is known of this node.

    ``addresses`` are its own; ``pods`` has the addresses of each pod and container on it, by the key that
    their records belong to (see :mod:`hibernode.metadata.access`).
    """

    name: str
    addresses: frozenset[str] = frozenset()
    pods: Mapping[str, frozenset[str]] = field(default_factory=dict)


class Places(Protocol):
    """Tells what is on this node."""

    async def node(self) -> Node:
        """Return what is known, not older than some seconds. Raises nothing: an old answer is an answer."""


class LocalPlaces:
    """Without a cluster: what the cgroups and network namespaces of this machine's containers tell."""

    def __init__(self, name: str) -> None:
        self._node, self._at = Node(name), 0.0
        self._looking: asyncio.Task[Node] | None = None

    async def node(self) -> Node:
        """Return what is known; only the first look is waited for."""
        if self._looking is None and (not self._at or time.monotonic() > self._at + REFRESH_SECONDS):
            self._looking = asyncio.create_task(asyncio.to_thread(survey, self._node.name))
            self._looking.add_done_callback(self._seen)
        if not self._at and self._looking is not None:
            with contextlib.suppress(OSError):
                await asyncio.shield(self._looking)
        return self._node

    def _seen(self, task: asyncio.Task[Node]) -> None:
        self._looking, self._at = None, time.monotonic()
        if not task.cancelled() and task.exception() is None:
            self._node = task.result()


def survey(name: str) -> Node:
    """Look at every container of this machine."""
    own = addresses(os.getpid())
    ours, pods = _network(os.getpid()), dict[str, frozenset[str]]()
    for container in look().containers:
        with contextlib.suppress(OSError):  # it ends meanwhile
            shared = _network(container.pid) == ours
            # The loopback of another network namespace is not the one that we would reach.
            found = (
                own
                if shared
                else frozenset(each for each in addresses(container.pid) if not is_loopback(each))
            )
            key = container.ref.pod_uid or container_key(container.ref)
            pods[key] = pods.get(key, frozenset()) | found
    return Node(name, own, pods)


def _network(pid: int) -> str:
    return os.readlink(f"/proc/{pid}/ns/net")  # noqa: PTH115 - a text, no path


def split_endpoint(endpoint: str) -> tuple[str, int] | None:
    """Take ``address:port`` apart; None unless it is an IP address and a port."""
    host, _, port = endpoint.removeprefix("http://").rpartition(":")
    try:
        number = int(port) if port.isascii() and port.isdigit() and len(port) < 6 else 0  # noqa: PLR2004
        address = str(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        return None
    return (address, number) if 0 < number < 1 << 16 else None


def is_local(one: SourceInstance, node: Node) -> bool:
    """Tell whether a record's worker is on this node: by its pod, its address, or the host that it names."""
    if one.owner is not None and one.owner.uid in node.pods:
        return True
    for endpoint in (one.worker_grpc_endpoint, one.metadata_endpoint):
        found = split_endpoint(endpoint)
        if found is not None and not is_loopback(found[0]):
            here = found[0] in node.addresses or any(found[0] in each for each in node.pods.values())
            if here:
                return True
    return bool(node.name) and one.topology.get("host") == node.name


def reachable(owner: str, address: str, node: Node) -> bool:
    """Tell whether an address is one that the owner of a record can listen at: we connect to no other."""
    inside = node.pods.get(owner)
    if inside is None:
        inside = node.addresses if owner in ("", LOOPBACK) or owner.startswith("uid:") else frozenset()
    return address in inside


def prefer(found: Iterable[SourceInstance], local: Callable[[SourceInstance], bool]) -> list[SourceInstance]:
    """Of each rank keep the local ones alone, if there are any."""
    every = list(found)
    near = [local(one) for one in every]
    ranks = {one.rank for one, is_near in zip(every, near, strict=True) if is_near}
    return [one for one, is_near in zip(every, near, strict=True) if is_near or one.rank not in ranks]
