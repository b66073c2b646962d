"""Programs that CRIU cannot dump or restore, and their neighbours that it can."""

# ruff: noqa: E501 - a case of the table is read across

from __future__ import annotations

from dataclasses import dataclass

from hibernode.workload import Verdict

FAIL, WARN, OK = Verdict.FAIL, Verdict.WARN, Verdict.OK

PRELUDE = """
import ctypes, mmap, os, socket, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
DIR = sys.argv[1]
def ready():
    os.write(1, b"ready\\n")
def rest():
    while True:
        time.sleep(1000)
"""
POSTLUDE = "\nready()\nrest()\n"

RING = "fd = libc.syscall(425, 4, ctypes.create_string_buffer(120))\nassert fd >= 0\n"
UNSUPPORTED_DEVICES = ("fuse", "kvm", "hwrng", "cpu_dma_latency", "loop-control", "btrfs-control")


@dataclass(frozen=True)
class Case:
    """What a program does, what preflight says of it, and what CRIU makes of it (None: not asked)."""

    name: str
    code: str
    check: str
    verdict: Verdict
    word: str = ""
    dumps: bool | None = None
    restores: bool | None = None


CASES = [
    Case("FC-01 holds an io_uring ring", RING, "tree.io_uring", FAIL, "pid {pid} fd 3", dumps=False),
    Case("FC-01 maps a ring and closed it", RING + "libc.mmap(None, 4096, 3, 1, fd, 0); os.close(fd)", "tree.io_uring", FAIL,
         "pid {pid} mapping", dumps=False),
    Case("FC-01 holds a ring in a thread of its own table", """
def go():
    libc.unshare(0x400); libc.syscall(425, 4, ctypes.create_string_buffer(120)); e.set(); rest()
e = threading.Event(); threading.Thread(target=go, daemon=True).start(); e.wait()""",
         "tree.io_uring", FAIL, "pid {pid} fd 3"),
    Case("has a thread with its own descriptors, which CRIU loses in silence", """
def go():
    libc.unshare(0x400); os.open("/etc/passwd", 0); e.set(); rest()
e = threading.Event(); threading.Thread(target=go, daemon=True).start(); e.wait()""",
         "tree.fd_tables", FAIL, "of pid {pid}", dumps=True),
    Case("has threads", "[threading.Thread(target=rest, daemon=True).start() for _ in range(8)]",
         "tree.fd_tables", OK, dumps=True),
    Case("has a perf event", """
attr = struct.pack("=IIQ", 1, 112, 0) + bytes(96)
assert libc.syscall(298, attr, 0, -1, -1, 0) >= 0""", "tree.anon_inodes", FAIL, "fd 3 (anon_inode:[perf_event])", dumps=False),
    Case("has a userfaultfd", "assert libc.syscall(323, 0) >= 0", "tree.anon_inodes", FAIL, "[userfaultfd]", dumps=False),
    Case("has eventfd, epoll, timerfd, inotify and a pidfd of itself", """
p = [libc.eventfd(0, 0), libc.epoll_create(1), libc.timerfd_create(1, 0), libc.inotify_init(),
     libc.syscall(434, os.getpid(), 0)]
libc.inotify_add_watch(p[3], b"/tmp", 2)""", "tree.anon_inodes", OK, dumps=True),
    Case("holds a device that CRIU does not know", f"""
for name in {UNSUPPORTED_DEVICES}:
    try:
        os.open("/dev/" + name, os.O_RDONLY | os.O_NONBLOCK)
        break
    except OSError:
        pass
else:
    raise SystemExit("no such device here")""", "tree.devices", FAIL, "pid {pid} fd 3 (/dev/", dumps=False),
    Case("holds memory devices", """
f = [os.open("/dev/" + name, os.O_RDONLY) for name in ("null", "zero", "full", "random", "urandom")]
m = mmap.mmap(f[1], 4096, flags=mmap.MAP_PRIVATE)""", "tree.devices", OK, dumps=True),
    Case("holds a pidfd of its parent", "libc.syscall(434, os.getppid(), 0)", "tree.pidfds", FAIL, "fd 3", dumps=False),
    Case("holds a file of another mount namespace", """
a, b = socket.socketpair()
child = os.fork()
if child == 0:
    libc.unshare(0x20000); libc.mount(b"none", b"/", None, 0x44000, None)
    libc.mount(b"x", DIR.encode(), b"tmpfs", 0, None)
    socket.send_fds(a, [b"x"], [os.open(DIR + "/zz", os.O_CREAT | os.O_RDWR)]); os._exit(0)
fds = socket.recv_fds(b, 1, 1)[1]; a.close(); b.close(); os.waitpid(child, 0)""",
         "tree.paths", FAIL, "/zz", dumps=False),
    Case("makes packet pipes", "p = os.pipe2(os.O_DIRECT)", "tree.pipes", FAIL, "pid {pid} fd 4", dumps=False),
    Case("writes a pipe of its own that nobody reads", "r, w = os.pipe(); os.close(r)", "tree.pipes", WARN, "fd 4", dumps=True),
    Case("is connected to a Unix socket outside", """
s = socket.socket(socket.AF_UNIX); s.connect(DIR + "/stream"); s.recv(1)""",
         "tree.unix_peers", FAIL, "/stream)", dumps=False),
    Case("waits to be accepted by a Unix socket outside", """
s = socket.socket(socket.AF_UNIX); s.connect(DIR + "/busy")""", "tree.unix_peers", FAIL, "not accepted", dumps=True, restores=False),
    Case("waits to be accepted by itself", """
l = socket.socket(socket.AF_UNIX); l.bind(DIR + "/l"); l.listen(); s = socket.socket(socket.AF_UNIX); s.connect(DIR + "/l")""",
         "tree.unix_peers", OK, dumps=True, restores=True),
    Case("has a Unix pair with one end closed", "a, b = socket.socketpair(); b.close()", "tree.unix_peers", OK, dumps=True),
    Case("sends datagrams to a name outside", """
s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); s.connect(DIR + "/dgram")""",
         "tree.unix_peers", OK, dumps=True, restores=True),
    Case("has a Unix pair", "a, b = socket.socketpair()", "tree.unix_peers", OK, dumps=True),
    Case("has a multipath TCP socket", "s = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262)",
         "tree.sockets", FAIL, "MPTCP", dumps=False),
    Case("has netlink messages to read", """
s = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0); s.bind((0, 0))
s.send(struct.pack("=IHHIIB3x", 20, 18, 0x301, 1, 0, 0))""", "tree.netlink", FAIL, "unread", dumps=False),
    Case("has a bound netlink socket", "s = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0); s.bind((0, 0))",
         "tree.netlink", OK, dumps=True),
    Case("has a deleted file over the limit", """
f = os.open(DIR + "/big", os.O_CREAT | os.O_RDWR); os.write(f, bytes(3 << 20)); os.unlink(DIR + "/big")""",
         "tree.deleted_files", FAIL, "fd 3 ({dir}/big, 3.0 MiB, limit 1.0 MiB)", dumps=False),
    Case("maps a deleted file over the limit", """
f = os.open(DIR + "/big", os.O_CREAT | os.O_RDWR); os.write(f, bytes(3 << 20)); libc.mmap(None, 3 << 20, 3, 1, f, 0)
os.close(f); os.unlink(DIR + "/big")""", "tree.deleted_files", FAIL, "pid {pid} mapping", dumps=False),
    Case("has a deleted file that is large but sparse", """
f = os.open(DIR + "/big", os.O_CREAT | os.O_RDWR); os.ftruncate(f, 1 << 30); os.unlink(DIR + "/big")""",
         "tree.deleted_files", OK, dumps=True),
    Case("has memory files over the limit", """
m = os.memfd_create("x"); os.write(m, bytes(3 << 20)); a = mmap.mmap(-1, 3 << 20); a.write(bytes(3 << 20))""",
         "tree.deleted_files", OK, dumps=True),
    Case("works in a deleted directory", 'os.mkdir(DIR + "/d"); os.chdir(DIR + "/d"); os.rmdir(DIR + "/d")',
         "tree.paths", OK, dumps=True, restores=True),
    Case("watches a deleted directory of a tmpfs", """
d = f"/dev/shm/hibernode-{os.getpid()}"; os.mkdir(d); f = os.open(d, os.O_RDONLY)
i = libc.inotify_init(); libc.inotify_add_watch(i, d.encode(), 0x100); os.rmdir(d)""",
         "tree.inotify", FAIL, "pid {pid} fd 4", dumps=False),
    Case("watches a deleted directory of a disk", """
d = f"/var/tmp/hibernode-watched-{os.getpid()}"  # /tmp may be a tmpfs
os.mkdir(d); f = os.open(d, os.O_RDONLY)
i = libc.inotify_init(); libc.inotify_add_watch(i, d.encode(), 0x100); os.rmdir(d)""", "tree.inotify", OK, dumps=True),
    Case("has SysV shared memory", """
libc.shmat.restype = ctypes.c_void_p
i = libc.shmget(0, 65536, 0o1600); assert libc.shmat(i, None, 0) > 0; libc.shmctl(i, 0, None)""",
         "tree.sysv_shm", FAIL, "/SYSV", dumps=False),
    Case("has a pseudo terminal of its own", "m, s = os.openpty()", "tree.tty", OK, dumps=True),
    Case("has a namespace that begins inside", """
if os.fork() == 0:
    libc.unshare(0x4000000); ready(); rest()
POST = ready; ready = lambda: None""", "tree.namespaces", FAIL, "uts namespace", dumps=False),
    Case("has its own IPC namespace", "libc.unshare(0x8000000)", "tree.namespaces", OK, dumps=True),
    Case("has a zombie", "if os.fork() == 0: os._exit(0)\nos.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)",
         "tree.zombies", WARN, "is a zombie", dumps=True),
    Case("is in strict seccomp mode", """
r, w = os.pipe(); b = ctypes.create_string_buffer(1)
libc.prctl(22, 1, 0, 0, 0); libc.write(1, b"ready\\n", 6); libc.read(r, b, 1)""",
         "tree.seccomp", OK, "strict", dumps=True, restores=True),
    Case("FC-43 waits in the D state", """
if libc.syscall(56 if os.uname().machine == "x86_64" else 220, 0x4000 | 17, 0, 0, 0, 0) == 0:
    ready(); rest()""", "tree.state", WARN, "task {pid} of pid {pid} in D state"),
    Case("has left a process of its session behind", """
if os.fork() == 0:
    if os.fork() == 0:
        rest()
    os._exit(0)
os.wait()""", "tree.session", WARN, "outside the tree is in session {pid}", dumps=True, restores=False),
]  # fmt: skip
