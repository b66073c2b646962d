"""TCP connections around a dump: kept inside the tree, closed to outside, never cut by a CRIU that died."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hibernode.criu.runner import find_criu
from hibernode.host import netlock, nftables
from tests.real.node import Node, free_port, state_letter, until

pytestmark = pytest.mark.criu

PAIR = Path(__file__).with_name("pair.py")


class Pair:
    """The worker of ``pair.py``."""

    def __init__(self, base: Path, *args: str) -> None:
        self.out = base / "out"
        self.port = free_port()
        self.process = subprocess.Popen(
            [sys.executable, PAIR, self.out, str(self.port), *args],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        until("pair", self.out.exists)

    @property
    def pid(self) -> int:
        """Its root's pid."""
        return self.process.pid

    def flows(self) -> None:
        """Wait until data has gone through the connection from now on."""
        before = int(self.out.read_text())
        until("data on the connection", lambda: int(self.out.read_text()) > before + 1000)

    def end(self) -> None:
        """End both processes, and wait for what the kernel still says on their connection."""
        links = [os.readlink(fd) for fd in Path(f"/proc/{self.pid}/fd").iterdir()]
        inodes = {link[8:-1] for link in links if link.startswith("socket:[")}
        ports = {line[1] for line in _tcp() if line[9] in inodes}
        os.killpg(self.pid, signal.SIGKILL)
        self.process.wait()
        until("end of both", lambda: not _group(self.pid))
        until("end of the connection", lambda: not _ends(ports))


TIME_WAIT = "06"


def _tcp() -> list[list[str]]:
    """List the TCP sockets: slot, local and remote address, state, ..., inode as the tenth field."""
    return [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]


def _ends(addresses: set[str]) -> list[list[str]]:
    """List what there is of connections, but for their memory of themselves."""
    return [line for line in _tcp() if addresses & {line[1], line[2]} and line[3] != TIME_WAIT]


def said(out: Path) -> str:
    """Read what one end says."""
    return out.read_text().strip()


def _group(pgid: int) -> bool:
    try:
        os.killpg(pgid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture
def pair(node: Node) -> Iterator[Pair]:
    """Give a pair with data under way."""
    it = Pair(node.base)
    it.flows()
    yield it
    if _group(it.pid):
        os.killpg(it.pid, signal.SIGKILL)
    it.process.wait()


def stalled_criu(node: Node, needle: str) -> Path:
    """Write a CRIU that is stopped, once, when its log says ``needle``; the deadline finds it there."""
    criu = " ".join(f"'{word}'" for word in find_criu("").argv)
    path, once = node.base / "criu-that-stalls", node.base / "stalled-once"
    path.write_text(
        f"""#!/bin/bash
if [ "$1" != dump ] || [ -e {once} ]; then exec {criu} "$@"; fi
args=("$@")
while [ $# -gt 0 ]; do
  case "$1" in --work-dir) work=$2;; --log-file) log=$2;; esac
  shift
done
( until grep -q '{needle}' "$work/$log" 2>/dev/null; do kill -0 $$ || exit; done
  kill -STOP $$; cp "$work/$log" {node.base}/stalled.log; touch {once} ) &
exec {criu} "${{args[@]}}"
"""
    )
    path.chmod(stat.S_IRWXU)
    return path


def no_table(node: Node) -> None:
    """See that the killed CRIU's nftables table is gone."""
    name = netlock.table_of(node.base / "stalled.log")
    assert name
    with pytest.raises(FileNotFoundError):
        nftables.delete_table(name)


@pytest.mark.parametrize("needle", ["Turning repair on", "Dumping core"])
def test_a_connection_flows_on_after_criu_was_killed_at_the_deadline(
    node: Node, pair: Pair, needle: str
) -> None:
    """A CRIU that hangs while the sockets are in its hands is ended, and no byte is lost or held up."""
    result = node.run(
        "checkpoint", "--pid", pair.pid, "--id", node.new_id(), check=None,
        CRIU_BINARY=str(stalled_criu(node, needle)), CHECKPOINT_DEADLINE_SECONDS="3",
    )  # fmt: skip
    assert "within 3 s" in result.stderr
    assert (node.base / "stalled-once").exists()
    pair.flows()
    assert state_letter(pair.pid) in "SRD"
    no_table(node)
    id_ = node.new_id()
    node.run("checkpoint", "--pid", pair.pid, "--id", id_)
    pair.flows()


def test_a_connection_flows_on_after_the_agent_died_in_a_dump(node: Node, pair: Pair) -> None:
    """FC-26: the next agent ends the CRIU that the dead one left, and the worker never notices."""
    command = subprocess.Popen(
        [Path(sys.executable).with_name("hibernode"), "checkpoint", "--pid", str(pair.pid), "--id",
         node.new_id()],
        env=node.env(CRIU_BINARY=str(stalled_criu(node, "Dumping core"))), stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    until("stalled criu", (node.base / "stalled-once").exists)
    command.kill()
    command.wait()
    node.start_agent()
    until("undone dump", lambda: not list((node.store / ".staging").iterdir()))
    pair.flows()
    assert state_letter(pair.pid) in "SRD"
    no_table(node)


def test_a_connection_inside_the_tree_is_alive_after_the_restore(node: Node, pair: Pair) -> None:
    """Both ends are dumped with what was under way; numbers go on without a gap in the restored copy."""
    id_ = node.new_id()
    node.run("checkpoint", "--pid", pair.pid, "--id", id_)
    assert json.loads((node.store / id_ / "manifest.json").read_text())["tcp"] == "established"
    pair.flows()
    pair.end()
    node.run("restore", id_)
    pair.flows()


def test_what_neither_end_had_sent_yet_arrives_after_the_restore(node: Node) -> None:
    """CRIU sends it when the first end is back; its packets wait until the other one is there too."""
    pair = Pair(node.base, "fill")
    child = pair.out.with_suffix(".child")
    until("the child is full too", child.exists)
    id_ = node.new_id()
    node.run("checkpoint", "--pid", pair.pid, "--id", id_)
    pair.end()
    node.run("restore", id_)
    pair.out.with_suffix(".go").touch()
    until("both ends' data", lambda: {said(pair.out), said(child)} <= {"whole", "damaged"})
    assert (said(pair.out), said(child)) == ("whole", "whole")
    os.killpg(pair.pid, signal.SIGKILL)


def test_a_connection_to_outside_is_closed_and_its_listener_serves_on(node: Node) -> None:
    """The outside client is named in a warning; after the restore a new one is answered."""
    worker = Pair(node.base, "serve")
    try:
        with socket.create_connection(("127.0.0.1", worker.port)) as client:
            client.sendall(b"1")
            assert client.recv(1) == b"1"
            report = json.loads(node.run("doctor", "--pid", worker.pid, "-o", "json", check=None).stdout)
            assert "TcpConnected" in json.dumps(report)
            id_ = node.new_id()
            node.run("checkpoint", "--pid", worker.pid, "--id", id_)
            client.sendall(b"2")
            assert client.recv(1) == b"2"
        assert json.loads((node.store / id_ / "manifest.json").read_text())["tcp"] == "close"
    finally:
        worker.end()
    node.run("restore", id_)
    with socket.create_connection(("127.0.0.1", worker.port)) as client:
        client.settimeout(30)
        client.sendall(b"3")
        assert client.recv(1) == b"3"
    os.killpg(worker.pid, signal.SIGKILL)
