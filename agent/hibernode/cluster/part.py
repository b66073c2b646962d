"""The cluster as a part of the agent: a watch over the pods of this node, and what is done for each.

Without an API server all else goes on: what is known of pods stays, work that is under way ends, workers are
answered by their signal files, and what is to be told waits in the outbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from hibernode.answers import Trigger
from hibernode.cluster import node
from hibernode.cluster.checkpoints import Checkpoints
from hibernode.cluster.outbox import Outbox
from hibernode.cluster.pods import Kind
from hibernode.cluster.restores import Restores
from hibernode.cluster.roster import Entry, Roster
from hibernode.cluster.shared import Shared
from hibernode.cluster.teller import Teller
from hibernode.criu.runner import find_criu
from hibernode.discovery.container_look import ref_of
from hibernode.discovery.locate import Claim, own_ready_files
from hibernode.discovery.ready import ReadyWatch
from hibernode.errors import HibernodeError, RefusedError, UnavailableError
from hibernode.gpu.cuda import find_tool
from hibernode.gpu.state import Snapshot
from hibernode.health import DegradedError
from hibernode.kube.account import has_account
from hibernode.kube.api import KubeApi, load_configuration
from hibernode.kube.follow import Follower, Listing
from hibernode.requests import Requests
from hibernode.settings import Settings
from hibernode.workload import CheckpointId

log = logging.getLogger("hibernode.cluster")

RETRY_SECONDS: Final = 2.0
"""Between attempts to reach an API server that was never reached."""

IDLE_SECONDS: Final = 1.0
"""Period of the look at pods that wait for something else than a ready file; there is mostly none."""

NODE_SECONDS: Final = 30.0
"""Period of the look at what the node object is told."""

HEARTBEAT_SECONDS: Final = 300.0
"""The node's condition is told anew after this time, though it is the same."""

FIRST_SECONDS: Final = 10.0
"""The signal directory waits this long for the first list of pods: what their labels say comes first. Where
the API server is away when the agent starts, what workers say of themselves has to do."""

NO_ID: Final = "0" * 12
"""Stands for the id of a refused pod that has none; only its ready file is looked for."""


def wanted(settings: Settings) -> bool:
    """Whether there is a cluster for this agent: as the settings say, else if it runs in a pod."""
    if settings.kubernetes.enabled != "auto":
        return settings.kubernetes.enabled == "on"
    in_pod = bool(os.environ.get("KUBERNETES_SERVICE_HOST")) and has_account()
    return in_pod or bool(settings.kubernetes.kubeconfig)


def versions(settings: Settings) -> tuple[str | None, str | None]:
    """Tell the versions of CRIU and of cuda-checkpoint, None of one that may not or cannot be run. Blocks."""
    criu = tool = None
    with contextlib.suppress(OSError, HibernodeError):
        criu = find_criu(settings.criu.binary).version
    with contextlib.suppress(OSError, HibernodeError):
        tool = find_tool(settings.gpu).version
    return criu, tool


class KubePart:
    """Serves the pods of this node while :meth:`run` runs; with ``api`` given, over that connection."""

    def __init__(
        self,
        settings: Settings,
        requests: Requests,
        gpus: Callable[[], Snapshot],
        *,
        api: KubeApi | None = None,
    ) -> None:
        self._settings, self._requests, self._gpus = settings, requests, gpus
        self._changed, self._known = asyncio.Event(), asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.roster = Roster(settings.node, self._changed.set)
        self.outbox = Outbox()
        self.teller = Teller(self.outbox, settings.node)
        shared = Shared(settings, requests, self.roster, self.teller, self._heard, self._changed.set)
        self.checkpoints, self.restores = Checkpoints(shared), Restores(shared)
        self._api = api
        self._follower: Follower | None = None
        self._told_node: dict[str, Any] = {}
        self._told_gpus: tuple[str, str, str] | None = None
        self._told_gpus_at = 0.0
        self.trouble = "starting"
        requests.pods = self

    def _heard(self) -> float:
        """Tell when the API server was last heard, in monotonic seconds."""
        return time.monotonic() - self._follower.age() if self._follower is not None else 0.0

    # life ---------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Watch and serve, until cancelled; an agent that only reports does not look at pods."""
        self._loop = asyncio.get_running_loop()
        serves = self._settings.checkpoint.enabled
        async with asyncio.TaskGroup() as group:
            for work in (self._connect, self.outbox.run, self._node, *([self._serve] if serves else ())):
                group.create_task(work())

    async def known(self) -> None:
        """Wait until the pods are known, but not for long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_SECONDS):
                await self._known.wait()
        self._known.set()

    async def stop(self) -> None:
        """Give back what is held in the cluster, and close the connection."""
        await self.checkpoints.close()
        if self._follower is not None:
            await self._follower.stop()
        if self._api is not None:
            await self._api.close()
        self.teller.connect(None)
        self._api = self._follower = None

    async def _connect(self) -> None:
        """Reach the API server, as often as it takes; from then on the follower does it."""
        found = self._settings.kubernetes
        folder = f"/api/v1/namespaces/{found.namespace}/pods" if found.namespace else "/api/v1/pods"
        listing = Listing(folder, "pods", fields=f"spec.nodeName={self._settings.node}")
        while self.trouble:
            try:
                if self._api is None:
                    self._api = KubeApi(await load_configuration(found.kubeconfig))
                self.teller.connect(self._api)
                if self._settings.checkpoint.enabled:
                    self._follower = Follower(self._api, listing, self.roster)
                    await self._follower.start()
            except UnavailableError as error:
                if self.trouble != error.message:
                    log.warning("the pods of this node are not known: %s", error)
                self.trouble = error.message
                await asyncio.sleep(RETRY_SECONDS)
            else:
                self.trouble = ""
                self._known.set()
                if self._follower is None:
                    return
                where = f"namespace {found.namespace}" if found.namespace else "all namespaces"
                log.info("watching the pods of node %s in %s", self._settings.node, where)

    async def _serve(self) -> None:
        """Do for each pod what can be done, when something has changed and by time."""
        with contextlib.closing(ReadyWatch(self._changed.set)) as watch:
            async with asyncio.TaskGroup() as group:
                while True:
                    self._changed.clear()
                    waiting = await self._turn(group, watch)
                    period = self._settings.signals.poll_seconds if waiting else IDLE_SECONDS
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(period):
                            await self._changed.wait()

    async def _turn(self, group: asyncio.TaskGroup, watch: ReadyWatch) -> bool:
        """Look at all pods once; whether a ready file is waited for."""
        sources = self.roster.of_kind(Kind.CHECKPOINT)
        targets = self.roster.of_kind(Kind.RESTORE) if self._settings.kubernetes.restore else []
        await self._look(watch, sources)
        work = [(self.checkpoints.advance, entry) for entry in sources]
        for advance, entry in [*work, *((self.restores.advance, entry) for entry in targets)]:
            if not entry.at_work and not entry.busy:
                entry.at_work = True
                # Each by itself: a container whose files hang holds up no other.
                group.create_task(self._guarded(advance, entry))
        return any(not entry.settled and entry.trigger is None for entry in sources)

    async def _look(self, watch: ReadyWatch, sources: list[Entry]) -> None:
        """Look for the ready files of workers that are known."""
        claims: dict[Claim, Entry] = {}
        for entry in sources:
            if entry.container and entry.contract and entry.trigger is None:
                claims[Claim(entry.container.init, entry.ask.id or NO_ID, entry.contract)] = entry
        try:
            await watch.follow(claims)
            ready = await asyncio.to_thread(own_ready_files, list(claims))
        except HibernodeError as error:
            log.warning("ready files cannot be looked at: %s", error.message)
            return
        pids = {request.pid for request in ready}
        for claim, entry in claims.items():
            if claim.key.pid in pids:
                entry.trigger = Trigger.READY_FILE

    async def _guarded(self, advance: Callable[[Entry], Any], entry: Entry) -> None:
        """One pod that makes trouble keeps no other."""
        try:
            await advance(entry)
        except Exception:
            pod = entry.ask.pod
            log.exception("pod %s/%s: unexpected failure", pod.namespace, pod.name)
            entry.not_before = time.monotonic() + RETRY_SECONDS
        finally:
            entry.at_work = False

    # what the signal directory asks -------------------------------------------------------------------

    def label_of(self, pid: int) -> str | None:
        """Give the id of the pod that a process is in, empty for a container that is not meant."""
        entry, container = self._entry_of(pid)
        if entry is None:
            return None
        return entry.ask.id if container == entry.ask.container_id else ""

    def takes(self, pid: int, id_: CheckpointId) -> bool:
        """Take up ``<id>.ready`` for a pod that is labelled so.

        :raises RefusedError: the process and the id are not of the same pod.
        """
        entry, container = self._entry_of(pid)
        asked = [other for other in self.roster.entries.values() if other.ask.id == id_]
        if entry is None and not any(other.ask.kind is Kind.CHECKPOINT for other in asked):
            return False
        if entry is None or entry.ask.id != id_ or container != entry.ask.container_id:
            label = "no label" if entry is None else f"the label {entry.ask.id or '?'}"
            raise RefusedError(
                f"{id_}.ready leads to pid {pid}, whose pod has {label}",
                remedy="the label says whose checkpoint it is; the worker writes the ready file of that id",
                reason="WrongPod",
                pid=pid,
            )
        if entry.ask.kind is Kind.CHECKPOINT:
            if entry.settled:
                entry.ask_again()
            entry.trigger = entry.trigger or Trigger.SIGNAL
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._changed.set)
        return True

    def _entry_of(self, pid: int) -> tuple[Entry | None, str]:
        """Find the labelled pod that a process is in, by its cgroup, and the container's id."""
        try:
            ref = ref_of(pid)
        except OSError:
            return None, ""
        return (self.roster.entries.get(ref.pod_uid) if ref.pod_uid else None), ref.id

    # the node -----------------------------------------------------------------------------------------

    def gpu_event(self, kind: str, reason: str, text: str) -> None:
        """Tell an event of the GPUs on the node; may be called from any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self.teller.node_event, kind, reason, text)

    async def _node(self) -> None:
        found = self._settings.kubernetes
        while found.node_labels or found.node_condition:
            if found.node_labels:
                patch = await asyncio.to_thread(self._facts)
                if patch != self._told_node:
                    self.teller.node(patch)
                    self._told_node = patch
            if found.node_condition:
                self._tell_condition()
            await asyncio.sleep(NODE_SECONDS)

    def _facts(self) -> dict[str, Any]:
        if not self._settings.checkpoint.enabled:
            return node.facts(None, None, None)
        free = None
        with contextlib.suppress(OSError, HibernodeError):
            free = self._requests.parts.restorer.store.free_bytes()
        return node.facts(*versions(self._settings), free)

    def _tell_condition(self) -> None:
        judged, before = node.condition(self._gpus()), self._told_gpus
        stale = time.monotonic() - self._told_gpus_at > HEARTBEAT_SECONDS
        if judged is None or (judged == before and not stale):
            return
        self.teller.node(
            node.condition_patch(judged, changed=before is None or before[0] != judged[0]), status=True
        )
        self._told_gpus, self._told_gpus_at = judged, time.monotonic()

    # what the agent asks ------------------------------------------------------------------------------

    async def check(self) -> str:
        """Tell how it is, for the agent's health.

        :raises DegradedError: the API server is away.
        """
        if self.trouble:
            raise DegradedError(f"no pods yet: {self.trouble}")
        if self._follower is None:
            return f"reports only, {len(self.outbox)} messages wait"
        if not self._follower.synced:
            raise DegradedError(f"the API server has not been heard for {self._follower.age():.0f} s")
        return f"{len(self.roster)} pods, {len(self.roster.entries)} of them ask for something"

    def status(self) -> dict[str, Any]:
        """Describe it for ``hibernode status``."""
        follower, entries = self._follower, self.roster.entries.values()
        return {
            "node": self._settings.node,
            "namespace": self._settings.kubernetes.namespace,
            "synced": not self.trouble and (follower is None or follower.synced),
            "trouble": self.trouble,
            "ageSeconds": round(follower.age(), 1) if follower is not None else None,
            "pods": len(self.roster),
            "untold": len(self.outbox),
            "lost": self.outbox.lost,
            "asking": [
                {
                    "namespace": entry.ask.pod.namespace,
                    "name": entry.ask.pod.name,
                    "uid": entry.ask.pod.uid,
                    "kind": entry.ask.kind.value,
                    "era": entry.ask.era.name,
                    "id": entry.ask.id,
                    "state": _state(entry),
                }
                for entry in entries
            ],
        }

    def reading(self) -> Mapping[str, float | Mapping[str, float]]:
        """Read the numbers for a scrape."""
        states: dict[str, float] = {}
        for entry in self.roster.entries.values():
            state = _state(entry)
            states[state] = states.get(state, 0.0) + 1
        follower = self._follower
        return {
            "hibernode_kube_pods": len(self.roster),
            "hibernode_kube_asking_pods": states,
            "hibernode_kube_untold": len(self.outbox),
            "hibernode_kube_lost_total": self.outbox.lost,
            "hibernode_kube_relists_total": follower.relists if follower is not None else 0,
            "hibernode_kube_age_seconds": follower.age() if follower is not None else 0.0,
        }


def _state(entry: Entry) -> str:
    """Say in a word how far a pod has come."""
    if entry.ask.problem is not None or entry.refusal is not None:
        return "refused"
    if entry.settled:
        return "settled"
    if entry.busy:
        return "busy"
    return "found" if entry.container is not None else "waiting"
