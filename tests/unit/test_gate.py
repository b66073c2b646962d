"""The gate of a container: every row, both values, and what is said when they differ."""

# ruff: noqa: E501 - a case of the table is read across

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest

from hibernode.artifact.manifest import ContainerFacts, ExternalMount
from hibernode.compat import strictly
from hibernode.container.gate import CRIU_BYTES, TASK_BYTES, container_findings, keeps_connections
from hibernode.container.mountplan import MountPlan, Place
from hibernode.container.target import Target, lower_layers
from hibernode.discovery.containers import Container, ContainerRef
from hibernode.host.mounts import Mount
from hibernode.host.procfs import Process
from hibernode.preflight import refuse
from hibernode.preflight.rows import SHOWN
from hibernode.workload import Finding, ProcessKey, Verdict
from tests.unit.artifact_kit import FILES, PROCESS, manifest

MIB = 1 << 20
NEED = 1500 + CRIU_BYTES
MAP = "0 0 4294967295"
USUAL = 0xA80425FB
"""The capabilities that docker and containerd give, and of all there are these:"""
ALL, SETGID, SETUID, PTRACE = 0x1FFFFFFFFFF, 1 << 6, 1 << 7, 1 << 19
PAGES = {**FILES, "images/pages-1.img": b"p" * 1000, "images/pages-2.img": b"p" * 500}


def root(fs_type: str = "overlay", options: str = "rw,lowerdir=/l/A:/l/B,upperdir=/u,workdir=/w") -> Mount:
    return Mount(90, 80, (0, 40), "/", "/", "rw", fs_type, fs_type, options, ())


def places(*points: str, files: tuple[str, ...] = ()) -> tuple[Place, ...]:
    return tuple(Place(f"m{n}", 91 + n, point, "tmpfs", point not in files) for n, point in enumerate(points))


def entries(*points: str, files: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    return [
        ExternalMount(
            key=place.key, mount_point=place.mount_point, fs_type="tmpfs", directory=place.directory
        ).model_dump()
        for place in places(*points, files=files)
    ]


FACTS: dict[str, Any] = {
    "id": "a" * 64,
    "net": 4026532000,
    "uid_map": MAP,
    "gid_map": MAP,
    "memory_limit": 256 * MIB,
    "mounts": entries("/dev", "/dev/shm", "/etc/hosts", files=("/etc/hosts",)),
    "lower": ["/l/A", "/l/B"],
    "listening": ["10.0.0.7"],
    "connected": ["10.0.0.7"],
    "devices": ["/dev/null", "/dev/nvidia0"],
}
TARGET = Target(
    container=Container(ContainerRef("b" * 64, known=True), ProcessKey(4242, 7), "hibernode-ph", 1, 2),
    process=Process.open(os.getpid()),
    mounts=MountPlan(root(), places("/dev", "/dev/shm", "/etc/hosts", files=("/etc/hosts",)), ()),
    depth=1,
    comm="hibernode-ph",
    ours=True,
    others=(),
    memory_limit=256 * MIB,
    memory_free=200 * MIB,
    uid_map=MAP,
    gid_map=MAP,
    devices=frozenset({"/dev/null", "/dev/nvidia0", "/dev/more"}),
    own_net=True,
    addresses=frozenset({"127.0.0.1", "10.0.0.7"}),
    uids=frozenset({1000}),
    gids=frozenset({1000, 2000}),
    cap_prm=0,
    cap_bnd=USUAL,
    capabilities=USUAL,
    no_new_privs=True,
    seccomp_mode=2,
)
WORKER: dict[str, Any] = {
    "uids": [1000] * 4,
    "gids": [1000] * 4,
    "groups": [1000, 2000],
    "no_new_privs": True,
}
WORKER |= {"cap_eff": USUAL, "seccomp_mode": 2}
RIGHTS: dict[str, Any] = {"uids": [1000], "gids": [1000, 2000], "capabilities": USUAL}
RIGHTS |= {"no_new_privs": True, "seccomp": True}
ROWS = [
    "restore.container",
    "restore.placeholder",
    "restore.mounts",
    "restore.more_mounts",
    "restore.rootfs",
    "restore.memory_limit",
    "restore.ids",
    "restore.privileges",
    "restore.ptrace",
    "restore.network",
    "restore.listening",
    "restore.connections",
    "restore.devices",
]


def mounted(*points: str, files: tuple[str, ...] = (), at_root: Mount | None = None) -> dict[str, Any]:
    """Give a target other mounts."""
    return {"mounts": MountPlan(at_root or root(), places(*points, files=files), ())}


def findings(
    facts: dict[str, Any] | None = None, target: dict[str, Any] | None = None, *, strict: bool = False
) -> dict[str, Finding]:
    """Run the gate on a good pair with changes."""
    facts = dict(facts or {})
    process = {**PROCESS, **WORKER, **facts.pop("worker", {})}
    rights = facts.pop("rights", {})
    rights = None if rights is None else {**RIGHTS, **rights}
    image = manifest(PAGES, process=process, rights=rights, container={**FACTS, **facts})
    found = container_findings(image, dataclasses.replace(TARGET, **(target or {})))
    found = strictly(found) if strict else found
    rows = {row.check: row for row in found}
    assert len(rows) == len(found)
    return rows


@pytest.mark.parametrize("strict", [False, True], ids=["as a rule", "with strict"])
def test_a_container_like_the_source_can_take_the_worker(strict: bool) -> None:
    """Every row is ok, shows both values, and has neither remedy nor reason."""
    rows = findings(strict=strict)
    assert list(rows) == ROWS
    for row in rows.values():
        assert row.verdict is Verdict.OK
        assert row.expected
        assert row.found
        assert (row.remedy, row.reason) == ("", "")


# (id, facts, target, check, verdict, words of what was expected, words of what was found)
CASES: list[tuple[str, dict[str, Any], dict[str, Any], str, str, str, str]] = [
    ("both are named", {}, {}, "container", "ok", "a" * 64, "b" * 64),
    ("our placeholder waits", {}, {}, "placeholder", "ok", "only waits", "(hibernode-ph)"),
    *(
        (f"{comm} waits", {}, {"ours": False, "comm": comm}, "placeholder", "ok", "sleep", f"({comm})")
        for comm in ("sleep", "pause", "tail", "catatonit")
    ),
    *(
        (f"{comm} does more", {}, {"ours": False, "comm": comm}, "placeholder", "fail", "waits", f"({comm})")
        for comm in ("python3", "sh", "hibernode-ph", "Sleep", "")
    ),
    ("somebody else is in it", {}, {"others": (77, 78)}, "placeholder", "fail", "only waits", "77, 78"),
    (
        "a placeholder that has a worker already",
        {},
        {"ours": True, "others": (77,)},
        "placeholder",
        "fail",
        "only waits",
        "hibernode-ph) with the processes 77",
    ),
    ("mounts in another order", {}, mounted("/etc/hosts", "/dev/shm", "/dev", files=("/etc/hosts",)), "mounts",
     "ok", "3 mounts: /dev, /dev/shm, /etc/hosts", "all there"),
    ("a mount is missing", {}, mounted("/dev", "/etc/hosts", files=("/etc/hosts",)), "mounts", "fail", "/dev/shm",
     "no mount at /dev/shm"),
    ("a directory in place of a file", {}, mounted("/dev", "/dev/shm", "/etc/hosts"), "mounts", "fail",
     "/etc/hosts", "/etc/hosts is a directory"),
    ("a file in place of a directory", {},
     mounted("/dev", "/dev/shm", "/etc/hosts", files=("/etc/hosts", "/dev")), "mounts", "fail", "/dev",
     "/dev is a file"),
    ("no mounts at all", {"mounts": []}, {}, "mounts", "ok", "0 mounts", "all there"),
    ("no volume more", {}, {}, "more_mounts", "ok", "did not have", "none"),
    ("a volume that the worker did not have", {},
     mounted("/dev", "/dev/shm", "/etc/hosts", "/models", files=("/etc/hosts",)), "more_mounts", "warn",
     "did not have", "/models"),
    ("a volume over one of the worker's", {"mounts": entries("/models/a")}, mounted("/models", "/models/a"),
     "more_mounts", "fail", "did not have", "/models lies over /models/a"),
    ("the same image", {}, {}, "rootfs", "ok", "2 layers, the topmost /l/A", "the same"),
    ("another image", {"lower": ["/l/Z", "/l/B"]}, {}, "rootfs", "skip", "the topmost /l/Z", "the topmost /l/A"),
    ("a source that was no overlay", {"lower": []}, {}, "rootfs", "skip", "no overlay", "2 layers"),
    ("a target that is no overlay", {}, mounted(at_root=root("ext4", "rw")), "rootfs", "skip", "2 layers",
     "no overlay"),
    ("two roots that are no overlays", {"lower": []}, mounted(at_root=root("xfs", "rw")), "rootfs", "skip",
     "no overlay", "no overlay"),
    ("no limit", {}, {"memory_limit": None, "memory_free": None}, "memory_limit", "ok", f"{NEED} bytes", "no limit"),
    ("no limit before either", {"memory_limit": 0}, {"memory_limit": None, "memory_free": None}, "memory_limit",
     "ok", f"{NEED} bytes", "no limit"),
    ("a higher limit", {}, {"memory_limit": 512 * MIB}, "memory_limit", "ok", str(256 * MIB), str(512 * MIB)),
    ("just enough is free", {}, {"memory_free": NEED}, "memory_limit", "ok", "limit", f"{NEED} of them free"),
    ("too little is free", {}, {"memory_free": NEED - 1}, "memory_limit", "fail", f"{NEED} bytes", f"{NEED - 1} of them free"),
    ("a lower limit", {}, {"memory_limit": 255 * MIB}, "memory_limit", "warn", str(256 * MIB), str(255 * MIB)),
    ("a limit where there was none", {"memory_limit": 0}, {}, "memory_limit", "warn", "no limit", str(256 * MIB)),
    ("the same ids", {}, {}, "ids", "ok", f"uids {MAP}; gids {MAP}", f"uids {MAP}; gids {MAP}"),
    ("other user ids", {}, {"uid_map": "0 100000 65536"}, "ids", "fail", MAP, "0 100000 65536"),
    ("other group ids", {}, {"gid_map": "0 100000 65536"}, "ids", "fail", MAP, "gids 0 100000 65536"),
    ("the rights of the container", {}, {}, "privileges", "ok", "capabilities 0xa80425fb", "no more"),
    ("fewer rights than the container", {"rights": {"capabilities": 0x400, "uids": [], "gids": [2000]}},
     {"no_new_privs": False, "seccomp_mode": 0}, "privileges", "ok", "no_new_privs False, seccomp mode 0", "no more"),
    ("all rights in a container that gives all", {"rights": {"capabilities": ALL, "no_new_privs": False, "seccomp": False, "uids": [0]}},
     {"cap_bnd": ALL, "uids": frozenset({0}), "no_new_privs": False, "seccomp_mode": 0}, "privileges", "ok",
     "0x1ffffffffff", "no more"),
    ("a capability more", {"rights": {"capabilities": USUAL | 1 << 21}}, {}, "privileges", "fail", "0xa80425fb",
     "capabilities 0x200000"),
    ("a capability more that the init has, but no program that it starts", {"rights": {"capabilities": USUAL | 1 << 21}},
     {"cap_prm": 1 << 21}, "privileges", "fail", "0xa80425fb", "capabilities 0x200000"),
    ("new privileges by exec", {"rights": {"no_new_privs": False}}, {}, "privileges", "fail", "no_new_privs True",
     "new privileges by exec"),
    ("no filter", {"rights": {"seccomp": False}}, {}, "privileges", "fail", "seccomp mode 2", "no seccomp filter"),
    ("all of it", {"rights": {"capabilities": ALL, "no_new_privs": False, "seccomp": False, "uids": [0], "gids": [0]}}, {},
     "privileges", "fail", "seccomp mode 2",
     "capabilities 0x1ff57fbda04, user 0, group 0, new privileges by exec, no seccomp filter"),
    ("a task of root", {"rights": {"uids": [0, 1000]}}, {"cap_prm": USUAL & ~SETUID}, "privileges", "fail", "no more than",
     "the worker has user 0"),
    ("a task of another user, where root may change its own", {"rights": {"uids": [0, 33]}},
     {"uids": frozenset({0}), "cap_prm": SETUID}, "privileges", "ok", "no more than", "no more"),
    ("a task of another group", {"rights": {"gids": [1000, 5]}}, {"cap_prm": USUAL & ~SETGID}, "privileges", "fail",
     "no more than", "the worker has group 5"),
    ("a task of another group, where root may change its own", {"rights": {"gids": [5]}}, {"cap_prm": SETGID},
     "privileges", "ok", "no more than", "no more"),
    ("an older checkpoint", {"rights": None}, {}, "privileges", "skip", "0xa80425fb", "were not noted"),
    *(
        (f"an older checkpoint: {name}", {"rights": None, "worker": worker}, {}, "privileges", "fail", "no more than", words)
        for name, worker, words in (
            ("a capability more", {"cap_eff": ALL}, "capabilities 0x1ff57fbda04"),
            ("root", {"uids": [1000, 1000, 0, 1000]}, "user 0"),
            ("a group of it", {"groups": [0]}, "group 0"),
            ("the group itself", {"gids": [5] * 4}, "group 5"),
            ("no filter", {"seccomp_mode": 0, "no_new_privs": False}, "new privileges by exec, no seccomp filter"),
        )
    ),
    ("nobody in it can look into CRIU", {}, {}, "ptrace", "ok", "CAP_SYS_PTRACE", "none"),
    ("somebody in it can look into CRIU", {}, {"capabilities": PTRACE}, "ptrace", "fail", "CAP_SYS_PTRACE", "one has it"),
    ("the node's network", {}, {"own_net": False}, "network", "fail", "of its own", "the node's"),
    ("a network of its own", {"net": 0}, {}, "network", "fail", "the node's", "of its own"),
    ("the node's network both times", {"net": 0}, {"own_net": False}, "network", "ok", "the node's", "the node's"),
    ("it listens at an address of the old pod", {}, {"addresses": frozenset({"10.0.0.9"})}, "listening", "fail",
     "10.0.0.7", "missing: 10.0.0.7"),
    ("it listens everywhere", {"listening": []}, {"addresses": frozenset()}, "listening", "ok",
     "no address", "all there"),
    ("it was connected from an address of the old pod", {}, {"addresses": frozenset({"10.0.0.9"})},
     "connections", "warn", "10.0.0.7", "addresses here: 10.0.0.9"),
    ("no connection was kept", {"connected": []}, {"addresses": frozenset()}, "connections", "ok", "no address",
     "all there"),
    ("more devices than before", {}, {}, "devices", "ok", "2 device nodes", "all there"),
    ("a GPU is missing", {}, {"devices": frozenset({"/dev/null"})}, "devices", "warn", "2 device nodes",
     "missing: /dev/nvidia0"),
    ("another device is missing", {}, {"devices": frozenset({"/dev/nvidia0"})}, "devices", "fail", "2 device",
     "missing: /dev/null"),
    ("a GPU and another one are missing", {}, {"devices": frozenset()}, "devices", "fail", "2 device",
     "/dev/null, /dev/nvidia0"),
]  # fmt: skip
TABLE = pytest.mark.parametrize(
    ("facts", "target", "check", "verdict", "words"),
    [pytest.param(*case[1:5], case[5:], id=case[0]) for case in CASES],
)


@TABLE
def test_a_row_says_what_it_compared(
    facts: dict[str, Any], target: dict[str, Any], check: str, verdict: str, words: tuple[str, str]
) -> None:
    """Each row has its verdict, both values, and a remedy unless it is ok; only failures have a reason."""
    row = findings(facts, target)[f"restore.{check}"]
    assert row.verdict == verdict
    assert words[0] in row.expected
    assert words[1] in row.found
    assert bool(row.remedy) == (verdict != "ok")
    assert row.reason == ("RestoreIncompatible" if verdict == "fail" else "")


@TABLE
def test_strict_leaves_nothing_open(
    facts: dict[str, Any], target: dict[str, Any], check: str, verdict: str, words: tuple[str, str]
) -> None:
    """With strict what was skipped or warned of refuses; the values stay."""
    row = findings(facts, target, strict=True)[f"restore.{check}"]
    assert row.verdict == ("ok" if verdict == "ok" else "fail")
    assert bool(row.reason) == (verdict != "ok")
    assert words[0] in row.expected
    assert words[1] in row.found


def test_every_row_is_in_the_table() -> None:
    """Each check is seen both ways, but for the kind, which has tests of its own."""
    seen = {check: {case[4] for case in CASES if case[3] == check} for check in (row[8:] for row in ROWS)}
    assert all(len(verdicts) > 1 for check, verdicts in seen.items() if check != "container"), seen


def test_each_process_of_the_tree_needs_some_memory_more() -> None:
    """The pages of all files, CRIU itself, and its copy of each process but the first."""
    one = manifest().tree[0].model_dump()
    image = manifest(PAGES, tree=[one, {**one, "pid": 102}, {**one, "pid": 103}], container=FACTS)
    target = dataclasses.replace(TARGET, memory_free=0)
    (row,) = [row for row in container_findings(image, target) if row.check == "restore.memory_limit"]
    assert row.expected.startswith(f"{NEED + 2 * TASK_BYTES} bytes")


def test_a_worker_of_the_node_stays_on_the_node() -> None:
    """Without a container on either side there is nothing to compare; one is said."""
    assert container_findings(manifest(), None) == []
    (row,) = container_findings(manifest(), TARGET)
    assert (row.check, row.verdict, row.reason) == ("restore.container", Verdict.FAIL, "RestoreIncompatible")
    assert "node" in row.expected
    assert "b" * 64 in row.found
    assert "without --into" in row.remedy


def test_a_container_is_not_restored_on_the_node() -> None:
    """The remedy is the command that says into which container."""
    (row,) = container_findings(manifest(container=FACTS), None)
    assert (row.check, row.verdict, row.reason) == ("restore.container", Verdict.FAIL, "RestoreIncompatible")
    assert "container" in row.expected
    assert "the node itself" in row.found
    assert "--into" in row.remedy


def test_a_refusal_names_each_failing_row() -> None:
    """What the gate has found becomes one error for people: exit code 4, every remedy."""
    rows = findings({}, {"own_net": False, "others": (77,), "memory_free": 0})
    with pytest.raises(
        Exception, match=r"restore\.placeholder.*restore\.memory_limit.*restore\.network"
    ) as caught:
        refuse(rows.values())
    error: Any = caught.value
    assert (error.exit_code, error.reason) == (4, "RestoreIncompatible")
    assert "hostNetwork" in error.remedy


MANY = [f"/x{n:02}" for n in range(SHOWN + 3)]


@pytest.mark.parametrize(
    ("facts", "target", "check"),
    [
        pytest.param({"mounts": entries(*MANY)}, mounted(), "mounts", id="missing mounts"),
        pytest.param({}, mounted("/dev", "/dev/shm", "/etc/hosts", *MANY), "more_mounts", id="more mounts"),
        pytest.param({"listening": MANY}, {}, "listening", id="addresses"),
        pytest.param({"devices": MANY}, {}, "devices", id="devices"),
        pytest.param({}, {"others": tuple(range(100, 111))}, "placeholder", id="processes"),
    ],
)
def test_a_long_list_is_cut(facts: dict[str, Any], target: dict[str, Any], check: str) -> None:
    """A row names the first few and counts the rest."""
    assert "and 3 more" in findings(facts, target)[f"restore.{check}"].found


def test_connections_are_kept_when_all_their_addresses_are_there() -> None:
    """One that is missing closes all, for CRIU can only keep or close."""
    facts = ContainerFacts(id="x", connected=("10.0.0.7", "fd00::1"))
    assert not keeps_connections(facts, TARGET)
    both = dataclasses.replace(TARGET, addresses=frozenset({"10.0.0.7", "fd00::1", "127.0.0.1"}))
    assert keeps_connections(facts, both)
    assert keeps_connections(ContainerFacts(id="x"), TARGET)


@pytest.mark.parametrize(
    ("mount", "layers"),
    [
        pytest.param(root(), ("/l/A", "/l/B"), id="two layers"),
        pytest.param(root(options="rw,lowerdir=/l/A"), ("/l/A",), id="one layer"),
        pytest.param(root(options=r"rw,lowerdir=/l/a\040b:/l/B"), ("/l/a b", "/l/B"), id="a blank"),
        pytest.param(root("ext4", "rw,lowerdir=/l/A"), (), id="another file system"),
        pytest.param(root(options="rw,upperdir=/u"), (), id="an overlay that does not say"),
        pytest.param(root(options="rw,lowerdir"), (), id="one that says nothing"),
    ],
)
def test_lower_layers_are_read_from_mountinfo(mount: Mount, layers: tuple[str, ...]) -> None:
    """What is not said is no layer: two roots that say nothing are not the same."""
    assert lower_layers(mount) == layers
