"""Where tests with containers happen: a node, a runtime on it, and what can be seen of the boxes there."""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hibernode.placeholder import find_placeholder
from tests.real import images
from tests.real.boxes import Box, Kit, Runtime
from tests.real.node import Node, state_letter, until

PROFILE = Path(__file__).parents[2] / "seccomp" / "block-iouring.json"
PLACEHOLDER = "/hibernode-placeholder"
MIB = 1 << 20
ROOT_DIRS = ("etc/box", "opt", "srv/box")
"""Where the workers leave files."""

INIT_STATUS = ("Name", "Tgid", "PPid", "TracerPid", "Uid", "Gid", "NSpid", "Threads", "SigBlk", "CapEff")
"""What of a waiting init's status must not change."""


@dataclass
class Place:
    """A node, a runtime on it, and the boxes of a test."""

    node: Node
    runtime: Runtime
    image: Path
    worker: str

    def start(
        self,
        id_: str,
        *args: str,
        argv: tuple[str, ...] = (),
        env: Mapping[str, str] | None = None,
        **more: Any,
    ) -> Box:
        """Start a worker, or whatever ``argv`` says, with the mounts and the contract of a worker.

        ``env`` is added to the contract's; an empty value takes a variable away.
        """
        self.node.signals.mkdir(exist_ok=True)
        contract = {
            "DYN_CHECKPOINT_HASH": id_,
            "DYN_CHECKPOINT_SIGNAL_FILE": f"/signals/{id_}.done",
            "DYN_CHECKPOINT_READY_FILE": "/srv/ready",
            "DYN_RESTORE_MARKER_FILE": "/srv/restored",
        }
        env = {name: value for name, value in {**contract, **(env or {})}.items() if value}
        binds = [(self.node.signals, "/signals", "rw"), (find_placeholder(), PLACEHOLDER, "ro")]
        more["binds"] = [*more.get("binds", binds), *more.pop("more_binds", ())]
        more.setdefault("seccomp", PROFILE)
        more.setdefault("memory", 256 * MIB)
        more.setdefault("image", self.image)
        return self.runtime.run(argv or (self.worker, *args), env=env, **more)

    def placeholder(self, id_: str, *cold: str, **more: Any) -> Box:
        """Start a container that waits for the worker."""
        box = self.start(id_, argv=(PLACEHOLDER, *cold), **more)
        until("listening placeholder", lambda: "hibernode-ph" in Path(f"/proc/{box.pid}/comm").read_text())
        return box

    def freeze(self, box: Box) -> None:
        """Dump a worker by hand; it is told and ends as the contract says."""
        self.node.run("checkpoint", "--container", box.id)
        assert box.wait() == 0, box.log()

    def thaw(self, id_: str, box: Box, **settings: str) -> int:
        """Restore into a container; the pid of the restored root on this node."""
        self.node.run("restore", id_, "--into", box.id, check=0, **settings)
        return restored_root(box)


@contextmanager
def placed(node: Node, kit: Kit, kind: str, name: str = "debian") -> Iterator[Place]:
    """Give a place for a kind of runtime and a named image, as long as the block lasts."""
    image, worker = {
        "debian": (images.debian, images.PYTHON_WORKER),
        "busybox": (images.busybox, images.STATIC_WORKER),
    }[name]
    with kit.runtime(kind) as runtime:
        yield Place(node, runtime, image(), worker)


def dump(place: Place, id_: str, box: Box) -> None:
    """Have the agent dump a worker that has said that it is ready; it ends as the contract says."""
    answer = place.node.done(id_)
    assert answer["success"] is True, (answer, place.node.tail(), box.log())
    assert box.wait() == 0, box.log()


def tree(root: Path) -> dict[str, tuple[object, ...]]:
    """Describe the files that a worker has left: type, mode, owner, time, size or target, content."""
    found: dict[str, tuple[object, ...]] = {}
    for top in ROOT_DIRS:
        for path in _below(root / top):
            found[str(path.relative_to(root))] = _described(path)
    return found


def _below(top: Path) -> Iterator[Path]:
    for directory, names, files in os.walk(top):
        for name in [*names, *files]:
            yield Path(directory) / name


def _described(path: Path) -> tuple[object, ...]:
    seen = path.lstat()
    what: object = os.readlink(path) if stat.S_ISLNK(seen.st_mode) else ""
    if stat.S_ISREG(seen.st_mode):
        what = hashlib.sha256(path.read_bytes()).hexdigest()
    links = seen.st_nlink if not stat.S_ISDIR(seen.st_mode) else 0
    return seen.st_mode, seen.st_uid, seen.st_gid, seen.st_mtime_ns, what, links


def children(pid: int) -> list[str]:
    """List the children of a process."""
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def descendants(pid: int) -> list[int]:
    """List all below a process, zombies too."""
    below = [int(child) for child in children(pid)]
    return below + [deeper for child in below for deeper in descendants(child)]


def restored_root(box: Box) -> int:
    """Give the pid, on this node, of the one process that was restored into a container."""
    living = [int(pid) for pid in children(box.pid) if state_letter(int(pid)) not in "ZX"]
    assert len(living) == 1, (living, children(box.pid))
    return living[0]


def inner_pid(pid: int) -> int:
    """Give a process's pid as itself sees it."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("NSpid:")).split()[-1])


def mounts_of(pid: int) -> list[tuple[str, ...]]:
    """List what is mounted where and how, without the kernel's numbers."""
    lines = Path(f"/proc/{pid}/mountinfo").read_text().splitlines()
    return sorted((*line.split()[3:6], line.split(" - ")[1].split()[0]) for line in lines)


def snapshot(box: Box) -> dict[str, object]:
    """Take down all of a waiting container that a restore which fails has to leave as it was.

    Its files (content, modes, owners, times, links) with those in /dev/shm, its mounts, its processes, its
    cgroups and who is in them, its init's state and descriptors.
    """
    root, pid = box.root, box.pid
    mountinfo = Path(f"/proc/{pid}/mountinfo").read_text()
    mounted = {line.split()[4] for line in mountinfo.splitlines()} - {"/", "/dev/shm"}
    files = {"/": _described(root)}
    for directory, names, others in os.walk(root):
        top = f"/{os.path.relpath(directory, root)}/".replace("/./", "/")
        names[:] = [name for name in names if top + name not in mounted or top + name == "/dev"]
        for name in [*names, *others]:
            if top + name not in mounted and not (top == "/dev/" and name != "shm"):
                files[top + name] = _described(Path(directory) / name)
        if top == "/dev/":
            names[:] = ["shm"]
    status = dict(
        line.split(":\t", 1)
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.split(":")[0] in INIT_STATUS
    )
    return {
        "files": files,
        "mounts": mountinfo,
        # Who sleeps may be on a CPU for a moment; who was stopped or is frozen is neither.
        "processes": [(pid, state_letter(pid).replace("R", "S")) for pid in descendants(pid)],
        "cgroup": Path(f"/proc/{pid}/cgroup").read_text(),
        "members": {str(path): (path / "cgroup.procs").read_text() for path in box.cgroup_dirs()},
        "groups": {
            str(path): [inner for inner in path.iterdir() if inner.is_dir()] for path in box.cgroup_dirs()
        },
        "frozen": freezer_states(box),
        "init": status,
        "descriptors": {fd.name: os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()},
    }


def freezer_states(box: Box) -> list[str]:
    """Read what the freezers of a container's cgroups say, of both versions."""
    files = [path / name for path in box.cgroup_dirs() for name in ("freezer.state", "cgroup.freeze")]
    return [file.read_text().strip() for file in files if file.exists()]


def differences(before: Mapping[str, object], after: Mapping[str, object]) -> dict[str, object]:
    """Name what of two snapshots is not the same, with both values."""
    found: dict[str, object] = {}
    for name, was in before.items():
        now = after[name]
        if isinstance(was, dict) and isinstance(now, dict):
            keys = [key for key in {**was, **now} if was.get(key) != now.get(key)]
            found |= {f"{name} {key}": (was.get(key), now.get(key)) for key in keys}
        elif was != now:
            found[name] = (was, now)
    return found


def processes_with(text: str) -> list[str]:
    """List the command lines of this machine's processes that have a text in them, ours left out."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if text in line:
                found.append(f"{entry.name} {line}")
    return found


def refused(result: subprocess.CompletedProcess[str], *words: str) -> None:
    """See that a command was refused, in words that name what is wrong."""
    assert result.returncode != 0, result.stdout
    for word in words:
        assert word in result.stderr, result.stderr
    assert "Traceback" not in result.stderr, result.stderr
