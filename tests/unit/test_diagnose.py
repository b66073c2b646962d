"""From CRIU's log to a cause. The lines are real ones of CRIU 4.2.1, from logs or from its source."""

# ruff: noqa: E501 - the lines of a log stay whole

import os

import pytest

from hibernode.criu.causes import KNOWN
from hibernode.criu.diagnose import HEAD_BYTES, MAX_RAW, TAIL_BYTES, diagnose, find_known, read_log
from hibernode.criu.known import Operation
from hibernode.errors import RefusedError

NOISE = """\
(00.000000) CRIU run id = c9d727b7-dbfb-4911-b80b-900c5f533e0e
(00.032808) Error (criu/util.c:1534): rlimit: Can't setup RLIMIT_NOFILE for self: Operation not permitted
(00.040000) Error (criu/tun.c:85): tun: Unable to create tun: No such file or directory
(00.041000) Error (criu/net.c:1500): Unable to remove /tmp/cr-tmpfs.Xa81b2: Device or resource busy
Error (criu/util.c:641): execvp("iptables-restore", ...) failed: No such file or directory
Error (criu/util.c:641): execvp("ip6tables-restore", ...) failed: No such file or directory
"""
FAILED_DUMP = "(00.059342) Error (criu/cr-dump.c:1975): Dumping FAILED.\n"
FAILED_RESTORE = "(00.030584) Error (criu/cr-restore.c:2331): Restoring FAILED.\n"

# reason, what the message or the remedy must name, the line
DUMP = [
    ("IoUring", "io_uring", "Error (criu/proc_parse.c:502): Unknown shit 600 (anon_inode:[io_uring])"),
    (
        "CapabilityMissing",
        "limits",
        "Error (criu/cr-dump.c:900): Can't get rlimit 0: Operation not permitted",
    ),
    ("IoUring", "22882", "pie: 22882: Error (criu/pie/parasite.c:588): send_fds failed (-22)"),
    ("FdsInFlight", "22882", "pie: 22882: Error (criu/pie/parasite.c:588): send_fds failed (-109)"),
    ("IoUring", "io_uring", "Error (criu/parasite-syscall.c:280): Can't retrieve FDs from socket"),
    (
        "GpuDevice",
        "195:255",
        "Error (criu/files-ext.c:94): Can't dump file 9 of that type [20666] (chr 195:255)",
    ),
    (
        "DeviceFile",
        "chr 10:229",
        "Error (criu/files-ext.c:94): Can't dump file 3 of that type [20600] (chr 10:229)",
    ),
    (
        "UnsupportedFd",
        "userfaultfd",
        "Error (criu/files-ext.c:94): Can't dump file 3 of that type [600] (anon anon_inode:[userfaultfd])",
    ),
    (
        "UnsupportedMapping",
        "/proc/411/maps",
        "Error (criu/proc_parse.c:663): Can't handle non-regular mapping on 411's map 7f10ebdf6000",
    ),
    (
        "UnsupportedMapping",
        "anon_inode:kvm-vcpu:0",
        "Error (criu/proc_parse.c:502): Unknown shit 600 (anon_inode:kvm-vcpu:0)",
    ),
    (
        "Uprobes",
        "77",
        "Error (criu/proc_parse.c:240): PID 77 has uprobes vma. Consider using --allow-uprobes.",
    ),
    (
        "SysVShm",
        "881",
        "Error (criu/cr-dump.c:477): Task 881 with SysVIPC shmem map @7f1000000000 doesn't live in IPC ns",
    ),
    (
        "GhostFileTooLarge",
        "3145728",
        "Error (criu/files-reg.c:1031): Can't dump ghost file /tmp/x/delb of 3145728 size, increase limit",
    ),
    (
        "LinkRemapOff",
        "/data/h1",
        "Error (criu/files-reg.c:1122): Can't create link remap for /data/h1. Use link-remap option.",
    ),
    (
        "LinkRemapExists",
        "/dev/shm/a",
        "Error (criu/files-reg.c:1159): Can't link remap to /dev/shm/a: File exists",
    ),
    (
        "LinkRemapFailed",
        "Read-only file system",
        "Error (criu/files-reg.c:1159): Can't link remap to /ro/a: Read-only file system",
    ),
    (
        "FileLocksOff",
        "criu.file_locks",
        "Error (criu/file-lock.c:110): Some file locks are hold by dumping tasks! You can try --file-locks to dump them.",
    ),
    (
        "MountUnknown",
        "/var/log/w.log",
        "Error (criu/files-reg.c:1790): Can't lookup mount=27 for fd=2 path=/var/log/w.log",
    ),
    (
        "MountOutside",
        "./etc/resolv.conf",
        "Error (criu/mount.c:753): mnt: 1021:./etc/resolv.conf doesn't have a proper root mount",
    ),
    (
        "MountPropagation",
        "82 ./data",
        "Error (criu/mount.c:1093): mnt: Mount 82 ./data (master_id: 3 shared_id: 0) has unreachable sharing. Try --enable-external-masters.",
    ),
    (
        "Overmounted",
        "/data/x",
        "Error (criu/files-reg.c:1796): Open files on overmounted mounts are not supported yet; mount=30 fd=4 path=/data/x",
    ),
    (
        "MountUnsupported",
        "./fuse",
        "Error (criu/mount.c:1809): mnt: Unable to dump a file system for 90:./fuse",
    ),
    (
        "TcpEstablished",
        "criu.tcp",
        "Error (criu/sk-inet.c:200): inet: Connected TCP socket, consider using --tcp-established option.",
    ),
    ("NetworkLockFailed", "nf_tables", "Error (criu/sk-tcp.c:81): tcp: Failed to lock TCP connection 23572"),
    ("TcpInFlight", "accept", "Error (criu/sk-inet.c:185): inet: In-flight connection (l) for 23c01"),
    (
        "UnixPeerOutside",
        "outside",
        "Error (criu/sk-unix.c:881): unix: Can't dump half of stream unix connection. name: (null); peer name: (null)",
    ),
    (
        "UnixPeerOutside",
        "outside",
        "Error (criu/sk-unix.c:874): unix: External socket is used. Consider using --ext-unix-sk option.",
    ),
    (
        "SocketOption",
        "1:16",
        "Error (criu/sockets.c:300): sockets: Can't get 1:16 opt: Operation not supported",
    ),
    ("SocketKind", "kind", "Error (criu/sockets.c:767): sockets: BUG! Unknown socket collected (family 40)"),
    (
        "TtyOutside",
        "terminal",
        "Error (criu/tty.c:410): tty: Found slave peer index 0 without correspond master peer",
    ),
    (
        "NotSessionLeader",
        "22598",
        "Error (criu/pstree.c:304): The root process 22598 is not a session leader. Consider using --shell-job option",
    ),
    (
        "SessionOutside",
        "23870",
        "Error (criu/cr-dump.c:1528): A session leader of 23870(1) is outside of its pid namespace",
    ),
    (
        "PidNamespace",
        "shareProcessNamespace",
        "Error (criu/namespaces.c:520): Can't dump a pid namespace without the process init",
    ),
    (
        "NestedNamespace",
        "pid namespace",
        "Error (criu/namespaces.c:460): Can't dump nested pid namespace for 23870",
    ),
    (
        "TaskUninterruptible",
        "22667",
        "Error (compel/src/lib/infect.c:262): Unseizable non-zombie 22667 found, state D, err -1/4",
    ),
    (
        "TaskNotSeizable",
        "/proc/22667/status",
        "Error (compel/src/lib/infect.c:262): Unseizable non-zombie 22667 found, state t, err -1/10",
    ),
    ("CollectTimeout", "freeze_timeout", "Error (criu/cr-dump.c:1655): Timeout reached. Try to interrupt: 0"),
    ("StoppedThread", "SIGCONT", "Error (criu/seize.c:952): Individually stopped threads not supported"),
    (
        "CriuInsideTree",
        "agent",
        "Error (compel/src/lib/infect.c:260): The criu itself is within dumped tree.",
    ),
    (
        "Traced",
        "23720",
        "Warn  (compel/src/lib/infect.c:132): Unable to interrupt task: 23720 (Operation not permitted)",
    ),
    (
        "WorkerGone",
        "23737",
        "Warn  (compel/src/lib/infect.c:132): Unable to interrupt task: 23737 (No such process)",
    ),
    ("ParasiteFailed", "512", "Error (criu/cr-dump.c:1530): Can't infect (pid: 512) with parasite"),
]
RESTORE = [
    ("PidInUse", "363", "Error (criu/cr-restore.c:1237): Can't fork for 363: File exists"),
    (
        "SessionClash",
        "sid 2752",
        "Error (criu/pstree.c:377): Current sid 2752 intersects with pid (3) in images",
    ),
    (
        "FileMissing",
        "/tmp/w/h",
        " 24068: Error (criu/files-reg.c:2353): Can't open file tmp/w/h on restore: No such file or directory",
    ),
    (
        "FileUnreadable",
        "Permission denied",
        " 24068: Error (criu/files-reg.c:2353): Can't open file tmp/w/h on restore: Permission denied",
    ),
    (
        "FileChanged",
        "2 bytes",
        " 23034: Error (criu/files-reg.c:2175): File tmp/w/h has bad size 2 (expect 30)",
    ),
    (
        "FileChanged",
        "0100700",
        " 24068: Error (criu/files-reg.c:2294): File tmp/w/h has bad mode 0100700 (expect 0100644)",
    ),
    (
        "LinkRemapMissing",
        "/tmp/w/a",
        " 22993: Error (criu/files-reg.c:2258): Can't link tmp/w/link_remap.24 -> tmp/w/a: No such file or directory",
    ),
    ("PidFileExists", "/run/pid", "Error (criu/log.c:416): pidfile: Can't open /run/pid: File exists"),
    (
        "AddressInUse",
        "listens",
        " 23450: Error (criu/sk-inet.c:1059): inet: Can't bind inet socket (id 26): Address already in use",
    ),
    (
        "TcpReset",
        "before the other end",
        "Error (soccr/soccr.c:819): Can't restore not-sent send queue data (-1), want (0-925:3791872:925): Broken pipe",
    ),
    (
        "AddressGone",
        "criu.tcp",
        " 31: Error (soccr/soccr.c:499): Can't bind inet socket back: Cannot assign requested address",
    ),
    ("TcpMismatch", "tcp", "Error (criu/image.c:94): Need to set the --tcp-close options."),
    (
        "UnixPeerGone",
        "Unix",
        " 24352: Error (criu/sk-unix.c:2285): unix: FATAL: Peer 155950 unresolved for 155962",
    ),
    (
        "TtyMissing",
        "terminal",
        " 23680: Error (criu/tty.c:1010): tty: Don't have tty to inherit session from, aborting",
    ),
    (
        "InheritedFd",
        "descriptor",
        "Error (criu/files.c:1597): Can't fstat inherit fd 99: Bad file descriptor",
    ),
    (
        "RootMissing",
        "container",
        "Error (criu/mount.c:3500): mnt: The --root option is required to restore a mount namespace",
    ),
    (
        "CpuMismatch",
        "CPU",
        "Error (criu/arch/x86/cpu.c:380): cpu: CPU instruction capabilities do not match run time",
    ),
    ("PluginMissing", "cuda_plugin", "Error (criu/image.c:198): Missing required plugin: cuda_plugin"),
    ("ImageMagic", "pstree.img", "Error (criu/image.c:554): Head magic doesn't match for pstree.img"),
    (
        "ImageTruncated",
        "/i/core-23034.img ends",
        "Error (criu/protobuf.c:93): Read 88 bytes while 2754 expected from /i/core-23034.img: No such file or directory",
    ),
    ("ImageTruncated", "again", "Error (criu/protobuf.c:72): Unexpected EOF on (empty-image)"),
    ("ImageTruncated", "again", "pie: 24068: Error (criu/pie/restorer.c:1907): Can't read pages data (-9)"),
    (
        "ImageCorrupt",
        "mm-24068.img",
        " 24068: Error (criu/protobuf.c:101): Failed unpacking object 0x7f4611300128 from /tmp/mut/mm-24068.img",
    ),
    ("ImageVersion", "version", "Error (criu/image.c:88): Not supported images version 3"),
    (
        "TaskDied",
        "signal 11",
        "Error (criu/cr-restore.c:1269): 24068 killed by signal 11: Segmentation fault",
    ),
]
BOTH = [
    (
        "NoSpace",
        "gc",
        "Error (criu/page-xfer.c:263): page-xfer: Unable to spice data: No space left on device",
    ),
    ("NoMemory", "memory", "Error (criu/cr-restore.c:1237): Can't fork for 31: Cannot allocate memory"),
    ("ActionScript", "/tmp/w/as", "Error (criu/action-scripts.c:94): Script /tmp/w/as exited with -1"),
    (
        "PluginDirectory",
        "/nowhere",
        "Error (criu/plugin.c:228): Unable to open directory /nowhere: No such file or directory",
    ),
    (
        "ImagesMissing",
        "/i/nodir",
        "Error (criu/image.c:726): Can't open dir /i/nodir: No such file or directory",
    ),
    (
        "LogUnwritable",
        "/no/x",
        "Error (criu/log.c:226): Can't create log file /no/x: No such file or directory",
    ),
    (
        "NotPermitted",
        "root",
        "CRIU needs to have the CAP_SYS_ADMIN or the CAP_CHECKPOINT_RESTORE capability: ",
    ),
    (
        "KernelTooOld",
        "criu check",
        "Error (criu/crtools.c:280): Could not initialize kernel features detection.",
    ),
    ("OptionUnknown", "make setup", "/usr/sbin/criu: unrecognized option '--bogus'"),
    (
        "CriuBroken",
        "libnet.so.9",
        "criu: error while loading shared libraries: libnet.so.9: cannot open shared object file",
    ),
]
SAMPLES: list[tuple[Operation, str, str, str]] = [("dump", *row) for row in DUMP + BOTH] + [
    ("restore", *row) for row in RESTORE + BOTH
]


def logged(line: str, operation: str) -> str:
    """Put a line into a log as it stands there, among harmless lines and before the end."""
    stamped = line if line.startswith("pie:") or "(" not in line[:12] else f"(00.041973) {line}"
    return NOISE + stamped + "\n" + (FAILED_DUMP if operation == "dump" else FAILED_RESTORE)


@pytest.mark.parametrize(
    ("operation", "reason", "named", "line"), SAMPLES, ids=[f"{row[0]} {row[1]}: {row[2]}" for row in SAMPLES]
)
def test_each_known_line_names_its_cause(operation, reason, named, line):
    """One line among noise gives one cause, with a word, the facts of the line, and something to do."""
    found = diagnose(logged(line, operation), 1, operation)
    (cause,) = found.causes
    assert cause.reason == reason
    assert named in f"{cause.message} {cause.remedy}"
    assert cause.line in line.strip()
    assert cause.remedy
    assert "{" not in cause.message + cause.remedy


def test_every_row_of_the_table_has_a_sample():
    """A row that no sample reaches, also because a row above it takes all its lines, is an error."""
    reached = {
        id(found[0]) for operation, *_, line in SAMPLES if (found := find_known(line, operation)) is not None
    }
    rows = [known for table in KNOWN.values() for known in table]
    assert [known.pattern.pattern for known in rows if id(known) not in reached] == []
    assert len({known.reason for known in rows}) >= 35


URING_FD = """\
pie: 22882: Error (criu/pie/parasite.c:588): send_fds failed (-22)
(00.058702) Error (criu/parasite-syscall.c:280): Can't retrieve FDs from socket
(00.058707) Error (compel/src/lib/infect-rpc.c:44): Message reply from daemon is trimmed (12/0)
(00.058720) Error (criu/cr-dump.c:1545): Dump files (pid: 22882) failed with -1
"""
URING_MAPPING = """\
(00.038904) Error (criu/proc_parse.c:502): Unknown shit 600 (anon_inode:[io_uring])
(00.038910) Error (criu/proc_parse.c:738): Can't open 22896's mapfile link 7f10ebdf6000: No such device or address
(00.038917) Error (criu/cr-dump.c:1440): Collect mappings (pid: 22896) failed with -1
"""
D_STATE = """\
(02.051317) Error (criu/cr-dump.c:1655): Timeout reached. Try to interrupt: 0
(02.051468) Error (compel/src/lib/infect.c:262): Unseizable non-zombie 22667 found, state D, err -1/4
(02.051516) Error (compel/src/lib/infect.c:417): Unable to detach from 22667: No such process
"""
LEFTOVER_LINK = """\
(00.035301) Warn  (criu/files-reg.c:1881): Can't link  -> ./dev/shm/link_remap.24
(00.035307) Error (criu/files-reg.c:1159): Can't link remap to /dev/shm/sem.a: File exists
(00.035330) Error (criu/cr-dump.c:1545): Dump files (pid: 22965) failed with -1
"""
DISK_FULL = """\
(00.054607) Error (criu/page-xfer.c:263): page-xfer: Unable to spice data: No space left on device
(00.054630) Error (criu/bfd.c:131): bfd: Error flushing image: No space left on device
(00.054703) Error (criu/mem.c:718): Can't dump page with parasite
"""
SIZE = """\
(00.032173)  23034: Error (criu/files-reg.c:2175): File tmp/w/h has bad size 2 (expect 30)
(00.032177)  23034: Error (criu/files.c:1221): Unable to open fd=3 id=0x17
(00.032267) Error (criu/cr-restore.c:2331): Restoring FAILED.
(00.030866) Error (criu/cr-restore.c:1269): 23034 killed by signal 9: Killed
"""
ZOMBIE_THEN_LOCK = """\
(00.030984) Warn  (compel/src/lib/infect.c:132): Unable to interrupt task: 23800 (Operation not permitted)
(00.116667) Error (criu/file-lock.c:110): Some file locks are hold by dumping tasks! You can try --file-locks
"""


@pytest.mark.parametrize(
    ("operation", "log", "reasons", "named"),
    [
        pytest.param(
            "dump", URING_FD, ["IoUring"], "process 22882", id="FC-01 an io_uring fd, never named by CRIU"
        ),
        pytest.param("dump", URING_MAPPING, ["IoUring"], "io_uring", id="FC-01 an io_uring mapping"),
        pytest.param(
            "dump", D_STATE, ["TaskUninterruptible"], "task 22667", id="FC-43 the task, not the timeout"
        ),
        pytest.param(
            "dump", LEFTOVER_LINK, ["LinkRemapExists"], "/dev/shm/sem.a", id="FC-45 a leftover link_remap"
        ),
        pytest.param("dump", DISK_FULL, ["NoSpace"], "disk", id="disk full, said four times"),
        pytest.param("restore", SIZE, ["FileChanged"], "/tmp/w/h", id="not what is killed after the failure"),
        pytest.param("dump", ZOMBIE_THEN_LOCK, ["FileLocksOff"], "locks", id="not a warning about a zombie"),
        pytest.param(
            "restore",
            "Error (criu/cr-restore.c:1237): Can't fork for 363: File exists\n",
            ["PidInUse"],
            "pid 363",
            id="FC-08 a pid that is taken",
        ),
    ],
)
def test_the_root_cause_wins_over_what_follows(operation, log, reasons, named):
    """Follow-up lines, weak signs and noise give no cause of their own; FC-01, FC-08, FC-43, FC-45."""
    found = diagnose(NOISE + log + FAILED_DUMP, 1, operation)
    assert [cause.reason for cause in found.causes] == reasons
    assert named in found.causes[0].message


def test_two_causes_come_in_the_order_of_the_log():
    """Where two strong causes stand, the first line's is the first."""
    lines = {reason: line for reason, _, line in DUMP}
    first, second = lines["TcpEstablished"], lines["GhostFileTooLarge"]
    found = diagnose(f"{first}\n{second}\n{first}\n", 1, "dump")
    assert [cause.reason for cause in found.causes] == ["TcpEstablished", "GhostFileTooLarge"]


def test_error_lines_are_kept_without_noise():
    """The raw error lines stay, without time stamps, harmless lines and the final FAILED."""
    found = diagnose(NOISE + URING_FD + FAILED_DUMP, 1, "dump")
    assert [line.partition(": Error")[0].partition(" (")[0] for line in found.raw] == [
        "pie: 22882",
        *["Error"] * 3,
    ]
    assert not any("RLIMIT" in line or "FAILED" in line for line in found.raw)


def test_an_unknown_error_gives_no_cause_but_its_line():
    """What is not in the table is shown as it is."""
    found = diagnose(NOISE + "(00.1) Error (criu/new.c:1): something new\n" + FAILED_DUMP, 1, "dump")
    assert found.causes == ()
    assert found.raw == ("Error (criu/new.c:1): something new",)


def test_noise_alone_is_nothing():
    """A log whose only errors are harmless has no cause and no error lines."""
    assert diagnose(NOISE, 0, "dump") == diagnose("", 0, "restore")


@pytest.mark.parametrize(
    ("code", "name"), [(-9, "SIGKILL"), (-15, "SIGTERM"), (-64, "SIGRTMAX"), (-99, "unknown")]
)
def test_a_killed_criu_is_said(code, name):
    """A signal is a cause, named, where the log says nothing stronger."""
    (cause,) = diagnose(NOISE + D_STATE.splitlines()[0], code, "dump").causes
    assert cause.reason == "CriuKilled"
    assert name in cause.message


def test_a_killed_criu_comes_after_what_its_log_says():
    """A strong line in the log is the root cause of the death."""
    causes = diagnose(DISK_FULL, -6, "dump").causes
    assert [cause.reason for cause in causes] == ["NoSpace", "CriuKilled"]


def test_causes_of_the_other_operation_do_not_count():
    """A restore's line in a dump's log is only an error line."""
    assert diagnose(RESTORE[0][2], 1, "dump").causes == ()
    assert diagnose(DUMP[11][2], 1, "restore").causes == ()


HELPER = "(00.046680) Error (criu/util.c:657): exited, status=1\n"


def test_the_exit_code_of_a_helper_is_no_lead():
    """CRIU runs ip and iptables, which an image may lack, and goes on."""
    found = diagnose(HELPER + "(00.06) Restore finished successfully. Tasks resumed.\n", 1, "restore")
    assert (found.causes, found.raw, found.success) == ((), (), True)
    found = diagnose(f"{HELPER}{RESTORE[0][2]}\n{HELPER}", 1, "restore")
    assert found.success is False
    assert found.causes
    assert not any("exited, status" in line for line in found.raw)


@pytest.mark.parametrize("text", ["(0.1) Error (x1) Restore finished successfully\n", URING_FD])
def test_only_crius_own_line_says_that_it_has_succeeded(text):
    """A worker's name can hold these words."""
    assert diagnose(text, 1, "restore").success is False


# hostile logs -----------------------------------------------------------------------------------------


def test_names_in_a_log_cannot_do_more_than_stand_there():
    """A worker's file name can hold control characters, braces and megabytes; the message stays one line."""
    path = "/tmp/{0.__class__}\x1b[31m\x07" + "x" * 5000
    found = diagnose(
        f"Error (criu/files-reg.c:1122): Can't create link remap for {path}. Use link-remap option.\n",
        1,
        "dump",
    )
    assert all(text.isprintable() and len(text) < 2100 for text in found.raw)
    found = diagnose("Error (criu/log.c:226): Can't create log file /{x}\x1b[2J: \x07no\n", 1, "dump")
    assert found.causes[0].message == "CRIU cannot write its log /{x}?[2J: ?no"


def test_many_error_lines_are_bounded():
    """A log of nothing but errors gives a bounded answer with the first lines."""
    found = diagnose("".join(f"Error (x.c:{n}): e{n}\n" for n in range(100_000)), 1, "dump")
    assert len(found.raw) == MAX_RAW
    assert found.raw[0] == "Error (x.c:0): e0"


@pytest.mark.parametrize(
    "junk",
    [
        pytest.param(bytes(range(256)) * 8000, id="every byte"),
        pytest.param(b"\0" * (2 << 20), id="nothing but NUL"),
        pytest.param(b"Error (" * 300_000, id="one line of two megabytes"),
        pytest.param(b"Error (\n" * 250_000, id="errors without a text"),
        pytest.param(os.urandom(1 << 20), id="random"),
    ],
)
def test_binary_junk_is_survived(tmp_path, junk):
    """Whatever the bytes are, an answer comes, and can be printed; a pattern that backtracks would hang here."""
    (tmp_path / "dump.log").write_bytes(junk)
    found = diagnose(read_log(tmp_path / "dump.log"), 1, "dump")
    assert all(line.isprintable() for line in found.raw)


def test_a_short_log_is_read_whole(tmp_path):
    """Below the bound nothing is left out."""
    (tmp_path / "dump.log").write_text(NOISE + URING_FD)
    assert read_log(tmp_path / "dump.log") == NOISE + URING_FD


def test_a_log_of_200_mb_is_read_at_both_ends(tmp_path):
    """Beginning and end are read, what is between is said in a line, and the cause at the end is found."""
    path = tmp_path / "dump.log"
    with path.open("wb") as file:
        file.write(b"(00.000000) Version: 4.2.1\n")
        file.truncate(200_000_000)
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + URING_FD.encode() + FAILED_DUMP.encode())
    text = read_log(path)
    assert len(text) < HEAD_BYTES + TAIL_BYTES + 100
    assert text.startswith("(00.000000) Version: 4.2.1\n")
    assert f"\n[{path.stat().st_size - HEAD_BYTES - TAIL_BYTES} bytes left out]\n" in text
    assert diagnose(text, 1, "dump").causes[0].reason == "IoUring"


@pytest.mark.parametrize(
    ("make", "error"),
    [
        pytest.param(os.mkfifo, RefusedError, id="a FIFO does not make us wait"),
        pytest.param(lambda path: path.mkdir(), RefusedError, id="a directory"),
        pytest.param(lambda path: path.symlink_to("/etc/shadow"), OSError, id="a link"),
        pytest.param(lambda path: None, FileNotFoundError, id="nothing"),
    ],
)
def test_only_a_regular_file_is_a_log(tmp_path, make, error):
    """Anything but a regular file is refused."""
    make(tmp_path / "dump.log")
    with pytest.raises(error):
        read_log(tmp_path / "dump.log")
