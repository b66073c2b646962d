"""The container that a worker is restored into, as it is looked at: devices, ids, files, the shim's spec."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hibernode.artifact.manifest import Manifest
from hibernode.compat import FileFacts, HostFacts
from hibernode.container import target as targets
from hibernode.discovery.containers import Container, ContainerRef
from hibernode.host import linux, procfs
from hibernode.host.procfs import Process
from tests.unit.artifact_kit import PROCESS, manifest
from tests.unit.box_kit import KINDS, box

DEVICES = """
mknod dev/null c 1 3; mknod dev/disk b 7 0; mknod dev/$'odd\\nname' c 1 3
ln -s null dev/link; touch dev/file; mkfifo dev/pipe
mkdir dev/nvidia-caps dev/deep dev/deep/er dev/pts dev/shm; mknod dev/nvidia-caps/cap1 c 1 3
mknod dev/deep/er/x c 1 3; mknod dev/pts/0 c 136 0; mknod dev/shm/x c 1 3
ln -s /etc dev/etc; ln -s deep dev/alias
"""


def test_device_nodes_are_listed_and_links_are_not_followed(tmp_path: Path) -> None:
    """Two levels deep; terminals and shared memory are no devices that a container is given."""
    with box(tmp_path, DEVICES) as pid:
        found = list(targets.devices(pid))
    assert found == ["/dev/disk", "/dev/null", "/dev/nvidia-caps/cap1", "/dev/odd\nname"]


@pytest.mark.parametrize("setup", ["rmdir dev", "rmdir dev; ln -s /dev dev", "rmdir dev; touch dev"])
def test_a_dev_that_is_no_directory_has_no_devices(tmp_path: Path, setup: str) -> None:
    """An image may have anything there, also a link to the node's own."""
    with box(tmp_path, setup) as pid:
        assert list(targets.devices(pid)) == []


def test_the_number_of_devices_is_bounded(tmp_path: Path) -> None:
    """A container may make as many nodes as it likes; not all are looked at."""
    with box(tmp_path, "cd dev; for n in $(seq 1100); do echo n$n c 1 3; done | xargs -n 4 mknod") as pid:
        assert len(list(targets.devices(pid))) == targets.MAX_DEVICES


def test_what_is_no_device_is_bounded_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All directories together are looked at up to a number, however many files are in them."""
    monkeypatch.setattr(targets, "MAX_ENTRIES", 50)
    seen: list[str] = []
    stat = os.stat

    def noted(name: str, **more: Any) -> os.stat_result:
        seen.append(name)
        return stat(name, **more)

    monkeypatch.setattr(os, "stat", noted)
    many = "cd dev; for d in a b c; do mkdir $d; for n in $(seq 100); do echo >$d/f$n; done; done"
    with box(tmp_path, many) as pid:
        assert list(targets.devices(pid)) == []
    assert len(seen) <= 50


def test_id_maps_have_one_form(tmp_path: Path) -> None:
    """Blanks are made even, so that two maps compare as texts."""
    assert targets.id_map(os.getpid(), "uid") == "0 0 4294967295"
    with box(tmp_path, kinds=KINDS) as pid:
        assert targets.id_map(pid, "gid") == "0 0 4294967295"
    command = ["unshare", "--user", "sh", "-c", "echo x; read line"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"x\n"
        assert targets.id_map(process.pid, "uid") == ""
        Path(f"/proc/{process.pid}/uid_map").write_text("0 100000 10\n10 200000 5\n")
        assert targets.id_map(process.pid, "uid") == "0 100000 10; 10 200000 5"
        process.communicate(b"\n")


def test_a_box_is_looked_at(tmp_path: Path) -> None:
    """All that the gate asks for, from the kernel."""
    kinds = KINDS | linux.CLONE_NEWNET
    with box(tmp_path, DEVICES, kinds=kinds) as pid, Process.open(pid) as process:
        found = targets.look(Container(ContainerRef("x"), process.key, "box", 1, 2), process)
        status = procfs.read_status(pid)
    assert (found.depth, found.ours, found.others, found.own_net) == (1, False, (), True)
    assert found.uids == frozenset({0})
    assert found.gids == frozenset({0, *status.groups})
    assert (found.cap_prm, found.cap_bnd, found.capabilities) == (
        status.cap_prm,
        status.cap_bnd,
        status.capabilities,
    )
    assert found.addresses == frozenset()
    assert found.mounts.external == ()
    assert "/dev/null" in found.devices


WITH = ["setpriv", "--reuid", "33", "--regid", "34", "--groups", "5,6", "--inh-caps=-all", "--bounding-set"]


@contextlib.contextmanager
def sleeping(*command: str) -> Iterator[int]:
    """Start a program in the end of a chain of them; yields its pid when it is ``sleep``."""
    with subprocess.Popen([*command, "sleep", "1000"]) as process:
        try:
            pid = process.pid
            while procfs.read_stat(pid).comm != "sleep":
                assert process.poll() is None
                pid = next((stat.pid for stat in procfs.tree(process.pid) if stat.comm == "sleep"), pid)
            yield pid
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_rights_are_those_of_all_who_see_its_pids() -> None:
    """What was started in it from outside is not below its init, but can look into CRIU as well."""
    with sleeping("unshare", "--pid", "--fork", *WITH, "-all,+kill") as pid, Process.open(pid) as process:
        container = Container(ContainerRef("x"), process.key, "sleep", 1, 2)
        assert targets.capabilities(container, pid) == 1 << 5
        enter = ("nsenter", "--target", str(pid), "--pid")
        with sleeping(*enter, *WITH, "-all,+sys_ptrace") as other:
            assert other not in [stat.pid for stat in procfs.tree(pid)]
            assert targets.capabilities(container, pid) == 1 << 5 | 1 << 19
        assert targets.capabilities(container, pid) == 1 << 5


def test_who_has_ended_has_no_rights() -> None:
    """An init that reaps nobody keeps zombies, which show what they once had."""
    leave = "import os, sys; os.fork() or os._exit(0); os.execvp(sys.argv[1], sys.argv[1:])"
    command = ("unshare", "--pid", "--fork", sys.executable, "-c", leave, *WITH, "-all,+kill")
    with sleeping(*command) as pid, Process.open(pid) as process:
        (zombie,) = (stat.pid for stat in procfs.tree(pid) if stat.pid != pid)
        assert procfs.read_status(zombie).capabilities != 1 << 5
        container = Container(ContainerRef("x"), process.key, "sleep", 1, 2)
        while procfs.read_stat(zombie).state != "Z":
            pass
        assert targets.capabilities(container, pid) == 1 << 5


def image_with(*points: str) -> Manifest:
    mounts = [
        {"key": f"m{9 - number}", "mount_point": point, "fs_type": "tmpfs", "directory": True}
        for number, point in enumerate(points)
    ]
    return manifest(container={"id": "x", "mounts": mounts})


def test_the_shim_is_told_each_mount_in_the_manifests_order(tmp_path: Path) -> None:
    """So that CRIU's key, the shim's number and the container's mount are one."""
    setup = "mkdir data/a data/b; mount -t tmpfs a data/a; mount -t tmpfs b data/b"
    image = image_with("/data/b", "/data/a")
    with box(tmp_path, setup) as pid, Process.open(pid) as process:
        target = targets.look(Container(ContainerRef("x"), process.key, "box", 1, 2), process)
        spec = targets.spec(image, target)
        ids = {place.mount_point: place.id for place in target.mounts.external}
    assert (spec["pid"], spec["start_ticks"], spec["depth"]) == (pid, process.key.start_ticks, 1)
    assert spec["root_id"] == target.mounts.root.id
    assert spec["mounts"] == [
        {"mount_point": point, "id": ids[point], "directory": True} for point in ("/data/b", "/data/a")
    ]
    assert targets.external(image, Path("/r")) == ("mnt[m9]:/r/mounts/0", "mnt[m8]:/r/mounts/1")


def test_files_and_memory_are_the_containers(tmp_path: Path) -> None:
    """The gate compares files as the container sees them; its pids are its own, its memory is limited."""
    names = ("/etc/there", "/etc/absent", "/etc/link", "/etc/out", "/a\0b")
    mapped = [{"path": name, "size": 6, "mtime_ns": 1, "dev": 1, "ino": 1} for name in names]
    image = manifest(mapped_files=mapped, process=PROCESS)
    setup = "mkdir etc; echo there >etc/there; ln -s there etc/link; ln -s /proc/1/root/etc/passwd etc/out"
    host = HostFacts("m", "k", frozenset(), "4.2", {100: "bash"}, {}, 1 << 30)
    with box(tmp_path, setup) as pid, Process.open(pid) as process:
        target = targets.look(Container(ContainerRef("x"), process.key, "box", 1, 2), process)
        limited = dataclasses.replace(target, memory_limit=99, memory_free=50)
        unlimited = dataclasses.replace(target, memory_limit=None, memory_free=None)
        seen = targets.seen_from(image, limited, host)
        stat = os.stat(f"/proc/{pid}/root/etc/there")
        assert targets.seen_from(image, unlimited, host).mem_available_bytes == 1 << 30
    there = FileFacts(stat.st_size, stat.st_mtime_ns)
    assert dict(seen.files) == {
        "/etc/there": there,
        "/etc/absent": None,
        "/etc/link": there,
        "/etc/out": None,
        "/a\0b": None,
    }
    assert (dict(seen.tasks), seen.mem_available_bytes) == ({}, 50)
