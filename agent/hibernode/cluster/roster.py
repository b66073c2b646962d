"""The pods of this node that ask for something, kept up to date by a watch; each with how far it has come."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hibernode.answers import Outcome, Trigger
from hibernode.cluster.pods import Ask, Kind, Problem, ask_of
from hibernode.discovery.containers import Container
from hibernode.discovery.locate import Contract
from hibernode.kube.follow import newer
from hibernode.kube.objects import metadata_of


@dataclass(slots=True, eq=False)
class Entry:
    """A pod and one run of its container, whose id is ``run`` once it has one.

    ``container`` and ``contract`` are known once it was found on the node. ``trigger``: what said first that
    it may be frozen. ``at_work``: it is looked at now. ``busy``: a job has it. ``unsaid``: an outcome that
    the worker could not be told yet. ``refusal``: why nothing can be done; the worker is told of it again
    when it is ready. ``settled``: nothing is left to do. ``tried``: a restore was begun. ``again``: it was
    answered, and asked once more by a file in the signal directory. ``not_before``, ``missing_since`` and
    ``untold_since``: monotonic seconds.
    """

    ask: Ask
    version: str = ""
    run: str = ""
    container: Container | None = None
    contract: Contract | None = None
    control_dir: str = ""
    trigger: Trigger | None = None
    at_work: bool = False
    busy: bool = False
    settled: bool = False
    unsaid: Outcome | None = None
    refusal: Problem | None = None
    tried: bool = False
    again: bool = False
    not_before: float = 0.0
    missing_since: float = 0.0
    untold_since: float = 0.0
    said: set[str] = field(default_factory=set)

    def differs(self, ask: Ask) -> bool:
        """Whether the pod now asks for something else, or for another run of its container."""
        another_run = bool(self.run and ask.container_id and self.run != ask.container_id)
        return another_run or (self.ask.id, self.ask.kind) != (ask.id, ask.kind)

    def ask_again(self) -> None:
        """Take it that the worker asks anew after it was answered."""
        self.again, self.settled = True, False
        self.said.discard("outcome")

    def first(self, what: str) -> bool:
        """Whether this is to be said for the first time."""
        if what in self.said:
            return False
        self.said.add(what)
        return True


class Roster:
    """A sink of the pods of ``node``, keyed by uid; ``changed`` is called when one has changed."""

    def __init__(self, node: str, changed: Callable[[], None]) -> None:
        self._node, self._changed = node, changed
        self._seen: set[str] = set()
        self.entries: dict[str, Entry] = {}

    def apply(self, raw: dict[str, Any]) -> None:
        """Take the state of a pod, unless it is older than what is known."""
        metadata = metadata_of(raw)
        uid, version = str(metadata.get("uid", "")), str(metadata.get("resourceVersion", ""))
        self._seen.add(uid)
        known = self.entries.get(uid)
        if known is not None and not newer(version, known.version):
            return
        ask = ask_of(raw, self._node)
        if ask is None:
            self._drop(uid)
            return
        if known is None or known.differs(ask):
            # A job that works for the one before goes on, for what was asked then.
            self.entries[uid] = Entry(ask, version, run=ask.container_id)
        else:
            known.ask, known.version, known.run = ask, version, ask.container_id or known.run
        self._changed()

    def gone(self, raw: dict[str, Any]) -> None:
        """Take it that a pod was deleted."""
        uid = str(metadata_of(raw).get("uid", ""))
        self._seen.discard(uid)
        self._drop(uid)

    def listed(self, seen: Mapping[str, str], version: str) -> None:
        """Forget the pods that a whole list no longer has."""
        for uid, entry in list(self.entries.items()):
            if uid not in seen and not newer(entry.version, version):
                self._drop(uid)
        self._seen = set(seen) | self.entries.keys()

    def _drop(self, uid: str) -> None:
        if self.entries.pop(uid, None) is not None:
            self._changed()

    def __len__(self) -> int:
        """Count the node's pods, whether they ask for anything or not."""
        return len(self._seen)

    def of_kind(self, kind: Kind) -> list[Entry]:
        """List the pods that ask for one thing and have not all that they asked for."""
        return [entry for entry in self.entries.values() if entry.ask.kind is kind and not entry.settled]
