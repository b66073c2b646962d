"""Events of core/v1: what ``kubectl describe`` shows below an object.

An event is advice, never state: what cannot be written is logged and forgotten. The same words on the same
object are one Event with a count, whoever says them and however often they restart, because its name follows
from them. A budget for each object keeps a loop of ours from filling the cluster's store.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

from hibernode.errors import UnavailableError
from hibernode.kube.api import CONFLICT, MERGE, Budget, KubeApi, KubeStatusError
from hibernode.kube.objects import metadata_of, stamp
from hibernode.text import printable

log = logging.getLogger("hibernode.kube.events")

MAX_MESSAGE: Final = 1024
"""Characters; the API server's own limit for events.k8s.io, which shares the objects."""

SECONDS: Final = 5.0
"""For writing one event with all its tries."""

BURST: Final = 25
REFILL_SECONDS: Final = 300.0
"""Events of one object: as many at once, then one in this time. client-go's own numbers."""

MAX_OBJECTS: Final = 4096
"""Objects whose budgets are remembered."""

MAX_COUNT: Final = (1 << 31) - 1
"""An event's count is an int32; beyond it the API server would refuse the event."""

MAX_NAME: Final = 253 - 17


class EventBudget:
    """How many events each object may have; ``refused`` counts the others. ``clock``: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.refused = 0
        self._clock = clock
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def __len__(self) -> int:
        """Count the objects that are remembered."""
        return len(self._left)

    def take(self, uid: str) -> bool:
        """Take one from an object's budget, or refuse it."""
        now = self._clock()
        left, since = self._left.pop(uid, (float(BURST), now))
        left = min(left + (now - since) / REFILL_SECONDS, BURST)
        allowed = left >= 1
        self._left[uid] = (left - 1 if allowed else left, now)
        while len(self._left) > MAX_OBJECTS:
            self._left.popitem(last=False)
        self.refused += not allowed
        return allowed


class EventWriter:
    """Writes events; ``component`` says who. ``host`` is the node, if that is of interest.

    ``clock`` gives monotonic seconds, ``wall`` seconds since 1970.
    """

    def __init__(
        self,
        api: KubeApi,
        component: str,
        host: str = "",
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._api, self._component, self._host = api, component, host
        self._budget, self._wall = EventBudget(clock), wall

    @property
    def dropped(self) -> int:
        """Events that were not written, because their objects had many."""
        return self._budget.refused

    async def say(
        self,
        involved: Mapping[str, Any],
        type_: Literal["Normal", "Warning"],
        reason: str,
        message: str,
        *,
        field: str = "",
    ) -> None:
        """Write an event on ``involved``, an object as the API server gave it. Raises nothing.

        ``field`` is the part of it that is meant, such as ``spec.containers{main}``.
        """
        reference = reference_to(involved) | ({"fieldPath": field} if field else {})
        message = printable(message)
        message = message if len(message) <= MAX_MESSAGE else message[: MAX_MESSAGE - 3] + "..."
        if not self._budget.take(str(reference.get("uid"))):
            log.info("no event %s of %s: it has many already", reason, reference.get("name"))
            return
        try:
            await self._write(reference, type_, reason, message)
        except (KubeStatusError, UnavailableError) as error:
            log.warning("the event %s of %s was not written: %s", reason, reference.get("name"), error)

    async def _write(self, reference: Mapping[str, Any], type_: str, reason: str, message: str) -> None:
        budget, now = Budget(SECONDS, self._api.counters), stamp(self._wall())
        words = "\0".join((str(reference), self._component, self._host, type_, reason, message))
        digest = hashlib.sha256(words.encode()).hexdigest()[:16]
        name = f"{str(reference.get('name'))[:MAX_NAME].rstrip('.-')}.{digest}"
        folder = f"/api/v1/namespaces/{reference.get('namespace') or 'default'}/events"
        body = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": reference.get("namespace") or "default"},
            "involvedObject": reference,
            "type": type_,
            "reason": reason,
            "message": message,
            "source": {"component": self._component, **({"host": self._host} if self._host else {})},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        try:
            await self._api.call("POST", folder, budget, body=body)
        except KubeStatusError as error:
            if error.code != CONFLICT:
                raise
            found = await self._api.call("GET", f"{folder}/{name}", budget)
            count = found.get("count")
            count = min(max(count, 1), MAX_COUNT - 1) + 1 if isinstance(count, int) else 2
            more = {"count": count, "lastTimestamp": now}
            await self._api.call("PATCH", f"{folder}/{name}", budget, body=more, content=MERGE)


def reference_to(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Make the reference by which an event names an object; ``raw`` has its apiVersion, kind and metadata."""
    metadata = metadata_of(raw)
    reference = {"apiVersion": raw.get("apiVersion"), "kind": raw.get("kind")}
    # Without resourceVersion, which would make another event of the same words.
    reference |= {key: metadata.get(key) for key in ("namespace", "name", "uid")}
    return {key: value for key, value in reference.items() if value}
