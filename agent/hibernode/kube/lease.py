"""One process of the cluster at a time: a Lease of coordination.k8s.io, held as client-go's election does.

Nobody's wall clock decides. A lease is over when it has stood unchanged for its whole duration by the
watcher's own monotonic clock; its holder stops to count on it after two thirds of that, counted from before
its last renewal.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from hibernode.errors import UnavailableError
from hibernode.kube.api import CONFLICT, NOT_FOUND, Budget, KubeApi, KubeStatusError
from hibernode.kube.objects import metadata_of, part_of

SECONDS: Final = 90
"""How long a lease stands without renewal, unless told otherwise."""

MAX_SECONDS: Final = 3600
"""A lease that claims to stand for longer is not believed."""


class Lease:
    """The right to be the one, by the Lease ``name``; ``holder`` differs for every process that ever asks.

    ``clock`` gives monotonic seconds, ``wall`` nanoseconds since 1970 (for people who look at the object).
    """

    def __init__(
        self,
        api: KubeApi,
        namespace: str,
        name: str,
        holder: str,
        *,
        seconds: int = SECONDS,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], int] = time.time_ns,
    ) -> None:
        self._api, self._holder, self._seconds = api, holder, seconds
        self._clock, self._wall = clock, wall
        self._folder = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._namespace, self._name = namespace, name
        self._end, self._perhaps = 0.0, False
        self._seen, self._since = "", 0.0

    def left(self) -> float:
        """Tell for how many seconds it is surely ours; 0 when it is not."""
        return max(self._end - self._clock(), 0.0)

    async def ask(self) -> bool:
        """Renew it, take it if it is free or over, or see that it is another's.

        :raises UnavailableError: the API server does not answer; what is ours stays so until it runs out.
        """
        began, budget = self._clock(), self._api.budget()
        self._perhaps = True  # until an answer says no: it may be lost, or we be cancelled before it comes
        try:
            taken = await self._try(began, budget)
        except KubeStatusError as error:
            if error.code in {NOT_FOUND, CONFLICT}:
                return False  # another was quicker; the next time will tell
            raise UnavailableError(
                f"the Kubernetes API refused the lease {self._name}: {error}"[:600], reason="ApiRefused"
            ) from error
        self._end, self._perhaps = began + self._seconds * 2 / 3 if taken else 0.0, taken
        return taken

    async def release(self) -> None:
        """Give it back, so that another need not wait; what fails here runs out by itself."""
        if not self._perhaps:
            return
        self._end, self._perhaps = 0.0, False
        budget = self._api.budget()
        try:
            raw = await self._api.call("GET", f"{self._folder}/{self._name}", budget)
            if part_of(raw, "spec").get("holderIdentity") == self._holder:
                await self._write(raw, {"holderIdentity": ""}, budget)
        except (KubeStatusError, UnavailableError):
            return

    async def _try(self, began: float, budget: Budget) -> bool:
        mine = {
            "holderIdentity": self._holder,
            "leaseDurationSeconds": self._seconds,
            "renewTime": self._now(),
        }
        try:
            raw = await self._api.call("GET", f"{self._folder}/{self._name}", budget)
        except KubeStatusError as error:
            if error.code != NOT_FOUND:
                raise
            body = {
                "apiVersion": "coordination.k8s.io/v1",
                "kind": "Lease",
                "metadata": {"name": self._name, "namespace": self._namespace},
                "spec": {**mine, "acquireTime": self._now(), "leaseTransitions": 0},
            }
            await self._api.call("POST", self._folder, budget, body=body)
            return True
        spec = part_of(raw, "spec")
        holder = spec.get("holderIdentity")
        if holder != self._holder:
            if holder and not self._over(raw, began):
                return False
            transitions = _number(spec.get("leaseTransitions"), 0, (1 << 31) - 2)
            mine |= {"acquireTime": self._now(), "leaseTransitions": transitions + 1}
        await self._write(raw, mine, budget)
        return True

    async def _write(self, raw: dict[str, Any], spec: Mapping[str, Any], budget: Budget) -> None:
        """Write exactly over the state that was read: its resourceVersion goes with it."""
        body = {**raw, "spec": {**part_of(raw, "spec"), **spec}}
        await self._api.call("PUT", f"{self._folder}/{self._name}", budget, body=body)

    def _over(self, raw: dict[str, Any], now: float) -> bool:
        """Tell whether another's lease has stood unchanged for as long as it may."""
        version = str(metadata_of(raw).get("resourceVersion"))
        if version != self._seen:
            # After this answer, not before the question: it may have been renewed in between.
            self._seen, self._since = version, self._clock()
            return False
        seconds = _number(part_of(raw, "spec").get("leaseDurationSeconds"), self._seconds, MAX_SECONDS)
        return now - self._since > max(seconds, 1)

    def _now(self) -> str:
        """Write the time as a MicroTime."""
        seconds, rest = divmod(self._wall() // 1000, 10**6)
        return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{rest:06d}Z"


def _number(value: Any, otherwise: int, most: int) -> int:
    return min(max(value, 0), most) if isinstance(value, int) else otherwise
