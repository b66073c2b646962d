"""What the API server is told: events, annotations and conditions of pods, Jobs and the node."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from hibernode.cluster.outbox import Outbox
from hibernode.cluster.pods import Ask, Ref
from hibernode.errors import UnavailableError
from hibernode.events import clean
from hibernode.kube.api import MERGE, KubeApi
from hibernode.kube.events import EventBudget, EventWriter, reference_to
from hibernode.kube.names import INCOMPATIBLE_CONDITION
from hibernode.kube.objects import stamp

log = logging.getLogger("hibernode.cluster")

STRATEGIC: Final = "application/strategic-merge-patch+json"
"""Merges conditions by their type."""

COMPONENT: Final = "hibernode"
_WORD: Final = re.compile(r"[A-Z][A-Za-z0-9]{0,127}", re.ASCII)


class KeptEvents(EventWriter):
    """Events that wait where they cannot be written; they bear the time at which it happened."""

    def __init__(self, api: KubeApi, node: str) -> None:
        self._at = 0.0
        super().__init__(api, COMPONENT, node, wall=lambda: self._at)

    async def write(self, ref: Ref, kind: str, reason: str, message: str, at: float) -> None:
        """Write one event; one at a time.

        :raises UnavailableError: it may be written later. :raises KubeStatusError: it never will.
        """
        self._at = at
        await self._write(reference(ref), "Normal" if kind == "Normal" else "Warning", reason, message)


def reference(ref: Ref) -> dict[str, Any]:
    """Name an object as events do."""
    metadata = {"namespace": ref.namespace, "name": ref.name, "uid": ref.uid}
    return reference_to({"apiVersion": ref.api_version, "kind": ref.kind, "metadata": metadata})


class Teller:
    """Puts messages into the outbox; what is told before :meth:`connect` waits there."""

    def __init__(self, outbox: Outbox, node: str) -> None:
        self.api: KubeApi | None = None
        self.outbox = outbox
        self._node = node
        self._budget = EventBudget()
        self._events: KeptEvents | None = None

    def connect(self, api: KubeApi | None) -> None:
        """Use this connection from now on, or none."""
        self.api = api
        self._events = None if api is None else KeptEvents(api, self._node)

    def event(self, ref: Ref, kind: str, reason: str, message: str) -> None:
        """Tell an event on an object, if it has not too many. ``kind``: Normal or Warning."""
        if not self._budget.take(ref.uid):  # here, not where it is written: that is tried often
            log.info("no event %s of %s: it has many already", reason, ref.name)
            return
        word = reason if _WORD.fullmatch(reason) else "Other"
        self.outbox.put(partial(self._write, ref, kind, word, clean(message), time.time()))

    def both(self, ask: Ask, kind: str, reason: str, message: str) -> None:
        """Tell an event on a pod and on its Job, if it has one."""
        self.event(ask.pod, kind, reason, message)
        if ask.job is not None:
            self.event(ask.job, kind, reason, f"pod {ask.pod.name}: {message}")

    def node_event(self, kind: str, reason: str, message: str) -> None:
        """Tell an event on the node, whose uid is its name in events, as the kubelet has it."""
        self.event(Ref("Node", "", self._node, self._node), kind, reason, message)

    def annotate(self, ref: Ref, annotations: Mapping[str, str | None]) -> None:
        """Set annotations of an object; None takes one away."""
        self.outbox.put(partial(self.send_annotations, ref, annotations), f"{ref.kind} {ref.uid} annotations")

    async def send_annotations(self, ref: Ref, annotations: Mapping[str, str | None]) -> None:
        """Set them now; only where the object is still the one of that uid."""
        body = {"metadata": {"uid": ref.uid, "annotations": dict(annotations)}}
        await self._call("PATCH", path_of(ref), body, MERGE)

    def incompatible(self, pod: Ref, reason: str, message: str) -> None:
        """Set the pod's condition that its restore was refused."""
        condition = {
            "type": INCOMPATIBLE_CONDITION,
            "status": "False",
            "reason": reason if _WORD.fullmatch(reason) else "Other",
            "message": clean(message),
            "lastTransitionTime": stamp(time.time()),
        }
        body = {"metadata": {"uid": pod.uid}, "status": {"conditions": [condition]}}
        send = partial(self._call, "PATCH", f"{path_of(pod)}/status", body, STRATEGIC)
        self.outbox.put(send, f"Pod {pod.uid} condition")

    def node(self, body: Mapping[str, Any], *, status: bool = False) -> None:
        """Change the node object, or its status."""
        path = f"/api/v1/nodes/{self._node}" + ("/status" if status else "")
        send = partial(self._call, "PATCH", path, body, STRATEGIC)
        self.outbox.put(send, "node status" if status else "node")

    async def _call(self, method: str, path: str, body: Any, content: str = "application/json") -> None:
        """Send one message.

        :raises UnavailableError: it may go later. :raises KubeStatusError: it never will.
        """
        if self.api is None:
            raise _unconnected()
        await self.api.call(method, path, self.api.budget(), body=body, content=content)

    async def _write(self, ref: Ref, kind: str, reason: str, message: str, at: float) -> None:
        if self._events is None:
            raise _unconnected()
        await self._events.write(ref, kind, reason, message, at)


def path_of(ref: Ref) -> str:
    """Name the path of an object."""
    folder = "/apis/batch/v1" if ref.kind == "Job" else "/api/v1"
    return f"{folder}/namespaces/{ref.namespace}/{ref.kind.lower()}s/{ref.name}"


def _unconnected() -> UnavailableError:
    return UnavailableError("there is no connection to the API server yet")
