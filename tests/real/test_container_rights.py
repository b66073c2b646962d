"""A container's rights and reach: what a restore must not lend to it, and what its worker must not bring."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from hibernode.artifact.manifest import Manifest, parse_manifest
from hibernode.discovery.container_look import pid_namespace, pids
from hibernode.host import procfs
from tests.real.boxes import Box, Kit
from tests.real.node import Node, until
from tests.real.places import Place, differences, placed, refused, snapshot

pytestmark = [pytest.mark.containers, pytest.mark.criu]

INCOMPATIBLE = 4
CAP_SYS_PTRACE, CAP_SYS_NICE = 1 << 19, 1 << 23
NODE_PROC = [("/proc", "/host/proc", "rw")]
ADDRESS, NEW_ADDRESS = "10.99.88.77", "10.99.88.78"
SETRESUID = {"x86_64": 117, "aarch64": 147}[platform.machine()]

WAITS = """
import os, time
open("/srv/works", "w").close()
while not os.path.exists(os.environ["DYN_CHECKPOINT_SIGNAL_FILE"]) and not os.path.exists("/srv/exit-code"):
    time.sleep(0.02)
"""
RIGHTS = f"""
import ctypes, os, signal, threading, time
def thread():
    assert ctypes.CDLL(None).syscall({SETRESUID}, 33, 33, 33) == 0
    entered.set()
    time.sleep(1000)
entered = threading.Event()
ready = os.pipe()
child = os.fork()
if child == 0:
    os.setgroups([5])
    os.write(ready[1], b"x")
    time.sleep(1000)
os.read(ready[0], 1)
threading.Thread(target=thread, daemon=True).start()
entered.wait()
{WAITS}
os.kill(child, signal.SIGKILL)
"""
"""The root's thread is another user, its child of other groups."""

UDP = f"""
import socket, time
bound, connected = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in "ab")
while True:
    try:
        bound.bind(("{ADDRESS}", 5000))
        break
    except OSError:
        time.sleep(0.02)
connected.bind(("127.0.0.1", 0))
{WAITS}
"""
PYTHON = "/usr/bin/python3"


@pytest.fixture
def place(node: Node, kit: Kit, request: pytest.FixtureRequest) -> Iterator[Place]:
    """Give a place for boxes of runc, of the image that the test's parameter names."""
    with placed(node, kit, "runc", getattr(request, "param", "busybox")) as here:
        yield here


debian = pytest.mark.parametrize("place", ["debian"], indirect=True)


def frozen(place: Place, *, code: str = "", **more: Any) -> str:
    """Dump a worker, or some code; returns its id."""
    id_ = place.node.new_id()
    box = place.start(id_, argv=(PYTHON, "-c", code) if code else (), **more)
    if code:
        until("work", (box.root / "srv/works").exists)
    else:
        box.counts_on()
    place.freeze(box)
    return id_


def manifest_of(place: Place, id_: str) -> Manifest:
    """Read what was noted of a dump."""
    return parse_manifest((place.node.store / id_ / "manifest.json").read_bytes())


@contextmanager
def untouched(box: Box) -> Iterator[None]:
    """See that nothing of a waiting container is another after the block."""
    before = snapshot(box)
    yield
    until("container as it was", lambda: not differences(before, snapshot(box)))


def running(box: Box) -> list[int]:
    """List the processes that see a container's pids, its init left out."""
    inside = pid_namespace(box.pid)
    found = []
    for pid in pids():
        with suppress(OSError):
            if pid != box.pid and pid_namespace(pid) == inside:
                found.append(pid)
    return found


def add_address(box: Box, address: str) -> None:
    """Give a container's network an address."""
    enter = ["nsenter", "--target", str(box.pid), "--net", "ip"]
    for words in (["link", "set", "lo", "up"], ["address", "add", f"{address}/32", "dev", "lo"]):
        subprocess.run([*enter, *words], check=True, timeout=60, capture_output=True)


# the marker ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("odd", [False, True], ids=["nothing there", "a link there"])
def test_a_marker_does_not_escape_by_the_nodes_proc(place: Place, odd: bool) -> None:
    """A container that has it mounted names a path behind /proc/PID/root; it leads nowhere."""
    target = place.node.base / "escaped"
    if odd:
        target.symlink_to("elsewhere")
    env = {"DYN_RESTORE_MARKER_FILE": f"/host/proc/{os.getpid()}/root{target}"}
    id_ = frozen(place, env=env, more_binds=NODE_PROC)
    waiting = place.placeholder(id_, more_binds=NODE_PROC)
    before = (waiting.root / "srv").stat().st_mtime_ns
    result = place.node.run("restore", id_, "--into", waiting.id, check=1)
    refused(result, "cannot write the restore marker", "as it was")
    assert (waiting.root / "srv").stat().st_mtime_ns == before
    assert (target.is_symlink(), os.path.lexists(target)) == (odd, odd)


# who can look into CRIU ---------------------------------------------------------------------------------


def test_a_container_that_may_trace_is_refused(place: Place) -> None:
    """Its init needs not have the capability: by exec it, or what is started beside it, may get it."""
    id_ = frozen(place)
    waiting = place.placeholder(id_, bounding=("CAP_SYS_PTRACE",))
    status = procfs.read_status(waiting.pid)
    assert (status.cap_prm & CAP_SYS_PTRACE, status.cap_bnd & CAP_SYS_PTRACE) == (0, CAP_SYS_PTRACE)
    with untouched(waiting):
        result = place.node.run("restore", id_, "--into", waiting.id, check=INCOMPATIBLE)
        refused(result, "restore.ptrace", "SYS_PTRACE", "as it was")


def test_a_process_that_was_started_in_it_and_may_trace_is_refused(place: Place) -> None:
    """When it has ended, the container takes the worker."""
    id_ = frozen(place)
    waiting = place.placeholder(id_)
    enter = ["nsenter", "--target", str(waiting.pid), "--pid", "sleep", "1000"]
    with subprocess.Popen(enter) as process:
        try:
            until("a process in it", lambda: running(waiting))
            result = place.node.run("restore", id_, "--into", waiting.id, "--dry-run", check=INCOMPATIBLE)
            assert "restore.ptrace" in result.stdout + result.stderr
        finally:
            for stat in reversed(procfs.tree(process.pid)):
                os.kill(stat.pid, signal.SIGKILL)
    until("its end", lambda: not running(waiting))
    place.thaw(id_, waiting)
    assert waiting.counts_on()["restored"] is True


# what the worker brings ---------------------------------------------------------------------------------


@debian
def test_the_rights_of_all_threads_are_noted(place: Place) -> None:
    """As the images give them back: a thread's and a child's beside those of the root."""
    id_ = frozen(place, code=RIGHTS, bounding=("CAP_SYS_NICE",))
    manifest = manifest_of(place, id_)
    assert manifest.rights is not None
    assert manifest.rights.uids == (0, 33)
    assert 5 in manifest.rights.gids
    assert manifest.rights.capabilities & ~manifest.process.cap_eff == CAP_SYS_NICE
    assert (manifest.rights.no_new_privs, manifest.rights.seccomp) == (True, True)
    waiting = place.placeholder(id_)
    with untouched(waiting):
        result = place.node.run("restore", id_, "--into", waiting.id, check=INCOMPATIBLE)
        refused(result, "restore.privileges", f"capabilities {CAP_SYS_NICE:#x}")


def test_root_is_not_restored_where_the_init_is_not(place: Place) -> None:
    """The container has the same capabilities to give, but its security context says another user."""
    id_ = frozen(place)
    waiting = place.placeholder(id_, uid=1000)
    with untouched(waiting):
        result = place.node.run("restore", id_, "--into", waiting.id, check=INCOMPATIBLE)
        refused(result, "restore.privileges", "user 0", "group 0")


@debian
def test_a_udp_socket_at_the_old_pods_address_is_refused(place: Place) -> None:
    """Named by the gate, not by CRIU; where the address is, the worker goes on."""
    id_ = place.node.new_id()
    box = place.start(id_, argv=(PYTHON, "-c", UDP))
    add_address(box, ADDRESS)
    until("work", (box.root / "srv/works").exists)
    place.freeze(box)
    waiting = place.placeholder(id_)
    add_address(waiting, NEW_ADDRESS)
    with untouched(waiting):
        result = place.node.run("restore", id_, "--into", waiting.id, check=INCOMPATIBLE)
        refused(result, "restore.listening", f"missing: {ADDRESS}")
    add_address(waiting, ADDRESS)
    place.thaw(id_, waiting)
