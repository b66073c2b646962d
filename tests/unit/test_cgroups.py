"""Cgroups of every version: captured texts, and real ones that the tests make."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from hibernode.errors import RefusedError, StorageError
from hibernode.host import cgroups, freezer
from hibernode.host.cgroups import Membership, Memory, Place, parse_cgroup, place_of
from hibernode.host.freezer import Freezer, usable_freezer
from hibernode.host.mounts import parse_mountinfo
from hibernode.workload import Verdict
from tests.unit.cgroup_kit import Cgroups, _cgroup_kit, box  # noqa: F401 - a fixture

V1 = """\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct
33 31 0:30 / /sys/fs/cgroup/cpuset rw,relatime - cgroup cgroup rw,cpuset
34 31 0:31 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,release_agent=/lib/x,name=systemd
"""
V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate,memory_recursiveprot\n"
HYBRID = V1 + "38 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw,nsdelegate\n"
ELSEWHERE = "30 23 0:26 / /host/cg two/v2 rw - cgroup2 none rw\n".replace("cg two", r"cg\040two")
SUBTREE = "30 23 0:26 /kubepods/pod1 /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
BOTH = SUBTREE + "31 23 0:26 / /host/cgroup rw - cgroup2 cgroup2 rw\n"
NAMESPACED = "30 23 0:26 /../../.. /host rw - cgroup2 cgroup2 rw\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("", [], id="nothing"),
        pytest.param("0::/\n", [Membership((), "/")], id="v2, the root"),
        pytest.param(
            "0::/system.slice/a:b:c.service\n",
            [Membership((), "/system.slice/a:b:c.service")],
            id="colons in a path",
        ),
        pytest.param(
            "0::/../../pod2/c (deleted)\n",
            [Membership((), "/../../pod2/c", deleted=True)],
            id="from a namespace, and removed",
        ),
        pytest.param(
            "5:cpu,cpuacct:/a (deleted)\n",
            [Membership(("cpu", "cpuacct"), "/a (deleted)")],
            id="v1 never marks what is removed, so this is a name",
        ),
        pytest.param(
            "12:net_cls,net_prio:/x\n1:name=systemd:/init.scope\n0::/init.scope\n",
            [
                Membership(("net_cls", "net_prio"), "/x"),
                Membership(("name=systemd",), "/init.scope"),
                Membership((), "/init.scope"),
            ],
            id="systemd's hybrid",
        ),
        pytest.param(
            "3:cpu,name=both:/a\udcff\n",
            [Membership(("cpu", "name=both"), "/a\udcff")],
            id="controllers with a name, and a path that is not UTF-8",
        ),
    ],
)
def test_the_lines_of_proc_pid_cgroup_are_parsed(text: str, expected: list[Membership]):
    """Every version of cgroups has the same three fields, and only the first two colons divide them."""
    assert list(parse_cgroup(os.fsencode(text))) == expected


@pytest.mark.parametrize("line", ["x", "0:/", "a:cpu:/", "1:cpu:relative", "1:cpu:", ":", "1:cpu:/\n\n2:x:/"])
def test_a_line_that_is_none_is_shown(line: str):
    """Whatever is not a line of that file is an error with its text."""
    with pytest.raises(ValueError, match=r"not a line of /proc/PID/cgroup"):
        parse_cgroup(line.encode())


@pytest.mark.parametrize(
    ("mountinfo", "membership", "directory", "top"),
    [
        pytest.param(V2, Membership((), "/a/b"), "/sys/fs/cgroup/a/b", "/sys/fs/cgroup", id="v2"),
        pytest.param(V2, Membership((), "/"), "/sys/fs/cgroup", "/sys/fs/cgroup", id="the root of v2"),
        pytest.param(
            V1,
            Membership(("cpu", "cpuacct"), "/a"),
            "/sys/fs/cgroup/cpu,cpuacct/a",
            "/sys/fs/cgroup/cpu,cpuacct",
            id="v1, two controllers together",
        ),
        pytest.param(
            V1,
            Membership(("name=systemd",), "/u.slice"),
            "/sys/fs/cgroup/systemd/u.slice",
            "/sys/fs/cgroup/systemd",
            id="v1, a named hierarchy among other options",
        ),
        pytest.param(
            HYBRID, Membership((), "/a"), "/sys/fs/cgroup/unified/a", "/sys/fs/cgroup/unified", id="hybrid"
        ),
        pytest.param(
            ELSEWHERE, Membership((), "/a"), "/host/cg two/v2/a", "/host/cg two/v2", id="an odd mount point"
        ),
        pytest.param(
            SUBTREE,
            Membership((), "/kubepods/pod1/c"),
            "/sys/fs/cgroup/c",
            "/sys/fs/cgroup",
            id="below a bind of a subtree",
        ),
        pytest.param(
            BOTH,
            Membership((), "/kubepods/pod1/c"),
            "/host/cgroup/kubepods/pod1/c",
            "/host/cgroup",
            id="of two mounts the one that shows the parents",
        ),
        pytest.param(
            NAMESPACED,
            Membership((), "/../../../a/b"),
            "/host/a/b",
            "/host",
            id="beside us, from a namespace",
        ),
        pytest.param(
            V2.replace(" / ", " /.. ", 1),
            Membership((), "/../x"),
            "/sys/fs/cgroup/x",
            "/sys/fs/cgroup",
            id="a sibling, from a namespace",
        ),
    ],
)
def test_a_cgroup_is_found_where_its_hierarchy_is_mounted(mountinfo, membership, directory, top):
    """The mount's type and options tell the hierarchy, and its root is taken off the path."""
    assert place_of(membership, parse_mountinfo(mountinfo)) == Place(Path(directory), Path(top))


@pytest.mark.parametrize(
    ("mountinfo", "membership"),
    [
        (V1, Membership((), "/a")),
        (V1, Membership(("memory",), "/a")),
        (V1, Membership(("name=system",), "/a")),
        (V2, Membership(("cpu",), "/")),
        ("", Membership((), "/")),
    ],
)
def test_a_hierarchy_that_is_not_mounted_has_no_place(mountinfo, membership):
    """That is no error: v1 controllers that nobody mounted are in /proc/PID/cgroup too."""
    assert place_of(membership, parse_mountinfo(mountinfo)) is None


@pytest.mark.parametrize(
    ("mountinfo", "path"),
    [
        pytest.param(SUBTREE, "/kubepods/pod10/c", id="a name that only begins alike"),
        pytest.param(SUBTREE, "/kubepods", id="a parent of the subtree"),
        pytest.param(V2, "/../b", id="above the mount's root"),
        pytest.param(NAMESPACED, "/../b", id="below names that only the parent namespace knows"),
        pytest.param(NAMESPACED, "/", id="our own, from a namespace, in the host's mount"),
    ],
)
def test_a_cgroup_outside_of_what_is_mounted_is_refused(mountinfo: str, path: str):
    """What cannot be reached from here is said, with both paths and what to do."""
    with pytest.raises(RefusedError, match="cannot be reached") as caught:
        place_of(Membership((), path), parse_mountinfo(mountinfo))
    assert caught.value.reason == "CgroupNotReachable"
    assert "hostPID" in caught.value.remedy


def test_parents_are_listed_up_to_where_the_mount_begins():
    """Limits of parents count as far as they can be seen, and not the directories that hold the mount."""
    assert Place(Path("/c/a/b"), Path("/c")).upwards() == [Path("/c/a/b"), Path("/c/a"), Path("/c")]
    assert Place(Path("/c"), Path("/c")).upwards() == [Path("/c")]


# real ones ----------------------------------------------------------------------------------------------


def test_our_own_directories_list_us():
    """Each directory's cgroup.procs holds this process, and the kernel's list has as many hierarchies."""
    found = cgroups.directories(os.getpid())
    assert found
    for directory in found.values():
        assert str(os.getpid()) in (directory / "cgroup.procs").read_text().split()
    listed = Path("/proc/self/cgroup").read_text().splitlines()
    assert set(found) <= {line.split(":", 2)[1] for line in listed}


def test_a_child_joins_all_cgroups_of_a_process(cgroup_kit: Cgroups):
    """Writing 0 to each file puts the child exactly where the process is."""
    with box(cgroup_kit.joins("a:b/c"), own=False) as pid:
        paths = cgroups.join_paths(pid)
        assert paths == [f"{directory}/cgroup.procs" for directory in cgroup_kit.make("a:b/c")]
        with box(paths, own=False) as child:
            assert cgroups.memberships(child) == cgroups.memberships(pid) != cgroups.memberships(os.getpid())
            assert all(each.path.endswith("/a:b/c") for each in cgroups.memberships(child))


def test_a_threaded_cgroup_cannot_be_joined(cgroup_kit: Cgroups):
    """A v2 cgroup that holds threads only, or none yet, is refused by its type."""
    with box(cgroup_kit.joins("domain"), own=False) as pid:
        unified = cgroups.directories(pid)[cgroups.UNIFIED]
        (unified / "threads").mkdir()
        (unified / "threads" / "cgroup.type").write_text("threaded")
        (unified / "threads" / "cgroup.threads").write_text(str(pid))
        assert cgroups.memberships(pid)[-1].path.endswith("/threads")
        with pytest.raises(RefusedError, match="'threaded'") as caught:
            cgroups.join_paths(pid)
        assert caught.value.reason == "CgroupThreaded"
        (unified / "cgroup.procs").write_text(str(pid))
        (unified / "invalid").mkdir()
        with pytest.raises(RefusedError, match="'domain invalid'"):
            cgroups._check_domain(unified / "invalid")


def test_a_process_that_has_ended_has_no_cgroups():
    """A zombie is in the root of v1 hierarchies by the kernel's words: a child must not be sent there."""
    with subprocess.Popen(["true"]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(ProcessLookupError):
            cgroups.memberships(child.pid)
        with pytest.raises(ProcessLookupError):
            cgroups.join_paths(child.pid)
    with pytest.raises(ProcessLookupError):
        cgroups.memberships(child.pid)


def write_limit(pid: int, v1: str, v2: str, value: str, levels_up: int = 0) -> None:
    """Write a limit of the cgroup of ``pid``, or of one above it."""
    for directory in cgroups.directories(pid).values():
        target = directory.parents[levels_up - 1] if levels_up else directory
        for name in (v1, v2):
            if (target / name).exists():
                (target / name).write_text(value)
                return
    pytest.fail(f"no controller with {v1} or {v2} here")


LIMIT = "memory.limit_in_bytes", "memory.max"


def test_the_least_memory_limit_of_all_parents_counts(cgroup_kit: Cgroups):
    """No limit is None, and a parent's smaller limit wins over one's own."""
    with box(cgroup_kit.joins("pod/worker"), own=False) as pid:
        assert cgroups.memory(pid) == Memory(None, None)
        write_limit(pid, *LIMIT, str(512 << 20))
        found = cgroups.memory(pid)
        assert found.limit == 512 << 20
        assert found.free is not None
        assert 256 << 20 < found.free < 512 << 20
        write_limit(pid, *LIMIT, str(256 << 20), levels_up=1)
        found = cgroups.memory(pid)
        assert found.limit == 256 << 20
        assert found.free is not None
        assert 0 < found.free < 256 << 20


def test_the_cache_of_files_is_free_memory(cgroup_kit: Cgroups):
    """A worker that has read more than its limit from files has its limit full of them, and may take more."""
    with (
        tempfile.TemporaryDirectory(dir="/var/tmp") as directory,
        box(cgroup_kit.joins("pod/worker"), own=False) as pid,
    ):
        write_limit(pid, *LIMIT, str(64 << 20))
        before = cgroups.memory(pid).free
        joins = " ".join(cgroup_kit.joins("pod/worker"))
        script = f"for file in {joins}; do echo $$ >$file; done; exec head -c 100000000 /dev/zero"
        with Path(directory, "weights").open("wb") as file:
            subprocess.run(["sh", "-c", script], stdout=file, check=True)
            os.fsync(file.fileno())
        after = cgroups.memory(pid).free
        assert before is not None
        assert after is not None
        assert before - after < 16 << 20


def test_from_a_cgroup_namespace_the_rest_is_reached_after_entering_the_hosts(cgroup_kit: Cgroups):
    """In a namespace of its own an agent sees ``/..``; once it has entered the host's the paths are whole."""
    code = """
import ctypes, os, sys
from hibernode.errors import RefusedError
from hibernode.host import cgroups
other, host = int(sys.argv[1]), int(sys.argv[2])
for path in sys.argv[3:]:
    open(path, "w").write("0")
assert ctypes.CDLL(None).unshare(0x02000000) == 0
assert all(each.path == "/" for each in cgroups.memberships(os.getpid()))
assert all(each.path == "/../there" for each in cgroups.memberships(other)), cgroups.memberships(other)
try:
    cgroups.directories(other)
except RefusedError as error:
    assert error.reason == "CgroupNotReachable", error
else:
    raise AssertionError("reached")
assert cgroups.enter_namespace(host)
assert not cgroups.enter_namespace(host)
print(*cgroups.directories(other).values(), sep="\\n")
"""
    with box(cgroup_kit.joins("there"), own=False) as pid:
        arguments = [str(pid), str(os.getpid()), *cgroup_kit.joins("here")]
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True, check=True
        )
    assert done.stdout.splitlines() == list(map(str, cgroup_kit.make("there")))


# freezer ------------------------------------------------------------------------------------------------


def until(condition, *, seconds: float = 20) -> None:
    """Wait for something that takes a moment."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came"
        threading.Event().wait(0.001)


def freezers(pid: int) -> list[Freezer]:
    """List both freezers of a process, as far as this machine has them."""
    found = cgroups.directories(pid)
    names = ((1, "freezer", "freezer.state"), (2, cgroups.UNIFIED, "cgroup.freeze"))
    return [
        Freezer(found[key], version)
        for version, key, file in names
        if key in found and (found[key] / file).exists()
    ]


def freeze(which: Freezer) -> None:
    """Freeze a cgroup."""
    name, word = ("freezer.state", "FROZEN") if which.version == 1 else ("cgroup.freeze", "1")
    (which.directory / name).write_text(word)


def test_a_frozen_cgroup_is_seen_and_thawed(cgroup_kit: Cgroups):
    """With v1 and with v2: frozen once the kernel has stopped all, and running after the thaw."""
    with box(cgroup_kit.joins("pod/worker"), own=False) as pid:
        both = freezers(pid)
        assert both
        assert freezer.freezer(pid) == both[0]
        for each in both:
            assert not each.is_frozen()
            freeze(each)
            until(each.is_frozen)
            each.thaw()
            until(lambda each=each: not each.is_frozen())
            each.thaw()
            assert each.pids() == {pid}


def test_a_cgroup_below_a_frozen_one_is_frozen(cgroup_kit: Cgroups):
    """A parent's freezer stops the children, and their own thaw does not help."""
    with box(cgroup_kit.joins("pod/worker"), own=False) as pid:
        for each in freezers(pid):
            parent = Freezer(each.directory.parent, each.version)
            freeze(parent)
            until(each.is_frozen)
            each.thaw()
            assert each.is_frozen()
            parent.thaw()
            until(lambda each=each: not each.is_frozen())


def test_the_freezer_of_exactly_the_tree_may_be_used(cgroup_kit: Cgroups):
    """Processes in cgroups below count, and a zombie of the tree does not."""
    with (
        box(cgroup_kit.joins("c"), own=False) as first,
        box(cgroup_kit.joins("c/sub"), own=False) as second,
        subprocess.Popen(["true"]) as zombie,
    ):
        os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
        found, finding = usable_freezer(first, [first, second, zombie.pid])
        assert found == freezers(first)[0]
        assert (finding.check, finding.verdict) == ("tree.freezer", Verdict.OK)
        assert str(found.directory) in finding.found


def test_a_freezer_that_holds_others_is_not_used(cgroup_kit: Cgroups):
    """Another process in it, or below it, would be stopped too: it is named."""
    with box(cgroup_kit.joins("c"), own=False) as pid, box(cgroup_kit.joins("c/d"), own=False) as other:
        found, finding = usable_freezer(pid, [pid])
        assert (found, finding.verdict, finding.reason) == (None, Verdict.SKIP, "SharedFreezer")
        assert f"pids {other}" in finding.found
        assert finding.remedy


def test_a_freezer_that_misses_one_of_the_tree_is_not_used(cgroup_kit: Cgroups):
    """CRIU would wait for a process that the freezer does not stop."""
    with box(cgroup_kit.joins("c"), own=False) as pid, box(cgroup_kit.joins("d"), own=False) as other:
        found, finding = usable_freezer(pid, [pid, other])
        assert (found, finding.reason) == (None, "PartialFreezer")
        assert f"pids {other}" in finding.found


def test_the_root_cgroup_has_no_freezer():
    """A process in the root of every hierarchy has none, and that is no failure."""
    tops = Cgroups().tops
    with box([str(top / "cgroup.procs") for top in tops], own=False) as pid:
        assert freezer.freezer(pid) is None
        found, finding = usable_freezer(pid, [pid])
        assert (found, finding.verdict, finding.reason) == (None, Verdict.SKIP, "NoFreezer")


def test_a_cgroup_with_too_many_below_it_is_not_used(cgroup_kit: Cgroups, monkeypatch: pytest.MonkeyPatch):
    """A container that makes cgroups without end cannot hold the agent."""
    monkeypatch.setattr(freezer, "MAX_BELOW", 3)
    with box(cgroup_kit.joins("c"), own=False) as pid:
        cgroup_kit.make("c/1/2")
        assert usable_freezer(pid, [pid])[0] is not None
        cgroup_kit.make("c/3")
        assert usable_freezer(pid, [pid])[1].reason == "FreezerUnreadable"


def test_a_thaw_that_fails_says_what_to_write(tmp_path: Path):
    """The processes stay stopped then, so the remedy is the very word and file."""
    with pytest.raises(StorageError, match="No such file") as caught:
        Freezer(tmp_path, 1).thaw()
    assert f"THAWED into {tmp_path}/freezer.state" in caught.value.remedy
    assert caught.value.reason == "CannotThaw"
