"""From a process on a GPU to the pod and container that it lives in, by its cgroup.

NVML gives bare pids, and a pid may be another process's by the time it is looked at. So a process counts only
if it was there before NVML was asked; what cannot be told is unknown with the reason, never a wrong pod. The
cgroup is trusted as :mod:`hibernode.discovery.container_ref` says: of containers inside others, which a
process can make up, the outermost counts.

Names come from what the kubelet makes on the node, no API is asked: a directory ``NAMESPACE_POD_UID`` for
each pod's logs, and the file that it binds into each container.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final

from hibernode.discovery.container_look import pid_namespace, ref_of
from hibernode.discovery.container_ref import ContainerRef, parse_path
from hibernode.discovery.containers import mounted_name
from hibernode.gpu.podresources import NAME
from hibernode.gpu.state import Owner, OwnerKind
from hibernode.host import procfs
from hibernode.host.procfs import Process
from hibernode.text import printable
from hibernode.workload import ProcessKey

POD_LOGS: Final = Path("/proc/1/root/var/log/pods")
"""Where the kubelet keeps the logs (its podLogsDir), as pid 1 of the node sees it."""

KEEP_SECONDS: Final = 60.0
"""How long a process's owner is not looked for again; a process seldom changes its cgroup."""

MAX_PODS: Final = 4096
"""Entries of :data:`POD_LOGS` that are looked at; a kubelet runs at most some hundred pods."""

INIT_PID_NS: Final = 0xEFFFFFFC
"""linux/proc_ns.h: PROC_PID_INIT_INO. The driver's pids are those of the node's own namespace."""

_LOG_DIRECTORY: Final = re.compile(r"(?P<namespace>[^_]+)_(?P<pod>[^_]+)_(?P<uid>[0-9a-f-]{32,36})")


def boot_ticks() -> int:
    """Tell the time in the unit of a process's start, clock ticks since boot."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * procfs.CLOCK_TICKS)


class Owners:
    """Looks processes up and remembers them. Blocks on /proc, so it belongs in a thread.

    ``same_pids``: whether the pids of /proc are the driver's; by default, whether the agent is in the node's
    own pid namespace.
    """

    def __init__(self, pod_logs: Path = POD_LOGS, *, same_pids: bool | None = None) -> None:
        self._pod_logs = pod_logs
        self._same_pids = pid_namespace() == INIT_PID_NS if same_pids is None else same_pids
        self._known: dict[ProcessKey, tuple[Owner, float]] = {}
        self._pods: dict[str, tuple[str, str]] = {}
        self._around = ref_of(os.getpid())
        self._listed = False

    def look(self, pids: Iterable[int], asked_at: int) -> dict[int, Owner]:
        """Find the owners of pids that NVML gave when asked at ``asked_at``, see :func:`boot_ticks`."""
        if not self._same_pids:
            why = "the agent has a pid namespace of its own; run it with hostPID: true"
            return {pid: Owner(OwnerKind.UNKNOWN, why) for pid in pids}
        seen: dict[ProcessKey, tuple[Owner, float]] = {}
        found: dict[int, Owner] = {}
        self._listed = False
        for pid in set(pids):
            found[pid] = self._one(pid, asked_at, seen)
        self._known = seen
        return found

    def _one(self, pid: int, asked_at: int, seen: dict[ProcessKey, tuple[Owner, float]]) -> Owner:
        try:
            with Process.open(pid) as process:
                if process.key.start_ticks >= asked_at:
                    return Owner(OwnerKind.UNKNOWN, "the pid has a new process; looked at again")
                owner, at = self._known.get(process.key, (None, 0.0))
                if owner is None or time.monotonic() - at > KEEP_SECONDS:
                    owner, at = self._look(pid), time.monotonic()
                if not process.alive():
                    return Owner(OwnerKind.UNKNOWN, "the process is ending")
                seen[process.key] = (owner, at)
                return owner
        except ProcessLookupError:
            return Owner(OwnerKind.UNKNOWN, "no process has this pid")
        except (OSError, ValueError) as error:
            return Owner(OwnerKind.UNKNOWN, printable(f"/proc/{pid} cannot be read: {error}", keep=""))

    def _look(self, pid: int) -> Owner:
        ref = self._outermost(ref_of(pid))
        name = printable(procfs.read_stat(pid).comm, keep="")
        if not ref.known and not ref.pod_uid:
            return Owner(OwnerKind.NODE, name=name)
        owner = Owner(OwnerKind.CONTAINER, name=name, container_id=ref.id if ref.known else "")
        if not ref.pod_uid:
            return owner
        namespace, pod = self._pod_names(ref.pod_uid)
        reason = "" if pod else f"{self._pod_logs} has no entry of this pod"
        return replace(
            owner,
            kind=OwnerKind.POD,
            reason=reason,
            pod_uid=ref.pod_uid,
            namespace=namespace,
            pod=pod,
            container=mounted_name(pid, ref.pod_uid) or None,
        )

    def _outermost(self, ref: ContainerRef) -> ContainerRef:
        """Cut the path after the first container that is not around the agent as well."""
        around = (*self._around.within, self._around.id)
        outer = [id_ for id_ in (*ref.within, ref.id) if id_ not in around]
        if not ref.known or not outer or outer[0] == ref.id:
            return ref
        head, mark, _ = ref.cgroup.partition(outer[0])
        return parse_path(head + mark + ref.cgroup[len(head + mark) :].partition("/")[0])

    def _pod_names(self, uid: str) -> tuple[str | None, str | None]:
        """Return a pod's namespace and name; the directories are listed once a look at most."""
        if uid not in self._pods and not self._listed:
            self._pods, self._listed = self._list_pods(), True
        return self._pods.get(uid, (None, None))

    def _list_pods(self) -> dict[str, tuple[str, str]]:
        """Read the pods' names; a uid that stands for two names stands for none."""
        found: dict[str, tuple[str, str]] = {}
        twice: set[str] = set()
        try:
            with os.scandir(self._pod_logs) as entries:
                names = [entry.name for entry, _ in zip(entries, range(MAX_PODS), strict=False)]
        except OSError:
            return {}
        for match in filter(None, map(_LOG_DIRECTORY.fullmatch, names)):
            if NAME.fullmatch(match["namespace"]) and NAME.fullmatch(match["pod"]):
                if match["uid"] in found:
                    twice.add(match["uid"])
                found[match["uid"]] = (match["namespace"], match["pod"])
        return {uid: names for uid, names in found.items() if uid not in twice}
