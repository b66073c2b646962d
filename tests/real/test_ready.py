"""A worker's own ready file: seen as it is made, on the node and inside a container."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from hibernode.placeholder import find_placeholder
from tests.real import images
from tests.real.boxes import Kit
from tests.real.node import Node, until

NEVER = "3600"
"""Seconds between two polls: what is found in time was found by an event."""


def threads_that_watch(pid: int) -> int:
    """Count the inotify instances of an agent."""
    links = (os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink())
    return sum(link == "anon_inode:inotify" for link in links)


@pytest.mark.criu
def test_the_own_ready_file_of_a_process_is_seen_by_an_event(node: Node) -> None:
    """The poll is off; the file is found all the same."""
    worker = node.start_worker("--no-ready")
    worker.counts_on()
    agent = node.start_agent(SIGNALS_POLL_SECONDS=NEVER)
    until("watch on the worker's directory", lambda: threads_that_watch(agent.pid) > 1)
    (node.base / f"{worker.id}.own-ready").touch()
    assert node.done(worker.id)["success"] is True


@pytest.mark.criu
@pytest.mark.containers
def test_the_ready_file_inside_a_container_is_seen_by_an_event(node: Node, kit: Kit) -> None:
    """It is watched through the container's root, whatever links lead to it there."""
    node.signals.mkdir()
    id_ = node.new_id()
    env = {
        "DYN_CHECKPOINT_HASH": id_,
        "DYN_CHECKPOINT_SIGNAL_FILE": f"/signals/{id_}.done",
        "DYN_CHECKPOINT_READY_FILE": "/srv/link/ready",
        "DYN_RESTORE_MARKER_FILE": "/srv/restored",
    }
    with kit.runtime("runc") as runtime:
        binds: Any = [(node.signals, "/signals", "rw"), (find_placeholder(), "/placeholder", "ro")]
        box = runtime.run([images.PYTHON_WORKER, "--no-ready"], image=images.debian(), env=env, binds=binds)
        box.counts_on()
        (box.root / "srv" / "real").mkdir()
        (box.root / "srv" / "link").symlink_to("/srv/real")
        agent = node.start_agent(SIGNALS_POLL_SECONDS=NEVER)
        until("watch on the container's directory", lambda: threads_that_watch(agent.pid) > 1)
        (box.root / "srv" / "real" / "ready").touch()
        assert node.done(id_)["success"] is True, node.tail()
        assert box.wait() == 0
