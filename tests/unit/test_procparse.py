"""The texts of /proc, as tables."""

from __future__ import annotations

import os

import pytest

from hibernode.host import procparse
from hibernode.host.procparse import Stat
from hibernode.workload import ProcessKey

NUMBERS = b"S 5 6 7 8 -1 4194560 9 10 11 12 13 14 15 16 20 0 3 0 98765 1048576 25 18446744073709551615 1 1 0"


@pytest.mark.parametrize(
    "comm",
    [
        pytest.param("sleep", id="plain"),
        pytest.param("", id="empty"),
        pytest.param("a b c", id="blanks"),
        pytest.param(") R 1 1 1", id="a name that plays the rest of the line"),
        pytest.param("((( )) ", id="parentheses"),
        pytest.param("two\nlines", id="a line end"),
        pytest.param("\udcff", id="not UTF-8"),
    ],
)
def test_stat_is_read_whatever_the_name_holds(comm):
    """Only the last parenthesis ends the name."""
    found = procparse.parse_stat(b"4 (" + os.fsencode(comm) + b") " + NUMBERS + b"\n")
    assert found == Stat(
        pid=4,
        comm=comm,
        state="S",
        ppid=5,
        pgrp=6,
        session=7,
        tty_nr=8,
        flags=4194560,
        num_threads=3,
        start_ticks=98765,
        vsize=1048576,
        rss_bytes=25 * procparse.PAGE_SIZE,
    )
    assert found.key == ProcessKey(4, 98765)
    assert not found.is_kernel_thread


def test_a_status_without_memory_lines_counts_as_zero():
    """Kernel threads and zombies print no Vm lines, and an old kernel prints fewer lines."""
    status = procparse.parse_status(
        b"Name:\tx\nUid:\t0\t1\t2\t3\nGid:\t4\t5\t6\t7\nGroups:\t \nCapEff:\t00000000000000ff\n"
    )
    assert (status.uids, status.gids, status.groups, status.ns_pids) == ((0, 1, 2, 3), (4, 5, 6, 7), (), ())
    assert (status.vm_rss_bytes, status.rss_shmem_bytes, status.vm_swap_bytes) == (0, 0, 0)
    assert (status.seccomp_mode, status.cap_eff) == (0, 255)


def test_all_capabilities_are_read():
    """An old kernel has no ambient ones; what is effective is permitted."""
    ids = b"Uid:\t0\t0\t0\t0\nGid:\t0\t0\t0\t0\n"
    text = ids + b"CapInh:\t01\nCapPrm:\t06\nCapEff:\t02\nCapBnd:\t10000000000\n"
    status = procparse.parse_status(text)
    assert (status.cap_inh, status.cap_prm, status.cap_eff, status.cap_bnd) == (1, 6, 2, 1 << 40)
    assert (status.cap_amb, status.capabilities) == (0, 1 << 40 | 7)
    assert procparse.parse_status(text + b"CapAmb:\t20\n").capabilities == 1 << 40 | 0x27


def test_the_kernels_own_threads_are_told_apart():
    """A kernel thread is known by a bit of its flags."""
    kernel = procparse.parse_stat(b"2 (kthreadd) S 0 0 0 0 -1 2129984" + NUMBERS[NUMBERS.index(b" 9 10") :])
    assert kernel.is_kernel_thread


@pytest.mark.parametrize(
    ("line", "path", "deleted"),
    [
        pytest.param(b"", "", False, id="anonymous memory"),
        pytest.param(b"  [heap]", "[heap]", False, id="the kernel's own names"),
        pytest.param(b"   /a b/c  d", "/a b/c  d", False, id="blanks in a path"),
        pytest.param(b"   /a (deleted)", "/a", True, id="a deleted file"),
        pytest.param(b"   /a\\012b\\134", "/a\nb\\134", False, id="only a line end is escaped"),
        pytest.param(b"   /\xff", "/\udcff", False, id="a path that is not UTF-8"),
        pytest.param(b"   /a ", "/a ", False, id="a blank at the end of a path"),
    ],
)
def test_a_mapping_is_parsed(line, path, deleted):
    """The path is what stands behind the inode, the mark of a deleted file apart."""
    found = procparse.parse_mapping(b"7f00a000-7f00b000 r-xp 00002000 fd:01 1234567 " + line)
    assert (found.start, found.end, found.perms, found.offset) == (0x7F00A000, 0x7F00B000, "r-xp", 0x2000)
    assert (found.dev, found.inode, found.path, found.deleted) == ((0xFD, 1), 1234567, path, deleted)
