"""What kinds of containers are frozen and thawed: trees, sockets, bare images, limits, foreign inits."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hibernode.host import procfs
from hibernode.preflight.facts import CAP_SYS_RESOURCE
from tests.real import images
from tests.real.boxes import Box, Kit
from tests.real.node import Node, free_port, read_json, state_letter, until
from tests.real.places import (
    MIB,
    Place,
    children,
    descendants,
    differences,
    inner_pid,
    placed,
    refused,
    restored_root,
    snapshot,
)

pytestmark = [pytest.mark.containers, pytest.mark.criu]

PYTHON = "/usr/bin/python3"


@pytest.fixture
def place(node: Node, kit: Kit, request: pytest.FixtureRequest) -> Iterator[Place]:
    """Give a place for Debian boxes with runc, or with the runtime that the test's parameter names."""
    with placed(node, kit, getattr(request, "param", "runc")) as here:
        yield here


def living(box: Box) -> set[int]:
    """List the pids in the worker's own namespace of all that lives below a container's init; no zombies."""
    below = descendants(box.pid)
    assert [state_letter(pid) for pid in below if state_letter(pid) in "ZX"] == []
    return {inner_pid(pid) for pid in below}


SETS = {
    "three processes": ("--tree",),
    "a socket pair": ("--socketpair",),
    "a listening port": ("--listen", "PORT"),
    "a connection": ("--pair",),
    "all of them": ("--tree", "--socketpair", "--pair", "--listen", "PORT"),
}


@pytest.mark.parametrize(
    ("place", "what"), [*(("runc", name) for name in SETS), ("cri", "all of them")], indirect=["place"]
)
def test_a_tree_lives_on(place: Place, what: str) -> None:
    """Every process counts on under its pid, sockets still join them, and the port answers there."""
    port = free_port()
    id_ = place.node.new_id()
    box = place.start(id_, *(str(port) if word == "PORT" else word for word in SETS[what]))
    before = box.counts_on()
    place.freeze(box)
    waiting = place.placeholder(id_)
    place.thaw(id_, waiting)
    after = waiting.counts_on()
    assert after["restored"] is True
    assert after["pids"] == before["pids"]
    assert living(waiting) == {1, *before["pids"]}
    assert all(now > then for now, then in zip(after["children"], before["children"], strict=True))
    for kind in ("unix", "tcp"):
        assert after[kind] > before[kind] or before[kind] == after[kind] == -1
    if "PORT" in SETS[what]:
        assert waiting.ask(port) >= after["count"]
    waiting.ask_exit(3)
    assert waiting.wait() == 3


def test_a_process_that_a_signal_had_stopped_stays_so(place: Place) -> None:
    """It would not answer CRIU while its cgroup is frozen too; the others go on, and it does when told to."""
    id_ = place.node.new_id()
    box = place.start(id_, "--tree")
    before = box.counts_on()
    stopped = descendants(box.pid)[-1]
    inside = inner_pid(stopped)
    os.kill(stopped, signal.SIGSTOP)
    until("stop", lambda: state_letter(stopped) == "T")
    place.freeze(box)
    waiting = place.placeholder(id_)
    place.thaw(id_, waiting)
    after = waiting.counts_on()
    assert after["pids"] == before["pids"]
    (back,) = (pid for pid in descendants(waiting.pid) if inner_pid(pid) == inside)
    assert state_letter(back) == "T"
    os.kill(back, signal.SIGCONT)
    until("the process to go on", lambda: state_letter(back) in "SR")


BARE = ("--state", "/state.json", "--exit-file", "/exit-code", "--shm", "/shared")


def test_an_image_with_nothing_in_it_is_enough(place: Place) -> None:
    """One static program is the image: no shell, no /tmp, no /run, nothing used in /dev/shm."""
    program = images.static_worker()
    bare: dict[str, Any] = {
        "image": images.empty(program),
        "env": {"DYN_CHECKPOINT_READY_FILE": "/ready", "DYN_RESTORE_MARKER_FILE": "/restored"},
    }
    id_ = place.node.new_id()
    box = place.start(id_, argv=(f"/{program.name}", *BARE), **bare)
    before = box.counts_on("/state.json")
    place.freeze(box)
    waiting = place.placeholder(id_, **bare)
    place.thaw(id_, waiting)
    after = waiting.counts_on("/state.json")
    assert after["count"] > before["count"]
    assert after["shm"] > before["shm"]
    assert after["restored"] is True
    waiting.ask_exit(5, "/exit-code")
    assert waiting.wait() == 5


def test_a_read_only_root_is_thawed_in_another(place: Place) -> None:
    """What the worker writes is a mount; nothing of the root goes along, and nothing is written there."""
    more: dict[str, Any] = {
        "readonly_root": True,
        "more_binds": [(writable(place.node, "srv"), "/srv", "rw")],
    }
    id_ = place.node.new_id()
    box = place.start(id_, **more)
    before = box.counts_on()
    assert before["files"] == "EROFS"
    place.freeze(box)
    manifest = read_json(place.node.store / id_ / "manifest.json") or {}
    assert [diff["mount_point"] for diff in manifest["container"]["diffs"]] == ["/dev/shm"]
    waiting = place.placeholder(id_, **more)
    place.thaw(id_, waiting)
    after = waiting.counts_on()
    assert after["count"] > before["count"]
    assert after["shm"] > before["count"]
    assert after["restored"] is True
    waiting.ask_exit(0)
    assert waiting.wait() == 0


def writable(node: Node, name: str, uid: int = 0) -> Path:
    """Make a directory of the node that a container may write to."""
    path = node.base / name
    path.mkdir()
    os.chown(path, uid, uid)
    node.base.chmod(0o755)
    return path


def test_a_worker_that_is_not_root_keeps_its_user(place: Place) -> None:
    """Its marker is its own; an agent without CAP_SYS_RESOURCE cannot read its limits and says so first."""
    uid = 1000
    srv = writable(place.node, "srv", uid)
    place.node.signals.mkdir(mode=0o1777)
    place.node.signals.chmod(0o1777)
    id_ = place.node.new_id()
    silent = {"DYN_CHECKPOINT_SIGNAL_FILE": ""}
    box = place.start(id_, uid=uid, env=silent, more_binds=[(srv, "/srv", "rw")])
    before = box.counts_on()
    assert before["uid"] == uid
    if not procfs.read_status(os.getpid()).cap_eff >> CAP_SYS_RESOURCE & 1:
        result = place.node.run("checkpoint", "--container", box.id, check=4)
        refused(result, "tree.limits", f"uid {uid}", "CAP_SYS_RESOURCE")
        assert place.node.final_name(id_) == "absent"
        box.counts_on()
        return
    place.node.run("checkpoint", "--container", box.id)
    box.kill()
    waiting = place.placeholder(id_, uid=uid, more_binds=[(srv, "/srv", "rw")])
    place.thaw(id_, waiting)
    after = waiting.counts_on()
    assert after["restored"] is True
    assert (srv / "restored").stat().st_uid == uid
    same = ("uid", "capabilities", "no_new_privs", "seccomp")
    assert {name: after[name] for name in same} == {name: before[name] for name in same}


def test_the_limits_of_the_placeholder_hold_the_worker(place: Place) -> None:
    """It is counted in the placeholder's cgroup, is bounded by it, and ends with the container."""
    id_ = place.node.new_id()
    box = place.start(id_, "--tree", "--mib", "16")
    box.counts_on()
    place.freeze(box)
    waiting = place.placeholder(id_, memory=100 * MIB)
    tasks = cgroup_file(waiting, "pids.max").with_name("pids.current")
    alone = int(tasks.read_text())
    root = place.thaw(id_, waiting)
    waiting.counts_on()
    threads = sum(len(os.listdir(f"/proc/{pid}/task")) for pid in [root, *descendants(root)])
    assert int(tasks.read_text()) == alone + threads
    used = cgroup_file(waiting, "memory.usage_in_bytes", "memory.current")
    assert 16 * MIB < int(used.read_text()) < 100 * MIB
    for pid in [root, *descendants(root)]:
        assert Path(f"/proc/{pid}/cgroup").read_text() == waiting.cgroup()
    tree = [root, *descendants(root)]
    waiting.kill()
    assert waiting.wait() == 128 + signal.SIGKILL
    until("end of the restored tree", lambda: not any(map(state_letter, tree)))
    until(
        "noted end",
        lambda: place.node.restored_phase(id_, "exited") or place.node.restored_phase(id_, "lost"),
    )


def test_memory_that_forked_processes_share_fits_where_it_did(place: Place) -> None:
    """It is in the image once for each process, more than the limit; shared again it needs no more room."""
    limit = 128 * MIB
    id_ = place.node.new_id()
    box = place.start(id_, "--tree", "--mib", "40", memory=limit)
    box.counts_on()
    place.freeze(box)
    images_dir = place.node.store / id_ / "images"
    assert sum(path.stat().st_size for path in images_dir.glob("pages-*")) > limit
    waiting = place.placeholder(id_, memory=limit)
    place.thaw(id_, waiting)
    waiting.counts_on()
    used = cgroup_file(waiting, "memory.usage_in_bytes", "memory.current")
    assert int(used.read_text()) < 80 * MIB
    lower = place.placeholder(id_, memory=limit - MIB)
    refused(place.node.run("restore", id_, "--into", lower.id, check=4), "restore.memory_limit")


def cgroup_file(box: Box, *names: str) -> Path:
    """Find a file of a container's own cgroups, by the name it has in either version."""
    return next(path / name for path in box.cgroup_dirs() for name in names if (path / name).exists())


def test_a_worker_is_dumped_twice_and_its_copy_again(place: Place) -> None:
    """It runs on behind each dump; the restored copy is dumped by its pid and restored once more."""
    node = place.node
    id_ = node.new_id()
    silent = {"DYN_CHECKPOINT_SIGNAL_FILE": ""}
    box = place.start(id_, "--tree", env=silent)
    first = box.counts_on()
    node.run("checkpoint", "--container", box.id)
    box.counts_on()
    node.run("checkpoint", "--container", box.id, "--replace")
    box.counts_on()
    box.kill()
    waiting = place.placeholder(id_, env=silent)
    root = place.thaw(id_, waiting)
    second = waiting.counts_on()
    assert second["count"] > first["count"]
    node.run("checkpoint", "--pid", root, "--replace")
    assert restored_root(waiting) == root
    waiting.counts_on()
    waiting.kill()
    again = place.placeholder(id_, env=silent)
    place.thaw(id_, again)
    third = again.counts_on()
    assert third["count"] > second["count"]
    assert third["pids"] == first["pids"]
    assert living(again) == {1, *first["pids"]}
    again.ask_exit(9)
    assert again.wait() == 9


@pytest.mark.parametrize("image", ["debian", "busybox"])
def test_a_foreign_sleep_is_placeholder_enough(node: Node, kit: Kit, image: str) -> None:
    """The container ends with the worker's exit code, though its init is a program that knows nothing."""
    with placed(node, kit, "runc", image) as place:
        id_ = node.new_id()
        box = place.start(id_)
        box.counts_on()
        place.freeze(box)
        waiting = place.start(id_, argv=("/bin/sleep", "infinity"))
        place.thaw(id_, waiting)
        assert waiting.counts_on()["restored"] is True
        waiting.ask_exit(42)
        assert waiting.wait() == 42


def test_a_refused_placeholder_starts_cold(place: Place) -> None:
    """Its command runs, in the container as it was."""
    node = place.node
    id_ = node.new_id()
    box = place.start(id_)
    box.counts_on()
    place.freeze(box)
    cold = ("/bin/sh", "-c", "echo cold start in $(ls /srv | wc -l) files; exec sleep 1000")
    small = place.placeholder(id_, "--", *cold, memory=4 * MIB)
    refused(node.run("restore", id_, "--into", small.id, check=4), "restore.memory_limit")
    until("cold start", lambda: "cold start in 0 files" in small.log())
    assert small.alive()


CATCHER = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(23))
open("/srv/state.json", "w").write('{"count": 1}')
while True: time.sleep(0.05)
"""


def test_a_signal_to_the_placeholder_reaches_the_worker(place: Place) -> None:
    """The pod is told to end by SIGTERM to its init; the worker hears it and ends as it likes."""
    id_ = place.node.new_id()
    box = place.start(id_, argv=(PYTHON, "-c", CATCHER), env={"DYN_CHECKPOINT_SIGNAL_FILE": ""})
    until("worker", box.state)
    place.node.run("checkpoint", "--container", box.id)
    waiting = place.placeholder(id_)
    place.thaw(id_, waiting)
    waiting.kill(signal.SIGTERM)
    assert waiting.wait() == 23


def test_a_placeholder_with_helpers_on_the_pids_is_refused(place: Place) -> None:
    """FC-08: living processes beside the init are named, and left alone."""
    id_ = place.node.new_id()
    box = place.start(id_, "--tree")
    before = box.counts_on()
    place.freeze(box)
    # Enough of them to be on the image's pids, whatever number the first one gets.
    script = "for i in 1 2 3 4 5 6 7 8; do sleep 1000 & done; exec sleep 1000"
    waiting = place.start(id_, argv=("/bin/sh", "-c", script))
    until("helpers", lambda: len(children(waiting.pid)) == 8)
    helpers = children(waiting.pid)
    until("sleep", lambda: all(Path(f"/proc/{pid}/comm").read_text() == "sleep\n" for pid in helpers))
    until("sleep", lambda: Path(f"/proc/{waiting.pid}/comm").read_text() == "sleep\n")
    assert {inner_pid(int(pid)) for pid in helpers} & set(before["pids"])
    was = snapshot(waiting)
    result = place.node.run("restore", id_, "--into", waiting.id, check=4)
    refused(result, "restore.placeholder", *helpers)
    assert differences(was, snapshot(waiting)) == {}


def test_a_placeholder_whose_helpers_have_ended_is_taken(place: Place) -> None:
    """FC-08: a foreign init does not reap, so that zombies sit on the pids of the image; no matter."""
    id_ = place.node.new_id()
    box = place.start(id_, "--tree")
    before = box.counts_on()
    place.freeze(box)
    script = "sleep 0.1 & sleep 0.1 & sleep 0.1 & exec sleep 1000"
    waiting = place.start(id_, argv=("/bin/sh", "-c", script))
    until("zombies", lambda: [state_letter(int(pid)) for pid in children(waiting.pid)] == ["Z"] * 3)
    until("sleep", lambda: Path(f"/proc/{waiting.pid}/comm").read_text() == "sleep\n")
    root = place.thaw(id_, waiting)
    after = waiting.counts_on()
    assert after["pids"] == before["pids"]
    assert {inner_pid(pid) for pid in [root, *descendants(root)]} == {1, *before["pids"]}


RENAMER = """
import json, os, sys, time
held = []
for top in sys.argv[1:]:
    def made(name):
        fd = os.open(f"{top}/{name}", os.O_RDWR | os.O_CREAT)
        os.write(fd, f"{top}/{name}".encode())
        held.append(fd)
        return f"{top}/{name}"
    os.rename(made("before"), f"{top}/after")
    os.link(made("lost"), f"{top}/other")
    os.unlink(f"{top}/lost")
    os.unlink(made("gone"))
count = 0
while True:
    count += 1
    said = [os.pread(fd, 100, 0).decode() for fd in held]
    same = [os.path.samestat(os.fstat(fd), os.stat(f"{top}/{name}"))
            for top, fds in zip(sys.argv[1:], (held[:2], held[3:5]))
            for fd, name in zip(fds, ("after", "other"))]
    with open("/srv/state.new", "w") as file:
        json.dump({"count": count, "said": said, "same": same}, file)
    os.rename("/srv/state.new", "/srv/state.json")
    time.sleep(0.02)
"""


def test_open_files_that_lost_their_names_come_back(place: Place) -> None:
    """FC-45: renamed, unlinked with another link, unlinked for good; in the root and in /dev/shm."""
    id_ = place.node.new_id()
    argv = (PYTHON, "-c", RENAMER, "/srv", "/dev/shm")
    box = place.start(id_, argv=argv, env={"DYN_CHECKPOINT_SIGNAL_FILE": ""})
    before = box.counts_on()
    place.node.run("checkpoint", "--container", box.id)
    assert box.counts_on()["same"] == [True] * 4
    names = [{path.name for path in (box.root / top).iterdir()} for top in ("srv", "dev/shm")]
    assert not any(name.startswith(("link_remap", ".hibernode")) for found in names for name in found)
    waiting = place.placeholder(id_)
    place.thaw(id_, waiting)
    after = waiting.counts_on()
    assert after["said"] == before["said"]
    assert after["same"] == [True] * 4
    assert not [name for name in os.listdir(waiting.root / "srv") if name.startswith("link_remap")]
