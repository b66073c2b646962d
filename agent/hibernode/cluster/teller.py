"""What the API server is told: events, annotations and conditions of pods, Jobs and the node."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

from hibernode.cluster.outbox import Outbox
from hibernode.cluster.pods import Ask, Ref
from hibernode.errors import UnavailableError
from hibernode.events import clean
from hibernode.kube.api import MERGE, KubeApi, KubeStatusError
from hibernode.kube.lease import CONFLICT
from hibernode.kube.names import INCOMPATIBLE_CONDITION

STRATEGIC: Final = "application/strategic-merge-patch+json"
"""Merges conditions by their type."""

COMPONENT: Final = "hibernode"
_WORD: Final = re.compile(r"[A-Z][A-Za-z0-9]{0,127}", re.ASCII)


class Teller:
    """Puts messages into the outbox. ``api`` is None until there is a connection; what is told waits."""

    def __init__(self, outbox: Outbox, node: str) -> None:
        self.api: KubeApi | None = None
        self.outbox = outbox
        self._node = node

    def event(self, ref: Ref, kind: str, reason: str, message: str) -> None:
        """Tell an event on an object. ``kind``: Normal or Warning."""
        body = self._event(ref, kind, reason, message)
        self.outbox.put(
            partial(self._post, f"/api/v1/namespaces/{body['metadata']['namespace']}/events", body)
        )

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
        now = _now()
        condition = {
            "type": INCOMPATIBLE_CONDITION,
            "status": "False",
            "reason": reason if _WORD.fullmatch(reason) else "Other",
            "message": clean(message),
            "lastTransitionTime": now[:19] + "Z",
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
            raise UnavailableError("there is no connection to the API server yet")
        await self.api.call(method, path, self.api.budget(), body=body, content=content)

    async def _post(self, path: str, body: Mapping[str, Any]) -> None:
        """Make an object of which it does not matter whether an earlier try has made it already."""
        try:
            await self._call("POST", path, body)
        except KubeStatusError as error:
            if error.code != CONFLICT:
                raise

    def _event(self, ref: Ref, kind: str, reason: str, message: str) -> dict[str, Any]:
        now = _now()
        namespace = ref.namespace or "default"
        return {
            "apiVersion": "v1",
            "kind": "Event",
            # A name of our own: a POST that is sent again after its answer was lost makes no second one.
            "metadata": {"name": f"{ref.name[:200]}.{secrets.token_hex(8)}", "namespace": namespace},
            "involvedObject": {
                "apiVersion": ref.api_version,
                "kind": ref.kind,
                "name": ref.name,
                "uid": ref.uid,
                **({"namespace": ref.namespace} if ref.namespace else {}),
            },
            "type": "Normal" if kind == "Normal" else "Warning",
            "reason": reason if _WORD.fullmatch(reason) else "Other",
            "message": clean(message),
            "source": {"component": COMPONENT, "host": self._node},
            "firstTimestamp": now[:19] + "Z",
            "lastTimestamp": now[:19] + "Z",
            "count": 1,
            "reportingComponent": COMPONENT,
            "reportingInstance": self._node,
        }


def path_of(ref: Ref) -> str:
    """Name the path of an object."""
    folder = "/apis/batch/v1" if ref.kind == "Job" else "/api/v1"
    return f"{folder}/namespaces/{ref.namespace}/{ref.kind.lower()}s/{ref.name}"


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
