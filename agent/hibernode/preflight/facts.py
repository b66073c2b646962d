"""What preflight knows: plain data, gathered once, so that every check is a pure function of it."""

from __future__ import annotations

import stat as st
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Final

from hibernode.host import linux, safefs

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from hibernode.host.mounts import Mount
    from hibernode.host.procfs import Fd, Stat, Status
    from hibernode.host.sockets import TcpSocket, UnixSocket

MEMORY_FILES: Final = ("/memfd:", "/dev/zero", "/SYSV", "[anon_shmem:")
"""How /proc names files that are memory and belong to no mount: memfd, shared anonymous memory, SysV."""

KERNEL_FILES: Final = ("/[aio]", "/anon_hugepage", "/secretmem")
"""Mappings whose file is the kernel's own; CRIU copies none of them as a file."""

IMAGE_OVERHEAD_BYTES: Final = 1 << 20
"""Registers, mappings, descriptors, page tables and CRIU's log: measured as 0.3 to 0.8 MiB a process."""

CAP_SYS_RESOURCE: Final = 24
"""linux/capability.h. Without CAP_SYS_RESOURCE CRIU can neither read other users' limits nor raise any."""

Place = tuple[int, int]
"""(pid, fd)."""


@dataclass(frozen=True, slots=True)
class Thread:
    """A thread that leads no process. ``fds`` is what it holds if its descriptor table is its own."""

    tid: int
    state: str
    fds: tuple[Fd, ...] | None = None


@dataclass(frozen=True, slots=True)
class Task:
    """One process of the tree. ``preload`` is its LD_PRELOAD; sizes are bytes.

    ``libcuda``: it maps NVIDIA's CUDA library.

    ``anonymous_bytes`` is private memory that is resident and no unchanged page of a file; CRIU writes all
    of it, and what is swapped out.
    """

    stat: Stat
    status: Status
    threads: tuple[Thread, ...] = ()
    fds: tuple[Fd, ...] = ()
    namespaces: Mapping[str, int] = field(default_factory=dict)
    preload: str = ""
    anonymous_bytes: int = 0
    huge_bytes: int = 0
    uprobes: bool = False
    libcuda: bool = False

    @property
    def pid(self) -> int:
        """The process id, as the agent sees it."""
        return self.stat.pid


@dataclass(frozen=True, slots=True)
class OddMapping:
    """A mapping of something that is no ordinary file: a device, an anonymous inode, SysV memory.

    ``mode`` and ``rdev`` are those of what is mapped; ``start`` is its address.
    """

    pid: int
    start: int
    path: str
    mode: int
    rdev: int


@dataclass(frozen=True, slots=True)
class GhostFile:
    """A file without a name that is open or mapped; CRIU copies it into the image.

    ``where`` is ``fd 3`` or ``mapping 7f0000000000``; ``bytes`` is what it takes up, holes left out.
    """

    pid: int
    where: str
    path: str
    bytes: int


@dataclass(frozen=True, slots=True)
class RenamedFile:
    """An open file that lost the name it was opened by and has another; CRIU makes it a new link."""

    pid: int
    fd: int
    path: str


@dataclass(frozen=True, slots=True)
class Watch:
    """One inotify watch. ``by_handle``: the kernel can name the inode to CRIU."""

    pid: int
    fd: int
    ino: int
    dev: int
    by_handle: bool


@dataclass(frozen=True, slots=True)
class NetlinkSocket:
    """A netlink socket that has an address, and the bytes that wait to be read from it."""

    inode: int
    pending_bytes: int


@dataclass(frozen=True, slots=True)
class StoreFacts:
    """The store, or the nearest directory above it that exists; ``fs_type`` is statfs's magic number."""

    path: str
    exists: bool = True
    is_directory: bool = True
    uid: int = 0
    mode: int = 0o700
    fs_type: int = 0
    free_bytes: int = 0


@dataclass(frozen=True)
class Facts:
    """All that the checks look at. The first of ``tasks`` is the root of the tree.

    - ``shared_bytes``: shared memory and nameless files, each counted once however many processes hold it.
    - ``leftovers``: files that look like CRIU's links beside the renamed files.
    - ``terminals``: numbers of the pseudo terminals whose master is in the tree.
    - ``pidfds``: the process that a pidfd names; -1 when it has ended.
    - ``locked_pids``: holders of file locks; filled only when locks are not to be dumped.
    - ``socket_kinds``: the kernel's name of the protocol of a socket's inode, empty when it does not say.
    - ``unix_peers``: the peers, by inode, that are not in the tree.
    - ``held_ids``: ids of sessions and process groups, with a process outside the tree that is in it.
    - ``may_read_limits``: the agent has CAP_SYS_RESOURCE.
    - ``sysv``: the SysV objects of an IPC namespace that is not the agent's, as ``2 semaphore sets``.
    - ``tracers``: who traces a process.
    - ``unseen``, ``denied``: what was too much to look at, and what may not be looked at.
    """

    tasks: tuple[Task, ...]
    agent_pid: int
    agent_namespaces: Mapping[str, int]
    mounts: tuple[Mount, ...]
    store: StoreFacts
    criu_version: str | None
    mem_available_bytes: int
    mapped: tuple[OddMapping, ...] = ()
    ghosts: tuple[GhostFile, ...] = ()
    shared_bytes: int = 0
    renamed: tuple[RenamedFile, ...] = ()
    leftovers: tuple[str, ...] = ()
    terminals: frozenset[int] = frozenset()
    pidfds: Mapping[Place, int] = field(default_factory=dict)
    watches: tuple[Watch, ...] = ()
    locked_pids: frozenset[int] = frozenset()
    socket_kinds: Mapping[int, str] = field(default_factory=dict)
    tcp: tuple[TcpSocket, ...] = ()
    unix: tuple[UnixSocket, ...] = ()
    unix_peers: Mapping[int, UnixSocket] = field(default_factory=dict)
    netlink: tuple[NetlinkSocket, ...] = ()
    sockets_error: str = ""
    outside_pids: frozenset[int] = frozenset()
    held_ids: Mapping[int, int] = field(default_factory=dict)
    preload_file: bool = False
    may_read_limits: bool = True
    sysv: tuple[str, ...] = ()
    tracers: Mapping[int, str] = field(default_factory=dict)
    unseen: tuple[str, ...] = ()
    denied: tuple[str, ...] = ()

    @property
    def root(self) -> Task:
        """The root of the tree."""
        return self.tasks[0]

    @property
    def in_container(self) -> bool:
        """Whether the tree is a whole container: its root is the init of a pid namespace of its own."""
        own = self.root.namespaces
        apart = all(own.get(name) != self.agent_namespaces.get(name) for name in ("pid", "mnt"))
        return bool(own) and apart and self.root.status.ns_pids[-1:] == (1,)

    @cached_property
    def pids(self) -> frozenset[int]:
        """The processes of the tree."""
        return frozenset(task.pid for task in self.tasks)

    @cached_property
    def socket_inodes(self) -> Mapping[int, Place]:
        """Each socket of the tree by its inode, with the first place that holds it."""
        found: dict[int, Place] = {}
        for task, fd in self.descriptors():
            inode = link_inode(fd.target, "socket:[")
            if inode is not None:
                found.setdefault(inode, (task.pid, fd.fd))
        return found

    def descriptors(self) -> Iterator[tuple[Task, Fd]]:
        """Yield every descriptor of every process; those of a thread's own table come with its process."""
        for task in self.tasks:
            for fd in task.fds:
                yield task, fd
            for thread in task.threads:
                for fd in thread.fds or ():
                    yield task, fd

    @cached_property
    def outside_pipes(self) -> tuple[tuple[int, int, str, str], ...]:
        """Ends of pipes whose other end is not in the tree: (pid, fd, ``pipe:[inode]``, ``r`` or ``w``)."""
        ends: dict[str, set[str]] = {}
        places: list[tuple[int, int, str, str]] = []
        for task, fd in self.descriptors():
            if fd.target.startswith("pipe:["):
                access = ("r", "w", "rw", "rw")[fd.flags & 3]
                ends.setdefault(fd.target, set()).update(access)
                places.append((task.pid, fd.fd, fd.target, access))
        return tuple(place for place in places if ends[place[2]] != {"r", "w"})

    @cached_property
    def estimate_bytes(self) -> int:
        """The size of the image: private memory, swap, shared memory, nameless files, and an overhead.

        Pages that a fork shares with its parent are counted for both, as CRIU writes them for both.
        Upper bound but for what the tree allocates until it is frozen: pages of zeroes are not written.
        """
        private = sum(
            task.anonymous_bytes + task.status.vm_swap_bytes + task.huge_bytes + IMAGE_OVERHEAD_BYTES
            for task in self.tasks
        )
        return private + self.shared_bytes


def store_facts(path: Path) -> StoreFacts:
    """Look at the store; where it is absent, at the directory that it would be made in."""
    try:
        stat = path.lstat()
    except FileNotFoundError:
        above = next(parent for parent in path.parents if parent.exists())
        return StoreFacts(
            str(path),
            exists=False,
            fs_type=linux.filesystem_type(str(above)),
            free_bytes=safefs.free_bytes(above),
        )
    return StoreFacts(
        str(path),
        is_directory=st.S_ISDIR(stat.st_mode),
        uid=stat.st_uid,
        mode=st.S_IMODE(stat.st_mode),
        fs_type=linux.filesystem_type(str(path)),
        free_bytes=safefs.free_bytes(path),
    )


def link_inode(target: str, prefix: str) -> int | None:
    """Read the inode out of ``socket:[123]``; None when the text does not start with ``prefix``."""
    return int(target[len(prefix) : -1]) if target.startswith(prefix) else None


def is_memory_file(path: str, dev: int, mount_devs: frozenset[int]) -> bool:
    """Whether /proc's text names memory and no file of a mount; a file can be called the same."""
    return path.startswith(MEMORY_FILES) and dev not in mount_devs
