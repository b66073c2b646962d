"""``hibernode doctor`` beside a real containerd with pods, and beside a runtime that lies about them."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hibernode.cri_checks import check_containers
from hibernode.discovery.containers import Container, containers
from hibernode.host.cri import Cri
from hibernode.workload import Verdict
from tests.real import images
from tests.real.boxes import Kit
from tests.real.boxes_cri import CriRuntime
from tests.real.boxes_wire import NODE, POD
from tests.real.node import Node
from tests.unit.cri_kit import FakeCri, told

pytestmark = pytest.mark.containers


@pytest.fixture
def runtime(kit: Kit) -> Iterator[CriRuntime]:
    """Give a containerd that makes pods."""
    with CriRuntime(kit) as runtime:
        yield runtime


def rows(node: Node, socket: Path) -> dict[str, dict[str, str]]:
    """Run the doctor; return its rows on the container runtime by their name."""
    done = node.run("doctor", "-o", "json", check=None, RUNTIME_SOCKET=str(socket))
    assert done.stderr == ""
    found = {each["check"]: each for each in json.loads(done.stdout)["findings"]}
    return {name: found[name] for name in ("node.cri", "node.containers")}


def of_kit(kit: Kit) -> list[Container]:
    """List the containers of this kit's pods: other tests have some at the same time."""
    return [each for each in containers() if f"/cri-{kit.token}/" in each.ref.cgroup]


def test_a_real_runtime_agrees_with_proc(node: Node, kit: Kit, runtime: CriRuntime) -> None:
    """Two containers of one pod, one of another, one that has ended; the sandboxes do not count."""
    image = images.busybox()
    first = runtime.run([images.STATIC_WORKER], image=image, name="main")
    runtime.run([images.STATIC_WORKER], image=image, name="sidecar", new_pod=False)
    runtime.run([images.STATIC_WORKER], image=image, name="other")
    ended = runtime.run([images.STATIC_WORKER], image=image, name="ended")
    ended.kill()
    ended.wait()
    with Cri(runtime.daemon.socket) as cri:
        listed = {each.id: each for each in cri.node().containers}
        row = check_containers(cri, lambda: of_kit(kit))
    assert listed[first.id].pid == first.pid
    assert listed[first.id].pod_uid == first.pod.uid  # type: ignore[attr-defined]
    assert listed[first.id].name == "main"
    assert listed[ended.id].state == "exited"
    assert (row.verdict, row.found) == (Verdict.OK, "3 running")

    found = rows(node, runtime.daemon.socket)
    assert found["node.cri"]["verdict"] == "ok"
    assert found["node.cri"]["found"].startswith("containerd ")
    assert found["node.containers"]["verdict"] in ("ok", "warn")  # other tests' pods are unknown here
    assert first.id[:12] not in found["node.containers"]["found"]


@pytest.mark.parametrize(("mode", "verdict"), [(POD, "warn"), (NODE, "ok")], ids=["the pod's", "the node's"])
def test_a_shared_pid_namespace_is_named(kit: Kit, runtime: CriRuntime, mode: int, verdict: str) -> None:
    """Such a container cannot be dumped; those with hostPID are the node's own tools and no worry."""
    alone = runtime.run([images.STATIC_WORKER], image=images.busybox(), name="alone")
    runtime.pid_mode = mode
    shared = runtime.run([images.STATIC_WORKER], image=images.busybox(), name="sharing")
    with Cri(runtime.daemon.socket) as cri:
        row = check_containers(cri, lambda: of_kit(kit))
    assert row.verdict.value == verdict
    assert f"{shared.id[:12]} (sharing)" in row.found
    assert "cannot be dumped" in row.found
    assert alone.id[:12] not in row.found


def test_a_runtime_that_lies_fails_with_both_values(
    node: Node, kit: Kit, runtime: CriRuntime, tmp_path: Path
) -> None:
    """The pid of another container, of a process in the container, of none, and a container that is not."""
    box = runtime.run([images.PYTHON_WORKER], image=images.debian(), name="main")
    other = runtime.run([images.STATIC_WORKER], image=images.busybox(), name="other")
    uid = box.pod.uid  # type: ignore[attr-defined]
    absent = kit.new_id()
    told_pids = {"main": told(box.id, other.pid, "main", uid), "absent": told(absent, box.pid, "absent")}
    path = tmp_path / "cri.sock"
    with FakeCri(path, *told_pids.values(), told(other.id, other.pid, "other")):
        row = rows(node, path)["node.containers"]
    assert (row["verdict"], row["reason"]) == ("fail", "CriMismatch")
    assert f"{box.id[:12]} (main): pid {other.pid} by CRI, {box.pid} in /proc" in row["found"]
    assert f"{absent[:12]} (absent): pid {box.pid} by CRI, not in /proc" in row["found"]
    assert f"{other.id[:12]} (other)" not in row["found"]
    assert row["remedy"]


def test_another_process_of_the_container_is_not_its_init(
    kit: Kit, runtime: CriRuntime, tmp_path: Path
) -> None:
    """It shares the container's cgroup and pid namespace, but is no container of a shared one."""
    box = runtime.run([images.PYTHON_WORKER, "--socketpair"], image=images.debian(), name="main")
    box.counts_on()
    tasks = Path(f"/proc/{box.pid}/task/{box.pid}/children").read_text().split()
    child = int(tasks[0])
    path = tmp_path / "cri.sock"
    with FakeCri(path, told(box.id, child, "main")), Cri(path) as cri:
        row = check_containers(cri, lambda: of_kit(kit))
    assert row.verdict is Verdict.FAIL
    assert f"pid {child} by CRI, {box.pid} in /proc" in row.found


def test_a_socket_that_says_nothing_holds_the_doctor_up_for_seconds_only(node: Node, tmp_path: Path) -> None:
    """Dead, or with somebody behind it who never accepts: a warning, and the other rows all the same."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "cri.sock"))
        dead = rows(node, tmp_path / "cri.sock")
        listener.listen(8)
        begin = time.monotonic()
        silent = rows(node, tmp_path / "cri.sock")
        assert time.monotonic() - begin < 60
    assert [dead[name]["verdict"] for name in dead] == ["warn", "skip"]
    assert "Connection refused" in dead["node.cri"]["found"]
    assert [silent[name]["verdict"] for name in silent] == ["warn", "skip"]
    assert "has not answered Version" in silent["node.cri"]["found"]


def test_the_doctor_needs_no_runtime(node: Node, tmp_path: Path) -> None:
    """A socket that was named but is not there is a warning with the path, never a failure."""
    found = rows(node, tmp_path / "absent.sock")
    assert [each["verdict"] for each in found.values()] == ["warn", "skip"]
    assert str(tmp_path / "absent.sock") in found["node.cri"]["found"]
