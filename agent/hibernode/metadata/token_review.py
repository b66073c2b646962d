"""Bearer tokens, checked by the API server's TokenReview."""

from __future__ import annotations

from typing import Any, Final

from hibernode.errors import UnavailableError
from hibernode.kube.api import KubeApi, KubeStatusError
from hibernode.metadata.access import Reviewed
from hibernode.metadata.records import PodRef

PATH: Final = "/apis/authentication.k8s.io/v1/tokenreviews"
_EXTRA: Final = "authentication.kubernetes.io/"
_ACCOUNT: Final = "system:serviceaccount:"


class KubeReviewer:
    """Asks the API server; the agent's account needs ``create`` on tokenreviews.

    ``audiences``: those that a token must be for; empty: the API server's own.
    """

    def __init__(self, api: KubeApi, audiences: tuple[str, ...] = ()) -> None:
        self._api, self._audiences = api, audiences

    async def review(self, token: str) -> Reviewed | None:
        """Return whose the token is; None if it is not good.

        :raises UnavailableError: the API server cannot be asked, or this agent has no leave to ask.
        """
        spec: dict[str, Any] = {"token": token}
        if self._audiences:
            spec["audiences"] = list(self._audiences)
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": spec}
        try:
            answer = await self._api.call("POST", PATH, self._api.budget(), body=body)
        except KubeStatusError as error:
            raise UnavailableError(
                f"tokens cannot be checked: {error}", remedy="let the agent create tokenreviews"
            ) from error
        return reviewed(answer, self._audiences)


def reviewed(answer: Any, audiences: tuple[str, ...] = ()) -> Reviewed | None:
    """Read a TokenReview's status; whatever is not plainly good is not good."""
    status = answer.get("status") if isinstance(answer, dict) else None
    if not isinstance(status, dict) or status.get("authenticated") is not True or status.get("error"):
        return None
    granted = status.get("audiences")
    if audiences and not (isinstance(granted, list) and set(audiences) & {str(each) for each in granted}):
        return None  # an authenticator that knows no audiences answers without them
    user = status.get("user")
    name = user.get("username") if isinstance(user, dict) else None
    if not isinstance(user, dict) or not isinstance(name, str) or not name:
        return None
    extra = user.get("extra")
    uid, pod = (_first(extra, f"{_EXTRA}{key}") for key in ("pod-uid", "pod-name"))
    namespace = name.removeprefix(_ACCOUNT).partition(":")[0] if name.startswith(_ACCOUNT) else ""
    return Reviewed(name, PodRef(pod, uid, namespace) if uid and pod and namespace else None)


def _first(extra: Any, key: str) -> str:
    values = extra.get(key) if isinstance(extra, dict) else None
    found = values[0] if isinstance(values, list) and values else ""
    return found if isinstance(found, str) else ""
