"""Real containers for tests: one interface over runc, crun, containerd's ``ctr`` and CRI pods.

A test asks its ``kit`` for a runtime and runs boxes::

    with kit.runtime("crun") as runtime:
        box = runtime.run([images.PYTHON_WORKER], image=images.debian(), seccomp=PROFILE)

All that a kit makes bears its token, eight hexadecimal digits: directories, container ids and pod uids (they
begin with it), cgroups, mounts, the bridge. So nothing is missed when it is taken away, even by the next run.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import select
import signal
import socket
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from hibernode.host import linux
from tests.real.boxes_clear import BASES, CGROUPS, PREFIX, clear, leftovers, sweep
from tests.real.node import until

if TYPE_CHECKING:
    from tests.real.boxes_ctr import Daemon

KINDS = ("runc", "crun", "ctr", "cri")
Bind = tuple[Path | str, str, str]
"""A directory or file of the host, its path inside, and ``rw`` or ``ro``; ``ro,noexec`` of runc and crun."""


@dataclass(frozen=True)
class Recipe:
    """What to run; the same for every runtime."""

    argv: Sequence[str]
    image: Path
    name: str
    hostname: str
    env: Mapping[str, str] = field(default_factory=dict)
    binds: Sequence[Bind] = ()
    seccomp: Path | None = None
    memory: int | None = None
    readonly_root: bool = False
    uid: int = 0
    new_pod: bool = True
    tty: bool = False
    linux: Mapping[str, Any] = field(default_factory=dict)
    bounding: Sequence[str] = ()


class Box(ABC):
    """A running container; ``id`` is what the runtime calls it, ``pid`` its init as the host sees it."""

    def __init__(self, recipe: Recipe, id_: str, pid: int) -> None:
        self.recipe, self.name, self.id, self.pid = recipe, recipe.name, id_, pid
        self._pidfd = os.pidfd_open(pid)
        self._cgroup = Path(f"/proc/{pid}/cgroup").read_text()

    @property
    def root(self) -> Path:
        """Its root directory, as long as it lives."""
        return Path(f"/proc/{self.pid}/root")

    def alive(self) -> bool:
        """Whether its init has not ended."""
        return not select.select([self._pidfd], [], [], 0)[0]

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send its init a signal; no error when it has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def cgroup(self) -> str:
        """Give the text of its ``/proc/<pid>/cgroup``, as it was at the start."""
        return self._cgroup

    def cgroup_dirs(self) -> list[Path]:
        """List its own directories below ``/sys/fs/cgroup``, one a hierarchy; a root is nobody's own."""
        return [path for path in _cgroup_dirs(self._cgroup) if path.exists()]

    def memory_limit(self) -> int:
        """Read the limit that the kernel holds it to, in bytes; 0 for none."""
        for directory in self.cgroup_dirs():
            for name in ("memory.max", "memory.limit_in_bytes"):
                with contextlib.suppress(FileNotFoundError):
                    text = (directory / name).read_text().strip()
                    return int(text) if text.isdecimal() and int(text) < 1 << 62 else 0
        raise AssertionError(f"no memory limit in {self.cgroup_dirs()}")

    def upper(self) -> Path:
        """Give the upper layer of its root file system, on the host."""
        for line in Path(f"/proc/{self.pid}/mountinfo").read_text().splitlines():
            words = line.split()
            if words[4] == "/":
                found = re.search(r"upperdir=([^,]+)", words[-1])
                assert found, line
                return Path(found[1])
        raise AssertionError("no root mount")

    def state(self, path: str = "/srv/state.json") -> dict[str, Any] | None:
        """Read the worker's state file; None before there is one."""
        try:
            state: dict[str, Any] = json.loads((self.root / path[1:]).read_text())
        except (FileNotFoundError, json.JSONDecodeError):  # the first write may be under way
            return None
        return state

    def counts_on(self, path: str = "/srv/state.json") -> dict[str, Any]:
        """Wait until the worker has counted further; return its state."""

        def further() -> dict[str, Any] | None:
            assert self.alive(), f"{self.name} has ended: {self.log()[-2000:]}"
            state = self.state(path)
            return state if state and state["count"] > before + 1 else None

        before = (self.state(path) or {"count": 0})["count"]
        found: dict[str, Any] = until(f"counting worker in {self.name}", further)
        return found

    def connect(self, port: int) -> socket.socket:
        """Connect to a port of its loopback, from inside its network namespace."""

        def enter() -> socket.socket:
            with open(f"/proc/{self.pid}/ns/net", "rb") as namespace:
                linux.setns(namespace.fileno(), linux.CLONE_NEWNET)
            return socket.create_connection(("127.0.0.1", port), timeout=30)

        # Only the one thread goes there, and it ends.
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(enter).result()

    def ask(self, port: int) -> int:
        """Ask a worker that listens how far it has counted."""
        with self.connect(port) as connection:
            return int(connection.makefile().read())

    def ask_exit(self, code: int, path: str = "/srv/exit-code") -> None:
        """Tell the worker to end with this code."""
        new = self.root / f"{path[1:]}.new"
        new.write_text(str(code))
        new.rename(self.root / path[1:])

    @abstractmethod
    def log(self) -> str:
        """Give what it said on stdout and stderr so far; another process collects it, a moment behind."""

    @abstractmethod
    def wait(self, seconds: float = 60) -> int:
        """Wait for its end; return the exit code that the runtime reports."""

    def remove(self) -> None:
        """Kill it and take away all that was made for it; once is enough, twice no error."""
        if self._pidfd < 0:
            return
        self.kill()
        self._remove()
        os.close(self._pidfd)
        self._pidfd = -1

    @abstractmethod
    def _remove(self) -> None:
        """Take it away."""


class Runtime(ABC):
    """Runs boxes of one kind, and removes them all at the end of its ``with`` block."""

    kind: str

    def __init__(self, kit: Kit) -> None:
        self.kit = kit
        self.boxes: list[Box] = []

    def run(
        self,
        argv: Sequence[str | Path],
        *,
        image: Path,
        env: Mapping[str, str] | None = None,
        binds: Sequence[Bind] = (),
        seccomp: Path | None = None,
        memory: int | None = None,
        readonly_root: bool = False,
        uid: int = 0,
        new_pod: bool = True,
        name: str = "",
        hostname: str = "",
        tty: bool = False,
        linux: Mapping[str, Any] | None = None,
        bounding: Sequence[str] = (),
    ) -> Box:
        """Start a container and return when its program runs.

        ``memory`` in bytes. ``new_pod=False`` puts a CRI container into the pod of the one before; the other
        runtimes have no pods. ``linux``: changes of that part of the ``config.json`` of runc and crun.
        ``bounding``: capabilities that no process has and each may get by exec (runc, crun).
        A runtime that refuses is an AssertionError with its words.
        """
        name = name or f"box{len(self.boxes)}"
        recipe = Recipe(
            list(map(str, argv)),
            image,
            name,
            hostname or name,
            dict(env or {}),
            binds,
            seccomp,
            memory,
            readonly_root,
            uid,
            new_pod,
            tty,
            dict(linux or {}),
            bounding,
        )
        box = self._start(recipe)
        self.boxes.append(box)
        return box

    @abstractmethod
    def _start(self, recipe: Recipe) -> Box:
        """Start it."""

    def close(self) -> None:
        """Remove all boxes, the last first."""
        with contextlib.ExitStack() as stack:
            for box in self.boxes:
                stack.callback(box.remove)
        self.boxes.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Kit:
    """The ground that runtimes stand on: a directory, a token, at most one containerd."""

    def __init__(self) -> None:
        sweep()
        self.token = secrets.token_hex(4)
        self.base = BASES / f"{PREFIX}{self.token}"
        # The lock is held as long as this process lives: what bears the token of a base that nobody holds is
        # left over. Nobody sweeps the base before it is locked, as it has another name.
        hidden = BASES / f".{self.base.name}"
        hidden.mkdir(mode=0o711)
        self._owner = os.open(hidden, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(self._owner, fcntl.LOCK_EX)
        hidden.rename(self.base)
        self._daemon: Daemon | None = None

    def runtime(self, kind: str) -> Runtime:
        """Give a runtime of this kind."""
        if kind == "cri":
            from tests.real.boxes_cri import CriRuntime

            return CriRuntime(self)
        if kind == "ctr":
            from tests.real.boxes_ctr import CtrRuntime

            return CtrRuntime(self)
        from tests.real.boxes_oci import OciRuntime

        return OciRuntime(self, kind)

    def daemon(self, *, gateway: bool = False) -> Daemon:
        """Give the containerd of this kit; the first call starts it, with or without a gateway for pods."""
        from tests.real.boxes_ctr import Daemon

        if self._daemon is None:
            self._daemon = Daemon(self.base, self.token, gateway=gateway)
        return self._daemon

    def new_id(self) -> str:
        """Make a container id of the usual form: 64 hexadecimal digits."""
        return self.token + secrets.token_hex(28)

    def folder(self, name: str) -> Path:
        """Make a directory for one box."""
        return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.base))

    def close(self) -> None:
        """Stop containerd and take away what is left."""
        try:
            if self._daemon is not None:
                self._daemon.close()
        finally:
            clear(self.base)
            os.close(self._owner)

    def leftovers(self) -> list[str]:
        """List what there still is with this kit's token."""
        return leftovers(self.token)


def _cgroup_dirs(text: str) -> Iterator[Path]:
    """Turn the lines of ``/proc/<pid>/cgroup`` into directories; hybrid machines mount version 2 below."""
    unified = CGROUPS / "unified" if (CGROUPS / "unified").is_dir() else CGROUPS
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        top = CGROUPS / controllers.removeprefix("name=") if controllers else unified
        if path != "/":
            yield top / path.lstrip("/")
