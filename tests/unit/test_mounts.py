"""mountinfo: what the kernel writes, undone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hibernode.host.mounts import Mount, mounts, parse_mountinfo

NVIDIA_CONTAINER = """\
3121 3033 0:368 / / rw,relatime master:812 - overlay overlay rw,lowerdir=/l/A:/l/B,upperdir=/u/7/fs,workdir=/u/7/work
3122 3121 0:370 / /proc rw,nosuid,nodev,noexec,relatime - proc proc rw
3123 3122 0:370 /bus /proc/bus ro,nosuid,nodev,noexec,relatime - proc proc rw
3124 3122 0:384 / /proc/acpi ro,relatime - tmpfs tmpfs ro
3125 3122 0:371 /null /proc/kcore rw,nosuid - tmpfs tmpfs rw,size=65536k,mode=755
3130 3122 0:385 / /proc/driver/nvidia rw,nosuid,nodev,noexec,relatime - tmpfs tmpfs rw,mode=555
3131 3130 0:22 /driver/nvidia/gpus/0000:3b:00.0 /proc/driver/nvidia/gpus/0000:3b:00.0 ro,nosuid,nodev,noexec,relatime master:14 - proc proc rw
3132 3121 259:2 /usr/lib/firmware/nvidia/535.104.05/gsp_ga10x.bin /usr/lib/firmware/nvidia/535.104.05/gsp_ga10x.bin ro,nosuid,nodev,relatime master:1 - ext4 /dev/nvme0n1p2 rw,discard,errors=remount-ro
3133 3121 259:2 /usr/lib/firmware/nvidia/535.104.05/gsp_tu10x.bin /usr/lib/firmware/nvidia/535.104.05/gsp_tu10x.bin ro,nosuid,nodev,relatime master:1 - ext4 /dev/nvme0n1p2 rw,discard,errors=remount-ro
3134 3121 259:2 /usr/bin/nvidia-smi /usr/bin/nvidia-smi ro,nosuid,nodev,relatime master:1 - ext4 /dev/nvme0n1p2 rw,discard,errors=remount-ro
3135 3121 0:25 /nvidia-persistenced/socket /run/nvidia-persistenced/socket rw,nosuid,nodev,noexec,relatime master:5 - tmpfs tmpfs rw,size=13178380k,mode=755
3136 3121 0:371 / /dev rw,nosuid - tmpfs tmpfs rw,size=65536k,mode=755
3137 3136 0:6 /nvidia0 /dev/nvidia0 ro,nosuid,noexec,relatime master:2 - devtmpfs udev rw,size=65855252k,nr_inodes=16463813,mode=755
"""  # noqa: E501 - as the kernel prints it


def test_fc_36_the_mounts_of_the_nvidia_hook_are_listed_like_any_other():
    """Firmware files, /proc/driver/nvidia and device nodes come as bind mounts with a root of their own."""
    found = {mount.mount_point: mount for mount in parse_mountinfo(NVIDIA_CONTAINER)}
    assert len(found) == 13
    assert found["/usr/lib/firmware/nvidia/535.104.05/gsp_ga10x.bin"] == Mount(
        id=3132,
        parent_id=3121,
        dev=(259, 2),
        root="/usr/lib/firmware/nvidia/535.104.05/gsp_ga10x.bin",
        mount_point="/usr/lib/firmware/nvidia/535.104.05/gsp_ga10x.bin",
        options="ro,nosuid,nodev,relatime",
        fs_type="ext4",
        source="/dev/nvme0n1p2",
        super_options="rw,discard,errors=remount-ro",
        propagation=("master:1",),
    )
    gpu = found["/proc/driver/nvidia/gpus/0000:3b:00.0"]
    assert (gpu.root, gpu.fs_type, gpu.parent_id) == ("/driver/nvidia/gpus/0000:3b:00.0", "proc", 3130)
    assert (found["/dev/nvidia0"].root, found["/dev/nvidia0"].dev) == ("/nvidia0", (0, 6))
    assert found["/"].super_option("upperdir") == "/u/7/fs"


@pytest.mark.parametrize(
    ("line", "field", "expected"),
    [
        pytest.param(r"1 2 8:1 / /a\040b rw - ext4 /d rw", "mount_point", "/a b", id="an escaped blank"),
        pytest.param(
            r"1 2 8:1 / /a\011b\012c rw - ext4 /d rw", "mount_point", "/a\tb\nc", id="tab and line end"
        ),
        pytest.param(
            r"1 2 8:1 / /a\134040b rw - ext4 /d rw", "mount_point", r"/a\040b", id="a backslash, once"
        ),
        pytest.param(
            "1 2 8:1 / /a\\b rw - ext4 /d rw", "mount_point", "/a\\b", id="a backslash that escapes nothing"
        ),
        pytest.param(
            r"1 2 8:1 /x\040y//deleted /a rw - ext4 /d rw", "root", "/x y//deleted", id="a deleted root"
        ),
        pytest.param(
            r"1 2 8:1 / /a rw - fuse.x my\040disk rw", "source", "my disk", id="a blank in the source"
        ),
        pytest.param("1 2 8:1 / /a rw - tmpfs  rw,size=4k", "source", "", id="an empty source"),
        pytest.param(
            "1 2 8:1 / /a rw - tmpfs  rw,size=4k", "super_options", "rw,size=4k", id="options after it"
        ),
        pytest.param("1 2 8:1 / /a rw - nfs - rw", "source", "-", id="a source that is a dash"),
        pytest.param("1 2 8:1 / /a rw - ext4 /d rw", "propagation", (), id="private"),
        pytest.param(
            "1 2 8:1 / /a rw shared:3 master:1 propagate_from:2 unbindable - ext4 /d rw",
            "propagation",
            ("shared:3", "master:1", "propagate_from:2", "unbindable"),
            id="every kind of propagation",
        ),
        pytest.param(
            "1 2 0:4 net:[4026532008] /run/netns/a rw - nsfs nsfs rw", "root", "net:[4026532008]", id="nsfs"
        ),
        pytest.param(
            "1 2 8:1 / /\udcff rw - ext4 /d rw", "mount_point", "/\udcff", id="a path that is not UTF-8"
        ),
    ],
)
def test_fields_are_read_and_their_escapes_undone(line, field, expected):
    """Each field comes as the program that mounted it wrote it."""
    (mount,) = parse_mountinfo(line + "\n")
    assert getattr(mount, field) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        pytest.param("upperdir", "/u,1/fs", id="a comma inside a value does not end it"),
        pytest.param("lowerdir", "/l a:/m", id="a blank inside a value"),
        pytest.param("ro", "", id="an option without a value"),
        pytest.param("workdir", None, id="an option that is not there"),
        pytest.param("upper", None, id="the head of an option's name"),
    ],
)
def test_a_file_systems_option_is_found_by_its_whole_name(name, expected):
    """The commas between options are told from escaped ones inside values."""
    line = r"1 2 0:9 / / rw - overlay overlay ro,lowerdir=/l\040a:/m,upperdir=/u\0541/fs"
    assert parse_mountinfo(line)[0].super_option(name) == expected


def test_mounts_over_one_another_keep_their_order():
    """The last one listed is the one that is seen."""
    lines = "1 0 8:1 / /a rw - ext4 /d rw\n2 1 0:9 / /a rw - tmpfs t rw\n"
    assert [mount.fs_type for mount in parse_mountinfo(lines)] == ["ext4", "tmpfs"]
    assert parse_mountinfo("") == []


@pytest.mark.parametrize(
    "line",
    [
        "x",
        "1 2 8:1 / /a rw",
        "1 2 8:1 / /a rw -",
        "1 2 8:1 / /a rw - ext4",
        "a 2 8:1 / /a rw - ext4 /d rw",
        "1 2 8 / /a rw - e d rw",
    ],
)
def test_a_line_that_is_none_of_mountinfos_is_named(line):
    """The error shows the line, so that a sample can be corrected."""
    with pytest.raises(ValueError, match="not a line of mountinfo") as caught:
        parse_mountinfo(line)
    assert repr(line) in str(caught.value)


def test_the_machines_own_mounts_are_listed_by_pid_and_by_self():
    """The device numbers are those that stat gives for the mount points."""
    found = {mount.mount_point: mount for mount in mounts()}
    assert found.keys() == {mount.mount_point for mount in mounts(os.getpid())}
    assert os.makedev(*found["/proc"].dev) == Path("/proc").stat().st_dev
    assert found["/proc"].fs_type == "proc"


IN_A_NAMESPACE = """
import os, sys
os.execvp("unshare", ["unshare", "--mount", "--propagation", "private", "sh", "-c",
    'mount -t tmpfs "my disk" "$1" && echo ready && exec cat', "sh", sys.argv[1]])
"""


def test_a_process_in_a_namespace_of_its_own_shows_its_own_mounts(tmp_path):
    """A mount with blanks in its name, made by a process in its own namespace, is seen there alone."""
    point = tmp_path / "a b\\c"
    point.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", IN_A_NAMESPACE, str(point)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        assert child.stdout.readline() == "ready\n"
        theirs = [mount for mount in mounts(child.pid) if mount.mount_point == str(point)]
        child.stdin.close()
    assert [(mount.fs_type, mount.source, mount.propagation) for mount in theirs] == [
        ("tmpfs", "my disk", ())
    ]
    assert not [mount for mount in mounts() if mount.mount_point == str(point)]


@pytest.mark.parametrize("reaped", [pytest.param(True, id="reaped"), pytest.param(False, id="a zombie")])
def test_a_process_that_has_ended_has_no_mounts(reaped):
    """Both the vanished and the zombie are a ProcessLookupError."""
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    if reaped:
        child.wait()
    with pytest.raises(ProcessLookupError):
        mounts(child.pid)
    child.wait()
