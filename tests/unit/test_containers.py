"""From a container's name to its init, with real pid namespaces in real cgroups."""

from __future__ import annotations

import os
import secrets
import select
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from hibernode.discovery import container_look
from hibernode.discovery.container_look import look
from hibernode.discovery.container_ref import ContainerRef
from hibernode.discovery.containers import container_of, containers, find, hold, name_in_pod
from hibernode.errors import HibernodeError, NotFoundError, RefusedError, UsageError
from hibernode.host import cgroups, procfs
from hibernode.host.procfs import Process
from tests.unit.cgroup_kit import Cgroups, _cgroup_kit, box, container_id, pod_uid  # noqa: F401 - a fixture
from tests.unit.hostile import open_descriptors

A = "0f" * 32
HASH = "DYN_CHECKPOINT_HASH"


# real ones ----------------------------------------------------------------------------------------------


def refused(query: str, reason: str, name: str = "") -> HibernodeError:
    """Ask for a container and be refused; no descriptor may be left over."""
    before = open_descriptors()
    with pytest.raises(HibernodeError) as caught:
        find(query, name=name)
    assert open_descriptors() == before
    assert caught.value.reason == reason, caught.value
    assert caught.value.remedy
    return caught.value


@pytest.mark.parametrize(
    "form",
    [
        "kubepods/burstable/pod{uid}/{id}",
        "kubepods/pod{uid}/crio-{id}",
        "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{slice_uid}.slice/cri-containerd-{id}.scope",
        "system.slice/docker-{id}.scope/init.scope",
        "docker/{id}",
        "machine.slice/libpod-{id}.scope/container",
    ],
)
def test_a_container_is_found_by_its_id_and_its_start(cgroup_kit: Cgroups, form: str):
    """By the full id, by eight digits of it, with a scheme, and by its pod, in each driver's cgroup."""
    id_, uid = container_id(), pod_uid()
    joins = cgroup_kit.joins(form.format(id=id_, uid=uid, slice_uid=uid.replace("-", "_")))
    with box(joins, comm="worker") as pid:
        queries = [id_, id_[:8], id_[:20], *([uid] if "uid}" in form else [])]
        for query in queries:
            found = find(query)
            assert (found.container.pid, found.sidecars) == (pid, ())
        assert found.container.comm == "worker"
        assert found.container.depth == len(procfs.read_status(pid).ns_pids)
        assert found.container in containers()
        scheme = {"": "containerd"}.get(found.container.ref.runtime, found.container.ref.runtime)
        assert find(f"{scheme}://{id_}").container.pid == pid
        assert container_of(pid) == found.container
        with hold(found.container) as process:
            assert process.key == found.container.init
    refused(id_, "ContainerNotFound")


def test_another_runtimes_scheme_finds_nothing(cgroup_kit: Cgroups):
    """An id that CRI-O gave is not containerd's."""
    id_ = container_id()
    with box(cgroup_kit.joins(f"crio-{id_}.scope")) as pid:
        assert find(f"crio://{id_}").container.pid == find(f"cri-o://{id_}").container.pid == pid
        refused(f"containerd://{id_}", "ContainerNotFound")


def test_a_bare_name_is_found(cgroup_kit: Cgroups):
    """What runc, crun or ctr was told is the last part of the path, and must be asked for in full."""
    name = f"worker-{secrets.token_hex(6)}"
    with box(cgroup_kit.joins(f"default/{name}")) as pid:
        assert find(name).container.pid == pid
        refused(name[:-1], "ContainerNotFound")
        with box(cgroup_kit.joins(f"elsewhere/runc-{name}.scope")) as other:
            error = refused(name, "AmbiguousContainer")
            assert {error.fields["pids"]} <= {f"{pid}, {other}", f"{other}, {pid}"}


def test_a_start_that_fits_two_is_refused_with_both(cgroup_kit: Cgroups):
    """Both ids and pids are listed, so that the next try can be right."""
    first = container_id()
    second = first[:12] + container_id()[12:]
    with box(cgroup_kit.joins(first)) as one, box(cgroup_kit.joins(second)) as two:
        error = refused(first[:12], "AmbiguousContainer")
        for text in (first, second, str(one), str(two)):
            assert text in error.message
        assert find(first).container.pid == one


def test_the_sandbox_of_a_pod_is_never_chosen(cgroup_kit: Cgroups):
    """Not by the pod's uid, and its own id says what it is."""
    uid, pause, worker = pod_uid(), container_id(), container_id()
    where = f"kubepods/pod{uid}"
    with box(cgroup_kit.joins(f"{where}/{pause}"), comm="pause") as sandbox:
        refused(uid, "ContainerNotFound")
        with box(cgroup_kit.joins(f"{where}/{worker}")) as pid:
            found = find(uid)
            assert (found.container.pid, found.sidecars) == (pid, ())
            assert str(sandbox) in refused(pause, "SandboxContainer").message


def test_the_worker_of_a_pod_is_told_from_its_sidecars_by_its_environment(cgroup_kit: Cgroups):
    """A process below the init may be the one that names the id; the others are listed as ignored."""
    uid, sidecar, worker = pod_uid(), container_id(), container_id()
    below = {"env": {HASH: "0" * 16}}
    with (
        box(cgroup_kit.joins(f"kubepods/pod{uid}/{sidecar}")) as other,
        box(cgroup_kit.joins(f"kubepods/pod{uid}/{worker}"), others=[below]) as pid,
    ):
        found = find(uid)
        assert found.container.pid == pid
        assert [each.pid for each in found.sidecars] == [other]
        assert [each.pid for each in find(sidecar).sidecars] == [pid]


@pytest.mark.parametrize("env", [{}, {HASH: "0" * 16}], ids=["none names an id", "both name one"])
def test_a_pod_whose_worker_cannot_be_told_is_refused(cgroup_kit: Cgroups, env: dict[str, str]):
    """All candidates are named."""
    uid, first, second = pod_uid(), container_id(), container_id()
    with (
        box(cgroup_kit.joins(f"kubepods/pod{uid}/{first}"), env=env) as one,
        box(cgroup_kit.joins(f"kubepods/pod{uid}/{second}"), env=env) as two,
    ):
        error = refused(uid, "AmbiguousContainer")
        for text in (first, second, str(one), str(two)):
            assert text in error.message


def test_a_container_is_chosen_by_its_name_in_the_pod(cgroup_kit: Cgroups, tmp_path: Path):
    """The kubelet binds a file of pods/UID/containers/NAME into each; another pod's does not count."""
    uid = pod_uid()

    def binds(name: str, of: str = uid) -> list[tuple[str, str]]:
        file = tmp_path / "kubelet" / "pods" / of / "containers" / name / "0a1b2c3d"
        file.parent.mkdir(parents=True)
        file.touch()
        return [(str(file), str(target))]

    target = tmp_path / "termination-log"
    target.touch()
    with ExitStack() as stack:
        pids = {
            name: stack.enter_context(
                box(cgroup_kit.joins(f"kubepods/pod{uid}/{container_id()}"), binds=binds(name, of))
            )
            for name, of in (("main", uid), ("proxy", uid), ("liar", pod_uid()))
        }
        found = find(uid, name="main")
        assert found.container.pid == pids["main"]
        assert name_in_pod(found.container) == "main"
        assert {each.pid for each in found.sidecars} == {pids["proxy"], pids["liar"]}
        assert find(uid, name="proxy").container.pid == pids["proxy"]
        error = refused(uid, "ContainerNotFound", name="liar")
        assert "main" in str(error)
        assert "proxy" in str(error)
        assert "main, pid" in refused(uid, "AmbiguousContainer").message
        refused(found.container.ref.id, "ContainerNotFound", name="proxy")


def test_a_restored_worker_is_nested_in_its_placeholder(cgroup_kit: Cgroups):
    """The outer init is the container's, and a process in the namespace inside leads to the inner one."""
    id_ = container_id()
    restored = {"comm": "restored", "inner": [{"comm": "deeper"}]}
    with box(cgroup_kit.joins(f"docker/{id_}"), comm="placeholder", inner=[restored]) as pid:
        found = find(id_).container
        assert (found.pid, found.comm) == (pid, "placeholder")
        assert [each.comm for each in found.nested] == ["restored", "deeper"]
        assert [each.depth - found.depth for each in found.nested] == [1, 2]
        inner = found.nested[0]
        assert inner.ref == found.ref
        assert container_of(inner.pid) == inner
        assert container_of(pid) == found
        assert sum(each.ref.id == id_ for each in containers()) == 1
        assert set(look().members_of(found)) == {pid, *(each.pid for each in found.nested)}


def test_a_worker_that_poses_as_another_container_never_stands_in_for_it(cgroup_kit: Cgroups):
    """In a cgroup that it made below its own a process can bear another's id: the real one wins."""
    victim, hostile, uid = container_id(), container_id(), pod_uid()
    inner = {
        "joins": cgroup_kit.joins(f"docker/{hostile}/kubepods/pod{uid}/{victim}"),
        "env": {HASH: "0" * 16},
    }
    with box(cgroup_kit.joins(f"docker/{hostile}"), inner=[inner]) as liar:
        for query in (victim, victim[:8], uid):
            assert hostile in refused(query, "NestedContainer").message
            assert find(query, nested=True).container.ref.within == (hostile,)
        assert find(hostile).container.pid == liar
        with box(cgroup_kit.joins(f"kubepods/pod{uid}/{victim}")) as pid:
            assert find(victim).container.pid == find(victim[:8]).container.pid == pid
            assert find(uid).container.pid == pid


def test_containers_that_share_a_pods_pid_namespace_are_refused(cgroup_kit: Cgroups):
    """Their init is the sandbox, so they have none of their own: the remedy is in the pod's spec."""
    uid, pause, worker = pod_uid(), container_id(), container_id()
    other = {"joins": cgroup_kit.joins(f"kubepods/pod{uid}/{worker}"), "comm": "worker"}
    with box(cgroup_kit.joins(f"kubepods/pod{uid}/{pause}"), comm="pause", others=[other]) as sandbox:
        for query in (worker, worker[:10], uid):
            error = refused(query, "SharedPidNamespace")
            assert "shareProcessNamespace: false" in error.remedy
        shared = int(str(error.fields["pids"]))
        assert shared != sandbox
        with pytest.raises(RefusedError) as caught:
            container_of(shared)
        assert caught.value.reason == "SharedPidNamespace"
        refused(pause, "SandboxContainer")


def test_a_container_in_the_nodes_pid_namespace_is_refused(cgroup_kit: Cgroups):
    """With hostPID there is no init either."""
    id_ = container_id()
    with box(cgroup_kit.joins(f"docker/{id_}"), own=False) as pid:
        error = refused(id_, "SharedPidNamespace")
        assert error.fields["pids"] == str(pid)
        with pytest.raises(RefusedError, match="no pid namespace of its own"):
            container_of(pid)


def test_a_process_of_the_node_is_in_no_container(cgroup_kit: Cgroups):
    """That is so for us, and for whatever runs in a cgroup that is no container's."""
    assert container_of(os.getpid()) is None
    with box(cgroup_kit.joins("system.slice/some.service"), own=False) as pid:
        assert container_of(pid) is None


def test_what_is_there_is_named_when_nothing_fits(cgroup_kit: Cgroups):
    """The sentence says what was asked for, and the remedy lists containers with pid and name."""
    id_ = container_id()
    with box(cgroup_kit.joins(f"docker/{id_}"), comm="a\033[2Jb"):
        mine = [each for each in containers() if each.ref.id == id_]
        assert mine[0].comm == "a\033[2Jb"
        with pytest.raises(NotFoundError) as caught:
            find("no-such-worker")
        assert "'no-such-worker'" in caught.value.message
        assert str(caught.value).replace("\n", "").isprintable()


@pytest.mark.parametrize(
    "query",
    [
        "",
        " ",
        "a b",
        "a/b",
        "/",
        ".",
        "..",
        "a..b",
        "a\n",
        "ä",
        "\0",
        "a" * 254,
        "evil://" + A,
        "docker://",
        "docker://a/b",
    ],
)
def test_a_query_that_can_be_no_name_is_a_usage_error(query: str):
    """Nothing but printable ASCII without a slash gets any further."""
    with pytest.raises(UsageError) as caught:
        find(query)
    assert caught.value.reason == "InvalidContainer"
    assert str(caught.value).replace("\n", "").isascii()


@pytest.mark.parametrize("name", ["A", "a_b", "-a", "a-", "a/b", "a" * 64, "a\n"])
def test_a_name_that_is_no_dns_label_is_a_usage_error(name: str):
    """Kubernetes allows no other names of containers."""
    with pytest.raises(UsageError):
        find(A, name=name)


# races --------------------------------------------------------------------------------------------------


def test_a_container_that_ends_cannot_be_held(cgroup_kit: Cgroups):
    """Its pid may be another process's by then."""
    id_ = container_id()
    with box(cgroup_kit.joins(id_)):
        found = find(id_).container
    before = open_descriptors()
    with pytest.raises(NotFoundError, match="has ended") as caught:
        hold(found)
    assert caught.value.reason == "ContainerNotFound"
    with pytest.raises(ProcessLookupError):
        container_of(found.pid)
    assert open_descriptors() == before


def test_a_pid_that_is_reused_is_not_held(cgroup_kit: Cgroups):
    """The start time tells the new process from the old one."""
    with box(cgroup_kit.joins(container_id())) as pid:
        found = next(each for each in containers() if each.pid == pid)
        reused = replace(found, init=type(found.init)(pid, found.init.start_ticks - 1))
        with pytest.raises(NotFoundError, match="has ended"):
            hold(reused)


@pytest.mark.parametrize("when", ["before its cgroup is read", "after that"])
def test_an_init_that_ends_during_the_look_is_left_out(
    cgroup_kit: Cgroups, monkeypatch: pytest.MonkeyPatch, when: str
):
    """It was seen in its namespace and is gone a moment later: no error, and no entry that may be wrong."""
    id_, other = container_id(), container_id()
    real = container_look.ref_of
    with box(cgroup_kit.joins(other)) as stays, box(cgroup_kit.joins(id_)) as ends:

        def killed(pid: int) -> ContainerRef:
            ref = real(pid)
            if pid != ends:
                return ref
            with Process.open(pid) as process:
                process.send_signal(signal.SIGKILL)
                assert select.select([process], [], [], 20)[0]
            return real(pid) if when.startswith("before") else ref

        monkeypatch.setattr(container_look, "ref_of", killed)
        before = open_descriptors()
        seen = {each.pid for each in containers()}
        assert stays in seen
        assert ends not in seen
        assert open_descriptors() == before


def test_containers_that_come_and_go_disturb_no_look(cgroup_kit: Cgroups):
    """While namespaces are made and end without pause, one that stays is found each time."""
    id_ = container_id()
    code = "while :; do unshare --pid --fork true; done"
    with (
        box(cgroup_kit.joins(id_)) as pid,
        subprocess.Popen(["sh", "-c", code], start_new_session=True) as churn,
    ):
        try:
            for _ in range(100):
                assert find(id_).container.pid == pid
                assert container_of(pid) is not None
        finally:
            os.killpg(churn.pid, 9)


def test_one_look_at_a_thousand_processes_takes_less_than_50_ms(cgroup_kit: Cgroups):
    """The best of five, with a container among them and 1,000 more processes than there were."""
    code = """
import os, sys
for _ in range(1000):
    if os.fork() == 0:
        sys.stdin.read()
        os._exit(0)
print("x", flush=True)
sys.stdin.read()
"""
    id_ = container_id()
    with (
        box(cgroup_kit.joins(id_)),
        subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as crowd,
    ):
        assert crowd.stdout is not None
        assert crowd.stdout.read(1) == b"x"
        times = []
        for _ in range(5):
            start = time.perf_counter()
            seen = containers()
            times.append(time.perf_counter() - start)
        crowd.communicate()
    assert any(each.ref.id == id_ for each in seen)
    print(f"one look: {min(times) * 1e3:.1f} ms")
    assert min(times) < 0.05


def test_the_paths_of_a_real_process_are_told(cgroup_kit: Cgroups):
    """The directory of the container's cgroup is where the process is listed."""
    id_ = container_id()
    with box(cgroup_kit.joins(f"docker/{id_}/sub")) as pid:
        found = find(id_).container
        assert found.ref.cgroup == f"/{cgroup_kit.name}/docker/{id_}"
        for directory in cgroups.directories(pid).values():
            assert str(directory).endswith(f"{found.ref.cgroup}/sub")
