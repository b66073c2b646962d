"""Files that are open, have lost the name they were opened by, and have another (FC-45)."""

from __future__ import annotations

import json
import os
import shlex
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from hibernode.artifact.links import LINKS_FILE
from hibernode.criu.runner import find_criu
from tests.real.node import Node, until

pytestmark = pytest.mark.criu

PROGRAM = """
import os, sys, time
lost, other, go, out = sys.argv[1:]
os.write(os.open(lost, os.O_WRONLY | os.O_CREAT, 0o644), b"precious")
file = os.open(lost, os.O_RDONLY)
os.link(lost, other)
os.unlink(lost)
open(out, "w").write("waiting")
while not os.path.exists(go):
    time.sleep(0.01)
stat = os.fstat(file)
open(out + ".new", "w").write(f"{os.pread(file, 99, 0).decode()} {stat.st_ino} {stat.st_nlink}")
os.rename(out + ".new", out)
"""


class Holder:
    """A process that holds a file that was called ``data/lost`` and is called ``data/other``."""

    def __init__(self, base: Path) -> None:
        self.data, self.go, self.out = base / "data", base / "go", base / "out"
        self.data.mkdir()
        self.other = self.data / "other"
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, self.data / "lost", self.other, self.go, self.out],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        until("holder", self.out.exists)

    def says(self) -> str:
        """Let it go on, and read what it says of its file."""
        self.go.touch()
        until("answer", lambda: self.out.exists() and self.out.read_text() not in ("", "waiting"))
        return self.out.read_text()

    def goes_on_and_ends(self) -> None:
        """Let it go on to its end, and forget that it did."""
        assert self.says().startswith("precious ")
        assert self.process.wait(timeout=30) == 0
        self.go.unlink()
        self.out.unlink()

    def names(self) -> list[str]:
        """List the names in its directory."""
        return sorted(os.listdir(self.data))


@pytest.fixture
def holder(node: Node) -> Iterator[Holder]:
    """Give a holder, and end it."""
    it = Holder(node.base)
    yield it
    it.process.kill()
    it.process.wait()


def _ended(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def kept(holder: Holder) -> list[str]:
    """List the links of ours."""
    return [name for name in holder.names() if name.startswith(".hibernode-")]


def test_a_file_that_lost_its_name_is_restored_twice_after_a_dump_that_left_the_worker_running(
    node: Node, holder: Holder
) -> None:
    """FC-45: the restored copy reads it, it is the inode of the other name, and no link of CRIU's stays."""
    id_ = node.new_id()
    node.run("checkpoint", "--pid", holder.process.pid, "--id", id_)
    assert len(kept(holder)) == 1
    inode = holder.other.stat().st_ino
    assert (holder.data / kept(holder)[0]).stat().st_ino == inode
    holder.goes_on_and_ends()
    for _ in range(2):
        restored = json.loads(node.run("restore", id_, "-o", "json").stdout)
        assert holder.says() == f"precious {inode} 2"
        until("end", partial(_ended, restored["pid"]))
        holder.go.unlink()
        holder.out.unlink()
        assert holder.names() == sorted([*kept(holder), "other"])
        node.run("gc", check=None)
    assert len(kept(holder)) == 1


def test_a_killed_worker_is_restored_too(node: Node, holder: Holder) -> None:
    """FC-45: CRIU leaves its link when it ends the worker; ours stands by, and both are gone in the end."""
    id_ = node.new_id()
    node.run("checkpoint", "--pid", holder.process.pid, "--id", id_, "--leave", "killed")
    holder.process.wait()
    node.run("restore", id_)
    assert holder.says().startswith("precious ")
    node.run("gc", GC_MAX_AGE_SECONDS="0.001")
    assert holder.names() == ["other"]


def test_another_dumps_leftover_is_named_and_left_alone(node: Node, holder: Holder) -> None:
    """FC-45: a foreign link_remap file is in the report of the checks and is there afterwards."""
    foreign = holder.data / "link_remap.7777"
    foreign.write_text("foreign")
    report = node.run("doctor", "--pid", holder.process.pid, check=None)
    assert str(foreign) in report.stdout
    node.run("checkpoint", "--pid", holder.process.pid, "--id", node.new_id())
    assert foreign.read_text() == "foreign"


def broken_criu(node: Node) -> Path:
    """Write a CRIU whose dump fails and leaves a link of its kind, as one that is killed does."""
    path = node.base / "criu-that-fails"
    other = node.base / "data" / "other"
    criu = shlex.join(find_criu("").argv)
    path.write_text(
        f"""#!/bin/bash
if [ "$1" != dump ]; then exec {criu} "$@"; fi
ln {other} {other.with_name("link_remap.5")}
touch {other.with_name("link_remap.6")}
ls -A {other.parent} > {node.base}/seen
exit 1
"""
    )
    path.chmod(stat.S_IRWXU)
    return path


def test_a_dump_that_fails_leaves_no_link_of_ours_or_of_its_criu(node: Node, holder: Holder) -> None:
    """FC-45: ours goes, and so does CRIU's for the same file; a file of others with such a name stays."""
    result = node.run(
        "checkpoint", "--pid", holder.process.pid, "--id", node.new_id(), check=None,
        CRIU_BINARY=str(broken_criu(node)),
    )  # fmt: skip
    assert result.returncode != 0
    assert ".hibernode-" in (node.base / "seen").read_text()
    assert holder.names() == ["link_remap.6", "other"]


def test_an_agent_that_is_killed_after_the_dump_leaves_no_link(node: Node, holder: Holder) -> None:
    """FC-26, FC-45: the next agent undoes the dump, and its links with it."""
    result = node.run(
        "checkpoint", "--pid", holder.process.pid, "--id", node.new_id(), check=None,
        FAULT="kill@checkpoint.seal",
    )  # fmt: skip
    assert result.returncode == -signal.SIGKILL
    assert len(kept(holder)) == 1
    assert len(list((node.store / ".staging").glob(f"*/{LINKS_FILE}"))) == 1
    node.start_agent()
    until("undone", lambda: not kept(holder))
    assert holder.names() == ["other"]


def test_gc_removes_the_link_with_the_artifact(node: Node, holder: Holder) -> None:
    """FC-45: the link lives as long as the artifact that needs it."""
    node.run("checkpoint", "--pid", holder.process.pid, "--id", node.new_id())
    node.run("gc")
    assert len(kept(holder)) == 1
    node.run("gc", GC_MAX_AGE_SECONDS="0.001")
    assert holder.names() == ["other"]


@pytest.mark.parametrize("trouble", ["gone", "another file", "a link to it", "name taken"])
def test_a_restore_without_the_very_file_is_refused(node: Node, holder: Holder, trouble: str) -> None:
    """FC-45: a link of ours that is gone or is something else is never handed to CRIU; nothing is touched."""
    id_ = node.new_id()
    node.run("checkpoint", "--pid", holder.process.pid, "--id", id_)
    holder.goes_on_and_ends()
    ours = holder.data / kept(holder)[0]
    taken = Path(json.loads((node.store / id_ / "manifest.json").read_text())["links"][0]["path"])
    if trouble == "name taken":
        taken.write_text("foreign")
    else:
        ours.unlink()
    if trouble == "another file":
        ours.write_text("precious")
    elif trouble == "a link to it":
        ours.symlink_to(holder.other)
    result = node.run("restore", id_, check=4)
    assert "cannot be brought back" in result.stderr
    assert taken.exists() == (trouble == "name taken")
    assert holder.other.read_text() == "precious"
