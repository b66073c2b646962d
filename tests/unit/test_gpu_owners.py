"""From a process on a GPU to its pod, with real processes in real cgroups; what the kubelet has given."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hibernode.gpu.owners import Owners, boot_ticks
from hibernode.gpu.podresources import ANSWER, METHOD, PodResourcesError, allocations, parse
from hibernode.gpu.state import Allocation, Owner, OwnerKind
from hibernode.host.protobuf import Table, encode
from tests.unit.cgroup_kit import Cgroups, _cgroup_kit, box, container_id, pod_uid  # noqa: F401 - a fixture

pytestmark = pytest.mark.gpu
LATER = 1 << 40
"""A time at which every process of a test was there already."""


def look(logs: Path, pid: int, asked_at: int = LATER) -> Owner:
    """Look one process up."""
    return Owners(logs, same_pids=True).look([pid], asked_at)[pid]


# processes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "form",
    [
        "kubepods/burstable/pod{uid}/{id}",
        "kubepods.slice/kubepods-pod{slice_uid}.slice/cri-containerd-{id}.scope",
        "kubepods/pod{uid}/crio-{id}/made/by/the/worker",
    ],
)
def test_a_process_has_the_pod_of_its_cgroup(cgroup_kit: Cgroups, tmp_path: Path, form: str) -> None:
    """Its uid and container come from the cgroup, namespace and name from the kubelet's directory of logs."""
    id_, uid = container_id(), pod_uid()
    (tmp_path / f"team-a_worker-0_{uid}").mkdir()
    joins = cgroup_kit.joins(form.format(id=id_, uid=uid, slice_uid=uid.replace("-", "_")))
    with box(joins, comm="python3") as pid:
        owner = look(tmp_path, pid)
    assert owner == Owner(
        OwnerKind.POD,
        name="python3",
        pod_uid=uid,
        container_id=id_,
        namespace="team-a",
        pod="worker-0",
    )


def test_the_container_is_named_by_the_kubelets_file(cgroup_kit: Cgroups, tmp_path: Path) -> None:
    """The file that the kubelet binds into each container tells which of the pod's it is."""
    id_, uid = container_id(), pod_uid()
    source = tmp_path / "pods" / uid / "containers" / "main" / "0123abcd"
    source.parent.mkdir(parents=True)
    source.touch()
    target = tmp_path / "termination-log"
    target.touch()
    joins = cgroup_kit.joins(f"kubepods/pod{uid}/{id_}")
    with box(joins, binds=[[str(source), str(target)]]) as pid:
        owner = look(tmp_path, pid)
    assert (owner.kind, owner.container, owner.pod) == (OwnerKind.POD, "main", None)
    assert "no entry of this pod" in owner.reason


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["a_b_{uid}", "a_c_{uid}"], id="two pods of one uid"),
        pytest.param(["A\x1b[2J_b_{uid}"], id="no name of Kubernetes"),
        pytest.param(["a_b_c_{uid}"], id="one name too many"),
        pytest.param(["{uid}"], id="no name at all"),
        pytest.param([], id="nothing"),
    ],
)
def test_a_pod_without_a_sure_name_has_none(cgroup_kit: Cgroups, tmp_path: Path, names: list[str]) -> None:
    """Never a wrong pod: what is not one name is none, with the reason."""
    id_, uid = container_id(), pod_uid()
    for name in names:
        (tmp_path / name.format(uid=uid)).mkdir()
    with box(cgroup_kit.joins(f"kubepods/pod{uid}/{id_}")) as pid:
        owner = look(tmp_path, pid)
    assert (owner.pod_uid, owner.namespace, owner.pod) == (uid, None, None)
    assert owner.reason


def test_a_cgroup_inside_a_container_is_no_other_pod(cgroup_kit: Cgroups, tmp_path: Path) -> None:
    """A worker that makes itself a cgroup with another pod's form stays in its own."""
    id_, uid, victim, other = container_id(), pod_uid(), pod_uid(), container_id()
    for name, each in (("liar", uid), ("victim", victim)):
        (tmp_path / f"ns_{name}_{each}").mkdir()
    joins = cgroup_kit.joins(f"kubepods/pod{uid}/{id_}/kubepods/pod{victim}/{other}")
    with box(joins) as pid:
        owner = look(tmp_path, pid)
    assert (owner.pod_uid, owner.container_id, owner.pod) == (uid, id_, "liar")


def test_containers_without_a_pod_and_the_node_are_told_apart(cgroup_kit: Cgroups, tmp_path: Path) -> None:
    """Docker's container is one, a process of the node is the node's; neither is a pod's."""
    id_ = container_id()
    with box(cgroup_kit.joins(f"docker/{id_}")) as pid:
        owner = look(tmp_path, pid)
        assert (owner.kind, owner.container_id, owner.pod_uid) == (OwnerKind.CONTAINER, id_, "")
    with box(cgroup_kit.joins("system.slice/gdm.service"), own=False) as pid:
        assert look(tmp_path, pid).kind is OwnerKind.NODE


def test_a_pid_that_was_given_anew_is_unknown(tmp_path: Path) -> None:
    """A process that started after NVML was asked is not the one that NVML meant."""
    asked_at = boot_ticks()
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            new = look(tmp_path, process.pid, asked_at)
            assert (new.kind, new.reason) == (OwnerKind.UNKNOWN, "the pid has a new process; looked at again")
        finally:
            process.kill()
    assert look(tmp_path, process.pid).reason == "no process has this pid"


def test_pids_of_another_namespace_are_unknown(tmp_path: Path) -> None:
    """Without hostPID a pid of the driver's means nobody here."""
    owner = Owners(tmp_path, same_pids=False).look([os.getpid()], LATER)[os.getpid()]
    assert (owner.kind, "hostPID" in owner.reason) == (OwnerKind.UNKNOWN, True)


def test_an_owner_is_remembered_by_process(
    cgroup_kit: Cgroups, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two hundred processes are not read anew with each poll; one that has ended is forgotten."""
    owners = Owners(tmp_path, same_pids=True)
    with box(cgroup_kit.joins(f"docker/{container_id()}")) as pid:
        before = owners.look([pid], LATER)
        monkeypatch.setattr(Owners, "_look", lambda *_: pytest.fail("looked again"))
        assert owners.look([pid], LATER) == before
        assert len(owners._known) == 1
    assert owners.look([pid], LATER)[pid].kind is OwnerKind.UNKNOWN
    assert owners._known == {}


# the kubelet ------------------------------------------------------------------------------------------


@contextmanager
def kubelet(path: Path, answer: Callable[[grpc.ServicerContext], bytes]) -> Iterator[None]:
    """Serve PodResources on a real socket."""
    service, _, method = METHOD.strip("/").partition("/")
    server = grpc.server(ThreadPoolExecutor(2))
    handler: Any = grpc.unary_unary_rpc_method_handler(lambda _, context: answer(context))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    server.add_insecure_port(f"unix:{quote(str(path))}")
    server.start()
    try:
        yield
    finally:
        server.stop(None).wait()


def listed(**devices: list[str]) -> dict[str, Any]:
    """Describe a pod ``pod`` in ``ns`` whose container ``main`` has devices of ``nvidia.com/KEY``."""
    given = [{"resource": f"nvidia.com/{key}", "ids": ids} for key, ids in devices.items()]
    return {"name": "pod", "namespace": "ns", "containers": [{"name": "main", "devices": given}]}


def test_what_the_kubelet_has_given(tmp_path: Path) -> None:
    """GPUs, MIG devices and replicas of a shared GPU, by UUID; other vendors' devices are left out."""
    pods = [listed(gpu=["GPU-1::0", "GPU-1::1", "GPU-2"]), listed(**{"mig-1g.10gb": ["MIG-3"]})]
    pods[0]["containers"][0]["devices"].append({"resource": "example.com/nic", "ids": ["\x1b"]})
    path = tmp_path / "a b%20.sock"
    with kubelet(path, lambda _: encode(ANSWER, {"pods": pods})):
        found = allocations(path, 30)
    assert found == (
        Allocation("ns", "pod", "main", "nvidia.com/gpu", "GPU-1"),
        Allocation("ns", "pod", "main", "nvidia.com/gpu", "GPU-2"),
        Allocation("ns", "pod", "main", "nvidia.com/mig-1g.10gb", "MIG-3"),
    )


def test_fields_that_are_not_asked_for_are_passed_over() -> None:
    """The kubelet's message has CPUs, memory and topology besides; packed numbers among them."""
    wide: Table = {
        "pods": (
            1,
            [
                {
                    "name": (1, str),
                    "namespace": (2, str),
                    "containers": (
                        3,
                        [
                            {
                                "name": (1, str),
                                "devices": (
                                    2,
                                    [{"resource": (1, str), "ids": (2, [str]), "topology": (3, {})}],
                                ),
                                "cpu_ids": (3, str),
                                "memory": (4, [{"memory_type": (1, str)}]),
                            }
                        ],
                    ),
                }
            ],
        )
    }
    pod = listed(gpu=["GPU-1"])
    pod["containers"][0] |= {"cpu_ids": "\x01\x02", "memory": [{"memory_type": "m"}]}
    assert [each.device for each in parse(encode(wide, {"pods": [pod]}))] == ["GPU-1"]


def test_no_kubelet_is_nothing(tmp_path: Path) -> None:
    """No socket, and a file in its place, are a node without Kubernetes."""
    assert allocations(tmp_path / "none", 30) == ()
    (tmp_path / "file").touch()
    assert allocations(tmp_path / "file", 30) == ()


def refuse(context: grpc.ServicerContext) -> bytes:
    """Answer with an error."""
    context.abort(grpc.StatusCode.PERMISSION_DENIED, "no \x1b[2J")
    raise AssertionError


@pytest.mark.parametrize(
    ("answer", "word"),
    [
        pytest.param(refuse, "PERMISSION_DENIED", id="an error"),
        pytest.param(lambda _: b"\xff" * 9, "no such answer", id="no message"),
        pytest.param(
            lambda _: encode(ANSWER, {"pods": [{**listed(gpu=["GPU-1"]), "name": "\x1b[2J"}]}),
            "is no name",
            id="a name that is none",
        ),
        pytest.param(
            lambda _: encode(ANSWER, {"pods": [listed(gpu=["a\nb"])]}), "is no name", id="no device's name"
        ),
    ],
)
def test_a_kubelet_that_answers_badly_is_an_error(
    tmp_path: Path, answer: Callable[[grpc.ServicerContext], bytes], word: str
) -> None:
    """The sentence names the socket and is harmless."""
    path = tmp_path / "kubelet.sock"
    with kubelet(path, answer), pytest.raises(PodResourcesError, match=word) as raised:
        allocations(path, 30)
    assert raised.value.message.isprintable()
    assert raised.value.remedy


def test_a_kubelet_that_does_not_answer_is_an_error(tmp_path: Path) -> None:
    """Neither a dead socket nor a silent one holds anybody up."""
    path = tmp_path / "dead.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with pytest.raises(PodResourcesError, match=r"UNAVAILABLE|DEADLINE"):
        allocations(path, 30)
    over = threading.Event()
    silent = tmp_path / "silent.sock"
    with kubelet(silent, lambda _: str(over.wait(30)).encode()):
        try:
            with pytest.raises(PodResourcesError, match="DEADLINE_EXCEEDED"):
                allocations(silent, 0.3)
        finally:
            over.set()


@given(st.binary(max_size=200))
def test_no_bytes_crash_the_reader(data: bytes) -> None:
    """Whatever comes is allocations, or a ValueError."""
    with suppress(ValueError):
        assert isinstance(parse(data), tuple)


def test_a_pods_uid_of_a_static_pod(cgroup_kit: Cgroups, tmp_path: Path) -> None:
    """A static pod's uid is an MD5, in the cgroup and in the kubelet's directory."""
    uid = secrets.token_hex(16)
    (tmp_path / f"kube-system_x-node_{uid}").mkdir()
    with box(cgroup_kit.joins(f"kubepods/pod{uid}/{container_id()}")) as pid:
        assert look(tmp_path, pid).pod == "x-node"
