"""The texts of /proc as data. Pure: nothing is read here, see :mod:`hibernode.host.procfs`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

from hibernode.workload import ProcessKey

PAGE_SIZE: Final = os.sysconf("SC_PAGE_SIZE")

PF_KTHREAD: Final = 0x00200000
"""linux/sched.h: the bit of ``Stat.flags`` that a kernel thread carries."""

_DELETED: Final = " (deleted)"


@dataclass(frozen=True, slots=True)
class Stat:
    """/proc/PID/stat. ``state`` is one letter (R S D T t Z X I); ``vsize`` and ``rss_bytes`` are bytes.

    ``start_ticks`` counts clock ticks since boot, ``tty_nr`` is 0 without a controlling terminal.
    """

    pid: int
    comm: str
    state: str
    ppid: int
    pgrp: int
    session: int
    tty_nr: int
    flags: int
    num_threads: int
    start_ticks: int
    vsize: int
    rss_bytes: int

    @property
    def key(self) -> ProcessKey:
        """The process as the kernel knows it since boot."""
        return ProcessKey(self.pid, self.start_ticks)

    @property
    def is_kernel_thread(self) -> bool:
        """Whether it is a thread of the kernel: no memory of its own, nothing to freeze."""
        return bool(self.flags & PF_KTHREAD)


def parse_stat(data: bytes) -> Stat:
    """Parse one /proc/PID/stat. The name in it may hold blanks, parentheses and line ends."""
    head, _, rest = data.partition(b" (")
    comm, _, tail = rest.rpartition(b") ")  # after the name there are only numbers
    fields = tail.split()
    return Stat(
        pid=int(head),
        comm=os.fsdecode(comm),
        state=chr(fields[0][0]),
        ppid=int(fields[1]),
        pgrp=int(fields[2]),
        session=int(fields[3]),
        tty_nr=int(fields[4]),
        flags=int(fields[6]),
        num_threads=int(fields[17]),
        start_ticks=int(fields[19]),
        vsize=int(fields[20]),
        rss_bytes=int(fields[21]) * PAGE_SIZE,
    )


@dataclass(frozen=True, slots=True)
class Status:
    """/proc/PID/status. Ids are (real, effective, saved, file system); sizes are bytes, 0 without memory.

    ``ns_pids`` holds the pid in each pid namespace, from /proc's own one inwards. ``tracer_pid`` is 0
    when nobody traces. ``seccomp_mode``: 0 off, 1 strict, 2 filter. The sets of capabilities are bit masks:
    inheritable, permitted, effective, bounding, ambient.
    """

    uids: tuple[int, int, int, int]
    gids: tuple[int, int, int, int]
    groups: tuple[int, ...]
    tracer_pid: int
    no_new_privs: bool
    seccomp_mode: int
    ns_pids: tuple[int, ...]
    vm_rss_bytes: int
    rss_shmem_bytes: int
    vm_swap_bytes: int
    cap_inh: int
    cap_prm: int
    cap_eff: int
    cap_bnd: int
    cap_amb: int

    @property
    def capabilities(self) -> int:
        """All that it has or a program that it starts may get; the effective ones are permitted ones."""
        return self.cap_inh | self.cap_prm | self.cap_bnd | self.cap_amb


def parse_status(data: bytes) -> Status:
    """Parse one /proc/PID/status. A line that this kernel does not print counts as 0."""
    lines = dict(line.partition(b":\t")[::2] for line in data.split(b"\n"))

    def numbers(name: bytes) -> tuple[int, ...]:
        return tuple(int(word) for word in lines.get(name, b"").split())

    def number(name: bytes, base: int = 10) -> int:
        words = lines.get(name, b"").split()
        return int(words[0], base) if words else 0

    def four(name: bytes) -> tuple[int, int, int, int]:
        real, effective, saved, file_system = numbers(name)
        return real, effective, saved, file_system

    return Status(
        uids=four(b"Uid"),
        gids=four(b"Gid"),
        groups=numbers(b"Groups"),
        tracer_pid=number(b"TracerPid"),
        no_new_privs=bool(number(b"NoNewPrivs")),
        seccomp_mode=number(b"Seccomp"),
        ns_pids=numbers(b"NSpid"),
        vm_rss_bytes=number(b"VmRSS") * 1024,
        rss_shmem_bytes=number(b"RssShmem") * 1024,
        vm_swap_bytes=number(b"VmSwap") * 1024,
        cap_inh=number(b"CapInh", 16),
        cap_prm=number(b"CapPrm", 16),
        cap_eff=number(b"CapEff", 16),
        cap_bnd=number(b"CapBnd", 16),
        cap_amb=number(b"CapAmb", 16),
    )


@dataclass(frozen=True, slots=True)
class Fd:
    """An open descriptor. ``target`` is the link's text; ``flags`` are open(2)'s, O_CLOEXEC included.

    ``mode`` is st_mode; ``dev`` and ``rdev`` are as ``os.makedev`` makes them; ``size`` is bytes.
    """

    fd: int
    target: str
    flags: int
    mnt_id: int
    mode: int
    dev: int
    ino: int
    rdev: int
    nlink: int
    size: int


@dataclass(frozen=True, slots=True)
class Mapping:
    """One line of /proc/PID/maps: addresses ``start`` up to ``end``, ``perms`` such as ``r-xp``.

    ``offset`` is bytes into the file, ``dev`` is (major, minor). ``path`` is empty for anonymous memory
    and in brackets for the kernel's own (``[heap]``). ``deleted`` goes by the mark that the kernel sets
    behind the path, which is cut off; a file whose own name ends in it looks the same.
    """

    start: int
    end: int
    perms: str
    offset: int
    dev: tuple[int, int]
    inode: int
    path: str
    deleted: bool


def parse_mapping(line: bytes) -> Mapping:
    """Parse one line of /proc/PID/maps, without its line end."""
    fields = line.split(None, 5)
    start, end = (int(address, 16) for address in fields[0].split(b"-"))
    major, minor = (int(number, 16) for number in fields[3].split(b":"))
    # The kernel escapes a line end in a path and nothing else.
    path = os.fsdecode(fields[5].replace(b"\\012", b"\n")) if len(fields) > 5 else ""  # noqa: PLR2004
    deleted = path.endswith(_DELETED)
    return Mapping(
        start=start,
        end=end,
        perms=fields[1].decode("ascii"),
        offset=int(fields[2], 16),
        dev=(major, minor),
        inode=int(fields[4]),
        path=path.removesuffix(_DELETED),
        deleted=deleted,
    )
