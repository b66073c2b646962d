"""The main job with containers: frozen from the node, thawed in a placeholder, with every runtime."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.real.boxes import KINDS, Kit
from tests.real.node import Node, until
from tests.real.places import MIB, Place, children, dump, mounts_of, placed, tree

pytestmark = [pytest.mark.containers, pytest.mark.criu]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Give each runtime in turn."""
    return str(request.param)


@pytest.fixture
def place(node: Node, kit: Kit, kind: str, request: pytest.FixtureRequest) -> Iterator[Place]:
    """Give a place for the image that the test's parameter names; Debian without one."""
    with placed(node, kit, kind, getattr(request, "param", "debian")) as here:
        yield here


@pytest.mark.parametrize("place", ["debian", "busybox"], indirect=True)
def test_a_container_is_frozen_and_thawed_in_another(place: Place) -> None:
    """State, files, shared memory, pids, output, cgroup, seccomp and exit code are the worker's own."""
    node = place.node
    node.start_agent()
    id_ = node.new_id()
    box = place.start(id_)
    before = box.counts_on()
    files = tree(box.root)
    dump(place, id_, box)
    frozen = before["count"]
    waiting = place.placeholder(id_)
    node.run("restore", id_, "--into", waiting.id)
    after = waiting.counts_on()
    assert after["count"] > frozen
    assert after["restored"] is True
    same = ("pid", "proc_self", "pgrp", "uid", "seccomp", "no_new_privs", "capabilities")
    assert {name: after[name] for name in same} == {name: before[name] for name in same}
    assert after["proc_self"] == str(after["pid"]) == "1"
    assert after["seccomp"] == 2
    assert after["shm"] > frozen
    assert tree(waiting.root) == files
    assert after["hostname"] == hostname(waiting.pid)
    root = next(int(pid) for pid in children(waiting.pid))
    assert Path(f"/proc/{root}/cgroup").read_text() == waiting.cgroup()
    for kind in ("cgroup", "ipc", "net", "uts"):
        assert os.readlink(f"/proc/{root}/ns/{kind}") == os.readlink(f"/proc/{waiting.pid}/ns/{kind}")
    assert mounts_of(root) == mounts_of(waiting.pid)
    until("ticks in the placeholder's log", lambda: "tick" in waiting.log())
    waiting.ask_exit(7)
    assert waiting.wait() == 7


def hostname(pid: int) -> str:
    """Ask for the name of a container."""
    command = ["nsenter", f"--uts=/proc/{pid}/ns/uts", "hostname"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()


def test_a_crash_is_never_a_zero(place: Place) -> None:
    """A worker that a signal ends makes its container end with 128 and the signal's number."""
    node = place.node
    node.start_agent()
    id_ = node.new_id()
    dump(place, id_, place.start(id_))
    waiting = place.placeholder(id_)
    node.run("restore", id_, "--into", waiting.id)
    os.kill(int(children(waiting.pid)[0]), signal.SIGSEGV)
    os.kill(int(children(waiting.pid)[0]), signal.SIGKILL)
    assert waiting.wait() in (128 + signal.SIGKILL, 128 + signal.SIGSEGV)


def test_a_placeholder_is_filled_by_the_agent_once(place: Place) -> None:
    """It names the id; the agent restores into it unasked, and a refused one starts cold."""
    node = place.node
    node.start_agent(RESTORE_PLACEHOLDERS="true")
    id_ = node.new_id()
    dump(place, id_, place.start(id_))
    waiting = place.placeholder(id_)
    until("restored worker", lambda: (waiting.state() or {}).get("restored"))
    waiting.counts_on()
    waiting.ask_exit(0)
    assert waiting.wait() == 0
    cold = ("/bin/sh", "-c", "echo started cold; exec sleep 1000")
    small = place.placeholder(id_, "--", *cold, memory=6 * MIB)
    until("cold start", lambda: "started cold" in small.log())
    assert "restore.memory_limit" in node.run("events").stdout
