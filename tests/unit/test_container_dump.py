"""What a dump knows of its container, and the files that go along: tables, and a box."""

from __future__ import annotations

import dataclasses
import io
import os
import stat
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hibernode.artifact.manifest import ContainerFacts, DiffFacts
from hibernode.artifact.rootfs import DEFAULT_EXCLUDED
from hibernode.artifact.rootfs_find import Root
from hibernode.artifact.staging import Staging
from hibernode.artifact.store import Store
from hibernode.container import dump as dumps
from hibernode.container.dump import ROOTFS, SHM, ContainerDump
from hibernode.container.mountplan import MountPlan, Place
from hibernode.criu.options import DumpOptions
from hibernode.discovery.containers import Container, ContainerRef
from hibernode.errors import RefusedError, UsageError
from hibernode.host import linux
from hibernode.host.freezer import Freezer
from hibernode.host.mounts import Mount
from hibernode.host.procfs import Fd, Process, Stat, Status
from hibernode.host.sockets import TcpSocket
from hibernode.preflight import Facts, Preflight, preflight
from hibernode.preflight.facts import StoreFacts, Task
from hibernode.settings import CheckpointSettings, Settings
from hibernode.workload import ProcessKey
from tests.unit import rootfs_kit as kit
from tests.unit.artifact_kit import ID
from tests.unit.box_kit import KINDS, box

BASE = DumpOptions(
    leave="running",
    shell_job=False,
    tcp="close",
    file_locks=True,
    link_remap=True,
    ghost_limit_bytes=1 << 20,
    freeze_timeout_seconds=60.0,
    log_level=4,
)
CONTAINER = Container(ContainerRef("a" * 64, known=True), ProcessKey(100, 5), "worker", 1, 2)
PLAN = MountPlan(
    Mount(1, 0, (0, 1), "/", "/", "rw", "overlay", "overlay", "rw", ()),
    (Place("m0", 2, "/dev", "tmpfs", directory=True), Place("m1", 3, "/etc/hosts", "ext4", directory=False)),
    ("/run/nvidia/driver", "/proc/driver/nvidia"),
)


def made(upper: str | None = "/u", *, read_only: bool = False, **changes: Any) -> ContainerDump:
    """Put together what was seen of a container."""
    values: dict[str, Any] = {
        "container": CONTAINER,
        "plan": PLAN,
        "facts": ContainerFacts(id="a" * 64, net=77),
        "root": Root("overlay", upper, index=False, read_only=read_only, mount_points=()),
        "excluded": DEFAULT_EXCLUDED,
        "freezer": Freezer(Path("/sys/fs/cgroup/freezer/box"), 1),
    }
    return ContainerDump(**{**values, **changes})


# options ----------------------------------------------------------------------------------------------


def test_criu_is_told_of_mounts_network_and_freezer() -> None:
    """Each external mount by its place and key, the network by its inode; what was chosen before stays."""
    chosen = dumps.options(BASE, made())
    assert chosen.external == ("mnt[/dev]:m0", "mnt[/etc/hosts]:m1", "net[77]:extNetNs")
    assert chosen.skip_mounts == ("/run/nvidia/driver", "/proc/driver/nvidia")
    assert chosen.freeze_cgroup == "/sys/fs/cgroup/freezer/box"
    same = dataclasses.replace(chosen, external=(), skip_mounts=(), freeze_cgroup=None)
    assert same == BASE


def test_what_a_container_has_not_criu_is_not_told_of() -> None:
    """Without a network of its own, a freezer and mounts there is nothing to say."""
    bare = made(
        facts=ContainerFacts(id="x"), freezer=None, plan=dataclasses.replace(PLAN, external=(), skipped=())
    )
    assert dumps.options(BASE, bare) == BASE


# facts ------------------------------------------------------------------------------------------------


def test_the_manifest_gets_the_diffs() -> None:
    """What was known before the dump, and what was saved during it; of a process neither."""
    diff = DiffFacts(file=SHM, mount_point="/dev/shm", entries=3, bytes=10)
    found = dumps.facts(made(), (diff,))
    assert found == ContainerFacts(id="a" * 64, net=77, diffs=(diff,))
    assert dumps.facts(None, ()) is None


OURS, OTHERS = 80, 90


def tcp(address: str, state: str = "LISTEN", inode: int = OURS) -> TcpSocket:
    return TcpSocket("inet", state, (address, 8000), ("10.0.0.9", 40000), inode)


def checked(*sockets: TcpSocket, mode: Any = "established") -> Preflight:
    """Say what preflight would of a process that holds one socket."""
    task = Task(
        Stat(100, "worker", "S", 1, 100, 100, 0, 0, 1, 5, 0, 0),
        Status((0,) * 4, (0,) * 4, (), 0, False, 0, (100, 1), *[0] * 8),
        fds=(Fd(3, f"socket:[{OURS}]", os.O_RDWR, 9, stat.S_IFSOCK, 8, OURS, 0, 1, 0),),
    )
    facts = Facts(
        tasks=(task,),
        agent_pid=1,
        agent_namespaces={},
        mounts=(),
        store=StoreFacts("/s"),
        criu_version=None,
        mem_available_bytes=0,
        tcp=sockets,
    )
    return Preflight((), facts, mode, shell_job=False, estimate_bytes=0)


@pytest.mark.parametrize(
    ("address", "named"),
    [
        ("10.0.0.7", {"10.0.0.7"}),
        ("fd00::7", {"fd00::7"}),
        ("::ffff:10.0.0.7", {"10.0.0.7"}),
        ("0.0.0.0", set()),
        ("::", set()),
        ("::ffff:0.0.0.0", set()),
        ("127.0.0.1", set()),
        ("127.8.8.8", set()),
        ("::ffff:127.0.0.1", set()),
        ("::1", set()),
        ("::1234", {"::1234"}),
        ("1.2.7.127", {"1.2.7.127"}),
    ],
)
def test_addresses_of_the_containers_own_are_named(address: str, named: set[str]) -> None:
    """Loopback and wildcards are everywhere; an IPv4 address counts as one also when IPv6 shows it."""
    assert dumps._connected(checked(tcp(address, "ESTABLISHED"))) == named


@pytest.mark.parametrize(
    ("sockets", "mode", "connected"),
    [
        pytest.param((tcp("10.0.0.7", inode=OTHERS),), "established", set(), id="a socket of others"),
        pytest.param((tcp("10.0.0.7"),), "established", set(), id="it listens"),
        pytest.param((tcp("10.0.0.7", "CLOSE_WAIT"),), "established", {"10.0.0.7"}, id="kept"),
        pytest.param((tcp("10.0.0.7", "ESTABLISHED"),), "close", set(), id="not kept"),
        pytest.param((), "established", set(), id="none"),
    ],
)
def test_only_what_must_be_there_is_named(
    sockets: tuple[TcpSocket, ...], mode: str, connected: set[str]
) -> None:
    """Connections of the tree alone, and only when they are kept."""
    assert dumps._connected(checked(*sockets, mode=mode)) == connected


# what comes with the diff -----------------------------------------------------------------------------


@pytest.fixture
def upper(tmp_path: Path) -> Iterator[str]:
    """Give the upper directory of an overlay in which files were made, changed and removed."""
    with kit.overlays(tmp_path) as maker:
        kit.fill(maker.lower)
        overlay = maker.make()
        (overlay.merged / "etc/modified").write_text("changed")
        (overlay.merged / "etc/deleted").unlink()
        (overlay.merged / "var/log").mkdir()
        (overlay.merged / "var/log/worker.log").write_text("log")
        (overlay.merged / "var/cache/model").write_text("weights")
        (overlay.merged / "etc/out").symlink_to("/etc")
        (overlay.merged / "dev").mkdir()
        (overlay.merged / "dev/made").write_text("x")
        (overlay.merged / "etc/a\nb").write_text("x")
        yield str(overlay.upper)


@pytest.mark.parametrize(
    ("path", "excluded", "there"),
    [
        pytest.param("/etc/modified", (), True, id="a changed file"),
        pytest.param("/var/log/worker.log", (), True, id="a new file"),
        pytest.param("/var/cache/model", (), True, id="a file in a directory of the image"),
        pytest.param("/etc/a\nb", (), True, id="an odd name"),
        pytest.param("/etc/kept", (), False, id="a file of the image"),
        pytest.param("/nowhere/at/all", (), False, id="no file"),
        pytest.param("/", (), False, id="the root"),
        pytest.param("/etc/out/passwd", (), False, id="a way through a link"),
        pytest.param("/var/../../../etc/passwd", (), False, id="a way out"),
        pytest.param("/a\0b", (), False, id="a NUL"),
        pytest.param("/dev/made", DEFAULT_EXCLUDED, False, id="what is left out by itself"),
        pytest.param("/var/cache/model", ("/var/cache/**",), False, id="what the operator leaves out"),
        pytest.param("/var/cache/model", ("/var/cache",), False, id="a directory above is left out"),
        pytest.param("/var/cache/model", ("cache",), False, id="a name anywhere above is left out"),
        pytest.param("/var/cache/model", ("/var/cach", "odel", "/cache/**"), True, id="other patterns"),
        pytest.param("/dev/shm/x", DEFAULT_EXCLUDED, True, id="shared memory goes along by itself"),
        pytest.param("/dev/shm", DEFAULT_EXCLUDED, False, id="its directory is a mount"),
    ],
)
def test_a_file_that_comes_along_need_not_be_there(
    upper: str, path: str, excluded: tuple[str, ...], there: bool
) -> None:
    """What is in the diff is brought; what is not the next container must have itself."""
    with dumps.in_diff(made(upper, excluded=excluded)) as comes:
        assert comes(path) is there


def test_without_an_upper_directory_only_shared_memory_comes_along(tmp_path: Path) -> None:
    """A root that is no overlay, that is read-only, or whose directory is gone, has no diff."""
    for dump in (made(None), made(str(tmp_path), read_only=True), made(str(tmp_path / "gone"))):
        with dumps.in_diff(dump) as comes:
            assert not comes("/etc/modified")
            assert comes("/dev/shm/x")


# a box ------------------------------------------------------------------------------------------------

WITH_SHM = """
mkdir dev/shm data/scratch
mount -t tmpfs shm dev/shm; echo shared >dev/shm/segment; mkfifo dev/shm/pipe
mount -t tmpfs scratch data/scratch; echo lost >data/scratch/file
mknod dev/null c 1 3; ln -s null dev/link
"""


@pytest.fixture
def staging(tmp_path: Path) -> Iterator[Staging]:
    """Give the place where an artifact is made."""
    store = Store(tmp_path / "store").open()
    with store.stage(ID) as staging:
        yield staging
        store.discard(staging)
    store.close()


def looked_at(pid: int, process: Process, path: Path, **settings: Any) -> ContainerDump:
    """Look at a box as a dump does."""
    chosen = Settings(checkpoint=CheckpointSettings(**settings))
    container = dataclasses.replace(CONTAINER, init=process.key)
    return dumps.look(container, process, preflight(process, chosen, None, path), chosen)


def test_a_box_is_looked_at(tmp_path: Path) -> None:
    """Mounts, ids, devices and network as the kernel shows them."""
    (tmp_path / "root").mkdir()
    with box(tmp_path / "root", WITH_SHM) as pid, Process.open(pid) as process:
        dump = looked_at(pid, process, tmp_path, rootfs_exclude=("/var/cache/**",))
    assert [place.mount_point for place in dump.plan.external] == ["/dev/shm", "/data/scratch"]
    assert dump.upper is None
    assert dump.excluded == (*DEFAULT_EXCLUDED, "/var/cache/**")
    facts = dump.facts
    assert (facts.id, facts.net, facts.lower, facts.skipped_mounts) == ("a" * 64, 0, (), ())
    assert [(mount.key, mount.mount_point, mount.directory) for mount in facts.mounts] == [
        ("m0", "/dev/shm", True),
        ("m1", "/data/scratch", True),
    ]
    assert facts.uid_map == "0 0 4294967295"
    assert facts.devices == ("/dev/null",)


IPC = KINDS | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS


@pytest.mark.parametrize(
    ("kinds", "setup", "joined"),
    [
        pytest.param(IPC, "", ("uts", "ipc"), id="nothing in it"),
        pytest.param(IPC, "ipcmk -S 1", ("uts",), id="a semaphore in it"),
        pytest.param(KINDS, "", ("uts",), id="the node's"),
    ],
)
def test_criu_enters_what_it_shall_not_save(
    tmp_path: Path, kinds: int, setup: str, joined: tuple[str, ...]
) -> None:
    """The restored tree is in the new container's then; SysV objects need their own namespace."""
    (tmp_path / "root").mkdir()
    with box(tmp_path / "root", setup, kinds=kinds) as pid, Process.open(pid) as process:
        dump = looked_at(pid, process, tmp_path)
        assert dump.joined == joined
        with dumps.namespaces(dump, process) as fds:
            found = [os.fstat(fd).st_ino for fd in fds]
            assert found == [os.stat(f"/proc/{pid}/ns/{kind}").st_ino for kind in joined]
        assert not any(Path(f"/proc/self/fd/{fd}").exists() for fd in fds)
        with dumps.namespaces(None, process) as fds:
            assert fds == ()


def test_sysv_objects_that_come_in_the_dump_are_not_lost(tmp_path: Path, staging: Staging) -> None:
    """CRIU is in the namespace and saves none, so that the dump must fail."""
    (tmp_path / "root").mkdir()
    with box(tmp_path / "root", kinds=IPC) as pid, Process.open(pid) as process:
        dump = looked_at(pid, process, tmp_path)
        command = ["nsenter", f"--ipc=/proc/{pid}/ns/ipc", "ipcmk", "-Q"]
        subprocess.run(command, check=True, capture_output=True, timeout=30)
        with pytest.raises(RefusedError, match=f"pid {pid} has 1 message queue now") as caught:
            dumps.save_files(dump, process, staging)
    assert caught.value.reason == "SysVObjects"


def test_a_bad_pattern_is_said_before_anything_is_done(tmp_path: Path) -> None:
    """The operator's mistake: nothing was frozen for it."""
    (tmp_path / "root").mkdir()
    with box(tmp_path / "root") as pid, Process.open(pid) as process, pytest.raises(UsageError) as caught:
        looked_at(pid, process, tmp_path, rootfs_exclude=("/a//b",))
    assert caught.value.reason == "BadPattern"


def test_shared_memory_is_saved_and_other_memory_is_not(tmp_path: Path, staging: Staging) -> None:
    """/dev/shm goes along; a volume in memory does not, nor a root of which nobody knows what was changed."""
    (tmp_path / "root").mkdir()
    with box(tmp_path / "root", WITH_SHM) as pid, Process.open(pid) as process:
        diffs = dumps.save_files(looked_at(pid, process, tmp_path), process, staging)
    assert [(diff.file, diff.mount_point, diff.skipped) for diff in diffs] == [(SHM, "/dev/shm", 0)]
    data = (staging.artifact_path / SHM).read_bytes()
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        assert sorted(tar.getnames()) == [".", "./pipe", "./segment"]
    assert stat.S_IMODE((staging.artifact_path / SHM).stat().st_mode) == 0o600
    assert not (staging.artifact_path / ROOTFS).exists()


def test_a_box_without_shared_memory_has_no_files_to_save(tmp_path: Path, staging: Staging) -> None:
    """Nothing is made then."""
    (tmp_path / "root").mkdir()
    with box(tmp_path / "root") as pid, Process.open(pid) as process:
        assert dumps.save_files(looked_at(pid, process, tmp_path), process, staging) == ()
    assert list(staging.artifact_path.glob("*.tar")) == []


def test_shared_memory_that_became_a_link_is_refused(tmp_path: Path, staging: Staging) -> None:
    """Who may change the container may not point the agent elsewhere."""
    (tmp_path / "root").mkdir()
    with box(tmp_path / "root", WITH_SHM) as pid, Process.open(pid) as process:
        dump = looked_at(pid, process, tmp_path)
        root = Path(f"/proc/{pid}/root")
        (root / "dev").rename(root / "old")
        (root / "dev").symlink_to("old")
        with pytest.raises(OSError, match="symbolic link"):
            dumps.save_files(dump, process, staging)


def test_a_root_that_is_no_overlay_is_said() -> None:
    """Nothing tells what was changed in it; of an overlay, also a read-only one, there is nothing to say."""
    plain = Root("ext4", None, index=False, read_only=False, mount_points=())
    assert "no overlay but ext4" in dumps.not_carried(made(root=plain))
    assert dumps.not_carried(made()) == dumps.not_carried(made(read_only=True)) == ""
