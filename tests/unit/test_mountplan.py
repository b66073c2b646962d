"""Which mounts of a container CRIU is told of: captured mountinfo in, a plan out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hibernode.container import mountplan
from hibernode.container.mountplan import MountPlan, external, is_skipped, plan, root_of
from hibernode.errors import RefusedError
from hibernode.host import linux
from hibernode.host.mounts import Mount, parse_mountinfo
from tests.unit import mountinfo_samples as samples
from tests.unit import rootfs_kit as kit
from tests.unit.box_kit import box


def planned(text: str, files: frozenset[str] = frozenset()) -> MountPlan:
    """Plan for a mountinfo; all mount points are directories but ``files``."""
    seen = parse_mountinfo(text)
    return plan(seen, {mount.id: mount.mount_point not in files for mount in seen})


def mount(number: int, point: str, fs_type: str = "tmpfs", dev: tuple[int, int] = (0, 9)) -> Mount:
    return Mount(number, 1, dev, "/", point, "rw", fs_type, "none", "rw", ())


ROOT = mount(1, "/", "overlay", (0, 1))
DEV = ("/dev", "/dev/pts", "/dev/shm", "/dev/mqueue", "/sys")
MASKED = ("/proc/acpi", "/proc/keys", "/proc/timer_list", "/sys/firmware")
KUBELET = ("/etc/hosts", "/dev/termination-log", "/etc/hostname", "/etc/resolv.conf")
GSP = "/usr/lib/firmware/nvidia/535.104.05"

# (id, mountinfo, id of the root, external mount points, skipped ones)
CAPTURED: list[tuple[str, str, int, set[str], set[str]]] = [
    (
        "runc, cgroup v1",
        samples.RUNC_V1,
        92,
        {*DEV, *MASKED, "/sys/fs/cgroup", *(f"/sys/fs/cgroup/{n}" for n in ("cpu", "memory", "systemd"))},
        set(),
    ),
    (
        "crun, cgroup v1",
        samples.CRUN_V1,
        115,
        {*DEV, *MASKED, "/sys/fs/cgroup", *(f"/sys/fs/cgroup/{n}" for n in ("memory", "systemd"))},
        set(),
    ),
    ("ctr, no cgroups inside", samples.CTR, 92, {*DEV, *MASKED, "/run"}, set()),
    (
        "a CRI pod, cgroup v1",
        samples.CRI_V1,
        118,
        {*DEV, *MASKED, *KUBELET, "/sys/fs/cgroup", *(f"/sys/fs/cgroup/{n}" for n in ("cpu", "systemd"))},
        set(),
    ),
    (
        "a pod with volumes, cgroup v2",
        samples.POD_V2,
        2310,
        {
            *(*DEV, *KUBELET, "/sys/fs/cgroup", "/sys/firmware", "/proc/kcore", "/scratch", "/cache"),
            *("/etc/settings", "/etc/worker.yaml", "/signals", "/run/secrets/kubernetes.io/serviceaccount"),
        },
        set(),
    ),
    (
        "FC-36 NVIDIA's container toolkit",
        samples.NVIDIA,
        3121,
        {
            *(f"{GSP}/gsp_ga10x.bin", f"{GSP}/gsp_tu10x.bin", "/usr/bin/nvidia-smi", "/dev", "/dev/nvidia0"),
            *("/run/nvidia-persistenced/socket", "/usr/lib/x86_64-linux-gnu/libcuda.so.535.104.05"),
            *("/proc/acpi", "/proc/kcore", "/run/nvidia/drivers"),
        },
        {
            *("/proc/driver/nvidia", "/proc/driver/nvidia/gpus/0000:3b:00.0"),
            *("/run/nvidia/driver", "/run/nvidia/driver/dev", "/run/nvidia/driver/proc"),
        },
    ),
    ("a root on a root, the node's /proc as a volume", samples.OLD_ROOTS, 21, {"/host/proc", "/host"}, set()),
]


@pytest.mark.parametrize(
    ("text", "root", "outside", "skipped"), [pytest.param(*case[1:], id=case[0]) for case in CAPTURED]
)
def test_each_mount_has_one_fate(text: str, root: int, outside: set[str], skipped: set[str]) -> None:
    """Root and the container's own /proc are CRIU's, the driver's are skipped, all others external."""
    found = planned(text)
    assert found.root.id == root
    assert {place.mount_point for place in found.external} == outside
    assert set(found.skipped) == skipped
    rest = {entry.mount_point for entry in parse_mountinfo(text)} - outside - skipped
    assert all(point in {"/", "/proc"} or point.startswith("/proc/") for point in rest)


@pytest.mark.parametrize("text", [pytest.param(case[1], id=case[0]) for case in CAPTURED])
def test_external_mounts_keep_the_kernels_order_and_id(text: str) -> None:
    """Parents come before what lies on them, keys are unique, ids are those that mountinfo gave."""
    found = planned(text).external
    listed = [entry for entry in parse_mountinfo(text) if entry in external(parse_mountinfo(text))]
    assert [(place.id, place.fs_type) for place in found] == [(entry.id, entry.fs_type) for entry in listed]
    assert [place.key for place in found] == [f"m{number}" for number in range(len(found))]


def test_files_and_directories_are_told_apart() -> None:
    """What is bound on a file is a file in the plan."""
    found = planned(samples.POD_V2, frozenset({"/etc/hosts", "/etc/worker.yaml"}))
    kinds = {place.mount_point: place.directory for place in found.external}
    assert (kinds["/etc/hosts"], kinds["/etc/worker.yaml"], kinds["/scratch"]) == (False, False, True)


@pytest.mark.parametrize(
    ("point", "skipped"),
    [
        ("/run/nvidia/driver", True),
        ("/run/nvidia/driver/usr", True),
        ("/run/nvidia/drivers", False),
        ("/run/nvidia", False),
        ("/proc/driver/nvidia", True),
        ("/proc/driver/nvidia/gpus/0000:3b:00.0", True),
        ("/proc/driver/nvidia-caps", False),
        ("/proc/driver", False),
        ("/host/run/nvidia/driver", False),
    ],
)
def test_only_the_drivers_own_directories_are_skipped(point: str, skipped: bool) -> None:
    """The two directories and what is below them, not what has a like name."""
    assert is_skipped(point) is skipped


@pytest.mark.parametrize(
    ("points", "words"),
    [
        pytest.param(["/data]x"], ("/data]x", "']'"), id="a bracket that ends CRIU's syntax"),
        pytest.param(["/data", "/data"], ("/data", "twice"), id="one over the other"),
        pytest.param(["/a\nb"], (r"/a\nb", "name"), id="a line end"),
        pytest.param(["/a\x1b[2J"], (r"/a\x1b[2J", "name"), id="an escape of a terminal"),
        pytest.param(["/a\udcff"], (r"/a\udcff", "name"), id="bytes that are no text"),
        pytest.param(["/a\n]"], (r"/a\n]",), id="a line end and a bracket"),
        pytest.param(["/a\n", "/a\n"], (r"/a\n",), id="a line end, twice"),
    ],
)
def test_a_mount_that_cannot_be_named_is_refused(points: list[str], words: tuple[str, ...]) -> None:
    """The refusal names the mount in one line that a terminal can show, with a reason and a remedy."""
    seen = [ROOT, *(mount(number, point) for number, point in enumerate(points, 2))]
    with pytest.raises(RefusedError) as caught:
        plan(seen, dict.fromkeys(range(9), True))
    assert caught.value.reason == "MountUnusable"
    assert caught.value.remedy
    assert caught.value.message.isprintable()
    assert all(word in caught.value.message for word in words), caught.value.message


@pytest.mark.parametrize("point", ["/a[b", "/a:b", "/a b", "/ä/日本", "/a\\b", "/-x", "/m0"])
def test_odd_names_that_criu_can_take_are_taken(point: str) -> None:
    """Brackets that open, colons, blanks and other scripts are names like any other."""
    (place,) = plan([ROOT, mount(2, point)], {2: True}).external
    assert place.mount_point == point


def test_an_odd_name_below_a_skipped_directory_does_no_harm() -> None:
    """What CRIU is not told of need not be nameable, but for CRIU's own option."""
    assert plan([ROOT, mount(2, "/run/nvidia/driver/a]b")], {}).external == ()


def test_a_skipped_mount_is_named_once() -> None:
    """The driver's directory may be mounted over itself."""
    seen = [ROOT, mount(2, "/run/nvidia/driver"), mount(3, "/run/nvidia/driver")]
    assert plan(seen, {}).skipped == ("/run/nvidia/driver",)


def test_a_container_without_a_root_mount_is_refused() -> None:
    """Nothing tells where its files are."""
    with pytest.raises(RefusedError, match="the mount at / is not there"):
        root_of([mount(2, "/data")])


def test_another_proc_is_not_the_containers_own() -> None:
    """A bind of the node's /proc is a volume, wherever it is; one of the container's own /proc is CRIU's."""
    seen = [
        ROOT,
        mount(2, "/proc", "proc", (0, 5)),
        mount(3, "/proc/sys", "proc", (0, 5)),
        mount(4, "/own", "proc", (0, 5)),
        mount(5, "/proc/host", "proc", (0, 6)),
    ]
    assert [entry.mount_point for entry in external(seen)] == ["/proc/host"]


# a real one -------------------------------------------------------------------------------------------

SETUP = """
mkdir data/dir; touch data/file other
mount -t tmpfs tmpfs data/dir; mkdir data/dir/in
mount --bind other data/file
ln -s data/dir link
"""


def test_a_container_is_looked_at(tmp_path: Path) -> None:
    """Directories and files are told by the kernel, and each place has the id that its mount has."""
    with box(tmp_path, SETUP) as pid:
        found = mountplan.look(pid)
        assert [(place.mount_point, place.directory) for place in found.external] == [
            ("/data/dir", True),
            ("/data/file", False),
        ]
        for place in found.external:
            with kit.descriptor(f"/proc/{pid}/root{place.mount_point}", os.O_PATH) as fd:
                assert linux.mount_id(fd) == place.id


@pytest.mark.parametrize(
    ("more", "words"),
    [
        pytest.param("mount -t tmpfs over data/dir", "covered by another one", id="covered, same place"),
        pytest.param(
            "mkdir data/dir/in/x; mount -t tmpfs x data/dir/in/x; mount -t tmpfs over data/dir/in",
            "cannot be looked at",
            id="covered from above",
        ),
        pytest.param(
            "mkdir $'data/a\\nb'; mount -t tmpfs x $'data/a\\nb'; mount -t tmpfs y $'data/a\\nb'",
            r"a\\nb",
            id="a line end",
        ),
    ],
)
def test_a_mount_that_is_not_what_mountinfo_says_is_refused(tmp_path: Path, more: str, words: str) -> None:
    """What lies over it is another mount, and CRIU would take that one."""
    with box(tmp_path, SETUP + more) as pid, pytest.raises(RefusedError, match=words) as caught:
        mountplan.look(pid)
    assert caught.value.reason == "MountUnusable"
    assert caught.value.message.isprintable()


def test_the_agents_descriptors_are_closed(tmp_path: Path) -> None:
    """A look leaves nothing open, whether it ends well or not."""
    before = set(os.listdir("/proc/self/fd"))
    with box(tmp_path, SETUP) as pid:
        mountplan.look(pid)
    with box(tmp_path, SETUP + "mount -t tmpfs over data/dir") as pid, pytest.raises(RefusedError):
        mountplan.look(pid)
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_process_that_has_ended_is_said(tmp_path: Path) -> None:
    """As everywhere: the caller knows what it means."""
    with box(tmp_path) as pid:
        pass
    with pytest.raises((ProcessLookupError, FileNotFoundError)):
        mountplan.look(pid)


def test_a_directory_is_opened_without_links(tmp_path: Path) -> None:
    """No link on the way is followed, whether it leads out or not."""
    with (
        box(tmp_path, SETUP + "ln -s /etc out") as pid,
        kit.descriptor(f"/proc/{pid}/root", os.O_PATH) as root,
    ):
        os.close(mountplan.open_directory(root, "/data/dir"))
        os.close(mountplan.open_directory(root, "data/dir/../dir"))
        for path in ("/link", "/link/in", "/out", "/proc/self/root"):
            with pytest.raises(OSError, match="symbolic link"):
                mountplan.open_directory(root, path)
        with pytest.raises(NotADirectoryError):
            mountplan.open_directory(root, "/data/file")
