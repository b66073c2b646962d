"""Every raw system call, and nothing of ours: constants from the kernel's headers, one thin function a call.

A function raises the OSError of the call's errno, as :mod:`os` does. Where the errno alone would mislead
(ENOSYS and EPERM, behind which a seccomp filter often stands) the sentence says so.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from dataclasses import dataclass
from typing import Final

# linux/openat2.h
RESOLVE_NO_XDEV: Final = 0x01
RESOLVE_NO_MAGICLINKS: Final = 0x02
RESOLVE_NO_SYMLINKS: Final = 0x04
RESOLVE_BENEATH: Final = 0x08
RESOLVE_IN_ROOT: Final = 0x10

# linux/fs.h
RENAME_NOREPLACE: Final = 1
RENAME_EXCHANGE: Final = 2

# linux/prctl.h
PR_SET_DUMPABLE: Final = 4
PR_SET_NO_NEW_PRIVS: Final = 38

# linux/capability.h
CAPABILITY_VERSION_3: Final = 0x20080522

# linux/sched.h: root and working directory, and the kinds of namespaces that setns(2) takes
CLONE_FS: Final = 0x00000200
CLONE_NEWTIME: Final = 0x00000080
CLONE_NEWNS: Final = 0x00020000
CLONE_NEWCGROUP: Final = 0x02000000
CLONE_NEWUTS: Final = 0x04000000
CLONE_NEWIPC: Final = 0x08000000
CLONE_NEWUSER: Final = 0x10000000
CLONE_NEWPID: Final = 0x20000000
CLONE_NEWNET: Final = 0x40000000

# linux/nsfs.h: _IO(0xb7, 2)
NS_GET_PARENT: Final = 0xB702

# linux/magic.h; Lustre's stands in its own lustre_user.h
CEPH_SUPER_MAGIC: Final = 0x00C36400
CIFS_SUPER_MAGIC: Final = 0xFF534D42
EXT4_SUPER_MAGIC: Final = 0xEF53
FUSE_SUPER_MAGIC: Final = 0x65735546
LUSTRE_SUPER_MAGIC: Final = 0x0BD00BD0
NFS_SUPER_MAGIC: Final = 0x6969
OVERLAYFS_SUPER_MAGIC: Final = 0x794C7630
PROC_SUPER_MAGIC: Final = 0x9FA0
SMB2_SUPER_MAGIC: Final = 0xFE534D42
TMPFS_MAGIC: Final = 0x01021994
XFS_SUPER_MAGIC: Final = 0x58465342

# linux/fcntl.h and linux/stat.h
AT_FDCWD: Final = -100
AT_EMPTY_PATH: Final = 0x1000
AT_NO_AUTOMOUNT: Final = 0x800
AT_RECURSIVE: Final = 0x8000
AT_STATX_DONT_SYNC: Final = 0x4000
AT_SYMLINK_NOFOLLOW: Final = 0x100
STATX_BASIC_STATS: Final = 0x7FF
STATX_MNT_ID: Final = 0x1000

# asm-generic/unistd.h; calls of Linux 5.1 and later have the same number on every architecture we run on
SYS_PIDFD_SEND_SIGNAL: Final = 424
SYS_OPEN_TREE: Final = 428
SYS_MOVE_MOUNT: Final = 429
SYS_PIDFD_OPEN: Final = 434
SYS_OPENAT2: Final = 437
SYS_PIDFD_GETFD: Final = 438
SYS_MOUNT_SETATTR: Final = 442

OPENAT2_ATTEMPTS: Final = 64
"""openat2 says EAGAIN when a rename elsewhere races with a ``..``; the kernel asks the caller to retry."""

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class _OpenHow(ctypes.Structure):
    """``struct open_how`` of linux/openat2.h."""

    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


class _Statfs(ctypes.Structure):
    """``struct statfs`` of asm-generic/statfs.h for 64 bit; only the first member is read."""

    _fields_ = (("f_type", ctypes.c_long), ("rest", ctypes.c_char * 248))


class _Statx(ctypes.Structure):
    """``struct statx`` of linux/stat.h, 256 bytes."""

    _fields_ = (
        ("stx_mask", ctypes.c_uint32),
        ("stx_blksize", ctypes.c_uint32),
        ("stx_attributes", ctypes.c_uint64),
        ("stx_nlink", ctypes.c_uint32),
        ("stx_uid", ctypes.c_uint32),
        ("stx_gid", ctypes.c_uint32),
        ("stx_mode", ctypes.c_uint16),
        ("pad", ctypes.c_uint16),
        ("stx_ino", ctypes.c_uint64),
        ("stx_size", ctypes.c_uint64),
        ("stx_blocks", ctypes.c_uint64),
        ("stx_attributes_mask", ctypes.c_uint64),
        ("times", ctypes.c_uint64 * 8),
        ("stx_rdev_major", ctypes.c_uint32),
        ("stx_rdev_minor", ctypes.c_uint32),
        ("stx_dev_major", ctypes.c_uint32),
        ("stx_dev_minor", ctypes.c_uint32),
        ("rest", ctypes.c_uint64 * 14),
    )


class _CapHeader(ctypes.Structure):
    """``struct __user_cap_header_struct`` of linux/capability.h; pid 0 is the calling thread."""

    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _CapData(ctypes.Structure):
    """``struct __user_cap_data_struct`` of linux/capability.h: 32 of the capabilities."""

    _fields_ = (
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    )


def _error(call: str, path: str | bytes | int | None = None, *, since: str = "5.6") -> OSError:
    """Turn the thread's errno into an OSError of the fitting class."""
    number = ctypes.get_errno()
    if number == errno.ENOSYS:
        text = f"{call} is not available: the kernel is older than {since} or a seccomp filter hides it"
    elif number == errno.EPERM:
        text = f"{call} is not permitted: a capability is missing or a seccomp filter forbids it"
    else:
        text = os.strerror(number)
    return OSError(number, text) if path is None else OSError(number, text, path)


def _encode(path: str | bytes) -> bytes:
    raw = os.fsencode(path)
    if b"\0" in raw:  # ctypes would hand the kernel the part before it: another file
        raise ValueError("embedded null byte")
    return raw


def openat2(dir_fd: int, path: str | bytes, flags: int, *, mode: int = 0, resolve: int) -> int:
    """Open ``path`` below ``dir_fd`` under the ``RESOLVE_*`` rules; returns a descriptor.

    O_CLOEXEC is always set. ELOOP: a symbolic link where none is allowed; EXDEV: the path leads out of
    the directory or off its file system.

    :raises OSError: as open(2) and openat2(2); ENOSYS carries a sentence.
    :raises ValueError: ``path`` holds a NUL.
    """
    raw = _encode(path)
    how = _OpenHow(flags | os.O_CLOEXEC, mode, resolve)
    for _ in range(OPENAT2_ATTEMPTS):
        fd: int = _libc.syscall(
            ctypes.c_long(SYS_OPENAT2),
            ctypes.c_int(dir_fd),
            ctypes.c_char_p(raw),
            ctypes.byref(how),
            ctypes.c_size_t(ctypes.sizeof(how)),
        )
        if fd >= 0:
            return fd
        if ctypes.get_errno() not in (errno.EAGAIN, errno.EINTR):
            break
    raise _error("openat2", path)


def renameat2(old_dir_fd: int, old: str | bytes, new_dir_fd: int, new: str | bytes, flags: int) -> None:
    """Rename under ``RENAME_NOREPLACE``, ``RENAME_EXCHANGE`` or 0.

    :raises OSError: FileExistsError under NOREPLACE; EINVAL where the file system knows no such flag.
    :raises ValueError: a name holds a NUL.
    """
    if (
        _libc.renameat2(
            ctypes.c_int(old_dir_fd),
            ctypes.c_char_p(_encode(old)),
            ctypes.c_int(new_dir_fd),
            ctypes.c_char_p(_encode(new)),
            ctypes.c_uint(flags),
        )
        != 0
    ):
        number_and_text = _error("renameat2").args
        raise OSError(*number_and_text, old, None, new)


def _prctl(call: str, option: int, argument: int) -> None:
    zero = ctypes.c_ulong(0)
    if _libc.prctl(ctypes.c_int(option), ctypes.c_ulong(argument), zero, zero, zero) != 0:
        raise _error(call)


def set_no_new_privs() -> None:
    """Give up, for good and for all descendants, what exec of a set-user-ID program would grant."""
    _prctl("prctl(PR_SET_NO_NEW_PRIVS)", PR_SET_NO_NEW_PRIVS, 1)


def set_undumpable() -> None:
    """Let nobody trace this process, or look into it through /proc, who has no CAP_SYS_PTRACE.

    A change of the user undoes it, and does the same unless fs.suid_dumpable says otherwise.
    """
    _prctl("prctl(PR_SET_DUMPABLE)", PR_SET_DUMPABLE, 0)


def set_capabilities(mask: int) -> None:
    """Keep of this thread's capabilities those in ``mask``, none of them to be inherited.

    Nothing is gained: what the thread has not got already is not asked for. The bounding set stays, for it
    counts in exec(2) only.
    """
    header, data = _CapHeader(CAPABILITY_VERSION_3, 0), (_CapData * 2)()
    if _libc.capget(ctypes.byref(header), data) != 0:
        raise _error("capget")
    for half, word in zip(data, (mask & 0xFFFFFFFF, mask >> 32), strict=True):
        half.permitted &= word
        half.effective = half.permitted
        half.inheritable = 0
    if _libc.capset(ctypes.byref(header), data) != 0:
        raise _error("capset")


def setns(fd: int, nstype: int = 0) -> None:
    """Move this thread into a namespace (``os.setns`` exists from Python 3.12 on only).

    ``fd`` is an open /proc/PID/ns/NAME, or a pidfd with ``nstype`` a union of ``CLONE_NEW*``.
    """
    if _libc.setns(ctypes.c_int(fd), ctypes.c_int(nstype)) != 0:
        raise _error("setns")


def namespace_parent(fd: int) -> int:
    """Open the parent of a pid or user namespace, close-on-exec.

    :raises OSError: EPERM: there is none, or it is above our own.
    """
    return fcntl.ioctl(fd, NS_GET_PARENT)


def filesystem_type(fd_or_path: int | str | os.PathLike[str]) -> int:
    """Return the magic number of the file system that a descriptor or a path (links followed) lies on."""
    buffer = _Statfs()
    if isinstance(fd_or_path, int):
        failed = _libc.fstatfs(ctypes.c_int(fd_or_path), ctypes.byref(buffer))
    else:
        failed = _libc.statfs(ctypes.c_char_p(_encode(os.fspath(fd_or_path))), ctypes.byref(buffer))
    if failed:
        raise _error("statfs", fd_or_path if isinstance(fd_or_path, int) else os.fspath(fd_or_path))
    # The numbers of CIFS and SMB2 have bit 31 set, and some kernels extend the sign.
    return int(buffer.f_type) & 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class CachedStat:
    """What the kernel remembers of a file; ``dev`` and ``rdev`` as in ``os.stat_result``."""

    mode: int
    dev: int
    ino: int
    rdev: int
    nlink: int
    size: int


def stat_cached(path: str | bytes) -> CachedStat:
    """Stat ``path``, links followed, without asking a remote server or a FUSE daemon that may be dead.

    On such file systems the size may be old. A plain stat(2) would sit in the D state there.
    """
    buffer = _Statx()
    flags = AT_STATX_DONT_SYNC | AT_NO_AUTOMOUNT
    if (
        _libc.statx(
            ctypes.c_int(AT_FDCWD),
            ctypes.c_char_p(_encode(path)),
            ctypes.c_int(flags),
            ctypes.c_uint(STATX_BASIC_STATS),
            ctypes.byref(buffer),
        )
        != 0
    ):
        raise _error("statx", path)
    return CachedStat(
        mode=buffer.stx_mode,
        dev=os.makedev(buffer.stx_dev_major, buffer.stx_dev_minor),
        ino=buffer.stx_ino,
        rdev=os.makedev(buffer.stx_rdev_major, buffer.stx_rdev_minor),
        nlink=buffer.stx_nlink,
        size=buffer.stx_size,
    )


def pidfd_open(pid: int) -> int:
    """Return a descriptor (close-on-exec) of process ``pid``.

    Not every build of Python has ``os.pidfd_open``: it depends on the headers of the machine it was built on.

    :raises OSError: ProcessLookupError; EINVAL or ENOENT for the id of a thread that leads no process.
    """
    # syscall(2) takes a pid_t; a number that does not fit would be cut to some other process's id.
    if not 0 < pid < 1 << 31:
        raise ProcessLookupError(errno.ESRCH, f"{pid} cannot be a process id")
    fd: int = _libc.syscall(ctypes.c_long(SYS_PIDFD_OPEN), ctypes.c_int(pid), ctypes.c_uint(0))
    if fd < 0:
        raise _error("pidfd_open")
    return fd


def pidfd_send_signal(fd: int, signal_number: int) -> None:
    """Send a signal to the process behind a pidfd; 0 only asks whether it has been reaped.

    :raises ProcessLookupError: it has been reaped.
    """
    result: int = _libc.syscall(
        ctypes.c_long(SYS_PIDFD_SEND_SIGNAL),
        ctypes.c_int(fd),
        ctypes.c_int(signal_number),
        ctypes.c_void_p(None),
        ctypes.c_uint(0),
    )
    if result != 0:
        raise _error("pidfd_send_signal")


def pidfd_getfd(pidfd: int, fd: int) -> int:
    """Make a duplicate of another process's descriptor, close-on-exec.

    :raises OSError: as pidfd_getfd(2): EBADF when it has no such descriptor, EPERM when we may not trace it.
    """
    result: int = _libc.syscall(
        ctypes.c_long(SYS_PIDFD_GETFD), ctypes.c_int(pidfd), ctypes.c_int(fd), ctypes.c_uint(0)
    )
    if result < 0:
        raise _error("pidfd_getfd", fd)
    return result


# mounts -----------------------------------------------------------------------------------------------

MS_REC: Final = 0x4000
MS_PRIVATE: Final = 0x40000
MS_SLAVE: Final = 0x80000
"""linux/mount.h: for :func:`mount` and :func:`mount_setattr`."""

MNT_DETACH: Final = 0x2
"""linux/fs.h"""

OPEN_TREE_CLONE: Final = 1
MOVE_MOUNT_F_EMPTY_PATH: Final = 0x4
MOVE_MOUNT_T_EMPTY_PATH: Final = 0x40

MOUNT_ATTR_RDONLY: Final = 0x1
MOUNT_ATTR_NOSUID: Final = 0x2
MOUNT_ATTR_NODEV: Final = 0x4
MOUNT_ATTR_NOEXEC: Final = 0x8
MOUNT_ATTR_NOATIME: Final = 0x10
MOUNT_ATTR_STRICTATIME: Final = 0x20
MOUNT_ATTR_NODIRATIME: Final = 0x80
MOUNT_ATTR_NOSYMFOLLOW: Final = 0x200000
MOUNT_ATTR_ALL: Final = 0x2000FF
"""linux/mount.h: for :func:`mount_setattr`; 0x70 are one number, which says how access times are kept."""


class _MountAttr(ctypes.Structure):
    """``struct mount_attr`` of linux/mount.h."""

    _fields_ = (
        ("attr_set", ctypes.c_uint64),
        ("attr_clr", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


def unshare(flags: int) -> None:
    """Give this thread new namespaces of the kinds ``CLONE_NEW*``."""
    if _libc.unshare(ctypes.c_int(flags)) != 0:
        raise _error("unshare")


def mount(source: str, target: str, fs_type: str, flags: int = 0) -> None:
    """Attach a file system, or with ``MS_PRIVATE`` and the like change how one spreads."""
    words = (_encode(source), _encode(target), _encode(fs_type))
    if _libc.mount(*map(ctypes.c_char_p, words), ctypes.c_ulong(flags), None) != 0:
        raise _error("mount", target)


def open_tree_clone(fd: int) -> int:
    """Copy the one mount that ``fd`` lies on, with ``fd`` as its root; attached nowhere until it is moved.

    :raises OSError: EINVAL when the mount is not of this thread's mount namespace.
    """
    flags = OPEN_TREE_CLONE | os.O_CLOEXEC | AT_EMPTY_PATH
    number: int = _libc.syscall(SYS_OPEN_TREE, ctypes.c_int(fd), ctypes.c_char_p(b""), ctypes.c_uint(flags))
    if number < 0:
        raise _error("open_tree")
    return number


def move_mount(fd: int, target: str | int) -> None:
    """Attach a mount from :func:`open_tree_clone` at a path, or where a descriptor lies."""
    directory, path, flags = AT_FDCWD, b"", MOVE_MOUNT_F_EMPTY_PATH
    if isinstance(target, int):
        directory, flags = target, flags | MOVE_MOUNT_T_EMPTY_PATH
    else:
        path = _encode(target)
    arguments = (
        ctypes.c_int(fd),
        ctypes.c_char_p(b""),
        ctypes.c_int(directory),
        ctypes.c_char_p(path),
        ctypes.c_uint(flags),
    )
    if _libc.syscall(SYS_MOVE_MOUNT, *arguments) != 0:
        raise _error("move_mount", target)


def mount_setattr(fd: int, attributes: int | None = None, *, propagation: int = 0) -> None:
    """Give the mount whose root ``fd`` is these ``MOUNT_ATTR_*`` and no others (since Linux 5.12).

    ``propagation``: ``MS_SLAVE`` or the like, for all mounts below it too.

    :raises OSError: EBUSY when it is to be read-only and a file there is open for writing; EINVAL when it is
        no mount of this thread's mount namespace.
    """
    attr = _MountAttr(propagation=propagation)
    if attributes is not None:
        attr.attr_set, attr.attr_clr = attributes, MOUNT_ATTR_ALL
    arguments = (
        ctypes.c_int(fd),
        ctypes.c_char_p(b""),
        ctypes.c_uint(AT_EMPTY_PATH | (AT_RECURSIVE if propagation else 0)),
        ctypes.byref(attr),
        ctypes.c_size_t(ctypes.sizeof(attr)),
    )
    if _libc.syscall(SYS_MOUNT_SETATTR, *arguments) != 0:
        raise _error("mount_setattr", since="5.12")


def detach(path: str) -> None:
    """Take the mount at ``path`` away; it ends when nobody uses it any more."""
    if _libc.umount2(ctypes.c_char_p(_encode(path)), ctypes.c_int(MNT_DETACH)) != 0:
        raise _error("umount2", path)


def mount_id(fd: int) -> int:
    """Return the id of the mount that ``fd`` lies on, as /proc/PID/mountinfo gives it (since Linux 5.8)."""
    buffer = _Statx()
    flags = AT_EMPTY_PATH | AT_SYMLINK_NOFOLLOW | AT_NO_AUTOMOUNT
    if (
        _libc.statx(
            ctypes.c_int(fd),
            ctypes.c_char_p(b""),
            ctypes.c_int(flags),
            ctypes.c_uint(STATX_MNT_ID),
            ctypes.byref(buffer),
        )
        != 0
    ):
        raise _error("statx")
    return int(buffer.rest[0])
