"""The main job with containers: frozen from the node, thawed in a placeholder, with every runtime."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hibernode.placeholder import find_placeholder
from tests.real import images
from tests.real.boxes import Box, Kit, Runtime
from tests.real.node import Node, until

pytestmark = [pytest.mark.containers, pytest.mark.criu]

KINDS = ("runc", "crun", "ctr", "cri")
PROFILE = Path(__file__).parents[2] / "seccomp" / "block-iouring.json"
PLACEHOLDER = "/hibernode-placeholder"
MIB = 1 << 20


@dataclass
class Place:
    """A node, a runtime on it, and the boxes of a test."""

    node: Node
    runtime: Runtime
    image: Path
    worker: str

    def start(self, id_: str, *args: str, argv: tuple[str, ...] = (), **more: Any) -> Box:
        """Start a worker, or whatever ``argv`` says, with the mounts and the contract of a worker."""
        self.node.signals.mkdir(exist_ok=True)
        env = {
            "DYN_CHECKPOINT_HASH": id_,
            "DYN_CHECKPOINT_SIGNAL_FILE": f"/signals/{id_}.done",
            "DYN_CHECKPOINT_READY_FILE": "/srv/ready",
            "DYN_RESTORE_MARKER_FILE": "/srv/restored",
        }
        more.setdefault(
            "binds", [(self.node.signals, "/signals", "rw"), (find_placeholder(), PLACEHOLDER, "ro")]
        )
        more.setdefault("seccomp", PROFILE)
        more.setdefault("memory", 256 * MIB)
        return self.runtime.run(argv or (self.worker, *args), image=self.image, env=env, **more)

    def placeholder(self, id_: str, *cold: str, **more: Any) -> Box:
        """Start a container that waits for the worker."""
        box = self.start(id_, argv=(PLACEHOLDER, *cold), **more)
        until("listening placeholder", lambda: "hibernode-ph" in Path(f"/proc/{box.pid}/comm").read_text())
        return box


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Give each runtime in turn."""
    return str(request.param)


@pytest.fixture
def place(node: Node, kit: Kit, kind: str, request: pytest.FixtureRequest) -> Iterator[Place]:
    """Give a place for the image that the test's parameter names; Debian without one."""
    name = getattr(request, "param", "debian")
    image, worker = {
        "debian": (images.debian, images.PYTHON_WORKER),
        "busybox": (images.busybox, images.STATIC_WORKER),
    }[name]
    with kit.runtime(kind) as runtime:
        yield Place(node, runtime, image(), worker)


def tree(root: Path) -> dict[str, tuple[object, ...]]:
    """Describe the files that a worker has left: type, mode, owner, time, size or target, content."""
    found: dict[str, tuple[object, ...]] = {}
    for top in ("etc/box", "opt", "srv/box"):
        for directory, names, files in os.walk(root / top):
            for name in [*names, *files]:
                path = Path(directory) / name
                seen = path.lstat()
                kind = stat.S_IFMT(seen.st_mode)
                what: object = os.readlink(path) if stat.S_ISLNK(kind) else ""
                if stat.S_ISREG(kind):
                    what = path.read_bytes()
                links = seen.st_nlink if not stat.S_ISDIR(kind) else 0
                time = seen.st_mtime_ns
                found[str(path.relative_to(root))] = (
                    seen.st_mode,
                    seen.st_uid,
                    seen.st_gid,
                    time,
                    what,
                    links,
                )
    return found


def dump(place: Place, id_: str, box: Box) -> None:
    """Have the agent dump a worker that has said that it is ready; it ends as the contract says."""
    answer = place.node.done(id_)
    assert answer["success"] is True, (answer, place.node.tail(), box.log())
    assert box.wait() == 0, box.log()


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
    same = ("pid", "proc_self", "pgrp", "uid", "seccomp", "no_new_privs", "capabilities", "hostname")
    assert {name: after[name] for name in same} == {name: before[name] for name in same}
    assert after["proc_self"] == str(after["pid"]) == "1"
    assert after["seccomp"] == 2
    assert after["shm"] > frozen
    assert tree(waiting.root) == files
    root = next(int(pid) for pid in children(waiting.pid))
    assert Path(f"/proc/{root}/cgroup").read_text() == waiting.cgroup()
    assert mounts_of(root) == mounts_of(waiting.pid)
    until("ticks in the placeholder's log", lambda: "tick" in waiting.log())
    waiting.ask_exit(7)
    assert waiting.wait() == 7


def children(pid: int) -> list[str]:
    """List the children of a process."""
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def mounts_of(pid: int) -> list[tuple[str, ...]]:
    """List what is mounted where and how, without the kernel's numbers."""
    lines = Path(f"/proc/{pid}/mountinfo").read_text().splitlines()
    return sorted((*line.split()[3:6], line.split(" - ")[1].split()[0]) for line in lines)


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
    """It names the id; the agent restores into it unasked, and a refused one starts cold and is left alone."""
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
