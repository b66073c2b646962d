"""A one-node cluster: the API server of :mod:`tests.cluster.kube`, with controllers, scheduler and kubelet.

The pods are real containers of the containerd that :mod:`tests.real.boxes` starts. The addresses are the
cluster's own, on a bridge of its own, and the API server listens at the one that its service has, so that
pods reach it without a proxy. All that is made bears the kit's token, below the kit's directory or in a name,
and goes with the kit; what kubelet and network plugin change for the whole machine is put back by ``close``.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from pyroute2.iproute.linux import IPRoute

from tests.cluster.kube import Kube
from tests.cluster.program import PROGRAMS, Program
from tests.real.boxes import Kit
from tests.real.boxes_clear import CGROUPS
from tests.real.boxes_ctr import KUBERNETES
from tests.real.node import free_port

POD_LOGS, CONTAINER_LOGS = Path("/var/log/pods"), Path("/var/log/containers")
"""The kubelet has no setting for them. Folders NAMESPACE_NAME_UID, and links into them."""
FIXED = (
    POD_LOGS,
    CONTAINER_LOGS,
    Path("/var/lib/kubelet"),
    Path("/usr/libexec/kubernetes"),
)
"""Where a kubelet writes whatever it is told."""
KUBELET_PORT = 10250
SYSCTLS = (
    "vm.overcommit_memory",
    "vm.panic_on_oom",
    "kernel.panic",
    "kernel.panic_on_oops",
    "kernel.keys.root_maxkeys",
    "kernel.keys.root_maxbytes",
    "net.ipv4.ip_forward",
)
"""What a kubelet or the bridge plugin may set for the whole machine and never puts back."""


def machine(token: str) -> dict[str, object]:
    """Note what the node of a kit could leave behind and the kit does not look for."""
    return {
        "sysctls": read_sysctls(),
        "network": sorted(map(str, Path("/var/lib/cni").rglob(f"*{token}*"))),
        "files": {str(path) for folder in FIXED for path in (folder, *folder.rglob("*")) if path.exists()},
    }


def read_sysctls() -> dict[str, str]:
    """Read what :data:`SYSCTLS` are set to."""
    return {name: _sysctl(name).read_text().strip() for name in SYSCTLS}


def _sysctl(name: str) -> Path:
    return Path("/proc/sys") / name.replace(".", "/")


def hierarchies() -> list[Path]:
    """List where cgroups are mounted: once on version 2, once a controller on version 1."""
    if (CGROUPS / "cgroup.controllers").exists():
        return [CGROUPS]
    return sorted(
        path for path in CGROUPS.iterdir() if (path / "cgroup.procs").exists() and not path.is_symlink()
    )


@contextlib.contextmanager
def one_node() -> Iterator[Cluster]:
    """Run a cluster on a kit of its own; afterwards the machine is as it was, else that is a failure.

    One runs at a time on a machine, whichever checkout starts it: settings and logs bear no owner's name.
    """
    with (PROGRAMS / "kubelet").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        kit = Kit()
        before = machine(kit.token)
        try:
            cluster = Cluster(kit)
            try:
                yield cluster
            finally:
                cluster.close()
        finally:
            kit.close()
        assert kit.leftovers() == []
        after = machine(kit.token)
        assert {key: (before[key], after[key]) for key in before if before[key] != after[key]} == {}


class Cluster:
    """The cluster of a kit; it is Ready when the constructor returns."""

    def __init__(self, kit: Kit) -> None:
        self.kit = kit
        self.node = f"node-{kit.token}"
        # 16 addresses of the range for benchmarks (RFC 2544), which no machine's own network has. The kit's
        # containerd takes 16 others for its pods.
        number = (int(kit.token, 16) + 4096) % 8192
        start = ipaddress.IPv4Address("198.18.0.0") + number * 16
        self.address, self._service = str(start + 1), str(start + 9)
        self._sysctls = read_sysctls()
        self._log_folders = [path for path in (POD_LOGS, CONTAINER_LOGS) if not path.exists()]
        began = time.monotonic()
        self._programs: list[Program] = []
        self.kube: Kube | None = None
        try:
            self._make_bridge()
            (kit.base / "kube").mkdir()
            self.kube = Kube(
                kit.base / "kube",
                address=self._service,
                port=443,
                services=f"{start + 8}/29",
                service_accounts=True,
            )
            self.kube.start_controllers()
            self._start_scheduler(self.kube)
            self._start_kubelet(self.kube)
        except BaseException:
            self.close()
            raise
        self.start_seconds = time.monotonic() - began

    def programs(self) -> list[Program]:
        """List all that runs, but containerd."""
        return [*(self.kube.programs() if self.kube else []), *self._programs]

    def _make_bridge(self) -> None:
        """Make the interface that holds the addresses of node and API server."""
        with IPRoute() as route:  # type: ignore[no-untyped-call]
            route.link("add", ifname=f"nd{self.kit.token}", kind="bridge")
            (index,) = route.link_lookup(ifname=f"nd{self.kit.token}")
            for address in (self.address, self._service):
                route.addr("add", index=index, address=address, prefixlen=32)
            route.link("set", index=index, state="up")

    def _start_scheduler(self, kube: Kube) -> None:
        port = free_port()
        command: list[str | Path] = [
            PROGRAMS / "kube-scheduler",
            f"--kubeconfig={kube.user('scheduler', 'system:kube-scheduler')}",
            "--leader-elect=false",
            "--bind-address=127.0.0.1",
            f"--secure-port={port}",
            "--port=0",
            *kube.serving(),
        ]
        scheduler = Program(kube.base / "kube-scheduler.log", command)
        self._programs.append(scheduler)
        scheduler.start(lambda: kube.answers(f"https://127.0.0.1:{port}/healthz"))

    def _start_kubelet(self, kube: Kube) -> None:
        """Start containerd and kubelet, and wait until the node is ready."""
        daemon = self.kit.daemon(gateway=True)
        for hierarchy in hierarchies():
            (hierarchy / self.node).mkdir()
        kubeconfig = kube.user("kubelet", f"system:node:{self.node}", "system:nodes", (f"IP:{self.address}",))
        certificate, key = kube.pair("kubelet")
        root = self.kit.base / "kubelet"
        config = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": self.address,
            "port": KUBELET_PORT,
            "healthzPort": 0,
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(kube.authority.crt)},
            },
            "authorization": {"mode": "Webhook"},
            "tlsCertFile": certificate,
            "tlsPrivateKeyFile": key,
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self.node}",
            "enforceNodeAllocatable": [],
            "evictionHard": {
                "memory.available": "100Mi",
                "nodefs.available": "1%",
                "imagefs.available": "1%",
            },
            "failSwapOn": False,
            "featureGates": {"DevicePlugins": False},  # their socket has a fixed place
            "imageGCHighThresholdPercent": 100,
            "makeIPTablesUtilChains": False,
            "nodeStatusUpdateFrequency": "5s",
            "volumePluginDir": str(root / "plugins"),
        }
        path = kube.base / "kubelet.json"
        path.write_text(json.dumps(config))
        command: list[str | Path] = [
            PROGRAMS / "kubelet",
            f"--config={path}",
            f"--kubeconfig={kubeconfig}",
            f"--root-dir={root}",
            f"--seccomp-profile-root={root / 'seccomp'}",
            f"--hostname-override={self.node}",
            f"--node-ip={self.address}",
            "--container-runtime=remote",
            f"--container-runtime-endpoint=unix://{daemon.socket}",
        ]
        kubelet = Program(kube.base / "kubelet.log", command)
        self._programs.append(kubelet)
        kubelet.start(self._is_ready)

    def _is_ready(self) -> bool:
        assert self.kube
        answer = self.kube.request("GET", f"/api/v1/nodes/{self.node}")
        if answer.status != 200:  # it registers itself
            return False
        conditions = {item["type"]: item["status"] for item in answer.body["status"].get("conditions", [])}
        if conditions.get("Ready") != "True" or answer.body["spec"].get("taints"):
            return False
        account = self.kube.request("GET", "/api/v1/namespaces/default/serviceaccounts/default")
        return bool(account.body.get("secrets"))  # before that no pod is admitted

    def import_image(self, image: Path) -> str:
        """Make an image of :mod:`tests.real.images` known to the node; return the name for a pod."""
        return self.kit.daemon().import_image(image, KUBERNETES)

    def resident(self) -> int:
        """Tell the resident memory of control plane and kubelet in bytes, without containerd."""
        return sum(program.resident() for program in self.programs())

    def close(self) -> None:
        """End the programs, put back what they changed for the whole machine; the kit takes the rest away."""
        try:
            for program in reversed(self._programs):
                program.stop()
            if self.kube:
                self.kube.close()
                self._remove_logs()
        finally:
            for name, value in self._sysctls.items():
                if _sysctl(name).read_text().strip() != value:
                    _sysctl(name).write_text(value)

    def _remove_logs(self) -> None:
        """Remove what the kubelet left of pods that containerd still knows, or that were just deleted."""
        answer = self.kit.daemon(gateway=True).wire.call("runtime.v1.RuntimeService/ListPodSandbox")
        known = {item["metadata"]["uid"] for item in answer["items"]}
        # It removes the logs of deleted pods by and by; its own log names their volumes, and so them.
        said = self._programs[-1].tail(lines=1_000_000)
        known |= {
            uid for path in POD_LOGS.glob("*_*_*") if (uid := path.name.rpartition("_")[2]) and uid in said
        }
        for uid in known:
            for link in CONTAINER_LOGS.glob("*.log"):
                if link.is_symlink() and uid in os.readlink(link):
                    link.unlink()
            for folder in POD_LOGS.glob(f"*_{uid}"):
                shutil.rmtree(folder)
        for folder in self._log_folders:
            with contextlib.suppress(OSError):  # another one's kubelet may use it now
                folder.rmdir()
