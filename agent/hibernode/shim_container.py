"""The container that a worker is restored into, as the shim sees it. Like the shim, no imports but its own.

The restored root becomes a child of the container's init when CRIU has ended, for the shim is in another pid
namespace. An init of ours (:mod:`hibernode.shim_placeholder`) is told which process that is and ends with
its exit code; of a foreign one, ``sleep infinity`` say, the shim sees to that.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

from hibernode import shim_enter, shim_mounts, shim_placeholder
from hibernode.host import linux
from hibernode.shim import start_ticks, stat_fields

KINDS = ("mnt", "pid", *shim_enter.NAMESPACES)
FIND_SECONDS = 5.0
GRACE_SECONDS = 5.0
HOOK_FDS = 400
"""CRIU's script and its two pipes are above, out of the way of those that CRIU inherits for the worker."""

SIGNALED = 128
"""What a shell adds to a signal's number to make an exit code of it."""


class ContainerGoneError(Exception):
    """The container's init is not the process any more that it was."""


class ContainerMountsError(Exception):
    """The worker has not the mounts that the container has."""


class Container:
    """One container and its init, held by a pidfd."""

    def __init__(self, spec: dict[str, Any], directory: str) -> None:
        self.spec = spec
        self.directory = directory
        self.pid: int = spec["pid"]
        self.pidfd = linux.pidfd_open(self.pid)
        if start_ticks(self.pid) != spec["start_ticks"]:
            raise ContainerGoneError(f"pid {self.pid} is another process now")
        self.namespaces = {
            kind: os.open(f"/proc/{self.pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in KINDS
        }
        self.own = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        self.before = set(self.tree())
        self.ours = False
        self.rootfd: int | None = None
        self.code: int | None = None
        self.fitted: bool | None = None
        self.problem = ""
        self.heard, self.say = os.pipe2(os.O_CLOEXEC)
        self.wait, self.answer = os.pipe2(os.O_CLOEXEC)

    # before CRIU --------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Make the places for the container's mounts."""
        for name in (shim_enter.ROOT, shim_enter.MOUNTS):
            os.mkdir(f"{self.directory}/{name}")  # noqa: PTH102
        for number, mount in enumerate(self.spec["mounts"]):
            path = f"{self.directory}/{shim_enter.MOUNTS}/{number}"
            if mount["directory"]:
                os.mkdir(path)  # noqa: PTH102
            else:
                os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))

    def opened(self, mode: str) -> int:
        """Take the init's own output in the place of the worker's, or /dev/null where it has none."""
        number = {"stdout": 1, "stderr": 2}.get(mode)
        if number is not None:
            with contextlib.suppress(OSError):
                return linux.pidfd_getfd(self.pidfd, number)
        if mode == "net":
            return os.dup(self.namespaces["net"])
        return os.open("/dev/null", os.O_WRONLY)

    @contextlib.contextmanager
    def pids(self) -> Iterator[None]:
        """Have the child that is forked in the block, CRIU, begin in the container's pid namespace.

        What CRIU asks for is done by a thread that is started afterwards: a fork copies no locks of others.
        """
        linux.setns(self.namespaces["pid"], linux.CLONE_NEWPID)
        try:
            yield
        finally:
            linux.setns(self.own, linux.CLONE_NEWPID)
            for fd in (self.say, self.wait):  # CRIU's ends: when it is gone the others know
                os.close(fd)
            threading.Thread(target=self.fit_mounts, daemon=True).start()

    @contextlib.contextmanager
    def network(self) -> Iterator[None]:
        """Have the sockets that are made in the block in the container's network."""
        own = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        linux.setns(self.namespaces["net"], linux.CLONE_NEWNET)
        try:
            yield
        finally:
            linux.setns(own, linux.CLONE_NEWNET)
            os.close(own)

    def enter(self) -> list[str]:
        """Become a process of the container, as far as CRIU needs it; called in the child.

        :returns: arguments for CRIU, by which it asks for :meth:`fit_mounts`.
        """
        shim_enter.enter({**self.spec, "namespaces": self.namespaces}, self.directory)
        return ["--action-script", shim_enter.script(self.say, self.wait, HOOK_FDS)]

    def enter_files(self) -> None:
        """See the container's files as its own processes do; called in a child."""
        linux.setns(self.namespaces["mnt"], linux.CLONE_NEWNS)
        os.chdir("/")

    # while CRIU waits ---------------------------------------------------------------------------------

    def fit_mounts(self) -> None:
        """Give the worker the container's mounts when CRIU says that all is made; a thread of its own.

        What cannot be done is in ``problem`` afterwards, and CRIU ends the worker.
        """
        try:
            if said := os.read(self.heard, 64):
                root = self.host_pid(int(said), os.getpid())
                worker = os.open(f"/proc/{root}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
                try:
                    shim_mounts.fit(self.namespaces["mnt"], worker)
                finally:
                    os.close(worker)
                self.fitted = True
        except Exception as error:  # noqa: BLE001 - whatever it was, CRIU is told and the restore fails
            self.fitted, self.problem = False, str(error)
        finally:
            with contextlib.suppress(OSError):
                os.write(self.answer, b"%d\n" % (not self.fitted))
            os.close(self.heard)
            os.close(self.answer)

    def check_mounts(self, code: int) -> None:
        """See, after CRIU, that the worker has the container's mounts, or that CRIU failed before them.

        :raises ContainerMountsError: it has them not.
        """
        if self.fitted is False:
            raise ContainerMountsError(f"the worker cannot have the container's mounts: {self.problem}")
        if code == 0 and not self.fitted:
            raise ContainerMountsError("CRIU has not let the worker have the container's mounts")

    # after CRIU ---------------------------------------------------------------------------------------

    def host_pid(self, pid: int, ancestor: int = 0) -> int:
        """Find a process by its pid in the container's namespace, below the init or another ancestor."""
        deadline = time.monotonic() + FIND_SECONDS
        while True:
            for found in descendants(ancestor or self.pid):
                with contextlib.suppress(OSError):
                    if inner_pid(found, self.spec["depth"]) == pid:
                        return found
            if time.monotonic() > deadline:
                raise ContainerGoneError(f"no process of the container has the pid {pid} in it")
            time.sleep(0.01)

    def adopted(self, root: int) -> int | None:
        """Hand the worker to the container's init; its wait status if it has ended already."""
        self.ours = shim_placeholder.recognise(self.pid)
        self.rootfd = linux.pidfd_open(root)
        inner = inner_pid(root, self.spec["depth"])
        status = self.status(root, wait=False)
        if self.ours:
            shim_placeholder.tell(self.pidfd, inner)
        return status

    def status(self, root: int, *, wait: bool = True) -> int | None:
        """Return the worker's wait status; None while it runs, and when nobody knows how it ended."""
        assert self.rootfd is not None
        poll = select.poll()
        poll.register(self.rootfd, select.POLLIN)
        if not poll.poll(None if wait else 0):
            return None
        status = shim_placeholder.exit_status(root, self.rootfd)
        if status is not None:
            code = os.waitstatus_to_exitcode(status)
            self.code = code if code >= 0 else SIGNALED - code
        return status

    def signal(self, number: int) -> None:
        """Send the worker a signal; it is reaped by somebody else, so its pid may be another's by now."""
        if self.rootfd is not None:
            linux.pidfd_send_signal(self.rootfd, number)

    def finish(self) -> None:
        """End a foreign init with the worker's exit code; never with 0 where that is not known."""
        if not self.ours:
            shim_placeholder.end_with(self.pid, 1 if self.code is None else self.code, self.pidfd)

    def end_half_tree(self) -> None:
        """End what a killed CRIU has left to the container's init, and nothing that was there before."""
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline:
            left = [pid for pid in self.tree() if pid not in self.before and not is_zombie(pid)]
            if not left:
                return
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def tree(self) -> list[int]:
        """List the descendants of the container's init, as the host numbers them."""
        return descendants(self.pid)


def descendants(pid: int) -> list[int]:
    """List all processes below one."""
    found: list[int] = []
    parents = [pid]
    while parents:
        below = children(parents.pop())
        found += below
        parents += below
    return found


def children(pid: int) -> list[int]:
    """List the children of all threads of a process; none if it has ended."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for tid in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208
            with open(f"/proc/{pid}/task/{tid}/children", encoding="ascii") as file:  # noqa: PTH123
                found += map(int, file.read().split())
    return found


def inner_pid(pid: int, depth: int) -> int:
    """Return a process's pid in the namespace ``depth`` levels below ours; 0 when it is not in there."""
    with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
        for line in file:
            if line.startswith("NSpid:"):
                pids = line.split()[1:]
                return int(pids[depth]) if depth < len(pids) else 0
    return 0


def is_zombie(pid: int) -> bool:
    """Whether it has ended."""
    try:
        return stat_fields(pid)[0] in "ZX"
    except OSError:
        return True
