"""What the controller knows of DynamoCheckpoints and Jobs from its watches: who must be looked at.

Decisions are made from objects that are read for it; this only tells that there is something to decide, and
who else wants the same checkpoint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hibernode.controller.identity import canonical
from hibernode.controller.queue import Key
from hibernode.controller.status import number_of, text_of
from hibernode.errors import RefusedError
from hibernode.kube import names
from hibernode.kube.objects import conditions_of, metadata_of, status_of


@dataclass(frozen=True, slots=True)
class Seen:
    """One DynamoCheckpoint. ``digest`` is the whole SHA-256 of its identity, empty for none."""

    key: Key
    uid: str
    created: str
    digest: str
    phase: str
    leaving: bool

    @property
    def age(self) -> tuple[str, str]:
        """Order by it: the elder first."""
        return self.created, self.uid


def seen(raw: Mapping[str, Any]) -> Seen:
    """Note a DynamoCheckpoint."""
    metadata, spec = metadata_of(raw), raw.get("spec")
    try:
        identity = spec.get("identity") if isinstance(spec, Mapping) else None
        digest = hashlib.sha256(canonical(identity)).hexdigest()
    except RefusedError:
        digest = ""
    return Seen(
        key=(str(metadata.get("namespace", "")), str(metadata.get("name", ""))),
        uid=str(metadata.get("uid", "")),
        created=str(metadata.get("creationTimestamp", "")),
        digest=digest,
        phase=text_of(status_of(raw), "phase"),
        leaving=bool(metadata.get("deletionTimestamp")),
    )


class Checkpoints:
    """Takes the watch of DynamoCheckpoints; every change is a reason to look.

    Those that are not ``wanted`` are known too: one may have the artifact of one that is.
    """

    def __init__(self, add: Callable[[Key], None], wanted: Callable[[str], bool]) -> None:
        self._add, self._wanted = add, wanted
        self._known: dict[str, Seen] = {}

    def apply(self, raw: dict[str, Any]) -> None:
        """Look at it, and at those that wait for it."""
        new = seen(raw)
        old = self._known.get(new.uid)
        self._known[new.uid] = new
        if not self._wanted(new.key[0]):
            return
        self._add(new.key)
        if old is not None and (old.phase, old.digest, old.leaving) != (new.phase, new.digest, new.leaving):
            self._wake(old)

    def gone(self, raw: dict[str, Any]) -> None:
        """Forget it; those that waited for it may go on."""
        old = self._known.pop(str(metadata_of(raw).get("uid", "")), None)
        if old is not None:
            self._wake(old)

    def listed(self, seen: Mapping[str, str], version: str) -> None:
        """Forget what is not there any more."""
        del version
        for uid in self._known.keys() - seen.keys():
            self._wake(self._known.pop(uid))

    def keys(self) -> list[Key]:
        """List all that are wanted."""
        return [one.key for one in self._known.values() if self._wanted(one.key[0])]

    def phases(self) -> dict[str, float]:
        """Count those that are wanted by phase."""
        counts: dict[str, float] = dict.fromkeys(("Pending", "Creating", "Ready", "Failed"), 0.0)
        for one in self._known.values():
            if one.phase in counts and self._wanted(one.key[0]):
                counts[one.phase] += 1
        return counts

    def rivals(self, me: Seen, length: int, *, everywhere: bool = False) -> list[Seen]:
        """List the others whose identity has the same hash of ``length`` digits, the eldest first."""
        found = [
            one
            for one in self._known.values()
            if one.uid != me.uid
            and one.digest[:length] == me.digest[:length]
            and (everywhere or one.key[0] == me.key[0])
        ]
        return sorted(found, key=lambda one: one.age)

    def _wake(self, changed: Seen) -> None:
        if not self._wanted(changed.key[0]):
            return
        for one in self._known.values():
            if one.uid != changed.uid and one.key[0] == changed.key[0] and one.phase == "Pending":
                self._add(one.key)


class Jobs:
    """Takes the watch of Jobs: a change or an end is a reason to look at the owner, its making is none."""

    def __init__(self, add: Callable[[Key], None], wanted: Callable[[str], bool]) -> None:
        self._add, self._wanted = add, wanted
        self._owners: dict[str, Key] = {}

    def apply(self, raw: dict[str, Any]) -> None:
        """Look at the owner, unless the Job is only new."""
        metadata, owner = metadata_of(raw), owner_of(raw)
        if owner is None or not self._wanted(str(metadata.get("namespace", ""))):
            return
        uid, key = str(metadata.get("uid", "")), (str(metadata.get("namespace", "")), owner[0])
        first = uid not in self._owners
        self._owners[uid] = key
        status = status_of(raw)
        ended = conditions_of(raw) or number_of(status, "succeeded") or number_of(status, "failed")
        if not first or ended:
            self._add(key)

    def gone(self, raw: dict[str, Any]) -> None:
        """Look at the owner."""
        key = self._owners.pop(str(metadata_of(raw).get("uid", "")), None)
        if key is not None:
            self._add(key)

    def listed(self, seen: Mapping[str, str], version: str) -> None:
        """Look at the owners of what went unseen."""
        del version
        for uid in self._owners.keys() - seen.keys():
            self._add(self._owners.pop(uid))


def owner_of(raw: Mapping[str, Any]) -> tuple[str, str] | None:
    """Find the DynamoCheckpoint that controls an object: its name and uid; None if there is none."""
    owners = metadata_of(raw).get("ownerReferences")
    for one in owners if isinstance(owners, list) else ():
        if isinstance(one, dict) and one.get("controller") is True:
            group = str(one.get("apiVersion", "")).partition("/")[0]
            if (group, one.get("kind")) == (names.GROUP, names.KIND):
                return str(one.get("name", "")), str(one.get("uid", ""))
    return None
