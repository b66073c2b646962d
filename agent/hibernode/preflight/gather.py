"""One pass over a process tree and the machine, into :class:`Facts`.

Only files of /proc and directories are opened; what vanishes on the way is left out.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat as st
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Final

from hibernode.apart import go_on
from hibernode.errors import RefusedError
from hibernode.host import inroot, linux, mounts, nvidia, procfs, sockets
from hibernode.host.namespaces import sysv_objects
from hibernode.preflight import facts as f

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from hibernode.criu.find import Criu
    from hibernode.host.procfs import Fd, Process, Stat
    from hibernode.settings import Settings

MAX_PROCESSES: Final = 4096
MAX_THREADS: Final = 8192  # of one process

MAX_MAPS_BYTES: Final = 128 << 20
"""vm.max_map_count is 65,530 by default and 1,048,576 on some nodes; a line is 60 to 100 bytes."""

MAX_TABLE_BYTES: Final = 16 << 20
MAX_DIRECTORY_ENTRIES: Final = 100_000
TABLE_LOOKS: Final = 5
STAT_BLOCK: Final = 512  # the unit of st_blocks

REMOTE_TYPES: Final = re.compile(r"fuse|nfs|cifs|smb|9p|ceph|lustre|virtiofs|gpfs|afs")
"""File systems where a stat may wait for a server that is gone."""

PTMX: Final = os.makedev(5, 2)
PTY_MASTER_MAJORS: Final = range(128, 136)
"""linux/major.h: TTYAUX_MAJOR with the minor of ptmx, UNIX98_PTY_MASTER_MAJOR and the seven after it."""

MAPS_NAME_COLUMN: Final = 72
"""Names of mappings begin behind it; anonymous lines are shorter."""

_WATCH: Final = re.compile(rb"^inotify wd:[0-9a-f]+ ino:([0-9a-f]+) sdev:([0-9a-f]+)(.*)$", re.MULTILINE)
_PIDFD_PID: Final = re.compile(rb"^Pid:\s*(-?[0-9]+)$", re.MULTILINE)
_TTY_INDEX: Final = re.compile(rb"^tty-index:\s*([0-9]+)$", re.MULTILINE)
_DELETED: Final = " (deleted)"
_ODD_PATHS: Final = (b"anon_inode:", b"/dev/", b"/secretmem", b"/SYSV")
"""Mappings that are named for each process, not for the first one only."""

_Sockets = tuple[
    tuple[sockets.TcpSocket, ...], tuple[sockets.UnixSocket, ...], dict[int, sockets.UnixSocket], str
]
"""TCP, Unix, peers outside the tree, and why the kernel did not answer."""


def gather(process: Process, settings: Settings, criu: Criu | None, store: Path) -> f.Facts:
    """Look at the tree below ``process``, at the store and at the machine.

    :raises RefusedError: the process has ended, reason ``WorkerGone``.
    """
    try:
        _require_alive(process)
        facts = _Gatherer(process.pid, settings).facts(criu, store)
        _require_alive(process)  # else the pid may have been somebody else's
    except ProcessLookupError:
        raise RefusedError(
            f"pid {process.pid} has ended",
            remedy="the worker must stay alive until it reads the signal file",
            reason="WorkerGone",
            pid=process.pid,
        ) from None
    return facts


def _require_alive(process: Process) -> None:
    if not process.alive():
        raise ProcessLookupError


@dataclass(slots=True)
class _Gatherer:
    """The state of one pass."""

    root: int
    settings: Settings
    mounts: tuple[mounts.Mount, ...] = ()
    mount_devs: frozenset[int] = frozenset()
    remote_devs: frozenset[int] = frozenset()
    mapped: list[f.OddMapping] = field(default_factory=list)
    seen: set[tuple[bytes, bytes, bytes, int]] = field(default_factory=set)
    copied: dict[tuple[int, int], int] = field(default_factory=dict)
    ghosts: list[f.GhostFile] = field(default_factory=list)
    renamed: list[f.RenamedFile] = field(default_factory=list)
    terminals: set[int] = field(default_factory=set)
    pidfds: dict[f.Place, int] = field(default_factory=dict)
    watches: list[f.Watch] = field(default_factory=list)
    socket_kinds: dict[int, str] = field(default_factory=dict)
    unseen: list[str] = field(default_factory=list)
    denied: list[str] = field(default_factory=list)

    def facts(self, criu: Criu | None, store: Path) -> f.Facts:
        stats = procfs.all_stats()
        tree = procfs.tree(self.root, stats)
        if len(tree) > MAX_PROCESSES:
            self.unseen.append(f"{len(tree) - MAX_PROCESSES} of {len(tree)} processes")
        try:
            self.mounts = tuple(mounts.mounts(self.root))
        except PermissionError as error:
            self.denied.append(f"pid {self.root}: {error.strerror}")
        self.mount_devs = frozenset(os.makedev(*mount.dev) for mount in self.mounts)
        self.remote_devs = frozenset(
            os.makedev(*mount.dev) for mount in self.mounts if REMOTE_TYPES.match(mount.fs_type)
        )
        tasks = tuple(self._tasks(tree[:MAX_PROCESSES]))
        tree_pids = {stat.pid for stat in tree}
        outside = [stat for stat in stats.values() if stat.pid not in tree_pids and not stat.is_kernel_thread]
        tcp, unix, peers, silence = self._sockets()
        return f.Facts(
            tasks=tasks,
            agent_pid=os.getpid(),
            agent_namespaces=procfs.namespaces(os.getpid()),
            may_read_limits=bool(procfs.read_status(os.getpid()).cap_eff >> f.CAP_SYS_RESOURCE & 1),
            mounts=self.mounts,
            store=f.store_facts(store),
            criu_version=None if criu is None else criu.version,
            mem_available_bytes=procfs.mem_available_bytes(),
            mapped=tuple(self.mapped),
            ghosts=tuple(self.ghosts),
            shared_bytes=sum(self.copied.values()),
            renamed=tuple(self.renamed),
            leftovers=tuple(self._leftovers()),
            terminals=frozenset(self.terminals),
            pidfds=self.pidfds,
            watches=tuple(self.watches),
            locked_pids=frozenset() if self.settings.criu.file_locks else frozenset(_lock_holders()),
            socket_kinds=self.socket_kinds,
            tcp=tcp,
            unix=unix,
            unix_peers=peers,
            netlink=tuple(self._netlink()),
            sockets_error=silence,
            outside_pids=frozenset(stat.pid for stat in outside),
            held_ids={held: stat.pid for stat in outside for held in (stat.session, stat.pgrp)},
            preload_file=self._preload_file(),
            sysv=self._sysv(),
            tracers=_tracers(tasks, stats),
            unseen=tuple(self.unseen),
            denied=tuple(self.denied),
        )

    # processes ------------------------------------------------------------------------------------------

    def _tasks(self, tree: Sequence[Stat]) -> Iterator[f.Task]:
        for stat in tree:
            try:
                yield self._task(stat)
            except (FileNotFoundError, ProcessLookupError):
                if stat.pid == self.root:
                    raise ProcessLookupError from None
            except PermissionError as error:
                self.denied.append(f"pid {stat.pid}: {error.strerror}")
                yield f.Task(stat, procfs.read_status(stat.pid))

    def _task(self, stat: Stat) -> f.Task:
        go_on()
        pid = stat.pid
        status = procfs.read_status(pid)
        if stat.state in "ZX" or stat.is_kernel_thread:
            return f.Task(stat, status)
        fds = tuple(procfs.fds(pid))
        for fd in fds:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                self._fd(pid, fd)
        huge_bytes, uprobes, libcuda = self._maps(pid)
        resident, shared = procfs.read_bounded(f"/proc/{pid}/statm", 256).split()[1:3]
        return f.Task(
            stat=stat,
            status=status,
            threads=tuple(self._threads(stat)),
            fds=fds,
            namespaces=procfs.namespaces(pid),
            preload=procfs.environ(pid).get("LD_PRELOAD", ""),
            anonymous_bytes=max(0, int(resident) - int(shared)) * procfs.PAGE_SIZE,
            huge_bytes=huge_bytes,
            uprobes=uprobes,
            libcuda=libcuda,
        )

    def _threads(self, stat: Stat) -> Iterator[f.Thread]:
        if stat.num_threads == 1:
            return
        tids = [tid for tid in procfs.threads(stat.pid) if tid != stat.pid]
        if len(tids) > MAX_THREADS:
            self.unseen.append(f"{len(tids) - MAX_THREADS} of {len(tids)} threads of pid {stat.pid}")
        for tid in tids[:MAX_THREADS]:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                state = procfs.read_stat(stat.pid, tid).state
                own = _has_own_table(stat.pid, tid)
                yield f.Thread(tid, state, tuple(procfs.fds(tid)) if own else None)

    # descriptors ----------------------------------------------------------------------------------------

    def _fd(self, pid: int, fd: Fd) -> None:
        if fd.target.startswith("/"):
            if st.S_ISREG(fd.mode):
                self._regular(pid, fd)
            elif fd.rdev == PTMX or (st.S_ISCHR(fd.mode) and os.major(fd.rdev) in PTY_MASTER_MAJORS):
                match = _TTY_INDEX.search(_fdinfo(pid, fd.fd))
                self.terminals.add(int(match.group(1)) if match else -1)
        elif fd.target.startswith("socket:["):
            if fd.ino not in self.socket_kinds:
                self.socket_kinds[fd.ino] = _socket_kind(pid, fd.fd)
        elif fd.target == "anon_inode:inotify":
            for match in _WATCH.finditer(_fdinfo(pid, fd.fd)):
                ino, sdev = (int(number, 16) for number in match.group(1, 2))
                dev = os.makedev(sdev >> 20, sdev & 0xFFFFF)  # the kernel's own dev_t: 12 and 20 bits
                self.watches.append(f.Watch(pid, fd.fd, ino, dev, b"f_handle:" in match.group(3)))
        elif "pidfd" in fd.target and (match := _PIDFD_PID.search(_fdinfo(pid, fd.fd))):
            self.pidfds[pid, fd.fd] = int(match.group(1))

    def _regular(self, pid: int, fd: Fd) -> None:
        path = f"/proc/{pid}/fd/{fd.fd}"
        name = fd.target.removesuffix(_DELETED)
        if f.is_memory_file(fd.target, fd.dev, self.mount_devs):
            self.copied.setdefault((fd.dev, fd.ino), self._allocated(path, fd.dev, fd.size))
        elif fd.nlink == 0:
            self._ghost(pid, f"fd {fd.fd}", path, name, (fd.dev, fd.ino, fd.size))
        elif name != fd.target and not _is_at(f"/proc/{pid}/root{fd.target}", fd):
            self.renamed.append(f.RenamedFile(pid, fd.fd, name))

    def _ghost(self, pid: int, where: str, path: str, name: str, identity: tuple[int, int, int]) -> None:
        dev, ino, size = identity
        if (dev, ino) not in self.copied:
            allocated = self._allocated(path, dev, size)
            self.copied[dev, ino] = allocated
            self.ghosts.append(f.GhostFile(pid, where, name, allocated))

    def _allocated(self, path: str, dev: int, size: int) -> int:
        """Return what a file takes up; of one whose server may be gone only the size is known."""
        if dev in self.remote_devs:
            return size
        return os.stat(path).st_blocks * STAT_BLOCK  # noqa: PTH116 - a link of /proc

    # mappings -------------------------------------------------------------------------------------------

    def _maps(self, pid: int) -> tuple[int, bool, bool]:
        """Look at what is mapped; the bytes of huge pages, whether uprobes are set, and CUDA's library."""
        data = procfs.read_bounded(f"/proc/{pid}/maps", MAX_MAPS_BYTES)
        if len(data) >= MAX_MAPS_BYTES:
            data = data[: data.rfind(b"\n")]
            self.unseen.append(f"mappings of pid {pid} behind {MAX_MAPS_BYTES >> 20} MiB of text")
        huge_bytes = 0
        uprobes = libcuda = False
        for line in data.split(b"\n"):
            if len(line) <= MAPS_NAME_COLUMN:
                continue
            addresses, perms, _offset, dev, ino, path = line.split(None, 5)
            if path.startswith(b"["):
                uprobes = uprobes or path == b"[uprobes]"
                if not path.startswith(b"[anon_shmem:"):
                    continue
            elif path.startswith(b"/anon_hugepage") and perms.endswith(b"p"):
                start, end = addresses.split(b"-")
                huge_bytes += int(end, 16) - int(start, 16)
                continue
            libcuda = libcuda or nvidia.is_libcuda(os.fsdecode(path))
            key = (dev, ino, path, pid if path.startswith(_ODD_PATHS) else 0)
            if key not in self.seen:
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    self._mapping(pid, addresses.decode(), os.fsdecode(path))
                    self.seen.add(key)
        return huge_bytes, uprobes, libcuda

    def _mapping(self, pid: int, addresses: str, target: str) -> None:
        link = f"/proc/{pid}/map_files/{addresses}"
        start = addresses.partition("-")[0]
        stat = linux.stat_cached(link)
        name = target.removesuffix(_DELETED)
        memory = f.is_memory_file(target, stat.dev, self.mount_devs)
        if not st.S_ISREG(stat.mode) or target.startswith(("/SYSV", "/secretmem")):
            self.mapped.append(f.OddMapping(pid, int(start, 16), name, stat.mode, stat.rdev))
        if memory:
            self.copied.setdefault((stat.dev, stat.ino), self._allocated(link, stat.dev, stat.size))
        elif stat.nlink == 0 and st.S_ISREG(stat.mode) and not name.startswith(f.KERNEL_FILES):
            self._ghost(pid, f"mapping {start}", link, name, (stat.dev, stat.ino, stat.size))

    # sockets --------------------------------------------------------------------------------------------

    def _sockets(self) -> _Sockets:
        tcp: list[sockets.TcpSocket] = []
        unix: list[sockets.UnixSocket] = []
        peers: dict[int, sockets.UnixSocket] = {}
        try:
            if wanted := self._of_kind("TCP"):
                tcp = sockets.tcp_sockets(self.root, wanted)
            if wanted := self._of_kind("UNIX"):
                unix = sockets.unix_sockets(self.root, wanted)
            if outside := {socket.peer_inode for socket in unix} - wanted - {0}:
                for pid in (self.root, os.getpid()):  # of a container, the agent's network is another one
                    peers |= {peer.inode: peer for peer in sockets.unix_sockets(pid, outside)}
        except ProcessLookupError:
            raise
        except OSError as error:
            return (), (), {}, error.strerror or str(error)
        return tuple(tcp), tuple(unix), peers, ""

    def _of_kind(self, name: str) -> set[int]:
        return {inode for inode, kind in self.socket_kinds.items() if not kind or kind.startswith(name)}

    def _netlink(self) -> Iterator[f.NetlinkSocket]:
        wanted = {inode for inode, kind in self.socket_kinds.items() if kind == "NETLINK"}
        if not wanted:
            return
        table = procfs.read_bounded(f"/proc/{self.root}/net/netlink", MAX_TABLE_BYTES)
        for line in table.splitlines()[1:]:
            fields = line.split()
            # sk Eth Pid Groups Rmem Wmem Dump Locks Drops Inode
            if len(fields) >= 10 and int(fields[9]) in wanted:  # noqa: PLR2004 - the number of columns
                yield f.NetlinkSocket(int(fields[9]), int(fields[4]))

    # files ----------------------------------------------------------------------------------------------

    def _leftovers(self) -> Iterator[str]:
        """Find what an earlier ``--link-remap`` may have left where this dump will make links."""
        for pid, directory in sorted({(file.pid, os.path.dirname(file.path)) for file in self.renamed}):  # noqa: PTH120
            with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/root{directory}") as entries:
                for entry in islice(entries, MAX_DIRECTORY_ENTRIES):
                    if entry.name.startswith("link_remap."):
                        yield f"{directory}/{entry.name}"

    def _sysv(self) -> tuple[str, ...]:
        """List the SysV objects that the root sees, not the node's; who may not look may not dump either."""
        with contextlib.suppress(PermissionError):
            if procfs.namespaces(self.root).get("ipc") not in (None, procfs.namespaces(os.getpid())["ipc"]):
                return sysv_objects(self.root)
        return ()

    def _preload_file(self) -> bool:
        """Whether the root's /etc/ld.so.preload names something."""
        with (
            contextlib.suppress(OSError),
            inroot.opened(self.root, "etc/ld.so.preload", os.O_PATH) as fd,
        ):
            return linux.stat_cached(f"/proc/self/fd/{fd}").size > 0
        return False


def _fdinfo(pid: int, fd: int) -> bytes:
    return procfs.read_bounded(f"/proc/{pid}/fdinfo/{fd}", MAX_TABLE_BYTES)


def _socket_kind(pid: int, fd: int) -> str:
    """Name a socket's protocol, such as ``TCPv6`` or ``UNIX-STREAM``, without opening the socket."""
    try:
        return os.getxattr(f"/proc/{pid}/fd/{fd}", "system.sockprotoname").rstrip(b"\0").decode("ascii")
    except (FileNotFoundError, ProcessLookupError):
        raise
    except OSError:
        return ""


def _is_at(path: str, fd: Fd) -> bool:
    """Whether ``path`` is the open file: a file's own name may end in " (deleted)"."""
    with contextlib.suppress(OSError):
        stat = linux.stat_cached(path)
        return (stat.dev, stat.ino) == (fd.dev, fd.ino)
    return False


def _has_own_table(pid: int, tid: int) -> bool:
    """Whether a thread has a descriptor table of its own, by the number of descriptors in it.

    The counts are no snapshot while the process opens and closes files, so a difference must stay.
    """
    for _ in range(TABLE_LOOKS):
        before, theirs, after = _open_count(pid, pid), _open_count(pid, tid), _open_count(pid, pid)
        if theirs in (before, after):
            return False
    return True


def _open_count(pid: int, tid: int) -> int:
    """Count the open descriptors: the size of the directory since Linux 6.2, its entries before."""
    path = f"/proc/{pid}/task/{tid}/fd"
    return linux.stat_cached(path).size or len(os.listdir(path))  # noqa: PTH208 - names, not paths


def _lock_holders() -> Iterator[int]:
    """Yield the pids that /proc/locks names; open file description locks have none (-1)."""
    for line in procfs.read_bounded("/proc/locks", MAX_TABLE_BYTES).splitlines():
        fields = line.split()
        if len(fields) > 5 and fields[1] != b"->":  # noqa: PLR2004 - id: kind mode access pid file
            yield int(fields[4])


def _tracers(tasks: Sequence[f.Task], stats: Mapping[int, Stat]) -> dict[int, str]:
    found: dict[int, str] = {}
    for task in tasks:
        if tracer := task.status.tracer_pid:
            found[task.pid] = f"pid {tracer} ({stats[tracer].comm})" if tracer in stats else f"pid {tracer}"
    return found
