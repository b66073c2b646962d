"""What the handling of checkpoints and of restores in a cluster has in common."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from hibernode.apart import LOOK_SECONDS, apart
from hibernode.cluster.pods import Problem, Told, completed, told
from hibernode.cluster.roster import Entry, Roster
from hibernode.cluster.teller import Teller
from hibernode.discovery.container_look import owner_of
from hibernode.discovery.containers import Container, find
from hibernode.discovery.locate import CLAIM, Contract
from hibernode.errors import HibernodeError, NotFoundError, RefusedError
from hibernode.host import procfs
from hibernode.requests import Requests
from hibernode.settings import Settings

log = logging.getLogger("hibernode.cluster")

FIND_SECONDS: Final = 1.0
"""Between two looks for a container that is not there."""

MISSING_SECONDS: Final = 5.0
"""A container that has ended is still called running for a second or two by the kubelet; after this time one
that is not to be found is a failure."""


@dataclass(frozen=True, slots=True)
class Shared:
    """The parts of the agent that pods are served with.

    ``heard``: when the API server was last heard, monotonic seconds. ``wake``: have the pods looked at soon.
    """

    settings: Settings
    requests: Requests
    roster: Roster
    teller: Teller
    heard: Callable[[], float]
    wake: Callable[[], None]


async def locate(entry: Entry, heard: float) -> Problem | None:
    """Find a pod's container on this node; says why that is impossible, and nothing while it may come yet.

    ``heard``: when the API server was last heard. One that is away cannot say that the container has ended.
    """
    now = time.monotonic()
    if entry.container is not None or not entry.ask.container_id or now < entry.not_before:
        return None
    name = f"container {entry.ask.container_id}"
    try:
        container = await apart(partial(_found, entry), name, "a look for it", seconds=LOOK_SECONDS)
        owner = owner_of(container.pid)
        environ = await apart(partial(_environ, container), owner, CLAIM, seconds=LOOK_SECONDS)
    except NotFoundError as error:
        entry.not_before = now + FIND_SECONDS
        entry.missing_since = entry.missing_since or now
        if now - entry.missing_since < MISSING_SECONDS or heard < entry.missing_since + FIND_SECONDS:
            return None
        return Problem(
            error.reason,
            f"the kubelet says that {name} runs, and no process on this node is in it",
            "the agent needs hostPID: true and the node's own /sys/fs/cgroup",
        )
    except OSError:
        entry.not_before = now + FIND_SECONDS
        return None
    except HibernodeError as error:
        return Problem(error.reason, error.message, error.remedy)
    paths = completed(entry.ask, told(environ))
    entry.container, entry.control_dir = container, paths.control_dir
    entry.contract = _contract(entry, paths)
    return None


def _found(entry: Entry) -> Container:
    """Find the container that has the id and is in the pod that the API server says.

    :raises HibernodeError: there is none, or its cgroup is another pod's.
    """
    container = find(entry.ask.container_id).container
    if container.ref.pod_uid != entry.ask.pod.uid:
        raise RefusedError(
            f"container {container.ref.id} is in pod {container.ref.pod_uid or 'none'} by its cgroup, and in "
            f"pod {entry.ask.pod.uid} by the API server",
            remedy="an agent looks after the pods of its own node only: is node_name right?",
            reason="WrongPod",
        )
    return container


def _environ(container: Container) -> dict[str, str]:
    return procfs.environ(container.pid)


def _contract(entry: Entry, paths: Told) -> Contract:
    return Contract(entry.ask.era.name, paths.signal_file, paths.ready_file, paths.restore_marker)
