"""The preflight checks as tables: a few facts in, one row out."""

# ruff: noqa: E501 - a case of the table is read across

from __future__ import annotations

import os
import stat as st
from dataclasses import replace
from typing import Any

import pytest

from hibernode.errors import RefusedError
from hibernode.host import linux
from hibernode.host.mounts import Mount
from hibernode.host.procfs import Fd, Stat, Status
from hibernode.host.sockets import TcpSocket, UnixSocket
from hibernode.preflight import Facts, decide_tcp, dump_findings, refuse
from hibernode.preflight.facts import (
    GhostFile,
    NetlinkSocket,
    OddMapping,
    RenamedFile,
    StoreFacts,
    Task,
    Thread,
    Watch,
)
from hibernode.preflight.rows import listed, size
from hibernode.settings import CriuSettings, Settings, StoreSettings
from hibernode.workload import Finding, Verdict

ROOT = 100
CHILD = 101
AGENT = 50
NAMESPACES = {
    "mnt": 1, "pid": 2, "pid_for_children": 2, "net": 3, "user": 4,
    "ipc": 5, "uts": 6, "cgroup": 7, "time": 8, "time_for_children": 8,
}  # fmt: skip
DISK = os.makedev(8, 1)
SHM = os.makedev(0, 27)
CHR = st.S_IFCHR | 0o600
REG = st.S_IFREG | 0o600
BLK = st.S_IFBLK | 0o600
DOOR = str(Settings().metadata.socket)
PIPE = st.S_IFIFO | 0o600
GIB = 1 << 30
CONTAINER = {**NAMESPACES, "pid": 91, "pid_for_children": 91, "mnt": 92, "net": 93}


def make_stat(pid: int = ROOT, **changes: Any) -> Stat:
    base = Stat(pid, "worker", "S", 1, ROOT, ROOT, 0, 0, 1, 5000, 1 << 20, 1 << 20)
    return replace(base, **changes)


def make_status(**changes: Any) -> Status:
    base = Status((0, 0, 0, 0), (0, 0, 0, 0), (), 0, False, 0, (ROOT,), 1 << 20, *[0] * 7)
    return replace(base, **changes)


def make_fd(fd: int, target: str, mode: int = 0o600, **changes: Any) -> Fd:
    base = Fd(fd, target, os.O_RDWR, 22, mode, DISK, 1000 + fd, 0, 1, 0)
    return replace(base, **changes)


def device(fd: int, path: str, major: int, minor: int, mode: int = CHR) -> Fd:
    return make_fd(fd, path, mode, rdev=os.makedev(major, minor))


def sock(fd: int, inode: int) -> Fd:
    return make_fd(fd, f"socket:[{inode}]", st.S_IFSOCK, ino=inode)


def pipe(fd: int, inode: int, flags: int) -> Fd:
    return make_fd(fd, f"pipe:[{inode}]", PIPE, ino=inode, flags=flags)


def make_task(*fds: Fd, pid: int = ROOT, stat: dict[str, Any] | None = None, **changes: Any) -> Task:
    changes.setdefault("status", make_status())
    changes.setdefault("namespaces", NAMESPACES)
    if pid != ROOT:
        stat = {"ppid": ROOT, **(stat or {})}
    return Task(make_stat(pid, **(stat or {})), fds=fds, **changes)


def mount(
    id_: int, point: str, *, parent: int = 1, fs_type: str = "ext4", dev: tuple[int, int] = (8, 1)
) -> Mount:
    return Mount(id_, parent, dev, "/", point, "rw", fs_type, "none", "rw", ())


MOUNTS = (mount(22, "/"), mount(23, "/dev/shm", parent=22, fs_type="tmpfs", dev=(0, 27)))


def make_facts(*tasks: Task, **changes: Any) -> Facts:
    values: dict[str, Any] = {
        "tasks": tasks or (make_task(),),
        "agent_pid": AGENT,
        "agent_namespaces": NAMESPACES,
        "mounts": MOUNTS,
        "store": StoreFacts("/store", fs_type=linux.EXT4_SUPER_MAGIC, free_bytes=100 * GIB),
        "criu_version": "4.2.1",
        "mem_available_bytes": 8 * GIB,
    }
    return Facts(**{**values, **changes})


def fds(*items: Fd) -> Facts:
    return make_facts(make_task(*items))


def unix(inode: int, peer: int, kind: str = "stream", path: str = "") -> UnixSocket:
    return UnixSocket(inode, peer, "ESTABLISHED", kind, path)


def ghost(count: int) -> GhostFile:
    return GhostFile(ROOT, "fd 3", "/tmp/big", count)


def no_criu(**changes: Any) -> Settings:
    return Settings(criu=CriuSettings(**changes))


SETTINGS = Settings()
FAIL, WARN, OK, SKIP = Verdict.FAIL, Verdict.WARN, Verdict.OK, Verdict.SKIP

# (id, facts, check, verdict, words that the row must hold)
CASES: list[tuple[str, Facts, str, Verdict, tuple[str, ...]]] = [
    ("FC-01 an io_uring descriptor fails", fds(make_fd(7, "anon_inode:[io_uring]")),
     "tree.io_uring", FAIL, ("pid 100 fd 7", "IoUringInUse", "seccomp")),
    ("FC-01 a ring in a child fails", make_facts(make_task(), make_task(make_fd(4, "anon_inode:[io_uring]"), pid=CHILD)),
     "tree.io_uring", FAIL, ("pid 101 fd 4",)),
    ("FC-01 a mapped ring without a descriptor fails",
     make_facts(mapped=(OddMapping(ROOT, 0x7F00, "anon_inode:[io_uring]", 0o600, 0),)),
     "tree.io_uring", FAIL, ("pid 100 mapping 7f00",)),
    ("FC-01 a ring in a thread's own table fails",
     make_facts(make_task(threads=(Thread(102, "S", (make_fd(9, "anon_inode:[io_uring]"),)),))),
     "tree.io_uring", FAIL, ("pid 100 fd 9",)),
    ("a thread with its own descriptors fails", make_facts(make_task(threads=(Thread(102, "S", ()),))),
     "tree.fd_tables", FAIL, ("thread 102 of pid 100",)),
    ("a thread that shares them is fine", make_facts(make_task(threads=(Thread(102, "S"),))),
     "tree.fd_tables", OK, ()),
    *((f"{name} is an anonymous inode that CRIU knows", fds(make_fd(3, f"anon_inode:{name}")),
       "tree.anon_inodes", OK, ())
      for name in ("[eventfd]", "[eventpoll]", "[timerfd]", "[signalfd]", "inotify", "[fanotify]", "[pidfd]")),
    *((f"{name} cannot be dumped", fds(make_fd(3, f"anon_inode:{name}")),
       "tree.anon_inodes", FAIL, ("pid 100 fd 3", name, "UnsupportedDescriptor"))
      for name in ("[perf_event]", "[userfaultfd]", "kvm-vm", "bpf-map", "bpf-prog", "seccomp notify", "[fuse]")),
    ("secret memory cannot be dumped", make_facts(mapped=(OddMapping(ROOT, 16, "/secretmem", REG, 0),)),
     "tree.anon_inodes", FAIL, ("mapping 10", "/secretmem")),
    ("io_uring is said once, by its own row", fds(make_fd(7, "anon_inode:[io_uring]")), "tree.anon_inodes", OK, ()),
    *((f"{path} can be dumped", fds(device(3, path, *number)), "tree.devices", OK, ())
      for path, number in {
          "/dev/null": (1, 3), "/dev/zero": (1, 5), "/dev/full": (1, 7), "/dev/random": (1, 8),
          "/dev/urandom": (1, 9), "/dev/kmsg": (1, 11), "/dev/ptmx": (5, 2), "/dev/console": (5, 1),
          "/dev/tty1": (4, 1), "/dev/pts/7": (136, 7), "/dev/ttyUSB0": (188, 0),
      }.items()),
    *((f"{path} cannot be dumped", fds(device(3, path, *number)), "tree.devices", FAIL,
       ("pid 100 fd 3", path, f"{number[0]}:{number[1]}", "DeviceInUse"))
      for path, number in {
          "/dev/fuse": (10, 229), "/dev/kvm": (10, 232), "/dev/net/tun": (10, 200), "/dev/dri/card0": (226, 0),
          "/dev/kfd": (510, 0), "/dev/ttyS0": (4, 64), "/dev/pts/300": (137, 44),
      }.items()),
    ("a block device cannot be dumped", fds(device(3, "/dev/loop0", 7, 0, BLK)), "tree.devices", FAIL, ("7:0",)),
    ("a mapped device cannot be dumped",
     make_facts(mapped=(OddMapping(ROOT, 0xA000, "/dev/kfd", CHR, os.makedev(510, 0)),)),
     "tree.devices", FAIL, ("pid 100 mapping a000", "510:0")),
    ("a private mapping of /dev/zero is memory",
     make_facts(mapped=(OddMapping(ROOT, 0xA000, "/dev/zero", CHR, os.makedev(1, 5)),)), "tree.devices", OK, ()),
    ("a pidfd of a process outside fails",
     make_facts(make_task(make_fd(5, "anon_inode:[pidfd]")), pidfds={(ROOT, 5): 9}),
     "tree.pidfds", FAIL, ("pid 100 fd 5", "pid 9")),
    ("a pidfd of the tree is fine", make_facts(pidfds={(ROOT, 5): ROOT}), "tree.pidfds", OK, ()),
    ("a pidfd of a process that has ended is fine", make_facts(pidfds={(ROOT, 5): -1}), "tree.pidfds", OK, ()),
    ("a pidfd of a thread fails",
     make_facts(make_task(make_fd(5, "pidfd:[1]", flags=os.O_EXCL)), pidfds={(ROOT, 5): ROOT}),
     "tree.pidfds", FAIL, ("thread",)),
    ("stdout on a mount that is not in the mountinfo fails", fds(make_fd(1, "/var/log/x", REG, mnt_id=99)),
     "tree.paths", FAIL, ("pid 100 fd 1", "/var/log/x", "MountNotVisible")),
    ("a memfd has no mount and is fine", fds(make_fd(1, "/memfd:x (deleted)", REG, mnt_id=4)), "tree.paths", OK, ()),
    ("a file on a covered mount fails",
     make_facts(make_task(make_fd(3, "/mnt/f", REG, mnt_id=30)),
                mounts=(*MOUNTS, mount(30, "/mnt", parent=22), mount(31, "/mnt", parent=30))),
     "tree.paths", FAIL, ("pid 100 fd 3", "covers")),
    ("a pipe with both ends in the tree is fine",
     make_facts(make_task(pipe(3, 70, os.O_RDONLY)), make_task(pipe(4, 70, os.O_WRONLY), pid=CHILD)),
     "tree.pipes", OK, ("all inside",)),
    ("stdio pipes to outside are reconnected", fds(pipe(0, 70, os.O_RDONLY), pipe(1, 71, os.O_WRONLY)),
     "tree.pipes", OK, ("2 to reconnect",)),
    ("another descriptor of a stdio pipe is fine", fds(pipe(1, 71, os.O_WRONLY), pipe(9, 71, os.O_WRONLY)),
     "tree.pipes", OK, ()),
    ("another pipe to outside is worth a warning", fds(pipe(5, 70, os.O_WRONLY)),
     "tree.pipes", WARN, ("pid 100 fd 5", "pipe:[70]")),
    ("a packet pipe fails", fds(pipe(3, 70, os.O_RDONLY | os.O_DIRECT), pipe(4, 70, os.O_WRONLY | os.O_DIRECT)),
     "tree.pipes", FAIL, ("pid 100 fd 3", "PacketPipe")),
    ("a Unix stream to outside fails",
     make_facts(make_task(sock(3, 80)), unix=(unix(80, 90),), unix_peers={90: unix(90, 80, path="/run/x.sock")}),
     "tree.unix_peers", FAIL, ("pid 100 fd 3", "/run/x.sock", "UnixPeerOutside")),
    ("a Unix stream to the agent's metadata socket is fine",
     make_facts(make_task(sock(3, 80)), unix=(unix(80, 90),), unix_peers={90: unix(90, 80, path=DOOR)}),
     "tree.unix_peers", OK, ("1 to the agent",)),
    ("a Unix seqpacket to outside fails", make_facts(make_task(sock(3, 80)), unix=(unix(80, 90, "seqpacket"),)),
     "tree.unix_peers", FAIL, ("seqpacket", "nameless")),
    ("a datagram socket to a name outside is fine",
     make_facts(make_task(sock(3, 80)), unix=(unix(80, 90, "dgram"),),
                unix_peers={90: unix(90, 0, "dgram", "/dev/log")}),
     "tree.unix_peers", OK, ()),
    ("a datagram socket to a nameless peer outside fails",
     make_facts(make_task(sock(3, 80)), unix=(unix(80, 90, "dgram"),), unix_peers={90: unix(90, 80, "dgram")}),
     "tree.unix_peers", FAIL, ("dgram",)),
    ("a Unix pair in the tree is fine",
     make_facts(make_task(sock(3, 80), sock(4, 81)), unix=(unix(80, 81), unix(81, 80))), "tree.unix_peers", OK, ()),
    ("a Unix socket whose peer was closed is fine",
     make_facts(make_task(sock(3, 80)), unix=(replace(unix(80, 0), shut_down=True),)), "tree.unix_peers", OK, ()),
    ("a connection that nobody outside accepted fails", make_facts(make_task(sock(3, 80)), unix=(unix(80, 0),)),
     "tree.unix_peers", FAIL, ("pid 100 fd 3", "not accepted")),
    ("a connection that waits in the tree is fine",
     make_facts(make_task(sock(3, 80), sock(4, 81)),
                unix=(unix(80, 0), UnixSocket(81, 0, "LISTEN", "stream", "/s", waiting=(80,)))),
     "tree.unix_peers", OK, ()),
    ("where the kernel lists no sockets the row is skipped", make_facts(sockets_error="Permission denied"),
     "tree.unix_peers", SKIP, ("Permission denied",)),
    *((f"a {kind} socket cannot be dumped", make_facts(make_task(sock(3, 80)), socket_kinds={80: kind}),
       "tree.sockets", FAIL, ("pid 100 fd 3", kind)) for kind in ("MPTCP", "AF_VSOCK", "ALG", "XDP", "SCTP")),
    *((f"a {kind} socket can be dumped", make_facts(make_task(sock(3, 80)), socket_kinds={80: kind}),
       "tree.sockets", OK, ()) for kind in ("TCPv6", "UDP-Lite", "UNIX-STREAM", "RAW", "NETLINK", "PACKET", "")),
    ("unread netlink messages fail", make_facts(make_task(sock(3, 80)), netlink=(NetlinkSocket(80, 512),)),
     "tree.netlink", FAIL, ("pid 100 fd 3", "512")),
    ("a bound netlink socket is fine", make_facts(make_task(sock(3, 80)), netlink=(NetlinkSocket(80, 0),)),
     "tree.netlink", OK, ()),
    ("a deleted file over the limit fails", make_facts(ghosts=(ghost(GIB),)),
     "tree.deleted_files", FAIL, ("/tmp/big", "1.0 GiB", "512.0 MiB", "GhostFileTooLarge")),
    ("a small deleted file is fine", make_facts(ghosts=(ghost(4096),)), "tree.deleted_files", OK, ("1, 4.0 KiB",)),
    ("a file that needs a link is fine", make_facts(renamed=(RenamedFile(ROOT, 3, "/tmp/a"),)),
     "tree.link_remap", OK, ("1 files",)),
    ("FC-45 a foreign link_remap file is named",
     make_facts(renamed=(RenamedFile(ROOT, 3, "/dev/shm/a"),), leftovers=("/dev/shm/link_remap.3",)),
     "tree.link_remap", WARN, ("/dev/shm/link_remap.3",)),
    ("a watch on a deleted file of a tmpfs fails",
     make_facts(make_task(make_fd(3, "/dev/shm/d (deleted)", st.S_IFDIR, dev=SHM, ino=5, nlink=0, mnt_id=23)),
                watches=(Watch(ROOT, 4, 5, SHM, True),)),
     "tree.inotify", FAIL, ("pid 100 fd 4", "tmpfs")),
    ("a watch on a deleted file of a disk is fine",
     make_facts(make_task(make_fd(3, "/d (deleted)", st.S_IFDIR, ino=5, nlink=0)), watches=(Watch(ROOT, 4, 5, DISK, True),)),
     "tree.inotify", OK, ()),
    ("a watch on an unknown mount fails", make_facts(watches=(Watch(ROOT, 4, 5, 77, True),)),
     "tree.inotify", FAIL, ("mountinfo",)),
    ("a watch without a handle fails", make_facts(watches=(Watch(ROOT, 4, 5, DISK, False),)),
     "tree.inotify", FAIL, ("handles",)),
    ("a terminal whose master is outside fails", fds(device(0, "/dev/pts/3", 136, 3)),
     "tree.tty", FAIL, ("pid 100 fd 0", "/dev/pts/3", "TerminalAttached", "setsid")),
    ("a terminal whose master is in the tree is fine",
     make_facts(make_task(device(0, "/dev/pts/3", 136, 3)), terminals=frozenset({3})), "tree.tty", OK, ()),
    ("/dev/tty of an outside terminal fails",
     make_facts(make_task(device(5, "/dev/tty", 5, 0), stat={"tty_nr": os.makedev(136, 3)})),
     "tree.tty", FAIL, ("fd 5",)),
    ("a controlling terminal that is not open is fine", make_facts(make_task(stat={"tty_nr": os.makedev(136, 3)})),
     "tree.tty", OK, ()),
    ("SysV memory in the machine's IPC namespace fails", make_facts(mapped=(OddMapping(ROOT, 1, "/SYSV00000000", REG, 0),)),
     "tree.sysv_shm", FAIL, ("/SYSV00000000",)),
    ("SysV memory in an IPC namespace of its own is fine",
     make_facts(make_task(namespaces={**NAMESPACES, "ipc": 55}), mapped=(OddMapping(ROOT, 1, "/SYSV0", REG, 0),)),
     "tree.sysv_shm", OK, ()),
    ("SysV objects beside a container are shared with others", make_facts(make_task(namespaces=CONTAINER, status=make_status(ns_pids=(ROOT, 1))), sysv=("2 semaphore sets",)),
     "tree.sysv_objects", WARN, ("2 semaphore sets",)),
    ("SysV objects of a process with an IPC namespace of its own are its own", make_facts(make_task(namespaces={**NAMESPACES, "ipc": 55}), sysv=("1 semaphore set",)),
     "tree.sysv_objects", OK, ()),
    ("init is refused", make_facts(make_task(pid=1)), "tree.identity", FAIL, ("pid 1",)),
    ("a kernel thread is refused", make_facts(make_task(stat={"flags": 0x00200000})), "tree.identity", FAIL, ("kernel",)),
    ("the agent is not dumped with its ancestor", make_facts(make_task(), make_task(pid=AGENT)),
     "tree.identity", FAIL, ("agent", "pid 50")),
    ("an ordinary worker is who it says", make_facts(), "tree.identity", OK, ("pid 100 (worker)",)),
    ("a process that may not be looked at fails", make_facts(denied=("pid 101: Permission denied",)),
     "tree.readable", FAIL, ("pid 101",)),
    ("what was too much is said", make_facts(unseen=("904 of 5000 processes",)), "tree.size", WARN, ("904",)),
    *((f"a root with only a {name} namespace of its own is no container", make_facts(make_task(namespaces={**NAMESPACES, name: 99})),
       "tree.namespaces", FAIL, ("ContainerNotSupported", name, "hostPID"))
      for name in ("mnt", "pid", "net")),
    ("a root in another user namespace is refused", make_facts(make_task(namespaces={**NAMESPACES, "user": 99})),
     "tree.namespaces", FAIL, ("UserNamespace", "hostUsers")),
    ("a process of a container that is not its init is refused",
     make_facts(make_task(status=make_status(ns_pids=(ROOT, 7)), namespaces=CONTAINER)),
     "tree.namespaces", FAIL, ("ContainerNotSupported", "pid 7 in its pid")),
    ("a whole container is dumped", make_facts(make_task(status=make_status(ns_pids=(ROOT, 1)), namespaces=CONTAINER)),
     "tree.namespaces", OK, ("one container",)),
    *((f"a root in another {name} namespace is dumped", make_facts(make_task(namespaces={**NAMESPACES, name: 99})),
       "tree.namespaces", OK, ()) for name in ("ipc", "uts", "cgroup")),
    *((f"a {name} namespace inside the tree fails",
       make_facts(make_task(), make_task(pid=CHILD, namespaces={**NAMESPACES, name: 99})),
       "tree.namespaces", FAIL, ("pid 101", name))
      for name in ("mnt", "net", "user", "ipc", "uts", "pid_for_children", "time_for_children")),
    ("a cgroup namespace inside the tree is fine",
     make_facts(make_task(), make_task(pid=CHILD, namespaces={**NAMESPACES, "cgroup": 99})), "tree.namespaces", OK, ()),
    ("a zombie has no namespaces and is fine", make_facts(make_task(), make_task(pid=CHILD, namespaces={})),
     "tree.namespaces", OK, ()),
    ("a traced task fails and its tracer is named", make_facts(tracers={ROOT: "pid 7 (gdb)"}),
     "tree.state", FAIL, ("pid 100", "pid 7 (gdb)", "TaskTraced")),
    ("FC-43 a task in D state is named", make_facts(make_task(threads=(Thread(103, "D"),))),
     "tree.state", WARN, ("task 103 of pid 100 in D state", "TaskInDState")),
    ("a stopped task is worth a word", make_facts(make_task(stat={"state": "T"})), "tree.state", WARN, ("stopped",)),
    ("running tasks are fine", make_facts(make_task(threads=(Thread(103, "R"),))), "tree.state", OK, ("2 tasks",)),
    ("a zombie is worth a word", make_facts(make_task(), make_task(pid=CHILD, stat={"state": "Z"})),
     "tree.zombies", WARN, ("pid 101",)),
    ("a session whose leader is outside fails",
     make_facts(make_task(), make_task(pid=CHILD, stat={"session": 77, "pgrp": 77}), outside_pids=frozenset({77})),
     "tree.session", FAIL, ("pid 101", "session 77", "ForeignSession")),
    ("a session whose leader has ended is fine",
     make_facts(make_task(), make_task(pid=CHILD, stat={"session": 77, "pgrp": 77})), "tree.session", OK, ()),
    ("the shell's session and group are inherited",
     make_facts(make_task(stat={"session": 77, "pgrp": 78}), make_task(pid=CHILD, stat={"session": 77, "pgrp": 78}),
                outside_pids=frozenset({77, 78})),
     "tree.session", OK, ("session 77",)),
    ("FC-08 somebody outside in the tree's session is named", make_facts(held_ids={ROOT: 555}),
     "tree.session", WARN, ("pid 555", "session 100", "File exists")),
    *((f"seccomp mode {mode} is carried over", make_facts(make_task(status=make_status(seccomp_mode=mode))),
       "tree.seccomp", OK, (name,)) for mode, name in ((0, "off"), (1, "strict"), (2, "filter"))),
    ("uprobes fail", make_facts(make_task(uprobes=True)), "tree.uprobes", FAIL, ("pid 100", "UprobesActive")),
    ("FC-09 LD_PRELOAD is named", make_facts(make_task(preload="/opt/x.so")), "tree.ld_preload", WARN, ("/opt/x.so",)),
    ("FC-09 /etc/ld.so.preload is named", make_facts(preload_file=True), "tree.ld_preload", WARN, ("/etc/ld.so.preload",)),
    ("no CRIU fails", make_facts(criu_version=None), "criu.present", FAIL, ("make setup",)),
    ("no CRIU has no version", make_facts(criu_version=None), "criu.version", SKIP, ()),
    ("CRIU 4.1.1 is too old", make_facts(criu_version="4.1.1"), "criu.version", FAIL, ("4.1.1", "CriuTooOld")),
    *((f"CRIU {version} is new enough", make_facts(criu_version=version), "criu.version", OK, (version,))
      for version in ("4.2", "4.2.1", "4.10", "5.0")),
    ("FC-39 no space for the image fails",
     make_facts(make_task(anonymous_bytes=3 * GIB), store=StoreFacts("/store", free_bytes=3 * GIB)),
     "store.space", FAIL, ("NoSpace", "3.0 GiB")),
    ("FC-39 the floor counts too",
     make_facts(make_task(anonymous_bytes=3 * GIB), store=StoreFacts("/store", free_bytes=4 * GIB)), "store.space", FAIL, ()),
    ("space for image and floor is fine",
     make_facts(make_task(anonymous_bytes=3 * GIB), store=StoreFacts("/store", free_bytes=5 * GIB)), "store.space", OK, ()),
    ("little memory is worth a word", make_facts(mem_available_bytes=1 << 20), "memory.available", WARN, ("1.0 MiB",)),
    ("a store in memory takes the image's memory",
     make_facts(make_task(anonymous_bytes=9 * GIB), store=StoreFacts("/s", fs_type=linux.TMPFS_MAGIC, free_bytes=99 * GIB)),
     "memory.available", WARN, ("8.0 GiB",)),
    ("a store that others may read fails", make_facts(store=StoreFacts("/s", mode=0o755, free_bytes=99 * GIB)),
     "store.private", FAIL, ("0755", "chmod 0700")),
    ("a store of somebody else fails", make_facts(store=StoreFacts("/s", uid=1000, free_bytes=99 * GIB)),
     "store.private", FAIL, ("uid 1000",)),
    ("a store that is a link fails", make_facts(store=StoreFacts("/s", is_directory=False, mode=0o777, free_bytes=99 * GIB)),
     "store.private", FAIL, ("link",)),
    ("a store that is not there yet is worth a word", make_facts(store=StoreFacts("/s", exists=False, free_bytes=99 * GIB)),
     "store.private", WARN, ("does not exist",)),
    *((f"a store on {name} is worth a word", make_facts(store=StoreFacts("/s", fs_type=number, free_bytes=99 * GIB)),
       "store.filesystem", WARN, (name,)) for name, number in
      (("tmpfs", linux.TMPFS_MAGIC), ("nfs", linux.NFS_SUPER_MAGIC), ("fuse", linux.FUSE_SUPER_MAGIC))),
]  # fmt: skip


def one(rows: list[Finding], check: str) -> Finding:
    (found,) = [finding for finding in rows if finding.check == check]
    return found


@pytest.mark.parametrize(
    ("facts", "check", "verdict", "words"), [pytest.param(*case[1:], id=case[0]) for case in CASES]
)
def test_check(facts: Facts, check: str, verdict: Verdict, words: tuple[str, ...]) -> None:
    """A check says its verdict, and names what it found."""
    finding = one(dump_findings(facts, SETTINGS), check)
    assert finding.verdict is verdict
    text = f"{finding.found} {finding.reason} {finding.remedy}"
    assert all(word in text for word in words), text


def test_a_plain_tree_passes_every_check() -> None:
    """Nothing is said against a worker that does nothing special, and no row comes twice."""
    rows = dump_findings(make_facts(), SETTINGS)
    assert {row.verdict for row in rows} == {OK}
    assert len({row.check for row in rows}) == len(rows)


def test_rows_that_fail_say_why_and_what_to_do() -> None:
    """Every row that fails or warns has a CamelCase reason, what was expected, and a remedy."""
    for _, facts, *_rest in CASES:
        for finding in dump_findings(facts, SETTINGS):
            if finding.verdict in (FAIL, WARN):
                assert finding.reason[0].isupper()
                assert finding.reason.isalnum()
                assert finding.remedy
                assert finding.expected


@pytest.mark.parametrize(
    ("settings", "facts", "check"),
    [
        pytest.param(no_criu(file_locks=False), make_facts(locked_pids=frozenset({ROOT})), "tree.file_locks",
                     id="a lock is held and locks are not dumped"),
        pytest.param(no_criu(link_remap=False), make_facts(renamed=(RenamedFile(ROOT, 3, "/tmp/a"),)), "tree.link_remap",
                     id="a file needs a link and links are not made"),
        pytest.param(no_criu(ghost_limit_bytes=1), make_facts(ghosts=(ghost(2),)), "tree.deleted_files",
                     id="the limit for deleted files is the setting's"),
        pytest.param(Settings(store=StoreSettings(min_free_bytes=200 * GIB)), make_facts(), "store.space",
                     id="the floor of free space is the setting's"),
    ],
)  # fmt: skip
def test_settings_make_a_check_fail(settings: Settings, facts: Facts, check: str) -> None:
    """A check fails under a setting, and passes under the defaults."""
    assert one(dump_findings(facts, settings), check).verdict is FAIL
    assert one(dump_findings(facts, SETTINGS), check).verdict is OK


LOCAL, REMOTE = ("127.0.0.1", 8000), ("127.0.0.1", 40000)
PAIR = (
    TcpSocket("inet", "ESTABLISHED", LOCAL, REMOTE, 80),
    TcpSocket("inet", "ESTABLISHED", REMOTE, LOCAL, 81),
)
MAPPED = (
    TcpSocket("inet6", "ESTABLISHED", ("::ffff:127.0.0.1", 8000), ("::ffff:127.0.0.1", 40000), 80),
    TcpSocket("inet", "ESTABLISHED", REMOTE, LOCAL, 81),
)
OUTSIDE = TcpSocket("inet", "ESTABLISHED", ("10.0.0.1", 50000), ("10.0.0.2", 443), 82)
LISTENER = TcpSocket("inet", "LISTEN", LOCAL, ("0.0.0.0", 0), 83)
CLOSING = TcpSocket("inet", "CLOSE_WAIT", ("10.0.0.1", 50000), ("10.0.0.2", 443), 82)
PLACES = {80: (ROOT, 3), 81: (ROOT, 4), 82: (ROOT, 5), 83: (ROOT, 6)}


@pytest.mark.parametrize(
    ("setting", "sockets", "chosen", "verdict"),
    [
        pytest.param("auto", (), "close", OK, id="auto without a socket closes"),
        pytest.param("auto", (LISTENER,), "close", OK, id="auto with a listener alone closes"),
        pytest.param("auto", PAIR, "established", OK, id="auto keeps a pair in the tree"),
        pytest.param("auto", MAPPED, "established", OK, id="auto knows an IPv4 peer of an IPv6 socket"),
        pytest.param("auto", PAIR[:1], "close", WARN, id="auto closes when the other end is outside"),
        pytest.param("auto", (*PAIR, OUTSIDE), "close", WARN, id="auto closes all when one goes outside"),
        pytest.param("auto", (CLOSING,), "close", WARN, id="a connection that is being closed counts"),
        pytest.param("close", PAIR, "close", WARN, id="close says that a pair is closed"),
        pytest.param("close", (LISTENER,), "close", OK, id="close has nothing to say of a listener"),
        pytest.param("established", PAIR, "established", OK, id="established keeps a pair"),
        pytest.param(
            "established", (OUTSIDE,), "established", WARN, id="established warns of one to outside"
        ),
    ],
)
def test_decide_tcp(setting: Any, sockets: tuple[TcpSocket, ...], chosen: str, verdict: Verdict) -> None:
    """Connections inside the tree are kept, with one to outside all are closed; it never fails."""
    mode, finding = decide_tcp(setting, sockets, PLACES)
    assert (mode, finding.verdict) == (chosen, verdict)


def test_a_tcp_connection_to_outside_is_named() -> None:
    """The row names process, descriptor and both addresses of a connection that will be closed."""
    _, finding = decide_tcp("auto", (OUTSIDE,), PLACES)
    assert "pid 100 fd 5 (10.0.0.1:50000 to 10.0.0.2:443, ESTABLISHED)" in finding.found


def test_sockets_of_others_do_not_matter() -> None:
    """A connection that no process of the tree holds changes nothing."""
    assert decide_tcp("auto", PAIR, {}) == decide_tcp("auto", (), {})


def test_outside_pipes_are_listed_with_their_direction() -> None:
    """The ends to reconnect are listed by pid, descriptor, pipe and access mode."""
    facts = fds(
        pipe(0, 70, os.O_RDONLY), pipe(1, 71, os.O_WRONLY), pipe(3, 72, os.O_RDONLY), pipe(4, 72, os.O_WRONLY)
    )
    assert facts.outside_pipes == ((ROOT, 0, "pipe:[70]", "r"), (ROOT, 1, "pipe:[71]", "w"))


def test_shared_memory_is_counted_once_in_the_estimate() -> None:
    """The estimate adds private memory and swap of each process, and what they share once."""
    tasks = [
        make_task(pid=pid, anonymous_bytes=GIB, status=make_status(vm_swap_bytes=GIB))
        for pid in (ROOT, CHILD)
    ]
    facts = make_facts(*tasks, shared_bytes=GIB)
    assert 5 * GIB <= facts.estimate_bytes < 5 * GIB + (16 << 20)


def test_refuse_names_all_that_fails() -> None:
    """A refusal holds every failing row's finding, the first reason, and each remedy once."""
    facts = make_facts(make_task(make_fd(7, "anon_inode:[io_uring]"), device(3, "/dev/kvm", 10, 232)))
    with pytest.raises(RefusedError) as caught:
        refuse(dump_findings(facts, SETTINGS))
    error = caught.value
    assert error.reason == "IoUringInUse"
    assert "pid 100 fd 7" in error.message
    assert "pid 100 fd 3 (/dev/kvm" in error.message
    assert "seccomp" in error.remedy
    assert "device" in error.remedy
    assert error.fields["checks"] == ["tree.io_uring", "tree.devices"]


def test_refuse_lets_warnings_pass() -> None:
    """Rows that warn or are skipped do not refuse."""
    refuse([Finding("a", WARN), Finding("b", SKIP), Finding("c", OK)])


def test_a_refusal_is_bounded() -> None:
    """A thousand offenders make a message that an event can hold."""
    facts = fds(*(make_fd(n, "anon_inode:[io_uring]" + "x" * 500 * (n % 2)) for n in range(1000)))
    with pytest.raises(RefusedError) as caught:
        refuse(dump_findings(facts, SETTINGS))
    assert len(caught.value.message) < 1024


def test_names_of_files_cannot_break_a_row() -> None:
    """Line ends, escapes and bytes that are no text in a file's name come out escaped."""
    assert listed(["/tmp/a\nok tree.io_uring \x1b[2J\udcff"]) == r"/tmp/a\nok tree.io_uring \x1b[2J\udcff"


def test_long_lists_are_cut() -> None:
    """A row names the first eight things and counts the rest."""
    assert listed(str(n) for n in range(11)) == "0, 1, 2, 3, 4, 5, 6, 7 and 3 more"


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.0 KiB"),
        (3 * GIB // 2, "1.5 GiB"),
        (GIB << 20, "1024.0 TiB"),
    ],
)
def test_sizes_for_people(count: int, text: str) -> None:
    """Sizes are said in the unit that fits."""
    assert size(count) == text


@pytest.mark.parametrize(("quiesce", "verdict"), [("auto", OK), ("criu-plugin", OK), ("none", FAIL)])
def test_nvidias_devices_are_refused_only_where_nobody_takes_the_process_off_the_gpu(
    quiesce: str, verdict: Verdict
) -> None:
    """The quiesce step has the last word on them, after the processes should have let them go."""
    settings = Settings.model_validate({"gpu": {"quiesce": quiesce}})
    mapped = (OddMapping(ROOT, 0xA000, "/dev/nvidia-uvm", CHR, os.makedev(510, 0)),)
    assert one(dump_findings(make_facts(mapped=mapped), settings), "tree.devices").verdict is verdict
