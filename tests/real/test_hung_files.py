"""Containers with a file system that hangs: the agent and its other containers go on."""

from __future__ import annotations

import json
import urllib.request
from contextlib import AbstractContextManager
from typing import Any

import pytest

from tests.real import images
from tests.real.boxes import Box, Kit, Runtime
from tests.real.hung_fs import hung
from tests.real.node import Node, until
from tests.real.places import placed

pytestmark = [pytest.mark.criu, pytest.mark.containers]

HUNG = "/srv/hung"
DEADLINE = "20"
"""Seconds; a dump takes one."""


def worker(node: Node, runtime: Runtime, id_: str, **env: str) -> Box:
    """Run a worker that has a directory where something can be mounted."""
    names = {
        "DYN_CHECKPOINT_HASH": id_,
        "DYN_CHECKPOINT_SIGNAL_FILE": f"/signals/{id_}.done",
        "DYN_CHECKPOINT_READY_FILE": "/srv/ready",
        "DYN_RESTORE_MARKER_FILE": "/srv/restored",
        **env,
    }
    binds: Any = [(node.signals, "/signals", "rw")]
    box = runtime.run([images.PYTHON_WORKER, "--no-ready"], image=images.debian(), env=names, binds=binds)
    box.counts_on()
    (box.root / HUNG[1:]).mkdir()
    return box


def hang_dev(box: Box) -> AbstractContextManager[object]:
    """Let a container's /dev hang, which is looked at before a dump and before a restore."""
    (box.root / "dev/hung").mkdir()
    return hung(box.pid, "/dev/hung")


def get(node: Node, path: str) -> str:
    """Ask the agent over HTTP; an answer that does not come at once is a failure."""
    with urllib.request.urlopen(f"http://127.0.0.1:{node.port}{path}", timeout=5) as reply:
        return str(reply.read().decode())


def stuck(node: Node) -> list[str]:
    """List whose looks hang, as the agent says."""
    status = json.loads(node.run("status", "-o", "json").stdout)
    return [entry["owner"] for entry in status["stuck"]]


def told(node: Node, name: str) -> list[str]:
    """List the events about somebody, the oldest first."""
    events = json.loads(node.run("events", "-o", "json").stdout)["items"]
    return [event["reason"] for event in events if name in event["message"]]


@pytest.mark.parametrize(
    "variable",
    [
        pytest.param("DYN_CHECKPOINT_READY_FILE", id="the ready file hangs"),
        pytest.param("DYN_CHECKPOINT_SIGNAL_FILE", id="the way to the signal directory hangs"),
    ],
)
def test_a_container_that_hangs_is_named_and_holds_up_nobody(node: Node, kit: Kit, variable: str) -> None:
    """The agent answers, another worker is dumped, and the one that hung is seen when it hangs no more."""
    node.signals.mkdir()
    id_, other_id = node.new_id(), node.new_id()
    with kit.runtime("runc") as runtime:
        place = f"{HUNG}/below/{id_}.done" if "SIGNAL" in variable else f"{HUNG}/below/ready"
        box = worker(node, runtime, id_, **{variable: place})
        other = worker(node, runtime, other_id)
        with hung(box.pid, HUNG):
            node.start_agent()
            name = f"container {box.id}"
            until("a word of what hangs", lambda: stuck(node) == [name])
            until("a word of it", lambda: told(node, name) == ["ContainerStuck"])
            assert get(node, "/livez") == "ok\n"
            assert f"degraded  containers: {name}" in get(node, "/healthz")
            assert f"stuck      {name}: a look at " in node.run("status").stdout
            (other.root / "srv/ready").touch()
            assert node.done(other_id)["success"] is True, node.tail()
            assert other.wait() == 0
            assert stuck(node) == [name]
        until("nothing that hangs", lambda: stuck(node) == [])
        until("a word of its end", lambda: told(node, name) == ["ContainerStuck", "ContainerBack"])
        if "SIGNAL" not in variable:
            (box.root / HUNG[1:] / "below").mkdir()
            (box.root / HUNG[1:] / "below/ready").touch()
            assert node.done(id_)["success"] is True, node.tail()


def test_an_agent_that_is_stopped_gives_way_to_the_next_one(node: Node, kit: Kit) -> None:
    """Though the kernel may keep the old one's thread until the file system answers."""
    node.signals.mkdir()
    id_ = node.new_id()
    with kit.runtime("runc") as runtime:
        box = worker(node, runtime, id_, DYN_CHECKPOINT_READY_FILE=f"{HUNG}/below/ready")
        with hung(box.pid, HUNG):
            old = node.start_agent()
            until("a word of what hangs", lambda: stuck(node) == [f"container {box.id}"])
            old.terminate()
            until("the end of its answers", lambda: node.run("status", check=None).returncode != 0)
            new = node.start_agent()
            assert json.loads(node.run("status", "-o", "json").stdout)["pid"] == new.pid
        assert old.wait(timeout=60) == 0


def test_a_dump_of_a_container_that_hangs_ends_at_its_deadline(node: Node, kit: Kit) -> None:
    """It is answered and named; the worker runs on, and the next one is dumped."""
    node.signals.mkdir()
    id_, other_id = node.new_id(), node.new_id()
    with kit.runtime("runc") as runtime:
        box, other = worker(node, runtime, id_), worker(node, runtime, other_id)
        with hang_dev(box):
            node.start_agent(CHECKPOINT_DEADLINE_SECONDS=DEADLINE)
            (box.root / "srv/ready").touch()
            answer = node.done(id_)
            assert answer["success"] is False
            assert answer["error"].startswith("DeadlineExceeded")
            assert stuck(node) == [f"container {box.id}"]
            assert get(node, "/livez") == "ok\n"
            (other.root / "srv/ready").touch()
            assert node.done(other_id)["success"] is True, node.tail()


def test_a_restore_into_a_container_that_hangs_ends_at_its_deadline(node: Node, kit: Kit) -> None:
    """The placeholder is told and starts cold; the next one gets the worker."""
    with placed(node, kit, "runc", "busybox") as place:
        id_ = node.new_id()
        source = place.start(id_)
        source.counts_on()
        place.freeze(source)
        waiting = place.placeholder(id_, "--", "/bin/sh", "-c", "echo started cold; exec sleep 1000")
        with hang_dev(waiting):
            node.start_agent(RESTORE_PLACEHOLDERS="true", RESTORE_DEADLINE_SECONDS=DEADLINE)
            until("cold start", lambda: "started cold\n" in waiting.log(), 60)
            assert stuck(node) == [f"container {waiting.id}"]
            assert "DeadlineExceeded" in node.run("events").stdout
            assert get(node, "/livez") == "ok\n"
            waiting.kill()
            fresh = place.placeholder(id_)
            until("restored worker", lambda: node.restored_phase(id_), 60)
            fresh.counts_on()
