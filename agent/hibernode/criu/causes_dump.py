"""Causes of a failed dump, special rows before general ones."""

from __future__ import annotations

from typing import Final

from hibernode.criu.known import row

_NO_IO_URING: Final = (
    "run the worker under seccomp/block-iouring.json, or switch io_uring off in it "
    "(UV_USE_IO_URING=0 for libuv)"
)

DUMP: Final = (
    # Descriptors and mappings.
    row(
        "IoUring",
        r"anon_inode:\[io_uring\]",
        "the worker uses io_uring, which CRIU cannot dump",
        _NO_IO_URING,
    ),
    row(
        # Since Linux 6.7 the kernel refuses to pass a ring over a socket, with EINVAL, 22.
        "IoUring",
        r"pie: (?P<pid>\d+): .*send_fds failed \(-22\)",
        "process {pid} holds a descriptor that cannot be handed over: most probably an io_uring ring, "
        "which CRIU cannot dump",
        _NO_IO_URING,
    ),
    row(
        "CapabilityMissing",
        r"Can't get rlimit (?P<which>\d+): Operation not permitted",
        "CRIU may not read the limits of another user's process",
        "give the agent CAP_SYS_RESOURCE, or run the worker as root",
    ),
    row(
        "FdsInFlight",
        r"pie: (?P<pid>\d+): .*send_fds failed \(-(?:109|24)\)",
        "process {pid} has more descriptors than may be passed at a time",
        "raise the agent's RLIMIT_NOFILE (LimitNOFILE= in systemd)",
    ),
    row(
        "IoUring",
        r"Can't retrieve FDs from socket",
        "a process's descriptors cannot be handed over: most probably one is an io_uring ring, which CRIU "
        "cannot dump",
        _NO_IO_URING,
        weak=True,
    ),
    row(
        "GpuDevice",
        r"Can't dump file (?P<fd>\d+) of that type \[\d+\] \(chr 195:(?P<minor>\d+)\)",
        "fd {fd} is an NVIDIA device (195:{minor}): the GPU was not let go",
        "checkpoint the GPU with cuda-checkpoint first; a process that only uses NVML must close it",
    ),
    row(
        "DeviceFile",
        r"Can't dump file (?P<fd>\d+) of that type \[\d+\] \((?P<device>(?:chr|blk) \d+:\d+)\)",
        "fd {fd} is a device ({device}) that CRIU cannot dump",
        "close the device before the worker is ready; ls -l /dev shows which it is",
    ),
    row(
        "UnsupportedFd",
        r"Can't dump file (?P<fd>\d+) of that type \[\d+\] \((?P<what>[^)]*)\)",
        "fd {fd} is of a kind that CRIU cannot dump ({what})",
        "close it before the worker is ready",
    ),
    row(
        "UnsupportedMapping",
        r"Can't handle non-regular mapping on (?P<pid>\d+)'s map (?P<address>[0-9a-f]+)",
        "process {pid} maps a device or another odd file at {address}",
        "unmap it before the worker is ready; /proc/{pid}/maps shows what it is",
    ),
    row(
        "UnsupportedMapping",
        r"(?:Unsupported mapping found|Strange file mapped at|Unknown shit \d+) (?P<what>.+)",
        "the worker has a mapping that CRIU cannot dump: {what}",
        "unmap it before the worker is ready; /proc/PID/maps shows what it is",
    ),
    row(
        "Uprobes",
        r"PID (?P<pid>\d+) has uprobes vma",
        "process {pid} is being traced by uprobes",
        "stop the tracer (bpftrace, perf, an eBPF agent) on this process",
    ),
    row(
        "SysVShm",
        r"Task (?P<pid>\d+) with SysVIPC shmem map",
        "process {pid} uses System V shared memory of an IPC namespace outside the tree",
        "use POSIX shared memory (/dev/shm), or give the worker an IPC namespace of its own",
    ),
    # Files.
    row(
        "GhostFileTooLarge",
        r"Can't dump ghost file (?P<path>.+) of (?P<size>\d+) size",
        "{path} is deleted but open, and its {size} bytes are over the limit",
        "raise criu.ghost_limit_bytes above {size}, or close the file",
    ),
    row(
        "LinkRemapOff",
        r"Can't create link remap for (?P<path>.+)\. Use link-remap option",
        "{path} is open, has lost this name and has another",
        "set criu.link_remap to true",
    ),
    row(
        "LinkRemapExists",
        r"Can't link remap to (?P<path>.+): File exists",
        "a link_remap file of an earlier dump stands in the directory of {path}",
        "remove the link_remap.* files beside {path} if no checkpoint still needs them",
    ),
    row(
        "LinkRemapFailed",
        r"Can't link remap to (?P<path>.+): (?P<error>.+)",
        "{path} lost its name, and no new one can be made beside it: {error}",
        "close the file, or make its directory writable for the agent",
    ),
    row(
        "FileLocksOff",
        r"Some file locks are hold by dumping tasks",
        "the worker holds file locks",
        "set criu.file_locks to true",
    ),
    row(
        "MountUnknown",
        r"Can't lookup mount=(?P<mount>-?\d+) for fd=(?P<fd>-?\d+) path=(?P<path>.*)",
        "fd {fd} ({path}) is on a mount that the worker's namespace does not have",
        "open it inside the container, or give the worker pipes or /dev/null for its standard streams",
    ),
    row(
        "MountOutside",
        r"\d+:(?P<path>\S+) doesn't have a proper root mount",
        "the mount {path} comes from outside the container",
        "it must be given to CRIU as external (--external mnt[{path}]:NAME)",
    ),
    row(
        "MountPropagation",
        r"Mount (?P<mount>\d+ \S+) .*has unreachable sharing",
        "the mount {mount} is tied to one outside the container (propagation)",
        "make it private, or external for CRIU",
    ),
    row(
        "Overmounted",
        r"Open files on overmounted mounts are not supported yet; mount=\d+ fd=(?P<fd>\d+) path=(?P<path>.*)",
        "fd {fd} ({path}) is hidden below another mount",
        "close it, or mount over it before the worker opens it",
    ),
    row(
        "MountUnsupported",
        r"(?:Unable to dump a file system for \d+:|FS mnt )(?P<path>\S+)",
        "CRIU cannot dump the file system at {path}",
        "unmount it, or give it to CRIU as external",
    ),
    # Sockets and terminals.
    row(
        "TcpEstablished",
        r"Connected TCP socket, consider using",
        "the worker holds an established TCP connection",
        "set criu.tcp to close (it must connect again) or established (both ends stay), or close it before",
    ),
    row(
        "NetworkLockFailed",
        r"Failed to lock TCP connection|Iptables configuration failed|Locking network failed",
        "the worker's TCP connections cannot be held still during the dump",
        "the kernel must have nf_tables; or set criu.tcp to close",
    ),
    row(
        "TcpInFlight",
        r"In-flight connection \(",
        "a TCP connection has arrived and was not accepted yet",
        "try again; the worker should accept before it is ready",
    ),
    row(
        "UnixPeerOutside",
        r"Can't dump (?:half of stream unix connection|name-less external socket)|External socket is used"
        r"|Unix socket \d+ with unreachable peer",
        "a Unix socket's other end is outside the worker's process tree",
        "close it before the worker is ready (often D-Bus, a log socket or a parent's socketpair)",
    ),
    row(
        "SocketOption",
        r"Can't get (?P<option>\d+:\d+) opt: Operation not supported",
        "this CRIU is too old for the kernel: it asks for a socket option ({option}) that is refused now",
        "make setup installs CRIU 4.2 or later",
    ),
    row(
        "SocketKind",
        r"Unknown socket collected|Unsupported (?:socket (?:family|type)|proto)|Can't dump \d+ inet socket",
        "the worker has a socket of a kind that CRIU cannot dump",
        "close it before the worker is ready (GODEBUG=multipathtcp=0 for MPTCP in Go)",
    ),
    row(
        "TtyOutside",
        r"Found slave peer index|Found dangling tty|ctty inheritance detected",
        "the worker is on a terminal whose other end is outside its process tree",
        "start it without a terminal (setsid, no tty: in the pod), with pipes or files as standard streams",
    ),
    # The tree and its tasks.
    row(
        "NotSessionLeader",
        r"The root process (?P<pid>\d+) is not a session leader",
        "process {pid} belongs to the session of a process outside its tree",
        "start it with setsid, or dump it as a shell job",
    ),
    row(
        "SessionOutside",
        r"A session leader of (?:zombie process )?(?P<pid>\d+)\(\d+\) is outside of its pid namespace",
        "the session of process {pid} belongs to a process outside its pid namespace",
        "start it with setsid inside the container",
    ),
    row(
        "PidNamespace",
        r"Can't dump a pid namespace without the process init",
        "the tree's pid namespace has another first process (a pod with a shared pid namespace)",
        "set shareProcessNamespace to false, or dump the namespace's first process",
    ),
    row(
        "NestedNamespace",
        r"Can't dump nested (?P<kind>\w+) namespace for (?P<pid>\d+)",
        "process {pid} is in a {kind} namespace of its own",
        "dump the process that is the namespace's first, or start the worker without it",
    ),
    row(
        "TaskUninterruptible",
        r"Unseizable non-zombie (?P<pid>\d+) found, state D",
        "task {pid} is in D state: it waits in the kernel, mostly for a disk or a server, and does not stop",
        "try again; raise criu.freeze_timeout_seconds for a slow disk; /proc/{pid}/stack shows the wait",
    ),
    row(
        "TaskNotSeizable",
        r"Unseizable non-zombie (?P<pid>\d+) found, state (?P<state>\w)",
        "task {pid} (state {state}) cannot be stopped: something else traces it, or it is protected",
        "detach the debugger; TracerPid in /proc/{pid}/status names it",
    ),
    row(
        "CollectTimeout",
        r"Timeout reached\. Try to interrupt|Unable to freeze cgroup",
        "the worker's tasks could not all be stopped in time",
        "look for a task in D state; raise criu.freeze_timeout_seconds",
        weak=True,
    ),
    row(
        "StoppedThread",
        r"Individually stopped threads not supported|Zombie thread not supported|Zombies with threads",
        "one thread is stopped or ended while its process runs on",
        "continue it (SIGCONT), detach the debugger, or let the main thread live",
    ),
    row(
        "CriuInsideTree",
        r"The criu itself is within dumped tree",
        "the tree that is to be dumped holds the agent itself",
        "dump a process that the agent does not descend from",
    ),
    row(
        "Traced",
        r"Unable to interrupt task: (?P<pid>\d+) \(Operation not permitted\)",
        "process {pid} cannot be stopped: something else traces it, or it has ended",
        "detach the debugger; TracerPid in /proc/{pid}/status names it",
        weak=True,
    ),
    row(
        "WorkerGone",
        r"Unable to interrupt task: (?P<pid>\d+) \(No such process\)",
        "process {pid} has ended",
        "the worker must stay alive until it reads the signal file",
        weak=True,
    ),
    row(
        "ParasiteFailed",
        r"Can't infect \(pid: (?P<pid>\d+)\) with parasite",
        "process {pid} did not run CRIU's code: a seccomp filter or a memory limit may forbid it",
        "compare its seccomp profile with seccomp/block-iouring.json, which does not stand in the way",
        weak=True,
    ),
)
