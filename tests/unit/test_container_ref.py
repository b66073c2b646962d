"""What the path of a cgroup tells of its container: the forms of kubelets, runtimes and their drivers."""

from __future__ import annotations

import pytest

from hibernode.discovery.container_ref import ContainerRef, container_ref, parse_path

A = "0f" * 32
B = "a1" * 32
UID = "2f7c1a0e-9b1d-4c3e-8a55-0123456789ab"
SLICE_UID = UID.replace("-", "_")
STATIC = "0123456789abcdef0123456789abcdef"


def known(id_: str, runtime: str, uid: str, qos: str, cgroup: str, *within: str) -> ContainerRef:
    """Build what a path with a container's id must tell."""
    return ContainerRef(id_, runtime, uid, qos, cgroup, within, known=True)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        pytest.param(
            f"/kubepods/burstable/pod{UID}/{A}",
            known(A, "", UID, "burstable", f"/kubepods/burstable/pod{UID}/{A}"),
            id="cgroupfs, burstable",
        ),
        pytest.param(
            f"/kubepods/besteffort/pod{UID}/{A}",
            known(A, "", UID, "besteffort", f"/kubepods/besteffort/pod{UID}/{A}"),
            id="cgroupfs, best effort",
        ),
        pytest.param(
            f"/kubepods/pod{UID}/{A}",
            known(A, "", UID, "guaranteed", f"/kubepods/pod{UID}/{A}"),
            id="cgroupfs, guaranteed",
        ),
        pytest.param(
            f"/kubepods/burstable/pod{STATIC}/{A}",
            known(A, "", STATIC, "burstable", f"/kubepods/burstable/pod{STATIC}/{A}"),
            id="a static pod, whose uid has no dashes",
        ),
        pytest.param(
            f"/kubepods/burstable/pod{UID}/crio-{A}",
            known(A, "cri-o", UID, "burstable", f"/kubepods/burstable/pod{UID}/crio-{A}"),
            id="CRI-O, cgroupfs",
        ),
        pytest.param(
            f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{SLICE_UID}.slice/cri-containerd-{A}.scope",
            known(
                A,
                "containerd",
                UID,
                "burstable",
                f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{SLICE_UID}.slice/cri-containerd-{A}.scope",
            ),
            id="containerd, systemd",
        ),
        pytest.param(
            f"/kubepods.slice/kubepods-pod{SLICE_UID}.slice/crio-{A}.scope",
            known(
                A, "cri-o", UID, "guaranteed", f"/kubepods.slice/kubepods-pod{SLICE_UID}.slice/crio-{A}.scope"
            ),
            id="CRI-O, systemd, guaranteed",
        ),
        pytest.param(
            f"/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{STATIC}.slice/docker-{A}.scope",
            known(
                A,
                "docker",
                STATIC,
                "besteffort",
                f"/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{STATIC}.slice/docker-{A}.scope",
            ),
            id="dockershim, systemd, a static pod",
        ),
        pytest.param(
            f"/kubepods.slice/kubepods-pod{SLICE_UID}.slice/crio-conmon-{A}.scope",
            ContainerRef(
                "",
                "",
                UID,
                "guaranteed",
                f"/kubepods.slice/kubepods-pod{SLICE_UID}.slice/crio-conmon-{A}.scope",
            ),
            id="CRI-O's monitor is no container",
        ),
        pytest.param(
            f"/system.slice/containerd.service/kubepods-burstable-pod{SLICE_UID}.slice:cri-containerd:{A}",
            known(
                A,
                "containerd",
                UID,
                "burstable",
                f"/system.slice/containerd.service/kubepods-burstable-pod{SLICE_UID}.slice:cri-containerd:{A}",
            ),
            id="systemd's form, given to the cgroupfs driver",
        ),
        pytest.param(
            f"/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{SLICE_UID}.slice/cri-containerd-{A}.scope",
            known(
                A,
                "containerd",
                UID,
                "guaranteed",
                f"/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{SLICE_UID}.slice/cri-containerd-{A}.scope",
            ),
            id="kind, from inside the node",
        ),
        pytest.param(
            f"/docker/{B}/kubelet/kubepods/burstable/pod{UID}/{A}",
            known(A, "", UID, "burstable", f"/docker/{B}/kubelet/kubepods/burstable/pod{UID}/{A}", B),
            id="kind, from the machine: the innermost counts",
        ),
        pytest.param(
            f"/system.slice/docker-{B}.scope/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{SLICE_UID}.slice"
            f"/cri-containerd-{A}.scope",
            known(
                A,
                "containerd",
                UID,
                "guaranteed",
                f"/system.slice/docker-{B}.scope/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{SLICE_UID}"
                f".slice/cri-containerd-{A}.scope",
                B,
            ),
            id="kind with systemd on both levels",
        ),
        pytest.param(
            f"/kubepods/pod{UID}/{B}/docker/{A}",
            known(A, "docker", "", "", f"/kubepods/pod{UID}/{B}/docker/{A}", B),
            id="Docker in a pod: its containers are not the pod's",
        ),
        pytest.param(f"/docker/{A}", known(A, "docker", "", "", f"/docker/{A}"), id="Docker, cgroupfs"),
        pytest.param(
            f"/system.slice/docker-{A}.scope",
            known(A, "docker", "", "", f"/system.slice/docker-{A}.scope"),
            id="Docker, systemd",
        ),
        pytest.param(
            f"/system.slice/docker-{A}.scope/init.scope",
            known(A, "docker", "", "", f"/system.slice/docker-{A}.scope"),
            id="systemd in the container",
        ),
        pytest.param(
            f"/docker/{A}/system.slice/nginx.service",
            known(A, "docker", "", "", f"/docker/{A}"),
            id="a service of the systemd in the container",
        ),
        pytest.param(
            f"/machine.slice/libpod-{A}.scope/container",
            known(A, "podman", "", "", f"/machine.slice/libpod-{A}.scope"),
            id="podman with crun",
        ),
        pytest.param(
            f"/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{A}.scope",
            known(
                A,
                "podman",
                "",
                "",
                f"/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{A}.scope",
            ),
            id="podman without root",
        ),
        pytest.param(
            f"/machine.slice/libpod-conmon-{A}.scope",
            ContainerRef("", "", "", "", f"/machine.slice/libpod-conmon-{A}.scope"),
            id="podman's monitor is no container",
        ),
        pytest.param(
            f"/libpod_parent/{B}/libpod-{A}",
            known(A, "podman", "", "", f"/libpod_parent/{B}/libpod-{A}"),
            id="a pod of podman's is no container around it",
        ),
        pytest.param(
            f"/k8s.io/{A}", known(A, "containerd", "", "", f"/k8s.io/{A}"), id="CRI without a parent"
        ),
        pytest.param(
            f"/system.slice/nerdctl-{A}.scope",
            known(A, "containerd", "", "", f"/system.slice/nerdctl-{A}.scope"),
            id="nerdctl",
        ),
        pytest.param(
            f"/ecs/5f1c/{A}", known(A, "", "", "", f"/ecs/5f1c/{A}"), id="an id below something unknown"
        ),
        pytest.param(
            f"/../../pod{UID}/{A}",
            known(A, "", UID, "", f"/../../pod{UID}/{A}"),
            id="from a cgroup namespace: the class is above",
        ),
        pytest.param(
            f"/../{A}", known(A, "", "", "", f"/../{A}"), id="a container of the same pod, likewise"
        ),
        pytest.param("/default/worker", ContainerRef("worker", cgroup="/default/worker"), id="ctr run"),
        pytest.param("/worker-1", ContainerRef("worker-1", cgroup="/worker-1"), id="runc"),
        pytest.param(
            "/system.slice/runc-worker-1.scope",
            ContainerRef("worker-1", cgroup="/system.slice/runc-worker-1.scope"),
            id="runc, systemd",
        ),
        pytest.param(
            "/user.slice/user-0.slice/crun-w.scope/container",
            ContainerRef("w", cgroup="/user.slice/user-0.slice/crun-w.scope/container"),
            id="crun, systemd",
        ),
        pytest.param(
            "/user.slice/user-0.slice/session-1.scope",
            ContainerRef("session-1", cgroup="/user.slice/user-0.slice/session-1.scope"),
            id="any scope",
        ),
        pytest.param(
            "/machine.slice:ctr:worker",
            ContainerRef("worker", cgroup="/machine.slice:ctr:worker"),
            id="a bare name in systemd's form",
        ),
        pytest.param("/", ContainerRef("", cgroup="/"), id="the root"),
        pytest.param("/..", ContainerRef("", cgroup="/.."), id="above us"),
        pytest.param(
            f"/kubepods/pod{UID}",
            ContainerRef("", "", UID, "guaranteed", f"/kubepods/pod{UID}"),
            id="a pod itself",
        ),
        pytest.param(
            f"/kubepods/burstable/{A[:63]}",
            ContainerRef(A[:63], cgroup=f"/kubepods/burstable/{A[:63]}"),
            id="one digit too few is a name",
        ),
        pytest.param(
            f"/docker/{A.upper()}",
            ContainerRef(A.upper(), cgroup=f"/docker/{A.upper()}"),
            id="upper case is a name",
        ),
        pytest.param(
            f"/kubepods/pod{UID}/{B}/kubepods/pod{STATIC}/{A}",
            known(A, "", STATIC, "guaranteed", f"/kubepods/pod{UID}/{B}/kubepods/pod{STATIC}/{A}", B),
            id="a process that poses as another container shows what it lives in",
        ),
    ],
)
def test_a_cgroup_path_tells_the_container(path: str, expected: ContainerRef):
    """Every form of kubelets, runtimes and their drivers."""
    assert parse_path(path) == expected


def test_of_several_hierarchies_the_runtimes_path_counts():
    """One hierarchy may say ``/`` or another's path, and a cgroup made inside counts less."""
    real, fake = f"/docker/{B}", f"/docker/{B}/docker/{A}"
    assert container_ref(["/", "/other/x", real]).id == B
    assert container_ref([fake, real, fake]).id == B
    assert container_ref(["/x", "/", "/y/w", "/y/w"]).id == "w"
    assert container_ref([]) == container_ref(["/", "/"]) == ContainerRef("")
