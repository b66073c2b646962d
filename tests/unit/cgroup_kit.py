"""Real cgroups in every hierarchy of this machine, and processes in pid namespaces of their own in them."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from hibernode.host import cgroups

BOX = """
import ctypes, json, os, signal, sys
libc = ctypes.CDLL(None)
REST = "import os, signal, sys; os.write(int(sys.argv[1]), b'x'); signal.pause()"

def settle(spec):
    for path in spec.get("joins", []):
        with open(path, "w") as file:
            file.write("0")
    if "comm" in spec:
        libc.prctl(15, spec["comm"].encode(), 0, 0, 0)
    for source, target in spec.get("binds", []):
        assert libc.unshare(0x20000) == 0
        assert libc.mount(b"none", b"/", None, 0x44000, None) == 0
        assert libc.mount(source.encode(), target.encode(), None, 0x1000, None) == 0

def spawn(spec, new):
    ready, told = os.pipe()
    if new:
        assert libc.unshare(0x20000000) == 0
    pid = os.fork()
    if pid:
        os.close(told)
        assert os.read(ready, 1) == b"x"
        return pid
    libc.prctl(1, signal.SIGKILL, 0, 0, 0)
    settle(spec)
    for other in spec.get("others", []):
        spawn(other, False)
    for inner in spec.get("inner", []):
        spawn(inner, True)
    if "env" in spec:
        os.set_inheritable(told, True)
        os.execve(sys.executable, [sys.executable, "-c", REST, str(told)], spec["env"])
    os.write(told, b"x")
    while True:
        signal.pause()

spec = json.loads(sys.argv[1])
child = spawn(spec, spec.get("own", True))
print(child, flush=True)
sys.stdin.read()
os.kill(child, signal.SIGKILL)
os.waitpid(child, 0)
"""


def container_id() -> str:
    """Make a container id that no other test uses."""
    return secrets.token_hex(32)


def pod_uid() -> str:
    """Make a pod's uid that no other test uses."""
    digits = secrets.token_hex(16)
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


class Cgroups:
    """Cgroups below one of this test's own, in every hierarchy that is mounted here."""

    def __init__(self) -> None:
        self.name = f"hibernode-test-{os.getpid()}-{secrets.token_hex(4)}"
        self.tops: list[Path] = []
        for membership in cgroups.memberships(os.getpid()):
            place = cgroups.place_of(membership, cgroups.cgroup_mounts())
            if place is not None:
                self.tops.append(place.top)

    def make(self, path: str = "") -> list[Path]:
        """Make the cgroup ``path`` below this test's own; returns its directories, one for each hierarchy."""
        made = []
        for top in self.tops:
            directory = top
            for name in (self.name, *Path(path).parts):
                directory /= name
                directory.mkdir(exist_ok=True)
                for need in ("cpuset.cpus", "cpuset.mems"):  # empty ones take no process
                    if (directory.parent / need).exists() and (directory / "tasks").exists():
                        (directory / need).write_text((directory.parent / need).read_text())
            made.append(directory)
        return made

    def joins(self, path: str = "") -> list[str]:
        """Make a cgroup; returns the files to write 0 to."""
        return [str(directory / "cgroup.procs") for directory in self.make(path)]

    def remove(self) -> None:
        """Remove them all; their processes have ended."""
        for top in self.tops:
            for directory, _, _ in os.walk(top / self.name, topdown=False):
                os.rmdir(directory)


@pytest.fixture(name="cgroup_kit")
def _cgroup_kit() -> Iterator[Cgroups]:
    kit = Cgroups()
    yield kit
    kit.remove()


@contextlib.contextmanager
def box(joins: Sequence[str] = (), **spec: Any) -> Iterator[int]:
    """Run a process that is 1 in a new pid namespace (not with ``own=False``); gives its pid out here.

    ``joins`` are cgroup.procs files; ``comm``, ``env`` (in an exec), ``binds``, ``others`` (in its
    namespace) and ``inner`` (in new namespaces inside it) say more; the last two are such specs themselves.
    """
    argument = json.dumps({"joins": list(joins), **spec})
    with subprocess.Popen(
        [sys.executable, "-c", BOX, argument], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as helper:
        assert helper.stdout is not None
        line = helper.stdout.readline()
        assert line, "the box did not start"
        yield int(line)
        helper.communicate()
